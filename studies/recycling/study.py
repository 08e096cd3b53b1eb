"""KV recycling's experiment: ten prompts' caches are stored, and six others answered cold, recycled
and by the published call.

`python3 -m studies.recycling --model smollm2` asks SmolLM2-135M-Instruct, in its chat form, and
takes 15 minutes; then it holds a conversation about a text of 1,200 tokens (order: chat). Without
--model, pocket is asked, in a minute; `--model 355M` (random weights of the source's geometry, whose
times are judged) takes ten. The embeddings are recorded ones of all-MiniLM-L6-v2 in
recycling/embeddings.npz, of the prompts and of pocket's answers; answers that aren't there get no
similarity.

cold, recycled, published   the whole prompt is read; all but its longest stored prefix is read; the
                            source's call, on the nearest stored prompt if all of it is a prefix
first, latency              milliseconds to the first token and to the last; a prompt's medians
saved                       the share of the latency that is saved
depth                       k/m: of a prompt's m tokens k are reused
answers                     how many equal the cold run's, token for token
similarity                  of an answer's embedding to the cold answer's; others: of cold answers
                            to each other

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

import argparse
import operator
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from formats.chat import chat_form, encode_conversation, has_chat_form
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import generate
from load_gpt2_weights import NAMES, load_tokenizer
from recycle import (
    Recycler,
    cache_by,
    generate_by,
    prompt_files,
    prompt_form,
    read_prompts,
    recycle,
)
from studies.core import RECORDED_MODELS, load_chosen_model, run_study
from studies.recycling.claims import NEW_TOKENS, latency, never_slower
from studies.results import STUDIES_FOLDER, Results
from support.conditions import GEOMETRIES, is_geometry
from support.printing import end_tokens_of
from support.store import Store
from support.texts import read_questions, read_texts
from support.timing import TimedText, run_in_turns, time_text

WAYS = {"cold": "cold", "recycled": "longest", "published": "published"}  # recycle.py's names
CHAT_TEXT = "article"  # the text in data/real that a conversation is about
CHAT_TURNS = 6
AnswersByWay = dict[tuple[str, str], list[TimedText]]  # by way and prompt, turn by turn


def recorded_encoder() -> Callable[[Sequence[str]], np.ndarray]:
    """Return a function from texts to unit vectors (N, C): recorded ones, and NaN for all other
    texts."""
    recorded = np.load(STUDIES_FOLDER / "recycling" / "embeddings.npz")
    vectors = recorded["vectors"]
    vector_of = dict(zip(recorded["texts"].tolist(), vectors, strict=True))
    unknown = np.full_like(vectors[0], np.nan)
    return lambda texts: np.stack([vector_of.get(text, unknown) for text in texts])


def answer(recycler: Recycler, way: str, text: str, new_tokens: int, turn: int) -> TimedText:
    """Answer a prompt; the times include retrieval and restoring."""
    prompt = recycler, WAYS[way], text
    return time_text(lambda: generate_by(*prompt, cache_by(*prompt), new_tokens))


def store_and_answer(
    recycler: Recycler,
    stored: Sequence[str],
    tests: Sequence[str],
    new_tokens: int,
    order: str,
    turns: int,
) -> AnswersByWay:
    """Store the caches of some prompts and answer others. order: "interleaved"; or "source", the
    source's own, once and with nothing warm: all cold runs, then storing the caches, the published
    call, and recycled."""
    runs = {
        (way, text): partial(answer, recycler, way, text, new_tokens)
        for text in tests
        for way in WAYS
    }

    def run_once(way: str) -> AnswersByWay:
        return {(way, text): [runs[way, text](0)] for text in tests}

    recycler.store.clear()  # of what an earlier run left
    cold = run_once("cold") if order == "source" else {}
    for text in stored:
        recycler.store_prompt(text)
    if order == "source":
        return cold | run_once("published") | run_once("recycled")
    return run_in_turns(runs, turns)


def add_answers(
    rows: Results,
    recycler: Recycler,
    tests: Sequence[str],
    answers_by_way: AnswersByWay,
    setting: dict[str, str],
) -> None:
    """Append the figures of the answers, and how alike these are if the embeddings of all are known."""
    vectors = {}
    for way, name in WAYS.items():  # cold first
        written, first, latency, depth = [], [], [], []
        for text in tests:
            turns = answers_by_way[way, text]
            written.append(turns[0].ids)
            first.append(1e3 * np.median([turn.first_token_seconds for turn in turns]))
            latency.append(1e3 * np.median([turn.total_seconds for turn in turns]))
            depth.append(len(cache_by(recycler, name, text)) / len(recycler.encode_new(text)))
        if way == "cold":
            cold_written, cold_latency = written, latency
        rows.add_values(
            way,
            setting,
            first=first,
            latency=latency,
            saved=1 - np.divide(latency, cold_latency),
            depth=depth,
            answers=[sum(map(operator.eq, written, cold_written))],
        )
        texts = map(recycler.tokenizer.decode, written)
        vectors[way] = recycler.encoder([text.removesuffix(END_OF_TEXT) for text in texts])
    if np.isfinite([*vectors.values()]).all():
        similarities = vectors["cold"] @ vectors["cold"].T
        to_others = (similarities.sum(1) - similarities.diagonal()) / (len(tests) - 1)
        rows.add_values("others", setting, similarity=to_others)
        for way in WAYS:
            similarity = (vectors[way] * vectors["cold"]).sum(1)
            rows.add_values(way, setting, similarity=similarity)


def measure_chat(rows: Results, recycler: Recycler, setting: dict[str, str]) -> None:
    """Append the times to the first token of the turns after the first of a conversation about a
    text, which is in its system prompt: with the store, and if all is read again."""
    if not rows.ways_due(["recycled"], "first", **setting):
        return
    store, tokenizer = recycler.store, recycler.tokenizer
    text = read_texts()[CHAT_TEXT]
    form = chat_form(tokenizer, f"Answer questions about this text.\n\n{text}")
    stop_ids = end_tokens_of(tokenizer)
    turns, seconds = [], []
    store.clear()
    for question, _ in read_questions()[CHAT_TEXT][:CHAT_TURNS]:
        ids = encode_conversation(form, turns, question, tokenizer)
        prompt = torch.tensor([ids], device=store.model.wte.weight.device)
        cold = time_text(partial(generate, store.model, prompt, 24, stop_ids=stop_ids))
        recycled = time_text(partial(recycle, store, prompt, 24, stop_ids=stop_ids))
        seconds.append((cold.first_token_seconds, recycled.first_token_seconds))
        turns.append((question, [token for token in recycled.ids if token not in stop_ids]))
    cold_first, first = 1e3 * np.transpose(seconds[1:])
    rows.add_values("cold", setting, first=cold_first)
    rows.add_values("recycled", setting, first=first)


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    stored, tests = map(read_prompts, prompt_files(args.model))
    new_tokens = 5 if args.quick and args.model != "pocket" else NEW_TOKENS
    turns = 1 if args.quick else 3
    model, name = load_chosen_model(args)
    tokenizer = load_tokenizer("gpt2" if is_geometry(args.model) else args.model)
    form = prompt_form(args.model, tokenizer)
    recycler = Recycler(Store(model, args.out / "cache"), tokenizer, recorded_encoder(), form)
    rows.set_model_conditions(
        name,
        model,
        f"{len(tests)} prompts, {new_tokens} new tokens, greedy; turns: {turns}",
        "embeddings by all-MiniLM-L6-v2",
    )
    orders = ["source", "interleaved"]  # the source's first, since nothing may be warm
    if args.quick or args.model in RECORDED_MODELS:  # no claim is about the times of these
        orders = ["interleaved"]
    for order in orders:
        setting = {"model": args.model, "order": order}
        if rows.ways_due(["published"], "answers", **setting):
            answers = store_and_answer(recycler, stored, tests, new_tokens, order, turns)
            add_answers(rows, recycler, tests, answers, setting)
    if has_chat_form(tokenizer):
        measure_chat(rows, recycler, {"model": args.model, "order": "chat"})


main = partial(
    run_study,
    __doc__,
    "recycling",
    "once, and 5 new tokens of other models than pocket",
    measure,
    recorded_models=[*RECORDED_MODELS, "355M", "microsoft/DialoGPT-medium"],
    beyond=[latency, never_slower],
    models=f"{NAMES}; or random weights of the size of {GEOMETRIES} (355M is DialoGPT-medium's)",
)
