"""Language models built as BCTs, trained from scratch on pocket's text, beside other memories.

`python3 -m studies.pretraining` takes an hour and a half on one core, and goes on where it was
interrupted. Five models of nearly pocket's size read the same batches, from their own starting
weights: full attention, BCT by its source's sum rule and by ours, a window of equal bytes, and the
delta rule, a state of hybrid_kv_cache.py in each layer, of at most as many bytes as the sum's.
Metrics are those of studies.bounding, in the setting built=scratch. `studies.recall` shows how much
a memory holds; this study shows its effect on text.

Source: Yi et al. 2024 (BCT).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from demos.memories import Memory
from gpt_bounded_cache import GPT, GPTConfig
from pocket.recipes import MEMORY, Phase, Recipe
from pocket.tokenizer import VOCABULARY
from pocket.training import train
from studies.bounding import study as bounding
from studies.bounding.claims import bleu_fine_tuned, delta_rule, our_rule, recall, sinks
from studies.core import run_study
from studies.recall.study import kind_of_model
from studies.results import Results

GEOMETRY = {"vocab_size": VOCABULARY, "n_ctx": 512, "n_layer": 6, "n_head": 6, "n_embd": 192}
SUM = {"rule": "sum", "slots": sum(MEMORY.values()), "recent": 0}
MEMORIES = {"full": {}, "sum": SUM, "ours": MEMORY, "window": MEMORY, "delta": SUM}
ROWS = 5  # in a batch


@dataclass(frozen=True)
class Pretraining(Recipe):
    """Training from scratch, from GPT-2's own starting weights."""

    kind, new_rate = "pretrained", 1.0
    model_class: Callable[[GPTConfig], nn.Module] = GPT


def recipe_of(way: str, steps: int, documents: int) -> Pretraining:
    """Return the recipe of the model with this memory; all models read the same batches."""
    geometry = GEOMETRY
    if way == "delta":
        geometry = GEOMETRY | {"n_inner": 512}  # an MLP of as many weights as GPT-2's
    model_class, config = kind_of_model(way, geometry, MEMORIES[way])
    phase = Phase(steps=steps, documents=ROWS, lists=0, context=config.n_ctx, lr=1e-3)
    return Pretraining(config, (phase,), documents=documents, model_class=model_class)


def measure(rows: Results, quick: bool) -> None:
    """Train the models and append their figures."""
    steps, documents = (2, 200) if quick else (1500, 20_000)
    size = bounding.QUICK if quick else bounding.Size()
    setting = {"built": "scratch"}
    due = rows.ways_due(MEMORIES, "facts", **setting)
    if not due:
        return
    state_folder = rows.path.parent / f"pretraining-{steps}"
    memories = {}
    for way in dict.fromkeys(["full", *due]):  # the others are compared with "full"
        model, _ = train(recipe_of(way, steps, documents), state_folder / way)
        memories[way] = Memory(way, model, lambda _, model=model: model.new_cache())
    rows.set_model_conditions(
        "GPT-2 of pocket's layers and width, trained from scratch",
        memories["full"].model,
        f"{steps:,} steps of {ROWS} rows of {GEOMETRY['n_ctx']} tokens",
        f"{SUM['slots']} slots, or ours of {MEMORY['slots']} and the last {MEMORY['recent']} tokens, or a window or "
        "states of about as many bytes",
        f"{size.documents} held-out documents, {size.explanations} explanations",
        "one seed",
    )
    bounding.measure_quality(rows, setting, memories, size)


main = partial(
    run_study,
    __doc__,
    "pretraining",
    "two steps",
    measure,
    rows_of="bounding",
    beyond=[bleu_fine_tuned, recall, our_rule, delta_rule, sinks],
)
