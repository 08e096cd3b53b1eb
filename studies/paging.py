"""Twelve prompts served one at a time, as a padded batch and in blocks: the demo of paged.py, and its trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, generate
from paged import PagedCache, Server
from pocket import corpus
from support.tables import table
from support.tracing import write_page

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = (10, 25, 45, 70, 100, 140)  # tokens of the prompts without a common header
ROWS = 24  # of the picture


def prompts_of(tokenizer: tiktoken.Encoding) -> list[list[int]]:
    """Return twelve prompts: every other one is a question after a header of answered ones, which all six have in
    common; the others are the beginnings of six texts."""
    texts = [document.text for document in corpus.documents("test", 40)]
    header = next(text for text in texts if text.startswith("Question:"))
    questions = corpus.closed_book_questions("test")
    asked = [tokenizer.encode_ordinary(f"{header}\n{q.prompt}") for q in questions[:: len(questions) // 6][:6]]
    others = [tokenizer.encode_ordinary(text) for text in texts if not text.startswith("Question:")]
    long = [ids[:n] for ids, n in zip((ids for ids in others if len(ids) >= LENGTHS[-1]), LENGTHS, strict=False)]
    return [ids for pair in zip(asked, long, strict=True) for ids in pair]


class PaddedCache(KVCache):
    """Keys and values of B texts with room for the longest each: the layout that blocks replace."""

    def __init__(self, model: GPT, lengths: Sequence[int], S: int) -> None:
        c, weight = model.config, model.wte.weight
        super().__init__([*weight.new_zeros(c.n_layer, 2, len(lengths), c.n_head, S, c.head_dim)])
        self.start = torch.zeros(len(lengths), 1, dtype=torch.long, device=weight.device)  # next position of each
        self.lengths = torch.tensor(lengths, device=weight.device)[:, None]

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values (B, H, T, D) at positions pos (B, T); return all slots and a mask (B, 1, T, S)."""
        kv, row = self.layers[layer], torch.arange(len(pos), device=pos.device)[:, None]
        kv[:, row, :, pos] = torch.stack([k, v]).permute(1, 3, 0, 2, 4)
        return kv[0], kv[1], torch.arange(kv.size(3), device=pos.device) <= pos[:, None, :, None]

    def commit(self, pos: Tensor) -> None:
        """After the prompts, which are padded at their ends, each text goes on behind its own."""
        self.start = self.lengths if not len(self) else self.start + pos.size(1)

    def __len__(self) -> int:
        return int(self.start.max())

    @property
    def next_pos(self) -> Tensor:
        return self.start


@torch.no_grad()
def one_at_a_time(model: GPT, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[int]], int, int]:
    """Return the tokens after each of the prompts, the most bytes of keys and values, and those wasted."""
    texts, most = [], 0
    for ids, n in zip(prompts, limits, strict=True):
        cache = KVCache()
        tokens = generate(model, torch.tensor([ids], device=model.wte.weight.device), n, cache=cache)
        texts.append([int(token) for token in tokens])
        most = max(most, cache.nbytes)
    return texts, most, 0


@torch.no_grad()
def padded(model: GPT, prompts: list[list[int]], limits: list[int]) -> tuple[list[list[int]], int, int]:
    """The same as one batch, in which every text has the room of the longest and lasts as long as the last."""
    lengths, n = [len(ids) for ids in prompts], max(limits)
    cache = PaddedCache(model, lengths, max(lengths) + n)
    ids = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in prompts], device=model.wte.weight.device)
    logits = model(ids, cache)[torch.arange(len(ids)), torch.tensor(lengths) - 1]
    written = [logits.argmax(-1, keepdim=True)]
    for _ in range(n - 1):
        written.append(model(written[-1], cache, last_only=True)[:, -1].argmax(-1, keepdim=True))
    texts = [row[:limit] for row, limit in zip(torch.cat(written, 1).tolist(), limits, strict=True)]
    nbytes = sum(kv.nbytes for kv in cache.layers)
    held = sum(len(ids) + limit - 1 for ids, limit in zip(prompts, limits, strict=True))
    return texts, nbytes, nbytes - nbytes * held // (len(prompts) * (max(lengths) + n))


class Record:
    """What every step of a Server did, and who owned which block after it.

    owners[block] are the numbers of its texts. written are (text, token); events say who came, waited and left."""

    def __init__(self, server: Server, limits: Sequence[int]) -> None:
        cache, left = server.cache, dict(enumerate(limits))
        self.blocks, self.size, self.steps = cache.blocks, cache.size, []
        self.used = self.wasted = 0  # at the step with most blocks in use
        self.shared = 0  # at the step with most of these
        held: set[int] = set()
        while server.busy:
            fed = server.reading.unread if server.reading else 0
            written = server.step()
            for number, _ in written:
                left[number] -= 1
            now = {text.number: text for text in server.running}
            owners: list[list[int]] = [[] for _ in range(cache.blocks)]
            filled = [0] * cache.blocks
            for number, text in sorted(now.items()):
                for index, block in enumerate(text.table):
                    owners[block].append(number)
                    filled[block] = max(filled[block], min(cache.size, text.n_read - index * cache.size))
            gone = {number for number in held if number not in now}
            events = {"admitted": now.keys() - held, "complete": {n for n in gone if not left[n]},
                      "put back": {n for n in gone if left[n]}}  # fmt: skip
            self.steps.append({"owners": owners, "filled": filled, "found": [bool(x) for x in cache.listed],
                               "written": written, "reading": server.reading.number if server.reading else None,
                               "fed": fed, "events": {what: sorted(who) for what, who in events.items() if who},
                               "waiting": [text.number for text in server.waiting]})  # fmt: skip
            held = {*now}
            self.shared = max(self.shared, sum(len(who) > 1 for who in owners))
            if (used := cache.blocks - len(cache.free)) > self.used:
                self.used, self.wasted = used, used * cache.size - sum(filled)

    def picture(self) -> str:
        """Return a line for some of the steps: a letter for the text that owns a block, or how many do."""

        def cell(who: list[int], found: bool) -> str:
            if not who:
                return ":" if found else "."
            return LETTERS[who[0] % 26] if len(who) == 1 else str(len(who)) if len(who) < 10 else "+"

        every = -(-len(self.steps) // ROWS)
        lines = [f"{'step':>6}  {'block 0 ...':{self.blocks}}"]
        for first in range(0, len(self.steps), every):
            steps = self.steps[first : first + every]
            row = "".join(map(cell, steps[-1]["owners"], steps[-1]["found"]))
            words = []
            for what in ("admitted", "put back", "complete"):
                who = [number for step in steps for number in step["events"].get(what, [])]
                words += [f"{''.join(LETTERS[n % 26] for n in who)} {what}"] if who else []
            lines.append(f"{first + len(steps):>6}  {row}  {', '.join(words)}".rstrip())
        return "\n".join(lines)

    def write(self, path: Path, title: str, tokenizer: tiktoken.Encoding, prompts: list[list[int]]) -> None:
        """Write a page that plays the steps."""
        steps = [step | {"written": [(number, tokenizer.decode([token])) for number, token in step["written"]]}
                 for step in self.steps]  # fmt: skip
        data = {"size": self.size, "prompts": [*map(tokenizer.decode, prompts)], "steps": steps}
        write_page(path, title, data, "tracing_blocks.html")


def demo(model: GPT, tokenizer: tiktoken.Encoding, n: int, size: int, blocks: int | None, chunk: int,
         trace: Path | None = None) -> None:  # fmt: skip
    """Print a table of what each way costs, and a picture of the blocks; n: the most tokens written to a text, of which
    others get less. blocks: of the last row; half of what the row before uses unless it is given."""
    prompts = prompts_of(tokenizer)
    limits = [max(1, n * (i % 4 + 1) // 4) for i in range(len(prompts))]
    longest = max(len(ids) for ids in prompts) + n
    if longest > model.context:
        raise ValueError(f"{longest - n} tokens of the longest prompt and {n} more exceed the context of "
                         f"{model.context}")  # fmt: skip
    each = [-(-(len(ids) + limit - 1) // size) for ids, limit in zip(prompts, limits, strict=True)]

    def waiting(blocks: int) -> Server:
        server = Server(model, PagedCache(model, blocks, size), chunk)
        for ids, limit in zip(prompts, limits, strict=True):
            server.add(ids, limit)
        return server

    def paged(blocks: int) -> tuple[list[list[int]], Server]:
        server, texts = waiting(blocks), [[] for _ in prompts]
        while server.busy:
            for number, token in server.step():
                texts[number].append(token)
        return texts, server

    def fastest(run: Callable[[], tuple[Any, ...]]) -> tuple[float, tuple[Any, ...]]:
        best = float("inf")
        for _ in range(2):
            begun = time.perf_counter()
            result = run()
            best = min(best, time.perf_counter() - begun)
        return best, result

    if blocks:
        waiting(blocks)  # too few are refused before anything takes time
    rows, expected = [], None
    for name, way in (("one at a time", one_at_a_time), ("a padded batch", padded)):
        seconds, (texts, nbytes, wasted) = fastest(lambda way=way: way(model, prompts, limits))
        expected = expected or texts
        rows.append([name, f"{1e3 * seconds:,.0f}", f"{sum(limits) / seconds:,.0f}", f"{nbytes:,}", f"{wasted:,}",
                     "-", "-", "-", "yes" if texts == expected else "NO"])  # fmt: skip
    record = Record(waiting(sum(each)), limits)
    for name, budget in (("blocks for all", sum(each)), ("few blocks", blocks or max(*each, record.used // 2))):
        seconds, (texts, server) = fastest(lambda budget=budget: paged(budget))
        record = Record(waiting(budget), limits)
        block = server.cache.pool[..., 0, :, :].nbytes
        rows.append([name, f"{1e3 * seconds:,.0f}", f"{sum(limits) / seconds:,.0f}", f"{record.used * block:,}",
                     f"{record.wasted * block // size:,}", f"{record.used}", f"{record.shared}", f"{server.put_back}",
                     "yes" if texts == expected else "NO"])  # fmt: skip
    lengths = sorted(map(len, prompts))
    print(f"Twelve prompts of {lengths[0]} to {lengths[-1]} tokens, half of them with a common header, and "
          f"{min(limits)} to {max(limits)} greedy\ntokens after each; blocks of {size} tokens, prompts "
          f"read in chunks of {chunk}.\n")
    print(table(["", "ms", "tokens/s", "bytes held", "wasted", "blocks", "shared", "put back", "same tokens"], rows))
    print(f"""
ms, tokens/s:   of all twelve, prompts included; the faster of two runs
bytes, blocks:  of keys and values at the step that holds most; wasted: padding, or what blocks have left to fill
shared:         blocks that several texts own, at the step with most; put back: how often a text lost its blocks

The blocks of the last row over time. A letter: the text that owns the block; a number: how many texts share it;
":" is free, and holds a beginning that a new text would find; "." is free.

{record.picture()}

Exact: every text's tokens are its own. Slow: in plain PyTorch all keys and values are gathered, which is to say
copied, in every step; a kernel that reads them through the table saves that. `python3 -m benchmarks --requests`
measures both on GPT-2 124M.""")
    if trace:
        record.write(trace, "paged.py", tokenizer, prompts)
        print(f"[step by step: {trace}]")
