"""The claims of BCT on quality. study.py says what their metrics mean."""

from studies.judging import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_SHOWN,
    Answer,
    Source,
    claim,
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
COMMANDS = ("bounding", "bounding --model smollm2", "recall", "pretraining")
METRICS = (
    metrics("perplexity", perplexity=".2f", long=".2f", text=".1f")
    | metrics(
        "mean",
        above="+.1%",
        bleu=".1f",
        lost=".1f",
        facts=".0%",
        right=".0%",
        every=".0%",
        half=".0%",
    )
    | metrics("exact", bytes=",.0f", share=".0%")
)
USUAL = {"model": "pocket", "built": "fine-tuned", "window": 36, "slots": 16, "pairs": 32}
LOOKING_UP = {"model": "two-layers"}  # of studies/recall
EVERY = {"window": [64, 128, 256, 512]}
NAMES = {
    "full": "full attention",
    "window": "window of equal bytes",
    "sinks": "4 sinks, and a window",
    "ours": "BCT, our rule",
    "sum": "BCT, the source's sum",
    "sum-mk": "the sum, read through MK",
}


@claim(
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
        f"With a BCT, BLEU is {lost:±} points lower than with full attention",
        f"{results.figure('ours', 'bleu')} against {results.figure('full', 'bleu')} with full "
        f"attention: {lost:±} points less",
    )


@claim(
    SOURCE,
    "Abstract, recall",
    "significantly reduces memory usage while maintaining the model's inference quality",
    "BCT needs much less memory, and still recalls what it read",
    partly="a synthetic task, models of two layers; three sizes in three seeds; up to 3 points "
    "worse (ours) is maintained",
    at=LOOKING_UP,
)
def recall(results: Results) -> Answer:
    change, small, large = (
        results.change("sum", "full", "half"),
        results.at(slots=4, pairs=8),
        results.at(slots=64, pairs=128),
    )
    half = results.figure("sum", "half")
    return (
        change.above(-0.03),
        f"With half as many slots as keys, a BCT finds {half:±} of the keys",
        f"with half as many slots as keys, over nine models, {half:±} of the "
        f"keys right, with full attention {results.figure('full', 'half')}: {change:±}. Of 8 keys "
        f"{small.figure('sum', 'right')}, in {small.figure('sum', 'share')} of the growing cache's "
        f"bytes, of 32 {results.figure('sum', 'right')} ({results.figure('sum', 'share')}), of 128 "
        f"{large.figure('sum', 'right')} ({large.figure('sum', 'share')})",
    )


def full_attention_is_ahead(results: Results) -> bool:
    """Return whether full attention predicts better than a window, as a fair trial needs."""
    return results.figure("window", "above").above(0) == HOLDS


@claim(
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
        f"The BCT's BLEU is {lost:±} points lower than full attention's",
        f"{results.figure('sum', 'bleu')} against {results.figure('full', 'bleu')} with full "
        f"attention: {lost:±} points less",
    )


@claim(
    SOURCE,
    "Abstract, text",
    "significantly reduces memory usage while maintaining the model's inference quality",
    "BCT needs much less memory, and predicts text as well",
    partly="small models, one seed, one untuned learning rate. Full attention isn't ahead of the"
    " window, so it lacks training itself, and nothing is decided; up to 3% worse (ours) "
    "is maintained",
    at={"built": "scratch"},
)
def text_quality(results: Results) -> Answer:
    above = results.figure("sum", "above")
    return (
        above.below(0.03) if full_attention_is_ahead(results) else NOT_SHOWN,
        f"The source's rule changes full attention's perplexity by {above:±}",
        f"perplexity by the source's rule {results.figure('sum', 'perplexity')}, by full attention "
        f"{results.figure('full', 'perplexity')}: {above:±}; with a window of equal bytes "
        f"{results.figure('window', 'perplexity')}: {results.figure('window', 'above'):±}",
    )


@question(
    "Do the paper's algorithm and its text treat the first token alike?",
    on="argument, by algorithm 1 and section 3.2",
)
def first_token(_: Results) -> Answer:
    return (
        DOES_NOT_HOLD,
        "At t = 1, algorithm 1 writes nothing, while section 3.2 writes every input",
        "for t = 1, algorithm 1 sets MV_1 to MV_0 and writes nothing; section 3.2 writes every "
        "input. We write every token; BCTConfig(write_first=False) doesn't write the first",
    )


@question(
    "Does a window work better if it keeps the first 4 tokens of the text?",
    at={"model": "smollm2"},
)
def sinks(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        change = there.change("sinks", "window", "text")
        return (
            change.below(0),
            f"In a window of {there.place} tokens, 4 sinks change perplexity by {change:±}",
            f"{there.figure('sinks', 'text')} with sinks ({there.change('sinks', 'full', 'text'):±}), "
            f"{there.figure('window', 'text')} without ({there.change('window', 'full', 'text'):±})",
        )

    answer, sentence, found = for_each(results, "window", judge)
    pocket = results.at(model="pocket", window=64)
    return (
        answer,
        sentence,
        f"perplexity by full attention {results.figure('full', 'text', window=64)}. Within {found}. "
        f"On pocket 4 sinks matter little: 64 tokens cost {pocket.change('sinks', 'full', 'text'):±} "
        f"with sinks, {pocket.change('window', 'full', 'text'):±} without",
    )


@question(
    "With equal slots and training, does our rule recall more than the paper's sum?",
    at=LOOKING_UP,
)
def our_rule(results: Results) -> Answer:
    changes = [results.change("ours", other, "every") for other in ("sum", "sum-mk")]
    many = results.at(slots=256)
    return (
        min(change.above(0) for change in changes),
        f"Our rule finds more of the keys than the sum, by {changes[0]:±}",
        f"over 4 to 256 keys, 12 models of each, {changes[0]:±} against the sum, {changes[1]:±} "
        f"against the sum read through MK. With 256 slots our rule gets "
        f"{many.figure('ours', 'right')} of 32 keys, the sum {many.figure('sum', 'right')}, through "
        f"MK {many.figure('sum-mk', 'right')}",
    )


TABLE = Layout(
    "Held-out text of pocket's world: the BCT beside pocket with all its 1,280 positions,"
    " or 36 tokens, at 4% more bytes than the BCT; then models trained from scratch. "
    "*Above*: perplexity beyond full attention's. Last, the share of 32 keys that two "
    "layers look up, means of 3 seeds; and SmolLM2's perplexity of texts of 800 to 1,300 tokens.",
    ["full", "window", "sinks", "ours", "sum", "sum-mk"],
    [
        *columns("", {"bytes": "bytes"}),
        *columns(
            "fine-tuned",
            {"perplexity": "perplexity", "above": "above ±", "early facts": "facts"},
        ),
        *columns("from scratch", {"perplexity": "perplexity"}, built="scratch"),
        *(
            Column(f"keys right, {slots} slots", "right", LOOKING_UP | {"slots": slots})
            for slots in (4, 16, 64, 256)
        ),
        *(
            Column(f"SmolLM2: window of {window}", "text", {"model": "smollm2", "window": window})
            for window in EVERY["window"]
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
        "title": "Looking up one of 32 keys, means of 3 seeds",
        "at": LOOKING_UP,
        "y": "right",
        "over": "slots",
        "xscale": "log",
        "xlabel": "slots of a head (the window has as many bytes)",
        "ylabel": "share right",
        "ways": ["ours", "sum", "sum-mk", "window"],
    },
}
