"""borrow/transformers_cache.py: generate() of transformers with our caches, beside its own and beside our generate()."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import CACHES, QuantizedCache, SmallNormCache
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache, generate
from tests.helpers import process
from tests.test_borrow import LATENT, copied, tiny
from tests.test_equivalence import assert_close

transformers = pytest.importorskip("transformers")
from borrow.adapter import Adapter  # noqa: E402
from borrow.transformers_cache import TransformersCache, argument_of  # noqa: E402

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "GPT2": {},
    "Llama": {},
    "Qwen3": {"head_dim": 12},
    "Gemma3": {"sliding_window": 16, "layer_types": LAYERS, "num_hidden_layers": 4, "head_dim": 8},
    "DiffLlama": {},  # whose attention is one call for two halves of the values
}
EXACT: dict[str, Callable[[], Any]] = {
    "growing": KVCache,
    "preallocated": lambda: PreallocatedCache(128),
    "a window of the context": lambda: SlidingWindowCache(128),
}
APPROXIMATE: dict[str, Callable[[], Any]] = {
    "8 bits": lambda: QuantizedCache(8),
    "4 bits": lambda: QuantizedCache(4),
    "sinks": lambda: SlidingWindowCache(20, 4),
    "norms": lambda: SmallNormCache(20, 10),
}
each_model = pytest.mark.parametrize("name", MODELS)


def written(model: Any, ids: Tensor, cache: Any = None, n: int = 40, **options: Any) -> Any:
    """What generate() writes, with its logits."""
    if cache is not None:
        options[argument_of(model)] = TransformersCache(cache, model)
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    return model.generate(ids, max_new_tokens=n, **options)


@each_model
@pytest.mark.parametrize("kind", EXACT)
def test_exact_caches_write_what_transformers_own_writes(name: str, kind: str) -> None:
    model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 20))
    expected, cache = written(model, ids), EXACT[kind]()
    got = written(model, ids, cache)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), torch.float32)
    assert len(cache) == 59 and len(cache.layers) == (
        2 if name != "Gemma3" else LAYERS.count("full_attention")
    )
    again = written(model, ids)  # with its own cache, after ours
    assert_close(torch.stack(again.logits), torch.stack(expected.logits), torch.float32)


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_every_cache_writes_what_our_generate_writes_with_it(kind: str) -> None:
    ids, new_cache = torch.randint(1, 50, (2, 50)), APPROXIMATE[kind]
    got = written(tiny("Llama"), ids, new_cache())
    adapter, logits = Adapter(tiny("Llama")), []
    adapter.register_forward_hook(lambda *call: logits.append(call[-1][:, -1]))
    new = torch.cat([*generate(adapter, ids, 40, cache=new_cache())], 1)
    assert torch.equal(got.sequences[:, 50:], new)
    assert_close(torch.stack(got.logits), torch.stack(logits), torch.float32)


@pytest.mark.parametrize(("name", "usual"), [("Gemma3", "sdpa"), ("GPT2", "eager")])
def test_texts_that_are_padded_on_the_left_are_exact_or_refused(name: str, usual: str) -> None:
    model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 20))
    model.set_attn_implementation(usual)
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    expected = written(model, ids, attention_mask=padding)
    got = written(model, ids, KVCache(), attention_mask=padding)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), torch.float32)
    with pytest.raises(ValueError, match="padded on the left forget different tokens"):
        written(model, ids, SlidingWindowCache(10), attention_mask=padding)


def test_a_window_is_a_window() -> None:
    """Beside a Mistral that has the same window, in every layer."""
    model, plain = tiny("Mistral", sliding_window=16), tiny("Mistral", sliding_window=None)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(1, 50, (2, 40))
    expected, got = written(model, ids), written(plain, ids, SlidingWindowCache(16))
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), torch.float32)


def test_assisted_generation_crops_what_can_be_cropped() -> None:
    model, assistant = tiny("Llama"), tiny("Llama", num_hidden_layers=1)
    ids = torch.randint(1, 50, (1, 20))
    expected = written(model, ids).sequences
    for new_cache in (KVCache, lambda: PreallocatedCache(128)):
        got = written(model, ids, new_cache(), assistant_model=assistant)
        assert torch.equal(got.sequences, expected)
    with pytest.raises(ValueError, match=r"can't keep \d+ tokens of \d+, \d+ evicted"):
        written(model, ids, SlidingWindowCache(10), assistant_model=assistant)


# --- What is refused ----------------------------------------------------------------------------------


def changed_layer(model: Any, cache: TransformersCache) -> None:
    import copy

    attention = model.model.layers[1].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "sdpa"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model, cache: model.set_attn_implementation("sdpa"),
            "layer 0's attention is now 'sdpa'",
        ),
        (changed_layer, "layer 1's attention is now 'sdpa' instead of 'cached_llama_sdpa'"),
    ],
)
def test_an_attention_that_is_changed_afterwards_is_noticed(change: Callable, said: str) -> None:
    model, ids = tiny("Llama"), torch.randint(1, 50, (1, 20))
    ours = KVCache()
    cache = TransformersCache(ours, model)
    model(ids, **{argument_of(model): cache})
    change(model, cache)
    with pytest.raises(ValueError, match=said):
        model(ids, **{argument_of(model): cache})
    assert len(ours) == 20


@pytest.mark.parametrize(
    ("kind", "changes", "cache", "said"),
    [
        (
            "Mistral",
            {"sliding_window": 16},
            KVCache(),
            "all 2 layers have a window of 16, .* of 128",
        ),
        ("Llama", {}, KVCache, "is no cache: give an instance"),
        (
            "DeepseekV3",
            LATENT,
            KVCache(),
            "keys have 8 numbers and values 4",
        ),
        ("BertLMHeadModel", {}, KVCache(), "BertLMHeadModel can't be served"),
        ("Gemma2", {"sliding_window": 128, "head_dim": 8}, KVCache(), "its attention has softcap"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, KVCache(), "BloomForCausalLM can't be served"),
    ],
)
def test_what_cannot_be_served_is_refused_and_left_as_it_was(
    kind: str, changes: dict[str, Any], cache: Any, said: str
) -> None:
    model = tiny(kind, **changes)
    usual = model.config._attn_implementation
    with pytest.raises(ValueError, match=said) as error:
        TransformersCache(cache, model)
    assert "\n" not in str(error.value) and model.config._attn_implementation == usual


def test_a_call_of_an_inner_model_is_noticed() -> None:
    """It doesn't say when a pass begins and ends."""
    model, ids = tiny("Llama"), torch.randint(1, 50, (1, 20))
    cache = TransformersCache(KVCache(), model)
    with pytest.raises(ValueError, match="call the model itself"):
        model.model(ids, **{argument_of(model): cache})


def test_beams_and_another_models_cache_are_refused() -> None:
    model, ids = tiny("Llama"), torch.randint(1, 50, (1, 20))
    with pytest.raises(ValueError, match="beam search and .* reorder rows"):
        written(model, ids, KVCache(), num_beams=3)
    other = tiny("Llama")
    cache = TransformersCache(KVCache(), other)
    TransformersCache(KVCache(), model)
    with pytest.raises(ValueError, match="made for another model"):
        model(ids, **{argument_of(model): cache})


@pytest.mark.slow
def test_a_bare_run_needs_only_the_files_that_are_named(tmp_path: Any) -> None:
    copied("generate", tmp_path)
    ran = process(sys.executable, "-m", "borrow.use_transformers", folder=tmp_path)
    assert ran.code == 0 and ran.out.count(" bytes\n") == len(CACHES), ran.err
