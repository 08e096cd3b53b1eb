"""Speed and memory beside other implementations: decoding, time to the first token, bytes of cache.

`python3 -m benchmarks` measures a GPT-2 and a Llama, with one thread and with two, one text and eight texts at once. It
gives every implementation the same weights and lets them take turns, one at a time; each has a process of its own, a new
one in every turn (memory addresses are a matter of luck, and a process keeps them). Figures are medians over turns, and
shares of the machine's own limits in the same turns: reading the weights once per token, and computing only the matrix
products of a prompt. `--ablate` measures our own choices one by one; `--requests` serves many texts of different lengths
at once.
"""

import os

# read when torch starts: waiting threads must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import measuring, tables
from benchmarks.contenders import (
    BASE,
    CONTENDERS,
    LLAMA,
    LLAMAS,
    SERVERS,
    WITHOUT,
    Setup,
)
from benchmarks.measuring import BOUND, DECODED_TOKENS, FLOOR
from formats.checkpoints import open_checkpoint
from gpt_kv_cache import GPT
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model, random_model
from pocket.checkpoints import export
from support.cli import CommandLine, whole_number
from support.conditions import SIZES, conditions
from support.files import writable_folder
from support.tables import page

LENGTHS = (128, 1000)  # tokens of prompts
BATCH_SIZE = 8  # texts at once, after the shortest prompt
THREADS = (1, 2)
TURNS = 3
REQUEST_COUNTS = (1, 4, 16, 64)
LLAMA_GEOMETRY = "SmolLM2-135M"  # the geometry of a Llama
MODELS = ("124M", LLAMA_GEOMETRY)
CONDITIONS = ("model", "parameters", "device", "machine", "torch", "date")  # of a run, for its rows
QUICK = (BASE, LLAMA, "transformers, DynamicCache", "llama.cpp, F32")


def weights_folder(model: str, folder: Path) -> Path:
    """Return a folder in Hugging Face format: of a known model, or of random weights of one of SIZES or LLAMA_GEOMETRY,
    which are written to the folder given."""
    if model not in (*SIZES, LLAMA_GEOMETRY):
        return open_checkpoint(model).path
    torch.manual_seed(0)
    is_llama = model == LLAMA_GEOMETRY
    random = Llama(LlamaConfig(n_ctx=1024)) if is_llama else random_model(GPT, model)
    export(random, folder, torch.float32)
    return folder


def jobs_of(args: argparse.Namespace, setup: Setup, model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return what runs in turns, by name, as measuring.run_in_turns() takes it: our own file first, the machine's limits
    last. Raises ValueError if the longest prompt and its new tokens exceed the context, or if no contender is for this
    model."""
    vocab_size, n_ctx = model.config.vocab_size, model.config.n_ctx
    if args.task == "requests":
        counts = sorted({*args.requests}) or REQUEST_COUNTS
        requests = {n: measuring.draw_requests(n, vocab_size, n_ctx) for n in counts}
        jobs = {name: (measuring.measure_server, name, setup, requests) for name in SERVERS}
        return jobs | {BOUND: (measuring.measure_bound, setup, requests)}
    lengths = sorted({*args.lengths})
    if lengths[-1] + DECODED_TOKENS > n_ctx:
        raise ValueError(
            f"{lengths[-1]} tokens and {DECODED_TOKENS} more exceed the context, {n_ctx}"
        )
    base, contenders = (LLAMA, LLAMAS) if isinstance(model, Llama) else (BASE, CONTENDERS)
    cells, names = [(1, T) for T in lengths], [*WITHOUT]
    if args.task == "speed":
        cells.append((BATCH_SIZE, lengths[0]))
        names = [name for name in contenders if name in (args.only or contenders)]
    if not names:
        raise ValueError(
            f"--only {args.only[0]} is for other models: here are {'; '.join(contenders)}"
        )
    jobs = {name: (measuring.measure_contender, name, setup, cells) for name in [base, *names]}
    return jobs | {FLOOR: (measuring.measure_floors, setup, cells)}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(
        __doc__, example="python3 -m benchmarks --quick", prog="python3 -m benchmarks"
    )
    cli.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help=f"random weights of the size of {', '.join(SIZES)} or {LLAMA_GEOMETRY}, or a model's name or folder; "
        f"default: {' '.join(MODELS)}, and with --ablate and --requests {MODELS[0]}",
    )
    names = [*(CONTENDERS | LLAMAS)]
    task = cli.add_mutually_exclusive_group()
    task.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"measure only these of {'; '.join(names)}; default: all",
    )
    task.add_argument(
        "--quick",
        action="store_const",
        const=QUICK,
        dest="only",
        help=f"measure only {'; '.join(QUICK)}; default: after {LENGTHS[0]} tokens, in one turn",
    )
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2),
        metavar="N",
        help=f"lengths of prompts in tokens; default: {LENGTHS[0]} {LENGTHS[1]}",
    )
    cli.add_argument(
        "--turns",
        type=whole_number(1),
        metavar="N",
        help=f"a figure is the median of N turns; default: {TURNS}",
    )
    cli.add_argument(
        "--threads",
        nargs="+",
        type=whole_number(1, 1024),
        metavar="N",
        help="CPU threads; default: 1 2, and with --ablate, --requests and --on cuda 1",
    )
    cli.add_argument(
        "--out",
        type=writable_folder,
        default="results/benchmarks",
        metavar="FOLDER",
        help="where results go; a record that is there keeps its other rows",
    )
    cli.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    task.add_argument("--ablate", action="store_true", help="measure our own choices instead")
    task.add_argument(
        "--requests",
        nargs="*",
        type=whole_number(1),
        metavar="N",
        help=f"measure N requests at once instead; default: {' '.join(map(str, REQUEST_COUNTS))}",
    )
    with cli.parse(argv) as args:
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: PyTorch finds none; try --on cpu")
        if args.requests is not None and args.lengths:
            raise ValueError("--requests has no --lengths: see --help")
        args.task = "ablation" if args.ablate else "speed"
        if args.requests is not None:
            args.task = "requests"
        is_speed, is_quick = args.task == "speed", args.only is QUICK
        threads = args.threads or (THREADS if is_speed and args.on == "cpu" else [1])
        turns = args.turns or (1 if is_quick else TURNS)
        args.lengths = args.lengths or (LENGTHS[:1] if is_quick else LENGTHS)
        for name in args.model or (MODELS if is_speed else MODELS[:1]):
            with tempfile.TemporaryDirectory() as folder:
                setup = Setup(weights_folder(name, Path(folder)), args.on)
                model = load_model(str(setup.folder), device=args.on)
                run = conditions(name, model)
                run = {key: run[key] for key in CONDITIONS} | {"turns": turns}
                jobs = jobs_of(args, setup, model)
                rows = measuring.run_in_turns(jobs, threads, turns)
            rows = [run | row for row in measuring.compare_with_limits(rows)]
            measuring.add_rows(args.out / f"{args.task}.jsonl", rows)
            print(page(tables.REPORTS[args.task](rows)), end="\n\n")
        print(f"Written to {args.out}")


if __name__ == "__main__":
    main()
