"""Many texts at once: keys and values in blocks that any text may own, and a loop that admits,
writes and retires texts at every step. `paged.py` serves twelve prompts one at a time, as a padded
batch and in blocks; `paged.py serve FILE` continues every line of a file, once or with several samples.

A cache with room for the longest text wastes most of it on the others. Blocks of a few tokens are
handed out as texts grow, and each text has a table of its blocks. Texts that begin alike list the same
blocks; a text that writes to a shared block gets a copy of its own. If no block is free, the youngest
text gives its blocks back and is read again later. Every text gets the same tokens as if it were
served alone.

Shapes: T tokens fed, of all texts together; S slots of all their blocks; L layers, H heads, D head
size, N blocks, b tokens of a block.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention"; Yu et al. 2022, "Orca" (continuous batching); Agrawal et al. 2023, "SARATHI"
(prefill in chunks).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_kv_cache import check_options, context_start, keep_top_k, sample
from support.geometry import check_kinds, kv_heads, layer_kinds
from support.prefix import common_prefix_length

FAR = 1 << 40  # a position that comes after that of every query
MAX_RUNNING = 16  # the most texts that have blocks at once, by default


@dataclass(eq=False)
class Text:
    """The tokens of a text, and the blocks that hold their keys and values.

    The first n_read tokens from index context_start on have been read. Token number t of these is
    in slot t % b of block block_table[t // b].
    """

    number: int  # texts are numbered as they arrive
    ids: list[int]
    max_length: int  # with that many tokens the text is complete
    stop_ids: Collection[int] = ()
    temperature: float = 0.0
    top_k: int | None = None
    generator: torch.Generator | None = None  # its own: its draws don't depend on other texts
    context_start: int = 0  # earlier tokens have been forgotten: the context was full
    n_read: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def n_unread(self) -> int:
        """The number of tokens that have to be fed before the next one can be written."""
        return len(self.ids) - self.context_start - self.n_read


class PrefixEntry(NamedTuple):
    """The place of a block in PagedCache.children: the dict that lists it, and its key there."""

    siblings: dict[tuple[int, ...], int]
    tokens: tuple[int, ...]


def heads_in_blocks(config: Any) -> tuple[int, int]:
    """Return how many heads each layer keeps of a token, and their size. A latent is kept as two
    halves, like the key and value of one head. Raises ValueError if a layer keeps something else
    than the first."""
    kinds = layer_kinds(config)
    taken = ("latent",) if kinds[:1] == ("latent",) else ("full", "window")
    check_kinds(config, f"KV blocks of one shape hold {' and '.join(taken)} layers", taken)
    if "latent" in kinds:
        return 1, (config.kv_rank + config.rope_dim) // 2
    return kv_heads(config), config.head_dim


class PagedCache:
    """Keys and values of any number of texts, in N blocks of b tokens that are allocated once.

    ref_count[block] is the number of block tables that list a block; a block with 0 is free.
    children[parent] lists the full blocks that follow the block `parent`, by their tokens, so that
    a new text can find the blocks that hold its beginning. A parent stands for all tokens up to its
    end; -1 stands for the beginning of a text. A free block can be found until it is allocated
    again. Blocks that can't be found are allocated first, then those that have been free for
    longest.

    A block belongs to all layers. So those with a window keep all tokens, too, and the mask hides
    what the window lost. Raises ValueError if a layer keeps something else, or memory is short.
    """

    def __init__(self, model: nn.Module, n_blocks: int, block_size: int = 16) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"{n_blocks} blocks of {block_size} tokens: must be at least 1 of 1")
        config, weight = model.config, model.wte.weight
        self.n_blocks, self.block_size = n_blocks, block_size
        n_heads, head_size = heads_in_blocks(config)
        shape = (config.n_layer, 2, n_heads, n_blocks, block_size, head_size)
        try:
            self.pool = weight.new_zeros(shape)
        except RuntimeError as error:
            nbytes = math.prod(shape) * weight.element_size()
            raise ValueError(
                f"{n_blocks} blocks of {block_size} tokens take {nbytes:,} bytes, more than can be had"
            ) from error
        self.ref_count = [0] * n_blocks
        self.free_blocks = OrderedDict.fromkeys(range(n_blocks))  # in the order of allocation
        self.children: list[dict[tuple[int, ...], int]] = [{} for _ in range(n_blocks + 1)]
        self.prefix_entries: list[PrefixEntry | None] = [None] * n_blocks
        self.gather_buffer = self.pool.new_empty(0)  # allocating memory in every layer is slow
        kinds = enumerate(layer_kinds(config))
        self.window_layers = {layer for layer, kind in kinds if kind == "window"}
        self.window = config.window if self.window_layers else None  # tokens

    def allocate(self) -> int:
        """Take the next free block for a block table, and return its number."""
        block = next(iter(self.free_blocks))
        self.evict(block)
        self.add_reference(block)
        return block

    def add_reference(self, block: int) -> None:
        """Note that one more block table lists a block."""
        self.free_blocks.pop(block, None)
        self.ref_count[block] += 1

    def remove_reference(self, block: int) -> None:
        """Note that one block table fewer lists a block. A block that no table lists is free."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.free_blocks[block] = None
            if not self.prefix_entries[block]:  # no text can find it: it is allocated next
                self.free_blocks.move_to_end(block, last=False)

    def evict(self, block: int) -> None:
        """Make sure that no text can find a block, or those that follow it: its tokens are about to
        change."""
        evicted = [block] if self.prefix_entries[block] else []
        while evicted:
            block = evicted.pop(0)
            siblings, tokens = self.prefix_entries[block]
            del siblings[tokens]
            # A text that lists a block lists all blocks before it, so the blocks that follow a free
            # block are free.
            evicted += self.children[block].values()
            self.prefix_entries[block] = None
            if block in self.free_blocks:
                self.free_blocks.move_to_end(block, last=False)

    def reuse_prefix(self, text: Text) -> None:
        """Give a text without blocks the cached blocks that hold its first tokens; the last of
        these blocks may be used in part. The text's last token stays unread, since only a forward
        pass gives logits."""
        while text.n_read % self.block_size == 0:
            ids = tuple(text.ids[text.context_start + text.n_read : -1][: self.block_size])
            children = self.children[text.block_table[-1] if text.block_table else -1]
            best = max(children, key=lambda tokens: common_prefix_length(tokens, ids), default=())
            n_shared = common_prefix_length(best, ids)
            if n_shared == 0:
                return
            self.add_reference(children[best])
            text.block_table.append(children[best])
            text.n_read += n_shared

    def blocks_needed(self, text: Text, n: int) -> tuple[int, bool]:
        """Return how many more blocks a text needs for n more tokens, and whether the block that
        they would begin in is shared with other texts."""
        index, n_used = divmod(text.n_read, self.block_size)
        is_shared = n_used > 0 and self.ref_count[text.block_table[index]] > 1
        n_blocks = math.ceil((text.n_read + n) / self.block_size)
        return max(0, n_blocks - len(text.block_table)), is_shared

    def allocate_slots(self, text: Text, n: int, n_reserved: int = 0) -> bool:
        """Give a text the blocks for n more tokens, and a copy of its last block if that is shared.
        Return False, and change nothing, if fewer than n_reserved blocks would stay free."""
        n_new, is_shared = self.blocks_needed(text, n)
        if n_new + is_shared + n_reserved > len(self.free_blocks):
            return False
        index, n_used = divmod(text.n_read, self.block_size)
        if is_shared:  # copy on write
            shared, copy = text.block_table[index], self.allocate()
            self.pool[..., copy, :n_used, :] = self.pool[..., shared, :n_used, :]
            text.block_table[index] = copy
            self.remove_reference(shared)
        elif n_used:
            self.evict(text.block_table[index])
        text.block_table += [self.allocate() for _ in range(n_new)]
        return True

    def truncate(self, text: Text, n: int) -> None:
        """Keep the first n tokens that were read. Raises ValueError if there are fewer."""
        if not 0 <= n <= text.n_read:
            raise ValueError(f"can't keep {n} tokens of {text.n_read}")
        n_kept = math.ceil(n / self.block_size)
        for block in reversed(text.block_table[n_kept:]):  # an end is useless without its beginning
            self.remove_reference(block)
        del text.block_table[n_kept:]
        text.n_read = n

    def free(self, text: Text) -> None:
        """Remove all blocks from a text's table; full blocks can be found until they are allocated
        again."""
        self.truncate(text, 0)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Return a layer's keys and values (2, H, S, D) in some blocks. The next call overwrites
        them."""
        out = self.gather_buffer.resize_(0)  # which keeps its memory
        return torch.index_select(self.pool[layer], 2, blocks, out=out).flatten(2, 3)

    def commit(self, text: Text, n: int) -> None:
        """Count n more tokens of a text as read. Other texts can now find the blocks that have
        become full. If another block holds the same tokens after the same prefix, it replaces the
        new one in the table."""
        first_block = text.n_read // self.block_size
        text.n_read += n
        for index in range(first_block, text.n_read // self.block_size):
            start, block = text.context_start + index * self.block_size, text.block_table[index]
            tokens = tuple(text.ids[start : start + self.block_size])
            siblings = self.children[text.block_table[index - 1] if index else -1]
            equal_block = siblings.setdefault(tokens, block)
            if equal_block == block:
                self.prefix_entries[block] = PrefixEntry(siblings, tokens)
            else:
                self.add_reference(equal_block)
                text.block_table[index] = equal_block
                self.remove_reference(block)


class Batch:
    """The cache for one pass over tokens of many texts, which follow one another in a single row
    (1, T): no text is padded to another's length, and a shared block is read once. Slots, blocks and
    mask are the same in all layers, and made once.

    A failed pass changes nothing: what it wrote lies behind the tokens that count as read. A pass
    whose keys or values aren't finite fails with a ValueError.
    """

    def __init__(self, cache: PagedCache, texts: Sequence[Text], counts: Sequence[int]) -> None:
        """counts[i]: the number of tokens of texts[i] that will be fed. Raises ValueError if a text
        lacks blocks for them."""
        for text, n in zip(texts, counts, strict=True):
            check_slots(cache, text, n)
        self.cache, self.texts, self.counts, self.layers = cache, texts, counts, cache.pool
        device, size = cache.pool.device, cache.block_size
        # For each token that is fed: the row of its text, and its position in that text.
        rows, positions = [], []
        for row, (text, n) in enumerate(zip(texts, counts, strict=True)):
            rows += [row] * n
            positions += range(text.n_read, text.n_read + n)
        fed = [*zip(rows, positions, strict=True)]
        ids = [texts[row].ids[texts[row].context_start + t] for row, t in fed]
        slots = [texts[row].block_table[t // size] * size + t % size for row, t in fed]
        tables = [
            text.block_table[: math.ceil((text.n_read + n) / size)]
            for text, n in zip(texts, counts, strict=True)
        ]
        blocks = sorted({block for table in tables for block in table})  # each is gathered once
        pos = torch.tensor(positions)
        of_slots = slot_positions(tables, blocks, cache)[rows]
        mask = of_slots <= pos[:, None]  # (T, S)
        self.ids = torch.tensor([ids]).to(device)  # (1, T)
        self.slots = torch.tensor(slots).to(device)  # (T,)
        self.blocks = torch.tensor(blocks).to(device)
        self.pos = pos.to(device)
        # Added to the scores: a mask of True and False would be converted to that in every layer.
        self.mask = cache.pool.new_zeros(mask.shape).masked_fill_(~mask.to(device), -math.inf)
        if cache.window is not None:
            lost = of_slots <= pos[:, None] - cache.window
            self.window_mask = (mask & ~lost).to(device)
        self.largest: list[Tensor] = []  # of each layer's new keys and values

    def __len__(self) -> int:
        return max(text.n_read for text in self.texts)

    def positions(self, T: int) -> Tensor:
        """Return the position of each of the T tokens in its text (T,)."""
        return self.pos

    @torch.no_grad()
    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add a layer's keys and values (1, H, T, D) of the tokens at positions pos (T,). Return
        those of all slots (1, H, S, D) and the mask (T, S), which keeps the texts apart: it is added
        to the scores."""
        new = torch.cat([k, v])  # (2, H, T, D)
        self.largest.append(new.abs().amax())  # NaN if one of them is
        new = new.nan_to_num(0, 0, 0)  # 0 times what isn't finite would be NaN, in other texts too
        self.layers[layer].flatten(2, 3).index_copy_(2, self.slots, new)
        if layer in self.cache.window_layers:
            k, v = self.cache.gather(layer, self.blocks).split(1)
            return k, v, self.window_mask
        if len(self.texts) == 1 and not len(self):
            return k, v, None  # all keys are new
        kv = self.cache.gather(layer, self.blocks)  # (2, H, S, D)
        return kv[:1], kv[1:], self.mask

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read. Raises ValueError if a key or value wasn't finite."""
        if not torch.stack(self.largest).isfinite().all():
            dtype = self.layers.dtype
            raise ValueError(f"keys and values aren't finite: activations overflow (in {dtype})")
        for text, n in zip(self.texts, self.counts, strict=True):
            self.cache.commit(text, n)


def check_slots(cache: PagedCache, text: Text, n: int) -> None:
    """Raise ValueError if a text's own blocks have no room for n more tokens."""
    n_new, is_shared = cache.blocks_needed(text, n)
    if n_new or is_shared:
        own = f"{len(text.block_table)} blocks of {cache.block_size} of its own"
        raise ValueError(
            f"{n} tokens after {text.n_read} don't fit in {own}: allocate_slots() first"
        )


def slot_positions(tables: list[list[int]], blocks: list[int], cache: PagedCache) -> Tensor:
    """Return the position (texts, S) that each slot of some blocks has in each text: FAR in a text
    whose table doesn't list the block."""
    begins = torch.full((len(tables), cache.n_blocks), FAR)  # where a block begins in a text
    rows, listed, indices = [], [], []
    for row, table in enumerate(tables):
        rows += [row] * len(table)
        listed += table
        indices += range(len(table))
    begins[rows, listed] = torch.tensor(indices) * cache.block_size
    return (begins[:, blocks, None] + torch.arange(cache.block_size)).flatten(1)


def choose(logits: Tensor, texts: Sequence[Text]) -> list[int]:
    """Return the next token of each text, given its logits (texts, V): that which sample() chooses
    for it alone. All are fetched from the device together. Raises ValueError as sample() does."""
    chosen = sample(logits, 0.0, None, None)[:, 0]
    rows = [row for row, text in enumerate(texts) if text.temperature > 0]
    if rows:
        sampled = [texts[row] for row in rows]
        logits = logits[rows].float()
        logits = logits - logits.amax(dim=1, keepdim=True)
        noise = torch.empty_like(logits)
        for i, text in enumerate(sampled):
            if text.top_k is not None:
                logits[i : i + 1] = keep_top_k(logits[i : i + 1], text.top_k)
            noise[i].exponential_(generator=text.generator)
        temperatures = torch.tensor([[text.temperature] for text in sampled]).to(logits)
        # So torch.multinomial() draws from a row, but it waits for the device at each row.
        chosen[rows] = ((logits / temperatures).softmax(dim=1) / noise).argmax(dim=1)
    return chosen.tolist()


class Server:
    """Texts that wait, are prefilled and are decoded. Every step is one pass of the model: over a
    chunk of the one text that is being prefilled, or over the last token of all texts that are
    being decoded."""

    def __init__(
        self,
        model: nn.Module,
        cache: PagedCache,
        chunk_size: int = 64,
        max_running: int = MAX_RUNNING,
    ) -> None:
        """chunk_size: the most tokens of a prompt in a pass; max_running: the most texts that have
        blocks at once. Attention is computed between all tokens in a pass, masked or not, so its
        cost grows with the square of the number of texts."""
        if chunk_size < 1 or max_running < 1:
            raise ValueError(
                f"chunk_size {chunk_size} and max_running {max_running} must be at least 1"
            )
        self.model, self.cache = model, cache
        self.chunk_size, self.max_running = chunk_size, max_running
        self.texts: list[Text] = []  # those that aren't complete, in order of arrival
        self.n_arrived = 0  # texts so far
        self.n_preempted = 0  # times that a text had to give its blocks back
        self.prefilled_last = False  # whether the last step prefilled: it takes turns with decoding

    @property
    def busy(self) -> bool:
        """Whether some text isn't complete."""
        return bool(self.texts)

    @property
    def waiting(self) -> list[Text]:
        """The texts without blocks."""
        return [text for text in self.texts if not text.block_table]

    @property
    def running(self) -> list[Text]:
        """The texts with blocks."""
        return [text for text in self.texts if text.block_table]

    @property
    def prefilling(self) -> Text | None:
        """The text that is being prefilled, or None. Only one text is prefilled at a time."""
        return next((text for text in self.running if text.n_unread > 1), None)

    @property
    def decoding(self) -> list[Text]:
        """The texts that are being decoded, with one unread token each."""
        return [text for text in self.running if text.n_unread == 1]

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
        vocabulary, size = self.model.config.vocab_size, self.cache.block_size
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens {min(ids)} to {max(ids)}: the model has {vocabulary}, from 0")
        n_blocks = math.ceil(min(len(ids) + max_new_tokens - 1, self.model.context) / size)
        if n_blocks > self.cache.n_blocks:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} more need {n_blocks} blocks of "
                f"{size}, there are {self.cache.n_blocks}"
            )

    def add(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> int:
        """Add a prompt to the waiting texts, and return its number. Raises ValueError as check()
        does."""
        self.check(ids, max_new_tokens, temperature, top_k)
        generator = torch.Generator(self.cache.pool.device).manual_seed(seed)
        text = Text(
            self.n_arrived,
            [*ids],
            len(ids) + max_new_tokens,
            stop_ids,
            temperature,
            top_k,
            generator,
            context_start(len(ids), self.model.context),
        )
        self.n_arrived += 1
        if max_new_tokens:
            self.texts.append(text)
        return text.number

    @torch.no_grad()
    def step(self) -> list[tuple[int, int]]:
        """Admit the texts that fit, run one pass, and return (text number, token) for each token
        that it wrote. Raises ValueError, and adds no token to any text, if keys, values or logits
        aren't finite."""
        while self.waiting and not self.prefilling and len(self.running) < self.max_running:
            if not self.admit():
                break
        if self.prefilled_last and self.decoding:
            self.prefilled_last = False
        else:
            self.prefilled_last = self.prefilling is not None
        texts = [self.prefilling] if self.prefilled_last else self.allocate_for_decoding()
        if not texts:
            return []
        counts = [min(text.n_unread, self.chunk_size) for text in texts]  # 1 when decoding
        batch = Batch(self.cache, texts, counts)
        logits = self.model(batch.ids, batch, last_only=self.prefilled_last)[0]  # (texts, V)
        if texts[0].n_unread:  # the prompt that is being prefilled has another chunk
            return []
        try:
            chosen = choose(logits, texts)
        except ValueError:
            for text in texts:
                self.cache.free(text)
            raise
        return [self.write_token(*pair) for pair in zip(texts, chosen, strict=True)]

    def admit(self) -> bool:
        """Give the first waiting text the blocks that its tokens need, if one block per running
        text stays free; return False otherwise."""
        text, n_reserved = self.waiting[0], len(self.running)
        self.cache.reuse_prefix(text)  # with blocks, the text counts as running
        if self.cache.allocate_slots(text, text.n_unread, n_reserved):
            return True
        self.cache.free(text)
        return False

    def allocate_for_decoding(self) -> list[Text]:
        """Make room for one more token in each text that is being decoded, the oldest first; return
        these texts. If no block is free, the youngest text is preempted. The oldest text fits alone
        and is never preempted, so some text always makes progress."""
        for text in self.decoding:
            while text.block_table and not self.cache.allocate_slots(text, 1):
                self.preempt()
        return self.decoding

    def preempt(self) -> None:
        """Take the youngest running text's blocks back. It will be read again later, with the
        tokens that it has written."""
        self.cache.free(self.running[-1])
        self.n_preempted += 1

    def write_token(self, text: Text, token: int) -> tuple[int, int]:
        """Append a token to a text; retire the text if it is complete. Return the text's number and
        the token."""
        text.ids.append(token)
        start = context_start(len(text.ids), self.model.context)
        if token in text.stop_ids or len(text.ids) == text.max_length:
            self.cache.free(text)
            self.texts.remove(text)
        elif start > text.context_start:
            self.cache.free(text)  # as generate() does: positions are baked into K, so read again
            text.context_start = start
        return text.number, token


def serve(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    n_blocks: int,
    block_size: int = 16,
    chunk_size: int = 64,
    samples: int = 1,
    seed: int = 0,
    **options: Any,
) -> Iterator[tuple[int, int]]:
    """Yield (text number, token) as soon as each token is known.

    Text i continues prompt i // samples and is sampled with the seed `seed + i`. Its tokens are
    those that generate() yields for it alone with that seed, up to ties that rounding decides.
    Samples of one prompt share the blocks that hold it.
    options: stop_ids, temperature and top_k, the same for all texts.
    Raises ValueError, at the first token, if a prompt can't be served, as Server.check() does.
    """
    server = Server(model, PagedCache(model, n_blocks, block_size), chunk_size)
    for ids in prompts:
        server.check(ids, max_new_tokens)
    for i in range(samples * len(prompts)):
        server.add(prompts[i // samples], max_new_tokens, seed=seed + i, **options)
        while len(server.texts) >= 2 * server.max_running:  # the others are added later
            yield from server.step()
    while server.busy:
        yield from server.step()


def main(argv: list[str] | None = None) -> None:
    from demos import serving
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from support.cli import ByModel, CommandLine, whole_number
    from support.files import read_text
    from support.printing import end_tokens_of

    count = {"type": whole_number(1), "metavar": "N"}
    cli = CommandLine(__doc__, "python3 %(prog)s serve prompts.txt --blocks 40")
    comparison, service = cli.add_actions(
        "run", run="what blocks save", serve="continue each line of FILE"
    )
    service.add_argument("file", metavar="FILE", help="a text file, one prompt per line")
    for action in (comparison, service):
        action.add_model_options(NAMES)
        action.add_argument("--size", default=16, **count, help="tokens per block")
        action.add_argument("--chunk", default=64, **count, help="tokens of a prompt read per pass")
    comparison.add_options(
        "--max-new-tokens",
        default=ByModel(40, 24),
        help="tokens to write after every fourth prompt, fewer after the others",
    )
    comparison.add_argument(
        "--blocks",
        **count,
        help="blocks for all texts together; default: half of what they would use",
    )
    comparison.add_options("--trace")
    service.add_options("--max-new-tokens", default=40)
    service.add_argument(
        "--blocks", **count, help="blocks for all texts together; default: enough for all"
    )
    service.add_argument("--samples", default=1, **count, help="continuations of each line")
    service.add_options("--temperature", "--top-k")
    with cli.parse(argv) as args:
        if args.action == "serve":
            lines = [line for line in read_text(Path(args.file)).splitlines() if line.strip()]
            if not lines:
                raise ValueError(f"{args.file} has no line to continue")
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer, n, size = load_tokenizer(args.model), args.max_new_tokens, args.size
        if args.action == "run":
            return serving.demo(
                model, tokenizer, args.model, n, size, args.blocks, args.chunk, args.trace
            )
        prompts = [tokenizer.encode(line, allowed_special="all") for line in lines]
        samples = args.samples
        needs = [math.ceil(min(len(ids) + n, model.context) / size) for ids in prompts]
        blocks = args.blocks
        if blocks is None:  # enough for all
            blocks = sum(sorted(needs * min(samples, MAX_RUNNING))[-MAX_RUNNING:])
        written: dict[int, list[int]] = {}
        ends = end_tokens_of(tokenizer)
        for i, token in serve(
            model,
            prompts,
            n,
            n_blocks=blocks,
            block_size=size,
            chunk_size=args.chunk,
            samples=samples,
            seed=args.seed,
            stop_ids=ends,
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
