"""Chapter 12: a cut in all layers or in none, latents read as they are, the delta rule, and how far back a text can go."""

import itertools
import random
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from chapters.calling import call, types_of
from chapters.checking import (
    Watch,
    assert_close,
    assert_refused,
    assert_right,
    assert_same,
    random_ids,
)
from hybrid_kv_cache import Hybrid, HybridConfig

KINDS = ("window", "state", "full", "latent")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_model(*kinds: str) -> Hybrid:
    """A small model with a layer of each of these kinds; a window is 8 tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_ctx": 128, "n_layer": len(kinds), "n_embd": 32, "n_inner": 48}
    heads = {"n_head": 4, "n_kv_head": 2, "head_dim": 16, "kv_rank": 24, "rope_dim": 8}
    model = Hybrid(HybridConfig(**sizes, **heads, kinds=kinds, window=8)).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model.requires_grad_(False)


def layered(impl: ModuleType, model: Hybrid) -> object:
    """A student's cache for a model."""
    return impl.Layered(block.new_cache() for block in model.h)


@pytest.mark.ex12_1
@pytest.mark.parametrize(
    ("question", "kinds"),
    [
        ("one token at a time", KINDS),
        ("pieces of any size", KINDS),
        ("a failed pass isn't counted", KINDS),
        ("tokens are counted", KINDS),
        ("a text is cut back anywhere, then goes on", ("full", "latent")),
        ("a draft of which two tokens stay", ("full", "window")),
    ],
)
def test_each_layer_has_a_cache_of_its_own(
    impl: ModuleType, question: str, kinds: tuple[str, ...]
) -> None:
    model = random_model(*kinds)
    assert_right(model, lambda: layered(impl, model), question)


@pytest.mark.ex12_1
@pytest.mark.parametrize(
    ("kinds", "n", "layer", "why"),
    [
        (("full", "window"), 12, 1, "the window has evicted"),
        (("latent", "full", "state"), 12, 2, "a state can't forget"),
        (("window", "full"), 21, 0, "no layer has read as many"),
        (("full", "latent"), -1, 0, "no text has fewer than 0"),
    ],
)
def test_what_a_layer_refuses_happens_in_none(
    impl: ModuleType, kinds: tuple[str, ...], n: int, layer: int, why: str
) -> None:
    model, ids = random_model(*kinds), random_ids(2, 30)
    cache = layered(impl, model)
    model(ids[:, :20], cache)
    what = f"layers {', '.join(kinds)}; 20 tokens read, {why}, so truncate({n})"
    assert_refused(lambda: cache.truncate(n), what, layer)
    lengths = [len(held) for held in (cache, *cache.layers)]
    assert_same(lengths, [20] * len(lengths), f"{what}; tokens in all, then in each layer")
    cache.truncate(20)  # all of them: that any layer can
    found, expected = model(ids[:, 20:], cache), model(ids)[:, 20:]
    assert_close(found, expected, f"{what}; then 10 more", ("row", "token", "logit"))


def expanded(
    q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, W_k: Tensor, W_v: Tensor
) -> Tensor:
    """What one token's queries read, of keys and values that are made."""
    read = []
    for head in range(len(q)):
        keys = torch.cat([latent @ W_k[head], k_rope], dim=1)  # (S, D + E)
        query = torch.cat([q[head], q_rope[head]])
        weights = (keys @ query / len(query) ** 0.5).softmax(dim=0)
        read.append(weights @ (latent @ W_v[head]))
    return torch.stack(read)


@pytest.mark.ex12_2
@pytest.mark.parametrize(("S", "scale"), [(200, 1), (1, 1), (200, 300)])
def test_latents_are_read_as_they_are(impl: ModuleType, S: int, scale: float) -> None:
    H, D, R, E = 4, 16, 24, 6
    shapes = [(H, D), (H, E), (S, R), (S, E), (H, R, D), (H, R, D)]
    given = [randn(*shape, seed=seed).double() for seed, shape in enumerate(shapes)]
    given[0] *= scale
    with Watch() as watch, FlopCounterMode(display=False) as counter:
        found = call(impl.absorbed, *given, returns="float64 (4, 16)")
    what = f"{H} heads of {D}, {S} latents of {R}, rotated keys of {E}, queries times {scale}"
    assert_close(found, expanded(*given), what, ("head", "number"))
    products, making = counter.get_total_flops() // 2, S * H * R * D  # a sum for each product
    message = f"{what}: {products:,} multiplications; all keys alone take {making:,}: make none"
    assert products < making or S == 1, message
    message = f"{what}: a tensor of {watch.largest:,} numbers; all keys have {S * H * D:,}"
    assert watch.largest < S * H * D or S == 1, message


@pytest.mark.ex12_3
def test_a_token_fades_then_corrects_then_reads(impl: ModuleType) -> None:
    key = torch.tensor([[1.0, 0.0]])
    state = torch.tensor([[8.0, 4.0], [2.0, 6.0]])  # answers the key with (8, 4)
    value = torch.tensor([[1.0, 2.0]])
    for decay, write, expected, why in [
        (0.5, 0.0, [[4, 2], [1, 3]], "decay 0.5, and nothing is written: the state fades"),
        (1.0, 1.0, [[1, 2], [2, 6]], "write 1: what stood at the key is replaced, not added to"),
        (1.0, 0.5, [[4.5, 3], [2, 6]], "write 0.5: half of the error is corrected"),
        (
            0.5,
            0.5,
            [[2.5, 2], [1, 3]],
            "decay 0.5, write 0.5: the answer has faded before it is corrected",
        ),
    ]:
        gates = torch.tensor([decay]), torch.tensor([write])
        types = "tuple[float32 (1, 2), float32 (2, 2)]"
        read, found = call(impl.delta_rule, state, key, key, value, *gates, returns=types)
        assert_close(found, torch.tensor(expected), f"{why}: the state", ("row", "column"))
        assert_close(read, found[:1], f"{why}: the query reads the new state", ("", "number"))


@pytest.mark.ex12_3
def test_tokens_come_one_after_another(impl: ModuleType) -> None:
    T, D = 100, 6
    q, k, v = randn(3, T, D).double()
    state = randn(D, D, seed=2).double()
    k, (decay, write) = k / k.norm(dim=1, keepdim=True), randn(2, T, seed=1).double().sigmoid()
    expected, now = [], state
    for t in range(T):  # state' = decay (1 - write k k^T) state + write k v^T
        erase = torch.eye(D).double() - write[t] * torch.outer(k[t], k[t])
        now = decay[t] * erase @ now + write[t] * torch.outer(k[t], v[t])
        expected.append(q[t] @ now)
    types = f"tuple[{types_of(q)}, {types_of(state)}]"
    read, last = call(impl.delta_rule, state, q, k, v, decay, write, returns=types)
    assert_close(
        read, torch.stack(expected), f"{T} tokens: what they read", ("token", "number"), 1e-9
    )
    assert_close(last, now, f"{T} tokens: the state after them", ("row", "column"), 1e-9)


def can_go_back(layer: object, n: int, cut: int) -> bool:
    """Whether a layer that has read n tokens holds all that the next one sees after `cut` of them."""
    if layer.kind in ("full", "latent") or cut in (0, n, *layer.saved):
        return True
    held, seen = range(n - layer.kept, n), range(max(0, cut - layer.window + 1), cut)
    return layer.kind == "window" and {*seen} <= {*held}


def cuts_of(layers: list[object], n: int) -> list[int]:
    """To how many of n tokens all layers can go back."""
    return [cut for cut in range(n + 1) if all(can_go_back(layer, n, cut) for layer in layers)]


@pytest.mark.ex12_4
def test_any_layers(impl: ModuleType) -> None:
    draw = random.Random(0)
    for n, k in itertools.product((*range(12, 20), 300, *range(1, 12)), (1, 2, 3)):
        layers = []
        for kind in draw.choices(["full", "latent", "window", "state"], k=k):
            window, more = draw.randint(2, 6), draw.choice([0, 1, 2, 20])
            saved = *draw.sample(range(1, n + 5), 2), *range(n, n + draw.randint(0, 4))
            if kind == "window":
                layers.append(impl.Layer(kind, window, window - 1 + more, saved))
            elif kind == "state":
                layers.append(impl.Layer(kind, saved=saved))
            else:
                layers.append(impl.Layer(kind))
        for layer in layers:
            can = [call(impl.can_cut, layer, n, cut, returns="bool") for cut in range(n + 1)]
            back = [cut for cut, yes in enumerate(can) if yes]
            assert_same(back, cuts_of([layer], n), f"can_cut, {layer}, {n} tokens read")
        what = f"{layers}, {n} tokens read"
        found = call(impl.cuts, layers, n, returns="list[int]")
        assert_same(found, cuts_of(layers, n), f"cuts, each exact in all layers, {what}")
        shared, prompt = draw.randint(0, n), n + draw.randint(0, 1)
        read = prompt - max(cut for cut in cuts_of(layers, n) if cut <= min(shared, prompt - 1))
        found = call(impl.read_again, layers, n, shared, prompt, returns="int")
        what += f"; a prompt of {prompt} shares {shared}, and its last token is read again"
        assert found == read, f"{what}: {found} in all, must be {read}"
        limit = draw.choice([0, 3, 30])
        drafted = limit
        while not {*range(n, n + drafted)} <= {*cuts_of(layers, n + drafted)}:
            drafted -= 1
        found = call(impl.most_drafted, layers, n, limit, returns="int")
        assert found == drafted, f"{what}; of {limit}, {found} may be drafted, must be {drafted}"
