"""What the chapters' tests share: which files they test, points for the exercises that pass, and short failures.

A test asks for `impl`, the module under test: the exercise.py or solution.py beside it (`--impl`), or the file of that
name in the chapter's folder of a student's copy (`--from`). Its marker is the exercise, such as ex2_1, and its module's
POINTS says what that is worth: all of it if every test of the exercise passes, else nothing; or a point for each stage,
where its tests are called test_stage_1_..., test_stage_2_... GIVEN names the project's modules that the chapter's
exercise.py may import.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType, TracebackType

import pytest

CHAPTERS = Path(__file__).resolve().parent
LIBRARY = sysconfig.get_path("stdlib")
sys.path.insert(0, str(CHAPTERS.parent))
MODULES: dict[Path, ModuleType | str] = {}  # or why there is none
WAYS_AROUND = {"importlib", "runpy", "sys", "__import__", "exec", "eval"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        choices=("exercise", "solution"),
        default="exercise",
        help="the files that are tested",
    )
    parser.addoption(
        "--from",
        dest="copy",
        metavar="FOLDER",
        help="test the chapters of this folder, a student's copy",
    )


def points() -> dict[str, int]:
    """Return what every exercise is worth, from POINTS of the chapters' tests, which are not imported for it."""
    found: dict[str, int] = {}
    for path in sorted(CHAPTERS.glob("[0-9]*/test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "POINTS":
                found |= ast.literal_eval(node.value)
    return found


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"
    for name, worth in points().items():
        config.addinivalue_line(
            "markers", f"{name}: exercise {name[2:].replace('_', '.')}, {worth} points"
        )


def exercise_of(keywords: object) -> str | None:
    return next((name for name in keywords if re.fullmatch(r"ex\d+_\d+", name)), None)


def borrowed(path: Path, chapter: Path, given: Collection[str]) -> set[str]:
    """Return the names in a file that lead to the project's own code, but for the modules that are given."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    project = (
        {p.stem for folder in (CHAPTERS.parent, chapter) for p in folder.iterdir()}
        | WAYS_AROUND
        | {""}
    )
    found = {name for name in imported if name.partition(".")[0] in project and name not in given}
    return found | WAYS_AROUND & {n.id for n in nodes if isinstance(n, ast.Name)}


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test."""
    chapter, copy = request.path.parent, request.config.getoption("copy")
    path = (
        Path(copy).resolve() / chapter.name if copy else chapter
    ) / f"{request.config.getoption('--impl')}.py"
    if not path.exists():
        hint = ": your teacher may have it" if path.stem == "solution" else ""
        pytest.fail(f"there is no {path.name} in {path.parent}{hint}", pytrace=False)
    if path not in MODULES:
        MODULES[path] = loaded(path, chapter, getattr(request.module, "GIVEN", ()))
    if isinstance(MODULES[path], str):
        pytest.fail(MODULES[path], pytrace=False)
    return MODULES[path]


def loaded(path: Path, chapter: Path, given: Collection[str]) -> ModuleType | str:
    """Return a file as a module, or a message: the error that it raises, with its line, or what it may not use."""
    name = f"{path.stem}_{path.parent.name[:2]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        where = (
            f'  File "{path}", line {lines[-1]}\n' if lines else ""
        )  # a SyntaxError brings its own
        return where + "".join(traceback.format_exception_only(error))
    names = borrowed(path, chapter, given)
    return (
        f"{path.name} uses {', '.join(sorted(names))}: write the exercises yourself"
        if names
        else module
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Leave PyTorch's own frames out of tracebacks, and keep the place of an exercise that isn't written yet."""
    if call.excinfo is not None and call.when != "teardown":
        if call.excinfo.errisinstance(AssertionError) and call.excinfo.value.args:
            lines = str(
                call.excinfo.value.args[0]
            ).splitlines()  # the test's words, then pytest's analysis
            end = next(
                (i for i, line in enumerate(lines) if i and line.startswith("assert ")), len(lines)
            )
            brief = [
                line for line in lines[end : end + 1] if line != "assert False" and len(line) < 120
            ]
            call.excinfo.value.args = ("\n".join(lines[:end] + brief),)
        own = None
        for frame, line in reversed(list(traceback.walk_tb(call.excinfo.tb))):
            file = Path(frame.f_code.co_filename)
            if (
                file.exists()
                and "site-packages" not in file.parts
                and not file.is_relative_to(LIBRARY)
            ):
                own = TracebackType(own, frame, frame.f_lasti, line)
        if own:
            call.excinfo.traceback = type(call.excinfo.traceback)(own)
    report = yield
    if report.failed and call.excinfo.exconly().startswith("NotImplementedError: exercise "):
        last = call.excinfo.traceback[-1]
        report.missing = (
            f"{last.frame.code.raw.co_qualname} ({last.path.name}, line {last.lineno + 1})"
        )
        report.longrepr = f"{call.excinfo.value}: {report.missing} isn't written yet"
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count an exercise that isn't written yet as such: it fails, without a traceback."""
    return ("not written yet", "-", "NOT WRITTEN") if hasattr(report, "missing") else None


def stage_of(nodeid: str) -> tuple[int, str]:
    """Return the stage of an exercise that a test belongs to, and what it asks for; 0 if it has none."""
    name = nodeid.partition("::test_")[2].partition("[")[0]
    match = re.fullmatch(r"stage_(\d+)_(.*)", name)
    return (int(match[1]), match[2].replace("_", " ")) if match else (0, "")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the points of every exercise that was tested: all or none, or, of one in stages, a point for each stage
    that is right."""
    passed: dict[str, dict[int, bool]] = {}  # of each exercise, its stages
    missing: dict[str, str] = {}
    failed: dict[str, list[tuple[int, str]]] = {}
    outcomes = ("passed", "failed", "not written yet", "error", "skipped", "xfailed", "xpassed")
    for outcome in (*outcomes, "deselected"):
        for report in terminalreporter.stats.get(outcome, []):
            name = exercise_of(getattr(report, "keywords", {}))
            if name is None or (outcome == "deselected" and name not in passed):
                continue  # the whole exercise is deselected
            stage, asks = stage_of(report.nodeid)
            stages = passed.setdefault(name, {})
            stages[stage] = stages.get(stage, True) and outcome == "passed"
            if outcome != "passed" and stage:
                failed.setdefault(name, []).append((stage, asks))
            if outcome == "not written yet":
                missing.setdefault(name, f"   not written yet: {report.missing}")
    if not passed:
        return
    worth, total = points(), 0
    terminalreporter.section(f"points of {config.getoption('--impl')}.py")
    for name in sorted(passed, key=lambda name: [*map(int, name[2:].split("_"))]):
        stages = passed[name]
        earned = sum(stages.values())
        if 0 in stages:  # without stages
            earned = worth[name] if stages[0] else 0
        note = missing.get(name, "")
        if name in failed and not note:
            stage, asks = min(failed[name])
            note = f"   next, stage {stage}: {asks}"
        exercise = name[2:].replace("_", ".")
        terminalreporter.write_line(f"  {exercise:6} {earned:3} of {worth[name]}{note}")
        total += earned
    terminalreporter.write_line(f"  total  {total:3} of {sum(worth[name] for name in passed)}")
