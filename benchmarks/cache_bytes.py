"""Bytes of a model's cache by its config.json, beside the same model with full attention.

`python3 -m benchmarks.cache_bytes` prints the models of data/model_sizes.json, `... FOLDER` each
kind of layer of one model. No weights are read, so the model may be of any size, and of any type
that transformers has a configuration for, and whose file has num_hidden_layers. Where the file is
silent otherwise, transformers' default holds, as when the model is loaded. A layer keeps of a text:

    full     keys and values of every token: key-value heads x their sizes
    window   the same of as many tokens as a query sees
    latent   kv_lora_rank + qk_rope_head_dim numbers of every token
    state    a matrix a head, and the last inputs of a convolution, at any length

A state is float32 in any model. For 87 types of models these are the sizes of transformers' caches,
but for one token less in a window and one more input of a convolution. Our windows hold one token
more, and others whole blocks. An implementation that holds the keys and values made of latents
holds as much as with full attention.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from formats.configs import check_choice
from support.cli import CommandLine, whole_number
from support.files import check_fields, read_json
from support.tables import table

KNOWN_MODELS = Path(__file__).resolve().parents[1] / "data" / "model_sizes.json"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}  # bytes of a number
KINDS = ("full_attention", "sliding_attention", "linear_attention")
# What these types of models keep isn't what their configurations say.
OTHERS = ("dory", "jetmoe", "mimo_v2_flash", "mllama_text_model")


class Layer(NamedTuple):
    """What a layer keeps of a text, in bytes."""

    kind: str
    full_token: int  # of each token, if the layer had full attention
    token: int = 0  # of each token that it keeps
    most: float = math.inf  # tokens that it keeps at most
    fixed: int = 0  # at any length

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a text of this many tokens."""
        return self.fixed + self.token * min(tokens, self.most)


def layers_of(content: Mapping[str, Any], where: str, itemsize: int) -> list[Layer]:
    """Return what each layer keeps, by the content of a config.json. itemsize: bytes of a number.
    Raises ValueError, which names `where`, if a size is missing or a kind of layer isn't known."""
    try:
        from transformers import AutoConfig
        from transformers.cache_utils import get_layer_types_and_kwargs
    except ImportError as error:
        raise ValueError(
            "transformers 5 is needed, which knows all models' defaults: pip install transformers"
        ) from error
    check_fields(content, where, model_type=str)
    check_fields(content.get("text_config", content), where, num_hidden_layers=int)
    try:
        config = AutoConfig.for_model(**content)
        of_text = config.get_text_config(decoder=True)
        kinds, _ = get_layer_types_and_kwargs(of_text)
        sizes_of_layers = [layer.to_dict() for layer in of_text.per_layer_config]
    except Exception as error:  # each type of model has errors of its own
        raise ValueError(f"{where}: transformers can't read it: {error}") from error
    check_choice(where, "is_encoder_decoder", config.is_encoder_decoder, [False])
    if of_text.model_type in OTHERS:
        raise ValueError(f"{where}: {of_text.model_type} keeps other sizes than its file names")
    layers = []
    for kind, sizes in zip(kinds, sizes_of_layers, strict=True):
        check_choice(where, "layer_types", kind, KINDS)
        given = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
        try:
            layers.append(layer_of(kind, given, itemsize))
        except KeyError as error:
            raise ValueError(f"{where} needs {error}, a whole number of at least 1") from error
    if not layers:
        raise ValueError(f"{where} has no layers")
    return layers


def layer_of(kind: str, sizes: Mapping[str, Any], itemsize: int) -> Layer:
    """Return what a layer of one of KINDS keeps. Raises KeyError if one of its sizes is missing."""
    if "kv_lora_rank" in sizes:
        name, rotated = "latent", sizes["qk_rope_head_dim"]
        token = itemsize * (sizes["kv_lora_rank"] + rotated)
        head = sizes["qk_nope_head_dim"] + rotated + sizes["v_head_dim"]
        full_token = itemsize * sizes["num_attention_heads"] * head
    else:
        name = "full"
        head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        full_token = token = itemsize * 2 * sizes["num_key_value_heads"] * head
    if kind == "sliding_attention":
        window = sizes["sliding_window"]
        return Layer(f"window {window:,}", full_token, token, window)
    if kind == "linear_attention":
        key, values = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
        values *= sizes["linear_num_value_heads"]
        inputs = 2 * key * sizes["linear_num_key_heads"] + values
        inputs *= sizes["linear_conv_kernel_dim"] - 1
        return Layer("state", full_token, fixed=4 * key * values + itemsize * inputs)
    return Layer(name, full_token, token)


def table_of(groups: Mapping[str, Sequence[Layer]], lengths: Iterable[int]) -> str:
    """Return a table of groups of layers by name: bytes a token if all had full attention; and at
    each length bytes a token as they are, their share, and the MB of such a text."""
    header, rows = ["", "layers", "all full"], []
    for n in lengths:
        header += [f"at {n:,}", "", "MB"]
    for name, layers in groups.items():
        counts = Counter(layer.kind for layer in layers).items()
        full_token = sum(layer.full_token for layer in layers)
        row = [name, ", ".join(f"{count} {kind}" for kind, count in counts), f"{full_token:,}"]
        for n in lengths:
            nbytes = sum(layer.nbytes(n) for layer in layers)
            share = f"{nbytes / (n * full_token):.1%}"
            row += [f"{nbytes / n:,.0f}", share, f"{nbytes / 1e6:,.1f}"]
        rows.append(row)
    return table(header, rows, left_aligned=2)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m benchmarks.cache_bytes FOLDER --tokens 4096 32768")
    about = "a model's folder or config.json; default: known models"
    cli.add_argument("model", nargs="?", type=Path, metavar="FOLDER", help=about)
    lengths = {"nargs": "+", "type": whole_number(1), "default": [8192, 131072]}
    cli.add_argument("--tokens", **lengths, metavar="N", help="lengths of a text")
    about = "number format of keys and values"
    cli.add_argument("--dtype", choices=ITEMSIZE, default="bfloat16", help=about)
    with cli.parse(argv) as args:
        itemsize = ITEMSIZE[args.dtype]
        if args.model is None:
            models = read_json(KNOWN_MODELS).items()
            groups = {name: layers_of(model["config"], name, itemsize) for name, model in models}
        else:
            path = args.model / "config.json" if args.model.is_dir() else args.model
            layers = layers_of(read_json(path), str(path), itemsize)
            groups = {kind: [x for x in layers if x.kind == kind] for kind, *_ in layers}
            groups["all"] = layers
        print(f"Bytes a token in {args.dtype}, if all layers were full, and at lengths of a text;")
        print("MB: 10^6 bytes, of 1 text of this length\n")
        print(table_of(groups, args.tokens))


if __name__ == "__main__":
    main()
