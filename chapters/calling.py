"""What every task promises: a call leaves its arguments as they are, and returns the types that its signature names."""

import builtins
import inspect
import random
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map


class Keeping:
    """A module under test. A call of its functions, or of its classes' methods, fails if it changes an argument: a
    tensor, an array, a list, a dictionary, or what is in these, and a model's weights, modes and hooks."""

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
                if cls.__module__ == found.__module__ and isinstance(method, FunctionType)
            }
            found = type(found)(name, (found,), methods)
        setattr(self, name, found)
        return found


def keeping(function: Callable) -> Callable:
    """Return a function that calls another one, and fails if that changes its arguments, an error included. Calls from
    the file that defines it are its own affair."""
    own = inspect.unwrap(function).__globals__

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if sys._getframe(1).f_globals is own:
            return function(*args, **options)
        given = [*args, *options.values()]
        before, set_before = [*map(copied, given)], settings()
        try:
            return function(*args, **options)
        finally:
            for now, was in zip(given, before, strict=True):
                if is_same(now, was):
                    continue
                change = f"from {reprlib.repr(was)} to {reprlib.repr(now)}"
                if isinstance(now, nn.Module):
                    change = "a model: its weights, its modes or its hooks"
                raise AssertionError(
                    f"{function.__qualname__}() has changed one of its arguments, {change}"
                )
            left = settings()
            torch.set_grad_enabled(set_before[0])
            torch.set_default_dtype(set_before[1])
            assert left == set_before, (
                f"{function.__qualname__}() leaves {left}, gradients and default dtype, not {set_before}"
            )

    return call


def settings() -> tuple[bool, torch.dtype]:
    """Return whether PyTorch computes gradients, and its default dtype."""
    return torch.is_grad_enabled(), torch.get_default_dtype()


def copied(given: Any) -> Any:
    """Return a copy of lists, dictionaries and the like, with what_is_seen() of all that is in them."""
    return tree_map(what_is_seen, given)


def what_is_seen(leaf: Any) -> Any:
    """Return a copy of a tensor or an array, and of a model where its weights are, how often they were
    written, whether they are trained, and of every module whether it is in training, and its hooks. All else is itself."""
    if isinstance(leaf, nn.Module):
        weights = [(p.data_ptr(), p._version, p.requires_grad) for p in leaf.parameters()]
        hooks = [(m.training, *m._forward_hooks, *m._forward_pre_hooks) for m in leaf.modules()]
        return weights, hooks
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def is_same(now: Any, before: Any) -> bool:
    """Return whether an object is still what copied() made of it."""
    (leaves, structure), (old_leaves, old_structure) = map(tree_flatten, (copied(now), before))
    return structure == old_structure and all(map(is_same_leaf, leaves, old_leaves))


def is_same_leaf(now: Any, before: Any) -> bool:
    """Return whether what_is_seen() has found the same."""
    if type(now) is not type(before):
        return False
    if isinstance(now, Tensor):
        return now.dtype == before.dtype and torch.equal(now.nan_to_num(), before.nan_to_num())
    if isinstance(now, np.ndarray):
        return now.dtype == before.dtype and np.array_equal(now, before)
    return now is before or now == before


def call(function: Callable[..., Any], *arguments: object, returns: str, **options: object) -> Any:
    """Return what a function returns. Fail if its types aren't `returns`, such as "tuple[int, list[float]]" or
    "float32 (2, 3)", a tensor's dtype and shape."""
    __tracebackhide__ = True
    result = function(*arguments, **options)
    types = types_of(result)
    pattern = re.escape(types).replace(r"list\[\]", r"list\[.*\]")  # an empty one
    name = getattr(function, "__qualname__", type(function).__name__)
    assert re.fullmatch(pattern, returns), f"{name}() returns {types}, must be {returns}"
    return result


def types_of(x: object) -> str:
    """Return the types of a result, such as "tuple[int, list[float]]". A named tuple is a tuple. A class that has the
    name of a built-in one is no such: its objects could be equal to anything."""
    if type(x) in (Tensor, nn.Parameter):
        return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.")
    if isinstance(x, tuple):
        return f"tuple[{', '.join(map(types_of, x))}]"
    if type(x) is list:
        return f"list[{' | '.join(sorted({*map(types_of, x)}))}]"
    if isinstance(x, dict):
        return "dict"
    name = type(x).__name__
    if type(x) is getattr(builtins, name, type(x)):
        return name
    return f"a class of its own, {name}"


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
