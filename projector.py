"""Cross-prompt KV projection: a first token before the prompt is read, from a similar prompt's
cache. Without arguments, the proposal goes through its own falsification test, reduced to 20
seconds; `ask` answers a question as proposed, by our summary tokens and exactly.
`python3 -m studies.projection` runs the whole test.

Stage 1, one linear map for each head, turns the cache of a prompt into m summary tokens. They are
fitted so that the prompt's last query reads from them what it reads from the cache. Stage 2, a
ridge regression on pairs of similar prompts, turns the summary tokens of a stored prompt into those
of a similar one. They stand at positions 0 to m - 1, and the last token of the new prompt follows;
its logits give the first new token. This is an approximation: only the first token comes from it,
and the whole prompt is read meanwhile.

Shapes: L layers, H heads, D head size, T tokens, m summary tokens, N prompts, F features of a head
(2 T D of a cache, 2 m D of summary tokens).

Source: "Cross-Prompt KV Projection Warm-Start: Reducing First-Token Latency via Linear Cache
Transfer", a proposal.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from gpt_kv_cache import KVCache, check_options, generate
from llama_kv_cache import rotate, rotation
from load_gpt2_weights import load_model, load_tokenizer, read_weights
from pocket import corpus
from recycle import prefilled_cache
from support.cli import CommandLine, utf8
from support.encoders import PairEncoder
from support.files import read_json, write_atomically, write_json
from support.fingerprints import fingerprint, raw_bytes
from support.geometry import kv_heads, rotary_settings
from support.regression import ridge
from support.statistics import kl
from support.tables import table
from support.tokenizers import END_OF_TEXT

STEPS = 200  # of L-BFGS, for each head
START_PENALTY = 1e-2  # of the ridge regression on segment means from which L-BFGS starts
MIN_SCALE = 1e-2  # of a feature, over the mean scale: near-constant ones aren't blown up


# --- A prompt: how it is divided, its exact cache and its queries ---------------------------------


@dataclass(frozen=True)
class Layout:
    """How a prompt is divided: first the tokens that m summary tokens stand for, then the last
    `tail` tokens, which are fed. The tail stands at its true positions or, as proposed, right after
    the summary tokens."""

    m: int
    tail: int = 1
    true_positions: bool = True

    def tail_position(self, T: int) -> int:
        """Position of the tail's first token in a prompt of T tokens."""
        return T - self.tail if self.true_positions else self.m


@dataclass
class Prefill:
    """The record of an exact pass over a prompt: float32, on the CPU, where all fits are made."""

    ids: list[int]
    kv: Tensor  # (L, 2, H, T, D)
    q: Tensor  # (L, H, at most 64, D), queries of the last tokens; here H counts query heads
    hidden: Tensor  # (C,), the last block's output at the last token
    logits: Tensor  # (V,), of the token after the prompt


@torch.no_grad()
def prefill(model: nn.Module, ids: Sequence[int], tail: int = 64) -> Prefill:
    """Run a prompt through the model exactly, and record the data that both stages are fitted
    on."""
    # The first input of each layer's attention, the queries (1, H, T, D), then of ln_f (1, 1, C).
    inputs: list[Tensor] = []

    def record_input(_: nn.Module, module_args: tuple[Tensor, ...]) -> None:
        inputs.append(module_args[0])

    modules = [*(block.attn for block in model.h), model.ln_f]
    hooks = [module.register_forward_pre_hook(record_input) for module in modules]
    try:
        cache = prefilled_cache(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    *queries, output = inputs
    return Prefill(
        list(ids),
        kv=torch.stack([layer[:, 0] for layer in cache.layers]).float().cpu(),
        q=torch.stack([q[0, :, -tail:] for q in queries]).float().cpu(),
        hidden=output[0, -1].float().cpu(),
        logits=model.head(output)[0, -1].float().cpu(),
    )


def shift_positions(model: nn.Module, x: Tensor, offsets: Tensor) -> Tensor:
    """Rotate a Llama's keys or queries x (..., S, D) by `offsets` (S,) more positions. A GPT-2's
    don't depend on rotations and are returned unchanged."""
    if not rotary_settings(model.config):
        return x
    return rotate(x, rotation(offsets, model.config))


def tail_queries(model: nn.Module, prompt: Prefill, tail: int = 1) -> Tensor:
    """Return the queries (L, H, R, D) of a prompt's last `tail` tokens, by the head of keys that
    they read, at positions relative to the first of these tokens. R is `tail`, in a Llama times the
    number of query heads that share a head of keys. Raises ValueError if fewer queries were
    recorded."""
    if tail > prompt.q.size(-2):
        raise ValueError(
            f"a tail of {tail} tokens needs as many queries, but {prompt.q.size(-2)} are recorded"
        )
    q = prompt.q[:, :, -tail:]
    q = shift_positions(model, q, torch.full((tail,), tail - len(prompt.ids)))
    n_heads = kv_heads(model.config)
    return q.unflatten(1, (n_heads, -1)).transpose(2, 3).flatten(2, 3)  # by token, then by head


def cache_before_last(model: nn.Module, prompt: Prefill) -> Tensor:
    """Return the exact cache (L, 2, H, T - 1, D) of all tokens but the last, with keys at positions
    relative to the last."""
    k, v = prompt.kv[..., :-1, :].unbind(1)
    offsets = torch.full((k.size(-2),), 1 - len(prompt.ids))
    return torch.stack([shift_positions(model, k, offsets), v], 1)


def attention_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention's outputs (..., R, D) for R queries (..., R, D), each over all keys and values
    (..., S, D)."""
    weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)  # (..., R, S)
    return weights @ v


# --- Stage 1: a cache becomes m summary tokens ----------------------------------------------------


def segment_means(k: Tensor, v: Tensor, m: int) -> Tensor:
    """Return the mean keys and values (H, m, 2 D) of m nearly equal segments of a cache, whose keys
    k and values v are (H, any, D)."""
    segments = torch.cat([k, v], -1).tensor_split(m, dim=1)
    return torch.stack([segment.mean(1) for segment in segments], 1)


def fit_head_map(
    x: Tensor, q: Tensor, outputs: Tensor, initial: Tensor, penalty: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Return one head's map C (F, m * 2 D) and constant (m, 2 D), fitted in float64 on N prompts.

    x: features (N, F); q, outputs: queries and what they read from the exact cache, (N, R, D) each;
    initial: summary tokens (N, m, 2 D) that the fit starts from.

    The loss is |attention(q, x C) - out|^2 / |out|^2 + penalty / N * mean |x|^2 * |C|^2, with sums
    over all prompts. Attention includes a softmax, so the minimum has no closed form.
    """
    root, dual = coordinates_in_span(x)
    constant = initial.mean(0)
    B = ridge(root, (initial - constant).flatten(1), START_PENALTY).contiguous()

    def loss() -> Tensor:
        summaries = (root @ B).unflatten(1, constant.shape) + constant  # (N, m, 2 D)
        approximation = attention_output(q, *summaries.chunk(2, -1))
        error = (approximation - outputs).square().sum() / outputs.square().sum()
        return error + penalty * B.square().sum() / len(x)

    minimise(loss, [B, constant], steps)
    return x.mT @ (dual @ B.detach()), constant.detach()


def coordinates_in_span(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return root and dual, (N, R) each, of features x (N, F) of rank R.

    Every map C that a fit can end with is x^T dual B for some B. Then x C is root B, and |C|^2 is
    |B|^2 divided by the mean |x|^2 of a prompt. So a fit can look for B, which has R rows, where C
    has F. Chapter 6 derives this.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(x @ x.mT)
    positive = eigenvalues > 1e-10 * eigenvalues[-1]
    eigenvalues, eigenvectors = eigenvalues[positive], eigenvectors[:, positive]  # (R,), (N, R)
    mean_square = eigenvalues.sum() / len(x)
    root = eigenvectors * (eigenvalues / mean_square).sqrt()
    dual = eigenvectors / (eigenvalues * mean_square).sqrt()
    return root, dual


def minimise(loss: Callable[[], Tensor], parameters: list[Tensor], steps: int) -> None:
    """Minimise a loss by at most `steps` steps of L-BFGS, which change its parameters in place."""
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def loss_with_gradients() -> Tensor:
        optimizer.zero_grad()
        total = loss()
        total.backward()
        return total

    optimizer.step(loss_with_gradients)


class LayerMap(NamedTuple):
    """One layer's part of stage 1."""

    mean: Tensor  # (H, T, 2 D), of the features
    scale: Tensor  # (H, T, 2 D), of the features
    weight: Tensor  # (H, F, m * 2 D), a map C for each head
    constant: Tensor  # (H, m, 2 D), the summary tokens of mean features


def feature_statistics(x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the scale (H, T, 2 D) of features (H, N, T, 2 D), over the tokens that
    are present (N, T, 1)."""
    count = present.sum(0).clamp(min=1)  # (T, 1)
    mean = x.sum(1) / count
    centred = (x - mean[:, None]) * present
    scale = centred.square().sum(1).div(count).sqrt()
    return mean, scale.clamp(min=float(MIN_SCALE * scale.mean()))


def standardise(x: Tensor, present: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return features (H, N, T, 2 D) as vectors (H, N, F) in units of their scale, 0 where a token
    isn't present."""
    return ((x - mean[:, None]) / scale[:, None] * present).flatten(2)


COMPRESSOR_NUMBERS = ("m", "T", "steps", "penalty")  # what a Compressor has beside its maps


class Compressor:
    """Stage 1 as the source defines it: one linear map C for each head, from a prompt's whole cache
    [K || V], R^(T x 2 D), to its summary tokens, R^(m x 2 D). The map is the same for all prompts.

    C minimises the sum over prompts of |attention(q, C [K || V]) - o|^2 plus the penalty times
    |C|^2. Here q is the prompt's last query, and o is what it reads from the exact cache. (In a
    Llama, R queries share a head of keys, and so its summary tokens: the loss sums over all R.) The
    caches are padded on the left to T tokens, the length of the longest, and standardised, as the
    source advises; padding is 0 after that and has no effect. Standardised features have mean 0, so
    a constant is added to the map's output, as in any ridge regression.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Prefill],
        m: int,
        penalty: float,
        T: int = 0,
        steps: int = STEPS,
    ) -> None:
        """T: the most tokens before its last one that a prompt may have; 0: as many as the longest
        prompt has.
        steps: of L-BFGS.
        Raises ValueError if a prompt has more tokens before its last one than T, or fewer than m.
        """
        self.model, self.m, self.penalty, self.steps = model, m, penalty, steps
        self.T = T or max(len(prompt.ids) for prompt in prompts) - 1
        shortest = min(len(prompt.ids) for prompt in prompts) - 1
        if shortest < m:
            raise ValueError(
                f"{m} summary tokens can't stand for {shortest} tokens before the last"
            )
        caches = self.caches_before_last(prompts)
        q = torch.stack([tail_queries(model, prompt) for prompt in prompts], 2)  # (L, H, N, R, D)
        layers = tqdm(range(len(model.h)), desc=f"stage 1, penalty {penalty:g}", leave=False)
        self.layers = [self.fit_layer(caches, layer, q[layer].double()) for layer in layers]

    def fit_layer(self, caches: Sequence[Tensor], layer: int, q: Tensor) -> LayerMap:
        """Return a layer's map, fitted on the caches of N prompts and their queries
        (H, N, R, D)."""
        outputs, starts = [], []
        for i, cache in enumerate(caches):
            k, v = cache[layer].double()  # (H, any, D) each
            outputs.append(attention_output(q[:, i], k, v))
            starts.append(segment_means(k, v, self.m))
        output = torch.stack(outputs, 1)  # (H, N, R, D)
        initial = torch.stack(starts, 1)  # (H, N, m, 2 D)
        x, present = self.pad_left(caches, layer)
        mean, scale = feature_statistics(x, present)
        weights, constants = [], []
        for head in zip(standardise(x, present, mean, scale), q, output, initial, strict=True):
            weight, constant = fit_head_map(*head, self.penalty, self.steps)
            weights.append(weight)
            constants.append(constant)
        return LayerMap(
            mean.float(),
            scale.float(),
            torch.stack(weights).float(),
            torch.stack(constants).float(),
        )

    def caches_before_last(self, prompts: Sequence[Prefill]) -> list[Tensor]:
        """Return the caches (L, 2, H, any, D) of prompts before their last token. Raises ValueError
        if one is longer than the map."""
        longest = max(len(prompt.ids) for prompt in prompts) - 1
        if longest > self.T:
            raise ValueError(
                f"a prompt has {longest} tokens before its last, the map's longest {self.T}"
            )
        return [cache_before_last(self.model, prompt) for prompt in prompts]

    def pad_left(self, caches: Sequence[Tensor], layer: int) -> tuple[Tensor, Tensor]:
        """Return [K || V] (H, N, T, 2 D) of one layer in float64, with zeros on the left where a
        cache is shorter, and which tokens are present, (N, T, 1)."""
        H, _, D = caches[0].shape[2:]
        x = torch.zeros(H, len(caches), self.T, 2 * D, dtype=torch.float64)
        present = torch.zeros(len(caches), self.T, 1, dtype=torch.bool)
        for i, cache in enumerate(caches):
            first = self.T - cache.size(-2)
            x[:, i, first:] = torch.cat([*cache[layer]], -1)
            present[i, first:] = True
        return x, present

    def __call__(self, prompts: Sequence[Prefill]) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of N prompts. Raises ValueError if one is
        longer than the map."""
        caches, summaries = self.caches_before_last(prompts), []
        for layer, (mean, scale, weight, constant) in enumerate(self.layers):
            features = standardise(*self.pad_left(caches, layer), mean, scale)
            mapped = features.float() @ weight  # (H, N, m * 2 D)
            mapped = mapped.unflatten(2, constant.shape[1:]) + constant[:, None]
            k, v = mapped.transpose(0, 1).chunk(2, -1)  # (N, H, m, D) each
            summaries.append(torch.stack([k, v], 1))
        return torch.stack(summaries, 1)

    def save(self, path: Path) -> None:
        """Write the map to a safetensors file."""
        numbers = [getattr(self, name) for name in COMPRESSOR_NUMBERS]
        tensors = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        model_bytes = bytes.fromhex(fingerprint(self.model))
        tensors["model"] = torch.tensor([*model_bytes], dtype=torch.uint8)
        for layer, layer_map in enumerate(self.layers):
            tensors |= {f"{layer}.{name}": x for name, x in layer_map._asdict().items()}
        write_atomically(path, lambda file: save_file(tensors, file))

    @classmethod
    def load(cls, path: Path, model: nn.Module) -> Compressor:
        """Return the map in a file that save() wrote, for the same model. Raises FileNotFoundError if
        there is none, ValueError if it holds something else."""
        tensors = read_weights(path)
        names = [
            f"{layer}.{name}" for layer in range(model.config.n_layer) for name in LayerMap._fields
        ]
        if {*tensors} != {"numbers", "model", *names} or len(tensors["numbers"]) != 4:
            raise ValueError(
                f"{path} is no compressor of {model.config.n_layer} layers: it holds {len(tensors)} tensors"
            )
        if tensors["model"].tolist() != [*bytes.fromhex(fingerprint(model))]:
            raise ValueError(
                f"{path} was fitted on another model or dtype: name that, or fit it again"
            )
        compressor = cls.__new__(cls)
        m, T, steps, penalty = tensors["numbers"].tolist()
        compressor.model, compressor.penalty = model, penalty
        compressor.m, compressor.T, compressor.steps = int(m), int(T), int(steps)
        compressor.layers = []
        for layer in range(model.config.n_layer):
            parts = [tensors[f"{layer}.{name}"] for name in LayerMap._fields]
            compressor.layers.append(LayerMap(*parts))
        return compressor


# --- Stage 2: summary tokens of one prompt become those of another --------------------------------


def vectors_by_head(summaries: Tensor) -> Tensor:
    """Return summary tokens (N, L, 2, H, m, D) as one vector per head (L, H, N, F)."""
    return summaries.permute(1, 3, 0, 2, 4, 5).flatten(3)


class Projector:
    """One linear map for each head, from the summary tokens of a stored prompt to those of a
    similar one, fitted on pairs of prompts.

    The map needs nothing from the new prompt, so summary tokens can be mapped when they are stored.
    A large penalty pulls the result towards the mean of all targets.
    """

    def __init__(self, sources: Tensor, targets: Tensor, penalty: float) -> None:
        """sources, targets: summary tokens (N, L, 2, H, m, D) of N pairs of similar prompts."""
        self.penalty = penalty
        x = vectors_by_head(sources.double())  # (L, H, N, F)
        y = vectors_by_head(targets.double())
        mean, scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        offset = y.mean(-2, keepdim=True)
        x, y = (x - mean) / scale, y - offset
        self.weight = torch.empty(*x.shape[:2], x.size(-1), y.size(-1))  # (L, H, F, F)
        for weight, *layer in zip(self.weight, x, y, strict=True):
            weight.copy_(ridge(*layer, penalty))  # gigabytes in a large model: in place
        self.mean, self.scale, self.offset = mean.float(), scale.float(), offset.float()
        # (L, H, 1, F) each

    def __call__(self, summaries: Tensor) -> Tensor:
        """Return summary tokens (N, L, 2, H, m, D) after projection, in the same shape."""
        N, L, _, H, m, D = summaries.shape
        y = (vectors_by_head(summaries) - self.mean) / self.scale @ self.weight + self.offset
        return y.view(L, H, N, 2, m, D).permute(2, 0, 3, 1, 4, 5)

    def save(self, path: Path) -> None:
        """Write the map to a safetensors file."""
        tensors = {name: torch.as_tensor(value) for name, value in vars(self).items()}
        write_atomically(path, lambda file: save_file(tensors, file))

    @classmethod
    def load(cls, path: Path) -> Projector:
        """Return the map in a file that save() wrote. Raises FileNotFoundError if there is none,
        ValueError if it holds something else."""
        tensors = read_weights(path)
        if {*tensors} != {"mean", "scale", "offset", "weight", "penalty"}:
            raise ValueError(f"{path} is no projector: it holds {', '.join(sorted(tensors))}")
        projector = cls.__new__(cls)
        vars(projector).update(tensors)
        return projector


# --- A new prompt: retrieval, summary tokens as the cache, the exact cache in the background ------


def cache_of_summary(model: nn.Module, summary: Tensor, next_pos: int) -> KVCache:
    """Return a cache of summary tokens (L, 2, H, m, D), which text from position next_pos on can
    follow."""
    m, device = summary.size(-2), model.wte.weight.device
    k, v = summary.to(device, model.wte.weight.dtype).unbind(1)
    layers = torch.stack(
        [shift_positions(model, k, torch.full((m,), next_pos, device=device)), v], 1
    )
    pos = torch.arange(next_pos - m, next_pos, device=device)
    return KVCache([layer[:, None] for layer in layers], pos)


def names_within_sentences(text: str) -> set[str]:
    """Return the words of a text that are capitalised although they don't begin a sentence, and its
    numbers."""
    return set(re.findall(r"(?<=[^.!?:\"\s] )[A-Z]\w+|\b\d+\b", text))


def checksum(description: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Return a CRC-32 of all that a library holds."""
    crc = zlib.crc32(json.dumps(description, sort_keys=True).encode())
    for name in sorted(tensors):
        crc = zlib.crc32(raw_bytes(tensors[name]), zlib.crc32(name.encode(), crc))
    return crc


class Library:
    """Stored prompts, with their embeddings and the summary tokens that a similar prompt starts
    from.

    warm_start() returns a cache that stands for all of a new prompt but its tail, or None if the
    prompt has to be read, because no stored prompt is similar enough (or, with match_names, has its
    names).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        encoder: PairEncoder,
        texts: Sequence[str],
        summaries: Tensor,
        *,
        threshold: float = -1.0,
        match_names: bool = False,
        shared_chars: int = 0,
    ) -> None:
        """summaries (N, L, 2, H, m, D): of the N texts, mapped by the projector or not. threshold:
        tau, the least similarity at which a stored text is used, which the study's choose_tau
        picks. match_names: whether names have to agree, too. shared_chars: the number of characters
        that all texts begin with, which are ignored for similarity."""
        if len(texts) != len(summaries):
            raise ValueError(f"{len(texts)} texts, {len(summaries)} summaries: no match")
        self.model, self.layout, self.encoder, self.texts = model, layout, encoder, list(texts)
        self.summaries, self.threshold = summaries, threshold
        self.match_names, self.shared_chars = match_names, shared_chars
        texts = [text[shared_chars:] for text in self.texts]
        self.embeddings = encoder(texts) if texts else np.zeros((0, 1))
        self.count_names()

    def count_names(self) -> None:
        """Find the names in the stored texts, and count them."""
        self.known_names = {name for text in self.texts for name in names_within_sentences(text)}
        self.name_counts = Counter(name for text in self.texts for name in self.names_of(text))

    def add(self, text: str, summary: Tensor) -> None:
        """Store one more text with its summary tokens (L, 2, H, m, D). Raises ValueError, and stores
        nothing, if their shape or the beginning of the text isn't that of the stored ones."""
        shape, given = self.summaries.shape[1:], summary.shape
        if given != shape if self.texts else (len(given), given[-2]) != (5, self.layout.m):
            raise ValueError(f"summary tokens of shape {[*given]}, stored are {[*shape]}")
        shared = self.texts[0][: self.shared_chars] if self.texts else ""
        if not text.startswith(shared):
            raise ValueError(f"the text doesn't begin with {shared!r}, as the stored ones do")
        summaries, embeddings = summary[None], self.encoder([text[self.shared_chars :]])
        if self.texts:
            summaries = torch.cat([self.summaries, summaries.to(self.summaries)])
            embeddings = np.concatenate([self.embeddings, embeddings])
        self.summaries, self.embeddings = summaries, embeddings
        self.texts.append(text)
        self.count_names()

    def names_of(self, text: str) -> set[str]:
        """Return the names and numbers of a text. A capitalised word at the beginning of a sentence
        is a name if some stored text has it within a sentence."""
        return names_within_sentences(text) | (
            set(re.findall(r"[A-Z]\w+", text)) & self.known_names
        )

    def nearest(self, text: str) -> tuple[int, float]:
        """Return the index of the most similar stored text and the similarity, (-1, -1) if there is
        none. With match_names, it is the first of the 20 most similar texts that shares more than
        half of this text's rare names, if it has any."""
        if not self.texts:
            return -1, -1.0
        similarity = self.embeddings @ self.encoder([text[self.shared_chars :]])[0]
        rare_limit = max(1, 0.05 * len(self.texts))
        rare = {name for name in self.names_of(text) if self.name_counts[name] <= rare_limit}
        for i in np.argsort(-similarity, kind="stable")[:20]:
            if not self.match_names or self.shares_names(rare, self.texts[i]):
                return int(i), float(similarity[i])
        return -1, -1.0

    def shares_names(self, names: set[str], text: str) -> bool:
        """Return whether a text has more than half of these names, or `names` is empty."""
        return not names or 2 * len(names & self.names_of(text)) > len(names)

    def warm_start(self, text: str, ids: Sequence[int]) -> KVCache | None:
        """Return a cache that stands for all but the last `tail` tokens of a text, whose tokens are
        ids; None if the prompt has to be read, also because it is too short."""
        layout = self.layout
        index, similarity = self.nearest(text)
        if index < 0 or similarity < self.threshold or len(ids) - layout.tail < layout.m:
            return None
        return cache_of_summary(self.model, self.summaries[index], layout.tail_position(len(ids)))

    def save(self, folder: Path) -> None:
        """Write library.safetensors and library.json to a folder."""
        tensors = {
            "summaries": self.summaries.contiguous(),
            "encoder.mean": self.encoder.mean.contiguous(),
            "encoder.weight": self.encoder.weight.contiguous(),
        }
        description = {
            "fingerprint": fingerprint(self.model),
            "layout": asdict(self.layout),
            "threshold": self.threshold,
            "guard": self.match_names,
            "skip": self.shared_chars,
            "tokens": list(self.encoder.column_of),
            "texts": self.texts,
        }
        description["checksum"] = checksum(description, tensors)
        write_atomically(folder / "library.safetensors", lambda file: save_file(tensors, file))
        write_json(folder / "library.json", description)

    @classmethod
    def load(cls, model: nn.Module, tokenizer: tiktoken.Encoding, folder: Path) -> Library:
        """Return the library in a folder. Raises FileNotFoundError if there is none, ValueError
        if it isn't one, has changed since it was saved, or was made with another model."""
        description = read_json(folder / "library.json", checksum=int)
        tensors = read_weights(folder / "library.safetensors")
        saved_checksum = description.pop("checksum")
        if checksum(description, tensors) != saved_checksum:  # else all of it is what save() wrote
            raise ValueError(
                f"the library in {folder} has changed since it was saved: make it again"
            )
        if description["fingerprint"] != fingerprint(model):
            raise ValueError(
                f"the library in {folder} was made with another model or dtype: name that, or make it again"
            )
        mean, weight = tensors["encoder.mean"], tensors["encoder.weight"]
        encoder = PairEncoder(tokenizer, description["tokens"], mean, weight)
        return cls(
            model,
            Layout(**description["layout"]),
            encoder,
            description["texts"],
            tensors["summaries"],
            threshold=description["threshold"],
            match_names=description["guard"],
            shared_chars=description["skip"],
        )


def generate_warm(
    model: nn.Module,
    ids: Tensor,
    warm_cache: KVCache,
    tail: int,
    max_new_tokens: int,
    until_ready: bool = False,
) -> Iterator[Tensor]:
    """Yield tokens after ids (1, T) as generate() does, but take the first one from a warm cache,
    which stands for all of ids but the tail. Meanwhile, a thread of low priority reads ids exactly.
    All further tokens are those that generate() yields after ids and the tokens already written.

    until_ready: as the source has it, tokens come from the warm cache until the exact one is ready
    (or the context is full); how many these are is a matter of time. Raises ValueError if ids and
    the first token exceed the context.
    """
    check_options(ids, max_new_tokens, 0.0, None)
    if max_new_tokens == 0:
        return
    T, n_ctx = ids.size(1), model.config.n_ctx
    if n_ctx <= T:
        raise ValueError(f"{T} tokens and the first new one exceed the context, {n_ctx}")
    # The zeros stand for the cached tokens, which the model never reads.
    stand_in = torch.cat([ids.new_zeros(1, len(warm_cache)), ids[:, T - tail :]], 1)
    warm_tokens = generate(model, stand_in, max_new_tokens, cache=warm_cache)
    written = [next(warm_tokens)]
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        exact_reading = pool.submit(prefilled_cache, model, ids[0].tolist())
        yield written[0]
        most = min(max_new_tokens, n_ctx - T) if until_ready else 1
        while len(written) < most and not exact_reading.done():
            written.append(next(warm_tokens))
            yield written[-1]
        exact_cache = exact_reading.result()
    text = torch.cat([ids, *written], 1)
    yield from generate(model, text, max_new_tokens - len(written), cache=exact_cache)


def lower_thread_priority() -> None:
    """Give this thread a low priority, on systems where each thread has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


# --- One question, and a demo ---------------------------------------------------------------------

# Made by python3 -m studies.projection --kinds quiz.
QUIZ_LIBRARY = Path(__file__).resolve().parent / "data" / "quiz_library"
PROPOSED, OURS = "proposed", "ours"  # folders in it, and names of the ways
GOOD_KL = 0.05  # nats, the proposal's threshold
FirstToken = Callable[[str, list[int]], Tensor]  # a text and its ids -> logits (V,)
shared_beginning = os.path.commonprefix  # of texts or lists, element by element


def load_libraries(
    model: nn.Module, tokenizer: tiktoken.Encoding, folder: Path
) -> dict[str, Library]:
    """Return the libraries that a study has stored in a folder, by name: the proposal's, if it is
    there, and ours. Raises as Library.load() does."""
    # A study leaves out the proposal's library if its map would be too large.
    if not (folder / OURS).is_dir():
        raise FileNotFoundError(
            f"{folder} is no library: it lacks a folder {OURS}, as one of the projection study has"
        )
    ways = [PROPOSED, OURS] if (folder / PROPOSED).is_dir() else [OURS]
    return {way: Library.load(model, tokenizer, folder / way) for way in ways}


def shared_template(texts: Sequence[str]) -> tuple[str, str]:
    """Return the beginning that all texts share, up to the end of a word, and the whole lines at
    the end that they share."""
    head = shared_beginning([*texts])
    tail = shared_beginning([text[::-1] for text in texts])[::-1]
    end_of_word = 1 + max(head.rfind(" "), head.rfind("\n"))
    return head[:end_of_word], tail[tail.index("\n") :] if "\n" in tail else ""


@torch.no_grad()
def logits_after(model: nn.Module, ids: list[int], cache: KVCache | None = None) -> Tensor:
    """Return the logits (V,) of the token after ids, which follow a cache, if any."""
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    return model(prompt, cache if cache is not None else KVCache(), last_only=True)[0, -1]


@torch.no_grad()
def first_logits(library: Library, text: str, ids: list[int]) -> Tensor:
    """Return the logits (V,) of a text's first new token: from summary tokens and the tail if a
    stored prompt is similar enough, else by reading all."""
    warm_cache = library.warm_start(text, ids)
    ids_to_read = ids if warm_cache is None else ids[-library.layout.tail :]
    return logits_after(library.model, ids_to_read, warm_cache)


def first_line(tokens: Iterator[Tensor], tokenizer: tiktoken.Encoding) -> str:
    """Return the text of tokens up to the end of its first line."""
    text = ""
    for token in tokens:
        text += tokenizer.decode([int(token)])
        if "\n" in text or END_OF_TEXT in text:
            break
    return text.partition(END_OF_TEXT)[0].partition("\n")[0].strip()


def answer_question(
    libraries: dict[str, Library], tokenizer: tiktoken.Encoding, line: str, max_new_tokens: int
) -> None:
    """Answer a question as proposed, by our summary tokens, and exactly; print for each way the
    time to the first token, its KL and the answer.

    The question, `line`, takes the place in which the stored prompts differ from one another.
    """
    first_library = next(iter(libraries.values()))
    model = first_library.model
    head, end = shared_template(first_library.texts)
    text = f"{head}{line.strip()}{end}"
    ids = tokenizer.encode("", allowed_special="all")  # tokens that begin a text, if any
    ids += tokenizer.encode(text, disallowed_special=())  # a control token's name is text
    exact = logits_after(model, ids)  # and a process's first pass is slow
    index, similarity = first_library.nearest(text)
    stored = first_library.texts[index] if index >= 0 else "none"
    print(f"The most similar stored prompt: {stored.removeprefix(head).removesuffix(end)}")
    print(f"Its similarity is {similarity:.2f}; tau is {first_library.threshold:.2f}.\n")
    rows = []
    for name, library in {**libraries, "exactly": None}.items():
        started = time.perf_counter()
        logits = first_logits(library, text, ids) if library else logits_after(model, ids)
        token = tokenizer.decode([int(logits.argmax())])
        milliseconds = 1000 * (time.perf_counter() - started)
        divergence = kl(exact.double(), logits.double())
        warm_cache = library.warm_start(text, ids) if library else None
        prompt = torch.tensor([ids], device=logits.device)
        if warm_cache is not None:
            tokens = generate_warm(model, prompt, warm_cache, library.layout.tail, max_new_tokens)
        else:
            tokens = generate(model, prompt, max_new_tokens)
        if library and warm_cache is None:
            name += " (cold)"
        answer = first_line(tokens, tokenizer)
        rows.append([name, f"{milliseconds:.1f} ms", f"{divergence:.2f}", repr(token), answer])
    print(table(["", "to the first token", "its KL", "first token", "answer"], rows))
    print("""
proposed: projected summary tokens at the first positions, then the question's last token; ours:
summary tokens as stored, then its last tokens, where they are. After the first token, both go on
from the exact cache. (cold): no stored question is similar enough, so all is read.""")


def reworded_questions(stored: set[str]) -> list[str]:
    """Return quiz questions that ask for the same as stored ones, in other words."""
    questions = []
    for family in corpus.quiz_families("test"):
        texts = {question.prompt for question in family}
        if texts & stored:
            questions += sorted(texts - stored)
    return questions


def ways_to_a_first_token(
    libraries: dict[str, Library], tokenizer: tiktoken.Encoding
) -> dict[str, FirstToken]:
    """Return the ways that the demo compares: the exact one first."""
    proposal = libraries[PROPOSED]
    model = proposal.model
    neighbours = [tokenizer.encode(text) for text in proposal.texts]
    neighbour_logits = [logits_after(model, ids) for ids in neighbours]
    shared_ids = shared_beginning(neighbours)
    shared_cache = prefilled_cache(model, shared_ids)

    def from_shared_beginning(_: str, ids: list[int]) -> Tensor:
        return logits_after(model, ids[len(shared_ids) :], shared_cache.clone())

    def from_neighbour(text: str, _: list[int]) -> Tensor:
        return neighbour_logits[proposal.nearest(text)[0]]

    return {
        "cold: the prompt is read": lambda _, ids: logits_after(model, ids),
        "rival: exact shared beginning, the rest read": from_shared_beginning,
        "proposed: 8 projected summary tokens, 1 token read": partial(first_logits, proposal),
        "ours: 1 summary token as stored, 16 tokens read": partial(first_logits, libraries[OURS]),
        "control: the neighbour's logits": from_neighbour,
    }


def time_first_tokens(
    first_token: FirstToken, prompts: Sequence[tuple[str, list[int]]]
) -> tuple[float, Tensor]:
    """Return the mean milliseconds to the first token of N prompts, and its logits (N, V)."""
    int(first_token(*prompts[0]).argmax())  # a first pass is slow
    started = time.perf_counter()
    logits = [first_token(text, ids) for text, ids in prompts]
    int(logits[-1].argmax())  # waits for the device
    milliseconds = 1000 * (time.perf_counter() - started) / len(prompts)
    return milliseconds, torch.stack(logits).double()


def demo(libraries: dict[str, Library], tokenizer: tiktoken.Encoding) -> None:
    """Ask the stored questions in other words; print how soon the first token comes, and how good
    it is, as proposed, by our summary tokens and by two rivals."""
    proposal = libraries[PROPOSED]
    stored = {*proposal.texts}
    questions = reworded_questions(stored)
    found = [(text, *proposal.nearest(text)) for text in questions]
    similar = [text for text, i, likeness in found if i >= 0 and likeness >= proposal.threshold]
    prompts = [(text, tokenizer.encode(text)) for text in similar]
    rows = []
    for name, first_token in ways_to_a_first_token(libraries, tokenizer).items():
        milliseconds, logits = time_first_tokens(first_token, prompts)
        if not rows:  # the first way is the exact one
            exact, cold_milliseconds = logits, milliseconds
        divergences = kl(exact, logits)
        good_share = (divergences <= GOOD_KL).double().mean()
        saved_share = 1 - milliseconds / cold_milliseconds
        figures = [f"{milliseconds:.1f}", f"{saved_share:.0%}", f"{divergences.mean():.2f}"]
        rows.append([name, *figures, f"{good_share:.0%}"])
    header = ["the first token", "ms", "saved", "KL(cold || warm)", "KL <= 0.05"]
    print(f"""\
{len(stored)} questions are stored, and asked in {len(questions)} other wordings; for
{len(prompts)} of these, the stored one that is found is similar enough.

{table(header, rows)}

Exact: the cold start and the rival. Approximate: the first token of the others; all that follow
come from the prompt, which is read meanwhile.
To survive its own test a warm start must save 35%, with KL <= {GOOD_KL} on 80% of the prompts.

The whole test takes two and a half hours: python3 -m studies.projection""")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(
        __doc__,
        'python3 %(prog)s ask "Name the river that Hexley stands on."',
        "pocket; another, such as smollm2, for ask with --library",
    )
    test = cli.add_action("demo", "the falsification test, in 20 seconds", default=True)
    ask = cli.add_action("ask", "answer QUESTION in three ways")
    for action in (test, ask):
        action.add_model_arguments()
    test.set_defaults(library=None)
    ask.add_argument(
        "question", type=utf8, metavar="QUESTION", help="replaces a stored prompt's question"
    )
    ask.add_length_argument(32)
    ask.add_argument(
        "--library",
        metavar="FOLDER",
        help="prompts stored by a study; default: the quiz questions in data/",
    )
    with cli.parse(argv) as args:
        if args.model != "pocket" and args.library is None:
            raise ValueError(
                f"the stored questions are pocket's: for {args.model}, store others by "
                f"`python3 -m studies.projection --model {args.model}`, with `--pairs FILE` if that asks for it, then "
                f"`ask QUESTION --model {args.model} --library results/projection/library`"
            )
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        libraries = load_libraries(model, tokenizer, Path(args.library or QUIZ_LIBRARY))
        if args.action == "ask":
            answer_question(libraries, tokenizer, args.question, args.max_new_tokens)
        else:
            demo(libraries, tokenizer)


if __name__ == "__main__":
    main()
