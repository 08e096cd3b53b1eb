"""Speculate: something cheap drafts k tokens, and the model checks them in one pass."""

import torch
from torch import nn

from borrow.my_gpt import model
from pair import Pair
from speculate import DraftCounts, Drafter, draft_by_student, draft_from_text, speculate


def write(
    ids: list[int], n: int, draft: Drafter = draft_from_text, student: nn.Module = model
) -> tuple[list[int], DraftCounts]:
    """Return n tokens after ids, and how many drafted ones stayed. student: a model of the same tokenizer."""
    counts, device = DraftCounts(), model.wte.weight.device
    pair = Pair(model, student, torch.tensor([ids], device=device))
    return [int(token) for token in speculate(pair, n, 8, draft, counts)], counts


if __name__ == "__main__":
    # Drafts are copied from the text: no other model is needed.
    new, counts = write([1, 2, 3] * 5, 60)
    print(
        new, f"{counts.passes} passes, {counts.accepted} of {counts.drafted} drafted tokens stayed"
    )
    print(write([1, 2, 3] * 5, 60, draft_by_student)[1])  # better with a smaller model as student=
