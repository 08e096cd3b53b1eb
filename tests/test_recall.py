"""studies/recall.py and lengths.py: the task, the memories in several readings, a run that goes on, and verdicts."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_bounded_cache import GPT, BoundedMemory, GPTConfig, KVCache
from studies import lengths, recall
from studies.recall import BOUNDED, DIRECT, FULL, OURS, QUICK, STEP, VALUES, WINDOW, build, texts, trained

TINY = replace(QUICK, steps=3, answers=16)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "POSITIONS", 128)


def test_keys_are_distinct_and_the_answers_follow_their_keys() -> None:
    ids, answers = texts(9, 5, 4, torch.Generator().manual_seed(0))
    assert ids.shape == (4, 14) and answers.shape == (4, 5)
    for row, values in zip(ids.tolist(), answers.tolist(), strict=True):
        held = dict(divmod(i, VALUES + 1) for i in row[:9])
        assert len(held) == 9 and all(0 <= value < VALUES for value in held.values())
        keys, blanks = zip(*(divmod(i, VALUES + 1) for i in row[9:]), strict=True)
        assert {*blanks} == {VALUES} and len({*keys}) == 5, "a question gives its answer away, or comes twice"
        assert [held[key] for key in keys] == values


def test_a_window_has_the_bytes_of_the_slots() -> None:
    for slots in recall.Size.slots:
        (bct, memory), (gpt, window) = (build(name, slots, 0, 320) for name in (OURS, WINDOW))
        least, got = (recall.bytes_of(*pair) for pair in ((bct, memory), (gpt, window)))
        a_position = recall.bytes_of(gpt, KVCache) // 320
        assert least <= got - a_position < least + a_position, "the spare slot aside"


def test_a_reading_through_mk_holds_values_only() -> None:
    by_sum, through = (recall.bytes_of(*build(f"sum{how}", 4, 0, 16)) for how in ("", ", read through MK"))
    assert (by_sum, through) == (2 * 2 * 4 * (2 * 32 + 1) * 4, 2 * 2 * 4 * (32 + 1) * 4)  # layers, heads, slots


@pytest.mark.parametrize("method", BOUNDED)
def test_a_reading_is_its_formula(method: str) -> None:
    """The memory of one layer, token by token, against sums written out."""
    options = BOUNDED[method]
    memory = build(method, 3, 0, 16)[0].h[0].memory
    x, q, k, v = (torch.randn(1, *shape) for shape in ((6, 64), (2, 6, 32), (2, 6, 32), (2, 6, 32)))
    with torch.no_grad():
        got = memory(x, q, k, v, BoundedMemory(), 0)
        query = memory.c_query(x).view(1, 6, 2, 32).transpose(1, 2)
        ww = (query @ memory.addresses.mT).softmax(dim=-1)
        step, keep = memory.c_gate(x).view(1, 6, 2, 2).permute(2, 0, 3, 1).sigmoid()
        ww = ww * step[..., None] if options.get("step", True) else ww
        begin = memory.begin if options.get("begin") else torch.zeros_like(memory.begin)
        assert options.get("begin") is None or begin.std() > 0.5
        keys, values, mass = begin[0], begin[1], torch.zeros(1, 2, 3, 1)
        for t in range(6):
            kept = keep[:, :, t, None, None] if options.get("forget", True) else 1
            w = ww[:, :, t, :, None]
            keys, values, mass = (kept * old + w * new for old, new in (
                (keys, k[:, :, t, None]), (values, v[:, :, t, None]), (mass, 1)))  # fmt: skip
            found = memory.addresses if options.get("through_keys") else keys
            own = options.get("rule") != "sum"
            scores = (found / mass if own else found) @ q[:, :, t, :, None] / math.sqrt(32) + (mass.log() if own else 0)
            expected = (scores.softmax(dim=-2) * (values / mass if own else values)).sum(dim=-2)
            assert torch.allclose(got[:, :, t], expected, atol=1e-5)


@pytest.mark.parametrize("method", [FULL, DIRECT, "sum, read through MK", OURS])
def test_training_lowers_the_loss(method: str) -> None:
    losses = [trained(method, 4, 0, replace(TINY, pairs=(2,), steps=n))["nats"] for n in (2, 40)]
    assert losses[1] < 0.95 * losses[0]


def test_methods_read_the_same_texts_and_a_seed_gives_the_same_model() -> None:
    one, again, other = (trained(OURS, 4, seed, TINY) for seed in (0, 0, 1))
    assert one == again and one["nats"] != other["nats"]


def test_an_interrupted_study_goes_on_to_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = recall.grid(TINY)[:3]
    whole = recall.measured(models, TINY, tmp_path / "whole")
    count = []

    def fails_third(*args: Any) -> dict[str, Any]:
        count.append(args)
        if len(count) == 3:
            raise KeyboardInterrupt
        return trained(*args)

    monkeypatch.setattr(recall, "trained", fails_third)
    with pytest.raises(KeyboardInterrupt):
        recall.measured(models, TINY, tmp_path / "parts")
    assert len([*(tmp_path / "parts").iterdir()]) == 2
    assert recall.measured(models, TINY, tmp_path / "parts") == whole
    assert len(count) == 4, "a model that had left its figures was trained again"
    other = replace(TINY, pairs=(2, 8))
    assert [*recall.measured(models[:1], other, tmp_path / "parts")[0]["recall"]] == ["2", "8"]
    monkeypatch.setattr(recall, "RATE", recall.RATE / 10)
    assert recall.measured(models[:1], TINY, tmp_path / "parts")[0]["nats"] != whole[0]["nats"], "an old rate's model"


def test_the_grid_has_every_method_with_the_few_slots_and_the_main_ones_with_all() -> None:
    size = recall.Size()
    one = [(method, slots) for method, slots, seed in recall.grid(size) if seed == 0]
    assert one.count((FULL, 0)) == 1 and len({*one}) == len(one) == len(recall.grid(size)) // size.seeds
    for slots in size.slots:
        held = {method for method, s in one if s == slots}
        assert held == ({*BOUNDED, WINDOW} if slots in size.few else {*recall.MAIN})


def made(**recalls: dict[tuple[str, int], float]) -> dict[str, Any]:
    """A record of two seeds in which each method recalls the same share of any number of pairs."""
    size = replace(recall.Size(), pairs=(4, 64), slots=(4,), seeds=2, few=(4,))
    runs = [{"method": method, "slots": slots, "seed": seed, "nats": 1 - recalls.get(method, 0.5),
             "recall": dict.fromkeys(("4", "64"), recalls.get(method, 0.5)), "bytes": 1000 if slots else 128_000}
            for method, slots, seed in recall.grid(size)]  # fmt: skip
    return recall.record_of(runs, size)


def test_verdicts_follow_the_record() -> None:
    good, bad = ([claim["verdict"] for claim in recall.claims(made(**recalls))] for recalls in (
        {FULL: 0.99, DIRECT: 0.98, STEP: 0.99, OURS: 0.97, WINDOW: 0.98},
        {FULL: 0.99, DIRECT: 0.6, STEP: 0.55, OURS: 0.7, WINDOW: 0.1}))  # fmt: skip
    assert good == ["HOLDS", "NOT SHOWN", "HOLDS", "DOES NOT HOLD", "DOES NOT HOLD"]
    assert bad == ["DOES NOT HOLD", "HOLDS", "DOES NOT HOLD", "HOLDS", "HOLDS"]
    assert "39 with 4 slots" in recall.claims(made(**{FULL: 0.99, DIRECT: 0.6}))[0]["figure"]


def test_a_loss_that_more_slots_do_not_mend_may_be_for_want_of_training() -> None:
    record = made(**{FULL: 0.99, DIRECT: 0.6})
    verdicts = []
    for larger in (0.5, 0.7):
        more = [run | {"slots": 16, "recall": dict.fromkeys(run["recall"], larger)} for run in record["runs"]
                if run["method"] in recall.MAIN]  # fmt: skip
        size = record["size"] | {"slots": [4, 16]}
        verdicts.append(recall.claims(record | {"runs": [*record["runs"], *more], "size": size})[0]["verdict"])
    assert verdicts == ["NOT SHOWN", "DOES NOT HOLD"]


def test_a_quick_run_leaves_its_record_and_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--quick", "--steps", "2", "--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    recall.main(options)
    assert "our rule, 4 slots" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"recall.png", "summary.json"}
    assert len(record["runs"]) == len([*(tmp_path / "state").iterdir()]) == 8 and record["conditions"]["date"]
    recall.main(options)  # trains nothing
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["runs"] == record["runs"]


# --- Lengths --------------------------------------------------------------------------------------------------------


def test_filled_caches_have_the_bytes_and_the_position_of_read_ones() -> None:
    geometry = lengths.SMALL | {"n_ctx": 64}
    plain = GPT(GPTConfig(**geometry)).eval()
    bct = lengths.BCT(lengths.BCTConfig(**geometry, slots=4)).eval()
    for model, filled in ((plain, lengths.grown), (plain, lengths.preallocated), (bct, lengths.written)):
        cache = filled(model, 20)
        assert len(cache) == cache.next_pos == 20
        if filled is not lengths.preallocated:
            read = model.new_cache()
            model(torch.zeros(1, 20, dtype=torch.long), read)
            assert read.nbytes == cache.nbytes
        assert lengths.seconds(model, cache) > 0 and len(cache) == 20 + lengths.DECODED + 1
        assert model(torch.zeros(1, 1, dtype=torch.long), filled(model, 20)).isfinite().all()


def test_the_crossing_is_where_the_ratio_passes_one() -> None:
    times = lambda *seconds: {str(n): {"seconds": [s, s], "bytes": 8} for n, s in zip((1000, 2000, 3000), seconds,  # noqa: E731
                                                                                       strict=True)}  # fmt: skip
    record = {"lengths": [1000, 2000, 3000], "rows": {lengths.GROWING: times(1, 2, 3), "a": times(4 / 3, 4 / 3, 1),
                                                      "b": times(9, 9, 9), "c": times(0.5, 1, 1)}}  # fmt: skip
    assert lengths.crossing(record, "a") == "from about 1,300 tokens on"
    assert lengths.crossing(record, "b") == "at no length up to 3,000 tokens"
    assert lengths.crossing(record, "c") == "at every length from 1,000 tokens on"


def test_the_claims_on_time_follow_the_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lengths.main(["--quick", "--turns", "2", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "summary.json"} and capsys.readouterr().out
    record = json.loads((tmp_path / "summary.json").read_text())
    for factor, grows, verdict, quadratic in ((1e-9, 1, "HOLDS", "HOLDS"), (1e3, 0, "DOES NOT HOLD", "DOES NOT HOLD")):
        changed = copy.deepcopy(record)
        for n in changed["lengths"]:
            changed["rows"]["BCT, 4 slots"][str(n)]["seconds"] = [factor] * 2
            changed["rows"][lengths.GROWING][str(n)]["seconds"] = [n**grows / 1000] * 2
        constant, linear, growing, memory, lower, faster, ours = lengths.claims(changed)
        assert (linear["verdict"], growing["verdict"]) == (quadratic, "HOLDS")
        assert "more until" in lower["figure"] and lower["verdict"] == "HOLDS"
        assert (constant["verdict"], memory["verdict"], faster["verdict"]) == ("HOLDS", "HOLDS", verdict)
        assert ours["verdict"] == verdict and not ours["source"]
    changed["rows"][lengths.GROWING]["64"]["seconds"] = [999.0, 1001.0]
    assert lengths.claims(changed)[5]["verdict"] == "NOT SHOWN", "the capacity is as fast as the growing cache"


def test_throughput_is_judged_at_the_sources_capacity_against_the_growing_cache() -> None:
    def verdicts(**times: float) -> list[str]:
        rows = {name: {str(n): {"seconds": [s, s], "bytes": 8 * (n if name == lengths.GROWING else 1)}
                       for n in (1000, 4000, 16000)} for name, s in times.items()}  # fmt: skip
        conditions = {"model": "GPT-2", "parameters": 9, "layers": 1, "width": 1}
        *_, faster, fewer, capacity = lengths.claims({"lengths": [1000, 4000, 16000], "slots": [24, 2048], "recent": 8,
                                                      "turns": 2, "rows": rows, "conditions": conditions})  # fmt: skip
        assert "24" in fewer["quote"] and "2,048" in capacity["quote"]
        return [claim["verdict"] for claim in (faster, fewer, capacity)]

    few, many = "BCT, 24 slots", "BCT, 2,048 slots"
    for growing, expected in ((3, "HOLDS"), (1, "NOT SHOWN"), (0.5, "DOES NOT HOLD")):
        found = verdicts(**{lengths.GROWING: growing, lengths.AHEAD: 0.5, few: 0.1, many: 1})
        assert found == [expected, "HOLDS", "DOES NOT HOLD"]
