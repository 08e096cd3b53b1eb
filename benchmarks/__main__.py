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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from benchmarks import batches, tables
from benchmarks.contenders import Cell, geometry_of, measure_contender, measure_floors
from benchmarks.report import FLOOR, Row, add_rows, floors_of_turns, run_in_turns
from benchmarks.runners import BASE, CONTENDERS, LLAMA, LLAMAS, WITHOUT, Setup, exported
from formats.checkpoints import open_checkpoint
from gpt_kv_cache import GPT
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model, random_model
from support.cli import CommandLine, whole_number
from support.conditions import SIZES, conditions
from support.files import writable_folder
from support.tables import page

DECODED_TOKENS = 16  # tokens after each prompt
LENGTHS = (128, 1000)  # tokens of prompts
BATCH_SIZE = 8  # texts at once, after the shortest prompt
THREADS = (1, 2)
TURNS = 3
LLAMA_GEOMETRY = "SmolLM2-135M"  # the geometry of a Llama
MODELS = ("124M", LLAMA_GEOMETRY)
CONDITIONS = ("model", "parameters", "device", "machine", "torch", "date")  # of a run, for its rows
QUICK = (BASE, LLAMA, "transformers, DynamicCache", "llama.cpp, F32")


def weights_folder(model: str) -> AbstractContextManager[Path]:
    """Return a folder in Hugging Face format: of a known model, or of random weights of one of SIZES or LLAMA_GEOMETRY."""
    if model == LLAMA_GEOMETRY:
        torch.manual_seed(0)
        return exported(Llama(LlamaConfig(n_ctx=1024)))
    if model in SIZES:
        return exported(random_model(GPT, model))
    return nullcontext(open_checkpoint(model).path)


def measure(
    args: argparse.Namespace, folder: Path, names: Sequence[str], cells: Sequence[Cell]
) -> list[Row]:
    """Measure contenders, the first of which ratios are relative to, with each number of threads in each cell; return
    their rows, and those of the machine's limits. A contender that fails is left out, and "absent" says why. Raises
    ValueError if our own file fails, or if the longest prompt and its new tokens exceed the context."""
    geometry, setup = geometry_of(folder), Setup(folder, args.on)
    longest, n_ctx = max(T for _, T in cells), geometry["n_ctx"]
    if longest + DECODED_TOKENS > n_ctx:
        raise ValueError(f"{longest} tokens and {DECODED_TOKENS} more exceed the context, {n_ctx}")
    arguments = setup, cells, geometry["vocab_size"], DECODED_TOKENS
    jobs = {name: (measure_contender, name, *arguments) for name in names}
    jobs[FLOOR] = (measure_floors, args.on, geometry, {B * T for B, T in cells})
    rows, floor_turns = run_in_turns(jobs, args.threads, args.turns, needed=[names[0]])
    for threads, turns in floor_turns.items():
        measured = [row for row in rows if row["threads"] == threads and "absent" not in row]
        rows += floors_of_turns(measured, turns, geometry["weights"])
    for row in rows:
        if "step_ms" in row:
            row["tokens_per_s"] = 1e3 * row["texts"] / row["step_ms"]
    return rows


def compare(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure all implementations, or those asked for, after one text of each length, and after several of the shortest."""
    contenders = LLAMAS if "rope_theta" in geometry_of(folder) else CONTENDERS
    wanted = [name for name in contenders if name in (args.only or contenders)]
    if not wanted:
        raise ValueError(
            f"--only {args.only[0]} is for other models: here are {'; '.join(contenders)}"
        )
    base = LLAMA if contenders is LLAMAS else BASE
    lengths = sorted({*args.lengths})
    cells = [*((1, T) for T in lengths), (BATCH_SIZE, lengths[0])]
    return measure(args, folder, [*dict.fromkeys([base, *wanted])], cells)


def ablate(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure our own choices one by one."""
    return measure(args, folder, [BASE, *WITHOUT], [(1, T) for T in sorted({*args.lengths})])


def serve(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure requests of different lengths at once."""
    setup, counts = Setup(folder, args.on), sorted({*args.requests}) or batches.REQUEST_COUNTS
    return batches.measure_requests(setup, geometry_of(folder), args.threads, args.turns, counts)


TASKS = {"speed": compare, "ablation": ablate, "requests": serve}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks --quick")
    cli.prog = "python3 -m benchmarks"
    names = [*(CONTENDERS | LLAMAS)]
    cli.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help=f"random weights of the size of {', '.join(SIZES)} or {LLAMA_GEOMETRY}, or a model's name or folder; "
        f"default: {' '.join(MODELS)}, and with --ablate and --requests {MODELS[0]}",
    )
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
        action="store_true",
        help=f"measure only {'; '.join(QUICK)}; default: after {LENGTHS[0]} tokens, in one turn",
    )
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2),
        metavar="N",
        help=f"lengths of prompts in tokens; default: {' '.join(map(str, LENGTHS))}",
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
        help=f"CPU threads; default: {' '.join(map(str, THREADS))}, and with --ablate, --requests and --on cuda 1",
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
        help="measure N requests at once instead; default: "
        f"{' '.join(map(str, batches.REQUEST_COUNTS))}",
    )
    with cli.parse(argv) as args:
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: PyTorch finds none; try --on cpu")
        if args.requests is not None and args.lengths:
            raise ValueError("--requests has no --lengths: see --help")
        if args.quick:
            args.only, args.lengths, args.turns = (
                QUICK,
                args.lengths or LENGTHS[:1],
                args.turns or 1,
            )
        args.lengths, args.turns = args.lengths or LENGTHS, args.turns or TURNS
        task = "speed"
        if args.ablate:
            task = "ablation"
        if args.requests is not None:
            task = "requests"
        is_speed = task == "speed"
        args.threads = args.threads or (THREADS if is_speed and args.on == "cpu" else [1])
        for name in args.model or (MODELS if is_speed else MODELS[:1]):
            with weights_folder(name) as folder:
                described = conditions(name, load_model(str(folder), device=args.on))
                described = {key: described[key] for key in CONDITIONS} | {"turns": args.turns}
                rows = [described | row for row in TASKS[task](args, folder)]
            add_rows(args.out / f"{task}.jsonl", rows)
            print(page(tables.REPORTS[task](rows)), end="\n\n")
        print(f"Written to {args.out}")


if __name__ == "__main__":
    main()
