"""The refresh source's simulation: 400 steps of a student whose logits are drawn at random, and when entropy and the
variance of passes with dropout would ask for a refresh.

`python3 -m studies.simulation` takes seconds. What each signal does in a phase follows from how its
logits are drawn, so this shows what the two signals are, not which one is better on a model:
`python3 -m studies.refreshing` measures that.

Source: "KV-Cache Refresh Methods for Long Generation", section "Simulation & Expected Results". It
prints the means of both signals in each phase, the steps at which they fire, and the thresholds, but
not how its logits are drawn. Ours are drawn so that the means are the source's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from overfill import logit_variance
from support.cli import CommandLine
from support.tables import table

VOCAB, PASSES = 5000, 8  # the source's highest entropy, 8.5172 nats, is that of 5,000 equal logits
EVERY, COOLDOWN = 16, 32  # steps; the source's signals fire at multiples of 16, at least 32 apart
ENTROPY_SHARE = 0.95  # of all steps are below the threshold; of the source's, only 8.5172 is known
VARIANCE_THRESHOLD = 0.000096  # the source's


class Phase(NamedTuple):
    """A part of the simulated text; how its logits are drawn: the lead of one token, in nats, and the
    standard deviation between passes; and what the source prints: the means of entropy and U(t), and
    the shares of steps at which they fire."""

    name: str
    steps: int
    lead: float
    spread: float
    source: tuple[str, ...]


CONFIDENT = Phase("confident", 100, 16.0, 0.0104, ("0.0096", "0.0001", "0.00", "0.00"))
PHASES = (
    CONFIDENT,
    Phase("drift", 100, 6.0, 0.0566, ("8.1466", "0.0028", "0.00", "0.03")),
    CONFIDENT._replace(name="refreshed", steps=50),
    Phase("ambiguous", 100, 0.0, 0.0104, ("8.5172", "0.0001", "0.01", "0.01")),
    CONFIDENT._replace(steps=50),
)


def signals() -> Tensor:
    """Return the signals (2, steps): the entropy in nats of the passes' mean distribution, and U(t)."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for phase in PHASES:
        for _ in range(phase.steps):
            logits = phase.spread * torch.randn(PASSES, VOCAB, generator=generator)
            logits[:, 0] += phase.lead
            mean_probability = logits.double().softmax(-1).mean(0)  # (V,)
            nats = -(mean_probability * mean_probability.log()).sum()
            values.append(torch.stack([nats, logit_variance(logits).double()]))
    return torch.stack(values, 1)


def firing_steps(signal: Tensor, threshold: float) -> list[int]:
    """Return the steps at which a signal, asked every EVERY steps, is above a threshold, COOLDOWN steps
    or more after the last of them."""
    steps = [-COOLDOWN]
    for t in range(EVERY, len(signal), EVERY):
        if signal[t] > threshold and t - steps[-1] >= COOLDOWN:
            steps.append(t)
    return steps[1:]


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.simulation")
    cli.prog = "python3 -m studies.simulation"
    with cli.parse(argv):
        names = [phase.name for phase in PHASES for _ in range(phase.steps)]
        values = signals()
        limits = (float(values[0].quantile(ENTROPY_SHARE)), VARIANCE_THRESHOLD)
        fired = [firing_steps(*both) for both in zip(values, limits, strict=True)]
        rows = []
        for phase in {phase.name: phase for phase in PHASES}.values():
            there = torch.tensor([name == phase.name for name in names])
            count = int(there.sum())
            means = [f"{mean:.4f}" for mean in values[:, there].mean(1).tolist()]
            shares = [sum(names[t] == phase.name for t in steps) / count for steps in fired]
            rows.append([phase.name, f"{count}", *means, *(f"{share:.2f}" for share in shares)])
            rows.append(["the source's", "", *phase.source])
        header = ["phase", "steps", "entropy, nats", "U(t)", "entropy fires", "U(t) fires"]
        entropy_steps, variance_steps = (", ".join(map(str, steps)) or "no step" for steps in fired)
        print(f"""\
{len(names)} steps, {PASSES} passes each over {VOCAB:,} tokens; each signal is asked every {EVERY} steps

{table(header, rows)}

fires: the share of steps at which it does, at most one in {COOLDOWN}

Entropy above {limits[0]:.4f} nats: at {entropy_steps}; the source's: at 320.
U(t) above {limits[1]:.6f}: at {variance_steps}; the source's: at 112, 144, 176 and 336.

The ambiguous phase are steps 251 to 350. U(t) is as low there as in the confident ones because the logits of its passes
are drawn to agree there, and not because a model's would.""")


if __name__ == "__main__":
    main()
