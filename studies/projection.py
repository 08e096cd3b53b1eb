"""CP-KVP's falsification test: every baseline, metric and ablation of the proposal, its thresholds, and then what makes
a warm start good enough. `projector.py` runs it; all figures are of prompts, families and facts not fitted on.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus, rope
from projector import (
    Compressor,
    Layout,
    Library,
    PairEncoder,
    Projector,
    Reading,
    Summary,
    cache_of,
    fit_slots,
    generate_warm,
    move_over,
    own_queries,
    read,
    read_exactly,
    ridge,
    summarize,
)
from support.encoders import load_encoder
from support.files import write_atomically

PROPOSED = Layout(m=8, true_positions=False)  # the least of its 8 to 32 slots
SLOTS = (1, 2, 4, 8, 16, 32)
HEADER = 20  # questions before the question, in long prompts
CONTINUATION = 32  # tokens of text after the prompt, for the change of perplexity
GOOD_KL, GOOD_PERPLEXITY, GOOD_SHARE, GOOD_TASK, LEAST_SAVED = 0.05, 0.05, 0.80, 0.01, 0.35  # the thresholds
STYLES = ("o-", "s--", "^-.", "D:")  # of lines, readable without colour
SAMPLES = {"prompts": 300, "pairs": 500, "bank": 40, "queries": 160}  # of training: for stage 1, stage 2, and the bank


# --- Prompts --------------------------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """A prompt of a family of paraphrases, its tokens, the true answer (or "") and the text that follows: the answer
    or, if there is none, what the model writes."""

    family: str
    text: str
    ids: list[int]
    answer: str
    follows: list[int]
    reading: Reading


Family = list[tuple[str, str]]  # paraphrases: prompt and answer


KINDS: dict[str, Callable[[str], list[list[corpus.Question]]]] = {
    "quiz": corpus.quiz_families,  # facts that the model knows, after four questions that all prompts begin with
    "long quiz": lambda split: corpus.quiz_families(split, HEADER),
    "story": lambda split: corpus.story_families(split, 100 if split == "train" else 40, 3),  # facts in the prompt
    "notes": lambda split: corpus.notes_families(split, 100 if split == "train" else 40, 3),  # to be explained
}


def pocket_families(kind: str, seed: int = 0) -> dict[str, list[Family]]:
    """Return families of the pocket world by split: the same questions, stories or notes in other words."""
    rng, families = Random(seed), {}
    for split in corpus.SPLITS:
        chosen = [rng.sample(family, min(len(family), 4)) for family in KINDS[kind](split)]
        families[split] = [[(q.prompt, q.answer) for q in family] for family in chosen]
    return families


def read_pairs(path: Path, seed: int = 0) -> dict[str, list[Family]]:
    """Return the pairs of a CSV file as families of two by split, three fifths of them for training and a fifth each
    for validation and test; columns: source, target, and optionally answer.

    Pairs that share a text are of one family, and an answer is that of both. Raises ValueError if columns are missing
    or there are too few families.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    columns = list(rows[0]) if rows else []
    if missing := {"source", "target"} - set(columns):
        raise ValueError(f"{path} lacks columns {', '.join(sorted(missing))}, it has {', '.join(columns) or 'none'}")
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


class Study:
    """The prompts of one kind, read exactly, and everything that is fitted on them: on those of the split "train"."""

    def __init__(self, model: GPT, tokenizer: tiktoken.Encoding, name: str, families: dict[str, list[Family]],
                 encoder: str, seed: int = 0) -> None:  # fmt: skip
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
                             f"{PROPOSED.m + PROPOSED.tail} tokens: at least 3 are needed")  # fmt: skip
        every = [p.ids for split in self.prompts.values() for family in split for p in family]
        self.shortest = min(map(len, every))
        same = next((i for i in range(self.shortest) if len({ids[i] for ids in every}) > 1), self.shortest)
        same = min(same, self.shortest - PROPOSED.m - PROPOSED.tail)
        self.prefix = same if same >= 8 else 0  # a word or two are no prefix worth storing
        self.shared = read(model, every[0][: self.prefix]) if self.prefix else None
        self.train = [p for family in self.prompts["train"] for p in family]
        lengths = [len(p.answer.split()) for p in self.train if p.answer]
        long = bool(lengths) and statistics.median(lengths) > 8
        self.task = ("rouge" if long else "exact") if lengths else None  # how answers are judged
        head = len(tokenizer.decode(every[0][: self.prefix])) if self.prefix else 0
        texts = [p.text[head:] for p in self.train]
        embed = (PairEncoder.fit(tokenizer, texts, [p.family for p in self.train]) if encoder == "pairs" else
                 load_encoder(encoder, model, tokenizer))  # fmt: skip
        self.encoder, self.skip = embed, head  # only what isn't the same in all prompts says something
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
                             f"{self.model.config.n_ctx}")  # fmt: skip
        if answer:
            follows = self.tokenizer.encode(f" {answer}\n", allowed_special="all")[:CONTINUATION]
        else:
            fed = torch.tensor([ids], device=self.model.wte.weight.device)
            tokens = generate(self.model, fed, CONTINUATION, stop_id=self.tokenizer.eot_token)
            follows = [int(token) for token in tokens]
        return Prompt(family, text, ids, answer, follows, read(self.model, ids))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what make() returned the first time for this key."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def forget(self, layouts: set[Layout]) -> None:
        """Free what was made for some layouts: maps of many slots are large."""
        for key in [key for key in self.cache if layouts & {*key}]:
            del self.cache[key]

    def queries(self, split: str) -> list[tuple[Prompt, Prompt | None]]:
        """Return the prompts asked in a split, each with its stored relative; of every fifth family none is stored."""
        return [(p, family[0] if i % 5 else None) for i, family in enumerate(self.prompts[split]) for p in family[1:]]

    def stored(self, split: str) -> list[Prompt]:
        """Return what is in the library when a split is asked: a prompt of each family of it, and of the training."""
        return [f[0] for i, f in enumerate(self.prompts[split]) if i % 5] + [f[0] for f in self.prompts["train"]]

    def bank(self, layout: Layout) -> Tensor:
        """Return queries of training prompts (L, H, N, D) for fit_slots()."""
        few = [p for p in self.bankers if len(p.ids) >= layout.tail][: max(4, SAMPLES["queries"] // layout.tail)]
        return self.once(("bank", replace(layout, m=1)), lambda: torch.cat(
            [own_queries(self.model, p.reading, layout) for p in few], 2))  # fmt: skip

    def summary(self, prompt: Prompt, layout: Layout, bank: bool = False) -> Summary:
        """Return the summary of a prompt, with queries of others if asked."""
        return summarize(self.model, prompt.reading, layout, self.bank(layout) if bank else None)

    def own(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the slots fitted on one prompt."""
        return self.once((id(prompt), layout), lambda: fit_slots(self.summary(prompt, layout, bank=True)))

    def compressor(self, layout: Layout, penalty: float | None = None) -> Compressor:
        """Return stage 1 as proposed, with this penalty or a cross-validated one."""
        def fit() -> Compressor:
            summaries = [self.summary(p, layout) for p in self.sample]
            if penalty is not None:
                return Compressor(summaries, penalty)
            return Compressor.fit(summaries, [p.family for p in self.sample])

        return self.once(("compressor", layout), fit)

    def compressed(self, prompt: Prompt, layout: Layout) -> Tensor:
        """Return the slots of a prompt by stage 1 as proposed."""
        def all_at_once() -> dict[int, Tensor]:
            prompts = [p for split in ("valid", "test") for family in self.prompts[split] for p in family]
            prompts = [*{id(p): p for p in [*prompts, *self.stored("test"), *(p for pair in self.pairs for p in pair)]
                         }.values()]  # fmt: skip
            slots = self.compressor(layout)([self.summary(p, layout) for p in prompts])
            return {id(p): s for p, s in zip(prompts, slots, strict=True)}

        return self.once(("compressed", layout), all_at_once)[id(prompt)]

    def projector(self, layout: Layout, slots: Callable[[Prompt, Layout], Tensor], change: bool = False,
                  penalty: float | None = None) -> Projector:  # fmt: skip
        """Return stage 2 for slots made in one of the two ways, with this penalty or a cross-validated one."""
        def fit() -> Projector:
            sources, targets = (torch.stack([slots(pair[i], layout) for pair in self.pairs]) for i in (0, 1))
            if penalty is not None:
                return Projector(sources, targets, penalty, change)
            return Projector.fit(sources, targets, [a.family for a, _ in self.pairs], change)

        return self.once(("projector", layout, slots.__name__, change), fit)

    @cached_property
    def hidden_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ridge from a source's last hidden state to its target's: means of both, and weights."""
        x, y = (torch.stack([pair[i].reading.hidden for pair in self.pairs]).double() for i in (0, 1))
        return x.mean(0), y.mean(0), ridge(x - x.mean(0), y - y.mean(0), 0.1)


# --- Warm starts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to the first token: from a cache that stands for all but the tail of the prompt, or from logits."""

    name: str
    layout: Layout | None = None  # of the cache
    slots: Callable[[Study, Prompt], Tensor] | None = None  # of the source, (L, 2, H, m, D)
    logits: Callable[[Study, Prompt], Tensor] | None = None  # of the source, (V,)

    def cache(self, study: Study, source: Prompt, prompt: Prompt) -> KVCache:
        prefix = study.shared if self.layout.prefix else None
        return cache_of(study.model, self.slots(study, source), self.layout.start(len(prompt.ids)), prefix)


def projected(layout: Layout, fit: str, change: bool = False,
              penalties: Callable[[Study], tuple[float, float]] | None = None) -> Callable[[Study, Prompt], Tensor]:
    """Return how a source's slots, by stage 1 as proposed ("compressed") or prompt by prompt ("own"), are projected:
    once, since the map doesn't depend on the new prompt. The proposal does it at every start."""

    def slots(study: Study, source: Prompt) -> Tensor:
        def once() -> Tensor:
            first, second = penalties(study) if penalties else (None, None)
            if fit == "compressed":
                study.compressor(layout, first)
            make = getattr(study, fit)
            return study.projector(layout, make, change, second)(make(source, layout)[None])[0]

        return study.once((id(source), layout, fit, change), once)

    return slots


def mean_slots(layout: Layout) -> Callable[[Study, Prompt], Tensor]:
    """Return how to have the same slots for every prompt: the mean of those fitted on training prompts."""

    def slots(study: Study, source: Prompt) -> Tensor:
        return study.once(("mean", layout), lambda: torch.stack([study.own(p, layout) for p in study.sample]).mean(0))

    return slots


@torch.no_grad()
def by_hidden_state(study: Study, source: Prompt) -> Tensor:
    """Return logits (V,) of the source's last hidden state after a linear map."""
    before, after, weight = study.hidden_map
    x = (source.reading.hidden.double() - before) @ weight + after
    return study.model.head(x.to(study.model.wte.weight)[None, None])[0, 0]


def ways() -> list[Way]:
    """Return the proposal, steps away from it, and its baselines, in the order of the table."""
    true = replace(PROPOSED, true_positions=True)
    return [
        Way("as proposed", PROPOSED, projected(PROPOSED, "compressed")),
        Way("- at true positions", true, projected(true, "compressed")),
        Way("- slots fitted prompt by prompt", true, projected(true, "own")),
        one_slot(),
        Way("raw neighbour slots", true, lambda s, p: s.own(p, true)),
        Way("prompt-agnostic slots", true, mean_slots(true)),
        Way("hidden state", logits=by_hidden_state),
        Way("neighbour's logits", logits=lambda s, p: p.reading.logits),
        Way("no slots", Layout(1), lambda s, p: s.own(p, Layout(1))[..., :0, :]),
    ]


def one_slot(prefix: int = 0) -> Way:
    """Return the warm start from one slot, fitted prompt by prompt and projected by a ridge that pulls towards no
    change."""
    layout = Layout(1, prefix=prefix)
    after = f", after an exact prefix of {prefix}" if prefix else ""
    return Way(f"one slot, ridge towards no change{after}", layout, projected(layout, "own", change=True))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) in nats of logits (..., V)."""
    p, q = (x.cpu().double().log_softmax(-1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1)


def first_logits(study: Study, way: Way, source: Prompt, prompt: Prompt) -> Tensor:
    """Return the logits (V,) of the first token by one way."""
    if way.logits:
        return way.logits(study, source)
    tail = torch.tensor([prompt.ids[-way.layout.tail :]], device=study.model.wte.weight.device)
    with torch.no_grad():
        return study.model(tail, way.cache(study, source, prompt), last_only=True)[0, -1]


def answer_of(study: Study, prompt: Prompt, cache: KVCache | None, tail: int, n: int, first: int | None = None) -> str:
    """Return the answer that greedy decoding writes, to the end of the line: on a warm cache with only the tail fed, or
    exactly; after `first`, if that has been emitted already."""
    device, eot = study.model.wte.weight.device, study.tokenizer.eot_token
    fed = torch.tensor([[*([0] * len(cache)), *prompt.ids[-tail:]] if cache is not None else prompt.ids], device=device)
    written = [] if first is None else [first]

    def ended() -> bool:
        line = study.task != "rouge" and "\n" in study.tokenizer.decode(written[-1:])
        return bool(written) and (line or written[-1] == eot)

    if first is not None:
        fed = torch.cat([fed, torch.tensor([[first]], device=device)], 1)
    tokens = generate(study.model, fed, n - len(written), cache=cache)
    while not ended() and len(written) < n:
        written.append(int(next(tokens)))
    return study.tokenizer.decode([i for i in written if i != eot]).strip()


def nats_after(study: Study, prompt: Prompt, cache: KVCache, tail: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logits and the losses of the text that follows (up to 32 tokens), all of it read on the cache."""
    ids, device = [*tail, *prompt.follows], study.model.wte.weight.device
    with torch.no_grad():
        logits = study.model(torch.tensor([ids[:-1]], device=device), cache)[0, len(tail) - 1 :]
    target = torch.tensor(prompt.follows, device=device)
    return logits, torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


def f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the reference's words, as for SQuAD."""
    a, b = answer.lower().split(), reference.lower().split()
    common = sum(min(a.count(word), b.count(word)) for word in set(a))
    return 2 * common / (len(a) + len(b)) if a and b else float(a == b)


def rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L: the same of the longest common subsequence of words (Lin 2004, section 3.1)."""
    a, b = answer.lower().split(), reference.lower().split()
    row = [0] * (len(b) + 1)
    for x in a:
        previous = row[:]
        for j, y in enumerate(b):
            row[j + 1] = previous[j] + 1 if x == y else max(previous[j + 1], row[j])
    return 2 * row[-1] / (len(a) + len(b)) if a and b else float(a == b)


# --- The protocol ---------------------------------------------------------------------------------------------------


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


def retrieve(study: Study, split: str, guard: bool = False, without_relatives: bool = False) -> list[Query]:
    """Look every prompt of a split up in its library, or in one that has no relatives of any."""
    stored = [p for p in study.stored(split) if not (without_relatives and p.family.startswith(split))]
    library = Library(study.model, Layout(1), study.encoder, [p.text for p in stored], torch.zeros(len(stored), 1),
                      guard=guard, skip=study.skip)  # fmt: skip
    queries = []
    for prompt, relative in study.queries(split):
        found, similarity = library.find(prompt.text)
        relative = None if without_relatives else relative
        queries.append(Query(prompt, relative, stored[found] if found >= 0 else None, similarity))
    return queries


def threshold(study: Study) -> tuple[float, float | None]:
    """Return tau, by the largest difference of true and false positives on validation prompts, and the area under that
    curve. Positive: the relative is found. Negative: something else is, or anything where no relative is stored.

    The proposal takes tau from training prompts; on those the default encoder was fitted, so that they seem closer.
    """
    asked = retrieve(study, "valid")
    good = [q.similarity for q in asked if q.right]
    bad = [q.similarity for q in asked if not q.right]
    bad += [q.similarity for q in retrieve(study, "valid", without_relatives=True)]
    if not good:
        return math.inf, None
    best = max(sorted({*good, *bad}), key=lambda tau: share(good, tau) - share(bad, tau))
    return float(best), area(good, bad)


def share(values: Sequence[float], least: float) -> float:
    """Return the share of values that are at least so much."""
    return sum(v >= least for v in values) / max(1, len(values))


def area(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """Return the probability that a good one's score is higher than a bad one's (the area under the ROC curve), None if
    there are only good or only bad ones."""
    if not good or not bad:
        return None
    g, b = np.array(good)[:, None], np.array(bad)
    return float(((g > b) + 0.5 * (g == b)).mean())


def measure(study: Study, way: Way, source: Prompt, prompt: Prompt) -> dict[str, Any]:
    """Return one way's error and answers for one prompt, measured once."""
    return study.once((way.name, id(source), id(prompt)), lambda: measured(study, way, source, prompt))


def measured(study: Study, way: Way, source: Prompt, prompt: Prompt) -> dict[str, Any]:
    """Return one way's error and answers for one prompt."""
    exact, n = prompt.reading.logits, 80 if study.task == "rouge" else 24
    cold = study.once(("cold", id(prompt)), lambda: cold_run(study, prompt, n))
    logits = first_logits(study, way, source, prompt)
    first = int(logits.argmax())
    row: dict[str, Any] = {
        "family": prompt.family, "kl": float(divergence(exact, logits)), "reverse": float(divergence(logits, exact)),
        "same_first": first == int(exact.argmax()), "good": float(divergence(exact, logits)) <= GOOD_KL,
    }  # fmt: skip
    swapped = cold["answer"] if row["same_first"] else answer_of(study, prompt, None, 0, n, first)
    answers = {"cold": cold["answer"], "swapped": swapped}
    if way.layout:
        cache, tail = way.cache(study, source, prompt), way.layout.tail
        answers["warm"] = answer_of(study, prompt, cache.clone(), tail, n)
        after, nats = nats_after(study, prompt, cache, prompt.ids[-tail:])
        row["nats"] = float(nats.mean() - cold["nats"].mean())
        row["good"] = row["good"] or math.expm1(row["nats"]) <= GOOD_PERPLEXITY
        row["drift"] = divergence(cold["logits"], after).tolist()
    if prompt.answer:
        for name, answer in answers.items():
            row |= {f"exact_{name}": float(answer == prompt.answer), f"f1_{name}": f1(answer, prompt.answer),
                    f"rouge_{name}": rouge_l(answer, prompt.answer)}  # fmt: skip
    return row


def cold_run(study: Study, prompt: Prompt, n: int) -> dict[str, Any]:
    """Return the exact answer, and the logits and losses of the text that follows."""
    cache = read_exactly(study.model, torch.tensor([prompt.ids[:-1]], device=study.model.wte.weight.device))
    logits, nats = nats_after(study, prompt, cache, prompt.ids[-1:])
    return {"answer": answer_of(study, prompt, None, 0, n), "logits": logits, "nats": nats}


def interval(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> tuple[float, float, float]:
    """Return the mean and its 95% interval, by bootstrap over families: paraphrases aren't independent."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(value(row))
    sums = np.array([(sum(values), len(values)) for values in by_family.values()])
    draws = np.random.default_rng(0).integers(len(sums), size=(2000, len(sums)))
    means = sums[draws].sum(1)
    low, high = np.quantile(means[:, 0] / means[:, 1], [0.025, 0.975])
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means of measure()'s rows, with 95% intervals where the proposal asks for them."""
    result: dict[str, Any] = {
        "prompts": len(rows), "kl": interval(rows, lambda r: r["kl"]),
        "reverse": interval(rows, lambda r: r["reverse"]), "low_kl": interval(rows, lambda r: r["kl"] <= GOOD_KL),
        "good": interval(rows, lambda r: r["good"]), "same_first": interval(rows, lambda r: r["same_first"]),
    }  # fmt: skip
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


def on_the_plane(study: Study, split: str) -> list[dict[str, Any]]:
    """Chart KL against the time to the first token, retrieval included, over exact prefix x slots x tail, with the
    relative as the source. Last comes what an exact prefix alone allows: reading all of the rest.
    """
    asked = [(p, r) for p, r in study.queries(split) if r]
    candidates = []
    for prefix in dict.fromkeys((0, study.prefix)):
        for tail in (1, 4, 16, 64):
            for m in (1, 2, 4, 8, 16, 32):
                layout = Layout(m, tail, prefix)
                if all(len(x.ids) - prefix - tail >= m for pair in asked for x in pair):
                    candidates.append(own_way(layout))
                    if tail == 1 and m == 1:
                        candidates.append(one_slot(prefix))
    points = []
    for way in tqdm(candidates, desc=f"{study.name}: plane", leave=False):
        kl = [float(divergence(p.reading.logits, first_logits(study, way, r, p))) for p, r in asked]
        points.append({"way": way, "name": way.name, **{k: getattr(way.layout, k) for k in ("m", "tail", "prefix")},
                       "kl": float(np.mean(kl)), "good": float(np.mean(np.array(kl) <= GOOD_KL))})  # fmt: skip
    starts = {point["name"]: (lambda p, r, way=point["way"]: first_logits(study, way, r, p)) for point in points}
    if study.prefix:
        points.append({"way": None, "name": "exact prefix, all of the rest", "m": 0, "tail": 0, "prefix": study.prefix,
                       "kl": 0.0, "good": 1.0})  # fmt: skip
        starts[points[-1]["name"]] = lambda p, r: read_rest(study, p)
    library = library_of(study, None, split)
    starts |= {"cold": lambda p, r: read_cold(study, p), "retrieval": lambda p, r: library.find(p.text)}
    seconds = timed(starts, asked[:: max(1, len(asked) // 8)][:8], 5)
    times = {name: statistics.median(several) for name, several in seconds.items()}
    for point in points:
        point["saved"] = 1 - (times[point["name"]] + times["retrieval"] * (point["m"] > 0)) / times["cold"]
    study.forget({way.layout for way in candidates})
    return points


def own_way(layout: Layout) -> Way:
    """Return the warm start from the neighbour's slots, fitted prompt by prompt, as they are."""
    prefix = f", after an exact prefix of {layout.prefix}" if layout.prefix else ""
    name = f"{layout.m} raw slots, tail of {layout.tail}{prefix}"
    return Way(name, layout, lambda study, source: study.own(source, layout))


def read_cold(study: Study, prompt: Prompt) -> Tensor:
    """Return the logits of the first token after reading all."""
    with torch.no_grad():
        return study.model(torch.tensor([prompt.ids], device=study.model.wte.weight.device), KVCache(), last_only=True)


def read_rest(study: Study, prompt: Prompt, n: int | None = None) -> Tensor:
    """Return the logits of the first token after reading what follows the shared prefix, or n stored tokens."""
    kv = (prompt.reading.kv[..., :n, :] if n else study.shared.kv).to(study.model.wte.weight)
    cache = KVCache([layer[:, None] for layer in kv], torch.arange(kv.size(-2), device=kv.device))
    with torch.no_grad():
        return study.model(torch.tensor([prompt.ids[len(cache) :]], device=kv.device), cache, last_only=True)


def timed(starts: dict[str, Callable[..., Any]], asked: Sequence[tuple[Any, ...]],
          repeats: int) -> dict[str, list[float]]:  # fmt: skip
    """Return the median seconds of each start for each of the prompts asked, in turn, until its result is there."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in asked] for name in starts}
    for turn in range(repeats + 1):
        for i, arguments in enumerate(asked):
            for name, start in starts.items():
                begun = time.perf_counter()
                result = start(*arguments)
                if isinstance(result, Tensor):
                    result.argmax().item()  # waits for the device
                if turn:  # the first warms up
                    seconds[name][i].append(time.perf_counter() - begun)
    return {name: [*map(statistics.median, several)] for name, several in seconds.items()}


def library_of(study: Study, way: Way | None, split: str, tau: float = -1.0, guard: bool = False) -> Library:
    """Return the library that prompts of a split meet, with the slots of a way, or with none if it is only to be
    searched."""
    layout = way.layout if way else Layout(1)
    stored = [p for p in study.stored(split) if len(p.ids) - layout.prefix - layout.tail >= layout.m]
    slots = torch.stack([way.slots(study, p) for p in stored]) if way else torch.zeros(len(stored), 1)
    return Library(study.model, layout, study.encoder, [p.text for p in stored], slots, threshold=tau, guard=guard,
                   skip=study.skip, prefix=study.shared if layout.prefix else None)  # fmt: skip


def latencies(study: Study, asked: dict[Way, list[Query]], repeats: int) -> dict[str, dict[str, Any]]:
    """Return seconds to the first, second and eighth token of whole starts: retrieval, slots, tail; and the share of
    the time to the first that is saved, on average over prompts, with its 95% interval."""
    device = study.model.wte.weight.device
    queries = next(iter(asked.values()))
    prompts, stored = [q.prompt for q in queries[:: max(1, len(queries) // 16)][:16]], study.stored("test")
    gaps: dict[tuple[str, int], list[float]] = {}

    def first(way: Way) -> Callable[[Prompt], Tensor]:
        library = library_of(study, way if way.layout else None, "test", guard=way.name.startswith("ours"))

        def start(prompt: Prompt) -> Tensor:
            if way.logits:
                return way.logits(study, stored[library.find(prompt.text)[0]])
            warm = library.start(prompt.text, prompt.ids)
            if warm is None:
                return read_cold(study, prompt)
            with torch.no_grad():
                return study.model(torch.tensor([prompt.ids[-way.layout.tail :]], device=device), warm, last_only=True)

        return start

    def eight(way: Way | None, emit: int) -> Callable[[Prompt], None]:
        library = library_of(study, way, "test") if way else None

        def run(prompt: Prompt) -> None:
            ids, at = torch.tensor([prompt.ids], device=device), []
            warm = library.start(prompt.text, prompt.ids) if library else None
            tokens = (generate(study.model, ids, 8) if warm is None else
                      generate_warm(study.model, ids, warm, way.layout.tail, 8, emit=emit))  # fmt: skip
            for token in tokens:
                int(token)
                at.append(time.perf_counter())
            gaps.setdefault((way.name if way else "cold", emit), []).append(at[1] - at[0])

        return run

    with_slots = [way for way in asked if way.layout]
    starts: dict[str, Callable[[Prompt], Any]] = {"cold": lambda p: read_cold(study, p)}
    starts["exact prefix hit"] = lambda p: read_rest(study, p, len(p.ids) - 1)
    starts |= {way.name: first(way) for way in asked}
    args = [(p,) for p in prompts]
    ttft = timed(starts, args, repeats)
    eighth = timed({"cold": eight(None, 1)} | {way.name: eight(way, 1) for way in with_slots}, args[:8], repeats)
    on_slots = timed({way.name: eight(way, 8) for way in with_slots}, args[:8], repeats)
    result: dict[str, dict[str, Any]] = {}
    for name, seconds in ttft.items():
        rows = [{"family": p.family, "saved": 1 - warm / cold}
                for p, warm, cold in zip(prompts, seconds, ttft["cold"], strict=True)]  # fmt: skip
        result[name] = {"ttft": statistics.median(seconds), "saved": interval(rows, lambda r: r["saved"])}
        for key, several in (("eighth", eighth), ("eighth_on_slots", on_slots)):
            result[name][key] = statistics.median(several[name]) if name in several else None
        if (name, 1) in gaps:
            result[name]["second_after_first"] = statistics.median(gaps[name, 1])
    return result


def sweep(study: Study) -> list[dict[str, Any]]:
    """Return KL over the number of slots, of both ways of stage 1, both position rules, with and without the map; the
    relative is given. Penalties are those found at the proposal's number of slots."""
    asked = [(p, r) for p, r in study.queries("test") if r]
    true = replace(PROPOSED, true_positions=True)

    def found(layout: Layout, fit: str) -> Callable[[Study], tuple[float, float]]:
        def penalties(s: Study) -> tuple[float, float]:
            return s.compressor(layout).penalty, s.projector(layout, getattr(s, fit)).penalty

        return penalties

    rows = []
    for m in tqdm(SLOTS, desc=f"{study.name}: slots", leave=False):
        if study.shortest - 1 < m:
            continue
        here, there = replace(PROPOSED, m=m), replace(true, m=m)
        ways = {
            "as proposed": Way("", here, projected(here, "compressed", penalties=found(PROPOSED, "compressed"))),
            "at true positions": Way("", there, projected(there, "compressed", penalties=found(true, "compressed"))),
            "fitted prompt by prompt": Way("", there, projected(there, "own", penalties=found(true, "own"))),
            "fitted prompt by prompt, no map": own_way(there),
        }
        for name, way in ways.items():
            kl = [float(divergence(p.reading.logits, first_logits(study, way, r, p))) for p, r in asked]
            good = float(np.mean(np.array(kl) <= GOOD_KL))
            rows.append({"m": m, "way": name, "kl": float(np.mean(kl)), "good": good})
        if m != PROPOSED.m:
            study.forget({here, there})
    return rows


def confidence(study: Study, way: Way, queries: list[Query], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how well two signals tell good warm starts (KL at most 0.05) from bad, for one slot of a prompt's own: the
    similarity, and the projection's residual on the validation prompts most like the source. Areas under the ROC curve;
    0.5 is chance."""
    projector = study.projector(way.layout, study.own, change=True)
    sources, errors = [], []
    for family in study.prompts["valid"]:
        target = torch.stack([study.own(p, way.layout) for p in family[1:]])
        error = projector(study.own(family[0], way.layout)[None]) - target
        sources.append(family[0].text)
        errors.append(float(error.square().mean()))
    alike = study.encoder([q.found.text[study.skip :] for q in queries]) @ study.encoder(
        [text[study.skip :] for text in sources]).T  # fmt: skip
    residual = [float(np.mean(np.array(errors)[np.argsort(-row)[:5]])) for row in alike]
    good = [row["kl"] <= GOOD_KL for row in rows]

    def split(values: Sequence[float]) -> float:
        parts = ([v for v, g in zip(values, good, strict=True) if g is wanted] for wanted in (True, False))
        return area(*parts)

    return {"similarity": split([q.similarity for q in queries]), "residual": split([-r for r in residual])}


def after_the_swap(study: Study, way: Way, asked: Sequence[tuple[Prompt, Prompt]],
                   emitted: int = 4) -> dict[str, float]:  # fmt: skip
    """Return KL at the next token when so many have been emitted from slots: if they go on, and if the exact cache
    takes the emitted tokens over by the one-step alignment. (If it reads them again there is no difference.)"""
    result: dict[str, list[float]] = {"no swap": [], "aligned": []}
    device = study.model.wte.weight.device
    for prompt, source in asked:
        ids, tail, warm = torch.tensor([prompt.ids], device=device), way.layout.tail, way.cache(study, source, prompt)
        stand_in = torch.cat([ids.new_zeros(1, len(warm)), ids[:, -tail:]], 1)
        tokens = torch.cat([*generate(study.model, stand_in, emitted, cache=warm)], 1)  # (1, emitted)
        exact = read_exactly(study.model, ids)
        aligned = exact.clone()
        move_over(warm, aligned, tail, emitted - 1)
        with torch.no_grad():
            expected = study.model(tokens, exact, last_only=True)[0, -1]
            for name, cache in {"no swap": warm, "aligned": aligned}.items():
                logits = study.model(tokens[:, -1:], cache, last_only=True)[0, -1]
                result[name].append(float(divergence(expected, logits)))
    return {name: float(np.mean(values)) for name, values in result.items()}


# --- How long a start takes -----------------------------------------------------------------------------------------


def by_length(model: GPT, lengths: Sequence[int], repeats: int) -> list[dict[str, float]]:
    """Return seconds to the first token over the length of the prompt: cold, after an exact prefix hit, and from slots,
    mapped at every start, as the proposal has it, or when they were stored. Times don't depend on the numbers."""
    c, device = model.config, model.wte.weight.device

    m, F = PROPOSED.m, 2 * PROPOSED.m * c.head_dim
    projector, slots = Projector.__new__(Projector), torch.zeros(1, c.n_layer, 2, c.n_head, m, c.head_dim)
    projector.mean, projector.offset = torch.zeros(2, c.n_layer, c.n_head, 1, F)
    projector.scale, projector.change = torch.ones(c.n_layer, c.n_head, 1, F), False
    projector.weight = torch.zeros(c.n_layer, c.n_head, F, F)
    rows = []
    for T in lengths:
        ids = torch.randint(c.vocab_size, (1, T), device=device)
        exact = read_exactly(model, ids[:, :-1])

        @torch.no_grad()
        def feed(cache: KVCache, ids: Tensor = ids) -> Tensor:
            return model(ids[:, -1:] if len(cache) else ids, cache, last_only=True)

        def warm(mapped: bool, T: int = T, feed: Callable[[KVCache], Tensor] = feed) -> Tensor:
            return feed(cache_of(model, (projector(slots) if mapped else slots)[0], T - 1))

        starts = {
            "cold": lambda feed=feed: feed(KVCache()),
            "exact prefix hit": lambda feed=feed, exact=exact: feed(KVCache([*exact.layers], exact.pos)),
            f"{PROPOSED.m} slots, mapped at the start": lambda warm=warm: warm(True),
            f"{PROPOSED.m} slots": lambda warm=warm: warm(False),
        }  # fmt: skip
        rows.append({"length": T} | {name: several[0] for name, several in timed(starts, [()], repeats).items()})
    return rows


# --- The report -----------------------------------------------------------------------------------------------------


def examine(study: Study, repeats: int, default: Way | None = None) -> dict[str, Any]:
    """Run the whole protocol on one kind of prompts and return its record. default: our warm start of another kind."""
    steps = tqdm(total=5, desc=study.name, leave=False)
    tau, auc = threshold(study)
    retrieved = {guard: retrieve(study, "test", guard) for guard in (False, True)}
    high, guarded = ([q for q in queries if q.similarity >= tau] for queries in retrieved.values())
    record: dict[str, Any] = {
        "tokens": statistics.mean(len(p.ids) for p in study.train), "prefix": study.prefix, "task": study.task,
        "prompts": {split: sum(map(len, families)) for split, families in study.prompts.items()},
        "dropped": study.dropped, "tau": tau if math.isfinite(tau) else None, "auc": auc,
        "retrieval": {
            "asked": len(retrieved[False]), "stored": len(study.stored("test")),
            "with a relative": sum(q.relative is not None for q in retrieved[False]),
            **{f"{'guarded, ' if guard else ''}{what}": value for guard, asked in retrieved.items() for what, value in {
                "found": sum(q.right for q in asked), "warm": sum(q.similarity >= tau for q in asked),
                "warm and wrong": sum(q.similarity >= tau and not q.right for q in asked)}.items()},
        },
    }  # fmt: skip
    if not high or not guarded:
        return record  # every start is cold
    plane = on_the_plane(study, "valid")
    steps.update()
    best = chosen(plane)
    ours = [replace(best, name=f"ours: {best.name}")]
    if default and (other := adapted(study, default)) and other.name != best.name:
        ours.append(replace(other, name=f"ours for the first kind: {other.name}"))
    asked = {way: high for way in ways()} | {way: guarded for way in ours}
    given = [(p, r) for p, r in study.queries("test") if r]
    rows = {way.name: [measure(study, way, q.found, q.prompt) for q in queries] for way, queries in asked.items()}
    rows_given = {way.name: [measure(study, way, r, p) for p, r in given] for way in asked}
    steps.update()
    proposal, one = ways()[0], one_slot()
    record |= {
        "best": ours[0].name, "best_way": ours[0], "plane": [{k: v for k, v in p.items() if k != "way"} for p in plane],
        "ways": {name: {"retrieved": summary_of(rows[name]), "given": summary_of(rows_given[name])} for name in rows},
        "without_guard": summary_of([measure(study, ours[0], q.found, q.prompt) for q in high]),
        "latency": latencies(study, asked, repeats),
    }  # fmt: skip
    steps.update()
    record["sweep"] = sweep(study)
    steps.update()
    record |= {
        "bins": bins(study, retrieved[False], (proposal, one, ours[0])),
        "tau_ablation": ablate_tau(study, retrieved[False], proposal, ours[0]),
        "confidence": confidence(study, one, high, rows[one.name]), "swap": after_the_swap(study, ours[0], given[:24]),
        "verdicts": {way.name: verdict(record, way) for way in (proposal, *ours)},
    }  # fmt: skip
    steps.close()
    return record


def chosen(plane: Sequence[dict[str, Any]]) -> Way:
    """Return the way with the most prompts of low KL among those that save enough."""
    warm = [point for point in plane if point["way"]]
    fast = [point for point in warm if point["saved"] >= LEAST_SAVED]
    return max(fast or warm, key=lambda point: (point["good"], -point["kl"]))["way"]


def adapted(study: Study, way: Way) -> Way | None:
    """Return the same way for the prefix of another kind of prompts, None if its prompts are too short for that."""
    prefix = study.prefix if way.layout.prefix else 0
    if study.shortest - prefix - way.layout.tail < way.layout.m:
        return None
    return one_slot(prefix) if "one slot" in way.name else own_way(replace(way.layout, prefix=prefix))


def bins(study: Study, queries: list[Query], three: Sequence[Way]) -> list[dict[str, Any]]:
    """Return KL by thirds of the similarity of what is found, and by whether that is the relative, for all queries."""
    edges = np.quantile([q.similarity for q in queries], [1 / 3, 2 / 3])
    of = np.digitize([q.similarity for q in queries], edges)
    names = [f"lowest, below {edges[0]:.3f}", f"middle, below {edges[1]:.3f}", "highest"]
    groups = {name: of == i for i, name in enumerate(names)}
    right = np.array([q.right for q in queries])
    groups |= {"the relative": right, "another": ~right}
    kl = {way.name: np.array(errors(study, way, queries)) for way in three}
    return [{"bin": name, "way": way, "prompts": int(some.sum()), "kl": float(values[some].mean()),
             "good": float((values[some] <= GOOD_KL).mean())}
            for name, some in groups.items() if some.any() for way, values in kl.items()]  # fmt: skip


def errors(study: Study, way: Way, queries: list[Query]) -> list[float]:
    """Return KL of what a way makes of the prompt that was found for each query."""
    return [float(divergence(q.prompt.reading.logits, first_logits(study, way, q.found, q.prompt))) for q in queries]


def ablate_tau(study: Study, queries: list[Query], *two: Way) -> list[dict[str, Any]]:
    """Return what is warm, and how good, for thresholds between the lowest and the highest similarity."""
    kl = {way.name: errors(study, way, queries) for way in two}
    result = []
    for tau in np.quantile([q.similarity for q in queries], np.linspace(0, 0.9, 10)):
        warm = [i for i, q in enumerate(queries) if q.similarity >= tau]
        result.append({"tau": float(tau), "warm": len(warm) / len(queries),
                       "wrong": sum(not queries[i].right for i in warm) / len(warm),
                       "good": {n: float(np.mean([v[i] <= GOOD_KL for i in warm])) for n, v in kl.items()}})
    return result


def verdict(record: dict[str, Any], way: Way) -> dict[str, Any]:
    """Return the proposal's thresholds for one way, on prompts at least as similar as tau, and what holds. As there,
    the exact cache is swapped in after the first token."""
    found, (saved, *around) = record["ways"][way.name]["retrieved"], record["latency"][way.name]["saved"]
    good, *good_around = found["good"]
    parts: list[tuple[str, bool | None, str]] = [
        ("first token at least 35% sooner", saved >= LEAST_SAVED, between(saved, around)),
        ("KL <= 0.05, or perplexity <= 5% up, on 80%", good >= GOOD_SHARE, between(good, good_around)),
    ]
    task = record["task"]
    if task is None:
        parts.append(("task within 1%", None, "no answers to judge by"))
    else:
        lost, *lost_around = found[f"{task}_lost"]
        name = {"exact": "exact match", "rouge": "ROUGE-L"}[task]
        parts.append((f"{name} at most 1% lower", lost <= GOOD_TASK, f"lower by {between(lost, lost_around)}"))
    holds = [part[1] for part in parts]
    word = "REJECTED" if False in holds else "UNDECIDED" if None in holds else "SUPPORTED"
    return {"verdict": word, "parts": [{"what": what, "holds": h, "figures": text} for what, h, text in parts]}


def between(mean: float, interval: Sequence[float]) -> str:
    """Return a share and its interval as text."""
    return f"{mean:.0%} ({interval[0]:.0%} to {interval[1]:.0%})"


def both_positions(encoder: str, seed: int) -> list[dict[str, Any]]:
    """Return KL with learned and with rotary positions, by the proposal's position rule and at true positions, on quiz
    questions whose relative is given."""
    rows = []
    for name, model_class in (("pocket", GPT), ("pocket-rotary", rope.GPT)):
        study = Study(load_model(name, model_class=model_class), load_tokenizer(name), "quiz",
                      pocket_families("quiz", seed), encoder, seed)  # fmt: skip
        asked = [(p, r) for p, r in study.queries("test") if r]

        def add(way: Way, what: str, m: int, positions: str, study: Study = study, asked: Any = asked,
                name: str = name) -> None:  # fmt: skip
            kl = [float(divergence(p.reading.logits, first_logits(study, way, r, p))) for p, r in asked]
            rows.append({"model": name, "m": m, "positions": positions, "way": what, "kl": float(np.mean(kl)),
                         "good": float(np.mean(np.array(kl) <= GOOD_KL))})  # fmt: skip

        for m in (1, PROPOSED.m):
            for positions in ("after the slots", "true"):
                layout = Layout(m, true_positions=positions == "true")
                add(Way("", layout, projected(layout, "compressed")), "as proposed", m, positions)
                add(own_way(layout), "raw, fitted prompt by prompt", m, positions)
        add(Way("", logits=lambda s, p: p.reading.logits), "neighbour's logits", 0, "true")
    return rows


def report(model: GPT, tokenizer: tiktoken.Encoding, kinds: dict[str, dict[str, list[Family]]], encoder: str,
           repeats: int, name_of_model: str, seed: int, out: Path) -> None:  # fmt: skip
    """Run the protocol on every kind of prompts; print, write and draw what came of it. The first kind's library is
    kept with our warm start, which the other kinds are measured with, too."""
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"model": name_of_model, "encoder": Path(encoder).name, "repeats": repeats, "seed": seed,
                               "kinds": {}}  # fmt: skip

    def write() -> None:
        text = json.dumps(summary, indent=2, allow_nan=False)
        write_atomically(out / "summary.json", lambda file: file.write_text(text + "\n"))

    default = None
    for name, families in kinds.items():
        study = Study(model, tokenizer, name, families, encoder, seed)
        record = examine(study, repeats, default)
        ours = record.pop("best_way", None)
        if default is None and ours:
            default = ours
            library_of(study, ours, "test", record["tau"], guard=True).save(out / "library", encoder)
        summary["kinds"][name] = record
        print_kind(name, record)
        sys.stdout.flush()
        write()
        del study
    lengths = [n for n in (32, 64, 128, 256, 512, 1000) if n <= model.config.n_ctx]
    summary["lengths"] = {name_of_model: by_length(model, lengths, repeats)}
    if name_of_model == "pocket":
        print("\nTimes at GPT-2 124M's geometry, with random weights ...")
        large = GPT(GPTConfig()).eval()
        summary["lengths"]["GPT-2 124M"] = by_length(large, (32, 64, 128, 256, 512, 1000), min(repeats, 5))
        del large
        summary["positions"] = both_positions(encoder, seed)
    print_lengths(summary["lengths"])
    if "positions" in summary:
        print_positions(summary["positions"])
    write()
    draw(summary, out)
    print(f"\nWritten to {out}")


def print_kind(name: str, r: dict[str, Any]) -> None:
    """Print the tables of one kind of prompts."""
    prompts, found = r["prompts"], r["retrieval"]
    print(f"\n=== {name}: prompts of {r['tokens']:.0f} tokens, the first {r['prefix']} the same in all; "
          f"{prompts['train']} to fit on, {prompts['valid']} and {prompts['test']} held out"
          + (f"; {r['dropped']} are too short" if r["dropped"] else ""))  # fmt: skip
    print(f"\nRetrieval: {found['asked']} asked, {found['with a relative']} have a relative among {found['stored']} "
          f"stored; {found['found']} find it.")  # fmt: skip
    if "ways" not in r:
        print("Nothing is similar enough: every start is cold.")
        return
    print(f"At tau = {r['tau']:.3f} (area under ROC {text_of(r['auc'])}), {found['warm']} start warm, "
          f"{found['warm and wrong']} of them from another; with the guard on names {found['guarded, warm']} and "
          f"{found['guarded, warm and wrong']}.\n")  # fmt: skip
    task = r["task"] or "exact"
    print(f"{'ms to the':>44}{'':>19}KL(cold || warm){'':>7}reverse  same 1st  perplexity   "
          f"{'ROUGE-L' if task == 'rouge' else 'exact match'}")
    print(f"{'way':<36}{'first':>6} 8th  saved   mean (95% interval)  <= 0.05       KL     token   of answer   "
          "slots  swap")  # fmt: skip
    cold = next(iter(r["ways"].values()))["retrieved"]
    for way, t in r["latency"].items():
        row = r["ways"].get(way, {}).get("retrieved")
        eighth = f"{1e3 * t['eighth']:4.0f}" if t["eighth"] else "   -"
        line = f"{way[:35]:<36}{1e3 * t['ttft']:>6.1f}{eighth}{t['saved'][0]:>7.0%}"
        if row is None:  # exact
            right = f"{cold[f'{task}_cold']:>14.0%}" if way == "cold" and f"{task}_cold" in cold else ""
            print(f"{line}   0.000{'':>21}100%    0.000      100%         +0%{right}")
            continue
        kl, low, high = row["kl"]
        ppl = f"{row['perplexity']:+.0%}" if "perplexity" in row else "-"
        tasks = [f"{row[f'{task}_{k}']:.0%}" if f"{task}_{k}" in row else "-" for k in ("warm", "swapped")]
        print(f"{line}{kl:>8.3f} ({low:.3f} to {high:.3f}){row['low_kl'][0]:>7.0%}{row['reverse'][0]:>9.3f}"
              f"{row['same_first'][0]:>10.0%}{ppl:>12}{tasks[0]:>8}{tasks[1]:>6}")  # fmt: skip
    ours, latency = r["ways"][r["best"]]["retrieved"], r["latency"]
    print(f"\n{r['best']}: with the guard on names, without it KL {r['without_guard']['kl'][0]:.3f} instead of "
          f"{ours['kl'][0]:.3f}.\nIts second token comes {1e3 * latency[r['best']]['second_after_first']:.1f} ms after "
          f"the first, when the exact cache is there (cold: {1e3 * latency['cold']['second_after_first']:.1f}).\n"
          f"KL after 4 tokens from slots: {r['swap']['no swap']:.3f} going on, {r['swap']['aligned']:.3f} after a swap "
          "with the one-step alignment, 0 with the emitted tokens read again.\n"
          "What tells good starts from bad, for one slot: area under ROC of the similarity "
          f"{text_of(r['confidence']['similarity'])}, of the projection's residual "
          f"{text_of(r['confidence']['residual'])}.")  # fmt: skip
    header = "".join(f"{m:>14}" for m in dict.fromkeys(x["m"] for x in r["sweep"]))
    print(f"\nKL (<= 0.05) by slots, the relative given:{header[6:]}")
    for way in dict.fromkeys(x["way"] for x in r["sweep"]):
        cells = [f"{x['kl']:.2f} ({x['good']:.0%})" for x in r["sweep"] if x["way"] == way]
        print(f"{way:>34}  " + "".join(f"{cell:>14}" for cell in cells))
    print("\nKL (<= 0.05) by similarity of what is found, and by what it is:")
    for some in dict.fromkeys(x["bin"] for x in r["bins"]):
        cells = [x for x in r["bins"] if x["bin"] == some]
        print(f"{some:>34}  " + "".join(f"{x['kl']:>9.3f} ({x['good']:.0%})" for x in cells)
              + f"   {cells[0]['prompts']} prompts")  # fmt: skip
    print("\nThresholds: tau, started warm, of these from another, KL <= 0.05 as proposed and by ours:")
    for row in r["tau_ablation"][::3]:
        print(f"{row['tau']:>10.3f}{row['warm']:>8.0%}{row['wrong']:>8.0%}"
              + "".join(f"{x:>8.0%}" for x in row["good"].values()))  # fmt: skip
    print("\nWhat is worth its time (validation, the relative given):")
    for point in frontier(r["plane"]):
        print(f"  {point['name']:<60} saves {point['saved']:.0%}, KL {point['kl']:.3f}, <= 0.05 in {point['good']:.0%}")
    for way, v in r["verdicts"].items():
        words = {True: "yes", False: "NO", None: "?"}
        parts = "; ".join(f"{p['what']}: {words[p['holds']]} ({p['figures']})" for p in v["parts"])
        print(f"\n{way}: {v['verdict']}. {parts}")


def text_of(value: float | None) -> str:
    """Return a figure as text, or that there is none."""
    return "-" if value is None else f"{value:.2f}"


def frontier(plane: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points that no other beats in both time and KL, the fastest first."""
    chosen: list[dict[str, Any]] = []
    for point in sorted(plane, key=lambda p: (-p["saved"], p["kl"])):
        if not chosen or point["kl"] < chosen[-1]["kl"]:
            chosen.append(point)
    return chosen


def print_lengths(lengths: dict[str, list[dict[str, float]]]) -> None:
    """Print the time to the first token over the length of the prompt."""
    print("\nms to the first token over the length of the prompt (retrieval not counted)")
    for model, rows in lengths.items():
        names = [key for key in rows[0] if key != "length"]
        print(f"\n{model:>14}" + "".join(f"{name:>30}" for name in names))
        for row in rows:
            print(f"{row['length']:>14,}" + "".join(f"{1e3 * row[name]:>30.1f}" for name in names))


def print_positions(rows: Sequence[dict[str, Any]]) -> None:
    """Print KL by kind of positions and position rule."""
    print("\nKL (<= 0.05) on quiz questions, the relative given, by kind of positions and where the tail is read\n")
    print(f"{'model':>14} slots  {'way':<30}{'after the slots':>17}{'true':>17}")
    grouped: dict[tuple[Any, ...], dict[str, str]] = {}
    for r in rows:
        group = grouped.setdefault((r["model"], r["m"], r["way"]), {})
        group[r["positions"]] = f"{r['kl']:.3f} ({r['good']:.0%})"
    for key, cells in grouped.items():
        print(f"{key[0]:>14} {key[1]:>5}  {key[2]:<30}{cells.get('after the slots', ''):>17}{cells['true']:>17}")


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(summary: dict[str, Any], out: Path) -> None:
    """Draw KL by similarity and by slots, the first token by length, and the plane of KL and time, a panel a kind."""
    kinds = {name: record for name, record in summary["kinds"].items() if "ways" in record}

    def by_bin(axes: Any, r: dict[str, Any]) -> None:
        names = [*dict.fromkeys(x["bin"] for x in r["bins"])]
        for i, way in enumerate(dict.fromkeys(x["way"] for x in r["bins"])):
            kl = [x["kl"] for x in r["bins"] if x["way"] == way]
            label = "ours" if way.startswith("ours") else way
            axes.bar(np.arange(len(kl)) + 0.27 * (i - 1), np.maximum(kl, 1e-4), 0.25, label=label,
                     hatch=("", "//", "..")[i % 3], edgecolor="white")  # fmt: skip
        labels = [name.replace(", ", "\n").replace("the ", "the\n") for name in names]
        axes.set_xticks(np.arange(len(names)), labels, fontsize=7)
        axes.axhline(GOOD_KL, color="black", linestyle=":", linewidth=1)
        axes.set_yscale("log")

    def by_slots(axes: Any, r: dict[str, Any]) -> None:
        for i, way in enumerate(dict.fromkeys(x["way"] for x in r["sweep"])):
            points = [(x["m"], x["kl"]) for x in r["sweep"] if x["way"] == way]
            axes.plot(*zip(*points, strict=True), STYLES[i % 4], markersize=4, label=way)
        axes.axhline(GOOD_KL, color="black", linestyle=":", linewidth=1)
        doubled(axes, sorted({x["m"] for x in r["sweep"]}))

    def plane(axes: Any, r: dict[str, Any]) -> None:
        raw = [p for p in r["plane"] if "raw" in p["name"]]
        marks = {
            "raw slots": ("C0o", [p for p in raw if not p["prefix"]]),
            "exact prefix + raw slots": ("C1^", [p for p in raw if p["prefix"]]),
            "one slot, projected": ("C2D", [p for p in r["plane"] if "ridge" in p["name"]]),
            "exact prefix, all of the rest": ("C3*", [p for p in r["plane"] if not p["m"]]),
        }
        for label, (mark, points) in marks.items():
            axes.plot([100 * p["saved"] for p in points], [max(p["kl"], 1e-4) for p in points], mark, markersize=6,
                      fillstyle="none", label=label)  # fmt: skip
        for name, label, mark in (("as proposed", "as proposed (test)", "X"), ("neighbour's logits", None, "+")):
            w, t = r["ways"][name]["given"], r["latency"][name]
            axes.plot(100 * t["saved"][0], max(w["kl"][0], 1e-4), mark, color="black", label=label or f"{name} (test)")
        axes.axhline(GOOD_KL, color="black", linestyle=":", linewidth=1)
        axes.set_yscale("log")

    if kinds:
        panels(out / "kl_by_similarity.png", kinds, by_bin, "similarity of what is found", "KL(cold || warm), nats")
        panels(out / "kl_by_slots.png", kinds, by_slots, "slots a head", "KL(cold || warm), nats")
        panels(out / "plane.png", kinds, plane, "% of the time to the first token saved", "KL(cold || warm), nats")

    def lengths(axes: Any, rows: list[dict[str, float]]) -> None:
        for i, name in enumerate(key for key in rows[0] if key != "length"):
            axes.plot([r["length"] for r in rows], [1e3 * r[name] for r in rows], STYLES[i], markersize=4, label=name)
        doubled(axes, [r["length"] for r in rows])

    panels(out / "first_token_by_length.png", summary["lengths"], lengths, "tokens of the prompt",
           "ms to the first token")  # fmt: skip


def doubled(axes: Any, values: Sequence[float]) -> None:
    """Make both axes logarithmic, with a tick at each of the values that double."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(values, [f"{x:,}" for x in values])
    axes.minorticks_off()


def panels(path: Path, data: dict[str, Any], draw_on: Callable[[Any, Any], None], xlabel: str, ylabel: str) -> None:
    """Draw a panel for each entry of data, side by side, with one legend, and write them as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, axes = plt.subplots(1, len(data), figsize=(4 * len(data) + 0.5, 4.2), squeeze=False, sharey=len(data) > 2)
    for one, (name, record) in zip(axes[0], data.items(), strict=True):
        draw_on(one, record)
        one.set(title=name, xlabel=xlabel)
    axes[0][0].set_ylabel(ylabel)
    handles, labels = axes[0][0].get_legend_handles_labels()
    image.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    image.tight_layout(rect=(0, 0.08, 1, 1))
    write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
    plt.close(image)
