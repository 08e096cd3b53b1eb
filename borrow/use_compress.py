"""Compress: a cache in fewer bits, or of fewer tokens. Its text is approximate: see first how far it is off."""

import torch

from borrow.my_gpt import model
from compress import CACHES, cache_for, read_in_pieces
from gpt_kv_cache import generate
from support.statistics import kl


def write(ids: list[int], n: int, kind: str = "bits:4") -> tuple[list[int], int]:
    """Return n tokens after ids, and the bytes of their cache. kind: a key of CACHES."""
    ids = torch.tensor([ids], device=model.wte.weight.device)
    cache = cache_for(kind, model, ids.size(1) + n)
    return [int(token) for token in generate(model, ids, n, cache=cache)], cache.nbytes


def distance(ids: list[int], kind: str = "bits:4") -> float:
    """Return how far predictions are from those of a full cache, in nats a token, if ids are read one by one."""
    ids = torch.tensor([ids], device=model.wte.weight.device)
    exact, _ = read_in_pieces(model, model.new_cache(), ids)  # (1, T, V)
    approximate, _ = read_in_pieces(model, cache_for(kind, model, ids.size(1)), ids)
    return float(kl(exact[0], approximate[0]).mean())


if __name__ == "__main__":
    text = [i * i % 50 for i in range(100)]
    for kind in CACHES:
        print(
            f"{kind:15} {write(text, 20, kind)[1]:8,} bytes, {distance(text, kind):.4f} nats a token"
        )
