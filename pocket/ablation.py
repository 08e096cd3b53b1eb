"""The parts of BCT, by short runs with and without each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from pocket.evaluation import Windowed, answers, perplexity
from pocket.recipes import MEMORY, Batch, Distillation, phases_of
from pocket.training import train
from support.files import write_json


@dataclass(frozen=True)
class AblationConfig(bounded.BCTConfig):
    """Geometry of a BCT with some of the parts that the rule "mean" adds, or with slots that begin with something in
    them."""

    step: bool = True  # a learned step size of each write
    forget: bool = True  # a learned forgetting at each write
    learned_start: bool = False  # slots that begin with something in them


class AblatedMemory(bounded.WriteMemory):
    """BCT's attention with the options of an AblationConfig."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        H, M, D = config.n_head, config.slots, config.head_dim
        self.c_gate = None
        if config.step or config.forget:
            self.c_gate = bounded.Conv1D(config.n_embd, 2 * H)
        if config.learned_start:
            self.start = nn.Parameter(torch.empty(H, M, 2 * D + 1))  # MV_0, log mass + 6

    def writes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, log_keep = super().writes(x)
        if not self.config.step:
            w = w / w.sum(dim=-1, keepdim=True)
        return w, log_keep * self.config.forget

    def empty(self, x: Tensor) -> list[Tensor]:
        state = super().empty(x)
        if self.config.learned_start:
            D = self.config.head_dim
            k, v, log_mass = self.start.float().split([D, D, 1], dim=-1)
            mass = (log_mass - 6).exp()  # so that it hardly counts as training begins
            for part, begins in zip(state[:3], (k * mass, v * mass, mass), strict=True):
                part += begins
        return state


class AblatedBlock(bounded.MemoryBlock):
    """A BCT's block with an AblatedMemory."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        self.memory = AblatedMemory(config)


class AblatedBCT(bounded.BCT):
    """A BCT with the options of an AblationConfig."""

    config_class, block_class = AblationConfig, AblatedBlock


@dataclass(frozen=True)
class Ablation(Distillation):
    """Fine-tuning of a model with the bounded memory of an AblationConfig."""

    model_class = AblatedBCT
    clusters: bool = True


class WindowTuning(Distillation):
    """Fine-tuning of a model that sees a sliding window of its text."""

    model_class, clusters = bounded.GPT, False

    def read(self, model: nn.Module, teacher: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = batch.rows[:, :-1]
        return teacher(rows), Windowed(model, WINDOW)(rows)


STEPS = 110
WINDOW = 36  # tokens that take as many bytes as the slots
SLOTS = {"slots": 32, "recent": 0}
SUM = SLOTS | {"rule": "sum", "forget": False, "clusters": False}
ABLATION: list[tuple[str, int, dict[str, Any]]] = [  # name, times as many steps, options of a BCT
    ("the paper's rule", 1, SUM | {"step": False}),
    ("+ a step size for each token", 1, SUM),
    ("a slot is the mean, and counts by its mass", 1, SUM | {"rule": "mean"}),
    ("+ addresses by k-means of keys", 1, SLOTS | {"forget": False}),
    ("+ forgetting", 1, SLOTS),
    ("+ the last 8 tokens kept exactly, 24 slots", 1, MEMORY),
    ("+ learned start of the slots", 1, MEMORY | {"learned_start": True}),
    ("sliding window of equal bytes, fine-tuned the same", 1, {}),
    ("24 slots and the last 8 tokens, four times as long", 4, MEMORY),
    ("sliding window of equal bytes, four times as long", 4, {}),
]


def trained(config: bounded.GPTConfig, steps: int, run: Path, **memory: Any) -> nn.Module:
    """Return the teacher, whose geometry is config, trained on with a memory, or with a window if there is none."""
    phases = phases_of(config, steps, 6e-4, 8.0)
    if not memory:
        model, _ = train(WindowTuning(config, phases), run)
        return Windowed(model, WINDOW)
    clusters = memory.pop("clusters", True)
    config = AblationConfig(**vars(config), **memory)
    return train(Ablation(config, phases, clusters=clusters), run)[0]


def ablation(run: Path, path: Path) -> None:
    """Train every row of ABLATION for a few steps from the teacher and write their figures on the split "valid"."""
    tokenizer = load_tokenizer("pocket")
    plain = load_model("pocket", model_class=bounded.GPT)
    results = []

    def measure(name: str, steps: int, model: nn.Module) -> None:
        nats, share = answers(model, tokenizer, corpus.recall_questions("valid", 300))
        row = {"name": name, "steps": steps, "perplexity": perplexity(model, tokenizer, "valid")}
        results.append(row | {"recall_nats": nats, "recall_share": share})
        print(json.dumps(results[-1]))

    measure("full attention", 0, plain)
    measure("sliding window of 36 tokens, as it is", 0, Windowed(plain, WINDOW))
    measure("4 sinks + 32 tokens, as it is", 0, Windowed(plain, WINDOW - 4, 4))
    for name, times, memory in ABLATION:
        folder = run / re.sub(r"\W+", "-", name).strip("-")
        measure(name, times * STEPS, trained(plain.config, times * STEPS, folder, **memory))
    write_json(path, results)
