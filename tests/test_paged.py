"""paged.py: every text's tokens are those of that text alone, and no block is lost, leaked or overwritten."""

import json
import math
import random
import re
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt_kv_cache import GPTConfig, generate
from paged import Batch, PagedCache, Server, Text, main, serve
from tests.helpers import of_kind, run
from tests.test_equivalence import assert_close, failing, model_of, parts_of

pytestmark = pytest.mark.usefixtures("device")  # every test here, on each device
CONFIG = GPTConfig(vocab_size=50, n_ctx=24, n_layer=2, n_head=2, n_embd=20, head_dim=5)
SEEDS = range(6)


@pytest.fixture
def model(kind: str) -> nn.Module:
    return model_of(of_kind(kind, CONFIG))


def alone(
    model: nn.Module,
    ids: list[int],
    n: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    draws, written = torch.Generator().manual_seed(seed), []
    options = {"temperature": temperature, "top_k": top_k, "generator": draws}
    for token in generate(model, torch.tensor([ids]), n, **options):
        written.append(int(token))
        if written[-1] in stop_ids:
            break
    return written


def check_counts(cache: PagedCache, texts: list[Text]) -> None:
    """Every count is that of the tables, what isn't counted is free, and what can be found is as long as a block."""
    listed = [block for text in texts for block in text.block_table]
    assert cache.ref_count == [listed.count(block) for block in range(cache.n_blocks)]
    assert {*cache.free_blocks} == {*range(cache.n_blocks)} - {*listed}
    with_entry = set()
    for block, entry in enumerate(cache.prefix_entries):
        if entry is not None:
            with_entry.add(block)
            assert len(entry.tokens) == cache.block_size and entry.siblings[entry.tokens] == block
    reachable = [*cache.children[-1].values()]
    for parent in reachable:
        reachable += cache.children[parent].values()
        assert len(reachable) == len({*reachable}), "a block is found in two places"
    assert {*reachable} == with_entry


def read(
    model: nn.Module, cache: PagedCache, texts: list[Text], *counts: int
) -> tuple[Tensor, ...]:
    """Return the logits (n, V) of the next n tokens of each text, for as many counts or one for all."""
    counts = counts if len(counts) == len(texts) else counts * len(texts)
    assert all(cache.allocate_slots(text, n) for text, n in zip(texts, counts, strict=True))
    batch = Batch(cache, texts, counts)
    return model(batch.ids, batch)[0].split(counts)


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def new(ids: list[int], number: int = 0) -> Text:
    return Text(number, [*ids], 24)


def fork(cache: PagedCache, text: Text, number: int) -> Text:
    """Another text with the same tokens, in the same blocks."""
    table = text.block_table[: -(-text.n_read // cache.block_size)]
    for block in table:
        cache.add_reference(block)
    return replace(text, number=number, ids=[*text.ids], block_table=table)


def change_the_rest(text: Text, rng: random.Random) -> None:
    """Let a text go on with other tokens than those that would be read next."""
    text.ids[text.n_read :] = [rng.randrange(50) for _ in range(24 - text.n_read)]


# --- The cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_each_text_alone_whatever_becomes_of_blocks(
    model: nn.Module, seed: int
) -> None:
    """Texts are read together in random chunks, forked, truncated, dropped and found again; passes
    fail in between. The logits must be those of each text alone at every position."""
    rng, parts = random.Random(seed), parts_of(model)
    cache = PagedCache(model, rng.choice([12, 20, 40]), rng.choice([1, 2, 3, 4, 7]))
    heads, texts = [tokens(24, seed), tokens(24, seed + 1)], []
    for number in range(60):
        action = rng.choice(["new", "read", "read", "read", "fail", "truncate", "fork", "drop"])
        if action == "new" or not texts:
            head = rng.choice(heads)[: rng.randint(0, 23)]
            text = new([*head, *(rng.randrange(50) for _ in range(24 - len(head)))], number)
            cache.reuse_prefix(text)
            texts.append(text)
        elif action in ("read", "fail"):
            chosen, counts = [], []
            for text in rng.sample(texts, rng.randint(1, len(texts))):
                n = min(rng.choice([1, 1, rng.randint(1, 9)]), 24 - text.n_read)
                if n and cache.allocate_slots(text, n):
                    chosen.append(text)
                    counts.append(n)
            if chosen and action == "read":
                for got, text in zip(read(model, cache, chosen, *counts), chosen, strict=True):
                    expected = model(torch.tensor([text.ids[: text.n_read]]))[0, -len(got) :]
                    assert_close(got, expected, torch.float32)
            elif chosen:
                lengths = [text.n_read for text in chosen]
                with failing(model, rng.choice(parts), nan=rng.random() < 0.5):
                    read(model, cache, chosen, *counts)
                assert [text.n_read for text in chosen] == lengths
        elif action == "truncate":
            text = rng.choice(texts)
            cache.truncate(text, rng.randint(0, text.n_read))
            change_the_rest(text, rng)
        elif action == "fork":
            texts.append(fork(cache, rng.choice(texts), number))
            change_the_rest(texts[-1], rng)
        else:
            cache.free(texts.pop(rng.randrange(len(texts))))
        check_counts(cache, texts)


def test_half_precision_is_that_of_the_model(model: nn.Module) -> None:
    model = model.to(torch.bfloat16)
    cache, a = PagedCache(model, 9, 4), new(tokens(9, 1))
    for n in (3, 5, 1):
        (got,) = read(model, cache, [a], n)
    assert cache.pool.dtype == torch.bfloat16
    assert_close(got, model(torch.tensor([a.ids]))[0, 8:], torch.bfloat16)


def shared(cache: PagedCache, ids: list[int]) -> Text:
    """A new text, with what the cache finds of it."""
    text = new(ids)
    cache.reuse_prefix(text)
    return text


def test_a_prefix_is_found_by_its_tokens_also_when_nobody_owns_it_any_more(
    model: nn.Module,
) -> None:
    cache, a = PagedCache(model, 8, 4), new(tokens(11, 1))
    read(model, cache, [a], 11)
    table = [*a.block_table]
    cache.free(a)
    assert len(cache.free_blocks) == 8
    b = shared(cache, [*a.ids[:10], 7])
    assert b.block_table == table[:2] and b.n_read == 8, (
        "the third block wasn't full: it can't be found"
    )
    cache.free(b)
    c = shared(cache, a.ids[:8])
    assert c.n_read == 7 and c.block_table == table[:2], (
        "a token stays unread, to compute logits from"
    )
    assert shared(cache, [*a.ids[:6], *tokens(6, 2)]).n_read == 6, "a block is shared in part"
    for ids in ([a.ids[0] ^ 1, *a.ids[1:]], a.ids[4:]):  # the second block's, at the beginning
        assert shared(cache, ids).block_table == []


def test_the_end_of_a_text_is_handed_out_before_its_beginning(model: nn.Module) -> None:
    cache, a = PagedCache(model, 3, 4), new(tokens(13, 1))
    read(model, cache, [a], 12)
    cache.free(a)
    b = new(tokens(4, 2))
    read(model, cache, [b], 4)
    assert shared(cache, a.ids).n_read == 8


def test_overflow_fails_a_pass_and_leaves_nothing_in_blocks(model: nn.Module) -> None:
    """A mask alone keeps no text from another's overflow: 0 times NaN is NaN."""
    cache, a, b = PagedCache(model, 4, 4), new(tokens(12, 1)), new(tokens(12, 2), 1)
    read(model, cache, [b], 1)

    def overflow(module: torch.nn.Module, args: object, out: Tensor) -> Tensor:
        """Most keys and values of the first token are infinite."""
        return torch.cat([out[:, :1] * torch.inf, out[:, 1:]], 1)

    for n in (3, 1, 5):
        hooks = [block.attn.c_attn.register_forward_hook(overflow) for block in model.h]
        with pytest.raises(
            ValueError, match=r"keys and values aren't finite: .* \(in torch.float32\)"
        ):
            read(model, cache, [a, b], n, 1)
        for hook in hooks:
            hook.remove()
        assert (a.n_read, b.n_read) == (0, 1)
    cache.free(a)
    (got,) = read(model, cache, [b], 6)  # in blocks that were a's
    assert_close(got, model(torch.tensor([b.ids[:7]]))[0, -6:], torch.float32)


def test_logits_that_are_not_finite_add_no_token_to_any_text(model: nn.Module) -> None:
    server, written = Server(model, PagedCache(model, 9, 4)), [[], []]
    for i in range(2):
        server.add(tokens(5, i), 8)

    def overflow(module: nn.Module, args: object, logits: Tensor) -> Tensor:
        return logits.index_fill(1, torch.tensor([logits.size(1) - 1]), math.nan)  # the last text's

    while server.busy:
        if len(written[1]) == 3:  # the server goes on failing, and then goes on
            hook = model.register_forward_hook(overflow)
            for _ in range(3):
                with pytest.raises(ValueError, match="logits aren't finite"):
                    server.step()
            hook.remove()
        for number, token in server.step():
            written[number].append(token)
    assert written == [alone(model, tokens(5, i), 8) for i in range(2)]


@pytest.mark.parametrize("forked", [False, True])
def test_room_that_is_not_there_changes_nothing(model: nn.Module, forked: bool) -> None:
    cache, a = PagedCache(model, 3, 4), new(tokens(20, 1))
    read(model, cache, [a], 10)
    texts = [a, fork(cache, a, 1)] if forked else [a]

    def state() -> tuple:
        tables = [[*text.block_table] for text in texts]
        return tables, [*cache.ref_count], [*cache.free_blocks], cache.pool.tolist(), a.n_read

    before, n = state(), 1 if forked else 3
    assert not cache.allocate_slots(texts[-1], n) and not cache.allocate_slots(a, 3, n_reserved=1)
    with pytest.raises(ValueError, match=f"{n} tokens after 10 .* blocks of 4"):
        Batch(cache, texts, [n] * len(texts))
    with pytest.raises(ValueError, match="11 tokens of 10"):
        cache.truncate(a, 11)
    assert state() == before


# --- The loop -----------------------------------------------------------------------------------


def test_a_text_that_finds_its_beginning_may_have_all_blocks(model: nn.Module) -> None:
    server = Server(model, PagedCache(model, 3, 4))
    for _ in range(2):
        server.add(tokens(12, 1), 1)
        server.step()
        assert not server.busy


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_those_of_each_text_alone(model: nn.Module, seed: int) -> None:
    """Prompts of random lengths, limits, stop tokens, temperatures and seeds, some with common beginnings,
    arrive at random and get few blocks."""
    rng, size = random.Random(seed), random.Random(seed + 1).choice([1, 2, 3, 4, 5, 8, 16])
    least, heads = -(-24 // size), [tokens(rng.randint(1, 20), seed + i) for i in range(2)]
    prompts = []
    for _ in range(rng.randint(1, 8)):
        head = rng.choice([[], *heads])
        ids = head[: rng.randint(0, len(head))]
        ids = [*ids, *(rng.randrange(50) for _ in range(rng.randint(0, 12)))]
        again = rng.random() < 0.2 and prompts
        ids = prompts[-1][0] if again else ids or [3]
        sampling = rng.choice([0.0, 0.7, 2.0]), rng.choice([None, 1, 5]), rng.randrange(3)
        stops = {rng.randrange(50) for _ in range(rng.randrange(3))}
        prompts.append((ids, rng.randint(0, 30), stops, *sampling))
    cache = PagedCache(model, rng.choice([least, least + 1, 2 * least, 5 * least]), size)
    server = Server(model, cache, rng.choice([1, 2, 3, 7, 64]), rng.choice([1, 2, 4, 64]))
    written, coming, parts = [], [*prompts], parts_of(model)
    while coming or server.busy:
        while coming and (rng.random() < 0.3 or not server.busy):
            assert server.add(*coming.pop(0)) == len(written)
            written.append([])
        if server.busy and rng.random() < 0.1:
            with failing(model, rng.choice(parts), nan=rng.random() < 0.5):
                while server.step() == [] or server.busy:
                    pass
        for number, token in server.step():
            written[number].append(token)
        check_counts(cache, server.running)
    assert written == [alone(model, *prompt) for prompt in prompts]


def test_without_a_free_block_the_youngest_is_read_again_later(model: nn.Module) -> None:
    server, complete = Server(model, PagedCache(model, 6, 4)), []
    prompts = [tokens(5, i) for i in range(4)]
    for ids in prompts:
        server.add(ids, 15)
    written: list[list[int]] = [[], [], [], []]
    while server.busy:
        oldest = server.texts[0]
        for number, token in server.step():
            written[number].append(token)
            if len(written[number]) == 15:
                complete.append(number)
        assert oldest.block_table or oldest.number in complete, "the oldest is never preempted"
        assert all(a.number < b.number for a, b in pairwise(server.waiting))
    assert server.n_preempted > 0 and complete == sorted(complete)
    assert written == [alone(model, ids, 15) for ids in prompts]


@pytest.fixture
def fed(model: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of the ids that the model reads."""
    shapes: list[tuple[int, ...]] = []
    model.wte.register_forward_hook(lambda _, args, out: shapes.append(tuple(args[0].shape)))
    return shapes


def test_a_long_prompt_holds_up_the_others_by_one_chunk(model: nn.Module, fed: list) -> None:
    server = Server(model, PagedCache(model, 40, 4), chunk_size=5)
    server.add([1], 12)
    server.add(tokens(20, 1), 1)
    for _ in range(8):
        server.step()
    assert fed == [(1, 5), (1, 1)] * 4


def test_samples_of_a_prompt_are_those_of_each_seed_alone_and_share_its_blocks(
    model: nn.Module, fed: list
) -> None:
    prompts = [tokens(9, 1), tokens(4, 2)]
    found: list[list[int]] = [[] for _ in range(6)]
    options = {"n_blocks": 30, "block_size": 4, "temperature": 1.5, "top_k": 20}
    for number, token in serve(model, prompts, 8, samples=3, seed=40, **options):
        found[number].append(token)
    # of a prompt the other samples read the last token only
    assert sum(math.prod(shape) for shape in fed) == 9 + 4 + 4 * 1 + 6 * 7
    how = [(prompts[i // 3], 8, (), 1.5, 20, 40 + i) for i in range(6)]
    assert found == [alone(model, *one) for one in how] and len({*map(tuple, found)}) == 6


NEVER = {  # what is said of a prompt and a limit
    "20 tokens and 9 more need 6 blocks of 4, there are 5": ([1] * 20, 9),
    "1 to 50.*50": ([1, 50], 3),
    "-1 to -1.*50": ([-1], 3),
    "at least 1": ([], 3),
}


@pytest.mark.parametrize("said", NEVER)
def test_what_can_never_be_served_is_refused_at_once(model: nn.Module, said: str) -> None:
    ids, limit = NEVER[said]
    server = Server(model, PagedCache(model, 5, 4))
    server.add([1, 2], 3)
    with pytest.raises(ValueError, match=said):
        server.add(ids, limit)
    assert server.n_arrived == 1 and len(server.waiting) == 1
    with pytest.raises(ValueError, match=said):
        next(serve(model, [[1, 2], ids], limit, n_blocks=5, block_size=4))


def test_sizes_below_one_and_pools_beyond_memory_are_refused(model: nn.Module) -> None:
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match=f"{blocks} blocks of {size}"):
            PagedCache(model, blocks, size)
    with pytest.raises(ValueError, match="chunk_size 0 and max_running 5"):
        Server(model, PagedCache(model, 1, 1), 0, 5)
    with pytest.raises(ValueError, match="2000000000 blocks of 16 tokens take"):
        PagedCache(model, 2 * 10**9, 16)


@pytest.mark.slow
def test_a_bare_run_shows_the_same_tokens_and_when_each_text_is_complete(tmp_path: Path) -> None:
    page = tmp_path / "blocks.html"
    ran = run(main, "--max-new-tokens", 16, "--chunk", 256, "--trace", page)
    assert ran.out.count("yes\n") == 4  # one at a time, a padded batch, blocks for all, few blocks
    data = json.loads(re.search(r"const data = (.*);\n", page.read_text()).group(1))
    ends = [who for step in data["steps"] for who in step["events"].get("complete", [])]
    assert sorted(ends) == [*range(12)]
