"""A second device without a GPU: its tensors say that they are elsewhere, compute on the CPU, and
refuse to meet the CPU's. That finds what a GPU would refuse: a mask or a position left behind. It
proves where tensors are, but not what a GPU's kernels compute, nor where random generators are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from support import cli

NAME = "lazy"  # a type of device that PyTorch knows, and that no build for CPUs has
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}  # from one device to another
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}  # by the CPU's too


class Elsewhere(Tensor):
    """A tensor on the pretended device; `held` computes for it."""

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, held: Tensor, requires_grad: bool = False) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.held!r})"

    def __format__(self, form: str) -> str:
        return format(self.held, form)

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return computed(function, args, kwargs or {})


CPU = torch.Generator  # the class, before it is replaced


class Generator(CPU):
    """A random generator of the CPU, also where one of the pretended device is asked for."""

    def __new__(cls, device: torch.device | str = NAME) -> torch.Generator:
        return CPU("cpu" if torch.device(device).type == NAME else device)


class Mode(TorchDispatchMode):
    """A context in which tensors can be made on the pretended device."""

    def __torch_dispatch__(
        self, function: Any, _: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return computed(function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """A context for the calls that don't reach a Mode: lists that become tensors, in torch.tensor()
    and as indices; and out=, for which a new tensor is made, since one that is held elsewhere keeps
    its shape."""

    def __init__(self, default: str) -> None:
        super().__init__()
        self.default = default

    def __torch_function__(
        self, function: Any, _: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args and isinstance(args[0], Tensor)
        made = function is torch.tensor or (function is torch.as_tensor and not given)
        device = kwargs.get("device") or self.default
        if made and torch.device(device).type == NAME:
            return function(*args, **{**kwargs, "device": "cpu"}).to(NAME)
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            x, index, *rest = args
            index = index if isinstance(index, tuple) else (index,)
            index = [torch.tensor(i, device="cpu") if isinstance(i, list) else i for i in index]
            args = (x, tuple(index), *rest)
        if isinstance(kwargs.get("out"), Elsewhere):  # it couldn't take another shape
            kwargs = {name: x for name, x in kwargs.items() if name != "out"}
        return function(*args, **kwargs)


def held(x: Any) -> Any:
    return x.held if isinstance(x, Elsewhere) else x


def computed(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what a device would. Raises RuntimeError where tensors of two devices meet."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    # A tensor that is a single number may meet any device.
    here = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim() > 0]
    if function is aten._local_scalar_dense.default:
        return function(held(args[0]))
    indexed = function in INDEXED and isinstance(args[0], Elsewhere)
    allowed = function in COPIES or indexed
    if there and here and not allowed:
        shapes = [tuple(x.shape) for x in here]
        raise RuntimeError(f"{function}: tensors of the CPU {shapes} and of the pretended device")
    options = dict(kwargs)
    wanted = options.get("device")
    elsewhere = bool(there)
    if wanted is not None:
        elsewhere = torch.device(wanted).type == NAME
        options["device"] = "cpu"
    options.pop("pin_memory", None)
    found = function(*tree_map(held, args), **tree_map(held, options))
    if function._schema.is_mutable and function._schema.name.endswith("_"):
        return args[0]
    same = {id(held(x)): x for x in tensors}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same.get(id(x), Elsewhere(x) if elsewhere else x)

    return tree_map(wrapped, found)


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, default: bool = True) -> Iterator[None]:
    """Enter a context in which tensors can be made on the pretended device; by default, they are
    made nowhere else."""
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(cli, "device_of", lambda _: NAME)
    torch.__future__.set_swap_module_params_on_conversion(True)  # .data can't replace what is held
    where = NAME if default else "cpu"
    run = threading.Thread.run

    def run_within(thread: threading.Thread) -> None:  # modes are of a thread
        with Mode(), Functions(where):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_within)
    torch.set_default_device(where)
    try:
        with Mode(), Functions(where):
            yield
    finally:
        torch.set_default_device(None)
        torch.__future__.set_swap_module_params_on_conversion(False)
