"""GPT-2 weights and tokenizers by name or folder, for any of the GPT files.

`python load_gpt2_weights.py gpt2 --verify` downloads GPT-2 and compares its text with published continuations.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import base64
import pickle
import struct
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from support.files import read_json

HERE = Path(__file__).resolve().parent
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
EXPECTED_OUTPUTS = HERE / "data" / "gpt2_expected_outputs.json"
END_OF_TEXT = "<|endoftext|>"
# Where GPT-2 cuts text before it merges bytes: the form with possessive quantifiers that tiktoken uses; same pieces.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Checkpoint(NamedTuple):
    """A public checkpoint: Hugging Face repository, commit, and the file that holds the weights."""

    repo: str
    revision: str
    weights: str = "model.safetensors"


POCKET = {  # folders
    "pocket": "teacher", "pocket-student": "student", "pocket-student-alone": "student-alone",
    "pocket-student-prompt": "student-prompt", "pocket-student-dropout": "student-dropout", "pocket-bct": "bct",
    "pocket-rotary": "rotary",
}  # fmt: skip
PUBLIC = {
    "gpt2": Checkpoint("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": Checkpoint("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    "gpt2-large": Checkpoint("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
    "gpt2-xl": Checkpoint("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
    "distilgpt2": Checkpoint("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa"),
    "microsoft/DialoGPT-small": Checkpoint("microsoft/DialoGPT-small", "49c537161a457d5256512f9d2d38a87d81ae0f0e"),
    "microsoft/DialoGPT-medium": Checkpoint(
        "microsoft/DialoGPT-medium", "7b40bb0f92c45fefa957d088000d8648e5c7fa33", "pytorch_model.bin"
    ),
    # The one that is not pinned: the hash of its commit could not be established, so it follows the branch.
    "microsoft/DialoGPT-large": Checkpoint("microsoft/DialoGPT-large", "main", "pytorch_model.bin"),
}
# What torch.load raises on damaged files, found by damaging them at random, and (UnpicklingError) if they hold code.
UNREADABLE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError, struct.error, LookupError, ValueError,
              TypeError, AttributeError, AssertionError)
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRAINED = [name for name, folder in POCKET.items() if (HERE / "pocket" / folder).is_dir()]
OTHERS = {"pocket-bct": "gpt_bounded_cache.py --memory bct", "pocket-rotary": "projector.py"}  # no GPT-2: their scripts
NAMES = ", ".join([*(name for name in TRAINED if name not in OTHERS), *PUBLIC]) + ", or a folder"
# What config.json may say about the things that our model has only one way of doing.
SUPPORTED = {
    "model_type": ("gpt2", "bct", "rotary"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "step": (True,),  # of a BCT: both gates, and slots that begin empty
    "forget": (True,),
    "learned_start": (False,),
}


def load_model(name_or_path: str, *, model_class: type[nn.Module], device: torch.device | str = "cpu",
               dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model_class with the weights of a known name or of a folder in Hugging Face format, in eval mode.

    Every tensor must have its parameter, of the same shape, and every parameter its tensor. The class may have no
    buffers. Memory: about one copy of the weights, since files are mapped and copied tensor by tensor.
    Raises ValueError or OSError, in one sentence, if the model can't be found, read or represented.
    """
    config_path = find_file(name_or_path, "config.json")
    config = read_config(config_path, model_class.config_class)
    tensors = read_tensors(name_or_path)
    check_sizes(config, tensors, config_path)
    with torch.device("meta"):  # shapes and strides without memory
        model = model_class(config)
    parameters = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in parameters if name not in tensors]
    wrong += [f"{name} is unexpected" for name in tensors if name not in parameters]
    for name, tensor in tensors.items():
        if name in parameters and tensor.shape != parameters[name].shape:
            wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {tuple(parameters[name].shape)}")
        elif tensor.dtype not in NUMBERS:
            wrong.append(f"{name} holds {tensor.dtype}, not floating-point numbers of 16 bits or more")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"the weights of {name_or_path} don't fit its config.json: {'; '.join(wrong[:8])}{more}")
    model = model.to(dtype).to_empty(device=device)  # keeps the strides: wte stays column-first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.pop(name))  # pop: a tensor that isn't mapped is freed at once
    return model.eval()


def find_file(name_or_path: str, filename: str) -> Path:
    """Return where a file of a model is, after downloading it if need be. A known name wins over a folder so named.

    Raises ValueError if the model is unknown, OSError if the file can't be had.
    """
    folder = HERE / "pocket" / POCKET[name_or_path] if name_or_path in POCKET else Path(name_or_path)
    if name_or_path in PUBLIC:
        return download(PUBLIC[name_or_path], filename)
    if name_or_path not in POCKET and not folder.is_dir():
        others = ", ".join(f"{name} (only {script})" for name, script in OTHERS.items())
        raise ValueError(f"unknown model {name_or_path!r}: choose {NAMES}; {others}")
    if name_or_path in POCKET and not folder.is_dir():
        raise FileNotFoundError(f"the model {name_or_path} is not trained yet: there is no folder {folder}")
    if not (folder / filename).is_file():
        raise FileNotFoundError(f"there is no {filename} in {folder}: a model's folder holds config.json and weights")
    return folder / filename


def download(checkpoint: Checkpoint, filename: str) -> Path:
    """Return the path of a checkpoint's file in the Hugging Face cache, after downloading it if it isn't there."""
    repo, revision, _ = checkpoint
    try:
        return Path(hf_hub_download(repo, filename, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not in the cache
    try:
        # One request that fails at once: without a network hf_hub_download itself would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(repo, filename, revision=revision), timeout=10)
        return Path(hf_hub_download(repo, filename, revision=revision))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise OSError(f"Hugging Face shows no repository {repo} with revision {revision}") from error
    except RemoteEntryNotFoundError as error:
        raise OSError(f"{repo} has no file {filename} at revision {revision}") from error
    except (HTTPError, OSError) as error:  # whatever else a network, a server or a full disk can do
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise OSError(f"can't download {filename} of {repo} ({reason}): run this once with internet, or give a folder "
                      "that holds the model; the model pocket needs no download") from error


def read_config(path: Path, config_class: type) -> Any:
    """Return the config_class that a Hugging Face config.json describes.

    Dropout stays 0 whatever the file says: a loaded model is there to infer. Raises ValueError on what our model
    can't represent.
    """
    config = read_json(path)
    for key, supported in SUPPORTED.items():
        if key in config and config[key] not in supported:
            raise ValueError(f"{path}: {key} is {config[key]!r}, but this GPT-2 supports only "
                             f"{' or '.join(map(repr, supported))}")
    if config.get("n_positions") is not None:  # Hugging Face's name for n_ctx; older files have both
        config["n_ctx"] = config["n_positions"]
    if absent := [key for key in ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd") if config.get(key) is None]:
        raise ValueError(f"{path} lacks {', '.join(absent)}")
    kinds = {field.name: int if field.default is None else type(field.default) for field in fields(config_class)}
    names = [name for name in kinds if name != "dropout"]
    if config.get("slots") and "slots" not in names:
        raise ValueError(f"{path} describes a BCT with {config['slots']} slots: only gpt_bounded_cache.BCT "
                         "can read it, by gpt_bounded_cache.py --memory bct")
    if "slots" in names and not config.get("slots"):
        raise ValueError(f"{path} describes a GPT-2 without memory slots, not a Bounded-Cache Transformer (BCT)")
    if bool(config.get("rotary")) != ("rotary" in names):
        raise ValueError(f"{path}: only pocket/rope.py can read a model with rotary positions, by projector.py --model "
                         "pocket-rotary, and it reads no other")
    given = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in given.items():
        if type(value) is not kinds[name]:
            kind = {int: "a whole number", bool: "true or false", str: "a text"}[kinds[name]]
            raise ValueError(f"{path}: {name} must be {kind}, got {value!r}")
    return config_class(**given)


def check_sizes(config: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError if a size in a config, read from path, is beyond those of the tensors: before a model of it is
    made, which could take all memory or never end."""
    longest = max((max(tensor.shape, default=1) for tensor in tensors.values() if tensor.numel()), default=0)
    for name, size in vars(config).items():
        most, of = (len(tensors), "number of tensors") if name == "n_layer" else (longest, "longest side of any tensor")
        if type(size) is int and size > most:
            raise ValueError(f"{path}: {name} is {size}, but the {of} in the weights is {most}")


def read_tensors(name_or_path: str) -> dict[str, Tensor]:
    """Return a model's tensors by public GPT-2 name, mapped from their files where the format allows it.

    Dropped: causal masks (attn.bias, attn.masked_bias), and lm_head.weight after checking that it equals wte.weight.
    """
    tensors: dict[str, Tensor] = {}
    for path in find_weights(name_or_path):
        for name, tensor in read_weights(path).items():
            name = name.removeprefix("transformer.")
            if name in tensors:
                raise ValueError(f"{path} holds {name} for the second time")
            if not name.endswith((".attn.bias", ".attn.masked_bias")):
                tensors[name] = tensor
    head = tensors.pop("lm_head.weight", None)
    table = tensors.get("wte.weight")
    if None not in (head, table) and (head.dtype != table.dtype or not torch.equal(head, table)):
        raise ValueError(f"lm_head.weight of {name_or_path} differs from wte.weight, but this GPT-2 shares the two")
    return tensors


def find_weights(name_or_path: str) -> list[Path]:
    """Return the files that hold a model's weights: one, or those that an index lists."""
    if name_or_path in PUBLIC:
        return [find_file(name_or_path, PUBLIC[name_or_path].weights)]
    folder = find_file(name_or_path, "config.json").parent
    for filename in ("model.safetensors", "pytorch_model.bin"):
        if (folder / filename).is_file():
            return [folder / filename]
        if (index := folder / f"{filename}.index.json").is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise ValueError(f"{index} has no weight_map from tensors to files")
            for shard in sorted(set(weight_map.values())):
                if Path(shard).name != shard or "\0" in shard:
                    raise ValueError(f"{index} lists {shard!r}, which is not the name of a file beside it")
                if not (folder / shard).is_file():
                    raise FileNotFoundError(f"{index} lists {shard}, which is not there")
            return [folder / shard for shard in sorted(set(weight_map.values()))]
    raise FileNotFoundError(f"there are no weights in {folder}: neither model.safetensors nor pytorch_model.bin")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one .safetensors or .bin file. Raises ValueError if it is damaged or something else."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is cut off, a Git LFS pointer, or not a safetensors file") from error
    with path.open("rb") as file:  # what can't be opened at all says so here
        zipped = file.read(4) == b"PK\x03\x04"  # files from before PyTorch 1.6 aren't, and can't be mapped
    try:  # weights_only, since a pickle could run code
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UNREADABLE as error:
        raise ValueError(f"{path} is cut off, a Git LFS pointer, or not a PyTorch file of plain tensors") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) and isinstance(tensor, Tensor)
                                                for name, tensor in tensors.items()):  # fmt: skip
        raise ValueError(f"{path} holds something else than named tensors")
    for name, x in tensors.items():
        strided = x.layout is torch.strided and x.device.type == "cpu" and not x.is_nested and not x.is_quantized
        if not strided or x.nbytes > x.untyped_storage().nbytes():  # a few numbers may claim to be any number of them
            raise ValueError(f"{path}: {name} is sparse, nested, quantized, expanded or without numbers")
    return tensors


def load_tokenizer(name_or_path: str) -> tiktoken.Encoding:
    """Return the tokenizer of a known name or of a folder: its tokenizer.tiktoken, else GPT-2's if the size fits and
    no file says otherwise.

    Raises ValueError or OSError, in one sentence, if there is none.
    """
    folders: list[Path] = []
    if name_or_path not in PUBLIC:
        config_path = find_file(name_or_path, "config.json")
        vocab_size = read_json(config_path).get("vocab_size")
        shipped = config_path.resolve().parent.parent == HERE / "pocket"  # those share one tokenizer
        folders = [config_path.parent] + [HERE / "pocket" / "teacher"] * shipped
        for folder in folders:
            if (folder / "tokenizer.tiktoken").is_file():
                tokenizer = read_tokenizer(folder / "tokenizer.tiktoken")
                if tokenizer.n_vocab != vocab_size:
                    raise ValueError(f"{folder / 'tokenizer.tiktoken'} makes {tokenizer.n_vocab} tokens, but "
                                     f"{config_path} says {vocab_size}")
                return tokenizer
        if vocab_size != 50257:
            raise ValueError(f"there is no tokenizer.tiktoken in {folders[-1]}, and with {vocab_size} tokens the "
                             f"tokenizer can't be GPT-2's, which has 50257")
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except OSError as error:
        raise OSError("can't download GPT-2's tokenizer, and tiktoken has not cached it: run this once with internet; "
                      "the model pocket needs no download") from error
    for path in (folder / filename for folder in folders for filename in VOCABULARIES):
        if path.exists() and not is_gpt2s(path, gpt2):
            raise ValueError(f"{path} is not GPT-2's: of vocabularies with 50257 tokens only GPT-2's can be read, or a "
                             "tokenizer.tiktoken in the same folder")
    return gpt2


def is_gpt2s(path: Path, gpt2: tiktoken.Encoding) -> bool:
    """Return whether a file from which transformers makes a tokenizer says the same as GPT-2's own."""
    if path.suffix not in (".json", ".txt") or path.name == "vocab.txt":
        return False  # not a byte-level BPE
    chars = byte_characters()
    ids = {"".join(chars[b] for b in gpt2.decode_single_token_bytes(i)): i for i in range(gpt2.n_vocab - 1)}
    merged, ids = [*ids][256:], ids | {END_OF_TEXT: gpt2.eot_token}
    if path.name == "merges.txt":
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.replace(" ", "") for line in lines if line and not line.startswith("#version")] == merged
    content = read_json(path)
    if path.name == "vocab.json":
        return content == ids
    model, before, added = (content.get(key) for key in ("model", "pre_tokenizer", "added_tokens"))
    if not (isinstance(model, dict) and isinstance(model.get("merges"), list) and isinstance(before, dict)):
        return False
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return (model.get("vocab") == ids and all(isinstance(pair, list) for pair in pairs)
            and ["".join(map(str, pair)) for pair in pairs] == merged and content.get("normalizer") is None
            and (before.get("type"), before.get("add_prefix_space")) == ("ByteLevel", False)
            and {str(token.get("content")) for token in added or []} <= {END_OF_TEXT})  # fmt: skip


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
    if sorted(ranks.values()) != list(range(len(lines))) or not ranks.keys() >= {bytes([b]) for b in range(256)}:
        raise ValueError(f"{path} must hold every single byte, and every rank from 0 on once")
    return tiktoken.Encoding(name=path.parent.name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(ranks)})


def main(argv: list[str] | None = None) -> None:
    import gpt_bounded_cache
    import gpt_kv_cache
    from support.cli import PROMPT, CommandLine
    from support.printing import stream

    cli = CommandLine(__doc__, "python3 %(prog)s gpt2 --verify", f"{NAMES}; or pocket-bct")
    cli.add_model_arguments("model")
    cli.add_argument("--verify", action="store_true", help="compare with published greedy continuations")
    with cli.parse(argv) as args:
        published = read_json(EXPECTED_OUTPUTS)["continuations"] if args.verify else []
        expected = [entry for entry in published if entry["model"] == args.model]
        if args.verify and not expected:
            known = ", ".join(sorted({entry["model"] for entry in published}))
            raise ValueError(f"no published continuation of {args.model} to compare with; there are some of {known}")
        is_bct = bool(read_json(find_file(args.model, "config.json")).get("slots"))
        module, kind = (gpt_bounded_cache, gpt_bounded_cache.BCT) if is_bct else (gpt_kv_cache, gpt_kv_cache.GPT)
        model = load_model(args.model, model_class=kind, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        config, count = model.config, sum(parameter.numel() for parameter in model.parameters())
        print(f"{args.model}: {config.n_layer} layers, {config.n_head} heads of {config.head_dim}, width "
              f"{config.n_embd}, context {config.n_ctx}, vocabulary {config.vocab_size}\n{count:,} parameters, "
              f"{str(args.dtype).removeprefix('torch.')}, {count * args.dtype.itemsize:,} bytes on {args.device}\n")

        def continuation(prompt: str, n_tokens: int, cache: Any = None) -> Iterator[torch.Tensor]:
            ids = torch.tensor([tokenizer.encode(prompt, allowed_special="all")], device=args.device)
            return module.generate(model, ids, n_tokens, stop_id=tokenizer.eot_token, cache=cache)

        # DialoGPT answers once a turn has ended.
        prompt = f"Does money buy happiness?{END_OF_TEXT}" if "DialoGPT" in args.model else PROMPT
        print(prompt, end="", flush=True)
        cache = model.new_cache()
        stream(continuation(prompt, 40, cache), tokenizer, cache)
        different = 0
        for entry in expected:
            n_tokens = len(tokenizer.encode(entry["continuation"], allowed_special="all"))
            ours = tokenizer.decode([token.item() for token in continuation(entry["prompt"], n_tokens)])
            same = ours == entry["continuation"]
            different += not same
            print(f"\n{'same' if same else 'DIFFERENT'}: {entry['prompt']!r} -> {ours!r}")
            if not same:
                print(f"published: {entry['continuation']!r}\nby: {entry['source']}")
        if expected:
            print(f"\n{len(expected) - different} of {len(expected)} published continuations reproduced")
            sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
