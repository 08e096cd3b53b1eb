"""What a student writes on its teacher's KV cache, and what refreshing that cache brings: the tables of the source with
means and intervals, the error of the cache itself, and whether the gates' signals say what they are taken to say.

`overfill.py` runs report(). Quality is measured on batches of prompts, teachers and students in turn with the same
random draws; times on single prompts, all ways in turn, as medians.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from overfill import (
    Entropy,
    Gate,
    MonteCarloDropout,
    Pair,
    Periodic,
    Policy,
    ProbeKL,
    divergence,
    dropout_logits,
    entropy,
    generate_refreshed,
    logit_variance,
    misfit,
    mutual_information,
    speculative,
    splice_last,
    teacher_nats,
    threshold_for,
)
from pocket import corpus
from studies.recycling import figure, read_prompts
from support.files import write_atomically, write_csv

BUDGETS = (2.5, 7.8, 15.6)  # refreshes per 1,000 tokens: the source's, and those of T = 128 and T = 64
PROBE_EVERY, PROBE_WINDOW = 32, 16
LEAST = PROBE_EVERY + 8  # tokens to write, or else no probe is made
SPANS = (32, 64, 128)  # first tokens of what is written; then all of it
TAIL = 50  # tokens whose log-probability the source reports apart
RARE = 0.01  # a token is a slip if the teacher gives it less
KINDS = ("story", "dialogue", "explain")  # of documents whose beginnings are prompts


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prompts: int
    seeds: int
    new_tokens: int
    timed: int  # prompts that times are taken of
    repeats: int
    facts: int  # questions about what the prompt has said
    simulations: int


FULL = Size(prompts=50, seeds=3, new_tokens=320, timed=4, repeats=4, facts=200, simulations=20)
QUICK = Size(prompts=8, seeds=1, new_tokens=96, timed=1, repeats=1, facts=20, simulations=3)


# --- Texts ----------------------------------------------------------------------------------------------------------


def pocket_prompts(tokenizer: tiktoken.Encoding, split: str, n: int, tokens: int) -> list[list[int]]:
    """Return the first tokens of n documents of a split that are longer. Raises ValueError if there are too few."""
    found = []
    for document in corpus.documents(split, 40 * n):
        ids = tokenizer.encode_ordinary(document.text)
        if document.kind in KINDS and len(ids) > tokens:
            found.append(ids[:tokens])
        if len(found) == n:
            return found
    raise ValueError(f"only {len(found)} of {40 * n} documents have more than {tokens} tokens, {n} are needed")


def prompts_of(tokenizer: tiktoken.Encoding, path: str | None, n: int, tokens: int,
               room: int) -> dict[str, list[list[int]]]:  # fmt: skip
    """Return prompts to calibrate on ("valid") and to measure ("test"): beginnings of pocket documents, n of them to
    measure; or those of a CSV file, every fifth to calibrate on.

    Raises ValueError if one has more than room tokens, or a file has fewer than 5.
    """
    longest, prompts = tokens, []
    if path is not None:
        prompts = [tokenizer.encode(text, allowed_special="all") for text in read_prompts(Path(path))]
        if len(prompts) < 5:
            raise ValueError(f"{path} has {len(prompts)} prompts: at least 5 are needed, every fifth to calibrate on")
        longest = max(map(len, prompts))
    if longest > room:
        raise ValueError(f"a prompt has {longest} tokens, but beside those to write the context holds {max(0, room)}")
    if prompts:
        return {"valid": prompts[::5], "test": [p for i, p in enumerate(prompts) if i % 5]}
    return {split: pocket_prompts(tokenizer, split, k, tokens) for split, k in (("valid", (n + 1) // 2), ("test", n))}


@dataclass(frozen=True)
class Way:
    """One way of writing: by a model alone (no policy), or by the teacher and a student under a policy."""

    name: str
    student: str = "student"  # or "teacher", alone
    policy: Policy | None = None
    published: int | None = None  # by the source's own code, refreshed every so many tokens


@dataclass
class Written:
    """What a way has written: tokens (R, N), the teacher's nats of each, which prompt each row continues; and what the
    refreshes cost, a row each."""

    ids: Tensor
    nats: Tensor
    prompt: np.ndarray  # (R,)
    refreshes: np.ndarray
    teacher_tokens: np.ndarray


class Study:
    """The models, the prompts and everything that is measured on them once."""

    def __init__(self, models: dict[str, GPT], tokenizer: tiktoken.Encoding, prompts: dict[str, list[list[int]]],
                 size: Size, rates: dict[str, float], seed: int = 0) -> None:  # fmt: skip
        """models: "teacher", "student" and any others; rates: dropout of those that were trained with it."""
        self.models, self.tokenizer, self.prompts, self.size = models, tokenizer, prompts, size
        self.rates, self.seed = rates, seed
        self.device = models["teacher"].wte.weight.device
        self.dropout = next((name for name in ("dropout", "student") if name in rates), None)

    def groups(self, split: str, seeds: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the prompts of equal length as indices and rows (B, T), each prompt once for every seed."""
        order = sorted(range(len(self.prompts[split])), key=lambda i: len(self.prompts[split][i]))
        for _, some in groupby(order, key=lambda i: len(self.prompts[split][i])):
            rows = [i for i in some for _ in range(seeds)]
            yield rows, torch.tensor([self.prompts[split][i] for i in rows], device=self.device)

    def tokens(self, way: Way, ids: Tensor, n: int, **options: Any) -> tuple[Iterator[Tensor], Pair | None]:
        """Return what yields n tokens after ids (B, T) in one way, and the pair that is at work, if any."""
        model = self.models[way.student]

        def new_cache() -> KVCache:
            return KVCache() if len(ids) == 1 else SlidingWindowCache(ids.size(1) + n)

        if way.published:
            return generate_as_published(self.models["teacher"], model, ids, n, way.published, new_cache,
                                         **options), None  # fmt: skip
        if way.policy is None:
            return generate(model, ids, n, cache=new_cache(), **options), None
        pair = Pair(self.models["teacher"], model, ids, new_cache)
        return generate_refreshed(pair, n, way.policy, **options), pair

    def write(self, way: Way, temperature: float, split: str = "test") -> Written:
        """Let a way continue all prompts, each by several seeds unless it is greedy; equal seeds draw equal numbers."""
        seeds = self.size.seeds if temperature else 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        parts = []
        for rows, ids in self.groups(split, seeds):
            options = {"temperature": temperature, "generator": generator}
            tokens, pair = self.tokens(way, ids, self.size.new_tokens, **options)
            new = torch.cat(list(tokens), 1)
            done = (self.size.new_tokens - 1) // way.published if way.published else 0
            cost = (np.full(len(rows), x) for x in (done, done * (way.published or 0)))
            if pair:
                cost = (x.cpu().numpy() for x in (pair.counts, pair.teacher_tokens))
            parts.append((new, teacher_nats(self.models["teacher"], ids, new), np.array(rows), *cost))
        ids, nats, *others = zip(*parts, strict=True)
        return Written(torch.cat(ids).cpu(), torch.cat(nats).cpu(), *map(np.concatenate, others))

    @torch.no_grad()
    def record(self, student: str, signals: dict[str, Callable[[Pair], Tensor]], split: str) -> dict[str, Tensor]:
        """Return signals (B, N - 1) of a student at every token that it has read, on sampled texts that nothing
        refreshes: what gates are calibrated on, and compared by."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        found: dict[str, list[Tensor]] = {name: [] for name in signals}
        way = Way("", student, Policy())
        for _, ids in self.groups(split, 1):
            tokens, pair = self.tokens(way, ids, self.size.new_tokens, temperature=1.0, generator=generator)
            next(tokens)
            rows = [[signal(pair) for signal in signals.values()] for _ in tokens]
            for name, row in zip(signals, zip(*rows, strict=True), strict=True):
                found[name].append(torch.stack(row, 1).float().cpu())
        return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def generate_as_published(teacher: GPT, student: GPT, ids: Tensor, n: int, every: int,
                          new_cache: Callable[[], KVCache], temperature: float,
                          generator: torch.Generator) -> Iterator[Tensor]:  # fmt: skip
    """Yield n tokens (B, 1) as the source's code writes them. It feeds the prompt's last token a second time, and the
    teacher has read the newest token when the student has not, so that a splice moves every entry by one token."""
    read, cache = new_cache(), new_cache()
    teacher(ids, read, last_only=True)
    for layer, kv in enumerate(read.layers):
        cache.append(layer, *kv[..., : len(read), :], read.pos)
    cache.commit(read.pos)
    token, unread = ids[:, -1:], []
    for _ in range(n):
        if len(unread) == every:
            teacher(torch.cat(unread, 1), read, last_only=True)
            splice_last(cache, read, torch.full_like(ids[:, 0], every))
            unread = []
        token = sample(student(token, cache, last_only=True)[:, -1], temperature, None, generator)
        unread.append(token)
        yield token


# --- Figures of what was written ------------------------------------------------------------------------------------


def repeated(ids: Sequence[int], n: int = 3) -> float:
    """Return the share of the n-grams of a text that have been there before: the source's Repeat@3."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def by_prompt(values: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Return the mean of values (R,) for each prompt."""
    return np.array([values[prompt == i].mean() for i in np.unique(prompt)])


def bootstrap(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of values (n prompts,) and its 95% interval by bootstrap over prompts."""
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def exp(three: tuple[float, float, float]) -> list[float]:
    return [math.exp(x) for x in three]


def figures_of(study: Study, written: Written) -> dict[str, Any]:
    """Return the source's figures, a mean and its 95% interval each, and what perplexities are compared by: the mean
    nats of each prompt."""
    nats, prompt, n = written.nats.double().numpy(), written.prompt, written.ids.size(1)
    texts = [study.tokenizer.decode(row) for row in written.ids.tolist()]
    rows = {
        "tail_logprob": -nats[:, -TAIL:].mean(1),
        "repeat_3": np.array([repeated(row) for row in written.ids.tolist()]),
        "slips": (nats > -math.log(RARE)).mean(1),
        "characters": np.array([len(text) for text in texts]),
        "refreshes": written.refreshes,
        "teacher_tokens": written.teacher_tokens,
    }
    result = {name: bootstrap(by_prompt(values, prompt)) for name, values in rows.items()}
    result["ppl"] = exp(bootstrap(by_prompt(nats.mean(1), prompt)))
    result["nats"] = {str(k): by_prompt(nats[:, :k].mean(1), prompt).round(5).tolist()
                      for k in (*SPANS, n) if k <= n}  # fmt: skip
    return result


def ratio(one: dict[str, Any], other: dict[str, Any], first: str | None = None) -> list[float]:
    """Return how many times the perplexity of the other one has, prompt by prompt, and its 95% interval; of all that
    was written, or of the first tokens."""
    k = first or max(one["nats"], key=int)
    return exp(bootstrap(np.array(one["nats"][k]) - np.array(other["nats"][k])))


# --- Times ----------------------------------------------------------------------------------------------------------


def times(study: Study, ways: Sequence[Way]) -> dict[str, dict[str, Any]]:
    """Return seconds of writing after single prompts, sampled, all ways in turn: medians over prompts and repeats.

    ttft: to the first token; tps: tokens a second after it; total; end_to_end_tps; overhead: how much longer than the
    way "OverFill" of the same turn takes, also turn by turn; by_teacher: the share that its reading after the prompt,
    and splicing, take; by_length: teacher's tokens and seconds of a refresh, by the length of what was written.
    """
    n, runs = study.size.new_tokens, {way.name: [] for way in ways}
    turns = [ids for ids in study.prompts["test"][: study.size.timed] for _ in range(study.size.repeats)]
    for i, ids in enumerate(tqdm([turns[0], *turns], desc="times", leave=False)):
        fed = torch.tensor([ids], device=study.device)
        for way in ways:
            generator = torch.Generator(study.device).manual_seed(study.seed + i)
            begun, ttft = time.perf_counter(), 0.0
            tokens, pair = study.tokens(way, fed, n, temperature=1.0, generator=generator)
            for token in tokens:
                int(token)  # waits for the device
                ttft = ttft or time.perf_counter() - begun
            if i:  # the first turn warms up
                runs[way.name].append((ttft, time.perf_counter() - begun, pair.refreshes if pair else [],
                                       pair.seconds if pair else None))  # fmt: skip
    result = {}
    for name, several in runs.items():
        total = median(run[1] for run in several)
        refreshes = [r for run in several for r in run[2]]
        overheads = [run[1] / base[1] - 1 for run, base in zip(several, runs["OverFill"], strict=True)]
        result[name] = {
            "ttft_s": median(run[0] for run in several),
            "decode_tps": median((n - 1) / (run[1] - run[0]) for run in several),
            "total_s": total,
            "end_to_end_tps": n / total,
            "overhead": median(overheads),
            "overheads": [round(x, 5) for x in overheads],
            "by_teacher": None if several[0][3] is None else median(run[3] / run[1] for run in several),
            "by_length": [
                {"written": w, "tokens": median(r.tokens for r in refreshes if r.written == w),
                 "seconds": median(r.seconds for r in refreshes if r.written == w)}
                for w in sorted({r.written for r in refreshes})
            ],
        }  # fmt: skip
    return result


# --- What is compared -----------------------------------------------------------------------------------------------


def calibrated(study: Study) -> dict[str, Gate]:
    """Return the gates, with thresholds that meet their budgets on the split "valid"."""

    def fitted(signals: Tensor, gate: Gate, budget: float) -> Gate:
        n = gate.every  # signals are looked at every so many tokens
        return replace(gate, threshold=threshold_for(signals[:, n - 1 :: n], budget * n, math.ceil(gate.cooldown / n)))

    never = math.inf
    probe = ProbeKL(never, every=PROBE_EVERY)
    top = ProbeKL(never, every=PROBE_EVERY, window=PROBE_WINDOW, reads="window")
    signals = study.record("student", {"entropy": Entropy(never).signal, "probe": probe.signal}, "valid")
    gates: dict[str, Gate] = {
        f"entropy, {b:g} in 1,000": fitted(signals["entropy"], Entropy(never), b) for b in BUDGETS
    }
    gates[f"entropy, {BUDGETS[1]:g}, teacher's next"] = replace(gates[f"entropy, {BUDGETS[1]:g} in 1,000"],
                                                                teacher_next=True)  # fmt: skip
    gates[f"probe-KL, {BUDGETS[1]:g} in 1,000"] = fitted(signals["probe"], probe, BUDGETS[1])
    signals = study.record("student", {"probe": top.signal}, "valid")
    gates[f"probe-KL, reads {PROBE_WINDOW} on top"] = fitted(signals["probe"], top, BUDGETS[1])
    if study.dropout:
        both = {"entropy": Entropy(never), "MC dropout": MonteCarloDropout(never, rate=study.rates[study.dropout])}
        signals = study.record(study.dropout, {name: gate.signal for name, gate in both.items()}, "valid")
        for name, gate in both.items():
            gates[f"dropout student: {name}, {BUDGETS[1]:g}"] = fitted(signals[name], gate, BUDGETS[1])
    return gates


def ways_of(study: Study, gates: dict[str, Gate]) -> list[Way]:
    """Return all ways of writing that the models allow, in the order of the source's tables."""
    ways = [Way("teacher", "teacher"), Way("OverFill", policy=Policy()), Way("student", "student")]
    if "alone" in study.models:
        ways.append(Way("student trained alone", "alone"))
    ways += [Way(f"periodic, {n}", policy=Periodic(n)) for n in (256, 128, 64, 32, 16)]
    ways.append(Way("windowed, last 16 of 64", policy=Periodic(64, window=16)))
    ways.append(Way("speculative, 8", policy=speculative(8)))
    if not misfit(study.models["teacher"], study.models["student"]):
        ways += [Way(f"as published, every {n}", published=n) for n in (64, 8)]
    if study.dropout:
        ways.append(Way("dropout student: OverFill", study.dropout, Policy()))
    return ways + [Way(name, study.dropout if name.startswith("dropout") else "student", gate)
                   for name, gate in gates.items()]  # fmt: skip


def trained_differently(study: Study) -> list[Way]:
    """Return the ways that tell students apart by what they were trained on."""
    ways = []
    for student in [name for name in ("alone", "prompt", "student") if name in study.models]:
        ways.append(Way(f"{student}, alone", student))
        ways += [Way(f"{student}, {label}", student, policy) for label, policy in
                 (("OverFill", Policy()), ("periodic, 64", Periodic(64)), ("speculative, 8", speculative(8)))]
    return ways


def facts_right(study: Study, ways: Sequence[Way]) -> dict[str, tuple[float, float, float]]:
    """Return how many questions on what was said early in a story each way answers exactly, greedily: short outputs
    after long prompts, where OverFill is said to work best."""
    questions = corpus.recall_questions("test", study.size.facts)
    found = {}
    for way in ways:
        right = []
        for question in tqdm(questions, desc=f"facts: {way.name}", leave=False):
            ids = study.tokenizer.encode_ordinary(question.prompt)
            text = ""
            tokens, _ = study.tokens(way, torch.tensor([ids], device=study.device), 24)
            for token in tokens:
                text += study.tokenizer.decode([int(token)])
                if "\n" in text or int(token) == study.tokenizer.eot_token:
                    break
            right.append(text.partition("\n")[0].strip() == question.answer)
        found[way.name] = bootstrap(np.array(right, dtype=float))
    return found


def three_ways(study: Study) -> list[Way]:
    """Return the teacher, OverFill and the student that is the best alone."""
    alone = Way("student trained alone", "alone") if "alone" in study.models else Way("student", "student")
    return [Way("teacher", "teacher"), Way("OverFill", policy=Policy()), alone]


def by_prompt_length(study: Study, lengths: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Return perplexities of the first n tokens after prompts of other lengths."""
    rows = []
    for length in lengths:
        prompts = {"test": pocket_prompts(study.tokenizer, "test", study.size.prompts, length)}
        other = Study(study.models, study.tokenizer, prompts, replace(study.size, new_tokens=n), {}, study.seed)
        written = {way.name: other.write(way, 1.0) for way in three_ways(study)}
        rows.append({"tokens": length, **{name: figures_of(other, w) for name, w in written.items()}})
    return rows


@torch.no_grad()
def cache_errors(study: Study, ways: Sequence[Way], prompts: int) -> dict[str, dict[str, list[float]]]:
    """Return, by way, over the tokens that were written: the error of the student's cache, |C_S - C_T| / |C_T| with the
    teacher's own cache of the same text (the source's E_t), and KL(teacher || student) of the next token in nats.

    All ways read one text, which OverFill has written without a refresh, so that they differ by their caches alone.
    """
    ids = max((ids for _, ids in study.groups("test", 1)), key=len)[:prompts]  # of the length that most prompts have
    generator = torch.Generator(study.device).manual_seed(study.seed)
    writer = Way("OverFill", policy=Policy())
    tokens, _ = study.tokens(writer, ids, study.size.new_tokens, temperature=1.0, generator=generator)
    new = torch.cat(list(tokens), 1)  # (B, N)
    truth = KVCache()
    expected = study.models["teacher"](torch.cat([ids, new], 1), truth)[:, ids.size(1) :]  # (B, N, V)
    found = {}
    for way in ways:
        room = partial(SlidingWindowCache, ids.size(1) + new.size(1))
        pair = Pair(study.models["teacher"], study.models[way.student], ids, room)
        pair.prefill()
        errors, kl = [], []
        for t, token in enumerate(tqdm(new.split(1, 1), desc=f"cache: {way.name}", leave=False)):
            pair.step(token)
            kl.append(round(float(divergence(expected[:, t], pair.logits).mean()), 5))
            rows = way.policy.due(pair)
            if rows.any():
                pair.refresh(rows, way.policy)
            n = len(pair.cache)
            parts = [(a[..., :n, :], b[..., :n, :]) for a, b in zip(pair.cache.layers, truth.layers, strict=True)]
            off, norm = (sum(float(x.square().sum()) for x in xs) for xs in
                         ((a - b for a, b in parts), (b for _, b in parts)))  # fmt: skip
            errors.append(round(math.sqrt(off / norm), 5))
        found[way.name] = {"error": errors, "kl": kl}
    return found


# --- Do the signals say what they are taken to say ------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def signals_of(study: Study, student: str) -> dict[str, dict[str, float]]:
    """Return, for each signal of a student, Spearman's correlation with KL(teacher || student) of the same token, which
    a refresh can mend, and with the teacher's own entropy, which it can't; the area under the ROC curve by which it
    tells the tenth of the tokens with the largest KL from the others, with its 95% interval over texts; and that of the
    difference to entropy's."""
    everyone = ProbeKL(math.inf)

    def teachers_entropy(pair: Pair) -> Tensor:
        return entropy(pair.consult(torch.ones_like(pair.since, dtype=torch.bool), everyone)[1])

    gates: dict[str, Callable[[Pair], Tensor]] = {"entropy": Entropy(math.inf).signal}
    if student in study.rates:
        dropout = MonteCarloDropout(math.inf, rate=study.rates[student])
        gates["MC dropout, U(t)"] = dropout.signal
        gates["MC dropout, mutual information"] = lambda pair: mutual_information(
            dropout_logits(pair.student, pair.ids[:, -1:], pair.cache, dropout.passes, dropout.rate))  # fmt: skip
    recorded = study.record(student, {"kl": everyone.signal, "teacher's entropy": teachers_entropy, **gates}, "test")
    kl, own = (recorded.pop(name).numpy() for name in ("kl", "teacher's entropy"))
    large = kl >= np.quantile(kl, 0.9)
    draws = np.random.default_rng(0).integers(len(kl), size=(200, len(kl)))
    areas = {name: [area(x.numpy()[draw].ravel(), large[draw].ravel()) for draw in (np.arange(len(kl)), *draws)]
             for name, x in recorded.items()}  # fmt: skip
    return {
        name: {
            "with_kl": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(kl.ravel()))[0, 1]),
            "with_teachers_entropy": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(own.ravel()))[0, 1]),
            "area": [areas[name][0], *np.quantile(areas[name][1:], [0.025, 0.975]).tolist()],
            "above_entropy": np.quantile(np.subtract(areas[name], areas["entropy"])[1:], [0.025, 0.975]).tolist(),
        }
        for name, x in recorded.items()
    }  # fmt: skip


def area(signal: np.ndarray, large: np.ndarray) -> float:
    """Return the area under the ROC curve by which a signal (n,) tells what is large (n,) from the rest."""
    return float((ranks(signal)[large].mean() - (large.sum() - 1) / 2) / (~large).sum())


PHASES = (("conf", 0, 100), ("drift", 100, 200), ("post", 200, 250), ("alea", 250, 350), ("conf", 350, 400))


def simulation(passes: int = 20, vocabulary: int = 5_000, every: int = 16, cooldown: int = 32,
               seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Return the source's simulation of 400 steps: entropy in nats and U(t) of logits drawn to be confident, to drift
    (unsure, and passes disagree) or to be ambiguous (unsure, and passes agree), and when either trigger fires.

    Two pairs of thresholds: "source", entropy's 97th percentile of the whole run and U's of the confident start, which
    is what its figures look like; "same rule", six standard deviations above the mean of the confident start for both.
    Gates are looked at every 16 steps, and 32 apart, as its steps of firing suggest.
    """
    generator = torch.Generator().manual_seed(seed)
    phase = [name for name, start, end in PHASES for _ in range(start, end)]
    spread = {"drift": 0.86}  # of the logits; confident: one logit above all others; ambiguous: all the same
    noise = {"drift": 0.0543}
    signals: dict[str, list[float]] = {"entropy": [], "variance": []}
    for name in phase:
        logits = spread.get(name, 0.0) * torch.randn(vocabulary, generator=generator)
        logits[0] += 16.0 if name in ("conf", "post") else 0.0
        z = logits + noise.get(name, 0.01) * torch.randn(passes, vocabulary, generator=generator)
        signals["entropy"].append(round(float(entropy(z.softmax(-1).mean(0).log()) * math.log(2)), 6))
        signals["variance"].append(round(float(logit_variance(z)), 8))
    series = {name: np.array(values) for name, values in signals.items()}
    start = slice(0, 100)
    thresholds = {
        "source": {"entropy": np.quantile(series["entropy"], 0.97),
                   "variance": np.quantile(series["variance"][start], 0.97)},
        "same rule": {name: x[start].mean() + 6 * x[start].std() for name, x in series.items()},
    }  # fmt: skip
    record: dict[str, Any] = {"steps": signals, "thresholds": {}, "fires": {}, "phases": {}}
    for rule, levels in thresholds.items():
        record["thresholds"][rule] = {name: float(level) for name, level in levels.items()}
        record["fires"][rule] = {name: fired(series[name], level, every, cooldown) for name, level in levels.items()}
    for name in dict.fromkeys(phase):
        at = np.array([p == name for p in phase])
        record["phases"][name] = {"steps": int(at.sum())}
        record["phases"][name] |= {f"mean_{key}": float(x[at].mean()) for key, x in series.items()}
        for rule, fires in record["fires"].items():
            for key, steps in fires.items():
                record["phases"][name][f"{key} fires, {rule}"] = float(sum(at[steps]) / at.sum())
    return record


def fired(values: np.ndarray, level: float, every: int, cooldown: int) -> list[int]:
    """Return the steps at which a gate fires."""
    steps: list[int] = []
    for t in range(0, len(values), every):
        if values[t] > level and (not steps or t - steps[-1] >= cooldown):
            steps.append(t)
    return steps


# --- The report -----------------------------------------------------------------------------------------------------


def report(study: Study, about: dict[str, Any], out: Path) -> None:
    """Measure everything; print the tables and the verdicts; write them as CSV and JSON, and draw the figures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):  # can be written to? before anything takes time
        pass
    begun, size = time.perf_counter(), study.size
    gates = calibrated(study)
    ways = ways_of(study, gates)
    known = about["prompts"] == "pocket"  # whose documents come in any length, and have questions with answers
    record: dict[str, Any] = {**about, "tokens": size.new_tokens, "seeds": size.seeds,
                              "measured_prompts": len(study.prompts["test"]),
                              "prompt_tokens": sorted({len(p) for p in study.prompts["test"]}),
                              "thresholds": {name: gate.threshold for name, gate in gates.items()}}  # fmt: skip
    record["ways"] = {way.name: {} for way in ways}
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        for way in tqdm(ways, desc=mode, leave=False):
            record["ways"][way.name][mode] = figures_of(study, study.write(way, temperature))
    for name, figures in times(study, [*ways, Way("periodic, 64, all read", policy=Periodic(64, reads="all"))]).items():
        record["ways"].setdefault(name, {})["times"] = figures
    if {"alone", "prompt"} & {*study.models}:
        measured = {(way.student, way.policy): record["ways"][way.name]["sampled"] for way in ways if not way.published}
        record["students"] = {}
        for way in tqdm(trained_differently(study), desc="students", leave=False):
            before = measured.get((way.student, way.policy))
            record["students"][way.name] = before or figures_of(study, study.write(way, 1.0))
    if known:
        n = size.new_tokens // 2
        record["lengths"] = by_prompt_length(study, (32, 96, 192), n)
        record["facts"] = facts_right(study, three_ways(study))
    if not misfit(study.models["teacher"], study.models["student"]):  # else the two caches can't be compared
        gate = f"entropy, {BUDGETS[1]:g} in 1,000"
        record["cache"] = cache_errors(study, [
            Way("OverFill", policy=Policy()), Way("periodic, 64", policy=Periodic(64)),
            Way("windowed, last 16 of 64", policy=Periodic(64, window=16)),
            Way("speculative, 8", policy=speculative(8)), Way(gate, policy=gates[gate]),
            *(Way(f"trained on {what}: OverFill", name, Policy()) for name, what in
              (("alone", "its own cache"), ("prompt", "prompts")) if name in study.models),
        ], prompts=max(1, size.prompts // 6))  # fmt: skip
    record["signals"] = {name: signals_of(study, name) for name in dict.fromkeys(("student", study.dropout)) if name}
    record["dropout_student"] = study.dropout
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
    write_atomically(out / "summary.json", lambda file: file.write_text(json.dumps(record, indent=1) + "\n"))
    print(f"\n{record['minutes']:.1f} minutes. Written to {out}")


def verdict(holds: bool, refuted: bool | None = None) -> str:
    """Return HOLDS, DOES NOT HOLD, or NOT SHOWN for what is neither shown nor refuted."""
    if holds:
        return "HOLDS"
    return "DOES NOT HOLD" if refuted in (True, None) else "NOT SHOWN"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the source's claims, each with its verdict and the figures behind it; sampled texts decide. A difference
    of perplexities, prompt by prompt, or of times, turn by turn, is shown if its 95% interval leaves out 0."""
    ways = record["ways"]
    gate, often, burst = f"entropy, {BUDGETS[0]:g} in 1,000", "periodic, 64", "speculative, 8"

    def ppl(name: str) -> float:
        return ways[name]["sampled"]["ppl"][0]

    def against(name: str, other: str) -> list[float]:
        return ratio(ways[name]["sampled"], ways[other]["sampled"])

    def longer(name: str, other: str) -> tuple[float, float, float]:
        pairs = (np.array(ways[x]["times"]["overheads"]) for x in (name, other))
        return bootstrap(next(pairs) - next(pairs))

    def overhead(name: str) -> str:
        mean, low, high = bootstrap(np.array(ways[name]["times"]["overheads"]))
        return f"{mean:+.1%} ({low:+.1%}..{high:+.1%})"

    def growth(name: str) -> tuple[str, float]:
        at = ways[name]["times"]["by_length"]
        if len(at) < 2 or not at[0]["tokens"]:
            return "too few refreshes to tell" if len(at) < 2 else "the teacher reads nothing", 0.0
        text = f"{at[0]['tokens']:.0f} to {at[-1]['tokens']:.0f} tokens, {1e3 * at[0]['seconds']:.1f} to " \
               f"{1e3 * at[-1]['seconds']:.1f} ms"  # fmt: skip
        return text, at[-1]["tokens"] / at[0]["tokens"]

    periods = [k for k in (256, 128, 64) if k < record["tokens"]]
    steps = [ppl(name) for name in ("OverFill", *(f"periodic, {k}" for k in periods))]
    saved, better = longer(gate, often), against(often, "OverFill")
    reached = against(gate, often)
    kept, again, bursts = (growth(name) for name in (often, "periodic, 64, all read", burst))
    dearer, tps = longer(burst, often), [ways[name]["times"]["decode_tps"] for name in ("student", "OverFill")]
    return [
        {
            "claim": "perplexity: teacher < OverFill < the same student alone",
            "verdict": verdict(against("teacher", "OverFill")[2] < 1 and against("OverFill", "student")[2] < 1,
                               against("teacher", "OverFill")[1] > 1 or against("OverFill", "student")[1] > 1),
            "figures": f"{ppl('teacher'):.2f}, {ppl('OverFill'):.2f}, {ppl('student'):.2f}; OverFill "
            f"{between(against('OverFill', 'student'))} against the student",
        },
        {
            "claim": f"the more refreshes, the lower the perplexity: none, {', '.join(map(str, periods))}",
            "verdict": verdict(all(a >= b for a, b in pairwise(steps)) and better[2] < 1, better[1] > 1),
            "figures": f"{', '.join(f'{x:.2f}' for x in steps)}; against none, "
            + ", ".join(f"every {k} {between(against(f'periodic, {k}', 'OverFill'))}" for k in (128, 64, 16)),
        },
        {
            "claim": "two or three refreshes in 1,000 tokens, at the right places, reach every 64",
            "verdict": verdict(reached[2] < 1.05 and better[2] < 1, reached[1] > 1),
            "figures": f"{ppl(gate):.2f}, {between(reached)} against {ppl(often):.2f}, which is {between(better)} "
            "against none; 5% are taken for equal",
        },
        {
            "claim": "and take less time",
            "verdict": verdict(saved[2] < 0, saved[1] > 0),
            "figures": f"{overhead(gate)}, the gate included, against {overhead(often)}",
        },
        {
            "claim": "a speculative refresh costs the same however long the text",
            "verdict": verdict(bursts[1] == 1),
            "figures": f"first to last: {bursts[0]}",
        },
        {
            "claim": "a periodic refresh costs ever more",
            "verdict": verdict(kept[1] > 1),
            "figures": f"first to last: {kept[0]}, by a teacher that keeps its cache; {again[0]}, by one that reads "
            "everything again",
        },
        {
            "claim": "bursts of 8 take less time than a refresh every 64 tokens",
            "verdict": verdict(dearer[2] < 0, dearer[1] > 0),
            "figures": f"{overhead(burst)} against {overhead(often)}: eight times as many calls",
        },
        {
            "claim": "OverFill decodes as fast as the student",
            "verdict": verdict(abs(tps[1] / tps[0] - 1) < 0.05),
            "figures": f"{tps[1]:.0f} and {tps[0]:.0f} tokens/s; 5% are taken for noise",
        },
        *simulated(record),
        *against_its_equal(record),
        *real_gate(record),
    ]  # fmt: skip


def simulated(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdicts on the simulated triggers, for either pair of thresholds."""
    found = []
    for rule, fires in record["ambiguous"].items():
        steps = "; ".join(f"{name} at {at}" for name, at in record["simulation"]["fires"][rule].items())
        found.append({
            "claim": f"simulated: variance is silent in the ambiguous phase, entropy is not (thresholds by the {rule})",
            "verdict": verdict(fires["variance"] == 0 and fires["entropy"] == 1),
            "figures": f"variance fires there in {fires['variance']:.0%} of the runs, entropy in "
            f"{fires['entropy']:.0%}; in the first run {steps}"
            + "; in the source's own, entropy at [320], variance at [112, 144, 176, 336]" * (rule == "source"),
        })  # fmt: skip
    return found


def against_its_equal(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return our own question: OverFill against a student that was trained as long, on nothing but its own cache."""
    if "lengths" not in record or "student trained alone" not in record["ways"]:
        return []
    over, alone = (record["ways"][name]["sampled"] for name in ("OverFill", "student trained alone"))
    change, longest = ratio(over, alone), record["lengths"][-1]
    first = max(longest["OverFill"]["nats"], key=int)
    early = ratio(longest["OverFill"], longest["student trained alone"], first)
    return [{
        "claim": "(not the source's) OverFill < a student trained as long for writing alone",
        "verdict": verdict(change[2] < 1, change[1] > 1),
        "figures": f"{over['ppl'][0]:.2f}, {alone['ppl'][0]:.2f}: {between(change)} over {record['tokens']} tokens; "
        f"over the first {first} after prompts of {longest['tokens']}, {between(early)}",
    }]  # fmt: skip


def real_gate(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdict on the gate by dropout at work, if a student was trained with dropout."""
    found = record["signals"].get(record["dropout_student"], {})
    if not found:
        return []
    variance, other = found["MC dropout, U(t)"], found["MC dropout, mutual information"]
    low, high = variance["above_entropy"]
    names = [f"dropout student: {name}, {BUDGETS[1]:g}" for name in ("MC dropout", "entropy")]
    values = [record["ways"][name]["sampled"]["ppl"][0] for name in names]
    return [{
        "claim": "a real model: U(t) shows better than entropy where student and teacher disagree",
        "verdict": verdict(low > 0, high < 0),
        "figures": f"area under the ROC curve {shown(variance['area'])}, entropy {shown(found['entropy']['area'])}, "
        f"mutual information of the same passes {shown(other['area'])}; perplexity by either gate: U(t) "
        f"{values[0]:.2f}, entropy {values[1]:.2f}",
    }]  # fmt: skip


def shown(three: Sequence[float]) -> str:
    """Return a mean and its interval."""
    return f"{three[0]:.2f} ({three[1]:.2f}-{three[2]:.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, the first column to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("PPL", lambda q: f"{q['ppl'][0]:.2f}"),
    ("95%", lambda q: f"{q['ppl'][1]:.2f}-{q['ppl'][2]:.2f}"),
    ("tail logp", lambda q: f"{q['tail_logprob'][0]:.2f}"),
    ("slips", lambda q: f"{q['slips'][0]:.1%}"),
    ("Repeat@3", lambda q: f"{q['repeat_3'][0]:.3f}"),
    ("chars", lambda q: f"{q['characters'][0]:,.0f}"),
    ("refreshes", lambda q: f"{q['refreshes'][0]:.1f}"),
    ("teacher reads", lambda q: f"{q['teacher_tokens'][0]:.0f}"),
)


def between(three: Sequence[float]) -> str:
    """Return the interval of a ratio as changes."""
    return f"{three[1] - 1:+.0%}..{three[2] - 1:+.0%}"


def print_tables(record: dict[str, Any]) -> None:
    """Print all tables, and the verdicts."""
    lengths = record["prompt_tokens"]
    print(f"{record['measured_prompts']} prompts of {lengths[0]} to {lengths[-1]} tokens, {record['tokens']} tokens "
          f"written; perplexity is the teacher's")  # fmt: skip
    for mode, about in (("sampled", f"temperature 1, {record['seeds']} seeds"), ("greedy", "temperature 0")):
        rows = [[name, *(cell(r[mode]) for _, cell in COLUMNS)] for name, r in record["ways"].items() if mode in r]
        base = record["ways"]["OverFill"][mode]
        for row, r in zip(rows, (r for r in record["ways"].values() if mode in r), strict=True):
            row.insert(3, between(ratio(r[mode], base)) if r[mode] is not base else "")
        header = [title for title, _ in COLUMNS]
        header.insert(2, "to OverFill")
        print(f"\n{mode}: {about}\n" + table(["", *header], rows))
    rows = []
    for name, r in record["ways"].items():
        t = r["times"]
        rows.append([name, f"{1e3 * t['ttft_s']:.1f}", f"{t['decode_tps']:.0f}", f"{1e3 * t['total_s']:.0f}",
                     f"{t['end_to_end_tps']:.0f}", f"{t['overhead']:+.1%}",
                     "" if t["by_teacher"] is None else f"{t['by_teacher']:.1%}"])  # fmt: skip
    header = ["", "TTFT ms", "tokens/s", "total ms", "end to end tokens/s", "overhead", "by the teacher"]
    print("\ntimes: single prompts, sampled, medians of ways in turn\n" + table(header, rows))
    if "students" in record:
        names = [*dict.fromkeys(name.partition(", ")[0] for name in record["students"])]
        how = [*dict.fromkeys(name.partition(", ")[2] for name in record["students"])]
        rows = [[name, *(f"{record['students'][f'{name}, {x}']['ppl'][0]:.2f}" for x in how)] for name in names]
        print("\nstudents by what they were trained on (PPL, sampled): their own cache, the teacher's of a prompt, or "
              "segments\n" + table(["", *how], rows))  # fmt: skip
    if "lengths" in record:
        rows = []
        for r in record["lengths"]:
            for k in r["OverFill"]["nats"]:
                names = [name for name in r if name != "tokens"]
                cells = [f"{math.exp(np.mean(r[name]['nats'][k])):.2f}" for name in names]
                rows.append([str(r["tokens"]), k, *cells, between(ratio(r["OverFill"], r[names[-1]], k))])
        header = ["prompt", "first tokens", *names, "OverFill to the last"]
        print("\nby tokens of the prompt, and of the first tokens written (PPL, sampled)\n" + table(header, rows))
    if "facts" in record:
        cells = (f"{name} {x:.0%} ({low:.0%} to {high:.0%})" for name, (x, low, high) in record["facts"].items())
        print(f"\nquestions on what a story said early, answered exactly: {', '.join(cells)}")
    rows = [[f"{student}: {name}", f"{r['with_kl']:.2f}", f"{r['with_teachers_entropy']:.2f}", shown(r["area"])]
            for student, signals in record["signals"].items() for name, r in signals.items()]  # fmt: skip
    print("\nwhat the signals say: rank correlation with KL(teacher || student), and with the teacher's own entropy;\n"
          "area under the ROC curve for the tenth of the tokens with the largest KL")  # fmt: skip
    print(table(["", "with KL", "with teacher's entropy", "area"], rows))
    phases = record["simulation"]["phases"]
    header = ["phase", *next(iter(phases.values()))]
    rows = [[name, *(f"{x:.4f}" if isinstance(x, float) else str(x) for x in r.values())] for name, r in phases.items()]
    print("\nsimulated: entropy in nats, variance of logits over passes, share of steps that fire")
    print(table(header, rows))
    print("\nWhat is claimed:")
    for claim in record["claims"]:
        print(f"  {claim['claim']}: {claim['verdict']} ({claim['figures']})")


def write_tables(record: dict[str, Any], out: Path) -> None:
    """Write quality.csv, times.csv, cache.csv, simulation.csv."""
    keys = ("ppl", "tail_logprob", "slips", "repeat_3", "characters", "refreshes", "teacher_tokens")
    header = ["way", "texts", *(f"{key}{end}" for key in keys for end in ("", "_low", "_high"))]
    write_csv(out / "quality.csv", header, [
        [name, mode, *(x for key in keys for x in r[mode][key])]
        for mode in ("sampled", "greedy") for name, r in record["ways"].items() if mode in r
    ])  # fmt: skip
    keys = ("ttft_s", "decode_tps", "total_s", "end_to_end_tps", "overhead", "by_teacher")
    write_csv(out / "times.csv", ["way", *keys], [[name, *(r["times"][key] for key in keys)]
                                                  for name, r in record["ways"].items()])  # fmt: skip
    curves = [(f"{name}: {key}", x) for name, r in record.get("cache", {}).items() for key, x in r.items()]
    if curves:
        write_csv(out / "cache.csv", ["written", *(name for name, _ in curves)],
                  zip(range(1, record["tokens"] + 1), *(x for _, x in curves), strict=True))  # fmt: skip
    steps = record["simulation"]["steps"]
    write_csv(out / "simulation.csv", ["step", *steps], zip(range(400), *steps.values(), strict=True))


STYLES = ("-", "--", "-.", ":")


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw the cache's error and the divergence over time, quality against time, and the simulation."""

    def over_time(key: str, width: int) -> Callable[[Any], None]:
        def curves(axes: Any) -> None:
            for i, (name, r) in enumerate(record["cache"].items()):
                values = np.convolve(r[key], np.ones(width) / width, "valid")
                at = np.arange(len(values)) + (width + 1) / 2
                axes.plot(at, values, STYLES[i % 4], color=f"C{i}", linewidth=1.4, label=name)

        return curves

    if "cache" in record:
        labels = {"xlabel": "tokens written", "ylabel": "|student's cache - teacher's| / |teacher's|"}
        title = "Error of the cache, E_t, on equal texts"
        figure(out / "cache_error.png", over_time("error", 1), title=title, **labels)
        labels["ylabel"] = "KL(teacher || student), nats"
        figure(out / "divergence.png", over_time("kl", 24), title="The next token, mean over 24 tokens", **labels)

    def quality(axes: Any) -> None:
        families = {name: [name] for name in ("teacher", "OverFill", "student trained alone", "speculative, 8")}
        families |= {f"{kind} ...": [name for name in record["ways"] if name.startswith(kind)
                                     and not name.endswith(("all read", "on top", "teacher's next"))]
                     for kind in ("periodic", "entropy", "probe-KL")}  # fmt: skip
        for i, (label, names) in enumerate(families.items()):
            rows = [record["ways"][name] for name in names if name in record["ways"]]
            ppl = np.array([r["sampled"]["ppl"] for r in rows]).reshape(-1, 3).T  # mean, low, high
            x = [1e3 * r["times"]["total_s"] / record["tokens"] for r in rows]
            axes.errorbar(x, ppl[0], [ppl[0] - ppl[1], ppl[2] - ppl[0]], fmt="os^Dv*P"[i] + STYLES[i % 4], capsize=2,
                          color=f"C{i}", markersize=6, linewidth=0.8, label=label)  # fmt: skip

    figure(out / "quality.png", quality, xlabel="ms per token, from end to end", ylabel="the teacher's perplexity",
           title="Sampled texts: quality against time, 95% intervals")  # fmt: skip

    def two(axes: Any) -> None:
        found = record["simulation"]
        for i, (name, values) in enumerate(found["steps"].items()):
            top = max(values)
            axes.plot(np.array(values) / top, color=f"C{i}", linewidth=1, label=f"{name}, of {top:.2g}")
            for rule, mark in (("same rule", "v"), ("source", "^")):
                at = found["fires"][rule][name]
                axes.plot(at, [1.1 + 0.2 * i + 0.1 * (mark == "^")] * len(at), mark, color=f"C{i}", markersize=6,
                          label=f"{name} fires, thresholds by the {rule}")  # fmt: skip
        for name, start, end in PHASES:
            axes.axvline(start, color="grey", linewidth=0.6)
            axes.text((start + end) / 2, -0.06, name, ha="center", fontsize=8)
        axes.set_ylim(-0.1, 2.1)

    figure(out / "simulation.png", two, xlabel="step", ylabel="share of its maximum", title="Simulated: two triggers")
