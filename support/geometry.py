"""The geometry of any model's keys and values: all that a cache must know about its model."""

from collections.abc import Collection
from typing import Any

KEEPS_EVERY_TOKEN = ("full", "latent")  # kinds of layers that can forget any number of tokens


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


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kind of each layer, one of lecture 5's; () for a model whose layers share one
    cache."""
    return getattr(config, "kinds", ())


def can_go_back(config: Any) -> bool:
    """Return whether a model's cache can always forget its latest tokens. A window can't once it
    has evicted what it would need, and a state or a BCT's memory never can."""
    return {*layer_kinds(config)} <= {*KEEPS_EVERY_TOKEN} and not hasattr(config, "slots")


def check_kinds(config: Any, limits: str, taken: Collection[str] = ()) -> None:
    """Raise ValueError, which says what the limits are, if a layer isn't of a kind that is taken. It
    names the first one, and a full layer only if there is no other."""
    kinds = layer_kinds(config)
    refused = [layer for layer, kind in enumerate(kinds) if kind not in taken]
    if refused:
        layer = min(refused, key=lambda layer: kinds[layer] == "full")
        raise ValueError(f"{limits}; layer {layer} of this model is a {kinds[layer]} layer")
