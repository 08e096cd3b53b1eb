"""studies/pretraining.py: equal batches, the bytes of each memory, a run that goes on, and the verdicts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_bounded_cache import BoundedMemory, SlidingWindowCache
from pocket.batches import batch_at, text_of
from pocket.training import read_state
from studies import bounding, pretraining
from studies.pretraining import FULL, MEMORIES, OURS, SUMS, WINDOW, claims, measured, recipe_of

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "head_dim": 32}
SIZE = bounding.Size(contexts=1, documents=2, long_texts=1, facts=2, explanations=2)


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "GEOMETRY", pretraining.GEOMETRY | SMALL)


def test_all_models_read_the_same_batches() -> None:
    recipes = [recipe_of(name, 2, 60) for name in MEMORIES]
    text = text_of(recipes[0])
    first, *others = (batch_at(recipe, 1, text) for recipe in recipes)
    assert first.rows.shape == (5, 513)
    for other in others:
        assert torch.equal(first.rows, other.rows) and torch.equal(first.weights, other.weights)


def test_memories_have_about_the_same_bytes(tmp_path: Path) -> None:
    nbytes = {name: memory["bytes"] for name, memory in measured(1, 60, SIZE, tmp_path)["memories"].items()}
    assert 0.9 * nbytes[OURS] < nbytes[SUMS] <= nbytes[OURS] <= nbytes[WINDOW] < 1.1 * nbytes[OURS]
    assert nbytes[FULL] == 2 * 2 * 32 * 512 * 4


def test_the_sum_is_the_sources_rule() -> None:
    """The memory of one layer, token by token, against its formula: MV = MV' + wwᵀ wv, from zero."""
    recipe = recipe_of(SUMS, 1, 60)
    memory = recipe.model_class(recipe.config).h[0].memory
    x, q, k, v = (torch.randn(1, *shape) for shape in ((5, 16), (2, 5, 32), (2, 5, 32), (2, 5, 32)))
    with torch.no_grad():
        got = memory(x, q, k, v, BoundedMemory(), 0)
        ww = (memory.c_query(x).view(1, 5, 2, 32).transpose(1, 2) @ memory.addresses.mT).softmax(dim=-1)
        for t in range(5):
            keys, values = (sum(ww[:, :, i, :, None] * y[:, :, i, None] for i in range(t + 1)) for y in (k, v))
            read = (q[:, :, t, None] @ keys.mT / 32**0.5).softmax(dim=-1) @ values
            torch.testing.assert_close(got[:, :, t], read[:, :, 0], atol=1e-5, rtol=1e-4)


def test_a_study_goes_on_and_its_window_is_a_window(tmp_path: Path) -> None:
    record = measured(2, 60, SIZE, tmp_path)
    assert [*record["memories"]] == [FULL, SUMS, OURS, WINDOW] and record["tokens"] == 2 * 5 * 512
    window = read_state(tmp_path / "window-of-equal-bytes" / "last.pt")
    assert len(window["losses"]) == 2
    model = recipe_of(WINDOW, 2, 60).model_class(recipe_of(WINDOW, 2, 60).config)
    model.load_state_dict(window["model"])
    ids = torch.randint(1536, (1, 50))
    with torch.no_grad():
        expected = model.model(ids, SlidingWindowCache(record["window"]))
        torch.testing.assert_close(model(ids), expected)
    again = measured(2, 60, SIZE, tmp_path)
    json.dumps(record, allow_nan=False)
    for some in (record, again):
        some["conditions"].pop("date", None)
    assert again == record


def recorded() -> dict[str, Any]:
    found = {"perplexity": 4.0, "bleu": 20.0, "perplexity_of_long_texts": 4.0, "recall_share": 0.1, "losses": [1.0],
             "parameters": 100, "bytes": 10, "perplexity_against_full": {"change": 0.0, "low": 0.0, "high": 0.0},
             "bleu_against_full": {"change": 0.0, "low": -0.05, "high": 0.05}}  # fmt: skip
    conditions = {"model": "GPT-2", "threads": 1, "machine": "a processor", "date": "2026-11-22"}
    return {"conditions": conditions, "steps": 10, "context": 512, "tokens": 25600, "window": 36,
            "texts": {"documents": 2, "explanations": 2, "contexts": 2},
            "memories": {name: copy.deepcopy(found) for name in MEMORIES}}  # fmt: skip


@pytest.mark.parametrize(("perplexity", "bleu", "verdicts"), [
    ((0.0, 0.02), (-0.05, 0.05), ["HOLDS", "HOLDS"]),
    ((0.02, 0.04), (-0.2, 0.0), ["NOT SHOWN", "NOT SHOWN"]),
    ((0.04, 0.06), (-0.4, -0.2), ["DOES NOT HOLD", "DOES NOT HOLD"]),
    ((-0.3, -0.2), (0.2, 0.4), ["HOLDS", "HOLDS"]),
])  # fmt: skip
def test_verdicts_follow_the_intervals(perplexity: tuple[float, float], bleu: tuple[float, float],
                                       verdicts: list[str]) -> None:  # fmt: skip
    record = recorded()
    sums = record["memories"][SUMS]
    for key, (low, high) in (("perplexity_against_full", perplexity), ("bleu_against_full", bleu)):
        sums[key] = {"change": (low + high) / 2, "low": low, "high": high}
    assert [claim["verdict"] for claim in claims(record)] == ["NOT SHOWN"] * 3, "full attention isn't ahead"
    record["memories"][WINDOW]["perplexity_against_full"] = {"change": 0.2, "low": 0.1, "high": 0.3}
    quality, differences, ours = claims(record)
    assert [quality["verdict"], differences["verdict"]] == verdicts
    assert quality["source"] and not ours["source"] and ours["verdict"] in ("HOLDS", "YES")
    assert f"{20 * bleu[0]:+.1f} to {20 * bleu[1]:+.1f}" in differences["figure"]
