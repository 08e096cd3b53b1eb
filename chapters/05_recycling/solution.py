"""Chapter 5: reusing a cache for another prompt.

B batch, L layers, H heads, D head size, S tokens of a cache, k tokens stored, T tokens after them.

In every task the result has exactly the types of the signature (a tensor is no int, a range no list), and arguments
stay as they are unless the task says otherwise. A text has at least one token.
"""

from __future__ import annotations

import os
import uuid
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_kv_cache import GPT, KVCache
from support.fingerprints import fingerprint, raw_bytes

# What safetensors raises on damaged files.
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError)


def longest(stored: Sequence[Sequence[int]], ids: Sequence[int]) -> tuple[int, int]:
    """Return the index of the stored text to reuse for the prompt ids, and how many tokens of its cache: as many as
    possible, but never all of ids, since logits need a token to feed. Part of a stored text may be reused. If nothing
    can be (nothing is stored, say, or ids is a single token), the number is 0 and the index doesn't matter."""
    # exercise 5.1
    best_index, most_shared = 0, 0
    for i, text in enumerate(stored):
        shared = 0
        while shared < min(len(text), len(ids) - 1) and text[shared] == ids[shared]:
            shared += 1
        if shared > most_shared:
            best_index, most_shared = i, shared
    return best_index, most_shared


@torch.no_grad()
def answer(
    model: GPT, ids: Sequence[int], n: int, store: dict[tuple[int, ...], KVCache]
) -> list[int]:
    """Return the n (at least 1) greedy tokens after ids, as a cold run would write them.

    store holds caches by the tokens that they were computed from. No token of the longest reusable prefix is read
    again. Afterwards the tokens read in this run (the prompt and all new tokens but the last; for n = 1 the prompt alone)
    are stored too, as ints. The older entries are unchanged, and none is replaced, not even by an equal one. All of it
    fits in the context.
    """
    # exercise 5.2
    texts = list(store)
    index, reused = longest(texts, ids)
    cache = store[texts[index]].clone() if reused else KVCache()
    cache.truncate(reused)
    text = list(ids)
    for _ in range(n):
        fed = torch.tensor([text[len(cache) :]], device=model.wte.weight.device)
        text.append(int(model(fed, cache, last_only=True)[0, -1].argmax()))
    store.setdefault(tuple(text[:-1]), cache)
    return text[len(ids) :]


def published_call(k: int, T: int) -> tuple[list[int], list[int]]:
    """Return what the published call reads first, by the chapter's rule, if the first k tokens of a text (0: none) are
    cached and T (at least 1) more are given: the indices in the whole text, from 0, of the tokens that it feeds; and
    the positions at which it reads them."""
    # exercise 5.3
    first_fed = k if k < T else T - 1  # of the new tokens
    return list(range(k + first_fed, k + T)), list(range(first_fed, T))


def break_even(read: float, fixed: float, token_bytes: int, bandwidth: float) -> int | None:
    """Return the least number of tokens that are restored in less time than they are read in, at least 1; None
    if there is none, as where both take as long.

    read: seconds to read a token; fixed: seconds to restore any number of tokens, to which each adds its bytes;
    token_bytes: bytes of a token's keys and values; bandwidth: bytes restored in a second. All but bandwidth may be 0.
    """
    # exercise 5.4
    saved = read - token_bytes / bandwidth  # by each token
    return int(fixed / saved) + 1 if saved > 0 else None


def save(file: Path, model: GPT, ids: Sequence[int], cache: KVCache) -> None:
    """Write the cache of ids (one row, as many tokens as ids, at least one) as a safetensors file
    that load() can trust.

    A reader at any time finds the old file or the new one, never half of one: write it beside its
    place, then move it there by os.replace. Several programs may save under the same name at the
    same time: the last to finish wins. If anything fails, by an error or by Ctrl-C, it is raised
    again, and no other file is left. What a failed pass has left in the cache, past its len(cache)
    tokens, isn't saved.

    Ready to use: fingerprint(model), a text that changes with any weight, the geometry and the dtype; and
    zlib.crc32(raw_bytes(x)), a checksum of a tensor's bytes (not of its shape or dtype). Metadata are texts.
    """
    # exercise 5.5
    # (L, 2, H, S, D)
    kv = torch.stack([layer[:, 0, :, : len(cache)].cpu() for layer in cache.layers]).contiguous()
    tensors = {"kv": kv, "ids": torch.tensor(ids)}
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4()}.tmp")  # nobody else's
    try:
        save_file(
            tensors, unfinished, {"fingerprint": fingerprint(model), "checksum": _checksum(tensors)}
        )
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def load(file: Path, model: GPT, ids: Sequence[int]) -> KVCache:
    """Return a cache (one row) of the longest beginning of ids that the file holds, but not of all of ids. It takes no
    more memory than its tokens need: a slice of a tensor keeps all of the tensor. (Layers may share one.)

    The cache is empty if there is no file, if the file's first token is another one, or if ids is a single token. It is
    empty, with a warning (warnings.warn), if the file is of another model (the same object with changed weights is one)
    or isn't exactly what save() wrote: damaged, cut off, of another shape or dtype. No content of the file makes this
    raise (see UNREADABLE) or return a wrong cache.
    """
    # exercise 5.5
    if not file.exists():
        return KVCache()
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in ("kv", "ids")}
        if metadata.get("fingerprint") != fingerprint(model):
            raise ValueError("it is of another model")
        if metadata.get("checksum") != _checksum(tensors):
            raise ValueError("it is damaged")
        stored_ids = tensors["ids"].tolist()
    except UNREADABLE as error:
        warnings.warn(f"{file} is not used: {error}", stacklevel=2)
        return KVCache()
    _, reused = longest([stored_ids], ids)
    if not reused:
        return KVCache()
    # (2, 1, H, n, D) each
    layers = [
        layer[:, None, :, :reused].to(model.wte.weight.device, copy=True) for layer in tensors["kv"]
    ]
    return KVCache(layers, torch.arange(reused, device=layers[0].device))


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return a checksum of tensors, with their names, number formats and shapes."""
    text = "".join(
        f"{name} {x.dtype} {tuple(x.shape)} {zlib.crc32(raw_bytes(x))};"
        for name, x in sorted(tensors.items())
    )
    return f"{zlib.crc32(text.encode()):08x}"
