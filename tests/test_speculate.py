"""speculate.py: the text is the teacher's own, whatever drafts it, and sampled texts have its distribution."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_kv_cache
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from pair import Pair
from pocket.evaluation import token_losses
from speculate import (
    DraftCounts,
    accept_draft,
    draft_by_student,
    draft_from_text,
    main,
    probabilities,
    speculate,
)
from studies.results import Results
from studies.speculation import study
from tests.helpers import of_kind, run
from tests.test_overfill import CONFIG, NARROW, model_of, prompts


@pytest.fixture(scope="module")
def teacher(kind: str) -> nn.Module:
    return model_of(of_kind(kind, CONFIG), 0)


@pytest.fixture(scope="module")
def student(kind: str) -> nn.Module:
    return model_of(of_kind(kind, NARROW), 1)


# with a context of 40 tokens
@pytest.mark.parametrize(("n_prompt", "k"), [(1, 3), (9, 45), (70, 8)])
def test_a_verified_draft_is_the_teachers_own_text(teacher, student, n_prompt: int, k: int) -> None:
    ids = prompts(T=n_prompt)
    expected = torch.cat(list(generate(teacher, ids, 45)), 1)
    for drafter in (draft_by_student, draft_from_text):
        pair = Pair(teacher, student, ids)
        assert torch.equal(torch.cat(list(speculate(pair, 45, k, drafter)), 1), expected)
        assert torch.equal(pair.ids[:, n_prompt:], expected)
        assert all(map(torch.equal, pair.teacher_cache.layers, pair.student_cache.layers)), (
            "not the teacher's"
        )


@pytest.mark.parametrize("vocab_size", [43, 61])  # padded to another size than the teacher's 50
def test_a_student_of_another_geometry_drafts_from_its_own_cache(teacher, vocab_size: int) -> None:
    other = model_of(replace(teacher.config, n_layer=2, head_dim=8, vocab_size=vocab_size), 5)
    pair = Pair(teacher, other, prompts() % 43)
    text = list(generate(teacher, prompts() % 43, 50))
    assert list(speculate(pair, 50, 4)) == text and not pair.same_geometry
    assert max(text) >= 43, "no token that the smaller vocabulary lacks"


def test_a_teacher_that_drafts_for_itself_agrees_with_all_of_it(teacher) -> None:
    pair, counts = Pair(teacher, teacher, prompts()), DraftCounts()
    list(speculate(pair, 1 + 6 * 4, 5, counts=counts))  # the first token is the prefill's
    assert counts == DraftCounts(passes=4, drafted=20, accepted=20)
    assert all(map(torch.equal, pair.teacher_cache.layers, pair.student_cache.layers))


@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_a_stop_token_in_a_draft_ends_text_and_caches(teacher, at: int) -> None:
    plain = [int(token) for token in generate(teacher, prompts(T=9), 8)]
    pair, length = Pair(teacher, teacher, prompts(T=9)), plain.index(plain[at]) + 1
    counts, stop_ids = DraftCounts(), {plain[at], 49}
    written = [int(token) for token in speculate(pair, 8, 5, counts=counts, stop_ids=stop_ids)]
    assert written == plain[:length]
    assert counts.accepted == min(length - 1, 5), (
        "the first token is the prefill's, the last the teacher's"
    )
    assert pair.ids.size(1) == 9 + length > max(len(pair.teacher_cache), len(pair.student_cache)), (
        "not yet written"
    )
    assert length == 8 or [int(token) for token in speculate(pair, 8 - length, 5)] == plain[length:]


class Parrot(GPT):
    """Counts from 0 to 6, again and again."""

    def forward(self, ids: Tensor, cache: KVCache | None = None, **options: object) -> Tensor:
        T = super().forward(ids, cache, **options).size(1)
        return F.one_hot((ids[:, -T:] + 1) % 7, 50) * 9.0


def test_a_text_that_repeats_itself_is_copied(student) -> None:
    pair, counts = Pair(Parrot(CONFIG).eval(), student, torch.arange(9)[None] % 7), DraftCounts()
    written = [int(token) for token in speculate(pair, 25, 5, draft_from_text, counts)]
    assert written == [i % 7 for i in range(2, 27)]
    assert counts == DraftCounts(passes=4, drafted=20, accepted=20)


def test_a_draft_is_accepted_so_that_the_teachers_distribution_comes_out() -> None:
    """Leviathan et al. 2023, theorem: whatever the drafts' distribution q, the tokens are draws from p."""
    generator, draws = torch.Generator().manual_seed(0), 4000
    p = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.1, 0.1, 0.2, 0.6], [0.25] * 4]).double()
    q = torch.tensor([[0.2, 0.3, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).double()
    counts, lengths = torch.zeros(3, 4), torch.zeros(3)
    for draft in torch.multinomial(q, draws, replacement=True, generator=generator).T:
        accepted, token = accept_draft(p, q, draft, generator)
        lengths[accepted] += 1
        for i, written in enumerate([*draft[:accepted].tolist(), int(token)]):
            counts[i, written] += 1
    assert torch.allclose(counts / counts.sum(1, keepdim=True), p.float(), atol=0.025)
    # The share of the first drafted token that stays, and of the second.
    first_share, second_share = torch.minimum(p[:2], q).sum(1).tolist()
    assert lengths.div(draws).tolist() == pytest.approx(
        [1 - first_share, first_share * (1 - second_share), first_share * second_share], abs=0.025
    )


def test_a_token_without_a_chance_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "speculate.uniform_numbers", lambda n, _: torch.zeros(n, dtype=torch.double)
    )
    p, q = torch.eye(3, dtype=torch.double)[[1, 2]], torch.eye(3, dtype=torch.double)[[0]]
    n, token = accept_draft(p, q, torch.tensor([0]), None)
    assert (n, int(token)) == (0, 1)


def test_probabilities_are_the_softmax_of_the_best_k() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    for temperature, top_k, kept in (
        (0.7, None, logits),
        (0.7, 2, logits.masked_fill(logits < 1, -math.inf)),
        (0.0, None, logits.masked_fill(logits < 2, -math.inf)),
    ):
        expected = torch.softmax(kept.double() / (temperature or 1), dim=-1)
        assert torch.allclose(probabilities(logits, temperature, top_k).double(), expected)


def test_sampled_texts_have_the_teachers_distribution() -> None:
    tiny = GPTConfig(vocab_size=4, n_ctx=8, n_layer=1, n_head=1, n_embd=8)
    student = model_of(replace(tiny, vocab_size=3), 7)
    teacher, ids = model_of(tiny, 6), torch.tensor([[1, 2, 1]])
    expected = torch.zeros(4, 4, 4)
    for a, b, c in product(range(4), repeat=3):
        nats = token_losses(teacher, [*ids[0].tolist(), a, b, c])[-3:].sum()
        expected[a, b, c] = (-nats).exp()
    generator, counts, draws = torch.Generator().manual_seed(0), torch.zeros(4, 4, 4), 300
    for _ in range(draws):
        options = {"temperature": 1.0, "generator": generator}
        pair = Pair(teacher, student, ids)
        counts[tuple(map(int, speculate(pair, 3, 2, draft_by_student, **options)))] += 1
    chi_square = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)


def test_speculation_checks_its_options(teacher, student) -> None:
    shorter = model_of(replace(teacher.config, n_ctx=20), 3)
    for drafting, B, k, options, words in [
        (student, 1, 0, {}, "at least 1 token and 1 text, got 0 and 1"),
        (student, 2, 4, {}, "at least 1 token and 1 text, got 4 and 2"),
        (student, 1, 4, {"temperature": -1.0}, "temperature"),
        (shorter, 1, 4, {}, "context of 20 is shorter than the teacher's, 40"),
    ]:
        with pytest.raises(ValueError, match=words):
            next(speculate(Pair(teacher, drafting, prompts(B)), 5, k, **options))


def test_a_text_is_the_one_that_the_teacher_writes() -> None:
    words = ["--prompt", "Notes:", "--max-new-tokens", 12]
    alone = run(gpt_kv_cache.main, *words).out.split("\n\n[")[0]
    for by in ("student", "text"):
        text, figures = run(main, "write", *words, "--by", by).out.split("\n\n[", 1)
        assert text == alone and "passes of the teacher for 11 tokens" in figures


@pytest.mark.slow
def test_the_study_has_a_row_for_each_way_and_exact_texts_are_the_teachers(
    teacher, student, tmp_path: Path
) -> None:
    writer = study.Writer(teacher, student, prompts(2).split(1), 13)
    setting, counts = {"mode": "greedy"}, []
    for _ in range(2):  # what is measured isn't measured again
        rows = Results("speculation", tmp_path)
        study.compare_ways(rows, writer, setting, study.POCKET_WAYS)
        counts.append(rows.path.read_text().count("\n"))
    assert counts[0] == counts[1]
    plain = rows.find("teacher", "perplexity", **setting)["values"]
    for way in study.POCKET_WAYS:
        exact = not way.startswith("speculative")
        same = rows.find(way, "perplexity", **setting)["values"] == plain
        assert same == exact, way
    ways = ("teacher", "speculative:4", "exact:16")
    passes = [rows.figure(way, "passes", **setting).value for way in ways]
    assert passes[:2] == pytest.approx([1000 * 12 / 13, 1000 * 3 / 13]) and passes[2] <= passes[0]
