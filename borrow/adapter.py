"""A model of transformers, offered as `my_gpt.py` offers its own: its attention asks our cache for keys, values and mask.

Shapes: B batch, T tokens fed, H heads, D head size.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from borrow.check import check_logits
from gpt_kv_cache import KVCache

PREFIX = "ours_"  # before the name of the attention that a model has


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
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"its attention has {name}, which changes scores and isn't supported")
    if k.size(3) != v.size(3):
        raise ValueError(
            f"keys have {k.size(3)} numbers and values {v.size(3)}: they must be alike"
        )
    k, v, mask = our_cache.append(module.layer_idx, k, v, our_pos)
    causal = mask is None and q.size(2) > 1
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


def register(name: str, model: PreTrainedModel) -> str:
    """Make attend() known to transformers, in front of the attention `name` of a model; return its name."""
    module = sys.modules[type(model).__module__]
    usual = AttentionInterface().get(name, getattr(module, "eager_attention_forward", None))
    ours = f"{PREFIX}{model.config.model_type}_{name}"
    AttentionInterface.register(ours, partial(attend, usual=usual))
    ALL_MASK_ATTENTION_FUNCTIONS.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return ours


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
    context, given = config.max_position_embeddings, config.to_dict()
    if given.get("use_sliding_window") is False:
        given["sliding_window"] = None
    for field in ("sliding_window", "attention_chunk_size"):
        if 0 < (given.get(field) or 0) < context:
            raise ValueError(
                f"{kind}: {field} is {given[field]}, and must be at least the context, {context}"
            )
    types = [layer for layer in given.get("layer_types") or () if layer != "full_attention"]
    if types and not (types == ["sliding_attention"] * len(types) and given.get("sliding_window")):
        n_layers = len(given["layer_types"])
        raise ValueError(
            f"{kind}: layer_types has {len(types)} of {n_layers} that aren't full_attention, such as {types[0]}"
        )
    for field, value in given.items():
        if "softcapping" in field and "attn" in field and value is not None:
            raise ValueError(f"{kind}: {field} is {value}, and must be null")
    attention = given.get("attn_config")  # MPT's
    if given.get("alibi") or config.model_type == "bloom" or "alibi': True" in str(attention):
        raise ValueError(
            f"{kind}: its positions are biases of scores (ALiBi), which a cache can't hold"
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
            n_kv_head=getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
            n_embd=c.hidden_size,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        )
        self.training = model.training
        usual = c._attn_implementation
        if usual.startswith(PREFIX):
            raise ValueError(f"this {type(model).__name__} has an adapter already")
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            self.check(usual)
        except BaseException:
            model.set_attn_implementation(usual)
            raise
        finally:
            for module, was_training in training.items():
                module.training = was_training

    @torch.no_grad()
    def check(self, usual: str) -> None:
        """Put our attention in front of the usual one, and compare logits. Raises ValueError if they differ."""
        draw, kind = torch.Generator().manual_seed(0), type(self.model).__name__
        ids = torch.randint(self.config.vocab_size, (1, min(520, self.context)), generator=draw)
        ids = ids.to(self.wte.weight.device)
        # by the attention that the model came with
        expected = self.model(ids, use_cache=False).logits
        self.model.set_attn_implementation(register(usual, self.model))
        cache = self.new_cache()
        try:
            self(ids[:, :4], cache)
            shapes = [tuple(kv.shape[2:]) for kv in cache.layers]  # (H, T, D)
            wanted = [(self.config.n_kv_head, 4, self.config.head_dim)] * self.config.n_layer
            if shapes != wanted:
                raise ValueError(
                    f"{len(shapes)} layers gave keys (H, T, D) {shapes[:1]}, and {len(wanted)} must give {wanted[0]}"
                )
            check_logits(self, ids, expected)
        except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{kind} can't be served: {reason}") from error

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
