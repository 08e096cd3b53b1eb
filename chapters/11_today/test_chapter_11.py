"""Chapter 11: rotations that know only distances, frequencies, a loader's join, and a window that never reads twice."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

import llama_kv_cache
from chapters.calling import call, types_of
from chapters.checking import assert_close, assert_refused, assert_same
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache, generate
from llama_kv_cache import Llama, LlamaConfig, rotation

GIVEN = ()
CONFIG = LlamaConfig(
    vocab_size=90,
    n_ctx=32,
    n_layer=3,
    n_head=4,
    n_kv_head=2,
    n_embd=40,
    head_dim=12,
    n_inner=60,
    rope_theta=500.0,
)
SPEED = torch.tensor([500.0 ** (-2 * i / 12) for i in range(6)])
SCALED = (32.0, 1.0, 4.0, 8192)  # of Llama 3.2


def random_model() -> Llama:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for p in model.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return model.requires_grad_(False)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ex11_1
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 100_000.0), (128, 500_000.0), (2, 10_000.0)])
def test_stage_1_frequencies_fall_from_one_radian_a_token(
    impl: ModuleType, head_dim: int, theta: float
) -> None:
    expected = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    what = f"heads of {head_dim}, theta {theta:g}"
    found = call(impl.frequencies, head_dim, theta, returns=f"float32 {(head_dim // 2,)}")
    assert_close(found, expected, what, ("pair",))


@pytest.mark.ex11_1
def test_stage_2_pairs_are_of_two_halves(impl: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0, 0.0, 0.0])[None, None, None]
    rotated = impl.rotate(x, torch.tensor([1]), torch.tensor([math.pi / 2, 0.0]))
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0])[None, None, None]
    what = "(1, 2, 0, 0), its first pair rotated by a quarter"
    assert_close(rotated, expected, what, ("", "", "", "number"))
    x, pos = randn(2, 3, 7, 12), torch.tensor([0, 1, 5, 6, 31, 1000, 20_000])
    expected = llama_kv_cache.rotate(x, rotation(pos, CONFIG))
    what, axes = "against llama_kv_cache.py", ("row", "head", "token", "number")
    found = call(impl.rotate, x, pos, SPEED, returns="float32 (2, 3, 7, 12)")
    assert_close(found, expected, what, axes, 2e-3)


@pytest.mark.ex11_1
@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_stage_2_half_precision_changes_the_numbers_and_not_the_positions(
    impl: ModuleType, dtype: torch.dtype, n: int
) -> None:
    x, pos = randn(1, 1, 2, 12).to(dtype), torch.tensor([n, n + 1])
    found = call(impl.rotate, x, pos, SPEED, returns=types_of(x))
    expected = impl.rotate(x.float(), pos, SPEED)
    what = f"in {dtype}, positions {n} and {n + 1}"
    assert_close(found, expected, what, ("row", "head", "token"), 0.02)


@pytest.mark.ex11_2
@pytest.mark.parametrize("scaling", [SCALED, (8.0, 2.0, 32.0, 2048)])
def test_llama_3s_frequencies(impl: ModuleType, scaling: tuple[float, float, float, int]) -> None:
    factor, low, high, n_ctx = scaling
    speed = torch.tensor([500_000.0 ** (-2 * i / 64) for i in range(32)])
    found = call(impl.slowed, speed, *scaling, returns="float32 (32,)")
    rounds = n_ctx * speed / (2 * math.pi)
    for i in range(32):
        fast, slow = float(speed[i]), float(speed[i] / factor)
        share = float(rounds[i] - low) / (high - low)
        if rounds[i] >= high:
            expected, why = fast, f"must stay {fast:.3g}"
        elif rounds[i] <= low:
            expected, why = slow, f"must be {slow:.3g}, divided by {factor:g}"
        else:
            expected = fast * share + slow * (1 - share)
            why = f"must be {expected:.3g}, a mixture"
        assert float(found[i]) == pytest.approx(expected, rel=1e-5), (
            f"pair {i} goes round {rounds[i]:.2f} times in {n_ctx:,} tokens: its speed is {found[i]:.3g}, {why}"
        )


def public_layer(seed: int = 0) -> dict[str, Tensor]:
    """A layer's attention as files have it: 4 heads of queries, 2 of keys and values, of 12; width 40."""
    sizes = {"q": (48, 40), "k": (24, 40), "v": (24, 40), "o": (40, 48)}
    names = {part: f"model.layers.5.self_attn.{part}_proj.weight" for part in sizes}
    return {names[part]: randn(*sizes[part], seed=seed + i) for i, part in enumerate(sizes)}


@pytest.mark.ex11_3
def test_the_joined_matrix_gives_what_the_parts_give(impl: ModuleType) -> None:
    tensors, x = public_layer(), randn(1, 3, 40, seed=9)
    found = call(impl.joined, tensors, 5, (4, 2), 12, returns="dict")
    assert {*found} == {"c_attn", "c_proj"}, f"names {sorted(found)}, must be c_attn and c_proj"
    output = tensors["model.layers.5.self_attn.o_proj.weight"].t()
    assert_close(found["c_proj"], output, "c_proj", ("in", "out"))
    parts = [x @ tensors[f"model.layers.5.self_attn.{part}_proj.weight"].t() for part in "qkv"]
    what = "x @ c_attn: q, k, v side by side"
    assert_close(x @ found["c_attn"], torch.cat(parts, -1), what, ("", "token", "column"))


@pytest.mark.ex11_3
@pytest.mark.parametrize("part", ["q", "k", "v", "o"])
def test_a_matrix_of_another_shape_is_refused(impl: ModuleType, part: str) -> None:
    name = f"model.layers.5.self_attn.{part}_proj.weight"
    for how, change in {
        "fewer rows": lambda matrix: matrix[:-12],
        "a column less": lambda matrix: matrix[:, 1:],
        "transposed": lambda matrix: matrix.t(),
    }.items():
        tensors = public_layer()
        right, tensors[name] = tuple(tensors[name].shape), change(tensors[name])
        if part == "q" and how == "a column less":
            continue  # q says how wide the model is, so that all others are wrong
        shape = tuple(tensors[name].shape)
        what = f"{part} of shape {shape}, {how}"
        needed = (name, shape, right) if part != "q" else (name, shape)
        assert_refused(lambda given=tensors: impl.joined(given, 5, (4, 2), 12), what, *needed)


@pytest.mark.ex11_4
@pytest.mark.parametrize(("window", "n"), [(1, 60), (2, 1), (7, 150), (16, 0), (200, 60)])
def test_a_window_goes_on_past_the_context(impl: ModuleType, window: int, n: int) -> None:
    model, fed = random_model(), []
    model.context = 40  # as somebody has set it: not the model's n_ctx, 32
    ids = torch.randint(90, (1, 9), generator=torch.Generator().manual_seed(1))
    hook = model.register_forward_pre_hook(lambda _, args: fed.append(args[0].size(1)))
    found = call(impl.write_on, model, ids, n, window, returns="list[int]")
    hook.remove()
    assert_same(fed, [1] * (8 + n), "tokens fed, pass by pass: each once, the last one not")
    assert model.context == 40, f"model.context is {model.context} afterwards, must be 40 as before"
    model.context = math.inf
    cache = SlidingWindowCache(window)
    expected = [int(token) for token in generate(model, ids, n, cache=cache)]
    assert_same(found, expected, f"{n} tokens through a window of {window}, a context of 40")


@pytest.mark.ex11_4
def test_a_pass_that_fails_leaves_the_context_as_it_was(impl: ModuleType) -> None:
    model, error = random_model(), MemoryError("the fifth pass")
    fed = []

    def fail(_: object, args: tuple[Tensor]) -> None:
        fed.append(args)
        if len(fed) == 5:
            raise error

    model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        impl.write_on(model, torch.zeros(1, 9, dtype=torch.long), 9, 4)
    assert model.context == 32, f"model.context is {model.context} after a failure, must be 32"


@pytest.mark.ex11_5
@pytest.mark.parametrize("by", [-20, 0, 3, 900])
def test_moved_keys_are_those_of_the_same_text_further_on(impl: ModuleType, by: int) -> None:
    model, layers = random_model(), []
    model.context = math.inf
    ids = torch.randint(90, (2, 6), generator=torch.Generator().manual_seed(2))
    for start in (20, 20 + by):
        cache = KVCache()
        cache.positions = lambda T, start=start: start + torch.arange(T)
        model(ids, cache)
        layers.append(cache.layers)
    axes = ("keys or values", "row", "head", "token", "number")
    for layer, (kv, expected) in enumerate(zip(*layers, strict=True)):
        found = call(impl.moved, kv, by, SPEED, returns="float32 (2, 2, 2, 6, 12)")
        assert_close(found, expected, f"layer {layer}, by {by}", axes, 2e-3)
        found = call(impl.moved, kv.bfloat16(), by, SPEED, returns="bfloat16 (2, 2, 2, 6, 12)")
        assert_close(found, expected, f"layer {layer}, by {by}, in bfloat16", axes, 0.05)
