"""CONTRIBUTING.md: what it says to add works as it is written."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, process

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
IGNORED = (".git", ".venv", "venv", "results", "__pycache__", "*.png", ".*_cache")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with all that the page adds to its files, each above main() if there is one."""
    folder = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*IGNORED))
    examples = re.findall(r"```(?:python|diff)\n# (\S+?),?(?: [^\n]*)?\n(.*?)```", TEXT, re.S)
    for name, code in examples:
        before, main, after = (folder / name).read_text("utf-8").partition("\ndef main(")
        (folder / name).write_text(f"{before}\n\n{code}\n{main}{after}", "utf-8")
    return folder


def shell(folder: Path, command: str) -> str:
    """What a command prints, run in the copy."""
    command = command.replace("python3 ", f"{sys.executable} ")
    ran = process("bash", "-c", command, folder=folder)
    return ran.out + ran.err


def test_every_file_that_the_page_names_exists() -> None:
    names = {*re.findall(r"[\w/*]+\.(?:py|toml|diff)\b", TEXT)} - {"exercise.py", "solution.py"}
    assert len(names) > 10 and [name for name in names if not [*ROOT.glob(name)]] == []


@pytest.mark.slow
def test_a_policy_a_cache_and_a_claim_are_there_once_their_lines_are(copy: Path) -> None:
    written = shell(copy, "python3 overfill.py write --policy doubling --max-new-tokens 20")
    assert "teacher read 16 tokens after the prompt" in written
    assert "small norm, an eighth" in shell(copy, "python3 compress.py --tokens 128")
    assert "Is BCT faster after 16,000 tokens?: YES" in shell(copy, "python3 -m studies.claims")


@pytest.mark.slow
def test_an_exercise_fails_until_it_is_written(copy: Path) -> None:
    file = copy / "chapters" / "05_recycling" / "README.md"
    text, rows = file.read_text("utf-8"), r"\1 2 |\n| 5.6 | the share that is unread | 1 |"
    file.write_text(re.sub(r"(\| 5\.5 \|.*) \d \|", rows, text), "utf-8")
    shell(copy, re.search(r"`(python3 -m chapters\.builder \S+ --stubs)`", TEXT)[1])
    run = "python3 -m pytest chapters/05_recycling -m ex5_6"
    assert "1 not written yet" in shell(copy, run)
    assert "1 passed" in shell(copy, f"{run} --impl solution")


@pytest.mark.slow
def test_a_planted_bug_is_killed(copy: Path) -> None:
    (command,) = re.findall(r"`(python3 tests/test_mutants.py \w+)`", TEXT)
    assert "ring_new: 1 (killed)" in shell(copy, command)
