"""The loader's products: equal to the lectures' for any number of threads, and those of half precision."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from formats import products
from formats.products import divided_product, multiply, order_for_decoding
from gpt_bounded_cache import BCT, BCTConfig
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama, LlamaConfig
from tests.test_equivalence import assert_close
from tests.test_kv_cache import ids_of

SIZES = {"vocab_size": 97, "n_ctx": 64, "n_layer": 2, "n_head": 4, "n_embd": 48}
CONFIGS = {
    GPT: GPTConfig(**SIZES),
    Llama: LlamaConfig(**SIZES, n_kv_head=2, n_inner=96, tied=False),
    BCT: BCTConfig(**SIZES, slots=8),
}


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs are divided on any processor, and in the smallest matrix."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(products, "mkl_divides_products", lambda: False)
    monkeypatch.setattr(products, "LEAST_NUMBERS", 1)
    yield
    torch.set_num_threads(threads)


def new_model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind(CONFIGS[kind]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_a_divided_product_is_the_product(threads: int) -> None:
    """Of outputs that the threads divide and of those that they don't, fewer than threads among them."""
    for n_rows, n_out in ((1, 48), (1, 97), (5, 97), (8, 2)):
        rows, weight = torch.randn(n_rows, 20), torch.randn(20, n_out)
        assert_close(divided_product(rows, weight, threads), rows @ weight, torch.float32)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("shape", [(20,), (1, 1, 20), (3, 4, 20), (130, 20)])
def test_a_number_of_threads_may_change_later(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(20, 97), torch.randn(97)
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        assert_close(multiply(x, weight, bias), x @ weight + bias, torch.float32)


@torch.no_grad()
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_divided_products_writes_the_lectures_text(kind: type[nn.Module]) -> None:
    lecture, ours = new_model(kind), order_for_decoding(new_model(kind))
    cache = BCT.new_cache if kind is BCT else KVCache
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for batch in (1, 5):
            ids = ids_of(batch, 9)
            assert_close(ours(ids, cache()), lecture(ids, cache()), torch.float32)
            expected = torch.cat([*generate(lecture, ids, 12, cache=cache())], 1)
            assert torch.equal(torch.cat([*generate(ours, ids, 12, cache=cache())], 1), expected)


@pytest.mark.usefixtures("divided")
def test_gradients_go_through_a_divided_product() -> None:
    torch.set_num_threads(2)
    lecture, ours = new_model(GPT), order_for_decoding(new_model(GPT))
    for model in (lecture, ours):
        model(ids_of(2, 9)).square().mean().backward()
    for parameter, expected in zip(ours.parameters(), lecture.parameters(), strict=True):
        assert_close(parameter.grad, expected.grad, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_keep_their_names_and_shapes(kind: type[nn.Module], dtype: torch.dtype) -> None:
    lecture = new_model(kind).to(dtype)
    ours = order_for_decoding(order_for_decoding(new_model(kind).to(dtype)))  # twice is once
    assert isinstance(ours, kind) and type(ours).__name__ == kind.__name__
    assert not any(module.training for module in ours.modules())
    named = dict(ours.named_parameters())
    assert [*named] == [name for name, _ in lecture.named_parameters()]
    for name, parameter in lecture.named_parameters():
        assert torch.equal(named[name], parameter), name
    assert sum(p.untyped_storage().nbytes() for p in named.values()) == sum(
        p.nbytes for p in named.values()
    )
