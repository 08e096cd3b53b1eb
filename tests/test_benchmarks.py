"""`python -m benchmarks`: equal weights give equal tokens in all implementations, and figures are what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import contenders, measuring
from benchmarks.contenders import (
    BASE,
    BLOCK_TOKENS,
    CONTENDERS,
    LLAMA,
    LLAMAS,
    ONE_BY_ONE,
    PAGED,
    SERVERS,
    Int8,
    Setup,
    is_exact,
)
from benchmarks.measuring import draw_requests, having, measure_server, read_rows, time_contender
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model
from pocket.checkpoints import export
from tests.helpers import N_CTX, refused, start

CONFIG = GPTConfig(vocab_size=300, n_ctx=64, n_layer=2, n_head=4, n_embd=64)
TOKEN = 2 * CONFIG.n_layer * CONFIG.n_embd * 4  # bytes of a token's keys and values


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


def prompt(B: int = 2, T: int = 12) -> torch.Tensor:
    return torch.randint(300, (B, T), generator=torch.Generator().manual_seed(0))


CACHED = {  # tokens whose keys and values are held, if not those of the text
    "gpt_baseline.py": 0,
    "gpt_bounded_cache.py, preallocated": 65,
    "gpt_bounded_cache.py, constant shapes": 65,
    "transformers, StaticCache": 64,
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*map(of_all_speeds, filter(is_exact, CONTENDERS))])
def test_equal_weights_give_equal_tokens_up_to_the_context(name: str, folder: Path) -> None:
    if not name.startswith("gpt_"):
        pytest.importorskip(name.partition(",")[0].lower())
    model, n_new = load_model(str(folder), model_class=GPT), CONFIG.n_ctx - 12
    done = time_contender(CONTENDERS[name](Setup(folder)), prompt(), n_new)
    expected = torch.cat([*generate(model, prompt(), n_new + 1, cache=KVCache())], 1)
    assert done["written"] == expected.tolist()
    assert done["cache_bytes"] == 2 * TOKEN * CACHED.get(name, CONFIG.n_ctx)


def test_steps_of_constant_shapes_are_the_same_work_and_wait_for_nothing(folder: Path) -> None:
    """So a GPU can capture one of them and replay it."""
    tokens = CONTENDERS["gpt_bounded_cache.py, constant shapes"](Setup(folder)).start(prompt())
    next(tokens)
    steps = [work(lambda: next(tokens)) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]
    assert not any(name.startswith(("aten::item", "aten::nonzero")) for name in steps[0])


def work(call: Callable[[], object]) -> list[str]:
    """What a call computes."""
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        call()
    return [f"{event.name} {event.input_shapes}" for event in profile.events()]


@torch.no_grad()
@pytest.mark.parametrize("name", contenders.WITHOUT)
def test_an_ablation_changes_the_work_and_no_result(name: str, folder: Path) -> None:
    models = [make(Setup(folder)).model for make in (contenders.Ours, contenders.WITHOUT[name])]
    torch.testing.assert_close(*(model(prompt()) for model in models), rtol=1e-4, atol=1e-4)
    before, after = (work(lambda m=m: m(prompt(1), KVCache(), last_only=True)) for m in models)
    assert before != after


@torch.no_grad()
def test_int8_is_near(folder: Path) -> None:
    expected = load_model(str(folder), model_class=GPT)(prompt(4, 40))
    error = (Int8(Setup(folder)).model(prompt(4, 40)) - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1  # quantised, and near; a processor without VNNI has one bit less


@torch.no_grad()
@pytest.mark.parametrize("name", [*map(of_all_speeds, SERVERS)])
def test_servers_write_the_same_and_count_their_bytes(name: str, folder: Path) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    prompts, limits = draw_requests(5, CONFIG.vocab_size, CONFIG.n_ctx)
    assert prompts[:2] == draw_requests(2, CONFIG.vocab_size, CONFIG.n_ctx)[0]
    expected, found = (
        measure_server(way, Setup(folder), {5: (prompts, limits)})[5] for way in (ONE_BY_ONE, name)
    )
    assert found["written"] == expected["written"] and [*map(len, found["written"])] == limits
    assert found["tokens_per_s"] == sum(limits) / found["seconds"]
    lengths = [len(ids) + n - 1 for ids, n in zip(prompts, limits, strict=True)]
    held, wasted = found["held"], found["wasted"]
    if name == ONE_BY_ONE:
        assert held == max(lengths) * TOKEN and wasted == 0
    elif name == PAGED:
        assert held % (BLOCK_TOKENS * TOKEN) == 0 and 0 <= wasted < 5 * BLOCK_TOKENS * TOKEN
        assert held - wasted <= sum(lengths) * TOKEN
    elif "padded" in name:
        longest = max(map(len, prompts)) + max(limits) - 1
        assert held == 5 * longest * TOKEN and wasted == held - sum(lengths) * TOKEN


# --- Turns and rows ---------------------------------------------------------------------------------


def test_figures_are_medians_ratios_of_the_same_turn_and_limits() -> None:
    def turns(step: float, token: int) -> list[dict]:
        slow = (1.0, 3.0, 2.0)  # the machine in three turns
        rows = [{"tokens_per_s": 2e3 / (step * s), "first_ms": 2 * step * s} for s in slow]
        return [row | {"waited": 0.3, "written": [[1, 1], [1, token]]} for row in rows]

    base = turns(100, 2)
    ours, other = (measuring.figures_of_turns(own, base) for own in (base, turns(150, 3)))
    assert ours["tokens_per_s"] == 10 and ours["times_as_fast"]["tokens_per_s"] == [1, 1, 1]
    assert other["times_as_fast"]["tokens_per_s"] == pytest.approx([100 / 150] * 3)
    assert other["times_as_fast"]["first_ms"] == pytest.approx([100 / 150] * 3)
    assert other["first_ms"] == 600 and ours["same_tokens"] and not other["same_tokens"]
    limits = [{"tokens_per_s": 40, "gb_per_s": speed} for speed in (10, 10, 10.2)]
    rows = [ours, other, measuring.figures_of_turns(limits, base)]
    rows = [{"name": n, "threads": 1} | r for n, r in zip((BASE, "x", "floor"), rows, strict=True)]
    _, other, floor = measuring.compare_with_limits(rows)
    assert measuring.writes_other_tokens(other) and "times_as_fast" not in floor
    assert floor["gb_per_s"] == 10 and floor["bandwidth_change"] == pytest.approx(0.02)
    assert floor["waited"] == pytest.approx(0.3) and measuring.is_disturbed(floor)
    assert not measuring.is_disturbed(floor | {"waited": 0.0})
    assert not measuring.is_disturbed(floor | {"threads": 2})  # which wait for each other
    assert measuring.is_disturbed(floor | {"waited": 0.0, "bandwidth_change": 0.5})


def fails_next_time(path: Path) -> dict:
    path.write_text(path.read_text() + "." if path.exists() else ".")
    return {"cell": {"tokens_per_s": 1.0, "written": [], "runs": [0][len(path.read_text()) - 1]}}


@pytest.mark.slow
def test_a_job_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    jobs = {"bad": (fails_next_time, tmp_path / "runs")}
    (row,) = measuring.run_in_turns(jobs, [1], 3, needed=[])
    assert row["absent"].startswith("IndexError") and (tmp_path / "runs").read_text() == ".."
    with pytest.raises(ValueError, match="bad failed: IndexError"):
        measuring.run_in_turns(jobs, [1], 1, needed=["bad"])


@pytest.fixture
def ran(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[str], str]:
    """A run of the command in one process, with records in tmp_path, which holds a Llama; what it prints."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(measuring, "in_own_process", lambda _, call, *given: call(*given))
    config = LlamaConfig(vocab_size=97, n_ctx=40, n_layer=2, n_head=4, n_embd=48, n_kv_head=2)
    export(Llama(config), tmp_path)

    def run(words: str) -> str:
        bench.main(f"{words} --out {tmp_path}".replace("FOLDER", str(folder)).split())
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_models_threads_and_texts_take_turns_and_write_the_same(
    ran: Callable[[str], str], folder: Path, tmp_path: Path
) -> None:
    words = f"--model FOLDER {tmp_path} --threads 1 2 --lengths 9 5 --turns 2"
    printed = ran(words)
    assert "1 thread, 1 text" in printed and "2 threads, 8 texts" in printed
    before = read_rows(tmp_path / "speed.jsonl")
    for model, names in ((folder, CONTENDERS), (tmp_path, LLAMAS)):
        rows = having(before, model=str(model))
        assert {row["name"] for row in rows} == {*names, "floor"}
        absent = [row["name"] for row in rows if "absent" in row]
        assert all(name.startswith(("llama.cpp", "CTranslate2")) for name in absent)
        assert not any(map(measuring.writes_other_tokens, rows))
        cells = {(row["threads"], row["texts"], row["tokens"]) for row in rows if "texts" in row}
        assert cells == {(t, B, T) for t in (1, 2) for B, T in ((1, 5), (1, 9), (8, 5))}
        ratios = [row["times_as_fast"]["first_ms"] for row in rows if "same_tokens" in row]
        assert {*map(len, ratios)} == {2}
    token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads of keys, their size, bytes
    rows = having(before, tokens=9, model=str(tmp_path), threads=1)
    sizes = {row["name"]: row.get("cache_bytes") for row in rows}
    assert sizes[LLAMA] == sizes["transformers, DynamicCache"] == (9 + 16) * token
    assert sizes["llama_kv_cache.py, preallocated"] == 41 * token
    ran(f"--model {tmp_path} --threads 1 --lengths 9 5 --turns 1 --only {LLAMA}")
    after = read_rows(tmp_path / "speed.jsonl")
    assert len(after) == len(before) and {row["turns"] for row in after} == {1, 2}


@pytest.mark.slow
def test_ablations_and_requests_by_command(ran: Callable[[str], str], tmp_path: Path) -> None:
    assert "logits of all positions" in ran("--ablate --model FOLDER --lengths 24 --turns 1")
    rows = read_rows(tmp_path / "ablation.jsonl")
    assert {row["name"] for row in rows} == {BASE, "floor", *contenders.WITHOUT}
    for words in ("1 3 --turns 1", "3 --turns 2"):
        assert "3 requests" in ran(f"--model FOLDER --requests {words}")
    rows = read_rows(tmp_path / "requests.jsonl")
    assert {(row["texts"], row["turns"]) for row in rows} == {(1, 1), (3, 2)}
    assert not any(map(measuring.writes_other_tokens, rows))
    (bound,) = having(rows, name="bound", texts=3)
    prompts, limits = draw_requests(3, CONFIG.vocab_size, CONFIG.n_ctx)
    assert bound["prompts"] == [*map(len, prompts)] and bound["new"] == limits
    assert bound["seconds"] > bound["step_ms"] / 1e3 * (max(limits) - 1)
    assert having(rows, name=PAGED, texts=3)[0]["of_bound"] < 1


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
