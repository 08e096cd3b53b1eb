"""The claims of the KV cache article. study.py says what their metrics mean."""

from studies.judging import Answer, Claim, Source, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Understanding and Coding the KV Cache in LLMs from Scratch",
    'GPT-2 124M, untrained; 200 new tokens after the 4 of "Hello, I am"; CPU of a Mac '
    "Mini M4; repeats not stated",
)
METRICS = metrics("turns", seconds=".1f", time=".2f") | metrics("exact", same=".0%", wrong=".0%")
USUAL = {"model": "124M"}  # and a smaller one, to try the two lines of a window:
SMALL = {"model": "4x4x64"}
LONGER_PROMPTS = (128, 512, 1000)  # tokens
SENTENCES = [
    '"Memory usage increases linearly: Each new token appends to the KV cache." (KV cache Advantages '
    f"and Disadvantages): at 124M, each token adds {2 * 12 * 768 * 4:,} bytes, a key and a value of "
    "768 float32 numbers in each of 12 layers.",
    '"This ensures consistent memory use" (Tip 1: Pre-allocate Memory): a cache that is allocated once '
    "keeps its bytes.",
]
NAMES = {
    "all-logits": "no cache, logits of all positions",
    "no-cache": "no cache",
    "growing": "growing cache",
    "preallocated": "preallocated cache",
}


@Claim(
    SOURCE,
    "A Simple Performance Comparison",
    "we already get a ~5x speed-up with a small 124 M parameter model and a short "
    "200-token sequence length",
    "A KV cache writes 200 tokens at least about five times as fast",
    partly='our files; "~5x" is read as 4.5 or more (ours)',
)
def speed_up(results: Results) -> Answer:
    times, needed = (results.figure(way, "time") for way in ("all-logits", "no-cache"))
    return (
        times.above(4.5),
        f"Without a cache, 200 tokens take {times:±} times as long, {needed} without needless logits",
    )


@Claim(
    SOURCE,
    "A Simple Performance Comparison",
    "both the gpt_ch04.py and gpt_with_kv_cache.py implementations produce exactly the same text",
    "With and without a cache, the text is the same",
    partly="our files",
)
def same_text(results: Results) -> Answer:
    same = [results.figure("growing", "same")]
    same += [results.figure("growing", "same", after=n) for n in LONGER_PROMPTS]
    return (
        min(figure.plus(-1).within(0) for figure in same),
        f"With and without a cache, {same[0]} of 200 tokens are the same, {same[-1]} after 1,000 others",
    )


@Claim(
    SOURCE,
    "How LLMs Generate Text (Without and With a KV Cache)",
    "the longer the text, the more we get to reuse already computed keys and values, "
    "which increases the generation speed",
    "The longer the text, the more a cache gains",
    partly="read as the gain over no cache, since with one the speed itself falls",
)
def gain_by_length(results: Results) -> Answer:
    short, medium, long = (results.figure("no-cache", "time", after=n) for n in LONGER_PROMPTS)
    return (
        min(medium.change(short).above(0), long.change(medium).above(0)),
        f"Without a cache, a token takes {short:±} times as long after 128 tokens, {medium:±} after 512, "
        f"{long:±} after 1,000",
    )


@Claim(
    SOURCE,
    "Tip 1: Pre-allocate Memory",
    "This ensures consistent memory use and reduces overhead.",
    "After 1,000 tokens, memory allocated once costs less time",
    partly="a ring with a spare slot; judged after 1,000 tokens; up to 5% (ours) is noise",
)
def preallocation(results: Results) -> Answer:
    short, time = (results.figure("preallocated", "time", after=n) for n in (128, 1000))
    return (
        time.below(0.95),
        f"After 1,000 tokens, a token takes {time:±} times as long as with torch.cat, after 128 {short}",
    )


@Claim(
    SOURCE,
    "Tip 2: Truncate Cache via Sliding Window",
    "Via the sliding window, we maintain only the last window_size tokens in the cache",
    "A window keeps the last tokens only",
    partly="on a cache of shape (B, H, S, D), which fits the two lines; the article's is (b, "
    "num_tokens, d_out)",
    at=SMALL,
)
def window_keeps_the_last(results: Results) -> Answer:
    wrong = results.figure("token-by-token", "wrong")
    return (
        wrong.within(0),
        f"Fed one by one, {wrong} of the logits differ from attention to the last 8 tokens",
    )


@question(
    "Can the article's window read a long prompt, or several tokens at once?",
    at=SMALL,
)
def long_prompts_and_chunks(results: Results) -> Answer:
    prompt, chunks = (results.figure(way, "wrong") for way in ("prompt", "chunks"))
    return (
        min(prompt.within(0), chunks.within(0)),
        f"In a window of 8, a prompt of 24 tokens leaves {prompt} of the next logits wrong, chunks of five "
        f"{chunks}",
    )


@question(
    "Does that window work if its positions are counted by the cache's length?",
    at=SMALL,
)
def positions_by_length(results: Results) -> Answer:
    wrong = results.figure("by-length", "wrong")
    return wrong.within(0), f"Counted so, {wrong} of the logits are wrong"


TABLE = Layout(
    "Time of 200 tokens, in units of the growing cache's in the same turn, with the range"
    " of the turns. Not tested: a GPU.",
    ["all-logits", "no-cache", "growing", "preallocated"],
    columns("", {"seconds": "seconds", "time": "time ±"}),
)
