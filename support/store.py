"""A store of keys and values by the tokens they were computed from: an index of runs of tokens in
SQLite, and a file for each run.

Shapes: L layers, H heads of keys and values, D head size, S tokens of a cache, n tokens of a run.
"""

import os
import re
import sqlite3
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from support.files import regular_file
from support.fingerprints import fingerprint, parameter_versions, raw_bytes
from support.geometry import kv_heads
from support.prefix import common_prefix_length

# Seconds to wait for another process, which may never let go of the index.
BUSY_SECONDS = 30
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
# The run that continues another one after some of its tokens with a given next token.
CONTINUATION = """
SELECT run, parent, start, nbytes, checksum, ids FROM runs
WHERE parent = ? AND start = ? AND first = ?
"""
# The least recently used run that no other run continues.
LEAST_RECENT_LEAF = """
SELECT run FROM runs AS one WHERE NOT EXISTS (SELECT 1 FROM runs WHERE parent = one.run)
ORDER BY used LIMIT 1
"""
# What continues a deleted run, or ends in one.
DELETE_ORPHANS = (
    "DELETE FROM runs WHERE parent != 0 AND parent NOT IN (SELECT run FROM runs)",
    "DELETE FROM prompts WHERE run NOT IN (SELECT run FROM runs)",
)


class StoredRun(NamedTuple):
    """A row of the index: the run's number, the run that it continues after `start` tokens, and what
    its file and its tokens have to be."""

    number: int
    parent: int
    start: int
    nbytes: int
    checksum: int
    ids: bytes


class MatchedRun(NamedTuple):
    """A stored run, and how many of its first tokens agree with a text."""

    run: StoredRun
    matched: int


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
        config, weight = model.config, model.wte.weight
        heads = kv_heads(config)
        self.model = model
        self.capacity = capacity
        self._dtype = weight.dtype
        self._device = weight.device
        self._run_shape = (config.n_layer, 2, heads, -1, config.head_dim)
        self._token_bytes = 2 * config.n_layer * heads * config.head_dim * self._dtype.itemsize
        self._fingerprint = fingerprint(model)
        self._versions = parameter_versions(model)
        self._check_model()
        self._runs_in_memory: dict[int, np.ndarray] = {}  # the files, if there is no folder
        self._warned = False
        self.folder = None if folder is None else Path(folder) / f"kv-{self._fingerprint[:16]}"
        self._index = self._open_index()

    @property
    def nbytes(self) -> int:
        """Bytes of all files that have a row."""
        return int(self._index.execute("SELECT total(nbytes) FROM runs").fetchone()[0])

    def get(self, ids: Sequence[int]) -> Any:
        """Return a new cache of the longest stored prefix of ids, but never of all: one token has
        to be fed to get logits. The cache is empty if nothing is stored."""
        parts: list[Tensor] = []
        with self._transaction():
            path = self._matching_runs(ids[:-1])
            for run, matched in path:
                kv = self._read_run(run)
                if kv is None:
                    break
                parts.append(kv[..., :matched, :])
            self._mark_used(path[: len(parts)])
        if not parts:
            return self.model.new_cache()
        # A single run is used where it is mapped: KVCache copies what it appends to.
        kv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
        layers = [layer[:, None].to(self._device) for layer in kv]  # (2, 1, H, S, D)
        return self.model.new_cache(layers, torch.arange(kv.size(3), device=self._device))

    def put(
        self, ids: Sequence[int], cache: Any, text: str = "", embedding: np.ndarray | None = None
    ) -> None:
        """Store what cache has read of ids, as far as it isn't there yet and fits; with a text and
        its embedding (C,), prompts() knows it too if all of it is stored.

        Raises ValueError if cache is not that of the first tokens of a single text, read by this
        model.
        """
        self._check_cache(cache, ids)
        ids = ids[: len(cache)]
        with self._transaction():  # of its own: a file is only deleted once its row is for good
            path = self._matching_runs(ids)
            self._mark_used(path)
            self._delete_orphan_rows()
            missing = len(ids) - matched_tokens(path)
            self._evict_until(self.capacity - missing * self._token_bytes)
        with self._transaction():
            self._delete_orphan_rows()
            self._delete_orphan_files()
            last_run, stored = self._add_missing(ids, cache)
            if embedding is not None and 0 < stored == len(ids):
                vector = np.asarray(embedding, dtype=np.float32).tobytes()
                row = (text, last_run, pack_ids(ids), vector)
                self._index.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)", row)

    def prompts(self) -> list[tuple[str, list[int], np.ndarray]]:
        """Return the texts that were stored with an embedding (C,), with their ids."""
        query = "SELECT text, ids, embedding FROM prompts WHERE run IN (SELECT run FROM runs)"
        prompts = []
        with self._transaction():
            for text, ids, embedding in self._index.execute(query):
                prompts.append((text, unpack_ids(ids), np.frombuffer(embedding, np.float32)))
        return prompts

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        with self._transaction():
            self._index.execute("DELETE FROM runs")
        with self._transaction():
            self._delete_orphan_rows()
            self._delete_orphan_files()

    # Checks.

    def _check_model(self) -> None:
        """Raise ValueError if the weights are no longer those that the stored caches were computed
        with, or the model is in train()."""
        if any(module.training for module in self.model.modules()):
            raise ValueError("the model is in train(): call model.eval() first")
        if parameter_versions(self.model) != self._versions:
            raise ValueError("the model's weights have changed: open a new store")

    def _check_cache(self, cache: Any, ids: Sequence[int]) -> None:
        """Raise ValueError if cache is not that of the first tokens of ids, read by this model."""
        n = len(cache)
        if n > len(ids) or cache.pos.tolist() != list(range(n)):
            raise ValueError(f"the cache, {n} tokens, isn't that of the first of {len(ids)} ids")
        expected_bytes = n * self._token_bytes
        rows_and_dtypes = {(kv.size(1), kv.dtype) for kv in cache.layers if n}
        if cache.nbytes != expected_bytes or not rows_and_dtypes <= {(1, self._dtype)}:
            held = " and ".join(f"{rows} rows of {dtype}" for rows, dtype in rows_and_dtypes)
            raise ValueError(
                f"the cache has {cache.nbytes} bytes, {held}, must have {expected_bytes}, "
                f"1 row of {self._dtype}"
            )

    # The index and its transactions.

    def _open_index(self) -> sqlite3.Connection:
        """Return the index: that of the folder, or one in memory if there is none that can be used."""
        try:
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder / "index.db" if self.folder else ":memory:"
            index = sqlite3.connect(
                place, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            index.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self._warn_once(error)
            self.folder = None
            return self._open_index()
        return index

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Keep other writers out, or, of an index that can't be locked, only their changes. An error
        of the disk, or what is written to such an index, is a warning and ends the body; whatever is
        raised leaves the index as it was."""
        self._check_model()
        try:
            try:
                self._index.execute("BEGIN IMMEDIATE")
                busy_seconds = BUSY_SECONDS
            except sqlite3.Error as error:
                self._warn_once(error)
                self._index.execute("BEGIN")
                busy_seconds = 0  # a process that never lets go is waited for once
            self._index.execute(f"PRAGMA busy_timeout = {1000 * busy_seconds}")
            yield
            self._index.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            self._warn_once(error)
        finally:
            with suppress(sqlite3.Error):  # there may be nothing to undo
                self._index.execute("ROLLBACK")

    def _warn_once(self, error: Exception) -> None:
        """Say once in a store's life that its folder can't be used in full."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the KV cache store can't be used in full, which costs time and changes no token: "
                f"{error}",
                stacklevel=2,
            )

    # Runs. All of these are called within a transaction.

    def _matching_runs(self, ids: Sequence[int]) -> list[MatchedRun]:
        """Return the runs along ids, from the beginning of the text."""
        path: list[MatchedRun] = []
        parent, start, position = 0, 0, 0
        while position < len(ids):
            row = self._index.execute(CONTINUATION, (parent, start, ids[position])).fetchone()
            if row is None:
                break
            run = StoredRun(*row)
            stored_ids = unpack_ids(run.ids)
            matched = common_prefix_length(
                stored_ids, list(ids[position : position + len(stored_ids)])
            )
            path.append(MatchedRun(run, matched))
            parent, start = run.number, matched
            position += matched
        return path

    def _read_run(self, run: StoredRun) -> Tensor | None:
        """Return the keys and values (L, 2, H, n, D) of a run; None if they aren't there, or aren't
        what was stored: then the run is deleted."""
        try:
            content = self._runs_in_memory.get(run.number)
            if self.folder:
                content = np.memmap(regular_file(self._run_file(run.number)), mode="c")
            checksum = self._checksum(run.parent, run.start, run.ids, content)
            if content.nbytes != run.nbytes or checksum != run.checksum:
                raise ValueError("its size or its checksum is wrong")
        except (FileNotFoundError, ValueError) as error:
            self._delete_row(run.number)
            warnings.warn(f"the stored KV cache {run.number} is not used: {error}", stacklevel=2)
            return None
        return torch.from_numpy(content).view(self._dtype).view(self._run_shape)

    def _add_missing(self, ids: Sequence[int], cache: Any) -> tuple[int, int]:
        """Store as a new run what the store lacks of ids, a text that cache has read, as far as it
        fits. Return the number of the text's last run, and how many of its tokens are stored now."""
        path = self._matching_runs(ids)
        last_run, start = 0, 0
        if path:
            last_run, start = path[-1].run.number, path[-1].matched
        present = matched_tokens(path)
        fitting = (self.capacity - self.nbytes) / self._token_bytes
        end = max(present, int(min(len(ids), present + fitting)))
        if present < end:
            kv = torch.stack([layer[:, 0, :, present:end] for layer in cache.layers])
            last_run = self._add_run(last_run, start, ids[present:end], kv)
        return last_run, end

    def _add_run(self, parent: int, start: int, ids: Sequence[int], kv: Tensor) -> int:
        """Store kv (L, 2, H, n, D) as a new run of tokens after the first `start` ones of its
        parent; return its number."""
        content, packed_ids = raw_bytes(kv.detach().cpu()), pack_ids(ids)
        checksum = self._checksum(parent, start, packed_ids, content)
        row = (parent, start, ids[0], time.time_ns(), content.nbytes, checksum, packed_ids)
        insert = "INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)"
        run = self._index.execute(insert, row).lastrowid
        if self.folder:
            try:
                self._run_file(run).write_bytes(content)
            except BaseException:  # half a file on a full disk
                self._run_file(run).unlink(missing_ok=True)
                raise
        else:
            self._runs_in_memory[run] = content.copy()
        return run

    def _mark_used(self, path: Sequence[MatchedRun]) -> None:
        """Note that the runs of a path are used now."""
        used = [(time.time_ns(), run.number) for run, _ in path]
        self._index.executemany("UPDATE runs SET used = ? WHERE run = ?", used)

    def _evict_until(self, limit: float) -> None:
        """Delete the least recently used run that no other run continues, until the files take at
        most `limit` bytes or no run is left."""
        while self.nbytes > limit:
            leaf = self._index.execute(LEAST_RECENT_LEAF).fetchone()
            if leaf is None:
                return
            self._delete_row(*leaf)

    def _delete_row(self, run: int) -> None:
        """Delete a run from the index: the next writer deletes its file, and what continues it."""
        self._index.execute("DELETE FROM runs WHERE run = ?", (run,))

    def _delete_orphan_rows(self) -> None:
        """Delete the rows that have lost their run."""
        for statement in DELETE_ORPHANS:
            self._index.execute(statement)

    def _delete_orphan_files(self) -> None:
        """Delete the files that have no row. Rows deleted before it in the same transaction do no harm
        if they come back: nothing leads to them. Raises sqlite3.Error, before a file goes, if other
        writers, who may be about to add rows to their files, aren't kept out."""
        # It fails if the folder has another index by now.
        self._index.execute("PRAGMA user_version = 1")
        numbers = {run for (run,) in self._index.execute("SELECT run FROM runs")}
        for run in self._runs_in_memory.keys() - numbers:
            del self._runs_in_memory[run]
        names = {*os.listdir(self.folder)} if self.folder else set()
        for name in names - {f"{run}.kv" for run in numbers}:
            if re.fullmatch(r"\d+\.kv", name):
                (self.folder / name).unlink()

    def _run_file(self, run: int) -> Path:
        """Return where the keys and values of a run are: their bytes (L, 2, H, n, D), nothing else."""
        return self.folder / f"{run}.kv"

    def _checksum(self, parent: int, start: int, ids: bytes, content: Any) -> int:
        """Return the CRC-32 of a run: of the model, of where it begins, its tokens and its file."""
        beginning = zlib.crc32(f"{self._fingerprint} {parent} {start} ".encode() + ids)
        return zlib.crc32(content, beginning)


def matched_tokens(path: Sequence[MatchedRun]) -> int:
    """Return how many tokens of a text the runs along it hold."""
    return sum(matched for _, matched in path)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return tokens as a row of the index has them."""
    return np.array(ids, np.int32).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return tokens from a row of the index; bytes that make no token are left to its checksum."""
    return np.frombuffer(packed[: len(packed) // 4 * 4], np.int32).tolist()
