"""The claims of KV recycling. study.py says what their metrics mean."""

from studies.judging import Answer, Source, claim, metrics
from studies.results import Results
from studies.showing import Layout, columns, lines

SOURCE = Source(
    "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs",
    "DialoGPT-medium, by the source's count 345 million parameters (24 layers of width "
    "1,024); 10 stored and 6 test prompts, 100 new tokens, greedy, one at a time; Tesla "
    "T4, transformers 4.45.2; all baselines first, no warm-up or repeats mentioned",
)
METRICS = metrics(
    "mean",
    first=".3g",
    latency=".0f",
    saved=".1%",
    alpha=".3f",
    alpha_first=".2f",
    depth=".2f",
    similarity=".2f",
    near=".0%",
) | metrics(
    "exact",
    slowest=".3f",
    answers=".0f",
    tokens=".0f",
    reused=".0f",
    read=".0f",
    positions=",.0f",
    spared=",.0f",
)
USUAL = {"model": "pocket", "order": "interleaved", "store": "own"}
NAMES = {}


@claim(
    SOURCE,
    "5.2",
    "When prefix reuse occurred, average latency decreased by roughly by 30-50%",
    "A stored prefix saves 30 to 50% of the time",
    partly="random weights, another processor, four of six prompts rebuilt; the source's call in"
    " its order decides",
    at={"model": "355M", "order": "source"},
    commands=("recycling --model 355M",),
)
def latency(results: Results) -> Answer:
    answer = results.figure("published", "saved").above(0.3)
    return answer, (
        f"saved to the last token: the published call {results.figure('published', 'saved'):±}, "
        f"all of the shared prefix {results.figure('recycled', 'saved'):±}. Of shorter answers, by "
        "arithmetic from the first token and the cold run's mean step, the call would save "
        f"{results.figure('published', 'saved', tokens=1)} (one token), "
        f"{results.figure('published', 'saved', tokens=2)} (two), "
        f"{results.figure('published', 'saved', tokens=5)} (five), "
        f"{results.figure('published', 'saved', tokens=10)} (ten)"
    )


@claim(
    SOURCE,
    "5.2",
    "Across all prompts, the recycled runs consistently matched or outperformed the baseline.",
    "With a stored prefix, prompts take no longer",
    partly="random weights, another processor, four of six prompts rebuilt; judged by the mean "
    "over prompts; up to 1% (ours) is noise",
    at={"model": "355M"},
    commands=("recycling --model 355M",),
)
def never_slower(results: Results) -> Answer:
    answer = min(
        results.figure("published", "saved", order="source").above(-0.01),
        results.figure("published", "saved").above(-0.01),
    )
    return answer, (
        f"the published call saves {results.figure('published', 'saved', order='source'):±} in the "
        f"source's order, {results.figure('published', 'saved'):±} interleaved; its slowest prompt "
        f"takes {results.figure('published', 'slowest', order='source')} and "
        f"{results.figure('published', 'slowest')} times as long as cold. Where all of the rest is "
        f"read, {results.figure('recycled', 'saved', order='source'):±} and "
        f"{results.figure('recycled', 'saved'):±}"
    )


@claim(
    SOURCE,
    "5.5",
    "In our runs, α≈1.2–1.5, consistent with the 30-50% latency reduction overall "
    "observed for moderate prefix reuse",
    "The gain is 1.2 to 1.5 times the share that is stored",
    partly="random weights, another processor, four of six prompts rebuilt",
    at={"model": "355M"},
    commands=("recycling --model 355M",),
)
def alpha(results: Results) -> Answer:
    answer = min(
        results.figure("published", "alpha").above(1.2),
        results.figure("published", "alpha").below(1.5),
    )
    return answer, (
        f"alpha: published {results.figure('published', 'alpha'):±}, recycled "
        f"{results.figure('recycled', 'alpha'):±}, for the first token "
        f"{results.figure('recycled', 'alpha_first')}; k/m is "
        f"{results.figure('recycled', 'depth')} here. The source's two ranges fit each other for "
        "k/m of 0.2 to 0.4"
    )


@claim(
    SOURCE,
    "Abstract",
    "when overlap is absent, behavior matches baseline",
    "Where nothing is stored, nothing changes",
    partly="random weights, another processor, four of six prompts rebuilt",
    arithmetic=True,
    at={"model": "355M", "store": "other"},
    commands=("recycling --model 355M",),
)
def no_overlap(results: Results) -> Answer:
    answer = min(
        results.change("recycled", "cold", "answers").within(0),
        results.change("published", "cold", "answers").within(0),
    )
    return answer, (
        f"{results.figure('recycled', 'answers')} recycled and "
        f"{results.figure('published', 'answers')} published of "
        f"{results.figure('cold', 'answers')} answers are the cold run's; saved "
        f"{results.figure('recycled', 'saved'):±}"
    )


@claim(
    SOURCE,
    "1.1",
    "should represent the same attention context, and therefore remain valid",
    "A stored cache is as good as a new one",
    partly="another model, asked in its chat form",
    at={"model": "smollm2"},
    commands=("recycling --model smollm2",),
)
def valid_context(results: Results) -> Answer:
    answer = results.change("recycled", "cold", "answers").within(0)
    return answer, (
        "reused at their positions, with all other tokens read after them: "
        f"{results.figure('recycled', 'answers')} of {results.figure('cold', 'answers')} answers "
        "are the cold run's, token for token (pocket: "
        f"{results.figure('recycled', 'answers', model='pocket')})"
    )


@claim(
    SOURCE,
    "3.1",
    "Provided the past_key_values allows omitting the already-cached prefix tokens from input_ids.",
    "Tokens that are stored can be left out of the call",
    partly="another model, asked in its chat form; what transformers 4.45.2 feeds, checked "
    "against a recorded call of it",
    at={"model": "smollm2"},
    commands=("recycling --model smollm2",),
)
def omitted_tokens(results: Results) -> Answer:
    answer = results.change("published", "cold", "answers").within(0)
    return answer, (
        f"with that call {results.figure('published', 'answers')} of "
        f"{results.figure('cold', 'answers')} answers are the cold run's: it skips tokens of the "
        "prompt and restarts positions (pocket: "
        f"{results.figure('published', 'answers', model='pocket')})"
    )


@claim(
    SOURCE,
    "5.4",
    "The average cosine similarity between output embeddings was 0.66–0.82",
    "The answers' similarity to the usual ones is 0.66 to 0.82",
    partly="another model, four of six prompts rebuilt",
    at={"model": "smollm2"},
    commands=("recycling --model smollm2",),
)
def similarity(results: Results) -> Answer:
    answer = min(
        results.figure("published", "similarity").above(0.66),
        results.figure("published", "similarity").below(0.82),
    )
    return answer, (
        f"with the published call {results.figure('published', 'similarity'):±} (pocket: "
        f"{results.figure('published', 'similarity', model='pocket')})"
    )


@claim(
    SOURCE,
    "5.4 and Abstract",
    'near identical responses" and "no material degradation in output semantics',
    "The answers stay nearly the same",
    partly="another model; cosines of embeddings; 90% of the way is our threshold",
    at={"model": "smollm2"},
    commands=("recycling --model smollm2",),
)
def near_identical(results: Results) -> Answer:
    answer = results.figure("published", "near").above(0.9)
    return answer, (
        f"the published call's answers are {results.figure('published', 'near'):±} of the way from "
        f"the answers to other prompts (similarity {results.figure('others', 'similarity')}) to "
        "the cold run's (1)"
    )


@claim(
    SOURCE,
    "6",
    "effectively extend its usable context memory. Our results confirm that this is "
    "indeed possible.",
    "Stored caches extend the context that a model can use",
    partly="another model; where all tokens are read",
    arithmetic=True,
    at={"model": "smollm2"},
    commands=("recycling --model smollm2",),
)
def usable_context(results: Results) -> Answer:
    answer = results.figure("recycled", "spared").above(0.5)
    return answer, (
        f"prompts and answers take {results.figure('recycled', 'positions')} positions if "
        f"recycled, {results.figure('cold', 'positions')} if not"
    )


TABLE = Layout(
    "Milliseconds, means over prompts; answers that are the cold run's, and similarity to"
    " those. SmolLM2 ends its answers itself, by the published call after a few tokens, "
    "so that the times of that call can't be compared. 355M: random weights of the "
    "source's size, in its order, once.",
    [
        lines("cold|recycled|published", model="smollm2"),
        "cold|recycled|published",
        lines("cold|recycled|published", model="355M", order="source"),
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
