"""When reuse pays: the time to the first token, cold and with a part of the prompt stored.

`python3 -m studies.latency` takes about five minutes. Without --model, the model has GPT-2 124M's
geometry and random weights, since times don't depend on them. Of a prompt's m tokens, a share in
percent is stored, where 100 means all but the last.

first       milliseconds to the first token, restoring included
restore     milliseconds to restore the cache
saved       share of the time to the first token that is saved, turn by turn
cost        time to restore all but the last token, as a share of the time to read the prompt; a
            value for each length
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

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
SHORT_LENGTHS = tuple(2**i + 1 for i in range(9))  # of prompts of which all but one token is stored


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
    model, name = load_chosen_model(args)
    turns = 1 if args.quick else 5
    rows.set_model_conditions(name, model, f"turns: {turns}")
    lengths = [128] if args.quick else [m for m in LENGTHS if m <= model.config.n_ctx]
    cases = [(m, percent) for m in lengths for percent in STORED_PERCENTS]
    cases += [(m, 100) for m in SHORT_LENGTHS]
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        memory_store, disk_store = Store(model), Store(model, folder)
        stores = {"cold": None, "memory": memory_store, "warm-disk": disk_store}
        if hasattr(os, "posix_fadvise"):
            stores["cold-disk"] = disk_store
        for m, percent in cases:
            setting = {"model": args.model, "m": m, "share": percent}
            if not rows.ways_due(stores, "first", **setting):
                continue
            ids = torch.randint(model.config.vocab_size, (m,)).tolist()
            stored = ids[: min(round(percent * m / 100), m - 1)]
            for store in (memory_store, disk_store):
                store.clear()
                if stored:
                    store.put(stored, prefilled_cache(model, stored))
            runs = {
                way: partial(time_first_token, model, ids, way, store)
                for way, store in stores.items()
            }
            times = run_in_turns(runs, turns)
            _, cold = np.transpose(times["cold"])
            for way in stores:
                restore, first = np.transpose(times[way])
                rows.add_values(way, setting, restore=restore, saved=1 - first / cold, first=first)
    there = rows.at(model=args.model, share=100)
    for way in rows.ways_due([*stores][1:], "cost", model=args.model):
        costs = []
        for m in (*SHORT_LENGTHS, *lengths):
            restore, read = there.figure(way, "restore", m=m), there.figure("cold", "first", m=m)
            costs.append(restore.value / read.value)
        rows.add_values(way, {"model": args.model}, cost=costs)


main = partial(
    run_study,
    __doc__,
    "latency",
    "short prompts only, once each",
    measure,
    recorded_models=["124M"],
    models=f"random weights of the size of {GEOMETRIES}; or {NAMES}",
)
