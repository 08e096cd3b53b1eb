"""What two sequences, of tokens or of characters, have in common."""

from collections.abc import Sequence


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many elements two sequences have in common at their beginning."""
    if first == second:
        return len(first)
    shorter = min(len(first), len(second))
    for i in range(shorter):
        if first[i] != second[i]:
            return i
    return shorter
