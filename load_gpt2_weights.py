"""Weights and tokenizers of GPT-2, Llama and Gemma 3 (270M or 1B) by name or folder, for any of the model files.

`python load_gpt2_weights.py gpt2 --verify` downloads GPT-2 and compares its text with published continuations.
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import tiktoken
import torch
from torch import nn

from formats.checkpoints import open_checkpoint
from formats.configs import default_class, kind_of, read_config
from formats.names import NAMES, RANDOM, split_twin
from formats.products import order_for_decoding
from formats.tensors import (
    WithoutDraws,
    choose_dtype,
    copy_tensors,
    drop_head,
    round_weights,
)
from formats.tokenizers import Numbers, Tokenizer, gpt2_tokenizer
from support.cli import DEVICE, CommandLine
from support.conditions import GEOMETRIES, SIZES, conditions, is_geometry
from support.files import read_json
from support.printing import end_tokens_of

HERE = Path(__file__).resolve().parent
VERIFIED_TEXT = "A KV cache keeps the keys and values of the tokens that a model has read."
EXPECTED_OUTPUTS = HERE / "data" / "gpt2_expected_outputs.json"


def load_model(
    name_or_path: str,
    *,
    model_class: type[nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
) -> nn.Module:
    """Return the model of a known name, of a folder in Hugging Face format or of a GGUF file, in eval mode.
    "random:124M" is an untrained GPT-2 of this size, and "smollm2:int4" a twin, whose weights
    round_weights() has rounded.

    model_class: the class to load; by default gpt_kv_cache.GPT, llama_kv_cache.Llama or, if layers
    have windows or latents, hybrid_kv_cache.Hybrid, as config.json says. The class must have no
    buffers. Every tensor in the files must match a parameter in name and shape, and no parameter
    may be missing. A Llama's q, k and v are joined into one parameter, and so are gate and up.
    dtype: "auto" means what the files hold, if the device computes faster in it than in float32,
    else float32; a line of output says which. Every number must be finite, in the file and in
    dtype. Memory: about one copy of the weights, since files are mapped and copied tensor by tensor.
    Raises ValueError or OSError, in one sentence, if the model can't be found, read or represented.
    """
    name, bits = split_twin(name_or_path)
    if name.startswith(RANDOM):
        model_class = model_class or default_class("GPT-2")
        if model_class.config_class().vocab_size != 50257:
            raise ValueError(f"{name} is a GPT-2, not a {model_class.__name__}")
        dtype = torch.float32 if dtype == "auto" else dtype
        model = random_model(model_class, name.removeprefix(RANDOM), device, dtype)
    else:
        checkpoint = open_checkpoint(name_or_path)
        config_class = getattr(model_class, "config_class", None)
        config = read_config(checkpoint.config(), checkpoint.where, config_class)
        tensors = checkpoint.tensors()
        if getattr(config, "tied", True):
            drop_head(tensors, name)
        if config.n_layer > len(tensors):  # a model of so many layers would take forever
            raise ValueError(
                f"{checkpoint.where}: n_layer is {config.n_layer}, but the number of tensors in the weights is {len(tensors)}"
            )
        if dtype == "auto":
            dtype = choose_dtype(tensors, device)
        model_class = model_class or default_class(kind_of(config))
        with torch.device("meta"), WithoutDraws():  # shapes and strides without memory
            model = order_for_decoding(model_class(config).to(dtype))
        model = copy_tensors(tensors, model, device, name)
    return round_weights(model, bits) if bits else model


def load_tokenizer(name_or_path: str) -> tiktoken.Encoding | Tokenizer:
    """Return the tokenizer of a known name, of a folder or of a GGUF file; GPT-2's if a folder has
    none and the size of the vocabulary fits. An untrained model has GPT-2's, or Numbers, with a
    warning, if that can't be loaded.

    Raises ValueError or OSError, in one sentence, if there is none.
    """
    if not name_or_path.startswith(RANDOM):
        return open_checkpoint(name_or_path).tokenizer()
    try:
        return gpt2_tokenizer()
    except OSError as error:
        warnings.warn(f"tokens are shown as numbers: {error}", stacklevel=2)
        return Numbers()


def random_model(
    model_class: type[nn.Module],
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a model of a geometry with random weights, the same every time, in eval mode. Times
    don't depend on the weights. The vocabulary is GPT-2's. Raises ValueError if that is no geometry."""
    if not is_geometry(name):
        raise ValueError(f"an untrained model is random:SIZE, with {GEOMETRIES}, got {name!r}")
    config = SIZES.get(name)
    if config is None:
        layers, heads, width = map(int, name.split("x"))
        config = {"n_layer": layers, "n_head": heads, "n_embd": width}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config)).to(device, dtype)
    return order_for_decoding(model).eval()


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
    folder, options = open_checkpoint(name).transformers_arguments()
    weight = model.wte.weight
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=weight.dtype, **options)
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
