"""What two sequences, of tokens or of characters, have in common."""

from collections.abc import Sequence


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many elements two sequences have in common at their beginning."""
    for i, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return i
    return min(len(first), len(second))
