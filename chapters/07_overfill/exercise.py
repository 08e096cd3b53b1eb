"""Chapter 7: a teacher reads, a student writes on its cache, and the cache is refreshed; or the teacher checks drafts.

B batch, T tokens, S tokens in a cache, H heads, D head size, V vocabulary.

In every task the result has exactly the types of the signature (a list of ranges isn't one of lists, a tensor is no
int), and arguments stay as they are unless the task says that they change. Prompts have at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_kv_cache import GPTConfig, KVCache


def splice_last(cache: KVCache, source: KVCache, n: int) -> None:
    """Replace the keys and values of a cache's last n tokens by the source's last n, in all rows and layers of
    `layers`; for n = 0, of none. The source doesn't change, and the two share no memory. A cache may begin after
    position 0.

    A layer's tensor (2, B, H, any, D) may be longer than its cache: after a failed pass it holds more than len(cache)
    tokens, and the rest doesn't count. Raises ValueError, with the two numbers or shapes that don't fit, and changes
    nothing, if the caches end at different positions (positions(1)), if n is negative or more than one of them holds, or if
    their numbers of layers or shapes (2, B, H, D) differ.
    Source: Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation", splice_last_k.
    """
    raise NotImplementedError("exercise 7.1")


def refreshed(prompt: int, new: int, every: int, window: int | None = None) -> list[range]:
    """Return the positions whose entries each refresh replaces, in a text of `prompt` tokens and `new` written ones.
    The student reads each written token to get the next one, but not the last; so for 0 or 1 there is no refresh.

    A refresh comes when the student has read `every` tokens, at least 1, since the last one, or
    since the prompt. It replaces the entries of these tokens; with a window, of at most the last
    `window` of them. A window of 0 replaces none: the ranges are empty. A speculative refresh has
    every = window.
    """
    raise NotImplementedError("exercise 7.2")


def teacher_reads(prompt: int, new: int, every: int, keeps: bool) -> int:
    """Return how many tokens the teacher reads in all refreshes after its prefill, without a window. With a cache of
    its own (keeps) it reads the tokens that it hasn't read yet, without one the whole text again.
    """
    raise NotImplementedError("exercise 7.2")


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in bits (...), in float32, of the distributions given by logits (..., V) of any dtype; of a
    single token it is 0. A logit may be -inf: of a token that is ruled out."""
    raise NotImplementedError("exercise 7.3")


def fires(signals: Tensor, threshold: float, cooldown: int) -> list[int]:
    """Return after which tokens, counted from 1, a gate refreshes; signals (T,) has its signal after each token.

    It refreshes if the signal is above the threshold and at least `cooldown` tokens were read since the last refresh,
    or since the prompt. With a cooldown of 0 or 1 it may refresh after each token.
    """
    raise NotImplementedError("exercise 7.3")


class Tracer:
    """A model that computes nothing, but stores what it reads: one layer, one head, head size 1.

    The real generate() and RefreshedPair take it for a GPT. If each token of a text is its own position (ids 0, 1, 2
    ...), slot s of a cache must hold the key s; the value says which model wrote it.
    """

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.config = GPTConfig(vocab_size=512, n_ctx=512, n_layer=1, n_head=1, n_embd=1)
        self.context = self.config.n_ctx

    def __call__(self, ids: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        """Read ids (1, T) after the cached tokens: append to layer 0 of the cache and commit, as chapter 2's model
        does. Keys (1, 1, T, 1) are the ids, as floats; values are the mark. Return the logits (1, T, V), or with
        last_only those of the last token (1, 1, V): 1 for the id that follows, id + 1 (modulo V), and 0 for all
        others.
        """
        raise NotImplementedError("exercise 7.4")


def misplaced(write: Callable[..., KVCache], prompt: int, n: int, every: int) -> list[int]:
    """Return the slots of the student's cache, of the prompt's too, that hold a wrong token after a program has written
    n (at least 1) tokens. The prompt is 0, 1 ... prompt - 1; a refresh comes every `every` tokens. What a failed pass
    has left past the cache's tokens doesn't count.

    The program is write(teacher, student, ids, n, every); ids is (1, T), and it returns the student's cache.
    """
    raise NotImplementedError("exercise 7.4")


@torch.no_grad()
def generate(
    teacher: Callable[..., Tensor],
    student: Callable[..., Tensor],
    ids: Tensor,
    n: int,
    due: Callable[[int, Tensor], bool],
) -> list[int]:
    """Return n (0 or more) greedy tokens after ids (1, T), refreshed when `due` says so.

    teacher(ids, cache, last_only=True) returns the logits (1, 1, V) of the next token, and so does the student.

    - The teacher reads the prompt, and writes the first token.
    - The student writes all others, on a copy of the teacher's cache. It reads each new token once, except the last,
      and no token of the prompt.
    - Each time that the student has read a token, due(since, logits) says whether to refresh. since: the tokens read
      since the last refresh, or since the prompt. logits (V,): the student's, which give the next token in either case.
      (overfill.py then asks the student again, so that a refresh counts one token sooner.)
    - At a refresh the teacher reads, on its own cache, the tokens that it hasn't read yet, and splice_last() puts its
      entries in place.
    """
    raise NotImplementedError("exercise 7.5")


def verify(
    teacher: Callable[[Tensor, KVCache], Tensor],
    text: list[int],
    draft: list[int],
    read: KVCache,
    cache: KVCache,
) -> list[int]:
    """Return the tokens that a draft adds to a text, so that it stays the teacher's greedy text: the drafted tokens
    before the first that the teacher would not have written, then one token of the teacher's. The draft may be empty.

    teacher(ids, cache) reads ids (1, T) after the cached tokens, and returns the logits (1, T, V) after each of them.
    Call it once, on its own cache, `read`, with the tokens of the text that `read` lacks (at least one), then the
    draft. The student's cache, `cache`, holds a beginning of the text and the draft, without the draft's last token.
    Cut both caches with truncate(), so that each keeps its tokens of the new text and no others. (truncate() raises
    ValueError if a cache has fewer tokens than it is to keep.)
    """
    raise NotImplementedError("exercise 7.6")


def accepted(p: Tensor, q: Tensor, draft: list[int], u: list[float]) -> tuple[int, Tensor]:
    """Return how many tokens of a sampled draft of k stay, from its beginning on, and the distribution (V,), with sum
    1, from which the next token is to be drawn. The draft may be empty.

    p (k + 1, V): the teacher's distributions of each drafted token and of the token after the
    draft. q (k, V): the distributions that the draft was drawn from. u: for each drafted token a
    uniform random number, 0 <= u < 1; the token stays if it is small enough. For any q, the tokens
    must be distributed as p, and as many drafted tokens as possible must stay. A token of
    probability 0 in p never stays. If p and q are equal but for rounding, what q lacks may be 0
    everywhere: then return p or q, not 0 / 0.
    Source: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative
    Decoding", algorithm 1.
    """
    raise NotImplementedError("exercise 7.7")
