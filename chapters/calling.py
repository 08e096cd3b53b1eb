"""What every task promises: a call leaves its arguments as they are, and returns the types that its signature names."""

import random
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Keeping:
    """A module under test. A call of its functions, or of its classes' methods, fails if it changes an argument: a
    tensor, an array, a list, a dictionary, or what is in these."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if isinstance(found, FunctionType):
            found = keeping(found)
        elif isinstance(found, type) and not issubclass(found, tuple):
            methods = {
                key: keeping(method)
                for cls in reversed(found.__mro__)
                for key, method in vars(cls).items()
                if cls.__module__ == found.__module__
                and isinstance(method, FunctionType)
                and not re.match("_[^_]", key)  # the student's own
            }
            found = type(found)(name, (found,), methods)
        setattr(self, name, found)
        return found


def keeping(function: Callable) -> Callable:
    """Return a function that calls another one, and fails if that changes its arguments, an error included."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        given = [*args, *options.values()]
        before = copied(given)
        try:
            return function(*args, **options)
        finally:
            for now, was in zip(given, before, strict=True):
                if not is_same(now, was):
                    change = f"from {reprlib.repr(was)} to {reprlib.repr(now)}"
                    name = getattr(function, "__qualname__", "a call")
                    raise AssertionError(f"{name}() has changed one of its arguments, {change}")

    return call


def copied(given: Any) -> Any:
    """Return a copy of tensors and arrays, and of lists and dictionaries that hold such; all else is itself."""
    if isinstance(given, Tensor):
        return given.detach().clone()
    if isinstance(given, np.ndarray):
        return given.copy()
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
    if isinstance(before, np.ndarray):
        return np.array_equal(now, before)
    if isinstance(before, dict):
        return is_same([*now.items()], [*map(list, before.items())])
    if isinstance(before, list):
        return len(now) == len(before) and all(map(is_same, now, before))
    return now is before or now == before


def call(function: Callable[..., Any], *arguments: object, returns: str, **options: object) -> Any:
    """Return what a function returns. Fail if its types aren't `returns`, such as "tuple[int, list[float]]" or
    "float32 (2, 3)", a tensor's dtype and shape."""
    __tracebackhide__ = True
    result = function(*arguments, **options)
    types = types_of(result)
    pattern = re.escape(types).replace(r"list\[\]", r"list\[.*\]")  # an empty one
    name = getattr(function, "__qualname__", "the call")
    assert re.fullmatch(pattern, returns), f"{name}() returns {types}, must be {returns}"
    return result


def types_of(x: object) -> str:
    """Return the types of a result, such as "tuple[int, list[float]]". A named tuple is a tuple."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.")
    if isinstance(x, tuple):
        return f"tuple[{', '.join(map(types_of, x))}]"
    if type(x) is list:
        return f"list[{' | '.join(sorted({*map(types_of, x)}))}]"
    return "dict" if isinstance(x, dict) else type(x).__name__


@contextmanager
def shared_generators_unchanged() -> Iterator[None]:
    """Fail if something draws from the generators that all parts of a program share."""

    def states() -> list[object]:
        _, numbers, *rest = np.random.get_state()
        return [random.getstate(), numbers.tolist(), rest, torch.get_rng_state().tolist()]

    before = states()
    yield
    assert states() == before, (
        "the generator of random numbers that others use was seeded or drawn from: make your own"
    )
