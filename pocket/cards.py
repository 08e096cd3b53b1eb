"""Model cards."""

from __future__ import annotations

import tiktoken
import torch

import gpt_bounded_cache as bounded
from gpt_baseline import GPT, generate
from pocket import corpus, rope
from pocket.pruning import Student
from pocket.recipes import KINDS, Distillation, Pruning, Recipe, size_of


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
