"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, 16 tokens after longer
prompts, and its window of two lines.

`python3 -m studies.article` takes about ten minutes on one thread. Weights are random, as in the
article: times don't depend on them, and every way gets the same ones.

Ways: without a cache, with the logits of all positions, as in the article's code, or of the last
one; with a growing and a preallocated cache; and four ways to feed a text to the two lines.

seconds        of the 200 tokens
time           in units of the growing cache's of the same turn: of the 200 tokens; after longer
               prompts, of the tokens after the first
same           the share of tokens that are written without a cache, too
bytes, each    of the cache at the end, and of each of its tokens
wrong          the share of positions whose logits differ from attention to the window's tokens

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from gpt_kv_cache import KVCache
from studies.core import Rows, run
from support.conditions import random_model
from support.timing import TimedText, run_in_turns, time_text
from support.tokenizers import Numbers

PROMPT = "Hello, I am"  # the article's
LONGER = (128, 512, 1000)  # tokens of longer prompts; 16 are written after each
FILES = {
    "all-logits": gpt_baseline,
    "no-cache": gpt_baseline,
    "growing": gpt_kv_cache,
    "preallocated": gpt_bounded_cache,
}
SMALL, WINDOW, TEXT = "4x4x64", 8, 40  # geometry, window and tokens that the two lines are tried on
FULL, QUICK = ("124M", 200, 3), (SMALL, 20, 1)  # geometry, tokens, turns
WRONG = 1e-3  # a position is wrong if a logit is off by more than this share of the largest


# --- Time -------------------------------------------------------------------------------------------


def all_logits(model: gpt_baseline.GPT, ids: Tensor, n: int) -> Iterator[Tensor]:
    """Yield n greedy tokens without a cache, the output head applied to every position as in the
    article's code."""
    for _ in range(n):
        token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)
        yield token
        ids = torch.cat([ids, token], dim=1)


@torch.no_grad()
def written(
    way: str, model: torch.nn.Module, ids: Tensor, n: int, room: int, turn: int
) -> tuple[TimedText, int, int]:
    """Write n greedy tokens after ids (1, T); return them with their times, and the cache's bytes
    and tokens. room: tokens of the preallocated cache."""
    cache = gpt_bounded_cache.SlidingWindowCache(room) if way == "preallocated" else KVCache()
    generate = all_logits if way == "all-logits" else FILES[way].generate
    with_cache = {} if FILES[way] is gpt_baseline else {"cache": cache}
    run = time_text(lambda: generate(model, ids, n, **with_cache))
    return run, cache.nbytes, len(cache)


def times(rows: Rows, ways: list[str], size: str, n: int, turns: int, at: dict[str, int]) -> None:
    """Append the figures of n tokens after the article's prompt, or after the random tokens that
    the setting says."""
    after = at.get("after")
    models = {way: random_model(FILES[way].GPT, size) for way in ways}  # with equal weights
    ids = torch.tensor([Numbers().encode(PROMPT)])  # in GPT-2's tokens
    room = ids.size(1) + n
    if after:
        ids, room = torch.randint(50257, (1, after)), models["growing"].config.n_ctx
    found = run_in_turns(
        {way: partial(written, way, models[way], ids, n, room) for way in ways}, turns
    )
    rows.begin_with(
        f"{size}, random weights",
        models["growing"],
        f"{n} tokens after {'longer prompts' if after else repr(PROMPT)}, turns: {turns}",
    )
    *_, (plain, _, _) = found["no-cache"]
    seconds = {}
    for way, several in found.items():
        runs = [run for run, _, _ in several]
        seconds[way] = [
            run.total_seconds - run.first_token_seconds if after else run.total_seconds
            for run in runs
        ]
    for way, several in found.items():
        run, nbytes, held = several[-1]
        if not after:
            rows.add(way, at, seconds=seconds[way])
        ratios, same = np.divide(seconds[way], seconds["growing"]), np.equal(run.ids, plain.ids)
        rows.add(way, at, time=ratios, same=[same.mean()])
        if held:
            rows.add(way, at, bytes=[nbytes], each=[nbytes / held])


# --- The window of two lines ------------------------------------------------------------------------


class TwoLines(KVCache):
    """The article's window, cache_k = cache_k[:, :, -window_size:, :], on its cache that grows:
    what it holds is cut before attention reads it. counted: positions go on as by its current_pos;
    else they are its cache's length."""

    def __init__(self, window: int, counted: bool) -> None:
        super().__init__()
        self.window, self.counted = window, counted

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        super().append(layer, k, v, pos)
        kv = self.layers[layer] = self.layers[layer][..., -self.window :, :]
        mask = torch.cat([self.pos, pos])[-self.window :] <= pos[:, None]
        return kv[0], kv[1], mask if len(pos) > 1 else None

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        self.pos = self.pos[-self.window :]

    @property
    def next_pos(self) -> int:
        return super().next_pos if self.counted else len(self)


@torch.no_grad()
def window_check() -> dict[str, float]:
    """Return, for four ways of feeding one text, the share of positions whose logits differ from
    attention to the last WINDOW tokens; of a chunk its last position counts, which writes the next
    token."""
    model = random_model(gpt_bounded_cache.GPT, SMALL)
    for parameter in model.parameters():
        parameter.mul_(3)  # else the logits of an untrained model hardly depend on what it reads
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, TEXT), generator=generator)
    expected = model(ids, gpt_bounded_cache.SlidingWindowCache(WINDOW))[0]
    feedings = {
        "token-by-token": [1] * TEXT,
        "by-length": [1] * TEXT,  # positions by the cache's length
        "prompt": [3 * WINDOW] + [1] * (TEXT - 3 * WINDOW),
        "chunks": [5] * (TEXT // 5),
    }
    found = {}
    for name, lengths in feedings.items():
        cache, chunks = TwoLines(WINDOW, name != "by-length"), ids.split(lengths, dim=1)
        got = torch.cat([model(chunk, cache, last_only=True)[0] for chunk in chunks])
        want = expected[torch.tensor(lengths).cumsum(0) - 1]
        close = (got - want).abs().amax(-1) <= WRONG * want.abs().max()  # a NaN isn't
        found[name] = 1 - float(close.float().mean())
    return found


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Rows, quick: bool) -> None:
    """Measure what the rows lack."""
    size, n, turns = QUICK if quick else FULL
    if rows.due(["chunks"], "wrong"):
        rows.begin(
            f"{SMALL} (layers, heads, width), random weights",
            f"a window of {WINDOW}, a text of {TEXT} tokens",
        )
        for way, wrong in window_check().items():
            rows.add(way, {}, wrong=[wrong])
    for after in (0, *LONGER):
        at = {"after": after} if after else {}
        ways = [way for way in FILES if way != "all-logits" or not after]
        if rows.due(ways, "time", **at):
            times(rows, ways, size, 16 if after else n, turns, at)


main = partial(run, __doc__, "article", "20 tokens, at a small geometry", measure, again=False)
