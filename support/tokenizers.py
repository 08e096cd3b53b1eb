"""Tokenizers: vocabulary files in four published formats become byte-pair encodings of tiktoken.

read_tokenizer() takes any of the formats; READERS at the end of this file lists them.
"""

import base64
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
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
# The same after each digit has become a piece of its own: spaces before a digit end a piece.
GPT2_DIGITS_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"
)
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


class Tokenizer(tiktoken.Encoding):
    """A byte-pair encoding from a model's files.

    start_ids: the tokens that encode() puts before a whole text, which is one with all special
    tokens allowed ("all").
    end_ids: the tokens that end a text, each of them alone.
    normal_form: the form of Unicode that a text is put into first, as Qwen's are into NFC; None:
    the text stays as it is. Special tokens do in any case.
    chat_template: the form of a conversation, in Jinja; None if it isn't known.
    is_instruct: whether a model is known to answer questions in the form that its tokens say.
    missing_bytes: bytes that have no token. encode() refuses characters that need one (SmolLM2's
    vocabulary lacks 21: rare control characters, and bytes that UTF-8 hardly uses).
    """

    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    normal_form: str | None = None
    chat_template: str | None = None
    is_instruct: bool = False
    missing_bytes: frozenset[int] = frozenset()

    def normalized(self, text: str) -> str:
        """Return a text in the normal form, but for the names of special tokens."""
        if self.normal_form is None:
            return text
        parts = re.split(f"({'|'.join(map(re.escape, self.special_tokens_set))})", text)
        parts[::2] = [unicodedata.normalize(self.normal_form, part) for part in parts[::2]]
        return "".join(parts)

    def encode_ordinary(self, text: str) -> list[int]:
        return super().encode_ordinary(self.normalized(text))

    def encode(self, text: str, *, allowed_special: Any = frozenset(), **options: Any) -> list[int]:
        """Return a text's tokens. Raises ValueError if a character needs a byte that has no
        token."""
        text = self.normalized(text)
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
    """Return the tokenizer in a file whose name is one of READERS. Raises ValueError if the file
    isn't what its name says, or describes a tokenizer that tiktoken can't represent."""
    return READERS[path.name](path)


# --- tiktoken's format: a line for each token, in base64, and its rank ----------------------------


def read_tiktoken(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.tiktoken: it cuts text as GPT-2's does, and its one
    special token ends a text."""
    return with_special_tokens(path, GPT2_PATTERN, [END_OF_TEXT])


def read_llama3(path: Path) -> Tokenizer:
    """Return the tokenizer in Llama 3's tokenizer.model: its pattern and special tokens are not in the file."""
    reserved = [f"reserved_special_token_{2 + i}" for i in range(LLAMA3_RESERVED)]
    special_tokens = [f"<|{name}|>" for name in (*LLAMA3_SPECIAL, *reserved)]
    tokenizer = with_special_tokens(path, LLAMA3_PATTERN, special_tokens)
    tokenizer.start_ids = tokenizer.end_ids
    return tokenizer


def with_special_tokens(path: Path, pattern: str, special_tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a file of ranks. The ids of special tokens follow the last rank, and
    the first special token ends a text."""
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

# What each object of a tokenizer.json may hold: a field's type, or the values that this file's code
# is right for. All else is refused, since it could change tokens. A missing field has the first
# value.
ANYTHING = (object,)
FLAG = (False, True)
BYTE_LEVEL = {"add_prefix_space": FLAG, "trim_offsets": FLAG, "use_regex": (True, False)}
TOKENIZER = {
    "version": ("1.0",),
    "truncation": (None,),
    "padding": (None,),
    "added_tokens": list,
    "normalizer": (None, dict),
    "pre_tokenizer": dict,
    "post_processor": ANYTHING,
    "decoder": ANYTHING,
    "model": dict,
}
BPE_MODEL = {
    "dropout": (None,),
    "unk_token": (None, str),  # encode() refuses the characters that it would stand for
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": FLAG,
    "byte_fallback": (False,),
    "ignore_merges": FLAG,
    "vocab": dict,
    "merges": list,
}
ADDED_TOKEN = {
    "id": int,
    "content": str,
    "single_word": (False,),
    "lstrip": (False,),
    "rstrip": (False,),
    "normalized": FLAG,
    "special": FLAG,
}
PRE_TOKENIZERS = {
    "ByteLevel": BYTE_LEVEL | {"add_prefix_space": (False,)},
    "Digits": {"individual_digits": (True,)},
    "Split": {"pattern": dict, "behavior": ("Isolated",), "invert": (False,)},
    "Sequence": {"pretokenizers": list},
}
POST_PROCESSORS = {
    "ByteLevel": BYTE_LEVEL,
    "TemplateProcessing": {"single": list, "pair": list, "special_tokens": dict},
    "Sequence": {"processors": list},
}
# The parts of a pattern that Oniguruma, which `tokenizers` uses, and tiktoken's two engines read
# alike: characters, classes, categories, groups, alternatives, quantifiers, and lookaheads for one
# character. Cases of letters aren't ignored alike (Oniguruma takes "ss" for "ß"), but for these:
PATTERN_CONTRACTIONS = r"\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)"
PATTERN_ESCAPE = r"\\(?:[pP]\{[A-Z][a-z]?\}|[sSrnt]|[][\\.*+?^$|(){}/-])"
PATTERN_CLASS = rf"\[\^?(?:{PATTERN_ESCAPE}|(?!&&|--|~~)[^][\\^])+\]"
PATTERN_COUNT = r"(?:[*+?]\+?|\{\d+(?:,\d*)?\})"
PATTERN_CHARACTER = rf"{PATTERN_CLASS}|{PATTERN_ESCAPE}|[^][\\(){{}}*+?|.^$]"
PATTERN_PART = re.compile(
    rf"(?P<consumes>{PATTERN_CHARACTER}|{PATTERN_CONTRACTIONS})(?P<count>{PATTERN_COUNT})?"
    rf"|(?P<lookahead>\(\?!(?:{PATTERN_CHARACTER})\))"
    rf"|\((?:\?:)?|\)(?:{PATTERN_COUNT})?|\|"
)


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
    """Return the byte-level BPE that the content of a tokenizer.json describes. Raises ValueError,
    which names its path and the field, if tiktoken might make other tokens than the described
    tokenizer."""
    content = check_understood(content, str(path), TOKENIZER)
    model = kind_of_object(content["model"], f"model in {path}", {"BPE": BPE_MODEL})
    special_ids = read_special_tokens(content["added_tokens"], model["vocab"], path)
    ranks = ranks_of_bytes(model, special_ids, path)
    if content["decoder"] is not None:
        kind_of_object(content["decoder"], f"decoder in {path}", {"ByteLevel": BYTE_LEVEL})
    pattern = splitting_pattern(content["pre_tokenizer"], path)
    start_ids = starting_tokens(content["post_processor"], special_ids, path)
    if content["normalizer"] is not None:
        kind_of_object(content["normalizer"], f"normalizer in {path}", {"NFC": {}})
    try:
        tokenizer = Tokenizer(
            path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_ids
        )
    except (ValueError, OverflowError) as error:  # a broken pattern; an id that is too large
        raise ValueError(f"{path}: tiktoken can't read its pattern or its ids") from error
    tokenizer.start_ids = start_ids
    tokenizer.normal_form = content["normalizer"] and content["normalizer"]["type"]
    tokenizer.missing_bytes = frozenset(byte for byte in range(256) if bytes([byte]) not in ranks)
    return tokenizer


def check_understood(content: Any, where: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a tokenizer.json, with default values for missing fields.

    known: by field, its type or the values that are supported. Raises ValueError, which names the
    field, if a field is unknown, or its type or value isn't supported.
    """
    required = {field: kind for field, kind in known.items() if isinstance(kind, type)}
    check_fields(content, where, **required)
    for field, value in content.items():
        if field not in known:
            raise ValueError(f"{where}: {field} is a field that isn't known")
        if field in required or known[field] is ANYTHING:
            continue
        same = [x for x in known[field] if type(x) is type(value) and x == value]
        if not same and type(value) not in known[field]:
            choices = " or ".join("a text" if x is str else repr(x) for x in known[field])
            raise ValueError(
                f"{where}: {field} is {short_repr(value)}, and only {choices} is supported"
            )
    defaults = {
        field: None if kind is ANYTHING else kind[0]
        for field, kind in known.items()
        if field not in required
    }
    return defaults | content


def kind_of_object(content: Any, where: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return an object after check_understood(), for the fields that objects of its `type` may
    hold. kinds: these fields by type. Raises ValueError if its type is none of these."""
    kind = check_fields(content, where, type=str)["type"]
    if kind not in kinds:
        raise ValueError(
            f"{where}: type is {short_repr(kind)}, and only {' or '.join(kinds)} is supported"
        )
    return check_understood(content, where, kinds[kind] | {"type": str})


def read_special_tokens(
    added_tokens: list[Any], vocabulary: dict[str, Any], path: Path
) -> dict[str, int]:
    """Return the ids of the tokens that are added to a vocabulary, by their text. Raises ValueError
    if a token isn't matched literally, or if its id isn't the one that `tokenizers` would give
    it."""
    special_ids: dict[str, int] = {}
    where = f"added_tokens in {path}"
    tokens = [check_understood(token, where, ADDED_TOKEN) for token in added_tokens]
    next_id = len(vocabulary)
    for token in tokens:
        text = token["content"]
        expected = vocabulary.get(text, next_id)
        if not text or text in special_ids or token["id"] != expected:
            raise ValueError(
                f"{where}: {short_repr(text)} is given the id {token['id']}, and must be once and {expected}"
            )
        next_id = max(next_id, expected + 1)
        special_ids[text] = expected
    for text, other in pairwise(sorted(special_ids)):
        if other.startswith(text):
            raise ValueError(
                f"{where}: {short_repr(other)} begins with {short_repr(text)}, and either could be meant"
            )
    if len({token["normalized"] for token in tokens}) > 1:
        raise ValueError(f"{where}: normalized is true for some and false for others")
    return special_ids


def ranks_of_bytes(
    model: dict[str, Any], special_ids: dict[str, int], path: Path
) -> dict[bytes, int]:
    """Return the ids of all tokens that aren't special, by their bytes. If a piece of text is a
    token, tiktoken uses that; otherwise it joins the pair with the lowest id first. Raises
    ValueError if the merges do something else."""
    byte_of = {char: byte for byte, char in enumerate(byte_characters())}
    for i in model["vocab"].values():
        if type(i) is not int or i < 0:
            raise ValueError(
                f"{path}: vocab must give whole numbers from 0 on, got {short_repr(i)}"
            )
    vocabulary = {token: i for token, i in model["vocab"].items() if token not in special_ids}
    merges = model["merges"]
    if len({type(merge) for merge in merges}) > 1:
        raise ValueError(f"{path}: merges must all be texts, or all be pairs")
    try:
        bytes_of = {token: bytes(byte_of[char] for char in token) for token in vocabulary}
        pairs = [
            tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges
        ]
        merged_ids = [vocabulary[left + right] for left, right in pairs]
        byte_pairs = {(bytes_of[left], bytes_of[right]) for left, right in pairs}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: its tokens or merges are not those of a byte-level BPE"
        ) from error
    if merged_ids != sorted(merged_ids):
        raise ValueError(f"{path} must have ids in the order of its merges")
    ranks = {bytes_of[token]: i for token, i in vocabulary.items()}
    if len({*ranks.values(), *special_ids.values()}) < len(ranks) + len(special_ids):
        raise ValueError(f"{path} gives two tokens the same id")
    for token in ranks:
        parts = last_merge(token, ranks) if len(token) > 1 else ()
        unreachable = len(parts) > 2 and model["ignore_merges"]  # only as a whole piece
        if parts and parts not in byte_pairs and not unreachable:
            raise ValueError(
                f"{path}: merges lack the one that makes the token {short_repr(token)}"
            )
    return ranks


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """Return the two parts that are joined last when a token is made by merging the pair with the
    lowest rank first; more than two parts if merging never makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        lowest = min(pair_ranks)
        if lowest == math.inf:
            break
        i = pair_ranks.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def byte_characters() -> list[str]:
    """Return the printable characters by which GPT-2's BPE files write the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def splitting_pattern(pre_tokenizer: dict[str, Any], path: Path) -> str:
    """Return the pattern of the pieces that a pre-tokenizer cuts a text into: GPT-2's, GPT-2's
    after digits, or one that the file gives, as Llama 3's does. Raises ValueError if it cuts text
    in another way."""
    where = f"pre_tokenizer in {path}"
    steps = [kind_of_object(pre_tokenizer, where, PRE_TOKENIZERS)]
    if steps[0]["type"] == "Sequence":
        steps = [kind_of_object(step, where, PRE_TOKENIZERS) for step in steps[0]["pretokenizers"]]
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["ByteLevel"]:
        cuts_as_gpt2 = steps[-1]["use_regex"]
        if kinds == ["ByteLevel"] and cuts_as_gpt2:
            return GPT2_PATTERN
        if kinds == ["Digits", "ByteLevel"] and cuts_as_gpt2:
            return GPT2_DIGITS_PATTERN
        if kinds == ["Split", "ByteLevel"] and not cuts_as_gpt2:
            pattern = check_understood(steps[0]["pattern"], f"pattern in {where}", {"Regex": str})
            return with_gaps(pattern["Regex"], path)
    raise ValueError(f"{where}: {', '.join(kinds)} cut a text in a way that tiktoken can't")


def with_gaps(pattern: str, path: Path) -> str:
    """Return a pattern that finds what another one finds, and also the text between two such
    pieces, which is a piece for `tokenizers`, too. Raises ValueError if `tokenizers` and tiktoken
    could read the pattern differently, or if it can find an empty piece."""
    end, shape = 0, ""  # the pattern with an a for what a piece can consist of
    while part := PATTERN_PART.match(pattern, end):
        end = part.end()
        if part["consumes"]:
            shape += f"a{part['count'] or ''}"
        elif part["lookahead"]:
            shape += "(?!a)"
        else:
            shape += part[0]
    if end < len(pattern):
        raise ValueError(f"{path}: {short_repr(pattern[end:])} in its Regex isn't supported")
    try:
        finds_nothing = re.fullmatch(shape, "") is not None
    except re.error as error:
        raise ValueError(f"{path}: its Regex {short_repr(pattern)} is broken: {error}") from error
    if finds_nothing:
        raise ValueError(f"{path}: its Regex {short_repr(pattern)} finds pieces of no characters")
    return rf"{pattern}|(?:(?!{pattern})[\s\S])++"


def starting_tokens(
    post_processor: Any, special_ids: dict[str, int], path: Path
) -> tuple[int, ...]:
    """Return the tokens that a post-processor puts before a text. Raises ValueError if one of them
    isn't special, or if the post-processor adds anything else."""
    if post_processor is None:
        return ()
    where = f"post_processor in {path}"
    steps = [kind_of_object(post_processor, where, POST_PROCESSORS)]
    if steps[0]["type"] == "Sequence":
        steps = [kind_of_object(step, where, POST_PROCESSORS) for step in steps[0]["processors"]]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if len(templates) > 1 or any(step["type"] == "Sequence" for step in steps):
        raise ValueError(f"{where} holds a Sequence in a Sequence, or two templates")
    if not templates:
        return ()
    template = templates[0]
    tokens = template_tokens(template["single"], where, ("A",))
    template_tokens(template["pair"], where, ("A", "B"))
    if tokens[-1:] != [None] or None in tokens[:-1]:
        raise ValueError(f"{where}: single must be tokens, and then the text")
    for name, entry in template["special_tokens"].items():
        expected = {"id": name, "ids": [special_ids.get(name)], "tokens": [name]}
        if json.dumps(entry, sort_keys=True) != json.dumps(expected):
            raise ValueError(
                f"{where}: special_tokens has {short_repr(entry)} instead of {short_repr(expected)}"
            )
    for token in tokens[:-1]:
        if token not in template["special_tokens"]:
            raise ValueError(f"{where} adds {short_repr(token)}, which is no special token")
    return tuple(special_ids[token] for token in tokens[:-1])


def template_tokens(items: list[Any], where: str, texts: tuple[str, ...]) -> list[str | None]:
    """Return the tokens of a template, with None in the place of a text. Raises ValueError if a
    text in the template isn't named in `texts`."""
    tokens = []
    for item in items:
        if isinstance(item, dict) and [*item] == ["Sequence"]:
            text = check_fields(item["Sequence"], where, id=str, type_id=int)
            check_understood(text, where, {"id": texts, "type_id": (0, 1)})
            tokens.append(None)
        else:
            token = check_understood(item, where, {"SpecialToken": dict})["SpecialToken"]
            check_fields(token, where, type_id=int)
            tokens.append(check_understood(token, where, {"id": str, "type_id": (0, 1)})["id"])
    return tokens


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


READERS: dict[str, Callable[[Path], Tokenizer]] = {  # by file name; the first one found is read
    TIKTOKEN_FILE: read_tiktoken,
    "tokenizer.json": read_tokenizer_json,
    "vocab.json": read_vocabulary,
    LLAMA3_FILE: read_llama3,
}
