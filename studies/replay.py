"""Hit rates over traces of requests: how many tokens a cache of blocks would have when they are asked for.

The cache is in memory and evicts the least recently used block. A prompt's blocks are found from the
first one on until one is missing. All of them are then the most recently used, its first one last of
all to be evicted. The order of requests counts, their times don't.

TRACE: requests as JSON, one per line, with input_length and hash_ids, the prefix-chained ids of their
blocks of 512 tokens. Source: Qin et al. 2024, "Mooncake: A KVCache-centric Disaggregated Architecture
for LLM Serving", whose public traces have this format.
"""

import math
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from studies.core import StudyLine
from support.files import parse_json, read_csv, read_text, write_csv
from support.tables import Table, page

BLOCK = 512  # tokens in a block of a trace
CAPACITIES = [*(500 << i for i in range(9)), math.inf]  # of caches, in blocks


class Request(NamedTuple):
    """A prompt of a trace: how many tokens, and the ids of its blocks; equal ids mean equal text up to there."""

    tokens: int
    blocks: list[str]


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace in Mooncake's format. Raises ValueError, with the line, if it
    isn't in that format, or if it is no regular file."""
    requests = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        where = f"{path}, line {number}"
        entry = parse_json(line, where, input_length=int, hash_ids=list)
        tokens = entry["input_length"]
        blocks = [str(block) for block in entry["hash_ids"]]  # ids of any type
        if not 0 < tokens <= BLOCK * len(blocks) < tokens + BLOCK:
            raise ValueError(f"{where}: {tokens} tokens don't make {len(blocks)} blocks of {BLOCK}")
        requests.append(Request(tokens, blocks))
    if not requests:
        raise ValueError(f"{path} is empty")
    return requests


def token_hit_rate(requests: list[Request], capacity: float) -> float:
    """Return the share of the tokens of a trace that a cache of `capacity` blocks has when they are
    asked for.

    Of a prompt that is cached whole, the last token still has to be read.
    """
    cached: OrderedDict[str, None] = OrderedDict()  # the least recently used block first
    found = 0
    for tokens, blocks in requests:
        hits = 0
        while hits < len(blocks) and blocks[hits] in cached:
            hits += 1
        found += min(BLOCK * hits, tokens - 1)
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return found / sum(request.tokens for request in requests)


def table_of_rates(path: Path) -> Table:
    """Return the table of the hit rates in a file that main() wrote."""
    rows = read_csv(path)
    lines = []
    for row in rows:
        capacity, *rates = map(float, row.values())
        name = f"{capacity:,.0f}".replace("inf", "no limit")
        lines.append([name, *(f"{rate:.1%}" for rate in rates)])
    return Table([*rows[0]], lines)


def main(argv: list[str] | None = None) -> None:
    quick = "four capacities only"
    cli = StudyLine(__doc__, "replay TRACE", quick, model="", out="recycling")
    cli.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="JSON objects, one per line: input_length, hash_ids",
    )
    with cli.parse(argv) as args:
        traces = {path.stem: read_trace(path) for path in args.traces}
        rows = []
        for capacity in CAPACITIES[::3] if args.quick else CAPACITIES:
            rates = [token_hit_rate(requests, capacity) for requests in traces.values()]
            rows.append([capacity, *rates])
        path = args.out / "replay.csv"
        write_csv(path, [f"capacity, blocks of {BLOCK} tokens", *traces], rows)
        print(page([table_of_rates(path), f"Written to {path}"]))


if __name__ == "__main__":
    main()
