"""pocket/bct: the teacher with a bounded memory, better than a sliding window of the same bytes."""

import json
from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import BCT, GPT, BoundedMemory, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import ablation, corpus, evaluation
from pocket.evaluation import Windowed
from tests.helpers import N_CTX

FOLDER = Path(__file__).resolve().parent.parent / "pocket" / "bct"
FIGURES = json.loads((FOLDER / "figures.json").read_text())
ABLATION = {row["name"]: row for row in json.loads((FOLDER / "ablation.json").read_text())}


@pytest.fixture(scope="module")
def model() -> BCT:
    return load_model("pocket-bct", model_class=BCT)


def test_files_are_small_and_complete() -> None:
    names = {
        "README.md",
        "ablation.json",
        "config.json",
        "figures.json",
        "loss.png",
        "model.safetensors",
    }
    assert {path.name for path in FOLDER.iterdir()} == names
    assert (FOLDER / "model.safetensors").stat().st_size < 9_000_000


def test_it_beats_the_windows_of_equal_bytes_where_memory_counts() -> None:
    bct = FIGURES["bct"]
    for other in ("window", "sinks"):
        assert (
            bct["perplexity"] < FIGURES[other]["perplexity"]
            and bct["recall_nats"] < FIGURES[other]["recall_nats"]
        )
    config = load_model("pocket-bct", model_class=BCT).config
    assert FIGURES["window"]["tokens"] == evaluation.window_of_equal_bytes(config)


@pytest.mark.slow
def test_recorded_figures_are_those_of_the_weights(model: BCT) -> None:
    tokenizer, plain = load_tokenizer("pocket-bct"), load_model("pocket", model_class=GPT)
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("test", 40)]
    n = FIGURES["window"]["tokens"]
    windows = {"window": Windowed(plain, n), "sinks": Windowed(plain, n - 4, 4)}
    for key, memory in {"bct": model, "full": plain, **windows}.items():
        nats, _ = evaluation.continuation_loss(memory, tokenizer, documents)
        assert torch.tensor(nats).exp().item() == pytest.approx(
            FIGURES[key]["perplexity"], rel=0.15
        )
        nats, _ = evaluation.answers(memory, tokenizer, corpus.recall_questions("test", 60))
        assert nats == pytest.approx(FIGURES[key]["recall_nats"], rel=0.35)


def test_what_was_said_long_ago_is_still_known(model: BCT) -> None:
    """Change a name at the beginning: what the model makes of the text must change beyond the recent tokens."""
    tokenizer = load_tokenizer("pocket-bct")
    prompt = (
        "Everyone in Tolben knew Halek and his sister Belessa. Halek carried a brass lantern for"
    )
    texts = []
    for name in ("Halek", "Zanav"):
        ids = torch.tensor([tokenizer.encode_ordinary(prompt.replace("Halek", name))])
        texts.append(
            tokenizer.decode(
                [int(t) for t in generate(model, ids, 120, stop_id=tokenizer.eot_token)]
            )
        )
    assert "Halek" in texts[0] and "Zanav" in texts[1] and "Halek" not in texts[1]


@pytest.mark.slow
def test_text_goes_on_past_the_context_as_well_as_before(model: BCT) -> None:
    tokenizer = load_tokenizer("pocket-bct")
    texts = "<|endoftext|>".join(
        document.text for document in corpus.documents("valid", 40 * N_CTX // 512)
    )
    ids = torch.tensor(tokenizer.encode(texts, allowed_special="all")[: 16 * N_CTX]).view(
        4, 4 * N_CTX
    )
    with torch.no_grad():
        logits = model(ids, BoundedMemory())
    nats = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    assert nats[:, 2 * N_CTX :].mean() < nats[:, :N_CTX].mean() + 0.2


def test_the_plain_files_refuse_it_in_one_sentence() -> None:
    import gpt_kv_cache

    with pytest.raises(ValueError, match="slots is 24.*gpt_bounded_cache"):
        load_model("pocket-bct", model_class=gpt_kv_cache.GPT)


def test_ablation_has_all_rows_and_finds_what_the_recipe_uses() -> None:
    assert len(ABLATION) == 3 + len(ablation.ABLATION)
    ours = ABLATION["+ the last 8 tokens kept exactly, 24 slots"]
    others = [row for row in ABLATION.values() if row["steps"] == ours["steps"]]
    assert ours["perplexity"] < 1.03 * min(
        row["perplexity"] for row in others
    )  # a learned start gains 2%
    assert ours["recall_share"] >= 0.99 * max(row["recall_share"] for row in others)
