"""A store of keys and values by the tokens they were computed from: an index of runs of tokens in
SQLite, and a file for each run.

Shapes: L layers, H heads of keys and values, D head size, S tokens of a cache, n tokens of a run.
"""

from __future__ import annotations

import math
import sqlite3
import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.files import map_file
from support.fingerprints import fingerprint, raw, versions
from support.geometry import kv_heads
from support.prefix import common_prefix

PATIENCE = 30  # seconds to wait for another process, which may never let go of the index
# The index. A killed process loses nothing by synchronous = OFF; after a power cut the checksums tell.
# runs: run, its file's name, which is never used again; parent, the run that it continues, or 0 if it
# begins a text; start, after how many tokens of that one; first, its first token; used, the larger, the
# later; nbytes, of its file; checksum, of parent, start, ids and file; ids, its tokens.
# prompts: run, in which it ends. A deleted run takes its prompts along.
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
CREATE TABLE IF NOT EXISTS gone (  -- runs whose rows are deleted and whose files may be left
    run INTEGER PRIMARY KEY,
    nbytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    text TEXT PRIMARY KEY,
    run INTEGER NOT NULL,
    ids BLOB NOT NULL,
    embedding BLOB NOT NULL);
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON runs BEGIN
    INSERT INTO gone VALUES (OLD.run, OLD.nbytes);
    DELETE FROM prompts WHERE run = OLD.run;
END;
"""
LEAF = """
SELECT run FROM runs AS one WHERE run != ? AND NOT EXISTS (SELECT 1 FROM runs WHERE parent = one.run)
ORDER BY used LIMIT 1
"""
DELETE = """
WITH RECURSIVE subtree (run) AS (
    SELECT ? UNION SELECT runs.run FROM runs JOIN subtree ON runs.parent = subtree.run)
DELETE FROM runs WHERE run IN subtree
"""


class Store:
    """KV caches of a model by the tokens they were computed from, in a folder or in memory.

    A run holds what follows another run after some of its tokens: it is never split or changed. Its
    file is complete before its row in the index exists, and is deleted after that row is. So any
    number of processes may use a folder at once, and be killed at any moment: SQLite's transactions
    are the lock, and undo what a killed process has begun; the next writer replaces the file that
    it may have left, or deletes it.

    Every row and file is verified before use, by a checksum, which finds accidents and not
    forgeries. A run that fails is deleted with a warning, together with those that continue it, and
    the model reads those tokens again. Nothing else is ever deleted but to keep within the capacity:
    a file that can't be read now stays. A folder that can't be used at all is one warning, and the
    caches are kept in memory; one that can't be written to, or a full disk, is one warning too, and
    is read only. As files are mapped, nobody may change one in place while it is in use.

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
        self.memory: dict[int, bytearray] = {}  # the files, if there is no folder
        self.patience, self.warned = PATIENCE, False
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
        """Bytes of all files, those that are yet to be deleted included."""
        return self.held + self.total("gone")

    @property
    def held(self) -> int:
        """Bytes of the files that get() may read."""
        return self.total("runs")

    def total(self, table: str) -> int:
        """Return the bytes of a table's files."""
        return int(self.db.execute(f"SELECT total(nbytes) FROM {table}").fetchone()[0])

    def check_model(self) -> None:
        """Raise ValueError if the weights are no longer those that the stored caches were computed
        with, or the model is in train()."""
        if any(module.training for module in self.model.modules()):
            raise ValueError(
                "the model is in train(), where dropout makes its caches random: call model.eval() first"
            )
        if versions(self.model) != self.versions:
            raise ValueError(
                "the model's weights have changed since this store was opened: open a new one"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other writers out. An error of the disk, or what is written to an index that can't be
        locked, is a warning and ends the body; whatever is raised leaves the index as it was."""
        self.check_model()
        try:
            try:
                self.db.execute(f"PRAGMA busy_timeout = {1000 * self.patience}")
                self.db.execute("BEGIN IMMEDIATE")
                self.patience = PATIENCE
            except sqlite3.Error as error:
                self.patience = 0  # who never lets go is waited for once
                self.warn(error)
                self.db.execute("PRAGMA query_only = ON")
            yield
            if self.db.in_transaction:
                self.db.execute("COMMIT")
                self.sweep()
        except (OSError, sqlite3.Error) as error:
            self.warn(error)
        finally:
            with suppress(sqlite3.Error):
                self.db.execute("PRAGMA query_only = OFF")
                if self.db.in_transaction:
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
            path = self.match(ids[:-1])
            for run, n in path:
                kv = self.load(run)
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
        for kv in cache.layers if n else []:
            if kv.size(1) != 1 or kv.dtype != self.dtype:
                raise ValueError(
                    f"the cache has {kv.size(1)} rows of {kv.dtype}, must have 1 of {self.dtype}"
                )
        needed = n * self.token_bytes
        if cache.nbytes != needed:
            raise ValueError(
                f"the cache has {cache.nbytes} bytes, must have {needed} for {n} tokens of this model"
            )
        with self.transaction():  # of its own: a file is only deleted once its row is for good
            self.make_room(ids[:n])
        with self.transaction():
            path = self.match(ids[:n])
            last, taken = path[-1] if path else (0, 0)
            at = sum(length for _, length in path)
            excess = max(0, self.nbytes + (n - at) * self.token_bytes - self.capacity)
            end = max(at, n - math.ceil(excess / self.token_bytes))
            if at < end:
                kv = torch.stack([layer[:, 0, :, at:end] for layer in cache.layers])
                last = self.add(last, taken, ids[at:end], kv)
            if embedding is not None and 0 < end == n:
                vector = np.asarray(embedding, dtype=np.float32).tobytes()
                row = (text, last, array("i", ids[:n]).tobytes(), vector)
                self.db.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)", row)

    def prompts(self) -> list[tuple[str, list[int], np.ndarray]]:
        """Return the texts that were stored with an embedding (C,), with their ids."""
        found = []
        with self.transaction():
            for text, ids, embedding in self.db.execute("SELECT text, ids, embedding FROM prompts"):
                found.append((text, unpacked(ids), np.frombuffer(embedding, np.float32)))
        return found

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        with self.transaction():
            self.evict(-1)

    def match(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the runs along ids, and how many tokens of each agree."""
        path, at, run, n = [], 0, 0, 0
        while at < len(ids):
            row = self.db.execute(
                "SELECT run, ids FROM runs WHERE parent = ? AND start = ? AND first = ?",
                (run, n, ids[at]),
            ).fetchone()
            if row is None:
                break
            run, held = row[0], unpacked(row[1])
            n = common_prefix(held, list(ids[at : at + len(held)]))
            path.append((run, n))
            at += n
        return path

    def load(self, run: int) -> Tensor | None:
        """Return the keys and values (L, 2, H, n, D) of a run; None if they aren't there, or aren't
        what was stored: then the run, and what continues it, is deleted."""
        row = self.db.execute(
            "SELECT parent, start, ids, nbytes, checksum FROM runs WHERE run = ?", (run,)
        ).fetchone()
        if row is None:  # who can't keep other writers out may come too late
            return None
        parent, start, ids, nbytes, checksum = row
        try:
            content = map_file(self.file(run)) if self.folder else self.memory[run]
            if len(content) != nbytes:
                raise ValueError(f"it has {len(content)} bytes instead of {nbytes}")
            if self.checksum(parent, start, ids, content) != checksum:
                raise ValueError("its checksum is wrong")
        except (FileNotFoundError, KeyError, ValueError) as error:
            if isinstance(error, ValueError):  # else somebody, or a killed process, has deleted it
                warnings.warn(f"the stored KV cache {run} is not used: {error}", stacklevel=2)
            self.delete(run)
            return None
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape)

    def add(self, parent: int, start: int, ids: Sequence[int], kv: Tensor) -> int:
        """Store kv (L, 2, H, n, D) as a new run of tokens after the first `start` ones of its
        parent; return the run."""
        content, packed = raw(kv.detach().cpu()), array("i", ids).tobytes()
        checksum = self.checksum(parent, start, packed, content)
        run = self.db.execute(
            "INSERT INTO runs (parent, start, first, nbytes, ids, checksum, used)"
            " VALUES (?, ?, ?, ?, ?, ?, (SELECT coalesce(max(used), 0) + 1 FROM runs))",
            (parent, start, ids[0], content.nbytes, packed, checksum),
        ).lastrowid
        self.remove(run)  # what a killed process, or somebody, has left in its place
        try:
            if self.folder:
                self.file(run).write_bytes(content)
            else:
                self.memory[run] = bytearray(content)
        except BaseException:
            self.remove(run)
            raise
        return run

    def use(self, path: Sequence[tuple[int, int]]) -> None:
        """Count the runs of a path as used now."""
        self.db.executemany(
            "UPDATE runs SET used = (SELECT max(used) + 1 FROM runs) WHERE run = ?",
            [(run,) for run, _ in reversed(path)],  # what continues a run is older
        )

    def make_room(self, ids: Sequence[int]) -> None:
        """Count the runs along ids as used now, and evict others until a file of the rest fits."""
        self.evict(self.capacity)  # another process may have a larger one
        path = self.match(ids)
        self.use(path)
        rest = len(ids) - sum(length for _, length in path)
        if rest:
            kept = path[-1][0] if path else 0
            self.evict(self.capacity - rest * self.token_bytes, kept)

    def evict(self, limit: float, kept: int = 0) -> None:
        """Delete the least recently used run that nothing continues, until the files take at most
        `limit` bytes, or nothing is left but the run `kept` and those that it continues."""
        while self.held > limit:
            leaf = self.db.execute(LEAF, (kept,)).fetchone()
            if leaf is None:
                return
            self.delete(*leaf)

    def delete(self, run: int) -> None:
        """Delete a run, and those that continue it, from the index: their files follow."""
        self.db.execute(DELETE, (run,))

    def sweep(self) -> None:
        """Delete the files of deleted runs, also of those that a killed process has deleted."""
        for row in self.db.execute("SELECT run FROM gone").fetchall():
            self.remove(*row)
            self.db.execute("DELETE FROM gone WHERE run = ?", row)

    def remove(self, run: int) -> None:
        """Delete the file of a run, if there is one."""
        self.memory.pop(run, None)
        if self.folder:
            self.file(run).unlink(missing_ok=True)

    def file(self, run: int) -> Path:
        """Return where the keys and values of a run are: their bytes (L, 2, H, n, D), nothing else."""
        return self.folder / f"{run}.kv"

    def checksum(self, parent: int, start: int, ids: bytes, content: Any) -> int:
        """Return the CRC-32 of a run: of the model, of where it begins, its tokens and its file."""
        begin = zlib.crc32(f"{self.fingerprint} {parent} {start} ".encode() + ids)
        return zlib.crc32(content, begin)


def unpacked(ids: bytes) -> list[int]:
    """Return tokens from a row of the index; bytes that make no token are left to its checksum."""
    return [*array("i", ids[: len(ids) // 4 * 4])]
