"""What a bounded cache costs and saves: bytes, time and quality of the memories of gpt_bounded_cache.py, side by side.

`python3 gpt_bounded_cache.py` shows one text in all of them; `python3 -m studies.bounding` is the full study. By
default the window, the sinks and BCT have about the same bytes (in float32, in which BCT always is); "full" is a window
of n_ctx, beside the growing cache of gpt_kv_cache.py. BCT is fine-tuned and the others are not: for windows that are,
see pocket/bct/ablation.json.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from load_gpt2_weights import NAMES, find_file, load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import answers
from support.cli import PROMPT, CommandLine, nonempty, writable_folder
from support.files import read_json, write_atomically, write_csv, write_json
from support.statistics import bleu, bleu_counts, bootstrap, kl, perplexity
from support.tables import table

SINKS = 4
CONTEXTS = 4  # how many times n_ctx tokens are written, and read
DOCUMENTS, STREAMS, RECALLS, EXPLANATIONS = 150, 24, 150, 96  # how many texts quality is measured on
COLORS = {"growing": "grey", "full": "black", "window": "tab:orange", "sinks": "tab:green", "bct": "tab:blue"}


@dataclass(frozen=True)
class Memory:
    """One way of remembering: a label, a model, what makes a cache, and what writes with it."""

    label: str
    model: nn.Module
    new_cache: Callable[[], growing.KVCache]
    generate: Callable[..., Iterator[Tensor]] = bounded.generate

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
    """Return what they are compared with: the cache of gpt_kv_cache.py."""
    model = load_model(name, model_class=growing.GPT, device=device, dtype=dtype)
    return Memory("growing cache", model, growing.KVCache, growing.generate)


# --- One text -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare(args: argparse.Namespace, ids: Tensor) -> None:
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
    """What writing every token took: milliseconds, and bytes of cache after it."""

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
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long, device=memory.model.wte.weight.device)
        for row, tokens in zip(rows, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        nats = F.cross_entropy(memory(rows[:, :-1]).float().transpose(1, 2), rows[:, 1:], reduction="none").tolist()
        losses += [row[: len(tokens) - 1] for row, tokens in zip(nats, batch, strict=True)]
    return losses


def explanations(memory: Memory, tokenizer: Any, questions: list[corpus.Question], tokens: int = 220) -> list[str]:
    """Return the greedy answers to questions, written in batches of prompts of the same length."""
    prompts = [tokenizer.encode_ordinary(question.prompt) for question in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    written = {}
    for _, some in groupby(order, key=lambda i: len(prompts[i])):
        rows = [*some]
        ids = torch.tensor([prompts[i] for i in rows], device=memory.model.wte.weight.device)
        new = memory.generate(memory.model, ids, tokens, stop_id=tokenizer.eot_token, cache=memory.new_cache())
        for i, row in zip(rows, torch.cat(list(new), dim=1).tolist(), strict=True):
            written[i] = tokenizer.decode([t for t in row if t != tokenizer.eot_token]).strip()
    return [written[i] for i in range(len(prompts))]


def change(figure: Callable[[np.ndarray], np.ndarray], counts: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Return by which share a figure differs from that of base, both of the same texts, and its 95% interval."""
    pairs = np.stack([counts, base], axis=1)  # (texts, 2, n)
    relative = lambda drawn: figure(drawn[..., 0, :]) / figure(drawn[..., 1, :]) - 1  # noqa: E731
    return dict(zip(("change", "low", "high"), bootstrap(pairs, relative), strict=True))


def quality(memories: dict[str, Memory], tokenizer: Any) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Measure held-out text (split "test"): figures of each memory, and its mean nats at every token of long texts."""
    tokens = [[*tokenizer.encode_ordinary(d.text), tokenizer.eot_token] for d in corpus.documents("test", DOCUMENTS)]
    device = next(iter(memories.values())).model.wte.weight.device
    width = CONTEXTS * next(iter(memories.values())).model.config.n_ctx + 1
    rows: list[list[int]] = []
    for row in range(STREAMS):  # each of its own documents, from the beginning of one on
        rows.append([])
        for i in range(width):
            if len(rows[-1]) < width:
                document = corpus.document("test", 1000 * row + i, seed=1)
                rows[-1] += [*tokenizer.encode_ordinary(document.text), tokenizer.eot_token]
    streams = torch.tensor([row[:width] for row in rows], device=device)
    recall, explain = corpus.recall_questions("test", RECALLS), corpus.explain_questions("test", EXPLANATIONS)
    figures, by_distance = {}, {}
    for key, memory in tqdm(memories.items(), desc="quality", leave=False):
        by_distance[key] = stream_losses(memory, streams).mean(dim=0).cpu()
        losses = document_losses(memory, tokens)
        nats = np.array([[sum(document), len(document)] for document in losses])
        texts = explanations(memory, tokenizer, explain)
        grams = np.stack([bleu_counts(text, q.answer) for text, q in zip(texts, explain, strict=True)])
        recall_nats, recall_share = answers(AsModel(memory), tokenizer, recall)
        if not figures:
            full_nats, full_grams = nats, grams
        figures[key] = {
            "perplexity": float(perplexity(nats)),
            "perplexity_of_long_texts": by_distance[key].mean().exp().item(),
            "recall_nats": recall_nats,
            "recall_share": recall_share,
            "bleu": float(bleu(grams)),
            "perplexity_against_full": change(perplexity, nats, full_nats),
            "bleu_against_full": change(bleu, grams, full_grams),
        }
    return figures, by_distance


class AsModel(nn.Module):
    """A memory in the form of a model."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory, self.wte, self.config = memory, memory.model.wte, memory.model.config

    def forward(self, ids: Tensor) -> Tensor:
        return self.memory(ids)


# --- The report -----------------------------------------------------------------------------------------------------


def report(name: str, slots: int, device: str, dtype: torch.dtype, prompt: Tensor, folder: str) -> None:
    """Measure the memories of a model; print the tables and the verdicts; write CSV, figures and summary.json."""
    out, memories, tokenizer = Path(folder), memories_of(name, slots, device, dtype), load_tokenizer(name)
    out.mkdir(parents=True, exist_ok=True)  # first of all: the measuring takes minutes
    n_ctx = next(iter(memories.values())).model.config.n_ctx
    compared = memories
    if "full" in memories:
        memories = {"growing": growing_cache(name, device, dtype)} | memories
    prompt = prompt[:, : n_ctx // 2]
    length = CONTEXTS * n_ctx - prompt.size(1) + 1  # the last token is written when all before it have been read
    grown = growth(memories, prompt, length)
    marks = [n for n in (2**i for i in range(6, 40)) if prompt.size(1) + 32 <= n <= CONTEXTS * n_ctx]

    print(f"\nBytes of cache and ms per token (medians of 32) after so many tokens read; n_ctx = {n_ctx}\n")
    print(f"{'tokens':>24}" + "".join(f"{n:>18,}" for n in marks))
    rows = []
    for key, memory in memories.items():
        at = [n - prompt.size(1) for n in marks]
        nbytes = [grown[key].nbytes[i] for i in at]
        ms = [statistics.median(around(grown[key].ms, i)) for i in at]
        rows += [[memory.label, n, b, m] for n, b, m in zip(marks, nbytes, ms, strict=True)]
        print(f"{memory.label:>24}" + "".join(f"{b:>11,}{m:>7.2f}" for b, m in zip(nbytes, ms, strict=True)))
    print("\nWhen all positions are used up, all but BCT forget the older half and read the rest again. Means of all:")
    print("; ".join(f"{memory.label} {statistics.mean(grown[key].ms):.2f} ms" for key, memory in memories.items()))
    counts = {"documents": DOCUMENTS, "long_texts": STREAMS, "facts": RECALLS, "explanations": EXPLANATIONS}
    summary: dict[str, Any] = {"model": name, "n_ctx": n_ctx, "tokens": length, "texts": counts, "memories": {}}
    for key, memory in memories.items():
        summary["memories"][key] = {
            "label": memory.label,
            "bytes": {str(n): b for label, n, b, _ in rows if label == memory.label},
            "ms_per_token": {str(n): m for label, n, _, m in rows if label == memory.label},
            "mean_ms_per_token": statistics.mean(grown[key].ms),
        }
    by_distance: dict[str, Tensor] = {}
    if name == "pocket":
        figures, by_distance = quality(compared, tokenizer)
        print_quality(compared, figures, by_distance)
        for key, values in figures.items():
            summary["memories"][key] |= values
        summary["claims"] = claims(summary["memories"], marks, n_ctx)
        print("\nWhat the paper claims (Yi et al. 2024, section 4.3):")
        for claim in summary["claims"]:
            print(f"  {claim['claim']}: {claim['verdict']} ({claim['figures']})")
    else:
        print("\nQuality is measured on the texts of pocket only.")
    write_csv(out / "growth.csv", ["memory", "tokens", "cache_bytes", "ms_per_token"], rows)
    if by_distance:
        rows = [[compared[key].label, a, b, nats[a:b].mean().exp().item()] for key, nats in by_distance.items()
                for a, b in spans_of(len(nats), n_ctx)]  # fmt: skip
        write_csv(out / "perplexity.csv", ["memory", "from_token", "to_token", "perplexity"], rows)
    write_json(out / "summary.json", summary)
    draw(memories, grown, by_distance, prompt.size(1), n_ctx, out)
    print(f"\nWritten to {out}")


def spans_of(length: int, n_ctx: int) -> list[tuple[int, int]]:
    """Return spans of distance from the start: doubling up to n_ctx, then n_ctx wide."""
    ends = [n_ctx >> i for i in range(4, -1, -1)] + list(range(2 * n_ctx, length + 1, n_ctx))
    return list(zip([0, *ends], ends, strict=False))


def print_quality(memories: dict[str, Memory], figures: dict[str, dict[str, float]],
                  by_distance: dict[str, Tensor]) -> None:  # fmt: skip
    """Print perplexity by distance from the start of long texts, and the figures of single documents."""
    n_ctx = next(iter(memories.values())).model.config.n_ctx
    spans = spans_of(len(next(iter(by_distance.values()))), n_ctx)
    print("\nBCT was fine-tuned for its memory. The others run on the model as it is; fine-tuned windows are in "
          "pocket/bct/ablation.json.")  # fmt: skip
    print(f"\nPerplexity of {STREAMS} long texts (held-out documents in a row) by distance from the start, in tokens\n")
    print(" " * 24 + "".join(f"{f'{a}-{b}':>11}" for a, b in spans))
    for key, memory in memories.items():
        cells = (by_distance[key][a:b].mean().exp().item() for a, b in spans)
        print(f"{memory.label:>24}" + "".join(f"{value:>11.2f}" for value in cells))
    print(f"\nPerplexity of {DOCUMENTS} documents; {RECALLS} facts stated early, asked late: nats, and right; BLEU of "
          f"{EXPLANATIONS} explanations against how the corpus explains\n")  # fmt: skip
    for key, memory in memories.items():
        f = figures[key]
        print(f"{memory.label:>24}{f['perplexity']:>11.3f}{f['recall_nats']:>11.2f}{f['recall_share']:>11.1%}"
              f"{f['bleu']:>11.1f}")  # fmt: skip


def claims(memories: dict[str, dict[str, Any]], marks: list[int], n_ctx: int) -> list[dict[str, str]]:
    """Return the paper's claims, each with its verdict and the figures behind it."""
    bct, everything, window = memories["bct"], memories["full"], memories["window"]
    grown = memories["growing"]["bytes"][str(n_ctx)]
    (early, late), (early_window, late_window) = (
        [statistics.median(memory["ms_per_token"][str(n)] for n in half) for half in (marks[:2], marks[-2:])]
        for memory in (bct, window)
    )
    quiet = abs(late_window / early_window - 1) < 0.15  # the window's work is constant: what changes there is noise
    lost, worse = bct["bleu_against_full"], bct["perplexity_against_full"]

    def verdict(holds: bool, fails: bool = True) -> str:
        return "HOLDS" if holds else "DOES NOT HOLD" if fails else "UNDECIDED"

    def interval(c: dict[str, float]) -> str:
        return f"{c['change']:+.1%}, 95% interval {c['low']:+.1%} to {c['high']:+.1%}"

    return [
        {
            "claim": "memory stays constant",
            "verdict": verdict(len(set(bct["bytes"].values())) == 1),
            "figures": f"{bct['bytes'][str(marks[0])]:,} bytes after {marks[0]} tokens and "
            f"{bct['bytes'][str(marks[-1])]:,} after {marks[-1]:,}; the growing cache: {grown:,} after {n_ctx}",
        },
        {
            "claim": "time per token stays constant",
            "verdict": verdict(quiet and abs(late / early - 1) < 0.15, fails=quiet),
            "figures": f"{early:.2f} ms up to {marks[1]} tokens, {late:.2f} from {marks[-2]:,} on, while the window "
            f"{early_window:.2f} and {late_window:.2f}; 15% are taken for noise",
        },
        {
            "claim": "quality within 3%, in BLEU",
            "verdict": verdict(lost["low"] > -0.03, lost["high"] < -0.03),
            "figures": f"{bct['bleu']:.1f} against {everything['bleu']:.1f} with full attention: {interval(lost)}; "
            f"the window {window['bleu']:.1f}",
        },
        {
            "claim": "quality within 3%, in perplexity",
            "verdict": verdict(worse["high"] < 0.03, worse["low"] > 0.03),
            "figures": f"{bct['perplexity']:.3f} against {everything['perplexity']:.3f}: {interval(worse)}; "
            f"the window {window['perplexity']:.3f}",
        },
    ]


def draw(memories: dict[str, Memory], grown: dict[str, Growth], by_distance: dict[str, Tensor], prompt: int,
         n_ctx: int, out: Path) -> None:  # fmt: skip
    """Draw bytes and time against tokens processed and, where it was measured, perplexity by distance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def plot(name: str, title: str, ylabel: str, curves: dict[str, tuple[list[float], list[float]]]) -> None:
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for key, (x, y) in curves.items():
            width = {"window": 6, "sinks": 3.5}.get(key, 1.5) if name == "bytes.png" else 1.5  # they coincide there
            dashed = "--" if key == "growing" else "-"
            axes.plot(x, y, dashed, color=COLORS[key], label=memories[key].label, linewidth=width)
        for n in range(n_ctx, CONTEXTS * n_ctx, n_ctx):
            axes.axvline(n, color="lightgrey", linewidth=0.6, zorder=0)
        axes.set(xlabel="tokens processed (grey: multiples of n_ctx)", ylabel=ylabel, title=title)
        axes.set_ylim(0, None)
        axes.legend(fontsize=8)
        figure.tight_layout()
        write_atomically(out / name, lambda file: figure.savefig(file, dpi=120, format="png"))
        plt.close(figure)

    steps = range(prompt + 1, prompt + 1 + len(next(iter(grown.values())).ms))
    kib = {key: (list(steps), [b / 1024 for b in g.nbytes]) for key, g in grown.items()}
    plot("bytes.png", "Size of the cache", "KiB", kib)
    ms = {}
    for key, g in grown.items():
        ends = range(31, len(g.ms), 32)
        ms[key] = [steps[i] for i in ends], [statistics.median(around(g.ms, i)) for i in ends]
    plot("speed.png", "Time per token: medians of 32, without the reading again of a full context", "ms", ms)
    if by_distance:
        curves = {}
        for key, nats in by_distance.items():
            starts = range(0, len(nats), n_ctx // 4)
            y = [nats[a : a + n_ctx // 4].mean().exp().item() for a in starts]
            curves[key] = [a + n_ctx / 8 for a in starts], y
        plot("perplexity.png", f"Perplexity by distance from the start ({STREAMS} long texts)", "perplexity", curves)


QUICK = {"CONTEXTS": 2, "DOCUMENTS": 16, "STREAMS": 2, "RECALLS": 16, "EXPLANATIONS": 8}


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.bounding --quick", NAMES)
    cli.add_model_arguments()
    cli.add_argument("--prompt", default=PROMPT, type=nonempty, metavar="TEXT", help="text to continue")
    cli.add_argument("--slots", type=int, default=37, metavar="N", help="slots of window and sinks, spare one included")
    cli.add_argument("--quick", action="store_true", help="on fewer and shorter texts, in less than a minute")
    cli.add_argument("--out", type=writable_folder, default="results/bounding", metavar="FOLDER",
                     help="where tables and figures go")  # fmt: skip
    with cli.parse(argv) as args:
        if args.quick:
            globals().update(QUICK)
        ids = torch.tensor([load_tokenizer(args.model).encode(args.prompt, allowed_special="all")], device=args.device)
        report(args.model, args.slots, args.device, args.dtype, ids, args.out)


if __name__ == "__main__":
    main()
