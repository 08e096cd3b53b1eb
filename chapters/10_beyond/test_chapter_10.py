"""Chapter 10: bytes and seconds at scale, blocks that are never lost, and a cache that goes on elsewhere."""

import io
import math
import random
from collections import Counter
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import pairwise, product
from types import ModuleType

import pytest
import torch

from chapters.calling import call, copied, is_same
from chapters.checking import assert_refused, assert_same
from gpt_kv_cache import GPT, GPTConfig, generate

floors = import_module("chapters.10_beyond.floors")
GIVEN = ("gpt_kv_cache", "support.fingerprints")


@pytest.mark.ex10_1
@pytest.mark.parametrize("n", [0, 3, 10**18])
def test_bytes_and_the_texts_that_fit_and_outweigh(impl: ModuleType, n: int) -> None:
    draw = random.Random(0)
    for _ in range(20):
        sizes = [draw.randint(1, 100) for _ in range(4)]
        tokens, block, more = draw.randint(1, 100), draw.randint(1, 32), draw.choice([-1, 0, 1])
        of_token, blocks = 2 * math.prod(sizes), -(-tokens // block)
        weights = (n + 1) * tokens * of_token + more
        memory = weights + n * blocks * block * of_token + more
        for name, given, right in [
            ("token_bytes", sizes, of_token),
            ("texts_that_outweigh", (weights, of_token, tokens), n + 1 + (more >= 0)),
            ("texts_that_fit", (memory, weights, of_token, tokens, block), max(0, n - (more < 0))),
        ]:
            found = call(getattr(impl, name), *given, returns="int")
            what = f"{name}{(*given,)}: {found}, must be {right}; {blocks} blocks a text"
            assert found == right, what


@pytest.mark.ex10_2
def test_seconds_of_a_prompt_and_bandwidth_from_which_on_to_fetch(impl: ModuleType) -> None:
    rate = floors.H100[2]
    for shape, tokens, known in product(floors.SHAPES, (1000, 100_000), (0, 333, 1, 1000)):
        sizes = floors.token_operations(shape), shape.layers, shape.width
        whole = floors.prefill_seconds(shape, rate, tokens)
        found = call(impl.prefill_s, *sizes, tokens, rate, known, returns="float")
        right = whole - floors.prefill_seconds(shape, rate, known)
        what = f"{tokens} tokens, {known} known: {found} s, must be {right}; the others see the known ones, too"
        assert found == pytest.approx(right, rel=1e-9), f"{shape.name}, {what}"
        found = call(impl.fetch_from, *sizes, shape.token_bytes, tokens, rate, returns="float")
        right = tokens * shape.token_bytes / whole
        what = f"{tokens} tokens: {found:.4g} bytes/s, must be {right:.4g}: as fast as reading"
        assert found == pytest.approx(right, rel=1e-9), f"{shape.name}, {what}"


def extend(
    tables: object, text: str, n: int, slots: dict[tuple[int, int], str], tokens: list[str]
) -> None:
    """Write n more tokens of a text to their places, if there is room: slots are what was written by (block, place)."""
    length, table, free, size = len(tokens), tables.table[text], len(tables.free), tables.size
    shares = length % size > 0 and sum(table[-1] in other for other in tables.table.values()) > 1
    needed = -(-(length + n) // size) - len(table) + shares
    what = f"{n} more than {length} tokens, blocks of {size}, the last one {'' if shares else 'not '}shared"
    if needed > free:
        before = copied(vars(tables))
        assert_refused(partial(tables.extend, text, n), what, needed, free, error=MemoryError)
        assert is_same(vars(tables), before), f"{what}: a refusal must change nothing"
        return
    copies = call(tables.extend, text, n, returns="list[tuple[int, int]]")
    assert len(copies) == shares, f"{what}: {len(copies)} copies, must be {int(shares)}"
    for (old, new), place in product(copies, range(size)):
        slots[new, place] = slots.get((old, place), "")
    for t in range(length, length + n):
        tokens.append(f"token {t} of {text}")
        slots[tables.place(text, t)] = tokens[t]


def use_at_random(tables: object, seed: int, actions: list[str]) -> None:
    """Let texts of seven names come, grow and go; names come back. After each call, check every slot and block."""
    draw, slots, texts, blocks = random.Random(seed), {}, {}, range(len(tables.free))
    for step in range(400):
        action, new = draw.choice(actions) if texts else "begin", f"text {step % 7}"
        text = draw.choice([*texts] or [new])
        if action == "extend":
            extend(tables, text, draw.randint(1, 2 * tables.size), slots, texts[text])
        elif action == "drop":
            tables.drop(text)
            del texts[text]
        elif new not in texts and action == "fork":
            tables.fork(text, new)
            texts[new] = [*texts[text]]
        elif new not in texts:
            tables.begin(new)
            texts[new] = []
        found = tables.length, {text: len(table) for text, table in tables.table.items()}
        lengths = {text: len(tokens) for text, tokens in texts.items()}
        right = lengths, {text: -(-n // tables.size) for text, n in lengths.items()}
        assert found == right, f"tokens, blocks of {tables.size}, by text: {found}, must be {right}"
        for text, tokens in texts.items():
            held = [slots.get(tables.place(text, t)) for t in range(len(tokens))]
            assert_same(held, tokens, f"{text}: what is at its tokens' places")
        count = Counter(block for table in tables.table.values() for block in table)
        free = [block for block in blocks if not count[block]]
        assert sorted(tables.free) == free, f"free: {tables.free}; what no text lists: {free}"
        if "fork" in actions:
            assert_same(tables.count, [count[block] for block in blocks], "texts that list a block")


ACTIONS = ["begin", "extend", "extend", "extend", "drop"]


@pytest.mark.ex10_3
def test_tables_lead_to_what_was_written(impl: ModuleType) -> None:
    tables, table = impl.BlockTables(900, 4), [5, 0, 7, *range(100, 400)]
    tables.table["a"], tables.length["a"] = table, 4 * len(table)
    found, what = [tables.place("a", t) for t in range(4 * len(table))], "table [5, 0, 7, ...]"
    assert_same(found, [*product(table, range(4))], f"{what}, blocks of 4: (block, place)")
    for seed in range(5):
        use_at_random(impl.BlockTables(3 * seed + 1, seed % 4 + 1), seed, ACTIONS)


@pytest.mark.ex10_4
def test_no_shared_block_is_lost_leaked_or_overwritten(impl: ModuleType) -> None:
    for seed in range(10):
        use_at_random(impl.SharedBlocks(seed + 2, seed % 4 + 1), seed, [*ACTIONS, "fork"])
    tables = impl.SharedBlocks(3, 4)
    tables.begin("a")
    tables.extend("a", 5)
    for copy in range(300):
        tables.fork("a", f"copy {copy}")
    assert_same(sorted(tables.count), [0, 301, 301], "count: a text of two blocks, and 300 copies")


@pytest.mark.ex10_5
def test_hit_rate(impl: ModuleType) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("01", k=draw.randint(0, 6))) for _ in range(250)]
    # an id for every beginning
    all_requests = [[int(f"1{text[: i + 1]}", 2) for i in range(len(text))] for text in texts]
    for n, capacity in product((3, 4, 6, 9, 14, 30, 250), (0, 1, 2, 3, 5, 9, 20, 60, 10**6)):
        requests = all_requests[:n]
        used, hits, total = {}, 0, sum(map(len, requests))
        for now, request in enumerate(requests):
            for block in request:
                # one is found if fewer than `capacity` others were used later than it
                if block not in used or sum(at > used[block] for at in used.values()) >= capacity:
                    break
                hits += 1
            used |= {block: (now, -i) for i, block in enumerate(request)}
        found = call(impl.hit_rate, requests, capacity, returns="float")
        what = f"requests {requests}, room for {capacity}: {found * total:g} of {total} blocks"
        why = "the blocks used longest ago go first, and the end of a text before its beginning"
        assert found == hits / total, f"{what} are found, must be {hits}: {why}"


PROMPT = random.Random(0).choices(range(70_000), k=300)


@pytest.fixture
def model() -> GPT:
    """A model of more token ids than two bytes can have, in training, with a part that isn't trained."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(70_000, 400, n_layer=3, n_head=2, n_embd=16))
    model.h[1].requires_grad_(False)
    return model


@pytest.mark.ex10_6
def test_layers_are_sent_in_turn_and_refused_by_half_or_elsewhere(
    impl: ModuleType, model: GPT
) -> None:
    arrived, sizes, layer, cut = io.BytesIO(), [], 2 * 16 * len(PROMPT) * 4, io.BytesIO()
    stream = io.BufferedWriter(arrived, 2**24)  # holds back what isn't flushed
    for block in model.h:
        block.register_forward_pre_hook(lambda *_: sizes.append(len(arrived.getvalue())))
    call(impl.send, stream, model, PROMPT, returns="NoneType")
    assert len(sizes) == 3, f"{len(sizes)} layers were computed, 3 are one pass"
    sizes.append(len(arrived.getvalue()))
    for i, (old, new) in enumerate(pairwise(sizes)):
        what = f"layer {i}: {new - old} bytes of {layer} come before the next one is computed"
        assert new - old >= layer, what
    rest, most = sizes[-1] - 3 * layer, 4000 + 16 * len(PROMPT)
    assert rest <= most, f"{rest} bytes beside keys and values, must be at most {most}"
    data = arrived.getvalue()
    for end in (0, 5, 1000, len(data) // 2, len(data) - 3):
        what = f"a stream that ends after {end} of {len(data)} bytes"
        assert_refused(partial(impl.receive, io.BytesIO(data[:end]), model), what)
    model.h[2].mlp.c_fc.bias.data[0] += 1e-3  # its cache has the same shape
    arrived.seek(0)
    assert_refused(partial(impl.receive, arrived, model), "the cache of another model")
    assert arrived.tell() < len(data) / 2, "refused before keys and values are read"
    model.h[1].register_forward_pre_hook(lambda *_: cut.close())
    with pytest.raises(ValueError, match="closed"):
        impl.send(cut, model, PROMPT)


@pytest.mark.ex10_6
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_goes_on_exactly(impl: ModuleType, model: GPT, dtype: torch.dtype) -> None:
    stream, other, fed = io.BytesIO(), deepcopy(model.to(dtype)), []
    prompts = PROMPT, PROMPT[-1:]  # two messages in one stream, received in turn
    for prompt in prompts:
        impl.send(stream, model, tuple(prompt))  # any sequence
    stream.seek(0)
    other.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].size(1)))
    for prompt in prompts:
        cold = [int(i) for i in generate(model, torch.tensor([prompt]), 21)]
        ids, cache = call(impl.receive, stream, other, returns="tuple[list[int], KVCache]")
        assert_same(ids, [*prompt, cold[0]], "the text, which is the prompt, then one token")
        new = [int(i) for i in generate(other, torch.tensor([ids]), 20, cache=cache)]
        assert_same(new, cold[1:], "the tokens after it")
    assert_same(fed, [1] * 40, "tokens read by pass, by the receiver")
