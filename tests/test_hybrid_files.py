"""Folders of Gemma 3, Youtu, DeepSeek-V3 and of Llamas with windows, as transformers writes them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_kv_cache
import llama_kv_cache
import load_gpt2_weights as loader
from formats.configs import read_config
from hybrid_kv_cache import Hybrid, generate
from tests.helpers import ROOT, random_llama, run
from tests.test_hybrid import FEEDINGS, close, fed
from tests.test_llama import real_form

pytest.importorskip("transformers")
SIZES = {
    "max_position_embeddings": 128,
    "head_dim": 16,
    "hidden_size": 32,
    "initializer_range": 0.2,
}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
LATENT = {
    "head_dim": 8,  # which transformers rotates
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "rope_parameters": DEFAULT,
}
GEMMA = {
    "sliding_window": 8,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": DEFAULT,
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
    },
}
WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
MODELS = {
    "Gemma3": GEMMA,
    "DeepseekV3": LATENT | {"q_lora_rank": None, "tie_word_embeddings": False},
    "Youtu": LATENT | {"q_lora_rank": 20},
    "Mistral": {"sliding_window": 8},
    "Qwen2": WINDOWS,
    "Qwen3": WINDOWS,
}
IDS = torch.arange(80).view(2, 40) * 7 % 60


def written(folder: Path, kind: str) -> Any:
    """Write a random model as transformers does, with the pocket models' tokenizer; return it."""
    model = random_llama(kind, **SIZES | MODELS[kind])
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.2, 1.0)
    model.save_pretrained(folder)
    shutil.copy(ROOT / "pocket" / "teacher" / "tokenizer.tiktoken", folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    [
        "Gemma3",
        "DeepseekV3",
        "Qwen3",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Youtu", "Mistral", "Qwen2")),
    ],
)
def test_a_folder_equals_transformers(kind: str, tmp_path: Path) -> None:
    theirs = written(tmp_path, kind)
    model = loader.load_model(str(tmp_path))
    assert isinstance(model, Hybrid)
    expected = theirs(IDS).logits
    close(model(IDS), expected)
    for lengths in FEEDINGS:
        close(fed(model, IDS, lengths, model.new_cache()), expected)
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(IDS)}
    text = theirs.generate(IDS, max_new_tokens=20, pad_token_id=0, **options)
    assert torch.equal(torch.cat([IDS, *generate(model, IDS, 20)], dim=1), text)
    half = loader.load_model(str(tmp_path), dtype=torch.bfloat16)
    error = (theirs.bfloat16()(IDS).logits - expected).norm()
    for lengths in FEEDINGS:
        assert (fed(half, IDS, lengths, half.new_cache()) - expected).norm() < 1.2 * error
    twin = loader.load_model(f"{tmp_path}:int4").h[0].mlp.c_fc.weight
    assert len(twin[:, 0].unique()) <= 16


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3"])
def test_an_older_file_is_read(kind: str, tmp_path: Path) -> None:
    """Scaling, theta and the kinds of layers stand at other keys."""
    theirs = written(tmp_path, kind)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["layer_types"]
    if kind == "Gemma3":
        del content["rope_parameters"]
        content |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e3}
        content |= {"sliding_window_pattern": 2, "rope_local_base_freq": 100}
    path.write_text(json.dumps(content))
    close(loader.load_model(str(tmp_path))(IDS), theirs(IDS).logits)


def test_a_control_token_may_have_no_embedding(tmp_path: Path) -> None:
    """Gemma 3's models for text have the token of an image."""
    library = real_form("Qwen", tmp_path)
    library.add_special_tokens(["<image>"])
    library.save(str(tmp_path / "tokenizer.json"))
    ours = loader.load_tokenizer(str(tmp_path))
    assert ours.decode(ours.encode("an <image>")) == "an <image>"
    with pytest.raises(ValueError, match="has no embedding for the token '<image>'"):
        ours.encode("an <image>", allowed_special="all")


def test_scripts_write_verify_or_name_their_reader(tmp_path: Path) -> None:
    written(tmp_path, "Gemma3")
    words = ("--model", tmp_path, "--prompt", "One", "--max-new-tokens", 20)
    assert "KV cache" in run(hybrid_kv_cache.main, *words).out
    assert "the same: logits differ" in run(loader.main, tmp_path, "--verify").out
    said = run(llama_kv_cache.main, *words)
    assert said.code == 2 and "windows or latents: hybrid_kv_cache.py, lecture 5" in said.err


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("Gemma3", {"use_bidirectional_attention": True}, "bidirectional_attention is True"),
        (
            "Gemma3",
            {"query_pre_attn_scalar": 0},
            "query_scalar must be at least 1, got 0",
        ),
        ("Gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "only full_attention may",
        ),
        ("Gemma3", {"layer_types": ["full_attention"]}, "for each of 3 layers"),
        (
            "Gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
            "'factor' isn't known of type 'default'",
        ),
        ("Gemma3", {"sliding_window": None}, "layer_types is 'sliding_attention'"),
        ("Youtu", {"v_head_dim": 8}, "v_head_dim is 8, and only 16"),
        ("Youtu", {"rope_scaling": {"rope_type": "yarn", "factor": 40}}, "rope_type is 'yarn'"),
        ("Youtu", {"rope_interleave": False}, "rope_interleave is False"),
        ("Youtu", {"attention_bias": True}, "attention_bias is True"),
        (
            "DeepseekV3",
            {"first_k_dense_replace": 1},
            "first_k_dense_replace is 1, and must be at least num_hidden_layers, 3: experts",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    kind: str, fields: dict[str, Any], said: str
) -> None:
    content = json.loads(random_llama(kind, **SIZES | MODELS[kind]).config.to_json_string())
    with pytest.raises(ValueError, match=re.escape(said)):
        read_config(content | fields, "config.json")
