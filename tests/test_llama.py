"""llama_kv_cache.py and its loader: equal to transformers' Llama, from files in the exact public format."""

import importlib.util
import json
import math
import re
import shutil
import unicodedata
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import load_gpt2_weights as loader
from formats.chat import beginning_tokens
from formats.tokenizers import LLAMA3_PATTERN
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT
from llama_kv_cache import KVCache, Llama, generate, main
from load_gpt2_weights import load_model
from support.printing import stream
from tests.helpers import LLAMA3, random_llama, run
from tests.test_equivalence import assert_close, check_any_feeding
from tests.test_kv_cache import ids_of

pytest.importorskip("transformers")
GEOMETRIES: dict[str, dict[str, Any]] = {
    "2 to 1": {},
    "8 to 1, untied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "pruned widths": {"hidden_size": 44, "head_dim": 16, "intermediate_size": 55},
    "llama3 frequencies": {"rope_parameters": LLAMA3, "max_position_embeddings": 131_072},
    "1 to 1, theta and epsilon": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 12_345.0},
        "rms_norm_eps": 0.1,
    },
}
for kind in ("Qwen2", "Qwen3", "Mistral"):  # other types that llama_kv_cache.py serves
    window = {} if kind != "Mistral" else {"sliding_window": None}
    GEOMETRIES[kind] = {"kind": kind, "head_dim": 20} | window
    GEOMETRIES[f"{kind}, otherwise"] = {
        "kind": kind,
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 0.1,
        "sliding_window": 64,  # as long as the context
        "use_sliding_window": True,
        "max_window_layers": 1,
    }


def reference(folder: Path, shards: bool = False, **geometry: Any) -> Any:
    """Write a random model as transformers does, and return it."""
    model = random_llama(**{"vocab_size": 97, "max_position_embeddings": 64} | geometry)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return model


def changed(folder: Path, **fields: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


@torch.no_grad()
def assert_equal(model: Llama, expected: Any) -> None:
    ids, cache = ids_of(2, 40), KVCache()
    logits = expected(ids).logits
    assert_close(model(ids, cache), logits, torch.float32)
    assert cache.layers[0].size(2) == model.config.n_kv_head
    check_any_feeding(model, ids, logits, KVCache(), 0)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_model_equals_transformers(name: str, tmp_path: Path) -> None:
    expected = reference(tmp_path, **GEOMETRIES[name])
    model = load_model(str(tmp_path))
    assert isinstance(model, Llama)
    assert_equal(model, expected)
    ids = ids_of(1, 9)
    wanted = expected.generate(
        ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.cat([ids, *generate(model, ids, 30)], 1).tolist() == wanted.tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_bfloat16_is_as_near_as_transformers(kind: str, tmp_path: Path) -> None:
    expected, ids = reference(tmp_path, kind=kind), ids_of(2, 40)
    exact = expected(ids).logits
    cache = KVCache()
    ours = load_model(str(tmp_path), dtype=torch.bfloat16)(ids, cache)
    theirs = expected.bfloat16()(ids).logits
    assert ours.dtype == cache.layers[0].dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


def test_shards_and_a_configuration_of_an_older_version(tmp_path: Path) -> None:
    expected = reference(tmp_path, shards=True, rope_parameters=LLAMA3)
    assert len([*tmp_path.glob("model-*.safetensors")]) > 2
    rope = {**LLAMA3}
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "rope_parameters": None}
    assert_equal(load_model(changed(tmp_path, **old)), expected)


@torch.no_grad()
def test_a_window_goes_on_past_the_context_without_a_second_reading(tmp_path: Path) -> None:
    reference(tmp_path)
    model = load_model(str(tmp_path))
    model.context = math.inf
    fed = []
    model.register_forward_pre_hook(lambda _, args: fed.append(args[0].size(1)))
    ids, window = ids_of(1, 20), 16
    written = torch.cat([ids, *generate(model, ids, 100, cache=SlidingWindowCache(window))], 1)
    assert fed == [20] + [1] * 99  # 119 tokens in a context of 64
    # What 3 layers see through the window, as a text of its own: how far apart is all that counts.
    logits = model(written[:, :-1], SlidingWindowCache(window))[:, -1]
    alone = model(written[:, -1 - 3 * window : -1], SlidingWindowCache(window))[:, -1]
    assert (alone - logits).abs().max() <= 1e-4 * logits.abs().max()
    assert int(logits.argmax()) == written[0, -1]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_angles_are_exact_far_away_in_the_window(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """At position 50,000 a float32 angle is right to 0.004 radians; bfloat16 can't tell it from 49,920."""

    class Far(KVCache):
        def positions(self, T: int) -> torch.Tensor:
            return 50_000 + len(self) + torch.arange(T)

    reference(tmp_path, initializer_range=0.1)
    model, ids = load_model(str(tmp_path), dtype=dtype), ids_of(2, 40)
    near = model(ids)
    model.context, cache = math.inf, Far()
    far = torch.cat([model(part, cache) for part in ids.split(7, dim=1)], 1)
    assert (far - near).norm() <= tolerance * near.norm()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"sliding_window": 16}, "sliding_window is 16, and must be null or at least"),
        (
            {
                "model_type": "mistral",
                "max_position_embeddings": 8192,
                "layer_types": ["full_attention"],
            },
            "layer_types is 'full_attention', and only 'sliding_attention'",
        ),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True},
            "window is 8, and",
        ),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, "is 'sliding_attention'"),
        ({"model_type": "qwen3"}, "q_norm.weight is missing"),
        ({"model_type": "qwen2"}, "q_proj.bias is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "factor is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor must be a finite number"),
        (
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
            "4.0, must be less than high_freq_factor, 4.0",
        ),
        ({"num_key_value_heads": 3}, "n_kv_head is 3, n_head 4"),
        ({"num_hidden_layers": 10**6}, "n_layer is 1000000, but the number of tensors"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
    ],
)
def test_what_a_llama_cannot_represent_is_one_sentence(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    reference(tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        load_model(changed(tmp_path, **fields))


def test_a_file_of_another_kind_names_its_reader(tmp_path: Path) -> None:
    reference(tmp_path)
    with pytest.raises(ValueError, match=r"describes a Llama: llama_kv_cache\.py, lecture 4"):
        load_model(str(tmp_path), model_class=GPT)
    with pytest.raises(ValueError, match=r"describes a GPT-2: gpt_kv_cache\.py can read it"):
        load_model("pocket", model_class=Llama)
    assert isinstance(load_model("pocket"), GPT)


def test_swapped_heads_are_noticed(tmp_path: Path) -> None:
    """k's rows where q's belong: the joined matrix would have the right shape."""
    from safetensors.torch import load_file, save_file

    reference(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk"]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight has shape \(24, 48\)"
    ):
        load_model(str(tmp_path))


def test_a_gated_model_says_how_to_get_access(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def gated(*args: Any, **kwargs: Any) -> None:
        response = SimpleNamespace(headers={}, request=None)
        raise huggingface_hub.errors.GatedRepoError("gated", response=response)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", gated)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        OSError, match=r"is gated: accept its licence at https://huggingface\.co/meta-llama"
    ):
        loader.load_model("meta-llama/Llama-3.2-1B")


# --- Tokenizers -------------------------------------------------------------------------------------

TEXTS = [
    "Hello, I am",
    "a  1",
    "a   12 345\n\n  6",
    "x = [1, 22, 333]  # it's WE'LL'S\r\n\tdef f():\n        return 0",
    "naïve café — “quotes” … 東京 12٣٤ ½ Ⅷ",
    "emoji 👩‍👩‍👧‍👦 \u200b zero\u00a0width",
    " leading and trailing   ",
    "\n\n\n",
    "",
    "1" * 7 + " " * 5 + "2",
]
MORE_TEXTS = [
    "İstanbul ǅ ß ﬁ Ω≈ç√∫˜µ≤ ‖ а б в Ελλάδα हिन्दी ไทย 한국어 עברית العربية",  # noqa: RUF001
    "a\u0301 e\u0308\u0323 \u200d\ufeff \u2028\u2029\x85 \x00\x7f\ue000 𝔘𝔫𝔦 🏳️‍🌈🇩🇪",  # noqa: RUF001
    *("\n" * n + " \t" * n + " " * 3 * n + "x" for n in range(1, 7)),
]


# Where Qwen2 and later ones cut text: Llama 3's pattern, with each digit alone.
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


@cache
def trained_form(kind: str) -> tuple[str, list[str]]:
    """Train a tokenizer in the exact form of SmolLM2's, Llama 3's or Qwen's; return its file, and its end tokens."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    smol, qwen = kind == "SmolLM2", kind == "Qwen"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if kind == "Llama 3":
        headers = ["<|start_header_id|>", "<|end_header_id|>"]
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *headers]
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "Llama 3"))
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
    first = pre_tokenizers.Digits(individual_digits=True)
    if not smol:
        pattern = QWEN_PATTERN if qwen else LLAMA3_PATTERN
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=smol)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # SmolLM2 has no token for bytes that its texts didn't have
        vocab_size=900,
        show_progress=False,
        initial_alphabet=[] if smol else pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special if smol else [],
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if not smol:
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "Llama 3":
        begin = tokenizer.token_to_id(special[0])
        template = processors.TemplateProcessing(
            f"{special[0]} $A", special_tokens=[(special[0], begin)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer.to_str(), special[1:3]


def real_form(kind: str, folder: Path) -> Any:
    """Write a tokenizer in the exact form of a kind, and return it."""
    from tokenizers import Tokenizer

    text, end_tokens = trained_form(kind)
    (folder / "tokenizer.json").write_text(text)
    tokenizer = Tokenizer.from_str(text)
    ends = [tokenizer.token_to_id(token) for token in end_tokens]
    vocab_size = tokenizer.get_vocab_size()
    config = {"model_type": "llama", "vocab_size": vocab_size, "eos_token_id": ends[0]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tokenizer


def corpus() -> list[str]:
    """Texts of many kinds: this project's code and pages."""
    root = Path(loader.__file__).parent
    files = [root / "gpt_kv_cache.py", root / "README.md", root / "chapters" / "glossary.md"]
    return [file.read_text("utf-8") for file in files] + TEXTS


@pytest.mark.parametrize("kind", ["SmolLM2", "Llama 3", "Qwen"])
def test_ids_are_those_of_the_tokenizers_library(kind: str, tmp_path: Path) -> None:
    expected = real_form(kind, tmp_path)
    ours = loader.load_tokenizer(str(tmp_path))
    begin = [expected.token_to_id("<|begin_of_text|>")] if kind == "Llama 3" else []
    assert beginning_tokens(ours) == begin and len(ours.end_ids) == 2
    decomposed = [
        "cafe\u0301 <|im_end|>\u0338 \u212b",
        "\u1100\u1161\u11a8 n\u0303",
        "a\u0323\u0302",
    ]
    for text in TEXTS + decomposed * (kind != "SmolLM2"):
        ids = expected.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids, text
        if "<|" not in text:
            assert ours.encode_ordinary(text) == ids[len(begin) :]
            shown = unicodedata.normalize("NFC", text) if kind == "Qwen" else text
            assert ours.decode(ids[len(begin) :]) == shown
    special = "<|eot_id|>" if kind == "Llama 3" else "<|im_end|>"
    text = f"one{special}two"
    assert ours.encode(text, allowed_special="all") == expected.encode(text).ids


@pytest.fixture(scope="module")
def llama3_file() -> Path:
    """Llama 3's real vocabulary, in the package llama-models."""
    found = importlib.util.find_spec("llama_models")
    if found is None:
        pytest.skip("needs `pip install --no-deps llama-models`")
    return Path(found.submodule_search_locations[0]) / "llama3" / "tokenizer.model"


def write_llama3(folder: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 128_256, "eos_token_id": [128_001, 128_009]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_ids_are_those_of_the_tokenizers_library_on_llama_3s_real_vocabulary(
    llama3_file: Path, tmp_path: Path
) -> None:
    """From tokenizer.model, and from the tokenizer.json that transformers makes of it."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    write_llama3(tmp_path)
    shutil.copy(llama3_file, tmp_path)
    ours = loader.load_tokenizer(str(tmp_path))
    special = sorted(ours.added_ids, key=ours.added_ids.get)
    expected = TikTokenConverter(str(llama3_file), extra_special_tokens=special).converted()
    expected.save(str(tmp_path / "tokenizer.json"))
    again = loader.load_tokenizer(str(tmp_path))
    lines = [line for whole in corpus() for line in whole.splitlines(keepends=True)]
    paragraphs = [whole[at : at + 3_000] for whole in corpus() for at in (0, 10_000)]
    for text in [*TEXTS, *MORE_TEXTS, *lines, *paragraphs, "<|begin_of_text|>a<|eot_id|>\n\nb"]:
        ids = expected.encode(text).ids
        assert ours.encode(text, allowed_special="all") == [128_000, *ids], text
        assert again.encode(text, allowed_special="all") == ids, text
        assert ours.decode(ids) == text
    assert ours.n_vocab == 128_256 and ours.end_ids == (128_001, 128_009)
    for name, number in (("begin_of_text", 128_000), ("eot_id", 128_009), ("python_tag", 128_010)):
        assert ours.added_ids[f"<|{name}|>"] == number  # as the model card has them


def test_end_tokens_that_are_none_name_their_file(tmp_path: Path) -> None:
    real_form("SmolLM2", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [[1]]}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \[\[1\]\]"):
        loader.load_tokenizer(str(tmp_path))


def test_ids_without_a_token_are_shown_as_numbers(tmp_path: Path) -> None:
    """A model's vocabulary may be padded to more rows than its tokenizer has tokens."""
    real_form("SmolLM2", tmp_path)
    tokenizer = loader.load_tokenizer(changed(tmp_path, vocab_size=1024))
    ids = tokenizer.encode("naïve café")
    assert tokenizer.decode([*ids, 1023]) == "naïve café<|1023|>"


def test_a_text_ends_with_any_of_the_end_tokens(tmp_path: Path) -> None:
    real_form("SmolLM2", tmp_path)
    tokenizer = loader.load_tokenizer(str(tmp_path))
    written = [torch.tensor([[i]]) for i in (300, 301, tokenizer.end_ids[1], 302)]
    ids, _ = stream(iter(written), tokenizer)
    assert ids == [300, 301, tokenizer.end_ids[1]]


# --- The script -------------------------------------------------------------------------------------

CHATML = (  # of SmolLM2-135M-Instruct's tokenizer_config.json
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_script_compares_traces_and_asks(tmp_path: Path) -> None:
    vocab_size = real_form("SmolLM2", tmp_path).get_vocab_size()
    reference(tmp_path, vocab_size=vocab_size, eos_token_id=1)
    n = len(loader.load_tokenizer(str(tmp_path)).encode("One morning"))
    words = ["--model", tmp_path, "--max-new-tokens", 90]  # past the context of 64
    assert "Same tokens: yes" in run(main, "--compare", *words).out
    page = tmp_path / "page.html"
    run(main, "--trace", page, *words)
    assert f'"bytes":{2 * 3 * 2 * n * 12 * 4}' in page.read_text()  # keys and values, L, H, T, D
    asked = run(main, "--chat", "--prompt", "Why?", *words).out
    assert "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n" in asked
