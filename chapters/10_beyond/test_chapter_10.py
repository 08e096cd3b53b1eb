"""Chapter 10: bytes and seconds at scale, blocks that are never lost, and a cache that goes on elsewhere."""

import io
import random
import re
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from chapters.checking import assert_refused, assert_same, fail, returned
from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model, load_tokenizer

floors = import_module("chapters.10_beyond.floors")
GIVEN = ("gpt_kv_cache", "support.fingerprints")


@pytest.mark.ex10_1
def test_bytes_of_a_token(impl: ModuleType) -> None:
    for shape in floors.SHAPES:
        sizes = shape.layers, shape.kv_heads, shape.head_dim, shape.nbytes
        found = returned(impl.token_bytes, *sizes, kind=int)
        what = f"{shape.name}: {sizes[0]} layers, {sizes[1]} key-value heads of size {sizes[2]}, {sizes[3]} bytes a number"
        assert found == shape.token_bytes, f"{what}: {found} bytes, must be {shape.token_bytes}"


@pytest.mark.ex10_1
def test_texts_that_fit(impl: ModuleType) -> None:
    weights = 141_200_000_000  # Llama 3 70B
    for memory, tokens, block, texts, why in [
        (320 * 10**9, 1000, 16, 541, "four GPUs, and 1,000 tokens take 63 whole blocks of 16"),
        (320 * 10**9, 1000, 8192, 66, "four GPUs, and a text takes room for 8,192 tokens"),
        (weights, 1000, 16, 0, "nothing is left beside the weights"),
        (80 * 10**9, 1000, 16, 0, "the weights alone don't fit"),
        (weights + 10 * 16 * 327_680, 33, 16, 3, "10 blocks, and 3 a text"),
        (weights + 327_680 * 10**18 - 1, 1, 1, 10**18 - 1, "a byte is missing for one text more"),
    ]:
        sizes = memory, weights, 327_680, tokens, block
        found = returned(impl.texts_that_fit, *sizes, kind=int)
        assert found == texts, f"{why}: room for {texts} texts, not {found}"


@pytest.mark.ex10_1
def test_texts_that_outweigh(impl: ModuleType) -> None:
    for weights, of_token, tokens, texts in [
        (141_200_000_000, 327_680, 8000, 54),
        (1000, 10, 10, 11),  # ten texts have as many bytes as the weights, and not more
        (10_007 * 10**13 - 1, 10**6, 10**7, 10_007),  # whole numbers: no rounding
    ]:
        found = returned(impl.texts_that_outweigh, weights, of_token, tokens, kind=int)
        what = f"weights of {weights} bytes, {tokens} tokens of {of_token} bytes"
        assert found == texts, f"{what}: {found} texts, must be {texts}"


def of(shape: object) -> tuple[float, int, int]:
    return floors.token_operations(shape), shape.layers, shape.width


@pytest.mark.ex10_2
def test_seconds_of_a_prompt(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape in floors.SHAPES:
        for tokens in (1, 1000, 8000):
            whole = floors.prefill_seconds(shape, rate, tokens)
            for known in (0, tokens // 3, tokens):
                found = returned(impl.prefill_s, *of(shape), tokens, rate, known, kind=float)
                expected = whole - floors.prefill_seconds(shape, rate, known)
                what = f"{shape.name}, {tokens} tokens, {known} known: {found:.4g} s, must be {expected:.4g}"
                why = (
                    "what the whole costs, less what is known: its tokens still see the known ones"
                )
                assert found == pytest.approx(expected, rel=1e-9), f"{what}, {why}"


@pytest.mark.ex10_2
def test_bandwidth_from_which_on_to_fetch(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape in floors.SHAPES:
        for known in (1, 512, 100_000):
            sizes = *of(shape), shape.token_bytes, known, rate
            bandwidth = returned(impl.fetch_from, *sizes, kind=float)
            saved = floors.prefill_seconds(shape, rate, known)
            fetched = known * shape.token_bytes / bandwidth
            what = f"{shape.name}, {known} tokens: at {bandwidth:.3g} bytes/s fetching takes {fetched:.3g} s"
            assert fetched == pytest.approx(saved, rel=1e-9), (
                f"{what}, reading {saved:.3g} s: must be the same"
            )


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
        tables, size, before = self.tables, self.size, deepcopy(vars(self.tables))
        length, table, free = tables.length[text], tables.table[text], len(tables.free)
        owners = [other for other, blocks in tables.table.items() if table and table[-1] in blocks]
        shares = length % size > 0 and len(owners) > 1
        needed = -(-(length + n) // size) - len(table) + shares
        what = f"{n} more than {length} tokens, blocks of {size}, the last one {'' if shares else 'not '}shared"
        try:
            copies = tables.extend(text, n)
        except MemoryError as error:
            assert needed > free, (
                f"{what}: needs {needed} blocks, {free} are free: enough, but refused"
            )
            for name, old in before.items():
                new = getattr(tables, name)
                assert new == old, (
                    f"{what}: a refusal must change nothing, but {name} is {new}, was {old}"
                )
            said = [*map(int, re.findall(r"[0-9]+", str(error)))]
            assert {needed, free} <= {*said}, (
                f"the message must say {needed} needed, {free} free: {str(error)!r}"
            )
            return
        except IndexError as error:
            fail(
                f"{what}: needs {needed} blocks, {free} are free: must be a MemoryError, not {error!r}"
            )
        assert len(copies) == shares, f"{what}: {len(copies)} copies, must be {int(shares)}"
        for old, new in copies:
            self.slots[new * size : (new + 1) * size] = self.slots[old * size : (old + 1) * size]
        for t in range(length, length + n):
            self.texts[text].append(f"token {t} of {text}")
            block, place = tables.place(text, t)
            self.slots[block * size + place] = self.texts[text][t]

    def check(self) -> None:
        tables, size = self.tables, self.size
        for name in ("table", "length"):
            assert_same(sorted(getattr(tables, name)), sorted(self.texts), f"the texts in {name}")
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
    """Let up to six texts come, grow and go; names come back."""
    draw = random.Random(seed)
    for step in range(400):
        names, new, what = [*pool.texts], f"text {step % 7}", "begin"
        if names:
            what = draw.choice(["begin", "extend", "extend", "extend", "drop", *actions])
        if what == "begin" and new not in names:
            pool.begin(new)
        elif what == "fork" and new not in names:
            pool.fork(draw.choice(names), new)
        elif what == "drop":
            pool.drop(draw.choice(names))
        elif what == "extend":
            pool.extend(draw.choice(names), draw.randint(1, 2 * pool.size))
        pool.check()


@pytest.mark.ex10_3
def test_block_and_place_of_every_token(impl: ModuleType) -> None:
    tables = impl.BlockTables(9, 4)
    tables.table["a"], tables.length["a"] = [5, 0, 7], 10
    expected = [(5, 0), (5, 1), (5, 2), (5, 3), (0, 0), (0, 1), (0, 2), (0, 3), (7, 0), (7, 1)]
    found = [tables.place("a", t) for t in range(10)]
    assert_same(found, expected, "table [5, 0, 7], blocks of 4: (block, place) of each token")


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
    use_at_random(Pool(impl.SharedBlocks(blocks, draw.randint(1, 5)), blocks), seed, "fork")


def chains(seed: int, n: int) -> list[list[int]]:
    """Requests as ids of hash chains: some go on where an earlier one ended, some share a beginning with one."""
    draw, ids, requests = random.Random(seed), {}, []
    for _ in range(n):
        text: tuple[int, ...] = (
            draw.choice(requests)[: draw.randint(0, 9)] if requests and draw.random() < 0.7 else ()
        )
        requests.append((*text, *(draw.randint(0, 3) for _ in range(draw.randint(1, 4)))))
    return [
        [ids.setdefault(text[: i + 1], len(ids)) for i in range(len(text))] for text in requests
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


def total(requests: list[list[int]]) -> int:
    return sum(map(len, requests))


def assert_hits(
    impl: ModuleType, requests: list[list[int]], capacity: int, blocks: int, why: str
) -> None:
    __tracebackhide__ = True
    found = returned(impl.hit_rate, requests, capacity, kind=float)
    assert found == blocks / total(requests), (
        f"requests {requests}, room for {capacity}: {found * total(requests):g} of {total(requests)} blocks are found, "
        f"must be {blocks}: {why}"
    )


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


@pytest.fixture(scope="module")
def pocket() -> GPT:
    return load_model("pocket", model_class=GPT)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer("pocket").encode(
        "Everyone in Tolben knew Halek and his sister Belessa. On a sunny evening"
    )


@pytest.mark.ex10_6
@torch.no_grad()
def test_a_layer_is_on_its_way_before_the_next_is_computed(
    impl: ModuleType, pocket: GPT, prompt: list[int]
) -> None:
    arrived, sizes = io.BytesIO(), []
    stream = io.BufferedWriter(arrived, 2**24)  # holds back what isn't flushed
    hooks = [
        block.register_forward_pre_hook(lambda *_: sizes.append(len(arrived.getvalue())))
        for block in pocket.h
    ]
    try:
        impl.send(stream, pocket, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    layers = len(pocket.h)
    assert len(sizes) == layers, f"{len(sizes)} layers were computed, {layers} are one pass"
    layer = 2 * 6 * 32 * len(prompt) * 4
    sizes.append(len(arrived.getvalue()))
    for i, (before, after) in enumerate(pairwise(sizes)):
        assert after - before >= layer, (
            f"layer {i}: {after - before} bytes of {layer} have arrived before the next one is computed"
        )
    most = layers * layer + 4000 + 16 * len(prompt)
    assert sizes[-1] <= most, (
        f"{sizes[-1]} bytes for {layers * layer} of keys and values: all else must be at most {most - layers * layer}"
    )
    stream, full = io.BytesIO(), OSError("the disk is full")
    stream.write = lambda data, write=stream.write: write(data) if len(data) < 4000 else throw(full)
    with pytest.raises(OSError, match="full"):
        impl.send(stream, pocket, prompt)
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pocket.modules())
    assert not left, f"{left} hooks are left on the model"


def throw(error: Exception) -> None:
    raise error


@pytest.mark.ex10_6
def test_another_models_cache_is_refused(impl: ModuleType, pocket: GPT, prompt: list[int]) -> None:
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    size = len(stream.getvalue())
    retrained = load_model("pocket", model_class=GPT)  # its cache has the same shape
    retrained.h[3].mlp.c_fc.bias.data[0] += 1e-3
    stream.seek(0)
    assert_refused(lambda: impl.receive(stream, retrained), "the cache of another model")
    assert stream.tell() < size / 2, "refused before keys and values are read"


@pytest.mark.ex10_6
def test_a_stream_that_ends_too_early_is_refused(
    impl: ModuleType, pocket: GPT, prompt: list[int]
) -> None:
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    data = stream.getvalue()
    for end in (0, 5, 1000, len(data) // 2, len(data) - 3):
        what = f"a stream that ends after {end} of {len(data)} bytes"
        assert_refused(partial(impl.receive, io.BytesIO(data[:end]), pocket), what)


@pytest.mark.ex10_6
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 15], ids="{} tokens".format)
def test_another_model_goes_on_exactly(
    impl: ModuleType, prompt: list[int], n: int, dtype: torch.dtype
) -> None:
    sender, other = (load_model("pocket", model_class=GPT).to(dtype) for _ in range(2))
    prompt, stream, fed = prompt[:n], io.BytesIO(), []
    cold = [int(i) for i in generate(sender, torch.tensor([prompt]), 21)]
    returned(lambda ids: impl.send(stream, sender, ids), prompt)
    ids, cache = impl.receive(io.BytesIO(stream.getvalue()), other)
    assert_same(ids, [*prompt, cold[0]], "the text, which is the prompt, then one token")
    assert {*map(type, ids)} == {int}, f"the text is a list of ints, not {ids}"
    other.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    new = [int(i) for i in generate(other, torch.tensor([ids]), 20, cache=cache)]
    assert_same(new, cold[1:], "the tokens after it")
    assert_same(fed, [1] * 20, "tokens read by pass, by the receiver")
