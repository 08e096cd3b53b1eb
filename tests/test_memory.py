"""studies/bounding.py measures what it says: BLEU, losses of long texts, bytes; and its report writes its files."""

import csv
import json
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_bounded_cache import BCT, GPT, BoundedMemory, GPTConfig, SlidingWindowCache
from load_gpt2_weights import load_tokenizer
from pocket import checkpoints, corpus, evaluation
from studies import bounding as memory
from tests.helpers import N_CTX
from tests.test_bounded_cache import SMALL, SMALL_BCT, banded, ids_of, model_of

SENTENCES = [document.text.partition(".")[0] for document in corpus.documents("train", 12)]


@pytest.mark.slow
def test_bleu_is_that_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    words = [" ".join(re.findall(r"\w+|[^\w\s]", sentence)) for sentence in SENTENCES]
    texts = [f"{a} {b[: len(b) // 2]}" for a, b in zip(words, words[1:] + words[:1], strict=True)]
    for got, references in [(texts, words), (words, texts), (words, words)]:
        expected = sacrebleu.corpus_bleu(got, [references], tokenize="none", smooth_method="none").score
        counts = np.stack([memory.bleu_counts(*pair) for pair in zip(got, references, strict=True)])
        assert memory.bleu(counts).item() == pytest.approx(expected)


def test_bleu_of_nothing_in_common_is_0() -> None:
    assert memory.bleu(memory.bleu_counts("a b c d e", "v w x y z")[None]).item() == 0.0


def test_a_change_has_an_interval_that_is_as_wide_as_the_texts_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((200, 1), 100.0, dtype=torch.double)
    base = torch.cat([100 + 10 * torch.randn(200, 1, generator=generator), tokens], dim=1)
    same = memory.change(memory.perplexity, base, base)
    assert same == {"change": 0, "low": 0, "high": 0}
    shifted = memory.change(memory.perplexity, base + torch.tensor([10.0, 0.0]), base)
    assert shifted["low"] == pytest.approx(shifted["high"]) == pytest.approx(math.exp(0.1) - 1)  # paired
    noise = torch.cat([10 * torch.randn(200, 1, generator=generator), 0 * tokens], dim=1)
    noisy = memory.change(memory.perplexity, base + noise, base)
    assert noisy["low"] < noisy["change"] < noisy["high"]
    assert noisy["high"] - noisy["low"] == pytest.approx(4 * 0.1 / 200**0.5, rel=0.3)


@pytest.mark.parametrize(("window", "sinks"), [(24, 0), (5, 0), (4, 2)])
def test_losses_of_long_texts_are_those_of_what_generate_sees(window: int, sinks: int) -> None:
    model, ids = model_of(SMALL), ids_of(2, 60)
    one = memory.Memory("", model, lambda: SlidingWindowCache(window, sinks))
    got = memory.stream_losses(one, ids, chunk=7)
    assert got.shape == (2, 59)
    for t in range(59):
        start = bounded.context_start(t + 1, 24)
        logits = banded(model, ids[:, start : t + 1], window, sinks)[:, -1]
        torch.testing.assert_close(got[:, t], F.cross_entropy(logits, ids[:, t + 1], reduction="none"))


def test_losses_of_long_texts_of_a_bct_are_those_of_one_pass() -> None:
    model, ids = model_of(SMALL_BCT), ids_of(2, 60)
    got = memory.stream_losses(memory.Memory("", model, BoundedMemory), ids, chunk=7)
    expected = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_losses_of_documents_do_not_depend_on_their_neighbours() -> None:
    one = memory.Memory("", model_of(SMALL_BCT), BoundedMemory)
    documents = [ids_of(n, seed=n).tolist() for n in (5, 23, 9)]
    together = memory.document_losses(one, documents)
    for document, losses in zip(documents, together, strict=True):
        assert losses == pytest.approx(memory.document_losses(one, [document])[0], abs=1e-4)


def test_growth_counts_every_token() -> None:
    plain = model_of(SMALL)
    geometry = vars(SMALL)
    old = gpt_kv_cache.GPT(gpt_kv_cache.GPTConfig(**geometry))
    old.load_state_dict(plain.state_dict())
    memories = {
        "growing": memory.Memory("", old.eval(), gpt_kv_cache.KVCache, gpt_kv_cache.generate),
        "window": memory.Memory("", plain, lambda: SlidingWindowCache(5)),
        "bct": memory.Memory("", model_of(SMALL_BCT), BoundedMemory),
    }
    grown = memory.growth(memories, ids_of(1, 4), 30)
    per_token = 2 * 3 * 2 * 5 * 4
    assert grown["growing"].nbytes[:20] == [per_token * n for n in range(4, 24)]
    assert grown["growing"].nbytes[21] == per_token * 13  # half of the context was forgotten, and a token read
    assert set(grown["window"].nbytes) == {(5 + 1) * per_token} and len(set(grown["bct"].nbytes)) == 1
    assert all(len(g.ms) == 30 and min(g.ms) > 0 for g in grown.values())


def test_a_window_of_equal_bytes_takes_the_bytes_of_the_bct() -> None:
    config = memory.load_model("pocket-bct", model_class=BCT).config
    n = evaluation.window_of_equal_bytes(config)
    geometry = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
    model, bct = GPT(GPTConfig(**geometry)).eval(), BCT(config).eval()
    window, slots, ids = SlidingWindowCache(n), BoundedMemory(), ids_of(1, 9)
    with torch.no_grad():
        model(ids, window)
        bct(ids, slots)
    assert 0 <= window.nbytes * n / (n + 1) - slots.nbytes < window.nbytes / n  # but for its spare slot
    assert n + 1 == 37  # what --slots says


def test_explanations_in_one_batch_are_those_of_each_prompt_alone() -> None:
    memories, tokenizer = memory.memories_of("pocket", 37, "cpu", torch.float32), load_tokenizer("pocket")
    questions = corpus.explain_questions("valid", 3)
    for key in ("window", "bct"):
        together = memory.explanations(memories[key], tokenizer, questions, tokens=12)
        assert together == [memory.explanations(memories[key], tokenizer, [q], tokens=12)[0] for q in questions]


def test_training_is_timed_at_once_and_token_by_token_and_leaves_no_gradients() -> None:
    model = model_of(SMALL_BCT).requires_grad_(True)
    found = memory.training_seconds(memory.Memory("", model, BoundedMemory), ids_of(1, 9), turns=2)
    assert [len(taken) for taken in found.values()] == [2, 2] and min(map(min, found.values())) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_lost_beyond_the_context_has_its_own_interval() -> None:
    excess = torch.cat([torch.full((4, 8), 0.1), torch.full((4, 24), 0.3)], dim=1)
    found = memory.beyond(excess, 8)
    for name, nats in (("within", 0.1), ("after", 0.3), ("more", 0.2)):
        assert found[name] == pytest.approx([math.expm1(nats)] * 3)


@pytest.mark.slow
def test_the_report_says_and_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    size = memory.Size(contexts=2, documents=4, long_texts=2, facts=6, explanations=2)
    prompt = torch.tensor([load_tokenizer("pocket").encode_ordinary("Notes:")])
    memory.report("pocket", 37, "cpu", torch.float32, prompt, size, tmp_path / "new" / "folder")
    printed, out = capsys.readouterr().out, tmp_path / "new" / "folder"
    names = {"bytes.png", "growth.csv", "perplexity.csv", "perplexity.png", "speed.png", "summary.json"}
    assert {path.name for path in out.iterdir()} == names
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["memories"]) == {"growing", "full", "window", "sinks", "bct"}
    claims = memory.claims(summary)
    assert claims and all(claim["figure"] in printed for claim in claims)
    assert claims[2]["verdict"] == "HOLDS" and summary["conditions"]["model"] == "pocket"
    marks = {f"{2**i}" for i in range(6, 20) if 2**i <= 2 * N_CTX}
    for row in summary["memories"].values():
        assert set(row["bytes"]) == marks and row["label"] in printed
        assert math.isfinite(row["mean_ms_per_token"])
    growing = summary["memories"]["growing"]["bytes"]
    assert [growing[n] for n in ("64", "256", "512")] == [2 * 6 * 6 * 32 * 4 * n for n in (64, 256, 512)]
    with (out / "growth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * len(marks) and {row["tokens"] for row in rows} == marks
    with (out / "perplexity.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["memory"].startswith("BCT")]
    spans = [(row["from_token"], row["to_token"]) for row in rows]
    assert spans[0] == ("0", f"{N_CTX // 16}") and spans[-1] == (f"{N_CTX}", f"{2 * N_CTX}")


@pytest.mark.slow
def test_a_bct_elsewhere_is_measured_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    checkpoints.export(BCT(SMALL_BCT), tmp_path / "model")
    monkeypatch.setattr(memory, "load_tokenizer", lambda name: None)
    size, out = memory.Size(contexts=3), tmp_path / "out"
    memory.report(str(tmp_path / "model"), 36, "cpu", torch.float32, ids_of(1, 4), size, out)
    assert "pocket only" in capsys.readouterr().out
    assert list(json.loads((out / "summary.json").read_text())["memories"]) == ["bct"]
