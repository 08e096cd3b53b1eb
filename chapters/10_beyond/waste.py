"""What padding and blocks leave empty, and how long a text waits for its next token, for the twelve prompts of
paged.py's demo.

The counts depend on lengths and on common beginnings only, so a model of one tiny layer does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from demos.serving import ServingRecord, prompts_of
from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import load_model, load_tokenizer
from paged import PagedCache, Server
from support.tables import table


def longest_gap(server: Server) -> tuple[int, int]:
    """Serve all texts; return the most tokens that were read between two tokens of a text, and the number of passes."""
    longest = 0
    n_read_before: dict[int, int] = {}  # by text: when it got its newest token
    passes: list[int] = []
    hook = server.model.register_forward_pre_hook(lambda _, fed: passes.append(fed[0].size(1)))
    while server.busy:
        written = server.step()
        n_read = sum(passes)
        for number, _ in written:
            longest = max(longest, n_read - n_read_before.get(number, n_read))
            n_read_before[number] = n_read
    hook.remove()
    return longest, len(passes)


def main() -> None:
    torch.set_num_threads(1)
    config = load_model("pocket", model_class=GPT).config
    token_bytes = 2 * config.n_layer * config.n_head * config.head_dim * 4  # in float32
    prompts = prompts_of(load_tokenizer("pocket"))
    limits = [20 * (i % 4 + 1) for i in range(len(prompts))]
    lengths = [len(ids) + limit for ids, limit in zip(prompts, limits, strict=True)]
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, half of them with a "
        f"common header, and {min(limits)} to {max(limits)} more"
    )
    n_read = sum(lengths) - len(lengths)  # a text's last token is never read

    def row(name: str, slots: int, empty_slots: int, shared_blocks: object = "-") -> list[str]:
        return [
            name,
            f"{slots:,}",
            f"{empty_slots:,}",
            f"{empty_slots / slots:.0%}",
            f"{empty_slots * token_bytes:,}",
            f"{shared_blocks}",
        ]

    rows = []
    longest = max(map(len, prompts)) + max(limits)
    for name, slots_each in (
        (f"{config.n_ctx} slots each", config.n_ctx),
        ("a padded batch", longest),
    ):
        slots = slots_each * len(prompts)
        rows.append(row(name, slots, slots - n_read))
    tiny_config = GPTConfig(
        vocab_size=config.vocab_size, n_ctx=config.n_ctx, n_layer=1, n_head=1, n_embd=8
    )
    tiny_model = GPT(tiny_config).eval()

    def new_server(block_size: int, chunk_size: int = 64) -> Server:
        n_blocks = sum(-(-length // block_size) for length in lengths)
        server = Server(tiny_model, PagedCache(tiny_model, n_blocks, block_size), chunk_size)
        for ids, limit in zip(prompts, limits, strict=True):
            server.add(ids, limit)
        return server

    for block_size in (64, 16, 4, 1):
        record = ServingRecord(new_server(block_size))
        slots = record.used_blocks * block_size
        rows.append(
            row(f"blocks of {block_size}", slots, record.wasted_slots, record.shared_blocks)
        )
    print(table(["", "slots", "empty", "", "bytes wasted", "blocks shared"], rows), end="\n\n")
    gaps = []
    for chunk_size in (config.n_ctx, 64, 16, 4):
        gap, n_passes = longest_gap(new_server(16, chunk_size))
        gaps.append([f"chunks of {chunk_size:,}", f"{gap}", f"{n_passes}"])
    print(table(["", "longest gap, tokens read", "passes"], gaps))


if __name__ == "__main__":
    main()
