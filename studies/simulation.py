"""The refresh source's simulation: 400 steps of a student whose logits are drawn at random, and when entropy and the
variance of passes with dropout would ask for a refresh.

`python3 -m studies.simulation` takes seconds. What each signal does in a phase follows from how its
logits are drawn, so this shows what the two signals are, not which one is better on a model:
`python3 -m studies.refreshing` measures that.

Source: "KV-Cache Refresh Methods for Long Generation", section "Simulation & Expected Results",
which has the phases and its thresholds, 8.5172 nats (12.2877 bits) and 0.000096, but not how its
logits are drawn. With a threshold of half of a signal's maximum, which is ours, entropy fires in the
drift, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from overfill import logit_variance
from support.cli import CommandLine
from support.statistics import entropy
from support.tables import table

VOCAB, PASSES = 5000, 8  # the source's highest entropy, 8.5172 nats, is that of 5,000 equal logits
EVERY = 16  # steps; the source's signals fire at multiples of 16
THRESHOLD = 0.5  # of a signal's largest value


class Phase(NamedTuple):
    """A part of the simulated text, and how its logits are drawn: the lead of one token, in nats, and
    the standard deviation between passes."""

    name: str
    steps: int
    lead: float
    spread: float


PHASES = (
    Phase("confident", 100, 15.0, 0.05),
    Phase("drift", 100, 4.0, 1.5),
    Phase("refreshed", 50, 15.0, 0.05),
    Phase("ambiguous", 100, 0.0, 0.05),
    Phase("confident", 50, 15.0, 0.05),
)


def draw_logits(phase: Phase, generator: torch.Generator) -> Tensor:
    """Return the logits (N, V) of N passes at a step of a phase."""
    logits = phase.spread * torch.randn(PASSES, VOCAB, generator=generator)
    logits[:, 0] += phase.lead
    return logits


def signals() -> tuple[list[str], Tensor]:
    """Return the phase of every step, and the signals (2, steps): the entropy in bits of the passes'
    mean distribution, and U(t)."""
    generator = torch.Generator().manual_seed(0)
    names, values = [], []
    for phase in PHASES:
        for _ in range(phase.steps):
            logits = draw_logits(phase, generator)
            mean_probability = logits.softmax(-1).mean(0)  # (V,)
            names.append(phase.name)
            values.append(torch.stack([entropy(mean_probability.log()), logit_variance(logits)]))
    return names, torch.stack(values, 1)


def firing_steps(signal: Tensor) -> tuple[float, list[int]]:
    """Return a signal's threshold, and the steps at which it is above: it is asked every EVERY steps."""
    threshold = THRESHOLD * float(signal.max())
    return threshold, [t for t in range(EVERY, len(signal), EVERY) if signal[t] > threshold]


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 -m studies.simulation")
    cli.prog = "python3 -m studies.simulation"
    with cli.parse(argv):
        names, values = signals()
        measured = [firing_steps(signal) for signal in values]
        rows = []
        for phase in dict.fromkeys(names):
            there = torch.tensor([name == phase for name in names])
            bits, variance = values[:, there].mean(1).tolist()
            fires = [f"{sum(names[t] == phase for t in steps)}" for _, steps in measured]
            rows.append([phase, f"{int(there.sum())}", f"{bits:.2f}", f"{variance:.4f}", *fires])
        header = ["phase", "steps", "entropy, bits", "U(t)", "entropy fires", "U(t) fires"]
        (entropy_limit, entropy_steps), (variance_limit, variance_steps) = measured
        print(f"""\
{len(names)} steps, {PASSES} passes each over {VOCAB:,} tokens; each signal is asked every {EVERY} steps

{table(header, rows)}

Entropy above {entropy_limit:.4f} bits: at {", ".join(map(str, entropy_steps)) or "no step"}.
U(t) above {variance_limit:.4f}: at {", ".join(map(str, variance_steps)) or "no step"}.

U(t) is silent in the ambiguous phase because the logits of its passes are drawn to agree there.
The source's own output has entropy fire at 320, above 12.2877 bits, and U(t) at 112, 144, 176 and 336, above 0.000096;
the thresholds here, half of each signal's maximum, are ours.""")


if __name__ == "__main__":
    main()
