"""The claims of BCT on time and memory. study.py says what their metrics mean."""

from gpt_bounded_cache import BCTConfig
from studies.bounding.claims import SOURCE
from studies.judging import NOT_SHOWN, Answer, Claim, metrics
from studies.results import Results
from studies.showing import Layout, columns

METRICS = metrics("median", tps=".1f") | metrics("exact", mb=",.1f")
USUAL = {"model": "124M", "after": 16000}
NAMES = {
    "growing": "growing cache",
    "preallocated": "preallocated cache",
    "bct:24": "BCT, 24 slots",
    "bct:2048": "BCT, 2,048 slots",
}
# Numbers of a head: BCT's slots of size D by our rule, each with its mass, and recent tokens, each with
# its weights for all slots and its gate; beside a growing cache's 2 D a token.
SLOTS, D, RECENT = 2048, 64, BCTConfig.recent
OUR_NUMBERS = SLOTS * (2 * D + 1) + RECENT * (2 * D + SLOTS + 1)
SENTENCES = [
    '"the memory usage of the proposed method remains constant after reaching 2048" (4.3): all slots '
    "are allocated with the first token.",
    '"significantly lower than that of traditional KV cache methods" (4.3): by the source\'s rule from '
    f"{SLOTS + 1:,} tokens on. Our rule keeps weights and recent tokens beside its {SLOTS:,} slots, and takes "
    f"fewer bytes than a growing cache from {OUR_NUMBERS // (2 * D) + 1:,} tokens on.",
]


@Claim(
    SOURCE,
    "4.3",
    "The inference speed also remains relatively constant after the inference length exceeds 2048",
    "From 2,048 tokens on, BCT's speed hardly changes",
    partly="our rule, 2,048 slots; up to 5% (ours) is noise",
)
def constant_speed(results: Results) -> Answer:
    earlier = results.figure("bct:2048", "tps", after=4000)
    later = results.figure("bct:2048", "tps", after=16000)
    change = later.change(earlier)
    return (
        change.within(0.05),
        f"From 4,000 to 16,000 tokens, BCT's speed changes by {change:±}",
    )


@Claim(
    SOURCE,
    "5",
    "significantly reducing memory usage and improving system throughput",
    "BCT saves memory and raises throughput",
    partly="our rule, 2,048 slots; one text on a CPU, the longest here. A system decodes many "
    "texts at once, as many as fit into its memory, so nothing is decided",
)
def throughput(results: Results) -> Answer:
    return (
        NOT_SHOWN,
        "After 16,000 tokens of a single text, a BCT changes tokens/s by "
        f"{results.change('bct:2048', 'preallocated', 'tps'):±} against a preallocated cache, by "
        f"{results.change('bct:2048', 'growing', 'tps'):±} against a growing one",
    )


TABLE = Layout(
    "Decoding one text, random weights: tokens/s, and MB of cache, after so many tokens.",
    [".*"],
    [
        column
        for n in (1000, 4000, 16000)
        for column in columns(f"after {n:,}", {"tokens/s": "tps", "MB": "mb"}, after=n)
    ],
)
