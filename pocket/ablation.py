"""The parts of BCT, by short runs with and without each."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from load_gpt2_weights import load_model, read_tokenizer
from pocket import corpus
from pocket.evaluation import Windowed, answers, continuation_loss
from pocket.recipes import MEMORY, Distillation, distillation
from pocket.tokenizer import TOKENIZER
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
        self.c_gate = bounded.Conv1D(config.n_embd, 2 * H) if config.step or config.forget else None
        self.start = (
            nn.Parameter(torch.empty(H, M, 2 * D + 1)) if config.learned_start else None
        )  # MV_0, log mass

    def writes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, log_keep = super().writes(x)
        return w if self.config.step else w / w.sum(
            dim=-1, keepdim=True
        ), log_keep * self.config.forget

    def empty(self, x: Tensor) -> list[Tensor]:
        state = super().empty(x)
        if self.start is None:
            return state
        D = self.config.head_dim
        k, v, log_mass = self.start.float().split([D, D, 1], dim=-1)
        keys, values, mass, *recent = state
        return [
            keys + k * log_mass.exp(),
            values + v * log_mass.exp(),
            mass + log_mass.exp(),
            *recent,
        ]


class AblatedBlock(bounded.MemoryBlock):
    """A BCT's block with an AblatedMemory."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        self.memory = AblatedMemory(config)


class AblatedBCT(bounded.BCT):
    """A BCT with the options of an AblationConfig."""

    config_class, block_class = AblationConfig, AblatedBlock


class Ablation(Distillation):
    """Fine-tuning of a model with the bounded memory of an AblationConfig."""

    model_class = AblatedBCT


SLOTS = {"slots": 32, "recent": 0}
ABLATION = (
    # what it is, options of distillation(); longer: times the steps
    ("the paper's rule", SLOTS | {"rule": "sum", "clusters": False}),
    ("+ a step size for each token", SLOTS | {"rule": "sum", "forget": False, "clusters": False}),
    ("a slot is the mean, and counts by its mass", SLOTS | {"forget": False, "clusters": False}),
    ("+ addresses by k-means of keys", SLOTS | {"forget": False}),
    ("+ forgetting", SLOTS),
    ("+ the last 8 tokens kept exactly, 24 slots", MEMORY),
    ("+ learned start of the slots", MEMORY | {"learned_start": True}),
    ("sliding window of equal bytes, fine-tuned the same", {"window": 36}),
    ("24 slots and the last 8 tokens, four times as long", MEMORY | {"longer": 4}),
    ("sliding window of equal bytes, four times as long", {"window": 36, "longer": 4}),
)


def ablation(steps: int, run: Path, path: Path) -> None:
    """Train every row of ABLATION for a few steps from the teacher and write their figures on the split "valid"."""
    tokenizer = read_tokenizer(TOKENIZER)
    plain = load_model("pocket", model_class=bounded.GPT)
    rows = [
        ("full attention", 0, plain),
        ("sliding window of 36 tokens, as it is", 0, Windowed(plain, 36)),
        ("4 sinks + 32 tokens, as it is", 0, Windowed(plain, 32, 4)),
    ]
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("valid", 300)]
    results = []
    for name, row_steps, model in [
        *rows,
        *((name, steps * o.get("longer", 1), o) for name, o in ABLATION),
    ]:
        if isinstance(model, dict):
            ablated = {
                key: value
                for key, value in model.items()
                if key in ("step", "forget", "learned_start")
            }
            options = {
                key: value for key, value in model.items() if key not in {*ablated, "longer"}
            }
            recipe = distillation("pocket", plain.config, row_steps, **options)
            if ablated:
                recipe = Ablation(
                    **vars(recipe) | {"config": AblationConfig(**vars(recipe.config) | ablated)}
                )
            model, _ = train(recipe, run / re.sub(r"\W+", "-", name).strip("-"))
            model = Windowed(model, recipe.window) if recipe.window else model
        nats, share = answers(model, tokenizer, corpus.recall_questions("valid", 300))
        perplexity = math.exp(continuation_loss(model, tokenizer, documents)[0])
        results.append(
            {
                "name": name,
                "steps": row_steps,
                "perplexity": perplexity,
                "recall_nats": nats,
                "recall_share": share,
            }
        )
        print(json.dumps(results[-1]))
    write_json(path, results)
