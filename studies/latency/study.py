"""When reuse pays: the time to the first token, cold and with a part of the prompt stored.

`python3 -m studies.latency` takes about five minutes. Without --model, the model has GPT-2 124M's
geometry and random weights, since times don't depend on them. Of a prompt's m tokens, k are stored:
a share in percent, where 100 means all but the last.

first       milliseconds to the first token, restoring included
restore     milliseconds to restore the cache
saved       share of the time to the first token that is saved, turn by turn
saved_all   the same for the time to the last of 100 new tokens, after the longest prompt that
            leaves room for them
cost        time to restore all but the last token, as a share of the time to read the prompt; a
            value for each length
pays        fewest stored tokens, a power of two, from which on reuse pays if one is left to read
"""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import NAMES
from recycle import Store, prefilled_cache
from studies.core import StudyLine, load_chosen_model, open_results, report
from studies.results import Results, Setting
from studies.showing import points_over
from support.conditions import GEOMETRIES
from support.timing import run_in_turns, time_call, time_text

STORED_PERCENTS = (0, 25, 50, 75, 90, 100)  # of a prompt; 100: all but its last token
PROMPT_LENGTHS, QUICK_LENGTHS = (64, 128, 256, 512, 1000), (128,)
STORED_TOKENS = tuple(2**i for i in range(9))  # with one more token to read
NEW_TOKENS = 100  # tokens written after a prompt, for times from end to end
EQUAL_SHARE = 0.03  # ours: times to a first token that differ by less count as equal


def evict_from_page_cache(folder: Path) -> None:
    """Make the operating system drop files from its page cache, so that they are read from the
    disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_prompt(
    model: GPT, ids: list[int], way: str, store: Store | None, new_tokens: int, turn: int
) -> tuple[float, float, float]:
    """Return the seconds to restore what is stored of a prompt, and those to the first and to the
    last new token, restoring included."""
    if way == "cold-disk":
        evict_from_page_cache(store.folder)
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    restore_seconds, cache = time_call(lambda: store.get(ids) if store else model.new_cache())
    timed_text = time_text(lambda: generate(model, prompt, new_tokens, cache=cache))
    return (
        restore_seconds,
        restore_seconds + timed_text.first_token_seconds,
        restore_seconds + timed_text.total_seconds,
    )


def measure(rows: Results, model: GPT, model_name: str, lengths: Sequence[int], turns: int) -> None:
    """Append the times of prompts of these lengths, for each place and each share that is
    stored."""
    n_ctx, generator = model.config.n_ctx, torch.Generator().manual_seed(0)
    lengths = [length for length in lengths if length <= n_ctx]
    cases = [(length, percent) for length in lengths for percent in STORED_PERCENTS]
    cases += [(stored + 1, 100) for stored in STORED_TOKENS if stored < max(lengths)]
    lengths_with_room = [length for length in lengths if length + NEW_TOKENS <= n_ctx]
    end_to_end_case = max(lengths_with_room, default=0), 90
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        memory_store, disk_store = Store(model), Store(model, folder)
        stores = {"cold": None, "memory": memory_store, "warm-disk": disk_store}
        if hasattr(os, "posix_fadvise"):
            stores["cold-disk"] = disk_store
        for prompt_length, percent in cases:
            setting = {"model": model_name, "m": prompt_length, "share": percent}
            if not rows.ways_due(["cold"], "first", **setting):
                continue
            shape = (prompt_length,)
            ids = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
            stored = min(round(percent * prompt_length / 100), prompt_length - 1)
            for store in (memory_store, disk_store):
                store.clear()
                if stored:
                    store.put(ids[:stored], prefilled_cache(model, ids[:stored]))
            end_to_end = (prompt_length, percent) == end_to_end_case
            runs = {}
            for way, store in stores.items():
                new_tokens = NEW_TOKENS if end_to_end and way in ("cold", "warm-disk") else 1
                runs[way] = partial(time_prompt, model, ids, way, store, new_tokens)
            turn_times = run_in_turns(runs, turns)
            times = {way: np.transpose(triples) for way, triples in turn_times.items()}
            if end_to_end:
                saved = 1 - times["warm-disk"][2] / times["cold"][2]
                rows.add_values("warm-disk", setting, saved_all=saved)
            add_times(rows, setting, times)
    add_costs(rows, model_name, lengths)


def add_times(rows: Results, setting: Setting, times: dict[str, np.ndarray]) -> None:
    """Append the seconds (3, turns) of each way: to restore, to the first token, and to the last."""
    cold_seconds = times["cold"][1]
    # "cold" comes last: a case that has it is complete
    for way, (restore_seconds, first_seconds, _) in reversed(times.items()):
        saved = 1 - first_seconds / cold_seconds
        rows.add_values(way, setting, first=1e3 * first_seconds, saved=saved)
        if way != "cold":
            rows.add_values(way, setting, restore=1e3 * restore_seconds)


def add_costs(rows: Results, model_name: str, lengths: Sequence[int]) -> None:
    """Append what restoring costs, and from how many stored tokens on reuse pays."""
    measured_lengths = [stored + 1 for stored in STORED_TOKENS if stored < max(lengths)]
    for way in rows.ways_due(("memory", "warm-disk", "cold-disk"), "cost", model=model_name):
        points = partial(points_over, rows, key="m", setting={"model": model_name, "share": 100})
        cold_ms = {length: ms for length, ms, *_ in points("cold", "first")}
        cost_shares = [ms / cold_ms[length] for length, ms, *_ in points(way, "restore")]
        unpaid = [
            length - 1
            for length, saved, *_ in points(way, "saved")
            if length in measured_lengths and saved <= EQUAL_SHARE
        ]
        largest_unpaid = max(unpaid, default=0)
        if cost_shares:
            if largest_unpaid < measured_lengths[-1] - 1:
                rows.add_values(way, {"model": model_name}, pays=[2 * largest_unpaid or 1])
            # last: a way that has it is complete
            rows.add_values(way, {"model": model_name}, cost=cost_shares)


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "latency",
        "short prompts only, once each",
        models=f"random weights of the size of {GEOMETRIES}; or {NAMES}",
    )
    cli.set_defaults(model="124M")
    with cli.parse(argv) as args:
        model, name = load_chosen_model(args)
        lengths, turns = (QUICK_LENGTHS, 1) if args.quick else (PROMPT_LENGTHS, 5)
        rows = open_results("latency", args, ["124M"])
        rows.set_model_conditions(name, model, f"turns: {turns}")
        measure(rows, model, args.model, lengths, turns)
        report(rows)
