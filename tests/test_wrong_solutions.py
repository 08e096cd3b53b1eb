"""Every wrong solution of chapters/wrong fails its exercise, with the words that are to help the student."""

import gc
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "chapters" / "wrong").glob("*.patch"))
pytestmark = pytest.mark.skipif(not PATCHES, reason="a copy without solutions")


def says(patch: Path) -> str:
    """Return what the message of the test that fails must hold."""
    return patch.read_text(encoding="utf-8").splitlines()[1].removeprefix("# says: ")


def is_of_case(item: pytest.Item, words: str) -> bool:
    """Say whether a test was given a name with which the words end."""
    return hasattr(item, "callspec") and words.endswith(item.callspec.params.get("name", "-"))


class Trial:
    """Collects the chapters' tests once; then, in place of them, a forked process for each wrong solution runs those of
    its exercise on a student's copy, until one fails."""

    def __init__(self, patches: list[Path], folder: Path) -> None:
        self.patches, self.folder = patches, folder
        self.found: dict[str, tuple[int, str]] = {}
        self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.said = report.longreprtext

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # what exists by now needs no collecting in each of the processes
        for patch in self.patches:
            log = self.folder / f"{patch.stem}.log"
            pid = os.fork()
            if pid == 0:
                os._exit(self.status(patch, session, log))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.found[patch.stem] = status, log.read_text(encoding="utf-8")
        return True

    def status(self, patch: Path, session: pytest.Session, log: Path) -> int:
        """Return 1 if a test fails, 0 if none does, 5 if there is none; leave in a file what the test says."""
        chapter, exercise, *_ = patch.stem.split("_")
        name = next(ROOT.glob(f"chapters/{chapter}_*")).name
        copy = self.folder / patch.stem
        (copy / name).mkdir(parents=True)
        (copy / name / "exercise.py").write_text(mutated(patch)[1], encoding="utf-8")
        session.config.option.copy = str(copy)
        marker = f"ex{int(chapter)}_{exercise}"
        items = [item for item in session.items if item.get_closest_marker(marker)]
        items.sort(key=lambda item: not is_of_case(item, says(patch)))  # others take long, and pass
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.said:
                break
        log.write_text(self.said, encoding="utf-8")
        if not items:
            return 5
        return 1 if self.said else 0


def test_every_exercise_has_wrong_solutions() -> None:
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("chapters/*/solution.py")]
    exercises = re.findall(r"# exercise (\d+)\.(\d+)", "\n".join(texts))
    tried = Counter(patch.stem[:4] for patch in PATCHES)
    assert {*tried} == {f"{chapter:0>2}_{number}" for chapter, number in exercises}
    assert [name for name, count in tried.items() if count < 2] == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_wrong_solution_fails_and_says_why(tmp_path: Path) -> None:
    from tests.helpers import in_halves

    found = in_halves(__file__, PATCHES, tmp_path)
    # 0: it passed; others: its tests didn't run
    assert {name: status for name, (status, _) in found.items() if status != 1} == {}
    said = {name: " ".join(words.split()) for name, (_, words) in found.items()}
    assert {p.stem: said[p.stem] for p in PATCHES if says(p) not in said[p.stem]} == {}


if __name__ == "__main__":  # in a process of its own, which has not computed yet and can fork
    sys.path.insert(0, str(ROOT))
    import torch

    from tests.test_mutants import mutated

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # imports much, once here instead of in every process
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed
    result, *paths = map(Path, sys.argv[1:])
    folder = result.with_suffix("")
    folder.mkdir()
    trial = Trial(paths, folder)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-m", ""]
    pytest.main([*options, str(ROOT / "chapters")], plugins=[trial])
    result.write_text(json.dumps(trial.found))
