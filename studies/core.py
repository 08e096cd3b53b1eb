"""The core of the studies: their command line, rows of measured figures, claims that rows decide,
tables and figures.

A row is one figure: study, way (a method by its short name, such as periodic:64), setting, metric,
value, low and high (its 95% interval), n, and mostly `values`, one for each independent thing
(prompt, turn), by which two ways are compared pair by pair. Rows are appended to a study's
rows.jsonl as they are measured; of rows with the same way, setting and metric the last counts. A
line with `conditions` tells under which the rows after it were measured.

claims.toml beside it holds what a person has written: the source's words and the rules that decide
each claim, the names of the ways, the columns of the table, the figures. A claim is tested as
stated unless it says why only `partly`.
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
from support.cli import CommandLine, writable_folder
from support.conditions import conditions, is_geometry
from support.figures import COLORS
from support.figures import figure as draw_figure
from support.files import parse_json, read_text, write_text
from support.statistics import bootstrap, mean
from support.tables import Table, page

HERE = Path(__file__).resolve().parent
LEAST = 4  # values that an interval needs: of fewer, one can't tell how they vary

# How values become a figure, by default their mean. "perplexity" is given mean nats; of an "exact"
# metric, a count or arithmetic, one value is enough; a "series" is a curve over tokens; a figure of
# few "turns" is their median, with their range for an interval.
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "perplexity": lambda x: np.exp(x.mean(-1)),
    "median": lambda x: np.median(x, -1),
}
# Compared by their ratio, all others by their difference.
RELATIVE = ("perplexity", "median", "turns")
LABELS = ("title", "xlabel", "ylabel", "xscale")  # of a figure
WORDS = {1: "HOLDS", 0: "NOT SHOWN", -1: "DOES NOT HOLD"}
RULE = re.compile(r"(?:(\w+): )?(\S+) ([<>~]) (\S+)(?: \+ ([\d.]+)(%?))?")
MISSING = re.compile(r"(?<!\S)-(?!\w)")  # a dash in the place of a figure
FIGURE = re.compile(r"(?:(\w+): )?(\S+)(?: / (\S+))?( ±)?")
SHORT = re.compile(r"\{([^{}%]+)\}(?!\})")  # for {{ figure("...") }}
REWORDED = {  # of recorded conditions, as a page has them
    "Intel(R) Xeon(R) Processor": "Intel Xeon",
    "read by 1 at once": "read one token at a time",
}
Row = dict[str, Any]  # as JSON has it
Setting = dict[str, Any]
Points = list[tuple[float, ...]]  # x, y and perhaps y's interval
Curves = dict[tuple[str, str], Points]  # by the label and the kind of a curve
# A claim in its source's own words, the conditions of both sides, and our finding: source (its title, "" if the claim
# is ours), section, quote, theirs and ours (conditions), figure (what decides, with its interval), verdict, stated
# (whether it is tested as stated, and why not), command (python3 -m studies.COMMAND measures it); and the rest of
# what claims.toml says.
Claim = dict[str, Any]
ANSWERS = {"HOLDS": "YES", "DOES NOT HOLD": "NO"}  # to our questions
MINUTES = {  # that a command's full run took on an undisturbed core
    "article": 10,
    "bounding": 10,
    "recall": 30,
    "pretraining": 60,
    "lengths": 3,
    "recycling": 1,
    "recycling --model 355M": 25,
    "latency": 5,
    "projection": 120,
    "refreshing": 150,
    "speculation": 5,
    "compression": 20,
}


class Figure(NamedTuple):
    """A figure and its 95% interval: a point if the figure is exact, endless if it is unknown."""

    value: float
    low: float = -math.inf
    high: float = math.inf

    def shown(self, form: str, interval: bool = True) -> str:
        """Return the figure as text; a zero has no sign."""
        form = f"+z{form[1:]}" if form.startswith("+") else f"z{form}"
        text = f"{self.value:{form}}"
        if not interval or self.low == self.high or math.isinf(self.low):
            return text
        return f"{text} ({self.low:{form}} to {self.high:{form}})"

    def below(self, limit: float) -> int:
        """Return 1 if the whole interval lies below a limit, -1 if it lies above it, else 0."""
        if self.high < limit:
            return 1
        return -1 if self.low > limit else 0

    def within(self, limit: float) -> int:
        """Return 1 if the whole interval lies within a limit of 0, -1 if it lies beyond, else 0."""
        mirrored = Figure(-self.value, -self.high, -self.low)
        return min(self.below(limit), mirrored.below(limit))


def reduced(values: np.ndarray, how: str) -> Figure:
    """Return the figure of values, one for each independent thing; without an interval if these
    are fewer than LEAST."""
    if how == "turns":
        value = float(np.median(values))
        return Figure(value, min(values), max(values)) if len(values) > 2 else Figure(value)
    value, low, high = bootstrap(values, REDUCTIONS.get(how, mean))
    if how == "exact":
        return Figure(value, value, value)
    return Figure(value, low, high) if len(values) >= LEAST and how != "series" else Figure(value)


def side_of(text: str, at: Setting) -> tuple[str, Setting]:
    """Return the way and the setting that "way@key=value@..." means, on top of a setting."""
    way, *settings = text.split("@")
    at = dict(at)
    for key, value in (setting.split("=") for setting in settings):
        at[key] = int(value) if value.isdecimal() else value
    return way, at


class Rows:
    """The rows of a study, and what its claims.toml says of them."""

    def __init__(
        self, study: str, folder: Path | None = None, again: str = "", reduced: str = ""
    ) -> None:
        """folder: of the rows, by default the recorded ones; again: a pattern, as of files, of the
        ways to measure once more; reduced: why the rows, a file of their own that is begun anew
        but for ways to measure again, are given no verdict, such as "reduced run". Raises ValueError
        if a line of the rows is no JSON."""
        self.study, self.again, self.reduced = study, again, reduced
        self.offered: dict[str, None] = {}  # the ways that due() was asked about
        self.progress = tqdm(desc=study, unit=" rows", leave=False, delay=1)
        self.path = (folder or HERE / study) / ("reduced.jsonl" if reduced else "rows.jsonl")
        self.anew = bool(reduced) and not again  # the first row replaces those that are there
        self.paper = tomllib.loads(read_text(HERE / study / "claims.toml"))
        if "like" in self.paper:  # another study of the same source
            other = tomllib.loads(read_text(HERE / self.paper["like"] / "claims.toml"))
            self.paper |= {"title": other["title"], "theirs": other["theirs"]}
        self.rows: dict[str, Row] = {}
        self.on: Row = {"conditions": []}
        self.begun = self.on
        if self.path.exists() and not self.anew:
            whole, _, torn = read_text(self.path).rpartition("\n")
            if torn:  # the process was killed while it wrote this line
                write_text(self.path, f"{whole}\n" if whole else "")
            for line in whole.splitlines():
                self.take(parse_json(line, str(self.path), study=str))
        for way, metric, value in self.paper.get("source", []):  # what it says itself
            self.take(line_of(way, {}, metric, Figure(value, value, value), 1))

    def take(self, line: Row) -> None:
        if "conditions" in line:
            self.on = self.begun = line
        else:
            key = self.key(line["way"], line["setting"], line["metric"])
            self.rows[key] = line | {"on": self.on}

    def key(self, way: str, at: Setting, metric: str) -> str:
        """Return what names a row; the setting's missing parts are as usual in the study."""
        return json.dumps([way, metric, self.paper["usual"] | at], sort_keys=True)

    def append(self, line: Row) -> None:
        """Write a row, after the conditions if these have changed, and take it."""
        lines = [{"study": self.study} | line]
        if self.begun != self.on:
            lines.insert(0, self.begun)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w" if self.anew else "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each, allow_nan=False) + "\n" for each in lines))
        self.anew = False
        for each in lines:
            self.take(each)
        self.progress.update()

    def begin(self, *conditions: str) -> None:
        """Let the next rows be measured under these conditions."""
        self.begun = {"study": self.study, "conditions": [*conditions]}

    def begin_with(self, name: str, model: nn.Module, *details: str) -> None:
        """Let the next rows be measured with a model, on this machine, under conditions in detail."""
        on, threads = conditions(name, model), torch.get_num_threads()
        threads = "1 thread" if threads == 1 else f"{threads} threads"
        size = f"{name}: {on['parameters']:,} parameters"
        self.begin(size, *details, threads, on["machine"], on["date"])

    def due(self, ways: Iterable[str], metric: str, **at: Any) -> list[str]:
        """Return the ways to measure: those without such a row, or those to measure again."""
        ways = [*ways]
        self.offered |= dict.fromkeys(ways)
        if self.again:
            return fnmatch.filter(ways, self.again)
        return [way for way in ways if self.find(way, metric, **at) is None]

    def add(self, way: str, at: Setting, **metrics: Iterable[float]) -> None:
        """Append a row for each metric, of one way in one setting."""
        for metric, values in metrics.items():
            values = [*values]
            found = reduced(np.array(values), self.kind(metric)[0])
            line = line_of(way, at, metric, found, len(values))
            self.append(line | {"values": [float(f"{x:.6g}") for x in values]})

    def add_figures(self, way: str, at: Setting, n: int, **metrics: Iterable[float]) -> None:
        """Append a row for each metric, of a figure of n things and its interval, if that is known."""
        for metric, found in metrics.items():
            self.append(line_of(way, at, metric, Figure(*found), n))

    def find(self, way: str, metric: str, **at: Any) -> Row | None:
        """Return the row of a way, or of "way@key=value@...", in a setting."""
        return self.rows.get(self.key(*side_of(way, at), metric))

    def kind(self, metric: str) -> list[str]:
        """Return how values of a metric are reduced, and the format of the figure."""
        return self.paper["metrics"][metric].split()

    def figure(self, way: str, metric: str, **at: Any) -> Figure | None:
        row = self.find(way, metric, **at)
        if row is None:
            return None
        if row["low"] is None:
            return Figure(row["value"])
        return Figure(row["value"], row["low"], row["high"])

    def against(self, metric: str, one: str, other: str, at: Setting) -> Figure | None:
        """Return by how much one way is above another, pair by pair where both have as many values:
        as a share of the other (RELATIVE), or as a difference. None if one isn't measured."""
        rows = [self.find(way, metric, **at) for way in (one, other)]
        if None in rows:
            return None
        how = self.kind(metric)[0]
        a, b = (np.array(row.get("values", [])) for row in rows)
        if len(a) == len(b) > 1:
            found = reduced(a / b if how in ("median", "turns") else a - b, how)
            return Figure(*(x - 1 for x in found)) if how in RELATIVE else found
        x, y = (self.figure(way, metric, **at) for way in (one, other))
        bounds = zip(x, (y.value, y.high, y.low), strict=True)  # no pairs: the widest
        found = Figure(*(a / b - 1 if how in RELATIVE else a - b for a, b in bounds))
        return found if math.isfinite(x.low + y.low) else Figure(found.value)

    def name(self, way: str, at: Setting) -> str:
        """Return a way and its unusual setting, as a page names them."""
        usual = self.paper["usual"]
        unusual = [f"{key} {value}" for key, value in at.items() if usual.get(key) != value]
        return ", ".join([self.paper.get("names", {}).get(way, way), *unusual])

    def figure_text(self, asked: str, at: Setting) -> str:
        """Return the figure that "[metric: ]way", "way ±" (with its interval) or "way / other way"
        asks for; "-" if there is none. Raises ValueError if it asks for something else."""
        match = FIGURE.fullmatch(asked)
        if match is None:
            raise ValueError(f"{asked} is no figure, as in [metric: ]way[@key=value][ / way][ ±]")
        metric, way, other, interval = match.groups()
        metric = metric or self.paper["metric"]
        reduction, form = self.kind(metric)
        if other is None:
            figure = self.figure(way, metric, **at)
        else:
            figure = self.against(metric, way, other, at)
            form = "+.1%" if reduction in RELATIVE else f"+{form}"
        return "-" if figure is None else figure.shown(form, bool(other or interval))

    def text(self, template: str, at: Setting) -> str:
        """Return the text of a template in a setting, in which {way} is short for
        {{ figure("way") }}."""
        whole = SHORT.sub(r"{{ figure('\1') }}", template)
        return rendered(whole, {"figure": partial(self.figure_text, at=at)})


def line_of(way: str, at: Setting, metric: str, found: Figure, n: int) -> Row:
    """Return a row as JSON has it, null for an unknown interval."""
    line = {"way": way, "setting": at, "metric": metric}
    for name, x in found._asdict().items():
        line[name] = None if math.isinf(x) else float(f"{x:.9g}")
    return line | {"n": n}


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
        """quick: the study's reduced form with --quick; model: the option that names the model, "" for none: the
        study has one thread then; again: whether single ways can be measured once more."""
        super().__init__(doc, f"python3 -m studies.{name} --quick", models)
        self.prog = f"python3 -m studies.{name.split()[0]}"
        self.study = name
        if model:
            self.add_model_arguments(model)
        if again:
            what = "measure these ways once more: a name, or a pattern such as 'raw-*'"
            self.add_argument("--again", default="", metavar="WAYS", help=what)
        self.add_argument("--quick", action="store_true", help=f"{quick}, in at most a minute")
        self.add_argument(
            "--out",
            default=f"results/{out or name}",
            metavar="FOLDER",
            type=writable_folder,
            help="where results go",
        )

    def prepare(self, args: argparse.Namespace) -> None:
        """Set the threads of a study without a model, too, and say how long a full run takes."""
        if "threads" not in args:
            torch.set_num_threads(1)
        command, model = self.study, getattr(args, "model", None)
        if model != self.get_default("model"):
            command += f" --model {model}"
        if command in MINUTES and not args.quick:
            print(
                f"A full run takes about {MINUTES[command]} minutes on one core, less what is "
                "recorded; --quick takes at most one.\n",
                flush=True,
            )
        super().prepare(args)


def model_of(args: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model that --model names, with random weights if that is a geometry, and its name
    in a record."""
    name, shown = args.model, args.model
    if is_geometry(name):
        name, shown = f"random:{name}", f"{name}, random weights"
    return load_model(name, device=args.device, dtype=args.dtype), shown


# --- Measuring --------------------------------------------------------------------------------------


def recorded(study: str, args: argparse.Namespace, different: str = "") -> Rows:
    """Return the rows of a run by its command line; different: why it is given no verdict."""
    if args.quick:
        different = "reduced run"
    elif "seed" in args and (args.seed, args.dtype) != (0, torch.float32):
        different = different or "run with another --seed or --dtype"
    return Rows(study, args.out, getattr(args, "again", ""), different)


# --- Claims -----------------------------------------------------------------------------------------


def judged(rows: Rows, rule: str, at: Setting) -> int | None:
    """Return 1 if a rule holds, -1 if it is refuted, 0 if neither is shown, None if a row is
    missing.

    A rule is "[metric: ]way < way[ + margin]", or >, or ~ for "as much as"; the second may be a
    number. A margin is what the first may miss by, as a difference that against() returns; 5% is
    0.05.
    """
    metric, one, op, other, margin, percent = RULE.fullmatch(rule).groups()
    metric = metric or rows.paper["metric"]
    limit = float(margin or 0) / (100 if percent else 1)
    if re.fullmatch(r"[\d.]+", other):
        found = rows.figure(one, metric, **at)
        found = found and Figure(*(x - float(other) for x in found))
    else:
        found = rows.against(metric, one, other, at)
    if found is None:
        return None
    line = limit if op == "<" else -limit
    if op == "~":
        return found.within(limit + 1e-9)
    return found.below(line) if op == "<" else -found.below(line)


def answer(rows: Rows, rule: str, at: Setting) -> int | None:
    """Return judged() of a rule, or the best answer of several, "... or ...", of which one is enough;
    those not measured are left out."""
    answers = [judged(rows, one, at) for one in rule.split(" or ")]
    return max((x for x in answers if x is not None), default=None)


def everywhere(rows: Rows, text: str, places: list[Setting], part: str | None) -> str:
    """Return a text with its figures. What stands between « and » is said of each of the places,
    which differ in a part of the setting: those with equal figures are named together, those
    without any not at all."""

    def each(match: re.Match[str]) -> str:
        found: dict[str, list[str]] = {}
        for place in places:
            found.setdefault(rows.text(match[1], place), []).append(f"{place[part]}")
        return "; ".join(f"{', '.join(x)} {text}" for text, x in found.items() if text.strip("-, "))

    return rows.text(re.sub("«(.*?)»", each, text), places[0])


def verdict_of(rows: Rows, claim: dict[str, Any], places: list[Setting]) -> str:
    """Return the verdict on a claim: the worst of its rules' answers in all places, or the best if a
    thing `can` be. NOT SHOWN where a rule that the trial needs to be fair doesn't hold; "" where a
    row is missing, and in a reduced run."""
    answers = [answer(rows, rule, place) for rule in claim["rules"] for place in places]
    if None in answers or rows.reduced:
        return ""
    if any(judged(rows, rule, places[0]) != 1 for rule in claim.get("needs", [])):
        return WORDS[0]
    return WORDS[max(answers) if claim.get("can") else min(answers)]


def claims(rows: Rows) -> list[Claim]:
    """Return the source's claims and our questions, which have no section, with their verdicts; one
    whose figures are found for `every` kind or size is judged for each."""
    found = []
    for claim in rows.paper["claims"]:
        part, places = None, [claim.get("at", {})]
        if "«" in claim["found"]:
            [(part, values)] = rows.paper["every"].items()
            places = [{part: value} for value in values]
        source = rows.paper.get("sources", {}).get(claim.get("source"), rows.paper)
        first = RULE.match(claim["rules"][0])
        row = rows.find(first[2], first[1] or rows.paper["metric"], **places[0])
        on = row["on"]["conditions"] if row else []
        found.append(
            {"section": "", "command": rows.study}
            | claim
            | Claim(
                source=source["title"] if "section" in claim else "",
                theirs=source["theirs"],
                ours=claim.get("on", "; ".join(on)),
                figure=everywhere(rows, claim["found"], places, part),
                verdict=verdict_of(rows, claim, places),
                stated=f"partly: {claim['partly']}" if "partly" in claim else "yes",
            )
        )
    return found


def answer_of(claim: Claim) -> str:
    """Return the verdict on a claim, or the answer to a question of ours."""
    verdict = claim["verdict"]
    return verdict if claim["source"] else ANSWERS.get(verdict, verdict)


def words_of(claim: Claim) -> str:
    """Return the first words of a claim, in quotation marks if they are its source's."""
    words = textwrap.shorten(claim["quote"], 40, placeholder=" …")
    return f'"{words}"' if claim["source"] else words


def claim_tables(claims: Sequence[Claim]) -> list[str | Table]:
    """Return claims as a table, and our questions as another, after the conditions of each source
    and ours, which the claims name by a letter."""
    parts: list[str | Table] = []
    theirs = {claim["source"]: claim["theirs"] for claim in claims if claim["source"]}
    parts += [f"Conditions of {source}: {text}." for source, text in theirs.items()]
    conditions = dict.fromkeys(claim["ours"] for claim in claims)
    letters = dict(zip(conditions, ascii_lowercase, strict=False))
    if conditions:
        here = "\n".join(f"- ({letter}) {on}" for on, letter in letters.items())
        for recorded, better in REWORDED.items():
            here = here.replace(recorded, better)
        parts.append(f"Here:\n\n{here}")
    rows, questions = [], []
    for claim in claims:
        letter = letters[claim["ours"]]
        found = ": ".join(filter(None, (answer_of(claim), claim["figure"])))
        if claim["source"]:
            quote = f'"{claim["quote"]}" ({claim["section"]}; {letter})'
            rows.append([quote, found, claim["stated"]])
        else:
            questions.append([f"{claim['quote']} ({letter})", found])
    if rows:
        parts.append(Table(["claim", "found here", "tested as stated"], rows, left=3))
    if questions:
        parts.append(Table(["question of ours", "found here"], questions, left=2))
    return parts


# --- Tables and figures -----------------------------------------------------------------------------


def ways_of(rows: Rows, patterns: Iterable[str]) -> list[tuple[str, Setting]]:
    """Return the ways that match patterns such as "periodic.*@train=alone", with the settings."""
    known = dict.fromkeys(row["way"] for row in rows.rows.values())
    found = []
    for pattern in patterns:
        match, at = side_of(pattern, {})
        for way in known:
            if re.fullmatch(match, way) and (way, at) not in found:
                found.append((way, at))
    return found


def table_of(rows: Rows) -> list[str | Table]:
    """Return the study's table, a line a way, with its columns for `every` kind, if it says so;
    lines without a figure are left out."""
    wanted, lines = rows.paper["table"], []
    columns, part = wanted["columns"], wanted.get("every")
    if part:
        several = itertools.product(rows.paper["every"][part], columns.items())
        columns = {f"{x}: {name}": f"{column}@{part}={x}" for x, (name, column) in several}
    for way, at in ways_of(rows, wanted["ways"]):
        cells = []
        for column in columns.values():
            metric, where = side_of(column.removesuffix(" ±"), {})
            # is the column of another setting than the line?
            other = any(at.get(key, value) != value for key, value in where.items())
            found = None if other else rows.figure(way, metric, **at | where)
            form = rows.kind(metric)[1]
            cells.append("-" if found is None else found.shown(form, column.endswith("±")))
        if {*cells} != {"-"}:
            lines.append([rows.name(way, at), *cells])
    return [wanted["title"], Table(["", *columns], lines)]


def page_of(rows: Rows) -> list[str | Table]:
    """Return the claims and the table of a study, for a terminal; of claims that lack figures, the
    first words alone."""
    parts = [f"A {rows.reduced}: figures, and no verdict."] if rows.reduced else []
    measured, lacking = [], []
    for claim in claims(rows):
        if claim["ours"] and not MISSING.search(claim["figure"]):
            measured.append(claim)
        else:
            lacking.append(words_of(claim))
    title, table = table_of(rows)
    parts += claim_tables(measured)
    if lacking:
        parts.append(f"Left out, as figures are missing: {'; '.join(lacking)}.")
    return [*parts, title, table] if table.rows else parts  # a reduced run may fill no line


def report(rows: Rows) -> None:
    """Draw the figures of a run, and print its claims and its table. Raises ValueError if no way is
    one of those that were to be measured again."""
    if rows.again and not fnmatch.filter(rows.offered, rows.again):
        raise ValueError(f"--again {rows.again} is none of the ways: {', '.join(rows.offered)}")
    folder = rows.path.parent
    rows.progress.close()
    draw(rows, folder)
    print(page([*page_of(rows), f"Written to {folder}"]))


def run(
    doc: str | None,
    study: str,
    quick: str,
    measure: Callable[[Rows, bool], None],
    argv: list[str] | None = None,
    of: str = "",
    again: bool = True,
) -> None:
    """Run a study that has models of its own by its command line. quick: what is reduced then; measure: appends the
    rows, fewer if that is true; of: the study that has the rows and claims, if it is another."""
    with StudyLine(doc, study, quick, model="", out=of, again=again).parse(argv) as args:
        rows = recorded(of or study, args)
        measure(rows, args.quick)
        report(rows)


def points_over(rows: Rows, way: str, metric: str, key: str, at: Setting) -> Points:
    """Return a metric of a way in a setting, with its interval, by the values of a part of it."""
    found = []
    for row in rows.rows.values():
        here = at | {key: row["setting"].get(key)}
        if rows.find(way, metric, **here) is row:
            found.append((here[key], *rows.figure(way, metric, **here)))
    return sorted(found)


def curves_of(rows: Rows, wanted: dict[str, Any]) -> Curves:
    """Return the points of a figure of its ways, or of the table's, x and y with its interval, by
    the label and the kind of their curve: of a metric over a part of the setting, or over another
    metric, joined for ways of one kind (periodic:64, periodic:16); else x and y of a series."""
    curves: Curves = {}
    metric, ways = wanted["y"], wanted.get("ways", rows.paper["table"]["ways"])
    for way, at in ways_of(rows, ways):
        label, points = rows.name(way, at), []
        kind = rows.name(re.split("[:~]", way)[0], at)
        if "over" in wanted:
            points = points_over(rows, way, metric, wanted["over"], at)
        elif row := rows.find(way, metric, **at):
            if "x" not in wanted:
                points = [*enumerate(row["values"], 1)]
            elif x := rows.figure(way, wanted["x"], **at):
                label = kind
                points = [(x.value, *rows.figure(way, metric, **at))]
        if points:
            curves.setdefault((label, kind), []).extend(points)
    return curves


def draw(rows: Rows, folder: Path) -> None:
    """Draw the study's figures, in which ways of one kind have one colour."""
    colors: dict[str, str] = {}
    for name, wanted in rows.paper.get("figures", {}).items():
        curves = curves_of(rows, wanted)
        if curves:
            labels = {key: x for key, x in wanted.items() if key in LABELS}
            draw_figure(folder / f"{name}.png", partial(plot, curves, colors), **labels)


def plot(curves: Curves, colors: dict[str, str], axes: Any) -> None:
    """Plot curves_of() a figure; colors: those of the kinds that are drawn already."""
    for (label, kind), points in curves.items():
        x, y, *interval = np.array(points).T
        color = colors.setdefault(kind, COLORS[len(colors) % len(COLORS)])
        style = "o-" if interval else "-"
        axes.plot(x, y, style, color=color, markersize=4, linewidth=1, label=label)
        if interval and np.isfinite(interval).all():
            spread = [y - interval[0], interval[1] - y]
            axes.errorbar(x, y, spread, fmt="none", capsize=2, ecolor=color)
