"""The claims of BCT on quality. study.py says what their metrics mean."""

from studies.judging import (
    HOLDS,
    NOT_SHOWN,
    Answer,
    Claim,
    Source,
    for_each,
    metrics,
    question,
)
from studies.results import Results
from studies.showing import Column, Layout, columns

SOURCE = Source(
    "A Method for Building Large Language Models with Predefined KV Cache Capacity",
    "a Transformer of 1 billion parameters, built as a BCT of capacity 2,048; Common "
    "Crawl, RefinedWeb, The Pile; no table of results; lengths, hardware, BLEU's task and"
    " how the memory is read not stated",
)
COMMANDS = ("bounding", "bounding --model smollm2", "pretraining")
METRICS = (
    metrics("perplexity", perplexity=".2f", long=".2f", text=".1f")
    | metrics("mean", above="+.1%", bleu=".1f", lost=".1f", right=".0%")
    | metrics("share", facts=".0%")
    | metrics("exact", bytes=",.0f")
    | metrics("series", learned=".0%")
)
USUAL = {"model": "pocket", "built": "fine-tuned", "window": 36, "slots": 16, "pairs": 32}
LOOKING_UP = {"model": "two-layers"}  # of studies/pretraining
WINDOWS = (64, 128, 256, 512)  # tokens
EVERY = {"window": WINDOWS}
NAMES = {
    "full": "full attention",
    "window": "window of equal bytes",
    "sinks": "4 sinks, and a window",
    "ours": "BCT, our rule",
    "sum": "BCT, the source's sum",
    "sum-mk": "the sum, read through MK",
    "delta": "delta rule",
}


@Claim(
    SOURCE,
    "4.3, fine-tuned",
    "The BLEU scores are comparable to those of traditional methods, with differences within 3",
    "Fine-tuned, a BCT loses at most 3 BLEU",
    partly="our rule, in a pretrained model; read as at most 3 points worse",
)
def bleu_fine_tuned(results: Results) -> Answer:
    lost = results.figure("ours", "lost")
    return (
        lost.below(3),
        f"With a BCT, BLEU is {results.figure('ours', 'bleu')} instead of full attention's "
        f"{results.figure('full', 'bleu')}: {lost:±} points lower",
    )


@Claim(
    SOURCE,
    "Abstract, recall",
    "significantly reduces memory usage while maintaining the model's inference quality",
    "BCT needs much less memory, and still recalls what it read",
    partly="a synthetic task, models of two layers, judged on 32 keys; at most 3% of the keys lost (ours) "
    "is maintained",
    at=LOOKING_UP,
)
def recall(results: Results) -> Answer:
    change = results.change("sum", "full", "right")
    return (
        change.above(-0.03),
        f"With 16 slots, a BCT finds {results.figure('sum', 'right')} of 32 keys, {change:±} against "
        f"full attention, in {results.figure('sum', 'bytes')} bytes instead of "
        f"{results.figure('full', 'bytes')}; of 64 keys {results.figure('sum', 'right', pairs=64)}",
    )


def full_attention_is_ahead(results: Results) -> bool:
    """Return whether full attention predicts better than a window, as a fair trial needs."""
    return results.figure("window", "above").above(0) == HOLDS


@Claim(
    SOURCE,
    "4.3, from scratch",
    "The BLEU scores are comparable to those of traditional methods, with differences within 3",
    "Trained from scratch, a BCT loses at most 3 BLEU",
    partly="small models, one seed, one untuned learning rate. Full attention isn't ahead of the"
    " window, so it lacks training itself, and nothing is decided",
    at={"built": "scratch"},
)
def bleu_from_scratch(results: Results) -> Answer:
    lost = results.figure("sum", "lost")
    return (
        lost.below(3) if full_attention_is_ahead(results) else NOT_SHOWN,
        f"The BCT's BLEU is {lost:±} points lower than full attention's, in a trial where a window changes "
        f"full attention's perplexity by {results.figure('window', 'above'):±}",
    )


@Claim(
    SOURCE,
    "Abstract, text",
    "significantly reduces memory usage while maintaining the model's inference quality",
    "BCT needs much less memory, and predicts text as well",
    partly="as above; up to 3% worse (ours) is maintained",
    at={"built": "scratch"},
)
def text_quality(results: Results) -> Answer:
    above = results.figure("sum", "above")
    return (
        above.below(0.03) if full_attention_is_ahead(results) else NOT_SHOWN,
        f"The source's rule changes full attention's perplexity by {above:±}, in a trial where a window of "
        f"equal bytes changes it by {results.figure('window', 'above'):±}",
    )


@question(
    "On SmolLM2, does a window work better if it keeps the first 4 tokens of the text?",
    at={"model": "smollm2"},
)
def sinks(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        change = there.change("sinks", "window", "text")
        sentence = f"In a window of {there.place} tokens, 4 sinks change perplexity by {change:±}"
        return change.below(0), sentence, f"perplexity {change:±}"

    return for_each(results, "window", judge)


@question("With equal slots, does our rule recall more than the paper's sum?", at=LOOKING_UP)
def our_rule(results: Results) -> Answer:
    change = results.change("ours", "sum", "right")
    return (
        change.above(0),
        f"With 16 slots a head, it finds {results.figure('ours', 'right'):±} of 32 keys: {change:±} "
        "against the sum",
    )


@question("In about equal bytes, does the delta rule recall more than both?", at=LOOKING_UP)
def delta_rule(results: Results) -> Answer:
    gain, gain_over_sum = (results.change("delta", other, "right") for other in ("ours", "sum"))
    return (
        min(gain.above(0), gain_over_sum.above(0)),
        f"In fewer bytes, it finds {results.figure('delta', 'right'):±} of 32 keys: "
        f"{gain:±} against our rule, {gain_over_sum:±} against the sum",
    )


TABLE = Layout(
    "Held-out text of pocket's world: the BCT beside pocket with all its 1,280 positions,"
    " or 36 tokens, at 4% more bytes than the BCT; then models trained from scratch. "
    "*Above*: perplexity beyond full attention's. *Early facts*: the share of questions about the beginning of "
    "a text that are answered right. Last, the share of 32 keys that two layers look up, "
    "trained until twice as many steps gain less than a point; and SmolLM2's perplexity of texts of "
    "800 to 1,300 tokens.",
    [".*"],
    [
        *columns("", {"bytes": "bytes"}),
        *columns(
            "fine-tuned",
            {"perplexity": "perplexity", "above": "above ±", "early facts": "facts"},
        ),
        *columns("from scratch", {"perplexity": "perplexity"}, built="scratch"),
        *columns("16 slots", {"of 32 keys": "right"}, **LOOKING_UP),
        *(
            Column(f"SmolLM2: window of {window}", "text", {"model": "smollm2", "window": window})
            for window in WINDOWS
        ),
    ],
)
FIGURES = {
    "perplexity": {
        "title": "Perplexity by distance from the start of long texts",
        "y": "long",
        "over": "tokens",
        "xlabel": "tokens read",
        "ylabel": "perplexity",
    },
    "recall": {
        "title": "Looking up one of 32 keys, by length of training",
        "at": LOOKING_UP,
        "y": "right",
        "over": "steps",
        "xscale": "log",
        "xlabel": "steps of training, with 16 slots a head or as many bytes",
        "ylabel": "share right",
    },
}
