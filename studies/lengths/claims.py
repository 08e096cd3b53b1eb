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
    answer = (
        results.figure("bct:2048", "tps")
        .change(results.figure("bct:2048", "tps", after=4000))
        .within(0.05)
    )
    return answer, (
        f"{results.figure('bct:2048', 'tps', after=4000)} tokens/s after 4,000 tokens, "
        f"{results.figure('bct:2048', 'tps')} after 16,000: "
        f"{results.figure('bct:2048', 'tps').change(results.figure('bct:2048', 'tps', after=4000)):±}"
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
    answer = (
        results.figure("bct:2048", "mb", after=4000)
        .change(results.figure("bct:2048", "mb"))
        .within(0)
    )
    return answer, (
        f"{results.figure('bct:2048', 'mb', after=4000)} MB after 4,000 and "
        f"{results.figure('bct:2048', 'mb')} MB after 16,000 tokens"
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
    answer = min(
        results.figure("bct:2048", "share", after=4000).below(1),
        results.figure("bct:2048", "share").below(1),
    )
    return answer, (
        f"{results.figure('bct:2048', 'share', after=4000)} of the growing cache's bytes after "
        f"4,000 tokens, {results.figure('bct:2048', 'share')} after 16,000; "
        f"{results.figure('bct:2048', 'share', after=1000)} after 1,000"
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
    answer = min(
        results.figure("bct:2048", "faster", than="growing").above(1.05),
        results.figure("bct:2048", "faster", than="preallocated").above(1.05),
    )
    return answer if texts > 1 else NOT_SHOWN, (
        f"decoding {texts} text, after 16,000 tokens "
        f"{results.figure('bct:2048', 'faster', than='growing'):±} times as fast as the growing "
        f"cache, {results.figure('bct:2048', 'faster', than='preallocated'):±} times as a "
        "preallocated one; with 24 slots "
        f"{results.figure('bct:24', 'faster', than='preallocated'):±} times as that"
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
