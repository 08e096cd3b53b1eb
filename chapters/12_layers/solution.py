"""Chapter 12: layers that keep different things, and how far a text can go back.

B batch, T new tokens, S tokens cached and new, H heads, D head size, R numbers of a latent, E numbers of its rotated
key. A function leaves its arguments as they are; so does truncate when it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Layered:
    """A cache for each layer, each of its own kind. All have read the same tokens.

    hybrid_kv_cache.Hybrid calls, in every pass: `len(cache)` and `positions` at its beginning,
    `append` in each layer that has keys, and `commit` at its end. A layer with a state reads its
    cache in `layers`, and leaves the next state there: `commit` makes that the state.

    caches: those of the layers. Each serves a single layer, which is layer 0 to it, and has append,
    commit, truncate and clone, which returns a copy. Its truncate raises ValueError, and changes
    nothing, if it doesn't hold what it would need.
    """

    def __init__(self, caches: Iterable[object]) -> None:
        self.layers = list(caches)
        self.n_read = 0

    def __len__(self) -> int:
        """Return how many tokens have been read."""
        return self.n_read

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read."""
        return self.n_read + torch.arange(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values (B, H, T, D) of the tokens at positions pos (T,) to the layer's own
        cache, and return what that returns."""
        # exercise 12.1
        return self.layers[layer].append(0, k, v, pos)

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read, here and in every layer."""
        # exercise 12.1
        for cache in self.layers:
            cache.commit(pos)
        self.n_read += len(pos)

    def truncate(self, n: int) -> None:
        """Keep the first n tokens, from none to all, in all layers or in none. Raises ValueError, and
        changes nothing, if a layer can't; the message must have the number of the first such layer."""
        # exercise 12.1
        caches = [cache.clone() for cache in self.layers]
        for layer, cache in enumerate(caches):
            try:
                cache.truncate(n)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from error
        self.layers, self.n_read = caches, n


def absorbed(
    q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, W_k: Tensor, W_v: Tensor
) -> Tensor:
    """Return what one token's queries read of the latents: a vector for each head (H, D).

    A cached token is a latent (R,) and a rotated key (E,), the same for all heads: latent (S, R)
    and k_rope (S, E), of all tokens that the queries see. In head h, a token's key is latent @
    W_k[h] (D,) and, beside it, its rotated key; its value is latent @ W_v[h] (D,). W_k and W_v are
    (H, R, D). A query has the same two parts, q (H, D) and q_rope (H, E), and a score is divided by
    the square root of the numbers of a key, D + E.

    No keys and values of the S tokens, one or more, may be made: they would take 2 S H R D multiplications. No tensor
    may have the S H D numbers of all keys. Scores may be large, so that exp() of one is infinite. The dtype is that of
    the arguments.
    """
    # exercise 12.2
    scale = 1 / math.sqrt(q.size(1) + q_rope.size(1))  # of the key that isn't made
    q_latent = (W_k @ q[:, :, None])[:, :, 0]  # (H, R)
    scores = q_latent @ latent.T + q_rope @ k_rope.T  # (H, S)
    read = (scale * scores).softmax(dim=1) @ latent  # (H, R)
    return (read[:, None] @ W_v)[:, 0]


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a head's queries q (T, D) read (T, D), T at least 1, and the state (D, D) after all tokens.

    A state answers a key (D,) with the vector key @ state (D,). Token by token:
    - the state fades: it is multiplied by decay[t];
    - the answer to k[t] is corrected: the outer product of k[t] and its error, v[t] minus the
      answer, is added, times write[t];
    - the query reads the answer to q[t].
    decay and write (T,) are from 0 to 1. The dtype is that of the arguments. A pass that fails goes
    back to the given state.
    """
    # exercise 12.3
    read = []
    for t in range(len(q)):
        state = decay[t] * state
        error = v[t] - k[t] @ state
        state = state + write[t] * torch.outer(k[t], error)
        read.append(q[t] @ state)
    return torch.stack(read), state


@dataclass(frozen=True)
class Layer:
    """What a layer keeps of the tokens that it has read.

    kind: "full" or "latent": something of every token. "window": keys and values of the last `kept`
    tokens, at least `window` - 1; a token sees itself and the `window` - 1 tokens before it, at
    least one. "state": the state after the last token.
    saved: a window or a state also keeps checkpoints, copies of what it held after each of these
    numbers of tokens, once so many have been read. A copy isn't lost.
    """

    kind: str
    window: int = 0
    kept: int = 0
    saved: tuple[int, ...] = ()


def can_cut(layer: Layer, n: int, cut: int) -> bool:
    """Say whether a layer that has read n tokens can go on after the first `cut` of them, 0 <= cut
    <= n, exactly as if it had read no others. Any layer can begin a new text."""
    # exercise 12.4
    if cut in (0, n, *layer.saved):
        return True
    if layer.kind == "window":
        first_seen = cut - layer.window + 1  # by the next token
        return max(0, first_seen) >= n - layer.kept
    return layer.kind != "state"


def cuts(layers: Sequence[Layer], n: int) -> list[int]:
    """Return to how many tokens a model of such layers can go back after n: all such numbers from 0
    to n, in order."""
    # exercise 12.4
    return [cut for cut in range(n + 1) if all(can_cut(layer, n, cut) for layer in layers)]


def read_again(layers: Sequence[Layer], n: int, shared: int, prompt: int) -> int:
    """Return how many tokens of a new prompt have to be read, at least, by a model that has read n
    tokens. The first `shared` tokens of both are the same. The prompt's last token is read in any
    case: its logits are wanted."""
    # exercise 12.4
    most = min(shared, prompt - 1)
    return prompt - max(cut for cut in cuts(layers, n) if cut <= most)


def most_drafted(layers: Sequence[Layer], n: int, limit: int) -> int:
    """Return how many drafted tokens, at most `limit` (0 or more), a model may read after n tokens, if it has to
    be able afterwards to keep any number of them, from none to all."""
    # exercise 12.4
    drafted = limit
    while not {*range(n, n + drafted)} <= {*cuts(layers, n + drafted)}:
        drafted -= 1
    return drafted
