"""`python -m benchmarks --requests`: the same requests and tokens for all, and figures that are what they say."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import batches
from benchmarks.batches import BASE, CONTENDERS, PAGED, SIZE, measure, requests_of
from tests import test_benchmarks
from tests.test_benchmarks import CONFIG

folder = test_benchmarks.folder  # the fixture
TOKEN = 2 * CONFIG.n_layer * CONFIG.n_embd * 4  # bytes of a token's keys and values
GEOMETRY = {"vocab_size": 300, "n_ctx": 64, "weights": 10**6}


def test_requests_are_the_same_every_time_and_of_different_lengths() -> None:
    few, many = requests_of(4, 300, 1024), requests_of(64, 300, 1024)
    assert many[:4] == few and all(max(r["ids"]) < 300 for r in many)
    prompts, new = [len(r["ids"]) for r in many], [r["new"] for r in many]
    assert 32 <= min(prompts) < 64 and 256 < max(prompts) <= 512
    assert 32 <= min(new) < 64 < max(new) <= 128


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "transformers" in name else [])
        for name in CONTENDERS
    ],
)
def test_contenders_write_the_same_and_count_their_bytes(name: str, folder: Path) -> None:
    if "transformers" in name and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    requests = requests_of(5, CONFIG.vocab_size, CONFIG.n_ctx)
    expected = CONTENDERS[BASE](folder, "cpu")(requests)
    found = CONTENDERS[name](folder, "cpu")(requests)
    assert found["tokens"] == expected["tokens"] and [len(t) for t in found["tokens"]] == [
        r["new"] for r in requests
    ]
    lengths = [len(r["ids"]) + r["new"] - 1 for r in requests]
    if name == BASE:
        assert found["held"] == max(lengths) * TOKEN and found["wasted"] == 0
    elif name == PAGED:
        assert found["held"] % (SIZE * TOKEN) == 0 and 0 <= found["wasted"] < 5 * SIZE * TOKEN
        assert found["held"] - found["wasted"] <= sum(lengths) * TOKEN
    elif "padded" in name:
        longest = max(len(r["ids"]) for r in requests) + max(r["new"] for r in requests) - 1
        assert (
            found["held"] == 5 * longest * TOKEN
            and found["wasted"] == found["held"] - sum(lengths) * TOKEN
        )


def test_figures_are_medians_ratios_of_the_same_turn_and_shares_of_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {BASE: [8.0, 6.0, 9.0], PAGED: [2.0, 3.0, 1.0]}
    asked = []

    def ask(name: str, *where: object, **request: object) -> dict:
        asked.append(name)
        if name == "floor":
            return {"bytes_per_ms": 1e6, "products_ms": {"32": 3.2}}
        if name not in seconds:
            raise ValueError(f"{name} failed: no")
        turn = sum(other == name for other in asked) - 1
        return {
            "tokens": [[1], [turn if name == PAGED else 2]],
            "held": 10 + turn,
            "wasted": 1,
            "seconds": seconds[name][turn],
        }

    monkeypatch.setattr(batches, "ask", ask)
    found = measure(Path("."), GEOMETRY, [2], 3, "cpu", 1)
    requests = requests_of(2, 300, 64)
    one, new = found["2"], [r["new"] for r in requests]
    bound = 1e-4 * sum(len(r["ids"]) for r in requests) + 1e-3 * (max(new) - 1)
    assert one["bound_s"] == pytest.approx(bound) and one["bound_tokens_per_s"] == pytest.approx(
        sum(new) / bound
    )
    assert one["new"] == new
    paged = one["rows"][PAGED]
    assert (
        paged["tokens_per_s"] == sum(new) / 2
        and paged["times_as_fast"] == 4.0
        and paged["held"] == 10
    )
    assert not paged["same_tokens"] and one["rows"][BASE]["same_tokens"]
    assert sorted(one["failed"]) == sorted(CONTENDERS.keys() - seconds.keys())
    assert all(asked.count(name) == 1 for name in one["failed"]), (
        "one that failed is not asked again"
    )
    asked.clear()
    del seconds[PAGED]
    with pytest.raises(ValueError, match=r"paged\.py failed: no"):
        measure(Path("."), GEOMETRY, [2], 1, "cpu", 1)


@pytest.mark.slow
def test_one_command_gives_tables_and_a_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    bench.main(
        ["--requests", "1", "3", "--model", str(folder), "--turns", "1", "--out", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "requests.json").read_text())
    assert [*record["counts"]] == ["1", "3"] and "3 requests, all there at the beginning" in printed
    assert all(
        r["same_tokens"] for found in record["counts"].values() for r in found["rows"].values()
    )
    assert " NO" not in printed


def test_a_record_keeps_what_it_has_of_other_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"bytes_per_ms": 1e6, "products_ms": {"32": 3.2}}
    answer |= {"tokens": [], "held": 1, "wasted": 0, "seconds": 1.0}
    monkeypatch.setattr(batches, "ask", lambda *where, **request: answer)
    for words in ("1 4 --turns 2", "16 4 --turns 1"):
        where = ["--model", str(folder), "--out", str(tmp_path)]
        bench.main(["--requests", *words.split(), *where])
    record = json.loads((tmp_path / "requests.json").read_text())
    turns = {count: found["turns"] for count, found in record["counts"].items()}
    assert turns == {"1": 2, "4": 1, "16": 1}


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["--requests", "0"], ["0", "1"]),
        (["--requests", "--ablate"], ["not allowed with argument --requests"]),
        (["--requests", "2", "--batches", "3"], ["--requests has no --batches"]),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str], culprits: list[str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and all(culprit in printed for culprit in culprits)
