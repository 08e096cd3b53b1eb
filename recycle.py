"""KV caches that outlive their prompt: what a new prompt shares with an earlier one is not read again.
`recycle.py` rebuilds the KV recycling paper's experiment; `law` measures when reuse pays, `replay TRACE.jsonl` runs the
store over a trace of requests, `chat` is a conversation in which every turn reuses the cache of all before it.

The keys and values of a token depend on the tokens up to it and on nothing else. So those of a common prefix are valid
in every text that begins with it: they are kept in a tree of token ids, on disk or in memory, and the longest stored
prefix of a prompt is found by walking down that tree.

Shapes: L layers, H heads, D head size, S tokens of a cache, n tokens of a node.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs"; the tree is that of
Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs", section 3 (RadixAttention).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import time
import warnings
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_kv_cache import GPT, GPTConfig, KVCache, context_start, generate
from load_gpt2_weights import END_OF_TEXT
from support.encoders import load_encoder
from support.fingerprints import fingerprint, raw

if TYPE_CHECKING:
    from support.tracing import Trace

DATA = Path(__file__).resolve().parent / "data"
OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors(\..*\.tmp)?")  # a Store's files: from where to where
ABANDONED = 60.0  # seconds after which a file that no tree can reach, or that was never finished, is deleted


class Node:
    """A run of tokens in a RadixTree: what follows its parent's."""

    def __init__(self, ids: tuple[int, ...], parent: Node | None) -> None:
        self.ids, self.parent = ids, parent
        self.children: dict[int, Node] = {}  # by their first token
        self.start: int = parent.end if parent else 0
        self.name, self.nbytes, self.used = "", 0, 0  # where a Store keeps its page, its bytes, and when it was used

    @property
    def end(self) -> int:
        """How many tokens there are from the root to the end of this run."""
        return self.start + len(self.ids)


class RadixTree:
    """Token sequences in which a common prefix is held once; it knows what was used longest ago.

    `order` holds all nodes, from the least to the most recently used. Every use() puts a path at its end, from the leaf
    up: so a node always comes after its descendants, and the first of all is the end of the sequence that nobody has
    asked for longest.
    """

    def __init__(self) -> None:
        self.root = Node((), None)
        self.order: OrderedDict[Node, None] = OrderedDict()

    def match(self, ids: Sequence[int]) -> list[tuple[Node, int]]:
        """Return the nodes along ids, and how many tokens of each agree: all of them, but for the last node."""
        ids, at, path = tuple(ids), 0, []
        node = self.root.children.get(ids[0]) if ids else None
        while node is not None:
            shared = common_prefix(node.ids, ids[at : at + len(node.ids)])
            path.append((node, shared))
            at += shared
            node = node.children.get(ids[at]) if shared == len(node.ids) and at < len(ids) else None
        return path

    def insert(self, ids: Sequence[int]) -> list[Node]:
        """Add ids, as used now; return the nodes that lead to their end.

        A node in whose middle ids branch off is split: it keeps its end, and a new node takes its beginning.
        """
        path = self.match(ids)
        nodes = [node for node, _ in path]
        at = sum(shared for _, shared in path)
        if path and at < len(ids) and path[-1][1] < len(nodes[-1].ids):
            nodes[-1] = self.split(*path[-1])
        if at < len(ids):
            nodes.append(self.add(nodes[-1] if nodes else self.root, tuple(ids[at:])))
        self.use(nodes)
        return nodes

    def add(self, parent: Node, ids: tuple[int, ...]) -> Node:
        """Add a node after parent, as if it had never been used."""
        node = parent.children[ids[0]] = Node(ids, parent)
        self.order[node] = None
        self.order.move_to_end(node, last=False)
        return node

    def split(self, node: Node, n: int) -> Node:
        """Give the first n tokens of node to a new parent of it, and return that, as used now."""
        upper = self.add(node.parent, node.ids[:n])  # takes node's place among the children
        node.ids, node.start, node.parent = node.ids[n:], node.start + n, upper
        upper.children[node.ids[0]] = node
        self.use(self.path(upper))
        return upper

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the first token to the end of node."""
        nodes = []
        while node is not self.root:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def use(self, nodes: Iterable[Node]) -> None:
        """Count a path from the root as used now."""
        for node in reversed(list(nodes)):
            self.order.move_to_end(node)

    def oldest(self, excess: int) -> tuple[Node, int]:
        """Return the end of the sequence used longest ago, and how many of its tokens to keep if excess tokens have to
        go: less than half of them, since cutting a node's end off means writing its beginning anew."""
        leaf = next(iter(self.order))
        return leaf, max(0, len(leaf.ids) - max(excess, (len(leaf.ids) + 1) // 2))

    def cut(self, leaf: Node, keep: int) -> Node | None:
        """Replace a leaf by a node of its first tokens, of the same age, and return that; or by nothing."""
        self.remove(leaf)
        return self.add(leaf.parent, leaf.ids[:keep]) if keep else None

    def remove(self, node: Node) -> list[Node]:
        """Take node and all that follows it out of the tree; return them."""
        node.parent.children.pop(node.ids[0])
        gone = [node]
        for one in gone:
            gone += one.children.values()
            del self.order[one]
        return gone


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Store:
    """KV caches of a model by the tokens they were computed from, in a folder that outlives the process or in memory.

    Any number of processes may use a folder at once, and be killed at any moment. A file holds the keys and values of a
    node: kv (L, 2, H, n, D), ids (n,), and as metadata the model's fingerprint, a digest of all tokens before the node,
    and a checksum over all of these. It is written beside its place, then moved there and never changed, and everything
    in it is verified before use: what is damaged, or isn't what it should be, is deleted with a warning, and the model
    reads those tokens again. A checksum finds accidents, not what somebody forges; and as pages are mapped, nobody may
    change or shorten a file in place while it is in use.

    capacity: bytes of this model's pages, kept by deleting the ends of what was used longest ago; others may exceed it
    until this process writes again. The model's weights must stay as they are. Not for several threads at once.
    """

    def __init__(self, model: GPT, folder: Path | str | None = None, capacity: float = float("inf")) -> None:
        if capacity <= 0:
            raise ValueError(f"the capacity must be more than 0 bytes, got {capacity}")
        self.model, c, self.dtype, self.device = model, model.config, model.wte.weight.dtype, model.wte.weight.device
        self.fingerprint, self.weights = fingerprint(model), versions(model)
        self.token_bytes = 2 * c.n_layer * c.n_head * c.head_dim * self.dtype.itemsize
        self.capacity, self.nbytes = capacity, 0
        self.tree = RadixTree()
        self.nodes: dict[str, Node] = {}  # by the names of their files
        self.memory: dict[str, tuple[dict[str, str], dict[str, Tensor]]] = {}  # instead of files, if there is no folder
        self.ignored: set[str] = set()  # files that can neither be used nor deleted
        self.scanned = -1  # when the folder had last changed when it was read
        self.folder = None if folder is None else Path(folder) / self.fingerprint[:16]  # other models have their own
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.refresh()

    def get(self, ids: Sequence[int]) -> KVCache:
        """Return a new cache of the longest stored prefix of ids, but never of all: one token has to be fed to get
        logits. The cache is empty if nothing is stored. Raises ValueError if the model's weights have changed."""
        self.check_weights()
        self.refresh()
        path = self.tree.match(ids[:-1])
        pages = []
        for node, shared in path:
            page = self.load(node.name, ids[: node.start], node.ids)
            if isinstance(page, str):
                self.reject(node.name, page)
                self.forget(node)
                break
            pages.append(page[..., :shared, :])
        if not pages:
            return KVCache()
        self.use(node for node, _ in path[: len(pages)])
        # One page is used where it is mapped: KVCache copies what it appends to, and changes nothing in place.
        layers = pages[0] if len(pages) == 1 else [torch.cat(layer, dim=2) for layer in zip(*pages, strict=True)]
        layers = [layer[:, None].to(self.device) for layer in layers]  # (2, 1, H, S, D)
        return KVCache(layers, torch.arange(layers[0].size(3), device=self.device))

    def put(self, ids: Sequence[int], cache: KVCache) -> int:
        """Keep what cache has read of ids, as far as it isn't stored yet; return how many bytes were written.

        A full disk is a warning. Raises ValueError if cache is not that of the first tokens of a single text, read by
        this model.
        """
        n = len(cache)
        if n > len(ids) or cache.pos.tolist() != list(range(n)) or (n and cache.layers[0].size(1) != 1):
            raise ValueError(f"the cache, {n} tokens, must be that of the first tokens of ids, {len(ids)}, in one row")
        if n and (cache.layers[0].dtype != self.dtype or cache.nbytes != n * self.token_bytes):
            raise ValueError(f"the cache, {cache.nbytes} bytes of {cache.layers[0].dtype}, is not one of this model, "
                             f"{n * self.token_bytes} of {self.dtype}")  # fmt: skip
        self.check_weights()
        self.refresh()

        def page(start: int, end: int) -> Tensor:
            return torch.stack([layer[:, 0, :, start:end].to("cpu") for layer in cache.layers])

        try:
            written = self.insert(tuple(ids[:n]), page)
            self.evict()
        except BaseException as error:  # also Ctrl-C: what the tree says must be what there is
            self.reset()
            if not isinstance(error, OSError | SafetensorError):
                raise
            warnings.warn(f"can't store a KV cache: {error}", stacklevel=2)
            return 0
        return written

    def reset(self) -> None:
        """Forget what is stored; refresh() finds again what is in the folder."""
        self.tree, self.nodes, self.nbytes, self.scanned = RadixTree(), {}, 0, -1
        self.memory.clear()

    def check_weights(self) -> None:
        """Raise ValueError if the weights are no longer those that the stored caches were computed with."""
        if versions(self.model) != self.weights:
            raise ValueError("the model's weights have changed since this store was opened: open a new one")

    def insert(self, ids: tuple[int, ...], page: Callable[[int, int], Tensor]) -> int:
        """Add ids to the tree and write what is new; page(start, end) gives their keys and values. Return the bytes.
        What fails has to be followed by reset()."""
        path, written, rest = self.tree.match(ids), 0, None
        if path and sum(shared for _, shared in path) < len(ids) and path[-1][1] < len(path[-1][0].ids):
            old, shared = path[-1]  # will be split: its second half goes to a file of its own
            rest = self.load(old.name, ids[: old.start], old.ids)
            if isinstance(rest, str):
                self.reject(old.name, rest)
                self.forget(old)
        nodes = self.tree.insert(ids)
        for node in nodes:
            if not node.name:
                written += self.write(node, ids[: node.start], page(node.start, node.end))
        if isinstance(rest, Tensor):
            written += self.write(old, ids[: old.start], rest[..., shared:, :])
        self.use(nodes)
        return written

    def evict(self) -> None:
        """Delete ends of what was used longest ago until all fits in the capacity."""
        while self.nbytes > self.capacity:
            leaf, keep = self.tree.oldest(math.ceil((self.nbytes - self.capacity) / self.token_bytes))
            if self.folder:
                with suppress(OSError):
                    used = (self.folder / leaf.name).stat().st_mtime_ns
                    if used > leaf.used:  # by another process
                        leaf.used = used
                        self.tree.use(self.tree.path(leaf))
                        continue
            prefix = tuple(i for node in self.tree.path(leaf.parent) for i in node.ids)
            kv = self.load(leaf.name, prefix, leaf.ids) if keep else ""
            kept = kv[..., :keep, :].clone() if isinstance(kv, Tensor) else None
            self.delete(leaf.name)  # before writing, since the disk may be full
            del self.nodes[leaf.name]
            self.nbytes -= leaf.nbytes
            if beginning := self.tree.cut(leaf, keep if kept is not None else 0):
                beginning.used = leaf.used
                self.write(beginning, prefix, kept)

    def load(self, name: str, prefix: Sequence[int], ids: tuple[int, ...]) -> Tensor | str:
        """Return the page (L, 2, H, n, D) of ids after prefix, or what is wrong with it: "" if it is gone."""
        c = self.model.config
        shape = (c.n_layer, 2, c.n_head, len(ids), c.head_dim)
        try:
            metadata, tensors = self.memory[name] if self.folder is None else read_page(self.folder / name)
        except FileNotFoundError:
            return ""
        except UNREADABLE as error:
            return f"it can't be read ({error})"
        kv, own, before = tensors["kv"], tensors["ids"], digest(prefix)
        if metadata.get("fingerprint") != self.fingerprint:
            return "it belongs to another model"
        if metadata.get("prefix") != before or own.tolist() != list(ids):
            return "it holds other tokens"
        if kv.dtype != self.dtype or kv.shape != shape:
            return f"it holds {kv.dtype} {tuple(kv.shape)} instead of {self.dtype} {shape}"
        if metadata.get("checksum") != checksum(self.fingerprint, before, own, kv):
            return "its checksum is wrong"
        return kv

    def write(self, node: Node, prefix: tuple[int, ...], kv: Tensor) -> int:
        """Keep kv (L, 2, H, n, D) as the page of a node that follows prefix, for what it had; return its bytes."""
        tensors = {"kv": kv.contiguous(), "ids": torch.tensor(node.ids)}
        metadata = {"fingerprint": self.fingerprint, "prefix": digest(prefix)}
        metadata["checksum"] = checksum(self.fingerprint, metadata["prefix"], tensors["ids"], tensors["kv"])
        name, nbytes = page_name(prefix, node.ids), sum(tensor.nbytes for tensor in tensors.values())
        if self.folder is None:
            self.memory[name] = metadata, tensors
        else:
            unfinished = self.folder / f"{name}.{uuid4().hex}.tmp"
            try:
                save_file(tensors, unfinished, metadata)
                nbytes = unfinished.stat().st_size
                node.used = node.used or time.time_ns()
                os.utime(unfinished, ns=(node.used, node.used))
                os.replace(unfinished, self.folder / name)
            finally:
                unfinished.unlink(missing_ok=True)
        if node.name:  # it was split
            del self.nodes[node.name]
            self.nbytes -= node.nbytes
            self.delete(node.name)
        self.keep(node, name, nbytes)
        return nbytes

    def keep(self, node: Node, name: str, nbytes: int) -> None:
        """Note where the page of a node is."""
        node.name, node.nbytes, self.nodes[name] = name, nbytes, node
        self.nbytes += nbytes

    def use(self, nodes: Iterable[Node]) -> None:
        """Count a path as used now, for other processes and later ones too: the time of a file is that of its use."""
        nodes, now = list(nodes), time.time_ns()
        self.tree.use(nodes)
        for node in nodes:
            node.used = now
            if self.folder:
                with suppress(OSError):  # another process may have deleted it by now
                    os.utime(self.folder / node.name, ns=(now, now))

    def delete(self, name: str) -> None:
        """Delete a page, or ignore it from now on if that isn't allowed."""
        self.memory.pop(name, None)
        if self.folder:
            try:
                (self.folder / name).unlink()
            except FileNotFoundError:  # another process was faster
                pass
            except OSError:
                self.ignored.add(name)

    def reject(self, name: str, reason: str) -> None:
        """Delete a page that can't be used, with a warning unless there is no reason: then it was gone."""
        if reason:
            warnings.warn(f"the stored KV cache {name} is not used, and deleted: {reason}", stacklevel=2)
        self.delete(name)

    def forget(self, node: Node) -> None:
        """Take a node and all that follows it out of the tree. What follows may be found again, when a file with the
        same tokens up to there is found, or written."""
        for one in self.tree.remove(node):
            del self.nodes[one.name]
            self.nbytes -= one.nbytes
            self.memory.pop(one.name, None)

    def clear(self) -> None:
        """Delete all that is stored for this model."""
        self.refresh()
        for name in list(self.nodes):
            self.delete(name)
        for node in list(self.tree.root.children.values()):
            self.forget(node)

    def refresh(self) -> None:
        """Take note of what other processes, or earlier ones, have written and deleted."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted all of it
        changed = self.folder.stat().st_mtime_ns
        if changed == self.scanned and time.time_ns() - changed > 10**9:
            return  # nothing new; a second, since file times are coarse
        self.scanned = changed
        names = {entry.name for entry in os.scandir(self.folder) if OURS.fullmatch(entry.name)} - self.ignored
        for name in self.nodes.keys() - names:
            if name in self.nodes:  # still
                self.forget(self.nodes[name])
        waiting: dict[str, list[tuple[str, tuple[int, ...]]]] = {}  # by the digest of what comes before their tokens
        files: dict[str, os.stat_result] = {}
        for name in sorted(names - self.nodes.keys()):
            try:
                files[name] = (self.folder / name).stat()
                if name.endswith(".safetensors"):
                    waiting.setdefault(name[:32], []).append((name, ids_of(read_page(self.folder / name)[1])))
            except FileNotFoundError:  # another process was faster
                files.pop(name, None)
            except UNREADABLE as error:
                self.reject(name, f"it can't be read ({error})")
        parents = [(digest(()), self.tree.root), *((name[33:65], node) for name, node in self.nodes.items())]
        found, doubles = [], []
        for end, parent in parents:
            text = tuple(i for node in self.tree.path(parent) for i in node.ids) if end in waiting else ()
            for name, ids in waiting.pop(end, []):
                if name != page_name(text, ids):
                    self.reject(name, "it holds other tokens")
                elif ids[0] in parent.children:
                    doubles.append((name, text, ids))
                else:
                    stat, node = files.pop(name), self.tree.add(parent, ids)
                    node.used = stat.st_mtime_ns
                    self.keep(node, name, stat.st_size)
                    parents.append((name[33:65], node))
                    found.append(node)
        for node in sorted(found, key=lambda node: node.used):
            self.tree.use(self.tree.path(node))
        for name, text, ids in doubles:
            self.adopt(name, text, ids)
        for name, stat in files.items():
            if abs(time.time() - stat.st_mtime) > ABANDONED:
                self.delete(name)

    def adopt(self, name: str, prefix: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """Bring a page into the tree whose beginning is there already: two processes wrote at once, or one was killed
        while it split a node."""
        kv = self.load(name, prefix, ids)
        if isinstance(kv, str):
            self.reject(name, kv)
            return
        n = len(prefix)
        if sum(shared for _, shared in self.tree.match(prefix)) < n:
            return  # what precedes it has just gone
        try:
            self.insert(prefix + ids, lambda start, end: kv[..., start - n : end - n, :])
            if name not in self.nodes:
                self.delete(name)
        except BaseException as error:
            self.reset()
            if not isinstance(error, OSError | SafetensorError):  # a full disk: another time
                raise
        self.scanned = -1  # what follows it can be found now


# What safetensors raises on damaged files, found by damaging them at random.
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError)


def read_page(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors kv and ids of a file; the tensors are mapped, not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in ("kv", "ids")}
    except RuntimeError as error:
        if path.exists():
            raise
        raise FileNotFoundError(path) from error  # get_tensor opens it a second time, and it was deleted in between


def ids_of(tensors: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the tokens of a page. Raises ValueError if they can't be tokens."""
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


def page_name(prefix: Sequence[int], ids: Sequence[int]) -> str:
    """Return the name of the file for ids after prefix: it says where it begins and where it ends."""
    return f"{digest(prefix)}-{digest((*prefix, *ids))}.safetensors"


def checksum(fingerprint: str, prefix: str, ids: Tensor, kv: Tensor) -> str:
    """Return the CRC-32 of a page: of its texts, its tokens, and the CRC-32 of every layer."""
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


@torch.no_grad()
def generate_as_published(model: GPT, new: Tensor, cache: KVCache, max_new_tokens: int,
                          stop_id: int | None = None) -> Iterator[Tensor]:  # fmt: skip
    """Yield what the paper's call writes, `model.generate(input_ids=new, past_key_values=cache)` (transformers 4.45.2).

    Given a cache, that generate() takes input_ids for the whole text. Of T new tokens (1, T) after k cached ones it
    drops the first k, or all but the last if T is no more than k; and it counts positions from the first new token on.
    So the model sees a text with a hole, at positions it has used before. For comparison only: changes the cache.
    """
    k, T = len(cache), new.size(1)
    fed = new[:, k:] if k < T else new[:, -1:]
    start = T - fed.size(1)  # position of the first token fed
    cache.pos = torch.arange(start - k, start, device=new.device)  # what is cached is seen, wherever it was read
    for _ in range(max_new_tokens):
        fed = model(fed, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True)
        yield fed
        if int(fed) == stop_id:
            return


def ask(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that aren't empty, with a prompt if someone is typing."""
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for line in lines:
        if line.strip():
            yield line
        print(prompt, end="", flush=True)


def chat(store: Store, tokenizer: tiktoken.Encoding, lines: Iterable[str], max_new_tokens: int, dialogue: bool,
         trace: Trace | None = None) -> None:  # fmt: skip
    """Answer line by line, every turn on the stored cache of all turns before it, and print what that saved: to know,
    the whole text is read once more after every answer.

    dialogue: turns end with <|endoftext|>, as DialoGPT's do; else they are "Question: ...", "Answer: ...", a line each.
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
        started = time.perf_counter()
        cache = store.get(ids)
        reused, reply, first = len(cache), [], 0.0
        fed = torch.tensor([ids], device=store.device)
        if trace:
            trace.begin(ids, reused)
        for token in generate(model, fed, max_new_tokens, stop_id=tokenizer.eot_token, cache=cache):
            reply.append(int(token))
            first = first or time.perf_counter() - started
            if trace:
                trace.step(reply[-1], cache)
            if reply[-1] == tokenizer.eot_token or (not dialogue and "\n" in tokenizer.decode(reply[-1:])):
                break
        print(tokenizer.decode(reply).replace(END_OF_TEXT, "").strip())
        store.put([*ids, *reply], cache)
        ending = [] if dialogue or not reply or "\n" in tokenizer.decode(reply[-1:]) else tokenizer.encode("\n")
        turns.append(turn + reply + ending)  # an answer that was cut off ends its line
        started = time.perf_counter()
        read_all(model, ids)
        cold = time.perf_counter() - started
        print(f"[reused {reused} of {len(ids)} tokens, which saved {1000 * (cold - first):.1f} ms: first token after "
              f"{1000 * first:.1f}, without reuse {1000 * cold:.1f}]\n")  # fmt: skip
    if trace and trace.steps:
        trace.write()
        print(f"[step by step: {trace.path}]")


def main() -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from studies import recycling
    from support.cli import CommandLine, whole_number

    cli = CommandLine(__doc__, "python %(prog)s chat", NAMES)
    cli.add_argument("what", nargs="?", default="run", choices=("run", "law", "replay", "chat"),
                     help="run: the paper's experiment; law: when reuse pays, with a --model, else at GPT-2 124M's "
                     "geometry with random weights; replay: hit rates of a trace; chat: a conversation")
    cli.add_argument("trace", nargs="?", metavar="TRACE",
                     help="replay: requests as JSON, one a line, with input_length and hash_ids, the prefix-chained "
                     "ids of their blocks of 512 tokens")
    cli.add_model_arguments()
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=100, metavar="N", help="run, chat: to write")
    cli.add_argument("--prompts", nargs=2, metavar=("STORE.csv", "TEST.csv"),
                     help="run: what to store and what to test, in the column prompt; default: those in data, for "
                     "pocket its own")
    cli.add_argument("--encoder", default="tokens", metavar="NAME",
                     help="run: what finds the nearest prompt: tokens, the model's own embeddings, or a model of "
                     "sentence-transformers, say all-MiniLM-L6-v2")
    cli.add_argument("--repeats", type=whole_number(1), default=5, metavar="N", help="run, law: times are medians of N")
    cli.add_argument("--blocks", type=whole_number(1), nargs="+", metavar="N",
                     help="replay: capacities, in blocks of 512 tokens; default: 500, doubled again and again")
    cli.add_argument("--store", default="results/recycle/store", metavar="FOLDER", help="chat: where caches are kept")
    cli.add_argument("--capacity", type=whole_number(1), default=10**9, metavar="BYTES", help="chat: of them at most")
    cli.add_trace_argument("chat: ")
    cli.add_argument("--out", default="results/recycle", metavar="FOLDER", help="where tables and figures go")
    with cli.parse() as args:
        warnings.showwarning = lambda message, *_: print(f"{cli.prog}: {message}", file=sys.stderr)
        out, dialogue = Path(args.out), "DialoGPT" in args.model
        if (args.what == "replay") != (args.trace is not None):
            raise ValueError("replay needs a TRACE, and nothing else takes one")
        if args.page is not None and args.what != "chat":
            raise ValueError(f"{args.what} has no --trace: chat has")
        if args.what == "replay":
            recycling.replay(Path(args.trace), args.blocks, out)
            return
        if args.what == "law":
            random = args.model == "pocket"  # times don't depend on what the weights are
            torch.set_num_threads(args.threads or os.cpu_count() or 1)
            model = (GPT(GPTConfig()).to(args.device, args.dtype).eval() if random else
                     load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype))  # fmt: skip
            recycling.report_law(model, args.repeats, out)
            return
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.what == "chat":
            store = Store(model, args.store, args.capacity)
            trace = cli.trace(args, tokenizer, model, torch.empty(1, 0, dtype=torch.long))
            chat(store, tokenizer, ask(sys.stdin), args.max_new_tokens, dialogue, trace)
            return
        prefix = "pocket_" if args.model == "pocket" else ""
        prompts = args.prompts or [DATA / f"{prefix}{kind}_prompts.csv" for kind in ("cache", "test")]
        recycling.report(model, tokenizer, load_encoder(args.encoder, model, tokenizer), [*map(Path, prompts)],
                         args.max_new_tokens, args.repeats, END_OF_TEXT if dialogue else "",
                         {"model": args.model, "encoder": Path(args.encoder).name}, out)  # fmt: skip


if __name__ == "__main__":
    main()
