"""CP-KVP's falsification test: every baseline, metric and ablation of the proposal, its thresholds, and a chart of warm
starts by quality and time. All figures are from prompts, families and facts that the fit hasn't seen.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import tiktoken
from tqdm import tqdm

from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from projector import Layout, Projector, class_of
from studies import projection_measures as quality
from studies.projection_methods import (
    POCKET,
    PROPOSED,
    WRITTEN,
    Experiment,
    Method,
    Splits,
    library_of,
    methods,
    one_token,
    pocket_families,
    raw_tokens,
    read_pairs,
)
from studies.projection_report import claims, details, draw, tables
from studies.projection_segments import SegmentMap
from studies.projection_stages import FEW_STEPS, FULL, Effort, measure_stages
from studies.protocol import StudyLine, claim_tables, with_interval
from support.cli import whole_number
from support.conditions import conditions
from support.files import read_json, write_json
from support.tables import of_records, page

OURS = raw_tokens(Layout(1, tail=16))  # the best of the whole study on quiz questions
GOOD_SHARE, GOOD_TASK, LEAST_SAVED = (
    0.80,
    0.01,
    0.35,
)  # the proposal's thresholds, beside those of projection_measures


@dataclass(frozen=True)
class Scale:
    """How much of the study is run."""

    repeats: int = 7  # times are medians of so many
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # of summary tokens
    tails: tuple[int, ...] = (1, 4, 16, 64)
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1000)
    other_models: bool = (
        True  # times at GPT-2 124M's geometry and the rotary model's positions, too
    )
    stages: Effort = FULL


QUICK = Scale(
    repeats=1, counts=(1, 8), tails=(1, 16), lengths=(32, 128), other_models=False, stages=FEW_STEPS
)
FEW = {"train": 20, "valid": 8, "test": 8}  # families of a quick run


def examine(
    experiment: Experiment,
    scale: Scale,
    default: Method | None = None,
    maps: tuple[SegmentMap, Projector] | None = None,
) -> dict[str, Any]:
    """Run the whole protocol on one kind of prompts and return its record. default: our warm start of another kind;
    maps: that kind's."""
    steps = tqdm(total=6, desc=experiment.name, leave=False)
    tau, auc = quality.choose_tau(experiment)
    retrieved = {guard: quality.retrieve(experiment, "test", guard) for guard in (False, True)}
    high, guarded = ([q for q in queries if q.similarity >= tau] for queries in retrieved.values())
    record: dict[str, Any] = {
        "tokens": mean(len(p.ids) for p in experiment.train),
        "prefix": experiment.prefix,
        "task": experiment.task,
        "prompts": {
            split: sum(map(len, families)) for split, families in experiment.prompts.items()
        },
        "dropped": experiment.dropped,
        "tau": tau if math.isfinite(tau) else None,
        "auc": auc,
        "retrieval": {
            "asked": len(retrieved[False]),
            "stored": len(experiment.stored("test")),
            "with a relative": sum(q.relative is not None for q in retrieved[False]),
            **{
                f"{'guarded, ' if guard else ''}{what}": value
                for guard, asked in retrieved.items()
                for what, value in {
                    "found": sum(q.right for q in asked),
                    "warm": sum(q.similarity >= tau for q in asked),
                    "warm and wrong": sum(q.similarity >= tau and not q.right for q in asked),
                }.items()
            },
        },
    }
    if not high or not guarded:
        return record  # every start is cold
    plane = quality.on_the_plane(experiment, "valid", scale.counts, scale.tails)
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
        found[m.name] = {
            "retrieved": quality.summary_of(rows[m.name]),
            "given": quality.summary_of([quality.measure(experiment, m, r, p) for p, r in given]),
        }
    steps.update()
    proposal, one = methods()[0], one_token()
    record |= {
        "best": ours[0].name,
        "best_method": ours[0],
        "plane": [{k: v for k, v in p.items() if k != "method"} for p in plane],
        "methods": found,
        "without_guard": quality.summary_of(
            [quality.measure(experiment, ours[0], q.found, q.prompt) for q in high]
        ),
        "latency": quality.latencies(experiment, asked, scale.repeats),
    }
    steps.update()
    record["sweep"] = quality.sweep(experiment, scale.counts)
    steps.update()
    record |= {
        "bins": quality.bins(experiment, retrieved[False], (proposal, one, ours[0])),
        "tau_ablation": quality.ablate_tau(experiment, retrieved[False], proposal, ours[0]),
        **quality.confidence(experiment, one, high, rows[one.name]),
        "maps": quality.with_maps(experiment, maps) if maps else None,
        "swap": quality.after_the_swap(experiment, ours[0], given[:24]),
        "verdicts": {method.name: verdict(record, method.name) for method in (proposal, *ours)},
    }
    steps.update()
    record["stages"] = measure_stages(experiment, scale.stages)
    if experiment.fits_as_written:
        record["as written"] = quality.as_written(experiment)
    steps.close()
    return record


def chosen(plane: Sequence[dict[str, Any]]) -> Method:
    """Return the method with the most prompts of low KL among those that save enough."""
    warm = [point for point in plane if point["method"]]
    fast = [point for point in warm if point["saved"] >= LEAST_SAVED]
    return max(fast or warm, key=lambda point: (point["good"], -point["kl"]))["method"]


def adapted(experiment: Experiment, method: Method) -> Method | None:
    """Return a method for the prefix of another kind of prompts, None if its prompts are too short for that."""
    prefix = experiment.prefix if method.layout.prefix else 0
    if experiment.shortest - prefix - method.layout.tail < method.layout.m:
        return None
    return (
        one_token(prefix)
        if "no change" in method.name
        else raw_tokens(replace(method.layout, prefix=prefix))
    )


def verdict(record: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the proposal's thresholds for one method, on prompts at least as similar as tau, and which of them hold.
    As proposed, the exact cache is swapped in after the first token."""
    found, saved = record["methods"][method]["retrieved"], record["latency"][method]["saved"]
    good = found["good"]
    parts: list[tuple[str, bool | None, str]] = [
        ("first token at least 35% sooner", saved[0] >= LEAST_SAVED, with_interval(saved, ".0%")),
        (
            "KL <= 0.05, or perplexity <= 5% up, on 80%",
            good[0] >= GOOD_SHARE,
            with_interval(good, ".0%"),
        ),
    ]
    task = record["task"]
    if task is None:
        parts.append(("task within 1%", None, "no answers to judge by"))
    else:
        lost, name = found[f"{task}_lost"], {"exact": "exact match", "rouge": "ROUGE-L"}[task]
        parts.append(
            (
                f"{name} at most 1% lower",
                lost[0] <= GOOD_TASK,
                f"lower by {with_interval(lost, '.0%')}",
            )
        )
    holds = [part[1] for part in parts]
    word = "REJECTED" if False in holds else "UNDECIDED" if None in holds else "SUPPORTED"
    return {
        "verdict": word,
        "parts": [{"what": what, "holds": h, "figures": text} for what, h, text in parts],
    }


def report(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    kinds: dict[str, Splits],
    encoder: str,
    scale: Scale,
    name_of_model: str,
    seed: int,
    out: Path,
) -> None:
    """Run the protocol on every kind of prompts; print, write and draw the results. The first kind's library is kept
    with our warm start, which the other kinds are measured with, too."""
    summary: dict[str, Any] = {
        "model": name_of_model,
        "conditions": conditions(name_of_model, model),
        "encoder": Path(encoder).name,
        "repeats": scale.repeats,
        "seed": seed,
        "kinds": {},
    }
    default = maps = None
    for name, families in kinds.items():
        experiment = Experiment(
            model, tokenizer, name, families, encoder, seed, scale.stages is FEW_STEPS
        )
        record = examine(experiment, scale, default, maps)
        ours = record.pop("best_method", None)
        if default is None and ours:
            default, maps = ours, quality.maps_of(experiment)
            save_libraries(experiment, ours, record["tau"], encoder, out / "library")
        summary["kinds"][name] = record
        print(page(details(name, record)), flush=True)
        write_json(out / "summary.json", summary)
        del experiment
    lengths = [n for n in scale.lengths if n <= model.config.n_ctx]
    summary["lengths"] = {name_of_model: quality.by_length(model, lengths, scale.repeats)}
    if (
        scale.other_models and name_of_model == "pocket"
    ):  # with random weights: times don't depend on them
        large = GPT(GPTConfig()).eval()
        summary["lengths"]["GPT-2 124M"] = quality.by_length(
            large,
            scale.lengths,
            min(scale.repeats, 5),
            (quality.PROPOSED.m, 2 * quality.PROPOSED.m),
        )
    for model_name, rows in summary["lengths"].items():
        print(
            page(
                [
                    f"Seconds to the first token of {model_name}, and of retrieval apart:",
                    of_records(rows),
                ]
            )
        )
    if scale.other_models and name_of_model == "pocket" and "quiz" in kinds:
        summary["positions"] = quality.both_positions(encoder, kinds["quiz"], seed)
    write_json(out / "summary.json", summary)
    draw(summary, out)
    print(page([*tables(summary), *claim_tables(claims(summary))]))
    print(
        f"\nWritten to {out}; `python3 projector.py ask QUESTION --library {out / 'library'}` asks it"
    )


def add_as_written(args: Namespace) -> None:
    """Measure the proposal as written on the kinds of a record that lack it, one after the other, and add it there."""
    record = read_json(args.out / "summary.json", kinds=dict)
    model = load_model(
        args.model, model_class=class_of(args.model), device=args.device, dtype=args.dtype
    )
    for kind in args.kinds or record["kinds"]:
        if kind not in POCKET or kind not in record["kinds"]:
            raise ValueError(f"{args.out} has no record of {kind}, or it isn't of the pocket world")
        if "as written" in record["kinds"][kind]:
            continue
        families = pocket_families(kind, args.seed)
        experiment = Experiment(
            model, load_tokenizer(args.model), kind, families, args.encoder, args.seed
        )
        measured = quality.as_written(experiment)
        if kind == "quiz":
            save_libraries(experiment, OURS, measured["tau"], args.encoder, args.out / "library")
        record["kinds"][kind]["as written"] = measured | {
            "conditions": conditions(args.model, model)
        }
        write_json(args.out / "summary.json", record)


def save_libraries(
    experiment: Experiment, ours: Method, tau: float, encoder: str, folder: Path
) -> None:
    """Write what `projector.py ask` needs of the test split's stored prompts, not of the training's: ours and, as
    proposed, that with the projector that has mapped them."""
    library_of(experiment, ours, "test", tau, guard=True, others=False).save(
        folder / "ours", encoder
    )
    if experiment.fits_as_written:
        library_of(experiment, WRITTEN, "test", tau, others=False).save(
            folder / "proposed", encoder
        )
        experiment.projector(PROPOSED, experiment.as_written).save(
            folder / "proposed" / "projector.safetensors"
        )


def require_pocket(model: str, given: str | None) -> None:
    """Raise ValueError if a model that doesn't know the pocket world has been given no prompts of its own."""
    if given is None and model not in ("pocket", "pocket-rotary"):
        raise ValueError(
            f"{model} doesn't know the pocket world: give prompts by `python3 -m studies.projection --pairs FILE`, "
            "and their libraries by `ask --library FOLDER`"
        )


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "projection",
        "few quiz questions and layouts",
        models=f"pocket or pocket-rotary; with --pairs FILE also {NAMES}",
    )
    cli.add_argument(
        "--kinds",
        nargs="+",
        choices=POCKET,
        metavar="KIND",
        help=f"which prompts of the pocket world; default: {', '.join(POCKET)}",
    )
    cli.add_argument(
        "--as-written",
        action="store_true",
        help="measure the proposal as written alone, on kinds that the record in --out has but for that, "
        "and add it; the quiz's libraries are kept beside it",
    )
    cli.add_argument(
        "--pairs",
        metavar="FILE",
        help="pairs of similar prompts instead, for any model: CSV with the columns source, target and, "
        "optionally, answer",
    )
    cli.add_argument(
        "--encoder",
        default="pairs",
        metavar="NAME",
        help="the retrieval's embeddings: pairs, a ridge regression of words on the training prompts; "
        "tokens, the model's own embeddings; or a model of sentence-transformers",
    )
    cli.add_argument(
        "--repeats", type=whole_number(1), metavar="N", help="times are medians of N; default: 7"
    )
    with cli.parse(argv) as args:
        if args.as_written:
            return add_as_written(args)
        if args.pairs and args.kinds:
            raise ValueError("--kinds are of the pocket world, --pairs are your own: choose")
        require_pocket(args.model, args.pairs)
        scale = QUICK if args.quick else Scale()
        scale = replace(scale, repeats=args.repeats or scale.repeats)
        model = load_model(
            args.model, model_class=class_of(args.model), device=args.device, dtype=args.dtype
        )
        if args.pairs:
            kinds = {Path(args.pairs).stem: read_pairs(Path(args.pairs), args.seed)}
        else:
            names = args.kinds or (["quiz"] if args.quick else POCKET)
            kinds = {
                kind: pocket_families(kind, args.seed, FEW if args.quick else None)
                for kind in names
            }
        report(
            model,
            load_tokenizer(args.model),
            kinds,
            args.encoder,
            scale,
            args.model,
            args.seed,
            args.out,
        )


if __name__ == "__main__":
    main()
