"""What a study shows of its results: a table, and figures."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from studies.judging import Missing
from studies.results import Results, Setting
from support.figures import line_style
from support.figures import write_figure as draw_figure
from support.tables import Table

FIGURE_LABELS = ("title", "xlabel", "ylabel", "xscale", "yscale")


class Lines(NamedTuple):
    """Lines of a table, or curves: the ways that a regular expression matches, in a setting."""

    ways: str
    setting: Setting


def lines(ways: str, **setting: Any) -> Lines:
    """Return the lines of the ways that a regular expression matches, in a setting."""
    return Lines(ways, setting)


class Column(NamedTuple):
    """A column of a table: its title, and a metric in a setting; "metric ±" with its intervals."""

    title: str
    metric: str
    setting: Setting


def columns(of: str, metrics: dict[str, str], **setting: Any) -> list[Column]:
    """Return columns, metrics by title, in one setting, which all titles begin with if it has a name."""
    begin = f"{of}: " if of else ""
    return [Column(begin + title, metric, setting) for title, metric in metrics.items()]


@dataclass
class Layout:
    """A study's table. ways: regular expressions, or lines(); every: the part of the setting for
    whose values all columns are repeated."""

    title: str
    ways: Sequence[str | Lines]
    columns: Sequence[Column]
    every: str = ""


class Point(NamedTuple):
    """A point of a curve: x, y with its interval if that is known, and a name for the point."""

    x: float
    y: float
    low: float = -math.inf
    high: float = math.inf
    name: str = ""


Curves = dict[tuple[str, str], list[Point]]  # by a curve's label and kind


def name_of(results: Results, way: str, setting: Setting) -> str:
    """Return a page's name for a way, with the parts of its setting that aren't the study's usual."""
    unusual = [
        f"{key} {value}" for key, value in setting.items() if results.usual.get(key) != value
    ]
    return ", ".join([results.claims.NAMES.get(way, way), *unusual])


def matching_ways(results: Results, asked: Iterable[str | Lines]) -> list[tuple[str, Setting]]:
    """Return the ways that regular expressions match, with the settings asked for."""
    matches = []
    for pattern, setting in (lines(x) if isinstance(x, str) else x for x in asked):
        for way in results.ways():
            if re.fullmatch(pattern, way) and (way, setting) not in matches:
                matches.append((way, setting))
    return matches


def column_here(results: Results, column: Column) -> Column:
    """Return a column; in a run of another model, with that model in the place of the recorded one."""
    model = results.usual.get("model")
    if model in (None, results.claims.USUAL.get("model")):
        return column
    title = re.sub("^(SmolLM2|pocket)", model, column.title)
    return Column(title, column.metric, results.here(column.setting))


def table_of(results: Results) -> list[str | Table]:
    """Return the study's table, one line for each way; lines without a figure are left out."""
    layout, table_rows = results.claims.TABLE, []
    shown = [column_here(results, column) for column in layout.columns]
    if layout.every:
        places = results.every[layout.every]
        shown = [
            Column(f"{place}: {title}", metric, setting | {layout.every: place})
            for place in places
            for title, metric, setting in shown
        ]
    for way, setting in matching_ways(results, layout.ways):
        cells = []
        for _, asked, column_setting in shown:
            metric, _, interval = asked.partition(" ")
            both_settings = setting | column_setting
            agree = both_settings == column_setting | setting
            if agree and results.find(way, metric, **both_settings):
                cells.append(format(results.figure(way, metric, **both_settings), interval))
            else:
                cells.append("-")
        if {*cells} != {"-"}:
            table_rows.append([name_of(results, way, setting), *cells])
    return [layout.title, Table(["", *(column.title for column in shown)], table_rows)]


def points_over(results: Results, way: str, metric: str, key: str, setting: Setting) -> list[Point]:
    """Return the points of a way's metric, with intervals, over `key`, a part of the setting."""
    points = []
    for row in results.rows.values():
        point_setting = setting | {key: row["setting"].get(key)}
        if results.find(way, metric, **point_setting) is row:
            y = results.figure(way, metric, **point_setting)
            points.append(Point(point_setting[key], y.value, y.low, y.high))
    return sorted(points)


def points_of(
    results: Results, way: str, definition: dict[str, Any], setting: Setting
) -> list[Point]:
    """Return the points of a way in a figure."""
    if "over" in definition:
        return points_over(results, way, definition["y"], definition["over"], setting)
    try:
        y = results.figure(way, definition["y"], **setting)
        if "x" not in definition:
            return [Point(x, value) for x, value in enumerate(y.values, 1)]
        x = results.figure(way, definition["x"], **setting)
    except Missing:
        return []
    return [Point(x.value, y.value, y.low, y.high, *re.split("[:~]", way, maxsplit=1)[1:])]


def curves_of(results: Results, definition: dict[str, Any]) -> Curves:
    """Return a figure's curves: one for each of its `ways`, or of the table's if it names none.

    The metric `y` is drawn over a part of the setting if the figure has `over`. If it has `x`, it is
    drawn over that metric, one curve joins the ways of one kind (periodic:64, periodic:16), and its
    points are named. Otherwise the metric is a series, drawn over its index. `legend` may change a
    label; `at` is a part of the setting that labels don't mention, such as the model.
    """
    curves: Curves = {}
    place, legend = results.here(definition.get("at", {})), definition.get("legend", {})
    for way, setting in matching_ways(results, definition.get("ways", results.claims.TABLE.ways)):
        kind = name_of(results, re.split("[:~]", way)[0], setting)
        label = kind if "x" in definition else name_of(results, way, setting)
        points = points_of(results, way, definition, place | setting)
        if points:
            curves.setdefault((legend.get(label, label), kind), []).extend(points)
    if "x" in definition:
        return {key: sorted(points, key=lambda point: point.x) for key, points in curves.items()}
    return curves


def draw_figures(results: Results, folder: Path) -> None:
    """Draw the study's figures. Ways of one kind look alike in all of them; others never do."""
    kinds: dict[str, int] = {}
    for name, definition in getattr(results.claims, "FIGURES", {}).items():
        curves = curves_of(results, definition)
        if curves:
            labels = {key: label for key, label in definition.items() if key in FIGURE_LABELS}
            draw_figure(folder / f"{name}.png", partial(plot_curves, curves, kinds), **labels)


def plot_curves(curves: Curves, kinds: dict[str, int], axes: Any) -> None:
    """Plot curves, and name the points of those that join several ways, below their intervals.
    kinds: a number for each kind drawn so far; new kinds are added."""
    for (label, kind), points in curves.items():
        style = line_style(kinds.setdefault(kind, len(kinds)))
        step = max(1, len(points) // 10)  # in a long series only some points have a marker
        if step > 1:
            style["linestyle"] = "-"
        x, y = [point.x for point in points], [point.y for point in points]
        axes.plot(x, y, **style, markersize=5, markevery=step, linewidth=1, label=label)
        if all(math.isfinite(point.low + point.high) for point in points):
            spread = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
            axes.errorbar(x, y, spread, fmt="none", capsize=2, ecolor=style["color"])
        for point in points if len(points) > 1 else []:
            place = point.x, point.low if math.isfinite(point.low) else point.y
            look = {"color": style["color"], "fontsize": 9, "ha": "right", "va": "top"}
            axes.annotate(point.name, place, (-3, -3), "data", "offset points", **look)
