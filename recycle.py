"""KV caches that outlive their prompt: a new prompt reuses the longest prefix that is stored.
`recycle.py` answers prompts as the paper does, by the nearest stored prompt, and by the longest
stored prefix, with a model whose layers share one cache; `recycle.py chat`, also with a model of
lecture 5, is a conversation whose every turn reuses all earlier ones; `python3 -m
studies.recycling` puts the paper's claims to the test.

The keys and values of a token depend only on the tokens up to it. The keys and values of a common
prefix are therefore valid in every text that begins with it. support/store.py keeps them, on disk or
in memory, and finds the longest stored prefix of a prompt.

A window or a state (hybrid_kv_cache.py) can't be cut where a new prompt departs: the window may
have evicted the tokens before that point, and the state has those after it in the same matrix. A
text with such layers goes on only from a checkpoint, even if no window has evicted anything yet.
Checkpoints are stored every MARK_TOKENS tokens of a prompt, at its end and at the end of the text;
what follows the last one that a new prompt shares is read again.

Shapes: N texts, C numbers of an embedding, T tokens, k tokens of a stored prompt.

Source: Pandey, "KV Cache Recycling to Expand Usable Context Capacity in Low Parameter LLMs".
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn
from tqdm import tqdm

from formats.chat import (
    ChatForm,
    beginning_tokens,
    chat_form,
    encode_conversation,
    encode_in_form,
    has_chat_form,
)
from formats.tokenizers import END_OF_TEXT
from gpt_kv_cache import KVCache, context_start, generate
from load_gpt2_weights import NAMES, load_model, load_tokenizer
from support.cli import CommandLine, study_command, whole_number
from support.encoders import load_encoder
from support.figures import write_figure
from support.files import read_csv, writable_folder, write_csv
from support.prefix import common_prefix_length
from support.printing import end_tokens_of
from support.store import Store, layer_caches
from support.tables import table
from support.timing import TimedText, run_in_turns, time_call, time_text
from support.tracing import Trace

DATA = Path(__file__).resolve().parent / "data"
MARK_TOKENS = 256  # of a prompt, between the checkpoints of layers that don't keep every token
# For models without a form of their own: an answer ends with its line.
LINES = ChatForm("Question: {}\nAnswer:", "Question: {}\nAnswer:")
DIALOGUE = ChatForm(f"{{}}{END_OF_TEXT}", f"{END_OF_TEXT}{{}}{END_OF_TEXT}")  # DialoGPT's


def prefilled_cache(model: nn.Module, ids: Sequence[int], cache: KVCache | None = None) -> KVCache:
    """Return the cache of a text after one forward pass. cache: one of its beginning, which is
    extended; None: a new one."""
    cache = model.new_cache() if cache is None else cache
    unread = torch.tensor([ids[len(cache) :]], device=model.wte.weight.device)
    with torch.no_grad():
        model(unread, cache, last_only=True)
    return cache


def check_one_cache(cache: KVCache, user: str) -> None:
    """Raise ValueError if each layer has a cache of its own, with its own positions and slots."""
    if any(hasattr(layer, "layers") for layer in cache.layers):
        each = f"{len(cache.layers)}, one for each"
        raise ValueError(f"{user} needs one cache for all layers, this model has {each}")


def read_to_checkpoints(store: Store, ids: Sequence[int], cache: KVCache) -> None:
    """Extend the cache of a prompt's beginning to all but the prompt's last token, and store a
    checkpoint every MARK_TOKENS tokens and at the end. If all layers keep every token, do nothing:
    a later prompt can go on from any of them."""
    if store.needs_checkpoints:
        for end in [*range(MARK_TOKENS, len(ids) - 1, MARK_TOKENS), len(ids) - 1]:
            if end > len(cache):
                store.put(ids[:end], prefilled_cache(store.model, ids[:end], cache))


def recycle(store: Store, ids: Tensor, max_new_tokens: int, **options: object) -> Iterator[Tensor]:
    """Yield the tokens that generate() yields after ids (1, T) with the store's model, but read
    only the tokens after those that the store gives, and store what was read.

    The tokens are those of a run without the store, up to ties that rounding decides. Raises
    ValueError as generate() does.
    """
    n_ctx = store.model.context
    if ids.dim() != 2 or ids.size(0) != 1:
        raise ValueError(f"ids must have shape (1, T), got {tuple(ids.shape)}")
    ids = ids[:, context_start(ids.size(1), n_ctx) :]  # the rest would be forgotten anyway
    text = ids[0].tolist()
    cache = store.get(text)
    read_to_checkpoints(store, text, cache)
    waiting = False  # False while a pass may be under way, whose token isn't in the text yet
    try:
        for token in generate(store.model, ids, max_new_tokens, cache=cache, **options):
            text.append(int(token))
            waiting = True
            yield token
            waiting = False
        waiting = True
    finally:  # also if the caller stops early, or a pass is interrupted
        start = context_start(len(text) - 1, n_ctx)
        restarted = not waiting and context_start(len(text), n_ctx) > start
        whole = not restarted and len(text) - start - len(cache) <= 1
        whole = whole and {len(layer) for layer in layer_caches(cache)} == {len(cache)}
        if whole and not sys.is_finalizing():  # then torch and SQLite work no more
            store.put(text[start:], cache)


# The source's way: sections 2.4, 2.5 and 3.1.


class NearestPrompt(NamedTuple):
    """A stored prompt (C[i] in section 2.4): its text and ids; similarity: the dot product of its
    embedding and the new prompt's. Its keys and values are in the store."""

    text: str
    ids: list[int]
    similarity: float


@dataclass
class Recycler:
    """KV recycling as its source describes it: the cache of the nearest stored prompt is reused if
    all of that prompt is a prefix of the new one. "This intentionally conservative condition
    ensures that all cached KVs correspond exactly to the first k tokens" (section 3.1).

    encoder: turns N texts into unit vectors (N, C), as support.encoders.load_encoder() returns it.
    All prompts of a store must be encoded by the same one. form: of a prompt, with what begins every
    text, and {} in the place of this one; what follows it is left out of stored prompts.
    """

    store: Store
    tokenizer: tiktoken.Encoding
    encoder: Callable[[list[str]], np.ndarray]
    form: str = "{}"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt to store, up to the end of its text."""
        before, _, _ = self.form.partition("{}")
        return encode_in_form(before + "{}", text, self.tokenizer)

    def encode_new(self, text: str) -> list[int]:
        """Return the tokens of a new prompt."""
        return encode_in_form(self.form, text, self.tokenizer)

    def store_prompt(self, text: str) -> None:
        """Store a prompt: its text, its ids, its cache and its embedding. "We run a single forward
        pass with caching enabled", "move these tensors to the CPU and serialize a record" (section
        2.4)."""
        ids = self.encode(text)
        cache = self.store.model.new_cache()
        read_to_checkpoints(self.store, ids, cache)
        prefilled_cache(self.store.model, ids, cache)
        self.store.put(ids, cache, text, self.encoder([text])[0])

    def nearest_prompt(self, text: str) -> NearestPrompt | None:
        """Return the stored prompt with the largest dot product of embeddings, None if none is
        stored: "we retrieve the most similar cached prompt by dot product" (section 2.5)."""
        embedding = self.encoder([text])[0]
        prompts = self.store.prompts()
        if not prompts:
            return None
        vectors = np.stack([vector for *_, vector in prompts])  # E in section 2.4: (N, C)
        nearest, ids, vector = prompts[(vectors @ embedding).argmax()]
        return NearestPrompt(nearest, ids, float(vector @ embedding))

    def reusable_cache(self, text: str) -> KVCache:
        """Return the cache of the stored prompt nearest to a new one, if all of its k tokens can be
        reused (the reuse depth r is k): "we require the cached prompt to be a full prefix of the
        test prompt, i.e., r=k" (section 3.1). Otherwise return an empty cache: "prompts that
        diverged early in the sequence fell back to baseline behavior" (5.3). A token of the new
        prompt is always left to feed."""
        ids, nearest = self.encode_new(text), self.nearest_prompt(text)
        if nearest is not None:
            r, k = common_prefix_length(ids, nearest.ids), len(nearest.ids)
            if r == k:
                return self.store.get(ids[: k + 1])
        return self.store.model.new_cache()


@torch.no_grad()
def generate_as_published(
    model: nn.Module,
    new_ids: Tensor,
    cache: KVCache,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Iterator[Tensor]:
    """Yield the tokens that the source's call writes (section 4.4.3),
    `model.generate(input_ids=new_ids, past_key_values=cache)` in its version of transformers,
    4.45.2.

    When that generate() is given a cache, it takes input_ids for the whole text, cached tokens
    included. So of T new tokens (1, T) after k cached ones it drops the first k, or all but the
    last if T is at most k, and it counts positions from the first new token on. The model therefore
    sees a text with a hole, at positions that it has used before. For comparison only. Changes the
    cache. Raises ValueError if each layer has a cache of its own.
    """
    check_one_cache(cache, "the published call")
    k, T = len(cache), new_ids.size(1)
    fed = new_ids[:, min(k, T - 1) :]
    first_pos = T - fed.size(1)  # of the first token fed
    # All cached tokens are seen, whatever positions they were read at.
    cache.pos = torch.arange(first_pos - k, first_pos, device=new_ids.device)
    for _ in range(max_new_tokens):
        fed = model(fed, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True)
        yield fed
        if int(fed) in stop_ids:
            return


# The demonstration: the source's protocol (section 4.4), reduced.

WAYS = {
    "cold": "cold: all of it is read",
    "source": "source: the nearest prompt, r = k",
    "published": "source, by its published call",
    "longest": "ours: the longest stored prefix",
}
NEAREST_WAYS = ("source", "published")  # which look for the nearest prompt
RECYCLING_WAYS = (*NEAREST_WAYS, "longest")


class Outcome(NamedTuple):
    """The result of answering a prompt in one of WAYS. Times are in seconds and include finding and
    restoring the cache."""

    prompt: str
    output: str
    latency_s: float  # to the last token
    first_token_s: float
    reused_tokens: int
    cache_similarity: float | str  # of the nearest prompt; "" if the way looks for none
    similarity: float | str  # of the texts' embeddings, this and the cold one; "" by tokens
    same_tokens: int  # how many come before the first that differs from the cold text
    identical: bool  # to the cold text
    length: int  # tokens of the text


def prompt_files(model: str) -> list[Path]:
    """Return the files of the prompts to store and of those to test: the source's, or for pocket
    models their own."""
    prefix = "pocket_" if model.startswith("pocket") else ""
    return [DATA / f"{prefix}cache_prompts.csv", DATA / f"{prefix}test_prompts.csv"]


def read_prompts(path: Path) -> list[str]:
    """Return the column `prompt` of a CSV file. Raises ValueError if it has no prompts, or an empty
    one."""
    prompts = [row["prompt"] for row in read_csv(path, "prompt")]
    if not prompts or not all(prompts):
        raise ValueError(f"{path} has {len(prompts)} prompts, {prompts.count('')} of them empty")
    return prompts


def prompt_lengths(recycler: Recycler, prompts: Sequence[str], max_new_tokens: int) -> list[int]:
    """Return how many tokens each new prompt has. Raises ValueError if one leaves no room for the
    answer."""
    lengths = [len(recycler.encode_new(text)) for text in prompts]
    longest, n_ctx = max(lengths), recycler.store.model.config.n_ctx
    if longest + max_new_tokens > n_ctx:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the context, {n_ctx}"
        )
    return lengths


def cache_by(recycler: Recycler, way: str, text: str) -> KVCache:
    """Return the cache that one of WAYS reuses for a new prompt."""
    if way in NEAREST_WAYS:
        return recycler.reusable_cache(text)
    if way == "longest":
        return recycler.store.get(recycler.encode_new(text))
    return recycler.store.model.new_cache()


def generate_by(
    recycler: Recycler, way: str, text: str, cache: KVCache, max_new_tokens: int
) -> Iterator[Tensor]:
    """Return the greedy tokens that one of WAYS writes after a new prompt. It starts from the cache
    that it reuses, and extends it."""
    model, stop_ids = recycler.store.model, end_tokens_of(recycler.tokenizer)
    ids = torch.tensor([recycler.encode_new(text)], device=model.wte.weight.device)
    if way == "published" and len(cache):
        return generate_as_published(model, ids[:, len(cache) :], cache, max_new_tokens, stop_ids)
    return generate(model, ids, max_new_tokens, stop_ids=stop_ids, cache=cache)


def compare_ways(recycler: Recycler, text: str, max_new_tokens: int) -> dict[str, Outcome]:
    """Return the outcome of each of WAYS for a prompt; times are medians of 3 runs, taken in
    turns."""

    def generation(way: str) -> Iterator[Tensor]:
        return generate_by(recycler, way, text, cache_by(recycler, way, text), max_new_tokens)

    def run(way: str, turn: int) -> TimedText:
        return time_text(lambda: generation(way), end_tokens_of(recycler.tokenizer))

    runs = {way: partial(run, way) for way in WAYS}
    timed = run_in_turns(runs, 3, warm_up=False)  # storing the prompts has warmed up
    outputs = {way: recycler.tokenizer.decode(texts[0].ids) for way, texts in timed.items()}
    embeddings = recycler.encoder([output.removesuffix(END_OF_TEXT) for output in outputs.values()])
    nearest, cold_ids = recycler.nearest_prompt(text), timed["cold"][0].ids
    outcomes = {}
    for way, embedding in zip(WAYS, embeddings, strict=True):
        ids = timed[way][0].ids
        outcomes[way] = Outcome(
            prompt=text,
            output=outputs[way],
            latency_s=statistics.median(run.total_seconds for run in timed[way]),
            first_token_s=statistics.median(run.first_token_seconds for run in timed[way]),
            reused_tokens=len(cache_by(recycler, way, text)),
            cache_similarity=nearest.similarity if nearest and way in NEAREST_WAYS else "",
            similarity=float(embeddings[0] @ embedding),  # the first is the cold one's
            same_tokens=common_prefix_length(ids, cold_ids),
            identical=ids == cold_ids,
            length=len(ids),
        )
    return outcomes


def demo(
    recycler: Recycler,
    stored: list[str],
    tests: list[str],
    max_new_tokens: int,
    folder: Path,
    with_similarity: bool,
    study: str,
    with_figures: bool = False,
) -> None:
    """Run the source's protocol with one additional, long prompt; write baseline.csv, recycled.csv
    (section 4.4) and comparison.csv (5.1), and print how much time reuse saves and whether the texts
    stay the same. with_similarity: whether the encoder can compare answers; embeddings of tokens
    can't; study: the command that measures more; with_figures: draw latency.png and speedup.png too.

    Raises ValueError if a prompt leaves no room for the answer, or each layer of the model has a cache
    of its own.
    """
    check_one_cache(recycler.store.model.new_cache(), "the published call")
    long_beginning = "\n".join(stored)
    prompts = [*tests, f"{long_beginning}\n{tests[0]}"]
    lengths = prompt_lengths(recycler, prompts, max_new_tokens)
    for text in stored:
        recycler.store_prompt(text)
    results = []
    for text in tqdm(prompts, desc="prompts", leave=False):
        if text == prompts[-1]:
            recycler.store_prompt(long_beginning)
        outcomes = compare_ways(recycler, text, max_new_tokens)
        if not with_similarity:
            outcomes = {way: outcome._replace(similarity="") for way, outcome in outcomes.items()}
        results.append(outcomes)
    write_results(results, folder)
    compared = compared_rows(results, lengths)
    write_csv(folder / "comparison.csv", [*compared[0]], [[*row.values()] for row in compared])
    written = ["baseline.csv", "recycled.csv", "comparison.csv"]
    if with_figures:
        draw_comparison(compared, folder)
        written += ["latency.png", "speedup.png"]
    prompt_header = ["prompt", "tokens", "reused: source", "ours"]
    prompt_header += ["text: source", "published", "ours"]
    prompt_rows = [prompt_row(*pair) for pair in zip(results, lengths, strict=True)]
    way_header = ["way", "first token", "of the long one", "time saved", "the same text"]
    if with_similarity:
        way_header.append("similarity")
        similarity_note = "Similarity: the mean cosine of embeddings, to the cold text."
    else:
        similarity_note = "An --encoder of sentences also says how similar the texts are."
    print(f"""\
The caches of {len(stored)} prompts are stored, and {len(tests)} others are answered; then a long one that begins \
with all {len(stored)}.
{max_new_tokens} greedy tokens each; the texts beside a cold run's:

{table(prompt_header, prompt_rows)}

{table(way_header, [way_row(way, results) for way in WAYS])}
{example_of_published(results)}
First token: milliseconds, with retrieval and restoring. Time saved: to the last token, the mean over prompts
whose texts are as long as the cold ones (the source's S). Medians of 3, taken in turns.
{similarity_note}
Exact: cold, source, ours. The published call (transformers 4.45.2) is not: it skips tokens of the prompt,
and uses positions twice.
The source: "average latency decreased by roughly by 30-50%" (5.2); similarity "was 0.66–0.82, indicating near
identical responses" (5.4).

Written to {folder}: {", ".join(written)}
The full study: {study}""")


def prompt_row(outcomes: dict[str, Outcome], length: int) -> list[str]:
    """Return a table row for a prompt of `length` tokens: how many tokens are reused, and whether
    each way writes the same text as a cold run."""
    first_line = outcomes["cold"].prompt.partition("\n")[0]
    cells = [f"{first_line[:30]}...", str(length)]
    cells += [str(outcomes[way].reused_tokens) for way in ("source", "longest")]
    for way in RECYCLING_WAYS:
        if outcomes[way].identical:
            cells.append("the same")
        else:
            cells.append(f"differs at token {outcomes[way].same_tokens + 1}")
    return cells


def example_of_published(results: Sequence[dict[str, Outcome]]) -> str:
    """Return the beginnings of the texts after the first prompt for which the published call writes another one than a
    cold run, and how many cold texts are empty; "" if there is nothing to say."""
    lines = []
    empty = sum(not result["cold"].output.strip() for result in results)
    if empty:
        lines.append(
            f"{empty} of {len(results)} cold texts are empty: the model may expect other prompts."
        )
    for result in results:
        if not result["published"].identical:
            lines.append(f"For example, after {result['cold'].prompt[:60]!r}:")
            for way in ("cold", "published"):
                lines.append(f"  {way + ':':<10} {result[way].output[:80]!r}")
            break
    return "".join(f"{line}\n" for line in ["", *lines])


def way_row(way: str, results: Sequence[dict[str, Outcome]]) -> list[str]:
    """Return a table row for one of WAYS: its times, savings and similarity over all prompts, the
    last of which is the long one."""
    outcomes = [result[way] for result in results]
    first_token_s = statistics.mean(outcome.first_token_s for outcome in outcomes[:-1])
    saved = [  # S / 100
        1 - result[way].latency_s / result["cold"].latency_s
        for result in results
        if result[way].length == result["cold"].length
    ]
    cells = [
        WAYS[way],
        f"{1e3 * first_token_s:.1f}",
        f"{1e3 * outcomes[-1].first_token_s:.1f}",
        f"{statistics.mean(saved):z.0%}" if saved else "-",
        f"{sum(outcome.identical for outcome in outcomes)} of {len(outcomes)}",
    ]
    if outcomes[0].similarity != "":
        cells.append(f"{statistics.mean(outcome.similarity for outcome in outcomes):.2f}")
    return cells


def write_results(results: Sequence[dict[str, Outcome]], folder: Path) -> None:
    """Write baseline.csv and recycled.csv, with a row for each prompt and way. The columns are
    those that sections 3.4 and 4.4.3 log."""
    columns = ["prompt", "output", "latency_s", "first_token_s", "reused_tokens"]
    columns += ["cache_similarity", "similarity"]
    for name, ways in (("baseline", ["cold"]), ("recycled", RECYCLING_WAYS)):
        rows = []
        for result in results:
            for way in ways:
                rows.append([way, *(getattr(result[way], column) for column in columns)])
        write_csv(folder / f"{name}.csv", ["way", *columns], rows)


def compared_rows(
    results: Sequence[dict[str, Outcome]], lengths: Sequence[int]
) -> list[dict[str, str | float]]:
    """Return a row for each prompt, of so many tokens, and each recycling way: both latencies, how much
    is reused, the similarity of the texts, and S, the source's speed-up in percent (section 5)."""
    rows = []
    for result, length in zip(results, lengths, strict=True):
        cold = result["cold"]
        for way in RECYCLING_WAYS:
            outcome = result[way]
            row = {"prompt": outcome.prompt, "way": way, "prompt_tokens": length}
            row |= {"baseline_latency_s": cold.latency_s, "recycled_latency_s": outcome.latency_s}
            row |= {"reused_tokens": outcome.reused_tokens, "similarity": outcome.similarity}
            row["speedup_percent"] = 100 * (1 - outcome.latency_s / cold.latency_s)
            row["same_length"] = outcome.length == cold.length
            rows.append(row)
    return rows


def draw_comparison(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the source's two pictures: the latency of each prompt, and the speed-up by the share of the
    prompt that is reused. Texts of another length than the cold one are left out of the second."""

    def latencies(axes: Any) -> None:
        prompts = [*dict.fromkeys(row["prompt"] for row in rows)]
        baseline = {row["prompt"]: row["baseline_latency_s"] for row in rows}
        series = {"cold": [baseline[prompt] for prompt in prompts]}
        for way in RECYCLING_WAYS:
            series[way] = [row["recycled_latency_s"] for row in rows if row["way"] == way]
        width = 0.8 / len(series)
        for i, (way, seconds) in enumerate(series.items()):
            at = [prompt + (i - 1.5) * width for prompt in range(len(prompts))]
            axes.bar(at, [1000 * s for s in seconds], width, label=way)
        axes.set_xticks(range(len(prompts)), [f"{i + 1}" for i in range(len(prompts))])

    def speedups(axes: Any) -> None:
        for way, marker in zip(RECYCLING_WAYS, "os^", strict=True):
            points = [
                (row["reused_tokens"] / row["prompt_tokens"], row["speedup_percent"])
                for row in rows
                if row["way"] == way and row["same_length"]
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker, label=way)
        axes.axhline(0, color="grey", linewidth=0.8)

    labels = {"title": "To the last token, by prompt", "xlabel": "prompt", "ylabel": "ms"}
    write_figure(folder / "latency.png", latencies, **labels)
    labels = {
        "title": "Speed-up by reuse depth",
        "xlabel": "share of the prompt that is reused, k / m",
    }
    write_figure(folder / "speedup.png", speedups, ylabel="% saved, S", **labels)


# The conversation.


@dataclass
class Conversation:
    """A conversation in turns, each a question and its answer. Each turn reuses the stored cache of
    all turns before it.

    form: how the model expects a conversation. The store keeps the texts that were read and written;
    what the form changes in a turn once another follows is read again. compare: read each text once
    more, without reuse, and say how long this takes. Raises ValueError if the form takes a single
    question.
    """

    store: Store
    tokenizer: tiktoken.Encoding
    max_new_tokens: int
    form: ChatForm = LINES
    trace: Trace | None = None
    compare: bool = False

    def __post_init__(self) -> None:
        if not self.form.later:
            raise ValueError("the model's chat template takes single questions, no conversation")
        self.end_tokens = end_tokens_of(self.tokenizer)
        self.answers_end_lines = self.form.later == LINES.later
        self.turns: list[tuple[str, list[int]]] = []  # questions, and the tokens of their answers
        self.tokens = 0  # of all questions so far, each with the turns before it
        self.reused_tokens = 0

    def chat(self, lines: Iterable[str]) -> None:
        """Answer line by line and print what reuse saved: after every answer, and for all turns at
        the end."""
        half = self.store.model.config.n_ctx // 2
        if self.form.past or self.form.after_thoughts is not None:
            print(
                "[this model's form changes an answered turn, such as by dropping its thoughts: what is "
                "stored is the text as it was read and written, and what has changed is read again]"
            )
        prefilled_cache(self.store.model, [self.tokenizer.eot_token])  # a first pass is slow
        for line in lines:
            question = line.strip()
            length = len(encode_conversation(self.form, [], question, self.tokenizer))
            if length + self.max_new_tokens > half:
                print(
                    f"[{length} tokens and an answer of {self.max_new_tokens} don't fit in half "
                    f"the context, {half}]"
                )
                continue
            self.answer(question)
        if self.tokens:
            tokens_read = self.tokens - self.reused_tokens
            print(f"[all turns: {tokens_read:,} tokens read, without reuse {self.tokens:,}]")
        if self.trace and self.trace.steps:
            self.trace.write()
            print(f"[step by step: {self.trace.path}]")

    def encode(self, question: str) -> list[int]:
        """Return the tokens of all turns and a question, up to where its answer begins. If they and
        the answer exceed the context, forget the oldest turns until the tokens to read fit in half
        the context."""
        n_ctx, n_turns = self.store.model.config.n_ctx, len(self.turns)
        ids = encode_conversation(self.form, self.turns, question, self.tokenizer)
        if len(ids) + self.max_new_tokens <= n_ctx:
            return ids
        while len(ids) > n_ctx // 2:
            del self.turns[0]
            ids = encode_conversation(self.form, self.turns, question, self.tokenizer)
        print(
            f"[the context of {n_ctx} tokens is full: the oldest {n_turns - len(self.turns)} turns are "
            "forgotten, and the others read again]"
        )
        return ids

    def answer(self, question: str) -> None:
        """Write the answer to a question, print it and what reuse saved, and keep both as a turn."""
        ids = self.encode(question)
        started = time.perf_counter()
        cache = self.store.get(ids)
        reused, answer, first_token_seconds = len(cache), [], 0.0
        if self.trace:
            self.trace.begin(ids, reused)
        read_to_checkpoints(self.store, ids, cache)
        for token in self.generate_answer(ids, cache):
            answer.append(token)
            if len(answer) == 1:
                first_token_seconds = time.perf_counter() - started
            if self.trace:
                self.trace.step(token, cache)
        text = [token for token in answer if token not in self.end_tokens]
        print(self.tokenizer.decode(text).strip())
        self.store.put([*ids, *answer], cache)
        self.turns.append((question, self.past_answer(text)))
        self.tokens += len(ids)
        self.reused_tokens += reused
        report = f"reused {reused} of {len(ids)} tokens; first token after {1e3 * first_token_seconds:.1f} ms"
        if self.compare:
            cold_seconds, _ = time_call(lambda: prefilled_cache(self.store.model, ids))
            report += f", without reuse {1e3 * cold_seconds:.1f} ms"
        if len(answer) == self.max_new_tokens and not self.is_end(answer[-1]):
            report += f"; cut off after {len(answer)} tokens: --max-new-tokens gives more"
        print(f"[{report}]\n")

    def is_end(self, token: int) -> bool:
        """Return whether a token ends an answer."""
        ends_line = self.answers_end_lines and "\n" in self.tokenizer.decode([token])
        return ends_line or token in self.end_tokens

    def generate_answer(self, ids: list[int], cache: KVCache) -> Iterator[int]:
        """Yield the tokens after a text up to the end of the answer."""
        model, ends = self.store.model, self.end_tokens
        prompt = torch.tensor([ids], device=model.wte.weight.device)
        for token in generate(model, prompt, self.max_new_tokens, stop_ids=ends, cache=cache):
            yield int(token)
            if self.is_end(int(token)):
                return

    def past_answer(self, answer: list[int]) -> list[int]:
        """Return the tokens of an answer in the turns that follow it: those that were written, unless
        the form drops its thoughts."""
        text = self.tokenizer.decode(answer)
        if self.answers_end_lines and not text.endswith("\n"):
            return answer + encode_in_form("\n", "", self.tokenizer)
        kept = self.form.past_answer(text)
        return answer if kept == text else encode_in_form("{}", kept, self.tokenizer)


def conversation_form(model: str, tokenizer: tiktoken.Encoding, system: str = "") -> ChatForm:
    """Return how a model expects a conversation: LINES if it has no form of its own. Raises
    ValueError if such a model is given a system prompt."""
    if has_chat_form(tokenizer):
        return chat_form(tokenizer, system)
    if system:
        raise ValueError(
            f"{model} has no form for a system prompt: --system needs an Instruct model"
        )
    form = DIALOGUE if "DialoGPT" in model else LINES
    beginning = tokenizer.decode(beginning_tokens(tokenizer))
    return form._replace(first=beginning + form.first)


def prompt_form(model: str, tokenizer: tiktoken.Encoding) -> str:
    """Return the form of a single prompt, with {} in the place of the text, which stands alone for
    models that only continue a text."""
    form = conversation_form(model, tokenizer)
    if form.later == LINES.later:
        return form.first.removesuffix(LINES.first) + "{}"
    return form.first


def typed_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that aren't empty, and print "> " before each, so that the output reads as a
    dialogue. A line that was typed is on the screen already; a line from a file is printed."""
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for line in lines:
        if line.strip():
            if not prompt:
                print(f"> {line.strip()}")
            yield line
        print(prompt, end="", flush=True)


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(__doc__, "python3 %(prog)s chat")
    run, talk = cli.add_actions(
        "run",
        run="the paper's protocol beside ours, in seconds; not with lecture 5's models",
        chat="a conversation",
    )
    for action in (run, talk):
        action.add_model_options(NAMES)
        action.add_options("--max-new-tokens", default=24)
    run.add_argument(
        "--encoder",
        default="tokens",
        metavar="NAME",
        help="embeddings for the nearest prompt: tokens, the model's own, or a model of "
        "sentence-transformers, such as all-MiniLM-L6-v2",
    )
    run.add_argument(
        "--out",
        default="results/recycle",
        type=writable_folder,
        metavar="FOLDER",
        help="where the tables go",
    )
    run.add_argument(
        "--figures", action="store_true", help="draw latency.png and speedup.png beside them"
    )
    place = talk.add_mutually_exclusive_group()
    place.add_argument(
        "--store",
        default="results/recycle/store",
        metavar="FOLDER",
        help="where caches are kept",
    )
    place.add_argument(
        "--fresh",
        action="store_true",
        help="begin with an empty store, in memory, and leave the folder as it is",
    )
    talk.add_argument(
        "--capacity",
        default=10**9,
        type=whole_number(1, 2**63 - 1),
        metavar="BYTES",
        help="most bytes to keep on disk or in memory",
    )
    talk.add_argument(
        "--compare",
        action="store_true",
        help="read each turn's whole text once more, without reuse: how long does that take?",
    )
    talk.add_options("--system", "--trace")
    with cli.parse(argv) as args:
        model = load_model(args.model, device=args.device, dtype=args.dtype)
        tokenizer = load_tokenizer(args.model)
        if args.action == "run":
            encoder = load_encoder(args.encoder, model, tokenizer)
            stored, tests = map(read_prompts, prompt_files(args.model))
            form = prompt_form(args.model, tokenizer)
            with tempfile.TemporaryDirectory(prefix="recycle-") as folder:
                recycler = Recycler(Store(model, folder), tokenizer, encoder, form)
                return demo(
                    recycler,
                    stored,
                    tests,
                    args.max_new_tokens,
                    args.out,
                    with_similarity=args.encoder != "tokens",
                    study=study_command("recycling", args.model),
                    with_figures=args.figures,
                )
        form = conversation_form(args.model, tokenizer, args.system)
        if args.trace:
            check_one_cache(model.new_cache(), "--trace")
        store = Store(model, None if args.fresh else args.store, args.capacity)
        no_ids = torch.empty(1, 0, dtype=torch.long)
        trace = Trace(args.trace, tokenizer, model, no_ids) if args.trace else None
        conversation = Conversation(
            store, tokenizer, args.max_new_tokens, form, trace, args.compare
        )
        conversation.chat(typed_lines(sys.stdin))


if __name__ == "__main__":
    main()
