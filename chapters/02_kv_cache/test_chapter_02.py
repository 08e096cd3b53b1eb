"""Chapter 2: a cache changes nothing but the work."""

from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gpt_baseline
from chapters.checking import (
    assert_close,
    assert_keeps,
    assert_refused,
    assert_right,
    assert_same,
    random_ids,
)
from gpt_kv_cache import GPT, GPTConfig

LOGITS = ("row", "token", "logit")
CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)


def bytes_of(tokens: int, batch: int = 1) -> int:
    """Bytes of so many tokens' keys and values."""
    return 2 * CONFIG.n_layer * batch * CONFIG.n_head * CONFIG.head_dim * tokens * 4


@pytest.fixture
def model() -> GPT:
    """A small model with random weights, large enough that a mistake shows."""
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model


def added(cache: object, first: int, end: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Append tokens to each of two layers of a cache, as a pass does, and commit them; what append() returned. The
    numbers of token t's key in layer i are 100 i + t, and those of its value the same, negative."""
    pos, found = torch.arange(first, end), []
    for layer in range(2):
        k = (100 * layer + pos.float())[None, None, :, None].expand(1, 1, end - first, 2)
        found.append(cache.append(layer, k.clone(), -k, pos))
    cache.commit(pos)
    return found


def check(found: list[tuple[Tensor, Tensor, Tensor | None]], first: int, end: int) -> None:
    """Whether that is what the tokens from first to end see, of a text that begins at 0."""
    for layer, (k, v, mask) in enumerate(found):
        what = f"layer {layer}, {end - first} new after {first}"
        expected = (100.0 * layer + torch.arange(end))[None, None, :, None].expand(1, 1, end, 2)
        assert_close(k, expected, f"{what}: keys", ("row", "head", "token", "number"))
        assert_close(v, -expected, f"{what}: values", ("row", "head", "token", "number"))
        if mask is None:
            assert first == 0 or end - first == 1, (
                f"{what}: without a mask, the first sees only key 0, and no error"
            )
        else:
            sees = torch.arange(end) <= torch.arange(first, end)[:, None]
            assert_close(mask, sees, f"{what}: mask", ("token", "key"))


# --- 2.1, in stages, a point each: single tokens; chunks; a pass that fails; the very first pass fails ---------------


@pytest.mark.ex2_1
def test_stage_1_len_and_positions(impl: ModuleType) -> None:
    cache = impl.Cache()
    assert len(cache) == 0, "nothing has been read"
    assert cache.positions(3).tolist() == [0, 1, 2], "the first token is at position 0"
    cache.commit(torch.arange(3))
    positions = cache.positions(2).tolist()
    assert len(cache) == 3 and positions == [3, 4], (
        "tokens at positions 0, 1 and 2 have been committed: "
        f"len {len(cache)}, the next two positions {positions}"
    )
    cache.commit(torch.arange(3, 4))
    assert len(cache) == 4 and cache.positions(1).tolist() == [4], "one more"


@pytest.mark.ex2_1
def test_stage_1_two_tokens(impl: ModuleType) -> None:
    cache = impl.Cache()
    for first in (0, 1):
        check(added(cache, first, first + 1), first, first + 1)
    layers = f"passes over two layers leave {len(cache.layers)} tensors in cache.layers, must be 2"
    assert len(cache.layers) == 2, layers


@pytest.mark.ex2_1
@pytest.mark.parametrize("ends", [(5,), (5, 6), (4, 7), (1, 3), (7, 14), (2, 3, 9, 10)])
def test_stage_2_chunks(impl: ModuleType, ends: tuple[int, ...]) -> None:
    cache = impl.Cache()
    for first, end in pairwise((0, *ends)):
        check(added(cache, first, end), first, end)


@pytest.mark.ex2_1
@pytest.mark.parametrize(
    "question",
    [
        "a prompt is read at once",
        "a second piece follows",
        "one token at a time",
        "pieces of any size",
        "two texts in turn",
        "tokens are counted",
        "bfloat16 beside float32",
    ],
)
def test_stage_2_any_cut_of_a_text(impl: ModuleType, model: GPT, question: str) -> None:
    assert_right(model, impl.Cache, question)


@pytest.mark.ex2_1
@torch.no_grad()
def test_stage_2_every_key_and_value_is_held_once(impl: ModuleType, model: GPT) -> None:
    for size in (1, 48):
        ids, cache = random_ids(2, 48), impl.Cache()
        for part in ids.split(size, dim=1):
            model(part, cache)
        what = f"2 texts of 48 tokens, fed {size} at a time"
        assert_keeps(cache, bytes_of(48, batch=2), what, spare=1024)


@pytest.mark.ex2_1
@pytest.mark.parametrize(
    "question", ["a failed pass isn't counted", "a pass of NaN that fails, then goes on"]
)
def test_stage_3_a_pass_that_fails_changes_nothing(
    impl: ModuleType, model: GPT, question: str
) -> None:
    assert_right(model, impl.Cache, question)


@pytest.mark.ex2_1
@pytest.mark.parametrize("where", ["in the middle", "at its end"])
def test_stage_4_nor_does_the_very_first_pass(impl: ModuleType, model: GPT, where: str) -> None:
    assert_right(model, impl.Cache, f"a pass that fails {where}, then goes on")


@pytest.mark.ex2_2
@torch.no_grad()
def test_greedy_writes_what_the_baseline_writes(impl: ModuleType, model: GPT) -> None:
    plain = gpt_baseline.GPT(gpt_baseline.GPTConfig(**vars(CONFIG))).eval()
    plain.load_state_dict(model.state_dict())
    fed: list[int] = []

    def counting(ids: Tensor, cache: object) -> Tensor:
        fed.extend(ids[0].tolist())
        return model(ids, cache)

    ids = random_ids(1, 7, 1)
    for n in (20, 1, 0):
        fed.clear()
        expected = [int(token) for token in gpt_baseline.generate(plain, ids, n)]
        assert_same(impl.greedy(counting, ids, n), expected, f"{n} new tokens")
        if n:
            what = "fed to the model, 7 tokens of prompt and all new ones but the last"
            assert_same(fed, [*ids[0].tolist(), *expected[:-1]], what)


@pytest.mark.ex2_3
def test_bytes_by_formula(impl: ModuleType) -> None:
    for sizes, options, expected, what in [
        ((12, 12, 64, 1), {}, 73_728, "a token of GPT-2 124M, in float32"),
        (
            (48, 25, 64, 1024),
            {"batch": 8, "itemsize": 2},
            2_516_582_400,
            "8 texts of 1,024 tokens, GPT-2 XL in bfloat16",
        ),
    ]:
        found = impl.cache_bytes(*sizes, **options)
        assert found == expected, f"{what}: {found} bytes, must be {expected}"


@pytest.mark.ex2_4
@pytest.mark.parametrize(
    "question",
    [
        "tokens are counted",
        "a text is cut back anywhere, then goes on",
        "another ending of the same text",
        "a pass that fails, then a cut",
    ],
)
def test_going_back_and_on_with_another_text(impl: ModuleType, model: GPT, question: str) -> None:
    assert_right(model, impl.Cache, question)


@pytest.mark.ex2_4
@torch.no_grad()
def test_going_back_frees_the_memory(impl: ModuleType, model: GPT) -> None:
    cache = impl.Cache()
    model(random_ids(1, 40), cache)
    cache.truncate(4)
    assert_keeps(cache, bytes_of(4), "4 of 40 tokens kept", spare=128)


@pytest.mark.ex2_4
@torch.no_grad()
@pytest.mark.parametrize("n", [5, -1])
def test_nobody_goes_back_to_the_future(impl: ModuleType, model: GPT, n: int) -> None:
    cache, ids = impl.Cache(), random_ids(1, 9)
    model(ids[:, :4], cache)
    assert_refused(lambda: cache.truncate(n), f"truncate({n}) of 4 tokens", 4)
    logits = model(ids[:, 4:], cache)
    what = f"truncate({n}) of 4 tokens was refused, and changed something: check, then change"
    assert_close(logits, model(ids)[:, 4:], what, LOGITS)


GROUPS = [(6, 2), (6, 3), (4, 1), (8, 2), (4, 4)]  # query heads, key-value heads


@pytest.mark.ex2_5
@pytest.mark.parametrize(("n_head", "groups"), GROUPS)
def test_head_by_head(impl: ModuleType, n_head: int, groups: int) -> None:
    cache = impl.GroupedCache(n_head)
    heads = torch.arange(1.0, groups + 1).view(1, groups, 1, 1).expand(2, groups, 3, 5)
    k, v, _ = cache.append(0, heads.clone(), -heads, torch.arange(3))
    expected = (2, n_head, 3, 5)
    what = f"{n_head} query heads, {groups} key-value heads"
    shapes = f"keys {tuple(k.shape)} and values {tuple(v.shape)}, must be {expected}"
    assert k.shape == v.shape == expected, f"{what}: {shapes}"
    serving = [1 + h * groups // n_head for h in range(n_head)]
    for row in range(2):
        what_of_row = f"{what}, row {row}: the key-value head, from 1, of each query head"
        assert_same(k[row, :, 0, 0].tolist(), serving, what_of_row)


@pytest.mark.ex2_5
@torch.no_grad()
def test_the_cache_keeps_no_copies(impl: ModuleType) -> None:
    cache = impl.GroupedCache(6)
    for first, end in ((0, 5), (5, 6), (6, 12)):
        pos, kv = torch.arange(first, end), torch.randn(2, 2, 3, end - first, 8)
        cache.append(0, *kv, pos)
        cache.commit(pos)
    what = "6 query heads, 3 key-value heads: the cache keeps 3 heads, whatever it hands out"
    assert_keeps(cache, 2 * 2 * 3 * 12 * 8 * 4, what, spare=512)
