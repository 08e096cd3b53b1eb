"""What the memories of gpt_bounded_cache.py remember: perplexity, BLEU and early facts, side by side.

`python3 -m studies.bounding` takes about ten minutes on one thread; `--model smollm2`, in ten
minutes, reads the texts in data/real in windows, with and without sinks, by SmolLM2-135M-Instruct,
which can't have a BCT's memory without training. `studies.recall` and `studies.pretraining` add
models that are built with a memory, and `studies.lengths` its time. `python3 gpt_bounded_cache.py`
shows one text in all memories.

Ways: full attention; window and sinks, with as many bytes as a BCT's memory, or of as many tokens
as the setting `window` says, sinks included; ours, a BCT by our rule. Pocket is fine-tuned for ours;
the other ways use it as it is. Metrics, on held-out texts:

perplexity, above   perplexity of documents, and the share by which it exceeds full attention's
long                perplexity of texts longer than the context; in the setting tokens=n, of one
                    stretch of them that ends at token n
text                perplexity of texts read whole, which all count alike: those in data/real, or
                    texts of 1,024 tokens of the pocket world
bleu, lost          BLEU of explanations against the corpus's own, and points below full attention's
facts               share of questions about facts stated early that are answered right
bytes               bytes of one text's cache

Source: Yi et al. 2024 (BCT).
"""

import argparse
from functools import cache, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos.memories import SINKS, Memory, memories_of
from formats.tokenizers import END_OF_TEXT
from gpt_bounded_cache import KVCache, SlidingWindowCache, context_start
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import score_answers, token_losses, unseen_texts
from studies.bounding.claims import bleu_from_scratch, delta_rule, our_rule, recall, text_quality
from studies.core import RECORDED_MODELS, run_study
from studies.results import Results, Setting
from support.printing import end_tokens_of
from support.statistics import bleu, bleu_counts, interval, perplexity
from support.texts import read_texts

WINDOWS = (64, 128, 256, 512)  # tokens
TEXT_COUNT = 12  # of pocket's texts that are read in windows


class Size(NamedTuple):
    """How many held-out texts are read, and how many contexts long the long ones are."""

    documents: int = 150
    facts: int = 150
    explanations: int = 96
    long_texts: int = 24
    contexts: int = 4


QUICK = Size(documents=8, facts=8, explanations=4, long_texts=2, contexts=2)


# --- Quality ----------------------------------------------------------------------------------------


@torch.no_grad()
def stream_losses(memory: Memory, tokens: list[int]) -> Tensor:
    """Return the loss in nats (T - 1,) of every token of a text but the first. The text may have any
    length: it is read as generate() reads it, in contexts of which all but the first begin with half
    of the one before."""
    ids = torch.tensor([tokens], device=memory.wte.weight.device)  # (1, T)
    losses, read = [], 0
    while read < len(tokens) - 1:
        start = context_start(read + 1, memory.model.context)
        end = min(len(tokens) - 1, start + memory.model.context)  # a BCT's context is unlimited
        logits = memory(ids[:, start:end])[0, read - start :].float()
        losses.append(F.cross_entropy(logits, ids[0, read + 1 : end + 1], reduction="none"))
        read = end
    return torch.cat(losses)


def perplexity_rise(nats_and_tokens: np.ndarray) -> np.ndarray:
    """Return the share (...,) by which the first perplexity exceeds the second, from the nats and
    tokens (..., texts, 2, 2) of both."""
    return perplexity(nats_and_tokens[..., 0, :]) / perplexity(nats_and_tokens[..., 1, :]) - 1


def bleu_loss(counts: np.ndarray) -> np.ndarray:
    """Return the points (...,) by which the first BLEU is below the second, from the counts (...,
    texts, 2, 10) of both."""
    return bleu(counts[..., 1, :]) - bleu(counts[..., 0, :])


def explanation_counts(
    memory: Memory, tokenizer: Any, questions: list[corpus.Question]
) -> np.ndarray:
    """Return the counts (questions, 10) from which BLEU is computed, for answers written with a
    memory."""
    counts = []
    for question in questions:
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        new_ids = memory.write(ids, 220, stop_ids=end_tokens_of(tokenizer))[0].tolist()
        text = tokenizer.decode(new_ids).removesuffix(END_OF_TEXT).strip()
        counts.append(bleu_counts(text, question.answer))
    return np.array(counts)


def measure_quality(
    rows: Results,
    setting: Setting,
    memories: dict[str, Memory],
    tokenizer: Any,
    size: Size,
) -> None:
    """Append the missing figures of the memories, on held-out texts. The first memory is full
    attention, with which the others are compared."""
    documents = corpus.documents("test", size.documents)
    token_ids = [[*tokenizer.encode_ordinary(d.text), tokenizer.eot_token] for d in documents]
    explanation_questions = corpus.explain_questions("test", size.explanations)
    recall_questions = corpus.recall_questions("test", size.facts)
    due = rows.ways_due(memories, "facts", **setting)
    if not due:
        return
    reference, *_ = memories
    for way in dict.fromkeys([reference, *due]):
        memory = memories[way]
        losses = [token_losses(memory, text) for text in token_ids]
        nats = np.array([[float(loss.double().sum()), len(loss)] for loss in losses])
        counts = explanation_counts(memory, tokenizer, explanation_questions)
        if way == reference:
            full_nats, full_counts = nats, counts
        if way not in due:
            continue
        _, right = score_answers(memory, tokenizer, recall_questions)
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


def measure_long_texts(
    rows: Results, memories: dict[str, Memory], tokenizer: Any, size: Size
) -> None:
    """Append the perplexity of texts that are longer than the context: of the whole texts, and by
    distance from their beginning."""
    n_ctx = next(iter(memories.values())).config.n_ctx
    text_length, texts = size.contexts * n_ctx + 1, []
    for text_number in range(size.long_texts):
        text, document_numbers = [], count(1000 * text_number)
        while len(text) < text_length:
            document = corpus.document("test", next(document_numbers), seed=1)
            text += [*tokenizer.encode_ordinary(document.text), tokenizer.eot_token]
        texts.append(text[:text_length])
    interval_ends = [0, *(n_ctx >> i for i in (4, 3, 2, 1)), *range(n_ctx, text_length, n_ctx)]
    for way in rows.ways_due(memories, "long"):
        memory = memories[way]
        mean_nats = torch.stack([stream_losses(memory, text) for text in texts]).mean(0)
        rows.add_figures(way, {}, len(texts), long=[mean_nats.mean().exp().item()])
        for start, end in pairwise(interval_ends):
            interval_perplexity = mean_nats[start:end].mean().exp().item()
            rows.add_figures(way, {"tokens": end}, len(texts), long=[interval_perplexity])


def measure_windows(rows: Results, name: str, model: nn.Module, quick: bool) -> None:
    """Append the perplexity of whole texts with full attention, and in windows with and without
    sinks; each token is seen within the window, however the text is divided into passes."""
    tokenizer, widths = load_tokenizer(name), WINDOWS[:2] if quick else WINDOWS
    if name.startswith("pocket"):
        texts = unseen_texts(name, tokenizer, TEXT_COUNT, 1024)
    else:
        texts = [tokenizer.encode_ordinary(text) for text in read_texts().values()]
    texts = texts[: 2 if quick else None]
    lengths = sorted({min(map(len, texts)), max(map(len, texts))})  # one, if all are alike
    rows.set_model_conditions(
        name, model, f"{len(texts)} texts of {' to '.join(map(str, lengths))} tokens"
    )

    @cache
    def nats_of(cache_class: type[KVCache], *sizes: int) -> list[float]:
        memory = Memory("", model, lambda _: cache_class(*sizes), chunk_length=128)
        return [float(stream_losses(memory, text).mean()) for text in texts]

    for width in widths:
        setting = {"model": name, "window": width}
        caches = {
            "full": (KVCache,),
            "window": (SlidingWindowCache, width),
            "sinks": (SlidingWindowCache, width - SINKS, SINKS),
        }
        for way in rows.ways_due(caches, "text", **setting):
            rows.add_values(way, setting, text=nats_of(*caches[way]))


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Append the figures of windows, and those of pocket's memories."""
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    measure_windows(rows, args.model, model, args.quick)
    if args.model != "pocket":
        return
    size = QUICK if args.quick else Size()
    memories, tokenizer = memories_of("pocket"), load_tokenizer("pocket")
    bct = memories["ours"].config
    rows.set_model_conditions(
        "pocket",
        memories["full"].model,
        f"the BCT, {bct.slots} slots + {bct.recent} recent, is pocket fine-tuned on pocket's own predictions; "
        "full attention is pocket as it is, where that fine-tuning would begin at a loss of 0",
        f"{size.documents} held-out documents, {size.explanations} explanations",
    )
    measure_quality(rows, {}, memories, tokenizer, size)
    measure_long_texts(rows, memories, tokenizer, size)


main = partial(
    run_study,
    __doc__,
    "bounding",
    "fewer and shorter texts",
    measure,
    recorded_models=RECORDED_MODELS,
    beyond=[recall, our_rule, delta_rule, bleu_from_scratch, text_quality],
)
