"""Lecture 5: each kind of layer beside transformers' and beside its own uncached pass."""

import math

import pytest
import torch
from torch import Tensor

from formats.products import order_for_decoding
from gpt_baseline import generate as generate_uncached
from hybrid_kv_cache import (
    KINDS,
    Hybrid,
    HybridConfig,
    StateAttention,
    WindowBlock,
    delta_rule,
    delta_rule_at_once,
    generate,
)
from llama_kv_cache import KVCache
from tests.test_equivalence import randomize

SIZES = {"vocab_size": 60, "n_ctx": 128, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 32}
SIZES |= {"n_inner": 48, "kv_rank": 24, "rope_dim": 8, "window": 8, "rope_theta": 100.0}
MIXES = [*((kind,) * 2 for kind in KINDS), ("window", "state", "full", "latent")]
FEEDINGS = [[40], [1] * 40, [7, 1, 1, 9, 3, 19]]


def hybrid(*kinds: str, **more: object) -> Hybrid:
    """A random model with layers of these kinds."""
    torch.manual_seed(0)
    model = Hybrid(HybridConfig(**SIZES | {"n_layer": len(kinds), "kinds": kinds} | more)).eval()
    randomize(model)
    for block in model.h:
        if hasattr(block.attn, "offset"):
            block.attn.offset.data.fill_(-4)  # a state remembers the whole text
    return model.requires_grad_(False)


def fed(model: Hybrid, ids: Tensor, lengths: list[int], cache: KVCache) -> Tensor:
    """The logits (B, T, V) of ids, read in pieces."""
    return torch.cat([model(piece, cache) for piece in ids.split(lengths, dim=1)], dim=1)


def close(given: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert (given - expected).abs().max() <= tolerance * expected.abs().max()


IDS = torch.arange(80).view(2, 40) * 7 % 60


@pytest.mark.parametrize("lengths", FEEDINGS, ids=["at once", "one by one", "mixed"])
@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_logits_are_those_without_a_cache(kinds: tuple[str, ...], lengths: list[int]) -> None:
    model = hybrid(*kinds)
    cache = model.new_cache()
    close(fed(model, IDS, lengths, cache), model(IDS))
    assert len(cache) == 40 and cache.nbytes == sum(layer.nbytes for layer in cache.layers)
    half, cache = model.to(torch.bfloat16), model.new_cache()
    expected = half(IDS).float()
    close(fed(half, IDS, lengths, cache).float(), expected, 0.1)
    fast = order_for_decoding(half)  # as load_model() leaves a model
    close(fed(fast, IDS, lengths, fast.new_cache()).float(), expected, 0.1)


@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_greedy_texts_are_equal_past_the_context_too(kinds: tuple[str, ...]) -> None:
    model = hybrid(*kinds, n_ctx=48)
    expected = torch.cat([*generate_uncached(model, IDS, 30)], dim=1)
    assert torch.equal(torch.cat([*generate(model, IDS, 30)], dim=1), expected)


def test_a_cut_happens_in_all_layers_or_in_none() -> None:
    for kinds, n, says in (
        (("full", "window"), 12, "layer 1: can't keep 12 tokens of 20, 12 evicted"),
        (("latent", "state"), 12, "layer 1: can't keep 12 tokens of 20: a state holds all or none"),
        (("full", "latent"), 21, "layer 0: can't keep 21 tokens of 20"),
    ):
        model = hybrid(*kinds)
        cache = model.new_cache()
        model(IDS[:, :20], cache)
        with pytest.raises(ValueError, match=says):
            cache.truncate(n)
        assert [len(layer) for layer in [cache, *cache.layers]] == [20, 20, 20]
        close(model(IDS[:, 20:], cache), model(IDS)[:, 20:])
    copy = cache.clone()
    copy.truncate(15)  # full and latent layers can
    close(model(IDS[:, 15:], copy), model(IDS)[:, 15:])
    assert len(cache) == 40
    cache.layers[0].commit(torch.tensor([40]))  # as an interrupted commit() leaves it
    with pytest.raises(ValueError, match=r"layers have read \[41, 40\] tokens, not all 40"):
        model(IDS, cache)


def test_what_cannot_be_is_refused() -> None:
    model = hybrid("full", "window")
    with pytest.raises(ValueError, match="a cache of 0 layers can't serve a model of 2"):
        model(IDS, KVCache())
    for given, says in (
        ({"n_layer": 3, "kinds": ("full",)}, "kinds must be one of full, .* for each of 3 layers"),
        ({"kinds": ("latent",), "rope_dim": 7}, "rope_dim is 7, kv_rank 512: both must be even"),
        ({"kinds": ("state",), "conv": 1}, "conv must be at least 2, got 1"),
        ({"kinds": ("latent",), "qkv_bias": True}, "are of full and window layers"),
        ({"kinds": ("window",), "qk_norm": True}, "with sinks can't have qk_norm or gemma"),
    ):
        with pytest.raises(ValueError, match=says):
            HybridConfig(**{"n_layer": 1} | given)
    model = hybrid("state", "full")
    cache = model.new_cache()
    model(IDS, cache)
    for given in (model.to(torch.bfloat16), hybrid("state", "full", n_head=2, head_dim=32)):
        with pytest.raises(ValueError, match="a cache for .* got "):
            given(IDS, cache)


# --- The latent ---------------------------------------------------------------------------------------


def test_expanded_and_absorbed_latents_are_the_same_numbers() -> None:
    attention = hybrid("latent").h[0].attn
    q, cached = torch.randn(2, 4, 5, 24), torch.randn(2, 1, 9, 32)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    close(attention.absorbed(q, cached, mask), attention.expanded(q, cached, mask))
    close(
        attention.absorbed(q, cached[:, :, :5], None), attention.expanded(q, cached[:, :, :5], None)
    )


# --- The window ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_windows_with_sinks_are_those_of_gpt_oss() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss

    config = modeling_gpt_oss.GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=8, layer_types=["sliding_attention"], num_hidden_layers=1,
        attention_bias=False, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    )  # fmt: skip
    theirs = modeling_gpt_oss.GptOssAttention(config, 0).eval().requires_grad_(False)
    rotary = modeling_gpt_oss.GptOssRotaryEmbedding(config)
    randomize(theirs)
    block: WindowBlock = hybrid("window", window_theta=50.0).h[0]
    block.attn.sink.copy_(theirs.sinks)
    joined = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
    block.attn.c_attn.weight.copy_(torch.cat(joined).T)
    block.attn.c_proj.weight.copy_(theirs.o_proj.weight.T)
    block.ln_1 = torch.nn.Identity()
    block.mlp.c_proj.weight.zero_()  # attention alone
    x, pos = torch.randn(2, 40, 32), torch.arange(40)
    distance = pos[:, None] - pos
    mask = torch.zeros(40, 40).masked_fill((distance < 0) | (distance >= 8), -math.inf)
    expected = x + theirs(x, rotary(x, pos[None]), mask[None, None])[0]
    close(block(x, pos, None, 0, ()), expected)
    for lengths in FEEDINGS:
        cache, read = block.new_cache(), []
        for here, piece in zip(pos.split(lengths), x.split(lengths, dim=1), strict=True):
            read.append(block(piece, here, cache, 0, ()))
            cache.commit(here)
        close(torch.cat(read, dim=1), expected)


# --- The state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.1, 10, 1000])  # the last leaves nothing: exp(-1000) is 0
def test_the_delta_rule_is_the_same_for_all_tokens_at_once(strength: float) -> None:
    state, (q, k, v) = torch.randn(2, 3, 8, 8), torch.randn(3, 2, 3, 64, 8)
    k = torch.nn.functional.normalize(k, dim=-1)
    log_decay, write = -strength * torch.rand(2, 3, 64, 1), torch.rand(2, 3, 64, 1)
    given = [x.requires_grad_() for x in (state, q, k, v, log_decay, write)]
    here, wanted = delta_rule_at_once(*given), delta_rule(*given)
    # Trained in either form, a model becomes the same.
    sums = [(read.sin().sum() + last.sin().sum()) for read, last in (here, wanted)]
    here += torch.autograd.grad(sums[0], given)
    wanted += torch.autograd.grad(sums[1], given)
    for ours, theirs in zip(here, wanted, strict=True):
        close(ours, theirs, 1e-4 if strength <= 10 else 1e-2)


def test_long_texts_are_read_in_pieces_as_exactly_as_short_ones() -> None:
    model, ids = hybrid("state", "state", n_ctx=1000), torch.randint(60, (1, 1000))
    with_cache = fed(model, ids, [500, 1, 499], model.new_cache())
    close(with_cache, model(ids), 1e-4)


@pytest.mark.slow
def test_states_are_those_of_qwen3_next() -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16}
    config = Qwen3NextConfig(hidden_size=32, linear_value_head_dim=16, num_hidden_layers=4, **sizes)
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval().requires_grad_(False)
    randomize(theirs)
    layer: StateAttention = hybrid("state").h[0].attn
    heads = theirs.in_proj_qkvz.weight.view(4, 4, 16, 32)  # of each head: q, k, v, z
    q, k, v, z = (x.reshape(64, 32) for x in heads.unbind(dim=1))
    layer.c_attn.weight.copy_(torch.cat([q, k, v]).T)
    layer.c_out.weight.copy_(z.T)
    layer.c_gates.weight.copy_(
        theirs.in_proj_ba.weight.view(4, 2, 32).transpose(0, 1).flatten(0, 1).T
    )
    for ours, parameter in (
        (layer.conv, theirs.conv1d.weight),
        (layer.offset, theirs.dt_bias),
        (layer.log_speed, theirs.A_log),
        (layer.ln_y.weight, theirs.norm.weight),
        (layer.c_proj.weight, theirs.out_proj.weight.T),
    ):
        ours.copy_(parameter)
    x = torch.randn(2, 40, 32)
    expected = theirs(x)
    for lengths in FEEDINGS:
        held, read = None, []
        for piece in x.split(lengths, dim=1):
            y, held = layer(piece, held)
            read.append(y)
        close(torch.cat(read, dim=1), expected)
