"""README.md tells the truth: its two commands, its map and its figures."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "benchmarks"))
import readme  # noqa: E402


def test_the_first_code_block_is_two_commands() -> None:
    first = README.split("```bash\n", 1)[1].split("```", 1)[0].splitlines()
    assert len(first) == 2
    assert first[0].endswith("gpt_kv_cache.py --compare") and "requirements.txt" in first[0]
    assert first[1].endswith("pytest") and "requirements-dev.txt" in first[1]


def test_figures_are_those_that_were_recorded() -> None:
    assert readme.with_blocks(README, {"speed": readme.speed(), "pocket": readme.pocket()}) == README


def test_every_file_that_is_linked_or_run_exists() -> None:
    names = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"python3? ([\w/]+\.py)", README)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_diff_is_as_small_as_the_readme_says() -> None:
    import difflib

    files = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in ("gpt_baseline.py", "gpt_kv_cache.py")]
    hunks = sum(line.startswith("@@") for line in difflib.unified_diff(*files, n=0))
    assert f"{hunks} hunks" in README
