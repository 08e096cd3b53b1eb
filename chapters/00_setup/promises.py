"""What every task of chapters 0 to 4 promises: a function leaves its arguments as they are, what it returns has the
type that its docstring names, and memory that isn't needed is free."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from chapters.checking import assert_keeps


class Keeping:
    """A module under test. A call of one of its functions fails if it changes a tensor, list or dict that it is given."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        return keeping(function) if isinstance(function, FunctionType) else function


def keeping(function: Callable) -> Callable:
    """Return a function that calls another one, and fails if that changes its arguments, an error included."""

    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        given = [*args, *options.values()]
        before = copied(given)
        try:
            return function(*args, **options)
        finally:
            for number, (now, kept) in enumerate(zip(given, before, strict=True), start=1):
                if not is_same(now, kept):
                    name = function.__name__
                    raise AssertionError(f"{name}() changes its argument {number}: work on a copy")

    return call


def copied(given: Any) -> Any:
    """Return a copy of tensors, and of lists and dicts that hold such; all else is itself."""
    if isinstance(given, Tensor):
        return given.detach().clone()
    if isinstance(given, dict):
        return {key: copied(value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [copied(value) for value in given]
    return given


def is_same(now: Any, before: Any) -> bool:
    """Return whether an object is still what copied() made of it."""
    if isinstance(before, Tensor):
        same_kind = now.dtype == before.dtype and now.shape == before.shape
        return same_kind and torch.equal(now.nan_to_num(), before.nan_to_num())
    if isinstance(before, dict):
        return [*now] == [*before] and is_same([*now.values()], [*before.values()])
    if isinstance(before, list):
        return len(now) == len(before) and all(map(is_same, now, before))
    return now is before or now == before


def assert_type(found: object, expected: object, what: str) -> None:
    """Fail unless a result has the type of what is expected, and each entry of a list or tuple, too; a tensor also its
    dtype."""
    __tracebackhide__ = True
    found_type, expected_type = type(found), type(expected)
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        found_type, expected_type = found.dtype, expected.dtype
    assert found_type == expected_type, f"{what}: {found_type} came back, must be {expected_type}"
    if isinstance(expected, list | tuple):
        for i, (entry, must) in enumerate(zip(found, expected, strict=False)):
            assert_type(entry, must, f"{what}, entry {i}")


def tensor_bytes() -> int:
    """Return the bytes behind all tensors that are alive, in whatever holds them."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return sum({memory.data_ptr(): memory.nbytes() for memory in storages}.values())


def assert_keeps_only(
    owner: object, at_most: int, before: int, what: str, spare: int = 512
) -> None:
    """Fail if an object, or anything else that has come since tensor_bytes() was `before`, keeps more than
    at_most + spare bytes of tensors."""
    __tracebackhide__ = True
    assert_keeps(owner, at_most, what, spare)
    kept = tensor_bytes() - before
    assert kept <= at_most + spare, f"{what}: {kept:,} bytes are alive, {at_most:,} are enough"
