"""What examine.py examines: a model with a cache, of our protocol, of transformers, or of another repository.

Shapes: B batch, T tokens, V vocabulary.
"""

import copy
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import QuantizedCache, SmallNormCache
from gpt_bounded_cache import BCT, BCTConfig, PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache
from llama_kv_cache import Llama, LlamaConfig
from support.files import import_file

TINY = {"vocab_size": 61, "n_ctx": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
WINDOW, SINKS = 6, 2


class NotOffered(Exception):
    """The examined cache has no way to do this."""


class MaskOnly:
    """No cache: a pass over a whole text with an explicit mask of what a cache of `window` tokens and `sinks` shows."""

    layers: tuple = ()

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks

    def __len__(self) -> int:
        return 0

    def positions(self, T: int) -> Tensor:
        return torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        near = (pos > pos[:, None] - self.window) | (pos < self.sinks)  # (T, T)
        return k, v, (pos <= pos[:, None]) & near

    def commit(self, pos: Tensor) -> None:
        pass

    truncate = commit


class Subject:
    """A model with a cache of our protocol. Others are subclasses.

    window, sinks: what the cache shows of a text; None: all of it. exact: whether it has to compute what the model
    computes without a cache. capacity: tokens that the cache has room for.
    """

    def __init__(
        self,
        model: nn.Module,
        new_cache: Callable[[], Any] | None = None,
        window: int | None = None,
        sinks: int = 0,
        capacity: float = math.inf,
    ) -> None:
        self.model, self.window, self.sinks = model, window, sinks
        self.new_cache = new_cache or getattr(model, "new_cache", KVCache)
        self.vocab_size, self.context = model.config.vocab_size, min(model.context, capacity)

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
        raise NotOffered("rows are of one length")

    def length(self, cache: Any) -> int:
        return len(cache)

    def truncate(self, cache: Any, n: int) -> None:
        self.needs(cache, "truncate")
        try:
            cache.truncate(n)
        except ValueError as error:  # a refusal, as of what has been evicted
            raise NotOffered(str(error)) from error

    def clone(self, cache: Any) -> Any:
        self.needs(cache, "clone")
        return cache.clone()

    def needs(self, cache: Any, name: str) -> None:
        if not hasattr(cache, name):
            raise NotOffered(f"a {type(cache).__name__} has no {name}()")

    def nbytes(self, cache: Any) -> int:
        self.needs(cache, "nbytes")
        return cache.nbytes

    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values, in every layer of a growing cache."""
        c = self.model.config
        heads = getattr(c, "n_kv_head", None) or c.n_head
        return 2 * c.n_layer * heads * c.head_dim * next(self.model.parameters()).element_size()

    def as_dtype(self, dtype: torch.dtype) -> "Subject":
        """Return the same with weights of another dtype."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).to(dtype)
        return other


class TransformersSubject(Subject):
    """A model of transformers, with a cache that new_cache(model) makes."""

    def __init__(
        self, model: Any, new_cache: Callable[[Any], Any], window: int | None = None, sinks: int = 0
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model, self.make, self.window, self.sinks = model, new_cache, window, sinks
        self.vocab_size, self.context = config.vocab_size, config.max_position_embeddings

    def argument(self, cache: Any) -> dict[str, Any]:
        from borrow.transformers_cache import argument_of

        return {argument_of(self.model): cache}

    def whole(self, ids: Tensor) -> Tensor:
        if self.window is None:  # or the model's own, which its uncached pass knows
            return self.model(ids, use_cache=False).logits
        from borrow.transformers_cache import TransformersCache

        cache = TransformersCache(MaskOnly(self.window, self.sinks), self.model)
        return self.model(ids, **self.argument(cache)).logits

    def new(self) -> Any:
        cache = self.make(self.model)
        if hasattr(cache, "activate_past_recording"):  # without it, a window can't be cut back
            cache.activate_past_recording()
        return cache

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        return self.model(ids, **self.argument(cache)).logits

    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        if hasattr(cache, "ours") and self.window is not None:
            raise NotOffered(
                "rows of different lengths would forget different tokens: they are refused"
            )
        positions = (padding.cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
        options = {"attention_mask": padding, "position_ids": positions}
        return self.model(ids, **options, **self.argument(cache)).logits

    def length(self, cache: Any) -> int:
        return int(cache.get_seq_length())

    def truncate(self, cache: Any, n: int) -> None:
        for layer in cache.layers:
            if not getattr(layer, "is_croppable", hasattr(layer, "crop")):
                raise NotOffered(f"a {type(layer).__name__} has no crop()")
        try:
            cache.crop(n - self.length(cache))
        except ValueError as error:
            raise NotOffered(str(error)) from error

    def clone(self, cache: Any) -> Any:
        try:
            return copy.deepcopy(cache)
        except RuntimeError as error:
            raise NotOffered("copy.deepcopy() refuses what it holds") from error

    def nbytes(self, cache: Any) -> int:
        from borrow.transformers_table import held_bytes

        return cache.ours.nbytes if hasattr(cache, "ours") else held_bytes(cache.layers)

    def token_bytes(self) -> int:
        c = self.model.config.get_text_config(decoder=True)
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 2 * c.num_hidden_layers * heads * size * self.model.dtype.itemsize


class FromScratchSubject(Subject):
    """A model of the package llms-from-scratch, which counts positions in the model and holds keys in a KVCache."""

    def __init__(
        self, model: nn.Module, cache_class: type, config: dict[str, Any], takes_flag: bool
    ) -> None:
        self.model, self.cache_class, self.takes_flag = model, cache_class, takes_flag
        self.vocab_size, self.context = config["vocab_size"], config["context_length"]
        self.n_layer, self.window, self.sinks = config["n_layers"], None, 0

    def whole(self, ids: Tensor) -> Tensor:
        position, self.model.current_pos = self.model.current_pos, 0
        try:
            return self.model(ids)
        finally:
            self.model.current_pos = position

    def new(self) -> Any:
        # reset_kv_cache(), which each generation of the package begins with
        self.model.current_pos = 0
        return self.cache_class(n_layers=self.n_layer)

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        flag = {"use_cache": True} if self.takes_flag else {}
        return self.model(ids, cache=cache, **flag)

    def length(self, cache: Any) -> int:
        return self.model.current_pos

    def nbytes(self, cache: Any) -> int:
        raise NotOffered("a KVCache has no size")


def randomized(model: nn.Module) -> nn.Module:
    """Give a model random weights so large that attention is sharp, or mistakes would not show; return it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=draw)
    return model.eval()


def small_gpt() -> nn.Module:
    return randomized(GPT(GPTConfig(**TINY)))


def small_llama() -> nn.Module:
    return randomized(Llama(LlamaConfig(**TINY, n_inner=48, n_kv_head=2, rope_theta=100.0)))


def small_transformer(kind: str = "Llama", **changes: Any) -> Any:
    """Return a random model of transformers. kind: the beginning of its class's name."""
    import transformers

    config = {
        "vocab_size": 61,
        "max_position_embeddings": 64,
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
    return randomized(model_class(model_class.config_class(**config | changes)))


def dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def static(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=model.config.max_position_embeddings)


def quantized(model: Any) -> Any:
    from transformers.cache_utils import QuantizedCache as TheirQuantizedCache

    return TheirQuantizedCache("quanto", model.config, nbits=4, q_group_size=16, residual_length=16)


def ours_in(new_cache: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a cache of ours for a model of transformers."""

    def make(model: Any) -> Any:
        from borrow.transformers_cache import TransformersCache

        return TransformersCache(new_cache(), model)

    return make


TRANSFORMERS_CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": dynamic,
    "static": static,
    "quantized": quantized,
    "ours": ours_in(KVCache),
    "preallocated": ours_in(lambda: PreallocatedCache(64)),
}


def from_scratch(kind: str) -> Subject:
    """Return a model of llms-from-scratch with its cache. kind: gpt2 or qwen3."""
    module = importlib.import_module(f"llms_from_scratch.kv_cache.{kind}")
    cache_class = importlib.import_module("llms_from_scratch.kv_cache.utils").KVCache
    config = {"vocab_size": 61, "context_length": 64, "emb_dim": 32, "n_heads": 4, "n_layers": 2}
    config |= {"drop_rate": 0.0, "qkv_bias": False, "dtype": torch.float32, "hidden_dim": 48}
    config |= {"head_dim": 8, "qk_norm": True, "n_kv_groups": 2, "rope_base": 100.0}
    model = module.GPTModel(config) if kind == "gpt2" else module.Qwen3Model(config)
    return FromScratchSubject(randomized(model), cache_class, config, kind == "gpt2")


def subject_of_file(path: Path) -> Subject:
    """Return what a Python file offers: its `model`, of our protocol, or its class Cache, as exercises have it. Raises
    ValueError if it has neither."""
    module = import_file(path)
    model = getattr(module, "model", None)
    if isinstance(model, nn.Module):
        return Subject(model.eval())
    if isinstance(cache_class := getattr(module, "Cache", None), type):
        return Subject(small_gpt(), cache_class)
    raise ValueError(f"{path} has neither a `model` nor a class Cache")


# By name: what the page shows, and how it is made.
SUBJECTS: dict[str, tuple[str, Callable[[], Subject]]] = {
    "gpt": ("`gpt_kv_cache.py`, `KVCache`", lambda: Subject(small_gpt())),
    "llama": ("`llama_kv_cache.py`, `KVCache`", lambda: Subject(small_llama())),
    "preallocated": (
        "`PreallocatedCache(48)`",
        lambda: Subject(small_gpt(), lambda: PreallocatedCache(48), capacity=48),
    ),
    "window": (
        f"`SlidingWindowCache({WINDOW})`",
        lambda: Subject(small_gpt(), lambda: SlidingWindowCache(WINDOW), WINDOW),
    ),
    "sinks": (
        f"`SlidingWindowCache({WINDOW}, {SINKS})`",
        lambda: Subject(small_gpt(), lambda: SlidingWindowCache(WINDOW, SINKS), WINDOW, SINKS),
    ),
    "bct": (
        "`gpt_bounded_cache.py`, `BCT`",
        lambda: Subject(randomized(BCT(BCTConfig(**TINY, slots=4, recent=3)))),
    ),
    "unrounded": (
        "`QuantizedCache(32)`",
        lambda: Subject(small_gpt(), lambda: QuantizedCache(32, 8, 8)),
    ),
    "norms": (
        "`SmallNormCache(64)`, which keeps all",
        lambda: Subject(small_gpt(), lambda: SmallNormCache(64, 4)),
    ),
    "quantized": (
        "`QuantizedCache(4)`, approximate",
        lambda: Subject(small_gpt(), lambda: QuantizedCache(4, 8, 8)),
    ),
    "transformers-dynamic": (
        "transformers, `DynamicCache`",
        lambda: TransformersSubject(small_transformer(), dynamic),
    ),
    "transformers-static": (
        "transformers, `StaticCache`",
        lambda: TransformersSubject(small_transformer(), static),
    ),
    "transformers-sliding": (
        f"transformers, `DynamicCache`, a window of {WINDOW}",
        lambda: TransformersSubject(small_transformer("Mistral", sliding_window=WINDOW), dynamic),
    ),
    "transformers-quantized": (
        "transformers, `QuantizedCache`, quanto, 4 bits, approximate",
        lambda: TransformersSubject(small_transformer(), quantized),
    ),
    "transformers-ours": (
        "transformers with our `KVCache`",
        lambda: TransformersSubject(small_transformer(), ours_in(KVCache)),
    ),
    "transformers-ours-window": (
        f"transformers with our `SlidingWindowCache({WINDOW})`",
        lambda: TransformersSubject(
            small_transformer(), ours_in(lambda: SlidingWindowCache(WINDOW)), WINDOW
        ),
    ),
    "from-scratch-gpt2": (
        "LLMs-from-scratch, `kv_cache.gpt2` with `use_cache=True`",
        lambda: from_scratch("gpt2"),
    ),
    "from-scratch-qwen3": ("LLMs-from-scratch, `kv_cache.qwen3`", lambda: from_scratch("qwen3")),
}
