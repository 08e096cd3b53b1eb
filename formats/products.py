"""How a model computes one-token decoding: on a CPU the order of its weights in memory, and in half precision the kernels
that are fast. A step multiplies one row with every matrix, at best as fast as memory is read."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Sides (out, in) of a matrix that is_faster() tries: in no dtype does a processor's cache hold it.
SIDES = (8192, 4096)
TRIES = 5


def order_for_decoding(model: nn.Module) -> nn.Module:
    """Lay each matrix out in the order in which a CPU multiplies a row with it fastest, and return the model.

    In float32 that is the order of (in, out), a row of weights for each input. In half precision only the order of
    (out, in) has a fast kernel; the other is several times as slow. Shapes stay: a weight is then the transpose of a
    matrix in the right order. In half precision, passes of one token also go without oneDNN, and attend in float32. A
    model that is converted to another dtype later computes the same, slowly. On a GPU, half precision goes without
    cuDNN's attention, in the whole process: it plans anew for each length of a cache, which takes longer than a step.
    """
    is_half = model.wte.weight.dtype.itemsize == 2
    if is_half:
        torch.backends.cuda.enable_cudnn_sdp(False)
    for name, weight in model.named_parameters():
        if ".c_" in name and weight.dim() == 2:  # Conv1D's, stored (in, out)
            weight.data = transposed_in_memory(weight) if is_half else weight.contiguous()
        elif name in ("wte.weight", "lm_head.weight"):  # the head's (V, C), read as (out, in)
            weight.data = weight.contiguous() if is_half else transposed_in_memory(weight)
    if is_half and torch.backends.mkldnn.enabled:
        model.register_forward_pre_hook(before_pass, with_kwargs=True)
        model.register_forward_hook(after_pass, with_kwargs=True, always_call=True)
    for block in model.h if is_half else ():
        block.attn.register_forward_pre_hook(widen)
        block.attn.c_proj.register_forward_pre_hook(narrow)
    return model


def transposed_in_memory(weight: Tensor) -> Tensor:
    """Return the same matrix, whose columns are contiguous."""
    return weight.detach().t().contiguous().t()


def is_faster(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Return whether a device multiplies faster in a dtype than in float32, by trying it: one row with a large matrix, as
    in decoding, and many rows with a part of it, as in a prompt."""
    times = {}
    for tried in (torch.float32, dtype):
        weight = torch.ones(SIDES, device=device, dtype=tried)
        if tried is torch.float32:
            weight = transposed_in_memory(weight)
        times[tried] = [seconds_of(weight, 1), seconds_of(weight[:1024], 128)]
    return all(
        half < single for half, single in zip(times[dtype], times[torch.float32], strict=True)
    )


def seconds_of(weight: Tensor, rows: int) -> float:
    """Return the least time of a few products of so many rows with a weight (out, in)."""
    x = torch.ones(rows, weight.size(1), device=weight.device, dtype=weight.dtype)
    seconds, was_enabled = [], torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = was_enabled and rows > 1
    for _ in range(TRIES):
        started = time.perf_counter()
        float(F.linear(x, weight)[0, 0])  # which waits for a GPU
        seconds.append(time.perf_counter() - started)
    torch.backends.mkldnn.enabled = was_enabled
    return min(seconds)


def before_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Turn oneDNN off for a pass of one token: it takes over products in half precision, and is slower than PyTorch's
    own kernel for one row, faster for many. It is a setting of the whole process."""
    if is_single(*args, **kwargs):
        torch.backends.mkldnn.enabled = False


def after_pass(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor | None
) -> None:
    """Turn oneDNN on again, after a pass that failed, too."""
    if is_single(*args, **kwargs):
        torch.backends.mkldnn.enabled = True


def is_single(ids: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether ids (B, T), the first argument of a pass, are one token on a CPU."""
    return ids.numel() == 1 and ids.device.type == "cpu"


def widen(
    attention: nn.Module, args: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Give single queries to attention in float32, with their keys and values: for heads that aren't grouped, and for all
    in float16, PyTorch's kernel is several times as fast then, conversion included."""
    q = args[0]
    if q.size(2) == 1 and q.device.type == "cpu":
        return tuple(x.float() if x is not None and x.is_floating_point() else x for x in args)
    return None


def narrow(projection: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Give what attention returns to its projection in the dtype of the weights."""
    return (args[0].to(projection.weight.dtype),)


for hook in (before_pass, after_pass, widen, narrow):
    hook.observes = True  # a store may serve the model with them and without
