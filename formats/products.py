"""The products that decoding consists of: a row, or a few, times each matrix of a model.

A step reads every weight once, so it is at best as fast as memory is read. What PyTorch needs for that depends on the
number format, the number of threads and the processor:

- float32, one thread: (in, out) order, a row of weights for each input.
- float32, more threads: on Intel's processors MKL divides such a product among the threads. On others it computes a
  vector's product with one thread, however many are allowed, and 2 to 16 rows are slow in this order; there the outputs
  are divided here, by one batch of products (torch.bmm), a share for each thread. The shares are views of the weights as
  they lie.
- bfloat16 and float16: (out, in) order, the only one that has a fast kernel. Single queries attend in float32: for heads
  that aren't grouped, and for all in float16, PyTorch's kernel is several times as fast then, conversion included.
- bfloat16, one row: without oneDNN, which takes such products over and on some processors needs twice the time. PyTorch
  can turn it off for the whole process only; here that lasts as long as a pass of one token.
- On a GPU, half precision goes without cuDNN's attention, which plans anew for each length of a cache: that takes longer
  than a step.

Weights exist once, with their names and shapes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.conditions import processor_name
from support.timing import time_call

# Up to so many rows outputs are divided; more keep all threads busy in any case. For a small matrix it takes longer.
MOST_ROWS = 128
LEAST_NUMBERS = 2**18
# Sides (out, in) of a matrix that is_faster() tries: in no dtype does a processor's cache hold it.
SIDES = (8192, 4096)
TRIES = 5


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., in) @ weight (in, out) + bias (out,), computed in the way that is fastest here."""
    threads = torch.get_num_threads()
    rows = x.reshape(-1, x.size(-1))  # (R, in)
    if threads == 1 or not gains_by_division(len(rows), weight):
        return F.linear(x, weight.t(), bias)
    y = divided_product(rows, weight, threads)
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.size(1))


def divided_product(rows: Tensor, weight: Tensor, threads: int) -> Tensor:
    """Return rows (R, in) @ weight (in, out), of which each thread computes a share of the outputs."""
    share = weight.size(1) // threads
    even = weight[:, : share * threads]
    shares = even.view(len(weight), threads, share).transpose(0, 1)  # (threads, in, share)
    y = torch.bmm(rows.expand(threads, -1, -1), shares)  # (threads, R, share)
    y = y.transpose(0, 1).flatten(1)  # (R, threads * share)
    if even.size(1) < weight.size(1):
        rest = rows @ weight[:, even.size(1) :]
        y = torch.cat([y, rest], dim=1)
    return y


def gains_by_division(n_rows: int, weight: Tensor) -> bool:
    """Return whether threads compute so many rows times a weight (in, out) faster if its outputs are divided: in float32
    on a processor that isn't Intel's, for up to MOST_ROWS rows and a weight of LEAST_NUMBERS numbers or more."""
    is_float32 = weight.dtype == torch.float32 and weight.device.type == "cpu"
    is_large = weight.numel() >= LEAST_NUMBERS and weight.stride(1) == 1
    return is_float32 and is_large and n_rows <= MOST_ROWS and not mkl_divides_products()


@cache
def mkl_divides_products() -> bool:
    """Return whether a product of one row is divided among threads already: MKL does that on Intel's processors. Without
    MKL, as on ARM, nothing is known of it, and the product is left to PyTorch."""
    return not torch.backends.mkl.is_available() or "Intel" in processor_name("cpu")


class Product(nn.Module):
    """A Conv1D, x @ W + b with W (in, out), by multiply()."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)  # (..., in) -> (..., out)


class NarrowingProduct(Product):
    """The product after HalfAttention, whose averages are in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class DecodingModel:
    """What order_for_decoding() puts before a lecture's class of model."""

    def head(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the last block's output (B, T, C)."""
        return multiply(self.ln_f(x), self.lm_head.weight.t())

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with half_precision_kernels(ids, self.wte.weight.dtype):
            return super().forward(ids, *args, **kwargs)


class HalfAttention:
    """What order_for_decoding() puts before a lecture's class of attention in half precision."""

    def forward(self, q: Tensor, *others: Tensor | None) -> Tensor:
        """others: keys and values, and the mask in the files that have one."""
        if q.size(2) == 1 and q.device.type == "cpu" and q.dtype.itemsize == 2:
            q = q.float()
            others = tuple(
                x.float() if x is not None and x.is_floating_point() else x for x in others
            )
        return super().forward(q, *others)


@cache
def preceded(first: type, lecture_class: type) -> type:
    """Return a class that has the methods of `first` before those of a lecture's class, and its name."""
    return type(lecture_class.__name__, (first, lecture_class), {"__doc__": first.__doc__})


def order_for_decoding(model: nn.Module) -> nn.Module:
    """Lay each matrix out in the order in which a CPU multiplies a row with it fastest, give the model the products of
    this file, and return it.

    Shapes stay: in half precision a weight is then the transpose of a matrix in the right order. A model that is converted
    to another dtype later computes what the lecture's class does, slowly. Its state_dict() can be saved; the model itself
    can't be pickled, since its class is made here.
    """
    is_half = model.wte.weight.dtype.itemsize == 2
    for name, weight in model.named_parameters():
        if name.startswith("h.") and weight.dim() == 2:  # Conv1D's, stored (in, out)
            weight.data = transposed_in_memory(weight) if is_half else weight.contiguous()
        elif name in ("wte.weight", "lm_head.weight"):  # the head's (V, C), read as (out, in)
            weight.data = weight.contiguous() if is_half else transposed_in_memory(weight)
    for block in model.h:
        for part in block.children():
            for name, layer in part.named_children():
                weight = getattr(layer, "weight", None)
                if weight is not None and weight.dim() == 2:  # a Conv1D's
                    setattr(part, name, Product(layer.weight, layer.bias))
        if is_half:
            block.attn.c_proj = NarrowingProduct(block.attn.c_proj.weight, block.attn.c_proj.bias)
            if hasattr(block.attn, "c_attn") and not isinstance(block.attn, HalfAttention):
                block.attn.__class__ = preceded(HalfAttention, type(block.attn))
    if not isinstance(model, DecodingModel):
        model.__class__ = preceded(DecodingModel, type(model))
    return model.train(model.training)  # the products, too


def transposed_in_memory(weight: Tensor) -> Tensor:
    """Return the same matrix, whose columns are contiguous."""
    return weight.detach().t().contiguous().t()


def half_precision_kernels(ids: Tensor, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context that lets a pass of ids (B, T) use the kernels that are fast in a dtype."""
    if dtype.itemsize == 2 and ids.is_cuda:
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )
    if dtype.itemsize == 2 and ids.device.type == "cpu" and ids.numel() == 1:
        return without_onednn()
    return nullcontext()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Turn oneDNN off in the whole process, and afterwards on again if it was on, also after an error."""
    was_enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was_enabled


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

    def product() -> float:
        return float(multiply(x, weight.t())[0, 0])  # which waits for a GPU

    with without_onednn() if rows == 1 else nullcontext():
        return min(time_call(product)[0] for _ in range(TRIES))
