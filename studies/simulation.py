"""The refresh source's simulation: 400 steps of a student whose logits are drawn at random, and when entropy and the
variance of passes with dropout would ask for a refresh, beside the steps that the source prints.

`python3 -m studies.simulation` takes seconds. What each signal does in a phase follows from how its
logits are drawn, so this shows what the two signals are, not which one is better on a model:
`python3 -m studies.refreshing` measures that.

Source: "KV-Cache Refresh Methods for Long Generation", section "Simulation & Expected Results". It
prints the phases, each signal's mean in them, both thresholds, and the steps that fire, all multiples
of 16; it doesn't say how its logits are drawn. Here they are drawn so that the means are the source's.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from overfill import logit_variance
from support.cli import CommandLine
from support.statistics import entropy
from support.tables import table

VOCAB, PASSES = 5000, 8  # the source's highest entropy, 8.5172 nats, is that of 5,000 equal logits
EVERY = 16  # steps
THRESHOLDS = (8.51715, 0.000096)  # the source's: nats (all that is printed as 8.5172), and U(t)
SOURCE_FIRES = ((320,), (112, 144, 176, 336))


class Phase(NamedTuple):
    """A part of the simulated text, and how its logits are drawn: the lead of one token, in nats, and
    the standard deviation between passes."""

    name: str
    steps: int
    lead: float
    spread: float


PHASES = (
    Phase("confident", 100, 16.0, 0.01),
    Phase("drift", 100, 5.997, 0.0566),
    Phase("refreshed", 50, 16.0, 0.01),
    Phase("ambiguous", 100, 0.0, 0.01),
    Phase("confident", 50, 16.0, 0.01),
)


def signals() -> Tensor:
    """Return the signals (2, steps): the entropy in nats of the passes' mean distribution, and U(t)."""
    generator, values = torch.Generator().manual_seed(0), []
    for _, steps, lead, spread in PHASES:
        for _ in range(steps):
            logits = spread * torch.randn(PASSES, VOCAB, generator=generator)
            logits[:, 0] += lead
            mean_logs = logits.softmax(-1).mean(0).log()  # (V,)
            nats = entropy(mean_logs) * math.log(2)
            values.append(torch.stack([nats, logit_variance(logits)]))
    return torch.stack(values, 1)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.simulation")
    cli.prog = "python3 -m studies.simulation"
    with cli.parse(argv):
        values = signals()
        names = [phase.name for phase in PHASES for _ in range(phase.steps)]
        fires = [
            [t for t in range(EVERY, len(names), EVERY) if signal[t] > threshold]
            for signal, threshold in zip(values, THRESHOLDS, strict=True)
        ]
        rows = []
        for name in dict.fromkeys(names):
            there = [t for t, other in enumerate(names) if other == name]
            nats, variance = values[:, there].mean(1).tolist()
            shares = [
                f"{len({*there}.intersection(steps)) / len(there):.2f}"
                for steps in (*fires, *SOURCE_FIRES)
            ]
            rows.append([name, f"{len(there)}", f"{nats:.4f}", f"{variance:.4f}", *shares])
        header = ["phase", "steps", "entropy, nats", "U(t)", "by entropy", "by U(t)"]
        print(f"""\
{len(names)} steps, {PASSES} passes each over {VOCAB:,} tokens. Each signal is asked every {EVERY} steps;
the last four columns are the shares of steps that fire.

{table([*header, "the source's: by entropy", "by U(t)"], rows)}

The thresholds are the source's: entropy 8.5172 nats, U(t) 0.000096. Its own U(t) fires once in the
ambiguous phase, at 336, where it is said to be silent. Here it is silent there because the logits of
the passes are drawn to agree.""")


if __name__ == "__main__":
    main()
