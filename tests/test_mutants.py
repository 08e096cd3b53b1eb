"""The suite kills every one-line bug of tests/mutants: a mutant that survives is a test that is missing."""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, too
from tests.planted import read_folder, read_killers, record_killers

ROOT = Path(__file__).resolve().parent.parent

FOLDER = ROOT / "tests" / "mutants"
BUGS = read_folder(FOLDER)
MEANING = {1: "killed", 0: "survived"}
OPTIONS = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--assert=plain", "--tb=no"]
SUITES = {
    "borrow.adapter": ["test_borrow.py"],
    "borrow.transformers_cache": ["test_transformers_cache.py", "test_examine.py"],
    "gpt_baseline": ["test_equivalence.py"],
    "gpt_kv_cache": ["test_kv_cache.py", "test_equivalence.py", "test_examine.py"],
    "gpt_bounded_cache": ["test_bounded_cache.py", "test_kv_cache.py", "test_examine.py"],
    "llama_kv_cache": ["test_llama.py", "test_examine.py"],
    "formats.configs": ["test_llama.py"],
    "formats.tensors": ["test_hybrid_files.py"],
    "paged": ["test_paged.py", "test_kinds_in_methods.py"],
    "speculate": ["test_speculate.py", "test_kinds_in_methods.py"],
    "compress": ["test_compress.py", "test_examine.py"],
    "formats.products": ["test_products.py", "test_load_gpt2_weights.py"],
}


class FailedTest:
    """Remembers the name of the test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = report.nodeid


def preload() -> None:
    """Import what the tests import, and forget what of it is ours: a fork then imports that alone anew."""
    files = {str(ROOT / "tests" / file) for suite in SUITES.values() for file in suite}
    pytest.main(["--collect-only", "-qq", *OPTIONS, *files])
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401  it imports lazily

    for name, module in [*sys.modules.items()]:
        place = getattr(module, "__file__", None) or str(getattr(module, "__path__", ""))
        if name != "__main__" and str(ROOT) in place and "site-packages" not in place:
            del sys.modules[name]
    gc.freeze()  # pytest looks through all that is there when it ends


def file_of(module: str) -> Path:
    """Return the path of a module, such as support.store."""
    return ROOT / f"{module.replace('.', '/')}.py"


def try_bug(name: str) -> tuple[int, str]:
    """Return pytest's exit status for a module of the changed text, and the name of the test that
    killed the bug. First to be tried is the test that killed it before; if it doesn't, all tests
    of the module's suite are run."""
    module = BUGS[name].path.stem
    path = file_of(module)
    text = BUGS[name].changed(path.read_text("utf-8"))
    spec = importlib.util.spec_from_loader(module, loader=None)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    sys.modules[module].__file__ = str(path)
    exec(compile(text, name, "exec"), sys.modules[module].__dict__)
    failed, status = FailedTest(), pytest.ExitCode.OK
    killer = read_killers(FOLDER).get(name)
    if killer:
        status = pytest.main(["-x", *OPTIONS, str(ROOT / killer)], plugins=[failed])
    if status != pytest.ExitCode.TESTS_FAILED:
        tests = [str(ROOT / "tests" / file) for file in SUITES[module]]
        status = pytest.main(["-x", *OPTIONS, *tests], plugins=[failed])
    return int(status), failed.name


def test_there_are_bugs_of_every_file_and_each_fits_it() -> None:
    assert {bug.path.stem for bug in BUGS.values()} == set(SUITES)
    for bug in BUGS.values():
        text = file_of(bug.path.stem).read_text("utf-8")
        assert bug.why and bug.changed(text) != text


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_suite_kills_every_mutant(tmp_path: Path) -> None:
    path = tmp_path / "results.json"  # of a process which has not computed yet and can fork
    subprocess.run([sys.executable, __file__, *BUGS, "--json", path], check=True, timeout=1200)
    results = json.loads(path.read_text("utf-8"))
    # 0: it survives; others: its tests didn't run
    assert {name: status for name, (status, _) in results.items() if status != 1} == {}
    assert len(results) == len(BUGS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Test planted bugs, by their names.")
    parser.add_argument("names", nargs="+", choices=BUGS, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are written")
    parser.add_argument("--record", action="store_true", help="record which tests killed them")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed
    preload()
    # A fork for each bug, since to import PyTorch takes longer than to kill one.
    with get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        results = dict(zip(args.names, pool.map(try_bug, args.names, 1), strict=True))
    for name, (status, test) in results.items():
        print(f"{name}: {status} ({MEANING.get(status, 'its tests did not run')}) {test}".rstrip())
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.record:
        record_killers(FOLDER, {name: test for name, (_, test) in results.items()})
