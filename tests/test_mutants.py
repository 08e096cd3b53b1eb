"""The suite kills every one-line bug of tests/mutants: a mutant that survives is a test that is missing."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, too
from tests.planted import read_folder, read_killers, record_killers

ROOT = Path(__file__).resolve().parent.parent

FOLDER = ROOT / "tests" / "mutants"
BUGS = read_folder(FOLDER)
MEANING = {1: "killed", 0: "survived"}
SUITES = {
    "borrow.adapter": ["test_borrow.py"],
    "borrow.transformers_cache": ["test_transformers_cache.py", "test_examine.py"],
    "gpt_baseline": ["test_equivalence.py"],
    "gpt_kv_cache": ["test_kv_cache.py", "test_equivalence.py", "test_examine.py"],
    "gpt_bounded_cache": ["test_bounded_cache.py", "test_kv_cache.py", "test_examine.py"],
    "llama_kv_cache": ["test_llama.py", "test_examine.py"],
    "formats.configs": ["test_llama.py"],
    "paged": ["test_paged.py"],
    "speculate": ["test_speculate.py"],
    "compress": ["test_compress.py", "test_examine.py"],
    "formats.products": ["test_products.py", "test_load_gpt2_weights.py"],
}
# Which tests of these are enough, by the longest beginning of the mutant's name: to be quick.
ENOUGH = {
    "": "",
    "adapter": "not bare_run and not page",
    "bct": "bct or memory or form or any_feeding",
    "bct_empty": "what_is_empty",
    "bct_keeps": "bytes",
    "bct_takes": "refused",
    "cached": "not bare_run and not each_check",
    "compress": "not bare_run and not each_check",
    "kv_feeds": "full_hit",
    "kv_forgotten": "past_the_context",
    "kv_reads": "warm",
    "layout": "dtype or onednn or converted",
    "llama": "transformers or window or halves or bfloat16",
    "loader": "one_sentence",
    "products": "product or text",
    "paged": "not bare_run and not serve_continues and not bad_input",
    "ring": "window or ring or any_feeding or plain_causal",
    "preallocated": "preallocated",
    "ring_checks": "refused",
    "ring_clone": "clone",
    "ring_failed": "any_feeding",
    "ring_keeps": "gradients",
    "ring_reads": "any_feeding",
    "ring_truncates": "full_ring",
    "ring_without": "full_ring",
    "ring_writes_in_place": "gradients",
    "speculate": "(draft or distribution or chance) and not bare_run",
}


class FailedTest:
    """Writes the name of the test that failed to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.path.write_text(report.nodeid, "utf-8")


def run_each(names: list[str]) -> dict[str, tuple[int, str]]:
    """Return pytest's exit status for each bug, and the name of the test that killed it. First to
    be tried is the test that killed it before; if it doesn't, all tests that are enough are run."""
    results = {}
    killers = read_killers(FOLDER)
    for name in names:
        module = BUGS[name].path.stem
        tests = [str(ROOT / "tests" / file) for file in SUITES[module]]
        longest = max((start for start in ENOUGH if name.startswith(start)), key=len)
        if name in killers:
            results[name] = run_changed(name, [str(ROOT / killers[name])])
        if name not in killers or results[name][0] != 1:
            results[name] = run_changed(name, ["-k", ENOUGH[longest], *tests])
    return results


def preload() -> None:
    """Import what the tests import, and forget what of it is ours: a fork then imports that alone anew."""
    files = {str(ROOT / "tests" / file) for suite in SUITES.values() for file in suite}
    pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files])
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401  it imports lazily

    for name, module in [*sys.modules.items()]:
        place = getattr(module, "__file__", None) or str(getattr(module, "__path__", ""))
        if name != "__main__" and str(ROOT) in place and "site-packages" not in place:
            del sys.modules[name]


def file_of(module: str) -> Path:
    """Return the path of a module, such as support.store."""
    return ROOT / f"{module.replace('.', '/')}.py"


def run_changed(name: str, arguments: list[str]) -> tuple[int, str]:
    """Return pytest's exit status for a bug, and the name of the test that failed: a forked process
    tests a module of the changed text.

    Forked, since to import PyTorch takes longer than to kill a mutant.
    """
    module = BUGS[name].path.stem
    path = file_of(module)
    text = BUGS[name].changed(path.read_text("utf-8"))
    code = compile(text, name, "exec")  # before the fork: a child that fails counts as killed
    with TemporaryDirectory() as folder:
        failed = Path(folder) / "failed"
        failed.touch()
        pid = os.fork()
        if pid == 0:
            spec = importlib.util.spec_from_loader(module, loader=None)
            sys.modules[module] = importlib.util.module_from_spec(spec)
            sys.modules[module].__file__ = str(path)
            exec(code, sys.modules[module].__dict__)
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
            os._exit(pytest.main([*options, *arguments], plugins=[FailedTest(failed)]))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, failed.read_text("utf-8")


def test_there_are_bugs_of_every_file_and_each_fits_it() -> None:
    assert {bug.path.stem for bug in BUGS.values()} == set(SUITES)
    for bug in BUGS.values():
        text = file_of(bug.path.stem).read_text("utf-8")
        assert bug.why and bug.changed(text) != text


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_suite_kills_every_mutant(tmp_path: Path) -> None:
    from tests.helpers import in_halves  # which imports what is mutated

    results = in_halves(__file__, [*BUGS], tmp_path)
    # 0: it survives; others: its tests didn't run
    assert {name: status for name, (status, _) in results.items() if status != 1} == {}
    assert len(results) == len(BUGS)


if __name__ == "__main__":  # in a process of its own, which has not computed yet and can fork
    parser = argparse.ArgumentParser(description="Test planted bugs, by their names.")
    parser.add_argument("names", nargs="+", choices=BUGS, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are written")
    parser.add_argument("--record", action="store_true", help="record which tests killed them")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed
    preload()
    results = run_each(args.names)
    for name, (status, test) in results.items():
        print(f"{name}: {status} ({MEANING.get(status, 'its tests did not run')}) {test}".rstrip())
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.record:
        record_killers(FOLDER, {name: test for name, (_, test) in results.items()})
