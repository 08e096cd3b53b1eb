"""Which planted bugs does examine.py find, and does it name their cause? `python3 tests/examine_planted.py` measures it.

Each bug of a file that has a cache is planted in a process of its own, and what that file offers is examined; so is each
cache of mutants/unseen.py, right and with each fault of mutants/unseen.patch, in examine.py's small model. A bug is found
if a check is WRONG or BREAKS. mutants/examined.json and mutants/unseen.json hold, by what showed the bug, the diagnosis
and the checks; the causes that it is compared with stand beside the bugs. `--table` prints the table of
mutants/README.md from these.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
import torch  # noqa: E402

from examine import BAD, Subject, diagnose, examine, small_model  # noqa: E402
from tests.mutants import unseen  # noqa: E402
from tests.planted import Entry, read_entries, read_folder  # noqa: E402

FOLDER = ROOT / "tests" / "mutants"
RESULT = FOLDER / "examined.json"
UNSEEN_RESULT = FOLDER / "unseen.json"
SUBJECTS = {  # of borrow/examined.py, by the module that is changed; BCT's bugs have one of their own
    "gpt_kv_cache": ["gpt"],
    "gpt_bounded_cache": ["preallocated", "window", "sinks"],
    "llama_kv_cache": ["llama"],
    "compress": ["unrounded", "norms", "quantized"],
}
PLANTED = {name: bug for name, bug in read_folder(FOLDER).items() if bug.path.stem in SUBJECTS}
UNSEEN = {bug.name: bug for bug in read_entries(FOLDER / "unseen.patch")}
Shown = dict[str, dict[str, Any]]  # what showed a bug: the diagnosed cause, and the checks


def show_planted(name: str) -> Shown:
    bug = PLANTED[name]
    module = bug.path.stem
    path = ROOT / f"{module}.py"
    code = compile(bug.changed(path.read_text("utf-8")), name, "exec")
    spec = importlib.util.spec_from_loader(module, loader=None)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    sys.modules[module].__file__ = str(path)
    exec(code, sys.modules[module].__dict__)
    from borrow.examined import SUBJECTS as MADE

    subjects = ["bct"] if name.startswith("bct") else SUBJECTS[module]
    return shown({subject: MADE[subject][1] for subject in subjects})


def show_unseen(name: str) -> Shown:
    make = unseen.RIGHT.get(name) or faulty(name)
    return shown({"small": lambda: of(make)})


def faulty(name: str) -> type:
    """Return a class of mutants/unseen.py with a fault, whose name begins with that of the class."""
    text = (FOLDER / "unseen.py").read_text("utf-8")
    changed: dict[str, Any] = {}
    exec(compile(UNSEEN[name].changed(text), name, "exec"), changed)
    return changed[name.partition("_")[0].capitalize()]


def of(make: Callable[[], Any]) -> Subject:
    """Return a cache that says what it promises, in the small model."""
    cache = make()
    return Subject(small_model(), make, cache.window, cache.sinks, cache.capacity)


def shown(subjects: dict[str, Callable[[], Subject]]) -> Shown:
    found = {}
    for name, make in subjects.items():
        try:
            subject = make()
        except Exception as error:  # a bug may keep the model from being made
            found[name] = {"cause": "", "checks": [f"it can't be made ({type(error).__name__})"]}
            continue
        findings = [*examine(subject)]
        if diagnosis := diagnose(findings):
            bad = [finding.check for finding in findings if finding.verdict in BAD]
            found[name] = {"cause": diagnosis.cause, "checks": bad}
    return found


def forked(show: Callable[[str], Shown], name: str) -> Shown:
    """Return what a function returns in a process of its own."""
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        if (pid := os.fork()) == 0:
            torch.set_num_threads(1)
            answer.write_text(json.dumps(show(name)), "utf-8")
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(answer.read_text("utf-8"))


def measure(path: Path, names: Iterable[str], show: Callable[[str], Shown]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(forked, show, name) for name in names}
        text = json.dumps({name: each.result() for name, each in found.items()}, indent=1)
    path.write_text(f"{text}\n", "utf-8")


def table() -> str:
    """Return the table of mutants/README.md, and the bugs with a cause that are missed or called another."""
    lines = [
        "| | bugs | found | with a cause | found | cause right |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    misses = []
    for title, bugs, path in (("planted", PLANTED, RESULT), ("unseen", UNSEEN, UNSEEN_RESULT)):
        found = json.loads(path.read_text("utf-8"))
        right = []
        for bug in with_cause(bugs):
            said = [each["cause"] or "no cause" for each in found[bug.name].values()]
            if {*said} == {bug.cause}:
                right.append(bug)
            else:
                diagnosis = ", ".join(dict.fromkeys(said)) or "not found"
                misses.append(f"| {bug.name} | {bug.cause} | {diagnosis} |")
        all_found = sum(bool(found[name]) for name in bugs)
        caused = [bool(found[bug.name]) for bug in with_cause(bugs)]
        row = [title, len(bugs), all_found, len(caused), sum(caused), len(right)]
        lines.append(f"| {' | '.join(map(str, row))} |")
    alarms = [name for name in unseen.RIGHT if found[name]]
    rights = f"Right caches that are called wrong, of {len(unseen.RIGHT)}: {', '.join(alarms) or 'none'}."
    lines += ["", rights, "", "| bug | cause | diagnosis |", "|---|---|---|"]
    return "\n".join([*lines, *misses]) + "\n"


def with_cause(bugs: dict[str, Entry]) -> list[Entry]:
    return [bug for bug in bugs.values() if bug.cause]


if __name__ == "__main__":
    if "--table" not in sys.argv:
        measure(RESULT, PLANTED, show_planted)
        measure(UNSEEN_RESULT, [*unseen.RIGHT, *UNSEEN], show_unseen)
    print(table())
