"""CP-KVP's own falsification test: the proposal, its baselines and its ablations on questions about
capitals, or on four kinds of prompts of the pocket world, and what its thresholds say.

`python3 -m studies.projection` takes two and a half hours and goes on where it was interrupted;
`--quick` takes a minute; `--kinds quiz` measures one kind of prompts; `--model smollm2` measures
questions about capitals, of a model that knows them.

Ways (ways.py has them all): written and proposed are the proposal, with stage 1 as its text has it
and with a smaller one, over segments; raw-1:16 is ours, 1 summary token of the similar prompt,
without a projection, and the last 16 tokens of the new prompt.

The setting `on` says which prompts are asked, and from which stored prompt they start. By default
they are those whose similarity to the stored prompt that retrieval finds is at least tau. given:
all held-out prompts with a stored relative, from which they start; fit: prompts that were fitted
on; lowest, highest: the third of all asked prompts with the lowest and highest similarity; top50:
the more similar half; another: those for which retrieval finds a prompt that isn't their relative.

kl                          KL(cold || warm) of the first token in nats; with on=swap, of the fifth,
                            after 4 that were written from summary tokens
low, good                   share of prompts with kl <= 0.05; share with that, or KL(warm || cold)
                            <= 0.05, or the following text's perplexity at most 5% higher
lost                        by how much the answer's exact match, or ROUGE-L, is lower
saved, first_ms             share of the time to the first token that is saved, retrieval included;
                            that time in milliseconds
eighth_ms, eighth           time to the eighth token; the same over a cold start's, a value for each
                            kind of prompts
from_summary                how many of these eight tokens are written from summary tokens
area                        area under the ROC curve of similarity, for which tau is a threshold
penalty, bytes, share       a map's penalty and bytes; a prompt's summary tokens as a share of its
                            cache
curvature                   third difference of stage 1's loss along a line of maps, over the loss
"""

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    Projector,
    attention_output,
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
from studies.projection.claims import ARITHMETIC, few_summary_tokens, linearity
from studies.projection.ways import (
    FULL,
    OUR_LAYOUTS,
    POCKET_KINDS,
    PROPOSED,
    QUICK,
    RAW_LAYOUTS,
    AskedPrompts,
    Prompt,
    Trial,
    Way,
    divergence,
    pocket_families,
)
from studies.results import Results
from support.printing import end_tokens_of
from support.statistics import area_under_roc, interval, ratio_of_sums, rouge_l, wilson_interval
from support.texts import CAPITALS, Splits, read_pairs
from support.timing import run_in_turns

GOOD_LIMIT = 0.05  # the source's upper limit of KL in nats, and of the rise of perplexity
BOTH_STAGE_WAYS = ("written", "proposed", "proposed-true")
RETRIEVED_WAYS = (*BOTH_STAGE_WAYS, "own", "raw-8:1", "hidden", "neighbour", "none", *OUR_LAYOUTS)
SINGLE_PARTS = ("rule", "stage1-written", "stage1-segments")
GIVEN_WAYS = (*BOTH_STAGE_WAYS, *RAW_LAYOUTS, *SINGLE_PARTS, "learned")
SHARE_METRICS = ("low", "good")
FIT_PROMPTS, TIMED_PROMPTS, EMITTED_TOKENS = 75, 16, 4
# Numbers of summary tokens beside the proposal's 8, by way.
OTHER_NUMBERS = {"proposed": (1, 32), "written": (4, 16, 32)}
PROMPT_LENGTHS = (32, 64, 128, 256, 512, 1000)
# all-MiniLM-L6-v2's geometry.
MINILM_CONFIG = GPTConfig(vocab_size=1, n_ctx=256, n_layer=6, n_head=12, n_embd=384)
LIBRARY_SIZE = 1000  # stored prompts, for the time of retrieval


def add_metrics(
    rows: Results, way: str, setting: dict, prompts: Sequence[Prompt], **metrics: Sequence
) -> None:
    """Append metrics of a way, one value for each prompt. Intervals are over families,
    since paraphrases aren't independent; a share's is at least as wide as Wilson's interval, which
    has a width even where all prompts agree."""
    family_names = [*dict.fromkeys(prompt.family for prompt in prompts)]
    family_indices = [family_names.index(prompt.family) for prompt in prompts]
    for metric, values in metrics.items():
        family_sums = np.stack(
            [np.bincount(family_indices, values), np.bincount(family_indices)], 1
        )
        value, low, high = interval(family_sums, ratio_of_sums)
        if metric in SHARE_METRICS:
            _, wilson_low, wilson_high = wilson_interval(sum(values), len(values))
            low, high = min(low, wilson_low), max(high, wilson_high)
        rows.add_figures(way, setting, len(values), **{metric: (value, low, high)})


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
    """Return the exact match of a greedy answer, up to the end of the line, or ROUGE-L if answers
    are long. It is written with the exact cache, after first_tokens if these have been emitted
    already."""
    max_tokens = (80 if trial.long_answers else 24) - len(first_tokens)
    ids, stop_ids = trial.batch_of([*prompt.ids, *first_tokens]), end_tokens_of(trial.tokenizer)
    written = generate(trial.model, ids, max_tokens, stop_ids=stop_ids)
    tokens = itertools.chain(map(torch.tensor, first_tokens), written)
    if trial.long_answers:
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


def first_token_error(trial: Trial, way: Way, prompt: Prompt, source: Prompt) -> dict[str, float]:
    """Return how far a way's first token is from the exact one."""
    kl = float(divergence(prompt.exact.logits, trial.first_logits(way, source, prompt)))
    return {"kl": kl, "low": kl <= GOOD_LIMIT}


def first_token_worth(trial: Trial, way: Way, prompt: Prompt, source: Prompt) -> dict[str, float]:
    """Return the error of a way's first token, whether it is good, and what the answer loses by
    it."""
    exact_logits, logits = prompt.exact.logits, trial.first_logits(way, source, prompt)
    metrics = first_token_error(trial, way, prompt, source)
    # The source's KL is the reverse one; the smaller of the two counts.
    metrics["good"] = metrics["low"] or float(divergence(logits, exact_logits)) <= GOOD_LIMIT
    if way.layout and not metrics["good"]:
        warm_cache = trial.warm_cache(way, source, prompt)
        warm_loss = continuation_loss(trial, prompt, warm_cache, way.layout.tail)
        exact_cache = prefilled_cache(trial.model, prompt.ids[:-1])
        cold_loss = continuation_loss(trial, prompt, exact_cache, 1)
        metrics["good"] = math.expm1(warm_loss - cold_loss) <= GOOD_LIMIT
    if prompt.answer:
        metrics["lost"], first_token = 0.0, int(logits.argmax())
        if first_token != int(exact_logits.argmax()):
            metrics["lost"] = score_answer(trial, prompt) - score_answer(trial, prompt, first_token)
    return metrics


# --- Many prompts -----------------------------------------------------------------------------------


def measure_ways(
    rows: Results,
    trial: Trial,
    names: Iterable[str],
    queries: AskedPrompts,
    measure: Callable[..., dict[str, float]] = first_token_error,
    **setting: Any,
) -> None:
    """Append the figures of ways on some prompts, each with the prompt that it starts from. `m` in
    the setting is the number of summary tokens, if it isn't the way's own."""
    setting = {"kind": trial.kind} | setting
    for name in rows.ways_due([name for name in names if name in trial.ways], "kl", **setting):
        way = trial.ways[name]
        if "m" in setting:
            way = replace(way, layout=replace(way.layout, m=setting["m"]))
        pairs = [(prompt, source) for prompt, source, *_ in queries if way.covers(prompt, source)]
        measured = [measure(trial, way, prompt, source) for prompt, source in pairs]
        if measured:
            columns = {metric: [metrics[metric] for metrics in measured] for metric in measured[0]}
            add_metrics(rows, name, setting, [prompt for prompt, _ in pairs], **columns)


@torch.no_grad()
def kl_after_summary_tokens(
    trial: Trial, way: Way, prompt: Prompt, source: Prompt
) -> dict[str, float]:
    """Return KL after some tokens that were written from summary tokens, if decoding goes on from
    these. (If the exact cache reads the tokens again, there is no difference.)"""
    model, tail, ids = trial.model, way.layout.tail, trial.batch_of(prompt.ids)
    warm_cache, exact_cache = (
        trial.warm_cache(way, source, prompt),
        prefilled_cache(model, prompt.ids),
    )
    stand_in = torch.cat([ids.new_zeros(1, len(warm_cache)), ids[:, -tail:]], 1)
    tokens = torch.cat([*generate(model, stand_in, EMITTED_TOKENS, cache=warm_cache)], 1)
    expected_logits = model(tokens, exact_cache, last_only=True)[0, -1]
    logits = model(tokens[:, -1:], warm_cache, last_only=True)[0, -1]
    return {"kl": float(divergence(expected_logits, logits))}


# --- Time -------------------------------------------------------------------------------------------


def time_first_logits(start: Callable[[Any], Any], prompt: Any, turn: int) -> float:
    """Return the milliseconds that a start takes until its logits are there."""
    started = time.perf_counter()
    result = start(prompt)
    int(result[-1].max())  # waits for the device
    return 1e3 * (time.perf_counter() - started)


def time_in_turns(
    starts: dict[str, Callable[[Any], Any]], prompts: Sequence[Any], turns: int
) -> dict[str, np.ndarray]:
    """Return the milliseconds (prompts, turns) of each start; the starts take turns."""
    runs = {}
    for i, prompt in enumerate(prompts):
        runs |= {
            (name, i): partial(time_first_logits, start, prompt) for name, start in starts.items()
        }
    milliseconds = run_in_turns(runs, turns)
    return {name: np.array([milliseconds[name, i] for i in range(len(prompts))]) for name in starts}


def start_function(trial: Trial, name: str) -> Callable[[Prompt], Tensor]:
    """Return a function that makes a complete start, retrieval included, and returns the first
    logits of a test prompt."""
    model, stored, way = trial.model, trial.stored_prompts("test"), trial.ways.get(name)
    library = trial.library(way or Way(), stored)

    def start_from_exact_cache(prompt: Prompt) -> Tensor:
        lengths = {"cold": 0, "shared": len(trial.shared_ids), "hit": len(prompt.ids) - 1}
        length = lengths[name]
        kv = prompt.exact.kv[..., :length, :].to(model.wte.weight)
        cache = KVCache([layer[:, None] for layer in kv], torch.arange(length, device=kv.device))
        return logits_after(model, prompt.ids[length:], cache if length else None)

    def start_of_way(prompt: Prompt) -> Tensor:
        if way.logits:
            return way.logits(stored[library.nearest(prompt.text)[0]])
        return first_logits(model, library, prompt.text, prompt.ids)

    return start_of_way if way else start_from_exact_cache


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
    if not rows.ways_due(["until-ready", "second-exact"], "eighth_ms", **setting):
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
    """Append times to the first token at GPT-2 124M's size by the length of the prompt: cold, from
    summary tokens as stored, and from those mapped at every start, as proposed; and the share of the
    cold start's time that these save, retrieval included, also as a mean over the lengths.
    Retrieval is timed by itself: an encoder of all-MiniLM-L6-v2's geometry, and reading the summary
    tokens from the disk. Weights are random, since times don't depend on them."""
    setting = {"model": "124M"}
    if not rows.ways_due(["mapped", "stored"], "saved", **setting):
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
        prompts = [torch.randint(config.vocab_size, (T,)).tolist() for T in PROMPT_LENGTHS]
        milliseconds = time_in_turns(starts, prompts, turns)
    for i, T in enumerate(PROMPT_LENGTHS):
        for way in starts:
            rows.add_values(way, setting | {"tokens": T}, first_ms=milliseconds[way][i])
    for way in ("mapped", "stored"):
        warm = milliseconds[way] + milliseconds["retrieval"]
        shares = 1 - warm / milliseconds["cold"]  # (lengths, turns)
        for T, of_length in zip(PROMPT_LENGTHS, shares, strict=True):
            rows.add_values(way, setting | {"tokens": T}, saved=of_length)
        rows.add_values(way, setting, saved=shares.mean(0))


# --- Arithmetic -------------------------------------------------------------------------------------


def curvature() -> float:
    """Return the third difference of stage 1's loss along a line of maps, over the loss: 0 if the
    loss is quadratic in the map, as a ridge regression's is."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 24), (16, 4), (16, 4), (24, 24), (24, 24))
    x, q, output, linear_map, step = (torch.randn(shape, generator=generator) for shape in shapes)
    losses = []
    for i in range(4):
        k, v = (x @ (linear_map + i * step)).unflatten(1, (3, 8)).chunk(2, -1)  # (16, 3, 4) each
        read = attention_output(q[:, None], k, v)[:, 0]
        losses.append((read - output).square().mean())
    third_difference = losses[3] - 3 * losses[2] + 3 * losses[1] - losses[0]
    return float(abs(third_difference) / losses[0])


def measure_sizes(rows: Results, trial: Trial) -> None:
    """Append the size of summary tokens as a share of a cache, and both maps' bytes and
    penalties."""
    setting = {"kind": trial.kind}
    if rows.ways_due(["summary"], "share", **setting):
        mean_length = mean(len(prompt.ids) for prompt in trial.train)
        rows.add_values("summary", setting, share=[PROPOSED.m / mean_length])
    if "written" in trial.ways and rows.ways_due(["written"], "penalty", **setting):
        stage_1 = trial.compressor(PROPOSED.m)
        stage_2 = trial.stage_2(PROPOSED, trial.summary_as_written)
        for way, stage in (("stage1-written", stage_1), ("written", stage_2)):
            rows.add_values(way, setting, bytes=[stage.weight.nbytes], penalty=[stage.penalty])


def add_derived(rows: Results) -> None:
    """Append the figures that are arithmetic, and those computed from the rows of all kinds."""
    rows.set_conditions("arithmetic, on random caches")
    if rows.ways_due(["stage-1"], "curvature", **ARITHMETIC):
        rows.add_values("stage-1", ARITHMETIC, curvature=[curvature()])
    kinds = rows.every["kind"]
    rows.set_conditions(f"{len(kinds)} kinds of prompts")
    if all(rows.find("cold", "eighth_ms", kind=kind) for kind in kinds):
        for way in rows.ways_due(["until-ready", "second-exact"], "eighth", kind="all"):
            ratios = []
            for kind in kinds:
                warm, cold = (rows.figure(x, "eighth_ms", kind=kind) for x in (way, "cold"))
                ratios.append(warm.value / cold.value)
            rows.add_values(way, {"kind": "all"}, eighth=ratios)


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
    related_pairs = trial.related_pairs("test")
    measure_ways(rows, trial, RETRIEVED_WAYS, similar_queries, first_token_worth)
    measure_ways(rows, trial, OUR_LAYOUTS, related_pairs[:24], kl_after_summary_tokens, on="swap")
    queries = sorted(queries, key=lambda query: -query.similarity)
    third = len(queries) // 3
    unrelated_queries = [query for query in queries if query.nearest is not query.relative]
    for on, names, pairs in (
        ("given", GIVEN_WAYS, related_pairs),
        ("fit", SINGLE_PARTS, [(prompt, prompt) for prompt in trial.stage_1_prompts[:FIT_PROMPTS]]),
        ("fit", ["written"], [pair[::-1] for pair in trial.pairs[:FIT_PROMPTS]]),
        ("highest", ["proposed"], queries[:third]),
        ("lowest", ["proposed"], queries[-third:]),
        ("top50", ["proposed"], queries[: len(queries) // 2]),
        ("another", OUR_LAYOUTS, unrelated_queries),
    ):
        measure_ways(rows, trial, names, pairs, on=on)
    prompts = [query.prompt for query in similar_queries]
    names = [name for name in RETRIEVED_WAYS if name in trial.ways]
    if trial.shared_ids:
        names.append("shared")
    measure_times(rows, trial, ["hit", *names], prompts, turns)
    measure_eighth_token(rows, trial, prompts, turns)
    measure_sizes(rows, trial)
    return tau


def measure_other_numbers(rows: Results, trial: Trial) -> None:
    """Append the figures of other numbers of summary tokens than the proposal's. With 32, maps take
    gigabytes, so only one is kept."""
    related_pairs = trial.related_pairs("test")
    for way, numbers in OTHER_NUMBERS.items():
        for m in numbers:
            if m < trial.shortest and (way == "proposed" or trial.can_vary_written(m)):
                trial.drop_large_maps()
                measure_ways(rows, trial, [way], related_pairs, on="given", m=m)


def save_libraries(trial: Trial, tau: float, folder: Path) -> None:
    """Write what `projector.py ask` needs for the test split's stored prompts: our summary tokens
    and, as proposed, projected ones with the projector that mapped them."""
    stored = [prompt for prompt in trial.stored_prompts("test") if prompt.family.startswith("test")]
    library = trial.library(trial.ways["raw-1:16"], stored, threshold=tau, match_names=True)
    library.save(folder / "ours")
    if "written" in trial.ways:
        projected_library = trial.library(trial.ways["written"], stored, threshold=tau)
        projected_library.save(folder / "proposed")
        stage_2 = trial.stage_2(PROPOSED, trial.summary_as_written)
        stage_2.save(folder / "proposed" / "projector.safetensors")


def kinds_of(args: argparse.Namespace) -> dict[str, Splits]:
    """Return the families of prompts that are measured, by kind. Raises ValueError if the model
    knows nothing of them."""
    max_families = (QUICK if args.quick else FULL).max_families
    is_of_pocket = args.model in ("pocket", "pocket-llama")
    default_pairs = CAPITALS if args.model == REAL_MODEL else None
    pairs = Path(args.pairs) if args.pairs else default_pairs
    if args.kinds and not is_of_pocket:
        raise ValueError(f"--kinds needs pocket's world, which {args.model} doesn't know")
    if not is_of_pocket and pairs is None:
        raise ValueError(f"{args.model} doesn't know the pocket world: give --pairs FILE")
    if pairs:
        return {pairs.stem: read_pairs(pairs, args.seed, max_families)}
    kinds = args.kinds or (["quiz"] if args.quick else POCKET_KINDS)
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
    if args.quick or not rows.no_verdict_reason:
        measure_lengths(rows, size.turns)
        add_derived(rows)


def main(argv: list[str] | None = None) -> None:
    models = f"pocket, pocket-llama or {REAL_MODEL}; with --pairs FILE also {NAMES}"
    cli = StudyLine(__doc__, "projection", "few families", models=models)
    prompts = cli.add_mutually_exclusive_group()
    prompts.add_argument(
        "--kinds", nargs="+", choices=POCKET_KINDS, metavar="KIND", help="kinds of pocket's prompts"
    )
    prompts.add_argument(
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
        beyond = [linearity, few_summary_tokens]  # which need more numbers of summary tokens
        rows = open_results("projection", args, RECORDED_MODELS, difference, setting, beyond)
        if rows.no_verdict_reason:
            rows.every["kind"] = kinds
        measure(rows, *load_chosen_model(args), families_by_kind, args)
        report(rows)
