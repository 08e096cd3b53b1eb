"""Any cache here as `past_key_values` of a model of transformers, in its own generate().

A layer of ours stores keys and values by append(), and marks the keys that it returns with the mask that belongs to
them; an attention function in front of the model's own finds it there. Layers with a window keep transformers' caches.

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

from gpt_kv_cache import KVCache

PREFIX = "cached_"  # before the name of the attention that a model has
AROUND = "its attention goes around transformers' interface, where ours takes its place"
PROTOCOL = ("positions", "append", "commit", "truncate", "layers")


class Appended(NamedTuple):
    """What belongs to the keys that a layer of ours returns: its cache, its number, and the mask (T, S) or None."""

    cache: "TransformersCache"
    layer: int
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
    mask = appended.mask
    if attention_mask is not None:
        n_read = len(appended.cache.ours) + q.size(2)
        mask = joint_mask(attention_mask, mask, k.size(2), (*q.shape[:3], n_read))
    causal = mask is None and q.size(2) > 1
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    appended.cache.n_attended = max(appended.cache.n_attended, appended.layer + 1)  # may be shared
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


def joint_mask(
    given: Tensor, ours: Tensor | None, S: int, shape: tuple[int, int, int, int]
) -> Tensor | None:
    """Return a model's own mask as it is given, less what our cache hides; if it is plain causal, our cache's alone.

    given: bool, or numbers to add to scores. shape: B, H, T, and all tokens read, of which our cache holds S. Raises
    ValueError if the mask has another shape or dtype, or isn't plain causal while the cache has forgotten tokens.
    """
    fits = given.dim() == 4 and all(n in (1, m) for n, m in zip(given.shape, shape, strict=True))
    if not fits or not (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(
            f"a mask of {given.dtype} {tuple(given.shape)} isn't bool or floating of shape {shape}"
        )
    T, n_read = shape[2:]
    causal = torch.ones(T, n_read, dtype=torch.bool, device=given.device).tril(n_read - T)
    visible, hidden = given, ~causal
    if given.dtype != torch.bool:
        visible, hidden = given == 0, given <= torch.finfo(given.dtype).min
    if (visible == causal).all() and (hidden == ~causal).all():
        return ours
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
    """A layer that attends to everything, in a cache of ours."""

    is_sliding, is_croppable = False, True

    def __init__(self, owner: "TransformersCache", index: int) -> None:
        super().__init__()
        self.owner, self.index, self.is_initialized = owner, index, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.owner.append(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return len(self.owner.ours)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.owner.ours) + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TransformersCache(Cache):
    """A cache of ours, such as KVCache() or QuantizedCache(4), for one text or batch of a model of transformers.

    The tokens of a pass count once the model has returned: one that fails changes nothing, in layers of ours. If other
    layers are transformers', the next pass is refused. A model's attention is replaced at its first cache, after a
    pass of 6 tokens has shown that logits stay what they were; with other caches it goes on as before. Raises
    ValueError if the model or the cache can't be served.
    """

    def __init__(self, cache: Any, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is no decoder of transformers")
        if isinstance(cache, type) or any(not hasattr(cache, name) for name in PROTOCOL):
            raise ValueError(f"{cache!r:.60} is no cache: give an instance, such as KVCache()")
        config = model.config.get_text_config(decoder=True)
        layers, self.n_layers = cache_layers(config), 0
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[i] = Layer(self, self.n_layers)
                self.n_layers += 1
        if self.n_layers == 0:
            raise ValueError(
                f"all {len(layers)} layers have a window below the context: no layer is left for a cache of ours"
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
        self.refuse_after_failure()
        self.n_attended = 0

    def refuse_after_failure(self) -> None:
        """Raise ValueError if a pass or a change has failed that layers of transformers' took part in."""
        if self.n_attended is not None and self.n_layers < len(self.layers):
            raise ValueError(
                "what failed before has left a part in the layers with a window: reset() it, or make a new cache"
            )

    def append(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H, S, D) of our layer `index`, new ones (B, H, T, D) included. Raises
        ValueError if the pass would not be committed, or the keys before went to another attention than ours."""
        if self.n_attended is None:
            raise ValueError(
                "what it reads would not be committed: call the model itself that the cache was made for"
            )
        self.check_attention(index)
        refuse_sizes(k, v)
        if index == 0:
            self.pos = self.ours.positions(k.size(2)).to(k.device)
        k, v, mask = self.ours.append(index, k, v, self.pos)
        k = k.view_as(k)  # an object of its own
        k.appended = Appended(self, index, mask)
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

    def change(self, name: str, *args: Any) -> None:
        """Call a method of the layers that are transformers'. Until ours have followed, the next pass is refused."""
        self.n_attended = 0
        for layer in self.layers:
            if not isinstance(layer, Layer):
                getattr(layer, name)(*args)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens. Raises ValueError if the cache has fewer, or has evicted some."""
        self.refuse_after_failure()
        self.change("crop", tokens_to_remove)
        self.ours.truncate(len(self.ours) + tokens_to_remove)
        self.n_attended = None

    def reset(self) -> None:
        self.change("reset")
        self.ours.truncate(0)
        self.n_attended = None

    def change_rows(self, name: str, given: Any, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all layers. Raises ValueError if those of ours aren't tensors (2, B, H, S, D)."""
        self.refuse_after_failure()
        layers = self.ours.layers
        if not all(isinstance(kv, Tensor) and kv.dim() == 5 for kv in layers):
            kind = type(self.ours).__name__
            raise ValueError(
                f"beam search reorders rows, which {kind} can't: its layers are packed"
            )
        self.change(name, given)
        self.ours.layers = [change(kv) for kv in layers]
        self.n_attended = None

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change_rows("batch_select_indices", indices, lambda kv: kv[:, indices])

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_rows(
            "batch_repeat_interleave", repeats, lambda kv: kv.repeat_interleave(repeats, dim=1)
        )
