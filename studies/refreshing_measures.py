"""The measures of the refresh study: texts by every writer, their figures and times, and the gates' signals.

Quality is measured on batches of prompts, teachers and students in turn with the same random draws; times on single
prompts, all writers in turn, as medians."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

import overfill
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from overfill import Pair, Policy
from pocket import corpus
from studies.protocol import read_prompts
from support.statistics import area_under_roc, bootstrap, entropy

BUDGETS = (2.5, 7.8, 15.6)  # refreshes per 1,000 tokens: the source's, and those of T = 128 and T = 64
PROBE_EVERY, PROBE_WINDOW = 32, 16
LEAST = PROBE_EVERY + 8  # tokens to write, or else no probe is made
SPANS = (32, 64, 128, 512)  # first tokens of what is written; then all of it
TAIL = 50  # tokens whose log-probability the source reports apart
RARE = 0.01  # a token is a slip if the teacher gives it less
OWN = 256  # tokens at most of a prompt that are of the document which it begins
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


# --- Texts ----------------------------------------------------------------------------------------------------------


def pocket_prompts(tokenizer: tiktoken.Encoding, split: str, n: int, tokens: int) -> list[list[int]]:
    """Return n prompts, the beginnings of n documents of a split; long ones have earlier documents before that. Raises
    ValueError if there are too few."""
    own = min(tokens, OWN)
    found: list[list[int]] = []
    earlier: list[int] = []
    for document in corpus.documents(split, 40 * n):
        ids = tokenizer.encode_ordinary(document.text)
        if document.kind in KINDS and len(ids) > own and len(earlier) >= tokens - own:
            found.append(earlier[len(earlier) - tokens + own :] + ids[:own])
        if len(found) == n:
            return found
        earlier = [*earlier, *ids, tokenizer.eot_token][-tokens:]
    raise ValueError(f"only {len(found)} of {40 * n} documents have more than {own} tokens, {n} are needed")


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
class Writer:
    """Writes texts: a model alone (no policy), or the teacher and a student under a policy."""

    name: str
    student: str = "student"  # or "teacher", alone
    policy: Policy | None = None
    published: int | None = None  # by the source's own code, refreshed every so many tokens


@dataclass
class Written:
    """The tokens (R, N) of a writer, the teacher's nats of each, which prompt each row continues; and what refreshes
    cost in each row."""

    ids: Tensor
    nats: Tensor
    prompt: np.ndarray  # (R,)
    refreshes: np.ndarray
    teacher_tokens: np.ndarray


class Setup:
    """The models and the prompts: lets writers continue these, and records signals."""

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

    def tokens(self, writer: Writer, ids: Tensor, n: int, **options: Any) -> tuple[Iterator[Tensor], Pair | None]:
        """Return what yields a writer's n tokens after ids (B, T), and the pair that is at work, if any."""
        model = self.models[writer.student]

        def new_cache() -> KVCache:
            return KVCache() if len(ids) == 1 else SlidingWindowCache(ids.size(1) + n)

        if writer.published:
            return refresh_as_published(self.models["teacher"], model, ids, n, writer.published, new_cache,
                                         **options), None  # fmt: skip
        if writer.policy is None:
            return generate(model, ids, n, cache=new_cache(), **options), None
        pair = Pair(self.models["teacher"], model, ids, new_cache)
        return overfill.generate_refreshed(pair, n, writer.policy, **options), pair

    def write(self, writer: Writer, temperature: float, split: str = "test") -> Written:
        """Let a writer continue all prompts, each by several seeds unless greedily; equal seeds draw equal numbers."""
        seeds = self.size.seeds if temperature else 1
        generator = torch.Generator(self.device).manual_seed(self.seed)
        parts = []
        for rows, ids in self.groups(split, seeds):
            options = {"temperature": temperature, "generator": generator}
            tokens, pair = self.tokens(writer, ids, self.size.new_tokens, **options)
            new = torch.cat(list(tokens), 1)
            done = (self.size.new_tokens - 1) // writer.published if writer.published else 0
            cost = (np.full(len(rows), x) for x in (done, done * (writer.published or 0)))
            if pair:
                cost = (x.cpu().numpy() for x in (pair.counts, pair.teacher_tokens))
            parts.append((new, overfill.teacher_nats(self.models["teacher"], ids, new), np.array(rows), *cost))
        ids, nats, *others = zip(*parts, strict=True)
        return Written(torch.cat(ids).cpu(), torch.cat(nats).cpu(), *map(np.concatenate, others))

    @torch.no_grad()
    def record(self, student: str, signals: dict[str, Callable[[Pair], Tensor]], split: str,
               temperature: float = 1.0) -> dict[str, Tensor]:  # fmt: skip
        """Return signals (B, N - 1) of a student at every token that it has read, on texts that nothing refreshes:
        what gates are calibrated on, and compared by."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        found: dict[str, list[Tensor]] = {name: [] for name in signals}
        writer = Writer("", student, Policy())
        for _, ids in self.groups(split, 1):
            tokens, pair = self.tokens(writer, ids, self.size.new_tokens, temperature=temperature, generator=generator)
            next(tokens)
            rows = [[signal(pair) for signal in signals.values()] for _ in tokens]
            for name, row in zip(signals, zip(*rows, strict=True), strict=True):
                found[name].append(torch.stack(row, 1).float().cpu())
        return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def refresh_as_published(teacher: GPT, student: GPT, ids: Tensor, n: int, every: int,
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
            overfill.splice_last(cache, read, torch.full_like(ids[:, 0], every))
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


def exp(three: tuple[float, float, float]) -> list[float]:
    return [math.exp(x) for x in three]


def figures_of(setup: Setup, written: Written) -> dict[str, Any]:
    """Return the source's figures, a mean and its 95% interval each, and what perplexities are compared by: the mean
    nats of each prompt."""
    nats, prompt, n = written.nats.double().numpy(), written.prompt, written.ids.size(1)
    texts = [setup.tokenizer.decode(row) for row in written.ids.tolist()]
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


def times(setup: Setup, writers: Sequence[Writer]) -> dict[str, dict[str, Any]]:
    """Return seconds of writing after single prompts, sampled, all writers in turn: medians over prompts and repeats.

    ttft: to the first token; tps: tokens a second after it; total; end_to_end_tps; overhead: how much longer than
    OverFill in the same turn, also turn by turn; by_teacher: the share that its reading after the prompt, and splicing,
    take; by_length: teacher's tokens and seconds of a refresh, by the length of what was written.
    """
    n, runs = setup.size.new_tokens, {writer.name: [] for writer in writers}
    turns = [ids for ids in setup.prompts["test"][: setup.size.timed] for _ in range(setup.size.repeats)]
    for i, ids in enumerate(tqdm([turns[0], *turns], desc="times", leave=False)):
        fed = torch.tensor([ids], device=setup.device)
        for writer in writers:
            generator = torch.Generator(setup.device).manual_seed(setup.seed + i)
            begun, ttft = time.perf_counter(), 0.0
            tokens, pair = setup.tokens(writer, fed, n, temperature=1.0, generator=generator)
            for token in tokens:
                int(token)  # waits for the device
                ttft = ttft or time.perf_counter() - begun
            if i:  # the first turn warms up
                runs[writer.name].append((ttft, time.perf_counter() - begun, pair.refreshes if pair else [],
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


def threshold_for(signals: Tensor, per_1000: float, cooldown: int) -> float:
    """Return the threshold by which a gate would fire about per_1000 times in 1,000 tokens, given its signals (B, T) on
    texts that nothing refreshes. Raises ValueError if that many are impossible with the cooldown."""
    if not 0 < per_1000 <= 1000 / cooldown:
        raise ValueError(f"{per_1000:g} refreshes in 1,000 tokens are not possible with {cooldown} tokens between two: "
                         f"at most {1000 / cooldown:g}")  # fmt: skip
    levels = signals.flatten().sort(descending=True).values.tolist()

    def rate(threshold: float) -> float:  # grows from level to level: the more are above it, the more often it fires
        return 1000 * firings(signals, threshold, cooldown) / signals.numel()

    return levels[bisect_right(levels, per_1000, lo=1, key=rate) - 1]


def firings(signals: Tensor, threshold: float, cooldown: int) -> int:
    """Return how often a gate fires over fixed signals (B, T), which its refreshes don't change."""
    count, last = 0, torch.zeros(signals.size(0), dtype=torch.long)
    for t, fires in enumerate((signals > threshold).T, 1):
        fires = fires & (t - last >= cooldown)
        last = torch.where(fires, t, last)
        count += int(fires.sum())
    return count


def mutual_information(logits: Tensor) -> Tensor:
    """Return the disagreement of N passes in bits (...), of logits (..., N, V): the entropy of their mean distribution
    less their mean entropy. The variance of logits counts tokens that no pass would ever write; this doesn't.

    Source: Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning" (BALD).
    """
    mean = logits.float().softmax(-1).mean(-2).clamp(min=1e-30)
    return entropy(mean.log()) - entropy(logits).mean(-1)


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def interval(values: Iterable[float | None]) -> list[float | None]:
    """Return the middle 95% of the values that are known, None twice if none is."""
    known = [value for value in values if value is not None]
    return np.quantile(known, [0.025, 0.975]).tolist() if known else [None, None]


def passes_ambiguity(signal: np.ndarray, entropy: np.ndarray, own: np.ndarray,
                     draws: np.ndarray) -> tuple[float, float, float] | None:  # fmt: skip
    """Return the area under the ROC curve by which a signal (B, T) stays low, among the tenth of the tokens with the
    highest entropy, where the teacher's own entropy is above its median there; and its 95% interval over texts. None if
    all of these tokens are alike."""
    fires = entropy >= np.quantile(entropy, 0.9)
    high = own > np.median(own[fires])

    def area(draw: np.ndarray) -> float | None:
        at, unsure = fires[draw], high[draw]
        return area_under_roc(-signal[draw][at & unsure], -signal[draw][at & ~unsure])

    areas = [area(draw) for draw in (np.arange(len(signal)), *draws)]
    if None in areas:
        return None
    return areas[0], *np.quantile(areas[1:], [0.025, 0.975]).tolist()


def signals_of(setup: Setup, student: str) -> dict[str, dict[str, float]]:
    """Return, for each signal of a student, Spearman's correlation with KL(teacher || student) of the same token, which
    a refresh can mend, and with the teacher's own entropy, which it can't; the area under the ROC curve by which it
    tells the tenth of the tokens with the largest KL from the others, with its 95% interval over texts; that of the
    difference to entropy's; and how it passes ambiguity."""
    everyone = overfill.ProbeKL(math.inf)

    def teachers_entropy(pair: Pair) -> Tensor:
        return entropy(pair.consult(torch.ones_like(pair.since, dtype=torch.bool), everyone)[1])

    gates: dict[str, Callable[[Pair], Tensor]] = {"entropy": overfill.Entropy(math.inf).signal}
    if student in setup.rates:
        dropout = overfill.MonteCarloDropout(math.inf, rate=setup.rates[student])
        gates["MC dropout, U(t)"] = dropout.signal
        gates["MC dropout, mutual information"] = lambda pair: mutual_information(
            overfill.dropout_logits(pair.student, pair.ids[:, -1:], pair.cache, dropout.passes, dropout.rate))
    gates |= {"kl": everyone.signal, "teacher's entropy": teachers_entropy}
    recorded = setup.record(student, gates, "test")
    kl, own = (recorded.pop(name).numpy() for name in ("kl", "teacher's entropy"))
    large = kl >= np.quantile(kl, 0.9)
    draws = np.random.default_rng(0).integers(len(kl), size=(200, len(kl)))
    areas = {name: [area_under_roc(x.numpy()[draw][large[draw]], x.numpy()[draw][~large[draw]])
                    for draw in (np.arange(len(kl)), *draws)] for name, x in recorded.items()}  # fmt: skip
    return {
        name: {
            "with_kl": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(kl.ravel()))[0, 1]),
            "with_teachers_entropy": float(np.corrcoef(ranks(x.numpy().ravel()), ranks(own.ravel()))[0, 1]),
            "area": [areas[name][0], *interval(areas[name][1:])],
            "passes_ambiguity": passes_ambiguity(x.numpy(), recorded["entropy"].numpy(), own, draws),
            "above_entropy": interval(None if area is None else area - other for area, other in
                                      zip(areas[name][1:], areas["entropy"][1:], strict=True)),
        }
        for name, x in recorded.items()
    }  # fmt: skip


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
        signals["variance"].append(round(float(overfill.logit_variance(z)), 8))
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
