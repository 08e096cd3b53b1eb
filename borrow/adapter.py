"""A model of transformers, offered as `my_gpt.py` offers its own: its attention asks our cache for keys, values and mask.

Shapes: B batch, T tokens fed, H heads, D head size.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from borrow.check import check_logits
from borrow.transformers_cache import cache_layers, refuse_options, refuse_sizes, register
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
    windows = [layer for layer in cache_layers(config) if type(layer) is not DynamicLayer]
    if windows:
        raise ValueError(
            f"{kind}: {len(windows)} of {config.num_hidden_layers} layers have a window below the context, "
            f"{config.max_position_embeddings}"
        )
    if given.get("is_encoder_decoder") or any(
        getattr(module, "is_causal", True) is False for module in model.modules()
    ):
        raise ValueError(f"{kind}: its attention isn't causal, so that a cache would be wrong")


class Adapter(nn.Module):
    """A causal language model of transformers whose attention sees the whole context.

    What a cache computes is compared with what the model computes without one, on 520 tokens or its context, before
    the model is served. The model's own generate() goes on to work. Raises ValueError, and leaves the model as it
    was, if it can't be served.
    """

    new_cache = KVCache

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
        self.training = model.training
        usual = c._attn_implementation
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
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
        cache = self.new_cache()
        try:
            # by the attention that the model came with
            expected = self.model(ids, use_cache=False).logits
            self.model.set_attn_implementation(register(attend, PREFIX, self.model))
            self(ids[:, :4], cache)
            sizes = {(kv.size(2), kv.size(4)) for kv in cache.layers}  # (H, D)
            if not cache.layers:
                raise ValueError(
                    "no keys reached our cache: transformers_cache.py may serve it in generate()"
                )
            if len(cache.layers) != self.config.n_layer or len(sizes) > 1:
                raise ValueError(
                    f"{len(cache.layers)} of {self.config.n_layer} layers gave keys, of (H, D) {sizes}"
                )
            ((self.config.n_kv_head, self.config.head_dim),) = sizes
            check_logits(self, ids, expected)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{kind} can't be served: {reason:.150}") from error

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text; with last_only, the last token's."""
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
