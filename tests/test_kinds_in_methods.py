"""Every method with models whose layers keep different things: the exact text, or one sentence."""

import pytest
import torch
from torch import nn

from gpt_kv_cache import generate
from overfill import RefreshedPair
from paged import PagedCache, serve
from pair import Pair
from projector import prefill
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


# --- Blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("full", "window"), ("latent", "latent")], ids="-".join)
def test_texts_in_blocks_are_those_of_each_alone(kinds: tuple[str, ...]) -> None:
    model, written = hybrid(*kinds, n_ctx=40), [[], [], []]
    prompts = [IDS[0, :length].tolist() for length in (20, 13, 20)]
    for i, token in serve(model, prompts, 24, n_blocks=14, block_size=4, chunk_size=11):
        written[i].append(token)
    for ids, text in zip(prompts, written, strict=True):
        assert text == [int(token) for token in generate(model, torch.tensor([ids]), 24)]


# --- Refused --------------------------------------------------------------------------------------

ALL, ONE = "one cache for all layers, not one for each", "KV blocks of one shape hold {} layers"
REFUSED = {
    "blocks, latent": (("full", "latent"), ONE.format("full and window"), 1, PagedCache),
    "blocks, state": (("latent", "state"), ONE.format("latent"), 1, PagedCache),
    "a refresh": (("full", "window"), f"a refresh needs {ALL}", 1, RefreshedPair),
    "a refresh, full": (("full", "full"), f"a refresh needs {ALL}", 0, RefreshedPair),
    "summary tokens": (("state", "full"), f"summary tokens need {ALL}", 0, prefill),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_layer_that_a_method_cannot_take_is_named_before_anything_is_done(case: str) -> None:
    kinds, limits, layer, method = REFUSED[case]
    model = hybrid(*kinds)
    options = {
        PagedCache: (10**12,),  # no memory is asked for
        RefreshedPair: (model, IDS),
        prefill: (IDS[0].tolist(),),
    }
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model reads"))
    says = f"^{limits}; layer {layer} of this model is a {kinds[layer]} layer$"
    with pytest.raises(ValueError, match=says):
        method(model, *options[method])
