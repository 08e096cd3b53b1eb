"""`python -m benchmarks`: equal weights give equal tokens in all implementations, and figures are what they say."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import contenders, measuring
from benchmarks.contenders import BASE, CONTENDERS, LLAMA, LLAMAS, ONE_BY_ONE, PAGED, WITHOUT, Setup
from benchmarks.measuring import draw_requests, having, read_rows
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_model
from pocket.checkpoints import export

CONFIG = GPTConfig(vocab_size=300, n_ctx=64, n_layer=2, n_head=4, n_embd=64)
TOKEN = 2 * CONFIG.n_layer * CONFIG.n_embd * 4  # bytes of a token's keys and values
SLOTS = {  # slots of caches for CONFIG.n_ctx tokens, if there aren't as many
    "gpt_baseline.py": 0,
    "gpt_bounded_cache.py, preallocated": 65,
    "gpt_bounded_cache.py, constant shapes": 65,
    "llama_kv_cache.py, preallocated": 65,
}
OURS = [name for name in CONTENDERS if name.startswith("gpt_") and contenders.is_exact(name)]


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


@pytest.fixture(scope="module")
@torch.no_grad()
def expected(folder: Path) -> list[list[int]]:
    """What all write after prompt(), up to the end of the context."""
    model = load_model(str(folder), model_class=GPT)
    return torch.cat([*generate(model, prompt(), CONFIG.n_ctx - 11, cache=KVCache())], 1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", [*OURS, *WITHOUT])
def test_equal_weights_give_equal_tokens_up_to_the_context(
    name: str, folder: Path, expected: list[list[int]]
) -> None:
    runner = (CONTENDERS | WITHOUT)[name](Setup(folder))
    done = measuring.time_contender(runner, prompt(), CONFIG.n_ctx - 12)
    assert done["written"] == expected
    assert done["cache_bytes"] == 2 * TOKEN * SLOTS.get(name, CONFIG.n_ctx)


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


def test_each_ablation_changes_the_work(folder: Path) -> None:
    works = set()
    for make in (contenders.Ours, *WITHOUT.values()):
        tokens = make(Setup(folder)).start(prompt())
        works.add("\n".join(work(lambda tokens=tokens: next(tokens))))
    assert len(works) == 1 + len(WITHOUT)


@torch.no_grad()
def test_int8_is_near(folder: Path) -> None:
    expected = load_model(str(folder), model_class=GPT)(prompt(4, 40))
    logits = contenders.Int8(Setup(folder)).model(prompt(4, 40))
    error = (logits - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1  # quantised, and near; a processor without VNNI has one bit less


@torch.no_grad()
def test_servers_write_the_same_and_count_their_bytes(folder: Path) -> None:
    prompts, limits = draw_requests(5, CONFIG.vocab_size, CONFIG.n_ctx)
    assert prompts[:2] == draw_requests(2, CONFIG.vocab_size, CONFIG.n_ctx)[0]
    alone, paged = (
        measuring.measure_server(name, Setup(folder), {5: (prompts, limits)})[5]
        for name in (ONE_BY_ONE, PAGED)
    )
    assert paged["written"] == alone["written"]
    assert paged["tokens_per_s"] == sum(limits) / paged["seconds"]
    lengths = [len(ids) + n - 1 for ids, n in zip(prompts, limits, strict=True)]
    assert alone["held"] == max(lengths) * TOKEN and alone["wasted"] == 0
    block = contenders.BLOCK_TOKENS * TOKEN
    assert paged["held"] % block == 0 and 0 <= paged["wasted"] < 5 * block
    assert paged["held"] - paged["wasted"] <= sum(lengths) * TOKEN


# --- Turns and rows ---------------------------------------------------------------------------------


def test_figures_are_medians_ratios_of_the_same_turn_and_limits() -> None:
    def turns(step: float, token: int) -> list[dict]:
        """Those of a machine that is now fast, now slow."""
        return [
            {"tokens_per_s": 2e3 / ms, "first_ms": 2 * ms, "waited": 0.3, "written": [[1], [token]]}
            for ms in (step, 3 * step, 2 * step)
        ]

    base = turns(100, 2)
    limits = [{"tokens_per_s": 40, "gb_per_s": speed} for speed in (10, 10, 10.2)]
    rows = [
        {"name": name, "threads": 1} | measuring.figures_of_turns(own_turns, base)
        for name, own_turns in {BASE: base, "x": turns(150, 3), "floor": limits}.items()
    ]
    ours, other, floor = measuring.compare_with_limits(rows)
    assert ours["tokens_per_s"] == 10 and other["first_ms"] == 600
    for figure in ("tokens_per_s", "first_ms"):
        assert other["times_as_fast"][figure] == pytest.approx([100 / 150] * 3)
    assert not measuring.writes_other_tokens(ours) and measuring.writes_other_tokens(other)
    assert floor["bandwidth_change"] == pytest.approx(0.02)
    assert floor["waited"] == pytest.approx(0.3) and measuring.is_disturbed(floor)
    assert not measuring.is_disturbed(floor | {"threads": 2})  # which wait for each other
    assert not measuring.is_disturbed(floor | {"waited": 0.0})
    assert measuring.is_disturbed(floor | {"waited": 0.0, "bandwidth_change": 0.5})


def fixed_figures() -> dict[str, dict]:
    return {"cell": {"tokens_per_s": 1, "gb_per_s": 1}}


def fails(path: Path) -> None:
    with path.open("a") as file:
        file.write(".")
    raise ValueError  # without a word


@pytest.mark.slow
def test_a_job_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    ours, bad = (fixed_figures,), (fails, tmp_path / "runs")
    rows = measuring.run_in_turns({"ours": ours, "bad": bad, "limits": ours}, [1], 2)
    (row,) = having(rows, name="bad")
    assert row["absent"] == "" and (tmp_path / "runs").read_text() == "."
    for jobs in ({"bad": bad, "limits": ours}, {"ours": ours, "bad": bad}):
        with pytest.raises(ValueError, match="bad failed: "):
            measuring.run_in_turns(jobs, [1], 1)


machine_limits = cache(measuring.machine_limits)  # which takes seconds


@pytest.fixture
def ran(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[str], str]:
    """A run of the command in one process, with records in a new folder of tmp_path, which holds a Llama; what it prints."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(measuring, "in_own_process", lambda _, call, *given: call(*given))
    monkeypatch.setattr(measuring, "machine_limits", machine_limits)
    config = LlamaConfig(vocab_size=97, n_ctx=64, n_layer=2, n_head=4, n_embd=48, n_kv_head=2)
    export(Llama(config), tmp_path)

    def run(words: str) -> str:
        bench.main(f"{words} --out {tmp_path / 'new'}".replace("FOLDER", str(folder)).split())
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_models_threads_and_texts_take_turns_and_write_the_same(
    ran: Callable[[str], str], folder: Path, tmp_path: Path
) -> None:
    assert "1 thread:" in ran(f"--model FOLDER {tmp_path} --threads 1 --lengths 48 5 --turns 1")
    path = tmp_path / "new" / "speed.jsonl"
    before = read_rows(path)
    llama_token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads of keys, their size, bytes
    for model, names, token in (
        (folder, CONTENDERS, TOKEN),
        (tmp_path, LLAMAS, llama_token),
    ):
        rows = having(before, model=str(model))
        assert {row["name"] for row in rows} == {*names, "floor"}
        absent = [row["name"] for row in rows if "absent" in row]
        assert all(name.startswith(("llama.cpp", "CTranslate2")) for name in absent)
        assert not any(map(measuring.writes_other_tokens, rows))
        cells = {(row["texts"], row["tokens"]) for row in rows if "texts" in row}
        assert cells == {(1, 5), (1, 48), (8, 5)}
        for row in having(rows, tokens=48, same_tokens=True):
            if contenders.is_exact(name := row["name"]):
                assert row["cache_bytes"] == token * SLOTS.get(name, 48 + 16), name
    ran(f"--model {tmp_path} --threads 1 2 --lengths 48 --turns 2 --only {LLAMA}")
    rows = having(read_rows(path), name=LLAMA)
    turns = {(row["threads"], row["texts"], row["tokens"]): row["turns"] for row in rows}
    fresh = {(threads, texts, 48): 2 for threads in (1, 2) for texts in (1, 8)}
    assert turns == {(1, 1, 5): 1, (1, 8, 5): 1} | fresh


@pytest.mark.slow
def test_ablations_and_requests_by_command(ran: Callable[[str], str], tmp_path: Path) -> None:
    assert "logits of all positions" in ran("--ablate --model FOLDER --lengths 24 --turns 1")
    rows = read_rows(tmp_path / "new" / "ablation.jsonl")
    assert {row["name"] for row in rows} == {BASE, "floor", *WITHOUT}
    assert "3 requests" in ran("--model FOLDER --requests 1 3 --turns 1")
    rows = read_rows(tmp_path / "new" / "requests.jsonl")
    assert {row["texts"] for row in rows} == {1, 3}
    assert not any(map(measuring.writes_other_tokens, rows))
    (bound,) = having(rows, name="bound", texts=3)
    (padded,) = having(rows, name="transformers, padded generate", texts=3)
    held = 3 * (max(bound["prompts"]) + max(bound["new"]) - 1) * TOKEN
    wasted = held - (sum(bound["prompts"]) + sum(bound["new"]) - 3) * TOKEN
    assert (padded["held"], padded["wasted"]) == (held, wasted) and padded["of_bound"] < 1
