"""studies/recall/study.py and lengths/study.py: the task, the memory in both readings, a run that goes on, and verdicts."""

import math
from pathlib import Path

import pytest
import torch

from gpt_bounded_cache import BCT, GPT, BCTConfig, BoundedMemory, GPTConfig
from studies.bounding.claims import LOOKING_UP
from studies.lengths import study as lengths
from studies.recall import study as recall
from studies.recall.study import (
    QUICK,
    VALUES,
    WAYS,
    build_model,
    draw_texts,
    recall_of,
    train_model,
)
from studies.results import Results

TINY = QUICK._replace(pairs=(4, 8), slots=(4,), steps=3, answers=16)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "POSITIONS_PER_STEP", 128)
    monkeypatch.setattr(recall, "QUICK", TINY)


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


def bytes_of(way: str, slots: int, positions: int) -> int:
    return recall_of(build_model(way, slots, 0, positions), positions // 2, 1)[1]


def test_a_window_has_the_bytes_of_the_slots_and_mk_holds_values_only() -> None:
    a_position = bytes_of("full", 1, 20) // 20
    for slots in (4, 16):
        least, got = bytes_of("ours", slots, 128), bytes_of("window", slots, 128)
        assert least <= got - a_position < least + a_position, "the spare slot aside"
    values = 2 * 2 * 4 * 32 * 4  # layers, heads, slots, head size, bytes
    assert (bytes_of("sum", 4, 16), bytes_of("sum-mk", 4, 16)) == (2 * values, values)


def test_a_reading_through_mk_is_its_formula() -> None:
    """The memory of one layer, token by token, against MV = MV' + wwᵀ wv written out, from zero."""
    memory = build_model("sum-mk", 3, 0, 16).h[0].memory
    x = torch.randn(1, 6, 64)
    q, k, v = torch.randn(3, 1, 2, 6, 32)
    with torch.no_grad():
        got = memory(x, q, k, v, BoundedMemory(), 0)
        query = memory.c_query(x).view(1, 6, 2, 32).transpose(1, 2)
        ww = (query @ memory.addresses.mT).softmax(-1)
        values = torch.zeros(1, 2, 3, 32)
        for t in range(6):
            values = values + ww[:, :, t, :, None] * v[:, :, t, None]
            scores = memory.addresses @ q[:, :, t, :, None] / math.sqrt(32)
            expected = (scores.softmax(dim=-2) * values).sum(dim=-2)
            assert torch.allclose(got[:, :, t], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "ours"])
def test_training_teaches_to_look_up(way: str) -> None:
    size = TINY._replace(pairs=(2,), steps=80)
    before = recall_of(build_model(way, 4, 0, 4), 2, 512)[0]
    assert recall_of(train_model(way, 4, 0, size), 2, 512)[0] > before + 0.1


def test_an_interrupted_study_goes_on_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recall.measure(Results("bounding", whole), True)
    ways = []

    def fails_third(way: str, *args: object) -> object:
        ways.append(way)
        if len(ways) == 3:
            raise KeyboardInterrupt
        return train_model(way, *args)

    monkeypatch.setattr(recall, "train_model", fails_third)
    with pytest.raises(KeyboardInterrupt):
        recall.measure(Results("bounding", parts), True)
    recall.measure(Results("bounding", parts), True)
    assert ways == ["full", *WAYS[:2], *WAYS[1:]], (
        "a model that had left its rows was trained again"
    )
    assert (parts / "rows.jsonl").read_text() == (whole / "rows.jsonl").read_text()
    assert len(Results("bounding", whole).find("sum", "every", **LOOKING_UP)["values"]) == 1


# --- Lengths --------------------------------------------------------------------------------------------------------


def test_filled_caches_have_the_bytes_and_the_position_of_read_ones() -> None:
    geometry = lengths.SMALL_GEOMETRY | {"n_ctx": 64}
    plain, bct = GPT(GPTConfig(**geometry)), BCT(BCTConfig(**geometry, slots=4))
    ways = [
        (plain, lengths.growing_cache),
        (plain, lengths.preallocated_cache),
        (bct, lengths.bct_memory),
    ]
    ids = torch.zeros(1, 20, dtype=torch.long)
    for model, filled in ways:
        cache = filled(model, 20)
        assert len(cache) == int(cache.positions(1)) == 20
        if filled is not lengths.preallocated_cache:
            read = model.new_cache()
            model(ids, read)
            assert read.nbytes == cache.nbytes
        assert lengths.milliseconds_per_token(model, filled, 20, 0) > 0
        assert model(ids[:, :1], cache).isfinite().all()
