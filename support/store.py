"""A store of keys and values, found by the tokens they were computed from: an SQLite index of runs
of tokens, and a file for each run.

Where all layers keep every token, a text can go on from any of its stored tokens. A window has
evicted what an earlier cut would need, and a state has all tokens in one matrix: such layers can go
on only from a checkpoint, a copy of what they held at one place. So a prompt that departs from a
stored text is read again from the last checkpoint before that point, even though the tokens agree
further, and even if no window has evicted anything yet.

Shapes: L layers, H heads of keys and values, D head size, S tokens of a cache, n tokens of a run.
"""

import operator
import os
import re
import sqlite3
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from support.files import regular_file, short_repr
from support.fingerprints import fingerprint, model_versions, raw_bytes
from support.prefix import common_prefix_length

# Seconds to wait for another process that has locked the index, perhaps for good.
BUSY_SECONDS = 30
# The index. With synchronous = OFF a killed process still loses nothing; after a power cut the
# checksums reveal what was lost. The table runs has these columns:
# - run, the run's number and its file's name: never used again, and larger than its parent's;
# - parent, the run that it continues, or 0 if it begins a text;
# - start, the number of the parent's tokens that it follows;
# - first, its first token;
# - used, the number of the call that used it last;
# - nbytes, the bytes of its file;
# - checksum, of parent, start, ids and file;
# - ids, its tokens.
# A checkpoint is a row without tokens, whose first is -1.
# In prompts, run is the run in which a prompt ends. deleted lists runs whose file, and the runs
# that continue them, are yet to be deleted. total holds the bytes of all runs; triggers update it.
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
CREATE INDEX IF NOT EXISTS age ON runs (used, run DESC);
CREATE TABLE IF NOT EXISTS prompts (
    text TEXT PRIMARY KEY,
    run INTEGER NOT NULL,
    ids BLOB NOT NULL,
    embedding BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS ends ON prompts (run);
CREATE TABLE IF NOT EXISTS deleted (
    run INTEGER PRIMARY KEY,
    nbytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS total (nbytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON runs BEGIN
    UPDATE total SET nbytes = nbytes + new.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF nbytes ON runs BEGIN
    UPDATE total SET nbytes = nbytes - old.nbytes + new.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON runs BEGIN
    UPDATE total SET nbytes = nbytes - old.nbytes;
    INSERT OR REPLACE INTO deleted VALUES (old.run, old.nbytes);
    DELETE FROM prompts WHERE run = old.run;
END;
"""
# The run that continues a given parent, after a number of the parent's tokens, with a given token.
CONTINUATION = """
SELECT run, parent, start, nbytes, checksum, ids FROM runs
WHERE parent = ? AND start = ? AND first = ?
"""
# The checkpoints of a run, within its first tokens.
CHECKPOINT = """
SELECT run, parent, start, nbytes, checksum, ids FROM runs
WHERE parent = ? AND start <= ? AND first = -1 ORDER BY start DESC
"""
# A call marks all runs of a text with its number. So a run's mark is never older than those of the
# runs that continue it, and of the runs with the same mark, none continues the last.
MARK_USED = "UPDATE runs SET used = ? WHERE run = ?"
OLDEST = "SELECT run FROM runs ORDER BY used, run DESC LIMIT 1"
# The first deletes rows of runs that continue deleted runs; the second forgets a deleted run that
# no row continues any more.
DELETE_ORPHANS = """
DELETE FROM runs WHERE parent IN (SELECT run FROM deleted)
"""
DELETE_TRACES = """
DELETE FROM deleted WHERE run = ? AND NOT EXISTS (SELECT 1 FROM runs WHERE parent = deleted.run)
"""
# Rows that can't be reached from the beginning of a text: damage has changed their parent.
DELETE_UNREACHABLE = """
DELETE FROM runs WHERE parent >= run OR parent != 0 AND parent NOT IN
    (SELECT run FROM runs UNION SELECT run FROM deleted)
"""


class StoredRun(NamedTuple):
    """A row of the index: the run's number, the run that it continues after `start` tokens, the
    size of its file, the checksum, and its tokens as pack_ids() makes them."""

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
    """KV caches of a model, found by the tokens they were computed from, in a folder or in memory.

    A run holds consecutive tokens, which begin a text or follow some of the tokens of another run.
    It is never split or changed. Its file is complete before its row in the index exists, and is
    deleted after that row is. So any number of processes may use a folder at once, and be killed at
    any moment: SQLite's transactions are the lock, and undo what a killed process has begun; the
    first put() of a store deletes files that have no row.

    Every row and file is verified before use by a checksum, which finds accidents but not
    forgeries. A run that fails is deleted with a warning, the next writes delete the runs that
    continue it, and the model reads those tokens again. Apart from that and clear(), the store
    deletes runs only to stay within its capacity: a file that can't be read at the moment stays. If
    a folder can't be used at all, there is one warning, and the caches are kept in memory. If it
    can't be written to, or the disk is full, there is one warning, and the folder is only read.
    Files are memory-mapped, so nobody may change one in place while it is in use.

    needs_checkpoints: whether a layer doesn't keep every token; the model is run on one token to see
    that. If so, runs hold the other layers' keys and values, and each put() adds a checkpoint at the
    end of its text: a run of no tokens, with a file and a checksum of its own. Then get() returns a
    cache that ends at a checkpoint.

    capacity: the most bytes that this model's files may take, unfinished ones included; the index,
    some 100 bytes a run and 4 bytes a token, isn't counted. The least recently used run that no
    other run continues is deleted first; then put() stores as much as fits, or nothing if a text
    and its checkpoint exceed the capacity.

    Each model has a folder of its own, named after its fingerprint(): class, configuration,
    parameters and buffers. identity: names what else the keys and values depend on, such as a hook
    that changes them. The model must be in eval() and stay unchanged: model_versions() says which
    changes get() and put() notice, a hook that is added later among them. A store must not be used
    by several threads at once, nor across a fork.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path | str | None = None,
        capacity: float = float("inf"),
        identity: str = "",
    ) -> None:
        if not capacity > 0:  # NaN isn't, either
            raise ValueError(f"the capacity must be more than 0 bytes, got {capacity}")
        self.model = model
        self.capacity = capacity
        self._device = model.wte.weight.device
        self._identity = fingerprint(model, identity)
        self._versions = model_versions(model)
        self._check_model()
        self._sample = model.new_cache()  # of one token: it shows what this model's caches hold
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            model(token, self._sample, last_only=True)
        tensors = held_tensors(self._sample)
        # Whether a tensor has a row for each token, (2, 1, H, S, D): it has a single one now, and a
        # ring has more slots.
        self._has_rows = [tensor.dim() == 5 and tensor.size(3) == 1 for tensor in tensors]
        self._token_bytes = sum(kv.nbytes for kv in self._split(tensors)[0])
        self.needs_checkpoints = not all(self._has_rows)
        self._runs_in_memory: dict[int, np.ndarray] = {}  # the files, if there is no folder
        self._warned = False
        self._swept = False  # whether what damage and killed processes left has been deleted
        self.folder = None if folder is None else Path(folder) / f"model-{self._identity[:16]}"
        self._index = self._open_index()

    @property
    def nbytes(self) -> int:
        """Bytes of all files that have a row."""
        return self._index.execute("SELECT nbytes FROM total").fetchone()[0]

    def get(self, ids: Sequence[int]) -> Any:
        """Return a new cache of the longest stored prefix of ids, but never of all of ids: one
        token has to be fed to get logits. With needs_checkpoints, the prefix ends at a checkpoint.
        The cache is empty if there is none. Raises TypeError or ValueError if ids aren't whole
        numbers of 4 bytes."""
        ids = checked_ids(ids)
        self._check_model()
        path: list[MatchedRun] = []
        contents: list[np.ndarray] = []
        with self._transaction():
            path = self._up_to_checkpoint(self._matching_runs(ids[:-1]))
            for run, _ in path:
                content = self._read_run(run)
                if content is None:
                    break
                contents.append(content)
            self._mark_used(path[: len(contents)])
        if not contents or (self.needs_checkpoints and len(contents) < len(path)):
            return self.model.new_cache()
        return self._restored(path[: len(contents)], contents)

    def put(
        self, ids: Sequence[int], cache: Any, text: str = "", embedding: np.ndarray | None = None
    ) -> None:
        """Store what `cache` has read of a text, as far as it isn't stored yet and fits.

        ids: all tokens of the text, from its first one; the last may have been written but not
        read. text and its embedding (C,): returned by prompts() from now on, if all of ids is
        stored.

        Raises ValueError if the cache hasn't read exactly these tokens, holds more than one text,
        or isn't this model's; TypeError or ValueError if ids aren't whole numbers of 4 bytes.
        """
        ids = checked_ids(ids)
        self._check_cache(cache, ids)
        self._check_model()
        n = len(cache)
        if n == 0:
            return  # nothing has been read
        ids = ids[:n]
        rows, others = self._split(first_rows(tensor, n) for tensor in held_tensors(cache))
        checkpoint = packed(others)
        if others and n * self._token_bytes + checkpoint.nbytes > self.capacity:
            return  # a part would be of no use
        with self._transaction():  # its own: files are deleted after their rows
            self._make_room(ids, checkpoint.nbytes)
        with self._transaction():
            self._delete_files()
            last_run, stored = self._add_missing(ids, rows, checkpoint)
            if embedding is not None and stored == n:
                vector = np.asarray(embedding, dtype=np.float32).tobytes()
                row = (text, last_run, pack_ids(ids), vector)
                self._index.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?, ?)", row)

    def prompts(self) -> list[tuple[str, list[int], np.ndarray]]:
        """Return (text, ids, embedding (C,)) for each text that was stored with an embedding."""
        query = "SELECT text, ids, embedding FROM prompts WHERE run IN (SELECT run FROM runs)"
        self._check_model()
        prompts = []
        with self._transaction():
            for text, packed_ids, embedding in self._index.execute(query):
                ids = unpack_ids(packed_ids)
                if ids and is_packed(embedding):
                    prompts.append((text, ids, np.frombuffer(embedding, np.float32)))
        return prompts

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        self._check_model()
        self._swept = False
        with self._transaction():
            self._index.execute("DELETE FROM runs")
        with self._transaction():
            self._delete_files()

    # Checks.

    def _check_model(self) -> None:
        """Raise ValueError if the weights are no longer those that the stored caches were computed
        with, or the model is in train()."""
        if any(module.training for module in self.model.modules()):
            raise ValueError("the model is in train(): call model.eval() first")
        if model_versions(self.model) != self._versions:
            raise ValueError("the model's weights or settings have changed: open a new store")

    def _check_cache(self, cache: Any, ids: Sequence[int]) -> None:
        """Raise ValueError unless the cache holds what this model has read of ids: all of them, or
        all but the last. Raise TypeError if it is no cache."""
        if not hasattr(cache, "layers"):
            raise TypeError(f"cache must be a KV cache, got {type(cache).__name__}")
        n = len(cache)
        expected = self._cache_of(self._expected(n), n)
        first_pos = int(cache.positions(1)[0]) - n
        if first_pos != 0 or cache.pos.tolist() != expected.pos.tolist():
            raise ValueError(
                f"the cache of {n} tokens must be of positions 0 to {n - 1}, begins at {first_pos}"
            )
        if n not in (len(ids), len(ids) - 1):
            raise ValueError(
                f"the cache has read {n} tokens, must be all {len(ids)} ids, or all but the last: "
                "past the context, generate() begins a new cache in the middle of the text"
            )
        given, needed = shapes(cache, n), shapes(expected, n)
        if given != needed:
            raise ValueError(
                f"the cache has {len(given)} tensors, {short_repr({*given})}, "
                f"must have {len(needed)}, {short_repr({*needed})}"
            )

    # Caches and their tensors.

    def _split(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return of the tensors of a cache those that have a row for each token, and all others."""
        rows, others = [], []
        for tensor, has_rows in zip(tensors, self._has_rows, strict=True):
            part = rows if has_rows else others
            part.append(tensor)
        return rows, others

    def _expected(self, n: int) -> list[Tensor]:
        """Return tensors of the shapes and dtypes that a cache of n tokens holds; of a ring, of the
        slots that they fill."""
        return [
            tensor.expand(-1, -1, -1, n, -1) if has_rows else first_rows(tensor, n)
            for tensor, has_rows in zip(held_tensors(self._sample), self._has_rows, strict=True)
        ]

    def _cache_of(self, tensors: Iterable[Tensor], n: int) -> Any:
        """Return a new cache that has read n tokens and holds these tensors, in order."""
        cache, following = self.model.new_cache(), iter(tensors)
        cache.commit(torch.arange(n, device=self._device))  # which counts tokens in any cache
        for layer, like in zip(layer_caches(cache), layer_caches(self._sample), strict=True):
            layer.layers = []
            for entry in like.layers:
                if isinstance(entry, tuple):
                    layer.layers.append(tuple(next(following) for _ in entry))
                else:
                    layer.layers.append(next(following))
        return cache

    def _restored(self, path: Sequence[MatchedRun], contents: list[np.ndarray]) -> Any:
        """Return a new cache of what the files along a path hold; the last is of a checkpoint, if
        this model needs one."""
        n = matched_tokens(path)
        checkpoint: list[Tensor] = []
        if self.needs_checkpoints:
            checkpoint = unpacked(contents.pop(), self._split(self._expected(n))[1])
        parts = []  # of each run, its keys and values (2, 1, H, matched, D)
        for content, (run, matched) in zip(contents, path, strict=False):
            rows, _ = self._split(self._expected(len(run.ids) // 4))
            parts.append([kv[..., :matched, :] for kv in unpacked(content, rows)])
        tensors = []
        for sample, has_rows in zip(held_tensors(self._sample), self._has_rows, strict=True):
            if has_rows:
                kv = [part.pop(0) for part in parts]
                # A single run from a folder is used as mapped, not copied: KVCache copies when it
                # appends.
                whole = kv[0] if len(kv) == 1 and self.folder else torch.cat(kv, dim=3)
                tensors.append(whole.to(self._device))
            else:
                tensors.append(torch.zeros_like(sample))
                first_rows(tensors[-1], n).copy_(checkpoint.pop(0))
        return self._cache_of(tensors, n)

    # The index and its transactions.

    def _open_index(self) -> sqlite3.Connection:
        """Return the folder's index, or one in memory if there is no folder, or it can't be used."""
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
        """Run the body as one transaction, which keeps other writers out.

        If the index can't be locked, the body sees it as it is now, and other writers' changes stay
        unseen. An error of the disk, or a write to an index that can't be locked, becomes a warning
        and ends the body. If anything is raised, the index is left as it was.
        """
        try:
            try:
                self._index.execute("BEGIN IMMEDIATE")
                busy_seconds = BUSY_SECONDS
            except sqlite3.Error as error:
                self._warn_once(error)
                self._index.execute("BEGIN")
                busy_seconds = 0  # a process that never unlocks the index is waited for only once
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
        """Return the stored runs that hold the beginning of ids, in order."""
        path: list[MatchedRun] = []
        parent, start, position = 0, 0, 0
        while position < len(ids):
            row = self._index.execute(CONTINUATION, (parent, start, ids[position])).fetchone()
            if row is None:
                break
            run = StoredRun(*row)
            stored_ids = unpack_ids(run.ids)
            matched = common_prefix_length(stored_ids, ids[position : position + len(stored_ids)])
            if matched == 0:
                self._delete_damaged(run, "its ids aren't those of its row")
                break
            path.append(MatchedRun(run, matched))
            parent, start = run.number, matched
            position += matched
        return path

    def _up_to_checkpoint(self, path: list[MatchedRun]) -> list[MatchedRun]:
        """Return a path as far as every layer can go on from its end: up to its last checkpoint,
        which comes last, with no tokens. It isn't verified yet."""
        if not self.needs_checkpoints:
            return path
        for i, (run, matched) in reversed([*enumerate(path)]):
            for row in self._index.execute(CHECKPOINT, (run.number, matched)).fetchall():
                checkpoint = StoredRun(*row)
                if checkpoint.ids == b"":
                    ending = [MatchedRun(run, checkpoint.start), MatchedRun(checkpoint, 0)]
                    return path[:i] + ending
                self._delete_damaged(checkpoint, "a checkpoint has no ids")
        return []

    def _read_run(self, run: StoredRun) -> np.ndarray | None:
        """Return the content of a run's file; None if it isn't there, or isn't what was stored:
        then the run is deleted."""
        try:
            content = self._runs_in_memory.get(run.number)
            if self.folder:
                content = mapped(self._run_file(run.number))
            checksum = self._checksum(run.parent, run.start, run.ids, content)
            if content.nbytes != run.nbytes or checksum != run.checksum:
                raise ValueError("its size or its checksum is wrong")
        except (FileNotFoundError, ValueError) as error:
            self._delete_damaged(run, str(error))
            return None
        return content

    def _delete_damaged(self, run: StoredRun, why: str) -> None:
        """Delete a run that isn't what was stored, with a warning."""
        self._delete_row(run.number)
        warnings.warn(f"the stored KV cache {run.number} is not used: {why}", stacklevel=2)

    def _make_room(self, ids: Sequence[int], checkpoint_bytes: int) -> None:
        """Delete runs until the part of ids that isn't stored yet fits, and its checkpoint."""
        self._delete_files()
        path = self._matching_runs(ids)
        self._mark_used(path)
        missing_bytes = (len(ids) - matched_tokens(path)) * self._token_bytes
        if matched_tokens(self._up_to_checkpoint(path)) < len(ids):
            missing_bytes += checkpoint_bytes
        self._evict_until(self.capacity - missing_bytes)

    def _add_missing(
        self, ids: Sequence[int], rows: Sequence[Tensor], checkpoint: np.ndarray
    ) -> tuple[int, int]:
        """Store the part of ids that isn't stored yet as a new run, as far as it fits, and the
        checkpoint at its end, if there is one and all fits. rows: keys and values (2, 1, H, n, D)
        of all of ids. Return the number of the text's last run, and how many of its tokens are
        stored now."""
        path = self._matching_runs(ids)
        last_run, start = 0, 0
        if path:
            last_run, start = path[-1].run.number, path[-1].matched
        present = matched_tokens(path)
        undeleted = self._index.execute("SELECT total(nbytes) FROM deleted").fetchone()[0]
        free = self.capacity - self.nbytes - undeleted - checkpoint.nbytes
        fitting = len(ids) if free >= 0 else -1  # tokens, if only the checkpoint takes bytes
        if self._token_bytes:
            fitting = free / self._token_bytes
        end = max(present, int(min(len(ids), present + fitting)))
        has_checkpoint = matched_tokens(self._up_to_checkpoint(path)) == len(ids)
        now = self._mark_used(path)
        if present < end:
            content = packed(kv[..., present:end, :] for kv in rows)
            last_run = self._add_run(last_run, start, ids[present:end], content, now)
            start = end - present
        if checkpoint.nbytes and not has_checkpoint and present + fitting >= len(ids):
            self._add_run(last_run, start, [], checkpoint, now)
        return last_run, end

    def _add_run(
        self, parent: int, start: int, ids: Sequence[int], content: np.ndarray, used: int
    ) -> int:
        """Store the content of a file as a new run of tokens that follow the first `start` tokens
        of its parent; return its number. used: the number of the call."""
        packed_ids = pack_ids(ids)
        checksum = self._checksum(parent, start, packed_ids, content)
        first = ids[0] if ids else -1
        row = (parent, start, first, used, content.nbytes, checksum, packed_ids)
        insert = "INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)"
        run = self._index.execute(insert, row).lastrowid
        if self.folder:
            self._run_file(run).unlink(missing_ok=True)  # what a killed process left, or a link
            try:
                self._run_file(run).write_bytes(content)
            except BaseException:  # half a file on a full disk
                self._run_file(run).unlink(missing_ok=True)
                raise
        else:
            self._runs_in_memory[run] = content
        return run

    def _mark_used(self, path: Sequence[MatchedRun]) -> int:
        """Mark the runs of a path as the most recently used ones; return the number of this use."""
        query = "SELECT coalesce(max(used), 0) FROM runs WHERE used BETWEEN 0 AND 1 << 62"
        now = self._index.execute(query).fetchone()[0] + 1
        self._index.executemany(MARK_USED, [(now, run.number) for run, _ in path])
        return now

    def _evict_until(self, limit: float) -> None:
        """Delete the least recently used run that no other run continues, until the files take at
        most `limit` bytes, or none is left."""
        while self.nbytes > limit:
            oldest = self._index.execute(OLDEST).fetchone()
            if oldest is None:
                break
            self._delete_row(*oldest)

    def _delete_row(self, run: int) -> None:
        """Delete a run from the index. The next writers delete its file, and the runs that continue
        it."""
        self._index.execute("DELETE FROM runs WHERE run = ?", (run,))

    def _delete_files(self) -> None:
        """Delete the files of runs whose rows earlier transactions have deleted, and the rows of runs
        that continue these. Raises sqlite3.Error, before any file is deleted, if other writers
        aren't kept out: they may be about to add rows for their files."""
        # This write fails if the folder has another index by now.
        self._index.execute("PRAGMA user_version = 1")
        deleted = self._index.execute("SELECT run FROM deleted").fetchall()
        for (run,) in deleted:
            self._runs_in_memory.pop(run, None)
            if self.folder:
                self._run_file(run).unlink(missing_ok=True)
        self._index.execute(DELETE_ORPHANS)
        self._index.executemany(DELETE_TRACES, deleted)
        if not self._swept:
            self._sweep()
            self._swept = True

    def _sweep(self) -> None:
        """Delete rows that can't be reached, and files that have no row; count all bytes anew."""
        self._index.execute(DELETE_UNREACHABLE)
        self._index.execute("UPDATE total SET nbytes = (SELECT total(nbytes) FROM runs)")
        query = "SELECT run FROM runs UNION SELECT run FROM deleted"
        names = {f"{run}.kv" for (run,) in self._index.execute(query)}
        for name in os.listdir(self.folder) if self.folder else ():
            if name not in names and re.fullmatch(r"\d+\.kv", name):
                (self.folder / name).unlink()

    def _run_file(self, run: int) -> Path:
        """Return the path of a run's file: the bytes of its keys and values (L, 2, H, n, D), or of
        a checkpoint's tensors, nothing else."""
        return self.folder / f"{run}.kv"

    def _checksum(self, parent: int, start: int, ids: bytes, content: Any) -> int:
        """Return the CRC-32 of a run, over the model's identity, the place where the run begins,
        its tokens and its file."""
        beginning = zlib.crc32(f"{self._identity} {parent} {start} ".encode() + ids)
        return zlib.crc32(content, beginning)


def layer_caches(cache: Any) -> list[Any]:
    """Return the caches that hold a cache's tensors: one for each layer, or the cache itself."""
    return [layer for layer in cache.layers if hasattr(layer, "layers")] or [cache]


def held_tensors(cache: Any) -> list[Tensor]:
    """Return all tensors of a cache that has read something, layer by layer. Raises ValueError if a
    layer holds something else."""
    tensors: list[Tensor] = []
    for held in layer_caches(cache):
        for entry in held.layers:
            tensors += entry if isinstance(entry, tuple) else [entry]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError(f"a store can't keep what a {type(cache).__name__} holds")
    return tensors


def first_rows(tensor: Tensor, n: int) -> Tensor:
    """Return the rows or slots of n tokens, of keys and values (2, 1, H, S, D); any other tensor
    whole."""
    return tensor[..., :n, :] if tensor.dim() == 5 else tensor


def shapes(cache: Any, n: int) -> list[tuple]:
    """Return the shapes and dtypes of what a cache holds of n tokens."""
    tensors = held_tensors(cache) if n > 0 else []
    return [(*first_rows(tensor, n).shape, tensor.dtype) for tensor in tensors]


def mapped(path: Path) -> np.ndarray:
    """Return a file's bytes, mapped into memory; an empty file has nothing to map."""
    path = regular_file(path)
    return np.memmap(path, mode="c") if path.stat().st_size else np.empty(0, np.uint8)


def packed(tensors: Iterable[Tensor]) -> np.ndarray:
    """Return the bytes of tensors, one after another."""
    content = [raw_bytes(tensor.detach().cpu()) for tensor in tensors]
    return np.concatenate([np.empty(0, np.uint8), *content])


def unpacked(content: np.ndarray, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes packed() made, in the same memory. like: tensors of their
    shapes and dtypes."""
    parts = torch.from_numpy(content).split([tensor.nbytes for tensor in like])
    pairs = zip(parts, like, strict=True)
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in pairs]


def matched_tokens(path: Sequence[MatchedRun]) -> int:
    """Return how many tokens of a text the runs along it hold."""
    return sum(matched for _, matched in path)


def checked_ids(ids: Sequence[int]) -> list[int]:
    """Return tokens as a list of int. Raises TypeError if they aren't whole numbers, ValueError if
    one is negative or takes more than 4 bytes."""
    try:
        checked = [operator.index(token) for token in ids]
    except TypeError:
        raise TypeError(
            f"ids must be a list of whole numbers, such as ids[0].tolist(), got {short_repr(ids)}"
        ) from None
    for token in checked:
        if not 0 <= token < 2**31:
            raise ValueError(f"ids must be at least 0 and less than {2**31}, got {token}")
    return checked


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return tokens as the bytes that a row of the index holds."""
    return np.array(ids, np.int32).tobytes()


def is_packed(value: object) -> bool:
    """Return whether a value from the index can be what pack_ids() made: bytes, 4 for each
    token."""
    return isinstance(value, bytes) and len(value) % 4 == 0


def unpack_ids(packed: object) -> list[int]:
    """Return the tokens that a row of the index holds; none if damage has put something else
    there."""
    return np.frombuffer(packed, np.int32).tolist() if is_packed(packed) else []
