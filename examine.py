"""Is this KV cache right? Some thirty checks compare what a model computes with a cache and without one, in seconds.

    python3 examine.py                               a small cache that stands in this file
    python3 examine.py FILE.py                       your class Cache (append, positions, commit), in a small model
    python3 examine.py FILE.py --window 6            the same, if it forgets tokens
    python3 examine.py FILE.py --family gemma3       your make(model), which returns a cache of transformers, in a small
                                                     random model of a family; --model FOLDER_OR_NAME: in a real one
    python3 examine.py FILE.py                       your `subject`: any object with whole(), new() and read()

This file needs torch and nothing else: copy it. The measure is the model itself, in one pass without a cache, with an
explicit mask where the cache forgets tokens. The verdicts are: right; WRONG, a number is wrong; REFUSES, an error that
the cache raises with a message, after which it goes on; BREAKS, any other error, an exit, or no answer in time; not
offered, the cache has no way to do this; and measured, the difference of an approximate cache.

Exit status: 0 if nothing is WRONG and nothing BREAKS, 1 if something does, 2 if there is nothing to examine.
"""

# Shapes: B rows, T tokens, S tokens attended to, H heads, D head size, C width, V vocabulary.

from __future__ import annotations

import argparse
import contextlib
import copy
import dis
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import os
import runpy
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
VERDICTS = ("right", "WRONG", "REFUSES", "BREAKS", "not offered", "measured")
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
    """The first token whose logits differ, and its largest difference."""

    row: int
    token: int  # of the text
    logit: int
    got: float
    expected: float
    largest: float  # of all differences in this piece, relative to the largest logit


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
        self.capacity = capacity
        self.approximate = approximate
        self.vocab_size, context = self.sizes()
        self.context = min(context, capacity)

    def sizes(self) -> tuple[int, int]:
        """Return the number of tokens that there are, and of those that the model can read."""
        return self.model.config.vocab_size, self.model.context

    def whole(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T) in one pass without a cache."""
        if self.window is None:
            return self.model(ids)
        return self.model(ids, GrowingCache(self.window, self.sinks))

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
        self.config = model.config.get_text_config(decoder=True)
        super().__init__(model, new_cache, window, sinks, approximate=approximate)
        self.promises = promises
        self.records_past = records_past
        if "linear_attention" in (getattr(self.config, "layer_types", None) or []):
            self.tolerance = DELTA_TOLERANCE
        takes = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in takes else "past_key_values"

    def sizes(self) -> tuple[int, int]:
        return self.config.vocab_size, self.config.max_position_embeddings

    def whole(self, ids: Tensor) -> Tensor:
        mask = None  # or the model's own windows
        if self.window is not None:
            seen = GrowingCache(self.window, self.sinks).mask(torch.arange(ids.size(1)))
            mask = torch.zeros(1, 1, *seen.shape, dtype=self.model.dtype)
            mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min).to(ids.device)
        return self.model(ids, attention_mask=mask, use_cache=False).logits

    def new(self) -> Any:
        cache = self.new_cache(self.model)
        if self.records_past and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        return self.model(ids, **{self.argument: cache}).logits

    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        positions = (padding.cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
        if not any(hasattr(layer, "keys") for layer in cache.layers):
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

    def token_bytes(self) -> int:
        c = self.config
        if any(hasattr(layer, "conv_states") for layer in self.new().layers):
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


GIVEN = {  # what a `subject` needn't say
    "model": nn.Module(),
    "vocab_size": 61,
    "context": LONG_TEXT + 20,
    "window": None,
    "sinks": 0,
    "capacity": math.inf,
    "approximate": False,
    "promises": False,
    "tolerance": TOLERANCE,
}


class GivenSubject:
    """A `subject` of a file: whatever it has; what it lacks isn't asked.

    It needs whole(ids), new() and read(cache, ids), as above; it may have any other method of a Subject, and
    vocab_size, context, window, sinks, approximate, promises and model. Raises ValueError if it lacks what it needs.
    """

    def __init__(self, given: Any) -> None:
        if missing := [name for name in ("whole", "new", "read") if not hasattr(given, name)]:
            raise ValueError(f"`subject` has no {'(), '.join(missing)}()")
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def lacking(*_: Any) -> None:
            raise NotOffered(f"there is no {name}()")

        return getattr(self._given, name, GIVEN.get(name, lacking))


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


class GrowingCache:
    """Keys and values of the tokens that were read: the least that our protocol asks of a cache.

    window, sinks: the last and first tokens that it shows; it keeps them all, so that a whole text can be the first piece.
    """

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self.window = window
        self.sinks = sinks
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
        kv = torch.stack([k, v])
        if self.n_read:
            old = self.layers[layer][:, :, :, : self.n_read]  # not what a failed pass left
            if old.size(1) != kv.size(1):
                raise ValueError(f"a cache of {old.size(1)} rows got {kv.size(1)}")
            kv = torch.cat([old, kv], dim=3)
        self.layers[layer : layer + 1] = [kv]
        return kv[0], kv[1], self.mask(pos)

    def mask(self, pos: Tensor) -> Tensor:
        """Return the mask (T, S) of the keys that the queries at pos (T,) see."""
        at = torch.arange(self.n_read + len(pos), device=pos.device)
        mask = at <= pos[:, None]
        if self.window is not None:
            mask &= (at > pos[:, None] - self.window) | (at < self.sinks)
        return mask

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


class SmallBlock(nn.Module):
    """Attention in which two query heads share a key head, then an MLP."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        width, size = config.n_embd, config.head_dim
        self.heads = [config.n_head, config.n_kv_head, config.n_kv_head]
        self.qkv = nn.Linear(width, sum(self.heads) * size)
        self.out = nn.Linear(config.n_head * size, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, pos: Tensor, cache: Any, layer: int) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(F.layer_norm(x, [C])).view(B, T, sum(self.heads), -1)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)  # (B, H, T, D)
        mask = None
        if cache is not None:
            k, v, mask = cache.append(layer, k, v, pos)
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, [C]))


class SmallModel(nn.Module):
    """Two layers that show the faults of a cache: what a token is depends on its position, and key heads are shared."""

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
        self.largest = 0.0  # difference, relative to the largest logit
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

    def other(self, ids: Tensor, n: int) -> Tensor:
        """Return ids (B, T) that differ everywhere from the n-th token on."""
        return torch.cat([ids[:, :n], (ids[:, n:] + 1) % self.subject.vocab_size], dim=1)

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
        if ids.size(1):
            self.read(cache, ids, 0)
        return cache

    def step(self, cache: Any, text: Tensor, start: int, end: int, expected: Tensor) -> None:
        """Read text (B, T) from start to end, and compare with the logits that are expected of the whole text."""
        got = self.read(cache, text[:, :end], start)
        self.compare(got, expected[:, start:end], start)

    def pieces(
        self, ids: Tensor, sizes: list[int], cache: Any = None, expected: Tensor | None = None
    ) -> Any:
        """Read the end of ids (B, T) in pieces of these sizes, and compare each. Return the cache."""
        is_new = cache is None
        if is_new:
            cache = self.new()
        if expected is None:
            expected = self.subject.whole(ids)
        start = ids.size(1) - sum(sizes)
        for number, size in enumerate(sizes):
            try:
                self.step(cache, ids, start, start + size, expected)
            except WrongError as error:
                if is_new and error.difference:
                    with contextlib.suppress(
                        Exception
                    ):  # a stranger's; that it is WRONG has been shown
                        row = error.difference.row
                        error.cause = cause_in_sight(self.subject, ids, sizes[: number + 1], row)
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
        except Exception as error:
            if forgot and is_refusal(error):
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
        apart = (got - expected).abs() / expected.abs().max()
        largest = float(apart.max())
        self.largest = max(self.largest, largest)
        allowed = self.tolerance
        if self.subject.approximate:
            allowed = torch.finfo(torch.float32).max  # infinity is wrong
            if self.subject.approximate is not True:
                allowed = float(self.subject.approximate)
        wrong = ~(apart <= allowed)  # NaN, too
        if not wrong.any():
            return
        token = int(wrong.nonzero()[:, 1].min())
        row = int(wrong[:, token].nonzero()[0, 0])
        logit = int(apart[row, token].argmax())
        number, must = float(got[row, token, logit]), float(expected[row, token, logit])
        difference = Difference(row, first + token, logit, number, must, largest)
        place = f"row {row}, token {first + token}: logit {logit} is {number:.4g}"
        raise WrongError(f"{place}, must be {must:.4g} ({self.history()})", difference)

    def history(self) -> str:
        """Return what was done since the last cache was made, in words."""
        words = []
        for step, times in itertools.groupby(self.steps):
            n = len([*times])
            words.append(f"{n} times {step}" if n > 1 else step)
        if len(words) > 7:
            words = [*words[:3], "...", *words[-3:]]
        return "a new cache: " + ", ".join(words) if words else "a new cache"

    def goes_on(self) -> None:
        """Have the cache, which has just refused, read a token as if it hadn't been asked, or refuse that, too."""
        if self.text is None:
            return
        text, start = self.text, self.start
        if start == text.size(1):  # it refused a cut
            text = torch.cat([text, text[:, :1]], dim=1)
        with may_refuse():
            self.step(self.cache, text, start, start + 1, self.subject.whole(text[:, : start + 1]))


def is_refusal(error: Exception) -> bool:
    """Return whether an error is meant: a ValueError or NotImplementedError with a message, by a `raise` in the code of
    a cache or a model. Shapes that don't fit are errors of torch and numpy, or of their compiled code."""
    if not isinstance(error, ValueError | NotImplementedError) or not str(error):
        return False
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    frame = trace.tb_frame
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    instruction = dis.opname[frame.f_code.co_code[trace.tb_lasti]]
    return instruction == "RAISE_VARARGS" and package not in ("torch", "numpy")


@contextlib.contextmanager
def may_refuse() -> Iterator[None]:
    """Go on behind what the cache refuses, or doesn't offer."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, NotOffered) and not is_refusal(error):
            raise


def cause_in_sight(subject: Subject, ids: Tensor, sizes: list[int], row: int) -> str:
    """Return the cause of a wrong logit in a row of ids (B, T), in the last of pieces of these sizes; or ""."""
    end = sum(sizes)
    start = end - sizes[-1]

    def cached(text: Tensor) -> Tensor:
        """Return the logits of the last piece."""
        cache = subject.new()
        for piece in text.split(sizes, dim=1):
            got = subject.read(cache, piece)
        return got

    batch = ids[:, :end]
    alone = batch[row : row + 1]
    before = cached(batch)
    another = (batch.repeat(1, 9)[:, : 9 if end < 9 else 5] + 1) % subject.vocab_size
    subject.read(subject.new(), another)
    if not is_close(subject, before, cached(batch)):
        return "reset" if before.isfinite().all() else ""
    if len(ids) > 1 and is_close(subject, cached(alone), subject.whole(alone)[:, start:]):
        return "rows"
    cause = sight(subject, alone, start, short_is_right=end > 8)
    if cause in ("mask: new only", "mask: loses tokens", "rotation"):  # a longer text says more
        longer = alone.repeat(1, 9)[:, : min(end + 8, subject.context)]
        cause = sight(subject, longer, end, short_is_right=False) or cause
    return cause


def is_close(subject: Subject, got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= subject.tolerance * expected.abs().max())


def sight(subject: Subject, ids: Tensor, start: int, short_is_right: bool) -> str:
    """Return what is wrong with the tokens that ids (1, T) see from `start` on, by changing one token after the other:
    a cause, or "" if each sees what it must. Only one layer is used, in which no token sees by another's eyes."""
    shallow = copy.copy(subject)
    shallow.model = copy.deepcopy(subject.model)
    for module in [*shallow.model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                setattr(module, name, child[:1])

    def cached(text: Tensor) -> Tensor:
        cache = shallow.new()
        if start:
            shallow.read(cache, text[:, :start])
        return shallow.read(cache, text[:, start:])

    def whole(text: Tensor) -> Tensor:
        return shallow.whole(text)[:, start:]

    n = ids.size(1)
    tokens = {*range(min(8, n)), *range(max(0, n - LONGEST_SIGHT), n)}

    def seen(logits: Callable[[Tensor], Tensor]) -> set[tuple[int, int]]:
        """Return the tokens that change something, each with the token for which they do."""
        before = logits(ids)
        pairs = set()
        for token in tokens:
            changed = ids.clone()
            changed[0, token] = (changed[0, token] + 1) % subject.vocab_size
            differs = (logits(changed) - before).abs().amax(dim=2)[0] > subject.tolerance
            pairs |= {(token, start + int(query)) for query in differs.nonzero()}
        return pairs

    got = cached(ids)
    if is_close(subject, got, whole(ids)) or not got.isfinite().all():
        return ""  # it takes two layers, or other pieces
    sees, must_see = seen(cached), seen(whole)
    if any(token > query for token, query in sees - must_see):
        return "mask: future"
    if sees - must_see:
        return "window: edge"
    lost = must_see - sees
    if not lost:
        return "rotation" if isinstance(subject.model, SmallModel) else ""
    if subject.window is not None:
        return "window: order"
    square = {(token, query) for token, query in must_see if query - start < token < query}
    if start and (lost == square or {pair for pair in must_see if pair[0] < start} <= lost):
        return "mask: new only"
    first = min(query for _, query in lost)
    if short_is_right and {token for token, query in lost if query == first} != {0}:
        return "pages"
    return "mask: loses tokens"


class Check(NamedTuple):
    """A question to a cache. kind: public bugs of its kind; group: FEW, or nothing."""

    name: str
    kind: str
    function: Callable[[Trial], str | None]
    group: str = ""

    def find(self, subject: Subject) -> Finding:
        """Return what this check finds. What few caches promise isn't wrong in one that doesn't."""
        trial = Trial(subject)
        torch.manual_seed(0)
        difference, cause = None, ""
        try:
            with torch.no_grad():
                verdict, says = self.ask(trial)
        except NotOffered as error:
            verdict, says = "not offered", str(error)
        except WrongError as error:
            verdict, says = "WRONG", str(error)
            difference, cause = error.difference, error.cause
        except (Exception, SystemExit) as error:  # whatever a stranger's code raises
            verdict, says = "BREAKS", f"{in_words(error)} ({trial.history()})"
        if self.group and not subject.promises and verdict in (*BAD, "REFUSES"):
            verdict, says = "not offered", f"not promised: {says}"
        return Finding(self.name, verdict, says, self.kind, self.group, difference, cause)

    def ask(self, trial: Trial) -> tuple[str, str]:
        """Return the verdict and what there is to say, if nothing is wrong."""
        try:
            says = self.function(trial)
        except Exception as error:
            if not is_refusal(error):
                raise
            trial.goes_on()
            return "REFUSES", in_words(error)
        exact = says is None and trial.largest <= trial.tolerance
        return "right" if exact else "measured", says or f"{trial.largest:.1e} of the largest logit"


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
        trial.pieces(ids, random_sizes(draw, ids.size(1), [3, 8, TEXT][seed % 3]))


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
        window = getattr(subject.config, "sliding_window", None)
    if window is None or 4 * (window + subject.sinks) >= subject.context:
        raise NotOffered("it has no window below a quarter of the context")
    return window + subject.sinks


@check("rows of a batch, alone and together", "reasoning-from-scratch#33")
def _(trial: Trial) -> None:
    for rows in range(1, 6):
        ids = trial.ids(rows)
        expected = torch.cat([trial.subject.whole(row[None]) for row in ids])
        trial.pieces(ids, [ids.size(1) - 5, 4, 1], trial.new(), expected)


@check("texts that are padded on the left", "nnsight#673")
def _(trial: Trial) -> None:
    subject, ids, n_padded = trial.subject, trial.ids(), 5
    padding = torch.ones_like(ids)
    padding[0, :n_padded] = 0
    expected = subject.whole(ids)
    expected[0, n_padded:] = subject.whole(ids[:1, n_padded:])[0]
    cache, start = trial.new(), ids.size(1) - 6
    subject.read_padded(cache, ids[:, :start], padding[:, :start])
    for n in range(start, ids.size(1)):
        got = subject.read_padded(cache, ids[:, n : n + 1], padding[:, : n + 1])
        trial.compare(got, expected[:, n : n + 1], n)


@check("a neighbour of NaN", "pytorch#103963, pytorch#101967")
def _(trial: Trial) -> None:
    ids = trial.ids()
    expected = trial.subject.whole(ids)
    factor = torch.tensor([1.0, math.nan])[:, None, None].to(ids.device)
    with embedding_times(trial, factor):
        cache = trial.new()
        for start in range(0, ids.size(1) - 7, 7):
            got = trial.read(cache, ids[:, : start + 7], start)
            trial.compare(got[:1], expected[:1, start : start + 7], start)


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
    except Exception:
        trial.text = None  # a cache that refused here can't go on without the factor
        raise
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
    """Read what stands in text from start on, in a pass that fails as it comes to the model's last module, or to one in
    the middle. Raises WrongError if it comes to its end."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: order.append(module))
        for module in trial.subject.model.modules()
        if not [*module.children()] and [*module.parameters()]
    ]
    trial.subject.whole(text[:, :2])
    for hook in hooks:
        hook.remove()
    if not order:
        raise NotOffered("there is no model whose pass could be made to fail")

    def fail(*_: object) -> None:
        raise error

    hook = order[-1 if at_end else len(order) // 2].register_forward_pre_hook(fail)
    try:
        trial.read(cache, text, start)
    except error:
        trial.steps[-1] = f"a pass of {text.size(1) - start} that fails"
        return
    finally:
        hook.remove()
    raise WrongError("a pass whose last module raised an error came to its end")


def go_on_after_failure(trial: Trial, at_end: bool, error: type = Interrupted) -> None:
    """Other tokens are read by passes that fail: a piece and a single token, early and late in a text."""
    ids = trial.ids()
    for n, size, sizes in itertools.product(
        (0, 4, ids.size(1) - 8), (1, 4), ([1, 5, 2], [5, 1, 2])
    ):
        cache = trial.filled(ids[:, :n])
        fail_pass(trial, cache, trial.other(ids[:, : n + size], n), n, at_end, error)
        trial.pieces(ids[:, : n + 8], sizes, cache)


for name, options in (
    ("a pass that fails in the middle, then goes on", {"at_end": False}),
    ("a pass that fails at its end, then goes on", {"at_end": True}),
    ("a pass that Ctrl-C ends, then goes on", {"at_end": True, "error": KeyboardInterrupt}),
):
    fails = functools.partial(go_on_after_failure, **options)
    check(name, "llamadart#601, drama_llama#52", FEW)(fails)


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
            fail_pass(trial, cache, trial.other(ids[:, : n + size], n), n)
            held = trial.cut(cache, ids[:, :n], n - 2)
            trial.pieces(torch.cat([held, ids[:, n : n + 8]], dim=1), [1, 4, 3], cache)


@check("a failed pass isn't counted", "TrenTorch#192", FEW)
def _(trial: Trial) -> None:
    ids = trial.ids()
    cache = trial.filled(ids[:, :6])
    for size in (1, 3):
        fail_pass(trial, cache, ids[:, : 6 + size], 6)
        check_count(trial, cache, 6, "half a pass")


def cut_and_go_on(
    trial: Trial, n: int, kept: int, sizes: list[int], rows: int = 2, draft: int = 0
) -> None:
    """Read n tokens, in two pieces if some are a draft, cut back to some, and go on with others."""
    ids = trial.ids(rows, n + sum(sizes))
    read = trial.other(ids[:, :n], kept)
    cache = trial.filled(read[:, : n - draft])
    if draft:
        trial.read(cache, read, n - draft)
    held = trial.cut(cache, read, kept)
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
        cut_and_go_on(trial, n, n - 1, [1])


@check("a draft of which two tokens stay", "transformers#47912, mlx-lm#1109")
def _(trial: Trial) -> None:
    n = max(1, min(3, (trial.subject.window or 7) - 4))
    cut_and_go_on(trial, n + 4, n + 2, [1, 4, 9 - n], rows=1, draft=4)


@check("a copy and its original go on", "exllamav2#226, physical-ai-studio#239")
def _(trial: Trial) -> None:
    """At every length: the copy reads other tokens, and both in turn."""
    text = trial.ids(1)
    for n in range(1, text.size(1) - 6):
        ids = text[:, : n + 6]
        cache = trial.filled(ids[:, :n])
        trial.steps.append("copy")
        both = [(cache, ids), (trial.subject.clone(cache), trial.other(ids, n))]
        read_in_turn(trial, both, [n, n + 1, n + 5, n + 6])


@check("two texts in turn", "LMCache#4385, vllm#30931")
def _(trial: Trial) -> None:
    both = [(trial.new(), trial.ids(1, seed=seed)) for seed in (3, 4)]
    read_in_turn(trial, both, [0, 2, 3, 10, 11, 16])


def read_in_turn(trial: Trial, both: list[tuple[Any, Tensor]], ends: list[int]) -> None:
    """Have caches read the pieces of their texts that end there, one piece of each at a time."""
    expected = [trial.subject.whole(text) for _, text in both]
    for start, end in itertools.pairwise(ends):
        for (cache, text), whole in zip(both, expected, strict=True):
            trial.step(cache, text, start, end, whole)


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
    got = tried(trial.read, cache, ids, n)
    expected = tried(trial.subject.whole, ids)
    if isinstance(got, Exception):
        if not is_refusal(got) and not isinstance(expected, type(got)):
            raise got
        if n < trial.subject.context:
            trial.pieces(ids[:, : trial.subject.context], [3, 1], cache)
    elif isinstance(expected, Exception):
        raise WrongError(f"token {n}: it is read, must be refused, as it is without a cache")
    else:
        trial.compare(got, expected[:, n:], n)


def tried(read: Callable[..., Tensor], *args: Any) -> Tensor | Exception:
    """Return the logits, or the error instead."""
    try:
        return read(*args)
    except Exception as error:
        return error


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
    check_count(trial, cache, 0, "reset")
    for size in (1, 6, 1, 9, 2):
        trial.read(cache, ids[:, : n + size], n)
        n += size
        check_count(trial, cache, n, "count")
        if hasattr(cache, "positions") and (position := int(cache.positions(1).max())) != n:
            says = f"the next token's position is {position}, must be {n} ({trial.history()})"
            raise WrongError(says, cause="positions: restart")
    with may_refuse():
        for kept in (15, 14, 4):
            n = trial.cut(cache, ids[:, :n], kept).size(1)
            check_count(trial, cache, n, "cut")


def check_count(trial: Trial, cache: Any, n: int, cause: str) -> None:
    """Raise WrongError if the count isn't n."""
    if (counted := trial.subject.length(cache)) != n:
        hint = "; is commit() called?" if counted == 0 else ""
        says = f"the count is {counted}, must be {n} ({trial.history()}){hint}"
        raise WrongError(says, cause=cause)


@check("bytes are those of key-value heads", "SnapKV#16")
def _(trial: Trial) -> None:
    """In any dtype. A cache may take slots for its window or its context, or as many again as it needs."""
    subject = trial.subject
    ids = trial.ids(1, LONG_TEXT)
    n = ids.size(1)
    room = min(subject.context, LONGEST_CONTEXT)
    if subject.capacity < math.inf:
        room = subject.capacity
    slots = max(1 << n.bit_length(), room + 1)
    if subject.window is not None:
        slots = 2 * (subject.window + subject.sinks) + 32
    for dtype in (None, torch.bfloat16, torch.float16):
        each = subject if dtype is None else subject.as_dtype(dtype)
        nbytes, token = each.nbytes(Trial(each).filled(ids)), each.token_bytes()
        if isinstance(each.model, SmallModel) and not each.approximate:
            least = token * min(n, (each.window or n) + each.sinks)
            if nbytes < least:
                raise WrongError(f"{n} tokens take {least:,} bytes or more, and it says {nbytes:,}")
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
    with may_refuse():
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
    trial.subject = half
    trial.tolerance = 1.5 * float((rounding - exact).abs().max() / exact.abs().max()) + 0.01
    trial.pieces(ids, [9, 1, 7, ids.size(1) - 17], trial.new(), exact)


@check("weights change while a text is cached", "vllm#9744, lmdeploy#4917")
def _(trial: Trial) -> str:
    """No cache can know; the difference says what it costs."""
    subject, ids = trial.subject, trial.ids()
    parameters = [*subject.model.parameters()]
    if not parameters:
        raise NotOffered("there is no model with weights")
    cache, kept = trial.filled(ids[:, :-1]), [parameter.clone() for parameter in parameters]
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
    "mask: future": "a token sees later ones, or slots that nothing was written to: look at the mask",
    "mask: new only": "right token by token and wrong in pieces: look at what a piece behind cached tokens sees of them",
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
    "bounds": "past the end a write is lost, wraps, or ends in an error that isn't meant for users",
    "pages": "wrong only where a page or a buffer is full",
    "numbers": "keys and values are stored in another precision than the model computes in",
    "bytes": "more memory than the tokens need, or than it says",
}
ASK_WINDOW = "does it forget tokens? give --window"


class Diagnosis(NamedTuple):
    """What explains most of what is bad. cause: of CAUSES, or ""; shown_by: the check of the smallest input;
    consequences: other checks that may be bad because of it."""

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
    others = [each.check for each in bad.values() if follows(each, bad[name], cause)]
    return Diagnosis(cause, says, name, bad[name].kind, others)


def follows(finding: Finding, shown: Finding, cause: str) -> bool:
    """Return whether a finding can have the cause that another has shown: it says the same, its check is for that cause,
    or logits are wrong and texts as such are read wrong."""
    if finding.check == shown.check:
        return False
    same = finding.says.partition(" (")[0] == shown.says.partition(" (")[0]
    wrong_texts = shown.check not in ALONE and finding.difference and shown.difference
    return bool(same or wrong_texts or ALONE.get(finding.check) == cause)


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
ALONE = {  # causes of what is wrong in caches that read right, by check
    "rows of a batch, alone and together": "rows",
    "a neighbour of NaN": "rows",
    "a new text after another": "reset",
    "two texts in turn": "sharing",
    "a copy and its original go on": "sharing",
    "a text is cut back anywhere, then goes on": "cut",
    "another ending of the same text": "cut",
    "the whole prompt is cached": "cut",
    "a draft of which two tokens stay": "cut",
    "texts that are padded on the left": "positions: rows",
    **{each.name: "half a pass" for each in CHECKS if each.group},
    "past the context": "bounds",
    "another number of rows": "rows",
    "bfloat16 beside float32": "numbers",
    "bytes are those of key-value heads": "bytes",
    "bytes are the memory that is held": "bytes",
}


def cause_of(bad: dict[str, Finding], verdicts: dict[str, str]) -> tuple[str, str]:
    """Return the likeliest cause, and the check that shows it, by the pattern of what is bad and what is right."""
    reading = [name for name in (*BASIC, LONGER, WINDOW, *LONG) if name in bad]
    counted = bad[COUNT].cause if COUNT in bad else ""
    if counted and (reading or counted != "positions: restart"):  # asking may have moved them
        return counted, COUNT
    if not reading:
        for name, cause in ALONE.items():
            if name in bad:
                return cause, name
        return "", next(iter(bad))
    name = reading[0]
    difference = bad[name].difference
    if difference is None or math.isnan(difference.got):
        return "", name
    if name not in LONG and difference.largest < ROUNDING:
        return "numbers", name
    causes = [bad[each].cause for each in reading if bad[each].cause]
    cause = causes[0] if causes else ""
    if name in LONG:
        if cause in ("rotation", "mask: loses tokens", "reset"):
            return cause, name
        refused = "past the context" not in bad or bad["past the context"].difference
        return "pages" if refused else "bounds", name
    pieces_only = name in (SECOND, ANY) and ONE_BY_ONE not in bad
    if pieces_only and cause in ("", "mask: loses tokens", "rotation", "pages"):
        return "mask: new only", name
    if cause:
        return cause, name
    if name == PROMPT and difference.token == 0:
        return "mask: future", name
    if name in (LONGER, WINDOW):
        return "window: order", name
    if pieces_only:
        return "mask: new only", name
    first = bad[ONE_BY_ONE].difference if ONE_BY_ONE in bad else None
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


LIMITS = ("window", "sinks", "capacity", "approximate")


def load_subject(options: argparse.Namespace) -> Subject:
    """Return what a command line hands over. Raises ValueError, in a sentence, if that can't be examined."""
    of_transformers = options.model or options.family
    given = definitions(Path(options.file)) if options.file else {}
    if options.model and options.family:
        raise ValueError("give --model or --family, not both")
    if of_transformers and given and "make" not in given:
        raise ValueError(f"{options.file} has no make(model), which --model and --family need")
    if "subject" in given or not (given or of_transformers):
        limited = [f"--{name}" for name in LIMITS if getattr(options, name)]
        if limited:
            whose = "a `subject` says itself" if given else "the cache in this file doesn't have"
            raise ValueError(f"{', '.join(limited)}: that is what {whose}")
        return GivenSubject(given["subject"]) if given else Subject(small_model())
    if "make" in given or not given:
        if options.capacity:
            raise ValueError("--capacity is for a class Cache: the model's context counts here")
        model, make = transformers_model(options), given.get("make", dynamic)
        sinks = options.sinks or 0
        return TransformersSubject(model, make, options.window, sinks, options.approximate)
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
    try:
        return runpy.run_path(str(path), run_name=f"examined_{path.stem}")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} can't be run: {in_words(error)}") from error


def transformers_model(options: argparse.Namespace) -> Any:
    """Return the model of transformers that is named, or a small random one."""
    if options.model is None:
        return family_model(options.family or "llama")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()


def protocol_subject(model: nn.Module, new_cache: Callable, options: argparse.Namespace) -> Subject:
    """Return a model with a cache of our protocol, whose window, sinks and capacity are options, or its attributes.
    Raises ValueError if it can't be made, or lacks a method."""
    limits = LIMITS[:3]
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


def report(findings: Iterator[Finding], as_json: bool = False, in_full: bool = False) -> int:
    """Print findings as they come, then the diagnosis, and what is bad in words. Return the exit status. Raises
    ValueError if everything is refused."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(f"{finding.verdict:11}  {finding.check}", flush=True)
    diagnosis = diagnose(found)
    if as_json:
        record = {"diagnosis": diagnosis and diagnosis._asdict(), "findings": []}
        for finding in found:
            place = finding.difference and finding.difference[:3]  # row, token, logit
            record["findings"].append(finding._asdict() | {"difference": place})
        print(json.dumps(record, indent=2))
    else:
        print_summary(found, diagnosis, in_full)
    verdicts = {finding.verdict for finding in found}
    if not {"right", "measured", *BAD} & verdicts:
        refused = [finding.says for finding in found if finding.verdict == "REFUSES"]
        raise ValueError(f"nothing to examine: {(refused or [found[0].says])[0]}")
    return int(diagnosis is not None)


def print_summary(findings: list[Finding], diagnosis: Diagnosis | None, in_full: bool) -> None:
    """Print the diagnosis, and what was found beside right answers: what may follow from the diagnosis by name only."""
    folded: list[str] = []
    if diagnosis:
        print(f"\nDiagnosis: {diagnosis.says}")
        if diagnosis.kind:
            print(f"Public bugs that this check is for: {diagnosis.kind}")
        if diagnosis.consequences and not in_full:
            folded = diagnosis.consequences
            print(f"{len(folded)} more may follow from it (--all): {'; '.join(folded)}")
    print()
    verdicts = [finding.verdict for finding in findings]
    for verdict in VERDICTS[1:]:
        for finding in findings:
            if finding.verdict == verdict and finding.check not in folded:
                print(f"{verdict:11}  {finding.check}: {finding.says}")
    print("\n" + ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS))


def at_least(least: int, kind: Callable) -> Callable:
    """Return a type of argparse: a number that isn't smaller."""

    def number(text: str) -> Any:
        if not kind(text) >= least:
            raise argparse.ArgumentTypeError(f"{text}, must be at least {least}")
        return kind(text)

    return number


def arguments() -> argparse.ArgumentParser:
    what, _, how = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE.py", help="whose cache is examined")
    add("--model", metavar="NAME", help="a model of transformers, by name or folder")
    families = f"a small random model of transformers: {', '.join(FAMILIES)}"
    add("--family", choices=FAMILIES, metavar="NAME", help=families)
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
    add("--all", action="store_true", help="print what follows from the diagnosis in full, too")
    add("--json", action="store_true", help="print findings as JSON")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = arguments()
    options = parser.parse_args(argv)
    try:
        status = report(findings_of(options), options.json, options.all)
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
