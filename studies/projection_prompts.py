"""Prompts of the projection study: families of paraphrases, and everything that is fitted on the training split."""

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

from gpt_kv_cache import GPT, generate
from pocket import corpus
from projector import (
    Compressor,
    Layout,
    Prefill,
    Projector,
    Segments,
    measure_segments,
    own_queries,
    prefill,
    summarize,
)
from support.encoders import PairEncoder, load_encoder
from support.files import read_csv
from support.regression import ridge

PROPOSED = Layout(m=8, true_positions=False)  # the least of its 8 to 32 summary tokens
HEADER = 20  # questions before the question, in long prompts
CONTINUATION = 32  # tokens of text after the prompt, for the change of perplexity
SAMPLES = {"prompts": 300, "pairs": 500, "bank": 40, "queries": 160}  # of training: for stage 1, stage 2, and the bank


@dataclass
class Prompt:
    """A prompt of a family of paraphrases, its tokens, the true answer (or "") and the text that follows: the answer
    or, if there is none, the model's own."""

    family: str
    text: str
    ids: list[int]
    answer: str
    follows: list[int]
    exact: Prefill


Family = list[tuple[str, str]]  # paraphrases: prompt and answer
Splits = dict[str, list[Family]]

POCKET: dict[str, Callable[[str], list[list[corpus.Question]]]] = {
    "quiz": corpus.quiz_families,  # facts that the model knows, after four questions that all prompts begin with
    "long quiz": lambda split: corpus.quiz_families(split, HEADER),
    "story": lambda split: corpus.story_families(split, 100 if split == "train" else 40, 3),  # facts in the prompt
    "notes": lambda split: corpus.notes_families(split, 100 if split == "train" else 40, 3),  # to be explained
}


def pocket_families(kind: str, seed: int = 0, most: dict[str, int] | None = None, wordings: int = 4) -> Splits:
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
    rows = read_csv(path, ["source", "target"])
    family_of: dict[str, dict[str, str]] = {}  # text -> its family: prompts and their answers
    for row in rows:
        if not row["source"] or not row["target"]:
            raise ValueError(f"{path} has a pair with an empty prompt")
        merged = family_of.get(row["source"], {}) | family_of.get(row["target"], {})
        for text in (row["source"], row["target"]):
            merged[text] = row.get("answer") or merged.get(text, "")
        family_of |= dict.fromkeys(merged, merged)
    families = [list(family.items()) for family in {id(f): f for f in family_of.values()}.values() if len(family) > 1]
    if len(families) < 15:
        raise ValueError(f"{path} has {len(families)} families of prompts: 15 are needed, to split and cross-validate")
    Random(seed).shuffle(families)
    n = len(families) // 5
    return {"test": families[:n], "valid": families[n : 2 * n], "train": families[2 * n :]}


class Experiment:
    """The prompts of one kind, read exactly, and everything that is fitted on them: on those of the split "train"."""

    def __init__(self, model: GPT, tokenizer: tiktoken.Encoding, name: str, families: Splits, encoder: str,
                 seed: int = 0) -> None:
        """Raises ValueError if a prompt exceeds the context, or too few families have two that are long enough."""
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.prompts: dict[str, list[list[Prompt]]] = {}
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
                            row.append(self.prompt(f"{split}/{len(self.prompts[split])}", text, ids, answer))
                    self.prompts[split] += [row] if len(row) > 1 else []
        if (fewest := min(map(len, self.prompts.values()))) < 3:
            raise ValueError(f"{name}: {fewest} families in a split have two prompts of more than "
                             f"{PROPOSED.m + PROPOSED.tail} tokens: at least 3 are needed")
        every = [p.ids for split in self.prompts.values() for family in split for p in family]
        self.shortest = min(map(len, every))
        same = next((i for i in range(self.shortest) if len({ids[i] for ids in every}) > 1), self.shortest)
        same = min(same, self.shortest - PROPOSED.m - PROPOSED.tail)
        self.prefix = same if same >= 8 else 0  # a word or two are no prefix worth storing
        self.shared = prefill(model, every[0][: self.prefix]) if self.prefix else None
        self.train = [p for family in self.prompts["train"] for p in family]
        lengths = [len(p.answer.split()) for p in self.train if p.answer]
        long = bool(lengths) and statistics.median(lengths) > 8
        self.task = ("rouge" if long else "exact") if lengths else None  # how answers are judged
        self.skip = len(tokenizer.decode(every[0][: self.prefix])) if self.prefix else 0  # the same in all prompts
        texts = [p.text[self.skip :] for p in self.train]
        self.encoder = (PairEncoder.fit(tokenizer, texts, [p.family for p in self.train]) if encoder == "pairs" else
                        load_encoder(encoder, model, tokenizer))
        rng = Random(seed + 1)
        pairs = [(a, b) for family in self.prompts["train"] for a in family for b in family if a is not b]
        self.pairs = rng.sample(pairs, min(SAMPLES["pairs"], len(pairs)))
        self.sample = rng.sample(self.train, min(SAMPLES["prompts"], len(self.train)))
        self.bankers = rng.sample(self.train, min(SAMPLES["bank"], len(self.train)))
        self.cache: dict[Any, Any] = {}

    def prompt(self, family: str, text: str, ids: list[int], answer: str) -> Prompt:
        """Read a prompt, and find the text that follows it."""
        if len(ids) + 2 * CONTINUATION > self.model.config.n_ctx:
            raise ValueError(f"a prompt of {len(ids)} tokens and {2 * CONTINUATION} more exceed the context, "
                             f"{self.model.config.n_ctx}")
        if answer:
            follows = self.tokenizer.encode(f" {answer}\n", allowed_special="all")[:CONTINUATION]
        else:
            fed = torch.tensor([ids], device=self.device)
            tokens = generate(self.model, fed, CONTINUATION, stop_id=self.tokenizer.eot_token)
            follows = [int(token) for token in tokens]
        return Prompt(family, text, ids, answer, follows, prefill(self.model, ids))

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
        return [(p, family[0] if i % 5 else None) for i, family in enumerate(self.prompts[split]) for p in family[1:]]

    def related(self, split: str) -> list[tuple[Prompt, Prompt]]:
        """Return the prompts asked in a split that have a stored relative, each with it."""
        return [(p, relative) for p, relative in self.queries(split) if relative]

    def stored(self, split: str) -> list[Prompt]:
        """Return the library's prompts when a split is asked: one of each of its families, and of the training's."""
        return [f[0] for i, f in enumerate(self.prompts[split]) if i % 5] + [f[0] for f in self.prompts["train"]]

    def bank(self, layout: Layout) -> Tensor:
        """Return queries of training prompts (L, H, N, D) for summarize()."""
        few = [p for p in self.bankers if len(p.ids) >= layout.tail][: max(4, SAMPLES["queries"] // layout.tail)]
        return self.once(("bank", replace(layout, m=1)), lambda: torch.cat(
            [own_queries(self.model, p.exact, layout) for p in few], 2))

    def segments(self, prompt: Prompt, layout: Layout, bank: bool = False) -> Segments:
        """Return the segments of a prompt, with queries of others if asked."""
        return measure_segments(self.model, prompt.exact, layout, self.bank(layout) if bank else None)

    def own(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens fitted on one prompt."""
        return self.once((id(prompt), layout), lambda: summarize(self.segments(prompt, layout, bank=True)))

    def compressor(self, layout: Layout, penalty: float | None = None) -> Compressor:
        """Return stage 1 as proposed, with this penalty or a cross-validated one."""
        def fit() -> Compressor:
            segments = [self.segments(p, layout) for p in self.sample]
            if penalty is not None:
                return Compressor(segments, penalty)
            return Compressor.fit(segments, [p.family for p in self.sample])

        return self.once(("compressor", layout), fit)

    def compressed(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the summary tokens of a prompt by stage 1 as proposed."""
        def all_at_once() -> dict[int, Tensor]:
            prompts = [p for split in ("valid", "test") for family in self.prompts[split] for p in family]
            prompts += [*self.stored("test"), *(p for pair in self.pairs for p in pair)]
            prompts = [*{id(p): p for p in prompts}.values()]
            summaries = self.compressor(layout)([self.segments(p, layout) for p in prompts])
            return {id(p): summary for p, summary in zip(prompts, summaries, strict=True)}

        return self.once(("compressed", layout), all_at_once)[id(prompt)]

    def projector(self, layout: Layout, summary: Callable[[Prompt, Layout], Tensor], change: bool = False,
                  penalty: float | None = None) -> Projector:
        """Return stage 2 for summary tokens made in one of the two ways, with this penalty or a cross-validated one."""
        def fit() -> Projector:
            sources, targets = (torch.stack([summary(pair[i], layout) for pair in self.pairs]) for i in (0, 1))
            if penalty is not None:
                return Projector(sources, targets, penalty, change)
            return Projector.fit(sources, targets, [a.family for a, _ in self.pairs], change)

        return self.once(("projector", layout, summary.__name__, change), fit)

    @cached_property
    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ridge from a source's last hidden state to its target's: means of both, and weights."""
        x, y = (torch.stack([pair[i].exact.hidden for pair in self.pairs]).double() for i in (0, 1))
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)
