"""How right warm starts are: retrieval, divergence of the first token, answers, and what happens after the swap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import rope
from projector import Layout, Library, append_aligned, exact_cache
from studies.projection_methods import NEIGHBOUR, Method, divergence, error, first_logits, projected, raw_tokens
from studies.projection_prompts import PROPOSED, Experiment, Prompt, Splits
from support.statistics import area_under_roc, bootstrap, f1, ratio_of_sums, rouge_l

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


def retrieve(experiment: Experiment, split: str, guard: bool = False, without_relatives: bool = False) -> list[Query]:
    """Look every prompt of a split up in its library, or in one that has no relatives of any."""
    stored = [p for p in experiment.stored(split) if not (without_relatives and p.family.startswith(split))]
    library = Library(experiment.model, Layout(1), experiment.encoder, [p.text for p in stored],
                      torch.zeros(len(stored), 1), guard=guard, skip=experiment.skip)
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
    best = max(sorted({*good, *bad}), key=lambda tau: share(good, tau) - share(bad, tau))
    return float(best), area_under_roc(good, bad)


def share(values: Sequence[float], least: float) -> float:
    """Return the share of values that are at least so much."""
    return sum(v >= least for v in values) / max(1, len(values))


# --- One prompt, one method -------------------------------------------------------------------------------------------


def answer_of(experiment: Experiment, prompt: Prompt, cache: KVCache | None, tail: int, n: int,
              first: int | None = None) -> str:
    """Return the answer of greedy decoding, to the end of the line: on a warm cache with only the tail fed, or exactly;
    after `first`, if that has been emitted already."""
    device, eot = experiment.device, experiment.tokenizer.eot_token
    fed = torch.tensor([[*([0] * len(cache)), *prompt.ids[-tail:]] if cache is not None else prompt.ids], device=device)
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


def nats_after(experiment: Experiment, prompt: Prompt, cache: KVCache, tail: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logits and the losses of the text that follows (up to 32 tokens), all of it read on the cache."""
    ids = [*tail, *prompt.follows]
    with torch.no_grad():
        logits = experiment.model(torch.tensor([ids[:-1]], device=experiment.device), cache)[0, len(tail) - 1 :]
    target = torch.tensor(prompt.follows, device=experiment.device)
    return logits, torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


def measure(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> dict[str, Any]:
    """Return one method's error and answers for one prompt, measured once."""
    return experiment.once((method.name, id(source), id(prompt)), lambda: measured(experiment, method, source, prompt))


def measured(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> dict[str, Any]:
    """Return one method's error and answers for one prompt."""
    exact, n = prompt.exact.logits, 80 if experiment.task == "rouge" else 24
    cold = experiment.once(("cold", id(prompt)), lambda: cold_run(experiment, prompt, n))
    logits = first_logits(experiment, method, source, prompt)
    first = int(logits.argmax())
    row: dict[str, Any] = {"family": prompt.family, "kl": float(divergence(exact, logits)),
                           "reverse": float(divergence(logits, exact)), "same_first": first == int(exact.argmax())}
    row["good"] = row["kl"] <= GOOD_KL
    swapped = cold["answer"] if row["same_first"] else answer_of(experiment, prompt, None, 0, n, first)
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
            row |= {f"exact_{name}": float(answer == prompt.answer), f"f1_{name}": f1(answer, prompt.answer),
                    f"rouge_{name}": rouge_l(answer, prompt.answer)}
    return row


def cold_run(experiment: Experiment, prompt: Prompt, n: int) -> dict[str, Any]:
    """Return the exact answer, and the logits and losses of the text that follows."""
    cache = exact_cache(experiment.model, torch.tensor([prompt.ids[:-1]], device=experiment.device))
    logits, nats = nats_after(experiment, prompt, cache, prompt.ids[-1:])
    return {"answer": answer_of(experiment, prompt, None, 0, n), "logits": logits, "nats": nats}


# --- Many prompts -----------------------------------------------------------------------------------------------------


def interval(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> tuple[float, float, float]:
    """Return the mean and its 95% interval, by bootstrap over families: paraphrases aren't independent."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(value(row))
    return bootstrap(np.array([(sum(values), len(values)) for values in by_family.values()]), ratio_of_sums)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means of measure()'s rows, with 95% intervals where the proposal asks for them."""
    result: dict[str, Any] = {
        "prompts": len(rows), "kl": interval(rows, lambda r: r["kl"]),
        "reverse": interval(rows, lambda r: r["reverse"]), "low_kl": interval(rows, lambda r: r["kl"] <= GOOD_KL),
        "good": interval(rows, lambda r: r["good"]), "same_first": interval(rows, lambda r: r["same_first"]),
    }
    for key in sorted({key for row in rows for key in row} - {*result, "family", "drift", "nats"}):
        result[key] = float(np.mean([row[key] for row in rows if key in row]))
    for name in ("exact", "rouge"):
        with_answers = [row for row in rows if f"{name}_swapped" in row]
        if with_answers:
            result[f"{name}_lost"] = interval(with_answers, lambda r, n=name: r[f"{n}_cold"] - r[f"{n}_swapped"])
    if "nats" in rows[0]:
        result["perplexity"] = math.expm1(np.mean([row["nats"] for row in rows]))
        drifts = [row["drift"] for row in rows]
        result["drift"] = [float(np.mean([d[i] for d in drifts if len(d) > i])) for i in range(max(map(len, drifts)))]
    return result


def mean_error(experiment: Experiment, method: Method, asked: Sequence[tuple[Prompt, Prompt]]) -> dict[str, float]:
    """Return the mean KL of one method for prompts with their sources, and the share of at most 0.05."""
    found = np.array([error(experiment, method, source, prompt) for prompt, source in asked])
    return {"kl": float(found.mean()), "good": float((found <= GOOD_KL).mean())}


def sweep(experiment: Experiment, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return KL over the number of summary tokens, of both ways of stage 1, both position rules, with and without the
    map; the relative is given. Penalties are those found at the proposal's number of summary tokens."""
    true = replace(PROPOSED, true_positions=True)

    def found(layout: Layout, fit: str) -> Callable[[Experiment], tuple[float, float]]:
        return lambda e: (e.compressor(layout).penalty, e.projector(layout, getattr(e, fit)).penalty)

    rows = []
    for m in tqdm(counts, desc=f"{experiment.name}: summary tokens", leave=False):
        if experiment.shortest - 1 < m:
            continue
        here, there = replace(PROPOSED, m=m), replace(true, m=m)
        compared = {
            "as proposed": Method("", here, projected(here, "compressed", penalties=found(PROPOSED, "compressed"))),
            "at true positions": Method("", there, projected(there, "compressed", penalties=found(true, "compressed"))),
            "fitted prompt by prompt": Method("", there, projected(there, "own", penalties=found(true, "own"))),
            "fitted prompt by prompt, no map": raw_tokens(there),
        }
        for name, method in compared.items():
            rows.append({"m": m, "way": name, **mean_error(experiment, method, experiment.related("test"))})
        if m != PROPOSED.m:
            experiment.forget({here, there})
    return rows


def errors(experiment: Experiment, method: Method, queries: list[Query]) -> np.ndarray:
    """Return KL of one method on the prompt that was found for each query."""
    return np.array([error(experiment, method, q.found, q.prompt) for q in queries])


def bins(experiment: Experiment, queries: list[Query], compared: Sequence[Method]) -> list[dict[str, Any]]:
    """Return KL by thirds of the similarity of what is found, and by whether that is the relative, for all queries."""
    edges = np.quantile([q.similarity for q in queries], [1 / 3, 2 / 3])
    of = np.digitize([q.similarity for q in queries], edges)
    names = [f"lowest, below {edges[0]:.3f}", f"middle, below {edges[1]:.3f}", "highest"]
    groups = {name: of == i for i, name in enumerate(names)}
    right = np.array([q.right for q in queries])
    groups |= {"the relative": right, "another": ~right}
    found = {method.name: errors(experiment, method, queries) for method in compared}
    return [{"bin": name, "way": way, "prompts": int(some.sum()), "kl": float(values[some].mean()),
             "good": float((values[some] <= GOOD_KL).mean())}
            for name, some in groups.items() if some.any() for way, values in found.items()]


def ablate_tau(experiment: Experiment, queries: list[Query], *compared: Method) -> list[dict[str, Any]]:
    """Return how many start warm, and how well, for thresholds between the lowest and the highest similarity."""
    found = {method.name: errors(experiment, method, queries) for method in compared}
    similarity = np.array([q.similarity for q in queries])
    wrong = np.array([not q.right for q in queries])
    result = []
    for tau in np.quantile(similarity, np.linspace(0, 0.9, 10)):
        warm = similarity >= tau
        result.append({"tau": float(tau), "warm": float(warm.mean()), "wrong": float(wrong[warm].mean()),
                       "good": {name: float((values[warm] <= GOOD_KL).mean()) for name, values in found.items()}})
    return result


def confidence(experiment: Experiment, method: Method, queries: list[Query],
               rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return how well two signals tell good warm starts (KL at most 0.05) from bad, for one summary token of a prompt's
    own: the similarity, and the projection's residual on the validation prompts most like the source. Areas under the
    ROC curve; 0.5 is chance."""
    projector = experiment.projector(method.layout, experiment.own, change=True)
    sources, residuals = [], []
    for family in experiment.prompts["valid"]:
        target = torch.stack([experiment.own(p, method.layout) for p in family[1:]])
        rest = projector(experiment.own(family[0], method.layout)[None]) - target
        sources.append(family[0].text)
        residuals.append(float(rest.square().mean()))
    found, known = (experiment.encoder([text[experiment.skip :] for text in texts])
                    for texts in ([q.found.text for q in queries], sources))
    residual = [float(np.mean(np.array(residuals)[np.argsort(-row)[:5]])) for row in found @ known.T]
    good = np.array([row["kl"] <= GOOD_KL for row in rows])
    signals = {"similarity": [q.similarity for q in queries], "residual": [-r for r in residual]}
    return {name: area_under_roc(np.array(values)[good], np.array(values)[~good]) for name, values in signals.items()}


def after_the_swap(experiment: Experiment, method: Method, asked: Sequence[tuple[Prompt, Prompt]],
                   emitted: int = 4) -> dict[str, float]:
    """Return KL at the next token when so many have been emitted from summary tokens: if they go on, and if the exact
    cache takes the emitted tokens over by the one-step alignment. (If it reads them again there is no difference.)"""
    result: dict[str, list[float]] = {"no swap": [], "aligned": []}
    for prompt, source in asked:
        ids, tail = torch.tensor([prompt.ids], device=experiment.device), method.layout.tail
        warm = method.cache(experiment, source, prompt)
        stand_in = torch.cat([ids.new_zeros(1, len(warm)), ids[:, -tail:]], 1)
        tokens = torch.cat([*generate(experiment.model, stand_in, emitted, cache=warm)], 1)  # (1, emitted)
        exact = exact_cache(experiment.model, ids)
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
    for name, model_class in (("pocket", GPT), ("pocket-rotary", rope.GPT)):
        model, tokenizer = load_model(name, model_class=model_class), load_tokenizer(name)
        experiment = Experiment(model, tokenizer, "quiz", families, encoder, seed)
        compared = []
        for m in (1, PROPOSED.m):
            for positions in ("after the summary tokens", "true"):
                layout = Layout(m, true_positions=positions == "true")
                compared += [(m, positions, "as proposed", Method("", layout, projected(layout, "compressed"))),
                             (m, positions, "raw, fitted prompt by prompt", raw_tokens(layout))]
        for m, positions, way, method in [*compared, (0, "true", NEIGHBOUR.name, NEIGHBOUR)]:
            rows.append({"model": name, "m": m, "positions": positions, "way": way,
                         **mean_error(experiment, method, experiment.related("test"))})
    return rows
