"""When reuse pays: the time to the first token, cold and with a part of the prompt stored.

`python3 -m studies.latency` takes about five minutes. Without --model, the model has GPT-2 124M's
geometry and random weights, since times don't depend on them. A prompt of m tokens has k of them
stored: a share of so many percent, or all but the last (100).

first       milliseconds to the first token, restoring included
restore     milliseconds to restore the cache
saved       share of the time to the first token that is saved, turn by turn
saved_all   the same to the last of 100 tokens, after the longest prompt that leaves room
cost        time to restore all but the last token, as a share of reading the prompt: over prompts
pays        stored tokens from which reuse pays if one is left to read, in powers of two
"""

import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import NAMES
from recycle import Store, read_all
from studies.core import Rows, StudyLine, model_of, points_over, recorded, report
from support.cli import GEOMETRIES
from support.timing import run_in_turns, time_text

SHARES = (0, 25, 50, 75, 90, 100)  # percent of a prompt that is stored; 100: all but its last token
LENGTHS, QUICK = (64, 128, 256, 512, 1000), (128,)
DEPTHS = tuple(2**i for i in range(9))  # stored, with one more token to read
DECODED = 100  # tokens written after a prompt, for times from end to end
EQUAL = 0.03  # ours: times to a first token that differ by less are equal


def drop_from_memory(folder: Path) -> None:
    """Let the operating system forget the content of files, so that they come from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def times(
    model: GPT, ids: list[int], n: int, store: Store | None, forgotten: bool, turn: int
) -> tuple[float, float, float]:
    """Return the seconds to restore what is stored of a prompt, and with them those to its first
    and to its last of n tokens."""
    if forgotten:
        drop_from_memory(store.folder)
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    begun = time.perf_counter()
    cache = store.get(ids) if store else model.new_cache()
    restored = time.perf_counter() - begun
    run = time_text(lambda: generate(model, prompt, n, cache=cache))
    return restored, restored + run.first_token_seconds, restored + run.total_seconds


def measure(rows: Rows, model: GPT, name: str, lengths: Sequence[int], turns: int) -> None:
    """Append the times of prompts of these lengths by where and how much of them is stored."""
    n_ctx, generator = model.config.n_ctx, torch.Generator().manual_seed(0)
    lengths = [m for m in lengths if m <= n_ctx]
    cells = [(m, share) for m in lengths for share in SHARES]
    cells += [(k + 1, 100) for k in DEPTHS if k < max(lengths)]
    whole = max((m for m in lengths if m + DECODED <= n_ctx), default=0)
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        memory, disk = Store(model), Store(model, folder)
        places = {"cold": (None, False), "memory": (memory, False), "warm-disk": (disk, False)}
        if hasattr(os, "posix_fadvise"):
            places["cold-disk"] = disk, True
        for m, share in cells:
            at = {"model": name, "m": m, "share": share}
            if not rows.due(["cold"], "first", **at):
                continue
            ids = torch.randint(model.config.vocab_size, (m,), generator=generator).tolist()
            k = min(round(share * m / 100), m - 1)
            for store in (memory, disk):
                store.clear()
                if k:
                    store.put(ids, read_all(model, ids[:k]))
            runs = {way: partial(times, model, ids, 1, *place) for way, place in places.items()}
            if (m, share) == (whole, 90):
                for way in ("cold", "warm-disk"):
                    runs[way] = partial(times, model, ids, DECODED, *places[way])
            found = {
                way: np.transpose(several) for way, several in run_in_turns(runs, turns).items()
            }
            _, cold, cold_last = found["cold"]
            if (m, share) == (whole, 90):
                rows.add("warm-disk", at, saved_all=1 - found["warm-disk"][2] / cold_last)
            # "cold" comes last: a cell that has it is whole
            for way, (restore, first, _) in reversed(found.items()):
                rows.add(way, at, first=1e3 * first, saved=1 - first / cold)
                if way != "cold":
                    rows.add(way, at, restore=1e3 * restore)
    summed_up(rows, name, lengths)


def summed_up(rows: Rows, name: str, lengths: Sequence[int]) -> None:
    """Append what restoring costs, and from how many stored tokens on reuse pays."""
    known = [k + 1 for k in DEPTHS if k < max(lengths)]
    for way in rows.due(("memory", "warm-disk", "cold-disk"), "cost", model=name):
        of_way = partial(points_over, rows, key="m", at={"model": name, "share": 100})
        cold = {m: ms for m, ms, *_ in of_way("cold", "first")}
        shares = [ms / cold[m] for m, ms, *_ in of_way(way, "restore")]
        lost = [m - 1 for m, saved, *_ in of_way(way, "saved") if m in known and saved <= EQUAL]
        most = max(lost, default=0)
        if shares:
            if most < known[-1] - 1:
                rows.add(way, {"model": name}, pays=[2 * most or 1])
            rows.add(way, {"model": name}, cost=shares)  # last: a way that has it is whole


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "latency",
        "short prompts only, once each",
        models=f"random weights of the size of {GEOMETRIES}; or {NAMES}",
    )
    cli.set_defaults(model="124M")
    with cli.parse(argv) as args:
        model, name = model_of(args)
        lengths, turns = (QUICK, 1) if args.quick else (LENGTHS, 5)
        rows = recorded("latency", args, "run of another model" if args.model != "124M" else "")
        rows.paper["usual"]["model"] = args.model
        rows.begin_with(name, model, f"turns: {turns}")
        measure(rows, model, args.model, lengths, turns)
        report(rows)
