"""Tokenizers in four published formats: files of ranks are read by tiktoken, all others by the library `tokenizers`.

read_tokenizer() takes any of the formats; READERS at the end of this file lists them.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from support.files import check_fields, download_error, read_json, read_text, short_repr

TIKTOKEN_FILE = "tokenizer.tiktoken"
LLAMA3_FILE = "tokenizer.model"
END_OF_TEXT = "<|endoftext|>"
# Where GPT-2 cuts text before it merges bytes. The form with possessive quantifiers, which tiktoken
# uses, finds the same pieces.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# What Llama 3's own file, tokenizer.model, leaves out: where text is cut, and its special tokens, which follow all
# others. Source: llama_models/llama3/tokenizer.py of the package llama-models.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RESERVED = 244  # special tokens, of 256, that have no name yet
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


ARTICLE_PROMPT = "Hello, I am"  # of Raschka's experiment with an untrained model


class Numbers:
    """A stand-in for GPT-2's tokenizer if that can't be loaded. It can encode one prompt, that of
    the KV cache article, and shows a token as its number."""

    eot_token = 50256
    special_tokens_set: frozenset[str] = frozenset()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the article's prompt in GPT-2's tokens. Raises ValueError for any other text."""
        known = ARTICLE_PROMPT
        if text != known:
            raise ValueError(
                f"without GPT-2's tokenizer the prompt must be {known!r}, got {text!r}"
            )
        return [15496, 11, 314, 716]

    def decode_single_token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()


class Tokenizer:
    """What all tokenizers of models have in common, beside the methods of tiktoken.Encoding that are called here.

    added_ids: the tokens that are found in a text as a whole, by name; most are control tokens.
    named_tokens: those that a chat template may use, by the names that templates use, such as bos_token.
    added_tokens: their properties by id, where the library `tokenizers` knows them.
    end_ids: the tokens that end a text, each of them alone.
    chat_template: the form of a conversation, in Jinja; None if it isn't known.
    is_instruct: whether a model is known to answer questions in the form that its tokens say.
    """

    added_ids: dict[str, int]
    named_tokens: dict[str, str]
    added_tokens: dict[int, Any] = {}  # noqa: RUF012
    end_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    is_instruct: bool = False

    @property
    def eot_token(self) -> int:
        return self.end_ids[0]

    def decode(self, tokens: Iterable[int], errors: str = "replace") -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode("utf-8", errors)


class RankTokenizer(Tokenizer, tiktoken.Encoding):
    """A byte-pair encoding from a file of ranks.

    start_ids: the tokens that encode() puts before a whole text, which is one with all special
    tokens allowed ("all").
    """

    start_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, allowed_special: Any = frozenset(), **options: Any) -> list[int]:
        ids = super().encode(text, allowed_special=allowed_special, **options)
        return [*self.start_ids, *ids] if allowed_special == "all" else ids

    def decode_single_token_bytes(self, token: int) -> bytes:
        try:
            return super().decode_single_token_bytes(token)
        except KeyError:  # a model may have more rows of embeddings than its tokenizer has tokens
            return f"<|{token}|>".encode()


class LibraryTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes, read by the library `tokenizers`."""

    def __init__(self, content: str, path: Path) -> None:
        """content: of a tokenizer.json; path: the file to name in an error. Raises ValueError if the library can't
        read it, or is missing."""
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"to read {path}, pip install tokenizers") from error
        try:
            self.library = tokenizers.Tokenizer.from_str(content)
        except BaseException as error:  # the library has no other kind, but for panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        self.library.no_truncation()
        self.library.no_padding()
        self.added_tokens = added_tokens = self.library.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added_tokens.items()}
        self.special_tokens_set = {t.content for t in added_tokens.values() if t.special}
        self.n_vocab = 1 + max(self.library.get_vocab().values(), default=-1)
        self.n_rows = self.n_vocab  # of a model's embeddings
        self.byte_of: dict[str, int] = {}  # by the characters that stand for bytes, if any do
        if "ByteLevel" in repr(self.library.pre_tokenizer):
            self.byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        characters = self.byte_of.items()
        missing = [byte for char, byte in characters if self.library.token_to_id(char) is None]
        self.missing_bytes = frozenset(missing)

    def encode(self, text: str, *, allowed_special: Any = (), **_: Any) -> list[int]:
        """Return a text's tokens. allowed_special: if it is empty, names of control tokens are plain text; "all": what
        begins every text stands before it. Added tokens that aren't control tokens are found in any case.

        Raises ValueError if a character needs a byte that has no token, which the library would leave out. (SmolLM2's
        vocabulary lacks 21: rare control characters, and bytes that UTF-8 hardly uses.) So does a token that the model
        has no embedding for: that of an image, in Gemma 3's models for text.
        """
        for char in sorted({*text}) if self.missing_bytes else ():
            if not self.missing_bytes.isdisjoint(char.encode(errors="replace")):
                raise ValueError(f"the model's vocabulary has no token for {char!r}")
        self.library.encode_special_tokens = not allowed_special
        ids = self.library.encode(text, add_special_tokens=allowed_special == "all").ids
        if max(ids, default=0) >= self.n_rows:
            token = self.library.id_to_token(max(ids))
            raise ValueError(f"the model has no embedding for the token {token!r}")
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encode(text)

    def decode_single_token_bytes(self, token: int) -> bytes:
        text = self.library.id_to_token(token)
        if text is None:  # a model may have more rows of embeddings than its tokenizer has tokens
            return f"<|{token}|>".encode()
        if text in self.added_ids and self.byte_of:
            return text.encode()
        if self.byte_of.keys() >= {*text}:
            return bytes(self.byte_of[char] for char in text)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):  # as SentencePiece writes a byte
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()


def gpt2_tokenizer() -> tiktoken.Encoding:
    """Return GPT-2's own tokenizer, downloaded if tiktoken has not cached it."""
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever a network, its settings, a server or a full disk can do
        raise download_error("GPT-2's tokenizer", error) from error


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file whose name is one of READERS. Raises ValueError if the file
    isn't what its name says."""
    return READERS[path.name](path)


# --- tiktoken's format: a line for each token, in base64, and its rank ----------------------------


def read_tiktoken(path: Path) -> RankTokenizer:
    """Return the tokenizer in a tokenizer.tiktoken: it cuts text as GPT-2's does, and its one
    special token ends a text."""
    return with_special_tokens(path, GPT2_PATTERN, [END_OF_TEXT])


def read_llama3(path: Path) -> RankTokenizer:
    """Return the tokenizer in Llama 3's tokenizer.model: its pattern and special tokens are not in the file."""
    reserved = [f"reserved_special_token_{2 + i}" for i in range(LLAMA3_RESERVED)]
    special_tokens = [f"<|{name}|>" for name in (*LLAMA3_SPECIAL, *reserved)]
    tokenizer = with_special_tokens(path, LLAMA3_PATTERN, special_tokens)
    tokenizer.start_ids = tokenizer.end_ids
    return tokenizer


def with_special_tokens(path: Path, pattern: str, special_tokens: Sequence[str]) -> RankTokenizer:
    """Return the tokenizer of a file of ranks. The ids of special tokens follow the last rank, and
    the first special token ends a text."""
    ranks = read_ranks(path)
    special_ids = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    tokenizer = RankTokenizer(
        path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ids
    )
    tokenizer.added_ids = special_ids
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


# --- Formats that the library reads ---------------------------------------------------------------

# How GPT-2 cuts text, and how its bytes become characters, in the words of a tokenizer.json.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def read_tokenizer_json(path: Path) -> LibraryTokenizer:
    """Return the tokenizer in a tokenizer.json."""
    return LibraryTokenizer(read_text(path), path)


def read_vocabulary(path: Path) -> LibraryTokenizer:
    """Return the byte-level BPE of a GPT-2's vocab.json and the merges.txt beside it."""
    vocabulary = read_json(path, **{END_OF_TEXT: int})
    lines = read_text(path.with_name("merges.txt")).splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    needed = len(vocabulary) - 257  # beside the bytes and END_OF_TEXT
    if len(merges) != needed:
        raise ValueError(f"{path} needs {needed} merges, merges.txt has {len(merges)}")
    return byte_level_bpe({"vocab": vocabulary, "merges": merges}, {END_OF_TEXT: True}, path)


def byte_level_bpe(
    model: dict[str, Any],
    added: dict[str, bool],
    path: Path,
    pre_tokenizer: dict[str, Any] = BYTE_LEVEL,
    normalizer: dict[str, Any] | None = None,
    first: int | None = None,
) -> LibraryTokenizer:
    """Return a byte-level BPE. model: its vocabulary and merges; added: names of tokens that are found as a whole, and
    whether each is a control token; pre_tokenizer, normalizer: as in a tokenizer.json; first: the token that begins
    every text, if there is one. Raises ValueError if that isn't known, and as LibraryTokenizer does."""
    for merge in model["merges"]:  # one without a token makes the library panic
        if merge.replace(" ", "", 1) not in model["vocab"]:
            raise ValueError(f"{path} is no tokenizer: no token is what {short_repr(merge)} makes")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added_tokens = []
    for name, is_control in added.items():
        token = {"id": model["vocab"][name], "content": name, "special": is_control}
        added_tokens.append(token | flags)
    content = {
        "version": "1.0",
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE"} | model,
    }
    tokenizer = LibraryTokenizer(json.dumps(content), path)
    if first is not None:
        from tokenizers.processors import TemplateProcessing

        name = {token: text for text, token in model["vocab"].items()}.get(first)
        if name is None:
            raise ValueError(
                f"texts begin with token {first}, of a vocabulary of {tokenizer.n_vocab}"
            )
        special = {"id": "first", "ids": [first], "tokens": [name]}  # a name may look like "$A"
        post_processor = TemplateProcessing(single="first $A", special_tokens=[special])
        tokenizer.library.post_processor = post_processor
    return tokenizer


def byte_characters() -> list[str]:
    """Return the printable characters by which GPT-2's BPE files write the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def end_tokens(
    tokenizer: Tokenizer, path: Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> tuple[int, ...]:
    """Return the tokens that end a text, by a model's generation_config.json or else its config.json. Raises ValueError
    if one is none of the special tokens of the tokenizer, which was read from path."""
    added_ids, source = tokenizer.added_ids, "config.json"
    ends = config.get("eos_token_id", added_ids.get(END_OF_TEXT))
    if "eos_token_id" in generation_config:
        ends, source = generation_config["eos_token_id"], "generation_config.json"
    end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
    known_ids = {*added_ids.values()}
    if not end_ids or any(type(token) is not int or token not in known_ids for token in end_ids):
        raise ValueError(
            f"{path.with_name(source)}: eos_token_id is {short_repr(ends)}, which is no special token of {path}"
        )
    return end_ids


def check_named_tokens(tokenizer: Tokenizer, config: dict[str, Any], where: str) -> None:
    """Raise ValueError if a tokenizer_config.json names a token that the tokenizer lacks, or has with another id or other
    properties: transformers would add or change it, and make other tokens of a text."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        more = more.values() if isinstance(more, dict) else more
        named += more if isinstance(more, Iterable) else [more]
    config = {"added_tokens_decoder": {}} | config
    by_id = check_fields(config, where, added_tokens_decoder=dict)["added_tokens_decoder"]
    for token_id, token in [(None, token) for token in named] + [*by_id.items()]:
        if isinstance(token, bool | None):  # such as add_bos_token
            continue
        fields = token if isinstance(token, dict) else {"content": token}
        name = str(fields.get("content"))
        known_id = tokenizer.added_ids.get(name)
        is_same = known_id is not None and token_id in (None, str(known_id))
        known = tokenizer.added_tokens.get(known_id)
        for flag in ("lstrip", "rstrip", "single_word"):
            if token_id and known and getattr(known, flag) != fields.get(flag, False):
                is_same = False
        if not is_same:
            raise ValueError(
                f"{where} has the token {short_repr(name)}, which the tokenizer's file lacks, or has otherwise"
            )


READERS: dict[str, Callable[[Path], Tokenizer]] = {  # by file name; the first one found is read
    TIKTOKEN_FILE: read_tiktoken,
    "tokenizer.json": read_tokenizer_json,
    "vocab.json": read_vocabulary,
    LLAMA3_FILE: read_llama3,
}
