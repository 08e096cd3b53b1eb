"""The refresh study: what a student writes on its teacher's KV cache, and what refreshing that cache brings.

The tables of the source with means and intervals, the error of the cache itself, and whether the gates' signals say
what they are taken to say.

`python3 -m studies.refreshing`, or `python3 overfill.py study`, takes half an hour; `--quick` a minute.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from overfill import (
    Entropy,
    Gate,
    MonteCarloDropout,
    Pair,
    Periodic,
    Policy,
    ProbeKL,
    dropout_of,
    load_pair,
    misfit,
    read_along,
    speculative,
    tokens_of,
)
from pocket import corpus
from studies.refreshing_claims import claims
from studies.refreshing_report import draw, print_tables, write_tables
from studies.refreshing_signals import signals_of, simulation, threshold_for
from studies.refreshing_texts import (
    BUDGETS,
    LEAST,
    PROBE_EVERY,
    PROBE_WINDOW,
    Experiment,
    Size,
    Writer,
    figures_of,
    pocket_prompts,
    prompts_of,
    times,
)
from support.cli import CommandLine, whole_number, writable_folder
from support.files import write_json
from support.statistics import bootstrap, kl

FULL = Size(prompts=50, seeds=3, new_tokens=320, timed=4, repeats=4, facts=200, simulations=20)
QUICK = Size(prompts=5, seeds=1, new_tokens=72, timed=1, repeats=1, facts=8, simulations=3)


# --- What is compared -----------------------------------------------------------------------------------------------


def calibrated(experiment: Experiment) -> dict[str, Gate]:
    """Return the gates, with thresholds that meet their budgets on the split "valid"."""

    def fitted(signals: Tensor, gate: Gate, budget: float) -> Gate:
        n = gate.every  # signals are looked at every so many tokens
        return replace(gate, threshold=threshold_for(signals[:, n - 1 :: n], budget * n, math.ceil(gate.cooldown / n)))

    never = math.inf
    probe = ProbeKL(never, every=PROBE_EVERY)
    top = ProbeKL(never, every=PROBE_EVERY, window=PROBE_WINDOW, reads="window")
    signals = experiment.record("student", {"entropy": Entropy(never).signal, "probe": probe.signal}, "valid")
    gates: dict[str, Gate] = {
        f"entropy, {b:g} in 1,000": fitted(signals["entropy"], Entropy(never), b) for b in BUDGETS
    }
    gates[f"entropy, {BUDGETS[1]:g}, teacher's next"] = replace(gates[f"entropy, {BUDGETS[1]:g} in 1,000"],
                                                                teacher_next=True)  # fmt: skip
    gates[f"probe-KL, {BUDGETS[1]:g} in 1,000"] = fitted(signals["probe"], probe, BUDGETS[1])
    signals = experiment.record("student", {"probe": top.signal}, "valid")
    gates[f"probe-KL, reads {PROBE_WINDOW} on top"] = fitted(signals["probe"], top, BUDGETS[1])
    if experiment.dropout:
        rate = experiment.rates[experiment.dropout]
        both = {"entropy": Entropy(never), "MC dropout": MonteCarloDropout(never, rate=rate)}
        signals = experiment.record(experiment.dropout, {name: gate.signal for name, gate in both.items()}, "valid")
        for name, gate in both.items():
            gates[f"dropout student: {name}, {BUDGETS[1]:g}"] = fitted(signals[name], gate, BUDGETS[1])
    return gates


def writers_of(experiment: Experiment, gates: dict[str, Gate]) -> list[Writer]:
    """Return all writers of writing that the models allow, in the order of the source's tables."""
    writers = [Writer("teacher", "teacher"), Writer("OverFill", policy=Policy()), Writer("student", "student")]
    if "alone" in experiment.models:
        writers.append(Writer("student trained alone", "alone"))
    writers += [Writer(f"periodic, {n}", policy=Periodic(n)) for n in (256, 128, 64, 32, 16)]
    writers.append(Writer("windowed, last 16 of 64", policy=Periodic(64, window=16)))
    writers.append(Writer("speculative, 8", policy=speculative(8)))
    if not misfit(experiment.models["teacher"], experiment.models["student"]):
        writers += [Writer(f"as published, every {n}", published=n) for n in (64, 8)]
    if experiment.dropout:
        writers.append(Writer("dropout student: OverFill", experiment.dropout, Policy()))
    return writers + [Writer(name, experiment.dropout if name.startswith("dropout") else "student", gate)
                   for name, gate in gates.items()]  # fmt: skip


def trained_differently(experiment: Experiment) -> list[Writer]:
    """Return the writers that tell students apart by what they were trained on."""
    writers = []
    for student in [name for name in ("alone", "prompt", "student") if name in experiment.models]:
        writers.append(Writer(f"{student}, alone", student))
        writers += [Writer(f"{student}, {label}", student, policy) for label, policy in
                 (("OverFill", Policy()), ("periodic, 64", Periodic(64)), ("speculative, 8", speculative(8)))]
    return writers


def facts_right(experiment: Experiment, writers: Sequence[Writer]) -> dict[str, tuple[float, float, float]]:
    """Return how many questions on what was said early in a story each writer answers exactly, greedily: short outputs
    after long prompts, where OverFill is said to work best."""
    questions = corpus.recall_questions("test", experiment.size.facts)
    found = {}
    for writer in writers:
        right = []
        for question in tqdm(questions, desc=f"facts: {writer.name}", leave=False):
            ids = experiment.tokenizer.encode_ordinary(question.prompt)
            text = ""
            tokens, _ = experiment.tokens(writer, torch.tensor([ids], device=experiment.device), 24)
            for token in tokens:
                text += experiment.tokenizer.decode([int(token)])
                if "\n" in text or int(token) == experiment.tokenizer.eot_token:
                    break
            right.append(text.partition("\n")[0].strip() == question.answer)
        found[writer.name] = bootstrap(np.array(right, dtype=float))
    return found


def three_writers(experiment: Experiment) -> list[Writer]:
    """Return the teacher, OverFill and the student that is the best alone."""
    alone = Writer("student trained alone", "alone") if "alone" in experiment.models else Writer("student", "student")
    return [Writer("teacher", "teacher"), Writer("OverFill", policy=Policy()), alone]


def by_prompt_length(experiment: Experiment, lengths: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Return perplexities of the first n tokens after prompts of other lengths."""
    rows = []
    for length in lengths:
        prompts = {"test": pocket_prompts(experiment.tokenizer, "test", experiment.size.prompts, length)}
        size = replace(experiment.size, new_tokens=n)
        other = Experiment(experiment.models, experiment.tokenizer, prompts, size, {}, experiment.seed)
        written = {writer.name: other.write(writer, 1.0) for writer in three_writers(experiment)}
        rows.append({"tokens": length, **{name: figures_of(other, w) for name, w in written.items()}})
    return rows


@torch.no_grad()
def cache_errors(experiment: Experiment, writers: Sequence[Writer], prompts: int) -> dict[str, dict[str, list[float]]]:
    """Return, by writer, over the tokens of a text: the error of the student's cache, |C_S - C_T| / |C_T| with the
    teacher's own cache (the source's E_t), and KL(teacher || student) of the next token in nats.

    All writers read one text, which OverFill has written without a refresh, so that they differ by their caches alone.
    """
    ids = max((ids for _, ids in experiment.groups("test", 1)), key=len)[:prompts]  # of the commonest length
    generator = torch.Generator(experiment.device).manual_seed(experiment.seed)
    overfill = Writer("OverFill", policy=Policy())
    tokens, _ = experiment.tokens(overfill, ids, experiment.size.new_tokens, temperature=1.0, generator=generator)
    new = torch.cat(list(tokens), 1)  # (B, N)
    truth = KVCache()
    expected = experiment.models["teacher"](torch.cat([ids, new], 1), truth)[:, ids.size(1) :]  # (B, N, V)
    found = {}
    for writer in writers:
        room = partial(SlidingWindowCache, ids.size(1) + new.size(1))
        pair = Pair(experiment.models["teacher"], experiment.models[writer.student], ids, room)
        errors, divergences = [], []
        along = tqdm(read_along(pair, new, writer.policy), f"cache: {writer.name}", new.size(1), leave=False)
        for t, logits in enumerate(along):
            divergences.append(round(float(kl(expected[:, t], logits).mean()), 5))
            n = len(pair.cache)
            parts = [(a[..., :n, :], b[..., :n, :]) for a, b in zip(pair.cache.layers, truth.layers, strict=True)]
            off, norm = (sum(float(x.square().sum()) for x in xs) for xs in
                         ((a - b for a, b in parts), (b for _, b in parts)))  # fmt: skip
            errors.append(round(math.sqrt(off / norm), 5))
        found[writer.name] = {"error": errors, "kl": divergences}
    return found


def report(experiment: Experiment, about: dict[str, Any], out: Path) -> None:
    """Measure everything; print the tables and the verdicts; write them as CSV and JSON, and draw the figures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):  # can be written to? before anything takes time
        pass
    begun, size = time.perf_counter(), experiment.size
    gates = calibrated(experiment)
    writers = writers_of(experiment, gates)
    known = about["prompts"] == "pocket"  # whose documents come in any length, and have questions with answers
    record: dict[str, Any] = {**about, "tokens": size.new_tokens, "seeds": size.seeds,
                              "measured_prompts": len(experiment.prompts["test"]),
                              "prompt_tokens": sorted({len(p) for p in experiment.prompts["test"]}),
                              "thresholds": {name: gate.threshold for name, gate in gates.items()}}  # fmt: skip
    record["ways"] = {writer.name: {} for writer in writers}
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        for writer in tqdm(writers, desc=mode, leave=False):
            record["ways"][writer.name][mode] = figures_of(experiment, experiment.write(writer, temperature))
    all_read = Writer("periodic, 64, all read", policy=Periodic(64, reads="all"))
    for name, figures in times(experiment, [*writers, all_read]).items():
        record["ways"].setdefault(name, {})["times"] = figures
    if {"alone", "prompt"} & {*experiment.models}:
        measured = {(writer.student, writer.policy): record["ways"][writer.name]["sampled"] for writer in writers
                    if not writer.published}  # fmt: skip
        record["students"] = {}
        for writer in tqdm(trained_differently(experiment), desc="students", leave=False):
            before = measured.get((writer.student, writer.policy))
            record["students"][writer.name] = before or figures_of(experiment, experiment.write(writer, 1.0))
    if known:
        n = size.new_tokens // 2
        record["lengths"] = by_prompt_length(experiment, (32, 96, 192), n)
        record["facts"] = facts_right(experiment, three_writers(experiment))
    if not misfit(experiment.models["teacher"], experiment.models["student"]):  # else the two caches can't be compared
        gate = f"entropy, {BUDGETS[1]:g} in 1,000"
        record["cache"] = cache_errors(experiment, [
            Writer("OverFill", policy=Policy()), Writer("periodic, 64", policy=Periodic(64)),
            Writer("windowed, last 16 of 64", policy=Periodic(64, window=16)),
            Writer("speculative, 8", policy=speculative(8)), Writer(gate, policy=gates[gate]),
            *(Writer(f"trained on {what}: OverFill", name, Policy()) for name, what in
              (("alone", "its own cache"), ("prompt", "prompts")) if name in experiment.models),
        ], prompts=max(1, size.prompts // 6))  # fmt: skip
    record["signals"] = {name: signals_of(experiment, name)
                         for name in dict.fromkeys(("student", experiment.dropout)) if name}  # fmt: skip
    record["dropout_student"] = experiment.dropout
    record["simulation"] = simulation()
    fires = [record["simulation"]["fires"], *(simulation(seed=seed)["fires"] for seed in range(1, size.simulations))]
    record["ambiguous"] = {
        rule: {name: sum(any(250 <= t < 350 for t in run[rule][name]) for run in fires) / len(fires)
               for name in fires[0][rule]} for rule in fires[0]
    }  # fmt: skip
    record["claims"] = claims(record)
    record["minutes"] = (time.perf_counter() - begun) / 60
    print_tables(record)
    write_tables(record, out)
    draw(record, out)
    write_json(out / "summary.json", record, indent=1)
    print(f"\n{record['minutes']:.1f} minutes. Written to {out}")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.refreshing --quick", NAMES)
    cli.add_model_arguments("--teacher")
    cli.add_argument("--student", default="pocket-student", metavar="NAME", help="the model that decodes")
    cli.add_argument("--max-new-tokens", type=whole_number(2), metavar="N", help="tokens to write; default: "
                     f"{FULL.new_tokens}, with --quick {QUICK.new_tokens}")  # fmt: skip
    cli.add_argument("--prompts", metavar="FILE", help="prompts of your own, for any models: CSV, column prompt")
    cli.add_argument("--prompt-tokens", type=whole_number(1), default=192, metavar="N",
                     help="tokens of the pocket world's prompts")  # fmt: skip
    cli.add_argument("--quick", action="store_true", help="less of everything, in about a minute")
    cli.add_argument("--out", type=writable_folder, default="results/refreshing", metavar="FOLDER",
                     help="where results go")  # fmt: skip
    with cli.parse(argv) as args:
        options = {"device": args.device, "dtype": args.dtype}
        teacher, student, tokenizer = load_pair(args.model, args.student, **options)
        if not args.prompts and tokens_of(tokenizer) != tokens_of(load_tokenizer("pocket")):
            raise ValueError(f"{args.model} doesn't have the tokens of the pocket world: give it --prompts FILE")
        size = QUICK if args.quick else FULL
        size = replace(size, new_tokens=args.max_new_tokens or size.new_tokens)
        if size.new_tokens < LEAST:
            raise ValueError(f"{size.new_tokens} tokens are too few to measure refreshes: at least {LEAST}")
        models, names = {"teacher": teacher, "student": student}, {"student": args.student}
        if args.student == "pocket-student":
            names |= {kind: f"pocket-student-{kind}" for kind in ("alone", "prompt", "dropout")}
            models |= {kind: load_model(names[kind], model_class=GPT, **options) for kind in [*names][1:]}
        room = min(teacher.config.n_ctx, student.config.n_ctx) - size.new_tokens
        prompts = prompts_of(tokenizer, args.prompts, size.prompts, args.prompt_tokens, room)
        rates = {key: rate for key, name in names.items() if (rate := dropout_of(name))}
        about = {"teacher": args.model, "student": args.student, "prompts": args.prompts or "pocket",
                 "device": args.device, "dtype": str(args.dtype).removeprefix("torch.")}  # fmt: skip
        report(Experiment(models, tokenizer, prompts, size, rates, args.seed), about, Path(args.out))


if __name__ == "__main__":
    main()
