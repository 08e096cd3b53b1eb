"""Chapter 9: a check finds every bug of its family, and accepts whatever is right."""

import ast
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
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
            fail(f"{name} is no `def` of {file}; if it is a second name, of which?")
        right += functions(zoo.suspect(letter).changed(text))[name] != original[name]
    if right < len(letters):
        fail(f"{right} of {len(letters)} are right")


# Beside bugs of tests/mutants, a check has to find those in this folder whose names begin with its kind, and to accept
# the modules that are right, though written differently.
OWN = zoo.planted.read_folder(HERE).values()
# What check_ring isn't asked for: gradients, and NaN in a slot that is hidden.
OTHERS = "ring_keeps_the_graph ring_writes_in_place_in_training ring_reads_what_nobody_sees"
RINGS = " ".join(name for name in zoo.BUGS if name.startswith("ring") and name not in OTHERS)


def cases(kind: str, known: str, *files: str) -> list[object]:
    """What a check has to find or to accept, in another order each time: it can't go by how often it was called."""
    own = [bug for bug in OWN if bug.name.startswith((kind, "right")) and bug.path.stem in files]
    bugs = [*(zoo.BUGS[name] for name in known.split()), *own]
    return [pytest.param(bug.why, bug, id=bug.why) for bug in random.sample(bugs, len(bugs))]


def judge(check: Callable[[ModuleType], object], name: str, bug: object) -> None:
    is_right = bug.name.startswith("right")
    try:
        check(zoo.mutant(bug))
    except NotImplementedError:
        raise
    except Exception as error:  # a failed assertion, or the module itself
        if is_right:
            fail(f"{check.__name__} refuses a module that is right: {name}. {error}")
    else:
        if not is_right:
            fail(f"{check.__name__} doesn't find this: {name}")


BOTH = "gpt_kv_cache", "gpt_bounded_cache"
MASKS = "kv_causal_with_cached_keys kv_mask_of_the_chunk_only kv_mask_sees_only_old kv_single_query_is_causal"
STATES = "kv_failed_pass_stays kv_commits_too_early kv_clone_shares_memory kv_truncate_forgets_the_positions"
STATES += " kv_truncate_keeps_the_memory kv_bounds_of_the_chunk_only"
READS = "kv_reads_everything_again kv_feeds_the_last_token_only kv_forgotten_reset"


@pytest.mark.ex9_2
@pytest.mark.parametrize(
    ("name", "bug"), cases("chunks", f"{MASKS} kv_position_starts_over", *BOTH)
)
def test_check_chunks(impl: ModuleType, name: str, bug: object) -> None:
    judge(impl.check_chunks, name, bug)


@pytest.mark.ex9_3
@pytest.mark.parametrize(("name", "bug"), cases("state", STATES, *BOTH))
def test_check_state(impl: ModuleType, name: str, bug: object) -> None:
    judge(impl.check_state, name, bug)


@pytest.mark.ex9_4
@pytest.mark.parametrize(("name", "bug"), cases("ring", RINGS, "gpt_bounded_cache"))
def test_check_ring(impl: ModuleType, name: str, bug: object) -> None:
    judge(impl.check_ring, name, bug)


@pytest.mark.ex9_5
@pytest.mark.parametrize(("name", "bug"), cases("generate", READS, *BOTH))
def test_check_generate(impl: ModuleType, name: str, bug: object) -> None:
    judge(impl.check_generate, name, bug)
