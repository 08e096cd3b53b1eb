"""Chapter 9: a check finds every bug of its family, and accepts whatever is right."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import torch

import gpt_kv_cache
from chapters.checking import fail

spec = importlib.util.spec_from_file_location("zoo", Path(__file__).with_name("zoo.py"))
zoo = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zoo)

GIVEN = ("gpt_baseline",)


@pytest.fixture(autouse=True)
def _the_same_every_time() -> Iterator[None]:
    """Memory that nobody has written holds the same numbers in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def changed(file: str, *changes: tuple[str, str]) -> ModuleType:
    """A file of the project as a module, some of its text replaced."""
    text = (zoo.ROOT / file).read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{file} holds {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return zoo.module_of(text)


def body(file: str, name: str) -> str:
    """The source of a function or of a method, Class.method; nothing if there is none of this name."""
    text = (zoo.ROOT / file).read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    for part in name.split("."):
        node = next((node for node in nodes if getattr(node, "name", None) == part), None)
        if node is None:
            return ""
        nodes = getattr(node, "body", [])
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def must_accept(check: Callable[[ModuleType], object], module: ModuleType, name: str) -> None:
    try:
        check(module)
    except AssertionError as error:
        fail(f"{check.__name__} refuses a module that is right: {name}. {error}")


def must_find(check: Callable[[ModuleType], object], bug: ModuleType, name: str) -> None:
    try:
        check(bug)
    except NotImplementedError:
        raise
    except Exception:  # a failed assertion, or the module itself
        return
    fail(f"{check.__name__} doesn't find this: {name}")


KV = "gpt_kv_cache.py"
RING = "gpt_bounded_cache.py"
SDPA = """F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal,  # NEW
                                           dropout_p=self.dropout * self.training)"""
WRITTEN_OUT = (
    "((q.double() @ k.double().mT / math.sqrt(self.head_dim)).masked_fill(~(mask if mask is not None else"
    " torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril() | (not causal)), -math.inf).softmax(-1).nan_to_num()"
    " @ v.double()).to(v.dtype)"
)
OTHER_APPEND = """    def append(self, layer, k, v, pos):
        if self.pos.numel():
            old = self.layers[layer].narrow(3, 0, self.pos.numel())
            k, v = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
        both = torch.stack((k, v))
        self.layers = [*self.layers[:layer], both, *self.layers[layer + 1 :]]
        return both[0], both[1], torch.arange(k.size(2)) < pos[:, None] + 1"""
OTHER_WORDS = [
    ('f"can\'t keep {n} tokens of {len(self)}"', '"no"'),
    ('f"{T} tokens after {n_read}: {limits}"', '"no"'),
]
# Right, and written differently: in higher precision, with other words, with another bookkeeping.
RIGHT = {
    "gpt_kv_cache.py": lambda: changed(KV),
    "gpt_bounded_cache.py": lambda: changed(RING),
    "softmax written out in float64": lambda: changed(KV, (SDPA, WRITTEN_OUT)),
    "another append, other words": lambda: changed(
        KV, (body(KV, "KVCache.append"), OTHER_APPEND), *OTHER_WORDS
    ),
}
ORDERED = """    def append(self, layer, k, v, pos):
        kv = torch.stack([k, v])
        if len(self):
            held = self.layers[layer][..., : len(self.pos), :]
            if held.dtype != kv.dtype or held.shape[1:3] != kv.shape[1:3]:
                raise ValueError("no")
            kv = torch.cat([held, kv], 3)
        self.pending[layer:] = [kv.detach()]
        return kv[0], kv[1], self.visible(torch.cat([self.pos, pos]), pos[:, None])"""
ORDERED_COMMIT = """    def commit(self, pos):
        both = torch.cat([self.pos, pos])
        keep = ((both < self.sinks) | (both > both[-1] - self.window)).nonzero()[:, 0]
        self.layers, self.pos = [kv[..., keep, :] for kv in self.pending], both[keep]
        self.n_read, self.pending = self.n_read + len(pos), []"""
RIGHT_RINGS = {
    "gpt_bounded_cache.py": lambda: changed(RING),
    "softmax written out in float64": lambda: changed(RING, (SDPA, WRITTEN_OUT)),
    "a list in order of positions, no ring": lambda: changed(
        RING,
        (body(RING, "SlidingWindowCache.append"), ORDERED),
        (body(RING, "SlidingWindowCache.commit"), ORDERED_COMMIT),
    ),
}


def planted(*names: str) -> dict[str, Callable[[], ModuleType]]:
    """Mutants of tests/mutants, by what their entries say about them."""
    return {zoo.BUGS[name].why: partial(zoo.mutant, name) for name in names}


MASK = "mask = torch.cat([self.pos, pos]) <= pos[:, None]"
HELD = "self.layers[layer][..., : len(self), :]"
CHUNKS = planted(
    "kv_causal_with_cached_keys",
    "kv_mask_of_the_chunk_only",
    "kv_mask_sees_only_old",
    "kv_single_query_is_causal",
    "kv_position_starts_over",
) | {
    "A token of a later piece sees all of that piece, also what comes after it.": lambda: changed(
        KV, (MASK, MASK.replace("pos[:, None]", "pos[-1:, None]"))
    ),
    "A later piece of two tokens gets no mask, a longer one does.": lambda: changed(
        KV, ("            if len(pos) > 1:", "            if len(pos) > 2:")
    ),
    "From the third piece on, all rows of a batch read the first row's keys.": lambda: changed(
        KV,
        (
            "        return kv[0], kv[1], mask  # NEW",
            "        late = getattr(self, 'pieces', 0) > 1\n"
            "        return (kv[0][:1].expand_as(kv[0]) if late else kv[0]), kv[1], mask",
        ),
        (
            "        self.pos = torch.cat([self.pos, pos]) if len(self) else pos  # NEW",
            "        self.pieces = getattr(self, 'pieces', 0) + 1\n"
            "        self.pos = torch.cat([self.pos, pos]) if len(self) else pos",
        ),
    ),
    "What is read from the cache is the first layer's, in every layer.": lambda: changed(
        KV, (f"torch.cat([{HELD}", f"torch.cat([{HELD.replace('[layer]', '[0]')}")
    ),
    "last_only gives the logits of the piece's first token.": lambda: changed(
        KV, ("x[:, -1:] if last_only", "x[:, :1] if last_only")
    ),
    "The cache rounds what the second piece has brought to half precision.": lambda: changed(
        KV,
        (
            "            self.layers[layer] = kv",
            "            self.layers[layer] = kv.half().to(k.dtype)",
        ),
    ),
    "The cache rounds keys and values to half precision.": lambda: changed(
        KV,
        (
            "kv, mask = torch.stack([k, v]), None",
            "kv, mask = torch.stack([k, v]).half().to(k.dtype), None",
        ),
    ),
}
LAST = """        logits = self.head(x[:, -1:] if last_only else x)  # NEW
        if cache is not None:  # NEW
            cache.commit(pos)  # NEW  last of all: a failure above leaves the cache as it was
"""
COPIED = "[kv[..., : len(self), :].to(device, dtype, copy=True) for kv in self.layers]"


def early(when: str) -> str:
    """The end of GPT.forward, with the tokens counted before the head in some cases."""
    head = LAST.splitlines()[0]
    return f"""        early = cache is not None and {when}
        if early:
            cache.commit(pos)
{head}
        if cache is not None and not early:
            cache.commit(pos)
"""


def too_long(what: str) -> tuple[str, str]:
    """What a pass that doesn't fit does to the cache before it is refused."""
    limits = '            limits = f"must be at least 1'
    return limits, f"            if cache is not None:\n                cache.{what}\n{limits}"


STATES = planted(
    "kv_failed_pass_stays",
    "kv_commits_too_early",
    "kv_clone_shares_memory",
    "kv_truncate_forgets_the_positions",
    "kv_truncate_keeps_the_memory",
    "kv_bounds_of_the_chunk_only",
) | {
    "An interruption in the second layer leaves something behind.": lambda: changed(
        KV,
        (
            f"torch.cat([{HELD}",
            f"torch.cat([{HELD.replace(': len(self)', ': None if layer else len(self)')}",
        ),
    ),
    "A clone shares the memory of the second layer.": lambda: changed(
        KV,
        (
            "[kv[..., : len(self), :].to(device, dtype, copy=True) for kv in self.layers]",
            "[kv[..., : len(self), :].to(device, dtype, copy=not i) for i, kv in enumerate(self.layers)]",
        ),
    ),
    "truncate() keeps the last n tokens, not the first.": lambda: changed(
        KV, ("kv[..., :n, :].clone()", "kv[..., len(self) - n :, :].clone()")
    ),
    "truncate() takes any n for the nearest that can be.": lambda: changed(
        KV,
        (
            "        if not 0 <= n <= len(self):",
            "        n = min(max(n, 0), len(self))\n        if False:",
        ),
    ),
    "truncate() refuses, when half of the tokens are gone.": lambda: changed(
        KV,
        (
            "        if not 0 <= n <= len(self):",
            "        if not 0 <= n <= len(self):\n            half = len(self) // 2\n"
            "            self.layers, self.pos = [kv[..., :half, :] for kv in self.layers], self.pos[:half]",
        ),
    ),
    "A very first pass that is interrupted leaves layers behind, and the next one adds its own.": lambda: (
        changed(
            KV,
            (
                "            del self.layers[layer:]  # NEW  what a failed pass left\n"
                "            self.layers.append(kv)",
                "            self.layers.insert(layer, kv)",
            ),
        )
    ),
    "An interruption before the head leaves the tokens counted, if the cache was empty.": lambda: (
        changed(KV, (LAST, early("n_read == 0")))
    ),
    "A pass that doesn't fit is an IndexError.": lambda: changed(
        KV, ('raise ValueError(f"{T} tokens after', 'raise IndexError(f"{T} tokens after')
    ),
    "A pass that doesn't fit is refused, and empties the cache.": lambda: changed(
        KV, too_long("truncate(0)")
    ),
    "A clone lacks the last token.": lambda: changed(
        KV,
        (
            "return KVCache(layers, self.pos.to(device, copy=True))",
            "return KVCache(layers, self.pos[:-1].clone())",
        ),
    ),
    "Tokens fed to a clone are the original's, too.": lambda: changed(
        KV,
        (
            f"        layers = {COPIED}  # NEW\n        return KVCache(layers, self.pos.to(device, copy=True))",
            "        other = KVCache(pos=self.pos)\n        other.layers = self.layers\n        return other",
        ),
    ),
    "A pass of one token that is interrupted before the head is counted.": lambda: changed(
        KV, (LAST, early("T == 1"))
    ),
    "truncate() to all tokens is refused.": lambda: changed(
        KV, ("        if not 0 <= n <= len(self):", "        if not 0 <= n < len(self):")
    ),
    "truncate() keeps a token more.": lambda: changed(
        KV,
        (
            "        self.pos = self.pos[:n].clone()  # NEW",
            "        self.pos = self.pos[: n + 1].clone()",
        ),
    ),
    "truncate(0) changes nothing.": lambda: changed(
        KV,
        (
            "        if not 0 <= n <= len(self):",
            "        if n == 0:\n            return\n        if not 0 <= n <= len(self):",
        ),
    ),
    "truncate() raises an IndexError for an impossible n.": lambda: changed(
        KV, ("raise ValueError(f\"can't keep", "raise IndexError(f\"can't keep")
    ),
}
WRITE = "                ring[..., slots, :] = kv[..., held[slots] - n, :]"
KEEP = "        if not 0 <= n <= len(self) or (evicted and 0 < n < len(self)):"


def listed(pos: str) -> list[tuple[str, str]]:
    """What cache.pos lists, in the place of x, the positions that are held; the cache itself doesn't look at it."""
    line = "    def __len__(self) -> int:  # RING"
    properties = f"""    @property
    def pos(self):
        x = self.held(len(self))
        return {pos} if len(self) else x

    @pos.setter
    def pos(self, pos):
        pass

    def positions(self, T):
        return self.n_read + torch.arange(T)

{line}"""
    return [
        (line, properties),
        ("self.pos.to(pos)", "self.held(n).to(pos)"),
    ]


SEEN = "(k_pos > pos - self.window) | (k_pos < self.sinks)"
# What check_ring isn't asked for: gradients, and NaN in a slot that is hidden.
OTHERS = {"ring_keeps_the_graph", "ring_writes_in_place_in_training", "ring_reads_what_nobody_sees"}
RINGS = planted(*(name for name in zoo.BUGS if name.startswith("ring") and name not in OTHERS)) | {
    "The window is one token short, always.": lambda: changed(
        RING, (SEEN, SEEN.replace("pos - self.window", "pos - max(1, self.window - 1)"))
    ),
    "Sinks are kept, and not seen.": lambda: changed(RING, (SEEN, "k_pos > pos - self.window")),
    "Within a piece, the window is forgotten.": lambda: changed(
        RING, (SEEN, SEEN.replace("pos - self.window", "pos.min() - self.window"))
    ),
    "The window is one token too long in the second layer.": lambda: changed(
        RING,
        (
            "        return kv[0], kv[1], self.visible(k_pos.to(pos), pos[:, None])  # RING",
            "        self.window += layer > 0\n        mask = self.visible(k_pos.to(pos), pos[:, None])\n"
            "        self.window -= layer > 0\n        return kv[0], kv[1], mask",
        ),
    ),
    "Within a piece, a token sees those after it.": lambda: changed(
        RING,
        (
            "return (k_pos <= pos) & (",
            "return (k_pos <= (pos if isinstance(pos, int) else pos.max())) & (",
        ),
    ),
    "A piece longer than the window leaves its first tokens in the slots.": lambda: changed(
        RING,
        (
            WRITE,
            "                many = kv.size(3) > self.window\n                which = held[slots] - n\n"
            "                ring[..., slots, :] = kv[..., which - which.min() if many else which, :]",
        ),
    ),
    "cache.pos lists slots, not positions.": lambda: changed(RING, *listed("torch.arange(len(x))")),
    "cache.pos lists all tokens that were read.": lambda: changed(
        RING, *listed("torch.arange(len(self))")
    ),
    "A single token that is interrupted before the head is counted.": lambda: changed(
        RING, (LAST, early("T == 1"))
    ),
    "A piece that is interrupted before the head is counted.": lambda: changed(
        RING, (LAST, early("T > 1"))
    ),
    "A clone begins empty.": lambda: changed(
        RING,
        (
            "        other.n_read, other.pos = len(self), self.pos.to(device, copy=True)  # RING\n        return other",
            "        return type(self)(self.window, self.sinks)",
        ),
    ),
    "truncate() refuses what could be kept.": lambda: changed(
        RING, (KEEP, KEEP.replace("(evicted and", "("))
    ),
    "truncate() keeps what it can't.": lambda: changed(
        RING, (KEEP, "        if not 0 <= n <= len(self):")
    ),
    "truncate(0) is refused once tokens were evicted.": lambda: changed(
        RING, (KEEP, KEEP.replace("and 0 < n <", "and n <"))
    ),
    "truncate() raises an IndexError for what is evicted.": lambda: changed(
        RING,
        (
            "raise ValueError(f\"can't keep {n} tokens of {len(self)}, {evicted}",
            "raise IndexError(f\"can't keep {n} tokens of {len(self)}, {evicted}",
        ),
    ),
    "Once 16 tokens were read, a token in a chunk sees one token more.": lambda: changed(
        RING,
        (
            "        return kv[0], kv[1], self.visible(k_pos.to(pos), pos[:, None])  # RING",
            "        late = len(pos) > 1 and len(self) >= 16\n        self.window += late\n"
            "        mask = self.visible(k_pos.to(pos), pos[:, None])\n"
            "        self.window -= late\n        return kv[0], kv[1], mask",
        ),
    ),
    "A cache of another batch size is taken.": lambda: changed(
        RING, ("        self.check(ring, kv)", "        self.check(ring[:, :1], kv[:, :1])")
    ),
    "A cache of another dtype is taken.": lambda: changed(
        RING, ("        self.check(ring, kv)", "        self.check(ring, kv.to(ring.dtype))")
    ),
}
GENERATES = planted(
    "kv_reads_everything_again", "kv_feeds_the_last_token_only", "kv_forgotten_reset"
) | {
    "Once the context has been full, every token reads all of it again.": lambda: changed(
        KV, ("            cached_from = start  # NEW", "            pass")
    ),
    "A cache that is given isn't used.": lambda: changed(
        KV, ("cache = model.new_cache() if cache is None else cache", "cache = model.new_cache()")
    ),
    "A cache of as many tokens as ids is taken, and emptied.": lambda: changed(
        KV,
        (
            "ids.size(1) <= len(cache):  # NEW",
            "ids.size(1) <= len(cache):\n        cache.truncate(0)\n    if False:",
        ),
    ),
    "All rows go on with the first row's token.": lambda: changed(
        KV,
        (
            "        yield next_id",
            "        next_id = next_id[:1].expand_as(next_id)\n        yield next_id",
        ),
    ),
    "A prompt longer than the context is read from its end on, as much as fits.": lambda: changed(
        KV,
        (
            "        start = context_start(ids.size(1), model.context)",
            "        start = context_start(ids.size(1), model.context)\n"
            "        if ids.size(1) > model.context and not len(cache):\n"
            "            start = ids.size(1) - model.context",
        ),
    ),
    "When the context is full, half of it is a token less.": lambda: changed(
        KV, ("    half = (n_ctx + 1) // 2", "    half = n_ctx // 2 - 1")
    ),
    "When the context is full, generation ends.": lambda: changed(
        KV,
        (
            "        if start > cached_from:  # NEW",
            "        if start > cached_from and len(cache):\n            return\n"
            "        if start > cached_from:  # NEW",
        ),
    ),
    "When the context is full, the rest is read token by token.": lambda: changed(
        KV,
        (
            "        logits = model(ids[:, start + len(cache) :], cache",
            "        while start and start + len(cache) < ids.size(1) - 1:\n"
            "            model(ids[:, start + len(cache) : start + len(cache) + 1], cache)\n"
            "        logits = model(ids[:, start + len(cache) :], cache",
        ),
    ),
    "The last token is read, too.": lambda: changed(
        KV,
        (
            "        ids = torch.cat([ids, next_id], dim=1)  # (B, T + 1)",
            "        ids = torch.cat([ids, next_id], dim=1)\n    if len(cache) and len(cache) < model.context:\n"
            "        model(ids[:, -1:], cache)",
        ),
    ),
    "When the context is full, a new cache takes the place of the given one.": lambda: changed(
        KV, ("            cache.truncate(0)  # NEW", "            cache = model.new_cache()")
    ),
    "Once the context has been full twice, the second row goes on with the first row's token.": lambda: (
        changed(
            KV,
            (
                "        yield next_id",
                "        if cached_from > 8:\n            next_id = next_id[:1].expand_as(next_id)\n"
                "        yield next_id",
            ),
        )
    ),
    "At the end the cache has the right length, and all of its numbers are 0.": lambda: changed(
        KV,
        (
            "        ids = torch.cat([ids, next_id], dim=1)  # (B, T + 1)",
            "        ids = torch.cat([ids, next_id], dim=1)\n    for kv in cache.layers:\n        kv.zero_()",
        ),
    ),
    "A cache of too many tokens is refused, and emptied.": lambda: changed(
        KV,
        (
            '        raise ValueError(f"ids, {lengths}")',
            '        cache.truncate(0)\n        raise ValueError(f"ids, {lengths}")',
        ),
    ),
}


def code(module: ModuleType, name: str) -> list[object]:
    """What a function, property or method, Class.method, is compiled to; nothing for a class."""
    found = attrgetter(name)(module)
    codes, bodies = [getattr(inspect.unwrap(getattr(found, "fget", found)), "__code__", None)], []
    for code in filter(None, codes):
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]  # functions within it
        bodies.append(
            (code.co_code, code.co_names, [str(x) for x in code.co_consts if x not in codes])
        )
    return bodies


@pytest.mark.ex9_1
def test_suspects(impl: ModuleType) -> None:
    named = impl.suspects()
    letters = sorted(zoo.SPECIMENS)
    assert sorted(named) == letters, f"the reports are {letters}"
    for name in named.values():
        second_name = not body(KV, name) and attrgetter(name)(gpt_kv_cache)
        hint = f"is a second name: of which `def`, in {KV}?" if second_name else f"isn't in {KV}"
        assert body(KV, name), f"{name} {hint}"
    right = sum(
        code(zoo.specimen(letter), named[letter]) != code(gpt_kv_cache, named[letter])
        for letter in letters
    )
    if right < len(letters):
        fail(f"{right} of {len(letters)} are right")


@pytest.mark.ex9_2
@pytest.mark.parametrize("name", RIGHT)
def test_check_chunks_accepts_what_is_right(impl: ModuleType, name: str) -> None:
    must_accept(impl.check_chunks, RIGHT[name](), name)


@pytest.mark.ex9_2
@pytest.mark.parametrize("name", CHUNKS)
def test_check_chunks_finds(impl: ModuleType, name: str) -> None:
    must_find(impl.check_chunks, CHUNKS[name](), name)


@pytest.mark.ex9_3
@pytest.mark.parametrize("name", RIGHT)
def test_check_state_accepts_what_is_right(impl: ModuleType, name: str) -> None:
    must_accept(impl.check_state, RIGHT[name](), name)


@pytest.mark.ex9_3
@pytest.mark.parametrize("name", STATES)
def test_check_state_finds(impl: ModuleType, name: str) -> None:
    must_find(impl.check_state, STATES[name](), name)


@pytest.mark.ex9_4
@pytest.mark.parametrize("name", RIGHT_RINGS)
def test_check_ring_accepts_what_is_right(impl: ModuleType, name: str) -> None:
    must_accept(impl.check_ring, RIGHT_RINGS[name](), name)


@pytest.mark.ex9_4
@pytest.mark.parametrize("name", RINGS)
def test_check_ring_finds(impl: ModuleType, name: str) -> None:
    must_find(impl.check_ring, RINGS[name](), name)


@pytest.mark.ex9_5
@pytest.mark.parametrize("name", RIGHT)
def test_check_generate_accepts_what_is_right(impl: ModuleType, name: str) -> None:
    must_accept(impl.check_generate, RIGHT[name](), name)


@pytest.mark.ex9_5
@pytest.mark.parametrize("name", GENERATES)
def test_check_generate_finds(impl: ModuleType, name: str) -> None:
    must_find(impl.check_generate, GENERATES[name](), name)
