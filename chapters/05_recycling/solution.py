"""Chapter 5: reusing a cache for another prompt.

B batch, L layers, H heads, D head size, S tokens of a cache, k tokens stored, T tokens after them.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_kv_cache import GPT, KVCache
from support.fingerprints import fingerprint, raw

# What safetensors raises on damaged files.
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError)


def longest(stored: Sequence[Sequence[int]], ids: Sequence[int]) -> tuple[int, int]:
    """Return which of the stored texts to reuse for the prompt ids, and how many tokens of its cache: as many as
    possible, but never all of ids, since without a token to feed there are no logits. If nothing can be reused, the
    number is 0 and the index is ignored; a stored text need not be a prefix of ids as a whole."""
    # exercise 5.1
    best, most = 0, 0
    for i, text in enumerate(stored):
        n = 0
        while n < min(len(text), len(ids) - 1) and text[n] == ids[n]:
            n += 1
        if n > most:
            best, most = i, n
    return best, most


@torch.no_grad()
def answer(model: GPT, ids: Sequence[int], n: int, store: dict[tuple[int, ...], KVCache]) -> list[int]:
    """Return the n (at least 1) likeliest next tokens after ids, one after the other, as a cold run would write them.

    store holds caches by the tokens that they were computed from, and nothing that they hold may be read again. What
    this run has read, the prompt and all new tokens but the last, is stored afterwards; what was stored stays as it is.
    All of it fits in the context. Without importing recycle: gpt_kv_cache has all that is needed.
    """
    # exercise 5.2
    texts = list(store)
    best, reused = longest(texts, ids)
    cache = store[texts[best]].clone() if reused else KVCache()
    cache.truncate(reused)
    text = list(ids)
    for _ in range(n):
        fed = torch.tensor([text[len(cache) :]], device=model.wte.weight.device)
        text.append(int(model(fed, cache, last_only=True)[0, -1].argmax()))
    store[tuple(text[:-1])] = cache
    return text[len(ids) :]


def published_call(k: int, T: int) -> tuple[list[int], list[int]]:
    """Return what the published call reads first, for a text of which the first k tokens are cached and T (at least 1)
    more are given: the indices in the whole text, from 0, of the tokens that it feeds; and the positions at which it
    reads them. The chapter says by what rule. Without calling generate_as_published, which makes the call."""
    # exercise 5.3
    first = k if k < T else T - 1  # of the new tokens
    return list(range(k + first, k + T)), list(range(first, T))


def break_even(read: float, fixed: float, token_bytes: int, bandwidth: float) -> int | None:
    """Return the least number of tokens that are restored sooner than they are read, None if none ever are.

    read: seconds to read a token; fixed: seconds that restoring takes, however few tokens there are; token_bytes: of a
    token's keys and values; bandwidth: bytes that are restored in a second.
    """
    # exercise 5.4
    saved = read - token_bytes / bandwidth  # by each token
    return int(fixed / saved) + 1 if saved > 0 else None


def save(file: Path, model: GPT, ids: Sequence[int], cache: KVCache) -> None:
    """Write the cache of ids, one row of as many tokens, as a safetensors file that load() can trust. A reader at the
    same time, or after an interruption, finds the old file or the new one, never half of one: it is written beside its
    place and moved there by os.replace.

    Ready to use: fingerprint(model), a text that changes with any weight, the geometry and the number format, and
    zlib.crc32(raw(x)), a checksum of a tensor's bytes (not of its shape or number format). Metadata are texts.
    """
    # exercise 5.5
    kv = torch.stack([layer[:, 0, :, : len(cache)].cpu() for layer in cache.layers]).contiguous()  # (L, 2, H, S, D)
    tensors = {"kv": kv, "ids": torch.tensor(ids)}
    unfinished = file.with_name(file.name + ".tmp")
    try:
        save_file(tensors, unfinished, {"fingerprint": fingerprint(model), "checksum": _checksum(tensors)})
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def load(file: Path, model: GPT, ids: Sequence[int]) -> KVCache:
    """Return a cache, one row, of as many tokens of ids as the file holds from the first one on, but not of all of ids.

    It is empty if the file holds none of them, or isn't there; and, with a warning (warnings.warn), if the file was
    saved with another model or isn't to the last bit what save() wrote: damaged, cut off, of other numbers or shapes.
    No content of the file makes this raise (see UNREADABLE) or return a wrong cache.
    """
    # exercise 5.5
    if not file.exists():
        return KVCache()
    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in ("kv", "ids")}
        if about.get("fingerprint") != fingerprint(model):
            raise ValueError("it is of another model")
        if about.get("checksum") != _checksum(tensors):
            raise ValueError("it is damaged")
        stored = tensors["ids"].tolist()
    except UNREADABLE as error:
        warnings.warn(f"{file} is not used: {error}", stacklevel=2)
        return KVCache()
    _, n = longest([stored], ids)
    if not n:
        return KVCache()
    layers = [layer[:, None, :, :n].to(model.wte.weight.device) for layer in tensors["kv"]]  # (2, 1, H, n, D)
    return KVCache(layers, torch.arange(n, device=layers[0].device))


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return a checksum of tensors, with their names, number formats and shapes."""
    text = "".join(f"{name} {x.dtype} {tuple(x.shape)} {zlib.crc32(raw(x))};" for name, x in sorted(tensors.items()))
    return f"{zlib.crc32(text.encode()):08x}"
