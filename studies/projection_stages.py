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
from projector import Layout, Projector, before_last, cache_of, own_queries, per_head
from recycle import read_all
from studies import projection_measures as quality
from studies.projection_methods import (
    NEIGHBOUR,
    PROPOSED,
    Experiment,
    Method,
    Prompt,
    by_hidden_state,
    divergence,
    flattened_bytes,
)
from studies.projection_segments import readout_error
from studies.protocol import Claim, conditions_of, judged, spread, under, with_interval
from support.geometry import kv_heads
from support.statistics import bootstrap, kl, wilson
from support.tables import Table

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)  # of singular directions
TRUE = replace(PROPOSED, true_positions=True)
P_RATE, SUMMARY_RATE = (
    0.015,
    0.05,
)  # of Adam: for P, in units of its first entries; for the learned summary tokens
BATCH = 64  # prompts of a step, for the latter


@dataclass(frozen=True)
class Effort:
    """How much is fitted and asked."""

    steps: int = 400  # of Adam, for each gradient fit
    penalties: tuple[float, ...] = (1e-4, 1e-2)  # of P, chosen on validation prompts
    fitted: int = 150  # training prompts that P is fitted on
    asked: int = (
        75  # of the prompts, or pairs, that a stage was fitted on: it is measured on these, too
    )
    folded: int = 120  # pairs on which stage 2's penalty is cross-validated
    pairs: int = 200  # whose singular directions are taken


FULL, FEW_STEPS = (
    Effort(),
    Effort(steps=20, penalties=(1e-3,), fitted=40, asked=8, folded=30, pairs=40),
)


# --- Stage 1 over tokens ----------------------------------------------------------------------------------------------


def read_tokens(scores: Tensor, values: Tensor, P: Tensor) -> Tensor:
    """Return attention's output (H, N, D) over the m summary tokens P [K | V], for P (H, m, T), values (H, N, T, D) and
    the query's scores with all keys (H, N, T): a score is linear in the keys, so P maps it, too."""
    weights = (scores @ P.mT).softmax(-1) @ P  # (H, N, T)
    return (weights[..., None, :] @ values)[..., 0, :]


def fit_tokens(
    scores: Tensor, values: Tensor, out: Tensor, m: int, penalty: float, steps: int
) -> Tensor:
    """Return P (H, m, T), fitted by Adam from the means of m segments on the proposal's loss: the squared error of
    read_tokens() against attention's exact output (H, N, D), in units of its mean square, plus penalty * ||P||^2."""
    H, _, T = scores.shape
    member = (torch.arange(T) * m // T == torch.arange(m)[:, None]).to(scores)  # (m, T)
    P = (member / member.sum(1, keepdim=True)).repeat(H, 1, 1).requires_grad_()
    unit = out.square().mean((1, 2)).clamp(min=1e-12)
    adam = torch.optim.Adam(
        [P], lr=P_RATE * m / T
    )  # entries start at m / T; larger steps fit worse
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        adam.zero_grad()
        error = (read_tokens(scores, values, P) - out).square().mean((1, 2)) / unit
        (error.sum() + penalty * P.square().sum()).backward()
        adam.step()
        decay.step()
    return P.detach()


def padded_layer(
    caches: Sequence[Tensor], queries: Sequence[Tensor], T: int, layer: int
) -> tuple[Tensor, ...]:
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
    """Stage 1 as the proposal writes it, kept small: a head's m summary tokens are P [K | V], with one P (m, T) for all
    prompts. The proposal's own map, from R^(T x 2d) to R^(m x 2d), would also mix the 2d numbers of a token.

    It doesn't say how prompts of different lengths share a map. Here zeros pad them on the left, up to the longest
    prompt; hence a prompt of n tokens takes the last n columns.
    """

    def __init__(self, model: GPT, weight: Tensor, penalty: float) -> None:
        """weight: P of each layer and head (L, H, m, T)."""
        self.model, self.weight, self.penalty = model, weight, penalty

    def __call__(self, prompt: Prompt) -> Tensor:
        """Return the summary tokens (L, 2, H, m, D) of one prompt."""
        cache = before_last(self.model, prompt.exact)
        return self.weight[:, None, ..., self.weight.size(-1) - cache.size(-2) :] @ cache

    @classmethod
    def fit(cls, experiment: Experiment, effort: Effort) -> TokenMap:
        """Fit on training prompts, layer by layer, with the penalty that reads validation prompts best."""
        every = [
            p for families in experiment.prompts.values() for family in families for p in family
        ]
        T = max(len(p.ids) for p in every) - 1
        valid, data = [p for family in experiment.prompts["valid"] for p in family], []
        for prompts in (experiment.sample[: effort.fitted], valid):
            data.append(
                (
                    [before_last(experiment.model, p.exact) for p in prompts],
                    [own_queries(experiment.model, p.exact)[:, :, 0] for p in prompts],
                )
            )
        weights: dict[float, list[Tensor]] = {penalty: [] for penalty in effort.penalties}
        errors = dict.fromkeys(effort.penalties, 0.0)
        for layer in tqdm(
            range(len(experiment.model.h)), desc=f"{experiment.name}: P over tokens", leave=False
        ):
            (scores, values, out), (*held_out, exact) = (
                padded_layer(*part, T, layer) for part in data
            )
            for penalty in effort.penalties:
                P = fit_tokens(scores, values, out, PROPOSED.m, penalty, effort.steps)
                weights[penalty].append(P)
                errors[penalty] += float((read_tokens(*held_out, P) - exact).square().mean())
        best = min(errors, key=errors.__getitem__)
        return cls(experiment.model, torch.stack(weights[best]), best)


# --- The prompt-agnostic baseline, learned ----------------------------------------------------------------------------


def learn_summary(experiment: Experiment, start: Tensor, effort: Effort) -> Tensor:
    """Return summary tokens (L, 2, H, m, D), the same for every prompt, learned by Adam through the model: they
    minimise KL(cold || warm) of training prompts' first token, read at position m as proposed."""
    model = experiment.model
    last = torch.tensor([p.ids[-1:] for p in experiment.sample], device=experiment.device)  # (N, 1)
    cold = torch.stack([p.exact.logits for p in experiment.sample]).to(experiment.device)
    summary = start.clone().requires_grad_()
    adam = torch.optim.Adam([summary], lr=SUMMARY_RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, effort.steps)
    rng = torch.Generator().manual_seed(0)
    for _ in tqdm(
        range(effort.steps), desc=f"{experiment.name}: summary tokens for all", leave=False
    ):
        some = torch.randperm(len(last), generator=rng)[:BATCH]
        cache = cache_of(model, summary, PROPOSED.tail_position(0))
        cache = KVCache(
            [layer.expand(-1, len(some), -1, -1, -1) for layer in cache.layers], cache.pos
        )
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


OWN, SEGMENTS, TOKENS = (
    "fitted prompt by prompt (ours)",
    "one map over segments (ours)",
    "one map over tokens",
)
THERE = f", last token at position {PROPOSED.m}"
LEARNED = f"summary tokens learned for all prompts{THERE}"
Maker = Callable[[Prompt, Layout], Tensor]


def makers_of(experiment: Experiment, tokens: TokenMap) -> dict[str, Maker]:
    """Return the ways of stage 1: from a prompt and the layout TRUE to its summary tokens (L, 2, H, m, D)."""

    def by_tokens(prompt: Prompt, layout: Layout) -> Tensor:
        return experiment.once((id(prompt), "by tokens"), lambda: tokens(prompt))

    def by_segments(prompt: Prompt, layout: Layout) -> Tensor:
        return experiment.once(
            (id(prompt), "by segments"),
            lambda: experiment.compressor(layout)([experiment.segments(prompt, layout)])[0],
        )

    return {OWN: experiment.own, SEGMENTS: by_segments, TOKENS: by_tokens}


def stage_2(experiment: Experiment, make: Maker, effort: Effort) -> Projector:
    """Return stage 2 for a way of stage 1, fitted on all pairs."""

    def fit() -> Projector:
        sources, targets = (
            torch.stack([make(pair[i], TRUE) for pair in experiment.pairs]) for i in (0, 1)
        )
        n, families = effort.folded, [source.family for source, _ in experiment.pairs]
        return Projector(
            sources, targets, Projector.fit(sources[:n], targets[:n], families[:n]).penalty
        )

    return experiment.once(("stage 2", make.__name__), fit)


def stages_of(
    experiment: Experiment, makers: dict[str, Maker], learned: Tensor, effort: Effort
) -> list[Stage]:
    """Return the proposal's parts: the rule of positions, stage 1, and both stages, each in several ways."""
    rule = Method(f"exact cache{THERE}", PROPOSED, lambda e, p: before_last(e.model, p.exact))
    found = [Stage("positions", rule, False)]
    for paired in (False, True):
        for name, make in makers.items():

            def summary(
                e: Experiment, p: Prompt, make: Maker = make, paired: bool = paired
            ) -> Tensor:
                return stage_2(e, make, effort)(make(p, TRUE)[None])[0] if paired else make(p, TRUE)

            where = {TRUE: "", PROPOSED: THERE} if name == TOKENS else {TRUE: ""}
            found += [
                Stage(
                    "both stages" if paired else "stage 1",
                    Method(name + at, layout, summary),
                    paired,
                )
                for layout, at in where.items()
            ]
    same = Method(LEARNED, PROPOSED, lambda e, p: learned)
    return [*found, Stage("baseline", same, True), Stage("baseline", NEIGHBOUR, True)]


def divergences(
    experiment: Experiment, method: Method, source: Prompt, prompt: Prompt
) -> list[float]:
    """Return KL(cold || warm) at the first position and at those of the text that follows, fed as it is."""
    if method.logits:
        return [float(divergence(prompt.exact.logits, method.logits(experiment, source)))]

    def cold() -> Tensor:
        return quality.nats_after(
            experiment, prompt, read_all(experiment.model, prompt.ids[:-1]), prompt.ids[-1:]
        )[0]

    warm, _ = quality.nats_after(
        experiment, prompt, method.cache(experiment, source, prompt), prompt.ids[-1:]
    )
    return divergence(experiment.once(("after", id(prompt)), cold), warm).tolist()


def measure_stage(
    experiment: Experiment, stage: Stage, asked: Sequence[tuple[Prompt, Prompt]]
) -> dict[str, Any]:
    """Return the mean KL of a stage at the first position and at the following ones, for prompts with their sources."""
    rows = []
    for prompt, source in asked:
        first, *rest = divergences(
            experiment, stage.method, source if stage.paired else prompt, prompt
        )
        rows.append({"family": prompt.family, "kl": first, "rest": rest})
    following = [x for row in rows for x in row["rest"]]
    return {
        "prompts": len(rows),
        "kl": quality.interval(rows, lambda r: r["kl"]),
        "low_kl": quality.interval(rows, lambda r: r["kl"] <= quality.GOOD_KL),
        "following": mean(following) if following else None,
    }


# --- The hypothesis: a low-dimensional subspace, linearly related -----------------------------------------------------


def r_squared(
    targets: Tensor, predicted: Tensor, center: Tensor, families: Sequence[str]
) -> dict[str, Any]:
    """Return R^2 of predicted rows (..., N, F): 1 - squared error / that of `center` (..., 1, F), the mean of what was
    fitted. Its median over heads, with a 95% interval by bootstrap over families, and its least and greatest."""
    parts = torch.stack(
        [(targets - x).square().sum(-1) for x in (predicted, center)], -1
    )  # (..., N, 2)
    parts = parts.flatten(0, -3)  # (heads, N, 2)
    names = [*dict.fromkeys(families)]
    rows = np.stack(
        [parts[:, [f == name for f in families]].sum(1).numpy() for name in names]
    )  # (families, heads, 2)

    def of_heads(rows: np.ndarray) -> np.ndarray:
        sums = rows.sum(-3)
        return 1 - sums[..., 0] / sums[..., 1]

    heads = of_heads(rows)
    return {
        "median": bootstrap(rows, lambda drawn: np.median(of_heads(drawn), -1)),
        "least": float(heads.min()),
        "greatest": float(heads.max()),
    }


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


def hypothesis(
    experiment: Experiment,
    makers: dict[str, Maker],
    held: Sequence[tuple[Prompt, Prompt]],
    effort: Effort,
) -> dict[str, Any]:
    """Return R^2 of stage 2 and the spectrum of the pairs (source, target), for each way of stage 1; and of the
    next-token logits, which a ridge predicts from the source's last hidden state."""
    pairs = {"fitted": experiment.pairs, "held out": [(source, prompt) for prompt, source in held]}
    families = {name: [target.family for _, target in several] for name, several in pairs.items()}
    found: dict[str, Any] = {}
    for name, make in {**makers, "next-token logits": None}.items():
        x, y, guess = {}, {}, {}
        for split, several in pairs.items():
            if make:
                both = [torch.stack([make(pair[i], TRUE) for pair in several]) for i in (0, 1)]
                guess[split] = per_head(stage_2(experiment, make, effort)(both[0])).double()
                x[split], y[split] = (per_head(part).double() for part in both)
            else:
                both = [
                    torch.stack([pair[i].exact.logits for pair in several]).double() for i in (0, 1)
                ]
                predicted = (
                    torch.stack([by_hidden_state(experiment, source) for source, _ in several])
                    .double()
                    .cpu()
                )
                x[split], y[split], guess[split] = (
                    (part - part.mean(-1, keepdim=True))[None] for part in (*both, predicted)
                )  # (1, N, V)
        center = y["fitted"].mean(-2, keepdim=True)
        held_out = families["held out"]
        found[name] = {
            "r2": {
                split: r_squared(y[split], guess[split], center, families[split]) for split in pairs
            },
            "r2_unchanged": r_squared(y["held out"], x["held out"], center, held_out),
            "spectrum": spectrum(
                *(
                    torch.cat([x[s][..., : effort.pairs, :], y[s][..., : effort.pairs, :]], -1)
                    for s in pairs
                )
            ),
        }
    return found


# --- All of it ----------------------------------------------------------------------------------------------------


def storage(model: GPT, tokens: float, T: int) -> dict[str, float]:
    """Return bytes in float32: of a prompt's summary tokens and of its cache of so many tokens, and of the maps."""
    c, m = model.config, PROPOSED.m
    heads, F = c.n_layer * kv_heads(c), 2 * m * c.head_dim
    return {
        "summary": 4 * heads * F,
        "cache": 4 * heads * tokens * 2 * c.head_dim,
        "map over tokens": 4 * heads * m * T,
        "map over segments": 4 * heads * F * (1 + F),
        "stage 2": 4 * heads * F * F,
        "flattened map": flattened_bytes(c.n_layer, kv_heads(c), T, m, c.head_dim),
    }


def readout(experiment: Experiment, make: Maker, prompts: Sequence[Prompt]) -> float:
    """Return the squared error of attention's output over a way of summary tokens, over that output's square."""
    segments = [experiment.segments(p, TRUE) for p in prompts]
    wrong = sum(readout_error(s, make(p, TRUE)) for s, p in zip(segments, prompts, strict=True))
    return wrong / sum(float(s.out[:, :, s.tail - 1].square().mean()) for s in segments)


def measure_stages(experiment: Experiment, effort: Effort) -> dict[str, Any]:
    """Return the record of this part for one kind of prompts."""
    tokens, held = TokenMap.fit(experiment, effort), experiment.related("test")
    makers = makers_of(experiment, tokens)
    start = torch.stack([tokens(p) for p in experiment.sample]).mean(0)
    stages = stages_of(experiment, makers, learn_summary(experiment, start, effort), effort)
    own = experiment.sample[: min(effort.asked, effort.fitted)]
    pairs = [(target, source) for source, target in experiment.pairs[: effort.asked]]
    split = {"fitted": own, "held out": [p for p, _ in held]}
    rows = [
        {
            "stage": stage.name,
            "method": stage.method.name,
            "fitted": measure_stage(
                experiment, stage, pairs if stage.paired else [(p, p) for p in own]
            ),
            "held out": measure_stage(experiment, stage, held),
        }
        for stage in tqdm(stages, desc=f"{experiment.name}: stages", leave=False)
    ]
    T, letter = (
        tokens.weight.size(-1),
        next(s.method for s in reversed(stages) if s.name == "both stages"),
    )
    return {
        "m": PROPOSED.m,
        "padded": {"side": "left", "tokens": T},
        "penalty": tokens.penalty,
        "steps": effort.steps,
        "prompts": len(experiment.sample[: effort.fitted]),
        "pairs": len(experiment.pairs),
        "readout": {
            name: {part: readout(experiment, make, prompts) for part, prompts in split.items()}
            for name, make in makers.items()
        },
        "penalty of stage 2": {
            name: stage_2(experiment, make, effort).penalty for name, make in makers.items()
        },
        "rows": rows,
        "hypothesis": hypothesis(experiment, makers, held, effort),
        "ranks": RANKS,
        "bins": quality.bins(experiment, quality.retrieve(experiment, "test"), [letter, NEIGHBOUR]),
        "storage": storage(experiment.model, mean(len(p.ids) for p in experiment.train), T),
    }


# --- Tables and claims ------------------------------------------------------------------------------------------------


def stages_in(record: dict[str, Any]) -> dict[str, Any]:
    """Return this part of each kind of prompts that has it."""
    return {name: r["stages"] for name, r in record["kinds"].items() if "stages" in r}


def stage_tables(record: dict[str, Any]) -> list[str | Table]:
    """Return KL of each stage on fitted and on held-out prompts, KL by similarity, rank and linearity."""
    kinds = stages_in(record)
    if not kinds:
        return []
    first = next(iter(kinds.values()))

    def cell(row: dict[str, Any]) -> str:
        parts = [
            f"{x['kl'][0]:.2f} ({x['low_kl'][0]:.0%})" for x in (row["fitted"], row["held out"])
        ]
        after = [
            x["following"] for x in (row["fitted"], row["held out"]) if x["following"] is not None
        ]
        return ", ".join(parts) + f"; {', '.join(f'{x:.2f}' for x in after)}" * bool(after)

    def relation(h: dict[str, Any]) -> str:
        medians = [
            x["median"][0] for x in (h["r2"]["fitted"], h["r2"]["held out"], h["r2_unchanged"])
        ]
        return "; ".join(
            (
                ", ".join(f"{x:.2f}" for x in medians),
                ", ".join(f"{h['spectrum']['held out'][i]:.0%}" for i in shares),
            )
        )

    by_bin = {
        name: {
            b["bin"].split(",")[0]: f"{b['kl']:.2f} ({b['good']:.0%} of {b['prompts']})"
            for b in s["bins"]
            if b["method"] != NEIGHBOUR.name
        }
        for name, s in kinds.items()
    }
    shares = [RANKS.index(r) for r in (8, 32)]
    return [
        f"The proposal stage by stage, {first['m']} summary tokens: KL in nats (and the share of prompts with at most "
        "0.05) on prompts that the stage was fitted on, then on held-out ones; after the semicolon the mean KL at the "
        "following positions. Stage 1 starts from the prompt itself, both stages from a paraphrase.",
        Table(
            ["", "", *kinds],
            [
                [row["stage"], row["method"], *(cell(s["rows"][i]) for s in kinds.values())]
                for i, row in enumerate(first["rows"])
            ],
            left=2,
        ),
        "As written (the last row of both stages), by the similarity of the prompt that retrieval finds:",
        Table(
            ["", *kinds],
            [
                [name, *(found.get(name, "") for found in by_bin.values())]
                for name in dict.fromkeys(b for found in by_bin.values() for b in found)
            ],
        ),
        "Stage 2's median R² over heads, on fitted pairs and on held-out ones, and of leaving the source as it is; "
        f"after the semicolon the share of the held-out pairs' variance in the first {RANKS[shares[0]]} and "
        f"{RANKS[shares[1]]} singular directions of fitted pairs:",
        Table(
            ["", *kinds],
            [
                [name, *(relation(s["hypothesis"][name]) for s in kinds.values())]
                for name in first["hypothesis"]
            ],
        ),
    ]


def stage_claims(record: dict[str, Any], title: str, theirs: str) -> list[Claim]:
    """Return the claims that the stages decide."""
    kinds = stages_in(record)
    if not kinds:
        return []
    first = next(iter(kinds.values()))
    rows = {
        name: {(row["stage"], row["method"]): row for row in s["rows"]} for name, s in kinds.items()
    }

    def share(stage: str, method: str) -> tuple[bool, str, bool]:
        """Does KL stay at 0.05 on 80% of held-out prompts; the figures of fitted and held-out ones; is it refuted."""
        found = {name: row[stage, method] for name, row in rows.items()}
        low = {
            name: wilson(
                round(x["held out"]["low_kl"][0] * x["held out"]["prompts"]),
                x["held out"]["prompts"],
            )
            for name, x in found.items()
        }
        fitted, held = (
            spread([x[part]["kl"][0] for x in found.values()]) for part in ("fitted", "held out")
        )
        text = f"{fitted} nats on prompts of the fit, {held} on others, where it is at most 0.05 on {over(low, '.0%')}"
        return all(x[1] >= 0.8 for x in low.values()), text, any(x[2] < 0.8 for x in low.values())

    def either(stage: str) -> tuple[bool, str, bool]:
        """The same for both maps of stage 1: one is enough to hold, both have to be refuted."""
        (a, by_tokens, no_a), (b, by_segments, no_b) = share(stage, TOKENS), share(stage, SEGMENTS)
        return (
            a or b,
            f"KL over the kinds by P: {by_tokens}; by our map over segments: {by_segments}",
            no_a and no_b,
        )

    def r2(name: str, way: str) -> tuple[float, float, float]:
        return kinds[name]["hypothesis"][way]["r2"]["held out"]["median"]

    mixed = (
        "P mixes the tokens of a head, the source's map also the 2d numbers of each; ours maps segments' means; "
        "the source has its threshold for the whole method"
    )
    stage1, stages, rule = (
        either("stage 1"),
        either("both stages"),
        share("positions", f"exact cache{THERE}"),
    )
    logits = {
        name: s["hypothesis"]["next-token logits"]["spectrum"]["held out"]
        for name, s in kinds.items()
    }
    ridges = {name: r2(name, "next-token logits") for name in kinds}
    unchanged = {
        name: s["hypothesis"]["next-token logits"]["r2_unchanged"]["median"]
        for name, s in kinds.items()
    }
    summaries = {way: {name: r2(name, way) for name in kinds} for way in (TOKENS, SEGMENTS, OWN)}
    few, many = (RANKS.index(r) for r in (8, 32))
    whole = {
        name: (
            row["both stages", TOKENS + THERE]["held out"]["kl"],
            row["baseline", LEARNED]["held out"]["kl"],
        )
        for name, row in rows.items()
    }
    lengths = ", ".join(f"{s['padded']['tokens']} ({name})" for name, s in kinds.items())
    here = conditions_of(
        {"conditions": record.get("stages") or record["conditions"]},
        f"stage 1 as a map P (m x T) over tokens for each head, m = {first['m']}; caches padded with zeros on the "
        f"{first['padded']['side']} to T = {lengths} tokens; {first['steps']} steps of Adam on up to "
        f"{max(s['prompts'] for s in kinds.values())} training prompts; stage 2 by ridge regression on up to "
        f"{max(s['pairs'] for s in kinds.values())} pairs; held-out prompts are of other families",
    )
    return under(
        title,
        theirs,
        here,
        judged(
            "Why a linear map can work",
            "Linearity is enough for warm-start: We need only a good initial readout "
            "for the first step(s)",
            stages[0],
            f"both stages, from a paraphrase. {stages[1]}",
            f"partly: {mixed}; last token at its true position",
            stages[2],
        ),
        judged(
            "Introduction",
            "the functional effect of a prefix on immediate next-token logits lies in a "
            "low-dimensional subspace",
            all(x[many] >= 0.9 for x in logits.values()),
            "share of their held-out variance in the first 8 and 32 singular directions of the fitted, over the "
            "kinds: "
            + ", ".join(spread([x[i] for x in logits.values()], ".0%") for i in (few, many)),
            'partly: "low" is read as 90% in 32 directions, less than half speaks against it (ours; 32 is the '
            "source's largest m)",
            all(x[many] < 0.5 for x in logits.values()),
        ),
        judged(
            "Introduction",
            "that is linearly related across prompts",
            all(x[1] > 0.5 for x in ridges.values()),
            f"held-out R² of next-token logits over the kinds: {over(ridges)} by a ridge from the similar prompt's "
            f"last hidden state; {over(unchanged)} by that prompt's own logits, unchanged",
            "partly: of a prompt and its paraphrase; more than half of the variance is our threshold",
            any(x[2] < 0.5 for x in ridges.values()),
        ),
    ) + under(
        "",
        "",
        here,
        judged(
            "",
            "Does stage 1 alone keep a prompt's first token within the proposal's threshold, KL of at most 0.05 "
            "on 80%?",
            stage1[0],
            f"a prompt from its own summary tokens. {stage1[1]}",
            "",
            stage1[2],
        ),
        judged(
            "",
            "Does the rule of positions 0 to m−1 alone keep it so, with the exact cache instead of summary "
            "tokens?",
            rule[0],
            f"nothing is fitted. KL over the kinds: {rule[1]}",
            "",
            rule[2],
        ),
        judged(
            "",
            "Is the proposal as written better than its baseline of learned summary tokens, the same for all "
            "prompts?",
            all(x[2] < base[1] for x, base in whole.values()),
            "KL in nats as written, and by that baseline, learned through the model: "
            + ", ".join(
                f"{name} {x[0]:.2f} and {base[0]:.2f}" for name, (x, base) in whole.items()
            ),
            "",
            all(x[1] > base[2] for x, base in whole.values()),
        ),
        judged(
            "",
            "Does stage 2 explain more than half of the variance of held-out summary tokens?",
            any(all(x[1] > 0.5 for x in way.values()) for way in summaries.values()),
            "R², median over heads, over the kinds: "
            + "; ".join(f"{name} {over(way)}" for name, way in summaries.items()),
            "",
            all(any(x[2] < 0.5 for x in way.values()) for way in summaries.values()),
        ),
    )


def over(values: dict[str, Sequence[float]], form: str = ".2f") -> str:
    """Return the median and the range over kinds of figures with intervals, and the outermost ends of these."""
    if len(values) == 1:
        return with_interval(*values.values(), form)
    middle, low, high = zip(*values.values(), strict=True)
    return f"{spread(middle, form)[:-1]}; intervals {min(low):{form}} to {max(high):{form}})"


def third_difference() -> float:
    """Return the third difference of stage 1's loss along a line of maps, over the loss: 0 if the loss is quadratic in
    the map, as a regression's is."""
    rng = torch.Generator().manual_seed(0)
    scores, values, out, P, step = (
        torch.randn(2, *shape, generator=rng, dtype=torch.float64)
        for shape in ((16, 12), (16, 12, 4), (16, 4), (3, 12), (3, 12))
    )
    loss = [
        float((read_tokens(scores, values, P + i * step) - out).square().mean()) for i in range(4)
    ]
    return abs(loss[3] - 3 * loss[2] + 3 * loss[1] - loss[0]) / loss[0]


def storage_line(record: dict[str, Any]) -> str:
    """Return the bytes of stage 2's maps, beside the caches that they are to save; empty if they weren't counted."""
    sizes = [s["storage"] for s in stages_in(record).values()]
    prompts = [size["stage 2"] / size["cache"] for size in sizes]
    return (
        (
            f"; stage 2's take {sizes[0]['stage 2'] / 1e6:.0f} MB, the caches of {min(prompts):.0f} to "
            f"{max(prompts):.0f} prompts"
        )
        if sizes
        else ""
    )
