"""By how much a token's keys and values change when the text goes on by a token, with and without a causal mask.

From the project's folder: `python3 -m chapters.02_kv_cache.look`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_kv_cache import GPT, Attention, KVCache
from load_gpt2_weights import load_model, load_tokenizer

TEXT, TOKEN = "Once, in the town of", 3


class SeesAll(Attention):
    """Attention without a causal mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(q, k, v, torch.ones(q.size(2), k.size(2), dtype=torch.bool))


def changes(model: GPT, ids: Tensor, token: int) -> list[list[float]]:
    """Return, for each layer, how far a token's key and value move when the last of ids (1, T) is added: as shares of
    their length."""
    steps = [KVCache(), KVCache()]
    for cache, text in zip(steps, (ids[:, :-1], ids), strict=True):
        model(text, cache)
    moved = []
    for before, after in zip(*(cache.layers for cache in steps), strict=True):
        a, b = (kv[:, 0, :, token].flatten(1) for kv in (before, after))  # (2, H * D)
        moved.append(((b - a).norm(dim=1) / a.norm(dim=1)).tolist())
    return moved


@torch.no_grad()
def main() -> None:
    model, tokenizer = load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    ids = torch.tensor([tokenizer.encode(TEXT)])
    word, new = (tokenizer.decode([int(ids[0, i])]) for i in (TOKEN, -1))
    print(
        f"token {TOKEN}, {word!r}, before and after {new!r} is read: change of its key and its value\n"
    )
    print(f"{'':7}{'causal':>18}{'each token sees all':>24}")
    print(f"{'':7}{'key':>12}{'value':>6}{'key':>18}{'value':>6}")
    causal = changes(model, ids, TOKEN)
    for block in model.h:
        block.attn.__class__ = SeesAll
    for layer, shares in enumerate(zip(causal, changes(model, ids, TOKEN), strict=True)):
        cells = ("{:>12.0%}{:>6.0%}".format(*pair) for pair in shares)
        print(f"layer {layer}" + "      ".join(cells))


if __name__ == "__main__":
    main()
