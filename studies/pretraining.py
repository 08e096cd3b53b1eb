"""Language models built as BCTs: nearly of pocket's size, trained from scratch on the same text, each with its memory.

Full attention, BCT by its source's sum rule and by ours, and a window of equal bytes read the same batches, from
GPT-2's own starting weights. `python3 -m studies.pretraining` takes about an hour on one core, and goes on where it
was interrupted. `studies.recall` shows how much a memory holds; this study shows its effect on text.

Source: Yi et al. 2024 (BCT).
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt_bounded_cache import BCT, GPT, BoundedMemory, GPTConfig, KVCache, SlidingWindowCache
from load_gpt2_weights import read_tokenizer
from pocket.evaluation import Windowed, window_of_equal_bytes
from pocket.recipes import MEMORY, Phase, Recipe, size_of
from pocket.tokenizer import TOKENIZER, VOCABULARY
from pocket.training import train
from studies import bounding
from studies.bounding import SOURCE, THEIRS, WORSE, Memory, bleu_claim
from studies.protocol import Claim, StudyLine, claim_tables, conditions_of, judged, under, with_interval
from studies.recall import SUM, SourceBlock, SourceConfig
from support.cli import whole_number, writable_folder
from support.conditions import conditions
from support.figures import figure
from support.files import write_json
from support.tables import Table, page

GEOMETRY = {"vocab_size": VOCABULARY, "n_ctx": 512, "n_layer": 6, "n_head": 6, "n_embd": 192}
FULL, SUMS, OURS, WINDOW = "full attention", "BCT, the source's sum", "BCT, our rule", "window of equal bytes"
MEMORIES: dict[str, dict[str, Any]] = {  # options of a SourceConfig
    FULL: {},
    SUMS: SUM | {"slots": sum(MEMORY.values()), "recent": 0},
    OURS: MEMORY,
    WINDOW: {},
}
EVERY = 25  # steps whose mean loss is recorded


class SourceBCT(BCT):
    """A BCT with the options of a SourceConfig, and addresses of N(0, 1): narrow ones write to all slots alike."""

    config_class, block_class = SourceConfig, SourceBlock

    def init_weights(self) -> None:
        super().init_weights()
        for block in self.h:
            nn.init.normal_(block.memory.addresses)


@dataclass(frozen=True)
class Pretraining(Recipe):
    """Training from scratch, from GPT-2's own starting weights."""

    kind, new_rate = "pretrained", 1.0
    window: int = 0

    @property
    def model_class(self) -> Callable[[GPTConfig], nn.Module]:
        if isinstance(self.config, SourceConfig):
            return SourceBCT
        return (lambda config: Windowed(GPT(config), self.window)) if self.window else GPT


def recipe_of(memory: str, steps: int, documents: int) -> Pretraining:
    """Return the recipe of the model with this memory; the batches are those of all others."""
    config = SourceConfig(**GEOMETRY, **MEMORIES[memory]) if MEMORIES[memory] else GPTConfig(**GEOMETRY)
    window = window_of_equal_bytes(SourceConfig(**GEOMETRY, **MEMORY)) if memory == WINDOW else 0
    phase = Phase(steps=steps, documents=5, lists=0, context=config.n_ctx, lr=1e-3)
    return Pretraining(config, (phase,), documents=documents, window=window)


def measured(steps: int, documents: int, size: bounding.Size, state: Path) -> dict[str, Any]:
    """Train the models, each in its folder of `state`, and return the record: losses, and quality on held-out text."""
    memories, losses, sizes = {}, {}, {}
    for name in MEMORIES:
        recipe = recipe_of(name, steps, documents)
        model, losses[name] = train(recipe, state / name.replace(" ", "-"))
        new_cache = KVCache if name == FULL else partial(SlidingWindowCache, recipe.window)
        if isinstance(model, SourceBCT):
            new_cache = BoundedMemory
        memories[name] = memory = Memory(name, model.model if recipe.window else model, new_cache)
        cache = memory.new_cache()
        with torch.no_grad():
            memory.model(torch.zeros(1, recipe.config.n_ctx, dtype=torch.long), cache)
        sizes[name] = {"parameters": sum(p.numel() for p in model.parameters()), "bytes": cache.nbytes}
    figures, _ = bounding.quality(memories, read_tokenizer(TOKENIZER), size)
    return {
        "conditions": conditions("GPT-2 of pocket's layers and width, trained from scratch", memories[FULL].model),
        "steps": steps, "context": recipe.config.n_ctx, "tokens": size_of(recipe)[1], "texts": asdict(size),
        "window": recipe.window,
        "memories": {name: figures[name] | sizes[name] | {"losses": [
            statistics.mean(losses[name][i : i + EVERY]) for i in range(0, steps, EVERY)]} for name in memories},
    }  # fmt: skip


def conditions_line(record: dict[str, Any]) -> str:
    """Return the conditions of the study as a line."""
    texts, slots = record["texts"], MEMORIES[SUMS]["slots"]
    return conditions_of(record, f"{record['steps']:,} steps, {record['tokens'] / 1e6:.1f} million tokens in rows of "
                         f"{record['context']}; {slots} slots, or ours of {MEMORY['slots']} and the last "
                         f"{MEMORY['recent']} tokens; {texts['documents']} held-out documents, "
                         f"{texts['explanations']} explanations; one seed")  # fmt: skip


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return the quality of each model."""
    rows = [[f"{name} ({record['window']} tokens)" if name == WINDOW else name, f"{m['parameters']:,}",
             f"{m['bytes']:,}", f"{m['losses'][-1]:.3f}", f"{m['perplexity']:.2f}",
             with_interval([m["perplexity_against_full"][x] for x in ("change", "low", "high")], "+.1%"),
             f"{m['perplexity_of_long_texts']:.2f}", f"{m['recall_share']:.0%}", f"{m['bleu']:.1f}"]
            for name, m in record["memories"].items()]  # fmt: skip
    header = ["trained from scratch with", "parameters", "bytes of cache", "last loss", "perplexity",
              "against full attention", "of long texts", "early facts right", "BLEU"]  # fmt: skip
    return [
        f"Every model reads the same {record['steps']:,} batches, {record['tokens'] / 1e6:.1f} million tokens. "
        f"{conditions_line(record)}.",
        Table(header, rows),
        f"Long texts have {record['texts']['contexts'] * record['context']:,} tokens. BLEU compares explanations with "
        "the corpus's own. So short a training teaches no model to look facts up, full attention included.",
    ]


def claims(record: dict[str, Any]) -> list[Claim]:
    """Return what the study decides of the source's claims, and our own questions: nothing, if full attention isn't
    ahead of the window, since so short a training doesn't tell memories apart by what they hold."""
    full, sums, ours, window = (record["memories"][name] for name in (FULL, SUMS, OURS, WINDOW))
    worse, worse_ours, local = ([m["perplexity_against_full"][x] for x in ("change", "low", "high")]
                                for m in (sums, ours, window))  # fmt: skip
    fair = local[1] > 0
    beside = (f"; a window of equal bytes {window['perplexity']:.2f}: {with_interval(local, '+.1%')}, full attention "
              f"is {'' if fair else 'not '}ahead of it")  # fmt: skip
    small = ("built as BCTs, but of 3 million parameters, 32 slots, read by their summed keys, few tokens of training, "
             "one learning rate that was tuned for no model, and one seed: the interval is over texts; decided only "
             "if full attention is ahead of the window, else it lacks training itself")  # fmt: skip
    here = conditions_line(record)
    return under(
        SOURCE, THEIRS, here,
        judged("Abstract, text", "significantly reduces memory usage while maintaining the model's inference quality",
               fair and worse[2] < WORSE, f"perplexity by the source's rule {sums['perplexity']:.2f}, by full "
               f"attention {full['perplexity']:.2f}: {with_interval(worse, '+.1%')}{beside}", f"partly: {small}; up to "
               f"{WORSE:.0%} worse (our threshold) counts as maintained", fair and worse[1] > WORSE),
        bleu_claim("4.3, from scratch", full, sums, "models and terms as in the row on perplexity", fair),
    ) + under(
        "", "", here,
        judged("", f"Built with it, is our rule's perplexity no more than {WORSE:.0%} (our threshold) above full "
               "attention's?", fair and worse_ours[2] < WORSE, f"{ours['perplexity']:.2f} against "
               f"{full['perplexity']:.2f}: {with_interval(worse_ours, '+.1%')}{beside}", "",
               fair and worse_ours[1] > WORSE),
    )  # fmt: skip


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw the loss of training over tokens, a curve a memory."""
    def draw_on(axes: Any) -> None:
        for name, memory in record["memories"].items():
            a_point = record["tokens"] / record["steps"] * EVERY / 1e6
            axes.plot([a_point * (i + 1) for i in range(len(memory["losses"]))], memory["losses"], label=name)

    figure(out / "loss.png", draw_on, title="Training from scratch", xlabel="million tokens",
           ylabel="loss (nats per token)")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "pretraining", "two steps", model="")
    cli.add_argument("--steps", type=whole_number(1), metavar="N", help="steps of training; default: 1,500")
    cli.add_argument("--state", default="runs/pretraining", type=writable_folder, metavar="FOLDER",
                     help="where each model's training is kept, to go on from after an interruption")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    with cli.parse(argv) as args:
        torch.set_num_threads(args.threads)
        steps, documents, size = (2, 200, bounding.QUICK) if args.quick else (1500, 20_000, bounding.Size(2))
        record = measured(args.steps or steps, documents, size, args.state / ("quick" if args.quick else "whole"))
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "summary.json", record)
        draw(record, args.out)
        print(page([*tables(record), *([] if args.quick else claim_tables(claims(record))), f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
