"""Smaller caches beside the exact one: what they cost, what they lose, and where each breaks.

`python3 -m studies.compression --model smollm2` measures SmolLM2-135M-Instruct on the texts in
data/real, in an hour on one core; without --model, pocket, a GPT-2, and pocket-llama are measured
on texts of their world, in 20 minutes. Texts are read token by token, so that every prediction is
made from compressed tokens.

Ways: those of compress.py, each sized for the text at hand; 2 bits the other way round (keys per
token, values per channel); small norms from the third layer on; a half of the tokens chosen by
chance, with the first 4; and, beside pocket, two models that were trained to hold less: a BCT,
which writes to a memory, and grouped heads, which are pocket-llama with full attention. Metrics, on
texts of 512 tokens that the model wasn't trained on, unless said:

kl, above           KL to the same model's predictions with full attention, in nats; the share by
                    which perplexity exceeds that of the model with full attention
facts               share of questions about facts stated in a text that are answered right; texts
                    in data/real are read 16 tokens at once
each                bytes per token of a text of 512
ms                  milliseconds to decode a token after 512, at GPT-2 124M's size

Source: Liu et al. 2024 (KIVI); Devoto et al. 2024 (small norms).
"""

import argparse
import statistics
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from demos.memories import SINKS, Memory
from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import load_model, load_tokenizer, random_model
from pocket import corpus
from pocket.evaluation import score_answers, unseen_texts
from studies.core import RECORDED_MODELS, run_study
from studies.facts import right_answers
from studies.results import Results
from support.statistics import interval, kl
from support.timing import run_in_turns

LENGTH, TURNS = 512, 5  # tokens of a text; turns of the times


class Size(NamedTuple):
    """How much is read and answered; chunk_length: the tokens that are read at once."""

    texts: int = 12
    questions: int = 75  # about pocket's world; about data/real all are asked, or two
    chunk_length: int = 1


QUICK = Size(texts=4, questions=6, chunk_length=64)


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


def half_by_chance(length: int) -> KVCache:
    """Return a cache that keeps half of a text's tokens by chance."""
    sized_alike = compress.small_norm_cache(length, 2)
    return ChanceCache(sized_alike.keep, sized_alike.recent)


def small_norms_from_layer_three(length: int) -> KVCache:
    """Return a cache that keeps half of a text's tokens from the third layer on."""
    cache = compress.small_norm_cache(length, 2)
    cache.skip = 2
    return cache


# Functions from a number of tokens to a cache: those of compress.py, and this study's own.
CACHES = {way: kind.new_cache for way, kind in compress.CACHES.items()}
CACHES |= {
    "swapped:2": lambda length: SwappedAxesCache(2),
    "norm:skip": small_norms_from_layer_three,
    "chance:half": half_by_chance,
}


# --- Time -------------------------------------------------------------------------------------------


@torch.no_grad()
def milliseconds(model: nn.Module, way: str, turn: int, new_tokens: int = 16) -> float:
    """Return the mean milliseconds of a new token after a prompt of LENGTH, read in one pass."""
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(256, model.config.vocab_size, (1, LENGTH + new_tokens), generator=generator)
    cache = CACHES[way](LENGTH + new_tokens)
    model(ids[:, :LENGTH], cache, last_only=True)
    return statistics.mean(compress.read_in_pieces(model, cache, ids[:, LENGTH:])[1])


def measure_times(rows: Results) -> None:
    """Append the times of the ways that have none yet, at GPT-2 124M's size; the ways take turns."""
    model = random_model(GPT, "124M")
    rows.set_model_conditions("124M, random weights", model)
    ways = rows.ways_due(CACHES, "ms", model="124M")
    runs = {way: partial(milliseconds, model, way) for way in ways}
    for way, turn_milliseconds in run_in_turns(runs, TURNS).items():
        rows.add_values(way, {"model": "124M"}, ms=turn_milliseconds)


# --- Quality ----------------------------------------------------------------------------------------


def readers_of(name: str, model: nn.Module, size: Size) -> dict[str, Memory]:
    """Return a model with each cache; and beside pocket those trained to hold less."""
    chunk_length = size.chunk_length
    readers = {
        way: Memory(way, model, new_cache, chunk_length) for way, new_cache in CACHES.items()
    }
    if name == "pocket":
        where = {"device": model.wte.weight.device, "dtype": model.wte.weight.dtype}
        bct = load_model("pocket-bct", model_class=BCT, **where)
        llama = load_model("pocket-llama", **where)
        readers["bct"] = Memory("bct", bct, lambda _: bct.new_cache(), chunk_length)
        readers["grouped"] = Memory("grouped", llama, lambda _: KVCache(), chunk_length)
    return readers


@torch.no_grad()
def measure_quality(rows: Results, name: str, readers: dict[str, Memory], size: Size) -> None:
    """Append how much worse the ways that are due predict than a model with full attention."""
    tokenizer, setting = load_tokenizer(name), {"model": name}
    texts = torch.tensor(unseen_texts(name, tokenizer, size.texts, LENGTH))
    exact_logits = readers["full"](texts)  # (B, T, V)
    for way in rows.ways_due(readers, "kl", **setting):
        logits = readers[way](texts)
        more_nats, divergences = [], []
        for text, exact, here in zip(texts, exact_logits, logits, strict=True):  # to save memory
            losses = [F.cross_entropy(x[:-1], text[1:]) for x in (here, exact)]
            more_nats.append(float(losses[0] - losses[1]))
            reference = here if way == "grouped" else exact  # those heads are exact themselves
            divergences.append(float(kl(reference, here).mean()))
        rise = interval(np.array(more_nats), lambda nats: np.expm1(nats.mean(-1)))
        rows.add_figures(way, setting, len(texts), above=rise)
        if name.startswith("pocket"):
            questions = corpus.recall_questions("test", size.questions)
            _, right = score_answers(readers[way], tokenizer, questions)
        else:
            right = right_answers(readers[way], tokenizer, quick=size == QUICK)
        rows.add_share(way, setting, "facts", right)
        bytes_per_token = readers[way].nbytes(LENGTH) / LENGTH
        rows.add_values(way, setting, each=[bytes_per_token], kl=divergences)


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    size = QUICK if args.quick else Size()
    for name in ("pocket", "pocket-llama") if args.model == "pocket" else (args.model,):
        model = load_model(name, device=args.device, dtype=args.dtype)
        rows.set_model_conditions(
            name,
            model,
            f"{size.texts} texts of {LENGTH} tokens, read by {size.chunk_length} at once",
        )
        readers = readers_of(name, model, size)
        if rows.ways_due(readers, "kl", model=name):
            measure_quality(rows, name, readers, size)
    if args.model == "pocket" and not args.quick:
        measure_times(rows)


main = partial(
    run_study,
    __doc__,
    "compression",
    "fewer texts, read in pieces of 64 tokens",
    measure,
    recorded_models=RECORDED_MODELS,
)
