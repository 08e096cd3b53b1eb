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
from borrow.examined import HYBRIDS, SUBJECTS
from examine import Subject, TransformersSubject, dynamic, family_model, small_model
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache
from tests.examine_planted import FOLDER, RESULT
from tests.examine_planted import SUBJECTS as EXAMINED
from tests.helpers import ROOT, process, refused, run
from tests.planted import read_folder

OURS = ["gpt", "llama", "preallocated", "window", "sinks", "bct", "unrounded", "norms"]


@pytest.mark.parametrize("name", OURS)
def test_right_caches_pass_every_check(name: str) -> None:
    findings = [*examine.examine(SUBJECTS[name][1]())]
    assert bad(findings) == []
    assert sum(finding.verdict == "right" for finding in findings) >= 20
    refused = {finding.check for finding in findings if finding.verdict == "REFUSES"}
    assert not refused or name == "bct"  # whose slots can't be cut back


def bad(findings: list[examine.Finding]) -> list[examine.Finding]:
    return [finding for finding in findings if finding.verdict in examine.BAD]


@pytest.mark.parametrize("name", ["transformers-ours", "transformers-ours-window"])
def test_ours_in_a_model_of_transformers_pass_too(name: str) -> None:
    pytest.importorskip("transformers")
    findings = [*examine.examine(SUBJECTS[name][1]())]
    assert bad(findings) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_different_kinds_read_pieces(name: str) -> None:
    pytest.importorskip("transformers")
    wrong = bad([*examine.examine(SUBJECTS[f"transformers-{name}"][1](), "piece")])
    assert bool(wrong) == (name in ("mamba", "falcon-mamba"))  # theirs: the state is forgotten


@pytest.mark.slow
def test_it_is_installed_alone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "70.1")
    for name in ("examine.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    options = ["-q", "--no-deps", "--no-build-isolation", "--target", "installed"]
    ran = process(sys.executable, "-m", "pip", "install", *options, ".", folder=tmp_path)
    assert ran.code == 0, ran.err
    installed = tmp_path / "installed"
    assert [path.name for path in installed.glob("*.py")] == ["examine.py"]
    command = [sys.executable, installed / "bin" / "kv-examine", "--only", "a prompt"]
    assert process(*command, PYTHONPATH=str(installed)).code == 0


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
        return super().positions(T) % 320


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


class KeepsWhatFailed(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        kv = torch.stack([k, v])
        if layer < len(self.layers):
            kv = torch.cat([self.layers[layer], kv], dim=3)
        self.layers[layer : layer + 1] = [kv]
        mask = torch.arange(kv.size(3)) < kv.size(3) - len(pos)
        return kv[0], kv[1], mask | (torch.arange(kv.size(3)) <= pos[:, None])


class TakesAnyRows(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if len(self):
            rows = self.layers[layer].size(1)
            k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
        return super().append(layer, k, v, pos)


class CutsByAView(KVCache):
    def truncate(self, n: int) -> None:
        self.layers = [kv[..., :n, :] for kv in self.layers]
        self.pos = self.pos[:n]


class IgnoresPadding(TransformersSubject):
    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        return self.read(cache, ids)


def shared() -> Subject:
    cache = KVCache()
    return Subject(small_model(), lambda: cache)


def of(cache: Callable[[], Any], **options: Any) -> Callable[[], Subject]:
    return lambda: Subject(small_model(), cache, **options)


LONGER = of(lambda: SlidingWindowCache(7), window=6)  # by one token
WRONG: dict[str, Callable[[], Subject]] = {
    "a prompt is read at once": of(SeesTheFuture),
    "a second piece follows": of(SeesTheNewOnly),
    "one token at a time": of(LosesAToken),
    "pieces of any size": of(SeesTheNewOnly),
    "a long text, one token at a time": of(LosesAToken),
    "a long text in pieces": of(SeesTheNewOnly),
    "a piece longer than the window, on a full one": LONGER,
    "the window's first and last token": LONGER,
    "rows of a batch, alone and together": of(SharesRows),
    "texts that are padded on the left": lambda: IgnoresPadding(family_model("llama"), dynamic),
    "a neighbour of NaN": of(MixesRows),
    "a pass that fails in the middle, then goes on": of(KeepsWhatFailed),
    "a pass that fails at its end, then goes on": of(CommitsFirst),
    "a pass that Ctrl-C ends, then goes on": of(CommitsFirst),
    "a pass of NaN that fails, then goes on": of(CommitsFirst),
    "a pass that fails, then a cut": of(KeepsOneTooMany),
    "a failed pass isn't counted": of(CommitsFirst),
    "a text is cut back anywhere, then goes on": of(KeepsOneTooMany),
    "another ending of the same text": of(KeepsOneTooMany),
    "the whole prompt is cached": of(KeepsOneTooMany),
    "a draft of which two tokens stay": of(KeepsOneTooMany),
    "a copy and its original go on": of(KeepsItself),
    "two texts in turn": shared,
    "a new text after another": shared,
    "past the context": of(WrapsPositions),
    "another number of rows": of(TakesAnyRows),
    "tokens are counted": of(IsForgotten),
    "bytes are those of key-value heads": of(RepeatsHeads),
    "bytes are the memory that is held": of(CutsByAView),
    "bfloat16 beside float32": of(RoundsTwice),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_finds_what_is_of_its_kind(name: str) -> None:
    if name.startswith("texts"):
        pytest.importorskip("transformers")
    (check,) = (check for check in examine.CHECKS if check.name == name)
    finding = check.find(WRONG[name]())
    assert finding.verdict in examine.BAD, finding
    assert finding.kind == "" or "#" in finding.kind
    if finding.difference:
        assert finding.says.startswith("row ") and ", must be " in finding.says


def test_every_check_but_that_of_weights_can_fail() -> None:
    assert {*WRONG} | {"weights change while a text is cached"} == {c.name for c in examine.CHECKS}


# --- The words of verdicts ----------------------------------------------------------------------------


def find(name: str, cache: Callable[[], Any], **options: Any) -> examine.Finding:
    (check,) = (check for check in examine.CHECKS if check.name == name)
    return check.find(Subject(small_model(), cache, **options))


class RefusesPieces(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if len(self) and len(pos) > 1:
            raise ValueError("a piece behind cached tokens isn't supported")
        return super().append(layer, k, v, pos)


class RefusesTooLate(RefusesPieces):
    def positions(self, T: int) -> Tensor:
        self.pos = super().positions(T) if len(self) and T > 1 else self.pos
        return super().positions(T)


class Exits(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        sys.exit(0)


def test_a_refusal_after_which_the_cache_goes_on_is_neither_right_nor_wrong() -> None:
    finding = find("a second piece follows", RefusesPieces)
    assert finding.verdict == "REFUSES" and "isn't supported" in finding.says
    assert find("one token at a time", RefusesPieces).verdict == "right"
    assert find("a second piece follows", RefusesTooLate).verdict in examine.BAD


def test_a_refusal_is_right_where_logits_would_be_wrong() -> None:
    assert find("past the context", lambda: PreallocatedCache(48), capacity=48).verdict == "right"
    cut = find("another ending of the same text", lambda: SlidingWindowCache(6), window=6)
    assert cut.verdict == "right"


def test_an_exit_and_ctrl_c_break() -> None:
    finding = find("one token at a time", Exits)
    assert finding.verdict == "BREAKS" and finding.says.startswith("SystemExit: 0")


def test_what_few_caches_promise_is_not_held_against_one_that_does_not() -> None:
    subject = of(CommitsFirst)()
    subject.promises = False
    (finding,) = examine.examine(subject, "a failed pass")
    assert finding.verdict == "not offered" and finding.says.startswith("not promised: the count")


# --- The diagnosis ------------------------------------------------------------------------------------

CAUSES = {
    "mask: future": SeesTheFuture,
    "mask: new only": SeesTheNewOnly,
    "mask: loses tokens": LosesAToken,
    "rows": SharesRows,
    "cut": KeepsOneTooMany,
    "count": IsForgotten,
    "sharing": KeepsItself,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_diagnosis_names_the_cause(cause: str) -> None:
    asked = (
        *examine.BASIC,
        examine.COUNT,
        examine.WINDOW,
        "two texts in turn",
        "a copy and its original go on",
    )
    findings = [find(name, CAUSES[cause]) for name in asked]
    diagnosis = examine.diagnose(findings)
    assert diagnosis.cause == cause and diagnosis.shown_by not in diagnosis.consequences
    assert (examine.ASK_WINDOW in diagnosis.says) == (cause == "mask: loses tokens")
    assert examine.diagnose([find("one token at a time", KVCache)]) is None


# --- The script ---------------------------------------------------------------------------------------

FILES = {
    "empty": ("class Cache: pass", "a Cache has no __len__, positions, append, commit"),
    "argument": ("class Cache:\n    def __init__(self, size): pass", "'size'"),
    "broken": ("import nothing_such", "No module named 'nothing_such'"),
    "leaves": ("import sys\nsys.exit(0)", "SystemExit"),
    "other": ("x = 1", "has none of these: a class Cache, make(model)"),
}


@pytest.mark.parametrize("name", FILES)
def test_nothing_to_examine_is_one_sentence(name: str, tmp_path: Path) -> None:
    code, words = FILES[name]
    path = tmp_path / f"{name}.py"
    path.write_text(code, "utf-8")
    refused(run(examine.main, path), "nothing to examine: ", words)


@pytest.mark.slow
def test_a_check_without_an_answer_breaks_and_the_next_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(SLOW, "utf-8")
    ran = run(examine.main, path, "--only", "piece", "--seconds", "5", "--json")
    verdicts = {f["check"]: f["verdict"] for f in json.loads(ran.out)["findings"]}
    assert ran.code == 1 and verdicts["a second piece follows"] == "BREAKS"
    assert verdicts["a piece longer than the window, on a full one"] == "right"


SLOW = """
import time
from gpt_bounded_cache import SlidingWindowCache

class Cache(SlidingWindowCache):
    def __init__(self, window=6):
        super().__init__(window)

    def positions(self, T):
        if len(self) == 1 and T == 2:
            time.sleep(1000)
        return super().positions(T)
"""


def test_the_file_runs_alone_with_torch(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examine.py", tmp_path)
    code = """
import sys, examine
names = ("a second piece follows", "a text is cut back anywhere, then goes on")
subject = examine.Subject(examine.small_model())
assert {check.find(subject).verdict for check in examine.CHECKS if check.name in names} == {"right"}
print(*sys.modules)"""
    ran = process(sys.executable, "-c", code, folder=tmp_path)
    assert ran.code == 0, ran.err
    ours = {path.stem for path in ROOT.glob("*.py")} | {"support", "borrow", "formats", "pocket"}
    assert ours & {*ran.out.split()} == {"examine"} and "transformers" not in ran.out.split()


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
        "bct_keeps",
    ),
    "gradients, which a cache of inference may refuse": (
        "ring_keeps",
        "ring_writes_in_place",
    ),
    "a sentence in the place of PyTorch's error, or of a wrong cache's": (
        "bct_takes",
        "kv_bounds",
    ),
    "a refusal in a sentence, of what it should take": ("ring_buffer",),
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
