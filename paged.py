"""Many texts at once: keys and values in blocks that any text may own, and a loop that admits,
writes and retires texts at every step. `paged.py` serves twelve prompts one at a time, as a padded
batch and in blocks; `paged.py serve FILE` continues every line of a file, once or with several samples.

A cache with room for the longest text wastes most of it on the others. Blocks of a few tokens are
handed out as texts grow, and each text has a table of its blocks. Texts that begin alike list the same
blocks; a text that writes to a shared block gets a copy of its own. If no block is free, the youngest
text gives its blocks back and is read again later. Every text gets the same tokens as alone.

Shapes: T tokens fed, of all texts together; S slots of all their blocks; L layers, H heads, D head
size, N blocks, b tokens of a block.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention"; Yu et al. 2022, "Orca" (continuous batching); Agrawal et al. 2023, "SARATHI"
(prefill in chunks).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_kv_cache import check_options, context_start, sample
from support.geometry import kv_heads
from support.prefix import common_prefix

FAR = 1 << 40  # a position after every query's
MOST = 16  # texts that are written at once, by default


@dataclass(eq=False)
class Text:
    """Tokens and the block table of a text. Its token start + t is in slot t % b of block
    table[t // b], for the n_read tokens that have been read; `end` is its length when complete."""

    number: int  # texts are numbered as they arrive
    ids: list[int]
    end: int
    stop_ids: tuple[int | None, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    generator: torch.Generator | None = None  # its own: its draws don't depend on other texts
    start: int = 0  # what is before it has been forgotten: the context was full
    n_read: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def unread(self) -> int:
        """Tokens that have to be fed before the next one can be written."""
        return len(self.ids) - self.start - self.n_read


class PagedCache:
    """Keys and values of any number of texts, in N blocks of b tokens that are allocated once.

    count[block] says how many tables list a block; at 0 it is free. A full block can be found:
    children[parent] maps its tokens to it. The parent is the block before it, or -1, and stands for
    all tokens before. A free block can be found too, until it is handed out: the oldest goes first.
    """

    def __init__(self, model: nn.Module, blocks: int, size: int = 16) -> None:
        if blocks < 1 or size < 1:
            raise ValueError(f"{blocks} blocks of {size} tokens: must be at least 1 of 1")
        c, weight = model.config, model.wte.weight
        self.blocks, self.size = blocks, size
        shape = (c.n_layer, 2, kv_heads(c), blocks, size, c.head_dim)
        try:
            self.pool = weight.new_zeros(shape)
        except RuntimeError as error:
            nbytes = math.prod(shape) * weight.element_size()
            raise ValueError(
                f"{blocks} blocks of {size} tokens take {nbytes:,} bytes, more than can be had"
            ) from error
        self.count = [0] * blocks
        self.free = OrderedDict.fromkeys(range(blocks))
        self.children: list[dict[tuple[int, ...], int]] = [{} for _ in range(blocks + 1)]
        # Where a block can be found: the children it is among, and its tokens there.
        self.listed: list[tuple[dict, tuple[int, ...]] | None] = [None] * blocks
        self.scratch = self.pool.new_empty(0)  # of gather(): new memory in every layer is slow

    def take(self, block: int | None = None) -> int:
        """List a block in one table more, and return it; without a block, a free one."""
        if block is None:
            block = next(iter(self.free))
            self.forget(block)
        self.free.pop(block, None)
        self.count[block] += 1
        return block

    def release(self, block: int) -> None:
        """List a block in one table less."""
        self.count[block] -= 1
        if not self.count[block]:
            self.free[block] = None
            if not self.listed[block]:  # useless to others: the next one to be handed out
                self.free.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """Let nobody find a block, and those after it: it is about to hold other tokens."""
        lost = [block] if self.listed[block] else []
        while lost:
            block = lost.pop(0)
            known, tokens = self.listed[block]
            del known[tokens]
            # A text owns a block only with all before it: those after a free one are free.
            lost += self.children[block].values()
            self.listed[block] = None
            if block in self.free:
                self.free.move_to_end(block, last=False)

    def share(self, text: Text) -> None:
        """Give a text without blocks those that begin with its tokens, the last of them perhaps in
        part. A token stays unread: only a pass gives logits."""
        while text.n_read % self.size == 0:
            ids = tuple(text.ids[text.start + text.n_read : -1][: self.size])
            known = self.children[text.table[-1] if text.table else -1]
            best = max(known, key=lambda tokens: common_prefix(tokens, ids), default=())
            if not (shared := common_prefix(best, ids)):
                return
            text.table.append(self.take(known[best]))
            text.n_read += shared

    def missing(self, text: Text, n: int) -> tuple[int, bool]:
        """Return how many blocks a text lacks for n tokens more, and if its last one is shared."""
        index, used = divmod(text.n_read, self.size)
        shared = used > 0 and self.count[text.table[index]] > 1
        return max(0, math.ceil((text.n_read + n) / self.size) - len(text.table)), shared

    def room(self, text: Text, n: int, spare: int = 0) -> bool:
        """Make room for n tokens more, in blocks that are the text's own. Return False, and change
        nothing, if fewer than `spare` blocks would be left."""
        more, shared = self.missing(text, n)
        if more + shared + spare > len(self.free):
            return False
        index, used = divmod(text.n_read, self.size)
        if shared:  # copy on write
            old, text.table[index] = text.table[index], self.take()
            self.pool[..., text.table[index], :used, :] = self.pool[..., old, :used, :]
            self.release(old)
        elif used:
            self.forget(text.table[index])
        text.table += [self.take() for _ in range(more)]
        return True

    def truncate(self, text: Text, n: int) -> None:
        """Keep the first n tokens that were read. Raises ValueError if there are fewer."""
        if not 0 <= n <= text.n_read:
            raise ValueError(f"can't keep {n} tokens of {text.n_read}")
        keep = math.ceil(n / self.size)
        for block in reversed(text.table[keep:]):  # a text's end is of no use without its beginning
            self.release(block)
        del text.table[keep:]
        text.n_read = n

    def drop(self, text: Text) -> None:
        """Give all blocks of a text back; its full ones can be found until they are handed out."""
        self.truncate(text, 0)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Return a layer's keys and values (2, H, S, D) of some blocks, until the next call."""
        out = self.scratch.resize_(0)  # which keeps its memory
        return torch.index_select(self.pool[layer], 2, blocks, out=out).flatten(2, 3)

    def grow(self, text: Text, n: int) -> None:
        """Count n tokens more of a text as read. A block that is full now can be found, or gives
        way to one that holds the same tokens after the same tokens."""
        first, text.n_read = text.n_read // self.size, text.n_read + n
        for index in range(first, text.n_read // self.size):
            at, block = text.start + index * self.size, text.table[index]
            tokens = tuple(text.ids[at : at + self.size])
            known = self.children[text.table[index - 1] if index else -1]
            found = known.setdefault(tokens, block)
            if found == block:
                self.listed[block] = known, tokens
            else:
                text.table[index] = self.take(found)
                self.release(block)


class Batch:
    """What a model takes as the cache of a pass over tokens of many texts, one after the other in a
    single row (1, T): no text is padded to another's length, and a shared block is read once.

    A pass that fails changes nothing: what it wrote lies behind the tokens that count as read.
    """

    def __init__(self, cache: PagedCache, texts: Sequence[Text], counts: Sequence[int]) -> None:
        """counts[i] tokens of texts[i] will be fed. Raises ValueError if a text lacks room."""
        self.cache, self.texts, self.counts, self.layers = cache, texts, counts, cache.pool
        device, size, fed, tables = cache.pool.device, cache.size, [], []
        for i, (text, n) in enumerate(zip(texts, counts, strict=True)):
            more, shared = cache.missing(text, n)
            if more or shared:
                own = f"{len(text.table)} blocks of {size} of its own: call room() first"
                raise ValueError(f"{n} tokens after {text.n_read} don't fit in {own}")
            fed += [(i, t) for t in range(text.n_read, text.n_read + n)]
            tables.append(text.table[: math.ceil((text.n_read + n) / size)])
        ids = [[texts[i].ids[texts[i].start + t] for i, t in fed]]  # (1, T)
        slots = [tables[i][t // size] * size + t % size for i, t in fed]  # one for each token
        blocks = sorted({block for table in tables for block in table})  # each is gathered once
        begins = torch.full((len(texts), cache.blocks), FAR)  # where a text has each block
        for i, table in enumerate(tables):
            begins[i, table] = torch.arange(len(table)) * size
        k_pos = (begins[:, blocks, None] + torch.arange(size)).flatten(1)  # (texts, S)
        rows, pos = torch.tensor(fed).T  # of each token, which text it is of and its position there
        mask = k_pos[rows] <= pos[:, None]  # (T, S)
        next_pos = pos - torch.arange(len(fed))  # the model adds 0, 1, ..., T - 1
        self.ids = torch.tensor(ids).to(device)
        self.slots = torch.tensor(slots).to(device)
        self.blocks = torch.tensor(blocks).to(device)
        self.mask = mask.to(device)
        self.next_pos = next_pos.to(device)

    def __len__(self) -> int:
        return max(text.n_read for text in self.texts)

    @torch.no_grad()
    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add a layer's keys and values (1, H, T, D) of the tokens at positions pos (T,). Return
        those of all slots (1, H, S, D) and the mask (T, S), which keeps the texts apart."""
        new = torch.cat([k, v]).nan_to_num(0, 0, 0)  # 0 times a neighbour's NaN would be NaN
        self.layers[layer].flatten(2, 3)[:, :, self.slots] = new  # (2, H, T, D)
        if len(self.texts) == 1 and not len(self):
            return k, v, None  # all keys are new
        kv = self.cache.gather(layer, self.blocks)  # (2, H, S, D)
        return kv[:1], kv[1:], self.mask

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read."""
        for text, n in zip(self.texts, self.counts, strict=True):
            self.cache.grow(text, n)


class Server:
    """Texts that wait, are read and are written. Every step is one pass of the model: over a chunk
    of the one text that is being read, or over the last token of all that are being written."""

    def __init__(
        self, model: nn.Module, cache: PagedCache, chunk: int = 64, most: int = MOST
    ) -> None:
        """chunk: tokens of a prompt in a pass at most; most: texts that are written at once. Masked
        or not, all their tokens meet in attention, whose cost is the square of their number."""
        if chunk < 1 or most < 1:
            raise ValueError(f"chunk {chunk} and most {most} must be at least 1")
        self.model, self.cache, self.chunk, self.most = model, cache, chunk, most
        self.texts: list[Text] = []  # that aren't complete, in order of arrival
        self.arrived = self.put_back = 0  # texts, and how often one had to give its blocks back
        self.has_read = False  # in the last step: reading and writing take turns

    @property
    def busy(self) -> bool:
        """Whether a text isn't complete."""
        return bool(self.texts)

    @property
    def waiting(self) -> list[Text]:
        """The texts without blocks."""
        return [text for text in self.texts if not text.table]

    @property
    def running(self) -> list[Text]:
        """The texts with blocks."""
        return [text for text in self.texts if text.table]

    @property
    def reading(self) -> Text | None:
        """The text that is being read: no other one is before its last token is left."""
        return next((text for text in self.running if text.unread > 1), None)

    @property
    def writing(self) -> list[Text]:
        """The texts that are being written, with one unread token each."""
        return [text for text in self.running if text.unread == 1]

    def check(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
    ) -> None:
        """Raise ValueError if a prompt is empty, has a token that the model doesn't know, or needs
        more blocks than there are, even alone; or if an option is out of range."""
        check_options(torch.tensor([ids]), max_new_tokens, temperature, top_k)
        vocabulary, size = self.model.config.vocab_size, self.cache.size
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens {min(ids)} to {max(ids)}: the model has {vocabulary}, from 0")
        need = math.ceil(min(len(ids) + max_new_tokens - 1, self.model.context) / size)
        if need > self.cache.blocks:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} more need {need} blocks of "
                f"{size}, there are {self.cache.blocks}"
            )

    def add(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        stop_id: int | tuple[int, ...] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> int:
        """Let a prompt wait, and return its number. Raises ValueError as check() does."""
        self.check(ids, max_new_tokens, temperature, top_k)
        generator = torch.Generator(self.cache.pool.device).manual_seed(seed)
        text = Text(
            self.arrived,
            [*ids],
            len(ids) + max_new_tokens,
            stop_id if isinstance(stop_id, tuple) else (stop_id,),
            temperature,
            top_k,
            generator,
            context_start(len(ids), self.model.context),
        )
        self.arrived += 1
        if max_new_tokens:
            self.texts.append(text)
        return text.number

    @torch.no_grad()
    def step(self) -> list[tuple[int, int]]:
        """Admit what fits, run one pass, and return the texts that it wrote to and the tokens."""
        while self.waiting and not self.reading and len(self.running) < self.most:
            if not self.admit():
                break
        if self.has_read and self.writing:
            self.has_read = False
        else:
            self.has_read = self.reading is not None
        texts = [self.reading] if self.has_read else self.make_room()
        if not texts:
            return []
        counts = [min(text.unread, self.chunk) for text in texts]  # 1 for those that are written
        batch = Batch(self.cache, texts, counts)
        logits = self.model(batch.ids, batch, last_only=self.has_read)[0]  # (texts, V)
        rows = zip(texts, logits[:, None], strict=True)
        return [self.write(text, row) for text, row in rows if not text.unread]

    def admit(self) -> bool:
        """Give the first waiting text the blocks that its tokens need, if one is left for each that
        is running; else return False."""
        text, spare = self.waiting[0], len(self.running)
        self.cache.share(text)
        if not self.cache.room(text, text.unread, spare):
            self.cache.drop(text)
        return bool(text.table)

    def make_room(self) -> list[Text]:
        """Make room for a token of each text that is being written, the oldest first; return them.
        If no block is free, the youngest of all gives its blocks back: it will be read again, with
        what it has written. That is never the oldest, which fits alone: some text always gets on."""
        for text in self.writing:
            while text.table and not self.cache.room(text, 1):
                self.cache.drop(self.running[-1])
                self.put_back += 1
        return self.writing

    def write(self, text: Text, logits: Tensor) -> tuple[int, int]:
        """Add a token to a text that has been read, by its logits (1, V); continue or retire it."""
        token = int(sample(logits, text.temperature, text.top_k, text.generator))
        text.ids.append(token)
        start = context_start(len(text.ids), self.model.context)
        if token in text.stop_ids or len(text.ids) == text.end:
            self.cache.drop(text)
            self.texts.remove(text)
        elif start > text.start:  # as generate() does: positions are baked into K, so read again
            self.cache.drop(text)
            text.start = start
        return text.number, token


def serve(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    blocks: int,
    size: int = 16,
    chunk: int = 64,
    samples: int = 1,
    seed: int = 0,
    **options: Any,
) -> Iterator[tuple[int, int]]:
    """Yield (text, token) as they come. Text i continues prompt i // samples, and draws with
    seed + i. Its tokens are those that generate() yields for it alone with that seed, up to what
    rounding does to a tie. Samples of one prompt share the blocks that hold it.
    options: stop_id (one or several), temperature and top_k, of all texts.
    Raises ValueError, at the first token, if a prompt can't be served, as Server.check() does."""
    server = Server(model, PagedCache(model, blocks, size), chunk)
    for ids in prompts:
        server.check(ids, max_new_tokens)
    for i in range(samples * len(prompts)):
        server.add(prompts[i // samples], max_new_tokens, seed=seed + i, **options)
        while len(server.texts) >= 2 * server.most:  # the others need not wait in memory
            yield from server.step()
    while server.busy:
        yield from server.step()


def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from studies import paging
    from support.cli import CommandLine, whole_number
    from support.files import read_text
    from support.printing import ends_of

    count = {"type": whole_number(1), "metavar": "N"}
    cli = CommandLine(__doc__, "python3 %(prog)s serve prompts.txt --blocks 40", NAMES)
    comparison = cli.add_action("run", "what blocks save", default=True)
    service = cli.add_action("serve", "continue each line of FILE")
    service.add_argument("file", metavar="FILE", help="a text file, one prompt per line")
    for action in (comparison, service):
        action.add_model_arguments()
        action.add_argument("--size", default=16, **count, help="tokens per block")
        action.add_argument("--chunk", default=64, **count, help="tokens of a prompt read per pass")
    comparison.add_length_argument(
        40, "tokens to write after every fourth prompt, fewer after the others"
    )
    comparison.add_argument(
        "--blocks",
        **count,
        help="blocks for all texts together; default: half of what they would use",
    )
    comparison.add_trace_argument()
    service.add_length_argument(40)
    service.add_argument(
        "--blocks", **count, help="blocks for all texts together; default: enough for all"
    )
    service.add_argument("--samples", default=1, **count, help="continue each line so many times")
    service.add_sampling_arguments()
    with cli.parse(argv) as args:
        if args.action == "serve":
            lines = [line for line in read_text(Path(args.file)).splitlines() if line.strip()]
            if not lines:
                raise ValueError(f"{args.file} has no line to continue")
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer, n, size = load_tokenizer(args.model), args.max_new_tokens, args.size
        if args.action == "run":
            return paging.demo(model, tokenizer, n, size, args.blocks, args.chunk, args.trace_file)
        prompts = [tokenizer.encode(line, allowed_special="all") for line in lines]
        samples = args.samples
        needs = [math.ceil(min(len(ids) + n, model.context) / size) for ids in prompts]
        blocks = args.blocks
        if blocks is None:  # enough for all
            blocks = sum(sorted(needs * min(samples, MOST))[-MOST:])
        written: dict[int, list[int]] = {}
        ends = ends_of(tokenizer)
        for i, token in serve(
            model,
            prompts,
            n,
            blocks=blocks,
            size=size,
            chunk=args.chunk,
            samples=samples,
            seed=args.seed,
            stop_id=ends,
            temperature=args.temperature,
            top_k=args.top_k,
        ):
            text = written.setdefault(i, [])
            if token not in ends:
                text.append(token)
            if token in ends or len(text) == n:
                print(f"[{i + 1}] {lines[i // samples]}{tokenizer.decode(text)}\n", flush=True)
                del written[i]


if __name__ == "__main__":
    main()
