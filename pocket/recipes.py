"""Everything that decides what a training run computes, and the recipes of pocket's models."""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, GPTConfig, KVCache
from llama_kv_cache import Llama, LlamaConfig
from pocket.tokenizer import VOCABULARY
from support.statistics import kl


@dataclass(frozen=True)
class Phase:
    """A stretch of training: for how many steps, on how many rows of which kind, each of `context` tokens."""

    steps: int
    documents: int  # rows of documents in the whole batch, all processes together
    lists: int  # rows of lists of random tokens, each list twice
    context: int
    lr: float  # after the warm-up
    shuffled: int = 0  # rows of documents in which about half of the vocabulary has changed places
    answers: float = 1.0  # weight of an answer's token in unshuffled rows; all others weigh 1
    long: tuple[int, int, int] = (0, 0, 0)  # rows of documents, lists, shuffled in every fifth step

    @property
    def rows(self) -> int:
        return self.documents + self.lists + self.shuffled


class Batch(NamedTuple):
    """What one step reads: B rows."""

    rows: Tensor  # (B, T + 1), tokens
    weights: Tensor  # (B, T), of each token but the first in the loss; their sum is 1
    before: Tensor  # (B, any), the end of the text that a memory has read before
    segments: Tensor  # (B, T), where the segment of each token begins


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes."""

    kind, model_class = "teacher", GPT  # of the model
    init = None  # the model that it learns from
    begin = None  # the model that it begins as, if that is another

    config: GPTConfig
    phases: tuple[Phase, ...]
    documents: int
    weight_decay: float = 0.1
    warmup: int = 100

    def losses(self, model: nn.Module, teacher: None, batch: Batch) -> Tensor:
        """Return the loss (B, T) in nats of every next token."""
        logits = model(batch.rows[:, :-1])
        nats = F.cross_entropy(
            logits.float().flatten(0, 1), batch.rows[:, 1:].flatten(), reduction="none"
        )
        return nats.view_as(batch.weights)


@dataclass(frozen=True)
class LlamaRecipe(Recipe):
    """A recipe for a Llama."""

    kind, model_class = "llama", Llama


@dataclass(frozen=True)
class Change(Recipe):
    """Training of a model that begins as another, `init`, and learns to predict what that
    predicts."""

    documents: int = 60_000
    weight_decay: float = 0.0
    init: str = "pocket"

    def predict(self, model: nn.Module, teacher: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits (B, T, V) of the teacher and of the model."""
        rows = batch.rows[:, :-1]
        return teacher(rows), model(rows)

    def losses(self, model: nn.Module, teacher: GPT, batch: Batch) -> Tensor:
        """Return KL(teacher || model) (B, T) in nats."""
        return kl(*self.predict(model, teacher, batch))


@dataclass(frozen=True)
class Distillation(Change):
    """Fine-tuning of a trained model with a bounded memory. Every second step reads on after another text, so that the
    memory isn't empty and the positions are those of a long text."""

    kind, model_class = "bct", bounded.BCT
    new_rate = 5.0  # what the learning rate of the memory's own parameters is multiplied by
    clusters = True  # write addresses begin as k-means of keys, and W_wq as W_k

    def predict(self, model: nn.Module, teacher: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits (B, T, V) of the teacher and of the model. The model has first read the
        texts before the rows, without a gradient; the teacher never has."""
        cache, rows = bounded.BoundedMemory(), batch.rows[:, :-1]
        if batch.before.size(1):
            with torch.no_grad():
                model(batch.before, cache)
        return teacher(rows), model(rows, cache)


class SegmentCache(KVCache):
    """The cache that a student reads in training. Each token sees its teacher's keys and values up
    to the start of its segment, start (B, T), and the student's own from there on, as if the
    student had taken over the teacher's cache there."""

    def __init__(self, teacher: KVCache, start: Tensor) -> None:
        super().__init__()
        self.teacher = teacher
        pos = torch.arange(start.size(1), device=start.device)
        before = start[..., None] > pos  # (B, T, T), the teacher's tokens that each token sees
        own = ~before & (pos <= pos[:, None])
        self.mask = torch.cat([before, own], -1)[:, None]  # (B, 1, T, 2 T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values (B, H, 2 T, D) of teacher and student, and the mask."""
        teacher_k, teacher_v = self.teacher.layers[layer].to(k)
        return torch.cat([teacher_k, k], 2), torch.cat([teacher_v, v], 2), self.mask


@dataclass(frozen=True)
class Pruning(Change):
    """Distillation into a narrower model of the same layers, heads and head size, so that the teacher's cache fits it.

    mode says which keys and values the model reads: "alone", only its own; "prompt", the teacher's
    for the first part of the text, its own for the rest; "segments", the teacher's up to the start
    of a segment and its own from there on. A segment is as long as the text between two refreshes:
    from 4 tokens to all of them.
    """

    kind = "student"
    mode: str = "segments"
    begin: str | None = None  # the student that it goes on from, instead of the pruned teacher

    def predict(self, model: nn.Module, teacher: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits (B, T, V) of the teacher and of the model, with the batch's
        segments."""
        cache, rows = KVCache(), batch.rows[:, :-1]
        expected = teacher(rows, cache)
        return expected, model(rows, SegmentCache(cache, batch.segments))


STUDENT_WIDTH = 0.55  # a student's hidden size and MLP, as a share of the teacher's
SHORT_CONTEXT = 512  # tokens of a row in the first two thirds of a fine-tuning, which are faster
SIZES = {"vocab_size": VOCABULARY, "n_ctx": 1280, "n_layer": 6, "n_head": 6, "n_embd": 192}
TEACHER = Recipe(
    GPTConfig(**SIZES),
    # Three courses, each of which ends at a low learning rate, with a model that can be used.
    (  # steps, documents, lists, context, lr
        Phase(500, 0, 8, 128, 5e-4),
        Phase(2400, 9, 1, 256, 1e-3),
        Phase(7600, 3, 1, 512, 1e-3, shuffled=1, answers=8.0, long=(1, 0, 1)),
        Phase(6000, 6, 1, 512, 9e-4, shuffled=3, answers=8.0, long=(2, 1, 1)),
        Phase(5000, 7, 2, 512, 7e-4, shuffled=2, answers=8.0, long=(2, 1, 1)),
        Phase(2800, 4, 1, 1280, 7e-4, shuffled=1, answers=8.0),
    ),
    documents=120_000,
)
LLAMA = LlamaRecipe(  # as many parameters, but for a few hundred; a third as many key-value heads
    LlamaConfig(**SIZES, n_kv_head=2, n_inner=672),
    TEACHER.phases,
    TEACHER.documents,
)
MEMORY = {"slots": 24, "recent": 8}


def phases_of(steps: int, lr: float, answers: float) -> tuple[Phase, ...]:
    """Return the phases of a model that begins as pocket: the first two thirds of the steps read
    short rows, some of them shuffled, and the last third whole contexts."""
    long_steps = steps // 3
    return (
        Phase(steps - long_steps, 3, 0, SHORT_CONTEXT, lr, shuffled=1, answers=answers),
        Phase(long_steps, 2, 0, TEACHER.config.n_ctx, lr, answers=answers),
    )


def with_memory(**memory: Any) -> bounded.BCTConfig:
    """Return the geometry of pocket with a bounded memory."""
    return bounded.BCTConfig(**vars(TEACHER.config), **memory)


def narrowed(config: GPTConfig, dropout: float = 0.0) -> GPTConfig:
    """Return the geometry of a student for a teacher of this one."""
    return replace(
        config,
        n_embd=8 * round(STUDENT_WIDTH * config.n_embd / 8),
        n_inner=8 * round(STUDENT_WIDTH * config.n_inner / 8),
        dropout=dropout,
    )


BCT_PHASES = phases_of(4_000, 6e-4, 8.0)
STUDENT = Pruning(narrowed(TEACHER.config), phases_of(3_000, 1e-3, 4.0))
RECIPES = {  # by the name of the folder in pocket
    "teacher": TEACHER,
    "llama": LLAMA,
    "bct": Distillation(with_memory(**MEMORY), BCT_PHASES),
    # BCT as in its paper; this one isn't shipped
    "bct-sum": Distillation(with_memory(rule="sum", slots=32, recent=0), BCT_PHASES),
    "student": STUDENT,
    "student-alone": replace(STUDENT, mode="alone"),
    "student-prompt": replace(STUDENT, mode="prompt"),
    # On a CPU dropout takes four times as long: this one goes on from the one without.
    "student-dropout": Pruning(
        narrowed(TEACHER.config, dropout=0.1), phases_of(600, 4e-4, 4.0), begin="pocket-student"
    ),
}


class Step(NamedTuple):
    """What a step of training reads, and at which learning rate."""

    phase: Phase  # the phase that it belongs to, with the rows of this step
    progress: float  # how far into its phase it is, 0 to 1
    lr: float


def schedule(recipe: Recipe) -> list[Step]:
    """Return all steps of a recipe."""
    return steps_of(recipe.phases, recipe.warmup, recipe.config.n_ctx)


@cache
def steps_of(phases: tuple[Phase, ...], warmup: int, n_ctx: int) -> list[Step]:
    """Return all steps of some phases; those with long rows read n_ctx tokens in each.

    Consecutive phases of the same lr are a course: a linear warm-up and, with documents, a cosine to a tenth.
    """
    steps = []
    courses = groupby(phases, key=lambda phase: (phase.lr, phase.documents > 0))
    for (lr, has_documents), phases_of_course in courses:
        course = []
        for phase in phases_of_course:
            course += [(phase, step_of_phase) for step_of_phase in range(phase.steps)]
        for step, (phase, step_of_phase) in enumerate(course):
            decay = 1.0
            if has_documents:
                decay = 0.55 + 0.45 * math.cos(math.pi * step / len(course))
            step_lr = lr * min(1.0, (step + 1) / warmup) * decay
            progress = step_of_phase / phase.steps
            if any(phase.long) and step_of_phase % 5 == 4:
                documents, lists, shuffled = phase.long
                phase = replace(
                    phase,
                    documents=documents,
                    lists=lists,
                    shuffled=shuffled,
                    context=n_ctx,
                )
            steps.append(Step(phase, progress, step_lr))
    return steps
