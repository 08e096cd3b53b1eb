"""Smaller caches beside the exact one: what they cost, what they lose, and where each breaks.

`python3 -m studies.compression --model smollm2` measures SmolLM2-135M-Instruct on the texts in
data/real, in 70 minutes on one core; without --model, pocket, a GPT-2, and pocket-llama are
measured on texts of their world, in 20 minutes. Texts are read token by token, so that every
prediction is made from compressed tokens.

Ways: those of compress.py, each sized for the text at hand; 2 bits the other way round (keys per
token, values per channel); small norms from the third layer on; a half of the tokens chosen by
chance, with the first 4; 4 sinks and a window in the bytes of 2 bits, or of 4 bits for keys and 2
for values. Metrics, on texts of 512 tokens that the model wasn't trained on, unless said; the
setting `text` is "prose", or, for SmolLM2 in 4 bits, "technical", excerpts of this repository:

kl, above           KL to the same model's predictions with full attention, in nats; the share by
                    which perplexity exceeds that of the model with full attention
facts               share of questions about facts stated in a text that are answered right; texts
                    in data/real are read 16 tokens at once, if they fit into the model's context
half                bytes per token of a text of 512, in half precision

Source: Liu et al. 2024 (KIVI); Devoto et al. 2024 (small norms).
"""

import argparse
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import compress
from demos.memories import SINKS, Memory
from gpt_bounded_cache import SlidingWindowCache
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import score_answers, unseen_texts
from studies.core import RECORDED_MODELS, run_study
from studies.facts import right_answers
from studies.results import Results, Setting
from support.statistics import interval, kl
from support.texts import read_technical_texts, rows_of_tokens

LENGTH = 512  # tokens of a text


class Size(NamedTuple):
    """How many texts are read, and how many tokens at once."""

    texts: int = 12
    chunk_length: int = 1

    @classmethod
    def quick(cls) -> "Size":
        """Return the size of a reduced run."""
        return cls(texts=4, chunk_length=64)


class SwappedAxesCache(compress.QuantizedCache):
    """The same bits the other way round: keys per token, values per channel."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        v, k, mask = super().append(layer, v, k, pos)
        return k, v, mask


class ChanceCache(compress.SmallNormCache):
    """A cache of the first 4 tokens, the latest, and others by chance."""

    def ranks(self, keys: Tensor) -> Tensor:
        """Return as a number for each key one that stays the same and says nothing: the last bits
        of one of its numbers. The first 4 tokens have the smallest."""
        last_bits = keys[..., 0].float().view(torch.int32) & 0xFFF
        last_bits[..., :SINKS] = -1
        return last_bits


def half(length: int) -> tuple[int, int]:
    """Return how many older and latest tokens are half of a text's tokens."""
    cache = compress.small_norm_cache(length, 2)
    return cache.keep, cache.recent


# Functions from a number of tokens to a cache: those of compress.py, and this study's own.
CACHES = {way: kind.new_cache for way, kind in compress.CACHES.items()}
CACHES |= {
    "swapped:2": lambda length: SwappedAxesCache(2),
    "norm:skip": lambda length: compress.SmallNormCache(*half(length), skip=2),
    "chance:half": lambda length: ChanceCache(*half(length)),
}


def half_bytes(memory: Memory) -> float:
    """Return the bytes per token of a text, in half precision."""
    cache = memory.make_cache(LENGTH)
    memory.model(torch.zeros(1, LENGTH, dtype=torch.long), cache)
    return cache.to(dtype=torch.bfloat16).nbytes / LENGTH


def sinks_of_equal_bytes(share: float, length: int) -> SlidingWindowCache:
    """Return sinks and a window of a share of a text's tokens, among them the window's spare slot."""
    return SlidingWindowCache(round(share * length) - SINKS - 1, SINKS)


def measure_losses(
    rows: Results,
    readers: dict[str, Memory],
    ways: Iterable[str],
    texts: list[list[int]],
    setting: Setting,
) -> None:
    """Append how much worse the ways that are due predict texts of equal length than full attention
    does."""
    due = rows.ways_due(ways, "kl", **setting)
    if not due:
        return
    ids = torch.tensor(texts)  # (B, T)
    exact_logits = readers["full"](ids)  # (B, T, V)
    for way in due:
        more_nats, divergences = [], []
        for text, exact, here in zip(ids, exact_logits, readers[way](ids), strict=True):
            losses = [F.cross_entropy(x[:-1], text[1:]) for x in (here, exact)]
            more_nats.append(float(losses[0] - losses[1]))
            divergences.append(float(kl(exact, here).mean()))
        rise = interval(np.array(more_nats), lambda nats: np.expm1(nats.mean(-1)))
        rows.add_figures(way, setting, len(texts), above=rise)
        rows.add_values(way, setting, kl=divergences)


@torch.no_grad()
def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    size = Size.quick() if args.quick else Size()
    for name in ("pocket", "pocket-llama") if args.model == "pocket" else (args.model,):
        model = load_model(name, device=args.device, dtype=args.dtype)
        how = f"{size.texts} texts of {LENGTH} tokens, read by {size.chunk_length} at once"
        rows.set_model_conditions(name, model, how)
        tokenizer, setting = load_tokenizer(name), {"model": name}
        readers = {way: Memory(way, model, CACHES[way], size.chunk_length) for way in CACHES}
        for bits in ("2", "4+2"):
            share = half_bytes(readers[f"bits:{bits}"]) / half_bytes(readers["full"])
            sinks = partial(sinks_of_equal_bytes, share)
            readers[f"sinks:{bits}-bits"] = Memory("", model, sinks, size.chunk_length)
        for way in rows.ways_due(readers, "half", **setting):
            rows.add_values(way, setting, half=[half_bytes(readers[way])])
        texts = unseen_texts(name, tokenizer, size.texts, LENGTH)
        measure_losses(rows, readers, readers, texts, setting)
        if not name.startswith("pocket"):
            texts = rows_of_tokens(tokenizer, LENGTH, read_technical_texts())[: size.texts]
            measure_losses(rows, readers, ["bits:4"], texts, setting | {"text": "technical"})
        for way in rows.ways_due(CACHES, "facts", **setting):
            if name.startswith("pocket"):
                questions = corpus.recall_questions("test", 75)
                right = score_answers(readers[way], tokenizer, questions)[1]
            else:
                right = right_answers(readers[way], tokenizer, quick=args.quick)
            if right:
                rows.add_values(way, setting, facts=right)


main = partial(
    run_study,
    __doc__,
    "compression",
    "fewer texts, read in pieces of 64 tokens",
    measure,
    recorded_models=RECORDED_MODELS,
)
