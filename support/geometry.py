"""The geometry of any model's keys and values: all that a cache must know about its model."""

from typing import Any


def kv_heads(config: Any) -> int:
    """Return how many heads of keys and values a model has: a GPT-2 has one for each query head, a
    Llama may have fewer."""
    return getattr(config, "n_kv_head", config.n_head)


def rotary_settings(config: Any) -> tuple[Any, ...]:
    """Return the settings that a Llama's keys are rotated by, its rotary base and scaling; () for a
    GPT-2."""
    if not hasattr(config, "rope_theta"):
        return ()
    return config.rope_theta, config.rope_scaling
