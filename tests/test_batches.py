"""`python -m benchmarks --requests`: the same requests and tokens for all, and figures that are what they say."""

from pathlib import Path

import pytest
import torch

from benchmarks.batches import (
    BASE,
    BLOCK_TOKENS,
    CONTENDERS,
    PAGED,
    draw_requests,
    measure_contender,
)
from benchmarks.report import read_rows
from benchmarks.runners import Setup
from tests import test_benchmarks
from tests.helpers import start
from tests.test_benchmarks import CONFIG, of_all_speeds

folder = test_benchmarks.folder  # the fixture
TOKEN = 2 * CONFIG.n_layer * CONFIG.n_embd * 4  # bytes of a token's keys and values


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
    assert found["written"] == expected["written"] and [*map(len, found["written"])] == new
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


@pytest.mark.slow
def test_one_command_gives_tables_and_a_record_that_keeps_other_numbers(
    folder: Path, tmp_path: Path
) -> None:
    for words in ("1 3 --turns 1", "3 --turns 2"):
        ran = start(f"benchmarks.__main__ --requests {words} --model {folder} --out {tmp_path}")
        assert ran.code == 0 and "3 requests" in ran.out, ran.err
    rows = read_rows(tmp_path / "requests.jsonl", {})
    assert {(row["texts"], row["turns"]) for row in rows} == {(1, 1), (3, 2)}
    assert all(row.get("same_tokens", True) for row in rows)
    (bound,) = (row for row in rows if row["name"] == "bound" and row["texts"] == 3)
    prompts, new = draw_requests(3, CONFIG.vocab_size, CONFIG.n_ctx)
    assert bound["prompts"] == [*map(len, prompts)] and bound["new"] == new
    assert bound["seconds"] > bound["step_ms"] / 1e3 * (max(new) - 1)
    paged = next(row for row in rows if row["name"] == PAGED and row["texts"] == 3)
    assert paged["tokens_per_s"] == sum(new) / paged["seconds"] and paged["of_bound"] < 1
