"""Is this KV cache right? Some twenty checks compare what a model computes with its cache and without one, in seconds.

    python3 examine.py                             our own KVCache
    python3 examine.py borrow/my_gpt.py            a model of our protocol: the file's `model`
    python3 examine.py chapters/02_kv_cache/exercise.py   a cache: the file's class Cache
    python3 examine.py FOLDER --cache dynamic      a model of transformers, by folder or name, with a cache of its own or ours
    python3 examine.py --subject window            one of those that borrow/EXAMINED.md is about

The measure is the model itself, in one pass without a cache, with an explicit mask where the cache forgets tokens. A
check says what it did, the largest difference of logits and where, and which public bug is of its kind. What a cache has
no way to do is "not offered", and neither right nor wrong.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from borrow.examined import (
    SUBJECTS,
    TRANSFORMERS_CACHES,
    NotOffered,
    Subject,
    TransformersSubject,
    subject_of_file,
)
from support.cli import CommandLine
from support.files import write_text

TOLERANCE = 1e-4  # of the largest logit: sums in another order differ in float32's last bits
TEXT = 40  # tokens of a text, or as many as the context has
LONGEST_CONTEXT = 4096  # that is read to its end
APPROXIMATE = "approximate"


class Interrupted(Exception):
    """What a check raises within a pass."""


class WrongError(Exception):
    """A fault that is no difference of logits, in a sentence."""


class Finding(NamedTuple):
    """What a check found: "right", "WRONG", "measured" or "not offered"; and the sentence that says it."""

    check: str
    verdict: str
    says: str
    kind: str  # public bugs of this kind


class Check(NamedTuple):
    name: str
    kind: str
    function: Callable[[Subject, Comparison], str | None]


@dataclass
class Comparison:
    """The largest difference between logits and what they should be, relative to the largest logit, and where it is."""

    tolerance: float = TOLERANCE
    largest: float = -1.0
    where: str = ""

    def add(self, got: Tensor, expected: Tensor, first: int = 0) -> None:
        """Compare logits (B, T, V) of tokens from `first` on. Raises WrongError if their shapes differ."""
        if got.shape != expected.shape:
            raise WrongError(
                f"logits have shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
            )
        apart = (got.float() - expected.float()).abs() / expected.float().abs().max()
        apart = apart.nan_to_num(nan=math.inf)
        largest = float(apart.max())
        if largest > self.largest:
            row, token, logit = torch.unravel_index(apart.argmax(), apart.shape)
            self.largest = largest
            self.where = f"row {int(row)}, token {first + int(token)}, logit {int(logit)}"


CHECKS: list[Check] = []


def check(name: str, kind: str) -> Callable:
    """Add a function to the checks. kind: public bugs of this kind, as project#number."""

    def add(function: Callable) -> Callable:
        CHECKS.append(Check(name, kind, function))
        return function

    return add


def examine(subject: Subject, approximate: bool = False, only: str = "") -> Iterator[Finding]:
    """Yield what each check finds. approximate: differences are measured, and aren't wrong."""
    for each in CHECKS:
        if only and only not in each.name:
            continue
        comparison = Comparison()
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                says = each.function(subject, comparison)
        except NotOffered as error:
            yield Finding(each.name, "not offered", str(error), each.kind)
            continue
        except WrongError as error:
            yield Finding(each.name, "WRONG", str(error), each.kind)
            continue
        except Exception as error:  # whatever a stranger's code raises is what this check found
            words = " ".join(f"{type(error).__name__}: {error}".split())
            yield Finding(each.name, "WRONG", f"{words:.160}", each.kind)
            continue
        difference = f"{max(comparison.largest, 0):.1e} of the largest logit"
        if says is not None:
            yield Finding(each.name, "measured", says, each.kind)
        elif comparison.largest <= comparison.tolerance:
            yield Finding(each.name, "right", difference, each.kind)
        else:
            verdict = "measured" if approximate and comparison.largest < math.inf else "WRONG"
            yield Finding(each.name, verdict, f"{difference}, at {comparison.where}", each.kind)


# --- What the checks do ------------------------------------------------------------------------------


def random_ids(subject: Subject, rows: int = 2, n: int = 0, seed: int = 1) -> Tensor:
    """Return random tokens (B, T), by default as many as TEXT or the context allows."""
    draw = torch.Generator().manual_seed(seed)
    n = n or min(TEXT, subject.context - 2)
    ids = torch.randint(subject.vocab_size, (rows, n), generator=draw)
    return ids.to(next(subject.model.parameters()).device)


def read_pieces(
    subject: Subject, comparison: Comparison, ids: Tensor, sizes: list[int], cache: Any = None
) -> Any:
    """Read ids (B, T) in pieces of these sizes, after what the cache holds of them; compare each piece. Return the
    cache."""
    expected, cache = subject.whole(ids), subject.new() if cache is None else cache
    start = ids.size(1) - sum(sizes)
    for piece in ids[:, start:].split(sizes, dim=1):
        end = start + piece.size(1)
        comparison.add(subject.read(cache, piece), expected[:, start:end], start)
        start = end
    return cache


def filled(subject: Subject, ids: Tensor) -> Any:
    """Return a cache that has read ids (B, T)."""
    cache = subject.new()
    subject.read(cache, ids)
    return cache


def executed(model: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of a model, in the order of their names."""
    return [
        module for module in model.modules() if not [*module.children()] and [*module.parameters()]
    ]


@contextlib.contextmanager
def failing(subject: Subject, ids: Tensor, at_end: bool) -> Iterator[None]:
    """Any pass fails as it comes to its last module, or to one in the middle."""
    order: list[nn.Module] = []
    hooks = [
        m.register_forward_pre_hook(lambda module, _: order.append(module))
        for m in executed(subject.model)
    ]
    subject.whole(ids[:, :2])
    for hook in hooks:
        hook.remove()
    if not order:
        raise NotOffered("the model has no modules to interrupt")

    def fail(*_: object) -> None:
        raise Interrupted

    hook = order[-1 if at_end else len(order) // 2].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def interrupted(subject: Subject, cache: Any, ids: Tensor, at_end: bool) -> None:
    """Read ids in a pass that fails. Raises WrongError if it doesn't."""
    with failing(subject, ids, at_end):
        try:
            subject.read(cache, ids)
        except Interrupted:
            return
    raise WrongError("a pass whose last module raised an error came to its end")


@check("a prompt is read at once", "Mikyx-1/TinyLLM#17")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    read_pieces(subject, comparison, ids, [ids.size(1)])


@check("a second piece follows", "hyprstream#1521, candle#3743")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    read_pieces(subject, comparison, ids, [ids.size(1) // 2, ids.size(1) - ids.size(1) // 2])


@check("one token at a time", "mlx-lm#390, TrenTorch#192")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    read_pieces(subject, comparison, ids, [1] * ids.size(1))


@check("pieces of any size", "transformers#45513")
def _(subject: Subject, comparison: Comparison) -> None:
    draw = torch.Generator().manual_seed(2)
    for seed in range(8):
        ids = random_ids(subject, seed=seed)
        sizes: list[int] = []
        while (left := ids.size(1) - sum(sizes)) > 0:
            size = int(torch.randint(1, [2, 4, left + 1][seed % 3], (), generator=draw))
            sizes.append(min(size, left))
        read_pieces(subject, comparison, ids, sizes)


@check("a piece longer than the window, on a full one", "mlxcel#679, LLMs-from-scratch (optimized)")
def _(subject: Subject, comparison: Comparison) -> None:
    window = window_of(subject)
    ids = random_ids(subject, n=min(subject.context - 1, 4 * window))
    first = 2 * window
    read_pieces(subject, comparison, ids, [first, ids.size(1) - first])


@check("the window's first and last token", "transformers#37574, litgpt#2153")
def _(subject: Subject, comparison: Comparison) -> None:
    """One token at a time, over the place where the window is full; and each length around it as a prompt."""
    window = window_of(subject)
    ids = random_ids(subject, n=min(subject.context - 1, 3 * window))
    read_pieces(subject, comparison, ids, [1] * ids.size(1))
    for n in range(max(1, window - 2), window + 3):
        read_pieces(subject, comparison, ids[:, : n + 4], [n, 1, 1, 2])


def window_of(subject: Subject) -> int:
    window = subject.window
    if window is None and isinstance(subject, TransformersSubject):
        window = getattr(subject.model.config.get_text_config(), "sliding_window", None)
    if window is None or 2 * window >= subject.context:
        raise NotOffered("it has no window below half the context")
    return window + subject.sinks


@check("rows of a batch, alone and together", "reasoning-from-scratch#33")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject, 3)
    cache = filled(subject, ids[:, :-5])
    together = torch.cat([subject.read(cache, ids[:, -5:-1]), subject.read(cache, ids[:, -1:])], 1)
    for row in range(3):
        alone = subject.whole(ids[row : row + 1])[:, -5:]
        comparison.add(together[row : row + 1], alone, ids.size(1) - 5)


@check("texts that are padded on the left", "nnsight#673")
def _(subject: Subject, comparison: Comparison) -> None:
    ids, n = random_ids(subject, 2), 5
    padding = torch.ones_like(ids)
    padding[0, :n] = 0
    cache, start = subject.new(), ids.size(1) - 6
    subject.read_padded(cache, ids[:, :start], padding[:, :start])
    got = [
        subject.read_padded(cache, ids[:, i : i + 1], padding[:, : i + 1])
        for i in range(start, ids.size(1))
    ]
    together = torch.cat(got, 1)
    comparison.add(together[:1], subject.whole(ids[:1, n:])[:, -6:], start)
    comparison.add(together[1:], subject.whole(ids[1:])[:, -6:], start)


@check("a neighbour of NaN", "pytorch#103963, pytorch#101967")
def _(subject: Subject, comparison: Comparison) -> None:
    ids, expected = random_ids(subject), subject.whole(random_ids(subject))
    embedding = next((m for m in subject.model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise NotOffered("the model has no nn.Embedding")
    factor = torch.tensor([1.0, math.nan])[:, None, None].to(ids.device)
    hook = embedding.register_forward_hook(lambda module, args, out: out * factor.to(out.dtype))
    cache = subject.new()
    try:
        got = torch.cat([subject.read(cache, piece) for piece in ids.split(7, dim=1)], 1)
    finally:
        hook.remove()
    comparison.add(got[:1], expected[:1])


@check("a pass that fails in the middle, then goes on", "llama.cpp#27068")
def _(subject: Subject, comparison: Comparison) -> None:
    go_on_after_failure(subject, comparison, at_end=False)


@check("a pass that fails at its end, then goes on", "llama.cpp#27068")
def _(subject: Subject, comparison: Comparison) -> None:
    go_on_after_failure(subject, comparison, at_end=True)


def go_on_after_failure(subject: Subject, comparison: Comparison, at_end: bool) -> None:
    """Other tokens are read by passes that fail: a piece and a single token, early and late in a text."""
    ids = random_ids(subject)
    other = (ids + 1) % subject.vocab_size
    for n in (0, 4, ids.size(1) - 8):
        for size in (1, 4):
            cache = filled(subject, ids[:, :n]) if n else subject.new()
            interrupted(subject, cache, other[:, n : n + size], at_end)
            read_pieces(subject, comparison, ids[:, : n + 8], [5, 1, 2], cache)


@check("a text is cut back, then goes on", "einygpt#2")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    for n, kept in ((5, 3), (10, 9), (10, 4), (12, 1)):
        if evicted(subject, n):
            continue
        cache = filled(
            subject, (ids[:, :n] + torch.arange(n, device=ids.device).ge(kept)) % subject.vocab_size
        )
        subject.truncate(cache, kept)
        read_pieces(subject, comparison, ids[:, : kept + 10], [4, 1, 5], cache)


def evicted(subject: Subject, n: int) -> bool:
    """Whether a cache that has read n tokens has forgotten some."""
    return subject.window is not None and n > subject.window + subject.sinks


@check("a pass that fails, then a cut", "llama.cpp#27068, einygpt#2")
def _(subject: Subject, comparison: Comparison) -> None:
    """On a cache of any length, also on a window that has just been filled."""
    ids = random_ids(subject)
    other, limit = (ids + 1) % subject.vocab_size, (subject.window or 9) + subject.sinks
    for n in (limit - 1, limit, limit + 1):
        for size in (1, 4):
            cache = filled(subject, ids[:, :n])
            interrupted(subject, cache, other[:, n : n + size], at_end=True)
            with contextlib.suppress(NotOffered):
                subject.truncate(cache, n - 2)
                read_pieces(subject, comparison, ids[:, : n + 6], [1, 4, 3], cache)
    if comparison.largest < 0:
        raise NotOffered("no cache of this kind is cut back")


@check("another ending of the same text", "llama.cpp#9866, mlc-llm#3179")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject, n=min(20, subject.context - 2, subject.window or 20))
    other, n = ids.clone(), 4
    other[:, n:] = (other[:, n:] + 1) % subject.vocab_size
    cache = filled(subject, ids)
    subject.truncate(cache, n)
    read_pieces(subject, comparison, other, [1, other.size(1) - n - 1], cache)


@check("the whole prompt is cached", "nano-vllm#144, llama.cpp#730")
def _(subject: Subject, comparison: Comparison) -> None:
    """The last token is read again, for its logits."""
    n = min(12, subject.window or 12)
    ids = random_ids(subject, n=n)
    cache = filled(subject, ids)
    subject.truncate(cache, n - 1)
    read_pieces(subject, comparison, ids, [1], cache)


@check("a draft of which two tokens stay", "transformers#47912, mlx-lm#1109")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject, 1)
    n = min(3, (subject.window or 7) - 4)
    cache = filled(subject, ids[:, :n])
    draft = torch.cat([ids[:, n : n + 2], (ids[:, n + 2 : n + 4] + 1) % subject.vocab_size], 1)
    subject.read(cache, draft)
    subject.truncate(cache, n + 2)
    read_pieces(subject, comparison, ids[:, :16], [1, 4, 16 - n - 7], cache)


@check("a copy and its original go on", "transformers#37078")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    other, n = ids.clone(), ids.size(1) - 12
    other[:, n:] = (other[:, n:] + 1) % subject.vocab_size
    cache = filled(subject, ids[:, :n])
    copied = subject.clone(cache)
    for size in (1, 4, 1, 6):
        start = subject.length(cache)
        for each, text in ((cache, ids), (copied, other)):
            expected = subject.whole(text[:, : start + size])[:, start:]
            comparison.add(subject.read(each, text[:, start : start + size]), expected, start)


@check("two texts in turn", "LMCache#4385, vllm#30931")
def _(subject: Subject, comparison: Comparison) -> None:
    texts = [random_ids(subject, 1, seed=seed) for seed in (3, 4)]
    expected, caches = [subject.whole(text) for text in texts], [subject.new(), subject.new()]
    start = 0
    for size in (7, 1, 1, 5):
        for text, whole, cache in zip(texts, expected, caches, strict=True):
            got = subject.read(cache, text[:, start : start + size])
            comparison.add(got, whole[:, start : start + size], start)
        start += size


@check("a new text after another", "llama.cpp#27068")
def _(subject: Subject, comparison: Comparison) -> None:
    filled(subject, random_ids(subject, 3, seed=5))
    ids = random_ids(subject, seed=6)
    read_pieces(subject, comparison, ids, [7, 1, ids.size(1) - 8])


@check("past the context", "mlx-lm#390, einygpt#2")
def _(subject: Subject, comparison: Comparison) -> None:
    """What is too long is refused, and what was read before stays."""
    if subject.context > LONGEST_CONTEXT:
        raise NotOffered(f"a context of {subject.context:,} tokens takes too long to fill")
    ids = random_ids(subject, 1, int(subject.context) + 3)
    for n, size in ((subject.context - 4, 7), (subject.context, 1)):
        for copied in (False, True):
            cache = filled(subject, ids[:, :n])
            with contextlib.suppress(NotOffered):
                cache = subject.clone(cache) if copied else cache
            read_too_much(subject, comparison, cache, ids[:, : n + size], size)


def read_too_much(
    subject: Subject, comparison: Comparison, cache: Any, ids: Tensor, size: int
) -> None:
    """Read the last `size` tokens of ids (1, T), which exceed the context. What a model reads without a cache may be
    read, and anything else has to be refused, and the text to go on."""
    n = ids.size(1) - size
    try:
        got = subject.read(cache, ids[:, n:])
    except Exception:  # any refusal will do
        if n < subject.context:
            read_pieces(subject, comparison, ids[:, : subject.context], [3, 1], cache)
        comparison.largest = max(comparison.largest, 0.0)
        return
    try:
        expected = subject.whole(ids)
    except Exception as error:
        raise WrongError(
            "without a cache what exceeds the context is refused, and with it isn't"
        ) from error
    comparison.add(got, expected[:, n:], n)


@check("tokens are counted", "transformers#38156, transformers#30377")
def _(subject: Subject, comparison: Comparison) -> None:
    """After each pass, of any size; also if a token's embedding is 0."""
    ids = random_ids(subject)
    embedding = next((m for m in subject.model.modules() if isinstance(m, nn.Embedding)), None)
    zero = embedding.register_forward_hook(lambda m, args, out: out * 0) if embedding else None
    cache, n = subject.new(), 0
    try:
        for size in (1, 6, 1, 9, 2):
            subject.read(cache, ids[:, n : n + size])
            n += size
            if (counted := subject.length(cache)) != n:
                hint = "; is commit() called?" if counted == 0 else ""
                raise WrongError(f"after {n} tokens the cache counts {counted}{hint}")
    finally:
        if zero:
            zero.remove()
    comparison.largest = 0.0


@check("a failed pass isn't counted", "TrenTorch#192")
def _(subject: Subject, comparison: Comparison) -> None:
    ids = random_ids(subject)
    cache = filled(subject, ids[:, :6])
    for size in (1, 3):
        interrupted(subject, cache, ids[:, 6 : 6 + size], at_end=True)
        if (counted := subject.length(cache)) != 6:
            raise WrongError(
                f"after 6 tokens, and {size} in a pass that failed, the cache counts {counted}"
            )
    comparison.largest = 0.0


@check("bytes are those of key-value heads", "KVCache-Factory#49")
def _(subject: Subject, comparison: Comparison) -> None:
    """A cache may take slots for its window or its context, and those of some passes."""
    ids = random_ids(subject, 1)
    nbytes, token = subject.nbytes(filled(subject, ids)), subject.token_bytes()
    most = token * max(ids.size(1), subject.context + 1)
    if nbytes > most:
        raise WrongError(
            f"{ids.size(1)} tokens take {nbytes:,} bytes, and {most:,} would hold the context"
        )
    if subject.window is not None and nbytes > token * (subject.window + subject.sinks + 1):
        raise WrongError(f"a window of {subject.window} takes {nbytes:,} bytes, {token:,} a token")
    comparison.largest = 0.0


@check("bfloat16 beside float32", "transformers#25420, candle#3743")
def _(subject: Subject, comparison: Comparison) -> None:
    """The distance from float32 may be half as large again as without a cache."""
    if next(subject.model.parameters()).dtype != torch.float32:
        raise NotOffered("the model isn't in float32")
    half, ids = subject.as_dtype(torch.bfloat16), random_ids(subject)
    exact, rounding = subject.whole(ids), half.whole(ids).float()
    cache = half.new()
    got = torch.cat(
        [half.read(cache, piece) for piece in ids.split([9, 1, 7, ids.size(1) - 17], 1)], 1
    )
    comparison.add(got, exact)
    scale = exact.abs().max()
    comparison.tolerance = 1.5 * float((rounding - exact).abs().max() / scale) + 0.01


@check("weights change while a text is cached", "vllm#9744, lmdeploy#4917")
def _(subject: Subject, comparison: Comparison) -> str:
    """No cache can know; the difference says what it costs."""
    ids = random_ids(subject)
    cache = filled(subject, ids[:, :-1])
    kept = [parameter.clone() for parameter in subject.model.parameters()]
    try:
        for parameter in subject.model.parameters():
            parameter.mul_(1.1)
        comparison.add(
            subject.read(cache, ids[:, -1:]), subject.whole(ids)[:, -1:], ids.size(1) - 1
        )
    finally:
        for parameter, old in zip(subject.model.parameters(), kept, strict=True):
            parameter.copy_(old)
    return f"weights a tenth larger: {comparison.largest:.1e} of the largest logit; nothing says that the cache is stale"


# --- The page, and the script -------------------------------------------------------------------------


def page() -> str:
    """Return borrow/EXAMINED.md: what the checks say of SUBJECTS."""
    import importlib.metadata

    columns = {
        name: [*examine(make(), APPROXIMATE in title)] for name, (title, make) in SUBJECTS.items()
    }
    packages = ("torch", "transformers", "llms-from-scratch", "optimum-quanto")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    lines = [
        "# Examined",
        "",
        "[examine.py](../examine.py) has examined these caches, on small models with random weights. Each line can be",
        "repeated by its command; the whole page is written by `python3 examine.py --page borrow/EXAMINED.md`.",
        f"Versions: {versions}.",
        "",
        "| cache | right | wrong | not offered | command |",
        "|---|---:|---:|---:|---|",
    ]
    for name, findings in columns.items():
        counts = [
            sum(f.verdict == verdict for f in findings)
            for verdict in ("right", "WRONG", "not offered")
        ]
        title = SUBJECTS[name][0]
        lines.append(
            f"| {title} | {' | '.join(map(str, counts))} | `python3 examine.py --subject {name}` |"
        )
    lines += [
        "",
        "Differences are relative to the largest logit; up to 1e-4 is rounding. The rest of a cache's checks are measured:",
        "what changed weights do, and the differences of approximate caches.",
        "",
    ]
    for name, findings in columns.items():
        wrong = [finding for finding in findings if finding.verdict == "WRONG"]
        measured = [
            f for f in findings if f.verdict == "measured" and APPROXIMATE in SUBJECTS[name][0]
        ]
        if not wrong and not measured:
            continue
        lines += [f"## {SUBJECTS[name][0]}", ""]
        lines += ["| check | | found | public bugs of this kind |", "|---|---|---|---|"]
        lines += [f"| {f.check} | {f.verdict} | {f.says} | {f.kind} |" for f in [*wrong, *measured]]
        lines.append("")
    lines += ["## The checks", "", "| check | public bugs of this kind |", "|---|---|"]
    lines += [f"| {each.name} | {each.kind} |" for each in CHECKS]
    return "\n".join(lines) + "\n"


def subject_named(what: str, cache: str) -> Subject:
    """Return what a file, a folder or a name stands for. Raises ValueError if it is none, or takes no such cache."""
    if what.endswith(".py"):
        if not Path(what).is_file():
            raise ValueError(f"there is no file {what}")
        return subject_of_file(Path(what))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(what, dtype=torch.float32).eval()
    return TransformersSubject(model, TRANSFORMERS_CACHES[cache])


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 %(prog)s borrow/my_gpt.py")
    examined = cli.add_mutually_exclusive_group()
    examined.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        help="FILE.py, or a model of transformers by folder or name; nothing: our KVCache",
    )
    cli.add_argument(
        "--cache", default="dynamic", choices=TRANSFORMERS_CACHES, help="of a model of transformers"
    )
    examined.add_argument(
        "--subject", choices=SUBJECTS, help="one that borrow/EXAMINED.md is about"
    )
    cli.add_argument(
        "--only", default="", metavar="WORDS", help="checks whose name has these words"
    )
    cli.add_argument("--json", action="store_true", help="print findings as JSON")
    cli.add_argument(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="examine all of them, and write the page",
    )
    with cli.parse(argv) as args:
        if args.page is not None:
            write_text(args.page, page())
            return
        if args.what is None or args.what.endswith(".py"):
            torch.set_num_threads(1)  # for small models more threads cost more
        if args.what is None:
            title, make = SUBJECTS[args.subject or "gpt"]
        else:
            title, make = "", lambda: subject_named(args.what, args.cache)
        approximate = APPROXIMATE in title or args.cache == "quantized"
        findings = [*examine(make(), approximate, args.only)]
        if not findings:
            raise ValueError(f"no check has {args.only!r} in its name")
        if args.json:
            print(json.dumps([finding._asdict() for finding in findings], indent=2))
        else:
            for f in findings:
                print(f"{f.verdict:11}  {f.check}: {f.says}")
                if f.verdict == "WRONG":
                    print(f"{'':11}  as in {f.kind}")
        wrong = sum(finding.verdict == "WRONG" for finding in findings)
        if not args.json:
            print(f"\n{wrong} of {len(findings)} checks found something wrong")
        if wrong:
            cli.exit(1)


if __name__ == "__main__":
    main()
