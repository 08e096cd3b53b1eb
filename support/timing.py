"""Timing: a call, a text, and several runs that take turns."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class TimedText(NamedTuple):
    """The tokens of a generation, and the seconds to the first of them and to the last."""

    ids: list[int]
    first_token_seconds: float
    total_seconds: float


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call took, and what it returned. On a GPU the call itself has to
    wait for its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def time_text(
    generation: Callable[[], Iterator[Tensor]], end_tokens: Sequence[int] = ()
) -> TimedText:
    """Run a generation to its end, or to one of the tokens that end a text; int() waits for the device."""
    ids: list[int] = []
    first_token_seconds = 0.0
    started = time.perf_counter()
    for token in generation():
        ids.append(int(token))
        if len(ids) == 1:
            first_token_seconds = time.perf_counter() - started
        if ids[-1] in end_tokens:
            break
    return TimedText(ids, first_token_seconds, time.perf_counter() - started)


def run_in_turns(
    runs: dict[Hashable, Callable[[int], Any]], turns: int, warm_up: bool = True
) -> dict[Hashable, list[Any]]:
    """Return, by name, a list of what each run returned in each turn.

    In a turn every run is called once with the turn's number, so whatever disturbs the machine
    disturbs all of them. Each turn begins with another run. warm_up: call every run once before,
    and ignore the result.
    """
    if warm_up:
        for run in runs.values():
            run(0)
    results = {name: [] for name in runs}
    order = [*runs]
    for turn in range(turns):
        for name in order:
            results[name].append(runs[name](turn))
        order = order[1:] + order[:1]
    return results
