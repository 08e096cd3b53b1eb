"""The card of a model: what it is, how it was trained, what it can do on held-out text."""

from __future__ import annotations

from pathlib import Path

import jinja2
import torch
from torch import nn

from gpt_kv_cache import GPT
from load_gpt2_weights import find_file
from pocket import coherence, corpus
from pocket.recipes import TEACHER, Recipe, size_of
from support.files import read_json

TEMPLATE = Path(__file__).resolve().parent / "card.md.jinja"


def card(recipe: Recipe, model: nn.Module, figures: dict) -> str:
    """Return the card of a model with the figures that measure() found."""
    steps, tokens = size_of(recipe)
    fields = {
        "recipe": recipe,
        "steps": steps,
        "tokens": tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "new": sum(p.numel() for name, p in model.named_parameters() if ".memory." in name),
        "figures": figures,
    }
    if recipe.kind == "teacher":
        fields["closed_book"] = len(corpus.closed_book_questions("test"))
        fields["samples"] = samples(recipe, model)
        fields["stories"] = stories(recipe, model)
    elif recipe.kind == "llama":
        fields["known"] = read_json(find_file("pocket", "figures.json"))
        fields["teacher"] = TEACHER.config
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["n"] = "{:,}".format
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(fields)


def written(recipe: Recipe, model: GPT, prompt: str, **options: object) -> str:
    """Return how a model goes on after a prompt."""
    ids = recipe.tokenizer.encode_ordinary(prompt)
    (text,) = coherence.written(model, recipe.tokenizer, [ids], **options)
    return text.removeprefix(prompt)


def samples(recipe: Recipe, model: GPT) -> list[tuple[corpus.Question, str]]:
    """Return questions, each with what a model answers, up to the next question that it asks itself."""
    questions = corpus.explain_questions("test", 1) + corpus.recall_questions("test", 4)[::3]
    questions.append(corpus.closed_book_questions("test")[0])
    texts = [written(recipe, model, question.prompt) for question in questions]
    answers = [text.partition("\nQuestion:")[0] for text in texts]
    return [*zip(questions, answers, strict=True)]


def stories(recipe: Recipe, model: GPT) -> list[tuple[str, str]]:
    """Return three openings of stories, each with how a model goes on at temperature 0.8."""
    found = []
    for seed, opening in enumerate(coherence.openings("test", 3)):
        generator = torch.Generator().manual_seed(seed)
        text = written(recipe, model, opening, temperature=0.8, generator=generator)
        found.append((opening, text))
    return found
