"""The methods that the projection study compares: the proposal, steps away from it, and its baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt_kv_cache import KVCache
from projector import Layout, Library, cache_of
from studies.projection_prompts import PROPOSED, Experiment, Prompt
from support.statistics import kl

OfSource = Callable[[Experiment, Prompt], Tensor]


@dataclass(frozen=True)
class Method:
    """How a first token is had: from a cache that stands for all but the tail of the prompt, or from logits."""

    name: str
    layout: Layout | None = None  # of the cache
    summary: OfSource | None = None  # of the source, (L, 2, H, m, D)
    logits: OfSource | None = None  # of the source, (V,)

    def cache(self, experiment: Experiment, source: Prompt, prompt: Prompt) -> KVCache:
        prefix = experiment.shared if self.layout.prefix else None
        summary = self.summary(experiment, source)
        return cache_of(experiment.model, summary, self.layout.tail_position(len(prompt.ids)), prefix)


def projected(layout: Layout, fit: str, change: bool = False,
              penalties: Callable[[Experiment], tuple[float, float]] | None = None) -> OfSource:
    """Return how a source's summary tokens, by stage 1 as proposed ("compressed") or prompt by prompt ("own"), are
    projected: once, since the map doesn't depend on the new prompt. The proposal does it at every start."""

    def summary(experiment: Experiment, source: Prompt) -> Tensor:
        def once() -> Tensor:
            first, second = penalties(experiment) if penalties else (None, None)
            if fit == "compressed":
                experiment.compressor(layout, first)
            make = getattr(experiment, fit)
            return experiment.projector(layout, make, change, second)(make(source, layout)[None])[0]

        return experiment.once((id(source), layout, fit, change), once)

    return summary


def mean_summary(layout: Layout) -> OfSource:
    """Return how to have the same summary tokens for every prompt: the mean of those fitted on training prompts."""

    def summary(experiment: Experiment, source: Prompt) -> Tensor:
        return experiment.once(("mean", layout), lambda: torch.stack(
            [experiment.own(p, layout) for p in experiment.sample]).mean(0))

    return summary


@torch.no_grad()
def by_hidden_state(experiment: Experiment, source: Prompt) -> Tensor:
    """Return logits (V,) of the source's last hidden state after a linear map."""
    before, after, weight = experiment.hidden_map
    x = (source.exact.hidden.double() - before) @ weight + after
    return experiment.model.head(x.to(experiment.model.wte.weight)[None, None])[0, 0]


NEIGHBOUR = Method("neighbour's logits", logits=lambda e, p: p.exact.logits)


def methods() -> list[Method]:
    """Return the proposal, steps away from it, and its baselines, in the order of the table."""
    true = replace(PROPOSED, true_positions=True)
    return [
        Method("as proposed", PROPOSED, projected(PROPOSED, "compressed")),
        Method("- at true positions", true, projected(true, "compressed")),
        Method("- summaries fitted prompt by prompt", true, projected(true, "own")),
        one_token(),
        Method("raw neighbour summary", true, lambda e, p: e.own(p, true)),
        Method("prompt-agnostic summary", true, mean_summary(true)),
        Method("hidden state", logits=by_hidden_state),
        NEIGHBOUR,
        Method("no summary tokens", Layout(1), lambda e, p: e.own(p, Layout(1))[..., :0, :]),
    ]


def one_token(prefix: int = 0) -> Method:
    """Return the warm start from one summary token, fitted prompt by prompt and projected by a ridge that pulls towards
    no change."""
    layout = Layout(1, prefix=prefix)
    after = f", after an exact prefix of {prefix}" if prefix else ""
    return Method(f"one summary token, ridge towards no change{after}", layout, projected(layout, "own", change=True))


def raw_tokens(layout: Layout) -> Method:
    """Return the warm start from the neighbour's summary tokens, fitted prompt by prompt, as they are."""
    prefix = f", after an exact prefix of {layout.prefix}" if layout.prefix else ""
    name = f"{layout.m} raw summary tokens, tail of {layout.tail}{prefix}"
    return Method(name, layout, lambda experiment, source: experiment.own(source, layout))


def first_logits(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> Tensor:
    """Return the logits (V,) of the first token by one method."""
    if method.logits:
        return method.logits(experiment, source)
    tail = torch.tensor([prompt.ids[-method.layout.tail :]], device=experiment.device)
    with torch.no_grad():
        return experiment.model(tail, method.cache(experiment, source, prompt), last_only=True)[0, -1]


def divergence(expected: Tensor, got: Tensor) -> Tensor:
    """Return KL(expected || got) in nats (...) of logits (..., V), in float64."""
    return kl(expected.cpu().double(), got.cpu().double())


def error(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> float:
    """Return KL(cold || warm) of the first token by one method."""
    return float(divergence(prompt.exact.logits, first_logits(experiment, method, source, prompt)))


def library_of(experiment: Experiment, method: Method | None, split: str, tau: float = -1.0,
               guard: bool = False) -> Library:
    """Return the library that prompts of a split meet, with the summary tokens of a method, or with none if it is only
    to be searched."""
    layout = method.layout if method else Layout(1)
    stored = [p for p in experiment.stored(split) if len(p.ids) - layout.prefix - layout.tail >= layout.m]
    summaries = (torch.stack([method.summary(experiment, p) for p in stored]) if method else
                 torch.zeros(len(stored), 1))
    return Library(experiment.model, layout, experiment.encoder, [p.text for p in stored], summaries, threshold=tau,
                   guard=guard, skip=experiment.skip, prefix=experiment.shared if layout.prefix else None)
