"""What padding and blocks leave empty, and how long a text waits for its next token, for the twelve prompts of
paged.py's demo."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.serving import ServingRecord, gap_table, prompts_of, tiny_server
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model, load_tokenizer
from support.tables import table


def main() -> None:
    config = load_model("pocket", model_class=GPT).config
    token_bytes = 2 * config.n_layer * config.n_head * config.head_dim * 4  # in float32
    prompts = prompts_of(load_tokenizer("pocket"))
    limits = [20 * (i % 4 + 1) for i in range(len(prompts))]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    print(
        f"{len(prompts)} prompts of {shortest} to {longest} tokens, half of them with a "
        f"common header, and {min(limits)} to {max(limits)} more"
    )
    # a text's last token is never read
    n_read = sum(map(len, prompts)) + sum(limits) - len(prompts)
    counts = []  # name, slots, empty slots, shared blocks
    for name, slots_each in (
        (f"{config.n_ctx} slots each", config.n_ctx),
        ("a padded batch", longest + max(limits)),
    ):
        slots = slots_each * len(prompts)
        counts.append((name, slots, slots - n_read, "-"))
    for size in (64, 16, 4, 1):
        record = ServingRecord(tiny_server(prompts, limits, size))
        slots = record.used_blocks * size
        counts.append((f"blocks of {size}", slots, record.wasted_slots, str(record.shared_blocks)))
    rows = [
        [
            name,
            f"{slots:,}",
            f"{empty:,}",
            f"{empty / slots:.0%}",
            f"{empty * token_bytes:,}",
            shared,
        ]
        for name, slots, empty, shared in counts
    ]
    print(table(["", "slots", "empty", "", "bytes wasted", "blocks shared"], rows), end="\n\n")
    print(gap_table(prompts, limits, block_size=16))


if __name__ == "__main__":
    main()
