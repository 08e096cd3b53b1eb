"""Helpers of the chapters' tests: texts, passes that fail, comparisons that name the first wrong number."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn


def assert_close(
    found: Tensor, expected: Tensor, what: str, axes: Sequence[str] = (), size: float = 1e-4
) -> None:
    """Fail unless two tensors are equal, but for `size` of the expected number and as much again; axes names theirs."""
    __tracebackhide__ = True
    shapes = f"shape {tuple(found.shape)}, must be {tuple(expected.shape)}"
    assert found.shape == expected.shape, f"{what}: {shapes}"
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=size, atol=size)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        where = (
            ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=False))
            or f"index {[*first]}"
        )
        numbers = f"{found[first].item():.6g}, must be {expected[first].item():.6g}"
        pytest.fail(
            f"{what}: the first wrong number is at {where}: {numbers} ({wrong.float().mean():.0%} are wrong)"
        )


def assert_same(found: Sequence[object], expected: Sequence[object], what: str) -> None:
    """Fail unless two sequences are equal; name the first difference."""
    __tracebackhide__ = True
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            pytest.fail(f"{what}: the first difference is at index {i}: {one!r}, must be {other!r}")
    assert len(found) == len(expected), f"{what}: {len(found)} entries, must be {len(expected)}"


def text(batch: int, n: int, seed: int = 0) -> Tensor:
    """Return random token ids (batch, n), below 100."""
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


def fails(model: nn.Module, ids: Tensor, cache: object, layer: int) -> None:
    """Let a pass fail in a layer, behind its attention."""

    def fail(*_: object) -> None:
        raise MemoryError

    hook = model.h[layer].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(MemoryError):
            model(ids, cache)
    finally:
        hook.remove()
