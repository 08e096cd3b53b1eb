"""GPT-2 from scratch, with caches that don't grow: a sliding window on the last tokens, and the
memory slots of a Bounded-Cache Transformer (BCT). `diff gpt_kv_cache.py gpt_bounded_cache.py` shows
the window first (# RING), then BCT (# BCT). # NEW marks what gpt_kv_cache.py added.

Shapes: B batch, T tokens fed, S tokens attended to, L layers, H heads, D head size, C width
(n_embd), V vocabulary, W window, M memory slots of a head, R recent tokens kept beside them.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch"; Xiao et al. 2023,
"Efficient Streaming Language Models with Attention Sinks"; Yi et al. 2024, "A Method for Building
Large Language Models with Predefined KV Cache Capacity" (BCT).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    """Geometry of a GPT-2; the defaults are those of the 124M model.

    n_inner and head_dim follow from n_embd if they aren't given; dropout acts in train() only.
    Raises ValueError if a number is out of range, or n_embd can't be divided among the heads.
    """

    vocab_size: int = 50257
    n_ctx: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int | None = None
    head_dim: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd", "head_dim", "n_inner")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                given = f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}"
                raise ValueError(f"{given}; give head_dim")
            self.head_dim = self.n_embd // self.n_head
        if self.n_inner is None:
            self.n_inner = 4 * self.n_embd


class Conv1D(nn.Module):
    """A linear layer, x @ W + b; W is stored (in, out), as in GPT-2's public weights."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)  # (..., n_in) -> (..., n_out)


class KVCache:  # NEW
    """Keys, values and positions of the tokens that a model has read; it grows with every token.

    A model can serve any number of caches; a new text gets a new cache. Every cache offers:
    - for a pass, positions(), append() in each layer, and commit() at the end, so that a pass that
      fails changes nothing;
    - len(), the number of tokens read; nbytes, their memory; layers, an entry for each layer;
    - truncate(), which keeps the first tokens; to() and clone(), which copy the cache;
    - snapshot(), which says what token is in each slot; show() of support/printing.py prints it.
    """

    def __init__(self, layers: list[Tensor] | None = None,  # NEW
                 pos: Tensor | None = None) -> None:  # NEW
        self.layers = layers or []  # NEW  each layer's keys and values (2, B, H, S, D)
        self.pos = torch.empty(0, dtype=torch.long) if pos is None else pos  # NEW  (S,)

    def append(self, layer: int, k: Tensor, v: Tensor,  # NEW
               pos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # NEW
        """Add a layer's keys and values (B, H, T, D) of the tokens at positions pos (T,).
        Return all of its keys and values (B, H, S, D), and a mask (T, S) of the keys that each
        query sees; None if none is needed: all keys are new, or a single query sees them all.
        Raises ValueError if the cache has another batch size, geometry, device or dtype."""
        kv, mask = torch.stack([k, v]), None  # NEW  (2, B, H, T, D)
        if len(self) == 0:  # NEW
            del self.layers[layer:]  # NEW  what a failed pass left
            self.layers.append(kv)  # NEW
        else:  # NEW  what a failed pass left lies past len(self)
            self.check(self.layers[layer], kv)  # NEW
            kv = torch.cat([self.layers[layer][..., : len(self), :], kv], dim=3)  # NEW
            self.layers[layer] = kv  # NEW
            if len(pos) > 1:  # NEW
                mask = torch.cat([self.pos, pos]) <= pos[:, None]  # NEW  up to one's own position
        return kv[0], kv[1], mask  # NEW

    def commit(self, pos: Tensor) -> None:  # NEW
        """Count the tokens at positions pos (T,) as read: what was appended for them now counts."""
        self.pos = torch.cat([self.pos, pos]) if len(self) else pos  # NEW

    def positions(self, T: int) -> Tensor:  # NEW
        """Return the positions (T,) at which the next T tokens are read."""
        start = self.pos.max() + 1 if len(self.pos) > 0 else 0  # NEW
        return start + torch.arange(T, device=self.pos.device)  # NEW

    def check(self, held: Tensor, new: Tensor) -> None:  # NEW
        """Raise ValueError if new keys and values (2, B, H, T, D) can't follow the held ones."""
        expected = [*held.shape[1:3], held.size(4), held.dtype, held.device]  # NEW
        given = [*new.shape[1:3], new.size(4), new.dtype, new.device]  # NEW
        if given != expected:  # NEW
            raise ValueError(f"a cache for [B, H, D, dtype, device] {expected} got {given}")  # NEW

    def truncate(self, n: int) -> None:  # NEW
        """Keep the first n tokens and free the rest. Raises ValueError if there are fewer."""
        if not 0 <= n <= len(self):  # NEW
            raise ValueError(f"can't keep {n} tokens of {len(self)}")  # NEW
        layers = self.layers if n > 0 else []  # NEW  an empty cache serves any model
        self.layers = [kv[..., :n, :].clone() for kv in layers]  # NEW
        self.pos = self.pos[:n].clone()  # NEW

    def to(self, device: torch.device | str | None = None,  # NEW
           dtype: torch.dtype | None = None) -> KVCache:  # NEW
        """Return a copy that shares no memory, on another device or in another dtype if given."""
        layers = [kv[..., : len(self), :].to(device, dtype, copy=True) for kv in self.layers]  # NEW
        return KVCache(layers, self.pos.to(device, copy=True))  # NEW

    clone = to  # NEW  with no argument

    @property  # NEW
    def nbytes(self) -> int:  # NEW
        """Bytes of all keys and values: 2 * L * B * H * S * D * bytes per number."""
        return sum(kv[..., : len(self), :].nbytes for kv in self.layers)  # NEW

    def __len__(self) -> int:  # NEW
        return len(self.pos)  # NEW

    def snapshot(self) -> dict[str, object]:  # NEW
        """Return the position of the token in each slot, and how many slots there are."""
        return {"slots": self.pos.tolist(), "size": len(self)}  # NEW


class SlidingWindowCache(KVCache):  # RING
    """The last `window` tokens and the first `sinks`, in slots that are allocated once.

    The ring has one slot more than its window: a new token takes the slot of a token that no query
    sees any more, so that decoding copies nothing and a pass that fails destroys nothing. Tokens of
    earlier passes carry no gradient. len() counts the tokens read. Raises ValueError if the window
    is below 1 or sinks below 0.

    Source: Raschka 2025, tips 1 and 2; Xiao et al. 2023 (sinks).
    """

    def __init__(self, window: int, sinks: int = 0) -> None:  # RING
        super().__init__()  # RING
        if window < 1 or sinks < 0:  # RING
            raise ValueError(f"window {window}, sinks {sinks}: must be at least 1 and 0")  # RING
        self.window, self.sinks = window, sinks  # RING
        self.n_slots = sinks + window + 1  # RING
        self.n_read = 0  # RING
        self.pending: list[Tensor | None] = []  # RING  (2, B, H, T, D) to write; None: written

    def held(self, n: int) -> Tensor:  # RING
        """Return the position of the token in each slot (S,), once n tokens have been read."""
        slot, last = torch.arange(min(n, self.n_slots)), n - 1  # RING
        ring = last - (last - slot) % (self.window + 1)  # RING
        return torch.where(slot < self.sinks, slot, ring)  # RING

    def visible(self, k_pos: Tensor, pos: Tensor | int) -> Tensor:  # RING
        """Return which keys at k_pos (S,) a query at pos sees: (S,), or (T, S) for pos (T, 1)."""
        return (k_pos <= pos) & ((k_pos > pos - self.window) | (k_pos < self.sinks))  # RING

    def append(self, layer: int, k: Tensor, v: Tensor,  # RING
               pos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # RING
        """Add a layer's keys and values (B, H, T, D) of the tokens at positions pos (T,).
        Return the keys and values (B, H, S, D) that they see, and a mask (T, S) or None.
        Raises ValueError if the cache is of another batch size, geometry, device or dtype."""
        kv, n, T = torch.stack([k, v]), len(self), len(pos)  # RING  (2, B, H, T, D)
        if n == 0:  # RING
            del self.layers[layer:]  # RING  what a failed pass left
            self.layers.append(kv.new_zeros(*kv.shape[:3], self.n_slots, kv.size(4)))  # RING
        ring = self.layers[layer]  # RING  (2, B, H, sinks + W + 1, D)
        self.check(ring, kv)  # RING
        in_place = (T == 1 or n + T <= self.n_slots) and not kv.requires_grad  # RING
        del self.pending[layer:]  # RING
        self.pending.append(None if in_place else kv.detach())  # RING
        if in_place:  # RING  to the spare slot, or to empty ones
            slot = n  # RING
            if n >= self.n_slots:  # RING
                slot = self.sinks + (n - self.sinks) % (self.window + 1)  # RING
            ring[..., slot : slot + T, :] = kv  # RING
            kv = ring[..., : n + T, :]  # RING
            if n + T < self.n_slots and (T == 1 or n == 0):  # RING  the window hides nothing
                return kv[0], kv[1], None  # RING
            k_pos = self.held(n + T)  # RING
        else:  # RING  read before writing: the first new token sees what the last one evicts
            held = self.pos.to(pos)  # RING
            seen = self.visible(held, n)  # RING  not what a failed pass left
            kv = torch.cat([ring[..., : len(seen), :][..., seen, :], kv], dim=3)  # RING
            k_pos = torch.cat([held[seen], pos])  # RING
        return kv[0], kv[1], self.visible(k_pos.to(pos), pos[:, None])  # RING

    def commit(self, pos: Tensor) -> None:  # RING
        """Count the tokens at positions pos (T,) as read, and write those of a chunk to slots."""
        n = len(self)  # RING
        held = self.held(n + len(pos)).to(pos)  # RING
        slots = (held >= n).nonzero()[:, 0]  # RING  those of the new tokens
        for ring, kv in zip(self.layers, self.pending, strict=True):  # RING
            if kv is not None:  # RING
                ring[..., slots, :] = kv[..., held[slots] - n, :]  # RING
        self.n_read, self.pos, self.pending = n + len(pos), held, []  # RING

    def truncate(self, n: int) -> None:  # RING
        """Keep the first n tokens; the memory stays, unless n is 0. Raises ValueError if they
        aren't all held any more."""
        evicted = max(0, len(self) - self.sinks - self.window)  # RING
        if not 0 <= n <= len(self) or (evicted and 0 < n < len(self)):  # RING
            raise ValueError(f"can't keep {n} tokens of {len(self)}, {evicted} evicted")  # RING
        self.n_read, self.pos = n, self.pos[:n]  # RING
        if n == 0:  # RING
            self.layers = []  # RING  an empty cache serves any model

    def to(self, device: torch.device | str | None = None,  # RING
           dtype: torch.dtype | None = None) -> KVCache:  # RING
        """Return a copy that shares no memory, on another device or in another dtype if given."""
        other = type(self)(self.window, self.sinks)  # RING
        other.layers = [kv.to(device, dtype, copy=True) for kv in self.layers if len(self)]  # RING
        other.n_read, other.pos = len(self), self.pos.to(device, copy=True)  # RING
        return other  # RING

    clone = to  # RING  with no argument

    @property  # RING
    def nbytes(self) -> int:  # RING
        """Bytes of all slots: 2 * L * B * H * (sinks + W + 1) * D * bytes per number."""
        return sum(kv.nbytes for kv in self.layers if len(self))  # RING

    def __len__(self) -> int:  # RING
        return self.n_read  # RING

    def snapshot(self) -> dict[str, object]:  # RING
        """Return also the positions of the tokens that later queries don't see, and the sinks."""
        evicted = self.pos[~self.visible(self.pos, len(self) - 1)]  # RING
        ring = {"size": self.n_slots, "evicted": evicted.tolist(), "sinks": self.sinks}  # RING
        return {**super().snapshot(), **ring}  # RING


class PreallocatedCache(SlidingWindowCache):  # RING
    """All tokens of a text, at most `window`, in slots that are allocated once; none is evicted."""

    def append(self, layer: int, k: Tensor, v: Tensor,  # RING
               pos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # RING
        """Do as SlidingWindowCache does; raise ValueError, and change nothing, if there is no room
        for the tokens at positions pos (T,)."""
        if len(self) + len(pos) > self.window:  # RING
            held = f"{len(pos)} tokens after {len(self)}"  # RING
            raise ValueError(f"{held}: this preallocated cache holds {self.window}")  # RING
        return super().append(layer, k, v, pos)  # RING


class Attention(nn.Module):
    """Multi-head self-attention; a cache fits between its two steps, project() and forward()."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = config.n_head, config.head_dim, config.dropout
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_head * config.head_dim)
        self.c_proj = Conv1D(config.n_head * config.head_dim, config.n_embd)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values (B, H, T, D) of x (B, T, C)."""
        B, T, _ = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v + 0 * k  # an overflow in k reaches the logits

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:  # NEW
        """Return (B, T, C): each query's attention-weighted average of the values it may see."""
        causal = mask is None and q.size(2) > 1  # NEW  a single query sees every key it is given
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal,  # NEW
                                           dropout_p=self.dropout * self.training)
        y = y + 0 * q  # attention may turn NaN into 0
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class MLP(nn.Module):
    """The part of a block that treats each token alone: widen, apply a nonlinearity, narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.n_inner)
        self.c_proj = Conv1D(config.n_inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4C); GPT-2's approximation
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int) -> Tensor:  # NEW
        (q, k, v), mask = self.attn.project(self.ln_1(x)), None  # NEW  (B, H, T, D) each
        if cache is not None:  # NEW
            k, v, mask = cache.append(layer, k, v, pos)  # NEW  (B, H, S, D) twice, (T, S) or None
        x = x + self.drop(self.attn(q, k, v, mask))  # NEW
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


class GPT(nn.Module):
    """GPT-2 with its public parameter names; the output head is the token embedding, transposed."""
    config_class, block_class = GPTConfig, Block  # the loader builds the first, __init__ the second

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_ctx, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(self.block_class(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.context = config.n_ctx  # positions that a text may take
        self.lm_head = self.wte
        self.init_weights()

    def init_weights(self) -> None:
        """Start as GPT-2 did: N(0, 0.02), residual projections narrower by sqrt(2 L), biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif ".ln_" not in name and not name.startswith("ln_f"):
                branches = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(branches))

    new_cache = KVCache  # NEW  what generate() begins with

    def forward(self, ids: Tensor, cache: KVCache | None = None,  # NEW
                last_only: bool = False) -> Tensor:  # NEW
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text; with last_only,
        the last token's (B, 1, V). Raises ValueError, and changes nothing, if there is no token,
        the text exceeds n_ctx, or the cache has another number of layers."""
        n_read, T = 0 if cache is None else len(cache), ids.size(1)  # NEW
        if n_read > 0 and len(cache.layers) != len(self.h):  # NEW
            geometry = f"{len(cache.layers)} layers can't serve a model of {len(self.h)}"  # NEW
            raise ValueError(f"a cache of {geometry}")  # NEW
        pos = torch.arange(T) if cache is None else cache.positions(T)  # NEW
        pos = pos.to(ids.device)  # NEW  (T,)
        if T < 1 or pos.max() >= self.context:
            limits = f"must be at least 1 and end within n_ctx = {self.context}"
            raise ValueError(f"{T} tokens after {n_read}: {limits}")
        x = self.drop(self.wte(ids) + self.wpe(pos))  # (B, T, C)
        for layer, block in enumerate(self.h):  # NEW
            x = block(x, pos, cache, layer)  # NEW
        logits = self.head(x[:, -1:] if last_only else x)  # NEW
        if cache is not None:  # NEW
            cache.commit(pos)  # NEW  last of all: a failure above leaves the cache as it was
        return logits  # NEW

    def head(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the last block's output (B, T, C)."""
        return F.linear(self.ln_f(x), self.lm_head.weight)


def context_start(n_tokens: int, n_ctx: int) -> int:
    """Return the index of the first of n_tokens that is still in the context.

    Past n_ctx the oldest half is forgotten. Keys belong to the positions at which they were read,
    so the other half is read again, from position 0. Moving by half a context at a time keeps the
    cost of this at O(1) per token.
    """
    if n_tokens <= n_ctx:
        return 0
    half = (n_ctx + 1) // 2
    return math.ceil((n_tokens - n_ctx) / half) * half


def sample(logits: Tensor, temperature: float, top_k: int | None,
           generator: torch.Generator | None) -> Tensor:
    """Choose the next tokens (B, 1) from logits (B, V): the best at temperature 0, else a draw.
    Raises ValueError if the largest logit of a row isn't finite."""
    best = logits.max(dim=-1, keepdim=True)  # values and indices (B, 1)
    if not best.values.isfinite().all():
        raise ValueError(f"logits aren't finite: activations overflow (in {logits.dtype})")
    if temperature == 0:
        return best.indices
    logits = logits.float() - best.values  # <= 0: no overflow below
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Return logits (B, V) in which all but the top_k largest of each row are -inf."""
    kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth_best, -math.inf)


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0,
             top_k: int | None = None, stop_ids: Collection[int] = (),
             generator: torch.Generator | None = None,  # NEW
             cache: KVCache | None = None) -> Iterator[Tensor]:  # NEW
    """Yield up to max_new_tokens tokens (B, 1) after ids (B, T), each as soon as it is known. What
    the cache holds of ids isn't read again; the cache grows, and is emptied when the context is
    full. A row that has produced one of stop_ids repeats it; when all have, generation ends.
    Raises ValueError, at the first token, if ids is empty or not longer than the cache, or an
    option is out of range, and at any token whose logits aren't finite."""
    cache = model.new_cache() if cache is None else cache  # NEW
    cached_from = 0  # NEW  index in ids of the first cached token
    if ids.dim() == 2 and len(cache) > 0 and ids.size(1) <= len(cache):  # NEW
        lengths = f"{ids.size(1)} tokens, must be longer than the {len(cache)} in the cache"  # NEW
        raise ValueError(f"ids, {lengths}")  # NEW
    check_options(ids, max_new_tokens, temperature, top_k)
    stops = torch.tensor([*stop_ids], device=ids.device)  # (N,)
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    for _ in range(max_new_tokens):
        start = context_start(ids.size(1), model.context)
        if start > cached_from:  # NEW  full; positions are baked into K: read again what is kept
            cache.truncate(0)  # NEW
            cached_from = start  # NEW
        logits = model(ids[:, start + len(cache) :], cache, last_only=True)[:, -1]  # NEW  (B, V)
        next_id = sample(logits, temperature, top_k, generator)  # (B, 1)
        if len(stops):
            next_id = torch.where(done, ids[:, -1:], next_id)
            done = torch.isin(next_id, stops)
        yield next_id
        if len(stops) and done.all():
            return
        ids = torch.cat([ids, next_id], dim=1)  # (B, T + 1)


def check_options(ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise ValueError, with the value given and those allowed, if generate() can't use these."""
    if ids.dim() != 2 or ids.size(1) == 0:
        raise ValueError(f"ids must have shape (B, T) with T at least 1, got {tuple(ids.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise ValueError(f"temperature must be 0, or at least 1e-6 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


@dataclass  # BCT
class BCTConfig(GPTConfig):  # BCT
    """Geometry of a Bounded-Cache Transformer (BCT): that of a GPT-2, and that of its memory.

    rule="sum", recent=0 is the paper's section 3.2 and nothing else. Its W_wv is the block's own
    projection to keys and values, or with own_wv a second one in its place. The paper doesn't state
    how MV is read, so read_by_mk chooses. rule="mean" is ours, and adds a mass of each slot, a step
    size and a share kept. recent tokens are ours under both rules.
    Raises ValueError as GPTConfig does, and if slots is below 1, recent below 0, or rule unknown,
    or if slots that are read as means would begin with random numbers.
    """

    slots: int = 24  # BCT  memory slots of a head, M
    recent: int = 8  # BCT  latest tokens, kept exactly until they are written to the slots
    rule: str = "mean"  # BCT  a slot reads as the mean of its writes, or (the paper's) their sum
    random_start: bool = False  # BCT  MV_0 is from N(0, 1), the same for all texts, and not zero
    write_first: bool = True  # BCT  or the first token is only read, as in algorithm 1
    own_wv: bool = False  # BCT  the keys and values of tokens are W_wv x, of a matrix of its own
    read_by_mk: bool = False  # BCT  a query finds a slot by its address in MK, not by written keys

    def __post_init__(self) -> None:  # BCT
        super().__post_init__()  # BCT
        if self.slots < 1 or self.recent < 0 or self.rule not in ("mean", "sum"):  # BCT
            given = f"slots {self.slots}, recent {self.recent}, rule {self.rule!r}"  # BCT
            raise ValueError(f"{given}: must be at least 1, at least 0, and mean or sum")  # BCT
        if self.random_start and self.rule != "sum":  # BCT
            given = f"random_start {self.random_start}, rule {self.rule!r}"  # BCT
            raise ValueError(f"{given}: slots begin at random by the rule 'sum' only")  # BCT


class Tensors:  # BCT
    """Base of what a BCT holds: tensors with names, some of which may be missing (None)."""

    def tensors(self) -> dict[str, Tensor]:  # BCT
        """Return those that there are, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}  # BCT

    def to(self, device: torch.device | str | None) -> Tensors:  # BCT
        """Return a copy that shares no memory, on another device if given."""
        moved = {name: x.to(device, copy=True) for name, x in self.tensors().items()}  # BCT
        return type(self)(**vars(self) | moved)  # BCT

    @property  # BCT
    def nbytes(self) -> int:  # BCT
        """Bytes of all of them."""
        return sum(x.nbytes for x in self.tensors().values())  # BCT


@dataclass  # BCT
class Slots(Tensors):  # BCT
    """A layer's memory slots: sums of all that was written to them."""

    keys: Tensor | None  # BCT  (B, H, M, D); None if they are read by MK
    values: Tensor  # BCT  (B, H, M, D)
    mass: Tensor | None = None  # BCT  (B, H, M, 1), of the weights; by the rule "sum" there is none

    def written(self, ww: Tensor, keep: Tensor, k: Tensor, v: Tensor) -> Slots:  # BCT
        """Return the slots with T tokens k, v (B, H, T, D) written to them by weights ww
        (B, H, M, T), once all slots have faded to a share keep (B, H, 1, 1)."""
        keys = None if self.keys is None else keep * self.keys + ww @ k  # BCT
        values = keep * self.values + ww @ v  # BCT  MV = MV' + ww^T wv, wv = [k; v]
        if self.mass is None:  # BCT
            return Slots(keys, values)  # BCT
        return Slots(keys, values, keep * self.mass + ww.sum(dim=3, keepdim=True))  # BCT


@dataclass  # BCT
class Tokens(Tensors):  # BCT
    """Tokens of a layer that aren't in its slots yet, with what writing them will need."""

    k: Tensor  # BCT  (B, H, T, D)
    v: Tensor  # BCT  (B, H, T, D)
    weights: Tensor  # BCT  (B, H, T, M), ww
    log_keep: Tensor  # BCT  (B, H, T, 1), log of the share of the slots that a write keeps

    def then(self, later: Tokens) -> Tokens:  # BCT
        """Return these tokens and those that follow them."""
        pairs = zip(vars(self).values(), vars(later).values(), strict=True)  # BCT
        return Tokens(*(torch.cat(pair, dim=2) for pair in pairs))  # BCT

    def part(self, start: int, end: int) -> Tokens:  # BCT
        """Return the tokens from start to end, in the same memory."""
        return Tokens(*(x[:, :, start:end] for x in vars(self).values()))  # BCT


class BoundedMemory(KVCache):  # BCT
    """What a BCT remembers of a text: in each layer, M memory slots per head and R recent tokens.

    Its size is the same from the first token on. It is float32 in any model, since sums over many
    tokens need the precision. len() counts the tokens read.
    """

    def __init__(self) -> None:  # BCT
        super().__init__()  # BCT
        self.layers: list[tuple[Slots, Tokens]] = []  # BCT
        self.pending: list[tuple[Slots, Tokens]] = []  # BCT  what a pass makes of them

    def append(self, *_: object) -> tuple[Tensor, Tensor, Tensor | None]:  # BCT
        """Raises ValueError: attention to keys can't read slots."""
        raise ValueError("a BCT's memory can't serve a model that isn't a BCT")  # BCT

    def commit(self, pos: Tensor) -> None:  # BCT
        """Count the tokens at positions pos (T,) as read: what was made of them now counts."""
        self.layers, self.pending = self.pending, []  # BCT
        self.pos = pos[-1:]  # BCT

    def truncate(self, n: int) -> None:  # BCT
        """Forget everything if n is 0. Raises ValueError unless n is 0 or all, since a write can't
        be undone."""
        if n not in (0, len(self)):  # BCT
            raise ValueError(f"can't keep {n} tokens of {len(self)}: only 0 or all")  # BCT
        if n == 0:  # BCT
            self.pos, self.layers = self.pos[:0], []  # BCT

    def to(self, device: torch.device | str | None = None,  # BCT
           dtype: torch.dtype | None = None) -> KVCache:  # BCT
        """Return a copy that shares no memory, on another device if given; it stays float32."""
        other = BoundedMemory()  # BCT
        for slots, recent in self.layers:  # BCT
            other.layers.append((slots.to(device), recent.to(device)))  # BCT
        other.pos = self.pos.to(device, copy=True)  # BCT
        return other  # BCT

    clone = to  # BCT  with no argument

    @property  # BCT
    def nbytes(self) -> int:  # BCT
        """Bytes of slots and recent tokens: 4 * L * B * H * (M * (2D + 1) + R * (2D + 1 + M)); by
        the rule "sum" a slot is 2D numbers. With read_by_mk it is D numbers less."""
        return sum(slots.nbytes + recent.nbytes for slots, recent in self.layers)  # BCT

    def __len__(self) -> int:  # BCT
        return int(self.pos[-1]) + 1 if len(self.pos) > 0 else 0  # BCT

    def snapshot(self) -> dict[str, object]:  # BCT
        """Return the positions of the recent tokens, and what the slots hold of all others: those
        of one head, the first of the layer in the middle."""
        if len(self) == 0:  # BCT
            return super().snapshot()  # BCT
        layer = len(self.layers) // 2  # BCT
        slots, recent = self.layers[layer]  # BCT
        size = min(recent.k.size(2), len(self))  # BCT
        mass, what = slots.mass, "how many tokens' worth it holds"  # BCT
        if mass is None:  # BCT
            mass = slots.values.norm(dim=3, keepdim=True)  # BCT
            what = "the length of its summed values"  # BCT
        mass = [round(number, 3) for number in mass[0, 0, :, 0].tolist()]  # BCT
        held = {"slots": [*range(len(self) - size, len(self))], "size": size}  # BCT
        return {**held, "mass": mass, "what": what, "layer": layer}  # BCT


class WriteMemory(nn.Module):  # BCT
    """BCT's attention: every token is written to M memory slots, and queries attend to the slots.

    Source: Yi et al. 2024, section 3.2, which the rule "sum" with no recent tokens is: "The write
    query vector wq is then used to compute attention weights across the key vectors MK stored in
    the cache. This is achieved through a dot-product operation, followed by a softmax
    normalization" (wq = W_wq x, ww = softmax(wq MK^T)); "The update rule is applied by integrating
    the attention weights ww with the write key-value vector wv": "MV = MV' + ww^T . wv". Here
    wv = [k; v]. Section 3.1: MV "can be initialized to zero or random values". The paper doesn't
    state how MV is read: here as any keys and values are, or as values whose keys are MK
    (read_by_mk=True). For the first token, the text says that "the initial key-value vector
    sequence MV is used" and updates it, whereas algorithm 1 only sets MV_1 = MV_0
    (write_first=False).

    The rule "mean" is ours. It adds:
    - the mass of a slot, the sum of the weights written to it. The slot is read as if the mean of
      its writes were there as many times as its mass says: one that holds a single token is that
      token, an empty one is not there;
    - two gates of each token: its step size (section 3.5 mentions one, without a formula), and the
      share of the slots that its write keeps;
    - a bias in W_wq.
    Ours too, under both rules: with recent=R the last R tokens are read as they are, and a token is
    written when it leaves them. The closest relatives are ABC (Peng et al. 2022) and Gated Slot
    Attention (Zhang et al. 2024).
    """

    chunk = 64  # BCT  tokens at once: more mean more work per token, and less overhead

    def __init__(self, config: BCTConfig) -> None:  # BCT
        super().__init__()  # BCT
        self.config, H, D, M = config, config.n_head, config.head_dim, config.slots  # BCT
        self.c_query = Conv1D(config.n_embd, H * D)  # BCT  W_wq
        self.addresses = nn.Parameter(torch.empty(H, M, D))  # BCT  MK
        self.c_gate = Conv1D(config.n_embd, 2 * H)  # BCT  step size, and share of the slots kept
        if config.rule == "sum":  # BCT  the paper has no gates, and W_wq no bias
            self.c_gate = None  # BCT
            self.c_query.bias = None  # BCT
        self.c_write = None  # BCT
        if config.own_wv:  # BCT
            self.c_write = Conv1D(config.n_embd, 2 * H * D)  # BCT  W_wv, which has no bias either
            self.c_write.bias = None  # BCT

    def writes(self, x: Tensor) -> tuple[Tensor, Tensor]:  # BCT
        """Return for x (B, T, C) the write weights (B, H, T, M), and the log of the share of the
        slots that each write keeps (B, H, T, 1)."""
        B, T, H = *x.shape[:2], self.config.n_head  # BCT
        wq = self.c_query(x).view(B, T, H, -1).transpose(1, 2)  # BCT  (B, H, T, D)
        ww = (wq @ self.addresses.mT).softmax(dim=-1)  # BCT
        if self.c_gate is None:  # BCT  all of the token is written, and all of the slots kept
            return ww, torch.zeros_like(ww[..., :1])  # BCT
        step, keep = self.c_gate(x).float().view(B, T, 2, H).permute(2, 0, 3, 1)[..., None]  # BCT
        return ww * step.sigmoid(), F.logsigmoid(keep)  # BCT

    def empty(self, x: Tensor) -> tuple[Slots, Tokens]:  # BCT
        """Return what there is before the first token of texts x (B, T, C)."""
        config, H = self.config, self.config.n_head  # BCT
        M, D, R = config.slots, config.head_dim, config.recent  # BCT

        def zeros(*size: int) -> Tensor:  # BCT
            return x.new_zeros(len(x), H, *size, dtype=torch.float32)  # BCT

        slots = Slots(None if config.read_by_mk else zeros(M, D), zeros(M, D))  # BCT
        if config.rule == "mean":  # BCT
            slots.mass = zeros(M, 1)  # BCT
        if config.random_start:  # BCT
            generator = torch.Generator().manual_seed(0)  # BCT
            for start in slots.tensors().values():  # BCT
                start.copy_(torch.randn(H, M, D, dtype=torch.float32, generator=generator))  # BCT
        return slots, Tokens(zeros(R, D), zeros(R, D), zeros(R, M), zeros(R, 1))  # BCT

    def check(self, slots: Slots, recent: Tokens, x: Tensor) -> None:  # BCT
        """Raise ValueError if what is held can't serve this layer, or texts x (B, T, C)."""
        config, rule = self.config, "sum" if slots.mass is None else "mean"  # BCT
        held = [rule, slots.keys is None, *slots.values.shape, recent.k.size(2)]  # BCT
        held.append(slots.values.device)  # BCT
        sizes = [config.n_head, config.slots, config.head_dim, config.recent]  # BCT
        needed = [config.rule, config.read_by_mk, len(x), *sizes, x.device]  # BCT
        if held != needed:  # BCT
            kind = "[rule, read_by_mk, B, H, M, D, R, device]"  # BCT
            raise ValueError(f"a memory for {kind} {held} got {needed}")  # BCT

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: BoundedMemory,  # BCT
                layer: int) -> Tensor:  # BCT
        """Return what the queries q read (B, H, T, D); x (B, T, C), of keys k, values v, is
        written. Raises ValueError if the memory is of another batch size, geometry or device."""
        n, T, R = len(memory), x.size(1), self.config.recent  # BCT
        slots, recent = memory.layers[layer] if n > 0 else self.empty(x)  # BCT
        self.check(slots, recent, x)  # BCT
        ww, log_keep = self.writes(x)  # BCT
        if self.c_write is not None:  # BCT
            k, v = self.c_write(x).unflatten(2, (2, q.size(1), -1)).permute(2, 0, 3, 1, 4)  # BCT
        if n == 0 and not self.config.write_first:  # BCT
            ww = torch.cat([torch.zeros_like(ww[:, :, :1]), ww[:, :, 1:]], dim=2)  # BCT
        new = Tokens(k.float(), v.float(), ww.float(), log_keep.float())  # BCT
        tokens = recent.then(new)  # BCT  R + T, of which the first T are written
        read = []  # BCT
        for start in range(0, T, self.chunk):  # BCT
            end = min(start + self.chunk, T)  # BCT
            form = self.recurrent if end - start == 1 else self.parallel  # BCT
            n_empty = max(0, R - n - start)  # BCT  recent tokens that don't exist yet
            y, slots = form(q[:, :, start:end].float(), slots, tokens.part(start, end + R),  # BCT
                            n_empty)  # BCT
            read.append(y)  # BCT
        del memory.pending[layer:]  # BCT  what a failed pass left
        memory.pending.append((slots, tokens.part(T, T + R).to(None)))  # BCT  a copy: not all R + T
        return torch.cat(read, dim=2).to(x.dtype)  # BCT

    def counts(self, mass: Tensor | None) -> tuple[Tensor | int, Tensor | int]:  # BCT
        """Return what each slot's sums are divided by, and the log of how many tokens the slot
        counts as."""
        if mass is None:  # BCT  the paper's sums are read as they are, and count once
            return 1, 0  # BCT
        log_count = mass.clamp_min(1e-30).log().masked_fill(mass == 0, -1e9)  # BCT
        return mass.clamp_min(1e-6), log_count  # BCT  nearly empty slots fade, without rounding

    def readable(self, slots: Slots, recent: Tokens,  # BCT
                 n_empty: int) -> tuple[Tensor, Tensor, Tensor]:  # BCT
        """Return the keys and the values that a query attends to (B, H, M + R, D), and its mask
        (B, H, 1, M + R): the log of how many times each counts. n_empty tokens don't exist yet."""
        size, log_count = self.counts(slots.mass)  # BCT
        keys = (self.addresses.float().expand_as(slots.values) if slots.keys is None  # BCT
                else slots.keys / size)  # BCT
        k = torch.cat([keys, recent.k], dim=2)  # BCT
        v = torch.cat([slots.values / size, recent.v], dim=2)  # BCT
        M = slots.values.size(2)  # BCT
        mask = k.new_zeros(*k.shape[:3], 1)  # BCT  a recent token counts once: log 1
        mask[:, :, :M] = log_count  # BCT
        mask[:, :, M : M + n_empty] = -1e9  # BCT
        return k, v, mask.mT  # BCT

    def recurrent(self, q: Tensor, slots: Slots, tokens: Tokens,  # BCT
                  n_empty: int) -> tuple[Tensor, Slots]:  # BCT
        """Return what a query q (B, H, 1, D) reads, and the slots afterwards. tokens: the R recent
        ones, of which n_empty don't exist yet, and the new one; the oldest is written."""
        oldest, recent = tokens.part(0, 1), tokens.part(1, self.config.recent + 1)  # BCT
        slots = slots.written(oldest.weights.mT, oldest.log_keep.exp(), oldest.k, oldest.v)  # BCT
        k, v, mask = self.readable(slots, recent, max(0, n_empty - 1))  # BCT
        return F.scaled_dot_product_attention(q, k, v, mask), slots  # BCT

    def parallel(self, q: Tensor, slots: Slots, tokens: Tokens,  # BCT
                 n_empty: int) -> tuple[Tensor, Slots]:  # BCT
        """Return the same for T queries q (B, H, T, D), by two masked products that don't copy the
        slots. Meanwhile the first T of the R + T tokens leave the recent ones and are written."""
        D, T, R = q.size(3), q.size(2), self.config.recent  # BCT
        k, v, ww = tokens.k, tokens.v, tokens.weights  # BCT
        i = torch.arange(T, device=q.device)[:, None]  # BCT  query i reads token j,
        j = torch.arange(R + T, device=q.device)  # BCT  or the slots that it was written to
        written = j <= i  # BCT  (T, R + T)
        recent = (j > i) & (j <= i + R) & (j >= n_empty)  # BCT
        kept = tokens.log_keep.cumsum(dim=2)  # BCT  (B, H, R + T, 1)
        since = (kept[:, :, :T] - kept.mT).masked_fill(~written, -math.inf).exp()  # BCT  of j, at i
        kept = kept[:, :, :T].exp()  # BCT  (B, H, T, 1), of the slots as they were
        scores = q @ k.mT  # BCT  (B, H, T, R + T)
        mass = None  # BCT
        if slots.mass is not None:  # BCT
            mass = kept * slots.mass.mT + since @ ww  # BCT  (B, H, T, M)
        size, log_count = self.counts(mass)  # BCT
        far = (q @ self.addresses.float().mT if slots.keys is None  # BCT  (B, H, T, M)
               else (kept * (q @ slots.keys.mT) + (scores * since) @ ww) / size)  # BCT
        far = far / math.sqrt(D) + log_count  # BCT
        near = scores.masked_fill(~recent, -math.inf) / math.sqrt(D)  # BCT  (B, H, T, R + T)
        p = torch.cat([far, near], dim=-1).softmax(dim=-1)  # BCT  (B, H, T, M + R + T)
        far, near = p[..., : ww.size(3)] / size, p[..., ww.size(3) :]  # BCT
        y = (near + since * (far @ ww.mT)) @ v + kept * (far @ slots.values)  # BCT  (B, H, T, D)
        ww = (since[:, :, -1:, :T].mT * ww[:, :, :T]).mT  # BCT  (B, H, M, T), what is left at last
        return y, slots.written(ww, kept[:, :, -1:], k[:, :, :T], v[:, :, :T])  # BCT


class MemoryBlock(Block):  # BCT
    """The same block, with BCT's attention."""

    def __init__(self, config: BCTConfig) -> None:  # BCT
        super().__init__(config)  # BCT
        self.memory = WriteMemory(config)  # BCT

    def forward(self, x: Tensor, pos: Tensor, cache: BoundedMemory, layer: int) -> Tensor:  # BCT
        h = self.ln_1(x)  # BCT
        y = self.memory(h, *self.attn.project(h), cache, layer)  # BCT  (B, H, T, D)
        x = x + self.drop(self.attn.c_proj(y.transpose(1, 2).flatten(2)))  # BCT
        return x + self.drop(self.mlp(self.ln_2(x)))  # BCT  (B, T, C)


class CyclicPositions(nn.Embedding):  # BCT
    """A table of positions (n_ctx, C) without an end: past it, its upper half is used again."""

    def forward(self, pos: Tensor) -> Tensor:  # BCT
        half = self.num_embeddings // 2  # BCT
        above = half + (pos - half) % (self.num_embeddings - half)  # BCT
        return super().forward(torch.where(pos < half, pos, above))  # BCT  (T, C)


class BCT(GPT):  # BCT
    """Bounded-Cache Transformer: a GPT-2 whose attention reads a memory of constant size.

    Its texts don't end at n_ctx. Source: Yi et al. 2024, "A Method for Building Large Language
    Models with Predefined KV Cache Capacity".
    """
    config_class, block_class, new_cache = BCTConfig, MemoryBlock, BoundedMemory  # BCT

    def __init__(self, config: BCTConfig) -> None:  # BCT
        super().__init__(config)  # BCT
        self.context = math.inf  # BCT
        self.wpe = CyclicPositions.from_pretrained(self.wpe.weight, freeze=False)  # BCT

    def init_weights(self) -> None:  # BCT
        """Start as GPT-2 did, with both gates, if there are any, open: sigmoid(4) = 0.98."""
        super().init_weights()  # BCT
        for name, parameter in self.named_parameters():  # BCT
            if name.endswith("c_gate.bias"):  # BCT
                nn.init.constant_(parameter, 4.0)  # BCT

    def forward(self, ids: Tensor, cache: BoundedMemory | None = None,  # BCT
                last_only: bool = False) -> Tensor:  # BCT
        """Return the logits, as GPT does. Raises ValueError for a cache of another kind."""
        cache = BoundedMemory() if cache is None else cache  # BCT
        if not isinstance(cache, BoundedMemory):  # BCT
            raise ValueError(f"a BCT can't use a {type(cache).__name__}")  # BCT
        return super().forward(ids, cache, last_only)  # BCT



def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from support.cli import WRITING, CommandLine
    from support.printing import end_tokens_of, stream
    from support.tracing import Trace

    example = 'python3 %(prog)s --prompt "Halek lived in" --temperature 0.8'
    cli = CommandLine(__doc__, example)
    cli.add_model_options(NAMES, *WRITING, "--trace")
    cli.add_argument("--memory", choices=("full", "window", "sinks", "bct"),  # RING
                     help="what holds the text; default: all of them, compared")  # RING
    cli.add_argument("--slots", type=int, default=37, metavar="N",  # RING
                     help="slots of window and sinks, the spare one included")  # RING
    with cli.parse(argv) as args:
        if args.memory == "bct" and args.model == "pocket":  # BCT
            args.model = "pocket-bct"  # BCT
        kind = BCT if args.memory == "bct" else GPT  # BCT
        model = load_model(args.model, model_class=kind, device=args.device,  # BCT
                           dtype=args.dtype)  # BCT
        tokenizer = load_tokenizer(args.model)
        prompt = tokenizer.encode(args.prompt, allowed_special="all")
        ids = torch.tensor([prompt], device=args.device)  # (1, T)
        if len(prompt) > model.context:
            print(f"[of {len(prompt)} tokens, the context of {model.context} holds only the last]")

        def run(generate: Callable, **more: object) -> tuple[list[int], list[float]]:
            print(f"\n{args.prompt}", end="", flush=True)
            options = {"temperature": args.temperature, "top_k": args.top_k, **more}
            options["generator"] = torch.Generator(args.device).manual_seed(args.seed)
            options["stop_ids"] = end_tokens_of(tokenizer)
            tokens = generate(model, ids, args.max_new_tokens, **options)
            trace = Trace(args.trace, tokenizer, model, ids, context_start) if args.trace else None
            return stream(tokens, tokenizer, trace=trace, **more)

        with torch.no_grad():
            model(ids[:, :1])  # a process's first pass is slow, and would be counted as prefill
        if args.memory is None:  # RING
            from demos.memories import compare_memories  # RING

            return compare_memories(args, ids)  # RING
        sinks = 4 if args.memory == "sinks" else 0  # RING
        if args.memory in ("window", "sinks"):  # RING
            least, most = sinks + 2, model.config.n_ctx + 1  # RING
            if not least <= args.slots <= most:  # RING
                raise ValueError(f"--slots {args.slots}: at least {least}, at most {most}")  # RING
        elif args.slots != cli.get_default("slots"):  # RING
            raise ValueError(f"--slots is for window and sinks, not {args.memory}")  # RING
        window = model.config.n_ctx if args.memory == "full" else args.slots - 1 - sinks  # RING
        cache = model.new_cache() if kind is BCT else SlidingWindowCache(window, sinks)  # RING
        run(generate, cache=cache)  # RING


if __name__ == "__main__":
    main()
