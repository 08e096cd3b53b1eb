"""What chapter 5 shows of the real model: `prefix`, which keys and values survive a change of the text before them, and
`published`, what three ways of answering a prompt read, and where. From the project's folder:
`python3 -m chapters.05_recycling.look prefix`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import tiktoken
import torch
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from recycle import generate_as_published, prefilled_cache

STORED = "This is the story of Varbert of Foxham, where people buy barley bread, and of his neighbour Dorane."
ASKED = f"{STORED} It began one sunny afternoon."


def print_prefix_distances(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print by how much keys and values at equal positions differ in two texts that differ in one token."""
    stored, asked = (
        tokenizer.encode(f"Halek lives in {town}, by the river") for town in ("Pellam", "Tolben")
    )
    for name, ids in (("stored", stored), ("asked", asked)):
        print(f"{name:<8}" + "".join(f"{tokenizer.decode([i]):>9}" for i in ids))
    layers = zip(
        prefilled_cache(model, stored).layers, prefilled_cache(model, asked).layers, strict=True
    )
    for layer, pair in enumerate(layers):
        # (S, 2 * B * H * D)
        stored_kv, asked_kv = (kv.movedim(3, 0).flatten(1) for kv in pair)
        distances = (stored_kv - asked_kv).norm(dim=1) / stored_kv.norm(dim=1)
        print(f"layer {layer} " + "".join(f"{share:>9.0%}" for share in distances))


def print_published_calls(model: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Print what three ways of answering feed to the model, at which positions, and what they write."""
    ids, stored = tokenizer.encode(ASKED), tokenizer.encode(STORED)
    k = len(stored)
    passes: list[tuple[list[int], list[int]]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args: passes.append((args[0][0].tolist(), positions_of(*args[:2])))
    )

    def ways() -> Iterator[tuple[str, Iterator[Tensor]]]:
        yield "cold", generate(model, torch.tensor([ids]), 12)
        yield (
            "recycled",
            generate(model, torch.tensor([ids]), 12, cache=prefilled_cache(model, stored)),
        )
        yield (
            "as published",
            generate_as_published(
                model, torch.tensor([ids[k:]]), prefilled_cache(model, stored), 12
            ),
        )

    print(f"{len(ids)} tokens, the first {k} of them stored")
    for way, tokens in ways():
        passes.clear()
        text = tokenizer.decode([int(token) for token in tokens])
        first_fed, first_positions = passes[0]
        print(
            f"\n{way}: reads {len(first_fed)} at positions {first_positions[0]} to "
            f"{first_positions[-1]}: {tokenizer.decode(first_fed[-8:])!r}\n"
            f"  {text!r}"
        )
    hook.remove()


def positions_of(ids: Tensor, cache: KVCache) -> list[int]:
    return cache.positions(ids.size(1)).tolist()


def main() -> None:
    torch.set_grad_enabled(False)
    {"prefix": print_prefix_distances, "published": print_published_calls}[sys.argv[1]](
        load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    )


if __name__ == "__main__":
    main()
