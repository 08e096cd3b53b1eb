"""Is this KV cache right? Some thirty checks compare what a model computes with a cache and without one, in seconds.

    python3 examine.py                               a small cache that stands in this file
    python3 examine.py FILE.py                       your class Cache (append, positions, commit), in a small model
    python3 examine.py FILE.py --window 6            the same, if it forgets tokens
    python3 examine.py FILE.py --family gemma3       your make(model), which returns a cache of transformers, in a small
                                                     random model of a family; --model FOLDER_OR_NAME: in a real one
    python3 examine.py FILE.py                       your `subject`: any object with whole(), new() and read()

This file needs torch and nothing else: copy it. The measure is the model itself, in one pass without a cache, with an
explicit mask where the cache forgets tokens. The verdicts are: right; WRONG, a number is wrong; REFUSES, an error with a
message, after which the cache goes on; BREAKS, any other error, an exit, or no answer in time; not offered, the cache
has no way to do this; and measured, the difference of an approximate cache.

Exit status: 0 if nothing is WRONG and nothing BREAKS, 1 if something does, 2 if there is nothing to examine.

Shapes: B rows, T tokens, S tokens attended to, H heads, D head size, C width, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 1e-4  # of the largest logit: sums in another order differ in float32's last bits
ROUNDING = 0.03  # of the largest logit: less is another precision
DELTA_TOLERANCE = (
    2e-3  # one token at a time and all at once are different sums: 5e-4; 3e-13 in float64
)
TEXT, LONG_TEXT = 40, 300  # tokens, or as many as the context has
LONGEST_CONTEXT = 4096  # that is read to its end
LONGEST_SIGHT = 64  # last tokens that are changed one after the other
START_SECONDS = 300  # until a model is loaded
FEW = "few caches promise this"  # a group of checks
BAD = ("WRONG", "BREAKS")


class NotOffered(Exception):
    """The examined cache has no way to do this."""


class WrongError(Exception):
    """What is wrong, in a sentence; the difference of logits if that is what it is; and the cause if it is known."""

    def __init__(self, says: str, difference: Difference | None = None, cause: str = "") -> None:
        super().__init__(says)
        self.difference = difference
        self.cause = cause


class Interrupted(Exception):
    """What a check raises within a pass."""


class Difference(NamedTuple):
    """The first token whose logits differ, and what else is wrong in the same piece of text."""

    row: int
    token: int  # of the text
    logit: int
    got: float
    expected: float
    largest: float  # of all differences in this piece, relative to the largest logit
    rows: list[int]  # that differ
    tokens: list[int]  # that differ
    piece: tuple[int, int]  # the first and last token that were compared
    steps: str  # what was done since the cache was made

    def __str__(self) -> str:
        place = f"row {self.row}, token {self.token}: logit {self.logit} is {self.got:.4g}"
        return f"{place}, must be {self.expected:.4g} ({self.steps})"


class Finding(NamedTuple):
    """What a check found. verdict: right, WRONG, REFUSES, BREAKS, not offered, or measured."""

    check: str
    verdict: str
    says: str
    kind: str = ""  # public bugs of this kind
    group: str = ""
    difference: Difference | None = None
    cause: str = ""  # of CAUSES, if this check alone has shown it


# --- What is examined --------------------------------------------------------------------------------


class Subject:
    """A model with a cache of our protocol. Others are subclasses.

    window, sinks: what the cache shows of a text; None: all of it. capacity: tokens that it has room for.
    approximate: False, if the cache has to compute what the model computes without one; True, or the largest
    difference that it promises, if it hasn't.
    """

    capacity = math.inf
    promises = True  # what only FEW caches do: a pass that fails changes nothing, which is what commit() is for
    tolerance = TOLERANCE

    def __init__(
        self,
        model: nn.Module,
        new_cache: Callable[[], Any] | None = None,
        window: int | None = None,
        sinks: int = 0,
        capacity: float = math.inf,
        approximate: bool | float = False,
    ) -> None:
        self.model = model
        self.new_cache = new_cache or model.new_cache
        self.window = window
        self.sinks = sinks
        self.approximate = approximate
        self.vocab_size = model.config.vocab_size
        self.context = min(model.context, capacity)
        self.capacity = capacity

    def whole(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T) in one pass without a cache."""
        if self.window is None:
            return self.model(ids)
        return self.model(ids, MaskOnly(self.window, self.sinks))

    def new(self) -> Any:
        return self.new_cache()

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text."""
        return self.model(ids, cache)

    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        """Return the logits of ids (B, T) after a text whose padding (B, S), the new tokens' included, is 0."""
        raise NotOffered("rows are of one length")

    def length(self, cache: Any) -> int:
        return len(cache)

    def truncate(self, cache: Any, n: int) -> None:
        """Keep the first n tokens. Raises ValueError if the cache refuses."""
        offered(cache, "truncate")(n)

    def clone(self, cache: Any) -> Any:
        return offered(cache, "clone")()

    def nbytes(self, cache: Any) -> int:
        """Return the bytes of a cache: those that it says, or if it doesn't, those that it holds."""
        nbytes = getattr(cache, "nbytes", None)
        if nbytes is None:
            return held_bytes(cache)
        return nbytes() if callable(nbytes) else nbytes

    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values, in every layer of a growing cache."""
        c = self.model.config
        heads = getattr(c, "n_kv_head", None) or c.n_head
        return 2 * c.n_layer * heads * c.head_dim * next(self.model.parameters()).element_size()

    def as_dtype(self, dtype: torch.dtype) -> Subject:
        """Return the same with weights of another dtype."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).to(dtype)
        return other


class MaskOnly:
    """No cache: a pass over a whole text with an explicit mask of what a cache of `window` tokens and `sinks` shows."""

    layers: tuple = ()

    def __init__(self, window: int, sinks: int) -> None:
        self.window = window
        self.sinks = sinks

    def __len__(self) -> int:
        return 0

    def positions(self, T: int) -> Tensor:
        return torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return k, v, self.mask(pos)

    def mask(self, pos: Tensor) -> Tensor:
        """Return the mask (T, T) of the keys at pos (T,) that each query sees."""
        near = (pos > pos[:, None] - self.window) | (pos < self.sinks)
        return (pos <= pos[:, None]) & near

    def commit(self, pos: Tensor) -> None:
        pass

    truncate = commit


class TransformersSubject(Subject):
    """A model of transformers, with a cache that new_cache(model) makes.

    promises: whether a pass that fails has to change nothing. records_past: whether the cache keeps what it needs to be
    cut back, which windows and states forget.
    """

    def __init__(
        self,
        model: Any,
        new_cache: Callable[[Any], Any],
        window: int | None = None,
        sinks: int = 0,
        approximate: bool | float = False,
        promises: bool = False,
        records_past: bool = True,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.make = new_cache
        self.window = window
        self.sinks = sinks
        self.approximate = approximate
        self.promises = promises
        self.records_past = records_past
        if "linear_attention" in (getattr(config, "layer_types", None) or []):
            self.tolerance = DELTA_TOLERANCE
        self.vocab_size = config.vocab_size
        self.context = config.max_position_embeddings
        takes = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in takes else "past_key_values"

    def whole(self, ids: Tensor) -> Tensor:
        mask = None  # or the model's own windows
        if self.window is not None:
            seen = MaskOnly(self.window, self.sinks).mask(torch.arange(ids.size(1)))
            mask = torch.zeros(1, 1, *seen.shape, dtype=self.model.dtype)
            mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min).to(ids.device)
        return self.model(ids, attention_mask=mask, use_cache=False).logits

    def new(self) -> Any:
        cache = self.make(self.model)
        if self.records_past and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        return self.model(ids, **{self.argument: cache}).logits

    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        positions = (padding.cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
        if not hasattr(cache, "ours") and not any(hasattr(each, "keys") for each in cache.layers):
            padding = padding[:, -ids.size(1) :]  # states alone: the mask is that of the new tokens
        options = {"attention_mask": padding, "position_ids": positions, self.argument: cache}
        return self.model(ids, **options).logits

    def length(self, cache: Any) -> int:
        return int(cache.get_seq_length())

    def truncate(self, cache: Any, n: int) -> None:
        for layer in cache.layers:
            if not getattr(layer, "is_croppable", hasattr(layer, "crop")):
                raise NotOffered(f"a {type(layer).__name__} can't be cut back")
            if not getattr(layer, "record_past", True):
                raise NotOffered(f"a {type(layer).__name__} hasn't recorded the past")
        cache.crop(n - self.length(cache))

    def clone(self, cache: Any) -> Any:
        try:
            return copy.deepcopy(cache)
        except RuntimeError as error:
            raise NotOffered("copy.deepcopy() refuses what it holds") from error

    def nbytes(self, cache: Any) -> int:
        return cache.ours.nbytes if hasattr(cache, "ours") else held_bytes(cache.layers)

    def token_bytes(self) -> int:
        c = self.model.config.get_text_config(decoder=True)
        layers = [] if hasattr(cache := self.new(), "ours") else cache.layers
        if any(hasattr(layer, "conv_states") for layer in layers):
            raise NotOffered("a layer keeps a state, which has other bytes than keys and values")
        if hasattr(c, "kv_lora_rank"):
            raise NotOffered("its keys and values are made of a latent, and their sizes differ")
        numbers = 0
        for layer in range(c.num_hidden_layers):
            each = c.per_layer_config[layer] if hasattr(c, "per_layer_config") else c
            heads = each.num_attention_heads
            size = getattr(each, "head_dim", None) or each.hidden_size // heads
            for name in ("num_kv_heads", "num_key_value_heads"):
                heads = getattr(each, name, None) or heads
            numbers += 2 * heads * size
        return numbers * self.model.dtype.itemsize


class GivenSubject(Subject):
    """A `subject` of a file: whatever it has; what it lacks isn't asked.

    It needs whole(ids), new() and read(cache, ids), as above; it may have any other method of a Subject, and
    vocab_size, context, window, sinks, approximate, promises and model. Raises ValueError if it lacks what it needs.
    """

    def __init__(self, given: Any) -> None:
        if missing := [name for name in ("whole", "new", "read") if not hasattr(given, name)]:
            raise ValueError(f"`subject` has no {'(), '.join(missing)}()")
        for name in dir(Subject):
            if not name.startswith("_"):
                setattr(self, name, getattr(given, name, lambda *_, name=name: lacking(name)))
        self.model = getattr(given, "model", nn.Module())
        self.vocab_size = getattr(given, "vocab_size", 61)
        self.context = getattr(given, "context", LONG_TEXT + 20)
        self.capacity = getattr(given, "capacity", math.inf)
        self.window = getattr(given, "window", None)
        self.sinks = getattr(given, "sinks", 0)
        self.approximate = getattr(given, "approximate", False)
        self.promises = getattr(given, "promises", False)
        self.tolerance = getattr(given, "tolerance", TOLERANCE)


def lacking(name: str) -> None:
    """Raise NotOffered: there is no method of this name."""
    raise NotOffered(f"there is no {name}()")


def offered(cache: Any, name: str) -> Callable:
    """Return a method of a cache. Raises NotOffered if it has none."""
    if not hasattr(cache, name):
        raise NotOffered(f"a {type(cache).__name__} has no {name}()")
    return getattr(cache, name)


def held_bytes(held: Any) -> int:
    """Return the bytes of the memory behind all tensors and arrays that an object holds, positions aside."""
    memory: dict[int, int] = {}
    visited = set()
    todo = [held]
    while todo:
        each = todo.pop()
        if id(each) in visited or callable(each):
            continue
        visited.add(id(each))
        if type(each) in (Tensor, nn.Parameter):
            if each.dtype not in (torch.int64, torch.bool):
                storage = each.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
        elif hasattr(each, "__array_interface__"):
            while getattr(each, "base", None) is not None:
                each = each.base
            memory[id(each)] = each.nbytes
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, list | tuple | set):
            todo += each
        elif hasattr(each, "__dict__"):
            todo += vars(each).values()
    return sum(memory.values())


# --- The model that a cache is examined in, and a cache that is right ---------------------------------


@dataclass
class SmallConfig:
    """Geometry of the small model."""

    vocab_size: int = 61
    n_ctx: int = LONG_TEXT + 20
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 32
    head_dim: int = 8


class GrowingCache:
    """Keys, values and positions of the tokens that were read: the least that our protocol asks of a cache."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []  # each layer's keys and values (2, B, H, S, D)
        self.n_read = 0

    def __len__(self) -> int:
        return self.n_read

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read."""
        return self.n_read + torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values (B, H, T, D) at pos (T,). Return all of the layer's (B, H, S, D), and the mask (T, S) of
        the keys that each query sees; None: each sees those up to its own, as in a first piece or a single token.
        Raises ValueError if the number of rows changes."""
        new = torch.stack([k, v])
        if self.n_read:
            old = self.layers[layer][:, :, :, : self.n_read]  # not what a failed pass left
            if old.size(1) != new.size(1):
                raise ValueError(f"a cache of {old.size(1)} rows got {new.size(1)}")
            new = torch.cat([old, new], dim=3)
        self.layers[layer:] = (
            [new] if layer >= len(self.layers) - 1 else [new, *self.layers[layer + 1 :]]
        )
        mask = torch.arange(new.size(3), device=pos.device) <= pos[:, None]
        return new[0], new[1], mask

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at pos (T,) as read. A pass that fails never gets here, and so changes nothing."""
        self.n_read += len(pos)

    def truncate(self, n: int) -> None:
        """Keep the first n tokens."""
        self.layers = [kv[:, :, :, :n].clone() for kv in self.layers]
        self.n_read = n

    def clone(self) -> GrowingCache:
        return copy.deepcopy(self)

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in self.layers)


class SmallBlock(nn.Module):
    """Attention in which two query heads share a key head, then an MLP."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        width, size = config.n_embd, config.head_dim
        self.query = nn.Linear(width, config.n_head * size)
        self.key = nn.Linear(width, config.n_kv_head * size)
        self.value = nn.Linear(width, config.n_kv_head * size)
        self.out = nn.Linear(config.n_head * size, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, pos: Tensor, cache: Any, layer: int) -> Tensor:
        B, T, _ = x.shape
        normed = F.layer_norm(x, x.shape[-1:])
        size = self.config.head_dim
        q = self.query(normed).view(B, T, -1, size).transpose(1, 2)
        k = self.key(normed).view(B, T, -1, size).transpose(1, 2)
        v = self.value(normed).view(B, T, -1, size).transpose(1, 2)
        q, k, mask = rotate(q, pos), rotate(k, pos), None
        if cache is not None:
            k, v, mask = cache.append(layer, k, v, pos)
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, x.shape[-1:]))


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Turn pairs of numbers of x (B, H, T, D) by angles that grow with the positions (T,)."""
    half = x.size(-1) // 2
    speed = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angle = pos[:, None] * speed  # (T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class SmallModel(nn.Module):
    """Two layers that show most faults of a cache: positions are learned as well as turned, key heads shared."""

    new_cache = GrowingCache

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.n_ctx
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_ctx, config.n_embd)
        self.blocks = nn.ModuleList(SmallBlock(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text. Raises ValueError if it exceeds the
        context."""
        T = ids.size(1)
        pos = torch.arange(T) if cache is None else cache.positions(T)
        pos = pos.to(ids.device)
        if pos.max() >= self.context:
            raise ValueError(f"position {int(pos.max())} exceeds a context of {self.context}")
        x = self.tokens(ids) + self.places(pos)
        for layer, block in enumerate(self.blocks):
            x = block(x, pos, cache, layer)
        logits = self.head(F.layer_norm(x, x.shape[-1:]))
        if cache is not None:
            cache.commit(pos)  # last of all: a pass that fails leaves the cache as it was
        return logits


def small_model(**changes: Any) -> SmallModel:
    """Return the small model with random weights. changes: of SmallConfig."""
    return randomized(SmallModel(SmallConfig(**changes)))


def randomized(model: nn.Module) -> nn.Module:
    """Give a model random weights so large that attention is sharp, or mistakes would not show; return it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=draw)
    return model.eval()


SLIDES = {
    "head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
DELTA_RULE = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATES = {"state_size": 8, "expand": 1}

# By name: how its class's name begins, and changes of its config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma3": ("Gemma3", SLIDES),
    "gemma4": (
        "Gemma4",
        SLIDES
        | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8}
        | {"global_head_dim": 16},
    ),
    "gpt-oss": ("GptOss", SLIDES | EXPERTS | {"num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        EXPERTS
        | {
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA_RULE | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3.5": ("Qwen3_5", DELTA_RULE),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "falcon": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 1, "ffn_hidden_size": 48},
    ),
    "falcon-h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_chunk_size": 16},
    ),
    "falcon-mamba": ("FalconMamba", STATES),
    "mamba": ("Mamba", STATES),
    "mamba2": (
        "Mamba2",
        STATES | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    ),
}


def family_model(name: str, **changes: Any) -> Any:
    """Return a small random model of a family of transformers. changes: of its config."""
    import transformers

    kind, of_family = FAMILIES[name]
    config = {
        "vocab_size": 61,
        "max_position_embeddings": LONG_TEXT + 20,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)  # for what randomized() leaves as it is
    return randomized(model_class(model_class.config_class(**config | of_family | changes)))


# --- How a check works -------------------------------------------------------------------------------


class Trial:
    """A check at work on a subject: it makes caches, reads, and compares what it reads with what must be read."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.tolerance = subject.tolerance
        self.largest = -1.0  # difference, relative to the largest logit
        self.steps: list[str] = []  # since the last cache was made
        self.start = 0
        self.cache: Any = None  # that was read with last,
        self.text: Tensor | None = None  # and what it was reading

    def ids(self, rows: int = 2, n: int = TEXT, seed: int = 1) -> Tensor:
        """Return random tokens (B, T), at most as many as the context has, but two."""
        draw = torch.Generator().manual_seed(seed)
        n = min(n, self.subject.context - 2)
        ids = torch.randint(self.subject.vocab_size, (rows, n), generator=draw)
        parameter = next(self.subject.model.parameters(), ids)
        return ids.to(parameter.device)

    def other(self, ids: Tensor) -> Tensor:
        """Return ids that differ everywhere."""
        return (ids + 1) % self.subject.vocab_size

    def new(self) -> Any:
        self.steps = []
        return self.subject.new()

    def read(self, cache: Any, text: Tensor, start: int) -> Tensor:
        """Return the logits of what stands in text (B, T) from start on; the cache has read the rest."""
        self.cache, self.text, self.start = cache, text, start
        self.steps.append(f"read {text.size(1) - start}")
        return self.subject.read(cache, text[:, start:])

    def filled(self, ids: Tensor) -> Any:
        """Return a cache that has read ids (B, T)."""
        cache = self.new()
        self.read(cache, ids, 0)
        return cache

    def pieces(self, ids: Tensor, sizes: list[int], cache: Any = None) -> Any:
        """Read the end of ids (B, T) in pieces of these sizes, and compare each. Return the cache."""
        is_new = cache is None
        if is_new:
            cache = self.new()
        start = ids.size(1) - sum(sizes)
        expected = self.subject.whole(ids)
        for size in sizes:
            got = self.read(cache, ids[:, : start + size], start)
            try:
                self.compare(got, expected[:, start : start + size], start)
            except WrongError as error:
                if is_new:
                    error.cause = cause_in_sight(self.subject, ids[:1, : start + size], start)
                raise
            start += size
        return cache

    def cut(self, cache: Any, text: Tensor, n: int) -> Tensor:
        """Cut a cache that has read text (B, T) back to n tokens. Return what it holds then: all, if it refuses because
        it has forgotten tokens."""
        subject = self.subject
        self.cache, self.text, self.start = cache, text, text.size(1)
        self.steps.append(f"cut to {n}")
        forgot = subject.window is not None and text.size(1) >= subject.window + subject.sinks
        try:
            subject.truncate(cache, n)
        except (ValueError, NotImplementedError) as error:
            if forgot and str(error):
                return text
            raise
        return text[:, :n]

    def compare(self, got: Tensor, expected: Tensor, first: int = 0) -> None:
        """Compare logits (B, T, V) of tokens from `first` on. Raises WrongError if they differ, in an approximate cache
        by more than it promises."""
        if got.shape != expected.shape:
            shapes = f"{tuple(got.shape)}, must be {tuple(expected.shape)}"
            raise WrongError(f"token {first}: the logits' shape is {shapes}")
        got, expected = got.float(), expected.float()
        apart = ((got - expected).abs() / expected.abs().max()).nan_to_num(nan=math.inf)
        largest = float(apart.max())
        self.largest = max(self.largest, largest)
        allowed = self.tolerance
        if self.subject.approximate:
            allowed = sys.float_info.max
            if self.subject.approximate is not True:
                allowed = float(self.subject.approximate)
        wrong = (apart > allowed).any(dim=2)  # (B, T)
        if not wrong.any():
            return
        tokens = wrong.any(dim=0).nonzero()[:, 0].tolist()
        rows = wrong.any(dim=1).nonzero()[:, 0].tolist()
        row = int(wrong[:, tokens[0]].nonzero()[0])
        logit = int(apart[row, tokens[0]].argmax())
        difference = Difference(
            row=row,
            token=first + tokens[0],
            logit=logit,
            got=float(got[row, tokens[0], logit]),
            expected=float(expected[row, tokens[0], logit]),
            largest=largest,
            rows=rows,
            tokens=[first + token for token in tokens],
            piece=(first, first + got.size(1) - 1),
            steps=self.history(),
        )
        raise WrongError(str(difference), difference)

    def history(self) -> str:
        """Return what was done since the last cache was made, in words."""
        words = []
        for step, times in itertools.groupby(self.steps):
            n = len([*times])
            words.append(f"{n} times {step}" if n > 1 else step)
        if len(words) > 7:
            words = [*words[:3], "...", *words[-3:]]
        return "a new cache: " + ", ".join(words) if words else "a new cache"

    def goes_on(self) -> bool:
        """Return whether the cache, which has just refused, reads a token as if it hadn't been asked, or refuses it."""
        if self.text is None:
            return True
        text, start = self.text, self.start
        if start == text.size(1):  # it refused a cut
            text = torch.cat([text, text[:, :1]], dim=1)
        text = text[:, : start + 1]
        try:
            self.compare(
                self.read(self.cache, text, start), self.subject.whole(text)[:, start:], start
            )
        except (ValueError, NotImplementedError) as error:
            return str(error) != ""
        return True


def cause_in_sight(subject: Subject, ids: Tensor, start: int) -> str:
    """Return what sight() does, or "" if the cache raises an error on the way."""
    try:
        return sight(subject, ids, start)
    except Exception:  # a stranger's; that it is WRONG has been shown
        return ""


def sight(subject: Subject, ids: Tensor, start: int) -> str:
    """Return what is wrong with the tokens that ids (1, T) see from `start` on, by changing one token after the other:
    a cause, or "" if each sees what it must. Only one layer is used, in which no token sees by another's eyes."""
    shallow = copy.copy(subject)
    shallow.model = copy.deepcopy(subject.model)
    for module in [*shallow.model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                setattr(module, name, child[:1])

    def logits(text: Tensor) -> tuple[Tensor, Tensor]:
        cache = shallow.new()
        if start:
            shallow.read(cache, text[:, :start])
        return shallow.read(cache, text[:, start:]), shallow.whole(text)[:, start:]

    base = logits(ids)
    if (base[0] - base[1]).abs().max() <= subject.tolerance:
        return ""  # it takes two layers, or other pieces
    n = ids.size(1)
    too_many, too_few = [], []
    for token in sorted({*range(min(8, n)), *range(max(0, n - LONGEST_SIGHT), n)}):
        changed = ids.clone()
        changed[0, token] = (changed[0, token] + 1) % subject.vocab_size
        got, expected = (
            (new - old).abs().amax(dim=2)[0] > subject.tolerance
            for new, old in zip(logits(changed), base, strict=True)
        )
        too_many += [(token, start + int(q)) for q in (got & ~expected).nonzero()]
        too_few += [(token, start + int(q)) for q in (expected & ~got).nonzero()]
    if any(token > query for token, query in too_many):
        return "mask: future"
    if too_many:
        return "window: edge"
    if not too_few:
        return "rotation" if isinstance(subject.model, SmallModel) else ""
    if subject.window is not None:
        return "window: order"
    lost = sorted({token for token, _ in too_few})
    if start and lost[:start] == [*range(start)]:
        return "mask: new only"
    at_boundary = lost[0] > 2 and (lost[0] % 4 == 0 or lost[0] % 4 == 3)
    return "pages" if at_boundary else "mask: loses tokens"


class Check(NamedTuple):
    """A question to a cache. kind: public bugs of its kind; group: FEW, or nothing."""

    name: str
    kind: str
    function: Callable[[Trial], str | None]
    group: str = ""

    def find(self, subject: Subject) -> Finding:
        """Return what this check finds."""
        trial = Trial(subject)
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                try:
                    says = self.function(trial)
                except (ValueError, NotImplementedError) as refusal:
                    if not str(refusal) or not trial.goes_on():
                        raise
                    return self.finding(subject, "REFUSES", in_words(refusal))
        except NotOffered as error:
            return self.finding(subject, "not offered", str(error))
        except WrongError as error:
            return self.finding(subject, "WRONG", str(error), error.difference, error.cause)
        except (Exception, SystemExit) as error:  # whatever a stranger's code raises
            return self.finding(subject, "BREAKS", f"{in_words(error)} ({trial.history()})")
        difference = f"{max(trial.largest, 0):.1e} of the largest logit"
        if says is not None:
            return self.finding(subject, "measured", says)
        exact = trial.largest <= trial.tolerance
        return self.finding(subject, "right" if exact else "measured", difference)

    def finding(
        self,
        subject: Subject,
        verdict: str,
        says: str,
        difference: Difference | None = None,
        cause: str = "",
    ) -> Finding:
        """Return a finding of this check. What few caches promise isn't wrong in one that doesn't."""
        if self.group and not subject.promises and verdict in (*BAD, "REFUSES"):
            verdict, says = "not offered", f"not promised: {says}"
        return Finding(self.name, verdict, says, self.kind, self.group, difference, cause)


def in_words(error: BaseException) -> str:
    """Return the name and the message of an error, on one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{words:.160}"


CHECKS: list[Check] = []


def check(name: str, kind: str, group: str = "") -> Callable:
    """Add a function to the checks. kind: public bugs of this kind, as project#number."""

    def add(function: Callable) -> Callable:
        CHECKS.append(Check(name, kind, function, group))
        return function

    return add


def examine(subject: Subject, only: str = "") -> Iterator[Finding]:
    """Yield what each check finds whose name contains `only`."""
    for each in CHECKS:
        if only in each.name:
            yield each.find(subject)


# --- The checks: each goes from small to large, so that the first difference has the smallest input ----


@check("a prompt is read at once", "Mikyx-1/TinyLLM#17")
def _(trial: Trial) -> None:
    for n in (*range(1, 9), TEXT):
        ids = trial.ids(n=n)
        trial.pieces(ids, [ids.size(1)])


@check("a second piece follows", "hyprstream#1521, candle#3743")
def _(trial: Trial) -> None:
    for first, second in ((1, 2), (2, 2), (3, 5), (8, 3), (20, 20)):
        ids = trial.ids(n=first + second)
        trial.pieces(ids, [ids.size(1) - second, second])


@check("one token at a time", "mlx-lm#390, TrenTorch#192")
def _(trial: Trial) -> None:
    ids = trial.ids()
    trial.pieces(ids, [1] * ids.size(1))


@check("pieces of any size", "transformers#45513")
def _(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(2)
    for seed in range(8):
        ids = trial.ids(seed=seed)
        trial.pieces(ids, random_sizes(draw, ids.size(1), [1, 3, TEXT][seed % 3]))


def random_sizes(draw: torch.Generator, n: int, largest: int) -> list[int]:
    """Return sizes of pieces, at most `largest`, of a text of n tokens."""
    sizes: list[int] = []
    while (left := n - sum(sizes)) > 0:
        sizes.append(min(left, int(torch.randint(1, largest + 1, (), generator=draw))))
    return sizes


@check("a long text, one token at a time", "transformers#25104, mlx-lm#390")
def _(trial: Trial) -> None:
    """After a prompt of a quarter: over every boundary of a page, and lengths at which a rotation changes."""
    ids = trial.ids(1, LONG_TEXT)
    n = ids.size(1) // 4
    trial.pieces(ids, [n] + [1] * (ids.size(1) - n))


@check("a long text in pieces", "hyprstream#1521")
def _(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(3)
    for largest in (20, 150):
        ids = trial.ids(2, LONG_TEXT)
        trial.pieces(ids, random_sizes(draw, ids.size(1), largest))


@check("a piece longer than the window, on a full one", "mlxcel#679, litgpt#2182")
def _(trial: Trial) -> None:
    window = window_of(trial.subject)
    for second in (window + 1, 2 * window):
        ids = trial.ids(n=2 * window + second)
        trial.pieces(ids, [ids.size(1) - second, second])


@check("the window's first and last token", "transformers#37574, litgpt#2153")
def _(trial: Trial) -> None:
    """Each length around the place where the window is full as a prompt, and one token at a time over it."""
    window = window_of(trial.subject)
    for n in range(max(1, window - 2), window + 3):
        trial.pieces(trial.ids(n=n + 4), [n, 1, 1, 2])
    ids = trial.ids(n=3 * window)
    trial.pieces(ids, [1] * ids.size(1))


def window_of(subject: Subject) -> int:
    """Return the tokens that a cache shows, or a model of transformers. Raises NotOffered if these are all."""
    window = subject.window
    if window is None and isinstance(subject, TransformersSubject):
        window = getattr(subject.model.config.get_text_config(), "sliding_window", None)
    if window is None or 4 * (window + subject.sinks) >= subject.context:
        raise NotOffered("it has no window below a quarter of the context")
    return window + subject.sinks


@check("rows of a batch, alone and together", "reasoning-from-scratch#33")
def _(trial: Trial) -> None:
    for rows in range(1, 6):
        ids = trial.ids(rows)
        expected = torch.cat([trial.subject.whole(row[None]) for row in ids])
        cache, start = trial.new(), 0
        for size in (ids.size(1) - 5, 4, 1):
            got = trial.read(cache, ids[:, : start + size], start)
            trial.compare(got, expected[:, start : start + size], start)
            start += size


@check("texts that are padded on the left", "nnsight#673")
def _(trial: Trial) -> None:
    subject, ids, n_padded = trial.subject, trial.ids(2), 5
    padding = torch.ones_like(ids)
    padding[0, :n_padded] = 0
    cache, start = trial.new(), ids.size(1) - 6
    subject.read_padded(cache, ids[:, :start], padding[:, :start])
    for end in range(start + 1, ids.size(1) + 1):
        got = subject.read_padded(cache, ids[:, end - 1 : end], padding[:, :end])
        trial.compare(got[1:], subject.whole(ids[1:, :end])[:, -1:], end - 1)
        trial.compare(got[:1], subject.whole(ids[:1, n_padded:end])[:, -1:], end - 1)


@check("a neighbour of NaN", "pytorch#103963, pytorch#101967")
def _(trial: Trial) -> None:
    ids = trial.ids()
    expected = trial.subject.whole(ids)
    factor = torch.tensor([1.0, math.nan])[:, None, None].to(ids.device)
    with embedding_times(trial, factor):
        cache, start = trial.new(), 0
        for end in range(7, ids.size(1), 7):
            got = trial.read(cache, ids[:, :end], start)
            trial.compare(got[:1], expected[:1, start:end], start)
            start = end


@contextlib.contextmanager
def embedding_times(trial: Trial, factor: Tensor | float) -> Iterator[None]:
    """Multiply what the model's first embedding returns. Raises NotOffered if the model has none."""
    modules = trial.subject.model.modules()
    embedding = next((m for m in modules if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise NotOffered("the model has no nn.Embedding")
    hook = embedding.register_forward_hook(lambda module, args, out: (out * factor).to(out.dtype))
    try:
        yield
    except (ValueError, NotImplementedError):
        trial.text = None  # a cache that refused here can't go on without the factor
        raise
    finally:
        hook.remove()


@contextlib.contextmanager
def failing(subject: Subject, ids: Tensor, at_end: bool, error: type) -> Iterator[None]:
    """Any pass fails as it comes to its last module, or to one in the middle."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: order.append(module))
        for module in subject.model.modules()
        if not [*module.children()] and [*module.parameters()]
    ]
    subject.whole(ids[:, :2])
    for hook in hooks:
        hook.remove()
    if not order:
        raise NotOffered("there is no model whose pass could be made to fail")

    def fail(*_: object) -> None:
        raise error

    hook = order[-1 if at_end else len(order) // 2].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def fail_pass(
    trial: Trial,
    cache: Any,
    text: Tensor,
    start: int,
    at_end: bool = True,
    error: type = Interrupted,
) -> None:
    """Read what stands in text from start on, in a pass that fails. Raises WrongError if it doesn't."""
    with failing(trial.subject, text, at_end, error):
        try:
            trial.read(cache, text, start)
        except error:
            trial.steps[-1] = f"a pass of {text.size(1) - start} that fails"
            return
    raise WrongError("a pass whose last module raised an error came to its end")


def go_on_after_failure(trial: Trial, at_end: bool, error: type = Interrupted) -> None:
    """Other tokens are read by passes that fail: a piece and a single token, early and late in a text."""
    ids = trial.ids()
    for n in (0, 4, ids.size(1) - 8):
        for size in (1, 4):
            cache = trial.filled(ids[:, :n]) if n else trial.new()
            other = torch.cat([ids[:, :n], trial.other(ids[:, n : n + size])], dim=1)
            fail_pass(trial, cache, other, n, at_end, error)
            trial.pieces(ids[:, : n + 8], [1, 5, 2], cache)
            cache = trial.filled(ids[:, :n]) if n else trial.new()
            fail_pass(trial, cache, other, n, at_end, error)
            trial.pieces(ids[:, : n + 8], [5, 1, 2], cache)


@check("a pass that fails in the middle, then goes on", "llamadart#601, drama_llama#52", FEW)
def _(trial: Trial) -> None:
    go_on_after_failure(trial, at_end=False)


@check("a pass that fails at its end, then goes on", "llamadart#601, drama_llama#52", FEW)
def _(trial: Trial) -> None:
    go_on_after_failure(trial, at_end=True)


@check("a pass that Ctrl-C ends, then goes on", "llamadart#601, drama_llama#52", FEW)
def _(trial: Trial) -> None:
    go_on_after_failure(trial, at_end=True, error=KeyboardInterrupt)


@check("a pass of NaN that fails, then goes on", "pytorch#103963", FEW)
def _(trial: Trial) -> None:
    ids = trial.ids()
    for n in (4, ids.size(1) - 12):
        for size in (1, 4):
            cache = trial.filled(ids[:, :n])
            with embedding_times(trial, math.nan):
                fail_pass(trial, cache, ids[:, : n + size], n)
            trial.pieces(ids[:, : n + 8], [5, 1, 2], cache)


@check("a pass that fails, then a cut", "llamadart#601", FEW)
def _(trial: Trial) -> None:
    """On a cache of any length, also on a window that has just been filled."""
    limit = max(trial.subject.window or 9, 3) + trial.subject.sinks
    ids = trial.ids(n=limit + 9)
    if ids.size(1) < limit + 9:
        raise NotOffered("its window is nearly as long as its context")
    for n in (limit - 1, limit, limit + 1):
        for size in (1, 4):
            cache = trial.filled(ids[:, :n])
            fail_pass(
                trial, cache, torch.cat([ids[:, :n], trial.other(ids[:, n : n + size])], 1), n
            )
            held = trial.cut(cache, ids[:, :n], n - 2)
            text = torch.cat([held, ids[:, n : n + 8]], dim=1)
            trial.pieces(text, [1, 4, 3], cache)


@check("a failed pass isn't counted", "TrenTorch#192", FEW)
def _(trial: Trial) -> None:
    ids = trial.ids()
    cache = trial.filled(ids[:, :6])
    for size in (1, 3):
        fail_pass(trial, cache, ids[:, : 6 + size], 6)
        counted = trial.subject.length(cache)
        if counted != 6:
            after = f"after 6 tokens, and {size} in a pass that failed"
            raise WrongError(f"the count is {counted}, must be 6, {after}")


def cut_and_go_on(trial: Trial, n: int, kept: int, sizes: list[int]) -> None:
    """Read n tokens, cut back to some, count them, and go on with others."""
    ids = trial.ids(n=n + sum(sizes))
    read = ids[:, :n]
    cache = trial.filled(torch.cat([read[:, :kept], trial.other(read[:, kept:])], dim=1))
    held = trial.cut(cache, trial.text, kept)
    trial.pieces(torch.cat([held, ids[:, n:]], dim=1), sizes, cache)


@check("a text is cut back anywhere, then goes on", "llama.cpp#11970")
def _(trial: Trial) -> None:
    for n in (2, 5, 24, min(50, trial.subject.context - 6)):
        for kept in range(1, n):
            cut_and_go_on(trial, n, kept, [1, 3] if kept % 2 else [3, 1])


@check("another ending of the same text", "mlc-llm#3179, llama.cpp#11970")
def _(trial: Trial) -> None:
    n = max(2, min(20, trial.subject.window or 20))
    cut_and_go_on(trial, n, min(4, n - 1), [1, 15])


@check("the whole prompt is cached", "nano-vllm#144, llama.cpp#1585")
def _(trial: Trial) -> None:
    """The last token is read again, for its logits."""
    for n in (2, min(12, trial.subject.window or 12)):
        ids = trial.ids(n=n)
        cache = trial.filled(ids)
        held = trial.cut(cache, ids, n - 1)
        trial.pieces(torch.cat([held, ids[:, -1:]], dim=1), [1], cache)


@check("a draft of which two tokens stay", "transformers#47912, mlx-lm#1109")
def _(trial: Trial) -> None:
    ids = trial.ids(1)
    n = max(1, min(3, (trial.subject.window or 7) - 4))
    cache = trial.filled(ids[:, :n])
    draft = torch.cat([ids[:, : n + 2], trial.other(ids[:, n + 2 : n + 4])], dim=1)
    trial.read(cache, draft, n)
    held = trial.cut(cache, draft, n + 2)
    trial.pieces(torch.cat([held, ids[:, n + 4 : 18]], dim=1), [1, 4, 18 - n - 9], cache)


@check("a copy and its original go on", "exllamav2#226, physical-ai-studio#239")
def _(trial: Trial) -> None:
    """At every length: the copy reads other tokens, and both in turn."""
    text = trial.ids(1)
    for n in range(1, text.size(1) - 6):
        ids = text[:, : n + 6]
        other = torch.cat([ids[:, :n], trial.other(ids[:, n:])], dim=1)
        cache = trial.filled(ids[:, :n])
        trial.steps.append("copy")
        copied = trial.subject.clone(cache)
        expected, expected_other = trial.subject.whole(ids), trial.subject.whole(other)
        for start, end in ((n, n + 1), (n + 1, n + 5), (n + 5, n + 6)):
            trial.compare(trial.read(cache, ids[:, :end], start), expected[:, start:end], start)
            got = trial.read(copied, other[:, :end], start)
            trial.compare(got, expected_other[:, start:end], start)


@check("two texts in turn", "LMCache#4385, vllm#30931")
def _(trial: Trial) -> None:
    texts = [trial.ids(1, seed=seed) for seed in (3, 4)]
    expected = [trial.subject.whole(text) for text in texts]
    caches = [trial.new(), trial.new()]
    start = 0
    for size in (2, 1, 7, 1, 5):
        end = start + size
        for text, whole, cache in zip(texts, expected, caches, strict=True):
            trial.compare(trial.read(cache, text[:, :end], start), whole[:, start:end], start)
        start = end


@check("a new text after another", "llama.cpp#27068")
def _(trial: Trial) -> None:
    trial.filled(trial.ids(seed=5))
    ids = trial.ids(seed=6)
    trial.pieces(ids, [7, 1, ids.size(1) - 8])


@check("past the context", "einygpt#2")
def _(trial: Trial) -> None:
    """What is too long is refused, and what was read before stays."""
    context = trial.subject.context
    if context > LONGEST_CONTEXT:
        raise NotOffered(f"a context of {context:,} tokens takes too long to fill")
    ids = torch.cat([trial.ids(1, context), trial.ids(1, 5, seed=2)], dim=1)
    for n, size in ((context - 4, 7), (context, 1)):
        for copied in (False, True):
            cache = trial.filled(ids[:, :n])
            with contextlib.suppress(NotOffered):
                cache = trial.subject.clone(cache) if copied else cache
            read_too_much(trial, cache, ids[:, : n + size], n)


def read_too_much(trial: Trial, cache: Any, ids: Tensor, n: int) -> None:
    """Read ids (1, T) from the n-th token on, which exceed the context: what the model reads without a cache may be
    read; anything else has to be refused, in the model's own way at least, and the text to go on."""
    try:
        got = trial.read(cache, ids, n)
    except Exception as error:
        refuses = isinstance(error, ValueError | NotImplementedError) and str(error)
        if not refuses and not fails_alike(trial.subject, ids, error):
            raise
        if n < trial.subject.context:
            trial.pieces(ids[:, : trial.subject.context], [3, 1], cache)
        return
    try:
        expected = trial.subject.whole(ids)
    except Exception as error:
        raise WrongError(
            f"token {n}: it is read, must be refused, as it is without a cache"
        ) from error
    trial.compare(got, expected[:, n:], n)


def fails_alike(subject: Subject, ids: Tensor, error: Exception) -> bool:
    """Return whether a pass without a cache raises an error of the same class."""
    try:
        subject.whole(ids)
    except type(error):
        return True
    return False


@check("another number of rows", "mlx-lm#1141")
def _(trial: Trial) -> None:
    """A text of two rows goes on with one: that is refused, by any error, and the two go on."""
    ids = trial.ids()
    n = ids.size(1) - 6
    cache = trial.filled(ids[:, :n])
    for size in (1, 3):
        try:
            got = trial.read(cache, ids[1:, : n + size], n)
        except Exception:  # any will do
            trial.steps[-1] = f"read {size} of one row, which is refused"
            continue
        trial.compare(got, trial.subject.whole(ids[1:, : n + size])[:, n:], n)
        return
    if trial.subject.promises:
        trial.pieces(ids, [1, 5], cache)


@check("tokens are counted", "transformers#38156, transformers#30377")
def _(trial: Trial) -> None:
    """After each pass, of any size, and each cut; also if a token's embedding is 0."""
    ids = trial.ids()
    with contextlib.suppress(NotOffered), embedding_times(trial, 0.0):
        count_passes(trial, ids)
        return
    count_passes(trial, ids)


def count_passes(trial: Trial, ids: Tensor) -> None:
    """Raise WrongError if the count after a pass or a cut isn't the number of tokens."""
    cache, n = trial.new(), 0
    if counted := trial.subject.length(cache):
        raise WrongError(f"the count of a new cache is {counted}, must be 0", cause="reset")
    for size in (1, 6, 1, 9, 2):
        trial.read(cache, ids[:, : n + size], n)
        n += size
        counted = trial.subject.length(cache)
        if counted != n:
            hint = "; is commit() called?" if counted == 0 else ""
            says = f"the count is {counted}, must be {n} ({trial.history()}){hint}"
            raise WrongError(says, cause="count")
        if hasattr(cache, "positions") and (position := int(cache.positions(1).max())) != n:
            says = f"the next token's position is {position}, must be {n} ({trial.history()})"
            raise WrongError(says, cause="positions: restart")
    for kept in (15, 14, 4):
        try:
            n = trial.cut(cache, ids[:, :n], kept).size(1)
        except (NotOffered, ValueError, NotImplementedError):
            return
        counted = trial.subject.length(cache)
        if counted != n:
            says = f"the count is {counted}, must be {n} ({trial.history()})"
            raise WrongError(says, cause="cut")


@check("bytes are those of key-value heads", "SnapKV#16")
def _(trial: Trial) -> None:
    """In any dtype. A cache may take slots for its window or its context, or as many again as it needs."""
    subject = trial.subject
    ids = trial.ids(1, LONG_TEXT)
    n = ids.size(1)
    slots = max(2 ** math.ceil(math.log2(n)), min(subject.context, LONGEST_CONTEXT) + 1)
    if subject.capacity < math.inf:
        slots = max(slots, subject.capacity + 1)
    if subject.window is not None:
        slots = 2 * (subject.window + subject.sinks) + 32
    for dtype in (None, torch.bfloat16, torch.float16):
        each = subject if dtype is None else subject.as_dtype(dtype)
        nbytes, token = each.nbytes(Trial(each).filled(ids)), each.token_bytes()
        if nbytes > token * slots:
            kept = "the context" if subject.window is None else f"a window of {subject.window}"
            words = f"{n} tokens take {nbytes:,} bytes, must be at most {token * slots:,}"
            raise WrongError(f"{words} for {kept}, in {dtype or 'the dtype of the model'}")


@check("bytes are the memory that is held", "llm_from_scratch#3")
def _(trial: Trial) -> None:
    """After a long prompt, and after a cut, as they are one token at a time."""
    ids = trial.ids(1)
    cache = trial.pieces(ids, [1] * ids.size(1))
    if not hasattr(cache, "nbytes"):
        raise NotOffered(f"a {type(cache).__name__} has no nbytes")
    nbytes = trial.subject.nbytes
    if not 0.9 * nbytes(cache) <= held_bytes(cache) <= 1.1 * nbytes(cache):
        raise NotOffered("its nbytes are not those of its memory")
    check_memory(trial, trial.filled(ids))
    with contextlib.suppress(NotOffered, ValueError, NotImplementedError):
        trial.cut(cache, ids, 4)
    check_memory(trial, cache)


def check_memory(trial: Trial, cache: Any) -> None:
    """Raise WrongError if a cache holds twice the memory that it says: views of what is gone keep all of it."""
    says, holds = trial.subject.nbytes(cache), held_bytes(cache)
    if holds > 2 * says:
        raise WrongError(f"it says {says:,} bytes, and holds {holds:,} ({trial.history()})")


@check("bfloat16 beside float32", "transformers#25420, candle#3743")
def _(trial: Trial) -> None:
    """The distance from float32 may be half as large again as without a cache."""
    subject = trial.subject
    parameter = next(subject.model.parameters(), None)
    if parameter is None or parameter.dtype != torch.float32:
        raise NotOffered("there is no model in float32")
    half, ids = subject.as_dtype(torch.bfloat16), trial.ids()
    exact, rounding = subject.whole(ids), half.whole(ids).float()
    cache = half.new()
    got = [half.read(cache, piece) for piece in ids.split([9, 1, 7, ids.size(1) - 17], dim=1)]
    trial.tolerance = 1.5 * float((rounding - exact).abs().max() / exact.abs().max()) + 0.01
    trial.compare(torch.cat(got, dim=1), exact)


@check("weights change while a text is cached", "vllm#9744, lmdeploy#4917")
def _(trial: Trial) -> str:
    """No cache can know; the difference says what it costs."""
    subject, ids = trial.subject, trial.ids()
    parameters = [*subject.model.parameters()]
    if not parameters:
        raise NotOffered("there is no model with weights")
    cache = trial.filled(ids[:, :-1])
    kept = [parameter.clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.mul_(1.1)
        got = trial.read(cache, ids, ids.size(1) - 1)
        expected = subject.whole(ids)[:, -1:]
    finally:
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
    apart = float((got - expected).abs().max() / expected.abs().max())
    return f"weights a tenth larger: {apart:.1e} of the largest logit; nothing says that the cache is stale"


# --- The diagnosis -----------------------------------------------------------------------------------


CAUSES = {
    "mask: future": "a token sees later ones: look at the mask of a piece",
    "mask: new only": "right token by token and wrong in pieces: look at the mask of a piece behind cached tokens",
    "mask: loses tokens": "cached tokens that must be seen aren't",
    "window: edge": "the window shows a token too many or too few",
    "window: order": "a token is overwritten, or forgotten, before it is read: look at pieces on a full window",
    "positions: restart": "new tokens are read at wrong positions: they start over, or count slots or pieces",
    "positions: rows": "rows of different lengths are read at one position, or see their padding",
    "rotation": "keys are turned for other positions than their own",
    "rows": "rows of a batch are mixed, shared or swapped",
    "sharing": "two caches, or a copy and its original, share memory",
    "reset": "what an earlier text left is seen by the next",
    "cut": "truncate keeps too many or too few tokens, or moves keys and positions apart",
    "count": "the count isn't the number of tokens read",
    "half a pass": "a pass that failed leaves something behind",
    "bounds": "past the end a write is lost, or wraps, without an error",
    "pages": "wrong only where a page or a buffer is full",
    "numbers": "keys and values are stored in another precision than the model computes in",
    "bytes": "more memory than the tokens need",
}
ASK_WINDOW = "does it forget tokens? give --window"


class Diagnosis(NamedTuple):
    """What explains most of what is bad. cause: of CAUSES, or ""; shown_by: the check of the smallest input;
    consequences: the other checks that found something."""

    cause: str
    says: str
    shown_by: str
    kind: str
    consequences: list[str]


def diagnose(findings: list[Finding]) -> Diagnosis | None:
    """Return the likeliest cause of what is WRONG or BREAKS; None if nothing does."""
    bad = {finding.check: finding for finding in findings if finding.verdict in BAD}
    if not bad:
        return None
    verdicts = {finding.check: finding.verdict for finding in findings}
    cause, name = cause_of(bad, verdicts)
    words = f"{CAUSES[cause]} ({cause})" if cause else "no cause is known"
    if cause == "mask: loses tokens" and verdicts.get(WINDOW) == "not offered":
        words += f"; {ASK_WINDOW}"
    says = f'{words}. First seen in "{name}": {bad[name].says}'
    others = [check for check in bad if check != name]
    return Diagnosis(cause, says, name, bad[name].kind, others)


PROMPT, SECOND, ONE_BY_ONE, ANY = BASIC = (
    "a prompt is read at once",
    "a second piece follows",
    "one token at a time",
    "pieces of any size",
)
COUNT = "tokens are counted"
LONG = ("a long text, one token at a time", "a long text in pieces")
LONGER, WINDOW = (
    "a piece longer than the window, on a full one",
    "the window's first and last token",
)
ALONE: list[
    tuple[str, list[str]]
] = [  # causes of what is wrong in caches that read right, by checks
    ("rows", ["rows of a batch, alone and together", "a neighbour of NaN"]),
    ("reset", ["a new text after another"]),
    ("sharing", ["two texts in turn", "a copy and its original go on"]),
    ("cut", ["a text is cut back anywhere, then goes on", "another ending of the same text"]),
    ("cut", ["the whole prompt is cached", "a draft of which two tokens stay"]),
    ("positions: rows", ["texts that are padded on the left"]),
    ("half a pass", [each.name for each in CHECKS if "fail" in each.name or "Ctrl-C" in each.name]),
    ("bounds", ["past the context"]),
    ("rows", ["another number of rows"]),
    ("numbers", ["bfloat16 beside float32"]),
    ("bytes", ["bytes are those of key-value heads", "bytes are the memory that is held"]),
]


def cause_of(bad: dict[str, Finding], verdicts: dict[str, str]) -> tuple[str, str]:
    """Return the likeliest cause, and the check that shows it, by the pattern of what is bad and what is right."""
    if COUNT in bad and bad[COUNT].cause:
        return bad[COUNT].cause, COUNT
    reading = [name for name in (*BASIC, LONGER, WINDOW, *LONG) if name in bad]
    if not reading:
        for cause, names in ALONE:
            for name in names:
                if name in bad:
                    return cause, name
        return "", next(iter(bad))
    name = reading[0]
    difference = bad[name].difference
    one_row_is_right = "two texts in turn" not in bad and LONG[0] not in bad
    if one_row_is_right and ONE_BY_ONE in bad:
        return "rows", name
    if difference and difference.largest < ROUNDING:
        return "numbers", name
    for each in reading:
        if bad[each].cause:
            return bad[each].cause, each
    if difference is None:
        return "", name
    if name == PROMPT and difference.token == 0:
        return "reset", name
    if name in (LONGER, WINDOW):
        return "window: order", name
    if name in LONG:
        return ("bounds" if "past the context" in bad else "pages"), name
    if ONE_BY_ONE not in bad:
        return "mask: new only", name
    first = bad[ONE_BY_ONE].difference
    if first is None or first.token <= 1:
        return "positions: restart", name
    if first.token == 2:
        return "rotation", name
    if verdicts.get(WINDOW) != "not offered":
        return "window: order", name
    return "pages", name


# --- Whose cache it is --------------------------------------------------------------------------------


def dynamic(model: Any) -> Any:
    """Return transformers' own growing cache."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def load_subject(options: argparse.Namespace) -> Subject:
    """Return what a command line hands over. Raises ValueError, in a sentence, if that can't be examined."""
    given = {}
    if options.file is None:
        if options.model is None and options.family is None:
            return Subject(small_model())
    else:
        given = definitions(Path(options.file))
    if options.model and options.family:
        raise ValueError("give --model or --family, not both")
    if (options.model or options.family) and given and "make" not in given:
        raise ValueError(f"{options.file} has no make(model), which --model and --family need")
    if "subject" in given:
        return GivenSubject(given["subject"])
    if "make" in given or options.file is None:
        make = given.get("make", dynamic)
        model = transformers_model(options)
        return TransformersSubject(
            model, make, options.window, options.sinks or 0, options.approximate
        )
    if isinstance(model := given.get("model"), nn.Module):
        return protocol_subject(model.eval(), model.new_cache, options)
    if isinstance(given.get("Cache"), type):
        return protocol_subject(small_model(), given["Cache"], options)
    raise ValueError(
        f"{options.file} has none of these: a class Cache, make(model), a `subject`, a `model`"
    )


def definitions(path: Path) -> dict[str, Any]:
    """Run a Python file, and return what it defines. Raises ValueError if it can't be run to its end."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: a model's folder is given by --model")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"examined_{path.stem}", path)
    if spec is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} can't be run: {in_words(error)}") from error
    return vars(module)


def transformers_model(options: argparse.Namespace) -> Any:
    """Return the model of transformers that is named, or a small random one."""
    if options.model is None:
        return family_model(options.family or "llama")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()


def protocol_subject(model: nn.Module, new_cache: Callable, options: argparse.Namespace) -> Subject:
    """Return a model with a cache of our protocol, whose window, sinks and capacity are options, or its attributes.
    Raises ValueError if it can't be made, or lacks a method."""
    limits = ("window", "sinks", "capacity")
    chosen = {name: getattr(options, name) for name in limits if getattr(options, name) is not None}
    with contextlib.suppress(TypeError, ValueError):  # a class that says nothing of its arguments
        takes = inspect.signature(new_cache).parameters
        new_cache = functools.partial(new_cache, **{k: v for k, v in chosen.items() if k in takes})
    try:
        cache = new_cache()
    except (Exception, SystemExit) as error:
        raise ValueError(f"no cache can be made: {in_words(error)}") from error
    needed = ("__len__", "positions", "append", "commit")
    if missing := [name for name in needed if not hasattr(cache, name)]:
        raise ValueError(f"a {type(cache).__name__} has no {', '.join(missing)}")
    for name in limits:
        value = getattr(cache, name, None)
        if type(value) is int and value > 0:
            chosen.setdefault(name, value)
    return Subject(model, new_cache, **chosen, approximate=options.approximate)


# --- The command line --------------------------------------------------------------------------------


def run_checks(sender: Any, options: argparse.Namespace, names: list[str]) -> None:
    """Send "", or why there is nothing to examine; then the findings of the checks with these names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.dup2(2, 1)  # what the file prints isn't a finding
    torch.set_num_threads(1)  # for small models more threads cost more
    try:
        subject = load_subject(options)
        if subject.context < TEXT:
            raise ValueError(
                f"there is room for {subject.context} tokens, and the checks need {TEXT}"
            )
    except (Exception, SystemExit) as error:
        sender.send(str(error) if isinstance(error, ValueError) else in_words(error))
        return
    sender.send("")
    for each in CHECKS:
        if each.name in names:
            sender.send(each.find(subject))


def answer(receiver: Any, seconds: float) -> Any:
    """Return what the child sends, or why nothing came."""
    if not receiver.poll(seconds):
        return f"no answer within {seconds:g} seconds"
    try:
        return receiver.recv()
    except EOFError:
        return "its process has ended"


def findings_of(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield what the checks find, as they find it, in a child process, which is begun anew only after a time-out.
    Raises ValueError if there is nothing to examine."""
    left = [each for each in CHECKS if options.only in each.name]
    if not left:
        raise ValueError(f"no check has {options.only!r} in its name")
    context = multiprocessing.get_context("spawn")
    while left:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, options, [each.name for each in left])
        child = context.Process(target=run_checks, args=arguments, daemon=True)
        child.start()
        sender.close()
        try:
            if refusal := answer(receiver, START_SECONDS):
                raise ValueError(f"nothing to examine: {refusal}")
            found = None
            while left and not isinstance(found, str):
                found = answer(receiver, options.seconds)
                asked = left.pop(0)
                if isinstance(found, str):
                    yield Finding(asked.name, "BREAKS", found, asked.kind, asked.group)
                else:
                    yield found
        finally:
            child.kill()
            child.join()


def report(findings: Iterator[Finding], as_json: bool = False) -> int:
    """Print findings as they come, then the diagnosis, and what is bad in words. Return the exit status. Raises
    ValueError if everything is refused."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(f"{finding.verdict:11}  {finding.check}", flush=True)
    verdicts = [finding.verdict for finding in found]
    diagnosis = diagnose(found)
    if as_json:
        record = {"diagnosis": diagnosis and diagnosis._asdict(), "findings": []}
        for finding in found:
            difference = finding.difference and {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in finding.difference._asdict().items()
            }
            record["findings"].append(finding._asdict() | {"difference": difference})
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        print_summary(found, diagnosis)
    if not {"right", "measured", *BAD} & {*verdicts}:
        refused = [finding.says for finding in found if finding.verdict == "REFUSES"]
        raise ValueError(f"nothing to examine: {(refused or [found[0].says])[0]}")
    return int(diagnosis is not None)


def print_summary(findings: list[Finding], diagnosis: Diagnosis | None) -> None:
    """Print the diagnosis, and what was found beside right answers."""
    if diagnosis:
        print(f"\nDiagnosis: {diagnosis.says}")
        if diagnosis.kind:
            print(f"Public bugs that this check is for: {diagnosis.kind}")
        if diagnosis.consequences:
            print(f"{len(diagnosis.consequences)} more checks are bad: repair this first.")
    print()
    for verdict in ("WRONG", "BREAKS", "REFUSES", "measured", "not offered"):
        for finding in findings:
            if finding.verdict == verdict:
                print(f"{verdict:11}  {finding.check}: {finding.says}")
    counts = []
    for verdict in ("right", "WRONG", "REFUSES", "BREAKS", "not offered", "measured"):
        n = sum(finding.verdict == verdict for finding in findings)
        counts.append(f"{n} {verdict}")
    print("\n" + ", ".join(counts))


def at_least(least: int, kind: Callable) -> Callable:
    """Return a type of argparse: a number that isn't smaller."""

    def number(text: str) -> Any:
        if not kind(text) >= least:
            raise argparse.ArgumentTypeError(f"{text}, must be at least {least}")
        return kind(text)

    return number


def main(argv: list[str] | None = None) -> None:
    usage, _, more = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=usage, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE.py", help="whose cache is examined")
    add("--model", metavar="NAME", help="a model of transformers, by name or folder")
    add("--family", choices=FAMILIES, help="a small random model of transformers (default: llama)")
    add("--window", type=at_least(1, int), help="tokens that the cache shows")
    add("--sinks", type=at_least(0, int), help="first tokens that it always shows")
    add("--capacity", type=at_least(1, int), help="tokens that it has room for")
    add(
        "--approximate",
        nargs="?",
        type=at_least(0, float),
        const=True,
        default=False,
        metavar="LARGEST",
        help="measure differences; those over LARGEST (of the largest logit) are wrong",
    )
    add("--only", default="", metavar="WORDS", help="checks whose name has these words")
    add(
        "--seconds",
        type=at_least(1, float),
        default=30.0,
        help="seconds that a check may take (default: 30)",
    )
    add("--json", action="store_true", help="print findings as JSON")
    options = parser.parse_args(argv)
    try:
        status = report(findings_of(options), options.json)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\n")
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(2)
    sys.exit(status)


if __name__ == "__main__":
    main()
