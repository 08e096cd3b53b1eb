"""The card of a model: what it is, how it was trained, what it can do on held-out text."""

from __future__ import annotations

from pathlib import Path

import jinja2
import torch
from torch import nn

from gpt_baseline import GPT, generate
from load_gpt2_weights import find_file
from pocket import coherence, corpus
from pocket.recipes import TEACHER, Recipe, size_of
from support.files import read_json
from support.tables import table

TEMPLATE = Path(__file__).resolve().parent / "card.md.jinja"


def card(recipe: Recipe, model: nn.Module, figures: dict) -> str:
    """Return the card of a model with the figures that measure() found."""
    ours = recipe.init in (None, "pocket")
    steps, tokens = size_of(recipe)
    fields = {
        "recipe": recipe,
        "kind": recipe.kind,
        "c": recipe.config,
        "ours": ours,
        "link": "[pocket/teacher](../teacher/README.md)" if ours else "pocket/teacher",
        "steps": steps,
        "tokens": f"{tokens / 1e6:.1f}",
        "answers": f"{recipe.phases[0].answers:g}",
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "new": sum(p.numel() for name, p in model.named_parameters() if ".memory." in name),
        "figures": figures_table(recipe, figures),
    }
    if recipe.kind == "teacher":
        fields["phases"] = phases_table(recipe)
        fields["closed_book"] = len(corpus.closed_book_questions("test"))
        fields["samples"] = samples(recipe, model)
        fields["stories"] = stories(recipe, model)
        mixed = [number for number, p in enumerate(recipe.phases, 1) if p.shuffled]
        fields["shuffled"] = mixed[0]
    elif recipe.kind == "llama":
        fields["nbytes"] = 8 * model.config.n_layer * model.config.n_kv_head * model.config.head_dim
        fields["teacher_nbytes"] = 8 * TEACHER.config.n_layer * TEACHER.config.n_embd
        fields["teacher_tokens"] = f"{size_of(TEACHER)[1] / 1e6:.1f}"
    elif recipe.kind == "student":
        kind = recipe.name.partition("-")[2]
        fields["option"] = f" --kind {kind}" if kind else ""
        nats = [f"{value:.3f}" for value in figures["kl"].values()]
        rows = [["this model", *nats]]
        fields["divergences"] = table(["", *figures["kl"]], rows, markdown=True)
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["n"] = "{:,}".format
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(fields)


def figures_table(recipe: Recipe, figures: dict) -> str:
    """Return the figures as a table: each figure a row, and each model a column."""
    columns = {"this model": figures}
    if recipe.kind == "llama":
        columns = {
            f"`{recipe.init}`": read_json(find_file(recipe.init, "figures.json")),
            "llama": figures,
        }
    elif recipe.kind == "student":
        columns = {"this model": figures["student"]}
    elif recipe.kind == "bct":
        window = figures["window"]["tokens"]
        columns = {
            "full attention": figures["full"],
            "BCT": figures["bct"],
            f"sliding window of {window}": figures["window"],
            f"4 sinks + window of {window - 4}": figures["sinks"],
        }
    first = next(iter(columns.values()))
    rows = [[name, *(f"{column[name]:.4f}" for column in columns.values())] for name in first]
    return table(["figure", *columns], rows, markdown=True)


def phases_table(recipe: Recipe) -> str:
    """Return the phases of a training as a table."""
    header = (
        "phase|steps|rows of documents|shuffled|random lists|tokens in a row|learning rate|answers|"
        "long rows"
    )
    rows = []
    for number, p in enumerate(recipe.phases, 1):
        sizes = [f"{n:,}" for n in (number, p.steps, p.documents, p.shuffled, p.lists, p.context)]
        long = ", ".join(map(str, p.long)) if any(p.long) else ""
        rows.append([*sizes, f"{p.lr:g}", f"{p.answers:g}", long])
    return table(header.split("|"), rows, markdown=True)


def written(recipe: Recipe, model: GPT, prompt: str, n: int, **options: object) -> str:
    """Return how a model goes on after a prompt."""
    tokenizer = recipe.tokenizer
    ids = torch.tensor([tokenizer.encode_ordinary(prompt)])
    new = generate(model, ids, n, stop_id=tokenizer.eot_token, **options)
    return tokenizer.decode([token.item() for token in new]).removesuffix("<|endoftext|>")


def samples(recipe: Recipe, model: GPT) -> str:
    """Return what a model writes when it is asked, beside the reference."""
    explained = corpus.explain_questions("test", 1)
    short = [*corpus.recall_questions("test", 4)[::3], corpus.closed_book_questions("test")[0]]
    told = []
    for question in explained + short:
        text = written(recipe, model, question.prompt, 300)
        if question in short:
            text = text.partition("\n")[0]  # the answer ends with its line
        told.append(f"```\n{question.prompt}[{text}]\n```\nReference: {question.answer}")
    return "\n\n".join(told)


def stories(recipe: Recipe, model: GPT) -> str:
    """Return three stories as a model goes on after their first sentences, at temperature 0.8, seeds 0 to 2."""
    told = []
    for seed, opening in enumerate(coherence.openings("test", 3)):
        generator = torch.Generator().manual_seed(seed)
        text = written(recipe, model, opening, 400, temperature=0.8, generator=generator)
        told.append(f"```\n{opening}[{text}]\n```")
    return "\n\n".join(told)
