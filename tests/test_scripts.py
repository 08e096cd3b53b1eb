"""Every script as people meet it: --help, the default run, and bad input that gets one sentence and exit status 2."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline.py", "gpt_kv_cache.py"]
BOUNDED = "gpt_bounded_cache.py"
SCRIPTS = [*GPT_FILES, BOUNDED, "overfill.py", "load_gpt2_weights.py", "pocket/corpus.py", "pocket/train.py"]


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / words[0]), *words[1:]], capture_output=True, text=True, timeout=300, cwd=cwd
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_does(script: str) -> None:
    result = run(script, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert len(result.stdout.splitlines()) > 5 and "usage:" in result.stdout


@pytest.mark.parametrize("script", GPT_FILES)
def test_default_run_writes_text_and_its_cost_from_any_folder(script: str, tmp_path: Path) -> None:
    result = run(script, "--max-new-tokens", "30", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert len(result.stdout.split()) > 20
    assert re.search(
        r"prefill [\d.]+ ms, decode [\d.]+ ms per token = [\d,]+ tokens/s, KV cache [\d,]+ bytes", result.stdout
    )
    assert list(tmp_path.iterdir()) == []


def text_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n\n[prefill")[0]


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--top-k", "20", "--seed", "5"]])
def test_both_files_write_the_same(options: list[str]) -> None:
    words = ["--max-new-tokens", "60", *options]
    assert (
        text_of(run("gpt_baseline.py", *words))
        == text_of(run("gpt_kv_cache.py", *words))
        == text_of(run("gpt_kv_cache.py", *words))
    )


@pytest.mark.parametrize("memory", ["full", "window", "sinks", "bct"])
def test_every_memory_writes_text_and_says_its_bytes(memory: str, tmp_path: Path) -> None:
    result = run(BOUNDED, "--memory", memory, "--text-only", "--max-new-tokens", "60", cwd=tmp_path)
    assert len(text_of(result).split()) > 30 and result.stderr == ""
    held = {"full": 2 * 6 * 6 * 32 * 4 * 513, "bct": 6 * 6 * 4 * (24 * 65 + 8 * 89)}
    nbytes = held.get(memory, 2 * 6 * 6 * 32 * 4 * 37)
    assert f"KV cache {nbytes:,} bytes" in result.stdout
    assert list(tmp_path.iterdir()) == []
    if memory == "full":
        assert text_of(result) == text_of(run("gpt_kv_cache.py", "--max-new-tokens", "60"))


def test_slots_are_those_of_the_window() -> None:
    words = ["--text-only", "--max-new-tokens", "10"]
    for memory in ("window", "sinks"):
        result = run(BOUNDED, "--memory", memory, "--slots", "100", *words)
        assert f"KV cache {2 * 6 * 6 * 32 * 4 * 100:,} bytes" in result.stdout
    tall = run(BOUNDED, "--memory", "window", "--slots", "512", *words)
    assert text_of(tall) == text_of(run("gpt_kv_cache.py", "--max-new-tokens", "10"))


def test_bct_goes_on_past_the_context_and_another_model_has_no_slots() -> None:
    result = run(BOUNDED, "--text-only", "--max-new-tokens", "20", "--prompt", "Notes: " * 300)
    assert result.returncode == 0 and "holds only" not in result.stdout
    result = run(BOUNDED, "--memory", "window", "--text-only", "--max-new-tokens", "5", "--prompt", "Notes: " * 300)
    assert result.returncode == 0 and "context of 512 holds only the last" in result.stdout
    result = run("load_gpt2_weights.py", "pocket-bct")
    assert result.returncode == 0 and "KV cache 327,168 bytes" in result.stdout


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["--memory", "all"], ["all", "window"]),
        (["--slots", "5", "--memory", "sinks"], ["window 0", "sinks 4", "at least 1 and 0"]),
        (["--slots", "many"], ["many"]),
        (["--model", "pocket-bct", "--memory", "window"], ["bct", "24 slots"]),
        (["--model", "pocket/teacher", "--memory", "bct"], ["pocket/teacher", "without memory slots"]),
        (["--model", "gpt5"], ["gpt5", "pocket"]),
        (["--prompt", ""], ["prompt"]),
    ],
)
def test_bad_memories_get_one_sentence_and_exit_status_2(words: list[str], culprits: list[str]) -> None:
    result = run(BOUNDED, *words)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr
    assert all(culprit in result.stderr for culprit in culprits), result.stderr


def test_seed_changes_what_is_drawn() -> None:
    words = ["--max-new-tokens", "60", "--temperature", "1"]
    assert text_of(run("gpt_kv_cache.py", *words, "--seed", "1")) != text_of(
        run("gpt_kv_cache.py", *words, "--seed", "2")
    )


def test_compare_shows_the_same_tokens_and_a_table_over_lengths() -> None:
    result = run("gpt_kv_cache.py", "--compare", "--max-new-tokens", "80")
    assert result.returncode == 0 and result.stderr == ""
    assert "Same tokens: yes" in result.stdout
    assert result.stdout.count("KV cache ") >= 2
    rows = [line.split() for line in result.stdout.splitlines() if re.fullmatch(r"\s*(\d+|all)( +[\d.]+){3}", line)]
    assert len(rows) >= 3 and rows[-1][0] == "all"
    lengths = [int(row[0]) for row in rows[:-1]]
    assert lengths == sorted(set(lengths))
    for row in rows:
        assert float(row[3]) == pytest.approx(float(row[1]) / float(row[2]), rel=0.1)


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
def test_bad_input_gets_one_sentence_and_exit_status_2(script: str, words: list[str], culprits: list[str]) -> None:
    result = run(script, *words)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr
    assert all(culprit in result.stderr for culprit in culprits), result.stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs(dtype: str) -> None:
    result = run("gpt_kv_cache.py", "--dtype", dtype, "--max-new-tokens", "10")
    assert result.returncode == 0 and "KV cache" in result.stdout


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} gpt_kv_cache.py --max-new-tokens 60 | head -c 20"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "Traceback" not in result.stderr and "Error" not in result.stderr
