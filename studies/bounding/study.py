"""What the memories of gpt_bounded_cache.py remember: perplexity, BLEU and early facts, side by side.

`python3 -m studies.bounding` takes about ten minutes on one thread; `--model smollm2`, in ten
minutes, reads the texts in data/real in windows, with and without sinks, by SmolLM2-135M-Instruct,
which can't have a BCT's memory without training. `studies.pretraining` adds models that are built
with a memory, and `studies.lengths` its time. `python3 gpt_bounded_cache.py`
shows one text in all memories.

Ways: full attention; window and sinks, with as many bytes as a BCT's memory, or of as many tokens
as the setting `window` says, sinks included; ours, a BCT by our rule. Pocket is fine-tuned for ours;
the other ways use it as it is. Metrics, on held-out texts:

perplexity, above   perplexity of documents, and the share by which it exceeds full attention's
long                perplexity of a stretch of texts longer than the context; it ends at the token
                    that the setting tokens=n says
text                perplexity of texts read whole, which all count alike: those in data/real, or
                    texts of 1,024 tokens of the pocket world
bleu, lost          BLEU of explanations against the corpus's own, and points below full attention's
facts               share of questions about facts stated early that are answered right
bytes               bytes of one text's cache

Source: Yi et al. 2024 (BCT).
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos.memories import SINKS, Memory, memories_of
from formats.tokenizers import END_OF_TEXT
from gpt_bounded_cache import KVCache, SlidingWindowCache, context_start
from load_gpt2_weights import load_tokenizer
from pocket import corpus
from pocket.evaluation import document_losses, held_out_rows, score_answers, unseen_texts
from studies.bounding.claims import (
    WINDOWS,
    bleu_from_scratch,
    delta_rule,
    our_rule,
    recall,
    text_quality,
)
from studies.core import RECORDED_MODELS, load_chosen_model, run_study
from studies.results import Results, Setting
from support.printing import end_tokens_of
from support.statistics import bleu, bleu_counts, interval, perplexity
from support.texts import read_texts


class Size(NamedTuple):
    """How much is read that a model wasn't trained on."""

    texts: int = 24  # of the long ones, and of those that are read in windows
    documents: int = 150  # and as many questions about facts
    explanations: int = 96


QUICK = Size(texts=2, documents=8, explanations=4)
LONG_ENDS = (80, 160, 320, 640, 1280, 2560, 3840, 5120)  # of the stretches of a long text


# --- Quality ----------------------------------------------------------------------------------------


@torch.no_grad()
def stream_losses(memory: Memory, tokens: list[int]) -> Tensor:
    """Return the loss in nats (T - 1,) of every token of a text but the first. The text may have any
    length: it is read as generate() reads it, in contexts of which all but the first begin with half
    of the one before."""
    ids = torch.tensor([tokens], device=memory.wte.weight.device)  # (1, T)
    logits, read = [], 0
    while read < len(tokens) - 1:
        start = context_start(read + 1, memory.model.context)
        end = min(len(tokens) - 1, start + memory.model.context)  # a BCT's context is unlimited
        logits.append(memory(ids[:, start:end])[0, read - start :])
        read = end
    return F.cross_entropy(torch.cat(logits).float(), ids[0, 1:], reduction="none")


def perplexity_rise(nats_and_tokens: np.ndarray) -> np.ndarray:
    """Return the share (...,) by which the first perplexity exceeds the second, from the nats and
    tokens (..., texts, 2, 2) of both."""
    return perplexity(nats_and_tokens[..., 0, :]) / perplexity(nats_and_tokens[..., 1, :]) - 1


def bleu_loss(counts: np.ndarray) -> np.ndarray:
    """Return the points (...,) by which the first BLEU is below the second, from the counts (...,
    texts, 2, 10) of both."""
    return bleu(counts[..., 1, :]) - bleu(counts[..., 0, :])


@cache
def count_texts(memory: Memory, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Return the nats and tokens (documents, 2) of documents, and the counts (explanations, 10) from
    which BLEU is computed, for explanations written with a memory."""
    tokenizer = load_tokenizer("pocket")
    nats, counts = [], []
    for losses in document_losses(memory, tokenizer, "test", size.documents):
        nats.append([float(losses.double().sum()), len(losses)])
    for question in corpus.explain_questions("test", size.explanations):
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        new_ids = memory.write(ids, 220, stop_ids=end_tokens_of(tokenizer))[0].tolist()
        text = tokenizer.decode(new_ids).removesuffix(END_OF_TEXT)
        counts.append(bleu_counts(text, question.answer))
    return np.array(nats), np.array(counts)


def measure_quality(
    rows: Results, setting: Setting, memories: dict[str, Memory], size: Size
) -> None:
    """Append the missing figures of the memories, on held-out texts, beside those of full
    attention."""
    tokenizer = load_tokenizer("pocket")
    questions = corpus.recall_questions("test", size.documents)
    for way in rows.ways_due(memories, "facts", **setting):
        memory = memories[way]
        nats, counts = count_texts(memory, size)
        full_nats, full_counts = count_texts(memories["full"], size)
        _, right = score_answers(memory, tokenizer, questions)
        rows.add_values(way, setting, bytes=[memory.nbytes(memory.config.n_ctx)])
        rows.add_figures(
            way,
            setting,
            size.documents,
            perplexity=interval(nats, perplexity),
            above=interval(np.stack([nats, full_nats], 1), perplexity_rise),
        )
        rows.add_figures(
            way,
            setting,
            size.explanations,
            bleu=interval(counts, bleu),
            lost=interval(np.stack([counts, full_counts], 1), bleu_loss),
        )
        rows.add_values(way, setting, facts=right)


def measure_long_texts(rows: Results, memories: dict[str, Memory], size: Size) -> None:
    """Append the perplexity of texts that are longer than the context, by distance from their
    beginning."""
    tokenizer, length = load_tokenizer("pocket"), LONG_ENDS[-1]
    texts = [held_out_rows(tokenizer, 64, length + 1, seed)[0] for seed in range(1, size.texts + 1)]
    for way in rows.ways_due(memories, "long", tokens=length):
        losses = torch.stack([stream_losses(memories[way], text) for text in texts])
        for start, end in pairwise((0, *LONG_ENDS)):
            nats = losses[:, start:end].mean(1).tolist()
            rows.add_values(way, {"tokens": end}, long=nats)


def measure_windows(rows: Results, name: str, model: nn.Module, size: Size) -> None:
    """Append the perplexity of whole texts with full attention, and in windows with and without
    sinks; each token is seen within the window, however the text is divided into passes."""
    tokenizer = load_tokenizer(name)
    if name.startswith("pocket"):
        texts = unseen_texts(name, tokenizer, size.texts, 1024)
    else:
        texts = [tokenizer.encode_ordinary(text) for text in read_texts().values()][: size.texts]
    rows.set_model_conditions(
        name, model, f"{len(texts)} texts of up to {max(map(len, texts)):,} tokens"
    )

    @cache
    def nats_of(new_cache: Callable[[], KVCache]) -> list[float]:
        memory = Memory("", model, lambda _: new_cache(), chunk_length=128)
        return [float(stream_losses(memory, text).mean()) for text in texts]

    for width in WINDOWS:
        setting = {"model": name, "window": width}
        caches = {
            "full": KVCache,  # read once for all windows
            "window": partial(SlidingWindowCache, width),
            "sinks": partial(SlidingWindowCache, width - SINKS, SINKS),
        }
        for way in rows.ways_due(caches, "text", **setting):
            rows.add_values(way, setting, text=nats_of(caches[way]))


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Append the figures of windows, and those of pocket's memories."""
    model, _ = load_chosen_model(args)
    size = QUICK if args.quick else Size()
    measure_windows(rows, args.model, model, size)
    if args.model != "pocket":
        return
    memories = memories_of("pocket")
    rows.set_model_conditions(
        "pocket",
        memories["full"].model,
        f"the BCT, {memories['ours'].config.slots} slots + {memories['ours'].config.recent} recent, is "
        "pocket fine-tuned on pocket's own predictions; "
        "full attention is pocket as it is, where that fine-tuning would begin at a loss of 0",
        f"{size.documents} held-out documents, {size.explanations} explanations",
    )
    measure_quality(rows, {}, memories, size)
    measure_long_texts(rows, memories, size)


main = partial(
    run_study,
    __doc__,
    "bounding",
    "fewer and shorter texts",
    measure,
    recorded_models=RECORDED_MODELS,
    beyond=[recall, our_rule, delta_rule, bleu_from_scratch, text_quality],
)
