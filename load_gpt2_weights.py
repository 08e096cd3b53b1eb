"""Weights and tokenizers of GPT-2 and Llama by name or folder, for any of the model files.

`python load_gpt2_weights.py gpt2 --verify` downloads GPT-2 and compares its text with published continuations.
"""

import difflib
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from support.cli import DEVICE, CommandLine
from support.conditions import conditions, random_model
from support.files import (
    check_fields,
    download_error,
    read_json,
    read_text,
    regular_file,
    short_repr,
)
from support.gguf_files import (
    SMOLLM2,
    find_smollm2,
    read_gguf_config,
    read_gguf_tensors,
    read_gguf_tokenizer,
)
from support.layout import is_faster, order_for_decoding
from support.printing import end_tokens_of
from support.tokenizers import (
    LLAMA3_FILE,
    READERS,
    TIKTOKEN_FILE,
    Numbers,
    end_tokens,
    gpt2_tokenizer,
    read_tokenizer,
)

RANDOM = "random:"  # before a size: the name of an untrained model
HERE = Path(__file__).resolve().parent
# A file that a tokenizer is made of.
TOKENIZER_FILE = r"(tokenizer|vocab|merges|spiece)\.(json|txt|model)"
VERIFIED_TEXT = "A KV cache keeps the keys and values of the tokens that a model has read."
EXPECTED_OUTPUTS = HERE / "data" / "gpt2_expected_outputs.json"


class Checkpoint(NamedTuple):
    """A public checkpoint: Hugging Face repository, commit, and the file that holds the weights."""

    repo: str
    revision: str = "main"
    weights: str = "model.safetensors"


POCKET_FOLDERS = (
    "student",
    "student-alone",
    "student-prompt",
    "student-dropout",
    "bct",
    "llama",
)
POCKET = {"pocket": "teacher"} | {f"pocket-{folder}": folder for folder in POCKET_FOLDERS}
WEIGHTS_FILES = (  # the first of these that a folder holds
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ONE_FILE_LLAMAS = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
)
SHARDED_LLAMAS = (
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0",
)
LLAMAS = ("pocket-llama", SMOLLM2, *ONE_FILE_LLAMAS, *SHARDED_LLAMAS)
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
    **{name: Checkpoint(name) for name in ONE_FILE_LLAMAS},
    **{name: Checkpoint(name, weights=WEIGHTS_FILES[1]) for name in SHARDED_LLAMAS},
}
GPT2S = [name for name in (*POCKET, *PUBLIC) if name not in ("pocket-bct", *LLAMAS)]
NAMES = (
    f"a GPT-2: {', '.join(GPT2S)}; a Llama: {', '.join(LLAMAS)}; a folder; a .gguf file; or random:124M, untrained; "
    "NAME:int4 is the twin of one, with the weights of its blocks rounded to 4 bits, or to another number from 2 to 8"
)
TWIN = re.compile("(.+):int([2-8])")


# --- From names to files --------------------------------------------------------------------------


def split_twin(name_or_path: str) -> tuple[str, int]:
    """Return the name of the model whose twin a name such as smollm2:int4 means, and the bits of the
    twin's weights; 0 if the name isn't a twin's."""
    match = TWIN.fullmatch(name_or_path)
    if match is None or Path(name_or_path).exists():
        return name_or_path, 0
    return match[1], int(match[2])


def find_file(name_or_path: str, filename: str) -> Path:
    """Return the path of a model's file, after downloading it if need be. A known name takes
    precedence over a folder of that name. A GGUF file holds all that a model is.

    Raises ValueError if the model is unknown, OSError if the file can't be found or downloaded.
    """
    name_or_path, _ = split_twin(name_or_path)
    if name_or_path in PUBLIC:
        return download(PUBLIC[name_or_path], filename)
    if name_or_path == SMOLLM2:
        return find_smollm2()
    folder = Path(name_or_path)
    if is_gguf(folder):
        return regular_file(folder)
    if name_or_path in POCKET:
        folder = HERE / "pocket" / POCKET[name_or_path]
    elif not folder.is_dir():
        raise ValueError(f"unknown model {name_or_path!r}: {advice_on_name(name_or_path)}")
    if not (folder / filename).exists():
        raise FileNotFoundError(
            f"there is no {filename} in {folder}: a model is config.json, weights and a tokenizer"
        )
    return regular_file(folder / filename)


def advice_on_name(name: str) -> str:
    """Return what a name that no model has could mean."""
    model, colon, bits = name.partition(":int")
    if colon:
        return f"a twin has 2 to 8 bits, as in {model}:int4, got {bits!r}"
    known = [*POCKET, *PUBLIC, SMOLLM2]
    if near := difflib.get_close_matches(name, known, 1):
        return f"did you mean {near[0]}? --help names all"
    return f"it is no folder, no .gguf file and no name such as pocket, {SMOLLM2} or gpt2; --help names all"


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, and not of a folder."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def download(checkpoint: Checkpoint, filename: str) -> Path:
    """Return the path of a checkpoint's file in the Hugging Face cache, after downloading it if it isn't there."""
    repo, revision, _ = checkpoint
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors

        cached = hub.try_to_load_from_cache(repo, filename, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        try:
            # One request that fails at once: without a network hf_hub_download itself would retry for half a minute.
            url = hub.hf_hub_url(repo, filename, revision=revision)
            hub.get_hf_file_metadata(url, timeout=10)
            return Path(hub.hf_hub_download(repo, filename, revision=revision))
        except errors.GatedRepoError:
            reason = (
                f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then run `hf auth login`; "
                "or give a model's folder"
            )
        except errors.HfHubHTTPError as error:
            if error.response.status_code != 404:
                raise
            reason = f"Hugging Face shows no {filename} in {repo} at revision {revision}"
    # Any other fault of a network, its settings, a server or a full disk.
    except Exception as error:
        raise download_error(f"{filename} of {repo}", error) from error
    raise OSError(reason)


def find_weights(name_or_path: str) -> list[Path]:
    """Return the files that hold a model's weights: one, or the shards that an index lists."""
    if name_or_path in PUBLIC:
        path = find_file(name_or_path, PUBLIC[name_or_path].weights)
    else:
        path = find_file(name_or_path, "config.json")
        if is_gguf(path):
            return [path]
        folder = path.parent
        candidates = [
            folder / filename for filename in WEIGHTS_FILES if (folder / filename).exists()
        ]
        if not candidates:
            raise FileNotFoundError(
                f"there are no weights in {folder}: neither model.safetensors nor pytorch_model.bin"
            )
        path = candidates[0]
    if path.suffix != ".json":
        return [path]
    shards = sorted({*map(str, read_json(path, weight_map=dict)["weight_map"].values())})
    for shard in shards:
        if not re.fullmatch(r"[^/\\\0]+\.(safetensors|bin)", shard):
            raise ValueError(f"{path} lists {short_repr(shard)}, not a file of weights beside it")
    return [find_file(name_or_path, shard) for shard in shards]


def find_tokenizer(name_or_path: str, config: dict[str, Any], folder: Path) -> Path | None:
    """Return the path of a model's tokenizer file, after downloading it if need be; None if the
    model has no such file, but a vocabulary of GPT-2's size.

    folder: where the model's config.json is. Raises as find_file() does, and ValueError if there is
    no file and the vocabulary has another size.
    """
    filenames = {path.name for path in folder.iterdir()}
    model_type = config.get("model_type")
    if TIKTOKEN_FILE not in filenames and folder.resolve().parent == HERE / "pocket":
        return HERE / "pocket" / "teacher" / TIKTOKEN_FILE  # the repository's own models share one
    for filename in READERS:
        if filename in filenames and (model_type == "llama" or filename != LLAMA3_FILE):
            return find_file(name_or_path, filename)
    is_llama = KIND_OF_MODEL_TYPE.get(model_type) == "Llama"
    if is_llama or any(re.fullmatch(TOKENIZER_FILE, filename) for filename in filenames):
        return find_file(name_or_path, "tokenizer.json")
    if config["vocab_size"] == 50257:
        return None
    raise ValueError(
        f"there is no {TIKTOKEN_FILE} in {folder}, and GPT-2's has 50257 tokens, not "
        f"{config['vocab_size']}"
    )


# --- From config.json to a config -----------------------------------------------------------------


# Fields of config.json for which our models support only some values, and these values.
SUPPORTED = {
    "GPT-2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "quantization_config": (None,),
    },
    "Llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (None,),
    },
}
# By config.json's model_type; BCT is ours: a GPT-2 with memory slots.
KIND_OF_MODEL_TYPE = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mistral": "Llama",
    "qwen2": "Llama",
    "qwen3": "Llama",
    "bct": "BCT",
}
# Fields of LlamaConfig that the model_type decides.
FIELDS_OF_MODEL_TYPE = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
SCRIPT_OF_KIND = {
    "GPT-2": "gpt_kv_cache.py can read it",
    "Llama": "llama_kv_cache.py, lecture 4, can read it, and compress.py write also in a window",
    "BCT": "gpt_bounded_cache.py --memory bct can read it",
}
# Fields that every file has to give.
REQUIRED = ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd")
LLAMA_FIELDS = {  # Hugging Face's name: LlamaConfig's
    "tie_word_embeddings": "tied",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_ctx",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
}
LLAMA_DEFAULTS = {  # those of transformers
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": [],
    "use_sliding_window": True,
}
DEFAULTS_OF_MODEL_TYPE = {  # those of transformers that differ from a Llama's
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
}
LLAMA3_SCALING = {  # the fields that rope_type llama3 needs, to scale frequencies
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": int,
}


def default_class(kind: str) -> type[nn.Module]:
    """Return the class that a model of a kind is loaded as by default."""
    import gpt_kv_cache
    import llama_kv_cache

    return llama_kv_cache.Llama if kind == "Llama" else gpt_kv_cache.GPT


def kind_of(config: Any) -> str:
    """Return the kind of model that a config, or the class of one, describes: a key of SCRIPT_OF_KIND."""
    if hasattr(config, "rope_theta"):
        return "Llama"
    return "BCT" if hasattr(config, "slots") else "GPT-2"


def read_content(path: Path) -> dict[str, Any]:
    """Return the content of a config.json, or what it would be for a GGUF file."""
    return read_gguf_config(path) if is_gguf(path) else read_json(path)


def read_config(path: Path, config_class: type | None) -> Any:
    """Return the config that a Hugging Face config.json or a GGUF file describes.

    config_class: the class of config that the file must describe; None: a GPT-2's or a Llama's, as
    the file says. Dropout stays 0 whatever the file says, since a loaded model is for inference.
    Raises ValueError if the file says something that our models can't represent.
    """
    content = read_content(path)
    model_type = content.get("model_type") or "gpt2"
    check_choice(path, "model_type", model_type, [*KIND_OF_MODEL_TYPE])
    content = DEFAULTS_OF_MODEL_TYPE.get(model_type, {}) | content
    content = {key: value for key, value in content.items() if value is not None}
    kind = KIND_OF_MODEL_TYPE[model_type]
    config_class = config_class or default_class(kind).config_class
    if kind != kind_of(config_class):
        raise ValueError(f"{path} describes a {kind}: {SCRIPT_OF_KIND[kind]}")
    for key, supported in SUPPORTED["Llama" if kind == "Llama" else "GPT-2"].items():
        if key in content:
            check_choice(path, key, content[key], supported)
    types = {}  # of each field of the config
    for field in fields(config_class):
        types[field.name] = int if field.default is None else type(field.default)
    read_fields = llama_fields if kind == "Llama" else gpt2_fields
    values = read_fields(content, types, path)
    try:
        return config_class(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def gpt2_fields(content: dict[str, Any], types: dict[str, type], path: Path) -> dict[str, Any]:
    """Return the fields of a GPT-2's config, or a BCT's, from the content of a config.json."""
    if "n_positions" in content:  # Hugging Face's name for n_ctx; older files have both
        content = content | {"n_ctx": content["n_positions"]}
    names = {name: name for name in types if name != "dropout"}
    return select_fields(content, names, types, REQUIRED, path)


def llama_fields(content: dict[str, Any], types: dict[str, type], path: Path) -> dict[str, Any]:
    """Return the fields of a Llama's config from the content of a config.json."""
    content = LLAMA_DEFAULTS | content
    values = select_fields(content, LLAMA_FIELDS, types, (*REQUIRED, "n_inner"), path)
    if not values["norm_eps"] > 0:
        raise ValueError(f"{path}: rms_norm_eps must be more than 0, got {values['norm_eps']}")
    check_fields(content, str(path), layer_types=list, use_sliding_window=bool)
    known_types, n_ctx = ["full_attention"], values["n_ctx"]
    if content["use_sliding_window"] and "sliding_window" in content:
        window = check_fields(content, str(path), sliding_window=int)["sliding_window"]
        known_types.append("sliding_attention")  # which is full as well, with such a window:
        if window < n_ctx:
            raise ValueError(
                f"{path}: sliding_window is {window}, and must be null or at least "
                f"max_position_embeddings, {n_ctx}: windows aren't supported"
            )
    for layer_type in content["layer_types"]:
        check_choice(path, "layer_types", layer_type, known_types)
    values.setdefault("n_kv_head", values["n_head"])
    return (
        values | FIELDS_OF_MODEL_TYPE.get(content["model_type"], {}) | rotary_fields(content, path)
    )


def select_fields(
    content: dict[str, Any],
    names: dict[str, str],
    types: dict[str, type],
    required: Sequence[str],
    path: Path,
) -> dict[str, Any]:
    """Return the values that a config.json gives to our fields. names: our field's name by Hugging
    Face's. Raises ValueError if a value has another type, or a required one is missing."""
    given = {}
    for public, field in names.items():
        if public in content or field in required:
            given[public] = field
    check_fields(content, str(path), **{public: types[field] for public, field in given.items()})
    return {field: content[public] for public, field in given.items()}


def check_choice(path: Path, key: str, value: object, supported: Sequence[object]) -> None:
    """Raise ValueError if a value in a config.json is none of those that our models support."""
    if value not in supported:
        known = " or ".join(map(repr, supported))
        raise ValueError(f"{path}: {key} is {value!r}, and only {known} is supported")


def rotary_fields(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of a Llama's config. Newer files have rope_parameters, older ones rope_theta
    and rope_scaling."""
    where = f"rope_parameters of {path}"
    rope = content.get("rope_parameters", content.get("rope_scaling", {}))
    rope = {"rope_theta": content.get("rope_theta", 10_000.0)} | check_fields(rope, where)
    types = {"rope_theta": float}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_choice(path, "rope_type", rope_type, ["default", "llama3"])
    check_choice(path, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0])
    if rope_type == "llama3":
        types |= LLAMA3_SCALING
    check_fields(rope, where, **types)
    for name in types:
        if not rope[name] > 0:
            raise ValueError(f"{where}: {name} must be more than 0, got {rope[name]}")
    theta, *scaling = [number(rope[name]) for name, number in types.items()]
    if not scaling:
        return {"rope_theta": theta}
    _, low, high, _ = scaling
    if not low < high:
        raise ValueError(
            f"{where}: low_freq_factor, {low}, must be less than high_freq_factor, {high}"
        )
    return {"rope_theta": theta, "rope_scaling": tuple(scaling)}


# --- From files to tensors ------------------------------------------------------------------------


def read_tensors(name_or_path: str) -> dict[str, Tensor]:
    """Return a model's tensors by public name (without transformer. or model.), memory-mapped from
    their files where the format allows it.

    Causal masks and rotary frequencies are left out.
    """
    tensors: dict[str, Tensor] = {}
    for path in find_weights(name_or_path):
        for name, tensor in read_weights(path).items():
            name = name.removeprefix("transformer.").removeprefix("model.")
            if name in tensors:
                raise ValueError(f"{path} holds {name} for the second time")
            if not name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
                tensors[name] = tensor
    return tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one .safetensors, .bin or .gguf file. Raises ValueError if it is damaged or something
    else."""
    if is_gguf(path):
        return read_gguf_tensors(path)
    with regular_file(path).open("rb") as file:  # a file that can't be opened raises OSError here
        # Files from before PyTorch 1.6 aren't zipped, and can't be mapped.
        is_zipped = file.read(4) == b"PK\x03\x04"
    damaged = f"{path} is cut off, a Git LFS pointer, or not a"
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{damaged} safetensors file") from error
    try:  # weights_only, since a pickle could run code
        with warnings.catch_warnings(action="ignore"):  # of a file that is refused below
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipped)
    except Exception as error:  # a damaged file makes it raise errors of ten kinds
        raise ValueError(f"{damaged} PyTorch file of plain tensors") from error
    if not isinstance(tensors, dict):
        tensors = {None: tensors}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{path} holds something else than named tensors")
        is_plain = (
            tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        )
        # An expanded tensor repeats a few numbers, and may claim to have any number of them.
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name} is sparse, nested, expanded or without numbers")
    return tensors


# --- From tensors to a model ----------------------------------------------------------------------


LLAMA_TENSORS = {  # our parameter: the tensors that it joins, matrices as (out, in)
    "wte": ("embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.ln_q": ("self_attn.q_norm",),
    "attn.ln_k": ("self_attn.k_norm",),
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
    dtype: torch.dtype | str = torch.float32,
) -> nn.Module:
    """Return the model of a known name or of a folder in Hugging Face format, in eval mode.
    "random:124M" is an untrained GPT-2 of this size, and "smollm2:int4" a twin, whose weights
    round_weights() has rounded.

    model_class: the class to load; by default gpt_kv_cache.GPT or llama_kv_cache.Llama, as
    config.json says. The class must have no buffers. Every tensor in the files must match a
    parameter in name and shape, and no parameter may be missing. A Llama's q, k and v are joined
    into one parameter, and so are gate and up. dtype: "auto" means what the files hold, if the
    device computes faster in it than in float32, else float32; a line of output says which. Every
    number must be finite, in the file and in dtype. Memory: about one copy of the weights, since
    files are mapped and copied tensor by tensor.
    Raises ValueError or OSError, in one sentence, if the model can't be found, read or represented.
    """
    name_or_path, bits = split_twin(name_or_path)
    if bits:
        model = load_model(name_or_path, model_class=model_class, device=device, dtype=dtype)
        return round_weights(model, bits)
    if name_or_path.startswith(RANDOM):
        model_class = model_class or default_class("GPT-2")
        if model_class.config_class().vocab_size != 50257:
            raise ValueError(f"{name_or_path} is a GPT-2, not a {model_class.__name__}")
        dtype = torch.float32 if dtype == "auto" else dtype
        model = random_model(model_class, name_or_path.removeprefix(RANDOM))
        return order_for_decoding(model.to(device, dtype))
    config_path = find_file(name_or_path, "config.json")
    config = read_config(config_path, getattr(model_class, "config_class", None))
    model_class = model_class or default_class(kind_of(config))
    tensors = read_tensors(name_or_path)
    if getattr(config, "tied", True):
        drop_head(tensors, name_or_path)
    check_sizes(config, tensors, config_path)
    if dtype == "auto":
        dtype = choose_dtype(tensors, device)
    with torch.device("meta"):  # shapes and strides without memory
        model = order_for_decoding(model_class(config).to(dtype))
    check_tensors(tensors, model, name_or_path)
    model = model.to_empty(device=device)  # which keeps the strides
    with torch.no_grad():
        for name, part in public_parts(model).items():
            tensor = tensors.pop(name)  # one that isn't mapped is freed at once
            part.copy_(tensor)
            check_finite(name, part, tensor, name_or_path)
    return model.eval()


@torch.no_grad()
def round_weights(model: nn.Module, bits: int) -> nn.Module:
    """Round the matrices of a model's blocks to `bits` bits, and return the model. The rounded
    numbers are held as before: a twin is another model, not a smaller or faster one."""
    for block in model.h:
        for weight in block.parameters():
            if weight.dim() == 2:
                codes, scale, low = round_matrix(weight, bits)
                weight.copy_(codes * scale + low)
    return model


def round_matrix(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix (in, out) as whole numbers (in, out) from 0 to 2^bits - 1, and the scale and
    the smallest number (1, out) that the numbers which make one output share."""
    low, high = weight.float().aminmax(dim=0, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return ((weight.float() - low) / scale).round(), scale, low


def choose_dtype(tensors: dict[str, Tensor], device: torch.device | str) -> torch.dtype:
    """Return what most of the tensors hold, if a device is faster in it than in float32, else float32; print which."""
    (stored, _), *_ = Counter(tensor.dtype for tensor in tensors.values()).most_common(1)
    dtype = stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    if dtype is not torch.float32 and not is_faster(dtype, device):
        dtype = torch.float32
    names = [str(name).removeprefix("torch.") for name in (dtype, stored)]
    reason = (
        "as its weights are read"
        if dtype is stored
        else f"since {names[1]} would be no faster here"
    )
    print(f"[computing in {names[0]}, {reason}]")
    return dtype


def drop_head(tensors: dict[str, Tensor], where: str) -> None:
    """Remove lm_head.weight from the tensors of a model whose head shares the embeddings' matrix.
    Raises ValueError if the two differ."""
    head = tensors.pop("lm_head.weight", None)
    name = "wte.weight" if "wte.weight" in tensors else "embed_tokens.weight"
    embeddings = tensors.get(name, head)
    if head is not None and (head.dtype != embeddings.dtype or not torch.equal(head, embeddings)):
        raise ValueError(
            f"lm_head.weight of {where} differs from {name}, but this model shares the two"
        )


def check_sizes(config: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError if a size in a config, which was read from path, is larger than the tensors
    allow.

    This is checked before a model is made: one with a wrong size could take all memory, or take
    forever.
    """
    longest = max((side for tensor in tensors.values() for side in tensor.shape), default=0)
    for name, size in vars(config).items():
        limit, meaning = longest, "longest side of any tensor"
        if name == "n_layer":
            limit, meaning = len(tensors), "number of tensors"
        if name == "n_ctx" and kind_of(config) == "Llama":
            continue  # no tensor has a row for each position
        if type(size) is int and size > limit:
            raise ValueError(
                f"{path}: {name} is {size}, but the {meaning} in the weights is {limit}"
            )


def check_tensors(tensors: dict[str, Tensor], model: nn.Module, where: str) -> None:
    """Raise ValueError if tensors are missing, unexpected, or not of the shapes and types that a model needs."""
    shapes = {name: tuple(part.shape) for name, part in public_parts(model).items()}
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is unexpected" for name in tensors if name not in shapes]
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            faults.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            faults.append(f"{name} holds {tensor.dtype}, not floats of 16 bits or more")
    if faults:
        rest = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(
            f"the weights of {where} don't fit its config.json: {'; '.join(faults[:8])}{rest}"
        )


def public_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters as public files hold them, by the tensors' names: views that can
    be written to.

    A Llama's matrices are (in, out) in our parameters and (out, in) in the files. A parameter that
    joins several matrices, or their biases, has a view for each of them.
    """
    config, parts = model.config, dict(model.named_parameters())
    if kind_of(config) != "Llama":
        return parts
    kv_width = config.n_kv_head * config.head_dim
    public = {}
    for name, parameter in parts.items():
        layer, part, numbers = re.fullmatch(r"(?:h\.(\d+)\.)?(.*)\.(weight|bias)", name).groups()
        prefix = "" if layer is None else f"layers.{layer}."
        matrix = parameter.t() if ".c_" in name else parameter  # a bias (out,) stays as it is
        tensors = LLAMA_TENSORS[part]
        sizes = [len(matrix) // len(tensors)] * len(tensors)
        if part == "attn.c_attn":
            sizes = [len(matrix) - 2 * kv_width, kv_width, kv_width]
        for tensor, rows in zip(tensors, matrix.split(sizes), strict=True):
            public[f"{prefix}{tensor}.{numbers}"] = rows
    return public


def check_finite(name: str, part: Tensor, tensor: Tensor, where: str) -> None:
    """Raise ValueError if a part of a model has NaN or infinity among its numbers, either from the
    file's tensor or from the cast to the model's dtype."""
    if all(math.isfinite(x) for x in part.aminmax()):
        return
    largest, limit = tensor.abs().max(), torch.finfo(part.dtype).max
    if not math.isfinite(largest):
        raise ValueError(f"{name} of {where} holds numbers that aren't finite (NaN or infinity)")
    dtype = str(part.dtype).removeprefix("torch.")
    raise ValueError(
        f"{name} of {where} holds {largest:g}, and {dtype} at most {limit:g}: choose another --dtype"
    )


# --- Tokenizers -----------------------------------------------------------------------------------


def load_tokenizer(name_or_path: str) -> tiktoken.Encoding:
    """Return the tokenizer of a known name or of a folder; GPT-2's if the folder has none and the
    size of the vocabulary fits. An untrained model has GPT-2's, or Numbers, with a warning, if that
    can't be loaded.

    Raises ValueError or OSError, in one sentence, if there is none.
    """
    name_or_path, _ = split_twin(name_or_path)
    if name_or_path.startswith(RANDOM):
        try:
            return gpt2_tokenizer()
        except OSError as error:
            warnings.warn(f"tokens are shown as numbers: {error}", stacklevel=2)
            return Numbers()
    if name_or_path in PUBLIC and name_or_path not in LLAMAS:
        return gpt2_tokenizer()
    config_path = find_file(name_or_path, "config.json")
    config = check_fields(read_content(config_path), str(config_path), vocab_size=int)
    if is_gguf(config_path):
        tokenizer = read_gguf_tokenizer(config_path)
        tokenizer.end_ids = end_tokens(tokenizer, config_path, config, {})
        return tokenizer
    path = find_tokenizer(name_or_path, config, config_path.parent)
    if path is None:
        return gpt2_tokenizer()
    tokenizer = read_tokenizer(path)
    if name_or_path in PUBLIC:
        tokenizer.is_instruct = "Instruct" in name_or_path
    else:
        tokenizer.chat_template = read_chat_template(config_path.parent)
    vocab_size, n_vocab = config["vocab_size"], tokenizer.n_vocab
    fits = n_vocab == vocab_size
    if path.name != TIKTOKEN_FILE:
        tokenizer.end_ids = end_tokens(tokenizer, path, config, read_generation(name_or_path, path))
        fits = n_vocab <= vocab_size  # embeddings may have rows without a token
    if not fits:
        raise ValueError(f"{path} makes {n_vocab} tokens, but {config_path} says {vocab_size}")
    return tokenizer


def read_chat_template(folder: Path) -> str | None:
    """Return the form of a conversation, in Jinja, that a model's folder gives; None if it gives none."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    templates = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(templates, list):  # several, by name
        named = [check_fields(each, str(path), name=str, template=str) for each in templates]
        templates = {each["name"]: each["template"] for each in named}.get("default")
    if templates is not None:
        check_fields({"chat_template": templates}, str(path), chat_template=str)
    return templates


def read_generation(name_or_path: str, tokenizer_path: Path) -> dict[str, Any]:
    """Return what generation_config.json says, or {} if a folder has none."""
    filename = "generation_config.json"
    if name_or_path in PUBLIC or tokenizer_path.with_name(filename).exists():
        return read_json(find_file(name_or_path, filename))
    return {}


# --- The script -----------------------------------------------------------------------------------


@torch.no_grad()
def difference_to_transformers(name: str, model: nn.Module, tokenizer: tiktoken.Encoding) -> float:
    """Return by how much a model's logits differ from those of transformers, which reads the same files, as a share of
    the largest. Raises ValueError if that package is missing or can't read the files."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"to verify {name}, transformers is needed: pip install transformers"
        ) from error
    path = find_file(name, "config.json")
    options = {"gguf_file": path.name} if is_gguf(path) else {}
    weight = model.wte.weight
    try:
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, dtype=weight.dtype, **options)
    except Exception as error:  # whatever it doesn't know
        raise ValueError(f"transformers can't read {name}: {error}") from error
    ids = torch.tensor([tokenizer.encode_ordinary(VERIFIED_TEXT)], device=weight.device)
    expected = theirs.eval().to(weight.device)(ids).logits.float()
    return float((model(ids).float() - expected).abs().max() / expected.abs().max())


def main(argv: list[str] | None = None) -> None:
    from gpt_kv_cache import generate

    cli = CommandLine(__doc__, "python3 %(prog)s gpt2 --verify")
    cli.add_argument("model", nargs="?", default="pocket", metavar="NAME", help=NAMES)
    cli.add_options(*DEVICE)
    cli.add_argument(
        "--verify",
        action="store_true",
        help="compare with published greedy continuations; if there are none, with transformers' logits",
    )
    with cli.parse(argv) as args:
        published = read_json(EXPECTED_OUTPUTS)["continuations"] if args.verify else []
        is_published = any(entry["model"] == args.model for entry in published)
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        for condition, value in conditions(args.model, model).items():
            print(f"{condition}: {value:,}" if isinstance(value, int) else f"{condition}: {value}")
        if args.verify and not is_published:
            difference = difference_to_transformers(args.model, model, tokenizer)
            allowed = torch.finfo(model.wte.weight.dtype).eps ** 0.5
            verdict = "the same" if difference <= allowed else "DIFFERENT"
            print(
                f"\n{verdict}: logits differ from transformers' by {difference:.1g} of the largest; {allowed:.1g} is rounding"
            )
            sys.exit(difference > allowed)
        encode = partial(tokenizer.encode, allowed_special="all")
        reproduced = []
        for entry in published:
            if entry["model"] != args.model:
                continue
            expected = entry["continuation"]
            prompt = torch.tensor([encode(entry["prompt"])], device=args.device)
            tokens = generate(
                model, prompt, len(encode(expected)), stop_ids=end_tokens_of(tokenizer)
            )
            continuation = tokenizer.decode([int(token) for token in tokens])
            reproduced.append(continuation == expected)
            print(
                f"\n{'same' if reproduced[-1] else 'DIFFERENT'}: {entry['prompt']!r} -> {continuation!r}"
            )
            if not reproduced[-1]:
                print(f"published: {expected!r}\nby: {entry['source']}")
        if reproduced:
            print(f"\n{sum(reproduced)} of {len(reproduced)} published continuations reproduced")
            sys.exit(not all(reproduced))


if __name__ == "__main__":
    main()
