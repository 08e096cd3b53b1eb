"""Two models at work on the same text: a teacher, which reads it, and a student, which continues from
the teacher's KV cache.

In overfill.py the student writes, and the teacher refreshes its cache; in speculate.py the student
drafts, and the teacher checks the drafts. A student with the same layers, heads and head size can
use the teacher's cache; any other student reads everything itself.

Shapes: B texts, T tokens, S tokens in a cache, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiktoken
import torch
from torch import Tensor, nn

from formats.names import split_twin
from gpt_kv_cache import KVCache, context_start
from load_gpt2_weights import load_model, load_tokenizer
from support.geometry import kv_heads, layer_kinds, rotary_settings

NOT_IN_CACHES = ("vocab_size", "n_ctx", "n_embd", "n_inner", "dropout", "tied", "q_rank")
NOT_IN_CACHES += ("query_scalar",)


def geometry(config: Any) -> dict[str, Any]:
    """Return the settings that decide whether one model's keys and values fit another model. The
    heads counted are those of keys and values, which several query heads may share. Rotated keys
    fit only a model that rotates them in the same way. What layers of different kinds keep, and a
    BCT, depends on more settings: any may matter but those known not to."""
    more = {}
    if layer_kinds(config) or hasattr(config, "slots"):
        more = {name: x for name, x in vars(config).items() if name not in NOT_IN_CACHES}
    return more | {
        "n_layer": config.n_layer,
        "n_kv_head": kv_heads(config),
        "head_dim": config.head_dim,
        "n_ctx": config.n_ctx,
        "rotary base and scaling": rotary_settings(config) or "none",
    }


def geometry_difference(teacher: nn.Module, student: nn.Module) -> str:
    """Return how the geometries of two models differ, "" if the cache of one fits the other."""
    needed, given = geometry(teacher.config), geometry(student.config)
    differences = []
    for name in given | needed:
        if needed.get(name) != given.get(name):
            differences.append(f"{name} {needed.get(name)} against {given.get(name)}")
    return ", ".join(differences)


def splice_last(cache: KVCache, source: KVCache, counts: Tensor) -> None:
    """In each row of a cache, replace the last tokens in place by those of `source`, which must end
    at the same position.

    counts (B,): how many tokens to replace in each row. Raises ValueError, and changes nothing, if
    the two don't end at the same position or one has too few tokens.
    """
    n = int(counts.max())
    end, source_end = int(cache.positions(1)), int(source.positions(1))
    if end != source_end or not 0 <= n <= min(len(cache), len(source)):
        raise ValueError(
            f"can't replace {n} of {len(cache)} tokens up to position {end} by those of "
            f"{len(source)} up to {source_end}"
        )
    replaced = torch.arange(n, 0, -1, device=counts.device) <= counts[:, None]  # (B, n)
    for old, new in zip(cache.layers, source.layers, strict=True):
        old = old[..., len(cache) - n : len(cache), :]
        new = new[..., len(source) - n : len(source), :]
        old.copy_(torch.where(replaced[None, :, None, :, None], new, old))  # (2, B, H, n, D)


class Pair:
    """A teacher and a student at work on the same texts.

    The student starts from a copy of the teacher's cache of the prompt. If their geometries differ,
    the student reads the prompt itself.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        ids: Tensor,
        new_cache: Callable[[], KVCache] | None = None,
    ) -> None:
        """ids: prompts (B, T) of equal length; new_cache: makes both caches, by default each
        model's own."""
        self.teacher, self.student, self.ids = teacher, student, ids
        self.new_teacher_cache = new_cache or teacher.new_cache
        self.new_student_cache = new_cache or student.new_cache
        self.same_geometry = not geometry_difference(teacher, student)
        self.n_ctx = min(teacher.context, student.context)
        self.cached_from = 0  # index in ids of the first cached token
        self.teacher_cache = self.new_teacher_cache()  # what the teacher has read
        self.student_cache = self.new_student_cache()  # the student extends it as it writes
        self.logits = torch.empty(0)  # (B, V) of the next token, by the model that read last

    def prefill(self) -> None:
        """Let the teacher read the part of the text that is in the context, and hand its cache over
        to the student."""
        self.cached_from = context_start(self.ids.size(1), self.n_ctx)
        self.teacher_cache, self.student_cache = self.new_teacher_cache(), self.new_student_cache()
        logits = self.teacher(self.ids[:, self.cached_from :], self.teacher_cache, last_only=True)
        self.logits = logits[:, -1]
        if self.same_geometry:
            self.student_cache = self.teacher_cache.clone()
        else:
            self.student(self.unread_by_student(), self.student_cache, last_only=True)

    def unread_by_student(self) -> Tensor:
        """Return the tokens (B, T) that the student hasn't read. An id that the student's vocabulary lacks, since it is
        padded to fewer ids, is replaced by its last id."""
        unread = self.ids[:, self.cached_from + len(self.student_cache) :]
        return unread.clamp(max=self.student.config.vocab_size - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return self.teacher_cache.nbytes + self.student_cache.nbytes


def default_student(teacher: str) -> str:
    """Return the name of the student that a teacher has by default: pocket has a trained one, and
    others their twin with weights of 5 bits, whose cache fits."""
    return "pocket-student" if teacher == "pocket" else f"{teacher}:int5"


def tokens_of(tokenizer: tiktoken.Encoding) -> list[bytes]:
    return [tokenizer.decode_single_token_bytes(i) for i in range(tokenizer.n_vocab)]


def load_pair(
    teacher: str,
    student: str,
    consequence: str = "a refresh changes nothing",
    **options: Any,
) -> tuple[nn.Module, nn.Module, tiktoken.Encoding]:
    """Return a teacher, a student and their tokenizer.

    If the teacher's cache doesn't fit the student, a printed line says why, and names the
    consequence. options: those of load_model(). Raises ValueError if the two have different
    tokenizers.
    """
    tokenizer, student_tokenizer = load_tokenizer(teacher), load_tokenizer(student)
    if tokens_of(tokenizer) != tokens_of(student_tokenizer):
        raise ValueError(
            f"{teacher} and {student} don't share a tokenizer: their {tokenizer.n_vocab:,} and "
            f"{student_tokenizer.n_vocab:,} tokens aren't the same texts"
        )
    models = [load_model(name, **options) for name in (teacher, student)]
    if difference := geometry_difference(*models):
        print(
            f"[the cache of {teacher} doesn't fit {student} ({difference}), which reads everything itself: "
            f"{consequence}]"
        )
    base, bits = split_twin(student)
    if bits:
        print(
            f"[{student} is {base} with weights rounded to {bits} bits; they are held as before, so "
            "that it is no faster]"
        )
    return *models, tokenizer
