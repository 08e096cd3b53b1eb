"""Cross-prompt KV projection: a first token before the prompt is read, from a similar prompt's cache.
Without arguments, the proposal goes through its own falsification test, reduced to 20 seconds; `ask`
answers a question from summary tokens and from the exact cache; `study` runs the whole test.

Two linear maps by ridge regression, both in closed form. Stage 1 turns the cache of a prompt into m summary tokens per
head, which the prompt's last queries read as they read the cache. Stage 2 turns the summary tokens of a stored prompt
into those of a similar one. A prompt of T tokens is divided into a prefix that all prompts share, a part that summary
tokens stand for, and a tail that is fed. This is an approximation: only the first tokens come from it, and the whole
prompt is read meanwhile.

Shapes: L layers, H heads, D head size, T tokens, m summary tokens, N prompts, F = 2 m D.

Source: "Cross-Prompt KV Projection Warm-Start: Reducing First-Token Latency via Linear Cache Transfer", a proposal.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

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
from recycle import read_all
from support.encoders import PairEncoder, load_encoder
from support.files import write_atomically
from support.fingerprints import fingerprint, raw
from support.regression import cross_validate, ridge, solve
from support.tables import table


@dataclass(frozen=True)
class Layout:
    """How a prompt is divided: `prefix` tokens whose cache is kept as it is, then tokens that m summary tokens stand
    for, then `tail` tokens that are fed, at their true positions or, as proposed, right after the summary tokens."""

    m: int
    tail: int = 1
    prefix: int = 0
    true_positions: bool = True

    def tail_position(self, T: int) -> int:
        """Position of the tail's first token in a prompt of T tokens."""
        return T - self.tail if self.true_positions else self.prefix + self.m

    def bounds(self, T: int) -> list[int]:
        """Bounds of m nearly equal segments, one a summary token. Raises ValueError if tokens are fewer than those."""
        n = T - self.prefix - self.tail
        if n < self.m:
            raise ValueError(f"a prompt of {T} tokens leaves {n} for {self.m} summary tokens beside a prefix of "
                             f"{self.prefix} and a tail of {self.tail}")
        return [self.prefix + i * n // self.m for i in range(self.m + 1)]


@dataclass
class Prefill:
    """The record of an exact pass over a prompt: float32, on the CPU, where all fits are made."""

    ids: list[int]
    kv: Tensor  # (L, 2, H, T, D)
    q: Tensor  # (L, H, at most 64, D), queries of the last tokens
    hidden: Tensor  # (C,), the last block's output at the last token
    logits: Tensor  # (V,), of the token after the prompt


@torch.no_grad()
def prefill(model: GPT, ids: Sequence[int], tail: int = 64) -> Prefill:
    """Run a prompt through the model exactly, and record the data of the two stages' fits."""
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
    return Prefill(list(ids), *(part.float().cpu() for part in parts))


# --- Stage 1: a cache becomes m summary tokens ------------------------------------------------------------------------


@dataclass
class Segments:
    """The segments of a prompt as stage 1 sees them. Keys and queries are relative to the first token fed: a GPT-2's
    are the same anywhere, a rotary model's are rotated back by its position."""

    pooled: Tensor  # (L, 2, H, m, D), mean keys and values of the segments
    q: Tensor  # (L, H, R, D), queries: the tail's, then a bank's
    mass: Tensor  # (L, H, R, m), each segment's weight for them: log-sum-exp of its scores
    out: Tensor  # (L, H, R, D), attention's output for them over all segments
    tail: int  # the number of the prompt's own queries


def reposition(model: GPT, x: Tensor, by: Tensor) -> Tensor:
    """Move keys or queries x (..., S, D) by positions (S,): rotary ones only, a GPT-2's don't change."""
    return rope.rotate(x, by) if isinstance(model, rope.GPT) else x


def own_queries(model: GPT, exact: Prefill, layout: Layout) -> Tensor:
    """Return the queries (L, H, tail, D) of a prompt's tail, relative to its first token. Raises ValueError if fewer
    were recorded."""
    if layout.tail > exact.q.size(-2):
        raise ValueError(f"a tail of {layout.tail} tokens needs as many queries, but {exact.q.size(-2)} are recorded")
    q = exact.q[:, :, -layout.tail :]
    return reposition(model, q, torch.full((q.size(-2),), layout.tail - len(exact.ids)))


def measure_segments(model: GPT, exact: Prefill, layout: Layout, bank: Tensor | None = None) -> Segments:
    """Return the segments of a prompt, for its own queries and a bank (L, H, any, D) of other prompts', such as
    own_queries() returns. Raises ValueError if the prompt is too short."""
    T = len(exact.ids)
    bounds = torch.tensor(layout.bounds(T))  # (m + 1,)
    at = torch.arange(layout.prefix, T - layout.tail)  # (n,)
    segment = torch.bucketize(at, bounds[1:], right=True)  # (n,), the segment of each token
    k, v = exact.kv[:, :, :, layout.prefix : T - layout.tail].unbind(1)  # (L, H, n, D)
    q = own_queries(model, exact, layout)
    q = q if bank is None else torch.cat([q, bank], 2)  # (L, H, R, D)
    scores = q @ reposition(model, k, at * 0 - (T - layout.tail)).mT / math.sqrt(k.size(-1))  # (L, H, R, n)
    member = torch.arange(layout.m)[:, None] == segment  # (m, n)
    tokens = (bounds[:-1, None] + torch.arange(int(member.sum(1).max()))).clamp(max=int(at[-1]))  # (m, longest)
    outside = tokens >= bounds[1:, None]  # the last column, for segments that are shorter than others
    mass = scores[..., tokens - layout.prefix].masked_fill(outside, -math.inf).logsumexp(-1)
    # By the proposal's rule the segments follow one another, and the tail follows them.
    seen_at = at - (T - layout.tail) if layout.true_positions else segment - layout.m
    kv = torch.stack([reposition(model, k, seen_at - at), v], 1)  # (L, 2, H, n, D)
    pooled = member.to(kv) / member.sum(1, keepdim=True) @ kv
    return Segments(pooled, q, mass, scores.softmax(-1) @ v, layout.tail)


def summarize(segments: Segments, penalty: float = 1e-3, bank: float = 0.1) -> Tensor:
    """Return the summary tokens (L, 2, H, m, D) of one prompt, fitted on it alone: segment means, and the smallest
    change of them by ridge regression with which each weighs as much as its segment and all together read the same.

    The first is linear in the keys, for q k / sqrt(D) = log-sum-exp; the second, with these weights, in the values.
    bank: the weight of all other prompts' queries beside the prompt's own; without them the summary tokens are right
    for that prompt only.
    """
    (k, v), q = segments.pooled.double().unbind(1), segments.q.double() / math.sqrt(segments.q.size(-1))
    n = q.size(-2)
    weigh = torch.ones(n, 1, dtype=q.dtype)
    weigh[segments.tail :] = math.sqrt(bank * segments.tail / max(1, n - segments.tail))
    k = k + ridge(weigh * q, weigh * (segments.mass - q @ k.mT), penalty).mT
    weights = (q @ k.mT).softmax(-1)  # (L, H, R, m)
    v = v + ridge(weigh * weights, weigh * (segments.out - weights @ v), penalty)
    return torch.stack([k, v], 1).float()


class Compressor:
    """Stage 1 as proposed: one linear map from pooled cache to summary tokens for all prompts, fitted on some.

    It is fitted as summarize() is, but what is added to the means is linear in the prompt's pooled cache x (F,): to
    the keys of summary token j, A_j x, and to its values, B_j x. Features of that ridge are products, of a query's or
    of a weight's entries with those of x; hence the Gram matrix of N prompts is a product of two small ones. The
    penalty is in units of its mean diagonal.
    """

    def __init__(self, prompts: Sequence[Segments], penalty: float) -> None:
        pooled = torch.stack([s.pooled for s in prompts]).double()  # (N, L, 2, H, m, D)
        q, mass, out = (torch.stack([getattr(s, name)[:, :, s.tail - 1] for s in prompts], 2).double()
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

    def __call__(self, prompts: Sequence[Segments]) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of N prompts."""
        pooled = torch.stack([s.pooled for s in prompts])
        x = self.features(per_head(pooled.double())).float()  # (L, H, N, 1 + F)
        return pooled + torch.stack([torch.einsum("lhjdf,lhnf->nlhjd", w, x) for w in (self.a, self.b)], 2)

    @classmethod
    def fit(cls, prompts: Sequence[Segments], families: Sequence[str]) -> Compressor:
        """Fit on prompts of some families, with the penalty that reads held-out families best."""

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            held_out = [prompts[i] for i in test]
            summaries = cls([prompts[i] for i in train], penalty)(held_out)
            return sum(map(readout_error, held_out, summaries))

        return cls(prompts, cross_validate(error, families))


def readout_error(segments: Segments, summary: Tensor) -> float:
    """Return the mean squared error of attention's output for the last query: the proposal's loss of stage 1."""
    last = slice(segments.tail - 1, segments.tail)
    q, (k, v) = segments.q[:, :, last], summary.unbind(1)
    out = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
    return float((out - segments.out[:, :, last]).square().mean())


def per_head(summaries: Tensor) -> Tensor:
    """Return summary tokens (N, L, 2, H, m, D) as a vector a head (L, H, N, F)."""
    return summaries.permute(1, 3, 0, 2, 4, 5).flatten(3)


# --- Stage 2: summary tokens of one prompt become those of another ----------------------------------------------------


class Projector:
    """A linear map a head from the summary tokens of a stored prompt to those of a similar one, fitted on pairs. It
    knows nothing of the new prompt, so that summary tokens can be mapped when they are stored.

    As proposed, a large penalty pulls towards the mean of all targets; with `change`, the difference of the two is
    fitted, and a large penalty pulls towards the source.
    """

    def __init__(self, sources: Tensor, targets: Tensor, penalty: float, change: bool = False) -> None:
        """sources, targets: summary tokens (N, L, 2, H, m, D) of N pairs of similar prompts."""
        self.change, self.penalty = change, penalty
        x, y = per_head(sources.double()), per_head((targets - sources * change).double())  # (L, H, N, F)
        self.mean, self.scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        self.offset = y.mean(-2, keepdim=True)  # (L, H, 1, F)
        self.weight = torch.stack([ridge((x - m) / s, y - o, penalty).float() for x, y, m, s, o in
                                   zip(x, y, self.mean, self.scale, self.offset, strict=True)])
        self.mean, self.scale, self.offset = self.mean.float(), self.scale.float(), self.offset.float()

    def __call__(self, summaries: Tensor) -> Tensor:
        """Return the projected summary tokens (N, L, 2, H, m, D) of summary tokens of the same shape."""
        N, L, _, H, m, D = summaries.shape
        y = (per_head(summaries) - self.mean) / self.scale @ self.weight + self.offset  # (L, H, N, F)
        return y.view(L, H, N, 2, m, D).permute(2, 0, 3, 1, 4, 5) + summaries * self.change

    @classmethod
    def fit(cls, sources: Tensor, targets: Tensor, families: Sequence[str], change: bool = False) -> Projector:
        """Fit on pairs of some families, with the penalty that predicts held-out families best."""

        def error(train: Tensor, test: Tensor, penalty: float) -> float:
            projected = cls(sources[train], targets[train], penalty, change)(sources[test])
            return float((projected - targets[test]).square().mean() * len(test))

        return cls(sources, targets, cross_validate(error, families), change)


# --- A new prompt: retrieval, summary tokens as the cache, the exact cache in the background --------------------------


class Library:
    """Stored prompts, with their embeddings and the summary tokens that a similar prompt starts from.

    warm_start() gives a cache that stands for all of a new prompt but its tail, or None where the prompt has to be
    read: no stored prompt is similar enough or has its names, or the stored tensors are damaged.
    """

    def __init__(self, model: GPT, layout: Layout, encoder: Callable[[list[str]], np.ndarray], texts: Sequence[str],
                 summaries: Tensor, *, prefix: Prefill | None = None, threshold: float = -1.0, guard: bool = False,
                 skip: int = 0) -> None:  # fmt: skip
        """summaries (N, L, 2, H, m, D) of the N texts, projected or not; prefix: the layout's shared prefix, if it has
        one; threshold: tau, the least similarity, which the study's choose_tau picks; guard: names have to agree,
        too; skip: the number of characters that all texts begin with, which don't count for similarity."""
        if len(texts) != len(summaries) or layout.prefix != (len(prefix.ids) if prefix else 0):
            raise ValueError(f"{len(texts)} texts, {len(summaries)} summaries, a prefix of {layout.prefix}: no match")
        self.model, self.layout, self.encoder, self.texts = model, layout, encoder, list(texts)
        self.summaries, self.prefix, self.threshold, self.guard, self.skip = summaries, prefix, threshold, guard, skip
        self.embeddings = encoder([text[skip:] for text in self.texts]) if self.texts else np.zeros((0, 1))
        self.checksums = [crc(entry) for entry in summaries]
        self.names = {name for text in self.texts for name in inner_names(text)}
        self.counts = Counter(name for text in self.texts for name in self.names_in(text))

    def names_in(self, text: str) -> set[str]:
        """Return the names and numbers of a text; a name known from inside a sentence is one at its beginning, too."""
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

    def warm_start(self, text: str, ids: Sequence[int]) -> KVCache | None:
        """Return a cache in place of all but the last `tail` tokens of ids, which are those of text, or None."""
        layout, P = self.layout, self.layout.prefix
        found, similarity = self.find(text)
        if found < 0 or similarity < self.threshold or len(ids) - P - layout.tail < layout.m:
            return None
        if self.prefix and list(ids[:P]) != self.prefix.ids:
            return None
        summary = self.summaries[found]
        if crc(summary) != self.checksums[found]:
            warnings.warn(f"the summary of stored prompt {found} is damaged: reading the new one instead", stacklevel=2)
            return None
        return cache_of(self.model, summary, layout.tail_position(len(ids)), self.prefix)

    def save(self, folder: Path, encoder: str) -> None:
        """Write library.safetensors and library.json to a folder; encoder: its name, "pairs" for a PairEncoder."""
        tensors = {"summaries": self.summaries}
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
            "others": {name: crc(tensor) for name, tensor in tensors.items() if name != "summaries"},
        }  # fmt: skip
        about["checksum"] = zlib.crc32(json.dumps(about).encode())
        write_atomically(folder / "library.safetensors", lambda file: save_file(tensors, file))
        write_atomically(folder / "library.json", lambda file: file.write_text(json.dumps(about), encoding="utf-8"))

    @classmethod
    def load(cls, model: GPT, tokenizer: tiktoken.Encoding, folder: Path) -> Library:
        """Return the library in a folder; a damaged one is a warning, and comes back empty: all starts are cold.

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
            if len(tensors["summaries"]) != len(about["checksums"]):
                raise ValueError(f"{len(tensors['summaries'])} summaries instead of {len(about['checksums'])}")
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"the library in {folder} is damaged ({error}): every start is cold", stacklevel=2)
            return cls(model, Layout(1), lambda texts: np.zeros((len(texts), 1)), [], torch.empty(0))
        if about["fingerprint"] != fingerprint(model):
            raise ValueError(f"the library in {folder} was made with another model: make it again")
        encoder = (PairEncoder(tokenizer, about["tokens"], tensors["encoder.mean"], tensors["encoder.weight"])
                   if about["encoder"] == "pairs" else load_encoder(about["encoder"], model, tokenizer))  # fmt: skip
        nothing = torch.empty(0)
        prefix = Prefill(about["prefix"], tensors["prefix"], *[nothing] * 3) if about["prefix"] else None
        library = cls(model, Layout(**about["layout"]), encoder, about["texts"], tensors["summaries"], prefix=prefix,
                      **{name: about[name] for name in ("threshold", "guard", "skip")})  # fmt: skip
        library.checksums = about["checksums"]
        return library


def cache_of(model: GPT, summary: Tensor, next_pos: int, prefix: Prefill | None = None) -> KVCache:
    """Return a cache of summary tokens (L, 2, H, m, D), behind an exact prefix, if any, for text at next_pos."""
    m, device = summary.size(-2), model.wte.weight.device
    k, v = summary.to(device, model.wte.weight.dtype).unbind(1)
    layers = torch.stack([reposition(model, k, torch.full((m,), next_pos, device=device)), v], 1)
    pos = torch.arange(next_pos - m, next_pos, device=device)
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
                  align: bool = False, stop_id: int | None = None, **options: object) -> Iterator[Tensor]:
    """Yield the tokens of generate() after ids (1, T), but the first ones, at most `emit`, from a warm cache that
    stands for all of ids but the tail. Behind them a thread of low priority reads ids exactly; when it is done, its
    cache takes over: the emitted tokens stay, and from there on tokens are those of generate() for the same text.

    align: keep the keys and values of emitted tokens as computed on the summary tokens, moved by the mean difference of
    the tail's (the proposal's one-step alignment), instead of reading these tokens again. That is inexact.
    Raises ValueError if ids and the emitted tokens exceed the context, or an option is out of range.
    """
    T = ids.size(1)
    emit = min(emit, max_new_tokens)
    if emit < 1 or T + emit > model.config.n_ctx:
        raise ValueError(f"{T} tokens and {emit} emitted must be within the context, {model.config.n_ctx}; at least 1")
    emitted: list[Tensor] = []
    future: Future | None = None
    with ThreadPoolExecutor(1, initializer=lower_priority) as pool:
        stand_in = torch.cat([ids.new_zeros(1, len(warm)), ids[:, T - tail :]], 1)  # the zeros are cached: never read
        for token in generate(model, stand_in, emit, stop_id=stop_id, cache=warm, **options):
            emitted.append(token)
            if emit < max_new_tokens:
                future = future or pool.submit(read_all, model, ids[0].tolist())
            yield token
            if future and future.done():
                break
        if len(emitted) == max_new_tokens or int(emitted[-1]) == stop_id:
            return
        exact = future.result()
    if align:
        append_aligned(warm, exact, tail, len(emitted) - 1)
    ids = torch.cat([ids, *emitted], 1)
    yield from generate(model, ids, max_new_tokens - len(emitted), stop_id=stop_id, cache=exact, **options)


def lower_priority() -> None:
    """Let this thread wait for others where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def append_aligned(warm: KVCache, exact: KVCache, tail: int, n: int) -> None:
    """Append the last n tokens of warm to exact, which ends with the tail that precedes them there, moved by the mean
    difference of the tail's keys and values: of all shifts, the one with the least mean squared error on the tail."""
    for i, (w, e) in enumerate(zip(warm.layers, exact.layers, strict=True)):
        w = w[..., len(warm) - tail - n : len(warm), :]
        shift = (e[..., -tail:, :] - w[..., :tail, :]).mean(-2, keepdim=True)
        exact.layers[i] = torch.cat([e, w[..., tail:, :] + shift], -2)
    exact.commit(torch.arange(len(exact), len(exact) + n, device=exact.pos.device))


# --- One question -----------------------------------------------------------------------------------------------------


def template(texts: Sequence[str]) -> tuple[str, str]:
    """Return the beginning that all texts share, to the end of a word, and the whole lines of their shared end."""
    n, m = (next((i for i, letters in enumerate(zip(*some, strict=False)) if len({*letters}) > 1), 0)
            for some in (texts, [text[::-1] for text in texts]))
    head, tail = texts[0][:n], texts[0][len(texts[0]) - m :]
    return head[: 1 + max(head.rfind(" "), head.rfind("\n"))], tail[tail.index("\n") :] if "\n" in tail else ""


def answer(library: Library, tokenizer: tiktoken.Encoding, line: str, max_new_tokens: int) -> None:
    """Answer one line, put where stored prompts differ from one another: warm if the library allows it, with the swap
    after the first token, and cold, and print both with their times."""
    head, end = template(library.texts) if library.texts else ("", "")
    text = f"{head}{line.strip()}{end}"
    if not library.texts:
        print("[no prompt is stored: the text is read as it is]")
    ids = tokenizer.encode(text, allowed_special="all")
    fed = torch.tensor([ids], device=library.model.wte.weight.device)
    rows, times = [], {}
    for name in ("warm-up", "warm", "cold"):  # a process's first pass is slow
        started, written, first = time.perf_counter(), [], 0.0
        warm = library.warm_start(text, ids) if name != "cold" else None
        if name == "warm" and warm is None:
            least = library.layout.prefix + library.layout.tail + library.layout.m
            why = (f"{len(ids)} tokens are too few for a warm start, which stands for {least}" if len(ids) < least else
                   "no stored prompt is similar enough")
            print(f"[{why}: the prompt is read]" if library.texts else "")
            continue
        options = {"stop_id": tokenizer.eot_token}
        tokens = (generate(library.model, fed, max_new_tokens, **options) if warm is None else
                  generate_warm(library.model, fed, warm, library.layout.tail, max_new_tokens, **options))
        for token in tokens:
            first = first or time.perf_counter() - started
            written.append(tokenizer.decode([int(token)]))
            if "\n" in written[-1]:
                break
        times[name], words = first, "".join(written).replace(END_OF_TEXT, "").strip()
        rows.append([name, f"{1000 * first:.1f} ms", repr(written[0]), words])
    if len(rows) == 3:
        nearest = library.texts[library.find(text)[0]]
        print(f"The most similar stored prompt: {nearest[len(head) : len(nearest) - len(end)]}\n")
    print(table(["", "to the first token", "first token", "answer"], rows[1:]))
    if len(rows) == 3:
        print("\nwarm: the first token from summary tokens of the stored prompt, the rest from the exact cache\n"
              "cold: the prompt is read before the first token")
        if times["warm"] >= times["cold"]:
            print(f"Nothing is gained here: {len(ids)} tokens are read as fast as a stored prompt is found.")


def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from studies import projection
    from support.cli import CommandLine, nonempty, whole_number

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["study"]:
        return projection.main(argv[1:])
    cli = CommandLine(__doc__, 'python3 %(prog)s ask "Which wood lies near Tolben?"',
                      f"pocket or pocket-rotary; with ask --library FOLDER that of its study: {NAMES}")
    cli.add_argument("what", nargs="?", default="demo", choices=("demo", "ask", "study"),
                     help="demo: the falsification test in 20 seconds; ask: answer QUESTION warm and cold; study: the "
                     "whole test, which has a --help of its own")
    cli.add_argument("question", nargs="?", type=nonempty, metavar="QUESTION",
                     help="ask: the question, put in the place of a stored prompt's")
    cli.add_model_arguments()
    cli.add_argument("--max-new-tokens", type=whole_number(1), metavar="N", help="ask: tokens to write; default: 32")
    cli.add_argument("--library", metavar="FOLDER",
                     help="ask: prompts stored by a study; default: a few quiz questions, read first")
    with cli.parse(argv) as args:
        cli.only(args.what, "ask", {"--max-new-tokens": args.max_new_tokens, "--library": args.library})
        if (args.what == "ask") != (args.question is not None):
            raise ValueError("ask needs a QUESTION, and nothing else takes one")
        projection.require_pocket(args.model, args.library)
        kind = projection.class_of(args.model)
        model = load_model(args.model, model_class=kind, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.what == "demo":
            projection.demo(model, tokenizer, args.seed)
        else:
            library = (projection.quiz_library(model, tokenizer, args.seed) if args.library is None else
                       Library.load(model, tokenizer, Path(args.library)))
            answer(library, tokenizer, args.question, args.max_new_tokens or 32)


if __name__ == "__main__":
    main()
