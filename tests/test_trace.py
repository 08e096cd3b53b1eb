"""`--trace`: the page says what really happened in every step."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
import overfill
from gpt_kv_cache import GPTConfig, KVCache
from load_gpt2_weights import load_tokenizer
from support.tracing import Trace
from tests.helpers import class_of, of_kind, run

CONFIG = GPTConfig(vocab_size=1000, n_ctx=32, n_layer=2, n_head=2, n_embd=16)


def prompt(n: int) -> torch.Tensor:
    return torch.randint(1000, (1, n), generator=torch.Generator().manual_seed(0))


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """Return a new model, its attention far from uniform."""
    for block in model.h:
        block.attn.c_attn.weight.data *= 15
    return model.eval()


def begun(ids: list[int], path: Path = Path()) -> Trace:
    """Return a trace of a text that begins with ids."""
    return trace_of(gpt_kv_cache.GPT(CONFIG), torch.tensor([ids], dtype=torch.long), path)


def trace_of(model: torch.nn.Module, ids: torch.Tensor, path: Path) -> Trace:
    """Return a trace of a text that a model writes after ids (1, T)."""
    return Trace(path, load_tokenizer("pocket"), model, ids, gpt_baseline.context_start)


def traced(module: ModuleType, cache: Any, n_prompt: int, n: int, path: Path) -> Trace:
    torch.manual_seed(0)
    config = of_kind("Llama", CONFIG) if module is llama_kv_cache else CONFIG
    model = sharp((class_of(config) if module is llama_kv_cache else module.GPT)(config))
    trace = trace_of(model, prompt(n_prompt), path)
    trace.model = model
    options = {} if cache is None else {"cache": cache}
    for token in module.generate(model, prompt(n_prompt), n, **options):
        trace.step(int(token), cache)
    return trace


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_pair_shows_whose_entries_are_whose(window: int | None) -> None:
    torch.manual_seed(0)
    teacher, student = (gpt_kv_cache.GPT(CONFIG).eval() for _ in range(2))
    pair = overfill.RefreshedPair(teacher, student, prompt(6))
    trace = begun(prompt(6)[0].tolist())
    for token in overfill.generate_refreshed(pair, 38, overfill.Periodic(8, window=window)):
        trace.step(int(token), pair)
    step = trace.steps[-1]
    # the first layer's entries depend on the token and its position only
    reading, held = KVCache(), pair.student_cache.layers[0]
    teacher(torch.tensor([trace.ids[step["start"] : step["n"]]]), reading)
    same = held.isclose(reading.layers[0], atol=1e-5).transpose(0, 3).flatten(1).all(1)
    assert step["teacher"] == [step["start"] + int(i) for i in same.nonzero()]
    replaced = [step["replaced"] for step in trace.steps if "replaced" in step]
    assert replaced[0] == [14 - (window or 8), 14] and len(replaced) == len(pair.refreshes)
    assert any("handed over" in event for step in trace.steps[1:] for event in step["events"])


def test_turns_of_a_conversation_go_on_with_the_text() -> None:
    trace = begun([])
    for ids, reused, new in [
        ([1, 2, 3], 0, 4),
        ([1, 2, 3, 4, 5, 6], 3, 7),
        ([5, 6, 7, 8, 9], 0, 10),  # the first turn is forgotten
    ]:
        n = len(ids)
        trace.begin(ids, reused=reused)
        trace.step(new, KVCache([torch.empty(2, 1, 1, n, 1)], torch.arange(n)))
    _, second, third = trace.steps
    assert second["reused"] == (0, 3) and second["fed"] == (3, 6)
    assert "3 of 6 tokens were in a cache" in second["events"][0]
    assert trace.ids == [*range(1, 11)] and third["start"] == 4 and third["fed"] == (4, 9)
    assert "reused" not in third and third["slots"] == [4, 5, 6, 7, 8]


def data_of(path: Path) -> dict:
    return json.loads(re.search(r"const data = (.*);\n", path.read_text()).group(1))


def test_a_page_has_the_text_that_cannot_break_out_and_nothing_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    evil = "<!--<script></script><b>&amp; null /* data */ h\u00e9llo \U0001f600"
    monkeypatch.setattr("sys.argv", ["x.py", evil])  # which the page names
    ran = run(gpt_kv_cache.main, "--prompt", evil, "--max-new-tokens", 2, "--trace", page)
    assert ran.code == 0 and f"[step by step: {page}]" in ran.out
    text, data = page.read_text(), data_of(page)
    assert text.count("</script>") == 1 == text.count("<script>")
    assert "<b>" not in text.partition("<style>")[0]
    assert not re.search(r"(src|href)=|https?://|@import", text)
    assert "".join(data["tokens"]).startswith(evil)
    assert data["steps"][-1]["n"] + 1 == len(data["tokens"])


def written_out(trace: Trace, step: dict, sees: Callable) -> list[dict]:
    """Return, for each layer, what the last token of a step attends to, by token: with no cache, in matrices; sees:
    whether a query at a position, (n, 1), sees a key at another, (n,)."""
    model, shares = trace.model, []
    pos = torch.arange(step["n"] - step["start"])
    x, llama = model.wte(torch.tensor([trace.ids[step["start"] : step["n"]]])), model.config
    if grouped := hasattr(llama, "n_kv_head"):
        rope = llama_kv_cache.rotation(pos, llama)
    else:
        x = x + model.wpe(pos)
    for block in model.h:
        q, k, v = block.attn.project(block.ln_1(x))
        if grouped:
            q, k = (llama_kv_cache.rotate(x, rope) for x in (q, k))
            k, v = (x.repeat_interleave(llama.n_head // llama.n_kv_head, 1) for x in (k, v))
        scores = q @ k.mT / q.size(3) ** 0.5
        w = scores.masked_fill(~sees(pos[:, None], pos), -torch.inf).softmax(dim=-1)
        x = x + block.attn.c_proj((w @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
        shares.append(dict(enumerate(w[0, :, -1].mean(dim=0).tolist(), step["start"])))
    return shares


def causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


def windowed(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= q) & ((k > q - 6) | (k < 2))


@pytest.mark.parametrize(
    ("module", "cache", "sees", "n_prompt", "n_new"),
    [
        (gpt_baseline, None, causal, 5, 40),
        (llama_kv_cache, KVCache(), causal, 5, 40),
        (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache(6, 2), windowed, 5, 12),
        (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache(6, 2), windowed, 20, 12),
    ],
    ids=["no cache", "Llama", "ring", "ring, long prompt"],
)
@torch.no_grad()
def test_steps_are_what_happened_and_attention_is_that_of_one_written_out(
    module: ModuleType, cache: Any, sees: Callable, n_prompt: int, n_new: int, tmp_path: Path
) -> None:
    trace, before = traced(module, cache, n_prompt, n_new, tmp_path / "x.html"), 0
    for i, step in enumerate(trace.steps):
        n, start = step["n"], gpt_baseline.context_start(step["n"], 32)
        tokens = [*range(start, n)]
        computed = tokens  # without a cache, for a prompt, and when the context was full
        if cache is not None:
            visible = [
                token for token in tokens if sees(torch.tensor(n - 1 - start), token - start)
            ]
            tokens = step["slots"]
            assert sorted({*tokens} - {*step.get("evicted", [])}) == visible
            assert ("tokens is full" in "".join(step["events"])) == (start != before)
            if i > 0 and start == before:
                computed = [n - 1]
        assert step["start"] == start and step["fed"] == (computed[0], n)
        for found, shares in zip(step["attention"], written_out(trace, step, sees), strict=True):
            assert found == pytest.approx([1000 * shares[t] for t in tokens], abs=0.51)
        before = start
    assert step["bytes"] == (0 if cache is None else cache.nbytes)
    trace.write()
    assert not any(part._forward_pre_hooks for part in trace.model.modules()), "it watches no more"


@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("n", [5, 60])
@torch.no_grad()
def test_attention_of_a_bct_is_causal_until_it_writes_and_then_shared_with_its_slots(
    n: int, rule: str
) -> None:
    torch.manual_seed(0)
    config = gpt_bounded_cache.BCTConfig(**vars(CONFIG), slots=3, recent=8, rule=rule)
    model, cache = sharp(gpt_bounded_cache.BCT(config)), gpt_bounded_cache.BoundedMemory()
    trace = trace_of(model, prompt(n), Path())
    trace.model = model
    model(prompt(n), cache)
    trace.step(1, cache)
    (step,) = trace.steps
    assert step["slots"] == [*range(max(0, n - 8), n)]
    assert (min(step["memory"]) > 0) == (n > 8 or rule == "sum")  # whose empty slots are read as 0
    if rule == "mean":
        slots, _ = cache.layers[step["layer"]]
        assert step["mass"] == pytest.approx(slots.mass[0, 0, :, 0].tolist(), abs=1e-3)
    for attention, memory in zip(step["attention"], step["memory"], strict=True):
        assert sum(attention) + memory == pytest.approx(1000, abs=5)
    if n == 5 and rule == "mean":
        for attention, shares in zip(
            step["attention"], written_out(trace, step, causal), strict=True
        ):
            assert attention == pytest.approx([1000 * share for share in shares.values()], abs=0.51)
