"""The KV recycling paper's experiment: what reusing caches across prompts saves, and its claims.

`recycle.py` shows a part of it. All times are medians of runs in turn, in one process.

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
from load_gpt2_weights import END_OF_TEXT, load_model, load_tokenizer
from pocket import corpus
from recycle import Store, read_all
from studies import latency
from studies.latency import Run, timed
from studies.protocol import Claim, StudyLine, claims_table, judged, with_interval
from support.cli import whole_number
from support.encoders import TokenEncoder, load_encoder, nearest
from support.figures import figure
from support.files import read_csv, write_atomically, write_csv, write_json
from support.radix_tree import RadixTree, common_prefix
from support.statistics import bootstrap
from support.tables import Table, page, table

DATA = Path(__file__).resolve().parent.parent / "data"
Encoder = Callable[[list[str]], np.ndarray]
METHODS = ("cold", "recycled", "published")


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


def read_prompts(path: Path) -> list[str]:
    """Return the column prompt of a CSV file. Raises ValueError if it has none, or none that isn't empty."""
    prompts = [row["prompt"] for row in read_csv(path, "prompt")]
    if not prompts or not all(prompts):
        raise ValueError(f"{path} has {len(prompts)} prompts, {sum(not p for p in prompts)} of them empty")
    return prompts


def experiment(store: Store, tokenizer: tiktoken.Encoding, encoder: Encoder, cached: list[str], tests: list[str],
               n_new: int, repeats: int, ending: str, bar: tqdm) -> list[dict[str, Any]]:  # fmt: skip
    """Store the caches of some prompts; answer others cold, recycled, and as published; return a row for each.

    Recycled: on the longest prefix that the store has. Published: if the nearest prompt by embedding is a full prefix,
    by the paper's call, else cold. ending: what follows a test prompt, but no stored one. Raises ValueError if a prompt
    leaves no room for n_new tokens. repeats: runs after one that warms up; 0: that one counts. Each moves the bar by 1.
    """
    model, device, stop = store.model, store.device, tokenizer.eot_token
    prompts = [tokenizer.encode(text + ending, allowed_special={END_OF_TEXT}) for text in tests]
    records = [tokenizer.encode(text, allowed_special={END_OF_TEXT}) for text in cached]
    if (longest := max(map(len, prompts))) + n_new > model.config.n_ctx:
        raise ValueError(f"a prompt of {longest} tokens and {n_new} new ones exceed the context, {model.config.n_ctx}")
    store.clear()  # of what an earlier run left
    for ids in records:
        store.put(ids, read_all(model, ids))
    found = [records[i] for i in nearest(encoder(cached), encoder(tests))]

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

    methods = {"cold": cold, "recycled": recycled, "published": published}
    runs: list[dict[str, list[Run]]] = [{name: [] for name in methods} for _ in prompts]
    for _ in range(repeats + 1):  # the first warms up
        for ids, record, done in zip(prompts, found, runs, strict=True):
            for name, method in methods.items():
                done[name].append(timed(lambda method=method, ids=ids, record=record: method(ids, record)))
        bar.update()
    outputs = {name: [tokenizer.decode(done[name][0].ids) for done in runs] for name in methods}
    vectors = {name: encoder([text.removesuffix(END_OF_TEXT) for text in texts]) for name, texts in outputs.items()}
    rows = []
    for i, (ids, record, done) in enumerate(zip(prompts, found, runs, strict=True)):
        rows.append({"prompt": tests[i], "tokens": len(ids), "nearest": tokenizer.decode(record),
                     "nearest_tokens": len(record), "nearest_prefix_tokens": common_prefix(ids, record)})  # fmt: skip
        for name, several in done.items():
            latency, ttft = ([getattr(run, what) for run in several[1:] or several] for what in ("total", "ttft"))
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
    """Return the slope of S = alpha k / m through 0 by least squares, and its 95% interval over prompts.

    S: the share of what ("latency" or "ttft") that is saved; k: tokens reused; m: tokens of the prompt. Source: the
    paper, section 5.5.
    """
    return bootstrap(np.array([[row["recycled"]["reused_tokens"] / row["tokens"], row["recycled"][f"{what}_saved"]]
                               for row in rows]), slope)  # fmt: skip


def slope(points: np.ndarray) -> np.ndarray:
    """Return the slopes (...,) of the lines through 0 that fit points (..., n, 2) best, 0 if all x are 0."""
    x, y = points[..., 0], points[..., 1]
    return (x * y).sum(-1) / np.maximum((x * x).sum(-1), 1e-12)


def report(model: GPT, tokenizer: tiktoken.Encoding, encoder: Encoder, prompts: Sequence[Path], n_new: int,
           repeats: int, queries: int, lengths: Sequence[int], ending: str, about: dict[str, str],
           out: Path) -> None:  # fmt: skip
    """Run the experiment, the comparison of indices and, for a small model, the law; print, write and draw them."""
    cached, tests = map(read_prompts, prompts)
    out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=repeats + 1, desc="runs", leave=False) as bar:
        rows = experiment(Store(model, out / "cache"), tokenizer, encoder, cached, tests, n_new, repeats, ending, bar)
    embeddings = encoder(cached)
    write_atomically(out / "cache_embeddings.npy", lambda file: save_array(file, embeddings))
    small = model.config.n_embd < 512  # else the law takes minutes, and studies.latency is there for it
    fits = {what: alpha(rows, what) for what in ("latency", "ttft")}
    record = {**about, "new_tokens": n_new, "repeats": repeats, "prompts": rows, "alpha": fits,
              "indices": indices(model, tokenizer, encoder, queries),
              "law": latency.measure(model, repeats, lengths) if small else None, "claims": claims(rows)}  # fmt: skip
    write_tables(rows, out)
    write_json(out / "summary.json", record)
    draw(rows, fits, out)
    if small:
        latency.draw(record["law"], out, "pocket_law")
    print(page([*tables(record), *latency.tables(record["law"])] if small else tables(record)))
    if about["encoder"] == "tokens":
        print("\nMeans of token embeddings find most texts similar; --encoder all-MiniLM-L6-v2 tells them apart.")
    example = min(rows, key=lambda row: row["published"]["same_tokens"])
    if not example["published"]["identical"]:
        print("\nThe published call skips tokens of the prompt. For example:\n")
        for name in METHODS:
            print(f"{name:>10}: {example['prompt']!r} -> {example[name]['output'][:100]!r}")
    print(f"\nWritten to {out}")


def tables(record: dict[str, Any]) -> list[str | Table]:
    """Return what the runs took and wrote, what finds prefixes, and the paper's claims (sections 5.2 to 5.5)."""
    rows, n = record["prompts"], len(record["prompts"])
    mean = {name: {key: sum(row[name][key] for row in rows) / n for key in ("ttft_s", "latency_s", "similarity")}
            for name in METHODS}  # fmt: skip
    tokens = sorted(row["tokens"] for row in rows)
    return [
        f"`recycle.py study --encoder {record['encoder']}` on `{record['model']}`, {n} prompts of {tokens[0]} to "
        f"{tokens[-1]} tokens, {record['new_tokens']} new ones; medians of {record['repeats']}:",
        Table(["", "first token", "last token", "the same answers", "similarity to cold"],
              [[name, f"{1e3 * x['ttft_s']:.1f} ms", f"{1e3 * x['latency_s']:.0f} ms",
                f"{sum(row[name]['identical'] for row in rows)} of {n}", f"{x['similarity']:.2f}"]
               for name, x in mean.items()]),
        claims_table(record["claims"]),
        f"Which index finds the stored prefix (means of {next(iter(record['indices'].values()))['queries']} queries)?",
        Table(["queries", "tokens found by the tree", "by the nearest embedding", "if that must be a full prefix",
               "misses"], [[kind, *(f"{c[key]:.0f}" for key in ("tree", "nearest", "full_prefix")),
                            f"{c['missed']:.0%}"] for kind, c in record["indices"].items()]),
    ]  # fmt: skip


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the paper's claims, each with its verdict and the figures behind it."""
    n = len(rows)
    saved, first = (statistics.mean(row["recycled"][f"{what}_saved"] for row in rows) for what in ("latency", "ttft"))
    alike = [row["published"]["similarity"] for row in rows]
    reused = [row["published"]["reused_tokens"] for row in rows]
    prefixes = sum(tokens > 0 for tokens in reused)
    same, exact = (sum(row[name]["identical"] for row in rows) for name in ("published", "recycled"))
    slopes = alpha(rows, "latency")
    return [
        judged("prefixes: the nearest stored prompt is a full prefix of every test prompt", prefixes == n,
               f"{prefixes} of {n}, {sum(reused)} tokens in all (the paper: 6 of 6, 40)"),
        judged("speed: 30-50% less latency", saved >= 0.3,
               f"{saved:.1%} from end to end, {first:.1%} to the first one: most of the time goes into writing, and "
               "few tokens are read as fast as restored"),
        judged("law: S = alpha k / m with alpha of 1.2 to 1.5", slopes[1] <= 1.5 and slopes[2] >= 1.2,
               f"alpha = {with_interval(slopes)}, for the first token {alpha(rows, 'ttft')[0]:.2f}; more than 1 would "
               "be more than all of the work"),
        judged("fidelity: a similarity of 0.66 to 0.82 means nearly the same answers", same == n,
               f"by the published call {statistics.mean(alike):.2f} ({min(alike):.2f} to {max(alike):.2f}), and {same} "
               f"of {n} answers are the same; recycled without a gap, {exact} of {n} are"),
    ]  # fmt: skip


def demo(model: GPT, tokenizer: tiktoken.Encoding, name: str, n_new: int) -> None:
    """Run the experiment in memory, with a long prompt more; print what reuse saved beside the exact result."""
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


def write_tables(rows: list[dict[str, Any]], out: Path) -> None:
    """Write baseline.csv, recycled.csv and published.csv, and comparison.csv, in which they stand side by side."""
    keys = [*rows[0]["cold"]]
    for file, names in {"baseline": METHODS[:1], "recycled": METHODS[1:2], "published": METHODS[2:],
                        "comparison": METHODS}.items():  # fmt: skip
        about = ["prompt", "tokens"] + ["nearest", "nearest_prefix_tokens"] * (len(names) > 1)
        header = [f"{name}_{key}" for name in names for key in keys] if len(names) > 1 else keys
        write_csv(out / f"{file}.csv", [*about, *header],
                  [[*(row[x] for x in about), *(row[name][key] for name in names for key in keys)] for row in rows])


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
        for what, label, color, marker in (("latency", "from end to end", "C0", "o"),
                                           ("ttft", "to the first token", "C1", "s")):  # fmt: skip
            x = np.array([row["recycled"]["reused_tokens"] / row["tokens"] for row in rows])
            axes.plot(x, [100 * row["recycled"][f"{what}_saved"] for row in rows], marker, color=color)
            a = fits[what][0]
            line = np.array([0, 1])
            axes.plot(line, 100 * a * line, f"-{marker}", color=color, linewidth=1, markevery=[],
                      label=f"{label}: alpha = {round(a, 2) + 0.0:.2f}")  # fmt: skip
        axes.fill_between([0, 1], [0, 120], [0, 150], color="lightgrey")
        axes.text(0.53, 84, "the paper: alpha = 1.2 to 1.5", ha="right")
        axes.axhline(0, color="black", linewidth=0.6)

    lowest = min(100 * row["recycled"][f"{what}_saved"] for row in rows for what in ("latency", "ttft"))
    figure(out / "speedup.png", speedup, title="Time saved against the share of the prompt that is reused",
           xlabel="k / m", ylabel="% saved", xlim=(0, 1), ylim=(min(-40, lowest - 10), 110))  # fmt: skip


def prompt_files(model: str) -> list[Path]:
    """Return the prompts to store and those to test: the paper's, for pocket its own."""
    return [DATA / f"{'pocket_' * (model == 'pocket')}{kind}_prompts.csv" for kind in ("cache", "test")]


def main(argv: list[str] | None = None) -> None:
    cli = StudyLine(__doc__, "recycling", "once, with fewer queries")
    cli.add_argument("--max-new-tokens", type=whole_number(1), default=100, metavar="N", help="to write")
    cli.add_argument("--prompts", nargs=2, metavar=("STORE.csv", "TEST.csv"),
                     help="what to store and what to test, in the column prompt; default: those in data, for pocket "
                     "its own")  # fmt: skip
    cli.add_argument("--encoder", default="tokens", metavar="NAME",
                     help="what finds the nearest prompt: tokens, the model's own embeddings, or a model of "
                     "sentence-transformers, say all-MiniLM-L6-v2")  # fmt: skip
    cli.add_argument("--repeats", type=whole_number(1), default=5, metavar="N", help="times are medians of N")
    with cli.parse(argv) as args:
        model = load_model(args.model, model_class=GPT, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        repeats, queries, lengths = (1, 40, latency.QUICK) if args.quick else (args.repeats, 150, latency.LENGTHS)
        report(model, tokenizer, load_encoder(args.encoder, model, tokenizer),
               [*map(Path, args.prompts or prompt_files(args.model))], args.max_new_tokens, repeats, queries, lengths,
               END_OF_TEXT * ("DialoGPT" in args.model), {"model": args.model, "encoder": Path(args.encoder).name},
               args.out)  # fmt: skip


if __name__ == "__main__":
    main()
