"""OverFill: a teacher reads the prompt, a smaller student continues from its KV cache; and ways to
refresh it.

`python3 overfill.py` compares five ways to continue a text, in seconds; `write` shows one way at
work. `python3 -m studies.refreshing` measures all of them on long texts, in two hours.

A student's own keys and values differ a little from the teacher's, and the student's next tokens
are computed from them. At a refresh the teacher reads the new text, and its entries replace the
student's. That needs two models with the same layers, heads and head size; otherwise the student
reads everything itself. All of this approximates the teacher; speculate.py writes exactly the
teacher's own text, with the same two models.

Shapes: B texts, T tokens, S tokens in a cache, N passes, L layers, H heads, D head size, V
vocabulary.

Source: Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation"; Kim et al.
2025, "OverFill"; Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation".
"""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from formats.chat import encode_given_prompt
from formats.checkpoints import open_checkpoint
from gpt_bounded_cache import PreallocatedCache
from gpt_kv_cache import KVCache, check_options, context_start, generate, sample
from load_gpt2_weights import NAMES
from pair import Pair, default_student, load_pair, splice_last
from support.cli import WRITING, ByModel, CommandLine, study_command, whole_number
from support.files import check_fields
from support.geometry import check_kinds
from support.printing import stream
from support.statistics import entropy, kl
from support.tables import table
from support.texts import rows_of_tokens
from support.timing import time_call
from support.tracing import Trace

# --- Two models, one text -------------------------------------------------------------------------


@dataclass
class Refresh:
    """One refresh: the number of tokens written before it, what was read and replaced, and how long
    it took."""

    written: int
    tokens_read: int  # by the teacher, in all rows; 0 if it had read them already
    tokens_replaced: int  # in the student's cache, in the row with the most
    seconds: float


class Reading(NamedTuple):
    """What the teacher has read up to a token: its cache, and its logits (B, V) of the next token."""

    cache: KVCache
    logits: Tensor


def check_pair(teacher: nn.Module, student: nn.Module) -> None:
    """Raise ValueError if two models have different vocabularies, or a cache for each layer: what a
    window has evicted and what a state has read can't be replaced."""
    for model in (teacher, student):
        check_kinds(model.config, "a refresh needs one cache for all layers, not one for each")
    teacher_vocab, student_vocab = teacher.config.vocab_size, student.config.vocab_size
    if teacher_vocab != student_vocab:
        raise ValueError(
            f"teacher and student must share a vocabulary, but have {teacher_vocab:,} and "
            f"{student_vocab:,} tokens"
        )


class RefreshedPair(Pair):
    """A pair whose student writes, and whose teacher refreshes the student's cache. If their
    geometries differ, a refresh leaves that cache as it is. Raises ValueError as check_pair()
    does."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        ids: Tensor,
        new_cache: Callable[[], KVCache] = KVCache,
    ) -> None:
        check_pair(teacher, student)
        super().__init__(teacher, student, ids, new_cache)
        self.newest_reading: Reading | None = None  # the teacher's, of the newest token
        self.written = 0  # tokens after the prompt that the student has read
        none = torch.zeros_like(ids[:, 0])  # (B,), the shape of each of these counts:
        self.tokens_since_refresh = none.clone()  # that the student has read
        # For each row, as if it were the teacher's only one: the tokens that the teacher hasn't
        # read yet, those after the prompt that it has read, and the number of passes this took.
        self.teacher_unread = none.clone()
        self.teacher_tokens = none.clone()
        self.teacher_passes = none.clone()
        self.refresh_count = none.clone()
        self.refreshes: list[Refresh] = []

    def positions(self, T: int) -> Tensor:
        """Return the positions (T,) at which the student reads its next T tokens."""
        return self.student_cache.positions(T)

    def snapshot(self) -> dict[str, object]:
        """Return what the student's cache holds, and what the teacher did to it, for traces."""
        student = self.student_cache.snapshot()
        return {**student, "fits": self.same_geometry, "refreshes": self.refreshes}

    def prefill(self) -> None:
        super().prefill()
        self.newest_reading = None
        self.tokens_since_refresh.zero_()
        self.teacher_unread.zero_()

    def read_token(self, token: Tensor, policy: Policy) -> None:
        """Let the student read the next token (B, 1), then refresh its cache if the policy says so.
        The token after it is then predicted from the refreshed cache. If the context is full, the
        teacher reads its later half again."""
        self.ids = torch.cat([self.ids, token], 1)
        self.written += 1
        self.newest_reading = None
        if context_start(self.ids.size(1), self.n_ctx) > self.cached_from:
            self.prefill()
            self.teacher_tokens += len(self.teacher_cache)
            self.teacher_passes += 1
        else:
            self.logits = self.student(token, self.student_cache, last_only=True)[:, -1]
            self.tokens_since_refresh += 1
            self.teacher_unread += 1
        rows = policy.rows_to_refresh(self)
        if rows.any():  # the newest token is in the student's cache, and is refreshed too
            self.refresh(rows, policy)

    def consult_teacher(self, rows: Tensor, policy: Policy) -> Reading:
        """Let the teacher read the new tokens, or the policy's window of them; return its reading.

        rows (B,): the rows that need it. All rows are read, so that they stay equally long, but
        only these are counted in teacher_tokens and teacher_passes, which say what each row would
        cost alone. A second call at the same token returns the same reading.

        Raises ValueError, and changes nothing, if the student has read no token since the last
        refresh or prefill.
        """
        if self.newest_reading is not None:
            return self.newest_reading
        if not self.tokens_since_refresh.any():
            raise ValueError(
                f"there are 0 new tokens after {len(self.student_cache)}: the teacher needs at least 1 to read"
            )
        if policy.reads_window and self.same_geometry:
            tokens_read = self.tokens_since_refresh.clamp(max=policy.window)  # (B,)
            cache = self.student_cache_before(int(tokens_read.max()))
        else:
            tokens_read = self.teacher_unread
            cache = self.teacher_cache
        unread = self.ids[:, self.cached_from + len(cache) :]
        logits = self.teacher(unread, cache, last_only=True)[:, -1]
        self.newest_reading = Reading(cache, logits)
        self.teacher_tokens += tokens_read * rows
        self.teacher_passes += rows
        self.teacher_unread *= ~rows
        return self.newest_reading

    def student_cache_before(self, count: int) -> KVCache:
        """Return the student's cache without its last `count` tokens; the two share memory."""
        end = len(self.student_cache) - count
        layers = [kv[..., :end, :] for kv in self.student_cache.layers]
        return KVCache(layers, self.student_cache.pos[:end])

    def refresh(self, rows: Tensor, policy: Policy) -> None:
        """Replace the student's entries since the last refresh, or the window's, by the teacher's
        in the rows (B,) that are true. There the student predicts the next token again, from the
        refreshed cache; that takes one more pass."""
        started = time.perf_counter()
        tokens_before = int(self.teacher_tokens.sum())
        counts = self.tokens_since_refresh * rows  # (B,)
        if policy.window is not None:
            counts = counts.clamp(max=policy.window)
        if self.same_geometry:
            splice_last(self.student_cache, self.consult_teacher(rows, policy).cache, counts)
            again = self.student(self.ids[:, -1:], LastTokenAgain(self.student_cache))
            self.logits = torch.where(rows[:, None], again[:, -1], self.logits)
        tokens_read = int(self.teacher_tokens.sum()) - tokens_before  # int() waits for the device
        seconds = time.perf_counter() - started
        self.tokens_since_refresh *= ~rows
        self.refresh_count += rows
        self.refreshes.append(Refresh(self.written, tokens_read, int(counts.max()), seconds))


@torch.no_grad()
def generate_refreshed(
    pair: RefreshedPair,
    max_new_tokens: int,
    policy: Policy | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield max_new_tokens tokens (B, 1) after the pair's prompts, each as soon as it is known: the
    first from the teacher's own reading of the prompt (the source draws it from the student, on the
    teacher's cache), all others from the student, on a cache that the policy has refreshed.

    Options and errors are those of gpt_kv_cache.generate().
    """
    check_options(pair.ids, max_new_tokens, temperature, top_k)
    token = None
    for _ in range(max_new_tokens):
        if token is None:
            pair.prefill()
        else:
            pair.read_token(token, policy or Policy())
        token = sample(pair.logits, temperature, top_k, generator)  # (B, 1)
        yield token


@torch.no_grad()
def read_along(pair: RefreshedPair, continuation: Tensor, policy: Policy) -> Iterator[Tensor]:
    """Let a pair read a continuation (B, N) of its prompts as if the pair had written it; yield the
    logits (B, V) after each token."""
    pair.prefill()
    for token in continuation.split(1, 1):
        pair.read_token(token, policy)
        yield pair.logits


# --- When to refresh ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """When the teacher refreshes, and how much of the cache. This base class never refreshes, which
    is plain OverFill."""

    window = None  # the most tokens that a refresh replaces; None: no limit
    # True: the teacher reads only the window, on top of the student's cache, which is a second
    # approximation. False: it reads all tokens that it has not read yet, on its own cache.
    reads_window = False

    def rows_to_refresh(self, pair: RefreshedPair) -> Tensor:
        """Return which rows (B,) to refresh now, after the student has read a token."""
        return torch.zeros_like(pair.tokens_since_refresh, dtype=torch.bool)


@dataclass(frozen=True)
class Periodic(Policy):
    """Refresh every `every` tokens.

    With a window W, at most the last W tokens are replaced. With reads_window, these are also all
    that the teacher reads, k_r = min(W, tokens since the last refresh), as in the source's cost
    formula; in the source's listing it reads all new tokens. The source's speculative refresh is
    this policy, too: the student writes a burst of tokens, and the teacher corrects exactly that
    burst.

    Raises ValueError if a value is below 1, or if reads_window is set without a window.
    """

    every: int
    window: int | None = None
    reads_window: bool = False

    def __post_init__(self) -> None:
        if self.reads_window and self.window is None:
            raise ValueError("a teacher that reads the window needs one")
        for value in (self.every, self.window):
            if value is not None and value < 1:
                raise ValueError(f"every and window must be at least 1, got {value}")

    def rows_to_refresh(self, pair: RefreshedPair) -> Tensor:
        return pair.tokens_since_refresh >= self.every


@dataclass(frozen=True)
class Gate(Policy):
    """Refresh if a signal exceeds a threshold, but no sooner than `cooldown` tokens after the last
    refresh: a high signal often comes from a hard word, which is still there at the next token. The
    signal is computed every `every` tokens. Raises ValueError if the threshold is NaN."""

    threshold: float
    cooldown: int = 16
    every: int = 1

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise ValueError("threshold must be a number, got nan")

    def rows_to_refresh(self, pair: RefreshedPair) -> Tensor:
        ready = pair.tokens_since_refresh >= max(1, self.cooldown)
        if pair.written % self.every or not ready.any():
            return super().rows_to_refresh(pair)
        return (self.signal(pair) > self.threshold) & ready

    def signal(self, pair: RefreshedPair) -> Tensor:
        """Return the signal (B,): the higher it is, the more a row may need a refresh."""
        raise NotImplementedError


@dataclass(frozen=True)
class Entropy(Gate):
    """Refresh if the student is unsure of the next token. The signal is the entropy in bits."""

    def signal(self, pair: RefreshedPair) -> Tensor:
        return entropy(pair.logits)


@dataclass(frozen=True)
class ProbeKL(Gate):
    """Refresh if teacher and student disagree. Every `every` tokens the teacher reads along; the
    signal is KL(teacher || student) in nats."""

    def signal(self, pair: RefreshedPair) -> Tensor:
        all_rows = torch.ones_like(pair.tokens_since_refresh, dtype=torch.bool)
        return kl(pair.consult_teacher(all_rows, self).logits, pair.logits)


@dataclass(frozen=True)
class MonteCarloDropout(Gate):
    """Refresh if passes with dropout disagree with one another. The signal is U(t), the variance of
    their logits."""

    passes: int = 8
    rate: float = 0.1  # the dropout that the student was trained with

    def signal(self, pair: RefreshedPair) -> Tensor:
        last_token = pair.ids[:, -1:]
        logits = dropout_logits(
            pair.student, last_token, pair.student_cache, self.passes, self.rate
        )
        return logit_variance(logits)


def logit_variance(logits: Tensor) -> Tensor:
    """Return U(t) (...), the mean over the vocabulary of the variance of logits (..., N, V) over N
    passes."""
    return logits.float().var(-2, correction=0).mean(-1)


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set the rate of all dropout in a model, which acts in train() only."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    for block in model.h:
        block.attn.dropout = rate


@contextmanager
def active_dropout(model: nn.Module, rate: float) -> Iterator[None]:
    """Switch on a model's dropout, at this rate, within a with-block; then back to eval()."""
    set_dropout(model, rate)
    model.train()
    try:
        yield
    finally:
        model.eval()
        set_dropout(model, model.config.dropout)


@torch.no_grad()
def dropout_logits(
    model: nn.Module, token: Tensor, cache: KVCache, passes: int, rate: float
) -> Tensor:
    """Return the logits (B, N, V) of N passes with dropout over the last token (B, 1) that a cache
    holds.

    The passes are N queries side by side: each sees the tokens before the last one, and its own key
    and value of the last one. So together they cost as much as reading N tokens, and the cache
    stays as it is. Source: section "Monte Carlo Dropout".
    """
    with active_dropout(model, rate):
        return model(token.expand(-1, passes), SideBySide(cache, passes))


class LastTokenAgain:
    """The cache for one more query of another cache's last token, which reads all entries held there,
    its own included; its new key and value are ignored, and nothing is kept."""

    def __init__(self, cache: KVCache) -> None:
        self.length = len(cache) - 1
        self.layers = cache.layers
        self.pos = cache.pos[-1:]

    def __len__(self) -> int:
        return self.length

    def positions(self, T: int) -> Tensor:
        """Return the last token's position for each of T queries (T,)."""
        return self.pos.expand(T)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the held keys and values (B, H, n, D), and no mask."""
        k, v = self.layers[layer][..., : self.length + 1, :]  # (2, B, H, n, D)
        return k, v, None

    def commit(self, pos: Tensor) -> None:
        """Keep nothing."""


class SideBySide(LastTokenAgain):
    """The cache for a pass of N queries of the last token side by side. Each query sees the tokens
    before that one, and itself."""

    def __init__(self, cache: KVCache, passes: int) -> None:
        super().__init__(cache)
        query = torch.arange(passes, device=self.pos.device)
        before = torch.ones(passes, self.length, dtype=torch.bool, device=query.device)
        self.mask = torch.cat([before, query == query[:, None]], 1)  # (N, n + N)

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' keys and values before the N new ones (B, H, n + N, D), and the mask."""
        held = self.layers[layer][..., : self.length, :]  # (2, B, H, n, D)
        k, v = torch.cat([held, torch.stack([k, v])], 3)
        return k, v, self.mask


# --- Command line ---------------------------------------------------------------------------------


class PolicyKind(NamedTuple):
    """A kind of policy, with the names of those that the study measures.

    A policy is named by its kind and its values, such as periodic:64. A gate can be named by how
    often it fires instead of by its threshold: entropy~2.5 fires 2.5 times in 1,000 tokens.
    """

    create: Callable[..., Policy]  # from the values in the name
    parameters: dict[str, Callable[[str], float]]  # by the letters that stand for them in --help
    description: str  # when it refreshes
    studied: tuple[str, ...]
    optional: int = 0  # how many of the parameters, the last ones, may be left out

    @property
    def required(self) -> int:
        return len(self.parameters) - self.optional

    def form(self, name: str) -> str:
        """Return the form of such a policy's name, with what may be left out in brackets."""
        letters = [*self.parameters]
        left_out = "".join(f"[:{letter}]" for letter in letters[self.required :])
        return ":".join([name, *letters[: self.required]]) + left_out


# All policies. A new one is a class and a line here: the command line, the tests and the study go
# over this table.
TOKEN_COUNT = whole_number(1)
POLICIES = {
    "none": PolicyKind(Policy, {}, "never: OverFill as it is", ("none",)),
    "periodic": PolicyKind(
        Periodic,
        {"T": TOKEN_COUNT},
        "every T tokens",
        ("periodic:256", "periodic:128", "periodic:64", "periodic:32", "periodic:16"),
    ),
    "windowed": PolicyKind(
        lambda every, window: Periodic(every, window, reads_window=True),
        {"T": TOKEN_COUNT, "W": TOKEN_COUNT},
        "every T, the last W of them",
        ("windowed:64:16",),
    ),
    "windowed-listing": PolicyKind(
        Periodic,
        {"T": TOKEN_COUNT, "W": TOKEN_COUNT},
        "the same, and the teacher reads all T",
        ("windowed-listing:64:16",),
    ),
    "speculative": PolicyKind(
        Periodic, {"K": TOKEN_COUNT}, "after bursts of K tokens", ("speculative:8",)
    ),
    "entropy": PolicyKind(
        Entropy,
        {"H": float, "C": whole_number(0)},
        "if the student's next token has more than H bits, and at least C tokens (by default "
        f"{Gate.cooldown}) after the last refresh",
        ("entropy~2.5", "entropy~7.8", "entropy:5.5:0", "entropy:6:0", "entropy:6.5:0"),
        optional=1,
    ),
    "probe": PolicyKind(
        lambda every, threshold: ProbeKL(threshold, every=every),
        {"M": TOKEN_COUNT, "D": float},
        "every M tokens, if it is D nats from the teacher's",
        ("probe:32~7.8",),
    ),
    "dropout": PolicyKind(
        lambda passes, threshold: MonteCarloDropout(threshold, passes=passes),
        {"N": whole_number(2, 1024), "U": float},
        "if the logits of N passes with dropout vary by U",
        ("dropout:8~7.8",),
    ),
}


def parse_policy(text: str) -> Policy:
    """Return the policy that a text such as periodic:64 stands for. Raises ValueError if there is
    none."""
    name, *values = text.split(":")
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose {', '.join(POLICIES)}")
    kind = POLICIES[name]
    if not kind.required <= len(values) <= len(kind.parameters):
        raise ValueError(f"the policy {text!r} must have the form {kind.form(name)}")
    conversions = zip(kind.parameters.values(), values, strict=False)  # the rest has defaults
    try:
        return kind.create(*(convert(value) for convert, value in conversions))
    except (ArgumentTypeError, ValueError) as error:
        raise ValueError(f"the policy {text!r}: {error}") from error


def trained_dropout(name: str) -> float:
    """Return the dropout that a model was trained with, by its config.json; Hugging Face's default
    is 0.1 for a GPT-2, and 0 for a Llama. Raises ValueError if it is no number, or 0."""
    checkpoint = open_checkpoint(name)
    config = checkpoint.config()
    config.setdefault("resid_pdrop", 0.1 if config.get("model_type", "gpt2") == "gpt2" else 0.0)
    rate = check_fields(config, checkpoint.where, resid_pdrop=float)["resid_pdrop"]
    if not rate:
        raise ValueError(f"{name} was trained without dropout: passes with it say nothing")
    return float(rate)


def print_continuation(
    pair: RefreshedPair,
    tokens: Iterator[Tensor],
    tokenizer: tiktoken.Encoding,
    trace: Trace | None = None,
) -> None:
    """Print a pair's prompt, the tokens that it writes, the places of the refreshes, and their cost."""
    print(tokenizer.decode(pair.ids[0].tolist()), end="", flush=True)
    stream(tokens, tokenizer, pair, trace)
    places = [str(refresh.written) for refresh in pair.refreshes]
    if len(places) > 12:
        places[8:-3] = ["..."]
    splice_ms = 1e3 * sum(refresh.seconds for refresh in pair.refreshes)
    print(
        f"[refreshed after tokens: {', '.join(places) or 'none'}, spliced in {splice_ms:.1f} ms; "
        f"the teacher read {int(pair.teacher_tokens)} tokens after the prompt]"
    )


def tokens_per_second(tokens: Iterator[Tensor]) -> float:
    """Generate all tokens, and return how many that is per second."""
    seconds, written = time_call(lambda: list(tokens))
    return len(written) / seconds


def demo_prompts(name: str, tokenizer: tiktoken.Encoding) -> list[list[int]]:
    """Return the beginnings of six documents of pocket's corpus or, for a model that isn't pocket's,
    of three texts in data/real."""
    from pocket import corpus  # which is all that this file needs of pocket

    if name.startswith("pocket"):
        return corpus.beginnings(tokenizer, "test", 6, 384)
    return rows_of_tokens(tokenizer, 192)[::4]


@torch.no_grad()
def demo(
    teacher: nn.Module,
    student: nn.Module,
    prompts: list[list[int]],
    policies: dict[str, Policy],
    new_tokens: int,
    seed: int,
    study: str,
) -> None:
    """Compare the student alone, and pairs of both models, with the teacher on texts that the
    teacher has sampled. Print how far their predictions are from the teacher's, the nearest first,
    and how fast each writes a text.

    prompts: of equal length; study: the command that measures more. Raises ValueError if a prompt
    and the new tokens exceed the context, if there are fewer than 2 new tokens, or as check_pair()
    does.
    """
    check_pair(teacher, student)
    prompt_length = len(prompts[0])
    n_ctx = min(teacher.config.n_ctx, student.config.n_ctx)
    if not 2 <= new_tokens <= n_ctx - prompt_length:
        raise ValueError(
            f"the demo compares at least 2 tokens after a prompt of {prompt_length}, up to the end "
            f"of a context of {n_ctx}, got {new_tokens}"
        )
    ids = torch.tensor(prompts, device=teacher.wte.weight.device)
    generator = torch.Generator(ids.device).manual_seed(seed)
    new_cache = partial(PreallocatedCache, prompt_length + new_tokens)
    sampled = generate(
        teacher, ids, new_tokens, cache=new_cache(), temperature=1.0, generator=generator
    )
    continuation = torch.cat(list(sampled), 1)  # (B, N)
    text = torch.cat([ids, continuation], 1)
    expected = teacher(text)[:, prompt_length:]  # (B, N, V)
    rows = []  # each with the divergence that it is sorted by
    bar = tqdm(total=3 + len(policies), unit=" ways", leave=False, delay=2)

    def add_row(name: str, logits: Tensor, teacher_reads: str, speed: float) -> None:
        divergence = float(kl(expected, logits).mean())
        targets = continuation[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        figures = [f"{divergence:z.3f}", f"{loss.exp():.2f}", teacher_reads, f"{speed:.0f}"]
        rows.append((divergence, [name, *figures]))
        bar.update()

    speed = tokens_per_second(generate(teacher, ids[:1], new_tokens, cache=new_cache()))
    add_row("teacher", expected, f"{prompt_length} + {new_tokens - 1}", speed)
    speed = tokens_per_second(generate(student, ids[:1], new_tokens, cache=new_cache()))
    add_row("student alone", student(text)[:, prompt_length:], "0", speed)
    for name, policy in {"OverFill": Policy(), **policies}.items():
        pair = RefreshedPair(teacher, student, ids[:1], new_cache)
        speed = tokens_per_second(generate_refreshed(pair, new_tokens, policy))
        all_texts = RefreshedPair(teacher, student, ids, new_cache)
        logits = torch.stack(list(read_along(all_texts, continuation, policy)), 1)
        add_row(name, logits, f"{prompt_length} + {int(pair.teacher_tokens)}", speed)
    bar.close()
    rows.sort()
    header = ["", "KL to teacher", "perplexity", "teacher reads", "tokens/s"]
    print(f"""\
{len(ids)} prompts of {prompt_length} tokens

{table(header, [row for _, row in rows])}

KL to teacher:  in nats, mean over texts of {new_tokens} tokens that the teacher has sampled
perplexity:     of the same texts, by each way's predictions
teacher reads:  tokens of the prompt + tokens of the text
tokens/s:       greedy, after the first prompt, prefill included

Exact: the first token, and the student's cache right after a refresh of the whole text.
Approximate: every further token, because the student predicts it.

The full study, in hours (--quick: in a minute or two): {study}""")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 %(prog)s write --policy periodic:64 --temperature 1")
    comparison, one_way = cli.add_actions(
        "demo", demo="compare ways to write", write="continue a prompt in one way"
    )
    for action in (comparison, one_way):
        action.add_model_options(NAMES, "--student", option="--teacher")
    comparison.add_options("--max-new-tokens", default=ByModel(160, 96))
    one_way.add_options(*WRITING, "--chat", "--system", "--trace")
    forms = (f"{kind.form(name)} ({kind.description})" for name, kind in POLICIES.items())
    when = (
        f"one of {'; '.join(forms)}; probe and dropout wait {Gate.cooldown} tokens after a refresh"
    )
    comparison.add_argument(
        "--policy",
        default="periodic:64 periodic:16",
        metavar="P",
        help=f"when to refresh: policies, separated by spaces, each {when}",
    )
    one_way.add_argument(
        "--policy", default="periodic:64", metavar="P", help=f"when to refresh, {when}"
    )
    with cli.parse(argv) as args:
        names = [args.policy]
        if args.action == "demo" and args.policy.strip():
            names = args.policy.split()
        policies = {f"OverFill, {name}": parse_policy(name) for name in names}
        student_name = args.student or default_student(args.model)
        teacher, student, tokenizer = load_pair(
            args.model, student_name, device=args.device, dtype=args.dtype
        )
        for name, policy in policies.items():
            if isinstance(policy, MonteCarloDropout):
                policies[name] = replace(policy, rate=trained_dropout(student_name))
        if args.action == "demo":
            prompts = demo_prompts(args.model, tokenizer)
            study = study_command("refreshing", args.model, "--teacher")
            return demo(teacher, student, prompts, policies, args.max_new_tokens, args.seed, study)
        ids = torch.tensor([encode_given_prompt(args, tokenizer)], device=args.device)
        policy, *_ = policies.values()
        pair = RefreshedPair(teacher, student, ids)
        tokens = generate_refreshed(
            pair,
            args.max_new_tokens,
            policy,
            temperature=args.temperature,
            top_k=args.top_k,
            generator=torch.Generator(args.device).manual_seed(args.seed),
        )
        trace = Trace(args.trace, tokenizer, student, ids) if args.trace else None
        print_continuation(pair, tokens, tokenizer, trace)


if __name__ == "__main__":
    main()
