"""Where a model is read from: a folder, a public repository or a GGUF file. Its name decides that once."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from formats.configs import KIND_OF_MODEL_TYPE, check_choice
from formats.gguf_files import GGUFFile, find_smollm2
from formats.names import LLAMAS, POCKET, PUBLIC, SMOLLM2, advice_on_name, split_twin
from formats.tensors import read_weights
from formats.tokenizers import (
    LLAMA3_FILE,
    READERS,
    TIKTOKEN_FILE,
    Tokenizer,
    check_named_tokens,
    end_tokens,
    gpt2_tokenizer,
    read_tokenizer,
)
from support.files import (
    check_fields,
    download_error,
    read_json,
    read_text,
    regular_file,
    short_repr,
)

POCKET_FOLDER = Path(__file__).resolve().parent.parent / "pocket"
TOKENIZER_CONFIG = "tokenizer_config.json"
# A file that a tokenizer is made of.
TOKENIZER_FILE = r"(tokenizer|vocab|merges|spiece)\.(json|txt|model)"
# What torch.compile and parallel training put into the names of tensors.
WRAPPERS = r"(?<![^.])(_orig_mod|module)\."
WEIGHTS_FILES = (  # the first of these that a folder holds
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Folder:
    """A folder in Hugging Face's format: config.json, weights and a tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def where(self) -> str:
        """The path of config.json, which errors name."""
        return str(self.file("config.json"))

    def file(self, filename: str) -> Path:
        """Return the path of one of the files. Raises FileNotFoundError if there is no such file."""
        if not (self.path / filename).exists():
            raise FileNotFoundError(
                f"there is no {filename} in {self.path}: a model is config.json, weights and a tokenizer"
            )
        return regular_file(self.path / filename)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return read_json(self.file("config.json"))

    def optional(self, filename: str) -> dict[str, Any]:
        """Return the content of one of the files, {} if there is none."""
        return read_json(self.file(filename)) if (self.path / filename).exists() else {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by public name (without transformer. or model., and what torch.compile and parallel training
        put before names), memory-mapped from their files where the format allows it. Causal masks and rotary frequencies
        are left out."""
        tensors: dict[str, Tensor] = {}
        for path in self.weights_files():
            for name, tensor in read_weights(path).items():
                name = re.sub(WRAPPERS, "", name)
                name = name.removeprefix("transformer.").removeprefix("model.")
                if name in tensors:
                    raise ValueError(f"{path} holds {name} for the second time")
                if not name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
                    tensors[name] = tensor
        return tensors

    def weights_files(self) -> list[Path]:
        """Return the files that hold the weights: one, or the shards that an index lists."""
        path = self.first_weights_file()
        if path.suffix != ".json":
            return [path]
        shards = sorted({*map(str, read_json(path, weight_map=dict)["weight_map"].values())})
        for shard in shards:
            if not re.fullmatch(r"[^/\\\0]+\.(safetensors|bin)", shard):
                raise ValueError(
                    f"{path} lists {short_repr(shard)}, not a file of weights beside it"
                )
        return [self.file(shard) for shard in shards]

    def first_weights_file(self) -> Path:
        """Return the file that holds the weights, or the index of those that do."""
        for filename in WEIGHTS_FILES:
            if (self.path / filename).exists():
                return self.file(filename)
        raise FileNotFoundError(
            f"there are no weights in {self.path}: neither model.safetensors nor pytorch_model.bin"
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; GPT-2's if there is none and the size of the vocabulary fits. Raises ValueError if it
        doesn't fit."""
        config = check_fields(self.config(), self.where, vocab_size=int)
        path = self.tokenizer_file(config)
        if path is None:
            return gpt2_tokenizer()
        tokenizer = read_tokenizer(path)
        tokenizer.chat_template = self.chat_template()
        tokenizer.named_tokens = self.named_tokens()
        size, n_vocab = config["vocab_size"], tokenizer.n_vocab
        fits = n_vocab == size
        if path.name != TIKTOKEN_FILE:
            generation_config = self.optional("generation_config.json")
            tokenizer.end_ids = end_tokens(tokenizer, path, config, generation_config)
            where = f"{self.path / TOKENIZER_CONFIG} or special_tokens_map.json"
            check_named_tokens(tokenizer, self.tokenizer_config(), where)
            tokenizer.n_rows = size  # some may have no token, and a control token may have no row
            without_row = {tokenizer.added_tokens.get(i) for i in range(size, n_vocab)}
            fits = all(token and token.special for token in without_row)
            fits = fits and max(tokenizer.end_ids) < size
        if not fits:
            raise ValueError(f"{path} makes {n_vocab} tokens, but {self.where} says {size}")
        return tokenizer

    def tokenizer_file(self, config: dict[str, Any]) -> Path | None:
        """Return the path of the tokenizer's file; None if there is none, but a vocabulary of GPT-2's size. Raises
        FileNotFoundError or ValueError if there is none and the vocabulary is another."""
        filenames = {path.name for path in self.path.iterdir()}
        model_type = config.get("model_type") or "gpt2"
        check_choice(self.where, "model_type", model_type, [*KIND_OF_MODEL_TYPE])
        if TIKTOKEN_FILE not in filenames and self.path.resolve().parent == POCKET_FOLDER:
            return (
                POCKET_FOLDER / "teacher" / TIKTOKEN_FILE
            )  # the repository's own models share one
        for filename in READERS:
            if filename in filenames and (model_type == "llama" or filename != LLAMA3_FILE):
                return self.file(filename)
        is_llama = KIND_OF_MODEL_TYPE[model_type] == "Llama"
        if is_llama or any(re.fullmatch(TOKENIZER_FILE, filename) for filename in filenames):
            return self.file("tokenizer.json")
        if config["vocab_size"] == 50257:
            return None
        raise ValueError(
            f"there is no {TIKTOKEN_FILE} in {self.path}, and GPT-2's has 50257 tokens, not "
            f"{config['vocab_size']}"
        )

    def tokenizer_config(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says, {} if there is none. As in transformers, an older folder's
        special_tokens_map.json takes precedence, and one with added_tokens_decoder isn't older."""
        content = self.optional(TOKENIZER_CONFIG)
        if "added_tokens_decoder" not in content:
            content |= self.optional("special_tokens_map.json")
        return content

    def chat_template(self) -> str | None:
        """Return the form of a conversation, in Jinja, that the folder gives; None if it gives none."""
        if (self.path / "chat_template.jinja").exists():
            return read_text(self.path / "chat_template.jinja")
        path = self.path / TOKENIZER_CONFIG
        templates = self.tokenizer_config().get("chat_template")
        if isinstance(templates, list):  # several, by name
            named = [check_fields(each, str(path), name=str, template=str) for each in templates]
            templates = {each["name"]: each["template"] for each in named}.get("default")
        if templates is not None:
            check_fields({"chat_template": templates}, str(path), chat_template=str)
        return templates

    def named_tokens(self) -> dict[str, str]:
        """Return the tokens that a template may use, by name, such as bos_token."""
        tokens = {}
        for name, token in self.tokenizer_config().items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
        return tokens

    def transformers_arguments(self) -> tuple[Path, dict[str, str]]:
        """Return how from_pretrained() of transformers is told to read the same model."""
        return self.path, {}


class PublicModel(Folder):
    """A folder in Hugging Face's cache, whose files are downloaded when they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.repository = PUBLIC[name]

    @property
    def path(self) -> Path:
        return self.file("config.json").parent

    def file(self, filename: str) -> Path:
        """Return the path of a file in the cache, after downloading it if it isn't there. Raises OSError if it can't be
        downloaded."""
        repo, revision, _ = self.repository
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

    def first_weights_file(self) -> Path:
        return self.file(self.repository.weights)

    def tokenizer_file(self, config: dict[str, Any]) -> Path:
        return self.file("tokenizer.json")

    def tokenizer(self) -> Tokenizer:
        if self.name not in LLAMAS:
            return gpt2_tokenizer()
        self.file("generation_config.json")  # which downloads it
        tokenizer = super().tokenizer()
        tokenizer.is_instruct = "Instruct" in self.name
        return tokenizer

    def chat_template(self) -> None:
        """Public models have one of the fixed forms."""


def open_checkpoint(name_or_path: str) -> Folder | GGUFFile:
    """Return what the model of a name or path is read from. A known name takes precedence over a folder of that name.

    Raises ValueError if the model is unknown. Its files are looked for, or downloaded, when they are asked for.
    """
    name, _ = split_twin(name_or_path)
    path = Path(name)
    if name in PUBLIC:
        return PublicModel(name)
    if name == SMOLLM2:
        return GGUFFile(find_smollm2())
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return GGUFFile(path)
    if name in POCKET:
        return Folder(POCKET_FOLDER / POCKET[name])
    if path.is_dir():
        return Folder(path)
    raise ValueError(f"unknown model {name!r}: {advice_on_name(name)}")
