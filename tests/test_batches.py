"""`python -m benchmarks --requests`: the same requests and tokens for all, and figures that are what they say."""

from pathlib import Path

import pytest
import torch

from benchmarks import batches
from benchmarks.batches import (
    BASE,
    BLOCK_TOKENS,
    CONTENDERS,
    PAGED,
    draw_requests,
    measure_contender,
    measure_requests,
)
from benchmarks.runners import Setup
from support.files import read_json
from tests import test_benchmarks
from tests.helpers import start
from tests.test_benchmarks import CONFIG, of_all_speeds

folder = test_benchmarks.folder  # the fixture
TOKEN = 2 * CONFIG.n_layer * CONFIG.n_embd * 4  # bytes of a token's keys and values
GEOMETRY = {"vocab_size": 300, "n_ctx": 64, "weights": 10**6}


def test_requests_are_the_same_every_time_and_of_different_lengths() -> None:
    (few, _), (prompts, new) = draw_requests(4, 300, 1024), draw_requests(64, 300, 1024)
    assert prompts[:4] == few and max(map(max, prompts)) < 300
    lengths = [len(ids) for ids in prompts]
    assert 4 * min(lengths) < max(lengths) and min(new) < max(new)


@torch.no_grad()
@pytest.mark.parametrize("name", [*map(of_all_speeds, CONTENDERS)])
def test_contenders_write_the_same_and_count_their_bytes(name: str, folder: Path) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    prompts, new = draw_requests(5, CONFIG.vocab_size, CONFIG.n_ctx)
    expected, found = (
        measure_contender(way, Setup(folder), {5: (prompts, new)})[5] for way in (BASE, name)
    )
    assert found["tokens"] == expected["tokens"] and [*map(len, found["tokens"])] == new
    lengths = [len(ids) + n - 1 for ids, n in zip(prompts, new, strict=True)]
    held, wasted = found["held"], found["wasted"]
    if name == BASE:
        assert held == max(lengths) * TOKEN and wasted == 0
    elif name == PAGED:
        assert held % (BLOCK_TOKENS * TOKEN) == 0 and 0 <= wasted < 5 * BLOCK_TOKENS * TOKEN
        assert held - wasted <= sum(lengths) * TOKEN
    elif "padded" in name:
        longest = max(map(len, prompts)) + max(new) - 1
        assert held == 5 * longest * TOKEN and wasted == held - sum(lengths) * TOKEN


def test_figures_are_medians_ratios_of_the_same_turn_and_shares_of_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(seconds: float, token: int) -> dict:
        return {2: {"seconds": seconds, "tokens": [[token]], "held": 10, "wasted": 1}}

    turns = {
        BASE: [turn(8.0, 0), turn(6.0, 0), turn(9.0, 0)],
        PAGED: [turn(2.0, 0), turn(3.0, 1), turn(1.0, 0)],
    }
    turns["floor"] = [{"bytes_per_ms": 1e6, "products_ms": {"32": 3.2}}]
    monkeypatch.setattr(batches, "run_in_processes", lambda *_, needed: (turns, {"other": "no"}))
    one = measure_requests(3, 1, Setup(Path()), GEOMETRY, [2])["2"]
    prompts, new = draw_requests(2, 300, 64)
    bound = 1e-4 * sum(map(len, prompts)) + 1e-3 * (max(new) - 1)
    assert one["bound_tokens_per_s"] == pytest.approx(sum(new) / bound)
    assert one["new"] == new and one["failed"] == {"other": "no"}
    paged, base = one["rows"][PAGED], one["rows"][BASE]
    assert paged["tokens_per_s"] == sum(new) / 2 and paged["times_as_fast"] == 4.0
    assert base["same_tokens"] and not paged["same_tokens"]


@pytest.mark.slow
def test_one_command_gives_tables_and_a_record_that_keeps_other_numbers(
    folder: Path, tmp_path: Path
) -> None:
    for words in ("1 3 --turns 1", "3 --turns 2"):
        ran = start(f"benchmarks.__main__ --requests {words} --model {folder} --out {tmp_path}")
        assert ran.code == 0 and "3 requests" in ran.out, ran.err
    counts = read_json(tmp_path / "requests.json")["counts"]
    assert {count: found["turns"] for count, found in counts.items()} == {"1": 1, "3": 2}
    for found in counts.values():
        assert all(row["same_tokens"] for row in found["rows"].values())
