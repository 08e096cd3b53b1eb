"""Comparisons for the chapters' tests, whose messages name the first number that is wrong, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor


def assert_close(found: Tensor, expected: Tensor, what: str, axes: Sequence[str] = (), size: float = 1e-4) -> None:
    """Fail unless two tensors are equal, but for `size` of the expected number and as much again; axes names theirs."""
    __tracebackhide__ = True
    shapes = f"shape {tuple(found.shape)}, must be {tuple(expected.shape)}"
    assert found.shape == expected.shape, f"{what}: {shapes}"
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=size, atol=size)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, first, strict=False)) or f"index {[*first]}"
        numbers = f"{found[first].item():.6g}, must be {expected[first].item():.6g}"
        pytest.fail(f"{what}: the first wrong number is at {where}: {numbers} ({wrong.float().mean():.0%} are wrong)")


def assert_same(found: Sequence[object], expected: Sequence[object], what: str) -> None:
    """Fail unless two sequences are equal; name the first difference."""
    __tracebackhide__ = True
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            pytest.fail(f"{what}: the first difference is at index {i}: {one!r}, must be {other!r}")
    assert len(found) == len(expected), f"{what}: {len(found)} entries, must be {len(expected)}"
