"""Tokenizers: files of Hugging Face's and tiktoken's formats become byte-pair encodings of tiktoken."""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from support.cli import ARTICLE
from support.files import check_fields, not_downloaded, read_json, read_text, said

END_OF_TEXT = "<|endoftext|>"
# Where GPT-2 cuts text before it merges bytes: the form with possessive quantifiers that tiktoken uses; same pieces.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The same after each digit has been cut off from all else: spaces that a digit follows end a piece.
DIGITS_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"
)
# What Llama 3's own file, tokenizer.model, leaves unsaid: where text is cut, and its special tokens, which follow all
# others. Source: llama_models/llama3/tokenizer.py of the package llama-models.
LLAMA3_FILE = "tokenizer.model"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RESERVED = 244  # of its 256 special tokens: they have no name yet
LLAMA3_NAMES = (
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


def gpt2_tokenizer() -> tiktoken.Encoding:
    """Return GPT-2's own tokenizer, downloaded if tiktoken has not cached it."""
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # as in download()
        raise not_downloaded("GPT-2's tokenizer", error) from error


class Tokenizer(tiktoken.Encoding):
    """One from Hugging Face's files: a whole text, in which special tokens are allowed ("all"), begins with the tokens
    of `start`, and any of `ends` ends one. The bytes `unknown` have no token (SmolLM2's vocabulary lacks 21 of them: rare
    control characters, and what UTF-8 hardly uses), and encode() raises ValueError if a text has one."""

    start: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    unknown: frozenset[int] = frozenset()

    def encode(self, text: str, *, allowed_special: Any = frozenset(), **options: Any) -> list[int]:
        for char in sorted({*text}) if self.unknown else "":
            if not self.unknown.isdisjoint(char.encode(errors="replace")):
                raise ValueError(f"the model's vocabulary has no token for {char!r}")
        ids = super().encode(text, allowed_special=allowed_special, **options)
        return [*self.start, *ids] if allowed_special == "all" else ids

    def decode_single_token_bytes(self, token: int) -> bytes:
        try:
            return super().decode_single_token_bytes(token)
        except KeyError:  # a model may have more rows of embeddings than its tokenizer has tokens
            return f"<|{token}|>".encode()

    def decode(self, tokens: Iterable[int], errors: str = "replace") -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode("utf-8", errors)

    @property
    def eot_token(self) -> int:
        return self.ends[0]


def byte_level(path: Path, content: dict[str, Any] | None = None) -> Tokenizer:
    """Return the byte-level BPE in a tokenizer.json, or in what would be its content, with the tokens that begin a
    text, by its post-processor. Raises ValueError if it isn't one that tiktoken can do."""
    content = content or read_json(path, model=dict, added_tokens=list)
    model = check_fields(content["model"], f"model in {path}", vocab=dict, merges=list)
    added = {}
    for token in content["added_tokens"]:
        check_fields(token, f"added_tokens in {path}", content=str, id=int)
        added[token["content"]] = token["id"]
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ValueError(
                f"{path}: {said(token['content'])} takes spaces or words along, which isn't supported"
            )
    other = content.get("normalizer") or model.get("byte_fallback")
    if model.get("type") != "BPE" or other:
        raise ValueError(f"{path} is no byte-level BPE of the text as it is")
    ranks = ranks_of(model, added, path)
    if len({*ranks.values(), *added.values()}) < len(ranks) + len(added):
        raise ValueError(f"{path} gives two tokens the same id")
    try:
        pattern = pattern_of(content.get("pre_tokenizer") or {}, path)
        start = start_of(content.get("post_processor") or {}, added, path)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: its pre_tokenizer or its post_processor has an unknown form"
        ) from error
    try:
        tokenizer = Tokenizer(
            path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
        )
    except (ValueError, OverflowError) as error:  # a broken pattern; an id below 0
        raise ValueError(f"{path}: tiktoken can't read its pattern or its ids") from error
    tokenizer.start = start
    tokenizer.unknown = frozenset(byte for byte in range(256) if bytes([byte]) not in ranks)
    return tokenizer


def llama3(path: Path) -> Tokenizer:
    """Return the tokenizer in Llama 3's own file, tokenizer.model: its pattern and special tokens are not in it."""
    reserved = [f"reserved_special_token_{2 + i}" for i in range(LLAMA3_RESERVED)]
    special = [f"<|{name}|>" for name in (*LLAMA3_NAMES, *reserved)]
    tokenizer = read_tokenizer(path, LLAMA3_PATTERN, special)
    tokenizer.start = tokenizer.ends
    return tokenizer


def from_vocabulary(path: Path) -> Tokenizer:
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
    return byte_level(path, content)


def ranks_of(model: dict[str, Any], added: dict[str, int], path: Path) -> dict[bytes, int]:
    """Return the ids of all tokens that aren't special, by their bytes. tiktoken joins the pair with the lowest id
    first, so that ids must follow the merges. Raises ValueError if they don't."""
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
    if merged != sorted(merged):
        raise ValueError(f"{path} must have ids in the order of its merges")
    return ranks


def pattern_of(splitter: dict[str, Any], path: Path) -> str:
    """Return the pattern of the pieces that a pre-tokenizer cuts a text into. Raises ValueError if it is another one
    than GPT-2's, GPT-2's after digits, or a pattern of the file's own, as Llama 3 has it."""
    *before, last = splitter.get("pretokenizers", [splitter])
    first = before[0] if len(before) == 1 else {}
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        with_regex = last.get("use_regex", True)
        if with_regex and not before:
            return GPT2_PATTERN
        if with_regex and first.get("type") == "Digits" and first.get("individual_digits"):
            return DIGITS_PATTERN
        pattern = first.get("pattern")
        alone = first.get("behavior") == "Isolated" and not first.get("invert")
        if not with_regex and first.get("type") == "Split" and alone and "Regex" in pattern:
            return pattern["Regex"]
    raise ValueError(f"{path}: its pre_tokenizer is none that tiktoken can do")


def start_of(processor: dict[str, Any], added: dict[str, int], path: Path) -> tuple[int, ...]:
    """Return the tokens that a post-processor puts before a text."""
    found = []
    for part in processor.get("processors", [processor]):
        for item in part.get("single", []):
            if "Sequence" in item:
                break
            found.append(item["SpecialToken"]["id"])
    if unknown := [token for token in found if token not in added]:
        raise ValueError(
            f"{path}: its post_processor adds {said(unknown[0])}, which is no special token"
        )
    return tuple(added[token] for token in found)


def byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's BPE files write each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


def read_tokenizer(
    path: Path, pattern: str = GPT2_PATTERN, special: Sequence[str] = (END_OF_TEXT,)
) -> Tokenizer:
    """Return the byte-pair encoding in a tiktoken file (a line for each token: base64, space, rank). Special tokens
    follow its last token, and the first of them ends a text.

    tiktoken's own reader isn't used: it caches by path, and so serves stale content. Raises ValueError if the file
    isn't one, or lacks a byte.
    """
    lines = read_text(path).splitlines()
    try:
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ValueError(f"{path} is not a tiktoken file") from error
    n, every_byte = len(pairs), {bytes([byte]) for byte in range(256)}
    if sorted(ranks.values()) != [*range(n)] or not every_byte <= {*ranks}:
        raise ValueError(f"{path} must hold every single byte, and every rank from 0 on once")
    added = {token: n + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(
        path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
    )
    tokenizer.ends = (n,)
    return tokenizer
