"""GPT-2 from scratch, with caches that don't grow: a window on the last tokens, or slots that tokens are written to.
What `diff gpt_kv_cache.py gpt_bounded_cache.py` shows is the window (# RING), prompts of different lengths in one batch
(# PAD), and the slots (# BCT): read them in this order. Lines marked # NEW are those of gpt_kv_cache.py.

Shapes: B batch, T tokens fed, S tokens attended to, L layers, H heads, D head size, C width (n_embd), V vocabulary,
W window, M slots of a head, R recent tokens kept beside them.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch"; Xiao et al. 2023, "Efficient Streaming
Language Models with Attention Sinks"; Yi et al. 2024, "A Method for Building Large Language Models with Predefined KV
Cache Capacity" (BCT).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence  # PAD
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Geometry of a GPT-2; the defaults are those of the 124M model.

    head_dim and n_inner default to n_embd // n_head and 4 * n_embd; dropout is active in train() mode only.
    Raises ValueError if a size is not positive or n_head does not divide n_embd and head_dim is not given.
    """

    vocab_size: int = 50257
    n_ctx: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    head_dim: int | None = None
    n_inner: int | None = None
    dropout: float = 0.0
    slots: int = 0  # BCT  of BCT's memory, for each head; 0: plain attention
    recent: int = 0  # BCT  tokens that it keeps exactly, until they are written to the slots
    rule: str = "mean"  # BCT  what a slot holds: the mean of what was written to it, or (the paper's rule) the sum
    step: bool = True  # BCT  a learned step size of each write
    forget: bool = True  # BCT  a learned forgetting at each write
    learned_start: bool = False  # BCT  slots that begin with something in them

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd", "head_dim", "n_inner"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")
        if self.slots < 0 or self.recent < 0 or self.rule not in ("mean", "sum"):  # BCT
            given = f"slots {self.slots}, recent {self.recent}, rule {self.rule!r}"  # BCT
            raise ValueError(f"{given}: must be at least 0, at least 0, and mean or sum")  # BCT
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                raise ValueError(f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}; give head_dim")
            object.__setattr__(self, "head_dim", self.n_embd // self.n_head)
        if self.n_inner is None:
            object.__setattr__(self, "n_inner", 4 * self.n_embd)


class Conv1D(nn.Module):
    """GPT-2's linear layer, x @ W + b, with W stored (in, out): public weights load without a transpose."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)  # (..., n_in) -> (..., n_out)


class KVCache:  # NEW
    """Keys, values and positions of the tokens that a model has read; it grows with every token.

    A forward pass appends layer by layer and commits at its end, so that one that fails changes nothing.
    One model can serve any number of caches; a new text is a new cache.
    """

    window, sinks = math.inf, 0  # RING  how many of the last and of the first tokens are seen
    pad: Sequence[int] = (0,)  # PAD  by how many tokens each row of ids is padded on the left (B)
    moved: Sequence[int] | None = None  # PAD  where the rows begin in what is cached, once a part of ids is forgotten

    def first(self, device: torch.device) -> Tensor | int:  # PAD
        """Return where each row begins in what is cached (B, 1, 1, 1), or 0 if none is padded."""
        starts = self.moved or self.pad  # PAD
        return torch.tensor(starts, device=device)[:, None, None, None] if any(starts) else 0  # PAD

    def __init__(self, layers: list[Tensor] | None = None, pos: Tensor | None = None) -> None:  # NEW
        self.layers = layers or []  # NEW  each layer's keys and values (2, B, H, S, D)
        self.pos = torch.empty(0, dtype=torch.long) if pos is None else pos  # NEW  (S,), where each token was read

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # NEW
        """Return a layer's keys, values (B, H, S, D) and positions (S,), those of the new tokens (T) at their end."""
        kv = torch.stack([k, v])  # NEW  (2, B, H, T, D)
        if len(self):  # NEW
            kv = torch.cat([self.layers[layer][..., : len(self), :], kv], dim=3)  # NEW  not what a failed pass left
            pos = torch.cat([self.pos, pos])  # NEW
        self.layers[layer : layer + 1] = [kv]  # NEW  replaces the layer's entry, or is the first
        return kv[0], kv[1], pos  # NEW

    def commit(self, pos: Tensor) -> None:  # NEW
        """Count the tokens at positions pos (T,) as read: until then, whatever was appended does not exist."""
        self.pos = torch.cat([self.pos, pos]) if len(self) else pos  # NEW

    def truncate(self, n: int) -> None:  # NEW
        """Keep the first n tokens and free the others' memory. Raises ValueError if there are fewer than n."""
        if not 0 <= n <= len(self):  # NEW
            raise ValueError(f"can't keep {n} tokens of {len(self)}")  # NEW
        self.layers, self.pos = [kv[..., :n, :].clone() for kv in self.layers if n], self.pos[:n].clone()  # NEW
        self.pad, self.moved = (self.pad, self.moved) if n else ((0,), None)  # PAD

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:  # NEW
        """Return a copy, on another device or in another dtype if given; it shares no memory with this cache."""
        layers = [kv[..., : len(self), :].to(device, dtype, copy=True) for kv in self.layers]  # NEW
        other = KVCache(layers, self.pos.to(device, copy=True))  # PAD
        other.pad, other.moved = self.pad, self.moved  # PAD
        return other  # PAD

    clone = to  # NEW  with no argument

    @property  # NEW
    def next_pos(self) -> int:  # NEW
        """Position at which the next token is read."""
        return int(self.pos[-1]) + 1 if len(self) else 0  # NEW

    @property  # NEW
    def nbytes(self) -> int:  # NEW
        """Bytes of all keys and values: 2 * L * B * H * S * D * bytes per number."""
        return sum(kv[..., : len(self), :].nbytes for kv in self.layers)  # NEW

    def __len__(self) -> int:  # NEW
        return len(self.pos)  # NEW

    def table(self, tokens: list[str] | tuple[str, ...] = ()) -> str:  # NEW
        """Return the geometry and a line a slot: its position and, if the text's tokens are given, its token."""
        shape = (len(self.layers), *self.layers[0][..., : len(self), :].shape) if len(self) else "empty"  # NEW
        shown = dict(enumerate(map(repr, tokens)))  # NEW
        rows = [f"{s:6}{p:10}  {shown.get(p, '')}" for s, p in enumerate(self.pos.tolist())]  # NEW
        rows[8:-8] = ["   ..."] if len(rows) > 16 else rows[8:-8]  # NEW
        head = f"KV cache (L, 2, B, H, S, D): {shape}, {self.nbytes:,} bytes\n  slot  position  token"  # NEW
        return "\n".join([head, *rows])  # NEW

    __str__ = __repr__ = table  # NEW


def visible(k_pos: Tensor, pos: Tensor, cache: KVCache | None) -> Tensor:  # RING
    """Return which keys, at k_pos (S,), the tokens at pos (T,) see: (T, S), or (B or 1, 1, T, S) with a cache."""
    pos = pos[:, None]  # RING
    seen = k_pos <= pos  # RING  causal: look up to one's own position
    if cache is not None:  # RING
        first = cache.first(pos.device)  # PAD
        if cache.window < math.inf:  # RING
            seen = seen & ((k_pos > pos - cache.window) | (k_pos < first + cache.sinks))  # RING
        seen = seen & (k_pos >= first)  # PAD
    return seen  # RING


class SlidingWindowCache(KVCache):  # RING
    """The last `window` tokens and the first `sinks`, in memory that is allocated once; older ones are overwritten.

    With a window of n_ctx it is a preallocated cache that forgets nothing. len() counts the tokens read; S is at most
    sinks + W, and the widest padding if there are sinks. What is written carries no gradient.
    Raises ValueError if there is no window or fewer than no sinks.

    Source: Raschka 2025, tips 1 and 2; Xiao et al. 2023 (sinks).
    """

    def __init__(self, window: int, sinks: int = 0) -> None:  # RING
        super().__init__()  # RING
        if window < 1 or sinks < 0:  # RING
            raise ValueError(f"a window of {window} and {sinks} sinks: must be at least 1 and 0")  # RING
        self.window, self.sinks, self.n_read = window, sinks, 0  # RING
        self.fed: list[Tensor] = []  # RING  each layer's new tokens (2, B, H, T, D), until they are committed

    @property  # RING
    def lasting(self) -> int:  # RING
        """Number of tokens that are never overwritten, so that every row has its sinks, however it is padded."""
        return self.sinks + max(self.moved or self.pad) * (self.sinks > 0)  # PAD

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # RING
        """Return a layer's keys, values (B, H, S + T, D) and positions (S + T,): what is held, then the new tokens.
        Raises ValueError if the cache is of another batch size, geometry, device or dtype."""
        kv = torch.stack([k, v])  # RING  (2, B, H, T, D)
        if not len(self):  # RING
            self.layers[layer:] = [kv.new_zeros(*kv.shape[:3], self.lasting + self.window, kv.size(4))]  # RING
        held = self.layers[layer][..., : len(self.pos), :]  # RING  the rest is empty, as long as the window isn't full
        have, want = ([*x.shape[1:3], x.size(4), x.dtype, x.device] for x in (held, kv))  # RING
        if have != want:  # RING
            raise ValueError(f"a cache of [B, H, D, dtype, device] = {have} can't serve {want}")  # RING
        self.fed[layer:] = [kv.detach()]  # RING
        kv = torch.cat([held, kv], dim=3)  # RING  read before writing: the first new token sees the oldest
        return kv[0], kv[1], torch.cat([self.pos.to(pos.device), pos])  # RING

    def commit(self, pos: Tensor) -> None:  # RING
        """Write the tokens at positions pos (T,) to their slots: over the oldest ones, once the window is full."""
        kept = ((pos < self.lasting) | (pos > pos[-1] - self.window)).nonzero()[:, 0]  # RING  (N,)
        p = pos[kept]  # RING
        slot = torch.where(p < self.lasting, p, self.lasting + (p - self.lasting) % self.window)  # RING  (N,)
        for held, new in zip(self.layers, self.fed, strict=True):  # RING
            held[..., slot, :] = new[..., kept, :]  # RING
        self.n_read += len(pos)  # RING
        more = min(len(self), self.lasting + self.window) - len(self.pos)  # RING  slots that were empty
        self.pos = torch.cat([self.pos.to(pos.device), pos.new_empty(more)])  # RING
        self.pos[slot] = p  # RING
        self.fed = []  # RING

    def truncate(self, n: int) -> None:  # RING
        """Keep the first n tokens; the memory stays, unless n is 0. Raises ValueError if not all of them are there."""
        if not 0 <= n <= len(self) or (0 < n < len(self) and len(self) > len(self.pos)):  # RING
            held = f"{len(self.pos)} are left of {len(self)} tokens"  # RING
            raise ValueError(f"can't go back to the first {n}: {held}")  # RING
        if n < len(self):  # RING
            self.pos, self.n_read, self.layers = self.pos[:n].clone(), n, self.layers if n else []  # RING
        self.pad, self.moved = (self.pad, self.moved) if n else ((0,), None)  # PAD

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:  # RING
        """Return a copy, on another device or in another dtype if given; it shares no memory with this cache."""
        other = SlidingWindowCache(self.window, self.sinks)  # RING
        other.layers = [kv.to(device, dtype, copy=True) for kv in self.layers if len(self)]  # RING
        other.pos, other.n_read = self.pos.to(device, copy=True), self.n_read  # RING
        other.pad, other.moved = self.pad, self.moved  # PAD
        return other  # RING

    clone = to  # RING  with no argument

    @property  # RING
    def next_pos(self) -> int:  # RING
        """Position at which the next token is read."""
        return len(self)  # RING

    @property  # RING
    def nbytes(self) -> int:  # RING
        """Bytes of all slots, from the first token on: 2 * L * B * H * (sinks + W) * D * bytes per number."""
        return sum(kv.nbytes for kv in self.layers if len(self))  # RING

    def __len__(self) -> int:  # RING
        return self.n_read  # RING


class BoundedMemory(KVCache):  # BCT
    """What a BCT holds of a text: in each layer, M slots of a head and its R recent tokens.

    Its size is the same from the first token on, and it is float32 whatever the model is: sums of many tokens need it.
    len() counts the tokens read.
    """

    def __init__(self) -> None:  # BCT
        super().__init__()  # BCT
        self.n_read = 0  # BCT
        self.fed: list[tuple[Tensor, Tensor]] = []  # BCT  what the pass under way makes of the layers, until it commits
        # layers: slots (B, H, M, 2D + 1) of keys, values and mass; recent tokens (B, H, R, 2D + 2 + M)

    def commit(self, pos: Tensor) -> None:  # BCT
        """Count the tokens at positions pos (T,) as read: until then, what was made of them does not exist."""
        self.layers, self.fed, self.n_read = self.fed, [], len(self) + len(pos)  # BCT

    def truncate(self, n: int) -> None:  # BCT
        """Forget everything (n = 0). Raises ValueError for fewer than all tokens: what is written stays written."""
        if n not in (0, len(self)):  # BCT
            raise ValueError(f"can't keep {n} tokens of {len(self)}: slots can only be emptied")  # BCT
        self.n_read, self.layers = n, self.layers if n else []  # BCT
        self.pad, self.moved = (self.pad, self.moved) if n else ((0,), None)  # BCT

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:  # BCT
        """Return a copy, on another device if given; it shares no memory with this one. dtype stays float32."""
        other = BoundedMemory()  # BCT
        other.layers = [tuple(x.to(device, copy=True) for x in state) for state in self.layers]  # BCT
        other.n_read, other.pad, other.moved = self.n_read, self.pad, self.moved  # BCT
        return other  # BCT

    clone = to  # BCT  with no argument

    @property  # BCT
    def next_pos(self) -> int:  # BCT
        """Position at which the next token is read, were there no end of the positions."""
        return len(self)  # BCT

    @property  # BCT
    def nbytes(self) -> int:  # BCT
        """Bytes of slots and recent tokens: 4 * L * B * H * (M * (2D + 1) + R * (2D + 2 + M))."""
        return sum(x.nbytes for state in self.layers for x in state)  # BCT

    def __len__(self) -> int:  # BCT
        return self.n_read  # BCT

    def table(self, tokens: list[str] | tuple[str, ...] = ()) -> str:  # BCT
        """Return one line: no slot stands for a token."""
        return f"BCT memory of {len(self.layers)} layers after {len(self)} tokens: {self.nbytes:,} bytes"  # BCT

    __str__ = __repr__ = table  # BCT


class Attention(nn.Module):
    """Multi-head self-attention in two steps, project() and forward(): a cache goes between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = config.n_head, config.head_dim, config.dropout
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_head * config.head_dim)
        self.c_proj = Conv1D(config.n_head * config.head_dim, config.n_embd)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values (B, H, T, D) of x (B, T, C)."""
        B, T, _ = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, C): every query's mean of the values v (B, H, S, D) that mask (T, S) lets it see."""
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)


class MLP(nn.Module):
    """Widen, GELU (tanh approximation, as GPT-2 was trained with), narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.n_inner)
        self.c_proj = Conv1D(config.n_inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # (B, T, C)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int) -> Tensor:  # NEW
        q, k, v = self.attn.project(self.ln_1(x))  # (B, H, T, D) each
        k_pos = pos  # the keys are those of the tokens fed
        if cache is not None:  # NEW
            k, v, k_pos = cache.append(layer, k, v, pos)  # NEW  (B, H, S, D), (B, H, S, D), (S,)
        x = x + self.drop(self.attn(q, k, v, mask=visible(k_pos, pos, cache)))  # RING
        return x + self.drop(self.mlp(self.ln_2(x)))  # BCT  (B, T, C)


class WriteMemory(nn.Module):  # BCT
    """BCT's attention: a query reads M slots and the R most recent tokens; the token that then is too old for these is
    written to the slots, weighted by how well it fits their learned addresses.

    A slot of the rule "mean" is read as if the mean of what is in it were there as many times as its mass says. So a
    slot that holds one token is that token, and an empty one is not there.

    Source: Yi et al. 2024, section 3.2: wq = W_wq x, ww = softmax(wq MK^T), MV = MV' + ww^T wv, with wv = [k; v]. The
    paper's pseudocode doesn't write its first token; its text and figure write every one, and so do we.
    Ours: the mass, the recent tokens, and the gates. Its nearest kin are ABC (Peng et al. 2022) and Gated Slot
    Attention (Zhang et al. 2024).
    """

    chunk = 64  # BCT  tokens read at once: time and memory per token grow with it, overhead falls

    def __init__(self, config: GPTConfig) -> None:  # BCT
        super().__init__()  # BCT
        self.config, H, D, M = config, config.n_head, config.head_dim, config.slots  # BCT
        self.c_query = Conv1D(config.n_embd, H * D)  # BCT  W_wq
        self.addresses = nn.Parameter(torch.empty(H, M, D))  # BCT  MK
        self.c_gate = Conv1D(config.n_embd, 2 * H)  # BCT  step size, then what is kept of the slots: before the sigmoid
        self.start = nn.Parameter(torch.empty(H, M, 2 * D + 1)) if config.learned_start else None  # BCT  MV_0

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, memory: BoundedMemory,  # BCT
                layer: int) -> Tensor:  # BCT
        """Return (B, H, T, D): what q reads; x (B, T, C), with keys k and values v (B, H, T, D), is written."""
        (B, H, T, D), M = q.shape, self.config.slots  # BCT
        real = (pos >= memory.first(pos.device)).float().reshape(-1, 1, T, 1).expand(B, H, T, 1)  # BCT  not padding
        query = self.c_query(x).view(B, T, H, D).transpose(1, 2)  # BCT
        w = (query @ self.addresses.mT).softmax(dim=-1)  # BCT  (B, H, T, M)
        step, keep = self.c_gate(x).float().view(B, T, 2, H).permute(2, 0, 3, 1)[..., None]  # BCT  (B, H, T, 1) each
        w = w * step.sigmoid() if self.config.step else w  # BCT
        log_keep = F.logsigmoid(keep) * self.config.forget  # BCT
        new = real * torch.cat([k, v, torch.ones_like(real), log_keep, w], dim=-1).float()  # BCT  (B, H, T, 2D + 2 + M)
        slots = new.new_zeros(B, H, M, 2 * D + 1)  # BCT
        if self.start is not None:  # BCT
            kv, log_mass = self.start.float().split([2 * D, 1], dim=-1)  # BCT
            slots = slots + torch.cat([kv * log_mass.exp(), log_mass.exp()], dim=-1)  # BCT
        recent = new.new_zeros(B, H, self.config.recent, new.size(3))  # BCT
        if len(memory):  # BCT
            both = memory.layers[layer], (slots, recent)  # BCT
            have, want = ([[*x.shape, x.device] for x in state] for state in both)  # BCT
            if have != want:  # BCT
                raise ValueError(f"a memory of slots and recent tokens {have} can't serve {want}")  # BCT
            slots, recent = memory.layers[layer]  # BCT
        read = []  # BCT
        for part, tokens in zip(q.float().split(self.chunk, dim=2), new.split(self.chunk, dim=2), strict=True):  # BCT
            form = self.recurrent if part.size(2) == 1 else self.parallel  # BCT
            y, slots, recent = form(part, slots, torch.cat([recent, tokens], dim=2))  # BCT
            read.append(y)  # BCT
        memory.fed[layer:] = [(slots, recent.clone())]  # BCT  a slice would keep all of its chunk in memory
        return torch.cat(read, dim=2).to(x.dtype)  # BCT

    def recurrent(self, q: Tensor, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # BCT
        """Return what a query q (B, H, 1, D) reads, the slots (B, H, M, 2D + 1), and the R recent tokens.

        tokens (B, H, R + 1, 2D + 2 + M) are the recent ones and the new one; the oldest of them is written.
        """
        D, oldest, recent = q.size(3), tokens[:, :, :1], tokens[:, :, 1:]  # BCT
        keep, w = oldest[..., 2 * D + 1 : 2 * D + 2].exp(), oldest[..., 2 * D + 2 :]  # BCT  (B, H, 1, 1), (B, H, 1, M)
        slots = keep * slots + w.mT @ oldest[..., : 2 * D + 1]  # BCT  MV = MV' + ww^T wv
        k, v, mass = torch.cat([slots, recent[..., : 2 * D + 1]], dim=2).split([D, D, 1], dim=-1)  # BCT
        if self.config.rule == "sum":  # BCT
            mass = torch.cat([torch.ones_like(slots[..., :1]), recent[..., 2 * D : 2 * D + 1]], dim=2)  # BCT
        times = mass.clamp_min(1e-30).log().masked_fill(mass == 0, -1e9).mT  # BCT  a recent token is a slot of mass 1
        size = mass.clamp_min(1e-6)  # BCT  so that nearly empty slots fade, instead of blowing up rounding errors
        return F.scaled_dot_product_attention(q, k / size, v / size, attn_mask=times), slots, recent  # BCT

    def parallel(self, q: Tensor, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # BCT
        """Return the same for T queries q (B, H, T, D): by two masked products, without copies of the slots.

        tokens (B, H, R + T, 2D + 2 + M): while the T queries come, the first T of them leave and are written.
        """
        D, T = q.size(3), q.size(2)  # BCT
        k, v, real, log_keep, w = tokens.split([D, D, 1, 1, tokens.size(3) - 2 * D - 2], dim=-1)  # BCT
        i, j = torch.arange(T, device=q.device)[:, None], torch.arange(tokens.size(2), device=q.device)  # BCT
        written, recent = j <= i, (j > i) & (j <= i + self.config.recent)  # BCT  (T, R + T), when query i reads
        kept = log_keep.cumsum(dim=2)  # BCT  (B, H, R + T, 1)
        since = (kept[:, :, :T] - kept.mT).masked_fill(~written, -math.inf).exp()  # BCT  what is left of j's write at i
        kept = kept[:, :, :T].exp()  # BCT  (B, H, T, 1), what is left of the slots as they were
        scores = q @ k.mT  # BCT  (B, H, T, R + T)
        far = kept * (q @ slots[..., :D].mT) + (scores * since) @ w  # BCT  (B, H, T, M)
        mass = kept * slots[..., -1:].mT + since @ w  # BCT  (B, H, T, M)
        if self.config.rule == "sum":  # BCT
            mass = torch.ones_like(mass)  # BCT
        times, size = mass.clamp_min(1e-30).log().masked_fill(mass == 0, -1e9), mass.clamp_min(1e-6)  # BCT
        near = scores.masked_fill(~recent | (real.mT == 0), -math.inf)  # BCT
        far = far / size / math.sqrt(D) + times  # BCT  as many times as the slot has mass
        p = torch.cat([far, near / math.sqrt(D)], dim=-1).softmax(dim=-1)  # BCT
        far, near = p[..., : w.size(3)] / size, p[..., w.size(3) :]  # BCT
        y = (near + since * (far @ w.mT)) @ v + kept * (far @ slots[..., D : 2 * D])  # BCT  (B, H, T, D)
        w = since[:, :, -1:, :T].mT * w[:, :, :T]  # BCT  (B, H, T, M), what is left of the writes at last
        slots = kept[:, :, -1:] * slots + w.mT @ tokens[:, :, :T, : 2 * D + 1]  # BCT
        return y, slots, tokens[:, :, T:]  # BCT


class MemoryBlock(Block):  # BCT
    """The same block, with BCT's attention."""

    def __init__(self, config: GPTConfig) -> None:  # BCT
        super().__init__(config)  # BCT
        self.memory = WriteMemory(config)  # BCT

    def forward(self, x: Tensor, pos: Tensor, cache: BoundedMemory, layer: int) -> Tensor:  # BCT
        h = self.ln_1(x)  # BCT
        y = self.memory(h, *self.attn.project(h), pos, cache, layer)  # BCT  (B, H, T, D)
        x = x + self.drop(self.attn.c_proj(y.transpose(1, 2).flatten(2)))  # BCT
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


class GPT(nn.Module):
    """GPT-2 with its public parameter names; the output head is the token embedding, transposed."""

    config_class = GPTConfig  # for whoever builds a model from a file

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        # Shape (V, C) as published, memory laid out column by column: x @ wte.T, the largest product of
        # one-token decoding, then reads it in the order a CPU is fastest at.
        self.wte.weight = nn.Parameter(torch.empty(config.n_embd, config.vocab_size).t())
        self.wpe = nn.Embedding(config.n_ctx, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList((MemoryBlock if config.slots else Block)(config) for _ in range(config.n_layer))  # BCT
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's random start: N(0, 0.02), residual projections narrowed by sqrt(2 L), biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.constant_(parameter, 4.0 if "c_gate" in name else 0.0)  # BCT  near 1 and near 1
            elif ".ln_" not in name and not name.startswith("ln_f"):
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:  # NEW
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text; with last_only the last (B, 1, V).
        Raises ValueError, and changes nothing, if there is no token or cached text and ids exceed n_ctx."""
        if self.config.slots and cache is None:  # BCT
            cache = BoundedMemory()  # BCT
        if cache is not None and isinstance(cache, BoundedMemory) != (self.config.slots > 0):  # BCT
            raise ValueError(f"a model with {self.config.slots} slots can't use a {type(cache).__name__}")  # BCT
        start, T = cache.next_pos if cache is not None else 0, ids.size(1)  # NEW
        if cache is not None and len(cache) and len(cache.layers) != len(self.h):  # NEW
            raise ValueError(f"a cache of {len(cache.layers)} layers can't serve a model of {len(self.h)}")  # NEW
        if not 1 <= T <= (math.inf if self.config.slots else self.config.n_ctx - start):  # BCT
            raise ValueError(f"{T} tokens after {start}: must be at least 1 and end within n_ctx = {self.config.n_ctx}")
        pos = torch.arange(start, start + T, device=ids.device)  # (T,)
        if cache is not None and (min(cache.pad) < 0 or len(cache.pad) not in (1, len(ids))):  # PAD
            raise ValueError(f"padding {[*cache.pad]}: must be at least 0, for each of {len(ids)} rows")  # PAD
        first = 0 if cache is None else cache.first(ids.device)  # PAD
        place = (pos - first).clamp_min(0).reshape(-1, T)  # PAD  (B, T) or (1, T), counted from where the text begins
        # The positions of a BCT don't end at n_ctx: they go through the upper half of the learned ones again and again.
        half = self.config.n_ctx // 2  # BCT
        place = torch.where(place < half, place, half + (place - half) % (self.config.n_ctx - half))  # BCT
        x = self.drop(self.wte(ids) + self.wpe(place))  # PAD  (B, T, C)
        for layer, block in enumerate(self.h):  # NEW
            x = block(x, pos, cache, layer)  # NEW
        logits = self.head(x[:, -1:] if last_only else x)  # NEW
        if cache is not None:  # NEW
            cache.commit(pos)  # NEW  last of all: whatever fails above leaves the cache as it was
        return logits  # NEW

    def head(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the last block's output (B, T, C)."""
        return F.linear(self.ln_f(x), self.wte.weight)


def context_start(n_tokens: int, n_ctx: int) -> int:
    """Index of the first of n_tokens that is still in the context: past n_ctx the oldest half is forgotten.

    GPT-2 learned one vector per position and bakes it into K and V, so what is kept is read again from
    position 0. The result moves in jumps of half a context, and the reading costs O(1) per token.
    """
    half = (n_ctx + 1) // 2
    return max(0, math.ceil((n_tokens - n_ctx) / half)) * half


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Choose the next tokens (B, 1) from logits (B, V): the best one at temperature 0, else a random draw."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() - logits.max(dim=-1, keepdim=True).values  # at most 0: dividing can't overflow upwards
    if top_k is not None:
        kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth_best, -math.inf)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)


@torch.no_grad()
def generate(model: GPT, ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0, top_k: int | None = None,
             stop_id: int | None = None, generator: torch.Generator | None = None,  # NEW
             cache: KVCache | None = None) -> Iterator[Tensor]:  # NEW
    """Yield up to max_new_tokens tokens (B, 1) after ids (B, T), each as soon as it is known. A cache of the first
    tokens of ids saves reading them; it grows, and begins anew when the context is full. A row that has produced
    stop_id goes on producing it; when all have, generation ends. Raises ValueError, at the first token, if ids is
    empty or no longer than the cache, or an option is out of range."""
    if cache is None and model.config.slots:  # BCT
        cache = BoundedMemory()  # BCT  goes on past the context, instead of beginning anew
    cache, anchor = KVCache() if cache is None else cache, 0  # NEW  anchor: where in ids the cached text begins
    pad = starts = list(cache.pad)  # PAD  where in ids each row begins, and where what is still in its context
    if min(pad) != 0 or max(pad) >= ids.size(1):  # PAD
        raise ValueError(f"padding {pad}: must be 0 for the longest row, and less than {ids.size(1)} for all")  # PAD
    if 0 < len(cache) >= ids.size(1):  # NEW
        raise ValueError(f"ids, {ids.size(1)} tokens, must be longer than the {len(cache)} of them in the cache")  # NEW
    check_options(ids, max_new_tokens, temperature, top_k)
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    for _ in range(max_new_tokens):
        kept = [p + context_start(ids.size(1) - p, model.config.n_ctx) for p in pad]  # PAD
        if kept != starts and not model.config.slots:  # BCT  the context is full: read again what is kept
            cache.truncate(0)  # NEW
            starts, anchor = kept, min(kept)  # PAD
            cache.pad, cache.moved = pad, [start - anchor for start in starts]  # PAD
        logits = model(ids[:, anchor + len(cache) :], cache, last_only=True)[:, -1]  # PAD  (B, V)
        next_id = sample(logits, temperature, top_k, generator)  # (B, 1)
        if stop_id is not None:
            next_id = next_id.masked_fill(done, stop_id)
            done |= next_id == stop_id
        yield next_id
        if stop_id is not None and done.all():
            return
        ids = torch.cat([ids, next_id], dim=1)  # (B, T + 1)


def check_options(ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise ValueError, with the value given and the values allowed, if generate() can't work with these."""
    if ids.dim() != 2 or ids.size(1) == 0:
        raise ValueError(f"ids must have shape (B, T) with T at least 1, got {tuple(ids.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise ValueError(f"temperature must be 0, or at least 1e-6 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")


def main() -> None:
    from load_gpt2_weights import CommandLine, load_model, load_tokenizer, stream, whole_number  # RING

    cli = CommandLine(__doc__, example='python %(prog)s --prompt "Notes:" --temperature 0.8')
    cli.add_generation_arguments()
    cli.add_argument("--memory", choices=("full", "window", "sinks", "bct"),  # RING
                     help="what writes; default: bct for pocket and models with slots, else window")  # RING
    cli.add_argument("--slots", type=whole_number(5), metavar="M",  # RING
                     help="tokens held, of sinks 4 of them the text's first; default: 36, pocket-bct's bytes")  # RING
    cli.add_argument("--text-only", action="store_true", help="write the text, and measure nothing")  # RING
    cli.add_argument("--out", default="results/bounded", metavar="FOLDER", help="where tables and figures go")  # RING
    with cli.parse() as args:
        if args.model == "pocket" and args.memory in (None, "bct"):  # BCT
            args.model = "pocket-bct"  # BCT
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        ids = torch.tensor([tokenizer.encode(args.prompt, allowed_special="all")], device=args.device)

        args.memory = args.memory or ("bct" if model.config.slots else "window")  # BCT
        if (args.memory == "bct") != (model.config.slots > 0):  # BCT
            raise ValueError(f"{args.model} has {model.config.slots} slots: --memory can't be {args.memory}; "  # BCT
                             "it can be bct for pocket-bct, and any for pocket")  # BCT
        if args.slots and (args.memory in ("full", "bct") or args.slots > model.config.n_ctx):  # RING
            raise ValueError(f"--slots {args.slots} is for window and sinks, with up to {model.config.n_ctx}")  # RING
        args.slots = args.slots or min(36, model.config.n_ctx)  # RING
        if ids.size(1) > model.config.n_ctx and args.memory != "bct":  # BCT
            print(f"[of the prompt's {ids.size(1)} tokens, the context of {model.config.n_ctx} holds only the last]")

        def run(generate: Callable, **more: object) -> tuple[list[int], list[float]]:
            print(f"\n{args.prompt}", end="", flush=True)
            options = {"temperature": args.temperature, "top_k": args.top_k, "stop_id": tokenizer.eot_token}
            generator = torch.Generator(args.device).manual_seed(args.seed)
            tokens = generate(model, ids, args.max_new_tokens, generator=generator, **options, **more)
            return stream(tokens, tokenizer, trace=cli.trace(args, tokenizer, model, ids), **more)

        with torch.no_grad():
            model(ids[:, :1])  # a process's first pass is slow, and would be counted as prefill
        sinks = 4 if args.memory == "sinks" else 0  # RING
        window = model.config.n_ctx if args.memory == "full" else args.slots - sinks  # RING
        run(generate, cache=BoundedMemory() if args.memory == "bct" else SlidingWindowCache(window, sinks))  # BCT
        if not args.text_only:  # RING
            from benchmarks.memory import report  # RING

            name = "pocket" if args.model == "pocket-bct" else args.model  # RING
            report(name, args.slots, args.device, args.dtype, ids, args.out)  # RING


if __name__ == "__main__":
    main()
