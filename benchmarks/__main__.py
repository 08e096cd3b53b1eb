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
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gpt_kv_cache
from benchmarks import batches, scale
from benchmarks.contenders import (
    BASE,
    CONTENDERS,
    WITHOUT,
    Clock,
    Contender,
    cached_of,
    floors,
    measured,
)
from benchmarks.processes import in_turns
from benchmarks.report import (
    ablation,
    ablation_table,
    add_measuring_arguments,
    disturbed,
    draw,
    report,
    summary,
)
from benchmarks.runners import Where
from benchmarks.words import words
from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import check_sizes, find_file, load_model, read_config, read_tensors
from pocket.checkpoints import export
from support.cli import CommandLine, whole_number
from support.conditions import SIZES, machine
from support.files import read_json, write_json

DECODED = 16  # tokens after each prompt
LENGTHS = (128, 512, 1000)  # of prompts
TEXTS = 8  # at once, for one more figure of the shortest prompts
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


def measure(
    args: argparse.Namespace,
    folder: Path,
    names: Sequence[str],
    cells: Sequence[tuple[int, int]],
    decoded: int = DECODED,
) -> dict[str, Any]:
    """Return all raw figures: of every contender for each cell, a batch size and a prompt length, and of the machine's
    floors. One that fails is left out, and said in "failed". Raises ValueError if BASE fails, or what measures the
    floors."""
    geometry = geometry_of(folder)
    generator = torch.Generator().manual_seed(0)
    prompts = {
        f"{B} x {T}": torch.randint(geometry["vocab_size"], (B, T), generator=generator).tolist()
        for B, T in cells
    }
    rows = sorted({B * T for B, T in cells})
    where = Where(folder, args.on, args.peer_path)
    jobs = {"floor": (floors, Clock(args.on), geometry, rows)}
    jobs |= {name: (measured, name, where, prompts, decoded) for name in names}
    found, failed = in_turns(jobs, args.turns, args.threads, needed=("floor", BASE))
    floor = found.pop("floor")
    contenders, reuse = {}, {}
    for name, turns in found.items():
        contenders[name] = {cell: [turn[cell] for turn in turns] for cell in prompts}
        reuse[name] = [turn["resume_ms"] for turn in turns if turn["resume_ms"]]
    longest = max(T for _, T in cells)
    return {
        "geometry": geometry,
        "floor": floor,
        "contenders": contenders,
        "reuse": reuse,
        "reuse_lengths": [longest, cached_of(longest)],
        "failed": failed,
        "timed_cpu": args.on == "cpu" and args.threads == 1,
    }


def overheads(
    args: argparse.Namespace, geometry: dict[str, int], names: Sequence[str]
) -> dict[str, float]:
    """Return, by contender, the milliseconds of a step that aren't arithmetic: those of a model with as many layers and
    heads, but so narrow that there is hardly anything to compute."""
    heads = geometry["n_head"]
    sizes = {"n_layer": geometry["n_layer"], "n_head": heads, "n_embd": NARROW * heads}
    with random_weights(GPTConfig(vocab_size=64, n_ctx=128, **sizes)) as folder:
        raw = measure(args, folder, names, [(1, 32)], 4 * DECODED)
    return {
        name: median(median(turn["steps_ms"]) for turn in cells["1 x 32"])
        for name, cells in raw["contenders"].items()
    }


@torch.no_grad()
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
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=generator).to(device)
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


# --- What the command does ------------------------------------------------------------------------------------------


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


def lengths_of(args: argparse.Namespace, n_ctx: int) -> list[int]:
    """Return the lengths of prompts. Raises ValueError if the context doesn't hold the longest and what follows it."""
    most = n_ctx - DECODED
    usual = LENGTHS if most >= max(LENGTHS) else (max(2, most // 8), max(2, most // 2), most)
    lengths = sorted({*(args.lengths or usual)})
    if lengths[-1] > most:
        raise ValueError(
            f"{lengths[-1]} tokens and {DECODED} more exceed the context of {args.model}, {n_ctx}"
        )
    return lengths


def record_of(
    args: argparse.Namespace, folder: Path, chosen: Sequence[Contender], texts: Sequence[int]
) -> dict[str, Any]:
    """Measure contenders, texts[0] at once of all lengths and more of the shortest; return the record."""
    geometry = geometry_of(folder)
    lengths = lengths_of(args, geometry["n_ctx"])
    cells = [(texts[0], T) for T in lengths] + [(B, lengths[0]) for B in texts[1:]]
    raw = measure(args, folder, [c.name for c in chosen], cells)
    if not args.ablate:
        raw["overheads"] = overheads(args, geometry, [*raw["contenders"]])
    record = {
        **about(args, geometry),
        "lengths": lengths,
        "batches": texts,
        "reuse_lengths": raw["reuse_lengths"],
        "absent": raw["failed"],
        **summary(raw),
    }
    rows = record["rows"]
    exact = [c.name for c in chosen if c.exact and c.name in rows]
    record["different"] = [name for name in exact if not same_everywhere(rows[name])]
    record["disturbed"] = disturbed(record)
    return record


def same_everywhere(row: dict[str, Any]) -> bool:
    """Return whether a contender wrote BASE's tokens in every cell."""
    return all(figures["same_tokens"] for cell, figures in row.items() if " x " in cell)


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Measure all implementations, or those asked for: tables, figures and summary.json."""
    chosen = [c for c in CONTENDERS if c.name in (BASE, *(args.only or names()))]
    record = record_of(args, folder, chosen, [1, TEXTS])
    write_json(args.out / "summary.json", record, indent=1)
    print(f"{report(record)}\n\n{words('doubts', record, BASE)}")
    draw(record, args.out)


def ablate(args: argparse.Namespace, folder: Path) -> None:
    """Measure our own choices one by one: a table and ablation.json."""
    chosen = [c for c in CONTENDERS if c.name == BASE]
    record = record_of(args, folder, [*chosen, *WITHOUT], [1])
    torch.set_num_threads(args.threads)
    lengths = record["lengths"]
    first = where_time_goes(folder, lengths[-1], args.on)
    record |= {"without": ablation(record.pop("rows"), lengths), "first_token": first}
    write_json(args.out / "ablation.json", record, indent=1)
    choices = ablation_table(record["without"], lengths)
    print(f"{words('ablated', record, BASE, choices)}\n\n{words('doubts', record, BASE)}")


def serve(args: argparse.Namespace, folder: Path) -> None:
    """Measure requests of different lengths at once: tables and requests.json, which keeps what it has of other numbers
    of requests."""
    path = args.out / "requests.json"
    kept = read_json(path, counts=dict)["counts"] if path.exists() else {}
    geometry, counts = geometry_of(folder), sorted({*(args.requests or batches.COUNTS)})
    found = batches.measure(args, folder, geometry, counts)
    new = {count: about(args, geometry) | figures for count, figures in found.items()}
    write_json(path, {"counts": kept | new}, indent=1)
    print(batches.summary(new))


def names() -> list[str]:
    return [contender.name for contender in CONTENDERS]


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks --threads 2")
    cli.prog = "python3 -m benchmarks"
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
        choices=names(),
        metavar="NAME",
        help=f"of {'; '.join(names())}; default: all",
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
    add_measuring_arguments(cli)
    cli.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    task.add_argument("--ablate", action="store_true", help="measure our own choices instead")
    task.add_argument(
        "--requests",
        nargs="*",
        type=whole_number(1),
        metavar="N",
        help="measure N requests of different lengths at once instead, and keep the record of other N in "
        f"the folder; default: {' '.join(map(str, batches.COUNTS))}",
    )
    task.add_argument(
        "--scale",
        metavar="FILE",
        type=Path,
        help="predict larger models from a recorded summary.json",
    )
    with cli.parse(argv) as args:
        if args.scale:
            print(scale.note(args.scale))
            return
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: there is none that this PyTorch can use; try --on cpu")
        if args.peer_path and not args.peer_path.is_dir():
            raise ValueError(f"--peer-path {args.peer_path} is not a folder")
        if args.requests is not None and args.lengths:
            raise ValueError("--requests has no --lengths: see --help")
        do = compare
        if args.ablate:
            do = ablate
        elif args.requests is not None:
            do = serve
        with weights(args.model) as folder:
            do(args, folder)
        print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
