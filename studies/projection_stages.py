"""CP-KVP stage by stage: stage 1 as a map over tokens, fitted by gradient; the divergence of each stage on the prompts
that it was fitted on and on others; the rank and the linear relation that the proposal assumes; bytes.

Shapes as in projector.py: L layers, H heads, D head size, T tokens, m summary tokens, N prompts, F = 2 m D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache
from projector import cache_of, per_head, readout_error, reposition
from studies import projection_measures as quality
from studies.projection_methods import NEIGHBOUR, PROPOSED, Experiment, Method, Prompt, by_hidden_state, divergence
from support.statistics import bootstrap, kl

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)  # of singular directions
TRUE = replace(PROPOSED, true_positions=True)


@dataclass(frozen=True)
class Effort:
    """How much is fitted and asked."""

    steps: int = 200  # of Adam, for each gradient fit
    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2)  # of P, chosen on validation prompts
    prompts: int = 100  # that a stage was fitted on and is measured on
    pairs: int = 200  # whose singular directions are taken


QUICK = Effort(steps=20, penalties=(1e-3,), prompts=8, pairs=40)


# --- Stage 1 over tokens ----------------------------------------------------------------------------------------------


def before_last(model: GPT, prompt: Prompt) -> Tensor:
    """Return the exact cache (L, 2, H, T - 1, D) of all tokens but the last, with keys relative to that one."""
    k, v = prompt.exact.kv[..., :-1, :].unbind(1)
    return torch.stack([reposition(model, k, torch.full((k.size(-2),), 1 - len(prompt.ids))), v], 1)


def read_tokens(scores: Tensor, values: Tensor, P: Tensor) -> Tensor:
    """Return attention's output (H, N, D) over the m summary tokens P [K | V], for P (H, m, T), values (H, N, T, D) and
    the query's scores with all keys (H, N, T): a score is linear in the keys, so P maps it, too."""
    weights = (scores @ P.mT).softmax(-1) @ P  # (H, N, T)
    return (weights[..., None, :] @ values)[..., 0, :]


def fit_tokens(scores: Tensor, values: Tensor, out: Tensor, m: int, penalty: float, steps: int) -> Tensor:
    """Return P (H, m, T), fitted by Adam from the means of m segments on the proposal's loss: the squared error of
    read_tokens() against attention's exact output (H, N, D), in units of its mean square, plus penalty * ||P||^2."""
    H, _, T = scores.shape
    member = (torch.arange(T) * m // T == torch.arange(m)[:, None]).to(scores)  # (m, T)
    P = (member / member.sum(1, keepdim=True)).repeat(H, 1, 1).requires_grad_()
    unit = out.square().mean((1, 2)).clamp(min=1e-12)
    adam = torch.optim.Adam([P], lr=0.05 * m / T)  # entries are of the size of m / T
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        adam.zero_grad()
        error = (read_tokens(scores, values, P) - out).square().mean((1, 2)) / unit
        (error.sum() + penalty * P.square().sum()).backward()
        adam.step()
        decay.step()
    return P.detach()


def padded_layer(caches: Sequence[Tensor], queries: Sequence[Tensor], T: int, layer: int) -> tuple[Tensor, ...]:
    """Return scores (H, N, T), values (H, N, T, D) and attention's outputs (H, N, D) of one layer, for caches
    (L, 2, H, any, D) and queries (L, H, D) of N prompts. Zeros pad them on the left: the last column is the last
    token's in each of them."""
    H, D = queries[0].shape[1:]
    k, v = torch.zeros(2, H, len(caches), T, D)
    shown = torch.zeros(len(caches), T, dtype=torch.bool)
    for i, cache in enumerate(caches):
        n = cache.size(-2)
        k[:, i, T - n :], v[:, i, T - n :] = cache[layer]
        shown[i, T - n :] = True
    q = torch.stack([q[layer] for q in queries], 1) / math.sqrt(D)  # (H, N, D)
    scores = (k @ q[..., None])[..., 0]
    exact = scores.masked_fill(~shown, -math.inf).softmax(-1)
    return scores, v, (exact[..., None, :] @ v)[..., 0, :]


class TokenMap:
    """Stage 1 as the proposal writes it, kept small: m summary tokens of a head are P [K | V], with one P (m, T) for all
    prompts. The proposal's own map, from R^(T x 2d) to R^(m x 2d), would also mix the 2d numbers of a token.

    It doesn't say how prompts of different lengths share a map. Here zeros pad them on the left, up to the longest
    prompt; hence a prompt of n tokens takes the last n columns.
    """

    def __init__(self, model: GPT, weight: Tensor, penalty: float) -> None:
        """weight: P of each layer and head (L, H, m, T)."""
        self.model, self.weight, self.penalty = model, weight, penalty

    def __call__(self, prompt: Prompt) -> Tensor:
        """Return the summary tokens (L, 2, H, m, D) of one prompt."""
        cache = before_last(self.model, prompt)
        return self.weight[:, None, ..., self.weight.size(-1) - cache.size(-2) :] @ cache

    @classmethod
    def fit(cls, experiment: Experiment, effort: Effort) -> TokenMap:
        """Fit on training prompts, layer by layer, with the penalty that reads validation prompts best."""
        every = [p for families in experiment.prompts.values() for family in families for p in family]
        T = max(len(p.ids) for p in every) - 1
        data = []
        for prompts in (experiment.sample, [p for family in experiment.prompts["valid"] for p in family]):
            data.append(([before_last(experiment.model, p) for p in prompts], [p.exact.q[:, :, -1] for p in prompts]))
        weights: dict[float, list[Tensor]] = {penalty: [] for penalty in effort.penalties}
        errors = dict.fromkeys(effort.penalties, 0.0)
        for layer in tqdm(range(len(experiment.model.h)), desc=f"{experiment.name}: P over tokens", leave=False):
            (scores, values, out), valid = (padded_layer(*part, T, layer) for part in data)
            for penalty in effort.penalties:
                P = fit_tokens(scores, values, out, PROPOSED.m, penalty, effort.steps)
                weights[penalty].append(P)
                errors[penalty] += float((read_tokens(*valid[:2], P) - valid[2]).square().mean())
        best = min(errors, key=errors.__getitem__)
        return cls(experiment.model, torch.stack(weights[best]), best)


# --- The prompt-agnostic baseline, learned ----------------------------------------------------------------------------


def learn_summary(experiment: Experiment, start: Tensor, effort: Effort) -> Tensor:
    """Return summary tokens (L, 2, H, m, D), the same for every prompt, learned by Adam through the model: they
    minimise KL(cold || warm) of training prompts' first token, read at position m as proposed."""
    model, batch = experiment.model, 64
    last = torch.tensor([p.ids[-1:] for p in experiment.sample], device=experiment.device)  # (N, 1)
    cold = torch.stack([p.exact.logits for p in experiment.sample]).to(experiment.device)
    summary = start.clone().requires_grad_()
    adam = torch.optim.Adam([summary], lr=0.05)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, effort.steps)
    rng = torch.Generator().manual_seed(0)
    for _ in tqdm(range(effort.steps), desc=f"{experiment.name}: summary tokens for all", leave=False):
        some = torch.randperm(len(last), generator=rng)[:batch]
        cache = cache_of(model, summary, PROPOSED.tail_position(0))
        cache = KVCache([layer.expand(-1, len(some), -1, -1, -1) for layer in cache.layers], cache.pos)
        loss = kl(cold[some], model(last[some], cache, last_only=True)[:, 0]).mean()
        (summary.grad,) = torch.autograd.grad(loss, [summary])
        adam.step()
        decay.step()
    return summary.detach()


# --- Each stage on the prompts it was fitted on, and on others --------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A part of the proposal, and whether it starts from another prompt than the one asked."""

    name: str
    method: Method
    paired: bool


def stages_of(experiment: Experiment, tokens: TokenMap, learned: Tensor) -> list[Stage]:
    """Return the proposal's parts: the rule of positions, stage 1, and both stages, each in several ways."""
    model, m = experiment.model, PROPOSED.m

    def by_tokens(prompt: Prompt, layout: object = None) -> Tensor:
        return experiment.once((id(prompt), "by tokens"), lambda: tokens(prompt))

    def by_segments(prompt: Prompt, layout: object = None) -> Tensor:
        return experiment.once((id(prompt), "by segments"), lambda: experiment.compressor(TRUE)(
            [experiment.segments(prompt, TRUE)])[0])

    found = [Stage("positions", Method(f"exact cache, last token at position {m}", PROPOSED,
                                       lambda e, p: before_last(model, p)), False)]
    makers = {"prompt by prompt (ours)": experiment.own, "one map over segments (ours)": by_segments,
              "one map over tokens": by_tokens}
    for paired in (False, True):
        for name, make in makers.items():
            for layout in (TRUE, PROPOSED)[: 1 + (make is by_tokens)]:
                def summary(e: Experiment, p: Prompt, make: Callable = make, paired: bool = paired) -> Tensor:
                    return e.projector(TRUE, make)(make(p, TRUE)[None])[0] if paired else make(p, TRUE)

                where = "" if layout is TRUE else f", last token at position {m}"
                found.append(Stage("both stages" if paired else "stage 1", Method(name + where, layout, summary), paired))
    found.append(Stage("baseline", Method("summary tokens learned for all prompts", PROPOSED, lambda e, p: learned), True))
    return [*found, Stage("baseline", NEIGHBOUR, True)]


def divergences(experiment: Experiment, method: Method, source: Prompt, prompt: Prompt) -> list[float]:
    """Return KL(cold || warm) at the first position and at those of the text that follows, fed as it is."""
    if method.logits:
        return [float(divergence(prompt.exact.logits, method.logits(experiment, source)))]

    def cold() -> Tensor:
        kv = prompt.exact.kv[..., :-1, :].to(experiment.model.wte.weight)
        cache = KVCache([layer[:, None] for layer in kv], torch.arange(kv.size(-2), device=kv.device))
        return quality.nats_after(experiment, prompt, cache, prompt.ids[-1:])[0]

    warm, _ = quality.nats_after(experiment, prompt, method.cache(experiment, source, prompt), prompt.ids[-1:])
    return divergence(experiment.once(("after", id(prompt)), cold), warm).tolist()


def measure_stage(experiment: Experiment, stage: Stage, asked: Sequence[tuple[Prompt, Prompt]]) -> dict[str, Any]:
    """Return the mean KL of a stage at the first position and at the following ones, for prompts with their sources."""
    rows = []
    for prompt, source in asked:
        first, *rest = divergences(experiment, stage.method, source if stage.paired else prompt, prompt)
        rows.append({"family": prompt.family, "kl": first, "rest": rest})
    following = [x for row in rows for x in row["rest"]]
    return {"prompts": len(rows), "kl": quality.interval(rows, lambda r: r["kl"]),
            "low_kl": quality.interval(rows, lambda r: r["kl"] <= quality.GOOD_KL),
            "following": mean(following) if following else None}  # fmt: skip


# --- The hypothesis: a low-dimensional subspace, linearly related -----------------------------------------------------


def r_squared(targets: Tensor, predicted: Tensor, center: Tensor, families: Sequence[str]) -> dict[str, Any]:
    """Return R^2 of predicted rows (..., N, F): 1 - squared error / that of `center` (..., 1, F), the mean of what was
    fitted. Its median over heads, with a 95% interval by bootstrap over families, and its least and greatest."""
    parts = torch.stack([(targets - x).square().sum(-1) for x in (predicted, center)], -1).flatten(0, -3)  # (heads, N, 2)
    names = [*dict.fromkeys(families)]
    rows = np.stack([parts[:, [f == name for f in families]].sum(1).numpy() for name in names])  # (families, heads, 2)

    def of_heads(rows: np.ndarray) -> np.ndarray:
        sums = rows.sum(-3)
        return 1 - sums[..., 0] / sums[..., 1]

    heads = of_heads(rows)
    return {"median": bootstrap(rows, lambda drawn: np.median(of_heads(drawn), -1)),
            "least": float(heads.min()), "greatest": float(heads.max())}


def spectrum(fitted: Tensor, held_out: Tensor) -> dict[str, list[float]]:
    """Return the shares of variance that the first RANKS singular directions of fitted rows (..., N, F) hold: of these
    rows and of held-out ones, both around the fitted mean; the mean over heads."""
    center = fitted.mean(-2, keepdim=True)
    directions = torch.linalg.svd(fitted - center, full_matrices=False).Vh  # (..., at most N, F)

    def shares(rows: Tensor) -> list[float]:
        along = ((rows - center) @ directions.mT).square().sum(-2).cumsum(-1)
        share = (along / (rows - center).square().sum((-2, -1))[..., None]).flatten(0, -2).mean(0)
        return [float(share[min(r, len(share)) - 1]) for r in RANKS]

    return {"fitted": shares(fitted), "held out": shares(held_out)}


def hypothesis(experiment: Experiment, makers: dict[str, Callable], held: Sequence[tuple[Prompt, Prompt]],
               effort: Effort) -> dict[str, Any]:
    """Return R^2 of stage 2 and the spectrum of the pairs (source, target), for each way of stage 1, and for the
    next-token logits, which a ridge predicts from the source's last hidden state."""
    pairs = {"fitted": experiment.pairs, "held out": [(source, prompt) for prompt, source in held]}
    families = {name: [target.family for _, target in several] for name, several in pairs.items()}
    found: dict[str, Any] = {}
    for name, make in {**makers, "next-token logits": None}.items():
        x, y, guess = {}, {}, {}
        for split, several in pairs.items():
            if make:
                both = [torch.stack([make(pair[i], TRUE) for pair in several]) for i in (0, 1)]
                guess[split] = per_head(experiment.projector(TRUE, make)(both[0])).double()
                x[split], y[split] = (per_head(part).double() for part in both)
            else:
                both = [torch.stack([pair[i].exact.logits for pair in several]).double() for i in (0, 1)]
                predicted = torch.stack([by_hidden_state(experiment, source) for source, _ in several]).double().cpu()
                x[split], y[split], guess[split] = (part - part.mean(-1, keepdim=True) for part in (*both, predicted))
        center = y["fitted"].mean(-2, keepdim=True)
        held_out = families["held out"]
        found[name] = {
            "r2": {split: r_squared(y[split], guess[split], center, families[split]) for split in pairs},
            "r2_unchanged": r_squared(y["held out"], x["held out"], center, held_out),
            "spectrum": spectrum(*(torch.cat([x[s][..., : effort.pairs, :], y[s][..., : effort.pairs, :]], -1)
                                   for s in pairs)),
        }  # fmt: skip
    return found


# --- All of it ----------------------------------------------------------------------------------------------------


def flattened_bytes(layers: int, heads: int, tokens: int, m: int, head_dim: int) -> int:
    """Return the bytes in float32 of a map from all of a cache to m summary tokens for each head, R^(T x 2d) to
    R^(m x 2d), taken as one matrix."""
    return 4 * layers * heads * (tokens * 2 * head_dim) * (m * 2 * head_dim)


def storage(model: GPT, tokens: float, T: int) -> dict[str, float]:
    """Return bytes in float32: of a prompt's summary tokens and of its cache of so many tokens, and of the maps."""
    c, m = model.config, PROPOSED.m
    heads, F = c.n_layer * c.n_head, 2 * m * c.head_dim
    return {"summary": 4 * heads * F, "cache": 4 * heads * tokens * 2 * c.head_dim, "map over tokens": 4 * heads * m * T,
            "map over segments": 4 * heads * F * (1 + F), "stage 2": 4 * heads * F * F,
            "flattened map": flattened_bytes(c.n_layer, c.n_head, T, m, c.head_dim)}  # fmt: skip


def readout(experiment: Experiment, make: Callable, prompts: Sequence[Prompt]) -> float:
    """Return the squared error of attention's output over a way of summary tokens, over that output's square."""
    segments = [experiment.segments(p, TRUE) for p in prompts]
    wrong = sum(readout_error(s, make(p, TRUE)) for s, p in zip(segments, prompts, strict=True))
    return wrong / sum(float(s.out[:, :, s.tail - 1].square().mean()) for s in segments)


def measure_stages(experiment: Experiment, effort: Effort) -> dict[str, Any]:
    """Return the record of this part for one kind of prompts."""
    tokens = TokenMap.fit(experiment, effort)
    start = torch.stack([tokens(p) for p in experiment.sample]).mean(0)
    stages = stages_of(experiment, tokens, learn_summary(experiment, start, effort))
    held = experiment.related("test")
    own = [(p, p) for p in experiment.sample[: effort.prompts]]
    pairs = [(target, source) for source, target in experiment.pairs[: effort.prompts]]
    rows = [{"stage": s.name, "method": s.method.name, "fitted": measure_stage(experiment, s, pairs if s.paired else own),
             "held out": measure_stage(experiment, s, held)}
            for s in tqdm(stages, desc=f"{experiment.name}: stages", leave=False)]  # fmt: skip
    return {"rows": rows}
