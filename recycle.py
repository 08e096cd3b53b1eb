"""KV caches that outlive their prompt: a new prompt reuses the longest prefix that is stored.
`recycle.py` answers six prompts with and without the caches of ten others, `recycle.py chat` is a
conversation whose every turn reuses all earlier ones, `recycle.py study` is the paper's experiment.

The keys and values of a token depend on the tokens up to it and on nothing else. Those of a common
prefix are therefore valid in every text that begins with it. A radix tree of token ids finds the
longest stored prefix of a prompt; the keys and values themselves lie on disk or in memory.

Shapes: L layers, H heads, D head size, S tokens of a cache, n tokens of a node.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import hashlib
import math
import os
import re
import sys
import time
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, context_start, generate
from load_gpt2_weights import END_OF_TEXT
from support.files import write_atomically
from support.fingerprints import fingerprint, raw
from support.radix_tree import Node, RadixTree

if TYPE_CHECKING:
    from support.tracing import Trace

ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors(\.tmp)?")  # a Store's files


class Store:
    """KV caches of a model by the tokens they were computed from, in a folder or in memory.

    Any number of processes may use a folder at once, and be killed at any moment: each takes a lock
    for the time of a get() or put(). An entry holds the keys and values of a node: kv (L, 2, H, n, D),
    ids (n,), and as metadata the model's fingerprint, a digest of all tokens before the node, and a
    checksum over all of these. It is written beside its place, moved there, and never changed.
    Everything in it is verified before use. An entry that fails is deleted with a warning, together
    with those that follow it, and the model reads those tokens again. A checksum finds accidents, not
    forgeries; and as files are mapped, nobody may change one in place while it is in use.

    capacity: bytes of this model's entries; beyond it the ends of the texts that were used longest
    ago are deleted. The model's weights must stay as they are. Not for several threads at once.
    """

    def __init__(self, model: GPT, folder: Path | str | None = None,
                 capacity: float = float("inf")) -> None:  # fmt: skip
        if capacity <= 0:
            raise ValueError(f"the capacity must be more than 0 bytes, got {capacity}")
        self.model, self.capacity, c = model, capacity, model.config
        self.dtype, self.device = model.wte.weight.dtype, model.wte.weight.device
        self.fingerprint, self.weights = fingerprint(model), versions(model)
        self.token_bytes = 2 * c.n_layer * c.n_head * c.head_dim * self.dtype.itemsize
        self.tree = RadixTree()
        self.memory: dict[str, tuple[dict[str, str], dict[str, Tensor]]] = {}  # entries, without a folder
        self.scanned = -1  # when the folder had last changed when it was read
        self.folder = None if folder is None else Path(folder) / self.fingerprint[:16]  # one a model
        with self.locked():
            pass

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(node.nbytes for node in self.tree.order)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; first take note of their changes. Raises ValueError if the
        weights are no longer those that the stored caches were computed with."""
        if versions(self.model) != self.weights:
            raise ValueError("the model's weights have changed since this store was opened: open a new one")
        if self.folder is None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted all of it
        with FileLock(self.folder / "lock").acquire(poll_interval=0.001):
            self.refresh()
            yield

    def get(self, ids: Sequence[int]) -> KVCache:
        """Return a new cache of the longest stored prefix of ids, but never of all: one token has to
        be fed to get logits. The cache is empty if nothing is stored."""
        with self.locked():
            path = self.tree.match(ids[:-1])
            found = []
            for node, shared in path:
                kv = self.load(node, ids[: node.start])
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
        """Store what cache has read of ids, as far as it isn't there yet; return the bytes written.

        A full disk is a warning. Raises ValueError if cache is not that of the first tokens of a
        single text, read by this model.
        """
        n = len(cache)
        if n > len(ids) or cache.pos.tolist() != list(range(n)) or (n and cache.layers[0].size(1) != 1):
            raise ValueError(f"the cache, {n} tokens, must be that of the first tokens of ids, {len(ids)}, in one row")
        if n and (cache.layers[0].dtype != self.dtype or cache.nbytes != n * self.token_bytes):
            raise ValueError(f"the cache, {cache.nbytes} bytes of {cache.layers[0].dtype}, is not one of this model, "
                             f"{n * self.token_bytes} of {self.dtype}")  # fmt: skip
        with self.locked():
            try:
                written = self.insert(tuple(ids[:n]), cache)
                self.evict()
                return written
            except BaseException as error:  # also Ctrl-C: the tree must say what there is
                self.tree, self.scanned = RadixTree(), -1  # refresh() finds again what is in the folder
                self.memory.clear()
                if not isinstance(error, OSError | SafetensorError):
                    raise
                warnings.warn(f"can't store a KV cache: {error}", stacklevel=2)
                return 0

    def insert(self, ids: tuple[int, ...], cache: KVCache) -> int:
        """Add ids to the tree and write the new entries; return their bytes.

        Where ids leave a node in its middle, its two halves are written first, and the whole is
        deleted last: refresh() finds the one or the other, whenever the process is killed.
        """
        path, written, rest = self.tree.match(ids), 0, None
        if path and sum(shared for _, shared in path) < len(ids) and path[-1][1] < len(path[-1][0].ids):
            whole, shared = path[-1]
            rest = self.load(whole, ids[: whole.start])
        nodes = self.tree.insert(ids)
        for node in nodes:
            if not node.name:
                kv = [layer[:, 0, :, node.start : node.end].to("cpu") for layer in cache.layers]
                written += self.write(node, ids[: node.start], torch.stack(kv))
        if rest is not None:
            name = whole.name
            written += self.write(whole, ids[: whole.start], rest[..., shared:, :])
            self.delete(name)
        self.use(nodes)
        return written

    def evict(self) -> None:
        """Delete ends of what was used longest ago until all fits in the capacity."""
        while (excess := self.nbytes - self.capacity) > 0:
            leaf, keep = self.tree.oldest(math.ceil(excess / self.token_bytes))
            if self.folder:
                used = (self.folder / leaf.name).stat().st_mtime_ns
                if used > leaf.used:  # by another process
                    leaf.used = used
                    self.tree.use(self.tree.path(leaf))
                    continue
            prefix = tuple(i for node in self.tree.path(leaf.parent) for i in node.ids)
            kv = self.load(leaf, prefix) if keep else None
            if kv is not None:
                kv = kv[..., :keep, :].clone()
            self.delete(leaf.name)  # before writing, since the disk may be full
            if leaf in self.tree.order and (beginning := self.tree.cut(leaf, keep)):
                beginning.used = leaf.used
                self.write(beginning, prefix, kv)

    def load(self, node: Node, prefix: Sequence[int]) -> Tensor | None:
        """Return the keys and values (L, 2, H, n, D) of a node after prefix; None if they can't be
        used: then the node and all that follows it are gone."""
        try:
            return self.verified(node.name, prefix, node.ids)
        except UNREADABLE as error:
            for one in self.tree.remove(node):
                self.delete(one.name, "" if isinstance(error, FileNotFoundError) or one is not node else str(error))
            return None

    def verified(self, name: str, prefix: Sequence[int], ids: tuple[int, ...]) -> Tensor:
        """Return the keys and values of an entry. Raises one of UNREADABLE with what is wrong."""
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

    def write(self, node: Node, prefix: tuple[int, ...], kv: Tensor) -> int:
        """Store kv (L, 2, H, n, D) as the entry of a node that follows prefix; return its bytes."""
        tensors = {"kv": kv.contiguous(), "ids": torch.tensor(node.ids)}
        metadata = {"fingerprint": self.fingerprint, "prefix": digest(prefix)}
        metadata["checksum"] = checksum(self.fingerprint, metadata["prefix"], tensors["ids"], tensors["kv"])
        node.name = entry_name(prefix, node.ids)
        if self.folder is None:
            self.memory[node.name] = metadata, tensors
            node.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        else:
            path, node.used = self.folder / node.name, node.used or time.time_ns()
            write_atomically(path, lambda file: save_file(tensors, file, metadata))
            os.utime(path, ns=(node.used, node.used))
            node.nbytes = path.stat().st_size
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

    def delete(self, name: str, reason: str = "") -> None:
        """Delete an entry, with a warning if there is a reason."""
        if reason:
            warnings.warn(f"the stored KV cache {name} is not used, and deleted: {reason}", stacklevel=2)
        self.memory.pop(name, None)
        if self.folder:
            with suppress(OSError):  # gone, or not ours to delete
                (self.folder / name).unlink()

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
        if changed == self.scanned and time.time_ns() - changed > 10**9:
            return  # nothing new; a second, since file times are coarse
        with os.scandir(self.folder) as entries:
            files = {entry.name: entry.stat() for entry in entries if ENTRY.fullmatch(entry.name) and entry.is_file()}
        for node in list(self.tree.order):
            if node.name not in files and node in self.tree.order:
                self.tree.remove(node)
        waiting: dict[str, list[tuple[str, tuple[int, ...]]]] = {}  # by the digest of what precedes
        for name in files.keys() - {node.name for node in self.tree.order}:
            if name.endswith(".tmp"):
                self.delete(name)
                continue
            try:
                waiting.setdefault(name[:32], []).append((name, ids_of(read_entry(self.folder / name)[1])))
            except UNREADABLE as error:
                self.delete(name, f"it can't be read ({error})")
        parents = [(digest(()), self.tree.root), *((node.name[33:65], node) for node in self.tree.order)]
        found = []
        for end, parent in parents:
            prefix = tuple(i for node in self.tree.path(parent) for i in node.ids) if end in waiting else ()
            for name, ids in sorted(waiting.pop(end, []), key=lambda entry: -len(entry[1])):
                if name != entry_name(prefix, ids):
                    self.delete(name, "it holds other tokens")
                elif ids[0] in parent.children:  # half of a longer one that was about to be split
                    self.delete(name)
                else:
                    node = self.tree.add(parent, ids)
                    node.name, node.nbytes, node.used = name, files[name].st_size, files[name].st_mtime_ns
                    parents.append((name[33:65], node))
                    found.append(node)
        for name, _ in (entry for entries in waiting.values() for entry in entries):
            self.delete(name)
        for node in sorted(found, key=lambda node: node.used):
            self.tree.use(self.tree.path(node))
        self.scanned = changed


# What safetensors raises on damaged files, found by damaging them at random.
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError)


def read_entry(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors kv and ids of a file; the tensors are mapped, not read."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in ("kv", "ids")}


def ids_of(tensors: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the tokens of an entry. Raises ValueError if they can't be tokens."""
    ids = tensors["ids"]
    if ids.dtype != torch.long or ids.dim() != 1 or not len(ids):
        raise ValueError(f"{ids.dtype} {tuple(ids.shape)} instead of tokens")
    return tuple(ids.tolist())


def versions(model: GPT) -> list[tuple[int, int]]:
    """Return what changes when a weight is replaced or changed in place."""
    return [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]


def digest(ids: Iterable[int]) -> str:
    """Return 128 bits, in hexadecimal, that identify a sequence of tokens."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def entry_name(prefix: Sequence[int], ids: Sequence[int]) -> str:
    """Return the name of the file for ids after prefix: it says where it begins and where it ends."""
    return f"{digest(prefix)}-{digest((*prefix, *ids))}.safetensors"


def checksum(fingerprint: str, prefix: str, ids: Tensor, kv: Tensor) -> str:
    """Return the CRC-32 of an entry: of its texts, its tokens, and the CRC-32 of every layer."""
    if kv.nbytes < 2**22:
        layers = array("Q", (zlib.crc32(raw(layer)) for layer in kv))
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # zlib leaves Python, so that the layers run side by side
            layers = array("Q", pool.map(lambda layer: zlib.crc32(raw(layer)), kv))
    return f"{zlib.crc32(layers, zlib.crc32(raw(ids), zlib.crc32((fingerprint + prefix).encode()))):08x}"


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
    if ids.size(0) != 1:
        raise ValueError(f"ids must be one row, got {ids.size(0)}")
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
        ending = [] if dialogue or "\n" in tokenizer.decode(reply[-1:]) else tokenizer.encode("\n")
        turns.append(turn + reply + ending)  # an answer that was cut off ends its line
        begun = time.perf_counter()
        read_all(model, ids)
        cold = time.perf_counter() - begun
        print(f"[reused {reused} of {len(ids)} tokens, which saved {1000 * (cold - first):.1f} ms: first token after "
              f"{1000 * first:.1f}, without reuse {1000 * cold:.1f}]\n")  # fmt: skip
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
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=100, metavar="N", help="to write")
    cli.add_argument("--store", default="results/recycle/store", metavar="FOLDER", help="chat: where caches are kept")
    cli.add_argument("--capacity", type=whole_number(1), default=10**9, metavar="BYTES", help="chat: of them at most")
    cli.add_trace_argument("chat: ")
    with cli.parse(argv) as args:
        warnings.showwarning = lambda message, *_: print(f"{cli.prog}: {message}", file=sys.stderr)
        if args.trace_file is not None and args.what != "chat":
            raise ValueError(f"{args.what} has no --trace: chat has")
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.what == "run":
            return recycling.demo(model, tokenizer, args.model, args.max_new_tokens)
        store = Store(model, args.store, args.capacity)
        trace = cli.trace(args, tokenizer, model, torch.empty(1, 0, dtype=torch.long))
        chat(store, tokenizer, typed(sys.stdin), args.max_new_tokens, "DialoGPT" in args.model, trace)


if __name__ == "__main__":
    main()
