"""The idea in ten lines, and the three bugs of these ten lines.

From the project's folder: `python3 -m chapters.02_kv_cache.ten_lines`; with `--time`, how long the text takes.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer

PROMPT, NEW = "One morning", 250


class Cache:
    def __init__(self):
        self.layers, self.n_read = {}, 0

    def append(self, layer, k, v, pos):
        if layer in self.layers:
            k = torch.cat([self.layers[layer][0], k], dim=2)  # (B, H, S, D)
            v = torch.cat([self.layers[layer][1], v], dim=2)
        self.layers[layer] = k, v
        self.n_read = int(pos[-1]) + 1
        return k, v, None


class Fed(Cache):
    """What the model and generate() ask for besides: how much has been read, and a word at the end of each pass."""

    def __len__(self) -> int:
        return self.n_read

    def positions(self, T: int) -> Tensor:
        return self.n_read + torch.arange(T)

    def commit(self, pos: Tensor) -> None:
        pass


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def off(got: Tensor, expected: Tensor) -> str:
    """Return how far logits (V,) are off, and which token they would write."""
    share = ((got - expected).abs().max() / expected.abs().max()).item()
    right = "the right" if got.argmax() == expected.argmax() else "another"
    return f"logits off by {share:.0%} of the largest, {right} next token"


def second_chunk(model: nn.Module, ids: Tensor) -> Tensor:
    cache = Fed()
    model(ids[:, :9], cache)
    return model(ids[:, 9:], cache)[0, -1]


def pass_that_fails(model: nn.Module, ids: Tensor) -> Tensor:
    cache = Fed()
    model(ids[:, :-1], cache)
    hook = model.h[3].register_forward_pre_hook(interrupt)  # Ctrl-C between two layers
    try:
        model(ids[:, -1:], cache)
    except KeyboardInterrupt:
        hook.remove()
    return model(ids[:, -1:], cache)[0, -1]  # once more


def going_back(model: nn.Module, ids: Tensor) -> Tensor:
    cache = Fed()
    model(torch.cat([ids[:, :-1], ids[:, :4]], dim=1), cache)  # four tokens that nobody wanted
    cache.n_read = ids.size(1) - 1
    return model(ids[:, -1:], cache)[0, -1]


@torch.no_grad()
def main() -> None:
    model, tokenizer = load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    text, begun = ids, time.perf_counter()
    for _ in range(NEW):
        text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], dim=1)
    slow = time.perf_counter() - begun
    begun = time.perf_counter()
    written = torch.cat([ids, *generate(model, ids, NEW, cache=Fed())], dim=1)
    fast = time.perf_counter() - begun
    same = "the same" if torch.equal(text, written) else "another"
    print(f"{NEW} tokens, with the ten lines and without: {same} text")
    if "--time" in sys.argv:
        print(f"{slow:.2f} s without, {fast:.2f} s with them: {slow / fast:.1f} times as fast")
    print()
    ids = text[:, :20]
    expected = model(ids)[0, -1]
    for bug in (second_chunk, pass_that_fails, going_back):
        print(f"{bug.__name__.replace('_', ' ')}: {off(bug(model, ids), expected)}")


if __name__ == "__main__":
    main()
