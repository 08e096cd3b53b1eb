"""A tokenizer.json makes the tokens that the tokenizers library makes of it, or is refused in a sentence that names
what isn't understood."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from formats.tokenizers import LLAMA3_PATTERN, Tokenizer, read_tokenizer_json
from tests.test_llama import TEXTS

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>"]
SAMPLES = [
    *TEXTS,
    "<|begin|>the cat<|end|> <|im_start|>\n",
    "the then there other mother 12345 1a2",
    "  \n\n \t the's THE'S x_y--z 🙂 é\u0301",
    "aaaa aaaaaaa abcabcabc cabcab",
    "it'\u017f 'RE're 'S's ß ss SS ﬁ fi",
]


def content_of(split: str | None = LLAMA3_PATTERN, **model: Any) -> dict[str, Any]:
    """Train a small byte-level BPE and return what its tokenizer.json holds. split: where text is cut; None: as GPT-2
    does."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(**model))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = level
    if split is not None:
        first = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIAL[:1]
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_special_tokens(SPECIAL[1:])
    template = processors.TemplateProcessing(
        f"{SPECIAL[0]} $A", f"{SPECIAL[0]} $A $B", [(SPECIAL[0], 0)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return content_of()


def read(content: Any, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return read_tokenizer_json(path)


def is_refused(content: Any, folder: Path, what: object = "") -> bool:
    """Whether ours refuses a tokenizer, in a sentence; else it makes the tokens of the library."""
    try:
        ours = read(content, folder)
    except ValueError as error:
        assert "tokenizer.json" in str(error) and "\n" not in str(error), what
        return True
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in SAMPLES:
        expected = library.encode(text).ids
        assert ours.encode(text, allowed_special="all") == expected, (what, text)
    return False


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every field and item of a tokenizer.json; of the vocabulary and the merges, a few."""
    if path:
        yield path
    keys = (
        [*value]
        if isinstance(value, dict)
        else [*range(len(value))]
        if isinstance(value, list)
        else []
    )
    if path[1:] in (("vocab",), ("merges",)):
        keys = [keys[0], keys[70], keys[-1]]
    for key in keys:
        yield from places(value[key], (*path, key))


WRONG = [None, True, False, 0, 5, -1, "", "x", [], {}, {"type": "Lowercase"}]
MORE_WRONG = [1.5, 2**40, "Regex", "ByteLevel", "Removed", "A", "B", ["a", "b"], [None], [[]]]
MORE_WRONG += [{"type": "x"}, {"String": " "}]


def changed(content: dict[str, Any], place: list[Any], key: Any, value: Any) -> dict[str, Any]:
    """A copy with another value of a field or an item, which may be new."""
    copy = deepcopy(content)
    holder = copy
    for step in place:
        holder = holder[step]
    holder[key] = value
    return copy


@pytest.mark.parametrize("values", [WRONG, pytest.param(MORE_WRONG, marks=pytest.mark.slow)])
def test_a_field_that_is_not_as_it_was_makes_the_librarys_tokens_or_is_refused(
    content: dict[str, Any], values: list[Any], tmp_path: Path
) -> None:
    """Of all types and kinds: that the library takes it is asked too."""
    assert not is_refused(content, tmp_path)
    for *above, last in places(content):
        for value in values:
            is_refused(changed(content, above, last, value), tmp_path, (*above, last, value))
    for above in ([], ["model"], ["added_tokens", 0], ["pre_tokenizer"], ["decoder"]):
        assert is_refused(changed(content, above, "unknown_field", True), tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["truncation"], {"max_length": 4}, "truncation is {'max_length': 4}, and only None"),
        (["normalizer"], {"type": "NFKC"}, "type is 'NFKC', and only NFC"),
        (["model", "type"], "WordPiece", "type is 'WordPiece', and only BPE"),
        (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix is '</w>'"),
        (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix is '##'"),
        (["model", "byte_fallback"], True, "byte_fallback is True"),
        (["model", "dropout"], 0.5, "dropout is 0.5"),
        (["added_tokens", 1, "lstrip"], True, "lstrip is True"),
        (["added_tokens", 1, "rstrip"], True, "rstrip is True"),
        (["added_tokens", 1, "single_word"], True, "single_word is True"),
        (["added_tokens", 1, "normalized"], True, "normalized is true for some"),
        (["added_tokens", 1, "content"], "<|begin|>x", "begins with '<|begin|>'"),
        (["added_tokens", 1, "id"], 400, "'<|end|>' is given the id 400"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], 5, "Regex must be"),
        (
            ["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"],
            r"\w+",
            r"'\\\\w\+' in its Regex",
        ),
        (
            ["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"],
            "a*",
            "pieces of no characters",
        ),
        (
            ["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"],
            r"a|(?i:ss)",
            r"'\?i:ss\)' in its Regex",
        ),
        (
            ["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"],
            "a|(?!(?!b))",
            r"'\?!\(\?!b\)\)' in its Regex",
        ),
        (
            ["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"],
            "a|(?!b)",
            "pieces of no characters",
        ),
        (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"String": " "}, "lacks Regex"),
        (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "behavior is 'Removed'"),
        (["pre_tokenizer", "pretokenizers", 0, "invert"], True, "invert is True"),
        (["pre_tokenizer", "pretokenizers", 1, "use_regex"], True, "Split, ByteLevel cut"),
        (
            ["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"],
            True,
            "add_prefix_space is True",
        ),
        (["post_processor", "processors", 1, "type"], "BertProcessing", "is 'BertProcessing'"),
    ],
)
def test_a_tokenizer_that_could_make_other_tokens_is_refused_by_its_field(
    content: dict[str, Any], place: list[Any], value: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        read(changed(content, place[:-1], place[-1], value), tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+",
        r"[a-z]+|\p{N}{1,2}",
        r"the(?! )|\s",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?[^\s]",
        r"a(b|c)+| ?[\p{Lu}\p{N}]++",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ],
)
def test_what_a_pattern_leaves_out_is_a_piece_too(pattern: str, tmp_path: Path) -> None:
    assert not is_refused(content_of(pattern), tmp_path)


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_token_without_its_merge_is_refused(ignore_merges: bool, tmp_path: Path) -> None:
    content = content_of(ignore_merges=ignore_merges)
    assert not is_refused(content, tmp_path)
    merges = content["model"]["merges"]
    for i in range(len(merges)):
        without = changed(content, ["model"], "merges", merges[:i] + merges[i + 1 :])
        with pytest.raises(ValueError, match=r"tokenizer\.json: merges lack the one that makes"):
            read(without, tmp_path)
    whole = "\u0120" + "".join(chr(c) for c in range(97, 117))  # a token that no merge makes
    vocabulary = content["model"]["vocab"]
    with_whole = changed(content, ["model", "vocab"], whole, len(vocabulary))
    for token in with_whole["added_tokens"][1:]:
        token["id"] += 1
    assert is_refused(with_whole, tmp_path) is not ignore_merges


@pytest.mark.parametrize("seed", range(30))
def test_merges_in_any_order_make_the_librarys_tokens_or_are_refused(
    seed: int, tmp_path: Path
) -> None:
    """Tokens of a, b and c from random pairs, of which some can't be reached."""
    rng = random.Random(seed)
    content = content_of()
    alphabet = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[:257]
    tokens, merges = ["a", "b", "c"], []
    for _ in range(rng.randint(1, 8)):
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in tokens and len(left + right) < 7:
            tokens.append(left + right)
            merges.append([left, right])
            if rng.random() < 0.2 and len(left) > 1 and left[1:] + right in tokens:
                merges.append([left[0], left[1:] + right])
    vocabulary = {token: i for i, token in enumerate([*alphabet, *tokens[3:]])}
    content["model"] |= {"vocab": vocabulary, "merges": merges, "ignore_merges": seed % 2 == 1}
    content["added_tokens"] = content["added_tokens"][:1]
    texts = ["".join(rng.choices("abc", k=n)) for n in range(1, 20) for _ in range(5)]
    try:
        ours = read(content, tmp_path)
    except ValueError:
        return
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in texts:
        assert ours.encode(text, allowed_special="all") == library.encode(text).ids
