"""The KV recycling paper's experiment: what reusing caches across prompts saves, and its claims.

`recycle.py` shows a part of it. Times are medians of runs in turn, in one process, or from runs in the paper's order
(`--order`). `--model 355M` has the paper's own geometry, with random weights.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import END_OF_TEXT, NAMES, load_tokenizer
from pocket import corpus
from recycle import Store, read_all
from studies import latency
from studies.latency import Run, timed
from studies.protocol import StudyLine, claim_tables, read_prompts
from studies.recycling_report import METHODS, alpha, claims, draw, tables, write_tables
from support.cli import whole_number
from support.conditions import SIZES, conditions, is_geometry
from support.encoders import TokenEncoder, load_encoder, nearest
from support.files import write_atomically, write_json
from support.radix_tree import RadixTree, common_prefix
from support.tables import page, table

DATA = Path(__file__).resolve().parent.parent / "data"
Encoder = Callable[[list[str]], np.ndarray]


@torch.no_grad()
def generate_as_published(model: GPT, new: Tensor, cache: KVCache, max_new_tokens: int,
                          stop_id: int | None = None) -> Iterator[Tensor]:  # fmt: skip
    """Yield what the paper's call writes, `model.generate(input_ids=new, past_key_values=cache)` (transformers 4.45.2).

    Given a cache, that generate() takes input_ids for the whole text. Of T new tokens (1, T) after k cached ones it
    drops the first k, or all but the last if T is no more than k; and it counts positions from the first new token on.
    So the model sees a text with a hole, at positions it has used before. For comparison only: changes the cache.
    """
    k, T = len(cache), new.size(1)
    fed = new[:, k:] if k < T else new[:, -1:]
    at = T - fed.size(1)  # position of the first token fed
    cache.pos = torch.arange(at - k, at, device=new.device)  # what is cached is seen, wherever it was read
    for _ in range(max_new_tokens):
        fed = model(fed, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True)
        yield fed
        if int(fed) == stop_id:
            return


def experiment(store: Store, tokenizer: tiktoken.Encoding, encoder: Encoder, cached: list[str], tests: list[str],
               n_new: int, repeats: int, ending: str, bar: tqdm, order: str = "interleaved") -> list[dict[str, Any]]:
    """Store the caches of some prompts; answer others cold, recycled, and as published; return a row for each.

    Recycled: on the longest prefix that the store has. Published: if the nearest prompt by embedding is a full prefix,
    by the paper's call, else cold. ending: what follows a test prompt, but no stored one. Raises ValueError if a prompt
    leaves no room for n_new tokens. repeats: runs after one that warms up; 0: that one counts. Each moves the bar by 1.
    order: "interleaved", or the "source"'s: once and nothing warm, all cold runs, the caches, then the published call.
    """
    model, device, stop = store.model, store.device, tokenizer.eot_token
    prompts = [tokenizer.encode(text + ending, allowed_special={END_OF_TEXT}) for text in tests]
    records = [tokenizer.encode(text, allowed_special={END_OF_TEXT}) for text in cached]
    if (longest := max(map(len, prompts))) + n_new > model.config.n_ctx:
        raise ValueError(f"a prompt of {longest} tokens and {n_new} new ones exceed the context, {model.config.n_ctx}")
    store.clear()  # of what an earlier run left
    used: dict[str, KVCache] = {}  # by the latest run

    def cold(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        used["cache"] = model.new_cache()
        return generate(model, torch.tensor([ids], device=device), n_new, stop_id=stop, cache=used["cache"])

    def recycled(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        used["cache"] = store.get(ids)
        return generate(model, torch.tensor([ids], device=device), n_new, stop_id=stop, cache=used["cache"])

    def published(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        if not usable(ids, record):
            return cold(ids, record)
        new = torch.tensor([ids[len(record) :]], device=device)
        used["cache"] = cache = store.get([*record, stop])
        if len(cache) != len(record):
            raise OSError(f"the stored cache of {tokenizer.decode(record)!r} is lost: run again")
        return generate_as_published(model, new, cache, n_new, stop)

    def usable(ids: list[int], record: list[int]) -> int:
        return len(record) if record == ids[: len(record)] and len(record) < len(ids) else 0

    methods = {"cold": cold, "recycled": recycled, "published": published}
    runs: list[dict[str, list[Run]]] = [{name: [] for name in methods} for _ in prompts]
    positions: list[dict[str, int]] = [{} for _ in prompts]  # that an answer's cache takes

    def answer(names: Sequence[str], found: list[list[int]]) -> None:
        for ids, record, done, taken in zip(prompts, found, runs, positions, strict=True):
            for name in names:
                done[name].append(timed(lambda name=name, ids=ids, record=record: methods[name](ids, record)))
                taken[name] = len(used["cache"])

    if order == "source":
        answer(["cold"], prompts)  # the first answer is the first thing that the model does at all
    for ids in records:
        store.put(ids, read_all(model, ids))
    found = [records[i] for i in nearest(encoder(cached), encoder(tests))]
    if order == "source":
        answer(["published"], found)
        answer(["recycled"], found)
        bar.update(repeats + 1)
    else:
        for _ in range(repeats + 1):  # the first warms up
            answer(METHODS, found)
            bar.update()
    outputs = {name: [tokenizer.decode(done[name][0].ids) for done in runs] for name in methods}
    vectors = {name: encoder([text.removesuffix(END_OF_TEXT) for text in texts]) for name, texts in outputs.items()}
    alike = vectors["cold"] @ vectors["cold"].T  # (N, N)
    to_others = (alike.sum(1) - alike.diagonal()) / max(1, len(alike) - 1)
    rows = []
    for i, (ids, record, done) in enumerate(zip(prompts, found, runs, strict=True)):
        rows.append({"prompt": tests[i], "tokens": len(ids), "nearest": tokenizer.decode(record),
                     "nearest_tokens": len(record), "nearest_prefix_tokens": common_prefix(ids, record),
                     "similarity_to_others": float(to_others[i])})  # fmt: skip  of the cold answers
        for name, several in done.items():
            total, ttft = ([getattr(run, what) for run in several[1:] or several] for what in ("total", "ttft"))
            reused = {"cold": 0, "recycled": len(store.get(ids)), "published": usable(ids, record)}[name]
            rows[-1][name] = {
                "output": outputs[name][i], "new_tokens": len(several[0].ids), "reused_tokens": reused,
                "latency_s": statistics.median(total), "ttft_s": statistics.median(ttft),
                "similarity": float(vectors["cold"][i] @ vectors[name][i]),
                "positions": positions[i][name],
                "same_tokens": common_prefix(done["cold"][0].ids, several[0].ids),
                "identical": done["cold"][0].ids == several[0].ids,
            }  # fmt: skip
            for what in ("latency", "ttft"):
                rows[-1][name][f"{what}_saved"] = 1 - rows[-1][name][f"{what}_s"] / rows[-1]["cold"][f"{what}_s"]
    return rows


def unrelated(cached: list[str], tests: list[str], tokenizer: tiktoken.Encoding) -> list[str]:
    """Return the prompts to store that begin with another token than all those to test."""
    first = {tokenizer.encode(text, allowed_special={END_OF_TEXT})[0] for text in tests}
    return [text for text in cached if tokenizer.encode(text, allowed_special={END_OF_TEXT})[0] not in first]


def report(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, prompts: Sequence[Path], n_new: int,
           repeats: int, queries: int, lengths: Sequence[int], ending: str, about: dict[str, Any],
           out: Path, orders: Sequence[str] = ("interleaved",)) -> None:  # fmt: skip
    """Run the experiment in the given orders and without overlap; for known weights the comparison of indices too, and
    for a small model the law; print, write and draw them. queries: 0 for random weights."""
    cached, tests = map(read_prompts, prompts)
    store, others, fixed = Store(model, out / "cache"), unrelated(cached, tests, tokenizer), (n_new, repeats, ending)
    with tqdm(total=(len(orders) + bool(others)) * (repeats + 1), desc="runs", leave=False) as bar:
        found = {order: experiment(store, tokenizer, encoder, cached, tests, *fixed, bar, order)
                 for order in sorted(orders, reverse=True)}  # the source's first: nothing may be warm
        nothing = experiment(Store(model), tokenizer, encoder, others, tests, *fixed, bar) if others else []
    rows = found[orders[0]]
    embeddings = encoder(cached)
    write_atomically(out / "cache_embeddings.npy", lambda file: np.save(file, embeddings))
    small = bool(queries) and model.config.n_embd < 512  # else it takes minutes, and studies.latency is there for it
    fits = {what: alpha(rows, what) for what in ("latency", "ttft")}
    record = {**about, "new_tokens": n_new, "repeats": repeats, "prompts": rows, "orders": found,
              "without_overlap": nothing, "alpha": fits,
              "indices": indices(model, tokenizer, encoder, queries) if queries else {},
              "law": latency.measure(model, repeats, lengths) if small else None}  # fmt: skip
    write_tables(rows, out)
    write_json(out / ("summary.json" if queries else "geometry.json"), record)
    draw(rows, fits, out)
    if small:
        latency.draw(record["law"], out, "pocket_law")
    law = latency.tables(record["law"]) if small else []
    print(page([*tables(record), *claim_tables(claims(record)), *law]))
    if about["encoder"] == "tokens":
        print("\nMeans of token embeddings find most texts similar; --encoder all-MiniLM-L6-v2 tells them apart.")
    example = min(rows, key=lambda row: row["published"]["same_tokens"])
    if queries and not example["published"]["identical"]:
        print("\nThe published call skips tokens of the prompt. For example:\n")
        for name in METHODS:
            print(f"{name:>10}: {example['prompt']!r} -> {example[name]['output'][:100]!r}")
    print(f"\nWritten to {out}")


def demo(model: GPT, tokenizer: tiktoken.Encoding, name: str, n_new: int) -> None:
    """Run the experiment in memory, with one more, long prompt; print the savings beside the exact result."""
    (cached, tests), ending = map(read_prompts, prompt_files(name)), END_OF_TEXT * ("DialoGPT" in name)
    stored = "\n".join(cached)

    def run(n_new: int, repeats: int) -> list[dict[str, Any]]:
        encoder, rows = TokenEncoder(model, tokenizer), []
        for store, test in ((cached, tests), ([stored], [f"{stored}\n{tests[0]}"])):
            rows += experiment(Store(model), tokenizer, encoder, store, test, n_new, repeats, ending, bar)
        return rows

    def saved(rows: list[dict[str, Any]], what: str) -> str:
        recycled, cold = (sum(row[method][what] for row in rows) for method in ("recycled", "cold"))
        less = 1 - recycled / cold
        return f"{abs(less):.0%} {'less' if less > 0 else 'more'}" if abs(less) > 0.05 else "the same within noise"

    with tqdm(total=2 * (10 + 1), desc="runs", leave=False) as bar:  # a first token takes milliseconds: ten times
        first, texts, cells = run(1, 9), run(n_new, 0), []
    for row, fast in zip(texts, first, strict=True):
        start = row["prompt"].replace("\n", " ")
        label = f"{start[:27]}..." if row is not texts[-1] else "all stored, then the first"
        times = [f"{1e3 * fast[method]['ttft_s']:.1f}" for method in ("cold", "recycled", "published")]
        same = ["the same" if row[method]["identical"] else f"differs at token {row[method]['same_tokens'] + 1}"
                for method in ("recycled", "published")]  # fmt: skip
        if not row["published"]["reused_tokens"]:
            same[1] = "(no prefix found)"
        cells.append([label, str(row["tokens"]), str(row["recycled"]["reused_tokens"]), *times, *same])
    header = ["prompt", "tokens", "reused", "cold", "recycled", "published", "recycled text", "published text"]
    exact = sum(row["recycled"]["identical"] for row in texts)
    print(f"The caches of {len(cached)} prompts are stored, and {len(tests)} other prompts are answered; then a long "
          f"one that begins with all {len(cached)}.\n{n_new} greedy tokens each. Times: ms to the first token, medians "
          "of 9.\n\n"
          f"{table(header, cells)}\n\n"
          f"Recycled: the longest stored prefix is reused. Exact: {exact} of {len(texts)} texts are the cold run's, "
          f"token for token.\n  Time to the first token: {saved(first[:-1], 'ttft_s')} for the short prompts, "
          f"{saved(first[-1:], 'ttft_s')} for the long one;\n  to the last token: {saved(texts, 'latency_s')} in all: "
          "most of it goes into writing.\nPublished: the nearest prompt is reused by the paper's own "
          "call. Not exact: the call skips tokens\n  of the prompt, and uses positions twice.\n\n"
          "The full study: python3 recycle.py study")  # fmt: skip


def indices(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, n: int) -> dict[str, dict[str, float]]:
    """Return how many tokens the radix tree and the nearest embedding find to reuse, for three kinds of queries.

    Stored: the first halves of n held-out texts of the pocket corpus. Queries: whole texts; a stored half followed by a
    much longer other text; and the first quarter of a text, then the second half of another. missed: in how many of the
    queries the nearest text shares less with it than the best one does.
    """
    texts = [document.text.split(" ")[:120] for document in corpus.documents("test", n)]
    pairs = [(text[: len(text) // 2], other) for text, other in zip(texts, texts[1:] + texts[:1], strict=True)]
    halves = [" ".join(half) for half, _ in pairs]
    kinds = {
        "a stored text goes on": [" ".join(text) for text in texts],
        "a stored text, then another": [" ".join(half + other) for half, other in pairs],
        "half a stored text, then another": [
            " ".join(half[: len(half) // 2] + other[len(other) // 2 :]) for half, other in pairs
        ],
    }
    tree, stored = RadixTree(), [tokenizer.encode_ordinary(text) for text in halves]
    for ids in stored:
        tree.insert(ids)
    embeddings, result = encoder(halves), {}
    for kind, queries in kinds.items():
        best, by_nearest, by_full_prefix = [], [], []
        for query, i in zip(queries, nearest(embeddings, encoder(queries)), strict=True):
            ids = tokenizer.encode_ordinary(query)
            best.append(sum(shared for _, shared in tree.match(ids[:-1])))
            by_nearest.append(common_prefix(ids[:-1], stored[i]))
            by_full_prefix.append(len(stored[i]) if by_nearest[-1] == len(stored[i]) else 0)
        result[kind] = {
            "queries": n, "tree": statistics.mean(best), "nearest": statistics.mean(by_nearest),
            "full_prefix": statistics.mean(by_full_prefix),
            "missed": sum(a < b for a, b in zip(by_nearest, best, strict=True)) / n,
        }  # fmt: skip
    return result


def prompt_files(model: str) -> list[Path]:
    """Return the prompts to store and those to test: the paper's, for pocket its own."""
    return [DATA / f"{'pocket_' * (model == 'pocket')}{kind}_prompts.csv" for kind in ("cache", "test")]


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "recycling", "once, with fewer queries", models=f"{NAMES}; or random weights of the size "
                    f"of {', '.join(SIZES)} or LAYERSxHEADSxWIDTH (355M is DialoGPT-medium's)")
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=100, metavar="N", help="tokens to write")
    cli.add_argument("--prompts", nargs=2, metavar=("STORE.csv", "TEST.csv"),
                     help="prompts to store and to test, in the column prompt; default: the files in data, or pocket's "
                     "own prompts for pocket")  # fmt: skip
    cli.add_argument("--encoder", default="tokens", metavar="NAME",
                     help="embeddings for the nearest prompt: tokens, the model's own, or a model of "
                     "sentence-transformers, such as all-MiniLM-L6-v2")  # fmt: skip
    cli.add_argument("--repeats", type=whole_number(1), metavar="N", help="times are medians of N; default: 5, with "
                     "--quick 1")  # fmt: skip
    cli.add_argument("--order", choices=("interleaved", "source", "both"), default="interleaved",
                     help="order of the runs: interleaved after a warm-up, or the paper's: all cold runs without a "
                     "warm-up, then all others, once each")  # fmt: skip
    with cli.parse(argv) as args:
        model, name = latency.model_of(args)
        random = is_geometry(args.model)
        tokenizer = load_tokenizer("gpt2" if random else args.model)
        repeats, queries, lengths = (1, 40, latency.QUICK) if args.quick else (5, 150, latency.LENGTHS)
        repeats = args.repeats or repeats
        about = {"model": name, "encoder": Path(args.encoder).name, "conditions": conditions(name, model)}
        report(model, tokenizer, load_encoder(args.encoder, model, tokenizer),
               [*map(Path, args.prompts or prompt_files(args.model))], args.max_new_tokens, repeats,
               0 if random else queries, lengths, END_OF_TEXT * ("DialoGPT" in args.model), about, args.out,
               ("interleaved", "source") if args.order == "both" else (args.order,))  # fmt: skip


if __name__ == "__main__":
    main()
