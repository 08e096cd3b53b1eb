"""What the chapters' tests share: `--impl`, which file they test, and points for the exercises that pass.

A test asks for `impl`, the module under test: the exercise.py or solution.py beside it. Its marker is the exercise,
such as ex2_1, and its module's POINTS says what that is worth: all of it if every test of the exercise passes, else
nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHAPTERS = Path(__file__).resolve().parent
sys.path.insert(0, str(CHAPTERS.parent))
MODULES: dict[Path, ModuleType] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--impl", choices=("exercise", "solution"), default="exercise", help="the files that are tested")


def points() -> dict[str, int]:
    """Return what every exercise is worth, from POINTS of the chapters' tests, which are not imported for it."""
    found: dict[str, int] = {}
    for path in sorted(CHAPTERS.glob("[0-9]*/test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "POINTS":
                found |= ast.literal_eval(node.value)
    return found


def pytest_configure(config: pytest.Config) -> None:
    for name, worth in points().items():
        config.addinivalue_line("markers", f"{name}: exercise {name[2:].replace('_', '.')}, {worth} points")


def exercise_of(keywords: object) -> str | None:
    return next((name for name in keywords if re.fullmatch(r"ex\d+_\d+", name)), None)


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test."""
    path = request.path.parent / f"{request.config.getoption('--impl')}.py"
    if not path.exists():
        pytest.fail(f"there is no {path.name} in {path.parent.name}: your teacher may have it", pytrace=False)
    if path not in MODULES:
        name = f"{path.stem}_{path.parent.name[:2]}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look themselves up
        spec.loader.exec_module(module)
        MODULES[path] = module
    return MODULES[path]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the points of every exercise that was tested."""
    passed: dict[str, bool] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected"):
        for report in terminalreporter.stats.get(outcome, []):
            if name := exercise_of(getattr(report, "keywords", {})):
                if outcome == "deselected" and name not in passed:
                    continue  # the whole exercise is
                passed[name] = passed.get(name, True) and outcome == "passed"
    if not passed:
        return
    worth = points()
    terminalreporter.section(f"points of {config.getoption('--impl')}.py")
    for name in sorted(passed, key=lambda name: [*map(int, name[2:].split("_"))]):
        earned = worth[name] if passed[name] else 0
        terminalreporter.write_line(f"  {name[2:].replace('_', '.'):6} {earned:3} of {worth[name]}")
    total = sum(worth[name] for name in passed if passed[name])
    terminalreporter.write_line(f"  total  {total:3} of {sum(worth[name] for name in passed)}")
