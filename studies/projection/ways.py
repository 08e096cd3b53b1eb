"""The prompts of the projection study, what is fitted on them, and every way to get a first token.

Prompts come in families of paraphrases. Each family serves for fitting ("train"), for choosing
("valid") or for measuring ("test"), and never for two of these. Trial.ways has all ways by name; what
one of them needs is fitted when it is first used, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from random import Random
from typing import Any, NamedTuple

import tiktoken
import torch
from torch import Tensor

import projector
from gpt_kv_cache import GPT, KVCache
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
from studies.projection.segments import summarize
from support.encoders import PairEncoder
from support.geometry import kv_heads
from support.regression import PENALTIES, cross_validate, ridge
from support.statistics import kl
from support.texts import Family, Splits

PROPOSED = Layout(m=8, true_positions=False)  # the fewest of its 8 to 32 summary tokens
MIN_TOKENS = PROPOSED.m + PROPOSED.tail  # a prompt has more tokens than this
WORDINGS = 4  # prompts of a family
HEADER_QUESTIONS = 20  # questions before the one asked, in long prompts
# At most so many for training:
STAGE_1_PROMPTS = 300
VALIDATION_PROMPTS = 120  # of these, for the cross-validation of stage 1's penalty
MAX_PAIRS = 500
BANK_PROMPTS, BANK_QUERIES = 40, 160
# The last three are the best on validation prompts of the four kinds.
RAW_LAYOUTS = [Layout(1), Layout(8), Layout(32), Layout(1, 16), Layout(8, 4), Layout(32, 64)]
MAX_MAP_BYTES = 4_000_000_000  # bytes of stage 1's map
LEARNING_RATE, BATCH_SIZE = 0.05, 64  # with which Adam learns summary tokens for all prompts

POCKET_KINDS = {  # the families of a split
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


def pocket_families(kind: str, seed: int, max_families: int | None) -> Splits:
    """Return families of the pocket world by split, or the first max_families of each split; a
    family has at most WORDINGS prompts."""
    generator = Random(seed)
    families: Splits = {}
    for split in corpus.SPLITS:
        families[split] = []
        for family in POCKET_KINDS[kind](split)[:max_families]:
            chosen = generator.sample(family, min(len(family), WORDINGS))
            families[split].append([(question.prompt, question.answer) for question in chosen])
    return families


@dataclass(eq=False)
class Prompt(Prefill):
    """A prompt of a family of paraphrases with its exact pass, the true answer (or ""), and the first
    prompt of its family, if that is stored when this one is asked."""

    family: str
    text: str
    answer: str
    relative: Prompt | None


Prompts = Sequence[Prompt]
Pairs = Sequence[tuple[Prompt, Prompt]]  # prompts, each with the one that it starts from
Found = dict[tuple[Prompt, Prompt], float]  # how similar a prompt is to the stored one found for it
# What is stored of N prompts: a cache for all of a new prompt but its tail (N, L, 2, H, m, D), or
# logits (N, V).
Starts = Callable[[Prompts], Sequence[Tensor]]


class Way(NamedTuple):
    """How to get a first token. layout: of summary tokens, None if logits are stored; fit: fits the way
    with a layout on a trial's training prompts; most: the most tokens of a prompt."""

    layout: Layout | None
    fit: Callable[[Trial, Layout | None], Starts]
    most: float = math.inf

    def covers(self, *prompts: Prompt) -> bool:
        """Return whether prompts are short enough."""
        return max(len(prompt.ids) for prompt in prompts) <= self.most


# --- The prompts, and the ways to start from them ----------------------------------------------------


@dataclass(eq=False)
class Trial:
    """The prompts of one kind with their exact passes, the ways to get a first token, and what is fitted
    for these on training prompts. match_names: whether a stored prompt that is found has the new
    one's names.

    Raises ValueError if a prompt exceeds the context, or too few families have two prompts that are
    long enough.
    """

    model: GPT
    tokenizer: tiktoken.Encoding
    kind: str
    families: Splits
    seed: int
    size: Size
    match_names: bool

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
        self.shared_ids = projector.shared_beginning(all_ids)[: self.shortest - MIN_TOKENS]
        if len(self.shared_ids) < 8:  # a word or two are not worth storing
            self.shared_ids = []
        self.shared_chars = len(self.tokenizer.decode(self.shared_ids))  # characters
        texts = [prompt.text[self.shared_chars :] for prompt in self.train]
        self.encoder = PairEncoder.fit(self.tokenizer, texts, families_of(self.train))
        generator = Random(self.seed + 1)

        def choose(items: list, most: int) -> list:
            return generator.sample(items, min(most, len(items)))

        pairs = [pair for family in self.prompts["train"] for pair in permutations(family, 2)]
        self.pairs = choose(pairs, MAX_PAIRS)  # source, target
        self.stage_1_prompts = choose(self.train, STAGE_1_PROMPTS)
        self.bank_prompts = choose(self.train, BANK_PROMPTS)
        self.fits: dict[str, Starts] = {}  # by way
        self.ways = self.all_ways()

    def read_families(self, split: str, families: list[Family]) -> list[list[Prompt]]:
        """Return families of prompts with their exact passes, without prompts too short for the
        proposal. Every fifth family has no stored prompt."""
        kept_families = []
        for family in families:
            kept = []
            number = len(kept_families)
            for text, answer in family:
                ids = self.tokenizer.encode(text, allowed_special="all")
                if len(ids) > MIN_TOKENS:
                    prompt = Prompt(
                        **vars(projector.prefill(self.model, ids)),
                        family=f"{split}/{number}",
                        text=text,
                        answer=answer,
                        relative=kept[0] if kept and number % 5 else None,
                    )
                    kept.append(prompt)
            if len(kept) > 1:
                kept_families.append(kept)
        if len(kept_families) < 3:
            raise ValueError(
                f"{self.kind}: {len(kept_families)} families have two prompts of more than {MIN_TOKENS} tokens "
                f"to {split}: 3 are needed"
            )
        return kept_families

    # --- Prompts that are asked, and prompts that are stored --------------------------------------

    def asked_prompts(self, split: str) -> list[Prompt]:
        """Return the prompts asked in a split, all of a family but the first."""
        return [prompt for family in self.prompts[split] for prompt in family[1:]]

    def related_pairs(self, split: str) -> Pairs:
        """Return the prompts asked in a split that have a stored relative, each with its
        relative."""
        return [(x, x.relative) for x in self.asked_prompts(split) if x.relative]

    def stored_prompts(self, split: str, relatives: bool = True) -> list[Prompt]:
        """Return the prompts stored when a split is asked: one of each training family and, with
        relatives, one of each of the split's own families that has any stored."""
        stored = [family[0] for family in self.prompts["train"]]
        own = [family[0] for family in self.prompts[split] if family[1].relative]
        return own + stored if relatives else stored

    def library(self, name: str, stored: list[Prompt]) -> Library:
        """Return the library of stored prompts, with a way's summary tokens, if it has any."""
        way = self.ways[name]
        stored = [prompt for prompt in stored if way.covers(prompt)]
        summaries = torch.stack([*self.fitted(name)(stored)])
        return Library(
            self.model,
            way.layout or PROPOSED,
            self.encoder,
            [prompt.text for prompt in stored],
            summaries,
            match_names=self.match_names,
            shared_chars=self.shared_chars,
        )

    def retrieve(self, split: str, relatives: bool = True) -> Found:
        """Look up every prompt of a split in its library, or in one without any prompt's
        relatives. Return by prompt and nearest stored prompt how similar they are, but for prompts for
        which the library holds none of the same names."""
        stored, found = self.stored_prompts(split, relatives), {}
        library = self.library("neighbour", stored)
        for prompt in self.asked_prompts(split):
            index, similarity = library.nearest(prompt.text)
            if index >= 0:
                found[prompt, stored[index]] = similarity
        return found

    # --- The ways ---------------------------------------------------------------------------------

    def all_ways(self) -> dict[str, Way]:
        """Return all ways by name: the proposal, its stage 1 alone, its stage 2 alone, its baselines,
        and our own."""
        ways = {
            "own": Way(Layout(PROPOSED.m), fit_stage_2_alone),
            "learned": Way(PROPOSED, fit_shared_by_all),
            "hidden": Way(None, fit_hidden_map),
            "neighbour": Way(None, partial(without_fit, lambda prompt: prompt.logits)),
            "none": Way(Layout(1), partial(without_fit, lambda prompt: prompt.kv[..., :0, :])),
            # The complete exact cache, in the place of summary tokens:
            "rule": Way(PROPOSED, partial(without_fit, cache_before_last)),
        }
        most, config = self.longest, self.model.config
        # Of stage 1 as written, for each layer:
        numbers = kv_heads(config) * (2 * config.head_dim) ** 2 * (most - 1) * PROPOSED.m
        if 4 * config.n_layer * numbers <= MAX_MAP_BYTES:
            ways["written"] = Way(PROPOSED, fit_as_written, most)
            stage_1 = Way(PROPOSED, lambda trial, _: trial.fitted("written").stage_1, most)
            ways["stage1-written"] = stage_1
        for layout in RAW_LAYOUTS:
            if layout.m + layout.tail <= self.shortest:
                ways[f"raw-{layout.m}:{layout.tail}"] = Way(layout, fit_own)
        return ways

    def fitted(self, name: str) -> Starts:
        """Return what a way stores of prompts. It is fitted at its first use."""
        if name not in self.fits:
            way = self.ways[name]
            self.fits[name] = way.fit(self, way.layout)
        return self.fits[name]


def batch_of(model: GPT, ids: list[int]) -> Tensor:
    """Return tokens as a model takes them, (1, T)."""
    return torch.tensor([ids], device=model.wte.weight.device)


def families_of(prompts: Prompts) -> list[str]:
    """Return the family of each prompt."""
    return [prompt.family for prompt in prompts]


def without_fit(stored: Callable[[Prompt], Tensor], *_: Any) -> Starts:
    """Return what a way stores of prompts that needs no fit, by what it stores of one."""
    return lambda prompts: [stored(prompt) for prompt in prompts]


# --- What is fitted -------------------------------------------------------------------------------


def best_fit(
    fit: Callable[..., Any],
    error: Callable[[Any, Sequence], Tensor],
    items: Sequence,
    families: Sequence[str],
    penalties: Sequence[float],
) -> Any:
    """Return what fit(items, penalty=...) returns, with the penalty that has the least mean
    error(fitted, items) on held-out families. families: of the first items, or of all."""

    def error_on_others(train: Tensor, test: Tensor, penalty: float) -> float:
        fitted = fit([items[i] for i in train], penalty=penalty)
        return float(error(fitted, [items[i] for i in test])) * len(test)

    return fit(items, penalty=cross_validate(error_on_others, families, penalties))


def relative_error(stage_1: Starts, prompts: Prompts) -> Tensor:
    """Return the squared error of what prompts' last queries read from their summary tokens, as a share
    of the square of what they read from the exact caches, summed over layers and heads."""
    errors, squares = [], []
    for prompt, summary in zip(prompts, stage_1(prompts), strict=True):
        q = tail_queries(prompt)  # (L, H, R, D)
        exact = attention_output(q, *cache_before_last(prompt).unbind(1))
        errors.append((attention_output(q, *summary.unbind(1)) - exact).square())
        squares.append(exact.square())
    error, square = (torch.stack(x).mean((0, -2, -1)) for x in (errors, squares))  # (L, H)
    return (error / square).sum()


class BothStages(NamedTuple):
    """Stage 1 of some kind, and stage 2 after it, which doesn't depend on the new prompt. So the
    summary tokens can be computed once; the proposal maps them at every start."""

    stage_1: Starts
    stage_2: Projector

    def __call__(self, prompts: Prompts) -> Tensor:
        return self.stage_2(self.stage_1(prompts))


def fit_stage_2(trial: Trial, stage_1: Starts, penalties: Sequence[float]) -> BothStages:
    """Fit stage 2, the map between similar prompts, after a stage 1."""
    sources, targets = map(stage_1, zip(*trial.pairs, strict=True))  # (N, L, 2, H, m, D)

    def fit(pairs: list[int], penalty: float) -> Projector:
        return Projector(sources[pairs], targets[pairs], penalty)

    def error(stage_2: Projector, pairs: list[int]) -> Tensor:
        return (stage_2(sources[pairs]) - targets[pairs]).square().mean()

    families = [source.family for source, _ in trial.pairs]
    return BothStages(stage_1, best_fit(fit, error, range(len(families)), families, penalties))


def fit_as_written(trial: Trial, layout: Layout) -> BothStages:
    """Fit both stages as written. Stage 1 can take gigabytes. The penalties for other numbers of
    summary tokens are those for the proposal's."""
    prompts, size = trial.stage_1_prompts, trial.size
    of_stage_1, of_stage_2 = size.loss_penalties, size.penalties
    if layout != PROPOSED:
        of_stage_1, of_stage_2 = ([stage.penalty] for stage in trial.fitted("written"))
    fit = partial(Compressor, m=layout.m, T=trial.longest - 1, steps=size.stage_1_steps)
    families = families_of(prompts[:VALIDATION_PROMPTS])
    stage_1 = best_fit(fit, relative_error, prompts, families, of_stage_1)
    return fit_stage_2(trial, stage_1, of_stage_2)


def fit_own(trial: Trial, layout: Layout) -> Starts:
    """Make summary tokens that are fitted on each prompt alone, with a bank of training prompts'
    queries (L, H, N, D)."""
    prompts = trial.bank_prompts[: max(4, BANK_QUERIES // layout.tail)]
    bank = torch.cat([tail_queries(prompt, layout.tail) for prompt in prompts], 2)
    return lambda prompts: torch.stack([summarize(x, layout, bank) for x in prompts])


def fit_stage_2_alone(trial: Trial, layout: Layout) -> BothStages:
    """Fit stage 2 on summary tokens that are fitted on each prompt alone, in place of stage 1's."""
    return fit_stage_2(trial, fit_own(trial, layout), trial.size.penalties)


@torch.enable_grad()
def fit_shared_by_all(trial: Trial, layout: Layout) -> Starts:
    """Fit the source's baseline, summary tokens (L, 2, H, m, D) that are the same for every prompt.
    They begin as the mean of prompts' own, and are trained through the model to minimise
    KL(cold || warm) of training prompts' first token, read at position m as proposed."""
    model, prompts = trial.model, trial.stage_1_prompts
    device = model.wte.weight.device
    last_ids = torch.tensor([prompt.ids[-1:] for prompt in prompts], device=device)
    cold_logits = torch.stack([prompt.logits for prompt in prompts]).to(device)
    summary = fit_own(trial, layout)(prompts).mean(0).to(device).requires_grad_()
    optimizer = torch.optim.Adam([summary], lr=LEARNING_RATE)
    steps = trial.size.adam_steps
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randperm(len(last_ids), generator=generator)[:BATCH_SIZE]
        cache = projector.cache_of_summary(model, summary, layout.m)
        layers = [layer.expand(-1, len(batch), -1, -1, -1) for layer in cache.layers]
        logits = model(last_ids[batch], KVCache(layers, cache.pos))[:, 0]
        (summary.grad,) = torch.autograd.grad(kl(cold_logits[batch], logits).mean(), [summary])
        optimizer.step()
        schedule.step()
    return lambda prompts: [summary.detach()] * len(prompts)


def fit_hidden_map(trial: Trial, layout: None) -> Starts:
    """Fit a ridge regression from a source's last hidden state to its target's, from which the logits
    follow."""

    def hidden_states(prompts: Prompts) -> Tensor:
        return torch.stack([prompt.hidden for prompt in prompts]).double()  # (N, C)

    source, target = map(hidden_states, zip(*trial.pairs, strict=True))
    mean, target_mean = source.mean(0), target.mean(0)
    weight = ridge(source - mean, target - target_mean, 0.1)

    def logits(prompts: Prompts) -> Tensor:
        mapped = (hidden_states(prompts) - mean) @ weight + target_mean
        return trial.model.head(mapped.to(trial.model.wte.weight)[None])[0]

    return logits
