"""Chapter 9: a check finds every bug of its family, and accepts whatever is right."""

import ast
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chapters.checking import fail

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("zoo", HERE / "zoo.py")
zoo = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)

GIVEN = ("gpt_baseline",)


@pytest.fixture(autouse=True)
def _the_same_every_time() -> Iterator[None]:
    """Memory that nobody has written holds the same numbers in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def functions(text: str) -> dict[str, str]:
    """The functions of a file, and its methods as Class.method, without comments."""
    nodes, found = [("", node) for node in ast.parse(text).body], {}
    for prefix, node in nodes:
        if isinstance(node, ast.ClassDef):
            nodes += [(f"{node.name}.", member) for member in node.body]
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = ast.unparse(node)
    return found


@pytest.mark.ex9_1
def test_suspects(impl: ModuleType) -> None:
    named, file = impl.suspects(), "gpt_kv_cache.py"
    letters = sorted(zoo.SPECIMENS)
    assert sorted(named) == letters, f"the reports are {letters}"
    text = (zoo.ROOT / file).read_text(encoding="utf-8")
    original, right = functions(text), 0
    for letter, name in named.items():
        if name not in original:
            fail(f"{name} is no `def` of {file}; of which is it a second name?")
        right += functions(zoo.suspect(letter).changed(text))[name] != original[name]
    if right < len(letters):
        fail(f"{right} of {len(letters)} are right")


# The bugs of tests/mutants that each check has to find. Further ones, and modules that are right though written
# differently, are in this folder: their names begin with the kind, or with "right".
KNOWN = {
    "chunks": "kv_causal_with_cached_keys kv_mask_of_the_chunk_only kv_mask_sees_only_old "
    "kv_single_query_is_causal kv_position_starts_over",
    "state": "kv_failed_pass_stays kv_commits_too_early kv_clone_shares_memory kv_bounds_of_the_chunk_only "
    "kv_truncate_forgets_the_positions kv_truncate_keeps_the_memory",
    "ring": " ".join(name for name in zoo.BUGS if name.startswith("ring")),
    "generate": "kv_reads_everything_again kv_feeds_the_last_token_only kv_forgotten_reset",
}
# What check_ring isn't asked for: gradients, and NaN in a slot that is hidden.
OTHERS = "ring_keeps_the_graph ring_writes_in_place_in_training ring_reads_what_nobody_sees"


def cases() -> Iterator[object]:
    planted = zoo.planted.read_folder(HERE)
    for number, (kind, known) in enumerate(KNOWN.items(), start=2):
        own = [bug for bug in planted.values() if bug.name.startswith((kind, "right"))]
        for bug in [*(zoo.BUGS[name] for name in known.split() if name not in OTHERS), *own]:
            if kind != "ring" or bug.path.stem == "gpt_bounded_cache":
                case = f"check_{kind}", bug.why, bug
                mark = getattr(pytest.mark, f"ex9_{number}")
                yield pytest.param(*case, id=f"{kind}: {bug.why}", marks=mark)


CASES = [*cases()]


# In another order each time: a check can't go by how often it was called.
@pytest.mark.parametrize(("check", "name", "bug"), random.sample(CASES, len(CASES)))
def test_check(impl: ModuleType, check: str, name: str, bug: object) -> None:
    is_right = bug.name.startswith("right")
    try:
        getattr(impl, check)(zoo.mutant(bug))
    except NotImplementedError:
        raise
    except Exception as error:  # a failed assertion, or the module itself
        if is_right:
            fail(f"{check} refuses a module that is right: {name}. {error}")
    else:
        if not is_right:
            fail(f"{check} doesn't find this: {name}")
