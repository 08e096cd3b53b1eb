"""The front page's picture: what every step reads, without a cache and with one, from two real generations."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import gpt_baseline
import gpt_kv_cache
from chapters.builder.pages import TEMPLATES
from gpt_kv_cache import KVCache
from load_gpt2_weights import load_model, load_tokenizer
from support.tracing import Trace

PROMPT, STEPS = "The month in which", 7
CELL, ROW, TOP = 26, 28, 88
COLOURS = {"computed now": "#1f4e79", "read from the cache": "#d9d9d9"}


def half(heading: str, module: ModuleType, cache: KVCache | None) -> dict[str, Any]:
    """Return what a half of the picture shows: each step of the text's writing, its tokens computed, and their sum."""
    tokenizer = load_tokenizer("pocket")
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    model = load_model("pocket", model_class=module.GPT)
    trace = Trace("", tokenizer, model.config.n_ctx, Path(), gpt_baseline.context_start)
    trace.begin(ids[0].tolist())
    options = {} if cache is None else {"cache": cache}
    for token in module.generate(model, ids, STEPS, **options):
        trace.step(int(token), cache)
    steps = []
    for first, end in (step["fed"] for step in trace.steps):
        word = tokenizer.decode([trace.ids[end]]).strip()
        steps.append({"first": first, "end": end, "word": word})
    total = sum(step["end"] - step["first"] for step in steps)
    return {"heading": heading, "steps": steps, "total": total}


def picture() -> str:
    """Return the SVG. Its rows appear one after the other; a still shows all of them."""
    halves = [
        half("Without a cache: the whole text, at every step", gpt_baseline, None),
        half("With a KV cache: the new token only", gpt_kv_cache, KVCache()),
    ]
    without, cached = (half["total"] for half in halves)
    alt = (
        f"{STEPS} steps of writing. Without a cache every step computes the whole text again, {without} "
        f"tokens in all; with a KV cache it computes the new ones only, {cached} in all."
    )
    return TEMPLATES.get_template("front.svg").render(
        alt=alt,
        halves=halves,
        prompt=PROMPT,
        width=halves[0]["steps"][-1]["end"] * CELL + 140,
        height=TOP + STEPS * ROW + 54,
        cell=CELL,
        row=ROW,
        top=TOP,
        colours=COLOURS,
    )
