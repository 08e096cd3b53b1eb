"""Printing a text while it is generated, and what it cost."""

import codecs
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import tiktoken
from torch import Tensor

from support.tables import table
from support.tracing import Trace


def stream(
    tokens: Iterator[Tensor],
    tokenizer: tiktoken.Encoding,
    cache: Any = None,
    trace: Trace | None = None,
) -> tuple[list[int], list[float]]:
    """Print a batch of one while it is generated, then what it cost; return its ids and the milliseconds of each.

    The first token costs the prefill (reading the prompt), each further one a decoding step. A trace records every step
    and is written at the end.
    """
    ids: list[int] = []
    milliseconds: list[float] = []
    # A character can span several tokens.
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    end_tokens = end_tokens_of(tokenizer)
    started = time.perf_counter()
    try:
        for token in tokens:
            ids.append(int(token))  # waits for the device
            milliseconds.append(1000 * (time.perf_counter() - started))
            if ids[-1] not in end_tokens:
                print(utf8.decode(tokenizer.decode_single_token_bytes(ids[-1])), end="", flush=True)
            if trace:
                trace.step(ids[-1], cache)
            if ids[-1] in end_tokens:
                break
            started = time.perf_counter()
    finally:  # an error message then begins on a new line
        print(utf8.decode(b"", final=True))  # a character that was cut off
    decode = sum(milliseconds[1:]) / max(1, len(milliseconds) - 1)
    speed = "nothing more"
    if decode:
        speed = f"{decode:.2f} ms per token = {1000 / decode:,.0f} tokens/s"
    nbytes = 0 if cache is None else cache.nbytes
    print(f"\n[prefill {milliseconds[0]:.1f} ms, decode {speed}, KV cache {nbytes:,} bytes]")
    if trace:
        trace.write()
        print(f"[step by step: {trace.path}]")
    return ids, milliseconds


def end_tokens_of(tokenizer: tiktoken.Encoding) -> tuple[int, ...]:
    """Return the tokens that end a text, of which a Llama may have several."""
    return getattr(tokenizer, "end_ids", (tokenizer.eot_token,))


def show(cache: Any, tokens: Sequence[str] = ()) -> None:
    """Print how large a cache is, and the position and the token in each of its slots.

    tokens: those of the text, from position 0 on. Where no slot stands for a single token, as in a BCT's memory, there
    is one line.
    """
    size = f"{len(cache.layers)} layers after {len(cache)} tokens: {cache.nbytes:,} bytes"
    print(f"{type(cache).__name__} of {size}")
    snapshot = cache.snapshot()
    if "mass" in snapshot or not snapshot["slots"]:
        return
    rows = []
    for slot, position in enumerate(snapshot["slots"]):
        token = repr(tokens[position]) if position < len(tokens) else ""
        rows.append(f"{slot:6}{position:10}  {token}")
    if len(rows) > 16:
        rows[8:-8] = ["   ..."]
    print("  slot  position  token", *rows, sep="\n")


def no_output() -> AbstractContextManager:
    """Print nothing within a with-block."""
    return redirect_stdout(None)


def print_comparison(prompt_length: int, runs: dict[str, tuple[list[int], list[float]]]) -> None:
    """Print how runs compare, each as stream() returns it: the milliseconds per token as the text
    grew, the total times, and whether all wrote the same tokens.

    A line shows medians over up to 64 decoded tokens, and in its last column how many times as fast
    the last run was as the first; the last line is the median over all decoded tokens.
    """
    texts = [ids for ids, _ in runs.values()]
    shortest = min(map(len, texts))
    spans = []
    for start in range(1, shortest, 64):
        end = min(start + 64, shortest)
        spans.append((f"{prompt_length + end:,}", start, end))
    if spans:
        rows = []
        for label, start, end in (*spans, ("all", 1, shortest)):
            medians = [statistics.median(times[start:end]) for _, times in runs.values()]
            ratio = f"{medians[0] / medians[-1]:.1f}"
            rows.append([label, *(f"{milliseconds:.2f}" for milliseconds in medians), ratio])
        print("\nMedians; the decoding time above is a mean:")
        header = ["text length", *(f"{name}: ms per token" for name in runs), "times as fast"]
        print(f"\n{table(header, rows, left_aligned=0)}")
    seconds = {name: sum(ms) / 1000 for name, (_, ms) in runs.items()}
    first, *_, last = seconds.values()
    seconds_by_name = ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items())
    print(f"\nIn all, prefill included: {seconds_by_name}, {first / last:.1f} times as fast")
    same_tokens = "yes" if all(ids == texts[0] for ids in texts) else "NO"
    lengths = ", ".join(f"{name}: {len(ids)}" for name, (ids, _) in runs.items())
    print(f"\nSame tokens: {same_tokens} ({lengths})")
