"""What a tokenizer of the library `tokenizers` is beside the library itself: bytes of tokens, typed control tokens, files
that are damaged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from formats.tokenizers import LibraryTokenizer, byte_level_bpe, read_tokenizer_json
from tests.test_llama import MORE_TEXTS, TEXTS, corpus

tokenizers = pytest.importorskip("tokenizers")


def write(library: Any, folder: Path, **changes: Any) -> LibraryTokenizer:
    """Write a tokenizer.json, with some of its fields changed, and read it."""
    content = json.loads(library.to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return read_tokenizer_json(folder / "tokenizer.json")


def trained() -> Any:
    """A small byte-level BPE with a control token and an ordinary added one."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet
    )
    library.train_from_iterator(corpus(), trainer)
    library.add_special_tokens(["<|end|>"])
    library.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return library


def of_sentencepiece() -> Any:
    """A BPE as Llama 2's: words begin with \u2581, and what has no token is made of bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "ab"]
    merges = [("\u2581", "a"), ("a", "b")]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    library.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens([tokenizers.AddedToken("\u2581\u2581", normalized=False)])  # as in Gemma 3
    return library


@pytest.mark.parametrize("make", [trained, of_sentencepiece])
def test_bytes_of_single_tokens_make_the_text(make: Any, tmp_path: Path) -> None:
    """Also of one that is cut within a character, as a text is while it is written."""
    library = make()
    ours = write(library, tmp_path)
    assert ours.n_vocab == library.get_vocab_size()
    for text in [*TEXTS, *MORE_TEXTS, "ab a \U0001f642", "a<|end|>b"]:
        ids = ours.encode_ordinary(text)
        assert b"".join(map(ours.decode_single_token_bytes, ids)) == text.encode()
        assert ours.decode(ids) == text
    last = [ours.n_vocab - 1]
    assert ours.decode(last) == library.decode(last, skip_special_tokens=False)


def test_a_typed_control_token_is_text_and_an_added_word_is_found(tmp_path: Path) -> None:
    library = trained()
    ours = write(library, tmp_path)
    end, think = (library.token_to_id(name) for name in ("<|end|>", "<think>"))
    text = "x<|end|><think>y"
    assert ours.special_tokens_set == {"<|end|>"}
    assert ours.added_ids == {"<|end|>": end, "<think>": think}
    typed = ours.encode(text, disallowed_special=())
    assert end not in typed and think in typed and ours.decode(typed) == text
    assert end in ours.encode(text, allowed_special="all")
    assert ours.encode_ordinary(text) == typed


def test_what_the_library_would_leave_out_is_refused(tmp_path: Path) -> None:
    model = {"vocab": {"a": 0, "b": 1, "aa": 2}, "merges": []}
    ours = byte_level_bpe(model, {"aa": True}, tmp_path / "x")
    assert ours.encode("abaa", allowed_special="all") == [0, 1, 2]
    with pytest.raises(ValueError, match="has no token for 'c'"):
        ours.encode("abc")


def test_a_text_is_neither_cut_off_nor_padded(tmp_path: Path) -> None:
    library = trained()
    ids = library.encode("one and two and three").ids
    library.enable_truncation(4)
    library.enable_padding(length=40)
    assert write(library, tmp_path).encode("one and two and three") == ids


NEW = {"content": "<|new|>", "lstrip": False, "rstrip": False, "single_word": False}
NAMED: list[tuple[dict[str, Any], bool]] = [  # of a tokenizer_config.json; whether it is refused
    ({"eos_token": "<|end|>", "pad_token": None, "add_bos_token": False}, False),
    ({"additional_special_tokens": ["<|end|>"]}, False),
    ({"added_tokens_decoder": {"600": NEW | {"content": "<|end|>", "special": True}}}, False),
    ({"pad_token": "<|new|>"}, True),
    ({"bos_token": NEW}, True),
    ({"extra_special_tokens": {"image_token": "<|new|>"}}, True),
    ({"extra_special_tokens": 3}, True),
    ({"added_tokens_decoder": {"602": NEW}}, True),
    ({"added_tokens_decoder": {"256": NEW | {"content": "<|end|>"}}}, True),
    ({"added_tokens_decoder": {"600": NEW | {"content": "<|end|>", "rstrip": True}}}, True),
]


def test_tokens_of_tokenizer_config_are_transformers_or_refused(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from load_gpt2_weights import load_tokenizer

    library = trained()
    library.save(str(tmp_path / "tokenizer.json"))
    assert library.token_to_id("<|end|>") == 600
    config = {"model_type": "llama", "vocab_size": 640, "eos_token_id": 600}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for content, is_refused in NAMED:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        if is_refused:
            with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
                load_tokenizer(str(tmp_path))
            continue
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        ours = load_tokenizer(str(tmp_path))
        text = "ab <|end|><|new|> <think> x"
        assert ours.encode(text, allowed_special="all") == theirs.encode(text)


@pytest.mark.parametrize(
    "changes",
    [{"model": 3}, {"model": {"type": "X"}}, {"added_tokens": [{}]}, {"pre_tokenizer": {"a": 1}}],
)
def test_a_file_that_the_library_refuses_is_one_sentence(changes: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer: [^\n]+$"):
        write(trained(), tmp_path, **changes)


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = trained()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer\.json, pip install tokenizers"):
        write(library, tmp_path)
