"""The claims of BCT on time and memory. study.py says what their metrics mean."""

from studies.bounding.claims import SOURCE
from studies.judging import NOT_SHOWN, Answer, claim, metrics
from studies.results import Results
from studies.showing import Layout, columns

METRICS = metrics("median", tps=".1f", faster=".2f") | metrics("exact", mb=",.1f", share=".0%")
USUAL = {"model": "124M", "after": 16000}
NAMES = {
    "growing": "growing cache",
    "preallocated": "preallocated cache",
    "bct:24": "BCT, 24 slots",
    "bct:2048": "BCT, 2,048 slots",
}


@claim(
    SOURCE,
    "4.3",
    "The inference speed also remains relatively constant after the inference length exceeds 2048",
    "From 2,048 tokens on, BCT's speed hardly changes",
    partly="our rule, 2,048 slots; up to 5% (ours) is noise",
)
def constant_speed(results: Results) -> Answer:
    earlier, later = (results.figure("bct:2048", "tps", after=n) for n in (4000, 16000))
    change = later.change(earlier)
    return (
        change.within(0.05),
        f"From 4,000 to 16,000 tokens, BCT's speed changes by {change:±}",
        (f"{earlier} tokens/s after 4,000 tokens, {later} after 16,000: {change:±}"),
    )


@claim(
    SOURCE,
    "4.3",
    "the memory usage of the proposed method remains constant after reaching 2048",
    "From 2,048 tokens on, BCT's memory is constant",
    partly="our rule, 2,048 slots; all is allocated with the first token",
    arithmetic=True,
)
def constant_memory(results: Results) -> Answer:
    earlier, later = (results.figure("bct:2048", "mb", after=n) for n in (4000, 16000))
    return (
        earlier.change(later).within(0),
        f"After 16,000 tokens, the memory is {later} MB, as after 4,000",
        (f"{earlier} MB after 4,000 and {later} MB after 16,000 tokens"),
    )


@claim(
    SOURCE,
    "4.3",
    "significantly lower than that of traditional KV cache methods",
    "In long texts, BCT's memory is far below a growing cache's",
    partly="our rule, 2,048 slots and their weights; read as: from 2,201 tokens on. At 2,049 to "
    "2,200 it takes more; by the source's rule fewer from 2,049 on",
    arithmetic=True,
)
def lower_memory(results: Results) -> Answer:
    early, earlier, later = (
        results.figure("bct:2048", "share", after=n) for n in (1000, 4000, 16000)
    )
    return (
        min(earlier.below(1), later.below(1)),
        f"After 16,000 tokens, a BCT takes {later} of the growing cache's bytes",
        f"{earlier} of the growing cache's bytes after 4,000 tokens, {later} after 16,000; {early} "
        "after 1,000",
    )


@claim(
    SOURCE,
    "5",
    "significantly reducing memory usage and improving system throughput",
    "BCT saves memory and raises throughput",
    partly="our rule, 2,048 slots; one text on a CPU, the longest here. A system decodes many "
    "texts at once, as many as fit into its memory, so nothing is decided; up to 5% "
    "(ours) is noise",
)
def throughput(results: Results) -> Answer:
    texts = 1  # that are decoded at once, here
    growing, preallocated = (
        results.figure("bct:2048", "faster", than=other) for other in ("growing", "preallocated")
    )
    return (
        min(growing.above(1.05), preallocated.above(1.05)) if texts > 1 else NOT_SHOWN,
        f"One text is decoded {preallocated:±} times as fast as with a preallocated cache",
        f"decoding {texts} text, after 16,000 tokens {growing:±} times as fast as the growing cache, "
        f"{preallocated:±} times as a preallocated one; with 24 slots "
        f"{results.figure('bct:24', 'faster', than='preallocated'):±} times as that",
    )


TABLE = Layout(
    "Decoding one text, random weights: tokens/s, and MB of cache, after so many tokens.",
    [".*"],
    [
        *columns("after 1,000", {"tokens/s": "tps", "MB": "mb"}, after=1000),
        *columns("after 4,000", {"tokens/s": "tps", "MB": "mb"}, after=4000),
        *columns("after 16,000", {"tokens/s": "tps", "MB": "mb"}, after=16000),
    ],
)
