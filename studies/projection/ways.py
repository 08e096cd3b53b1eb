"""The prompts of the projection study, what is fitted on them, and every way to have a first token.

Prompts come in families of paraphrases. A family is fitted on ("train"), chosen by ("valid") or
measured ("test"), never two of these.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import tiktoken
import torch
from torch import Tensor

import projector
from gpt_kv_cache import GPT, KVCache, generate
from pocket import corpus
from projector import Compressor, Layout, Library, Prefill, Projector
from studies.projection.segments import SegmentMap, Segments, measure_segments, summarize
from support.encoders import PairEncoder
from support.files import read_csv
from support.geometry import kv_heads
from support.regression import ridge
from support.statistics import kl

PROPOSED = Layout(m=8, true_positions=False)  # the least of its 8 to 32 summary tokens
TRUE = replace(PROPOSED, true_positions=True)
LEAST = PROPOSED.m + PROPOSED.tail  # tokens of a prompt, and one more
HEADER = 20  # questions before the question, in long prompts
FOLLOWING = 32  # tokens of text after the prompt, for the change of perplexity
STAGE_1, PAIRS, BANK, QUERIES = 300, 500, 40, 160  # of training, at most; the last two for the bank
RAW = {"raw-1:1": Layout(1), "raw-8:1": Layout(8), "raw-32:1": Layout(32)}
# The best on validation prompts of the four kinds.
OURS = {"raw-1:16": Layout(1, 16), "raw-8:4": Layout(8, 4), "raw-32:64": Layout(32, 64)}
LARGEST = 4e9  # bytes of stage 1 as written
STEPS, RATE, BATCH = 400, 0.05, 64  # of Adam, for the summary tokens learned for all prompts

Family = list[tuple[str, str]]  # paraphrases: prompt and answer
Splits = dict[str, list[Family]]
POCKET: dict[str, Callable[[str], list[list[corpus.Question]]]] = {
    # facts that the model knows, after four or twenty questions that all prompts begin with
    "quiz": corpus.quiz_families,
    "long-quiz": lambda split: corpus.quiz_families(split, HEADER),
    # facts in the prompt; and notes to be explained at length
    "story": lambda split: corpus.story_families(split, 100 if split == "train" else 40),
    "notes": lambda split: corpus.notes_families(split, 100 if split == "train" else 40),
}


def pocket_families(kind: str, seed: int, most: int | None = None, wordings: int = 4) -> Splits:
    """Return families of the pocket world by split, or the first `most` of each; of each family at
    most so many wordings."""
    rng, families = Random(seed), {}
    for split in corpus.SPLITS:
        chosen = [rng.sample(family, min(len(family), wordings)) for family in POCKET[kind](split)]
        families[split] = [[(q.prompt, q.answer) for q in family] for family in chosen[:most]]
    return families


def read_pairs(path: Path, seed: int) -> Splits:
    """Return the pairs of a CSV file as families by split, three fifths of them for training and a
    fifth each for validation and test; columns: source, target, and optionally answer.

    Pairs that share a text are of one family, and an answer is that of both. Raises ValueError if
    columns are missing, a prompt is empty, or there are fewer than 15 families.
    """
    family_of: dict[str, dict[str, str]] = {}  # text -> its family: prompts and their answers
    for row in read_csv(path, "source", "target"):
        if not row["source"] or not row["target"]:
            raise ValueError(f"{path} has a pair with an empty prompt")
        merged = family_of.get(row["source"], {}) | family_of.get(row["target"], {})
        for text in (row["source"], row["target"]):
            merged[text] = row.get("answer") or merged.get(text, "")
        family_of |= dict.fromkeys(merged, merged)
    distinct = {id(family): family for family in family_of.values()}.values()
    families = [[*family.items()] for family in distinct if len(family) > 1]
    if len(families) < 15:
        raise ValueError(f"{path} has {len(families)} families of prompts: 15 are needed")
    Random(seed).shuffle(families)
    n = len(families) // 5
    return {"train": families[2 * n :], "valid": families[n : 2 * n], "test": families[:n]}


@dataclass(eq=False)  # a prompt equals itself alone
class Prompt:
    """A prompt of a family of paraphrases, its tokens, the true answer (or ""), the text that
    follows (the answer or, if there is none, the model's own), and its exact pass."""

    family: str
    text: str
    ids: list[int]
    answer: str
    follows: list[int]
    exact: Prefill


class Query(NamedTuple):
    """A prompt that is asked, what retrieval found, and its stored relative if there is one."""

    prompt: Prompt
    found: Prompt
    similarity: float
    relative: Prompt | None


# Prompts, each with the one that it starts from and, where retrieval found that, the rest of a query.
Asked = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Way:
    """How a first token is had: from a cache that stands for all but the tail of a prompt, or from
    logits. alone: by a prompt from itself, not from a similar one."""

    layout: Layout | None = None  # of the cache
    summary: Callable[[Prompt, Layout], Tensor] | None = None  # (L, 2, H, m, D)
    logits: Callable[[Prompt], Tensor] | None = None  # (V,)
    alone: bool = False
    most: float = math.inf  # tokens of a prompt

    def covers(self, *prompts: Prompt) -> bool:
        """Return whether prompts are short enough."""
        return max(len(p.ids) for p in prompts) <= self.most


# Methods of a Trial that make something once.
KEPT = "bank own segment_map compressor as_written by_segments stage_2 projected hidden_map learned"


class Trial:
    """The prompts of one kind, read exactly, everything that is fitted on those of training, and
    the ways to have a first token."""

    def __init__(
        self,
        model: GPT,
        tokenizer: tiktoken.Encoding,
        kind: str,
        families: Splits,
        seed: int = 0,
        few: int = 0,
    ) -> None:
        """few: steps for what is fitted iteratively, without cross-validation, in a reduced run.
        Raises ValueError if a prompt exceeds the context, or too few families have two prompts that
        are long enough."""
        self.model, self.tokenizer, self.kind, self.few = model, tokenizer, kind, few
        for name in KEPT.split():
            setattr(self, name, cache(getattr(self, name)))
        self.prompts = {split: self.read(split, chosen) for split, chosen in families.items()}
        self.train = [p for family in self.prompts["train"] for p in family]
        self.longest = max(len(p.ids) for p in self.train)
        every = [p.ids for split in self.prompts.values() for family in split for p in family]
        self.shortest = min(map(len, every))
        same = min(len(projector.shared_beginning(every)), self.shortest - LEAST)
        self.shared = every[0][:same] if same >= 8 else []  # a word or two are not worth storing
        self.shared_chars = len(tokenizer.decode(self.shared))  # characters
        lengths = [len(p.answer.split()) for p in self.train if p.answer]
        self.long = bool(lengths) and statistics.median(lengths) > 8  # answers
        texts = [p.text[self.shared_chars :] for p in self.train]
        self.encoder = PairEncoder.fit(tokenizer, texts, [p.family for p in self.train])
        rng = Random(seed + 1)
        pairs = [(a, b) for f in self.prompts["train"] for a in f for b in f if a is not b]
        self.pairs = rng.sample(pairs, min(PAIRS, len(pairs)))  # source, target
        self.sample = rng.sample(self.train, min(STAGE_1, len(self.train)))
        self.bankers = rng.sample(self.train, min(BANK, len(self.train)))
        self.ways = self.every_way()

    def read(self, split: str, families: list[Family]) -> list[list[Prompt]]:
        """Return families of prompts, read exactly, without those too short for the proposal."""
        found: list[list[Prompt]] = []
        for family in families:
            row = []
            for text, answer in family:
                ids = self.tokenizer.encode(text, allowed_special="all")
                if len(ids) > LEAST:
                    follows = self.following(ids, answer)
                    exact = projector.prefill(self.model, ids)
                    row.append(Prompt(f"{split}/{len(found)}", text, ids, answer, follows, exact))
            if len(row) > 1:
                found.append(row)
        if len(found) < 3:
            raise ValueError(
                f"{self.kind}: {len(found)} families have two prompts of more than {LEAST} tokens "
                f"to {split}: 3 are needed"
            )
        return found

    def following(self, ids: list[int], answer: str) -> list[int]:
        """Return the tokens of the text that follows a prompt."""
        if answer:
            return self.tokenizer.encode(f" {answer}\n", allowed_special="all")[:FOLLOWING]
        tokens = generate(self.model, self.batch(ids), FOLLOWING, stop_id=self.tokenizer.eot_token)
        return [int(token) for token in tokens]

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    def batch(self, ids: list[int]) -> Tensor:
        """Return tokens as the model takes them, (1, T)."""
        return torch.tensor([ids], device=self.device)

    # --- Prompts that are asked, and prompts that are stored --------------------------------------

    def queries(self, split: str) -> list[tuple[Prompt, Prompt | None]]:
        """Return the prompts asked in a split, each with its stored relative; of every fifth family
        none is stored."""
        families = enumerate(self.prompts[split])
        return [(p, family[0] if i % 5 else None) for i, family in families for p in family[1:]]

    def related(self, split: str) -> Asked:
        """Return the prompts asked in a split that have a stored relative, each with it."""
        return [(p, relative) for p, relative in self.queries(split) if relative]

    def stored(self, split: str, relatives: bool = True) -> list[Prompt]:
        """Return the library's prompts when a split is asked: one of each of its families, and of
        the training's, or these alone."""
        here = [family[0] for i, family in enumerate(self.prompts[split]) if i % 5 and relatives]
        return here + [family[0] for family in self.prompts["train"]]

    def library(self, way: Way, stored: list[Prompt], **options: Any) -> Library:
        """Return the library of stored prompts, with a way's summary tokens, if it has any."""
        summaries = torch.zeros(len(stored), 1)
        if way.layout:
            stored = [p for p in stored if way.covers(p)]
            summaries = torch.stack([way.summary(p, way.layout) for p in stored])
        texts, layout = [p.text for p in stored], way.layout or PROPOSED
        options["shared_chars"] = self.shared_chars
        return Library(self.model, layout, self.encoder, texts, summaries, **options)

    def retrieve(self, split: str, relatives: bool = True) -> list[Query]:
        """Look every prompt of a split up in its library, or in one without relatives of any."""
        stored, found = self.stored(split, relatives), []
        library = self.library(Way(), stored)
        for prompt, relative in self.queries(split):
            at, similarity = library.nearest(prompt.text)
            found.append(Query(prompt, stored[at], similarity, relative if relatives else None))
        return found

    # --- The stages -------------------------------------------------------------------------------

    def bank(self, tail: int) -> Tensor:
        """Return queries of training prompts (L, H, N, D) for summarize()."""
        few = [p for p in self.bankers if len(p.ids) >= tail][: max(4, QUERIES // tail)]
        return torch.cat([projector.tail_queries(self.model, p.exact, tail) for p in few], 2)

    def own(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens fitted on one prompt."""
        bank = self.bank(layout.tail)
        return summarize(measure_segments(self.model, prompt.exact, layout, bank))

    def parts(self, prompts: Sequence[Prompt], layout: Layout) -> list[Segments]:
        return [measure_segments(self.model, p.exact, layout) for p in prompts]

    def segment_map(self, layout: Layout) -> SegmentMap:
        """Return the smaller stage 1, one map from the means of segments; for another number of
        summary tokens with the penalty that was found for the proposal's."""
        parts = self.parts(self.sample, layout)
        if layout.m == PROPOSED.m:
            return SegmentMap.fit(parts, [p.family for p in self.sample])
        return SegmentMap(parts, self.segment_map(replace(layout, m=PROPOSED.m)).penalty)

    def compressor(self) -> Compressor:
        """Return stage 1 as written."""
        exact = [p.exact for p in self.sample]
        if self.few:
            return Compressor(self.model, exact, PROPOSED.m, 1e-2, self.longest - 1, self.few)
        families = [p.family for p in self.sample]
        return Compressor.fit(self.model, exact, families, PROPOSED.m, self.longest - 1)

    def as_written(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by stage 1 as written."""
        return self.compressor()([prompt.exact])[0]

    def by_segments(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by the smaller stage 1."""
        return self.segment_map(layout)(self.parts([prompt], layout))[0]

    def stage_2(self, layout: Layout, make: Callable) -> Projector:
        """Return stage 2 for one way of stage 1; for another number of summary tokens with the
        penalty that was found for the proposal's."""
        sides = zip(*self.pairs, strict=True)
        both = [torch.stack([make(p, layout) for p in side]) for side in sides]
        if layout.m == PROPOSED.m:
            return Projector.fit(*both, [source.family for source, _ in self.pairs])
        return Projector(*both, self.stage_2(replace(layout, m=PROPOSED.m), make).penalty)

    def projected(self, make: Callable, prompt: Prompt, layout: Layout) -> Tensor:
        """Return a prompt's summary tokens after both stages: once, since stage 2 doesn't depend on
        the new prompt. The proposal maps them at every start."""
        return self.stage_2(layout, make)(make(prompt, layout)[None])[0]

    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ridge from a source's last hidden state to its target's: both means, and
        weights."""
        x, y = (
            torch.stack([p.exact.hidden for p in side]).double()
            for side in zip(*self.pairs, strict=True)
        )
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)

    def by_hidden_state(self, source: Prompt) -> Tensor:
        """Return logits (V,) of the source's last hidden state after a linear map."""
        before, after, weight = self.hidden_map()
        x = (source.exact.hidden.double() - before) @ weight + after
        return self.model.head(x.to(self.model.wte.weight)[None, None])[0, 0]

    @torch.enable_grad()
    def learned(self) -> Tensor:
        """Return the source's baseline, summary tokens (L, 2, H, m, D) that are the same for every
        prompt: learned through the model, from the mean of prompts' own, they minimise KL(cold ||
        warm) of training prompts' first token, read at position m as proposed."""
        last = torch.tensor([p.ids[-1:] for p in self.sample], device=self.device)  # (N, 1)
        cold = torch.stack([p.exact.logits for p in self.sample]).to(self.device)
        summary = torch.stack([self.own(p, TRUE) for p in self.sample]).mean(0).to(self.device)
        summary.requires_grad_()
        adam = torch.optim.Adam([summary], lr=RATE)
        steps = self.few or STEPS
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        rng = torch.Generator().manual_seed(0)
        for _ in range(steps):
            some = torch.randperm(len(last), generator=rng)[:BATCH]
            cache = projector.cache_of_summary(self.model, summary, PROPOSED.m)
            layers = [layer.expand(-1, len(some), -1, -1, -1) for layer in cache.layers]
            logits = self.model(last[some], KVCache(layers, cache.pos), last_only=True)[:, 0]
            (summary.grad,) = torch.autograd.grad(kl(cold[some], logits).mean(), [summary])
            adam.step()
            decay.step()
        return summary.detach()

    # --- The ways ---------------------------------------------------------------------------------

    def every_way(self) -> dict[str, Way]:
        """Return all ways by name: the proposal with its stage 1 as written and with the smaller
        one, steps away from it, its baselines, its parts alone, and our own."""
        ways = {
            "proposed": Way(PROPOSED, partial(self.projected, self.by_segments)),
            "proposed-true": Way(TRUE, partial(self.projected, self.by_segments)),
            "own": Way(TRUE, partial(self.projected, self.own)),
            "none": Way(Layout(1), lambda p, layout: self.own(p, layout)[..., :0, :]),
            "hidden": Way(logits=self.by_hidden_state),
            "neighbour": Way(logits=lambda p: p.exact.logits),
            "learned": Way(PROPOSED, lambda p, layout: self.learned()),
            "rule": Way(PROPOSED, self.exact, alone=True),
            "stage1-segments": Way(TRUE, self.by_segments, alone=True),
        }
        c, most = self.model.config, self.longest  # stage 1 as written has no columns for more
        numbers = c.n_layer * kv_heads(c) * (2 * c.head_dim) ** 2 * (most - 1) * PROPOSED.m
        if 4 * numbers <= LARGEST:
            projected = partial(self.projected, self.as_written)
            ways["written"] = Way(PROPOSED, projected, most=most)
            ways["stage1-written"] = Way(PROPOSED, self.as_written, alone=True, most=most)
        for name, layout in (RAW | OURS).items():
            if layout.m + layout.tail <= self.shortest:
                ways[name] = Way(layout, self.own)
        return ways

    def exact(self, prompt: Prompt, _: Layout) -> Tensor:
        """Return the complete exact cache in the place of summary tokens."""
        return projector.cache_before_last(self.model, prompt.exact)

    def cache(self, way: Way, source: Prompt, prompt: Prompt) -> KVCache:
        """Return what stands for all of a prompt but its tail."""
        position = way.layout.tail_position(len(prompt.ids))
        return projector.cache_of_summary(self.model, way.summary(source, way.layout), position)

    @torch.no_grad()
    def first_logits(self, way: Way, source: Prompt, prompt: Prompt) -> Tensor:
        """Return the logits (V,) of a prompt's first new token."""
        source = prompt if way.alone else source
        if way.logits:
            return way.logits(source)
        ids = prompt.ids[-way.layout.tail :]
        return projector.logits_after(self.model, ids, self.cache(way, source, prompt))


def divergence(expected: Tensor, got: Tensor) -> Tensor:
    """Return KL(expected || got) in nats (...) of logits (..., V), in float64."""
    return kl(expected.cpu().double(), got.cpu().double())
