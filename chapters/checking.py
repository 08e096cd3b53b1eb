"""Helpers of the chapters' tests: texts, passes that fail, comparisons that name the first wrong number."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn


def assert_close(
    actual: Tensor, expected: Tensor, what: str, axes: Sequence[str] = (), tolerance: float = 1e-4
) -> None:
    """Fail unless two tensors are equal, but for `tolerance` of the expected number and as much again; axes: their
    names."""
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


def random_ids(batch: int, n: int, seed: int = 0) -> Tensor:
    """Return random token ids (batch, n), below 100."""
    return torch.randint(100, (batch, n), generator=torch.Generator().manual_seed(seed))


def fail_in_layer(model: nn.Module, ids: Tensor, cache: object, layer: int) -> None:
    """Let a pass fail in a layer, behind its attention."""

    def fail(*_: object) -> None:
        raise MemoryError

    hook = model.h[layer].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(MemoryError):
            model(ids, cache)
    finally:
        hook.remove()
