"""GPT-2 from scratch, without a KV cache: for every new token it reads the whole text again.
Read this file first, then `diff gpt_baseline.py gpt_kv_cache.py`: the difference is the KV cache.

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return (B, T, C): each query's attention-weighted average of the values up to its own."""
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(*self.attn.project(self.ln_1(x))))
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

    def forward(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T); with last_only, the last token's (B, 1, V).
        Raises ValueError if there is no token, or more than n_ctx."""
        n_read, T = 0, ids.size(1)  # every pass begins with the text's first token
        pos = torch.arange(T, device=ids.device)  # (T,)
        if T < 1 or pos.max() >= self.context:
            limits = f"must be at least 1 and end within n_ctx = {self.context}"
            raise ValueError(f"{T} tokens after {n_read}: {limits}")
        x = self.drop(self.wte(ids) + self.wpe(pos))  # (B, T, C)
        for block in self.h:
            x = block(x)
        return self.head(x[:, -1:] if last_only else x)

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
             generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Yield up to max_new_tokens tokens (B, 1) after ids (B, T), each as soon as it is known.
    A row that has produced one of stop_ids repeats it; when all have, generation ends.
    Raises ValueError, at the first token, if ids is empty or an option is out of range,
    and at any token whose logits aren't finite."""
    check_options(ids, max_new_tokens, temperature, top_k)
    stops = torch.tensor([*stop_ids], device=ids.device)  # (N,)
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    for _ in range(max_new_tokens):
        start = context_start(ids.size(1), model.context)
        logits = model(ids[:, start:], last_only=True)[:, -1]  # (B, V)
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
    with cli.parse(argv) as args:
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
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
        run(generate)


if __name__ == "__main__":
    main()
