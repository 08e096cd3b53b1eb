"""What a study shows of its results: a table, and figures."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from studies.judging import Figure, Missing
from studies.results import Results, Setting
from support.figures import line_style
from support.figures import write_figure as draw_figure
from support.tables import Table

FIGURE_LABELS = ("title", "xlabel", "ylabel", "xscale", "yscale")


Lines = tuple[str, Setting]  # of a table, or curves


def lines(ways: str, **setting: Any) -> Lines:
    """Return the lines of the ways that a regular expression matches, in a setting."""
    return ways, setting


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
    """A point of a curve, and a name for it."""

    x: float
    y: Figure
    name: str = ""


Curves = dict[tuple[str, str], list[Point]]  # by a curve's label and kind


def name_of(results: Results, way: str, setting: Setting) -> str:
    """Return a page's name for a way, with its setting."""
    unusual = [f"{key} {value}" for key, value in setting.items()]
    return ", ".join([results.claims.NAMES.get(way, way), *unusual])


def matching_ways(results: Results, asked: Iterable[str | Lines]) -> list[tuple[str, Setting]]:
    """Return the ways that regular expressions match, with the settings asked for, without the parts
    that are the study's usual."""
    matches = []
    for pattern, whole in (lines(x) if isinstance(x, str) else x for x in asked):
        setting = {key: value for key, value in whole.items() if results.usual.get(key) != value}
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
    """Return the study's table, one line for each way, without lines and columns that have no
    figure; nothing if there is none."""
    layout = results.claims.TABLE
    asked = [column_here(results, column) for column in layout.columns]
    if layout.every:
        asked = [
            Column(f"{place}: {title}", metric, setting | {layout.every: place})
            for place in results.every[layout.every]
            for title, metric, setting in asked
        ]
    ways = matching_ways(results, layout.ways)
    shown = {"": [name_of(results, way, setting) for way, setting in ways]}
    for title, metric, column_setting in asked:
        cells = [cell(results, way, setting, metric, column_setting) for way, setting in ways]
        if any(cells):
            shown[title] = cells
    table_rows = [
        [x or "-" for x in row] for row in zip(*shown.values(), strict=True) if any(row[1:])
    ]
    return [layout.title, Table([*shown], table_rows)] if table_rows else []


def cell(results: Results, way: str, setting: Setting, asked: str, column: Setting) -> str:
    """Return a metric, "metric ±" with its interval, of a way in the settings of its line and of its
    column; "" if these exclude each other, or if it wasn't measured."""
    metric, _, interval = asked.partition(" ")
    both_settings = setting | column
    agree = both_settings == column | setting
    if agree and results.find(way, metric, **both_settings):
        return format(results.figure(way, metric, **both_settings), interval)
    return ""


def points_of(
    results: Results, way: str, definition: dict[str, Any], setting: Setting
) -> list[Point]:
    """Return the points of a way in a figure."""
    metric, over = definition["y"], definition.get("over")
    if over:
        points = []
        for place in sorted({row["setting"].get(over) for row in results.rows.values()} - {None}):
            there = setting | {over: place}
            if results.find(way, metric, **there):
                points.append(Point(place, results.figure(way, metric, **there)))
        return points
    try:
        y = results.figure(way, metric, **setting)
        if "x" not in definition:
            return [Point(x, Figure(value)) for x, value in enumerate(y.values, 1)]
        x = results.figure(way, definition["x"], **setting)
    except Missing:
        return []
    return [Point(x.value, y, *re.split("[:~]", way, maxsplit=1)[1:])]


def curves_of(results: Results, definition: dict[str, Any]) -> Curves:
    """Return a figure's curves: one for each of its `ways`, or of the table's if it names none.

    The metric `y` is drawn over a part of the setting if the figure has `over`. If it has `x`, it is
    drawn over that metric, one curve joins the ways of one kind (periodic:64, periodic:16), and its
    points are named. Otherwise the metric is a series, drawn over its index. `at` is a part of the
    setting that labels don't mention, such as the model.
    """
    curves: Curves = {}
    place = results.here(definition.get("at", {}))
    for way, setting in matching_ways(results, definition.get("ways", results.claims.TABLE.ways)):
        kind = name_of(results, re.split("[:~]", way)[0], setting)
        label = kind if "x" in definition else name_of(results, way, setting)
        points = points_of(results, way, definition, place | setting)
        if points:
            curves.setdefault((label, kind), []).extend(points)
    return {key: sorted(points, key=lambda point: point.x) for key, points in curves.items()}


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
        values, lows, highs = np.array([[y.value, y.low, y.high] for _, y, _ in points]).T
        spread = [values - lows, highs - values] if np.isfinite(lows).all() else None
        style |= {"markersize": 5, "markevery": step, "linewidth": 1, "capsize": 2}
        axes.errorbar([point.x for point in points], values, spread, **style, label=label)
        for x, y, name in points if len(points) > 1 else []:
            place = x, y.low if np.isfinite(y.low) else y.value
            look = {"color": style["color"], "fontsize": 9, "ha": "right", "va": "top"}
            axes.annotate(name, place, (-3, -3), "data", "offset points", **look)
