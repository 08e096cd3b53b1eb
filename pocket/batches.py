"""The batches of a recipe: a pure function of recipe and step, so that a run can be resumed, or
split among processes."""

import math
import os

import torch
from torch import Tensor
from tqdm import tqdm

from load_gpt2_weights import load_tokenizer
from pocket import corpus
from pocket.recipes import Batch, Distillation, Phase, Pruning, Recipe, schedule

RANK = int(os.environ.get("RANK", 0))  # of this process, as torchrun sets it


def draw_lists(
    phase: Phase, vocabulary: int, progress: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return rows (lists, context + 1) of random lists, each twice, longer ones as progress goes from 0 to 1,
    and weights (lists, context) that are 1 where the next token is known, that is, the second time.

    Every other list has a separator after each of its items of one to three tokens, as lists in a text do.
    """
    longest = 4 + int(progress * (phase.context // 2 - 4))
    length = phase.context + 1

    def draw(high: int, n: int = 1) -> list[int]:
        return torch.randint(high, (n,), generator=generator).tolist()

    rows = torch.empty(phase.lists, length, dtype=torch.long)
    weights = torch.empty(rows.shape)
    for i in range(phase.lists):
        row, known = [], []
        while len(row) < length:
            items = draw(vocabulary, 2 + draw(longest - 1)[0])
            if draw(2)[0]:
                separator, unseparated, items = draw(vocabulary), items, []
                while unseparated:
                    size = 1 + draw(3)[0]
                    items += unseparated[:size] + separator
                    unseparated = unseparated[size:]
            row += items + items
            known += [False] * (len(items) + 1) + [True] * (len(items) - 1)
        rows[i] = torch.tensor(row[:length])
        weights[i] = torch.tensor(known[:length])
    return rows, weights[:, 1:]


class Corpus:
    """The text that a recipe trains on, in tokens, with <|endoftext|> after each document.

    tokens (N,); starts, where rows may begin; is_answer (N,), whether a token is part of an answer.
    """

    def __init__(self, recipe: Recipe) -> None:
        tokenizer = load_tokenizer("pocket")
        self.vocabulary = tokenizer.n_vocab
        tokens, starts, is_answer = [], [], []
        documents = corpus.documents("train", recipe.documents)
        for document in tqdm(documents, "corpus", recipe.documents, disable=RANK > 0):
            starts.append(len(tokens))
            for line in document.text.splitlines(keepends=True):  # no token spans two lines
                question, mark, answer = line.partition("Answer:")
                question_ids = tokenizer.encode_ordinary(question + mark)
                answer_ids = tokenizer.encode_ordinary(answer)
                tokens += question_ids + answer_ids
                is_answer += [False] * len(question_ids) + [bool(mark)] * len(answer_ids)
            tokens.append(tokenizer.eot_token)
            is_answer.append(False)
        self.tokens = torch.tensor(tokens)
        self.starts = torch.tensor(starts)
        self.is_answer = torch.tensor(is_answer)

    def draw_rows(self, phase: Phase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows (documents + shuffled, context + 1), each beginning with a document, as prompts do, and what
        each token but the first weighs in the loss (documents + shuffled, context).

        In a shuffled row about half of the vocabulary has changed places, differently in every row: what was learned of
        names and things is of no use there, only what the row itself says.
        """
        starts = self.starts[self.starts < len(self.tokens) - phase.context]
        n_rows = phase.documents + phase.shuffled
        begin = starts[torch.randint(len(starts), (n_rows,), generator=generator)]
        indices = begin[:, None] + torch.arange(phase.context + 1)
        rows = self.tokens[indices]
        weights = torch.where(self.is_answer[indices[:, 1:]], phase.answers, 1.0)
        weights[phase.documents :] = 1.0
        for row in rows[phase.documents :]:
            moved = torch.rand(self.vocabulary, generator=generator).lt(0.5).nonzero()[:, 0]
            new_token = torch.arange(self.vocabulary)
            new_token[moved] = moved[torch.randperm(len(moved), generator=generator)]
            row.copy_(new_token[row])
        return rows, weights


def segment_starts(
    mode: str, n_rows: int, T: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return where the segment of each token begins (rows, T), and which tokens count in the loss (rows, T): those that
    the student reads itself."""
    pos = torch.arange(T).expand(n_rows, T)
    all_count = torch.ones(n_rows, T)
    if mode == "alone":
        return torch.zeros_like(pos), all_count
    prompt_end = torch.randint(1, T, (n_rows, 1), generator=generator)
    after_prompt = torch.where(pos < prompt_end, 0, prompt_end)
    if mode == "prompt":
        return after_prompt, (pos >= prompt_end).float()
    n_strides = max(1, math.ceil(math.log2(T / 4)) + 1)
    exponent = torch.randint(0, n_strides, (n_rows, 1), generator=generator)
    stride = 4 * 2**exponent  # 4, 8 ... at least T
    offset = prompt_end % stride
    starts = torch.where(pos < offset, 0, offset + (pos - offset) // stride * stride)
    return torch.where(stride >= T, after_prompt, starts), all_count


def batch_at(recipe: Recipe, step: int, text: Corpus) -> Batch:
    """Return the batch of a step, for all processes together."""
    phase, progress, _ = schedule(recipe)[step]
    generator = torch.Generator().manual_seed(step)
    list_progress = 1.0 if phase.documents else progress
    rows, weights = draw_lists(phase, recipe.config.vocab_size, list_progress, generator)
    if phase.documents:
        text_rows, text_weights = text.draw_rows(phase, generator)
        rows, weights = torch.cat([text_rows, rows]), torch.cat([text_weights, weights])
    segments, n_before = torch.zeros_like(weights, dtype=torch.long), 0
    if isinstance(recipe, Pruning):
        segments, counted = segment_starts(recipe.mode, *weights.shape, generator)
        weights = weights * counted
    elif isinstance(recipe, Distillation) and step % 2:
        n_before = int(torch.randint(1, phase.context, (1,), generator=generator))
    before = rows.roll(1, dims=0)[:, -1 - n_before : -1]
    return Batch(rows, weights / weights.sum(), before, segments)
