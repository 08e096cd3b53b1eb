"""A narrower model of the same layers and heads, which decodes on its own cache or on its teacher's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_kv_cache import GPT, GPTConfig, KVCache


class SegmentCache(KVCache):
    """In training, what a student reads of a text: its teacher's keys and values up to where the segment of each token
    begins, start (B, T), and its own from there on, as if it had taken the teacher's cache over there."""

    def __init__(self, teacher: KVCache, start: Tensor) -> None:
        super().__init__()
        self.teacher = teacher
        at = torch.arange(start.size(1), device=start.device)
        before = start[..., None] > at  # (B, T, T), the teacher's tokens that each token sees
        own = ~before & (at <= at[:, None])
        self.mask = torch.cat([before, own], -1)[:, None]  # (B, 1, T, 2 T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values (B, H, 2 T, D) of both."""
        old_k, old_v = self.teacher.layers[layer].to(k)
        return torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), self.mask


def most_active(activity: Tensor, n: int) -> Tensor:
    """Return the n dimensions (n,) that are most active, in their order."""
    return activity.topk(n).indices.sort().values


@torch.no_grad()
def pruned(teacher: GPT, config: GPTConfig, ids: Tensor) -> GPT:
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
    student = GPT(config)
    student.load_state_dict(kept, strict=False)  # which names lm_head, the same as wte, once more
    return student.to(ids.device)
