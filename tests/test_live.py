"""The page that runs the model in a browser computes what Python computes, and is a page that everybody can use."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from chapters.builder import live
from compress import QuantizedCache
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from support.statistics import kl
from tests.helpers import ROOT, offline_page

PAGE = ROOT / "chapters" / "live" / "index.html"
MODEL, TOKENIZER = "pocket:int8", load_tokenizer("pocket")  # what the page has
STORY = TOKENIZER.encode(corpus.document("test", 0).text)[:100]
PROMPT = "Halek lived in"
slow = pytest.mark.slow  # a browser


@pytest.fixture(scope="module")
def model() -> GPT:
    return load_model(MODEL, model_class=GPT)


def wait_for(page: Any, name: str, words: str) -> None:
    """Wait until the part of the page with this id has these words."""
    page.wait_for_function(f"document.getElementById('{name}').textContent.includes('{words}')")


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    with offline_page(browser) as page:
        yield page


@pytest.fixture
def live_page(tab: Any) -> Any:
    """The page, once it is ready; the text that it begins to write is stopped. It is loaded anew:
    nothing runs on from an earlier test."""
    tab.goto(PAGE.as_uri())
    tab.click("#stop")
    wait_for(tab, "prefix", "Read all")
    return tab


@pytest.fixture(scope="module")
def scripts(browser: Any) -> Iterator[Any]:
    """A page with the scripts' functions, and the model that they load."""
    with offline_page(browser) as page:
        page.goto(PAGE.as_uri())
        page.evaluate("globalThis.model = load_model(WEIGHTS)")
        yield page


def relative_error(found: list, expected: Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max() / expected.abs().max())


def computed(page: Any, cache: str, pieces: list[list[int]]) -> tuple[list, int, int]:
    """Return the logits after each piece of a text, which the page's model reads with a new cache, and the cache's
    length and bytes."""
    return page.evaluate(
        f"""pieces => {{
          const cache = {cache};
          const logits = pieces.map(ids => [...model.forward(ids, cache, true)[0]]);
          return [logits, cache.length, cache.nbytes];
        }}""",
        pieces,
    )


@torch.no_grad()
def expected(model: GPT, cache: KVCache, pieces: list[list[int]]) -> Tensor:
    return torch.stack([model(torch.tensor([ids]), cache)[0, -1] for ids in pieces])


def pieces_of(ids: list[int], *lengths: int) -> list[list[int]]:
    """Return a text in pieces of these lengths, and the rest token by token."""
    rest = [1] * (len(ids) - sum(lengths))
    return [piece.tolist() for piece in torch.tensor(ids).split([*lengths, *rest])]


def test_weights_are_those_of_the_checkpoint_in_eight_bits() -> None:
    assert live.WEIGHTS.read_text("utf-8") == live.weights_script()
    assert live.WEIGHTS.stat().st_size < 5_500_000


@slow
@torch.no_grad()
def test_texts_and_logits_are_those_of_python(scripts: Any, model: GPT) -> None:
    prompts = [corpus.document("test", number).text for number in range(1, 6)]
    prompts = [TOKENIZER.encode(text)[: 4 + 8 * number] for number, text in enumerate(prompts)]
    written = scripts.evaluate(
        "prompts => prompts.map(ids => [...generate(model, ids, 30)])", prompts
    )
    for ids, tokens in zip(prompts, written, strict=True):
        assert tokens == [int(token) for token in generate(model, torch.tensor([ids]), 30)]
    uncached = "ids => [...generate(model, ids, 10, null)]"
    assert scripts.evaluate(uncached, prompts[-1]) == written[-1][:10]
    found = scripts.evaluate("ids => model.forward(ids).map(row => [...row])", STORY)
    assert relative_error(found, model(torch.tensor([STORY]))[0]) < 1e-5


@slow
def test_the_tokenizer_is_tiktoken(scripts: Any) -> None:
    texts = [
        "Don't, they'll: I'VE 12345 x²!?  two  spaces \n\n\ta tab\n",
        "naïve 北京 🙂🙃 \u0085\u00a0\u200b\ufeff\x1c\u2028 end   ",
        "<|endoftext|>a<|endoftext|> b",
        "'s's 's s'\r\n\r\n ½ \u09ea ",
        "",
    ]
    for text in texts:
        ids = scripts.evaluate("text => tokenizer.encode(text)", text)
        assert ids == TOKENIZER.encode(text, allowed_special="all"), text
        assert scripts.evaluate("ids => tokenizer.texts(ids).join('')", ids) == text


CACHES = {
    "full": ("new KVCache()", KVCache),
    "window": ("new SlidingWindowCache(20)", partial(SlidingWindowCache, 20)),
    "sinks": ("new SlidingWindowCache(20, 4)", partial(SlidingWindowCache, 20, sinks=4)),
    "one": ("new SlidingWindowCache(1)", partial(SlidingWindowCache, 1)),
    "8": ("new QuantizedCache(8, 6)", partial(QuantizedCache, 8)),
    "2": ("new QuantizedCache(2, 6, 16, 5)", partial(QuantizedCache, 2, group=16, residual=5)),
}


@slow
@pytest.mark.parametrize("name", CACHES)
def test_caches_compute_what_those_of_python_compute(name: str, scripts: Any, model: GPT) -> None:
    code, new_cache = CACHES[name]
    pieces, cache = pieces_of(STORY, 7, 24, 25, 1, 26), new_cache()
    logits = expected(model, cache, pieces)
    # sums in another order may round a number that lies between two codes the other way
    tolerance = {"2": 1e-2, "8": 1e-4}.get(name, 1e-5)
    found, length, nbytes = computed(scripts, code, pieces)
    assert relative_error(found, logits) < tolerance
    assert [length, nbytes] == [len(STORY), cache.nbytes]


@slow
def test_a_failed_pass_and_truncate_leave_no_trace(scripts: Any, model: GPT) -> None:
    for code, _ in CACHES.values():
        differences = scripts.evaluate(
            f"""ids => {{
              const cache = {code}, other = {code}, runs = Object.assign(new Runs(), {{ model, runs: {{}} }});
              const read = (cache, ids) => [...model.forward(ids, cache, true)[0]];
              runs.runs.x = {{ ids, cache, chunk: 3 }};
              const counts = [runs.fail("x").entries.counted];
              const rows = [[read(cache, ids.slice(0, 9)), read(other, ids.slice(0, 9))]];
              counts.push(runs.fail("x").entries.counted);
              rows.push([read(cache, ids.slice(9, 12)), read(other, ids.slice(9, 12))]);
              cache.truncate(0);
              rows.push([read(cache, ids.slice(0, 9)), rows[0][1]]);
              return [counts, Math.max(...rows.flatMap(([a, b]) => a.map((logit, id) => Math.abs(logit - b[id]))))];
            }}""",
            STORY,
        )
        assert differences == [[0, 9], 0], code


@slow
@pytest.mark.parametrize("name", ["window", "2"])
@torch.no_grad()
def test_going_back_is_what_it_is_in_python(name: str, scripts: Any, model: GPT) -> None:
    """Also on a ring that is exactly full, after a pass that failed in its spare slot."""
    code, new_cache = CACHES[name]
    read, kept = (20, 13) if name == "window" else (90, 37)
    found = scripts.evaluate(
        f"""([ids, read, kept]) => {{
          const cache = {code}, runs = Object.assign(new Runs(), {{ model, runs: {{}} }});
          runs.runs.x = {{ ids, cache, chunk: 1 }};
          model.forward(ids.slice(0, read), cache);
          runs.fail("x");
          cache.truncate(kept);
          return [[...model.forward(ids.slice(kept, kept + 9), cache, true)[0]], cache.length, cache.nbytes];
        }}""",
        [STORY, read, kept],
    )
    cache = new_cache()
    model(torch.tensor([STORY[:read]]), cache)
    cache.truncate(kept)
    logits = model(torch.tensor([STORY[kept : kept + 9]]), cache, last_only=True)[0, 0]
    assert relative_error(found[0], logits) < {"2": 1e-2}.get(name, 1e-5)
    assert found[1:] == [len(cache), cache.nbytes]


@slow
def test_both_sides_write_the_text_of_the_command_line(live_page: Any, model: GPT) -> None:
    live_page.fill("#count", "25")
    live_page.click("#write")
    wait_for(live_page, "written", " ")
    ids = TOKENIZER.encode(PROMPT)
    tokens = [int(token) for token in generate(model, torch.tensor([ids]), 25)]
    for side in ("none", "full"):
        assert live_page.text_content(f"#text-{side}") == TOKENIZER.decode([*ids, *tokens])
    assert "25 tokens after 4:" in live_page.text_content("#written")
    assert "The same text: yes" in live_page.text_content("#written")
    n, bytes_a_token = len(ids) + 24, 2 * 6 * 192 * 4
    assert f"{n * bytes_a_token:,}" in live_page.text_content("#figures-full")
    assert f"{n} of {n}" in live_page.text_content("#figures-none")
    assert f"1 of {n}" in live_page.text_content("#figures-full")


@slow
def test_writing_can_be_stopped_and_begun_again(live_page: Any) -> None:
    for _ in range(2):
        live_page.fill("#count", "400")
        live_page.click("#write")
        written = "Number(document.querySelector('#figures-full dd')?.textContent ?? 0)"
        begun = "document.getElementById('written').textContent === ''"
        live_page.wait_for_function(f"{begun} && {written} > 2")
        live_page.click("#stop")
        live_page.wait_for_function("!document.getElementById('write').disabled")
        said = live_page.text_content("#written")
        assert said.startswith("Stopped. ") and "The same text: yes" in said


@slow
def test_a_pass_is_shown_as_it_was(live_page: Any, model: GPT) -> None:
    def states() -> list[str]:
        return live_page.eval_on_selector_all(
            "#cells .cell", "cells => cells.map(c => c.classList[1])"
        )

    def layers() -> list[str]:
        return live_page.locator("#layers div > span:last-child").all_text_contents()

    begin_to_look(live_page, "full", "3")
    assert step(live_page, 1) == ["new"] * 3 + ["unread"]
    live_page.click("#next")
    wait_for(live_page, "looked", "Pass 2")
    assert states() == ["held"] * 3 + ["new", "written"]
    # the shades are the attention of a layer's head
    attended, ids = {}, torch.tensor([TOKENIZER.encode(PROMPT)])
    hook = model.h[2].attn.register_forward_pre_hook(
        lambda _, args: attended.update(q=args[0], k=args[1])
    )
    with torch.no_grad():
        model(ids)
    hook.remove()
    scores = attended["q"][0, 4, -1] @ attended["k"][0, 4].T / 32**0.5
    shares = scores.softmax(dim=-1).tolist()
    live_page.select_option("#layer", "2")
    live_page.select_option("#head", "4")
    titles = live_page.eval_on_selector_all("#cells .cell", "cells => cells.map(c => c.title)")
    percent = [float(title.split("attention ")[1].removesuffix("%")) for title in titles[:-1]]
    assert percent == pytest.approx([100 * share for share in shares], abs=0.06)
    live_page.click("#fail")
    wait_for(live_page, "looked", "failed")
    assert states() == ["held"] * 4 + ["unread"]
    assert layers() == ["5, counted 4"] * 3 + ["4, counted 4"] * 3
    live_page.locator("#next").focus()
    live_page.keyboard.press("ArrowRight")
    wait_for(live_page, "looked", "Pass 4")
    assert layers() == ["5, counted 5"] * 6


def step(page: Any, number: int) -> list[str]:
    """Go through passes, up to the number of one; return what became of each token."""
    for count in range(1, number + 1):
        page.click("#next")
        wait_for(page, "looked", f"Pass {count} ")
    return page.eval_on_selector_all("#cells .cell", "cells => cells.map(c => c.classList[1])")


def begin_to_look(page: Any, kind: str, tokens_a_pass: str = "all") -> None:
    page.select_option("#look-kind", "full")
    page.select_option("#chunk", label=tokens_a_pass)
    page.select_option("#look-kind", kind)
    page.click("#again")
    wait_for(page, "looked", "Nothing")


@slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinks", "bits:2"])
def test_a_smaller_cache_parts_where_python_parts(kind: str, live_page: Any, model: GPT) -> None:
    ids, n = TOKENIZER.encode(PROMPT), 75
    new_cache = {
        "sinks": partial(SlidingWindowCache, 32, sinks=4),
        "bits:2": partial(QuantizedCache, 2),
    }[kind]
    exact = [int(token) for token in generate(model, torch.tensor([ids]), n)]
    tokens = [int(token) for token in generate(model, torch.tensor([ids]), n, cache=new_cache())]
    live_page.select_option("#small-kind", kind)
    live_page.fill("#small-count", str(n))
    live_page.click("#small-write")
    wait_for(live_page, "departed", " ")
    assert live_page.text_content("#text-exact") == TOKENIZER.decode([*ids, *exact])
    assert live_page.text_content("#text-small") == TOKENIZER.decode([*ids, *tokens])
    same = next(i for i in range(n) if exact[i] != tokens[i])
    assert f"diverge after {same} new token" in live_page.text_content("#departed")
    text = [*ids, *tokens[:-1]]
    small = expected(model, new_cache(), pieces_of(text, len(ids)))
    full = expected(model, KVCache(), pieces_of(text, len(ids)))
    mean = live_page.locator("#figures-small dd").last.text_content()
    assert float(mean) == pytest.approx(float(kl(full, small).mean()), rel=0.02, abs=1e-4)


@slow
def test_a_changed_text_is_valid_up_to_the_change(live_page: Any, model: GPT) -> None:
    text = live_page.input_value("#edited")
    changed = text.replace("sunny", "rainy")
    old, new = TOKENIZER.encode(text), TOKENIZER.encode(changed)
    kept = next(i for i in range(len(new)) if old[i] != new[i])
    live_page.fill("#edited", changed)
    assert f"{kept} stay valid and {len(old) - kept} don't." in live_page.text_content("#prefix")
    live_page.click("#reread")
    wait_for(live_page, "prefix", "Kept")
    said = live_page.text_content("#prefix")
    assert f"Kept {kept} and read {len(new) - kept} tokens" in said and "same either way" in said
    (token,) = generate(model, torch.tensor([new]), 1)
    assert f'"{TOKENIZER.decode([int(token)])}"' in said


@slow
def test_bad_input_is_refused_in_a_sentence(live_page: Any) -> None:
    live_page.fill("#count", "0")
    live_page.click("#write")
    said = "New tokens: 0 was given; whole numbers from 1 to 1,000 are allowed."
    assert live_page.text_content("#written") == said
    live_page.fill("#count", "1000")
    live_page.fill("#prompt", "word " * 400)
    live_page.click("#write")
    assert "and 1,000 new: the context holds 1,280" in live_page.text_content("#written")
    live_page.fill("#prompt", "")
    live_page.click("#small-write")
    assert "The prompt is empty" in live_page.text_content("#departed")


@slow
def test_what_is_typed_is_only_text(live_page: Any) -> None:
    typed = (
        "<img src=http://nowhere.invalid/x onerror=alert(1)><script>document.title='no'</script>"
    )
    live_page.fill("#prompt", typed)
    live_page.fill("#edited", typed)
    live_page.fill("#count", "5")
    live_page.click("#write")
    wait_for(live_page, "written", " ")
    begin_to_look(live_page, "full")
    step(live_page, 1)
    assert live_page.locator("img, [onerror], section script").count() == 0
    assert live_page.title() == "The KV cache at work"
    assert live_page.text_content("#text-full").startswith(typed)
