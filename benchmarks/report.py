"""The figures of a benchmark run: medians, ratios turn by turn, shares of the floors; as tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.scale import threads_of
from support.figures import figure
from support.tables import Table

BASE = "gpt_kv_cache.py"  # what ratios are to
UNCACHED = "gpt_baseline.py"  # reads the whole text for each token
BUSY = (
    0.10  # a larger share of the time without a processor, or change of bandwidth, is a disturbance
)
Record = dict[str, Any]


def summary(raw: Record) -> Record:
    """Return the figures: medians over turns, ratios turn by turn, shares of the floors, and what disturbed them (of
    waiting, the share of the time that a process of one CPU thread didn't compute)."""
    floor = raw["floor"]
    speeds = [f["bytes_per_ms"] for f in floor]
    roofline = raw["geometry"]["weights"] / median(speeds)
    products = {T: median(f["products_ms"][T] for f in floor) for T in floor[0]["products_ms"]}
    rows: Record = {}
    waited = []
    for name, cells in raw["contenders"].items():
        rows[name] = {}
        for cell, turns in cells.items():
            B, T = map(int, cell.split(" x "))
            base = raw["contenders"][BASE][cell]
            steps = [median(t["steps_ms"]) for t in turns]
            ratios = [median(b["steps_ms"]) / s for b, s in zip(base, steps, strict=True)]
            firsts = [b["first_ms"] / t["first_ms"] for b, t in zip(base, turns, strict=True)]
            first = median(t["first_ms"] for t in turns)
            rows[name][cell] = {
                "step_ms": median(steps),
                "tokens_per_s": 1e3 * B / median(steps),
                "decode_ratio": median(ratios),
                "of_roofline": roofline / median(steps),
                "first_ms": first,
                "first_ratio": median(firsts),
                "ratios": ratios,
                "first_ratios": firsts,
                "of_products": products[str(B * T)] / first,
                "same_tokens": all(same_tokens(t, b) for t, b in zip(turns, base, strict=True)),
                "cache_bytes": turns[-1]["nbytes"],
            }
            waited += [share_waited(turn) for turn in turns]
        if raw["reuse"][name]:
            rows[name]["reuse_ms"] = median(raw["reuse"][name])
        if name in raw.get("overheads", {}):
            rows[name]["overhead_ms"] = raw["overheads"][name]
    return {
        "rows": rows,
        "roofline_ms": roofline,
        "gb_per_s": median(speeds) / 1e6,
        "products_ms": products,
        "bandwidth_change": (max(speeds) - min(speeds)) / median(speeds),
        "waited": mean(waited) if raw["timed_cpu"] else None,
    }


def same_tokens(turn: Record, base: Record) -> bool:
    """Return whether a contender's tokens are BASE's, as far as it has written."""
    pairs = zip(turn["tokens"], base["tokens"], strict=True)
    return all(row == expected[: len(row)] for row, expected in pairs)


def share_waited(turn: Record) -> float:
    """Return the share of a turn's time in which its process had no processor."""
    computed = turn["first_cpu_ms"] + sum(turn["steps_cpu_ms"])
    return 1 - computed / (turn["first_ms"] + sum(turn["steps_ms"]))


def cells_of(rows: Record, name: str) -> list[str]:
    """Return the cells that a contender was measured in, as in "8 x 128": texts and tokens of each."""
    return [cell for cell in rows.get(name, {}) if " x " in cell]


def ahead(rows: Record) -> list[str]:
    """Return, a line for each other implementation, where it is faster than BASE in the same precision."""
    lines = []
    for contender in CONTENDERS:
        name = contender.name
        others = contender.package or contender.file
        if not others or name not in rows:
            continue
        precision = next((kind for kind in ("bfloat16", "int8") if kind in name), "")
        base = f"{BASE}, {precision}" if precision else BASE
        found = []
        for what, key in (("decoding", "decode_ratio"), ("first token", "first_ratio")):
            for cell in cells_of(rows, base):
                ratio = rows[name][cell][key] / rows[base][cell][key]
                if ratio >= 1.005:
                    found.append(f"{what} {cell} ({ratio:.2f})")
        if found:
            lines.append(f"{name} is ahead of {base}: {', '.join(found)}")
    return lines


def disturbed(found: Record) -> bool:
    """Return whether the machine was too busy for figures that mean something."""
    return max(found["bandwidth_change"], found["waited"] or 0) > BUSY


def disturbance(record: Record) -> str:
    """Return the change of the machine's speed, and how long a single thread waited for it."""
    change = f"its bandwidth changed by {record['bandwidth_change']:.0%} between turns"
    if record["waited"] is None:
        return change
    return f"{change}, and processes waited for {record['waited']:.0%} of their time"


def conditions(record: Record) -> str:
    """Return what was measured, on what, when."""
    threads = threads_of(record)
    turns = "one turn" if record["turns"] == 1 else f"medians of {record['turns']} turns"
    return f"{record['model']}, {record['machine']}, {threads}, {record['date']}; {turns}"


def shown(record: Record) -> dict[str, Record]:
    """Return the rows of a record that are of a contender of today."""
    names = {contender.name for contender in CONTENDERS}
    return {name: row for name, row in record["rows"].items() if name in names}


def decoding(record: Record, cells: Sequence[str]) -> Table:
    """Return tokens/s in these cells and the first token, each with its ratio to BASE."""
    header = ["tokens/s of decoding"]
    for cell in cells:
        B, T = cell.split(" x ")
        texts = "" if B == "1" else f"{B} texts, "
        header.append(f"{texts}after {int(T):,}")
    longest = cells_of(record["rows"], BASE)[len(record["lengths"]) - 1]
    header.append(f"first token of {record['lengths'][-1]:,}")
    rows = []
    for name, row in shown(record).items():
        speeds = [f"{row[c]['tokens_per_s']:.1f} ({row[c]['decode_ratio']:.2f})" for c in cells]
        first = f"{row[longest]['first_ms']:,.0f} ms ({row[longest]['first_ratio']:.2f})"
        rows.append([name, *speeds, first])
    return Table(header, rows)


def memory(record: Record) -> Table:
    """Return what isn't decoding: a prefix used again, bytes of the cache, overhead."""
    total, cached = record["reuse_lengths"]
    at = f"{record['batches'][0]} x {total}"
    reused = f"first token, {cached:,} of {total:,} cached"
    header = ["", reused, f"bytes of cache for {total:,}", "overhead"]
    rows = []
    for name, row in shown(record).items():
        reuse = f"{row['reuse_ms']:,.0f} ms" if "reuse_ms" in row else "-"
        overhead = f"{row['overhead_ms']:.1f} ms" if "overhead_ms" in row else "-"
        rows.append([name, reuse, f"{row[at]['cache_bytes']:,}", overhead])
    return Table(header, rows)


def limits(record: Record) -> str:
    """Return how near BASE comes to the machine's limits."""
    ours = [record["rows"][BASE][f"{record['batches'][0]} x {T}"] for T in record["lengths"]]
    shares = [x["of_roofline"] for x in ours]
    return (
        f"A token takes at least as long as reading the weights, in float32 {record['roofline_ms']:.1f} ms here "
        f"({record['gb_per_s']:.1f} GB/s): `{BASE}` reaches {min(shares):.2f} to {max(shares):.2f} of that. Of its "
        f"first token of {record['lengths'][-1]:,} the matrix products alone would take {ours[-1]['of_products']:.2f}. "
        "Overhead is the time of a step in a model with as many layers and hardly anything to compute."
    )


def report(record: Record) -> list[str | Table]:
    """Return all the figures of a run."""
    said = ahead(record["rows"]) or ["nowhere"]
    parts: list[str | Table] = [
        f"{conditions(record)}. In brackets: how many times as fast as `{BASE}` in the same turn.",
        decoding(record, cells_of(record["rows"], BASE)),
        memory(record),
        "Where others are ahead, by texts x tokens (times as fast):\n" + as_list(said),
        limits(record),
    ]
    if record["absent"]:
        parts.append(
            "Not measured:\n" + as_list(f"{name} ({why})" for name, why in record["absent"].items())
        )
    return parts


def as_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def ablation(rows: Record, lengths: Sequence[int]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return how many times as long decoding and the first token take without each choice: median, least and most of
    the turns."""
    without: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, row in rows.items():
        if name == BASE:
            continue
        without[name] = {}
        for T in lengths:
            cell = row[f"1 x {T}"]
            spreads = {"decode": spread(cell["ratios"]), "first": spread(cell["first_ratios"])}
            without[name][str(T)] = spreads
    return without


def spread(ratios: Sequence[float]) -> list[float]:
    """Return the median, the least and the most of the inverse of ratios."""
    inverse = [1 / ratio for ratio in ratios]
    return [median(inverse), min(inverse), max(inverse)]


def ablation_table(without: Record, lengths: Sequence[int]) -> Table:
    """Return how many times as long all takes without each choice, from ablation()."""
    columns = [(what, str(T)) for what in ("decode", "first") for T in lengths]
    words = {"decode": "a token after", "first": "first token of"}
    header = ["without", *(f"{words[what]} {int(T):,}" for what, T in columns)]
    rows = []
    for name, row in without.items():
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(*row[T][what]) for what, T in columns]
        rows.append([name, *cells])
    return Table(header, rows)


def draw(record: Record, out: Path) -> None:
    """Draw decoding and the first token against the length of the text, and their floors."""
    lengths, B = record["lengths"], record["batches"][0]
    styles = ("o-", "s--", "^-.", "D:", "v-", "*--", "P-.", "X:")

    def lines(
        axes: Any, key: str, rows: dict[str, Record], floor: Sequence[float], floor_name: str
    ) -> None:
        for i, (name, row) in enumerate(rows.items()):
            values = [row[f"{B} x {T}"][key] for T in lengths]
            axes.plot(lengths, values, styles[i % 8], markersize=5, linewidth=1, label=name)
        axes.plot(lengths, floor, color="black", linewidth=2, label=floor_name)
        axes.set(xlim=(0, None), ylim=(0, None))

    rows = shown(record)
    cached = {name: row for name, row in rows.items() if name != UNCACHED}
    roofline = [1e3 / record["roofline_ms"]] * len(lengths)
    products = [record["products_ms"][str(B * T)] for T in lengths]
    figure(
        out / "decoding.png",
        lambda axes: lines(
            axes, "tokens_per_s", cached, roofline, "float32 weights read, nothing else"
        ),
        xlabel="tokens in the cache",
        ylabel="tokens/s",
        title=f"Decoding, {record['model']}, batch {B}",
    )
    figure(
        out / "first_token.png",
        lambda axes: lines(axes, "first_ms", rows, products, "matrix products alone, float32"),
        xlabel="tokens of the prompt",
        ylabel="ms",
        title=f"Time to the first token, {record['model']}, batch {B}",
    )
