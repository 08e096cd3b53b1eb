"""A Llama from scratch, with a KV cache: GPT-2 with the changes that today's models share (Touvron
et al. 2023, "LLaMA"). `diff gpt_kv_cache.py llama_kv_cache.py` shows them, marked one by one:
# ROPE    positions rotate queries and keys, instead of being added to embeddings (Su et al. 2021)
# GQA     several of the H query heads read one head of keys and values, so that caches hold fewer
          than H (grouped-query attention, Ainslie et al. 2023)
# RMS     RMSNorm instead of LayerNorm: scaled, not shifted (Zhang and Sennrich 2019)
# SWIGLU  an MLP in which one half gates the other (Shazeer 2020)
# QKNORM  a norm of each head's queries and keys, before they are rotated (Qwen3, Yang et al. 2025)
# LLAMA   names and sizes, no biases but those of q, k and v in Qwen2, and an output head that may
          have a matrix of its own

Shapes: B batch, T tokens fed, S tokens attended to, L layers, H heads, D head size, C width
(n_embd), V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class LlamaConfig:  # LLAMA
    """Geometry of a Llama; the defaults are those of SmolLM2-135M.

    n_inner and head_dim follow from n_embd if they aren't given; dropout acts in train() only.
    Raises ValueError if a number is out of range, or n_embd can't be divided among the heads.
    """

    vocab_size: int = 49152  # LLAMA
    n_ctx: int = 8192  # LLAMA
    n_layer: int = 30  # LLAMA
    n_head: int = 9  # LLAMA
    n_embd: int = 576  # LLAMA
    n_inner: int | None = 1536  # LLAMA
    n_kv_head: int = 3  # LLAMA  heads of keys and values, each read by n_head // n_kv_head queries
    qkv_bias: bool = False  # LLAMA  queries, keys and values have biases, as in Qwen2
    tied: bool = True  # LLAMA  the output head is the token embedding
    norm_eps: float = 1e-5  # LLAMA  added to the mean square that RMSNorm divides by
    head_dim: int | None = None
    qk_norm: bool = False  # QKNORM  each head's queries and keys are normed, as in Qwen3
    dropout: float = 0.0
    rope_theta: float = 100_000.0  # ROPE  base of the frequencies, see rotation()
    rope_scaling: tuple[float, float, float, int] | None = None  # ROPE  factor, low, high, n_ctx

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
        self.bias = None  # LLAMA

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)  # (..., n_in) -> (..., n_out)


def rotation(pos: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:  # ROPE
    """Return cosines and signed sines (1, T, D), float32, that rotate heads at positions pos (T,),
    or (B, 1, T, D) for positions (B, T).

    Pair i rotates by theta ** (-2i / D) radians a token. With rope_scaling, as in Llama 3.1 and
    3.2, a pair that goes round at most `low` times in n_ctx tokens is slowed down by `factor`; one
    that does so at least `high` times keeps its speed, and those between get a mixture of both."""
    i = torch.arange(0, config.head_dim, 2, device=pos.device).float()  # ROPE  2i, (D / 2,) float32
    speed = config.rope_theta ** (-i / config.head_dim)  # ROPE  radians a token
    if config.rope_scaling is not None:  # ROPE
        factor, low, high, n_ctx = config.rope_scaling  # ROPE
        rounds = n_ctx * speed / (2 * math.pi)  # ROPE
        fast = ((rounds - low) / (high - low)).clamp(0, 1)  # ROPE
        speed = speed * (fast + (1 - fast) / factor)  # ROPE
    angle = pos[..., None, :, None] * speed  # ROPE  (1, T, D / 2)
    cos, sin = angle.cos(), angle.sin()  # ROPE
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # ROPE


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # ROPE
    """Rotate x (B, H, T, D), queries or keys: numbers i and D / 2 + i of a head are a pair (a, b).
    The product of a rotated query and key depends on how far apart they are, and not on where."""
    cos, sin = rope  # ROPE
    a, b = x.chunk(2, dim=-1)  # ROPE
    return (x * cos + torch.cat([b, a], dim=-1) * sin).to(x.dtype)  # ROPE


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


class Attention(nn.Module):
    """Multi-head self-attention; a cache fits between its two steps, project() and forward()."""

    def __init__(self, config: LlamaConfig) -> None:  # LLAMA
        super().__init__()
        self.n_head, self.head_dim, self.dropout = config.n_head, config.head_dim, config.dropout
        if config.n_kv_head < 1 or config.n_head % config.n_kv_head:  # GQA
            given = f"n_kv_head is {config.n_kv_head}, n_head {config.n_head}"  # GQA
            raise ValueError(f"{given}: the first must divide the second")  # GQA
        self.heads = [config.n_head, config.n_kv_head, config.n_kv_head]  # GQA  of q, k and v
        self.c_attn = Conv1D(config.n_embd, sum(self.heads) * config.head_dim)  # GQA
        self.c_proj = Conv1D(config.n_head * config.head_dim, config.n_embd)
        if config.qkv_bias:  # LLAMA
            n_out = sum(self.heads) * config.head_dim  # LLAMA
            self.c_attn.bias = nn.Parameter(torch.empty(n_out))  # LLAMA

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values (B, H, T, D) of x (B, T, C)."""
        B, T, _ = x.shape
        qkv = self.c_attn(x).view(B, T, sum(self.heads), self.head_dim)  # GQA
        return qkv.transpose(1, 2).split(self.heads, dim=1)  # GQA

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:  # NEW
        """Return (B, T, C): each query's attention-weighted average of the values it may see."""
        causal = mask is None and q.size(2) > 1  # NEW  a single query sees every key it is given
        heads = q.shape  # GQA
        if q.size(2) == 1:  # GQA  one token: a group's heads are so many queries of one key head
            q = q.reshape(len(q), k.size(1), -1, self.head_dim)  # GQA  (B, key heads, group, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal,  # GQA
                                           dropout_p=self.dropout * self.training,  # GQA
                                           enable_gqa=True)  # GQA
        y = (y + 0 * q).reshape(heads)  # GQA  attention may turn NaN into 0
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class NormedAttention(Attention):  # QKNORM
    """Attention that norms each head's queries and keys: products of the two stay moderate."""

    def __init__(self, config: LlamaConfig) -> None:  # QKNORM
        super().__init__(config)  # QKNORM
        self.ln_q = nn.RMSNorm(config.head_dim, eps=config.norm_eps)  # QKNORM
        self.ln_k = nn.RMSNorm(config.head_dim, eps=config.norm_eps)  # QKNORM

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # QKNORM
        """Return the queries, keys and values (B, H, T, D) of x (B, T, C)."""
        q, k, v = super().project(x)  # QKNORM
        return self.ln_q(q), self.ln_k(k), v  # QKNORM


class MLP(nn.Module):
    """The part of a block that treats each token alone: widen, apply a nonlinearity, narrow."""

    def __init__(self, config: LlamaConfig) -> None:  # LLAMA
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, 2 * config.n_inner)  # SWIGLU
        self.c_proj = Conv1D(config.n_inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.c_fc(x).chunk(2, dim=-1)  # SWIGLU  (B, T, n_inner) each
        x = F.silu(gate) * x  # SWIGLU
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:  # LLAMA
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=config.norm_eps)  # RMS
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=config.norm_eps)  # RMS
        self.attn = Attention(config)
        if config.qk_norm:  # QKNORM
            self.attn = NormedAttention(config)  # QKNORM
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, pos: Tensor, cache: KVCache | None, layer: int,  # ROPE
                rope: tuple[Tensor, Tensor]) -> Tensor:  # ROPE
        q, k, v = self.attn.project(self.ln_1(x))  # ROPE  (B, H, T, D) each
        q, k, mask = rotate(q, rope), rotate(k, rope), None  # ROPE  a cache holds rotated keys
        v = v + 0 * k  # ROPE  an overflow in k reaches the logits
        if cache is not None:  # NEW
            k, v, mask = cache.append(layer, k, v, pos)  # NEW  (B, H, S, D) twice, (T, S) or None
        x = x + self.drop(self.attn(q, k, v, mask))  # NEW
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)


class Llama(nn.Module):  # LLAMA
    """A Llama with GPT-2's parameter names: c_attn holds the matrices of q, k and v side by side,
    c_fc those of gate and up. With a window of at most n_ctx tokens a text may have any length: set
    context to math.inf. Raises ValueError if heads can't be grouped, or rotated in pairs.
    """
    config_class, block_class = LlamaConfig, Block  # LLAMA

    def __init__(self, config: LlamaConfig) -> None:  # LLAMA
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.head_dim % 2:  # ROPE
            raise ValueError(f"head_dim is {config.head_dim}, and must be even, for pairs")  # ROPE
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(self.block_class(config) for _ in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=config.norm_eps)  # RMS
        self.context = config.n_ctx  # positions that a text may take
        self.lm_head = self.wte
        if not config.tied:  # LLAMA
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)  # LLAMA
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
        x, rope = self.drop(self.wte(ids)), rotation(pos, self.config)  # ROPE  (B, T, C)
        for layer, block in enumerate(self.h):  # NEW
            x = block(x, pos, cache, layer, rope)  # ROPE
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


def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from support.cli import WRITING, CommandLine
    from support.printing import end_tokens_of, stream
    from support.tracing import Trace

    example = 'python3 %(prog)s --prompt "Halek lived in" --temperature 0.8'
    cli = CommandLine(__doc__, example)
    cli.add_model_options(NAMES, *WRITING, "--trace")
    cli.add_argument("--compare", action="store_true", help="write without the cache too")  # NEW
    cli.add_options("--chat", "--system")  # LLAMA
    cli.set_defaults(model="pocket-llama")  # LLAMA
    cli.add_options("--cache", default=KVCache)  # NEW
    with cli.parse(argv) as args:
        model = load_model(args.model, model_class=Llama, device=args.device,  # LLAMA
                           dtype=args.dtype)  # LLAMA
        tokenizer = load_tokenizer(args.model)
        prompt = tokenizer.encode(args.prompt, allowed_special="all")
        if args.chat or args.system:  # LLAMA
            from formats.chat import encode_given_prompt  # LLAMA

            prompt = encode_given_prompt(args, tokenizer)  # LLAMA
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
        if args.compare:  # NEW
            from gpt_baseline import generate as generate_uncached  # NEW
            from support.printing import no_output, print_comparison  # NEW

            with no_output():  # NEW  the same text once more: its times are in the table
                uncached = run(generate_uncached)  # NEW
            cached = run(generate, cache=args.cache())  # NEW
            print_comparison(ids.size(1), {"no cache": uncached, "KV cache": cached})  # NEW
        else:  # NEW
            run(generate, cache=args.cache())  # NEW


if __name__ == "__main__":
    main()
