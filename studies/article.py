"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, and its two-line window.

`python3 -m studies.article` takes about five minutes on one thread. Weights are random, as in the article: times don't
depend on them, and every implementation gets the same ones.

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache
from load_gpt2_weights import load_tokenizer
from studies.protocol import Claim, StudyLine, claim_tables, conditions_of, judged, spread, under
from support.cli import whole_number
from support.conditions import conditions, random_model
from support.files import write_json
from support.statistics import kl
from support.tables import Table, page

PROMPT, NEW = "Hello, I am", 200  # the article's
SMALL, WINDOW, TEXT = "4x4x64", 8, 40  # the geometry, window and tokens that the two lines are tried on
BASE, AHEAD = "gpt_kv_cache.py", "gpt_bounded_cache.py, preallocated"  # of the benchmark
WRONG = 1e-3  # a position is wrong if a logit is off by more than this share of the largest


# --- 200 tokens -----------------------------------------------------------------------------------------------------


def all_logits(model: gpt_baseline.GPT, ids: Tensor, n: int) -> Iterator[Tensor]:
    """Yield n greedy tokens without a cache, the output head applied to every position as in the article's code."""
    for _ in range(n):
        token = model(ids)[:, -1].argmax(dim=-1, keepdim=True)
        yield token
        ids = torch.cat([ids, token], dim=1)


@torch.no_grad()
def speeds(size: str, ids: Tensor, n: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds that n tokens after ids (1, T) took, turn by turn, all in turn after a short warm-up. Raises
    RuntimeError if two of them write different tokens."""
    baseline, growing, bounded = (random_model(file.GPT, size) for file in (gpt_baseline, gpt_kv_cache,
                                                                            gpt_bounded_cache))  # fmt: skip
    for model in (growing, bounded):
        model.load_state_dict(baseline.state_dict())
    room = ids.size(1) + n
    writers: dict[str, Callable[[int], Iterator[Tensor]]] = {
        "no cache, logits of all positions": lambda n: all_logits(baseline, ids, n),
        "no cache": lambda n: gpt_baseline.generate(baseline, ids, n),
        "growing cache": lambda n: gpt_kv_cache.generate(growing, ids, n),
        "preallocated cache": lambda n: gpt_bounded_cache.generate(bounded, ids, n, cache=SlidingWindowCache(room)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    texts = set()
    for turn in tqdm(range(turns + 1), desc="turns", leave=False):
        for name, write in writers.items():
            begun = time.perf_counter()
            text = tuple(int(token) for token in write(n if turn else 2))
            if turn:  # the first, of two tokens, warms up
                seconds[name].append(time.perf_counter() - begun)
                texts.add(text)
    if len(texts) > 1:
        raise RuntimeError(f"{len(writers)} implementations of {size} have written {len(texts)} different texts")
    return seconds


# --- The window of two lines ----------------------------------------------------------------------------------------


class TwoLines(KVCache):
    """The article's window, cache_k = cache_k[:, :, -window_size:, :], on its cache that grows: what it holds is cut
    before attention reads it. counted: positions go on as by its current_pos; else they are its cache's length."""

    def __init__(self, window: int, counted: bool = True) -> None:
        super().__init__()
        self.window, self.counted = window, counted

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        kv = torch.stack([k, v])
        if len(self):
            kv = torch.cat([self.layers[layer], kv], dim=3)
        kv = kv[..., -self.window :, :]
        self.layers[layer : layer + 1 if len(self) else None] = [kv]
        mask = torch.cat([self.pos, pos])[-self.window :] <= pos[:, None]
        return kv[0], kv[1], mask if len(pos) > 1 else None

    def commit(self, pos: Tensor) -> None:
        self.pos = torch.cat([self.pos, pos])[-self.window :]

    @property
    def next_pos(self) -> int:
        return super().next_pos if self.counted else len(self)


@torch.no_grad()
def window_check(seed: int = 0) -> dict[str, dict[str, float]]:
    """Return, for four ways of feeding one text, the share of positions whose logits differ from attention to the last
    WINDOW tokens, and the mean KL there in nats; of a chunk its last position counts, which writes the next token."""
    exact, model = random_model(gpt_bounded_cache.GPT, SMALL), random_model(gpt_kv_cache.GPT, SMALL)
    for parameter in exact.parameters():
        parameter.mul_(3)  # else the logits of an untrained model hardly depend on what it reads
    model.load_state_dict(exact.state_dict())
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, TEXT), generator=generator)
    expected = exact(ids, SlidingWindowCache(WINDOW))[0]
    feedings = {"token by token, positions counted": ([1] * TEXT, True),
                "token by token, positions by the cache's length": ([1] * TEXT, False),
                f"a prompt of {3 * WINDOW}, then token by token": ([3 * WINDOW] + [1] * (TEXT - 3 * WINDOW), True),
                "five tokens at a time": ([5] * (TEXT // 5), True)}  # fmt: skip
    found = {}
    for name, (lengths, counted) in feedings.items():
        cache, chunks = TwoLines(WINDOW, counted), ids.split(lengths, dim=1)
        got = torch.cat([model(chunk, cache, last_only=True)[0] for chunk in chunks])
        want = expected[torch.tensor(lengths).cumsum(0) - 1]
        wrong = ((got - want).abs().amax(-1) > WRONG * want.abs().max()) | got.isnan().any(-1)
        found[name] = {"wrong": float(wrong.float().mean()), "kl": float(kl(want, got).nan_to_num(0).mean())}
    return found


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return the seconds of every turn, and the shares that the window gets wrong."""
    parts: list[str | Table] = [
        f"The window of two lines, {WINDOW} tokens, against attention to the last {WINDOW}:",
        Table(["fed", "wrong", "KL, nats"], [[name, f"{x['wrong']:.0%}", f"{x['kl']:.2g}"]
                                             for name, x in record["window"].items()])]  # fmt: skip
    if "seconds" in record:
        parts += [f"{record['new_tokens']} tokens after {record['prompt']!r}, seconds turn by turn:",
                  Table(["", "seconds"], [[name, ", ".join(f"{s:.1f}" for s in x)]
                                          for name, x in record["seconds"].items()])]  # fmt: skip
    return parts


def attention_work(n: int, cached: bool) -> int:
    """Return how many queries meet how many keys while n tokens are written: one query a step, or all of them again."""
    return sum(t if cached else t * t for t in range(1, n + 1))


def claims(window: dict[str, Any] | None, record: dict[str, Any] | None,
            bench: dict[str, Any] | None = None) -> list[Claim]:  # fmt: skip
    """Return the claims of the KV cache article: of its window and its 200 tokens, and of a benchmark."""
    title, compared = "Understanding and Coding the KV Cache in LLMs from Scratch", "A Simple Performance Comparison"
    theirs = ('GPT-2 124M, untrained; 200 new tokens after the 4 of "Hello, I am"; CPU of a Mac Mini M4; repeats not '
              "stated")  # fmt: skip
    fast = 'our "no cache" computes the logits of the last position only, the article\'s those of all positions'
    sped, holds, refuted, same = "not measured yet: python3 -m studies.article", None, True, ""
    if record:
        seconds, new = record["seconds"], record["new_tokens"]
        ratios, lean = ([a / b for a, b in zip(seconds[name], seconds["growing cache"], strict=True)]
                        for name in ("no cache, logits of all positions", "no cache"))  # fmt: skip
        sped = f"{spread(ratios, '.1f')} times as fast, {spread(lean, '.1f')} without needless logits"
        same = f"; {len(seconds)} implementations write the same {new} tokens after {record['prompt']!r}"
        if (new, record["conditions"]["parameters"] // 10**6) == (NEW, 124):  # or else it was a quick run
            holds, refuted = statistics.median(ratios) >= 4.5, max(ratios) < 4.5
    ours = conditions_of(record, f"{record['new_tokens']} new tokens after {record['prompt']!r}") if record else \
        "not measured yet"  # fmt: skip
    pros = "KV cache Advantages and Disadvantages"
    step = [attention_work(n + 1, True) - attention_work(n, True) for n in (512, 1024)]
    grew = [attention_work(1024, cached) / attention_work(512, cached) for cached in (False, True)]
    rows = under(
        title, theirs, ours,
        judged(compared, "we already get a ~5x speed-up with a small 124 M parameter model and a short 200-token "
               "sequence length", holds, sped, f"partly: our files on another processor; {fast}; \"~5x\" is read as "
               "4.5 or more", refuted),
    )  # fmt: skip
    rows += under(
        title, theirs, "arithmetic: comparisons of a query with a key while n tokens are written",
        judged(pros, "Without caching, the attention at step t must compare the new "
               "query with t previous keys, so the cumulative work scales quadratically, O(n²).", grew[0] < 4.5,
               f"twice as many tokens, {grew[0]:.1f} times the comparisons: without a cache a step compares all t "
               f"queries again, n³ in all; with one, {grew[1]:.1f} times as many comparisons", "yes: for attention, as "
               "in the claim; the products with weights do grow as n² without a cache"),
        judged(pros, "With a cache, each key and value is computed once and then reused, reducing the total per-step "
               "complexity to linear, O(n).", step[1] / step[0] < 2.1,
               f"the step after 1,024 tokens makes {step[1] / step[0]:.1f} times as many comparisons as after 512",
               "yes"),
        judged("Overview", "increases memory requirements (the main reason I initially didn't include it in the book), "
               "and can't be used during training", None, "", "no: training reads whole texts at once, where "
               "there is nothing to reuse"),
        judged("Clearing the Cache", "Otherwise, the queries of a new prompt will attend to stale keys left over from "
               "the previous sequence", None, "", "no: our cache is an object of its own, and a new one is "
               "the reset"),
    )  # fmt: skip
    if bench:
        plain, growing, ahead = "gpt_baseline.py", bench["rows"][BASE], bench["rows"][AHEAD]
        cells = [f"1 x {n}" for n in bench["lengths"]]
        per_token = {(growing[b]["cache_bytes"] - growing[a]["cache_bytes"]) / (n - m) for (m, a), (n, b) in
                     pairwise(zip(bench["lengths"], cells, strict=True))}  # fmt: skip
        fixed = {ahead[cell]["cache_bytes"] for cell in cells}
        rows += under(
            title, theirs, conditions_of(bench, f"{bench['turns']} turns, 16 tokens after each prompt"),
            judged(compared, "both the gpt_ch04.py and gpt_with_kv_cache.py implementations produce exactly the same "
                   "text", all(bench["rows"][name][cell]["same_tokens"] for name in (plain, BASE) for cell in cells),
                   f"{plain} and {BASE} write the same tokens after {', '.join(f'{n:,}' for n in bench['lengths'])}"
                   f"{same}", "partly: our files, which share the idea but not the code"),
            judged(pros, "Memory usage increases linearly: Each new token appends "
                   "to the KV cache.", len(per_token) == 1, " or ".join(f"{x:,.0f}" for x in per_token) + " bytes a "
                   f"token, from {bench['lengths'][0]} to {bench['lengths'][-1]:,} tokens", "yes"),
            judged("Tip 1: Pre-allocate Memory", "This ensures consistent memory use and reduces overhead.",
                   len(fixed) == 1 and min(ahead[cells[-1]]["ratios"]) > 1,
                   "writing into slices is " + ", ".join(
                       f"{spread(ahead[c]['ratios'])} times as fast as torch.cat after {n:,} tokens"
                       for n, c in zip(bench["lengths"], cells, strict=True))
                   + f"; {' or '.join(f'{x:,}' for x in fixed)} bytes at each of these lengths",
                   "partly: our files; a ring with a spare slot"),
        )  # fmt: skip
    if window:
        found, w = window["window"], window["size"]
        one, offset, prompt, chunks = found.values()
        said = f"{window['geometry']} (layers, heads, width), random weights; a window of {w}, a text of " \
               f"{window['tokens']} tokens"  # fmt: skip
        rows += under(
            title, theirs, said,
            judged("Tip 2: Truncate Cache via Sliding Window", "Via the sliding window, we maintain only the last "
                   "window_size tokens in the cache", one["wrong"] == 0, f"{one['wrong']:.0%} of the logits differ "
                   f"from attention to the last {w} tokens, if tokens are fed one by one and positions keep counting",
                   "partly: on a cache of shape (B, H, S, D), which fits the two lines; the article's own cache_k "
                   "is (b, num_tokens, d_out)"),
        ) + under(
            "", "", said,
            judged("", "Do the two lines work with a prompt longer than the window, or with several tokens at a time?",
                   prompt["wrong"] + chunks["wrong"] == 0, f"a prompt of {3 * w} leaves {prompt['wrong']:.0%} of the "
                   f"next logits wrong, chunks of five {chunks['wrong']:.0%}: keys are evicted before the queries "
                   "that still see them have read them", ""),
            judged("", "Do they work with the article's other way of counting, offset = block.att.cache_k.shape[1]?",
                   offset["wrong"] == 0, f"{offset['wrong']:.0%} of the logits are wrong: once the window is full, "
                   f"every new token is read at position {w - 1} or {w}", ""),
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "article", "the window, and 20 tokens at a small geometry", model="")
    cli.add_argument("--turns", type=whole_number(1), default=3, metavar="N", help="turns to measure")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    with cli.parse(argv) as args:
        torch.set_num_threads(args.threads)
        size, n = (SMALL, 20) if args.quick else ("124M", NEW)
        record: dict[str, Any] = {"window": window_check(), "prompt": PROMPT, "new_tokens": n, "turns": args.turns}
        window = {"window": record["window"], "geometry": SMALL, "tokens": TEXT, "size": WINDOW}
        write_json(args.out / "window.json", window)
        ids = torch.tensor([load_tokenizer("gpt2").encode(PROMPT)])
        record["conditions"] = conditions(f"{size}, random weights", random_model(gpt_kv_cache.GPT, size))
        record["seconds"] = speeds(size, ids, n, args.turns)
        write_json(args.out / "summary.json", record)
        print(page([*tables(record), *claim_tables(claims(window, record)),
                    f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
