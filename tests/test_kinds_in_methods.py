"""Every method with models whose layers keep different things: the exact text, or one sentence."""

import pytest
import torch
from torch import nn

from compress import CACHES, cache_for, layers_taken, read_in_pieces
from gpt_bounded_cache import BCTConfig
from gpt_kv_cache import GPTConfig, generate
from overfill import RefreshedPair
from paged import PagedCache, serve
from pair import Pair
from projector import prefill
from speculate import DraftCounts, draft_by_student, draft_from_text, speculate
from tests.test_equivalence import model_of
from tests.test_hybrid import hybrid

MIXES = [("full", "full"), ("full", "latent"), ("full", "window"), ("state", "full")]
IDS = torch.arange(20)[None] * 7 % 60


def changed(model: nn.Module) -> nn.Module:
    """The model, with slightly other weights: a student that is often right."""
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    return model


# --- Drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", MIXES, ids="-".join)
def test_verified_drafts_are_the_teachers_text_whatever_its_layers_keep(
    kinds: tuple[str, ...],
) -> None:
    teacher = hybrid(*kinds, n_ctx=40)
    text = [*generate(teacher, IDS, 30)]  # past the context
    twin, another = changed(hybrid(*kinds, n_ctx=40)), hybrid("window", "state", n_ctx=40)
    for student in (twin, another):
        pair, counts = Pair(teacher, student, IDS), DraftCounts()
        assert [*speculate(pair, 30, 4, draft_by_student, counts)] == text
        assert pair.same_geometry == (student is twin)
        assert 0 < counts.accepted < counts.drafted or student is another
    assert [*speculate(Pair(teacher, another, IDS), 30, 4, draft_from_text)] == text


def test_drafts_leave_the_memory_of_a_bct() -> None:
    sizes = {"vocab_size": 60, "n_ctx": 50, "n_layer": 2, "n_head": 2, "n_embd": 16}
    teacher, plain = model_of(BCTConfig(**sizes)), model_of(GPTConfig(**sizes))
    text = [*generate(teacher, IDS, 30)]
    assert [*speculate(Pair(teacher, teacher, IDS), 30, 4, draft_from_text)] == text
    plain.context = teacher.context  # else it would forget earlier
    assert [*speculate(Pair(teacher, plain, IDS), 25, 4)] == text[:25]


def test_a_pass_over_a_rejected_draft_reads_no_more_than_another() -> None:
    teacher, lengths = hybrid("state", "full"), []
    teacher.register_forward_pre_hook(lambda _, args: lengths.append(args[0].size(1)))
    pair = Pair(teacher, hybrid("window", "full"), IDS)
    written = [*speculate(pair, 30, 4), *speculate(pair, 10, 1, draft_from_text)]
    assert lengths[0] == 20 and max(lengths[1:]) == 5 and len(written) == 40


# --- Blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("full", "window"), ("latent", "latent")], ids="-".join)
def test_texts_in_blocks_are_those_of_each_alone(kinds: tuple[str, ...]) -> None:
    model, written = hybrid(*kinds, n_ctx=40), [[], [], []]
    prompts = [IDS[0, :length].tolist() for length in (20, 13, 20)]
    for i, token in serve(model, prompts, 24, n_blocks=14, block_size=4, chunk_size=11):
        written[i].append(token)
    for ids, text in zip(prompts, written, strict=True):
        assert text == [int(token) for token in generate(model, torch.tensor([ids]), 24)]


# --- Smaller caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", CACHES)
def test_layers_that_keep_every_token_are_compressed_and_no_others(way: str) -> None:
    for kinds in (("full", "window"), ("state", "full"), ("full", "latent")):
        model, ids = hybrid(*kinds), IDS.repeat(1, 4)[:, :64]
        cache, own = cache_for(way, model, 64), model.new_cache()
        logits, exact = (read_in_pieces(model, each, ids, 8)[0] for each in (cache, own))
        assert not CACHES[way].exact or torch.allclose(logits, exact, atol=1e-4)
        taken = () if way == "full" else layers_taken(way, model)
        for layer, (given, whole) in enumerate(zip(cache.layers, own.layers, strict=True)):
            assert (given.nbytes != whole.nbytes) == (layer in taken)


# --- Refused --------------------------------------------------------------------------------------

ALL, ONE = "one cache for all layers, not one for each", "KV blocks of one shape hold {} layers"
SERVES = "the cache {} serves only {} layers"
REFUSED = {
    "blocks, latent": (("full", "latent"), ONE.format("full and window"), 1),
    "blocks, state": (("latent", "state"), ONE.format("latent"), 1),
    "a refresh": (("full", "window"), f"a refresh needs {ALL}", 1),
    "a refresh, full": (("full", "full"), f"a refresh needs {ALL}", 0),
    "summaries": (("state", "full"), f"summary tokens need {ALL}", 0),
    "bits:4": (("window", "state"), SERVES.format("bits:4", "full and latent"), 0),
    "norm:half": (("latent", "state"), SERVES.format("norm:half", "full"), 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_layer_that_a_method_cannot_take_is_named_before_anything_is_done(case: str) -> None:
    kinds, limits, layer = REFUSED[case]
    model = hybrid(*kinds)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model reads"))
    says = f"^{limits}; layer {layer} of this model is a {kinds[layer]} layer$"
    with pytest.raises(ValueError, match=says):
        if case in CACHES:
            cache_for(case, model, 64)
        elif case.startswith("blocks"):
            PagedCache(model, 10**12)  # more than can be had
        elif case == "summaries":
            prefill(model, IDS[0].tolist())
        else:
            RefreshedPair(model, model, IDS)
