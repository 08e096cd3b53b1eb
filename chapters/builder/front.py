"""The front page's picture: what every step reads, without a cache and with one, from two real generations."""

from types import ModuleType
from typing import Any

import torch

import gpt_baseline
import gpt_kv_cache
from chapters.builder.pages import TEMPLATES
from gpt_kv_cache import KVCache
from load_gpt2_weights import load_model, load_tokenizer

PROMPT, STEPS = "The month in which", 7


def half_picture(heading: str, module: ModuleType, **options: KVCache) -> dict[str, Any]:
    """Return what one half of the picture shows: the steps of a generation, the tokens that each
    computes, and their total."""
    tokenizer = load_tokenizer("pocket")
    ids, steps, computed = tokenizer.encode(PROMPT), [], []
    model = load_model("pocket", model_class=module.GPT)
    model.register_forward_pre_hook(lambda _, args: computed.append(args[0].size(1)))
    for token in module.generate(model, torch.tensor([ids]), STEPS, **options):
        end, word = len(ids), tokenizer.decode([int(token)]).strip()
        steps.append({"first": end - computed[-1], "end": end, "word": word})
        ids.append(int(token))
    return {"heading": heading, "steps": steps, "total": sum(computed)}


def front_picture() -> str:
    """Return the SVG. Its rows appear one after the other; a still shows all of them."""
    halves = [
        half_picture("Without a cache: the whole text, at every step", gpt_baseline),
        half_picture("With a KV cache: the new token only", gpt_kv_cache, cache=KVCache()),
    ]
    uncached, cached = (half["total"] for half in halves)
    alt = (
        f"{STEPS} steps of writing. Without a cache every step computes the whole text again, {uncached} "
        f"tokens in all; with a KV cache it computes the new ones only, {cached} in all."
    )
    return TEMPLATES.get_template("front.svg").render(alt=alt, halves=halves, prompt=PROMPT)
