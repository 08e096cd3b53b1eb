"""A store of keys and values by the tokens they were computed from: an index of runs of tokens in
SQLite, and a file for each run.

Shapes: L layers, H heads of keys and values, D head size, S tokens of a cache, n tokens of a run.
"""

import math
import os
import re
import sqlite3
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.files import regular
from support.fingerprints import fingerprint, raw, versions
from support.geometry import kv_heads
from support.prefix import common_prefix

PATIENCE = 30  # seconds to wait for another process, which may never let go of the index
# The index. A killed process loses nothing by synchronous = OFF; after a power cut the checksums tell.
# runs: run, its file's name, which is never used again; parent, the run that it continues, or 0 if it
# begins a text; start, after how many tokens of that one; first, its first token; used, when it last
# was, in nanoseconds; nbytes, of its file; checksum, of parent, start, ids and file; ids, its tokens.
# prompts: run, in which it ends.
SCHEMA = """
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS runs (
    run INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL,
    start INTEGER NOT NULL,
    first INTEGER NOT NULL,
    used INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    ids BLOB NOT NULL,
    UNIQUE (parent, start, first));
CREATE INDEX IF NOT EXISTS age ON runs (used, nbytes);
CREATE TABLE IF NOT EXISTS prompts (
    text TEXT PRIMARY KEY,
    run INTEGER NOT NULL,
    ids BLOB NOT NULL,
    embedding BLOB NOT NULL);
"""
# The least recently used run that nothing continues.
LEAF = """
SELECT run FROM runs AS one WHERE NOT EXISTS (SELECT 1 FROM runs WHERE parent = one.run)
ORDER BY used LIMIT 1
"""
# What continues a deleted run, or ends in one.
LEFT = (
    "DELETE FROM runs WHERE parent != 0 AND parent NOT IN (SELECT run FROM runs)",
    "DELETE FROM prompts WHERE run NOT IN (SELECT run FROM runs)",
)


class Store:
    """KV caches of a model by the tokens they were computed from, in a folder or in memory.

    A run holds what follows another run after some of its tokens: it is never split or changed. Its
    file is complete before its row in the index exists, and is deleted after that row is. So any
    number of processes may use a folder at once, and be killed at any moment: SQLite's transactions
    are the lock, and undo what a killed process has begun; the next writer deletes the files that
    have no row before it writes its own.

    Every row and file is verified before use, by a checksum, which finds accidents and not
    forgeries. A run that fails is deleted with a warning, those that continue it follow with the
    next writes, and the model reads those tokens again. Nothing else is ever deleted but to keep
    within the capacity: a file that can't be read now stays. A folder that can't be used at all is
    one warning, and the caches are kept in memory; one that can't be written to, or a full disk, is
    one warning too, and is read only. As files are mapped, nobody may change one in place while it is in use.

    capacity: bytes of this model's files, which they never exceed, unfinished ones included; the
    index, some 100 bytes a run and 4 bytes a token, isn't counted. The least recently used run that
    nothing continues is deleted first. The model must be in eval() and its weights must stay as they
    are: versions() says which changes are noticed, by get() and put(). Not for several threads at
    once, nor across a fork. The folders of stores before this format are left alone.
    """

    def __init__(
        self, model: nn.Module, folder: Path | str | None = None, capacity: float = float("inf")
    ) -> None:
        if not capacity > 0:  # nor is nan
            raise ValueError(f"the capacity must be more than 0 bytes, got {capacity}")
        c, weight = model.config, model.wte.weight
        self.model, self.capacity = model, capacity
        self.dtype, self.device = weight.dtype, weight.device
        heads = kv_heads(c)
        self.shape = (c.n_layer, 2, heads, -1, c.head_dim)  # of a run's keys and values
        self.token_bytes = 2 * c.n_layer * heads * c.head_dim * self.dtype.itemsize
        self.fingerprint, self.versions = fingerprint(model), versions(model)
        self.check_model()
        self.memory: dict[int, np.ndarray] = {}  # the files, if there is no folder
        self.warned = False
        self.folder = None if folder is None else Path(folder) / f"kv-{self.fingerprint[:16]}"
        self.db = self.opened()

    def opened(self) -> sqlite3.Connection:
        """Return the index: that of the folder, or one in memory if there is none that can be used."""
        try:
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
            index = self.folder / "index.db" if self.folder else ":memory:"
            db = sqlite3.connect(
                index, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
            db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self.warn(error)
            self.folder = None
            return self.opened()
        return db

    @property
    def nbytes(self) -> int:
        """Bytes of all files that have a row."""
        return int(self.db.execute("SELECT total(nbytes) FROM runs").fetchone()[0])

    def check_model(self) -> None:
        """Raise ValueError if the weights are no longer those that the stored caches were computed
        with, or the model is in train()."""
        if any(module.training for module in self.model.modules()):
            raise ValueError("the model is in train(): call model.eval() first")
        if versions(self.model) != self.versions:
            raise ValueError("the model's weights have changed: open a new store")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other writers out, or, of an index that can't be locked, only their changes. An error
        of the disk, or what is written to such an index, is a warning and ends the body; whatever is
        raised leaves the index as it was."""
        self.check_model()
        try:
            try:
                self.db.execute("BEGIN IMMEDIATE")
                patience = PATIENCE
            except sqlite3.Error as error:
                self.warn(error)
                self.db.execute("BEGIN")
                patience = 0  # who never lets go is waited for once
            self.db.execute(f"PRAGMA busy_timeout = {1000 * patience}")
            yield
            self.db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            self.warn(error)
        finally:
            with suppress(sqlite3.Error):  # there may be nothing to undo
                self.db.execute("ROLLBACK")

    def warn(self, error: Exception) -> None:
        """Say once in a store's life that its folder can't be used in full."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                "the KV cache store can't be used in full, which costs time and changes no token: "
                f"{error}",
                stacklevel=2,
            )

    def get(self, ids: Sequence[int]) -> Any:
        """Return a new cache of the longest stored prefix of ids, but never of all: one token has
        to be fed to get logits. The cache is empty if nothing is stored."""
        found: list[Tensor] = []
        with self.transaction():
            path, _ = self.match(ids[:-1])
            for row, n in path:
                kv = self.load(*row)
                if kv is None:
                    break
                found.append(kv[..., :n, :])
            self.use(path[: len(found)])
        if not found:
            return self.model.new_cache()
        # A single run is used where it is mapped: KVCache copies what it appends to.
        kv = found[0] if len(found) == 1 else torch.cat(found, dim=3)
        layers = [layer[:, None].to(self.device) for layer in kv]  # (2, 1, H, S, D)
        return self.model.new_cache(layers, torch.arange(kv.size(3), device=self.device))

    def put(
        self, ids: Sequence[int], cache: Any, text: str = "", embedding: np.ndarray | None = None
    ) -> None:
        """Store what cache has read of ids, as far as it isn't there yet and fits; with a text and
        its embedding (C,), prompts() knows it too if all of it is stored.

        Raises ValueError if cache is not that of the first tokens of a single text, read by this
        model.
        """
        n = len(cache)
        if n > len(ids) or cache.pos.tolist() != list(range(n)):
            raise ValueError(f"the cache, {n} tokens, isn't that of the first of {len(ids)} ids")
        needed = n * self.token_bytes
        held = {(kv.size(1), kv.dtype) for kv in cache.layers if n}
        if cache.nbytes != needed or not held <= {(1, self.dtype)}:
            rows = " and ".join(f"{size} rows of {dtype}" for size, dtype in held)
            raise ValueError(
                f"the cache has {cache.nbytes} bytes, {rows}, must have {needed}, 1 row of {self.dtype}"
            )
        with self.transaction():  # of its own: a file is only deleted once its row is for good
            path, at = self.match(ids[:n])
            self.use(path)
            self.prune()
            self.evict(self.capacity - (n - at) * self.token_bytes)
        with self.transaction():
            self.sweep()
            path, at = self.match(ids[:n])
            last, taken = 0, 0
            if path:
                (last, *_), taken = path[-1]
            excess = max(0, self.nbytes + (n - at) * self.token_bytes - self.capacity)
            end = max(at, n - math.ceil(excess / self.token_bytes))
            if at < end:
                kv = torch.stack([layer[:, 0, :, at:end] for layer in cache.layers])
                last = self.add(last, taken, ids[at:end], kv)
            if embedding is not None and 0 < end == n:
                vector = np.asarray(embedding, dtype=np.float32).tobytes()
                row = (text, last, packed(ids[:n]), vector)
                self.db.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)", row)

    def prompts(self) -> list[tuple[str, list[int], np.ndarray]]:
        """Return the texts that were stored with an embedding (C,), with their ids."""
        query = "SELECT text, ids, embedding FROM prompts WHERE run IN (SELECT run FROM runs)"
        found = []
        with self.transaction():
            for text, ids, embedding in self.db.execute(query):
                found.append((text, unpacked(ids), np.frombuffer(embedding, np.float32)))
        return found

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        with self.transaction():
            self.db.execute("DELETE FROM runs")
        with self.transaction():
            self.sweep()

    def match(self, ids: Sequence[int]) -> tuple[list[tuple[tuple, int]], int]:
        """Return the runs along ids, each as load() takes it and with how many of its tokens agree;
        and how many do in all."""
        path, at, run, n = [], 0, 0, 0
        while at < len(ids):
            row = self.db.execute(
                "SELECT run, parent, start, nbytes, checksum, ids FROM runs"
                " WHERE parent = ? AND start = ? AND first = ?",
                (run, n, ids[at]),
            ).fetchone()
            if row is None:
                break
            run, held = row[0], unpacked(row[-1])
            n = common_prefix(held, list(ids[at : at + len(held)]))
            path.append((row, n))
            at += n
        return path, at

    def load(
        self, run: int, parent: int, start: int, nbytes: int, checksum: int, ids: bytes
    ) -> Tensor | None:
        """Return the keys and values (L, 2, H, n, D) of a run; None if they aren't there, or aren't
        what was stored: then the run is deleted."""
        try:
            content = self.memory.get(run)
            if self.folder:
                content = np.memmap(regular(self.file(run)), mode="c")
            if content.nbytes != nbytes or self.checksum(parent, start, ids, content) != checksum:
                raise ValueError("its size or its checksum is wrong")
        except (FileNotFoundError, ValueError) as error:
            self.delete(run)
            warnings.warn(f"the stored KV cache {run} is not used: {error}", stacklevel=2)
            return None
        return torch.from_numpy(content).view(self.dtype).view(self.shape)

    def add(self, parent: int, start: int, ids: Sequence[int], kv: Tensor) -> int:
        """Store kv (L, 2, H, n, D) as a new run of tokens after the first `start` ones of its
        parent; return the run."""
        content, row_ids = raw(kv.detach().cpu()), packed(ids)
        checksum = self.checksum(parent, start, row_ids, content)
        row = (parent, start, ids[0], time.time_ns(), content.nbytes, checksum, row_ids)
        run = self.db.execute("INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
        if self.folder:
            try:
                self.file(run).write_bytes(content)
            except BaseException:  # half a file on a full disk
                self.file(run).unlink(missing_ok=True)
                raise
        else:
            self.memory[run] = content.copy()
        return run

    def use(self, path: Sequence[tuple[tuple, int]]) -> None:
        """Count the runs of a path as used now."""
        used = [(time.time_ns(), run) for (run, *_), _ in path]
        self.db.executemany("UPDATE runs SET used = ? WHERE run = ?", used)

    def evict(self, limit: float) -> None:
        """Delete the least recently used run that nothing continues, until the files take at most
        `limit` bytes or nothing is left."""
        while self.nbytes > limit:
            leaf = self.db.execute(LEAF).fetchone()
            if leaf is None:
                return
            self.delete(*leaf)

    def delete(self, run: int) -> None:
        """Delete a run from the index: its file, and what continues it, follow with sweep()."""
        self.db.execute("DELETE FROM runs WHERE run = ?", (run,))

    def prune(self) -> None:
        """Delete the rows that have lost their run."""
        for statement in LEFT:
            self.db.execute(statement)

    def sweep(self) -> None:
        """Delete what has lost its run: rows, and files. Those rows are found by nobody, so that it
        does no harm if they come back. Raises sqlite3.Error, before a file goes, if other writers,
        who may be about to add rows to their files, aren't kept out."""
        self.prune()
        self.db.execute("PRAGMA user_version = 1")  # fails if the folder has another index by now
        held = {run for (run,) in self.db.execute("SELECT run FROM runs")}
        self.memory = {run: content for run, content in self.memory.items() if run in held}
        names = {*os.listdir(self.folder)} if self.folder else set()
        for name in names - {f"{run}.kv" for run in held}:
            if re.fullmatch(r"\d+\.kv", name):
                (self.folder / name).unlink()

    def file(self, run: int) -> Path:
        """Return where the keys and values of a run are: their bytes (L, 2, H, n, D), nothing else."""
        return self.folder / f"{run}.kv"

    def checksum(self, parent: int, start: int, ids: bytes, content: Any) -> int:
        """Return the CRC-32 of a run: of the model, of where it begins, its tokens and its file."""
        begin = zlib.crc32(f"{self.fingerprint} {parent} {start} ".encode() + ids)
        return zlib.crc32(content, begin)


def packed(ids: Sequence[int]) -> bytes:
    """Return tokens as a row of the index has them."""
    return np.array(ids, np.int32).tobytes()


def unpacked(ids: bytes) -> list[int]:
    """Return tokens from a row of the index; bytes that make no token are left to its checksum."""
    return np.frombuffer(ids[: len(ids) // 4 * 4], np.int32).tolist()
