"""KV caches that outlive their prompt: a new prompt reuses the longest prefix that is stored.
`recycle.py` answers prompts as the paper does, by the nearest stored prompt, and by the longest
stored prefix; `recycle.py chat` is a conversation whose every turn reuses all earlier ones;
`python3 -m studies.recycling` puts the paper's claims to the test.

The keys and values of a token depend only on the tokens up to it. The keys and values of a common
prefix are therefore valid in every text that begins with it. support/store.py keeps them, on disk or
in memory, and finds the longest stored prefix of a prompt.

Shapes: N texts, C numbers of an embedding, T tokens, k tokens of a stored prompt.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn
from tqdm import tqdm

from gpt_kv_cache import KVCache, context_start, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from support.cli import CommandLine, whole_number
from support.encoders import load_encoder
from support.files import read_csv, write_csv
from support.prefix import common_prefix
from support.printing import ends_of
from support.store import Store
from support.tables import table
from support.timing import TimedText, time_text
from support.tokenizers import END_OF_TEXT
from support.tracing import Trace

DATA = Path(__file__).resolve().parent / "data"


def read_all(model: nn.Module, ids: Sequence[int]) -> KVCache:
    """Return the cache of a text after one forward pass."""
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.tensor([ids], device=model.wte.weight.device), cache, last_only=True)
    return cache


def recycle(store: Store, ids: Tensor, max_new_tokens: int, **options: object) -> Iterator[Tensor]:
    """Yield what generate() yields after ids (1, T) with the store's model, but read only what the
    store doesn't hold, and leave what was read there: the tokens are those of a cold run, up to what
    rounding does to a tie. Raises ValueError as generate() does.
    """
    n_ctx = store.model.config.n_ctx
    if ids.dim() != 2 or ids.size(0) != 1:
        raise ValueError(f"ids must have shape (1, T), got {tuple(ids.shape)}")
    ids = ids[:, context_start(ids.size(1), n_ctx) :]  # the rest would be forgotten anyway
    text = ids[0].tolist()
    cache = store.get(text)
    try:
        for token in generate(store.model, ids, max_new_tokens, cache=cache, **options):
            text.append(int(token))
            yield token
    finally:  # also if nobody wants the rest; the last token has not been read
        store.put(text[context_start(len(text) - 1, n_ctx) :], cache)


# The source's way: sections 2.4, 2.5 and 3.1.


@dataclass(frozen=True)
class Record:
    """A stored prompt (C[i] in section 2.4): its text and ids; similarity: the dot product of its
    embedding and the new prompt's. Its keys and values are in the store."""

    text: str
    ids: list[int]
    similarity: float


@dataclass
class Recycler:
    """KV recycling as its source describes it: the cache of the nearest stored prompt is reused if
    all of that prompt is a prefix of the new one. "This intentionally conservative condition ensures
    that all cached KVs correspond exactly to the first k tokens" (section 3.1).

    encoder: turns N texts into unit vectors (N, C), as support.encoders.load_encoder() returns it.
    All prompts of a store must be encoded by the same one.
    """

    store: Store
    tokenizer: tiktoken.Encoding
    encoder: Callable[[list[str]], np.ndarray]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer.encode(text, allowed_special="all")

    def add(self, text: str) -> None:
        """Store a prompt: its text, its ids, its cache and its embedding. "We run a single forward
        pass with caching enabled", "move these tensors to the CPU and serialize a record" (section
        2.4)."""
        ids = self.encode(text)
        cache, embedding = read_all(self.store.model, ids), self.encoder([text])[0]
        self.store.put(ids, cache, text, embedding)

    def nearest(self, text: str) -> Record | None:
        """Return the stored prompt with the largest dot product of embeddings, None if none is
        stored: "we retrieve the most similar cached prompt by dot product" (section 2.5)."""
        embedding = self.encoder([text])[0]
        stored = self.store.prompts()
        if not stored:
            return None
        vectors = np.stack([vector for *_, vector in stored])  # E in section 2.4: (N, C)
        found, ids, vector = stored[(vectors @ embedding).argmax()]
        return Record(found, ids, float(vector @ embedding))

    def reuse(self, text: str, ending: str = "") -> KVCache:
        """Return the cache of the nearest prompt, of k tokens, if the reuse depth r is k: "we require
        the cached prompt to be a full prefix of the test prompt, i.e., r=k" (section 3.1); else an
        empty one: "prompts that diverged early in the sequence fell back to baseline behavior" (5.3).
        A token of the text is always left to feed.

        ending: what follows the text, and no stored prompt, such as the end of a turn.
        """
        ids, record = self.encode(text + ending), self.nearest(text)
        if record is None:
            return self.store.model.new_cache()
        r, k = common_prefix(ids, record.ids), len(record.ids)
        return self.store.get(ids[: k + 1]) if r == k else self.store.model.new_cache()


@torch.no_grad()
def generate_as_published(
    model: nn.Module, new: Tensor, cache: KVCache, max_new_tokens: int, stop_id: int | None = None
) -> Iterator[Tensor]:
    """Yield what the source's call writes (section 4.4.3), `model.generate(input_ids=new,
    past_key_values=cache)` in its version of transformers, 4.45.2.

    Given a cache, that generate() takes input_ids for the whole text. Of T new tokens (1, T) after k
    cached ones it drops the first k, or all but the last if T is no more than k; and it counts
    positions from the first new token on. So the model sees a text with a hole, at positions it has
    used before. For comparison only: changes the cache.
    """
    k, T = len(cache), new.size(1)
    fed = new[:, k:] if k < T else new[:, -1:]
    at = T - fed.size(1)  # position of the first token fed
    cache.pos = torch.arange(at - k, at, device=new.device)  # seen, wherever it was read
    for _ in range(max_new_tokens):
        fed = model(fed, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True)
        yield fed
        if int(fed) == stop_id:
            return


# The demonstration: the source's protocol (section 4.4), reduced.

WAYS = {
    "cold": "cold: all of it is read",
    "source": "source: the nearest prompt, r = k",
    "published": "source, by its published call",
    "longest": "ours: the longest stored prefix",
}
NEAREST = ("source", "published")  # the ways that look for the nearest prompt
RECYCLED = (*NEAREST, "longest")


def prompt_files(model: str) -> list[Path]:
    """Return the prompts to store and those to test: the source's, for the pocket models their own."""
    own = "pocket_" if model.startswith("pocket") else ""
    return [DATA / f"{own}cache_prompts.csv", DATA / f"{own}test_prompts.csv"]


def read_prompts(path: Path) -> list[str]:
    """Return the column prompt of a CSV file. Raises ValueError if it has none, or one is empty."""
    prompts = [row["prompt"] for row in read_csv(path, "prompt")]
    if not prompts or not all(prompts):
        raise ValueError(f"{path} has {len(prompts)} prompts, {prompts.count('')} of them empty")
    return prompts


def answer(
    recycler: Recycler, way: str, text: str, ending: str, n: int
) -> tuple[KVCache, Iterator[Tensor]]:
    """Return the cache with the tokens of a prompt that one of WAYS reuses, and up to n greedy
    tokens after the prompt, which fill the cache further."""
    store, stop = recycler.store, recycler.tokenizer.eot_token
    ids = recycler.encode(text + ending)
    cache = store.model.new_cache()
    if way == "longest":
        cache = store.get(ids)
    elif way != "cold":
        cache = recycler.reuse(text, ending)
    k, prompt = len(cache), torch.tensor([ids], device=store.model.wte.weight.device)
    if way == "published" and k:
        return cache, generate_as_published(store.model, prompt[:, k:], cache, n, stop)
    return cache, generate(store.model, prompt, n, stop_id=stop, cache=cache)


def compared(recycler: Recycler, text: str, ending: str, n: int) -> dict[str, dict[str, Any]]:
    """Return what each of WAYS makes of a prompt: seconds to the first token and to the last of n,
    medians of 3 runs, taken in turns, of which each begins with another way; the text, and
    its likeness to the cold one."""
    reused = {way: len(answer(recycler, way, text, ending, 1)[0]) for way in WAYS}  # warms up, too
    record = recycler.nearest(text)
    runs: dict[str, list[TimedText]] = {way: [] for way in WAYS}
    order, ends = [*WAYS], ends_of(recycler.tokenizer)
    for _ in range(3):
        for way in order:
            run = time_text(lambda way=way: answer(recycler, way, text, ending, n)[1], ends)
            runs[way].append(run)
        order.append(order.pop(0))
    cold = runs["cold"][0].ids
    rows = {}
    for way, own in runs.items():
        ids = own[0].ids
        rows[way] = {
            "prompt": text,
            "output": recycler.tokenizer.decode(ids),
            "reused_tokens": reused[way],
            "cache_similarity": record.similarity if record and way in NEAREST else "",
            "first_token_s": statistics.median(run.first_token_seconds for run in own),
            "latency_s": statistics.median(run.total_seconds for run in own),
            "same_tokens": common_prefix(ids, cold),
            "identical": ids == cold,
        }
    vectors = recycler.encoder([row["output"].removesuffix(END_OF_TEXT) for row in rows.values()])
    for row, vector in zip(rows.values(), vectors, strict=True):
        row["similarity"] = float(vectors[0] @ vector)  # the first is the cold one
    return rows


def demo(recycler: Recycler, name: str, n: int, out: Path) -> None:
    """Run the source's protocol, and with one more, long prompt; write baseline.csv and
    recycled.csv (section 4.4), and print what reuse saves beside the exact result.

    Raises ValueError if a prompt leaves no room for n tokens.
    """
    cached, tests = map(read_prompts, prompt_files(name))
    whole = "\n".join(cached)
    texts = [*tests, f"{whole}\n{tests[0]}"]
    ending = END_OF_TEXT if "DialoGPT" in name else ""
    lengths = [len(recycler.encode(text + ending)) for text in texts]
    size, n_ctx = max(lengths), recycler.store.model.config.n_ctx
    if size + n > n_ctx:
        raise ValueError(f"a prompt of {size} tokens and {n} new ones exceed the context, {n_ctx}")
    for text in cached:
        recycler.add(text)
    rows = []
    for text in tqdm(texts, desc="prompts", leave=False):
        if text == texts[-1]:
            recycler.add(whole)
        rows.append(compared(recycler, text, ending, n))
    write_results(rows, out)
    cells = []
    for text, length, row in zip(texts, lengths, rows, strict=True):
        shown = text.partition("\n")[0]
        line = [f"{shown[:30]}...", str(length)]
        line += [str(row[way]["reused_tokens"]) for way in ("source", "longest")]
        for way in RECYCLED:
            same = f"differs at token {row[way]['same_tokens'] + 1}"
            line.append("the same" if row[way]["identical"] else same)
        cells.append(line)
    prompts = ["prompt", "tokens", "reused: source", "ours", "text: source", "published", "ours"]
    ways = ["way", "first token", "of the long one", "time saved", "similarity", "the same text"]
    print(f"""\
The caches of {len(cached)} prompts are stored, and {len(tests)} others are answered; then a long one that begins \
with all {len(cached)}.
{n} greedy tokens each; the texts beside a cold run's:

{table(prompts, cells)}

{table(ways, [summary(way, rows) for way in WAYS])}

First token: milliseconds, with retrieval and restoring. Time saved: to the last token, the mean over prompts
(the source's S). Medians of 3, taken in turns. Similarity: the mean cosine of embeddings, to the cold text.
Exact: cold, source, ours. The published call (transformers 4.45.2) is not: it skips tokens of the prompt,
and uses positions twice.
The source: "average latency decreased by roughly by 30-50%" (5.2); similarity "was 0.66–0.82, indicating near
identical responses" (5.4).

Written to {out}: baseline.csv, recycled.csv
The full study: python3 -m studies.recycling""")


def summary(way: str, rows: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """Return what a way's rows, of which the last is the long prompt's, come to: cells of a table."""
    own = [row[way] for row in rows]
    first = statistics.mean(row["first_token_s"] for row in own[:-1])
    saved = [1 - row[way]["latency_s"] / row["cold"]["latency_s"] for row in rows]  # S / 100
    return [
        WAYS[way],
        f"{1e3 * first:.1f}",
        f"{1e3 * own[-1]['first_token_s']:.1f}",
        f"{statistics.mean(saved):z.0%}",
        f"{statistics.mean(row['similarity'] for row in own):.2f}",
        f"{sum(row['identical'] for row in own)} of {len(own)}",
    ]


def write_results(rows: Sequence[dict[str, dict[str, Any]]], out: Path) -> None:
    """Write baseline.csv and recycled.csv: of each prompt and way, what sections 3.4 and 4.4.3
    log."""
    kinds = ["prompt", "output", "latency_s", "first_token_s", "reused_tokens"]
    kinds += ["cache_similarity", "similarity"]
    for file, ways in (("baseline", ["cold"]), ("recycled", RECYCLED)):
        lines = []
        for row in rows:
            for way in ways:
                lines.append([way, *(row[way][kind] for kind in kinds)])
        write_csv(out / f"{file}.csv", ["way", *kinds], lines)


def typed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that aren't empty, with a prompt if someone is typing."""
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for line in lines:
        if line.strip():
            yield line
        print(prompt, end="", flush=True)


def forget(turns: list[list[int]], tokens: int, answer: int, n_ctx: int) -> int:
    """If the turns, a new one of so many tokens and its answer exceed the context, forget the oldest
    until what is read fits in its half; return how many."""
    if sum(map(len, turns)) + tokens + answer <= n_ctx:
        return 0
    before = len(turns)
    while sum(map(len, turns)) + tokens > n_ctx // 2:
        del turns[0]
    return before - len(turns)


def chat(
    store: Store,
    tokenizer: tiktoken.Encoding,
    lines: Iterable[str],
    max_new_tokens: int,
    dialogue: bool,
    trace: Trace | None = None,
) -> None:
    """Answer line by line, every turn on the stored cache of all turns before it, and print what that
    saved: to know it, the whole text is read once more after every answer.

    dialogue: turns end with <|endoftext|>, as DialoGPT's do; else they are "Question: ...",
    "Answer: ...", a line each.
    """
    model, n_ctx = store.model, store.model.config.n_ctx
    turns: list[list[int]] = []
    ends, end_of_turn = ends_of(tokenizer), END_OF_TEXT if dialogue else "\n"
    read_all(model, [tokenizer.eot_token])  # a process's first pass is slow
    for line in lines:
        said = line.strip() + END_OF_TEXT if dialogue else f"Question: {line.strip()}\nAnswer:"
        turn = tokenizer.encode(said, allowed_special={END_OF_TEXT}, disallowed_special=())
        if len(turn) + max_new_tokens > n_ctx // 2:
            print(
                f"[{len(turn)} tokens and an answer of {max_new_tokens} don't fit in half the context, "
                f"{n_ctx // 2}]"
            )
            continue
        if forgotten := forget(turns, len(turn), max_new_tokens, n_ctx):
            print(
                f"[the context of {n_ctx} tokens is full: the oldest {forgotten} turns are forgotten, "
                "and the others read again]"
            )
        ids = tokenizer.encode("", allowed_special="all")  # what begins a text, if anything does
        for earlier in [*turns, turn]:
            ids += earlier
        begun = time.perf_counter()
        cache = store.get(ids)
        reused, reply, first = len(cache), [], 0.0
        if trace:
            trace.begin(ids, reused)
        prompt = torch.tensor([ids], device=store.model.wte.weight.device)
        for token in generate(
            model, prompt, max_new_tokens, stop_id=tokenizer.eot_token, cache=cache
        ):
            reply.append(int(token))
            if len(reply) == 1:
                first = time.perf_counter() - begun
            if trace:
                trace.step(reply[-1], cache)
            if reply[-1] in ends or (not dialogue and "\n" in tokenizer.decode(reply[-1:])):
                break
        print(tokenizer.decode([token for token in reply if token not in ends]).strip())
        store.put([*ids, *reply], cache)
        turns.append(turn + reply)
        if not tokenizer.decode(reply[-1:]).endswith(end_of_turn):  # an answer that was cut off
            turns[-1] += tokenizer.encode(end_of_turn, allowed_special={END_OF_TEXT})
        begun = time.perf_counter()
        read_all(model, ids)
        cold = time.perf_counter() - begun
        print(
            f"[reused {reused} of {len(ids)} tokens; first token after {1000 * first:.1f} ms, "
            f"without reuse {1000 * cold:.1f} ms]\n"
        )
    if trace and trace.steps:
        trace.write()
        print(f"[step by step: {trace.path}]")


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 %(prog)s chat", NAMES)
    run = cli.add_action("run", "the paper's protocol beside ours, in seconds", default=True)
    talk = cli.add_action("chat", "a conversation")
    for action in (run, talk):
        action.add_model_arguments()
        action.add_length_argument(40)
    run.add_argument(
        "--encoder",
        default="tokens",
        metavar="NAME",
        help="embeddings for the nearest prompt: tokens, the model's own, or a model of "
        "sentence-transformers, such as all-MiniLM-L6-v2",
    )
    talk.add_argument(
        "--store",
        default="results/recycle/store",
        metavar="FOLDER",
        help="where caches are kept",
    )
    talk.add_argument(
        "--capacity",
        default=10**9,
        type=whole_number(1, 2**63 - 1),
        metavar="BYTES",
        help="store size limit",
    )
    talk.add_trace_argument()
    with cli.parse(argv) as args:
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.action == "run":
            encoder = load_encoder(args.encoder, model, tokenizer)
            with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
                recycler = Recycler(Store(model, folder), tokenizer, encoder)
                return demo(recycler, args.model, args.max_new_tokens, Path("results/recycle"))
        store = Store(model, args.store, args.capacity)
        trace = cli.trace(args, tokenizer, model, torch.empty(1, 0, dtype=torch.long))
        dialogue = "DialoGPT" in args.model
        chat(store, tokenizer, typed(sys.stdin), args.max_new_tokens, dialogue, trace)


if __name__ == "__main__":
    main()
