"""A study's results: one tidy table, a JSON object a line.

A row is one figure: study, model, way (a method by its short name, such as periodic:64), setting,
metric, value, low and high (its 95% interval), n, values (one for each independent thing, such as a
prompt or a turn, so that two ways can be compared pair by pair), conditions. Rows are appended to
rows.jsonl as they are measured; of rows with the same model, way, setting and metric the last
counts. To measure something once more, delete its rows.
"""

import copy
import json
import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from studies.judging import Figure, Metric, Missing, figure_of
from support.conditions import conditions
from support.files import parse_json, read_text, write_text

STUDIES_FOLDER = Path(__file__).resolve().parent
Row = dict[str, Any]  # as JSON has it
Setting = dict[str, Any]


class Results:
    """The results of a study, in which its ways are found by name."""

    def __init__(self, study: str, folder: Path | None = None, no_verdict_reason: str = "") -> None:
        """folder: where the rows are, by default the recorded ones. no_verdict_reason: why they get
        no verdict, such as "reduced run"; they have a file of their own then, which each run begins
        anew. Raises ValueError if a line of the rows isn't JSON."""
        self.study, self.no_verdict_reason = study, no_verdict_reason
        self.claims: ModuleType = import_module(f"studies.{study}.claims")
        self.metrics: dict[str, Metric] = self.claims.METRICS
        self.usual: Setting = dict(self.claims.USUAL)  # what a setting leaves out
        self.every: dict[str, Sequence] = dict(getattr(self.claims, "EVERY", {}))
        # The model of a run, by those in whose place claims are judged on it:
        self.instead: dict[str, str] = {}
        self.conditions_read: dict[str, None] = {}  # of the figures looked up, each once
        self.place = ""  # that for_each() judges in
        self.conditions: list[str] = []  # of the rows to come
        self.progress = tqdm(desc=study, unit=" rows", leave=False, delay=1)
        file_name = "reduced.jsonl" if no_verdict_reason else "rows.jsonl"
        self.path = (folder or STUDIES_FOLDER / study) / file_name
        self.rows: dict[str, Row] = {}
        if self.path.exists() and not no_verdict_reason:
            complete_lines, _, torn_line = read_text(self.path).rpartition("\n")
            if torn_line:  # the process was killed while it wrote this line
                write_text(self.path, f"{complete_lines}\n" if complete_lines else "")
            for line in complete_lines.splitlines():
                self.remember(parse_json(line, str(self.path), study=str, conditions=list))

    # --- Reading ------------------------------------------------------------------------------------

    def whole(self, setting: Setting) -> Setting:
        """Return a setting with the study's usual values for the parts that it lacks."""
        whole = self.usual | setting
        if "model" not in whole:
            whole["model"] = self.claims.model_of(whole)
        return whole

    def _key(self, way: str, setting: Setting, metric: str) -> str:
        return json.dumps([way, metric, self.whole(setting)], sort_keys=True)

    def remember(self, row: Row) -> None:
        """Let a row be found."""
        setting = row["setting"] | {"model": row["model"]}
        self.rows[self._key(row["way"], setting, row["metric"])] = row

    def here(self, setting: Setting) -> Setting:
        """Return a setting with the model of this run in the place of a recorded one."""
        model = setting.get("model")
        return setting | {"model": self.instead[model]} if model in self.instead else setting

    def at(self, **setting: Any) -> "Results":
        """Return these results, in which figures are looked up in a setting."""
        there = copy.copy(self)
        there.usual = self.usual | setting
        return there

    def find(self, way: str, metric: str, **setting: Any) -> Row | None:
        """Return the row of a way in a setting, whose other parts are the study's usual ones."""
        return self.rows.get(self._key(way, setting, metric))

    def ways(self) -> list[str]:
        """Return the ways that were measured, in this order."""
        return [*dict.fromkeys(row["way"] for row in self.rows.values())]

    def figure(self, way: str, metric: str, **setting: Any) -> Figure:
        """Return the figure of a way in a setting. Raises Missing if it wasn't measured."""
        row = self.find(way, metric, **setting)
        if row is None:
            raise Missing(f"{self.study} has no {metric} of {way} in {self.usual | setting}")
        self.conditions_read["; ".join(row["conditions"])] = None
        bounds = [] if row["low"] is None else [row["low"], row["high"]]
        values = row.get("values", ())
        return Figure(row["value"], *bounds, metric=self.metrics[metric], values=values)

    def change(self, way: str, other: str, metric: str, **setting: Any) -> Figure:
        """Return by how much one way's figure is above another's, as Figure.change() says."""
        return self.figure(way, metric, **setting).change(self.figure(other, metric, **setting))

    # --- Writing ------------------------------------------------------------------------------------

    def set_conditions(self, *conditions: str) -> None:
        """Let the next rows be measured under these conditions."""
        self.conditions = [*conditions]

    def set_model_conditions(self, name: str, model: nn.Module, *details: str) -> None:
        """Let the next rows be measured with a model, on this machine, under conditions in detail."""
        machine, threads = conditions(name, model), torch.get_num_threads()
        threads = "1 thread" if threads == 1 else f"{threads} threads"
        size = f"{name}: {machine['parameters']:,} parameters"
        self.set_conditions(size, *details, threads, machine["machine"], machine["date"])

    def ways_due(self, ways: Iterable[str], metric: str, **setting: Any) -> list[str]:
        """Return the ways without such a row."""
        return [way for way in ways if self.find(way, metric, **setting) is None]

    def _append(
        self, way: str, setting: Setting, metric: str, figure: Figure, count: int, **values: list
    ) -> None:
        row = {"study": self.study, "model": self.whole(setting)["model"], "way": way}
        row["setting"] = {key: value for key, value in setting.items() if key != "model"}
        row["metric"] = metric
        for name in ("value", "low", "high"):
            number = getattr(figure, name)
            row[name] = None if math.isinf(number) else float(f"{number:.9g}")
        row |= {"n": count} | values | {"conditions": self.conditions}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The first row of a run without verdicts replaces those that are there.
        mode = "w" if self.no_verdict_reason and not self.rows else "a"
        with self.path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.remember(row)
        self.progress.update()

    def add_values(self, way: str, setting: Setting, **metrics: Iterable[float]) -> None:
        """Append a row for each metric, of one way in one setting."""
        for metric, values in metrics.items():
            values = [*values]
            figure = figure_of(np.array(values), self.metrics[metric])
            rounded = [float(f"{x:.6g}") for x in values]
            self._append(way, setting, metric, figure, len(values), values=rounded)

    def add_figures(
        self, way: str, setting: Setting, count: int, **metrics: Iterable[float]
    ) -> None:
        """Append a row for each metric: its figure, measured on `count` things, with the interval
        if known."""
        for metric, bounds in metrics.items():
            self._append(way, setting, metric, Figure(*bounds), count)
