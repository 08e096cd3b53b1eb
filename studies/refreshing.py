"""The refresh study: a student's texts on its teacher's KV cache, and the effect of refreshing that cache.

It has the tables of the source with means and intervals, the error of the cache itself, and a test of the gates'
signals.

`python3 -m studies.refreshing`, or `python3 overfill.py study`, takes two hours; `--quick` a minute.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

import overfill
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from overfill import Pair, Periodic, Policy, speculative
from pocket import corpus
from studies import refreshing_measures as measures
from studies import refreshing_times
from studies.protocol import StudyLine, claim_tables
from studies.refreshing_measures import BUDGETS, Setup, Size, Writer
from studies.refreshing_report import claims, details, draw, tables
from support.cli import PROMPT, whole_number
from support.conditions import SIZES, conditions, is_geometry
from support.files import write_json
from support.statistics import bootstrap, kl
from support.tables import page, table

FULL = Size(prompts=50, seeds=1, new_tokens=1000, timed=3, repeats=3, facts=200, simulations=20)
PROMPT_TOKENS = 192
QUICK = Size(prompts=5, seeds=1, new_tokens=72, timed=1, repeats=1, facts=8, simulations=3)
MODES = {"sampled": 1.0, "greedy": 0.0}  # temperatures
ALONE = {"student": "student", "alone": "student trained alone"}  # students on a cache of their own, by model


# --- What is compared -----------------------------------------------------------------------------------------------


def fitted(signals: Tensor, gate: overfill.Gate, budget: float) -> overfill.Gate:
    """Return the gate with the threshold that meets a budget, given its signals (B, T) where nothing refreshes."""
    n = gate.every  # signals are looked at every so many tokens
    threshold = measures.threshold_for(signals[:, n - 1 :: n], budget * n, math.ceil(gate.cooldown / n))
    return replace(gate, threshold=threshold)


def calibrated(setup: Setup, temperature: float) -> dict[str, overfill.Gate]:
    """Return the gates, with thresholds that meet their budgets on texts of that temperature, of the split "valid"."""
    never = math.inf
    probe = overfill.ProbeKL(never, every=measures.PROBE_EVERY)
    top = overfill.ProbeKL(never, every=measures.PROBE_EVERY, window=measures.PROBE_WINDOW, reads="window")
    both = {"entropy": overfill.Entropy(never).signal, "probe": probe.signal}
    signals = setup.record("student", both, "valid", temperature)
    gates: dict[str, overfill.Gate] = {
        f"entropy, {b:g} in 1,000": fitted(signals["entropy"], overfill.Entropy(never), b) for b in BUDGETS
    }
    gates[f"entropy, {BUDGETS[1]:g}, teacher's next"] = replace(gates[f"entropy, {BUDGETS[1]:g} in 1,000"],
                                                                teacher_next=True)  # fmt: skip
    gates[f"probe-KL, {BUDGETS[1]:g} in 1,000"] = fitted(signals["probe"], probe, BUDGETS[1])
    signals = setup.record("student", {"probe": top.signal}, "valid", temperature)
    gates[f"probe-KL, reads {measures.PROBE_WINDOW} on top"] = fitted(signals["probe"], top, BUDGETS[1])
    if setup.dropout:
        rate = setup.rates[setup.dropout]
        two = {"entropy": overfill.Entropy(never), "MC dropout": overfill.MonteCarloDropout(never, rate=rate)}
        signals = setup.record(setup.dropout, {name: gate.signal for name, gate in two.items()}, "valid", temperature)
        for name, gate in two.items():
            gates[f"dropout student: {name}, {BUDGETS[1]:g}"] = fitted(signals[name], gate, BUDGETS[1])
    return gates


def writers_of(setup: Setup, gates: dict[str, overfill.Gate]) -> list[Writer]:
    """Return all writers of writing that the models allow, in the order of the source's tables."""
    writers = [Writer("teacher", "teacher"), Writer("OverFill", policy=Policy()), Writer("student", "student")]
    if "alone" in setup.models:
        writers.append(Writer("student trained alone", "alone"))
    writers += [Writer(f"periodic, {n}", policy=Periodic(n)) for n in (256, 128, 64, 32, 16)]
    writers.append(Writer("windowed, last 16 of 64", policy=Periodic(64, window=16)))
    writers.append(Writer("speculative, 8", policy=speculative(8)))
    if not overfill.misfit(setup.models["teacher"], setup.models["student"]):
        writers += [Writer(f"as published, every {n}", published=n) for n in (64, 8)]
    if setup.dropout:
        writers.append(Writer("dropout student: OverFill", setup.dropout, Policy()))
    return writers + [Writer(name, setup.dropout if name.startswith("dropout") else "student", gate)
                   for name, gate in gates.items()]  # fmt: skip


def trained_differently(setup: Setup, temperature: float) -> list[Writer]:
    """Return the writers for comparing students by their training, each with a gate of its own."""
    writers, entropy = [], overfill.Entropy(math.inf)
    for student in [name for name in ("alone", "prompt", "student") if name in setup.models]:
        signals = setup.record(student, {"entropy": entropy.signal}, "valid", temperature)["entropy"]
        gate = fitted(signals, entropy, BUDGETS[1])
        writers.append(Writer(f"{student}, alone", student))
        writers += [Writer(f"{student}, {label}", student, policy) for label, policy in
                 (("OverFill", Policy()), ("periodic, 64", Periodic(64)), ("speculative, 8", speculative(8)),
                  (f"entropy, {BUDGETS[1]:g} in 1,000", gate))]
    return writers


def facts_right(setup: Setup, writers: Sequence[Writer]) -> dict[str, tuple[float, float, float]]:
    """Return how many questions on the beginning of a story each writer answers exactly, greedily: short outputs
    after long prompts, where OverFill is said to work best."""
    questions = corpus.recall_questions("test", setup.size.facts)
    found = {}
    for writer in writers:
        right = []
        for question in tqdm(questions, desc=f"facts: {writer.name}", leave=False):
            ids = setup.tokenizer.encode_ordinary(question.prompt)
            text = ""
            tokens, _ = setup.tokens(writer, torch.tensor([ids], device=setup.device), 24)
            for token in tokens:
                text += setup.tokenizer.decode([int(token)])
                if "\n" in text or int(token) == setup.tokenizer.eot_token:
                    break
            right.append(text.partition("\n")[0].strip() == question.answer)
        found[writer.name] = bootstrap(np.array(right, dtype=float))
    return found


def three_writers(setup: Setup) -> list[Writer]:
    """Return the teacher, OverFill and the student that is the best alone."""
    alone = Writer("student trained alone", "alone") if "alone" in setup.models else Writer("student", "student")
    return [Writer("teacher", "teacher"), Writer("OverFill", policy=Policy()), alone]


def by_prompt_length(setup: Setup, lengths: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Return perplexities of the first n tokens after prompts of other lengths."""
    rows = []
    for length in lengths:
        prompts = {"test": measures.pocket_prompts(setup.tokenizer, "test", setup.size.prompts, length)}
        size = replace(setup.size, new_tokens=n)
        other = Setup(setup.models, setup.tokenizer, prompts, size, {}, setup.seed)
        written = {writer.name: other.write(writer, 1.0) for writer in three_writers(setup)}
        rows.append({"tokens": length, **{name: measures.figures_of(other, w) for name, w in written.items()}})
    return rows


@torch.no_grad()
def cache_errors(setup: Setup, writers: Sequence[Writer], prompts: int) -> dict[str, dict[str, list[float]]]:
    """Return, by writer, over the tokens of a text: the error of the written part of the student's cache,
    |C_S - C_T| / |C_T| with the teacher's own cache (the source's E_t), and KL(teacher || student) of the next token in
    nats, the means over texts; by text the error of the newest 32 entries after 32 tokens and after all, and the mean
    KL of the first 32 and after the first 64. Of students alone, only KL.

    All writers read one text, which OverFill has written without a refresh, so that they differ by their caches alone.
    The prompt's entries are left out: they are the teacher's own.
    """
    ids = max((ids for _, ids in setup.groups("test", 1)), key=len)[:prompts]  # of the commonest length
    generator = torch.Generator(setup.device).manual_seed(setup.seed)
    writer = Writer("OverFill", policy=Policy())
    tokens, _ = setup.tokens(writer, ids, setup.size.new_tokens, temperature=1.0, generator=generator)
    new = torch.cat(list(tokens), 1)  # (B, N)
    truth = KVCache()
    begin, first = ids.size(1), min(measures.SPANS[0], new.size(1))
    text = torch.cat([ids, new], 1)
    expected = setup.models["teacher"](text, truth)[:, begin:]  # (B, N, V)

    def divergence(kls: np.ndarray) -> dict[str, list[float]]:
        """kls: nats (B, N)."""
        return {"kl": kls.mean(0).round(5).tolist(), "first_kl_by_text": kls[:, :first].mean(1).round(5).tolist(),
                "kl_by_text": kls[:, 64 if new.size(1) > 64 else 0 :].mean(1).round(5).tolist()}  # fmt: skip

    def error(cache: KVCache, start: int) -> np.ndarray:
        """Return the error (B,) of the entries of a cache from a position on."""
        parts = [(a[..., start : len(cache), :], b[..., start : len(cache), :])
                 for a, b in zip(cache.layers, truth.layers, strict=True)]  # fmt: skip
        off, norm = (sum(x.square().sum((0, 2, 3, 4)).double().cpu().numpy() for x in xs)
                     for xs in ((a - b for a, b in parts), (b for _, b in parts)))
        return np.sqrt(off / norm)

    found = {name: divergence(kl(expected, setup.models[key](text)[:, begin:]).double().cpu().numpy())
             for key, name in ALONE.items() if key in setup.models}  # fmt: skip
    for writer in writers:
        room = partial(SlidingWindowCache, text.size(1))
        pair = Pair(setup.models["teacher"], setup.models[writer.student], ids, room)
        errors, newest, divergences = [], [], []  # (B,), token by token
        along = tqdm(overfill.read_along(pair, new, writer.policy), f"cache: {writer.name}", new.size(1), leave=False)
        for t, logits in enumerate(along):
            divergences.append(kl(expected[:, t], logits).double().cpu().numpy())
            errors.append(error(pair.cache, begin))
            if t + 1 in (first, new.size(1)):
                newest.append(error(pair.cache, len(pair.cache) - first).round(5).tolist())
        found[writer.name] = {"error": np.mean(errors, 1).round(5).tolist(), "newest_by_text": newest,
                              **divergence(np.stack(divergences, 1))}  # fmt: skip
    return found


def report(setup: Setup, about: dict[str, Any], out: Path) -> None:
    """Measure everything; print the tables and the verdicts, write the record and draw the figures."""
    begun, size = time.perf_counter(), setup.size
    gates = {mode: calibrated(setup, temperature) for mode, temperature in MODES.items()}
    writers = {mode: writers_of(setup, found) for mode, found in gates.items()}
    known = about["prompts"] == "pocket"  # whose documents come in any length, and have questions with answers
    models = setup.models
    record: dict[str, Any] = {**about, "conditions": conditions(about["teacher"], models["teacher"]),
                              "student_parameters": sum(p.numel() for p in models["student"].parameters()),
                              "tokens": size.new_tokens, "seeds": size.seeds,
                              "measured_prompts": len(setup.prompts["test"]),
                              "prompt_tokens": sorted({len(p) for p in setup.prompts["test"]}),
                              "thresholds": {mode: {name: gate.threshold for name, gate in found.items()}
                                             for mode, found in gates.items()}}  # fmt: skip
    record["methods"] = {writer.name: {} for writer in writers["sampled"]}
    for mode, temperature in MODES.items():
        for writer in tqdm(writers[mode], desc=mode, leave=False):
            record["methods"][writer.name][mode] = measures.figures_of(setup, setup.write(writer, temperature))
    all_read = Writer("periodic, 64, all read", policy=Periodic(64, reads="all"))
    for name, figures in measures.times(setup, [*writers["sampled"], all_read]).items():
        record["methods"].setdefault(name, {})["times"] = figures
    if {"alone", "prompt"} & {*setup.models}:
        record["students"] = {}
        for mode, temperature in MODES.items():
            measured = {(writer.student, writer.policy): record["methods"][writer.name][mode]
                        for writer in writers[mode] if not writer.published}  # fmt: skip
            for writer in tqdm(trained_differently(setup, temperature), desc=f"students, {mode}", leave=False):
                before = measured.get((writer.student, writer.policy))
                figures = before or measures.figures_of(setup, setup.write(writer, temperature))
                record["students"].setdefault(writer.name, {})[mode] = figures
    if known:
        n = min(size.new_tokens // 2, 160)
        longest = min(models[name].config.n_ctx for name in ("teacher", "student")) - n
        record["lengths"] = by_prompt_length(setup, sorted({min(k, longest) for k in (32, 192, 768)}), n)
        record["facts"] = facts_right(setup, three_writers(setup))
    if not overfill.misfit(setup.models["teacher"], setup.models["student"]):  # else the two caches can't be compared
        gate = f"entropy, {BUDGETS[1]:g} in 1,000"
        record["cache"] = cache_errors(setup, [
            Writer("OverFill", policy=Policy()), Writer("periodic, 64", policy=Periodic(64)),
            Writer("windowed, last 16 of 64", policy=Periodic(64, window=16)),
            Writer("speculative, 8", policy=speculative(8)), Writer(gate, policy=gates["sampled"][gate]),
            *(Writer(f"trained on {what}: OverFill", name, Policy()) for name, what in
              (("alone", "its own cache"), ("prompt", "prompts")) if name in setup.models),
        ], prompts=max(1, size.prompts // 6))  # fmt: skip
    record["signals"] = {name: measures.signals_of(setup, name)
                         for name in dict.fromkeys(("student", setup.dropout)) if name}  # fmt: skip
    record["dropout_student"] = setup.dropout
    simulations = [measures.simulation(seed=seed) for seed in range(size.simulations)]
    record["simulation"], fires = simulations[0], [run["fires"] for run in simulations]
    record["ambiguous"] = {
        rule: {name: sum(any(250 <= t < 350 for t in run[rule][name]) for run in fires) / len(fires)
               for name in fires[0][rule]} for rule in fires[0]
    }  # fmt: skip
    record["minutes"] = (time.perf_counter() - begun) / 60
    write_json(out / "summary.json", record, indent=1)
    draw(record, out)
    print(page([*tables(record), *claim_tables(claims(record)), *details(record),
                f"{record['minutes']:.1f} minutes. Written to {out}"]))


@torch.no_grad()
def demo(teacher: GPT, student: GPT, tokenizer: tiktoken.Encoding, policies: dict[str, Policy],
         args: argparse.Namespace) -> None:  # fmt: skip
    """Print what the teacher, the student and pairs of both write greedily after a prompt, how long it takes, and how
    far their predictions are from the teacher's on texts that it has sampled.

    The prompt is that of the options, or the beginning of a document of the corpus: then of six documents the teacher
    samples a text. Raises ValueError if the prompt and the new tokens exceed the context.
    """
    policies = {"OverFill": Policy(), **policies}
    prompts = [tokenizer.encode(args.prompt or PROMPT, allowed_special="all")] * 6
    if not args.prompt and overfill.tokens_of(tokenizer) == overfill.tokens_of(load_tokenizer("pocket")):
        prompts = measures.pocket_prompts(tokenizer, "test", 6, PROMPT_TOKENS)
    n, room = args.max_new_tokens or 128, min(teacher.config.n_ctx, student.config.n_ctx)
    if len(prompts[0]) + n > room:
        raise ValueError(f"{len(prompts[0])} tokens of the prompt and {n} more exceed the context of {room}")
    ids = torch.tensor(prompts, device=args.device)
    width, models = ids.size(1), {"teacher": teacher, "student alone": student}
    generator = torch.Generator(ids.device).manual_seed(args.seed)
    new = torch.cat(list(generate(teacher, ids, n, temperature=1.0, generator=generator)), 1)  # (B, n)
    logits = {name: model(torch.cat([ids, new], 1))[:, width:] for name, model in models.items()}  # (B, n, V)
    for name, policy in policies.items():
        logits[name] = torch.stack(list(overfill.read_along(Pair(teacher, student, ids), new, policy)), 1)
    texts, seconds, reads = {}, dict.fromkeys(logits, math.inf), {"student alone": "0", "teacher": f"{width} + {n - 1}"}
    for name in 2 * [*logits]:  # in turn, and the faster turn counts
        begun, pair = time.perf_counter(), Pair(teacher, student, ids[:1])
        tokens = (generate(models[name], pair.ids, n) if name in models else
                  overfill.generate_refreshed(pair, n, policies[name]))
        texts[name] = [int(token) for token in tokens]
        seconds[name] = min(seconds[name], time.perf_counter() - begun)
        reads.setdefault(name, f"{width} + {int(pair.teacher_tokens)}")
    same = {name: next((i for i in range(n) if text[i] != texts["teacher"][i]), n) for name, text in texts.items()}
    rows = [[name, f"{1e3 * seconds[name]:.0f}", f"{n / seconds[name]:.0f}", reads[name],
             f"{float(kl(logits['teacher'], logits[name]).mean()):.3f}", f"{same[name]} of {n}"]
            for name in logits]  # fmt: skip
    print(f"A prompt of {width} tokens, which ends with: {tokenizer.decode(ids[0, -20:].tolist())!r}\n")
    print(table(["", "ms", "tokens/s", "teacher reads", "KL to teacher", "same tokens"], rows))
    print(f"""
ms, tokens/s:   {n} tokens after the prompt, always the likeliest; prefill included; the faster of two turns
teacher reads:  tokens of the prompt + tokens of the text
KL to teacher:  of the next token, in nats, mean over {len(ids)} texts of {n} tokens that the teacher has sampled
same tokens:    as in the teacher's text, up to the first difference; each text goes on from there:
""")
    for name, text in texts.items():
        at = same[name] % n
        print(f"  {name:{max(map(len, texts))}}  {'... ' * (at > 0)}{tokenizer.decode(text[at : at + 20])!r}")
    print("""
Exact: the first token is the teacher's, and right after a refresh of the whole text so is the student's cache.
Approximate: every further token, because the student predicts it.

The full study, in two hours (--quick: in a minute): python3 overfill.py study""")


def at_size(args: argparse.Namespace) -> None:
    """Measure the times of a geometry, print and write them."""
    n, prompt = args.max_new_tokens or (70 if args.quick else 260), args.prompt_tokens or 64
    if n < 66:
        raise ValueError(f"{n} tokens are too few to time a refresh every 64: at least 66")
    if prompt + n > (room := GPTConfig().n_ctx):
        raise ValueError(f"{prompt} tokens of the prompt and {n} more exceed the context of {room}")
    record = refreshing_times.measured(args.model, args.device, args.dtype, prompt, n, 1 if args.quick else 5,
                                       args.seed)  # fmt: skip
    write_json(args.out / "geometry.json", record, indent=1)
    print(page([refreshing_times.condition(record), refreshing_times.times_table(record),
                f"Written to {args.out}"]))  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "refreshing", "less of everything", model="--teacher", models=f"{NAMES}; or, for times "
                    f"alone, random weights of the size of {', '.join(SIZES)} or LAYERSxHEADSxWIDTH")  # fmt: skip
    cli.add_argument("--student", default="pocket-student", metavar="NAME", help="the model that decodes")
    cli.add_argument("--max-new-tokens", type=whole_number(2), metavar="N", help="tokens to write; default: "
                     f"{FULL.new_tokens}, or as many as fit, with --quick {QUICK.new_tokens}")  # fmt: skip
    cli.add_argument("--prompts", metavar="FILE", help="prompts of your own, for any models: CSV, column prompt")
    cli.add_argument("--prompt-tokens", type=whole_number(1), metavar="N",
                     help=f"tokens of the pocket world's prompts; default: {PROMPT_TOKENS}")  # fmt: skip
    with cli.parse(argv) as args:
        if args.prompts and args.prompt_tokens:
            raise ValueError("--prompt-tokens is the length of pocket's prompts, and --prompts are your own: choose")
        options = {"device": args.device, "dtype": args.dtype}
        if is_geometry(args.model):
            at_size(args)
            return
        teacher, student, tokenizer = overfill.load_pair(args.model, args.student, **options)
        if not args.prompts and overfill.tokens_of(tokenizer) != overfill.tokens_of(load_tokenizer("pocket")):
            raise ValueError(f"{args.model} doesn't have the tokens of the pocket world: give it --prompts FILE")
        size = QUICK if args.quick else FULL
        context, first = min(teacher.config.n_ctx, student.config.n_ctx), args.prompt_tokens or PROMPT_TOKENS
        fits = max(measures.LEAST, min(size.new_tokens, context - first))
        size = replace(size, new_tokens=args.max_new_tokens or fits)
        if size.new_tokens < measures.LEAST:
            raise ValueError(f"{size.new_tokens} tokens are too few to measure refreshes: at least {measures.LEAST}")
        models, names = {"teacher": teacher, "student": student}, {"student": args.student}
        if args.student == "pocket-student":
            names |= {kind: f"pocket-student-{kind}" for kind in ("alone", "prompt", "dropout")}
            models |= {kind: load_model(names[kind], model_class=GPT, **options) for kind in [*names][1:]}
        prompts = measures.prompts_of(tokenizer, args.prompts, size.prompts, first, context - size.new_tokens)
        rates = {key: rate for key, name in names.items() if (rate := overfill.dropout_of(name))}
        about = {"teacher": args.model, "student": args.student, "prompts": args.prompts or "pocket",
                 "device": args.device, "dtype": str(args.dtype).removeprefix("torch.")}  # fmt: skip
        report(Setup(models, tokenizer, prompts, size, rates, args.seed), about, args.out)


if __name__ == "__main__":
    main()
