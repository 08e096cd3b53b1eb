"""Chapter 10: bytes and seconds at scale, blocks that are never lost, and a cache that goes on elsewhere."""

import io
import random
import re
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from chapters.calling import call, copied
from chapters.checking import assert_refused, assert_same, fail
from gpt_kv_cache import GPT, GPTConfig, generate

floors = import_module("chapters.10_beyond.floors")
GIVEN = ("gpt_kv_cache", "support.fingerprints")


WEIGHTS = 141_200_000_000  # bytes of Llama 3 70B, and its bytes of a token
OF_TOKEN = 327_680


@pytest.mark.ex10_1
def test_bytes_of_a_token(impl: ModuleType) -> None:
    for shape in floors.SHAPES:
        sizes = shape.layers, shape.kv_heads, shape.head_dim, shape.nbytes
        found = call(impl.token_bytes, *sizes, returns="int")
        what = f"{shape.name}: {sizes[0]} layers, {sizes[1]} key-value heads of size {sizes[2]}, {sizes[3]} bytes a number"
        assert found == shape.token_bytes, f"{what}: {found} bytes, must be {shape.token_bytes}"


@pytest.mark.ex10_1
def test_texts_that_fit_and_texts_that_outweigh(impl: ModuleType) -> None:
    gpus = 320 * 10**9, WEIGHTS, OF_TOKEN, 1000  # four of them, and 1,000 tokens a text
    full = WEIGHTS + OF_TOKEN * 10**18
    for name, sizes, texts, why in [
        ("fit", (*gpus, 16), 541, "a text takes 63 whole blocks of 16"),
        ("fit", (*gpus, 8192), 66, "a text takes room for 8,192 tokens"),
        ("fit", (WEIGHTS, *gpus[1:], 16), 0, "nothing is left beside the weights"),
        ("fit", (80 * 10**9, *gpus[1:], 16), 0, "the weights alone don't fit"),
        ("fit", (WEIGHTS + 160 * OF_TOKEN, WEIGHTS, OF_TOKEN, 33, 16), 3, "10 blocks, 3 a text"),
        ("fit", (full - 1, WEIGHTS, OF_TOKEN, 1, 1), 10**18 - 1, "a byte is missing for one more"),
        ("outweigh", (WEIGHTS, OF_TOKEN, 8000), 54, "53 have fewer bytes than the weights"),
        ("outweigh", (1000, 10, 10), 11, "ten have as many bytes as the weights, and not more"),
        ("outweigh", (10_007 * 10**13 - 1, 10**6, 10**7), 10_007, "whole numbers: no rounding"),
    ]:
        found = call(getattr(impl, f"texts_that_{name}"), *sizes, returns="int")
        assert found == texts, f"texts that {name}, {sizes}: {found}, must be {texts}: {why}"


@pytest.mark.ex10_2
def test_seconds_of_a_prompt_and_bandwidth_from_which_on_to_fetch(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape in floors.SHAPES:
        of = floors.token_operations(shape), shape.layers, shape.width
        for tokens in (1, 1000, 100_000):
            whole = floors.prefill_seconds(shape, rate, tokens)
            for known in (0, tokens // 3, tokens):
                found = call(impl.prefill_s, *of, tokens, rate, known, returns="float")
                expected = whole - floors.prefill_seconds(shape, rate, known)
                what = f"{shape.name}, {tokens} tokens, {known} known: {found:.4g} s, must be {expected:.4g}"
                why = "what the whole costs, less the known: its tokens still see the known ones"
                assert found == pytest.approx(expected, rel=1e-9), f"{what}, {why}"
            bandwidth = call(impl.fetch_from, *of, shape.token_bytes, tokens, rate, returns="float")
            fetched = tokens * shape.token_bytes / bandwidth
            what = f"{shape.name}, {tokens} tokens: at {bandwidth:.3g} bytes/s fetching takes {fetched:.3g} s"
            why = f"{what}, reading {whole:.3g} s: must be the same"
            assert fetched == pytest.approx(whole, rel=1e-9), why


class Pool:
    """A pool of slots, and what was written to each text: the tables must lead back to it."""

    def __init__(self, tables: object, blocks: int) -> None:
        self.tables, self.blocks, self.size = tables, blocks, tables.size
        self.slots = ["nothing"] * (blocks * self.size)
        self.texts: dict[str, list[str]] = {}

    def begin(self, text: str) -> None:
        self.tables.begin(text)
        self.texts[text] = []

    def fork(self, text: str, other: str) -> None:
        self.tables.fork(text, other)
        self.texts[other] = [*self.texts[text]]

    def drop(self, text: str) -> None:
        self.tables.drop(text)
        del self.texts[text]

    def extend(self, text: str, n: int) -> None:
        """Write n tokens, if there is room."""
        tables, size, before = self.tables, self.tables.size, copied(vars(self.tables))
        length, table, free = tables.length[text], tables.table[text], len(tables.free)
        owners = sum(table[-1:] != [] and table[-1] in blocks for blocks in tables.table.values())
        shares = length % size > 0 and owners > 1
        needed = -(-(length + n) // size) - len(table) + shares
        what = f"{n} more than {length} tokens, blocks of {size}, the last one {'' if shares else 'not '}shared"
        what += f": needs {needed} blocks, {free} are free"
        try:
            copies = call(tables.extend, text, n, returns="list[tuple[int, int]]")
        except MemoryError as error:
            assert needed > free, f"{what}: enough, but refused"
            same = copied(vars(tables)) == before
            assert same, f"{what}: a refusal must change nothing: {vars(tables)}, was {before}"
            said = {*map(int, re.findall(r"[0-9]+", str(error)))}
            assert {needed, free} <= said, f"{what}: the message must say so: {str(error)!r}"
            return
        except IndexError as error:
            fail(f"{what}: must be a MemoryError, not {error!r}")
        assert len(copies) == shares, f"{what}: {len(copies)} copies, must be {int(shares)}"
        for old, new in copies:
            self.slots[new * size : (new + 1) * size] = self.slots[old * size : (old + 1) * size]
        for t in range(length, length + n):
            self.texts[text].append(f"token {t} of {text}")
            block, place = tables.place(text, t)
            self.slots[block * size + place] = self.texts[text][t]

    def check(self) -> None:
        tables, size = self.tables, self.size
        assert_same(sorted(tables.table), sorted(self.texts), "the texts in table")
        assert_same(sorted(tables.length), sorted(self.texts), "the texts in length")
        for text, tokens in self.texts.items():
            found, must = len(tables.table[text]), -(-len(tokens) // size)
            assert found == must, (
                f"{text}, {len(tokens)} tokens: {found} blocks of {size}, must be {must}"
            )
            for t, token in enumerate(tokens):
                block, place = tables.place(text, t)
                held = self.slots[block * size + place]
                assert held == token, (
                    f"{text}, token {t}: place {place} of block {block} holds {held}, not {token}"
                )
        for block in range(self.blocks):
            who = [text for text, table in tables.table.items() for b in table if b == block]
            listed, free = f"block {block}: {', '.join(who) or 'no text'} lists it", tables.free
            assert free.count(block) == (not who), (
                f"{listed}, and free has {free.count(block)} of it, must have {int(not who)}"
            )
            count = getattr(tables, "count", [len(who)] * self.blocks)[block]
            assert count == len(who), f"{listed}, and its count is {count}"


def use_at_random(pool: Pool, seed: int, *actions: str) -> None:
    """Let texts of seven names come, grow and go; names come back."""
    draw = random.Random(seed)
    for step in range(400):
        texts, new, what = [*pool.texts], f"text {step % 7}", "begin"
        if texts:
            what = draw.choice(["begin", "extend", "extend", "extend", "drop", *actions])
        if what == "begin" and new not in texts:
            pool.begin(new)
        elif what == "fork" and new not in texts:
            pool.fork(draw.choice(texts), new)
        elif what == "drop":
            pool.drop(draw.choice(texts))
        elif what == "extend":
            pool.extend(draw.choice(texts), draw.randint(1, 2 * pool.size))
        pool.check()


@pytest.mark.ex10_3
def test_block_and_place_of_every_token(impl: ModuleType) -> None:
    tables, blocks = impl.BlockTables(900, 4), [5, 0, 7, *range(100, 400)]
    tables.table["a"], tables.length["a"] = blocks, 4 * len(blocks)
    expected = [(block, place) for block in blocks for place in range(4)]
    found = [tables.place("a", t) for t in range(len(expected))]
    assert_same(found, expected, "table [5, 0, 7 ...], blocks of 4: (block, place) of each token")


@pytest.mark.ex10_3
@pytest.mark.parametrize("seed", range(5))
def test_tables_lead_to_what_was_written(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 12)
    use_at_random(Pool(impl.BlockTables(blocks, draw.randint(1, 5)), blocks), seed)


@pytest.mark.ex10_4
@pytest.mark.parametrize("seed", range(10))
def test_no_shared_block_is_lost_leaked_or_overwritten(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(1, 12)
    pool = Pool(impl.SharedBlocks(blocks, draw.randint(1, 5)), blocks)
    pool.begin("many")
    pool.extend("many", 1)
    for copy in range(20):
        pool.fork("many", f"copy {copy}")
    pool.check()
    use_at_random(pool, seed, "fork")


def chains(seed: int, n: int) -> list[list[int]]:
    """Requests as ids of hash chains: some go on where an earlier one ended, some share a beginning with one."""
    draw, ids, requests = random.Random(seed), {}, [()]
    for _ in range(n):
        shared = draw.choice(requests)[: draw.randint(0, 9)] if draw.random() < 0.7 else ()
        requests.append((*shared, *(draw.randint(0, 3) for _ in range(draw.randint(1, 4)))))
    return [
        [ids.setdefault(text[: i + 1], len(ids)) for i in range(len(text))] for text in requests[1:]
    ]


@pytest.mark.ex10_5
def test_hit_rate(impl: ModuleType) -> None:
    for requests, capacity, blocks, why in [
        ([[1, 2, 3], [1, 2, 3]], 3, 3, "all of them fit, and the second time all are found"),
        ([[1, 2, 3], [1, 2, 3]], 2, 2, "the end of a text goes first"),
        ([[1, 2], [3], [1, 2], [4], [1, 2]], 3, 4, "a block that is found is used now"),
        ([[1, 2], [1, 3], [4], [1, 2]], 3, 2, "2 was used longest ago, and 1 wasn't"),
        ([[1], [], [1]], 1, 1, "a request of no blocks evicts nothing"),
    ]:
        assert_hits(impl, requests, capacity, blocks, why)
    for seed in range(4):
        requests = chains(seed, 80)
        for capacity in (*range(0, 120, 5), 10**6):
            for n in (5, 20, 80):  # a short beginning shows it best
                blocks = by_distance(requests[:n], capacity)
                assert_hits(impl, requests[:n], capacity, blocks, "the last request differs")


def assert_hits(
    impl: ModuleType, requests: list[list[int]], capacity: int, blocks: int, why: str
) -> None:
    __tracebackhide__ = True
    found, total = call(impl.hit_rate, requests, capacity, returns="float"), sum(map(len, requests))
    what = (
        f"requests {requests}, room for {capacity}: {found * total:g} of {total} blocks are found"
    )
    assert found == blocks / total, f"{what}, must be {blocks}: {why}"


def by_distance(requests: list[list[int]], capacity: int) -> int:
    """How many blocks are found, by another way: one is if fewer than `capacity` others were used later than it."""
    used, found = {}, 0
    for now, request in enumerate(requests):
        for block in request:
            if block not in used or sum(time > used[block] for time in used.values()) >= capacity:
                break
            found += 1
        used |= {block: (now, -i) for i, block in enumerate(request)}
    return found


def random_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """A model of more token ids than two bytes can have, in training, with a part that isn't trained."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=70_000, n_ctx=400, n_layer=3, n_head=2, n_embd=16)).to(dtype)
    model.h[1].requires_grad_(False)
    return model


PROMPT = torch.randint(70_000, (300,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.ex10_6
def test_a_layer_is_on_its_way_before_the_next_is_computed(impl: ModuleType) -> None:
    model, arrived, sizes = random_model(), io.BytesIO(), []
    stream = io.BufferedWriter(arrived, 2**24)  # holds back what isn't flushed
    for block in model.h:
        block.register_forward_pre_hook(lambda *_: sizes.append(len(arrived.getvalue())))
    call(impl.send, stream, model, PROMPT, returns="NoneType")
    assert len(sizes) == 3, f"{len(sizes)} layers were computed, 3 are one pass"
    layer = 2 * 16 * len(PROMPT) * 4
    sizes.append(len(arrived.getvalue()))
    for i, (old, new) in enumerate(pairwise(sizes)):
        what = f"layer {i}: {new - old} bytes of {layer} have arrived"
        assert new - old >= layer, f"{what} before the next one is computed"
    rest, most = sizes[-1] - 3 * layer, 4000 + 16 * len(PROMPT)
    assert rest <= most, f"{rest} bytes beside keys and values, must be at most {most}"
    disk, full = io.BytesIO(), OSError("the disk is full")
    disk.write = lambda data, write=disk.write: write(data) if len(data) < 9000 else throw(full)
    with pytest.raises(OSError, match="full"):
        impl.send(disk, model, PROMPT)


def throw(error: Exception) -> None:
    raise error


@pytest.mark.ex10_6
def test_another_models_cache_and_half_a_stream_are_refused(impl: ModuleType) -> None:
    stream, retrained = io.BytesIO(), random_model()  # its cache has the same shape
    impl.send(stream, random_model(), PROMPT)
    data = stream.getvalue()
    retrained.h[2].mlp.c_fc.bias.data[0] += 1e-3
    stream.seek(0)
    assert_refused(lambda: impl.receive(stream, retrained), "the cache of another model")
    assert stream.tell() < len(data) / 2, "refused before keys and values are read"
    for end in (0, 5, 1000, len(data) // 2, len(data) - 3):
        what = f"a stream that ends after {end} of {len(data)} bytes"
        assert_refused(partial(impl.receive, io.BytesIO(data[:end]), random_model()), what)


@pytest.mark.ex10_6
def test_another_message_may_follow(impl: ModuleType) -> None:
    stream, model, prompts = io.BytesIO(), random_model(), (PROMPT[:3], PROMPT[3:8])
    for prompt in prompts:
        impl.send(stream, model, prompt)
    stream.seek(0)
    for prompt in prompts:
        text, _ = impl.receive(stream, model)
        assert_same(text[:-1], prompt, "two messages in one stream, received in turn: the prompt")


@pytest.mark.ex10_6
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 300], ids="{} tokens".format)
def test_another_model_goes_on_exactly(impl: ModuleType, n: int, dtype: torch.dtype) -> None:
    sender, other = random_model(1, dtype), random_model(1, dtype)
    prompt, stream, fed = PROMPT[-n:], io.BytesIO(), []
    cold = [int(i) for i in generate(sender, torch.tensor([prompt]), 21)]
    impl.send(stream, sender, tuple(prompt))  # any sequence
    received = io.BytesIO(stream.getvalue()), other
    ids, cache = call(impl.receive, *received, returns="tuple[list[int], KVCache]")
    assert_same(ids, [*prompt, cold[0]], "the text, which is the prompt, then one token")
    other.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    new = [int(i) for i in generate(other, torch.tensor([ids]), 20, cache=cache)]
    assert_same(new, cold[1:], "the tokens after it")
    assert_same(fed, [1] * 20, "tokens read by pass, by the receiver")
