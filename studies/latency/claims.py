"""The claim of KV recycling on loading caches. study.py says what their metrics mean."""

from studies.judging import Answer, claim, metrics
from studies.recycling.claims import SOURCE
from studies.results import Results
from studies.showing import Layout, columns, lines

METRICS = (
    metrics("median", first=".3g", restore=".2g", saved=".0%", saved_all=".0%")
    | metrics("turns", cost=".0%")
    | metrics("exact", pays=".0f")
)
USUAL = {"model": "124M"}
NAMES = {"memory": "from memory", "warm-disk": "from the page cache", "cold-disk": "from the disk"}


@claim(
    SOURCE,
    "3.3",
    "loading CPU-resident KVs is inexpensive compared to full multi layer attention over k tokens",
    "Loading a stored cache is cheaper than computing it",
    partly="random weights, another processor; less than half the time is inexpensive (ours)",
)
def loading_is_inexpensive(results: Results) -> Answer:
    memory, warm, cold = (
        results.figure(way, "cost") for way in ("memory", "warm-disk", "cold-disk")
    )
    return (
        min(memory.below(0.5), warm.below(0.5)),
        f"Restoring from the page cache takes {warm:±} of the time to read the prompt",
        "restoring all but the last token takes, of the time to read the prompt, "
        f"{memory:±} from memory, {warm:±} from the page cache, {cold:±} from the disk: medians, "
        "ranges over prompts of 2 to 1,000 tokens",
    )


TABLE = Layout(
    "Milliseconds to the first token of a prompt of m tokens, k of them stored, and to "
    "restore these.",
    [".*"],
    [
        *columns("m 128, k 115", {"first token": "first", "restore": "restore"}, m=128, share=90),
        *columns(
            "m 1,000, k 900", {"first token": "first", "restore": "restore"}, m=1000, share=90
        ),
        *columns("", {"pays from k": "pays"}),
    ],
)
FIGURES = {
    "first_token": {
        "title": "Time to the first token saved, from the page cache",
        "y": "saved",
        "over": "share",
        "xlabel": "% of the prompt stored",
        "ylabel": "share saved",
        "legend": {
            "from the page cache, m 64": "prompts of 64 tokens",
            "from the page cache, m 128": "prompts of 128 tokens",
            "from the page cache, m 256": "prompts of 256 tokens",
            "from the page cache, m 512": "prompts of 512 tokens",
            "from the page cache, m 1000": "prompts of 1,000 tokens",
        },
        "ways": [
            lines("warm-disk", m=64),
            lines("warm-disk", m=128),
            lines("warm-disk", m=256),
            lines("warm-disk", m=512),
            lines("warm-disk", m=1000),
        ],
    },
}
