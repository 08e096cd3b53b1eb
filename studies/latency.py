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
from recycle import Store, read_all, timed
from studies.core import Rows, StudyLine, in_turn, model_of, recorded, report
from support.cli import GEOMETRIES

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


@torch.no_grad()
def first_token(
    model: GPT, ids: list[int], store: Store | None, forgotten: bool, turn: int
) -> tuple[float, float]:
    """Return the seconds to restore what is stored of a prompt, and to its first token in all."""
    if forgotten:
        drop_from_memory(store.folder)
    begun = time.perf_counter()
    cache = store.get(ids) if store else model.new_cache()
    restored = time.perf_counter() - begun
    new = torch.tensor([ids[len(cache) :]], device=model.wte.weight.device)
    int(model(new, cache, last_only=True).argmax())  # int() waits for the device
    return restored, time.perf_counter() - begun


def all_tokens(model: GPT, ids: list[int], store: Store | None, turn: int) -> float:
    """Return the seconds to the last of DECODED tokens after a prompt."""
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    cache = (lambda: store.get(ids)) if store else model.new_cache
    return timed(lambda: generate(model, prompt, DECODED, cache=cache())).total


def measure(rows: Rows, model: GPT, name: str, lengths: Sequence[int], turns: int) -> None:
    """Append the times of prompts of these lengths by where and how much of them is stored."""
    n_ctx, generator = model.config.n_ctx, torch.Generator().manual_seed(0)
    lengths = [m for m in lengths if m <= n_ctx]
    cells = [(m, share) for m in lengths for share in SHARES]
    cells += [(k + 1, 100) for k in DEPTHS if k < max(lengths)]
    whole = max((m for m in lengths if m + DECODED <= n_ctx), default=0)
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        memory, disk = Store(model), Store(model, folder)
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
            runs = {
                "cold": partial(first_token, model, ids, None, False),
                "memory": partial(first_token, model, ids, memory, False),
                "warm-disk": partial(first_token, model, ids, disk, False),
            }
            if hasattr(os, "posix_fadvise"):
                runs["cold-disk"] = partial(first_token, model, ids, disk, True)
            times = {way: np.array(found).T for way, found in in_turn(runs, turns).items()}
            if (m, share) == (whole, 90):
                runs = {place: partial(all_tokens, model, ids, place) for place in (None, disk)}
                cold, warm = in_turn(runs, turns).values()
                rows.add("warm-disk", at, saved_all=1 - np.divide(warm, cold))
            # "cold" comes last: a cell that has it is whole
            for way, (restore, first) in reversed(times.items()):
                rows.add(way, at, first=1e3 * first, saved=1 - first / times["cold"][1])
                if way != "cold":
                    rows.add(way, at, restore=1e3 * restore)
    summed_up(rows, name, lengths)


def summed_up(rows: Rows, name: str, lengths: Sequence[int]) -> None:
    """Append what restoring costs, and from how many stored tokens on reuse pays."""
    known = [k + 1 for k in DEPTHS if k < max(lengths)]
    for way in rows.due(("memory", "warm-disk", "cold-disk"), "cost", model=name):
        shares, lost = [], 0
        for m in sorted({*known, *lengths}):
            at = {"model": name, "m": m, "share": 100}
            restore, cold = rows.figure(way, "restore", **at), rows.figure("cold", "first", **at)
            if restore is None:
                continue
            shares.append(restore.value / cold.value)
            if m in known and rows.figure(way, "saved", **at).value <= EQUAL:
                lost = m - 1
        if shares:
            rows.add(way, {"model": name}, cost=shares)
            if lost < known[-1] - 1:
                rows.add(way, {"model": name}, pays=[2 * lost or 1])


def main(argv: list[str] | None = None) -> None:
    models = f"random weights of the size of {GEOMETRIES}; or {NAMES}"
    cli = StudyLine(__doc__, "latency", "short prompts only, once each", models=models)
    cli.set_defaults(model="124M")
    with cli.parse(argv) as args:
        model, name = model_of(args)
        lengths, turns = (QUICK, 1) if args.quick else (LENGTHS, 5)
        rows = recorded("latency", args, "run of another model" if args.model != "124M" else "")
        rows.paper["usual"]["model"] = args.model
        rows.begin_with(name, model, f"turns: {turns}")
        measure(rows, model, args.model, lengths, turns)
        report(rows)


if __name__ == "__main__":
    main()
