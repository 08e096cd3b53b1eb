"""Where BCT overtakes a cache that keeps everything: tokens/s and bytes at GPT-2 124M's geometry, up to 16,000 tokens.

`python3 -m studies.lengths` takes about three minutes on one thread. Weights are random, and the caches are filled with
random numbers instead of 16,000 tokens: times don't depend on either. n_ctx is raised as far as needed.

Source: Yi et al. 2024 (BCT).
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gpt_bounded_cache import BCT, GPT, BCTConfig, BoundedMemory, GPTConfig, KVCache, SlidingWindowCache
from studies.bounding import SOURCE, THEIRS
from studies.protocol import NOISE, Claim, StudyLine, claim_tables, conditions_of, judged, spread, under
from support.conditions import conditions
from support.figures import figure
from support.files import write_json
from support.tables import Table, page

LENGTHS, SLOTS = (128, 1000, 4000, 8000, 16000), (24, 2048)  # 2,048: the source's capacity
DECODED = 8  # tokens, of which the median counts; one more before them warms up
SMALL = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}  # geometry of a quick run
GROWING, AHEAD = "growing cache", "preallocated cache"


def grown(model: GPT, n: int) -> KVCache:
    """Return a growing cache of n random tokens."""
    c = model.config
    kv = torch.randn(2, 1, c.n_head, n, c.head_dim)
    return KVCache([kv.clone() for _ in model.h], torch.arange(n))


def preallocated(model: GPT, n: int) -> SlidingWindowCache:
    """Return a preallocated cache of n random tokens, with room for those that are decoded."""
    cache, full = SlidingWindowCache(n + DECODED + 1), grown(model, n)
    for kv in full.layers:
        cache.layers.append(torch.cat([kv, kv.new_zeros(*kv.shape[:3], DECODED + 2, kv.size(4))], dim=3))
    cache.n_read, cache.pos = n, full.pos
    return cache


def written(model: BCT, n: int) -> BoundedMemory:
    """Return a BCT's memory with random numbers in it, as after n tokens."""
    memory = BoundedMemory()
    for block in model.h:
        *state, log_keep = block.memory.empty(torch.zeros(1, 1, 1))
        memory.layers.append([*map(torch.rand_like, state), -torch.rand_like(log_keep)])
    memory.pos = torch.tensor([n - 1])
    return memory


@torch.no_grad()
def seconds(model: GPT, cache: KVCache) -> float:
    """Return the median time of a decoded token."""
    taken, token = [], torch.zeros(1, 1, dtype=torch.long)
    for _ in range(DECODED + 1):
        begun = time.perf_counter()
        token = model(token, cache, last_only=True).argmax(dim=-1)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def measured(geometry: dict[str, int], lengths: Sequence[int], slots: Sequence[int], turns: int) -> dict[str, Any]:
    """Return the record: conditions, and of each cache at each length its bytes, and by turn the seconds of a token."""
    geometry = geometry | {"n_ctx": max(lengths) + DECODED + 1}
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**geometry)).eval()
    caches: dict[str, tuple[GPT, Callable]] = {GROWING: (plain, grown), AHEAD: (plain, preallocated)}
    for m in slots:
        caches[f"BCT, {m:,} slots"] = BCT(BCTConfig(**geometry, slots=m)).eval(), written
    rows: dict[str, Any] = {name: {str(n): {"seconds": []} for n in lengths} for name in caches}
    for _ in tqdm(range(turns), desc="turns", leave=False):
        for n in lengths:
            for name, (model, filled) in caches.items():
                cache = filled(model, n)
                rows[name][str(n)]["bytes"] = cache.nbytes
                rows[name][str(n)]["seconds"].append(seconds(model, cache))
    return {"conditions": conditions("GPT-2's geometry, random weights", plain), "lengths": [*lengths],
            "slots": [*slots], "recent": BCTConfig.recent, "turns": turns, "rows": rows}  # fmt: skip


def ratios(record: dict[str, Any], name: str, n: int, beside: str = GROWING) -> list[float]:
    """Return how many times as many tokens/s a cache gives as another one, by turn."""
    return [a / b for a, b in zip(*(record["rows"][x][str(n)]["seconds"] for x in (beside, name)), strict=True)]


def crossing(record: dict[str, Any], name: str, beside: str = GROWING) -> str:
    """Return from how many tokens on a cache is faster than another one, the median ratio interpolated between the
    measured lengths."""
    at = [(n, statistics.median(ratios(record, name, n, beside))) for n in record["lengths"]]
    slower = [i for i, (_, ratio) in enumerate(at) if ratio <= 1]
    if not slower:
        return f"at every length from {at[0][0]:,} tokens on"
    if slower[-1] == len(at) - 1:
        return f"at no length up to {at[-1][0]:,} tokens"
    (a, low), (b, high) = [*pairwise(at)][slower[-1]]
    return f"from about {round(a + (b - a) * (1 - low) / (high - low), -2):,.0f} tokens on"


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return tokens/s and bytes by length, and where BCT is faster."""
    lengths, rows = record["lengths"], record["rows"]
    speed = lambda name, n: 1 / statistics.median(rows[name][str(n)]["seconds"])  # noqa: E731
    bcts = [name for name in rows if name.startswith("BCT")]
    return [
        f"Decoding one text: {conditions_line(record)}.",
        Table(["tokens/s (MB of cache)", *(f"after {n:,} tokens" for n in lengths)],
              [[name, *(f"{speed(name, n):.1f} ({rows[name][str(n)]['bytes'] / 1e6:,.1f})" for n in lengths)]
               for name in rows]),
        "BCT is faster " + "; ".join(f"with {name.removeprefix('BCT, ')} {crossing(record, name)} than the growing "
                                     f"cache, {crossing(record, name, AHEAD)} than the preallocated one"
                                     for name in bcts) + ".",
    ]  # fmt: skip


def conditions_line(record: dict[str, Any]) -> str:
    """Return the conditions of the study as a line."""
    return conditions_of(record, f"caches filled with random numbers, medians of {record['turns']} turns of {DECODED} "
                         f"tokens; BCT by our rule, with the last {record['recent']} tokens as they are")  # fmt: skip


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return the source's claims on time and memory, at its capacity and at lengths past it."""
    lengths, rows = record["lengths"], record["rows"]
    capacity = max(record["slots"])
    own, bcts = f"BCT, {capacity:,} slots", [name for name in rows if name.startswith("BCT")]
    past = [n for n in lengths if n > capacity]
    rates = [1 / statistics.median(rows[own][str(n)]["seconds"]) for n in past]
    longest = ratios(record, own, lengths[-1])
    size = {n: rows[own][str(n)]["bytes"] for n in past}
    equal = size[past[0]] * past[0] / rows[GROWING][str(past[0])]["bytes"]  # tokens of the growing cache
    shares = [x / rows[GROWING][str(n)]["bytes"] for n, x in size.items()]
    per_token = {rows[GROWING][str(n)]["bytes"] / n for n in lengths}
    size_of = f"partly: {record['conditions']['parameters']:,} parameters, random weights"
    fewer = f"{size_of}; our rule; a capacity of {capacity:,}"
    noise = f"up to {NOISE:.0%} (our threshold) counts as noise"
    constant = min(rates) > (1 - NOISE) * max(rates)
    ms = {name: [1e3 * statistics.median(rows[name][str(n)]["seconds"]) for n in (past[0], past[-1])]
          for name in (own, GROWING)}  # fmt: skip
    return under(
        SOURCE, THEIRS, conditions_line(record),
        judged("4.3", "The inference speed also remains relatively constant after the inference length exceeds 2048",
               constant, f"{spread(rates, '.1f')} tokens/s after "
               f"{past[0]:,} to {past[-1]:,} tokens", f"{fewer}; {noise}"),
        judged("2.4", "Transformer … Unbounded … Quadratic … BCT … Bounded … Linear",
               constant and ms[GROWING][1] > (1 + NOISE) * ms[GROWING][0],
               f"ms a token after {past[0]:,} and {past[-1]:,}: " + ", ".join(
                   f"{name} {a:.0f} and {b:.0f}" for name, (a, b) in ms.items())
               + "; a constant time a token makes the whole linear, a growing one more than that",
               f"{fewer}; {noise}; decoding with a cache"),
        judged("4.3", "the memory usage of traditional methods increases linearly with context length",
               len(per_token) == 1, " or ".join(f"{x:,.0f}" for x in sorted(per_token)) + f" bytes a token from "
               f"{lengths[0]} to {lengths[-1]:,} tokens", size_of),
        judged("4.3", "the memory usage of the proposed method remains constant after reaching 2048",
               len({*size.values()}) == 1, " or ".join(f"{x:.1f}" for x in sorted({x / 1e6 for x in size.values()}))
               + f" MB after {past[0]:,} to {past[-1]:,} tokens", f"{fewer}, all allocated with the first token"),
        judged("4.3", "significantly lower than that of traditional KV cache methods",
               max(shares) < 1, f"{shares[0]:.0%} of the growing "
               f"cache's bytes after {past[0]:,} tokens, {shares[-1]:.0%} after {past[-1]:,}; more until {equal:,.0f}",
               f"{fewer}; read as fewer bytes at every length measured past it"),
        judged("5", "significantly reducing memory usage and improving system throughput", min(longest) > 1 + NOISE,
               f"{spread(longest)} times as fast as the growing cache after {lengths[-1]:,} tokens; faster "
               f"{crossing(record, own)}", f"{fewer}; decoding only, one text at a time; section 6 speaks of infinite "
               f"contexts, so the longest text decides; {noise}", max(longest) < 1 - NOISE),
    ) + under(
        "", "", conditions_line(record),
        *(judged("", f"Is {name.replace(',', ' with', 1)} faster than a preallocated cache after {lengths[-1]:,} "
                 "tokens?", min(times) > 1 + NOISE,
                 f"{spread(times)} times as fast; faster {crossing(record, name, AHEAD)}", "", max(times) < 1 - NOISE)
          for name in bcts for times in [ratios(record, name, lengths[-1], AHEAD)]),
    )  # fmt: skip


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw tokens/s over the length of the text."""

    def on(axes: Any) -> None:
        for name, row in record["rows"].items():
            rates = [1 / statistics.median(row[str(n)]["seconds"]) for n in record["lengths"]]
            axes.plot(record["lengths"], rates, marker="o", markersize=4, label=name)
        axes.set_xscale("log")
        axes.set(ylim=(0, None), xticks=record["lengths"], xticklabels=[f"{n:,}" for n in record["lengths"]])
        axes.minorticks_off()

    figure(out / "speed.png", on, title="Decoding one text, tokens/s by its length", xlabel="tokens read",
           ylabel="tokens/s")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    with StudyLine(__doc__, "lengths", "a small geometry and short lengths", model="", turns=5).parse(argv) as args:
        lengths, slots, geometry = ((16, 64), (4,), SMALL) if args.quick else (LENGTHS, SLOTS, {})
        record = measured(geometry, lengths, slots, args.turns)
        write_json(args.out / "summary.json", record)
        draw(record, args.out)
        print(page([*tables(record), *([] if args.quick else claim_tables(claims(record))), f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
