"""The memories of gpt_bounded_cache.py side by side: full attention, a window, sinks and a BCT. Its bare run compares
them, and the studies measure them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compress
from gpt_bounded_cache import BCT, GPT, KVCache, SlidingWindowCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from support.printing import end_tokens_of

SINKS = 4
SLOTS = 37  # of a window, one of them spare: as many bytes as pocket-bct's memory


@dataclass(eq=False)
class Memory:
    """A model and the kind of cache that it reads with. make_cache: makes a cache for a text of so
    many tokens; chunk_length: the most tokens in a pass."""

    label: str
    model: nn.Module
    make_cache: Callable[[int], KVCache]
    chunk_length: int = 10_000

    def __post_init__(self) -> None:
        self.config, self.wte = self.model.config, self.model.wte

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), read with this memory."""
        return compress.read_in_pieces(
            self.model, self.make_cache(ids.size(1)), ids, self.chunk_length
        )[0]

    @torch.no_grad()
    def nbytes(self, length: int) -> int:
        """Return the bytes of the cache after a text of `length` tokens."""
        cache = self.make_cache(length)
        self.model(torch.zeros(1, length, dtype=torch.long), cache, last_only=True)
        return cache.nbytes

    def write(self, ids: Tensor, new_tokens: int, **options: Any) -> Tensor:
        """Return the new tokens (B, new_tokens) after ids (B, T)."""
        tokens = generate(self.model, ids, new_tokens, cache=self.make_cache(new_tokens), **options)
        return torch.cat([*tokens], dim=1)


def memories_of(name: str, slots: int = SLOTS, **options: Any) -> dict[str, Memory]:
    """Return the memories that a GPT can have, by name: full attention, a window and a window with
    sinks, both of `slots` slots, and for the model pocket a BCT. Raises ValueError if there are too
    few or too many slots."""
    model = load_model(name, model_class=GPT, **options)
    n_ctx = model.config.n_ctx
    if not SINKS + 1 < slots <= n_ctx + 1:
        raise ValueError(f"--slots {slots}: at least {SINKS + 2}, at most {n_ctx + 1}")
    window = slots - 1  # a slot is spare

    def ring(label: str, *sizes: int) -> Memory:
        return Memory(label, model, lambda _: SlidingWindowCache(*sizes))

    memories = {
        "full": ring(f"full, {n_ctx} tokens", n_ctx),
        "window": ring(f"window of {window}", window),
        "sinks": ring(f"{SINKS} sinks + window of {window - SINKS}", window - SINKS, SINKS),
    }
    if name == "pocket":
        bct = load_model("pocket-bct", model_class=BCT, **options)
        label = f"BCT: {bct.config.slots} slots + {bct.config.recent} recent"
        memories["ours"] = Memory(label, bct, lambda _: bct.new_cache())
    return memories


@torch.no_grad()
def compare_memories(args: argparse.Namespace, ids: Tensor) -> None:
    """Continue ids (1, T) with full attention, let every memory read that text, and print what it
    costs and how far its predictions of the second half are from full attention's."""
    if args.trace:
        raise ValueError("--trace plays one memory: give --memory too")
    memories = memories_of(args.model, args.slots, device=args.device, dtype=args.dtype)
    exact, tokenizer = memories["full"], load_tokenizer(args.model)
    options = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "stop_ids": end_tokens_of(tokenizer),
        "generator": torch.Generator(args.device).manual_seed(args.seed),
    }
    written = exact.write(ids, args.max_new_tokens, **options)
    text = torch.cat([ids, written], dim=1)[:, -exact.config.n_ctx :]
    print(tokenizer.decode(text[0].tolist()))
    ways = [(memory.label, memory.model, memory.make_cache) for memory in memories.values()]
    print(
        f"\nThe same {text.size(1)} tokens, read one by one:\n{compress.comparison_table(ways, text)}\n"
    )
    print(
        "Full attention is exact; the others approximate it, by forgetting. KL is of the second half.\n"
        "The full study, in minutes: python3 -m studies.bounding"
    )
