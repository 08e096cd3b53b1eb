"""What three forms of a latent's attention cost. From the project's folder: `python3 -m chapters.12_layers.look`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybrid_kv_cache import HybridConfig, LatentAttention
from support.tables import table

N_READ = 8000


def print_forms() -> None:
    """Print what one layer of DeepSeek-V3's sizes caches and multiplies in each form."""
    sizes = {"n_head": 128, "n_kv_head": 128, "head_dim": 128, "kv_rank": 512, "rope_dim": 64}
    config = HybridConfig(n_embd=7168, q_rank=1536, n_layer=1, kinds=("latent",), **sizes)
    H, D, R, E = config.n_head, config.head_dim, config.kv_rank, config.rope_dim
    with torch.device("meta"):  # shapes alone, no numbers
        attention = LatentAttention(config)
        latents = torch.empty(1, 1, N_READ, R + E)
        k, v = torch.empty(1, H, N_READ - 1, D + E), torch.empty(1, H, N_READ - 1, D)
        query, prompt = torch.empty(1, H, 1, D + E), torch.empty(1, H, N_READ, D + E)
        kept = multiplications(F.scaled_dot_product_attention, query, k, v)
        kept += multiplications(attention.expanded, query, latents[:, :, :1], None)  # its own
        expanded, absorbed = (
            [multiplications(form, q, latents, None) for q in (query, prompt)]
            for form in (attention.expanded, attention.absorbed)
        )
    rows = [
        ("keys and values are cached", H * (D + E + D), kept, expanded[1]),
        ("latents are cached and expanded", R + E, *expanded),
        ("latents are cached, absorbed", R + E, *absorbed),
    ]
    print(
        f"One layer of DeepSeek-V3's sizes. A step after {N_READ - 1:,} tokens, and a prompt of {N_READ:,}:\n"
    )
    print(
        table(
            ["", "numbers a token", "multiplications: a step", "the prompt"],
            [
                (name, f"{numbers:,}", f"{step / 1e9:,.2f} billion", f"{whole / 1e9:,.0f} billion")
                for name, numbers, step, whole in rows
            ],
        )
    )


def multiplications(form: Callable[..., Tensor], *given: Tensor | None) -> int:
    """Return how many multiplications form(*given) takes; those of masked scores count, too."""
    with FlopCounterMode(display=False) as counter:
        form(*given)
    return counter.get_total_flops() // 2  # a multiplication and an addition are 2


if __name__ == "__main__":
    print_forms()
