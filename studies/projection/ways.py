"""The prompts of the projection study, what is fitted on them, and every way to get a first token.

Prompts come in families of paraphrases. Each family serves for fitting ("train"), for choosing
("valid") or for measuring ("test"), and never for two of these.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
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
MAX_OTHER_MAP_BYTES = 9_000_000_000  # bytes of stage 1's map for other numbers of summary tokens
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


# Prompts, each with the prompt that it starts from; a Query, if retrieval found that.
AskedPrompts = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Way:
    """How to get a first token: from a cache that stands for all of a prompt but its tail, or from
    logits. alone: whether a prompt starts from itself, not from a similar one."""

    layout: Layout | None = None  # of the cache
    summary: Callable[[Prompt, Layout], Tensor] | None = None  # (L, 2, H, m, D)
    logits: Callable[[Prompt], Tensor] | None = None  # (V,)
    alone: bool = False
    most: float = math.inf  # the most tokens of a prompt

    def covers(self, *prompts: Prompt) -> bool:
        """Return whether prompts are short enough."""
        return max(len(prompt.ids) for prompt in prompts) <= self.most


# --- Penalties ------------------------------------------------------------------------------------


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


def once(method: Callable) -> Callable:
    """Let a method remember its results, in its object's `made`."""

    @wraps(method)
    def remembered(self: "Trial", *asked: Any) -> Any:
        made = self.made.setdefault(method.__name__, {})
        if asked not in made:
            made[asked] = method(self, *asked)
        return made[asked]

    return remembered


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
    made: dict[str, dict] = field(default_factory=dict)  # what is fitted, by the method's name

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
        lengths = [len(prompt.answer.split()) for prompt in self.train if prompt.answer]
        self.long_answers = bool(lengths) and statistics.median(lengths) > 8  # answers
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

    def related_pairs(self, split: str) -> AskedPrompts:
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
        summaries = torch.zeros(len(stored), 1)
        if way.layout:
            stored = [prompt for prompt in stored if way.covers(prompt)]
            summaries = torch.stack([way.summary(prompt, way.layout) for prompt in stored])
        texts, layout = [prompt.text for prompt in stored], way.layout or PROPOSED
        options = {"match_names": self.match_names, "shared_chars": self.shared_chars} | options
        return Library(self.model, layout, self.encoder, texts, summaries, **options)

    def retrieve(self, split: str, relatives: bool = True) -> list[Query]:
        """Look up every prompt of a split in its library, or in one without any prompt's
        relatives; leave out those for which it holds no prompt of the same names."""
        stored, queries = self.stored_prompts(split, relatives), []
        library = self.library(Way(), stored)
        for prompt, relative in self.queries(split):
            index, similarity = library.nearest(prompt.text)
            if index >= 0:
                queries.append(
                    Query(prompt, stored[index], similarity, relative if relatives else None)
                )
        return queries

    # --- The stages -------------------------------------------------------------------------------

    @once
    def query_bank(self, tail: int) -> Tensor:
        """Return queries of training prompts (L, H, N, D) for summarize()."""
        prompts = [prompt for prompt in self.bank_prompts if len(prompt.ids) >= tail]
        queries = []
        for prompt in prompts[: max(4, BANK_QUERIES // tail)]:
            queries.append(tail_queries(prompt.exact, tail))
        return torch.cat(queries, 2)

    @once
    def own_summary(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens fitted on one prompt."""
        bank = self.query_bank(layout.tail)
        return summarize(measure_segments(prompt.exact, layout, bank))

    @once
    def segment_map(self, layout: Layout) -> SegmentMap:
        """Return the smaller stage 1, one map from the means of segments. For another number of
        summary tokens it has the penalty that was found for the proposal's number."""
        segments = [measure_segments(prompt.exact, layout) for prompt in self.stage_1_prompts]
        if layout.m == PROPOSED.m:
            families = [prompt.family for prompt in self.stage_1_prompts]
            return SegmentMap.fit(segments, families, self.size.penalties)
        return SegmentMap(segments, self.segment_map(replace(layout, m=PROPOSED.m)).penalty)

    def can_vary_written(self, m: int) -> bool:
        """Return whether stage 1 as written is also fitted for m summary tokens: not on pocket's
        prompts, where that takes a quarter of an hour for each kind."""
        nbytes = map_bytes(self.model, self.longest - 1, m)
        takes_long = self.kind in POCKET_KINDS
        return "written" in self.ways and not takes_long and nbytes <= MAX_OTHER_MAP_BYTES

    def drop_large_maps(self) -> None:
        """Forget the maps, which can take gigabytes, but not their penalties."""
        for fitted in ("compressor", "stage_2"):
            self.made.pop(fitted, None)

    @once
    def stage_1_penalty(self) -> float:
        """Return the penalty of stage 1 as written for any number of summary tokens: the one with
        the least reading error on held-out families, for the proposal's number."""
        prefills = [prompt.exact for prompt in self.stage_1_prompts]
        families = [prompt.family for prompt in self.stage_1_prompts]

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            fitted = [prefills[i] for i in train]
            compressor = Compressor(
                fitted, PROPOSED.m, penalty, self.longest - 1, self.size.stage_1_steps
            )
            return reading_error(compressor, [prefills[i] for i in test]) * len(test)

        return cross_validate(error, families[:VALIDATION_PROMPTS], self.size.loss_penalties)

    @once
    def compressor(self, m: int) -> Compressor:
        """Return stage 1 as written."""
        prefills = [prompt.exact for prompt in self.stage_1_prompts]
        penalty, T = self.stage_1_penalty(), self.longest - 1
        return Compressor(prefills, m, penalty, T, self.size.stage_1_steps)

    @once
    def summary_as_written(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by stage 1 as written."""
        return self.compressor(layout.m)([prompt.exact])[0]

    def summaries_of(
        self, prompts: Sequence[Prompt], layout: Layout, summarise: Callable
    ) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of prompts by one way of stage 1. The maps of
        stage 1 as written take gigabytes, and are read once for all prompts."""
        if summarise != self.summary_as_written:
            return torch.stack([summarise(prompt, layout) for prompt in prompts])
        distinct = [*dict.fromkeys(prompts)]
        summaries = self.compressor(layout.m)([prompt.exact for prompt in distinct])
        of_prompt = dict(zip(distinct, summaries, strict=True))
        return torch.stack([of_prompt[prompt] for prompt in prompts])

    @once
    def summary_by_segments(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by the smaller stage 1."""
        return self.segment_map(layout)([measure_segments(prompt.exact, layout)])[0]

    def pair_summaries(self, layout: Layout, summarise: Callable) -> list[Tensor]:
        """Return the summary tokens of all pairs' sources, and of their targets."""
        sides = zip(*self.pairs, strict=True)
        return [self.summaries_of(side, layout, summarise) for side in sides]

    @once
    def stage_2_penalty(self, layout: Layout, summarise: Callable) -> float:
        """Return the penalty of stage 2 that predicts held-out families best, for one way of stage
        1."""
        sources, targets = self.pair_summaries(layout, summarise)

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            projected = Projector(sources[train], targets[train], penalty)(sources[test])
            return float((projected - targets[test]).square().mean() * len(test))

        families = [source.family for source, _ in self.pairs]
        return cross_validate(error, families, self.size.penalties)

    @once
    def stage_2(self, layout: Layout, summarise: Callable) -> Projector:
        """Return stage 2 for one way of stage 1. For any number of summary tokens it has the
        penalty that is best for the proposal's number."""
        penalty = self.stage_2_penalty(replace(layout, m=PROPOSED.m), summarise)
        return Projector(*self.pair_summaries(layout, summarise), penalty)

    @once
    def projected_summary(self, summarise: Callable, prompt: Prompt, layout: Layout) -> Tensor:
        """Return a prompt's summary tokens after both stages. They are computed once, since stage 2
        doesn't depend on the new prompt; the proposal maps them at every start."""
        return self.stage_2(layout, summarise)(summarise(prompt, layout)[None])[0]

    @once
    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ridge regression from a source's last hidden state to its target's: both
        means, and the weights."""
        x, y = (
            torch.stack([prompt.exact.hidden for prompt in side]).double()
            for side in zip(*self.pairs, strict=True)
        )
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)

    def logits_by_hidden_state(self, source: Prompt) -> Tensor:
        """Return the logits (V,) of the source's last hidden state after the linear map of
        hidden_map()."""
        source_mean, target_mean, weight = self.hidden_map()
        x = (source.exact.hidden.double() - source_mean) @ weight + target_mean
        return self.model.head(x.to(self.model.wte.weight)[None, None])[0, 0]

    @once
    @torch.enable_grad()
    def learned_summary(self) -> Tensor:
        """Return the source's baseline, summary tokens (L, 2, H, m, D) that are the same for every
        prompt. They begin as the mean of prompts' own, and are trained through the model to
        minimise KL(cold || warm) of training prompts' first token, read at position m as
        proposed."""
        prompts = self.stage_1_prompts
        last_ids = torch.tensor([prompt.ids[-1:] for prompt in prompts], device=self.device)
        cold_logits = torch.stack([prompt.exact.logits for prompt in prompts]).to(self.device)
        own_summaries = [self.own_summary(prompt, TRUE_POSITIONS) for prompt in prompts]
        summary = torch.stack(own_summaries).mean(0).to(self.device)
        summary.requires_grad_()
        optimizer = torch.optim.Adam([summary], lr=LEARNING_RATE)
        steps = self.size.adam_steps
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            batch = torch.randperm(len(last_ids), generator=generator)[:BATCH_SIZE]
            cache = projector.cache_of_summary(self.model, summary, PROPOSED.m)
            layers = [layer.expand(-1, len(batch), -1, -1, -1) for layer in cache.layers]
            logits = self.model(last_ids[batch], KVCache(layers, cache.pos), last_only=True)[:, 0]
            (summary.grad,) = torch.autograd.grad(kl(cold_logits[batch], logits).mean(), [summary])
            optimizer.step()
            schedule.step()
        return summary.detach()

    # --- The ways ---------------------------------------------------------------------------------

    def all_ways(self) -> dict[str, Way]:
        """Return all ways by name: the proposal with its stage 1 as written and with the smaller
        one, steps away from it, its baselines, its parts alone, and our own."""
        ways = {
            "proposed": Way(PROPOSED, partial(self.projected_summary, self.summary_by_segments)),
            "proposed-true": Way(
                TRUE_POSITIONS, partial(self.projected_summary, self.summary_by_segments)
            ),
            "own": Way(TRUE_POSITIONS, partial(self.projected_summary, self.own_summary)),
            "none": Way(
                Layout(1), lambda prompt, layout: self.own_summary(prompt, layout)[..., :0, :]
            ),
            "hidden": Way(logits=self.logits_by_hidden_state),
            "neighbour": Way(logits=lambda prompt: prompt.exact.logits),
            "learned": Way(PROPOSED, lambda prompt, layout: self.learned_summary()),
            # The complete exact cache, in the place of summary tokens:
            "rule": Way(PROPOSED, lambda prompt, _: cache_before_last(prompt.exact), alone=True),
            "stage1-segments": Way(TRUE_POSITIONS, self.summary_by_segments, alone=True),
        }
        longest = self.longest  # stage 1 as written has no columns for more
        if map_bytes(self.model, longest - 1, PROPOSED.m) <= MAX_MAP_BYTES:
            projected = partial(self.projected_summary, self.summary_as_written)
            ways["written"] = Way(PROPOSED, projected, most=longest)
            ways["stage1-written"] = Way(
                PROPOSED, self.summary_as_written, alone=True, most=longest
            )
        for name, layout in (RAW_LAYOUTS | OUR_LAYOUTS).items():
            if layout.m + layout.tail <= self.shortest:
                ways[name] = Way(layout, self.own_summary)
        return ways

    def warm_cache(self, way: Way, source: Prompt, prompt: Prompt) -> KVCache:
        """Return the cache that stands for all of a prompt but its tail."""
        position = way.layout.tail_position(len(prompt.ids))
        return projector.cache_of_summary(self.model, way.summary(source, way.layout), position)

    @torch.no_grad()
    def first_logits(self, way: Way, source: Prompt, prompt: Prompt) -> Tensor:
        """Return the logits (V,) of a prompt's first new token."""
        source = prompt if way.alone else source
        if way.logits:
            return way.logits(source)
        ids = prompt.ids[-way.layout.tail :]
        return projector.logits_after(self.model, ids, self.warm_cache(way, source, prompt))


def divergence(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL(expected || actual) in nats (...) of logits (..., V), in float64."""
    return kl(expected.cpu().double(), actual.cpu().double())
