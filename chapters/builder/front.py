"""The front page's picture: what every step reads, without a cache and with one, from two real generations."""

from __future__ import annotations

from pathlib import Path

import torch

import gpt_baseline
import gpt_kv_cache
from chapters.builder.pages import TEMPLATES
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
    halves = []
    for trace, heading, total in zip((without, cached), headings, totals, strict=True):
        steps = []
        for step in trace.steps:
            first, end = step["fed"]
            word = trace.tokenizer.decode([trace.ids[end]]).strip()
            steps.append({"first": first, "end": end, "word": word})
        halves.append({"heading": heading, "steps": steps, "total": total})
    return TEMPLATES.get_template("front.svg").render(
        alt=alt,
        halves=halves,
        prompt=PROMPT,
        width=(len(without.ids) - 1) * CELL + 140,
        height=TOP + STEPS * ROW + 54,
        cell=CELL,
        row=ROW,
        top=TOP,
        colours=COLOURS,
    )
