"""CP-KVP's own falsification test: the proposal, its baselines and its ablations on questions about
capitals, or on four kinds of prompts of the pocket world, and what its thresholds say.

`python3 -m studies.projection` takes two and a half hours and goes on where it was interrupted;
`--quick` takes a minute; `--model smollm2` measures questions about capitals, of a model that knows
them.

Ways (ways.py has them all): written and proposed are the proposal, with stage 1 as its text has it
and with a smaller one, over segments; raw-1:16 is ours, 1 summary token of the similar prompt,
without a projection, and the last 16 tokens of the new prompt.

The setting `on` says which prompts are asked, and from which stored prompt they start. By default
they are those whose similarity to the stored prompt that retrieval finds is at least tau. given:
all held-out prompts with a stored relative, from which they start; fit: prompts that were fitted
on; lowest, highest: the third of all asked prompts with the lowest and highest similarity; top50:
the more similar half; another: those for which retrieval finds a prompt that isn't their relative.

kl, reverse                 KL(cold || warm) of the first token in nats; KL(warm || cold), which the
                            source asks for
low, good                   share of prompts with kl <= 0.05; share with that, or reverse <= 0.05,
                            or the following text's perplexity at most 5% higher
lost                        by how much the answer's exact match, or ROUGE-L, is lower
saved                       share of the time to the first token that is saved, retrieval included
eighth_ms                   time to the eighth token in milliseconds
from_summary                how many of these eight tokens are written from summary tokens
area                        area under the ROC curve of similarity, for which tau is a threshold
penalty                     a map's penalty
error                       what stage 1 minimises: the squared error of what the last query reads, as a
                            share, summed over layers and heads; after `steps` of L-BFGS
"""

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from formats.products import order_for_decoding
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from projector import (
    Compressor,
    Projector,
    cache_of_summary,
    first_line,
    first_logits,
    generate_warm,
    logits_after,
)
from recycle import prefilled_cache
from studies.core import (
    REAL_MODEL,
    RECORDED_MODELS,
    StudyLine,
    load_chosen_model,
    open_results,
    report,
)
from studies.projection.claims import LENGTHS, linearity
from studies.projection.ways import (
    FULL,
    OUR_LAYOUTS,
    POCKET_KINDS,
    PROPOSED,
    QUICK,
    RAW_LAYOUTS,
    VALIDATION_PROMPTS,
    Pairs,
    Prompt,
    Query,
    Trial,
    Way,
    divergence,
    pocket_families,
    reading_error,
)
from studies.results import Results
from support.printing import end_tokens_of
from support.statistics import area_under_roc, interval, ratio_of_sums, rouge_l, wilson_interval
from support.texts import CAPITALS, Splits, read_pairs
from support.timing import run_in_turns

GOOD_LIMIT = 0.05  # the source's upper limit of KL in nats, and of the rise of perplexity
BOTH_STAGE_WAYS = ("written", "proposed", "proposed-true")
RETRIEVED_WAYS = (*BOTH_STAGE_WAYS, "own", "raw-8:1", "hidden", "neighbour", "none", *OUR_LAYOUTS)
GIVEN_WAYS = ("written", "proposed", *RAW_LAYOUTS, "rule", "learned")
SHARE_METRICS = ("low", "good")
FIT_PROMPTS, TIMED_PROMPTS = 75, 16
# Numbers of summary tokens beside the proposal's 8, by way. As written, they take a quarter of an
# hour for each of pocket's kinds, so these are left out but for one.
OTHER_NUMBERS = {"proposed": (1, 16, 32), "learned": (16,), "written": (4, 16, 32)}
LEFT_OUT = ("quiz", "long-quiz", "notes")
# all-MiniLM-L6-v2's geometry.
MINILM_CONFIG = GPTConfig(vocab_size=1, n_ctx=256, n_layer=6, n_head=12, n_embd=384)
LIBRARY_SIZE = 1000  # stored prompts, for the time of retrieval


def add_metrics(
    rows: Results, way: str, setting: dict, prompts: Sequence[Prompt], **metrics: Sequence
) -> None:
    """Append metrics of a way, one value for each prompt. n counts families, and intervals are over
    them, since paraphrases aren't independent; a share's is between 0 and 1, and at least as wide as
    Wilson's, which has a width even where all prompts agree."""
    family_names = [*dict.fromkeys(prompt.family for prompt in prompts)]
    family_count = len(family_names)
    family_indices = [family_names.index(prompt.family) for prompt in prompts]
    for metric, values in metrics.items():
        family_sums = np.stack(
            [np.bincount(family_indices, values), np.bincount(family_indices)], 1
        )
        value, low, high = interval(family_sums, ratio_of_sums)
        if metric in SHARE_METRICS:
            _, wilson_low, wilson_high = wilson_interval(value * family_count, family_count)
            low, high = max(0.0, min(low, wilson_low)), min(1.0, max(high, wilson_high))
        rows.add_figures(way, setting, family_count, **{metric: (value, low, high)})


# --- One prompt -------------------------------------------------------------------------------------


def choose_tau(trial: Trial) -> tuple[float, float | None]:
    """Return tau, the similarity with the largest difference between the rates of true and false
    positives on validation prompts, and the area under the ROC curve. A prompt is positive if
    retrieval finds its relative, and negative if it finds another prompt, or if no relative is
    stored. (The source takes training prompts; the encoder was fitted on those, so they seem
    closer.) Without a negative prompt, as where names have to agree, tau is the least similarity
    of a positive one, and there is no area."""
    queries = trial.retrieve("valid")
    right = [query for query in queries if query.nearest is query.relative]
    wrong = [query for query in queries if query.nearest is not query.relative]
    wrong += trial.retrieve("valid", relatives=False)
    if not right:
        return math.inf, None
    if not wrong:
        return min(query.similarity for query in right), None
    positives = np.array([query.similarity for query in right])
    negatives = np.array([query.similarity for query in wrong])

    def difference(tau: float) -> float:
        return (positives >= tau).mean() - (negatives >= tau).mean()

    best_tau = max(sorted({*positives, *negatives}), key=difference)
    return float(best_tau), area_under_roc(positives, negatives)


def score_answer(trial: Trial, prompt: Prompt, *first_tokens: int) -> float:
    """Return the exact match of a greedy answer, up to the end of the line, or ROUGE-L if the true
    one is long. It is written with the exact cache, after first_tokens if these have been emitted
    already."""
    is_long = len(prompt.answer.split()) > 8
    max_tokens = (80 if is_long else 24) - len(first_tokens)
    ids, stop_ids = trial.batch_of([*prompt.ids, *first_tokens]), end_tokens_of(trial.tokenizer)
    written = generate(trial.model, ids, max_tokens, stop_ids=stop_ids)
    tokens = itertools.chain(map(torch.tensor, first_tokens), written)
    if is_long:
        text = trial.tokenizer.decode([*map(int, tokens)]).partition(END_OF_TEXT)[0]
        return rouge_l(text, prompt.answer)
    return float(first_line(tokens, trial.tokenizer) == prompt.answer)


@torch.no_grad()
def continuation_loss(trial: Trial, prompt: Prompt, cache: KVCache, tail: int) -> float:
    """Return the mean loss of the text that follows a prompt, if the tail and it are read on a
    cache."""
    ids = trial.batch_of([*prompt.ids[-tail:], *prompt.follows])
    logits = trial.model(ids[:, :-1], cache)[0, tail - 1 :]
    return float(cross_entropy(logits.float(), ids[0, tail:]))


def first_token_metrics(
    trial: Trial, way: Way, prompt: Prompt, start: Tensor, worth: bool
) -> dict[str, float]:
    """Return the error of the first token that a way has from what it stores. worth: also whether it
    is good, and what the answer loses by it."""
    logits, exact = trial.first_logits(way, start, prompt), prompt.exact.logits
    kl, reverse = float(divergence(exact, logits)), float(divergence(logits, exact))
    metrics = {"kl": kl, "reverse": reverse, "low": kl <= GOOD_LIMIT}
    if not worth:
        return metrics
    metrics["good"] = min(kl, reverse) <= GOOD_LIMIT
    if way.layout:
        warm_cache = trial.warm_cache(way.layout, start, prompt)
        warm_loss = continuation_loss(trial, prompt, warm_cache, way.layout.tail)
        exact_cache = prefilled_cache(trial.model, prompt.ids[:-1])
        rise = warm_loss - continuation_loss(trial, prompt, exact_cache, 1)
        metrics["good"] |= math.expm1(rise) <= GOOD_LIMIT
    if prompt.answer:
        metrics["lost"], first_token = 0.0, int(logits.argmax())
        if first_token != int(exact.argmax()):
            lost = score_answer(trial, prompt) - score_answer(trial, prompt, first_token)
            metrics["lost"] = lost
    return metrics


# --- Many prompts -----------------------------------------------------------------------------------


def measure_ways(
    rows: Results,
    trial: Trial,
    ways: Mapping[str, Way],
    pairs: Pairs,
    worth: bool = False,
    **setting: Any,
) -> None:
    """Append the figures of ways on some prompts, each with the prompt that it starts from. worth:
    also those beyond the first token's error."""
    setting = {"kind": trial.kind} | setting
    for name in rows.ways_due(ways, "kl", **setting):
        way = ways[name]
        covered = [pair for pair in pairs if way.covers(*pair)]
        if way.alone:
            covered = [(prompt, prompt) for prompt, _ in covered]
        if not covered:
            continue
        sources = [*dict.fromkeys(source for _, source in covered)]
        starts = dict(zip(sources, way.starts(sources), strict=True))
        measured = [
            first_token_metrics(trial, way, prompt, starts[source], worth)
            for prompt, source in covered
        ]
        columns = {metric: [metrics[metric] for metrics in measured] for metric in measured[0]}
        add_metrics(rows, name, setting, [prompt for prompt, _ in covered], **columns)


# --- Time -------------------------------------------------------------------------------------------


def time_in_turns(
    starts: Mapping[str, Callable[[Any], Any]], prompts: Sequence[Any], turns: int
) -> dict[str, np.ndarray]:
    """Return the milliseconds (prompts, turns) until each start has its logits; the starts take
    turns."""

    def milliseconds(start: Callable[[Any], Any], prompt: Any, turn: int) -> float:
        started = time.perf_counter()
        result = start(prompt)
        int(result[-1].max())  # waits for the device
        return 1e3 * (time.perf_counter() - started)

    runs = {
        (name, i): partial(milliseconds, start, prompt)
        for i, prompt in enumerate(prompts)
        for name, start in starts.items()
    }
    times = run_in_turns(runs, turns)
    return {name: np.array([times[name, i] for i in range(len(prompts))]) for name in starts}


def start_function(trial: Trial, name: str) -> Callable[[Prompt], Tensor]:
    """Return a function that makes a complete start, retrieval included, and returns the first
    logits of a test prompt."""
    model = trial.model
    if name in trial.ways:
        way, stored = trial.ways[name], trial.stored_prompts("test")
        library = trial.library(way, stored)
        if way.layout:
            return lambda prompt: first_logits(model, library, prompt.text, prompt.ids)
        return lambda prompt: way.starts([stored[library.nearest(prompt.text)[0]]])[0]

    def start_from_exact_cache(prompt: Prompt) -> Tensor:
        lengths = {"cold": 0, "shared": len(trial.shared_ids), "hit": len(prompt.ids) - 1}
        length = lengths[name]
        kv = prompt.exact.kv[..., :length, :].to(model.wte.weight)
        cache = KVCache([layer[:, None] for layer in kv], torch.arange(length, device=kv.device))
        return logits_after(model, prompt.ids[length:], cache if length else None)

    return start_from_exact_cache


def measure_times(
    rows: Results, trial: Trial, names: Iterable[str], prompts: list[Prompt], turns: int
) -> None:
    """Append the share of the time to the first token that ways save; they and cold starts take
    turns."""
    setting = {"kind": trial.kind}
    names = rows.ways_due(names, "saved", **setting)
    if not names:
        return
    prompts = prompts[:: max(1, len(prompts) // TIMED_PROMPTS)][:TIMED_PROMPTS]
    starts = {name: start_function(trial, name) for name in ("cold", *names)}
    milliseconds = time_in_turns(starts, prompts, turns)
    for name in names:
        saved_shares = 1 - np.median(milliseconds[name], 1) / np.median(milliseconds["cold"], 1)
        add_metrics(rows, name, setting, prompts, saved=saved_shares)


def measure_eighth_token(rows: Results, trial: Trial, prompts: list[Prompt], turns: int) -> None:
    """Append the time to the eighth token: cold, with the exact cache as soon as it is ready, and
    with the exact cache from the second token on; and how many of the eight are the summary's."""
    setting, model = {"kind": trial.kind}, trial.model
    if not rows.ways_due(["second-exact"], "from_summary", **setting):
        return
    way = trial.ways["proposed"]
    library = trial.library(way, trial.stored_prompts("test"))
    from_summary: dict[str, list[int]] = {"until-ready": [], "second-exact": []}

    def cold(prompt: Prompt) -> list[Tensor]:
        return [*generate(model, trial.batch_of(prompt.ids), 8)]

    def warm(prompt: Prompt, name: str) -> list[Any]:
        cache, ids = library.warm_start(prompt.text, prompt.ids), trial.batch_of(prompt.ids)
        read_count = len(cache) + way.layout.tail  # when the first token is drawn
        until_ready = name == "until-ready"
        tokens = generate_warm(model, ids, cache, way.layout.tail, 8, until_ready)
        eight = [*itertools.islice(tokens, 8)]
        from_summary[name].append(1 + len(cache) - read_count)
        return [tokens, *eight]  # to drop the iterator here would wait for its thread

    starts = {"cold": cold} | {name: partial(warm, name=name) for name in from_summary}
    milliseconds = time_in_turns(starts, prompts[: TIMED_PROMPTS // 2], turns)
    for name, times in milliseconds.items():
        rows.add_values(name, setting, eighth_ms=np.median(times, 1))
    for name, counts in from_summary.items():
        rows.add_values(name, setting, from_summary=[mean(counts)])


def measure_lengths(rows: Results, turns: int) -> None:
    """Append the share of a cold start's time to the first token that summary tokens save at GPT-2
    124M's size, retrieval included, by the length of the prompt: as stored, and mapped at every
    start, as proposed. Retrieval is timed by itself: an encoder of all-MiniLM-L6-v2's geometry, and
    reading the summary tokens from the disk. Weights are random, since times don't depend on them."""
    setting = {"model": "124M"}
    if not rows.ways_due(["mapped", "stored"], "saved", **setting, tokens=LENGTHS[-1]):
        return
    model, m = load_model("random:124M"), PROPOSED.m
    encoder = order_for_decoding(GPT(MINILM_CONFIG)).eval()
    rows.set_model_conditions("GPT-2 124M, random weights", model, f"turns: {turns}")
    config, embeddings = model.config, torch.randn(LIBRARY_SIZE, MINILM_CONFIG.n_embd)
    summaries = torch.zeros(2, config.n_layer, 2, config.n_head, m, config.head_dim)
    stage_2 = Projector(summaries, summaries, penalty=1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.pt"
        torch.save(summaries[0].clone(), path)

        def retrieval(ids: list[int]) -> Tensor:
            logits_after(encoder, [0] * min(len(ids), MINILM_CONFIG.n_ctx))
            int((embeddings @ embeddings[0]).argmax())
            return torch.load(path, weights_only=True)

        def from_summary(ids: list[int], mapped: bool) -> Tensor:
            summary = stage_2(summaries[:1])[0] if mapped else summaries[0]
            return logits_after(model, ids[-1:], cache_of_summary(model, summary, len(ids) - 1))

        starts = {
            "cold": partial(logits_after, model),
            "stored": partial(from_summary, mapped=False),
            "mapped": partial(from_summary, mapped=True),
            "retrieval": retrieval,
        }
        prompts = [torch.randint(config.vocab_size, (T,)).tolist() for T in LENGTHS]
        times = time_in_turns(starts, prompts, turns)  # (lengths, turns) each
    for way in ("mapped", "stored"):
        shares = 1 - (times[way] + times["retrieval"]) / times["cold"]
        for T, of_length in zip(LENGTHS, shares, strict=True):
            rows.add_values(way, setting | {"tokens": T}, saved=of_length)


# --- The study --------------------------------------------------------------------------------------


def measure_kind(rows: Results, trial: Trial, turns: int) -> float:
    """Append the figures that one kind of prompts has no rows of yet, and return tau."""
    setting, queries = {"kind": trial.kind}, trial.retrieve("test")
    tau, area = choose_tau(trial)
    similar_queries = [query for query in queries if query.similarity >= tau]
    if not similar_queries:
        return tau
    if area is not None and rows.ways_due(["retrieval"], "area", **setting):
        rows.add_values("retrieval", setting, area=[area])
    queries = sorted(queries, key=lambda query: -query.similarity)
    third = len(queries) // 3
    unrelated_queries = [query for query in queries if query.nearest is not query.relative]

    def measure_on(names: Iterable[str], pairs: Pairs, worth: bool = False, **on: str) -> None:
        ways = {name: trial.ways[name] for name in names if name in trial.ways}
        measure_ways(rows, trial, ways, pairs, worth, **on)

    def found(asked: list[Query]) -> Pairs:
        return [(query.prompt, query.nearest) for query in asked]

    measure_on(RETRIEVED_WAYS, found(similar_queries), worth=True)
    measure_on(GIVEN_WAYS, trial.related_pairs("test"), on="given")
    fitted = trial.stage_1_prompts[:FIT_PROMPTS]
    measure_on(["stage1-written"], [(prompt, prompt) for prompt in fitted], on="fit")
    measure_on(["proposed"], found(queries[:third]), on="highest")
    measure_on(["proposed"], found(queries[-third:]), on="lowest")
    measure_on(["proposed"], found(queries[: len(queries) // 2]), on="top50")
    measure_on(OUR_LAYOUTS, found(unrelated_queries), on="another")
    prompts = [query.prompt for query in similar_queries]
    names = [name for name in RETRIEVED_WAYS if name in trial.ways]
    if trial.shared_ids:
        names.append("shared")
    measure_times(rows, trial, ["hit", *names], prompts, turns)
    measure_eighth_token(rows, trial, prompts, turns)
    if "written" in trial.ways and rows.ways_due(["written"], "penalty", **setting):
        stage_2 = trial.ways["written"].starts.stage_2
        rows.add_values("stage1-written", setting, penalty=[trial.fits.compressor.penalty])
        rows.add_values("written", setting, penalty=[stage_2.penalty])
    return tau


def measure_other_numbers(rows: Results, trial: Trial) -> None:
    """Append the figures of other numbers of summary tokens than the proposal's. With 32, maps take
    gigabytes, so those of one number are dropped before the next are fitted."""
    for m in sorted({*itertools.chain(*OTHER_NUMBERS.values())}):
        ways = {
            name: way
            for name, way in trial.ways_with(m).items()
            if m in OTHER_NUMBERS[name] and m < trial.shortest
        }
        if trial.kind in LEFT_OUT:
            ways.pop("written", None)
        measure_ways(rows, trial, ways, trial.related_pairs("test"), on="given", m=m)


def measure_steps(rows: Results, trial: Trial) -> None:
    """Append the error of stage 1 as written on prompts of its fit and on others, after its steps of
    L-BFGS and after four times as many."""
    fitted = trial.stage_1_prompts[:VALIDATION_PROMPTS]
    asked = [prompt for prompt, _ in trial.related_pairs("test")]
    asked = [prompt for prompt in asked if trial.ways["written"].covers(prompt)]
    prefills = {"fit": [p.exact for p in fitted], "given": [p.exact for p in asked]}
    for steps in (trial.size.stage_1_steps, 4 * trial.size.stage_1_steps):
        setting = {"kind": trial.kind, "steps": steps}
        if rows.find("stage1-written", "error", **setting, on="given") is None:
            penalty = rows.figure("stage1-written", "penalty", kind=trial.kind).value
            T = trial.longest - 1
            compressor = Compressor(prefills["fit"], PROPOSED.m, penalty, T, steps)
            for on, passes in prefills.items():
                error = [reading_error(compressor, passes)]
                rows.add_figures("stage1-written", setting | {"on": on}, len(passes), error=error)


def save_libraries(trial: Trial, tau: float, folder: Path) -> None:
    """Write what `projector.py ask` needs for the test split's stored prompts: our summary tokens
    and, as proposed, projected ones with the projector that mapped them."""
    stored = [prompt for prompt in trial.stored_prompts("test") if prompt.family.startswith("test")]
    library = trial.library(trial.ways["raw-1:16"], stored, threshold=tau, match_names=True)
    library.save(folder / "ours")
    if written := trial.ways.get("written"):
        trial.library(written, stored, threshold=tau).save(folder / "proposed")
        written.starts.stage_2.save(folder / "proposed" / "projector.safetensors")


def kinds_of(args: argparse.Namespace) -> dict[str, Splits]:
    """Return the families of prompts that are measured, by kind. Raises ValueError if the model
    knows nothing of them."""
    max_families = (QUICK if args.quick else FULL).max_families
    default_pairs = CAPITALS if args.model == REAL_MODEL else None
    pairs = Path(args.pairs) if args.pairs else default_pairs
    if pairs:
        return {pairs.stem: read_pairs(pairs, args.seed, max_families)}
    if args.model not in ("pocket", "pocket-llama"):
        raise ValueError(f"{args.model} doesn't know the pocket world: give --pairs FILE")
    kinds = ["quiz"] if args.quick else POCKET_KINDS
    return {kind: pocket_families(kind, args.seed, max_families) for kind in kinds}


def measure(
    rows: Results,
    model: GPT,
    name: str,
    families_by_kind: dict[str, Splits],
    args: argparse.Namespace,
) -> None:
    """Measure every figure that has no row yet: of each kind of prompts, then at GPT-2's size."""
    tokenizer, size = load_tokenizer(args.model), QUICK if args.quick else FULL
    for number, (kind, families) in enumerate(families_by_kind.items()):
        match_names = bool(args.pairs) or kind not in POCKET_KINDS
        trial = Trial(model, tokenizer, kind, families, args.seed, size, match_names)
        detail = "; a stored prompt has to share the new one's names" if match_names else ""
        rows.set_model_conditions(name, model, f"held-out families of paraphrases{detail}")
        tau = measure_kind(rows, trial, size.turns)
        if not math.isfinite(tau):
            continue
        if number == 0:
            save_libraries(trial, tau, args.out / "library")
        if not args.quick:
            measure_other_numbers(rows, trial)
            if kind in ("quiz", "story"):
                measure_steps(rows, trial)
    if args.quick or not rows.no_verdict_reason:
        measure_lengths(rows, size.turns)


def main(argv: list[str] | None = None) -> None:
    models = f"pocket, pocket-llama or {REAL_MODEL}; with --pairs FILE also {NAMES}"
    cli = StudyLine(__doc__, "projection", "few families", models=models)
    cli.add_argument(
        "--pairs",
        metavar="FILE",
        help="CSV of your own similar prompts, for any model: source, target, optionally answer; a prompt "
        f"whose names no stored one has is read. Default for {REAL_MODEL}: questions about capitals",
    )
    with cli.parse(argv) as args:
        families_by_kind = kinds_of(args)
        is_recorded = args.model in RECORDED_MODELS and not args.pairs
        difference = "" if is_recorded else "run of other prompts or another model"
        kinds = [*families_by_kind]
        setting = {"model": args.model, "kind": kinds[0]}
        rows = open_results("projection", args, RECORDED_MODELS, difference, setting, [linearity])
        if rows.no_verdict_reason:
            rows.every["kind"] = kinds
        measure(rows, *load_chosen_model(args), families_by_kind, args)
        report(rows)
