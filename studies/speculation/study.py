"""Exact speculation beside refreshes: with equally many passes of the teacher, which text is
better, and how fast is it written?

`python3 -m studies.speculation` takes a few minutes, `--quick` a minute. Each prompt is continued
by the teacher alone, by exact speculation (exact:8: the student drafts 8 tokens; text:8: they are
copied from the text), and by refreshes after bursts (speculative:8). `--model smollm2` takes
SmolLM2-135M-Instruct, in 20 minutes: it answers prompts of data/real, open ones and those that ask
for a text to be rewritten (the setting `task`), and its twins with weights of 8 and 4 bits draft
(the setting `student`); all greedy. The comparison is ours.

perplexity  of the written text, by the teacher
repeated    share of its 3-grams of tokens that it already had
passes      the teacher's passes after the prompt, per 1,000 tokens
kept        the share of the drafted tokens that stay
same        whether a text is the teacher's own
tps         tokens/s, the prompt's prefill included
taken       time of a text over the teacher's own time for it
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from formats.chat import encode_prompt
from pair import Pair, load_pair
from pocket import corpus
from pocket.evaluation import token_losses
from speculate import DRAFTERS, DraftCounts, speculate
from studies.core import RECORDED_MODELS, run_study
from studies.refreshing.study import MODES, Texts, parameter_count_text
from studies.results import Results, Setting
from support.printing import end_tokens_of
from support.statistics import repetition
from support.texts import read_prompts_of_kind
from support.timing import TimedText, run_in_turns, time_text

EXACT_DRAFTERS = {"exact": DRAFTERS["student"], "text": DRAFTERS["text"]}
LENGTHS = (4, 8, 16)  # of drafts and bursts
WAYS = [
    "teacher",
    *(f"exact:{k}" for k in LENGTHS),
    "text:8",
    *(f"speculative:{k}" for k in LENGTHS),
]

REAL_WAYS = ["teacher", "exact:4", "exact:8", "text:8", "speculative:8"]
REAL_SETTINGS = (("int8", "open"), ("int8", "rewrite"), ("int4", "open"))  # students, tasks


class Written(NamedTuple):
    """A text's tokens and times, the teacher's mean nats, and what became of drafts."""

    timed_text: TimedText
    nats: float
    counts: DraftCounts


def write_text(texts: Texts, way: str, mode: str, turn: int) -> Written:
    """Continue the prompt of a turn in one way, up to a token that ends a text."""
    ids, new_tokens = texts.prompts["test"][turn][None], texts.new_tokens
    kind, _, k = way.partition(":")
    counts = DraftCounts()
    if kind in EXACT_DRAFTERS:
        pair = Pair(**texts.models, ids=ids)
        generator = torch.Generator().manual_seed(turn)
        options = {"temperature": MODES[mode], "generator": generator, "stop_ids": texts.end_ids}
        tokens = speculate(pair, new_tokens, int(k), EXACT_DRAFTERS[kind], counts, **options)
    else:
        tokens, pair = texts.start_writing(way, ids, mode, turn)
    timed_text = time_text(lambda: tokens, texts.end_ids)
    length = len(timed_text.ids)
    if kind not in EXACT_DRAFTERS:
        counts.passes = int(pair.teacher_passes) if pair else length - 1
    nats = token_losses(texts.models["teacher"], ids[0].tolist() + timed_text.ids)[-length:]
    return Written(timed_text, float(nats.mean()), counts)


@torch.no_grad()
def compare_ways(texts: Texts, mode: str, all_ways: Sequence[str] = WAYS) -> None:
    """Append the rows of the ways that have none yet; they take turns with the teacher alone."""
    rows, setting = texts.rows, texts.setting | {"mode": mode}
    ways = rows.ways_due(all_ways, "perplexity", **setting)
    if not ways:
        return
    runs = {way: partial(write_text, texts, way, mode) for way in ("teacher", *ways)}
    written = run_in_turns(runs, len(texts.prompts["test"]))
    for way in ways:
        add_figures(rows, way, setting, written[way], written["teacher"])


def add_figures(
    rows: Results, way: str, setting: Setting, written: list[Written], by_teacher: list[Written]
) -> None:
    """Append the figures of a way's texts, beside those of the teacher alone."""
    pairs = [*zip(written, by_teacher, strict=True)]
    lengths = [len(text.timed_text.ids) for text in written]
    seconds = [text.timed_text.total_seconds for text in written]
    rows.add_values(
        way,
        setting,
        repeated=[repetition(text.timed_text.ids) for text in written],
        passes=[1000 * text.counts.passes / n for text, n in zip(written, lengths, strict=True)],
        tps=[n / s for n, s in zip(lengths, seconds, strict=True)],
        taken=[a.timed_text.total_seconds / b.timed_text.total_seconds for a, b in pairs],
        same=[float(a.timed_text.ids == b.timed_text.ids) for a, b in pairs],
        perplexity=[text.nats for text in written],
    )
    drafted = sum(text.counts.drafted for text in written)
    if drafted:
        kept = sum(text.counts.accepted for text in written) / drafted
        rows.add_figures(way, setting, len(written), kept=[kept])


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet, in both modes."""
    if args.model.startswith("pocket"):
        return measure_pocket(rows, args)
    new_tokens, prompt_count = (16, 2) if args.quick else (96, 6)
    for student_kind, task in REAL_SETTINGS[:2] if args.quick else REAL_SETTINGS:
        teacher, student, tokenizer = load_pair(
            args.model, f"{args.model}:{student_kind}", device=args.device, dtype=args.dtype
        )
        ids = []
        for prompt in read_prompts_of_kind(task)[:prompt_count]:
            ids.append(torch.tensor(encode_prompt(prompt, tokenizer), device=args.device))
        texts = Texts(
            rows,
            {"teacher": teacher, "student": student},
            {"test": ids},
            new_tokens,
            {"model": args.model, "student": student_kind, "task": task},
            end_tokens_of(tokenizer),
        )
        rows.set_model_conditions(
            args.model,
            teacher,
            f"student: its twin, {student_kind}",
            f"{len(ids)} prompts, at most {new_tokens} new tokens, one text at a time",
        )
        compare_ways(texts, "greedy", REAL_WAYS)


def measure_pocket(rows: Results, args: argparse.Namespace) -> None:
    """Append the figures of pocket and its student."""
    new_tokens, prompt_count = (32, 4) if args.quick else (256, 20)
    teacher, student, tokenizer = load_pair("pocket", "pocket-student")
    ids = torch.tensor(corpus.beginnings(tokenizer, "test", prompt_count, 192))
    texts = Texts(rows, {"teacher": teacher, "student": student}, {"test": ids}, new_tokens, {})
    rows.set_model_conditions(
        "pocket",
        teacher,
        f"pocket-student: {parameter_count_text(student)}",
        f"{prompt_count} held-out prompts of 192 tokens, {new_tokens} new tokens, one text at a time",
    )
    for mode in MODES:
        compare_ways(texts, mode, WAYS)


main = partial(
    run_study,
    __doc__,
    "speculation",
    "few prompts and shorter texts",
    measure,
    recorded_models=RECORDED_MODELS,
)
