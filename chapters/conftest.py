"""What the chapters' tests share: which files they test, points for the exercises that pass, and short failures.

A test asks for `impl`, the module under test: the exercise.py or solution.py beside it (`--impl`), or the file of that
name in the chapter's folder of a student's copy (`--from`). Its marker is the exercise, such as ex2_1, and its module's
POINTS says what that is worth: all of it if every test of the exercise passes, else nothing; or a point for each stage,
where its tests are called test_stage_1_..., test_stage_2_... GIVEN names the project's modules that the chapter's
exercise.py may import.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest

CHAPTERS = Path(__file__).resolve().parent
LIBRARY = sysconfig.get_path("stdlib")
sys.path.insert(0, str(CHAPTERS.parent))
MODULES: dict[Path, ModuleType | str] = {}  # or why there is none
WAYS_AROUND = {"importlib", "runpy", "sys", "__import__", "exec", "eval"}


def pytest_addoption(parser: pytest.Parser) -> None:
    kinds = ("exercise", "solution")
    parser.addoption("--impl", choices=kinds, default="exercise", help="the files that are tested")
    copy = "test the chapters of this folder, a student's copy"
    parser.addoption("--from", dest="copy", metavar="FOLDER", help=copy)


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
        marker = f"{name}: exercise {number_of(name)}, {worth} points"
        config.addinivalue_line("markers", marker)


def number_of(exercise: str) -> str:
    """Return an exercise's number as texts have it, such as 2.1 of ex2_1."""
    return exercise.removeprefix("ex").replace("_", ".")


def borrowed(path: Path, chapter: Path, given: Collection[str]) -> set[str]:
    """Return the names in a file that lead to the project's own code, but for the modules that are given."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    ours = {path.stem for folder in (CHAPTERS.parent, chapter) for path in folder.iterdir()}
    ours |= {"", *WAYS_AROUND}
    found = {name for name in imported if name.partition(".")[0] in ours and name not in given}
    return found | WAYS_AROUND & {n.id for n in nodes if isinstance(n, ast.Name)}


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test."""
    chapter, copy = request.path.parent, request.config.getoption("copy")
    folder = Path(copy).resolve() / chapter.name if copy else chapter
    path = folder / f"{request.config.getoption('--impl')}.py"
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
    from support.files import import_file

    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f'  File "{path}", line {lines[-1]}\n' if lines else ""  # a SyntaxError has its own
        return where + "".join(traceback.format_exception_only(error))
    if names := borrowed(path, chapter, given):
        return f"{path.name} uses {', '.join(sorted(names))}: write the exercises yourself"
    return module


def is_own(file: Path) -> bool:
    """Say whether a file that raises an error is the project's or a student's, and not a library's."""
    library = "site-packages" in file.parts or file.is_relative_to(LIBRARY)
    return file.exists() and not library


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Leave PyTorch's own frames out of tracebacks, and keep the place of an exercise that isn't written yet."""
    if call.excinfo is not None and call.when != "teardown":
        error = call.excinfo.value
        if isinstance(error, AssertionError) and error.args:
            # The test's words, then pytest's.
            words, _, analysis = str(error.args[0]).partition("\nassert ")
            first = analysis.partition("\n")[0]
            if first not in ("", "False") and len(first) < 113:
                words = f"{words}\nassert {first}"
            error.args = (words,)
        own = call.excinfo.traceback.filter(lambda entry: is_own(Path(entry.path)))
        if own:
            call.excinfo.traceback = own
    report = yield
    if report.failed and call.excinfo.exconly().startswith("NotImplementedError: exercise "):
        last = call.excinfo.traceback[-1]
        place = f"{last.path.name}, line {last.lineno + 1}"
        report.missing = f"{last.frame.code.raw.co_qualname} ({place})"
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
    failed: dict[str, dict[int, list[str]]] = {}  # of each exercise, by stage, what isn't right
    missing: dict[str, str] = {}
    outcomes = ("passed", "failed", "not written yet", "error", "skipped", "xfailed", "xpassed")
    for outcome in (*outcomes, "deselected"):
        for report in terminalreporter.stats.get(outcome, []):
            keywords = getattr(report, "keywords", {})
            name = next((word for word in keywords if re.fullmatch(r"ex\d+_\d+", word)), None)
            if name is None or (outcome == "deselected" and name not in failed):
                continue  # the whole exercise is deselected
            stage, asks = stage_of(report.nodeid)
            wrong = failed.setdefault(name, {}).setdefault(stage, [])
            if outcome != "passed":
                wrong.append(asks)
            if outcome == "not written yet":
                missing.setdefault(name, report.missing)
    if not failed:
        return
    worth, total = points(), 0
    terminalreporter.section(f"points of {config.getoption('--impl')}.py")
    for name in sorted(failed, key=lambda name: [*map(int, number_of(name).split("."))]):
        stages = failed[name]
        wrong = [stage for stage, asks in stages.items() if asks]
        earned = len(stages) - len(wrong)
        if 0 in stages:  # without stages
            earned = 0 if wrong else worth[name]
        note = ""
        if name in missing:
            note = f"   not written yet: {missing[name]}"
        elif any(wrong):
            note = f"   next, stage {min(wrong)}: {min(stages[min(wrong)])}"
        terminalreporter.write_line(f"  {number_of(name):6} {earned:3} of {worth[name]}{note}")
        total += earned
    terminalreporter.write_line(f"  total  {total:3} of {sum(worth[name] for name in failed)}")
