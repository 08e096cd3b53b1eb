"""Chapter 1: a GPT-2 written by hand computes what gpt_baseline.GPT computes."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_baseline
from chapters.calling import call, types_of
from chapters.checking import assert_close, assert_refused, assert_same
from gpt_baseline import GPT, GPTConfig

LOGITS = ("row", "token", "logit")
CONFIGS = {
    **{
        f"{n} layers": GPTConfig(vocab_size=50, n_ctx=16, n_layer=n, n_head=2, n_embd=8)
        for n in (1, 12, 14, 101)
    },
    "heads wider than the stream": GPTConfig(
        vocab_size=50, n_ctx=16, n_layer=2, n_head=3, n_embd=10, head_dim=6
    ),
    "one head, a narrow MLP": GPTConfig(
        vocab_size=50, n_ctx=16, n_layer=3, n_head=1, n_embd=8, n_inner=12
    ),
}

PARTS = {  # and what is silenced to see it alone
    "embeddings, last norm and head": ("attn.c_proj", "mlp.c_proj"),
    "attention": ("mlp.c_proj",),
    "the MLP": ("attn.c_proj",),
}


def random_model(config: GPTConfig) -> GPT:
    """A small model with random weights in which everything counts: biases, too, and the norms' weights."""
    torch.manual_seed(0)
    # In float64 what differs by more than rounding differs by much more.
    model = GPT(config).eval().double()
    for name, p in model.named_parameters():
        # wpe is large: else the model repeats one token.
        p.data.add_((2.0 if name.startswith("wpe") else 0.3) * torch.randn_like(p))
    return model


def text(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def equal(found: Tensor, expected: Tensor, why: str) -> None:
    __tracebackhide__ = True
    assert_close(found, expected, why, tolerance=1e-8)


@pytest.mark.ex1_1
def test_the_mask_of_any_positions(impl: ModuleType) -> None:
    draw, pairs = random.Random(0), [(range(4), range(4)), ([3], range(4))]  # prefill, decoding
    for _ in range(100):
        start = draw.choice([0, 10**6])
        near = range(start, start + 20)
        # in any order, as in a ring
        pairs.append((draw.sample(near, draw.randint(1, 9)), draw.sample(near, draw.randint(1, 9))))
    for tokens, keys in pairs:
        pos = torch.tensor(tokens), torch.tensor(keys)
        mask = call(impl.causal_mask, *pos, returns=f"bool {(len(tokens), len(keys))}")
        expected = [[key <= token for key in keys] for token in tokens]
        what = f"rows of the mask of tokens {[*tokens]} and keys {[*keys]}"
        assert_same(mask.tolist(), expected, what)


def cases(n: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Random q, k, v and masks: of prefill, of a later chunk, and of any kind that leaves every query a key."""
    draw, drawn = random.Random(1), []
    torch.manual_seed(1)
    for trial in range(n):
        B, H, D, T = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 8), draw.randint(1, 6)
        S = T if trial % 3 == 0 else T + draw.randint(0, 6)
        mask = torch.arange(S) <= torch.arange(S - T, S)[:, None]
        if trial % 3 == 2:
            mask = (torch.rand(T, S) < 0.5) | (torch.arange(S) == torch.randint(S, (T, 1)))
        q, k, v = (torch.randn(B, H, m, D, dtype=torch.float64) for m in (T, S, S))
        drawn.append((q, k, v, mask))
    return drawn


@pytest.mark.ex1_2
def test_attention_is_torchs_attention(impl: ModuleType) -> None:
    for q, k, v, mask in cases(60):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        what = f"attention() of q {tuple(q.shape)}, k {tuple(k.shape)}"
        found = call(impl.attention, q, k, v, mask, returns=types_of(expected))
        equal(found, expected, what)


@pytest.mark.ex1_2
def test_large_scores_do_not_overflow(impl: ModuleType) -> None:
    # 4 * 20 * 25 / sqrt(4) = 1000.
    q, k = torch.full((1, 1, 2, 4), 20.0), torch.full((1, 1, 3, 4), 25.0)
    # Scores: 1000, -1000, 1000 and -1000, (1000, not to be seen), -1000.
    q[..., 1, :], k[..., 1, :] = -20.0, -25.0
    mask = torch.tensor([[True, True, True], [True, False, True]])
    v = torch.tensor([[[[1.0] * 4, [5.0] * 4, [3.0] * 4]]])
    what = "scores of 1000 and -1000, of which exp is infinite or 0"
    found = call(impl.attention, q, k, v, mask, returns="float32 (1, 1, 2, 4)")
    equal(found, torch.full((1, 1, 2, 4), 2.0), what)


@pytest.mark.ex1_3
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gelu_is_the_one_that_gpt2_was_trained_with(impl: ModuleType, dtype: torch.dtype) -> None:
    for largest in (12.0, 30.0, 1e3, 1e4, 1e37):
        x = torch.linspace(-largest, largest, 2401, dtype=dtype).view(7, 343)
        found = call(impl.gelu, x, returns=types_of(x))
        assert largest > 12 or not torch.allclose(found, F.gelu(x), rtol=0, atol=1e-6), (
            "that is the exact GELU, not the one with tanh"
        )
        tolerance = 1e-8 if dtype == torch.float64 else 1e-4
        what = f"GELU of numbers from {-largest:g} to {largest:g}"
        assert_close(found, F.gelu(x, approximate="tanh"), what, tolerance=tolerance)


@pytest.mark.ex1_4
@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_forward_part_by_part(impl: ModuleType, part: str) -> None:
    """One layer, in which what isn't under test adds nothing."""
    config = GPTConfig(vocab_size=50, n_ctx=16, n_layer=1, n_head=2, n_embd=8)
    model = random_model(config)
    for name, p in model.named_parameters():
        if any(silent in name for silent in PARTS[part]):
            p.data.zero_()
    found = impl.forward(text(2, 6), model.state_dict(), config.n_head)
    assert_close(found, model(text(2, 6)), f"only {part}", LOGITS, 1e-8)


@pytest.mark.ex1_4
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_forward_computes_the_models_logits(impl: ModuleType, name: str) -> None:
    model = random_model(CONFIGS[name])
    weights = dict(reversed(model.state_dict().items()))
    for n in (1, 5, 16):
        given = text(2, n, n), weights, CONFIGS[name].n_head
        found = call(impl.forward, *given, returns=f"float64 (2, {n}, 50)")
        assert_close(found, model(text(2, n, n)), f"{name}, {n} tokens", LOGITS, 1e-8)


@pytest.mark.ex1_4
@torch.no_grad()
def test_more_tokens_than_positions_are_refused(impl: ModuleType) -> None:
    config = CONFIGS["12 layers"]
    weights = random_model(config).state_dict()
    why = "17 tokens for wpe.weight of 16 positions"
    assert_refused(lambda: impl.forward(text(1, 17), weights, config.n_head), why, 17, 16)


def counting(model: GPT) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """A model that keeps what it is given."""
    fed: list[Tensor] = []

    def counted(ids: Tensor) -> Tensor:
        fed.append(ids.clone())
        return model(ids)

    return counted, fed


@pytest.mark.ex1_5
@pytest.mark.parametrize("n_ctx", [16, 15])
def test_greedy_writes_what_the_baseline_writes(impl: ModuleType, n_ctx: int) -> None:
    config = replace(CONFIGS["heads wider than the stream"], n_ctx=n_ctx)
    model = random_model(config)
    for n_prompt in (1, 7, 15, 16, 17, 40):
        ids = text(1, n_prompt, n_prompt)
        most = 150 if n_prompt == 7 else 30
        expected = [int(token) for token in gpt_baseline.generate(model, ids, most)]
        for n in (0, 1, most):
            counted, fed = counting(model)
            found = call(impl.greedy, counted, ids, n, config.n_ctx, returns="list[int]")
            assert_same(found, expected[:n], f"{n} tokens after {n_prompt}, context {config.n_ctx}")
            assert len(fed) == n, (
                f"{n} tokens need {n} passes, not {len(fed)}: who reads the logits of the others?"
            )
            whole = [*ids[0].tolist(), *expected]
            for length, given in enumerate(fed, start=n_prompt):
                kept = whole[gpt_baseline.context_start(length, config.n_ctx) : length]
                what = f"what the model reads of {length} tokens, context {config.n_ctx}"
                assert_same(given[0].tolist(), kept, what)


@pytest.mark.ex1_5
def test_tokens_read_are_those_that_the_baseline_reads(impl: ModuleType) -> None:
    start = gpt_baseline.context_start
    for n_ctx in (16, 15, 2, 1):
        for n_prompt in (1, 8, 16, 17, 33):
            for n in (0, 1, 5, 40, 500):
                lengths = range(n_prompt, n_prompt + n)
                expected = sum(length - start(length, n_ctx) for length in lengths)
                found = call(impl.tokens_read, n_prompt, n, n_ctx, returns="int")
                what = f"{n} tokens after {n_prompt}, context {n_ctx}"
                assert found == expected, f"{what}: {found}, must be {expected}"
