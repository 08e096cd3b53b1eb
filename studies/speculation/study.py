"""Exact speculation beside refreshes: with equally many passes of the teacher, which text is
better, and how fast is it written?

`python3 -m studies.speculation` takes a few minutes, `--quick` a minute. Each prompt is continued
by the teacher alone, by exact speculation (exact:8: the student drafts 8 tokens; text:8: they are
copied from the text), and by refreshes after bursts (speculative:8). The comparison is ours.

perplexity  of the written text, by the teacher
passes      the teacher's passes after the prompt, per 1,000 tokens
kept        the share of the drafted tokens that stay
same        whether a text is the teacher's own
tps         tokens/s, the prompt's prefill included
"""

from functools import partial
from typing import NamedTuple

import torch

from pair import Pair, load_pair
from pocket import corpus
from pocket.evaluation import token_losses
from speculate import DRAFTERS, DraftCounts, speculate
from studies.core import Rows, run_study
from studies.refreshing.study import MODES, Texts, parameter_count_text
from support.timing import TimedText, run_in_turns, time_text

EXACT_DRAFTERS = {"exact": DRAFTERS["student"], "text": DRAFTERS["text"]}
LENGTHS = (4, 8, 16)  # of drafts and bursts
WAYS = [
    "teacher",
    *(f"exact:{k}" for k in LENGTHS),
    "text:8",
    *(f"speculative:{k}" for k in LENGTHS),
]


class Written(NamedTuple):
    """A text's tokens and times, the teacher's mean nats, and what became of drafts."""

    timed_text: TimedText
    nats: float
    counts: DraftCounts


def write_text(texts: Texts, way: str, mode: str, turn: int) -> Written:
    """Continue the prompt of a turn in one way."""
    ids, new_tokens = texts.prompts["test"][turn][None], texts.new_tokens
    kind, _, k = way.partition(":")
    counts = DraftCounts()
    if kind in EXACT_DRAFTERS:
        pair = Pair(**texts.models, ids=ids)
        generator = torch.Generator().manual_seed(turn)
        options = {"temperature": MODES[mode], "generator": generator}
        tokens = speculate(pair, new_tokens, int(k), EXACT_DRAFTERS[kind], counts, **options)
    else:
        tokens, pair = texts.start_writing(way, ids, mode, turn)
    timed_text = time_text(lambda: tokens)
    if kind not in EXACT_DRAFTERS:
        counts.passes = int(pair.teacher_passes) if pair else new_tokens - 1
    nats = token_losses(texts.models["teacher"], ids[0].tolist() + timed_text.ids)[-new_tokens:]
    return Written(timed_text, float(nats.mean()), counts)


@torch.no_grad()
def compare_ways(texts: Texts, mode: str) -> None:
    """Append the rows of the ways that have none yet; they take turns with the teacher alone."""
    rows, setting = texts.rows, {"mode": mode}
    ways = rows.ways_due(WAYS, "perplexity", **setting)
    if not ways:
        return
    runs = {way: partial(write_text, texts, way, mode) for way in ("teacher", *ways)}
    written = run_in_turns(runs, len(texts.prompts["test"]))
    teacher_texts = [text.timed_text.ids for text in written["teacher"]]
    for way in ways:
        of_way = written[way]
        same = [
            float(text.timed_text.ids == teacher_ids)
            for text, teacher_ids in zip(of_way, teacher_texts, strict=True)
        ]
        rows.add_values(
            way,
            setting,
            perplexity=[text.nats for text in of_way],
            passes=[1000 * text.counts.passes / texts.new_tokens for text in of_way],
            tps=[texts.new_tokens / text.timed_text.total_seconds for text in of_way],
            same=same,
        )
        drafted = sum(text.counts.drafted for text in of_way)
        if drafted:
            kept = sum(text.counts.accepted for text in of_way) / drafted
            rows.add_figures(way, setting, len(of_way), kept=[kept])


def measure(rows: Rows, quick: bool) -> None:
    """Measure every figure that has no row yet, in both modes."""
    new_tokens, prompt_count = (32, 4) if quick else (256, 20)
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
        compare_ways(texts, mode)


main = partial(run_study, __doc__, "speculation", "four prompts and shorter texts", measure)
