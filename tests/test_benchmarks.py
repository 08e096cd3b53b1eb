"""`python -m benchmarks`: equal weights give equal tokens in all implementations, and figures are what they say."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as bench
from benchmarks import contenders, llama, pages, report, runners, scale
from benchmarks.contenders import CONTENDERS, Clock, Int8, timed
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from llama_kv_cache import LlamaConfig
from load_gpt2_weights import load_model, read_tensors
from pocket.checkpoints import export
from support.files import read_json
from tests.helpers import N_CTX

ROOT = Path(__file__).resolve().parent.parent
CONFIG = GPTConfig(vocab_size=300, n_ctx=64, n_layer=2, n_head=4, n_embd=64)
EXACT = [c for c in CONTENDERS if c.exact and not c.file]


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


def plain(folder: Path, ids: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat(
        list(generate(load_model(str(folder), model_class=GPT), ids, n, cache=KVCache())), 1
    )


@pytest.mark.parametrize(
    "contender",
    [pytest.param(c, id=c.name, marks=[] if "gpt_" in c.name else pytest.mark.slow) for c in EXACT],
)
def test_equal_weights_give_equal_tokens(contender: contenders.Contender, folder: Path) -> None:
    if why := bench.available(contender, "cpu", None):
        pytest.skip(why)
    runner = contender.make(folder, "cpu", None)
    with torch.no_grad():
        done = timed(runner, Clock("cpu"), prompt(), 20)
        assert done["tokens"] == plain(folder, prompt(), 21).tolist()
        assert len(done["steps_ms"]) == 20 and min(done["steps_ms"]) > 0 and done["first_ms"] > 0
        again = runner.resume(prompt(1), 10)
        if again is not None:
            for _ in range(2):  # on a copy: the second time finds what the first found
                assert int(again()) == int(plain(folder, prompt(1), 1))


CACHED = {  # tokens whose keys and values are held, after 12 and 6 more
    "gpt_baseline.py": 0,
    "gpt_kv_cache.py": 12 + 6,
    "gpt_bounded_cache.py, preallocated": 65,
    "gpt_bounded_cache.py, window of 256": 65,
    "transformers, DynamicCache": 12 + 6,
    "transformers, StaticCache": 64,
}


@torch.no_grad()
@pytest.mark.parametrize("name", CACHED)
def test_bytes_are_those_of_the_formula(name: str, folder: Path) -> None:
    contender = next(c for c in CONTENDERS if c.name == name)
    if why := bench.available(contender, "cpu", None):
        pytest.skip(why)
    token = 2 * CONFIG.n_layer * 2 * CONFIG.n_head * CONFIG.head_dim * 4  # of two texts
    done = timed(contender.make(folder, "cpu", None), Clock("cpu"), prompt(), 6)
    assert done["nbytes"] == token * CACHED[name]


@pytest.mark.slow
def test_weights_reach_the_names_of_llms_from_scratch(folder: Path) -> None:
    theirs = pytest.importorskip("llms_from_scratch.kv_cache.gpt2")
    model = theirs.GPTModel(runners.sizes(folder)).eval()
    runners.fill(model, read_tensors(str(folder)))
    ids = prompt()
    with torch.no_grad():
        expected = load_model(str(folder), model_class=GPT)(ids)
        torch.testing.assert_close(model(ids), expected, rtol=1e-3, atol=1e-3)


def test_int8_is_near(folder: Path) -> None:
    exact, runner = load_model(str(folder), model_class=GPT), Int8(folder, "cpu")
    ids = prompt(4, 40)
    with torch.no_grad():
        expected, got = exact(ids), runner.model(ids)
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1  # quantised, and near; a processor without VNNI has one bit less
    assert type(runner.model.h[0].attn.c_attn).__module__.startswith("torch.ao")


def ctranslate2(folder: Path) -> runners.CTranslate2:
    for package in ("ctranslate2", "transformers"):
        pytest.importorskip(package)
    return runners.CTranslate2(folder, "cpu")


@pytest.mark.slow
def test_ctranslate2_writes_the_same_up_to_the_context(folder: Path) -> None:
    runner, ids = ctranslate2(folder), prompt(4)
    done = timed(runner, Clock("cpu"), ids, CONFIG.n_ctx - 12)  # as many as it has positions for
    assert done["tokens"] == plain(folder, ids, CONFIG.n_ctx - 11).tolist()
    token = 2 * CONFIG.n_layer * CONFIG.n_head * CONFIG.head_dim * 4
    assert done["nbytes"] == 4 * CONFIG.n_ctx * token


@pytest.mark.slow
def test_no_token_ends_ctranslate2(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    with torch.no_grad():
        # it writes nothing but the token that is named as the end
        model.ln_f.bias.copy_(1e4 * model.wte.weight[0])
    export(model, tmp_path)
    done = timed(ctranslate2(tmp_path), Clock("cpu"), prompt(), 9)
    assert done["tokens"] == [[0] * 10] * 2


def test_where_others_are_ahead_is_computed() -> None:
    def row(decode: float, first: float) -> dict:
        return {
            "1 x 9": {"decode_ratio": decode, "first_ratio": first},
            "2 x 9": {"decode_ratio": 0.5 * decode, "first_ratio": 0.5 * first},
        }

    rows = {
        bench.BASE: row(1, 1) | {"2 x 9": {"decode_ratio": 1, "first_ratio": 1}},
        "gpt_bounded_cache.py, window of 256": row(9, 9),
    }
    assert report.ahead(rows | {"CTranslate2": row(1.004, 0.9)}) == []
    rows |= {
        "CTranslate2": row(1.1, 3),
        "CTranslate2, int8": row(3, 1),
    }  # of int8, where ours has run
    assert report.ahead(rows) == [
        "CTranslate2 is ahead of gpt_kv_cache.py: decoding 1 x 9 (1.10), first token 1 x 9 (3.00), "
        "first token 2 x 9 (1.50)"
    ]
    rows["gpt_kv_cache.py, int8"] = row(2, 2)
    line = "CTranslate2, int8 is ahead of gpt_kv_cache.py, int8: decoding 1 x 9 (1.50), decoding 2 x 9 (1.50)"
    assert report.ahead(rows)[1:] == [line]


def test_runners_are_what_their_names_say(folder: Path) -> None:
    made = {c.name: c.make(folder, "cpu", None) for c in CONTENDERS if c.name.startswith("gpt_")}
    half = {p.dtype for p in made["gpt_kv_cache.py, bfloat16"].model.parameters()}
    assert half == {torch.bfloat16}
    assert made["gpt_bounded_cache.py, window of 256"].new_cache(1024).window == 256
    assert made["gpt_bounded_cache.py, BCT, 24 slots"].model.config.slots == 24


@pytest.mark.slow
def test_what_an_ablation_undoes_changes_the_time_only(folder: Path) -> None:
    with torch.no_grad():
        for name, undo in runners.ablations().items():
            model = load_model(str(folder), model_class=GPT)
            before = model(prompt())
            undo(model)
            torch.testing.assert_close(model(prompt()), before, rtol=1e-4, atol=1e-4, msg=name)
    layout = load_model(str(folder), model_class=GPT)
    stride = layout.h[0].attn.c_attn.weight.stride()
    runners.ablations()["weights stored (out, in), as nn.Linear does"](layout)
    assert layout.h[0].attn.c_attn.weight.stride() == (1, 64) != stride
    assert layout.wte.weight.stride() == (1, 300)
    runners.ablations()["the head's weights row by row"](layout)
    assert layout.wte.weight.stride() == (64, 1)


CHANGED = {
    "logits of all positions": "head",
    "softmax(q k) v written out": "aten::softmax",
    "q, k and v by a product each": "aten::addmm",
}


@pytest.mark.parametrize(("name", "changed"), CHANGED.items())
def test_what_an_ablation_undoes_is_undone(name: str, changed: str, folder: Path) -> None:
    def calls(model: GPT) -> dict[str, int]:
        with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
            model(prompt(1), KVCache(), last_only=True)
        found = {e.key: e.count for e in profile.key_averages()}
        rows = [
            e.input_shapes[0][0]
            for e in profile.key_averages(group_by_input_shape=True)
            if e.key == "aten::mm" and e.input_shapes[1][-1] == 300
        ]
        return {key: found.get(key, 0) for key in ("aten::softmax", "aten::addmm")} | {
            "head": max(rows)
        }

    model = load_model(str(folder), model_class=GPT)
    before = calls(model)
    runners.ablations()[name](model)
    after = calls(model)
    assert after[changed] > before[changed]
    assert {k: v for k, v in after.items() if k != changed} == {
        k: v for k, v in before.items() if k != changed
    }


def raw(bandwidths: tuple[float, ...] = (10e6, 10e6, 10.2e6), cpu: float = 1.0) -> dict:
    def turn(first: float, step: float, tokens: list[int]) -> dict:
        return {
            "first_ms": first,
            "first_cpu_ms": cpu * first,
            "steps_ms": [step] * 4,
            "steps_cpu_ms": [cpu * step] * 4,
            "tokens": [[1, 1], tokens],
            "nbytes": 100,
        }

    slow = (1.0, 2.0, 1.0)  # the machine in three turns
    return {
        "geometry": {"weights": 500e6},
        "reuse_lengths": [100, 90],
        "floor": [{"bytes_per_ms": b, "products_ms": {"200": 160.0}} for b in bandwidths],
        "timed_cpu": True,
        "contenders": {
            "gpt_kv_cache.py": {"2 x 100": [turn(200 * s, 100 * s, [1, 2]) for s in slow]},
            "other": {"2 x 100": [turn(400 * s, 150 * s, [1, 3]) for s in slow]},
        },
        "reuse": {"gpt_kv_cache.py": [30.0, 60.0, 31.0], "other": []},
        "overheads": {"other": 0.7},
    }


def test_figures_are_medians_ratios_of_the_same_turn_and_shares_of_the_floor() -> None:
    found = report.summary(raw())
    ours, other = (found["rows"][name]["2 x 100"] for name in ("gpt_kv_cache.py", "other"))
    assert found["roofline_ms"] == 50 and ours["of_roofline"] == 0.5
    assert ours["step_ms"] == 100 and ours["tokens_per_s"] == 20 and ours["decode_ratio"] == 1
    assert other["decode_ratio"] == pytest.approx(100 / 150) and other["first_ratio"] == 0.5
    assert ours["of_products"] == 160 / 200  # of the tokens of both texts
    assert ours["same_tokens"] and not other["same_tokens"]  # in the second text
    turns = {"ratios": [0.5, 1, 2], "first_ratios": [1, 1, 4]}
    spread = report.ablation({"x": {"1 x 9": turns}}, [9])
    assert spread == {"x": {"9": {"decode": [1, 0.5, 2], "first": [1, 0.25, 1]}}}
    assert found["rows"]["gpt_kv_cache.py"]["reuse_ms"] == 31
    assert found["rows"]["other"]["overhead_ms"] == 0.7
    assert found["waited"] == pytest.approx(0) and found["bandwidth_change"] == pytest.approx(0.02)
    assert report.summary(raw(cpu=0.7))["waited"] == pytest.approx(0.3)
    assert report.summary(raw((5e6, 10e6, 10e6)))["bandwidth_change"] == 0.5
    found = [
        report.disturbed(report.summary(r)) for r in (raw(), raw(cpu=0.7), raw((5e6, 10e6, 10e6)))
    ]
    assert found == [False, True, True]


@pytest.mark.slow
def test_a_contender_that_fails_is_left_out_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = bench.BASE, "nobody"
    found = bench.measure(folder, [good, bad], [(1, 12), (2, 6)], 1, "cpu", 1, None)
    assert list(found["failed"]) == [bad] and "nobody failed: " in found["failed"][bad]
    assert list(found["contenders"]) == [good] and len(found["contenders"][good]["1 x 12"]) == 1
    assert (
        set(found["floor"][0]["products_ms"]) == {"12"} and found["floor"][0]["bytes_per_ms"] > 1e5
    )


def test_floors_are_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticks(Clock):  # a millisecond a call, however long it takes
        def __call__(self, call: object) -> tuple[float, float, object]:
            return 1.0, 1.0, call()

    geometry = {"n_layer": 7, "n_embd": 8, "n_inner": 32, "attention": 8, "vocab_size": 20}
    assert contenders.floors(Ticks("cpu"), "cpu", geometry, [3])["products_ms"] == {
        "3": 7 * 1.0 + 1.0
    }


def test_bounds_at_scale() -> None:
    shape = scale.Shape(
        "small",
        layers=2,
        width=8,
        kv_heads=2,
        head_dim=4,
        parameters=100,
        tables=20,
        unread=5,
        n_ctx=64,
    )
    assert shape.token_bytes == 2 * 2 * 2 * 4 * 2
    assert scale.decode_s(shape, 10.0, tokens=5, batch=3) == (190 + 3 * 5 * 64) / 10
    assert scale.prefill_s(shape, 10.0, tokens=5) == (2 * 80 * 5 + 2 * 25 * 8 * 2) / 10
    big = next(s for s in scale.SHAPES if "70B" in s.name)
    assert big.token_bytes == 327_680  # 2 x 80 layers x 8 heads x 128 x 2 bytes


def test_no_measured_time_is_under_its_lower_bound() -> None:
    for name in ("1-thread", "1-thread-amd"):
        _, checks, said, _ = scale.note(pages.newest(f"*-{name}/summary.json"))
        for row in checks.rows:
            assert 0.1 < float(row[4]) <= 1 and 0.1 < float(row[7]) <= 1
        assert said == "No time is under its bound."


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_one_command_gives_tables_figures_and_a_record(tmp_path: Path) -> None:
    only = ["gpt_baseline.py", "gpt_bounded_cache.py, preallocated"]
    if importlib.util.find_spec("transformers"):
        only.append("transformers, DynamicCache")
    sizes = "--model pocket --lengths 24 48 --batches 1 2 --turns 1 --only".split()
    result = command(*sizes, *only, "--out", str(tmp_path / "new"))
    assert result.returncode == 0, result.stderr
    names = {"summary.json", "decoding.png", "first_token.png"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    record = read_json(tmp_path / "new" / "summary.json")
    assert list(record["rows"]) == [c.name for c in CONTENDERS if c.name in (*only, bench.BASE)]
    assert record["different"] == [] and record["absent"] == {}
    ours = record["rows"][bench.BASE]
    assert (
        ours["1 x 48"]["decode_ratio"] == 1
        and 0 < ours["overhead_ms"] < 5 * ours["1 x 48"]["step_ms"]
    )
    assert all(name in result.stdout for name in only)
    note = command("--scale", str(tmp_path / "new" / "summary.json"))
    assert note.returncode == 0 and "Llama 3 70B" in note.stdout


@pytest.mark.slow
def test_an_ablation_by_command(tmp_path: Path) -> None:
    result = command(
        "--ablate", "--model", "pocket", "--lengths", "24", "--turns", "1", "--out", str(tmp_path)
    )
    assert result.returncode == 0 and "logits of all positions" in result.stdout
    record = json.loads((tmp_path / "ablation.json").read_text())
    assert set(record["without"]) == {*runners.ablations()} and record["different"] == []
    assert sum(record["first_token"].values()) == pytest.approx(1)
    assert (
        next(iter(record["first_token"])) == "products with weights"
        and record["first_token"]["attention"] > 0.01
    )


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["--model", "gpt5"], ["gpt5"]),
        (["--lengths", f"{N_CTX + 1}", "--model", "pocket"], [f"{N_CTX + 1}", f"{N_CTX}"]),
        (["--only", "nothing"], ["nothing"]),
        (["--scale", "pocket/teacher/figures.json"], ["figures.json", "geometry"]),
        (["--peer-path", "nowhere"], ["nowhere", "folder"]),
        (["--ablate", "--only", "CTranslate2"], ["--ablate", "--only"]),
        (["--requests", "0"], ["0", "1"]),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str], culprits: list[str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and len(printed.strip().splitlines()) == 1
    assert all(culprit in printed for culprit in culprits), printed


def test_todays_models_take_turns_and_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(llama, "DECODED", 4)
    config = LlamaConfig(vocab_size=97, n_ctx=40, n_layer=2, n_head=4, n_embd=48, n_kv_head=2)
    *_, record = llama.measure(config, (5, 9), 3)
    assert {*record["rows"]} == {*llama.RUNNERS} and record["conditions"]["layers"] == 2
    for name, row in record["rows"].items():
        assert all(cell["same"] and len(cell["step_ms"]) == 3 for cell in row.values()), name
    bytes_of = {name: row["9"]["bytes"] for name, row in record["rows"].items()}
    token = (
        2 * 2 * 2 * 12 * 4
    )  # keys and values, layers, heads of keys, their size, bytes of a number
    assert bytes_of["llama_kv_cache.py"] == bytes_of[llama.RIVAL] == (9 + 4) * token
    assert bytes_of["llama_kv_cache.py, preallocated"] == 41 * token
    record["rows"][llama.RIVAL]["9"]["step_ms"] = [3.0, 8.0, 10.0]
    record["rows"]["llama_kv_cache.py"]["9"]["step_ms"] = [2.0, 4.0, 20.0]
    assert llama.ratio(record, "llama_kv_cache.py", "9", "step_ms") == 1.5  # of 1.5, 2 and 0.5
    about, table = llama.report(record)
    assert "medians of 3 turns" in about and len(table.rows) == 8
