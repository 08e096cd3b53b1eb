"""Our question on exact speculation. study.py says what their metrics mean."""

from studies.judging import Answer, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

COMMANDS = ("speculation", "speculation --model smollm2")
METRICS = (
    metrics("perplexity", perplexity=".2f")
    | metrics("mean", passes=".0f", kept=".0%")
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
}


@question(
    "Do refreshes beat speculation that takes as many passes of the large model?",
)
def refresh_or_speculation(results: Results) -> Answer:
    change = results.change("speculative:4", "exact:4", "perplexity")
    sentence = f"Refreshes every 4 tokens change exact speculation's perplexity by {change:±}"
    return change.below(0), sentence


@question(
    "Do drafts copied from the text save over 5% (ours) of the time where a text is written again?",
    at={"model": "smollm2", "mode": "greedy", "task": "rewrite"},
)
def copied_drafts(results: Results) -> Answer:
    taken = results.figure("text:8", "taken")
    return (
        taken.below(0.95),
        f"Copied drafts take {taken:±} of the time of the large model alone, on open tasks "
        f"{results.figure('text:8', 'taken', task='open'):±}",
    )


SHOWN = {"passes": "passes", "time": "taken ±", "drafts kept": "kept"}
REAL = {"model": "smollm2", "mode": "greedy"}
TABLE = Layout(
    "The teacher's passes in 1,000 tokens, without that of the prompt, the time over that of the teacher alone, and its "
    "perplexity of the texts. SmolLM2: at most 96 greedy tokens after open prompts, or of a text to "
    "be rewritten; its copies, with weights of 8 or 4 bits, are as slow as it is. Pocket: sampled at "
    "temperature 1.",
    [".*"],
    [
        *columns("SmolLM2, int8", SHOWN, **REAL),
        *columns("SmolLM2, int4", SHOWN, **REAL, student="int4"),
        *columns("SmolLM2 rewrites a text", SHOWN, **REAL, task="rewrite"),
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
