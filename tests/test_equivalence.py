"""The cached model computes what the uncached one does, however the text is fed, and both compute GPT-2's formula."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from gpt_kv_cache import KVCache
from llama_kv_cache import Llama, LlamaConfig

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
# Largest difference of logits, relative to their largest size: sums are taken in another order when a text is fed in
# other chunks, so the last bits differ. fp32 has 24 of them, fp16 11 and bf16 8.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


TINY = {"vocab_size": 50, "n_ctx": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
MODELS = {
    gpt_baseline.GPTConfig: gpt_baseline.GPT,
    gpt_kv_cache.GPTConfig: gpt_kv_cache.GPT,
    gpt_bounded_cache.GPTConfig: gpt_bounded_cache.GPT,
    gpt_bounded_cache.BCTConfig: gpt_bounded_cache.BCT,
    LlamaConfig: Llama,
}
every_file = pytest.mark.parametrize("module", [gpt_baseline, gpt_kv_cache])


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


def randomize(model: torch.nn.Module) -> None:
    """Weights so large that attention is sharp and text varied, or mistakes would not show."""
    # whatever order the file makes them in
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1 if name.startswith("w") else 0.5)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.normal_(mean=1.0, std=0.1)


def model_of(config: object, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return the model of a config, with the same random weights in every file and on every
    device."""
    model = MODELS[type(config)](config).eval().cpu()
    torch.manual_seed(seed)
    randomize(model)
    return model.to(torch.get_default_device(), dtype).requires_grad_(False)


def text(tokens: Iterator[Tensor]) -> Tensor:
    """The tokens (B, n) that generate() yields."""
    return torch.cat(list(tokens), dim=1)


def parts_of(model: torch.nn.Module) -> list[str]:
    """Names of the submodules that a forward pass runs, each once."""
    names: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
        for name, module in model.named_modules()
        if name
    ]
    model(torch.zeros(1, 1, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    return names


@contextlib.contextmanager
def failing(model: torch.nn.Module, part: str, *, nan: bool = False) -> Iterator[None]:
    """Any pass fails as it comes to a part; with nan, all keys and values until then are NaN."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hooks = [model.get_submodule(part).register_forward_pre_hook(fail)]
    for block in model.h if nan else []:
        hooks.append(block.attn.c_attn.register_forward_hook(lambda *args: args[-1] * math.nan))
    with pytest.raises(KeyboardInterrupt):
        yield
    for hook in hooks:
        hook.remove()


def check_any_feeding(
    model: torch.nn.Module,
    ids: Tensor,
    expected: Tensor,
    cache: KVCache,
    seed: int,
    amplified: float = 1,
) -> None:
    """Read ids by random chunks with a cache and its clones in turn; between these passes, some
    fail on other tokens, and caches are truncated. The logits must be the expected ones (B, T, V)
    at every position."""
    rng, parts, caches = random.Random(seed), parts_of(model), [cache]
    for _ in range(40):
        cache = rng.choice(caches)
        n = len(cache)
        action = rng.choice(["read", "read", "read", "fail", "fail", "truncate", "clone"])
        if action == "clone":
            caches = [*caches[-2:], cache.clone()]
        elif action == "truncate" or n == ids.size(1):
            with contextlib.suppress(ValueError):  # a ring has evicted, a BCT has written
                cache.truncate(rng.choice([rng.randint(max(0, n - 3), n), rng.randint(0, n), 0]))
        else:
            T = rng.choice(
                [1, rng.randint(1, min(4, ids.size(1) - n)), rng.randint(1, ids.size(1) - n)]
            )
            if action == "fail":
                nbytes = cache.nbytes
                with failing(model, rng.choice(parts), nan=rng.random() < 0.5):
                    model((ids[:, n : n + T] + 1) % model.config.vocab_size, cache)
                assert len(cache) == int(cache.positions(1)) == n and cache.nbytes == nbytes
            else:
                got = model(ids[:, n : n + T], cache)
                assert_close(got, expected[:, n : n + T], torch.float32, amplified)


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """One head's (B, T, D), softmax written out; `hidden` (T, T): which keys a query doesn't see."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))
    weights = scores.masked_fill(hidden, -math.inf).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    T = q.size(1)
    return attention(q, k, v, torch.ones(T, T).triu(1).bool())


def oracle(
    model: torch.nn.Module, ids: Tensor, attend: Callable = causal, place: Tensor | None = None
) -> Tensor:
    """GPT-2's formula (Radford et al. 2019) in float64, one head and one layer at a time.

    attend: attention of a head, given its q, k and v (B, T, D), layer, head and x, the block's
    input (B, T, C). place: positions (T,), if they aren't 0, 1, 2, ...
    """
    p = {name: value.double() for name, value in model.named_parameters()}
    c = model.config
    place = torch.arange(ids.size(1)) if place is None else place

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte.weight"][ids] + p["wpe.weight"][place]
    for layer in range(c.n_layer):
        y = norm(x, f"h.{layer}.ln_1")
        qkv = linear(y, f"h.{layer}.attn.c_attn").unflatten(-1, (3, c.n_head, c.head_dim))
        heads = []
        for head in range(c.n_head):
            q, k, v = qkv[..., head, :].unbind(2)
            heads.append(attend(q, k, v, layer=layer, head=head, x=y))
        x = x + linear(torch.cat(heads, -1), f"h.{layer}.attn.c_proj")
        y = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest of the expected numbers."""
    assert got.shape == expected.shape
    expected = expected.double()
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, amplified: float = 1) -> None:
    """amplified: how many times the usual rounding is allowed."""
    found = difference(got, expected)
    assert found < amplified * TOLERANCE[dtype], f"{found:.2e}"


def model_pair(seed: int, **geometry: int) -> tuple:
    """The same random weights in both files' models."""
    baseline = model_of(gpt_baseline.GPTConfig(**geometry), seed)
    cached = model_of(gpt_kv_cache.GPTConfig(**geometry), seed)
    return baseline, cached


def feed_in_chunks(model: torch.nn.Module, ids: Tensor, cuts: list[int], cache: KVCache) -> Tensor:
    """Logits (B, T, V) of ids (B, T), fed in pieces that end at the cuts."""
    ends = sorted({*cuts, ids.size(1)})
    return torch.cat(
        [model(ids[:, a:b], cache) for a, b in zip([0, *ends], ends, strict=False)], dim=1
    )


@pytest.mark.parametrize("seed", range(10))
def test_equivalence_of_logits_under_any_feeding(seed: int) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    baseline, cached = model_pair(seed, **geometry)
    ids = torch.randint(
        geometry["vocab_size"], (rng.randint(1, 4), rng.randint(1, geometry["n_ctx"]))
    )
    expected = baseline(ids)
    assert_close(expected, oracle(baseline, ids), torch.float32)
    assert_close(cached(ids), expected, torch.float32)
    assert_close(baseline(ids, last_only=True), expected[:, -1:], torch.float32)
    check_any_feeding(cached, ids, expected, KVCache(), seed)


@pytest.mark.parametrize("seed", [20, 21, 25])
def test_equivalence_of_greedy_text_past_the_context(seed: int) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    baseline, cached = model_pair(seed, **geometry)
    prompt = rng.randint(1, 2 * geometry["n_ctx"])  # also longer than the context
    ids = torch.randint(geometry["vocab_size"], (rng.randint(1, 3), prompt))
    n, cache = 3 * geometry["n_ctx"], KVCache()
    expected = text(gpt_baseline.generate(baseline, ids, n))
    assert expected.shape == (ids.size(0), n) and len(expected.unique()) >= 5
    assert torch.equal(text(gpt_kv_cache.generate(cached, ids, n)), expected)
    cached(ids[:, : min(prompt - 1, geometry["n_ctx"] // 2)], cache)  # a warm one
    assert torch.equal(text(gpt_kv_cache.generate(cached, ids, n, cache=cache)), expected)


def test_equivalence_of_sampled_text() -> None:
    models = model_pair(0, **TINY)
    ids = torch.randint(50, (2, 3))

    def sampled(which: int, seed: int) -> Tensor:
        options = {"temperature": 0.9, "top_k": 10}
        options["generator"] = torch.Generator().manual_seed(seed)
        return text((gpt_baseline, gpt_kv_cache)[which].generate(models[which], ids, 60, **options))

    assert torch.equal(sampled(1, 0), sampled(0, 0))
    assert not torch.equal(sampled(1, 1000), sampled(1, 0))


def test_equivalence_from_a_warm_cache_and_only_new_tokens_are_read() -> None:
    _, model = model_pair(0, **TINY | {"n_ctx": 40})
    ids, fed, texts = torch.randint(50, (1, 20)), [], []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    for held in (0, 15):
        cache = KVCache()
        if held:
            model(ids[:, :held], cache)
        fed.clear()
        texts.append(text(gpt_kv_cache.generate(model, ids, 10, cache=cache)))
        assert fed == [20 - held] + [1] * 9  # no forward pass whose result nobody sees
        assert len(cache) == 29  # the caller's is filled with all but the last token
        assert not cache.layers[0].requires_grad
    assert torch.equal(*texts) and len(texts[0].unique()) >= 4


def test_past_the_context_half_of_it_is_read_again_and_then_token_by_token() -> None:
    ids, fed, projected, cache = torch.randint(50, (1, 10)), [], [], KVCache()
    baseline, model = model_pair(0, **TINY)
    for m in (baseline, model):
        m.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
        m.ln_f.register_forward_pre_hook(lambda module, inputs: projected.append(inputs[0].size(1)))
    list(gpt_kv_cache.generate(model, ids, 24, cache=cache))
    assert fed == [10] + [1] * 6 + [9] + [1] * 7 + [9] + [1] * 7 + [9]
    assert len(cache) == 9 and int(cache.positions(1)) == 9  # the caller's cache begins anew
    fed.clear()
    list(gpt_baseline.generate(baseline, ids, 24))
    assert fed == [*range(10, 17), *range(9, 17), *range(9, 17), 9]
    assert set(projected) == {1}  # logits of the last position only


@every_file
def test_context_forgets_its_oldest_half_when_full(module: ModuleType) -> None:
    starts = [module.context_start(n, 8) for n in range(1, 22)]
    assert starts == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    for n_ctx in range(1, 12):
        for n in range(1, 100):
            start = module.context_start(n, n_ctx)
            assert 1 <= n - start <= n_ctx


class Scripted:
    """Stands for a model: it writes what it is told, a list of tokens for each row."""

    context = math.inf
    new_cache = KVCache

    def __init__(self, *rows: list[int]) -> None:
        self.steps = iter(torch.tensor(rows).T)

    def __call__(self, *_: object, **__: object) -> Tensor:
        return F.one_hot(next(self.steps), 10).float()[:, None]


@every_file
def test_stop_ids_end_each_row_and_then_the_batch(module: ModuleType) -> None:
    prompt = torch.tensor([[1, 7], [3, 7]])  # a stop token there ends nothing
    rows = [5, 7, 1, 2, 3], [4, 4, 6, 7, 8]
    for stop_ids, expected in (
        ([], [*rows]),
        ([7], [[5, 7, 7, 7], [4, 4, 6, 7]]),
        ({5, 6}, [[5, 5, 5], [4, 4, 6]]),  # of several, a row repeats its first
        ([5], [[5] * 5, rows[1]]),
    ):
        tokens = module.generate(Scripted(*rows), prompt, 5, stop_ids=stop_ids)
        assert text(tokens).tolist() == expected


@every_file
def test_sampling_follows_the_softmax_of_the_best_k(module: ModuleType) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).repeat(5_000, 1)

    def frequencies(temperature: float, top_k: int | None) -> Tensor:
        drawn = module.sample(logits, temperature, top_k, torch.Generator().manual_seed(0))
        return torch.bincount(drawn[:, 0], minlength=4) / len(drawn)

    best_two = torch.tensor([-math.inf, 2.0, 1.0, -math.inf])
    for temperature, top_k, kept in (
        (0.5, None, logits[0]),
        (3.0, 99, logits[0]),
        (3.0, 2, best_two),
    ):
        expected = torch.softmax(kept / temperature, dim=-1)
        found = frequencies(temperature, top_k)
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    for temperature, top_k in ((0.0, None), (1e-6, None), (1.0, 1)):
        assert frequencies(temperature, top_k)[1] == 1


@every_file
@pytest.mark.parametrize(("temperature", "bad"), [(0.0, math.nan), (0.8, math.inf)])
def test_logits_that_are_not_finite_are_one_sentence(
    module: ModuleType, temperature: float, bad: float
) -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf], [0.0, 1.0, 2.0]])  # -inf is never chosen
    assert module.sample(logits, temperature, 1, None).tolist() == [[1], [2]]
    for place in ((0, 0), (1, 2)):
        broken = logits.index_put(tuple(map(torch.tensor, place)), torch.tensor(bad))
        with pytest.raises(ValueError, match="logits aren't finite: .*torch.float32"):
            module.sample(broken, temperature, 1, None)
    with pytest.raises(ValueError, match="logits aren't finite"):
        module.sample(torch.full((1, 3), -math.inf), temperature, None, None)


@every_file
def test_random_start_is_that_of_gpt2(module: ModuleType) -> None:
    model = module.GPT(module.GPTConfig(vocab_size=500, n_ctx=100, n_layer=8, n_head=2, n_embd=64))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05)


@every_file
@pytest.mark.parametrize(
    ("geometry", "options", "words"),
    [
        ({}, {"max_new_tokens": -1}, "max_new_tokens .* 0, got -1"),
        ({}, {"temperature": -0.5}, "temperature .* 0, .* got -0.5"),
        ({}, {"temperature": math.nan}, "temperature .* got nan"),
        ({}, {"top_k": 0}, "top_k .* 1, got 0"),
        ({"n_embd": 770, "n_head": 12}, {}, "n_embd = 770 .* n_head = 12.* head_dim"),
        ({"n_layer": 0}, {}, "n_layer .* 1, got 0"),
        ({"head_dim": -4}, {}, "head_dim .* -4"),
        ({"dropout": 1.0}, {}, "dropout .* 1.0"),
    ],
)
def test_geometry_and_options_that_can_not_be_are_refused(
    module: ModuleType, geometry: dict, options: dict, words: str
) -> None:
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=words):
        model = model_of(module.GPTConfig(**TINY | geometry))
        next(module.generate(model, ids, **{"max_new_tokens": 3} | options))


def test_dropout_acts_in_training_only_and_gradients_are_finite() -> None:
    model, ids = gpt_baseline.GPT(gpt_baseline.GPTConfig(**TINY, dropout=0.5)), torch.zeros(2, 16)
    q, k, v = torch.randn(3, 2, 2, 16, 8)
    attend, ids = model.h[0].attn, ids.long()
    assert not torch.equal(attend(q, k, v), attend(q, k, v))  # on attention weights
    assert not torch.equal(model(ids), model(ids))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    assert torch.equal(model(ids), model(ids))
