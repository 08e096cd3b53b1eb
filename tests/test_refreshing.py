"""studies/refreshing*.py: figures of made-up texts and clocks, verdicts by their figures, and a whole run."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_tokenizer
from overfill import Pair, Periodic, Policy, ProbeKL, generate_refreshed, teacher_nats
from studies import refreshing, refreshing_formulas, refreshing_times
from studies.pages import beside
from studies.protocol import judged, with_interval
from studies.refreshing_measures import (
    Setup,
    Size,
    Writer,
    Written,
    by_prompt,
    figures_of,
    firings,
    mutual_information,
    ratio,
    refresh_as_published,
    repeated,
    signals_of,
    simulation,
    threshold_for,
    times,
)
from studies.refreshing_report import at_last, claims
from support.statistics import bootstrap
from tests.helpers import ROOT
from tests.test_overfill import CONFIG, NARROW, command, model_of, prompts, run


@pytest.fixture(scope="module")
def teacher() -> GPT:
    return model_of(CONFIG, 0)


@pytest.fixture(scope="module")
def student() -> GPT:
    return model_of(NARROW, 1)


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


def test_repeated_trigrams() -> None:
    assert repeated([1, 2, 3, 4]) == 0
    assert repeated([1, 2, 1, 2, 1, 2]) == pytest.approx(0.5)  # 121 212 121 212
    assert repeated([1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert repeated([1]) == 0


def test_intervals_are_over_prompts_and_ratios_are_paired() -> None:
    values = np.array([1.0, 3.0, 5.0, 7.0])
    assert by_prompt(values, np.array([4, 4, 9, 9])).tolist() == [2.0, 6.0]
    mean, low, high = bootstrap(np.random.default_rng(0).normal(2.0, 1.0, 400))
    assert low < 2.0 < high and high - low == pytest.approx(4 * 1.96 / 20 / 2, rel=0.15) and low < mean < high
    one, other = ({"nats": {8: [x + by for x in (1.0, 2.0, 9.0)]}} for by in (0.1, 0.0))
    assert ratio(one, other) == pytest.approx([math.exp(0.1)] * 3)  # however much the prompts differ


def test_a_preallocated_cache_is_a_cache(teacher, student) -> None:
    for policy in (Policy(), Periodic(4), Periodic(5, window=2, reads="window"), ProbeKL(2.0, every=4, cooldown=4)):
        plain, _ = run(teacher, student, prompts(3), 30, policy)
        pair = Pair(teacher, student, prompts(3), lambda: SlidingWindowCache(39))
        assert torch.equal(torch.cat(list(generate_refreshed(pair, 30, policy)), 1), plain)


def test_a_study_measures_what_generate_writes(teacher, student) -> None:
    lengths = (5, 9, 9)
    texts = {"test": [prompts(1, n)[0].tolist() for n in lengths]}
    size = Size(prompts=3, seeds=2, new_tokens=10, timed=1, repeats=1, facts=1, simulations=1)
    setup = Setup({"teacher": teacher, "student": student}, None, texts, size, {})
    greedy = setup.write(Writer("", policy=Periodic(4)), 0.0)
    for row, i in zip(greedy.ids, greedy.prompt, strict=True):
        ids = torch.tensor([texts["test"][i]])
        new, pair = run(teacher, student, ids, 10, Periodic(4))
        assert row.tolist() == new[0].tolist() and pair.counts.tolist() == [2]
        torch.testing.assert_close(greedy.nats[list(greedy.prompt).index(i)], teacher_nats(teacher, ids, new)[0],
                                   rtol=1e-3, atol=1e-4)  # fmt: skip
    assert sorted(greedy.prompt) == [0, 1, 2] and greedy.refreshes.tolist() == [2, 2, 2]
    assert greedy.teacher_tokens.tolist() == [8, 8, 8]
    sampled, again = (setup.write(Writer("", "student"), 1.0) for _ in range(2))
    assert sorted(sampled.prompt) == [0, 0, 1, 1, 2, 2] and torch.equal(sampled.ids, again.ids)


def test_a_study_of_unequal_geometry_is_measured_too(teacher) -> None:
    other = model_of(replace(CONFIG, n_layer=2, n_head=4, head_dim=8), 3)
    size = Size(2, 2, 20, 1, 1, 1, 1)
    setup = Setup({"teacher": teacher, "student": other}, None, {"test": prompts(2).tolist()}, size, {})
    for policy in (Policy(), Periodic(4), Periodic(8, window=3), ProbeKL(1.0, every=8)):
        written = setup.write(Writer("", policy=policy), 0.0)
        for row, ids in zip(written.ids, prompts(2), strict=True):
            assert row.tolist() == run(teacher, other, ids[None], 20, policy)[0][0].tolist()


class Words:
    """A tokenizer of letters."""

    def decode(self, ids: list[int]) -> str:
        return "ab" * len(ids)


def test_figures_of_made_up_texts() -> None:
    size = Size(2, 2, 80, 1, 1, 1, 1)
    setup = Setup({"teacher": model_of(CONFIG, 0)}, Words(), {"test": [[1], [2]]}, size, {})
    nats = torch.full((4, 80), 1.0)
    nats[:, 40:] = 2.0
    nats[2:, 0] = 5.0  # one slip in 80 tokens of the second prompt: its teacher gives it less than 1%
    written = Written(torch.arange(320).view(4, 80) % 7, nats, np.array([0, 0, 1, 1]),
                                 np.array([1, 3, 5, 7]), np.array([10, 10, 30, 30]))  # fmt: skip
    found = figures_of(setup, written)
    assert found["tail_logprob"][0] == pytest.approx(-(10 * 1 + 40 * 2) / 50)  # the last 50
    assert found["slips"][0] == pytest.approx(0.5 / 80) and found["characters"][0] == 160
    assert found["refreshes"][0] == 4 and found["teacher_tokens"][0] == 20
    assert found["repeat_3"][0] == pytest.approx(1 - 7 / 78)
    assert found["ppl"][0] == pytest.approx(math.exp((1.5 + 1.55) / 2), rel=1e-4)
    assert found["nats"] == {"32": [1.0, 1.125], "64": [1.375, 1.4375], "80": [1.5, 1.55]}


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def tokens(writer: Writer, ids: Tensor, n: int, **_: object) -> tuple:
        def generation() -> object:
            for i in range(n):
                now[0] += 3.0 if i == 0 else (0.5 if writer.name == "OverFill" else 0.75)
                yield torch.tensor([[1]])

        return generation(), None

    size = Size(1, 1, 11, timed=1, repeats=2, facts=1, simulations=1)
    setup = Setup({"teacher": model_of(CONFIG, 0)}, None, {"test": [[1, 2]]}, size, {})
    monkeypatch.setattr(setup, "tokens", tokens)
    found = times(setup, [Writer("OverFill"), Writer("slow")])
    assert found["OverFill"]["ttft_s"] == 3 and found["OverFill"]["total_s"] == 8
    assert found["OverFill"]["decode_tps"] == 2 and found["OverFill"]["end_to_end_tps"] == 11 / 8
    assert found["slow"]["overheads"] == [pytest.approx(10.5 / 8 - 1, abs=1e-4)] * 2
    assert found["slow"]["by_teacher"] is None


def test_gates_meet_their_budgets_where_nothing_refreshes(teacher) -> None:
    long = [model_of(replace(config, n_ctx=256), seed) for config, seed in ((CONFIG, 0), (NARROW, 1))]
    texts = {"valid": torch.randint(50, (12, 8), generator=torch.Generator().manual_seed(1)).tolist()}
    size = Size(12, 1, 240, 1, 1, 1, 1)
    setup = Setup(dict(zip(("teacher", "student"), long, strict=True)), None, texts, size, {})
    for temperature in (0.0, 1.0):
        gates = refreshing.calibrated(setup, temperature)
        for name, budget in (("entropy, 7.8 in 1,000", 7.8), ("entropy, 15.6 in 1,000", 15.6)):
            signals = setup.record("student", {"": gates[name].signal}, "valid", temperature)[""]
            rate = 1000 * firings(signals, gates[name].threshold, 16) / signals.numel()
            assert 0.7 * budget <= rate <= budget
    probe = gates["probe-KL, 7.8 in 1,000"]
    signals = setup.record("student", {"": probe.signal}, "valid")[""][:, 31::32]
    rate = 1000 * float((signals > probe.threshold).sum()) / (32 * signals.numel())
    assert 0.7 * 7.8 <= rate <= 7.8
    assert gates["entropy, 7.8, teacher's next"].teacher_next and "dropout student: entropy, 7.8" not in gates


def test_mutual_information_is_what_passes_disagree_on() -> None:
    sure = torch.tensor([[20.0, 0.0], [0.0, 20.0]])  # two passes, each sure, of different things
    assert float(mutual_information(sure)) == pytest.approx(1.0, abs=1e-4)
    unsure = torch.zeros(2, 2)
    assert float(mutual_information(unsure)) == pytest.approx(0.0, abs=1e-6)
    one_sided = torch.tensor([[90.0, 0.0], [90.0, 0.0]])  # a probability of 0
    assert float(mutual_information(one_sided)) == pytest.approx(0.0, abs=1e-6)


def made_up_record(**ppl: float) -> dict:
    """A record in which every way's perplexity is given, 2 unless it is, with narrow intervals."""
    noise = np.random.default_rng(0).normal(0, 0.01, 40)
    names = ["teacher", "OverFill", "student", "periodic, 256", "periodic, 128", "periodic, 64", "periodic, 16",
             "periodic, 64, all read", "speculative, 8", "entropy, 2.5 in 1,000",
             "dropout student: MC dropout, 7.8", "dropout student: entropy, 7.8"]  # fmt: skip
    methods = {}
    for name in names:
        mean = ppl.get(name.replace(", ", "_").partition(" ")[0], 2.0)
        nats = (math.log(mean) + noise).tolist()
        at = [{"tokens": 8.0, "seconds": 0.01}, {"tokens": 8.0, "seconds": 0.01}]
        methods[name] = {"sampled": {"ppl": [mean] * 3, "nats": {"320": nats}, "repeat_3": [0.1] * 3},
                         "times": {"decode_tps": 100.0, "overheads": (noise + 0.1).tolist(), "by_length": at,
                                   "total_s": 1.0, "by_teacher": 0.0}}  # fmt: skip
    signal = {"area": [0.7, 0.6, 0.8], "above_entropy": [-0.2, -0.1], "with_kl": 0.5, "with_teachers_entropy": 0.5}
    signals = ("entropy", "MC dropout, U(t)", "MC dropout, mutual information")
    return {
        "teacher": "made up", "tokens": 320, "methods": methods, "dropout_student": "dropout",
        "simulation": {"fires": {"source": {"entropy": [], "variance": [112]}}},
        "ambiguous": {"source": {"entropy": 1.0, "variance": 0.0}},
        "signals": {"dropout": {name: dict(signal) for name in signals}},
    }  # fmt: skip


def found(record: dict, start: str) -> str:
    """Return the verdict on the claim that begins so."""
    return next(claim["verdict"] for claim in claims(record) if claim["quote"].startswith(start))


def test_verdicts_follow_the_figures() -> None:
    order, more, reach = "Quality: Teacher", "0 (No Refresh)", "targeted refreshes"
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
    full, clear = "unlike a full refresh", "a clear signal"
    record = made_up_record()
    assert found(record, "the teacher’s workload") == "HOLDS" and found(record, full) == "DOES NOT HOLD"
    record["methods"]["periodic, 64, all read"]["times"]["by_length"] = [
        {"tokens": 8.0, "seconds": 0.01}, {"tokens": 80.0, "seconds": 0.1}]  # fmt: skip
    record["methods"]["speculative, 8"]["times"]["by_length"] = [
        {"tokens": 8.0, "seconds": 0.01}, {"tokens": 9.0, "seconds": 0.01}]  # fmt: skip
    assert found(record, "the teacher’s workload") == "DOES NOT HOLD" and found(record, full) == "HOLDS"
    assert found(record, clear) == "DOES NOT HOLD"
    record["signals"]["dropout"]["MC dropout, U(t)"] |= {"area": [0.9, 0.8, 1.0], "above_entropy": [0.1, 0.2]}
    assert found(record, clear) == "HOLDS"


def test_a_repeating_student_collapses() -> None:
    record = made_up_record()
    for repeats, verdict in ((0.3, "HOLDS"), (0.1, "NOT SHOWN"), (0.02, "DOES NOT HOLD")):
        record["methods"]["student"]["sampled"]["repeat_3"] = [repeats] * 3
        assert found(record, "output collapses") == verdict


def test_the_simulation_is_judged_by_what_the_source_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for entropy, variance, verdict in (([320], [112, 336], "DOES NOT HOLD"), ([320], [112], "HOLDS"),
                                       ([], [112], "DOES NOT HOLD"), ([249, 350], [349], "DOES NOT HOLD")):
        monkeypatch.setattr(refreshing_formulas, "PRINTED", {"entropy": entropy, "variance": variance})
        assert found(made_up_record(), "the MC Uncertainty") == verdict


def test_probes_are_bounded_if_they_are_no_more_than_their_interval_allows() -> None:
    record = made_up_record()
    gate = record["methods"]["probe-KL, 7.8 in 1,000"] = {**record["methods"]["OverFill"]}
    for read, verdict in ((320, "HOLDS"), (352, "DOES NOT HOLD")):
        gate["sampled"] = record["methods"]["OverFill"]["sampled"] | {"teacher_tokens": [read] * 3}
        assert found(record, "This bounds Teacher") == verdict


def test_errors_accumulate_if_those_of_new_entries_grow_and_overfill_shrinks_kl_if_it_is_below_the_students() -> None:
    record, noise = made_up_record(), np.random.default_rng(0).normal(0, 0.01, 8)
    grows, shrinks = "only approximates the teacher", "OverFill shrinks this KL"
    for off, grown, shrunk in ((0.1, "HOLDS", "DOES NOT HOLD"), (0.0, "NOT SHOWN", "NOT SHOWN"),
                               (-0.1, "DOES NOT HOLD", "HOLDS")):  # fmt: skip
        own = {"kl": [0.5] * 320, "first_kl_by_text": [0.5] * 8, "kl_by_text": [0.5] * 8}
        none = own | {"newest_by_text": [[0.3] * 8, (0.3 + off + noise).tolist()],
                      "first_kl_by_text": (0.5 + off + noise).tolist()}  # fmt: skip
        record["cache"] = {"student": own, "OverFill": none, "periodic, 64": own}
        assert (found(record, grows), found(record, shrinks)) == (grown, shrunk)


def test_the_front_page_says_what_a_record_shows() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 40)
    texts = {name: {"ppl": [math.exp(mean)], "nats": {"320": (mean + noise * (name == "other")).tolist()}}
             for name, mean in (("low", 0.5), ("same", 1.0), ("other", 1.0), ("high", 1.5))}  # fmt: skip
    words = [beside(texts, name, "other") for name in ("low", "same", "high")]
    assert words == ["1.65 (better)", "2.72 (no difference shown)", "4.48 (worse)"]


def test_a_growing_cache_is_constant_in_time_up_to_noise() -> None:
    cells = {f"1 x {n}": {"step_ms": 40.0, "cache_bytes": n} for n in (128, 1000)}
    bench = {"lengths": [128, 1000], "rows": {"gpt_kv_cache.py": cells}}
    for ms, verdict in ((41.0, "HOLDS"), (50.0, "DOES NOT HOLD")):
        cells["1 x 1000"]["step_ms"] = ms
        assert refreshing_times.grown_cache(bench)["verdict"] == verdict


def test_a_turn_with_a_slow_overfill_is_left_out_and_writers_are_compared_turn_by_turn() -> None:
    shares = {"OverFill": [0.0] * 5, "fast": [0.1, 0.11, -0.1, 0.1, 0.09], "slow": [0.4, 0.41, 0.15, 0.9, 0.39]}
    methods = {name: {"times": {"overheads": x}} for name, x in shares.items()}
    methods["middle"] = {"times": {"overheads": [0.2, 0.21, -0.02, 0.2, 0.19]}}
    assert refreshing_times.steady(methods) == [0, 1, 3, 4]  # the fourth was slow for one writer only
    middle, low, high = refreshing_times.longer(methods, "middle", "fast")
    assert middle == pytest.approx(1.2 / 1.1 - 1, abs=1e-3) and 0.09 < low <= middle <= high < 0.1
    assert refreshing_times.longer(methods, "slow")[0] == pytest.approx(0.405)  # the median
    one = {name: {"times": {"overheads": x[:1]}} for name, x in shares.items()}
    assert refreshing_times.steady(one) == [0]


TIMED = ("Throughput (TPS)", "Speed: Student is fastest", "256 … +0.7%",
         "Speculative (k=8) Constant (prefill over 8 tokens) ~1.9%", "but is faster now", "Student decode TPS")


def test_claims_about_time_are_judged_at_a_real_size_only() -> None:
    """All hold if refreshes cost what the source says, none if they cost ten times as much."""
    def at_size(times: float) -> dict[str, Any]:
        seconds = {"teacher": 20.0, "OverFill": 10.0, "student": 9.67, "periodic, 256": 10 + 0.05 * times,
                   "periodic, 128": 10 + 0.1 * times, "periodic, 64": 10 + 0.2 * times,
                   "speculative, 8": 10 + 0.1 * times, f"entropy, every {refreshing_times.RARELY}": 10.05}  # fmt: skip
        methods = {name: {"times": {"total_s": s, "decode_tps": 100.0, "overheads": [s / 10 - 1] * 3,
                                    "by_teacher": 1 - 10 / s}} for name, s in seconds.items()}  # fmt: skip
        return {"methods": methods, "tokens": 260, "prompt_tokens": 64, "turns": 3, "student_parameters": 1,
                "conditions": {"model": "x", "parameters": 2, "layers": 1, "width": 1}}  # fmt: skip

    def verdicts(record: dict[str, Any] | None) -> list[str]:
        where = "x: 2 parameters"
        rows = [c for c in claims(made_up_record(), record) if c["ours"].startswith(where)]
        return [next(c["verdict"] for c in rows if c["quote"].startswith(start)) for start in TIMED] if rows else []

    assert verdicts(None) == []
    assert verdicts(at_size(1)) == ["HOLDS"] * 6
    assert at_size(1)["methods"]["student"]["times"]["overheads"][0] > -0.05  # a lead like the source's holds
    noisy = at_size(1)
    noisy["methods"]["student"]["times"]["overheads"] = [-0.01, 0.0, 0.01]
    assert verdicts(noisy)[1] == "NOT SHOWN"
    noisy["methods"]["periodic, 64"]["times"]["overheads"] = [-0.3, 0.0, 0.6]
    assert verdicts(noisy)[2] == "NOT SHOWN"
    dear = at_size(10)
    dear["methods"]["student"]["times"] |= {"total_s": 11.0, "decode_tps": 200.0, "overheads": [0.1] * 3}
    dear["methods"]["periodic, 64"]["times"]["by_teacher"] = 0.0
    dear["methods"][f"entropy, every {refreshing_times.RARELY}"]["times"]["overheads"] = [0.9] * 3
    assert verdicts(dear) == ["DOES NOT HOLD"] * 6


@pytest.mark.slow
def test_times_of_a_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--teacher", "2x2x32", "--quick", "--prompt-tokens", "8", "--out", str(tmp_path)]
    refreshing.main(command)
    record = json.loads((tmp_path / "geometry.json").read_text())
    assert {"teacher", "OverFill", "periodic, 64", "speculative, 8"} < record["methods"].keys()
    assert "periodic, 64, all read" in capsys.readouterr().out and record["conditions"]["layers"] == 2
    for more, said in ((["--max-new-tokens", "65"], "at least 66"), (["--prompt-tokens", "1000"], "1024")):
        with pytest.raises(SystemExit, match="2"):
            refreshing.main([*command, *more])
        assert said in capsys.readouterr().err


def test_the_recorded_cache_error_is_nothing_after_each_refresh() -> None:
    record = json.loads((ROOT / "studies" / "refreshing" / "summary.json").read_text())
    for name, every in (("periodic, 64", 64), ("speculative, 8", 8)):
        errors = record["cache"][name]["error"]
        assert all((error < 1e-4) == (t % every == 0) for t, error in enumerate(errors, 1))


def test_the_end_of_a_long_text_is_judged_by_itself() -> None:
    quote, noise = "Loses on very long outputs", np.random.default_rng(1).normal(0, 0.01, 40)
    for n, why in ((320, "320 tokens are not very long"), (1000, "no rival trained alone")):
        claim, = at_last({"OverFill": {"sampled": {"nats": {str(n): [1.0]}}}}, "partly: small")
        assert claim["verdict"] == "NOT TESTED" and claim["why"].startswith(why)
    for ratio_at_last, verdict in ((1.2, "HOLDS"), (0.9, "DOES NOT HOLD"), (1.0, "NOT SHOWN")):
        record = made_up_record()
        record["methods"]["student trained alone"] = record["methods"]["student"] | {}
        for name, figures in record["methods"].items():
            late = math.log(ratio_at_last) + noise if name == "OverFill" else -noise
            nats = {"512": [0.5] * 40, "1000": ((512 * 0.5 + 488 * late) / 1000).tolist()}
            figures["sampled"] = figures["sampled"] | {"nats": nats}
        assert found(record, quote) == verdict


def test_the_source_s_code_moves_every_entry_by_one_token(teacher, student) -> None:
    ids = prompts()
    options = {"temperature": 0.0, "generator": None}
    same = torch.cat(list(refresh_as_published(teacher, teacher, ids, 20, 8, KVCache, **options)), 1)
    plain = torch.cat(list(generate(teacher, ids, 20)), 1)
    assert not torch.equal(same, plain)  # with a teacher for a student it should make no difference
    cache = KVCache()
    teacher(torch.cat([ids, ids[:, -1:]], 1)[:, :9], cache)
    assert int(same[0, 0]) == int(teacher(ids[:, -1:], cache)[0, -1].argmax())


def test_the_error_of_the_cache_falls_to_the_refreshed_part(teacher, student) -> None:
    size = Size(prompts=2, seeds=1, new_tokens=20, timed=1, repeats=1, facts=1, simulations=1)
    setup = Setup({"teacher": teacher, "student": student}, None, {"test": prompts(2).tolist()}, size, {})
    writers = [Writer(name, policy=policy) for name, policy in
            (("none", Policy()), ("every 5", Periodic(5)), ("every 1", Periodic(1)))]  # fmt: skip
    found = refreshing.cache_errors(setup, writers, 2)
    none, five, one = (found[writer.name]["error"] for writer in writers)
    assert min(none) > 0.01
    assert [e < 1e-5 for e in five] == [t % 5 == 0 for t in range(1, 21)]
    assert max(one) < 1e-5
    assert found["none"]["kl"][0] == found["every 5"]["kl"][0]  # one text for all
    assert np.mean(found["none"]["newest_by_text"][-1]) == pytest.approx(none[-1], abs=1e-4)  # all of 20 are new
    again = refreshing.cache_errors(setup, [Writer("teacher's", "teacher", Policy())], 2)["teacher's"]
    assert max(again["error"] + again["kl"]) < 1e-5  # with a teacher for a student nothing differs
    assert len(found["student"]["first_kl_by_text"]) == 2 and "error" not in found["student"]
    assert np.mean(found["none"]["kl_by_text"]) == pytest.approx(np.mean(found["none"]["kl"]), abs=1e-4)


def test_the_simulation_is_the_sources() -> None:
    found = simulation()
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


def test_verdicts_have_four_values() -> None:
    for holds, refuted, verdict in ((True, False, "HOLDS"), (True, True, "HOLDS"), (False, True, "DOES NOT HOLD"),
                                    (False, False, "NOT SHOWN"), (None, True, "NOT TESTED")):  # fmt: skip
        claim = judged("2", "x", holds, "1 of 2", "partly: y: z", refuted)
        assert (claim["verdict"], claim["stated"], claim["why"]) == (verdict, "partly", "y: z")
    assert judged("2", "x", False, "", "yes") == judged("2", "x", False, "", "yes", refuted=True)


# --- End to end ------------------------------------------------------------------------------------------------------


def study(*words: object) -> str:
    """Return what a short run of the study prints, by the door of overfill.py."""
    status, out, err = command("study", "--quick", "--max-new-tokens", "40", *map(str, words))
    assert status == 0, err
    return out


@pytest.mark.slow
def test_a_run_writes_its_tables_and_figures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    printed = study("--out", out)
    names = {"summary.json", "cache_error.png", "divergence.png", "quality.png", "simulation.png"}
    assert {path.name for path in out.iterdir()} == names
    for part in ("sampled at temperature 1", "greedy", "to OverFill", "by the cache in training",
                 "by tokens of the prompt", "What the signals say", "Simulated: ", "claim:"):  # fmt: skip
        assert part in printed
    record = json.loads((out / "summary.json").read_text())
    assert all(claim["quote"] in printed and claim["figure"] in printed for claim in claims(record))
    assert len(record["signals"]["dropout"]["MC dropout, U(t)"]["passes_ambiguity"]) == 3
    methods = record["methods"]
    assert methods["teacher"]["sampled"]["ppl"][0] < methods["OverFill"]["sampled"]["ppl"][0]
    assert methods["periodic, 16"]["greedy"]["refreshes"][0] == 2  # after 16 and 32 of 39
    assert methods["speculative, 8"]["greedy"]["teacher_tokens"][0] == 32
    assert {r["tokens"] for r in methods["speculative, 8"]["times"]["by_length"]} == {8}
    read = [r["tokens"] for r in methods["periodic, 64, all read"]["times"]["by_length"]]
    assert read == sorted(read)


@pytest.mark.slow
def test_a_run_measures_unequal_models_too(tmp_path: Path) -> None:
    from pocket.checkpoints import export

    export(model_of(replace(GPTConfig(), vocab_size=1536, n_ctx=512, n_layer=2, n_head=2, n_embd=32), 0), tmp_path)
    (tmp_path / "tokenizer.tiktoken").write_bytes((ROOT / "pocket" / "teacher" / "tokenizer.tiktoken").read_bytes())
    out = tmp_path / "out"
    assert "doesn't fit" in study("--student", tmp_path, "--out", out)
    record = json.loads((out / "summary.json").read_text())
    assert "cache" not in record and "as published, every 8" not in record["methods"]
    assert record["methods"]["speculative, 8"]["greedy"]["teacher_tokens"][0] == 0
    workload = next(claim for claim in claims(record) if claim["quote"].startswith("the teacher’s workload"))
    assert "reads nothing" in workload["figure"] and workload["verdict"] == "NOT TESTED"


@pytest.mark.slow
def test_a_run_measures_models_of_any_tokenizer_on_prompts_of_ones_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    try:
        load_tokenizer("gpt2")
    except OSError:
        pytest.skip("tiktoken can't load GPT-2's tokenizer here")
    for name, inner in (("teacher", 256), ("student", 128)):
        config = transformers.GPT2Config(n_positions=64, n_embd=64, n_layer=3, n_head=4, n_inner=inner)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    rows = "".join(f"Once there was a {word} of many words\n" for word in "abcdefgh")
    (tmp_path / "prompts.csv").write_text("prompt\n" + rows)
    study("--teacher", tmp_path / "teacher", "--student", tmp_path / "student", "--prompts", tmp_path / "prompts.csv",
          "--out", tmp_path)  # fmt: skip
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["measured_prompts"] == 6 and "lengths" not in record
    assert "MC dropout, U(t)" in record["signals"]["student"]  # GPT-2's config says 0.1


@pytest.mark.parametrize("large", [slice(0, 1), slice(0, 2), slice(0, 0)])
def test_signals_of_few_texts_are_shown_as_missing_and_never_as_nan(large: slice) -> None:
    """Of two texts, one or both or none have tokens with a large KL: some draws, or all, have none or nothing else."""
    kl = torch.zeros(2, 70)
    kl[large, :20] = 1.0
    generator = torch.Generator().manual_seed(0)
    recorded = {name: torch.rand(2, 70, generator=generator) for name in ("entropy", "MC dropout, U(t)")}
    experiment = SimpleNamespace(rates={}, record=lambda *_: {**recorded, "kl": kl, "teacher's entropy": kl})
    for figures in signals_of(experiment, "student").values():
        json.dumps(figures, allow_nan=False)
        assert "nan" not in with_interval(figures["area"]) and len(figures["area"]) == 3
        assert (figures["area"][0] is None) == (large.stop == 0) == (with_interval(figures["area"]) == "-")
