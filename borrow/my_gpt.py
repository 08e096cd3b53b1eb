"""The smallest model that offers what the methods need. In an existing GPT, add the lines that mention `cache`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_kv_cache import GPTConfig, KVCache


class MyGPT(nn.Module):
    new_cache = KVCache  # what a text begins with

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # Its vocab_size, n_ctx, n_layer, n_head, n_embd, head_dim; n_kv_head if fewer.
        self.config = config
        self.context = config.n_ctx
        # Its weight has the model's dtype and device.
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_ctx, config.n_embd)
        self.attn = nn.ModuleList(
            nn.Linear(config.n_embd, 3 * config.n_embd) for _ in range(config.n_layer)
        )

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        B, T = ids.shape
        pos = torch.arange(T) if cache is None else cache.positions(T)
        pos = pos.to(ids.device)  # (T,)
        x = self.wte(ids) + self.wpe(pos)  # (B, T, C)
        for layer, attn in enumerate(self.attn):
            qkv = attn(x).view(B, T, 3, self.config.n_head, self.config.head_dim)
            (q, k, v), mask = qkv.permute(2, 0, 3, 1, 4), None  # (B, H, T, D) each
            if cache is not None:
                k, v, mask = cache.append(layer, k, v, pos)
            causal = mask is None and T > 1
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
            x = x + y.transpose(1, 2).flatten(2)
        if cache is not None:
            cache.commit(pos)  # last of all: a pass that fails leaves the cache as it was
        return F.linear(x[:, -1:] if last_only else x, self.wte.weight)  # (B, T, V)


torch.manual_seed(0)
model = MyGPT(GPTConfig(vocab_size=50, n_ctx=128, n_layer=2, n_head=2, n_embd=16)).eval()
