"""KV caches that outlive their prompt: a new prompt reuses the longest prefix that is stored.
`recycle.py` answers six prompts with and without the caches of ten others, `recycle.py chat` is a
conversation whose every turn reuses all earlier ones, `recycle.py study` is the paper's experiment.

The keys and values of a token depend only on the tokens up to it. The keys and values of a common
prefix are therefore valid in every text that begins with it. A radix tree of token ids finds the
longest stored prefix of a prompt; the keys and values themselves are on disk or in memory.

Shapes: L layers, H heads, D head size, S tokens of a cache, n tokens of a node.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import errno
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken
import torch
from filelock import FileLock
from safetensors.torch import save
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, context_start, generate
from load_gpt2_weights import END_OF_TEXT
from support.entries import DAMAGED, ENTRY, HEADER, checksum, digest, entry_name, ids_of, read_entry
from support.files import UNFINISHED, write_atomically
from support.fingerprints import Weights, fingerprint
from support.radix_tree import Node, RadixTree

if TYPE_CHECKING:
    from support.tracing import Trace

BLOCKS = 2**14  # bytes to delete beyond the need on a full disk: files and folders take whole blocks
PATIENCE = 30  # seconds to wait for a folder's lock, which another process may never release


class Store:
    """KV caches of a model by the tokens they were computed from, in a folder or in memory.

    Any number of processes may use a folder at once, and be killed at any moment: each takes a lock
    for the time of a get() or put(). An entry holds the keys and values of a node: kv (L, 2, H, n, D),
    ids (n,), and as metadata the model's fingerprint, a digest of all tokens before the node, and a
    checksum over all of these. It is written beside its place, moved there, and never changed.
    Everything in it is verified before use. An entry that fails is deleted with a warning, together
    with those that follow it, and the model reads those tokens again. A checksum finds accidents, not
    forgeries; and as files are mapped, nobody may change one in place while it is in use.

    A folder that can't be used is one warning, and the model reads all tokens; one that can't be
    locked, or a full disk on which making room doesn't help, is one warning, and is read only.

    capacity: bytes of this model's files, which they never exceed, unfinished ones included: the ends
    of the texts that were used longest ago are deleted before more is written. The model must be in eval()
    and its weights must stay as they are: Weights says which changes are noticed, by get() and put().
    Not for several threads at once.
    """

    def __init__(self, model: GPT, folder: Path | str | None = None,
                 capacity: float = float("inf")) -> None:  # fmt: skip
        if not capacity > 0:  # nor is nan
            raise ValueError(f"the capacity must be more than 0 bytes, got {capacity}")
        self.model, self.capacity, c = model, capacity, model.config
        self.dtype, self.device = model.wte.weight.dtype, model.wte.weight.device
        self.fingerprint, self.weights = fingerprint(model), Weights(model)
        self.token_bytes = 2 * c.n_layer * c.n_head * c.head_dim * self.dtype.itemsize  # of keys and values
        self.tree = RadixTree()
        self.memory: dict[str, tuple[dict[str, str], dict[str, Tensor]]] = {}  # entries, without a folder
        self.scanned = -1  # when the folder had last changed when it was read
        self.folder = None if folder is None else Path(folder) / self.fingerprint[:16]  # one a model
        self.lock = None if folder is None else FileLock(self.folder / "lock")
        self.patience, self.warned, self.full = PATIENCE, False, False
        with self.locked():
            pass

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(node.nbytes for node in self.tree.order)

    def size(self, n: int) -> int:
        """Return how many bytes an entry of n tokens takes at most."""
        return n * (self.token_bytes + 8) + (HEADER if self.folder else 0)

    @property
    def writable(self) -> bool:
        """Whether entries may be written and deleted now."""
        return self.lock is None or self.lock.is_locked

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; first take note of their changes. Raises ValueError if the weights are
        no longer those that the stored caches were computed with, or the model is in train()."""
        if any(module.training for module in self.model.modules()):
            raise ValueError("the model is in train(), where dropout makes its caches random: call model.eval() first")
        if self.weights.changed():
            raise ValueError("the model's weights have changed since this store was opened: open a new one")
        try:
            if self.folder:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted all of it
                    self.lock.acquire(timeout=self.patience, poll_interval=0.001)
                    self.patience = PATIENCE
                except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
                    self.patience = 0
                    self.warn(error)
                with self.excused():
                    self.refresh()
            with self.excused():
                yield
        finally:
            if self.lock:
                self.lock.release()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Turn an OSError into a warning. Whatever is raised, forget what the tree says of the files."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self.forget()
            if self.lock:
                self.lock.release()  # what isn't known can't be kept in its capacity: write nothing
            if not isinstance(error, OSError):
                raise
            self.warn(error)

    def warn(self, error: Exception) -> None:
        """Say once in a store's life that its folder can't be used in full."""
        if not self.warned:
            warnings.warn(f"the KV cache store can't be used in full, which costs time and changes no token: {error}",
                          stacklevel=2)  # fmt: skip
        self.warned = True

    def forget(self) -> None:
        """Empty the tree; refresh() finds again what is in the folder."""
        self.tree, self.scanned = RadixTree(), -1
        self.memory.clear()

    def get(self, ids: Sequence[int]) -> KVCache:
        """Return a new cache of the longest stored prefix of ids, but never of all: one token has to
        be fed to get logits. The cache is empty if nothing is stored."""
        found: list[Tensor] = []
        with self.locked():
            path = self.tree.match(ids[:-1])
            for node, shared in path:
                kv = self.load(node)
                if kv is None:
                    break
                found.append(kv[..., :shared, :])
            self.use(node for node, _ in path[: len(found)])
        if not found:
            return KVCache()
        # A single entry is used where it is mapped: KVCache copies what it appends to.
        layers = found[0] if len(found) == 1 else [torch.cat(kv, dim=2) for kv in zip(*found, strict=True)]
        layers = [layer[:, None].to(self.device) for layer in layers]  # (2, 1, H, S, D)
        return KVCache(layers, torch.arange(layers[0].size(3), device=self.device))

    def put(self, ids: Sequence[int], cache: KVCache) -> int:
        """Store what cache has read of ids, as far as it isn't there yet and fits; return the bytes written.

        Raises ValueError if cache is not that of the first tokens of a single text, read by this model.
        """
        n = len(cache)
        if n > len(ids) or cache.pos.tolist() != list(range(n)) or (n and cache.layers[0].size(1) != 1):
            raise ValueError(f"the cache, {n} tokens, must be that of the first tokens of ids, {len(ids)}, in one row")
        if n and (cache.layers[0].dtype != self.dtype or cache.nbytes != n * self.token_bytes):
            raise ValueError(f"the cache, {cache.nbytes} bytes of {cache.layers[0].dtype}, is not one of this model, "
                             f"{n * self.token_bytes} of {self.dtype}")  # fmt: skip
        with self.locked():
            if not self.writable:
                return 0
            try:
                written, self.full = self.insert(tuple(ids[:n]), cache, self.capacity), False
                return written
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self.full:
                    raise
                self.full = True  # until a put() succeeds: a disk that others fill must not empty the store
                self.forget()
                self.refresh()
                room = self.nbytes - self.size(n) - BLOCKS
                if room > 0 and (written := self.insert(tuple(ids[:n]), cache, room)):
                    return written
                raise
        return 0

    def insert(self, ids: tuple[int, ...], cache: KVCache, limit: float) -> int:
        """Add ids to the tree and write the new entry, as far as limit bytes allow; return the bytes written.

        What has to go goes first: the folder never holds more than limit bytes.
        """
        self.evict(limit)
        written, path = 0, self.tree.match(ids)
        if path and sum(shared for _, shared in path) < len(ids) and path[-1][1] < len(path[-1][0].ids):
            written = self.split(*path[-1], limit)
            path = self.tree.match(ids)
        nodes, at = [node for node, _ in path], sum(shared for _, shared in path)
        if at < len(ids):
            self.evict(limit - self.size(len(ids) - at), nodes)
            if (excess := self.nbytes + self.size(len(ids) - at) - limit) > 0:
                ids = ids[: max(at, len(ids) - math.ceil(excess / (self.size(1) - self.size(0))))]
        if at < len(ids):
            nodes.append(self.tree.add(nodes[-1] if nodes else self.tree.root, ids[at:]))
            kv = [layer[:, 0, :, at : len(ids)].to("cpu") for layer in cache.layers]
            written += self.write(nodes[-1], torch.stack(kv))
        self.use(nodes)
        return written

    def split(self, whole: Node, n: int, limit: float) -> int:
        """Make two entries of one: its first n tokens, and the others; return their bytes.

        The halves are written first, and the whole is deleted last: refresh() finds the one or the
        other, whenever the process is killed. Without room for that, the other tokens are given up.
        """
        kv = self.load(whole)
        if kv is None:
            return 0
        if not self.evict(limit - self.size(n) - self.size(len(whole.ids) - n), self.tree.path(whole)):
            self.cut(whole, n)
            return 0
        name, upper = whole.name, self.tree.split(whole, n)
        written = self.write(upper, kv[..., :n, :]) + self.write(whole, kv[..., n:, :])
        self.delete(name)
        return written

    def evict(self, limit: float, kept: Sequence[Node] = ()) -> bool:
        """Delete ends of the least recently used texts until at most limit bytes are left; return whether that worked.

        kept: a path from the root that stays.
        """
        while (excess := self.nbytes - limit) > 0 and len(self.tree.order) > len(kept):
            leaf, keep = self.tree.oldest(math.ceil(excess / self.token_bytes), kept)
            with suppress(FileNotFoundError):
                if self.folder and (used := (self.folder / leaf.name).stat().st_mtime_ns) > leaf.used:
                    leaf.used = used  # by another process
                    self.tree.use(self.tree.path(leaf))
                    continue
            self.cut(leaf, keep)
        return excess <= 0

    def cut(self, leaf: Node, n: int) -> None:
        """Delete a leaf, but for its first n tokens."""
        kv = self.load(leaf) if n else None
        if leaf not in self.tree.order:  # it couldn't be read
            return
        if kv is not None:
            kv = kv[..., :n, :].clone()
        self.delete(leaf.name)  # before writing, since there may be no room for both
        if beginning := self.tree.cut(leaf, n):
            beginning.used = leaf.used
            self.write(beginning, kv)

    def load(self, node: Node) -> Tensor | None:
        """Return the keys and values (L, 2, H, n, D) of a node; None if they can't be used: then the
        node and all that follows it are gone."""
        try:
            return self.verified(node.name, self.tree.text(node.parent), node.ids)
        except DAMAGED as error:
            for one in self.tree.remove(node):
                self.discard(one.name, error if one is node else "")
            return None

    def verified(self, name: str, prefix: Sequence[int], ids: tuple[int, ...]) -> Tensor:
        """Return the keys and values of an entry. Raises one of DAMAGED with what is wrong."""
        c = self.model.config
        shape = (c.n_layer, 2, c.n_head, len(ids), c.head_dim)
        metadata, tensors = read_entry(self.folder / name) if self.folder else self.memory[name]
        kv, own, before = tensors["kv"], tensors["ids"], digest(prefix)
        if metadata.get("fingerprint") != self.fingerprint:
            raise ValueError("it belongs to another model")
        if metadata.get("prefix") != before or own.tolist() != list(ids):
            raise ValueError("it holds other tokens")
        if kv.dtype != self.dtype or kv.shape != shape:
            raise ValueError(f"it holds {kv.dtype} {tuple(kv.shape)} instead of {self.dtype} {shape}")
        if metadata.get("checksum") != checksum(self.fingerprint, before, own, kv):
            raise ValueError("its checksum is wrong")
        return kv

    def write(self, node: Node, kv: Tensor) -> int:
        """Store kv (L, 2, H, n, D) as the entry of a node; return its bytes."""
        prefix, tensors = self.tree.text(node.parent), {"kv": kv.contiguous(), "ids": torch.tensor(node.ids)}
        metadata = {"fingerprint": self.fingerprint, "prefix": digest(prefix)}
        metadata["checksum"] = checksum(self.fingerprint, metadata["prefix"], tensors["ids"], tensors["kv"])
        node.name = entry_name(prefix, node.ids)
        if self.folder is None:
            self.memory[node.name] = metadata, tensors
            node.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        else:
            path, content, node.used = self.folder / node.name, save(tensors, metadata), node.used or time.time_ns()
            self.delete(node.name)  # a link or a pipe of that name, which would be written to
            write_atomically(path, lambda file: file.write_bytes(content))
            os.utime(path, ns=(node.used, node.used))
            node.nbytes = len(content)
        return node.nbytes

    def use(self, nodes: Iterable[Node]) -> None:
        """Count a path as used now, for other processes too: a file's time is that of its last use."""
        nodes, now = list(nodes), time.time_ns()
        self.tree.use(nodes)
        for node in nodes:
            node.used = now
            if self.folder:
                with suppress(OSError):  # somebody has deleted it
                    os.utime(self.folder / node.name, ns=(now, now))

    def delete(self, name: str) -> None:
        """Delete an entry, if there is one."""
        self.memory.pop(name, None)
        if self.folder and self.writable:
            (self.folder / name).unlink(missing_ok=True)

    def discard(self, name: str, reason: str | Exception = "") -> None:
        """Delete an entry that can't be used, if it is ours to delete; with a warning if it has a reason."""
        if getattr(reason, "errno", None) not in (None, errno.ENOENT):  # no permission, too many open files:
            raise reason  # the entry isn't damaged
        if reason and not isinstance(reason, FileNotFoundError):
            warnings.warn(f"the stored KV cache {name} is not used: {reason}", stacklevel=2)
        with suppress(OSError):
            self.delete(name)

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        with self.locked():
            for node in list(self.tree.order):
                self.delete(node.name)
            self.tree = RadixTree()

    def refresh(self) -> None:
        """Take note of what other processes, or earlier ones, have written and deleted; delete what
        a killed one has left unfinished, and entries whose beginning is lost."""
        changed = self.folder.stat().st_mtime_ns
        if changed == self.scanned:
            return
        settled = time.time_ns() - changed > 2 * 10**9  # file times are coarse: 2 seconds on some file systems
        if self.writable:
            for folder in self.folder.glob(UNFINISHED + "*"):  # whoever wrote there was killed: the lock is ours
                if folder.is_dir():  # rmtree waits for a pipe
                    shutil.rmtree(folder, ignore_errors=True)
        files = {}
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # deleted at this moment
                if ENTRY.fullmatch(entry.name) and entry.is_file():
                    files[entry.name] = entry.stat()
        for node in list(self.tree.order):
            if node.name not in files and node in self.tree.order:
                self.tree.remove(node)
        waiting: dict[str, list[tuple[str, tuple[int, ...]]]] = {}  # by the digest of what precedes
        for name in files.keys() - {node.name for node in self.tree.order}:
            try:
                waiting.setdefault(name[:32], []).append((name, ids_of(read_entry(self.folder / name)[1])))
            except DAMAGED as error:
                self.discard(name, error)
        parents = [(digest(()), self.tree.root), *((node.name[33:65], node) for node in self.tree.order)]
        found = []
        for end, parent in parents:
            prefix = self.tree.text(parent) if end in waiting else ()
            for name, ids in sorted(waiting.pop(end, []), key=lambda entry: -len(entry[1])):
                if name != entry_name(prefix, ids):
                    self.discard(name, "it holds other tokens")
                elif ids[0] in parent.children:  # half of a longer one that was about to be split
                    self.discard(name)
                else:
                    node = self.tree.add(parent, ids)
                    node.name, node.nbytes, node.used = name, files[name].st_size, files[name].st_mtime_ns
                    parents.append((name[33:65], node))
                    found.append(node)
        for name, _ in (entry for entries in waiting.values() for entry in entries):
            self.discard(name)
        for node in sorted(found, key=lambda node: node.used):
            self.tree.use(self.tree.path(node))
        self.scanned = changed if settled and self.writable else -1


def read_all(model: GPT, ids: Sequence[int]) -> KVCache:
    """Return the cache of a text after one forward pass."""
    cache = KVCache()
    with torch.no_grad():
        model(torch.tensor([ids], device=model.wte.weight.device), cache, last_only=True)
    return cache


def recycle(store: Store, ids: Tensor, max_new_tokens: int, **options: object) -> Iterator[Tensor]:
    """Yield what generate() yields after ids (1, T) with the store's model, but read only what the store doesn't hold,
    and leave what was read there: the tokens are those of a cold run, up to what rounding does to a tie. Raises
    ValueError as generate() does.
    """
    n_ctx = store.model.config.n_ctx
    if ids.dim() != 2 or ids.size(0) != 1:
        raise ValueError(f"ids must have shape (1, T), got {tuple(ids.shape)}")
    ids = ids[:, context_start(ids.size(1), n_ctx) :]  # the rest would be forgotten anyway
    text = ids[0].tolist()
    cache = store.get(text)
    try:
        for token in generate(store.model, ids, max_new_tokens, cache=cache, **options):
            text.append(int(token))
            yield token
    finally:  # also if nobody wants the rest; the last token has not been read
        store.put(text[context_start(len(text) - 1, n_ctx) :], cache)


def typed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that aren't empty, with a prompt if someone is typing."""
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for line in lines:
        if line.strip():
            yield line
        print(prompt, end="", flush=True)


def chat(store: Store, tokenizer: tiktoken.Encoding, lines: Iterable[str], max_new_tokens: int,
         dialogue: bool, trace: Trace | None = None) -> None:  # fmt: skip
    """Answer line by line, every turn on the stored cache of all turns before it, and print what that
    saved: to know it, the whole text is read once more after every answer.

    dialogue: turns end with <|endoftext|>, as DialoGPT's do; else they are "Question: ...",
    "Answer: ...", a line each.
    """
    model, n_ctx = store.model, store.model.config.n_ctx
    turns: list[list[int]] = []
    read_all(model, [tokenizer.eot_token])  # a process's first pass is slow
    for line in lines:
        said = line.strip() + END_OF_TEXT if dialogue else f"Question: {line.strip()}\nAnswer:"
        turn = tokenizer.encode(said, allowed_special={END_OF_TEXT})
        if len(turn) + max_new_tokens > n_ctx // 2:
            print(f"[{len(turn)} tokens and an answer of {max_new_tokens} don't fit in half the context, {n_ctx // 2}]")
            continue
        before = len(turns)
        if sum(map(len, turns)) + len(turn) + max_new_tokens > n_ctx:
            while sum(map(len, turns)) + len(turn) > n_ctx // 2:
                del turns[0]
            print(f"[the context of {n_ctx} tokens is full: the oldest {before - len(turns)} turns are forgotten, and "
                  "what is left moves to other positions and is read again]")  # fmt: skip
        ids = [*(i for turn in turns for i in turn), *turn]
        begun = time.perf_counter()
        cache = store.get(ids)
        reused, reply, first = len(cache), [], 0.0
        if trace:
            trace.begin(ids, reused)
        prompt = torch.tensor([ids], device=store.device)
        for token in generate(model, prompt, max_new_tokens, stop_id=tokenizer.eot_token, cache=cache):
            reply.append(int(token))
            first = first or time.perf_counter() - begun
            if trace:
                trace.step(reply[-1], cache)
            if not dialogue and "\n" in tokenizer.decode(reply[-1:]):
                break
        print(tokenizer.decode(reply).replace(END_OF_TEXT, "").strip())
        store.put([*ids, *reply], cache)
        end = [tokenizer.eot_token] if dialogue else tokenizer.encode("\n")
        ending = [] if tokenizer.decode(reply[-1:]).endswith(tokenizer.decode(end)) else end
        turns.append(turn + reply + ending)  # an answer that was cut off ends its line
        begun = time.perf_counter()
        read_all(model, ids)
        cold = time.perf_counter() - begun
        without = f", without reuse {1000 * cold:.1f} ms" if reused else ": nothing was stored that it begins with"
        print(f"[reused {reused} of {len(ids)} tokens; first token after {1000 * first:.1f} ms{without}]\n")
    if trace and trace.steps:
        trace.write()
        print(f"[step by step: {trace.path}]")


def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from studies import recycling
    from support.cli import CommandLine, whole_number

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["study"]:
        return recycling.main(argv[1:])
    cli = CommandLine(__doc__, "python3 %(prog)s chat", NAMES)
    cli.add_argument("what", nargs="?", default="run", choices=("run", "chat", "study"),
                     help="run: what reuse saves, in seconds; chat: a conversation; study: the paper's experiment, "
                     "with options of its own")  # fmt: skip
    cli.add_model_arguments()
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=100, metavar="N", help="tokens to write")
    cli.add_argument("--store", metavar="FOLDER", help="chat: where caches are kept; default: results/recycle/store")
    cli.add_argument("--capacity", type=whole_number(1, 2**63 - 1), metavar="BYTES",
                     help="chat: store size limit; default: 10**9")  # fmt: skip
    cli.add_trace_argument("chat: ")
    with cli.parse(argv) as args:
        cli.only(args.what, "chat", {"--store": args.store, "--capacity": args.capacity, "--trace": args.trace_file})
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.what == "run":
            return recycling.demo(model, tokenizer, args.model, args.max_new_tokens)
        store = Store(model, args.store or "results/recycle/store", args.capacity or 10**9)
        trace = cli.trace(args, tokenizer, model, torch.empty(1, 0, dtype=torch.long))
        chat(store, tokenizer, typed(sys.stdin), args.max_new_tokens, "DialoGPT" in args.model, trace)


if __name__ == "__main__":
    main()
