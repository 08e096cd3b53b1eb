"""The two ridge regressions against references, summary tokens that are exact where they must be, an exact swap."""

import math
import random
import re
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import projector as module
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from projector import (
    Compressor,
    Layout,
    Library,
    Projector,
    attention_output,
    cache_of_summary,
    fit_head_map,
    generate_warm,
    prefill,
    tail_queries,
)
from support import statistics
from support.encoders import PairEncoder
from support.regression import PENALTIES, cross_validate, ridge
from tests.helpers import of_kind, refused, start
from tests.test_equivalence import model_of

CONFIG = GPTConfig(vocab_size=50, n_ctx=96, n_layer=3, n_head=2, n_embd=16)
MODELS = {"learned": model_of(CONFIG), "grouped": model_of(of_kind("Llama", CONFIG))}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def as_ids(tokens: Iterable[Tensor]) -> list[int]:
    return [int(token) for token in tokens]


# --- Ridge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "features"), [(5, 40), (40, 5), (12, 12), (1, 3), (3, 1)])
@pytest.mark.parametrize("penalty", [1e-6, 0.1, 10.0])
def test_ridge_solves_the_normal_equations(n: int, features: int, penalty: float) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, 3, n, features, generator=generator, dtype=torch.double)
    y = torch.randn(2, 3, n, 4, generator=generator, dtype=torch.double)
    unit = x.square().sum((-2, -1), keepdim=True) / features
    penalised = x.mT @ x + penalty * unit * torch.eye(features, dtype=torch.double)
    torch.testing.assert_close(penalised @ ridge(x, y, penalty), x.mT @ y)


def test_cross_validation_keeps_families_together_and_finds_the_least_error() -> None:
    groups = [f"family {i // 3}" for i in range(30)]
    seen: list[int] = []

    def error(train: Tensor, test: Tensor, penalty: float) -> float:
        assert not {groups[i] for i in train} & {groups[i] for i in test}
        assert len(train) + len(test) == 30
        seen.extend(test.tolist())
        return abs(math.log10(penalty) + 2)

    assert cross_validate(error, groups) == 1e-2
    assert sorted(seen) == sorted([*range(30)] * len(PENALTIES))
    with pytest.raises(ValueError, match=r"3.*got 2"):
        cross_validate(error, ["a", "a", "b"])


# --- Stage 1 --------------------------------------------------------------------------------------------------------


def test_a_prefill_keeps_the_last_output_and_the_queries_of_a_tail(model: nn.Module) -> None:
    exact = prefill(model, prompt(80))
    close(model.head(exact.hidden[None, None])[0, 0], exact.logits)
    group = exact.q.size(1) // exact.kv.size(2)
    assert tail_queries(exact, 64).shape == (3, 2, 64 * group, 8)


def test_the_map_in_the_span_is_an_optimum_of_all_dense_maps() -> None:
    N, F, m, D = 7, 30, 2, 3
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    x = draw(N, F)
    q, out = draw(N, 2, D), draw(N, 2, D)
    start = draw(N, m, 2 * D)

    def loss_of(weight: Tensor, constant: Tensor) -> Tensor:
        """The source's loss, of a dense map (F, m * 2 D), in the units of fit_head_map()."""
        k, v = ((x @ weight).unflatten(1, constant.shape) + constant).chunk(2, -1)
        got = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
        error = (got - out).square().sum() / out.square().sum()
        return error + 0.1 * x.square().sum() / len(x) ** 2 * weight.square().sum()

    weight, constant = fit_head_map(x, q, out, start, penalty=0.1, steps=2000)
    found = [weight.requires_grad_(), constant.requires_grad_()]
    gradients = torch.autograd.grad(loss_of(*found), found)  # also outside of the span
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients)


@pytest.fixture(scope="module", params=MODELS)
def compressed(request: pytest.FixtureRequest) -> tuple[Compressor, list[module.Prefill]]:
    """Stage 1 of 3 summary tokens, and the 12 prompts of 18 to 24 tokens that it was fitted on."""
    model = MODELS[request.param]
    prompts = [prefill(model, prompt(18 + i % 7, seed=i)) for i in range(12)]
    return Compressor(prompts, 3, 1e-4), prompts


def test_stage_1_reads_its_own_prompts_as_their_caches_are_read(compressed: tuple) -> None:
    compressor, prompts = compressed
    summaries = compressor(prompts)
    assert summaries.shape == (12, 3, 2, 2, 3, 8)
    assert compressor.weight.shape == (3, 2, 23 * 16, 3 * 16)
    for exact, summary in zip(prompts, summaries, strict=True):
        got = attention_output(tail_queries(exact), *summary.unbind(1))
        k, v = exact.kv[..., :-1, :].unbind(1)
        raw = exact.q[:, :, -1].unflatten(1, (2, -1)) @ k.mT / math.sqrt(8)
        close(got, raw.softmax(-1) @ v, 0.2)


def test_stage_1_refuses_what_it_has_no_columns_for(compressed: tuple) -> None:
    compressor, prompts = compressed
    model = prompts[0].model
    with pytest.raises(ValueError, match="24 tokens before its last, the map's longest 23"):
        compressor([prefill(model, prompt(25))])
    with pytest.raises(ValueError, match="3 summary tokens can't stand for 2 tokens"):
        Compressor([prefill(model, prompt(3))], 3, 0.1)


# --- Stage 2 --------------------------------------------------------------------------------------------------------


def some_summaries(n: int, m: int = 2) -> Tensor:
    return torch.randn(n, 2, 2, 3, m, 4, generator=torch.Generator().manual_seed(0))


def test_a_linear_relation_is_found_per_head_and_a_large_penalty_gives_the_mean() -> None:
    x = some_summaries(200)
    turn = torch.linalg.qr(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(3)))[0]
    flat = x.permute(0, 1, 3, 2, 4, 5).flatten(3)  # (N, L, H, F)
    y = torch.einsum("nlhf,hfg->nlhg", flat, turn) + 0.7  # another map for every head
    y = y.view(200, 2, 3, 2, 2, 4).permute(0, 1, 3, 2, 4, 5)
    fitted = Projector(x[:150], y[:150], 1e-4)
    close(fitted(x[150:]), y[150:], 1e-2)
    heavy = Projector(x, y, 1e12)(x[:3])
    means = y.mean(0).expand(3, *y.shape[1:])
    close(heavy, means, 1e-3)


def test_saved_maps_come_back_exactly(tmp_path: Path) -> None:
    model, x, path = MODELS["grouped"], some_summaries(20), tmp_path / "maps.safetensors"
    prompts = [prefill(model, prompt(n, n)) for n in (6, 8, 9)]
    compressor = Compressor(prompts, 3, 1e-4, steps=2)
    compressor.save(path)
    again = Compressor.load(path, model)
    assert torch.equal(again(prompts), compressor(prompts))
    assert float(again.penalty) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="another model or dtype"):
        Compressor.load(path, model_of(of_kind("Llama", CONFIG), 1))
    with pytest.raises(ValueError, match="no projector: it holds constant, mean"):
        Projector.load(path)
    projector = Projector(x[:10], x[10:], 0.1)
    projector.save(path)
    again = Projector.load(path)
    assert torch.equal(again(x), projector(x)) and float(again.penalty) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no compressor: it holds mean, offset"):
        Compressor.load(path, model)


# --- The swap -------------------------------------------------------------------------------------------------------


def warm_cache(model: nn.Module, ids: list[int], layout: Layout, seed: int = 5) -> KVCache:
    """A cache of quite another prompt: tokens emitted from it are wrong."""
    other = prefill(model, prompt(layout.m, seed))
    return cache_of_summary(model, other.kv, layout.tail_position(len(ids)))


def warm(model: nn.Module, ids: list[int], n: int, layout: Layout) -> Iterator[Tensor]:
    """Tokens after a warm start from summary tokens and the tail of ids."""
    return generate_warm(model, torch.tensor([ids]), warm_cache(model, ids, layout), layout.tail, n)


@pytest.mark.parametrize("true_positions", [True, False])
@pytest.mark.parametrize("length", [40, 90])  # the second goes on past the context
def test_identity_of_all_tokens_after_the_swap(
    model: nn.Module, length: int, true_positions: bool
) -> None:
    ids, layout = prompt(length), Layout(3, 2, true_positions=true_positions)
    alone = warm_cache(model, ids, layout)
    stand_in = torch.tensor([[*([0] * len(alone)), *ids[-2:]]])
    first = as_ids(generate(model, stand_in, 1, cache=alone))
    rest = as_ids(generate(model, torch.tensor([ids + first]), 11))
    assert as_ids(warm(model, ids, 12, layout)) == first + rest


def test_tokens_come_from_the_warm_cache_until_the_exact_one_is_ready(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_read = module.prefilled_cache, threading.Event()

    def wait_and_read(*args: object) -> KVCache:
        may_read.wait()
        return read(*args)

    ids, layout, text = prompt(40), Layout(3, 2), torch.tensor([prompt(40)])
    alone = warm_cache(model, ids, layout)
    stand_in = torch.tensor([[*([0] * len(alone)), *ids[-2:]]])
    from_summary = as_ids(generate(model, stand_in, 9, cache=alone))
    assert [*generate_warm(model, text, warm_cache(model, ids, layout), 2, 0)] == []
    running = generate_warm(model, text, warm_cache(model, ids, layout), 2, 9, until_ready=True)
    monkeypatch.setattr(module, "prefilled_cache", wait_and_read)
    written = [int(next(running)) for _ in range(4)]
    may_read.set()
    written += as_ids(running)
    possible = []
    for n in range(4, 10):  # tokens before the swap
        before = torch.tensor([ids + from_summary[:n]])
        possible.append(from_summary[:n] + as_ids(generate(model, before, 9 - n)))
    assert written in possible


def test_errors_of_the_thread_are_seen_and_a_full_context_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> KVCache:
        raise RuntimeError("out of memory")

    model, layout = MODELS["learned"], Layout(2)
    running = warm(model, prompt(30), 5, layout)
    monkeypatch.setattr(module, "prefilled_cache", fail)
    next(running)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(running)
    with pytest.raises(ValueError, match=r"96 tokens .* context, 96"):
        next(generate_warm(model, torch.tensor([prompt(96)]), KVCache(), 1, 4))


# --- The library ----------------------------------------------------------------------------------------------------

TOWNS = ["Tolben", "Marwick", "Lindral", "Ospen", "Hexley", "Foxham"]
TEXTS = [f"Question: Which river does {town} stand on?\nAnswer:" for town in TOWNS]


@pytest.fixture(scope="module")
def pocket() -> tuple:
    return load_model("pocket", model_class=GPT), load_tokenizer("pocket")


@pytest.fixture
def library(pocket: tuple) -> Library:
    model, tokenizer = pocket
    again = [f"Question: Tell me the river on which {town} stands.\nAnswer:" for town in TOWNS]
    encoder = PairEncoder.fit(tokenizer, TEXTS + again, TOWNS * 2)
    prompts = [prefill(model, tokenizer.encode(text)) for text in TEXTS]
    summaries = torch.stack([exact.kv[..., :2, :] for exact in prompts])
    return Library(model, Layout(2, tail=3), encoder, TEXTS, summaries, threshold=0.3)


def test_a_prompt_that_is_added_is_found(library: Library, pocket: tuple) -> None:
    model, tokenizer = pocket
    fewer = Library(model, library.layout, library.encoder, TEXTS[:3], library.summaries[:3])
    with pytest.raises(ValueError, match="shape"):
        fewer.add(TEXTS[3], library.summaries[3, :1])
    for text, summary in zip(TEXTS[3:], library.summaries[3:], strict=True):
        fewer.add(text, summary)
    fewer.threshold = library.threshold
    assert same(fewer, library, tokenizer) and fewer.name_counts == library.name_counts
    empty = Library(model, library.layout, library.encoder, [], library.summaries[:0])
    empty.add(TEXTS[4], library.summaries[4])
    assert empty.nearest(ASKED.format("Hexley"))[0] == 0
    fewer.shared_chars = 10
    with pytest.raises(ValueError, match="must share its first 10 characters"):
        fewer.add("Which river?", library.summaries[0])


ASKED = "Question: What is the name of the river at {}?\nAnswer:"


def started(library: Library, text: str, tokenizer: object) -> KVCache | None:
    return library.warm_start(text, tokenizer.encode(text))


def test_a_start_is_of_the_most_similar_prompt_or_cold(library: Library, pocket: tuple) -> None:
    model, tokenizer = pocket
    asked = ASKED.format("Ospen")
    found, similarity = library.nearest(asked)
    assert TOWNS[found] == "Ospen" and 0.3 < similarity <= 1.0001
    cache = started(library, asked, tokenizer)
    assert len(cache) == 2 and int(cache.positions(1)) == len(tokenizer.encode(asked)) - 3
    assert all(map(torch.equal, (kv[:, 0] for kv in cache.layers), library.summaries[found]))
    library.threshold = similarity + 0.01
    assert started(library, asked, tokenizer) is None
    assert library.warm_start("", []) is None
    empty = Library(model, Layout(1), library.encoder, [], torch.empty(0))
    assert empty.nearest(asked) == (-1, -math.inf) and started(empty, asked, tokenizer) is None
    with pytest.raises(ValueError, match="2 texts, 6 summaries"):
        Library(model, Layout(2, 3), library.encoder, TEXTS[:2], library.summaries)


def test_with_match_names_a_stored_prompt_has_the_same_names(
    library: Library, pocket: tuple
) -> None:
    library.match_names = True
    assert TOWNS[library.nearest(ASKED.format("Hexley"))[0]] == "Hexley"
    assert library.nearest(ASKED.format("Nettlebridge")) == (-1, -math.inf)
    assert library.nearest("which river is it?")[0] >= 0  # no name, nothing to guard


def same(a: Library, b: Library, tokenizer: object) -> bool:
    asked = ASKED.format("Foxham")
    x, y = started(a, asked, tokenizer), started(b, asked, tokenizer)
    return y is not None and all(map(torch.equal, x.layers, y.layers))


def test_a_saved_library_comes_back(library: Library, pocket: tuple, tmp_path: Path) -> None:
    model, tokenizer = pocket
    library.match_names = True
    library.save(tmp_path)
    again = Library.load(model, tokenizer, tmp_path)
    assert same(library, again, tokenizer)
    assert again.match_names and again.layout == library.layout
    assert (again.threshold, again.texts) == (library.threshold, TEXTS)
    half = load_model("pocket", model_class=GPT, dtype=torch.float16)
    with pytest.raises(ValueError, match="another model"):
        Library.load(half, tokenizer, tmp_path)
    with pytest.raises(FileNotFoundError):
        Library.load(model, tokenizer, tmp_path / "nowhere")


def test_a_damaged_library_is_an_error_and_never_a_wrong_start(
    library: Library, pocket: tuple, tmp_path: Path
) -> None:
    (model, tokenizer), rng, refused = pocket, random.Random(30), 0
    library.save(tmp_path)
    for path in sorted(tmp_path.iterdir()) * 15:
        whole = path.read_bytes()
        content = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.choice([1, 20]) if content else 0):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            again = Library.load(model, tokenizer, tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error)
            refused += 1
        else:
            assert same(library, again, tokenizer)
        path.write_bytes(whole)
    assert refused > 27


def test_what_all_texts_begin_with_says_nothing(pocket: tuple) -> None:
    model, _ = pocket
    seen: list[str] = []

    def encoder(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.ones((len(texts), 1))

    library = Library(model, Layout(1), encoder, TEXTS, torch.zeros(6, 1), shared_chars=10)
    library.nearest(TEXTS[0])
    assert seen == [*(text[10:] for text in TEXTS), TEXTS[0][10:]]


def test_pair_encoder_learns_which_words_stand_for_which(pocket: tuple) -> None:
    _, tokenizer = pocket
    families = corpus.quiz_families("train", header=0)[:50]
    learned = [q for i, family in enumerate(families) if i % 5 for q in family]
    names = [q.family for q in learned]
    encoder = PairEncoder.fit(tokenizer, [q.prompt for q in learned], names)
    stored, asked = (encoder([family[i].prompt for family in families[::5]]) for i in (0, 5))
    assert np.mean((asked @ stored.T).argmax(1) == np.arange(len(stored))) > 0.8
    assert not np.isnan(encoder(["", "????"])).any()


# --- The protocol ---------------------------------------------------------------------------------------------------


def test_families_are_told_in_other_words_and_splits_share_no_fact() -> None:
    names = {}
    for split in corpus.SPLITS:
        quiz, stories = corpus.quiz_families(split), corpus.story_families(split, 6)
        names[split] = {q.family for family in quiz for q in family}
        for family in (*quiz, *stories, *corpus.notes_families(split, 6)):
            assert len({q.prompt for q in family}) == len(family) > 1
            assert len({q.family for q in family}) == 1
    assert sum(map(len, names.values())) == len(set.union(*names.values()))


@pytest.mark.slow
def test_rouge_l_is_that_of_rouge_score() -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge.RougeScorer(["rougeL"])
    rng = random.Random(0)
    for _ in range(50):
        a, b = (" ".join(rng.choices("abcdef", k=rng.randint(1, 12))) for _ in range(2))
        assert statistics.rouge_l(a, b) == pytest.approx(scorer.score(b, a)["rougeL"].fmeasure)


@pytest.mark.slow
def test_a_bare_run_compares_the_ways() -> None:
    lines = start("projector").out.splitlines()
    rows = {line.split(":")[0].strip(): line.split()[-4:] for line in lines if "%  " in line}
    assert rows["cold"][2:] == rows["rival"][2:] == ["0.00", "100%"]
    assert float(rows["proposed"][2]) > 1 > float(rows["ours"][2])


def test_a_question_is_answered_three_times() -> None:
    def answered(question: str) -> list[list[str]]:
        lines = start(f"projector ask '{question}'").out.splitlines()
        return [re.split(" {2,}", line.strip()) for line in lines if " ms " in line]

    proposed, ours, exact = answered("Name the river that Hexley stands on.")
    assert (proposed[0], ours[0], exact[0]) == ("proposed", "ours", "exactly")
    assert ours[3:] == exact[3:] == ["' D'", "Daunt"]
    assert float(proposed[2]) > 1 and float(ours[2]) < 0.05 and exact[2] == "0.00"
    cold = answered("Is it cold today?")
    assert [row[0] for row in cold] == ["proposed (cold)", "ours (cold)", "exactly"]
    assert len({tuple(row[2:]) for row in cold}) == 1


BAD = {  # a command, and what its sentence must hold
    "ask": "required: QUESTION",
    "ask x --library README.md": "README.md",
    "ask x --model smollm2": "studies.projection --model smollm2",
    "--model pocket-llama": "pocket-llama",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_sentence(command: str) -> None:
    refused(start(f"projector {command}"), BAD[command])
