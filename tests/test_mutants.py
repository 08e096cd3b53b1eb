"""The suite kills every one-line bug of tests/mutants: a mutant that survives is a test that is missing."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
SUITES = {
    "gpt_baseline": ["test_equivalence.py"],
    "gpt_kv_cache": ["test_kv_cache.py", "test_equivalence.py"],
    "gpt_bounded_cache": ["test_bounded_cache.py", "test_kv_cache.py"],
    "llama_kv_cache": ["test_llama.py"],
    "paged": ["test_paged.py"],
    "speculate": ["test_speculate.py"],
    "compress": ["test_compress.py"],
}
# Which tests of these are enough, by the longest beginning of the mutant's name: to be quick.
ENOUGH = {
    "": "",
    "bct": "bct or memory or form or any_feeding",
    "bct_empty": "what_is_empty",
    "bct_keeps": "bytes",
    "bct_takes": "refused",
    "compress": "not bare_run",
    "kv_feeds": "full_hit",
    "kv_forgotten": "past_the_context",
    "kv_reads": "warm",
    "llama": "transformers or window or halves or bfloat16",
    "paged": "not bare_run and not serve_continues and not bad_input",
    "ring": "window or ring or any_feeding or plain_causal",
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


def mutated(patch: Path) -> tuple[str, str]:
    """Return the name of the module that a patch changes, and its text after that. Raises ValueError if it is stale."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    name = next(line for line in lines if line.startswith("--- ")).removeprefix("--- ").strip()
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("@@")) + 1 :]
    old = "".join(f"{line[1:]}\n" for line in body if line[:1] in " -")
    new = "".join(f"{line[1:]}\n" for line in body if line[:1] in " +")
    text = (ROOT / name).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(
            f"{patch.name} doesn't fit {name}: what it replaces is there {text.count(old)} times"
        )
    return Path(name).stem, text.replace(old, new)


def run_all(patches: list[Path]) -> dict[str, int]:
    """Return pytest's exit status for each patch: a forked process tests a module of the patched text.

    Forked, since to import PyTorch takes longer than to kill a mutant.
    """
    statuses = {}
    for patch in patches:
        pid = os.fork()
        if pid == 0:
            module, text = mutated(patch)
            spec = importlib.util.spec_from_loader(module, loader=None)
            sys.modules[module] = importlib.util.module_from_spec(spec)
            exec(compile(text, f"{patch.name}", "exec"), sys.modules[module].__dict__)
            tests = [str(ROOT / "tests" / name) for name in SUITES[module]]
            longest = max((name for name in ENOUGH if patch.stem.startswith(name)), key=len)
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
            os._exit(pytest.main([*options, "-k", ENOUGH[longest], *tests]))
        statuses[patch.stem] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return statuses


def test_there_are_mutants_of_every_file() -> None:
    modules = [mutated(patch)[0] for patch in PATCHES]
    assert set(modules) == set(SUITES)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_suite_kills_every_mutant(tmp_path: Path) -> None:
    from tests.helpers import in_halves  # which imports what is mutated

    statuses = in_halves(__file__, PATCHES, tmp_path)
    # 0: it survives; others: its tests didn't run
    assert {name: status for name, status in statuses.items() if status != 1} == {}
    assert len(statuses) == len(PATCHES)


if __name__ == "__main__":  # in a process of its own, which has not computed yet and can fork
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    result, *paths = map(Path, sys.argv[1:])
    result.write_text(json.dumps(run_all(paths)))
