"""Speed and memory beside other implementations: decoding, time to the first token, reuse of a prefix, bytes of cache.

`python -m benchmarks` gives every implementation the same weights and lets them take turns, one at a time; each has a
process of its own, a new one in every turn (memory addresses are a matter of luck, and a process keeps them). Figures
are medians over turns, and shares of the machine's own limits in the same turns: reading the weights once per token,
and computing only the matrix products of a prompt. `--ablate` measures our own choices one by one, and where the time
goes; `--requests` serves many texts of different lengths at once; `--scale` predicts larger models from recorded
figures.
"""

from __future__ import annotations

import os

# read when torch starts: waiting threads must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import gpt_kv_cache
from benchmarks import batches as together
from benchmarks import scale
from benchmarks.contenders import CONTENDERS, WITHOUT, Contender
from benchmarks.processes import ROOT, Worker
from benchmarks.report import (
    BASE,
    UNCACHED,
    ablation,
    ablation_table,
    disturbance,
    disturbed,
    draw,
    report,
    summary,
)
from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import check_sizes, find_file, load_model, read_config, read_tensors
from pocket.checkpoints import export
from support.cli import CommandLine, whole_number, writable_folder
from support.conditions import SIZES, machine
from support.files import read_json, write_json
from support.tables import page

DECODED = 16  # tokens after each prompt
FEW = 3  # of an implementation that reads the whole text for each
NARROW = 8  # head size of the model whose steps are nearly all overhead; its vocabulary is as small as its context


# --- Weights --------------------------------------------------------------------------------------------------------


def weights(model: str) -> AbstractContextManager[Path]:
    """Return a folder in Hugging Face format: of a known model, or of random weights of one of SIZES."""
    if model in SIZES:
        return random_weights(GPTConfig(**SIZES[model]))
    return nullcontext(find_file(model, "config.json").parent)


@contextmanager
def random_weights(config: GPTConfig) -> Iterator[Path]:
    """Yield a folder in Hugging Face format with random weights, the same every time, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        torch.manual_seed(0)
        export(GPT(config), Path(folder), torch.float32)
        yield Path(folder)


def geometry_of(folder: Path) -> dict[str, int]:
    """Return the sizes that a machine's floors depend on, and the bytes of the weights in float32. Raises ValueError if
    the folder holds no GPT-2."""
    config = read_config(folder / "config.json", GPTConfig)
    check_sizes(config, read_tensors(str(folder)), folder / "config.json")
    with torch.device("meta"):
        nbytes = sum(p.nbytes for p in GPT(config).parameters())
    return vars(config) | {"attention": config.n_head * config.head_dim, "weights": nbytes}


# --- Measuring ------------------------------------------------------------------------------------------------------


def available(contender: Contender, device: str, peer: Path | None) -> str:
    """Return why a contender can't take part, "" if it can."""
    if missing := [
        name for name in contender.package.split() if not importlib.util.find_spec(name)
    ]:
        return f"not installed: python3 -m pip install {' '.join(missing)}"
    if contender.file and not (peer and (peer / contender.file).is_file()):
        return f"needs --peer-path with {contender.file}"
    if contender.device and contender.device != device:
        return f"runs on {contender.device} only"
    return ""


def measure(
    folder: Path,
    names: Sequence[str],
    cells: Sequence[tuple[int, int]],
    turns: int,
    device: str,
    threads: int,
    peer: Path | None,
    decoded: int = DECODED,
) -> dict[str, Any]:
    """Return all raw figures: of every contender for each cell, a batch size and a prompt length, and of the machine's
    floors.

    In every turn each has a process to itself, in an order that rotates. One that fails is left out from there on, and
    said in "failed". Raises ValueError if BASE fails, or what measures the floors.
    """
    geometry = geometry_of(folder)
    generator = torch.Generator().manual_seed(0)
    prompts = {
        (B, T): torch.randint(geometry["vocab_size"], (B, T), generator=generator).tolist()
        for B, T in cells
    }
    raw: dict[str, Any] = {name: {f"{B} x {T}": [] for B, T in prompts} for name in names}
    reuse: dict[str, list[float]] = {name: [] for name in names}
    floor: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    peers = [peer] if peer else []
    batch, longest = max(cells, key=lambda cell: (cell[1], -cell[0]))

    def run(name: str) -> None:
        with closing(Worker("contenders", name, folder, device, threads, *peers)) as worker:
            if name == "floor":
                floor.append(worker(geometry=geometry, rows=sorted({B * T for B, T in cells})))
                return
            decode = FEW if name == UNCACHED else decoded
            for ids in prompts.values():
                worker(ids=ids, decode=0 if name == UNCACHED else 3, cached=0)  # warms up
            for (B, T), ids in prompts.items():
                raw[name][f"{B} x {T}"].append(worker(ids=ids, decode=decode, cached=0))
            done = worker(ids=prompts[batch, longest][:1], decode=0, cached=longest * 9 // 10)
            reuse[name] += [done["resume_ms"]] if done["resume_ms"] else []

    for turn in tqdm(range(turns), desc="turns", leave=False):
        at = turn % len(names)
        for name in tqdm(["floor", *names[at:], *names[:at]], desc="one by one", leave=False):
            try:
                if name not in failed:
                    run(name)
            except ValueError as error:
                failed[name] = str(error)
        for name in {BASE, "floor"} & {*failed}:
            raise ValueError(failed[name])
    return {
        "geometry": geometry,
        "floor": floor,
        "contenders": {n: r for n, r in raw.items() if n not in failed},
        "reuse": reuse,
        "reuse_lengths": [longest, longest * 9 // 10],
        "failed": failed,
        "timed_cpu": device == "cpu" and threads == 1,
    }


def overheads(
    geometry: dict[str, int],
    names: Sequence[str],
    turns: int,
    device: str,
    threads: int,
    peer: Path | None,
) -> dict[str, float]:
    """Return, by contender, the milliseconds of a step that aren't arithmetic: those of a model with as many layers and
    heads, but so narrow that there is hardly anything to compute."""
    layers, heads = geometry["n_layer"], geometry["n_head"]
    config = GPTConfig(
        vocab_size=64, n_ctx=128, n_layer=layers, n_head=heads, n_embd=NARROW * heads
    )
    with random_weights(config) as folder:
        raw = measure(folder, names, [(1, 32)], turns, device, threads, peer, decoded=4 * DECODED)
    return {
        name: median(median(t["steps_ms"]) for t in cells["1 x 32"])
        for name, cells in raw["contenders"].items()
    }


# --- Ablation -------------------------------------------------------------------------------------------------------


def where_time_goes(folder: Path, T: int, device: str) -> dict[str, float]:
    """Return the shares of the time to the first token of T by PyTorch's profiler, the largest first."""
    kinds = {
        "addmm": "products with weights",
        "mm": "products with weights",
        "gelu": "GELU",
        "copy_": "copies",
        "cat": "copies",
    }
    model = load_model(str(folder), model_class=GPT, device=device)
    ids = torch.randint(
        model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)
    ).to(device)
    for _ in range(2):  # the first warms up
        with torch.profiler.profile() as profile:
            model(ids, gpt_kv_cache.KVCache(), last_only=True)
    shares: dict[str, float] = {}
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    for event in profile.key_averages():
        namespace, _, key = event.key.partition("::")
        if namespace == "aten":  # what a GPU's kernels take is theirs
            kind = "attention" if "attention" in key else kinds.get(key, "all else")
            shares[kind] = shares.get(kind, 0.0) + getattr(event, clock)
    total = sum(shares.values())
    shares = {kind: took / total for kind, took in shares.items()}
    return dict(sorted(shares.items(), key=lambda item: (item[0] == "all else", -item[1])))


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks --threads 2")
    cli.prog = "python3 -m benchmarks"
    names = [contender.name for contender in CONTENDERS]
    cli.add_argument(
        "--model",
        default="124M",
        metavar="NAME",
        help=f"random weights of the size of {', '.join(SIZES)}, or a model's name or folder",
    )
    task = cli.add_mutually_exclusive_group()
    task.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"of {'; '.join(names)}; default: all",
    )
    cli.add_argument(
        "--peer-path",
        type=Path,
        metavar="FOLDER",
        help="a folder with gpt_with_kv_cache.py and gpt_with_kv_cache_optimized.py of LLMs-from-scratch",
    )
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2),
        metavar="N",
        help="tokens of prompts; default: 128 512 1000, or an eighth, half and all of a smaller context",
    )
    cli.add_argument(
        "--batches",
        nargs="+",
        type=whole_number(1, 4096),
        metavar="N",
        help="texts at once: the fewest of all lengths, more of the shortest only; default: 1 8; "
        "without --ablate",
    )
    cli.add_argument(
        "--turns",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="each figure is the median of N",
    )
    cli.add_argument(
        "--threads", type=whole_number(1, 1024), default=1, metavar="N", help="CPU threads"
    )
    cli.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    task.add_argument("--ablate", action="store_true", help="measure our own choices instead")
    task.add_argument(
        "--requests",
        nargs="*",
        type=whole_number(1),
        metavar="N",
        help="measure N requests of different lengths at once instead, and keep the record of other N in "
        f"the folder; default: {' '.join(map(str, together.COUNTS))}",
    )
    task.add_argument(
        "--scale",
        metavar="FILE",
        type=Path,
        help="predict larger models from a recorded summary.json",
    )
    cli.add_argument(
        "--out",
        type=writable_folder,
        metavar="FOLDER",
        help="where results go; default: results/benchmarks",
    )
    with cli.parse(argv) as args:
        if args.scale:
            print(page(scale.note(args.scale)))
            return
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: there is none that this PyTorch can use; try --on cpu")
        if args.peer_path and not args.peer_path.is_dir():
            raise ValueError(f"--peer-path {args.peer_path} is not a folder")
        task = "ablate" if args.ablate else "requests" if args.requests is not None else ""
        for option in {"ablate": ["batches"], "requests": ["lengths", "batches"]}.get(task, []):
            if getattr(args, option):
                raise ValueError(f"--{task} has no --{option}: see --help")
        out = args.out or ROOT / "results" / "benchmarks"
        if args.requests is not None:
            return measure_requests(args, out)
        asked = () if args.ablate else args.only or names
        chosen = [c for c in CONTENDERS if c.name in (BASE, *asked)] + [*WITHOUT] * args.ablate
        absent = {c.name: why for c in chosen if (why := available(c, args.on, args.peer_path))}
        with weights(args.model) as folder:
            geometry = geometry_of(folder)
            most = geometry["n_ctx"] - DECODED
            shorter = (max(2, most // 8), max(2, most // 2), most)
            lengths = sorted({*(args.lengths or ((128, 512, 1000) if most >= 1000 else shorter))})
            batches = [1] if args.ablate else sorted({*(args.batches or (1, 8))})
            if lengths[-1] > most:
                raise ValueError(
                    f"{lengths[-1]} tokens and {DECODED} more exceed the context of {args.model}, "
                    f"{geometry['n_ctx']}"
                )
            out.mkdir(parents=True, exist_ok=True)  # before anything takes time
            cells = [(batches[0], T) for T in lengths] + [(B, lengths[0]) for B in batches[1:]]
            options = {
                "turns": args.turns,
                "device": args.on,
                "threads": args.threads,
                "peer": args.peer_path,
            }
            raw = measure(
                folder, [c.name for c in chosen if c.name not in absent], cells, **options
            )
            if args.ablate:
                torch.set_num_threads(args.threads)
                with torch.no_grad():
                    shares = where_time_goes(folder, lengths[-1], args.on)
            else:
                raw["overheads"] = overheads(geometry, list(raw["contenders"]), **options)
        record = {
            **about(args, geometry),
            "lengths": lengths,
            "batches": batches,
            "reuse_lengths": raw["reuse_lengths"],
            "absent": absent | raw["failed"],
            **summary(raw),
        }
        exact = [c.name for c in chosen if c.exact and c.name in record["rows"]]
        record["different"] = [name for name in exact if not same_everywhere(record["rows"][name])]
        record["disturbed"] = disturbed(record)
        if args.ablate:
            without = ablation(record.pop("rows"), lengths)
            record |= {"without": without, "first_token": shares}
            write_json(out / "ablation.json", record, indent=1)
            goes = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
            print(f"{BASE}: how many times as long without each of its choices (least to most)\n")
            print(page([ablation_table(without, lengths), f"first token of {lengths[-1]}: {goes}"]))
        else:
            write_json(out / "summary.json", record, indent=1)
            print(page(report(record)))
            draw(record, out)
        for name in record["different"]:  # what makes figures worth less
            print(f"{name}: WRITES OTHER TOKENS than {BASE}")
        if record["disturbed"]:
            print(
                f"THE MACHINE WAS DISTURBED: {disturbance(record)}; measure again when it is quiet"
            )
        print(f"\nWritten to {out}")


def same_everywhere(row: dict[str, Any]) -> bool:
    """Return whether a contender wrote BASE's tokens in every cell."""
    return all(figures["same_tokens"] for cell, figures in row.items() if " x " in cell)


def about(args: argparse.Namespace, geometry: dict[str, int]) -> dict[str, Any]:
    """Return the conditions for a record: the model, the machine and the day."""
    return {
        "model": args.model,
        "machine": machine(args.on),
        "device": args.on,
        "threads": args.threads,
        "turns": args.turns,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "geometry": geometry,
    }


def measure_requests(args: argparse.Namespace, out: Path) -> None:
    """Measure requests of different lengths at once, print the tables and write requests.json, which keeps what it has
    of other numbers of requests."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "requests.json"
    kept = read_json(path, counts=dict)["counts"] if path.exists() else {}
    with weights(args.model) as folder:
        geometry, counts = geometry_of(folder), sorted({*(args.requests or together.COUNTS)})
        found = together.measure(folder, geometry, counts, args.turns, args.on, args.threads)
    new = {count: about(args, geometry) | figures for count, figures in found.items()}
    write_json(path, {"counts": kept | new}, indent=1)
    print(page(together.summary(new)))
    print(f"\nWritten to {path}")


if __name__ == "__main__":
    main()
