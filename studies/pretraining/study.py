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
from formats.tokenizers import read_tokenizer
from gpt_bounded_cache import GPT, BCTConfig, GPTConfig
from hybrid_kv_cache import Hybrid, HybridConfig
from pocket.evaluation import window_of_equal_bytes, windowed
from pocket.recipes import MEMORY, Phase, Recipe, steps_and_tokens
from pocket.tokenizer import TOKENIZER, VOCABULARY
from pocket.training import train
from studies.bounding import study as bounding
from studies.bounding.claims import bleu_fine_tuned, delta_rule, our_rule, recall, sinks
from studies.core import run_study
from studies.recall.study import WideBCT, states_in_place_of_slots
from studies.results import Results

GEOMETRY = {"vocab_size": VOCABULARY, "n_ctx": 512, "n_layer": 6, "n_head": 6, "n_embd": 192}
MEMORIES = {  # options of a BCTConfig
    "full": {},
    "sum": {"rule": "sum", "slots": sum(MEMORY.values()), "recent": 0},
    "ours": MEMORY,
    "window": {},
    "delta": {"rule": "sum", "slots": sum(MEMORY.values()), "recent": 0},  # the bytes of its states
}


@dataclass(frozen=True)
class Pretraining(Recipe):
    """Training from scratch, from GPT-2's own starting weights."""

    kind, new_rate = "pretrained", 1.0
    window: int = 0

    @property
    def model_class(self) -> Callable[[GPTConfig], nn.Module]:
        if isinstance(self.config, HybridConfig):
            return Hybrid
        if isinstance(self.config, BCTConfig):
            return WideBCT
        return windowed(self.window) if self.window else GPT


def recipe_of(way: str, steps: int, documents: int) -> Pretraining:
    """Return the recipe of the model with this memory; all models read the same batches."""
    options = MEMORIES[way]
    config = BCTConfig(**GEOMETRY, **options) if options else GPTConfig(**GEOMETRY)
    if way == "delta":  # with an MLP of as many weights as GPT-2's
        kinds = ("state",) * config.n_layer
        states = states_in_place_of_slots(config)
        config = HybridConfig(**GEOMETRY | states, n_inner=512, kinds=kinds)
    window = window_of_equal_bytes(BCTConfig(**GEOMETRY, **MEMORY)) if way == "window" else 0
    phase = Phase(steps=steps, documents=5, lists=0, context=config.n_ctx, lr=1e-3)
    return Pretraining(config, (phase,), documents=documents, window=window)


def measure(rows: Results, quick: bool) -> None:
    """Train the models and append their figures."""
    steps, documents = (2, 200) if quick else (1500, 20_000)
    size = bounding.QUICK if quick else bounding.Size()
    setting = {"built": "scratch"}
    due = rows.ways_due(MEMORIES, "facts", **setting)
    if not due:
        return
    recipes = {way: recipe_of(way, steps, documents) for way in MEMORIES}
    state_folder = rows.path.parent / f"pretraining-{steps}"
    memories = {}
    for way in dict.fromkeys(["full", *due]):  # the others are compared with "full"
        model, _ = train(recipes[way], state_folder / way)
        memories[way] = Memory(way, model, lambda _, model=model: model.new_cache())
    _, tokens = steps_and_tokens(recipes["full"])
    state_size = recipes["delta"].config.head_dim
    weights = sum(p.numel() for p in Hybrid(recipes["delta"].config).parameters())
    rows.set_model_conditions(
        "GPT-2 of pocket's layers and width, trained from scratch",
        memories["full"].model,
        f"{steps:,} steps, {tokens / 1e6:.1f} million tokens in rows of {GEOMETRY['n_ctx']}",
        f"{MEMORIES['sum']['slots']} slots, or ours of {MEMORY['slots']} and the last {MEMORY['recent']} tokens, "
        f"or a window of {recipes['window'].window}, or a state of {state_size} by {state_size} ({weights:,} parameters)",
        f"{size.documents} held-out documents, {size.explanations} explanations",
        "one seed",
    )
    bounding.measure_quality(rows, setting, memories, read_tokenizer(TOKENIZER), size)


main = partial(
    run_study,
    __doc__,
    "pretraining",
    "two steps",
    measure,
    rows_of="bounding",
    beyond=[bleu_fine_tuned, recall, our_rule, delta_rule, sinks],
)
