"""Chapter 7: a teacher reads, a student writes on its cache, and the cache is refreshed; or the teacher checks drafts.

B batch, T tokens, S tokens in a cache, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_kv_cache import GPTConfig, KVCache


def splice_last(cache: KVCache, source: KVCache, n: int) -> None:
    """Replace the last n tokens of a cache by the last n of a source that ends at the same position: their keys and
    values, in all rows and layers. The source stays as it is, and what is replaced doesn't share its memory.

    A layer's tensor (2, B, H, any, D) may be longer than its cache: what a failed pass left lies behind the first
    len(cache) tokens, and doesn't count. Work on the two caches' `layers` without importing from overfill.py. Raises
    ValueError, with the two numbers or shapes that don't fit, and changes nothing, if the two end at different
    positions (next_pos), n is negative or more than one of them holds, or layers or their shapes (2, B, H, D) differ.
    Source: Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation", splice_last_k.
    """
    raise NotImplementedError("exercise 7.1")


def refreshed(prompt: int, new: int, every: int, window: int | None = None) -> list[range]:
    """Return the positions whose entries are replaced at each refresh of a text: `prompt` tokens, then `new` written
    ones, each of which the student reads to get the next, except the last, which nobody reads.

    A refresh comes when the student has read `every` tokens since the last one, or since the prompt. It replaces those
    tokens' entries, or with a window at most the last `window` of them. The speculative refresh is every = window.
    """
    raise NotImplementedError("exercise 7.2")


def teacher_reads(prompt: int, new: int, every: int, keeps: bool) -> int:
    """Return how many tokens the teacher reads after its prefill in these refreshes, without a window: with a cache of
    its own (keeps) what it hasn't read yet, without one the whole text again.
    """
    raise NotImplementedError("exercise 7.2")


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in bits (...), float32, of the distributions that logits (..., V) of any dtype stand for."""
    raise NotImplementedError("exercise 7.3")


def fires(signals: Tensor, threshold: float, cooldown: int) -> list[int]:
    """Return after which tokens a gate refreshes, given its signal (T,) after each of T tokens, counted from 1: where
    it is above the threshold, and at least `cooldown` tokens were read since the last refresh, or since the prompt.
    """
    raise NotImplementedError("exercise 7.3")


class Tracer:
    """A model that computes nothing, and spells out what it reads: one layer, one head, head size 1.

    The real generate() and overfill.Pair take it for a GPT. In a text of which each token is its own position (ids 0,
    1, 2 ...), what slot s of a cache holds must be s; and the value says who wrote it.
    """

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.config = GPTConfig(vocab_size=512, n_ctx=512, n_layer=1, n_head=1, n_embd=1)
        self.context = self.config.n_ctx

    def __call__(self, ids: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        """Read ids (1, T) behind what is cached: append to the one layer of the cache, as chapter 2's model does, keys
        (1, 1, T, 1) that are the ids, as floats, and values that are the mark; and commit. Return the logits (1, T, V)
        or with last_only (1, 1, V): 1 for the token after each, its id + 1 (modulo V), and 0 for all others.
        """
        raise NotImplementedError("exercise 7.4")


def misplaced(write: Callable[..., Iterator[Tensor]], prompt: int, n: int, every: int) -> list[int]:
    """Return the slots of the student's cache that hold another token than they should, after a program has written n
    tokens after the prompt 0, 1 ... of so many tokens, refreshing every so many.

    write(teacher, student, ids, n, every, new_cache) yields tokens (1, 1); ids (1, T). It makes its caches by calling
    new_cache() without arguments, the student's last of all: hand it one that remembers what it has made.
    """
    raise NotImplementedError("exercise 7.4")


def generate(teacher: Callable[..., Tensor], student: Callable[..., Tensor], ids: Tensor, n: int,
             due: Callable[[int, Tensor], bool]) -> list[int]:  # fmt: skip
    """Return n greedy tokens after ids (1, T), refreshed when `due` says so.

    teacher(ids, cache, last_only=True), and likewise the student, returns the logits (1, 1, V) of what follows. The
    teacher reads the prompt, and the first token is its. The student writes all others, on a copy of that cache: it
    reads each new token once, except the last, and nothing of the prompt. Each time that it has read one,
    due(since, logits) decides: since, the tokens that the student has read since the last refresh or the prompt;
    logits (V,), the student's of the next token, which is drawn from them whatever is decided. At a refresh the teacher
    reads on its own cache what it has not read yet, no token twice, and splice_last() puts its entries in place.
    """
    raise NotImplementedError("exercise 7.5")


def verify(teacher: Callable[[Tensor, KVCache], Tensor], text: list[int], draft: list[int], read: KVCache,
           cache: KVCache) -> list[int]:  # fmt: skip
    """Return the tokens that a draft of k tokens adds to a text, which stays the teacher's own greedy text: the drafted
    ones up to the first that the teacher would not have written, and one more, the teacher's. The draft may be empty.

    teacher(ids, cache) reads ids (1, T) behind what the cache holds and returns the logits (1, T, V) of what follows
    each of them. Call it once, on `read`, its own cache, and feed it what that lacks of the text (one token or more)
    and the draft. `cache` is the student's: it holds the beginning of the text and the draft, as far as the student has
    read, and never the draft's last token. Afterwards each cache holds all that it has of the new text, and nothing
    else: cut both with truncate(), which raises ValueError where a cache has less than it is to keep.
    """
    raise NotImplementedError("exercise 7.6")


def accepted(p: Tensor, q: Tensor, draft: list[int], u: list[float]) -> tuple[int, Tensor]:
    """Return how many tokens of a sampled draft of k stay, counted from its beginning, and the distribution (V,), whose
    sum is 1, that the next token is to be drawn from. The draft may be empty.

    p (k + 1, V): the teacher's distributions of each drafted token and of the token after the draft; q (k, V): those
    that the draft was drawn from. u: k random numbers from 0 to 1, without 1, uniform and independent; that of a
    drafted token decides whether it stays, and does if it is small. Whatever q is, tokens made in this way must be
    distributed as p says, and of the drafted ones as many as possible must stay. A token that p rules out never does.
    Source: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """
    raise NotImplementedError("exercise 7.7")
