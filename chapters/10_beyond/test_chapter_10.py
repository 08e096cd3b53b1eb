"""Chapter 10: bytes and seconds at scale, blocks that are never lost, and a cache that goes on elsewhere."""

import inspect
import io
import json
import random
import re
import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from chapters.checking import assert_close, assert_keeps, assert_same
from chapters.scale import H100, SHAPES, decode_seconds, token_operations
from chapters.scale import prefill_seconds as floor_of_prefill
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from studies.replay import Request, hit_rates

GIVEN = ("gpt_kv_cache", "support.fingerprints")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = GPTConfig(vocab_size=100, n_ctx=64, n_layer=3, n_head=2, n_embd=32)


def random_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return model.requires_grad_(False)


@pytest.mark.ex10_1
def test_bytes_of_a_token(impl: ModuleType) -> None:
    assert impl.token_bytes(80, 8, 128) == 327_680, (
        "Llama 3 70B in bfloat16: 8 key-value heads, whatever the queries'"
    )
    assert impl.token_bytes(12, 12, 64, itemsize=4) == 73_728
    for shape in SHAPES:
        assert (
            impl.token_bytes(shape.layers, shape.kv_heads, shape.head_dim, shape.nbytes)
            == shape.token_bytes
        )


@pytest.mark.ex10_1
def test_texts_that_fit(impl: ModuleType) -> None:
    gigabytes, weights = 4 * 80 * 10**9, 141_200_000_000  # Llama 3 70B on four GPUs
    found = impl.texts_that_fit(gigabytes, weights, 327_680, 1000, 16)
    assert found == 541, f"1,000 tokens take 63 whole blocks of 16: room for 541 texts, not {found}"
    assert impl.texts_that_fit(gigabytes, weights, 327_680, 1000, 8192) == 66, (
        "room for 8,192 tokens each"
    )
    assert impl.texts_that_fit(weights, weights, 327_680, 1000, 16) == 0
    assert impl.texts_that_fit(80 * 10**9, weights, 327_680, 1000, 16) == 0, (
        "the weights alone don't fit"
    )
    draw = random.Random(0)
    for _ in range(200):
        of_token, tokens, block = draw.randint(1, 50), draw.randint(1, 40), draw.randint(1, 20)
        memory = 1000 + draw.randint(0, 5000)
        n = impl.texts_that_fit(memory, 1000, of_token, tokens, block)
        each = next(b for b in range(100) if b * block >= tokens) * block * of_token
        assert n * each <= memory - 1000 < (n + 1) * each + block * of_token, (
            memory,
            of_token,
            tokens,
            block,
        )
        blocks = (memory - 1000) // (block * of_token)
        assert n == blocks // (each // (block * of_token))


@pytest.mark.ex10_1
def test_texts_that_outweigh(impl: ModuleType) -> None:
    assert impl.texts_that_outweigh(141_200_000_000, 327_680, 8000) == 54
    assert impl.texts_that_outweigh(1000, 10, 10) == 11, (
        "ten texts have as many bytes as the weights, and not more"
    )
    found = impl.texts_that_outweigh(10_007 * 10**13 - 1, 10**6, 10**7)
    assert found == 10_007, f"whole numbers: no rounding; {found}, must be 10007"
    for shape in SHAPES:
        weights = int((shape.parameters - shape.unread) * shape.nbytes)
        n = impl.texts_that_outweigh(weights, shape.token_bytes, 777)
        # Seconds for the weights; a step with n texts takes more than twice as long.
        alone = weights / 1e12
        assert (
            decode_seconds(shape, 1e12, 777, n)
            > 2 * alone
            >= decode_seconds(shape, 1e12, 777, n - 1) * (1 - 1e-12)
        )


def of(shape: object) -> tuple[float, int, int]:
    return token_operations(shape), shape.layers, shape.width


@pytest.mark.ex10_2
def test_seconds_of_a_prompt(impl: ModuleType) -> None:
    rate = H100[2]
    for shape in SHAPES:
        for tokens in (1, 1000, 8000):
            whole = impl.prefill_s(*of(shape), tokens, rate)
            expected = floor_of_prefill(shape, rate, tokens)
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
    rate = H100[2]
    for shape in SHAPES:
        for known in (1, 512, 100_000):
            bandwidth = impl.fetch_from(*of(shape), shape.token_bytes, known, rate)
            saved = impl.prefill_s(*of(shape), 2 * known, rate) - impl.prefill_s(
                *of(shape), 2 * known, rate, known
            )
            fetched = known * shape.token_bytes / bandwidth
            what = f"{shape.name}, {known} tokens: at {bandwidth:.3g} bytes/s fetching takes {fetched:.3g} s"
            assert fetched == pytest.approx(saved, rel=1e-9), (
                f"{what}, reading {saved:.3g} s: must be the same"
            )
    llama = SHAPES[-1]
    short, long = (
        impl.fetch_from(*of(llama), llama.token_bytes, known, rate) / 1e9 for known in (1, 131_072)
    )
    assert short == pytest.approx(2.37, abs=0.01) and long == pytest.approx(1.05, abs=0.01)


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
        free = len(self.tables.free)
        self.tables.fork(text, other)
        self.texts[other] = [*self.texts[text]]
        assert len(self.tables.free) == free, (
            f"fork took {free - len(self.tables.free)} blocks, must take none"
        )

    def drop(self, text: str) -> None:
        self.tables.drop(text)
        del self.texts[text]

    def state(self) -> tuple[object, ...]:
        t = self.tables
        return (
            {k: [*v] for k, v in t.table.items()},
            {**t.length},
            sorted(t.free),
            [*getattr(t, "count", [])],
        )

    def extend(self, text: str, n: int) -> bool:
        """Write n tokens; return whether there was room."""
        tables, size, before = self.tables, self.size, self.state()
        length, table, free = tables.length[text], [*tables.table[text]], len(tables.free)
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
            for name, old, new in zip(
                ("table", "length", "free", "count"), before, self.state(), strict=True
            ):
                assert new == old, (
                    f"{what}: a refusal must change nothing, but {name} is {new}, was {old}"
                )
            said = [*map(int, re.findall(r"[0-9]+", str(error)))]
            assert {needed, free} <= {*said}, (
                f"the message must say {needed} needed, {free} free: {str(error)!r}"
            )
            return False
        except IndexError as error:
            pytest.fail(
                f"{what}: needs {needed} blocks, {free} are free: must be a MemoryError, not {error!r}"
            )
        assert len(copies) == shares, f"{what}: {len(copies)} copies, must be {int(shares)}"
        for old, new in copies:
            self.slots[new * size : (new + 1) * size] = self.slots[old * size : (old + 1) * size]
        self.texts[text] += [f"token {t} of {text}" for t in range(length, length + n)]
        for t in range(length, length + n):
            block, place = tables.place(text, t)
            self.slots[block * size + place] = self.texts[text][t]
        return True

    def check(self) -> None:
        tables, size = self.tables, self.size
        assert tables.table.keys() == self.texts.keys(), (
            f"table has {[*tables.table]}, must have {[*self.texts]}"
        )
        assert tables.length.keys() == self.texts.keys(), (
            f"length has {[*tables.length]}, must have {[*self.texts]}"
        )
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
            listed, free = (
                f"block {block}: {', '.join(who) or 'no text'} lists it",
                tables.free.count(block),
            )
            assert free == (not who), (
                f"{listed}, and free has {free} of it, must have {int(not who)}"
            )
            count = getattr(tables, "count", [min(1, len(who))] * self.blocks)[block]
            assert count == len(who), f"{listed}, and its count is {count}, must be {len(who)}"


def use_at_random(pool: Pool, seed: int, *actions: str) -> int:
    """Let up to six texts come, grow and go; return how often there was no room."""
    draw, refused = random.Random(seed), 0
    for step in range(150):
        names = [*pool.texts]
        what = (
            draw.choice(["begin", "extend", "extend", "extend", "drop", *actions])
            if names
            else "begin"
        )
        if what == "begin" and len(names) < 6:
            pool.begin(f"text {step}")
        elif what == "fork" and len(names) < 6:
            pool.fork(draw.choice(names), f"text {step}")
        elif what == "drop":
            pool.drop(draw.choice(names))
        elif what == "extend":
            refused += not pool.extend(draw.choice(names), draw.randint(1, 2 * pool.size))
        pool.check()
    for text in draw.sample([*pool.texts], len(pool.texts)):
        pool.drop(text)
        pool.check()
    return refused


@pytest.mark.ex10_3
def test_block_and_place_of_every_token(impl: ModuleType) -> None:
    tables = impl.BlockTables(9, 4)
    tables.table["a"], tables.length["a"] = [5, 0, 7], 10
    for t in range(10):
        found, must = tables.place("a", t), ((5, 0, 7)[t // 4], t % 4)
        assert found == must, (
            f"table [5, 0, 7], blocks of 4, token {t}: (block, place) is {found}, must be {must}"
        )
    assert tables.slots("a") == [20, 21, 22, 23, 0, 1, 2, 3, 28, 29]


@pytest.mark.ex10_3
@pytest.mark.parametrize("seed", range(20))
def test_tables_lead_to_what_was_written(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 12)
    use_at_random(Pool(impl.BlockTables(blocks, draw.randint(1, 5)), blocks), seed)


@pytest.mark.ex10_3
def test_a_full_pool_refuses_and_changes_nothing(impl: ModuleType) -> None:
    pool = Pool(impl.BlockTables(3, 4), 3)
    for text, n in (("a", 5), ("b", 2)):
        pool.begin(text)
        assert pool.extend(text, n)
    assert not pool.extend("b", 3) and pool.extend("b", 2) and pool.extend("a", 3), (
        "room in its last block is enough"
    )
    pool.drop("a")
    assert pool.extend("b", 8) and not pool.extend("b", 1)
    pool.check()


@pytest.mark.ex10_4
@pytest.mark.parametrize("seed", range(40))
def test_no_shared_block_is_lost_leaked_or_overwritten(impl: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(1, 12)
    use_at_random(Pool(impl.SharedBlocks(blocks, draw.randint(1, 5)), blocks), seed, "fork")


def three_texts(impl: ModuleType) -> Pool:
    """Six tokens in two blocks of four, the second half full, on the tables of three texts."""
    pool = Pool(impl.SharedBlocks(5, 4), 5)
    pool.begin("a")
    pool.extend("a", 6)
    pool.fork("a", "b")
    pool.fork("a", "c")
    return pool


@pytest.mark.ex10_4
def test_the_last_owner_writes_without_a_copy(impl: ModuleType) -> None:
    pool = three_texts(impl)
    for text, free in (("b", 2), ("a", 1), ("c", 1)):
        assert pool.extend(text, 1)
        pool.check()
        found = len(pool.tables.free)
        assert found == free, (
            f"three texts share a block, {text} has written to it: {found} free, must be {free}"
        )


@pytest.mark.ex10_4
@pytest.mark.parametrize("order", ["".join(order) for order in permutations("abc")])
def test_blocks_are_free_when_the_last_owner_goes(impl: ModuleType, order: str) -> None:
    pool = three_texts(impl)
    pool.extend("b", 3)
    for text in order:
        pool.drop(text)
        pool.check()


@pytest.mark.ex10_4
@torch.no_grad()
def test_the_model_reads_from_shared_blocks(impl: ModuleType) -> None:
    model, size = random_model(), 4
    tables = impl.SharedBlocks(12, size)
    pool = [torch.full((2, 2, 12 * size, 16), torch.nan) for _ in range(3)]
    tables.begin("a")
    a = impl.PagedCache(tables, pool, "a")
    draw = torch.Generator().manual_seed(0)
    texts = {"a": torch.randint(100, (1, 10), generator=draw)}
    model(texts["a"], a)
    caches = {"a": a, "b": a.fork("b"), "c": a.fork("c")}
    assert len(tables.free) == 9, "three texts, one prompt, three blocks"
    texts |= {"b": texts["a"], "c": texts["a"]}
    for n in (1, 3, 1, 2):
        for text, cache in caches.items():
            new = torch.randint(100, (1, n), generator=draw)
            logits = model(new, cache)
            texts[text] = torch.cat([texts[text], new], dim=1)
            exact = model(texts[text])[:, -n:]
            assert_close(
                logits,
                exact,
                f"text {text}, {n} tokens after {len(cache) - n}",
                ("row", "token", "logit"),
            )
    assert len(tables.free) == 12 - 2 - 3 * 3, "of 17 tokens each, the first 8 are shared"
    with pytest.raises(MemoryError):
        model(torch.zeros(1, 20, dtype=torch.long), a)
    new = torch.cat([texts["a"], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    assert_close(
        model(new[:, -1:], a),
        model(new)[:, -1:],
        "after a pass that failed",
        ("row", "token", "logit"),
    )


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
        assert found == pytest.approx(expected, abs=1e-12) and expected > 0.2, what
        found = impl.hit_rate(requests, 0)
        assert found == 0, f"no room: nothing can be found, and a share of {found:.3f} is"


@pytest.mark.ex10_5
def test_hit_rate_of_small_caches(impl: ModuleType) -> None:
    for requests, capacity, blocks, why in [
        ([[1, 2, 3], [1, 2, 3]], 3, 3, "all of them fit, and the second time all are found"),
        ([[1, 2, 3], [1, 2, 3]], 2, 2, "the end of a text goes first"),
        ([[1, 2], [3], [1, 2], [4], [1, 2]], 3, 4, "a block that is found is used now"),
        ([[1, 2], [1, 3], [4], [1, 2]], 3, 2, "2 was used longest ago, and 1 wasn't"),
    ]:
        assert_hits(impl, requests, capacity, blocks, why)
    for seed in range(10):
        requests = chains(seed, 80)
        before = [[*request] for request in requests]
        for capacity in range(0, 120, 5):
            found = impl.hit_rate(requests, capacity)
            assert_same(requests, before, "the requests afterwards, which are the caller's")
            if found != by_distance(requests, capacity) / total(requests):
                for n in range(1, len(requests) + 1):  # the shortest beginning shows it best
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


DECODE = """
import importlib.util, json, sys, torch
sys.path.insert(0, sys.argv[2])
spec = importlib.util.spec_from_file_location("impl", sys.argv[1])
impl = importlib.util.module_from_spec(spec)
sys.modules["impl"] = impl
spec.loader.exec_module(impl)
from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_model
torch.set_num_threads(1)
model, fed = load_model("pocket", model_class=GPT), []
ids, cache = impl.receive(sys.stdin.buffer, model)
model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].size(1)))
new = [int(i) for i in generate(model, torch.tensor([ids]), 20, cache=cache)]
print(json.dumps([ids, new, fed]))
"""


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
    stream, sizes, passes = io.BytesIO(), [], []
    hooks = [
        block.register_forward_pre_hook(lambda *_: sizes.append(len(stream.getvalue())))
        for block in pocket.h
    ]
    hooks.append(
        pocket.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[0].size(1)))
    )
    try:
        impl.send(stream, pocket, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    assert passes == [len(prompt)], "one pass over the prompt"
    layer = 2 * 6 * 32 * len(prompt) * 4
    sizes.append(len(stream.getvalue()))
    for i, (before, after) in enumerate(pairwise(sizes)):
        assert after - before >= layer, (
            f"layer {i}: {after - before} bytes of {layer} before the next one is computed"
        )
    size, most = len(stream.getvalue()), 6 * layer + 4000 + 16 * len(prompt)
    assert size <= most, (
        f"{size} bytes for {6 * layer} of keys and values: all else must be at most {most - 6 * layer}"
    )


@pytest.mark.ex10_6
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype(impl: ModuleType, prompt: list[int], dtype: torch.dtype) -> None:
    model, stream, expected = (
        load_model("pocket", model_class=GPT).to(dtype),
        io.BytesIO(),
        KVCache(),
    )
    model(torch.tensor([prompt]), expected)
    impl.send(stream, model, prompt)
    size, most = len(stream.getvalue()), expected.nbytes + 4000 + 16 * len(prompt)
    assert size <= most, (
        f"a model of {dtype}: {size} bytes, must be at most {most}: its keys and values as they are"
    )
    stream.seek(0)
    _, cache = impl.receive(stream, model)
    for found, kv in zip(cache.layers, expected.layers, strict=True):
        assert found.dtype == dtype, f"a model of {dtype}, and a cache of {found.dtype}"
        assert torch.equal(found, kv), (
            f"a model of {dtype}: keys and values have changed on the way"
        )


class Full(io.BytesIO):
    """A stream that takes some writes, and no more."""

    def write(self, data: bytes) -> int:
        if self.tell() > 20_000:
            raise OSError("no space left")
        return super().write(data)


def hooks_of(model: GPT) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.ex10_6
@torch.no_grad()
def test_the_model_stays_as_it_was(impl: ModuleType, prompt: list[int]) -> None:
    model = load_model("pocket", model_class=GPT)
    impl.send(io.BytesIO(), model, prompt)
    assert not hooks_of(model), f"{hooks_of(model)} hooks are left on the model"
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    for training in (True, False):
        impl.send(io.BytesIO(), model.train(training), prompt)
        assert model.training == training, f"training was {training}, and is {model.training}"
    for name, x in model.state_dict().items():
        same = x.dtype == weights[name].dtype and torch.equal(x, weights[name])
        assert same, f"{name} of the model has changed"
    with pytest.raises(OSError, match="no space left"):
        impl.send(Full(), model, prompt)
    assert not hooks_of(model), (
        f"{hooks_of(model)} hooks are left on the model after a write that failed"
    )


@pytest.mark.ex10_6
def test_another_models_cache_is_refused(impl: ModuleType, pocket: GPT, prompt: list[int]) -> None:
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    size = len(stream.getvalue())
    retrained = load_model("pocket", model_class=GPT)
    retrained.h[3].mlp.c_fc.bias.data[0] += 1e-3
    # both have caches of the same shape
    for other in (load_model("pocket-student", model_class=GPT), retrained):
        stream.seek(0)
        try:
            impl.receive(stream, other)
            pytest.fail("the cache of another model was taken")
        except ValueError:
            pass
        assert stream.tell() < size / 2, "refused before keys and values are read"


@pytest.mark.ex10_6
def test_a_stream_that_ends_too_early_is_refused(
    impl: ModuleType, pocket: GPT, prompt: list[int]
) -> None:
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    data = stream.getvalue()
    for end in (0, 5, 1000, len(data) // 3, len(data) // 2, len(data) - 3):
        what = f"a stream that ends after {end} of {len(data)} bytes must be a ValueError"
        try:
            impl.receive(io.BytesIO(data[:end]), pocket)
        except ValueError:
            continue
        except NotImplementedError:
            raise
        except Exception as error:
            pytest.fail(f"{what}, not {error!r}")
        pytest.fail(what)
    ids, cache = impl.receive(io.BytesIO(data), pocket)
    assert ids[:-1] == prompt, "the text is the prompt, then one token"
    assert len(cache) == len(prompt), "the prompt is cached"
    assert_keeps(cache, cache.nbytes + cache.pos.nbytes, "the received cache")
    assert isinstance(cache, KVCache) and isinstance(cache.layers[0], Tensor)
    source = inspect.getsource(impl)
    assert "import pickle" not in source and "torch.load" not in source, (
        "bytes from elsewhere are not to be executed"
    )


@pytest.mark.ex10_6
def test_another_process_goes_on_exactly(impl: ModuleType, pocket: GPT, prompt: list[int]) -> None:
    cold = [int(i) for i in generate(pocket, torch.tensor([prompt]), 21)]
    stream = io.BytesIO()
    impl.send(stream, pocket, prompt)
    result = subprocess.run(
        [sys.executable, "-c", DECODE, impl.__file__, str(ROOT)],
        input=stream.getvalue(),
        capture_output=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr.decode()
    ids, new, fed = json.loads(result.stdout)
    assert ids == [*prompt, cold[0]] and new == cold[1:]
    assert fed == [1] * 20, "the prompt was read once, by the sender"
