"""How much attention a text's first tokens get: in each layer, the mean over heads, tokens 64 to 255 and 12 texts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus


@torch.no_grad()
def main() -> None:
    model, tokenizer = load_model("pocket", model_class=GPT), load_tokenizer("pocket")
    texts = [
        tokenizer.encode_ordinary(document.text)[:256] for document in corpus.documents("test", 60)
    ]
    ids = torch.tensor([tokens for tokens in texts if len(tokens) == 256][:12])  # (B, 256)
    pos = torch.arange(256)
    equal = 1 / (pos[64:] + 1)  # a token's share if all that it sees had the same
    print(
        f"{len(ids)} texts; with equal shares the first token would get {equal.mean():.1%}, the first four "
        f"{4 * equal.mean():.1%}"
    )
    x = model.wte(ids) + model.wpe(pos)
    for layer, block in enumerate(model.h):
        q, k, v = block.attn.project(block.ln_1(x))
        scores = (q @ k.mT / math.sqrt(q.size(3))).masked_fill(pos > pos[:, None], -math.inf)
        share = scores.softmax(dim=-1)[:, :, 64:].mean(dim=(0, 1, 2))  # (256,)
        print(
            f"layer {layer}: the first token {share[0]:.1%}, the first four {share[:4].sum():.1%}"
        )
        x = x + block.attn(q, k, v, pos <= pos[:, None])
        x = x + block.mlp(block.ln_2(x))


if __name__ == "__main__":
    main()
