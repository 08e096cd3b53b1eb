"""The model that comes along: small, readable by others, and able to do what its card says."""

import json
from pathlib import Path

import pytest
import torch

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus, evaluation

FOLDER = Path(__file__).resolve().parent.parent / "pocket" / "teacher"
FIGURES = json.loads((FOLDER / "figures.json").read_text())


@pytest.fixture(scope="module")
def model() -> GPT:
    return load_model("pocket", model_class=GPT)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


def test_files_are_small_and_complete() -> None:
    names = {"README.md", "config.json", "figures.json", "loss.png", "model.safetensors", "tokenizer.tiktoken"}
    assert {path.name for path in FOLDER.iterdir()} == names
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000


def test_transformers_computes_the_same_logits(model: GPT, tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    text = corpus.document("test", 0).text
    ids = torch.tensor([tokenizer.encode_ordinary(text)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    new = theirs.generate(ids[:, :20], max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [int(token) for token in generate(model, ids[:, :20], 60)] == new[0, 20:].tolist()


@pytest.mark.parametrize("text", ["", "plain", "naïve café", "日本語 😀", "\x00\n\t  \r", "<|endoftext|>"])
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_end_of_text_is_the_last_token(tokenizer, model: GPT) -> None:
    assert tokenizer.encode("<|endoftext|>", allowed_special="all") == [model.config.vocab_size - 1]


def test_gates_hold_for_what_was_recorded() -> None:
    assert evaluation.failed_gates(FIGURES) == []


def test_recorded_figures_are_those_of_the_weights(model: GPT, tokenizer) -> None:
    closed_book = corpus.closed_book_questions("test")[::6]
    nats, share = evaluation.answers(model, tokenizer, closed_book)
    assert share > 0.9 and nats < 2 * FIGURES["closed_book_nats"] + 0.1
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("test", 60)]
    nats, _ = evaluation.continuation_loss(model, tokenizer, documents)
    assert torch.tensor(nats).exp().item() == pytest.approx(FIGURES["perplexity"], rel=0.1)
    first, second = evaluation.continuation_loss(model, tokenizer, corpus.repeated_lists("test", 20))
    assert first == pytest.approx(FIGURES["list_first_nats"], rel=0.2) and second < 0.2 * first


def test_names_come_from_the_prompt(model: GPT, tokenizer) -> None:
    """Change a name in the prompt: the text that follows must change with it, or a KV cache would carry nothing."""
    for old, new in (("Halek", "Zanav"), ("Belessa", "Noroth")):
        prompt = "Everyone in Tolben knew Halek and his sister Belessa. Halek carried a brass lantern for"
        texts = []
        for name in (old, new):
            ids = torch.tensor([tokenizer.encode_ordinary(prompt.replace(old, name))])
            texts.append(tokenizer.decode([int(t) for t in generate(model, ids, 120, stop_id=tokenizer.eot_token)]))
        assert old in texts[0] and new in texts[1] and old not in texts[1]


def test_card_is_that_of_the_figures() -> None:
    card = (FOLDER / "README.md").read_text()
    assert all(f"| {name} | {value:.4f} |" in card for name, value in FIGURES.items())
