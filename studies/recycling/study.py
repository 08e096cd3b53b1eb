"""KV recycling's experiment: ten prompts' caches are stored, and six others answered cold, recycled
and by the published call.

`python3 -m studies.recycling` takes about a minute with `pocket`, whose texts are judged;
`--model 355M` (random weights of the source's geometry, whose times are judged) 25 minutes. The
embeddings are recorded ones of all-MiniLM-L6-v2 in recycling/embeddings.npz, of the prompts and of
pocket's answers; a run with other embeddings or another model is given no verdict.

cold, recycled, published   the whole prompt is read; all but its longest stored prefix is; the
                            source's call, on the nearest stored prompt if all of it is a prefix
first, latency              milliseconds to the first token and to the last; medians of a prompt
saved, slowest              the share of the latency that is saved; the largest multiple of cold
alpha, alpha_first          the slope of that share over k/m (k of m tokens reused), to the last
                            and to the first token: S = alpha k / m, section 5.5
answers                     how many are the cold run's, token for token
tokens, reused, read        of the prompts, found in the store, and fed to the model
positions, spared           of the context that prompts and answers take, and fewer than cold
similarity                  of embeddings to the cold answer's; others: of cold answers to each other
near                        how far from the answers to others to the same answer, which is 1

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from load_gpt2_weights import NAMES, load_tokenizer
from recycle import (
    Recycler,
    cache_by,
    generate_by,
    prompt_files,
    prompt_lengths,
    read_prompts,
)
from studies.core import STUDIES_FOLDER, Rows, StudyLine, load_chosen_model, open_rows, report
from support.cli import GEOMETRIES
from support.conditions import is_geometry
from support.encoders import load_encoder
from support.statistics import bootstrap
from support.store import Store
from support.timing import run_in_turns, time_call, time_text
from support.tokenizers import END_OF_TEXT

WAYS = {"cold": "cold", "recycled": "longest", "published": "published"}  # by recycle.py's names
ENCODER, NEW = "all-MiniLM-L6-v2", 100  # of the recorded embeddings; tokens
OWN = ("pocket", "355M")  # the recorded models
Found = dict[tuple[str, str], list["Answer"]]  # by way and prompt, turn by turn


class Answer(NamedTuple):
    """What was written after a prompt, and what it took."""

    ids: list[int]
    first: float  # seconds
    total: float
    reused: int  # tokens
    positions: int


def recorded_encoder() -> Callable[[Sequence[str]], np.ndarray]:
    """Return what turns texts into unit vectors (N, C): recorded ones, NaN for all other texts."""
    record = np.load(STUDIES_FOLDER / "recycling" / "embeddings.npz", allow_pickle=False)
    vectors = record["vectors"].astype(np.float32)  # stored in 16 bits
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    known = dict(zip(record["texts"].tolist(), vectors, strict=True))
    none = np.full_like(vectors[0], np.nan)
    return lambda texts: np.stack([known.get(text, none) for text in texts])


class Trial:
    """The experiment with one model: how a prompt is answered, and what is stored."""

    def __init__(self, recycler: Recycler, tests: Sequence[str], n: int) -> None:
        """tests: the prompts to answer; n: new tokens. Raises ValueError if a prompt leaves no room
        for the answer."""
        self.recycler, self.tests, self.n = recycler, tests, n
        self.lengths = prompt_lengths(recycler, tests, n)

    def answer(self, way: str, text: str, turn: int = 0) -> Answer:
        """Answer a prompt; retrieval and restoring count, too."""
        prompt = self.recycler, WAYS[way], text
        retrieved, cache = time_call(lambda: cache_by(*prompt))
        reused = len(cache)
        run = time_text(lambda: generate_by(*prompt, cache, self.n))
        return Answer(
            run.ids,
            retrieved + run.first_token_seconds,
            retrieved + run.total_seconds,
            reused,
            len(cache),
        )

    def run(self, stored: Sequence[str], order: str, turns: int) -> Found:
        """Store the caches of some prompts and answer others. order: "interleaved", or the
        "source"'s, once and nothing warm: all cold runs, the caches, the published call, recycled."""
        self.recycler.store.clear()  # of what an earlier run left
        found = self.once("cold") if order == "source" else {}
        for text in stored:
            self.recycler.store_prompt(text)
        if found:
            return found | self.once("published", "recycled")
        runs = {(way, text): partial(self.answer, way, text) for text in self.tests for way in WAYS}
        return run_in_turns(runs, turns)

    def once(self, *ways: str) -> Found:
        return {(way, text): [self.answer(way, text)] for way in ways for text in self.tests}

    def unrelated(self, stored: Sequence[str]) -> list[str]:
        """Return the prompts whose first token, after what begins every text, none to test has."""
        encode = self.recycler.tokenizer.encode_ordinary
        begun = {encode(text)[0] for text in self.tests}
        return [text for text in stored if encode(text)[0] not in begun]


def slope(points: np.ndarray) -> np.ndarray:
    """Return the slopes (...,) of the lines through 0 that fit points (..., n, 2) best, 0 if all x
    are 0."""
    x, y = points[..., 0], points[..., 1]
    return (x * y).sum(-1) / np.maximum((x * x).sum(-1), 1e-12)


def nearness(pairs: np.ndarray) -> np.ndarray:
    """Return how far (...,) the mean of the first numbers of pairs (..., n, 2) is from that of the
    second towards 1."""
    near, other = np.moveaxis(pairs.mean(-2), -1, 0)
    return (near - other) / np.maximum(1 - other, 1e-12)


def add_rows(rows: Rows, trial: Trial, found: Found, at: dict) -> None:
    """Append what was found."""
    vectors = {}
    for way in WAYS:  # cold first
        several = [found[way, text] for text in trial.tests]
        own = [answers[0] for answers in several]
        turns = [[(x.first, x.total) for x in answers] for answers in several]
        times = np.median(turns, axis=1)  # (prompts, 2): to the first token and to the last
        if way == "cold":
            cold, cold_times = own, times
        saved = 1 - times / cold_times
        reused, positions = [x.reused for x in own], [x.positions for x in own]
        depth = np.divide(reused, trial.lengths)
        written = sum(len(x.ids) - 1 for x in own)  # the last token is not read
        rows.add_values(
            way,
            at,
            first=1e3 * times[:, 0],
            latency=1e3 * times[:, 1],
            saved=saved[:, 1],
            slowest=[1 - min(saved[:, 1])],
            answers=[sum(a.ids == b.ids for a, b in zip(own, cold, strict=True))],
            depth=depth,
            tokens=[sum(trial.lengths)],
            reused=[sum(reused)],
            read=[sum(positions) - sum(reused) - written],
            positions=[sum(positions)],
            spared=[sum(x.positions for x in cold) - sum(positions)],
        )
        first, last = (bootstrap(np.stack([depth, share], 1), slope) for share in saved.T)
        rows.add_figures(way, at, len(own), alpha_first=first, alpha=last)
        texts = [trial.recycler.tokenizer.decode(x.ids).removesuffix(END_OF_TEXT) for x in own]
        vectors[way] = trial.recycler.encoder(texts)
    add_similarity(rows, vectors, at)


def add_similarity(rows: Rows, vectors: dict[str, np.ndarray], at: dict) -> None:
    """Append how alike the answers are, if the embeddings (prompts, C) of all of them are known."""
    cold = vectors["cold"]
    if not all(np.isfinite(x).all() for x in vectors.values()):
        return
    alike = cold @ cold.T
    others = (alike.sum(1) - alike.diagonal()) / max(1, len(alike) - 1)
    rows.add_values("others", at, similarity=others)
    for way in WAYS:
        similarity = (vectors[way] * cold).sum(1)
        rows.add_values(way, at, similarity=similarity)
        near = bootstrap(np.stack([similarity, others], 1), nearness)
        rows.add_figures(way, at, len(cold), near=near)


def different(args: argparse.Namespace) -> str:
    """Return how a run differs from the recorded ones, "" if it doesn't."""
    if args.encoder and Path(args.encoder).name != ENCODER:
        return "run with another encoder"
    if args.model in OWN or "DialoGPT-medium" in args.model:  # the source's own model
        return ""
    return "run of another model"


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(
        __doc__,
        "recycling",
        "once, and 5 new tokens of other models than pocket",
        models=f"{NAMES}; or random weights of the size of {GEOMETRIES} (355M is DialoGPT-medium's)",
    )
    cli.add_argument(
        "--encoder",
        metavar="NAME",
        help="embeddings for the nearest prompt: tokens, the model's own, or a model of "
        f"sentence-transformers; default: recorded ones of {ENCODER}",
    )
    with cli.parse(argv) as args:
        stored, tests = map(read_prompts, prompt_files(args.model))
        model, name = load_chosen_model(args)
        tokenizer = load_tokenizer("gpt2" if is_geometry(args.model) else args.model)
        encoder = (
            load_encoder(args.encoder, model, tokenizer) if args.encoder else recorded_encoder()
        )
        ending = END_OF_TEXT if "DialoGPT" in args.model else ""
        recycler = Recycler(Store(model, args.out / "cache"), tokenizer, encoder, ending)
        n = 5 if args.quick and args.model != OWN[0] else NEW
        trial = Trial(recycler, tests, n)
        rows, at = open_rows("recycling", args, different(args)), {"model": args.model}
        if args.model not in OWN:  # all claims are its own
            rows.definition["usual"] |= at
            for claim in rows.definition["claims"]:
                claim["at"] = claim.get("at", {}) | at
        turns, c = 1 if args.quick else 5, model.config
        rows.set_model_conditions(
            name,
            model,
            f"{c.n_layer} layers of width {c.n_embd:,}",
            f"{len(tests)} prompts, {n} new tokens, greedy; turns: {turns}",
            f"embeddings by {Path(ENCODER if args.encoder is None else args.encoder).name}",
        )
        settings = [  # the source's first: nothing may be warm
            ("source", "own", stored),
            ("interleaved", "own", stored),
            ("interleaved", "other", trial.unrelated(stored)),
        ]
        if args.quick:
            settings = settings[1:2]
        for order, kind, texts in settings:
            where = at | {"order": order, "store": kind}
            if rows.ways_due(["cold"], "latency", **where):
                add_rows(rows, trial, trial.run(texts, order, turns), where)
        report(rows)
