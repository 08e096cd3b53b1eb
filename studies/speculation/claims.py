"""Our question on exact speculation. study.py says what their metrics mean."""

from studies.judging import Answer, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

COMMANDS = ("speculation", "speculation --model smollm2")
METRICS = (
    metrics("perplexity", perplexity=".2f")
    | metrics("mean", passes=".0f", kept=".0%", same=".0%", repeated=".0%")
    | metrics("median", taken=".2f", tps=",.0f")
)
USUAL = {"model": "pocket", "student": "int8", "task": "open", "mode": "sampled"}
NAMES = {
    "teacher": "the teacher alone",
    "exact:4": "exact, drafts of 4 by the student",
    "exact:8": "exact, drafts of 8 by the student",
    "exact:16": "exact, drafts of 16 by the student",
    "text:8": "exact, drafts of 8 from the text",
    "speculative:4": "a refresh every 4",
    "speculative:8": "a refresh every 8",
    "speculative:16": "a refresh every 16",
}


@question(
    "Do refreshes beat speculation that takes as many passes of the large model?",
)
def refresh_or_speculation(results: Results) -> Answer:
    refreshed, exact, longer = (
        f"{results.figure(way, 'perplexity'):±} for {results.figure(way, 'passes')}"
        for way in ("speculative:4", "exact:4", "exact:8")
    )
    change = results.change("speculative:4", "exact:4", "perplexity")
    return (
        change.below(0),
        f"Refreshes every 4 tokens change exact speculation's perplexity by {change:±}",
        f"a refresh every 4 tokens has a perplexity of {refreshed} passes in 1,000 tokens, exact "
        f"drafts of 4 have {exact}, of 8 {longer}. The teacher alone writes "
        f"{results.figure('teacher', 'tps')} tokens/s, with drafts of 8 "
        f"{results.figure('exact:8', 'tps')}: drafts save time only where they cost much less",
    )


@question(
    "Do drafts copied from the text save time where a text is written again?",
    at={"model": "smollm2", "mode": "greedy", "task": "rewrite"},
)
def copied_drafts(results: Results) -> Answer:
    taken, on_open = (results.figure("text:8", "taken", task=task) for task in ("rewrite", "open"))
    return (
        taken.below(0.95),
        f"Copied drafts take {taken:±} of the time of the large model alone",
        f"{taken:±} of the time of the teacher alone, {results.figure('text:8', 'kept')} of the drafts "
        f"stay; on open tasks {on_open:±} and {results.figure('text:8', 'kept', task='open')}. Up to "
        "5% (ours) is noise",
    )


TABLE = Layout(
    "The teacher's passes in 1,000 tokens and its perplexity of the texts, with the share"
    " of their 3-grams that are repetitions. SmolLM2: at most 96 greedy tokens after 6 "
    "open prompts; its twin, with weights of 8 or 4 bits, drafts. Pocket: sampled at "
    "temperature 1.",
    ["teacher", "exact.*", "text:8", "speculative.*"],
    [
        *columns(
            "SmolLM2, int8",
            {
                "passes": "passes",
                "drafts kept": "kept",
                "the same text": "same",
                "perplexity": "perplexity",
                "repeated": "repeated",
            },
            model="smollm2",
            mode="greedy",
        ),
        *columns(
            "SmolLM2, int4",
            {"passes": "passes", "drafts kept": "kept", "perplexity": "perplexity"},
            model="smollm2",
            mode="greedy",
            student="int4",
        ),
        *columns(
            "pocket",
            {
                "passes": "passes",
                "drafts kept": "kept",
                "perplexity": "perplexity ±",
                "tokens/s": "tps",
            },
        ),
    ],
)
