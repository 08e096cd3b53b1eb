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

From prompts to a library, which load() serves later:

    stage_1 = Compressor([prefill(model, ids) for ids in fitted_ids], m=8, penalty=1e-3)
    stage_2 = Projector(stage_1(sources), stage_1(targets), penalty=0.1)
    layout, summaries = Layout(m=8, true_positions=False), stage_2(stage_1(stored))
    library = Library(model, layout, encoder, texts, summaries, threshold=0.9)
    library.save(folder)
    tokens = generate_warm(model, ids, library.warm_start(text, ids[0].tolist()), 1, 100)

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
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from formats.checkpoints import open_checkpoint
from formats.configs import read_config
from formats.tensors import read_weights
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import KVCache, generate
from llama_kv_cache import rotate, rotation
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from recycle import prefilled_cache
from support.cli import CommandLine, utf8
from support.encoders import PairEncoder
from support.files import read_json, write_atomically, write_json
from support.fingerprints import fingerprint, raw_bytes
from support.geometry import check_kinds, kv_heads, rotary_settings
from support.regression import ridge
from support.statistics import kl
from support.tables import table
from support.timing import time_call

QUERIES = 64  # of a prompt's last tokens, which are recorded
STEPS = 200  # of L-BFGS, for each head
START_PENALTY = 1e-2  # of the ridge regression on segment means from which L-BFGS starts
shared_beginning = os.path.commonprefix  # of texts or lists, element by element
# What a thread of low priority begins with, on systems where each thread has a priority of its own:
LOWER_PRIORITY = partial(os.nice, 10) if sys.platform == "linux" else None
ONE_CACHE = "summary tokens need one cache for all layers, not one for each"
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


@dataclass(eq=False)  # one equals only itself
class Prefill:
    """The record of an exact pass over a prompt: float32, on the CPU, where all fits are made."""

    model: nn.Module
    ids: list[int]
    kv: Tensor  # (L, 2, H, T, D)
    q: Tensor  # (L, H, at most QUERIES, D), queries of the last tokens; here H counts query heads
    hidden: Tensor  # (C,), the last block's output at the last token
    logits: Tensor  # (V,), of the token after the prompt


@torch.no_grad()
def prefill(model: nn.Module, ids: Sequence[int]) -> Prefill:
    """Run a prompt through the model exactly, and record the data that both stages are fitted
    on. Raises ValueError if its layers have caches of their own."""
    check_kinds(model.config, ONE_CACHE)
    # The first input of each layer's attention, the queries (1, H, T, D), then of ln_f (1, 1, C).
    inputs: list[Tensor] = []
    modules = [*(block.attn for block in model.h), model.ln_f]

    def record_input(_: nn.Module, module_args: tuple[Tensor, ...]) -> None:
        inputs.append(module_args[0])

    hooks = [module.register_forward_pre_hook(record_input) for module in modules]
    try:
        cache = prefilled_cache(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    *queries, output = inputs
    return Prefill(
        model,
        list(ids),
        kv=torch.stack([layer[:, 0] for layer in cache.layers]).float().cpu(),
        q=torch.stack([q[0, :, -QUERIES:] for q in queries]).float().cpu(),
        hidden=output[0, -1].float().cpu(),
        logits=model.head(output)[0, -1].float().cpu(),
    )


def shift_positions(model: nn.Module, x: Tensor, offsets: int | Tensor) -> Tensor:
    """Rotate a Llama's keys or queries x (..., S, D) by more positions: as many for all, or
    `offsets` (S,). A GPT-2's don't depend on rotations and are returned unchanged."""
    if not rotary_settings(model.config):
        return x
    offsets = torch.as_tensor(offsets, device=x.device).reshape(-1)
    return rotate(x, rotation(offsets, model.config))


def tail_queries(prompt: Prefill, tail: int = 1) -> Tensor:
    """Return the queries (L, H, R, D) of a prompt's last `tail` tokens, by the head of keys that
    they read, at positions relative to the first of these tokens. R is `tail`, in a Llama times the
    number of query heads that share a head of keys. At most QUERIES tokens' are recorded."""
    q = shift_positions(prompt.model, prompt.q[:, :, -tail:], tail - len(prompt.ids))
    q = q.unflatten(1, (kv_heads(prompt.model.config), -1))
    return q.transpose(2, 3).flatten(2, 3)  # by token, then by head


def cache_before_last(prompt: Prefill) -> Tensor:
    """Return the exact cache (L, 2, H, T - 1, D) of all tokens but the last, with keys at positions
    relative to the last."""
    k, v = prompt.kv[..., :-1, :].unbind(1)
    return torch.stack([shift_positions(prompt.model, k, 1 - len(prompt.ids)), v], 1)


def attention_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention's outputs (..., R, D) for R queries (..., R, D), each over all keys and values
    (..., S, D)."""
    weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)  # (..., R, S)
    return weights @ v


# --- Stage 1: a cache becomes m summary tokens ----------------------------------------------------


def segment_means(cache: Tensor, m: int) -> Tensor:
    """Return the mean keys and values (L, H, m, 2 D) of m nearly equal segments of a cache
    (L, 2, H, any, D)."""
    segments = torch.cat([*cache.unbind(1)], -1).tensor_split(m, dim=-2)
    return torch.stack([segment.mean(-2) for segment in segments], -2)


def fit_head_map(
    x: Tensor, q: Tensor, outputs: Tensor, initial: Tensor, penalty: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Return one head's map C (F, m * 2 D) and constant (m, 2 D), fitted in float64 on N prompts by
    at most `steps` steps of L-BFGS.

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

    def loss_with_gradients() -> Tensor:
        optimizer.zero_grad()
        total = loss()
        total.backward()
        return total

    optimizer = torch.optim.LBFGS(
        [B.requires_grad_(), constant.requires_grad_()],
        max_iter=steps,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        history_size=10,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(loss_with_gradients)
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


def padded_features(caches: Sequence[Tensor], layer: int, T: int) -> Tensor:
    """Return [K || V] (H, N, T, 2 D) of one layer of N caches in float64, with NaN on the left
    where a cache is shorter than T tokens. Raises ValueError if one is longer."""
    padded = []
    for cache in caches:
        missing = T - cache.size(-2)
        if missing < 0:
            raise ValueError(
                f"a prompt has {cache.size(-2)} tokens before its last, the map's longest {T}"
            )
        x = torch.cat([*cache[layer]], -1).double()  # (H, any, 2 D)
        padded.append(nn.functional.pad(x, (0, 0, missing, 0), value=math.nan))
    return torch.stack(padded, 1)


def standardise(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return features (H, N, T, 2 D) as vectors (H, N, F) in units of their scale, 0 where there is
    no token."""
    return ((x - mean[:, None]) / scale[:, None]).nan_to_num().flatten(2)


class HeadMaps:
    """The linear maps of one stage, one for each head of each layer, in tensors that a file
    keeps."""

    kept: tuple[str, ...]  # the names of these tensors

    def save(self, path: Path) -> None:
        """Write the maps to a safetensors file."""
        tensors = {name: torch.as_tensor(getattr(self, name)) for name in self.kept}
        write_atomically(path, lambda file: save_file(tensors, file))

    @classmethod
    def load(cls, path: Path) -> HeadMaps:
        """Return the maps in a file that save() wrote. Raises FileNotFoundError if there is none,
        ValueError if it holds something else."""
        tensors = read_weights(path)
        if {*tensors} != {*cls.kept}:
            raise ValueError(
                f"{path} is no {cls.__name__.lower()}: it holds {', '.join(sorted(tensors))}"
            )
        maps = cls.__new__(cls)
        vars(maps).update(tensors)
        return maps


class Compressor(HeadMaps):
    """Stage 1 as the source defines it: one linear map C for each head, from a prompt's whole cache
    [K || V], R^(T x 2 D), to its summary tokens, R^(m x 2 D). The map is the same for all prompts.

    C minimises the sum over prompts of |attention(q, C [K || V]) - o|^2 plus the penalty times
    |C|^2. Here q is the prompt's last query, and o is what it reads from the exact cache. (In a
    Llama, R queries share a head of keys, and so its summary tokens: the loss sums over all R.) The
    caches are padded on the left to T tokens, the length of the longest, and standardised, as the
    source advises; padding is 0 after that and has no effect. Standardised features have mean 0, so
    a constant is added to the map's output, as in any ridge regression.
    """

    kept = ("mean", "scale", "weight", "constant", "penalty", "model_fingerprint")

    def __init__(
        self,
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
        digest = bytes.fromhex(fingerprint(prompts[0].model))
        self.penalty, self.model_fingerprint = penalty, torch.tensor([*digest], dtype=torch.uint8)
        caches = [cache_before_last(prompt) for prompt in prompts]
        lengths = [cache.size(-2) for cache in caches]
        if min(lengths) < m:
            raise ValueError(
                f"{m} summary tokens can't stand for {min(lengths)} tokens before the last"
            )
        queries, outputs, starts = [], [], []
        for prompt, cache in zip(prompts, caches, strict=True):
            queries.append(tail_queries(prompt).double())
            outputs.append(attention_output(queries[-1], *cache.double().unbind(1)))
            starts.append(segment_means(cache.double(), m))
        q, output, initial = (torch.stack(x, 2) for x in (queries, outputs, starts))
        L, H, _, _, D = q.shape  # (L, H, N, R, D); of output, too; initial (L, H, N, m, 2 D)
        T = T or max(lengths)
        self.mean, self.scale = torch.empty(2, L, H, T, 2 * D)
        self.weight = torch.empty(L, H, 2 * T * D, 2 * m * D)  # a map C for each head
        self.constant = torch.empty(L, H, m, 2 * D)  # the summary tokens of mean features
        for layer in tqdm(range(L), desc=f"stage 1, penalty {penalty:g}", leave=False):
            x = padded_features(caches, layer, T)
            mean = x.nanmean(1).nan_to_num()  # over the tokens that are there
            scale = (x - mean[:, None]).square().nanmean(1).nan_to_num().sqrt()
            scale = scale.clamp(min=float(MIN_SCALE * scale.mean()))
            self.mean[layer], self.scale[layer] = mean, scale
            features = standardise(x, mean, scale)  # (H, N, F)
            data = zip(features, q[layer], output[layer], initial[layer], strict=True)
            for head, head_data in enumerate(data):
                weight, constant = fit_head_map(*head_data, penalty, steps)
                self.weight[layer, head], self.constant[layer, head] = weight, constant

    def __call__(self, prompts: Sequence[Prefill]) -> Tensor:
        """Return the summary tokens (N, L, 2, H, m, D) of N prompts. Raises ValueError if one is
        longer than the map."""
        caches = [cache_before_last(prompt) for prompt in prompts]
        summaries = []
        for layer, mean in enumerate(self.mean):
            x = padded_features(caches, layer, mean.size(1))
            features = standardise(x, mean, self.scale[layer]).float()
            summaries.append(features @ self.weight[layer])  # (H, N, m * 2 D)
        mapped = torch.stack(summaries).unflatten(-1, self.constant.shape[2:])
        mapped = mapped + self.constant[:, :, None]  # (L, H, N, m, 2 D)
        return mapped.unflatten(-1, (2, -1)).permute(2, 0, 4, 1, 3, 5)

    @classmethod
    def load(cls, path: Path, model: nn.Module) -> Compressor:
        """Return the maps in a file, for the model that they were fitted on. Raises as
        HeadMaps.load() does, and ValueError for another model."""
        compressor = super().load(path)
        if bytes(compressor.model_fingerprint.tolist()).hex() != fingerprint(model):
            raise ValueError(
                f"{path} was fitted on another model or dtype: name that, or fit it again"
            )
        return compressor


# --- Stage 2: summary tokens of one prompt become those of another --------------------------------


def vectors_by_head(summaries: Tensor) -> Tensor:
    """Return summary tokens (N, L, 2, H, m, D) as one vector per head (L, H, N, F)."""
    return summaries.permute(1, 3, 0, 2, 4, 5).flatten(3)


class Projector(HeadMaps):
    """One linear map for each head, from the summary tokens of a stored prompt to those of a
    similar one, fitted on pairs of prompts.

    The map needs nothing from the new prompt, so summary tokens can be mapped when they are stored.
    A large penalty pulls the result towards the mean of all targets.
    """

    kept = ("mean", "scale", "offset", "weight", "penalty")

    def __init__(self, sources: Tensor, targets: Tensor, penalty: float) -> None:
        """sources, targets: summary tokens (N, L, 2, H, m, D) of N pairs of similar prompts."""
        self.penalty = penalty
        x, y = vectors_by_head(sources.double()), vectors_by_head(targets.double())
        L, H, _, F = x.shape  # (L, H, N, F)
        mean, scale = x.mean(-2, keepdim=True), x.std(-2, keepdim=True).clamp(min=1e-6)
        offset = y.mean(-2, keepdim=True)
        x, y = (x - mean) / scale, y - offset
        self.weight = torch.empty(L, H, F, F)
        for layer in range(L):  # gigabytes in a large model: in place
            self.weight[layer] = ridge(x[layer], y[layer], penalty)
        self.mean, self.scale, self.offset = mean.float(), scale.float(), offset.float()
        # (L, H, 1, F) each

    def __call__(self, summaries: Tensor) -> Tensor:
        """Return summary tokens (N, L, 2, H, m, D) after projection, in the same shape."""
        N, L, _, H, m, D = summaries.shape
        y = (vectors_by_head(summaries) - self.mean) / self.scale @ self.weight + self.offset
        return y.view(L, H, N, 2, m, D).permute(2, 0, 3, 1, 4, 5)


# --- A new prompt: retrieval, summary tokens as the cache, the exact cache in the background ------


def cache_of_summary(model: nn.Module, summary: Tensor, next_pos: int) -> KVCache:
    """Return a cache of summary tokens (L, 2, H, m, D), which text from position next_pos on can
    follow. A Llama's keys all take one rotation, that of next_pos: they were fitted relative to it,
    and a map that is linear can rotate each of them further."""
    k, v = summary.to(model.wte.weight).unbind(1)  # its device and dtype
    pos = torch.arange(next_pos - k.size(-2), next_pos, device=k.device)
    layers = torch.stack([shift_positions(model, k, next_pos), v], 1)
    return KVCache([*layers[:, :, None]], pos)


def names_within_sentences(text: str) -> set[str]:
    """Return the words of a text that are capitalised although they don't begin a sentence, and its
    numbers."""
    return set(re.findall(r"(?<=[^.!?:\"\s] )[A-Z]\w+|\b\d+\b", text))


def checksum(description: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Return a CRC-32 of all that a library holds."""
    crc = zlib.crc32(json.dumps(description, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(name.encode() + raw_bytes(tensor).tobytes(), crc)
    return crc


@dataclass
class Library:
    """Stored prompts, with their embeddings and the summary tokens that a similar prompt starts
    from.

    warm_start() returns a cache that stands for all of a new prompt but its tail, or None if the
    prompt has to be read, because no stored prompt is similar enough (or, with match_names, has its
    names).
    """

    model: nn.Module
    layout: Layout
    encoder: PairEncoder
    texts: list[str]
    summaries: Tensor  # (N, L, 2, H, m, D) of the N texts, mapped by the projector or not
    threshold: float = -1.0  # tau, the least similarity at which a stored text is used
    match_names: bool = False  # whether names have to agree, too
    shared_chars: int = 0  # that all texts begin with; ignored for similarity

    def __post_init__(self) -> None:
        """Embed the texts, find the names in them, and count these."""
        check_kinds(self.model.config, ONE_CACHE)
        if len(self.texts) != len(self.summaries):
            raise ValueError(f"{len(self.texts)} texts, {len(self.summaries)} summaries: no match")
        self.embeddings = self.encoder([text[self.shared_chars :] for text in self.texts])
        self.known_names = {name for text in self.texts for name in names_within_sentences(text)}
        self.name_counts = Counter(name for text in self.texts for name in self.names_of(text))

    def add(self, text: str, summary: Tensor) -> None:
        """Store one more text with its summary tokens (L, 2, H, m, D). Raises ValueError, and stores
        nothing, if it doesn't begin as the stored ones do."""
        if len(shared_beginning([*self.texts, text])) < self.shared_chars:
            raise ValueError(f"the text must share its first {self.shared_chars} characters")
        self.summaries = torch.cat([self.summaries, summary[None].to(self.summaries)])
        self.texts = [*self.texts, text]
        self.__post_init__()

    def names_of(self, text: str) -> set[str]:
        """Return the names and numbers of a text. A capitalised word at the beginning of a sentence
        is a name if some stored text has it within a sentence."""
        capitalised = {*re.findall(r"[A-Z]\w+", text)}
        return names_within_sentences(text) | (capitalised & self.known_names)

    def nearest(self, text: str) -> tuple[int, float]:
        """Return the index of the most similar stored text and the similarity; (-1, -inf) if there
        is none. With match_names, it is the first of the 20 most similar texts that shares more
        than half of this text's rare names, if it has any."""
        similarity = self.embeddings @ self.encoder([text[self.shared_chars :]])[0]
        rare_names = set()
        if self.match_names:
            limit = max(1, 0.05 * len(self.texts))
            rare_names = {name for name in self.names_of(text) if self.name_counts[name] <= limit}
        for i in np.argsort(-similarity, kind="stable")[:20]:
            shared_names = rare_names & self.names_of(self.texts[i])
            if not rare_names or 2 * len(shared_names) > len(rare_names):
                return int(i), float(similarity[i])
        return -1, -math.inf

    def warm_start(self, text: str, ids: Sequence[int]) -> KVCache | None:
        """Return a cache that stands for all but the last `tail` tokens of a text, whose tokens are
        ids; None if the prompt has to be read, also because it is too short."""
        layout = self.layout
        index, similarity = self.nearest(text)
        if similarity < self.threshold or len(ids) - layout.tail < layout.m:
            return None
        return cache_of_summary(self.model, self.summaries[index], layout.tail_position(len(ids)))

    def save(self, folder: Path) -> None:
        """Write library.safetensors and library.json to a folder."""
        tensors = {
            "summaries": self.summaries.contiguous(),
            "encoder.mean": self.encoder.mean,
            "encoder.weight": self.encoder.weight.contiguous(),
        }
        description = {
            "fingerprint": fingerprint(self.model),
            "layout": asdict(self.layout),
            "tokens": [*self.encoder.column_of],
        }
        description |= {"texts": self.texts, "threshold": self.threshold}
        description |= {"guard": self.match_names, "skip": self.shared_chars}
        description["checksum"] = checksum(description, tensors)
        write_atomically(folder / "library.safetensors", lambda file: save_file(tensors, file))
        write_json(folder / "library.json", description)

    @classmethod
    def load(cls, model: nn.Module, tokenizer: tiktoken.Encoding, folder: Path) -> Library:
        """Return the library in a folder. Raises FileNotFoundError if there is none, ValueError
        if it isn't one, has changed since it was saved, or was made with another model."""
        check_kinds(model.config, ONE_CACHE)
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
        return cls(
            model,
            Layout(**description["layout"]),
            PairEncoder(tokenizer, description["tokens"], mean, weight),
            description["texts"],
            tensors["summaries"],
            description["threshold"],
            description["guard"],
            description["skip"],
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
    if max_new_tokens == 0:
        return
    T, n_ctx = ids.size(1), model.config.n_ctx
    if n_ctx <= T:
        raise ValueError(f"{T} tokens and the first new one exceed the context, {n_ctx}")
    # The zeros stand for the cached tokens, which the model never reads.
    stand_in = torch.cat([ids.new_zeros(1, len(warm_cache)), ids[:, T - tail :]], 1)
    warm_tokens = generate(model, stand_in, max_new_tokens, cache=warm_cache)
    written = [next(warm_tokens)]
    with ThreadPoolExecutor(1, initializer=LOWER_PRIORITY) as pool:
        exact_reading = pool.submit(prefilled_cache, model, ids[0].tolist())
        yield written[0]
        most = min(max_new_tokens, n_ctx - T) if until_ready else 1
        while len(written) < most and not exact_reading.done():
            written.append(next(warm_tokens))
            yield written[-1]
        exact_cache = exact_reading.result()
    text = torch.cat([ids, *written], 1)
    yield from generate(model, text, max_new_tokens - len(written), cache=exact_cache)


# --- One question, and a demo ---------------------------------------------------------------------

# Made by python3 -m studies.projection.
QUIZ_LIBRARY = Path(__file__).resolve().parent / "data" / "quiz_library"
PROPOSED, OURS = "proposed", "ours"  # folders in it, and names of the ways
GOOD_KL = 0.05  # nats, the proposal's threshold
FirstToken = Callable[[str, list[int]], Tensor]  # a text and its ids -> logits (V,)
Libraries = dict[str, Library]  # by way


@torch.no_grad()
def logits_after(model: nn.Module, ids: list[int], cache: KVCache | None = None) -> Tensor:
    """Return the logits (V,) of the token after ids, which follow a cache, if any."""
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    return model(prompt, KVCache() if cache is None else cache, last_only=True)[0, -1]


def first_logits(model: nn.Module, library: Library | None, text: str, ids: list[int]) -> Tensor:
    """Return the logits (V,) of a text's first new token: from a library's summary tokens and the
    tail if a stored prompt is similar enough, else by reading all."""
    warm_cache = library.warm_start(text, ids) if library else None
    ids_to_read = ids if warm_cache is None else ids[-library.layout.tail :]
    return logits_after(model, ids_to_read, warm_cache)


def time_first_tokens(
    first_token: FirstToken, prompts: Sequence[tuple[str, list[int]]]
) -> tuple[float, Tensor]:
    """Return the mean milliseconds to the first token of N prompts, and its logits (N, V)."""
    first_token(*prompts[0]).cpu()  # a first pass is slow
    seconds, logits = time_call(
        lambda: torch.stack([first_token(text, ids) for text, ids in prompts]).cpu()
    )
    return 1000 * seconds / len(prompts), logits.double()


def first_line(tokens: Iterable[Tensor], tokenizer: tiktoken.Encoding) -> str:
    """Return the text of tokens up to the end of its first line."""
    text = tokenizer.decode([int(token) for token in tokens])
    return text.partition(END_OF_TEXT)[0].partition("\n")[0].strip()


def answer_question(
    libraries: Libraries, tokenizer: tiktoken.Encoding, line: str, max_new_tokens: int
) -> None:
    """Answer a question as proposed, by our summary tokens, and exactly; print for each way the
    time to the first token, its KL and the answer.

    The question takes the place of the first line in which the stored prompts differ.
    """
    library = libraries.get(PROPOSED, libraries[OURS])
    model, stored = library.model, library.texts
    shared = re.match(r"(?s)(.*\s)?", shared_beginning(stored))[0]  # up to the end of a word
    text = shared + re.sub(".*", lambda _: line.strip(), stored[0][len(shared) :], count=1)
    ids = tokenizer.encode("", allowed_special="all")  # tokens that begin a text, if any
    ids += tokenizer.encode(text, disallowed_special=())  # a control token's name is text
    index, similarity = library.nearest(text)
    found = stored[index].removeprefix(shared).partition("\n")[0] if index >= 0 else "none"
    print(f"The most similar stored prompt: {found}")
    print(f"Its similarity is {similarity:.2f}; tau is {library.threshold:.2f}.\n")
    prompt = torch.tensor([ids], device=model.wte.weight.device)
    exact, rows = logits_after(model, ids).double().cpu(), []
    for name, library in [*libraries.items(), ("exactly", None)]:
        tokens = generate(model, prompt, max_new_tokens)
        if library:
            cache = library.warm_start(text, ids)
            if cache is None:
                name += " (cold)"
            else:
                tokens = generate_warm(model, prompt, cache, library.layout.tail, max_new_tokens)
        first_token = partial(first_logits, model, library)
        milliseconds, logits = time_first_tokens(first_token, [(text, ids)])
        token = tokenizer.decode([int(logits.argmax())])
        figures = [f"{milliseconds:.1f} ms", f"{float(kl(exact, logits)):.2f}", repr(token)]
        rows.append([name, *figures, first_line(tokens, tokenizer)])
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


def demo(libraries: Libraries, tokenizer: tiktoken.Encoding) -> None:
    """Ask the stored questions in other words; print how soon the first token comes, and how good
    it is, as proposed, by our summary tokens and by two rivals."""
    proposal = libraries[PROPOSED]
    model, stored = proposal.model, [tokenizer.encode(text) for text in proposal.texts]
    stored_logits = [logits_after(model, ids) for ids in stored]
    shared_ids = shared_beginning(stored)
    shared_cache = prefilled_cache(model, shared_ids)
    ways: dict[str, FirstToken] = {
        "cold: the prompt is read": partial(first_logits, model, None),
        "rival: exact shared beginning, the rest read": lambda _, ids: logits_after(
            model, ids[len(shared_ids) :], shared_cache.clone()
        ),
        "proposed: 8 projected summary tokens, 1 token read": partial(
            first_logits, model, proposal
        ),
        "ours: 1 summary token as stored, 16 tokens read": partial(
            first_logits, model, libraries[OURS]
        ),
        "control: the neighbour's logits": lambda text, _: stored_logits[proposal.nearest(text)[0]],
    }
    questions = reworded_questions({*proposal.texts})
    prompts = [
        (text, tokenizer.encode(text))
        for text in questions
        if proposal.nearest(text)[1] >= proposal.threshold
    ]
    timed = {name: time_first_tokens(way, prompts) for name, way in ways.items()}
    cold_milliseconds, exact = next(iter(timed.values()))
    rows = []
    for name, (milliseconds, logits) in timed.items():
        divergences = kl(exact, logits)
        good_share = (divergences <= GOOD_KL).double().mean()
        saved_share = 1 - milliseconds / cold_milliseconds
        figures = [f"{milliseconds:.1f}", f"{saved_share:.0%}", f"{divergences.mean():.2f}"]
        rows.append([name, *figures, f"{good_share:.0%}"])
    header = ["the first token", "ms", "saved", "KL(cold || warm)", "KL <= 0.05"]
    print(f"""\
{len(proposal.texts)} questions are stored, and asked in {len(questions)} other wordings; for
{len(prompts)} of these, the stored one that is found is similar enough.

{table(header, rows)}

Exact: the cold start and the rival. Approximate: the first token of the others; all that follow
come from the prompt, which is read meanwhile.
To survive its own test a warm start must save 35%, with KL <= {GOOD_KL} on 80% of the prompts.

The whole test takes two and a half hours: python3 -m studies.projection""")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, 'python3 %(prog)s ask "Name the river that Hexley stands on."')
    test, ask = cli.add_actions(
        "demo",
        demo="the falsification test, in 20 seconds",
        ask="answer QUESTION in three ways",
    )
    test.add_model_options("pocket")
    ask.add_model_options("pocket; another, such as smollm2, with --library")
    test.set_defaults(library=None)
    ask.add_argument(
        "question", type=utf8, metavar="QUESTION", help="replaces a stored prompt's question"
    )
    ask.add_options("--max-new-tokens", default=32)
    ask.add_argument(
        "--library",
        metavar="FOLDER",
        help="prompts stored by a study; default: the quiz questions in data/",
    )
    with cli.parse(argv) as args:
        if args.model != "pocket" and args.library is None:
            if Path(args.model).is_dir():
                checkpoint = open_checkpoint(args.model)
                check_kinds(read_config(checkpoint.config(), checkpoint.where), ONE_CACHE)
            raise ValueError(
                f"the stored questions are pocket's: for {args.model}, store others by "
                f"`python3 -m studies.projection --model {args.model}`, with `--pairs FILE` if that asks for it, then "
                f"`ask QUESTION --model {args.model} --library results/projection/library`"
            )
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        folder = Path(args.library or QUIZ_LIBRARY)
        # The proposal's library isn't there if its map was too large.
        ways = [PROPOSED, OURS] if (folder / PROPOSED).is_dir() else [OURS]
        libraries = {way: Library.load(model, tokenizer, folder / way) for way in ways}
        if args.action == "ask":
            answer_question(libraries, tokenizer, args.question, args.max_new_tokens)
        else:
            demo(libraries, tokenizer)


if __name__ == "__main__":
    main()
