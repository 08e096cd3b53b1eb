"""Lecture 5: a model whose layers keep different things, on top of lectures 3 and 4.

`python3 hybrid_kv_cache.py` shows what each kind of layer keeps as a text grows, and that a model
of all kinds writes the same tokens with its cache and without. With --model, a Gemma 3 (270M or 1B;
larger ones come with image parts and aren't read) or another model of such layers writes.

    full     keys and values of every token: lecture 4's layer
    window   keys and values of the latest tokens: most layers of Gemma 3, half of gpt-oss's
    latent   one short vector a token, from which keys and values are made: DeepSeek-V3
    state    a matrix a head, of one size however long the text is: Qwen3-Next, Kimi Linear

The interface of caches stays as it is: append() in each layer, commit() at the end of a pass. (A
layer with a state has no keys to append: it reads the state, and leaves the next one for commit().)
What changes is how far a text can go back. truncate() succeeds where every layer can forget its
latest tokens: a window can't once it has evicted what it would need, and a state never can.

Shapes: B texts, T tokens fed, S tokens held, C embedding, H query heads, D head size, R numbers of
a latent, E numbers of its rotated key, K tokens and N numbers of a convolution.

Sources: Beltagy et al. 2020 (windows); Xiao et al. 2023 and OpenAI 2025, gpt-oss (learned sinks);
DeepSeek-AI 2024, "DeepSeek-V2" (the latent); Yang et al. 2024, "Gated Delta Networks" (the state).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_bounded_cache import SlidingWindowCache
from llama_kv_cache import (
    MLP,
    Attention,
    Block,
    Conv1D,
    KVCache,
    Llama,
    LlamaConfig,
    NormedAttention,
    generate,
    rotate,
    rotation,
)

# --- A cache for each layer -----------------------------------------------------------------------


class LayeredCache(KVCache):
    """A cache for each layer, each of its own kind; all have read the same tokens.

    layers: these caches. Each serves a single layer, its layer 0. Train without a cache: a window
    carries no gradient to tokens of earlier passes.
    """

    def __init__(self, caches: Iterable[KVCache]) -> None:
        super().__init__()
        self.layers = list(caches)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values to the layer's own cache, and return what that returns."""
        return self.layers[layer].append(0, k, v, pos)

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read, in every layer."""
        for cache in self.layers:
            cache.commit(pos)
        super().commit(pos)

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the next T tokens are read. Raises ValueError if a
        commit() was interrupted between two layers."""
        read = [len(cache) for cache in self.layers]
        if {*read} != {len(self)}:
            raise ValueError(f"layers have read {read} tokens, not all {len(self)}: begin anew")
        return super().positions(T)

    def truncate(self, n: int) -> None:
        """Keep the first n tokens, in all layers or in none. Raises ValueError, and changes
        nothing, if there are fewer, or a layer doesn't hold what it would need."""
        caches = [cache.clone() for cache in self.layers]  # until all layers have agreed
        for layer, cache in enumerate(caches):
            try:
                cache.truncate(n)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from error
        self.layers, self.pos = caches, self.pos[:n].clone()

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LayeredCache:
        """Return a copy that shares no memory, on another device or in another dtype if given."""
        other = LayeredCache(cache.to(device, dtype) for cache in self.layers)
        other.pos = self.pos.to(device, copy=True)
        return other

    clone = to  # with no argument

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(cache.nbytes for cache in self.layers)

    def snapshot(self) -> dict[str, object]:
        """Return each layer's snapshot. No slot stands for the same token in all layers."""
        return {"slots": [], "size": 0, "layers": [cache.snapshot() for cache in self.layers]}


# --- Full layers, and what Gemma 3 adds to them ---------------------------------------------------


class GemmaAttention(NormedAttention):
    """Attention with normed queries and keys and a scale of its own; what it adds to the residual
    stream is normed, too.

    Source: Gemma Team 2025, "Gemma 3".
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.scale = math.sqrt(config.head_dim / config.query_scalar)
        self.ln_out = nn.RMSNorm(config.n_embd, eps=config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values (B, H, T, D) of x (B, T, C)."""
        q, k, v = super().project(x)
        return self.scale * q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.ln_out(super().forward(q, k, v, mask))


class GemmaMLP(MLP):
    """An MLP whose gate is a GELU; what it adds to the residual stream is normed."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.ln_out = nn.RMSNorm(config.n_embd, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.c_fc(x).chunk(2, dim=-1)  # (B, T, n_inner) each
        return self.ln_out(self.c_proj(F.gelu(gate, approximate="tanh") * x))  # (B, T, C)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times sqrt(C), which is rounded to the model's dtype first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * x.new_full((), math.sqrt(x.size(-1)))


class FullBlock(Block):
    """Lecture 4's block as it is, or with Gemma 3's two parts."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        if config.gemma:
            self.attn, self.mlp = GemmaAttention(config), GemmaMLP(config)

    def new_cache(self) -> KVCache:
        """Return an empty cache for this layer."""
        return KVCache()


# --- A window, with a rotation of its own and a learned sink --------------------------------------


class WindowAttention(Attention):
    """Attention with one more score a head, the sink: a learned number that takes part in the
    softmax and has no value. A head that finds nothing in its window gives its weight to the
    sink, so that the other weights sum to less than 1. A sink of -inf is none.

    Source: OpenAI 2025, gpt-oss. A model that was trained without windows and sinks makes sinks of
    its first tokens, which a window then has to keep (chapter 3).
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.sink = nn.Parameter(torch.empty(config.n_head))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, T, C): each query's attention-weighted average of the values it may see."""
        T, S = q.size(2), k.size(2)
        if mask is None:  # a single query sees all keys, and several are as many as the keys
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        scores = q.new_zeros(T, S).masked_fill(~mask, -math.inf)  # added to scaled products
        sink = self.sink.to(q.dtype)[:, None, None].expand(-1, T, 1)
        scores = torch.cat([scores.expand(len(sink), T, S), sink], dim=2)  # (H, T, S + 1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # the sink's key and value are 0
        dropout = self.dropout * self.training
        y = F.scaled_dot_product_attention(q, k, v, scores, dropout_p=dropout, enable_gqa=True)
        y = y + 0 * q  # attention may turn NaN into 0
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)


class WindowBlock(FullBlock):
    """A full layer's block, with sinks, positions that rotate at a speed of its own, and a window
    that the cache keeps. Without a cache, the block masks what the window would have evicted."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        if config.sinks:
            self.attn = WindowAttention(config)
        self.window, self.rotary = config.window, config
        if config.window_theta is not None:
            self.rotary = replace(config, rope_theta=config.window_theta, rope_scaling=None)

    def new_cache(self) -> KVCache:
        """Return an empty cache for this layer."""
        return SlidingWindowCache(self.window)

    def forward(
        self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        rope = rotation(pos, self.rotary)  # not that of the other layers
        q, k, v = self.attn.project(self.ln_1(x))  # (B, H, T, D) each
        q, k, mask = rotate(q, rope), rotate(k, rope), None
        v = v + 0 * k  # an overflow in k reaches the logits
        if cache is not None:
            k, v, mask = cache.append(layer, k, v, pos)
        else:  # not by a cache: what a cache does can be compared with this
            mask = (pos <= pos[:, None]) & (pos > pos[:, None] - self.window)  # (T, T)
        x = x + self.drop(self.attn(q, k, v, mask))
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


# --- A latent: keys and values are made from one short vector a token -----------------------------


class LatentAttention(nn.Module):
    """Attention whose keys and values are products of a latent (B, 1, S, R).

    A head's key is latent W_k, its value latent W_v. There are three forms of the same numbers:
    - expanded: make the keys and values of all heads, then attend; what training does;
    - cached and expanded: keep the latents, and make all keys and values again at every token;
    - absorbed: a score is q (latent W_k)^T = (q W_k^T) latent^T, so multiply the query instead, and
      attend to the latents as they are; the weighted average of latents is multiplied by W_v at
      the end. Nothing is made for the S tokens that were read before.
    Keys that are rotated as in lecture 4 would forbid the last form: the rotation of each key's
    position would stand between q and W_k, and no one product would serve all keys. So positions
    are in E numbers of their own, which are rotated before they are cached, and are the same for
    all heads.

    Source: DeepSeek-AI 2024, section 2.1.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        H, D, R, E = config.n_head, config.head_dim, config.kv_rank, config.rope_dim
        self.sizes = (R, E)
        self.n_head, self.dropout = H, config.dropout
        self.q_down, self.ln_q = nn.Identity(), nn.Identity()
        if config.q_rank is not None:  # queries have a latent, too; it saves weights, not memory
            self.q_down = Conv1D(config.n_embd, config.q_rank)
            self.ln_q = nn.RMSNorm(config.q_rank, eps=1e-6)
        self.q_up = Conv1D(config.q_rank or config.n_embd, H * (D + E))
        self.kv_down = Conv1D(config.n_embd, R + E)
        self.ln_kv = nn.RMSNorm(R, eps=1e-6)
        self.kv_up = Conv1D(R, H * 2 * D)  # each head's W_k and W_v
        self.c_proj = Conv1D(H * D, config.n_embd)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the queries (B, H, T, D + E) of x (B, T, C), and what is cached
        (B, 1, T, R + E)."""
        R, E = self.sizes
        q = self.q_up(self.ln_q(self.q_down(x))).unflatten(2, (self.n_head, -1)).transpose(1, 2)
        q, q_rope = q[..., :-E], q[..., -E:]
        latent, k_rope = self.kv_down(x)[:, None].split([R, E], dim=-1)  # (B, 1, T, R or E)
        q = torch.cat([q, rotate(q_rope, rope)], dim=-1)
        return q, torch.cat([self.ln_kv(latent), rotate(k_rope, rope)], dim=-1)

    def forward(self, q: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, T, C), what queries (B, H, T, D + E) read of `cached` (B, 1, S, R + E): one
        query in the absorbed form, a prompt in the expanded one, which takes fewer products for it.
        (A few queries after many tokens would be better off absorbed, too.)"""
        form = self.absorbed if q.size(2) == 1 else self.expanded
        y = form(q, cached, mask)  # (B, H, T, D)
        y = y + 0 * q.sum(dim=-1, keepdim=True)  # attention may turn NaN into 0
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return W_k and W_v of each head (H, R, D)."""
        return self.kv_up.weight.unflatten(1, (self.n_head, -1)).transpose(0, 1).chunk(2, dim=-1)

    def expanded(self, q: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """Return what queries (B, H, T, D + E) read (B, H, T, D): keys and values are made."""
        latent, k_rope = cached.split(self.sizes, dim=-1)
        W_k, W_v = self.matrices()
        k = torch.cat(
            [latent @ W_k, k_rope.expand(-1, self.n_head, -1, -1)], dim=-1
        )  # (B, H, S, D + E)
        causal, dropout = mask is None and q.size(2) > 1, self.dropout * self.training
        return F.scaled_dot_product_attention(q, k, latent @ W_v, mask, dropout, causal)

    def absorbed(self, q: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same without making keys and values: the queries read latents."""
        R, E = self.sizes
        W_k, W_v = self.matrices()
        scale = 1 / math.sqrt(q.size(-1))  # of the key that isn't made, not of the longer query
        q = torch.cat([q[..., :-E] @ W_k.mT, q[..., -E:]], dim=-1)  # (B, H, T, R + E)
        causal, dropout = mask is None and q.size(2) > 1, self.dropout * self.training
        y = F.scaled_dot_product_attention(
            q, cached, cached[..., :R], mask, dropout, causal, scale=scale, enable_gqa=True
        )  # (B, H, T, R)
        return y @ W_v


class LatentBlock(Block):
    """Lecture 4's block, with the latent's attention. Lecture 2's cache keeps the vectors, as those
    of a single head. It wants two tensors of one shape: the two halves of the vectors."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.attn = LatentAttention(config)
        self.rotary = replace(config, head_dim=config.rope_dim)

    def new_cache(self) -> KVCache:
        """Return an empty cache for this layer."""
        return KVCache()

    def forward(
        self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        q, cached = self.attn.project(self.ln_1(x), rotation(pos, self.rotary))
        mask = None
        if cache is not None:
            *halves, mask = cache.append(layer, *cached.chunk(2, dim=-1), pos)
            cached = torch.cat(halves, dim=-1)  # (B, 1, S, R + E)
        x = x + self.drop(self.attn(q, cached, mask))
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


# --- A state: a matrix that each token corrects ---------------------------------------------------

PIECE = 64  # tokens at once: the memory is linear in the text, and so are errors of rounding


class StateCache(KVCache):
    """What a layer with a state keeps: the states (B, H, D, D) and the last K - 1 inputs
    (B, N, K - 1) of its convolution. Its size is the same from the first token on.

    The layer reads layers[0], None at first, and leaves what follows in `pending`; commit() makes
    it what is read next. A state is all tokens in one: none can be taken out again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_read = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None]
        self.pending: tuple[Tensor, Tensor] | None = None

    def commit(self, pos: Tensor) -> None:
        """Count the tokens at positions pos (T,) as read: the pending state is the state."""
        self.layers, self.pending = [self.pending], None
        self.n_read += len(pos)

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> NoReturn:
        """Raise ValueError: keys and values are another layer's."""
        raise ValueError("a state holds no keys and values: begin with the model's new_cache()")

    def truncate(self, n: int) -> None:
        """Keep the first n tokens: all of them, or none. Raises ValueError for other n."""
        if n not in (0, self.n_read):
            raise ValueError(f"can't keep {n} tokens of {self.n_read}: a state holds all or none")
        if n == 0:
            self.layers, self.n_read = [None], 0

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> StateCache:
        """Return a copy that shares no memory, on another device if given. States stay float32;
        the convolution's inputs are in another dtype if given."""
        other = StateCache()
        other.n_read = self.n_read
        if self.n_read > 0:
            state, inputs = self.layers[0]
            other.layers = [(state.to(device, copy=True), inputs.to(device, dtype, copy=True))]
        return other

    clone = to  # with no argument

    @property
    def nbytes(self) -> int:
        """Bytes of the states and the convolution's inputs."""
        return sum(x.nbytes for held in self.layers if held is not None for x in held)

    def __len__(self) -> int:
        return self.n_read

    def snapshot(self) -> dict[str, object]:
        """Return that no slot holds a token of its own."""
        return {"slots": [], "size": 0}


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what queries q (B, H, T, D) read (B, H, T, D), and the state (B, H, D, D) after all
    tokens, one after another.

    A state is a matrix M that answers a key k with the value k M. A token first multiplies M by its
    decay, whose log (B, H, T, 1) is at most 0: a decay of 1 keeps all. Then it corrects the answer
    to its own key: it adds k^T (v - k M), times write, from 0 to 1. With write 1 and a key of
    length 1, the answer to k is then exactly v, whatever stood there before. A plain sum of k^T v,
    the rule "sum" of BCT, never takes the old answer away.
    """
    read = []
    for t in range(q.size(2)):
        here = slice(t, t + 1)
        state = state * log_decay[:, :, here].exp()
        error = v[:, :, here] - k[:, :, here] @ state  # (B, H, 1, D)
        state = state + k[:, :, here].mT @ (write[:, :, here] * error)
        read.append(q[:, :, here] @ state)
    return torch.cat(read, dim=2), state


def delta_rule_at_once(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same as delta_rule(), for all tokens at once, in memory of T x T numbers a head.

    Each token's correction depends on those before it, all linearly. So the T corrections u solve
    a triangular system: u_t = write_t (v_t - k_t M_0 - sum over s < t of (k_t . k_s) u_s), where
    what is from before fades on the way.
    """
    fade = log_decay.cumsum(dim=2)  # (B, H, T, 1), log of how much of M_0 is left at each token
    # How much of token s's correction is left at t, 0 for s > t: exp() mustn't see those, either.
    left = (fade - fade.mT).tril().exp().tril()  # (B, H, T, T)
    system = (write * (k @ k.mT) * left).tril(-1)  # and ones on the diagonal
    wanted = write * (v - fade.exp() * (k @ state))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = fade.exp() * (q @ state) + (q @ k.mT * left) @ u
    last = fade[:, :, -1:]
    return read, last.exp() * state + (k * (last - fade).exp()).mT @ u


class StateAttention(nn.Module):
    """A layer without attention to tokens: it reads and corrects a state.

    Queries, keys and values pass a short convolution, each number for itself over the last K
    tokens, so that a key can say what came just before; keys have length 1. Two numbers of each
    head and token say how far the state is corrected and how fast it fades: its decay,
    exp(-speed softplus(fade + offset)), is between 0 and 1. A third gate, of each number, lets
    through what is read. The state is float32 in any model, since errors of rounding would add up
    over the text. Dropout acts on the layer's sum only.

    Source: Yang et al. 2024; details as in Qwen3-Next.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.n_head, self.K = config.n_head, config.conv
        width = config.n_head * config.head_dim
        self.c_attn = Conv1D(config.n_embd, 3 * width)
        self.conv = nn.Parameter(torch.empty(3 * width, 1, self.K))
        self.c_gates = Conv1D(config.n_embd, 2 * config.n_head)  # of writing and fading
        self.log_speed = nn.Parameter(torch.empty(config.n_head))
        self.offset = nn.Parameter(torch.empty(config.n_head))
        self.c_out = Conv1D(config.n_embd, width)  # the gate of what is read
        self.ln_y = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.c_proj = Conv1D(width, config.n_embd)

    def forward(
        self, x: Tensor, held: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what x (B, T, C) reads (B, T, C), and the new states and inputs of the
        convolution; held: those before, None at the beginning of a text."""
        inputs = self.c_attn(x).mT  # (B, N, T), N = 3 * H * D
        if held is None:
            D = inputs.size(1) // (3 * self.n_head)
            state = x.new_zeros(len(x), self.n_head, D, D, dtype=torch.float32)
            before = inputs.new_zeros(*inputs.shape[:2], self.K - 1)
        else:
            state, before = held
            expected = [*before.shape[:2], state.size(1), before.dtype, before.device]
            given = [*inputs.shape[:2], self.n_head, inputs.dtype, inputs.device]
            if given != expected:
                raise ValueError(f"a cache for [B, N, H, dtype, device] {expected} got {given}")
        inputs = torch.cat([before, inputs], dim=2)
        y = F.silu(F.conv1d(inputs, self.conv, groups=inputs.size(1)))  # (B, N, T)
        q, k, v = y.unflatten(1, (3, self.n_head, -1)).mT.float().unbind(dim=1)  # (B, H, T, D) each
        q, k = unit(q) / math.sqrt(q.size(-1)), unit(k)
        write, fade = self.c_gates(x).float().mT[..., None].chunk(2, dim=1)  # (B, H, T, 1) each
        speed, offset = self.log_speed.float().exp(), self.offset.float()
        log_decay = -speed[:, None, None] * F.softplus(fade + offset[:, None, None])
        rule = delta_rule if x.size(1) == 1 else delta_rule_at_once
        read, given = [], (q, k, v, log_decay, write.sigmoid())
        for piece in zip(*(part.split(PIECE, dim=2) for part in given), strict=True):
            y, state = rule(state, *piece)
            read.append(y)
        y = torch.cat(read, dim=2).transpose(1, 2).to(x.dtype)  # (B, T, H, D)
        y = self.ln_y(y)
        y = y.flatten(2) * F.silu(self.c_out(x))
        return self.c_proj(y), (state, inputs[:, :, 1 - self.K :].clone())


def unit(x: Tensor) -> Tensor:
    """Return vectors x (..., D), scaled to length 1; zeros stay zeros."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


class StateBlock(Block):
    """Lecture 4's block, with a state in place of attention."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.attn = StateAttention(config)

    def new_cache(self) -> KVCache:
        """Return an empty cache for this layer."""
        return StateCache()

    def forward(
        self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        own = StateCache() if cache is None else cache.layers[layer]
        y, own.pending = self.attn(self.ln_1(x), own.layers[0])
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


# --- A model of all four --------------------------------------------------------------------------

KINDS = {"full": FullBlock, "window": WindowBlock, "latent": LatentBlock, "state": StateBlock}


@dataclass
class HybridConfig(LlamaConfig):
    """Geometry of a model with layers of different kinds.

    kinds: one of KINDS for each layer. Raises ValueError if there aren't n_layer of them, or one
    isn't known, or a number is out of range.
    """

    kinds: tuple[str, ...] = ()
    window: int = 128  # tokens that a window layer's query sees, its own included
    window_theta: float | None = 1e4  # base of a window layer's frequencies; None: as elsewhere
    sinks: bool = True  # each head of a window layer has a learned sink
    q_rank: int | None = None  # numbers of a query's latent; None: queries have none
    kv_rank: int = 512  # R, numbers of a latent
    rope_dim: int = 64  # E, numbers of a latent layer's rotated key
    conv: int = 4  # K, tokens that a state layer's convolution sees
    gemma: bool = False  # scaled embeddings, and in each block GemmaAttention and GemmaMLP
    query_scalar: int = 256  # Gemma's scores are divided by its root, not by that of head_dim

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.kinds) != self.n_layer or not set(self.kinds) <= set(KINDS):
            raise ValueError(
                f"kinds must be one of {', '.join(KINDS)} for each of {self.n_layer} layers, "
                f"got {self.kinds}"
            )
        least = dict.fromkeys(("window", "q_rank", "kv_rank", "query_scalar"), 1)
        least |= {"rope_dim": 2, "conv": 2}
        for name in least:
            value = getattr(self, name)
            if value is not None and value < least[name]:
                raise ValueError(f"{name} must be at least {least[name]}, got {value}")
        is_normed = self.qk_norm or self.gemma
        if (is_normed or self.qkv_bias) and {"latent", "state"} & {*self.kinds}:
            names = "qk_norm, qkv_bias and gemma"
            raise ValueError(f"{names} are of full and window layers only, got {self.kinds}")
        if is_normed and self.sinks and "window" in self.kinds:
            raise ValueError(
                "a window layer with sinks can't have qk_norm or gemma: set sinks=False"
            )
        if self.rope_dim % 2 or self.kv_rank % 2:
            sizes = f"rope_dim is {self.rope_dim}, kv_rank {self.kv_rank}"
            raise ValueError(f"{sizes}: both must be even, for pairs and halves")


class Hybrid(Llama):
    """A Llama whose layers are of different kinds. Raises ValueError as Llama does."""

    config_class = HybridConfig

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.h = nn.ModuleList(KINDS[kind](config) for kind in config.kinds)
        if config.gemma:
            self.wte = ScaledEmbedding(config.vocab_size, config.n_embd)
            self.lm_head = self.wte if config.tied else self.lm_head
        self.init_weights()
        for name, parameter in self.named_parameters():  # what a small random number isn't good for
            if name.endswith("conv"):
                nn.init.zeros_(parameter)
                parameter.data[..., -1] = 1  # at first, each token alone
            elif name.endswith(("sink", "log_speed")):
                nn.init.zeros_(parameter)
            elif name.endswith("offset"):
                nn.init.constant_(parameter, -4)  # of a state, 98% stays at each token

    def new_cache(self) -> LayeredCache:
        """Return an empty cache, of each layer's kind."""
        return LayeredCache(block.new_cache() for block in self.h)

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T), as Llama does. Raises ValueError if the cache
        isn't of as many layers."""
        if cache is not None and len(cache.layers) != len(self.h):
            raise ValueError(
                f"a cache of {len(cache.layers)} layers can't serve a model of {len(self.h)}: "
                "begin with its new_cache()"
            )
        return super().forward(ids, cache, last_only)


def show(window: int) -> None:
    """Show what each kind of layer keeps, in a small random model of all kinds."""
    from gpt_baseline import generate as generate_uncached
    from support.tables import table

    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "n_ctx": 2048, "n_layer": 4, "n_embd": 128, "n_inner": 256}
    heads = {"n_head": 8, "n_kv_head": 4, "head_dim": 16, "kv_rank": 24, "rope_dim": 8}
    heads |= {"kinds": tuple(KINDS), "window": window, "tied": False}
    model = Hybrid(HybridConfig(**sizes, **heads))
    ids = torch.randint(200, (1, 1024))
    cache, rows = model.eval().new_cache(), []
    for end in (64, 256, 1024):
        model(ids[:, len(cache) : end], cache, last_only=True)
        held = [f"{layer.nbytes:,}" for layer in cache.layers]
        rows.append([f"{end:,}", *held, f"{cache.nbytes / end:,.0f}"])
    print("A random model with a layer of each kind, float32. Bytes that each layer keeps:\n")
    print(table(["tokens", *KINDS, "a token, in all"], rows))
    prompt = ids[:, :100]
    written = torch.cat(list(generate(model, prompt, 100)), dim=1)
    uncached = torch.cat(list(generate_uncached(model, prompt, 100)), dim=1)
    same = "yes" if torch.equal(written, uncached) else "NO"
    print(f"\n100 tokens after a prompt of 100, with the cache and without: same tokens: {same}")
    print(f"Different tokens among them: {len(set(written[0].tolist()))}")
    print("\nBack from 1,024 tokens to 1,000, by each layer alone:")
    for kind, layer in zip(KINDS, cache.layers, strict=True):
        try:
            layer.clone().truncate(1000)
            print(f"  {kind}: yes")
        except ValueError as error:
            print(f"  {kind}: no, {error}")


def main(argv: list[str] | None = None) -> None:
    from support.cli import WRITING, CommandLine, whole_number

    cli = CommandLine(__doc__, "python3 %(prog)s --model FOLDER --prompt TEXT")
    about = "tokens that the random model's window layer sees"
    cli.add_argument("--window", type=whole_number(1, 2048), default=64, metavar="N", help=about)
    about = "write with a model: a folder of Gemma 3 (270M or 1B; larger ones come with image "
    about += "parts and aren't read), Youtu-LLM, a DeepSeek-V3 without experts, or a Mistral, "
    about += "Qwen2 or Qwen3 with windows"
    cli.add_model_options(about, *WRITING, "--chat", "--system")
    cli.set_defaults(model="")
    with cli.parse(argv) as args, torch.no_grad():
        if not args.model:
            show(args.window)
            return
        from formats.chat import encode_given_prompt
        from load_gpt2_weights import load_model, load_tokenizer
        from support.printing import end_tokens_of, stream

        model = load_model(args.model, model_class=Hybrid, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        ids = torch.tensor([encode_given_prompt(args, tokenizer)], device=args.device)  # (1, T)
        print(f"\n{args.prompt}", end="", flush=True)
        options = {"temperature": args.temperature, "top_k": args.top_k}
        options["generator"] = torch.Generator(args.device).manual_seed(args.seed)
        options["stop_ids"] = end_tokens_of(tokenizer)
        cache = model.new_cache()
        tokens = generate(model, ids, args.max_new_tokens, cache=cache, **options)
        stream(tokens, tokenizer, cache)


if __name__ == "__main__":
    main()
