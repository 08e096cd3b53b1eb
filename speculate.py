"""Exact speculation: a student drafts, the teacher reads the draft at once, and the text is the teacher's own.

`python3 speculate.py` writes a few texts with drafts of several lengths, beside the teacher alone, in seconds; `write`
continues a prompt.

A teacher reads k tokens in hardly more time than one, since reading its weights takes most of the time. So something
cheaper guesses the next k tokens, and the teacher predicts all of them in one pass. The tokens up to the first
disagreement stay, the teacher's own token follows, and both caches are cut back to that point. This costs the teacher
as much as a refresh after every burst of k (overfill.py), but nothing is approximate: greedy text is the teacher's
own, token for token up to rounding; sampled text has the teacher's distribution, whatever the drafts are.

Shapes: k tokens of a draft, V vocabulary. One text at a time: several would agree at different lengths.

Source: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding"; Saxena 2023,
"Prompt Lookup Decoding".
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_kv_cache import GPT, KVCache, check_options, context_start, generate, sample
from pair import Pair, load_pair
from support.printing import stream
from support.tables import table

# Logits (1, V) -> a token (1, 1), and the distribution (1, V).
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
Drafter = Callable[[Pair, int, Choose], tuple[Tensor, Tensor]]


def by_student(pair: Pair, k: int, choose: Choose) -> tuple[Tensor, Tensor]:
    """Let the student write k tokens; return them (1, k) and the distributions (k, V) that they were drawn from."""
    unread = pair.ids[:, pair.cached_from + len(pair.student_cache) :]
    tokens, drawn_from = [pair.ids[:, :0]], [torch.empty(0, pair.student.config.vocab_size)]
    for _ in range(k):
        token, q = choose(pair.student(unread, pair.student_cache, last_only=True)[:, -1])
        unread = token.to(pair.ids.device)
        tokens.append(unread)
        drawn_from.append(q)
    return torch.cat(tokens, 1), torch.cat(drawn_from)


def from_the_text(pair: Pair, k: int, choose: Choose) -> tuple[Tensor, Tensor]:
    """Copy up to k tokens (1, k): those that followed the last 3, 2 or 1 tokens of the text the last time that these
    occurred. No student is needed."""
    text, none = pair.ids[0], torch.empty(0, pair.teacher.config.vocab_size)
    for n in range(min(3, len(text) - 1), 0, -1):
        found = (text[:-1].unfold(0, n, 1) == text[-n:]).all(1).nonzero()  # (matches, 1)
        if len(found):
            tokens = text[int(found[-1]) + n :][:k]
            return tokens[None], F.one_hot(tokens.cpu(), none.size(1)).double()
    return pair.ids[:, :0], none


def probabilities(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return the distributions (N, V) that sample() draws from; at temperature 0 the likeliest token has all of one."""
    logits = logits.cpu()  # some devices have no float64, in which the rule is exact to rounding
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).double()
    if top_k is not None:
        kth_best = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]  # (N, 1)
        logits = logits.masked_fill(logits < kth_best, -math.inf)
    return (logits.double() / temperature).softmax(-1)


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an index (1,) drawn in proportion to weights (V,); the generator may be of another device."""
    sums = weights.cumsum(0)
    index = torch.searchsorted(sums, uniform(1, generator) * sums[-1], right=True)
    return index.clamp(max=len(sums) - 1)


def uniform(n: int, generator: torch.Generator | None) -> Tensor:
    """Return n random numbers between 0 and 1, on the CPU."""
    device = generator.device if generator else "cpu"
    return torch.rand(n, generator=generator, device=device).cpu().double()


def agree(
    p: Tensor, q: Tensor, draft: Tensor, generator: torch.Generator | None
) -> tuple[int, Tensor]:
    """Return how many of a draft (k,) stay, and the token (1,) that follows them, so that all of them are distributed
    as draws from the teacher's distributions p (k + 1, V), whatever the q (k, V) that the draft was drawn from.

    Source: Leviathan et al. 2023, algorithm 1.
    """
    each = torch.arange(len(draft))
    ratio = p[each, draft] / q[each, draft]  # (k,)
    stays = uniform(len(draft), generator) < ratio
    n = int(stays.cumprod(0).sum())
    rest = p[n]  # (V,)
    if n < len(draft):
        rest = (p[n] - q[n]).clamp(min=0)
    return n, draw(rest, generator)


@dataclass
class Passes:
    """The teacher's passes over drafts."""

    count: int = 0
    drafted: int = 0  # tokens
    agreed: int = 0  # of them


@torch.no_grad()
def speculate(
    pair: Pair,
    max_new_tokens: int,
    k: int,
    draft: Drafter = by_student,
    passes: Passes | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens (1, 1) that the teacher alone would write after the pair's prompt (1, T), or, sampled, tokens of
    the same distribution. The entries of what the teacher has read replace the student's, as at a refresh.

    passes: counts. Other options and errors are those of gpt_kv_cache.generate(); ValueError too if k is less than 1,
    there are several texts, or the student's context is shorter than the teacher's, which would forget earlier than
    alone.
    """
    check_options(pair.ids, max_new_tokens, temperature, top_k)
    if k < 1 or len(pair.ids) != 1:
        raise ValueError(
            f"speculation takes drafts of at least 1 token and 1 text, got {k} and {len(pair.ids)}"
        )
    if pair.n_ctx < pair.teacher.config.n_ctx:
        raise ValueError(
            f"the student's context of {pair.n_ctx} is shorter than the teacher's, "
            f"{pair.teacher.config.n_ctx}"
        )

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        q = probabilities(logits, temperature, top_k)
        return draw(q[0], generator)[None], q

    written, passes = 0, passes or Passes()
    while written < max_new_tokens:
        n = pair.ids.size(1)
        if not len(pair.teacher_cache) or context_start(n, pair.n_ctx) > pair.cached_from:
            pair.prefill()
            new = sample(pair.logits, temperature, top_k, generator)  # (1, 1)
        else:
            shared, room = len(pair.teacher_cache), pair.cached_from + pair.n_ctx - n
            drafted, q = draft(pair, min(k, max_new_tokens - written - 1, room), choose)
            unread = torch.cat([pair.ids[:, pair.cached_from + shared :], drafted], 1)
            logits = pair.teacher(unread, pair.teacher_cache)[0]  # (drafted + 1, V)
            p = probabilities(logits, temperature, top_k)
            agreed, token = agree(p, q, drafted[0].cpu(), generator)
            token = token[None].to(pair.ids.device)
            new = torch.cat([drafted[:, :agreed], token], 1)  # (1, agreed + 1)
            if stop_id in (said := new[0].tolist()):  # what follows it was never written
                new = new[:, : said.index(stop_id) + 1]
                agreed = new.size(1) - 1
            pair.teacher_cache.truncate(n + agreed - pair.cached_from)
            if pair.same_geometry:
                pair.copy_teacher_cache(shared)
            else:
                pair.student_cache.truncate(min(len(pair.student_cache), len(pair.teacher_cache)))
            passes.count += 1
            passes.drafted += drafted.size(1)
            passes.agreed += agreed
        pair.ids = torch.cat([pair.ids, new], 1)
        written += new.size(1)
        yield from new.split(1, 1)
        if int(new[0, -1]) == stop_id:
            return


DRAFTS = {"student": by_student, "text": from_the_text}
LENGTHS = (4, 8, 16)  # of drafts, in the demo


@torch.no_grad()
def pass_seconds(model: torch.nn.Module) -> dict[int, float]:
    """Return the seconds of a pass over 1 token after 200 others, and over each of LENGTHS and one more: medians of 3,
    taken in turns."""
    cache, ids = KVCache(), torch.zeros(1, 200, dtype=torch.long, device=model.wte.weight.device)
    model(ids, cache, last_only=True)
    seconds: dict[int, list[float]] = {k + 1: [] for k in (0, *LENGTHS)}
    for T in [*seconds] * 3:
        begun = time.perf_counter()
        int(model(ids[:, :T], cache).argmax())  # waits for the device
        seconds[T].append(time.perf_counter() - begun)
        cache.truncate(200)
    return {T: statistics.median(runs) for T, runs in seconds.items()}


@torch.no_grad()
def demo(
    pair: tuple[torch.nn.Module, torch.nn.Module],
    prompts: list[Tensor],
    n: int,
    by: str,
    large: dict[int, float],
    drafting: float,
) -> None:
    """Print what drafts of several lengths save, beside the teacher alone.

    large: seconds of a pass over so many tokens, of a larger teacher that is assumed to agree as often; drafting:
    seconds for a token of a draft.
    """
    for ids in prompts:
        list(generate(pair[0], ids, n))  # a process's first passes are slow
    rows, exact, total = [], [], n * len(prompts)
    for k in (0, *LENGTHS):
        texts, passes = [], Passes()
        begun = time.perf_counter()
        for ids in prompts:
            tokens = generate(pair[0], ids, n)
            if k:
                tokens = speculate(Pair(*pair, ids), n, k, DRAFTS[by], passes)
            texts.append([int(token) for token in tokens])
        seconds = time.perf_counter() - begun
        name, stay = f"drafts of {k}", f"{passes.agreed / max(1, passes.drafted):.0%}"
        if not k:
            name, stay, exact = "the teacher alone", "", texts
            passes.count = total - len(prompts)  # a text's first token is the prefill's
        same = sum(text == other for text, other in zip(texts, exact, strict=True))
        at_large = total / (passes.count * large[k + 1] + passes.drafted * drafting)
        cells = [name, f"{total / seconds:.0f}", f"{1000 * passes.count / total:.0f}", stay]
        rows.append([*cells, f"{same} of {len(exact)}", f"{at_large:.0f}"])
    header = ["", "tokens/s", "passes in 1,000 tokens", "drafts stay", "the teacher's text"]
    print(table([*header, "tokens/s at 124M"], rows[::-1]))


def main(argv: list[str] | None = None) -> None:
    from load_gpt2_weights import NAMES
    from pocket import corpus
    from support.cli import CommandLine, whole_number
    from support.conditions import random_model

    cli = CommandLine(__doc__, "python3 %(prog)s write --draft 8 --prompt 'Notes:'", NAMES)
    comparison = cli.add_action("demo", "drafts of several lengths, compared", default=True)
    one_way = cli.add_action("write", "continue a prompt")
    comparison.add_model_arguments("--teacher")
    comparison.add_length_argument(64)
    one_way.add_generation_arguments("--teacher", trace=False)
    for action in (comparison, one_way):
        action.add_argument(
            "--student", default="pocket-student", metavar="NAME", help="the model that drafts"
        )
    one_way.add_argument(
        "--draft", default=8, type=whole_number(1), metavar="K", help="tokens of a draft"
    )
    one_way.add_argument(
        "--by", default="student", choices=[*DRAFTS], help="where drafts come from"
    )
    with cli.parse(argv) as args:
        teacher, student, tokenizer = load_pair(
            args.model,
            args.student,
            consequence="the text is the teacher's all the same",
            device=args.device,
            dtype=args.dtype,
        )
        if args.action == "write":
            ids = [tokenizer.encode(args.prompt, allowed_special="all")]
            pair = Pair(teacher, student, torch.tensor(ids, device=args.device))
            passes = Passes()
            print(f"\n{args.prompt}", end="", flush=True)
            tokens = speculate(
                pair,
                args.max_new_tokens,
                args.draft,
                DRAFTS[args.by],
                passes,
                top_k=args.top_k,
                temperature=args.temperature,
                stop_id=tokenizer.eot_token,
                generator=torch.Generator(args.device).manual_seed(args.seed),
            )
            written, _ = stream(tokens, tokenizer, pair)
            return print(
                f"[{passes.count} passes of the teacher for {len(written) - 1} tokens after the first; "
                f"{passes.agreed} of {passes.drafted} drafted tokens stayed]"
            )
        n = args.max_new_tokens
        if n < 2:
            raise ValueError(f"the demo compares at least 2 tokens, got {n}")
        lists = sorted(corpus.repeated_lists("test", 7), key=lambda texts: -len(texts[1]))
        begun = [tokenizer.encode(before) for before, _ in lists[:3]]
        large = pass_seconds(random_model(GPT, "124M").to(args.device))
        for by, prompts, drafting, about in (
            ("text", begun, 0.0, "that say a list again: drafts are copied from the text"),
            (
                "student",
                corpus.beginnings(tokenizer, "test", 3, 192),
                pass_seconds(student)[1],
                "of stories and dialogues: the student drafts",
            ),
        ):
            print(f"3 texts of {n} tokens {about}\n")
            tensors = [torch.tensor([ids], device=args.device) for ids in prompts]
            demo((teacher, student), tensors, n, by, large, drafting)
            print()
        print(f"""\
The last column: as if a pass of the teacher took GPT-2 124M's time (random weights), here {1000 * large[1]:.0f} ms
over 1 token and {1000 * large[9]:.0f} over 9, and drafts their own.
The full study: python3 -m studies.speculation""")


if __name__ == "__main__":
    main()
