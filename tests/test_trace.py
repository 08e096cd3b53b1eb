"""`--trace`: the page says what really happened in every step."""

import importlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
import overfill
from gpt_kv_cache import GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from support.tracing import Trace
from tests.helpers import class_of, of_kind, run

ROOT = Path(__file__).resolve().parent.parent
CONFIG = GPTConfig(vocab_size=1000, n_ctx=32, n_layer=2, n_head=2, n_embd=16)


def prompt(n: int) -> torch.Tensor:
    return torch.randint(1000, (1, n), generator=torch.Generator().manual_seed(0))


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """Return a new model, its attention far from uniform."""
    for block in model.h:
        block.attn.c_attn.weight.data *= 15
    return model.eval()


def begun(ids: list[int], n_ctx: int = CONFIG.n_ctx, path: Path = Path()) -> Trace:
    """Return a trace of a text that begins with ids."""
    trace = Trace("title", load_tokenizer("pocket"), n_ctx, path, gpt_baseline.context_start)
    trace.begin(ids)
    return trace


def traced(module: object, cache: object, n_prompt: int, n: int, path: Path = Path()) -> Trace:
    torch.manual_seed(0)
    config = of_kind("Llama", CONFIG) if module is llama_kv_cache else CONFIG
    model = sharp(class_of(config)(config) if module is llama_kv_cache else module.GPT(config))
    trace = begun(prompt(n_prompt)[0].tolist(), path=path)
    trace.watch(model)
    trace.model = model
    options = {} if cache is None else {"cache": cache}
    for token in module.generate(model, prompt(n_prompt), n, **options):
        trace.step(int(token), cache)
    return trace


def held(step: dict) -> dict[int, int]:
    """Return the token in every slot that holds one a later query may see."""
    slots = {slot + i: first + i for slot, first, count in step["slots"] for i in range(count)}
    return {slot: token for slot, token in slots.items() if token not in step.get("evicted", [])}


def test_without_a_cache_everything_is_computed_again() -> None:
    steps = traced(gpt_baseline, None, 5, 40).steps
    assert [step["fed"] for step in steps[:3]] == [(0, 5), (0, 6), (0, 7)]
    for step in steps:
        assert step["bytes"] == 0 and "slots" not in step
        assert step["fed"] == (gpt_baseline.context_start(step["n"], 32), step["n"])


def test_with_a_cache_every_token_is_computed_once_until_the_context_is_full() -> None:
    cache = KVCache()
    steps = traced(gpt_kv_cache, cache, 5, 40).steps
    for step in steps:
        assert [*held(step).values()] == [*range(step["start"], step["n"])]
        first = {5: 0, 33: 16}.get(step["n"], step["n"] - 1)  # half of 32 is read again
        assert step["fed"] == (first, step["n"]) and step["size"] == step["n"] - step["start"]
    assert "32 tokens is full" in steps[33 - 5]["events"][0]
    assert steps[-1]["bytes"] == cache.nbytes


def test_a_ring_forgets_the_oldest_and_keeps_sinks() -> None:
    cache = gpt_bounded_cache.SlidingWindowCache(6, 2)
    for step in traced(gpt_bounded_cache, cache, 12, 15).steps:
        n, slots = step["n"], held(step)
        assert {*slots.values()} == {0, 1, *range(n - 6, n)} and step["size"] == 9
        assert slots[2 + (n - 1 - 2) % 7] == n - 1
        assert step["evicted"] == [n - 7], "the spare slot holds what has left the window"


def test_bct_shows_recent_tokens_and_the_mass_of_slots() -> None:
    model = load_model("pocket-bct", model_class=gpt_bounded_cache.BCT)
    cache, text = (
        gpt_bounded_cache.BoundedMemory(),
        "Once, in the town of Tolben, there lived a man.",
    )
    ids = load_tokenizer("pocket-bct").encode(text)
    trace = begun(ids, model.config.n_ctx)
    for token in gpt_bounded_cache.generate(model, torch.tensor([ids]), 20, cache=cache):
        trace.step(int(token), cache)
    for step in trace.steps:
        recent = min(model.config.recent, step["n"])
        assert [*held(step).values()][-recent:] == [*range(step["n"] - recent, step["n"])]
        assert 0 <= sum(step["mass"]) <= step["n"]
    _, _, mass, *_ = cache.layers[step["layer"]]
    assert step["mass"] == pytest.approx(mass[0, 0, :, 0].tolist(), abs=1e-3)


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_pair_shows_whose_entries_are_whose(window: int | None) -> None:
    torch.manual_seed(0)
    teacher, student = (gpt_kv_cache.GPT(CONFIG).eval() for _ in range(2))
    pair = overfill.Pair(teacher, student, prompt(6))
    trace = begun(prompt(6)[0].tolist())
    for token in overfill.generate_refreshed(pair, 38, overfill.Periodic(8, window=window)):
        trace.step(int(token), pair)
    step, reading = trace.steps[-1], KVCache()
    mine = {first + i for first, count in step["teacher"] for i in range(count)}
    # the first layer's entries depend on the token and its position only
    teacher(torch.tensor([trace.ids[step["start"] : step["n"]]]), reading)
    same = (pair.cache.layers[0] == reading.layers[0]).all(-1).all(2)[:, 0].all(0)
    expected = {step["start"] + int(i) for i in same.nonzero()}
    assert expected == {t for t in mine if t >= step["start"]}
    replaced = [step["replaced"] for step in trace.steps if "replaced" in step]
    assert replaced[0] == [14 - (window or 8), 14] and len(replaced) == len(pair.refreshes)
    events = [event for step in trace.steps[1:] for event in step["events"]]
    assert any("handed over" in event for event in events)  # past the context


def test_turns_of_a_conversation_go_on_with_the_text() -> None:
    trace = begun([], 100)
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
    assert "reused" not in third and [*held(third).values()] == [4, 5, 6, 7, 8]


def data_of(path: Path) -> dict:
    return json.loads(re.search(r"const data = (.*);\n", path.read_text()).group(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "gpt_baseline",
        "gpt_kv_cache",
        "gpt_bounded_cache --memory bct",
        "gpt_bounded_cache --memory sinks --slots 12",
        "overfill write --policy periodic:8",
        "recycle chat --store STORE",
    ],
)
def test_scripts_write_a_page_of_what_they_print(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is Tolben?\nWho is Halek?\n"))
    page = tmp_path / "page.html"
    script, *more = words.replace("STORE", str(tmp_path / "store")).split()
    main = importlib.import_module(script).main
    monkeypatch.setattr("sys.argv", [f"{script}.py", *more])  # which the page names
    ran = run(main, *more, "--max-new-tokens", 20, "--trace", page)
    assert ran.code == 0 and f"[step by step: {page}]" in ran.out
    data = data_of(page)
    assert data["steps"][-1]["n"] + 1 == len(data["tokens"]) and script in data["title"]
    assert not re.search(r"(src|href)=|https?://|@import", page.read_text())  # from elsewhere
    if script == "recycle":
        assert any(step.get("reused") for step in data["steps"])
    else:
        assert "".join(data["tokens"]).strip()[:20] in ran.out


def test_text_cannot_break_out_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    evil = "<!--<script></script><b>&amp; null /* data */ h\u00e9llo \U0001f600"
    monkeypatch.setattr("sys.argv", ["x.py", evil])  # which the page names
    run(gpt_kv_cache.main, "--prompt", evil, "--max-new-tokens", 2, "--trace", out)
    assert out.read_text().count("</script>") == 1 == out.read_text().count("<script>")
    assert "".join(data_of(out)["tokens"]).startswith(evil)
    assert "<b>" not in out.read_text().partition("<style>")[0]


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
    ("module", "cache", "sees", "n_prompt", "n"),
    [
        (gpt_baseline, None, causal, 5, 40),
        (gpt_kv_cache, KVCache(), causal, 5, 40),
        (llama_kv_cache, KVCache(), causal, 5, 40),
        (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache(6, 2), windowed, 5, 12),
        (gpt_bounded_cache, gpt_bounded_cache.SlidingWindowCache(6, 2), windowed, 20, 12),
    ],
    ids=["no cache", "growing", "Llama", "ring", "ring, long prompt"],
)
@torch.no_grad()
def test_attention_is_that_of_an_attention_written_out(
    module: ModuleType, cache, sees, n_prompt: int, n: int, tmp_path: Path
) -> None:
    trace = traced(module, cache, n_prompt, n, tmp_path / "x.html")
    for step in trace.steps:
        tokens = [*range(step["start"], step["n"])]
        if cache is not None:
            tokens = [t for _, first, count in step["slots"] for t in range(first, first + count)]
        expected = written_out(trace, step, sees)
        for found, shares in zip(step["attention"], expected, strict=True):
            assert found == pytest.approx([1000 * shares[t] for t in tokens], abs=0.51)
    trace.write()
    assert not any(part._forward_pre_hooks for part in trace.model.modules()), "it watches no more"


@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("n", [5, 12, 60])
@torch.no_grad()
def test_attention_of_a_bct_is_that_of_its_recurrence(n: int, rule: str) -> None:
    torch.manual_seed(0)
    config = gpt_bounded_cache.BCTConfig(**vars(CONFIG), slots=3, recent=8, rule=rule)
    model, cache = sharp(gpt_bounded_cache.BCT(config)), gpt_bounded_cache.BoundedMemory()
    trace, fed = begun(prompt(n)[0].tolist()), []
    for block in model.h:
        block.memory.register_forward_pre_hook(lambda _, args: fed.append(args[:3]))
    trace.watch(model)
    model(prompt(n), cache)
    trace.step(1, cache)
    for layer, (x, q, k) in enumerate(fed):
        w, log_keep = model.h[layer].memory.writes(x)
        keys, mass = torch.zeros(2, 3, 8), torch.zeros(2, 3)
        for t in range(max(0, n - 8)):  # those before the recent ones are written, one by one
            keep = log_keep[0, :, t].exp()
            keys = keep[..., None] * keys + w[0, :, t, :, None] * k[0, :, t, None]
            mass = keep * mass + w[0, :, t]
        if rule == "sum":
            mass = torch.ones_like(mass)
        keys = torch.cat([keys / mass.clamp_min(1e-6)[..., None], k[0, :, -8:]], dim=1)
        scores = (keys @ q[0, :, -1, :, None])[..., 0] / 8**0.5
        scores[:, :3] += mass.clamp_min(1e-30).log() - 1e9 * (mass == 0)
        shares = 1000 * scores.softmax(dim=-1).mean(dim=0)
        assert trace.steps[0]["attention"][layer] == pytest.approx(shares[3:].tolist(), abs=0.51)
        assert trace.steps[0]["memory"][layer] == pytest.approx(float(shares[:3].sum()), abs=0.51)
