"""The figures of a benchmark run: medians, ratios turn by turn, shares of the floors; as tables and figures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.runners import BASE, base_of, is_exact
from benchmarks.scale import cells_of
from benchmarks.words import Figures, words
from support.figures import figure
from support.tables import Table

# A larger share of the time without a processor, or change of bandwidth, is a disturbance.
BUSY = 0.10


def summary(found: Figures, weights: int, threads: int) -> Figures:
    """Return the figures of what was found in each turn, with weights of so many bytes: medians over turns, ratios turn
    by turn, shares of the floors, who wrote other tokens, and what disturbed them (of waiting, the share of the time that
    a process of one thread didn't compute)."""
    floor = found.pop("floor")
    speeds = [turn["bytes_per_ms"] for turn in floor]
    roofline = weights / median(speeds)
    products = {
        T: median(turn["products_ms"][T] for turn in floor) for T in floor[0]["products_ms"]
    }
    rows, waited, base = {}, [], found[base_of(found)]
    for name, turns in found.items():
        rows[name] = {}
        for cell in turns[0]:
            B, T = map(int, cell.split(" x "))
            mine = [turn[cell] for turn in turns]
            row = figures(mine, [turn[cell] for turn in base])
            row["tokens_per_s"] = 1e3 * B / row["step_ms"]
            row["of_roofline"] = roofline / row["step_ms"]
            row["of_products"] = products[str(B * T)] / row["first_ms"]
            rows[name][cell] = row
            waited += [turn["waited"] for turn in mine]
    result = {
        "rows": rows,
        "roofline_ms": roofline,
        "gb_per_s": median(speeds) / 1e6,
        "products_ms": products,
        "bandwidth_change": (max(speeds) - min(speeds)) / median(speeds),
        "waited": mean(waited) if threads == 1 else None,
    }
    return result | {"different": different(rows), "disturbed": disturbed(result)}


def figures(turns: Sequence[Figures], base: Sequence[Figures]) -> Figures:
    """Return what a contender's turns in a cell come to, and their ratios to those of another."""
    steps = [median(t["steps_ms"]) for t in turns]
    ratios = [median(b["steps_ms"]) / s for b, s in zip(base, steps, strict=True)]
    firsts = [b["first_ms"] / t["first_ms"] for b, t in zip(base, turns, strict=True)]
    return {
        "step_ms": median(steps),
        "decode_ratio": median(ratios),
        "first_ms": median(t["first_ms"] for t in turns),
        "first_ratio": median(firsts),
        "ratios": ratios,
        "first_ratios": firsts,
        "same_tokens": all(same_tokens(t, b) for t, b in zip(turns, base, strict=True)),
        "cache_bytes": turns[-1]["nbytes"],
    }


def same_tokens(turn: Figures, base: Figures) -> bool:
    """Return whether a contender's tokens are BASE's, as far as it has written."""
    pairs = zip(turn["tokens"], base["tokens"], strict=True)
    return all(row == expected[: len(row)] for row, expected in pairs)


def disturbed(found: Figures) -> bool:
    """Return whether the machine was too busy for figures that mean something."""
    return max(found["bandwidth_change"], found["waited"] or 0) > BUSY


def different(rows: Figures) -> list[str]:
    """Return the contenders that should have written our own file's tokens, and haven't."""
    return [
        name
        for name, cells in rows.items()
        if is_exact(name) and not all(found["same_tokens"] for found in cells.values())
    ]


def decoding(record: Figures) -> Table:
    """Return tokens/s in all cells and the first tokens, each with its ratio to our own file's, bytes of the cache, and
    the overhead of a step where it was measured."""
    cells = cells_of(record["rows"][base_of(record["rows"])])
    header = ["tokens/s of decoding"]
    for cell in cells:
        B, T = cell.split(" x ")
        texts = "" if B == "1" else f"{B} texts, "
        header.append(f"{texts}after {int(T):,}")
    header += [f"first token of {T:,}" for T in record["lengths"]]
    header.append(f"bytes of cache for {record['lengths'][-1]:,}")
    overhead = any("overhead_ms" in row for row in record["rows"].values())
    if overhead:
        header.append("overhead")
    rows = []
    for name, row in record["rows"].items():
        speeds = [f"{row[c]['tokens_per_s']:.1f} ({row[c]['decode_ratio']:.2f})" for c in cells]
        ones = [row[f"1 x {T}"] for T in record["lengths"]]
        firsts = [f"{one['first_ms']:,.0f} ms ({one['first_ratio']:.2f})" for one in ones]
        rows.append([name, *speeds, *firsts, f"{ones[-1]['cache_bytes']:,}"])
        if overhead:
            rows[-1].append(f"{row['overhead_ms']:.1f} ms" if "overhead_ms" in row else "-")
    return Table(header, rows)


def speed(record: Figures, markdown: bool = False) -> str:
    """Return the table of all contenders, and how near our own file comes to the machine's limits, by its share of
    reading the weights after each prompt and its longest prompt's of the products."""
    base = base_of(record["rows"])
    ours = [record["rows"][base][f"1 x {T}"] for T in record["lengths"]]
    shares = [cell["of_roofline"] for cell in ours]
    products = ours[-1]["of_products"]
    return words("speed", record, base, decoding(record), shares, products, markdown=markdown)


def ablation(rows: Figures, lengths: Sequence[int]) -> Figures:
    """Return how many times as long decoding and the first token take without each choice: median, least and most of
    the turns."""
    without = {name: {} for name in rows if name != BASE}
    for name, found in without.items():
        for T in lengths:
            cell = rows[name][f"1 x {T}"]
            spreads = {"decode": spread(cell["ratios"]), "first": spread(cell["first_ratios"])}
            found[str(T)] = spreads
    return without


def spread(ratios: Sequence[float]) -> list[float]:
    """Return the median, the least and the most of the inverse of ratios."""
    inverse = [1 / ratio for ratio in ratios]
    return [median(inverse), min(inverse), max(inverse)]


def ablation_table(without: Figures, lengths: Sequence[int]) -> Table:
    """Return how many times as long all takes without each choice, from ablation()."""
    header, rows = ["without"], {name: [name] for name in without}
    for what, said in (("decode", "a token after"), ("first", "first token of")):
        for T in lengths:
            header.append(f"{said} {T:,}")
            for name, cells in rows.items():
                cells.append("{:.2f} ({:.2f}-{:.2f})".format(*without[name][str(T)][what]))
    return Table(header, [*rows.values()])


def draw(record: Figures, out: Path) -> None:
    """Draw decoding and the first token against the length of the text, and their floors; a Llama's figures have names
    of their own."""
    lengths, model = record["lengths"], record["model"]
    prefix = "" if BASE in record["rows"] else "llama_"
    roofline = [1e3 / record["roofline_ms"]] * len(lengths)
    products = [record["products_ms"][str(T)] for T in lengths]
    styles = ("o-", "s--", "^-.", "D:", "v-", "*--", "P-.")  # of 9 colours: no two lines look alike

    def lines(axes: Any, key: str, floor: Sequence[float], said: str) -> None:
        for i, (name, row) in enumerate(record["rows"].items()):
            values = [row[f"1 x {T}"][key] for T in lengths]
            axes.plot(lengths, values, styles[i % 7], markersize=5, linewidth=1, label=name)
        axes.plot(lengths, floor, color="black", linewidth=2, label=said)
        axes.set(xlim=(0, None), ylim=(0, None))

    figure(
        out / f"{prefix}decoding.png",
        lambda axes: lines(axes, "tokens_per_s", roofline, "float32 weights read, nothing else"),
        xlabel="tokens before",
        ylabel="tokens/s",
        title=f"Decoding, {model}, batch 1",
    )
    figure(
        out / f"{prefix}first_token.png",
        lambda axes: lines(axes, "first_ms", products, "matrix products alone, float32"),
        xlabel="tokens of the prompt",
        ylabel="ms",
        title=f"Time to the first token, {model}, batch 1",
    )
