"""GPT-2 with rotary instead of learned positions: gpt_kv_cache.py with queries and keys that are turned by where they
are, so that a score depends on how far apart two tokens are and on nothing else.

Shapes: B batch, T tokens fed, H heads, D head size, C width.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2, equation 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import gpt_kv_cache

BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig(gpt_kv_cache.GPTConfig):
    """Geometry of a rotary model, which is that of a GPT-2; the field lets other classes refuse its file."""

    rotary: bool = True


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Turn x (..., T, D), a query or key for each of the positions pos (T,): dimensions i and D/2 + i are a plane, and
    turn by pos / BASE^(2 i / D). rotate(rotate(x, a), b) is rotate(x, a + b)."""
    D = x.size(-1)
    angle = pos[:, None] * BASE ** -(torch.arange(0, D, 2, device=x.device) / D)  # (T, D / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # (..., T, D / 2) each
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(gpt_kv_cache.Block):
    """A block that turns its queries and keys; a cache holds the turned ones."""

    def forward(
        self, x: Tensor, pos: Tensor, cache: gpt_kv_cache.KVCache | None, layer: int
    ) -> Tensor:
        q, k, v = self.attn.project(self.ln_1(x))  # (B, H, T, D) each
        q, k, mask = rotate(q, pos), rotate(k, pos), None
        if cache is not None:
            k, v, mask = cache.append(layer, k, v, pos)
        x = x + self.drop(self.attn(q, k, v, mask))
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


class GPT(gpt_kv_cache.GPT):
    """A GPT-2 whose wpe is zero, and not trained: positions are in the blocks."""

    config_class, block_class = GPTConfig, Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wpe.weight.requires_grad_(False).zero_()
