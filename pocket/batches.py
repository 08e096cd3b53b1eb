"""The batches of a recipe: a pure function of recipe and step, so that a run can be resumed and shared out."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pocket import corpus
from pocket.recipes import Batch, Distillation, Phase, Pruning, Recipe, schedule
from support.files import read_text

RANK = int(os.environ.get("RANK", 0))  # of this process; torchrun says so


def lists_batch(
    phase: Phase, vocabulary: int, progress: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return rows (lists, context + 1) of random lists, each twice, longer ones as progress goes from 0 to 1,
    and weights (lists, context) that are 1 where the next token is known, that is, the second time.

    Every other list has a separator after each of its items of one to three tokens, as lists in a text do.
    """
    longest = 4 + int(progress * (phase.context // 2 - 4))

    def draw(high: int, n: int = 1) -> list[int]:
        return torch.randint(high, (n,), generator=generator).tolist()

    tokens = torch.empty(phase.lists, phase.context + 1, dtype=torch.long)
    mask = torch.empty(tokens.shape)
    for i in range(phase.lists):
        row, known = [], []
        while len(row) < phase.context + 1:
            words = draw(vocabulary, 2 + draw(longest - 1)[0])
            if draw(2)[0]:
                separator, plain, words = draw(vocabulary), words, []
                while plain:
                    size = 1 + draw(3)[0]
                    words, plain = words + plain[:size] + separator, plain[size:]
            row += words + words
            known += [False] * (len(words) + 1) + [True] * (len(words) - 1)
        tokens[i] = torch.tensor(row[: phase.context + 1])
        mask[i] = torch.tensor(known[: phase.context + 1])
    return tokens, mask[:, 1:]


class Corpus:
    """The text that a recipe trains on, in the tokens of its model, <|endoftext|> after each document; where each document
    starts; what is an answer."""

    def __init__(self, recipe: Recipe) -> None:
        tokenizer, n = recipe.tokenizer, recipe.documents
        self.vocabulary = tokenizer.n_vocab
        tokens, starts, is_answer = [], [], []
        texts = (document.text for document in corpus.documents("train", n))
        if recipe.text is not None:
            parts = read_text(Path(recipe.text)).split("<|endoftext|>")
            texts = [text for text in parts if text.strip()]
            n = len(texts)
        for text in tqdm(texts, total=n, desc="corpus", disable=RANK > 0):
            begin = len(tokens)
            lines = text.splitlines(keepends=True)  # no token of the corpus spans two lines
            split = [line.partition("Answer:") for line in lines]
            if recipe.text is not None:
                split = [(text, "", "")]
            for question, mark, answer in split:
                for part, is_one in ((question + mark, False), (answer, bool(mark))):
                    ids = tokenizer.encode_ordinary(part)
                    tokens += ids
                    is_answer += [is_one] * len(ids)
            tokens.append(tokenizer.eot_token)
            is_answer.append(False)
            # a row may begin with a document, or in a text that is given at every context's end, too
            step = len(tokens) if recipe.text is None else recipe.config.n_ctx
            starts.extend(range(begin, len(tokens), step))
        self.tokens = torch.tensor(tokens)
        self.starts = torch.tensor(starts)
        self.is_answer = torch.tensor(is_answer)

    def batch(self, phase: Phase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows (documents + shuffled, context + 1), each beginning with a document, as prompts do, and what
        each token but the first weighs in the loss (documents + shuffled, context).

        In a shuffled row about half of the vocabulary has changed places, differently in every row: what was learned of
        names and things is of no use there, only what the row itself says.
        """
        first = self.starts[self.starts < len(self.tokens) - phase.context]
        if not len(first):
            raise ValueError(
                f"the text has {len(self.tokens)} tokens, and a row of {phase.context} doesn't fit in it"
            )
        n = phase.documents + phase.shuffled
        start = first[torch.randint(len(first), (n,), generator=generator)]
        places = start[:, None] + torch.arange(phase.context + 1)
        rows = self.tokens[places]
        weights = torch.where(self.is_answer[places[:, 1:]], phase.answers, 1.0)
        weights[phase.documents :] = 1.0
        for row in rows[phase.documents :]:
            moved = torch.rand(self.vocabulary, generator=generator).lt(0.5).nonzero()[:, 0]
            place = torch.arange(self.vocabulary)
            place[moved] = moved[torch.randperm(len(moved), generator=generator)]
            row.copy_(place[row])
        return rows, weights


def segment_starts(
    mode: str, rows: int, T: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return where the segment of each token begins (rows, T), and which tokens count in the loss (rows, T): those that
    the student reads itself."""
    at = torch.arange(T).expand(rows, T)
    if mode == "alone":
        return torch.zeros_like(at), torch.ones(rows, T)
    first = torch.randint(1, T, (rows, 1), generator=generator)
    prompt = torch.where(at < first, 0, first)
    if mode == "prompt":
        return prompt, (at >= first).float()
    kinds = max(1, math.ceil(math.log2(T / 4)) + 1)
    stride = 4 * 2 ** torch.randint(0, kinds, (rows, 1), generator=generator)  # 4, 8 ... at least T
    offset = first % stride
    start = torch.where(at < offset, 0, offset + (at - offset) // stride * stride)
    return torch.where(stride >= T, prompt, start), torch.ones(rows, T)


def batch_at(recipe: Recipe, step: int, text: Corpus) -> Batch:
    """Return the batch of a step, all processes together."""
    phase, progress, _ = schedule(recipe)[step]
    generator = torch.Generator().manual_seed(step)
    longest = 1.0 if phase.documents else progress
    rows, weights = lists_batch(phase, recipe.config.vocab_size, longest, generator)
    if phase.documents:
        texts, counts = text.batch(phase, generator)
        rows, weights = torch.cat([texts, rows]), torch.cat([counts, weights])
    segments, length = torch.zeros_like(weights, dtype=torch.long), 0
    if isinstance(recipe, Pruning):
        segments, counts = segment_starts(recipe.mode, *weights.shape, generator)
        weights = weights * counts
    elif isinstance(recipe, Distillation) and step % 2:
        length = int(torch.randint(1, phase.context, (1,), generator=generator))
    before = rows.roll(1, dims=0)[:, -1 - length : -1]
    return Batch(rows, weights / weights.sum(), before, segments)
