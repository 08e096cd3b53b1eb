"""What reusing KV caches across prompts saves: the paper's experiment, when reuse pays, which index finds what, and hit
rates over a trace of requests. `recycle.py` runs these; all times are medians of runs in turn, in one process.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from gpt_kv_cache import GPT, KVCache, generate
from load_gpt2_weights import END_OF_TEXT
from pocket import corpus
from recycle import RadixTree, Store, common_prefix, generate_as_published, read_all
from support.encoders import nearest
from support.files import write_atomically, write_csv

Encoder = Callable[[list[str]], np.ndarray]
BLOCK = 512  # tokens in a block of a trace
LLAMA_70B = 2 * 80 * 8 * 128 * 2  # bytes of a token's keys and values: 80 layers, 8 key-value heads of 128, 16 bits
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of a prompt that is stored; 1: all but its last token
LENGTHS = (64, 128, 256, 512, 1000)
SOURCES = ("memory", "warm disk", "cold disk")
DECODED = 100  # tokens written after a prompt, for times from end to end


# --- The paper's experiment -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """One generation: its tokens, and the seconds to the first of them and to the last."""

    ids: list[int]
    ttft: float
    total: float


def timed(start: Callable[[], Iterator[Tensor]]) -> Run:
    """Run a generation to its end; int() waits for the device."""
    ids, ttft, begun = [], 0.0, time.perf_counter()
    for token in start():
        ids.append(int(token))
        ttft = ttft or time.perf_counter() - begun
    return Run(ids, ttft, time.perf_counter() - begun)


def read_prompts(path: Path) -> list[str]:
    """Return the column prompt of a CSV file. Raises ValueError if it has none, or none that isn't empty."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # with or without the mark that spreadsheets write
            rows = csv.DictReader(file)
            if "prompt" not in (rows.fieldnames or ()):
                raise ValueError(f"{path} has no column prompt, but {', '.join(rows.fieldnames or ()) or 'nothing'}")
            prompts = [row["prompt"] for row in rows]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not prompts or not all(prompts):
        raise ValueError(f"{path} has {len(prompts)} prompts, {sum(not p for p in prompts)} of them empty")
    return prompts


def experiment(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, cached: list[str], tests: list[str],
               n_new: int, repeats: int, ending: str, out: Path) -> list[dict[str, Any]]:  # fmt: skip
    """Store the caches of some prompts; answer others cold, recycled, and as published; return a row for each.

    Recycled: on the longest prefix that the store has. Published: if the nearest prompt by embedding is a full prefix,
    by the paper's call, else cold. ending: what follows a test prompt, but no stored one. Raises ValueError if a prompt
    leaves no room for n_new tokens.
    """
    device, stop = model.wte.weight.device, tokenizer.eot_token
    prompts = [tokenizer.encode(text + ending, allowed_special={END_OF_TEXT}) for text in tests]
    records = [tokenizer.encode(text, allowed_special={END_OF_TEXT}) for text in cached]
    if (longest := max(map(len, prompts))) + n_new > model.config.n_ctx:
        raise ValueError(f"a prompt of {longest} tokens and {n_new} new ones exceed the context, {model.config.n_ctx}")
    store = Store(model, out / "cache")
    store.clear()  # of what an earlier run left
    for ids in tqdm(records, desc="cache", leave=False):
        store.put(ids, read_all(model, ids))
    embeddings = encoder(cached)
    write_atomically(out / "cache_embeddings.npy", lambda file: save_array(file, embeddings))
    found = [records[i] for i in nearest(embeddings, encoder(tests))]

    def cold(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        return generate(model, torch.tensor([ids], device=device), n_new, stop_id=stop)

    def recycled(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        return generate(model, torch.tensor([ids], device=device), n_new, stop_id=stop, cache=store.get(ids))

    def published(ids: list[int], record: list[int]) -> Iterator[Tensor]:
        if not usable(ids, record):
            return cold(ids, record)
        new, cache = torch.tensor([ids[len(record) :]], device=device), store.get([*record, stop])
        if len(cache) != len(record):
            raise OSError(f"the stored cache of {tokenizer.decode(record)!r} is lost: run again")
        return generate_as_published(model, new, cache, n_new, stop)

    def usable(ids: list[int], record: list[int]) -> int:
        return len(record) if record == ids[: len(record)] and len(record) < len(ids) else 0

    ways = {"cold": cold, "recycled": recycled, "published": published}
    runs: list[dict[str, list[Run]]] = [{name: [] for name in ways} for _ in prompts]
    for _ in tqdm(range(repeats + 1), desc="runs", leave=False):  # the first warms up
        for ids, record, done in zip(prompts, found, runs, strict=True):
            for name, way in ways.items():
                done[name].append(timed(lambda way=way, ids=ids, record=record: way(ids, record)))
    outputs = {name: [tokenizer.decode(done[name][0].ids) for done in runs] for name in ways}
    vectors = {name: encoder([text.removesuffix(END_OF_TEXT) for text in texts]) for name, texts in outputs.items()}
    rows = []
    for i, (ids, record, done) in enumerate(zip(prompts, found, runs, strict=True)):
        rows.append({"prompt": tests[i], "tokens": len(ids), "nearest": tokenizer.decode(record),
                     "nearest_tokens": len(record), "nearest_prefix_tokens": common_prefix(ids, record)})  # fmt: skip
        for name, several in done.items():
            latency, ttft = ([getattr(run, what) for run in several[1:]] for what in ("total", "ttft"))
            reused = {"cold": 0, "recycled": len(store.get(ids)), "published": usable(ids, record)}[name]
            rows[-1][name] = {
                "output": outputs[name][i], "new_tokens": len(several[0].ids), "reused_tokens": reused,
                "latency_s": statistics.median(latency), "ttft_s": statistics.median(ttft),
                "similarity": float(vectors["cold"][i] @ vectors[name][i]),
                "same_tokens": common_prefix(done["cold"][0].ids, several[0].ids),
                "identical": done["cold"][0].ids == several[0].ids,
            }  # fmt: skip
            for what in ("latency", "ttft"):
                rows[-1][name][f"{what}_saved"] = 1 - rows[-1][name][f"{what}_s"] / rows[-1]["cold"][f"{what}_s"]
    return rows


def save_array(file: Path, array: np.ndarray) -> None:
    """Write an array as .npy, whatever the file is called."""
    with file.open("wb") as handle:
        np.save(handle, array, allow_pickle=False)


def alpha(rows: list[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """Return the slope of S = alpha k / m through 0 by least squares, and its 95% interval by bootstrap over prompts.

    S: the share of what ("latency" or "ttft") that is saved; k: tokens reused; m: tokens of the prompt. Source: the
    paper, section 5.5.
    """
    x = np.array([row["recycled"]["reused_tokens"] / row["tokens"] for row in rows])
    y = np.array([row["recycled"][f"{what}_saved"] for row in rows])
    draws = np.random.default_rng(0).integers(len(rows), size=(2000, len(rows)))
    slopes = [slope(x[draw], y[draw]) for draw in draws]
    low, high = np.quantile(slopes, [0.025, 0.975])
    return slope(x, y), float(low), float(high)


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of the line through 0 that fits best, 0 if all x are 0."""
    return float(x @ y / max(x @ x, 1e-12))


def report(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, prompts: Sequence[Path], n_new: int,
           repeats: int, ending: str, about: dict[str, str], out: Path) -> None:  # fmt: skip
    """Run the experiment, the comparison of indices and, for a small model, the law; print, write and draw them."""
    cached, tests = map(read_prompts, prompts)
    out.mkdir(parents=True, exist_ok=True)  # before anything takes time
    rows = experiment(model, tokenizer, encoder, cached, tests, n_new, repeats, ending, out)
    print_rows(rows, f"{len(cached)} prompts stored; greedy, up to {n_new} tokens; medians of {repeats} runs in turn")
    if about["encoder"] == "tokens":
        print("\nMeans of token embeddings find most texts similar; --encoder all-MiniLM-L6-v2 tells them apart.")
    compared = indices(model, tokenizer, encoder)
    print_indices(compared)
    measured = None
    if model.config.n_embd < 512:  # else it takes minutes, and `recycle.py law` is there for it
        measured = law(model, repeats)
        print_law(measured)
    verdicts = claims(rows)
    print("\nWhat the paper claims (sections 5.2 to 5.5):")
    for claim in verdicts:
        print(f"  {claim['claim']}: {claim['verdict']} ({claim['figures']})")

    write_tables(rows, out)
    fits = {what: alpha(rows, what) for what in ("latency", "ttft")}
    summary = {**about, "new_tokens": n_new, "repeats": repeats, "prompts": rows, "alpha": fits, "indices": compared,
               "law": measured, "claims": verdicts}  # fmt: skip
    write_atomically(out / "summary.json", lambda file: file.write_text(json.dumps(summary, indent=2) + "\n"))
    draw(rows, fits, out)
    if measured:
        draw_law(measured, out, "pocket_law")
    print(f"\nWritten to {out}")


def claims(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the paper's claims, each with its verdict and the figures behind it."""
    n = len(rows)
    saved = [row["recycled"]["latency_saved"] for row in rows]
    first = [row["recycled"]["ttft_saved"] for row in rows]
    same = [row["published"]["similarity"] for row in rows]
    reused = sum(row["published"]["reused_tokens"] for row in rows)
    prefixes = sum(row["published"]["reused_tokens"] > 0 for row in rows)
    identical = sum(row["published"]["identical"] for row in rows)
    (a, low, high), (b, *_) = alpha(rows, "latency"), alpha(rows, "ttft")

    def verdict(holds: bool) -> str:
        return "HOLDS" if holds else "DOES NOT HOLD"

    return [
        {
            "claim": "prefixes: the nearest stored prompt is a full prefix of every test prompt",
            "verdict": verdict(prefixes == n),
            "figures": f"{prefixes} of {n}, {reused} tokens in all (the paper: 6 of 6, 40)",
        },
        {
            "claim": "speed: 30-50% less latency",
            "verdict": verdict(statistics.mean(saved) >= 0.3),
            "figures": f"{statistics.mean(saved):.1%} from end to end, {statistics.mean(first):.1%} to the first one: "
            "most of the time goes into writing, and few tokens are read as fast as restored",
        },
        {
            "claim": "law: S = alpha k / m with alpha of 1.2 to 1.5",
            "verdict": verdict(low <= 1.5 and high >= 1.2),
            "figures": f"alpha = {a:.2f} ({low:.2f} to {high:.2f}), for the first token {b:.2f}; more than 1 would "
            "be more than all of the work",
        },
        {
            "claim": "fidelity: a similarity of 0.66 to 0.82 means nearly the same answers",
            "verdict": verdict(identical == n),
            "figures": f"by the published call {statistics.mean(same):.2f} ({min(same):.2f} to {max(same):.2f}), and "
            f"{identical} of {n} answers are the same; recycled without a gap, "
            f"{sum(row['recycled']['identical'] for row in rows)} of {n} are",
        },
    ]


def print_rows(rows: list[dict[str, Any]], about: str) -> None:
    """Print what the runs took and wrote, and the text that the published call changed earliest."""
    print(f"{about}\n\n    prompt         ms to the last token                  ms to the first token"
          "       similar to cold     tokens as cold's")  # fmt: skip
    print("tokens reused   cold recycled published  saved    cold recycled  saved   recycled published  recycled publ.")
    for row in rows:
        c, r, p = row["cold"], row["recycled"], row["published"]
        n, ms = c["new_tokens"], [1e3 * x for x in (c["ttft_s"], r["ttft_s"])]
        print(f"{row['tokens']:>6}{r['reused_tokens']:>7}{1e3 * c['latency_s']:>7.0f}{1e3 * r['latency_s']:>9.0f}"
              f"{1e3 * p['latency_s']:>10.0f}{r['latency_saved']:>7.1%}{ms[0]:>8.2f}{ms[1]:>9.2f}"
              f"{r['ttft_saved']:>7.0%}{r['similarity']:>11.2f}{p['similarity']:>10.2f}"
              f"{r['same_tokens']:>7}/{n:<3}{p['same_tokens']:>6}/{n:<3}")  # fmt: skip
    print()
    for name in ("recycled", "published"):
        same = sum(row[name]["identical"] for row in rows)
        print(f"{name}: the same tokens as cold in {same} of {len(rows)}")
    example = min(rows, key=lambda row: row["published"]["same_tokens"])
    if not example["published"]["identical"]:
        print("The published call skips tokens of the prompt. For example:\n")
        for name in ("cold", "recycled", "published"):
            print(f"{name:>10}: {example['prompt']!r} -> {example[name]['output'][:100]!r}")


def write_tables(rows: list[dict[str, Any]], out: Path) -> None:
    """Write baseline.csv, recycled.csv and published.csv, and comparison.csv, in which they stand side by side."""
    names = ("cold", "recycled", "published")
    keys = list(rows[0]["cold"])
    for name in names:
        table = [[row["prompt"], row["tokens"], *(row[name][key] for key in keys)] for row in rows]
        write_csv(out / f"{'baseline' if name == 'cold' else name}.csv", ["prompt", "tokens", *keys], table)
    table = [[row["prompt"], row["tokens"], row["nearest"], row["nearest_prefix_tokens"],
              *(row[name][key] for name in names for key in keys)] for row in rows]  # fmt: skip
    header = ["prompt", "tokens", "nearest", "nearest_prefix_tokens"]
    header += [f"{name}_{key}" for name in names for key in keys]
    write_csv(out / "comparison.csv", header, table)


# --- Which index finds the prefix -----------------------------------------------------------------------------------


def indices(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, n: int = 150) -> dict[str, dict[str, float]]:
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


def print_indices(compared: dict[str, dict[str, float]]) -> None:
    """Print how many tokens each index finds to reuse."""
    print("\nWhat finds the stored prefix? Mean tokens to reuse, and how often the nearest text has fewer")
    print(f"\n{'queries':>34}   tree   nearest by embedding   nearest, if it is a full prefix   fewer")
    for kind, c in compared.items():
        print(f"{kind:>34}{c['tree']:>7.1f}{c['nearest']:>23.1f}{c['full_prefix']:>34.1f}{c['missed']:>8.0%}")


# --- When reuse pays ------------------------------------------------------------------------------------------------


def drop_from_memory(folder: Path) -> bool:
    """Let the operating system forget the content of files, so that they come from the disk; False if it can't."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # only what is on the disk can be forgotten
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True


@torch.no_grad()
def law(model: GPT, repeats: int, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Measure the time to the first token of prompts of m tokens, cold and with k of them stored, by where they are.

    Returns seconds: cells, one for each m and k, with cold and, for each of SOURCES, restore, ttft, and the median
    ratio of ttft to the cold run of the same turn; answers, from the prompt to the last of DECODED tokens; and
    crossover, by source, the smallest k that pays for a prompt of k tokens and one more.
    """
    device, n_ctx = model.wte.weight.device, model.config.n_ctx
    lengths = [m for m in lengths if m <= n_ctx] or [n_ctx]
    generator = torch.Generator().manual_seed(0)
    stores = {"memory": Store(model)}
    scratch = tempfile.TemporaryDirectory(prefix="recycle-")
    with scratch as folder:
        stores["warm disk"] = stores["cold disk"] = Store(model, folder)

        def first_token(ids: Tensor, cache: KVCache) -> float:
            begun = time.perf_counter()
            int(model(ids[:, len(cache) :], cache, last_only=True).argmax())  # int() waits for the device
            return time.perf_counter() - begun

        def cell(m: int, k: int) -> dict[str, Any]:
            ids = torch.randint(model.config.vocab_size, (1, m), generator=generator)
            text, ids = ids[0].tolist(), ids.to(device)
            for store in (stores["memory"], stores["warm disk"]):
                if k:
                    store.put(text, read_all(model, text[:k]))
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("cold", *stores)}
            for _ in range(repeats):
                taken["cold"].append((0.0, first_token(ids, KVCache())))
                for source, store in stores.items():
                    if source == "cold disk" and not drop_from_memory(store.folder):
                        continue
                    begun = time.perf_counter()
                    cache = store.get(text)
                    restore = time.perf_counter() - begun
                    if len(cache) != k:
                        raise RuntimeError(f"the store gave {len(cache)} tokens instead of {k}")
                    taken[source].append((restore, restore + first_token(ids, cache)))
            for store in (stores["memory"], stores["warm disk"]):
                store.clear()
            cold = [ttft for _, ttft in taken.pop("cold")]
            result: dict[str, Any] = {"m": m, "k": k, "cold": statistics.median(cold)}
            for source, pairs in taken.items():
                if pairs:
                    restores, ttfts = zip(*pairs, strict=True)
                    ratio = statistics.median(ttft / beside for ttft, beside in zip(ttfts, cold, strict=True))
                    result[source] = {"restore": statistics.median(restores), "ttft": statistics.median(ttfts),
                                      "ratio": ratio}  # fmt: skip
            return result

        def answer(m: int, k: int) -> dict[str, Any]:
            ids = torch.randint(model.config.vocab_size, (1, m), generator=generator)
            text, ids, store = ids[0].tolist(), ids.to(device), stores["warm disk"]
            store.put(text, read_all(model, text[:k]))
            seconds: list[tuple[float, float]] = []
            for _ in range(max(1, repeats // 2)):
                seconds.append((
                    timed(lambda: generate(model, ids, DECODED)).total,
                    timed(lambda: generate(model, ids, DECODED, cache=store.get(text))).total,
                ))  # fmt: skip
            store.clear()
            cold, warm = (statistics.median(way) for way in zip(*seconds, strict=True))
            saved = statistics.median(1 - b / a for a, b in seconds)
            return {"m": m, "k": k, "cold": cold, "warm disk": warm, "saved": saved}

        grid = [(m, min(round(share * m), m - 1)) for m in lengths for share in SHARES]
        cell(*grid[-1])  # warms up
        cells = [cell(m, k) for m, k in tqdm(grid, desc="law", leave=False)]
        depths = [2**i for i in range(9) if 2**i < max(lengths)]
        scan = [cell(k + 1, k) for k in tqdm(depths, desc="crossover", leave=False)]
        answers = [answer(m, round(share * m)) for m, share in tqdm(
            [(m, share) for m in lengths if m + DECODED <= n_ctx for share in (0.5, 0.9)], desc="answers", leave=False
        )]  # fmt: skip
    crossover = {}
    for source in SOURCES:
        pays = [source in c and c[source]["ratio"] < 0.97 for c in scan]  # 3% are taken for noise
        last_loss = max((i for i, p in enumerate(pays) if not p), default=-1)
        crossover[source] = scan[last_loss + 1]["k"] if last_loss + 1 < len(scan) else None
    return {"layers": model.config.n_layer, "width": model.config.n_embd, "threads": torch.get_num_threads(),
            "device": str(device), "repeats": repeats, "cells": cells, "answers": answers, "scan": scan,
            "crossover": crossover}  # fmt: skip


def print_law(measured: dict[str, Any]) -> None:
    """Print times to the first token, what is saved also of whole answers, and from how many tokens on reuse pays."""
    print(f"\nWhen reuse pays: {measured['layers']} layers, width {measured['width']}, {measured['threads']} threads, "
          f"{measured['device']}; ms, medians of {measured['repeats']}\n")  # fmt: skip
    sources = [source for source in SOURCES if source in measured["cells"][0]]
    print("prompt  stored   k/m   first token: cold" + "".join(f"{source:>12} (restore)" for source in sources)
          + "   warm disk / cold")  # fmt: skip
    for c in measured["cells"]:
        print(f"{c['m']:>6}{c['k']:>8}{c['k'] / c['m']:>6.2f}{1e3 * c['cold']:>20.1f}"
              + "".join(f"{1e3 * c[s]['ttft']:>12.1f} ({1e3 * c[s]['restore']:>7.2f})" for s in sources)
              + f"{c['warm disk']['ratio']:>19.3f}")  # fmt: skip
    print(f"\nprompt  stored   to the last of {DECODED} tokens: cold   warm disk   saved")
    for c in measured["answers"]:
        print(f"{c['m']:>6}{c['k']:>8}{1e3 * c['cold']:>32.0f}{1e3 * c['warm disk']:>12.0f}{c['saved']:>8.1%}")
    pays = (f"{measured['crossover'][source] or 'none measured'} ({source})" for source in sources)
    print("\nReuse pays, if only one token is left to read, from so many stored tokens on: " + ", ".join(pays))


def report_law(model: GPT, repeats: int, out: Path) -> None:
    """Measure when reuse pays; print, write and draw it."""
    out.mkdir(parents=True, exist_ok=True)
    measured = law(model, repeats)
    print_law(measured)
    write_atomically(out / "law.json", lambda file: file.write_text(json.dumps(measured, indent=2) + "\n"))
    draw_law(measured, out, "law")
    print(f"\nWritten to {out}")


# --- A trace of requests --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A prompt of a trace: how many tokens, and the ids of its blocks; equal ids mean equal text up to there."""

    tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace in Mooncake's format. Raises ValueError, with the line, if it isn't one."""
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                tokens, blocks = entry["input_length"], tuple(entry["hash_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no input_length and hash_ids ({error})") from error
            if type(tokens) is not int or not all(type(block) is int for block in blocks):
                raise ValueError(f"{path}, line {number}: input_length and hash_ids must be whole numbers")
            if not 0 < tokens <= BLOCK * len(blocks) < tokens + BLOCK:
                raise ValueError(f"{path}, line {number}: {tokens} tokens don't make {len(blocks)} blocks of {BLOCK}")
            requests.append(Request(tokens, blocks))
    if not requests:
        raise ValueError(f"{path} is empty")
    return requests


def hit_rates(requests: list[Request], capacity: float, bar: Any) -> dict[str, float]:
    """Run the store's index and eviction over a trace, with room for so many blocks; return the shares that were found.

    Of a prompt that is stored whole, the last token still has to be read.
    """
    tree, held, hits, found, whole = RadixTree(), 0, 0, 0, 0
    for request in requests:
        known = sum(shared for _, shared in tree.match(request.blocks))
        hits += known
        found += min(known * BLOCK, request.tokens - 1)
        whole += known > 0
        tree.insert(request.blocks)
        held += len(request.blocks) - known
        while held > capacity:
            leaf, keep = tree.oldest(held - int(capacity))
            tree.cut(leaf, keep)
            held -= len(leaf.ids) - keep
        bar.update()
    blocks, tokens = (sum(sizes) for sizes in zip(*((len(r.blocks), r.tokens) for r in requests), strict=True))
    return {"blocks": hits / blocks, "tokens": found / tokens, "requests": whole / len(requests)}


def replay(path: Path, capacities: Sequence[int] | None, out: Path) -> None:
    """Print, write and draw the hit rates of a trace over capacities, and those of a cache without limit."""
    requests = read_trace(path)
    out.mkdir(parents=True, exist_ok=True)
    unique = len({block for request in requests for block in request.blocks})
    if not capacities:
        capacities = [size for size in (500 * 2**i for i in range(30)) if size < unique] or [max(1, unique // 2)]
    sizes = [*sorted(capacities), float("inf")]
    print(f"{path.name}: {len(requests):,} requests, {sum(r.tokens for r in requests):,} tokens in "
          f"{sum(len(r.blocks) for r in requests):,} blocks of {BLOCK}, {unique:,} of them different\n")  # fmt: skip
    begun = time.perf_counter()
    with tqdm(total=len(requests) * len(sizes), desc="replay", leave=False) as bar:
        rates = {size: hit_rates(requests, size, bar) for size in sizes}
    print(" capacity: blocks        tokens    GB at 70B   hit rate: blocks  tokens   requests with a hit")
    rows = []
    for size, rate in rates.items():
        blocks = unique if size == float("inf") else int(size)
        label = "no limit" if size == float("inf") else f"{blocks:,}"
        capacity = "no limit" if size == float("inf") else blocks
        rows.append([capacity, blocks * BLOCK, blocks * BLOCK * LLAMA_70B / 1e9, *rate.values()])
        print(f"{label:>17}{blocks * BLOCK:>14,}{rows[-1][2]:>13,.0f}{rate['blocks']:>19.1%}{rate['tokens']:>8.1%}"
              f"{rate['requests']:>14.1%}")  # fmt: skip
    print(f"\n{(time.perf_counter() - begun) / len(sizes):.2f} s per capacity. 70B: {LLAMA_70B:,} bytes a token (80 "
          "layers, 8 key-value heads of 128, 16 bits). The order of requests counts, their times don't.")  # fmt: skip
    header = ["capacity_blocks", "tokens", "gigabytes_70b", "block_hit_rate", "token_hit_rate", "request_hit_rate"]
    write_csv(out / f"replay_{path.stem}.csv", header, rows)
    draw_replay(path.stem, rates, unique, out)
    print(f"Written to {out}")


# --- Figures --------------------------------------------------------------------------------------------------------


def figure(path: Path, draw_on: Callable[[Any], None], **labels: Any) -> None:
    """Draw one pair of axes, with a legend unless `draw_on` makes one, and write it as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, axes = plt.subplots(figsize=(8, 4.5))
    draw_on(axes)
    axes.set(**labels)
    if axes.get_legend_handles_labels()[0] and not axes.get_legend():
        axes.legend(fontsize=8, framealpha=0.6)
    image.tight_layout()
    write_atomically(path, lambda file: image.savefig(file, dpi=120, format="png"))
    plt.close(image)


def draw(rows: list[dict[str, Any]], fits: dict[str, tuple[float, float, float]], out: Path) -> None:
    """Draw the paper's four figures: reuse, latency, similarity, and speedup against reuse depth."""
    at = np.arange(len(rows))
    labels = [f"{row['prompt'][:14]}..." for row in rows]

    def bars(axes: Any, key: str, scale: float, names: Sequence[str]) -> None:
        for i, name in enumerate(names):
            hatch = {"cold": "", "recycled": "//", "published": ".."}[name]
            heights = [scale * row[name][key] for row in rows]
            width = 0.8 / len(names)
            offset = (i - (len(names) - 1) / 2) * width
            axes.bar(at + offset, heights, width, label=name, hatch=hatch, edgecolor="white")
        axes.set_xticks(at, labels, rotation=20, ha="right", fontsize=8)
        axes.set_ylim(0, 1.2 * max(scale * row[name][key] for row in rows for name in names))  # room for the legend

    def reuse(axes: Any) -> None:
        reused = np.array([row["recycled"]["reused_tokens"] for row in rows])
        axes.bar(at, reused, label="reused", hatch="//", edgecolor="white")
        axes.bar(at, [row["tokens"] for row in rows] - reused, bottom=reused, label="read")
        axes.set_xticks(at, labels, rotation=20, ha="right", fontsize=8)

    figure(out / "reuse.png", reuse, title="Tokens of the prompts", ylabel="tokens")
    figure(out / "latency.png", lambda axes: bars(axes, "latency_s", 1e3, ("cold", "recycled", "published")),
           title="From the prompt to the last token", ylabel="ms")  # fmt: skip
    figure(out / "similarity.png", lambda axes: bars(axes, "similarity", 1, ("recycled", "published")),
           title="Similarity of the outputs to a cold run's", ylabel="cosine of embeddings")  # fmt: skip

    def speedup(axes: Any) -> None:
        for what, label, color, marker in (("latency", "from end to end", "tab:blue", "o"),
                                           ("ttft", "to the first token", "tab:orange", "s")):  # fmt: skip
            x = np.array([row["recycled"]["reused_tokens"] / row["tokens"] for row in rows])
            axes.plot(x, [100 * row["recycled"][f"{what}_saved"] for row in rows], marker, color=color, label=label)
            a = fits[what][0]
            line = np.array([0, 1])
            axes.plot(line, 100 * a * line, "-", color=color, linewidth=1, label=f"alpha = {a:.2f}")
        axes.fill_between([0, 1], [0, 120], [0, 150], color="lightgrey", label="the paper: 1.2 to 1.5")
        axes.axhline(0, color="black", linewidth=0.6)

    lowest = min(100 * row["recycled"][f"{what}_saved"] for row in rows for what in ("latency", "ttft"))
    figure(out / "speedup.png", speedup, title="Time saved against the share of the prompt that is reused",
           xlabel="k / m", ylabel="% saved", xlim=(0, 1), ylim=(min(-40, lowest - 10), 110))  # fmt: skip


def draw_law(measured: dict[str, Any], out: Path, name: str) -> None:
    """Draw what reuse saves of the time to the first token, and from end to end, over k/m."""
    lengths = sorted({c["m"] for c in measured["cells"]})

    def curves(axes: Any, saved: Callable[[dict[str, Any]], float]) -> None:
        for i, m in enumerate(lengths):
            cells = [c for c in measured["cells"] if c["m"] == m]
            style = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))[i % 5]
            axes.plot([c["k"] / m for c in cells], [100 * saved(c) for c in cells], linestyle=style, marker="o",
                      markersize=3, label=f"m = {m}")  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.6)

    what = f"{measured['layers']} layers, width {measured['width']}, from the warm disk"
    figure(out / f"{name}_first_token.png", lambda axes: curves(axes, lambda c: 1 - c["warm disk"]["ratio"]),
           title=f"Time to the first token: {what}", xlabel="k / m", ylabel="% saved", xlim=(0, 1),
           ylim=(-20, 100))  # fmt: skip


def draw_replay(name: str, rates: dict[float, dict[str, float]], unique: int, out: Path) -> None:
    """Draw hit rates against capacity."""
    finite = [size for size in rates if size != float("inf")]

    def curves(axes: Any) -> None:
        for key, style in (("tokens", "o-"), ("blocks", "s--")):
            axes.plot(finite, [100 * rates[size][key] for size in finite], style, label=f"{key}", markersize=4)
        axes.axhline(100 * rates[float("inf")]["tokens"], color="grey", linestyle=":", label="no limit (tokens)")
        axes.set_xscale("log", base=2)

    figure(out / f"replay_{name}.png", curves, title=f"{name}: what is found in the cache",
           xlabel=f"capacity in blocks of {BLOCK} tokens ({unique:,} different ones in the trace)", ylabel="% found",
           ylim=(0, None))  # fmt: skip
