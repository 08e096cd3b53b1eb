"""`python -m benchmarks`: equal weights give equal tokens in all implementations, and figures are what they say."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import processes, report, runners
from benchmarks.contenders import time_contender
from benchmarks.runners import BASE, CONTENDERS, LLAMA, LLAMAS, Int8, Setup, is_exact
from formats.checkpoints import open_checkpoint
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model
from pocket.checkpoints import export
from support.files import read_json
from tests.helpers import N_CTX, process, refused, start

CONFIG = GPTConfig(vocab_size=300, n_ctx=64, n_layer=2, n_head=4, n_embd=64)
EXACT = [name for name in CONTENDERS if is_exact(name) and "LLMs" not in name]


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
    assert done["tokens"] == plain(folder, prompt(), 21).tolist()
    assert len(done["steps_ms"]) == 20 and min(done["steps_ms"]) > 0 and done["first_ms"] > 0
    token = 2 * CONFIG.n_layer * 2 * CONFIG.n_head * CONFIG.head_dim * 4  # of two texts
    assert done["nbytes"] == token * CACHED.get(name, 12 + 20)


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


@pytest.mark.slow
def test_weights_reach_the_names_of_llms_from_scratch(folder: Path) -> None:
    theirs = pytest.importorskip("llms_from_scratch.kv_cache.gpt2")
    model = theirs.GPTModel(runners.peer_config(folder)).eval()
    runners.load_peer_weights(model, open_checkpoint(str(folder)).tensors())
    ids = prompt()
    with torch.no_grad():
        expected = load_model(str(folder), model_class=GPT)(ids)
        torch.testing.assert_close(model(ids), expected, rtol=1e-3, atol=1e-3)


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
    assert done["tokens"] == plain(folder, prompt(4), left + 1).tolist()


def work(model: GPT) -> tuple[list[str], list[tuple[int, ...]]]:
    """What a pass over a prompt computes, and how weights lie in memory."""
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        model(prompt(1), KVCache(), last_only=True)
    kernels = [f"{event.name} {event.input_shapes}" for event in profile.events()]
    return kernels, [p.stride() for p in model.parameters()]


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


def summary(bandwidths: tuple[float, ...] = (10e6, 10e6, 10.2e6), cpu: float = 1.0) -> dict:
    def turn(first: float, step: float, tokens: list[int]) -> dict:
        return {
            "first_ms": first,
            "steps_ms": [step] * 4,
            "waited": 1 - cpu,
            "tokens": [[1, 1], tokens],
            "nbytes": 100,
        }

    slow = (1.0, 2.0, 1.0)  # the machine in three turns
    found = {
        "floor": [{"bytes_per_ms": b, "products_ms": {"200": 160.0}} for b in bandwidths],
        "gpt_kv_cache.py": [{"2 x 100": turn(200 * s, 100 * s, [1, 2])} for s in slow],
        "other": [{"2 x 100": turn(400 * s, 150 * s, [1, 3])} for s in slow],
    }
    return report.summarize(found, 500e6, 1)


def test_figures_are_medians_ratios_of_the_same_turn_and_shares_of_the_floor() -> None:
    found = summary()
    ours, other = (found["rows"][name]["2 x 100"] for name in ("gpt_kv_cache.py", "other"))
    assert found["roofline_ms"] == 50 and ours["of_roofline"] == 0.5
    assert ours["step_ms"] == 100 and ours["tokens_per_s"] == 20 and ours["decode_ratio"] == 1
    assert other["decode_ratio"] == pytest.approx(100 / 150) and other["first_ratio"] == 0.5
    assert ours["of_products"] == 160 / 200  # of the tokens of both texts
    assert ours["same_tokens"] and not other["same_tokens"]  # in the second text
    turns = {"ratios": [0.5, 1, 2], "first_ratios": [1, 1, 4]}
    spread = report.slowdowns({"x": {"1 x 9": turns}}, [9])
    assert spread == {"x": {"9": {"decode": [1, 0.5, 2], "first": [1, 0.25, 1]}}}
    assert found["waited"] == pytest.approx(0) and found["bandwidth_change"] == pytest.approx(0.02)
    busy, uneven = summary(cpu=0.7), summary((5e6, 10e6, 10e6))
    assert busy["waited"] == pytest.approx(0.3) and uneven["bandwidth_change"] == 0.5
    assert (
        report.is_disturbed(busy) and report.is_disturbed(uneven) and not report.is_disturbed(found)
    )


def grows(path: Path, most: int) -> int:
    """A job that fails when it has run `most` times."""
    n = len(path.read_text()) if path.exists() else 0
    path.write_text("." * (n + 1))
    return [10, 20][:most][n]


@pytest.mark.slow
def test_a_job_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    jobs = {"good": (grows, tmp_path / "good", 2), "bad": (grows, tmp_path / "bad", 1)}
    found, failed = processes.run_in_processes(jobs, 2, 1, needed=["good"])
    assert found == {"good": [10, 20]} and (tmp_path / "bad").read_text() == ".."
    assert failed == {"bad": "IndexError: list index out of range"}
    with pytest.raises(ValueError, match="good failed: IndexError"):
        processes.run_in_processes({"good": jobs["good"]}, 1, 1, needed=["good"])


def command(*words: str) -> str:
    """What `python -m benchmarks` prints."""
    done = process(sys.executable, "-m", "benchmarks", *words)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_one_command_gives_tables_figures_and_a_record(tmp_path: Path) -> None:
    only = ["gpt_baseline.py", "gpt_bounded_cache.py, preallocated"]
    out = tmp_path / "new"
    sizes = "--model pocket --lengths 24 48 --turns 1 --only".split()
    printed = command(*sizes, *only, "--out", str(out))
    names = {"summary.json", "decoding.png", "first_token.png"}
    assert {path.name for path in out.iterdir()} == names
    record = read_json(out / "summary.json")
    assert list(record["rows"]) == [name for name in CONTENDERS if name in (*only, BASE)]
    assert record["different"] == [] and record["absent"] == {}
    ours = record["rows"][BASE]
    assert ours["1 x 48"]["decode_ratio"] == 1
    assert ours["overhead_ms"] > 0
    assert all(name in printed for name in (*only, "Llama 3 70B"))


@pytest.mark.slow
def test_an_ablation_by_command(tmp_path: Path) -> None:
    words = "--ablate --model pocket --lengths 24 --turns 1 --out"
    assert "logits of all positions" in command(*words.split(), str(tmp_path))
    record = read_json(tmp_path / "ablation.json")
    assert set(record["without"]) == {*runners.ABLATIONS} and record["different"] == []
    shares = record["first_token"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["products with weights"] > 0 < shares["attention"]


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        ("--model gpt5", "gpt5"),
        (f"--lengths {N_CTX + 1} --model pocket", f"{N_CTX + 1} {N_CTX}"),
        ("--only nothing", "nothing"),
        ("--model pocket-llama --only CTranslate2", "CTranslate2 pocket-llama"),
        ("--peer-path nowhere", "nowhere folder"),
        ("--ablate --only CTranslate2", "--ablate --only"),
        ("--requests 0", "0 1"),
        ("--requests 2 --lengths 3", "--requests --lengths"),
    ],
)
def test_bad_input_gets_one_sentence(words: str, culprits: str) -> None:
    refused(start(f"benchmarks.__main__ {words}"), *culprits.split())


@pytest.mark.slow
def test_todays_models_take_turns_and_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def here(threads: int, call: Callable[..., object], *arguments: object) -> object:
        return call(*arguments)

    monkeypatch.setattr(processes, "in_own_process", here)
    config = LlamaConfig(vocab_size=97, n_ctx=40, n_layer=2, n_head=4, n_embd=48, n_kv_head=2)
    export(Llama(config), tmp_path)
    words = ["--model", str(tmp_path), "--out", str(tmp_path), *"--lengths 5 9 --turns 2".split()]
    bench.main(words)
    assert len([*tmp_path.glob("llama_*.png")]) == 2
    record = read_json(tmp_path / "llama.json")
    absent = record["absent"]  # where llama.cpp isn't installed; Q8_0 needs a width of 32s
    assert {*record["rows"], *absent} == {*LLAMAS} and record["different"] == []
    assert all(name.startswith("llama.cpp") for name in absent)
    bytes_of = {name: row["1 x 9"]["cache_bytes"] for name, row in record["rows"].items()}
    token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads of keys, their size, bytes
    assert bytes_of[LLAMA] == bytes_of["transformers, DynamicCache"] == (9 + 16) * token
    assert bytes_of["llama_kv_cache.py, preallocated"] == 41 * token
    assert len(record["rows"][LLAMA]["8 x 5"]["ratios"]) == 2
