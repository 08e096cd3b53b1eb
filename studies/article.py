"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, and its two-line window.

`python3 -m studies.article` takes about five minutes on one thread. Weights are random, as in the article: times don't
depend on them, and every implementation gets the same ones.

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache
from load_gpt2_weights import load_model, load_tokenizer
from pocket import corpus
from studies.protocol import (
    NOISE,
    Claim,
    StudyLine,
    claim_tables,
    conditions_of,
    judged,
    spread,
    under,
    with_interval,
)
from support.conditions import conditions, random_model
from support.files import write_json
from support.statistics import bootstrap, kl
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


@torch.no_grad()
def stale_check(texts: int = 24, tokens: int = 64) -> dict[str, Any]:
    """Return pocket's perplexity on held-out texts with a new cache, and with one that still holds another text; how
    many times as high that is, and its 95% interval over texts."""
    model, tokenizer = load_model("pocket", model_class=gpt_kv_cache.GPT), load_tokenizer("pocket")
    rows = [tokenizer.encode_ordinary(document.text)[:tokens] for document in corpus.documents("test", 4 * texts)]
    ids = torch.tensor([row for row in rows if len(row) == tokens][: texts + 1])
    nats, cache = [], KVCache()
    model(ids[:-1], cache)
    for held in (KVCache(), cache):
        losses = F.cross_entropy(model(ids[1:, :-1], held).mT, ids[1:, 1:], reduction="none")
        nats.append(losses.mean(1).double().numpy())
    return {"texts": len(ids) - 1, "tokens": tokens, "perplexity": [math.exp(x.mean()) for x in nats],
            "times": [math.exp(x) for x in bootstrap(nats[1] - nats[0])]}  # fmt: skip


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
            holds, refuted = min(ratios) >= 4.5, max(ratios) < 4.5
    ours = conditions_of(record, f"{record['new_tokens']} new tokens after {record['prompt']!r}",
                         f"{record['turns']} turn{'s' * (record['turns'] > 1)}") if record else \
        "not measured yet"  # fmt: skip
    pros = "KV cache Advantages and Disadvantages"
    step = [attention_work(n + 1, True) - attention_work(n, True) for n in (512, 1024)]
    every, alone = (attention_work(1024, cached) / attention_work(512, cached) for cached in (False, True))
    rows = under(
        title, theirs, ours,
        judged(compared, "we already get a ~5x speed-up with a small 124 M parameter model and a short 200-token "
               "sequence length", holds, sped, f"partly: our files on another processor; {fast}; \"~5x\" is read as "
               "4.5 or more (our threshold)", refuted),
    )  # fmt: skip
    rows += under(
        title, theirs, "arithmetic: comparisons of a query with a key while n tokens are written",
        judged(pros, "Without caching, the attention at step t must compare the new "
               "query with t previous keys, so the cumulative work scales quadratically, O(n²).",
               round(math.log2(alone), 1) == 2, f"twice as many tokens, {alone:.1f} times the comparisons of new "
               f"queries; {every:.1f} times those of all queries, which gpt_ch04.py compares again at every step: n to "
               f"the power of {math.log2(every):.1f}", "partly: the new query's comparisons are counted, as in the "
               "claim; without a cache they aren't all"),
        judged(pros, "With a cache, each key and value is computed once and then reused, reducing the total per-step "
               "complexity to linear, O(n).", round(math.log2(step[1] / step[0]), 1) == 1,
               f"the step after 1,024 tokens makes {step[1] / step[0]:.1f} times as many comparisons as after 512",
               "yes"),
        judged("Overview", "can't be used during training", None, "", "no: training reads whole texts at once, where "
               "there is nothing to reuse"),
    )  # fmt: skip
    if bench:
        plain, growing, ahead = "gpt_baseline.py", bench["rows"][BASE], bench["rows"][AHEAD]
        cells = [f"1 x {n}" for n in bench["lengths"]]
        per_token = {(growing[b]["cache_bytes"] - growing[a]["cache_bytes"]) / (n - m) for (m, a), (n, b) in
                     pairwise(zip(bench["lengths"], cells, strict=True))}  # fmt: skip
        fixed = {ahead[cell]["cache_bytes"] for cell in cells}
        held, none = (bench["rows"][name][cells[-1]]["cache_bytes"] for name in (BASE, plain))
        faster = [[1 / x for x in bench["rows"][plain][cell]["ratios"]] for cell in cells]
        slices, longest = ahead[cells[-1]]["ratios"], f"{bench['lengths'][-1]:,}"
        rows += under(
            title, theirs, conditions_of(bench, f"{bench['turns']} turns, 16 tokens after each prompt"),
            judged(compared, "both the gpt_ch04.py and gpt_with_kv_cache.py implementations produce exactly the same "
                   "text", all(bench["rows"][name][cell]["same_tokens"] for name in (plain, BASE) for cell in cells),
                   f"{plain} and {BASE} write the same tokens after {', '.join(f'{n:,}' for n in bench['lengths'])}"
                   f"{same}", "partly: our files, which share the idea but not the code"),
            judged("How LLMs Generate Text (Without and With a KV Cache)", "the longer the text, the more we get to "
                   "reuse already computed keys and values, which increases the generation speed",
                   all(min(b) > max(a) for a, b in pairwise(faster)), "times as fast as without a cache: " + ", ".join(
                       f"{spread(x, '.1f')} after {n:,}" for n, x in zip(bench["lengths"], faster, strict=True))
                   + " tokens", "partly: our files; read as the gain over no cache, since with one the speed itself "
                   f"falls, from {growing[cells[0]]['tokens_per_s']:.1f} to "
                   f"{growing[cells[-1]]['tokens_per_s']:.1f} tokens/s", max(faster[-1]) < min(faster[0])),
            judged("Overview", "increases memory requirements", held > none, f"{held:,} bytes of cache after {longest} "
                   f"tokens, {none:,} without", "yes"),
            judged(pros, "Memory usage increases linearly: Each new token appends "
                   "to the KV cache.", len(per_token) == 1, " or ".join(f"{x:,.0f}" for x in per_token) + " bytes a "
                   f"token, from {bench['lengths'][0]} to {bench['lengths'][-1]:,} tokens", "yes"),
            judged("Tip 1: Pre-allocate Memory", "This ensures consistent memory use and reduces overhead.",
                   len(fixed) == 1 and min(slices) > 1 + NOISE,
                   f"writing into slices is {spread(slices)} times as fast as torch.cat after {longest} tokens, "
                   f"{spread(ahead[cells[0]]['ratios'])} after {bench['lengths'][0]}; "
                   f"{' or '.join(f'{x:,}' for x in sorted(fixed))} bytes at each length",
                   f"partly: our files; a ring with a spare slot; judged at {longest} tokens, since the tip is for "
                   f"scaling; up to {NOISE:.0%} (our threshold) counts as noise",
                   len(fixed) > 1 or max(slices) < 1 - NOISE),
        )  # fmt: skip
    if stale := (window or {}).get("stale"):
        without, with_them = stale["perplexity"]
        rows += under(
            title, theirs, f"pocket, a trained model; {stale['texts']} texts of {stale['tokens']} tokens",
            judged("Clearing the Cache", "Otherwise, the queries of a new prompt will attend to stale keys left over "
                   "from the previous sequence", stale["times"][1] > 1, f"perplexity {without:.2f} without and "
                   f"{with_them:.2f} with the keys of another text in the cache: {with_interval(stale['times'])} times "
                   "as high", "partly: a text is read, not written", stale["times"][2] < 1),
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
    quick = "the window, and 20 tokens at a small geometry"
    with StudyLine(__doc__, "article", quick, model="", turns=3).parse(argv) as args:
        size, n = (SMALL, 20) if args.quick else ("124M", NEW)
        record: dict[str, Any] = {"window": window_check(), "prompt": PROMPT, "new_tokens": n, "turns": args.turns}
        window = {"window": record["window"], "stale": stale_check(), "geometry": SMALL, "tokens": TEXT, "size": WINDOW}
        write_json(args.out / "window.json", window)
        ids = torch.tensor([load_tokenizer("gpt2").encode(PROMPT)])
        record["conditions"] = conditions(f"{size}, random weights", random_model(gpt_kv_cache.GPT, size))
        record["seconds"] = speeds(size, ids, n, args.turns)
        write_json(args.out / "summary.json", record)
        print(page([*tables(record), *claim_tables(claims(window, record)),
                    f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
