"""Tokenizers: vocabulary files in four published formats become byte-pair encodings of tiktoken.

read_tokenizer() takes any of the formats; READERS at the end of this file lists them.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from support.cli import ARTICLE
from support.files import check_fields, download_error, read_json, read_text, short_repr

TIKTOKEN_FILE = "tokenizer.tiktoken"
LLAMA3_FILE = "tokenizer.model"
END_OF_TEXT = "<|endoftext|>"
# Where GPT-2 cuts text before it merges bytes: the form with possessive quantifiers that tiktoken uses; same pieces.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The same after each digit has been cut off from all else: spaces that a digit follows end a piece.
GPT2_DIGITS_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"
)
# What Llama 3's own file, tokenizer.model, leaves out: where text is cut, and its special tokens, which follow all
# others. Source: llama_models/llama3/tokenizer.py of the package llama-models.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RESERVED = 244  # of its 256 special tokens, without a name yet
LLAMA3_SPECIAL = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    "image",
)


class Numbers:
    """Stands for GPT-2's tokenizer where that can't be loaded: it knows one prompt, the KV cache article's, and shows
    a token as its number."""

    eot_token = 50256

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the article's prompt in GPT-2's tokens. Raises ValueError for any other text."""
        known = ARTICLE["prompt"]
        if text != known:
            raise ValueError(
                f"without GPT-2's tokenizer the prompt must be {known!r}, got {text!r}"
            )
        return [15496, 11, 314, 716]

    def decode_single_token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()


class Tokenizer(tiktoken.Encoding):
    """A byte-pair encoding from a model's files.

    start_ids: the tokens that begin a whole text, which is one with special tokens allowed ("all").
    end_ids: the tokens that end a text, each of them alone.
    missing_bytes: those without a token, which encode() refuses (SmolLM2's vocabulary lacks 21: rare control
    characters, and bytes that UTF-8 hardly uses).
    """

    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    missing_bytes: frozenset[int] = frozenset()

    def encode(self, text: str, *, allowed_special: Any = frozenset(), **options: Any) -> list[int]:
        """Return a text's tokens. Raises ValueError if it has a character without one."""
        if self.missing_bytes:
            for char in sorted({*text}):
                if not self.missing_bytes.isdisjoint(char.encode(errors="replace")):
                    raise ValueError(f"the model's vocabulary has no token for {char!r}")
        ids = super().encode(text, allowed_special=allowed_special, **options)
        return [*self.start_ids, *ids] if allowed_special == "all" else ids

    def decode_single_token_bytes(self, token: int) -> bytes:
        try:
            return super().decode_single_token_bytes(token)
        except KeyError:  # a model may have more rows of embeddings than its tokenizer has tokens
            return f"<|{token}|>".encode()

    def decode(self, tokens: Iterable[int], errors: str = "replace") -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode("utf-8", errors)

    @property
    def eot_token(self) -> int:
        return self.end_ids[0]


def gpt2_tokenizer() -> tiktoken.Encoding:
    """Return GPT-2's own tokenizer, downloaded if tiktoken has not cached it."""
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever a network, its settings, a server or a full disk can do
        raise download_error("GPT-2's tokenizer", error) from error


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file whose name is one of READERS. Raises ValueError if the file isn't what its name
    says, or is nothing that tiktoken can do."""
    return READERS[path.name](path)


# --- tiktoken's format: a line for each token, in base64, and its rank ----------------------------


def read_tiktoken(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.tiktoken: text is cut as GPT-2's is, and its one special token ends it."""
    return with_special_tokens(path, GPT2_PATTERN, [END_OF_TEXT])


def read_llama3(path: Path) -> Tokenizer:
    """Return the tokenizer in Llama 3's tokenizer.model: its pattern and special tokens are not in the file."""
    reserved = [f"reserved_special_token_{2 + i}" for i in range(LLAMA3_RESERVED)]
    special_tokens = [f"<|{name}|>" for name in (*LLAMA3_SPECIAL, *reserved)]
    tokenizer = with_special_tokens(path, LLAMA3_PATTERN, special_tokens)
    tokenizer.start_ids = tokenizer.end_ids
    return tokenizer


def with_special_tokens(path: Path, pattern: str, special_tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a file of ranks; special tokens follow its last one, and the first of them ends a text."""
    ranks = read_ranks(path)
    special_ids = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    tokenizer = Tokenizer(
        path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ids
    )
    tokenizer.end_ids = (len(ranks),)
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of tokens, by their bytes. tiktoken's own reader isn't used: it caches by path, and so serves
    stale content. Raises ValueError if the file isn't one of ranks, or lacks a byte."""
    lines = read_text(path).splitlines()
    try:
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ValueError(f"{path} is not a tiktoken file") from error
    every_byte = {bytes([byte]) for byte in range(256)}
    if sorted(ranks.values()) != [*range(len(pairs))] or not every_byte <= {*ranks}:
        raise ValueError(f"{path} must hold every single byte, and every rank from 0 on once")
    return ranks


# --- Hugging Face's formats -----------------------------------------------------------------------


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the byte-level BPE in a tokenizer.json."""
    return byte_level_bpe(read_json(path, model=dict, added_tokens=list), path)


def read_vocabulary(path: Path) -> Tokenizer:
    """Return the byte-level BPE of a GPT-2's vocab.json and the merges.txt beside it."""
    vocabulary = read_json(path, **{END_OF_TEXT: int})
    lines = read_text(path.with_name("merges.txt")).splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    needed = len(vocabulary) - 257  # beside the bytes and END_OF_TEXT
    if len(merges) != needed:
        raise ValueError(f"{path} needs {needed} merges, merges.txt has {len(merges)}")
    content = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "added_tokens": [{"content": END_OF_TEXT, "id": vocabulary[END_OF_TEXT]}],
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    return byte_level_bpe(content, path)


def byte_level_bpe(content: dict[str, Any], path: Path) -> Tokenizer:
    """Return the byte-level BPE that the content of a tokenizer.json describes. Raises ValueError, which names its
    path, if it is another kind of tokenizer."""
    model = check_fields(content["model"], f"model in {path}", vocab=dict, merges=list)
    special_ids = read_special_tokens(content["added_tokens"], path)
    if model.get("type") != "BPE" or model.get("byte_fallback") or content.get("normalizer"):
        raise ValueError(f"{path} is no byte-level BPE of the text as it is")
    ranks = ranks_of_bytes(model, special_ids, path)
    if len({*ranks.values(), *special_ids.values()}) < len(ranks) + len(special_ids):
        raise ValueError(f"{path} gives two tokens the same id")
    try:
        pattern = splitting_pattern(content.get("pre_tokenizer") or {}, path)
        start_ids = starting_tokens(content.get("post_processor") or {}, special_ids, path)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: its pre_tokenizer or its post_processor has an unknown form"
        ) from error
    try:
        tokenizer = Tokenizer(
            path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ids
        )
    except (ValueError, OverflowError) as error:  # a broken pattern; an id below 0
        raise ValueError(f"{path}: tiktoken can't read its pattern or its ids") from error
    tokenizer.start_ids = start_ids
    tokenizer.missing_bytes = frozenset(byte for byte in range(256) if bytes([byte]) not in ranks)
    return tokenizer


def read_special_tokens(added_tokens: list[Any], path: Path) -> dict[str, int]:
    """Return the ids of special tokens. Raises ValueError if one takes spaces along, or only fits a whole word."""
    special_ids = {}
    for token in added_tokens:
        check_fields(token, f"added_tokens in {path}", content=str, id=int)
        special_ids[token["content"]] = token["id"]
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ValueError(
                f"{path}: {short_repr(token['content'])} takes spaces or words along, which isn't supported"
            )
    return special_ids


def ranks_of_bytes(
    model: dict[str, Any], special_ids: dict[str, int], path: Path
) -> dict[bytes, int]:
    """Return the ids of all tokens that aren't special, by their bytes. tiktoken joins the pair with the lowest id
    first, so that ids must follow the merges. Raises ValueError if they don't."""
    byte_of = {char: byte for byte, char in enumerate(byte_characters())}
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in special_ids}
    try:
        ranks = {bytes(byte_of[char] for char in token): int(i) for token, i in vocabulary.items()}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merged_ids = [vocabulary[left + right] for left, right in pairs]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: its tokens or merges are not those of a byte-level BPE"
        ) from error
    if merged_ids != sorted(merged_ids):
        raise ValueError(f"{path} must have ids in the order of its merges")
    return ranks


def byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's BPE files write each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def splitting_pattern(pre_tokenizer: dict[str, Any], path: Path) -> str:
    """Return the pattern of the pieces that a pre-tokenizer cuts a text into: GPT-2's, GPT-2's after digits, or one
    that the file gives, as Llama 3's does. Raises ValueError if it is another one."""
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    first = before[0] if len(before) == 1 else {}
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        cuts_as_gpt2 = last.get("use_regex", True)
        if cuts_as_gpt2 and not before:
            return GPT2_PATTERN
        if cuts_as_gpt2 and first.get("type") == "Digits" and first.get("individual_digits"):
            return GPT2_DIGITS_PATTERN
        pattern = first.get("pattern")
        isolated = first.get("behavior") == "Isolated" and not first.get("invert")
        if not cuts_as_gpt2 and first.get("type") == "Split" and isolated and "Regex" in pattern:
            return pattern["Regex"]
    raise ValueError(f"{path}: its pre_tokenizer is none that tiktoken can do")


def starting_tokens(
    post_processor: dict[str, Any], special_ids: dict[str, int], path: Path
) -> tuple[int, ...]:
    """Return the tokens that a post-processor puts before a text. Raises ValueError if one isn't special."""
    tokens = []
    for processor in post_processor.get("processors", [post_processor]):
        for item in processor.get("single", []):
            if "Sequence" in item:
                break
            tokens.append(item["SpecialToken"]["id"])
    if unknown := [token for token in tokens if token not in special_ids]:
        raise ValueError(
            f"{path}: its post_processor adds {short_repr(unknown[0])}, which is no special token"
        )
    return tuple(special_ids[token] for token in tokens)


def end_tokens(
    tokenizer: Tokenizer, path: Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> tuple[int, ...]:
    """Return the tokens that end a text, by a model's generation_config.json or else its config.json. Raises ValueError
    if one is none of the special tokens of the tokenizer, which was read from path."""
    special_ids, source = tokenizer._special_tokens, "config.json"
    ends = config.get("eos_token_id", special_ids.get(END_OF_TEXT))
    if "eos_token_id" in generation_config:
        ends, source = generation_config["eos_token_id"], "generation_config.json"
    end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
    if not end_ids or any(token not in list(special_ids.values()) for token in end_ids):
        raise ValueError(
            f"{path.with_name(source)}: eos_token_id is {short_repr(ends)}, which is no special token of {path}"
        )
    return end_ids


READERS: dict[str, Callable[[Path], Tokenizer]] = {  # by file name; a folder's first counts
    TIKTOKEN_FILE: read_tiktoken,
    "tokenizer.json": read_tokenizer_json,
    "vocab.json": read_vocabulary,
    LLAMA3_FILE: read_llama3,
}
