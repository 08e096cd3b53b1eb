"""What the chapters' tests share: which files they test, points for the exercises that pass, and
short failure messages.

A test asks for `impl`, the module under test: the exercise.py or solution.py beside it (`--impl`), or the file of that
name in the chapter's folder of a student's copy (`--from`). Its marker is the exercise, such as ex2_1, and the table in
the chapter's README.md says what that is worth: all of it if every test of the exercise passes, else nothing; or a
point for each stage, where its tests are called test_stage_1_..., test_stage_2_... GIVEN names the project's modules
that the chapter's exercise.py may import.
"""

import ast
import builtins
import json
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

CHAPTERS = Path(__file__).resolve().parent
sys.path.insert(0, str(CHAPTERS.parent))
from chapters import calling, checking  # noqa: E402

# Names and modules by which a file reaches the tests, or another file's code.
RUN_TEXT = {"compile", "eval", "exec", "__builtins__", "__import__"}
REACH_TESTS = {
    "atexit",
    "builtins",
    "ctypes",
    "gc",
    "importlib",
    "inspect",
    "pytest",
    "runpy",
    "sys",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    kinds = ("exercise", "solution")
    parser.addoption("--impl", choices=kinds, default="exercise", help="the files that are tested")
    parser.addoption("--from", dest="copy", metavar="FOLDER", help="test a student's copy")
    parser.addoption("--points", metavar="FILE", help="write the points to a file, as JSON")


def exercise_points() -> dict[str, int]:
    """Return what every exercise is worth, from the tables in the chapters' texts."""
    texts = [path.read_text("utf-8") for path in sorted(CHAPTERS.glob("[0-9]*/README.md"))]
    rows = re.findall(r"^\| (\d+)\.(\d+) \|.* (\d+) \|$", "\n".join(texts), re.M)
    return {f"ex{chapter}_{number}": int(points) for chapter, number, points in rows}


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"
    for name, points in exercise_points().items():
        config.addinivalue_line("markers", f"{name}: {points} points")


def borrowed_names(path: Path, chapter: Path, given: Collection[str]) -> set[str]:
    """Return the project's modules that a file imports, except for the given ones, and what else it uses that would
    reach the tests or run another file's text."""
    imported, names = set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.ImportFrom):
            imported |= {node.module or "."} | {alias.name for alias in node.names} & REACH_TESTS
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
    own = {path.stem for folder in (CHAPTERS.parent, chapter) for path in folder.iterdir()}
    refused = {"", *REACH_TESTS, *own}
    return names & RUN_TEXT | {
        name for name in imported - {*given} if name.partition(".")[0] in refused
    }


def judges(module: ModuleType) -> dict[str, object]:
    """Return the functions and classes that decide on a test module's points, and the functions' code, by name."""
    found = {f"torch.{name}": getattr(torch, name) for name in ("allclose", "equal", "isclose")}
    for owner in (builtins, pytest, torch.Tensor, calling, checking, module):
        for name, value in vars(owner).items():
            if callable(value):
                found[f"{owner.__name__}.{name}"] = value
                found[f"{owner.__name__}.{name}.__code__"] = getattr(value, "__code__", None)
    return found


@pytest.fixture(scope="module", autouse=True)
def judges_before(request: pytest.FixtureRequest) -> dict[str, object]:
    """The judges before the file under test is loaded."""
    return judges(request.module)


@pytest.fixture(autouse=True)
def same_judges(request: pytest.FixtureRequest, judges_before: dict[str, object]) -> Iterator[None]:
    """Fail a test after which a judge is another one: the file under test has replaced it."""
    yield
    replaced = [
        name
        for name, judge in judges(request.module).items()
        if judges_before.get(name) is not judge
    ]
    assert not replaced, f"the tested file replaces {', '.join(replaced)}"


@pytest.fixture(scope="module")
def impl(request: pytest.FixtureRequest) -> calling.Keeping:
    """The module under test, whose calls may change no argument. Fails with a message if there is none: the error that
    the file raises, with its line, or what it may not use."""
    from support.files import import_file

    chapter, student_folder = request.path.parent, request.config.option.copy
    folder = Path(student_folder).resolve() / chapter.name if student_folder else chapter
    path = folder / f"{request.config.option.impl}.py"
    if not path.exists():
        hint = ": your teacher may have it" if path.stem == "solution" else ""
        pytest.fail(f"there is no {path.name} in {path.parent}{hint}", pytrace=False)
    message = ""
    try:
        if names := borrowed_names(path, chapter, getattr(request.module, "GIVEN", ())):
            message = f"{path.name} uses {', '.join(sorted(names))}: write the exercises yourself"
        else:
            module = import_file(path)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        # a SyntaxError has a location of its own
        message = f'  File "{path}", line {lines[-1]}\n' if lines else ""
        message += "".join(traceback.format_exception_only(error))
    if message:
        pytest.fail(message, pytrace=False)
    return calling.Keeping(module)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Leave libraries' frames out of tracebacks, and keep the place of an exercise that isn't written yet."""
    if call.excinfo is not None:
        frames = call.excinfo.traceback
        own_frames = frames.filter(lambda entry: "site-packages" not in str(entry.path))
        call.excinfo.traceback = own_frames or frames
    report = yield
    if report.failed and call.excinfo.exconly().startswith("NotImplementedError: exercise "):
        last_frame = call.excinfo.traceback[-1]
        place = f"{last_frame.path.name}, line {last_frame.lineno + 1}"
        report.missing = f"{last_frame.frame.code.raw.co_qualname} ({place})"
        report.longrepr = f"{call.excinfo.value}: {report.missing} isn't written yet"
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count an exercise that isn't written yet as such: it fails, without a traceback."""
    return ("not written yet", "-", "NOT WRITTEN") if hasattr(report, "missing") else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the points of every exercise that was tested: all or none, or, of one in stages, a point for each stage
    that is right. Write them to a file, too, if one is given: what the tested code prints isn't there."""
    points = exercise_points()
    notes_by_exercise: dict[str, dict[int, str | None]] = {}  # by stage, what is wrong
    for outcome in ("not written yet", "failed", "error", "skipped", "passed", "deselected"):
        for report in terminalreporter.stats.get(outcome, []):
            name = next((name for name in points if name in getattr(report, "keywords", ())), None)
            if name is None or (outcome == "deselected" and name not in notes_by_exercise):
                continue  # the whole exercise is deselected
            stage, note = 0, ""
            if match := re.search(r"::test_stage_(\d+)_([^[]*)", report.nodeid):
                stage = int(match[1])
                note = f"next, stage {stage}: {match[2].replace('_', ' ')}"
            if outcome == "not written yet":
                note = f"{outcome}: {report.missing}"
            notes = notes_by_exercise.setdefault(name, {})
            if notes.get(stage) is None:
                notes[stage] = None if outcome == "passed" else note
    if not notes_by_exercise:
        return
    terminalreporter.section(f"points of {config.option.impl}.py")
    results = {}  # by exercise: points, of how many, and what is wrong
    for name in filter(notes_by_exercise.get, points):
        notes = notes_by_exercise[name]
        failures = [note for _, note in sorted(notes.items()) if note is not None]
        number = name.removeprefix("ex").replace("_", ".")
        earned = len(notes) - len(failures)
        if 0 in notes:  # without stages
            earned = 0 if failures else points[name]
        results[number] = earned, points[name], [*failures, ""][0]
        line = "  {:6} {:3} of {}   {}".format(number, *results[number])
        terminalreporter.write_line(line.rstrip())
    total, whole, _ = zip(*results.values(), strict=True)
    terminalreporter.write_line(f"  total  {sum(total):3} of {sum(whole)}")
    if config.option.points:
        Path(config.option.points).write_text(json.dumps(results), encoding="utf-8")
