"""Which planted bugs does examine.py find, and does it name their cause? `python3 tests/examine_planted.py` measures it.

Each bug of a file that has a cache is planted in a process of its own, and what that file offers is examined; so is each
class of mutants/unseen.py, in examine.py's small model. A bug is found if a check is WRONG or BREAKS.
mutants/examined.json and mutants/unseen.json hold, by what showed the bug, the diagnosis and the checks; the labels that
it is compared with stand beside the bugs. `--table` prints the table of mutants/README.md from these.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
import torch  # noqa: E402

from examine import BAD, Subject, diagnose, examine, small_model  # noqa: E402
from tests.mutants import unseen  # noqa: E402
from tests.planted import Entry, read_folder  # noqa: E402

FOLDER = ROOT / "tests" / "mutants"
RESULT = FOLDER / "examined.json"
UNSEEN_RESULT = FOLDER / "unseen.json"
SUBJECTS = {  # of borrow/examined.py, by the module that is changed; BCT's bugs have one of their own
    "gpt_kv_cache": ["gpt"],
    "gpt_bounded_cache": ["preallocated", "window", "sinks"],
    "llama_kv_cache": ["llama"],
    "compress": ["unrounded", "norms", "quantized"],
}
SECONDS = 60  # for a check of a cache that may never answer
Shown = dict[str, dict[str, Any]]  # what showed a bug: the diagnosed cause, and the checks


def examined_bugs() -> dict[str, Entry]:
    return {name: bug for name, bug in read_folder(FOLDER).items() if bug.path.stem in SUBJECTS}


def found_by(name: str) -> Shown:
    """Return what shows a planted bug; nothing, if it isn't found."""
    bug = read_folder(FOLDER)[name]
    module = bug.path.stem
    path = ROOT / f"{module}.py"
    code = compile(bug.changed(path.read_text("utf-8")), name, "exec")

    def show() -> Shown:
        spec = importlib.util.spec_from_loader(module, loader=None)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        sys.modules[module].__file__ = str(path)
        exec(code, sys.modules[module].__dict__)
        from borrow.examined import SUBJECTS as MADE

        subjects = ["bct"] if name.startswith("bct") else SUBJECTS[module]
        return shown({subject: MADE[subject][1] for subject in subjects})

    return forked(show)


def found_in(name: str) -> Shown:
    """Return what shows the fault of a class of mutants/unseen.py."""
    each = getattr(unseen, name)
    if each.cause == "":
        return shown_by_command(name)
    limits = (each.window, each.sinks, each.capacity)
    return forked(lambda: shown({"small": lambda: Subject(small_model(), each, *limits)}))


def forked(show: Callable[[], Shown]) -> Shown:
    """Return what a function returns in a process of its own."""
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        if (pid := os.fork()) == 0:
            torch.set_num_threads(1)
            answer.write_text(json.dumps(show()), "utf-8")
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(answer.read_text("utf-8"))


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


def shown_by_command(name: str) -> Shown:
    """Return what the command line says of a class that ends its process, or never answers."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cache.py"
        file.write_text(f"from tests.mutants.unseen import {name} as Cache\n", "utf-8")
        done = subprocess.run(
            [sys.executable, "examine.py", str(file), "--json", "--seconds", str(SECONDS)],
            stdout=subprocess.PIPE,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    record = json.loads(done.stdout)
    bad = [found["check"] for found in record["findings"] if found["verdict"] in BAD]
    return {"command": {"cause": record["diagnosis"]["cause"], "checks": bad}} if bad else {}


def measure(path: Path, names: list[str], show: Callable[[str], Shown]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(show, names), strict=True))
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def labels() -> dict[str, str | None]:
    """Return the causes that were written down, by bug and by class; None: a right cache."""
    planted = {name: bug.cause for name, bug in examined_bugs().items()}
    return planted | {each.__name__: each.cause for each in unseen.caches()}


def right(label: str | None, found: Shown) -> bool:
    """Return whether each subject that shows a bug gets the cause that it is labelled with."""
    return bool(found) and all(each["cause"] == label for each in found.values())


def table() -> str:
    """Return the table of mutants/README.md, and the bugs with a cause that are missed or called another."""
    lines = [
        "| | bugs | found | with a cause | found | cause right |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    label, misses = labels(), []
    for title, path in (("planted", RESULT), ("unseen", UNSEEN_RESULT)):
        found = json.loads(path.read_text("utf-8"))
        bugs = [name for name in found if label[name] is not None]
        caused = [name for name in bugs if label[name]]
        counts = Counter(
            found=sum(bool(found[name]) for name in bugs),
            caused=sum(bool(found[name]) for name in caused),
            right=sum(right(label[name], found[name]) for name in caused),
        )
        row = [title, len(bugs), counts["found"], len(caused), counts["caused"], counts["right"]]
        lines.append(f"| {' | '.join(map(str, row))} |")
        for name in caused:
            if not right(label[name], found[name]):
                said = [each["cause"] or "no cause" for each in found[name].values()]
                misses.append(
                    f"| {name} | {label[name]} | {', '.join(dict.fromkeys(said)) or 'not found'} |"
                )
    rights = [name for name in found if label[name] is None]
    alarms = [name for name in rights if found[name]]
    lines += [
        "",
        f"Right caches that are called wrong, of {len(rights)}: {', '.join(alarms) or 'none'}.",
    ]
    return "\n".join([*lines, "", "| bug | cause | diagnosis |", "|---|---|---|", *misses]) + "\n"


def main() -> None:
    if "--table" not in sys.argv:
        measure(RESULT, [*examined_bugs()], found_by)
        measure(UNSEEN_RESULT, [each.__name__ for each in unseen.caches()], found_in)
    print(table())


if __name__ == "__main__":
    main()
