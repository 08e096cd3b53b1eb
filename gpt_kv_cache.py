"""GPT-2 from scratch, with a KV cache: it reads every token once, and keeps its keys and values.
What `diff gpt_baseline.py gpt_kv_cache.py` shows is the cache and nothing else: lines marked # NEW.

Shapes: B batch, T tokens fed, S tokens attended to, L layers, H heads, D head size, C width (n_embd), V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd", "head_dim", "n_inner"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")
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

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:  # NEW
        """Return a copy, on another device or in another dtype if given; it shares no memory with this cache."""
        layers = [kv[..., : len(self), :].to(device, dtype, copy=True) for kv in self.layers]  # NEW
        return KVCache(layers, self.pos.to(device, copy=True))  # NEW

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
        x = x + self.drop(self.attn(q, k, v, mask=k_pos <= pos[:, None]))  # causal: look up to one's own position
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
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's random start: N(0, 0.02), residual projections narrowed by sqrt(2 L), biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif ".ln_" not in name and not name.startswith("ln_f"):
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:  # NEW
        """Return the logits (B, T, V) of ids (B, T), which follow the cached text; with last_only the last (B, 1, V).
        Raises ValueError, and changes nothing, if there is no token or cached text and ids exceed n_ctx."""
        start, T = cache.next_pos if cache is not None else 0, ids.size(1)  # NEW
        if cache is not None and len(cache) and len(cache.layers) != len(self.h):  # NEW
            raise ValueError(f"a cache of {len(cache.layers)} layers can't serve a model of {len(self.h)}")  # NEW
        if not 1 <= T <= self.config.n_ctx - start:
            raise ValueError(f"{T} tokens after {start}: must be at least 1 and end within n_ctx = {self.config.n_ctx}")
        pos = torch.arange(start, start + T, device=ids.device)  # (T,)
        x = self.drop(self.wte(ids) + self.wpe(pos))  # (B, T, C)
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
    cache, anchor = KVCache() if cache is None else cache, 0  # NEW  anchor: where in ids the cached text begins
    if 0 < len(cache) >= ids.size(1):  # NEW
        raise ValueError(f"ids, {ids.size(1)} tokens, must be longer than the {len(cache)} of them in the cache")  # NEW
    check_options(ids, max_new_tokens, temperature, top_k)
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    for _ in range(max_new_tokens):
        start = context_start(ids.size(1), model.config.n_ctx)
        if start > anchor:  # NEW  the context is full: positions are baked into K, so read again what is kept
            cache.truncate(0)  # NEW
            anchor = start  # NEW
        logits = model(ids[:, start + len(cache) :], cache, last_only=True)[:, -1]  # NEW  (B, V)
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
    from load_gpt2_weights import CommandLine, load_model, load_tokenizer, stream

    cli = CommandLine(__doc__, example='python %(prog)s --prompt "Notes:" --temperature 0.8')
    cli.add_generation_arguments()
    cli.add_argument("--compare", action="store_true", help="first write the same without the cache")  # NEW
    with cli.parse() as args:
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        ids = torch.tensor([tokenizer.encode(args.prompt, allowed_special="all")], device=args.device)

        if ids.size(1) > model.config.n_ctx:
            print(f"[of the prompt's {ids.size(1)} tokens, the context of {model.config.n_ctx} holds only the last]")

        def run(generate: Callable, **more: object) -> tuple[list[int], list[float]]:
            print(f"\n{args.prompt}", end="", flush=True)
            options = {"temperature": args.temperature, "top_k": args.top_k, "stop_id": tokenizer.eot_token}
            generator = torch.Generator(args.device).manual_seed(args.seed)
            tokens = generate(model, ids, args.max_new_tokens, generator=generator, **options, **more)
            return stream(tokens, tokenizer, trace=cli.trace(args, tokenizer, model, ids), **more)

        with torch.no_grad():
            model(ids[:, :1])  # a process's first pass is slow, and would be counted as prefill
        if args.compare:  # NEW
            from gpt_baseline import generate as generate_uncached  # NEW
            from load_gpt2_weights import compare  # NEW

            uncached, cached = run(generate_uncached), run(generate, cache=KVCache())  # NEW
            compare(ids.size(1), {"no cache": uncached, "KV cache": cached})  # NEW
        else:  # NEW
            run(generate, cache=KVCache())  # NEW


if __name__ == "__main__":
    main()
