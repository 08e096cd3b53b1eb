"""CP-KVP's falsification test: every baseline, metric and ablation of the proposal, its thresholds, and a chart of what
makes a warm start good enough. All figures are of prompts, families and facts not fitted on.

The parts: projection_prompts (prompts, and fits on them), projection_methods (what is compared), projection_quality,
projection_times, projection_report; projection_demo is the bare run of projector.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiktoken
from tqdm import tqdm

from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from pocket import rope
from studies import projection_quality as quality
from studies.projection_methods import Method, library_of, methods, one_token, raw_tokens
from studies.projection_prompts import POCKET, Experiment, Splits, pocket_families, read_pairs
from studies.projection_report import draw, print_kind, print_lengths, print_positions
from studies.projection_times import by_length, latencies, on_the_plane
from support.cli import CommandLine, whole_number, writable_folder
from support.files import write_json

GOOD_SHARE, GOOD_TASK, LEAST_SAVED = 0.80, 0.01, 0.35  # the proposal's thresholds, beside those of projection_quality


@dataclass(frozen=True)
class Scale:
    """How much of the study is run."""

    repeats: int = 7  # times are medians of so many
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of summary tokens
    tails: tuple[int, ...] = (1, 4, 16, 64)
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1000)
    other_models: bool = True  # times at GPT-2 124M's geometry and the rotary model's positions, too


QUICK = Scale(repeats=1, counts=(1, 8), tails=(1, 16), lengths=(32, 128), other_models=False)
FEW = {"train": 20, "valid": 8, "test": 8}  # families of a quick run


def examine(experiment: Experiment, scale: Scale, default: Method | None = None) -> dict[str, Any]:
    """Run the whole protocol on one kind of prompts and return its record. default: our warm start of another kind."""
    steps = tqdm(total=5, desc=experiment.name, leave=False)
    tau, auc = quality.choose_tau(experiment)
    retrieved = {guard: quality.retrieve(experiment, "test", guard) for guard in (False, True)}
    high, guarded = ([q for q in queries if q.similarity >= tau] for queries in retrieved.values())
    record: dict[str, Any] = {
        "tokens": statistics.mean(len(p.ids) for p in experiment.train), "prefix": experiment.prefix,
        "task": experiment.task,
        "prompts": {split: sum(map(len, families)) for split, families in experiment.prompts.items()},
        "dropped": experiment.dropped, "tau": tau if math.isfinite(tau) else None, "auc": auc,
        "retrieval": {
            "asked": len(retrieved[False]), "stored": len(experiment.stored("test")),
            "with a relative": sum(q.relative is not None for q in retrieved[False]),
            **{f"{'guarded, ' if guard else ''}{what}": value for guard, asked in retrieved.items() for what, value in {
                "found": sum(q.right for q in asked), "warm": sum(q.similarity >= tau for q in asked),
                "warm and wrong": sum(q.similarity >= tau and not q.right for q in asked)}.items()},
        },
    }
    if not high or not guarded:
        return record  # every start is cold
    plane = on_the_plane(experiment, "valid", scale.counts, scale.tails)
    steps.update()
    best = chosen(plane)
    ours = [replace(best, name=f"ours: {best.name}")]
    if default and (other := adapted(experiment, default)) and other.name != best.name:
        ours.append(replace(other, name=f"ours for the first kind: {other.name}"))
    asked = {method: high for method in methods()} | {method: guarded for method in ours}
    given = experiment.related("test")
    rows, found = {}, {}
    for m, queries in asked.items():
        rows[m.name] = [quality.measure(experiment, m, q.found, q.prompt) for q in queries]
        found[m.name] = {"retrieved": quality.summary_of(rows[m.name]),
                         "given": quality.summary_of([quality.measure(experiment, m, r, p) for p, r in given])}
    steps.update()
    proposal, one = methods()[0], one_token()
    record |= {
        "best": ours[0].name, "best_way": ours[0], "plane": [{k: v for k, v in p.items() if k != "way"} for p in plane],
        "ways": found,
        "without_guard": quality.summary_of([quality.measure(experiment, ours[0], q.found, q.prompt) for q in high]),
        "latency": latencies(experiment, asked, scale.repeats),
    }
    steps.update()
    record["sweep"] = quality.sweep(experiment, scale.counts)
    steps.update()
    record |= {
        "bins": quality.bins(experiment, retrieved[False], (proposal, one, ours[0])),
        "tau_ablation": quality.ablate_tau(experiment, retrieved[False], proposal, ours[0]),
        "confidence": quality.confidence(experiment, one, high, rows[one.name]),
        "swap": quality.after_the_swap(experiment, ours[0], given[:24]),
        "verdicts": {method.name: verdict(record, method.name) for method in (proposal, *ours)},
    }
    steps.close()
    return record


def chosen(plane: Sequence[dict[str, Any]]) -> Method:
    """Return the method with the most prompts of low KL among those that save enough."""
    warm = [point for point in plane if point["way"]]
    fast = [point for point in warm if point["saved"] >= LEAST_SAVED]
    return max(fast or warm, key=lambda point: (point["good"], -point["kl"]))["way"]


def adapted(experiment: Experiment, method: Method) -> Method | None:
    """Return a method for the prefix of another kind of prompts, None if its prompts are too short for that."""
    prefix = experiment.prefix if method.layout.prefix else 0
    if experiment.shortest - prefix - method.layout.tail < method.layout.m:
        return None
    return one_token(prefix) if "no change" in method.name else raw_tokens(replace(method.layout, prefix=prefix))


def verdict(record: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the proposal's thresholds for one method, on prompts at least as similar as tau, and which of them hold.
    As proposed, the exact cache is swapped in after the first token."""
    found, (saved, *around) = record["ways"][method]["retrieved"], record["latency"][method]["saved"]
    good, *good_around = found["good"]
    parts: list[tuple[str, bool | None, str]] = [
        ("first token at least 35% sooner", saved >= LEAST_SAVED, between(saved, around)),
        ("KL <= 0.05, or perplexity <= 5% up, on 80%", good >= GOOD_SHARE, between(good, good_around)),
    ]
    task = record["task"]
    if task is None:
        parts.append(("task within 1%", None, "no answers to judge by"))
    else:
        lost, *lost_around = found[f"{task}_lost"]
        name = {"exact": "exact match", "rouge": "ROUGE-L"}[task]
        parts.append((f"{name} at most 1% lower", lost <= GOOD_TASK, f"lower by {between(lost, lost_around)}"))
    holds = [part[1] for part in parts]
    word = "REJECTED" if False in holds else "UNDECIDED" if None in holds else "SUPPORTED"
    return {"verdict": word, "parts": [{"what": what, "holds": h, "figures": text} for what, h, text in parts]}


def between(mean: float, interval: Sequence[float]) -> str:
    """Return a share and its interval as text."""
    return f"{mean:.0%} ({interval[0]:.0%} to {interval[1]:.0%})"


def report(model: GPT, tokenizer: tiktoken.Encoding, kinds: dict[str, Splits], encoder: str, scale: Scale,
           name_of_model: str, seed: int, out: Path) -> None:
    """Run the protocol on every kind of prompts; print, write and draw the results. The first kind's library is kept
    with our warm start, which the other kinds are measured with, too."""
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"model": name_of_model, "encoder": Path(encoder).name, "repeats": scale.repeats,
                               "seed": seed, "kinds": {}}

    def write() -> None:
        write_json(out / "summary.json", summary)

    default = None
    for name, families in kinds.items():
        experiment = Experiment(model, tokenizer, name, families, encoder, seed)
        record = examine(experiment, scale, default)
        ours = record.pop("best_way", None)
        if default is None and ours:
            default = ours
            library_of(experiment, ours, "test", record["tau"], guard=True).save(out / "library", encoder)
        summary["kinds"][name] = record
        print_kind(name, record)
        sys.stdout.flush()
        write()
        del experiment
    lengths = [n for n in scale.lengths if n <= model.config.n_ctx]
    summary["lengths"] = {name_of_model: by_length(model, lengths, scale.repeats)}
    if scale.other_models and name_of_model == "pocket":  # with random weights: times don't depend on them
        summary["lengths"]["GPT-2 124M"] = by_length(GPT(GPTConfig()).eval(), scale.lengths, min(scale.repeats, 5))
    print_lengths(summary["lengths"])
    if scale.other_models and name_of_model == "pocket" and "quiz" in kinds:
        summary["positions"] = quality.both_positions(encoder, kinds["quiz"], seed)
        print_positions(summary["positions"])
    write()
    draw(summary, out)
    print(f"\nWritten to {out}; `python3 projector.py ask QUESTION --library {out / 'library'}` asks it")


def require_pocket(model: str, given: str | None) -> None:
    """Raise ValueError if a model that doesn't know the pocket world has been given no prompts of its own."""
    if given is None and model not in ("pocket", "pocket-rotary"):
        raise ValueError(f"{model} doesn't know the pocket world: give prompts by `projector.py study --pairs FILE`, "
                         "and their library by `ask --library FOLDER`")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.projection --kinds quiz", NAMES)
    cli.add_model_arguments()
    cli.add_argument("--quick", action="store_true", help="few quiz questions and layouts, in less than a minute")
    cli.add_argument("--kinds", nargs="+", choices=POCKET, metavar="KIND",
                     help=f"which prompts of the pocket world; default: {', '.join(POCKET)}")
    cli.add_argument("--pairs", metavar="FILE",
                     help="pairs of similar prompts instead, for any model: CSV with the columns source, target and, "
                     "if there is one, answer")
    cli.add_argument("--encoder", default="pairs", metavar="NAME",
                     help="the retrieval's embeddings: pairs, a ridge regression of words on the training prompts; "
                     "tokens, the model's own embeddings; or a model of sentence-transformers")
    cli.add_argument("--repeats", type=whole_number(1), metavar="N", help="times are medians of N; default: 7")
    cli.add_argument("--out", type=writable_folder, default="results/projection", metavar="FOLDER",
                     help="where results go")  # fmt: skip
    with cli.parse(argv) as args:
        warnings.showwarning = lambda message, *_: print(f"{cli.prog}: {message}", file=sys.stderr)
        if args.pairs and args.kinds:
            raise ValueError("--kinds are of the pocket world, --pairs are your own: choose")
        require_pocket(args.model, args.pairs)
        scale = QUICK if args.quick else Scale()
        scale = replace(scale, repeats=args.repeats or scale.repeats)
        model_class = rope.GPT if args.model == "pocket-rotary" else GPT
        model = load_model(args.model, model_class=model_class, device=args.device, dtype=args.dtype)
        if args.pairs:
            kinds = {Path(args.pairs).stem: read_pairs(Path(args.pairs), args.seed)}
        else:
            names = args.kinds or (["quiz"] if args.quick else POCKET)
            kinds = {kind: pocket_families(kind, args.seed, FEW if args.quick else None) for kind in names}
        tokenizer = load_tokenizer(args.model)
        report(model, tokenizer, kinds, args.encoder, scale, args.model, args.seed, Path(args.out))


if __name__ == "__main__":
    main()
