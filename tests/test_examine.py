"""examine.py: right caches pass every check, and each check fails for a cache that is wrong in its way."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from torch import Tensor

import examine
from borrow.examined import HYBRIDS, SUBJECTS
from examine import Subject, TransformersSubject, dynamic, family_model, small_model
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache
from tests.examine_planted import FOLDER, RESULT, UNSEEN, faulty, of
from tests.examine_planted import SUBJECTS as EXAMINED
from tests.helpers import ROOT, process, run
from tests.planted import read_folder

NAMED = {check.name: check for check in examine.CHECKS}
MORE = ["llama", "preallocated", "sinks", "norms", "hybrid"]
OURS = ["gpt", "window", "bct", "unrounded"]
OURS += [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.mark.parametrize("name", OURS)
def test_right_caches_pass_every_check(name: str) -> None:
    findings = [*examine.examine(SUBJECTS[name][1]())]
    assert bad(findings) == []
    assert sum(finding.verdict == "right" for finding in findings) >= 20
    refused = {finding.check for finding in findings if finding.verdict == "REFUSES"}
    assert not refused or name in ("bct", "hybrid")  # whose slots or states can't be cut back


def bad(findings: list[examine.Finding]) -> list[examine.Finding]:
    return [finding for finding in findings if finding.verdict in examine.BAD]


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("transformers-ours", "fail"),
        pytest.param("transformers-ours", "", marks=pytest.mark.slow),
        pytest.param("transformers-ours-window", "", marks=pytest.mark.slow),
    ],
)
def test_ours_in_a_model_of_transformers_pass_too(name: str, only: str) -> None:
    pytest.importorskip("transformers")
    findings = [*examine.examine(SUBJECTS[name][1](), only)]
    assert findings and bad(findings) == []


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


class TakesAnyRows(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if len(self):
            rows = self.layers[layer].size(1)
            k, v = k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)
        return super().append(layer, k, v, pos)


class IgnoresPadding(TransformersSubject):
    def read_padded(self, cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        return self.read(cache, ids)


WRONG = {  # by check, a fault of mutants/unseen.patch
    "a prompt is read at once": "rows_mask_is_one_behind",
    "a second piece follows": "arrays_any_piece_is_causal",
    "one token at a time": "lists_newest_cached_is_hidden",
    "pieces of any size": "rows_square_mask",
    "a long text, one token at a time": "lists_pack_without_the_first",
    "a long text in pieces": "arrays_lose_values_when_they_double",
    "a piece longer than the window, on a full one": "recent_evicts_before_it_attends",
    "the window's first and last token": "ring_window_of_one_less",
    "rows of a batch, alone and together": "rows_of_three_are_reversed",
    "texts that are padded on the left": IgnoresPadding,
    "a neighbour of NaN": "buffer_of_eight_bits",
    "a pass that fails in the middle, then goes on": "rows_keep_what_failed",
    "a pass that fails at its end, then goes on": "rows_keep_what_failed",
    "a pass that Ctrl-C ends, then goes on": "rows_keep_what_failed",
    "a pass of NaN that fails, then goes on": "rows_keep_what_failed",
    "a pass that fails, then a cut": "ring_writes_as_it_attends",
    "a failed pass isn't counted": "lists_count_all_rows",
    "a text is cut back anywhere, then goes on": "rows_cut_the_first_layer",
    "another ending of the same text": "arrays_cut_by_n",
    "the whole prompt is cached": "blocks_cut_to_a_block",
    "a draft of which two tokens stay": "blocks_cut_to_a_block",
    "a copy and its original go on": "blocks_last_block_has_one_user",
    "two texts in turn": "arrays_have_one_workspace",
    "a new text after another": "buffer_is_recycled",
    "past the context": "buffer_writes_to_its_last_slot",
    "another number of rows": TakesAnyRows,
    "tokens are counted": "recent_counts_what_it_holds",
    "bytes are those of key-value heads": "lists_repeat_heads",
    "bytes are the memory that is held": "rows_cut_by_views",
    "bfloat16 beside float32": "lists_newest_cached_is_hidden",
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_finds_what_is_of_its_kind(name: str) -> None:
    wrong = WRONG[name]
    if wrong is IgnoresPadding:
        pytest.importorskip("transformers")
        subject = IgnoresPadding(family_model("llama"), dynamic)
    elif wrong is TakesAnyRows:
        subject = Subject(small_model(), TakesAnyRows)
    else:
        subject = of(faulty(wrong))
    finding = NAMED[name].find(subject)
    assert finding.verdict in examine.BAD, finding
    assert "#" in finding.kind
    if finding.difference:
        assert finding.says.startswith("row ") and ", must be " in finding.says


def test_every_check_but_that_of_weights_can_fail() -> None:
    assert {*WRONG} | {"weights change while a text is cached"} == {*NAMED}


# --- The words of verdicts ----------------------------------------------------------------------------


def find(name: str, cache: Callable[[], Any], **options: Any) -> examine.Finding:
    return NAMED[name].find(Subject(small_model(), cache, **options))


class RefusesPieces(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if len(self) and len(pos) > 1:
            raise ValueError("a piece behind cached tokens isn't supported")
        return super().append(layer, k, v, pos)


class RefusesTooLate(RefusesPieces):
    def positions(self, T: int) -> Tensor:
        self.pos = super().positions(T) if len(self) and T > 1 else self.pos
        return super().positions(T)


class Stumbles(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        if len(self):
            numpy.zeros(len(self)) + numpy.zeros(len(self) + 2)  # a ValueError of numpy's
        return super().append(layer, k, v, pos)


class Exits(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        sys.exit(0)


class CommitsFirst(KVCache):
    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> Any:
        result = super().append(layer, k, v, pos)
        if layer == 1:
            super().commit(pos)
        return result

    def commit(self, pos: Tensor) -> None:
        pass


def test_a_refusal_after_which_the_cache_goes_on_is_neither_right_nor_wrong() -> None:
    finding = find("a second piece follows", RefusesPieces)
    assert finding.verdict == "REFUSES" and "isn't supported" in finding.says
    assert find("one token at a time", RefusesPieces).verdict == "right"
    assert find("a second piece follows", RefusesTooLate).verdict in examine.BAD


def test_a_refusal_is_right_where_logits_would_be_wrong() -> None:
    assert find("past the context", lambda: PreallocatedCache(48), capacity=48).verdict == "right"
    cut = find("another ending of the same text", lambda: SlidingWindowCache(6), window=6)
    assert cut.verdict == "right"


def test_an_exit_breaks_and_so_does_an_error_that_is_not_meant() -> None:
    finding = find("one token at a time", Exits)
    assert finding.verdict == "BREAKS" and finding.says.startswith("SystemExit: 0")
    finding = find("one token at a time", Stumbles)
    assert finding.verdict == "BREAKS" and "broadcast" in finding.says


def test_what_few_caches_promise_is_not_held_against_one_that_does_not() -> None:
    subject = Subject(small_model(), CommitsFirst)
    subject.promises = False
    (finding,) = examine.examine(subject, "a failed pass")
    assert finding.verdict == "not offered" and finding.says.startswith("not promised: the count")


# --- The diagnosis ------------------------------------------------------------------------------------

CAUSED: dict[str, list[str]] = {  # faults of mutants/unseen.patch, and what else shows them
    "rows_mask_is_one_behind": [],
    "blocks_chunks_see_themselves": [],
    "lists_newest_cached_is_hidden": [],
    "lists_count_all_rows": [],
    "arrays_cut_by_n": ["another ending of the same text"],
    "blocks_last_block_has_one_user": ["a copy and its original go on"],
}


@pytest.mark.parametrize("name", CAUSED)
def test_a_diagnosis_names_the_cause_and_folds_what_follows(name: str, capsys: Any) -> None:
    asked = (*examine.BASIC, examine.COUNT, examine.WINDOW, *CAUSED[name])
    subject = of(faulty(name))
    findings = [NAMED[check].find(subject) for check in asked]
    diagnosis = examine.diagnose(findings)
    cause = UNSEEN[name].cause
    assert diagnosis.cause == cause and diagnosis.shown_by not in diagnosis.consequences
    assert (examine.ASK_WINDOW in diagnosis.says) == (cause == "mask: loses tokens")
    assert examine.report(iter(findings)) == 1
    lines = capsys.readouterr().out.splitlines()
    for check in diagnosis.consequences:
        assert not any(line.startswith("WRONG") and f"{check}: " in line for line in lines)
    assert any("may follow" in line for line in lines) == bool(diagnosis.consequences)


# --- The script ---------------------------------------------------------------------------------------

FILES = {
    "class Cache: pass": "a Cache has no __len__, positions, append, commit",
    "class Cache:\n    def __init__(self, size): pass": "'size'",
    "import nothing_such": "No module named 'nothing_such'",
    "import sys\nsys.exit(0)": "SystemExit",
    "x = 1": "has none of these: a class Cache, make(model)",
    "class subject: pass": "`subject` has no whole(), new(), read()",
}


@pytest.mark.parametrize("code", FILES)
def test_nothing_to_examine_is_one_sentence(code: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.py"
    path.write_text(code, "utf-8")
    with pytest.raises(ValueError, match=re.escape(FILES[code])):
        examine.load_subject(examine.arguments().parse_args([str(path)]))


def test_limits_are_refused_where_they_would_be_ignored(tmp_path: Path) -> None:
    (tmp_path / "cache.py").write_text("class subject:\n    whole = new = read = print", "utf-8")
    words = [str(tmp_path / "cache.py"), "--window", "6", "--approximate"]
    with pytest.raises(ValueError, match="--window, --approximate"):
        examine.load_subject(examine.arguments().parse_args(words))


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
NOT_EXAMINED += ("formats.tensors", "borrow.adapter", "borrow.transformers_cache")
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
