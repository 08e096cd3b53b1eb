"""examine.py: right caches pass every check, and each check fails for a cache that is wrong in its way."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import examine
from borrow.examined import (
    SUBJECTS,
    Subject,
    TransformersSubject,
    dynamic,
    small_gpt,
    small_transformer,
)
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache
from tests.examine_planted import FOLDER, RESULT
from tests.examine_planted import SUBJECTS as EXAMINED
from tests.helpers import ROOT, process, refused, run
from tests.planted import read_folder

OURS = ["gpt", "llama", "preallocated", "window", "sinks", "bct", "unrounded", "norms"]


@pytest.mark.parametrize("name", OURS)
def test_right_caches_pass_every_check(name: str) -> None:
    findings = [*examine.examine(SUBJECTS[name][1]())]
    assert [finding for finding in findings if finding.verdict == "WRONG"] == []
    assert sum(finding.verdict == "right" for finding in findings) >= 13
    assert len(findings) == len(examine.CHECKS) == 25
    verdicts = [finding.verdict for finding in findings]
    counts = [f"{verdicts.count(verdict)} |" for verdict in ("right", "WRONG", "not offered")]
    row = f"{' '.join(counts)} `python3 examine.py --subject {name}` |"
    assert row in (ROOT / "borrow" / "EXAMINED.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["transformers-ours", "transformers-ours-window"])
def test_ours_in_a_model_of_transformers_pass_too(name: str) -> None:
    pytest.importorskip("transformers")
    findings = [*examine.examine(SUBJECTS[name][1]())]
    assert [finding for finding in findings if finding.verdict == "WRONG"] == []


# --- Wrong caches, by the check that has to find them -------------------------------------------------


class SeesTheFuture(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        k, v, _ = super().append(layer, k, v, pos)
        return k, v, torch.ones(len(pos), k.size(2), dtype=torch.bool)


class SeesTheNewOnly(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        keys, values, mask = super().append(layer, k, v, pos)
        if mask is not None:
            mask = mask & (torch.cat([self.pos, pos]) >= pos[0])
        return keys, values, mask


class LosesAToken(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        k, v, mask = super().append(layer, k, v, pos)
        return (k, v, mask) if len(pos) > 1 or len(self) < 9 else (k[:, :, 1:], v[:, :, 1:], None)


class SharesRows(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        return super().append(layer, k[:1].expand_as(k), v[:1].expand_as(v), pos)


class MixesRows(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        return super().append(layer, k + 0 * k.sum(0, keepdim=True), v, pos)


class CommitsFirst(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        result = super().append(layer, k, v, pos)
        if layer == 1:
            super().commit(pos)
        return result

    def commit(self, pos: Tensor) -> None:
        pass


class KeepsOneTooMany(KVCache):
    def truncate(self, n: int) -> None:
        self.layers = [kv[..., : n + 1, :] for kv in self.layers]
        self.pos = torch.arange(min(n + 1, len(self)))


class KeepsItself(KVCache):
    def clone(self) -> KVCache:
        return self


class WrapsPositions(KVCache):
    def positions(self, T: int) -> Tensor:
        return super().positions(T) % 64


class IsForgotten(KVCache):
    def commit(self, pos: Tensor) -> None:
        pass


class RepeatsHeads(KVCache):
    nbytes = 10**9


class RoundsTwice(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if k.dtype == torch.bfloat16:
            k, v = (x.to(torch.float8_e5m2).to(x.dtype) for x in (k, v))
        return super().append(layer, k, v, pos)


class IgnoresPadding(TransformersSubject):
    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        return self.read(cache, ids)


def of(cache: Callable[[], Any], **options: Any) -> Callable[[], Subject]:
    return lambda: Subject(small_gpt(), cache, **options)


LONGER = of(lambda: SlidingWindowCache(7), window=6)  # by one token
ONE = KVCache()
WRONG: dict[str, Callable[[], Subject]] = {
    "a prompt is read at once": of(SeesTheFuture),
    "a second piece follows": of(SeesTheNewOnly),
    "one token at a time": of(LosesAToken),
    "pieces of any size": of(SeesTheNewOnly),
    "a piece longer than the window, on a full one": LONGER,
    "the window's first and last token": LONGER,
    "rows of a batch, alone and together": of(SharesRows),
    "texts that are padded on the left": lambda: IgnoresPadding(small_transformer(), dynamic),
    "a neighbour of NaN": of(MixesRows),
    "a pass that fails in the middle, then goes on": lambda: SUBJECTS["transformers-dynamic"][1](),
    "a pass that fails at its end, then goes on": lambda: SUBJECTS["transformers-dynamic"][1](),
    "a text is cut back, then goes on": of(KeepsOneTooMany),
    "a pass that fails, then a cut": of(KeepsOneTooMany),
    "another ending of the same text": of(KeepsOneTooMany),
    "the whole prompt is cached": of(KeepsOneTooMany),
    "a draft of which two tokens stay": of(KeepsOneTooMany),
    "a copy and its original go on": of(KeepsItself),
    "two texts in turn": of(lambda: ONE),
    "a new text after another": of(lambda: ONE),
    "past the context": of(WrapsPositions),
    "tokens are counted": of(IsForgotten),
    "a failed pass isn't counted": lambda: SUBJECTS["transformers-dynamic"][1](),
    "bytes are those of key-value heads": of(RepeatsHeads),
    "bfloat16 beside float32": of(RoundsTwice),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_finds_what_is_of_its_kind(name: str) -> None:
    if name.startswith(("texts", "a pass that", "a failed")):
        pytest.importorskip("transformers")
    (finding,) = examine.examine(WRONG[name](), only=name)
    assert finding.verdict == "WRONG", finding
    assert finding.kind and "#" in finding.kind
    if "largest logit" in finding.says:
        assert " of the largest logit, at row " in finding.says and ", token " in finding.says


def test_every_check_but_that_of_weights_can_fail() -> None:
    assert {*WRONG} | {"weights change while a text is cached"} == {c.name for c in examine.CHECKS}


def test_the_place_of_the_largest_difference_is_named() -> None:
    comparison = examine.Comparison()
    expected = torch.ones(2, 3, 5)
    got = expected.clone()
    got[1, 2, 3] += 0.5
    comparison.add(got, expected, first=10)
    assert comparison.largest == 0.5 and comparison.where == "row 1, token 12, logit 3"
    got[0, 0, 0] = float("nan")
    comparison.add(got, expected)
    assert comparison.largest == float("inf") and comparison.where == "row 0, token 0, logit 0"


# --- The script ---------------------------------------------------------------------------------------


def test_a_file_with_a_model_or_a_cache_is_examined(tmp_path: Path) -> None:
    ran = run(examine.main, ROOT / "borrow" / "my_gpt.py")
    assert ran.code == 0 and "0 of 25 checks found something wrong" in ran.out
    ran = run(
        examine.main, ROOT / "chapters" / "02_kv_cache" / "solution.py", "--json", "--only", "piece"
    )
    assert ran.code == 0 and {f["verdict"] for f in json.loads(ran.out)} == {"right", "not offered"}
    shutil.copy(ROOT / "chapters" / "02_kv_cache" / "solution.py", tmp_path / "wrong.py")
    text = (
        (tmp_path / "wrong.py")
        .read_text()
        .replace("len(self) + torch.arange(T)", "torch.arange(T)")
    )
    (tmp_path / "wrong.py").write_text(text)
    ran = run(examine.main, tmp_path / "wrong.py", "--only", "second piece")
    assert ran.code == 1 and "WRONG" in ran.out and "as in hyprstream#1521" in ran.out


def test_without_words_our_own_cache_is_examined() -> None:
    ran = run(examine.main)
    assert ran.code == 0 and "0 of 25 checks found something wrong" in ran.out


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    refused(run(examine.main, "my.py", "--subject", "gpt"), "not allowed with argument")
    refused(run(examine.main, "nowhere.py"), "there is no file nowhere.py")
    refused(run(examine.main, tmp_path / "empty.py"), "has neither a `model` nor a class Cache")
    refused(
        run(examine.main, "--subject", "gpt", "--only", "xyz"), "no check has 'xyz' in its name"
    )


# --- Planted bugs -------------------------------------------------------------------------------------

# Why no check finds a bug: beginnings of its name, by the reason. The first group isn't examined at all: what it is in
# has no cache, serves many texts, or drafts.
NOT_EXAMINED = ("gpt_baseline", "paged", "speculate", "formats.configs", "formats.products")
NOT_EXAMINED += ("borrow.adapter", "borrow.transformers_cache")  # by tests of their own
NOT_FOUND = {
    "the model computes the same wrong numbers without a cache": (
        "llama_angles",
        "llama_gates",
        "llama_groups_heads",
        "llama_norms",
        "llama_rotates",
        "llama_slows",
        "bct_counts",
        "bct_empty",
        "bct_gates",
        "bct_ignores",
        "bct_writes",
    ),
    "an approximate cache's differences are measured, and no size of them is wrong": (
        "compress_all_heads",
        "compress_axes",
        "compress_codes",
        "compress_evicts",
        "compress_goes_back",
        "compress_keeps",
        "compress_rounds",
        "compress_scale",
    ),
    "memory that is never written to again, or freed too late": (
        "compress_clone",
        "kv_clone",
        "kv_truncate",
        "bct_keeps",
    ),
    "gradients, or NaN that a failed pass left": (
        "ring_keeps",
        "ring_writes_in_place",
        "ring_reads",
    ),
    "a sentence in the place of PyTorch's error, or of a wrong cache's": (
        "bct_takes",
        "kv_bounds",
        "ring_checks",
    ),
    "generate(), or positions past the context, which is left to it": (
        "kv_feeds",
        "kv_forgotten",
        "kv_reads",
        "kv_positions",
        "bct_positions",
    ),
}


def test_each_planted_bug_is_found_or_it_is_said_why_not() -> None:
    found = json.loads(RESULT.read_text("utf-8"))
    bugs = read_folder(FOLDER)
    assert {bug.path.stem for bug in bugs.values()} == {*EXAMINED, *NOT_EXAMINED}
    assert [*found] == [name for name, bug in bugs.items() if bug.path.stem in EXAMINED]
    reasons = tuple(start for starts in NOT_FOUND.values() for start in starts)
    missed = [name for name, checks in found.items() if not checks]
    assert [name for name in missed if not name.startswith(reasons)] == []
    assert [start for start in reasons if not any(name.startswith(start) for name in missed)] == []


@pytest.mark.slow
def test_planted_bugs_are_found_by_the_checks_that_are_recorded() -> None:
    recorded = json.loads(RESULT.read_text("utf-8"))
    for name in ("kv_mask_sees_only_old", "ring_window_of_one_more", "llama_positions_start_over"):
        code = f"from tests.examine_planted import *; print(json.dumps(found_by({name!r})))"
        ran = process(sys.executable, "-c", code)
        assert json.loads(ran.out) == recorded[name] != [], ran.err
