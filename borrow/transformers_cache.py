"""Any cache here as `past_key_values` of a model of transformers, in its own generate().

A layer of ours stores keys and values by append(), and marks the keys that it returns with the mask that belongs to
them; an attention function in front of the model's own finds it there. In a layer with a window, tokens outside of it
are masked if the cache holds them; the caches of layered_cache() hold no more than the window needs.

Shapes: B batch, T tokens fed, S tokens attended to, H heads, D head size.

Source: transformers.cache_utils (CacheLayerMixin) and transformers.AttentionInterface, version 5.24.
"""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache
from hybrid_kv_cache import LayeredCache

PREFIX = "cached_"  # before the name of the attention that a model has
AROUND = "its attention goes around transformers' interface, where ours takes its place"
PROTOCOL = ("positions", "append", "commit", "truncate", "layers")


class Appended(NamedTuple):
    """What belongs to the keys that a layer of ours returns: the layer, and the mask (T, S) or None."""

    layer: "Layer"
    mask: Tensor | None


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    usual: Callable[..., Any],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to keys of ours with the mask that belongs to them; to all others as the model does (usual)."""
    appended = getattr(k, "appended", None)
    if appended is None:
        return usual(module, q, k, v, attention_mask, scaling=scaling, **options)
    refuse_options(options)
    layer, mask = appended
    cache, T = layer.owner, q.size(2)
    n_read = len(cache.ours) + T
    if attention_mask is None and n_read > layer.window:
        attention_mask = causal_mask(T, n_read, layer.window, q.device)[None, None]
    if attention_mask is not None:
        shape = (*q.shape[:3], n_read)
        mask = joint_mask(attention_mask, mask, k.size(2), shape, layer.window)
    causal = mask is None and T > 1
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    cache.n_attended = max(cache.n_attended, layer.index + 1)  # keys may be shared by layers
    return y.transpose(1, 2).contiguous(), None


def cache_layers(config: Any) -> list[CacheLayerMixin]:
    """Return transformers' own cache of each layer: a DynamicLayer if it attends to the whole context. Raises ValueError
    if one attends neither to all nor to a window, or keys change with what follows."""
    for changing in ("longrope", "dynamic"):
        if changing in str(getattr(config, "rope_parameters", None)):
            raise ValueError(f"rope_type {changing} can't be served: keys depend on what follows")
    layers = DynamicCache(config=config).layers
    context = getattr(config, "max_position_embeddings", math.inf)
    for i, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window >= context:
                layers[i] = DynamicLayer()
        elif type(layer) not in (DynamicLayer, DummyLayer):
            kind = type(layer).__name__
            raise ValueError(f"a {kind} can't be served: it attends neither to all nor to a window")
    return layers


def layered_cache(
    model: PreTrainedModel, new_cache: Callable[[], KVCache] = KVCache
) -> LayeredCache:
    """Return an empty cache for a model of transformers: its window in each layer that has one, and new_cache() in each
    other one. Raises ValueError if a layer attends to chunks of the text, or as cache_layers() does."""
    config, caches = model.config.get_text_config(decoder=True), []
    for layer in cache_layers(config):
        if type(layer) is DynamicLayer:
            caches.append(new_cache())
        elif type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window == getattr(config, "attention_chunk_size", None):
                raise ValueError(
                    f"its layers attend to chunks of {layer.sliding_window} tokens, which no window serves"
                )
            caches.append(SlidingWindowCache(layer.sliding_window))
    return LayeredCache(caches)


def layer_caches(cache: KVCache) -> list[KVCache]:
    """Return the caches of single layers that a cache consists of, none if it serves all layers itself."""
    return [layer for layer in cache.layers if hasattr(layer, "layers")]


def refuse_options(options: dict[str, Any]) -> None:
    """Raise ValueError if attention has an option that ours doesn't have."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"its attention has {name}, which changes scores and isn't supported")


def refuse_sizes(k: Tensor, v: Tensor) -> None:
    """Raise ValueError if keys and values differ in size."""
    if k.size(3) != v.size(3):
        raise ValueError(
            f"keys have {k.size(3)} numbers and values {v.size(3)}: they must be alike"
        )


def causal_mask(T: int, n_read: int, window: int, device: torch.device) -> Tensor:
    """Return which of all tokens read the last T see (T, n_read): the last `window` up to themselves."""
    seen = torch.ones(T, n_read, dtype=torch.bool, device=device).tril(n_read - T)
    return seen.triu(n_read - T - window + 1)


def joint_mask(
    given: Tensor, ours: Tensor | None, S: int, shape: tuple[int, int, int, int], window: int
) -> Tensor | None:
    """Return a model's own mask as it is given, less what our cache hides; if it is plain, and our cache shows no more
    tokens than the layer's window, our cache's alone. Plain is causal within the window.

    given: bool, or numbers to add to scores. shape: B, H, T, and all tokens read, of which our cache holds S. Raises
    ValueError if the mask has another shape or dtype, or if the cache has forgotten tokens, and the mask isn't plain or
    the cache shows more than the window.
    """
    fits = given.dim() == 4 and all(n in (1, m) for n, m in zip(given.shape, shape, strict=True))
    if not fits or not (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(
            f"a mask of {given.dtype} {tuple(given.shape)} isn't bool or floating of shape {shape}"
        )
    T, n_read = shape[2:]
    causal = causal_mask(T, n_read, window, given.device)
    visible, hidden = given, ~causal
    if given.dtype != torch.bool:
        visible, hidden = given == 0, given <= torch.finfo(given.dtype).min
    plain = (visible == causal).all() and (hidden == ~causal).all()
    shown = S if ours is None else int(ours.sum(dim=-1).max())
    if plain and shown <= window:
        return ours
    if n_read > S and plain:
        raise ValueError(
            f"the cache shows {shown} tokens in a layer with a window of {window}: give layered_cache(model, new_cache)"
        )
    if n_read > S:
        raise ValueError(
            f"the cache holds {S} of {n_read} tokens: rows that are padded on the left forget different tokens, and "
            "a mask of one's own needs all: give texts of one length, without a mask"
        )
    if ours is None:
        return given
    forgotten = causal & ~ours
    if given.dtype == torch.bool:
        return given & ~forgotten
    return given.masked_fill(forgotten, -math.inf)


def register(attention: Callable[..., Any], prefix: str, model: PreTrainedModel) -> str:
    """Make a function known to transformers that stands in front of a model's attention; return the name it gets."""
    config = model.config.get_text_config(decoder=True)
    prefix += f"{type(model).__name__}_"
    if prefix in config._attn_implementation:  # it is there already, perhaps behind another one
        return config._attn_implementation
    usual = config._attn_implementation
    if usual not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"{type(model).__name__} can't be served: attention {usual!r} has no masks"
        )
    eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    function = partial(attention, usual=AttentionInterface().get(usual, eager))
    AttentionInterface.register(prefix + usual, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(prefix + usual, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    return prefix + usual


@torch.no_grad()
def check_and_install(model: PreTrainedModel) -> None:
    """Put attend() in front of a model's attention. Raises ValueError, and leaves the model as it was, if logits differ
    with it."""
    config = model.config.get_text_config(decoder=True)
    name, before = register(attend, PREFIX, model), config._attn_implementation
    ids = torch.arange(6, device=model.device)[None] % config.vocab_size
    hooks, training = [], [m for m in model.modules() if m.training]
    model.eval()
    try:
        expected = model(ids, use_cache=False).logits.float()
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise ValueError(AROUND)
        if not has_hooks(model):
            hooks.append(model.register_forward_hook(end_pass, with_kwargs=True))
            hooks.append(model.register_forward_pre_hook(begin_pass, with_kwargs=True))
        cache = TransformersCache(KVCache(), model)
        parts = [model(part, **{argument_of(model): cache}).logits for part in ids.split(4, dim=1)]
        difference = float((torch.cat(parts, dim=1) - expected).norm() / expected.norm())
        allowed = torch.finfo(model.dtype).eps ** 0.5
        if not difference <= allowed:
            raise ValueError(
                f"logits differ by {difference:.2g} of their norm, allowed {allowed:.2g}"
            )
    except BaseException as error:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(model).__name__} can't be served: {reason:.150}") from error
    finally:
        for module in training:
            module.training = True


def has_hooks(model: nn.Module) -> bool:
    return begin_pass in model._forward_pre_hooks.values()


def caches_among(args: tuple[Any, ...], options: dict[str, Any]) -> list["TransformersCache"]:
    return [x for x in (*args, *options.values()) if isinstance(x, TransformersCache)]


def begin_pass(model: nn.Module, args: Any, options: dict[str, Any]) -> None:
    """Forget a pass that didn't come to its end, by an error or Ctrl-C."""
    for cache in caches_among(args, options):
        cache.begin_pass(model)


def end_pass(model: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
    """Commit what a pass has read."""
    for cache in caches_among(args, options):
        cache.end_pass()


def argument_of(model: PreTrainedModel) -> str:
    """Return the name by which a model takes a cache: transformers 6 has only "cache"."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


class Layer(CacheLayerMixin):
    """A layer in a cache of ours. To transformers it holds all tokens, so that masks are made for all."""

    is_sliding, is_croppable = False, True

    def __init__(self, owner: "TransformersCache", index: int, window: int) -> None:
        super().__init__()
        self.owner, self.index, self.window, self.is_initialized = owner, index, window, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.owner.append(self, key_states, value_states)

    def get_seq_length(self) -> int:
        return len(self.owner.ours)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.owner.ours) + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TransformersCache(Cache):
    """A cache of ours, such as KVCache(), QuantizedCache(4) or layered_cache(model), for one text or batch of a model of
    transformers.

    The tokens of a pass count once the model has returned: one that fails changes nothing. A model's attention is
    replaced at its first cache, after a pass of 6 tokens has shown that logits stay what they were; with other caches
    it goes on as before. Raises ValueError if the model or the cache can't be served.
    """

    def __init__(self, cache: Any, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is no decoder of transformers")
        if isinstance(cache, type) or any(not hasattr(cache, name) for name in PROTOCOL):
            raise ValueError(f"{cache!r:.60} is no cache: give an instance, such as KVCache()")
        config = model.config.get_text_config(decoder=True)
        layers, self.n_layers = cache_layers(config), 0
        for i, layer in enumerate(layers):
            if type(layer) is not DummyLayer:
                window = getattr(layer, "sliding_window", sys.maxsize)  # none: all tokens
                layers[i] = Layer(self, self.n_layers, window)
                self.n_layers += 1
        if len(layer_caches(cache)) not in (0, self.n_layers):
            raise ValueError(
                f"a cache of {len(cache.layers)} layers can't serve {self.n_layers}: give layered_cache(model)"
            )
        super().__init__(layers)
        self.model, self.ours, self.pos = model, cache, torch.empty(0)
        # Of our layers, in a pass that has begun. None: each pass has come to its end.
        self.n_attended: int | None = None
        attention = config._attn_implementation
        if not (PREFIX in attention and has_hooks(model)):
            check_and_install(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TransformersCache":
        """Return a copy for the same model."""
        other = memo[id(self)] = copy.copy(self)
        memo[id(self.model)], memo[id(self.ours)] = self.model, self.ours.clone()
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def begin_pass(self, model: nn.Module) -> None:
        if model is not self.model:
            raise ValueError("this cache was made for another model: make one for each")
        self.n_attended = 0

    def append(self, layer: Layer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H, S, D) of our layer, new ones (B, H, T, D) included. Raises ValueError if the
        pass would not be committed, or the keys before went to another attention than ours."""
        if self.n_attended is None:
            raise ValueError(
                "what it reads would not be committed: call the model itself that the cache was made for"
            )
        self.check_attention(layer.index)
        refuse_sizes(k, v)
        if layer.index == 0:
            self.pos = self.ours.positions(k.size(2)).to(k.device)
        k, v, mask = self.ours.append(layer.index, k, v, self.pos)
        k = k.view_as(k)  # an object of its own
        k.appended = Appended(layer, mask)
        return k, v

    def check_attention(self, n_expected: int) -> None:
        """Raise ValueError if not all of our layers so far have attended."""
        if self.n_attended != n_expected:
            raise ValueError(
                f"{self.n_attended} layers have attended to keys of ours, and {n_expected} must have: {AROUND}, or was changed"
            )

    def end_pass(self) -> None:
        """Count the tokens of a pass as read."""
        if self.n_attended is not None:
            self.check_attention(self.n_layers)
            self.ours.commit(self.pos)
            self.n_attended = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens. Raises ValueError if the cache has fewer, or has evicted some."""
        self.ours.truncate(len(self.ours) + tokens_to_remove)

    def reset(self) -> None:
        self.ours.truncate(0)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all layers. Raises ValueError if they aren't tensors (2, B, H, S, D)."""
        caches = layer_caches(self.ours) or [self.ours]
        for cache in caches:
            if not all(isinstance(kv, Tensor) and kv.dim() == 5 for kv in cache.layers):
                kind = type(cache).__name__
                raise ValueError(
                    f"beam search reorders rows, which {kind} can't: its layers are packed"
                )
        for cache in caches:
            cache.layers = [change(kv) for kv in cache.layers]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change_rows(lambda kv: kv[:, indices])

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_rows(lambda kv: kv.repeat_interleave(repeats, dim=1))
