"""The refresh study: a student's texts on its teacher's KV cache, by every way of refreshing it.

`python3 -m studies.refreshing` takes two hours and goes on where it was interrupted; `--quick` takes
a minute. `--teacher smollm2` takes SmolLM2-135M-Instruct, which continues the texts in data/real, and
a copy of it with weights of 5 bits for a student, in half an hour. The source's own experiment, with
a file of questions (the source's are ELI5's, held out), is
  python3 -m studies.refreshing --teacher meta-llama/Llama-3.2-3B-Instruct --student \
  friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0 \
  --prompts FILE.csv --dtype bfloat16

Ways: teacher and student write alone; the others are policies of overfill.py, among them "none",
which is OverFill without a refresh; published:64 is refresh_as_published() every 64 tokens.
Metrics, where perplexity is the teacher's:

perplexity                  per token of the written texts, each up to a token that ends it
tail                        mean log-probability in nats of a text's last 50 tokens, by the teacher
repeated                    share of its 3-grams of tokens that it already had
characters                  of the written text
refreshes                   of a text
time                        of a text, over OverFill's in the same turn (by=formula: by the source's
                            cost formula)
first_ms, tps               milliseconds to the first token; tokens/s after it
total                       seconds of a text
threshold                   the threshold with which a gate fires as often as its name says
area                        area under the ROC curve with which a signal finds the tokens where the
                            models differ most
cache_error, kl             along texts that all ways read: |C_S - C_T| / |C_T| of the written
                            tokens' entries, and KL(teacher || student) of the next token in nats
"""

import argparse
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from formats.chat import beginning_tokens, encode_in_form, has_chat_form, question_form
from formats.products import order_for_decoding
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from load_gpt2_weights import random_model
from overfill import POLICIES, Refresh, RefreshedPair, generate_refreshed, parse_policy, read_along
from pair import default_student, geometry_difference, load_pair, splice_last
from pocket import corpus
from pocket.evaluation import token_losses
from pocket.recipes import narrowed
from recycle import read_prompts
from studies.core import REAL_MODEL, RECORDED_MODELS, StudyLine, open_results, report
from studies.refreshing.claims import (
    COPY,
    SIZED,
    cost_formula,
    on_demand,
    periodic_quality,
    periodic_time,
    speculative_time,
)
from studies.results import Results, Setting
from support.conditions import conditions
from support.printing import end_tokens_of
from support.statistics import area_under_roc, kl, repetition
from support.texts import rows_of_tokens
from support.timing import TimedText, run_in_turns, time_text

PROMPT_LENGTH = 192
TAIL = 50  # the last tokens of a text, which the source judges by themselves
ALONG_PROMPTS = 12  # at most so many texts are read by several ways
PUBLISHED = {"published:64": 64, "published:8": 8}
BASELINES = ("none", "teacher", "student")
DROPOUT_WAY = "dropout:8~7.8"
FEW_WAYS = ("none", "student", "periodic:64", "speculative:8")
USUAL_WAYS = [*BASELINES, *PUBLISHED]
for name, kind in POLICIES.items():
    if name not in ("none", "dropout"):
        USUAL_WAYS += kind.studied
WAYS_ALONG_A_TEXT = ("none", "periodic:64", "windowed-listing:64:16", "speculative:8")
SIZED_WAYS = (*BASELINES, "periodic:256", "periodic:128", "periodic:64", "speculative:8")


class Student(NamedTuple):
    """A student, and what is measured of it."""

    name: str
    setting: Setting  # of its rows
    sampled: Sequence[str]  # ways
    greedy: Sequence[str] = ()
    along: Sequence[str] = ()  # one text that all of these read
    is_timed: bool = False
    prompts: int = 50
    new_tokens: int = 1000


STUDENTS = {  # by teacher
    "pocket": (
        Student("pocket-student", {}, USUAL_WAYS, (), WAYS_ALONG_A_TEXT, is_timed=True),
        Student("pocket-student", {"texts": 200}, BASELINES, BASELINES, prompts=200),
        Student("pocket-student-alone", {"trained": "alone"}, FEW_WAYS),
        Student("pocket-student-prompt", {"trained": "prompts"}, FEW_WAYS),
        # Trained with a dropout of 0.1, which is MonteCarloDropout's own rate.
        Student(
            "pocket-student-dropout", {"trained": "dropout"}, ("none", DROPOUT_WAY), is_timed=True
        ),
    ),
    REAL_MODEL: (
        Student(
            default_student(REAL_MODEL),
            COPY,
            (*BASELINES, "periodic:64"),
            BASELINES,
            WAYS_ALONG_A_TEXT[:2],
            prompts=12,
            new_tokens=192,
        ),
    ),
}


class Texts(NamedTuple):
    """A teacher and a student, the prompts (B, T) that they continue by new tokens, and the setting
    of their rows."""

    rows: Results
    models: dict[str, GPT]
    prompts: dict[str, Tensor]
    new_tokens: int
    setting: Setting
    end_ids: Sequence[int] = ()  # tokens after which a text isn't judged
    tokenizer: Any = None

    def until_end(self, ids: list[int]) -> list[int]:
        """Return the new tokens of a text up to the first that ends it."""
        for count, token in enumerate(ids, 1):
            if token in self.end_ids:
                return ids[:count]
        return ids

    def pair_of(self, ids: Tensor) -> RefreshedPair:
        """Return the pair that continues prompts, whose caches grow for a single one, and have room for
        all tokens from the start for several."""
        sized = partial(SlidingWindowCache, ids.size(1) + self.new_tokens)
        return RefreshedPair(**self.models, ids=ids, new_cache=sized if len(ids) > 1 else KVCache)

    def start_writing(
        self, way: str, ids: Tensor, seed: int, mode: str = "sampled"
    ) -> tuple[Iterator[Tensor], RefreshedPair]:
        """Return an iterator over a way's new tokens after ids (B, T), and the pair, which writes them
        unless one model does so alone."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        options = {"temperature": float(mode == "sampled"), "generator": generator}
        pair, n = self.pair_of(ids), self.new_tokens
        kind, is_gate_by_rate, _ = way.partition("~")
        if is_gate_by_rate:  # which has its recorded threshold
            way = f"{kind}:{self.rows.figure(way, 'threshold', **self.setting).value}"
        if way in self.models:
            tokens = generate(self.models[way], ids, n, cache=pair.teacher_cache, **options)
        elif way in PUBLISHED:
            tokens = refresh_as_published(pair, n, PUBLISHED[way], **options)
        else:
            tokens = generate_refreshed(pair, n, parse_policy(way), **options)
        return tokens, pair

    @torch.no_grad()
    def gate_signals(self, split: str, kind: str) -> np.ndarray:
        """Return the signals (B, T) of a kind of gate on sampled texts without refreshes, one for each
        token at which it looks."""
        gate, signals = parse_policy(f"{kind}:inf"), []
        tokens, pair = self.start_writing("none", self.prompts[split], seed=1)
        next(tokens)
        for t, _ in enumerate(tokens, 1):
            if t % gate.every == 0:
                signals.append(gate.signal(pair).float().cpu())
        return torch.stack(signals, 1).numpy()

    def add_threshold(self, way: str) -> None:
        """Append the threshold with which a gate fires as often as its name says, without refreshes on
        the prompts "valid"."""
        kind, _, per_1000 = way.partition("~")
        gate, signals = parse_policy(f"{kind}:inf"), self.gate_signals("valid", kind)
        most = float(per_1000) / 1000 * gate.every * signals.size
        firings = partial(count_firings, signals, cooldown=math.ceil(gate.cooldown / gate.every))
        levels = sorted(signals.flatten().tolist(), reverse=True)  # the lower, the more firings
        threshold = levels[bisect_right(levels, most, lo=1, key=firings) - 1]
        self.rows.add_values(way, self.setting, threshold=[threshold])


@torch.no_grad()
def refresh_as_published(
    pair: RefreshedPair,
    new_tokens: int,
    every: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Yield new tokens (B, 1) as the source's two listings do together: the first one's start, which
    feeds the prompt's last token a second time, and the second one's refresh, in which the teacher
    has read the newest token and the student has not, so that a splice moves every entry by one
    token. (The second one's own start is an empty list.)"""
    pair.prefill()
    token, unread = pair.ids[:, -1:], []
    for _ in range(new_tokens):
        if len(unread) == every:
            pair.teacher(torch.cat(unread, 1), pair.teacher_cache, last_only=True)
            splice_last(pair.student_cache, pair.teacher_cache, torch.full_like(token[:, 0], every))
            pair.refresh_count += 1
            unread = []
        logits = pair.student(token, pair.student_cache, last_only=True)[:, -1]
        token = sample(logits, temperature, None, generator)
        unread.append(token)
        yield token


# --- What is written --------------------------------------------------------------------------------


def add_quality(texts: Texts, ways: Sequence[str], mode: str) -> None:
    """Append the figures of the texts that ways write after the prompts, with equal seeds."""
    setting, ids = texts.setting | {"mode": mode}, texts.prompts["test"]
    for way in texts.rows.ways_due(ways, "perplexity", **setting):
        if "~" in way:
            texts.add_threshold(way)
        tokens, pair = texts.start_writing(way, ids, seed=0, mode=mode)
        written = [texts.until_end(text) for text in torch.cat([*tokens], 1).tolist()]
        nats, tails = [], []  # of each text
        for prompt, text in zip(ids.tolist(), written, strict=True):
            losses = token_losses(texts.models["teacher"], prompt + text)[-len(text) :].double()
            nats.append(float(losses.sum()))
            tails.append(-float(losses[-TAIL:].mean()))
        nats, lengths = np.array(nats), np.array([*map(len, written)])
        by_token = nats.sum() / lengths.sum()
        texts.rows.add_values(
            way,
            setting,
            refreshes=pair.refresh_count.tolist(),
            tail=tails,
            repeated=map(repetition, written),
            characters=[len(texts.tokenizer.decode(text)) for text in written],
            # Each text's part in the mean by token: their mean is that one, and their variance that of
            # such a ratio (Cochran 1977, "Sampling Techniques", section 6.4, linearized ratio).
            perplexity=by_token + (nats - by_token * lengths) / lengths.mean(),
        )


def count_firings(signals: np.ndarray, threshold: float, cooldown: int) -> int:
    """Return how often a gate fires over fixed signals (B, T), which its refreshes don't change."""
    count = 0
    for exceeds in (signals > threshold).tolist():
        last_firing = 0
        for t, exceeds_now in enumerate(exceeds, 1):
            if exceeds_now and t - last_firing >= cooldown:
                count, last_firing = count + 1, t
    return count


def add_signal_areas(texts: Texts) -> None:
    """Append the area under the ROC curve, by text, with which entropy and U(t) tell the tenth of
    all tokens with the largest KL(teacher || student) from the others."""
    kinds = {"entropy": "entropy", "dropout": "dropout:8"}
    due = texts.rows.ways_due(kinds, "area", **texts.setting)
    if not due:
        return
    divergences = texts.gate_signals("test", "probe:1")
    is_large = divergences >= np.quantile(divergences, 0.9)
    for way in due:
        areas = []
        signals = texts.gate_signals("test", kinds[way])
        for signal, large in zip(signals, is_large, strict=True):
            if large.any():
                areas.append(area_under_roc(signal[large], signal[~large]))
        texts.rows.add_values(way, texts.setting, area=areas)


@torch.no_grad()
def add_cache_errors(texts: Texts, ways: Sequence[str]) -> None:
    """Append the error of the cache, by token, and the divergence of the next token, by text, along
    texts that OverFill has written: all ways read the same, and differ by their caches alone. The
    prompt's entries are left out: they are the teacher's own."""
    ids = texts.prompts["test"]
    ways = texts.rows.ways_due(ways, "kl", **texts.setting)
    if not ways:
        return
    tokens, _ = texts.start_writing("none", ids, seed=0)
    continuation = torch.cat([*tokens], 1)  # (B, N)
    start, exact_cache = ids.size(1), KVCache()
    expected = texts.models["teacher"](torch.cat([ids, continuation], 1), exact_cache)[:, start:]
    norms = partial(torch.linalg.vector_norm, dim=(0, 1, 3, 4, 5))  # (B,) of (L, 2, B, H, t, D)
    for way in ways:
        pair = texts.pair_of(ids)
        read = read_along(pair, continuation, parse_policy(way))
        errors, divergences = [], []
        for t, logits in enumerate(read):
            held, exact = (
                torch.stack([kv[..., start : start + t + 1, :] for kv in cache.layers])
                for cache in (pair.student_cache, exact_cache)
            )
            errors.append(float((norms(held - exact) / norms(exact)).mean()))
            divergences.append(kl(expected[:, t], logits))
        mean_nats = torch.stack(divergences).mean(0).tolist()  # by text
        texts.rows.add_values(way, texts.setting, cache_error=errors, kl=mean_nats)


# --- Time -------------------------------------------------------------------------------------------


def add_times(texts: Texts, ways: Sequence[str], turns: int) -> dict[str, list[list[Refresh]]]:
    """Append the times of the ways that have none yet. The ways take turns with OverFill, which keeps
    the rows that it has. Return, by way, the refreshes of each turn's text."""
    prompts = texts.prompts["test"]
    due = texts.rows.ways_due(ways, "time", **texts.setting)

    def write_once(way: str, turn: int) -> tuple[TimedText, list[Refresh]]:
        """Write one sampled text, after the prompt of this turn."""
        ids = prompts[turn % len(prompts)][None]
        tokens, pair = texts.start_writing(way, ids, seed=turn)
        return time_text(lambda: tokens), pair.refreshes

    runs = {way: partial(write_once, way) for way in ("none", *due)} if due else {}
    seconds, refreshes = {}, {}
    for way, of_turns in run_in_turns(runs, turns).items():
        refreshes[way] = [of_turn for _, of_turn in of_turns]
        # To the first token, and to the last:
        seconds[way] = np.array([text[1:] for text, _ in of_turns]).T
    for way in due:
        first, total = seconds[way]
        texts.rows.add_values(
            way,
            texts.setting,
            first_ms=1e3 * first,
            tps=(texts.new_tokens - 1) / (total - first),
            total=total,
            time=total / seconds["none"][1],  # the last of them tells that a way has its rows
        )
    return refreshes


def add_predicted_times(texts: Texts, refreshes: dict[str, list[list[Refresh]]]) -> None:
    """Append the time of every pair by the source's cost model, in units of OverFill's,
    the prompt's prefill included: N / TPS + the sum of prefill(k_r), the student's decoding and the
    teacher's passes over k_r tokens each. prefill(k) is the line through the times of refreshes: the
    teacher's pass over k tokens, the splice, and the student's query after it.

    Source: section "Why is it cheap?".
    """
    seconds = {}  # of refreshes, by tokens read
    for refresh in chain(*chain(*refreshes.values())):
        seconds.setdefault(refresh.tokens_read, []).append(refresh.seconds)
    if not seconds:
        return
    line = np.polyfit([*seconds], [*map(np.median, seconds.values())], 1)
    overfill_seconds = texts.rows.figure("none", "total", **texts.setting).value
    for way, of_turns in refreshes.items():
        if way not in texts.models:  # which have no refreshes
            read = [refresh.tokens_read for refresh in of_turns[0]]  # as in every turn
            predicted = 1 + np.polyval(line, read).sum() / overfill_seconds
            setting = texts.setting | {"by": "formula"}
            texts.rows.add_figures(way, setting, 1, time=[predicted] * 3)


# --- The study --------------------------------------------------------------------------------------


def load_prompts(args: argparse.Namespace, tokenizer: Any, count: int) -> dict[str, Tensor]:
    """Return prompts (B, T) for measuring ("test") and, but for stretches of the texts in data/real,
    for setting gates ("valid"). They are beginnings of pocket's documents; for another teacher, such
    stretches; or a CSV file's prompts, the same for both, all cut to the length of the shortest. For a
    chat model these are questions in its own form, and only the questions are cut."""
    if args.prompts:
        questions = [tokenizer.encode_ordinary(text) for text in read_prompts(args.prompts)]
        form = f"{tokenizer.decode(beginning_tokens(tokenizer))}{{}}"
        if has_chat_form(tokenizer):
            form = question_form(tokenizer)
        before, after = (encode_in_form(part, "", tokenizer) for part in form.split("{}"))
        shortest = min(map(len, questions))
        prompts = [[*before, *question[-shortest:], *after] for question in questions]
        splits = {"test": prompts, "valid": prompts}
    elif args.model.startswith("pocket"):
        splits = {
            "test": corpus.beginnings(tokenizer, "test", count, PROMPT_LENGTH),
            "valid": corpus.beginnings(tokenizer, "valid", (count + 1) // 2, PROMPT_LENGTH),
        }
    else:
        rows = rows_of_tokens(tokenizer, 2 * PROMPT_LENGTH)[:count]
        splits = {"test": [ids[:PROMPT_LENGTH] for ids in rows]}
    return {split: torch.tensor(rows, device=args.device) for split, rows in splits.items()}


def set_conditions(texts: Texts, teacher: str, student: str, how: str) -> None:
    """Let the next rows be measured with these texts. how: they are written."""
    count, length = texts.prompts["test"].shape
    student_model = conditions(student, texts.models["student"])
    texts.rows.set_model_conditions(
        teacher,
        texts.models["teacher"],
        f"student {student}: {student_model['parameters']:,} parameters",
        f"{count} prompts of {length} tokens, {texts.new_tokens:,} new tokens, {how}",
    )


def measure_student(rows: Results, args: argparse.Namespace, student: Student) -> None:
    """Measure every figure of a student that has no row yet. Raises ValueError if its caches don't fit
    the teacher's, or if prompts and new tokens exceed the context."""
    teacher, student_model, tokenizer = load_pair(
        args.model, student.name, device=args.device, dtype=args.dtype
    )
    if difference := geometry_difference(teacher, student_model):
        raise ValueError(
            f"no cache of {args.model} can be refreshed for {student.name}: {difference}"
        )
    prompts = load_prompts(args, tokenizer, student.prompts)
    length, n_ctx = prompts["test"].size(1), teacher.config.n_ctx
    if length + student.new_tokens > n_ctx:
        raise ValueError(
            f"prompts of {length} tokens and {student.new_tokens} new ones exceed the context, {n_ctx}"
        )
    models = {"teacher": teacher, "student": student_model}
    end_ids = () if args.model.startswith("pocket") else end_tokens_of(tokenizer)
    texts = Texts(rows, models, prompts, student.new_tokens, student.setting, end_ids, tokenizer)
    how = "sampled at temperature 1, or greedy"
    set_conditions(texts, args.model, student.name, how)
    add_quality(texts, student.sampled, "sampled")
    add_quality(texts, student.greedy, "greedy")
    if DROPOUT_WAY in student.sampled:
        add_signal_areas(texts)
    if student.is_timed:
        add_times(texts, student.sampled, 1 if args.quick else 9)
    few = texts._replace(prompts={"test": prompts["test"][:ALONG_PROMPTS]})
    set_conditions(few, args.model, student.name, how)
    add_cache_errors(few, student.along)


def measure_at_size(rows: Results) -> None:
    """Append times at the size of a real model: random weights, on which times don't depend, and a
    student narrowed as pocket's is."""
    teacher = random_model(GPT, "355M")
    student = order_for_decoding(GPT(narrowed(teacher.config))).eval()
    models = {"teacher": teacher, "student": student}
    texts = Texts(rows, models, {"test": torch.arange(64)[None]}, 260, SIZED)
    turns = 5
    set_conditions(texts, "355M, random weights", "narrowed", f"one at a time; turns: {turns}")
    add_predicted_times(texts, add_times(texts, SIZED_WAYS, turns))


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "refreshing", "less of everything", model="--teacher")
    cli.add_options("--student")
    about = "your own: CSV, column prompt; all are cut to the length of the shortest"
    cli.add_argument("--prompts", metavar="FILE", type=Path, help=about)
    with cli.parse(argv) as args:
        students = STUDENTS.get("pocket" if args.prompts else args.model, STUDENTS[REAL_MODEL])
        difference = ""
        if args.prompts or args.student or args.model not in STUDENTS:
            difference = "run of other models or prompts"
            name = args.student or default_student(args.model)
            students = [students[0]._replace(name=name, setting={})]
        usual = students[0].setting
        # A text of a reduced run is too short for a refresh after 128 tokens.
        beyond = [periodic_quality, on_demand, periodic_time, speculative_time, cost_formula]
        rows = open_results("refreshing", args, RECORDED_MODELS, difference, usual, beyond)
        for student in students:
            if args.quick:
                student = student._replace(prompts=4, new_tokens=72)
            measure_student(rows, args, student)
        if not difference and args.model == "pocket" and not args.quick:
            measure_at_size(rows)
        report(rows)
