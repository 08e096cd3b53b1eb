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
long                KL in the last 128 of 1,024 tokens
facts               share of questions about facts stated in a text that are answered right; texts
                    in data/real are read 16 tokens at once
list                nats per token of a random list when it is read a second time
each                bytes per token of a text of 512
ms                  milliseconds to decode a token after 512

Source: Liu et al. 2024 (KIVI); Devoto et al. 2024 (small norms).
"""

import argparse
import statistics
from functools import partial
from typing import NamedTuple

import numpy as np
import tiktoken
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
from support.statistics import bootstrap, kl
from support.timing import run_in_turns

LENGTH, LONG_LENGTH, LATE, LIST_LENGTH = 512, 1024, 128, 48  # tokens


class Size(NamedTuple):
    """How much is read, answered and timed; chunk_length: the tokens that are read at once."""

    texts: int = 12
    questions: int = 75  # about pocket's world; about data/real all are asked, or two
    turns: int = 5
    chunk_length: int = 1


QUICK = Size(texts=1, questions=6, turns=1, chunk_length=64)


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


# --- Quality ----------------------------------------------------------------------------------------


def token_nats(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss (B, T - 1) of the predictions (B, T, V) of ids (B, T), text by text to save
    memory."""
    losses = [
        F.cross_entropy(of_text[:-1], text[1:], reduction="none")
        for of_text, text in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses)


class Texts(NamedTuple):
    """Texts that a model wasn't trained on, in tokens (B, T), and of random tokens, read twice."""

    texts: Tensor
    long_texts: Tensor
    lists: Tensor


def texts_for(name: str, tokenizer: tiktoken.Encoding, count: int) -> Texts:
    """Return so many texts for a model; pocket's long ones are a third."""
    long_count = count // 3 if name.startswith("pocket") else count
    texts = unseen_texts(name, tokenizer, count, LENGTH)
    long_texts = unseen_texts(name, tokenizer, max(1, long_count), LONG_LENGTH)
    generator = torch.Generator().manual_seed(0)
    shape = count, LIST_LENGTH
    lists = torch.randint(256, tokenizer.n_vocab - 1, shape, generator=generator)
    return Texts(torch.tensor(texts), torch.tensor(long_texts), lists.repeat(1, 2))


def answer_facts(name: str, reader: Memory, tokenizer: tiktoken.Encoding, size: Size) -> list[bool]:
    """Return for each question about facts whether it is answered right."""
    if name.startswith("pocket"):
        questions = corpus.recall_questions("test", size.questions)
        return score_answers(reader, tokenizer, questions)[1]
    return right_answers(reader, tokenizer, quick=size == QUICK)


class Reading(NamedTuple):
    """What a reader predicts: the logits (B, T, V) of the texts, and those of the last positions of
    the long ones."""

    logits: Tensor
    late_logits: Tensor


@torch.no_grad()
def read_all(reader: Memory, texts: Texts) -> Reading:
    """Let a reader read the texts and the long ones."""
    return Reading(reader(texts.texts), late_logits(reader, texts.long_texts))


def late_logits(reader: Memory, ids: Tensor) -> Tensor:
    """Return the logits (B, LATE, V) of the last positions of ids (B, T)."""
    cache = reader.make_cache(ids.size(1))
    beginning, end = ids[:, :-LATE], ids[:, -LATE:]
    for tokens in beginning.split(reader.chunk_length, dim=1):
        reader.model(tokens, cache, last_only=True)
    return compress.read_in_pieces(reader.model, cache, end, reader.chunk_length)[0]


def divergence(expected: Tensor, logits: Tensor) -> list[float]:
    """Return the mean KL(expected || logits) of each text, text by text to save memory."""
    return [float(kl(*pair).mean()) for pair in zip(expected, logits, strict=True)]


@torch.no_grad()
def measure_quality(
    rows: Results, name: str, way: str, reader: Memory, texts: Texts, exact: Reading, size: Size
) -> None:
    """Append how much worse a way predicts than the model `name` with full attention."""
    tokenizer, setting = load_tokenizer(name), {"model": name}
    reading = read_all(reader, texts)
    more_nats = token_nats(reading.logits, texts.texts) - token_nats(exact.logits, texts.texts)
    perplexity_rise = bootstrap(more_nats.double().mean(1), lambda nats: np.expm1(nats.mean(-1)))
    reference = reading if way == "grouped" else exact  # those heads are exact themselves
    rows.add_figures(way, setting, len(more_nats), above=perplexity_rise)
    rows.add_share(way, setting, "facts", answer_facts(name, reader, tokenizer, size))
    rows.add_values(
        way,
        setting,
        kl=divergence(reference.logits, reading.logits),
        long=divergence(reference.late_logits, reading.late_logits),
        list=token_nats(reader(texts.lists), texts.lists)[:, LIST_LENGTH:].mean(1).tolist(),
        each=[reader.nbytes(LENGTH) / LENGTH],
    )


# --- Time -------------------------------------------------------------------------------------------


@torch.no_grad()
def milliseconds(model: nn.Module, way: str, turn: int, new_tokens: int = 16) -> float:
    """Return the mean milliseconds of a new token after a prompt of LENGTH, read in one pass."""
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(256, model.config.vocab_size, (1, LENGTH + new_tokens), generator=generator)
    cache = CACHES[way](LENGTH + new_tokens)
    model(ids[:, :LENGTH], cache, last_only=True)
    return statistics.mean(compress.read_in_pieces(model, cache, ids[:, LENGTH:])[1])


def measure_times(rows: Results, setting: dict[str, str], model: nn.Module, turns: int) -> None:
    """Append the times of the ways that have none yet; the ways take turns."""
    runs = {
        way: partial(milliseconds, model, way) for way in rows.ways_due(CACHES, "ms", **setting)
    }
    for way, turn_milliseconds in run_in_turns(runs, turns).items():
        rows.add_values(way, setting, ms=turn_milliseconds)


# --- The study --------------------------------------------------------------------------------------


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


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    size = QUICK if args.quick else Size()
    names = ("pocket", "pocket-llama") if args.model == "pocket" else (args.model,)
    for name in names:
        model = load_model(name, device=args.device, dtype=args.dtype)
        rows.set_model_conditions(
            name,
            model,
            f"{size.texts} texts of {LENGTH} tokens, read by {size.chunk_length} at once",
        )
        readers = readers_of(name, model, size)
        if due := rows.ways_due(readers, "kl", model=name):
            texts = texts_for(name, load_tokenizer(name), size.texts)
            exact = read_all(readers["full"], texts)
            for way in due:
                measure_quality(rows, name, way, readers[way], texts, exact, size)
        measure_times(rows, {"model": name}, model, size.turns)
    if args.model == "pocket" and not args.quick:
        large = random_model(GPT, "124M")
        rows.set_model_conditions("124M, random weights", large)
        measure_times(rows, {"model": "124M"}, large, size.turns)


main = partial(
    run_study,
    __doc__,
    "compression",
    "fewer texts, read in pieces of 64 tokens",
    measure,
    recorded_models=RECORDED_MODELS,
)
