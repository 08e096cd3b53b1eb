"""A call of a function under test, with what every task promises beside its result."""

import copy
import random
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def call(function: Callable[..., Any], *arguments: object, returns: str, **options: object) -> Any:
    """Return what a function returns. Fail if its types aren't `returns`, such as "tuple[int, list[float]]" or
    "float32 (2, 3)", a tensor's dtype and shape; or if it has changed an argument: a list, a dictionary, a tensor or
    an array."""
    __tracebackhide__ = True
    given = [x for x in (*arguments, *options.values()) if isinstance(x, CHANGEABLE)]
    before = copy.deepcopy(given)
    result = function(*arguments, **options)
    for now, was in zip(given, before, strict=True):
        change = f"{reprlib.repr(was)} to {reprlib.repr(now)}"
        assert is_same(now, was), f"the call has changed one of its arguments, from {change}"
    types = types_of(result)
    pattern = re.escape(types).replace(r"list\[\]", r"list\[.*\]")  # an empty one
    assert re.fullmatch(pattern, returns), f"the call returns {types}, must be {returns}"
    return result


CHANGEABLE = (list, dict, Tensor, np.ndarray)


def is_same(one: Any, other: Any) -> bool:
    """Whether an argument is equal to its copy."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@contextmanager
def shared_generators_unchanged() -> Iterator[None]:
    """Fail if something draws from the generators that all parts of a program share."""

    def states() -> list[object]:
        _, numbers, *rest = np.random.get_state()
        return [random.getstate(), numbers.tolist(), rest, torch.get_rng_state().tolist()]

    before = states()
    yield
    assert states() == before, (
        "the generator of random numbers that others use was seeded or drawn from: make your own"
    )


def types_of(x: object) -> str:
    """The types of a result, such as "tuple[int, list[float]]" or "float32 (2, 3)"."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.")
    if type(x) is tuple:
        return f"tuple[{', '.join(map(types_of, x))}]"
    if type(x) is list:
        return f"list[{' | '.join(sorted({*map(types_of, x)}))}]"
    return type(x).__name__
