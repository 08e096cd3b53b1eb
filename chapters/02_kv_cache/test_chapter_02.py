"""Chapter 2: a cache changes nothing but the work."""

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gpt_baseline
from gpt_kv_cache import GPT, GPTConfig

POINTS = {"ex2_1": 4, "ex2_2": 2, "ex2_3": 1, "ex2_4": 3}
CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)


@pytest.fixture
def model() -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model


def text(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.ex2_1
@torch.no_grad()
def test_any_cut_of_the_text_gives_the_logits_of_an_uncached_pass(impl: ModuleType, model: GPT) -> None:
    draw = random.Random(0)
    for trial in range(20):
        batch, n = draw.randint(1, 3), draw.randint(2, 40)
        ids = text(batch, n, trial)
        cuts = sorted(draw.sample(range(1, n), draw.randint(0, min(6, n - 1))))
        cache = impl.Cache()
        logits = torch.cat([model(ids[:, a:b], cache) for a, b in zip([0, *cuts], [*cuts, n], strict=True)], 1)
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4, msg=f"cut at {cuts} of {n}")
        assert len(cache) == n


@pytest.mark.ex2_1
def test_a_chunk_behind_cached_tokens_sees_them_and_its_own_up_to_itself(impl: ModuleType) -> None:
    for held, T in [(0, 5), (0, 1), (4, 3), (4, 1), (1, 2), (7, 7)]:
        cache, pos = impl.Cache(), torch.arange(held + T)
        kv = torch.randn(1, 1, held + T, 2)
        if held:
            cache.append(0, kv[:, :, :held], kv[:, :, :held], pos[:held])
            cache.commit(pos[:held])
        k, v, mask = cache.append(0, kv[:, :, held:], kv[:, :, held:], pos[held:])
        assert torch.equal(k, kv) and torch.equal(v, kv), "the keys and values of all tokens, in their order"
        what = f"{T} tokens behind {held}"
        if mask is None:
            assert held == 0 or T == 1, f"{what}: without a mask, the first sees only the first key, and no error"
        else:
            sees = [[key <= held + i for key in range(held + T)] for i in range(T)]
            assert mask.dtype == torch.bool and mask.tolist() == sees, f"{what}: the mask is {mask.int().tolist()}"


@pytest.mark.ex2_1
@torch.no_grad()
def test_a_pass_that_fails_changes_nothing(impl: ModuleType, model: GPT) -> None:
    ids, cache = text(2, 12), impl.Cache()
    model(ids[:, :5], cache)

    def fail(*_: object) -> None:
        raise MemoryError

    for layer in range(CONFIG.n_layer):
        hook = model.h[layer].mlp.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            model(ids[:, 5:9], cache)
        hook.remove()
        assert len(cache) == 5 == cache.next_pos
    torch.testing.assert_close(model(ids[:, 5:], cache), model(ids)[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.ex2_1
@torch.no_grad()
def test_two_caches_share_a_model(impl: ModuleType, model: GPT) -> None:
    texts, caches = [text(1, 10, 1), text(1, 10, 2)], [impl.Cache(), impl.Cache()]
    for i in range(0, 10, 2):
        for ids, cache in zip(texts, caches, strict=True):
            logits = model(ids[:, i : i + 2], cache)
            torch.testing.assert_close(logits, model(ids[:, : i + 2])[:, -2:], rtol=1e-4, atol=1e-4)


@pytest.mark.ex2_2
@torch.no_grad()
def test_greedy_writes_what_the_baseline_writes(impl: ModuleType, model: GPT) -> None:
    plain = gpt_baseline.GPT(gpt_baseline.GPTConfig(**vars(CONFIG))).eval()
    plain.load_state_dict(model.state_dict())
    ids = text(1, 7)
    expected = [int(token) for token in gpt_baseline.generate(plain, ids, 20)]
    assert impl.greedy(model, ids, 20) == expected
    assert impl.greedy(model, ids, 1) == expected[:1] and impl.greedy(model, ids, 0) == []


@pytest.mark.ex2_2
@torch.no_grad()
def test_greedy_feeds_every_token_once(impl: ModuleType, model: GPT) -> None:
    fed: list[int] = []

    def counting(ids: Tensor, cache: object) -> Tensor:
        fed.extend(ids[0].tolist())
        return model(ids, cache)

    ids = text(1, 7)
    written = impl.greedy(counting, ids, 10)
    assert fed == [*ids[0].tolist(), *written[:-1]], "the prompt once, and every new token but the last once"


@pytest.mark.ex2_3
def test_bytes_by_formula(impl: ModuleType) -> None:
    assert impl.cache_bytes(12, 12, 64, 1) == 73_728  # a token of GPT-2 124M
    assert impl.cache_bytes(48, 25, 64, 1024, batch=8, itemsize=2) == 2_516_582_400  # GPT-2 XL in bfloat16
    assert impl.cache_bytes(12, 12, 64, 0) == 0


@pytest.mark.ex2_3
@torch.no_grad()
def test_the_formula_gives_what_is_allocated(impl: ModuleType, model: GPT) -> None:
    from gpt_kv_cache import KVCache

    cache = KVCache()
    model(text(3, 11), cache)
    allocated = sum(kv.untyped_storage().nbytes() for kv in cache.layers)
    assert impl.cache_bytes(CONFIG.n_layer, CONFIG.n_head, CONFIG.head_dim, 11, batch=3) == allocated


@pytest.mark.ex2_4
@torch.no_grad()
def test_going_back_and_on_with_another_text(impl: ModuleType, model: GPT) -> None:
    ids, other = text(2, 12, 1), text(2, 6, 2)
    cache = impl.Cache()
    model(ids, cache)
    cache.truncate(5)
    assert len(cache) == 5 == cache.next_pos
    logits = model(other, cache)
    torch.testing.assert_close(logits, model(torch.cat([ids[:, :5], other], 1))[:, 5:], rtol=1e-4, atol=1e-4)
    cache.truncate(0)
    torch.testing.assert_close(model(ids, cache), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.ex2_4
@torch.no_grad()
def test_going_back_frees_the_memory(impl: ModuleType, model: GPT) -> None:
    cache = impl.Cache()
    model(text(1, 40), cache)
    cache.truncate(4)
    held = sum(kv.untyped_storage().nbytes() for kv in cache.layers)
    assert held == CONFIG.n_layer * 2 * 2 * 4 * 16 * 4, "a slice of a tensor keeps all of its memory"


@pytest.mark.ex2_4
@torch.no_grad()
def test_nobody_goes_back_to_the_future(impl: ModuleType, model: GPT) -> None:
    cache = impl.Cache()
    model(text(1, 4), cache)
    for n in (5, -1):
        with pytest.raises(ValueError, match=r"\b4\b"):
            cache.truncate(n)
    assert len(cache) == 4
