"""A narrower model of the same layers and heads, which decodes on its own cache or on its teacher's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def most_active(activity: Tensor, n: int) -> Tensor:
    """Return the n dimensions (n,) that are most active, in their order."""
    return activity.topk(n).indices.sort().values


@torch.no_grad()
def pruned(teacher: GPT, config: GPTConfig, ids: Tensor) -> Student:
    """Return a narrower model: of the teacher's hidden dimensions and, layer by layer, MLP neurons, those that are most
    active (mean absolute value) on texts ids (B, T)."""
    activity = {}

    def record(layer: nn.Module, given: tuple[Tensor]) -> None:
        activity[layer] = given[0].abs().mean((0, 1))

    readers = [layer for block in teacher.h for layer in (block.attn.c_attn, block.mlp.c_fc)]
    writers = [block.mlp.c_proj for block in teacher.h]
    hooks = [layer.register_forward_pre_hook(record) for layer in readers + writers]
    teacher(ids)
    for hook in hooks:
        hook.remove()
    wide = most_active(sum(activity[layer] for layer in readers), config.n_embd)
    inner = [most_active(activity[layer], config.n_inner) for layer in writers]
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
    student = Student(config)
    student.load_state_dict(kept, strict=False)  # which names lm_head, the same as wte, once more
    return student.to(ids.device)
