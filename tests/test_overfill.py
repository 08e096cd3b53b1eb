"""overfill.py: identities that hold whatever the models are, policies against what they say, and the real formats."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import overfill
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from overfill import (
    Entropy,
    Gate,
    MonteCarloDropout,
    Pair,
    Periodic,
    Policy,
    ProbeKL,
    divergence,
    dropout_logits,
    entropy,
    firings,
    generate_refreshed,
    logit_variance,
    misfit,
    parse_policy,
    speculative,
    splice_last,
    teacher_nats,
    threshold_for,
    with_dropout,
)
from pocket.pruning import Student
from studies import refreshing

ROOT = Path(__file__).resolve().parent.parent
CONFIG = GPTConfig(vocab_size=50, n_ctx=40, n_layer=3, n_head=2, n_embd=32)
NARROW = GPTConfig(vocab_size=50, n_ctx=40, n_layer=3, n_head=2, n_embd=16, head_dim=16, n_inner=24)
POLICIES = [
    Policy(),
    Periodic(1),
    Periodic(7),
    Periodic(16, window=5),
    Periodic(6, reads="all"),
    Periodic(6, window=4, reads="window"),
    Periodic(6, teacher_next=True),
    speculative(4),
    Entropy(0.5),
    Entropy(-1.0, cooldown=5, teacher_next=True),
    ProbeKL(-1.0, every=8),
    ProbeKL(-1.0, every=8, window=3, reads="window"),
    MonteCarloDropout(1e-9, 4, cooldown=3),
]


def model_of(config: GPTConfig, seed: int) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # far from uniform
    return model.eval()


@pytest.fixture(scope="module")
def teacher() -> GPT:
    return model_of(CONFIG, 0)


@pytest.fixture(scope="module")
def student() -> GPT:
    return model_of(NARROW, 1)


def prompts(B: int = 1, T: int = 9) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(2))


def run(teacher: GPT, student: GPT, ids: Tensor, n: int, policy: Policy, **options: object) -> tuple[Tensor, Pair]:
    pair = Pair(teacher, student, ids)
    return torch.cat(list(generate_refreshed(pair, n, policy, **options)), 1), pair


# --- Identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_teacher_that_is_its_own_student_writes_plainly_under_every_policy(teacher, policy, temperature) -> None:
    ids = prompts(3)
    plain = generate(teacher, ids, 60, temperature=temperature, generator=torch.Generator().manual_seed(0))
    plain = torch.cat(list(plain), 1)  # past the context of 40
    torch.manual_seed(0)  # of dropout, which must not disturb the draws
    ours, _ = run(teacher, teacher, ids, 60, policy, temperature=temperature,
                  generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert torch.equal(ours, plain)


def step_by_step(teacher: GPT, student: GPT, ids: Tensor, n: int, starts: list[int]) -> Tensor:
    """The definition: token t by one uncached pass of the student, in which all before its segment is the teacher's."""
    model = Student(student.config)
    model.load_state_dict(student.state_dict())
    model.eval()
    for t in range(n):
        cache = KVCache()
        logits = teacher(ids, cache)
        if t:
            start = torch.full((1, ids.size(1)), starts[t])
            logits = model(ids, cache, start=start)
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, -n:]


@pytest.mark.parametrize("every", [1, 4, 9, 100])
@torch.no_grad()
def test_what_the_student_sees_is_the_teachers_up_to_the_last_refresh(teacher, student, every: int) -> None:
    ids = prompts()
    # At token t the student has read t tokens; the teacher's entries end at the last multiple of `every` before t.
    starts = [ids.size(1) + max(0, (t - 1) // every * every) for t in range(25)]
    expected = step_by_step(teacher, student, ids, 25, starts)
    assert torch.equal(run(teacher, student, ids, 25, Periodic(every))[0], expected)


@torch.no_grad()
def test_refreshed_at_every_token_each_step_reads_the_teachers_entries_only(teacher, student) -> None:
    ids = prompts()
    pair = Pair(teacher, student, ids)
    for token in generate_refreshed(pair, 20, Periodic(1)):
        if pair.written:
            cache = KVCache()
            teacher(pair.ids[:, :-1], cache)
            logits = student(pair.ids[:, -1:], cache)[:, -1]
            torch.testing.assert_close(pair.logits, logits, rtol=1e-4, atol=1e-4)
            assert int(token) == int(logits.argmax())
    assert pair.counts.tolist() == [19]


def test_a_window_as_wide_as_the_period_is_the_speculative_refresh(teacher, student) -> None:
    for k in (1, 4, 8):
        (one, a), (two, b) = (run(teacher, student, prompts(2), 30, policy) for policy in
                              (Periodic(k, window=k), speculative(k)))  # fmt: skip
        three, c = run(teacher, student, prompts(2), 30, Periodic(k))
        assert torch.equal(one, two) and torch.equal(one, three)
        for x, y, z in zip(a.cache.layers, b.cache.layers, c.cache.layers, strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)
        assert {r.tokens for r in b.refreshes} == {2 * k}  # both rows


@torch.no_grad()
def test_reading_only_what_is_new_equals_reading_everything_again(teacher, student) -> None:
    (one, a), (two, b) = (run(teacher, student, prompts(2), 30, Periodic(6, reads=reads)) for reads in ("new", "all"))
    assert torch.equal(one, two)
    for x, y in zip(a.cache.layers, b.cache.layers, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert a.teacher_tokens.tolist() == [24, 24]
    assert b.teacher_tokens.tolist() == [sum(9 + t for t in (6, 12, 18, 24))] * 2


@torch.no_grad()
def test_after_a_refresh_the_cache_is_that_of_a_teacher_who_read_it_all(teacher, student) -> None:
    ids = prompts(2)
    pair = Pair(teacher, student, ids)
    seen = 0
    for _ in generate_refreshed(pair, 25, Periodic(5)):
        if pair.written and pair.written % 5 == 0:
            cache, seen = KVCache(), seen + 1
            teacher(pair.ids, cache)
            assert len(pair.cache) == len(cache) == pair.ids.size(1)
            for x, y in zip(pair.cache.layers, cache.layers, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert seen == 4


@torch.no_grad()
def test_a_window_leaves_what_is_before_it_as_the_student_wrote_it(teacher, student) -> None:
    ids = prompts()
    pair, before = Pair(teacher, student, ids), None
    for _ in generate_refreshed(pair, 9, Periodic(8, window=3)):
        if pair.written == 7:
            before = pair.cache.clone()
    read = KVCache()
    teacher(pair.ids, read)
    for mine, old, its in zip(pair.cache.layers, before.layers, read.layers, strict=True):
        assert torch.equal(mine[..., :14, :], old[..., :14, :])  # 9 of the prompt, 5 that were too far back
        torch.testing.assert_close(mine[..., 14:, :], its[..., 14:, :], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(mine[..., 9:14, :], its[..., 9:14, :], atol=1e-2)


@torch.no_grad()
def test_reading_on_top_reads_the_window_over_the_students_own_entries(teacher, student) -> None:
    ids = prompts()
    pair, mixed = Pair(teacher, student, ids), None
    for _ in generate_refreshed(pair, 9, Periodic(8, window=3, reads="window")):
        if pair.written == 7:
            mixed = pair.cache.clone()
    mixed.truncate(9 + 8 - 3)
    teacher(pair.ids[:, -3:], mixed)
    for mine, its in zip(pair.cache.layers, mixed.layers, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    assert pair.teacher_tokens.tolist() == [3] and [r.tokens for r in pair.refreshes] == [3]


def test_the_first_token_is_the_teachers_and_with_teacher_next_so_is_each_after_a_refresh(teacher, student) -> None:
    ids = prompts(4)
    new, _ = run(teacher, student, ids, 1, Policy())
    assert torch.equal(new, torch.cat(list(generate(teacher, ids, 1)), 1))
    new, _ = run(teacher, student, ids, 20, Periodic(1, teacher_next=True))
    assert torch.equal(new, torch.cat(list(generate(teacher, ids, 20)), 1))


@pytest.mark.parametrize("gate", [
    Entropy(4.5, cooldown=3), ProbeKL(2.0, every=4, cooldown=4), Entropy(4.5, window=2, cooldown=3),
    ProbeKL(2.0, every=4, cooldown=4, window=2, reads="window"), Entropy(4.5, cooldown=2, teacher_next=True)
], ids=repr)  # fmt: skip
def test_rows_of_a_batch_are_refreshed_each_on_its_own(teacher, student, gate: Gate) -> None:
    ids = prompts(6)
    together, pair = run(teacher, student, ids, 30, gate)
    assert len({*pair.counts.tolist()}) > 1  # else nothing is shown
    for i in range(len(ids)):
        alone, one = run(teacher, student, ids[i : i + 1], 30, gate)
        assert torch.equal(alone[0], together[i])
        assert int(one.counts) == int(pair.counts[i])
        assert int(one.teacher_tokens) == int(pair.teacher_tokens[i])


def test_unequal_geometry_lets_the_student_read_everything_itself(teacher) -> None:
    other = model_of(replace(CONFIG, n_layer=2, n_head=4, head_dim=8), 3)
    assert misfit(teacher, other) == "n_layer 3 against 2, n_head 2 against 4, head_dim 16 against 8"
    ids = prompts(2)
    first, _ = run(teacher, other, ids, 1, Policy())
    rest = torch.cat(list(generate(other, torch.cat([ids, first], 1), 24)), 1)
    for policy in POLICIES:
        if not policy.teacher_next:
            new, pair = run(teacher, other, ids, 25, policy)
            assert torch.equal(new, torch.cat([first, rest], 1)), policy
            if isinstance(policy, Periodic):
                assert pair.counts.tolist() == [24 // policy.every] * 2 and pair.teacher_tokens.tolist() == [0, 0]
    new, _ = run(teacher, other, ids, 20, Periodic(1, teacher_next=True))
    assert torch.equal(new, torch.cat(list(generate(teacher, ids, 20)), 1))


def test_vocabularies_must_be_the_same(teacher) -> None:
    with pytest.raises(ValueError, match=r"share a vocabulary, but have 50 and 60"):
        Pair(teacher, model_of(replace(CONFIG, vocab_size=60), 1), prompts())


def test_options_are_those_of_generate(teacher, student) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens must be at least 0, got -1"):
        list(generate_refreshed(Pair(teacher, student, prompts()), -1))
    with pytest.raises(ValueError, match="temperature"):
        list(generate_refreshed(Pair(teacher, student, prompts()), 3, temperature=-1.0))
    assert list(generate_refreshed(Pair(teacher, student, prompts()), 0)) == []
    tokens, _ = run(teacher, student, prompts(), 30, Periodic(4))
    stop = int(tokens[0, 6])
    until = tokens[0].tolist().index(stop) + 1
    stopped, _ = run(teacher, student, prompts(), 30, Periodic(4), stop_id=stop)
    assert stopped[0].tolist() == tokens[0, :until].tolist()


# --- Splicing -------------------------------------------------------------------------------------------------------


def cache_of(value: float, n: int, B: int = 2, start: int = 0) -> KVCache:
    layers = [torch.full((2, B, 2, n, 4), value) for _ in range(3)]
    return KVCache(layers, torch.arange(start, start + n))


def test_a_splice_replaces_as_many_tokens_as_each_row_has_to() -> None:
    cache = cache_of(0.0, 6)
    splice_last(cache, cache_of(1.0, 4, start=2), torch.tensor([3, 0]))
    for kv in cache.layers:
        assert kv[:, 0, :, :3].eq(0).all() and kv[:, 0, :, 3:].eq(1).all() and kv[:, 1].eq(0).all()


@pytest.mark.parametrize(("source", "n"), [
    (cache_of(1.0, 5), 2), (cache_of(1.0, 2, start=4), 3), (cache_of(1.0, 6), 7)
])  # fmt: skip
def test_a_splice_that_does_not_fit_changes_nothing(source: KVCache, n: int) -> None:
    cache = cache_of(0.0, 6)
    with pytest.raises(ValueError, match=rf"can't replace {n} of 6 tokens up to position 6"):
        splice_last(cache, source, torch.tensor([n, 1]))
    assert all(kv.eq(0).all() for kv in cache.layers)


# --- Gates ----------------------------------------------------------------------------------------------------------


def test_signals_are_their_formulas() -> None:
    assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([3.0, 3.0])  # bits
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(divergence(p.log(), q.log() + 3)) == pytest.approx(expected)  # a constant in the logits is nothing
    z = torch.tensor([[[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]])  # 3 passes over 2 tokens
    assert logit_variance(z).tolist() == pytest.approx([(8 / 3 + 0) / 2])


def test_a_gate_that_always_fires_is_periodic_by_its_cooldown(teacher, student) -> None:
    new, pair = run(teacher, student, prompts(), 30, Entropy(-1.0, cooldown=7))
    same, other = run(teacher, student, prompts(), 30, Periodic(7))
    assert torch.equal(new, same) and [r.written for r in pair.refreshes] == [7, 14, 21, 28]
    _, never = run(teacher, student, prompts(), 30, Entropy(math.inf))
    assert never.refreshes == [] and never.teacher_tokens.tolist() == [0] and other.counts.tolist() == [4]


def test_a_probe_asks_the_teacher_at_most_so_often_and_a_refresh_then_costs_nothing_more(teacher, student) -> None:
    _, pair = run(teacher, student, prompts(), 30, ProbeKL(math.inf, every=8))
    assert pair.teacher_tokens.tolist() == [24] and pair.refreshes == []  # probes at 8, 16, 24
    _, pair = run(teacher, student, prompts(), 30, ProbeKL(-1.0, every=8, cooldown=8))
    assert pair.teacher_tokens.tolist() == [24] and pair.counts.tolist() == [3]
    assert [r.tokens for r in pair.refreshes] == [0, 0, 0]
    _, pair = run(teacher, student, prompts(), 30, ProbeKL(-1.0, every=8, cooldown=8, window=2, reads="window"))
    assert pair.teacher_tokens.tolist() == [6]


@torch.no_grad()
def test_the_probe_is_the_divergence_of_the_same_step(teacher, student) -> None:
    pair = Pair(teacher, student, prompts(3))
    probe = ProbeKL(math.inf)
    for _ in generate_refreshed(pair, 8):
        if pair.written:
            expected = divergence(teacher(pair.ids)[:, -1], pair.logits)
            torch.testing.assert_close(probe.signal(pair), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_dropout_passes_are_those_of_the_model_in_training(student) -> None:
    ids, cache = prompts(2), KVCache()
    plain = student(ids, cache)[:, -1]
    before = [kv.clone() for kv in cache.layers]
    none = dropout_logits(student, ids[:, -1:], cache, 3, 0.0)
    torch.testing.assert_close(none, plain[:, None].expand(-1, 3, -1), rtol=1e-4, atol=1e-4)
    torch.manual_seed(5)
    one = dropout_logits(student, ids[:, -1:], cache, 1, 0.2)
    shorter = cache.clone()
    shorter.truncate(8)
    torch.manual_seed(5)
    with with_dropout(student, 0.2):
        trained = student(ids[:, -1:], shorter)
    torch.testing.assert_close(one, trained, rtol=1e-4, atol=1e-4)
    many = dropout_logits(student, ids[:, -1:], cache, 8, 0.2)
    assert many.shape == (2, 8, 50) and (logit_variance(many) > 1e-3).all()
    assert len(cache) == 9 and all(torch.equal(a, b) for a, b in zip(before, cache.layers, strict=True))
    assert not student.training and student.drop.p == 0 and student.h[0].attn.dropout == 0


@torch.no_grad()
def test_dropout_passes_do_not_see_one_another(student, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, cache = prompts(1), KVCache()
    plain = student(ids, cache)[:, -1]

    def spoil(x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:] * 0], 1)

    monkeypatch.setattr(student.drop, "forward", spoil)
    passes = dropout_logits(student, ids[:, -1:], cache, 3, 0.0)[0]
    torch.testing.assert_close(passes[0], plain[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(passes[1], plain[0], atol=1e-2)


def test_dropout_ends_also_when_something_fails(student) -> None:
    with pytest.raises(RuntimeError), with_dropout(student, 0.3):
        assert student.training and student.drop.p == 0.3 and student.h[1].attn.dropout == 0.3
        raise RuntimeError
    assert not student.training and student.drop.p == 0 and student.h[1].attn.dropout == 0


def test_a_threshold_meets_its_budget() -> None:
    signals = torch.rand(20, 1000, generator=torch.Generator().manual_seed(0))
    for budget in (2.5, 7.8, 40.0):
        count = 1000 * firings(signals, threshold_for(signals, budget, 16), 16) / signals.numel()
        assert 0.8 * budget <= count <= budget
    with pytest.raises(ValueError, match=r"at most 62.5"):
        threshold_for(signals, 63, 16)
    with pytest.raises(ValueError, match="0 refreshes"):
        threshold_for(signals, 0, 16)


def test_firings_are_those_of_a_gate() -> None:
    signals = torch.tensor([[9, 9, 0, 9, 9, 9, 9, 0, 0, 9.0], [0, 0, 0, 0, 0, 9, 0, 0, 0, 0]])
    assert firings(signals, 5.0, 1) == 7 + 1
    assert firings(signals, 5.0, 3) == 3 + 1  # 4, 7 and 10: not before a cooldown from the start
    assert firings(signals, 10.0, 1) == 0


@pytest.mark.parametrize(("text", "policy"), [
    ("none", Policy()), ("periodic:64", Periodic(64)), ("windowed:64:16", Periodic(64, window=16)),
    ("speculative:8", speculative(8)), ("entropy:4.5", Entropy(4.5)), ("probe:32:0.5", ProbeKL(0.5, every=32)),
    ("dropout:8:0.02", MonteCarloDropout(0.02, 8)),
])  # fmt: skip
def test_policies_by_name(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(("text", "message"), [
    ("often", "unknown policy 'often': choose none, periodic"), ("periodic", "'periodic' must have the form"),
    ("periodic:8:2", "must have the form periodic:T"), ("windowed:64:x", "W of the policy 'windowed:64:x'"),
    ("periodic:0", "every must be at least 1, got 0"), ("speculative:-3", "must be at least 1, got -3"),
    ("dropout:0:1", "passes must be at least 2, got 0"), ("entropy:high", "H of the policy 'entropy:high' must be"),
    ("entropy:nan", "threshold must be a number, got nan"),
])  # fmt: skip
def test_bad_policies_get_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_policy(text)
    assert message in str(caught.value)


def test_policies_check_how_the_teacher_reads() -> None:
    with pytest.raises(ValueError, match="one of new, all, window, got 'some'"):
        Periodic(8, reads="some")
    with pytest.raises(ValueError, match="needs a window"):
        Periodic(8, reads="window")


@torch.no_grad()
def test_nats_are_those_of_the_text_read_at_once(teacher) -> None:
    ids, new = prompts(3), prompts(3, 12)
    logits = teacher(torch.cat([ids, new], 1)).log_softmax(-1)
    expected = -logits[:, 8:-1].gather(2, new[..., None])[..., 0]
    torch.testing.assert_close(teacher_nats(teacher, ids, new), expected)


# --- The real formats -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def public_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders as transformers writes them: a GPT-2 and one with half its MLP."""
    transformers = pytest.importorskip("transformers")
    folders = []
    for name, inner in (("teacher", 256), ("student", 128)):
        torch.manual_seed(len(name))
        config = transformers.GPT2Config(vocab_size=50257, n_positions=64, n_embd=64, n_layer=3, n_head=4,
                                         n_inner=inner, initializer_range=0.2)  # fmt: skip
        folders.append(tmp_path_factory.mktemp("public") / name)
        transformers.GPT2LMHeadModel(config).save_pretrained(folders[-1])
    return folders[0], folders[1]


@torch.no_grad()
def published_loop(teacher, student, ids: Tensor, n: int, every: int, window: int | None) -> list[int]:
    """The source's loop over transformers, with a student that has read the newest token when the cache is spliced."""
    from transformers import DynamicCache

    read = teacher(input_ids=ids, use_cache=True, past_key_values=DynamicCache())
    teacher_kv, kv = read.past_key_values, DynamicCache()
    for i, layer in enumerate(teacher_kv.layers):
        kv.update(layer.keys.clone(), layer.values.clone(), i)
    out, last = [int(read.logits[0, -1].argmax())], 0
    while len(out) < n:
        step = student(input_ids=torch.tensor([out[-1:]]), past_key_values=kv, use_cache=True)
        logits, t = step.logits[0, -1], len(out)
        if t % every == 0:
            teacher(input_ids=torch.tensor([out[last:t]]), past_key_values=teacher_kv, use_cache=True)
            k = min(window or every, t - last)
            for mine, its in zip(kv.layers, teacher_kv.layers, strict=True):
                mine.keys[:, :, -k:], mine.values[:, :, -k:] = its.keys[:, :, -k:], its.values[:, :, -k:]
            last = t
        out.append(int(logits.argmax()))
    return out


@pytest.mark.parametrize(("every", "window"), [(100, None), (8, None), (8, 3), (1, None)])
def test_tokens_are_those_of_the_sources_loop_over_transformers(public_pair, every: int, window: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = [transformers.GPT2LMHeadModel.from_pretrained(folder).eval() for folder in public_pair]
    ours = [load_model(str(folder), model_class=GPT) for folder in public_pair]
    ids = torch.randint(50257, (1, 12), generator=torch.Generator().manual_seed(0))
    new, _ = run(*ours, ids, 40, Periodic(every, window=window))
    assert new[0].tolist() == published_loop(*theirs, ids, 40, every, window)


def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "overfill.py"), *words], capture_output=True, text=True,
                          timeout=600, cwd=cwd)  # fmt: skip


def has_bpe() -> bool:
    try:
        return load_tokenizer("gpt2").n_vocab == 50257
    except OSError:
        return False


def test_any_folders_serve_as_teacher_and_student(public_pair, tmp_path: Path) -> None:
    if not has_bpe():
        pytest.skip("tiktoken can't load GPT-2's tokenizer here")
    models = ["--teacher", str(public_pair[0]), "--student", str(public_pair[1])]
    result = command("write", *models, "--policy", "windowed:8:4", "--max-new-tokens", "20", "--prompt", "Time flies")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "refreshed after tokens: 8, 16; " in result.stdout and "read 16 tokens" in result.stdout
    with (tmp_path / "prompts.csv").open("w") as file:
        file.write("prompt\n" + "".join(f"Once there was a {word} of many words\n" for word in "abcdefgh"))
    result = command("--quick", *models, "--prompts", str(tmp_path / "prompts.csv"), "--max-new-tokens", "40",
                     "--out", str(tmp_path / "out"))  # fmt: skip
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert record["measured_prompts"] == 6 and "lengths" not in record
    assert "MC dropout, U(t)" in record["signals"]["student"]  # GPT-2's config says 0.1


# --- What is measured -----------------------------------------------------------------------------------------------


def test_repeated_trigrams() -> None:
    assert refreshing.repeated([1, 2, 3, 4]) == 0
    assert refreshing.repeated([1, 2, 1, 2, 1, 2]) == pytest.approx(0.5)  # 121 212 121 212
    assert refreshing.repeated([1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert refreshing.repeated([1]) == 0


def test_intervals_are_over_prompts_and_ratios_are_paired() -> None:
    values = np.array([1.0, 3.0, 5.0, 7.0])
    assert refreshing.by_prompt(values, np.array([4, 4, 9, 9])).tolist() == [2.0, 6.0]
    mean, low, high = refreshing.bootstrap(np.random.default_rng(0).normal(2.0, 1.0, 400))
    assert low < 2.0 < high and high - low == pytest.approx(4 * 1.96 / 20 / 2, rel=0.15) and low < mean < high
    one, other = ({"nats": {8: [x + by for x in (1.0, 2.0, 9.0)]}} for by in (0.1, 0.0))
    assert refreshing.ratio(one, other) == pytest.approx([math.exp(0.1)] * 3)  # however much the prompts differ


def test_a_preallocated_cache_is_a_cache(teacher, student) -> None:
    for policy in (Policy(), Periodic(4), Periodic(5, window=2, reads="window"), ProbeKL(2.0, every=4, cooldown=4)):
        plain, _ = run(teacher, student, prompts(3), 30, policy)
        pair = Pair(teacher, student, prompts(3), lambda: SlidingWindowCache(39))
        assert torch.equal(torch.cat(list(generate_refreshed(pair, 30, policy)), 1), plain)


def test_a_study_measures_what_generate_writes(teacher, student) -> None:
    lengths = (5, 9, 9)
    texts = {"test": [prompts(1, n)[0].tolist() for n in lengths]}
    size = refreshing.Size(prompts=3, seeds=2, new_tokens=10, timed=1, repeats=1, facts=1, simulations=1)
    study = refreshing.Study({"teacher": teacher, "student": student}, None, texts, size, {})
    greedy = study.write(refreshing.Way("", policy=Periodic(4)), 0.0)
    for row, i in zip(greedy.ids, greedy.prompt, strict=True):
        ids = torch.tensor([texts["test"][i]])
        new, pair = run(teacher, student, ids, 10, Periodic(4))
        assert row.tolist() == new[0].tolist() and pair.counts.tolist() == [2]
        torch.testing.assert_close(greedy.nats[list(greedy.prompt).index(i)], teacher_nats(teacher, ids, new)[0],
                                   rtol=1e-3, atol=1e-4)  # fmt: skip
    assert sorted(greedy.prompt) == [0, 1, 2] and greedy.refreshes.tolist() == [2, 2, 2]
    assert greedy.teacher_tokens.tolist() == [8, 8, 8]
    assert sorted(study.write(refreshing.Way("", "student"), 1.0).prompt) == [0, 0, 1, 1, 2, 2]


def test_a_study_of_unequal_geometry_is_measured_too(teacher) -> None:
    other = model_of(replace(CONFIG, n_layer=2, n_head=4, head_dim=8), 3)
    size = refreshing.Size(2, 2, 20, 1, 1, 1, 1)
    study = refreshing.Study({"teacher": teacher, "student": other}, None, {"test": prompts(2).tolist()}, size, {})
    for policy in (Policy(), Periodic(4), Periodic(8, window=3), ProbeKL(1.0, every=8)):
        written = study.write(refreshing.Way("", policy=policy), 0.0)
        for row, ids in zip(written.ids, prompts(2), strict=True):
            assert row.tolist() == run(teacher, other, ids[None], 20, policy)[0][0].tolist()


class Words:
    """A tokenizer of letters."""

    def decode(self, ids: list[int]) -> str:
        return "ab" * len(ids)


def test_figures_of_made_up_texts() -> None:
    size = refreshing.Size(2, 2, 80, 1, 1, 1, 1)
    study = refreshing.Study({"teacher": model_of(CONFIG, 0)}, Words(), {"test": [[1], [2]]}, size, {})
    nats = torch.full((4, 80), 1.0)
    nats[:, 40:] = 2.0
    nats[2:, 0] = 5.0  # one slip in 80 tokens of the second prompt: its teacher gives it less than 1%
    written = refreshing.Written(torch.arange(320).view(4, 80) % 7, nats, np.array([0, 0, 1, 1]),
                                 np.array([1, 3, 5, 7]), np.array([10, 10, 30, 30]))  # fmt: skip
    found = refreshing.figures_of(study, written)
    assert found["tail_logprob"][0] == pytest.approx(-(10 * 1 + 40 * 2) / 50)  # the last 50
    assert found["slips"][0] == pytest.approx(0.5 / 80) and found["characters"][0] == 160
    assert found["refreshes"][0] == 4 and found["teacher_tokens"][0] == 20
    assert found["repeat_3"][0] == pytest.approx(1 - 7 / 78)
    assert found["ppl"][0] == pytest.approx(math.exp((1.5 + 1.55) / 2), rel=1e-4)
    assert found["nats"] == {"32": [1.0, 1.125], "64": [1.375, 1.4375], "80": [1.5, 1.55]}


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(refreshing.time, "perf_counter", lambda: now[0])

    def tokens(way: refreshing.Way, ids: Tensor, n: int, **_: object) -> tuple:
        def generation() -> object:
            for i in range(n):
                now[0] += 3.0 if i == 0 else (0.5 if way.name == "OverFill" else 0.75)
                yield torch.tensor([[1]])

        return generation(), None

    size = refreshing.Size(1, 1, 11, timed=1, repeats=2, facts=1, simulations=1)
    study = refreshing.Study({"teacher": model_of(CONFIG, 0)}, None, {"test": [[1, 2]]}, size, {})
    monkeypatch.setattr(study, "tokens", tokens)
    found = refreshing.times(study, [refreshing.Way("OverFill"), refreshing.Way("slow")])
    assert found["OverFill"]["ttft_s"] == 3 and found["OverFill"]["total_s"] == 8
    assert found["OverFill"]["decode_tps"] == 2 and found["OverFill"]["end_to_end_tps"] == 11 / 8
    assert found["slow"]["overheads"] == [pytest.approx(10.5 / 8 - 1, abs=1e-4)] * 2
    assert found["slow"]["by_teacher"] is None


def test_gates_meet_their_budgets_where_nothing_refreshes(teacher) -> None:
    long = [model_of(replace(config, n_ctx=256), seed) for config, seed in ((CONFIG, 0), (NARROW, 1))]
    texts = {"valid": torch.randint(50, (12, 8), generator=torch.Generator().manual_seed(1)).tolist()}
    size = refreshing.Size(12, 1, 240, 1, 1, 1, 1)
    study = refreshing.Study(dict(zip(("teacher", "student"), long, strict=True)), None, texts, size, {})
    gates = refreshing.calibrated(study)
    for name, budget in (("entropy, 7.8 in 1,000", 7.8), ("entropy, 15.6 in 1,000", 15.6)):
        signals = study.record("student", {"": gates[name].signal}, "valid")[""]
        rate = 1000 * firings(signals, gates[name].threshold, 16) / signals.numel()
        assert 0.7 * budget <= rate <= budget
    probe = gates["probe-KL, 7.8 in 1,000"]
    signals = study.record("student", {"": probe.signal}, "valid")[""][:, 31::32]
    rate = 1000 * float((signals > probe.threshold).sum()) / (32 * signals.numel())
    assert 0.7 * 7.8 <= rate <= 7.8
    assert gates["entropy, 7.8, teacher's next"].teacher_next and "dropout student: entropy, 7.8" not in gates


def test_the_area_under_the_curve() -> None:
    large = np.array([False, False, True, True])
    assert refreshing.area(np.array([1.0, 2, 3, 4]), large) == 1
    assert refreshing.area(np.array([4.0, 3, 2, 1]), large) == 0
    assert refreshing.area(np.array([1.0, 3, 2, 4]), large) == 0.75


def test_mutual_information_is_what_passes_disagree_on() -> None:
    sure = torch.tensor([[20.0, 0.0], [0.0, 20.0]])  # two passes, each sure, of different things
    assert float(overfill.mutual_information(sure)) == pytest.approx(1.0, abs=1e-4)
    unsure = torch.zeros(2, 2)
    assert float(overfill.mutual_information(unsure)) == pytest.approx(0.0, abs=1e-6)
    one_sided = torch.tensor([[90.0, 0.0], [90.0, 0.0]])  # a probability of 0
    assert float(overfill.mutual_information(one_sided)) == pytest.approx(0.0, abs=1e-6)


def made_up_record(**ppl: float) -> dict:
    """A record in which every way's perplexity is given, 2 unless it is, with narrow intervals."""
    noise = np.random.default_rng(0).normal(0, 0.01, 40)
    names = ["teacher", "OverFill", "student", "periodic, 256", "periodic, 128", "periodic, 64", "periodic, 16",
             "periodic, 64, all read", "speculative, 8", "entropy, 2.5 in 1,000",
             "dropout student: MC dropout, 7.8", "dropout student: entropy, 7.8"]  # fmt: skip
    ways = {}
    for name in names:
        mean = ppl.get(name.replace(", ", "_").partition(" ")[0], 2.0)
        nats = (math.log(mean) + noise).tolist()
        at = [{"tokens": 8.0, "seconds": 0.01}, {"tokens": 8.0, "seconds": 0.01}]
        ways[name] = {"sampled": {"ppl": [mean] * 3, "nats": {"320": nats}},
                      "times": {"decode_tps": 100.0, "overheads": (noise + 0.1).tolist(), "by_length": at}}  # fmt: skip
    signal = {"area": [0.7, 0.6, 0.8], "above_entropy": [-0.2, -0.1]}
    signals = ("entropy", "MC dropout, U(t)", "MC dropout, mutual information")
    return {
        "tokens": 320, "ways": ways, "dropout_student": "dropout",
        "simulation": {"fires": {"source": {"entropy": [], "variance": [112]}}},
        "ambiguous": {"source": {"entropy": 1.0, "variance": 0.0}},
        "signals": {"dropout": dict.fromkeys(signals, signal)},
    }  # fmt: skip


def verdicts(record: dict) -> dict[str, str]:
    return {claim["claim"]: claim["verdict"] for claim in refreshing.claims(record)}


def test_verdicts_follow_the_figures() -> None:
    order, more, reach = "perplexity: teacher <", "the more refreshes", "two or three refreshes"

    def found(record: dict, start: str) -> str:
        return next(v for claim, v in verdicts(record).items() if claim.startswith(start))

    good = {"teacher": 1.5, "student": 3.0, "periodic_256": 1.9, "periodic_128": 1.8, "periodic_64": 1.7}
    assert found(made_up_record(**good, **{"entropy_2.5": 1.7}), order) == "HOLDS"
    assert found(made_up_record(**good), more) == "HOLDS"
    assert found(made_up_record(**good, **{"entropy_2.5": 1.7}), reach) == "HOLDS"
    assert found(made_up_record(**good, **{"entropy_2.5": 1.9}), reach) == "DOES NOT HOLD"
    assert found(made_up_record(**{**good, "student": 1.8}), order) == "DOES NOT HOLD"
    assert found(made_up_record(teacher=2.5, student=3.0), order) == "DOES NOT HOLD"
    assert found(made_up_record(teacher=1.5), order) == "NOT SHOWN"  # OverFill and student are the same
    assert found(made_up_record(periodic_64=2.2), more) == "DOES NOT HOLD"
    assert found(made_up_record(periodic_256=1.7, periodic_128=1.9, periodic_64=1.8), more) == "NOT SHOWN"
    assert found(made_up_record(), reach) == "NOT SHOWN"  # nothing is better than none: there is nothing to reach
    record = made_up_record()
    assert found(record, "and take less time") == "NOT SHOWN" and found(record, "a speculative") == "HOLDS"
    assert found(record, "a periodic") == "DOES NOT HOLD" and found(record, "OverFill decodes") == "HOLDS"
    record["ways"]["entropy, 2.5 in 1,000"]["times"]["overheads"] = [0.05, 0.06]
    record["ways"]["periodic, 64"]["times"] |= {"overheads": [0.15, 0.17], "by_length": [
        {"tokens": 8.0, "seconds": 0.01}, {"tokens": 80.0, "seconds": 0.1}]}  # fmt: skip
    record["ways"]["speculative, 8"]["times"]["overheads"] = [0.3, 0.31]
    record["ways"]["student"]["times"]["decode_tps"] = 120.0
    assert found(record, "and take less time") == "HOLDS" and found(record, "a periodic") == "HOLDS"
    assert found(record, "bursts of 8") == found(record, "OverFill decodes") == "DOES NOT HOLD"
    assert found(record, "simulated") == "HOLDS" and found(record, "a real model") == "DOES NOT HOLD"
    record["signals"]["dropout"]["MC dropout, U(t)"] = {"area": [0.9, 0.8, 1.0], "above_entropy": [0.1, 0.2]}
    record["ambiguous"]["source"] = {"entropy": 1.0, "variance": 0.2}
    assert found(record, "a real model") == "HOLDS" and found(record, "simulated") == "DOES NOT HOLD"


def test_the_recorded_cache_error_is_nothing_after_each_refresh() -> None:
    record = json.loads((ROOT / "studies" / "refreshing" / "summary.json").read_text())
    for name, every in (("periodic, 64", 64), ("speculative, 8", 8)):
        errors = record["cache"][name]["error"]
        assert all((error < 1e-4) == (t % every == 0) for t, error in enumerate(errors, 1))


def test_the_source_s_code_moves_every_entry_by_one_token(teacher, student) -> None:
    ids = prompts()
    options = {"temperature": 0.0, "generator": None}
    same = torch.cat(list(refreshing.generate_as_published(teacher, teacher, ids, 20, 8, KVCache, **options)), 1)
    plain = torch.cat(list(generate(teacher, ids, 20)), 1)
    assert not torch.equal(same, plain)  # with a teacher for a student it should make no difference
    cache = KVCache()
    teacher(torch.cat([ids, ids[:, -1:]], 1)[:, :9], cache)
    assert int(same[0, 0]) == int(teacher(ids[:, -1:], cache)[0, -1].argmax())


def test_the_error_of_the_cache_falls_to_the_refreshed_part(teacher, student) -> None:
    size = refreshing.Size(prompts=2, seeds=1, new_tokens=20, timed=1, repeats=1, facts=1, simulations=1)
    study = refreshing.Study({"teacher": teacher, "student": student}, None, {"test": prompts(2).tolist()}, size, {})
    ways = [refreshing.Way(name, policy=policy) for name, policy in
            (("none", Policy()), ("every 5", Periodic(5)), ("every 1", Periodic(1)))]  # fmt: skip
    found = refreshing.cache_errors(study, ways, 2)
    none, five, one = (found[way.name]["error"] for way in ways)
    assert none == sorted(none) and none[0] > 0.01
    assert [e < 1e-5 for e in five] == [t % 5 == 0 for t in range(1, 21)]
    assert max(one) < 1e-5
    assert found["none"]["kl"][0] == found["every 5"]["kl"][0]  # one text for all


def test_the_simulation_is_the_sources() -> None:
    found = refreshing.simulation()
    phases = found["phases"]
    assert [phases[name]["steps"] for name in ("conf", "drift", "post", "alea")] == [150, 100, 50, 100]
    source = {"conf": (0.0096, 0.0001), "drift": (8.1466, 0.0028), "post": (0.0096, 0.0001), "alea": (8.5172, 0.0001)}
    for name, (bits, variance) in source.items():
        assert phases[name]["mean_entropy"] == pytest.approx(bits, rel=0.02)
        assert round(phases[name]["mean_variance"], 4) == pytest.approx(variance, abs=1e-9)
    levels = found["thresholds"]["source"]
    assert round(levels["entropy"], 4) == 8.5172 and round(levels["variance"], 6) == 0.000096
    assert found["fires"]["source"]["variance"][:3] == [112, 144, 176]
    ambiguous = {name: [t for t in steps if 250 <= t < 350] for name, steps in found["fires"]["same rule"].items()}
    assert not ambiguous["variance"] and ambiguous["entropy"]


def test_verdicts_have_three_values() -> None:
    assert refreshing.verdict(True, False) == refreshing.verdict(True) == "HOLDS"
    assert refreshing.verdict(False) == refreshing.verdict(False, True) == "DOES NOT HOLD"
    assert refreshing.verdict(False, False) == "NOT SHOWN"


# --- The command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("quick")
    result = command("--quick", "--max-new-tokens", "40", "--out", str(out / "new" / "folder"), cwd=out)
    assert result.returncode == 0, result.stderr
    return result.stdout, out / "new" / "folder"


def test_the_default_run_writes_its_tables_and_figures(quick: tuple[str, Path]) -> None:
    printed, out = quick
    names = {"summary.json", "quality.csv", "times.csv", "cache.csv", "simulation.csv", "cache_error.png",
             "divergence.png", "quality.png", "simulation.png"}  # fmt: skip
    assert {path.name for path in out.iterdir()} == names
    for part in ("sampled: temperature 1", "greedy", "times: ", "students by what", "by tokens of the prompt",
                 "what the signals say", "simulated: ", "What is claimed:"):  # fmt: skip
        assert part in printed
    record = json.loads((out / "summary.json").read_text())
    assert {claim["verdict"] for claim in record["claims"]} <= {"HOLDS", "DOES NOT HOLD", "NOT SHOWN"}
    assert all(claim["claim"] in printed for claim in record["claims"])
    ways = record["ways"]
    assert ways["teacher"]["sampled"]["ppl"][0] < ways["OverFill"]["sampled"]["ppl"][0]
    assert ways["periodic, 16"]["greedy"]["refreshes"][0] == 2  # after 16 and 32 of 39
    assert ways["speculative, 8"]["greedy"]["teacher_tokens"][0] == 32
    assert {r["tokens"] for r in ways["speculative, 8"]["times"]["by_length"]} == {8}
    read = [r["tokens"] for r in ways["periodic, 64, all read"]["times"]["by_length"]]
    assert read == sorted(read)


def test_the_same_seed_gives_the_same_quality(quick: tuple[str, Path], tmp_path: Path) -> None:
    again = command("--quick", "--max-new-tokens", "40", "--out", str(tmp_path))
    assert again.returncode == 0
    assert (tmp_path / "quality.csv").read_bytes() == (quick[1] / "quality.csv").read_bytes()


@pytest.mark.parametrize("policy", ["none", "periodic:16", "windowed:16:4", "speculative:8", "entropy:1.5",
                                    "probe:8:0.02", "dropout:4:0.3"])  # fmt: skip
def test_every_policy_writes_a_text_and_says_what_it_cost(policy: str, tmp_path: Path) -> None:
    words = ["write", "--policy", policy, "--max-new-tokens", "40"]
    if policy.startswith("dropout"):
        words += ["--student", "pocket-student-dropout"]
    result = command(*words, cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == "" and list(tmp_path.iterdir()) == []
    assert len(result.stdout.split()) > 40 and "its perplexity of the text: " in result.stdout
    assert ("refreshed after tokens: none" in result.stdout) == (policy == "none")


def test_a_text_past_the_context_goes_on() -> None:
    result = command("write", "--prompt", "Halek had a yellow cap. " * 60, "--max-new-tokens", "250")
    assert result.returncode == 0, result.stderr
    assert "past the context of 512 the teacher began anew" in result.stdout and "its perplexity" not in result.stdout


def test_what_a_teacher_reads_when_the_context_is_full_counts(teacher, student) -> None:
    ids = prompts(2)
    _, pair = run(teacher, student, ids, 36, Policy())  # 9 + 35 tokens of 40: one slide, at the 41st
    assert pair.start == 20 and pair.teacher_tokens.tolist() == [21, 21] and len(pair.cache) == 24
    _, pair = run(teacher, student, ids, 36, Periodic(3))
    # 30 before the slide, and the 31st is of the 21 that are read again; then one refresh
    assert pair.teacher_tokens.tolist() == [30 + 21 + 3] * 2 and pair.unread.tolist() == [0, 0]


def test_the_shorter_context_is_the_pairs(teacher) -> None:
    short = model_of(replace(NARROW, n_ctx=24), 1)
    assert misfit(teacher, short) == "n_ctx 40 against 24" and Pair(teacher, short, prompts()).n_ctx == 24
    new, _ = run(teacher, short, prompts(), 40, Periodic(4))
    assert new.shape == (1, 40)


@torch.no_grad()
def test_a_teacher_with_nothing_to_read_says_so_and_changes_nothing(teacher, student) -> None:
    pair = Pair(teacher, student, prompts())
    pair.prefill()
    for ask in (lambda: ProbeKL(1.0).signal(pair), lambda: pair.refresh(torch.tensor([True]), Periodic(1))):
        with pytest.raises(ValueError, match="0 new tokens after 9"):
            ask()
        assert len(pair.read) == len(pair.cache) == 9 and pair.refreshes == [] and int(pair.counts) == 0


def test_a_gate_costs_nothing_while_it_waits(teacher, student) -> None:
    _, pair = run(teacher, student, prompts(), 30, ProbeKL(-1.0, every=4))
    assert [r.written for r in pair.refreshes] == [16] and pair.teacher_tokens.tolist() == [16]
    assert pair.seconds >= sum(r.seconds for r in pair.refreshes) > 0


@pytest.mark.parametrize(("words", "culprits"), [
    (["write", "--policy", "periodic:x"], ["periodic:x", "whole number"]),
    (["write", "--policy", "often"], ["often", "periodic"]),
    (["write", "--student", "gpt5"], ["gpt5", "pocket-student"]),
    (["write", "--policy", "dropout:8:0.1"], ["pocket-student", "without dropout"]),
    (["--prompt-tokens", "400"], ["400", "192"]),
    (["--prompts", "nothing.csv"], ["nothing.csv"]),
    (["write", "--student", "pocket-bct"], ["slots"]),
    (["--max-new-tokens", "1"], ["at least 2", "'1'"]),
    (["--policy", "none"], ["run has no --policy"]),
    (["write", "--quick"], ["write has no --quick"]),
    (["write", "--policy", "dropout:1:0.1"], ["passes must be at least 2, got 1"]),
    (["--quick", "--out", "README.md"], ["README.md"]),
    (["--max-new-tokens", "20"], ["20", "at least 40"]),
])  # fmt: skip
def test_bad_input_gets_one_sentence(words: list[str], culprits: list[str]) -> None:
    result = command(*words)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert all(culprit in result.stderr for culprit in culprits), result.stderr


def test_models_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in (ROOT / "pocket" / "student").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    lines = (ROOT / "pocket" / "teacher" / "tokenizer.tiktoken").read_bytes().split(b"\n")
    lines[300], lines[301] = (b" ".join([a.split()[0], b.split()[1]]) for a, b in
                              ((lines[301], lines[300]), (lines[300], lines[301])))  # fmt: skip
    (folder / "tokenizer.tiktoken").write_bytes(b"\n".join(lines))
    result = command("write", "--student", str(folder))
    assert result.returncode == 2 and "don't share a tokenizer" in result.stderr


def test_a_run_measures_unequal_models_too(tmp_path: Path) -> None:
    from pocket.checkpoints import export

    export(model_of(replace(GPTConfig(), vocab_size=1536, n_ctx=512, n_layer=2, n_head=2, n_embd=32), 0), tmp_path)
    (tmp_path / "tokenizer.tiktoken").write_bytes((ROOT / "pocket" / "teacher" / "tokenizer.tiktoken").read_bytes())
    out = tmp_path / "out"
    result = command("--quick", "--student", str(tmp_path), "--max-new-tokens", "40", "--out", str(out))
    assert result.returncode == 0 and "doesn't fit" in result.stdout, result.stderr
    record = json.loads((out / "summary.json").read_text())
    assert "cache" not in record and "as published, every 8" not in record["ways"]
    assert record["ways"]["speculative, 8"]["greedy"]["teacher_tokens"][0] == 0
    said = {claim["claim"]: claim["figures"] for claim in record["claims"]}
    assert "reads nothing" in said["a speculative refresh costs the same however long the text"]


def test_unequal_geometry_is_said(tmp_path: Path) -> None:
    result = command("write", "--teacher", "pocket-student", "--student", "pocket", "--max-new-tokens", "5")
    assert result.returncode == 0 and "doesn't fit" not in result.stdout  # they fit both ways
    from pocket.checkpoints import export

    export(model_of(replace(GPTConfig(), vocab_size=1536, n_ctx=512, n_layer=2, n_head=2, n_embd=32), 0), tmp_path)
    (tmp_path / "tokenizer.tiktoken").write_bytes((ROOT / "pocket" / "teacher" / "tokenizer.tiktoken").read_bytes())
    result = command("write", "--student", str(tmp_path), "--max-new-tokens", "5", "--policy", "periodic:2")
    assert result.returncode == 0 and "doesn't fit" in result.stdout and "n_layer 6 against 2" in result.stdout
