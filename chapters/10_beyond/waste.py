"""The memory that padding and blocks leave empty, for the twelve prompts of paged.py's demo.

The counts depend on lengths and on common beginnings only, so a model of one tiny layer does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import load_model, load_tokenizer
from paged import PagedCache, Server
from serving import Record, prompts_of
from support.tables import table


def main() -> None:
    torch.set_num_threads(1)
    c = load_model("pocket", model_class=GPT).config
    of_token = 2 * c.n_layer * c.n_head * c.head_dim * 4  # bytes, in float32
    prompts = prompts_of(load_tokenizer("pocket"))
    limits = [20 * (i % 4 + 1) for i in range(len(prompts))]
    ends = [len(ids) + n for ids, n in zip(prompts, limits, strict=True)]
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, half of them with a "
        f"common header, and {min(limits)} to {max(limits)} more"
    )
    read = sum(ends) - len(ends)  # a text's last token is never read

    def row(name: str, room: int, empty: int, shared: object = "-") -> list[str]:
        return [
            name,
            f"{room:,}",
            f"{empty:,}",
            f"{empty / room:.0%}",
            f"{empty * of_token:,}",
            f"{shared}",
        ]

    longest = max(map(len, prompts)) + max(limits)
    rows = [
        row(name, each * len(prompts), each * len(prompts) - read)
        for name, each in ((f"{c.n_ctx} slots each", c.n_ctx), ("a padded batch", longest))
    ]
    tiny = GPT(
        GPTConfig(vocab_size=c.vocab_size, n_ctx=c.n_ctx, n_layer=1, n_head=1, n_embd=8)
    ).eval()
    for size in (64, 16, 4, 1):
        server = Server(tiny, PagedCache(tiny, sum(-(-end // size) for end in ends), size))
        for ids, n in zip(prompts, limits, strict=True):
            server.add(ids, n)
        record = Record(server)
        rows.append(row(f"blocks of {size}", record.used * size, record.wasted, record.shared))
    print(table(["", "slots", "empty", "", "bytes wasted", "blocks shared"], rows))


if __name__ == "__main__":
    main()
