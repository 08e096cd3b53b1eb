"""The refresh study: a student's texts on its teacher's KV cache, by every way of refreshing it.

`python3 -m studies.refreshing` takes nearly three hours and goes on where it was interrupted; `--quick`
takes a minute. `--teacher smollm2` takes
SmolLM2-135M-Instruct, which continues the texts in data/real, and its twins with weights of 4 and 3
bits for students, in 40 minutes. The source's own experiment,
with a file of questions (the source's are ELI5's, held out), is
  python3 -m studies.refreshing --teacher meta-llama/Llama-3.2-3B-Instruct --student \
  friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0 \
  --prompts FILE.csv --chat --dtype bfloat16

Ways: teacher and student write alone; the others are policies of overfill.py, among them "none",
which is OverFill without a refresh; published:64 is the source's code, refreshed every 64 tokens.
Metrics, where perplexity is the teacher's:

perplexity                  of the written text, up to a token that ends it
tail                        mean log-probability in nats of its last 50 tokens, by the teacher
repeated                    share of its 3-grams of tokens that it already had
characters                  of the written text
refreshes, reads, passes    after the prompt: refreshes of a text, tokens that the teacher reads,
                            and the teacher's passes per 1,000 tokens
time, tps, first_ms         time over OverFill's in the same turn (by=formula: by the source's cost
                            formula; by=source: at least, by its own tokens/s); tokens/s after the
                            first token; milliseconds to it
read_ms                     milliseconds of a refresh: the teacher's pass over k new tokens, the
                            splice, and the student's query after it
threshold                   the threshold with which a gate fires as often as its name says
area                        area under the ROC curve with which a signal finds the tokens where the
                            models differ most
cache_error, kl             along one text that all ways read: |C_S - C_T| / |C_T| of the written
                            tokens' entries, and KL(teacher || student) of the next token in nats
"""

import argparse
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
from formats.chat import beginning_tokens, question_form
from formats.products import order_for_decoding
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from load_gpt2_weights import random_model
from overfill import (
    Entropy,
    Gate,
    MonteCarloDropout,
    Periodic,
    Policy,
    ProbeKL,
    RefreshedPair,
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
from studies.refreshing.claims import (
    ARITHMETIC,
    SOURCE_TPS,
    cost_formula,
    periodic_time,
    speculative_time,
)
from studies.results import Results, Setting
from studies.showing import points_over
from support.printing import end_tokens_of
from support.statistics import area_under_roc, kl, repetition
from support.texts import rows_of_tokens
from support.timing import TimedText, run_in_turns, time_text

PROMPT_LENGTH = 192
TAIL = 50  # the last tokens of a text, which the source judges by themselves
MODES = {"sampled": 1.0, "greedy": 0.0}  # temperatures
PUBLISHED = ("published:64", "published:8")
MORE_TEXTS = 200  # pocket's, for ways that differ little
FEW_WAYS = ("student", "none", "periodic:64", "speculative:8", "entropy~7.8")
USUAL_WAYS = ["teacher", "student", *PUBLISHED]
for name, kind in overfill.POLICIES.items():
    if name != "dropout":
        USUAL_WAYS += kind.studied
STUDENTS = {  # by what they were trained on or with: their names, and the ways that are measured
    "segments": ("pocket-student", USUAL_WAYS),
    "alone": ("pocket-student-alone", FEW_WAYS),
    "prompts": ("pocket-student-prompt", FEW_WAYS),
    # Trained with a dropout of 0.1, which is MonteCarloDropout's own rate.
    "dropout": ("pocket-student-dropout", ("none", "entropy~7.8", "dropout:8~7.8")),
}
REAL_WAYS = (
    "teacher",
    "student",
    "none",
    "periodic:64",
    "periodic:16",
    "speculative:8",
    "entropy~7.8",
    "published:64",
)
REAL_STUDENTS = {  # twins of the real model
    "int4": (f"{REAL_MODEL}:int4", REAL_WAYS),
    "int3": (f"{REAL_MODEL}:int3", REAL_WAYS[:5]),
}
WAYS_ALONG_A_TEXT = (
    "none",
    "periodic:64",
    "windowed-listing:64:16",
    "speculative:8",
    "entropy~7.8",
)
REFRESHED_WAYS_AT_SIZE = ("periodic:256", "periodic:128", "periodic:64", "speculative:8")


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
    tokenizer: tiktoken.Encoding | None = None  # for the number of characters

    def until_end(self, ids: list[int]) -> list[int]:
        """Return the new tokens of a text up to the first that ends it."""
        for i, token in enumerate(ids, 1):
            if token in self.end_ids:
                return ids[:i]
        return ids

    def policy_of(self, way: str, mode: str) -> Policy | None:
        """Return the policy of a way. A gate has its recorded threshold, if there is one."""
        if way in self.models or way in PUBLISHED:
            return None
        policy_text, gated, _ = way.partition("~")
        policy = parse_policy(f"{policy_text}:inf" if gated else policy_text)
        threshold = self.rows.find(way, "threshold", **self.setting, mode=mode)
        return replace(policy, threshold=threshold["value"]) if threshold else policy

    def add_threshold(self, way: str, mode: str) -> None:
        """Append the threshold with which a gate fires as often as its name says, on the prompts
        "valid"."""
        gate, budget = self.policy_of(way, mode), float(way.partition("~")[2])
        signals = self.gate_signals("valid", gate, mode)
        cooldown = math.ceil(gate.cooldown / gate.every)
        threshold = threshold_for(signals, budget * gate.every, cooldown)
        self.rows.add_values(way, self.setting | {"mode": mode}, threshold=[threshold])

    def start_writing(
        self, way: str, ids: Tensor, mode: str, seed: int
    ) -> tuple[Iterator[Tensor], RefreshedPair | None]:
        """Return an iterator over a way's new tokens after ids (B, T), and the pair that writes
        them, if any."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        options = {"temperature": MODES[mode], "generator": generator}
        new_cache = KVCache
        if len(ids) > 1:
            new_cache = partial(SlidingWindowCache, ids.size(1) + self.new_tokens)
        if way in self.models:
            tokens = generate(self.models[way], ids, self.new_tokens, cache=new_cache(), **options)
            return tokens, None
        pair = RefreshedPair(**self.models, ids=ids, new_cache=new_cache)
        if way in PUBLISHED:
            every = int(way.partition(":")[2])
            tokens = refresh_as_published(pair, self.new_tokens, every, **options)
        else:
            policy = self.policy_of(way, mode)
            tokens = overfill.generate_refreshed(pair, self.new_tokens, policy, **options)
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


@torch.no_grad()
def refresh_as_published(
    pair: RefreshedPair,
    new_tokens: int,
    every: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Yield new tokens (B, 1) as the source's code writes them. It feeds the prompt's last token a
    second time, and the teacher has read the newest token when the student has not, so that a
    splice moves every entry by one token."""
    pair.prefill()
    token, unread = pair.ids[:, -1:], []
    for _ in range(new_tokens):
        if len(unread) == every:
            pair.teacher(torch.cat(unread, 1), pair.teacher_cache, last_only=True)
            splice_last(pair.student_cache, pair.teacher_cache, torch.full_like(token[:, 0], every))
            pair.refresh_count = pair.refresh_count + 1
            pair.teacher_passes = pair.teacher_passes + 1
            pair.teacher_tokens = pair.teacher_tokens + every
            unread = []
        logits = pair.student(token, pair.student_cache, last_only=True)[:, -1]
        token = sample(logits, temperature, None, generator)
        unread.append(token)
        yield token


# --- What is written --------------------------------------------------------------------------------


def add_quality(texts: Texts, ways: Sequence[str], mode: str) -> None:
    """Append the figures of the texts that ways write after all prompts, with equal seeds."""
    setting, ids = texts.setting | {"mode": mode}, texts.prompts["test"]
    for way in texts.rows.ways_due(ways, "perplexity", **setting):
        if "~" in way:
            texts.add_threshold(way, mode)
        tokens, pair = texts.start_writing(way, ids, mode, seed=0)
        mean_nats, tail, repeated, characters = [], [], [], []
        for text in torch.cat([ids, *tokens], 1).tolist():
            written = texts.until_end(text[ids.size(1) :])
            judged = text[: ids.size(1)] + written
            token_nats = token_losses(texts.models["teacher"], judged)[-len(written) :]
            mean_nats.append(float(token_nats.double().mean()))
            tail.append(-float(token_nats[-TAIL:].double().mean()))
            repeated.append(repetition(written))
            if texts.tokenizer:
                characters.append(len(texts.tokenizer.decode(written)))
        texts.rows.add_values(way, setting, tail=tail, repeated=repeated, perplexity=mean_nats)
        if characters:
            texts.rows.add_values(way, setting, characters=characters)
        if pair:
            texts.rows.add_values(
                way,
                setting,
                refreshes=pair.refresh_count.tolist(),
                reads=pair.teacher_tokens.tolist(),
                passes=(1000 / texts.new_tokens * pair.teacher_passes).tolist(),
            )


def threshold_for(signals: Tensor, per_1000: float, cooldown: int) -> float:
    """Return the threshold by which a gate would fire about per_1000 times in 1,000 tokens, given
    its signals (B, T) on texts without refreshes."""
    levels = signals.flatten().sort(descending=True).values.tolist()

    def rate(threshold: float) -> float:  # it grows as the level falls
        return 1000 * count_firings(signals, threshold, cooldown) / signals.numel()

    return levels[bisect_right(levels, per_1000, lo=1, key=rate) - 1]


def count_firings(signals: Tensor, threshold: float, cooldown: int) -> int:
    """Return how often a gate fires over fixed signals (B, T), which its refreshes don't change."""
    firing_count, last_firing = 0, torch.zeros(signals.size(0), dtype=torch.long)
    for t, fires in enumerate((signals > threshold).T, 1):
        fires = fires & (t - last_firing >= cooldown)
        last_firing = torch.where(fires, t, last_firing)
        firing_count += int(fires.sum())
    return firing_count


def add_signal_areas(texts: Texts) -> None:
    """Append the areas under the ROC curve by which entropy and U(t) tell the tenth of the tokens
    with the largest KL(teacher || student) from the others; intervals over texts."""
    if not texts.rows.ways_due(["dropout"], "area", **texts.setting):
        return
    ways, never = ("entropy", "dropout"), math.inf
    gates = ProbeKL(never), Entropy(never), MonteCarloDropout(never)
    divergences, *signals = (texts.gate_signals("test", gate, "sampled").numpy() for gate in gates)
    is_large = divergences >= np.quantile(divergences, 0.9)
    text_count = len(divergences)
    draws = [
        np.arange(text_count),
        *np.random.default_rng(0).integers(text_count, size=(200, text_count)),
    ]
    for way, signal in zip(ways, signals, strict=True):
        areas = []
        for draw in draws:
            large = is_large[draw]
            areas.append(area_under_roc(signal[draw][large], signal[draw][~large]))
        low, high = np.quantile([area for area in areas[1:] if area is not None], [0.025, 0.975])
        texts.rows.add_figures(way, texts.setting, text_count, area=(areas[0], low, high))


def square_norms(entries: Tensor) -> Tensor:
    """Return the squared norms (B,) of the entries (L, 2, B, H, T, D) of a cache."""
    return entries.square().sum((0, 1, 3, 4, 5))


@torch.no_grad()
def add_cache_errors(texts: Texts, ways: Sequence[str], prompt_count: int) -> None:
    """Append the error of the cache and the divergence of the next token, along a text that
    OverFill has written: all ways read the same, and differ by their caches alone. The prompt's
    entries are left out: they are the teacher's own."""
    ways = texts.rows.ways_due(ways, "cache_error", **texts.setting)
    if not ways:
        return
    ids = texts.prompts["test"][:prompt_count]
    prompt_length = ids.size(1)
    tokens, _ = texts.start_writing("none", ids, "sampled", seed=0)
    continuation = torch.cat([*tokens], 1)  # (B, N)
    exact_cache = KVCache()
    logits = texts.models["teacher"](torch.cat([ids, continuation], 1), exact_cache)
    expected = logits[:, prompt_length:]  # (B, N, V)
    exact_entries = torch.stack(exact_cache.layers)[..., prompt_length:, :]  # (L, 2, B, H, N, D)
    for way in ways:
        new_cache = partial(SlidingWindowCache, prompt_length + texts.new_tokens)
        pair = RefreshedPair(**texts.models, ids=ids, new_cache=new_cache)
        errors, divergences = [], []
        policy = texts.policy_of(way, "sampled")
        for t, logits in enumerate(overfill.read_along(pair, continuation, policy), 1):
            divergences.append(float(kl(expected[:, t - 1], logits).mean()))
            entries = torch.stack(pair.student_cache.layers)[..., prompt_length:, :]
            exact = exact_entries[..., :t, :]
            error = square_norms(entries[..., :t, :] - exact) / square_norms(exact)
            errors.append(float(error.sqrt().mean()))
        texts.rows.add_values(way, texts.setting, cache_error=errors, kl=divergences)


# --- Time -------------------------------------------------------------------------------------------


def add_times(texts: Texts, ways: Sequence[str], prompt_count: int, turns: int) -> None:
    """Append the times of the ways that have none yet. They take turns with OverFill, which keeps
    the rows that it has."""
    rows, setting = texts.rows, texts.setting
    due = rows.ways_due(ways, "time", **setting)
    if not due:
        return

    def write_once(way: str, turn: int) -> tuple[TimedText, RefreshedPair | None]:
        """Write one sampled text, after the prompt of this turn."""
        ids = texts.prompts["test"][turn % prompt_count][None]
        tokens, pair = texts.start_writing(way, ids, "sampled", seed=turn)
        return time_text(lambda: tokens), pair

    runs = {way: partial(write_once, way) for way in dict.fromkeys(["none", *due])}
    timed_runs = run_in_turns(runs, turns)
    overfill_seconds = np.array([text.total_seconds for text, _ in timed_runs["none"]])
    for way in due:
        first_seconds = np.array([text.first_token_seconds for text, _ in timed_runs[way]])
        total_seconds = np.array([text.total_seconds for text, _ in timed_runs[way]])
        rows.add_values(
            way,
            setting,
            time=total_seconds / overfill_seconds,
            first_ms=1e3 * first_seconds,
            tps=(texts.new_tokens - 1) / (total_seconds - first_seconds),
        )
        _, pair = timed_runs[way][0]
        if pair and not rows.find(way, "passes", **setting):  # add_quality() didn't run
            passes = 1000 / texts.new_tokens * int(pair.teacher_passes)
            rows.add_values(way, setting, passes=[passes], reads=[int(pair.teacher_tokens)])
    if "none" in due:
        add_read_times(texts, timed_runs)


def add_read_times(texts: Texts, timed_runs: dict[str, list]) -> None:
    """Append the times of the teacher's passes over k new tokens, from the runs of add_times()."""
    read_ms = {}
    for way, runs in timed_runs.items():
        policy = texts.policy_of(way, "sampled")
        if isinstance(policy, Periodic) and not policy.reads_window:
            for _, pair in runs:
                for refresh in pair.refreshes:
                    read_ms.setdefault(refresh.tokens_read, []).append(1e3 * refresh.seconds)
    for tokens_read, ms in sorted(read_ms.items()):
        texts.rows.add_values("teacher", texts.setting | {"k": tokens_read}, read_ms=ms)


def add_predicted_times(rows: Results, new_tokens: int, setting: Setting) -> None:
    """Append the time of every way by the source's cost model, in units of OverFill's, the
    prompt's prefill included: N / TPS + the sum of prefill(k_r), the student's decoding and the
    teacher's passes over k_r tokens each. prefill(k) is the line through the times of these passes.

    Source: section "Why is it cheap?".
    """
    points = [point[:2] for point in points_over(rows, "teacher", "read_ms", "k", setting)]
    if len(points) < 2:
        return
    slope, intercept = np.polyfit(*zip(*points, strict=True), 1)  # ms
    first_ms, tps = (rows.figure("none", metric, **setting).value for metric in ("first_ms", "tps"))
    overfill_ms = first_ms + 1e3 * (new_tokens - 1) / tps
    for way in rows.ways_due(rows.ways(), "time", **setting, by="formula"):
        passes, reads = (rows.find(way, metric, **setting) for metric in ("passes", "reads"))
        if passes is None or way in PUBLISHED:
            continue
        # Of an average text, so it needn't be whole:
        pass_count = passes["value"] * new_tokens / 1000
        prefills = slope * reads["value"] + pass_count * intercept  # of all passes together
        predicted = 1 + prefills / overfill_ms
        rows.add_figures(way, setting | {"by": "formula"}, 1, time=[predicted] * 3)


def add_least_times(rows: Results, setting: Setting) -> None:
    """Append the least time of refreshes every k tokens by the source's own tokens/s, in units of
    OverFill's: a refresh is a pass of the teacher, no shorter than one over a single token.

    Source: the table of baselines, TPS.
    """
    setting = setting | {"by": "source"}
    rows.set_conditions("arithmetic, by the source's own tokens/s")
    for way in rows.ways_due(["periodic:64", "speculative:8"], "time", **setting):
        every = int(way.partition(":")[2])
        least_time = 1 + SOURCE_TPS["none"] / (every * SOURCE_TPS["teacher"])
        rows.add_figures(way, setting, 1, time=[least_time] * 3)


def add_variational_identity(rows: Results) -> None:
    """Append, for three symbols, the expectation of -log p(y) over y from q (left), what the
    source says that it is, KL(p || q) - H[p], and what it is, KL(q || p) + H[q]; in nats."""
    p, q = (0.7, 0.2, 0.1), (0.2, 0.3, 0.5)
    of_p, of_q = np.log(p), np.log(q)
    nats = {
        "left": -np.dot(q, of_p),
        "said": np.dot(p, of_p - of_q) + np.dot(p, of_p),
        "true": np.dot(q, of_q - of_p) - np.dot(q, of_q),
    }
    rows.set_conditions(f"arithmetic: three symbols, teacher {p}, student {q}")
    for way in rows.ways_due(nats, "nats", **ARITHMETIC):
        rows.add_values(way, ARITHMETIC, nats=[nats[way]])


# --- The study --------------------------------------------------------------------------------------


def parameter_count_text(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"


def load_prompts(
    name: str,
    tokenizer: Any,
    path: str | None,
    test_count: int,
    max_length: int,
    chat: bool,
) -> dict[str, Tensor]:
    """Return prompts (B, T) for setting gates ("valid") and for measuring ("test"). They are
    beginnings of pocket's documents; for another teacher, stretches of the texts in data/real; or a
    CSV file's prompts, every fifth for setting gates, all cut to the length of the shortest. With
    chat, they are questions in the model's own form, and only the questions are cut.

    Raises ValueError if a file has fewer than 5 prompts, or if they exceed max_length tokens.
    """
    if path is None and not name.startswith("pocket"):
        ids = torch.tensor(rows_of_tokens(tokenizer, 2 * PROMPT_LENGTH)[:test_count])
        return dict(zip(("test", "valid"), ids.split(PROMPT_LENGTH, dim=1), strict=True))
    if path is None:
        split_ids = {}
        for split, count in (("valid", (test_count + 1) // 2), ("test", test_count)):
            split_ids[split] = torch.tensor(
                corpus.beginnings(tokenizer, split, count, PROMPT_LENGTH)
            )
        return split_ids
    special = tokenizer.special_tokens_set
    prompts = [tokenizer.encode(text, allowed_special=special) for text in read_prompts(Path(path))]
    before, after = question_form(tokenizer).split("{}") if chat else ("", "")
    before = tokenizer.encode(before, allowed_special=special) or beginning_tokens(tokenizer)
    after = tokenizer.encode(after, allowed_special=special)
    if len(prompts) < 5:
        raise ValueError(f"{path} has {len(prompts)} prompts: at least 5 are needed")
    shortest = min(map(len, prompts))
    length = len(before) + shortest + len(after)
    if length > max_length:
        raise ValueError(
            f"the prompts of {path} have {length} tokens or more: at most {max_length} fit"
        )
    ids = torch.tensor([[*before, *prompt[-shortest:], *after] for prompt in prompts])
    test_rows = [i for i in range(len(ids)) if i % 5]
    return {"valid": ids[::5], "test": ids[test_rows]}


def add_more_texts(texts: Texts) -> None:
    """Append the quality of more texts of pocket and its student, without refreshes, in both
    modes."""
    rows, setting = texts.rows, texts.setting | {"texts": MORE_TEXTS}
    ids = corpus.beginnings(texts.tokenizer, "test", MORE_TEXTS, PROMPT_LENGTH)
    device = texts.prompts["test"].device
    more = replace(texts, prompts={"test": torch.tensor(ids, device=device)}, setting=setting)
    rows.set_model_conditions(
        "pocket",
        texts.models["teacher"],
        f"student {STUDENTS['segments'][0]}: {parameter_count_text(texts.models['student'])}",
        f"{MORE_TEXTS} held-out prompts of {PROMPT_LENGTH} tokens, {texts.new_tokens:,} new tokens",
    )
    for mode in MODES:
        add_quality(more, ("teacher", "none", "student"), mode)


def measure_at_size(rows: Results, quick: bool) -> None:
    """Append times at the size of a real model: random weights, on which times don't depend, and a
    student narrowed as pocket's is."""
    size, new_tokens, turns = ("2x2x64", 70, 1) if quick else ("355M", 260, 5)
    teacher = random_model(GPT, size)
    student = order_for_decoding(GPT(narrowed(teacher.config))).eval()
    ids = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))
    setting = {"model": "355M", "tokens": 260}
    texts = Texts(
        rows, {"teacher": teacher, "student": student}, {"test": ids}, new_tokens, setting
    )
    rows.set_model_conditions(
        f"{size}, random weights",
        teacher,
        f"a student of {parameter_count_text(student)}",
        f"{new_tokens} tokens after a prompt of 64, one text at a time",
        f"turns: {turns}",
    )
    add_times(texts, ("teacher", "none", "student", *REFRESHED_WAYS_AT_SIZE), 1, turns)
    add_predicted_times(rows, new_tokens, setting)
    add_least_times(rows, setting)


class Size(NamedTuple):
    """How many tokens are written after how many prompts, and how often each text is timed."""

    new_tokens: int
    prompts: int
    turns: int


def size_of(args: argparse.Namespace) -> Size:
    """Return the size of a run: texts in data/real are shorter and fewer than other prompts' texts."""
    if args.prompts or args.model.startswith("pocket"):
        return Size(72, 4, 1) if args.quick else Size(1000, 50, 9)
    return Size(24, 4, 1) if args.quick else Size(192, 12, 4)


def students_of(args: argparse.Namespace) -> dict[str, tuple[str, Sequence[str]]]:
    """Return the students by how they were trained: a model's name, and the ways to refresh it."""
    is_pocket = args.model.startswith("pocket")
    if is_pocket and not args.student:
        return STUDENTS
    if args.model == REAL_MODEL and not args.student and not args.prompts:
        return {"int4": REAL_STUDENTS["int4"]} if args.quick else REAL_STUDENTS
    ways = USUAL_WAYS if is_pocket or args.prompts else REAL_WAYS
    return {"segments": (args.student or default_student(args.model), ways)}


def texts_of(
    rows: Results, args: argparse.Namespace, size: Size, training: str, student_name: str
) -> Texts:
    """Return what a student writes, and after which prompts."""
    teacher, student, tokenizer = load_pair(
        args.model, student_name, device=args.device, dtype=args.dtype
    )
    overfill.check_pair(teacher, student)
    room = min(teacher.config.n_ctx, student.config.n_ctx) - size.new_tokens
    prompts = load_prompts(args.model, tokenizer, args.prompts, size.prompts, room, args.chat)
    prompts = {split: ids.to(args.device) for split, ids in prompts.items()}
    models, setting = {"teacher": teacher, "student": student}, {"trained": training}
    texts = Texts(rows, models, prompts, size.new_tokens, setting, tokenizer=tokenizer)
    if not args.model.startswith("pocket"):
        texts.setting["model"] = args.model
        texts.end_ids = end_tokens_of(tokenizer)
    return texts


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    size, students = size_of(args), students_of(args)
    is_short = args.quick and not args.model.startswith("pocket")
    modes = [*MODES][:1] if is_short else [*MODES]
    for training, (name, ways) in students.items():
        texts = texts_of(rows, args, size, training, name)
        teacher, student = texts.models.values()
        same_geometry = not geometry_difference(teacher, student)
        if not same_geometry:  # the teacher's cache can't be spliced into the student's
            ways = [way for way in ways if way not in PUBLISHED]
        text_count, prompt_length = texts.prompts["test"].shape
        timed_prompts = min(3, text_count)
        drawn = "sampled at temperature 1" + (", or greedy" if "greedy" in modes else "")
        rows.set_model_conditions(
            args.model,
            teacher,
            f"student {name}: {parameter_count_text(student)}",
            f"{text_count} held-out prompts of {prompt_length} tokens, {size.new_tokens:,} new tokens, {drawn}",
            f"times: single texts after {timed_prompts} of them, turns: {size.turns}",
        )
        for mode in modes:
            add_quality(texts, ways, mode)
        if training == "dropout":
            add_signal_areas(texts)
        if training in ("segments", "int4") and same_geometry:
            add_cache_errors(texts, WAYS_ALONG_A_TEXT, max(1, size.prompts // 6))
        if training in ("segments", "dropout", "int4"):
            add_times(texts, ways, timed_prompts, size.turns)
        add_predicted_times(rows, size.new_tokens, texts.setting)
        if students is STUDENTS and training == "segments" and not rows.no_verdict_reason:
            add_more_texts(texts)
    add_variational_identity(rows)


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "refreshing", "less of everything", model="--teacher")
    cli.add_options("--student", "--chat")
    cli.add_argument("--prompts", metavar="FILE", help="CSV of your own prompts, column prompt")
    with cli.parse(argv) as args:
        others = args.prompts or args.student or args.model not in ("pocket", REAL_MODEL)
        if args.chat and not args.prompts:
            raise ValueError("--chat needs prompts of your own: give it --prompts FILE")
        difference = "run of other models or prompts" if others else ""
        trained = "int4" if args.model == REAL_MODEL and not others else "segments"
        setting = {"model": args.model, "trained": trained}
        at_size = args.model == "pocket" and not others
        beyond = [] if at_size else [periodic_time, speculative_time, cost_formula]
        rows = open_results("refreshing", args, RECORDED_MODELS, difference, setting, beyond)
        measure(rows, args)
        if at_size:
            measure_at_size(rows, args.quick)
        report(rows)
