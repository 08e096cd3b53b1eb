"""Which check of examine.py finds which planted bug? `python3 tests/examine_planted.py` writes mutants/examined.json.

Each bug of a file that has a cache is planted in a process of its own, and what that file offers is examined: a bug is
found if a check is WRONG.
"""

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
import torch  # noqa: E402

from tests.planted import read_folder  # noqa: E402

FOLDER = ROOT / "tests" / "mutants"
RESULT = FOLDER / "examined.json"
SUBJECTS = {  # of borrow/examined.py, by the module that is changed
    "gpt_kv_cache": ["gpt"],
    "gpt_bounded_cache": ["preallocated", "window", "sinks", "bct"],
    "llama_kv_cache": ["llama"],
    "compress": ["unrounded", "norms", "quantized"],
}


def found_by(name: str) -> list[str]:
    """Return the checks that are wrong with a bug, each with the subject that showed it."""
    bug = read_folder(FOLDER)[name]
    module = bug.path.stem
    path = ROOT / f"{module}.py"
    code = compile(bug.changed(path.read_text("utf-8")), name, "exec")
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        if (pid := os.fork()) == 0:
            spec = importlib.util.spec_from_loader(module, loader=None)
            sys.modules[module] = importlib.util.module_from_spec(spec)
            sys.modules[module].__file__ = str(path)
            exec(code, sys.modules[module].__dict__)
            answer.write_text(json.dumps(wrong_checks(SUBJECTS[module])), "utf-8")
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(answer.read_text("utf-8"))


def wrong_checks(subjects: list[str]) -> list[str]:
    import examine
    from borrow.examined import SUBJECTS as MADE

    torch.set_num_threads(1)
    wrong = []
    for name in subjects:
        make = MADE[name][1]
        try:
            subject = make()
        except Exception as error:  # a bug may keep the model from being made
            return [f"{name}: it can't be made ({type(error).__name__})"]
        for finding in examine.examine(subject):
            if finding.verdict in examine.BAD:
                wrong.append(f"{name}: {finding.check}")
    return wrong


def main() -> None:
    bugs = [name for name, bug in read_folder(FOLDER).items() if bug.path.stem in SUBJECTS]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(bugs, pool.map(found_by, bugs), strict=True))
    RESULT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    n_found = sum(map(bool, found.values()))
    print(f"{n_found} of {len(found)} bugs are found; not:")
    print("\n".join(name for name, checks in found.items() if not checks))


if __name__ == "__main__":
    main()
