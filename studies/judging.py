"""How a claim is judged: figures with their intervals, what they show, and what a claim says.

An answer is 1 (it holds), -1 (it doesn't), or 0 (neither is shown): a limit counts as kept or broken
only if the whole 95% interval lies on one side of it. "As much as" is a difference within a limit
of 0. A figure of fewer than MIN_VALUES_OF_INTERVAL values has no interval, so it shows nothing
beside a limit, unless it is exact: a count, or arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from support.statistics import (
    MIN_VALUES_OF_INTERVAL,
    bootstrap,
    interval,
    mean_of_rows,
    wilson_interval,
)

# How values become a figure with its interval. "perplexity" is given mean nats; a "share" is one of
# hits, and Wilson's interval has a width even where all agree; an "exact" metric, a count or
# arithmetic, needs only one value; a "series" is a curve over tokens; a figure of few "turns" is
# their median, and its interval is their range.
REDUCTIONS: dict[str, Callable[[np.ndarray], Sequence[float]]] = {
    "mean": lambda values: interval(values, mean_of_rows),
    "share": lambda hits: wilson_interval(hits.sum(), len(hits)),
    "perplexity": lambda nats: np.exp(interval(nats, mean_of_rows)),
    "median": lambda values: bootstrap(values, partial(np.median, axis=-1)),
    "turns": lambda values: (np.median(values), min(values), max(values)),
    "exact": lambda values: [np.mean(values)] * 3,
    "series": lambda values: (np.mean(values), -math.inf, math.inf),
}
MIN_VALUES = {
    "turns": 3,
    "share": 1,
    "exact": 1,
}  # of an interval, where it isn't MIN_VALUES_OF_INTERVAL
RELATIVE = ("perplexity", "median", "turns")  # compared by ratio, all others by difference
HOLDS, NOT_SHOWN, DOES_NOT_HOLD = 1, 0, -1
VERDICTS = {HOLDS: "HOLDS", NOT_SHOWN: "NOT SHOWN", DOES_NOT_HOLD: "DOES NOT HOLD"}
OUR_VERDICTS = {HOLDS: "YES", NOT_SHOWN: "NOT SHOWN", DOES_NOT_HOLD: "NO"}  # on our questions
NOT_AT_OUR_SIZE = "NOT AT OUR SIZE"  # instead of DOES NOT HOLD, of a number for a larger model


class Missing(LookupError):
    """A figure that wasn't measured."""


# --- Figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """How the values of a metric become a figure ("mean" or a name above), and its number's form."""

    reduction: str = "exact"
    form: str = ""


def metrics(reduction: str, **forms: str) -> dict[str, Metric]:
    """Return metrics by name that are reduced alike, each with the form of its number."""
    return {name: Metric(reduction, form) for name, form in forms.items()}


@dataclass(frozen=True)
class Figure:
    """A figure and its 95% interval, which is a point if the figure is exact, and infinite if it is
    unknown. values: one for each independent thing (prompt, turn), if they were recorded."""

    value: float
    low: float = -math.inf
    high: float = math.inf
    metric: Metric = field(default=Metric(), compare=False, repr=False)
    values: Sequence[float] = field(default=(), compare=False, repr=False)

    def __format__(self, interval: str) -> str:
        """Return "{figure}" alone, or "{figure:±}" with its interval; a zero has no sign."""
        sign = "+" if self.metric.form.startswith("+") else ""
        form = f"{sign}z{self.metric.form.removeprefix('+')}"
        text = f"{self.value:{form}}"
        if not interval or self.low == self.high or math.isinf(self.low):
            return text
        return f"{text} ({self.low:{form}} to {self.high:{form}})"

    def __str__(self) -> str:
        return f"{self}"

    def plus(self, number: float) -> "Figure":
        """Return the figure and its interval, shifted by a number."""
        bounds = (self.value + number, self.low + number, self.high + number)
        return Figure(*bounds, self.metric)

    def below(self, limit: float) -> int:
        """Return 1 if the whole interval lies below a limit, -1 if it lies above it, else 0."""
        if self.high < limit:
            return HOLDS
        return DOES_NOT_HOLD if self.low > limit else NOT_SHOWN

    def above(self, limit: float) -> int:
        """Return 1 if the whole interval lies above a limit, -1 if it lies below it, else 0."""
        return -self.below(limit)

    def within(self, limit: float) -> int:
        """Return 1 if the whole interval lies within a limit of 0, -1 if it lies beyond, else 0."""
        rounding = 1e-9
        return min(self.below(limit + rounding), self.above(-limit - rounding))

    def change(self, other: "Figure") -> "Figure":
        """Return by how much this is above another figure of the same metric: as a share of it for a
        metric in RELATIVE, else as a difference. Equally many values are compared pair by pair;
        without pairs the interval is the widest that the two allow."""
        relative = self.metric.reduction in RELATIVE
        form = "+.1%" if relative else f"+{self.metric.form.removeprefix('+')}"
        metric = Metric(self.metric.reduction if relative else "mean", form)
        if len(self.values) == len(other.values) > 1:
            values, other_values = np.array(self.values), np.array(other.values)
            is_time = metric.reduction in ("median", "turns")
            change = values / other_values if is_time else values - other_values
            return figure_of(change, metric).plus(-1 if relative else 0)
        pairs = ((self.value, other.value), (self.low, other.high), (self.high, other.low))
        value, low, high = (a / b - 1 if relative else a - b for a, b in pairs)
        if math.isfinite(self.low + other.low):
            return Figure(value, low, high, metric)
        return Figure(value, metric=metric)


def figure_of(values: np.ndarray, metric: Metric) -> Figure:
    """Return the figure for values, one from each independent thing."""
    value, low, high = map(float, REDUCTIONS[metric.reduction](values))
    if len(values) < MIN_VALUES.get(metric.reduction, MIN_VALUES_OF_INTERVAL):
        return Figure(value, metric=metric)
    return Figure(value, low, high, metric)


# An answer, None if a figure that decides is missing; the finding in one sentence; and all figures in
# words, if these are more.
Answer = tuple[int | None, str] | tuple[int | None, str, str]

# --- Claims -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A source, and the conditions under which it measured."""

    title: str
    theirs: str


@dataclass(frozen=True)
class Claim:
    """A claim in its source's words and in plain ones, or a question of ours, in plain words alone.

    It is made by calling it, as a decorator, with the function that judges it: given the results, that
    returns an answer, the finding in one sentence, and all figures in words, if these are more.
    """

    source: Source
    section: str
    quote: str
    plain: str
    partly: str = ""  # why not all of it is tested as stated
    their_model: str = ""  # larger than ours, for which the source gives a number
    at: dict[str, Any] = field(default_factory=dict)  # the setting in which figures are looked up
    judge: Callable[[Any], Answer] | None = None

    def __call__(self, judge: Callable[[Any], Answer]) -> "Claim":
        return replace(self, judge=judge)


question = partial(Claim, Source("", ""), "", "")


def for_each(results: Any, key: str, judge: Callable[[Any], Answer]) -> Answer:
    """Judge in every place, such as each model: return the worst answer, None if a place lacks
    figures; the sentence of the first place that has it; and the judge's third texts, with their
    places named, those of equal texts together. Raises Missing if all places lack figures."""
    answers, sentences = [], []
    places_of_text: dict[str, list[str]] = {}
    for value in results.every[key]:
        there = results.at(**{key: value})
        there.place = f"{value}"
        try:
            answer, sentence, *texts = judge(there)
        except Missing:
            continue
        answers.append(answer)
        sentences.append(sentence)
        for text in texts:
            places_of_text.setdefault(text, []).append(there.place)
    if not answers:
        raise Missing(f"no figures for any {key}")
    worst = min(answers)
    figures = "; ".join(f"{', '.join(places)}: {text}" for text, places in places_of_text.items())
    complete = len(answers) == len(results.every[key])
    return worst if complete else None, sentences[answers.index(worst)], figures
