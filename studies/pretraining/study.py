"""What memories of fixed size remember if models are built with them: pairs to look up, and text.

`python3 -m studies.pretraining` takes some hours on one core, and goes on where it was interrupted.
Ways: full attention; a BCT by its source's sum rule, read in two ways (sum-mk: through MK), and by
ours; a window, and the delta rule, a state of hybrid_kv_cache.py in each layer. All but the first
have about as many bytes.

Looking up: a text is a list of key-value pairs; then some of its keys are asked for. Models of two
layers learn the task from their first step on. Each way has the learning rate of RATES that is best
after twice the shortest training. The steps are doubled until the model recalls less than a point
more of 32 keys.

learned   share of values recalled by one model, by number of pairs; its figure is their mean
right     share of values recalled, by pairs; a value for each seed. In the setting steps=n, after
          so many steps, of the first seed
bytes     of the cache of a text of 32 pairs

Text: models of nearly pocket's size read the same batches, from their own starting weights. Metrics
are those of studies.bounding, in the setting built=scratch.

Source: Yi et al. 2024 (BCT); Arora et al. 2023, "Zoology: Measuring and Improving Recall in
Efficient Language Models" (the task); Yang et al. 2024, "Gated Delta Networks".
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos.memories import Memory
from gpt_bounded_cache import BCT, GPT, BCTConfig, GPTConfig
from hybrid_kv_cache import Hybrid, HybridConfig
from pocket.evaluation import window_of_equal_bytes, windowed
from pocket.recipes import MEMORY, Phase, Recipe
from pocket.tokenizer import VOCABULARY
from pocket.training import train
from studies.bounding import study as bounding
from studies.bounding.claims import LOOKING_UP, bleu_fine_tuned, sinks
from studies.core import run_study
from studies.results import Results

KEYS, VALUES = 512, 64  # of the vocabulary
MAX_ASKED = 64  # keys that are asked for at the end of a text, at most
ANSWERS = 2048  # of each model, for each number of pairs, at least
POSITIONS_PER_STEP = 1024  # in all texts of a step
RATES, WARMUP_STEPS = (1e-3, 3e-3, 1e-2, 3e-2), 50  # AdamW's, and steps of their linear rise
SLOTS, PAIRS = 16, 32  # of a head; and the pairs whose recall decides how a model is trained
GEOMETRY = {
    "vocab_size": KEYS + VALUES + 1,
    "n_ctx": 320,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "n_inner": 64,
}
WAYS = ("full", "ours", "sum", "sum-mk", "delta", "window")
SUM = {"rule": "sum", "slots": sum(MEMORY.values()), "recent": 0}
TEXT_MEMORIES = {"full": {}, "sum": SUM, "ours": MEMORY, "window": MEMORY, "delta": SUM}
TEXT_GEOMETRY = {"vocab_size": VOCABULARY, "n_ctx": 512, "n_layer": 6, "n_head": 6, "n_embd": 192}
ROWS = 5  # of text in a batch


class Size(NamedTuple):
    """What models are trained, and on how much text."""

    pairs: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    models: int = 4  # of each way, with another seed each
    steps: int = 800  # of the shortest training
    least_gain: float = 0.01  # of recall, for which the steps are doubled again
    text_steps: int = 1500
    documents: int = 20_000  # to read
    held_out: bounding.Size = bounding.Size()


QUICK = Size(
    pairs=(32, 64, 128),
    models=1,
    steps=20,
    least_gain=1.0,
    text_steps=2,
    documents=200,
    held_out=bounding.QUICK,
)


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


def kind_of_model(
    way: str, geometry: dict[str, int], memory: dict[str, Any]
) -> tuple[type[nn.Module], GPTConfig]:
    """Return the class and the config of a model that remembers in this way. memory: options of the
    BCT whose bytes a window or states take."""
    bct = BCTConfig(**geometry, **memory)
    if way == "delta":  # the largest states that fit, with the inputs of a convolution
        numbers = 2 * bct.head_dim * bct.slots
        size = max(D for D in range(2, numbers, 2) if numbers >= D * D + 3 * D)
        states = {"n_kv_head": bct.n_head, "head_dim": size, "conv": 2}
        return Hybrid, HybridConfig(**geometry | states, kinds=("state",) * bct.n_layer)
    if way == "full":
        return GPT, GPTConfig(**geometry)
    if way == "window":
        return windowed(window_of_equal_bytes(bct)), GPTConfig(**geometry)
    return WideBCT, bct


# --- Looking up -------------------------------------------------------------------------------------


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
        warmup = min(1, (step + 1) / WARMUP_STEPS)
        cosine = 0.52 + 0.48 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = rate * warmup * cosine
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
def recall_of(model: GPT, pairs: int) -> tuple[float, float]:
    """Return the share of at least ANSWERS values that the model recalls, the same for every model;
    and the bytes of a text's cache."""
    asked = min(pairs, MAX_ASKED)
    generator = torch.Generator().manual_seed(10**6 + pairs)
    ids, expected_values = draw_texts(pairs, asked, math.ceil(ANSWERS / asked), generator)
    cache = model.new_cache()
    recalled = model(ids, cache)[:, pairs:].argmax(dim=-1)
    recall = (recalled == expected_values).float().mean().item()
    return recall, cache.nbytes / len(ids)


def learned(rows: Results, way: str, size: Size, **setting: float) -> dict[int, float]:
    """Return the shares that a model of this setting (rate, steps, seed) recalls, by number of pairs.
    It is trained if it has no row."""
    if rows.ways_due([way], "learned", **setting):
        model = train_model(way, size=size, **setting)
        rows.add_values(way, setting, learned=[recall_of(model, n)[0] for n in size.pairs])
    return dict(zip(size.pairs, rows.figure(way, "learned", **setting).values, strict=True))


def measure_recall(rows: Results, way: str, size: Size) -> None:
    """Train models of a way until that helps no more, and append their recall."""

    def first_model(steps: int, rate: float) -> float:
        return learned(rows, way, size, steps=steps, rate=rate, seed=0)[PAIRS]

    rate = max(RATES, key=partial(first_model, 2 * size.steps))
    steps, recall_before = size.steps, 0.0
    while True:
        recall = first_model(steps, rate)
        if rows.ways_due([way], "right", steps=steps):
            rows.add_values(way, {"steps": steps}, right=[recall])
        if recall - recall_before < size.least_gain:
            break
        steps, recall_before = 2 * steps, recall
    models = [learned(rows, way, size, steps=steps, rate=rate, seed=n) for n in range(size.models)]
    for pairs in size.pairs:
        rows.add_values(way, {"pairs": pairs}, right=[recalls[pairs] for recalls in models])
    _, nbytes = recall_of(build_model(way, 0), PAIRS)
    rows.add_values(way, {}, bytes=[nbytes])


# --- Text -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pretraining(Recipe):
    """Training from scratch, from GPT-2's own starting weights."""

    kind, new_rate = "pretrained", 1.0
    model_class: type[nn.Module] = GPT


def recipe_of(way: str, size: Size) -> Pretraining:
    """Return the recipe of the model with this memory; all models read the same batches."""
    geometry = TEXT_GEOMETRY
    if way == "delta":
        geometry = geometry | {"n_inner": 512}  # an MLP of as many weights as GPT-2's
    model_class, config = kind_of_model(way, geometry, TEXT_MEMORIES[way])
    phase = Phase(size.text_steps, documents=ROWS, lists=0, context=config.n_ctx, lr=1e-3)
    return Pretraining(config, (phase,), documents=size.documents, model_class=model_class)


def measure_text(rows: Results, size: Size) -> None:
    """Train the models that are missing on text, and append their figures."""
    due = rows.ways_due(TEXT_MEMORIES, "facts", built="scratch")
    if not due:
        return
    state_folder = rows.path.parent / f"pretraining-{size.text_steps}"
    memories = {}
    for way in dict.fromkeys(["full", *due]):  # the others are compared with "full"
        model, _ = train(recipe_of(way, size), state_folder / way)
        memories[way] = Memory(way, model, lambda _, model=model: model.new_cache())
    rows.set_model_conditions(
        "GPT-2 of pocket's layers and width, trained from scratch",
        memories["full"].model,
        f"{size.text_steps:,} steps of {ROWS} rows of {TEXT_GEOMETRY['n_ctx']} tokens",
        f"{SUM['slots']} slots, or ours of {MEMORY['slots']} and the last {MEMORY['recent']} tokens, or a window or "
        "states of about as many bytes",
        f"{size.held_out.documents} held-out documents, {size.held_out.explanations} explanations",
        "one seed",
    )
    bounding.measure_quality(rows, {"built": "scratch"}, memories, size.held_out)


# --- The study --------------------------------------------------------------------------------------


def measure(rows: Results, quick: bool) -> None:
    """Append what is missing of each way."""
    size = QUICK if quick else Size()
    measure_text(rows, size)
    rows = rows.at(**LOOKING_UP)
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
    "pretraining",
    "one seed and few steps",
    measure,
    rows_of="bounding",
    beyond=[bleu_fine_tuned, sinks],
)
