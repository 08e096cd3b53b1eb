"""Hit rates over a trace of requests: what a store's index would find, at a given capacity in blocks.

The index is in memory, and does what support/store.py does: runs of blocks are never split, and the least recently
used run that nothing continues goes first.

TRACE: requests as JSON, one per line, with input_length and hash_ids, the prefix-chained ids of their
blocks of 512 tokens. Source: Qin et al. 2024, "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving", whose public traces have this format.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from studies.protocol import StudyLine
from support.cli import whole_number
from support.figures import figure
from support.files import parse_json, read_csv, read_text, write_csv
from support.prefix import common_prefix
from support.tables import table

BLOCK = 512  # tokens in a block of a trace
EVICTED = "the least recently used run that nothing continues"
LLAMA_70B = 2 * 80 * 8 * 128 * 2  # bytes of a token: 80 layers, 8 key-value heads of 128, 16 bits


@dataclass(frozen=True)
class Request:
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
        self.capacity, self.held, self.last = capacity, 0, 0  # in blocks; the newest run
        self.places: dict[tuple, int] = {}  # runs by parent, start in it, and first block
        self.runs: OrderedDict[int, tuple[tuple, tuple]] = OrderedDict()
        # Oldest first, and each run before that which it continues: the first has none that continues it.

    def match(self, blocks: tuple) -> list[tuple[int, int]]:
        """Return the runs along blocks, and how many blocks of each agree."""
        path, at, run, n = [], 0, 0, 0
        while at < len(blocks) and (run, n, blocks[at]) in self.places:
            run = self.places[run, n, blocks[at]]
            n = common_prefix(self.runs[run][1], blocks[at : at + len(self.runs[run][1])])
            path.append((run, n))
            at += n
        return path

    def put(self, blocks: tuple) -> int:
        """Store blocks, as far as they fit; return how many of them were there."""
        path = self.match(blocks)
        parent, start = path[-1] if path else (0, 0)
        found = sum(n for _, n in path)
        for run, _ in reversed(path):
            self.runs.move_to_end(run)
        used, new = {run for run, _ in path}, blocks[found:]
        while self.held + len(new) > self.capacity:
            oldest = next(iter(self.runs), None)
            if oldest is None or oldest in used:
                new = new[: int(self.capacity) - self.held]
                break
            place, gone = self.runs.pop(oldest)
            del self.places[place]
            self.held -= len(gone)
        if new:
            self.last += 1
            self.places[parent, start, new[0]] = self.last
            self.runs[self.last] = (parent, start, new[0]), new
            self.held += len(new)
            for run, _ in reversed(path):
                self.runs.move_to_end(run)
        return found


def hit_rates(requests: list[Request], capacity: float, bar: Any) -> dict[str, float]:
    """Run an Index over a trace, with room for some blocks; return the shares that were found.

    Of a prompt that is stored whole, the last token still has to be read.
    """
    index, hits, found, whole = Index(capacity), 0, 0, 0
    for request in requests:
        known = index.put(request.blocks)
        hits += known
        found += min(known * BLOCK, request.tokens - 1)
        whole += known > 0
        bar.update()
    blocks = sum(len(request.blocks) for request in requests)
    tokens = sum(request.tokens for request in requests)
    return {"blocks": hits / blocks, "tokens": found / tokens, "requests": whole / len(requests)}


HEADER = [
    "capacity_blocks",
    "tokens",
    "gigabytes_70b",
    "block_hit_rate",
    "token_hit_rate",
    "request_hit_rate",
]


def replay(path: Path, capacities: Sequence[int], out: Path) -> None:
    """Print, write and draw the hit rates of a trace over capacities, by default 500 blocks, doubled
    repeatedly, and those of a cache without limit."""
    requests = read_trace(path)
    unique = len({block for request in requests for block in request.blocks})
    doubled = [500 * 2**i for i in range(30) if 500 * 2**i < unique]
    sizes = [*sorted(capacities or doubled), math.inf]
    rows = []
    with tqdm(total=len(requests) * len(sizes), desc="replay", leave=False) as bar:
        for size in sizes:
            rates = hit_rates(requests, size, bar)
            name = "no limit" if size == math.inf else size
            tokens = BLOCK * int(min(size, unique))
            rows.append([name, tokens, tokens * LLAMA_70B / 1e9, *rates.values()])
    print(f"{path.name}: {len(requests):,} requests, {unique:,} different blocks of {BLOCK}\n")
    cells = [
        [f"{size}", f"{tokens:,}", f"{gigabytes:,.0f}", *map("{:.1%}".format, found)]
        for size, tokens, gigabytes, *found in rows
    ]
    print(table(HEADER, cells))
    print(
        f"\n70B: {LLAMA_70B:,} bytes a token (80 layers, 8 key-value heads of 128, 16 bits).\n"
        f"Evicted first: {EVICTED}. The order of requests counts, their times don't."
    )
    file = out / f"replay_{path.stem}.csv"
    write_csv(file, HEADER, rows)
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
        axes.axhline(
            100 * float(unlimited["token_hit_rate"]),
            color="grey",
            linestyle=":",
            label="tokens, no limit",
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(finite, [f"{size:,.0f}" for size in finite])

    figure(
        file.with_suffix(".png"),
        curves,
        title=f"{name}: what is found in the cache",
        xlabel=f"capacity in blocks of {BLOCK} tokens ({unique:,} different ones in the trace)",
        ylabel="% found",
        ylim=(0, None),
    )


def main(argv: list[str] | None = None) -> None:
    quick = "without --blocks, three capacities only: 500, 4,000, 32,000"
    cli = StudyLine(__doc__, "replay TRACE", quick, model="", out="recycling")
    what = "JSON objects, one per line: input_length, hash_ids"
    cli.add_argument("trace", metavar="TRACE", type=Path, help=what)
    what = "capacities, in blocks of 512 tokens; default: 500, doubled repeatedly"
    cli.add_argument("--blocks", type=whole_number(1), nargs="+", metavar="N", help=what)
    with cli.parse(argv) as args:
        few = [500, 4000, 32000] if args.quick else []
        replay(args.trace, args.blocks or few, args.out)


if __name__ == "__main__":
    main()
