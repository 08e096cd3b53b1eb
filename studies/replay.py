"""Hit rates over a trace of requests: what a store's index would find, at a given capacity in blocks.

The index is in memory, and does what support/store.py does: runs of blocks are never split, and the least recently
used run that nothing continues goes first.

TRACE: requests as JSON, one per line, with input_length and hash_ids, the prefix-chained ids of their
blocks of 512 tokens. Source: Qin et al. 2024, "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving", whose public traces have this format.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from studies.core import StudyLine
from support.figures import write_figure
from support.files import parse_json, read_csv, read_text, write_csv
from support.prefix import common_prefix_length
from support.tables import table

BLOCK = 512  # tokens in a block of a trace


class Request(NamedTuple):
    """A prompt of a trace: how many tokens, and the ids of its blocks; equal ids mean equal text up to there."""

    tokens: int
    blocks: tuple[str, ...]


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace in Mooncake's format. Raises ValueError, with the line, if it isn't one,
    or if it is no regular file."""
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_json(line, where, input_length=int, hash_ids=list)
        tokens = entry["input_length"]
        blocks = tuple(map(str, entry["hash_ids"]))  # whatever names a block
        if not 0 < tokens <= BLOCK * len(blocks) < tokens + BLOCK:
            raise ValueError(f"{where}: {tokens} tokens don't make {len(blocks)} blocks of {BLOCK}")
        requests.append(Request(tokens, blocks))
    if not requests:
        raise ValueError(f"{path} is empty")
    return requests


class Index:
    """Runs of blocks, none of them split; the least recently used run that nothing continues is evicted first."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.held = capacity, 0  # in blocks
        # By their first block, whose id says what comes before it. Oldest first, and each run before that which it
        # continues: the first has none that continues it.
        self.runs = OrderedDict()

    def put(self, blocks: tuple[str, ...]) -> int:
        """Store blocks, as far as they fit; return how many of them were there."""
        path, found = [], 0
        while found < len(blocks) and blocks[found] in self.runs:
            path.append(blocks[found])
            run = self.runs[blocks[found]]
            found += common_prefix_length(run, blocks[found : found + len(run)])
        for run in reversed(path):
            self.runs.move_to_end(run)
        new = blocks[found:]
        while self.held + len(new) > self.capacity:
            oldest = next(iter(self.runs), None)
            if oldest is None or oldest in path:
                new = new[: int(self.capacity) - self.held]
                break
            self.held -= len(self.runs.pop(oldest))
        if new:
            self.runs[new[0]] = new
            self.held += len(new)
            for run in reversed(path):
                self.runs.move_to_end(run)
        return found


def hit_rates(requests: list[Request], capacity: float) -> dict[str, float]:
    """Run an Index over a trace, with room for some blocks; return the shares that were found.

    Of a prompt that is stored whole, the last token still has to be read.
    """
    index = Index(capacity)
    counts = np.zeros((2, 3))  # found, of all: blocks, tokens, requests
    for tokens, blocks in requests:
        known = index.put(blocks)
        counts[0] += known, min(known * BLOCK, tokens - 1), known > 0
        counts[1] += len(blocks), tokens, 1
    shares = (counts[0] / counts[1]).tolist()
    return dict(zip(("block_hit_rate", "token_hit_rate", "request_hit_rate"), shares, strict=True))


def replay(path: Path, capacities: Sequence[int], out: Path) -> None:
    """Print, write and draw the hit rates of a trace over capacities, by default 500 blocks, doubled
    repeatedly, and those of a cache without limit."""
    requests = read_trace(path)
    unique = len({block for request in requests for block in request.blocks})
    doubled = [500 << i for i in range(30) if 500 << i < unique]
    rows, cells = [], []
    for size in [*sorted(capacities or doubled), math.inf]:
        rates = hit_rates(requests, size)
        name, tokens = "no limit" if size == math.inf else size, BLOCK * min(size, unique)
        rows.append([name, tokens, *rates.values()])
        cells.append([f"{name}", f"{tokens:,}", *map("{:.1%}".format, rates.values())])
    header = ["capacity_blocks", "tokens", *rates]
    print(
        f"{path.name}: {len(requests):,} requests, {unique:,} different blocks of {BLOCK}\n\n"
        f"{table(header, cells)}\n\nEvicted first: the least recently used run that nothing "
        "continues. The order of requests counts, their times don't."
    )
    file = out / f"replay_{path.stem}.csv"
    write_csv(file, header, rows)
    draw(file)
    print(f"Written to {out}")


def draw(file: Path) -> None:
    """Draw hit rates against capacity, as replay() has written them."""
    *limited, unlimited = read_csv(file)
    finite = [int(row["capacity_blocks"]) for row in limited]
    name, unique = file.stem.removeprefix("replay_"), int(unlimited["tokens"]) // BLOCK

    def curves(axes: Any) -> None:
        for key, style in (("token", "o-"), ("block", "s--")):
            found = [100 * float(row[f"{key}_hit_rate"]) for row in limited]
            axes.plot(finite, found, style, label=f"{key}s", markersize=4)
        most = 100 * float(unlimited["token_hit_rate"])
        axes.axhline(most, color="grey", linestyle=":", label="tokens, no limit")
        axes.set_xscale("log", base=2)
        axes.set_xticks(finite, [f"{size:,}" for size in finite])

    write_figure(
        file.with_suffix(".png"),
        curves,
        title=f"{name}: what is found in the cache",
        xlabel=f"capacity in blocks of {BLOCK} tokens ({unique:,} different ones in the trace)",
        ylabel="% found",
        ylim=(0, None),
    )


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
        replay(args.trace, [500, 4000, 32000] if args.quick else [], args.out)


if __name__ == "__main__":
    main()
