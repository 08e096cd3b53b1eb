"""How many pairs a memory of fixed size recalls, if a model is trained for it until that helps no more.

`python3 -m studies.recall` takes some hours on one core, and goes on where it was interrupted. A
text is a list of key-value pairs; then some of its keys are asked for. Models of two layers learn
the task from their first step on with full attention, with the source's sum rule read in two ways,
with our rule, with a window, and with the delta rule: a state of hybrid_kv_cache.py in each layer.
All but the first have as many bytes. Each way has the learning rate of RATES that is best after twice
the shortest training. The steps are doubled until the model recalls less than a point more of 32
keys.

learned   share of values recalled by one model, by number of pairs; its figure is their mean
right     share of values recalled, by pairs; a value for each seed. In the setting steps=n, after
          so many steps, of the first seed
bytes     of the cache of a text of 32 pairs

Source: Yi et al. 2024 (BCT); Arora et al. 2023, "Zoology: Measuring and Improving Recall in
Efficient Language Models" (the task); Yang et al. 2024, "Gated Delta Networks".
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_bounded_cache import BCT, GPT, BCTConfig, GPTConfig
from hybrid_kv_cache import Hybrid, HybridConfig
from pocket.evaluation import window_of_equal_bytes, windowed
from studies.bounding.claims import (
    LOOKING_UP,
    bleu_fine_tuned,
    bleu_from_scratch,
    our_rule,
    sinks,
    text_quality,
)
from studies.core import run_study
from studies.results import Results

KEYS, VALUES = 512, 64  # of the vocabulary
MAX_ASKED = 64  # keys that are asked for at the end of a text, at most
POSITIONS_PER_STEP = 1024  # in all texts of a step
RATES, WARMUP_STEPS = (1e-3, 3e-3, 1e-2, 3e-2), 50  # AdamW's, and steps of their linear rise
SLOTS, PAIRS = 16, 32  # of a head; and the pairs whose recall decides how a model is trained
GEOMETRY = {"vocab_size": KEYS + VALUES + 1, "n_ctx": 320, "n_layer": 2}
GEOMETRY |= {"n_head": 2, "n_embd": 64, "n_inner": 64}
WAYS = ("full", "ours", "sum", "sum-mk", "delta", "window")  # sum-mk: the sum, read through MK


class Size(NamedTuple):
    """What models are trained, and how many answers they are asked for."""

    pairs: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    models: int = 4  # of each way, with another seed each
    steps: int = 800  # of the shortest training
    least_gain: float = 0.01  # of recall, for which the steps are doubled again
    answers: int = 2048  # for each number of pairs, at least


QUICK = Size(pairs=(32, 64, 128), models=1, steps=20, least_gain=1.0, answers=256)


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
    ids = ids + F.pad(values, (0, asked), value=VALUES)
    return ids, values.gather(1, asked_pairs)


# --- The memories -----------------------------------------------------------------------------------


class WideBCT(BCT):
    """A BCT whose slots' addresses begin as N(0, 1). Small addresses would let every token be
    written to all slots alike, and training would be slow."""

    def init_weights(self) -> None:
        super().init_weights()
        for block in self.h:
            nn.init.normal_(block.memory.addresses)


def states_in_place_of_slots(config: BCTConfig) -> dict[str, int]:
    """Return the geometry of the largest states that, with a convolution's inputs, fit into the
    bytes of a BCT's slots."""
    numbers = 2 * config.head_dim * config.slots
    size = max(D for D in range(2, numbers, 2) if numbers >= D * D + 3 * D)
    return {"n_kv_head": config.n_head, "head_dim": size, "conv": 2}


def kind_of_model(
    way: str, geometry: dict[str, int], memory: dict[str, Any]
) -> tuple[Callable[[GPTConfig], GPT], GPTConfig]:
    """Return the class and the config of a model with a way to remember. memory: options of the BCT
    whose bytes a window or states may take."""
    config = BCTConfig(**geometry, **memory)
    if way == "delta":
        states = states_in_place_of_slots(config)
        return Hybrid, HybridConfig(**geometry | states, kinds=("state",) * config.n_layer)
    if way == "full":
        return GPT, GPTConfig(**geometry)
    if way == "window":
        return windowed(window_of_equal_bytes(config)), GPTConfig(**geometry)
    return WideBCT, config


def build_model(way: str, seed: int) -> GPT:
    """Return a new model for these texts; the same seed always gives the same model.

    A position's embedding is its key's and its value's, and a prediction is a value. Matrices begin
    with a standard deviation of 1 / sqrt(width): 0.02, GPT-2's own, is too narrow for a width of 64.
    """
    torch.manual_seed(seed)
    rule = "mean" if way == "ours" else "sum"
    memory = {"slots": SLOTS, "recent": 0, "rule": rule, "read_by_mk": way == "sum-mk"}
    model_class, config = kind_of_model(way, GEOMETRY, memory)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "wpe.weight":
            parameter.data /= 0.02 * math.sqrt(config.n_embd)
    embeddings = model.wte.weight

    def embed(ids: Tensor) -> Tensor:
        return embeddings[ids // (VALUES + 1)] + embeddings[KEYS + ids % (VALUES + 1)]

    def head(x: Tensor) -> Tensor:
        return F.linear(model.ln_f(x), embeddings[KEYS : KEYS + VALUES])

    model.wte.forward, model.head = embed, head
    return model


def train_model(way: str, steps: int, rate: float, seed: int, size: Size) -> GPT:
    """Return a trained model.

    All texts of a step have the same number of pairs, drawn at random up to a limit that rises to
    the largest in the first 60% of the steps. Every way reads the same texts for this seed.
    """
    model = build_model(way, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    fewest_pairs, most_pairs = min(size.pairs), max(size.pairs)
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.52 + 0.48 * math.cos(math.pi * step / steps)
            group["lr"] = rate * min(1, (step + 1) / WARMUP_STEPS) * cosine
        limit = 2 * fewest_pairs * (most_pairs / fewest_pairs) ** (step / (0.6 * steps))
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
def recall_of(model: GPT, pairs: int, min_answers: int) -> tuple[float, float]:
    """Return the share of at least min_answers values that the model recalls, the same for every
    model; and the bytes of a text's cache."""
    asked = min(pairs, MAX_ASKED)
    generator = torch.Generator().manual_seed(10**6 + pairs)
    ids, expected_values = draw_texts(pairs, asked, math.ceil(min_answers / asked), generator)
    cache = model.new_cache()
    recalled = model(ids, cache)[:, pairs:].argmax(dim=-1)
    recall = (recalled == expected_values).float().mean().item()
    return recall, cache.nbytes / len(ids)


# --- The study --------------------------------------------------------------------------------------


def learned(rows: Results, way: str, size: Size, **setting: float) -> dict[int, float]:
    """Return the shares that a model of this setting (rate, steps, seed) recalls, by number of pairs.
    It is trained if it has no row."""
    if rows.find(way, "learned", **setting) is None:
        model = train_model(way, size=size, **setting)
        recalls = [recall_of(model, pairs, size.answers)[0] for pairs in size.pairs]
        rows.add_values(way, setting, learned=recalls)
    return dict(zip(size.pairs, rows.find(way, "learned", **setting)["values"], strict=True))


def measure_recall(rows: Results, way: str, size: Size) -> None:
    """Train models of a way until that helps no more, and append their recall."""

    def first_model(steps: int, rate: float) -> float:
        return learned(rows, way, size, steps=steps, rate=rate, seed=0)[PAIRS]

    rate, recall = max(RATES, key=partial(first_model, 2 * size.steps)), 0.0
    for doublings in itertools.count():
        steps = size.steps << doublings
        before, recall = recall, first_model(steps, rate)
        if rows.ways_due([way], "right", steps=steps):
            rows.add_values(way, {"steps": steps}, right=[recall])
        if recall - before < size.least_gain:
            break
    models = [learned(rows, way, size, steps=steps, rate=rate, seed=n) for n in range(size.models)]
    for pairs in size.pairs:
        rows.add_values(way, {"pairs": pairs}, right=[recalls[pairs] for recalls in models])
    _, nbytes = recall_of(build_model(way, 0), PAIRS, 1)
    rows.add_values(way, {}, bytes=[nbytes])


def measure(rows: Results, quick: bool) -> None:
    """Append what is missing of each way."""
    size, rows = QUICK if quick else Size(), rows.at(**LOOKING_UP)
    rows.set_model_conditions(
        "two layers of GPT-2, trained from scratch to look up keys",
        build_model("full", 0),
        f"steps of {POSITIONS_PER_STEP:,} positions, from {size.steps} on doubled until recall gains "
        f"less than {size.least_gain:.0%}; the learning rate that is best after {2 * size.steps:,}; "
        f"seeds: {size.models}",
    )
    for way in rows.ways_due(WAYS, "bytes"):
        measure_recall(rows, way, size)


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
        our_rule,
    ],
)
