"""Twelve prompts served one at a time, as a padded batch and in blocks: the demo of paged.py, and
its trace."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase as LETTERS
from typing import Any, NamedTuple

import tiktoken
import torch
from torch import Tensor

from formats.chat import encode_fact_question, encode_prompt
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, generate
from paged import PagedCache, Server
from recycle import DATA, read_prompts
from support.geometry import layer_kinds
from support.tables import table
from support.texts import (
    read_prompts_of_kind,
    read_questions,
    read_texts,
)
from support.timing import time_call
from support.tracing import write_page

Prompts, TokenLimits = Sequence[list[int]], Sequence[int]  # ids of each, tokens to write after each
PICTURE_ROWS = 24
HEADER_TEXT, HEADER_CHARACTERS = "letter", 700  # of data/real: what six prompts begin with
HEADER = "", "ms", "tokens/s", "bytes held", "wasted", "blocks", "shared", "put back", "same tokens"


class Served(NamedTuple):
    """The new tokens of each text, and the bytes of keys and values, held and wasted, at the
    fullest step, if they are known."""

    texts: list[list[int]]
    held_bytes: int | None
    wasted_bytes: int | None


def prompts_of(tokenizer: tiktoken.Encoding, name: str = "pocket") -> list[list[int]]:
    """Return twelve prompts: every other one is a question, after a header that all six have in
    common. For pocket's models it is one of answered questions, and the others are the beginnings
    of six texts of their world; for other models it is a text, and the others are open tasks."""
    if name.startswith("pocket"):
        return [*map(tokenizer.encode_ordinary, read_prompts(DATA / "paged_prompts.csv"))]
    text = read_texts()[HEADER_TEXT][:HEADER_CHARACTERS]
    pairs = zip(read_questions()[HEADER_TEXT][:6], read_prompts_of_kind("open"), strict=False)
    prompts = []
    for asked, task in pairs:
        prompts.append(encode_fact_question(text, asked.question, tokenizer))
        prompts.append(encode_prompt(task, tokenizer))
    return prompts


class PaddedCache(SlidingWindowCache):
    """Keys and values of B texts, each with room for the longest: the layout that blocks replace.
    Padding stands before the shorter texts, and a padding token is seen by itself only."""

    def __init__(self, lengths: Tensor, n_new: int) -> None:
        """lengths (B, 1) of the prompts; n_new: tokens after each."""
        longest = int(lengths.max())
        super().__init__(longest + n_new - 1)  # and a spare slot
        self.padding = longest - lengths

    def positions(self, T: int) -> Tensor:
        """Return the positions (B, T) of the next T tokens, 0 for padding."""
        slots = len(self) + torch.arange(T, device=self.padding.device)
        return (slots - self.padding).clamp(min=0)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add keys and values (B, H, T, D) of tokens at positions pos (B, T); return all and a mask
        (B, 1, T, S)."""
        query_slots = len(self) + torch.arange(pos.size(1), device=pos.device)[:, None]  # (T, 1)
        k, v, _ = super().append(layer, k, v, query_slots[:, 0])
        key_slots = torch.arange(k.size(2), device=pos.device)
        is_text = (key_slots <= query_slots) & (key_slots >= self.padding[..., None])
        mask = is_text | (key_slots == query_slots)  # (B, T, S)
        return k, v, mask[:, None]

    def commit(self, pos: Tensor) -> None:
        super().commit(len(self) + torch.arange(pos.size(1), device=pos.device))


@torch.no_grad()
def one_at_a_time(model: GPT, prompts: Prompts, limits: TokenLimits) -> Served:
    """Serve the prompts one after the other, with limits[i] tokens after prompt i."""
    texts, held_bytes = [], 0
    for ids, n in zip(prompts, limits, strict=True):
        cache = model.new_cache()
        tokens = generate(
            model, torch.tensor([ids], device=model.wte.weight.device), n, cache=cache
        )
        texts.append([int(token) for token in tokens])
        held_bytes = max(held_bytes, cache.nbytes)
    return Served(texts, held_bytes, wasted_bytes=0)


@torch.no_grad()
def padded_batch(model: GPT, prompts: Prompts, limits: TokenLimits) -> Served:
    """Serve prompts as one batch, in which every text has the room of the longest and is held until
    the last one is complete."""
    n_new, device = max(limits), model.wte.weight.device
    batch, lengths = pad_prompts(prompts)
    cache = PaddedCache(lengths.to(device), n_new)
    written = torch.cat([*generate(model, batch.to(device), n_new, cache=cache)], 1)
    return padded_result(written, cache.nbytes, batch.size(1) + n_new, prompts, limits)


def pad_prompts(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return prompts as one batch (B, T), with zeros before those shorter than the longest, and
    their lengths (B, 1)."""
    longest = max(map(len, prompts))
    batch = [[0] * (longest - len(ids)) + ids for ids in prompts]
    return torch.tensor(batch), torch.tensor([[len(ids)] for ids in prompts])


def padded_result(
    written: Tensor, nbytes: int, slots: int, prompts: Prompts, limits: TokenLimits
) -> Served:
    """Return the result of serving a padded batch. written (B, n): the tokens after the batch;
    nbytes: of its cache; slots: of that cache, for each text."""
    texts = [text[:limit] for text, limit in zip(written.tolist(), limits, strict=True)]
    needed = sum(map(len, prompts)) + sum(limits) - len(limits)  # a text's last token is never read
    return Served(texts, nbytes, nbytes - nbytes * needed // (len(prompts) * slots))


class ServingRecord:
    """A record of the tokens that a Server writes, and of the texts that own each block after each
    step.

    used_blocks and wasted_slots belong to the step with most blocks in use; shared_blocks is the
    highest number of blocks with several owners. In the record of a step, owners[block] lists the
    numbers of the texts that own a block, written lists (text, token), and events say which texts
    were admitted, put back or complete.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.texts: list[list[int]] = [[] for _ in server.texts]
        self.steps: list[dict[str, Any]] = []
        running: set[int] = set()
        while server.busy:
            written = server.step()
            for number, token in written:
                self.texts[number].append(token)
            self.steps.append(self.step_record(written, running))
            running = {text.number for text in server.running}
        blocks_in_use = [sum(map(bool, step["owners"])) for step in self.steps]
        self.used_blocks = max(blocks_in_use)
        filled_slots = sum(self.steps[blocks_in_use.index(self.used_blocks)]["filled"])
        self.wasted_slots = self.used_blocks * server.cache.block_size - filled_slots
        self.shared_blocks = max(
            sum(len(owners) > 1 for owners in step["owners"]) for step in self.steps
        )

    def step_record(self, written: list[tuple[int, int]], was_running: set[int]) -> dict[str, Any]:
        """Return the state after a step that wrote these tokens; was_running: the texts that had
        blocks before the step."""
        server, cache = self.server, self.server.cache
        running = {text.number for text in server.running}
        waiting = [text.number for text in server.waiting]
        events = {
            "admitted": running - was_running,
            "complete": was_running.difference(running, waiting),
            "put back": was_running.intersection(waiting),
        }
        owners: list[list[int]] = [[] for _ in range(cache.n_blocks)]
        filled = [0] * cache.n_blocks  # slots
        for text in server.running:
            for index, block in enumerate(text.block_table):
                n_read = min(cache.block_size, text.n_read - index * cache.block_size)
                owners[block].append(text.number)
                filled[block] = max(filled[block], n_read)
        return {
            "owners": owners,
            "filled": filled,
            "found": [entry is not None for entry in cache.prefix_entries],
            "written": written,
            "reading": server.prefilling.number if server.prefilling else None,
            "waiting": waiting,
            "events": {event: sorted(texts) for event, texts in events.items() if texts},
        }

    def served(self) -> Served:
        """Return the texts, and the bytes of the step with most blocks in use."""
        cache = self.server.cache
        token_bytes = cache.pool[..., 0, 0, :].nbytes
        used_bytes = self.used_blocks * cache.block_size * token_bytes
        return Served(self.texts, used_bytes, self.wasted_slots * token_bytes)

    def picture(self) -> str:
        """Return a line for some of the steps: a letter for the text that owns a block, or the number of its owners."""
        steps_per_row = -(-len(self.steps) // PICTURE_ROWS)
        lines = [f"{'step':>6}  {'block 0 ...':{self.server.cache.n_blocks}}"]
        for first in range(0, len(self.steps), steps_per_row):
            steps = self.steps[first : first + steps_per_row]
            blocks = "".join(map(block_symbol, steps[-1]["owners"], steps[-1]["found"]))
            events = []
            for event in ("admitted", "put back", "complete"):
                texts = [LETTERS[n] for step in steps for n in step["events"].get(event, [])]
                events += [f"{''.join(texts)} {event}"] if texts else []
            lines.append(f"{first + len(steps):>6}  {blocks}  {', '.join(events)}".rstrip())
        return "\n".join(lines)

    def write_trace(self, path: Path, tokenizer: tiktoken.Encoding, prompts: Prompts) -> None:
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


def blocks_of_each(prompts: Prompts, limits: TokenLimits, block_size: int) -> list[int]:
    """Return how many blocks each text fills, with all of its tokens but the last, which is never
    read."""
    lengths = [len(ids) + limit - 1 for ids, limit in zip(prompts, limits, strict=True)]
    return [-(-length // block_size) for length in lengths]


def server_of(
    model: GPT,
    prompts: Prompts,
    limits: TokenLimits,
    block_size: int,
    chunk_size: int,
    n_blocks: int | None = None,
) -> Server:
    """Return a server with limits[i] tokens to write after prompt i. n_blocks: default, all that the texts fill."""
    n_blocks = n_blocks or sum(blocks_of_each(prompts, limits, block_size))
    server = Server(model, PagedCache(model, n_blocks, block_size), chunk_size)
    for ids, limit in zip(prompts, limits, strict=True):
        server.add(ids, limit)
    return server


def tiny_server(
    prompts: Prompts, limits: TokenLimits, block_size: int, chunk_size: int = 64
) -> Server:
    """Return a server with blocks for all texts, and a model of one tiny layer: what is counted depends on lengths and
    common beginnings only."""
    sizes = {
        "vocab_size": 1 + max(map(max, prompts)),
        "n_ctx": max(map(len, prompts)) + max(limits),
    }
    model = GPT(GPTConfig(**sizes, n_layer=1, n_head=1, n_embd=8)).eval()
    return server_of(model, prompts, limits, block_size, chunk_size)


def gap_table(prompts: Prompts, limits: TokenLimits, block_size: int) -> str:
    """Return a table, by the size of the chunks in which prompts are read: the most tokens that the model reads between
    two tokens of a text, and the number of passes."""
    rows = []
    for chunk_size in (max(map(len, prompts)), 64, 16, 4):
        server = tiny_server(prompts, limits, block_size, chunk_size)
        longest_gap = n_read = n_passes = 0

        def count(_: GPT, fed: tuple[Tensor, ...]) -> None:
            nonlocal n_read, n_passes
            n_read += fed[0].size(1)
            n_passes += 1

        server.model.register_forward_pre_hook(count)
        n_read_before: dict[int, int] = {}  # by text: when it got its newest token
        while server.busy:
            for number, _ in server.step():
                gap = n_read - n_read_before.get(number, n_read)
                longest_gap, n_read_before[number] = max(longest_gap, gap), n_read
        rows.append([f"chunks of {chunk_size}", f"{longest_gap}", f"{n_passes}"])
    return table(["", "longest gap, tokens read", "passes"], rows)


def block_symbol(owners: list[int], can_be_found: bool) -> str:
    """Return the character for a block in the picture, by its owners and whether a new text could
    find it."""
    if len(owners) > 1:
        return str(len(owners)) if len(owners) < 10 else "+"
    if owners:
        return LETTERS[owners[0]]
    return ":" if can_be_found else "."


def faster_of_two(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the faster of two runs, and what it returns."""
    return min((time_call(run) for _ in range(2)), key=lambda timed: timed[0])


def demo(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    name: str,
    max_new_tokens: int,
    block_size: int,
    n_blocks: int | None,
    chunk_size: int,
    trace_file: Path | None,
) -> None:
    """Print a table of what each way costs, and a picture of the blocks. Every fourth prompt gets
    max_new_tokens, the others fewer. name: of the model; n_blocks: the number of blocks in the last row; None: half of
    those that the row before uses."""
    prompts = prompts_of(tokenizer, name)
    limits = [max(1, max_new_tokens * (i % 4 + 1) // 4) for i in range(len(prompts))]
    lengths = [*map(len, prompts)]
    longest = max(lengths)
    if longest + max_new_tokens > model.context:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} more exceed the context of {model.context}"
        )

    new_server = partial(server_of, model, prompts, limits, block_size, chunk_size)
    new_server(n_blocks)  # what can't be is refused before anything takes time
    rows, all_texts = [], []

    def add_row(name: str, seconds: float, served: Served, *counts: object) -> None:
        all_texts.append(served.texts)
        figures = [1e3 * seconds, sum(limits) / seconds, served.held_bytes, served.wasted_bytes]
        same = "yes" if served.texts == all_texts[0] else "NO"
        rows.append([name, *(f"{figure:,.0f}" for figure in figures), *map(str, counts), same])

    ways = {"one at a time": one_at_a_time}
    if not layer_kinds(model.config):  # else, no cache for all layers serves it
        ways["a padded batch"] = padded_batch
    for name, serve in ways.items():
        add_row(name, *faster_of_two(partial(serve, model, prompts, limits)), "-", "-", "-")
    budget = None
    for name in ("blocks for all", "few blocks"):
        seconds, record = faster_of_two(lambda budget=budget: ServingRecord(new_server(budget)))
        needed = blocks_of_each(prompts, limits, block_size)
        budget = n_blocks or max(*needed, record.used_blocks // 2)  # of the last row
        counts = record.used_blocks, record.shared_blocks, record.server.n_preempted
        add_row(name, seconds, record.served(), *counts)
    print(f"""\
Twelve prompts of {min(lengths)} to {longest} tokens, half with a common header, and {min(limits)} to {max_new_tokens} greedy
tokens after each; blocks of {block_size} tokens, prompts read in chunks of {chunk_size}.

{table(HEADER, rows)}

ms, tokens/s:   of all twelve, prompts included; the faster of two runs
bytes, blocks:  of keys and values at the fullest step; wasted: padding, or the empty rest of blocks
shared:         blocks with several owners, at most; put back: how often a text lost its blocks

The blocks of the last row. A letter: the text that owns the block; a number: how many do; ":" and "." are free,
and a new text would find what ":" holds.

{record.picture()}

The longest wait of a text for its next token, by the tokens that the model reads meanwhile:

{gap_table(prompts, limits, block_size)}

Exact: every text's tokens are its own. Slow: PyTorch copies all keys and values in every step, as a kernel
needn't. `python3 -m benchmarks --requests` measures both on GPT-2 124M.""")
    if trace_file:
        record.write_trace(trace_file, tokenizer, prompts)
        print(f"[step by step: {trace_file}]")
