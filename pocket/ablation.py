"""The parts of BCT, by short runs with and without each."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torch import nn

import gpt_bounded_cache as bounded
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import perplexity, score_answers, windowed
from pocket.recipes import MEMORY, TEACHER, Change, Distillation, phases_of, with_memory
from pocket.training import train
from support.files import write_json

STEPS = 110
WINDOW = 36  # tokens that take as many bytes as the slots


class UnforgettingBCT(bounded.BCT):
    """A BCT that never forgets: every write keeps all of the slots, and training can't change that,
    since sigmoid(1e4) is 1 and has no gradient."""

    def init_weights(self) -> None:
        super().init_weights()
        for block in self.h:
            nn.init.constant_(block.memory.c_gate.bias[self.config.n_head :], 1e4)


@dataclass(frozen=True)
class Ablation(Distillation):
    """Fine-tuning of a model with some of the parts of BCT's memory."""

    model_class: type[nn.Module] = bounded.BCT
    clusters: bool = True


class WindowTuning(Change):
    """Fine-tuning of a model that sees a sliding window of its text."""

    kind, model_class, clusters = "window", windowed(WINDOW), False


SHORT, LONG = phases_of(STEPS, 6e-4, 8.0), phases_of(4 * STEPS, 6e-4, 8.0)
SLOTS = with_memory(slots=32, recent=0)
OURS = with_memory(**MEMORY)
ABLATION = {
    "the paper's rule": Ablation(replace(SLOTS, rule="sum"), SHORT, clusters=False),
    "a slot is the mean, with a mass; a token has a step size": Ablation(
        SLOTS, SHORT, model_class=UnforgettingBCT, clusters=False
    ),
    "+ addresses by k-means of keys": Ablation(SLOTS, SHORT, model_class=UnforgettingBCT),
    "+ forgetting": Ablation(SLOTS, SHORT),
    "+ the last 8 tokens kept exactly, 24 slots": Ablation(OURS, SHORT),
    "sliding window of equal bytes, fine-tuned the same": WindowTuning(TEACHER.config, SHORT),
    "24 slots and the last 8 tokens, four times as long": Ablation(OURS, LONG),
    "sliding window of equal bytes, four times as long": WindowTuning(TEACHER.config, LONG),
}


def ablation(run_folder: Path, figures_path: Path) -> None:
    """Train every row of ABLATION for a few steps from the teacher and write their figures on the split "valid"."""
    tokenizer = load_tokenizer("pocket")
    results = []

    def measure(name: str, steps: int, model: nn.Module) -> None:
        nats, right = score_answers(model, tokenizer, corpus.recall_questions("valid", 300))
        results.append(
            {
                "name": name,
                "steps": steps,
                "perplexity": perplexity(model, tokenizer, "valid"),
                "recall_nats": nats,
                "recall_share": fmean(right),
            }
        )

    measure("full attention", 0, load_model("pocket"))
    for name, recipe in ABLATION.items():
        model, losses = train(recipe, run_folder / re.sub(r"\W+", "-", name).strip("-"))
        measure(name, len(losses), model)
    write_json(figures_path, results)
