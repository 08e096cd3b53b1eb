"""A trained GPT-2 as a Llama: what the one computes in the other's terms, as far as they reach.

A stream whose numbers have mean 0 makes RMSNorm of LayerNorm, so all that is written to it is
centred. The mean is then free, and holds a constant: matrices whose columns don't sum to 0 read it,
and need no biases; and where one half of an MLP reads nothing else, SwiGLU is nearly GELU. Grouped
heads share the best keys and values that they can: of the dimensions of all of them, those that
count most on real texts. Dimensions that count more turn less, since what tokens say must match at
any distance.

Sources: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models", section
2.1, where shared heads begin as means and a few percent of the original training follow; Jin et al.
2024, "Align Attention Heads Before Merging Them", where unlike heads are turned towards each other
before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_kv_cache import GPT
from llama_kv_cache import Llama, LlamaConfig, rotate, rotation
from pocket.recipes import centred, positions, recorded

STEEP = 1.702  # gelu(x) is nearly x * sigmoid(STEEP * x)
CONSTANT = 5.0  # what a stream's mean holds, in units of the embeddings' root mean square
TOWARDS = 6.0  # of a key that all tokens share, so that a query finds one token alone
OPEN = 2.0  # at the gate of a neuron that is always on


@dataclass(frozen=True)
class Reading:
    """What stands at a norm as a GPT-2 reads texts, less its positions, and how a Llama reads it."""

    norm: nn.LayerNorm
    rms: float  # of the stream, the mean
    moments: Tensor  # (C + 1, C + 1), the mean of x x^T, where x is the normed stream and a 1
    share: float  # of a Llama's normed stream that the constant takes, the mean

    def joined(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return a matrix (C, N) and its bias (N,) behind this norm as one, of x (C + 1, N)."""
        bias = self.norm.bias @ weight + bias
        return torch.cat([self.norm.weight[:, None] * weight, bias[None]])

    def matrix(self, joined: Tensor) -> Tensor:
        """Return the matrix (C, N) that reads from a Llama's stream what joined (C + 1, N) reads."""
        weight, bias = joined[:-1], joined[-1]
        weight = (weight - weight.mean(0)) / (1 - self.share**2) ** 0.5
        return weight + bias / (self.share * len(weight))


def read(model: GPT, ids: Tensor, constant: float) -> list[Reading]:
    """Return what stands at each norm, in their order, as a GPT-2 reads texts ids (B, T)."""
    norms = [norm for norm in model.modules() if isinstance(norm, nn.LayerNorm)]
    with recorded(norms, inputs=True) as inputs:
        model(ids)
    readings = []
    for norm, x in zip(norms, inputs, strict=True):
        x = centred(x - positions(model, ids.size(1)))
        rms = x.square().mean(-1, keepdim=True).sqrt()
        share = constant / (rms**2 + constant**2).sqrt()
        x = F.pad(x / rms, (0, 1), value=1.0).flatten(0, 1)
        moments = x.T @ x / len(x)
        readings.append(Reading(norm, rms.mean().item(), moments, share.mean().item()))
    return readings


def shared(
    products: list[Tensor], left: Tensor, right: Tensor, n: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the one matrix (C + 1, n) and the others (n, M) whose products are nearest to the given
    ones (C + 1, M), the most important of n dimensions first; left (C + 1, C + 1) and right (M, M)
    are the moments of what is multiplied with them."""
    values, vectors = torch.linalg.eigh(right)
    root = vectors * values.clamp(min=0).sqrt()
    joined = torch.cat([product @ root for product in products], dim=1)
    squares, basis = torch.linalg.eigh(joined.T @ left @ joined)
    squares, basis = squares.flip(0)[:n].clamp(min=1e-12), basis.flip(1)[:, :n]
    one = joined @ basis / squares**0.25  # both sides of a product get half of its size
    others = [(one / squares**0.5).T @ left @ product for product in products]
    return one, others


def attention(
    block: nn.Module, reading: Reading, config: LlamaConfig, back: int
) -> tuple[Tensor, Tensor]:
    """Return the weights of c_attn and c_proj of a layer whose first `back` heads, 2 or none, look
    one and two positions back, as a GPT-2's did by learned positions."""
    C, H, D = config.n_embd, config.n_head, config.head_dim
    parts = reading.joined(block.attn.c_attn.weight, block.attn.c_attn.bias)
    query, key, value = parts.view(C + 1, 3, H, D).unbind(1)  # (C + 1, H, D) each
    writes = centred(block.attn.c_proj.weight).view(H, D, C)
    group = H // config.n_kv_head
    queries, keys, values, mixed = torch.zeros(C + 1, H, D), [], [], []
    for first in range(0, H, group):
        heads = range(first, first + group)
        copies = [value[:, h] @ writes[h] for h in heads]  # (C + 1, C)
        for copy in copies:  # the weights of a query's values have sum 1
            copy[-1] += centred(block.attn.c_proj.bias) / H
        one, others = shared(copies, reading.moments, torch.eye(C), D)
        values.append(one)
        mixed += others
        content = [h for h in heads if h >= back]
        n = D if len(content) == group else D // 2  # the other pairs turn fast, and tell neighbours
        matches = [key[:, h] @ query[:, h].T for h in content]  # (C + 1, C + 1)
        one, others = shared(matches, reading.moments, reading.moments, n)
        place = torch.arange(D).view(2, D // 2).T.flip(0).flatten()[:n]
        keys.append(torch.zeros(C + 1, D))
        keys[-1][:, place] = one
        for head, other in zip(content, others, strict=True):
            queries[:, head, place] = other.T
    if back:
        towards = torch.where(torch.arange(D) % (D // 2) < D // 4, TOWARDS, 0.0)
        keys[0][-1] += towards
        for head in range(back):
            turned_back = rotation(torch.tensor([-1 - head]), config)
            queries[-1, head] = rotate(towards.view(1, 1, 1, D), turned_back).flatten()
    joined = torch.cat([queries.flatten(1), *keys, *values], dim=1)
    return reading.matrix(joined), torch.cat(mixed)


def mlp(
    block: nn.Module, reading: Reading, config: LlamaConfig, more: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of c_fc and c_proj of the neurons that write most, and of one that is
    always on: it writes the bias, and more (C,)."""
    N = config.n_inner - 1
    widen = reading.joined(block.mlp.c_fc.weight, block.mlp.c_fc.bias)
    narrow = centred(block.mlp.c_proj.weight)
    strength = (reading.moments @ widen * widen).sum(0) * narrow.square().sum(1)
    kept = strength.topk(N).indices.sort().values
    gate, up = torch.zeros(2, config.n_embd + 1, N + 1)
    gate[:, :N] = STEEP * widen[:, kept]
    gate[-1, N] = OPEN
    up[-1] = 1 / STEEP
    always = (centred(block.mlp.c_proj.bias) + more) * STEEP / F.silu(torch.tensor(OPEN))
    read = torch.cat([reading.matrix(gate), reading.matrix(up)], dim=1)
    return read, torch.cat([narrow[kept], always[None]])


@torch.no_grad()
def as_llama(model: GPT, config: LlamaConfig, ids: Tensor) -> Llama:
    """Return the Llama of this geometry that is nearest to a GPT-2 on texts ids (B, T): one that
    knows no position but what heads 0 and 1 of layer 0 see, one and two tokens back."""
    embeddings = centred(model.wte.weight + model.wpe.weight.mean(0))
    constant = CONSTANT * embeddings.square().mean().sqrt()
    *readings, last = read(model, ids, constant.item())
    llama = Llama(config)
    llama.wte.weight.copy_(embeddings + constant)
    llama.ln_f.weight.copy_(model.ln_f.weight)
    more = torch.zeros(config.n_embd)
    for layer, (old, new) in enumerate(zip(model.h, llama.h, strict=True)):
        if layer == config.n_layer - 1:  # the last writes ln_f's bias, and takes the constant away
            more = centred(model.ln_f.bias / model.ln_f.weight) * last.rms - constant
        weights = attention(old, readings[2 * layer], config, 0 if layer else 2)
        weights += mlp(old, readings[2 * layer + 1], config, more)
        parts = (new.attn.c_attn, new.attn.c_proj, new.mlp.c_fc, new.mlp.c_proj)
        for part, weight in zip(parts, weights, strict=True):
            part.weight.copy_(weight)
    return llama
