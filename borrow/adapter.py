"""A model of transformers, offered as `my_gpt.py` offers its own: its attention asks our cache for keys, values and mask.

Shapes: B batch, T tokens fed, H heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer

from borrow.check import check_logits
from borrow.transformers_cache import (
    cache_layers,
    layer_caches,
    layered_cache,
    refuse_options,
    refuse_sizes,
    register,
)
from gpt_kv_cache import KVCache

PREFIX = "ours_"  # before the name of the attention that a model has
FIELDS = ("max_position_embeddings", "vocab_size", "num_hidden_layers", "num_attention_heads")


def attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    our_cache: KVCache | None = None,
    our_pos: Tensor | None = None,
    *,
    usual: Callable[..., Any],
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to what our cache holds; without one, do as the model did before (usual)."""
    if our_cache is None:
        return usual(module, q, k, v, attention_mask, scaling=scaling, **options)
    refuse_options(options)
    refuse_sizes(k, v)
    k, v, mask = our_cache.append(module.layer_idx, k, v, our_pos)
    causal = mask is None and q.size(2) > 1
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


def check_config(model: nn.Module) -> None:
    """Raise ValueError, which names the field and both numbers, if a model's configuration says that it can't be
    served."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{kind} is no model of transformers: one that takes cache= needs no adapter"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind} has no output head: load it as AutoModelForCausalLM")
    config = model.config.get_text_config(decoder=True)
    given = config.to_dict()
    attention = given.get("attn_config") or {}  # MPT's
    if given.get("alibi") or config.model_type == "bloom" or attention.get("alibi"):
        raise ValueError(
            f"{kind}: its positions are biases of scores (ALiBi), which a cache can't hold"
        )
    for field in FIELDS:
        if not hasattr(config, field):
            raise ValueError(f"{kind}: its configuration has no {field}")
    shared = [layer for layer in cache_layers(config) if type(layer) is DummyLayer]
    if shared:
        raise ValueError(
            f"{kind}: {len(shared)} of {config.num_hidden_layers} layers have no keys of their own"
        )
    if given.get("is_encoder_decoder") or any(
        getattr(module, "is_causal", True) is False for module in model.modules()
    ):
        raise ValueError(f"{kind}: its attention isn't causal, so that a cache would be wrong")


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Let the windows of a model be of at most 64 tokens for a while. If a window of 4,096 were ignored, the logits of a
    text of 4,104 would change by less than check_logits() allows for rounding."""
    config = model.config.get_text_config(decoder=True)
    before = []
    for owner in (config, *model.modules()):
        window = getattr(owner, "sliding_window", None)
        if isinstance(window, int) and window < config.max_position_embeddings:
            before.append((owner, window))
    try:
        for owner, window in before:
            owner.sliding_window = min(window, 64)
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


class Adapter(nn.Module):
    """A causal language model of transformers whose layers see the whole context, or a window of it.

    What a cache computes is compared with what the model computes without one, on 520 tokens or its context, before
    the model is served; in this check, windows are of at most 64 tokens. The model's own generate() goes on to work.
    Raises ValueError, and leaves the model as it was, if it can't be served.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_config(model)
        super().__init__()
        self.model, self.wte = model, model.get_input_embeddings()
        c = model.config.get_text_config(decoder=True)
        self.context = c.max_position_embeddings
        self.config = SimpleNamespace(
            # all that the model is, but where it was loaded from: a store knows it by this
            model=f"{type(model).__name__} {model.config.to_dict() | {'_name_or_path': ''}}",
            vocab_size=c.vocab_size,
            n_ctx=c.max_position_embeddings,
            n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads,
            n_embd=c.hidden_size,
        )
        self.new_cache = KVCache
        windows = [getattr(layer, "sliding_window", 0) for layer in cache_layers(c)]
        if any(windows):
            self.new_cache = partial(layered_cache, model)
            self.config.kinds = tuple("window" if window else "full" for window in windows)
            (self.config.window,) = {*windows} - {0}  # of one size
        self.training = model.training
        usual = c._attn_implementation
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with short_windows(model):
                self.check()
        except BaseException:
            model.set_attn_implementation(usual)
            raise
        finally:
            for module, was_training in training.items():
                module.training = was_training

    @torch.no_grad()
    def check(self) -> None:
        """Put our attention in front of the model's, and compare logits. Raises ValueError if they differ."""
        draw, kind = torch.Generator().manual_seed(0), type(self.model).__name__
        ids = torch.randint(self.config.vocab_size, (1, min(520, self.context)), generator=draw)
        ids = ids.to(self.wte.weight.device)
        try:
            cache = self.new_cache()
            # by the attention that the model came with
            expected = self.model(ids, use_cache=False).logits
            self.model.set_attn_implementation(register(attend, PREFIX, self.model))
            self(ids[:, :4], cache)
            held = [kv for part in layer_caches(cache) or [cache] for kv in part.layers]
            sizes = {(kv.size(2), kv.size(4)) for kv in held}  # (H, D)
            if not held:
                raise ValueError(
                    "no keys reached our cache: transformers_cache.py may serve it in generate()"
                )
            if len(held) != self.config.n_layer or len(sizes) > 1:
                raise ValueError(
                    f"{len(held)} of {self.config.n_layer} layers gave keys, of (H, D) {sizes}"
                )
            ((self.config.n_kv_head, self.config.head_dim),) = sizes
            check_logits(self, ids, expected)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{kind} can't be served: {reason:.150}") from error

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text; with last_only, the last token's. Raises
        ValueError if layers have windows, and the cache doesn't have as many layers."""
        windowed, n_layer = hasattr(self.config, "kinds"), self.config.n_layer
        if cache is not None and windowed and len(cache.layers) != n_layer:
            raise ValueError(
                f"a cache of {len(cache.layers)} layers can't serve {n_layer} of which some have a window: "
                "begin with the model's new_cache()"
            )
        T = ids.size(1)
        pos = torch.arange(T) if cache is None else cache.positions(T)
        pos = pos.to(ids.device)  # (T,)
        out = self.model(
            ids,
            position_ids=pos[None],
            use_cache=False,
            logits_to_keep=int(last_only),
            our_cache=cache,  # by names that transformers has no use for: both reach attend() as they are
            our_pos=pos,
        )
        if cache is not None:
            cache.commit(pos)
        return out.logits
