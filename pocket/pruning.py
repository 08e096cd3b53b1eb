"""A narrower model of the same layers and heads, which decodes on its own cache or on its teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_kv_cache import GPT, GPTConfig, KVCache


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


@torch.no_grad()
def pruned(teacher: GPT, config: GPTConfig, ids: Tensor) -> Student:
    """Return a narrower model: of the teacher's hidden dimensions and, layer by layer, MLP neurons, those that are most
    active (mean absolute value) on texts ids (B, T)."""
    hidden: list[Tensor] = []
    neurons: list[Tensor] = []
    hooks = [
        norm.register_forward_hook(lambda _, args, output: hidden.append(output.abs().mean((0, 1))))
        for block in teacher.h
        for norm in (block.ln_1, block.ln_2)
    ]
    hooks += [
        block.mlp.c_proj.register_forward_pre_hook(
            lambda _, args: neurons.append(args[0].abs().mean((0, 1)))
        )
        for block in teacher.h
    ]
    teacher(ids)
    for hook in hooks:
        hook.remove()
    wide = sum(hidden).topk(config.n_embd).indices.sort().values
    inner = [active.topk(config.n_inner).indices.sort().values for active in neurons]
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
