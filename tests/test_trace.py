"""`--trace`: the page says what really happened in every step."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
import overfill
import recycle
from gpt_kv_cache import GPTConfig, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from support.tracing import Trace, runs
from tests.helpers import class_of, of_kind

ROOT = Path(__file__).resolve().parent.parent
CONFIG = GPTConfig(vocab_size=1000, n_ctx=32, n_layer=2, n_head=2, n_embd=16)


def prompt(n: int) -> torch.Tensor:
    return torch.randint(1000, (1, n), generator=torch.Generator().manual_seed(0))


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """Return a new model, its attention far from uniform."""
    for block in model.h:
        block.attn.c_attn.weight.data *= 15
    return model.eval()


def traced(module: object, cache: object, n_prompt: int, n: int, path: Path) -> Trace:
    torch.manual_seed(0)
    config = of_kind("Llama", CONFIG) if module is llama_kv_cache else CONFIG
    model = sharp(class_of(config)(config) if module is llama_kv_cache else module.GPT(config))
    trace = Trace("title", load_tokenizer("pocket"), CONFIG.n_ctx, path, gpt_baseline.context_start)
    trace.begin(prompt(n_prompt)[0].tolist())
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


def test_without_a_cache_everything_is_computed_again(tmp_path: Path) -> None:
    steps = traced(gpt_baseline, None, 5, 40, tmp_path / "x.html").steps
    assert [step["fed"] for step in steps[:3]] == [(0, 5), (0, 6), (0, 7)]
    for step in steps:
        assert step["bytes"] == 0 and "slots" not in step
        assert step["fed"] == (gpt_baseline.context_start(step["n"], 32), step["n"])


def test_with_a_cache_every_token_is_computed_once_until_the_context_is_full(
    tmp_path: Path,
) -> None:
    cache = KVCache()
    steps = traced(gpt_kv_cache, cache, 5, 40, tmp_path / "x.html").steps
    fed = [step["fed"] for step in steps]
    assert fed[:3] == [(0, 5), (5, 6), (6, 7)]
    full = next(i for i, step in enumerate(steps) if step["start"])
    assert (
        steps[full]["n"] == 33
        and steps[full]["fed"] == (16, 33)
        and "32 tokens is full" in steps[full]["events"][0]
    )
    assert fed[full + 1] == (33, 34)
    for step in steps:
        assert [*held(step).values()] == [*range(step["start"], step["n"])] and step["size"] == len(
            held(step)
        )
    assert steps[-1]["bytes"] == cache.nbytes


def test_a_ring_forgets_the_oldest_and_keeps_sinks(tmp_path: Path) -> None:
    cache = gpt_bounded_cache.SlidingWindowCache(6, 2)
    steps = traced(gpt_bounded_cache, cache, 12, 15, tmp_path / "x.html").steps
    for step in steps:
        assert {*held(step).values()} == {0, 1, *range(step["n"] - 6, step["n"])} and step[
            "size"
        ] == 9
        assert held(step)[2 + (step["n"] - 1 - 2) % 7] == step["n"] - 1
        assert step["evicted"] == [step["n"] - 7], "the spare slot holds what has left the window"


def test_bct_shows_recent_tokens_and_the_mass_of_slots(tmp_path: Path) -> None:
    model, tokenizer = (
        load_model("pocket-bct", model_class=gpt_bounded_cache.BCT),
        load_tokenizer("pocket-bct"),
    )
    cache, trace = (
        gpt_bounded_cache.BoundedMemory(),
        Trace("title", tokenizer, model.config.n_ctx, tmp_path / "x.html"),
    )
    ids = torch.tensor([tokenizer.encode("Once, in the town of Tolben, there lived a man.")])
    trace.begin(ids[0].tolist())
    for token in gpt_bounded_cache.generate(model, ids, 20, cache=cache):
        trace.step(int(token), cache)
    R, M = model.config.recent, model.config.slots
    for step in trace.steps:
        recent = min(R, step["n"])
        assert [*held(step).values()][-recent:] == [*range(step["n"] - recent, step["n"])]
        assert len(step["mass"]) == M and 0 <= sum(step["mass"]) <= step["n"]
    _, _, mass, *_ = cache.layers[trace.steps[-1]["layer"]]
    assert trace.steps[-1]["mass"] == pytest.approx(mass[0, 0, :, 0].tolist(), abs=1e-3)


@pytest.mark.parametrize("window", [None, 3])
def test_a_pair_shows_whose_entries_are_whose(window: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher, student = (gpt_kv_cache.GPT(CONFIG).eval() for _ in range(2))
    pair = overfill.Pair(teacher, student, prompt(6))
    trace = Trace("title", load_tokenizer("pocket"), CONFIG.n_ctx, tmp_path / "x.html")
    trace.begin(prompt(6)[0].tolist())
    for token in overfill.generate_refreshed(pair, 38, overfill.Periodic(8, window=window)):
        trace.step(int(token), pair)
    for step in trace.steps:
        mine = {first + i for first, count in step["teacher"] for i in range(count)}
        with torch.no_grad():  # the first layer's entries depend on the token and its position only
            reading = KVCache()
            teacher(torch.tensor([trace.ids[step["start"] : step["n"]]]), reading)
        assert mine <= {*range(step["n"])}
        if step is trace.steps[-1]:
            same = (pair.cache.layers[0] == reading.layers[0]).all(-1).all(2)[:, 0].all(0)
            assert {step["start"] + i for i, equal in enumerate(same.tolist()) if equal} == {
                t for t in mine if t >= step["start"]
            }
    replaced = [step["replaced"] for step in trace.steps if "replaced" in step]
    assert replaced[0] == [14 - (window or 8), 14] and len(replaced) == len(pair.refreshes)
    assert any(
        "handed over" in event for step in trace.steps[1:] for event in step["events"]
    )  # past the context


def test_turns_of_a_conversation_go_on_with_the_text(tmp_path: Path) -> None:
    trace = Trace("title", load_tokenizer("pocket"), 100, tmp_path / "x.html")
    trace.begin([1, 2, 3])
    trace.step(
        4,
        SimpleNamespace(
            nbytes=1, next_pos=3, pos=torch.arange(3), layers=[torch.empty(2, 1, 1, 3, 1)]
        ),
    )
    trace.begin([1, 2, 3, 4, 5, 6], reused=3)
    trace.step(
        7,
        SimpleNamespace(
            nbytes=2, next_pos=6, pos=torch.arange(6), layers=[torch.empty(2, 1, 1, 6, 1)]
        ),
    )
    assert trace.steps[1]["reused"] == (0, 3) and trace.steps[1]["fed"] == (3, 6)
    assert "3 of 6 tokens were in a cache" in trace.steps[1]["events"][0]
    trace.begin([5, 6, 7, 8, 9], reused=0)  # the first turn is forgotten
    trace.step(
        10,
        SimpleNamespace(
            nbytes=2, next_pos=5, pos=torch.arange(5), layers=[torch.empty(2, 1, 1, 5, 1)]
        ),
    )
    assert trace.ids == [*range(1, 11)]
    assert (
        trace.steps[2]["start"] == 4
        and trace.steps[2]["fed"] == (4, 9)
        and "reused" not in trace.steps[2]
    )
    assert [*held(trace.steps[2]).values()] == [4, 5, 6, 7, 8]


def test_runs() -> None:
    assert runs([]) == [] and runs([3, 4, 5, 0, 1, 7]) == [(3, 3), (0, 2), (7, 1)]


def data_of(path: Path) -> dict:
    return json.loads(re.search(r"const data = (.*);\n", path.read_text()).group(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["gpt_baseline.py"],
        ["gpt_kv_cache.py"],
        ["gpt_bounded_cache.py", "--memory", "bct"],
        ["gpt_bounded_cache.py", "--memory", "sinks", "--slots", "12"],
        ["overfill.py", "write", "--policy", "periodic:8"],
        ["recycle.py", "chat", "--store"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_scripts_write_a_page_of_what_they_print(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    words = words + [str(tmp_path / "store")] * (words[-1] == "--store")
    result = subprocess.run(
        [sys.executable, *words, "--max-new-tokens", "20", "--trace", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input="Where is Tolben?\nWho is Halek?\n",
    )
    assert result.returncode == 0, result.stderr
    assert f"[step by step: {out}]" in result.stdout
    data = data_of(out)
    assert "".join(data["tokens"]).strip()[:20] in result.stdout or words[0] == "recycle.py"
    assert data["steps"][-1]["n"] + 1 == len(data["tokens"]) and words[0] in data["title"]
    assert not re.search(
        r"(src|href)=|https?://|@import", out.read_text()
    )  # nothing from elsewhere
    if words[0] == "recycle.py":
        assert any(step.get("reused") for step in data["steps"])


def test_text_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    evil = "<!--<script></script><b>&amp; null /* data */ h\u00e9llo \U0001f600"
    gpt_kv_cache.main(["--prompt", evil, "--max-new-tokens", "2", "--trace", str(out)])
    assert out.read_text().count("</script>") == 1 == out.read_text().count("<script>")
    assert "".join(data_of(out)["tokens"]).startswith(evil)
    assert "<b>" not in out.read_text().partition("<style>")[0]


@pytest.mark.parametrize(
    ("main", "words", "culprit"),
    [
        (gpt_kv_cache.main, ["--trace", "."], ". is not a regular file"),
        (recycle.main, ["--trace", "x.html"], "has no --trace"),
        (overfill.main, ["--trace", "x.html"], "demo has no --trace"),
        (gpt_bounded_cache.main, ["--trace", "x.html"], "give --memory too"),
        (gpt_kv_cache.main, ["--trace", "nowhere/x.html"], "nowhere is not a folder"),
    ],
)
def test_bad_input_gets_one_sentence(
    main: Callable, words: list[str], culprit: str, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and culprit in printed and len(printed.strip().splitlines()) == 1


def written_out(
    trace: Trace, step: dict, sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[dict]:
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
        w = (
            (q @ k.mT / q.size(3) ** 0.5)
            .masked_fill(~sees(pos[:, None], pos), -torch.inf)
            .softmax(dim=-1)
        )
        x = x + block.attn.c_proj((w @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
        shares.append(dict(enumerate(w[0, :, -1].mean(dim=0).tolist(), step["start"])))
    return shares


@pytest.mark.parametrize("kind", ["no cache", "growing", "Llama", "ring", "ring, long prompt"])
@torch.no_grad()
def test_attention_is_that_of_an_attention_written_out(kind: str, tmp_path: Path) -> None:
    modules = {"no cache": gpt_baseline, "growing": gpt_kv_cache, "Llama": llama_kv_cache}
    module = modules.get(kind, gpt_bounded_cache)
    cache = {"no cache": None, "growing": KVCache(), "Llama": KVCache()}.get(
        kind, gpt_bounded_cache.SlidingWindowCache(6, 2)
    )
    sees = lambda q, k: (k <= q) & ("ring" not in kind or (k > q - 6) | (k < 2))  # noqa: E731
    trace = traced(
        module,
        cache,
        20 if "long" in kind else 5,
        12 if "ring" in kind else 40,
        tmp_path / "x.html",
    )
    for step in trace.steps:
        tokens = [*range(step["start"], step["n"])]
        if cache is not None:
            tokens = [t for _, first, count in step["slots"] for t in range(first, first + count)]
        expected = written_out(trace, step, sees)
        assert len(step["attention"]) == len(expected) == 2
        for found, shares in zip(step["attention"], expected, strict=True):
            assert len(found) == len(tokens) and sum(found) == pytest.approx(1000, abs=20)
            assert found == pytest.approx([1000 * shares[t] for t in tokens], abs=0.51)
    trace.write()
    assert not any(module._forward_pre_hooks for module in trace.model.modules()), (
        "a written trace watches no more"
    )


@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("n", [5, 12, 60])
@torch.no_grad()
def test_attention_of_a_bct_is_that_of_its_recurrence(n: int, rule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = gpt_bounded_cache.BCTConfig(**vars(CONFIG), slots=3, recent=8, rule=rule)
    model, cache = sharp(gpt_bounded_cache.BCT(config)), gpt_bounded_cache.BoundedMemory()
    trace, fed = Trace("title", load_tokenizer("pocket"), CONFIG.n_ctx, tmp_path / "x.html"), {}
    for layer, block in enumerate(model.h):
        block.memory.register_forward_pre_hook(
            lambda _, args, layer=layer: fed.update({layer: args[:4]})
        )
    trace.watch(model)
    trace.begin(prompt(n)[0].tolist())
    model(prompt(n), cache)
    trace.step(1, cache)
    for layer, block in enumerate(model.h):
        x, q, k, _ = fed[layer]
        w, log_keep = block.memory.writes(x)
        keys, mass = torch.zeros(2, 3, 8), torch.zeros(2, 3)
        for t in range(
            max(0, n - 8)
        ):  # the tokens before the recent ones are written to the slots, one by one
            keep = log_keep[0, :, t].exp()
            keys = keep[..., None] * keys + w[0, :, t, :, None] * k[0, :, t, None]
            mass = keep * mass + w[0, :, t]
        if rule == "sum":
            mass = torch.ones_like(mass)
        scores = (
            torch.cat([(keys / mass.clamp_min(1e-6)[..., None]), k[0, :, -8:]], dim=1)
            @ q[0, :, -1, :, None]
        )
        scores = scores[..., 0] / 8**0.5
        scores[:, :3] += mass.clamp_min(1e-30).log() - 1e9 * (mass == 0)
        shares = 1000 * scores.softmax(dim=-1).mean(dim=0)
        assert trace.steps[0]["attention"][layer] == pytest.approx(shares[3:].tolist(), abs=0.51)
        assert trace.steps[0]["memory"][layer] == pytest.approx(float(shares[:3].sum()), abs=0.51)


def test_passes_in_training_mode_are_not_recorded_and_not_disturbed(tmp_path: Path) -> None:
    model, trace = (
        sharp(gpt_kv_cache.GPT(CONFIG)),
        Trace("title", load_tokenizer("pocket"), 32, tmp_path / "x.html"),
    )
    expected = model(prompt(5))
    trace.watch(model)
    assert model.train()(prompt(5)).equal(expected) and not trace.calls  # no dropout in this config
    assert model.eval()(prompt(5)).equal(expected) and [*trace.calls] == [0, 1]
