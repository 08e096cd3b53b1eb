"""Any cache here as `past_key_values` of a model of transformers, in its own generate().

A layer of ours stores keys and values by append(), and marks the keys that it returns with the mask that belongs to
them; an attention function in front of the model's own finds it there. Layers with a window keep transformers' caches.

Shapes: B batch, T tokens fed, S tokens attended to, H heads, D head size.

Source: transformers.cache_utils (CacheLayerMixin) and transformers.AttentionInterface, version 5.24.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpt_kv_cache import KVCache

PREFIX = "cached_"  # before the name of the attention that a model has
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
    """Attend to keys of ours with their own mask; to all others as the model does (usual)."""
    appended = getattr(k, "appended", None)
    if appended is None:
        return usual(module, q, k, v, attention_mask, scaling=scaling, **options)
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"its attention has {name}, which changes scores and isn't supported")
    mask = appended.mask
    if attention_mask is not None and attention_mask.dtype != torch.bool:  # eager attention's
        attention_mask = attention_mask == 0
    if attention_mask is not None and not attention_mask[:, :, -1].all():  # padding
        if attention_mask.size(-1) != k.size(2):
            raise ValueError(
                "rows that are padded on the left forget different tokens: give texts of one length"
            )
        mask = attention_mask if mask is None else attention_mask & mask
    causal = mask is None and q.size(2) > 1
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    appended.cache.attended(module, appended.layer)
    return y.transpose(1, 2).contiguous(), None


@torch.no_grad()
def check_and_install(model: PreTrainedModel) -> None:
    """Put attend() in front of a model's attention. Raises ValueError, and leaves the model as it was, if logits differ
    with it."""
    config = model.config.get_text_config(decoder=True)
    usual, training = config._attn_implementation, [m for m in model.modules() if m.training]
    eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    hooks = [
        model.register_forward_pre_hook(begin_pass, with_kwargs=True),
        model.register_forward_hook(end_pass, with_kwargs=True),
    ]
    name = f"{PREFIX}{config.model_type}_{usual}"
    AttentionInterface.register(name, partial(attend, usual=AttentionInterface().get(usual, eager)))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[usual])
    ids = torch.arange(6, device=model.device)[None] % config.vocab_size
    model.eval()
    try:
        expected = model(ids, use_cache=False).logits.float()
        model.set_attn_implementation(name)
        cache = TransformersCache(KVCache(), model)
        parts = [model(part, **{argument_of(model): cache}).logits for part in ids.split(4, dim=1)]
        difference = float((torch.cat(parts, dim=1) - expected).norm() / expected.norm())
        allowed = torch.finfo(model.dtype).eps ** 0.5
        if not difference <= allowed:
            raise ValueError(
                f"logits differ by {difference:.2g} of their norm, allowed {allowed:.2g}"
            )
    except Exception as error:
        model.set_attn_implementation(usual)
        for hook in hooks:
            hook.remove()
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(model).__name__} can't be served: {reason}") from error
    finally:
        for module in training:
            module.training = True


def caches_among(options: dict[str, Any]) -> list["TransformersCache"]:
    given = [options.get(name) for name in ("cache", "past_key_values")]
    return [cache for cache in given if isinstance(cache, TransformersCache)]


def begin_pass(model: nn.Module, args: Any, options: dict[str, Any]) -> None:
    """Forget a pass that didn't come to its end, by an error or Ctrl-C."""
    for cache in caches_among(options):
        cache.begun = True


def end_pass(model: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
    """Commit what a pass has read."""
    for cache in caches_among(options):
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

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """Forget the last -max_length tokens, or in older versions keep max_length of them. Raises ValueError if the
        cache has evicted some."""
        if self.owner.order[self.index] == 0:  # which speaks for all layers
            n = len(self.owner.ours)
            self.owner.ours.truncate(min(n, max_length) if max_length > 0 else n + max_length)

    def reset(self) -> None:
        self.owner.ours.truncate(0)

    def refuse(self, *_: Any) -> None:
        raise ValueError(
            "beam search and contrastive search reorder rows, which these caches can't"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = refuse


class TransformersCache(Cache):
    """A cache of ours, such as KVCache() or QuantizedCache(4), for one text or batch of a model of transformers.

    The tokens of a pass count once the model has returned: one that fails changes nothing, in layers of ours.
    A model's attention is replaced at its first cache, after a pass of 6 tokens has shown that logits stay what they
    were; with other caches it goes on as before. Raises ValueError if the model or the cache can't be served.
    """

    def __init__(self, cache: Any, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is no decoder of transformers")
        if isinstance(cache, type) or any(not hasattr(cache, name) for name in PROTOCOL):
            raise ValueError(f"{cache!r:.60} is no cache: give an instance, such as KVCache()")
        config = model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        whole = window is None or window >= config.max_position_embeddings
        kind = "full_attention" if whole else "sliding_attention"
        types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
        for other in {*types} - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"a layer of {other} can't be served: it attends neither to all nor to a window"
            )
        full = [i for i, kind in enumerate(types) if kind == "full_attention"]
        if not full:
            raise ValueError(
                f"all {len(types)} layers have a window of {window}, below the context of "
                f"{config.max_position_embeddings}: no layer is left for a cache of ours"
            )
        self.model, self.ours, self.pos = model, cache, torch.empty(0)
        self.order = {layer: i for i, layer in enumerate(full)}  # of the model: of our cache
        self.modules = [
            m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)
        ]
        self.last_attended = -1  # of our layers, in this pass
        self.begun = False  # a pass, which hasn't come to our first layer
        super().__init__(
            [
                Layer(self, i) if kind == "full_attention" else DynamicSlidingWindowLayer(window)
                for i, kind in enumerate(types)
            ]
        )
        if not config._attn_implementation.startswith(PREFIX):
            check_and_install(model)
        self.name = config._attn_implementation

    def __deepcopy__(self, memo: dict[int, Any]) -> "TransformersCache":
        """Return a copy for the same model."""
        other = TransformersCache(self.ours.clone(), self.model)
        for i, layer in enumerate(self.layers):
            if i not in self.order:
                other.layers[i] = copy.deepcopy(layer, memo)
        return other

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H, S, D) of a layer, new ones (B, H, T, D) included. Raises ValueError if
        another attention than ours would take them."""
        index = self.order[layer]
        if index == 0:
            if not self.begun:
                raise ValueError(
                    "what it reads would not be committed: call the model itself, with the cache by its name"
                )
            self.check_attention()
            self.begun = False
            self.pos, self.last_attended = self.ours.positions(k.size(2)).to(k.device), -1
        if self.last_attended != index - 1:
            raise ValueError(
                f"layer {layer} has keys of ours, but those of the layer before weren't attended to"
            )
        if k.size(3) != v.size(3):
            raise ValueError(
                f"keys have {k.size(3)} numbers and values {v.size(3)}: they must be alike"
            )
        k, v, mask = self.ours.append(index, k, v, self.pos)
        k = k.view_as(k)  # an object of its own
        k.appended = Appended(self, index, mask)
        return k, v

    def check_attention(self) -> None:
        """Raise ValueError if some layer's attention was changed after this cache was made."""
        for module in self.modules:
            found = getattr(getattr(module, "config", None), "_attn_implementation", self.name)
            if found != self.name:
                raise ValueError(
                    f"layer {module.layer_idx}'s attention is now {found!r} instead of {self.name!r}: make a new cache"
                )

    def attended(self, module: nn.Module, index: int) -> None:
        """Note that a layer has attended. Raises ValueError if it is another model's."""
        if not any(module is each for each in self.modules):
            raise ValueError("this cache was made for another model: make one for each")
        self.last_attended = index

    def end_pass(self) -> None:
        """Count the tokens of a pass as read."""
        if not self.begun:
            self.ours.commit(self.pos)
        self.begun = False
