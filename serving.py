"""Twelve prompts served one at a time, as a padded batch and in blocks: the demo of paged.py, and
its trace."""

import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase as LETTERS
from typing import Any

import tiktoken
import torch
from torch import Tensor

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate
from paged import PagedCache, Server
from recycle import DATA, read_prompts
from support.tables import table
from support.tracing import write_page

ROWS = 24  # of the picture
HEADER = "", "ms", "tokens/s", "bytes held", "wasted", "blocks", "shared", "put back", "same tokens"
Served = tuple[list[list[int]], int, int]  # the texts' tokens, the most bytes, and those wasted


def prompts_of(tokenizer: tiktoken.Encoding) -> list[list[int]]:
    """Return twelve prompts: every other one is a question after a header of answered ones, which
    all six have in common; the others are the beginnings of six texts of pocket's world."""
    return [*map(tokenizer.encode_ordinary, read_prompts(DATA / "paged_prompts.csv"))]


class PaddedCache(SlidingWindowCache):
    """Keys and values of B texts with room for the longest each: the layout that blocks replace.
    Padding stands before the shorter ones, and is seen by itself only."""

    def __init__(self, lengths: Tensor, new: int) -> None:
        """lengths (B, 1) of the prompts; new: tokens after each."""
        longest = int(lengths.max())
        super().__init__(longest + new - 1)  # and a spare slot
        self.padding = longest - lengths

    def positions(self, T: int) -> Tensor:
        """Return the positions (B, T) of the next T tokens, 0 for padding."""
        slot = len(self) + torch.arange(T, device=self.padding.device)
        return (slot - self.padding).clamp(min=0)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add keys and values (B, H, T, D) of tokens at positions pos (B, T); return all and a mask
        (B, 1, T, S)."""
        query = len(self) + torch.arange(pos.size(1), device=pos.device)[:, None]  # slots
        k, v, _ = super().append(layer, k, v, query[:, 0])
        key = torch.arange(k.size(2), device=pos.device)
        seen = (key <= query) & (key >= self.padding[..., None]) | (key == query)  # (B, T, S)
        return k, v, seen[:, None]

    def commit(self, pos: Tensor) -> None:
        super().commit(len(self) + torch.arange(pos.size(1), device=pos.device))


@torch.no_grad()
def one_at_a_time(model: GPT, prompts: Sequence[list[int]], limits: Sequence[int]) -> Served:
    """Serve prompts alone, limits[i] tokens after each."""
    texts, most = [], 0
    for ids, n in zip(prompts, limits, strict=True):
        cache = KVCache()
        tokens = generate(
            model, torch.tensor([ids], device=model.wte.weight.device), n, cache=cache
        )
        texts.append([int(token) for token in tokens])
        most = max(most, cache.nbytes)
    return texts, most, 0


@torch.no_grad()
def padded(model: GPT, prompts: Sequence[list[int]], limits: Sequence[int]) -> Served:
    """Serve prompts as one batch, in which every text has the room of the longest and lasts as
    long as the last."""
    lengths, n, device = [*map(len, prompts)], max(limits), model.wte.weight.device
    longest = max(lengths)
    cache = PaddedCache(torch.tensor(lengths, device=device)[:, None], n)
    ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=device)
    texts = torch.cat([*generate(model, ids, n, cache=cache)], 1).tolist()
    texts = [text[:limit] for text, limit in zip(texts, limits, strict=True)]
    held = sum(lengths) + sum(limits) - len(limits)  # a text's last token is never read
    return texts, cache.nbytes, cache.nbytes - cache.nbytes * held // (len(prompts) * (longest + n))


class Record:
    """What a Server writes, and after each step who owned which block.

    used, wasted are the blocks and the empty slots of the step with most blocks in use; shared the
    most blocks that several texts owned. owners[block] are the numbers of its texts; written are
    (text, token); events say who came, was put back, and is complete."""

    def __init__(self, server: Server) -> None:
        cache, self.server, self.steps = server.cache, server, []
        self.texts, held = [[] for _ in server.texts], set()
        while server.busy:
            written = server.step()
            for number, token in written:
                self.texts[number].append(token)
            now = {text.number for text in server.running}
            waiting = [text.number for text in server.waiting]
            events = {
                "admitted": now - held,
                "complete": held.difference(now, waiting),
                "put back": held.intersection(waiting),
            }
            owners = [[] for _ in range(cache.n_blocks)]
            filled = [0] * cache.n_blocks
            for text in server.running:
                for i, block in enumerate(text.block_table):
                    owners[block].append(text.number)
                    filled[block] = max(
                        filled[block], min(cache.block_size, text.n_read - i * cache.block_size)
                    )
            step = {
                "owners": owners,
                "filled": filled,
                "found": [bool(found) for found in cache.prefix_entries],
                "written": written,
                "reading": server.prefilling.number if server.prefilling else None,
                "waiting": waiting,
                "events": {what: sorted(who) for what, who in events.items() if who},
            }
            self.steps.append(step)
            held = now
        fullest = max(self.steps, key=lambda step: sum(map(bool, step["owners"])))
        self.used = sum(map(bool, fullest["owners"]))
        self.wasted = self.used * cache.block_size - sum(fullest["filled"])
        self.shared = max(sum(len(who) > 1 for who in step["owners"]) for step in self.steps)

    def picture(self) -> str:
        """Return a line for some of the steps: a letter for the text that owns a block, or how many
        do."""
        every = -(-len(self.steps) // ROWS)
        lines = [f"{'step':>6}  {'block 0 ...':{self.server.cache.n_blocks}}"]
        for first in range(0, len(self.steps), every):
            steps = self.steps[first : first + every]
            last, words = steps[-1], []
            row = "".join(map(cell, last["owners"], last["found"]))
            for what in ("admitted", "put back", "complete"):
                who = [LETTERS[n] for step in steps for n in step["events"].get(what, [])]
                if who:
                    words.append(f"{''.join(who)} {what}")
            lines.append(f"{first + len(steps):>6}  {row}  {', '.join(words)}".rstrip())
        return "\n".join(lines)

    def write(self, path: Path, tokenizer: tiktoken.Encoding, prompts: list[list[int]]) -> None:
        """Write a page that plays the steps."""
        steps = []
        for step in self.steps:
            words = [(number, tokenizer.decode([token])) for number, token in step["written"]]
            steps.append(step | {"written": words})
        data = {
            "size": self.server.cache.block_size,
            "prompts": [*map(tokenizer.decode, prompts)],
            "steps": steps,
        }
        write_page(path, "paged.py", data, "tracing_blocks.html")


def cell(who: list[int], found: bool) -> str:
    """Return a block in the picture, by its owners and whether a text would find it."""
    if len(who) > 1:
        return str(len(who)) if len(who) < 10 else "+"
    if who:
        return LETTERS[who[0]]
    return ":" if found else "."


def fastest(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the fewer seconds of two runs, and what a run returns."""
    found = []
    seconds = timeit.repeat(lambda: found.append(run()), repeat=2, number=1)
    return min(seconds), found[-1]


def demo(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    n: int,
    size: int,
    blocks: int | None,
    chunk: int,
    trace: Path | None,
) -> None:
    """Print a table of what each way costs, and a picture of the blocks; n: the most tokens written
    to a text, of which others get less. blocks: of the last row; half of what the row before uses
    unless it is given."""
    prompts = prompts_of(tokenizer)
    limits = [max(1, n * (i % 4 + 1) // 4) for i in range(len(prompts))]
    lengths = [*map(len, prompts)]
    longest = max(lengths)
    if longest + n > model.context:
        raise ValueError(
            f"a prompt of {longest} tokens and {n} more exceed the context of {model.context}"
        )

    def server(blocks: int) -> Server:
        waiting = Server(model, PagedCache(model, blocks, size), chunk)
        for ids, limit in zip(prompts, limits, strict=True):
            waiting.add(ids, limit)
        return waiting

    if blocks:
        server(blocks)  # too few are refused before anything takes time
    rows, expected = [], []

    def add(name: str, seconds: float, served: Served, *counts: object) -> None:
        texts, *memory = served
        expected.append(texts)
        figures = [1e3 * seconds, sum(limits) / seconds, *memory]
        same = "yes" if texts == expected[0] else "NO"
        rows.append([name, *(f"{x:,.0f}" for x in figures), *map(str, counts), same])

    for name, way in (("one at a time", one_at_a_time), ("a padded batch", padded)):
        add(name, *fastest(partial(way, model, prompts, limits)), "-", "-", "-")
    each = [-(-(m + limit - 1) // size) for m, limit in zip(lengths, limits, strict=True)]
    budget = sum(each)
    for name in ("blocks for all", "few blocks"):
        seconds, record = fastest(lambda budget=budget: Record(server(budget)))
        budget = blocks or max(*each, record.used // 2)  # of the last row
        token = record.server.cache.pool[..., 0, 0, :].nbytes
        served = record.texts, record.used * size * token, record.wasted * token
        add(name, seconds, served, record.used, record.shared, record.server.n_preempted)
    print(f"""\
Twelve prompts of {min(lengths)} to {longest} tokens, half with a common header, and {min(limits)} to {n} greedy
tokens after each; blocks of {size} tokens, prompts read in chunks of {chunk}.

{table(HEADER, rows)}

ms, tokens/s:   of all twelve, prompts included; the faster of two runs
bytes, blocks:  of keys and values at the fullest step; wasted: padding, or the empty rest of blocks
shared:         blocks with several owners, at most; put back: how often a text lost its blocks

The blocks of the last row. A letter: the text that owns the block; a number: how many do; ":" and "." are free,
and a new text would find what ":" holds.

{record.picture()}

Exact: every text's tokens are its own. Slow: PyTorch copies all keys and values in every step, as a kernel
needn't. `python3 -m benchmarks --requests` measures both on GPT-2 124M.""")
    if trace:
        record.write(trace, tokenizer, prompts)
        print(f"[step by step: {trace}]")
