"""KV recycling's experiment: ten prompts' caches are stored, and six others answered cold, recycled
and by the published call.

`python3 -m studies.recycling --model smollm2` asks SmolLM2-135M-Instruct, in its chat form, and
takes 15 minutes; then it holds a conversation about a text of 1,200 tokens (order: chat). Without
--model, pocket is asked, in a minute; `--model 355M` (random weights of the source's geometry, whose
times are judged) takes 25. The
embeddings are recorded ones of all-MiniLM-L6-v2 in recycling/embeddings.npz, of the prompts and of
pocket's answers; a run with other embeddings or another model is given no verdict.

cold, recycled, published   the whole prompt is read; all but its longest stored prefix is read; the
                            source's call, on the nearest stored prompt if all of it is a prefix
first, latency              milliseconds to the first token and to the last; a prompt's medians
saved                       the share of the latency that is saved
alpha                       the slope of that share over k/m (k of m tokens reused): S = alpha k / m,
                            section 5.5
depth                       k/m
answers                     how many equal the cold run's, token for token
similarity                  of an answer's embedding to the cold answer's; others: of cold answers
                            to each other
near                        similarity on a scale from 0, as cold answers to each other, to 1, equal

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

import argparse
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from formats.chat import chat_form, encode_in_form, has_chat_form
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import generate
from load_gpt2_weights import NAMES, load_tokenizer
from recycle import (
    Recycler,
    cache_by,
    generate_by,
    prompt_files,
    prompt_form,
    prompt_lengths,
    read_prompts,
)
from studies.core import (
    REAL_MODEL,
    StudyLine,
    load_chosen_model,
    open_results,
    report,
)
from studies.recycling.claims import NEW_TOKENS, latency, never_slower
from studies.results import STUDIES_FOLDER, Results
from support.conditions import GEOMETRIES, is_geometry
from support.printing import end_tokens_of
from support.statistics import interval
from support.store import Store
from support.texts import read_questions, read_texts
from support.timing import TimedText, run_in_turns, time_call, time_text

WAYS = {"cold": "cold", "recycled": "longest", "published": "published"}  # recycle.py's names
ENCODER = "all-MiniLM-L6-v2"  # of the recorded embeddings
CHAT_TEXT = "article"  # the text in data/real that a conversation is about
RECORDED_MODELS = ("pocket", REAL_MODEL, "355M")
AnswersByWay = dict[tuple[str, str], list["Answer"]]  # by way and prompt, turn by turn


class Answer(NamedTuple):
    """What was written after a prompt, and how many tokens of the prompt were reused."""

    text: TimedText
    reused: int


def recorded_encoder() -> Callable[[Sequence[str]], np.ndarray]:
    """Return a function from texts to unit vectors (N, C): recorded ones, and NaN for all other
    texts."""
    recorded = np.load(STUDIES_FOLDER / "recycling" / "embeddings.npz", allow_pickle=False)
    vectors = recorded["vectors"].astype(np.float32)  # stored in 16 bits
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vector_of = dict(zip(recorded["texts"].tolist(), vectors, strict=True))
    unknown = np.full_like(vectors[0], np.nan)
    return lambda texts: np.stack([vector_of.get(text, unknown) for text in texts])


@dataclass
class Trial:
    """The experiment with one model: how a prompt is answered, and what is stored."""

    recycler: Recycler
    tests: Sequence[str]  # the prompts to answer
    max_new_tokens: int

    def answer(self, way: str, text: str, turn: int = 0) -> Answer:
        """Answer a prompt; its times include retrieval and restoring."""
        prompt = self.recycler, WAYS[way], text
        timed = time_text(lambda: generate_by(*prompt, cache_by(*prompt), self.max_new_tokens))
        return Answer(timed, len(cache_by(*prompt)))

    def store_and_answer(self, stored: Sequence[str], order: str, turns: int) -> AnswersByWay:
        """Store the caches of some prompts and answer others. order: "interleaved"; or "source",
        the source's own, once and with nothing warm: all cold runs, then storing the caches, the
        published call, and recycled."""
        self.recycler.store.clear()  # of what an earlier run left
        answers = self.answer_once("cold") if order == "source" else {}
        for text in stored:
            self.recycler.store_prompt(text)
        if answers:
            return answers | self.answer_once("published", "recycled")
        runs = {(way, text): partial(self.answer, way, text) for text in self.tests for way in WAYS}
        return run_in_turns(runs, turns)

    def answer_once(self, *ways: str) -> AnswersByWay:
        return {(way, text): [self.answer(way, text)] for way in ways for text in self.tests}


@torch.no_grad()
def measure_chat(rows: Results, recycler: Recycler, setting: dict, turns: int) -> None:
    """Append the times to the first token of the turns after the first of a conversation about a
    text, which is in its system prompt: with the store, and if all is read again."""
    if not rows.ways_due(["recycled"], "first", **setting):
        return
    store, tokenizer = recycler.store, recycler.tokenizer
    text, questions = read_texts()[CHAT_TEXT], read_questions()[CHAT_TEXT]
    form = chat_form(tokenizer, f"Answer questions about this text.\n\n{text}")
    end_ids = end_tokens_of(tokenizer)
    ids: list[int] = []
    store.clear()
    milliseconds: dict[str, list[float]] = {"cold": [], "recycled": []}
    for turn in questions[:turns]:
        ids = ids + encode_in_form(form.later if ids else form.first, turn.question, tokenizer)
        prompt = torch.tensor([ids], device=store.model.wte.weight.device)
        for way in milliseconds:
            seconds, cache = time_call(
                partial(store.get, ids) if way == "recycled" else store.model.new_cache
            )
            answer = time_text(
                partial(generate, store.model, prompt, 24, stop_ids=end_ids, cache=cache)
            )
            milliseconds[way].append(1e3 * (seconds + answer.first_token_seconds))
        store.put([*ids, *answer.ids], cache)  # the recycled one
        ids = ids + [token for token in answer.ids if token not in end_ids]
    for way, times in milliseconds.items():
        rows.add_values(way, setting, first=times[1:])


def slope(points: np.ndarray) -> np.ndarray:
    """Return the slopes (...,) of the lines through 0 that fit points (..., n, 2) best, 0 if all x
    are 0."""
    x, y = points[..., 0], points[..., 1]
    return (x * y).sum(-1) / np.maximum((x * x).sum(-1), 1e-12)


def nearness(pairs: np.ndarray) -> np.ndarray:
    """Return (a - b) / (1 - b) (...,) for the means a and b of the first and the second numbers of
    pairs (..., n, 2): how far a is on the way from b to 1."""
    similarity, others = np.moveaxis(pairs.mean(-2), -1, 0)
    return (similarity - others) / np.maximum(1 - others, 1e-12)


def add_answers(rows: Results, trial: Trial, answers_by_way: AnswersByWay, setting: dict) -> None:
    """Append the figures of the answers."""
    lengths = prompt_lengths(trial.recycler, trial.tests, trial.max_new_tokens)
    vectors = {}
    for way in WAYS:  # cold first
        turns_by_prompt = [answers_by_way[way, text] for text in trial.tests]
        written = [turns[0].text.ids for turns in turns_by_prompt]
        seconds = [
            [(answer.text.first_token_seconds, answer.text.total_seconds) for answer in turns]
            for turns in turns_by_prompt
        ]
        first, latency = 1e3 * np.median(seconds, axis=1).T
        if way == "cold":
            cold_written, cold_latency = written, latency
        saved = 1 - latency / cold_latency
        depth = np.divide([turns[0].reused for turns in turns_by_prompt], lengths)
        rows.add_values(
            way,
            setting,
            first=first,
            latency=latency,
            saved=saved,
            depth=depth,
            answers=[sum(map(operator.eq, written, cold_written))],
        )
        alpha = interval(np.stack([depth, saved], 1), slope)
        rows.add_figures(way, setting, len(written), alpha=alpha)
        texts = [trial.recycler.tokenizer.decode(ids) for ids in written]
        vectors[way] = trial.recycler.encoder([text.removesuffix(END_OF_TEXT) for text in texts])
    add_similarity(rows, vectors, setting)


def add_similarity(rows: Results, vectors: dict[str, np.ndarray], setting: dict) -> None:
    """Append how alike the answers are, if the embeddings (prompts, C) of all of them are known."""
    cold_vectors = vectors["cold"]
    if not all(np.isfinite(x).all() for x in vectors.values()):
        return
    similarities = cold_vectors @ cold_vectors.T
    others = max(1, len(similarities) - 1)
    mean_similarities = (similarities.sum(1) - similarities.diagonal()) / others
    rows.add_values("others", setting, similarity=mean_similarities)
    for way in WAYS:
        similarity = (vectors[way] * cold_vectors).sum(1)
        rows.add_values(way, setting, similarity=similarity)
        near = interval(np.stack([similarity, mean_similarities], 1), nearness)
        rows.add_figures(way, setting, len(cold_vectors), near=near)


class Size(NamedTuple):
    """How many tokens an answer has at most, how often it is written, and a conversation's turns."""

    new_tokens: int = NEW_TOKENS
    turns: int = 5
    chat_turns: int = 6


def size_of(args: argparse.Namespace) -> Size:
    """Return the size of a run."""
    if args.quick:
        return Size(NEW_TOKENS if args.model == "pocket" else 5, turns=1, chat_turns=3)
    return Size(turns=3 if args.model == REAL_MODEL else 5)


def measure(rows: Results, trial: Trial, stored: Sequence[str], args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    size, model = size_of(args), {"model": args.model}
    orders = ["interleaved"]
    if not args.quick and args.model not in ("pocket", REAL_MODEL):  # no claim is about their times
        orders.insert(0, "source")  # first, since nothing may be warm
    for order in orders:
        setting = model | {"order": order}
        if rows.ways_due(["published"], "alpha", **setting):
            add_answers(rows, trial, trial.store_and_answer(stored, order, size.turns), setting)
    if has_chat_form(trial.recycler.tokenizer):
        measure_chat(rows, trial.recycler, model | {"order": "chat"}, size.chat_turns)


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "recycling",
        "once, and 5 new tokens of other models than pocket",
        models=f"{NAMES}; or random weights of the size of {GEOMETRIES} (355M is DialoGPT-medium's)",
    )
    with cli.parse(argv) as args:
        stored, tests = map(read_prompts, prompt_files(args.model))
        model, name = load_chosen_model(args)
        tokenizer = load_tokenizer("gpt2" if is_geometry(args.model) else args.model)
        form = prompt_form(args.model, tokenizer)
        recycler = Recycler(Store(model, args.out / "cache"), tokenizer, recorded_encoder(), form)
        size, config = size_of(args), model.config
        prompt_lengths(recycler, tests, size.new_tokens)  # refuses prompts that are too long
        trial = Trial(recycler, tests, size.new_tokens)
        difference = "" if "DialoGPT-medium" in args.model else None
        beyond = [latency, never_slower]
        rows = open_results("recycling", args, RECORDED_MODELS, difference, beyond=beyond)
        rows.set_model_conditions(
            name,
            model,
            f"{config.n_layer} layers of width {config.n_embd:,}",
            f"{len(tests)} prompts, {size.new_tokens} new tokens, greedy; turns: {size.turns}",
            f"embeddings by {ENCODER}",
        )
        measure(rows, trial, stored, args)
        report(rows)
