"""Helpers of the chapters' tests: texts, passes that fail, comparisons that name the first wrong
number, what an object keeps in memory, calls that must be refused, and global generators that must
stay untouched."""

import random
import re
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


def assert_close(
    actual: Tensor, expected: Tensor, what: str, axes: Sequence[str] = (), tolerance: float = 1e-4
) -> None:
    """Fail unless two tensors are equal to within `tolerance`, both relative and absolute. axes:
    the names of their dimensions, for the message."""
    __tracebackhide__ = True
    shapes = f"shape {tuple(actual.shape)}, must be {tuple(expected.shape)}"
    assert actual.shape == expected.shape, f"{what}: {shapes}"
    is_wrong = ~torch.isclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if is_wrong.any():
        first = tuple(is_wrong.nonzero()[0].tolist())
        location = (
            ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=False))
            or f"index {[*first]}"
        )
        numbers = f"{actual[first].item():.6g}, must be {expected[first].item():.6g}"
        pytest.fail(
            f"{what}: the first wrong number is at {location}: {numbers} ({is_wrong.float().mean():.0%} are wrong)"
        )


def assert_same(actual: Sequence[object], expected: Sequence[object], what: str) -> None:
    """Fail unless two sequences are equal; name the first difference."""
    __tracebackhide__ = True
    for i, (found, wanted) in enumerate(zip(actual, expected, strict=False)):
        difference = f"{what}: the first difference is at index {i}"
        assert found == wanted, f"{difference}: {found!r}, must be {wanted!r}"
    assert len(actual) == len(expected), f"{what}: {len(actual)} entries, must be {len(expected)}"


def reachable(owner: object) -> Iterator[tuple[str, object]]:
    """Yield an object and everything reachable from it by attributes and by entries of containers, each once, with its
    path, such as ".layers[0]". The search doesn't enter models, modules or classes."""
    seen: dict[int, object] = {}  # keeps the objects, so that no other gets their id
    waiting = deque([("", owner)])
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        yield path, thing
        if isinstance(thing, Mapping):
            waiting += [(f"{path}[{key!r}]", entry) for key, entry in thing.items()]
        elif isinstance(thing, CONTAINERS):
            waiting += [(f"{path}[{i}]", entry) for i, entry in enumerate(thing)]
        elif not isinstance(thing, Tensor | nn.Module | ModuleType | type):
            attributes = getattr(thing, "__dict__", {})
            waiting += [(f"{path}.{name}", entry) for name, entry in attributes.items()]


def assert_keeps(owner: object, at_most: int, what: str, spare: int = 256) -> None:
    """Fail if all that can be reached from an object keeps more than at_most + spare bytes; name
    the largest parts. A tensor keeps all memory that it is a slice of; an entry of a container counts 8 bytes.

    Memory that grows from pass to pass shows as too much, and so does a slice that keeps the tensor it was cut from.
    """
    __tracebackhide__ = True
    kept, shown, storages = Counter(), Counter(), set()  # by attribute
    for path, thing in reachable(owner):
        name = re.match(r"\W*\w*", path)[0] or "itself"
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            kept[name] += 0 if storage._cdata in storages else storage.nbytes()
            shown[name] += thing.nbytes
            storages.add(storage._cdata)
        elif isinstance(thing, CONTAINERS):
            kept[name] += 8 * len(thing)
            shown[name] += 8 * len(thing)
    total, parts = kept.total(), []
    for name, size in kept.most_common(3):
        slices = f", for {shown[name]:,} of its own: a slice keeps all of its tensor"
        parts.append(f"{name} keeps {size:,}{slices if shown[name] < size else ''}")
    assert total <= at_most + spare, (
        f"{what}: {total:,} bytes are kept, {at_most:,} are enough: {'; '.join(parts)}"
    )


def assert_like(actual: object, like: Tensor, what: str) -> None:
    """Fail unless every tensor in what a function returned has the dtype and the device of `like` and is finite. Masks
    beside other tensors may be of bool."""
    __tracebackhide__ = True
    tensors = [(path, x) for path, x in reachable(actual) if isinstance(x, Tensor)]
    assert tensors, f"{what}: {type(actual).__name__}, must be a tensor"
    for path, x in tensors:
        if path and x.dtype == torch.bool:
            continue
        name = f"{what}{path}"
        assert x.dtype == like.dtype, f"{name} is of {x.dtype}, must be of {like.dtype}"
        assert x.device == like.device, f"{name} is on {x.device}, must be on {like.device}"
        if x.device.type != "meta" and not x.isfinite().all():
            first = (~x.isfinite()).nonzero()[0].tolist()
            pytest.fail(
                f"{name}: {x[tuple(first)].item()} at index {first}, must be a finite number"
            )


def random_ids(batch: int, n: int, seed: int = 0) -> Tensor:
    """Return random token ids (batch, n), below 100."""
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


def fail_in_layer(model: nn.Module, ids: Tensor, cache: object, layer: int) -> None:
    """Make a pass fail in a layer, after its attention. All of its keys and values are NaN, so that
    reading what it left gives NaN, with a mask or without one."""
    __tracebackhide__ = True

    def fail(*_: object) -> None:
        raise MemoryError

    hooks = [
        model.wte.register_forward_hook(lambda module, args, x: x * float("nan")),
        model.h[layer].mlp.register_forward_hook(fail),
    ]
    instead = "nothing fails"
    try:
        model(ids, cache)
    except MemoryError:
        return
    except NotImplementedError:  # a kind of RuntimeError: not written yet
        raise
    except RuntimeError as error:
        instead = f"if another one failed before it, is what that left used? {error}"
    finally:
        for hook in hooks:
            hook.remove()
    pytest.fail(f"a pass that is to fail in layer {layer} doesn't get there: {instead}")


def pass_after_failure(
    model: Callable[[Tensor, object], Tensor], ids: Tensor, cache: object, what: str
) -> Tensor:
    """Return the logits of a pass after one that failed, or fail and say that it has left something."""
    __tracebackhide__ = True
    try:
        return model(ids, cache)
    except NotImplementedError:  # a kind of RuntimeError: not written yet
        raise
    except RuntimeError as error:
        said = str(error)
    pytest.fail(f"{what}: does append() use what a failed pass has left? The next pass: {said}")


def assert_refused(call: Callable[[], object], what: str, *needed: object) -> None:
    """Fail unless a call raises ValueError and its message has all words and numbers in `needed`,
    none of them as a part of a longer one."""
    __tracebackhide__ = True
    must = "must be a ValueError" + f" that says {' and '.join(map(str, needed))}" * bool(needed)
    try:
        result = call()
    except ValueError as error:
        said = str(error)
    except NotImplementedError:  # not written yet
        raise
    except Exception as error:
        pytest.fail(f"{what}: {must}, not {error!r}")
    else:
        came = "" if result is None else f": {reprlib.repr(result)} came back"
        pytest.fail(f"{what}: {must}, and nothing was raised{came}")
    missing = [x for x in needed if not re.search(rf"(?<!\w){re.escape(str(x))}(?!\w)", said)]
    assert not missing, f"{what}: {must}, and says {said!r}"


def assert_ints(actual: Sequence[object], what: str) -> None:
    """Fail unless all entries are Python ints, not tensors or floats."""
    __tracebackhide__ = True
    kinds = {type(entry).__name__ for entry in actual} - {"int"}
    assert not kinds, f"{what} must be of int, and some are of {', '.join(sorted(kinds))}"


@contextmanager
def global_generators_untouched() -> Iterator[None]:
    """Fail if the code within draws from the global random generators, or seeds them."""
    __tracebackhide__ = True
    states = {
        "random": random.getstate,
        "numpy.random": lambda: repr(np.random.get_state(legacy=False)),
        "torch": lambda: torch.get_rng_state().tolist(),
    }
    before = {name: state() for name, state in states.items()}
    yield
    for name, state in states.items():
        assert state() == before[name], (
            f"{name}'s own generator is everybody's, and has changed: make one by the seed"
        )
