"""The methods and data of the projection study: families of paraphrases, everything that is fitted on the training
split, the proposal, steps away from it, and its baselines."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

import projector
from gpt_kv_cache import GPT, KVCache, generate
from pocket import corpus
from projector import Layout, Library
from studies import projection_segments as segments
from support.encoders import PairEncoder, load_encoder
from support.files import read_csv
from support.geometry import kv_heads
from support.regression import ridge
from support.statistics import kl

PROPOSED = Layout(m=8, true_positions=False)  # the least of its 8 to 32 summary tokens
HEADER = 20  # questions before the question, in long prompts
CONTINUATION = 32  # tokens of text after the prompt, for the change of perplexity
SAMPLES = {
    "prompts": 300,
    "pairs": 500,
    "bank": 40,
    "queries": 160,
}  # of training: for stage 1, stage 2, and the bank


@dataclass
class Prompt:
    """A prompt of a family of paraphrases, its tokens, the true answer (or "") and the text that follows: the answer
    or, if there is none, the model's own."""

    family: str
    text: str
    ids: list[int]
    answer: str
    follows: list[int]
    exact: projector.Prefill


LARGEST_MAP = 4e9  # bytes of stage 1 as written
Family = list[tuple[str, str]]  # paraphrases: prompt and answer
Splits = dict[str, list[Family]]

POCKET: dict[str, Callable[[str], list[list[corpus.Question]]]] = {
    "quiz": corpus.quiz_families,  # facts that the model knows, after four questions that all prompts begin with
    "long quiz": lambda split: corpus.quiz_families(split, HEADER),
    "story": lambda split: corpus.story_families(
        split, 100 if split == "train" else 40, 3
    ),  # facts in the prompt
    "notes": lambda split: corpus.notes_families(
        split, 100 if split == "train" else 40, 3
    ),  # to be explained
}


def pocket_families(
    kind: str, seed: int = 0, most: dict[str, int] | None = None, wordings: int = 4
) -> Splits:
    """Return families of the pocket world by split: the same questions, stories or notes in other words; of each split
    all of them, or the first `most`."""
    rng, families = Random(seed), {}
    for split in corpus.SPLITS:
        chosen = [rng.sample(family, min(len(family), wordings)) for family in POCKET[kind](split)]
        chosen = chosen[: most[split] if most else None]
        families[split] = [[(q.prompt, q.answer) for q in family] for family in chosen]
    return families


def read_pairs(path: Path, seed: int = 0) -> Splits:
    """Return the pairs of a CSV file as families of two by split, three fifths of them for training and a fifth each
    for validation and test; columns: source, target, and optionally answer.

    Pairs that share a text are of one family, and an answer is that of both. Raises ValueError if columns are missing
    or there are too few families.
    """
    rows = read_csv(path, "source", "target")
    family_of: dict[str, dict[str, str]] = {}  # text -> its family: prompts and their answers
    for row in rows:
        if not row["source"] or not row["target"]:
            raise ValueError(f"{path} has a pair with an empty prompt")
        merged = family_of.get(row["source"], {}) | family_of.get(row["target"], {})
        for text in (row["source"], row["target"]):
            merged[text] = row.get("answer") or merged.get(text, "")
        family_of |= dict.fromkeys(merged, merged)
    families = [
        list(family.items())
        for family in {id(f): f for f in family_of.values()}.values()
        if len(family) > 1
    ]
    if len(families) < 15:
        raise ValueError(
            f"{path} has {len(families)} families of prompts: 15 are needed, to split and cross-validate"
        )
    Random(seed).shuffle(families)
    n = len(families) // 5
    return {"test": families[:n], "valid": families[n : 2 * n], "train": families[2 * n :]}


class Experiment:
    """The prompts of one kind, read exactly, and everything that is fitted on them: on those of the split "train"."""

    def __init__(
        self,
        model: GPT,
        tokenizer: tiktoken.Encoding,
        name: str,
        families: Splits,
        encoder: str,
        seed: int = 0,
        quick: bool = False,
    ) -> None:
        """quick: stage 1 as written is fitted in a few steps. Raises ValueError if a prompt exceeds the context,
        or too few families have two that are long enough."""
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.prompts: dict[str, list[list[Prompt]]] = {}
        self.quick = quick
        self.dropped = 0  # prompts with fewer tokens than the proposal needs
        total = sum(len(family) for split in families.values() for family in split)
        with tqdm(total=total, desc=f"{name}: reading", leave=False) as bar:
            for split, chosen in families.items():
                self.prompts[split] = []
                for family in chosen:
                    row = []
                    for text, answer in family:
                        bar.update()
                        ids = tokenizer.encode(text, allowed_special="all")
                        if len(ids) <= PROPOSED.m + PROPOSED.tail:
                            self.dropped += 1
                        else:
                            row.append(
                                self.prompt(
                                    f"{split}/{len(self.prompts[split])}", text, ids, answer
                                )
                            )
                    self.prompts[split] += [row] if len(row) > 1 else []
        if (fewest := min(map(len, self.prompts.values()))) < 3:
            raise ValueError(
                f"{name}: {fewest} families in a split have two prompts of more than "
                f"{PROPOSED.m + PROPOSED.tail} tokens: at least 3 are needed"
            )
        every = [p.ids for split in self.prompts.values() for family in split for p in family]
        self.shortest = min(map(len, every))
        same = next(
            (i for i in range(self.shortest) if len({ids[i] for ids in every}) > 1), self.shortest
        )
        same = min(same, self.shortest - PROPOSED.m - PROPOSED.tail)
        self.prefix = same if same >= 8 else 0  # a word or two are no prefix worth storing
        self.shared = projector.prefill(model, every[0][: self.prefix]) if self.prefix else None
        self.train = [p for family in self.prompts["train"] for p in family]
        lengths = [len(p.answer.split()) for p in self.train if p.answer]
        long = bool(lengths) and statistics.median(lengths) > 8
        self.task = ("rouge" if long else "exact") if lengths else None  # how answers are judged
        self.skip = (
            len(tokenizer.decode(every[0][: self.prefix])) if self.prefix else 0
        )  # the same in all prompts
        texts = [p.text[self.skip :] for p in self.train]
        self.encoder = (
            PairEncoder.fit(tokenizer, texts, [p.family for p in self.train])
            if encoder == "pairs"
            else load_encoder(encoder, model, tokenizer)
        )
        rng = Random(seed + 1)
        pairs = [
            (a, b) for family in self.prompts["train"] for a in family for b in family if a is not b
        ]
        self.pairs = rng.sample(pairs, min(SAMPLES["pairs"], len(pairs)))
        self.sample = rng.sample(self.train, min(SAMPLES["prompts"], len(self.train)))
        self.bankers = rng.sample(self.train, min(SAMPLES["bank"], len(self.train)))
        self.cache: dict[Any, Any] = {}

    def prompt(self, family: str, text: str, ids: list[int], answer: str) -> Prompt:
        """Read a prompt, and find the text that follows it."""
        if len(ids) + 2 * CONTINUATION > self.model.config.n_ctx:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {2 * CONTINUATION} more exceed the context, "
                f"{self.model.config.n_ctx}"
            )
        if answer:
            follows = self.tokenizer.encode(f" {answer}\n", allowed_special="all")[:CONTINUATION]
        else:
            fed = torch.tensor([ids], device=self.device)
            tokens = generate(self.model, fed, CONTINUATION, stop_id=self.tokenizer.eot_token)
            follows = [int(token) for token in tokens]
        return Prompt(family, text, ids, answer, follows, projector.prefill(self.model, ids))

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of the first make() for this key."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def forget(self, layouts: set[Layout]) -> None:
        """Free everything made for some layouts: maps of many summary tokens are large."""
        for key in [key for key in self.cache if layouts & {*key}]:
            del self.cache[key]

    def queries(self, split: str) -> list[tuple[Prompt, Prompt | None]]:
        """Return the prompts asked in a split, each with its stored relative; of every fifth family none is stored."""
        return [
            (p, family[0] if i % 5 else None)
            for i, family in enumerate(self.prompts[split])
            for p in family[1:]
        ]

    def related(self, split: str) -> list[tuple[Prompt, Prompt]]:
        """Return the prompts asked in a split that have a stored relative, each with it."""
        return [(p, relative) for p, relative in self.queries(split) if relative]

    def stored(self, split: str) -> list[Prompt]:
        """Return the library's prompts when a split is asked: one of each of its families, and of the training's."""
        return [f[0] for i, f in enumerate(self.prompts[split]) if i % 5] + [
            f[0] for f in self.prompts["train"]
        ]

    def bank(self, layout: Layout) -> Tensor:
        """Return queries of training prompts (L, H, N, D) for summarize()."""
        few = [p for p in self.bankers if len(p.ids) >= layout.tail][
            : max(4, SAMPLES["queries"] // layout.tail)
        ]
        return self.once(
            ("bank", replace(layout, m=1)),
            lambda: torch.cat(
                [projector.own_queries(self.model, p.exact, layout.tail) for p in few], 2
            ),
        )

    def segments(self, prompt: Prompt, layout: Layout, bank: bool = False) -> segments.Segments:
        """Return the segments of a prompt, with queries of others if asked."""
        return segments.measure_segments(
            self.model, prompt.exact, layout, self.bank(layout) if bank else None
        )

    def own(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens fitted on one prompt."""
        return self.once(
            (id(prompt), layout),
            lambda: segments.summarize(self.segments(prompt, layout, bank=True)),
        )

    def compressor(self, layout: Layout, penalty: float | None = None) -> segments.SegmentMap:
        """Return stage 1 as a map from segment means, with this penalty or a cross-validated one."""

        def fit() -> segments.SegmentMap:
            prompts = [self.segments(p, layout) for p in self.sample]
            if penalty is not None:
                return segments.SegmentMap(prompts, penalty)
            return segments.SegmentMap.fit(prompts, [p.family for p in self.sample])

        return self.once(("compressor", layout), fit)

    def compared(self) -> list[Prompt]:
        """Return all prompts whose summary tokens the maps for all prompts are asked for."""
        prompts = [
            p for split in ("valid", "test") for family in self.prompts[split] for p in family
        ]
        prompts += [*self.stored("test"), *self.sample, *(p for pair in self.pairs for p in pair)]
        return [*{id(p): p for p in prompts}.values()]

    def compressed(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by compressor()."""

        def all_at_once() -> dict[int, Tensor]:
            prompts = self.compared()
            summaries = self.compressor(layout)([self.segments(p, layout) for p in prompts])
            return {id(p): summary for p, summary in zip(prompts, summaries, strict=True)}

        return self.once(("compressed", layout), all_at_once)[id(prompt)]

    @property
    def fits_as_written(self) -> bool:
        """Whether stage 1's map as written is small enough to be held in memory."""
        c, longest = self.model.config, max(len(p.ids) for p in self.train) - 1
        return (
            flattened_bytes(c.n_layer, kv_heads(c), longest, PROPOSED.m, c.head_dim) <= LARGEST_MAP
        )

    @cached_property
    def compressor_as_written(self) -> projector.Compressor:
        """Return stage 1 as written, with columns for all training prompts, fitted on those of the sample."""
        exact, families = zip(*((p.exact, p.family) for p in self.sample), strict=True)
        longest = max(len(p.ids) for p in self.train) - 1
        if self.quick:
            return projector.Compressor(self.model, exact, PROPOSED.m, 1e-2, longest, steps=20)
        return projector.Compressor.fit(self.model, exact, families, PROPOSED.m, longest)

    def as_written(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by stage 1 as written."""

        def all_at_once() -> dict[int, Tensor]:
            compressor = self.compressor_as_written
            prompts = [p for p in self.compared() if len(p.ids) - 1 <= compressor.T]
            summaries = compressor([p.exact for p in prompts])
            return {id(p): summary for p, summary in zip(prompts, summaries, strict=True)}

        return self.once(("as written", layout), all_at_once)[id(prompt)]

    def projector(
        self,
        layout: Layout,
        summary: Callable[[Prompt, Layout], Tensor],
        change: bool = False,
        penalty: float | None = None,
    ) -> projector.Projector:
        """Return stage 2 for summary tokens made in one of the two ways, with this penalty or a cross-validated one."""

        def fit() -> projector.Projector:
            sources, targets = (
                torch.stack([summary(pair[i], layout) for pair in self.pairs]) for i in (0, 1)
            )
            if penalty is not None:
                return projector.Projector(sources, targets, penalty, change)
            return projector.Projector.fit(
                sources, targets, [a.family for a, _ in self.pairs], change
            )

        return self.once(("projector", layout, summary.__name__, change), fit)

    @cached_property
    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ridge from a source's last hidden state to its target's: means of both, and weights."""
        x, y = (torch.stack([pair[i].exact.hidden for pair in self.pairs]).double() for i in (0, 1))
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)


def flattened_bytes(layers: int, heads: int, tokens: int, m: int, head_dim: int) -> int:
    """Return the bytes in float32 of a map from all of a cache to m summary tokens for each head, R^(T x 2d) to
    R^(m x 2d), taken as one matrix."""
    return 4 * layers * heads * (tokens * 2 * head_dim) * (m * 2 * head_dim)


OfSource = Callable[[Experiment, Prompt], Tensor]


@dataclass(frozen=True)
class Method:
    """How a first token is had: from a cache that stands for all but the tail of the prompt, or from logits."""

    name: str
    layout: Layout | None = None  # of the cache
    summary: OfSource | None = None  # of the source, (L, 2, H, m, D)
    logits: OfSource | None = None  # of the source, (V,)

    def cache(self, experiment: Experiment, source: Prompt, prompt: Prompt) -> KVCache:
        prefix = experiment.shared if self.layout.prefix else None
        summary = self.summary(experiment, source)
        return projector.cache_of(
            experiment.model, summary, self.layout.tail_position(len(prompt.ids)), prefix
        )


def projected(
    layout: Layout,
    fit: str,
    change: bool = False,
    penalties: Callable[[Experiment], tuple[float, float]] | None = None,
) -> OfSource:
    """Return how a source's summary tokens are projected, by stage 1 as written ("as_written"), by the map of segments
    ("compressed") or prompt by prompt ("own"): once, since the map doesn't depend on the new prompt, which the proposal
    does at every start."""

    def summary(experiment: Experiment, source: Prompt) -> Tensor:
        def once() -> Tensor:
            first, second = penalties(experiment) if penalties else (None, None)
            if fit == "compressed":
                experiment.compressor(layout, first)
            make = getattr(experiment, fit)
            return experiment.projector(layout, make, change, second)(make(source, layout)[None])[0]

        return experiment.once((id(source), layout, fit, change), once)

    return summary


def mean_summary(layout: Layout) -> OfSource:
    """Return how to have the same summary tokens for every prompt: the mean of those fitted on training prompts."""

    def summary(experiment: Experiment, source: Prompt) -> Tensor:
        return experiment.once(
            ("mean", layout),
            lambda: torch.stack([experiment.own(p, layout) for p in experiment.sample]).mean(0),
        )

    return summary


@torch.no_grad()
def by_hidden_state(experiment: Experiment, source: Prompt) -> Tensor:
    """Return logits (V,) of the source's last hidden state after a linear map."""
    before, after, weight = experiment.hidden_map
    x = (source.exact.hidden.double() - before) @ weight + after
    return experiment.model.head(x.to(experiment.model.wte.weight)[None, None])[0, 0]


WRITTEN = Method("as written", PROPOSED, projected(PROPOSED, "as_written"))
NEIGHBOUR = Method("neighbour's logits", logits=lambda e, p: p.exact.logits)


def methods() -> list[Method]:
    """Return the proposal, steps away from it, and its baselines, in the order of the table."""
    true = replace(PROPOSED, true_positions=True)
    return [
        Method("as proposed", PROPOSED, projected(PROPOSED, "compressed")),
        Method("- at true positions", true, projected(true, "compressed")),
        Method("- summaries fitted prompt by prompt", true, projected(true, "own")),
        one_token(),
        Method("raw neighbour summary", true, lambda e, p: e.own(p, true)),
        Method("prompt-agnostic summary", true, mean_summary(true)),
        Method("hidden state", logits=by_hidden_state),
        NEIGHBOUR,
        Method("no summary tokens", Layout(1), lambda e, p: e.own(p, Layout(1))[..., :0, :]),
    ]


def one_token(prefix: int = 0) -> Method:
    """Return the warm start from one summary token, fitted prompt by prompt and projected by a ridge that pulls towards
    no change."""
    layout = Layout(1, prefix=prefix)
    after = f", after an exact prefix of {prefix}" if prefix else ""
    return Method(
        f"one summary token, ridge towards no change{after}",
        layout,
        projected(layout, "own", change=True),
    )


def raw_tokens(layout: Layout) -> Method:
    """Return the warm start from the neighbour's summary tokens, fitted prompt by prompt, as they are."""
    prefix = f", after an exact prefix of {layout.prefix}" if layout.prefix else ""
    name = f"{layout.m} raw summary tokens, tail of {layout.tail}{prefix}"
    return Method(name, layout, lambda experiment, source: experiment.own(source, layout))


def first_logits(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> Tensor:
    """Return the logits (V,) of the first token by one method."""
    if method.logits:
        return method.logits(experiment, source)
    tail = torch.tensor([prompt.ids[-method.layout.tail :]], device=experiment.device)
    with torch.no_grad():
        return experiment.model(tail, method.cache(experiment, source, prompt), last_only=True)[
            0, -1
        ]


def divergence(expected: Tensor, got: Tensor) -> Tensor:
    """Return KL(expected || got) in nats (...) of logits (..., V), in float64."""
    return kl(expected.cpu().double(), got.cpu().double())


def error(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> float:
    """Return KL(cold || warm) of the first token by one method."""
    return float(divergence(prompt.exact.logits, first_logits(experiment, method, source, prompt)))


def library_of(
    experiment: Experiment,
    method: Method | None,
    split: str,
    tau: float = -1.0,
    guard: bool = False,
    others: bool = True,
) -> Library:
    """Return the library that prompts of a split meet, with the summary tokens of a method, or with none if it is only
    to be searched; with those of training, too, or without these others."""
    layout = method.layout if method else Layout(1)
    stored = [
        p
        for p in experiment.stored(split)
        if len(p.ids) - layout.prefix - layout.tail >= layout.m
        and (others or p.family.startswith(split))
    ]
    if method is WRITTEN:
        stored = [p for p in stored if len(p.ids) - 1 <= experiment.compressor_as_written.T]
    summaries = (
        torch.stack([method.summary(experiment, p) for p in stored])
        if method
        else torch.zeros(len(stored), 1)
    )
    return Library(
        experiment.model,
        layout,
        experiment.encoder,
        [p.text for p in stored],
        summaries,
        threshold=tau,
        guard=guard,
        skip=experiment.skip,
        prefix=experiment.shared if layout.prefix else None,
    )
