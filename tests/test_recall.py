"""studies/recall/study.py and lengths/study.py: the task, equal bytes, training until it helps no more, a run that goes on."""

from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import GPT
from studies.bounding.claims import LOOKING_UP
from studies.lengths import study as lengths
from studies.recall import study as recall
from studies.recall.study import (
    QUICK,
    VALUES,
    build_model,
    draw_texts,
    recall_of,
    train_model,
)
from studies.results import Results

TINY = QUICK._replace(pairs=(4, 32), steps=3, answers=16)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "POSITIONS_PER_STEP", 128)
    monkeypatch.setattr(recall, "QUICK", TINY)
    monkeypatch.setattr(recall, "RATES", (0.01, 0.02))


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


def bytes_of(way: str, slots: int, pairs: int = 64) -> int:
    return recall_of(build_model(way, slots, 0), pairs, 1)[1]


def test_all_memories_have_the_bytes_of_the_slots() -> None:
    a_position = bytes_of("full", 1, 10) // 20
    for slots in (4, 16, 64):
        slots_bytes = 2 * 2 * slots * 2 * 32 * 4  # layers, heads, slots, keys and values of 32
        assert bytes_of("sum", slots) == 2 * bytes_of("sum-mk", slots) == slots_bytes
        assert 0.9 * slots_bytes < bytes_of("delta", slots) <= slots_bytes
        assert bytes_of("ours", slots) == slots_bytes + 2 * 2 * slots * 4, "and the masses"
        assert bytes_of("window", slots) == slots_bytes + a_position, "and the spare slot"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "ours", "delta"])
def test_training_teaches_to_look_up(way: str) -> None:
    size = TINY._replace(pairs=(2,))
    before = recall_of(build_model(way, recall.SLOTS, 0), 2, 512)[0]
    assert recall_of(train_model(way, 80, 0.01, 0, size), 2, 512)[0] > before + 0.1


def test_a_way_is_trained_by_its_best_rate_until_that_helps_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall of a model is that of its steps, and by a higher rate less."""
    recalls = {3: 0.4, 6: 0.5, 12: 0.505, 24: 0.9}
    trained = []

    def train(way: str, size: recall.Size, **setting: float) -> dict[str, float]:
        trained.append(setting["steps"])
        return setting

    def recall_of(model: dict[str, float] | GPT, *_: int) -> tuple[float, float]:
        is_trained = isinstance(model, dict)
        return (recalls[model["steps"]] / (100 * model["rate"]) if is_trained else 0), 64

    monkeypatch.setattr(recall, "train_model", train)
    monkeypatch.setattr(recall, "recall_of", recall_of)
    rows = Results("bounding", tmp_path).at(**LOOKING_UP)
    recall.measure_recall(rows, "sum", TINY._replace(least_gain=0.01, models=2))
    assert trained == [6, 6, 3, 12, 12], "two rates, then the best until flat, then a seed"
    assert rows.find("sum", "rate")["values"] == [0.01]
    assert rows.find("sum", "steps")["values"] == [12]
    assert rows.find("sum", "right")["values"] == [0.505, 0.505]
    assert rows.find("sum", "right", steps=6)["values"] == [0.5]


def test_an_interrupted_study_goes_on_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "WAYS", ("full", "sum", "delta"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recall.measure(Results("bounding", whole), True)
    trained = []

    def fails_fifth(way: str, **setting: object) -> object:
        trained.append(f"{way} {setting}")
        if len(trained) == 5:
            raise KeyboardInterrupt
        return train_model(way, **setting)

    monkeypatch.setattr(recall, "train_model", fails_fifth)
    with pytest.raises(KeyboardInterrupt):
        recall.measure(Results("bounding", parts), True)
    recall.measure(Results("bounding", parts), True)
    assert len(trained) == 1 + len({*trained}), "a model that has a row is trained again"
    assert (parts / "rows.jsonl").read_text() == (whole / "rows.jsonl").read_text()


# --- Lengths --------------------------------------------------------------------------------------------------------


def test_filled_caches_have_the_bytes_and_the_position_of_read_ones() -> None:
    ways = lengths.ways_of(lengths.QUICK.geometry | {"n_ctx": 64})
    ids = torch.zeros(1, 20, dtype=torch.long)
    for name, (model, make_cache) in ways.items():
        cache = make_cache(20)
        assert len(cache) == int(cache.positions(1)) == 20
        if name != "preallocated":
            read = model.new_cache()
            model(ids, read)
            assert read.nbytes == cache.nbytes
        assert lengths.milliseconds_per_token(model, make_cache, 20, 0) > 0
        assert model(ids[:, :1], cache).isfinite().all()
