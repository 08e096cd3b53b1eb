"""Every method with models whose layers keep different things: the exact text, or one sentence."""

import pytest
import torch
from torch import nn

from gpt_kv_cache import generate
from pair import Pair
from speculate import DraftCounts, draft_by_student, draft_from_text, speculate
from tests.test_hybrid import hybrid

MIXES = [("full", "full"), ("full", "latent"), ("full", "window"), ("state", "full")]
every_mix = pytest.mark.parametrize("kinds", MIXES, ids="-".join)
IDS = torch.arange(20)[None] * 7 % 60


def changed(model: nn.Module) -> nn.Module:
    """The model, with slightly other weights: a student that is often right."""
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    return model


# --- Drafts ---------------------------------------------------------------------------------------


@every_mix
def test_verified_drafts_are_the_teachers_text_whatever_its_layers_keep(
    kinds: tuple[str, ...],
) -> None:
    teacher = hybrid(*kinds, n_ctx=40)
    text = [*generate(teacher, IDS, 40)]  # past the context
    twin, another = changed(hybrid(*kinds, n_ctx=40)), hybrid("window", "state", n_ctx=40)
    for student in (twin, another):
        pair, counts = Pair(teacher, student, IDS), DraftCounts()
        assert [*speculate(pair, 40, 4, draft_by_student, counts)] == text
        assert pair.same_geometry == (student is twin)
        assert 0 < counts.accepted < counts.drafted or student is another
    assert [*speculate(Pair(teacher, another, IDS), 40, 4, draft_from_text)] == text


def test_a_pass_over_a_rejected_draft_reads_no_more_than_another() -> None:
    teacher, lengths = hybrid("state", "full"), []
    teacher.register_forward_pre_hook(lambda _, args: lengths.append(args[0].size(1)))
    [*speculate(Pair(teacher, hybrid("window", "full"), IDS), 40, 4)]
    assert lengths[0] == 20 and max(lengths[1:]) == 5
