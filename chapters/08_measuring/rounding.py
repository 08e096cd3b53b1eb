"""Print by how much logits of `pocket` change, relative to the largest of them: if the text is fed in pieces instead of
at once, which is rounding; by GELU without its approximation, a slight mistake; by a mask that is wrong by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from gpt_kv_cache import GPT, MLP, Attention, KVCache
from load_gpt2_weights import load_model, load_tokenizer

TEXT = (
    "Everyone in Tolben knew Halek and his sister Belessa. On a sunny evening late in November, the two of them left "
    "home together."
)


class AnotherGELU(MLP):
    """GPT-2 was trained with the tanh approximation; this is the function that it approximates."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class SeesTheNext(Attention):
    """A mask that is wrong by one: every token also sees the one after it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:  # plain causal: all keys are new
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
        return super().forward(q, k, v, mask | mask.roll(1, -1))


def in_pieces(model: GPT, ids: Tensor) -> Tensor:
    cache = KVCache()
    return torch.cat([model(piece, cache) for piece in ids.split([1, 2, 5, ids.size(1) - 8], 1)], 1)


def another_gelu(model: GPT, ids: Tensor) -> Tensor:
    for block in model.h:
        block.mlp.__class__ = AnotherGELU
    return model(ids)


def wrong_mask(model: GPT, ids: Tensor) -> Tensor:
    for block in model.h:
        block.attn.__class__ = SeesTheNext
    return model(ids)


def change(dtype: torch.dtype, ids: Tensor, how: Callable[[GPT, Tensor], Tensor]) -> float:
    """Return the largest difference, relative to the largest logit."""
    model = load_model("pocket", model_class=GPT, dtype=dtype)
    expected = model(ids).double()
    return float((how(model, ids).double() - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def main() -> None:
    ids = torch.tensor([load_tokenizer("pocket").encode(TEXT)])
    print(f"{'':8}  spacing above 1  in pieces  another GELU  wrong mask")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pieces, gelu, mask = (
            change(dtype, ids, how) for how in (in_pieces, another_gelu, wrong_mask)
        )
        name = str(dtype).removeprefix("torch.")
        print(
            f"{name:8}  {torch.finfo(dtype).eps:15.7f}  {pieces:9.7f}  {gelu:12.7f}  {mask:10.7f}"
        )


if __name__ == "__main__":
    main()
