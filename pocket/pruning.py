"""A narrower model of the same layers and heads, which decodes on its own cache or on its teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_kv_cache import GPT, GPTConfig, KVCache
from pocket.recipes import recorded


class Student(GPT):
    """A narrower model in training, on its own cache or a teacher's."""

    def forward(
        self,
        ids: Tensor,
        cache: KVCache | None = None,
        last_only: bool = False,
        start: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V); with start (B, T), where the segment of each token begins, as if there the cache
        of ids that a teacher has written had been taken over, and the student's own went on from it."""
        if start is None:
            return super().forward(ids, cache, last_only)
        at = torch.arange(ids.size(1), device=ids.device)
        before = start[..., None] > at  # (B, T, T), the teacher's tokens that each token sees
        own = ~before & (at <= at[:, None])
        mask = torch.cat([before, own], -1)[:, None]  # (B, 1, T, 2 T)
        x = self.drop(self.wte(ids) + self.wpe(at))
        for block, kv in zip(self.h, cache.layers, strict=True):
            q, k, v = block.attn.project(block.ln_1(x))
            k, v = (
                torch.cat([read.to(written), written], 2)
                for read, written in zip(kv, (k, v), strict=True)
            )
            x = x + block.drop(block.attn(q, k, v, mask))
            x = x + block.drop(block.mlp(block.ln_2(x)))
        return self.head(x)


def most_active(activity: Tensor, n: int) -> Tensor:
    """Return the n dimensions (n,) that are most active, in their order."""
    return activity.topk(n).indices.sort().values


@torch.no_grad()
def pruned(teacher: GPT, config: GPTConfig, ids: Tensor) -> Student:
    """Return a narrower model: of the teacher's hidden dimensions and, layer by layer, MLP neurons, those that are most
    active (mean absolute value) on texts ids (B, T)."""
    norms = [norm for block in teacher.h for norm in (block.ln_1, block.ln_2)]
    with recorded(norms) as hidden, recorded([b.mlp.c_proj for b in teacher.h], True) as neurons:
        teacher(ids)
    wide = most_active(sum(x.abs().mean((0, 1)) for x in hidden), config.n_embd)
    inner = [most_active(x.abs().mean((0, 1)), config.n_inner) for x in neurons]
    kept = {}
    for name, p in teacher.named_parameters():
        if name.endswith(("c_attn.weight", "c_fc.weight")):  # read the residual stream
            p = p[wide]
        elif name.endswith("mlp.c_proj.weight"):
            p = p[inner[int(name.split(".")[1])]]
        if ".c_fc." in name:
            p = p[..., inner[int(name.split(".")[1])]]
        elif ".c_attn." not in name:  # all others write to the stream, or are as wide
            p = p[..., wide]
        kept[name] = p
    student = Student(config).to(ids.device)
    for name, parameter in student.named_parameters():
        parameter.copy_(kept[name])
    return student
