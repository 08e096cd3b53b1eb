"""The zoo: the one-line bugs of tests/mutants as modules, and which tests find them.

`python3 chapters/09_bug_zoo/zoo.py` counts, by family, how many of the mutants of gpt_kv_cache.py and
gpt_bounded_cache.py three tests find: the one that most people write (one prompt of four tokens, the same text?), the
same with logits instead of text, and the checks of exercise.py. `--all` names them one by one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run or imported from any folder
import hashlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from tqdm import tqdm

import gpt_baseline
import gpt_bounded_cache
from load_gpt2_weights import load_model, load_tokenizer
from support.cli import CommandLine
from support.files import import_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
planted = import_file(ROOT / "tests" / "planted.py")
BUGS = {
    name: bug
    for name, bug in planted.read_folder(ROOT / "tests" / "mutants").items()
    if name.startswith(("kv", "ring", "bct"))
}
FAMILIES = {
    "masks": "kv_causal_with_cached_keys kv_mask_of_the_chunk_only kv_mask_sees_only_old kv_single_query_is_causal "
    "ring_causal_with_cached_keys",
    "positions": "kv_position_starts_over kv_positions_from_slots bct_positions_start_over",
    "what is fed": "kv_feeds_the_last_token_only kv_reads_everything_again",
    "resets": "kv_forgotten_reset kv_truncate_forgets_the_positions",
    "half a pass": "kv_commits_too_early kv_failed_pass_stays bct_commits_in_the_middle "
    "ring_failed_chunk_stays_pending ring_reads_what_nobody_sees ring_truncates_what_a_failure_may_have_destroyed "
    "ring_without_a_spare_slot",
    "bounds": "kv_bounds_of_the_chunk_only kv_bounds_of_the_last_row_only ring_buffer_without_dtype "
    "ring_checks_nothing bct_takes_any_cache bct_takes_any_memory",
    "memory": "kv_clone_shares_memory kv_truncate_keeps_the_memory bct_keeps_the_chunk_in_memory "
    "ring_clone_shares_memory ring_keeps_the_graph ring_writes_in_place_in_training",
}
LISTED = " ".join(FAMILIES.values()).split()
for family, prefix in (("the ring", "ring"), ("BCT's sums", "bct"), ("others", "kv")):
    FAMILIES[family] = " ".join(
        name for name in BUGS if name.startswith(prefix) and name not in LISTED
    )
# The beginning of the SHA-256 of a mutant's name, so that the solution of exercise 9.1 can't be
# read here.
SPECIMENS = {
    "A": "20045b69",
    "B": "165c0b01",
    "C": "25487afe",
    "D": "892dd2ba",
    "E": "e88b63fd",
    "F": "51ab7aeb",
}


def mutant(bug: planted.Entry) -> ModuleType:
    """Return the module that a planted bug makes of its file."""
    module = ModuleType("specimen")
    sys.modules["specimen"] = module  # dataclasses look themselves up
    text = bug.changed((ROOT / f"{bug.path.stem}.py").read_text(encoding="utf-8"))
    exec(compile(text, "<specimen>", "exec"), module.__dict__)
    return module


def suspect(letter: str) -> planted.Entry:
    """Return the bug of that letter in exercise 9.1. Raises KeyError if there is none."""
    beginning = SPECIMENS[letter]
    return next(
        bug
        for name, bug in BUGS.items()
        if hashlib.sha256(name.encode()).hexdigest().startswith(beginning)
    )


def specimen(letter: str) -> ModuleType:
    """Return a gpt_kv_cache.py with the bug of that letter."""
    return mutant(suspect(letter))


@cache
def pocket(name: str) -> torch.nn.Module:
    return load_model(
        name, model_class=gpt_bounded_cache.BCT if name == "pocket-bct" else gpt_baseline.GPT
    )


@torch.no_grad()
def naive(module: ModuleType) -> tuple[bool, bool]:
    """Return whether a text is the same with a cache and without one, and whether the logits are too: after one prompt
    of four tokens, ten more, with every kind of cache that the module has."""
    prompt = torch.tensor([load_tokenizer("pocket").encode("Halek lives in")])  # (1, 4)
    caches = {"pocket": [module.KVCache]}
    if hasattr(module, "SlidingWindowCache"):
        caches["pocket"].append(lambda: module.SlidingWindowCache(64))
        caches["pocket-bct"] = [module.BoundedMemory]
    same_text = same_logits = True
    for name, kinds in caches.items():
        kind = module.BCT if name == "pocket-bct" else module.GPT
        model = kind(kind.config_class(**vars(pocket(name).config))).eval()
        model.load_state_dict(pocket(name).state_dict(), assign=True)
        for new_cache in kinds:
            seen: list[Tensor] = []
            hook = model.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
            ids = torch.cat([prompt, *module.generate(model, prompt, 10, cache=new_cache())], dim=1)
            hook.remove()
            # (1, 10, V), with and without the cache
            logits, exact = torch.cat(seen, dim=1), model(ids[:, :-1])[:, 3:]
            same_text &= torch.equal(exact.argmax(-1), ids[:, 4:])
            same_logits &= ((logits - exact).abs().max() < 1e-4 * exact.abs().max()).item()
    return same_text, same_text and same_logits


def finds(check: Callable[[ModuleType], object], name: str) -> bool:
    """Return whether a check finds a mutant."""
    try:
        check(mutant(BUGS[name]))
    except NotImplementedError:  # not written yet
        return False
    except Exception:  # a failed assertion, or the module itself
        return True
    return False


def survey(impl: ModuleType) -> dict[str, list[bool]]:
    """Return, for every mutant, whether it is found by its text, by its logits, and by the checks of its file."""
    checks = {
        "kv": [impl.check_chunks, impl.check_state, impl.check_generate],
        "ring": [impl.check_ring],
    }
    found = {}
    for name in tqdm(BUGS, unit="bug", disable=None):  # a minute; slow checks take longer
        try:
            text, logits = naive(mutant(BUGS[name]))
        except Exception:
            text = logits = False
        own = any(finds(check, name) for check in checks.get(name.partition("_")[0], []))
        found[name] = [not text, not logits, own]
    return found


def main() -> None:
    cli = CommandLine(__doc__, example="python3 chapters/09_bug_zoo/zoo.py --all")
    cli.add_argument(
        "--impl", choices=("exercise", "solution"), default="exercise", help="file of the checks"
    )
    cli.add_argument("--all", action="store_true", help="name all mutants")
    with cli.parse() as args:
        torch.set_num_threads(1)
        # Some bugs read memory that nobody has written: the same every time.
        torch.use_deterministic_algorithms(True)
        found = survey(import_file(HERE / f"{args.impl}.py"))
        families = {family: sorted(names.split()) for family, names in FAMILIES.items()}
        print(
            f"bugs  found by{'the same text?':>43}{'the same logits?':>18}{args.impl + '.py':>14}"
        )
        for family, names in [*families.items(), ("all", list(BUGS))]:
            if names:
                counts = [sum(found[name][i] for name in names) for i in range(3)]
                print(f"{len(names):4}  {family:37}{counts[0]:14}{counts[1]:18}{counts[2]:14}")
            for name in names if args.all and family != "all" else []:
                first, second, own = ("found" if x else "-" for x in found[name])
                print(f"      - {name:50}{first:5}{second:>18}{own:>14}")


if __name__ == "__main__":
    main()
