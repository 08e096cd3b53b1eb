"""borrow/transformers_cache.py: generate() of transformers with our caches, beside its own and beside our generate()."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import CACHES, QuantizedCache, SmallNormCache
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache, generate
from hybrid_kv_cache import LayeredCache
from tests.helpers import process
from tests.test_borrow import (
    LATENT,
    LAYERS,
    SIZES,
    WINDOWS,
    copied,
    give_no_masks,
    small_config,
    tiny,
)
from tests.test_equivalence import assert_close

transformers = pytest.importorskip("transformers")
from borrow.adapter import Adapter  # noqa: E402
from borrow.transformers_cache import TransformersCache, argument_of, layered_cache  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "Qwen3": {"head_dim": 12},
    "Gemma3": {"sliding_window": 16, "layer_types": LAYERS, "head_dim": 8},
    "DiffLlama": {},  # whose attention is two calls for two halves of the values
    "Llama": {},
}
EXACT: list[Callable[[], Any]] = [
    KVCache,
    lambda: PreallocatedCache(128),
    lambda: SlidingWindowCache(128),
]
APPROXIMATE: dict[str, Callable[[], Any]] = {
    "4 bits": lambda: QuantizedCache(4),
    "sinks": lambda: SlidingWindowCache(20, 4),
    "norms": lambda: SmallNormCache(20, 10),
}


def written(model: Any, ids: Tensor, cache: Any = None, n: int = 16, **options: Any) -> Any:
    """What generate() writes, with its logits."""
    if cache is not None:
        options[argument_of(model)] = TransformersCache(cache, model)
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    return model.generate(ids, max_new_tokens=n, **options)


def same_text(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), torch.float32)


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: TransformersCache, **options: Any) -> Tensor:
    return model(ids, **{argument_of(model): cache}, **options).logits


@torch.no_grad()
def whole(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, use_cache=False, **options).logits


@pytest.mark.parametrize("name", MODELS)
def test_exact_caches_write_what_transformers_own_writes(name: str) -> None:
    model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 20))
    expected = written(model, ids)
    for new_cache in EXACT if name == "Llama" else EXACT[:1]:
        cache = new_cache()
        same_text(written(model, ids, cache), expected)
        assert len(cache) == 35 and len(cache.layers) == 2
    same_text(written(model, ids), expected)  # with its own cache, after ours
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_every_cache_writes_what_our_generate_writes_with_it(kind: str) -> None:
    ids, new_cache = torch.randint(1, 50, (2, 60)), APPROXIMATE[kind]
    got = written(tiny("Llama"), ids, new_cache())
    adapter, logits = Adapter(tiny("Llama")), []
    adapter.register_forward_hook(lambda *call: logits.append(call[-1][:, -1]))
    new = torch.cat([*generate(adapter, ids, 16, cache=new_cache())], 1)
    assert torch.equal(got.sequences[:, 60:], new)
    assert_close(torch.stack(got.logits), torch.stack(logits), torch.float32)


@pytest.mark.parametrize(("name", "usual"), [("Gemma3", "sdpa"), ("GPT2LMHeadModel", "eager")])
def test_texts_that_are_padded_on_the_left_are_exact_or_refused(name: str, usual: str) -> None:
    model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 20))
    model.set_attn_implementation(usual)
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    expected = written(model, ids, attention_mask=padding)
    same_text(written(model, ids, KVCache(), attention_mask=padding), expected)
    with pytest.raises(ValueError, match="padded on the left forget different tokens"):
        written(model, ids, SlidingWindowCache(10), attention_mask=padding)
    adapter = Adapter(model)
    adapter(ids, adapter.new_cache())
    same_text(written(model, ids, attention_mask=padding), expected)  # with its own cache


def test_a_window_is_a_window() -> None:
    """Beside a Mistral that has the same window, in every layer."""
    model, plain = tiny("Mistral", sliding_window=16), tiny("Mistral", sliding_window=None)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(1, 50, (2, 40))
    same_text(written(plain, ids, SlidingWindowCache(16)), written(model, ids))


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_with_windows_are_exact_whatever_their_cache_holds(name: str) -> None:
    model, ids = tiny(name, sliding_window=8, **WINDOWS[name]), torch.randint(1, 50, (2, 40))
    expected, layered, full = written(model, ids), layered_cache(model), KVCache()
    for cache in (layered, full, PreallocatedCache(128)):
        same_text(written(model, ids, cache), expected)
    assert layered.nbytes < 0.6 * full.nbytes
    with pytest.raises(ValueError, match=r"layer \d: can't keep 50 tokens of 55, 47 evicted"):
        TransformersCache(layered, model).crop(-5)
    with pytest.raises(ValueError, match="24 tokens in a layer with a window of 8: give layered"):
        written(model, ids, SlidingWindowCache(20, 4))


def test_a_window_is_masked_where_the_model_makes_no_masks() -> None:
    model, ids = tiny("Mistral", sliding_window=8), torch.randint(1, 50, (2, 20))
    expected = whole(model, ids)
    give_no_masks(model)
    for ours in (KVCache(), layered_cache(model)):
        cache = TransformersCache(ours, model)
        got = [read(model, part, cache) for part in ids.split([11, 8, 1], dim=1)]
        assert_close(torch.cat(got, 1), expected, torch.float32)


def masks() -> dict[str, Tensor]:
    """Masks (B or 1, H or 1, 10, 10) that aren't the causal triangle. In a first pass, 6 tokens are read."""
    causal = torch.ones(2, 4, 10, 10).tril().bool()
    prefix, packed, tree, hole, rows, heads = (causal.clone() for _ in range(6))
    prefix[..., :5, :5] = True  # sees both ways
    packed[..., 4:, :4] = False
    tree[..., 8, 7] = False  # two drafts, of which the last token sees both
    hole[..., 5:9, 2] = False
    rows[1, :, 4:, :4] = False
    heads[:, 1, 3:, 1] = False
    return {
        "prefix": prefix[:1, :1],
        "packed": packed[:, :1],
        "tree": tree[:1, :1],
        "hole": hole[:1, :1],
        "rows": rows[:, :1],
        "heads": heads,
        "causal": causal[:1, :1],
    }


@pytest.mark.parametrize("usual", ["sdpa", "eager"])
def test_a_mask_is_used_as_it_is_given(usual: str) -> None:
    model, ids = tiny("Llama"), torch.randint(1, 50, (2, 10))
    model.set_attn_implementation(usual)
    additive = {}
    for name, mask in masks().items():
        additive[name] = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    biases = torch.arange(10.0).expand(1, 1, 10, 10) / 5 + additive["causal"]
    given = [*additive.values(), biases, *(masks().values() if usual == "sdpa" else ())]
    for mask in given:
        expected = whole(model, ids, attention_mask=mask)
        for new_cache in EXACT:
            cache = TransformersCache(new_cache(), model)
            first = read(model, ids[:, :6], cache, attention_mask=mask[:, :, :6, :6])
            rest = read(model, ids[:, 6:], cache, attention_mask=mask[:, :, 6:])
            assert_close(torch.cat([first, rest], 1), expected, torch.float32)
    cache, causal = TransformersCache(SlidingWindowCache(4), model), additive["causal"]
    expected = read(model, ids, TransformersCache(SlidingWindowCache(4), model))
    for i in range(0, 10, 5):
        got = read(model, ids[:, i : i + 5], cache, attention_mask=causal[:, :, i : i + 5, : i + 5])
        assert_close(got, expected[:, i : i + 5], torch.float32)
    for mask, said in [
        (causal[..., :9], r"float32 \(1, 1, 10, 9\) isn't .* of shape \(2, 4, 10, 10\)"),
        (torch.zeros(1, 1, 10, 12), "isn't bool or floating of shape"),
        (torch.ones(1, 3, 10, 10), "isn't bool or floating of shape"),
        (causal.long(), "isn't bool or floating"),
    ]:
        with pytest.raises(ValueError, match=said):
            read(model, ids, TransformersCache(KVCache(), model), attention_mask=mask)
    with pytest.raises(ValueError, match="a mask of one's own needs all"):
        read(
            model,
            ids[:, :1],
            cache,
            attention_mask=torch.zeros(1, 1, 1, 11).index_fill(3, torch.tensor(2), -9.0),
        )


def test_an_image_sees_both_ways() -> None:
    text = SIZES | MODELS["Gemma3"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = sizes | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 49}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model, ids = (
        transformers.Gemma3ForConditionalGeneration(config).eval(),
        torch.arange(1, 15)[None],
    )
    ids[0, 3:7] = 49
    image = {"token_type_ids": (ids == 49).long(), "pixel_values": torch.randn(1, 3, 28, 28)}
    expected = whole(model, ids, **image)
    assert_close(
        read(model, ids, TransformersCache(KVCache(), model), **image), expected, torch.float32
    )


def test_assisted_generation_crops_what_can_be_cropped() -> None:
    ids = torch.randint(1, 50, (1, 20))
    for name in ("Llama", "Gemma3"):
        model, assistant = tiny(name, **MODELS[name]), tiny("Llama", num_hidden_layers=1)
        got = written(model, ids, KVCache(), n=8, assistant_model=assistant).sequences
        assert torch.equal(got, written(model, ids, n=8).sequences)
    with pytest.raises(ValueError, match=r"can't keep \d+ tokens of \d+, \d+ evicted"):
        written(tiny("Llama"), ids, SlidingWindowCache(10), assistant_model=assistant)


def test_tokens_and_rows_are_cut_copied_and_reordered() -> None:
    for name in ("Llama", "Gemma3"):
        model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 14))
        cache = TransformersCache(layered_cache(model), model)
        read(model, ids[:, :8], cache)
        cache.crop(-3)
        with pytest.raises(ValueError, match="can't keep -1 tokens of 5"):
            copy.deepcopy(cache).crop(-6)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 1, 0]))
        other, rows = copy.deepcopy(cache), ids[[1, 0, 0]]
        for each in (cache, other):
            assert_close(read(model, rows[:, 5:], each), whole(model, rows)[:, 5:], torch.float32)
        cache.reset()
        assert_close(read(model, ids, cache), whole(model, ids), torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_beams_are_transformers_beams_or_refused(name: str) -> None:
    model, ids = tiny(name, **MODELS[name]), torch.randint(1, 50, (2, 9))
    expected = written(model, ids, num_beams=3)
    for cache in (KVCache(), PreallocatedCache(128), layered_cache(model)):
        got = written(model, ids, cache, num_beams=3)
        assert torch.equal(got.sequences, expected.sequences)
    with pytest.raises(ValueError, match="beam search reorders rows, which QuantizedCache can't"):
        written(model, ids, QuantizedCache(4), num_beams=3)


# --- What is refused ----------------------------------------------------------------------------------


def test_models_of_one_configuration_have_caches_of_their_own() -> None:
    model, ids = tiny("Llama"), torch.randint(1, 50, (1, 20))
    other = type(model)(model.config).eval()
    caches = [TransformersCache(KVCache(), each) for each in (model, other)]
    for part in range(0, 20, 10):
        for each, cache in zip((model, other), caches, strict=True):
            got = read(each, ids[:, part : part + 10], cache)
            assert_close(got, whole(each, ids)[:, part : part + 10], torch.float32)
    with pytest.raises(ValueError, match="made for another model"):
        read(model, ids, caches[1])
    with pytest.raises(ValueError, match="call the model itself"):
        read(model.model, ids, caches[0])


REFUSED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("Mistral", {}, LayeredCache([KVCache()]), "a cache of 1 layers can't serve 2"),
    ("Llama", {}, KVCache, "is no cache: give an instance"),
    ("DeepseekV3", LATENT, KVCache(), "keys have 8 numbers and values 4"),
    ("BertLMHeadModel", {}, KVCache(), "BertLMHeadModel can't be served: logits differ"),
    ("Gemma2", {"sliding_window": 128, "head_dim": 8}, KVCache(), "its attention has softcap"),
    ("Bloom", {}, KVCache(), "its attention goes around transformers' interface"),
    (
        "Llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
        KVCache(),
        "rope_type dynamic can't be served: keys depend on what follows",
    ),
    ("GptOss", {"layer_types": LAYERS}, KVCache(), "its attention has s_aux"),
]


@pytest.mark.parametrize(("kind", "changes", "cache", "said"), REFUSED)
def test_what_cannot_be_served_is_refused_and_left_as_it_was(
    kind: str, changes: dict[str, Any], cache: Any, said: str
) -> None:
    model = tiny(kind, **changes)
    usual = model.config._attn_implementation
    with pytest.raises(ValueError, match=said) as error:
        TransformersCache(cache, model)
    assert "\n" not in str(error.value) and model.config._attn_implementation == usual
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.slow
def test_every_architecture_is_right_or_refused_in_a_sentence(capsys: Any) -> None:
    """All that transformers calls causal language models, as far as they can be made small by their usual fields."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    def in_generate(model: Any) -> None:
        same_text(written(model, ids, KVCache()), expected)

    def in_adapter(model: Any) -> None:
        assert_close(Adapter(model)(ids, KVCache()), whole(model, ids), torch.float32)

    results: Counter[str] = Counter()
    for config_class in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        try:
            torch.manual_seed(0)
            config, model_class = (
                small_config(config_class),
                MODEL_FOR_CAUSAL_LM_MAPPING[config_class],
            )
            with torch.device("meta"):
                if model_class(config).num_parameters() > 200_000:
                    continue
            model, ids = model_class(config).eval(), torch.randint(1, 50, (1, 12))
            expected = written(model, ids)
        except Exception:  # needs other fields, or is no model that generates
            continue
        for way in (in_generate, in_adapter):
            said = "right"
            try:
                way(model)
            except ValueError as error:
                said = str(error)
                assert len(said) <= 200 and "\n" not in said, said
            reason = said.rpartition(": ")[2].translate(dict.fromkeys(map(ord, "0123456789.")))
            results[f"{way.__name__}: {reason}"] += 1
    with capsys.disabled():
        for result, n in results.most_common():
            print(f"{n:4} {result}")
    assert results["in_generate: right"] >= 73 and results["in_adapter: right"] >= 70


@pytest.mark.slow
def test_a_bare_run_needs_only_the_files_that_are_named(tmp_path: Any) -> None:
    copied("generate", tmp_path)
    ran = process(sys.executable, "-m", "borrow.use_transformers", folder=tmp_path)
    assert ran.code == 0 and ran.out.count(" bytes\n") == len(CACHES), ran.err


@pytest.mark.parametrize("layer", [0, 1])
def test_an_attention_that_is_changed_afterwards_is_noticed(layer: int) -> None:
    model, ids = tiny("Llama"), torch.randint(1, 50, (1, 20))
    cache = TransformersCache(KVCache(), model)
    read(model, ids, cache)
    attention = model.model.layers[layer].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=f"{layer} layers have attended .* or was changed"):
        read(model, ids, cache)
    assert len(cache.ours) == 20
    model.set_attn_implementation("sdpa")
    attention.config = model.config
    written(model, ids, KVCache())
    assert len(model._forward_hooks) == 1
