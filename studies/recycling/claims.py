"""The claims of KV recycling. study.py says what their metrics mean."""

import numpy as np

from studies.judging import NOT_SHOWN, Answer, Claim, Figure, Metric, Source, figure_of, metrics
from studies.results import Results
from studies.showing import Layout, columns, lines
from support.statistics import interval, ratio_of_sums

SOURCE = Source(
    "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs",
    "DialoGPT-medium, by the source's count 345 million parameters (24 layers of width "
    "1,024); 10 stored and 6 test prompts, 100 new tokens, greedy, one at a time; Tesla "
    "T4, transformers 4.45.2; all baselines first, no warm-up or repeats mentioned",
)
COMMANDS = ("recycling --model 355M", "recycling --model smollm2")
METRICS = metrics(
    "mean", first=".3g", latency=".0f", saved=".1%", depth=".2f", similarity=".2f"
) | metrics("exact", answers=".0f")
USUAL = {"model": "pocket", "order": "interleaved"}
SMOLLM2, SOURCE_SIZE = {"model": "smollm2"}, {"model": "355M"}
NAMES = {"others": "cold answers to each other"}
NEW_TOKENS = 100  # of an answer
SENTENCES = [
    '"when overlap is absent, behavior matches baseline" (Abstract): where nothing is stored, all ways '
    "read the whole prompt, so nothing changes.",
    '"effectively extend its usable context memory" (6): a reused token takes a position of the '
    "context, as any other does, so reuse extends nothing.",
]


@Claim(
    SOURCE,
    "5.2",
    "When prefix reuse occurred, average latency decreased by roughly by 30-50%",
    "A stored prefix saves 30 to 50% of the time",
    partly="random weights, an Intel Xeon (2 threads) instead of a Tesla T4, four of six prompts rebuilt; the "
    "source's call in its order decides",
    at={"model": "355M", "order": "source"},
)
def latency(results: Results) -> Answer:
    saved = results.figure("published", "saved")
    cold_first, first = (results.figure(way, "first") for way in ("cold", "published"))
    return (
        saved.above(0.3),
        f"The paper's call saves {saved:±} of the time; the first token comes after {first} ms instead "
        f"of {cold_first}",
    )


@Claim(
    SOURCE,
    "5.2",
    "Across all prompts, the recycled runs consistently matched or outperformed the baseline.",
    "By the paper's call, prompts take no longer on average",
    partly="random weights, another processor, four of six prompts rebuilt; judged by the mean "
    "over prompts; up to 1% (ours) is noise",
    at=SOURCE_SIZE,
)
def never_slower(results: Results) -> Answer:
    in_order, interleaved = (
        results.figure("published", "saved", order=order) for order in ("source", "interleaved")
    )
    return (
        min(in_order.above(-0.01), interleaved.above(-0.01)),
        f"The paper's call saves {in_order:±} of the time in the source's order, and {interleaved:±} "
        "with runs interleaved",
    )


@Claim(
    SOURCE,
    "5.5",
    "In our runs, α≈1.2–1.5, consistent with the 30-50% latency reduction overall "
    "observed for moderate prefix reuse",
    "The gain is 1.2 to 1.5 times the share that is stored",
    partly="random weights, another processor, four of six prompts rebuilt",
    at=SOURCE_SIZE,
)
def alpha(results: Results) -> Answer:
    saved, depth = (results.figure("published", metric) for metric in ("saved", "depth"))
    of_prompts = np.stack([saved.values, depth.values], 1)
    alpha = Figure(*interval(of_prompts, ratio_of_sums), metric=Metric(form=".3f"))
    return (
        min(alpha.above(1.2), alpha.below(1.5)),
        f"By the paper's call, the gain is {alpha:±} times the share that is stored, {depth} on average",
    )


@Claim(
    SOURCE,
    "1.1",
    "should represent the same attention context, and therefore remain valid",
    "A stored cache is as good as a new one",
    partly="another model, asked in its chat form",
    at=SMOLLM2,
)
def valid_context(results: Results) -> Answer:
    cold, recycled = (results.figure(way, "answers") for way in ("cold", "recycled"))
    return (
        recycled.change(cold).within(0),
        f"With all of the rest read, {recycled} of {cold} answers are the cold run's",
    )


@Claim(
    SOURCE,
    "3.1",
    "Provided the past_key_values allows omitting the already-cached prefix tokens from input_ids.",
    "Tokens that are stored can be left out of the call",
    partly="another model, asked in its chat form; what transformers 4.45.2 feeds, checked "
    "against a recorded call of it",
    at=SMOLLM2,
)
def omitted_tokens(results: Results) -> Answer:
    cold, published = (results.figure(way, "answers") for way in ("cold", "published"))
    return (
        published.change(cold).within(0),
        f"By the paper's call, {published} of {cold} answers are the cold run's",
    )


@Claim(
    SOURCE,
    "5.4",
    "The average cosine similarity between output embeddings was 0.66–0.82",
    "The answers' similarity to the usual ones is 0.66 to 0.82",
    partly="another model, asked in its chat form, so that its answers show nothing of theirs; four of "
    "six prompts rebuilt",
    at=SMOLLM2,
)
def similarity(results: Results) -> Answer:
    similarity = results.figure("published", "similarity")
    return (
        NOT_SHOWN,
        f"The answers of {results.usual['model']} by the paper's call have a similarity of {similarity:±}; "
        "another model's may differ",
    )


@Claim(
    SOURCE,
    "5.4 and Abstract",
    'near identical responses" and "no material degradation in output semantics',
    "The answers stay nearly the same",
    partly="another model; cosines of embeddings; 90% of the way is our threshold",
    at=SMOLLM2,
)
def near_identical(results: Results) -> Answer:
    published, others = (results.figure(way, "similarity") for way in ("published", "others"))
    above = np.subtract(published.values, others.values)
    near = figure_of(above / np.subtract(1, others.values), Metric("mean", ".0%"))
    return (
        near.above(0.9),
        f"The answers by the paper's call come {near:±} of the way from other prompts' answers (similarity "
        f"{others}) to the cold run's (1)",
    )


TABLE = Layout(
    "Milliseconds, means over six prompts; how many answers are the cold run's, and similarity to"
    " those. SmolLM2 ends its answers itself, by the published call after a few tokens, "
    "so that the times of that call can't be compared. 355M: random weights of the "
    "source's size, in its order, once. Lines without a model: pocket.",
    [
        lines("cold|recycled|published", model="smollm2"),
        "cold|recycled|published",
        lines("cold|recycled|published", model="355M", order="source"),
        lines("cold|recycled|published", model="microsoft/DialoGPT-medium"),
    ],
    columns(
        "",
        {
            "first token": "first",
            "last token": "latency",
            "latency saved": "saved ±",
            "the same answers": "answers",
            "similarity": "similarity",
        },
    ),
)
FIGURES = {
    "similarity": {
        "title": "SmolLM2's answers beside those of a cold run",
        "ways": ["recycled", "published", "others"],
        "y": "similarity",
        "at": SMOLLM2,
        "xlabel": "prompt",
        "ylabel": "cosine of embeddings",
    },
}
