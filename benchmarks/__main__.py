"""Speed and memory beside other implementations: decoding, time to the first token, bytes of cache.

`python3 -m benchmarks` gives every implementation the same weights and lets them take turns, one at a time; each has a
process of its own, a new one in every turn (memory addresses are a matter of luck, and a process keeps them). Figures
are medians over turns, and shares of the machine's own limits in the same turns: reading the weights once per token,
and computing only the matrix products of a prompt. `--ablate` measures our own choices one by one, and where the time
goes; `--requests` serves many texts of different lengths at once.
"""

import os

# read when torch starts: waiting threads must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

import torch

from benchmarks import batches, report, scale
from benchmarks.contenders import measure_contender, measure_floors
from benchmarks.processes import run_in_processes
from benchmarks.runners import BASE, CONTENDERS, LLAMAS, WITHOUT, Setup, base_of, exported
from benchmarks.words import Figures, disturbance, shares
from formats.checkpoints import open_checkpoint
from gpt_kv_cache import GPT, GPTConfig, KVCache
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model, random_model
from support.cli import CommandLine, whole_number
from support.conditions import SIZES, conditions
from support.files import read_json, writable_folder, write_json
from support.tables import page

DECODED_TOKENS = 16  # tokens after each prompt
LENGTHS = (128, 512, 1000)  # tokens of prompts
BATCH_SIZE = 8  # texts at once, for one more figure of the shortest prompts
LLAMA_GEOMETRY = "SmolLM2-135M"  # the geometry of a Llama
NARROW_HEAD_DIM = 8  # head size of the model whose steps are nearly all overhead; its vocabulary is as small as its context


# --- Weights --------------------------------------------------------------------------------------------------------


def weights_folder(model: str) -> AbstractContextManager[Path]:
    """Return a folder in Hugging Face format: of a known model, or of random weights of one of SIZES or LLAMA_GEOMETRY."""
    if model == LLAMA_GEOMETRY:
        torch.manual_seed(0)
        return exported(Llama(LlamaConfig(n_ctx=1024)))
    if model in SIZES:
        return exported(random_model(GPT, model))
    return nullcontext(open_checkpoint(model).path)


def describe_run(args: argparse.Namespace, folder: Path) -> Figures:
    """Return the conditions for a record, and the sizes that a machine's floors depend on, with the bytes of the
    weights in float32."""
    model = load_model(str(folder), device=args.on)
    config, machine = model.config, conditions(args.model, model)
    geometry = {
        **vars(config),
        "attention": config.n_head * config.head_dim,
        "matrices": [[*p.shape] for p in model.h[0].parameters() if p.dim() == 2],
        "weights": 4 * machine["parameters"],
    }
    return machine | {"turns": args.turns, "geometry": geometry}


# --- Measuring ------------------------------------------------------------------------------------------------------


def add_overheads(args: argparse.Namespace, record: Figures) -> None:
    """Add, to each contender's row, the milliseconds of a step that aren't arithmetic: the time of
    a model with as many layers and heads, but so narrow that there is hardly anything to
    compute."""
    heads = record["heads"]
    narrow_config = GPTConfig(64, 128, record["layers"], heads, NARROW_HEAD_DIM * heads)
    with exported(GPT(narrow_config)) as folder:
        setup = Setup(folder, args.on, args.peer_path)
        arguments = setup, [(1, 32)], narrow_config.vocab_size, 4 * DECODED_TOKENS
        jobs = {name: (measure_contender, name, *arguments) for name in record["rows"]}
        turns_by_name, _ = run_in_processes(jobs, args.turns, args.threads, needed=[BASE])
    for name, turns in turns_by_name.items():
        step_medians = [median(turn["1 x 32"]["steps_ms"]) for turn in turns]
        record["rows"][name]["overhead_ms"] = median(step_medians)


@torch.no_grad()
def profile_first_token(folder: Path, T: int, device: str) -> dict[str, float]:
    """Return each kind of operation's share of the time to the first token after T tokens, by
    PyTorch's profiler, the largest first."""
    kind_of_operation = {
        "aten::addmm": "products with weights",
        "aten::mm": "products with weights",
        "aten::gelu": "GELU",
        "aten::copy_": "copies",
        "aten::cat": "copies",
    }
    model = load_model(str(folder), model_class=GPT, device=device)
    ids = torch.arange(T, device=device)[None] % model.config.vocab_size
    for _ in range(2):  # the first warms up
        with torch.profiler.profile() as profile:
            model(ids, KVCache(), last_only=True)
    time_by_kind = Counter()
    time_attribute = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    for event in profile.key_averages():
        if event.key.startswith("aten::"):  # their time includes that of a GPU's kernels
            kind = kind_of_operation.get(event.key, "all else")
            if "attention" in event.key:
                kind = "attention"
            time_by_kind[kind] += getattr(event, time_attribute)
    return {kind: time / time_by_kind.total() for kind, time in time_by_kind.most_common()}


# --- What the command does ------------------------------------------------------------------------------------------


def measure_record(
    args: argparse.Namespace,
    folder: Path,
    run_conditions: Figures,
    names: Sequence[str],
    batch_sizes: Sequence[int] = (),
) -> Figures:
    """Measure contenders after one text of each length, and after each batch of texts of the
    shortest length; return the record. A contender that fails is left out, and "absent" says why.
    Raises ValueError if our own file or the measurement of the floors fails, or if the longest
    prompt and its new tokens exceed the context."""
    geometry = run_conditions["geometry"]
    lengths = sorted({*args.lengths})
    longest_prompt, n_ctx = lengths[-1], geometry["n_ctx"]
    if longest_prompt + DECODED_TOKENS > n_ctx:
        raise ValueError(
            f"{longest_prompt} tokens and {DECODED_TOKENS} more exceed the context of {args.model}, {n_ctx}"
        )
    cells = [(1, T) for T in lengths] + [(B, lengths[0]) for B in batch_sizes]
    setup = Setup(folder, args.on, args.peer_path)
    arguments = setup, cells, geometry["vocab_size"], DECODED_TOKENS
    jobs = {"floor": (measure_floors, args.on, geometry, sorted({B * T for B, T in cells}))}
    jobs |= {name: (measure_contender, name, *arguments) for name in names}
    turns_by_name, failures = run_in_processes(
        jobs, args.turns, args.threads, needed=("floor", base_of(names))
    )
    record = run_conditions | {"lengths": lengths, "absent": failures}
    return record | report.summarize(turns_by_name, geometry["weights"], args.threads)


def absent_text(record: Figures) -> str:
    """Return which contenders weren't measured, and why."""
    lines = [f"- {name} ({why})" for name, why in record["absent"].items()]
    return "\n".join(["Not measured:", *lines]) if lines else ""


def doubts_text(record: Figures, base: str) -> str:
    """Return what makes the figures of a record doubtful."""
    lines = [f"{name}: WRITES OTHER TOKENS than {base}" for name in record["different"]]
    if record["disturbed"]:
        words = disturbance(record)
        lines.append(f"THE MACHINE WAS DISTURBED: {words}; measure again when it is quiet")
    return "\n".join(lines)


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Measure all implementations, or those asked for; print a table, draw figures, and write
    summary.json, or llama.json for a Llama. For a GPT-2, also predict from these figures what
    larger models would take."""
    run_conditions = describe_run(args, folder)
    is_llama = "rope_theta" in run_conditions["geometry"]
    contenders = LLAMAS if is_llama else CONTENDERS
    base = base_of(contenders)
    wanted = contenders if args.only is None else args.only
    for name in wanted:
        if name not in contenders:
            raise ValueError(
                f"--only {name} can't read {args.model}: choose from {'; '.join(contenders)}"
            )
    names = [name for name in contenders if name in (base, *wanted)]
    record = measure_record(args, folder, run_conditions, names, [BATCH_SIZE])
    if is_llama:
        record_name, predictions = "llama.json", ""
    else:
        add_overheads(args, record)
        record_name, predictions = "summary.json", scale.predict(record)
    write_json(args.out / record_name, record, indent=1)
    parts = [
        report.speed_report(record),
        absent_text(record),
        predictions,
        doubts_text(record, base),
    ]
    print("\n\n".join(filter(None, parts)))
    report.draw_figures(record, args.out)


def ablate(args: argparse.Namespace, folder: Path) -> None:
    """Measure our own choices one by one; print a table and write ablation.json."""
    record = measure_record(args, folder, describe_run(args, folder), [BASE, *WITHOUT])
    lengths = record["lengths"]
    first_token_shares = profile_first_token(folder, lengths[-1], args.on)
    slowdowns = report.slowdowns(record.pop("rows"), lengths)
    record |= {"without": slowdowns, "first_token": first_token_shares}
    write_json(args.out / "ablation.json", record, indent=1)
    choices_table = report.slowdowns_table(slowdowns, lengths)
    parts = [
        f"{BASE}: how many times as long without each of its choices (least to most)",
        choices_table,
        f"first token of {lengths[-1]}: {shares(first_token_shares)}",
        doubts_text(record, BASE),
    ]
    print(page(parts))


def serve(args: argparse.Namespace, folder: Path) -> None:
    """Measure requests of different lengths at once; print tables and write requests.json, which
    keeps its records of other numbers of requests."""
    record_path = args.out / "requests.json"
    recorded_counts = read_json(record_path, counts=dict)["counts"] if record_path.exists() else {}
    run_conditions = describe_run(args, folder)
    counts = sorted({*args.requests}) if args.requests else [*batches.REQUEST_COUNTS]
    measured_counts = batches.measure_requests(
        args.turns, args.threads, Setup(folder, args.on), run_conditions["geometry"], counts
    )
    new_records = {count: run_conditions | figures for count, figures in measured_counts.items()}
    write_json(record_path, {"counts": recorded_counts | new_records}, indent=1)
    print(batches.requests_report(new_records))


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, example="python3 -m benchmarks --threads 2")
    cli.prog = "python3 -m benchmarks"
    names = [*(CONTENDERS | LLAMAS)]
    cli.add_argument(
        "--model",
        default="124M",
        metavar="NAME",
        help=f"random weights of the size of {', '.join(SIZES)} or {LLAMA_GEOMETRY}, or a model's name or folder",
    )
    task = cli.add_mutually_exclusive_group()
    task.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"measure only these of {'; '.join(names)}; default: all",
    )
    cli.add_argument(
        "--peer-path",
        type=Path,
        default=".",
        metavar="FOLDER",
        help="with LLMs-from-scratch's gpt_with_kv_cache.py and gpt_with_kv_cache_optimized.py",
    )
    cli.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number(2),
        default=LENGTHS,
        metavar="N",
        help="lengths of prompts in tokens",
    )
    cli.add_argument(
        "--turns",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="a figure is the median of N turns",
    )
    cli.add_argument(
        "--threads", type=whole_number(1, 1024), default=1, metavar="N", help="CPU threads"
    )
    cli.add_argument(
        "--out",
        type=writable_folder,
        default="results/benchmarks",
        metavar="FOLDER",
        help="where results go",
    )
    cli.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    task.add_argument("--ablate", action="store_true", help="measure our own choices instead")
    task.add_argument(
        "--requests",
        nargs="*",
        type=whole_number(1),
        metavar="N",
        help="measure N requests at once instead; the record of other N stays; default: "
        f"{' '.join(map(str, batches.REQUEST_COUNTS))}",
    )
    with cli.parse(argv) as args:
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: PyTorch finds none; try --on cpu")
        if not args.peer_path.is_dir():
            raise ValueError(f"--peer-path {args.peer_path} is not a folder")
        torch.set_num_threads(args.threads)
        do = compare
        if args.ablate:
            do = ablate
        if args.requests is not None:
            if args.lengths != LENGTHS:
                raise ValueError("--requests has no --lengths: see --help")
            do = serve
        with weights_folder(args.model) as folder:
            do(args, folder)
        print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
