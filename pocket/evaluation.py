"""The abilities of a model on held-out text."""

import math
import re
from collections import defaultdict
from functools import partial
from statistics import fmean, mean

import torch
import torch.nn.functional as F
from tiktoken import Encoding
from torch import Tensor, nn

import gpt_bounded_cache as bounded
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import load_model, load_tokenizer
from pocket import coherence, corpus
from pocket.recipes import Recipe, SegmentCache
from support.statistics import kl
from support.texts import rows_of_tokens


@torch.inference_mode()
def score_answers(
    model: nn.Module, tokenizer: Encoding, questions: list[corpus.Question]
) -> tuple[float, list[bool]]:
    """Return the mean loss on the answers' tokens (nats), and for each question whether greedy
    decoding gets the answer right, to the end.

    Greedy decoding writes an answer if each of its tokens, and the line's end after it, is the
    model's first choice.
    """
    device = model.wte.weight.device
    nats, right = [], []
    for question in questions:
        prompt = tokenizer.encode_ordinary(question.prompt)
        answer = tokenizer.encode_ordinary(f" {question.answer}")
        ids = torch.tensor([prompt + answer], device=device)
        logits = model(ids)[0, len(prompt) - 1 :].float().cpu()
        nats.append(F.cross_entropy(logits[:-1], torch.tensor(answer), reduction="none"))
        *likeliest, end_token = logits.argmax(-1).tolist()
        line_ends = tokenizer.decode([end_token]).startswith(("\n", "<|endoftext|>"))
        right.append(likeliest == answer and line_ends)
    return torch.cat(nats).mean().item(), right


@torch.inference_mode()
def token_losses(model: nn.Module, tokens: list[int]) -> Tensor:
    """Return the loss (T - 1,) on each token but the first, of as many as the context holds."""
    ids = torch.tensor([tokens[: model.config.n_ctx]], device=model.wte.weight.device)
    return F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:], reduction="none")


def held_out_rows(tokenizer: Encoding, n: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return n held-out documents, one after the other, in rows of so many tokens."""
    tokens = []
    for document in corpus.documents("test", n, seed):
        tokens += [*tokenizer.encode_ordinary(document.text), tokenizer.eot_token]
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]


def unseen_texts(name: str, tokenizer: Encoding, count: int, length: int) -> list[list[int]]:
    """Return at most `count` texts of `length` tokens that a model wasn't trained on: of the pocket
    world for pocket's models, otherwise beginnings of the texts in data/real."""
    if name.startswith("pocket"):
        return held_out_rows(tokenizer, count * (length // 40 + 1), length)[:count]
    return rows_of_tokens(tokenizer, length)[:count]


def document_losses(model: nn.Module, tokenizer: Encoding, split: str, n: int) -> list[Tensor]:
    """Return the losses (T - 1,) on the tokens of n documents, each read by itself."""
    losses = []
    for document in corpus.documents(split, n):
        tokens = tokenizer.encode_ordinary(document.text)
        losses.append(token_losses(model, [*tokens, tokenizer.eot_token]))
    return losses


def perplexity(model: nn.Module, tokenizer: Encoding, split: str) -> float:
    """Return the perplexity per token of 300 documents."""
    return torch.cat(document_losses(model, tokenizer, split, 300)).mean().exp().item()


def list_losses(model: nn.Module, tokenizer: Encoding) -> list[float]:
    """Return the mean loss (nats per token) on 100 lists at the first reading, and at the second."""
    losses_by_reading = [], []
    for texts in corpus.repeated_lists("test", 100):
        first, second = map(tokenizer.encode_ordinary, texts)
        nats = token_losses(model, first + second)
        losses_by_reading[0].append(nats[: len(first) - 1])
        losses_by_reading[1].append(nats[len(first) - 1 :])
    return [torch.cat(losses).mean().item() for losses in losses_by_reading]


def name_losses(model: nn.Module, tokenizer: Encoding) -> tuple[float, float]:
    """Return the mean loss (nats per token) on what completes a person's name, the first time a document mentions the
    person and all later times, every person counting once. The names of held-out splits are new: the second figure is
    the loss of copying. Lists are left out: there many names begin alike, and a beginning does not tell which it is."""
    names = "|".join(person.name for person in corpus.PEOPLE["test"])
    name = re.compile(rf"\b({names})\b")
    first, later = defaultdict(list), defaultdict(list)  # nats, by person
    for document in corpus.documents("test", 200):
        if document.kind == "list":
            continue
        tokens = tokenizer.encode_ordinary(document.text)
        text, starts = tokenizer.decode_with_offsets(tokens)
        nats, mentioned = token_losses(model, tokens).tolist(), set()
        for mention in name.finditer(text):
            losses = later if mention[0] in mentioned else first
            mentioned.add(mention[0])
            for i, start in enumerate(starts):
                if mention.start() < start < mention.end():
                    losses[mention[0]].append(nats[i - 1])
    return mean(map(mean, first.values())), mean(map(mean, later.values()))


def evaluate(model: nn.Module, tokenizer: Encoding) -> dict[str, float]:
    """Measure a model on held-out text, with people, objects and wordings that it wasn't trained
    on."""
    figures = {"perplexity": perplexity(model, tokenizer, "test")}
    closed_book, recall = corpus.closed_book_questions("test"), corpus.recall_questions("test", 300)
    for name, questions in (("closed_book", closed_book), ("recall", recall)):
        nats, right = score_answers(model, tokenizer, questions)
        figures |= {f"{name}_share": fmean(right), f"{name}_nats": nats}
    first, later = name_losses(model, tokenizer)
    figures |= {"name_first_nats": first, "name_nats": later}
    first, second = list_losses(model, tokenizer)
    return figures | {"list_first_nats": first, "list_second_nats": second}


def windowed(window: int, sinks: int = 0) -> type[bounded.GPT]:
    """Return the class of a model that sees a sliding window of its text, and the first `sinks` tokens."""

    class Windowed(bounded.GPT):
        new_cache = partial(bounded.SlidingWindowCache, window, sinks)

        def forward(
            self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False
        ) -> Tensor:
            cache = self.new_cache() if cache is None else cache
            return super().forward(ids, cache, last_only)

    return Windowed


def window_of_equal_bytes(config: bounded.BCTConfig) -> int:
    """Return the number of tokens whose keys and values take at least the bytes of a BCT's memory.
    (A ring also has a spare slot.)"""
    D, M = config.head_dim, config.slots
    slot_size = 2 * D + 1 if config.rule == "mean" else 2 * D
    recent_size = config.recent * (2 * D + 1 + M)
    return math.ceil((M * slot_size + recent_size) / (2 * D))


REFRESHES = {  # what a student reads, and after how many tokens it is refreshed; 0: never a teacher's token
    "alone": 0,
    "teacher's prompt": 1 << 20,
    "every 64": 64,
    "every 16": 16,
    "every 4": 4,
}


@torch.inference_mode()
def divergences(
    teacher: GPT, student: GPT, tokenizer: Encoding, refreshes: dict[str, int] = REFRESHES
) -> dict[str, float]:
    """Return the mean KL(teacher || student) in nats, on held-out texts after a prompt of 3/8 of
    the context, by what the student reads."""
    n_ctx = student.config.n_ctx
    prompt_end, positions = 3 * n_ctx // 8, torch.arange(n_ctx)
    rows = torch.tensor(held_out_rows(tokenizer, 150, n_ctx)[:24])
    cache, mean_kl = KVCache(), {}
    expected = teacher(rows, cache)
    for name, stride in refreshes.items():
        start = torch.zeros_like(positions)
        if stride:
            refreshed_at = prompt_end + (positions - prompt_end) // stride * stride
            start = torch.where(positions < prompt_end, 0, refreshed_at)
        nats = kl(expected, student(rows, SegmentCache(cache, start.expand_as(rows))))
        mean_kl[name] = nats[:, prompt_end:].mean().item()
    return mean_kl


def measure(recipe: Recipe, model: nn.Module) -> dict:
    """Return the figures of a model that was trained on the corpus, beside those of the models that
    it is compared with."""
    tokenizer = load_tokenizer("pocket")
    figures = evaluate(model, tokenizer)
    if recipe.kind == "student":
        teacher = load_model(recipe.init, model_class=GPT)
        return {"kl": divergences(teacher, model, tokenizer), "student": figures}
    if recipe.kind == "bct":
        tokens = window_of_equal_bytes(recipe.config)
        figures = {"bct": figures, "full": evaluate(load_model(recipe.init), tokenizer)}
        for name, sinks in (("window", 0), ("sinks", 4)):
            model = load_model(recipe.init, model_class=windowed(tokens - sinks, sinks))
            figures[name] = evaluate(model, tokenizer) | {"tokens": tokens}
        return figures
    openings = coherence.story_openings("test", 200)
    for name, temperature in (("", 0.0), ("sampled_", 0.8)):
        stories = coherence.finish_stories(model, tokenizer, openings, temperature)
        figures |= {name + key: share for key, share in coherence.measure(stories).items()}
    rows = held_out_rows(tokenizer, 300, recipe.config.n_ctx)
    nats = torch.stack([token_losses(model, row) for row in rows])
    figures["perplexity_before_512"] = nats[:, 256:512].mean().exp().item()
    figures["perplexity_after_512"] = nats[:, 512:].mean().exp().item()
    return figures
