"""CP-KVP's own falsification test: the proposal, its baselines and its ablations on questions about
capitals, or on four kinds of prompts of the pocket world, and what its thresholds say.

`python3 -m studies.projection` takes two and a half hours and goes on where it was interrupted;
`--quick` takes a minute; `--model smollm2` measures questions about capitals, of a model that knows
them.

Ways (ways.py has them all): written is the proposal, own its second stage after summary tokens
that are fitted on each prompt alone; raw-1:16 is ours, 1 summary token of the similar prompt,
without a projection, and the last 16 tokens of the new prompt.

The setting `on` says which prompts are asked, and from which stored prompt they start. found, the
default: those whose similarity to the stored prompt that retrieval finds is at least tau. given:
all held-out prompts with a stored relative, from which they start; fit: prompts that were fitted
on; lowest, highest: the third of all asked prompts with the lowest and highest similarity; top50:
the more similar half; another: those for which retrieval finds a prompt that isn't their relative.

kl, reverse                 KL(cold || warm) of the first token in nats; KL(warm || cold), which the
                            source asks for
low, good                   share of prompts with kl <= 0.05; share with that, or reverse <= 0.05, or
                            the answer's perplexity at most 5% higher
lost                        by how much the answer's exact match, or ROUGE-L, is lower
saved                       share of the time to the first token that is saved, retrieval included
eighth_ms                   time to the eighth token in milliseconds
from_summary                how many of these eight tokens are written from summary tokens
error                       what stage 1 minimises: the squared error of what the last query reads, as a
                            share, summed over layers and heads; after `steps` of L-BFGS
"""

import argparse
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from formats.products import order_for_decoding
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from projector import (
    STEPS,
    Compressor,
    Layout,
    Projector,
    cache_of_summary,
    first_logits,
    generate_warm,
    logits_after,
)
from studies.core import (
    REAL_MODEL,
    RECORDED_MODELS,
    StudyLine,
    load_chosen_model,
    open_results,
    report,
)
from studies.projection.claims import LENGTHS
from studies.projection.ways import (
    FULL,
    POCKET_KINDS,
    PROPOSED,
    QUICK,
    VALIDATION_PROMPTS,
    Pairs,
    Prompt,
    Prompts,
    Size,
    Trial,
    batch_of,
    families_of,
    pocket_families,
    relative_error,
)
from studies.results import Results
from support.printing import end_tokens_of
from support.statistics import (
    interval,
    kl,
    ratio_of_sums,
    rouge_l,
    wilson_interval,
)
from support.texts import CAPITALS, Splits, read_pairs
from support.timing import run_in_turns, time_call

GOOD_LIMIT = 0.05  # the source's upper limit of KL in nats, and of the rise of perplexity
FOLLOWING_TOKENS = 32  # of the text after a prompt, for the change of perplexity
WAYS = ("written", "own", "raw-8:1", "hidden", "neighbour", "none")
WAYS += ("raw-1:16", "raw-8:4", "raw-32:64")
GIVEN_WAYS = ("written", "learned", "raw-1:1", "raw-8:1", "raw-32:1")
FIT_PROMPTS, TIMED_PROMPTS = 75, 16
# Ways by other numbers of summary tokens than the proposal's 8. As written, each takes a quarter of an
# hour, so some kinds are left out.
OTHER_NUMBERS = {4: ["written"], 16: ["learned", "written"], 32: ["written"]}
LEFT_OUT = ("quiz", "long-quiz", "notes")
# all-MiniLM-L6-v2's geometry.
MINILM_CONFIG = GPTConfig(vocab_size=1, n_ctx=256, n_layer=6, n_head=12, n_embd=384)
LIBRARY_SIZE = 1000  # stored prompts, for the time of retrieval


def add_metric(
    rows: Results, way: str, setting: dict, metric: str, prompts: Prompts, values: Sequence[float]
) -> None:
    """Append a metric of a way, of which each prompt has a value. n counts families, and the interval is
    over them, since paraphrases aren't independent; a share's is between 0 and 1, and at least as wide as
    Wilson's, which has a width even where all prompts agree."""
    families = families_of(prompts)
    names = [*dict.fromkeys(families)]
    n, indices = len(names), [names.index(family) for family in families]
    sums = np.stack([np.bincount(indices, values), np.bincount(indices)], 1)
    value, low, high = interval(sums, ratio_of_sums)
    if metric in ("low", "good"):
        _, wilson_low, wilson_high = wilson_interval(value * n, n)
        low, high = max(0.0, min(low, wilson_low)), min(1.0, max(high, wilson_high))
    rows.add_figures(way, setting, n, **{metric: (value, low, high)})


# --- One prompt -------------------------------------------------------------------------------------


def choose_tau(trial: Trial) -> float:
    """Return tau, the similarity with the largest difference between the rates of true and false
    positives on validation prompts. A prompt is positive if retrieval finds its relative, and
    negative if it finds another prompt, or if no relative is stored. (The source takes training
    prompts; the encoder was fitted on those, so they seem closer.) Without a negative prompt, as
    where names have to agree, tau is the least similarity of a positive one. Raises ValueError if
    there is no positive one."""
    similarities, is_right = [], []
    for relatives in (True, False):
        for (prompt, nearest), similarity in trial.retrieve("valid", relatives).items():
            similarities.append(similarity)
            is_right.append(nearest is prompt.relative)
    if not any(is_right):
        raise ValueError(f"{trial.kind}: no prompt is similar to one of its own family")
    right = np.array(is_right)

    def difference(tau: float) -> float:
        passes = np.array(similarities) >= tau
        return passes[right].mean() - passes[~right].sum() / max(1, (~right).sum())

    return max(sorted(similarities), key=difference)


@cache
def score_answer(tokenizer: tiktoken.Encoding, prompt: Prompt, first_token: int) -> float:
    """Return the exact match of a greedy answer of 24 tokens at most, up to the end of the line; or, if
    the true one is long, ROUGE-L of one of 80. Its first token is given; the others are written with
    the exact cache."""
    is_long = len(prompt.answer.split()) > 8
    ids = batch_of(prompt.model, [*prompt.ids, first_token])
    written = generate(prompt.model, ids, 79 if is_long else 23, stop_ids=end_tokens_of(tokenizer))
    text = tokenizer.decode([first_token, *map(int, written)]).partition(END_OF_TEXT)[0]
    if is_long:
        return rouge_l(text, prompt.answer)
    return float(text.partition("\n")[0].strip() == prompt.answer)


def exact_cache(prompt: Prompt, length: int) -> KVCache:
    """Return the exact cache of a prompt's first tokens; length -1: of all but the last."""
    kv = prompt.kv[..., :length, :].to(prompt.model.wte.weight)  # (L, 2, H, n, D)
    return KVCache([*kv[:, :, None]], torch.arange(kv.size(-2), device=kv.device))


def answer_loss(trial: Trial, prompt: Prompt, cache: KVCache, tail: int) -> float:
    """Return the mean loss of a prompt's answer, if the tail and it are read on a cache."""
    answer = trial.tokenizer.encode(f" {prompt.answer}\n", allowed_special="all")
    ids = batch_of(trial.model, [*prompt.ids[-tail:], *answer[:FOLLOWING_TOKENS]])
    logits = trial.model(ids[:, :-1], cache)[0, tail - 1 :]
    return float(cross_entropy(logits.float(), ids[0, tail:]))


@torch.no_grad()
def first_token_metrics(
    trial: Trial, layout: Layout | None, prompt: Prompt, start: Tensor, worth: bool
) -> dict[str, float]:
    """Return the error of the first token that a way of a layout has from what it stores. worth: also
    whether it is good, and what the answer loses by it."""
    model, logits = trial.model, start
    if layout:
        warm_cache = cache_of_summary(model, start, layout.tail_position(len(prompt.ids)))
        logits = logits_after(model, prompt.ids[-layout.tail :], warm_cache.clone())
    exact, logits = prompt.logits.double(), logits.cpu().double()
    nats = float(kl(exact, logits))
    metrics = {"kl": nats, "low": nats <= GOOD_LIMIT}
    if not worth:
        return metrics
    metrics["reverse"] = float(kl(logits, exact))
    metrics["good"] = min(nats, metrics["reverse"]) <= GOOD_LIMIT
    if prompt.answer:
        if layout:
            rise = answer_loss(trial, prompt, warm_cache, layout.tail)
            rise -= answer_loss(trial, prompt, exact_cache(prompt, -1), 1)
            metrics["good"] |= math.expm1(rise) <= GOOD_LIMIT
        exact_score, score = (
            score_answer(trial.tokenizer, prompt, int(x.argmax())) for x in (exact, logits)
        )
        metrics["lost"] = exact_score - score
    return metrics


# --- Many prompts -----------------------------------------------------------------------------------


def measure_ways(
    rows: Results, trial: Trial, names: Iterable[str], pairs: Pairs, **setting: Any
) -> None:
    """Append the figures of the ways that a trial has, on some prompts, each with the prompt that it
    starts from. setting: `on`, and `m`, another number of summary tokens than the proposal's. What is
    fitted for that isn't kept: with 32, maps take gigabytes."""
    setting = {"kind": trial.kind} | setting
    names = [name for name in names if name in trial.ways]
    for name in rows.ways_due(names, "kl", **setting):
        way = trial.ways[name]
        covered = [pair for pair in pairs if way.covers(*pair)]
        if not covered:
            continue
        prompts, sources = zip(*covered, strict=True)
        if "m" in setting:
            way = way._replace(layout=replace(PROPOSED, m=setting["m"]))
            starts = way.fit(trial, way.layout)(sources)
        else:
            starts = trial.fitted(name)(sources)
        worth = setting["on"] == "found"
        measured = [
            first_token_metrics(trial, way.layout, prompt, start, worth)
            for prompt, start in zip(prompts, starts, strict=True)
        ]
        metrics_of_all = min(measured, key=len)  # not all prompts may have an answer to lose
        for metric in reversed(metrics_of_all):  # the last, kl, tells that a way has its rows
            values = [metrics[metric] for metrics in measured]
            add_metric(rows, name, setting, metric, prompts, values)


# --- Time -------------------------------------------------------------------------------------------


def time_in_turns(
    starts: Mapping[str, Callable], prompts: Sequence[Any], turns: int
) -> dict[str, np.ndarray]:
    """Return the milliseconds (turns, prompts) until each start has its logits; the starts take
    turns at each prompt."""

    def milliseconds(start: Callable, turn: int) -> float:
        prompt = prompts[turn % len(prompts)]
        seconds, _ = time_call(lambda: int(start(prompt)[-1].max()))  # waits for the device
        return 1e3 * seconds

    runs = {name: partial(milliseconds, start) for name, start in starts.items()}
    # The first turn at each prompt is a warm-up.
    times = run_in_turns(runs, (1 + turns) * len(prompts), warm_up=False)
    return {name: np.reshape(x, (-1, len(prompts)))[1:] for name, x in times.items()}


def start_function(trial: Trial, name: str) -> Callable[[Prompt], Tensor]:
    """Return a function that makes a complete start, retrieval included, and returns the first
    logits of a test prompt."""
    model = trial.model
    if name in trial.ways:
        stored = trial.stored_prompts("test")
        library, starts = trial.library(name, stored), trial.fitted(name)
        if trial.ways[name].layout:
            return lambda prompt: first_logits(model, library, prompt.text, prompt.ids)
        return lambda prompt: starts([stored[library.nearest(prompt.text)[0]]])[0]
    if name == "cold":
        return lambda prompt: logits_after(model, prompt.ids)
    length = len(trial.shared_ids) if name == "shared" else -1  # hit: all but the last token
    return lambda prompt: logits_after(model, prompt.ids[length:], exact_cache(prompt, length))


def measure_times(rows: Results, trial: Trial, prompts: Prompts, turns: int) -> None:
    """Append the share of the time to the first token that ways save; they and cold starts take
    turns."""
    setting = {"kind": trial.kind}
    names = ["hit", *(name for name in WAYS if name in trial.ways)]
    if trial.shared_ids:
        names.append("shared")
    names = rows.ways_due(names, "saved", **setting)
    if not names:
        return
    prompts = prompts[:: max(1, len(prompts) // TIMED_PROMPTS)][:TIMED_PROMPTS]
    starts = {name: start_function(trial, name) for name in ("cold", *names)}
    times = time_in_turns(starts, prompts, turns)
    for name in names:
        saved = 1 - np.median(times[name], 0) / np.median(times["cold"], 0)
        add_metric(rows, name, setting, "saved", prompts, saved)


def measure_eighth_token(rows: Results, trial: Trial, prompts: Prompts, turns: int) -> None:
    """Append the time to the eighth token: cold, with the exact cache as soon as it is ready, and
    with the exact cache from the second token on; and how many of the eight are the summary's."""
    setting, model = {"kind": trial.kind}, trial.model
    due = rows.ways_due(["until-ready"], "from_summary", **setting)
    if not due or "written" not in trial.ways:
        return
    library = trial.library("written", trial.stored_prompts("test"))
    counts, started = [], []

    def warm(prompt: Prompt, until_ready: bool) -> list[Tensor]:
        ids, cache = batch_of(model, prompt.ids), library.warm_start(prompt.text, prompt.ids)
        tokens = generate_warm(model, ids, cache, PROPOSED.tail, 8, until_ready)
        started.append(tokens)  # to drop the iterator would wait for its thread
        eight = [*itertools.islice(tokens, 8)]
        if until_ready:
            counts.append(len(cache) - PROPOSED.m)
        return eight

    ways = {
        "cold": lambda prompt: [*generate(model, batch_of(model, prompt.ids), 8)],
        "until-ready": partial(warm, until_ready=True),
        "second-exact": partial(warm, until_ready=False),
    }
    milliseconds = time_in_turns(ways, prompts[: TIMED_PROMPTS // 2], turns)
    for name, times in milliseconds.items():
        rows.add_values(name, setting, eighth_ms=np.median(times, 0))
    rows.add_values("until-ready", setting, from_summary=[np.mean(counts)])


def measure_lengths(rows: Results, turns: int) -> None:
    """Append the share of a cold start's time to the first token that summary tokens save at GPT-2
    124M's size, retrieval included, by the length of the prompt: as stored, and mapped at every
    start, as proposed. Retrieval is an encoder of all-MiniLM-L6-v2's geometry, a search, and reading the
    summary tokens from the disk. Weights are random, since times don't depend on them."""
    setting = {"model": "124M"}
    ways = rows.ways_due(["mapped", "stored"], "saved", **setting, tokens=LENGTHS[-1])
    if not ways:
        return
    model, encoder = load_model("random:124M"), order_for_decoding(GPT(MINILM_CONFIG)).eval()
    rows.set_model_conditions("GPT-2 124M, random weights", model, f"turns: {turns}")
    config, embeddings = model.config, torch.randn(LIBRARY_SIZE, MINILM_CONFIG.n_embd)
    summaries = torch.zeros(2, config.n_layer, 2, config.n_head, PROPOSED.m, config.head_dim)
    stage_2 = Projector(summaries, summaries, penalty=1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.pt"
        torch.save(summaries[:1].clone(), path)

        def warm(ids: list[int], mapped: bool) -> Tensor:
            logits_after(encoder, ids[: MINILM_CONFIG.n_ctx])
            int((embeddings @ embeddings[0]).argmax())
            summary = torch.load(path, weights_only=True)
            if mapped:
                summary = stage_2(summary)
            return logits_after(model, ids[-1:], cache_of_summary(model, summary[0], len(ids) - 1))

        starts = {way: partial(warm, mapped=way == "mapped") for way in ways}
        starts["cold"] = partial(logits_after, model)
        times = time_in_turns(starts, [[0] * T for T in LENGTHS], turns)  # (turns, lengths) each
    for way in ways:
        saved_by_turn = 1 - times[way] / times["cold"]
        for T, saved in zip(LENGTHS, saved_by_turn.T, strict=True):
            rows.add_values(way, setting | {"tokens": T}, saved=saved)


# --- The study --------------------------------------------------------------------------------------


def measure_kind(rows: Results, trial: Trial, tau: float, turns: int) -> None:
    """Append the figures that one kind of prompts has no rows of yet, with the proposal's number of
    summary tokens."""
    found = trial.retrieve("test")
    similar = [pair for pair, similarity in found.items() if similarity >= tau]
    ranked = sorted(found, key=found.get, reverse=True)
    third = len(ranked) // 3
    unrelated = [pair for pair in ranked if pair[1] is not pair[0].relative]
    related = trial.related_pairs("test")
    for on, names, pairs in (
        ("found", WAYS, similar),
        ("given", GIVEN_WAYS, related),
        ("given", ["rule"], [(prompt, prompt) for prompt, _ in related]),
        ("fit", ["stage1-written"], [(x, x) for x in trial.stage_1_prompts[:FIT_PROMPTS]]),
        ("highest", ["written"], ranked[:third]),
        ("lowest", ["written"], ranked[-third:]),
        ("top50", ["written"], ranked[: len(ranked) // 2]),
        ("another", ["raw-1:16"], unrelated),
    ):
        measure_ways(rows, trial, names, pairs, on=on)
    prompts = [prompt for prompt, _ in similar]
    if prompts:
        measure_times(rows, trial, prompts, turns)
        measure_eighth_token(rows, trial, prompts, turns)


def measure_other_numbers(rows: Results, trial: Trial) -> None:
    """Append the figures of other numbers of summary tokens than the proposal's."""
    for m, names in OTHER_NUMBERS.items():
        if trial.kind in LEFT_OUT:
            names = [name for name in names if name != "written"]
        if m < trial.shortest:
            measure_ways(rows, trial, names, trial.related_pairs("test"), on="given", m=m)


def measure_steps(rows: Results, trial: Trial) -> None:
    """Append the error of stage 1 as written on prompts of its fit and on others, after its steps of
    L-BFGS and after four times as many."""
    name, fitted = "stage1-written", trial.stage_1_prompts[:VALIDATION_PROMPTS]
    asked = [x for x, _ in trial.related_pairs("test") if trial.ways["written"].covers(x)]
    for steps in (STEPS, 4 * STEPS):
        setting = {"kind": trial.kind, "steps": steps}
        if rows.ways_due([name], "error", **setting, on="given"):
            penalty = trial.fitted(name).penalty
            stage_1 = Compressor(fitted, PROPOSED.m, penalty, trial.longest - 1, steps)
            for on, prompts in (("fit", fitted), ("given", asked)):
                error = float(relative_error(stage_1, prompts))
                rows.add_values(name, setting | {"on": on}, error=[error])


def save_libraries(trial: Trial, tau: float, folder: Path) -> None:
    """Write what `projector.py ask` needs for the test split's stored prompts: our summary tokens
    and, as proposed, projected ones."""
    stored = [prompt for prompt in trial.stored_prompts("test") if prompt.family.startswith("test")]
    for name, folder_name, match_names in (
        ("raw-1:16", "ours", True),
        ("written", "proposed", trial.match_names),
    ):
        if name in trial.ways:
            library = trial.library(name, stored)
            library.threshold, library.match_names = tau, match_names
            library.save(folder / folder_name)


def kinds_of(args: argparse.Namespace, max_families: int | None) -> dict[str, Splits]:
    """Return the families of prompts that are measured, by kind. Raises ValueError if the model
    knows nothing of them."""
    if args.pairs:
        return {args.pairs.stem: read_pairs(args.pairs, args.seed, max_families)}
    if args.model not in ("pocket", "pocket-llama"):
        raise ValueError(f"{args.model} doesn't know the pocket world: give --pairs FILE")
    kinds = ["quiz"] if args.quick else POCKET_KINDS
    return {kind: pocket_families(kind, args.seed, max_families) for kind in kinds}


def measure(
    rows: Results, args: argparse.Namespace, families_by_kind: dict[str, Splits], size: Size
) -> None:
    """Measure every figure that has no row yet: of each kind of prompts, then at GPT-2's size."""
    (model, name), tokenizer = load_chosen_model(args), load_tokenizer(args.model)
    detail = "; a stored prompt has to share the new one's names" if args.pairs else ""
    for number, (kind, families) in enumerate(families_by_kind.items()):
        trial = Trial(model, tokenizer, kind, families, args.seed, size, bool(args.pairs))
        rows.set_model_conditions(name, model, f"held-out families of paraphrases{detail}")
        tau = choose_tau(trial)
        measure_kind(rows, trial, tau, size.turns)
        if number == 0:
            save_libraries(trial, tau, args.out / "library")
        if not args.quick:
            measure_other_numbers(rows, trial)
            if kind in ("quiz", "story"):
                measure_steps(rows, trial)
    measure_lengths(rows, size.turns)


def main(argv: list[str] | None = None) -> None:
    models = f"pocket, pocket-llama or {REAL_MODEL}; with --pairs FILE also {NAMES}"
    cli = StudyLine(__doc__, "projection", "few families", models=models)
    cli.add_argument(
        "--pairs",
        metavar="FILE",
        type=Path,
        help="CSV of your own similar prompts, for any model: source, target, optionally answer; a prompt "
        f"whose names no stored one has is read. Default for {REAL_MODEL}: questions about capitals",
    )
    with cli.parse(argv) as args:
        size = QUICK if args.quick else FULL
        difference = "run of other prompts" if args.pairs else None
        if args.model == REAL_MODEL and not args.pairs:
            args.pairs = CAPITALS
        families_by_kind = kinds_of(args, size.max_families)
        setting = {"model": args.model, "kind": next(iter(families_by_kind))}
        rows = open_results("projection", args, RECORDED_MODELS, difference, setting)
        if rows.no_verdict_reason:
            rows.every["kind"] = [*families_by_kind]
        measure(rows, args, families_by_kind, size)
        report(rows)
