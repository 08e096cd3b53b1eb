"""The card of a trained model: what it is, its figures on held-out text, and what it writes."""

from typing import Any

import torch

from formats.checkpoints import open_checkpoint
from pocket import coherence, corpus
from pocket.recipes import TEACHER, Recipe, steps_and_tokens
from support.files import read_json
from support.tables import Table, page

Part = str | Table
INTRODUCTIONS = {  # by the kind of a recipe
    "teacher": """\
A GPT-2 with {parameters:,} parameters: {c.n_layer} layers, {c.n_head} heads of {c.head_dim}, width {c.n_embd},
context {c.n_ctx:,}, vocabulary {c.vocab_size:,}. Trained by `python3 pocket/train.py teacher` on {recipe.documents:,}
generated documents of `pocket/corpus.py`: {steps:,} steps, {tokens:.1f} million tokens. The weights are fp16,
with Hugging Face's key names.""",
    "llama": """\
`pocket` as a Llama, with Hugging Face's names: {parameters:,} parameters, {c.n_layer} layers, \
{c.n_head} heads of {c.head_dim}, width {c.n_embd},
context {c.n_ctx:,}. Its {c.n_head} heads of queries share {c.n_kv_head} heads of keys and values, so that a token takes
{cached:,} bytes of a cache in float32 instead of the {cached_by_pocket:,} of `pocket`.

Trained by `python3 pocket/train.py llama` on the recipe of {teacher_card}: the same batches in the same
order, {steps:,} steps, {tokens:.1f} million tokens. It starts from the same induction circuit, laid out for keys
that turn (`start_llama_as_copier` in `pocket/starts.py`). The weights are fp16.""",
    "bct": """\
`{recipe.init}` with BCT's bounded memory: each head has {c.slots} slots and the {c.recent} most recent tokens, however
long the text is. {parameters:,} parameters, {new:,} of them new. `python3 pocket/train.py {command}` fine-tuned it on
the predictions of `{recipe.init}` with full attention: {steps:,} steps, {tokens:.1f} million tokens. The weights
are fp16. A plain GPT-2 can't load it; `gpt_bounded_cache.BCT` can.""",
    "student": """\
A student of `{recipe.init}`, for `overfill.py`: with as many layers, heads and dimensions per head, so that the teacher's
cache fits, but with {c.n_embd} hidden dimensions and {c.n_inner} neurons, the teacher's most active ones;
{parameters:,} parameters. `python3 pocket/train.py {command}` distilled it from the predictions of
`{recipe.init}`: {steps:,} steps, {tokens:.1f} million tokens{begin}. In training it
{has_read}.
The weights are fp16.""",
}
STUDENT_READS = {  # by the mode of its recipe
    "alone": "read its own cache only",
    "prompt": "read the teacher's cache of the first part of each text, and its own cache of the rest",
    "segments": "read the teacher's cache up to a segment and its own from there on, in segments of 4 tokens or more",
}
PHASES = (
    "phase, steps, rows of documents, shuffled, random lists, tokens in a row, learning rate, answers, long rows"
).split(", ")
START = """\
Training starts from an induction circuit (`start_as_copier` in `pocket/starts.py`): without one, a model of this size
learns to write fluently but not to look names up in its prompt. Random lists come twice, and only the second time
counts. In shuffled documents half of the vocabulary has changed places, differently in every row. "answers" is the
weight of an answer's token in the loss. "long rows" are those of every fifth step (documents, random lists, shuffled),
each of {:,} tokens."""
DIVERGENCE = """\
Mean KL(teacher || student) in nats after a prompt of {} tokens, by the cache that the student reads: its
own; the teacher's cache of the prompt; the same, refreshed every few tokens."""
FIGURES = """\
- perplexity: per token of 300 documents
- closed_book: {} questions on the facts of the invented world
- recall: 300 questions on facts stated early in prompts of at most 1,300 characters, in three wordings on each of 100
  texts; no document has more than 1,900, so nothing here shows recall over the whole context
- name: nats for the rest of a new person's name, at the first mention and (name_nats) at all later ones
- share: answered exactly, to the end of the line, by greedy decoding; nats: mean loss per token of the answer
- list: loss per token of a list at the first reading, and at its repetition
- coherent: of 200 stories that the model wrote from their openings, greedily and (sampled) at temperature 0.8, those
  that hold together to their end; paid_per_story: their threads that are paid off, and paid_share those of them that
  agree with what was stated (`pocket/coherence.py`; the corpus's own stories: 1, 3 and 1)
- perplexity_before_512, after_512: at positions 256 to 511, and 512 to {:,}, of rows of documents

The goals of its training, and which were reached: [pocket](../README.md#figures)."""
EXPLAINED = "The figures are explained on the card of {}."
WINDOWS = """\
{explained} The windows run on `{init}` as it is, at equal
bytes of memory. The gain from each part of BCT in a short fine-tuning, and from fine-tuning a sliding window, is in
{ablation} (split "valid"; `python3 pocket/train.py ablation`)."""


def figures_table(columns: dict[str, dict[str, float]]) -> Table:
    """Return the table of figures by name, a column for each model."""
    rows = []
    for name in next(iter(columns.values())):
        rows.append([name, *(f"{column[name]:.4f}" for column in columns.values())])
    return Table(["figure", *columns], rows)


def is_ours(recipe: Recipe) -> bool:
    """Return whether a recipe's model is one of pocket's."""
    return recipe.init in (None, "pocket")


def introduction(recipe: Recipe, sizes: dict[str, int], teacher_card: str) -> list[Part]:
    """Return what a model is and how it was trained. sizes: the count of numbers of each parameter."""
    config = recipe.config
    steps, tokens = steps_and_tokens(recipe)
    fields: dict[str, Any] = {"recipe": recipe, "c": config, "teacher_card": teacher_card}
    fields |= {"steps": steps, "tokens": tokens / 1e6, "parameters": sum(sizes.values())}
    command = recipe.name
    if recipe.kind == "llama":
        fields["cached"] = 8 * config.n_layer * config.n_kv_head * config.head_dim
        fields["cached_by_pocket"] = 8 * TEACHER.config.n_layer * TEACHER.config.n_embd
    elif recipe.kind == "bct":
        fields["new"] = sum(size for name, size in sizes.items() if ".memory." in name)
        command = command.replace("-sum", " --rule sum")
    elif recipe.kind == "student":
        fields["begin"] = f", from `{recipe.begin}` on" if recipe.begin else ""
        dropout = f", with dropout of {config.dropout}" if config.dropout else ""
        fields["has_read"] = STUDENT_READS[recipe.mode] + dropout
        command = command.replace("-", " --kind ", 1)
    if not is_ours(recipe):
        command += f" --init {recipe.init} --steps {steps} --out FOLDER"
    return [INTRODUCTIONS[recipe.kind].format(command=command, **fields)]


def phases_table(recipe: Recipe) -> Table:
    """Return the phases of a training."""
    rows = []
    for number, phase in enumerate(recipe.phases, 1):
        counts = [phase.documents, phase.shuffled, phase.lists]
        long_rows = ", ".join(map(str, phase.long)) if any(phase.long) else ""
        cells = [f"{phase.context:,}", f"{phase.lr:g}", f"{phase.answers:g}", long_rows]
        rows.append([str(number), f"{phase.steps:,}", *map(str, counts), *cells])
    return Table(PHASES, rows)


def what_it_writes(recipe: Recipe, model: torch.nn.Module) -> list[Part]:
    """Return answers and stories of a model."""

    def write(prompt: str, **options: object) -> str:
        ids = [recipe.tokenizer.encode_ordinary(prompt)]
        return coherence.continue_prompts(model, recipe.tokenizer, ids, **options)[0]

    parts: list[Part] = ["## What it writes (greedy, in brackets)"]
    explain, recall = corpus.explain_questions("test", 1), corpus.recall_questions("test", 4)
    known = corpus.closed_book_questions("test")[0]
    for question in (*explain, *recall[::3], known):
        text, _, _ = write(question.prompt).partition("\nQuestion:")  # a question of its own
        parts.append(f"```\n{question.prompt}[{text}]\n```\nReference: {question.answer}")
    parts.append("## Three stories (unchosen: temperature 0.8, seeds 0 to 2; in brackets)")
    for seed, opening in enumerate(coherence.story_openings("test", 3)):
        generator = torch.Generator().manual_seed(seed)
        story = write(opening, temperature=0.8, generator=generator)
        parts.append(f"```\n{opening}[{story}]\n```")
    return parts


def model_card(recipe: Recipe, model: torch.nn.Module, figures: dict) -> str:
    """Return the card of a model with the figures that measure() found."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    ours, n_ctx = is_ours(recipe), recipe.config.n_ctx
    teacher_card = "[pocket/teacher](../teacher/README.md)" if ours else "pocket/teacher"
    explained = EXPLAINED.format(teacher_card)
    parts: list[Part] = [f"# {'pocket/' if ours else ''}{recipe.name}"]
    parts += introduction(recipe, sizes, teacher_card)
    if recipe.kind == "teacher":
        parts += [phases_table(recipe), START.format(n_ctx)]
    parts.append('## Held out (split "test": other people, objects and wordings)')
    if recipe.kind == "student":
        divergences = [f"{nats:.3f}" for nats in figures["kl"].values()]
        parts.append(DIVERGENCE.format(3 * n_ctx // 8))
        parts.append(Table(["", *figures["kl"]], [["this model", *divergences]]))
        parts += ["Alone, on its own cache:", figures_table({"this model": figures["student"]})]
        parts.append(explained)
    elif recipe.kind == "llama":
        known = read_json(open_checkpoint("pocket").file("figures.json"))
        parts += [figures_table({"`pocket`": known, "llama": figures}), explained]
    elif recipe.kind == "bct":
        window = figures["window"]["tokens"]
        columns = {
            "full attention": figures["full"],
            "BCT": figures["bct"],
            f"sliding window of {window}": figures["window"],
            f"4 sinks + window of {window - 4}": figures["sinks"],
        }
        is_shipped = ours and recipe.name == "bct"
        shown = "[`ablation.json`](ablation.json)" if is_shipped else "`pocket/bct/ablation.json`"
        windows = WINDOWS.format(explained=explained, init=recipe.init, ablation=shown)
        parts += [figures_table(columns), windows]
    else:
        question_count = len(corpus.closed_book_questions("test"))
        parts += [figures_table({"this model": figures}), FIGURES.format(question_count, n_ctx - 2)]
        parts += what_it_writes(recipe, model)
    parts.append("![Training loss](loss.png)")
    if recipe.init is None:
        n_unshuffled = sum(not phase.shuffled for phase in recipe.phases)
        parts.append(
            f"From phase {n_unshuffled + 1} on the loss is higher because the model also reads shuffled "
            "documents, and answers weigh more."
        )
    else:
        parts.append(
            f"The loss is the divergence from `{recipe.init}`; answer tokens weigh "
            f"{recipe.phases[0].answers:g} times as much."
        )
    return page(parts, markdown=True) + "\n"
