"""studies/bounding/study.py and lengths/study.py measure what they say: BLEU, losses of long texts, caches that were filled."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from gpt_bounded_cache import BoundedMemory, SlidingWindowCache
from pocket import corpus
from studies.bounding import study as bounding_study
from studies.lengths import study as lengths
from studies.pretraining import study as pretraining
from support.statistics import bootstrap
from tests.helpers import start
from tests.test_bounded_cache import SMALL, SMALL_BCT, banded, ids_of, model_of

SENTENCES = [document.text.partition(".")[0] for document in corpus.documents("train", 12)]


@pytest.mark.slow
def test_bleu_is_that_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    words = [" ".join(re.findall(r"\w+|[^\w\s]", sentence)) for sentence in SENTENCES]
    texts = [f"{a} {b[: len(b) // 2]}" for a, b in zip(words, words[1:] + words[:1], strict=True)]
    for got, references in [(texts, words), (words, texts), (words, words)]:
        expected = sacrebleu.corpus_bleu(
            got, [references], tokenize="none", smooth_method="none"
        ).score
        counts = np.stack(
            [bounding_study.bleu_counts(*pair) for pair in zip(got, references, strict=True)]
        )
        assert bounding_study.bleu(counts).item() == pytest.approx(expected)


def test_what_is_lost_is_compared_text_by_text() -> None:
    draws = np.random.default_rng(0)
    tokens = np.full(200, 100.0)
    base = np.stack([100 + 10 * draws.standard_normal(200), tokens], 1)
    _, *same = bootstrap(
        np.stack([base + np.array([10, 0]), base], 1), bounding_study.perplexity_rise
    )
    assert same == pytest.approx([math.exp(0.1) - 1] * 2)  # paired: no text differs from others
    counts = np.stack([bounding_study.bleu_counts(text, text) for text in SENTENCES])
    none = np.stack([bounding_study.bleu_counts("x", text) for text in SENTENCES])
    assert bootstrap(np.stack([none, counts], 1), bounding_study.bleu_loss) == pytest.approx(
        (100, 100, 100)
    )
    assert bootstrap(np.stack([counts, counts], 1), bounding_study.bleu_loss) == (0, 0, 0)


@pytest.mark.parametrize(("window", "sinks"), [(24, 0), (5, 0), (4, 2)])
def test_losses_of_long_texts_are_those_of_what_generate_sees(window: int, sinks: int) -> None:
    model, ids = model_of(SMALL), ids_of(1, 60)
    starts = [bounded.context_start(t + 1, 24) for t in range(59)]
    seen = [banded(model, ids[:, start : t + 1], window, sinks) for t, start in enumerate(starts)]
    logits = torch.cat([logits[0, -1:] for logits in seen]).float()
    check_losses(model, lambda _: SlidingWindowCache(window, sinks), ids, logits)


def test_losses_of_long_texts_of_a_bct_are_those_of_one_pass() -> None:
    model, ids = model_of(SMALL_BCT), ids_of(1, 60)
    check_losses(model, lambda _: BoundedMemory(), ids, model(ids[:, :-1])[0])


def check_losses(model: nn.Module, make_cache: Callable, ids: Tensor, logits: Tensor) -> None:
    memory = bounding_study.Memory("", model, make_cache, chunk_length=7)
    got = bounding_study.stream_losses(memory, ids[0].tolist())
    torch.testing.assert_close(
        got, F.cross_entropy(logits, ids[0, 1:], reduction="none"), atol=1e-3, rtol=1e-3
    )


def test_filled_caches_have_the_bytes_and_the_position_of_read_ones() -> None:
    ways = lengths.ways_of(lengths.SMALL | {"n_ctx": 64})
    ids = torch.zeros(1, 20, dtype=torch.long)
    for name, (model, make_cache) in ways.items():
        cache = make_cache(20)
        assert len(cache) == int(cache.positions(1)) == 20
        if name != "preallocated":
            read = model.new_cache()
            model(ids, read)
            assert read.nbytes == cache.nbytes
        assert lengths.decode(model, make_cache, 20, 0)[0] > 0
        assert model(ids[:, :1], cache).isfinite().all()


SMALL_SIZE = bounding_study.Size(texts=1, documents=2, explanations=2)
SLOW = [
    "article",
    "bounding",
    "compression",
    "latency --model 2x2x64",
    "pretraining",
    "speculation",
]


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick runs become smaller still."""
    monkeypatch.setattr(bounding_study, "QUICK", SMALL_SIZE)
    monkeypatch.setattr(pretraining, "TEXT_GEOMETRY", pretraining.TEXT_GEOMETRY | {"n_layer": 1})
    size = pretraining.QUICK._replace(steps=3, held_out=SMALL_SIZE)
    monkeypatch.setattr(pretraining, "QUICK", size)
    monkeypatch.setattr(pretraining, "ANSWERS", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("study", ["lengths", *SLOW])
def test_a_quick_run_has_figures_and_no_verdict(study: str, tmp_path: Path) -> None:
    ran = start(f"studies.{study} --quick --out '{tmp_path}'")
    assert ran.code == 0 and "A reduced run: figures, and no verdict." in ran.out
    assert "HOLD" not in ran.out
    named = re.findall(r"(?:can't show|figures are missing): (.*)\.\n", ran.out)
    assert named[:1] == named[1:], "claims that are named before the run are those that it left out"
    assert not (tmp_path / "rows.jsonl").exists()
