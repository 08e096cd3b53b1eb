"""Cross-prompt KV projection: the first token before the prompt is read, from a similar prompt's cache in m slots.
`projector.py` puts the proposal to its own falsification test and charts what makes a warm start good enough; `ask`
answers a question warm, and shows what changes when the exact cache is swapped in.

Two linear maps by ridge regression, both in closed form. Stage 1 turns the cache of a prompt into m slots a head, which
the prompt's last queries read as they read the cache. Stage 2 turns the slots of a stored prompt into those of a
similar one. A prompt of T tokens is divided into a prefix that all prompts share, what becomes slots, and a tail that
is fed. This is an approximation: only the first token(s) come of it, and the whole prompt is read meanwhile.

Shapes: L layers, H heads, D head size, T tokens, m slots, r tokens of a tail, N prompts, F = 2 m D.

Source: "Cross-Prompt KV Projection Warm-Start: Reducing First-Token Latency via Linear Cache Transfer", a proposal.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import END_OF_TEXT
from pocket import rope
from support.files import write_atomically
from support.fingerprints import fingerprint, raw

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # for cross-validation


@dataclass(frozen=True)
class Layout:
    """How a prompt is divided: `prefix` tokens whose cache is kept as it is, then what becomes m slots, then `tail`
    tokens that are fed, at the positions where they are or, as the proposal has it, right after the slots."""

    m: int
    tail: int = 1
    prefix: int = 0
    true_positions: bool = True

    def start(self, T: int) -> int:
        """Position at which the tail of a prompt of T tokens is read."""
        return T - self.tail if self.true_positions else self.prefix + self.m

    def segments(self, T: int) -> list[int]:
        """Bounds of the m nearly equal segments, one a slot. Raises ValueError if there are fewer tokens than slots."""
        n = T - self.prefix - self.tail
        if n < self.m:
            raise ValueError(f"a prompt of {T} tokens leaves {n} for {self.m} slots beside a prefix of {self.prefix} "
                             f"and a tail of {self.tail}")  # fmt: skip
        return [self.prefix + i * n // self.m for i in range(self.m + 1)]


@dataclass
class Reading:
    """What one exact pass over a prompt leaves behind: float32, on the CPU, where all fits are made."""

    ids: list[int]
    kv: Tensor  # (L, 2, H, T, D)
    q: Tensor  # (L, H, at most 64, D), queries of the last tokens
    hidden: Tensor  # (C,), the last block's output at the last token
    logits: Tensor  # (V,), of the token after the prompt


@torch.no_grad()
def read(model: GPT, ids: Sequence[int], tail: int = 64) -> Reading:
    """Read a prompt exactly, and record what the two stages are fitted on."""
    queries, hidden, cache = [], [], KVCache()
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: queries.append(args[0][0, :, -tail:]))
             for block in model.h]  # fmt: skip
    hooks.append(model.h[-1].register_forward_hook(lambda _, args, output: hidden.append(output[0, -1])))
    try:
        logits = model(torch.tensor([ids], device=model.wte.weight.device), cache, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    parts = torch.stack([layer[:, 0] for layer in cache.layers]), torch.stack(queries), hidden[0], logits[0, -1]
    return Reading(list(ids), *(part.float().cpu() for part in parts))


# --- Ridge regression -----------------------------------------------------------------------------------------------


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return w (..., F, O), least squares of x w - y plus penalty times w's, for x (..., N, F) and y (..., N, O).

    The penalty is in units of the mean square of a feature. Solved in the smaller of the primal (F equations) and the
    dual form (N equations), in float64.
    """
    x, y = x.double(), y.double()
    if x.size(-1) <= x.size(-2):
        return solve(x.mT @ x, x.mT @ y, penalty)
    gram = x @ x.mT  # its trace, over F, is that of the primal form
    return x.mT @ solve(gram, y, penalty * x.size(-2) / x.size(-1))


def solve(a: Tensor, b: Tensor, penalty: float) -> Tensor:
    """Solve (a + penalty * mean(diagonal of a) * I) w = b for positive semidefinite a (..., n, n)."""
    scale = a.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=1e-30)
    return torch.linalg.solve(a + penalty * scale * torch.eye(a.size(-1), dtype=a.dtype, device=a.device), b)


def cross_validate(error: Callable[[Tensor, Tensor, float], float], groups: Sequence[object],
                   penalties: Sequence[float] = PENALTIES, folds: int = 3) -> float:  # fmt: skip
    """Return the penalty with the least mean error(train, test, penalty) over folds of whole groups; train and test
    are indices. A paraphrase in the training part would give the answer away: hence groups. The draw is fixed."""
    names = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    if len(names) < folds:
        raise ValueError(f"{folds}-fold cross-validation needs at least {folds} families of prompts, got {len(names)}")
    shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    fold = shuffled[torch.tensor([names[group] for group in groups])] % folds
    parts = [((fold != i).nonzero()[:, 0], (fold == i).nonzero()[:, 0]) for i in range(folds)]
    return min(penalties, key=lambda penalty: sum(error(*part, penalty) for part in parts))


# --- Stage 1: a cache becomes m slots -------------------------------------------------------------------------------


@dataclass
class Summary:
    """What stage 1 knows of a prompt. Keys and queries are as seen from the first token fed, which makes no difference
    to a GPT-2; those of a rotary model are turned back by its position."""

    pooled: Tensor  # (L, 2, H, m, D), mean keys and values of the segments
    q: Tensor  # (L, H, R, D), queries: those of the tail, then those of a bank
    mass: Tensor  # (L, H, R, m), logarithm of what each segment weighs for them: its log-sum-exp of the scores
    out: Tensor  # (L, H, R, D), what they read of all segments together
    tail: int  # how many queries are the prompt's own


def turn(model: GPT, x: Tensor, by: Tensor) -> Tensor:
    """Move keys or queries x (..., S, D) by so many positions (S,): a GPT-2's are where they were computed."""
    return rope.rotate(x, by) if isinstance(model, rope.GPT) else x


def own_queries(model: GPT, reading: Reading, layout: Layout) -> Tensor:
    """Return the queries (L, H, tail, D) of a prompt's tail, as seen from its first token. Raises ValueError if fewer
    were recorded."""
    if layout.tail > reading.q.size(-2):
        raise ValueError(f"a tail of {layout.tail} tokens needs as many queries, but {reading.q.size(-2)} are recorded")
    q = reading.q[:, :, -layout.tail :]
    return turn(model, q, torch.full((q.size(-2),), layout.tail - len(reading.ids)))


def summarize(model: GPT, reading: Reading, layout: Layout, bank: Tensor | None = None) -> Summary:
    """Return the summary of a prompt under a layout, for its own queries and a bank (L, H, any, D) of others', such as
    own_queries() returns. Raises ValueError if the prompt is too short."""
    T = len(reading.ids)
    bounds = torch.tensor(layout.segments(T))  # (m + 1,)
    at = torch.arange(layout.prefix, T - layout.tail)  # (n,)
    segment = torch.bucketize(at, bounds[1:], right=True)  # (n,), which slot a token goes to
    k, v = reading.kv[:, :, :, layout.prefix : T - layout.tail].unbind(1)  # (L, H, n, D)
    q = own_queries(model, reading, layout)
    q = q if bank is None else torch.cat([q, bank], 2)  # (L, H, R, D)
    scores = q @ turn(model, k, at * 0 - (T - layout.tail)).mT / math.sqrt(k.size(-1))  # (L, H, R, n)
    member = torch.arange(layout.m)[:, None] == segment  # (m, n)
    tokens = (bounds[:-1, None] + torch.arange(int(member.sum(1).max()))).clamp(max=int(at[-1]))  # (m, longest)
    outside = tokens >= bounds[1:, None]  # the last column, for segments that are shorter than others
    mass = scores[..., tokens - layout.prefix].masked_fill(outside, -math.inf).logsumexp(-1)
    # By the proposal's rule the segments follow one another, and the tail follows them.
    seen_at = at - (T - layout.tail) if layout.true_positions else segment - layout.m
    kv = torch.stack([turn(model, k, seen_at - at), v], 1)  # (L, 2, H, n, D)
    pooled = member.to(kv) / member.sum(1, keepdim=True) @ kv
    return Summary(pooled, q, mass, scores.softmax(-1) @ v, layout.tail)


def fit_slots(summary: Summary, penalty: float = 1e-3, bank: float = 0.1) -> Tensor:
    """Return the slots (L, 2, H, m, D) of one prompt, fitted on it alone: segment means, and the smallest change of
    them by ridge regression with which a slot weighs what its segment does, and all slots together read the same.

    The first is linear in the keys, for q k / sqrt(D) = log-sum-exp; the second, with these weights, in the values.
    bank: what all queries of others weigh beside the prompt's own; without them slots are right for that prompt only.
    """
    (k, v), q = summary.pooled.double().unbind(1), summary.q.double() / math.sqrt(summary.q.size(-1))
    n = q.size(-2)
    weigh = torch.ones(n, 1, dtype=q.dtype)
    weigh[summary.tail :] = math.sqrt(bank * summary.tail / max(1, n - summary.tail))
    k = k + ridge(weigh * q, weigh * (summary.mass - q @ k.mT), penalty).mT
    weights = (q @ k.mT).softmax(-1)  # (L, H, R, m)
    v = v + ridge(weigh * weights, weigh * (summary.out - weights @ v), penalty)
    return torch.stack([k, v], 1).float()


class Compressor:
    """Stage 1 as proposed: one linear map for all prompts from pooled cache to slots, fitted on training prompts.

    It is fitted as fit_slots() is, but what is added to the means is linear in the prompt's pooled cache x (F,): to
    the keys of slot j, A_j x, and to its values, B_j x. Features of that ridge are products, of a query's or of a
    weight's entries with those of x; hence the Gram matrix of N prompts is a product of two small ones. The penalty is
    in units of its mean diagonal.
    """

    def __init__(self, summaries: Sequence[Summary], penalty: float) -> None:
        pooled = torch.stack([s.pooled for s in summaries]).double()  # (N, L, 2, H, m, D)
        q, mass, out = (torch.stack([getattr(s, name)[:, :, s.tail - 1] for s in summaries], 2).double()
                        for name in ("q", "mass", "out"))  # (L, H, N, D or m), of each prompt's last query
        q = q / math.sqrt(q.size(-1))
        x = per_head(pooled)  # (L, H, N, F)
        self.penalty = penalty
        self.mean, self.scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        x = self.features(x)  # (L, H, N, 1 + F)
        k, v = pooled.permute(2, 1, 3, 0, 4, 5)  # (L, H, N, m, D)
        gram = x @ x.mT  # (L, H, N, N)
        rest = mass - (k @ q[..., None])[..., 0]  # (L, H, N, m)
        dual = solve(q @ q.mT * gram, rest, penalty)
        self.a = torch.einsum("lhnj,lhnd,lhnf->lhjdf", dual, q, x).float()  # (L, H, m, D, 1 + F)
        k = k + torch.einsum("lhjdf,lhnf->lhnjd", self.a, x.float())
        weights = (k @ q[..., None])[..., 0].softmax(-1)
        rest = out - (weights[..., None, :] @ v)[..., 0, :]  # (L, H, N, D)
        dual = solve(weights @ weights.mT * gram, rest, penalty)
        self.b = torch.einsum("lhnd,lhnj,lhnf->lhjdf", dual, weights, x).float()

    def features(self, x: Tensor) -> Tensor:
        """Return x (..., N, F), standardised, after a constant 1."""
        x = (x - self.mean) / self.scale
        return torch.cat([torch.ones_like(x[..., :1]), x], -1)

    def __call__(self, summaries: Sequence[Summary]) -> Tensor:
        """Return the slots (N, L, 2, H, m, D) of N prompts."""
        pooled = torch.stack([s.pooled for s in summaries])
        x = self.features(per_head(pooled.double())).float()  # (L, H, N, 1 + F)
        return pooled + torch.stack([torch.einsum("lhjdf,lhnf->nlhjd", w, x) for w in (self.a, self.b)], 2)

    @classmethod
    def fit(cls, summaries: Sequence[Summary], families: Sequence[str]) -> Compressor:
        """Fit on prompts of some families, with the penalty that reads best what it wasn't fitted on."""

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            held_out = [summaries[i] for i in test]
            slots = cls([summaries[i] for i in train], penalty)(held_out)
            return sum(readout_error(*pair) for pair in zip(held_out, slots, strict=True))

        return cls(summaries, cross_validate(error, families))


def readout_error(summary: Summary, slots: Tensor) -> float:
    """Return the mean squared error of what the last query reads of the slots: the proposal's loss of stage 1."""
    last = slice(summary.tail - 1, summary.tail)
    q, (k, v) = summary.q[:, :, last], slots.unbind(1)
    read = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
    return float((read - summary.out[:, :, last]).square().mean())


def per_head(slots: Tensor) -> Tensor:
    """Return slots (N, L, 2, H, m, D) as a vector a head (L, H, N, F)."""
    return slots.permute(1, 3, 0, 2, 4, 5).flatten(3)


# --- Stage 2: slots of one prompt become those of another -----------------------------------------------------------


class Projector:
    """A linear map a head from the slots of a stored prompt to those of a similar one, fitted on pairs. It knows
    nothing of the new prompt, so that slots can be mapped when they are stored.

    As proposed, a large penalty pulls towards the mean of all targets; with `change`, what is fitted is the difference
    of the two, and a large penalty pulls towards the source.
    """

    def __init__(self, sources: Tensor, targets: Tensor, penalty: float, change: bool = False) -> None:
        """sources, targets: slots (N, L, 2, H, m, D) of N pairs of similar prompts."""
        self.change, self.penalty = change, penalty
        x, y = per_head(sources.double()), per_head((targets - sources * change).double())  # (L, H, N, F)
        self.mean, self.scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        self.offset = y.mean(-2, keepdim=True)  # (L, H, 1, F)
        self.weight = torch.stack([ridge((x - m) / s, y - o, penalty).float() for x, y, m, s, o in
                                   zip(x, y, self.mean, self.scale, self.offset, strict=True)])  # fmt: skip
        self.mean, self.scale, self.offset = self.mean.float(), self.scale.float(), self.offset.float()

    def __call__(self, slots: Tensor) -> Tensor:
        """Return the projected slots (N, L, 2, H, m, D) of slots of the same shape."""
        N, L, _, H, m, D = slots.shape
        y = (per_head(slots) - self.mean) / self.scale @ self.weight + self.offset  # (L, H, N, F)
        return y.view(L, H, N, 2, m, D).permute(2, 0, 3, 1, 4, 5) + slots * self.change

    @classmethod
    def fit(cls, sources: Tensor, targets: Tensor, families: Sequence[str], change: bool = False) -> Projector:
        """Fit on pairs of some families, with the penalty that predicts best the slots it wasn't fitted on."""

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            projected = cls(sources[train], targets[train], penalty, change)(sources[test])
            return float((projected - targets[test]).square().mean() * len(test))

        return cls(sources, targets, cross_validate(error, families), change)


# --- A new prompt: retrieval, slots as the cache, the exact cache in the background ---------------------------------


class PairEncoder:
    """Texts as unit vectors, without another model: their tokens, as a set, mapped by ridge regression to the mean set
    of their family, so that words count as much as they tell what paraphrases have in common."""

    def __init__(self, tokenizer: tiktoken.Encoding, tokens: Sequence[int], mean: Tensor, weight: Tensor) -> None:
        """tokens: the V that count; mean (V,) and weight (V, V) of the map."""
        self.tokenizer, self.mean, self.weight = tokenizer, mean, weight
        self.column = {token: i for i, token in enumerate(tokens)}

    def sets(self, texts: Sequence[str]) -> Tensor:
        """Return which of the tokens that count each text has (N, V)."""
        x = torch.zeros(len(texts), len(self.column))
        for row, text in zip(x, texts, strict=True):
            columns = {self.column.get(token) for token in self.tokenizer.encode(text, allowed_special="all")}
            row[list(columns - {None})] = 1.0
        return x

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings (N, V) of N texts."""
        z = (self.sets(texts) - self.mean) @ self.weight
        return (z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).numpy()

    @classmethod
    def fit(cls, tokenizer: tiktoken.Encoding, texts: Sequence[str], families: Sequence[str]) -> PairEncoder:
        """Fit on texts of some families, with the penalty that finds most relatives of texts it wasn't fitted on."""
        tokens = sorted({token for text in texts for token in tokenizer.encode(text, allowed_special="all")})
        plain = cls(tokenizer, tokens, torch.zeros(len(tokens)), torch.eye(len(tokens)))
        x, names = plain.sets(texts), np.array(families)

        def fitted(rows: Tensor, penalty: float) -> PairEncoder:
            mean = x[rows].mean(0)
            same = torch.from_numpy(names[rows][:, None] == names[rows]).float()  # (N, N)
            target = same / same.sum(1, keepdim=True) @ x[rows] - mean
            return cls(tokenizer, tokens, mean, ridge(x[rows] - mean, target, penalty).float())

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            z = fitted(train, penalty)([texts[i] for i in test])
            alike = z @ z.T - 2 * np.eye(len(z))
            return float((names[test][alike.argmax(1)] != names[test]).sum())

        return fitted(torch.arange(len(x)), cross_validate(error, families))


class Library:
    """Stored prompts, with their embeddings and the slots that a similar prompt starts from.

    start() gives a cache that stands for all of a new prompt but its tail, or None where the prompt has to be read:
    nothing similar enough is stored, its names aren't those of what is, or what is stored is damaged.
    """

    def __init__(self, model: GPT, layout: Layout, encoder: Callable[[list[str]], np.ndarray], texts: Sequence[str],
                 slots: Tensor, *, prefix: Reading | None = None, threshold: float = -1.0, guard: bool = False,
                 skip: int = 0) -> None:  # fmt: skip
        """slots (N, L, 2, H, m, D) of the N texts, projected or not; prefix: the reading of the layout's shared prefix,
        if it has one; threshold: the least similarity; guard: names have to agree, too; skip: so many characters are
        the same in all texts, and don't count for similarity."""
        if len(texts) != len(slots) or layout.prefix != (len(prefix.ids) if prefix else 0):
            raise ValueError(f"{len(texts)} texts, slots of {len(slots)}, a prefix of {layout.prefix}: don't match")
        self.model, self.layout, self.encoder, self.texts, self.slots = model, layout, encoder, list(texts), slots
        self.prefix, self.threshold, self.guard, self.skip = prefix, threshold, guard, skip
        self.embeddings = encoder([text[skip:] for text in self.texts]) if self.texts else np.zeros((0, 1))
        self.checksums = [crc(entry) for entry in slots]
        self.names = {name for text in self.texts for name in inner_names(text)}
        self.counts = Counter(name for text in self.texts for name in self.names_in(text))

    def names_in(self, text: str) -> set[str]:
        """Return the names and numbers of a text: what is one inside a sentence is one at its beginning, too."""
        return inner_names(text) | (set(re.findall(r"[A-Z]\w+", text)) & self.names)

    def find(self, text: str) -> tuple[int, float]:
        """Return the index of the most similar stored text and the similarity, (-1, -1) if there is none; with the
        guard, only of those that share more than half of the text's rare names (or have none to share)."""
        if not self.texts:
            return -1, -1.0
        similarity = self.embeddings @ self.encoder([text[self.skip :]])[0]
        if self.guard:
            rare = {name for name in self.names_in(text) if self.counts[name] <= max(1, 0.05 * len(self.texts))}
            for i in np.argsort(-similarity)[:20]:
                if 2 * len(rare & self.names_in(self.texts[i])) > len(rare) or not rare:
                    return int(i), float(similarity[i])
            return -1, -1.0
        best = int(similarity.argmax())
        return best, float(similarity[best])

    def start(self, text: str, ids: Sequence[int]) -> KVCache | None:
        """Return a cache in place of all but the last `tail` tokens of ids, which are those of text, or None."""
        layout, P = self.layout, self.layout.prefix
        found, similarity = self.find(text)
        if found < 0 or similarity < self.threshold or len(ids) - P - layout.tail < layout.m:
            return None
        if self.prefix and list(ids[:P]) != self.prefix.ids:
            return None
        slots = self.slots[found]
        if crc(slots) != self.checksums[found]:
            warnings.warn(f"the slots of stored prompt {found} are damaged: reading the new one instead", stacklevel=2)
            return None
        return cache_of(self.model, slots, layout.start(len(ids)), self.prefix)

    def save(self, folder: Path, encoder: str) -> None:
        """Write library.safetensors and library.json to a folder; encoder: its name, "pairs" for a PairEncoder."""
        tensors = {"slots": self.slots}
        if isinstance(self.encoder, PairEncoder):
            tensors |= {"encoder.mean": self.encoder.mean, "encoder.weight": self.encoder.weight}
        if self.prefix:
            tensors["prefix"] = self.prefix.kv
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        about = {
            "fingerprint": fingerprint(self.model), "layout": asdict(self.layout), "threshold": self.threshold,
            "guard": self.guard, "skip": self.skip, "encoder": encoder,
            "tokens": list(self.encoder.column) if isinstance(self.encoder, PairEncoder) else [],
            "prefix": self.prefix.ids if self.prefix else [], "texts": self.texts, "checksums": self.checksums,
            "others": {name: crc(tensor) for name, tensor in tensors.items() if name != "slots"},
        }  # fmt: skip
        about["checksum"] = zlib.crc32(json.dumps(about).encode())
        write_atomically(folder / "library.safetensors", lambda file: save_file(tensors, file))
        write_atomically(folder / "library.json", lambda file: file.write_text(json.dumps(about), encoding="utf-8"))

    @classmethod
    def load(cls, model: GPT, tokenizer: tiktoken.Encoding, folder: Path,
             load_encoder: Callable[[str], Callable[[list[str]], np.ndarray]]) -> Library:  # fmt: skip
        """Return the library in a folder; one that is damaged is a warning, and comes back empty: all starts are cold.

        Raises FileNotFoundError if there is none, ValueError if it was made with another model or needs an encoder that
        can't be had.
        """
        try:
            about = json.loads((folder / "library.json").read_text(encoding="utf-8"))
            if about.pop("checksum") != zlib.crc32(json.dumps(about).encode()):
                raise ValueError("library.json has changed")
            with safe_open(folder / "library.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if changed := [name for name, value in about["others"].items() if crc(tensors[name]) != value]:
                raise ValueError(f"{', '.join(changed)} in library.safetensors has changed")
            if len(tensors["slots"]) != len(about["checksums"]):
                raise ValueError(f"{len(tensors['slots'])} slots instead of {len(about['checksums'])}")
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"the library in {folder} is damaged ({error}): every start is cold", stacklevel=2)
            return cls(model, Layout(1), lambda texts: np.zeros((len(texts), 1)), [], torch.empty(0))
        if about["fingerprint"] != fingerprint(model):
            raise ValueError(f"the library in {folder} was made with another model: make it again")
        encoder = (PairEncoder(tokenizer, about["tokens"], tensors["encoder.mean"], tensors["encoder.weight"])
                   if about["encoder"] == "pairs" else load_encoder(about["encoder"]))  # fmt: skip
        nothing = torch.empty(0)
        prefix = Reading(about["prefix"], tensors["prefix"], *[nothing] * 3) if about["prefix"] else None
        library = cls(model, Layout(**about["layout"]), encoder, about["texts"], tensors["slots"], prefix=prefix,
                      **{name: about[name] for name in ("threshold", "guard", "skip")})  # fmt: skip
        library.checksums = about["checksums"]
        return library


def cache_of(model: GPT, slots: Tensor, start: int, prefix: Reading | None = None) -> KVCache:
    """Return a cache of slots (L, 2, H, m, D), after the exact prefix if there is one, to go on at position start."""
    m, device = slots.size(-2), model.wte.weight.device
    slots = slots.to(device, model.wte.weight.dtype)
    k, v = slots.unbind(1)
    layers = torch.stack([turn(model, k, torch.full((m,), start, device=device)), v], 1)
    pos = torch.arange(start - m, start, device=device)
    if prefix:
        layers = torch.cat([prefix.kv.to(layers), layers], -2)
        pos = torch.cat([torch.arange(len(prefix.ids), device=device), pos])
    return KVCache([layer[:, None] for layer in layers], pos)


def inner_names(text: str) -> set[str]:
    """Return the words of a text that have a capital though no sentence begins there, and its numbers."""
    return set(re.findall(r"(?<=[^.!?:\"\s] )[A-Z]\w+|\b\d+\b", text))


def crc(tensor: Tensor) -> int:
    """Return a CRC-32 of a tensor's numbers."""
    return zlib.crc32(raw(tensor))


def generate_warm(model: GPT, ids: Tensor, warm: KVCache, tail: int, max_new_tokens: int, *, emit: int = 1,
                  align: bool = False, stop_id: int | None = None, **options: object) -> Iterator[Tensor]:  # fmt: skip
    """Yield what generate() yields after ids (1, T), but the first tokens, `emit` at most, from a warm cache that
    stands for all of ids but the tail. Behind them a thread of low priority reads ids exactly; when it is done, its
    cache takes over: what was emitted stays, and from there on tokens are those of generate() for the same text.

    align: keep the keys and values of emitted tokens as they were computed on the slots, moved by the mean difference
    that the tail's have (the proposal's one-step alignment), instead of reading these tokens again. That is inexact.
    Raises ValueError if ids and the emitted tokens exceed the context, or an option is out of range.
    """
    T, slots = ids.size(1), len(warm)
    emit = min(emit, max_new_tokens)
    if emit < 1 or T + emit > model.config.n_ctx:
        raise ValueError(f"{T} tokens and {emit} emitted must be within the context, {model.config.n_ctx}; at least 1")
    emitted: list[Tensor] = []
    future: Future | None = None
    with ThreadPoolExecutor(1, initializer=step_back) as pool:
        stand_in = torch.cat([ids.new_zeros(1, slots), ids[:, T - tail :]], 1)  # the first are never read
        for token in generate(model, stand_in, emit, stop_id=stop_id, cache=warm, **options):
            emitted.append(token)
            if emit < max_new_tokens:
                future = future or pool.submit(read_exactly, model, ids)
            yield token
            if future and future.done():
                break
        if len(emitted) == max_new_tokens or int(emitted[-1]) == stop_id:
            return
        exact = future.result()
    if align:
        move_over(warm, exact, tail, len(emitted) - 1)
    ids = torch.cat([ids, *emitted], 1)
    yield from generate(model, ids, max_new_tokens - len(emitted), stop_id=stop_id, cache=exact, **options)


def step_back() -> None:
    """Let this thread wait for others where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@torch.no_grad()  # of this thread
def read_exactly(model: GPT, ids: Tensor) -> KVCache:
    """Return the cache of ids (1, T)."""
    cache = KVCache()
    model(ids, cache, last_only=True)
    return cache


def move_over(warm: KVCache, exact: KVCache, tail: int, n: int) -> None:
    """Append the last n tokens of warm to exact, which ends with the tail that precedes them there, moved by the mean
    difference of the tail's keys and values: of all shifts, the one with the least mean squared error on the tail."""
    for i, (w, e) in enumerate(zip(warm.layers, exact.layers, strict=True)):
        w = w[..., len(warm) - tail - n : len(warm), :]
        shift = (e[..., -tail:, :] - w[..., :tail, :]).mean(-2, keepdim=True)
        exact.layers[i] = torch.cat([e, w[..., tail:, :] + shift], -2)
    exact.commit(torch.arange(len(exact), len(exact) + n, device=exact.pos.device))


def template(texts: Sequence[str]) -> tuple[str, str]:
    """Return what all texts begin with, to the end of a word, and the whole lines they end with."""
    n, m = (next((i for i, letters in enumerate(zip(*some, strict=False)) if len({*letters}) > 1), 0)
            for some in (texts, [text[::-1] for text in texts]))  # fmt: skip
    head, tail = texts[0][:n], texts[0][len(texts[0]) - m :]
    return head[: 1 + max(head.rfind(" "), head.rfind("\n"))], tail[tail.index("\n") :] if "\n" in tail else ""


def ask(library: Library, tokenizer: tiktoken.Encoding, line: str, max_new_tokens: int) -> None:
    """Answer one line, put where stored prompts differ from one another: warm if the library allows it, with the swap
    after the first token, and cold, and print both with their times."""
    head, end = template(library.texts) if library.texts else ("", "")
    text = f"{head}{line.strip()}{end}"
    if not library.texts:
        print("[no prompt is stored: the text is read as it is]")
    ids = tokenizer.encode(text, allowed_special="all")
    fed = torch.tensor([ids], device=library.model.wte.weight.device)
    answers = {}
    for name in ("warm-up", "warm", "cold"):  # a process's first pass is slow
        started, written, first = time.perf_counter(), [], 0.0
        warm = library.start(text, ids) if name != "cold" else None
        if name == "warm" and warm is None:
            continue
        options = {"stop_id": tokenizer.eot_token}
        tokens = (generate(library.model, fed, max_new_tokens, **options) if warm is None else
                  generate_warm(library.model, fed, warm, library.layout.tail, max_new_tokens, **options))  # fmt: skip
        for token in tokens:
            first = first or time.perf_counter() - started
            written.append(tokenizer.decode([int(token)]))
            if "\n" in written[-1]:
                break
        answers[name] = (written[:1], "".join(written).replace(END_OF_TEXT, "").strip(), 1000 * first)
    if library.texts and "warm" not in answers:
        print("[nothing similar enough is stored: the prompt is read]")
    for name in ("warm", "cold"):
        if name in answers:
            token, answer, ms = answers[name]
            print(f"{name}: first token {token[0]!r} after {ms:.1f} ms"
                  f"{', then from the exact cache' * (name == 'warm')}: {answer}")  # fmt: skip


def main() -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from studies import projection
    from support.cli import CommandLine, nonempty, whole_number
    from support.encoders import load_encoder

    cli = CommandLine(__doc__, 'python %(prog)s ask "Which wood lies near Tolben?"', NAMES)
    cli.add_argument("what", nargs="?", default="run", choices=("run", "ask"),
                     help="run: the falsification test; ask: answer QUESTION from the library that run has kept")
    cli.add_argument("question", nargs="?", type=nonempty, metavar="QUESTION",
                     help="ask: put where stored prompts differ")
    cli.add_model_arguments()
    cli.add_argument("--kinds", nargs="+", choices=projection.KINDS, metavar="KIND",
                     help=f"run: which prompts of the pocket world; default: {', '.join(projection.KINDS)}")
    cli.add_argument("--pairs", metavar="FILE",
                     help="run: pairs of similar prompts instead, for any model: CSV with the columns source, target "
                     "and, if there is one, answer")
    cli.add_argument("--encoder", default="pairs", metavar="NAME",
                     help="run: what finds the similar prompt: pairs, a ridge regression of words on the training "
                     "prompts; tokens, the model's own embeddings; or a model of sentence-transformers")
    cli.add_argument("--repeats", type=whole_number(1), default=7, metavar="N", help="run: times are medians of N")
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=32, metavar="N", help="ask: to write")
    cli.add_argument("--library", default="results/projector/library", metavar="FOLDER", help="ask: what run has kept")
    cli.add_argument("--out", default="results/projector", metavar="FOLDER", help="run: where results go")
    with cli.parse() as args:
        warnings.showwarning = lambda message, *_: print(f"{cli.prog}: {message}", file=sys.stderr)
        if (args.what == "ask") != (args.question is not None):
            raise ValueError("ask needs a QUESTION, and nothing else takes one")
        if args.pairs and args.kinds:
            raise ValueError("--kinds are of the pocket world, --pairs are your own: choose")
        if args.what == "run" and not args.pairs and args.model not in ("pocket", "pocket-rotary"):
            raise ValueError(f"{args.model} doesn't know the pocket world: give it --pairs FILE")
        model_class = rope.GPT if args.model == "pocket-rotary" else GPT
        model = load_model(args.model, model_class=model_class, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.what == "ask":
            folder = Path(args.library)
            if not (folder / "library.json").is_file():
                raise FileNotFoundError(f"there is no library in {folder}: `python {cli.prog}` makes one")
            library = Library.load(model, tokenizer, folder, lambda name: load_encoder(name, model, tokenizer))
            ask(library, tokenizer, args.question, args.max_new_tokens)
            return
        kinds = ({Path(args.pairs).stem: projection.read_pairs(Path(args.pairs), args.seed)} if args.pairs else
                 {kind: projection.pocket_families(kind, args.seed) for kind in args.kinds or projection.KINDS})
        projection.report(model, tokenizer, kinds, args.encoder, args.repeats, args.model, args.seed, Path(args.out))


if __name__ == "__main__":
    main()
