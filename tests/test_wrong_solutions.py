"""Every wrong solution of chapters/wrong fails its exercise, with the words that are to help the student."""

import argparse
import gc
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, too
from tests.planted import Entry, read_folder, read_killers, record_killers

ROOT = Path(__file__).resolve().parent.parent

FOLDER = ROOT / "chapters" / "wrong"
WRONG = read_folder(FOLDER)
MEANING = {1: "fails, as it has to", 0: "passes"}
pytestmark = pytest.mark.skipif(not WRONG, reason="a copy without solutions")


def is_of_case(item: pytest.Item, words: str) -> bool:
    """Say whether a test was given a name with which the words end."""
    return hasattr(item, "callspec") and words.endswith(item.callspec.params.get("name", "-"))


class Trial:
    """Collects the chapters' tests once; then, in place of them, a forked process for each wrong solution runs those of
    its exercise on a student's copy, until one fails."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.results: dict[str, tuple[int, str, str]] = {}  # by name: status, test, message
        self.test, self.message = "", ""  # of the first test that failed
        self.killers = read_killers(FOLDER)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test, self.message = report.nodeid, report.longreprtext

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # what exists by now needs no collecting in each of the processes
        for name in self.names:
            log = self.folder / f"{name}.log"
            pid = os.fork()
            if pid == 0:
                os._exit(self.status(WRONG[name], session, log))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            test, message = log.read_text(encoding="utf-8").split("\n", maxsplit=1)
            self.results[name] = status, test, message
        return True

    def status(self, wrong: Entry, session: pytest.Session, log: Path) -> int:
        """Return 1 if a test fails, 0 if none does, 5 if there is none; leave in a file what the test says."""
        number, exercise, *_ = wrong.name.split("_")
        chapter = wrong.path.stem
        solution = (ROOT / "chapters" / chapter / "solution.py").read_text(encoding="utf-8")
        copy = self.folder / wrong.name
        (copy / chapter).mkdir(parents=True)
        (copy / chapter / "exercise.py").write_text(wrong.changed(solution), encoding="utf-8")
        session.config.option.copy = str(copy)
        marker = f"ex{int(number)}_{exercise}"
        items = [item for item in session.items if item.get_closest_marker(marker)]
        killer = self.killers.get(wrong.name)
        # others take long, and pass
        items.sort(key=lambda item: (item.nodeid != killer, not is_of_case(item, wrong.says)))
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.message:
                break
        log.write_text(f"{self.test}\n{self.message}", encoding="utf-8")
        if not items:
            return 5
        return 1 if self.message else 0


def test_every_exercise_has_wrong_solutions() -> None:
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("chapters/*/solution.py")]
    exercises = re.findall(r"# exercise (\d+)\.(\d+)", "\n".join(texts))
    tried = Counter(name[:4] for name in WRONG)
    assert {*tried} == {f"{chapter:0>2}_{number}" for chapter, number in exercises}
    assert [exercise for exercise, count in tried.items() if count < 3] == []


def test_every_wrong_solution_fits_its_chapter() -> None:
    for name, wrong in WRONG.items():
        solution = (ROOT / "chapters" / wrong.path.stem / "solution.py").read_text(encoding="utf-8")
        assert name[:2] == wrong.path.stem[:2] and wrong.why and wrong.says, name
        assert wrong.changed(solution) != solution, name


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_wrong_solution_fails_and_says_why(tmp_path: Path) -> None:
    from tests.helpers import in_halves

    results = in_halves(__file__, [*WRONG], tmp_path)
    # 0: it passed; others: its tests didn't run
    assert {name: status for name, (status, *_) in results.items() if status != 1} == {}
    messages = {name: " ".join(message.split()) for name, (*_, message) in results.items()}
    assert {n: messages[n] for n, wrong in WRONG.items() if wrong.says not in messages[n]} == {}


if __name__ == "__main__":  # in a process of its own, which has not computed yet and can fork
    parser = argparse.ArgumentParser(description="Test wrong solutions, by their names.")
    parser.add_argument("names", nargs="+", choices=WRONG, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are written")
    parser.add_argument("--record", action="store_true", help="record which tests failed")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # imports much, once here instead of in every process
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-m", ""]
    with TemporaryDirectory() as folder:
        trial = Trial(args.names, Path(folder))
        pytest.main([*options, str(ROOT / "chapters")], plugins=[trial])
    for name, (status, test, message) in trial.results.items():
        print(f"{name}: {MEANING.get(status, 'its tests did not run')} {test}\n{message}")
    if args.json:
        args.json.write_text(json.dumps(trial.results))
    if args.record:
        record_killers(FOLDER, {name: test for name, (_, test, _) in trial.results.items()})
