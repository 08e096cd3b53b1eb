"""The store's contract: what it gives is what the model computes, whatever happens to the disk, to its files, to its
index and to the processes that use it; and nothing that is sound is ever lost."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_kv_cache import GPT, GPTConfig, KVCache
from recycle import prefilled_cache
from support.prefix import common_prefix_length
from support.store import Store, held_tensors, matched_tokens
from tests.helpers import KINDS, Ran, class_of, of_kind, process
from tests.test_hybrid import hybrid

TINY = GPTConfig(vocab_size=11, n_ctx=32, n_layer=2, n_head=2, n_embd=8, head_dim=3)
TOKEN = 2 * 2 * 2 * 3 * 4  # bytes of a token's keys and values
ALL_FOUR = ("window", "state", "full", "latent")


def tiny_model(seed: int = 0, kind: str = "GPT-2") -> nn.Module:
    """A model with weights so large that another prefix means other keys and values."""
    if kind == "hybrid":
        return hybrid(*ALL_FOUR)
    torch.manual_seed(seed)
    config = of_kind(kind, TINY)
    model = class_of(config)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


@pytest.fixture(scope="module")
def tiny() -> GPT:
    return tiny_model()


@pytest.fixture
def store(tiny: GPT, tmp_path: Path) -> Store:
    return Store(tiny, tmp_path / "store")


def another(store: Store, capacity: float = float("inf")) -> Store:
    """Return what another process has of a store."""
    return Store(store.model, store.folder.parent, capacity)


def texts(seed: int, n: int, low: int = 1, high: int = 30) -> list[list[int]]:
    """n texts of which many begin alike."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(n):
        start = rng.choice(made)[: rng.randint(0, high)] if made and rng.random() < 0.8 else []
        ids = start + [rng.randrange(11) for _ in range(rng.randint(low, high))]
        made.append(ids[: rng.randint(low, high)])
    return made


@cache
def reading(model: nn.Module, *ids: int) -> KVCache:
    return prefilled_cache(model, ids)


def assert_right(cache: KVCache, model: GPT, ids: list[int]) -> None:
    """A cache from the store holds what the model computes of these tokens."""
    n = len(cache)
    assert n < len(ids) and cache.pos.tolist() == list(range(n))
    if n:
        fresh = held_tensors(reading(model, *ids[:n]))
        torch.testing.assert_close(held_tensors(cache), fresh, atol=1e-5, rtol=1e-4)


def put(store: Store, *ids: list[int]) -> None:
    for text in ids:
        store.put(text, reading(store.model, *text))


def found(store: Store, ids: list[int]) -> int:
    """How many tokens of a text are stored, by what get() gives, which must be right."""
    cache = store.get([*ids, 0])
    assert_right(cache, store.model, [*ids, 0])
    return len(cache)


def runs(store: Store) -> list[Path]:
    return sorted(store.folder.glob("*.kv"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def taken(folder: Path) -> int:
    """Bytes of all files with keys and values below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


@contextmanager
def warned(n: int, words: str = "") -> Iterator[None]:
    """The body warns n times, each time with these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(one.message) for one in caught]
    assert len(said) == n and all(words in one for one in said), said


# --- What is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_longest_prefix_of_any_text_is_found_to_the_token(
    tiny: GPT, tmp_path: Path, on_disk: bool
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))  # no UTF-8
    store, held = Store(tiny, folder if on_disk else None), [[]]
    for ids in texts(0, 60):
        assert found(store, ids[:-1]) == max(
            common_prefix_length(ids[:-1], other) for other in held
        )
        put(store, ids)
        assert found(store, ids) == len(ids), "what was put is there"
        held.append(ids)
    prefixes = {tuple(ids[:n]) for ids in held for n in range(1, len(ids) + 1)}
    numbers = store._index.execute("SELECT sum(length(ids)) FROM runs").fetchone()[0] // 4
    assert numbers == len(prefixes), "each prefix is held once"
    if on_disk:
        assert store.nbytes == taken(folder)
        again = Store(tiny, folder)
        assert [found(again, ids) for ids in held] == [*map(len, held)]


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_layers_of_all_kinds_come_back_bit_by_bit(
    kind: str, dtype: torch.dtype, on_disk: bool, tmp_path: Path
) -> None:
    model, ids = tiny_model(kind=kind).to(dtype), [*range(10)] * 3
    store, cache = Store(model, tmp_path if on_disk else None), None
    for n in (5, 20):  # before and after the hybrid's window of 8 evicts
        cache = prefilled_cache(model, ids[:n], cache)
        store.put(ids[:n], cache)
        for one in (store, another(store) if on_disk else store):
            got = one.get(ids)
            assert got.snapshot() == cache.snapshot() and len(got) == n
            for ours, given in zip(held_tensors(got), held_tensors(cache), strict=True):
                assert ours.dtype == given.dtype and torch.equal(ours, given)
                ours.zero_()  # what becomes of a cache changes nothing in a store
    whole = 19 if kind in KINDS else 5  # a window and a state can't be cut
    assert len(store.get(ids[:20])) == whole


def test_bad_input_is_refused_with_both_numbers(tiny: GPT) -> None:
    store, ids, cache = Store(tiny), [1, 2, 3], prefilled_cache(tiny, [1, 2, 3])
    twice = [torch.cat([kv, kv], 1) for kv in cache.layers]
    for given, other, words in (
        ([1, 2], cache, r"read 3 tokens.*all 2 ids"),
        ([1, 2, 3, 4, 5], cache, r"read 3 tokens.*all 5 ids"),
        (ids, KVCache(twice, cache.pos), r"\(2, 2, 2, 3, 3, .*\(2, 1, 2, 3, 3, "),
        (ids, KVCache(cache.layers[:1], cache.pos), "1 tensors.* have 2"),
        (ids, cache.clone().to(dtype=torch.float16), "float16"),
        (ids, KVCache(cache.layers, cache.pos + 1), "positions 0 to 2, begins at 1"),
    ):
        with pytest.raises(ValueError, match=words):
            store.put(given, other)
    for use in (store.get, lambda given: store.put(given, cache)):
        with pytest.raises(TypeError, match="whole numbers.*got"):
            use([1.0, 2, 3])
    with pytest.raises(TypeError, match="must be a KV cache, got list"):
        store.put(ids, ids)
    store.put(torch.tensor(ids), cache)
    assert found(store, ids) == 3 and store.nbytes == 3 * TOKEN
    model = tiny_model(kind="hybrid")
    cache = prefilled_cache(model, ids)
    cache.layers[2].commit(torch.tensor([3]))
    store = Store(model)
    with pytest.raises(ValueError, match=r"layers have read \[3, 3, 4, 3\] tokens, not all 3"):
        store.put(ids, cache)
    store.put([1], model.new_cache())  # an interrupted pass leaves this
    assert store.nbytes == 0
    with pytest.raises(ValueError, match="0 bytes, got -1"):
        Store(tiny, capacity=-1)


# --- The model ------------------------------------------------------------------------------------------------------


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("scale", torch.ones(2), persistent=False)


def change_config(model: nn.Module) -> None:
    model.config = replace(TINY, n_ctx=16)


def change_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.h[1].mlp.c_proj.bias[3] += 1e-3


def replace_weight(model: nn.Module) -> None:
    weight = model.h[1].mlp.c_fc.bias
    weight.data = weight.data + 1


def change_eps(model: nn.Module) -> None:
    model.h[1].ln_1.eps = 0.1


def train_a_part(model: nn.Module) -> None:
    model.h[1].attn.train()


def add_hook(model: nn.Module) -> None:
    model.h[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("change", [add_buffer, change_config, change_weight, nn.Module.half])
def test_another_model_has_another_folder_below_the_same(store: Store, change: Callable) -> None:
    put(store, [1] * 9)
    other = tiny_model()
    change(other)
    theirs = Store(other, store.folder.parent)
    assert theirs.folder != store.folder
    assert found(theirs, [1] * 9) == 0 and found(store, [1] * 9) == 9


@pytest.mark.parametrize(
    "change", [add_buffer, change_weight, replace_weight, change_eps, add_hook, train_a_part]
)
def test_a_model_that_changes_in_use_is_refused(change: Callable) -> None:
    model = tiny_model()
    store, cache = Store(model), prefilled_cache(model, [1, 2, 3])
    change(model)
    for use in (lambda: store.get([1, 2, 3]), lambda: store.put([1, 2, 3], cache), store.clear):
        with pytest.raises(ValueError, match=r"settings have changed|train\(\).*eval\(\)"):
            use()


def test_a_subclass_of_a_lectures_model_is_that_model_unless_it_says_otherwise(
    store: Store,
) -> None:
    put(store, [1] * 9)
    same, steered = tiny_model(), tiny_model()
    for model in (same, steered):
        model.__class__ = type("Faster", (GPT,), {})
    assert found(Store(same, store.folder.parent), [1] * 9) == 9
    add_hook(steered)
    theirs = Store(steered, store.folder.parent, identity="twice block 0")
    assert found(theirs, [1] * 9) == 0


# --- Capacity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "capacity", "largest"),  # bytes of a text of 30 tokens
    [("GPT-2", 1, 0), ("GPT-2", 900, 30 * TOKEN), ("hybrid", 8000, 0), ("hybrid", 50_000, 21_000)],
)
def test_not_even_an_unfinished_file_exceeds_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, capacity: int, largest: int
) -> None:
    tiny = tiny_model(kind=kind)
    peak, kept, store, write = 0, 0, Store(tiny, tmp_path, capacity), Path.write_bytes

    def written(path: Path, content: bytes) -> None:
        nonlocal peak
        write(path, content)
        peak = max(peak, taken(tmp_path))

    monkeypatch.setattr(Path, "write_bytes", written)
    for ids in texts(2, 60, low=3):
        put(store, ids)
        kept += found(store, ids) == len(ids)
        assert taken(tmp_path) == store.nbytes <= capacity
    assert peak <= capacity and (kept > 15) == (largest > 0)
    assert not peak or peak > capacity - largest, "the capacity is used"
    put(Store(tiny, tmp_path, capacity / 2), ids)
    assert taken(tmp_path) <= capacity / 2


def test_the_least_recently_used_run_that_nothing_continues_goes_first(store: Store) -> None:
    a, b, ab, c = [1] * 8, [2] * 8, [1] * 8 + [3] * 8, [4] * 8
    put(store, a, b, ab, c)  # used in this order; ab continues a
    store.get([*b, 0])
    left = [a, b, ab, c]
    for gone in (ab, a, c, b):
        other = another(store)  # the order of use outlives a process
        with other._transaction():
            other._evict_until(other.nbytes - 1)
        left.remove(gone)
        assert [
            text
            for text in (a, b, ab, c)
            if matched_tokens(store._matching_runs(text)) == len(text)
        ] == left
    assert store.nbytes == 0


# --- Damage ---------------------------------------------------------------------------------------------------------


COLUMNS = ["parent", "start", "first", "nbytes", "checksum", "used", "ids"]
KINDS_OF_DAMAGE = ["flip", "cut", "swap", "foreign", "delete", "fifo", "row"]


def damage(rng: random.Random, store: Store, foreign: list[bytes]) -> str:
    """Do to a store what disks, crashes and people do."""
    path, other = rng.sample([path for path in runs(store) if path.is_file()], 2)
    content, kind = bytearray(path.read_bytes()), rng.choice(KINDS_OF_DAMAGE)
    if kind == "row":
        column = rng.choice(COLUMNS)
        value = rng.choice([rng.randint(-1, 12), "text", 0.5, 2**63 - 1])
        if column == "ids" and rng.random() < 0.5:
            value = rng.randbytes(rng.randint(0, 36))
        change = f"UPDATE OR IGNORE runs SET {column} = ? WHERE run = ?"
        with sqlite3.connect(store.folder / "index.db") as db:
            db.execute(change, (value, int(path.stem)))
        return f"{kind} {column}"
    path.unlink()  # files are mapped: a new one is made
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "swap":
        other.rename(path)
        other.write_bytes(content)
    elif kind == "foreign":
        path.write_bytes(rng.choice(foreign))
    elif kind == "fifo":
        os.mkfifo(path)
    return kind


@pytest.mark.parametrize("kind", ["GPT-2", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_damaged_store_never_gives_a_wrong_cache_and_heals(kind: str, tmp_path: Path) -> None:
    store = Store(tiny_model(kind=kind), tmp_path / "store")
    held, rng, kinds, reused = texts(7, 6, low=10), random.Random(0), set(), 0
    theirs = Store(tiny_model(1), tmp_path / "theirs")
    put(theirs, *held)
    foreign = [path.read_bytes() for path in runs(theirs)]
    for i in range(40):
        put(store, *held)
        kinds.add(damage(rng, store, foreign))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = another(store) if i % 2 else store
            reused += sum(found(one, ids) for ids in held)
        put(one, *held)
        if i % 10 == 0:  # nothing that is broken stays, but for numbers of use
            store.clear()
            assert not runs(store)
    assert len(kinds) >= 10 and reused > 50 * 40


def test_what_is_wrong_with_a_file_is_said_once_and_it_goes_with_what_continues_it(
    store: Store,
) -> None:
    put(store, [1] * 10, [1] * 10 + [2] * 5, [3] * 10)
    trunk = runs(store)[0]
    *content, last_byte = trunk.read_bytes()
    trunk.write_bytes(bytes([*content, last_byte ^ 1]))
    with warned(1, "its checksum is wrong"):
        assert [found(store, ids) for ids in ([1] * 10 + [2] * 5, [1] * 10, [3] * 10)] == [0, 0, 10]
    put(store, [3] * 10)
    assert len(runs(store)) == 1
    runs(store)[0].unlink()
    with warned(1, "No such file"):
        assert found(store, [3] * 10) == store.nbytes == 0


# --- Disks and folders ----------------------------------------------------------------------------------------------


def no_index(folder: Path) -> None:
    put(Store(tiny_model(), folder), [1] * 10)
    next(folder.rglob("index.db")).write_bytes(b"This is no index." * 1000)


UNUSABLE = {
    "an index that is none": no_index,
    "a file": lambda folder: folder.write_text("mine"),
    "a link to a device": lambda folder: folder.symlink_to(os.devnull),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_one_warning_and_a_store_in_memory(
    tiny: GPT, tmp_path: Path, kind: str
) -> None:
    UNUSABLE[kind](tmp_path / "store")
    before = contents(tmp_path)
    with warned(1, "can't be used"):
        store = Store(tiny, tmp_path / "store")
        put(store, [1, 2, 3])
        assert found(store, [1, 2, 3]) == 3
        store.clear()
        assert found(store, [1, 2, 3]) == 0
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", ["os.mkdir", "os.stat", "io.open", "os.unlink", "mmap.mmap"])
def test_an_error_of_any_call_is_at_most_one_warning_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    held, other = [1] * 10 + [2] * 5, [1] * 10 + [3] * 5
    put(store, held)
    before = contents(store.folder)
    module, name = call.split(".")
    real = getattr(sys.modules[module], name)

    def failing(path: object, *args: object, **options: object) -> object:
        if str(store.folder.parent) in str(path) or name == "mmap":  # which is given a handle
            raise OSError(errno.EMFILE, "too many")
        return real(path, *args, **options)

    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as broken:
        warnings.simplefilter("always")
        broken.setattr(call, failing)
        for one in (store, another(store)):
            put(one, other)
            assert found(one, held) <= 15 and found(one, other) <= 15
    assert len(caught) <= 2 and all("too many" in str(one.message) for one in caught)
    del before["index.db"]
    assert before.items() <= contents(store.folder).items()
    assert found(store, held) == found(another(store), held) == 15


@pytest.mark.parametrize("words", ["readonly", "locked"])
def test_an_index_that_cannot_be_written_is_waited_for_once_and_read(
    store: Store, words: str
) -> None:
    put(store, [1] * 10)
    healthy, owner = store._index, another(store)._index
    if words == "readonly":
        place = f"{(store.folder / 'index.db').as_uri()}?mode=ro"
        store._index = sqlite3.connect(place, uri=True, isolation_level=None)
    else:
        owner.execute("BEGIN IMMEDIATE")
    store._index.execute("PRAGMA busy_timeout = 300")
    before, begun = contents(store.folder), time.perf_counter()
    with warned(1, words):
        for _ in range(5):
            assert found(store, [1] * 10) == 10
            put(store, [2] * 10)
            store.clear()
    assert contents(store.folder) == before and time.perf_counter() - begun < 5
    store._index = healthy
    if words == "locked":
        owner.execute("ROLLBACK")
    put(store, [2] * 10)
    assert found(store, [2] * 10) == 10, "it works again"


def test_a_folder_that_is_deleted_in_use_is_one_warning(store: Store) -> None:
    put(store, [1] * 10)
    shutil.rmtree(store.folder.parent)
    with warned(1, "can't be used"):
        for _ in range(2):
            assert found(store, [1] * 10) == 0
            put(store, [2] * 10)
    put(another(store), [2] * 10)
    assert found(another(store), [2] * 10) == 10


# --- In processes of their own --------------------------------------------------------------------------------------


def sound(model: GPT, folder: Path) -> int:
    """Return how many tokens a store has of the workers' texts, without any warning; its index is sound."""
    with warned(0):
        store = Store(model, folder)
        assert store._index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return sum(found(store, ids) for ids in texts(3, 60, low=5))


def hammer(folder: Path, seed: int, capacity: float, rounds: int = 10**9) -> None:
    """Use a store; any warning ends it."""
    warnings.simplefilter("error")
    store, rng = Store(tiny_model(), folder, capacity), random.Random(seed)
    held = texts(3, 60, low=5)
    for _ in range(rounds):
        ids = rng.choice(held)
        found(store, ids)
        put(store, ids)


def begun(*args: Any) -> multiprocessing.Process:
    """Return a process that hammers on a store."""
    process = multiprocessing.get_context("fork").Process(target=hammer, args=args)
    process.start()
    return process


def together(folder: Path) -> None:
    workers = [begun(folder, seed, float("inf"), 150) for seed in range(3)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sound(tiny_model(), folder) > 500


def frozen(workers: list[multiprocessing.Process], folder: Path) -> int:
    """Bytes of all files, of a moment at which no worker runs."""
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    for worker in workers:
        assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])
    used = taken(folder)
    for worker in workers:
        os.kill(worker.pid, signal.SIGCONT)
    return used


def bounded(folder: Path) -> None:
    """Three writers, one of which is killed and replaced again and again, keep to the capacity at
    every moment, and leave a sound store."""
    rng, peak = random.Random(0), 0
    workers = [begun(folder, seed, 12_000) for seed in range(3)]
    while frozen(workers, folder) < 10_000:  # until the store is full
        time.sleep(0.2)
    for moment in range(1, 241):
        time.sleep(rng.uniform(0, 0.006))
        peak = max(peak, frozen(workers, folder))
        if moment % 10 == 0:
            workers[0].kill()
            workers.pop(0).join()
            workers.append(begun(folder, moment, 12_000))
    for worker in workers:
        worker.kill()
        worker.join()
    assert 10_000 < peak <= 12_000
    assert sound(tiny_model(), folder) > 30


@pytest.mark.slow
@pytest.mark.parametrize("what", ["together", "bounded"])
def test_processes_that_share_a_store(tmp_path: Path, what: str) -> None:
    """Any warning is an error: what another process does, or begins, is no damage."""
    code = f"from tests.test_store import *\n{what}(Path({str(tmp_path)!r}))"
    assert process(sys.executable, "-c", code) == Ran(0, "", "")


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize(
    "moment", ["_checksum", "_add_run", "_mark_used", "_delete_row", "_delete_files"]
)
def test_an_interrupted_put_leaves_a_store_that_works(
    tiny: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool, moment: str
) -> None:
    store = Store(tiny, tmp_path if on_disk else None, capacity=12 * TOKEN)
    put(store, [1] * 10)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(store, moment, interrupted)
        put(store, [2] * 10)
    assert taken(tmp_path) <= store.capacity, "what is yet to be deleted counts"
    for ids in ([1] * 10, [2] * 10):
        found(store, ids)
        put(store, ids)
        assert found(store, ids) == 10 and store.nbytes <= store.capacity


@pytest.mark.parametrize("target", ["mine", "nothing", None])
def test_what_lies_in_the_next_files_place_is_no_harm(store: Store, target: str | None) -> None:
    place, folder = store.folder / "1.kv", store.folder.parent
    for mine in (folder / "mine", store.folder / "2 copy.kv"):
        mine.write_text("mine")
    if target:
        place.symlink_to(folder / target)
    else:  # what a killed process leaves
        place.write_bytes(b"half a file")
    with warned(0):
        put(store, [1] * 10)
        assert found(another(store), [1] * 10) == 10
    assert mine.read_text() == (folder / "mine").read_text() == "mine"
    assert not (folder / "nothing").exists()
