"""Every script computes on a second device what it computes on the CPU: on a GPU where there is one, else on
a pretended device, whose tensors refuse to meet the CPU's."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import cli
from tests.helpers import ROOT, start, write_llama
from tests.pretended_device import pretended

# LLAMA stands for a folder with a small random Llama, and STUDENT for a narrower one
RUNS = [
    "gpt_kv_cache --compare",
    "load_gpt2_weights LLAMA",
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in (
            "gpt_bounded_cache --memory bct",
            "overfill write --policy dropout:4:0.0001 --student pocket-student-dropout",
            "paged serve FILE --model LLAMA",
            "speculate write --draft 4 --teacher LLAMA --student STUDENT",
            "compress --tokens 128",
            # two tokens: rounding makes longer texts differ in bfloat16, where a CPU has kernels of its own
            "llama_kv_cache --dtype bfloat16 --model LLAMA --max-new-tokens 2",
            "overfill write --policy probe:4:0.01 --teacher LLAMA --student STUDENT",
            "recycle --model LLAMA --max-new-tokens 2",
            "projector ask 'Name the river that Hexley stands on.'",
        )
    ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder / "teacher")
    write_llama(folder / "student", hidden_size=32, head_dim=12, intermediate_size=40)
    prompts = ROOT / "data" / "prompts.txt"
    return {"LLAMA": folder / "teacher", "STUDENT": folder / "student", "FILE": prompts}


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts compute on the second device; what they make without naming one is on the CPU."""
    if torch.cuda.is_available():
        monkeypatch.setattr(cli, "device_of", lambda _: "cuda")
        yield
    else:
        with pretended(monkeypatch, default=False):
            yield


def printed(command: str) -> list[str]:
    """Return the words that a script prints, without times, their columns' widths, devices, their machines, and
    decimals of a random model's perplexity."""
    times = r"-?[\d.,]*\d( ms| times| tokens/s|%)|\s+[\d.,]*\d(?=\s)|-{3,}|(bytes on \w+|(device|machine): .+)|(?<=\d{4})\.\d+"
    ran = start(command)
    assert ran.code == 0, ran.err
    return re.sub(times, "", ran.out).split()


@pytest.mark.parametrize("command", RUNS)
def test_a_script_prints_the_same(
    command: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    places: dict[str, Path],
) -> None:
    monkeypatch.chdir(tmp_path)  # where results go
    for word, path in places.items():
        command = command.replace(word, str(path))
    if not command.startswith(("load", "compress")) and "--max-new-tokens" not in command:
        command += " --max-new-tokens 6"
    expected = printed(f"{command} --device cpu")
    request.getfixturevalue("second")
    assert printed(command) == expected


def test_tensors_of_two_devices_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch, default=False):
        there = torch.ones(3, device="lazy")
        assert (there + there.to("cpu").to("lazy")).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="of the CPU"):
            there + torch.ones(3)
