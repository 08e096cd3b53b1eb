"""Exact speculation beside refreshes: at as many passes of the teacher, which text is better, and
how fast is it?

`python3 -m studies.speculation` takes a few minutes, `--quick` a minute. Each prompt is continued
by the teacher alone, by exact speculation (exact:8: the student drafts 8 tokens; text:8: they are
copied from the text), and by refreshes after bursts (speculative:8). The comparison is ours.

perplexity  the teacher's, of what is written
passes      of the teacher after the prompt, in 1,000 tokens
kept        the share of the drafted tokens that stay
same        whether a text is the teacher's own
tps         tokens/s, the prompt's prefill included
"""

from functools import partial
from typing import NamedTuple

import torch

from pair import Pair, load_pair
from pocket import corpus
from pocket.evaluation import nats_of
from speculate import DRAFTERS, DraftCounts, speculate
from studies.core import Rows, run_study
from studies.refreshing.study import MODES, Texts, size_of
from support.timing import TimedText, run_in_turns, time_text

BY = {"exact": DRAFTERS["student"], "text": DRAFTERS["text"]}
SIZES = (4, 8, 16)  # of drafts and bursts
WAYS = [
    "teacher",
    *(f"exact:{k}" for k in SIZES),
    "text:8",
    *(f"speculative:{k}" for k in SIZES),
]


class Written(NamedTuple):
    """A text's tokens and times, the teacher's mean nats, and what became of drafts."""

    run: TimedText
    nats: float
    counts: DraftCounts


def write(texts: Texts, way: str, mode: str, turn: int) -> Written:
    """Continue the prompt of a turn in one way."""
    teacher, ids, n = texts.models["teacher"], texts.prompts["test"][turn][None], texts.n
    (kind, _, k), counts = way.partition(":"), DraftCounts()
    if kind in BY:
        pair = Pair(**texts.models, ids=ids)
        generator = torch.Generator().manual_seed(turn)
        options = {"temperature": MODES[mode], "generator": generator}
        tokens = speculate(pair, n, int(k), BY[kind], counts, **options)
    else:
        tokens, pair = texts.writing(way, ids, mode, turn)
    took = time_text(lambda: tokens)
    if kind not in BY:
        counts.passes = int(pair.teacher_passes) if pair else n - 1
    nats = nats_of(teacher, ids[0].tolist() + took.ids)[-n:]
    return Written(took, float(nats.mean()), counts)


@torch.no_grad()
def compare(texts: Texts, mode: str) -> None:
    """Append the rows of the ways that lack them, which take turns, beside the teacher alone."""
    rows, at = texts.rows, {"mode": mode}
    due = rows.ways_due(WAYS, "perplexity", **at)
    if not due:
        return
    runs = {way: partial(write, texts, way, mode) for way in ("teacher", *due)}
    found = run_in_turns(runs, len(texts.prompts["test"]))
    for way in due:
        several = found[way]
        same = [
            x.run.ids == alone.run.ids for x, alone in zip(several, found["teacher"], strict=True)
        ]
        rows.add_values(
            way,
            at,
            perplexity=[x.nats for x in several],
            passes=[1000 * x.counts.passes / texts.n for x in several],
            tps=[texts.n / x.run.total_seconds for x in several],
            same=map(float, same),
        )
        drafted = sum(x.counts.drafted for x in several)
        if drafted:
            kept = sum(x.counts.accepted for x in several) / drafted
            rows.add_figures(way, at, len(several), kept=[kept])


def measure(rows: Rows, quick: bool) -> None:
    """Measure what the rows lack, in both modes."""
    n, count = (32, 4) if quick else (256, 20)
    teacher, student, tokenizer = load_pair("pocket", "pocket-student")
    ids = torch.tensor(corpus.beginnings(tokenizer, "test", count, 192))
    texts = Texts(rows, {"teacher": teacher, "student": student}, {"test": ids}, n, {})
    rows.set_model_conditions(
        "pocket",
        teacher,
        f"pocket-student: {size_of(student)}",
        f"{count} held-out prompts of 192 tokens, {n} new tokens, one text at a time",
    )
    for mode in MODES:
        compare(texts, mode)


main = partial(run_study, __doc__, "speculation", "four prompts and shorter texts", measure)
