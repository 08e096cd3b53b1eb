"""Everything that decides what a training run computes, and the recipes of the models that come along."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_baseline import GPT, GPTConfig
from llama_kv_cache import Llama, LlamaConfig
from load_gpt2_weights import load_tokenizer, read_tokenizer
from pocket.tokenizer import TOKENIZER, VOCABULARY
from support.statistics import kl


def mixed_precision(device: torch.device) -> torch.autocast:
    """Compute products in bfloat16 within, where the device does so natively: a CPU that only
    emulates it takes ten times as long as with float32."""
    native = device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.autocast(device.type, torch.bfloat16, enabled=native)


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
    long: tuple[int, int, int] = (0, 0, 0)  # documents, lists, shuffled of every fifth step

    @property
    def rows(self) -> int:
        return self.documents + self.lists + self.shuffled


@dataclass(frozen=True)
class Batch:
    """The reading of one step, of B rows."""

    rows: Tensor  # (B, T + 1), tokens
    weights: Tensor  # (B, T), of each token but the first in the loss; their sum is 1
    before: Tensor  # (B, any), the end of the text that a memory has read before
    segments: Tensor  # (B, T), where the segment of each token begins

    def share(self, rank: int, n: int, device: torch.device) -> Batch:
        """Return the part of the process `rank` of n; n times the weights, since gradients are averaged over them."""
        rows, weights, before, segments = (x[rank::n].to(device) for x in vars(self).values())
        return Batch(rows, weights * n, before, segments)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes."""

    kind, model_class = "teacher", GPT  # of model
    init = None  # the model that it learns from
    begin = None  # the model that it begins as, if that is another
    text = None  # a file to train on instead of the corpus

    config: GPTConfig
    phases: tuple[Phase, ...]
    documents: int
    seed: int = 0
    weight_decay: float = 0.1
    warmup: int = 100

    @property
    def name(self) -> str:
        return self.kind

    @property
    def tokenizer(self) -> tiktoken.Encoding:
        return load_tokenizer(self.init) if self.init else read_tokenizer(TOKENIZER)

    def losses(self, model: nn.Module, teacher: None, batch: Batch) -> Tensor:
        """Return the loss (B, T) in nats of every next token."""
        with mixed_precision(batch.rows.device):
            logits = model(batch.rows[:, :-1])
        nats = F.cross_entropy(
            logits.float().flatten(0, 1), batch.rows[:, 1:].flatten(), reduction="none"
        )
        return nats.view_as(batch.weights)


@dataclass(frozen=True)
class Uptraining(Recipe):
    """A trained GPT-2 goes on as a Llama: it learns what it predicted before, and to get there by
    the same way, block by block."""

    kind, model_class = "llama", Llama
    init: str = "pocket"

    def losses(self, model: nn.Module, teacher: GPT, batch: Batch) -> Tensor:
        """Return KL(teacher || model) (B, T) in nats, and the mean over all blocks but the last of
        the squared distance between their streams, in units of the teacher's mean square. Positions
        are not in a Llama's stream, and the mean of a stream is of no account to a GPT-2."""
        rows = batch.rows[:, :-1]
        with mixed_precision(rows.device):
            expected, theirs = streams(teacher, rows)
            got, ours = streams(model, rows)
        positions = teacher.wpe.weight[: rows.size(1)] - teacher.wpe.weight.mean(0)
        apart = []
        for target, stream in zip(theirs[:-1], ours[:-1], strict=True):
            target, stream = centred(target.float() - positions), centred(stream.float())
            apart.append((target - stream).square().mean(-1) / target.square().mean())
        return kl(expected, got) + torch.stack(apart).mean(0)


def centred(x: Tensor) -> Tensor:
    """Return x (..., C) less its mean over C."""
    return x - x.mean(-1, keepdim=True)


def streams(model: nn.Module, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of rows, and what each block has added up to."""
    found: list[Tensor] = []
    blocks = getattr(model, "module", model).h  # under torchrun it is wrapped
    hooks = [block.register_forward_hook(lambda *call: found.append(call[-1])) for block in blocks]
    logits = model(rows)
    for hook in hooks:
        hook.remove()
    return logits, found


@dataclass(frozen=True)
class Distillation(Recipe):
    """Fine-tuning of a trained model with a bounded memory on what it predicted itself before it was changed.

    config is that of the new model. Every second step reads on after another text, so that the memory
    isn't empty and the positions are those of a long text.
    """

    kind = "bct"
    init: str = "pocket"  # the model that it begins as and learns from
    text: str | None = None  # a file to train on instead of the corpus
    clusters: bool = True  # W_wq begins as W_k, and the write addresses as k-means of keys; else both are small noise
    window: int = 0  # instead of slots: a sliding window of so many tokens
    new_rate: float = 5.0  # what the learning rate of the memory's own parameters is multiplied by

    @property
    def slots(self) -> int:
        return self.config.slots if isinstance(self.config, bounded.BCTConfig) else 0

    @property
    def model_class(self) -> type[nn.Module]:
        return bounded.BCT if self.slots else bounded.GPT

    @property
    def name(self) -> str:
        return "bct-sum" if getattr(self.config, "rule", None) == "sum" else self.kind

    def losses(self, model: nn.Module, teacher: GPT, batch: Batch) -> Tensor:
        """Return KL(teacher || model) (B, T) in nats. A model with slots has first read the texts before the rows,
        without a gradient; the teacher never has."""
        cache, rows = None, batch.rows[:, :-1]
        if self.slots:
            cache = bounded.BoundedMemory()
        elif self.window:
            cache = bounded.SlidingWindowCache(self.window)
        with mixed_precision(rows.device):
            expected = teacher(rows)
            if self.slots and batch.before.size(1):
                with torch.no_grad():
                    model(batch.before, cache)
            got = model(rows, cache)
        return kl(expected, got)


@dataclass(frozen=True)
class Pruning(Recipe):
    """Distillation into a narrower model of the same layers, heads and head size, so that the teacher's cache fits it.

    What the model reads of its own text and what of the teacher's cache: "alone", its own; "prompt", the teacher's of
    the first part of the text, its own of the rest; "segments", the teacher's up to the start of a segment and its own
    from there on, for segments as long as between two refreshes, from 4 tokens to all.
    """

    kind = "student"
    init: str = "pocket"
    mode: str = "segments"
    text: str | None = None
    begin: str | None = None  # the student that it goes on from, instead of the pruned teacher

    @property
    def name(self) -> str:
        kind = "dropout" if self.config.dropout else self.mode
        return self.kind if kind == KINDS[0] else f"{self.kind}-{kind}"

    def losses(self, model: nn.Module, teacher: gpt_kv_cache.GPT, batch: Batch) -> Tensor:
        """Return KL(teacher || student) (B, T) in nats, with segments that begin where the batch has them."""
        cache, rows = gpt_kv_cache.KVCache(), batch.rows[:, :-1]
        with mixed_precision(rows.device):
            expected = teacher(rows, cache)
            got = model(rows, cache, start=batch.segments)
        return kl(expected, got)


STUDENT_WIDTH = 0.55  # of the teacher's hidden size and MLP
DROPOUT = 0.1
KINDS = ("segments", "alone", "prompt", "dropout")  # of students, by what they read
TEACHER = Recipe(
    config=GPTConfig(vocab_size=VOCABULARY, n_ctx=1280, n_layer=6, n_head=6, n_embd=192),
    phases=(  # three courses, each of which ends at a low learning rate, with a model that can be used
        Phase(steps=500, documents=0, lists=8, context=128, lr=5e-4),
        Phase(steps=2400, documents=9, lists=1, context=256, lr=1e-3),
        Phase(
            steps=7600,
            documents=3,
            lists=1,
            context=512,
            lr=1e-3,
            shuffled=1,
            answers=8.0,
            long=(1, 0, 1),
        ),
        Phase(
            steps=6000,
            documents=6,
            lists=1,
            context=512,
            lr=9e-4,
            shuffled=3,
            answers=8.0,
            long=(2, 1, 1),
        ),
        Phase(
            steps=5000,
            documents=7,
            lists=2,
            context=512,
            lr=7e-4,
            shuffled=2,
            answers=8.0,
            long=(2, 1, 1),
        ),
        Phase(steps=2800, documents=4, lists=1, context=1280, lr=7e-4, shuffled=1, answers=8.0),
    ),
    documents=120_000,
)
MEMORY = {"slots": 24, "recent": 8}
PAPER = {"rule": "sum", "slots": 32, "recent": 0}  # the BCT of its paper
STEPS = {
    "bct": 4_000,
    "ablation": 110,
    "student": 3_000,
    "student-dropout": 600,
    "llama": 1_600,
}


SHORT = 512  # tokens of a row in the first two thirds of a fine-tuning, which are faster


def phases_of(
    config: GPTConfig,
    steps: int,
    lr: float,
    answers: float,
    text: str | None = None,
    lists: int = 0,
) -> tuple[Phase, ...]:
    """The phases of a model that begins as another: of a text; or of documents, two thirds of the steps in short rows,
    the last third in long ones of unshuffled documents."""
    if (
        text
    ):  # has no answers; and what other models predict of shuffled vocabulary is nothing to learn
        return (Phase(steps=steps, documents=8, lists=0, context=config.n_ctx, lr=lr),)
    long = steps // 3 if config.n_ctx > SHORT else 0
    first = Phase(
        steps=steps - long,
        documents=3,
        lists=lists,
        context=min(SHORT, config.n_ctx),
        lr=lr,
        shuffled=1,
        answers=answers,
    )
    last = replace(first, steps=long, documents=2, shuffled=0, context=config.n_ctx)
    return (first, last) if long else (first,)


def distillation(init: str, config: GPTConfig, steps: int, **options: object) -> Distillation:
    """The recipe that gives a trained model of this geometry a bounded memory."""
    memory = {name: options.pop(name) for name in ("slots", "recent", "rule") if name in options}
    phases = phases_of(config, steps, 6e-4, 8.0, options.get("text"))
    new = (
        bounded.BCTConfig(**vars(config) | memory) if memory else bounded.GPTConfig(**vars(config))
    )
    return Distillation(new, phases, documents=60_000, weight_decay=0.0, init=init, **options)


def uptraining(config: GPTConfig, steps: int) -> Uptraining:
    """The recipe that makes a Llama of the teacher, whose geometry is this: of as many parameters
    but for a few hundred, with a third of the heads of keys and values."""
    sizes = {name: value for name, value in vars(config).items() if name != "dropout"}
    sizes |= {"n_kv_head": max(1, config.n_head // 3), "n_inner": 7 * config.n_inner // 8}
    phases = phases_of(config, steps, 1e-3, 8.0, lists=1)
    return Uptraining(LlamaConfig(**sizes), phases, documents=20_000, weight_decay=0.0, warmup=50)


def pruning(
    init: str, config: GPTConfig, steps: int, kind: str, text: str | None = None
) -> Pruning:
    """The recipe that gives a trained model of this geometry a student of one of KINDS; pocket's with dropout goes on
    from the one without, since on a CPU dropout takes four times as long."""
    begin = "pocket-student" if (init, kind) == ("pocket", "dropout") else None
    phases = phases_of(config, steps, 4e-4 if begin else 1e-3, 4.0, text)
    n_embd = max(8, 8 * round(STUDENT_WIDTH * config.n_embd / 8))
    n_inner = max(8, 8 * round(STUDENT_WIDTH * config.n_inner / 8))
    mode, dropout = ("segments", DROPOUT) if kind == "dropout" else (kind, 0.0)
    narrow = replace(
        config, n_embd=n_embd, n_inner=n_inner, head_dim=config.head_dim, dropout=dropout
    )
    return Pruning(
        narrow,
        phases,
        documents=60_000,
        weight_decay=0.0,
        init=init,
        mode=mode,
        text=text,
        begin=begin,
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Consecutive phases of the same lr are a course: a linear warm-up and, with documents, a cosine to a tenth. An
    uptraining warms up, goes on as it is, and falls to nothing in its last phase."""
    if isinstance(recipe, Uptraining):
        left = sum(phase.steps for phase in recipe.phases) - step
        last = recipe.phases[-1]
        return last.lr * min(1.0, (step + 1) / recipe.warmup, left / last.steps)
    for (lr, reads), phases in groupby(
        recipe.phases, key=lambda phase: (phase.lr, phase.documents > 0)
    ):
        steps = sum(phase.steps for phase in phases)
        if step < steps:
            fall = 0.55 + 0.45 * math.cos(math.pi * step / steps) if reads else 1.0
            return lr * min(1.0, (step + 1) / recipe.warmup) * fall
        step -= steps
    raise ValueError(f"step {step} is past the recipe's end")


def phase_at(recipe: Recipe, step: int) -> tuple[Phase, float]:
    """Return the phase that step belongs to, with the rows that it reads, and how far into it the step is, 0 to 1."""
    for phase in recipe.phases:
        if step < phase.steps:
            progress = step / phase.steps
            if any(phase.long) and step % 5 == 4:
                documents, lists, shuffled = phase.long
                phase = replace(
                    phase,
                    documents=documents,
                    lists=lists,
                    shuffled=shuffled,
                    context=recipe.config.n_ctx,
                )
            return phase, progress
        step -= phase.steps
    raise ValueError(f"step {step} is past the recipe's end")


def size_of(recipe: Recipe) -> tuple[int, int]:
    """Return a recipe's steps and how many tokens they read."""
    steps = sum(phase.steps for phase in recipe.phases)
    phases = [phase_at(recipe, step)[0] for step in range(steps)]
    return steps, sum(phase.rows * phase.context for phase in phases)
