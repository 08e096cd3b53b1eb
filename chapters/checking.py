"""Helpers of the chapters' tests: texts, passes that fail, comparisons that name the first wrong number, memory, and
calls that must be refused."""

import re
import reprlib
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn


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
    for i, (actual_entry, expected_entry) in enumerate(zip(actual, expected, strict=False)):
        if actual_entry != expected_entry:
            pytest.fail(
                f"{what}: the first difference is at index {i}: {actual_entry!r}, must be {expected_entry!r}"
            )
    assert len(actual) == len(expected), f"{what}: {len(actual)} entries, must be {len(expected)}"


def assert_keeps(owner: object, at_most: int, what: str, spare: int = 256) -> None:
    """Fail if the tensors in an object's attributes, also in lists and dicts, keep more than at_most + spare bytes of
    memory; name the largest parts. A slice keeps all of the tensor that it was cut from."""
    __tracebackhide__ = True
    seen: dict[int, Tensor] = {}  # by their memory
    kept: dict[str, int] = {}
    shown: dict[str, int] = {}
    for name, attribute in vars(owner).items():
        kept[name] = shown[name] = 0
        waiting = [attribute]
        for entry in waiting:
            if isinstance(entry, Tensor):
                memory = entry.untyped_storage()
                shown[name] += entry.nbytes
                if memory.data_ptr() not in seen:
                    seen[memory.data_ptr()] = entry
                    kept[name] += memory.nbytes()
            elif isinstance(entry, list | tuple):
                waiting += entry
            elif isinstance(entry, dict):
                waiting += entry.values()
    if sum(kept.values()) <= at_most + spare:
        return
    lines = []
    for name in sorted(kept, key=kept.get, reverse=True)[:3]:
        line = f"{name} keeps {kept[name]:,}"
        if shown[name] < kept[name]:
            line += f", for {shown[name]:,} of its own: a slice keeps all of its tensor"
        lines.append(line)
    total = sum(kept.values())
    pytest.fail(f"{what}: {total:,} bytes are kept, {at_most:,} are enough: {'; '.join(lines)}")


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
        instead = ""
    except NotImplementedError:  # a kind of RuntimeError: not written yet
        raise
    except RuntimeError as error:
        instead = f"if another one failed before it, is what that left used? {error}"
    finally:
        for hook in hooks:
            hook.remove()
    assert not instead, f"a pass that is to fail in layer {layer} doesn't get there: {instead}"


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
        came = "" if result is None else f": {reprlib.repr(result)} came back"
        said, instead = "", f", and nothing was raised{came}"
    except ValueError as error:
        said, instead = str(error), ""
    except NotImplementedError:  # not written yet
        raise
    except Exception as error:
        said, instead = "", f", not {error!r}"
    assert not instead, f"{what}: {must}{instead}"
    missing = [x for x in needed if not re.search(rf"(?<!\w){re.escape(str(x))}(?!\w)", said)]
    assert not missing, f"{what}: {must}, and says {said!r}"
