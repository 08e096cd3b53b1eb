"""The files of a store of KV caches: their names, their checksums, and their faults.

Shapes: L layers, H heads, D head size, n tokens of an entry.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from support.fingerprints import raw

ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors")
HEADER = 512  # bytes: an entry's file has at most that many beside its keys, values and tokens

# What safetensors raises on damaged files, found by damaging them at random.
DAMAGED = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError)


def read_entry(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors kv and ids of a file; the tensors are mapped, not read."""
    path.open("rb").close()  # if that fails, it is known why: safetensors says that there is no such file
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in ("kv", "ids")}


def ids_of(tensors: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the tokens of an entry. Raises ValueError if they can't be tokens."""
    ids = tensors["ids"]
    if ids.dtype != torch.long or ids.dim() != 1 or not len(ids):
        raise ValueError(f"{ids.dtype} {tuple(ids.shape)} instead of tokens")
    return tuple(ids.tolist())


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
