"""Helpers of the chapters' tests: texts, passes that fail, comparisons that name the first wrong number, memory, and
calls that must be refused."""

import gc
import inspect
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chapters.calling import call
from examine import CHECKS, Subject, Trial


def fail(message: str) -> NoReturn:
    """Fail a test. pytest.fail does the same, but a tested file could replace that."""
    __tracebackhide__ = True
    raise AssertionError(message)


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Return two numbers with six digits, or as many more as show that they differ."""
    for digits in range(6, 18):
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


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
        found, wanted = told_apart(actual[first].item(), expected[first].item())
        fail(
            f"{what}: the first wrong number is at {location}: {found}, must be {wanted} "
            f"({is_wrong.float().mean():.0%} are wrong)"
        )


def assert_same(actual: Sequence[object], expected: Sequence[object], what: str) -> None:
    """Fail unless two sequences are equal; name the first difference."""
    __tracebackhide__ = True
    for i, (found, wanted) in enumerate(zip(actual, expected, strict=False)):
        difference = f"{what}: the first difference is at index {i}"
        assert found == wanted, f"{difference}: {found!r}, must be {wanted!r}"
    assert len(actual) == len(expected), f"{what}: {len(actual)} entries, must be {len(expected)}"


def assert_returns(
    expected: object, returns: str, function: Callable[..., object], *given: object, hint: str = ""
) -> None:
    """Fail unless a call returns the types (see call()) and the numbers that it must; name its arguments and the first
    difference."""
    __tracebackhide__ = True
    found = call(function, *given, returns=returns)
    named = inspect.signature(function).bind(*given).arguments
    arguments = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in named.items())
    what = f"{function.__name__}({arguments}){hint}"
    if isinstance(expected, Tensor):
        assert_close(found, expected, what)
    elif isinstance(expected, list):
        assert_same(found, expected, what)
    else:
        assert found == expected, f"{what} is {found}, must be {expected}"


def assert_right(
    model: nn.Module, new_cache: Callable[[], object], question: str, **about: object
) -> None:
    """Fail unless a cache is right by the check of examine.py that has this name; say what that finds. about: what
    the cache promises (window, sinks, capacity, approximate)."""
    __tracebackhide__ = True
    check = {check.name: check for check in CHECKS}[question]
    subject = Subject(model, new_cache, **about)
    finding = check.find(subject)
    if finding.verdict == "right" or (about.get("approximate") and finding.verdict == "measured"):
        return
    promised = [f"{name} {value}" for name, value in about.items()]
    says = f"{', '.join([question, *promised])}: {finding.verdict}. {finding.says}"
    if finding.verdict in ("REFUSES", "BREAKS"):
        try:
            with torch.no_grad():
                check.function(Trial(subject))  # again, for the line in which it fails
        except NotImplementedError:  # not written yet
            raise
        except Exception as error:
            raise AssertionError(says) from error
    fail(says)


def assert_keeps(owner: object, at_most: int, what: str, spare: int = 256) -> None:
    """Fail if the tensors in an object's attributes, or in lists there, keep more than at_most + spare bytes of
    memory; name the largest parts. A slice keeps all of the tensor that it was cut from."""
    __tracebackhide__ = True
    kept, shown, memories = Counter(), Counter(), set()  # by attribute
    for name, attribute in vars(owner).items():
        waiting = [attribute]
        for entry in waiting:
            if isinstance(entry, list | tuple):
                waiting += entry
            elif isinstance(entry, Tensor):
                memory = entry.untyped_storage()
                shown[name] += entry.nbytes
                if memory.data_ptr() not in memories:
                    kept[name] += memory.nbytes()
                memories.add(memory.data_ptr())
    total, parts = kept.total(), []
    for name, size in kept.most_common(3):
        slices = f", for {shown[name]:,} of its own: a slice keeps all of its tensor"
        parts.append(f"{name} keeps {size:,}{slices if shown[name] < size else ''}")
    assert total <= at_most + spare, (
        f"{what}: {total:,} bytes are kept, {at_most:,} are enough: {'; '.join(parts)}"
    )


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


class Watch(TorchDispatchMode):
    """Counts operations, and the numbers of the largest tensor that they make."""

    operations, largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.itemsize)
        return result


def random_ids(batch: int, n: int, seed: int = 0) -> Tensor:
    """Return random token ids (batch, n), below 100."""
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


def fail_in_layer(model: nn.Module, ids: Tensor, cache: object, layer: int) -> None:
    """Make a pass fail in a layer, after its attention. All of its keys and values are NaN, so that
    reading what it left gives NaN, with a mask or without one."""
    __tracebackhide__ = True

    def run_out_of_memory(*_: object) -> None:
        raise MemoryError

    hooks = [
        model.wte.register_forward_hook(lambda module, args, x: x * float("nan")),
        model.h[layer].mlp.register_forward_hook(run_out_of_memory),
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
    fail(f"a pass that is to fail in layer {layer} doesn't get there: {instead}")


def assert_refused(
    call: Callable[[], object], what: str, *needed: object, error: type[Exception] = ValueError
) -> None:
    """Fail unless a call raises an error of this type and its message has all words and numbers in
    `needed`, none of them as a part of a longer one."""
    __tracebackhide__ = True
    must = f"must be a {error.__name__}" + f" that says {' and '.join(map(str, needed))}" * bool(
        needed
    )
    try:
        result = call()
    except error as refusal:
        said = str(refusal)
    except NotImplementedError:  # not written yet
        raise
    except Exception as other:
        fail(f"{what}: {must}, not {other!r}")
    else:
        came = "" if result is None else f": {reprlib.repr(result)} came back"
        fail(f"{what}: {must}, and nothing was raised{came}")
    missing = [x for x in needed if not re.search(rf"(?<!\w){re.escape(str(x))}(?!\w)", said)]
    assert not missing, f"{what}: {must}, and says {said!r}"
