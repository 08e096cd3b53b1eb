"""What a bounded cache costs and saves: bytes, time and quality of the memories of gpt_bounded_cache.py, side by side.

`python3 gpt_bounded_cache.py` shows one text in all of them; `python3 -m studies.bounding` is the full study. By
default the window, the sinks and BCT have about the same bytes in float32, the format of BCT's memory; "full" is a
window of n_ctx, beside the growing cache of gpt_kv_cache.py. BCT is fine-tuned and the others aren't: fine-tuned
windows are in pocket/bct/ablation.json.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import gpt_bounded_cache as bounded
import gpt_kv_cache as growing
from gpt_bounded_cache import SlidingWindowCache
from load_gpt2_weights import find_file, load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import answers
from studies.protocol import (
    NOISE,
    Claim,
    StudyLine,
    claim_tables,
    conditions_of,
    judged,
    spread,
    under,
    with_interval,
)
from support.cli import PROMPT, nonempty
from support.conditions import conditions
from support.figures import figure
from support.files import read_json, write_csv, write_json
from support.statistics import bleu, bleu_counts, bootstrap, kl, perplexity
from support.tables import Table, page, table

SOURCE = "A Method for Building Large Language Models with Predefined KV Cache Capacity"
THEIRS = ("a Transformer of 1 billion parameters with a capacity of 2,048, built as a BCT; Common Crawl, RefinedWeb, "
          "The Pile; no table of results, and lengths, hardware, BLEU's task and the reading of the memory not stated")
SINKS = 4
WORSE = 0.03  # ours: a perplexity that is higher by less is maintained
COLORS = {"growing": "grey", "full": "black", "window": "C1", "sinks": "C2", "bct": "C0"}


@dataclass(frozen=True)
class Size:
    """How much is measured: how many times n_ctx tokens are written and read, and the numbers of texts."""

    contexts: int = 4
    documents: int = 150
    long_texts: int = 24
    facts: int = 150
    explanations: int = 96


QUICK = Size(contexts=2, documents=16, long_texts=2, facts=16, explanations=8)


@dataclass(frozen=True)
class Memory:
    """One memory: a label, a model, what makes a cache, and what writes with it."""

    label: str
    model: nn.Module
    new_cache: Callable[[], growing.KVCache]
    generate: Callable[..., Iterator[Tensor]] = bounded.generate

    @property
    def wte(self) -> nn.Module:
        return self.model.wte

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), read with this memory."""
        return self.model(ids, self.new_cache())


def memories_of(name: str, n: int, device: str, dtype: torch.dtype) -> dict[str, Memory]:
    """Return the memories that a model can have: full, window and sinks of n slots, and bct for pocket; or bct only,
    for a BCT. Raises ValueError if n is too small or too large."""
    slots = read_json(find_file(name, "config.json")).get("slots")
    bct = {"pocket": "pocket-bct"}.get(name, name if slots else None)
    memories = {}
    if not slots:
        model = load_model(name, model_class=bounded.GPT, device=device, dtype=dtype)
        n_ctx = model.config.n_ctx
        if not SINKS + 1 < n <= n_ctx + 1:
            raise ValueError(f"{n} slots, one of them spare, must be more than {SINKS + 1} and at most {n_ctx + 1}")
        memories["full"] = Memory(f"full, {n_ctx} tokens", model, lambda: SlidingWindowCache(n_ctx))
        memories["window"] = Memory(f"window of {n - 1}", model, lambda: SlidingWindowCache(n - 1))
        memories["sinks"] = Memory(f"{SINKS} sinks + window of {n - 1 - SINKS}", model,
                                   lambda: SlidingWindowCache(n - 1 - SINKS, SINKS))  # fmt: skip
    if bct:
        bct = load_model(bct, model_class=bounded.BCT, device=device, dtype=dtype)
        label = f"BCT: {bct.config.slots} slots + {bct.config.recent} recent"
        memories["bct"] = Memory(label, bct, bounded.BoundedMemory)
    return memories


def growing_cache(name: str, device: str, dtype: torch.dtype) -> Memory:
    """Return the baseline: the cache of gpt_kv_cache.py."""
    model = load_model(name, model_class=growing.GPT, device=device, dtype=dtype)
    return Memory("growing cache", model, growing.KVCache, growing.generate)


# --- One text -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def demo(args: argparse.Namespace, ids: Tensor) -> None:
    """Continue ids (1, T) with full attention, let every memory read that text, and print what it costs and how far its
    predictions are from full attention's."""
    if args.trace_file:
        raise ValueError("--trace plays one memory: give --memory too")
    memories = memories_of(args.model, args.slots, args.device, args.dtype)
    exact, tokenizer = next(iter(memories.values())), load_tokenizer(args.model)
    options = {"temperature": args.temperature, "top_k": args.top_k, "stop_id": tokenizer.eot_token}
    options["generator"] = torch.Generator(args.device).manual_seed(args.seed)
    new = [*exact.generate(exact.model, ids, args.max_new_tokens, cache=exact.new_cache(), **options)]
    text = torch.cat([ids, *new], dim=1)[:, -exact.model.config.n_ctx :]
    print(tokenizer.decode(text[0].tolist()))
    rows, expected = [], None
    for memory in memories.values():
        cache, ms, logits = memory.new_cache(), [], []
        for token in text.split(1, dim=1):
            started = time.perf_counter()
            logits.append(memory.model(token, cache)[0].float())
            ms.append(1000 * (time.perf_counter() - started))
        got = torch.cat(logits)  # (T, V)
        expected = got if expected is None else expected
        same = (got.argmax(-1) == expected.argmax(-1)).float().mean()
        rows.append([memory.label, f"{cache.nbytes:,}", f"{statistics.median(ms):.2f}",
                     f"{kl(expected, got).mean():.3f}", f"{same:.0%}"])
    header = ["memory", "bytes", "ms per token", "KL to full, nats", "same next token"]
    print(f"\nThe same {text.size(1)} tokens, read one by one:\n{table(header, rows)}\n")
    print("Full attention is exact; the other memories approximate it, by forgetting.\n"
          "The full study, in minutes: python3 -m studies.bounding")


# --- Bytes and time -------------------------------------------------------------------------------------------------


@dataclass
class Growth:
    """The cost of every written token: milliseconds, and bytes of cache after it."""

    ms: list[float]
    nbytes: list[int]


def growth(memories: dict[str, Memory], prompt: Tensor, tokens: int) -> dict[str, Growth]:
    """Let all memories write `tokens` tokens after the prompt (1, T), one each in turn."""
    result = {key: Growth([], []) for key in memories}
    writing = {}
    for key, memory in memories.items():
        cache = memory.new_cache()
        writing[key] = cache, memory.generate(memory.model, prompt, tokens, cache=cache)
    for _ in tqdm(range(tokens), desc="bytes and time", leave=False):
        for key, (cache, generation) in writing.items():
            started = time.perf_counter()
            next(generation).item()  # waits for the device
            result[key].ms.append(1000 * (time.perf_counter() - started))
            result[key].nbytes.append(cache.nbytes)
    return result


def around(values: list[float], i: int, width: int = 32) -> list[float]:
    """Return the last `width` values up to index i."""
    return values[max(0, i + 1 - width) : i + 1]


# --- Quality --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def stream_losses(memory: Memory, ids: Tensor, chunk: int = 128) -> Tensor:
    """Return the nats (B, T - 1) of all tokens of ids (B, T) but the first, read as generate() reads: any length."""
    model, cache, n_ctx = memory.model, memory.new_cache(), memory.model.config.n_ctx
    losses, start, read = [], 0, 0  # start: where the context begins
    while read < ids.size(1) - 1:
        end = min(read + chunk, ids.size(1) - 1)
        if model.context == n_ctx:  # a BCT's has no end
            if read - start == n_ctx:  # the context is full: forget its oldest half, read the rest again
                start = bounded.context_start(read + 1, n_ctx)
                cache.truncate(0)
                model(ids[:, start:read], cache, last_only=True)
            end = min(end, start + n_ctx)
        logits = model(ids[:, read:end], cache).float()  # (B, T, V)
        losses.append(F.cross_entropy(logits.transpose(1, 2), ids[:, read + 1 : end + 1], reduction="none"))
        read = end
    return torch.cat(losses, dim=1)


@torch.no_grad()
def document_losses(memory: Memory, documents: list[list[int]]) -> list[list[float]]:
    """Return the nats of each document's tokens but the first, each read from its own beginning."""
    losses = []
    for start in range(0, len(documents), 16):
        batch = documents[start : start + 16]
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long, device=memory.wte.weight.device)
        for row, tokens in zip(rows, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        nats = F.cross_entropy(memory(rows[:, :-1]).float().transpose(1, 2), rows[:, 1:], reduction="none").tolist()
        losses += [row[: len(tokens) - 1] for row, tokens in zip(nats, batch, strict=True)]
    return losses


def training_seconds(memory: Memory, ids: Tensor, turns: int = 3) -> dict[str, list[float]]:
    """Return the seconds that the loss of ids (1, T) and its gradients take, by turn, the text read at once and token
    by token."""
    seconds: dict[str, list[float]] = {"at once": [], "token by token": []}
    for _ in range(turns):
        for name, taken in seconds.items():
            begun, cache = time.perf_counter(), memory.new_cache()
            parts = [ids[:, :-1]] if name == "at once" else ids[:, :-1].split(1, dim=1)
            logits = torch.cat([memory.model(part, cache) for part in parts], dim=1)
            F.cross_entropy(logits[0].float(), ids[0, 1:]).backward()
            memory.model.zero_grad()
            taken.append(time.perf_counter() - begun)
    return seconds


@torch.no_grad()
def parallel_difference(memory: Memory, ids: Tensor) -> float:
    """Return the largest difference of the logits of ids (1, T), read at once and token by token, over the largest."""
    cache, at_once = memory.new_cache(), memory(ids)
    one_by_one = torch.cat([memory.model(token, cache) for token in ids.split(1, dim=1)], dim=1)
    return float((at_once - one_by_one).abs().max() / at_once.abs().max())


def explanations(memory: Memory, tokenizer: Any, questions: list[corpus.Question], tokens: int = 220) -> list[str]:
    """Return the greedy answers to questions, written in batches of prompts of the same length."""
    prompts = [tokenizer.encode_ordinary(question.prompt) for question in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    written = {}
    for _, some in groupby(order, key=lambda i: len(prompts[i])):
        rows = [*some]
        ids = torch.tensor([prompts[i] for i in rows], device=memory.wte.weight.device)
        new = memory.generate(memory.model, ids, tokens, stop_id=tokenizer.eot_token, cache=memory.new_cache())
        for i, row in zip(rows, torch.cat(list(new), dim=1).tolist(), strict=True):
            written[i] = tokenizer.decode([t for t in row if t != tokenizer.eot_token]).strip()
    return [written[i] for i in range(len(prompts))]


def change(figure: Callable[[np.ndarray], np.ndarray], counts: np.ndarray,
           base: np.ndarray) -> dict[str, float | None]:  # fmt: skip
    """Return by which share a figure differs from that of base, both of the same texts, and its 95% interval; None
    where base has a figure of 0."""
    pairs = np.stack([counts, base], axis=1)  # (texts, 2, n)
    relative = lambda drawn: figure(drawn[..., 0, :]) / figure(drawn[..., 1, :]) - 1  # noqa: E731
    with np.errstate(divide="ignore", invalid="ignore"):
        found = bootstrap(pairs, relative)
    found = [x if x is not None and math.isfinite(x) else None for x in found]
    return dict(zip(("change", "low", "high"), found, strict=True))


def beyond(excess: Tensor, n_ctx: int) -> dict[str, list[float]]:
    """Return by which share perplexity is above full attention's in the first n_ctx tokens and in those after them,
    and how much more it is there, each with its 95% interval. excess (texts, T): nats above full attention's."""
    within, after = (part.double().mean(dim=1).numpy() for part in (excess[:, :n_ctx], excess[:, n_ctx:]))
    parts = {"within": within, "after": after, "more": after - within}
    return {name: [math.expm1(x) for x in bootstrap(nats)] for name, nats in parts.items()}


def quality(memories: dict[str, Memory], tokenizer: Any,
            size: Size) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:  # fmt: skip
    """Measure held-out text (split "test"): figures of each memory, and its mean nats at every token of long texts."""
    documents = corpus.documents("test", size.documents)
    tokens = [[*tokenizer.encode_ordinary(document.text), tokenizer.eot_token] for document in documents]
    device = next(iter(memories.values())).wte.weight.device
    width = size.contexts * next(iter(memories.values())).model.config.n_ctx + 1
    rows: list[list[int]] = []
    for row in range(size.long_texts):  # each of its own documents, from the beginning of one on
        rows.append([])
        for i in range(width):
            if len(rows[-1]) < width:
                document = corpus.document("test", 1000 * row + i, seed=1)
                rows[-1] += [*tokenizer.encode_ordinary(document.text), tokenizer.eot_token]
    streams = torch.tensor([row[:width] for row in rows], device=device)
    recall = corpus.recall_questions("test", size.facts)
    explain = corpus.explain_questions("test", size.explanations)
    figures, by_distance = {}, {}
    for key, memory in tqdm(memories.items(), desc="quality", leave=False):
        stream = stream_losses(memory, streams).cpu()
        by_distance[key] = stream.mean(dim=0)
        losses = document_losses(memory, tokens)
        nats = np.array([[sum(document), len(document)] for document in losses])
        texts = explanations(memory, tokenizer, explain)
        grams = np.stack([bleu_counts(text, q.answer) for text, q in zip(texts, explain, strict=True)])
        recall_nats, recall_share = answers(memory, tokenizer, recall)
        if not figures:
            full_nats, full_grams, full_stream = nats, grams, stream
        figures[key] = {
            "perplexity": float(perplexity(nats)),
            "perplexity_of_long_texts": by_distance[key].mean().exp().item(),
            "recall_nats": recall_nats,
            "recall_share": recall_share,
            "bleu": float(bleu(grams)),
            "perplexity_against_full": change(perplexity, nats, full_nats),
            "bleu_against_full": change(bleu, grams, full_grams),
        }
        if size.contexts > 1:
            figures[key]["long_against_full"] = beyond(stream - full_stream, (width - 1) // size.contexts)
    return figures, by_distance


# --- The report -----------------------------------------------------------------------------------------------------


def report(name: str, slots: int, device: str, dtype: torch.dtype, prompt: Tensor, size: Size, out: Path) -> None:
    """Measure the memories of a model; print the tables and the verdicts; write CSV, figures and summary.json."""
    memories, tokenizer = memories_of(name, slots, device, dtype), load_tokenizer(name)
    out.mkdir(parents=True, exist_ok=True)
    n_ctx = next(iter(memories.values())).model.config.n_ctx
    compared = memories
    if "full" in memories:
        memories = {"growing": growing_cache(name, device, dtype)} | memories
    prompt = prompt[:, : n_ctx // 2]
    length = size.contexts * n_ctx - prompt.size(1) + 1  # the last token is written when all before it have been read
    grown = growth(memories, prompt, length)
    marks = [n for n in (2**i for i in range(6, 40)) if prompt.size(1) + 32 <= n <= size.contexts * n_ctx]
    record: dict[str, Any] = {"model": name, "conditions": conditions(name, next(iter(memories.values())).model),
                              "n_ctx": n_ctx, "tokens": length, "texts": asdict(size), "memories": {}}  # fmt: skip
    for key, memory in memories.items():
        at = {str(n): n - prompt.size(1) for n in marks}
        record["memories"][key] = {
            "label": memory.label,
            "bytes": {n: grown[key].nbytes[i] for n, i in at.items()},
            "ms_per_token": {n: statistics.median(around(grown[key].ms, i)) for n, i in at.items()},
            "mean_ms_per_token": statistics.mean(grown[key].ms),
        }
    rows = [[r["label"], n, r["bytes"][n], r["ms_per_token"][n]] for r in record["memories"].values()
            for n in r["bytes"]]  # fmt: skip
    write_csv(out / "growth.csv", ["memory", "tokens", "cache_bytes", "ms_per_token"], rows)
    by_distance: dict[str, Tensor] = {}
    if name == "pocket":
        text = torch.tensor([tokenizer.encode_ordinary(corpus.document("test", 0).text)[:n_ctx]], device=device)
        record["parallel"] = {"tokens": text.size(1), "difference": parallel_difference(memories["bct"], text),
                              "seconds": training_seconds(memories["bct"], text)}
        figures, by_distance = quality(compared, tokenizer, size)
        for key, values in figures.items():
            record["memories"][key] |= values
        rows = [[compared[key].label, a, b, nats[a:b].mean().exp().item()] for key, nats in by_distance.items()
                for a, b in spans_of(len(nats), n_ctx)]  # fmt: skip
        write_csv(out / "perplexity.csv", ["memory", "from_token", "to_token", "perplexity"], rows)
    write_json(out / "summary.json", record)
    draw(memories, grown, by_distance, prompt.size(1), n_ctx, out)
    judged_here = claim_tables(claims(record)) if name == "pocket" else []
    print(page([*tables(record), *judged_here, f"Written to {out}"]))


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return bytes, times, quality, and where it was measured quality."""
    memories, n_ctx, texts = record["memories"], record["n_ctx"], record["texts"]
    marks = [*next(iter(memories.values()))["bytes"]]
    marks = [*dict.fromkeys((marks[0], *(n for n in marks if int(n) == n_ctx), marks[-1]))]
    parts: list[str | Table] = [
        Table(["bytes of cache; ms per token", *(f"after {int(n):,} tokens" for n in marks)],
              [[row["label"], *(f"{row['bytes'][n]:,}; {row['ms_per_token'][n]:.2f}" for n in marks)]
               for row in memories.values()]),
        "Times per token are medians of 32. When all positions are used up, all memories but BCT forget the older half "
        "and read the rest again; mean times that include this: "
        + ", ".join(f"{row['label']} {row['mean_ms_per_token']:.2f} ms" for row in memories.values()) + ".",
    ]  # fmt: skip
    if not any("bleu" in row for row in memories.values()):
        alone = "" if "full" in memories else " No full attention with a BCT's fine-tuning stands beside it."
        return [*parts, f"Quality is measured on the texts of pocket only.{alone}"]
    return [
        *parts,
        Table(["quality, held out", "perplexity", "of long texts", "early facts, asked late: nats", "right", "BLEU"],
              [[row["label"], f"{row['perplexity']:.2f}", f"{row['perplexity_of_long_texts']:.2f}",
                f"{row['recall_nats']:.2f}", f"{row['recall_share']:.1%}", f"{row['bleu']:.1f}"]
               for row in memories.values() if "bleu" in row]),
        f"Perplexity is over {texts['documents']} documents, and over {texts['long_texts']} texts of "
        f"{texts['contexts'] * n_ctx:,} tokens; there are {texts['facts']} questions on facts; BLEU compares "
        f"{texts['explanations']} explanations with the corpus's own. BCT was fine-tuned for its memory, and the "
        "others run on the model as it is: fine-tuned windows are in pocket/bct/ablation.json.",
    ]  # fmt: skip


def spans_of(length: int, n_ctx: int) -> list[tuple[int, int]]:
    """Return spans of distance from the start: doubling up to n_ctx, then n_ctx wide."""
    ends = [n_ctx >> i for i in range(4, -1, -1)] + list(range(2 * n_ctx, length + 1, n_ctx))
    return list(zip([0, *ends], ends, strict=False))


def bleu_claim(section: str, full: dict[str, Any], bct: dict[str, Any], partly: str, fair: bool = True) -> Claim:
    """Return the source's claim on BLEU, not shown unless the comparison is fair."""
    change = [bct["bleu_against_full"][x] for x in ("change", "low", "high")]
    known = None not in change
    _, low, high = points = [x * full["bleu"] for x in change] if known else change
    return judged(section, "The BLEU scores are comparable to those of traditional methods, with differences within 3",
                  fair and low > -3 if known else None, f"{bct['bleu']:.1f} against {full['bleu']:.1f} with full "
                  f"attention: {with_interval(points, '+.1f')} points", f"partly: {partly}; \"within 3\" is read as at "
                  "most 3 points worse; BLEU is against the corpus's own explanations",
                  known and fair and high < -3)  # fmt: skip


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return the claims of BCT that the study's record decides."""
    bct, full, window = (record["memories"][name] for name in ("bct", "full", "window"))
    worse = [bct["perplexity_against_full"][x] for x in ("change", "low", "high")]
    sizes, apart, long, holds, refuted = record["texts"], record["parallel"], bct.get("long_against_full"), None, False
    lengths, seconds = "not measured yet", apart.get("seconds", {"at once": [], "token by token": []})
    times = [b / a for a, b in zip(seconds["at once"], seconds["token by token"], strict=True)]
    if long:
        _, low, high = long["more"]
        holds, refuted, n_ctx = high < WORSE, low > WORSE, record["n_ctx"]
        lengths = (f"perplexity against full attention's, in the first {n_ctx:,} tokens and up to "
                   f"{sizes['contexts'] * n_ctx:,}: " + ", ".join(with_interval(long[x], "+.1%")
                   for x in ("within", "after"))
                   + f"; {with_interval(long['more'], '+.1%')} from one to the other")  # fmt: skip
    ours = conditions_of(record, f"the BCT, {bct['label'].removeprefix('BCT: ')}, is pocket fine-tuned on pocket's own "
                         "predictions; full attention is pocket as it is, where that fine-tuning would begin at a loss "
                         f"of 0; {sizes['documents']} held-out documents, {sizes['explanations']} explanations")
    return under(
        SOURCE, THEIRS, ours,
        bleu_claim("4.3, fine-tuned", full, bct, "our rule, and a pretrained model that was fine-tuned for it"),
        judged("3.5", "refines the hidden state through a self-supervised learning approach during inference", None,
               "", "no: the source gives no rule, loss or figure for it"),
        judged("3.5", "it allows for token-level parallel training", apart["difference"] < 1e-4,
               f"{apart['tokens']} tokens read at once and token by token: the logits differ by "
               f"{apart['difference']:.0e} of the largest", "partly: our rule"),
        judged("3.5", "significantly enhancing training efficiency", min(times) > 1 + NOISE if times else None,
               f"a training step on {apart['tokens']} tokens read at once is {spread(times, '.1f')} times as fast as "
               "token by token" if times else "not measured yet", "partly: our rule, 3 million parameters; the range "
               f"is over turns; the source names nothing to compare with; up to {NOISE:.0%} (our threshold) counts as "
               "noise",
               bool(times) and max(times) < 1 - NOISE),
        judged("3.5", "ensuring stable performance across varying context lengths", holds, lengths, "partly: our rule; "
               f"\"performance\" is read as quality; up to {WORSE:.0%} more (our threshold) counts as stable", refuted),
    ) + under(
        "", "", ours,
        judged("", f"Is BCT's perplexity no more than {WORSE:.0%} (our threshold) above full attention's?",
               worse[2] < WORSE, f"{bct['perplexity']:.3f} against {full['perplexity']:.3f}: "
               f"{with_interval(worse, '+.1%')}; a window of equal bytes, as it is, {window['perplexity']:.3f}", "",
               worse[1] > WORSE),
    ) + under(
        "", "", "argument, by algorithm 1 and section 3.2",
        judged("", "Do the source's algorithm and its text agree on the first token?", False,
               "for t = 1, algorithm 1 sets MV_1 to MV_0 and writes nothing (lines 7 and 8); section 3.2 adds ww^T wv "
               "to the initial MV for every input. We write every token", ""),
    )  # fmt: skip


def draw(memories: dict[str, Memory], grown: dict[str, Growth], by_distance: dict[str, Tensor], prompt: int,
         n_ctx: int, out: Path) -> None:  # fmt: skip
    """Draw bytes and time against tokens processed and, where it was measured, perplexity by distance."""
    steps = range(prompt + 1, prompt + 1 + len(next(iter(grown.values())).ms))

    def plot(name: str, title: str, ylabel: str, curves: dict[str, tuple[Sequence[float], list[float]]]) -> None:
        def draw_on(axes: Any) -> None:
            for key, (x, y) in curves.items():
                width = {"window": 6, "sinks": 3.5}.get(key, 1.5) if name == "bytes" else 1.5  # they coincide there
                dashed = "--" if key == "growing" else "-"
                axes.plot(x, y, dashed, color=COLORS[key], label=memories[key].label, linewidth=width)
            for n in range(n_ctx, steps[-1], n_ctx):
                axes.axvline(n, color="lightgrey", linewidth=0.6, zorder=0)
            axes.set_ylim(0, None)

        figure(out / f"{name}.png", draw_on, title=title, ylabel=ylabel,
               xlabel="tokens processed (grey: multiples of n_ctx)")  # fmt: skip

    plot("bytes", "Size of the cache", "KiB", {key: (steps, [b / 1024 for b in g.nbytes]) for key, g in grown.items()})
    ends = range(31, len(steps), 32)
    plot("speed", "Time per token: medians of 32, without the reading again of a full context", "ms",
         {key: ([steps[i] for i in ends], [statistics.median(around(g.ms, i)) for i in ends])
          for key, g in grown.items()})  # fmt: skip
    if by_distance:
        width = n_ctx // 4
        plot("perplexity", "Perplexity by distance from the start of long texts", "perplexity", {
            key: ([a + width / 2 for a in range(0, len(nats), width)],
                  [part.mean().exp().item() for part in nats.split(width)]) for key, nats in by_distance.items()
        })  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "bounding", "fewer and shorter texts")
    cli.add_argument("--prompt", default=PROMPT, type=nonempty, metavar="TEXT", help="text to continue")
    cli.add_argument("--slots", type=int, default=37, metavar="N", help="slots of window and sinks, with the spare one")
    with cli.parse(argv) as args:
        ids = torch.tensor([load_tokenizer(args.model).encode(args.prompt, allowed_special="all")], device=args.device)
        report(args.model, args.slots, args.device, args.dtype, ids, QUICK if args.quick else Size(), args.out)


if __name__ == "__main__":
    main()
