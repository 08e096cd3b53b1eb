"""The prompts of the projection study, what is fitted on them, and every way to get a first token.

Prompts come in families of paraphrases. Each family serves for fitting ("train"), for choosing
("valid") or for measuring ("test"), and never for two of these.

A fit is made once, when it is first used, and stays with its object: Fits has everything of one
layout but stage 2, and BothStages adds that to one kind of stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import tiktoken
import torch
from torch import Tensor

import projector
from gpt_kv_cache import GPT, KVCache, generate
from pocket import corpus
from projector import (
    Compressor,
    Layout,
    Library,
    Prefill,
    Projector,
    attention_output,
    cache_before_last,
    tail_queries,
)
from studies.projection.segments import SegmentMap, measure_segments, summarize
from support.encoders import PairEncoder
from support.geometry import kv_heads
from support.printing import end_tokens_of
from support.regression import PENALTIES, cross_validate, ridge
from support.statistics import kl
from support.texts import Family, Splits

PROPOSED = Layout(m=8, true_positions=False)  # the fewest of its 8 to 32 summary tokens
TRUE_POSITIONS = replace(PROPOSED, true_positions=True)
MIN_TOKENS = PROPOSED.m + PROPOSED.tail  # a prompt has more tokens than this
HEADER_QUESTIONS = 20  # questions before the one asked, in long prompts
FOLLOWING_TOKENS = 32  # tokens of text after the prompt, for the change of perplexity
# At most so many for training:
STAGE_1_PROMPTS = 300
VALIDATION_PROMPTS = 120  # of these, for the cross-validation of stage 1's penalty
MAX_PAIRS = 500
BANK_PROMPTS, BANK_QUERIES = 40, 160
RAW_LAYOUTS = {"raw-1:1": Layout(1), "raw-8:1": Layout(8), "raw-32:1": Layout(32)}
# The best on validation prompts of the four kinds.
OUR_LAYOUTS = {"raw-1:16": Layout(1, 16), "raw-8:4": Layout(8, 4), "raw-32:64": Layout(32, 64)}
MAX_MAP_BYTES = 4_000_000_000  # bytes of stage 1's map
LEARNING_RATE, BATCH_SIZE = 0.05, 64  # with which Adam learns summary tokens for all prompts

POCKET_KINDS: dict[str, Callable[[str], list[list[corpus.Question]]]] = {
    # facts that the model knows, after four or twenty questions that all prompts begin with
    "quiz": corpus.quiz_families,
    "long-quiz": lambda split: corpus.quiz_families(split, HEADER_QUESTIONS),
    # facts in the prompt; and notes to be explained at length
    "story": lambda split: corpus.story_families(split, 100 if split == "train" else 40),
    "notes": lambda split: corpus.notes_families(split, 100 if split == "train" else 40),
}


class Size(NamedTuple):
    """How much is measured and fitted. Of several penalties one is chosen by cross-validation."""

    max_families: int | None = None  # in each split
    turns: int = 7
    stage_1_steps: int = projector.STEPS  # of L-BFGS
    adam_steps: int = 400
    loss_penalties: Sequence[float] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of stage 1 as written
    penalties: Sequence[float] = PENALTIES  # of all other maps


FULL, QUICK = Size(), Size(10, 1, 20, 20, (1e-2,), (1e-2,))


def pocket_families(
    kind: str, seed: int, max_families: int | None = None, wordings: int = 4
) -> Splits:
    """Return families of the pocket world by split, or the first max_families of each split; a
    family has at most `wordings` prompts."""
    generator, families = Random(seed), {}
    for split in corpus.SPLITS:
        chosen = [
            generator.sample(family, min(len(family), wordings))
            for family in POCKET_KINDS[kind](split)
        ]
        families[split] = [
            [(question.prompt, question.answer) for question in family]
            for family in chosen[:max_families]
        ]
    return families


@dataclass(eq=False)  # a prompt equals only itself
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
    nearest: Prompt
    similarity: float
    relative: Prompt | None


Pairs = Sequence[tuple[Prompt, Prompt]]  # prompts, each with the one that it starts from
Stage1 = Callable[[Sequence[Prompt]], Tensor]  # N prompts -> their summary tokens


@dataclass(frozen=True)
class Way:
    """How to get a first token. starts: what it stores of N prompts. That is a cache for all of a
    new prompt but its tail, (L, 2, H, m, D), or, without a layout, logits (V,). alone: whether a
    prompt starts from itself, not from a similar one; most: the most tokens of a prompt, if limited."""

    layout: Layout | None
    starts: Callable[[Sequence[Prompt]], Sequence[Tensor]]
    alone: bool = False
    most: int | None = None

    def covers(self, *prompts: Prompt) -> bool:
        """Return whether prompts are short enough."""
        return self.most is None or max(len(prompt.ids) for prompt in prompts) <= self.most


# --- The prompts, and the ways to start from them ----------------------------------------------------


@dataclass(eq=False)
class Trial:
    """The prompts of one kind with their exact passes, everything that is fitted on training
    prompts, and the ways to get a first token. match_names: whether a stored prompt that is found
    has the new one's names.

    Raises ValueError if a prompt exceeds the context, or too few families have two prompts that are
    long enough.
    """

    model: GPT
    tokenizer: tiktoken.Encoding
    kind: str
    families: Splits
    seed: int = 0
    size: Size = FULL
    match_names: bool = False

    def __post_init__(self) -> None:
        self.prompts = {
            split: self.read_families(split, chosen) for split, chosen in self.families.items()
        }
        self.train = [prompt for family in self.prompts["train"] for prompt in family]
        self.longest = max(len(prompt.ids) for prompt in self.train)
        all_ids = [
            prompt.ids for split in self.prompts.values() for family in split for prompt in family
        ]
        self.shortest = min(map(len, all_ids))
        shared_length = min(len(projector.shared_beginning(all_ids)), self.shortest - MIN_TOKENS)
        self.shared_ids = []
        if shared_length >= 8:  # a word or two are not worth storing
            self.shared_ids = all_ids[0][:shared_length]
        self.shared_chars = len(self.tokenizer.decode(self.shared_ids))  # characters
        texts = [prompt.text[self.shared_chars :] for prompt in self.train]
        self.encoder = PairEncoder.fit(
            self.tokenizer, texts, [prompt.family for prompt in self.train]
        )
        generator = Random(self.seed + 1)
        pairs = [
            (a, b) for family in self.prompts["train"] for a in family for b in family if a is not b
        ]
        self.pairs = generator.sample(pairs, min(MAX_PAIRS, len(pairs)))  # source, target
        self.stage_1_prompts = generator.sample(self.train, min(STAGE_1_PROMPTS, len(self.train)))
        self.bank_prompts = generator.sample(self.train, min(BANK_PROMPTS, len(self.train)))
        self.fits = Fits(self, PROPOSED)
        self.ways = self.all_ways()

    def read_families(self, split: str, families: list[Family]) -> list[list[Prompt]]:
        """Return families of prompts with their exact passes, without prompts too short for the
        proposal."""
        kept_families: list[list[Prompt]] = []
        for family in families:
            kept_prompts = []
            for text, answer in family:
                ids = self.tokenizer.encode(text, allowed_special="all")
                if len(ids) > MIN_TOKENS:
                    follows = self.text_after(ids, answer)
                    exact = projector.prefill(self.model, ids)
                    kept_prompts.append(
                        Prompt(f"{split}/{len(kept_families)}", text, ids, answer, follows, exact)
                    )
            if len(kept_prompts) > 1:
                kept_families.append(kept_prompts)
        if len(kept_families) < 3:
            raise ValueError(
                f"{self.kind}: {len(kept_families)} families have two prompts of more than {MIN_TOKENS} tokens "
                f"to {split}: 3 are needed"
            )
        return kept_families

    def text_after(self, ids: list[int], answer: str) -> list[int]:
        """Return the tokens of the text that follows a prompt."""
        if answer:
            return self.tokenizer.encode(f" {answer}\n", allowed_special="all")[:FOLLOWING_TOKENS]
        tokens = generate(
            self.model, self.batch_of(ids), FOLLOWING_TOKENS, stop_ids=end_tokens_of(self.tokenizer)
        )
        return [int(token) for token in tokens]

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    def batch_of(self, ids: list[int]) -> Tensor:
        """Return tokens as the model takes them, (1, T)."""
        return torch.tensor([ids], device=self.device)

    # --- Prompts that are asked, and prompts that are stored --------------------------------------

    def queries(self, split: str) -> list[tuple[Prompt, Prompt | None]]:
        """Return the prompts asked in a split, each with its stored relative; every fifth family
        has none."""
        families = enumerate(self.prompts[split])
        return [
            (prompt, family[0] if i % 5 else None)
            for i, family in families
            for prompt in family[1:]
        ]

    def related_pairs(self, split: str) -> Pairs:
        """Return the prompts asked in a split that have a stored relative, each with its
        relative."""
        return [(prompt, relative) for prompt, relative in self.queries(split) if relative]

    def stored_prompts(self, split: str, relatives: bool = True) -> list[Prompt]:
        """Return the prompts stored when a split is asked: one of each training family and, with
        relatives, one of each of the split's own families that has any stored."""
        split_prompts = [
            family[0] for i, family in enumerate(self.prompts[split]) if i % 5 and relatives
        ]
        return split_prompts + [family[0] for family in self.prompts["train"]]

    def library(self, way: Way, stored: list[Prompt], **options: Any) -> Library:
        """Return the library of stored prompts, with a way's summary tokens, if it has any."""
        stored = [prompt for prompt in stored if way.covers(prompt)]
        summaries = torch.stack([*way.starts(stored)])
        texts, layout = [prompt.text for prompt in stored], way.layout or PROPOSED
        options = {"match_names": self.match_names, "shared_chars": self.shared_chars} | options
        return Library(self.model, layout, self.encoder, texts, summaries, **options)

    def retrieve(self, split: str, relatives: bool = True) -> list[Query]:
        """Look up every prompt of a split in its library, or in one without any prompt's
        relatives; leave out those for which it holds no prompt of the same names."""
        stored, queries = self.stored_prompts(split, relatives), []
        library = self.library(self.ways["neighbour"], stored)
        for prompt, relative in self.queries(split):
            index, similarity = library.nearest(prompt.text)
            if index >= 0:
                queries.append(
                    Query(prompt, stored[index], similarity, relative if relatives else None)
                )
        return queries

    # --- The ways ---------------------------------------------------------------------------------

    @cached_property
    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """The ridge regression from a source's last hidden state to its target's: both means, and
        the weights."""
        x, y = (
            torch.stack([prompt.exact.hidden for prompt in side]).double()
            for side in zip(*self.pairs, strict=True)
        )
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)

    def logits_by_hidden_state(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the logits (N, V) of prompts' last hidden states after the linear map of
        hidden_map."""
        source_mean, target_mean, weight = self.hidden_map
        hidden = torch.stack([prompt.exact.hidden for prompt in prompts]).double()
        x = (hidden - source_mean) @ weight + target_mean
        return self.model.head(x.to(self.model.wte.weight)[None])[0]

    def all_ways(self) -> dict[str, Way]:
        """Return all ways by name: the proposal with its stage 1 as written and with the smaller
        one, steps away from it, its baselines, its parts alone, and our own."""
        fits, true, longest = self.fits, Fits(self, TRUE_POSITIONS), self.longest
        ways = {
            "proposed": Way(PROPOSED, BothStages(self, fits.by_segments)),
            "proposed-true": Way(TRUE_POSITIONS, BothStages(self, true.by_segments)),
            "own": Way(TRUE_POSITIONS, BothStages(self, true.own)),
            "none": Way(
                Layout(1), lambda prompts: [prompt.exact.kv[..., :0, :] for prompt in prompts]
            ),
            "hidden": Way(None, self.logits_by_hidden_state),
            "neighbour": Way(None, lambda prompts: [prompt.exact.logits for prompt in prompts]),
            "learned": Way(PROPOSED, fits.shared_by_all),
            # The complete exact cache, in the place of summary tokens:
            "rule": Way(
                PROPOSED,
                lambda prompts: [cache_before_last(prompt.exact) for prompt in prompts],
                alone=True,
            ),
        }
        if map_bytes(self.model, longest - 1, PROPOSED.m) <= MAX_MAP_BYTES:
            ways["written"] = Way(PROPOSED, BothStages(self, fits.as_written), most=longest)
            ways["stage1-written"] = Way(PROPOSED, fits.as_written, alone=True, most=longest)
        for name, layout in (RAW_LAYOUTS | OUR_LAYOUTS).items():
            if layout.m + layout.tail <= self.shortest:
                ways[name] = Way(layout, Fits(self, layout).own)
        return ways

    def ways_with(self, m: int) -> dict[str, Way]:
        """Return the ways whose number of summary tokens is varied, with m of them. Their penalties
        are those for the proposal's number."""
        fits = Fits(self, replace(PROPOSED, m=m), self.fits)
        starts = {
            "proposed": BothStages(self, fits.by_segments, self.ways["proposed"].starts),
            "learned": fits.shared_by_all,
        }
        if "written" in self.ways:
            starts["written"] = BothStages(self, fits.as_written, self.ways["written"].starts)
        return {
            name: replace(self.ways[name], layout=fits.layout, starts=start)
            for name, start in starts.items()
        }

    def warm_cache(self, layout: Layout, summary: Tensor, prompt: Prompt) -> KVCache:
        """Return the cache of summary tokens that stands for all of a prompt but its tail."""
        position = layout.tail_position(len(prompt.ids))
        return projector.cache_of_summary(self.model, summary, position)

    @torch.no_grad()
    def first_logits(self, way: Way, start: Tensor, prompt: Prompt) -> Tensor:
        """Return the logits (V,) of a prompt's first new token. start: what the way stores of the
        prompt that it starts from."""
        if way.layout is None:
            return start
        tail = prompt.ids[-way.layout.tail :]
        return projector.logits_after(self.model, tail, self.warm_cache(way.layout, start, prompt))


# --- What is fitted -------------------------------------------------------------------------------


def reading_error(compressor: Compressor, prompts: Sequence[Prefill]) -> float:
    """Return the loss of stage 1 on prompts, a sum over layers and heads: the mean squared error of
    what the last query reads from the summary tokens, divided by the mean square of what it reads
    from the exact cache."""
    summaries = compressor(prompts)
    q = torch.stack([tail_queries(prompt) for prompt in prompts])  # (N, L, H, R, D)
    outputs = []
    for queries, prompt in zip(q, prompts, strict=True):
        outputs.append(attention_output(queries, *cache_before_last(prompt).unbind(1)))
    output = torch.stack(outputs)  # (N, L, H, R, D)
    approximation = attention_output(q, *summaries.unbind(2))
    error = (approximation - output).square().mean((0, -2, -1))  # (L, H)
    return float((error / output.square().mean((0, -2, -1))).sum())


def map_bytes(model: GPT, T: int, m: int) -> int:
    """Return the bytes of stage 1's map from T tokens to m summary tokens, for all heads."""
    config = model.config
    heads = config.n_layer * kv_heads(config)
    return 4 * heads * (2 * config.head_dim) ** 2 * T * m


@dataclass(eq=False)
class Fits:
    """What is fitted on a trial's training prompts in one layout. like: fits of another number of
    summary tokens, whose penalties are taken over; by default they are chosen here."""

    trial: Trial
    layout: Layout
    like: Fits | None = None

    @cached_property
    def query_bank(self) -> Tensor:
        """Queries of training prompts (L, H, N, D), for summarize()."""
        tail = self.layout.tail
        prompts = [prompt for prompt in self.trial.bank_prompts if len(prompt.ids) >= tail]
        prompts = prompts[: max(4, BANK_QUERIES // tail)]
        return torch.cat([tail_queries(prompt.exact, tail) for prompt in prompts], 2)

    def own(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return summary tokens (N, L, 2, H, m, D) that are fitted on each prompt alone."""
        summaries = []
        for prompt in prompts:
            segments = measure_segments(prompt.exact, self.layout, self.query_bank)
            summaries.append(summarize(segments))
        return torch.stack(summaries)

    @cached_property
    def segment_map(self) -> SegmentMap:
        """The smaller stage 1, one map from the means of segments."""
        prompts = self.trial.stage_1_prompts
        segments = [measure_segments(prompt.exact, self.layout) for prompt in prompts]
        if self.like:
            return SegmentMap(segments, self.like.segment_map.penalty)
        families = [prompt.family for prompt in prompts]
        return SegmentMap.fit(segments, families, self.trial.size.penalties)

    def by_segments(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the summary tokens of prompts by the smaller stage 1."""
        return self.segment_map([measure_segments(prompt.exact, self.layout) for prompt in prompts])

    @cached_property
    def compressor(self) -> Compressor:
        """Stage 1 as written, with the penalty that has the least reading error on held-out
        families. It can take gigabytes."""
        prefills = [prompt.exact for prompt in self.trial.stage_1_prompts]
        T, size = self.trial.longest - 1, self.trial.size

        def fit(prompts: Sequence[Prefill], penalty: float) -> Compressor:
            return Compressor(prompts, self.layout.m, penalty, T, size.stage_1_steps)

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            fitted = fit([prefills[i] for i in train], penalty)
            return reading_error(fitted, [prefills[i] for i in test]) * len(test)

        if self.like:
            return fit(prefills, self.like.compressor.penalty)
        families = [prompt.family for prompt in self.trial.stage_1_prompts[:VALIDATION_PROMPTS]]
        return fit(prefills, cross_validate(error, families, size.loss_penalties))

    def as_written(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the summary tokens of prompts by stage 1 as written."""
        return self.compressor([prompt.exact for prompt in prompts])

    @cached_property
    @torch.enable_grad()
    def learned(self) -> Tensor:
        """The source's baseline, summary tokens (L, 2, H, m, D) that are the same for every prompt.
        They begin as the mean of prompts' own, and are trained through the model to minimise
        KL(cold || warm) of training prompts' first token, read at position m as proposed."""
        model, prompts, m = self.trial.model, self.trial.stage_1_prompts, self.layout.m
        last_ids = torch.tensor([prompt.ids[-1:] for prompt in prompts], device=self.trial.device)
        cold_logits = torch.stack([prompt.exact.logits for prompt in prompts]).to(last_ids.device)
        true_positions = replace(self.layout, true_positions=True)
        summary = Fits(self.trial, true_positions).own(prompts).mean(0).to(last_ids.device)
        summary.requires_grad_()
        optimizer = torch.optim.Adam([summary], lr=LEARNING_RATE)
        steps = self.trial.size.adam_steps
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            batch = torch.randperm(len(last_ids), generator=generator)[:BATCH_SIZE]
            cache = projector.cache_of_summary(model, summary, m)
            layers = [layer.expand(-1, len(batch), -1, -1, -1) for layer in cache.layers]
            logits = model(last_ids[batch], KVCache(layers, cache.pos), last_only=True)[:, 0]
            (summary.grad,) = torch.autograd.grad(kl(cold_logits[batch], logits).mean(), [summary])
            optimizer.step()
            schedule.step()
        return summary.detach()

    def shared_by_all(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Return the learned summary tokens for each of some prompts."""
        return [self.learned] * len(prompts)


@dataclass(eq=False)
class BothStages:
    """Stage 1 of some kind, and stage 2 after it. like: as in Fits."""

    trial: Trial
    stage_1: Stage1
    like: BothStages | None = None

    @cached_property
    def stage_2(self) -> Projector:
        """The map between similar prompts, with the penalty that predicts held-out families best."""
        pairs, train = self.trial.pairs, self.trial.train
        summary_of = dict(zip(train, self.stage_1(train), strict=True))
        sources, targets = (
            torch.stack([summary_of[prompt] for prompt in side])
            for side in zip(*pairs, strict=True)
        )

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            projected = Projector(sources[train], targets[train], penalty)(sources[test])
            return float((projected - targets[test]).square().mean() * len(test))

        if self.like:
            return Projector(sources, targets, self.like.stage_2.penalty)
        families = [source.family for source, _ in pairs]
        penalty = cross_validate(error, families, self.trial.size.penalties)
        return Projector(sources, targets, penalty)

    def __call__(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the summary tokens of prompts after both stages. Stage 2 doesn't depend on the new
        prompt, so they can be computed once; the proposal maps them at every start."""
        return self.stage_2(self.stage_1(prompts))


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL(expected || actual) in nats (...) of logits (..., V), in float64."""
    return kl(expected.cpu().double(), actual.cpu().double())
