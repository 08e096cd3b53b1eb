"""studies/refreshing/study.py: gates meet their budgets, figures are those of the texts, and the recorded rows."""

import itertools
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from formats.chat import FIXED_TEMPLATES, template_form
from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import load_tokenizer
from overfill import POLICIES, Gate, Periodic, Policy, RefreshedPair
from pocket.evaluation import token_losses
from studies.refreshing import study as refreshing
from studies.refreshing.study import (
    Texts,
    add_cache_errors,
    add_predicted_times,
    add_quality,
    add_times,
    count_firings,
    refresh_as_published,
)
from studies.results import Results
from tests.helpers import LLAMA3, ROOT, refused, start, write_llama
from tests.test_overfill import CONFIG, NARROW, model_of, prompts, run


@pytest.fixture(scope="module")
def teacher() -> GPT:
    return model_of(CONFIG, 0)


@pytest.fixture(scope="module")
def student() -> GPT:
    return model_of(NARROW, 1)


@pytest.fixture
def rows(tmp_path: Path) -> Results:
    return Results("refreshing", tmp_path, no_verdict_reason="test")


def texts_of(rows: Results, teacher: GPT, student: GPT, ids: Tensor, n: int) -> Texts:
    models = {"teacher": teacher, "student": student}
    setting, tokenizer = {"trained": "here"}, load_tokenizer("pocket")
    return Texts(rows, models, {"valid": ids, "test": ids}, n, setting, tokenizer=tokenizer)


def test_firings_are_those_of_a_gate() -> None:
    signals = np.array([[9, 9, 0, 9, 9, 9, 9, 0, 0, 9.0], [0, 0, 0, 0, 0, 9, 0, 0, 0, 0]])
    assert count_firings(signals, 5.0, 1) == 7 + 1
    # 4, 7 and 10: not before a cooldown from the start.
    assert count_firings(signals, 5.0, 3) == 3 + 1
    assert count_firings(signals, 10.0, 1) == 0


def test_rows_are_figures_of_what_is_written(rows, teacher, student) -> None:
    """By token, of each text up to its end."""
    ids, at = prompts(6), {"mode": "greedy", "trained": "here"}
    plain, _ = run(teacher, student, ids, 20, Policy())
    ends = (int(plain[0, 2]), int(plain[1, 9]))
    texts = texts_of(rows, teacher, student, ids, 20)._replace(end_ids=ends)
    assert texts.until_end(plain[0].tolist()) == plain[0, :3].tolist()
    add_quality(texts, ["none", "teacher", "periodic:4"], "greedy")
    new, _ = run(teacher, student, ids, 20, Periodic(4))
    nats = []
    for prompt, written in zip(ids.tolist(), new.tolist(), strict=True):
        text = texts.until_end(written)
        nats += token_losses(teacher, prompt + text)[-len(text) :].tolist()
    figure = rows.figure("periodic:4", "perplexity", **at)
    assert figure.value == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
    assert len(figure.values) == 6
    assert rows.find("periodic:4", "refreshes", **at)["values"] == [4] * 6
    assert rows.find("teacher", "refreshes", **at)["values"] == [0] * 6
    count = len(rows.rows)
    add_quality(texts, ["teacher", "periodic:4"], "greedy")
    assert len(rows.rows) == count  # they are there


@pytest.mark.slow
def test_gates_meet_their_budgets_where_nothing_refreshes(rows) -> None:
    long = (model_of(replace(CONFIG, n_ctx=256), 0), model_of(replace(NARROW, n_ctx=256), 1))
    ids = torch.randint(50, (12, 8), generator=torch.Generator().manual_seed(1))
    texts = texts_of(rows, *long, ids, 240)
    texts.add_threshold("entropy~7.8")
    signals = texts.gate_signals("valid", "entropy")
    threshold = rows.figure("entropy~7.8", "threshold", **texts.setting).value
    fired = count_firings(signals, threshold, Gate.cooldown)
    assert 0.7 * 7.8 <= 1000 * fired / signals.size <= 7.8


def test_the_source_s_code_moves_every_entry_by_one_token(teacher) -> None:
    ids = prompts()
    pair = RefreshedPair(teacher, teacher, ids)
    same = torch.cat(list(refresh_as_published(pair, 20, 8, 0.0, None)), 1)
    assert len(pair.teacher_cache) == 9 + 16
    assert pair.refresh_count.tolist() == [2] * len(ids)
    plain = torch.cat(list(generate(teacher, ids, 20)), 1)
    assert not torch.equal(same, plain)  # with a teacher for a student it should make no difference
    cache = KVCache()
    teacher(torch.cat([ids, ids[:, -1:]], 1)[:, :9], cache)
    assert int(same[0, 0]) == int(teacher(ids[:, -1:], cache)[0, -1].argmax())


def test_the_error_of_the_cache_falls_to_the_refreshed_part(rows, teacher, student) -> None:
    texts = texts_of(rows, teacher, student, prompts(2), 20)
    ways = ["none", "periodic:5", "periodic:1"]
    add_cache_errors(texts, ways)
    none, five, one = (rows.find(way, "cache_error", **texts.setting)["values"] for way in ways)
    assert min(none) > 0.01 and max(one) < 1e-5
    assert [e < 1e-5 for e in five] == [t % 5 == 0 for t in range(1, 21)]
    same = texts_of(rows, teacher, teacher, prompts(2), 20)._replace(setting={"trained": "teacher"})
    add_cache_errors(same, ["none"])  # with a teacher for a student nothing differs
    assert max(rows.find("none", "kl", **same.setting)["values"]) < 1e-5


def test_times_stand_beside_those_that_the_cost_model_predicts(rows, teacher, student) -> None:
    texts = texts_of(rows, teacher, student, prompts(2), 20)
    refreshes = add_times(texts, ["teacher", "none", "periodic:4", "speculative:8"], 2)
    at = texts.setting
    assert rows.figure("none", "time", **at).value == 1
    counts = {way: [len(text) for text in of_turns] for way, of_turns in refreshes.items()}
    none = [0, 0]
    assert counts == {"teacher": none, "none": none, "periodic:4": [4, 4], "speculative:8": [2, 2]}
    for way, seconds in (("periodic:4", 0.01), ("speculative:8", 0.02)):
        for refresh in itertools.chain(*refreshes[way]):
            refresh.seconds = seconds
    rows.add_figures("none", at, 1, total=[1.0])
    add_predicted_times(texts, refreshes)
    found = [rows.figure(way, "time", **at, by="formula").value for way in ("periodic:4", "none")]
    assert found == [pytest.approx((1.0 + 4 * 0.01) / 1.0), 1.0]


@pytest.mark.slow
def test_all_ways_are_timed_and_predicted_at_size(rows, monkeypatch) -> None:
    small = replace(CONFIG, vocab_size=64, n_ctx=324)
    monkeypatch.setattr(refreshing, "random_model", lambda *_: model_of(small, 0))
    refreshing.measure_at_size(rows)
    for way in refreshing.SIZED_WAYS:
        assert rows.figure(way, "time", **refreshing.SIZED).value > 0
    predicted = rows.figure("speculative:8", "time", **refreshing.SIZED, by="formula")
    assert predicted.value > 1


# --- End to end -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("models", ["pocket", "the source's kind"])
def test_a_quick_run_gives_figures_and_no_verdict(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the pocket models, and of two Llamas as the source's are: three query heads for each of
    keys, widths pruned by 45%."""
    first, *_, dropout = refreshing.STUDENTS["pocket"]
    words = ""
    ways = ["none", "teacher", "student", "published:8"]
    ways += [kind.studied[-1] for name, kind in POLICIES.items() if name not in ("none", "dropout")]
    monkeypatch.setattr(refreshing, "PROMPT_LENGTH", 48)
    students = {"pocket": [first._replace(sampled=ways), dropout]}
    monkeypatch.setattr(refreshing, "STUDENTS", refreshing.STUDENTS | students)
    if models == "pocket":
        ways = [*ways, "dropout:8~7.8"]
    else:
        shape = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
        shape |= {"head_dim": 16, "rope_parameters": LLAMA3}
        for name, hidden, inner in (("teacher", 60, 160), ("student", 33, 88)):
            folder = tmp_path / name
            write_llama(folder, hidden_size=hidden, intermediate_size=inner, **shape)
            words += f" --{name} {folder}"
        words += f" --prompts {ROOT / 'data' / 'pocket_test_prompts.csv'} --dtype bfloat16"
    ran = start(f"studies.refreshing --quick --out {tmp_path / 'out'}{words}")
    assert "A reduced run: figures, and no verdict." in ran.out, ran.err
    assert "HOLD" not in ran.out and "doesn't fit" not in ran.out
    measured = (tmp_path / "out" / "reduced.jsonl").read_text("utf-8")
    assert [way for way in ways if f'"{way}"' not in measured] == []


def test_questions_are_cut_and_stand_in_the_models_own_form(tmp_path: Path) -> None:
    from tests.test_llama import real_form

    real_form("Llama 3", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.is_instruct = True
    questions = [f"Why is {word} so?" for word in ("a", "b c d e f g", "h", "i", "j")]
    (tmp_path / "q.csv").write_text("prompt\n" + "\n".join(questions))
    args = Namespace(prompts=tmp_path / "q.csv", device="cpu")
    made = refreshing.load_prompts(args, tokenizer, 9)
    form = template_form(FIXED_TEMPLATES["<|start_header_id|>"], {}).first
    first = tokenizer.encode(form.format(questions[0]), allowed_special="all")
    assert made["valid"][0].tolist() == first  # the shortest is whole
    long = tokenizer.decode(made["test"][1].tolist())
    before, after = form.split("{}")
    assert long.startswith("<|begin_of_text|>" + before) and long.endswith("so?" + after)


def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text(f"prompt\n{'word ' * 2000}\n")
    refused(
        start(f"studies.refreshing --prompts {long} --out {tmp_path / 'out'}"),
        "new ones exceed the context",
    )
    refused(
        start(f"studies.refreshing --student pocket-llama --out {tmp_path / 'out'}"),
        "no cache of pocket can be refreshed for pocket-llama",
    )


def test_the_simulation_has_the_sources_means_and_fires_as_often() -> None:
    ran = start("studies.simulation")
    found = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines() if line[:2] == "  "}
    assert found["confident"] == ["50", "0.0096", "0.0001", *["0.00"] * 4]  # means as the source's
    assert found["drift"] == ["100", "8.1466", "0.0028", "0.00", "0.06", "0.00", "0.03"]
    assert found["ambiguous"] == ["100", "8.5172", "0.0001", "0.06", "0.00", "0.01", "0.01"]
