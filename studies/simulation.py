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

import torch
from torch import Tensor

from overfill import logit_variance
from support.cli import CommandLine
from support.statistics import entropy
from support.tables import table

EVERY = 16  # steps
# The source's: nats (all that is printed as 8.5172), and U(t).
THRESHOLDS = torch.tensor([8.51715, 0.000096])
# How the logits of each phase are drawn (the lead of one token, in nats, and the standard deviation
# between passes), and how many steps fire in the source's output: step 320 by entropy; 112, 144, 176
# and 336 by U(t).
PHASES = (
    ("confident", 100, 16.0, 0.01, 0, 0),
    ("drift", 100, 5.997, 0.0566, 0, 3),
    ("refreshed", 50, 16.0, 0.01, 0, 0),
    ("ambiguous", 100, 0.0, 0.01, 1, 1),
    ("confident", 50, 16.0, 0.01, 0, 0),
)


def draw_signals(lead: float, spread: float, generator: torch.Generator) -> Tensor:
    """Return the signals (2,) of a step: the entropy in nats of the passes' mean distribution, and
    U(t)."""
    # The source has 8 passes, and its highest entropy, 8.5172 nats, is that of 5,000 equal logits.
    logits = spread * torch.randn(8, 5000, generator=generator)
    logits[:, 0] += lead
    mean_logs = logits.softmax(-1).mean(0).log()  # (V,)
    nats = entropy(mean_logs) * math.log(2)
    return torch.stack([nats, logit_variance(logits)])


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.simulation").parse(argv):
        generator, start, rows = torch.Generator().manual_seed(0), 0, []
        for name, steps, lead, spread, *source_fires in PHASES:
            signals = torch.stack([draw_signals(lead, spread, generator) for _ in range(steps)])
            asked = signals[-start % EVERY :: EVERY]  # (n, 2)
            fires = (asked > THRESHOLDS).sum(0).tolist()
            means = [f"{mean:.4f}" for mean in signals.mean(0).tolist()]
            shares = [f"{count / steps:.2f}" for count in (*fires, *source_fires)]
            rows.append([name, f"{steps}", *means, *shares])
            start += steps
        header = [
            "phase",
            "steps",
            "entropy, nats",
            "U(t)",
            "by entropy",
            "by U(t)",
            "the source's: by entropy",
            "by U(t)",
        ]
        print(f"""\
{table(header, rows)}

8 passes a step, each over 5,000 tokens. Each signal is asked every 16 steps; the last four columns are
the shares of steps that fire. The thresholds are the source's: entropy 8.5172 nats, U(t) 0.000096. Its
own U(t) fires once in the ambiguous phase, at 336, where it is said to be silent. Here it is silent
there because the logits of the passes are drawn to agree.""")


if __name__ == "__main__":
    main()
