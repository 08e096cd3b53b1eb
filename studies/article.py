"""The KV cache article's figures: 200 tokens after "Hello, I am" at 124M, and the window of two lines.

`python3 -m studies.article` takes about five minutes on one thread. Weights are random, as in the article: times don't
depend on them, and every implementation gets the same ones.

Source: Raschka 2025, "Understanding and Coding the KV Cache in LLMs from Scratch".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
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
from studies.claims import article
from studies.protocol import StudyLine, claim_tables, prepared, recorded_or_none
from support.cli import whole_number
from support.conditions import conditions, random_model
from support.files import write_json
from support.statistics import kl
from support.tables import Table, page

PROMPT, NEW = "Hello, I am", 200  # the article's
SMALL, WINDOW, TEXT = "4x4x64", 8, 40  # the geometry, window and tokens that the two lines are tried on
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


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "article", "the window, and 20 tokens at a small geometry", model="")
    cli.add_argument("--turns", type=whole_number(1), default=3, metavar="N", help="times are of N turns")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    with cli.parse(argv) as args:
        torch.set_num_threads(args.threads)
        prepared(args.out)
        size, n = (SMALL, 20) if args.quick else ("124M", NEW)
        record: dict[str, Any] = {"window": window_check(), "prompt": PROMPT, "new_tokens": n, "turns": args.turns}
        write_json(args.out / "window.json", {"window": record["window"], "geometry": SMALL, "tokens": TEXT,
                                              "size": WINDOW})  # fmt: skip
        ids = torch.tensor([load_tokenizer("gpt2").encode(PROMPT)])
        record["conditions"] = conditions(f"{size}, random weights", random_model(gpt_kv_cache.GPT, size))
        record["seconds"] = speeds(size, ids, n, args.turns)
        write_json(Path(args.out) / "summary.json", record)
        print(page([*tables(record), *claim_tables(article(recorded_or_none("article", "window.json"), record)),
                    f"Written to {args.out}"]))


if __name__ == "__main__":
    main()
