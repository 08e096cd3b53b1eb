"""studies/pretraining/study.py: the task, equal bytes and batches, training until it helps no more, a run that goes on."""

from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import GPT, BCTConfig, SlidingWindowCache
from pocket.batches import Corpus, batch_at
from pocket.evaluation import window_of_equal_bytes
from pocket.recipes import MEMORY
from pocket.training import read_state
from studies.bounding import study as bounding
from studies.bounding.claims import LOOKING_UP
from studies.pretraining import study as pretraining
from studies.pretraining.study import (
    QUICK,
    TEXT_MEMORIES,
    VALUES,
    Size,
    build_model,
    draw_texts,
    measure,
    measure_text,
    recall_of,
    recipe_of,
    train_model,
)
from studies.results import Results
from tests.helpers import ROOT

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "head_dim": 32}
TINY = QUICK._replace(
    pairs=(4, 32),
    steps=3,
    documents=60,
    held_out=bounding.Size(documents=2, explanations=2),
)
AT = {"built": "scratch"}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "TEXT_GEOMETRY", pretraining.TEXT_GEOMETRY | SMALL)
    monkeypatch.setattr(pretraining, "POSITIONS_PER_STEP", 128)
    monkeypatch.setattr(pretraining, "ANSWERS", 16)
    monkeypatch.setattr(pretraining, "QUICK", TINY)
    monkeypatch.setattr(pretraining, "RATES", (0.01, 0.02))


# --- Looking up -----------------------------------------------------------------------------------------------------


def test_keys_are_distinct_and_the_answers_follow_their_keys() -> None:
    ids, answers = draw_texts(9, 5, 4, torch.Generator().manual_seed(0))
    assert ids.shape == (4, 14) and answers.shape == (4, 5)
    for row, values in zip(ids.tolist(), answers.tolist(), strict=True):
        held = dict(divmod(i, VALUES + 1) for i in row[:9])
        assert len(held) == 9 and VALUES not in held.values()
        asked = dict(divmod(i, VALUES + 1) for i in row[9:])
        assert len(asked) == 5, "a question comes twice"
        assert {*asked.values()} == {VALUES}, "a question gives its answer away"
        assert [held[key] for key in asked] == values


def bytes_of(way: str, pairs: int = 64) -> int:
    return recall_of(build_model(way, 0), pairs)[1]


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_all_memories_have_the_bytes_of_the_slots(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "SLOTS", slots)
    a_position = bytes_of("full", 10) // 20
    slots_bytes = 2 * 2 * slots * 2 * 32 * 4  # layers, heads, slots, keys and values of 32
    assert bytes_of("sum") == 2 * bytes_of("sum-mk") == slots_bytes
    assert 0.9 * slots_bytes < bytes_of("delta") <= slots_bytes
    assert bytes_of("ours") == slots_bytes + 2 * 2 * slots * 4, "and the masses"
    assert bytes_of("window") == slots_bytes + a_position, "and the spare slot"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "ours", "delta"])
def test_training_teaches_to_look_up(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "ANSWERS", 512)
    size = TINY._replace(pairs=(2,))
    before = recall_of(build_model(way, 0), 2)[0]
    assert recall_of(train_model(way, 80, 0.01, 0, size), 2)[0] > before + 0.1


def test_a_way_is_trained_by_its_best_rate_until_that_helps_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall of a model is that of its steps, and by a higher rate less."""
    recalls = {3: 0.4, 6: 0.5, 12: 0.505, 24: 0.9}
    trained = []

    def train(way: str, size: pretraining.Size, **setting: float) -> dict[str, float]:
        trained.append(setting["steps"])
        return setting

    def recall_of(model: dict[str, float] | GPT, *_: int) -> tuple[float, float]:
        is_trained = isinstance(model, dict)
        return (recalls[model["steps"]] / (100 * model["rate"]) if is_trained else 0), 64

    monkeypatch.setattr(pretraining, "train_model", train)
    monkeypatch.setattr(pretraining, "recall_of", recall_of)
    rows = Results("bounding", tmp_path).at(**LOOKING_UP)
    pretraining.measure_recall(rows, "sum", TINY._replace(least_gain=0.01, models=2))
    assert trained == [6, 6, 3, 12, 12], "two rates, then the best until flat, then a seed"
    assert rows.find("sum", "right")["values"] == [0.505, 0.505]
    assert rows.find("sum", "right", steps=6)["values"] == [0.5]


def test_an_interrupted_study_goes_on_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "WAYS", ("full", "sum", "delta"))
    monkeypatch.setattr(pretraining, "TEXT_MEMORIES", {})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    measure(Results("bounding", whole), True)
    trained = []

    def fails_fifth(way: str, **setting: object) -> object:
        trained.append(f"{way} {setting}")
        if len(trained) == 5:
            raise KeyboardInterrupt
        return train_model(way, **setting)

    monkeypatch.setattr(pretraining, "train_model", fails_fifth)
    with pytest.raises(KeyboardInterrupt):
        measure(Results("bounding", parts), True)
    measure(Results("bounding", parts), True)
    assert len(trained) == 1 + len({*trained}), "a model that has a row is trained again"
    assert (parts / "rows.jsonl").read_text() == (whole / "rows.jsonl").read_text()


# --- Text -----------------------------------------------------------------------------------------------------------


def test_all_models_read_the_same_batches() -> None:
    recipes = [recipe_of(name, TINY) for name in TEXT_MEMORIES]
    text = Corpus(recipes[0])
    first, *others = (batch_at(recipe, 1, text) for recipe in recipes)
    assert first.rows.shape == (5, 513)
    for other in others:
        assert torch.equal(first.rows, other.rows) and torch.equal(first.weights, other.weights)


def test_the_page_says_how_many_more_weights_a_memory_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # models of the recorded size
    recipes = [recipe_of(way, Size()) for way in ("full", "ours", "delta", "window")]
    full, *others = (
        sum(p.numel() for p in recipe.model_class(recipe.config).parameters()) for recipe in recipes
    )
    ours, delta, window = (f"{weights / full - 1:.0%}" for weights in others)
    page = (ROOT / "studies" / "bounding" / "README.md").read_text(encoding="utf-8")
    assert f"our rule ({ours} more weights), the delta rule ({delta};" in page and window == "0%"


@pytest.mark.slow
def test_models_with_equal_bytes_are_measured_and_a_run_goes_on(tmp_path: Path) -> None:
    rows = Results("bounding", tmp_path)
    measure_text(rows, TINY)
    full, *others, delta = (rows.figure(way, "bytes", **AT).value for way in TEXT_MEMORIES)
    assert full == 2 * 2 * 32 * 512 * 4 and others == sorted(others)  # sum, ours, window
    assert others[2] < 1.1 * others[1] < 1.25 * others[0] < 1.4 * delta < 1.4 * others[0]
    assert rows.figure("full", "above", **AT).value == 0
    assert rows.figure("window", "above", **AT).value != 0
    assert 0 < rows.figure("full", "facts", **AT).high < 1, "of 2 questions that it gets wrong"
    state = read_state(tmp_path / "pretraining-2" / "window" / "last.pt")
    recipe = recipe_of("window", TINY)
    model = recipe.model_class(recipe.config)
    plain = GPT(recipe.config)
    for one in (model, plain):
        one.load_state_dict(state["model"])
    window = window_of_equal_bytes(BCTConfig(**pretraining.TEXT_GEOMETRY, **MEMORY))
    ids = torch.randint(1536, (1, 50))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids, SlidingWindowCache(window)))
    lines = rows.path.read_text().splitlines()
    measure_text(Results("bounding", tmp_path), TINY)
    assert rows.path.read_text().splitlines() == lines, "nothing is due"
    for kept in (lines[:-6], []):  # without the last way's rows, and without any
        rows.path.write_text("".join(f"{line}\n" for line in kept))
        measure_text(Results("bounding", tmp_path), TINY)  # from the kept training
        assert rows.path.read_text().splitlines() == lines
