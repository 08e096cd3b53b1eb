"""How many pairs a memory of fixed size recalls, if a model is trained for it from scratch.

`python3 -m studies.recall` takes about half an hour on one core, and goes on where it was
interrupted. A text is a list of key-value pairs; then some of its keys are asked for. Models of two
layers learn the task from their first step on with full attention, with the source's sum rule read
in two ways, with our rule, and with a window of equal bytes.

right   share of values recalled, by slots and pairs; a value for each seed
every   the same, as a mean over the numbers of pairs; a value for each trained model, whatever its
        slots
share   bytes as a share of the growing cache's

Source: Yi et al. 2024 (BCT); Arora et al. 2023, "Zoology: Measuring and Improving Recall in
Efficient Language Models" (the task).
"""

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_bounded_cache import (
    BCT,
    GPT,
    BCTConfig,
    GPTConfig,
    MemoryBlock,
    SlidingWindowCache,
    Slots,
    Tokens,
    WriteMemory,
)
from pocket.evaluation import window_of_equal_bytes
from studies.bounding.claims import (
    LOOKING_UP,
    bleu_fine_tuned,
    bleu_from_scratch,
    sinks,
    text_quality,
)
from studies.core import run_study
from studies.results import Results

KEYS, VALUES = 512, 64  # of the vocabulary
MAX_ASKED = 64  # keys that are asked for at the end of a text, at most
POSITIONS_PER_STEP = 1024  # in all texts of a step
LEARNING_RATE, WARMUP_STEPS = 1e-2, 50  # AdamW's learning rate, and steps of its linear rise
GEOMETRY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_inner": 64}
WAYS = ("ours", "sum", "sum-mk", "window")  # sum-mk: the source's sum, read through MK


class Size(NamedTuple):
    """What models are trained, and how many answers they are asked for."""

    pairs: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    slots: tuple[int, ...] = (4, 16, 64, 256)
    seeds: int = 3
    steps: int = 400
    answers: int = 1024  # for each number of pairs, at least

    @property
    def positions(self) -> int:
        return max(self.pairs) + min(MAX_ASKED, max(self.pairs))


QUICK = Size(pairs=(8, 32, 128), seeds=1, steps=40, answers=256)


# --- The task ---------------------------------------------------------------------------------------


def draw_texts(
    pairs: int, asked: int, text_count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return texts (text_count, pairs + asked) and the answers (text_count, asked). A position holds
    a key and its value, as key * (VALUES + 1) + value, or a key that is asked and, for no value,
    VALUES. The keys of a text are all different."""
    keys = torch.rand(text_count, KEYS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(VALUES, (text_count, pairs), generator=generator)
    asked_pairs = torch.rand(text_count, pairs, generator=generator).argsort(dim=1)[:, :asked]
    ids = torch.cat([keys, keys.gather(1, asked_pairs)], dim=1) * (VALUES + 1)
    ids = ids + F.pad(values, (0, asked_pairs.size(1)), value=VALUES)
    return ids, values.gather(1, asked_pairs)


class Recaller(GPT):
    """A GPT-2 for these texts: a position's embedding is its key's and its value's, and a
    prediction is a value.

    Weights begin with a standard deviation of 1 / sqrt(width): 0.02, GPT-2's own, is too narrow for
    a width of 64.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte.forward = self.embed

    def init_weights(self) -> None:
        super().init_weights()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and name != "wpe.weight":
                parameter.data /= 0.02 * math.sqrt(self.config.n_embd)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the sum of the embeddings of the keys and values in ids (B, T)."""
        embeddings = self.wte.weight
        return embeddings[ids // (VALUES + 1)] + embeddings[KEYS + ids % (VALUES + 1)]

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), self.wte.weight[KEYS : KEYS + VALUES])


# --- The memories -----------------------------------------------------------------------------------


class WideBCT(BCT):
    """A BCT whose slots' addresses begin as N(0, 1). Small addresses would let every token be
    written to all slots alike, and training would be slow."""

    def init_weights(self) -> None:
        super().init_weights()
        for block in self.h:
            nn.init.normal_(block.memory.addresses)


class RecallingBCT(WideBCT, Recaller):
    """A BCT for these texts. Its addresses begin as WideBCT's do: a Recaller's other weights are
    widened before these are drawn."""


class MemoryThroughMK(WriteMemory):
    """The source's memory, read in another way: MV holds only values, and queries find them by
    MK."""

    def empty(self, x: Tensor) -> tuple[Slots, Tokens]:
        slots, recent = super().empty(x)
        return replace(slots, keys=self.addresses.expand_as(slots.keys)), recent

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
        """Return what the queries read; nothing is added to a slot's key."""
        return super().forward(x, q, torch.zeros_like(k), v, *where)


class BlockThroughMK(MemoryBlock):
    """A BCT's block with that memory."""

    def __init__(self, config: BCTConfig) -> None:
        super().__init__(config)
        self.memory = MemoryThroughMK(config)


class RecallingThroughMK(RecallingBCT):
    """A BCT for these texts, read through MK."""

    block_class = BlockThroughMK


def build_model(way: str, slots: int, seed: int, positions: int) -> Recaller:
    """Return a new model for a way; the same seed always gives the same model."""
    torch.manual_seed(seed)
    geometry = GEOMETRY | {"vocab_size": KEYS + VALUES + 1, "n_ctx": positions}
    rule = "sum" if way.startswith("sum") else "mean"
    config = BCTConfig(**geometry, slots=slots, recent=0, rule=rule)
    if way in ("full", "window"):
        model = Recaller(GPTConfig(**geometry))
        if way == "window":
            model.new_cache = partial(SlidingWindowCache, window_of_equal_bytes(config))
        return model
    if way == "sum-mk":
        return RecallingThroughMK(config)
    return RecallingBCT(config)


def train_model(way: str, slots: int, seed: int, size: Size) -> Recaller:
    """Return a trained model.

    All texts of a step have the same number of pairs, drawn at random up to a limit that rises to
    the largest in the first 60% of the steps. Every way reads the same texts for this seed.
    """
    model = build_model(way, slots, seed, size.positions)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    fewest_pairs, most_pairs = min(size.pairs), max(size.pairs)
    for step in range(size.steps):
        for group in optimizer.param_groups:
            cosine = 0.52 + 0.48 * math.cos(math.pi * step / size.steps)
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * cosine
        limit = 2 * fewest_pairs * (most_pairs / fewest_pairs) ** (step / (0.6 * size.steps))
        allowed = [n for n in size.pairs if n <= limit]
        pairs = allowed[int(torch.randint(len(allowed), (1,), generator=generator))]
        asked = min(pairs, MAX_ASKED)
        text_count = max(1, POSITIONS_PER_STEP // (pairs + asked))
        ids, answers = draw_texts(pairs, asked, text_count, generator)
        logits = model(ids, model.new_cache())[:, pairs:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def recall_of(model: Recaller, pairs: int, min_answers: int) -> tuple[float, float]:
    """Return the share of at least min_answers values that the model recalls, the same for every
    model; and the bytes of a text's cache, without MK, which belongs to the model."""
    asked = min(pairs, MAX_ASKED)
    generator = torch.Generator().manual_seed(10**6 + pairs)
    ids, expected_values = draw_texts(pairs, asked, math.ceil(min_answers / asked), generator)
    cache = model.new_cache()
    recalled = model(ids, cache)[:, pairs:].argmax(dim=-1)
    recall = (recalled == expected_values).float().mean().item()
    nbytes = cache.nbytes
    if isinstance(model, RecallingThroughMK):
        nbytes -= sum(slots.keys.nbytes for slots, _ in cache.layers)
    return recall, nbytes / len(ids)


# --- The study --------------------------------------------------------------------------------------


def measure_recall(rows: Results, way: str, setting: dict[str, int], size: Size) -> None:
    """Train a model for each seed, with the setting's number of slots, and append their recall."""
    models = [train_model(way, setting.get("slots", 1), seed, size) for seed in range(size.seeds)]
    token_bytes = 2 * 4 * GEOMETRY["n_layer"] * GEOMETRY["n_embd"]  # bytes of its keys and values
    for pairs in size.pairs:
        results = [recall_of(model, pairs, size.answers) for model in models]
        share_of_bytes = results[0][1] / (token_bytes * (pairs + min(pairs, MAX_ASKED)))
        recalls = [recall for recall, _ in results]
        rows.add_values(way, setting | {"pairs": pairs}, share=[share_of_bytes], right=recalls)


def pool_recall(rows: Results, size: Size) -> None:
    """Append each way's recall over all of its models, where every number of pairs counts alike, and
    over those with half as many slots as pairs, beside full attention's of as many pairs."""
    # What is pooled was measured under these conditions:
    rows.conditions = rows.find("full", "right", pairs=size.pairs[0])["conditions"]
    for way in rows.ways_due(WAYS, "every"):
        means = []
        for slots in size.slots:
            recalls = [rows.find(way, "right", slots=slots, pairs=n)["values"] for n in size.pairs]
            means += [statistics.mean(of_one_model) for of_one_model in zip(*recalls, strict=True)]
        rows.add_values(way, {}, every=means)
    for way in rows.ways_due([*WAYS, "full"], "half"):
        recalls = []
        for slots in size.slots:
            setting = {} if way == "full" else {"slots": slots}
            row = rows.find(way, "right", **setting, pairs=2 * slots)
            recalls += row["values"] if row else []
        rows.add_values(way, {}, half=recalls)


def measure(rows: Results, quick: bool) -> None:
    """Append what is missing: full attention, and each way at each number of slots."""
    size, rows = QUICK if quick else Size(), rows.at(**LOOKING_UP)
    rows.set_model_conditions(
        "two layers of GPT-2, trained from scratch to look up keys",
        build_model("full", 1, 0, size.positions),
        f"{size.steps} steps of {POSITIONS_PER_STEP:,} positions, seeds: {size.seeds}, one learning rate",
    )
    most_pairs = size.pairs[-1]
    if rows.ways_due(["full"], "right", pairs=most_pairs):
        measure_recall(rows, "full", {}, size)
    for slots in size.slots:
        for way in rows.ways_due(WAYS, "right", slots=slots, pairs=most_pairs):
            measure_recall(rows, way, {"slots": slots}, size)
    pool_recall(rows, size)


main = partial(
    run_study,
    __doc__,
    "recall",
    "one seed and few steps",
    measure,
    rows_of="bounding",
    beyond=[
        bleu_fine_tuned,
        bleu_from_scratch,
        text_quality,
        sinks,
    ],
)
