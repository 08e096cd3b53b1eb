"""The figures of a benchmark run: medians, ratios turn by turn, shares of the floors; as tables and figures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.runners import BASE, base_of, is_exact
from benchmarks.scale import cells_of
from benchmarks.words import Figures, conditions
from support.figures import line_style, write_figure
from support.tables import Table, page

# A larger share of the time without a processor, or change of bandwidth, is a disturbance.
BUSY = 0.10


def summarize(turns_by_name: Figures, weights: int, threads: int) -> Figures:
    """Return the figures of a run from the results of its turns: medians over turns, ratios turn by
    turn, shares of the floors, the contenders that wrote other tokens, and whether the run was
    disturbed. weights: their bytes. "waited" is the share of the time in which a process of one
    thread had no processor."""
    floor_turns = turns_by_name.pop("floor")
    bandwidths = [turn["bytes_per_ms"] for turn in floor_turns]
    roofline = weights / median(bandwidths)
    products = {
        T: median(turn["products_ms"][T] for turn in floor_turns)
        for T in floor_turns[0]["products_ms"]
    }
    rows, waiting_shares, base_turns = {}, [], turns_by_name[base_of(turns_by_name)]
    for name, turns in turns_by_name.items():
        rows[name] = {}
        for cell in turns[0]:
            B, T = map(int, cell.split(" x "))
            cell_turns = [turn[cell] for turn in turns]
            row = figures_of_turns(cell_turns, [turn[cell] for turn in base_turns])
            row["tokens_per_s"] = 1e3 * B / row["step_ms"]
            row["of_roofline"] = roofline / row["step_ms"]
            row["of_products"] = products[str(B * T)] / row["first_ms"]
            rows[name][cell] = row
            waiting_shares += [turn["waited"] for turn in cell_turns]
    result = {
        "rows": rows,
        "roofline_ms": roofline,
        "gb_per_s": median(bandwidths) / 1e6,
        "products_ms": products,
        "bandwidth_change": (max(bandwidths) - min(bandwidths)) / median(bandwidths),
        "waited": mean(waiting_shares) if threads == 1 else None,
    }
    return result | {"different": find_different(rows), "disturbed": is_disturbed(result)}


def figures_of_turns(turns: Sequence[Figures], base_turns: Sequence[Figures]) -> Figures:
    """Return a contender's medians over its turns in a cell, and ratios to another's turns."""
    steps = [median(turn["steps_ms"]) for turn in turns]
    ratios = [
        median(base_turn["steps_ms"]) / step
        for base_turn, step in zip(base_turns, steps, strict=True)
    ]
    firsts = [
        base_turn["first_ms"] / turn["first_ms"]
        for base_turn, turn in zip(base_turns, turns, strict=True)
    ]
    return {
        "step_ms": median(steps),
        "decode_ratio": median(ratios),
        "first_ms": median(turn["first_ms"] for turn in turns),
        "first_ratio": median(firsts),
        "ratios": ratios,
        "first_ratios": firsts,
        "same_tokens": all(
            writes_same_tokens(turn, base_turn)
            for turn, base_turn in zip(turns, base_turns, strict=True)
        ),
        "cache_bytes": turns[-1]["nbytes"],
    }


def writes_same_tokens(turn: Figures, base_turn: Figures) -> bool:
    """Return whether a contender's tokens are BASE's, as far as it has written."""
    rows = zip(turn["tokens"], base_turn["tokens"], strict=True)
    return all(row == expected[: len(row)] for row, expected in rows)


def is_disturbed(record: Figures) -> bool:
    """Return whether the machine was too busy for meaningful figures."""
    return max(record["bandwidth_change"], record["waited"] or 0) > BUSY


def find_different(rows: Figures) -> list[str]:
    """Return the contenders that should have written our own file's tokens, and haven't."""
    return [
        name
        for name, cells in rows.items()
        if is_exact(name) and not all(figures["same_tokens"] for figures in cells.values())
    ]


def decoding_table(record: Figures) -> Table:
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
    has_overhead = any("overhead_ms" in row for row in record["rows"].values())
    if has_overhead:
        header.append("overhead")
    rows = []
    for name, row in record["rows"].items():
        speeds = [
            f"{row[cell]['tokens_per_s']:.1f} ({row[cell]['decode_ratio']:.2f})" for cell in cells
        ]
        single_texts = [row[f"1 x {T}"] for T in record["lengths"]]
        firsts = [
            f"{single_text['first_ms']:,.0f} ms ({single_text['first_ratio']:.2f})"
            for single_text in single_texts
        ]
        rows.append([name, *speeds, *firsts, f"{single_texts[-1]['cache_bytes']:,}"])
        if has_overhead:
            rows[-1].append(f"{row['overhead_ms']:.1f} ms" if "overhead_ms" in row else "-")
    return Table(header, rows)


def speed_report(record: Figures, markdown: bool = False) -> str:
    """Return the table of all contenders, and how near our own file comes to the machine's limits:
    reading the weights, after each prompt, and computing the matrix products, of the longest
    prompt."""
    base = base_of(record["rows"])
    base_cells = [record["rows"][base][f"1 x {T}"] for T in record["lengths"]]
    shares, decoding = [cell["of_roofline"] for cell in base_cells], decoding_table(record)
    limits = (
        f"A token takes at least as long as reading the weights, in float32 {record['roofline_ms']:.1f} ms here "
        f"({record['gb_per_s']:.1f} GB/s): `{base}` reaches {min(shares):.2f} to {max(shares):.2f} of that. "
        f"Of its first token of {record['lengths'][-1]:,} the matrix products alone would take "
        f"{base_cells[-1]['of_products']:.2f}."
    )
    if "overhead" in decoding.header:
        limits += (
            " Overhead is the time of a step in a model with as many layers and hardly anything to"
            " compute."
        )
    ratios = f"In brackets: how many times as fast as `{base}` in the same turn."
    return page([f"{conditions(record)}. {ratios}", decoding, limits], markdown)


def slowdowns(rows: Figures, lengths: Sequence[int]) -> Figures:
    """Return how many times as long decoding and the first token take without each choice: median, least and most of
    the turns."""
    slowdown_by_name = {name: {} for name in rows if name != BASE}
    for name, by_length in slowdown_by_name.items():
        for T in lengths:
            cell = rows[name][f"1 x {T}"]
            spreads = {
                "decode": inverse_spread(cell["ratios"]),
                "first": inverse_spread(cell["first_ratios"]),
            }
            by_length[str(T)] = spreads
    return slowdown_by_name


def inverse_spread(ratios: Sequence[float]) -> list[float]:
    """Return the median, the least and the most of the inverse of ratios."""
    inverse = [1 / ratio for ratio in ratios]
    return [median(inverse), min(inverse), max(inverse)]


def slowdowns_table(without: Figures, lengths: Sequence[int]) -> Table:
    """Return the table of slowdowns(): how many times as long everything takes without each
    choice."""
    header, rows = ["without"], {name: [name] for name in without}
    for phase, label in (("decode", "a token after"), ("first", "first token of")):
        for T in lengths:
            header.append(f"{label} {T:,}")
            for name, cells in rows.items():
                cells.append("{:.2f} ({:.2f}-{:.2f})".format(*without[name][str(T)][phase]))
    return Table(header, [*rows.values()])


def draw_figures(record: Figures, folder: Path) -> None:
    """Draw decoding and the first token against the length of the text, and their floors; a Llama's figures have names
    of their own."""
    lengths, model = record["lengths"], record["model"]
    prefix = "" if BASE in record["rows"] else "llama_"
    roofline = [1e3 / record["roofline_ms"]] * len(lengths)
    products = [record["products_ms"][str(T)] for T in lengths]

    def lines(axes: Any, key: str, floor: Sequence[float], said: str) -> None:
        for i, (name, row) in enumerate(record["rows"].items()):
            values = [row[f"1 x {T}"][key] for T in lengths]
            axes.plot(lengths, values, **line_style(i), markersize=5, linewidth=1, label=name)
        axes.plot(lengths, floor, color="black", linewidth=2, label=said)
        axes.set(xlim=(0, None), ylim=(0, None))

    write_figure(
        folder / f"{prefix}decoding.png",
        lambda axes: lines(axes, "tokens_per_s", roofline, "float32 weights read, nothing else"),
        xlabel="tokens before",
        ylabel="tokens/s",
        title=f"Decoding, {model}, batch 1",
    )
    write_figure(
        folder / f"{prefix}first_token.png",
        lambda axes: lines(axes, "first_ms", products, "matrix products alone, float32"),
        xlabel="tokens of the prompt",
        ylabel="ms",
        title=f"Time to the first token, {model}, batch 1",
    )
