"""When reuse pays: the time to the first token, cold and with a part of the prompt stored.

Without --model, the model has GPT-2 124M's geometry and random weights, since times don't depend on them. All times
are medians of runs in turn, in one process.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import NAMES, load_model
from recycle import Store, read_all
from studies.protocol import StudyLine
from support.cli import whole_number
from support.conditions import SIZES, conditions, is_geometry, random_model
from support.figures import figure
from support.files import write_json
from support.tables import Table, page

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of a prompt that is stored; 1: all but its last token
LENGTHS = (64, 128, 256, 512, 1000)
QUICK = (64, 256)
SOURCES = ("memory", "warm disk", "cold disk")
DECODED = 100  # tokens written after a prompt, for times from end to end


@dataclass
class Run:
    """One generation: its tokens, and the seconds to the first of them and to the last."""

    ids: list[int]
    ttft: float
    total: float


def timed(generation: Callable[[], Iterator[Tensor]]) -> Run:
    """Run a generation to its end; int() waits for the device."""
    ids, ttft, begun = [], 0.0, time.perf_counter()
    for token in generation():
        ids.append(int(token))
        ttft = ttft or time.perf_counter() - begun
    return Run(ids, ttft, time.perf_counter() - begun)


def model_of(args: argparse.Namespace) -> tuple[GPT, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name in a record."""
    if is_geometry(args.model):
        return random_model(GPT, args.model).to(args.device, args.dtype), f"{args.model}, random weights"
    return load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype), args.model


def drop_from_memory(folder: Path) -> bool:
    """Let the operating system forget the content of files, so that they come from the disk; False if it can't."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # only what is on the disk can be forgotten
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True


@torch.no_grad()
def measure(model: GPT, repeats: int, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Measure the time to the first token of prompts of m tokens, cold and with k of them stored, by where they are.

    Returns seconds: cells, one for each m and k, with cold and, for each of SOURCES, restore, ttft, and the median
    ratio of ttft to the cold run of the same turn; answers, from the prompt to the last of DECODED tokens; and
    crossover, by source, the smallest k that pays for a prompt of k tokens and one more.
    """
    device, n_ctx = model.wte.weight.device, model.config.n_ctx
    lengths = [m for m in lengths if m <= n_ctx] or [n_ctx]
    generator = torch.Generator().manual_seed(0)
    stores = {"memory": Store(model)}
    with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
        stores["warm disk"] = stores["cold disk"] = Store(model, folder)

        def first_token(ids: Tensor, cache: KVCache) -> float:
            begun = time.perf_counter()
            int(model(ids[:, len(cache) :], cache, last_only=True).argmax())  # int() waits for the device
            return time.perf_counter() - begun

        def cell(m: int, k: int) -> dict[str, Any]:
            ids = torch.randint(model.config.vocab_size, (1, m), generator=generator)
            text, ids = ids[0].tolist(), ids.to(device)
            for store in (stores["memory"], stores["warm disk"]):
                if k:
                    store.put(text, read_all(model, text[:k]))
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("cold", *stores)}
            for _ in range(repeats):
                taken["cold"].append((0.0, first_token(ids, KVCache())))
                for source, store in stores.items():
                    if source == "cold disk" and not drop_from_memory(store.folder):
                        continue
                    begun = time.perf_counter()
                    cache = store.get(text)
                    restore = time.perf_counter() - begun
                    if len(cache) != k:
                        raise RuntimeError(f"the store gave {len(cache)} tokens instead of {k}")
                    taken[source].append((restore, restore + first_token(ids, cache)))
            for store in (stores["memory"], stores["warm disk"]):
                store.clear()
            cold = [ttft for _, ttft in taken.pop("cold")]
            result: dict[str, Any] = {"m": m, "k": k, "cold": statistics.median(cold)}
            for source, pairs in taken.items():
                if pairs:
                    restores, ttfts = zip(*pairs, strict=True)
                    ratio = statistics.median(ttft / beside for ttft, beside in zip(ttfts, cold, strict=True))
                    result[source] = {"restore": statistics.median(restores), "ttft": statistics.median(ttfts),
                                      "ratio": ratio}  # fmt: skip
            return result

        def answer(m: int, k: int) -> dict[str, Any]:
            ids = torch.randint(model.config.vocab_size, (1, m), generator=generator)
            text, ids, store = ids[0].tolist(), ids.to(device), stores["warm disk"]
            store.put(text, read_all(model, text[:k]))
            seconds: list[tuple[float, float]] = []
            for _ in range(max(1, repeats // 2)):
                seconds.append((
                    timed(lambda: generate(model, ids, DECODED)).total,
                    timed(lambda: generate(model, ids, DECODED, cache=store.get(text))).total,
                ))  # fmt: skip
            store.clear()
            cold, warm = map(statistics.median, zip(*seconds, strict=True))
            saved = statistics.median(1 - b / a for a, b in seconds)
            return {"m": m, "k": k, "cold": cold, "warm disk": warm, "saved": saved}

        grid = [(m, min(round(share * m), m - 1)) for m in lengths for share in SHARES]
        cell(*grid[-1])  # warms up
        cells = [cell(m, k) for m, k in tqdm(grid, desc="law", leave=False)]
        depths = [2**i for i in range(9) if 2**i < max(lengths)]
        scan = [cell(k + 1, k) for k in tqdm(depths, desc="crossover", leave=False)]
        whole = [m for m in lengths if m + DECODED <= n_ctx][-1 if repeats == 1 else 0 :]  # once: the longest only
        answers = [answer(m, round(share * m)) for m, share in tqdm(
            [(m, share) for m in whole for share in (0.5, 0.9)], desc="answers", leave=False)]  # fmt: skip
    crossover = {}
    for source in SOURCES:
        pays = [source in c and c[source]["ratio"] < 0.97 for c in scan]  # 3% are taken for noise
        last_loss = max((i for i, p in enumerate(pays) if not p), default=-1)
        crossover[source] = scan[last_loss + 1]["k"] if last_loss + 1 < len(scan) else None
    return {"layers": model.config.n_layer, "width": model.config.n_embd, "threads": torch.get_num_threads(),
            "device": str(device), "repeats": repeats, "cells": cells, "answers": answers, "scan": scan,
            "crossover": crossover}  # fmt: skip


def tables(law: dict[str, Any], model: str = "", lengths: Sequence[int] = (),
           shares: Sequence[float] = ()) -> list[str | Table]:  # fmt: skip
    """Return times to the first token for all or some lengths and stored shares, what is saved also of whole answers,
    and from how many stored tokens on reuse pays."""
    sources = [source for source in SOURCES if source in law["cells"][0]]
    rows = []
    for c in law["cells"]:
        if c["m"] in (lengths or [c["m"]]) and (not shares or round(c["k"] / c["m"], 2) in shares):
            answer = [f"{a['saved']:.0%}" for a in law["answers"] if (a["m"], a["k"]) == (c["m"], c["k"])]
            rows.append([f"{c['m']:,}, {c['k']}", f"{1e3 * c['cold']:.3g} ms",
                         *(f"{1e3 * c[s]['ttft']:.3g} ms ({1e3 * c[s]['restore']:.2g})" for s in sources),
                         f"{1 - c['warm disk']['ratio']:.0%}", *(answer or ["-"])])  # fmt: skip
    pays = ", ".join(f"{law['crossover'][s] or 'none measured'} ({s})" for s in sources)
    return [
        f"When does reuse pay? {law['layers']} layers of width {law['width']}{model}, {law['threads']} "
        f"{law['device'].upper()} thread{'s' * (law['threads'] > 1)}, medians of {law['repeats']}; in brackets the "
        "time to restore the cache:",
        Table(["prompt, stored", "first token: cold", *sources, "saved", f"saved with {DECODED} tokens"], rows),
        "The last two columns are from the warm disk; a dash: not measured, since prompt and answer exceed the context "
        "or, with one repeat, the prompt isn't the longest. Stored tokens from which reuse pays, if only one token is "
        f"left to read: {pays}. If more tokens are left to read, that number is higher.",
    ]  # fmt: skip


def draw(measured: dict[str, Any], out: Path, name: str) -> None:
    """Draw the time to the first token that reuse saves, over k/m."""

    def curves(axes: Any) -> None:
        for i, m in enumerate(sorted({c["m"] for c in measured["cells"]})):
            cells = [c for c in measured["cells"] if c["m"] == m]
            style = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))[i % 5]
            axes.plot([c["k"] / m for c in cells], [100 * (1 - c["warm disk"]["ratio"]) for c in cells],
                      linestyle=style, marker="o", markersize=3, label=f"m = {m}")  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.6)

    what = f"{measured['layers']} layers, width {measured['width']}, from the warm disk"
    figure(out / f"{name}_first_token.png", curves, title=f"Time to the first token: {what}", xlabel="k / m",
           ylabel="% saved", xlim=(0, 1), ylim=(-20, 100))  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "latency", "short prompts only, once each", out="recycling",
                    models=f"random weights of the size of {', '.join(SIZES)} or LAYERSxHEADSxWIDTH; or {NAMES}")
    cli.set_defaults(model="124M")
    cli.add_argument("--repeats", type=whole_number(1), metavar="N", help="times are medians of N; default: 5, with "
                     "--quick 1")  # fmt: skip
    with cli.parse(argv) as args:
        model, name = model_of(args)
        lengths = QUICK if args.quick else LENGTHS
        measured = {"conditions": conditions(name, model),
                    **measure(model, args.repeats or (1 if args.quick else 5), lengths)}
        write_json(args.out / "law.json", measured)
        draw(measured, args.out, "law")
        print(page([*tables(measured), f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
