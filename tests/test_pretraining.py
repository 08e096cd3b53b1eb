"""studies/pretraining/study.py: equal batches, the bytes of each memory, and a run that goes on."""

from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import GPT, SlidingWindowCache
from pocket.batches import Corpus, batch_at
from pocket.training import read_state
from studies.bounding import study as bounding
from studies.pretraining import study as pretraining
from studies.pretraining.study import MEMORIES, measure, recipe_of
from studies.results import Results
from tests.helpers import ROOT

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "head_dim": 32}
AT = {"built": "scratch"}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "GEOMETRY", pretraining.GEOMETRY | SMALL)
    monkeypatch.setattr(bounding, "QUICK", bounding.Size(documents=2, facts=2, explanations=2))


def test_all_models_read_the_same_batches() -> None:
    recipes = [recipe_of(name, 2, 60) for name in MEMORIES]
    text = Corpus(recipes[0])
    first, *others = (batch_at(recipe, 1, text) for recipe in recipes)
    assert first.rows.shape == (5, 513)
    for other in others:
        assert torch.equal(first.rows, other.rows) and torch.equal(first.weights, other.weights)


def test_the_page_says_how_many_more_weights_a_memory_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # models of the recorded size
    recipes = [recipe_of(way, 1500, 20_000) for way in ("full", "ours", "delta", "window")]
    full, *others = (
        sum(p.numel() for p in recipe.model_class(recipe.config).parameters()) for recipe in recipes
    )
    ours, delta, window = (f"{weights / full - 1:.0%}" for weights in others)
    page = (ROOT / "studies" / "bounding" / "README.md").read_text(encoding="utf-8")
    assert f"our rule ({ours} more weights), the delta rule ({delta};" in page and window == "0%"


@pytest.mark.slow
def test_models_with_equal_bytes_are_measured_and_a_run_goes_on(tmp_path: Path) -> None:
    rows = Results("bounding", tmp_path)
    measure(rows, True)
    full, *others, delta = (rows.figure(way, "bytes", **AT).value for way in MEMORIES)
    assert full == 2 * 2 * 32 * 512 * 4 and others == sorted(others)  # sum, ours, window
    assert others[2] < 1.1 * others[1] < 1.25 * others[0] < 1.4 * delta < 1.4 * others[0]
    assert rows.figure("full", "above", **AT).value == 0
    assert rows.figure("window", "above", **AT).value != 0
    state = read_state(tmp_path / "pretraining-2" / "window" / "last.pt")
    recipe = recipe_of("window", 2, 60)
    model = recipe.model_class(recipe.config)
    plain = GPT(recipe.config)
    for one in (model, plain):
        one.load_state_dict(state["model"])
    ids = torch.randint(1536, (1, 50))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids, SlidingWindowCache(recipe.window)))
    lines = rows.path.read_text().splitlines()
    measure(Results("bounding", tmp_path), True)
    assert rows.path.read_text().splitlines() == lines, "nothing is due"
    for kept in (lines[:-6], []):  # without the last way's rows, and without any
        rows.path.write_text("".join(f"{line}\n" for line in kept))
        measure(Results("bounding", tmp_path), True)  # from the kept training
        assert rows.path.read_text().splitlines() == lines
