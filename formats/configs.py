"""From the content of a config.json to the config of one of our models."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from support.files import check_fields, short_repr

# A key with such a word may change what a model computes: it is in one of the tables here, or refused.
TELLING = re.compile("rope|attn|attention|causal|window|scal|norm|bias|act|softcap|quant")
HARMLESS = (  # keys with such a word that change nothing, for a model that isn't being trained
    "_sliding_window_pattern",  # beside layer_types, of files that transformers writes
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "activation_dropout",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "norm_topk_prob",  # of experts
    "output_attentions",
    "reorder_and_upcast_attn",
    "routed_scaling_factor",  # of experts
    "summary_activation",
)
# Keys of config.json for which our models support only some values, and these values.
SUPPORTED = {
    "GPT-2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "is_causal": (True,),
    },
    "Llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1.0,),
        "is_causal": (True,),
        "rope_interleaved": (False,),
        "use_mrope": (False,),
    },
    "gemma3_text": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    "youtu": {"rope_interleave": (True,)},
    "deepseek_v3": {"rope_interleave": (True,)},
}
# By config.json's model_type; BCT is ours: a GPT-2 with memory slots. A Llama is a Hybrid if a layer
# keeps something else than all keys and values.
KIND_OF_MODEL_TYPE = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mistral": "Llama",
    "qwen2": "Llama",
    "qwen3": "Llama",
    "gemma3_text": "Llama",
    "youtu": "Llama",
    "deepseek_v3": "Llama",
    "bct": "BCT",
}
# Fields of LlamaConfig that the model_type decides.
FIELDS_OF_MODEL_TYPE = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3_text": {"gemma": True},
}
SCRIPT_OF_KIND = {
    "GPT-2": "a GPT-2: gpt_kv_cache.py can read it",
    "Llama": "a Llama: llama_kv_cache.py, lecture 4, can read it, and compress.py write also in a window",
    "Hybrid": "a model with windows or latents: hybrid_kv_cache.py, lecture 5, can read it",
    "BCT": "a BCT: gpt_bounded_cache.py --memory bct can read it",
}
LARGEST = 2**31 - 1  # the largest whole number that a file may give: torch's int32
MOST_LAYERS = 10**6  # that are listed before the tensors are counted
# Fields that every file has to give.
REQUIRED = ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd")
SHARED_FIELDS = {  # Hugging Face's name: LlamaConfig's
    "tie_word_embeddings": "tied",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_ctx",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "norm_eps",
}
LLAMA_FIELDS = SHARED_FIELDS | {"num_key_value_heads": "n_kv_head", "head_dim": "head_dim"}
LATENT_FIELDS = SHARED_FIELDS | {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "head_dim",
    "qk_rope_head_dim": "rope_dim",
}
FIELDS_BY_MODEL_TYPE = {  # where they aren't LLAMA_FIELDS
    "gemma3_text": LLAMA_FIELDS | {"query_pre_attn_scalar": "query_scalar"},
    "youtu": LATENT_FIELDS,
    "deepseek_v3": LATENT_FIELDS,
}
MORE_LLAMA_KEYS = (  # with a telling word, which are read, too
    "max_window_layers",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
)
GPT2_SYNONYMS = {  # which transformers reads, too: ours
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_ctx",
}
LLAMA_DEFAULTS = {  # those of transformers
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": [],
    "use_sliding_window": True,
}
DEFAULTS_OF_MODEL_TYPE = {  # those of transformers that differ from a Llama's
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_window_layers": 0},
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "youtu": {"tie_word_embeddings": True},
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
    import hybrid_kv_cache
    import llama_kv_cache

    classes = {"Llama": llama_kv_cache.Llama, "Hybrid": hybrid_kv_cache.Hybrid}
    return classes.get(kind, gpt_kv_cache.GPT)


def kind_of(config: Any) -> str:
    """Return the kind of model that a config, or the class of one, describes: a key of SCRIPT_OF_KIND."""
    if hasattr(config, "kinds"):
        return "Hybrid"
    if hasattr(config, "rope_theta"):
        return "Llama"
    return "BCT" if hasattr(config, "slots") else "GPT-2"


def read_config(content: dict[str, Any], where: str, config_class: type | None = None) -> Any:
    """Return the config that the content of a config.json describes.

    where: the file to name in an error; config_class: the class of config that the file must
    describe; None: a GPT-2's, a Llama's or a Hybrid's, as the file says. Dropout stays 0 whatever
    the file says, since a loaded model is for inference.
    Raises ValueError if the file says something that our models can't represent.
    """
    model_type = content.get("model_type") or "gpt2"
    check_choice(where, "model_type", model_type, [*KIND_OF_MODEL_TYPE])
    defaults = DEFAULTS_OF_MODEL_TYPE.get(model_type, {})
    content = defaults | content
    for key, value in [*content.items()]:
        if value is None and key != "rms_norm_eps":  # which has no default for null
            del content[key]
    kind = KIND_OF_MODEL_TYPE[model_type]
    read_class = config_class or default_class(kind).config_class
    if kind == "Llama":
        read_class = default_class("Hybrid").config_class  # whose fields are a Llama's, and more
    types = {}  # of each field of the config
    for field in fields(read_class):
        types[field.name] = int if field.default is None else type(field.default)
    supported = SUPPORTED["GPT-2"]
    read_keys, read_fields = [*types, *GPT2_SYNONYMS], gpt2_fields
    if kind == "Llama":
        supported = SUPPORTED["Llama"] | SUPPORTED.get(model_type, {})
        names = FIELDS_BY_MODEL_TYPE.get(model_type, LLAMA_FIELDS)
        read_keys, read_fields = [*names, *defaults, *MORE_LLAMA_KEYS], llama_fields
    check_keys(content, (*read_keys, *supported, *HARMLESS), where)
    for key, choices in supported.items():
        if key in content:
            check_choice(where, key, content[key], choices)
    values = read_fields(content, types, where)
    if "kinds" in values:
        kind = "Hybrid"
    config_class = config_class or default_class(kind).config_class
    if kind != kind_of(config_class):
        raise ValueError(f"{where} describes {SCRIPT_OF_KIND[kind]}")
    try:
        config = config_class(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if kind == "Llama" and config.head_dim % 2:
        raise ValueError(f"{where}: head_dim must be even, to be rotated, got {config.head_dim}")
    return config


def check_keys(content: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ValueError if a key that isn't known may change what a model computes, by its name."""
    for key, value in content.items():
        if TELLING.search(key.lower()) and key not in known:
            raise ValueError(
                f"{where}: {short_repr(key)}, {short_repr(value)}, isn't known, and may change what the model computes"
            )


def gpt2_fields(content: dict[str, Any], types: dict[str, type], where: str) -> dict[str, Any]:
    """Return the fields of a GPT-2's config, or a BCT's, from the content of a config.json."""
    if "n_positions" in content:  # Hugging Face's name for n_ctx; older files have both
        content = content | {"n_ctx": content["n_positions"]}
    for synonym, name in GPT2_SYNONYMS.items():
        if synonym in content:
            check_choice(where, synonym, content[synonym], [content.get(name)])
    names = {name: name for name in types if name != "dropout"}
    return select_fields(content, names, types, REQUIRED, where)


def llama_fields(content: dict[str, Any], types: dict[str, type], where: str) -> dict[str, Any]:
    """Return the fields of a Llama's or a Hybrid's config from the content of a config.json."""
    content = LLAMA_DEFAULTS | content
    model_type = content["model_type"]
    names = FIELDS_BY_MODEL_TYPE.get(model_type, LLAMA_FIELDS)
    values = select_fields(content, names, types, (*REQUIRED, "n_inner"), where)
    if not values["norm_eps"] > 0:
        raise ValueError(f"{where}: rms_norm_eps must be more than 0, got {values['norm_eps']}")
    check_size(where, "num_hidden_layers", values["n_layer"], MOST_LAYERS)
    values.setdefault("n_kv_head", values["n_head"])
    values |= FIELDS_OF_MODEL_TYPE.get(model_type, {})
    read_layers = latent_fields if names is LATENT_FIELDS else window_fields
    values |= read_layers(content, values, where)
    read_rotation = gemma_rotary_fields if model_type == "gemma3_text" else rotary_fields
    return values | read_rotation(content, where)


def latent_fields(content: dict[str, Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that say that all layers keep latents. values: those that were read."""
    n_layer = values["n_layer"]
    content = {"first_k_dense_replace": n_layer} | content
    n_dense = check_fields(content, where, first_k_dense_replace=int)["first_k_dense_replace"]
    if n_dense < n_layer:
        raise ValueError(
            f"{where}: first_k_dense_replace is {n_dense}, and must be at least "
            f"num_hidden_layers, {n_layer}: experts aren't supported"
        )
    check_choice(where, "v_head_dim", content.get("v_head_dim"), [values.get("head_dim")])
    if (size := values.get("head_dim", 0)) % 2:
        raise ValueError(f"{where}: qk_nope_head_dim must be even, got {size}")
    return {"kinds": ("latent",) * n_layer}


def window_fields(content: dict[str, Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that say which layers have windows; {} if none, as in a Llama. values: those
    that were read."""
    check_fields(content, where, layer_types=list, use_sliding_window=bool)
    model_type, n_layer, n_ctx = content["model_type"], values["n_layer"], values["n_ctx"]
    layer_types, known_types, window = content["layer_types"], ["full_attention"], n_ctx
    may_have_window = content["use_sliding_window"] or model_type == "mistral"
    if may_have_window and "sliding_window" in content:
        window = check_fields(content, where, sliding_window=int)["sliding_window"]
        known_types.append("sliding_attention")  # which is full as well, with a large window
    is_plain = window >= n_ctx and model_type != "gemma3_text"
    if not is_plain:
        layer_types = layer_types or default_layer_types(content, n_layer, where)
        if model_type == "llama" or not layer_types:
            raise ValueError(
                f"{where}: sliding_window is {window}, and must be null or at least "
                f"max_position_embeddings, {n_ctx}: which layers have a window isn't known"
            )
        if model_type == "mistral":
            known_types = ["sliding_attention"]
    for layer_type in layer_types:
        check_choice(where, "layer_types", layer_type, known_types)
    if is_plain:
        return {}
    kinds = tuple("full" if name == "full_attention" else "window" for name in layer_types)
    return {"kinds": kinds, "window": window, "window_theta": None, "sinks": False}


def default_layer_types(content: dict[str, Any], n_layer: int, where: str) -> list[str]:
    """Return the layer_types that a file without them means; [] if it doesn't say."""
    full, sliding = "full_attention", "sliding_attention"
    if "max_window_layers" in content:  # so many are full; then the others
        n_full = check_fields(content, where, max_window_layers=int)["max_window_layers"]
        return [full if layer < n_full else sliding for layer in range(n_layer)]
    if content["model_type"] != "gemma3_text":
        return []
    name = "sliding_window_pattern"  # the last one of so many is full
    content = {name: 6} | content
    pattern = check_fields(content, where, **{name: int})[name]
    if pattern < 1:
        raise ValueError(f"{where}: {name} must be at least 1, got {pattern}")
    return [sliding if (layer + 1) % pattern else full for layer in range(n_layer)]


def select_fields(
    content: dict[str, Any],
    names: dict[str, str],
    types: dict[str, type],
    required: Sequence[str],
    where: str,
) -> dict[str, Any]:
    """Return the values that a config.json gives to our fields. names: our field's name by Hugging
    Face's. Raises ValueError if a value has another type or is too large, or a required one is missing."""
    given = {}
    for public, field in names.items():
        if public in content or field in required:
            given[public] = field
    check_fields(content, where, **{public: types[field] for public, field in given.items()})
    for public in given:
        check_size(where, public, content[public])
    return {field: content[public] for public, field in given.items()}


def check_size(where: str, key: str, value: object, limit: int = LARGEST) -> None:
    """Raise ValueError if a value is a whole number of more than the limit."""
    if isinstance(value, int) and value > limit:
        raise ValueError(f"{where}: {key} must be at most {limit}, got {short_repr(value)}")


def check_choice(where: str, key: str, value: object, supported: Sequence[object]) -> None:
    """Raise ValueError if a value in a config.json is none of those that our models support."""
    for choice in supported:  # True is no 1 here
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return
    known = " or ".join(map(repr, supported))
    raise ValueError(f"{where}: {key} is {short_repr(value)}, and only {known} is supported")


def gemma_rotary_fields(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return rope_theta, rope_scaling and window_theta of a Gemma 3's config. Newer files have a
    rope_parameters for each type of layer, older ones rope_local_base_freq for windows."""
    usual = {"full_attention": {"rope_type": "default"}}  # which an older "type" doesn't change
    by_type = content.get("rope_parameters", usual)
    check_fields(by_type, f"rope_parameters of {where}")
    for layer_type in by_type:
        known = ["full_attention", "sliding_attention"]
        check_choice(where, "rope_parameters", layer_type, known)
    full = check_fields(by_type.get("full_attention") or {}, f"rope_parameters of {where}")
    full = full | check_fields(content.get("rope_scaling", {}), f"rope_scaling of {where}")
    content = content | {"rope_scaling": None, "rope_parameters": full}
    values = rotary_fields(content, where)
    theta = content["rope_local_base_freq"]
    local = {"rope_parameters": by_type.get("sliding_attention"), "rope_theta": theta}
    window = rotary_fields(content | local, where)
    if "rope_scaling" in window:
        raise ValueError(f"{where}: only full_attention may have a rope_type other than 'default'")
    return values | {"window_theta": window["rope_theta"]}


def rotary_fields(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of a Llama's config. Newer files have rope_parameters, older ones rope_theta
    and rope_scaling; of both, transformers takes the latter."""
    rope_where = f"rope_parameters of {where}"
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    rope = {"rope_theta": content.get("rope_theta", 10_000.0)} | check_fields(rope, rope_where)
    types = {"rope_theta": float}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_choice(where, "rope_type", rope_type, ["default", "llama3", "linear"])
    check_choice(where, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), [1.0])
    if rope_type == "llama3":
        types |= LLAMA3_SCALING
        n_ctx = "original_max_position_embeddings"
        rope |= {n_ctx: content[n_ctx]} if n_ctx in content else {}  # as transformers prefers it
    if rope_type == "linear":
        types["factor"] = float
    for key in rope:
        if key not in (*types, "rope_type", "type", "partial_rotary_factor"):
            raise ValueError(f"{rope_where}: {short_repr(key)} isn't known of type {rope_type!r}")
    check_fields(rope, rope_where, **types)
    for name in types:
        check_size(rope_where, name, rope[name])
        if not rope[name] >= 1e-3:  # less could make numbers that aren't finite
            raise ValueError(f"{rope_where}: {name} must be at least 0.001, got {rope[name]}")
    theta, *scaling = [number(rope[name]) for name, number in types.items()]
    if not scaling:
        return {"rope_theta": theta}
    if rope_type == "linear":  # in a single token no pair goes round once: all are slowed down
        scaling = [*scaling, 1.0, 2.0, 1]
    _, low, high, _ = scaling
    if not low < high:
        raise ValueError(
            f"{rope_where}: low_freq_factor, {low}, must be less than high_freq_factor, {high}"
        )
    return {"rope_theta": theta, "rope_scaling": tuple(scaling)}
