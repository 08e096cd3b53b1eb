"""Chapter 2: a cache changes nothing but the work."""

from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gpt_baseline
from chapters.calling import call
from chapters.checking import (
    assert_close,
    assert_keeps,
    assert_keeps_only,
    assert_refused,
    assert_right,
    assert_same,
    fail_in_layer,
    random_ids,
    tensor_bytes,
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
    numbers of token t's key in layer i are 1000 i + t, and those of its value the same, negative."""
    pos, found = torch.arange(first, end), []
    for layer in range(2):
        k = (1000 * layer + pos.float())[None, None, :, None].expand(1, 1, end - first, 2)
        found.append(cache.append(layer, k.clone(), -k, pos))
    cache.commit(pos)
    return found


def check(found: list[tuple[Tensor, Tensor, Tensor | None]], first: int, end: int) -> None:
    """Whether that is what the tokens from first to end see, of a text that begins at 0."""
    for layer, (k, v, mask) in enumerate(found):
        what = f"layer {layer}, {end - first} new after {first}"
        expected = (1000.0 * layer + torch.arange(end))[None, None, :, None].expand(1, 1, end, 2)
        assert_close(k, expected, f"{what}: keys", ("row", "head", "token", "number"))
        assert_close(v, -expected, f"{what}: values", ("row", "head", "token", "number"))
        check_mask(mask, first, end, what)


def check_mask(mask: Tensor | None, first: int, end: int, what: str) -> None:
    if mask is None:
        why = "without a mask, the first sees only key 0, and no error"
        assert first == 0 or end - first == 1, f"{what}: {why}"
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
    cache.commit(torch.arange(3, 2000))
    assert len(cache) == 2000 and cache.positions(1).tolist() == [2000], "1,997 more"


@pytest.mark.ex2_1
def test_stage_1_two_tokens(impl: ModuleType) -> None:
    cache = impl.Cache()
    for first in (0, 1):
        check(added(cache, first, first + 1), first, first + 1)
    layers = f"passes over two layers leave {len(cache.layers)} tensors in cache.layers, must be 2"
    assert len(cache.layers) == 2, layers


@pytest.mark.ex2_1
@pytest.mark.parametrize("ends", [(5,), (5, 6), (4, 7), (1, 3), (7, 14), (2, 3, 300, 301, 309)])
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
def test_stage_3_what_does_not_fit_raises_an_error(impl: ModuleType) -> None:
    cache, two_rows = impl.Cache(), torch.zeros(2, 1, 2, 2)
    added(cache, 0, 3)
    try:
        cache.append(0, two_rows, two_rows, torch.arange(3, 5))
    except Exception:
        check(added(cache, 3, 5), 3, 5)
    else:
        raise AssertionError(
            "keys of two rows went behind those of one, and append() hid the error"
        )


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


@pytest.mark.ex2_2
def test_greedy_writes_any_token_as_often_as_it_is_the_likeliest(impl: ModuleType) -> None:
    script = [0, 0, 9, 50_256, 0, 1] * 20  # GPT-2's end of text, too

    def scripted(ids: Tensor, cache: object) -> Tensor:
        fed.append(ids)
        likeliest = torch.full_like(ids, script[len(fed) - 1])
        return torch.nn.functional.one_hot(likeliest, 50_257) - 5.0

    for n in (0, 1, len(script)):
        fed: list[Tensor] = []
        found = call(impl.greedy, scripted, random_ids(1, 3), n, returns="list[int]")
        assert_same(found, script[:n], f"{n} new tokens, 0 among them")


@pytest.mark.ex2_3
def test_bytes_by_formula(impl: ModuleType) -> None:
    gpt2, xl = (12, 12, 64, 1), (48, 25, 64, 1024, 8, 2)
    for sizes, expected, what in [
        (gpt2, 73_728, "a token of GPT-2 124M, in float32"),
        (xl, 2_516_582_400, "8 texts of 1,024 tokens, GPT-2 XL in bfloat16"),
        ((2, 3, 5, 7, 11, 1), 4_620, "2 layers, 3 heads of 5, 7 tokens, 11 texts, a byte a number"),
        ((2, 3, 5, 0), 0, "no token"),
        ((12, 12, 64, 10**17 + 1), 73_728 * (10**17 + 1), "whole numbers: no rounding"),
    ]:
        found = call(impl.cache_bytes, *sizes, returns="int")
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
    before, cache = tensor_bytes(), impl.Cache()
    model(random_ids(1, 40), cache)
    fail_in_layer(model, random_ids(1, 20), cache, 2)
    for n in (40, 4, 0):
        cache.truncate(n)
        what = f"{n} of 40 tokens kept, after a pass with 20 more that failed"
        assert_keeps_only(cache, bytes_of(n), before, what)


@pytest.mark.ex2_4
@torch.no_grad()
@pytest.mark.parametrize("n", [5, -1])
def test_nobody_goes_back_to_the_future(impl: ModuleType, model: GPT, n: int) -> None:
    cache, ids = impl.Cache(), random_ids(1, 9)
    model(ids[:, :4], cache)
    assert_refused(lambda: cache.truncate(n), f"truncate({n}) of 4 tokens", 4)
    what = f"truncate({n}) of 4 tokens was refused, and changed something: check, then change"
    try:
        logits = model(ids[:, 4:], cache)
    except Exception as error:
        raise AssertionError(f"{what}. The next pass: {error}") from error
    assert_close(logits, model(ids)[:, 4:], what, LOGITS)


GROUPS = [(6, 2), (6, 3), (4, 1), (8, 2), (4, 4)]  # query heads, key-value heads


@pytest.mark.ex2_5
@pytest.mark.parametrize(("n_head", "groups"), GROUPS)
def test_head_by_head(impl: ModuleType, n_head: int, groups: int) -> None:
    torch.manual_seed(0)
    kv, serving = torch.randn(2, 2, groups, 12, 5), [h * groups // n_head for h in range(n_head)]
    before, cache = tensor_bytes(), impl.GroupedCache(n_head)
    for first, end in ((0, 5), (5, 6), (6, 12)):
        pos = torch.arange(first, end)
        *found, mask = cache.append(0, *kv[..., first:end, :], pos)
        cache.commit(pos)
        what = f"{n_head} query heads, {groups} key-value heads, {end - first} new after {first}"
        check_mask(mask, first, end, what)
        for name, heads, given in zip(("keys", "values"), found, kv, strict=True):
            axes = ("row", "query head", "token", "number")
            assert_close(heads, given[:, serving, :end], f"{what}: {name}", axes)
    del found, mask, heads
    assert_keeps_only(cache, kv.nbytes, before, f"{groups} key-value heads, whatever is handed out")
