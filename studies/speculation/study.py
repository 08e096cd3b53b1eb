"""Exact speculation beside refreshes: with equally many passes of the teacher, which text is
better, and how fast is it written?

`python3 -m studies.speculation` takes a few minutes, `--quick` a minute. Each prompt is continued
by the teacher alone, by exact speculation (exact:8: the student drafts 8 tokens; text:8: they are
copied from the text), and by refreshes after bursts (speculative:8). `--model smollm2` takes
SmolLM2-135M-Instruct, in 20 minutes: it answers prompts of data/real, open ones and those that ask
for a text to be rewritten (the setting `task`), and its copies with weights of 8 and 4 bits draft
(the setting `student`); all greedy. The comparison is ours.

perplexity  of the written text, by the teacher
passes      the teacher's passes after the prompt, per 1,000 tokens
kept        the share of the drafted tokens that stay
tps         tokens/s, the prompt's prefill included
taken       time of a text over the teacher's own time for it
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import astuple
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from formats.chat import encode_prompt
from gpt_kv_cache import generate
from overfill import RefreshedPair, generate_refreshed, parse_policy
from pair import Pair, load_pair
from pocket import corpus
from pocket.evaluation import token_losses
from speculate import DraftCounts, draft_by_student, draft_from_text, speculate
from studies.core import RECORDED_MODELS, run_study
from studies.results import Results, Setting
from support.printing import end_tokens_of
from support.texts import read_prompts_of_kind
from support.timing import run_in_turns, time_text

DRAFTERS = {"exact": draft_by_student, "text": draft_from_text}
POCKET_WAYS = (
    "teacher",
    "exact:4",
    "exact:8",
    "exact:16",
    "text:8",
    "speculative:4",
    "speculative:8",
)
REAL_WAYS = ("teacher", "exact:8", "text:8")
# The student's name after the teacher's, the setting, and how many prompts are continued.
POCKET_CASES = [("-student", {"mode": "sampled"}, 20), ("-student", {"mode": "greedy"}, 20)]
REAL_CASES = [
    (":int8", {"mode": "greedy"}, 6),
    (":int8", {"mode": "greedy", "task": "rewrite"}, 12),
    (":int4", {"mode": "greedy", "student": "int4"}, 6),
]


class Writer(NamedTuple):
    """A teacher and a student, and the prompts (1, T) that they continue by new tokens, up to one of
    stop_ids."""

    teacher: nn.Module
    student: nn.Module
    prompts: Sequence[Tensor]
    new_tokens: int
    stop_ids: Collection[int] = ()

    def write(self, way: str, mode: str, turn: int) -> list[float]:
        """Continue the prompt of a turn in one way. Return the number of tokens, the seconds, the
        teacher's passes, the drafted tokens and those accepted, and the teacher's mean nats."""
        teacher, student, prompts, new_tokens, stop_ids = self
        ids, counts = prompts[turn], DraftCounts()
        generator = torch.Generator(ids.device).manual_seed(turn)
        options = {"temperature": float(mode == "sampled"), "generator": generator}
        kind, _, k = way.partition(":")
        if kind in DRAFTERS:
            pair, options["stop_ids"] = Pair(teacher, student, ids), stop_ids
            tokens = speculate(pair, new_tokens, int(k), DRAFTERS[kind], counts, **options)
        elif kind == "teacher":
            tokens = generate(teacher, ids, new_tokens, **options)
        else:
            pair = RefreshedPair(teacher, student, ids)
            tokens = generate_refreshed(pair, new_tokens, parse_policy(way), **options)
        text, _, seconds = time_text(lambda: tokens, stop_ids)
        if kind == "teacher":
            counts.passes = len(text) - 1
        elif kind not in DRAFTERS:
            counts.passes = int(pair.teacher_passes)
        nats = token_losses(teacher, ids[0].tolist() + text)[-len(text) :].mean()
        return [len(text), seconds, *astuple(counts), float(nats)]


@torch.no_grad()
def compare_ways(rows: Results, writer: Writer, setting: Setting, all_ways: Sequence[str]) -> None:
    """Append the rows of the ways that have none yet; they take turns with the teacher alone."""
    ways = rows.ways_due(all_ways, "perplexity", **setting)
    runs = {way: partial(writer.write, way, setting["mode"]) for way in ("teacher", *ways)}
    written = run_in_turns(runs, len(writer.prompts)) if ways else {}
    for way in ways:
        lengths, seconds, passes, drafted, accepted, nats = np.array(written[way]).T
        if drafted.any():
            kept = accepted.sum() / drafted.sum()
            rows.add_figures(way, setting, len(drafted), kept=[kept])
        rows.add_values(
            way,
            setting,
            passes=1000 * passes / lengths,
            tps=lengths / seconds,
            taken=seconds / np.array(written["teacher"])[:, 1],
            perplexity=nats,  # the last of them tells that a way has its rows
        )


def measure(rows: Results, args: argparse.Namespace) -> None:
    """Measure every figure that has no row yet."""
    is_pocket = args.model.startswith("pocket")
    cases, ways, new_tokens = REAL_CASES, REAL_WAYS, 96
    if is_pocket:
        cases, ways, new_tokens = POCKET_CASES, POCKET_WAYS, 256
    for student_name, setting, count in cases:
        if args.quick:
            count, new_tokens = 4, 32
        name = args.model + student_name
        teacher, student, tokenizer = load_pair(
            args.model, name, device=args.device, dtype=args.dtype
        )
        if is_pocket:
            prompts, stop_ids = corpus.beginnings(tokenizer, "test", count, 192), ()
        else:
            asked = read_prompts_of_kind(rows.whole(setting)["task"])[:count]
            prompts = [encode_prompt(prompt, tokenizer) for prompt in asked]
            stop_ids = end_tokens_of(tokenizer)
        rows.set_model_conditions(
            args.model,
            teacher,
            f"student: {name}",
            f"{count} prompts, at most {new_tokens} new tokens, one text at a time",
        )
        tensors = [torch.tensor([ids], device=args.device) for ids in prompts]
        writer = Writer(teacher, student, tensors, new_tokens, stop_ids)
        compare_ways(rows, writer, setting | {"model": args.model}, ways)


main = partial(
    run_study,
    __doc__,
    "speculation",
    "few prompts and shorter texts",
    measure,
    recorded_models=RECORDED_MODELS,
)
