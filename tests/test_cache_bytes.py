"""Bytes by a config.json: those of transformers' caches, of ours, and of models by their defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache_bytes import KNOWN_MODELS, layer_of, layers_of, main
from hybrid_kv_cache import KINDS
from support.files import read_json
from tests.helpers import Ran, refused, run
from tests.test_hybrid import IDS, hybrid

T = IDS.size(1)
TINY = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 60}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
TINY |= {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
WINDOW = {"sliding_window": 8, "head_dim": 16}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
STATE = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
STATE |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MORE = {"llama": {}, "gemma3_text": WINDOW, "gpt_oss": WINDOW, "qwen3_next": STATE}
MORE["deepseek_v3"] = LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 6}


@pytest.mark.parametrize("name", MORE)
def test_bytes_are_those_of_transformers_cache(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    content = {"model_type": name} | TINY | MORE[name]
    config = transformers.AutoConfig.for_model(**content)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().requires_grad_(False)
    cache = model(IDS[:1]).past_key_values
    for layer, held in zip(layers_of(content, name, itemsize=2), cache.layers, strict=True):
        expected = layer.nbytes(T)
        if layer.kind == "window 8":
            expected -= layer.token  # the one that leaves the window with the next token
        if layer.kind == "state":
            expected += 2 * 3 * 4 * 16  # one more input of the convolution
            tensors = [held.conv_states[0], held.recurrent_states[0]]
        else:
            tensors = [held.keys, held.values]
        assert sum(tensor.nbytes for tensor in tensors) == expected, layer


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_our_cache(kind: str) -> None:
    public = {"window": "sliding_attention", "state": "linear_attention"}.get(kind)
    sizes = TINY | WINDOW | STATE | (LATENT if kind == "latent" else {})
    layer, model = layer_of(public or "full_attention", sizes, itemsize=4), hybrid(kind)
    cache = model.new_cache()
    model(IDS, cache)
    spare = layer.token if kind == "window" else 0  # a ring has one slot more
    assert cache.nbytes == len(IDS) * (layer.nbytes(T) + spare)


@pytest.mark.parametrize(
    ("name", "numbers"), [("gpt-oss 120B", 1024), ("DeepSeek-V3", 40960), ("Qwen3-Next", 1024)]
)
def test_known_sizes_are_transformers_defaults(name: str, numbers: int) -> None:
    pytest.importorskip("transformers")
    given = read_json(KNOWN_MODELS)[name]["config"]
    defaults = {"model_type": given["model_type"], "num_hidden_layers": given["num_hidden_layers"]}
    assert layers_of(given, name, 1) == layers_of(defaults, name, 1)
    assert {layer.full_token for layer in layers_of(given, name, 1)} == {numbers}


def test_a_text_model_inside_is_read_and_what_is_not_known_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def bytes_of(model_type: str, **content: Any) -> Ran:
        content["model_type"] = model_type
        (tmp_path / "config.json").write_text(json.dumps(content), "utf-8")
        return run(main, tmp_path, "--tokens", "5000", "--dtype", "float8")

    text_config = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    MB = 2 * 4 * 256 * (29 * 1024 + 5 * 5000) / 1e6
    assert bytes_of("gemma3", text_config=text_config).out.endswith(f"{MB:.1f}\n")
    refused(bytes_of("gemma3", text_config={}), "lacks num_hidden_layers")
    for model_type, culprit in {
        "llama4_text": "chunked_attention",
        "jamba": "needs 'linear_key_head_dim'",
        "t5gemma": "is_encoder_decoder",
        "mimo_v2_flash": "mimo_v2_flash keeps other sizes",
        "unheard_of": "unheard_of",
    }.items():
        refused(bytes_of(model_type, num_hidden_layers=8), culprit)
