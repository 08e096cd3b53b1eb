"""README.md and studies/README.md tell the truth: commands, maps and figures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.pages
import studies.pages
from support.blocks import with_blocks

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_code_block_is_two_commands() -> None:
    first = README.split("```bash\n", 1)[1].split("```", 1)[0].splitlines()
    assert len(first) == 2
    assert first[0].endswith("gpt_kv_cache.py --compare") and "requirements.txt" in first[0]
    assert first[1].endswith("pytest") and "requirements-dev.txt" in first[1]


def test_figures_are_those_that_were_recorded() -> None:
    for page, made in [*studies.pages.PAGES.items(), *benchmarks.pages.PAGES.items()]:
        text = page.read_text(encoding="utf-8")
        blocks = {
            name: block() for name, block in made.items() if name != "demo"
        }  # whose times differ every time
        assert with_blocks(text, blocks) == text


@pytest.mark.slow
def test_the_python_examples_run_one_after_the_other() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0 and run.stderr == "" and "slot  position  token" in run.stdout


def test_every_file_that_is_linked_or_run_exists() -> None:
    names = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"python3? ([\w/]+\.py)", README)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []
    results = ROOT / "studies"
    names = re.findall(r"\]\(([^)#:]+)\)", (results / "README.md").read_text(encoding="utf-8"))
    assert len(names) > 5 and [name for name in names if not (results / name).exists()] == []


def test_diff_is_as_small_as_the_readme_says() -> None:
    import difflib

    names = ("gpt_baseline.py", "gpt_kv_cache.py", "gpt_bounded_cache.py")
    files = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in names]
    hunks = sum(line.startswith("@@") for line in difflib.unified_diff(*files[:2], n=0))
    assert f"{hunks} hunks" in README
    hunks = "\n".join(difflib.unified_diff(*files[1:], n=0)).split("\n@@")[1:]
    assert (
        f"{sum(bool(re.search('^[+].*  # RING', hunk, re.M)) for hunk in hunks)} of its hunks"
        in README
    )


def test_lecture_4_is_as_many_hunks_as_the_readme_says() -> None:
    import difflib

    names = ("gpt_kv_cache.py", "llama_kv_cache.py")
    files = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in names]
    hunks = sum(line.startswith("@@") for line in difflib.unified_diff(*files, n=0))
    assert f"{hunks} hunks from `gpt_kv_cache.py`" in README


def test_the_number_of_mutants_is_right() -> None:
    assert f"{len(list((ROOT / 'tests' / 'mutants').glob('*.patch')))} small bugs" in README
