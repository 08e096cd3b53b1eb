"""The refresh study: a student's texts on its teacher's KV cache, by every way of refreshing it.

`python3 -m studies.refreshing` takes two and a half hours and goes on where it was interrupted; `--quick`
takes a minute; `--again 'periodic:*'` measures these ways once more. The source's own experiment,
with a file of questions (the source's are ELI5's, held out), is
  python3 -m studies.refreshing --teacher meta-llama/Llama-3.2-3B-Instruct --student \
  friendshipkim/overfill-Llama-3.2-3B-Instruct-pruned-h0.45-i0.45-a0.0-d0.0 \
  --prompts FILE.csv --chat --dtype bfloat16

Ways: teacher and student write alone; the others are policies of overfill.py, among them "none",
which is OverFill without a refresh; published:64 is the source's code, refreshed every 64 tokens.
Metrics, where perplexity is the teacher's:

perplexity                  of what is written
refreshes, reads, passes    refreshes a text, tokens that they let the teacher read, and its passes
                            in 1,000 tokens, after the prompt
time, tps, first_ms         in units of OverFill's of the same turn; tokens/s after the first token
read_ms                     of the teacher's pass over k new tokens, and the splice
threshold                   of a gate that fires as often as its name says
area                        under the ROC curve by which a signal tells where the models differ most
cache_error, kl             along one text for all: |C_S - C_T| / |C_T| of what was written, and
                            KL(teacher || student) of the next token in nats
"""

import argparse
import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import overfill
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import GPT, KVCache, generate, sample
from load_gpt2_weights import load_tokenizer
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
from pair import geometry_difference, load_pair, splice_last
from pocket import corpus
from pocket.evaluation import nats_of
from pocket.recipes import pruning
from recycle import read_prompts
from studies.core import Rows, Setting, StudyLine, matching_ways, open_rows, points_over, report
from support.chat import as_question
from support.conditions import random_model
from support.statistics import area_under_roc, kl
from support.timing import TimedText, run_in_turns, time_text

MODES = {"sampled": 1.0, "greedy": 0.0}  # temperatures
PUBLISHED = ("published:64", "published:8")
FEW = ("student", "none", "periodic:64", "speculative:8", "entropy~7.8")
USUAL = ["teacher", "student", *PUBLISHED]
for name, kind in overfill.POLICIES.items():
    if name != "dropout":
        USUAL += kind.studied
OWN = "pocket-student"
STUDENTS = {  # by what they were trained on or with: their names, and the ways that are measured
    "segments": (OWN, USUAL),
    "alone": ("pocket-student-alone", FEW),
    "prompts": ("pocket-student-prompt", FEW),
    # Trained with a dropout of 0.1, which is MonteCarloDropout's own rate.
    "dropout": ("pocket-student-dropout", ("none", "entropy~7.8", "dropout:8~7.8")),
}
TRACED = ("none", "periodic:64", "windowed-listing:64:16", "speculative:8", "entropy~7.8")
AT_SIZE = (
    "teacher",
    "none",
    "student",
    "periodic:256",
    "periodic:128",
    "periodic:64",
    "speculative:8",
)


@dataclass
class Texts:
    """A teacher and a student, the prompts (B, T) that they continue by n tokens each, and the
    setting of their rows."""

    rows: Rows
    models: dict[str, GPT]
    prompts: dict[str, Tensor]
    n: int
    at: Setting

    def policy(self, way: str, mode: str) -> Policy | None:
        """Return the policy of a way, a gate with the threshold of its row, if that is there."""
        if way in self.models or way in PUBLISHED:
            return None
        text, gated, _ = way.partition("~")
        policy = parse_policy(f"{text}:inf" if gated else text)
        found = self.rows.figure(way, "threshold", **self.at, mode=mode)
        return replace(policy, threshold=found.value) if found else policy

    def calibrate(self, way: str, mode: str) -> None:
        """Append the threshold with which a gate fires as often as its name says, on the prompts
        "valid"."""
        gate, budget = self.policy(way, mode), float(way.partition("~")[2])
        signals = self.signals("valid", gate, mode)
        cooldown = math.ceil(gate.cooldown / gate.every)
        threshold = threshold_for(signals, budget * gate.every, cooldown)
        self.rows.add_values(way, self.at | {"mode": mode}, threshold=[threshold])

    def writing(
        self, way: str, ids: Tensor, mode: str, seed: int
    ) -> tuple[Iterator[Tensor], RefreshedPair | None]:
        """Return what yields a way's n tokens after ids (B, T), and the pair at work, if any."""
        generator = torch.Generator(ids.device).manual_seed(seed)
        options = {"temperature": MODES[mode], "generator": generator}
        new_cache = KVCache
        if len(ids) > 1:
            new_cache = partial(SlidingWindowCache, ids.size(1) + self.n)
        if way in self.models:
            return generate(self.models[way], ids, self.n, cache=new_cache(), **options), None
        pair = RefreshedPair(**self.models, ids=ids, new_cache=new_cache)
        if way in PUBLISHED:
            every = int(way.partition(":")[2])
            return refresh_as_published(pair, self.n, every, **options), pair
        return overfill.generate_refreshed(pair, self.n, self.policy(way, mode), **options), pair

    @torch.no_grad()
    def signals(self, split: str, gate: Gate, mode: str) -> Tensor:
        """Return a gate's signals (B, T) on texts that nothing refreshes, as often as it looks at
        them."""
        found = []
        tokens, pair = self.writing("none", self.prompts[split], mode, seed=1)
        next(tokens)
        for t, _ in enumerate(tokens, 1):
            if t % gate.every == 0:
                found.append(gate.signal(pair).float().cpu())
        return torch.stack(found, 1)


@torch.no_grad()
def refresh_as_published(
    pair: RefreshedPair, n: int, every: int, temperature: float, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yield n tokens (B, 1) as the source's code writes them. It feeds the prompt's last token a
    second time, and the teacher has read the newest token when the student has not, so that a
    splice moves every entry by one token."""
    pair.prefill()
    token, unread = pair.ids[:, -1:], []
    for _ in range(n):
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


def quality(texts: Texts, ways: Sequence[str], mode: str) -> None:
    """Append the figures of the texts that ways write after all prompts, with equal draws."""
    at, ids = texts.at | {"mode": mode}, texts.prompts["test"]
    for way in texts.rows.ways_due(ways, "perplexity", **at):
        if "~" in way:
            texts.calibrate(way, mode)
        tokens, pair = texts.writing(way, ids, mode, seed=0)
        nats = []
        for text in torch.cat([ids, *tokens], 1).tolist():
            of_text = nats_of(texts.models["teacher"], text)[-texts.n :]
            nats.append(float(of_text.double().mean()))
        texts.rows.add_values(way, at, perplexity=nats)
        if pair:
            texts.rows.add_values(
                way,
                at,
                refreshes=pair.refresh_count.tolist(),
                reads=pair.teacher_tokens.tolist(),
                passes=(1000 / texts.n * pair.teacher_passes).tolist(),
            )


def threshold_for(signals: Tensor, per_1000: float, cooldown: int) -> float:
    """Return the threshold by which a gate would fire about per_1000 times in 1,000 tokens, given
    its signals (B, T) on texts that nothing refreshes."""
    levels = signals.flatten().sort(descending=True).values.tolist()

    def rate(threshold: float) -> float:  # grows from level to level
        return 1000 * firings(signals, threshold, cooldown) / signals.numel()

    return levels[bisect_right(levels, per_1000, lo=1, key=rate) - 1]


def firings(signals: Tensor, threshold: float, cooldown: int) -> int:
    """Return how often a gate fires over fixed signals (B, T), which its refreshes don't change."""
    count, last = 0, torch.zeros(signals.size(0), dtype=torch.long)
    for t, fires in enumerate((signals > threshold).T, 1):
        fires = fires & (t - last >= cooldown)
        last = torch.where(fires, t, last)
        count += int(fires.sum())
    return count


def areas(texts: Texts) -> None:
    """Append the areas under the ROC curve by which entropy and U(t) tell the tenth of the tokens
    with the largest KL(teacher || student) from the others; intervals over texts."""
    if not texts.rows.ways_due(["dropout"], "area", **texts.at):
        return
    ways, never = ("entropy", "dropout"), math.inf
    gates = ProbeKL(never), Entropy(never), MonteCarloDropout(never)
    apart, *signals = (texts.signals("test", gate, "sampled").numpy() for gate in gates)
    large = apart >= np.quantile(apart, 0.9)
    n = len(apart)
    draws = [np.arange(n), *np.random.default_rng(0).integers(n, size=(200, n))]
    for way, x in zip(ways, signals, strict=True):
        found = [area_under_roc(x[draw][large[draw]], x[draw][~large[draw]]) for draw in draws]
        low, high = np.quantile([area for area in found[1:] if area is not None], [0.025, 0.975])
        texts.rows.add_figures(way, texts.at, n, area=(found[0], low, high))


@torch.no_grad()
def caches(texts: Texts, ways: Sequence[str], prompts: int) -> None:
    """Append the error of the cache and the divergence of the next token, along a text that
    OverFill has written: all ways read the same, and differ by their caches alone. The prompt's
    entries are left out: they are the teacher's own."""
    ways = texts.rows.ways_due(ways, "cache_error", **texts.at)
    if not ways:
        return
    ids, teacher, truth = texts.prompts["test"][:prompts], texts.models["teacher"], KVCache()
    start = ids.size(1)
    new = torch.cat([*texts.writing("none", ids, "sampled", seed=0)[0]], 1)  # (B, N)
    expected = teacher(torch.cat([ids, new], 1), truth)[:, start:]  # (B, N, V)
    exact = torch.stack(truth.layers)[..., start:, :]  # (L, 2, B, H, N, D)
    for way in ways:
        room = partial(SlidingWindowCache, start + texts.n)
        pair = RefreshedPair(**texts.models, ids=ids, new_cache=room)
        errors, apart = [], []
        policy = texts.policy(way, "sampled")
        for t, logits in enumerate(overfill.read_along(pair, new, policy), 1):
            apart.append(float(kl(expected[:, t - 1], logits).mean()))
            mine = torch.stack(pair.student_cache.layers)[
                ..., start : start + t, :
            ]  # (L, 2, B, H, t, D)
            its = exact[..., :t, :]
            off, norm = (x.square().sum((0, 1, 3, 4, 5)) for x in (mine - its, its))  # (B,)
            errors.append(float((off / norm).sqrt().mean()))
        texts.rows.add_values(way, texts.at, cache_error=errors, kl=apart)


# --- Time -------------------------------------------------------------------------------------------


def times(texts: Texts, ways: Sequence[str], prompts: int, turns: int) -> None:
    """Append the times of ways that take turns, beside OverFill's. Ways that are measured later take
    turns with OverFill too, whose own rows stay: their tokens/s are what they would have been
    then."""
    rows, at = texts.rows, texts.at
    ways = [way for way in rows.ways_due(ways, "time", **at) if way != "none"]
    if not ways:
        return

    def written(way: str, turn: int) -> tuple[TimedText, RefreshedPair | None]:
        """Write one text, sampled, after the first prompts in turn."""
        ids = texts.prompts["test"][turn % prompts][None]
        tokens, pair = texts.writing(way, ids, "sampled", seed=turn)
        return time_text(lambda: tokens), pair

    found = run_in_turns({way: partial(written, way) for way in ("none", *ways)}, turns)
    then = rows.figure("none", "tps", **at)
    spans = {}  # to the first token and to the last
    for way, several in found.items():
        spans[way] = np.array(
            [(run.first_token_seconds, run.total_seconds) for run, _ in several]
        ).T
    first, total = spans["none"]
    steps = texts.n - 1
    if then:
        del found["none"]
        steps = then.value * (total - first)
    else:
        rows.add_values("none", at, first_ms=1e3 * first)
        read_times(texts, found)
    for way, several in found.items():
        begun, ended = spans[way]
        rows.add_values(way, at, time=ended / total, tps=steps / (ended - begun))
        _, pair = several[0]
        if pair and not rows.find(way, "passes", **at):  # quality() wasn't asked
            passes = 1000 / texts.n * int(pair.teacher_passes)
            rows.add_values(way, at, passes=[passes], reads=[int(pair.teacher_tokens)])


def read_times(texts: Texts, found: dict[str, list]) -> None:
    """Append the times of the teacher's passes over k new tokens, of what times() found."""
    reads = {}
    for way, several in found.items():
        policy = texts.policy(way, "sampled")
        if isinstance(policy, Periodic) and not policy.reads_window:
            for _, pair in several:
                for refresh in pair.refreshes:
                    reads.setdefault(refresh.tokens_read, []).append(1e3 * refresh.seconds)
    for k, ms in sorted(reads.items()):
        texts.rows.add_values("teacher", texts.at | {"k": k}, read_ms=ms)


def predict(rows: Rows, n: int, at: Setting) -> None:
    """Append the time of every way by the source's cost model, in units of OverFill's, the
    prompt's prefill included: N / TPS + the sum of prefill(k_r), the student's decoding and the
    teacher's passes over k_r tokens each. prefill(k) is the line through the times of these passes.

    Source: section "Why is it cheap?".
    """
    points = [point[:2] for point in points_over(rows, "teacher", "read_ms", "k", at)]
    if len(points) < 2:
        return
    slope, start = np.polyfit(*zip(*points, strict=True), 1)  # ms
    first, tps = (rows.figure("none", metric, **at).value for metric in ("first_ms", "tps"))
    alone = first + 1e3 * (n - 1) / tps
    for way, _ in matching_ways(rows, [".*"]):
        passes, reads = (rows.figure(way, metric, **at) for metric in ("passes", "reads"))
        if passes is None or way in PUBLISHED:
            continue
        count = passes.value * n / 1000  # of a mean text, so that it needn't be whole
        prefills = slope * reads.value + count * start  # of all passes together
        found = round(1 + prefills / alone, 4)
        exact = (found, found, found)
        if rows.figure(way, "time", **at, by="formula") != exact:
            rows.add_figures(way, at | {"by": "formula"}, 1, time=exact)


def variational(rows: Rows) -> None:
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
    for way in rows.ways_due(nats, "nats"):
        rows.add_values(way, {}, nats=[nats[way]])


# --- The study --------------------------------------------------------------------------------------


def size_of(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"


def prompts_of(
    tokenizer: Any, path: str | None, n: int, room: int, chat: bool
) -> dict[str, Tensor]:
    """Return prompts (B, T) to set gates on ("valid") and to measure ("test"): beginnings of
    pocket's documents; or of a CSV file, every fifth to set gates on, all cut to the shortest; with
    chat, as questions in the model's own form, of which the questions are cut.

    Raises ValueError if a file has fewer than 5, or one has more than room tokens.
    """
    if path is None:
        found = {}
        for split, k in (("valid", (n + 1) // 2), ("test", n)):
            found[split] = torch.tensor(corpus.beginnings(tokenizer, split, k, 192))
        return found
    special = tokenizer.special_tokens_set
    prompts = [tokenizer.encode(text, allowed_special=special) for text in read_prompts(Path(path))]
    before, after = (as_question("{}", tokenizer) if chat else "{}").split("{}")
    before = tokenizer.encode(before, allowed_special="all")  # with what begins a text
    after = tokenizer.encode(after, allowed_special=special)
    if len(prompts) < 5:
        raise ValueError(f"{path} has {len(prompts)} prompts: at least 5 are needed")
    shortest = min(map(len, prompts))
    length = len(before) + shortest + len(after)
    if length > room:
        raise ValueError(f"the prompts of {path} have {length} tokens or more: at most {room} fit")
    ids = torch.tensor([[*before, *prompt[-shortest:], *after] for prompt in prompts])
    test = [i for i in range(len(ids)) if i % 5]
    return {"valid": ids[::5], "test": ids[test]}


def sized(rows: Rows, quick: bool) -> None:
    """Append times at the size of a real model: random weights, on which times don't depend, and a
    student narrowed as pocket's is."""
    size, n, turns = ("2x2x64", 70, 1) if quick else ("355M", 260, 5)
    large = random_model(GPT, size)
    student = GPT(pruning("pocket", large.config, 1, "segments").config).eval()
    ids = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))
    at = {"model": "355M", "tokens": 260}
    texts = Texts(rows, {"teacher": large, "student": student}, {"test": ids}, n, at)
    rows.set_model_conditions(
        f"{size}, random weights",
        large,
        f"a student of {size_of(student)}",
        f"{n} tokens after a prompt of 64, one text at a time",
        f"turns: {turns}",
    )
    times(texts, AT_SIZE, 1, turns)
    predict(rows, n, at)


@torch.no_grad()
def announce(texts: Texts, ways: int, single: int) -> None:
    """Print what a run needs: memory, before a cache is made; then time, by a step of the student. Texts are written
    at once in each mode and way, and `single` of them one by one in each way."""
    ids, student = texts.prompts["test"], texts.models["student"]
    many, length = ids.shape
    pair = RefreshedPair(**texts.models, ids=ids[:1])
    pair.prefill()
    nbytes = many * (length + texts.n) * pair.nbytes // length
    for model in texts.models.values():
        nbytes += sum(p.nbytes for p in model.parameters())
    print(f"Memory: {nbytes / 1e6:,.1f} MB for both models' weights and caches.", flush=True)
    seconds = 0.0
    for rows, times in ((ids, len(MODES)), (ids[:1], single)):
        cache = student.new_cache()
        student(rows, cache, last_only=True)
        begun = time.perf_counter()
        float(student(rows[:, -1:], cache)[0, 0, 0])  # waits for the device
        seconds += times * ways * texts.n * (time.perf_counter() - begun)
    print(
        f"Time: {seconds / 3600:.1f} hours for the student's steps; the teacher's reading comes on "
        "top. An interrupted run begins anew.\n",
        flush=True,
    )


def measure(rows: Rows, args: argparse.Namespace) -> None:
    """Measure what the rows lack, or what is to be measured again. Models of the user's own, with
    prompts from a file, begin with what they need."""
    n, count, turns = (72, 4, 1) if args.quick else (1000, 50, 9)
    tokenizer, path = load_tokenizer(args.model), args.prompts
    students = STUDENTS if args.student == OWN else {"segments": (args.student, USUAL)}
    for train, (name, ways) in students.items():
        teacher, student, _ = load_pair(args.model, name, device=args.device, dtype=args.dtype)
        room = min(teacher.config.n_ctx, student.config.n_ctx) - n
        prompts = prompts_of(tokenizer, path, count, room, args.chat)
        prompts = {split: ids.to(args.device) for split, ids in prompts.items()}
        at = {"trained": train}
        texts = Texts(rows, {"teacher": teacher, "student": student}, prompts, n, at)
        fits = not geometry_difference(teacher, student)
        if not fits:  # the teacher's cache can't be spliced into the student's
            ways = [way for way in ways if way not in PUBLISHED]
        many, length = prompts["test"].shape
        few = min(3, many)
        if path is not None:
            announce(texts, len(ways), turns * few)
        rows.set_model_conditions(
            args.model,
            teacher,
            f"students of {size_of(student)}",
            f"{many} held-out prompts of {length} tokens, {n:,} new tokens, sampled at temperature 1",
            f"times: single texts after {few} of them, turns: {turns}",
        )
        for mode in MODES:
            quality(texts, ways, mode)
        if train == "dropout":
            areas(texts)
        if train == "segments" and fits:
            caches(texts, TRACED, max(1, count // 6))
        if train in ("segments", "dropout"):
            times(texts, ways, few, turns)
        predict(rows, n, at)
    variational(rows)


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "refreshing", "less of everything", model="--teacher", again=True)
    cli.add_argument("--student", default=OWN, metavar="NAME", help="who decodes")
    cli.add_argument("--prompts", metavar="FILE", help="prompts of your own: CSV, column prompt")
    cli.add_chat_argument()
    with cli.parse(argv) as args:
        others = args.prompts is not None or (args.model, args.student) != ("pocket", OWN)
        if not args.prompts and (args.chat or args.model != "pocket"):
            needs = "--chat" if args.chat else args.model
            raise ValueError(f"{needs} needs prompts of your own: give it --prompts FILE")
        rows = open_rows("refreshing", args, "run of other models or prompts" if others else "")
        measure(rows, args)
        if not others:
            sized(rows, args.quick)
        report(rows)
