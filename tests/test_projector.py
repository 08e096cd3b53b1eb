"""The two ridge regressions against references, summary tokens that are exact where they must be, an exact swap."""

import dataclasses
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
from tests.helpers import of_kind, start
from tests.test_equivalence import model_of

CONFIG = GPTConfig(vocab_size=50, n_ctx=96, n_layer=3, n_head=2, n_embd=16)
MODELS = {"learned": model_of(CONFIG), "grouped": model_of(of_kind("Llama", CONFIG))}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def as_ids(tokens: Iterable[Tensor]) -> list[int]:
    return [int(token) for token in tokens]


# --- Ridge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "features", "penalty"), [(5, 40, 0.1), (40, 5, 1e-6), (1, 3, 10.0)])
def test_ridge_is_augmented_least_squares(n: int, features: int, penalty: float) -> None:
    x, y = (torch.randn(2, n, width, generator=seeded(n)).double() for width in (features, 4))
    scale = (penalty * x.square().sum((-2, -1)) / features).sqrt()[:, None, None]
    rows = torch.cat([x, scale * torch.eye(features)], 1)
    expected = torch.linalg.lstsq(rows, torch.cat([y, torch.zeros(2, features, 4)], 1)).solution
    torch.testing.assert_close(ridge(x, y, penalty), expected, rtol=1e-5, atol=1e-6)


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


def test_the_map_in_the_span_is_an_optimum_of_all_dense_maps() -> None:
    N, F, m, D = 7, 30, 2, 3
    draw = partial(torch.randn, generator=seeded(3), dtype=torch.double)
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


@pytest.mark.slow
def test_stage_1_reads_its_own_prompts_as_their_caches_are_read(
    model: nn.Module, tmp_path: Path
) -> None:
    prompts = [prefill(model, prompt(18 + i, seed=i)) for i in range(7)]
    compressor, path = Compressor(prompts, 3, 1e-4, steps=150), tmp_path / "maps.safetensors"
    summaries = compressor(prompts)
    assert compressor.weight.shape == (3, 2, 23 * 16, 3 * 16)  # from the longest prompt's tokens
    for exact, summary in zip(prompts, summaries, strict=True):
        got = attention_output(tail_queries(exact), *summary.unbind(1))
        k, v = exact.kv[..., :-1, :].unbind(1)
        raw = exact.q[:, :, -1].unflatten(1, (2, -1)) @ k.mT / math.sqrt(8)
        close(got, raw.softmax(-1) @ v, 0.2)
    compressor.save(path)
    again = Compressor.load(path, model)
    assert torch.equal(again(prompts), summaries) and float(again.penalty) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="another model or dtype"):
        Compressor.load(path, model_of(of_kind("Llama", CONFIG), 1))
    with pytest.raises(ValueError, match="no projector: it holds constant, mean"):
        Projector.load(path)
    with pytest.raises(ValueError, match="24 tokens before its last, the map's longest 23"):
        compressor([prefill(model, prompt(25))])
    with pytest.raises(ValueError, match="3 summary tokens can't stand for 2 tokens"):
        Compressor([prefill(model, prompt(3))], 3, 0.1)


# --- Stage 2 --------------------------------------------------------------------------------------------------------


def test_stage_2_is_linear_in_each_head_and_a_large_penalty_gives_the_mean(tmp_path: Path) -> None:
    x, path = torch.randn(200, 2, 2, 3, 2, 4, generator=seeded(0)), tmp_path / "map.safetensors"
    turn = torch.linalg.qr(torch.randn(3, 16, 16, generator=seeded(3)))[0]
    flat = x.permute(0, 1, 3, 2, 4, 5).flatten(3)  # (N, L, H, F)
    y = torch.einsum("nlhf,hfg->nlhg", flat, turn) + 0.7  # another map for every head
    y = y.view(200, 2, 3, 2, 2, 4).permute(0, 1, 3, 2, 4, 5)
    fitted = Projector(x[:150], y[:150], 1e-4)
    close(fitted(x[150:]), y[150:], 1e-2)
    close(Projector(x, y, 1e12)(x[:3]), y.mean(0).expand(3, *y.shape[1:]), 1e-3)
    fitted.save(path)
    again = Projector.load(path)
    assert torch.equal(again(x), fitted(x)) and float(again.penalty) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="no compressor: it holds mean, offset"):
        Compressor.load(path, MODELS["learned"])


# --- The swap -------------------------------------------------------------------------------------------------------


def warm_cache(model: nn.Module, ids: list[int], layout: Layout, seed: int = 5) -> KVCache:
    """A cache of quite another prompt: tokens emitted from it are wrong."""
    other = prefill(model, prompt(layout.m, seed))
    return cache_of_summary(model, other.kv, layout.tail_position(len(ids)))


def warm(
    model: nn.Module, ids: list[int], n: int, layout: Layout, until_ready: bool = False
) -> Iterator[Tensor]:
    """Tokens after a warm start from summary tokens and the tail of ids."""
    cache = warm_cache(model, ids, layout)
    return generate_warm(model, torch.tensor([ids]), cache, layout.tail, n, until_ready)


# The second goes on past the context.
@pytest.mark.parametrize(("length", "true_positions"), [(40, True), (90, False)])
def test_identity_of_all_tokens_after_the_swap(
    model: nn.Module, length: int, true_positions: bool
) -> None:
    ids, layout = prompt(length), Layout(3, 2, true_positions=true_positions)
    stand_in = torch.tensor([[0, 0, 0, *ids[-2:]]])
    first = as_ids(generate(model, stand_in, 1, cache=warm_cache(model, ids, layout)))
    rest = as_ids(generate(model, torch.tensor([ids + first]), 11))
    assert as_ids(warm(model, ids, 12, layout)) == first + rest


def test_tokens_come_from_the_warm_cache_until_the_exact_one_is_ready(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_read = module.prefilled_cache, threading.Event()

    def wait_and_read(*args: object) -> KVCache:
        may_read.wait()
        return read(*args)

    ids, layout = prompt(40), Layout(3, 2)
    stand_in = torch.tensor([[0, 0, 0, *ids[-2:]]])
    from_summary = as_ids(generate(model, stand_in, 9, cache=warm_cache(model, ids, layout)))
    assert [*warm(model, ids, 0, layout)] == []
    running = warm(model, ids, 9, layout, until_ready=True)
    monkeypatch.setattr(module, "prefilled_cache", wait_and_read)
    written = [int(next(running)) for _ in range(4)]
    may_read.set()
    written += as_ids(running)
    assert (
        written
        in [  # swapped after n tokens
            from_summary[:n]
            + as_ids(generate(model, torch.tensor([ids + from_summary[:n]]), 9 - n))
            for n in range(4, 10)
        ]
    )


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


ASKED = "Question: What is the name of the river at {}?\nAnswer:"


def start_of(library: Library, tokenizer: object, town: str = "Foxham") -> KVCache | None:
    text = ASKED.format(town)
    return library.warm_start(text, tokenizer.encode(text))


def same(a: Library, b: Library, tokenizer: object) -> bool:
    x, y = start_of(a, tokenizer), start_of(b, tokenizer)
    return y is not None and all(map(torch.equal, x.layers, y.layers))


def test_a_start_is_of_the_most_similar_prompt_or_cold(library: Library, pocket: tuple) -> None:
    model, tokenizer = pocket
    asked = ASKED.format("Ospen")
    found, similarity = library.nearest(asked)
    assert TOWNS[found] == "Ospen" and 0.3 < similarity <= 1.0001
    cache = start_of(library, tokenizer, "Ospen")
    assert len(cache) == 2 and int(cache.positions(1)) == len(tokenizer.encode(asked)) - 3
    assert all(map(torch.equal, (kv[:, 0] for kv in cache.layers), library.summaries[found]))
    assert library.warm_start("", []) is None
    library.match_names = True  # then a stored prompt has the same names
    assert library.nearest(asked) == (found, similarity)
    assert library.nearest(ASKED.format("Nettlebridge")) == (-1, -math.inf)
    assert library.nearest("which river is it?")[0] >= 0  # no name, nothing to guard
    library.threshold = similarity + 0.01
    assert start_of(library, tokenizer, "Ospen") is None
    with pytest.raises(ValueError, match="2 texts, 6 summaries"):
        Library(model, Layout(2, 3), library.encoder, TEXTS[:2], library.summaries)


def test_a_prompt_that_is_added_is_found(library: Library, pocket: tuple) -> None:
    model, tokenizer = pocket
    added = Library(model, library.layout, library.encoder, [], library.summaries[:0])
    assert added.nearest(TEXTS[0]) == (-1, -math.inf) and start_of(added, tokenizer) is None
    for text, summary in zip(TEXTS, library.summaries, strict=True):
        added.add(text, summary)
    assert same(added, library, tokenizer) and added.name_counts == library.name_counts
    shared = dataclasses.replace(added, shared_chars=10)  # they say nothing
    assert shared.nearest(TEXTS[3]) == shared.nearest("0123456789" + TEXTS[3][10:])
    with pytest.raises(ValueError, match="must share its first 10 characters"):
        shared.add("Which river?", library.summaries[0])


def test_a_saved_library_comes_back_and_a_damaged_one_is_never_a_wrong_start(
    library: Library, pocket: tuple, tmp_path: Path
) -> None:
    (model, tokenizer), rng, refused = pocket, random.Random(30), 0
    library.match_names = True
    library.save(tmp_path)
    again = Library.load(model, tokenizer, tmp_path)
    assert same(library, again, tokenizer) and again.match_names and again.texts == TEXTS
    assert (again.threshold, again.layout) == (library.threshold, library.layout)
    half = load_model("pocket", model_class=GPT, dtype=torch.float16)
    with pytest.raises(ValueError, match="another model"):
        Library.load(half, tokenizer, tmp_path)
    with pytest.raises(FileNotFoundError):
        Library.load(model, tokenizer, tmp_path / "nowhere")
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for _ in range(8):
            content = bytearray(whole[: rng.choice([len(whole), rng.randrange(1, len(whole))])])
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            try:
                assert same(library, Library.load(model, tokenizer, tmp_path), tokenizer)
            except ValueError as error:
                assert str(tmp_path) in str(error)
                refused += 1
        path.write_bytes(whole)
    assert refused > 13


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
