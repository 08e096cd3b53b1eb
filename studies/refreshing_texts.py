"""Texts of the refresh study: the prompts, the writers that continue them, the figures of a text, and the times.

Quality is measured on batches of prompts, teachers and students in turn with the same random draws; times on single
prompts, all writers in turn, as medians.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from overfill import Pair, Policy, generate_refreshed, splice_last, teacher_nats
from pocket import corpus
from studies.recycling import read_prompts
from support.statistics import bootstrap

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


class Experiment:
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
            return generate_as_published(self.models["teacher"], model, ids, n, writer.published, new_cache,
                                         **options), None  # fmt: skip
        if writer.policy is None:
            return generate(model, ids, n, cache=new_cache(), **options), None
        pair = Pair(self.models["teacher"], model, ids, new_cache)
        return generate_refreshed(pair, n, writer.policy, **options), pair

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
            parts.append((new, teacher_nats(self.models["teacher"], ids, new), np.array(rows), *cost))
        ids, nats, *others = zip(*parts, strict=True)
        return Written(torch.cat(ids).cpu(), torch.cat(nats).cpu(), *map(np.concatenate, others))

    @torch.no_grad()
    def record(self, student: str, signals: dict[str, Callable[[Pair], Tensor]], split: str) -> dict[str, Tensor]:
        """Return signals (B, N - 1) of a student at every token that it has read, on sampled texts that nothing
        refreshes: what gates are calibrated on, and compared by."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        found: dict[str, list[Tensor]] = {name: [] for name in signals}
        writer = Writer("", student, Policy())
        for _, ids in self.groups(split, 1):
            tokens, pair = self.tokens(writer, ids, self.size.new_tokens, temperature=1.0, generator=generator)
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


def exp(three: tuple[float, float, float]) -> list[float]:
    return [math.exp(x) for x in three]


def figures_of(experiment: Experiment, written: Written) -> dict[str, Any]:
    """Return the source's figures, a mean and its 95% interval each, and what perplexities are compared by: the mean
    nats of each prompt."""
    nats, prompt, n = written.nats.double().numpy(), written.prompt, written.ids.size(1)
    texts = [experiment.tokenizer.decode(row) for row in written.ids.tolist()]
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


def times(experiment: Experiment, writers: Sequence[Writer]) -> dict[str, dict[str, Any]]:
    """Return seconds of writing after single prompts, sampled, all writers in turn: medians over prompts and repeats.

    ttft: to the first token; tps: tokens a second after it; total; end_to_end_tps; overhead: how much longer than
    OverFill in the same turn, also turn by turn; by_teacher: the share that its reading after the prompt, and splicing,
    take; by_length: teacher's tokens and seconds of a refresh, by the length of what was written.
    """
    n, runs = experiment.size.new_tokens, {writer.name: [] for writer in writers}
    turns = [ids for ids in experiment.prompts["test"][: experiment.size.timed] for _ in range(experiment.size.repeats)]
    for i, ids in enumerate(tqdm([turns[0], *turns], desc="times", leave=False)):
        fed = torch.tensor([ids], device=experiment.device)
        for writer in writers:
            generator = torch.Generator(experiment.device).manual_seed(experiment.seed + i)
            begun, ttft = time.perf_counter(), 0.0
            tokens, pair = experiment.tokens(writer, fed, n, temperature=1.0, generator=generator)
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
