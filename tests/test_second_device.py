"""Every script computes on a second device what it computes on the CPU: on a GPU where there is one, else on
a pretended device, whose tensors refuse to meet the CPU's."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
import load_gpt2_weights
import overfill
import paged
import projector
import recycle
import speculate
from support import cli
from tests.helpers import write_llama
from tests.pretended_device import pretended

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--max-new-tokens", "12"]
FOLDER = "LLAMA"  # stands for a folder with a small random Llama, and STUDENT for a narrower one
LLAMA = ["--model", FOLDER, *SHORT]
LLAMAS = ["--teacher", FOLDER, "--student", "STUDENT", *SHORT]
RUNS = {
    "baseline": (gpt_baseline.main, SHORT),
    "kv": (gpt_kv_cache.main, ["--compare", *SHORT]),
    "kv, bfloat16": (gpt_kv_cache.main, ["--dtype", "bfloat16", *SHORT]),
    "window": (gpt_bounded_cache.main, ["--memory", "window", "--slots", "8", *SHORT]),
    "sinks": (gpt_bounded_cache.main, ["--memory", "sinks", "--slots", "10", *SHORT]),
    "bct": (gpt_bounded_cache.main, ["--memory", "bct", *SHORT]),
    "projector": (projector.main, ["ask", "Name the river that Hexley stands on.", *SHORT]),
    "paged": (paged.main, ["serve", str(ROOT / "data" / "prompts.txt"), *SHORT]),
    "speculate": (speculate.main, ["write", "--draft", "4", *SHORT]),
    "speculate, text": (speculate.main, ["write", "--by", "text", *SHORT]),
    "recycle": (recycle.main, SHORT),
    "overfill": (overfill.main, ["write", "--policy", "periodic:4", *SHORT]),
    "overfill, probe": (overfill.main, ["write", "--policy", "probe:4:0.01", *SHORT]),
    "overfill, dropout": (
        overfill.main,
        ["write", "--policy", "dropout:4:0.0001", "--student", "pocket-student-dropout", *SHORT],
    ),
}

RUNS |= {
    "llama": (llama_kv_cache.main, ["--compare", *LLAMA]),
    "llama, bfloat16": (llama_kv_cache.main, ["--dtype", "bfloat16", *LLAMA]),
    "paged, llama": (paged.main, ["serve", str(ROOT / "data" / "prompts.txt"), *LLAMA]),
    "speculate, llama": (speculate.main, ["write", "--draft", "4", *LLAMAS]),
    "recycle, llama": (recycle.main, LLAMA),
    "overfill, llama": (overfill.main, ["write", "--policy", "periodic:4", *LLAMAS]),
    "overfill, llama, probe": (overfill.main, ["write", "--policy", "probe:4:0.01", *LLAMAS]),
    "loader, llama": (load_gpt2_weights.main, [FOLDER]),
}

LONG = ("recycle", "projector")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the Llamas are that RUNS names."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder / "teacher")
    write_llama(folder / "student", hidden_size=32, head_dim=12, intermediate_size=40)
    return {FOLDER: str(folder / "teacher"), "STUDENT": str(folder / "student")}


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts compute on the second device; what they make without naming one is on the CPU."""
    if torch.cuda.is_available():
        monkeypatch.setattr(cli, "device_of", lambda _: "cuda")
        yield
    else:
        with pretended(monkeypatch, default=False):
            yield


def printed(main: Callable, words: list[str], capsys: pytest.CaptureFixture) -> list[str]:
    """Return the words that a script prints, without times, their columns' widths, devices, and
    decimals of a random model's perplexity."""
    main(words)
    times = r"-?[\d.]+( ms| times| tokens/s|%)|\s+[\d.]+(?=\s)|-{3,}|bytes on \w+|(?<=\d{4})\.\d+"
    return re.sub(times, "", capsys.readouterr().out).split()


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow if run in LONG else []) for run in RUNS]
)
def test_a_script_prints_the_same(
    run: str,
    capsys: pytest.CaptureFixture,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where results go
    main, words = RUNS[run]
    words = [folders.get(word, word) for word in words]
    expected = printed(main, ["--device", "cpu", *words], capsys)
    request.getfixturevalue("second")
    assert printed(main, words, capsys) == expected


def test_tensors_of_two_devices_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch, default=False):
        there = torch.ones(3, device="lazy")
        assert (there + there.to("cpu").to("lazy")).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="of the CPU"):
            there + torch.ones(3)
