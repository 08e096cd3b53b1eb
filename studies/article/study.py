"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, 16 tokens after longer
prompts, and its sliding window, which is two lines of code.

`python3 -m studies.article` takes about ten minutes on one thread. Weights are random, as in the
article, since times don't depend on them; all ways share them. What a step computes is counted on a
smaller model.

Ways: without a cache, computing the logits of all positions, as the article's code does, or of the
last one only; with a growing and a preallocated cache; and four ways to feed a text to the two
lines.

seconds   to write the 200 tokens
time      over the growing cache's in the same turn: for the 200 tokens, or, after longer prompts,
          for all new tokens but the first
computed  tokens whose keys and values a step computes, by steps, and
reused    those that it finds in the cache
same      share of tokens equal to those written without a cache
wrong     the share of positions whose logits differ from attention to the window's tokens

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from formats.tokenizers import Numbers
from gpt_kv_cache import KVCache
from load_gpt2_weights import random_model
from studies.article.claims import LONGER_PROMPTS, SMALL
from studies.core import run_study
from studies.results import Results
from support.timing import TimedText, run_in_turns, time_text

PROMPT = "Hello, I am"  # the article's
MODULES = {
    "all-logits": gpt_baseline,
    "no-cache": gpt_baseline,
    "growing": gpt_kv_cache,
    "preallocated": gpt_bounded_cache,
}
GEOMETRY_NOTE = f"{SMALL['model']} (layers, heads, width), random weights"
WINDOW = 8  # of the two lines, and the text on which they are tried
TEXT_LENGTH = 40
MAX_LOGIT_ERROR = 1e-3  # as a share of the largest logit; a position beyond it is wrong


class Size(NamedTuple):
    """A geometry, the tokens written after the article's prompt, and how often."""

    geometry: str = "124M"
    new_tokens: int = 200
    turns: int = 3

    @classmethod
    def quick(cls) -> "Size":
        """Return the size of a reduced run."""
        return cls(SMALL["model"], 20, 1)


# --- Time -------------------------------------------------------------------------------------------


def generate_with_all_logits(
    model: gpt_baseline.GPT, ids: Tensor, new_tokens: int
) -> Iterator[Tensor]:
    """Yield greedy tokens without a cache, the output head applied to every position as in the
    article's code."""
    for _ in range(new_tokens):
        token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)
        yield token
        ids = torch.cat([ids, token], dim=1)


@torch.no_grad()
def write_timed(
    way: str, model: nn.Module, ids: Tensor, new_tokens: int, capacity: int, turn: int
) -> TimedText:
    """Write greedy tokens after ids (1, T). capacity: tokens of the preallocated cache."""
    cache = gpt_bounded_cache.PreallocatedCache(capacity) if way == "preallocated" else KVCache()
    generate = generate_with_all_logits if way == "all-logits" else MODULES[way].generate
    cache_option = {} if MODULES[way] is gpt_baseline else {"cache": cache}
    return time_text(lambda: generate(model, ids, new_tokens, **cache_option))


def measure_times(rows: Results, size: Size, prompt_length: int = 0) -> None:
    """Append the figures of writing after the article's prompt, or after a prompt of so many random
    tokens."""
    if prompt_length:
        prompt, setting, new_tokens = "longer prompts", {"after": prompt_length}, 16
        ids = torch.randint(50257, (1, prompt_length))
        ways = ["no-cache", "growing", "preallocated"]
    else:
        prompt, setting, new_tokens = repr(PROMPT), {}, size.new_tokens
        ids = torch.tensor([Numbers().encode(PROMPT)])  # in GPT-2's tokens
        ways = [*MODULES]
    if not rows.ways_due(ways, "time", **setting):
        return
    models = {way: random_model(MODULES[way].GPT, size.geometry) for way in ways}  # equal weights
    capacity = models["growing"].config.n_ctx if prompt_length else ids.size(1) + new_tokens
    runs = {way: partial(write_timed, way, models[way], ids, new_tokens, capacity) for way in ways}
    texts = run_in_turns(runs, size.turns)
    rows.set_model_conditions(
        f"{size.geometry}, random weights",
        models["growing"],
        f"{new_tokens} tokens after {prompt}, turns: {size.turns}",
    )
    seconds = {}
    for way in ways:
        seconds[way] = np.array([text.total_seconds for text in texts[way]])
        if prompt_length:
            seconds[way] -= [text.first_token_seconds for text in texts[way]]
        else:
            rows.add_values(way, setting, seconds=seconds[way])
    for way in ways:
        same = np.equal(texts[way][-1].ids, texts["no-cache"][-1].ids).mean()
        time = seconds[way] / seconds["growing"]
        rows.add_values(way, setting, same=[same], time=time)


# --- States -----------------------------------------------------------------------------------------


def states_of_steps(way: str, new_tokens: int) -> list[tuple[int, int]]:
    """Return of each step the tokens whose keys and values it computes, and those whose it reuses,
    as the attention of the last layer is given them."""
    model, counts = random_model(MODULES[way].GPT, SMALL["model"]), []

    def count(_: nn.Module, q_k_v: tuple[Tensor, ...]) -> None:
        q, k, *_ = q_k_v
        counts.append((q.size(2), k.size(2) - q.size(2)))

    model.h[-1].attn.register_forward_pre_hook(count)
    write_timed(way, model, torch.tensor([Numbers().encode(PROMPT)]), new_tokens, 0, 0)
    return counts


def measure_states(rows: Results, new_tokens: int) -> None:
    """Append the tokens that each step computes and reuses."""
    rows.set_conditions(GEOMETRY_NOTE, f"{new_tokens} tokens after {PROMPT!r}")
    for way in rows.ways_due(["no-cache", "growing"], "reused", **SMALL):
        computed, reused = zip(*states_of_steps(way, new_tokens), strict=True)
        rows.add_values(way, SMALL, computed=computed, reused=reused)


# --- The window of two lines ------------------------------------------------------------------------


class TwoLines(KVCache):
    """The article's sliding window, cache_k = cache_k[:, :, -window_size:, :], on its growing
    cache: the cache is cut before attention reads it. counts_positions: whether positions count all
    tokens read, as the article's current_pos does; else they begin at the cache's length."""

    def __init__(self, window: int, counts_positions: bool) -> None:
        super().__init__()
        self.window, self.counts_positions = window, counts_positions

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

    def positions(self, T: int) -> Tensor:
        return super().positions(T) if self.counts_positions else len(self) + torch.arange(T)


FEEDINGS = {  # lengths of the passes that read one text
    "token-by-token": [1] * TEXT_LENGTH,
    "by-length": [1] * TEXT_LENGTH,  # positions by the cache's length
    "prompt": [3 * WINDOW] + [1] * (TEXT_LENGTH - 3 * WINDOW),
    "chunks": [5] * (TEXT_LENGTH // 5),
}


@torch.no_grad()
def wrong_shares_of_two_lines() -> dict[str, float]:
    """Return, by feeding, the share of positions whose logits differ from attention to the last
    WINDOW tokens. In a pass only the last position counts, since it predicts the next token."""
    model = random_model(gpt_bounded_cache.GPT, SMALL["model"])
    for parameter in model.parameters():
        parameter.mul_(3)  # else the logits of an untrained model hardly depend on what it reads
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, TEXT_LENGTH), generator=generator)
    expected = model(ids, gpt_bounded_cache.SlidingWindowCache(WINDOW))[0]
    wrong_shares = {}
    for name, lengths in FEEDINGS.items():
        cache, chunks = TwoLines(WINDOW, name != "by-length"), ids.split(lengths, dim=1)
        logits = torch.cat([model(chunk, cache, last_only=True)[0] for chunk in chunks])
        expected_logits = expected[torch.tensor(lengths).cumsum(0) - 1]
        errors = (logits - expected_logits).abs().amax(-1)
        right = errors <= MAX_LOGIT_ERROR * expected_logits.abs().max()  # a NaN isn't
        wrong_shares[name] = 1 - float(right.float().mean())
    return wrong_shares


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Results, quick: bool) -> None:
    """Measure every figure that has no row yet."""
    if rows.ways_due(FEEDINGS, "wrong", **SMALL):
        rows.set_conditions(
            GEOMETRY_NOTE,
            f"a window of {WINDOW}, a text of {TEXT_LENGTH} tokens",
        )
        for way, wrong_share in wrong_shares_of_two_lines().items():
            rows.add_values(way, SMALL, wrong=[wrong_share])
    size = Size.quick() if quick else Size()
    measure_states(rows, size.new_tokens)
    for prompt_length in (0, *LONGER_PROMPTS):
        measure_times(rows, size, prompt_length)


main = partial(run_study, __doc__, "article", "20 tokens, at a small geometry", measure)
