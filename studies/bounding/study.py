"""What the memories of gpt_bounded_cache.py remember: perplexity, BLEU and early facts, side by side.

`python3 -m studies.bounding` takes about ten minutes on one thread; `studies.recall` and
`studies.pretraining` add models that are built with a memory, and `studies.lengths` its time.
`python3 gpt_bounded_cache.py` shows one text in all memories, by demo() below.

Ways: full attention; window and sinks, with as many bytes as a BCT's memory; ours, a BCT by our
rule, fine-tuned for it, where the others run on pocket as it is. Metrics, on held-out texts:

perplexity, above   of documents; by which share it is above full attention's
long                perplexity of texts longer than the context; of their tokens up to one, since
                    the one before
bleu, lost          of explanations, against the corpus's own; points lost to full attention
facts               share of the questions answered right on facts that were stated early
bytes               of a text's cache

Source: Yi et al. 2024 (BCT).
"""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress
from gpt_bounded_cache import BCT, GPT, KVCache, SlidingWindowCache, context_start, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import answers, nats_of
from studies.core import Rows, Setting, run
from support.statistics import bleu, bleu_counts, bootstrap, perplexity, wilson
from support.tokenizers import END_OF_TEXT

SINKS = 4
SLOTS = 37  # of a window with the bytes of pocket-bct's memory, one of them spare


class Size(NamedTuple):
    """How many held-out texts are read, and of how many contexts the long ones are."""

    documents: int = 150
    facts: int = 150
    explanations: int = 96
    long_texts: int = 24
    contexts: int = 4


QUICK = Size(documents=8, facts=8, explanations=4, long_texts=2, contexts=2)


@dataclass
class Memory:
    """One memory: a label, a model, what makes a cache for a text of n tokens, and how many tokens
    are read at once."""

    label: str
    model: nn.Module
    make: Callable[[int], KVCache]
    piece: int = 10_000

    def __post_init__(self) -> None:
        self.config, self.wte = self.model.config, self.model.wte

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), read with this memory."""
        return compress.read(self.model, self.make(ids.size(1)), ids, self.piece)[0]

    @torch.no_grad()
    def nbytes(self, n: int) -> int:
        """Return the bytes of a text's cache after n tokens."""
        cache = self.make(n)
        compress.read(self.model, cache, torch.zeros(1, n, dtype=torch.long), self.piece)
        return cache.nbytes

    def write(self, ids: Tensor, n: int, **options: Any) -> Tensor:
        """Return n tokens (B, n) after ids (B, T)."""
        new = generate(self.model, ids, n, cache=self.make(n), **options)
        return torch.cat([*new], dim=1)


def memories_of(name: str, n: int = SLOTS, **options: Any) -> dict[str, Memory]:
    """Return the memories that a GPT can have: full, window and sinks of n slots, and for pocket
    ours. Raises ValueError if n is too small or too large."""
    model = load_model(name, model_class=GPT, **options)
    n_ctx = model.config.n_ctx
    if not SINKS + 1 < n <= n_ctx + 1:
        raise ValueError(f"--slots {n}: at least {SINKS + 2}, at most {n_ctx + 1}")
    window, memories = n - 1 - SINKS, {}
    for way, label, *ring in (
        ("full", f"full, {n_ctx} tokens", n_ctx),
        ("window", f"window of {n - 1}", n - 1),
        ("sinks", f"{SINKS} sinks + window of {window}", window, SINKS),
    ):
        memories[way] = Memory(label, model, lambda _, ring=ring: SlidingWindowCache(*ring))
    if name == "pocket":
        bct = load_model("pocket-bct", model_class=BCT, **options)
        label = f"BCT: {bct.config.slots} slots + {bct.config.recent} recent"
        memories["ours"] = Memory(label, bct, lambda _: bct.new_cache())
    return memories


@torch.no_grad()
def demo(args: argparse.Namespace, ids: Tensor) -> None:
    """Continue ids (1, T) with full attention, let every memory read that text, and print what it
    costs and how far its predictions of the second half are from full attention's."""
    if args.trace_file:
        raise ValueError("--trace plays one memory: give --memory too")
    memories = memories_of(args.model, args.slots, device=args.device, dtype=args.dtype)
    exact, tokenizer = memories["full"], load_tokenizer(args.model)
    options = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "stop_id": tokenizer.eot_token,
        "generator": torch.Generator(args.device).manual_seed(args.seed),
    }
    new = exact.write(ids, args.max_new_tokens, **options)
    text = torch.cat([ids, new], dim=1)[:, -exact.config.n_ctx :]
    print(tokenizer.decode(text[0].tolist()))
    ways = [(memory.label, memory.model, memory.make) for memory in memories.values()]
    print(f"\nThe same {text.size(1)} tokens, read one by one:\n{compress.demo(ways, text)}\n")
    print(
        "Full attention is exact; the others approximate it, by forgetting. KL is of the second half.\n"
        "The full study, in minutes: python3 -m studies.bounding"
    )


# --- Quality ----------------------------------------------------------------------------------------


@torch.no_grad()
def stream_losses(memory: Memory, ids: Tensor, chunk: int = 128) -> Tensor:
    """Return the nats (B, T - 1) of all tokens of ids (B, T) but the first, read as generate()
    reads: any length."""
    model, cache, context = memory.model, memory.make(ids.size(1)), memory.model.context
    losses, start, read = [], 0, 0  # start: where the context begins; a BCT's has no end
    while read < ids.size(1) - 1:
        if read - start == context:  # full: forget its oldest half, read the rest again
            start = context_start(read + 1, context)
            cache.truncate(0)
            model(ids[:, start:read], cache, last_only=True)
        end = min(read + chunk, ids.size(1) - 1, start + context)
        logits = model(ids[:, read:end], cache).float().transpose(1, 2)  # (B, V, T)
        losses.append(F.cross_entropy(logits, ids[:, read + 1 : end + 1], reduction="none"))
        read = end
    return torch.cat(losses, dim=1)


def above(nats: np.ndarray) -> np.ndarray:
    """Return by which share the first perplexity is above the second (...,) of nats and tokens
    (..., texts, 2, 2)."""
    return perplexity(nats[..., 0, :]) / perplexity(nats[..., 1, :]) - 1


def lost(grams: np.ndarray) -> np.ndarray:
    """Return by how many points the first BLEU is below the second (...,) of counts
    (..., texts, 2, 10)."""
    return bleu(grams[..., 1, :]) - bleu(grams[..., 0, :])


def quality(
    rows: Rows,
    at: Setting,
    memories: dict[str, Memory],
    due: Collection[str],
    tokenizer: Any,
    size: Size,
) -> None:
    """Append what those memories that are due remember of held-out texts; the first is full
    attention, with which the others are compared."""
    documents = corpus.documents("test", size.documents)
    tokens = [[*tokenizer.encode_ordinary(d.text), tokenizer.eot_token] for d in documents]
    explain = corpus.explain_questions("test", size.explanations)
    recall = corpus.recall_questions("test", size.facts)
    full = None
    for way in dict.fromkeys([next(iter(memories)), *due]):
        memory = memories[way]
        losses = [nats_of(memory, text) for text in tokens]
        nats = np.array([[float(x.double().sum()), len(x)] for x in losses])
        grams = []
        for question in explain:
            ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
            new = memory.write(ids, 220, stop_id=tokenizer.eot_token)[0].tolist()
            text = tokenizer.decode(new).removesuffix(END_OF_TEXT).strip()
            grams.append(bleu_counts(text, question.answer))
        grams = np.array(grams)
        full = full or (nats, grams)
        if way not in due:
            continue
        right = round(answers(memory, tokenizer, recall)[1] * size.facts)
        rows.add(way, at, bytes=[memory.nbytes(memory.config.n_ctx)])
        rows.add_figures(
            way,
            at,
            size.documents,
            perplexity=bootstrap(nats, perplexity),
            above=bootstrap(np.stack([nats, full[0]], 1), above),
        )
        rows.add_figures(
            way,
            at,
            size.explanations,
            bleu=bootstrap(grams, bleu),
            lost=bootstrap(np.stack([grams, full[1]], 1), lost),
        )
        rows.add_figures(way, at, size.facts, facts=wilson(right, size.facts))


def long_texts(rows: Rows, memories: dict[str, Memory], tokenizer: Any, size: Size) -> None:
    """Append the perplexity of texts that are longer than the context, whole and by distance from
    their beginning."""
    n_ctx = next(iter(memories.values())).config.n_ctx
    width, texts = size.contexts * n_ctx + 1, []
    for row in range(size.long_texts):
        text, of_its_own = [], count(1000 * row)  # documents
        while len(text) < width:
            document = corpus.document("test", next(of_its_own), seed=1)
            text += [*tokenizer.encode_ordinary(document.text), tokenizer.eot_token]
        texts.append(text[:width])
    ends = [0, *(n_ctx >> i for i in (4, 3, 2, 1)), *range(n_ctx, width, n_ctx)]
    for way, memory in memories.items():
        nats = stream_losses(memory, torch.tensor(texts)).mean(0)
        rows.add_figures(way, {}, len(texts), long=[nats.mean().exp().item()])
        for a, b in pairwise(ends):
            found = nats[a:b].mean().exp().item()
            rows.add_figures(way, {"tokens": b}, len(texts), long=[found])


def measure(rows: Rows, quick: bool) -> None:
    """Append the figures of pocket's memories."""
    size = QUICK if quick else Size()
    due = rows.due(["full", "window", "sinks", "ours"], "long")
    if not due:
        return
    memories, tokenizer = memories_of("pocket"), load_tokenizer("pocket")
    bct = memories["ours"].config
    rows.begin_with(
        "pocket",
        memories["full"].model,
        f"the BCT, {bct.slots} slots + {bct.recent} recent, is pocket fine-tuned on pocket's own predictions; "
        "full attention is pocket as it is, where that fine-tuning would begin at a loss of 0",
        f"{size.documents} held-out documents, {size.explanations} explanations",
    )
    quality(rows, {}, memories, due, tokenizer, size)
    long_texts(rows, {way: memories[way] for way in due}, tokenizer, size)


main = partial(run, __doc__, "bounding", "fewer and shorter texts", measure)
