"""Smaller caches beside the exact one: what they cost, what they lose, and where each breaks.

`python3 -m studies.compression` takes about 20 minutes on one thread. Texts are read token
by token, so that every prediction is made from compressed tokens. All of it is measured on pocket, a
GPT-2, and on pocket-llama.

Ways: those of compress.py, each sized for the text at hand; 2 bits the other way round (keys per
token, values per channel); small norms from the third layer on; and, beside pocket, two models that
were trained to hold less: a BCT, which writes to a memory, and grouped heads, which are
pocket-llama with full attention. Metrics, on held-out texts of 512 tokens unless said:

kl, above           KL to the same model's predictions with full attention, in nats; the share by
                    which perplexity exceeds that of pocket, or pocket-llama, with full attention
long                KL in the last 128 of 1,024 tokens
facts               share of questions about facts stated early that are answered right
list                nats per token of a random list when it is read a second time
each                bytes per token of a text of 512
ms                  milliseconds to decode a token after 512

Source: Liu et al. 2024 (KIVI); Devoto et al. 2024 (small norms).
"""

import statistics
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from demos.memories import Memory
from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import held_out_rows, score_answers
from studies.core import Rows, run_study
from support.conditions import random_model
from support.statistics import bootstrap, kl, wilson_interval
from support.timing import run_in_turns

TEXT_COUNT, FACT_COUNT, TURNS = 12, 75, 5  # how many
LENGTH, LONG_LENGTH, LIST_LENGTH = 512, 1024, 48  # tokens


class SwappedAxesCache(compress.QuantizedCache):
    """The same bits the other way round: keys per token, values per channel."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        v, k, mask = super().append(layer, v, k, pos)
        return k, v, mask


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
}


# --- Quality ----------------------------------------------------------------------------------------


def token_nats(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss (B, T - 1) of the predictions (B, T, V) of ids (B, T)."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def measure_quality(
    rows: Rows, setting: dict[str, str], readers: dict[str, Memory], exact: Memory, divisor: int
) -> None:
    """Append how much worse the ways predict than an exact reader. divisor: what the numbers of
    texts and questions are divided by."""
    tokenizer = load_tokenizer("pocket")
    text_count = TEXT_COUNT // divisor
    texts = torch.tensor(held_out_rows(tokenizer, 120, LENGTH)[:text_count])
    long_texts = torch.tensor(held_out_rows(tokenizer, 90, LONG_LENGTH)[: max(1, text_count // 3)])
    questions = corpus.recall_questions("test", FACT_COUNT // divisor)
    generator = torch.Generator().manual_seed(0)
    shape = text_count, LIST_LENGTH
    lists = torch.randint(256, tokenizer.eot_token, shape, generator=generator)
    lists = lists.repeat(1, 2)  # read twice
    exact_logits, exact_late_logits = exact(texts), exact(long_texts)[:, -128:]
    exact_nats = token_nats(exact_logits, texts).double()
    for way, reader in readers.items():
        logits = reader(texts)
        reader_nats = token_nats(logits, texts).double()
        more_nats = (reader_nats - exact_nats).mean(1)
        perplexity_rise = bootstrap(more_nats, lambda nats: np.expm1(nats.mean(-1)))
        rows.add_figures(way, setting, len(texts), above=perplexity_rise)
        late_logits = reader(long_texts)[:, -128:]
        reference, late_reference = exact_logits, exact_late_logits
        if way == "grouped":  # it is exact itself
            reference, late_reference = logits, late_logits
        right_count = round(score_answers(reader, tokenizer, questions)[1] * len(questions))
        rows.add_figures(
            way, setting, len(questions), facts=wilson_interval(right_count, len(questions))
        )
        rows.add_values(
            way,
            setting,
            kl=kl(reference, logits).mean(1).tolist(),
            long=kl(late_reference, late_logits).mean(1).tolist(),
            list=token_nats(reader(lists), lists)[:, LIST_LENGTH:].mean(1).tolist(),
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


def measure_times(rows: Rows, setting: dict[str, str], model: nn.Module, turns: int) -> None:
    """Append the times of the ways that have none yet; the ways take turns."""
    runs = {
        way: partial(milliseconds, model, way) for way in rows.ways_due(CACHES, "ms", **setting)
    }
    for way, turn_milliseconds in run_in_turns(runs, turns).items():
        rows.add_values(way, setting, ms=turn_milliseconds)


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Rows, quick: bool) -> None:
    """Measure every figure that has no row yet."""
    divisor, turns, chunk_length = (12, 1, 64) if quick else (1, TURNS, 1)
    models = {name: load_model(name) for name in ("pocket", "pocket-llama")}
    bct = load_model("pocket-bct", model_class=BCT)
    for name, model in models.items():
        setting = {"model": name}
        rows.set_model_conditions(
            name,
            model,
            f"{TEXT_COUNT // divisor} held-out texts of {LENGTH} tokens, read by {chunk_length} at once",
        )
        readers = {
            way: Memory(way, model, new_cache, chunk_length) for way, new_cache in CACHES.items()
        }
        exact = readers["full"]
        if name == "pocket":
            readers["bct"] = Memory("bct", bct, lambda _: bct.new_cache(), chunk_length)
            llama = models["pocket-llama"]
            readers["grouped"] = Memory("grouped", llama, lambda _: KVCache(), chunk_length)
        if due := rows.ways_due(readers, "kl", **setting):
            measure_quality(rows, setting, {way: readers[way] for way in due}, exact, divisor)
        measure_times(rows, setting, model, turns)
    if not quick:
        large = random_model(GPT, "124M")
        rows.set_model_conditions("124M, random weights", large)
        measure_times(rows, {"model": "124M"}, large, turns)


main = partial(
    run_study, __doc__, "compression", "fewer texts, read in pieces of 64 tokens", measure
)
