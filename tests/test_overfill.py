"""overfill.py: identities that hold whatever the models are, policies against what they say, and the real formats."""

import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import overfill
from gpt_kv_cache import GPTConfig, KVCache, generate
from llama_kv_cache import LlamaConfig
from overfill import (
    POLICIES,
    Entropy,
    Gate,
    MonteCarloDropout,
    Periodic,
    Policy,
    ProbeKL,
    RefreshedPair,
    active_dropout,
    dropout_logits,
    generate_refreshed,
    logit_variance,
    parse_policy,
)
from pair import geometry_difference
from support.statistics import entropy, kl
from tests import helpers
from tests.helpers import ROOT, class_of, of_kind

CONFIG = GPTConfig(vocab_size=50, n_ctx=40, n_layer=3, n_head=2, n_embd=32)
NARROW = GPTConfig(vocab_size=50, n_ctx=40, n_layer=3, n_head=2, n_embd=16, head_dim=16, n_inner=24)
# One policy of each kind: every 6 tokens, a window of 4, gates that always fire.
POLICY_OF_KIND = {}
for name, kind in POLICIES.items():
    counts = cycle((6, 4))
    conversions = kind.parameters.values()
    POLICY_OF_KIND[name] = kind.create(
        *(-1.0 if convert is float else next(counts) for convert in conversions)
    )


def model_of(config: GPTConfig | LlamaConfig, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = class_of(config)(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # far from uniform
    return model.eval()


TEACHER, STUDENT = model_of(CONFIG, 0), model_of(NARROW, 1)


@pytest.fixture(scope="module")
def teacher(kind: str) -> nn.Module:
    return model_of(of_kind(kind, CONFIG), 0)


@pytest.fixture(scope="module")
def student(kind: str) -> nn.Module:
    return model_of(of_kind(kind, NARROW), 1)


def prompts(B: int = 1, T: int = 9) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(2))


def run(
    teacher: nn.Module, student: nn.Module, ids: Tensor, n: int, policy: Policy, **options: object
) -> tuple[Tensor, RefreshedPair]:
    pair = RefreshedPair(teacher, student, ids)
    return torch.cat(list(generate_refreshed(pair, n, policy, **options)), 1), pair


# --- Identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_teacher_that_is_its_own_student_writes_plainly_under_every_policy(teacher, name) -> None:
    ids, policy = prompts(3), POLICY_OF_KIND[name]
    options = {"temperature": 1.0, "generator": torch.Generator().manual_seed(0)}
    plain = torch.cat(list(generate(teacher, ids, 44, **options)), 1)  # past the context of 40
    options["generator"].manual_seed(0)
    torch.manual_seed(0)  # of dropout, which must not disturb the draws
    assert torch.equal(run(teacher, teacher, ids, 44, policy, **options)[0], plain)


class HeldEntries(KVCache):
    """A cache whose entries every query sees up to its own position, in the place of its own."""

    def positions(self, T: int) -> Tensor:
        return self.pos

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return *self.layers[layer], None

    def commit(self, pos: Tensor) -> None: ...


def step_by_step(
    teacher: nn.Module, student: nn.Module, ids: Tensor, n: int, starts: list[int]
) -> Tensor:
    """The definition: the student predicts token t from a cache whose entries up to starts[t] are the teacher's, and
    all others its own."""
    for t in range(n):
        cache = KVCache()
        logits = teacher(ids, cache)
        if t and starts[t] < ids.size(1):
            cache.truncate(starts[t])
            logits = student(ids[:, starts[t] :], cache)
        elif t:
            logits = student(ids, HeldEntries(cache.layers, cache.pos))
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, -n:]


@torch.no_grad()
def test_what_the_student_sees_is_the_teachers_up_to_the_last_refresh(teacher, student) -> None:
    ids = prompts()
    for every in (1, 4, 100):
        starts = [ids.size(1) + t // every * every for t in range(13)]
        expected = step_by_step(teacher, student, ids, 13, starts)
        assert torch.equal(run(teacher, student, ids, 13, Periodic(every))[0], expected)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def refreshed(
    teacher: nn.Module, student: nn.Module, policy: Policy
) -> tuple[RefreshedPair, KVCache]:
    """Return a pair after a refresh at the 8th token, and its cache a token before."""
    pair, before = RefreshedPair(teacher, student, prompts(2)), KVCache()
    for _ in generate_refreshed(pair, 9, policy):
        if pair.written == 7:
            before = pair.student_cache.clone()
    return pair, before


@torch.no_grad()
def test_a_refresh_replaces_the_last_entries_and_no_others(teacher, student) -> None:
    pair, before = refreshed(teacher, student, Periodic(8, window=3))
    teacher_cache, first_replaced = KVCache(), 9 + 8 - 3
    teacher(pair.ids, teacher_cache)
    for student_kv, old_kv, teacher_kv in zip(
        pair.student_cache.layers, before.layers, teacher_cache.layers, strict=True
    ):
        assert torch.equal(student_kv[..., :first_replaced, :], old_kv[..., :first_replaced, :])
        close(student_kv[..., first_replaced:, :], teacher_kv[..., first_replaced:, :])
        between = student_kv[..., 9:first_replaced, :]
        assert not torch.allclose(between, teacher_kv[..., 9:first_replaced, :], atol=1e-2)
    assert pair.teacher_tokens.tolist() == [8, 8]  # what is new; the window doesn't count


@torch.no_grad()
def test_reading_on_top_reads_the_window_over_the_students_own_entries(teacher, student) -> None:
    pair, expected_cache = refreshed(teacher, student, parse_policy("windowed:8:3"))
    expected_cache.truncate(9 + 8 - 3)
    teacher(pair.ids[:, -3:], expected_cache)
    for student_kv, expected_kv in zip(
        pair.student_cache.layers, expected_cache.layers, strict=True
    ):
        close(student_kv, expected_kv)
    assert pair.teacher_tokens.tolist() == [3, 3] and [r.tokens_read for r in pair.refreshes] == [6]
    assert pair.teacher_passes.tolist() == [1, 1]


@pytest.mark.parametrize(
    "gate",
    [
        Entropy(4.5, cooldown=3),
        ProbeKL(2.0, every=4, cooldown=4),
    ],
    ids=repr,
)
def test_rows_of_a_batch_are_refreshed_each_on_its_own(gate: Gate) -> None:
    ids = prompts(6)
    together, pair = run(TEACHER, STUDENT, ids, 30, gate)
    assert len({*pair.refresh_count.tolist()[:3]}) > 1  # else nothing is shown
    for i in range(3):
        alone, pair_alone = run(TEACHER, STUDENT, ids[i : i + 1], 30, gate)
        assert torch.equal(alone[0], together[i])
        assert int(pair_alone.refresh_count) == int(pair.refresh_count[i])
        assert int(pair_alone.teacher_tokens) == int(pair.teacher_tokens[i])


def test_unequal_geometry_lets_the_student_read_everything_itself(teacher) -> None:
    other = model_of(replace(teacher.config, n_layer=2, head_dim=8), 3)
    difference = "n_layer 3 against 2, head_dim 16 against 8"
    assert geometry_difference(teacher, other) == difference
    ids = prompts(2)
    first, _ = run(teacher, other, ids, 1, Policy())
    rest = torch.cat(list(generate(other, torch.cat([ids, first], 1), 12)), 1)
    for policy in POLICY_OF_KIND.values():
        new, pair = run(teacher, other, ids, 13, policy)
        assert torch.equal(new, torch.cat([first, rest], 1)), policy
        if isinstance(policy, Periodic):
            assert pair.refresh_count.tolist() == [12 // policy.every] * 2
            assert pair.teacher_tokens.tolist() == [0, 0]


def test_pairs_and_options_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share a vocabulary, but have 50 and 60"):
        RefreshedPair(TEACHER, model_of(replace(CONFIG, vocab_size=60), 1), prompts())
    with pytest.raises(ValueError, match="at least 0, got -1"):
        next(generate_refreshed(RefreshedPair(TEACHER, STUDENT, prompts()), -1))


# --- Gates ----------------------------------------------------------------------------------------------------------


def test_signals_are_their_formulas() -> None:
    assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([3.0, 3.0])  # bits
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    shifted = q.log() + 3  # a constant in the logits is nothing
    assert float(kl(p.log(), shifted)) == pytest.approx(0.25 * math.log(2))
    z = torch.tensor([[[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]])  # 3 passes over 2 tokens
    assert logit_variance(z).tolist() == pytest.approx([(8 / 3 + 0) / 2])


def test_a_gate_that_always_fires_is_periodic_by_its_cooldown() -> None:
    new, pair = run(TEACHER, STUDENT, prompts(), 16, Entropy(-1.0, cooldown=7))
    assert torch.equal(new, run(TEACHER, STUDENT, prompts(), 16, Periodic(7))[0])
    assert [r.written for r in pair.refreshes] == [7, 14]
    _, always = run(TEACHER, STUDENT, prompts(), 5, parse_policy("entropy:-1:0"))
    assert [r.written for r in always.refreshes] == [1, 2, 3, 4]
    _, never = run(TEACHER, STUDENT, prompts(), 20, Entropy(math.inf))
    assert never.refreshes == [] and never.teacher_tokens.tolist() == [0]


@pytest.mark.parametrize(
    ("policy", "read", "refreshed"),
    [
        (ProbeKL(math.inf, every=8), 24, []),  # probes at 8, 16, 24
        (ProbeKL(-1.0, every=8, cooldown=8), 24, [0, 0, 0]),
        (ProbeKL(-1.0, every=4), 16, [0]),  # asks nothing while it waits
    ],
    ids=repr,
)
def test_a_probe_asks_the_teacher_at_most_so_often_and_a_refresh_then_costs_nothing_more(
    policy: ProbeKL, read: int, refreshed: list[int]
) -> None:
    _, pair = run(TEACHER, STUDENT, prompts(), 30, policy)
    assert pair.teacher_tokens.tolist() == [read]
    assert [r.tokens_read for r in pair.refreshes] == refreshed


@torch.no_grad()
def test_the_probe_is_the_divergence_of_the_same_step(teacher, student) -> None:
    pair = RefreshedPair(teacher, student, prompts(3))
    probe = ProbeKL(math.inf)
    for _ in generate_refreshed(pair, 8):
        if pair.written:
            expected = kl(teacher(pair.ids)[:, -1], pair.logits)
            torch.testing.assert_close(probe.signal(pair), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_dropout_passes_are_those_of_the_model_in_training(student) -> None:
    ids, cache = prompts(2), KVCache()
    plain = student(ids, cache)[:, -1]
    before, last_token = cache.clone(), ids[:, -1:]
    without_dropout = dropout_logits(student, last_token, cache, 3, 0.0)
    close(without_dropout, plain[:, None].expand(-1, 3, -1))
    torch.manual_seed(5)
    one_pass = dropout_logits(student, last_token, cache, 1, 0.2)
    shorter = cache.clone()
    shorter.truncate(8)
    torch.manual_seed(5)
    with active_dropout(student, 0.2):
        close(one_pass, student(last_token, shorter))
    eight_passes = dropout_logits(student, last_token, cache, 8, 0.2)
    assert eight_passes.shape == (2, 8, 50) and (logit_variance(eight_passes) > 1e-3).all()
    assert len(cache) == 9 and all(map(torch.equal, before.layers, cache.layers))
    assert not student.training and student.drop.p == 0 and student.h[0].attn.dropout == 0


def test_what_a_teacher_reads_when_the_context_is_full_counts() -> None:
    # 9 + 35 tokens of 40: one slide, at the 41st, after which 21 are read again
    for policy, read in ((Policy(), 21), (Periodic(3), 30 + 21 + 3)):
        _, pair = run(TEACHER, STUDENT, prompts(2), 36, policy)
        assert pair.cached_from == 20 and len(pair.student_cache) == 24
        assert pair.teacher_tokens.tolist() == [read, read]


def test_the_shorter_context_is_the_pairs() -> None:
    short = model_of(replace(NARROW, n_ctx=24), 1)
    assert geometry_difference(TEACHER, short) == "n_ctx 40 against 24"
    assert run(TEACHER, short, prompts(), 20, Periodic(4))[1].n_ctx == 24


BAD_POLICIES = {
    "periodic:8:2": "must have the form periodic:T",
    "periodic:0": "the policy 'periodic:0': must be a whole number of at least 1 and",
    "dropout:0:1": "must be a whole number of at least 2 and",
    "entropy:2:1:1": r"must have the form entropy:H\[:C\]",
    "entropy:high": "the policy 'entropy:high': could not convert",
    "entropy:nan": "threshold must be a number, got nan",
}


def test_a_policy_is_what_its_name_says_or_one_sentence() -> None:
    assert parse_policy("windowed:64:16") == Periodic(64, window=16, reads_window=True)
    assert parse_policy("windowed-listing:64:16") == Periodic(64, window=16)
    assert parse_policy("speculative:8") == Periodic(8)
    assert parse_policy("entropy:2") == Entropy(2.0) == Entropy(2.0, cooldown=16)
    assert parse_policy("probe:32:0.5") == ProbeKL(0.5, every=32)
    assert parse_policy("dropout:8:0.02") == MonteCarloDropout(0.02, passes=8)
    for text, words in BAD_POLICIES.items():
        with pytest.raises(ValueError, match=words):
            parse_policy(text)
    with pytest.raises(ValueError, match="reads the window needs one"):
        Periodic(8, reads_window=True)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Periodic(8, 0)


# --- The command line -----------------------------------------------------------------------------------------------


def test_models_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    for file in (ROOT / "pocket" / "student").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    lines = (ROOT / "pocket" / "teacher" / "tokenizer.tiktoken").read_bytes().split(b"\n")
    (a, one), (b, two) = lines[300].split(), lines[301].split()
    lines[300:302] = [b + b" " + one, a + b" " + two]
    (tmp_path / "tokenizer.tiktoken").write_bytes(b"\n".join(lines))
    ran = helpers.run(overfill.main, "write", "--student", tmp_path)
    helpers.refused(ran, "don't share a tokenizer")
