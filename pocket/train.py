"""Train the small models that the scripts run on when no other is named.

  python pocket/train.py tokenizer                           a byte-level BPE of the corpus
  python pocket/train.py teacher                             the model itself: an interrupted run goes on
  torchrun --nproc-per-node 2 pocket/train.py teacher        the same run, data-parallel
  python pocket/train.py bct                                 the teacher with BCT's bounded memory, fine-tuned
  torchrun --nproc-per-node 8 pocket/train.py bct --init gpt2 --text FILE     the same for real GPT-2 weights
  python pocket/train.py rotary                              the teacher with rotary positions, fine-tuned
  python pocket/train.py student                             a narrower model that decodes on the teacher's cache
  torchrun --nproc-per-node 8 pocket/train.py student --init gpt2-medium --text FILE --out FOLDER
  python pocket/train.py ablation                            which parts of BCT do what, by short runs of each

The finding behind the recipe: a GPT-2 this small, with random learned positions, forms no induction head within
ten million tokens. It writes fluent text whose names have nothing to do with the prompt, so that nothing could be
learned from its KV cache. Hence start_as_copier(); hence rows of random lists: when training went on with documents
only, the model unlearned copying (14 nats per token of a repeated random list, after 3 million tokens of documents);
and hence rows of shuffled vocabulary, in which only the prompt helps: with answers weighing more, they took the share
of early facts that are answered right late from 17% (step 5,300) to 48% (7,900) and 54% (9,900).
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # run as a file, from any folder

import gpt_bounded_cache as bounded
import gpt_kv_cache
from gpt_baseline import GPT, GPTConfig, generate
from load_gpt2_weights import find_file, load_model, load_tokenizer, read_tokenizer
from pocket import coherence, corpus, rope
from support.cli import CommandLine, whole_number
from support.files import write_atomically

TOKENIZER = HERE / "teacher" / "tokenizer.tiktoken"
VOCABULARY = 1536  # 256 bytes, 1279 merges, <|endoftext|>


@dataclass(frozen=True)
class Phase:
    """A stretch of training: for how many steps, on how many rows of which kind, each of `context` tokens."""

    steps: int
    documents: int  # rows of documents in the whole batch, all processes together
    lists: int  # rows of lists of random tokens, each list twice
    context: int
    lr: float  # after the warm-up
    shuffled: int = 0  # rows of documents in which about half of the vocabulary has changed places
    answers: float = 1.0  # what a token of an answer weighs in the loss of unshuffled rows; all others weigh 1
    long: tuple[int, int, int] = (0, 0, 0)  # every fifth step instead: documents, lists, shuffled, n_ctx tokens each

    @property
    def rows(self) -> int:
        return self.documents + self.lists + self.shuffled


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes."""

    config: GPTConfig
    phases: tuple[Phase, ...]
    documents: int
    seed: int = 0
    weight_decay: float = 0.1
    warmup: int = 100


@dataclass(frozen=True)
class Distillation(Recipe):
    """Fine-tuning of a trained model with a bounded memory, or with rotary positions, on what it predicted itself
    before it was changed.

    config is that of the new model. With a memory every second step reads on after another text, so that the memory
    isn't empty and the positions are those of a long text.
    """

    init: str = "pocket"  # the model that it begins as and learns from
    text: str | None = None  # a file to train on instead of the corpus
    clusters: bool = True  # W_wq begins as W_k, and the write addresses as k-means of keys; else both are small noise
    window: int = 0  # instead of slots: a sliding window of so many tokens
    new_rate: float = 5.0  # what the learning rate of the memory's own parameters is multiplied by

    @property
    def slots(self) -> int:
        return self.config.slots if isinstance(self.config, bounded.BCTConfig) else 0


@dataclass(frozen=True)
class Pruning(Recipe):
    """Distillation into a narrower model of the same layers, heads and head size, so that the teacher's cache fits it.

    What the model reads of its own text and what of the teacher's cache: "alone", its own; "prompt", the teacher's of
    the first part of the text, its own of the rest; "segments", the teacher's up to the start of a segment and its own
    from there on, for segments as long as between two refreshes, from 4 tokens to all.
    """

    init: str = "pocket"
    mode: str = "segments"
    text: str | None = None
    begin: str | None = None  # the student that it goes on from, instead of the pruned teacher


STUDENT_WIDTH = 0.55  # of the teacher's hidden size and MLP
DROPOUT = 0.1
KINDS = ("segments", "alone", "prompt", "dropout")  # of students, by what they read; the last is trained with dropout
TEACHER = Recipe(
    config=GPTConfig(vocab_size=VOCABULARY, n_ctx=1280, n_layer=6, n_head=6, n_embd=192),
    phases=(  # three courses, each of which ends at a low learning rate, with a model that can be used
        Phase(steps=500, documents=0, lists=8, context=128, lr=5e-4),
        Phase(steps=2400, documents=9, lists=1, context=256, lr=1e-3),
        Phase(steps=7600, documents=3, lists=1, context=512, lr=1e-3, shuffled=1, answers=8.0, long=(1, 0, 1)),
        Phase(steps=6000, documents=6, lists=1, context=512, lr=9e-4, shuffled=3, answers=8.0, long=(2, 1, 1)),
        Phase(steps=9000, documents=7, lists=1, context=512, lr=7e-4, shuffled=2, answers=8.0, long=(2, 1, 1)),
    ),
    documents=120_000,
)
MEMORY = {"slots": 24, "recent": 8}
STEPS = {"bct": 4_000, "ablation": 110, "rotary": 2_500, "student": 3_000, "student-dropout": 600}


def distillation(init: str, config: GPTConfig, steps: int, **options: object) -> Distillation:
    """The recipe that gives a trained model of this geometry a bounded memory."""
    memory = {name: options.pop(name) for name in vars(AblationConfig()) if name in options}
    phase = Phase(steps=steps, documents=3, lists=0, context=config.n_ctx, lr=6e-4, shuffled=1, answers=8.0)
    if options.get("text"):  # has no answers; and a vocabulary that is shuffled is nothing to predict for other models
        phase = replace(phase, documents=8, shuffled=0, answers=1.0)
    kind = AblationConfig if {"step", "forget", "learned_start"} & {*memory} else bounded.BCTConfig
    new = kind(**vars(config) | memory) if memory else bounded.GPTConfig(**vars(config))
    return Distillation(new, (phase,), documents=60_000, weight_decay=0.0, init=init, **options)


def rotary_recipe(init: str, config: GPTConfig, steps: int) -> Distillation:
    """The recipe that gives a trained model of this geometry rotary instead of learned positions."""
    phase = Phase(steps=steps, documents=3, lists=1, context=config.n_ctx, lr=1e-3, shuffled=1, answers=8.0)
    return Distillation(rope.GPTConfig(**vars(config)), (phase,), documents=60_000, weight_decay=0.0, init=init)


def pruning(init: str, config: GPTConfig, steps: int, kind: str, text: str | None = None) -> Pruning:
    """The recipe that gives a trained model of this geometry a student of one of KINDS; pocket's with dropout goes on
    from the one without, since on a CPU dropout takes four times as long."""
    begin = "pocket-student" if (init, kind) == ("pocket", "dropout") else None
    lr = 4e-4 if begin else 1e-3
    phase = Phase(steps=steps, documents=3, lists=0, context=config.n_ctx, lr=lr, shuffled=1, answers=4.0)
    if text:
        phase = replace(phase, documents=8, shuffled=0, answers=1.0)
    n_embd, n_inner = (max(8, 8 * round(STUDENT_WIDTH * width / 8)) for width in (config.n_embd, config.n_inner))
    mode, dropout = ("segments", DROPOUT) if kind == "dropout" else (kind, 0.0)
    narrow = replace(config, n_embd=n_embd, n_inner=n_inner, head_dim=config.head_dim, dropout=dropout)
    return Pruning(narrow, (phase,), documents=60_000, weight_decay=0.0, init=init, mode=mode, text=text,
                   begin=begin)  # fmt: skip


# --- Tokenizer ------------------------------------------------------------------------------------------------------


def train_tokenizer(path: Path, documents: int) -> None:
    """Train a byte-level BPE on the corpus and write it as tiktoken ranks: base64 of the bytes, rank.

    Needs the package tokenizers, which comes with transformers. The 256 bytes come first, so any UTF-8 text
    has an encoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((d.text for d in corpus.documents("train", documents)), trainer)

    ranks = {bytes([b]): b for b in range(256)}
    byte_of = {char: byte for byte, char in enumerate(byte_characters())}
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        ranks[bytes(byte_of[c] for c in left + right)] = len(ranks)
    if len(ranks) != VOCABULARY - 1:
        raise ValueError(f"the corpus gave {len(ranks)} tokens, {VOCABULARY - 1} are needed")
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    write_atomically(path, lambda file: file.write_bytes(b"".join(lines)))


def byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's BPE files write each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


# --- Model ----------------------------------------------------------------------------------------------------------


def sinusoids(n_positions: int, width: int) -> tuple[Tensor, Tensor]:
    """Return frequencies (width / 2,) and [sin | cos] of every position (n_positions, width)."""
    frequency = 1000.0 ** -torch.linspace(0, 1, width // 2)
    angle = torch.arange(n_positions)[:, None] * frequency
    return frequency, torch.cat([angle.sin(), angle.cos()], dim=1)


@torch.no_grad()
def start_as_copier(model: GPT) -> None:
    """Let training start from an induction circuit: "A B C ... A B" makes C likely.

    The width is split into position | content | one back | two back. wpe holds sinusoids in `position`. Heads 0 and 1
    of layer 0 look one and two positions back (their queries are their keys, turned by as much) and copy a projection
    of the content there into `one back` and `two back`. Head 0 of layer 1 looks for tokens that follow the present
    one and the one before it, and adds their content to its own; all other heads from layer 1 on begin by adding, a
    little, what they look at. These are starting values: all of it stays trainable.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    C, D, HD = model.config.n_embd, model.config.head_dim, model.config.n_head * model.config.head_dim
    P, n = C // 3 // 2 * 2, D // 2
    position, content, back = slice(0, P), slice(P, C - 2 * n), (slice(C - 2 * n, C - n), slice(C - n, C))
    project = torch.randn(C - 2 * n - P, n) / math.sqrt(C - 2 * n - P)

    frequency, table = sinusoids(model.config.n_ctx, P)
    model.wte.weight *= 5  # large, so that a step of training changes it little; ln_f keeps the logits as they were
    model.ln_f.weight /= 5
    model.wpe.weight *= 0.1
    model.wpe.weight[:, position] = 0.25 * table
    model.wte.weight[:, position] *= 0.1
    for part in back:
        model.wte.weight[:, part] *= 0.1

    attention = model.h[0].attn
    i = torch.arange(n)
    sin, cos = i, i + P // 2  # of the n highest frequencies: they tell neighbours apart
    for head in (0, 1):
        query, key, value = (part * HD + head * D for part in range(3))
        for part in (query, key, value):
            attention.c_attn.weight[:, part : part + D] = 0
        turn = (head + 1) * frequency[:n]
        attention.c_attn.weight[sin, key + i] = 2.5
        attention.c_attn.weight[cos, key + n + i] = 2.5
        attention.c_attn.weight[sin, query + i] = 2.5 * turn.cos()  # sin(p - t) = sin p cos t - cos p sin t
        attention.c_attn.weight[cos, query + i] = -2.5 * turn.sin()
        attention.c_attn.weight[cos, query + n + i] = 2.5 * turn.cos()  # cos(p - t) = cos p cos t + sin p sin t
        attention.c_attn.weight[sin, query + n + i] = 2.5 * turn.sin()
        attention.c_attn.weight[content, value : value + n] = project
        attention.c_proj.weight[head * D : (head + 1) * D] = 0
        attention.c_proj.weight[head * D : head * D + n, back[head]] = 0.5 * torch.eye(n)

    for block in model.h[1:]:  # what a head writes is what it reads, up to a projection
        block.attn.c_proj.weight.copy_(block.attn.c_attn.weight[:, 2 * HD :].t())
    attention = model.h[1].attn
    query, key, value = 0, HD, 2 * HD
    for part in (query, key, value):
        attention.c_attn.weight[:, part : part + D] = 0
    attention.c_attn.weight[content, query : query + n] = 4 * project
    attention.c_attn.weight[back[0], key : key + n] = 4 * torch.eye(n)
    attention.c_attn.weight[back[0], query + n : query + D] = 2 * torch.eye(n)
    attention.c_attn.weight[back[1], key + n : key + D] = 2 * torch.eye(n)
    attention.c_attn.weight[content, value : value + n] = project
    attention.c_proj.weight[:D] = 0
    attention.c_proj.weight[:n, content] = 1.5 * project.t()


@torch.no_grad()
def start_looking_back(model: rope.GPT) -> None:
    """Let heads 0 and 1 of layer 0 look one and two positions back, which they did by learned positions before: their
    keys are all the same, and their queries are the same vector, turned back by as much."""
    D, HD = model.config.head_dim, model.config.n_head * model.config.head_dim
    attention = model.h[0].attn
    towards = torch.where(torch.arange(D, device=attention.c_attn.bias.device) % (D // 2) < D // 4, 6.0, 0.0)
    for head in (0, 1):  # the fast planes alone: they tell neighbours apart
        for part in (0, HD):
            attention.c_attn.weight[:, part + head * D :][:, :D] = 0
        attention.c_attn.bias[HD + head * D :][:D] = towards
        back = torch.tensor([-1 - head], device=towards.device)
        attention.c_attn.bias[head * D :][:D] = rope.rotate(towards[None], back)[0]


@torch.no_grad()
def k_means(points: Tensor, k: int, generator: torch.Generator, rounds: int = 15) -> Tensor:
    """Return k centres (k, D) of points (N, D) by Lloyd's algorithm; a centre that loses its points becomes another."""
    centres = points[torch.randperm(len(points), generator=generator)[:k]]
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(dim=1)
        for i in range(k):
            mine = points[nearest == i]
            other = points[torch.randint(len(points), (1,), generator=generator)]
            centres[i] = (mine if len(mine) else other).mean(dim=0)
    return centres


@dataclass(frozen=True)
class AblationConfig(bounded.BCTConfig):
    """Geometry of a BCT without some of its parts, or with slots that begin with something in them."""

    step: bool = True  # a learned step size of each write
    forget: bool = True  # a learned forgetting at each write
    learned_start: bool = False  # slots that begin with something in them


class AblatedMemory(bounded.WriteMemory):
    """BCT's attention with the options of an AblationConfig."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        H, M, D = config.n_head, config.slots, config.head_dim
        self.start = nn.Parameter(torch.empty(H, M, 2 * D + 1)) if config.learned_start else None  # MV_0, log mass

    def writes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, log_keep = super().writes(x)
        return w if self.config.step else w / w.sum(dim=-1, keepdim=True), log_keep * self.config.forget

    def empty(self, x: Tensor) -> list[Tensor]:
        keys, values, mass, *recent = super().empty(x)
        if self.start is not None:
            D = self.config.head_dim
            k, v, log_mass = self.start.float().split([D, D, 1], dim=-1)
            keys, values, mass = keys + k * log_mass.exp(), values + v * log_mass.exp(), mass + log_mass.exp()
        return [keys, values, mass, *recent]


class AblatedBlock(bounded.MemoryBlock):
    """A BCT's block with an AblatedMemory."""

    def __init__(self, config: AblationConfig) -> None:
        super().__init__(config)
        self.memory = AblatedMemory(config)


class AblatedBCT(bounded.BCT):
    """A BCT with the options of an AblationConfig."""

    config_class, block_class = AblationConfig, AblatedBlock


@torch.no_grad()
def start_memory(model: bounded.BCT, ids: Tensor, generator: torch.Generator) -> None:
    """Let writing begin with sense: a token is written to the slots whose address is nearest to its key.

    W_wq begins as W_k, and each head's addresses as the centres, by k-means, of the keys that the plain model computes
    of the texts ids (B, T). Small random addresses would make all slots the same mean.
    """
    plain = GPT(GPTConfig(**{name: getattr(model.config, name) for name in vars(GPTConfig())})).to(ids.device).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    inputs: list[Tensor] = []
    for block in plain.h:
        block.ln_1.register_forward_hook(lambda module, args, output: inputs.append(output))
    plain(ids)
    width = model.config.n_head * model.config.head_dim
    for block, x in zip(model.h, inputs, strict=True):
        block.memory.c_query.weight.copy_(block.attn.c_attn.weight[:, width : 2 * width])
        block.memory.c_query.bias.copy_(block.attn.c_attn.bias[width : 2 * width])
        keys = block.attn.project(x)[1].transpose(0, 1).flatten(1, 2).cpu()  # (H, B * T, D)
        keys = keys[:, torch.randperm(keys.size(1), generator=generator)[:3000]]
        if model.config.slots > keys.size(1):
            raise ValueError(f"{model.config.slots:,} slots are more than the {keys.size(1):,} keys to begin as")
        centres = torch.stack([k_means(head, model.config.slots, generator) for head in keys])
        block.memory.addresses.copy_(centres - keys.mean(dim=1, keepdim=True))
        if getattr(block.memory, "start", None) is not None:
            block.memory.start[..., -1] = -6  # the logarithm of a mass that hardly counts


class Student(gpt_kv_cache.GPT):
    """A narrower model in training, on its own cache or a teacher's."""

    def forward(self, ids: Tensor, cache: gpt_kv_cache.KVCache | None = None, last_only: bool = False,
                start: Tensor | None = None) -> Tensor:  # fmt: skip
        """Return logits (B, T, V); with start (B, T), where the segment of each token begins, as if there the cache
        of ids that a teacher has written had been taken over, and the student's own went on from it."""
        if start is None:
            return super().forward(ids, cache, last_only)
        at = torch.arange(ids.size(1), device=ids.device)
        before = start[..., None] > at  # (B, T, T), the teacher's tokens that each token sees
        own = ~before & (at <= at[:, None])
        mask = torch.cat([before, own], -1)[:, None]  # (B, 1, T, 2 T)
        x = self.drop(self.wte(ids) + self.wpe(at))
        for block, kv in zip(self.h, cache.layers, strict=True):
            q, k, v = block.attn.project(block.ln_1(x))
            k, v = (torch.cat([read.to(written), written], 2) for read, written in zip(kv, (k, v), strict=True))
            x = x + block.drop(block.attn(q, k, v, mask))
            x = x + block.drop(block.mlp(block.ln_2(x)))
        return self.head(x)


@torch.no_grad()
def pruned(teacher: gpt_kv_cache.GPT, config: GPTConfig, ids: Tensor) -> Student:
    """Return a narrower model: of the teacher's hidden dimensions and, layer by layer, MLP neurons, those that are most
    active (mean absolute value) on texts ids (B, T)."""
    hidden: list[Tensor] = []
    neurons: list[Tensor] = []
    hooks = [norm.register_forward_hook(lambda _, args, output: hidden.append(output.abs().mean((0, 1))))
             for block in teacher.h for norm in (block.ln_1, block.ln_2)]  # fmt: skip
    hooks += [block.mlp.c_proj.register_forward_pre_hook(lambda _, args: neurons.append(args[0].abs().mean((0, 1))))
              for block in teacher.h]  # fmt: skip
    teacher(ids)
    for hook in hooks:
        hook.remove()
    wide = sum(hidden).topk(config.n_embd).indices.sort().values
    inner = [active.topk(config.n_inner).indices.sort().values for active in neurons]
    kept = {}
    for name, p in teacher.named_parameters():
        if name.endswith(("c_attn.weight", "c_fc.weight")):  # read the residual stream
            p = p[wide]
        elif name.endswith("mlp.c_proj.weight"):
            p = p[inner[int(name.split(".")[1])]]
        if ".c_fc." in name:
            p = p[..., inner[int(name.split(".")[1])]]
        elif ".c_attn." not in name:  # all others write to the stream, or are as wide
            p = p[..., wide]
        kept[name] = p
    student = Student(config).to(ids.device)
    student.load_state_dict(kept)
    return student


def segment_starts(mode: str, rows: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return where the segment of each token begins (rows, T), and which tokens count in the loss (rows, T): those that
    the student reads itself."""
    at = torch.arange(T).expand(rows, T)
    if mode == "alone":
        return torch.zeros_like(at), torch.ones(rows, T)
    first = torch.randint(1, T, (rows, 1), generator=generator)
    prompt = torch.where(at < first, 0, first)
    if mode == "prompt":
        return prompt, (at >= first).float()
    kinds = max(1, math.ceil(math.log2(T / 4)) + 1)
    stride = 4 * 2 ** torch.randint(0, kinds, (rows, 1), generator=generator)  # 4, 8 ... at least T
    offset = first % stride
    start = torch.where(at < offset, 0, offset + (at - offset) // stride * stride)
    return torch.where(stride >= T, prompt, start), torch.ones(rows, T)


def start(recipe: Recipe, device: torch.device) -> tuple[nn.Module, nn.Module | None]:
    """Return the model as training begins, and the teacher that it learns from, if any."""
    torch.manual_seed(recipe.seed)
    if isinstance(recipe, Pruning):
        teacher = load_model(recipe.init, model_class=gpt_kv_cache.GPT, device=device).requires_grad_(False)
        generator = torch.Generator().manual_seed(recipe.seed)
        sample = replace(recipe.phases[0], documents=16, shuffled=0)
        rows = text_of(replace(recipe, documents=2_000)).batch(sample, generator)[0]
        model = pruned(teacher, recipe.config, rows[:, :-1].to(device))
        if recipe.begin:
            model.load_state_dict(load_model(recipe.begin, model_class=gpt_kv_cache.GPT).state_dict())
        return model.train(), teacher
    if not isinstance(recipe, Distillation):
        model = GPT(recipe.config)
        start_as_copier(model)
        return model.to(device).train(), None
    teacher = load_model(recipe.init, model_class=GPT, device=device).requires_grad_(False)
    if isinstance(recipe.config, rope.GPTConfig):
        model = rope.GPT(recipe.config).to(device)
        model.load_state_dict({**teacher.state_dict(), "wpe.weight": model.wpe.weight})
        start_looking_back(model)
    else:
        kinds = {AblationConfig: AblatedBCT, bounded.BCTConfig: bounded.BCT, bounded.GPTConfig: bounded.GPT}
        model = kinds[type(recipe.config)](recipe.config).to(device)
        model.load_state_dict(teacher.state_dict(), strict=False)
    return model.train(), teacher


# --- Batches: a pure function of (recipe, step), so that a run can be resumed and shared out ------------------------


def lists_batch(phase: Phase, vocabulary: int, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows (lists, context + 1) of random lists, each twice, longer ones as progress goes from 0 to 1,
    and weights (lists, context) that are 1 where the next token is known, that is, the second time.

    Every other list has a separator after each of its items of one to three tokens, as lists in a text do.
    """
    longest = 4 + int(progress * (phase.context // 2 - 4))

    def draw(high: int, n: int = 1) -> list[int]:
        return torch.randint(high, (n,), generator=generator).tolist()

    rows, masks = [], []
    for _ in range(phase.lists):
        row, known = [], []
        while len(row) < phase.context + 1:
            words = draw(vocabulary, 2 + draw(longest - 1)[0])
            if draw(2)[0]:
                separator, plain, words = draw(vocabulary), words, []
                while plain:
                    size = 1 + draw(3)[0]
                    words, plain = words + plain[:size] + separator, plain[size:]
            row += words + words
            known += [False] * (len(words) + 1) + [True] * (len(words) - 1)
        rows.append(row[: phase.context + 1])
        masks.append(known[1 : phase.context + 1])
    tokens = torch.tensor(rows, dtype=torch.long).view(phase.lists, phase.context + 1)
    return tokens, torch.tensor(masks, dtype=torch.float).view(phase.lists, phase.context)


class Corpus:
    """The tokens of the training documents, <|endoftext|> after each; where each document starts; what is an answer."""

    def __init__(self, documents: int, seed: int, tokenizer: tiktoken.Encoding | None = None,
                 file: str | None = None) -> None:  # fmt: skip
        tokenizer = tokenizer or read_tokenizer(TOKENIZER)
        self.vocabulary = tokenizer.n_vocab
        tokens: list[int] = []
        starts: list[int] = []
        is_answer: list[bool] = []
        texts: Iterable[str] = (document.text for document in corpus.documents("train", documents, seed))
        if file is not None:
            try:
                text = Path(file).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not a UTF-8 text: {error}") from error
            texts = [text for text in text.split("<|endoftext|>") if text.strip()]
            documents = len(texts)
        for text in tqdm(texts, total=documents, desc="corpus", disable=rank() > 0):
            starts.append(len(tokens))
            for line in text.splitlines(keepends=True):  # no token of the corpus spans two lines
                question, answer, rest = line.partition("Answer:")
                head, tail = tokenizer.encode_ordinary(question + answer), tokenizer.encode_ordinary(rest)
                tokens += head + tail
                is_answer += [False] * len(head) + [bool(answer)] * len(tail)
            tokens.append(tokenizer.eot_token)
            is_answer.append(False)
        self.tokens, self.starts, self.is_answer = torch.tensor(tokens), torch.tensor(starts), torch.tensor(is_answer)

    def batch(self, phase: Phase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows (documents + shuffled, context + 1), each beginning with a document, as prompts do, and what
        each token but the first weighs in the loss (documents + shuffled, context).

        In a shuffled row about half of the vocabulary has changed places, differently in every row: what was learned of
        names and things is of no use there, only what the row itself says.
        """
        first = self.starts[self.starts < len(self.tokens) - phase.context]
        if not len(first):
            raise ValueError(f"the text has {len(self.tokens)} tokens, and a row of {phase.context} doesn't fit in it")
        start = first[torch.randint(len(first), (phase.documents + phase.shuffled,), generator=generator)]
        places = start[:, None] + torch.arange(phase.context + 1)
        rows, weights = self.tokens[places], torch.where(self.is_answer[places[:, 1:]], phase.answers, 1.0)
        weights[phase.documents :] = 1.0
        for row in rows[phase.documents :]:
            moved = torch.rand(self.vocabulary, generator=generator).lt(0.5).nonzero()[:, 0]
            place = torch.arange(self.vocabulary)
            place[moved] = moved[torch.randperm(len(moved), generator=generator)]
            row.copy_(place[row])
        return rows, weights


# --- Training -------------------------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def learning_rate(recipe: Recipe, step: int) -> float:
    """Consecutive phases of the same lr are a course: a linear warm-up and, with documents, a cosine to a tenth."""
    for (lr, reads), phases in groupby(recipe.phases, key=lambda phase: (phase.lr, phase.documents > 0)):
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
                phase = replace(phase, documents=documents, lists=lists, shuffled=shuffled, context=recipe.config.n_ctx)
            return phase, progress
        step -= phase.steps
    raise ValueError(f"step {step} is past the recipe's end")


def size_of(recipe: Recipe) -> tuple[int, int]:
    """Return a recipe's steps and how many tokens they read."""
    steps = sum(phase.steps for phase in recipe.phases)
    return steps, sum(phase.rows * phase.context for phase, _ in (phase_at(recipe, step) for step in range(steps)))


def loss_at(recipe: Recipe, step: int, model: nn.Module, text: Corpus, device: torch.device,
            teacher: nn.Module | None = None) -> Tensor:  # fmt: skip
    """Return this process's part of the step's mean loss (nats per token), from its share of the rows: of the next
    token or, where there is a teacher, of what it predicts (the divergence from it)."""
    phase, progress = phase_at(recipe, step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    longest = 1.0 if phase.documents else progress
    rows, weights = lists_batch(phase, recipe.config.vocab_size, longest, generator)
    if phase.documents:
        rows, weights = (torch.cat(pair) for pair in zip(text.batch(phase, generator), (rows, weights), strict=True))
    segments = torch.zeros_like(weights, dtype=torch.long)
    if isinstance(recipe, Pruning):
        segments, counts = segment_starts(recipe.mode, *weights.shape, generator)
        weights = weights * counts
    weights = weights * world_size() / weights.sum()  # gradients are averaged over processes: the mean over all rows
    mine = slice(rank(), None, world_size())
    before, rows, weights, segments = (x[mine].to(device) for x in (rows.roll(1, dims=0), rows, weights, segments))
    if isinstance(recipe, Pruning):
        return (student_divergence(model, teacher, rows[:, :-1], segments) * weights).sum()
    if teacher is not None:
        length = int(torch.randint(1, recipe.phases[0].context, (1,), generator=generator)) if step % 2 else 0
        nats = divergence(recipe, model, teacher, rows[:, :-1], before[:, -1 - length : -1])
        return (nats * weights).sum()
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(rows[:, :-1])
    nats = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return (nats * weights.flatten()).sum()


def student_divergence(model: nn.Module, teacher: gpt_kv_cache.GPT, rows: Tensor, start: Tensor) -> Tensor:
    """Return KL(teacher || student) in nats at every token of rows (B, T), with segments that begin at start (B, T)."""
    cache = gpt_kv_cache.KVCache()
    with torch.autocast(rows.device.type, torch.bfloat16):
        expected = teacher(rows, cache)
        got = model(rows, cache, start=start)
    return kl(expected, got)


def kl(expected: Tensor, got: Tensor) -> Tensor:
    """Return KL(expected || got) in nats of two tensors of logits (..., V)."""
    expected, got = expected.float().log_softmax(-1), got.float().log_softmax(-1)
    return F.kl_div(got, expected, log_target=True, reduction="none").sum(-1)


def divergence(recipe: Distillation, model: nn.Module, teacher: nn.Module, rows: Tensor, before: Tensor) -> Tensor:
    """Return KL(teacher || model) in nats at every token of rows (B, T). A model with slots has first read other texts,
    before (B, any), without a gradient; the teacher never has."""
    cache = None
    if recipe.slots or recipe.window:
        cache = bounded.BoundedMemory() if recipe.slots else bounded.SlidingWindowCache(recipe.window)
    with torch.autocast(rows.device.type, torch.bfloat16):
        expected = teacher(rows)
        if recipe.slots and before.size(1):
            with torch.no_grad():
                model(before, cache)
        got = model(rows, cache)
    return kl(expected, got)


def text_of(recipe: Recipe) -> Corpus:
    """Return the text that a recipe trains on, in the tokens of its model."""
    if not isinstance(recipe, Distillation | Pruning):
        return Corpus(recipe.documents, recipe.seed)
    return Corpus(recipe.documents, recipe.seed, load_tokenizer(recipe.init), recipe.text)


def train(recipe: Recipe, run: Path, stop_at: int | None = None) -> tuple[GPT, list[float]]:
    """Train by the recipe and return the model and the loss of every step (nats per token).

    The state is kept in run/last.pt, and a run that finds one goes on from there. Raises ValueError if it
    belongs to another recipe. stop_at ends early, after so many steps.
    """
    if "RANK" in os.environ and not dist.is_initialized():  # under torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    steps, _ = size_of(recipe)
    if (rows := min(phase_at(recipe, step)[0].rows for step in range(steps))) < world_size():
        raise ValueError(f"{world_size()} processes are too many for batches of {rows} rows")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    model, teacher = start(recipe, device)
    text = text_of(recipe)
    if isinstance(recipe, Distillation) and recipe.slots and recipe.clusters:
        generator = torch.Generator().manual_seed(recipe.seed)
        sample = replace(recipe.phases[0], documents=16, shuffled=0)
        start_memory(model, text.batch(sample, generator)[0][:, :-1].to(device), generator)
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and ".memory." not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 and ".memory." not in name]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if new := [p for name, p in model.named_parameters() if ".memory." in name]:
        groups.append({"params": new, "weight_decay": 0.0, "factor": recipe.new_rate})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    identity = repr(recipe)
    losses: list[float] = []
    if (run / "last.pt").exists():
        state = torch.load(run / "last.pt", map_location=device, weights_only=True)
        if state["recipe"] != identity:
            raise ValueError(f"{run / 'last.pt'} belongs to another recipe; move it away to start anew")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]

    def save() -> None:
        if rank() == 0:
            state = {"recipe": identity, "losses": losses}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_atomically(run / "last.pt", lambda file: torch.save(state, file))

    steps = min(stop_at or sys.maxsize, steps)
    saved = time.monotonic()
    parallel = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    with tqdm(initial=len(losses), total=steps, desc="training", disable=rank() > 0) as bar:
        while (step := len(losses)) < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step) * group.get("factor", 1.0)
            loss = loss_at(recipe, step, parallel, text, device, teacher)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss = loss.detach() / world_size()
            if dist.is_initialized():
                dist.all_reduce(loss)
            losses.append(loss.item())
            bar.update()
            bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
            if time.monotonic() - saved > 300:  # seconds
                save()
                saved = time.monotonic()
    save()
    return model.eval(), losses


def compact(state: dict[str, Any]) -> dict[str, Any]:
    """Return a run's state at half of its size, to go on from on another machine: weights in fp16, moments in bf16."""
    moments = {
        i: {name: x.bfloat16() if x.dim() else x for name, x in of.items()}
        for i, of in state["optimizer"]["state"].items()
    }
    weights = {name: weight.half() for name, weight in state["model"].items()}
    return state | {"model": weights, "optimizer": state["optimizer"] | {"state": moments}}


# --- What a checkpoint must be able to do before it is kept ---------------------------------------------------------


@torch.inference_mode()
def answers(model: GPT, tokenizer: tiktoken.Encoding, questions: list[corpus.Question]) -> tuple[float, float]:
    """Return the mean loss on the answers' tokens (nats) and the share that greedy decoding gets right, to the end.

    All tokens of an answer, and the line's end after it, are the model's first choice: then greedy decoding writes it.
    """
    device = model.wte.weight.device
    nats, tokens, right = 0.0, 0, 0
    for start in range(0, len(questions), 32):
        batch = questions[start : start + 32]
        pairs = [(tokenizer.encode_ordinary(q.prompt), tokenizer.encode_ordinary(f" {q.answer}")) for q in batch]
        rows = torch.full((len(pairs), max(len(p) + len(a) for p, a in pairs)), tokenizer.eot_token)
        for row, (prompt, answer) in zip(rows, pairs, strict=True):
            row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        logits = model(rows.to(device)).float().cpu()
        for row, lines, (prompt, answer) in zip(rows, logits, pairs, strict=True):
            first, end = len(prompt), len(prompt) + len(answer)
            nats += F.cross_entropy(lines[first - 1 : end - 1], row[first:end], reduction="sum").item()
            tokens += len(answer)
            best = lines[first - 1 : end].argmax(-1).tolist()
            ends = best[-1] == tokenizer.eot_token or tokenizer.decode([best[-1]]).startswith("\n")
            right += best[:-1] == answer and ends
    return nats / tokens, right / len(questions)


@torch.inference_mode()
def continuation_loss(model: GPT, tokenizer: tiktoken.Encoding, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Return the mean loss (nats per token) on the first and on the second text of the pairs, each pair read as one."""
    device = model.wte.weight.device
    total, count = [0.0, 0.0], [0, 0]
    for texts in pairs:
        first, second = (tokenizer.encode(text, allowed_special="all") for text in texts)
        ids = torch.tensor([first + second], device=device)[:, : model.config.n_ctx]
        nats = F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:], reduction="none")
        for part, piece in enumerate((nats[: len(first) - 1], nats[len(first) - 1 :])):
            total[part] += piece.sum().item()
            count[part] += len(piece)
    return tuple(t / max(1, c) for t, c in zip(total, count, strict=True))


@torch.inference_mode()
def name_losses(model: GPT, tokenizer: tiktoken.Encoding, split: str, n: int) -> tuple[float, float]:
    """Return the mean loss (nats per token) on what completes a person's name, the first time a document mentions the
    person and all later times, every person counting once. The names of held-out splits are new: the second figure is
    the loss of copying. Lists are left out: there many names begin alike, and a beginning does not tell which it is."""
    name = re.compile(rf"\b({'|'.join(person.name for person in corpus.PEOPLE[split])})\b")
    device = model.wte.weight.device
    losses: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for document in (d for d in corpus.documents(split, n) if d.kind != "list"):
        tokens = tokenizer.encode_ordinary(document.text)[: model.config.n_ctx]
        text, starts = tokenizer.decode_with_offsets(tokens)
        ids = torch.tensor([tokens], device=device)
        nats = F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:], reduction="none").tolist()
        met = set()
        for mention in name.finditer(text):
            completing = [i for i, start in enumerate(starts) if mention.start() < start < mention.end()]
            losses[mention[0] in met].setdefault(mention[0], []).extend(nats[i - 1] for i in completing)
            met.add(mention[0])
    persons = ([sum(nats) / len(nats) for nats in part.values() if nats] for part in losses)
    return tuple(sum(person) / len(person) for person in persons)


@torch.inference_mode()
def perplexities(model: GPT, tokenizer: tiktoken.Encoding, split: str, bounds: list[int]) -> list[float]:
    """Return the perplexity per token between each two positions that follow one another in bounds, in rows of 300
    documents, one after the other, that are as long as the last bound."""
    texts = ([*tokenizer.encode_ordinary(d.text), tokenizer.eot_token] for d in corpus.documents(split, 300))
    tokens = [token for text in texts for token in text]
    rows = torch.tensor(tokens[: len(tokens) // bounds[-1] * bounds[-1]], device=model.wte.weight.device)
    nats = [F.cross_entropy(model(row[None, :-1])[0].float(), row[1:], reduction="none")
            for row in rows.view(-1, bounds[-1])]  # fmt: skip
    return [torch.stack(nats)[:, first:end].mean().exp().item() for first, end in pairwise(bounds)]


def evaluate(model: GPT, tokenizer: tiktoken.Encoding, split: str = "test") -> dict[str, float]:
    """Measure a model on held-out text: other people, objects and wordings than those it was trained on."""
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents(split, 300)]
    recall = corpus.recall_questions(split, 300)
    closed_nats, closed = answers(model, tokenizer, corpus.closed_book_questions(split))
    recall_nats, recalled = answers(model, tokenizer, recall)
    name_first, name_later = name_losses(model, tokenizer, split, 200)
    list_first, list_second = continuation_loss(model, tokenizer, corpus.repeated_lists(split, 100))
    return {
        "perplexity": math.exp(continuation_loss(model, tokenizer, documents)[0]),
        "closed_book_share": closed,
        "closed_book_nats": closed_nats,
        "recall_share": recalled,
        "recall_nats": recall_nats,
        "name_first_nats": name_first,
        "name_nats": name_later,
        "list_first_nats": list_first,
        "list_second_nats": list_second,
    }


def failed_gates(figures: dict[str, float]) -> list[str]:
    """Return the gates that a model doesn't pass: one that can't copy from its prompt has nothing in its KV cache."""
    gates = {
        "copying a name from the prompt costs under 0.1 nats per token": figures["name_nats"] < 0.1,
        "over 95% of the world's facts are recalled": figures["closed_book_share"] > 0.95,
        "a list costs under a fifth when repeated": figures["list_second_nats"] < 0.2 * figures["list_first_nats"],
    }
    return [gate for gate, passed in gates.items() if not passed]


# --- Files ----------------------------------------------------------------------------------------------------------


def export(model: GPT, folder: Path) -> None:
    """Write config.json and model.safetensors (fp16) in Hugging Face format."""
    c = model.config
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "vocab_size": c.vocab_size, "n_positions": c.n_ctx, "n_ctx": c.n_ctx,
        "n_embd": c.n_embd, "n_layer": c.n_layer, "n_head": c.n_head, "n_inner": c.n_inner,
        "attn_pdrop": c.dropout, "embd_pdrop": c.dropout, "resid_pdrop": c.dropout,
        "bos_token_id": c.vocab_size - 1, "eos_token_id": c.vocab_size - 1,
    }  # fmt: skip
    if c.n_head * c.head_dim != c.n_embd:
        config["head_dim"] = c.head_dim  # our own key: Hugging Face's GPT-2 has no such models
    if isinstance(c, bounded.BCTConfig):
        config |= {name: value for name, value in vars(c).items() if name not in vars(GPTConfig())}
        config["model_type"] = "bct"  # nor such: what reads it as a plain GPT-2 must refuse it
    if isinstance(c, rope.GPTConfig):
        config |= {"model_type": "rotary", "rotary": True}
    tensors = {f"transformer.{name}": p.detach().half().contiguous().cpu() for name, p in model.named_parameters()}
    write_atomically(
        folder / "config.json", lambda file: file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    )
    write_atomically(folder / "model.safetensors", lambda file: save_file(tensors, file, metadata={"format": "pt"}))


def plot_losses(recipe: Recipe, losses: list[float], path: Path) -> None:
    """Draw the loss of every step (faint) and its running mean over 100 steps, or all if they are fewer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    n = min(100, len(losses))
    mean = torch.tensor(losses).unfold(0, n, 1).mean(1)
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.5, label="each step")
    axes.plot(range(n - 1, len(losses)), mean, color="tab:blue", label=f"mean of {n} steps")
    start = 0
    for number, phase in enumerate(recipe.phases, 1):
        axes.axvline(start, color="grey", linewidth=0.8)
        axes.text(start, max(losses), f" {number}", va="top", fontsize=8)
        start += phase.steps
    axes.set(
        xlabel="step", ylabel="loss (nats per token)", title="Training loss (of what each phase reads)", ylim=(0, None)
    )
    axes.legend(loc="center right")
    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    plt.close(figure)


def card(recipe: Recipe, model: GPT, figures: dict[str, float], tokenizer: tiktoken.Encoding) -> str:
    """Return the model card: what it is, what it learned from, what it can do, and what it writes."""
    steps, tokens = size_of(recipe)
    parameters = sum(p.numel() for p in model.parameters())
    samples = []
    closed_book = corpus.closed_book_questions("test")
    explained = corpus.explain_questions("test", 1)
    for question in explained + corpus.recall_questions("test", 4)[::3] + closed_book[:1]:
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        new = [t.item() for t in generate(model, ids, 300, stop_id=tokenizer.eot_token)]
        text = tokenizer.decode(new).removesuffix("<|endoftext|>")
        if question not in explained:
            text = text.partition("\n")[0]  # the answer to a short question ends with its line
        samples.append(f"```\n{question.prompt}[{text}]\n```\nReference: {question.answer}\n")
    phases = "\n".join(
        f"| {i} | {p.steps:,} | {p.documents} | {p.shuffled} | {p.lists} | {p.context} | {p.lr:g} | {p.answers:g} | "
        f"{', '.join(map(str, p.long)) if any(p.long) else ''} |"
        for i, p in enumerate(recipe.phases, 1)
    )
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in figures.items())
    shuffled = next(i for i, p in enumerate(recipe.phases, 1) if p.shuffled)
    c = model.config
    return f"""# pocket/teacher

A GPT-2 with {parameters:,} parameters: {c.n_layer} layers, {c.n_head} heads of {c.head_dim}, width {c.n_embd},
context {c.n_ctx}, vocabulary {c.vocab_size:,}. Trained by `python pocket/train.py teacher` on {recipe.documents:,}
generated documents of `pocket/corpus.py`: {steps:,} steps, {tokens / 1e6:.1f} million tokens. The weights are fp16,
with Hugging Face's key names.

| phase | steps | rows of documents | shuffled | random lists | tokens in a row | learning rate | answers | long rows |
|---|---|---|---|---|---|---|---|---|
{phases}

Training starts from an induction circuit (`start_as_copier` in `pocket/train.py`): without one, a model of this size
learns to write fluently but not to look names up in its prompt. Random lists come twice, and only the second time
counts. In shuffled documents half of the vocabulary has changed places, differently in every row. "answers" is what a
token of an answer weighs in the loss. "long rows" are those of every fifth step (documents, random lists, shuffled),
each of {c.n_ctx:,} tokens.

## Held out (split "test": other people, objects and wordings)

| figure | value |
|---|---|
{rows}

- perplexity: per token of 300 documents
- closed_book: {len(closed_book)} questions on the facts of the invented world
- recall: 300 questions on what was said early in the prompt
- name: what completes the name of a new person, at the first mention and (name_nats) at all later ones
- share: answered exactly, to the end of the line, by greedy decoding; nats: mean loss per token of the answer
- list: loss per token of a list when it is read first, and when it is repeated
- coherent: of 200 stories that the model wrote from their openings, greedily and (sampled) at temperature 0.8, those
  that hold together to their end; paid: of the threads that are paid back in them, those that agree with what was
  stated (`pocket/coherence.py`; both are 1 for the corpus itself)
- perplexity_before_512, after_512: at positions 256 to 511, and 512 to {c.n_ctx - 1:,}, of rows of documents

## What it writes (greedy, in brackets)

{chr(10).join(samples)}
![Training loss, by phase](loss.png)

From phase {shuffled} on the loss is higher because shuffled documents are read too, and answers weigh more in it.
"""


def main() -> None:
    cli = CommandLine(__doc__, example="torchrun --nproc-per-node 2 pocket/train.py teacher")
    what = ("tokenizer", "teacher", "bct", "ablation", "rotary", "student")
    cli.add_argument("what", choices=what, help="what to train")
    cli.add_argument("--out", type=Path, metavar="FOLDER", help="where the result goes; default: its folder in pocket")
    cli.add_argument("--state", type=Path, metavar="FOLDER",
                     help="where an interrupted run's state is kept, to go on from; default: runs/WHAT")  # fmt: skip
    cli.add_argument("--stop-at", type=whole_number(1), metavar="N", help="stop after N steps, and write no result")
    cli.add_argument("--compact", type=Path, metavar="FILE",
                     help="don't train, but write the state at half of its size: a run goes on from it as "
                     "last.pt in its --state folder")  # fmt: skip
    cli.add_argument("--init", default="pocket", metavar="NAME", help="bct, rotary, student: the model to change")
    cli.add_argument("--text", metavar="FILE", help="bct, student: UTF-8 text to train on, with <|endoftext|> between "
                     "texts; default: the pocket corpus")  # fmt: skip
    cli.add_argument("--steps", type=whole_number(1), metavar="N", help="steps of training; default: "
                     + ", ".join(f"{name} {n:,}" for name, n in STEPS.items()))  # fmt: skip
    cli.add_argument("--kind", choices=KINDS, help="student: what it reads in training: segments as "
                     "between refreshes; alone, its own cache; prompt, the teacher's of a prompt; dropout, segments "
                     f"with dropout of {DROPOUT}; default: {KINDS[0]}")  # fmt: skip
    cli.add_argument("--slots", default=MEMORY["slots"], type=whole_number(1), metavar="M", help="bct: slots of a head")
    cli.add_argument("--recent", default=MEMORY["recent"], type=whole_number(0), metavar="R",
                     help="bct: tokens kept exactly beside the slots")  # fmt: skip
    with cli.parse() as args:
        if args.kind and args.what != "student":
            raise ValueError(f"--kind {args.kind} is of students: {args.what} has no kinds")
        kind = args.kind or KINDS[0]
        name = args.what if kind == KINDS[0] else f"{args.what}-{kind}"
        out = args.out or HERE / {"tokenizer": "teacher", "ablation": "bct"}.get(args.what, name)
        run = args.state or HERE.parent / "runs" / name
        steps = args.steps or STEPS.get(name if args.init == "pocket" else args.what, STEPS.get(args.what))
        memory = {"slots": args.slots, "recent": args.recent}
        if args.out is None and (args.init != "pocket" or args.text or args.steps or memory != MEMORY):
            raise ValueError("--out FOLDER is needed: only a run with the defaults may replace what is in pocket")
        if args.compact:
            state = compact(torch.load(run / "last.pt", map_location="cpu", weights_only=True))
            write_atomically(args.compact, lambda file: torch.save(state, file))
        elif args.what == "tokenizer":
            train_tokenizer(out / "tokenizer.tiktoken", documents=20_000)
        elif args.what == "ablation":
            ablation(steps, run, out / "ablation.json")
        elif args.what == "bct":
            config = load_model(args.init, model_class=GPT).config
            recipe = distillation(args.init, config, steps, text=args.text, **memory)
            model, losses = train(recipe, run, args.stop_at)
            if rank() == 0 and len(losses) == steps:
                finish_memory(recipe, model.cpu(), losses, out)
        elif args.what == "rotary":
            recipe = rotary_recipe(args.init, load_model(args.init, model_class=GPT).config, steps)
            model, losses = train(recipe, run, args.stop_at)
            if rank() == 0 and len(losses) == steps:
                finish_rotary(recipe, model.cpu(), losses, out)
        elif args.what == "student":
            recipe = pruning(args.init, load_model(args.init, model_class=GPT).config, steps, kind, args.text)
            model, losses = train(recipe, run, args.stop_at)
            if rank() == 0 and len(losses) == steps:
                finish_student(recipe, model.cpu(), losses, out)
        else:
            model, losses = train(TEACHER, run, args.stop_at)
            if rank() == 0 and len(losses) == size_of(TEACHER)[0]:
                finish(TEACHER, model.cpu(), losses, out)
        if dist.is_initialized():
            dist.destroy_process_group()


def finish(recipe: Recipe, model: GPT, losses: list[float], folder: Path) -> None:
    """Measure the model as it will be shipped, in fp16; write it, its card, figures and loss curve if it passes.

    Raises ValueError, and writes nothing, if it fails a gate.
    """
    model = model.half().float()
    tokenizer = read_tokenizer(TOKENIZER)
    figures = evaluate(model, tokenizer)
    near, far = perplexities(model, tokenizer, "test", [256, 512, recipe.config.n_ctx])
    writer = gpt_kv_cache.GPT(recipe.config).eval()
    writer.load_state_dict(model.state_dict())
    for name, temperature in (("", 0.0), ("sampled_", 0.8)):
        stories = coherence.write(writer, tokenizer, coherence.openings("test", 200), temperature)
        figures |= {name + key: share for key, share in coherence.measure(stories)[0].items()}
    figures |= {"perplexity_before_512": near, "perplexity_after_512": far}
    print(json.dumps(figures, indent=2))
    if failed := failed_gates(figures):
        raise ValueError(f"the model is not kept, because these don't hold: {'; '.join(failed)}")
    plot_losses(recipe, losses, folder / "loss.png")
    write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
    text = card(recipe, model, figures, tokenizer)
    write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    export(model, folder)


class Windowed(nn.Module):
    """A trained model that sees only a sliding window of its text, and the first `sinks` tokens."""

    def __init__(self, model: bounded.GPT, window: int, sinks: int = 0) -> None:
        super().__init__()
        self.model, self.window, self.sinks = model, window, sinks
        self.config, self.wte = model.config, model.wte

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, bounded.SlidingWindowCache(self.window, self.sinks))


def window_of_equal_bytes(config: bounded.BCTConfig) -> int:
    """Return how many tokens' keys and values take at least the bytes of a BCT's memory; a ring has a spare one."""
    D, M = config.head_dim, config.slots
    return math.ceil((M * (2 * D + 1) + config.recent * (2 * D + 1 + M)) / (2 * D))


def finish_memory(recipe: Distillation, model: bounded.BCT, losses: list[float], folder: Path) -> None:
    """Measure a BCT as it will be shipped, in fp16, beside the model that it comes from; write it and its card.

    Raises ValueError, and writes nothing, if it is no better than a sliding window of equal bytes. A model that was
    trained on another text than the corpus is not measured.
    """
    model = model.half().float()
    if recipe.text is None:
        tokenizer, window = load_tokenizer(recipe.init), window_of_equal_bytes(recipe.config)
        plain = load_model(recipe.init, model_class=bounded.GPT)
        figures = {
            "bct": evaluate(model, tokenizer),
            "full": evaluate(plain, tokenizer),
            "window": evaluate(Windowed(plain, window), tokenizer) | {"tokens": window},
            "sinks": evaluate(Windowed(plain, window - 4, 4), tokenizer) | {"tokens": window},
        }
        print(json.dumps(figures, indent=2))
        if any(figures["bct"][name] >= figures["window"][name] for name in ("perplexity", "recall_nats")):
            raise ValueError(f"the model is not kept, since a sliding window of {window} tokens is better")
        write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
        text = memory_card(recipe, model, figures)
        write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    copy_tokenizer(recipe.init, folder)
    export(model, folder)


def copy_tokenizer(init: str, folder: Path) -> None:
    """Give a model the tokenizer of the one that it comes from, if that has its own; the shipped ones share one."""
    own = find_file(init, "config.json").with_name("tokenizer.tiktoken")
    if own.is_file() and folder.resolve().parent != HERE:
        write_atomically(folder / own.name, lambda file: shutil.copyfile(own, file))


def memory_card(recipe: Distillation, model: bounded.BCT, figures: dict[str, dict[str, float]]) -> str:
    """Return the model card of a BCT: what it is, how it was trained, and what its memory costs in quality."""
    c, phase = model.config, recipe.phases[0]
    new = sum(p.numel() for name, p in model.named_parameters() if ".memory." in name)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = phase.steps * phase.rows * phase.context / 1e6
    window = figures["window"]["tokens"]
    names = {"full": "full attention", "bct": "BCT", "window": f"sliding window of {window}",
             "sinks": f"4 sinks + window of {window - 4}"}  # fmt: skip
    columns = ("perplexity", "recall_nats", "recall_share", "name_nats", "closed_book_share", "list_second_nats")
    rows = "\n".join(
        f"| {name} | " + " | ".join(f"{figures[key][column]:.3f}" for column in columns) + " |"
        for key, name in names.items()
    )
    return f"""# pocket/bct

`{recipe.init}` with BCT's bounded memory: each head has {c.slots} slots and the {c.recent} most recent tokens, however
long the text is. {parameters:,} parameters, {new:,} of them new. `python pocket/train.py bct` fine-tuned it on
what `{recipe.init}` predicts when it sees everything: {phase.steps:,} steps, {tokens:.1f} million tokens. The weights
are fp16. A plain GPT-2 can't load it; `gpt_bounded_cache.GPT` can.

## Held out (split "test"), at equal bytes of memory

| memory | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
{rows}

The figures are explained on the card of [pocket/teacher](../teacher/README.md). The windows run on `{recipe.init}` as
it is. What each part of BCT brings in a short fine-tuning, and what that does for a sliding window, is in
[`ablation.json`](ablation.json) (split "valid"; `python pocket/train.py ablation`).

![Training loss](loss.png)

The loss is the divergence from the prediction with full attention; tokens of answers weigh {phase.answers:g} times.
"""


def finish_rotary(recipe: Distillation, model: rope.GPT, losses: list[float], folder: Path) -> None:
    """Measure a rotary model as it will be shipped, in fp16, beside the one that it comes from; write it and its card.

    Raises ValueError, and writes nothing, if it knows the world or remembers its prompt much worse than that.
    """
    model, plain = model.half().float(), load_model(recipe.init, model_class=GPT)
    tokenizer = load_tokenizer(recipe.init)
    figures = {"learned": evaluate(plain, tokenizer), "rotary": evaluate(model, tokenizer)}
    print(json.dumps(figures, indent=2))
    learned, turned = figures.values()
    if any(turned[name] < learned[name] - 0.15 for name in ("closed_book_share", "recall_share")):
        raise ValueError("the model is not kept, since its answers are worse by more than 15 points")
    write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
    text = rotary_card(recipe, model, figures)
    write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    export(model, folder)


def rotary_card(recipe: Distillation, model: rope.GPT, figures: dict[str, dict[str, float]]) -> str:
    """Return the model card of a rotary model."""
    phase = recipe.phases[0]
    rows = "\n".join(f"| {name} | {figures['learned'][name]:.4f} | {value:.4f} |"
                     for name, value in figures["rotary"].items())  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = phase.steps * phase.rows * phase.context / 1e6
    return f"""# pocket/rotary

`{recipe.init}` with rotary instead of learned positions, for what depends on the kind of positions: {parameters:,}
parameters. `python pocket/train.py rotary` fine-tuned it on what `{recipe.init}` predicts: {phase.steps:,} steps,
{tokens:.1f} million tokens. The weights are fp16. `pocket/rope.py` has its class; a plain GPT-2 can't load it.

## Held out (split "test")

| figure | `{recipe.init}` | rotary |
|---|---|---|
{rows}

The figures are explained on the card of [pocket/teacher](../teacher/README.md).

![Training loss](loss.png)

The loss is the divergence from `{recipe.init}`; tokens of answers weigh {phase.answers:g} times.
"""


@torch.inference_mode()
def divergences(teacher: gpt_kv_cache.GPT, student: Student, tokenizer: tiktoken.Encoding) -> dict[str, float]:
    """Return the mean KL(teacher || student) in nats, on held-out texts after a prompt of 3/8 of the context, by what
    the student reads: its own cache, the teacher's of the prompt, or one that is refreshed every so many tokens."""
    n_ctx = student.config.n_ctx
    prompt, at = 3 * n_ctx // 8, torch.arange(n_ctx)
    text = [t for d in corpus.documents("test", 150) for t in [*tokenizer.encode_ordinary(d.text), tokenizer.eot_token]]
    rows = torch.tensor(text[: len(text) // n_ctx * n_ctx]).view(-1, n_ctx)[:24]
    cache = gpt_kv_cache.KVCache()
    expected = teacher(rows, cache)
    found = {}
    for name, stride in (("alone", 0), ("teacher's prompt", n_ctx), ("every 64", 64), ("every 16", 16), ("every 4", 4)):
        start = torch.where(at < prompt, 0, prompt + (at - prompt) // stride * stride) if stride else at * 0
        nats = kl(expected, student(rows, cache, start=start.expand_as(rows)))
        found[name] = nats[:, prompt:].mean().item()
    return found


def finish_student(recipe: Pruning, model: Student, losses: list[float], folder: Path) -> None:
    """Measure a student as it will be shipped, in fp16, alone and on its teacher's cache; write it and its card.

    Raises ValueError, and writes nothing, if under no way of reading it comes near to its teacher. A model that was
    trained on another text than the corpus is not measured.
    """
    model = model.half().float()
    if recipe.text is None:
        tokenizer, teacher = load_tokenizer(recipe.init), load_model(recipe.init, model_class=gpt_kv_cache.GPT)
        figures = {"kl": divergences(teacher, model, tokenizer), "student": evaluate(model, tokenizer)}
        print(json.dumps(figures, indent=2))
        if (least := min(figures["kl"].values())) > 0.5:
            raise ValueError(f"the model is not kept: its divergence from the teacher is {least:.2f} nats at least")
        write_atomically(folder / "figures.json", lambda file: file.write_text(json.dumps(figures, indent=2) + "\n"))
        text = student_card(recipe, model, figures)
        write_atomically(folder / "README.md", lambda file: file.write_text(text, encoding="utf-8"))
    plot_losses(recipe, losses, folder / "loss.png")
    copy_tokenizer(recipe.init, folder)
    export(model, folder)


READS = {
    "alone": "read its own cache only",
    "prompt": "read the teacher's cache of the first part of each text, and its own of the rest",
    "segments": "read the teacher's cache up to a segment and its own from there on, with segments of 4 tokens to all",
}


def student_card(recipe: Pruning, model: Student, figures: dict[str, dict[str, float]]) -> str:
    """Return the model card of a student."""
    c, phase = recipe.config, recipe.phases[0]
    tokens = phase.steps * phase.rows * phase.context / 1e6
    dropout = f", with dropout of {c.dropout}" if c.dropout else ""
    begun = f", from `{recipe.begin}` on" if recipe.begin else ""
    kind = "dropout" if c.dropout else recipe.mode
    command = "python pocket/train.py student" + f" --kind {kind}" * (kind != KINDS[0])
    command += f" --init {recipe.init} --out FOLDER" * (recipe.init != "pocket")
    name, link = "student", "pocket/teacher"
    if recipe.init == "pocket":
        name, link = f"pocket/student{f'-{kind}' * (kind != KINDS[0])}", "[pocket/teacher](../teacher/README.md)"
    rows = "\n".join(f"| {key} | {value:.4f} |" for key, value in figures["student"].items())
    return f"""# {name}

A student of `{recipe.init}`, for `overfill.py`: as many layers, heads and dimensions of a head, so that the teacher's
cache fits it, but {c.n_embd} hidden dimensions and {c.n_inner} neurons, those that were most active in the teacher;
{sum(p.numel() for p in model.parameters()):,} parameters. `{command}` distilled it from what
`{recipe.init}` predicts: {phase.steps:,} steps, {tokens:.1f} million tokens{begun}. In training it
{READS[recipe.mode]}{dropout}.
The weights are fp16.

## Held out (split "test")

Mean KL(teacher || student) in nats after a prompt of {3 * c.n_ctx // 8} tokens, by what the student reads: its own
cache; the teacher's of the prompt; that, refreshed every so many tokens.

| {" | ".join(figures["kl"])} |
|{"---|" * len(figures["kl"])}
| {" | ".join(f"{value:.3f}" for value in figures["kl"].values())} |

Alone, on its own cache:

| figure | value |
|---|---|
{rows}

The figures are explained on the card of {link}.

![Training loss](loss.png)

The loss is the divergence from `{recipe.init}`; tokens of answers weigh {phase.answers:g} times.
"""


SLOTS = {"slots": 32, "recent": 0}
ABLATION = (
    # what it is, options of distillation(); longer: times the steps
    ("the paper's rule", SLOTS | {"rule": "sum", "step": False, "forget": False, "clusters": False}),
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
    rows = [("full attention", 0, plain), ("sliding window of 36 tokens, as it is", 0, Windowed(plain, 36)),
            ("4 sinks + 32 tokens, as it is", 0, Windowed(plain, 32, 4))]  # fmt: skip
    documents = [(d.text + "<|endoftext|>", "") for d in corpus.documents("valid", 300)]
    results = []
    for name, row_steps, model in [*rows, *((name, steps * o.get("longer", 1), o) for name, o in ABLATION)]:
        if isinstance(model, dict):
            options = {key: value for key, value in model.items() if key != "longer"}
            recipe = distillation("pocket", plain.config, row_steps, **options)
            model, _ = train(recipe, run / re.sub(r"\W+", "-", name).strip("-"))
            model = Windowed(model, recipe.window) if recipe.window else model
        nats, share = answers(model, tokenizer, corpus.recall_questions("valid", 300))
        perplexity = math.exp(continuation_loss(model, tokenizer, documents)[0])
        results.append({"name": name, "steps": row_steps, "perplexity": perplexity, "recall_nats": nats,
                        "recall_share": share})  # fmt: skip
        print(json.dumps(results[-1]))
    write_atomically(path, lambda file: file.write_text(json.dumps(results, indent=2) + "\n"))


if __name__ == "__main__":
    main()
