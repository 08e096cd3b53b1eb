"""The cached model computes what the uncached one does, however the text is fed, and both compute GPT-2's formula."""

import math
import random
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_baseline
import gpt_kv_cache
from gpt_kv_cache import KVCache

# Largest difference of logits, relative to their largest size: sums are taken in another order when a text is fed in
# other chunks, so the last bits differ. fp32 has 24 of them, fp16 11 and bf16 8.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def random_geometry(rng: random.Random) -> dict[str, int]:
    n_head, head_dim = rng.randint(1, 4), rng.choice([3, 4, 8, 16])
    return {
        "vocab_size": rng.randint(20, 200),
        "n_ctx": rng.randint(8, 48),
        "n_layer": rng.randint(1, 4),
        "n_head": n_head,
        "head_dim": head_dim,
        "n_embd": rng.choice([n_head * head_dim, 20]),
        "n_inner": rng.choice([17, 64]),
    }


def model_pair(
    seed: int, dtype: torch.dtype = torch.float32, **geometry: int
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same random weights in both files' models; large ones, so that attention is sharp and mistakes show."""
    torch.manual_seed(seed)
    baseline = gpt_baseline.GPT(gpt_baseline.GPTConfig(**geometry)).eval()
    for parameter in baseline.parameters():
        parameter.data.normal_(std=0.4 if parameter.dim() > 1 else 0.2)
    cached = gpt_kv_cache.GPT(gpt_kv_cache.GPTConfig(**geometry)).eval()
    cached.load_state_dict(baseline.state_dict())
    return baseline.to(dtype), cached.to(dtype)


def model_of(module: ModuleType, seed: int, **geometry: int) -> torch.nn.Module:
    return model_pair(seed, **geometry)[0 if module is gpt_baseline else 1]


def feed_in_chunks(model: torch.nn.Module, ids: Tensor, cuts: list[int], cache: KVCache) -> Tensor:
    """Logits (B, T, V) of ids (B, T), fed in pieces that end at the cuts."""
    ends = sorted({*cuts, ids.size(1)})
    return torch.cat([model(ids[:, a:b], cache) for a, b in zip([0, *ends], ends, strict=False)], dim=1)


def oracle(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """GPT-2's formula (Radford et al. 2019) in float64, one head and one layer at a time, softmax written out."""
    p = {name: value.double() for name, value in model.state_dict().items()}
    c, T = model.config, ids.size(1)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte.weight"][ids] + p["wpe.weight"][:T]
    for layer in range(c.n_layer):
        q, k, v = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(c.n_head * c.head_dim, dim=-1)
        heads = []
        for head in range(c.n_head):
            part = slice(head * c.head_dim, (head + 1) * c.head_dim)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(c.head_dim)
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            heads.append(weights @ v[..., part])
        x = x + linear(torch.cat(heads, -1), f"h.{layer}.attn.c_proj")
        y = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    difference = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert difference < TOLERANCE[dtype], f"{difference:.2e}"


@pytest.mark.parametrize("seed", range(60))
def test_equivalence_of_logits_under_any_chunking(seed: int) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    baseline, cached = model_pair(seed, **geometry)
    ids = torch.randint(geometry["vocab_size"], (rng.randint(1, 4), rng.randint(1, geometry["n_ctx"])))
    cuts = [rng.randint(1, ids.size(1)) for _ in range(rng.choice([0, 1, 3, 50]))]
    with torch.no_grad():
        expected = baseline(ids)
        assert_close(expected, oracle(baseline, ids), torch.float32)
        cache = KVCache()
        assert_close(feed_in_chunks(cached, ids, cuts, cache), expected, torch.float32)
        assert_close(cached(ids), expected, torch.float32)
        assert_close(baseline(ids, last_only=True), expected[:, -1:], torch.float32)
    assert len(cache) == ids.size(1) and cache.pos.tolist() == list(range(ids.size(1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_equivalence_in_half_precision(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    baseline, cached = model_pair(seed, dtype, **geometry)
    ids = torch.randint(geometry["vocab_size"], (2, geometry["n_ctx"]))
    with torch.no_grad():
        cache = KVCache()
        logits = feed_in_chunks(cached, ids, [3, 4, geometry["n_ctx"] - 1], cache)
        expected = baseline(ids)
        difference = (logits - expected).double().abs().max() / expected.double().abs().max()
    assert logits.dtype == dtype and cache.layers[0].dtype == dtype
    # Weights this large amplify rounding from layer to layer: compare with what rounding alone does to the baseline.
    assert difference < 3 * max(TOLERANCE[dtype], rounding_error(baseline, ids))


def rounding_error(model: torch.nn.Module, ids: Tensor) -> float:
    exact = oracle(model, ids)
    return ((model(ids).double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("seed", range(12))
def test_equivalence_of_greedy_text_past_the_context(seed: int) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    baseline, cached = model_pair(seed, **geometry)
    prompt = rng.randint(1, 2 * geometry["n_ctx"])  # also longer than the context
    ids = torch.randint(geometry["vocab_size"], (rng.randint(1, 3), prompt))
    n = 3 * geometry["n_ctx"]
    expected = torch.cat(list(gpt_baseline.generate(baseline, ids, n)), dim=1)
    got = torch.cat(list(gpt_kv_cache.generate(cached, ids, n)), dim=1)
    assert expected.shape == (ids.size(0), n)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(6))
def test_equivalence_of_sampled_text(seed: int) -> None:
    geometry = random_geometry(random.Random(seed))
    baseline, cached = model_pair(seed, **geometry)
    ids = torch.randint(geometry["vocab_size"], (2, 3))

    def sampled(generate, model, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(list(generate(model, ids, 60, temperature=0.9, top_k=10, generator=generator)), dim=1)

    expected = sampled(gpt_baseline.generate, baseline, seed)
    assert torch.equal(sampled(gpt_kv_cache.generate, cached, seed), expected)
    assert not torch.equal(sampled(gpt_kv_cache.generate, cached, seed + 1000), expected)


def test_equivalence_from_a_warm_cache_and_only_new_tokens_are_read() -> None:
    _, model = model_pair(0, vocab_size=50, n_ctx=40, n_layer=2, n_head=2, n_embd=16)
    ids = torch.randint(50, (1, 20))
    fed = []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    cold = torch.cat(list(gpt_kv_cache.generate(model, ids, 10)), dim=1)
    assert fed == [20] + [1] * 9  # no forward pass whose result nobody sees
    cache = KVCache()
    with torch.no_grad():
        model(ids[:, :15], cache)
    fed.clear()
    warm = torch.cat(list(gpt_kv_cache.generate(model, ids, 10, cache=cache)), dim=1)
    assert fed == [5] + [1] * 9
    assert torch.equal(warm, cold)
    assert len(cache) == 29  # all but the last token


def test_equivalence_of_a_warm_cache_when_the_prompt_is_past_the_context() -> None:
    _, model = model_pair(1, vocab_size=50, n_ctx=16, n_layer=2, n_head=2, n_embd=16)
    ids = torch.randint(50, (1, 25))
    cache = KVCache()
    with torch.no_grad():
        model(ids[:, :10], cache)
    warm = torch.cat(list(gpt_kv_cache.generate(model, ids, 30, cache=cache)), dim=1)
    assert torch.equal(warm, torch.cat(list(gpt_kv_cache.generate(model, ids, 30)), dim=1))


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache])
def test_context_forgets_its_oldest_half_when_full(module) -> None:
    assert [module.context_start(n, 8) for n in range(1, 22)] == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    for n_ctx in range(1, 12):
        for n in range(1, 100):
            start = module.context_start(n, n_ctx)
            assert 1 <= n - start <= n_ctx


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache])
def test_stop_id_ends_each_row_and_then_the_batch(module) -> None:
    model = model_of(module, 3, vocab_size=12, n_ctx=32, n_layer=2, n_head=2, n_embd=16)
    ids = torch.tensor([[1, 2], [3, 4]])
    free = torch.cat(list(module.generate(model, ids, 30)), dim=1)
    stop = int(free[0, 4])
    stopped = torch.cat(list(module.generate(model, ids, 30, stop_id=stop)), dim=1)
    for row, free_row in zip(stopped.tolist(), free.tolist(), strict=True):
        end = row.index(stop) if stop in row else len(row)
        assert row[:end] == free_row[:end] and set(row[end:]) <= {stop}
    assert all(stop in row for row in stopped.tolist()) or stopped.size(1) == 30


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache])
@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, ["(1, 0)"]),
        (torch.zeros(3, dtype=torch.long), {}, ["(3,)"]),
        (torch.zeros(1, 2, dtype=torch.long), {"max_new_tokens": -1}, ["max_new_tokens", "0", "-1"]),
        (torch.zeros(1, 2, dtype=torch.long), {"temperature": -0.5}, ["temperature", "0", "-0.5"]),
        (torch.zeros(1, 2, dtype=torch.long), {"temperature": math.nan}, ["temperature", "nan"]),
        (torch.zeros(1, 2, dtype=torch.long), {"top_k": 0}, ["top_k", "1", "0"]),
    ],
)
def test_generate_refuses_bad_options(module, ids: Tensor, options: dict, words: list[str]) -> None:
    model = model_of(module, 3, vocab_size=12, n_ctx=32, n_layer=1, n_head=2, n_embd=16)
    with pytest.raises(ValueError) as error:
        list(module.generate(model, ids, **({"max_new_tokens": 3} | options)))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache])
@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ({"n_embd": 770}, ["n_embd = 770", "n_head = 12", "head_dim"]),
        ({"n_layer": 0}, ["n_layer", "1", "0"]),
        ({"head_dim": -4}, ["head_dim", "-4"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
    ],
)
def test_geometry_that_can_not_be_is_refused(module, geometry: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        module.GPTConfig(**geometry)
    assert all(word in str(error.value) for word in words)


def test_dropout_acts_in_training_only_and_gradients_are_finite() -> None:
    config = gpt_baseline.GPTConfig(vocab_size=20, n_ctx=16, n_layer=2, n_head=2, n_embd=16, dropout=0.5)
    model = gpt_baseline.GPT(config)
    ids = torch.randint(20, (2, 16))
    assert not torch.equal(model(ids), model(ids))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equivalence_on_a_gpu(dtype: torch.dtype) -> None:
    pair = model_pair(5, vocab_size=99, n_ctx=64, n_layer=3, n_head=4, n_embd=32)
    baseline, cached = (model.to("cuda", dtype) for model in pair)
    ids = torch.randint(99, (2, 64), device="cuda")
    with torch.no_grad():
        assert_close(feed_in_chunks(cached, ids, [1, 9, 40], KVCache()), baseline(ids), dtype)
    if dtype == torch.float32:
        got = torch.cat(list(gpt_kv_cache.generate(cached, ids[:, :5], 150)), dim=1)
        assert torch.equal(got, torch.cat(list(gpt_baseline.generate(baseline, ids[:, :5], 150)), dim=1))
