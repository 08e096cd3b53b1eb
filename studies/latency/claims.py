"""The claim of KV recycling on loading caches. study.py says what their metrics mean."""

from studies.judging import Answer, Claim, metrics
from studies.recycling.claims import SOURCE
from studies.results import Results
from studies.showing import Layout, columns, lines

METRICS = metrics("median", first=".3g", restore=".2g", saved=".0%") | metrics("turns", cost=".0%")
USUAL = {"model": "124M"}
LENGTHS = (64, 128, 256, 512, 1000)  # of prompts, in tokens
NAMES = {"memory": "from memory", "warm-disk": "from the page cache", "cold-disk": "from the disk"}


@Claim(
    SOURCE,
    "3.3",
    "loading CPU-resident KVs is inexpensive compared to full multi layer attention over k tokens",
    "Loading a stored cache is cheaper than computing it",
    partly="random weights, another processor; medians, and ranges over prompts of 2 to 1,000 tokens; less "
    "than half the time is inexpensive (ours)",
)
def loading_is_inexpensive(results: Results) -> Answer:
    memory, warm, cold = (
        results.figure(way, "cost") for way in ("memory", "warm-disk", "cold-disk")
    )
    return (
        min(memory.below(0.5), warm.below(0.5)),
        f"Restoring takes {memory:±} of a prompt's reading time from memory, {warm:±} from the page cache, "
        f"{cold:±} from the disk",
    )


TIMES = {"first token": "first", "restore": "restore"}
TABLE = Layout(
    "Milliseconds to the first token of a prompt of m tokens, k of them stored, and to "
    "restore these.",
    [".*"],
    [
        *columns("m 128, k 115", TIMES, m=128, share=90),
        *columns("m 1,000, k 900", TIMES, m=1000, share=90),
    ],
)
FIGURES = {
    "first_token": {
        "title": "Time to the first token saved, from the page cache",
        "y": "saved",
        "over": "share",
        "xlabel": "% of the prompt stored",
        "ylabel": "share saved",
        "ways": [lines("warm-disk", m=m) for m in LENGTHS],
    },
}
