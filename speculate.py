"""Exact speculation: a student drafts, the teacher reads the draft at once, and the text is the teacher's own.

`python3 speculate.py` writes a few texts with drafts of several lengths, beside the teacher alone, in seconds; `write`
continues a prompt.

A teacher reads k tokens in hardly more time than one, since reading its weights takes most of the time. So something
cheaper guesses the next k tokens, and the teacher predicts all of them in one pass. The tokens up to the first
disagreement stay, the teacher's own token follows, and both caches are cut back to that point. This costs the teacher
as much as a refresh after every burst of k (overfill.py), but nothing is approximate: greedy text is the teacher's
own, token for token up to rounding; sampled text has the teacher's distribution, whatever the drafts are. The two
need one tokenizer; their vocabularies may be padded to different sizes.

A state can't be cut back (lecture 5), nor can a BCT's memory or a window that has evicted tokens. A teacher that has
one reads each draft with a copy of its cache. If a token is rejected and the copy can't be cut back, it is dropped, and
the next pass reads the accepted tokens again, and fewer drafted ones: no pass reads more than k + 1 tokens. So such a
teacher writes the same text in up to twice as many passes. With k = 8 it takes 1.2 times as many if 80% of the drafted
tokens are right, at random places.

Shapes: k tokens of a draft, V vocabulary. One text at a time: several would agree at different lengths.

Source: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding"; Saxena 2023,
"Prompt Lookup Decoding".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from formats.chat import encode_prompt
from gpt_kv_cache import (
    GPT,
    KVCache,
    check_options,
    context_start,
    generate,
    keep_top_k,
    sample,
)
from pair import Pair, default_student, load_pair
from support.geometry import can_go_back
from support.printing import end_tokens_of, stream
from support.tables import table
from support.texts import read_prompts_of_kind
from support.timing import run_in_turns, time_call


class Draft(NamedTuple):
    """Proposed tokens (1, k), and the distributions (k, V) that they were drawn from."""

    tokens: Tensor
    distributions: Tensor


# Logits (1, V) -> a token (1, 1), and the distribution (1, V) that it was drawn from.
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
# A pair, the most tokens to draft, and how to choose each of them -> a draft.
Drafter = Callable[[Pair, int, Choose], Draft]


def draft_by_student(pair: Pair, k: int, choose: Choose) -> Draft:
    """Let the student write k tokens, of those that both vocabularies have."""
    unread, vocab_size = pair.unread_by_student(), pair.teacher.config.vocab_size
    cache, tokens = pair.student_cache, [pair.ids[:, :0]]
    distributions = [torch.empty(0, vocab_size)]
    for i in range(k):
        if i == 1:  # so far, it has read the text
            cache = cache_for_draft(pair.student, cache)
        logits = pair.student(unread, cache, last_only=True)[:, -1, :vocab_size]
        token, distribution = choose(logits)
        unread = token.to(pair.ids.device)
        tokens.append(unread)
        distributions.append(F.pad(distribution, (0, vocab_size - distribution.size(1))))
    return Draft(torch.cat(tokens, 1), torch.cat(distributions))


def draft_from_text(pair: Pair, k: int, choose: Choose) -> Draft:
    """Draft up to k tokens without a student: copy those that followed the latest earlier
    occurrence of the text's last 3 tokens, or else of its last 2, or of its last one."""
    text, vocab_size = pair.ids[0], pair.teacher.config.vocab_size
    for length in range(min(3, len(text) - 1), 0, -1):
        same = (text[:-1].unfold(0, length, 1) == text[-length:]).all(1)
        places = same.nonzero()  # (places, 1)
        if len(places):
            tokens = text[int(places[-1]) + length :][:k]
            return Draft(tokens[None], F.one_hot(tokens.cpu(), vocab_size).double())
    return Draft(pair.ids[:, :0], torch.empty(0, vocab_size))


def probabilities(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return the distributions (N, V) that sample() draws from, for logits (N, V). At temperature 0
    the likeliest token has probability 1. Raises ValueError as sample() does."""
    logits = logits.cpu()  # some devices lack float64
    best = sample(logits, 0.0, None, None)  # (N, 1)
    if temperature == 0:
        return F.one_hot(best[:, 0], logits.size(-1)).double()
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    return (logits.double() / temperature).softmax(-1)


def draw_index(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an index (1,) drawn in proportion to weights (V,). The generator may be on another
    device."""
    sums = weights.cumsum(0)
    index = torch.searchsorted(sums, uniform_numbers(1, generator) * sums[-1], right=True)
    return index.clamp(max=len(sums) - 1)


def uniform_numbers(n: int, generator: torch.Generator | None) -> Tensor:
    """Return n random numbers between 0 and 1, on the CPU."""
    device = generator.device if generator else "cpu"
    return torch.rand(n, generator=generator, device=device).cpu().double()


def accept_draft(
    p: Tensor, q: Tensor, draft: Tensor, generator: torch.Generator | None
) -> tuple[int, Tensor]:
    """Return how many tokens of a draft (k,) to accept, and the token (1,) that follows them.

    All these tokens together are distributed as draws from the teacher's distributions p
    (k + 1, V), whatever the distributions q (k, V) that the draft was drawn from.

    Source: Leviathan et al. 2023, algorithm 1.
    """
    places = torch.arange(len(draft))
    ratio = p[places, draft] / q[places, draft]  # (k,)
    stays = uniform_numbers(len(draft), generator) < ratio
    accepted = int(stays.cumprod(0).sum())
    remainder = p[accepted]  # (V,)
    if accepted < len(draft):
        remainder = (p[accepted] - q[accepted]).clamp(min=0)
    return accepted, draw_index(remainder, generator)


def verify_draft(
    pair: Pair,
    cache: KVCache,
    draft: Draft,
    to_probabilities: Callable[[Tensor], Tensor],
    generator: torch.Generator | None,
) -> Tensor:
    """Let the teacher read a draft in one pass, with the cache that it has or a copy; return the
    tokens (1, accepted + 1) to append to the text: the accepted tokens of the draft, and one of the
    teacher's own."""
    unread = pair.ids[:, pair.cached_from + len(cache) :]
    logits = pair.teacher(torch.cat([unread, draft.tokens], 1), cache)[0]
    p = to_probabilities(logits[-1 - draft.tokens.size(1) :])  # (k + 1, V)
    accepted, token = accept_draft(p, draft.distributions, draft.tokens[0].cpu(), generator)
    return torch.cat([draft.tokens[:, :accepted], token[None].to(unread.device)], 1)


def cut_after(tokens: Tensor, stop_ids: Collection[int]) -> Tensor:
    """Return tokens (1, N) up to the first that is one of stop_ids."""
    for i, token in enumerate(tokens[0].tolist()):
        if token in stop_ids:
            return tokens[:, : i + 1]
    return tokens


def cache_for_draft(model: torch.nn.Module, cache: KVCache) -> KVCache:
    """Return what reads tokens that may be rejected: this cache if it can forget them, else a
    copy."""
    return cache if can_go_back(model.config) else cache.clone()


def cut_caches(pair: Pair, cache: KVCache, length: int) -> None:
    """Keep the first `length` tokens in both caches. If the teacher's fits the student, a copy
    replaces the student's.

    cache: the one that the teacher has read a draft with. If it can't forget the rejected tokens,
    the pair's stays as it was before the draft, and the accepted tokens are unread again.
    """
    try:
        cache.truncate(length)
        pair.teacher_cache = cache
    except ValueError:
        if cache is pair.teacher_cache:
            raise
    if pair.same_geometry:
        pair.student_cache = pair.teacher_cache.clone()
    else:
        pair.student_cache.truncate(min(len(pair.student_cache), length))


@dataclass
class DraftCounts:
    """How many tokens were drafted, and how many of them were accepted."""

    passes: int = 0  # of the teacher, one for each draft
    drafted: int = 0  # tokens that were drafted
    accepted: int = 0  # of the drafted tokens


@torch.no_grad()
def speculate(
    pair: Pair,
    max_new_tokens: int,
    k: int,
    drafter: Drafter = draft_by_student,
    counts: DraftCounts | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens (1, 1) that the teacher alone would write after the pair's prompt (1, T); if
    tokens are sampled, they have the teacher's distribution. After each draft the teacher's cache
    entries replace the student's, as at a refresh.

    k: the most tokens of a draft; counts: updated with every draft. The other options and the
    errors are those of gpt_kv_cache.generate(). Raises ValueError, too, if k is less than 1, if
    there are several texts, or if the student's context is shorter than the teacher's: the pair
    would forget earlier than the teacher alone.
    """
    check_options(pair.ids, max_new_tokens, temperature, top_k)
    if k < 1 or len(pair.ids) != 1:
        raise ValueError(
            f"speculation takes drafts of at least 1 token and 1 text, got {k} and {len(pair.ids)}"
        )
    if pair.n_ctx < pair.teacher.context:
        raise ValueError(
            f"the student's context of {pair.n_ctx} is shorter than the teacher's, "
            f"{pair.teacher.context}"
        )
    to_probabilities = partial(probabilities, temperature=temperature, top_k=top_k)

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        distribution = to_probabilities(logits)
        return draw_index(distribution[0], generator)[None], distribution

    counts = counts or DraftCounts()
    left = max_new_tokens
    while left > 0:
        text_length, n_read = pair.ids.size(1), len(pair.teacher_cache)
        if n_read == 0 or context_start(text_length, pair.n_ctx) > pair.cached_from:
            pair.prefill()
            new = sample(pair.logits, temperature, top_k, generator)  # (1, 1)
        else:
            room = pair.cached_from + pair.n_ctx - text_length
            n_unread = text_length - pair.cached_from - n_read
            most = max(0, k + 1 - n_unread)  # so that no pass reads more than k + 1
            draft = drafter(pair, min(most, left - 1, room), choose)
            cache = cache_for_draft(pair.teacher, pair.teacher_cache)
            verified = verify_draft(pair, cache, draft, to_probabilities, generator)
            new = cut_after(verified, stop_ids)
            cut_caches(pair, cache, text_length + new.size(1) - 1 - pair.cached_from)
            counts.passes += 1
            counts.drafted += draft.tokens.size(1)
            counts.accepted += min(verified.size(1) - 1, new.size(1))
        pair.ids = torch.cat([pair.ids, new], 1)
        left -= new.size(1)
        yield from new.split(1, 1)
        if int(new[0, -1]) in stop_ids:
            return


DRAFTERS = {"student": draft_by_student, "text": draft_from_text}
DRAFT_LENGTHS = (4, 8, 16)  # tokens of a draft, in the demo


@torch.no_grad()
def pass_seconds(model: torch.nn.Module) -> dict[int, float]:
    """Return the seconds of a pass after 200 tokens, by the number of tokens it reads: 1, or one
    more than each of DRAFT_LENGTHS. They are medians of 3 passes, taken in turns."""
    cache, ids = KVCache(), torch.zeros(1, 200, dtype=torch.long, device=model.wte.weight.device)
    model(ids, cache, last_only=True)

    def time_pass(length: int, turn: int) -> float:
        seconds, _ = time_call(lambda: int(model(ids[:, :length], cache).argmax()))
        cache.truncate(200)
        return seconds

    runs = {k + 1: partial(time_pass, k + 1) for k in (0, *DRAFT_LENGTHS)}
    return {length: statistics.median(times) for length, times in run_in_turns(runs, 3).items()}


@torch.no_grad()
def demo(
    models: tuple[torch.nn.Module, torch.nn.Module],
    prompts: list[Tensor],
    max_new_tokens: int,
    drafter: Drafter,
    stop_ids: Collection[int] = (),
    large_seconds: dict[int, float] | None = None,
    draft_seconds: float = 0.0,
) -> None:
    """Print what drafts of several lengths save a teacher and its student, beside the teacher
    alone.

    large_seconds: the seconds of a pass of a larger teacher, by the number of tokens it reads; this
    teacher is assumed to accept as many tokens. draft_seconds: the time to draft one token.
    """
    teacher, student = models
    bar = tqdm(total=len(prompts) * (2 + len(DRAFT_LENGTHS)), unit=" texts", leave=False, delay=2)
    for ids in prompts:
        list(generate(teacher, ids, max_new_tokens))  # a process's first passes are slow
        bar.update()

    def write_all(k: int, counts: DraftCounts) -> list[list[int]]:
        texts = []
        for ids in prompts:
            if k:
                pair = Pair(teacher, student, ids)
                tokens = speculate(pair, max_new_tokens, k, drafter, counts, stop_ids=stop_ids)
            else:
                tokens = generate(teacher, ids, max_new_tokens, stop_ids=stop_ids)
            texts.append([int(token) for token in tokens])
            bar.update()
        return texts

    rows = []
    for k in (0, *DRAFT_LENGTHS):
        counts = DraftCounts()
        seconds, texts = time_call(partial(write_all, k, counts))
        total = sum(map(len, texts))
        if k:
            name, share = f"drafts of {k}", f"{counts.accepted / max(1, counts.drafted):.0%}"
        else:
            name, share, teacher_texts = "the teacher alone", "", texts
            counts.passes = total - len(prompts)  # a text's first token is the prefill's
        same = sum(text == other for text, other in zip(texts, teacher_texts, strict=True))
        cells = [
            name,
            f"{total / seconds:.0f}",
            f"{1000 * counts.passes / total:.0f}",
            share,
            f"{same} of {len(prompts)}",
        ]
        if large_seconds:
            at_large = counts.passes * large_seconds[k + 1] + counts.drafted * draft_seconds
            cells.append(f"{total / at_large:.0f}")
        rows.append(cells)
    bar.close()
    header = ["", "tokens/s", "passes in 1,000 tokens", "drafts stay", "the teacher's text"]
    if large_seconds:
        header.append("tokens/s at 124M")
    print(table(header, rows[::-1]))


def demo_of_pocket(
    models: tuple[torch.nn.Module, torch.nn.Module],
    tokenizer: tiktoken.Encoding,
    max_new_tokens: int,
) -> None:
    """Print demo() of texts of the pocket world: lists that are said again, and beginnings."""
    from load_gpt2_weights import random_model
    from pocket import corpus

    device = models[0].wte.weight.device
    lists = sorted(corpus.repeated_lists("test", 7), key=lambda texts: -len(texts[1]))
    list_beginnings = [tokenizer.encode(beginning) for beginning, _ in lists[:3]]
    large_seconds = pass_seconds(random_model(GPT, "124M", device))
    for drafter, prompts, draft_seconds, description in (
        (
            draft_from_text,
            list_beginnings,
            0.0,
            "that say a list again: drafts are copied from the text",
        ),
        (
            draft_by_student,
            corpus.beginnings(tokenizer, "test", 3, 192),
            pass_seconds(models[1])[1],
            "of stories and dialogues: the student drafts",
        ),
    ):
        print(f"3 texts of {max_new_tokens} tokens {description}\n")
        tensors = [torch.tensor([ids], device=device) for ids in prompts]
        demo(models, tensors, max_new_tokens, drafter, (), large_seconds, draft_seconds)
        print()
    print(f"""\
The last column: as if a pass of the teacher took GPT-2 124M's time (random weights), here {1000 * large_seconds[1]:.0f} ms
over 1 token and {1000 * large_seconds[9]:.0f} over 9, and drafts their own.
The full study: python3 -m studies.speculation""")


def demo_of_prompts(
    models: tuple[torch.nn.Module, torch.nn.Module],
    tokenizer: tiktoken.Encoding,
    max_new_tokens: int,
    student_name: str,
    study: str,
) -> None:
    """Print demo() of prompts in data/real: texts to be rewritten, and open ones. study: the command that measures more."""
    device = models[0].wte.weight.device
    for kind, drafter, description in (
        (
            "rewrite",
            draft_from_text,
            "a text is written again with changes: drafts are copied from it",
        ),
        ("open", draft_from_text, "an open task: drafts are copied from the text so far"),
        ("open", draft_by_student, f"an open task: {student_name} drafts"),
    ):
        prompts = read_prompts_of_kind(kind)[:2]
        print(f"2 answers of at most {max_new_tokens} tokens, {description}\n")
        ids = [encode_prompt(prompt, tokenizer) for prompt in prompts]
        tensors = [torch.tensor([tokens], device=device) for tokens in ids]
        stop_ids = end_tokens_of(tokenizer)  # by now with that of an answer
        demo(models, tensors, max_new_tokens, drafter, stop_ids)
        print()
    print(f"""\
Exact: every text is the teacher's own. Drafts save passes of the teacher, and time only where they cost less than
these passes do.
The full study: {study}""")


def main(argv: list[str] | None = None) -> None:
    from formats.chat import encode_given_prompt
    from load_gpt2_weights import NAMES, load_model, load_tokenizer
    from support.cli import (
        WRITING,
        ByModel,
        CommandLine,
        study_command,
        whole_number,
    )

    cli = CommandLine(__doc__, "python3 %(prog)s write --draft 8 --prompt 'Notes:'")
    comparison, one_way = cli.add_actions(
        "demo", demo="drafts of several lengths, compared", write="continue a prompt"
    )
    for action in (comparison, one_way):
        action.add_model_options(NAMES, "--student", option="--teacher")
    comparison.add_options("--max-new-tokens", default=ByModel(64, 28))
    one_way.add_options(*WRITING, "--chat", "--system")
    one_way.add_argument(
        "--draft", default=8, type=whole_number(1), metavar="K", help="tokens per draft"
    )
    one_way.add_argument(
        "--by", default="student", choices=[*DRAFTERS], help="where drafts come from"
    )
    with cli.parse(argv) as args:
        student_name = args.student or default_student(args.model)
        options = {"device": args.device, "dtype": args.dtype}
        if args.action == "write" and args.by == "text":
            if args.student is not None:
                raise ValueError(
                    f"--by text drafts without --student {args.student}: give one of the two"
                )
            teacher, tokenizer = load_model(args.model, **options), load_tokenizer(args.model)
            student = teacher  # which isn't asked for drafts
        else:
            teacher, student, tokenizer = load_pair(
                args.model,
                student_name,
                consequence="the text is the teacher's all the same",
                **options,
            )
        if args.action == "write":
            ids = torch.tensor([encode_given_prompt(args, tokenizer)], device=args.device)
            pair = Pair(teacher, student, ids)
            counts = DraftCounts()
            print(f"\n{args.prompt}", end="", flush=True)
            tokens = speculate(
                pair,
                args.max_new_tokens,
                args.draft,
                DRAFTERS[args.by],
                counts,
                top_k=args.top_k,
                temperature=args.temperature,
                stop_ids=end_tokens_of(tokenizer),
                generator=torch.Generator(args.device).manual_seed(args.seed),
            )
            written, _ = stream(tokens, tokenizer, pair)
            return print(
                f"[{counts.passes} passes of the teacher for {len(written) - 1} tokens after the first; "
                f"{counts.accepted} of {counts.drafted} drafted tokens stayed]"
            )
        if args.max_new_tokens < 2:
            raise ValueError(f"the demo compares at least 2 tokens, got {args.max_new_tokens}")
        if args.model.startswith("pocket"):
            return demo_of_pocket((teacher, student), tokenizer, args.max_new_tokens)
        study = study_command("speculation", args.model)
        demo_of_prompts((teacher, student), tokenizer, args.max_new_tokens, student_name, study)


if __name__ == "__main__":
    main()
