"""The claims of the KV cache article. study.py says what their metrics mean."""

from studies.judging import Answer, Source, claim, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Understanding and Coding the KV Cache in LLMs from Scratch",
    'GPT-2 124M, untrained; 200 new tokens after the 4 of "Hello, I am"; CPU of a Mac '
    "Mini M4; repeats not stated",
)
METRICS = metrics("turns", seconds=".1f", time=".2f") | metrics(
    "exact", same=".0%", bytes=",.0f", each=",.0f", wrong=".0%"
)
USUAL = {"model": "124M"}  # and the two lines of its window, tried on a smaller one:
TWO_LINES = {"model": "4x4x64"}
NAMES = {
    "all-logits": "no cache, logits of all positions",
    "no-cache": "no cache",
    "growing": "growing cache",
    "preallocated": "preallocated cache",
}


@claim(
    SOURCE,
    "A Simple Performance Comparison",
    "we already get a ~5x speed-up with a small 124 M parameter model and a short "
    "200-token sequence length",
    "A KV cache writes 200 tokens about five times as fast",
    partly='our files; "~5x" is read as 4.5 or more (ours)',
)
def speed_up(results: Results) -> Answer:
    answer = results.figure("all-logits", "time").above(4.5)
    return answer, (
        f"without a cache {results.figure('all-logits', 'time'):±} times as long, "
        f"{results.figure('no-cache', 'time'):±} without needless logits"
    )


@claim(
    SOURCE,
    "A Simple Performance Comparison",
    "both the gpt_ch04.py and gpt_with_kv_cache.py implementations produce exactly the same text",
    "With and without a cache, the text is the same",
    partly="our files",
)
def same_text(results: Results) -> Answer:
    answer = min(
        results.change("growing", "no-cache", "same").within(0),
        results.change("growing", "no-cache", "same", after=128).within(0),
        results.change("growing", "no-cache", "same", after=512).within(0),
        results.change("growing", "no-cache", "same", after=1000).within(0),
    )
    return answer, (
        f"{results.figure('growing', 'same')} of the tokens are the same, after 1,000 others "
        f"{results.figure('growing', 'same', after=1000)}"
    )


@claim(
    SOURCE,
    "How LLMs Generate Text (Without and With a KV Cache)",
    "the longer the text, the more we get to reuse already computed keys and values, "
    "which increases the generation speed",
    "The longer the text, the more a cache gains",
    partly="read as the gain over no cache, since with one the speed itself falls",
)
def gain_by_length(results: Results) -> Answer:
    answer = min(
        results.figure("no-cache", "time", after=512)
        .change(results.figure("no-cache", "time", after=128))
        .above(0),
        results.figure("no-cache", "time", after=1000)
        .change(results.figure("no-cache", "time", after=512))
        .above(0),
    )
    return answer, (
        f"without a cache a token takes {results.figure('no-cache', 'time', after=128):±} times as "
        f"long after 128, {results.figure('no-cache', 'time', after=512):±} after 512, "
        f"{results.figure('no-cache', 'time', after=1000):±} after 1,000"
    )


@claim(
    SOURCE,
    "KV cache Advantages and Disadvantages",
    "Memory usage increases linearly: Each new token appends to the KV cache.",
    "A cache grows by the same number of bytes with every token",
    arithmetic=True,
)
def linear_memory(results: Results) -> Answer:
    answer = min(
        results.figure("growing", "each", after=512)
        .change(results.figure("growing", "each", after=128))
        .within(0),
        results.figure("growing", "each", after=1000)
        .change(results.figure("growing", "each", after=128))
        .within(0),
    )
    return answer, (
        f"{results.figure('growing', 'each', after=128)} bytes a token after 128, "
        f"{results.figure('growing', 'each', after=1000)} after 1,000"
    )


@claim(
    SOURCE,
    "Tip 1: Pre-allocate Memory",
    "This ensures consistent memory use and reduces overhead.",
    "Memory allocated once stays constant and costs less time",
    partly="a ring with a spare slot; judged after 1,000 tokens; up to 5% (ours) is noise",
)
def preallocation(results: Results) -> Answer:
    answer = min(
        results.figure("preallocated", "time", after=1000).below(0.95),
        results.figure("preallocated", "bytes", after=1000)
        .change(results.figure("preallocated", "bytes", after=128))
        .within(0),
    )
    return answer, (
        f"after 1,000 tokens a token takes {results.figure('preallocated', 'time', after=1000):±} "
        "times as long as with torch.cat, after 128 "
        f"{results.figure('preallocated', 'time', after=128):±}; "
        f"{results.figure('preallocated', 'bytes', after=1000)} bytes after both"
    )


@claim(
    SOURCE,
    "Tip 2: Truncate Cache via Sliding Window",
    "Via the sliding window, we maintain only the last window_size tokens in the cache",
    "A window keeps the last tokens only",
    partly="on a cache of shape (B, H, S, D), which fits the two lines; the article's is (b, "
    "num_tokens, d_out)",
    at=TWO_LINES,
)
def window_keeps_the_last(results: Results) -> Answer:
    answer = results.figure("token-by-token", "wrong").within(0)
    return answer, (
        f"{results.figure('token-by-token', 'wrong')} of the logits differ from attention to the "
        "last 8 tokens, if tokens are fed one by one and positions keep counting"
    )


@question(
    "Do the two lines work with a prompt longer than the window, or with several tokens at a time?",
    "Can the article's window read a long prompt, or several tokens at once?",
    at=TWO_LINES,
)
def long_prompts_and_chunks(results: Results) -> Answer:
    answer = min(
        results.figure("prompt", "wrong").within(0), results.figure("chunks", "wrong").within(0)
    )
    return answer, (
        f"a prompt of 24 leaves {results.figure('prompt', 'wrong')} of the next logits wrong, "
        f"chunks of five {results.figure('chunks', 'wrong')}: keys are evicted before the queries "
        "that still see them have read them"
    )


@question(
    "Do they work with the article's other way of counting, offset = block.att.cache_k.shape[1]?",
    "Does that window work if its positions are counted by the cache's length?",
    at=TWO_LINES,
)
def positions_by_length(results: Results) -> Answer:
    answer = results.figure("by-length", "wrong").within(0)
    return answer, (
        f"{results.figure('by-length', 'wrong')} of the logits are wrong: once the window is full, "
        "every new token is read at position 7 or 8"
    )


TABLE = Layout(
    "Time of 200 tokens, in units of the growing cache's in the same turn, with the range"
    " of the turns. Not tested: a GPU.",
    ["all-logits", "no-cache", "growing", "preallocated"],
    columns("", {"seconds": "seconds", "time": "time ±"}),
)
