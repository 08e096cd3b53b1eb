"""pocket/bct: the teacher with a bounded memory, better than a sliding window of the same bytes."""

import json
from pathlib import Path

import pytest
import torch

import gpt_kv_cache
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


def test_it_beats_the_windows_of_equal_bytes_where_memory_counts(model: BCT) -> None:
    for other in ("window", "sinks"):
        for figure in ("perplexity", "recall_nats"):
            assert FIGURES["bct"][figure] < FIGURES[other][figure]
    assert FIGURES["window"]["tokens"] == evaluation.window_of_equal_bytes(model.config)


@pytest.mark.slow
def test_recorded_figures_are_those_of_the_weights(model: BCT) -> None:
    tokenizer, plain = load_tokenizer("pocket-bct"), load_model("pocket", model_class=GPT)
    n = FIGURES["window"]["tokens"]
    windows = {"window": Windowed(plain, n), "sinks": Windowed(plain, n - 4, 4)}
    for key, memory in {"bct": model, "full": plain, **windows}.items():
        perplexity = evaluation.perplexity(memory, tokenizer, "test", 40)
        assert perplexity == pytest.approx(FIGURES[key]["perplexity"], rel=0.15)
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
        new = generate(model, ids, 120, stop_id=tokenizer.eot_token)
        texts.append(tokenizer.decode([int(t) for t in new]))
    assert "Halek" in texts[0] and "Zanav" in texts[1] and "Halek" not in texts[1]


@pytest.mark.slow
def test_text_goes_on_past_the_context_as_well_as_before(model: BCT) -> None:
    tokenizer = load_tokenizer("pocket-bct")
    texts = "<|endoftext|>".join(d.text for d in corpus.documents("valid", 40 * N_CTX // 512))
    tokens = tokenizer.encode(texts, allowed_special="all")[: 16 * N_CTX]
    ids = torch.tensor(tokens).view(4, 4 * N_CTX)
    with torch.no_grad():
        logits = model(ids, BoundedMemory())[:, :-1].transpose(1, 2)
    nats = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
    assert nats[:, 2 * N_CTX :].mean() < nats[:, :N_CTX].mean() + 0.2


def test_the_plain_files_refuse_it_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="slots"):
        load_model("pocket-bct", model_class=gpt_kv_cache.GPT)


def test_ablation_has_all_rows_and_finds_what_the_recipe_uses() -> None:
    assert len(ABLATION) == 3 + len(ablation.ABLATION)
    ours = ABLATION["+ the last 8 tokens kept exactly, 24 slots"]
    others = [row for row in ABLATION.values() if row["steps"] == ours["steps"]]
    best = min(row["perplexity"] for row in others)
    assert ours["perplexity"] < 1.03 * best  # a learned start gains 2%
    assert ours["recall_share"] >= 0.99 * max(row["recall_share"] for row in others)
