"""Weights and tokenizers of GPT-2 and Llama by name or folder, for any of the model files.

`python load_gpt2_weights.py gpt2 --verify` downloads GPT-2 and compares its text with published continuations.
"""

from __future__ import annotations

import base64
import math
import pickle
import re
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from support.cli import ARTICLE
from support.conditions import random_model
from support.files import check_fields, read_json, said

RANDOM = "random:"  # and a size: an untrained model
HERE = Path(__file__).resolve().parent
VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
EXPECTED_OUTPUTS = HERE / "data" / "gpt2_expected_outputs.json"
END_OF_TEXT = "<|endoftext|>"
# Where GPT-2 cuts text before it merges bytes: the form with possessive quantifiers that tiktoken uses; same pieces.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
# The same after each digit has been cut off from all else: spaces that a digit follows end a piece.
DIGITS_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"""
)


class Checkpoint(NamedTuple):
    """A public checkpoint: Hugging Face repository, commit, and the file that holds the weights."""

    repo: str
    revision: str = "main"
    weights: str = "model.safetensors"


POCKET = {  # folders
    "pocket": "teacher",
    "pocket-student": "student",
    "pocket-student-alone": "student-alone",
    "pocket-student-prompt": "student-prompt",
    "pocket-student-dropout": "student-dropout",
    "pocket-bct": "bct",
    "pocket-rotary": "rotary",
    "pocket-llama": "llama",
}
INDEX = "model.safetensors.index.json"
ONE_FILE = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
)
SHARDED = (
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0",
)
PUBLIC = {
    "gpt2": Checkpoint("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": Checkpoint(
        "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"
    ),
    "gpt2-large": Checkpoint(
        "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"
    ),
    "gpt2-xl": Checkpoint("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
    "distilgpt2": Checkpoint("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa"),
    "microsoft/DialoGPT-small": Checkpoint(
        "microsoft/DialoGPT-small", "49c537161a457d5256512f9d2d38a87d81ae0f0e"
    ),
    "microsoft/DialoGPT-medium": Checkpoint(
        "microsoft/DialoGPT-medium", "7b40bb0f92c45fefa957d088000d8648e5c7fa33", "pytorch_model.bin"
    ),
    # From here on the hashes of the commits could not be established, so these follow their branch.
    "microsoft/DialoGPT-large": Checkpoint("microsoft/DialoGPT-large", weights="pytorch_model.bin"),
    **{name: Checkpoint(name) for name in ONE_FILE},
    **{name: Checkpoint(name, weights=INDEX) for name in SHARDED},
}
# What torch.load raises on damaged files, found by damaging them at random, and (UnpicklingError) if they hold code.
UNREADABLE = (
    RuntimeError,
    EOFError,
    OSError,
    pickle.UnpicklingError,
    struct.error,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRAINED = [name for name, folder in POCKET.items() if (HERE / "pocket" / folder).is_dir()]
OTHERS = {
    "pocket-bct": "gpt_bounded_cache.py --memory bct",
    "pocket-rotary": "projector.py",
}  # no GPT-2: their scripts
NAMES = ", ".join([*(name for name in TRAINED if name not in OTHERS), *PUBLIC]) + ", or a folder"
# What config.json may say about the things that our models have only one way of doing, by its model_type.
SUPPORTED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "quantization_config": (None,),
        "step": (True,),  # of a BCT: both gates, and slots that begin empty
        "forget": (True,),
        "learned_start": (False,),
    },
    "llama": {
        "hidden_act": ("silu",),
        "rms_norm_eps": (1e-5,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1.0,),
        "sliding_window": (None,),
        "quantization_config": (None,),
    },
}
NAMED = {"gpt2": "GPT-2", "llama": "Llama"}
KINDS_OF = {"bct": "gpt2", "rotary": "gpt2"}  # ours: a GPT-2 with something more
LLAMA_SIZES = {  # Hugging Face's name: LlamaConfig's
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_ctx",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "head_dim": "head_dim",
}
LLAMA_TENSORS = {  # our parameter: the tensors that it joins, matrices as (out, in)
    "wte": ("embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("norm",),
    "lm_head": ("lm_head",),
}


def load_model(
    name_or_path: str,
    *,
    model_class: type[nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the model of a known name or of a folder in Hugging Face format, in eval mode.
    "random:124M" is an untrained GPT-2 of this size.

    model_class: what it is loaded as; by default gpt_kv_cache.GPT or llama_kv_cache.Llama, as config.json says. The
    class may have no buffers. Every tensor must have its parameter, of the same shape, and every parameter its tensors:
    a Llama's q, k and v are joined, and gate and up. Memory: about one copy of the weights, since files are mapped and
    copied tensor by tensor. Every number must be finite, in the file and in dtype.
    Raises ValueError or OSError, in one sentence, if the model can't be found, read or represented.
    """
    if name_or_path.startswith(RANDOM):
        model_class = model_class or class_of(None)
        if model_class.config_class().vocab_size != 50257:
            raise ValueError(f"{name_or_path} is a GPT-2, not a {model_class.__name__}")
        return random_model(model_class, name_or_path.removeprefix(RANDOM)).to(device, dtype)
    config_path = find_file(name_or_path, "config.json")
    config = read_config(config_path, getattr(model_class, "config_class", None))
    if model_class is None:
        model_class = class_of(config)
    tensors = read_tensors(name_or_path)
    check_sizes(config, tensors, config_path)
    with torch.device("meta"):  # shapes and strides without memory
        model = model_class(config)
    parts = {
        name: parts_of(name, parameter, config) for name, parameter in model.named_parameters()
    }
    check_tensors(tensors, parts, name_or_path)
    model = model.to(dtype).to_empty(device=device)  # keeps the strides: wte stays column-first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            begin = 0
            for public in parts[name]:
                tensor = tensors.pop(public)  # one that isn't mapped is freed at once
                source = tensor.t() if turned(name, config) else tensor
                part = parameter[..., begin : begin + source.size(-1)]
                part.copy_(source)
                check_finite(public, part, tensor, name_or_path)
                begin += source.size(-1)
    return model.eval()


def class_of(config: Any) -> type[nn.Module]:
    """Return the model that a config is of."""
    import gpt_kv_cache
    import llama_kv_cache

    return llama_kv_cache.Llama if is_llama(config) else gpt_kv_cache.GPT


def is_llama(config: Any) -> bool:
    return hasattr(config, "rope_theta")


def turned(name: str, config: Any) -> bool:
    """Return whether a parameter, by its name, is stored as (in, out), and its tensors as (out, in)."""
    return is_llama(config) and ".c_" in name


def parts_of(name: str, parameter: Tensor, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the tensors of which a parameter is made, by their public names, and their shapes."""
    if not is_llama(config):
        return {name: tuple(parameter.shape)}
    *layer, part = re.fullmatch(r"(?:h\.(\d+)\.)?(.*)\.weight", name).groups()
    before = f"layers.{layer[0]}." if layer[0] else ""
    names = [f"{before}{public}.weight" for public in LLAMA_TENSORS[part]]
    if not turned(name, config):
        return {names[0]: tuple(parameter.shape)}
    width, total = parameter.shape
    sizes = [total // len(names)] * len(names)
    if part == "attn.c_attn":
        sizes = [
            heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)
        ]
    return {public: (size, width) for public, size in zip(names, sizes, strict=True)}


def check_tensors(
    tensors: dict[str, Tensor], parts: dict[str, dict[str, tuple[int, ...]]], model: str
) -> None:
    """Raise ValueError if tensors are missing, unexpected, or not of the shapes and types that a model needs."""
    shapes = {public: shape for needed in parts.values() for public, shape in needed.items()}
    wrong = [f"{name} is missing" for name in shapes if name not in tensors]
    wrong += [f"{name} is unexpected" for name in tensors if name not in shapes]
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif tensor.dtype not in NUMBERS:
            wrong.append(
                f"{name} holds {tensor.dtype}, not floating-point numbers of 16 bits or more"
            )
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"the weights of {model} don't fit its config.json: {'; '.join(wrong[:8])}{more}"
        )


def check_finite(name: str, parameter: Tensor, tensor: Tensor, model: str) -> None:
    """Raise ValueError if a parameter has NaN or infinity among its numbers, from the file's tensor or from the cast to
    the parameter's dtype."""
    if all(math.isfinite(x) for x in parameter.aminmax()):
        return
    if all(math.isfinite(x) for x in tensor.aminmax()):
        dtype = str(parameter.dtype).removeprefix("torch.")
        largest, most = tensor.abs().max(), torch.finfo(parameter.dtype).max
        raise ValueError(
            f"{name} of {model} holds {largest:g}, and {dtype} at most {most:g}: choose another --dtype"
        )
    raise ValueError(f"{name} of {model} holds numbers that aren't finite (NaN or infinity)")


def find_file(name_or_path: str, filename: str) -> Path:
    """Return where a file of a model is, after downloading it if need be. A known name wins over a folder so named.

    Raises ValueError if the model is unknown, OSError if the file can't be had.
    """
    folder = (
        HERE / "pocket" / POCKET[name_or_path] if name_or_path in POCKET else Path(name_or_path)
    )
    if name_or_path in PUBLIC:
        return download(PUBLIC[name_or_path], filename)
    if name_or_path not in POCKET and not folder.is_dir():
        others = ", ".join(f"{name} (only {script})" for name, script in OTHERS.items())
        raise ValueError(f"unknown model {name_or_path!r}: choose {NAMES}; {others}")
    if name_or_path in POCKET and not folder.is_dir():
        raise FileNotFoundError(
            f"the model {name_or_path} is not trained yet: there is no folder {folder}"
        )
    if not (folder / filename).is_file():
        raise FileNotFoundError(
            f"there is no {filename} in {folder}: a model's folder holds config.json and weights"
        )
    return folder / filename


def download(checkpoint: Checkpoint, filename: str) -> Path:
    """Return the path of a checkpoint's file in the Hugging Face cache, after downloading it if it isn't there."""
    repo, revision, _ = checkpoint
    try:
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

        try:
            return Path(hf_hub_download(repo, filename, revision=revision, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            pass  # not in the cache
        try:
            # One request that fails at once: without a network hf_hub_download itself would retry for half a minute.
            get_hf_file_metadata(hf_hub_url(repo, filename, revision=revision), timeout=10)
            return Path(hf_hub_download(repo, filename, revision=revision))
        except errors.GatedRepoError:
            why = (
                f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then run `hf auth login`; "
                "or give a folder that holds the model"
            )
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            why = f"Hugging Face shows no repository {repo} with revision {revision}"
        except errors.RemoteEntryNotFoundError:
            why = f"{repo} has no file {filename} at revision {revision}"
    except (
        Exception
    ) as error:  # whatever else a network, its settings, a server or a full disk can do
        raise OSError(
            f"can't download {filename} of {repo} ({reason(error)}): run this once with internet, or give a "
            "folder that holds the model; the model pocket needs no download"
        ) from error
    raise OSError(why)


def reason(error: Exception) -> str:
    """Return the first sentence of an error, or its name if it says nothing."""
    return str(error).partition(". ")[0] or type(error).__name__


def read_config(path: Path, config_class: type | None = None) -> Any:
    """Return the config that a Hugging Face config.json describes; config_class: of which kind it must be.

    Dropout stays 0 whatever the file says: a loaded model is there to infer. Raises ValueError on what our models
    can't represent.
    """
    config = read_json(path)
    given = config.get("model_type", "gpt2")
    kind = KINDS_OF.get(given, given) if isinstance(given, str) else None
    if kind not in SUPPORTED:
        known = ", ".join(repr(name) for name in (*SUPPORTED, *KINDS_OF))
        raise ValueError(f"{path}: model_type is {given!r}, but only {known} can be read")
    for key, supported in SUPPORTED[kind].items():
        if key in config and config[key] not in supported:
            one = " or ".join(map(repr, supported))
            raise ValueError(
                f"{path}: {key} is {config[key]!r}, but this {NAMED[kind]} supports only {one}"
            )
    if config_class is None:
        import gpt_kv_cache
        import llama_kv_cache

        config_class = llama_kv_cache.LlamaConfig if kind == "llama" else gpt_kv_cache.GPTConfig
    if (kind == "llama") != is_llama(config_class):
        reader = "llama_kv_cache.py" if kind == "llama" else "gpt_kv_cache.py"
        raise ValueError(f"{path} describes a {NAMED[kind]}: {reader} can read it")
    return (llama_config if kind == "llama" else gpt2_config)(config, path, config_class)


def gpt2_config(config: dict[str, Any], path: Path, config_class: type) -> Any:
    """Return the config_class of a GPT-2, or of one of ours that is made of it."""
    if (
        config.get("n_positions") is not None
    ):  # Hugging Face's name for n_ctx; older files have both
        config["n_ctx"] = config["n_positions"]
    if absent := [
        key
        for key in ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd")
        if config.get(key) is None
    ]:
        raise ValueError(f"{path} lacks {', '.join(absent)}")
    names = [field.name for field in fields(config_class) if field.name != "dropout"]
    if config.get("slots") and "slots" not in names:
        raise ValueError(
            f"{path} describes a BCT with {config['slots']} slots: only gpt_bounded_cache.BCT "
            "can read it, by gpt_bounded_cache.py --memory bct"
        )
    if "slots" in names and not config.get("slots"):
        raise ValueError(
            f"{path} describes a GPT-2 without memory slots, not a Bounded-Cache Transformer (BCT)"
        )
    if bool(config.get("rotary")) != ("rotary" in names):
        raise ValueError(
            f"{path}: only pocket/rope.py can read a model with rotary positions, by projector.py --model "
            "pocket-rotary, and it reads no other"
        )
    return made(
        config_class, {name: config[name] for name in names if config.get(name) is not None}, path
    )


def llama_config(config: dict[str, Any], path: Path, config_class: type) -> Any:
    """Return the config of a Llama. Newer files have rope_parameters, older ones rope_theta and rope_scaling."""
    needed = [key for key in LLAMA_SIZES if key not in ("num_key_value_heads", "head_dim")]
    if absent := [key for key in needed if config.get(key) is None]:
        raise ValueError(f"{path} lacks {', '.join(absent)}")
    if {*(config.get("layer_types") or ())} - {"full_attention"}:
        raise ValueError(f"{path}: layer_types has layers of another kind than 'full_attention'")
    found = {ours: config[key] for key, ours in LLAMA_SIZES.items() if config.get(key) is not None}
    found.setdefault("n_kv_head", found["n_head"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check_fields(rope, f"rope_parameters of {path}")
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        numbers = ("factor", "low_freq_factor", "high_freq_factor")
        check_fields(
            rope,
            f"rope_parameters of {path}",
            **dict.fromkeys(numbers, float),
            original_max_position_embeddings=int,
        )
        scaling = *(float(rope[name]) for name in numbers), rope["original_max_position_embeddings"]
        if not 0 < scaling[1] < scaling[2] or min(scaling) <= 0:
            raise ValueError(
                f"{path}: rope_parameters must be positive, and low_freq_factor, {scaling[1]}, less than "
                f"high_freq_factor, {scaling[2]}"
            )
        found["rope_scaling"] = scaling
    elif kind != "default":
        raise ValueError(
            f"{path}: rope_type is {kind!r}, but this Llama supports only 'default' or 'llama3'"
        )
    check_fields({"rope_theta": theta}, str(path), rope_theta=float)
    if not theta > 0:
        raise ValueError(f"{path}: rope_theta must be more than 0, got {theta}")
    tied = config.get("tie_word_embeddings", False)
    return made(config_class, found | {"rope_theta": float(theta), "tied": tied}, path)


def made(config_class: type, given: dict[str, Any], path: Path) -> Any:
    """Return a config. Raises ValueError if a value isn't of its field's type."""
    kinds = {
        field.name: int if field.default is None else type(field.default)
        for field in fields(config_class)
    }
    kinds["rope_scaling"] = tuple
    for name, value in given.items():
        if type(value) is not kinds[name]:
            kind = {int: "a whole number", bool: "true or false", str: "a text", float: "a number"}[
                kinds[name]
            ]
            raise ValueError(f"{path}: {name} must be {kind}, got {said(value)}")
    return config_class(**given)


def check_sizes(config: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError if a size in a config, read from path, is beyond those of the tensors: before a model of it is
    made, which could take all memory or never end."""
    longest = max(
        (max(tensor.shape, default=1) for tensor in tensors.values() if tensor.numel()), default=0
    )
    for name, size in vars(config).items():
        if name == "n_ctx" and is_llama(config):
            continue  # no table ends there
        most, of = (
            (len(tensors), "number of tensors")
            if name == "n_layer"
            else (longest, "longest side of any tensor")
        )
        if type(size) is int and size > most:
            raise ValueError(f"{path}: {name} is {size}, but the {of} in the weights is {most}")


def read_tensors(name_or_path: str) -> dict[str, Tensor]:
    """Return a model's tensors by public name (without transformer. or model.), mapped from their files where the
    format allows it.

    Dropped: causal masks, rotary frequencies, and of a model that shares its embeddings with its head the head's matrix
    after checking that it equals them.
    """
    tensors: dict[str, Tensor] = {}
    for path in find_weights(name_or_path):
        for name, tensor in read_weights(path).items():
            name = name.removeprefix("transformer.").removeprefix("model.")
            if name in tensors:
                raise ValueError(f"{path} holds {name} for the second time")
            if not name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
                tensors[name] = tensor
    config = read_json(find_file(name_or_path, "config.json"))
    if config.get("tie_word_embeddings", config.get("model_type") != "llama"):
        head = tensors.pop("lm_head.weight", None)
        table = next(
            (tensors[name] for name in ("wte.weight", "embed_tokens.weight") if name in tensors),
            None,
        )
        if None not in (head, table) and (
            head.dtype != table.dtype or not torch.equal(head, table)
        ):
            raise ValueError(
                f"lm_head.weight of {name_or_path} differs from wte.weight, but this GPT-2 shares the two"
            )
    return tensors


def find_weights(name_or_path: str) -> list[Path]:
    """Return the files that hold a model's weights: one, or those that an index lists."""
    if name_or_path in PUBLIC:
        path = find_file(name_or_path, PUBLIC[name_or_path].weights)
        if path.suffix != ".json":
            return [path]
        return [find_file(name_or_path, shard) for shard in shards(path)]
    folder = find_file(name_or_path, "config.json").parent
    for filename in ("model.safetensors", "pytorch_model.bin"):
        if (folder / filename).is_file():
            return [folder / filename]
        if (index := folder / f"{filename}.index.json").is_file():
            for shard in shards(index):
                if not (folder / shard).is_file():
                    raise FileNotFoundError(f"{index} lists {shard}, which is not there")
            return [folder / shard for shard in shards(index)]
    raise FileNotFoundError(
        f"there are no weights in {folder}: neither model.safetensors nor pytorch_model.bin"
    )


def shards(index: Path) -> list[str]:
    """Return the names of the files that an index of shards lists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    for shard in weight_map.values():
        if Path(shard).name != shard or "\0" in shard:
            raise ValueError(f"{index} lists {shard!r}, which is not the name of a file beside it")
    return sorted(set(weight_map.values()))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one .safetensors or .bin file. Raises ValueError if it is damaged or something else."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is cut off, a Git LFS pointer, or not a safetensors file"
            ) from error
    with path.open("rb") as file:  # what can't be opened at all says so here
        zipped = (
            file.read(4) == b"PK\x03\x04"
        )  # files from before PyTorch 1.6 aren't, and can't be mapped
    try:  # weights_only, since a pickle could run code
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is cut off, a Git LFS pointer, or not a PyTorch file of plain tensors"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path} holds something else than named tensors")
    for name, x in tensors.items():
        strided = (
            x.layout is torch.strided
            and x.device.type == "cpu"
            and not x.is_nested
            and not x.is_quantized
        )
        if (
            not strided or x.nbytes > x.untyped_storage().nbytes()
        ):  # a few numbers may claim to be any number of them
            raise ValueError(
                f"{path}: {name} is sparse, nested, quantized, expanded or without numbers"
            )
    return tensors


class Numbers:
    """Stands for GPT-2's tokenizer where that can't be loaded: it knows one prompt, the KV cache article's, and shows
    a token as its number."""

    eot_token = 50256

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the article's prompt in GPT-2's tokens. Raises ValueError for any other text."""
        if text != ARTICLE["prompt"]:
            raise ValueError(
                f"without GPT-2's tokenizer the prompt must be {ARTICLE['prompt']!r}, got {text!r}"
            )
        return [15496, 11, 314, 716]

    def decode_single_token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()


def load_tokenizer(name_or_path: str) -> tiktoken.Encoding:
    """Return the tokenizer of a known name or of a folder: its tokenizer.tiktoken, else GPT-2's if the size fits and
    no file says otherwise. An untrained model's is GPT-2's, or Numbers, with a warning, if that can't be loaded.

    Raises ValueError or OSError, in one sentence, if there is none.
    """
    if name_or_path.startswith(RANDOM):
        try:
            return load_tokenizer("gpt2")
        except OSError as error:
            warnings.warn(f"tokens are shown as numbers: {error}", stacklevel=2)
            return Numbers()
    folders: list[Path] = []
    if name_or_path in ONE_FILE or name_or_path in SHARDED:
        return llama_tokenizer(name_or_path)
    if name_or_path not in PUBLIC:
        config_path = find_file(name_or_path, "config.json")
        config = read_json(config_path)
        vocab_size = config.get("vocab_size")
        shipped = (
            config_path.resolve().parent.parent == HERE / "pocket"
        )  # those share one tokenizer
        folders = [config_path.parent] + [HERE / "pocket" / "teacher"] * shipped
        for folder in folders:
            if (folder / "tokenizer.tiktoken").is_file():
                tokenizer = read_tokenizer(folder / "tokenizer.tiktoken")
                if tokenizer.n_vocab != vocab_size:
                    raise ValueError(
                        f"{folder / 'tokenizer.tiktoken'} makes {tokenizer.n_vocab} tokens, but "
                        f"{config_path} says {vocab_size}"
                    )
                return tokenizer
        if config.get("model_type") == "llama":
            return llama_tokenizer(name_or_path)
        if vocab_size != 50257:
            raise ValueError(
                f"there is no tokenizer.tiktoken in {folders[-1]}, and with {vocab_size} tokens the "
                f"tokenizer can't be GPT-2's, which has 50257"
            )
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:  # as in download()
        raise OSError(
            f"can't download GPT-2's tokenizer, and tiktoken has not cached it ({reason(error)}): run this "
            "once with internet; the model pocket needs no download"
        ) from error
    for path in (folder / filename for folder in folders for filename in VOCABULARIES):
        if path.exists() and not is_gpt2s(path, gpt2):
            raise ValueError(
                f"{path} is not GPT-2's: of vocabularies with 50257 tokens only GPT-2's can be read, or a "
                "tokenizer.tiktoken in the same folder"
            )
    return gpt2


class Tokenizer(tiktoken.Encoding):
    """A Llama's: a whole text, in which special tokens are allowed ("all"), begins with the tokens of `start`, and any
    of `ends` ends one."""

    start: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def encode(self, text: str, *, allowed_special: Any = frozenset(), **options: Any) -> list[int]:
        ids = super().encode(text, allowed_special=allowed_special, **options)
        return [*self.start, *ids] if allowed_special == "all" else ids

    @property
    def eot_token(self) -> int:
        return self.ends[0]


def llama_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the byte-level BPE in a tokenizer.json, with the tokens that begin a text, by its post-processor, and that
    end one, by generation_config.json or config.json. Raises ValueError if it isn't one that tiktoken can do."""
    path, config_path = (
        find_file(name_or_path, name) for name in ("tokenizer.json", "config.json")
    )
    content, config = (
        read_json(path, model=dict, added_tokens=list),
        read_json(config_path, vocab_size=int),
    )
    model = check_fields(content["model"], f"model in {path}", type=str, vocab=dict, merges=list)
    added = {}
    for token in content["added_tokens"]:
        check_fields(
            token,
            f"added_tokens in {path}",
            content=str,
            id=int,
            lstrip=bool,
            rstrip=bool,
            single_word=bool,
        )
        added[token["content"]] = token["id"]
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise ValueError(
                f"{path}: {said(token['content'])} takes spaces or words along, which isn't supported"
            )
    if model["type"] != "BPE" or content.get("normalizer") or model.get("byte_fallback"):
        raise ValueError(f"{path} is no byte-level BPE of the text as it is")
    ranks = ranks_of(model, added, path)
    tokenizer = Tokenizer(
        path.parent.name,
        pat_str=pattern_of(content.get("pre_tokenizer"), path),
        mergeable_ranks=ranks,
        special_tokens=added,
    )
    if tokenizer.n_vocab > config["vocab_size"]:
        raise ValueError(
            f"{path} makes {tokenizer.n_vocab} tokens, but {config_path} says {config['vocab_size']}"
        )
    tokenizer.start = start_of(content.get("post_processor"), added, path)
    ends = config.get("eos_token_id")
    if (config_path.parent / "generation_config.json").is_file() or name_or_path in PUBLIC:
        ends = read_json(find_file(name_or_path, "generation_config.json")).get(
            "eos_token_id", ends
        )
    tokenizer.ends = tuple(ends) if isinstance(ends, list) else (ends,)
    if not tokenizer.ends or not {*tokenizer.ends} <= {*added.values()}:
        raise ValueError(
            f"{config_path}: eos_token_id is {said(ends)}, which is no special token of {path}"
        )
    return tokenizer


def ranks_of(model: dict[str, Any], added: dict[str, int], path: Path) -> dict[bytes, int]:
    """Return the ids of all tokens that aren't special, by their bytes. tiktoken joins the pair with the lowest id
    first, so that ids must follow the merges. Raises ValueError if they don't, or if a byte has no token."""
    byte_of = {char: byte for byte, char in enumerate(byte_characters())}
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in added}
    try:
        ranks = {bytes(byte_of[char] for char in token): int(i) for token, i in vocabulary.items()}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merged = [vocabulary[left + right] for left, right in pairs]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: its tokens or merges are not those of a byte-level BPE"
        ) from error
    if merged != sorted(merged) or not ranks.keys() >= {bytes([b]) for b in range(256)}:
        raise ValueError(
            f"{path} must have a token for every byte, and ids in the order of its merges"
        )
    return ranks


def pattern_of(splitter: dict[str, Any] | None, path: Path) -> str:
    """Return the pattern of the pieces that a pre-tokenizer cuts a text into. Raises ValueError if it is another one
    than GPT-2's, GPT-2's after digits, or a pattern of the file's own, as Llama 3 has it."""
    parts = (splitter or {}).get("pretokenizers", [splitter])
    *before, last = [part if isinstance(part, dict) else {} for part in parts]
    first = before[0] if len(before) == 1 else {}
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        with_regex = last.get("use_regex", True)
        if with_regex and not before:
            return GPT2_PATTERN
        if with_regex and first.get("type") == "Digits" and first.get("individual_digits"):
            return DIGITS_PATTERN
        pattern = first.get("pattern")
        alone = first.get("behavior") == "Isolated" and not first.get("invert")
        if not with_regex and first.get("type") == "Split" and alone and isinstance(pattern, dict):
            return str(pattern.get("Regex"))
    raise ValueError(f"{path}: its pre_tokenizer is none that tiktoken can do")


def start_of(
    processor: dict[str, Any] | None, added: dict[str, int], path: Path
) -> tuple[int, ...]:
    """Return the tokens that a post-processor puts before a text."""
    found = []
    for part in (processor or {}).get("processors", [processor or {}]):
        for item in part.get("single", []):
            if "Sequence" in item:
                break
            found.append(item["SpecialToken"]["id"])
    if unknown := [token for token in found if token not in added]:
        raise ValueError(
            f"{path}: its post_processor adds {said(unknown[0])}, which is no special token"
        )
    return tuple(added[token] for token in found)


def is_gpt2s(path: Path, gpt2: tiktoken.Encoding) -> bool:
    """Return whether a file from which transformers makes a tokenizer says the same as GPT-2's own."""
    if path.suffix not in (".json", ".txt") or path.name == "vocab.txt":
        return False  # not a byte-level BPE
    chars = byte_characters()
    ids = {
        "".join(chars[b] for b in gpt2.decode_single_token_bytes(i)): i
        for i in range(gpt2.n_vocab - 1)
    }
    merged, ids = [*ids][256:], ids | {END_OF_TEXT: gpt2.eot_token}
    if path.name == "merges.txt":
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [
            line.replace(" ", "") for line in lines if line and not line.startswith("#version")
        ] == merged
    content = read_json(path)
    if path.name == "vocab.json":
        return content == ids
    model, before, added = (content.get(key) for key in ("model", "pre_tokenizer", "added_tokens"))
    if not (
        isinstance(model, dict)
        and isinstance(model.get("merges"), list)
        and isinstance(before, dict)
    ):
        return False
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return (
        model.get("vocab") == ids
        and all(isinstance(pair, list) for pair in pairs)
        and ["".join(map(str, pair)) for pair in pairs] == merged
        and content.get("normalizer") is None
        and (before.get("type"), before.get("add_prefix_space")) == ("ByteLevel", False)
        and {str(token.get("content")) for token in added or []} <= {END_OF_TEXT}
    )


def byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's BPE files write each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


def read_tokenizer(path: Path) -> tiktoken.Encoding:
    """Return the byte-pair encoding in a tiktoken file (a line for each token: base64, space, rank).

    `<|endoftext|>` follows the last token. tiktoken's own reader isn't used: it caches by path, and so serves
    stale content. Raises ValueError if the file isn't one, or lacks a byte.
    """
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path} is not a tiktoken file") from error
    if sorted(ranks.values()) != list(range(len(lines))) or not ranks.keys() >= {
        bytes([b]) for b in range(256)
    }:
        raise ValueError(f"{path} must hold every single byte, and every rank from 0 on once")
    return tiktoken.Encoding(
        name=path.parent.name,
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def main(argv: list[str] | None = None) -> None:
    import gpt_bounded_cache
    import gpt_kv_cache
    from support.cli import PROMPT, CommandLine
    from support.printing import stream

    cli = CommandLine(__doc__, "python3 %(prog)s gpt2 --verify", f"{NAMES}; or pocket-bct")
    cli.add_model_arguments("model")
    cli.add_argument(
        "--verify", action="store_true", help="compare with published greedy continuations"
    )
    with cli.parse(argv) as args:
        published = read_json(EXPECTED_OUTPUTS)["continuations"] if args.verify else []
        expected = [entry for entry in published if entry["model"] == args.model]
        if args.verify and not expected:
            known = ", ".join(sorted({entry["model"] for entry in published}))
            raise ValueError(
                f"no published continuation of {args.model} to compare with; there are some of {known}"
            )
        is_bct = bool(read_json(find_file(args.model, "config.json")).get("slots"))
        module, kind = (
            (gpt_bounded_cache, gpt_bounded_cache.BCT)
            if is_bct
            else (gpt_kv_cache, gpt_kv_cache.GPT)
        )
        model = load_model(args.model, model_class=kind, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        config, count = model.config, sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{args.model}: {config.n_layer} layers, {config.n_head} heads of {config.head_dim}, width "
            f"{config.n_embd}, context {config.n_ctx}, vocabulary {config.vocab_size}\n{count:,} parameters, "
            f"{str(args.dtype).removeprefix('torch.')}, {count * args.dtype.itemsize:,} bytes on {args.device}\n"
        )

        def continuation(prompt: str, n_tokens: int, cache: Any = None) -> Iterator[torch.Tensor]:
            ids = torch.tensor(
                [tokenizer.encode(prompt, allowed_special="all")], device=args.device
            )
            return module.generate(model, ids, n_tokens, stop_id=tokenizer.eot_token, cache=cache)

        # DialoGPT answers once a turn has ended.
        prompt = f"Does money buy happiness?{END_OF_TEXT}" if "DialoGPT" in args.model else PROMPT
        print(prompt, end="", flush=True)
        cache = model.new_cache()
        stream(continuation(prompt, 40, cache), tokenizer, cache)
        different = 0
        for entry in expected:
            n_tokens = len(tokenizer.encode(entry["continuation"], allowed_special="all"))
            ours = tokenizer.decode(
                [token.item() for token in continuation(entry["prompt"], n_tokens)]
            )
            same = ours == entry["continuation"]
            different += not same
            print(f"\n{'same' if same else 'DIFFERENT'}: {entry['prompt']!r} -> {ours!r}")
            if not same:
                print(f"published: {entry['continuation']!r}\nby: {entry['source']}")
        if expected:
            print(
                f"\n{len(expected) - different} of {len(expected)} published continuations reproduced"
            )
            sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
