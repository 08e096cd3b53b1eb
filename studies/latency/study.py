"""When reuse pays: the time to the first token, cold and with a part of the prompt stored.

`python3 -m studies.latency` takes about five minutes. Without --model, the model has GPT-2 124M's
geometry and random weights, since times don't depend on them. Of a prompt's m tokens, k are stored:
a share in percent, where 100 means all but the last.

first       milliseconds to the first token, restoring included
restore     milliseconds to restore the cache
saved       share of the time to the first token that is saved, turn by turn
cost        time to restore all but the last token, as a share of the time to read the prompt; a
            value for each length
pays        fewest stored tokens, a power of two, from which on reuse pays if one is left to read
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import NAMES
from recycle import Store, prefilled_cache
from studies.core import load_chosen_model, run_study
from studies.latency.claims import LENGTHS
from studies.results import Results
from support.conditions import GEOMETRIES
from support.timing import run_in_turns, time_call, time_text

STORED_PERCENTS = (0, 25, 50, 75, 90, 100)  # of a prompt; 100: all but its last token
EQUAL_SHARE = 0.03  # ours: times to a first token that differ by less count as equal


class Size(NamedTuple):
    """Prompts of how many tokens are timed, how many tokens are stored of those of which one is left
    to read, and how often."""

    lengths: tuple[int, ...] = LENGTHS
    stored: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    turns: int = 5


QUICK = Size(lengths=(128,), stored=(1, 8, 64), turns=1)


def evict_from_page_cache(folder: Path) -> None:
    """Make the operating system drop files from its page cache, so that they are read from the
    disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_first_token(
    model: GPT, ids: list[int], way: str, store: Store | None, turn: int
) -> tuple[float, float]:
    """Return the milliseconds to restore what is stored of a prompt, and those to the first token,
    restoring included."""
    if way == "cold-disk":
        evict_from_page_cache(store.folder)
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    restore_seconds, cache = time_call(lambda: store.get(ids) if store else model.new_cache())
    seconds = time_text(lambda: generate(model, prompt, 1, cache=cache)).first_token_seconds
    return 1e3 * restore_seconds, 1e3 * (restore_seconds + seconds)


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Append the times of prompts, for each place and each share that is stored."""
    size = QUICK if args.quick else Size()
    model, name = load_chosen_model(args)
    rows.set_model_conditions(name, model, f"turns: {size.turns}")
    cases = [(length, percent) for length in size.lengths for percent in STORED_PERCENTS]
    cases += [(stored + 1, 100) for stored in size.stored]
    cases = [(length, percent) for length, percent in cases if length <= model.config.n_ctx]
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        memory_store, disk_store = Store(model), Store(model, folder)
        stores = {"cold": None, "memory": memory_store, "warm-disk": disk_store}
        if hasattr(os, "posix_fadvise"):
            stores["cold-disk"] = disk_store
        for length, percent in cases:
            setting = {"model": args.model, "m": length, "share": percent}
            if not rows.ways_due(stores, "first", **setting):
                continue
            ids = torch.randint(model.config.vocab_size, (length,)).tolist()
            stored = min(round(percent * length / 100), length - 1)
            for store in (memory_store, disk_store):
                store.clear()
                if stored:
                    store.put(ids[:stored], prefilled_cache(model, ids[:stored]))
            runs = {
                way: partial(time_first_token, model, ids, way, store)
                for way, store in stores.items()
            }
            times = run_in_turns(runs, size.turns)
            _, cold = np.transpose(times["cold"])
            for way in stores:
                restore, first = np.transpose(times[way])
                if way != "cold":
                    rows.add_values(way, setting, restore=restore, saved=1 - first / cold)
                rows.add_values(way, setting, first=first)
    lengths = sorted({length for length, percent in cases if percent == 100})
    for way in rows.ways_due([*stores][1:], "cost", model=args.model):
        add_costs(rows, way, args.model, lengths, size)


def add_costs(rows: Results, way: str, model_name: str, lengths: list[int], size: Size) -> None:
    """Append what restoring costs, and from how many stored tokens on reuse pays."""
    setting = {"model": model_name}
    costs, unpaid = [], [0]
    for length in lengths:
        cold, restore, saved = (
            rows.figure(name, metric, m=length, share=100, **setting).value
            for name, metric in (("cold", "first"), (way, "restore"), (way, "saved"))
        )
        costs.append(restore / cold)
        if length - 1 in size.stored and saved <= EQUAL_SHARE:
            unpaid.append(length - 1)
    if unpaid[-1] < size.stored[-1]:
        rows.add_values(way, setting, pays=[2 * unpaid[-1] or 1])
    rows.add_values(way, setting, cost=costs)


main = partial(
    run_study,
    __doc__,
    "latency",
    "short prompts only, once each",
    measure,
    recorded_models=["124M"],
    models=f"random weights of the size of {GEOMETRIES}; or {NAMES}",
)
