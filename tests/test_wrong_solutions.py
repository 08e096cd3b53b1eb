"""Every wrong solution of chapters/wrong fails its exercise, with the words that are to help the student."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "chapters" / "wrong").glob("*.patch"))
pytestmark = pytest.mark.skipif(not PATCHES, reason="a copy without solutions")


def says(patch: Path) -> str:
    """Return what the message of the first test that fails must hold."""
    return patch.read_text(encoding="utf-8").splitlines()[1].removeprefix("# says: ")


def run_all(patches: list[Path], folder: Path) -> dict[str, tuple[int, str]]:
    """Return pytest's exit status and output for each patch: a forked process tests a student's copy with it."""
    from tests.test_mutants import mutated

    found = {}
    for patch in patches:
        chapter, exercise = patch.stem[:2], "_".join(patch.stem.split("_")[:2])
        name = next(ROOT.glob(f"chapters/{chapter}_*")).name
        copy, log = folder / patch.stem / name / "exercise.py", folder / f"{patch.stem}.log"
        copy.parent.mkdir(parents=True)
        copy.write_text(mutated(patch)[1], encoding="utf-8")
        pid = os.fork()
        if pid == 0:
            out = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            marker = "ex{}_{}".format(*map(int, exercise.split("_")))
            options = [
                "-x",
                "-p",
                "no:cacheprovider",
                f"--rootdir={ROOT}",
                f"--from={copy.parent.parent}",
            ]
            status = pytest.main([*options, "-m", marker, str(ROOT / "chapters" / name)])
            sys.stdout.flush()
            os._exit(status)
        found[patch.stem] = (
            os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
            log.read_text(encoding="utf-8"),
        )
    return found


def test_every_exercise_has_wrong_solutions() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in ROOT.glob("chapters/*/solution.py")
    )
    exercises = {
        "{:0>2}_{}".format(*match) for match in re.findall(r"# exercise (\d+)\.(\d+)", text)
    }
    tried = ["_".join(patch.stem.split("_")[:2]) for patch in PATCHES]
    few = {exercise: tried.count(exercise) for exercise in exercises if tried.count(exercise) < 2}
    assert few == {} and {*tried} == exercises


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_wrong_solution_fails_and_says_why(tmp_path: Path) -> None:
    halves = [PATCHES[::2], PATCHES[1::2]]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                str(tmp_path / f"{i}.json"),
                str(tmp_path / str(i)),
                *map(str, half),
            ],
            cwd=ROOT,
        )
        for i, half in enumerate(halves)
    ]
    assert [process.wait(timeout=1200) for process in running] == [0, 0]
    found = json.loads((tmp_path / "0.json").read_text()) | json.loads(
        (tmp_path / "1.json").read_text()
    )
    assert {
        name: status for name, (status, _) in found.items() if status != 1
    } == {}  # 0: passed; others: didn't run
    unsaid = {
        p.stem: found[p.stem][1]
        for p in PATCHES
        if says(p) not in re.sub(r"\s+", " ", found[p.stem][1])
    }
    assert unsaid == {}


if __name__ == "__main__":  # in a process of its own, which has not computed yet and can fork
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed
    pytest.main(
        ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "", str(ROOT / "chapters")]
    )  # imports all
    result, folder, *paths = map(Path, sys.argv[1:])
    result.write_text(json.dumps(run_all(paths, folder)))
