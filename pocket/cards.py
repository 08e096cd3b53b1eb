"""The card of a model: what it is, how it was trained, what it can do on held-out text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gpt_baseline import GPT, generate
from pocket import coherence, corpus
from pocket.recipes import MEMORY, STEPS, TEACHER, Pruning, Recipe, size_of
from support.files import read_json
from support.tables import table

EARLIER = (
    Path(__file__).resolve().parent / "first_generation.json"
)  # of the models that these have replaced

ABOUT = {
    "teacher": """\
A GPT-2 with {parameters:,} parameters: {c.n_layer} layers, {c.n_head} heads of {c.head_dim}, width {c.n_embd},
context {c.n_ctx:,}, vocabulary {c.vocab_size:,}. Trained by `python pocket/train.py teacher` on {documents:,}
generated documents of `pocket/corpus.py`: {steps:,} steps, {tokens:.1f} million tokens. The weights are fp16,
with Hugging Face's key names.

{phases}

Training starts from an induction circuit (`start_as_copier` in `pocket/starts.py`): without one, a model of this size
learns to write fluently but not to look names up in its prompt. Random lists come twice, and only the second time
counts. In shuffled documents half of the vocabulary has changed places, differently in every row. "answers" is the
weight of an answer's token in the loss. "long rows" are those of every fifth step (documents, random lists, shuffled),
each of {c.n_ctx:,} tokens.""",
    "bct": """\
`{init}` with BCT's bounded memory: each head has {c.slots} slots and the {c.recent} most recent tokens, however
long the text is. {parameters:,} parameters, {new:,} of them new. `python pocket/train.py bct{rule}` fine-tuned it on
the predictions of `{init}` with full attention: {steps:,} steps, {tokens:.1f} million tokens. The weights
are fp16. A plain GPT-2 can't load it; `gpt_bounded_cache.BCT` can.""",
    "rotary": """\
`{init}` with rotary instead of learned positions, to compare the two kinds: {parameters:,}
parameters. `python pocket/train.py rotary` fine-tuned it on the predictions of `{init}`: {steps:,} steps,
{tokens:.1f} million tokens. The weights are fp16. `pocket/rope.py` has its class; a plain GPT-2 can't load it.""",
    "student": """\
A student of `{init}`, for `overfill.py`: with as many layers, heads and dimensions per head, so that the teacher's
cache fits, but with {c.n_embd} hidden dimensions and {c.n_inner} neurons, the teacher's most active ones;
{parameters:,} parameters. `{command}` distilled it from the predictions of
`{init}`: {steps:,} steps, {tokens:.1f} million tokens{begun}. In training it
{reads}{dropout}.
The weights are fp16.""",
}
READS = {
    "alone": "read its own cache only",
    "prompt": "read the teacher's cache of the first part of each text, and its own cache of the rest",
    "segments": "read the teacher's cache up to a segment and its own from there on, in segments of 4 tokens or more",
}
NOTES = {
    "teacher": """\
- perplexity: per token of 300 documents
- closed_book: {closed_book} questions on the facts of the invented world
- recall: 300 questions on facts stated early in prompts of at most 1,300 characters, in three wordings on each of 100
  texts; no document has more than 1,900, so nothing here shows recall over the whole context
- name: nats for the rest of a new person's name, at the first mention and (name_nats) at all later ones
- share: answered exactly, to the end of the line, by greedy decoding; nats: mean loss per token of the answer
- list: loss per token of a list at the first reading, and at its repetition
- coherent: of 200 stories that the model wrote from their openings, greedily and (sampled) at temperature 0.8, those
  that hold together to their end; paid_per_story: their threads that are paid off, and paid_share those of them that
  agree with what was stated (`pocket/coherence.py`; the corpus's own stories: 1, 3 and 1)
- perplexity_before_512, after_512: at positions 256 to 511, and 512 to {last:,}, of rows of documents

The goals of its training, and which were reached: [pocket](../README.md#figures).

## What it writes (greedy, in brackets)

{samples}

## Three stories (unchosen: temperature 0.8, seeds 0 to 2; in brackets)

{stories}

The first generation after the same openings:

{earlier}""",
    "bct": """\
The figures are explained on the card of {link}. The windows run on `{init}` as it is, at equal
bytes of memory. The gain from each part of BCT in a short fine-tuning, and from fine-tuning a sliding window, is in
[`ablation.json`](ablation.json) (split "valid"; `python pocket/train.py ablation`).""",
    "rotary": "The figures are explained on the card of {link}.",
    "student": "The figures are explained on the card of {link}.",
}
LOSS = {
    True: "The loss is the divergence from `{init}`; answer tokens weigh {answers:g} times as much.",
    False: """\
From phase {shuffled} on the loss is higher because the model also reads shuffled documents, and answers weigh more.""",
}
KL = """\
Mean KL(teacher || student) in nats after a prompt of {} tokens, by the cache that the student reads: its
own; the teacher's cache of the prompt; the same, refreshed every few tokens."""


def card(recipe: Recipe, model: nn.Module, figures: dict) -> str:
    """Return the card of a model with the figures that measure() found."""
    phase, (steps, tokens) = recipe.phases[0], size_of(recipe)
    ours, fields = recipe.init in (None, "pocket"), {}
    if recipe.kind == "teacher":
        phases = [
            [
                f"{i}",
                f"{p.steps:,}",
                f"{p.documents}",
                f"{p.shuffled}",
                f"{p.lists}",
                f"{p.context:,}",
                f"{p.lr:g}",
                f"{p.answers:g}",
                ", ".join(map(str, p.long)) if any(p.long) else "",
            ]
            for i, p in enumerate(recipe.phases, 1)
        ]
        header = "phase|steps|rows of documents|shuffled|random lists|tokens in a row|learning rate|answers|long rows"
        fields = {
            "phases": table(header.split("|"), phases, markdown=True),
            "samples": samples(recipe, model),
            "stories": quoted(stories(recipe, model)),
            "earlier": quoted(read_json(EARLIER)["stories"]),
            "closed_book": len(corpus.closed_book_questions("test")),
            "last": recipe.config.n_ctx - 2,
            "shuffled": next(i for i, p in enumerate(recipe.phases, 1) if p.shuffled),
        }
    fields |= command_of(recipe) | {
        "rule": " --rule sum" * (recipe.name == "bct-sum"),
        "link": "[pocket/teacher](../teacher/README.md)" if ours else "pocket/teacher",
        "c": recipe.config,
        "init": recipe.init,
        "documents": recipe.documents,
        "steps": steps,
        "tokens": tokens / 1e6,
        "answers": phase.answers,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "new": sum(p.numel() for key, p in model.named_parameters() if ".memory." in key),
    }
    about, notes, loss = ABOUT[recipe.kind], NOTES[recipe.kind], LOSS[recipe.init is not None]
    held_out = '## Held out (split "test": other people, objects and wordings)'
    parts = [
        f"# {'pocket/' * ours}{recipe.name}",
        about.format(**fields),
        held_out,
        *tables(recipe, figures),
        notes.format(**fields),
        "![Training loss](loss.png)",
        loss.format(**fields),
    ]
    return "\n\n".join(parts) + "\n"


def tables(recipe: Recipe, figures: dict) -> list[str]:
    """Return the figures as tables, each figure a row and each model a column; the first generation's are the last."""
    before, found = earlier(recipe), []
    if recipe.kind == "rotary":
        columns = {f"`{recipe.init}`": figures["learned"], "rotary": figures["rotary"]}
    elif recipe.kind == "bct":
        window = figures["window"]["tokens"]
        columns = {
            "full attention": figures["full"],
            "BCT": figures["bct"],
            f"sliding window of {window}": figures["window"],
            f"4 sinks + window of {window - 4}": figures["sinks"],
        }
    elif recipe.kind == "student":
        rows = [["this model", *(f"{value:.3f}" for value in figures["kl"].values())]]
        if before:
            name = (
                f"first generation, after {3 * read_json(EARLIER)['n_ctx'] // 8}, from its teacher"
            )
            rows.append([name, *(f"{value:.3f}" for value in before["kl"].values())])
        found = [
            KL.format(3 * recipe.config.n_ctx // 8),
            table(["", *figures["kl"]], rows, markdown=True),
            "Alone, on its own cache:",
        ]
        columns = {"this model": figures["student"]}
    else:
        columns = {"this model": figures}
    first = next(iter(columns.values()))
    if before:
        columns[f"{recipe.kind}, first generation"] = before.get(recipe.kind, before)
    rows = [
        [name, *(f"{column[name]:.4f}" if name in column else "" for column in columns.values())]
        for name in first
    ]
    return [*found, table(["figure", *columns], rows, markdown=True)]


def earlier(recipe: Recipe) -> dict:
    """Return the figures of the model that a shipped one has replaced; {} for the model of any other recipe."""
    steps = STEPS.get(recipe.name) or STEPS.get(recipe.kind, size_of(TEACHER)[0])
    shipped = size_of(recipe)[0] == steps and recipe.init in (None, "pocket")
    memory = {name: getattr(recipe.config, name, size) for name, size in MEMORY.items()}
    return read_json(EARLIER).get(recipe.name, {}) if shipped and memory == MEMORY else {}


def command_of(recipe: Recipe) -> dict[str, str]:
    """Return the fields of the text about a student: its command, and its training."""
    if not isinstance(recipe, Pruning):
        return {}
    kind, ours = recipe.name.partition("-")[2], recipe.init == "pocket"
    command = "python pocket/train.py student" + f" --kind {kind}" * bool(kind)
    return {
        "command": command + f" --init {recipe.init} --out FOLDER" * (not ours),
        "begun": f", from `{recipe.begin}` on" if recipe.begin else "",
        "reads": READS[recipe.mode],
        "dropout": f", with dropout of {recipe.config.dropout}" if recipe.config.dropout else "",
    }


def samples(recipe: Recipe, model: GPT) -> str:
    """Return what a model writes when it is asked, beside the reference."""
    tokenizer, told = recipe.tokenizer, []
    explained = corpus.explain_questions("test", 1)
    for question in [
        *explained,
        *corpus.recall_questions("test", 4)[::3],
        corpus.closed_book_questions("test")[0],
    ]:
        ids = torch.tensor([tokenizer.encode_ordinary(question.prompt)])
        new = [t.item() for t in generate(model, ids, 300, stop_id=tokenizer.eot_token)]
        text = tokenizer.decode(new).removesuffix("<|endoftext|>")
        if question not in explained:
            text = text.partition("\n")[0]  # the answer to a short question ends with its line
        told.append(f"```\n{question.prompt}[{text}]\n```\nReference: {question.answer}")
    return "\n\n".join(told)


def stories(recipe: Recipe, model: GPT) -> list[str]:
    """Return three stories as a model goes on after their first sentences, at temperature 0.8, seeds 0 to 2."""
    told, tokenizer = [], recipe.tokenizer
    for seed, opening in enumerate(coherence.openings("test", 3)):
        ids = torch.tensor([tokenizer.encode_ordinary(opening)])
        new = generate(
            model,
            ids,
            400,
            temperature=0.8,
            generator=torch.Generator().manual_seed(seed),
            stop_id=tokenizer.eot_token,
        )
        told.append(
            f"{opening}[{tokenizer.decode([t.item() for t in new]).removesuffix('<|endoftext|>')}]"
        )
    return told


def quoted(texts: list[str]) -> str:
    """Return texts as Markdown."""
    return "\n\n".join(f"```\n{text.strip()}\n```" for text in texts)
