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
tokens, characters          of the written text; OverFill's tokens decide whether a prompt's texts are
                            judged: one that ends before FIRST_REFRESH says nothing of refreshes
refreshes                   of a text
time                        of a text, over OverFill's in the same turn (by=formula: by the source's
                            cost formula)
first_ms, tps               milliseconds to the first token; tokens/s after it
total, end_to_end           seconds of a text, and its tokens over them
threshold                   the threshold with which a gate fires as often as its name says
area                        area under the ROC curve with which a signal finds the tokens where the
                            models differ most
cache_error, kl             along texts that all ways read: |C_S - C_T| / |C_T| of the written
                            tokens' entries, and KL(teacher || student) of the next token in nats
"""

import argparse
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn

import overfill
from formats.chat import beginning_tokens, has_chat_form, question_form
from formats.products import order_for_decoding
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from load_gpt2_weights import random_model
from overfill import (
    Entropy,
    Gate,
    MonteCarloDropout,
    Policy,
    ProbeKL,
    Refresh,
    RefreshedPair,
    generate_refreshed,
    parse_policy,
)
from pair import default_student, geometry_difference, load_pair, splice_last
from pocket import corpus
from pocket.evaluation import token_losses
from pocket.recipes import narrowed
from recycle import read_prompts
from studies.core import (
    REAL_MODEL,
    RECORDED_MODELS,
    StudyLine,
    open_results,
    report,
)
from studies.refreshing.claims import COPY, SIZED, cost_formula, periodic_time, speculative_time
from studies.results import Results, Setting
from support.printing import end_tokens_of
from support.statistics import area_under_roc, kl, repetition
from support.texts import rows_of_tokens
from support.timing import TimedText, run_in_turns, time_text

PROMPT_LENGTH = 192
TAIL = 50  # the last tokens of a text, which the source judges by themselves
FIRST_REFRESH = 64  # tokens
ALONG_PROMPTS = 12  # at most so many texts are read by several ways
MODES = {"sampled": 1.0, "greedy": 0.0}  # temperatures
PUBLISHED = ("published:64", "published:8")
BASELINES = ("none", "teacher", "student")  # "none" first: it decides what is judged
FEW_WAYS = ("none", "student", "periodic:64", "speculative:8")
USUAL_WAYS = ["none", "teacher", "student", *PUBLISHED]
for name, kind in overfill.POLICIES.items():
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
    turns: int = 0  # in which its ways are timed
    prompts: int = 50
    new_tokens: int = 1000


STUDENTS = (
    Student("pocket-student", {"trained": "segments"}, USUAL_WAYS, (), WAYS_ALONG_A_TEXT, turns=9),
    Student(
        "pocket-student",
        {"trained": "segments", "texts": 200},
        BASELINES,
        BASELINES,
        prompts=200,
    ),
    Student("pocket-student-alone", {"trained": "alone"}, FEW_WAYS),
    Student("pocket-student-prompt", {"trained": "prompts"}, FEW_WAYS),
    # Trained with a dropout of 0.1, which is MonteCarloDropout's own rate.
    Student("pocket-student-dropout", {"trained": "dropout"}, ("none", "dropout:8~7.8"), turns=9),
)
REAL_STUDENT = Student(  # a copy of the real model
    f"{REAL_MODEL}:int5",
    COPY,
    (*BASELINES, "periodic:64"),
    BASELINES,
    WAYS_ALONG_A_TEXT[:2],
    prompts=12,
    new_tokens=192,
)


@dataclass
class Texts:
    """A teacher and a student, the prompts (B, T) that they continue by new tokens, and the setting
    of their rows."""

    rows: Results
    models: dict[str, GPT]
    prompts: dict[str, Tensor]
    new_tokens: int
    setting: Setting
    end_ids: tuple[int, ...] = ()  # tokens after which a text isn't judged
    tokenizer: tiktoken.Encoding | None = None

    def until_end(self, ids: list[int]) -> list[int]:
        """Return the new tokens of a text up to the first that ends it."""
        ends = [i for i, token in enumerate(ids, 1) if token in self.end_ids]
        return ids[: ends[0]] if ends else ids

    def judged(self, mode: str) -> list[int]:
        """Return the prompts, by number, after which OverFill has written FIRST_REFRESH tokens or
        more; all of them if no token ends a text. Raises ValueError if there are none."""
        if not self.end_ids:
            return [*range(len(self.prompts["test"]))]
        lengths = self.rows.figure("none", "tokens", **self.setting, mode=mode).values
        judged = [i for i, length in enumerate(lengths) if length >= FIRST_REFRESH]
        if not judged:
            raise ValueError(
                f"OverFill's longest text has {max(lengths):.0f} tokens: "
                f"at least {FIRST_REFRESH} are needed"
            )
        return judged

    def policy_of(self, way: str, mode: str) -> Policy:
        """Return the policy of a way. A gate has its recorded threshold, if there is one."""
        policy_text, gated, _ = way.partition("~")
        policy = parse_policy(f"{policy_text}:inf" if gated else policy_text)
        threshold = self.rows.find(way, "threshold", **self.setting, mode=mode)
        return replace(policy, threshold=threshold["value"]) if threshold else policy

    def pair_of(self, ids: Tensor) -> RefreshedPair:
        """Return the pair that continues prompts, whose caches grow for a single one, and have room for
        all tokens from the start for several."""
        sized = partial(SlidingWindowCache, ids.size(1) + self.new_tokens)
        return RefreshedPair(**self.models, ids=ids, new_cache=sized if len(ids) > 1 else KVCache)

    def start_writing(
        self, way: str, ids: Tensor, mode: str, seed: int
    ) -> tuple[Iterator[Tensor], RefreshedPair]:
        """Return an iterator over a way's new tokens after ids (B, T), and the pair, which writes them
        unless one model does so alone."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        options = {"temperature": MODES[mode], "generator": generator}
        pair, n = self.pair_of(ids), self.new_tokens
        if way in self.models:
            tokens = generate(self.models[way], ids, n, cache=pair.teacher_cache, **options)
        elif way in PUBLISHED:
            tokens = refresh_as_published(pair, n, int(way.partition(":")[2]), **options)
        else:
            tokens = generate_refreshed(pair, n, self.policy_of(way, mode), **options)
        return tokens, pair

    @torch.no_grad()
    def gate_signals(self, split: str, gate: Gate, mode: str) -> Tensor:
        """Return a gate's signals (B, T) on texts without refreshes, one for each token at which it
        looks."""
        signals = []
        tokens, pair = self.start_writing("none", self.prompts[split], mode, seed=1)
        next(tokens)
        for t, _ in enumerate(tokens, 1):
            if t % gate.every == 0:
                signals.append(gate.signal(pair).float().cpu())
        return torch.stack(signals, 1)

    def add_threshold(self, way: str, mode: str) -> None:
        """Append the threshold with which a gate fires as often as its name says, without refreshes on
        the prompts "valid"."""
        gate, per_1000 = self.policy_of(way, mode), float(way.partition("~")[2])
        signals = self.gate_signals("valid", gate, mode)
        most = per_1000 / 1000 * gate.every * signals.numel()
        firings = partial(count_firings, signals, cooldown=math.ceil(gate.cooldown / gate.every))
        levels = sorted(signals.flatten().tolist(), reverse=True)  # the lower, the more firings
        threshold = levels[bisect_right(levels, most, lo=1, key=firings) - 1]
        self.rows.add_values(way, self.setting | {"mode": mode}, threshold=[threshold])


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
            unread = []
        logits = pair.student(token, pair.student_cache, last_only=True)[:, -1]
        token = sample(logits, temperature, None, generator)
        unread.append(token)
        yield token


# --- What is written --------------------------------------------------------------------------------


def by_token(nats: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
    """Return each text's part (n,) in the mean nats per token of n texts. The mean of the parts is that
    of all tokens, and their variance that of such a ratio.

    Source: Cochran 1977, "Sampling Techniques", section 6.4 (linearized ratio).
    """
    nats, tokens = np.array(nats), np.array(tokens)
    ratio = nats.sum() / tokens.sum()
    return ratio + (nats - ratio * tokens) / tokens.mean()


def add_quality(texts: Texts, ways: Sequence[str], mode: str) -> None:
    """Append the figures of the texts that ways write after the judged prompts, with equal seeds."""
    rows, setting, ids = texts.rows, texts.setting | {"mode": mode}, texts.prompts["test"]
    for way in rows.ways_due(ways, "perplexity", **setting):
        if "~" in way:
            texts.add_threshold(way, mode)
        tokens, pair = texts.start_writing(way, ids, mode, seed=0)
        written = [texts.until_end(text) for text in torch.cat([*tokens], 1).tolist()]
        if way == "none" and texts.end_ids:
            rows.add_values(way, setting, tokens=[*map(len, written)])
        judged = texts.judged(mode)
        written = [written[i] for i in judged]
        losses = []
        for prompt, text in zip(ids[judged].tolist(), written, strict=True):
            nats = token_losses(texts.models["teacher"], prompt + text)
            losses.append(nats[-len(text) :].double())
        if way not in (*texts.models, *PUBLISHED):
            rows.add_values(way, setting, refreshes=pair.refresh_count[judged].tolist())
        rows.add_values(
            way,
            setting,
            tail=[-float(nats[-TAIL:].mean()) for nats in losses],
            repeated=[repetition(text) for text in written],
            characters=[len(texts.tokenizer.decode(text)) for text in written],
            perplexity=by_token([float(nats.sum()) for nats in losses], [*map(len, written)]),
        )


def count_firings(signals: Tensor, threshold: float, cooldown: int) -> int:
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
    gates = {"entropy": Entropy(math.inf), "dropout": MonteCarloDropout(math.inf)}
    due = texts.rows.ways_due(gates, "area", **texts.setting)
    if not due:
        return
    divergences = texts.gate_signals("test", ProbeKL(math.inf), "sampled").numpy()
    is_large = divergences >= np.quantile(divergences, 0.9)
    for way in due:
        signals = texts.gate_signals("test", gates[way], "sampled").numpy()
        areas = [
            area_under_roc(signal[large], signal[~large])
            for signal, large in zip(signals, is_large, strict=True)
            if large.any()
        ]
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
    tokens, _ = texts.start_writing("none", ids, "sampled", seed=0)
    continuation = torch.cat([*tokens], 1)  # (B, N)
    start, exact_cache = ids.size(1), KVCache()
    expected = texts.models["teacher"](torch.cat([ids, continuation], 1), exact_cache)[:, start:]
    norms = partial(torch.linalg.vector_norm, dim=(0, 1, 3, 4, 5))  # (B,) of (L, 2, B, H, t, D)
    for way in ways:
        pair = texts.pair_of(ids)
        read = overfill.read_along(pair, continuation, texts.policy_of(way, "sampled"))
        errors, divergences = [], []
        for t, logits in enumerate(read):
            held, exact = (
                torch.stack([kv[..., start : start + t + 1, :] for kv in cache.layers])
                for cache in (pair.student_cache, exact_cache)
            )
            errors.append(float((norms(held - exact) / norms(exact)).mean()))
            divergences.append(kl(expected[:, t], logits))
        text_nats = torch.stack(divergences).mean(0).tolist()
        texts.rows.add_values(way, texts.setting, cache_error=errors, kl=text_nats)


# --- Time -------------------------------------------------------------------------------------------


def add_times(
    texts: Texts, ways: Sequence[str], prompt_count: int, turns: int
) -> dict[str, list[list[Refresh]]]:
    """Append the times of the ways that have none yet. The ways take turns with OverFill, which keeps
    the rows that it has. Return, by way, the refreshes of each turn's text."""
    rows, setting = texts.rows, texts.setting
    due = rows.ways_due(ways, "time", **setting)

    def write_once(way: str, turn: int) -> tuple[TimedText, list[Refresh]]:
        """Write one sampled text, after the prompt of this turn."""
        ids = texts.prompts["test"][turn % prompt_count][None]
        tokens, pair = texts.start_writing(way, ids, "sampled", seed=turn)
        return time_text(lambda: tokens), pair.refreshes

    runs = {way: partial(write_once, way) for way in ("none", *due)} if due else {}
    refreshes, seconds = {}, {}
    for way, of_turns in run_in_turns(runs, turns).items():
        refreshes[way] = [of_turn for _, of_turn in of_turns]
        # To the first token, and to the last:
        seconds[way] = np.array([text[1:] for text, _ in of_turns]).T
    for way in due:
        first, total = seconds[way]
        rows.add_values(
            way,
            setting,
            time=total / seconds["none"][1],
            first_ms=1e3 * first,
            tps=(texts.new_tokens - 1) / (total - first),
            total=total,
            end_to_end=texts.new_tokens / total,
        )
    return {way: refreshes[way] for way in due}


def add_predicted_times(texts: Texts, refreshes: dict[str, list[list[Refresh]]]) -> None:
    """Append the time of every pair by the source's cost model, in units of OverFill's,
    the prompt's prefill included: N / TPS + the sum of prefill(k_r), the student's decoding and the
    teacher's passes over k_r tokens each. prefill(k) is the line through the times of refreshes: the
    teacher's pass over k tokens, the splice, and the student's query after it.

    Source: section "Why is it cheap?".
    """
    seconds = {}  # of refreshes, by tokens read
    for refresh in itertools.chain(*itertools.chain(*refreshes.values())):
        seconds.setdefault(refresh.tokens_read, []).append(refresh.seconds)
    if not seconds:
        return
    line = np.polyfit([*seconds], [*map(np.median, seconds.values())], 1)
    overfill_seconds = texts.rows.figure("none", "total", **texts.setting).value
    for way, of_turns in refreshes.items():
        if way in texts.models:  # which have no refreshes
            continue
        reads = [[refresh.tokens_read for refresh in of_turn] for of_turn in of_turns]
        predicted = [1 + np.polyval(line, read).sum() / overfill_seconds for read in reads]
        texts.rows.add_values(way, texts.setting | {"by": "formula"}, time=predicted)


# --- The study --------------------------------------------------------------------------------------


def load_prompts(
    name: str, tokenizer: Any, path: str | None, test_count: int, max_length: int
) -> dict[str, Tensor]:
    """Return prompts (B, T) for measuring ("test") and, but for stretches of the texts in data/real,
    for setting gates ("valid"). They are beginnings of pocket's documents; for another teacher, such
    stretches; or a CSV file's prompts, every fifth for setting gates, all cut to the length of the
    shortest. For a chat model these are questions in its own form, and only the questions are cut.

    Raises ValueError if a file has fewer than 5 prompts, or if they exceed max_length tokens.
    """
    if path:
        prompts = [tokenizer.encode_ordinary(text) for text in read_prompts(Path(path))]
        if len(prompts) < 5:
            raise ValueError(f"{path} has {len(prompts)} prompts: at least 5 are needed")
        before, after = beginning_tokens(tokenizer), []
        if has_chat_form(tokenizer):
            special = tokenizer.special_tokens_set
            parts = question_form(tokenizer).split("{}")
            before, after = (tokenizer.encode(part, allowed_special=special) for part in parts)
        shortest = min(map(len, prompts))
        ids = [[*before, *prompt[-shortest:], *after] for prompt in prompts]
        if len(ids[0]) > max_length:
            raise ValueError(
                f"the prompts of {path} have {len(ids[0])} tokens or more: at most {max_length} fit"
            )
        split = {"valid": ids[::5], "test": [x for i, x in enumerate(ids) if i % 5]}
    elif name.startswith("pocket"):
        counts = {"valid": (test_count + 1) // 2, "test": test_count}
        split = {
            part: corpus.beginnings(tokenizer, part, count, PROMPT_LENGTH)
            for part, count in counts.items()
        }
    else:
        rows = rows_of_tokens(tokenizer, 2 * PROMPT_LENGTH)[:test_count]
        split = {"test": [ids[:PROMPT_LENGTH] for ids in rows]}
    return {part: torch.tensor(ids) for part, ids in split.items()}


def parameter_count_text(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"


def set_conditions(texts: Texts, teacher: str, student: str, modes: str) -> None:
    """Let the next rows be measured with these texts."""
    count, length = texts.prompts["test"].shape
    texts.rows.set_model_conditions(
        teacher,
        texts.models["teacher"],
        f"student {student}: {parameter_count_text(texts.models['student'])}",
        f"{count} held-out prompts of {length} tokens, {texts.new_tokens:,} new tokens, {modes}",
    )


def measure_student(rows: Results, args: argparse.Namespace, student: Student) -> None:
    """Measure every figure of a student that has no row yet."""
    teacher, student_model, tokenizer = load_pair(
        args.model, student.name, device=args.device, dtype=args.dtype
    )
    overfill.check_pair(teacher, student_model)
    room = min(teacher.config.n_ctx, student_model.config.n_ctx) - student.new_tokens
    prompts = load_prompts(args.model, tokenizer, args.prompts, student.prompts, room)
    prompts = {split: ids.to(args.device) for split, ids in prompts.items()}
    models = {"teacher": teacher, "student": student_model}
    end_ids = () if args.model.startswith("pocket") else end_tokens_of(tokenizer)
    texts = Texts(rows, models, prompts, student.new_tokens, student.setting, end_ids, tokenizer)
    ways, along = student.sampled, student.along
    if geometry_difference(teacher, student_model):  # caches that can't be spliced
        ways, along = [way for way in ways if way not in PUBLISHED], ()
    modes = "sampled at temperature 1" + (", or greedy" if student.greedy else "")
    set_conditions(texts, args.model, student.name, modes)
    add_quality(texts, ways, "sampled")
    add_quality(texts, student.greedy, "greedy")
    if student.setting["trained"] == "dropout":
        add_signal_areas(texts)
    if student.turns:
        add_times(texts, ways, 3, student.turns)
    few = replace(texts, prompts={"test": prompts["test"][:ALONG_PROMPTS]})
    set_conditions(few, args.model, student.name, modes)
    add_cache_errors(few, along)


def measure_at_size(rows: Results, quick: bool) -> None:
    """Append times at the size of a real model: random weights, on which times don't depend, and a
    student narrowed as pocket's is."""
    size, new_tokens, turns = ("2x2x64", 70, 1) if quick else ("355M", 260, 5)
    teacher = random_model(GPT, size)
    student = order_for_decoding(GPT(narrowed(teacher.config))).eval()
    ids = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))
    models = {"teacher": teacher, "student": student}
    texts = Texts(rows, models, {"test": ids}, new_tokens, dict(SIZED))
    rows.set_model_conditions(
        f"{size}, random weights",
        teacher,
        f"a student of {parameter_count_text(student)}",
        f"{new_tokens} tokens after a prompt of 64, one text at a time",
        f"turns: {turns}",
    )
    add_predicted_times(texts, add_times(texts, SIZED_WAYS, 1, turns))


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "refreshing", "less of everything", model="--teacher")
    cli.add_options("--student")
    cli.add_argument("--prompts", metavar="FILE", help="CSV of your own prompts, column prompt")
    with cli.parse(argv) as args:
        recorded = {"pocket": STUDENTS, REAL_MODEL: [REAL_STUDENT]}
        others = args.prompts or args.student or args.model not in recorded
        students, difference = recorded.get(args.model), ""
        if others:
            difference = "run of other models or prompts"
            likewise = STUDENTS[0] if args.prompts or args.model == "pocket" else REAL_STUDENT
            name = args.student or default_student(args.model)
            setting = {"model": args.model, "trained": "segments"}
            students = [likewise._replace(name=name, setting=setting)]
        at_size = args.model == "pocket" and not others
        beyond = [] if at_size else [periodic_time, speculative_time, cost_formula]
        setting = students[0].setting
        rows = open_results("refreshing", args, RECORDED_MODELS, difference, setting, beyond)
        for student in students:
            if args.quick:
                turns = min(1, student.turns)
                student = student._replace(prompts=4, new_tokens=72, turns=turns)
            measure_student(rows, args, student)
        if at_size:
            measure_at_size(rows, args.quick)
        report(rows)
