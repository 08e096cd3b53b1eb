"""Numbers beyond what a dtype holds, and what a process's default dtype must not change."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from compress import dequantize, quantize
from gpt_baseline import GPT as Baseline
from gpt_bounded_cache import BCT, BCTConfig
from gpt_kv_cache import GPT, GPTConfig
from hybrid_kv_cache import KINDS, Hybrid, HybridConfig
from llama_kv_cache import Llama, LlamaConfig

SIZES = {"vocab_size": 50, "n_ctx": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = LlamaConfig(**SIZES, n_kv_head=2, head_dim=8, n_inner=48)
MODELS = {
    "no cache": (Baseline, GPTConfig(**SIZES)),
    "GPT": (GPT, GPTConfig(**SIZES)),
    "BCT": (BCT, BCTConfig(**SIZES, slots=4, recent=4)),
    "Llama": (Llama, LLAMA),
    "normed Llama": (Llama, LlamaConfig(**{**vars(LLAMA), "qk_norm": True})),
}
KINDS_OF_LAYERS = {"n_layer": 4, "kinds": tuple(KINDS), "kv_rank": 16, "rope_dim": 8}
HYBRID = (Hybrid, HybridConfig(**vars(LLAMA) | KINDS_OF_LAYERS))


def overflowing(name: str, which: int) -> nn.Module:
    """A float16 model whose second layer's queries (which 0) or keys (1) are infinite in one
    head."""
    make, config = MODELS[name]
    torch.manual_seed(0)
    model = make(config).eval().requires_grad_(False)
    head = model.h[1].attn.c_attn.weight[:, 32 * which :][:, :8]
    head.mul_(5e4 / head.abs().max())
    return model.half()


@pytest.mark.parametrize("which", [0, 1], ids=["queries", "keys"])
@pytest.mark.parametrize("name", MODELS)
def test_what_overflows_inside_attention_reaches_the_logits(name: str, which: int) -> None:
    model, ids = overflowing(name, which), torch.arange(40)[None] % 7
    model.h[1].ln_1.weight.mul_(100)
    passes = [model(ids)]
    if name != "no cache":
        cache = model.new_cache()
        passes += [model(piece, cache) for piece in ids.split([1, 1, 9, 1, 28], dim=1)]
    for logits in passes:
        assert logits.isnan().any(dim=-1).all(), "of every token"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*MODELS, "hybrid"])
def test_logits_do_not_depend_on_the_default_dtype(name: str, dtype: torch.dtype) -> None:
    make, config = HYBRID if name == "hybrid" else MODELS[name]
    if name == "BCT":
        config = BCTConfig(**{**vars(config), "rule": "sum", "random_start": True})
    if isinstance(config, LlamaConfig):
        config = replace(config, rope_scaling=(32.0, 1.0, 4.0, 16))
    model, ids = make(config).eval().requires_grad_(False), torch.arange(40)[None]
    expected = model(ids)
    torch.set_default_dtype(dtype)
    try:
        given = model(ids)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("largest", [1, 3e38, 1e-36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_by_half_a_step_at_most_in_any_range(
    dtype: torch.dtype, largest: float
) -> None:
    x = torch.linspace(-largest, largest, 32, dtype=torch.float64).to(dtype)[None]
    rounded = dequantize(*quantize(x, 4, dim=-1), 4)
    assert (rounded.double() - x.double()).abs().max() <= largest * (1 / 15 + 0.01)
