"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, 16 tokens after longer
prompts, and its sliding window, which is two lines of code.

`python3 -m studies.article` takes about ten minutes on one thread. Weights are random, as in the
article, since times don't depend on them; all ways share them.

Ways: without a cache, computing the logits of all positions, as the article's code does, or of the
last one only; with a growing and a preallocated cache; and four ways to feed a text to the two
lines.

seconds   to write the tokens, after longer prompts all but the first
time      over the growing cache's seconds in the same turn
same      share of tokens equal to those written without a cache
wrong     the share of positions whose logits differ from attention to the window's tokens

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from formats.tokenizers import ARTICLE_PROMPT, Numbers
from gpt_kv_cache import KVCache
from load_gpt2_weights import random_model
from studies.article.claims import LONGER_PROMPTS, SMALL
from studies.core import run_study
from studies.results import Results, Setting
from support.timing import TimedText, run_in_turns, time_text

WINDOW = 8  # of the two lines, and the text on which they are tried
TEXT_LENGTH = 40
MAX_LOGIT_ERROR = 1e-3  # as a share of the largest logit; a position beyond it is wrong


# --- Time -------------------------------------------------------------------------------------------


@torch.no_grad()
def generate_with_all_logits(
    model: gpt_baseline.GPT, ids: Tensor, new_tokens: int
) -> Iterator[Tensor]:
    """Yield greedy tokens without a cache, the output head applied to every position as in the
    article's code."""
    for _ in range(new_tokens):
        token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)
        yield token
        ids = torch.cat([ids, token], dim=1)


class PreallocatedGPT(gpt_bounded_cache.GPT):
    """A GPT whose caches are allocated once."""

    def new_cache(self) -> KVCache:
        return gpt_bounded_cache.PreallocatedCache(self.config.n_ctx)


WAYS = {  # the model, and what writes with it
    "all-logits": (gpt_baseline.GPT, generate_with_all_logits),
    "no-cache": (gpt_baseline.GPT, gpt_baseline.generate),
    "growing": (gpt_kv_cache.GPT, gpt_kv_cache.generate),
    "preallocated": (PreallocatedGPT, gpt_bounded_cache.generate),
}


def write_timed(way: str, model: nn.Module, ids: Tensor, new_tokens: int, turn: int) -> TimedText:
    """Write greedy tokens after ids (1, T)."""
    _, generate = WAYS[way]
    return time_text(lambda: generate(model, ids, new_tokens))


def measure_times(
    rows: Results, geometry: str, ids: Tensor, new_tokens: int, turns: int, setting: Setting
) -> None:
    """Append the figures of writing after ids (1, T): the article's prompt, or a longer one, whose
    length is the setting."""
    ways = [*WAYS][1:] if setting else [*WAYS]
    if not rows.ways_due(ways, "time", **setting):
        return
    models = {way: random_model(WAYS[way][0], geometry) for way in ways}  # equal weights
    runs = {way: partial(write_timed, way, models[way], ids, new_tokens) for way in ways}
    texts = run_in_turns(runs, turns)
    rows.set_model_conditions(
        f"{geometry}, random weights",
        models["growing"],
        f"{new_tokens} new tokens, turns: {turns}",
    )
    seconds = {}
    for way in ways:
        seconds[way] = np.array([text.total_seconds for text in texts[way]])
        if setting:
            seconds[way] -= [text.first_token_seconds for text in texts[way]]
    for way in ways:
        same = np.equal(texts[way][-1].ids, texts["no-cache"][-1].ids).mean()
        time = seconds[way] / seconds["growing"]
        rows.add_values(way, setting, seconds=seconds[way], same=[same], time=time)


# --- The window of two lines ------------------------------------------------------------------------


class TwoLines(KVCache):
    """The article's sliding window, cache_k = cache_k[:, :, -window_size:, :], on its growing
    cache: the cache is cut before attention reads it. Positions count all tokens read, as the
    article's current_pos does."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        super().append(layer, k, v, pos)
        kv = self.layers[layer] = self.layers[layer][..., -WINDOW:, :]
        mask = torch.cat([self.pos, pos])[-WINDOW:] <= pos[:, None]
        return kv[0], kv[1], mask

    def commit(self, pos: Tensor) -> None:
        super().commit(pos)
        self.pos = self.pos[-WINDOW:]


class TwoLinesByLength(TwoLines):
    """The same, with positions that begin at the cache's length."""

    def positions(self, T: int) -> Tensor:
        return len(self) + torch.arange(T)


FEEDINGS = {  # the cache, and the lengths of the passes that read one text
    "token-by-token": (TwoLines, [1] * TEXT_LENGTH),
    "by-length": (TwoLinesByLength, [1] * TEXT_LENGTH),
    "prompt": (TwoLines, [3 * WINDOW] + [1] * (TEXT_LENGTH - 3 * WINDOW)),
    "chunks": (TwoLines, [5] * (TEXT_LENGTH // 5)),
}


@torch.no_grad()
def measure_two_lines(rows: Results) -> None:
    """Append, by feeding, the share of positions whose logits differ from attention to the last
    WINDOW tokens. In a pass only the last position counts, since it predicts the next token."""
    model = random_model(gpt_bounded_cache.GPT, SMALL["model"])
    for parameter in model.parameters():
        parameter.mul_(3)  # else the logits of an untrained model hardly depend on what it reads
    ids = torch.randint(model.config.vocab_size, (1, TEXT_LENGTH))
    expected = model(ids, gpt_bounded_cache.SlidingWindowCache(WINDOW))[0]
    for way, (make_cache, lengths) in FEEDINGS.items():
        cache, chunks = make_cache(), ids.split(lengths, dim=1)
        logits = torch.cat([model(chunk, cache, last_only=True)[0] for chunk in chunks])
        errors = (logits - expected[np.cumsum(lengths) - 1]).abs().amax(-1)
        right = errors <= MAX_LOGIT_ERROR * expected.abs().max()  # a NaN isn't
        rows.add_values(way, SMALL, wrong=(~right).tolist())


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Results, quick: bool) -> None:
    """Measure every figure that has no row yet."""
    if rows.ways_due(FEEDINGS, "wrong", **SMALL):
        rows.set_conditions(
            f"{SMALL['model']} (layers, heads, width), random weights",
            f"a window of {WINDOW}, a text of {TEXT_LENGTH} tokens",
        )
        measure_two_lines(rows)
    geometry, new_tokens, turns = (SMALL["model"], 20, 1) if quick else ("124M", 200, 3)
    prompt = torch.tensor([Numbers().encode(ARTICLE_PROMPT)])  # in GPT-2's tokens
    measure_times(rows, geometry, prompt, new_tokens, turns, {})
    for length in LONGER_PROMPTS:
        ids = torch.randint(50257, (1, length))
        measure_times(rows, geometry, ids, 16, turns, {"after": length})


main = partial(run_study, __doc__, "article", "20 tokens, at a small geometry", measure)
