"""`python -m benchmarks`: equal weights give equal tokens in all implementations, and figures are what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import processes, report, runners, tables
from benchmarks.contenders import time_contender
from benchmarks.runners import BASE, CONTENDERS, LLAMA, LLAMAS, Int8, Setup, is_exact
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model
from pocket.checkpoints import export
from tests.helpers import N_CTX, refused, start

CONFIG = GPTConfig(vocab_size=300, n_ctx=64, n_layer=2, n_head=4, n_embd=64)
EXACT = [name for name in CONTENDERS if is_exact(name)]


def of_all_speeds(name: str) -> object:
    """A name as a test's parameter: slow if it is that of another implementation."""
    return pytest.param(name, marks=[pytest.mark.slow] * (not name.startswith(("gpt_", "paged"))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    path = tmp_path_factory.mktemp("weights")
    export(model, path)
    return path


def runner_of(name: str, folder: Path) -> object:
    try:
        return CONTENDERS[name](Setup(folder))
    except ImportError as error:
        pytest.skip(str(error))


def prompt(B: int = 2, T: int = 12) -> torch.Tensor:
    return torch.randint(300, (B, T), generator=torch.Generator().manual_seed(0))


def plain(folder: Path, ids: torch.Tensor, n: int) -> torch.Tensor:
    model = load_model(str(folder), model_class=GPT)
    return torch.cat(list(generate(model, ids, n, cache=KVCache())), 1)


CACHED = {  # tokens whose keys and values are held, after 12 and 20 more
    "gpt_baseline.py": 0,
    "gpt_bounded_cache.py, preallocated": 65,
    "gpt_bounded_cache.py, constant shapes": 65,
    "transformers, StaticCache": 64,
}


@torch.no_grad()
@pytest.mark.parametrize("name", [of_all_speeds(name) for name in EXACT])
def test_equal_weights_give_equal_tokens(name: str, folder: Path) -> None:
    runner = runner_of(name, folder)
    done = time_contender(runner, prompt(), 20)
    assert done["written"] == plain(folder, prompt(), 21).tolist()
    assert done["step_ms"] > 0 and done["first_ms"] > 0
    token = 2 * CONFIG.n_layer * 2 * CONFIG.n_head * CONFIG.head_dim * 4  # of two texts
    assert done["cache_bytes"] == token * CACHED.get(name, 12 + 20)


def test_steps_of_constant_shapes_are_the_same_work_and_wait_for_nothing(folder: Path) -> None:
    """So a GPU can capture one of them and replay it."""
    tokens, steps = runner_of("gpt_bounded_cache.py, constant shapes", folder).start(prompt()), []
    next(tokens)
    for _ in range(3):
        with torch.profiler.profile(record_shapes=True) as profile:
            next(tokens)
        steps.append([f"{event.name} {event.input_shapes}" for event in profile.events()])
    assert steps[0] == steps[1] == steps[2]
    assert not any(name.startswith(("aten::item", "aten::nonzero")) for name in steps[0])
    assert len([*tokens]) == CONFIG.n_ctx - 12 - 3  # the context is full


def test_int8_is_near(folder: Path) -> None:
    exact, runner = load_model(str(folder), model_class=GPT), Int8(Setup(folder))
    ids = prompt(4, 40)
    with torch.no_grad():
        expected, got = exact(ids), runner.model(ids)
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1  # quantised, and near; a processor without VNNI has one bit less


@pytest.mark.slow
def test_ctranslate2_writes_the_same_up_to_the_context(folder: Path) -> None:
    left = CONFIG.n_ctx - 12  # as many as it has positions for
    done = time_contender(runner_of("CTranslate2", folder), prompt(4), left)
    assert done["written"] == plain(folder, prompt(4), left + 1).tolist()


def work(model: GPT) -> list[str]:
    """What a pass over a prompt computes."""
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        model(prompt(1), KVCache(), last_only=True)
    return [f"{event.name} {event.input_shapes}" for event in profile.events()]


@pytest.mark.parametrize("name", runners.ABLATIONS)
def test_an_ablation_changes_the_work_and_no_result(name: str, folder: Path) -> None:
    model = load_model(str(folder), model_class=GPT)
    before = work(model)
    with torch.no_grad():
        expected = model(prompt())
        assert work(model) == before
        runners.ABLATIONS[name](model)
        torch.testing.assert_close(model(prompt()), expected, rtol=1e-4, atol=1e-4)
    assert work(model) != before


def turn(step: float, first: float, tokens: list[int]) -> dict:
    return {
        (2, 100): {"texts": 2, "tokens": 100, "step_ms": step, "first_ms": first, "waited": 0.3}
        | {"written": [[1, 1], tokens], "cache_bytes": 100}
    }


def test_figures_are_medians_ratios_of_the_same_turn_and_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = (1.0, 2.0, 1.0)  # the machine in three turns
    found = {
        (1, BASE): [turn(100 * s, 200 * s, [1, 2]) for s in slow],
        (1, "other"): [turn(150 * s, 400 * s, [1, 3]) for s in slow],
        (1, "floor"): [
            {"bytes_per_ms": speed, "products_ms": {200: 160.0}} for speed in (10e6, 10e6, 10.2e6)
        ],
    }
    monkeypatch.setattr(report, "run_in_processes", lambda *_: (found, {(1, "bad"): "no"}))
    (ours, other, bad), floors = report.run_in_turns({}, [1], 3, needed=[BASE])
    assert ours["step_ms"] == 100 and ours["times_as_fast"]["tokens_per_s"] == [1, 1, 1]
    assert other["times_as_fast"]["tokens_per_s"] == pytest.approx([100 / 150] * 3)
    assert other["times_as_fast"]["first_ms"] == [0.5] * 3 and other["first_ms"] == 400
    assert ours["same_tokens"] and not other["same_tokens"]  # in the second text
    assert report.writes_other_tokens(other) and bad["absent"] == "no"
    (floor,) = report.floors_of_turns([ours, other], floors[1], 500e6)
    assert floor["step_ms"] == 50 and floor["first_ms"] == 160 and floor["gb_per_s"] == 10
    assert floor["bandwidth_change"] == pytest.approx(0.02) and report.is_disturbed(floor)
    assert not report.is_disturbed(floor | {"waited": 0.0})
    assert not report.is_disturbed(floor | {"threads": 2})  # which wait for each other
    assert report.is_disturbed(floor | {"waited": 0.0, "bandwidth_change": 0.5})


def test_a_table_has_a_column_for_each_setting_and_a_dash_where_nothing_was_measured() -> None:
    row = {"machine": "X, 2 cores", "texts": 1, "tokens": 128, "times_as_fast": {}}
    one = row | {"name": "a", "threads": 1, "tokens_per_s": 20.0, "cache_bytes": 9}
    two = one | {"threads": 2, "times_as_fast": {"tokens_per_s": [1.0, 3.0, 2.0]}}
    other = row | {"name": "b", "threads": 2, "tokens_per_s": 1234.56}
    made = tables.table_of(("tokens_per_s", [one, two, other]), ("cache_bytes", [one]))
    columns = ["tokens/s, 1 thread", "tokens/s, 2 threads", "bytes of cache, 1 thread"]
    assert made.header == ["", *columns]
    assert made.rows == [["a", "20.0", "20.0 (2.00)", "9"], ["b", "-", "1,234.6", "-"]]


def grows(path: Path, most: int) -> int:
    """A job that fails when it has run `most` times."""
    n = len(path.read_text()) if path.exists() else 0
    path.write_text("." * (n + 1))
    return [10, 20][:most][n]


@pytest.mark.slow
def test_a_job_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    good, bad = (1, "good"), (2, "bad")
    jobs = {good: (grows, tmp_path / "good", 2), bad: (grows, tmp_path / "bad", 1)}
    found, failed = processes.run_in_processes(jobs, 3, needed=[])
    assert found == {} and set(failed) == {good, bad}
    assert (tmp_path / "bad").read_text() == ".." and failed[bad].startswith("IndexError")
    with pytest.raises(ValueError, match="good failed: IndexError"):
        processes.run_in_processes({good: jobs[good]}, 1, needed=["good"])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_here(threads: int, call: Callable[..., object], *arguments: object) -> object:
        return call(*arguments)

    monkeypatch.setattr(processes, "in_own_process", call_here)


@pytest.mark.slow
def test_models_threads_and_texts_take_turns_and_write_the_same(
    folder: Path, tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = LlamaConfig(vocab_size=97, n_ctx=40, n_layer=2, n_head=4, n_embd=48, n_kv_head=2)
    export(Llama(config), tmp_path)
    words = f"--model {folder} {tmp_path} --threads 1 2 --lengths 9 5 --turns 2 --out {tmp_path}"
    bench.main(words.split())
    printed = capsys.readouterr().out
    assert "1 thread, 1 text" in printed and "2 threads, 8 texts" in printed
    record = tmp_path / "speed.jsonl"
    for model, contenders in ((folder, CONTENDERS), (tmp_path, LLAMAS)):
        rows = report.read_rows(record, {"model": str(model)})
        absent = {row["name"] for row in rows if "absent" in row}
        assert {row["name"] for row in rows} == {*contenders, "floor"}
        assert all(name.startswith(("llama.cpp", "CTranslate2")) for name in absent)
        assert not any(map(report.writes_other_tokens, rows))
        cells = {(row["threads"], row["texts"], row["tokens"]) for row in rows if "texts" in row}
        assert cells == {(t, B, T) for t in (1, 2) for B, T in ((1, 5), (1, 9), (8, 5))}
        assert all(
            len(row["times_as_fast"]["first_ms"]) == 2 for row in rows if "same_tokens" in row
        )
    token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads of keys, their size, bytes
    sizes = {
        row["name"]: row["cache_bytes"]
        for row in report.read_rows(record, {"tokens": 9, "model": str(tmp_path)})
        if "cache_bytes" in row
    }
    assert sizes[LLAMA] == sizes["transformers, DynamicCache"] == (9 + 16) * token
    assert sizes["llama_kv_cache.py, preallocated"] == 41 * token
    before = report.read_rows(record, {})
    bench.main([*words.split(), "--only", "transformers, DynamicCache", "--turns", "1"])
    after = report.read_rows(record, {})
    assert len(after) == len(before) and {row["turns"] for row in after} == {1, 2}


@pytest.mark.slow
def test_an_ablation_by_command(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(f"--ablate --model pocket --lengths 24 --turns 1 --out {tmp_path}".split())
    assert "logits of all positions" in capsys.readouterr().out
    rows = report.read_rows(tmp_path / "ablation.jsonl", {})
    assert {row["name"] for row in rows} == {BASE, "floor", *runners.ABLATIONS}


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        ("--model gpt5", "gpt5"),
        (f"--lengths {N_CTX + 1} --model pocket", f"{N_CTX + 1} {N_CTX}"),
        ("--only nothing", "nothing"),
        ("--model pocket-llama --only CTranslate2", "CTranslate2 llama_kv_cache.py"),
        ("--ablate --only CTranslate2", "--ablate --only"),
        ("--requests 0", "0 1"),
        ("--requests 2 --lengths 3", "--requests --lengths"),
    ],
)
def test_bad_input_gets_one_sentence(words: str, culprits: str) -> None:
    refused(start(f"benchmarks.__main__ {words}"), *culprits.split())
