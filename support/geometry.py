"""The geometry of keys and values, of any model: what a cache must know about its model is asked here."""

from typing import Any


def kv_heads(config: Any) -> int:
    """Return how many heads of keys and values a model has: a GPT-2 one for each query head, a Llama
    may have fewer."""
    return getattr(config, "n_kv_head", config.n_head)


def rotary_settings(config: Any) -> tuple[Any, ...]:
    """Return what turns the keys that a cache holds: a Llama's frequencies, () for a GPT-2."""
    if not hasattr(config, "rope_theta"):
        return ()
    return config.rope_theta, config.rope_scaling
