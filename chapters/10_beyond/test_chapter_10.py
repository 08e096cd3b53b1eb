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

from chapters.checking import assert_close, assert_refused, assert_same
from gpt_kv_cache import GPT, GPTConfig, generate
from load_gpt2_weights import load_model, load_tokenizer
from studies.replay import Request, hit_rates

floors = import_module("chapters.10_beyond.floors")
GIVEN = ("gpt_kv_cache", "support.fingerprints")
CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)


def random_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model.requires_grad_(False)


@pytest.mark.ex10_1
def test_bytes_of_a_token(impl: ModuleType) -> None:
    for shape in floors.SHAPES:
        sizes = shape.layers, shape.kv_heads, shape.head_dim, shape.nbytes
        found = impl.token_bytes(*sizes)
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
    ]:
        found = impl.texts_that_fit(memory, weights, 327_680, tokens, block)
        assert found == texts, f"{why}: room for {texts} texts, not {found}"


@pytest.mark.ex10_1
def test_texts_that_outweigh(impl: ModuleType) -> None:
    for weights, of_token, tokens, texts in [
        (141_200_000_000, 327_680, 8000, 54),
        (1000, 10, 10, 11),  # ten texts have as many bytes as the weights, and not more
        (10_007 * 10**13 - 1, 10**6, 10**7, 10_007),  # whole numbers: no rounding
    ]:
        found = impl.texts_that_outweigh(weights, of_token, tokens)
        what = f"weights of {weights} bytes, {tokens} tokens of {of_token} bytes"
        assert found == texts, f"{what}: {found} texts, must be {texts}"


def of(shape: object) -> tuple[float, int, int]:
    return floors.token_operations(shape), shape.layers, shape.width


@pytest.mark.ex10_2
def test_seconds_of_a_prompt(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape in floors.SHAPES:
        for tokens in (1, 1000, 8000):
            whole = impl.prefill_s(*of(shape), tokens, rate)
            expected = floors.prefill_seconds(shape, rate, tokens)
            what = (
                f"{shape.name}, {tokens} tokens: {expected:.4g} s with attention, not {whole:.4g}"
            )
            assert whole == pytest.approx(expected, rel=1e-9), what
            for known in (0, tokens // 3, tokens):
                rest = impl.prefill_s(*of(shape), tokens, rate, known=known)
                assert rest == pytest.approx(
                    whole - impl.prefill_s(*of(shape), known, rate), rel=1e-9
                ), (
                    "what is left costs what the whole does, less what is known: its tokens still see the known ones"
                )


@pytest.mark.ex10_2
def test_bandwidth_from_which_on_to_fetch(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape in floors.SHAPES:
        for known in (1, 512, 100_000):
            bandwidth = impl.fetch_from(*of(shape), shape.token_bytes, known, rate)
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
            pytest.fail(
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


def use_at_random(pool: Pool, seed: int, *actions: str) -> None:
    """Let up to six texts come, grow and go."""
    draw = random.Random(seed)
    for step in range(150):
        names, what = [*pool.texts], "begin"
        if names:
            what = draw.choice(["begin", "extend", "extend", "extend", "drop", *actions])
        if what == "begin" and len(names) < 6:
            pool.begin(f"text {step}")
        elif what == "fork" and len(names) < 6:
            pool.fork(draw.choice(names), f"text {step}")
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
    assert_same(tables.slots("a"), [20, 21, 22, 23, 0, 1, 2, 3, 28, 29], "its slots")


@pytest.mark.ex10_3
@pytest.mark.parametrize("seed", range(20))
def test_tables_lead_to_what_was_written(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 12)
    use_at_random(Pool(impl.BlockTables(blocks, draw.randint(1, 5)), blocks), seed)


@pytest.mark.ex10_4
@pytest.mark.parametrize("seed", range(40))
def test_no_shared_block_is_lost_leaked_or_overwritten(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(1, 12)
    use_at_random(Pool(impl.SharedBlocks(blocks, draw.randint(1, 5)), blocks), seed, "fork")


@pytest.mark.ex10_4
@torch.no_grad()
def test_the_model_reads_from_shared_blocks(impl: ModuleType) -> None:
    model, size = random_model(), 4
    tables = impl.SharedBlocks(12, size)
    pool = [torch.full((2, 2, 12 * size, 16), torch.nan) for _ in range(3)]
    tables.begin("a")
    a = impl.PagedCache(tables, pool, "a")
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, (1, 10), generator=draw)
    model(prompt, a)
    caches = {"a": a, "b": a.fork("b"), "c": a.fork("c")}
    assert len(tables.free) == 9, (
        f"three texts, one prompt, three blocks: {len(tables.free)} of 12 are free, must be 9"
    )
    texts = dict.fromkeys(caches, prompt)
    for n in (1, 3, 1, 2):
        for text, cache in caches.items():
            new = torch.randint(100, (1, n), generator=draw)
            texts[text] = torch.cat([texts[text], new], dim=1)
            what = f"text {text}, {n} tokens after {len(cache)}"
            exact = model(texts[text])[:, -n:]
            assert_close(model(new, cache), exact, what, ("row", "token", "logit"))


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
def test_hit_rate_of_a_cache_that_forgets_nothing(impl: ModuleType) -> None:
    for seed in range(10):
        requests = chains(seed, 60)
        trace = [Request(512 * len(blocks), tuple(blocks)) for blocks in requests]
        expected = hit_rates(trace, float("inf"))["block_hit_rate"]
        found = impl.hit_rate(requests, 10**6)
        what = f"{len(requests)} requests, room for all: a share of {expected:.3f} of blocks is found, not {found:.3f}"
        assert found == pytest.approx(expected, abs=1e-12), what


@pytest.mark.ex10_5
def test_hit_rate_of_small_caches(impl: ModuleType) -> None:
    for requests, capacity, blocks, why in [
        ([[1, 2, 3], [1, 2, 3]], 3, 3, "all of them fit, and the second time all are found"),
        ([[1, 2, 3], [1, 2, 3]], 2, 2, "the end of a text goes first"),
        ([[1, 2], [3], [1, 2], [4], [1, 2]], 3, 4, "a block that is found is used now"),
        ([[1, 2], [1, 3], [4], [1, 2]], 3, 2, "2 was used longest ago, and 1 wasn't"),
    ]:
        assert_hits(impl, requests, capacity, blocks, why)
    for seed in range(4):
        requests = chains(seed, 80)
        for capacity in range(0, 120, 5):
            for n in (5, 20, 80):  # a short beginning shows it best
                blocks = by_distance(requests[:n], capacity)
                assert_hits(impl, requests[:n], capacity, blocks, "the last request differs")


def total(requests: list[list[int]]) -> int:
    return sum(map(len, requests))


def assert_hits(
    impl: ModuleType, requests: list[list[int]], capacity: int, blocks: int, why: str
) -> None:
    __tracebackhide__ = True
    found = impl.hit_rate([[*request] for request in requests], capacity)
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
    stream, sizes = io.BytesIO(), []
    hooks = [
        block.register_forward_pre_hook(lambda *_: sizes.append(len(stream.getvalue())))
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
    sizes.append(len(stream.getvalue()))
    for i, (before, after) in enumerate(pairwise(sizes)):
        assert after - before >= layer, (
            f"layer {i}: {after - before} bytes of {layer} before the next one is computed"
        )
    most = layers * layer + 4000 + 16 * len(prompt)
    assert sizes[-1] <= most, (
        f"{sizes[-1]} bytes for {layers * layer} of keys and values: all else must be at most {most - layers * layer}"
    )
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pocket.modules())
    assert not left, f"{left} hooks are left on the model"


@pytest.mark.ex10_6
def test_another_models_cache_is_refused(impl: ModuleType, pocket: GPT, prompt: list[int]) -> None:
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    size = len(stream.getvalue())
    retrained = load_model("pocket", model_class=GPT)  # its cache has the same shape
    retrained.h[3].mlp.c_fc.bias.data[0] += 1e-3
    stream.seek(0)
    with pytest.raises(ValueError):
        impl.receive(stream, retrained)
        pytest.fail("the cache of another model was taken")
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
def test_another_model_goes_on_exactly(impl: ModuleType, pocket: GPT, prompt: list[int]) -> None:
    cold = [int(i) for i in generate(pocket, torch.tensor([prompt]), 21)]
    stream, other, fed = io.BytesIO(), load_model("pocket", model_class=GPT), []
    impl.send(stream, pocket, prompt)
    ids, cache = impl.receive(io.BytesIO(stream.getvalue()), other)
    assert_same(ids, [*prompt, cold[0]], "the text, which is the prompt, then one token")
    other.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
    new = [int(i) for i in generate(other, torch.tensor([ids]), 20, cache=cache)]
    assert_same(new, cold[1:], "the tokens after it")
    assert_same(fed, [1] * 20, "tokens read by pass, by the receiver")
