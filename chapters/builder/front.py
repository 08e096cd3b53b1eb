"""The front page's picture: what every step reads, without a cache and with one, from two real generations."""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch

import gpt_baseline
import gpt_kv_cache
from load_gpt2_weights import load_model, load_tokenizer
from support.tracing import Trace

PROMPT, STEPS = "The month in which", 7
CELL, ROW, TOP = 26, 28, 88
COLOURS = {"computed now": "#1f4e79", "read from the cache": "#d9d9d9"}


def traces() -> list[Trace]:
    """Return the steps of the same text, written without a cache and with one."""
    tokenizer = load_tokenizer("pocket")
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    made = []
    for module, cache in ((gpt_baseline, None), (gpt_kv_cache, gpt_kv_cache.KVCache())):
        model = load_model("pocket", model_class=module.GPT)
        trace = Trace("", tokenizer, model.config.n_ctx, Path(), gpt_baseline.context_start)
        trace.begin(ids[0].tolist())
        for token in module.generate(
            model, ids, STEPS, **({} if cache is None else {"cache": cache})
        ):
            trace.step(int(token), cache)
        made.append(trace)
    return made


def picture() -> str:
    """Return the SVG. Its rows appear one after the other; a still shows all of them."""
    without, cached = traces()
    width = (len(without.ids) - 1) * CELL + 140
    totals = [
        sum(end - first for first, end in (step["fed"] for step in trace.steps))
        for trace in (without, cached)
    ]
    alt = (
        f"{STEPS} steps of writing. Without a cache every step computes the whole text again, {totals[0]} "
        f"tokens in all; with a KV cache it computes the new ones only, {totals[1]} in all."
    )
    headings = (
        "Without a cache: the whole text, at every step",
        "With a KV cache: the new token only",
    )
    parts, height = [], TOP + STEPS * ROW + 54
    for x, heading, trace, total in zip(
        (20, 40 + width), headings, (without, cached), totals, strict=True
    ):
        parts.append(words(x, 26, heading, "bold 16px"))
        parts.append(words(x, 50, f"Prompt: “{PROMPT}”", "14px"))
        for i, step in enumerate(trace.steps):
            y, (first, end) = TOP + i * ROW, step["fed"]
            cells = "".join(
                f'<rect x="{x + j * CELL}" y="{y - 16}" width="{CELL - 3}" height="22" rx="3" '
                f'fill="{COLOURS["computed now" if j >= first else "read from the cache"]}"/>'
                for j in range(end)
            )
            word = trace.tokenizer.decode([trace.ids[end]]).strip()
            row = cells + words(x + end * CELL + 4, y, f"→ {word}", "15px")
            parts.append(f'<g class="row" style="animation-delay:{0.6 * i:.1f}s">{row}</g>')
        parts.append(words(x, TOP + STEPS * ROW + 8, f"{total} tokens computed", "bold 15px"))
    x = 20
    for label, colour in COLOURS.items():
        parts.append(
            f'<rect x="{x}" y="{height - 28}" width="14" height="14" rx="3" fill="{colour}"/>'
        )
        parts.append(words(x + 20, height - 16, label, "13px"))
        x += 160
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width + 40} {height}" '
        f'width="{2 * width + 40}" role="img">\n<desc>{escape(alt)}</desc>\n<style>\n'
        f".row {{ animation: appear {0.6 * STEPS + 4:.1f}s infinite both }}\n"
        "@keyframes appear { 0% { opacity: 0.2 } 4% { opacity: 1 } 96% { opacity: 1 } 100% { opacity: 0.2 } }\n"
        "@media (prefers-reduced-motion: reduce) { .row { animation: none } }\n</style>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def words(x: float, y: float, text: str, font: str) -> str:
    return (
        f'<text x="{x}" y="{y}" style="font:{font} sans-serif" fill="#222222">{escape(text)}</text>'
    )
