"""Chapter 11: rotations that know only distances, frequencies, a loader's join, and a window that never reads twice."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import llama_kv_cache
from chapters.checking import assert_close, assert_like, assert_same
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import generate
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
SCALED = (32.0, 1.0, 4.0, 8192)  # of Llama 3.2


def random_model() -> Llama:
    torch.manual_seed(0)
    model = Llama(CONFIG).eval()
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
    speed = impl.frequencies(head_dim, theta)
    expected = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    assert_close(speed, expected, f"heads of {head_dim}, theta {theta:g}", ("pair",))
    assert speed.dtype == torch.float32, f"frequencies are {speed.dtype}, must be torch.float32"


@pytest.mark.ex11_1
def test_stage_2_pairs_are_of_two_halves(impl: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0, 0.0, 0.0])[None, None, None]
    rotated = impl.rotate(x, torch.tensor([1]), torch.tensor([math.pi / 2, 0.0]))
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0])[None, None, None]
    assert_close(
        rotated,
        expected,
        "(1, 2, 0, 0), its first pair rotated by a quarter",
        ("", "", "", "number"),
    )
    x, pos = randn(2, 3, 7, 12), torch.tensor([0, 1, 5, 6, 31, 1000, 20_000])
    rope = rotation(pos, CONFIG)
    expected = llama_kv_cache.rotate(x, rope)
    speed = torch.tensor([500.0 ** (-2 * i / 12) for i in range(6)])
    found = impl.rotate(x, pos, speed)
    assert_close(
        found, expected, "against llama_kv_cache.py", ("row", "head", "token", "number"), 2e-3
    )


@pytest.mark.ex11_1
def test_stage_2_a_score_knows_the_distance_only(impl: ModuleType) -> None:
    q, k = randn(1, 1, 1, 12), randn(1, 1, 1, 12, seed=1)
    speed = torch.tensor([500.0 ** (-2 * i / 12) for i in range(6)])

    def score(at: int, key_at: int) -> float:
        rotated = [impl.rotate(x, torch.tensor([pos]), speed) for x, pos in ((q, at), (k, key_at))]
        return float((rotated[0] * rotated[1]).sum())

    for at in (9, 500, 4000):
        found, expected = score(at, at - 7), score(7, 0)
        assert found == pytest.approx(expected, abs=2e-3), (
            f"a query at {at}, a key 7 before it: score {found:.4f}, must be that of 7 and 0, {expected:.4f}"
        )
    assert abs(score(8, 0) - score(7, 0)) > 0.05, "another distance, and the same score"


@pytest.mark.ex11_1
def test_stage_2_half_precision_changes_the_numbers_and_not_the_positions(impl: ModuleType) -> None:
    x, speed = randn(1, 1, 2, 12), torch.tensor([500.0 ** (-2 * i / 12) for i in range(6)])
    for dtype, first in ((torch.bfloat16, 256), (torch.float16, 2048)):
        pos, name = torch.tensor([first, first + 1]), str(dtype).removeprefix("torch.")
        found = impl.rotate(x.to(dtype), pos, speed)
        assert found.dtype == dtype, f"{name} in, {found.dtype} out"
        expected = impl.rotate(x.to(dtype).float(), pos, speed)
        what = f"in {name}, positions {first} and {first + 1}"
        assert_close(found, expected, what, ("row", "head", "token"), 0.02)
    wide = x.double() / 3
    found = impl.rotate(wide, torch.tensor([0, 0]), speed)
    assert found.dtype == torch.float64, f"float64 in, {found.dtype} out"
    assert torch.equal(found, wide), (
        f"float64 at position 0, where nothing is rotated: off by {float((found - wide).abs().max()):.1e}"
    )


def on_meta(call: Callable[[], Tensor], like: Tensor, what: str) -> None:
    """Fail unless a call computes on meta, a device that computes nothing, as all that it is given."""
    try:
        assert_like(call(), like, what)
    except RuntimeError as error:
        if str(error).startswith("exercise "):
            raise
        pytest.fail(
            f"{what}: all is on another device than the CPU, and something else isn't: {error}"
        )


@pytest.mark.ex11_1
def test_stage_2_it_rotates_on_any_device(impl: ModuleType) -> None:
    x, pos, speed = (torch.ones(shape, device="meta") for shape in ((1, 2, 3, 8), (3,), (4,)))
    on_meta(lambda: impl.rotate(x, pos.long(), speed), x, "the rotated x")


@pytest.mark.ex11_2
@pytest.mark.parametrize("scaling", [SCALED, (8.0, 2.0, 32.0, 2048)])
def test_llama_3s_frequencies(impl: ModuleType, scaling: tuple[float, float, float, int]) -> None:
    factor, low, high, n_ctx = scaling
    speed = torch.tensor([500_000.0 ** (-2 * i / 64) for i in range(32)])
    found = impl.slowed(speed.clone(), *scaling)
    rounds = n_ctx * speed / (2 * math.pi)
    for i in range(32):
        about = f"pair {i} goes round {rounds[i]:.2f} times in {n_ctx:,} tokens: its speed is {found[i]:.3g}"
        if rounds[i] >= high:
            assert found[i] == pytest.approx(float(speed[i]), rel=1e-5), (
                f"{about}, must stay {speed[i]:.3g}"
            )
        elif rounds[i] <= low:
            slow = float(speed[i] / factor)
            assert found[i] == pytest.approx(slow, rel=1e-5), (
                f"{about}, must be {slow:.3g}, divided by {factor:g}"
            )
        else:
            share = (rounds[i] - low) / (high - low)
            mixed = float(speed[i] * share + speed[i] / factor * (1 - share))
            assert found[i] == pytest.approx(mixed, rel=1e-5), (
                f"{about}, must be {mixed:.3g}, a mixture"
            )


@pytest.mark.ex11_2
def test_frequencies_are_those_of_lecture_4(impl: ModuleType) -> None:
    config = LlamaConfig(head_dim=64, rope_theta=500_000.0, rope_scaling=SCALED)
    sines = rotation(torch.tensor([1]), config)[1][0, 0, 32:]  # of one token's angles
    speed = torch.tensor([500_000.0 ** (-2 * i / 64) for i in range(32)])
    given = speed.clone()
    found = impl.slowed(given, *SCALED)
    assert_close(found.sin(), sines, "sines of position 1", ("pair",), 1e-5)
    assert torch.equal(given, speed), "the frequencies that were given have changed"


def public_layer(seed: int = 0) -> dict[str, Tensor]:
    """A layer's attention as files have it: 4 heads of queries, 2 of keys and values, of 12; width 40."""
    sizes = {"q": (48, 40), "k": (24, 40), "v": (24, 40), "o": (40, 48)}
    names = {part: f"model.layers.5.self_attn.{part}_proj.weight" for part in sizes}
    return {names[part]: randn(*sizes[part], seed=seed + i) for i, part in enumerate(sizes)}


@pytest.mark.ex11_3
def test_the_joined_matrix_gives_what_the_parts_give(impl: ModuleType) -> None:
    tensors, x = public_layer(), randn(1, 3, 40, seed=9)
    found = impl.joined(tensors, 5, (4, 2), 12)
    assert {*found} == {"c_attn", "c_proj"}, f"names {sorted(found)}, must be c_attn and c_proj"
    assert_close(
        found["c_proj"],
        tensors["model.layers.5.self_attn.o_proj.weight"].t(),
        "c_proj",
        ("in", "out"),
    )
    parts = [x @ tensors[f"model.layers.5.self_attn.{part}_proj.weight"].t() for part in "qkv"]
    assert_close(
        x @ found["c_attn"],
        torch.cat(parts, -1),
        "x @ c_attn: q, k, v side by side",
        ("", "token", "column"),
    )
    attention = random_model().h[0].attn
    attention.c_attn.weight.data = found["c_attn"]
    for made, part, name in zip(attention.project(x), parts, "qkv", strict=True):
        expected = part.unflatten(-1, (-1, 12)).transpose(1, 2)
        assert_close(
            made, expected, f"Attention.project: {name}", ("row", "head", "token", "number")
        )


@pytest.mark.ex11_3
def test_a_layer_of_another_shape_and_dtype(impl: ModuleType) -> None:
    """One head of keys and values for three of queries, of 8; width 20; layer 0."""
    sizes = {"q": (24, 20), "k": (8, 20), "v": (8, 20), "o": (20, 24)}
    tensors = {
        f"model.layers.0.self_attn.{part}_proj.weight": randn(*size).bfloat16()
        for part, size in sizes.items()
    }
    given = {**tensors}
    found = impl.joined(tensors, 0, (3, 1), 8)
    assert all(tensors.get(name) is x for name, x in given.items()), (
        "the tensors that were given are the caller's"
    )
    for name, shape in (("c_attn", (20, 40)), ("c_proj", (24, 20))):
        assert found[name].shape == shape, f"{name}: shape {tuple(found[name].shape)}, not {shape}"
        assert_like(found[name], tensors["model.layers.0.self_attn.q_proj.weight"], name)


def refusal(impl: ModuleType, tensors: dict[str, Tensor], what: str) -> str:
    """Return the words with which a layer's matrices are refused."""
    try:
        impl.joined(tensors, 5, (4, 2), 12)
    except ValueError as error:
        return str(error)
    pytest.fail(f"{what}: must be a ValueError")


@pytest.mark.ex11_3
@pytest.mark.parametrize("wrong", ["q", "k", "v", "o"])
def test_a_matrix_of_another_shape_is_refused(impl: ModuleType, wrong: str) -> None:
    tensors = public_layer()
    name = f"model.layers.5.self_attn.{wrong}_proj.weight"
    right = tuple(tensors[name].shape)
    tensors[name] = tensors[name][:-12] if wrong != "o" else tensors[name][:, :-12]
    shape = tuple(tensors[name].shape)
    said = refusal(impl, tensors, f"{wrong} of shape {shape}")
    assert name in said, f"{said!r} doesn't name {name}"
    for each in (shape, right):
        assert str(each) in said, f"{said!r} doesn't say both shapes, {shape} and {right}"


@pytest.mark.ex11_3
def test_swapped_matrices_are_refused(impl: ModuleType) -> None:
    """The joined matrix would have the right shape."""
    tensors = public_layer()
    q, k = (f"model.layers.5.self_attn.{part}_proj.weight" for part in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]
    refusal(impl, tensors, "q in k's place, and k in q's")


@pytest.mark.ex11_4
@pytest.mark.parametrize("window", [1, 2, 7, 16, 200])
def test_a_window_goes_on_past_the_context(impl: ModuleType, window: int) -> None:
    model, fed = random_model(), []
    model.context = 40  # as somebody has set it: not the model's n_ctx, 32
    ids = torch.randint(90, (1, 9), generator=torch.Generator().manual_seed(1))
    contexts: set[float] = set()

    def look(model: Llama, args: tuple[Tensor, ...]) -> None:
        fed.append(args[0].size(1))
        contexts.add(model.context)

    hook = model.register_forward_pre_hook(look)
    found = impl.write_on(model, ids, 60, window)
    hook.remove()
    assert contexts == {math.inf}, f"model.context is {contexts} in the passes, must be inf"
    assert_same(fed, [1] * (9 + 60 - 1), "tokens fed, pass by pass: each once, the last one not")
    assert model.context == 40, f"model.context is {model.context} afterwards, must be 40 as before"
    model.context = math.inf
    cache = SlidingWindowCache(window)
    expected = [int(token) for token in generate(model, ids, 60, cache=cache)]
    assert_same(found, expected, f"60 tokens through a window of {window}, a context of 40")


@pytest.mark.ex11_4
def test_the_context_is_put_back_after_a_failure(impl: ModuleType) -> None:
    model = random_model()
    model.context = 24

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model.h[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        impl.write_on(model, torch.tensor([[1, 2, 3]]), 5, 4)
    assert model.context == 24, f"model.context is {model.context} after a failure, must be 24"


@pytest.mark.ex11_5
@pytest.mark.parametrize("by", [-20, 0, 3, 900])
def test_moved_keys_are_those_of_the_same_text_further_on(impl: ModuleType, by: int) -> None:
    model, ids = (
        random_model(),
        torch.randint(90, (2, 6), generator=torch.Generator().manual_seed(2)),
    )
    model.context = math.inf
    speed = torch.tensor([500.0 ** (-2 * i / 12) for i in range(6)])
    caches = {}
    for start in (20, 20 + by):
        cache = caches[start] = Elsewhere(start)
        model(ids, cache)
    for layer, kv in enumerate(caches[20].layers):
        given = kv.clone()
        found = impl.moved(kv, by, speed)
        axes = ("keys or values", "row", "head", "token", "number")
        assert_close(found, caches[20 + by].layers[layer], f"layer {layer}, by {by}", axes, 2e-3)
        assert torch.equal(kv, given), "the cache itself has changed"
    half = kv.bfloat16()
    assert_like(impl.moved(half, by, speed), half, "moved keys and values of bfloat16")
    away = kv.to("meta")
    on_meta(lambda: impl.moved(away, by, speed.to("meta")), away, "moved keys and values")


class Elsewhere(llama_kv_cache.KVCache):
    """A cache of a text that begins at another position."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def positions(self, T: int) -> Tensor:
        return self.start + len(self) + torch.arange(T)
