"""The core of the studies: their command line, rows of measured figures, claims that rows decide,
tables and figures.

A row is one figure: study, way (a method by its short name, such as periodic:64), setting, metric,
value, low and high (its 95% interval), n, and usually `values`, one for each independent thing
(prompt, turn), so that two ways can be compared pair by pair. Rows are appended to a study's
rows.jsonl as they are measured; of rows with the same way, setting and metric the last counts. A
line with `conditions` states those under which the rows after it were measured.

claims.toml beside it holds what a person has written: the source's words and the rules that decide
each claim, the names of the ways, the columns of the table, the figures. A claim is tested as
stated unless its entry `partly` says why not all of it is.
"""

import argparse
import fnmatch
import itertools
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from load_gpt2_weights import NAMES, load_model
from support.blocks import rendered
from support.cli import CommandLine
from support.conditions import conditions, is_geometry
from support.figures import line_style
from support.figures import write_figure as draw_figure
from support.files import parse_json, read_text, writable_folder, write_text
from support.statistics import bootstrap, mean_of_rows, wilson_interval
from support.tables import Table, page

STUDIES_FOLDER = Path(__file__).resolve().parent
REAL_MODEL = "smollm2"  # that quality is judged on
RECORDED_MODELS = ("pocket", REAL_MODEL)
MIN_VALUES_OF_INTERVAL = 4  # fewer don't show how they vary

# How values become a figure; by default it is their mean. "perplexity" is given mean nats; an
# "exact" metric, a count or arithmetic, needs only one value; a "series" is a curve over tokens; a
# figure of few "turns" is their median, and its interval is their range.
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "perplexity": lambda x: np.exp(x.mean(-1)),
    "median": lambda x: np.median(x, -1),
}
# Compared by their ratio, all others by their difference.
RELATIVE = ("perplexity", "median", "turns")
FIGURE_LABELS = ("title", "xlabel", "ylabel", "xscale")
VERDICTS = {1: "HOLDS", 0: "NOT SHOWN", -1: "DOES NOT HOLD"}
ARITHMETIC = {  # verdicts that no measurement could have changed
    "HOLDS": "TRUE BY ARITHMETIC",
    "DOES NOT HOLD": "FALSE BY ARITHMETIC",
}
RULE_PATTERN = re.compile(r"(?:(\w+): )?(\S+) ([<>~]) (\S+)(?: \+ ([\d.]+)(%?))?")
MISSING_FIGURE = re.compile(r"(?<!\S)-(?!\w)")  # a dash in the place of a figure
FIGURE_PATTERN = re.compile(r"(?:(\w+): )?(\S+)(?: / (\S+))?( ±)?")
SHORT_FIGURE = re.compile(r"\{([^{}%]+)\}(?!\})")  # for {{ figure("...") }}
REWORDED = {  # recorded conditions, and how a page words them
    "Intel(R) Xeon(R) Processor": "Intel Xeon",
    "read by 1 at once": "read one token at a time",
}
Row = dict[str, Any]  # as JSON has it
Setting = dict[str, Any]
# A claim in its source's own words, the conditions of both sides, and our finding: source (its title, "" if the claim
# is ours), section, quote, theirs and ours (conditions), figure (what decides, with its interval), verdict, stated
# (whether it is tested as stated, and why not), commands (python3 -m studies.COMMAND measures it); and the rest of
# what claims.toml says.
Claim = dict[str, Any]
ANSWERS = {  # to our questions
    "HOLDS": "YES",
    "DOES NOT HOLD": "NO",
    "TRUE BY ARITHMETIC": "YES, BY ARITHMETIC",
    "FALSE BY ARITHMETIC": "NO, BY ARITHMETIC",
}
MINUTES = {  # minutes that a command's full run took on an undisturbed core
    "article": 10,
    "bounding": 10,
    "bounding --model smollm2": 10,
    "recall": 30,
    "pretraining": 60,
    "lengths": 3,
    "recycling": 1,
    "recycling --model smollm2": 15,
    "recycling --model 355M": 25,
    "latency": 5,
    "projection": 150,
    "projection --model smollm2": 100,
    "refreshing": 170,
    "refreshing --teacher smollm2": 40,
    "speculation": 5,
    "speculation --model smollm2": 20,
    "compression": 20,
    "compression --model smollm2": 60,
}


class Figure(NamedTuple):
    """A figure and its 95% interval, which is a point if the figure is exact, and infinite if the
    interval is unknown."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    def formatted(self, number_format: str, with_interval: bool = True) -> str:
        """Return the figure as text; a zero has no sign."""
        sign = "+" if number_format.startswith("+") else ""
        number_format = f"{sign}z{number_format.removeprefix('+')}"
        text = f"{self.value:{number_format}}"
        if not with_interval or self.low == self.high or math.isinf(self.low):
            return text
        return f"{text} ({self.low:{number_format}} to {self.high:{number_format}})"

    def plus(self, number: float) -> "Figure":
        """Return the figure and its interval, shifted by a number."""
        return Figure(*(x + number for x in self))

    def below(self, limit: float) -> int:
        """Return 1 if the whole interval lies below a limit, -1 if it lies above it, else 0."""
        if self.high < limit:
            return 1
        return -1 if self.low > limit else 0

    def within(self, limit: float) -> int:
        """Return 1 if the whole interval lies within a limit of 0, -1 if it lies beyond, else 0."""
        mirrored = Figure(-self.value, -self.high, -self.low)
        return min(self.below(limit), mirrored.below(limit))


class Point(NamedTuple):
    """A point of a curve: x, y with its interval if that is known, and a name for the point."""

    x: float
    y: float
    low: float = -math.inf
    high: float = math.inf
    name: str = ""


Curves = dict[tuple[str, str], list[Point]]  # by a curve's label and kind


def reduce_values(values: np.ndarray, reduction: str) -> Figure:
    """Return the figure for values, one from each independent thing. It has no interval if there
    are fewer than MIN_VALUES_OF_INTERVAL."""
    if reduction == "turns":
        value = float(np.median(values))
        return Figure(value, min(values), max(values)) if len(values) > 2 else Figure(value)
    value, low, high = bootstrap(values, REDUCTIONS.get(reduction, mean_of_rows))
    if reduction == "exact":
        return Figure(value, value, value)
    if reduction == "series" or len(values) < MIN_VALUES_OF_INTERVAL:
        return Figure(value)
    return Figure(value, low, high)


def parse_way(text: str, setting: Setting) -> tuple[str, Setting]:
    """Return the way and the setting that "way@key=value@..." stands for: these values replace
    those of the given setting."""
    way, *assignments = text.split("@")
    setting = dict(setting)
    for assignment in assignments:
        key, value = assignment.split("=", 1)
        setting[key] = int(value) if value.isdecimal() else value
    return way, setting


def read_definition(study: str) -> dict[str, Any]:
    """Return what claims.toml says of a study."""
    return tomllib.loads(read_text(STUDIES_FOLDER / study / "claims.toml"))


class Rows:
    """The rows of a study, and what its claims.toml says of them."""

    def __init__(
        self, study: str, folder: Path | None = None, again: str = "", no_verdict_reason: str = ""
    ) -> None:
        """folder: where the rows are, by default the recorded ones; again: a pattern with wildcards
        for the ways to measure once more; no_verdict_reason: why the rows get no verdict, such as
        "reduced run". Such rows have a file of their own, and each run begins it anew unless it
        measures ways again. Raises ValueError if a line of the rows isn't JSON."""
        self.study, self.again, self.no_verdict_reason = study, again, no_verdict_reason
        self.offered_ways: dict[str, None] = {}  # those that ways_due() was asked about
        self.progress = tqdm(desc=study, unit=" rows", leave=False, delay=1)
        file_name = "reduced.jsonl" if no_verdict_reason else "rows.jsonl"
        self.path = (folder or STUDIES_FOLDER / study) / file_name
        # Whether the first row replaces those that are there.
        self.starts_anew = bool(no_verdict_reason) and not again
        self.definition = read_definition(study)
        if "like" in self.definition:  # another study of the same source
            other = read_definition(self.definition["like"])
            self.definition |= {"title": other["title"], "theirs": other["theirs"]}
        self.rows: dict[str, Row] = {}
        self.recorded_conditions: Row = {"conditions": []}
        self.next_conditions = self.recorded_conditions
        if self.path.exists() and not self.starts_anew:
            complete_lines, _, torn_line = read_text(self.path).rpartition("\n")
            if torn_line:  # the process was killed while it wrote this line
                write_text(self.path, f"{complete_lines}\n" if complete_lines else "")
            for line in complete_lines.splitlines():
                self._remember(parse_json(line, str(self.path), study=str))
        for way, metric, value in self.definition.get("source", []):  # the source's own figures
            figure = Figure(value, value, value)
            self._remember(row_of(*parse_way(way, {}), metric, figure, 1))

    def _remember(self, line: Row) -> None:
        if "conditions" in line:
            self.recorded_conditions = self.next_conditions = line
        else:
            key = self._key(line["way"], line["setting"], line["metric"])
            self.rows[key] = line | {"on": self.recorded_conditions}

    def _key(self, way: str, setting: Setting, metric: str) -> str:
        """Return what identifies a row. Parts that the setting lacks have the study's usual
        values."""
        return json.dumps([way, metric, self.definition["usual"] | setting], sort_keys=True)

    def _append(self, line: Row) -> None:
        """Write a row, after the conditions if these have changed, and remember it."""
        lines = [{"study": self.study} | line]
        if self.next_conditions != self.recorded_conditions:
            lines.insert(0, self.next_conditions)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w" if self.starts_anew else "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(added, allow_nan=False) + "\n" for added in lines))
        self.starts_anew = False
        for added in lines:
            self._remember(added)
        self.progress.update()

    def set_conditions(self, *conditions: str) -> None:
        """Let the next rows be measured under these conditions."""
        self.next_conditions = {"study": self.study, "conditions": [*conditions]}

    def set_model_conditions(self, name: str, model: nn.Module, *details: str) -> None:
        """Let the next rows be measured with a model, on this machine, under conditions in detail."""
        machine, threads = conditions(name, model), torch.get_num_threads()
        threads = "1 thread" if threads == 1 else f"{threads} threads"
        size = f"{name}: {machine['parameters']:,} parameters"
        self.set_conditions(size, *details, threads, machine["machine"], machine["date"])

    def ways_due(self, ways: Iterable[str], metric: str, **setting: Any) -> list[str]:
        """Return the ways to measure: those without such a row, or those to measure again."""
        ways = [*ways]
        self.offered_ways |= dict.fromkeys(ways)
        if self.again:
            return fnmatch.filter(ways, self.again)
        return [way for way in ways if self.find(way, metric, **setting) is None]

    def add_values(self, way: str, setting: Setting, **metrics: Iterable[float]) -> None:
        """Append a row for each metric, of one way in one setting."""
        for metric, values in metrics.items():
            values = [*values]
            figure = reduce_values(np.array(values), self.reduction_and_format(metric)[0])
            row = row_of(way, setting, metric, figure, len(values))
            self._append(row | {"values": [float(f"{x:.6g}") for x in values]})

    def add_figures(
        self, way: str, setting: Setting, count: int, **metrics: Iterable[float]
    ) -> None:
        """Append a row for each metric: its figure, measured on `count` things, with the interval
        if known."""
        for metric, figure in metrics.items():
            self._append(row_of(way, setting, metric, Figure(*figure), count))

    def add_share(self, way: str, setting: Setting, metric: str, hits: Sequence[bool]) -> None:
        """Append the share of hits, with Wilson's interval, which has a width even where all
        agree."""
        figure = Figure(*wilson_interval(sum(hits), len(hits)))
        row = row_of(way, setting, metric, figure, len(hits))
        self._append(row | {"values": [*map(int, hits)]})

    def find(self, way: str, metric: str, **setting: Any) -> Row | None:
        """Return the row of a way, or of "way@key=value@...", in a setting."""
        return self.rows.get(self._key(*parse_way(way, setting), metric))

    def reduction_and_format(self, metric: str) -> list[str]:
        """Return how values of a metric are reduced, and the format of the figure."""
        return self.definition["metrics"][metric].split()

    def figure(self, way: str, metric: str, **setting: Any) -> Figure | None:
        row = self.find(way, metric, **setting)
        if row is None:
            return None
        if row["low"] is None:
            return Figure(row["value"])
        return Figure(row["value"], row["low"], row["high"])

    def against(self, metric: str, way: str, other: str, setting: Setting) -> Figure | None:
        """Return by how much one way is above another: as a share of the other for metrics in
        RELATIVE, else as a difference. Ways with equally many values are compared pair by pair.
        None if one of the two isn't measured."""
        row, other_row = self.find(way, metric, **setting), self.find(other, metric, **setting)
        if row is None or other_row is None:
            return None
        reduction = self.reduction_and_format(metric)[0]
        values, other_values = (np.array(x.get("values", [])) for x in (row, other_row))
        if len(values) == len(other_values) > 1:
            if reduction in ("median", "turns"):
                change = reduce_values(values / other_values, reduction)
            else:
                change = reduce_values(values - other_values, reduction)
            return change.plus(-1) if reduction in RELATIVE else change
        figure = self.figure(way, metric, **setting)
        value, low, high = self.figure(other, metric, **setting)
        bounds = zip(figure, (value, high, low), strict=True)  # without pairs, the widest
        relative = reduction in RELATIVE
        change = Figure(*(x / y - 1 if relative else x - y for x, y in bounds))
        return change if math.isfinite(figure.low + low) else Figure(change.value)

    def name_of(self, way: str, setting: Setting) -> str:
        """Return a page's name for a way, with the parts of its setting that aren't the study's
        usual."""
        usual = self.definition["usual"]
        unusual = [f"{key} {value}" for key, value in setting.items() if usual.get(key) != value]
        return ", ".join([self.definition.get("names", {}).get(way, way), *unusual])

    def figure_text(self, asked: str, setting: Setting) -> str:
        """Return the figure that "[metric: ]way", "way ±" (with its interval) or "way / other way"
        asks for; "-" if there is none. Raises ValueError if it asks for something else."""
        match = FIGURE_PATTERN.fullmatch(asked)
        if match is None:
            raise ValueError(f"{asked} is no figure, as in [metric: ]way[@key=value][ / way][ ±]")
        metric, way, other, interval = match.groups()
        metric = metric or self.definition["metric"]
        reduction, number_format = self.reduction_and_format(metric)
        if other is None:
            figure = self.figure(way, metric, **setting)
        else:
            figure = self.against(metric, way, other, setting)
            number_format = "+.1%" if reduction in RELATIVE else f"+{number_format}"
        return "-" if figure is None else figure.formatted(number_format, bool(other or interval))

    def text(self, template: str, setting: Setting) -> str:
        """Return the text of a template in a setting, in which {way} is short for
        {{ figure("way") }}."""
        whole = SHORT_FIGURE.sub(r"{{ figure('\1') }}", template)
        return rendered(whole, {"figure": partial(self.figure_text, setting=setting)})


def row_of(way: str, setting: Setting, metric: str, figure: Figure, count: int) -> Row:
    """Return a row as JSON has it, null for an unknown interval."""
    row = {"way": way, "setting": setting, "metric": metric}
    for name, number in figure._asdict().items():
        row[name] = None if math.isinf(number) else float(f"{number:.9g}")
    return row | {"n": count}


# --- The command line ----------------------------------------------------------------------------


class StudyLine(CommandLine):
    """The command line of a study: a model, --quick and --out."""

    def __init__(
        self,
        doc: str | None,
        name: str,
        quick: str,
        model: str = "--model",
        out: str = "",
        models: str = NAMES,
        again: bool = False,
    ) -> None:
        """quick: what --quick reduces the study to; model: the option that names the model, or ""
        for a study without one, which uses one thread; again: whether single ways can be measured
        once more."""
        super().__init__(doc, f"python3 -m studies.{name} --quick")
        self.prog = f"python3 -m studies.{name.split()[0]}"
        self.study, self.model_option = name, model
        if model:
            self.add_model_options(models, option=model)
        if again:
            what = "measure these ways once more: a name, or a pattern such as 'raw-*'"
            self.add_argument("--again", default="", metavar="WAYS", help=what)
        self.add_argument("--quick", action="store_true", help=f"{quick}, in a minute or two")
        self.add_argument(
            "--out",
            default=f"results/{out or name}",
            metavar="FOLDER",
            type=writable_folder,
            help="where results go",
        )

    def prepare(self, args: argparse.Namespace) -> None:
        """Set the threads, also of a study without a model, and say how long a full run takes."""
        if "threads" not in args:
            torch.set_num_threads(1)
        command, model = self.study, getattr(args, "model", None)
        if model != self.get_default("model"):
            command += f" {self.model_option} {model}"
        if command in MINUTES and not args.quick:
            print(
                f"A full run takes about {MINUTES[command]} minutes on one core, less what is "
                "recorded; --quick takes one or two.\n",
                flush=True,
            )
        super().prepare(args)


def load_chosen_model(args: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name
    in a record."""
    name, recorded_name = args.model, args.model
    if is_geometry(name):
        name, recorded_name = f"random:{name}", f"{name}, random weights"
    return load_model(name, device=args.device, dtype=args.dtype), recorded_name


# --- Measuring --------------------------------------------------------------------------------------


def open_rows(study: str, args: argparse.Namespace, no_verdict_reason: str = "") -> Rows:
    """Return the rows for a run, as its command line asks."""
    if args.quick:
        no_verdict_reason = "reduced run"
    elif "seed" in args and (args.seed, args.dtype) != (0, torch.float32):
        no_verdict_reason = no_verdict_reason or "run with another --seed or --dtype"
    rows = Rows(study, args.out, getattr(args, "again", ""), no_verdict_reason)
    if not (no_verdict_reason or rows.again or getattr(args, "kinds", None)):
        model = getattr(args, "model", "")
        missing = rows_of_model(Rows(study), model) - rows_of_model(rows, model)
        rows.progress.total = missing if missing > 0 else None
    return rows


def rows_of_model(rows: Rows, model: str) -> int:
    """Return how many of the rows were measured with a model."""
    models = [row["on"]["conditions"][:1] for row in rows.rows.values()]
    return sum(name.partition(":")[0] == model for names in models for name in names)


def open_model_rows(
    study: str,
    args: argparse.Namespace,
    recorded_models: Sequence[str],
    difference: str | None = None,
    setting: Setting | None = None,
) -> Rows:
    """Return the rows for a run with the model args.model. Without a verdict, its figures are shown
    in the place of the recorded ones. difference: why there is no verdict, "" if there is one; by
    default there is one for recorded models. setting: of its figures, by default the model."""
    is_recorded = args.model in recorded_models
    if difference is None:
        difference = "" if is_recorded else "run of another model"
    rows, setting = open_rows(study, args, difference), setting or {"model": args.model}
    usual_model = rows.definition["usual"].get("model")
    for claim in rows.definition["claims"]:  # those on quality are judged on the model of the run
        if {args.model, claim.get("at", {}).get("model")} <= {*RECORDED_MODELS}:
            claim["at"] = claim["at"] | {"model": args.model}
    if args.model == usual_model or (is_recorded and not rows.no_verdict_reason):
        return rows
    rows.definition["usual"] |= setting
    if "model" in rows.definition.get("every", {}):
        rows.definition["every"]["model"] = [args.model]
    for claim in rows.definition["claims"]:
        claim["at"] = claim.get("at", {}) | setting
    columns = rows.definition["table"]["columns"]
    for name, column in columns.items():
        columns[name] = column.replace(f"model={REAL_MODEL}", f"model={args.model}")
    for figure in rows.definition.get("figures", {}).values():
        if "model" in figure.get("at", {}):
            figure["at"] |= setting
    return rows


# --- Claims -----------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A comparison of a way with another one, or with a number, by a metric.

    comparison: <, >, or ~ for "as much as"; margin: by how much the way may miss, as Rows.against()
    measures differences.
    """

    metric: str
    way: str
    comparison: str
    other: str
    margin: float


def parse_rule(rows: Rows, text: str) -> Rule:
    """Return the rule that "[metric: ]way < way[ + margin]" says; a margin of 5% is 0.05."""
    metric, way, comparison, other, margin, percent = RULE_PATTERN.fullmatch(text).groups()
    size = float(margin or 0) / (100 if percent else 1)
    return Rule(metric or rows.definition["metric"], way, comparison, other, size)


def judge_rule(rows: Rows, text: str, setting: Setting) -> int | None:
    """Return 1 if a rule holds, -1 if it is refuted, 0 if neither is shown, None if a row is
    missing."""
    rule = parse_rule(rows, text)
    if re.fullmatch(r"[\d.]+", rule.other):
        difference = rows.figure(rule.way, rule.metric, **setting)
        difference = difference and difference.plus(-float(rule.other))
    else:
        difference = rows.against(rule.metric, rule.way, rule.other, setting)
    if difference is None:
        return None
    if rule.comparison == "~":
        return difference.within(rule.margin + 1e-9)
    if rule.comparison == "<":
        return difference.below(rule.margin)
    return -difference.below(-rule.margin)


def judge_alternatives(rows: Rows, text: str, setting: Setting) -> int | None:
    """Return judge_rule() of a rule. Of several rules, "... or ...", one is enough: return the best
    answer, leaving out rules that weren't measured."""
    answers = [judge_rule(rows, alternative, setting) for alternative in text.split(" or ")]
    return max((answer for answer in answers if answer is not None), default=None)


def text_for_all_places(
    rows: Rows, text: str, places: list[Setting], varied_key: str | None
) -> str:
    """Return a text with its figures filled in. What stands between « and » is repeated for each
    place; the places differ in one part of the setting, varied_key. Places with equal figures are
    named together, and places without figures are left out."""

    def text_of_places(match: re.Match[str]) -> str:
        places_by_text: dict[str, list[str]] = {}
        for place in places:
            places_by_text.setdefault(rows.text(match[1], place), []).append(f"{place[varied_key]}")
        return "; ".join(
            f"{', '.join(named)} {text}"
            for text, named in places_by_text.items()
            if text.strip("-, ")
        )

    return rows.text(re.sub("«(.*?)»", text_of_places, text), places[0])


def verdict_of(rows: Rows, claim: dict[str, Any], places: list[Setting]) -> str:
    """Return the verdict on a claim: the worst of its rules' answers in all places, or the best if
    it claims only that something `can` be. It is NOT SHOWN if a rule that makes the trial fair
    (`needs`) doesn't hold, and "" if a row is missing or the run is reduced."""
    answers = [judge_alternatives(rows, rule, place) for rule in claim["rules"] for place in places]
    if None in answers or rows.no_verdict_reason:
        return ""
    if any(judge_rule(rows, rule, places[0]) != 1 for rule in claim.get("needs", [])):
        return VERDICTS[0]
    return VERDICTS[max(answers) if claim.get("can") else min(answers)]


def judge_claim(rows: Rows, claim: dict[str, Any]) -> Claim:
    """Return a claim with its verdict; a question of ours is a claim without a section. A claim
    with figures for `every` kind or size is judged for each of them."""
    varied_key, places = None, [claim.get("at", {})]
    if "«" in claim["found"]:
        [(varied_key, values)] = rows.definition["every"].items()
        places = [claim.get("at", {}) | {varied_key: value} for value in values]
    source = rows.definition.get("sources", {}).get(claim.get("source"), rows.definition)
    first_rule = parse_rule(rows, claim["rules"][0].partition(" or ")[0])
    measured_on: dict[str, list[str]] = {}  # conditions, and the places measured under them
    for place in places:
        if row := rows.find(first_rule.way, first_rule.metric, **place):
            names = measured_on.setdefault("; ".join(row["on"]["conditions"]), [])
            names.append(f"{place.get(varied_key)}")
    parts = []
    for on, names in measured_on.items():
        is_named = len(measured_on) == 1 or on.startswith(f"{names[0]}: ")
        parts.append(on if is_named else f"{', '.join(names)}: {on}")
    ours = " / ".join(parts)
    verdict = verdict_of(rows, claim, places)
    findings = Claim(
        source=source["title"] if "section" in claim else "",
        theirs=source["theirs"],
        ours=claim.get("on", ours),
        figure=text_for_all_places(rows, claim["found"], places, varied_key),
        verdict=ARITHMETIC.get(verdict, verdict) if claim.get("arithmetic") else verdict,
        stated=f"partly: {claim['partly']}" if "partly" in claim else "yes",
    )
    commands = [claim.get("command", rows.study)]
    if "also" in rows.definition and (varied_key or REAL_MODEL in claim["found"]):
        commands.append(rows.definition["also"])
    return {"section": "", "commands": commands} | claim | findings


def judge_claims(rows: Rows) -> list[Claim]:
    """Return the source's claims and our questions with their verdicts."""
    return [judge_claim(rows, claim) for claim in rows.definition["claims"]]


def answer_of(claim: Claim) -> str:
    """Return the verdict on a claim, or the answer to a question of ours."""
    verdict = claim["verdict"]
    return verdict if claim["source"] else ANSWERS.get(verdict, verdict)


def first_words(claim: Claim) -> str:
    """Return the first words of a claim, in quotation marks if they are its source's."""
    words = textwrap.shorten(claim["quote"], 40, placeholder=" …")
    return f'"{words}"' if claim["source"] else words


def lettered_list(letters: dict[str, str]) -> str:
    """Return recorded conditions, as a page words them, each with its letter."""
    text = "\n".join(f"- ({letter}) {conditions}" for conditions, letter in letters.items())
    for recorded, reworded in REWORDED.items():
        text = text.replace(recorded, reworded)
    return text


def claim_tables(claims: Sequence[Claim]) -> list[str | Table]:
    """Return a table of the claims and another of our questions, after the conditions of each
    source and ours, to which the tables refer by letter."""
    theirs = {claim["source"]: claim["theirs"] for claim in claims if claim["source"]}
    parts: list[str | Table] = [
        f"Conditions of {source}: {text}." for source, text in theirs.items()
    ]
    ours = dict.fromkeys(claim["ours"] for claim in claims)
    letters = dict(zip(ours, ascii_lowercase, strict=False))
    if letters:
        parts.append(f"Here:\n\n{lettered_list(letters)}")
    rows, questions = [], []
    for claim in claims:
        letter = letters[claim["ours"]]
        finding = ": ".join(filter(None, (answer_of(claim), claim["figure"])))
        if claim["source"]:
            quote = f'"{claim["quote"]}" ({claim["section"]}; {letter})'
            rows.append([quote, finding, claim["stated"]])
        else:
            questions.append([f"{claim['quote']} ({letter})", finding])
    if rows:
        parts.append(Table(["claim", "found here", "tested as stated"], rows, left_aligned=3))
    if questions:
        parts.append(Table(["question of ours", "found here"], questions, left_aligned=2))
    return parts


# --- Tables and figures -----------------------------------------------------------------------------


def matching_ways(rows: Rows, patterns: Iterable[str]) -> list[tuple[str, Setting]]:
    """Return the ways that match patterns such as "periodic.*@train=alone", with their settings."""
    measured_ways = dict.fromkeys(row["way"] for row in rows.rows.values())
    matches = []
    for pattern in patterns:
        way_pattern, setting = parse_way(pattern, {})
        for way in measured_ways:
            if re.fullmatch(way_pattern, way) and (way, setting) not in matches:
                matches.append((way, setting))
    return matches


def table_of(rows: Rows) -> list[str | Table]:
    """Return the study's table, one line for each way. Its columns are repeated for `every` kind if
    claims.toml says so; lines without a figure are left out."""
    definition, table_rows = rows.definition["table"], []
    columns, varied_key = definition["columns"], definition.get("every")
    if varied_key:
        columns = {
            f"{value}: {name}": f"{column}@{varied_key}={value}"
            for value in rows.definition["every"][varied_key]
            for name, column in columns.items()
        }
    for way, setting in matching_ways(rows, definition["ways"]):
        cells = []
        for column in columns.values():
            metric, column_setting = parse_way(column.removesuffix(" ±"), {})
            both_settings = setting | column_setting
            same_setting = both_settings == column_setting | setting
            figure = rows.figure(way, metric, **both_settings) if same_setting else None
            if figure is None:
                cells.append("-")
                continue
            number_format = rows.reduction_and_format(metric)[1]
            cells.append(figure.formatted(number_format, column.endswith("±")))
        if {*cells} != {"-"}:
            table_rows.append([rows.name_of(way, setting), *cells])
    return [definition["title"], Table(["", *columns], table_rows)]


def page_of(rows: Rows) -> list[str | Table]:
    """Return the claims and the table of a study, for a terminal. A claim that lacks figures is
    shown by its first words alone."""
    parts, measured, lacking = [], [], []
    if rows.no_verdict_reason:
        parts.append(f"A {rows.no_verdict_reason}: figures, and no verdict.")
    for claim in judge_claims(rows):
        if claim["ours"] and not MISSING_FIGURE.search(claim["figure"]):
            measured.append(claim)
        else:
            lacking.append(first_words(claim))
    title, table = table_of(rows)
    parts += claim_tables(measured)
    if lacking:
        parts.append(f"Left out, as figures are missing: {'; '.join(lacking)}.")
    return [*parts, title, table] if table.rows else parts  # a reduced run may fill no line


def report(rows: Rows) -> None:
    """Draw the figures of a run, and print its claims and its table. Raises ValueError if no way is
    one of those that were to be measured again."""
    if rows.again and not fnmatch.filter(rows.offered_ways, rows.again):
        ways = ", ".join(rows.offered_ways)
        raise ValueError(f"--again {rows.again} is none of the ways: {ways}")
    folder = rows.path.parent
    rows.progress.close()
    draw_figures(rows, folder)
    print(page([*page_of(rows), f"Written to {folder}"]))


def run_study(
    doc: str | None,
    study: str,
    quick: str,
    measure: Callable[[Rows, Any], None],
    argv: list[str] | None = None,
    rows_of: str = "",
    again: bool = True,
    recorded_models: Sequence[str] = (),
) -> None:
    """Run a study as its command line asks. quick: what --quick reduces it to; rows_of: the study
    whose rows and claims it uses, if not its own; recorded_models: those that it gives verdicts on,
    if it takes --model; measure: appends the rows. Its second argument says whether to append fewer
    of them; for a study that takes --model it is the command line's arguments."""
    model = "--model" if recorded_models else ""
    with StudyLine(doc, study, quick, model=model, out=rows_of, again=again).parse(argv) as args:
        if recorded_models:
            rows = open_model_rows(rows_of or study, args, recorded_models)
            measure(rows, args)
        else:
            rows = open_rows(rows_of or study, args)
            measure(rows, args.quick)
        report(rows)


def points_over(rows: Rows, way: str, metric: str, key: str, setting: Setting) -> list[Point]:
    """Return the points of a way's metric, with intervals, over `key`, a part of the setting."""
    points = []
    for row in rows.rows.values():
        point_setting = setting | {key: row["setting"].get(key)}
        if rows.find(way, metric, **point_setting) is row:
            points.append(Point(point_setting[key], *rows.figure(way, metric, **point_setting)))
    return sorted(points)


def curves_of(rows: Rows, definition: dict[str, Any]) -> Curves:
    """Return a figure's curves: one for each of its `ways`, or of the table's if it names none.

    The metric `y` is drawn over a part of the setting if the figure has `over`. If it has `x`, it is
    drawn over that metric, one curve joins the ways of one kind (periodic:64, periodic:16), and its
    points are named. Otherwise the metric is a series, drawn over its index. `legend` may change a
    label; `at` is a part of the setting that labels don't mention, such as the model.
    """
    curves: Curves = {}
    place = definition.get("at", {})
    legend = definition.get("legend", {})
    metric, ways = definition["y"], definition.get("ways", rows.definition["table"]["ways"])
    for way, setting in matching_ways(rows, ways):
        label, points = rows.name_of(way, setting), []
        kind_of_way, *values = re.split("[:~]", way, maxsplit=1)
        kind = rows.name_of(kind_of_way, setting)
        setting = place | setting
        if "over" in definition:
            points = points_over(rows, way, metric, definition["over"], setting)
        elif row := rows.find(way, metric, **setting):
            if "x" not in definition:
                points = [Point(x, y) for x, y in enumerate(row["values"], 1)]
            elif x := rows.figure(way, definition["x"], **setting):
                label = kind
                points = [Point(x.value, *rows.figure(way, metric, **setting), *values)]
        if points:
            curves.setdefault((legend.get(label, label), kind), []).extend(points)
    if "x" in definition:
        return {key: sorted(points, key=lambda point: point.x) for key, points in curves.items()}
    return curves


def draw_figures(rows: Rows, folder: Path) -> None:
    """Draw the study's figures. Ways of one kind look alike in all of them; others never do."""
    kinds: dict[str, int] = {}
    for name, definition in rows.definition.get("figures", {}).items():
        curves = curves_of(rows, definition)
        if curves:
            labels = {key: label for key, label in definition.items() if key in FIGURE_LABELS}
            draw_figure(folder / f"{name}.png", partial(plot_curves, curves, kinds), **labels)


def plot_curves(curves: Curves, kinds: dict[str, int], axes: Any) -> None:
    """Plot curves, and name the points of those that join several ways. kinds: a number for each
    kind drawn so far; new kinds are added."""
    sides = itertools.cycle((above, below, left))
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
        if len(points) > 1 and points[0].name:
            side = next(sides)
            for point in points:
                axes.annotate(point.name, color=style["color"], fontsize=9, **side(point))


def above(point: Point) -> dict[str, Any]:
    """Return where the name of a point stands: above its interval."""
    top = point.high if math.isfinite(point.high) else point.y
    return beside(point.x, top, (0, 3), ha="center", va="bottom")


def below(point: Point) -> dict[str, Any]:
    """Return where the name of a point stands: below its interval."""
    bottom = point.low if math.isfinite(point.low) else point.y
    return beside(point.x, bottom, (0, -3), ha="center", va="top")


def left(point: Point) -> dict[str, Any]:
    """Return where the name of a point stands: to the left of it."""
    return beside(point.x, point.y, (-5, 0), ha="right", va="center")


def beside(x: float, y: float, offset: tuple[int, int], **alignment: str) -> dict[str, Any]:
    """Return the arguments of axes.annotate() for words at an offset from x, y, in typographic
    points."""
    return {"xy": (x, y), "xytext": offset, "textcoords": "offset points"} | alignment
