"""The measures of the projection study: retrieval, divergence of the first token, answers, the text after the swap,
and the time to the first token."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from projector import Layout, Library, Projector, cache_of, class_of, generate_warm
from recycle import read_all
from studies.projection_methods import (
    NEIGHBOUR,
    PROPOSED,
    WRITTEN,
    Experiment,
    Method,
    Prompt,
    Splits,
    divergence,
    error,
    first_logits,
    library_of,
    one_token,
    projected,
    raw_tokens,
)
from studies.projection_segments import SegmentMap
from support.geometry import kv_heads
from support.statistics import area_under_roc, bootstrap, f1, ratio_of_sums, rouge_l

MINILM = GPTConfig(
    vocab_size=1, n_ctx=256, n_layer=6, n_head=12, n_embd=384
)  # all-MiniLM-L6-v2's geometry
MAPPED, APART = "{} summary tokens, mapped at the start", "retrieval and loading"  # of by_length()
STAGE_PROMPTS = 75  # of the fit, that a stage is measured on, too
LIBRARY = 1000  # stored prompts, for the time of retrieval
GOOD_KL, GOOD_PERPLEXITY = 0.05, 0.05  # at most, of a good first token: the proposal's thresholds


# --- Retrieval --------------------------------------------------------------------------------------------------------


@dataclass
class Query:
    """A prompt that is asked, its stored relative if there is one, and what retrieval found."""

    prompt: Prompt
    relative: Prompt | None
    found: Prompt | None
    similarity: float

    @property
    def right(self) -> bool:
        return self.found is not None and self.found is self.relative


def retrieve(
    experiment: Experiment, split: str, guard: bool = False, without_relatives: bool = False
) -> list[Query]:
    """Look every prompt of a split up in its library, or in one that has no relatives of any."""
    stored = [
        p
        for p in experiment.stored(split)
        if not (without_relatives and p.family.startswith(split))
    ]
    library = Library(
        experiment.model,
        Layout(1),
        experiment.encoder,
        [p.text for p in stored],
        torch.zeros(len(stored), 1),
        guard=guard,
        skip=experiment.skip,
    )
    queries = []
    for prompt, relative in experiment.queries(split):
        found, similarity = library.find(prompt.text)
        relative = None if without_relatives else relative
        queries.append(Query(prompt, relative, stored[found] if found >= 0 else None, similarity))
    return queries


def choose_tau(experiment: Experiment) -> tuple[float, float | None]:
    """Return tau, by the largest difference of true and false positives on validation prompts, and the area under that
    curve. Positive: the relative is found. Negative: something else is, or anything where no relative is stored.

    The proposal takes tau from training prompts; on those the default encoder was fitted, so that they seem closer.
    """
    asked = retrieve(experiment, "valid")
    good = [q.similarity for q in asked if q.right]
    bad = [q.similarity for q in asked if not q.right]
    bad += [q.similarity for q in retrieve(experiment, "valid", without_relatives=True)]
    if not good:
        return math.inf, None
    of = [np.array(values) for values in (good, bad)]
    best = max(sorted({*good, *bad}), key=lambda tau: (of[0] >= tau).mean() - (of[1] >= tau).mean())
    return float(best), area_under_roc(good, bad)


# --- One prompt, one method -------------------------------------------------------------------------------------------


def answer_of(
    experiment: Experiment,
    prompt: Prompt,
    cache: KVCache | None,
    tail: int,
    n: int,
    first: int | None = None,
) -> str:
    """Return the answer of greedy decoding, to the end of the line: on a warm cache with only the tail fed, or exactly;
    after `first`, if that has been emitted already."""
    device, eot = experiment.device, experiment.tokenizer.eot_token
    fed = torch.tensor(
        [[*([0] * len(cache)), *prompt.ids[-tail:]] if cache is not None else prompt.ids],
        device=device,
    )
    written = [] if first is None else [first]

    def ended() -> bool:
        line = experiment.task != "rouge" and "\n" in experiment.tokenizer.decode(written[-1:])
        return bool(written) and (line or written[-1] == eot)

    if first is not None:
        fed = torch.cat([fed, torch.tensor([[first]], device=device)], 1)
    tokens = generate(experiment.model, fed, n - len(written), cache=cache)
    while not ended() and len(written) < n:
        written.append(int(next(tokens)))
    return experiment.tokenizer.decode([i for i in written if i != eot]).strip()


def nats_after(
    experiment: Experiment, prompt: Prompt, cache: KVCache, tail: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the logits and the losses of the text that follows (up to 32 tokens), all of it read on the cache."""
    ids = [*tail, *prompt.follows]
    with torch.no_grad():
        logits = experiment.model(torch.tensor([ids[:-1]], device=experiment.device), cache)[
            0, len(tail) - 1 :
        ]
    target = torch.tensor(prompt.follows, device=experiment.device)
    return logits, torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


def measure(
    experiment: Experiment, method: Method, source: Prompt, prompt: Prompt
) -> dict[str, Any]:
    """Return one method's error and answers for one prompt, measured once."""
    return experiment.once(
        (method.name, id(source), id(prompt)), lambda: measured(experiment, method, source, prompt)
    )


def measured(
    experiment: Experiment, method: Method, source: Prompt, prompt: Prompt
) -> dict[str, Any]:
    """Return one method's error and answers for one prompt."""
    exact, n = prompt.exact.logits, 80 if experiment.task == "rouge" else 24
    cold = experiment.once(("cold", id(prompt)), lambda: cold_run(experiment, prompt, n))
    logits = first_logits(experiment, method, source, prompt)
    first = int(logits.argmax())
    row: dict[str, Any] = {
        "family": prompt.family,
        "kl": float(divergence(exact, logits)),
        "reverse": float(divergence(logits, exact)),
        "same_first": first == int(exact.argmax()),
    }
    row["good"] = (
        min(row["kl"], row["reverse"]) <= GOOD_KL
    )  # the source means the reverse, and the easier one counts
    swapped = (
        cold["answer"] if row["same_first"] else answer_of(experiment, prompt, None, 0, n, first)
    )
    answers = {"cold": cold["answer"], "swapped": swapped}
    if method.layout:
        cache, tail = method.cache(experiment, source, prompt), method.layout.tail
        answers["warm"] = answer_of(experiment, prompt, cache.clone(), tail, n)
        after, nats = nats_after(experiment, prompt, cache, prompt.ids[-tail:])
        row["nats"] = float(nats.mean() - cold["nats"].mean())
        row["good"] = row["good"] or math.expm1(row["nats"]) <= GOOD_PERPLEXITY
        row["drift"] = divergence(cold["logits"], after).tolist()
    if prompt.answer:
        for name, answer in answers.items():
            row |= {
                f"exact_{name}": float(answer == prompt.answer),
                f"f1_{name}": f1(answer, prompt.answer),
                f"rouge_{name}": rouge_l(answer, prompt.answer),
            }
    return row


def cold_run(experiment: Experiment, prompt: Prompt, n: int) -> dict[str, Any]:
    """Return the exact answer, and the logits and losses of the text that follows."""
    cache = read_all(experiment.model, prompt.ids[:-1])
    logits, nats = nats_after(experiment, prompt, cache, prompt.ids[-1:])
    return {"answer": answer_of(experiment, prompt, None, 0, n), "logits": logits, "nats": nats}


# --- Many prompts -----------------------------------------------------------------------------------------------------


def groups(prompts: Sequence[Prompt]) -> list[np.ndarray]:
    """Return the indices of the prompts of each family."""
    names = np.array([prompt.family for prompt in prompts])
    return [np.flatnonzero(names == name) for name in dict.fromkeys(names)]


def interval(
    rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]
) -> tuple[float, float, float]:
    """Return the mean and its 95% interval, by bootstrap over families: paraphrases aren't independent."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(value(row))
    return bootstrap(
        np.array([(sum(values), len(values)) for values in by_family.values()]), ratio_of_sums
    )


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means of measure()'s rows, with 95% intervals where the proposal asks for them."""
    result: dict[str, Any] = {
        "prompts": len(rows),
        "kl": interval(rows, lambda r: r["kl"]),
        "reverse": interval(rows, lambda r: r["reverse"]),
        "low_kl": interval(rows, lambda r: r["kl"] <= GOOD_KL),
        "good": interval(rows, lambda r: r["good"]),
        "same_first": interval(rows, lambda r: r["same_first"]),
    }
    for key in sorted({key for row in rows for key in row} - {*result, "family", "drift", "nats"}):
        result[key] = float(np.mean([row[key] for row in rows if key in row]))
    for name in ("exact", "rouge"):
        with_answers = [row for row in rows if f"{name}_swapped" in row]
        if with_answers:
            result[f"{name}_lost"] = interval(
                with_answers, lambda r, n=name: r[f"{n}_cold"] - r[f"{n}_swapped"]
            )
    if "nats" in rows[0]:
        result["perplexity"] = math.expm1(np.mean([row["nats"] for row in rows]))
        drifts = [row["drift"] for row in rows]
        result["drift"] = [
            float(np.mean([d[i] for d in drifts if len(d) > i]))
            for i in range(max(map(len, drifts)))
        ]
    return result


def kl_of(values: Sequence[float], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the mean of some prompts' KL, its 95% interval, and the share of at most 0.05."""
    rows = [
        {"family": prompt.family, "kl": value}
        for prompt, value in zip(prompts, values, strict=True)
    ]
    kl, low, high = interval(rows, lambda r: r["kl"])
    return {"kl": kl, "interval": [low, high], "good": float((np.array(values) <= GOOD_KL).mean())}


def errors(
    experiment: Experiment, method: Method, asked: Sequence[tuple[Prompt, Prompt]]
) -> np.ndarray:
    """Return KL of one method for each of the prompts with their sources."""
    return np.array([error(experiment, method, source, prompt) for prompt, source in asked])


def mean_error(
    experiment: Experiment, method: Method, asked: Sequence[tuple[Prompt, Prompt]]
) -> dict[str, Any]:
    """Return the mean KL of one method for prompts with their sources, its interval, and the share of at most 0.05."""
    return kl_of(errors(experiment, method, asked), [prompt for prompt, _ in asked])


def sweep(experiment: Experiment, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return KL over the number of summary tokens, of both ways of stage 1, both position rules, with and without the
    map; the relative is given. Penalties are those found at the proposal's number of summary tokens."""
    true = replace(PROPOSED, true_positions=True)

    def found(layout: Layout, fit: str) -> Callable[[Experiment], tuple[float, float]]:
        return lambda e: (
            e.compressor(layout).penalty,
            e.projector(layout, getattr(e, fit)).penalty,
        )

    rows = []
    for m in counts:
        if experiment.shortest - 1 < m:
            continue
        here, there = replace(PROPOSED, m=m), replace(true, m=m)
        compared = {
            "as proposed": Method(
                "", here, projected(here, "compressed", penalties=found(PROPOSED, "compressed"))
            ),
            "at true positions": Method(
                "", there, projected(there, "compressed", penalties=found(true, "compressed"))
            ),
            "fitted prompt by prompt": Method(
                "", there, projected(there, "own", penalties=found(true, "own"))
            ),
            "fitted prompt by prompt, no map": raw_tokens(there),
        }
        for name, method in compared.items():
            rows.append(
                {
                    "m": m,
                    "method": name,
                    **mean_error(experiment, method, experiment.related("test")),
                }
            )
        if m != PROPOSED.m:
            experiment.forget({here, there})
    return rows


def maps_of(experiment: Experiment) -> tuple[SegmentMap, Projector]:
    """Return both maps as proposed, fitted on a kind of prompts."""
    return experiment.compressor(PROPOSED), experiment.projector(PROPOSED, experiment.compressed)


def with_maps(
    experiment: Experiment, maps: tuple[SegmentMap, Projector]
) -> dict[str, dict[str, Any]]:
    """Return KL as proposed by a kind of prompts' own maps, and by those of another kind; the relative is given."""
    compressor, project = maps
    other = Method("", PROPOSED, lambda e, p: project(compressor([e.segments(p, PROPOSED)]))[0])
    compared = {"own": Method("", PROPOSED, projected(PROPOSED, "compressed")), "another": other}
    return {
        name: mean_error(experiment, method, experiment.related("test"))
        for name, method in compared.items()
    }


def bins(
    experiment: Experiment, queries: list[Query], compared: Sequence[Method]
) -> list[dict[str, Any]]:
    """Return KL by thirds of the similarity of what is found, and by whether that is the relative, for all queries."""
    edges = np.quantile([q.similarity for q in queries], [1 / 3, 2 / 3])
    of = np.digitize([q.similarity for q in queries], edges)
    names = [f"lowest, below {edges[0]:.3f}", f"middle, below {edges[1]:.3f}", "highest"]
    parts = {name: of == i for i, name in enumerate(names)}
    right = np.array([q.right for q in queries])
    parts |= {"the relative": right, "another": ~right}
    asked = [(q.prompt, q.found) for q in queries]
    found = {method.name: errors(experiment, method, asked) for method in compared}
    return [
        {
            "bin": name,
            "method": label,
            "prompts": int(some.sum()),
            **kl_of(
                values[some], [q.prompt for q, here in zip(queries, some, strict=True) if here]
            ),
        }
        for name, some in parts.items()
        if some.any()
        for label, values in found.items()
    ]


def ablate_tau(
    experiment: Experiment, queries: list[Query], *compared: Method
) -> list[dict[str, Any]]:
    """Return how many start warm, and how well, for thresholds between the lowest and the highest similarity."""
    found = {
        method.name: errors(experiment, method, [(q.prompt, q.found) for q in queries])
        for method in compared
    }
    similarity = np.array([q.similarity for q in queries])
    wrong = np.array([not q.right for q in queries])
    result = []
    for tau in np.quantile(similarity, np.linspace(0, 0.9, 10)):
        warm = similarity >= tau
        result.append(
            {
                "tau": float(tau),
                "warm": float(warm.mean()),
                "wrong": float(wrong[warm].mean()),
                "good": {
                    name: float((values[warm] <= GOOD_KL).mean()) for name, values in found.items()
                },
            }
        )
    return result


def confidence(
    experiment: Experiment, method: Method, queries: list[Query], rows: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return how well two signals tell good warm starts (KL at most 0.05) from bad, for one summary token of a prompt's
    own: the similarity, and the projection's residual on the validation prompts most like the source. Areas under the
    ROC curve, of which 0.5 is chance; and their 95% intervals by bootstrap over families."""
    projector = experiment.projector(method.layout, experiment.own, change=True)
    sources, residuals = [], []
    for family in experiment.prompts["valid"]:
        target = torch.stack([experiment.own(p, method.layout) for p in family[1:]])
        rest = projector(experiment.own(family[0], method.layout)[None]) - target
        sources.append(family[0].text)
        residuals.append(float(rest.square().mean()))
    found, known = (
        experiment.encoder([text[experiment.skip :] for text in texts])
        for texts in ([q.found.text for q in queries], sources)
    )
    residual = [
        float(np.mean(np.array(residuals)[np.argsort(-row)[:5]])) for row in found @ known.T
    ]
    good = np.array([row["kl"] <= GOOD_KL for row in rows])
    signals = {"similarity": [q.similarity for q in queries], "residual": [-r for r in residual]}
    families = groups([q.prompt for q in queries])
    drawn = np.random.default_rng(0).integers(len(families), size=(200, len(families)))
    result: dict[str, dict[str, Any]] = {"confidence": {}, "confidence_intervals": {}}
    for name, values in signals.items():
        areas = [
            area_under_roc(np.array(values)[at][good[at]], np.array(values)[at][~good[at]])
            for at in (
                np.arange(len(good)),
                *(np.concatenate([families[i] for i in draw]) for draw in drawn),
            )
        ]
        result["confidence"][name], *again = areas
        known = [area for area in again if area is not None]
        result["confidence_intervals"][name] = (
            np.quantile(known, [0.025, 0.975]).tolist() if known else None
        )
    return result


def append_aligned(warm: KVCache, exact: KVCache, tail: int, n: int) -> None:
    """Append the last n tokens of warm to exact, which ends with the tail that precedes them there, moved by the mean
    difference of the tail's keys and values: of all shifts, the one with the least mean squared error on the tail."""
    for i, (w, e) in enumerate(zip(warm.layers, exact.layers, strict=True)):
        w = w[..., len(warm) - tail - n : len(warm), :]
        shift = (e[..., -tail:, :] - w[..., :tail, :]).mean(-2, keepdim=True)
        exact.layers[i] = torch.cat([e, w[..., tail:, :] + shift], -2)
    exact.commit(torch.arange(len(exact), len(exact) + n, device=exact.pos.device))


def after_the_swap(
    experiment: Experiment, method: Method, asked: Sequence[tuple[Prompt, Prompt]], emitted: int = 4
) -> dict[str, float]:
    """Return KL at the next token when so many have been emitted from summary tokens: if they go on, and if the exact
    cache takes the emitted tokens over by the one-step alignment. (If it reads them again there is no difference.)"""
    result: dict[str, list[float]] = {"no swap": [], "aligned": []}
    for prompt, source in asked:
        ids, tail = torch.tensor([prompt.ids], device=experiment.device), method.layout.tail
        warm = method.cache(experiment, source, prompt)
        stand_in = torch.cat([ids.new_zeros(1, len(warm)), ids[:, -tail:]], 1)
        tokens = torch.cat(
            [*generate(experiment.model, stand_in, emitted, cache=warm)], 1
        )  # (1, emitted)
        exact = read_all(experiment.model, prompt.ids)
        aligned = exact.clone()
        append_aligned(warm, aligned, tail, emitted - 1)
        with torch.no_grad():
            expected = experiment.model(tokens, exact, last_only=True)[0, -1]
            for name, cache in {"no swap": warm, "aligned": aligned}.items():
                logits = experiment.model(tokens[:, -1:], cache, last_only=True)[0, -1]
                result[name].append(float(divergence(expected, logits)))
    return {name: float(np.mean(values)) for name, values in result.items()}


def both_positions(encoder: str, families: Splits, seed: int) -> list[dict[str, Any]]:
    """Return KL with learned and with rotary positions, by the proposal's position rule and at true positions, on
    questions whose relative is given."""
    rows = []
    for name in ("pocket", "pocket-rotary"):
        model, tokenizer = load_model(name, model_class=class_of(name)), load_tokenizer(name)
        experiment = Experiment(model, tokenizer, "quiz", families, encoder, seed)
        compared = []
        for m in (1, PROPOSED.m):
            for positions in ("after the summary tokens", "true"):
                layout = Layout(m, true_positions=positions == "true")
                compared += [
                    (
                        m,
                        positions,
                        "as proposed",
                        Method("", layout, projected(layout, "compressed")),
                    ),
                    (m, positions, "raw, fitted prompt by prompt", raw_tokens(layout)),
                ]
        asked, found = experiment.related("test"), {}
        together = groups([prompt for prompt, _ in asked])
        for m, positions, label, method in [*compared, (0, "true", NEIGHBOUR.name, NEIGHBOUR)]:
            kl = errors(experiment, method, asked)
            rows.append(
                {
                    "model": name,
                    "m": m,
                    "positions": positions,
                    "method": label,
                    **kl_of(kl, [prompt for prompt, _ in asked]),
                }
            )
            after = found.setdefault((m, label), kl)
            if after is not kl:  # of the same prompts
                pairs = np.array([[after[at].sum(), kl[at].sum()] for at in together])
                rows[-1]["after_over_true"] = bootstrap(pairs, ratio_of_sums)
    return rows


def as_written(experiment: Experiment) -> dict[str, Any]:
    """Return the record of the proposal as written: KL of stage 1 and of both stages at the proposal's position, on
    prompts of the fit and on held-out ones, and all measures after retrieval. Its times are those of any other map: it
    is applied when a prompt is stored. Prompts that are longer than all of the training are left out."""
    compressor, tau = experiment.compressor_as_written, choose_tau(experiment)[0]
    held = [
        pair
        for pair in experiment.related("test")
        if max(len(p.ids) for p in pair) - 1 <= compressor.T
    ]
    high = [
        q
        for q in retrieve(experiment, "test")
        if q.similarity >= tau and len(q.found.ids) - 1 <= compressor.T
    ]
    alone = Method("stage 1 as written", PROPOSED, lambda e, p: e.as_written(p, PROPOSED))
    asked = {
        "stage 1": {
            "fitted": [(p, p) for p in experiment.sample[:STAGE_PROMPTS]],
            "held out": [(p, p) for p, _ in held],
        },
        "both stages": {
            "fitted": [(target, source) for source, target in experiment.pairs[:STAGE_PROMPTS]],
            "held out": held,
        },
    }
    return {
        "m": PROPOSED.m,
        "tokens": compressor.T,
        "bytes": compressor.weight.nbytes,
        "penalty": compressor.penalty,
        "prompts": len(experiment.sample),
        "pairs": len(experiment.pairs),
        "tau": tau,
        "penalty of stage 2": experiment.projector(PROPOSED, experiment.as_written).penalty,
        "loss": {
            "fitted": compressor.error([p.exact for p in experiment.sample]),
            "held out": compressor.error([p.exact for p, _ in held]),
        },
        "stages": {
            stage: {
                split: mean_error(experiment, alone if stage == "stage 1" else WRITTEN, pairs)
                for split, pairs in splits.items()
            }
            for stage, splits in asked.items()
        },
        "retrieved": summary_of([measure(experiment, WRITTEN, q.found, q.prompt) for q in high]),
    }


def in_turn(
    runs: dict[str, Callable[..., Any]], asked: Sequence[tuple[Any, ...]], repeats: int
) -> dict[str, list[float]]:
    """Return the median seconds of each run for each of the prompts asked, in turn, until its result is there."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in asked] for name in runs}
    for repeat in range(repeats + 1):
        for i, arguments in enumerate(asked):
            for name, run in runs.items():
                begun = time.perf_counter()
                result = run(*arguments)
                if isinstance(result, Tensor):
                    result.argmax().item()  # waits for the device
                if repeat:  # the first warms up
                    seconds[name][i].append(time.perf_counter() - begun)
    return {name: [*map(statistics.median, several)] for name, several in seconds.items()}


def read_cold(experiment: Experiment, prompt: Prompt) -> Tensor:
    """Return the logits of the first token after reading all."""
    with torch.no_grad():
        return experiment.model(
            torch.tensor([prompt.ids], device=experiment.device), KVCache(), last_only=True
        )


def read_rest(experiment: Experiment, prompt: Prompt, n: int | None = None) -> Tensor:
    """Return the logits of the first token after reading the text behind the shared prefix, or n stored tokens."""
    kv = (prompt.exact.kv[..., :n, :] if n else experiment.shared.kv).to(
        experiment.model.wte.weight
    )
    cache = KVCache([layer[:, None] for layer in kv], torch.arange(kv.size(-2), device=kv.device))
    with torch.no_grad():
        return experiment.model(
            torch.tensor([prompt.ids[len(cache) :]], device=kv.device), cache, last_only=True
        )


def whole_start(experiment: Experiment, method: Method) -> Callable[[Prompt], Tensor]:
    """Return the logits of a prompt's first token by all steps of a method: retrieval, summary tokens, tail."""
    stored = experiment.stored("test")
    library = library_of(
        experiment, method if method.layout else None, "test", guard=method.name.startswith("ours")
    )

    def start(prompt: Prompt) -> Tensor:
        if method.logits:
            return method.logits(experiment, stored[library.find(prompt.text)[0]])
        warm = library.warm_start(prompt.text, prompt.ids)
        if warm is None:
            return read_cold(experiment, prompt)
        tail = torch.tensor([prompt.ids[-method.layout.tail :]], device=experiment.device)
        with torch.no_grad():
            return experiment.model(tail, warm, last_only=True)

    return start


def latencies(
    experiment: Experiment, asked: dict[Method, list[Query]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Return seconds to the first, second and eighth token of whole starts, and the share of the time to the first that
    is saved, on average over prompts, with its 95% interval."""
    queries = next(iter(asked.values()))
    prompts = [q.prompt for q in queries[:: max(1, len(queries) // 16)][:16]]
    gaps: dict[tuple[str, int], list[float]] = {}

    def eight(method: Method | None, emit: int) -> Callable[[Prompt], None]:
        library = library_of(experiment, method, "test") if method else None

        def run(prompt: Prompt) -> None:
            ids, at = torch.tensor([prompt.ids], device=experiment.device), []
            warm = library.warm_start(prompt.text, prompt.ids) if library else None
            tokens = (
                generate(experiment.model, ids, 8)
                if warm is None
                else generate_warm(experiment.model, ids, warm, method.layout.tail, 8, emit=emit)
            )
            for token in tokens:
                int(token)
                at.append(time.perf_counter())
            gaps.setdefault((method.name if method else "cold", emit), []).append(at[1] - at[0])

        return run

    cached = [method for method in asked if method.layout]
    starts: dict[str, Callable[[Prompt], Any]] = {"cold": lambda p: read_cold(experiment, p)}
    starts["exact prefix hit"] = lambda p: read_rest(experiment, p, len(p.ids) - 1)
    starts |= {method.name: whole_start(experiment, method) for method in asked}
    args = [(p,) for p in prompts]
    ttft = in_turn(starts, args, repeats)
    eighth = in_turn(
        {"cold": eight(None, 1)} | {m.name: eight(m, 1) for m in cached}, args[:8], repeats
    )
    never_swapped = in_turn({m.name: eight(m, 8) for m in cached}, args[:8], repeats)
    result: dict[str, dict[str, Any]] = {}
    for name, seconds in ttft.items():
        rows = [
            {"family": p.family, "saved": 1 - warm / cold}
            for p, warm, cold in zip(prompts, seconds, ttft["cold"], strict=True)
        ]
        result[name] = {
            "ttft": statistics.median(seconds),
            "saved": interval(rows, lambda r: r["saved"]),
        }
        for key, several in (("eighth", eighth), ("eighth_without_swap", never_swapped)):
            result[name][key] = statistics.median(several[name]) if name in several else None
        if (name, 1) in gaps:
            result[name]["second_after_first"] = statistics.median(gaps[name, 1])
    return result


def on_the_plane(
    experiment: Experiment, split: str, counts: Sequence[int], tails: Sequence[int]
) -> list[dict[str, Any]]:
    """Chart KL against the time to the first token, retrieval included, over exact prefix x summary tokens x tail, with
    the relative as the source. Last comes the exact prefix alone, with all of the rest read.
    """
    asked = experiment.related(split)
    candidates = []
    for prefix in dict.fromkeys((0, experiment.prefix)):
        for tail in tails:
            for m in counts:
                layout = Layout(m, tail, prefix)
                if all(len(x.ids) - prefix - tail >= m for pair in asked for x in pair):
                    candidates.append(raw_tokens(layout))
                    if tail == 1 and m == 1:
                        candidates.append(one_token(prefix))
    points = []
    for method in candidates:
        points.append(
            {
                "method": method,
                "name": method.name,
                **{key: getattr(method.layout, key) for key in ("m", "tail", "prefix")},
                **mean_error(experiment, method, asked),
            }
        )
    runs = {m.name: (lambda p, r, m=m: first_logits(experiment, m, r, p)) for m in candidates}
    if experiment.prefix:
        points.append(
            {
                "method": None,
                "name": "exact prefix, all of the rest",
                "m": 0,
                "tail": 0,
                "prefix": experiment.prefix,
                "kl": 0.0,
                "good": 1.0,
            }
        )
        runs[points[-1]["name"]] = lambda p, r: read_rest(experiment, p)
    library = library_of(experiment, None, split)
    runs |= {
        "cold": lambda p, r: read_cold(experiment, p),
        "retrieval": lambda p, r: library.find(p.text),
    }
    seconds = in_turn(runs, asked[:: max(1, len(asked) // 8)][:8], 5)
    times = {name: statistics.median(several) for name, several in seconds.items()}
    for point in points:
        point["saved"] = (
            1 - (times[point["name"]] + times["retrieval"] * (point["m"] > 0)) / times["cold"]
        )
    experiment.forget({method.layout for method in candidates})
    return points


def by_length(
    model: GPT, lengths: Sequence[int], repeats: int, counts: Sequence[int] = (PROPOSED.m,)
) -> list[dict[str, float]]:
    """Return seconds to the first token over the length of the prompt: cold, after an exact prefix hit, and from
    summary tokens, so many of them mapped at every start, as proposed, or PROPOSED.m mapped when they were stored.

    Apart from these: retrieval by an encoder of MINILM's geometry, with reading the summary tokens from the disk. Times
    don't depend on the numbers, so that weights are random.
    """
    c, device = model.config, model.wte.weight.device
    stored = {m: torch.zeros(1, c.n_layer, 2, kv_heads(c), m, c.head_dim) for m in counts}
    maps = {
        m: Projector(both := torch.cat([kv, kv]), both, penalty=1.0) for m, kv in stored.items()
    }
    encoder, embeddings = (
        GPT(MINILM).to(device).eval(),
        torch.randn(LIBRARY, MINILM.n_embd, device=device),
    )

    @torch.no_grad()
    def feed(ids: Tensor, cache: KVCache) -> Tensor:
        return model(ids[:, -1:] if len(cache) else ids, cache, last_only=True)

    @torch.no_grad()
    def retrieve_and_load(ids: Tensor) -> Tensor:
        encoder(torch.zeros_like(ids[:, : MINILM.n_ctx]), KVCache(), last_only=True)
        int((embeddings @ embeddings[0]).argmax())
        return torch.load(file, weights_only=True)

    m = PROPOSED.m
    runs = {
        "cold": lambda ids, exact: feed(ids, KVCache()),
        "exact prefix hit": lambda ids, exact: feed(ids, KVCache([*exact.layers], exact.pos)),
        **{
            MAPPED.format(m): lambda ids, exact, m=m: feed(
                ids, cache_of(model, maps[m](stored[m])[0], len(exact))
            )
            for m in counts
        },
        f"{m} summary tokens": lambda ids, exact: feed(
            ids, cache_of(model, stored[m][0], len(exact))
        ),
        APART: lambda ids, exact: retrieve_and_load(ids),
    }
    texts = [torch.randint(c.vocab_size, (1, T), device=device) for T in lengths]
    with tempfile.TemporaryDirectory(prefix="projection-") as folder:
        file = Path(folder) / "summary.pt"
        torch.save(stored[m], file)
        seconds = in_turn(
            runs, [(ids, read_all(model, ids[0, :-1].tolist())) for ids in texts], repeats
        )
    return [
        {"length": T} | {name: several[i] for name, several in seconds.items()}
        for i, T in enumerate(lengths)
    ]
