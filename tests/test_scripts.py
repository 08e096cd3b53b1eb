"""Every script as people meet it: --help, the default run, and bad input that gets one sentence and exit status 2."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Ran, read_pocket_config

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline", "gpt_kv_cache"]
SCRIPTS = [
    *GPT_FILES,
    "gpt_bounded_cache",
    "recycle",
    "projector",
    "overfill",
    "load_gpt2_weights",
    "pocket.corpus",
    "pocket.train",
    "benchmarks.__main__",
    "studies.bounding",
    "studies.article",
    "studies.claims",
]
Run = Callable[..., Ran]
CONFIG = read_pocket_config("teacher")
TOKEN = 2 * CONFIG["n_layer"] * CONFIG["n_embd"] * 4  # bytes of a token's keys and values


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a script's main() with its words, in this process."""

    def call(script: str, *words: str) -> Ran:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        code = 0
        try:
            importlib.import_module(script).main([*words])
        except SystemExit as ended:
            code = ended.code or 0
        return Ran(code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_does(run: Run, script: str) -> None:
    ran = run(script, "--help")
    assert ran.code == 0 and ran.err == ""
    assert len(ran.out.splitlines()) > 5 and "usage:" in ran.out


def test_a_real_process_writes_text_and_its_cost_from_any_folder(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / f"{script}.py"), "--max-new-tokens", "20"],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
        for script in (*GPT_FILES, "gpt_bounded_cache")
    ]
    for process in processes:  # they run at the same time
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and err == "", process.args
        assert len(out.split()) > 15 and re.search(r"tokens/s|ms per token", out), process.args
    assert list(tmp_path.iterdir()) == []


def text_of(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    assert re.search(
        r"prefill [\d.]+ ms, decode [\d.]+ ms per token = [\d,]+ tokens/s, KV cache [\d,]+ bytes",
        ran.out,
    )
    return ran.out.split("\n\n[prefill")[0]


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--top-k", "20", "--seed", "5"]])
def test_all_files_write_the_same(run: Run, options: list[str]) -> None:
    words = ["--max-new-tokens", "60", *options]
    texts = [text_of(run(script, *words)) for script in GPT_FILES]
    texts.append(text_of(run("gpt_bounded_cache", "--memory", "full", *words)))
    assert len(texts[0].split()) > 20 and len({*texts}) == 1


@pytest.mark.parametrize("memory", ["full", "window", "sinks", "bct"])
def test_every_memory_writes_text_and_says_its_bytes(run: Run, memory: str) -> None:
    slots = ["--slots", "50"] if memory in ("window", "sinks") else []
    ran = run("gpt_bounded_cache", "--memory", memory, "--max-new-tokens", "40", *slots)
    bct = read_pocket_config("bct")
    head = bct["slots"] * (2 * 32 + 1) + bct["recent"] * (2 * 32 + 1 + bct["slots"])
    nbytes = {
        "full": TOKEN * (CONFIG["n_ctx"] + 1),
        "bct": 4 * bct["n_layer"] * bct["n_head"] * head,
    }
    assert (
        len(text_of(ran).split()) > 20
        and f"KV cache {nbytes.get(memory, 50 * TOKEN):,} bytes" in ran.out
    )


def test_a_bare_run_compares_the_memories_on_one_text(run: Run) -> None:
    ran = run("gpt_bounded_cache", "--max-new-tokens", "50", "--prompt", "Notes:")
    rows = [line.split() for line in ran.out.splitlines() if re.search(r"\d%$", line)]
    assert [row[0] for row in rows] == ["full,", "window", "4", "BCT:"] and rows[0][-2:] == [
        "0.000",
        "100%",
    ]
    assert "python3 -m studies.bounding" in ran.out.splitlines()[-1]


def test_bct_goes_on_past_the_context(run: Run) -> None:
    long = ["--prompt", "Notes: " * (CONFIG["n_ctx"] // 2), "--max-new-tokens", "5"]
    assert "holds only" not in run("gpt_bounded_cache", "--memory", "bct", *long).out
    full = run("gpt_bounded_cache", "--memory", "full", *long)
    assert f"context of {CONFIG['n_ctx']} holds only the last" in full.out


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["--memory", "all"], ["all", "window"]),
        (["--slots", "5", "--memory", "sinks"], ["--slots 5", "at least 6"]),
        (["--slots", "many"], ["many"]),
        (["--slots", "50", "--memory", "bct"], ["bct", "--slots"]),
        (["--model", "pocket-bct", "--memory", "window"], ["bct", "slots is 24"]),
        (
            ["--model", "pocket/teacher", "--memory", "bct"],
            ["pocket/teacher", "slots is None; models with slots"],
        ),
        (["--prompt", ""], ["prompt"]),
    ],
)
def test_bad_memories_get_one_sentence(run: Run, words: list[str], culprits: list[str]) -> None:
    refused(run("gpt_bounded_cache", *words), culprits)


def refused(ran: Ran, culprits: list[str]) -> None:
    assert ran.code == 2 and len(ran.err.strip().splitlines()) == 1
    assert all(culprit in ran.err for culprit in culprits), ran.err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("studies.replay", ["requests.jsonl", "--blocks", "500", "--quick"]),
        ("studies.projection", ["--pairs", "pairs.csv", "--kinds", "quiz"]),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    run: Run, script: str, words: list[str]
) -> None:
    refused(run(script, *words), [word for word in words if word.startswith("--")])


@pytest.mark.parametrize(
    "words", [["gpt_kv_cache"], ["gpt_bounded_cache"], ["gpt_bounded_cache", "--memory", "window"]]
)
def test_a_bct_elsewhere_names_the_command_that_takes_it(run: Run, words: list[str]) -> None:
    refused(
        run(*words, "--model", "pocket-bct"), ["config.json", "gpt_bounded_cache.py --memory bct"]
    )
    assert "pocket-bct" not in run(words[0], "--help").out


def test_seed_changes_what_is_drawn(run: Run) -> None:
    words = ["--max-new-tokens", "60", "--temperature", "1"]
    one, two = (text_of(run("gpt_kv_cache", *words, "--seed", seed)) for seed in "12")
    assert one != two


def test_compare_shows_the_same_tokens_and_a_table_over_lengths(run: Run) -> None:
    ran = run("gpt_kv_cache", "--compare", "--max-new-tokens", "150")
    assert ran.code == 0 and "Same tokens: yes" in ran.out
    rows = [
        line.split()
        for line in ran.out.splitlines()
        if re.fullmatch(r"\s*(\d+|all)( +[\d.]+){3}", line)
    ]
    assert len(rows) >= 3 and rows[-1][0] == "all"
    lengths = [int(row[0]) for row in rows[:-1]]
    assert lengths == sorted(set(lengths))
    for row in rows:
        assert float(row[3]) == pytest.approx(float(row[1]) / float(row[2]), rel=0.1)


def test_an_untrained_model_writes_what_the_article_lets_it_write(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> None:
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    ran = run("gpt_kv_cache", "--compare", "--random", "2x2x8", "--threads", "1")
    assert ran.code == 0 and re.search(r"\nHello, I am( \d+){200}\n", ran.out)
    assert "Same tokens: yes (no cache: 200, KV cache: 200)" in ran.out
    assert re.search(
        r"In all, prefill included: no cache [\d.]+ s, KV cache [\d.]+ s, [\d.]+ times as fast",
        ran.out,
    )
    assert "tokens are shown as numbers: can't download GPT-2's tokenizer" in ran.err
    other = run("gpt_kv_cache", "--random", "2x2x8", "--prompt", "Hi")
    assert other.code == 2 and "the prompt must be 'Hello, I am', got 'Hi'" in other.err


def test_an_untrained_model_is_named_by_its_geometry_alone(run: Run) -> None:
    refused(run("gpt_kv_cache", "--random", "pocket"), ["124M", "pocket"])
    refused(run("gpt_kv_cache", "--random", "124M", "--model", "gpt2"), ["124M", "gpt2"])


def test_a_students_cache_takes_the_place_of_ours(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "exercise.py"
    words = ["--max-new-tokens", "20", "--cache", str(file)]
    file.write_text(
        "from gpt_kv_cache import KVCache\n\nclass Cache(KVCache):\n    nbytes = 12345\n"
    )
    ran = run("gpt_kv_cache", "--compare", *words)
    assert ran.code == 0 and "Same tokens: yes" in ran.out and "12,345 bytes" in ran.out
    for source, words_of_error in (
        ("x = 1\n", "has no class Cache"),
        (
            "class Cache:\n    @property\n    def next_pos(self):\n        raise NotImplementedError('exercise 2.1')\n"
            "    def __len__(self):\n        return 0\n",
            "exercise 2.1 isn't written",
        ),
        ("class Cache(\n", "line 1"),
    ):
        file.write_text(source)
        ran = run("gpt_kv_cache", *words)
        assert (
            ran.code == 2 and words_of_error in ran.err and len(ran.err.strip().splitlines()) == 1
        )
        assert ran.out == "" or ran.out.endswith("\n")  # the sentence begins a line
    assert (
        "there is no Python file" in run("gpt_kv_cache", "--cache", str(tmp_path / "none.py")).err
    )


@pytest.mark.parametrize("script", GPT_FILES)
@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["--model", "gpt5"], ["gpt5", "pocket"]),
        (["--model", "tests"], ["config.json", "tests"]),
        (["--max-new-tokens", "0"], ["0", "1"]),
        (["--max-new-tokens", "many"], ["many"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--top-k", "0"], ["0", "1"]),
        (["--prompt", ""], ["prompt"]),
        (["--dtype", "int8"], ["int8", "float32"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_input_gets_one_sentence(
    run: Run, script: str, words: list[str], culprits: list[str]
) -> None:
    refused(run(script, *words), culprits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs(run: Run, dtype: str) -> None:
    assert "KV cache" in run("gpt_kv_cache", "--dtype", dtype, "--max-new-tokens", "10").out


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} gpt_kv_cache.py --max-new-tokens 60 | head -c 20"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert "Traceback" not in result.stderr and "Error" not in result.stderr
