"""Hit rates over a trace of requests: what a store's index would find, at a given capacity in blocks.

The index is in memory and follows the rules of support/store.py: runs of blocks are never split,
and the least recently used run that no other run continues is evicted first.

TRACE: requests as JSON, one per line, with input_length and hash_ids, the prefix-chained ids of their
blocks of 512 tokens. Source: Qin et al. 2024, "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving", whose public traces have this format.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from studies.core import StudyLine
from support.files import parse_json, read_text, write_csv
from support.prefix import common_prefix_length
from support.tables import table

BLOCK = 512  # tokens in a block of a trace


class Request(NamedTuple):
    """A prompt of a trace: how many tokens, and the ids of its blocks; equal ids mean equal text up to there."""

    tokens: int
    blocks: tuple[str, ...]


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace in Mooncake's format. Raises ValueError, with the line, if it
    isn't in that format, or if it is no regular file."""
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_json(line, where, input_length=int, hash_ids=list)
        tokens = entry["input_length"]
        blocks = tuple(map(str, entry["hash_ids"]))  # ids of any type
        if not 0 < tokens <= BLOCK * len(blocks) < tokens + BLOCK:
            raise ValueError(f"{where}: {tokens} tokens don't make {len(blocks)} blocks of {BLOCK}")
        requests.append(Request(tokens, blocks))
    if not requests:
        raise ValueError(f"{path} is empty")
    return requests


class Index:
    """Runs of blocks, which are never split. The least recently used run that no other continues is
    evicted first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity  # in blocks
        self.block_count = 0
        # Runs by their first block, whose id also stands for all blocks before it. The least
        # recently used comes first, and a run comes before the run that it continues.
        self.runs = OrderedDict()

    def put(self, blocks: tuple[str, ...]) -> int:
        """Store as many blocks as fit; return how many of them were there before."""
        path, stored_count = [], 0
        while stored_count < len(blocks) and blocks[stored_count] in self.runs:
            path.append(blocks[stored_count])
            run = self.runs[blocks[stored_count]]
            stored_count += common_prefix_length(
                run, blocks[stored_count : stored_count + len(run)]
            )
        for run in reversed(path):
            self.runs.move_to_end(run)
        new_blocks = blocks[stored_count:]
        while self.block_count + len(new_blocks) > self.capacity:
            oldest = next(iter(self.runs), None)
            if oldest is None or oldest in path:
                new_blocks = new_blocks[: int(self.capacity) - self.block_count]
                break
            self.block_count -= len(self.runs.pop(oldest))
        if new_blocks:
            self.runs[new_blocks[0]] = new_blocks
            self.block_count += len(new_blocks)
            for run in reversed(path):
                self.runs.move_to_end(run)
        return stored_count


def token_hit_rate(requests: list[Request], capacity: float) -> float:
    """Run an Index with room for `capacity` blocks over a trace; return the share of tokens found.

    Of a prompt that is stored whole, the last token still has to be read.
    """
    index = Index(capacity)
    found = sum(min(index.put(blocks) * BLOCK, tokens - 1) for tokens, blocks in requests)
    return found / sum(request.tokens for request in requests)


def replay_trace(path: Path, capacities: Sequence[int], folder: Path) -> None:
    """Print and write the hit rates of a trace over capacities, by default 500 blocks, doubled
    repeatedly, and those of a cache without limit."""
    requests = read_trace(path)
    block_count = len({block for request in requests for block in request.blocks})
    default_capacities = [500 << i for i in range(30) if 500 << i < block_count]
    rows, shown_rows = [], []
    for capacity in [*sorted(capacities or default_capacities), math.inf]:
        rate = token_hit_rate(requests, capacity)
        name = "no limit" if capacity == math.inf else capacity
        tokens = BLOCK * min(capacity, block_count)
        rows.append([name, tokens, rate])
        shown_rows.append([f"{name}", f"{tokens:,}", f"{rate:.1%}"])
    header = ["capacity_blocks", "tokens", "token_hit_rate"]
    print(
        f"{path.name}: {len(requests):,} requests, {block_count:,} different blocks of {BLOCK}\n\n"
        f"{table(header, shown_rows)}\n\nEvicted first: the least recently used run that nothing "
        "continues. The order of requests counts, their times don't."
    )
    write_csv(folder / f"replay_{path.stem}.csv", header, rows)
    print(f"Written to {folder}")


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "replay TRACE",
        "three capacities only: 500, 4,000, 32,000",
        model="",
        out="recycling",
    )
    cli.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="JSON objects, one per line: input_length, hash_ids",
    )
    with cli.parse(argv) as args:
        replay_trace(args.trace, [500, 4000, 32000] if args.quick else [], args.out)


if __name__ == "__main__":
    main()
