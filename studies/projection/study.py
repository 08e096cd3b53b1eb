"""CP-KVP's own falsification test: the proposal, its baselines and its ablations on four kinds of
prompts of the pocket world, and what its thresholds say.

`python3 -m studies.projection` takes two hours and goes on where it was interrupted; `--quick`
takes a minute; `--again written` measures that way once more; `--kinds quiz` is one kind of prompts.

Ways (projection_ways.py has them all): written and proposed are the proposal with stage 1 as it is
written, and with a smaller one, over segments; raw-1:16 is ours, 1 summary token of the similar
prompt as it is and the 16 last tokens of the new one. Who is asked, and from what it starts (the
setting `on`): found, prompts at least as similar as tau to the stored prompt that retrieval finds;
given, all held-out prompts with a relative, which is given; fit, prompts of the fit; lowest, highest,
a third each of all that are asked, by similarity; another, those for which another prompt is found;
top50, the most similar half.

kl                          KL(cold || warm) of the first token in nats; with on=swap, of the fifth
                            token after 4 from summary tokens
low, good                   share of prompts with kl <= 0.05; with that or KL(warm || cold), or
                            perplexity of the text that follows at most 5% up
lost                        by how much the answer's exact match, or ROUGE-L, is lower
saved, first_ms             share of the time to the first token that is saved, retrieval included
eighth_ms, eighth           time to the eighth token; over a cold start's, a value a kind of prompts
area                        under the ROC curve of similarity, of which tau is the threshold
penalty, bytes, share       of a map; a prompt's summary tokens as a share of its cache
curvature                   third difference of stage 1's loss along a line of maps, over the loss
"""

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

from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from projector import (
    Projector,
    attention_output,
    cache_of_summary,
    first_logits,
    generate_warm,
    logits_after,
)
from recycle import prefilled_cache
from studies.core import (
    MIN_VALUES_OF_INTERVAL,
    Rows,
    StudyLine,
    load_chosen_model,
    open_rows,
    report,
)
from studies.projection.ways import (
    OURS,
    POCKET,
    PROPOSED,
    RAW,
    Asked,
    Prompt,
    Trial,
    Way,
    divergence,
    pocket_families,
    read_pairs,
)
from support.statistics import area_under_roc, bootstrap, ratio_of_sums, rouge_l, wilson
from support.timing import run_in_turns
from support.tokenizers import END_OF_TEXT

GOOD = 0.05  # the source's: KL in nats, or change of perplexity, at most
BOTH_STAGES = ("written", "proposed", "proposed-true")
FOUND = (*BOTH_STAGES, "own", "raw-8:1", "hidden", "neighbour", "none", *OURS)
ALONE = ("rule", "stage1-written", "stage1-segments")
GIVEN = (*BOTH_STAGES, *RAW, *ALONE, "learned")
SHARES = ("low", "good")
FEW = 8  # families of each split of a reduced run, at most
FIT_PROMPTS, TIMED, EMITTED = 75, 16, 4
LENGTHS = (32, 64, 128, 256, 512, 1000)
MINILM = GPTConfig(vocab_size=1, n_ctx=256, n_layer=6, n_head=12, n_embd=384)  # all-MiniLM-L6-v2's
LIBRARY = 1000  # stored prompts, for the time of retrieval


def add(rows: Rows, way: str, at: dict, prompts: Sequence[Prompt], **metrics: Sequence) -> None:
    """Append metrics of a way, a value a prompt, with intervals by bootstrap over families, since
    paraphrases aren't independent. A share's is at least as wide as Wilson's, which has a width
    where all prompts agree."""
    names = [*dict.fromkeys(p.family for p in prompts)]
    family = [names.index(p.family) for p in prompts]
    for metric, values in metrics.items():
        sums = np.stack([np.bincount(family, values), np.bincount(family)], 1)
        value, low, high = bootstrap(sums, ratio_of_sums)
        if metric in SHARES:
            _, least, most = wilson(sum(values), len(values))
            low, high = min(low, least), max(high, most)
        found = (value, low, high) if len(names) >= MIN_VALUES_OF_INTERVAL else [value]
        rows.add_figures(way, at, len(values), **{metric: found})


# --- One prompt -------------------------------------------------------------------------------------


def choose_tau(trial: Trial) -> tuple[float, float | None]:
    """Return tau, by the largest difference of true and false positives on validation prompts, and
    the area under that curve. Positive: the relative is found. Negative: something else is, or
    anything where no relative is stored. (The source takes training prompts; the encoder was fitted
    on those, so that they seem closer.)"""
    asked = trial.retrieve("valid")
    good = np.array([q.similarity for q in asked if q.found is q.relative])
    others = [q for q in asked if q.found is not q.relative]
    others += trial.retrieve("valid", relatives=False)
    bad = np.array([q.similarity for q in others])
    if not len(good):
        return math.inf, None
    levels = sorted({*good, *bad})
    best = max(levels, key=lambda tau: (good >= tau).mean() - (bad >= tau).mean())
    return float(best), area_under_roc(good, bad)


def score(trial: Trial, prompt: Prompt, *first: int) -> float:
    """Return the exact match of a greedy answer to the end of the line, or ROUGE-L of a long one, by the exact cache;
    after the first token, if it has been emitted already."""
    n, ids = 80 if trial.long else 24, trial.batch([*prompt.ids, *first])
    tokens = generate(trial.model, ids, n - len(first), stop_id=trial.tokenizer.eot_token)
    text = trial.tokenizer.decode([*first, *map(int, tokens)]).partition(END_OF_TEXT)[0]
    if trial.long:
        return rouge_l(text, prompt.answer)
    return float(text.partition("\n")[0].strip() == prompt.answer)


@torch.no_grad()
def nats_after(trial: Trial, prompt: Prompt, cache: KVCache, tail: int) -> float:
    """Return the mean loss of the text that follows a prompt, read after its tail on a cache."""
    ids = trial.batch([*prompt.ids[-tail:], *prompt.follows])
    logits = trial.model(ids[:, :-1], cache)[0, tail - 1 :]
    return float(cross_entropy(logits.float(), ids[0, tail:]))


def first_token(trial: Trial, way: Way, prompt: Prompt, source: Prompt) -> dict[str, float]:
    """Return how far a way's first token is from the exact one."""
    kl = float(divergence(prompt.exact.logits, trial.first_logits(way, source, prompt)))
    return {"kl": kl, "low": kl <= GOOD}


def worth(trial: Trial, way: Way, prompt: Prompt, source: Prompt) -> dict[str, float]:
    """Return all that a way's first token is worth."""
    exact, got = prompt.exact.logits, trial.first_logits(way, source, prompt)
    found = first_token(trial, way, prompt, source)
    # The source's KL is the reverse one; the easier of both counts.
    found["good"] = found["low"] or float(divergence(got, exact)) <= GOOD
    if way.layout and not found["good"]:
        warm = nats_after(trial, prompt, trial.cache(way, source, prompt), way.layout.tail)
        cold = nats_after(trial, prompt, prefilled_cache(trial.model, prompt.ids[:-1]), 1)
        found["good"] = math.expm1(warm - cold) <= GOOD
    if prompt.answer:
        found["lost"], first = 0.0, int(got.argmax())
        if first != int(exact.argmax()):
            found["lost"] = score(trial, prompt) - score(trial, prompt, first)
    return found


# --- Many prompts -----------------------------------------------------------------------------------


def ask(
    rows: Rows,
    trial: Trial,
    names: Iterable[str],
    asked: Asked,
    measure: Callable[..., dict[str, float]] = first_token,
    **at: Any,
) -> None:
    """Append the figures of ways on some prompts, each with the one that it starts from; at: the
    setting, in which m is another number of summary tokens."""
    at = {"kind": trial.kind} | at
    for name in rows.ways_due([name for name in names if name in trial.ways], "kl", **at):
        way = trial.ways[name]
        if "m" in at:
            way = replace(way, layout=replace(way.layout, m=at["m"]))
        pairs = [(p, source) for p, source, *_ in asked if way.covers(p, source)]
        found = [measure(trial, way, p, source) for p, source in pairs]
        if found:
            columns = {metric: [x[metric] for x in found] for metric in found[0]}
            add(rows, name, at, [p for p, _ in pairs], **columns)


@torch.no_grad()
def going_on(trial: Trial, way: Way, prompt: Prompt, source: Prompt) -> dict[str, float]:
    """Return KL after some tokens from summary tokens, if these go on. (If the exact cache reads
    the tokens again, there is no difference.)"""
    model, tail, ids = trial.model, way.layout.tail, trial.batch(prompt.ids)
    warm, exact = trial.cache(way, source, prompt), prefilled_cache(model, prompt.ids)
    stand_in = torch.cat([ids.new_zeros(1, len(warm)), ids[:, -tail:]], 1)
    tokens = torch.cat([*generate(model, stand_in, EMITTED, cache=warm)], 1)
    expected = model(tokens, exact, last_only=True)[0, -1]
    got = model(tokens[:, -1:], warm, last_only=True)[0, -1]
    return {"kl": float(divergence(expected, got))}


# --- Time -------------------------------------------------------------------------------------------


def clocked(start: Callable[[Any], Any], asked: Any, turn: int) -> float:
    """Return how many milliseconds a start takes, until its logits are there."""
    begun = time.perf_counter()
    result = start(asked)
    int(result[-1].max())  # waits for the device
    return 1e3 * (time.perf_counter() - begun)


def in_turns(
    starts: dict[str, Callable[[Any], Any]], asked: Sequence[Any], turns: int
) -> dict[str, np.ndarray]:
    """Return the milliseconds (asked, turns) of starts that take turns."""
    runs = {}
    for i, one in enumerate(asked):
        runs |= {(name, i): partial(clocked, start, one) for name, start in starts.items()}
    found = run_in_turns(runs, turns)
    return {name: np.array([found[name, i] for i in range(len(asked))]) for name in starts}


def start_of(trial: Trial, name: str) -> Callable[[Prompt], Tensor]:
    """Return what gives a test prompt's first logits by a whole start, retrieval included."""
    model, stored, way = trial.model, trial.stored("test"), trial.ways.get(name)
    library = trial.library(way or Way(), stored)

    def known(prompt: Prompt) -> Tensor:
        n = {"cold": 0, "shared": len(trial.shared), "hit": len(prompt.ids) - 1}[name]
        kv = prompt.exact.kv[..., :n, :].to(model.wte.weight)
        cache = KVCache([layer[:, None] for layer in kv], torch.arange(n, device=kv.device))
        return logits_after(model, prompt.ids[n:], cache if n else None)

    def start(prompt: Prompt) -> Tensor:
        if way.logits:
            return way.logits(stored[library.nearest(prompt.text)[0]])
        return first_logits(library, prompt.text, prompt.ids)

    return start if way else known


def times(
    rows: Rows, trial: Trial, names: Iterable[str], prompts: list[Prompt], turns: int
) -> None:
    """Append the share of the time to the first token that ways save, in turn with cold starts."""
    at = {"kind": trial.kind}
    names = rows.ways_due(names, "saved", **at)
    if not names:
        return
    prompts = prompts[:: max(1, len(prompts) // TIMED)][:TIMED]
    starts = {name: start_of(trial, name) for name in ("cold", *names)}
    ms = in_turns(starts, prompts, turns)
    for name in names:
        saved = 1 - np.median(ms[name], 1) / np.median(ms["cold"], 1)
        add(rows, name, at, prompts, saved=saved)


def eighth(rows: Rows, trial: Trial, prompts: list[Prompt], turns: int) -> None:
    """Append the time to the eighth token, cold and with the exact cache taking over as soon as it
    is ready."""
    at, model = {"kind": trial.kind}, trial.model
    if not rows.ways_due(["proposed"], "eighth_ms", **at):
        return
    way = trial.ways["proposed"]
    library = trial.library(way, trial.stored("test"))

    def cold(prompt: Prompt) -> list[Tensor]:
        return [*generate(model, trial.batch(prompt.ids), 8)]

    def proposed(prompt: Prompt) -> list[Tensor]:
        warm = library.warm_start(prompt.text, prompt.ids)
        return [*generate_warm(model, trial.batch(prompt.ids), warm, way.layout.tail, 8)]

    ms = in_turns({"cold": cold, "proposed": proposed}, prompts[: TIMED // 2], turns)
    for name, found in ms.items():
        rows.add_values(name, at, eighth_ms=np.median(found, 1))


def lengths(rows: Rows, turns: int) -> None:
    """Append times to the first token at GPT-2 124M's size by the length of the prompt: cold, from
    summary tokens as stored, and from those mapped at every start, as proposed. Apart from these:
    retrieval by an encoder of all-MiniLM-L6-v2's geometry, with reading the summary tokens from the
    disk. Times don't depend on the numbers: weights are random."""
    at = {"model": "124M"}
    if not rows.ways_due(["mapped"], "saved", **at):
        return
    model, encoder, m = load_model("random:124M"), GPT(MINILM).eval(), PROPOSED.m
    rows.set_model_conditions("GPT-2 124M, random weights", model, f"turns: {turns}")
    c, embeddings = model.config, torch.randn(LIBRARY, MINILM.n_embd)
    stored = torch.zeros(2, c.n_layer, 2, c.n_head, m, c.head_dim)
    stage_2 = Projector(stored, stored, penalty=1.0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "summary.pt"
        torch.save(stored[0].clone(), file)

        def retrieval(ids: list[int]) -> Tensor:
            logits_after(encoder, [0] * min(len(ids), MINILM.n_ctx))
            int((embeddings @ embeddings[0]).argmax())
            return torch.load(file, weights_only=True)

        def warm(ids: list[int], mapped: bool) -> Tensor:
            summary = stage_2(stored[:1])[0] if mapped else stored[0]
            return logits_after(model, ids[-1:], cache_of_summary(model, summary, len(ids) - 1))

        starts = {
            "cold": partial(logits_after, model),
            "stored": partial(warm, mapped=False),
            "mapped": partial(warm, mapped=True),
            "retrieval": retrieval,
        }
        asked = [torch.randint(c.vocab_size, (T,)).tolist() for T in LENGTHS]
        ms = in_turns(starts, asked, turns)
    for i, T in enumerate(LENGTHS):
        for way in starts:
            rows.add_values(way, at | {"tokens": T}, first_ms=ms[way][i])
    middle = {way: np.median(ms[way], 1) for way in starts}
    saved = 1 - (middle["mapped"] + middle["retrieval"]) / middle["cold"]
    rows.add_values("mapped", at, saved=saved)


# --- Arithmetic -------------------------------------------------------------------------------------


def curvature() -> float:
    """Return the third difference of stage 1's loss along a line of maps, over the loss: 0 if the
    loss is quadratic in the map, as a ridge regression's is."""
    rng, shapes = torch.Generator().manual_seed(0), ((16, 24), (16, 4), (16, 4), (24, 24), (24, 24))
    x, q, out, C, step = (torch.randn(shape, generator=rng) for shape in shapes)
    losses = []
    for i in range(4):
        k, v = (x @ (C + i * step)).unflatten(1, (3, 8)).chunk(2, -1)  # (16, 3, 4) each
        got = attention_output(q[:, None], k, v)[:, 0]
        losses.append((got - out).square().mean())
    third = losses[3] - 3 * losses[2] + 3 * losses[1] - losses[0]
    return float(abs(third) / losses[0])


def sizes(rows: Rows, trial: Trial) -> None:
    """Append the share of a cache that summary tokens have, and bytes and penalties of both maps."""
    at = {"kind": trial.kind}
    if rows.ways_due(["summary"], "share", **at):
        rows.add_values("summary", at, share=[PROPOSED.m / mean(len(p.ids) for p in trial.train)])
    if "written" in trial.ways and rows.ways_due(["written"], "penalty", **at):
        first, second = trial.compressor(), trial.stage_2(PROPOSED, trial.as_written)
        weight_bytes = sum(layer.weight.nbytes for layer in first.layers)
        rows.add_values("stage1-written", at, bytes=[weight_bytes], penalty=[first.penalty])
        rows.add_values("written", at, bytes=[second.weight.nbytes], penalty=[second.penalty])


def finish(rows: Rows) -> None:
    """Append arithmetic, and what is made of the rows of all kinds."""
    rows.set_conditions("arithmetic, on random caches")
    if rows.ways_due(["stage-1"], "curvature"):
        rows.add_values("stage-1", {}, curvature=[curvature()])
    ratios = []
    for kind in POCKET:
        warm, cold = (rows.figure(way, "eighth_ms", kind=kind) for way in ("proposed", "cold"))
        if warm is None:
            return
        ratios.append(warm.value / cold.value)
    if rows.ways_due(["proposed"], "eighth", kind="all"):
        rows.set_conditions("the four kinds of prompts")
        rows.add_values("proposed", {"kind": "all"}, eighth=ratios)


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Rows, trial: Trial, turns: int) -> float:
    """Append what the rows lack of one kind of prompts; return tau."""
    at, asked = {"kind": trial.kind}, trial.retrieve("test")
    tau, area = choose_tau(trial)
    found = [q for q in asked if q.similarity >= tau]
    if not found:
        return tau
    if rows.ways_due(["retrieval"], "area", **at):
        rows.add_values("retrieval", at, area=[area])
    given = trial.related("test")
    ask(rows, trial, FOUND, found, worth)
    for m in (1, 32):
        if m < trial.shortest:
            ask(rows, trial, ["proposed"], given, on="given", m=m)
    ask(rows, trial, OURS, given[:24], going_on, on="swap")
    asked = sorted(asked, key=lambda q: -q.similarity)
    third = len(asked) // 3
    for on, names, some in (
        ("given", GIVEN, given),
        ("fit", ALONE, [(p, p) for p in trial.sample[:FIT_PROMPTS]]),
        ("fit", ["written"], [pair[::-1] for pair in trial.pairs[:FIT_PROMPTS]]),
        ("highest", ["proposed"], asked[:third]),
        ("lowest", ["proposed"], asked[-third:]),
        ("top50", ["proposed"], asked[: len(asked) // 2]),
        ("another", OURS, [q for q in asked if q.found is not q.relative]),
    ):
        ask(rows, trial, names, some, on=on)
    prompts = [q.prompt for q in found]
    names = [name for name in FOUND if name in trial.ways]
    if trial.shared:
        names.append("shared")
    times(rows, trial, ["hit", *names], prompts, turns)
    eighth(rows, trial, prompts, turns)
    sizes(rows, trial)
    return tau


def save_libraries(trial: Trial, tau: float, folder: Path) -> None:
    """Write what `projector.py ask` needs of the test split's stored prompts: our summary tokens
    and, as proposed, projected ones with the projector that has mapped them."""
    stored = [p for p in trial.stored("test") if p.family.startswith("test")]
    ours = trial.library(trial.ways["raw-1:16"], stored, threshold=tau, match_names=True)
    ours.save(folder / "ours")
    if "written" in trial.ways:
        projected = trial.library(trial.ways["written"], stored, threshold=tau)
        projected.save(folder / "proposed")
        stage_2 = trial.stage_2(PROPOSED, trial.as_written)
        stage_2.save(folder / "proposed" / "projector.safetensors")


def main(argv: list[str] | None = None) -> None:
    models = f"pocket or pocket-llama; with --pairs FILE also {NAMES}"
    cli = StudyLine(__doc__, "projection", "few quiz questions", models=models, again=True)
    prompts = cli.add_mutually_exclusive_group()
    prompts.add_argument("--kinds", nargs="+", choices=POCKET, metavar="KIND", help="of prompts")
    prompts.add_argument(
        "--pairs",
        metavar="FILE",
        help="your own similar prompts, for any model: CSV, columns source, target, perhaps answer",
    )
    with cli.parse(argv) as args:
        if args.pairs is None and args.model not in ("pocket", "pocket-llama"):
            raise ValueError(f"{args.model} doesn't know the pocket world: give --pairs FILE")
        different = "run of other prompts or another model"
        if args.model == "pocket" and not args.pairs:
            different = ""
        rows, turns = open_rows("projection", args, different), 1 if args.quick else 7
        (model, name), tokenizer = load_chosen_model(args), load_tokenizer(args.model)
        few = 20 if args.quick else 0
        kinds = args.kinds
        if kinds is None:
            kinds = ["quiz"] if args.quick else [*POCKET]
        if args.pairs:
            kinds = [Path(args.pairs).stem]
        if rows.reduced:
            rows.definition["usual"]["kind"] = kinds[0]
            rows.definition["every"]["kind"] = kinds
        for kind in kinds:
            if args.pairs:
                families = read_pairs(Path(args.pairs), args.seed)
            else:
                families = pocket_families(kind, args.seed, FEW if args.quick else None)
            trial = Trial(model, tokenizer, kind, families, args.seed, few)
            rows.set_model_conditions(name, model, "held-out families of paraphrases")
            tau = measure(rows, trial, turns)
            if kind == kinds[0] and math.isfinite(tau):
                save_libraries(trial, tau, args.out / "library")
        if not rows.reduced:
            lengths(rows, turns)
            finish(rows)
        report(rows)
