"""Larger models and fleets, predicted from the measured constants: decoding, first token, bytes of cache, reuse.

A token takes at least one reading of all weights and of the cache; a prompt at least two operations per weight and
token; a cached token saves these operations, but its bytes have to be moved. The model is checked against the measured
points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.files import read_csv
from support.tables import Table, page

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: layers, width, key-value heads and their size, parameters (and how many of them are tables of
    embeddings or the head, which a prompt's tokens aren't multiplied by), context, and bytes of a number."""

    name: str
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    parameters: float
    tables: float
    unread: float  # of the tables, what a step of decoding looks up a row of
    n_ctx: int
    nbytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.nbytes


SHAPES = (
    Shape("GPT-2 124M", 12, 768, 12, 64, 124.4e6, 51281 * 768, 1024 * 768, 1024),
    Shape("GPT-2 XL", 48, 1600, 25, 64, 1.558e9, 51281 * 1600, 1024 * 1600, 1024),
    Shape("Llama 3 8B", 32, 4096, 8, 128, 8.03e9, 2 * 128256 * 4096, 128256 * 4096, 8192),
    Shape("Llama 3 70B", 80, 8192, 8, 128, 70.6e9, 2 * 128256 * 8192, 128256 * 8192, 8192),
)
H100 = ("an H100 SXM by its data sheet, bf16", 3.35e12, 989e12, 2)  # bytes/s, dense operations/s, bytes of a number


def decode_s(shape: Shape, read: float, tokens: int, batch: int = 1) -> float:
    """Return the minimum seconds of a step for `batch` texts of `tokens` tokens each, at `read` bytes per second."""
    return ((shape.parameters - shape.unread) * shape.nbytes + batch * tokens * shape.token_bytes) / read


def prefill_s(shape: Shape, rate: float, tokens: int) -> float:
    """Return the minimum seconds to read a prompt: 2 operations per weight and token, and attention's
    2 * 2 * tokens ** 2 / 2 * width * layers."""
    return (token_operations(shape) * tokens + 2 * tokens**2 * shape.width * shape.layers) / rate


def token_operations(shape: Shape) -> float:
    """Return the operations of a prompt's token, attention aside; the head is for the last token only."""
    return 2 * (shape.parameters - shape.tables)


def note(record: dict[str, Any]) -> str:
    """Return the note as Markdown, from a summary.json of `python -m benchmarks`."""
    if not {"geometry", "rows", "gb_per_s"} <= {*record}:
        raise ValueError(f"a summary.json of python -m benchmarks has geometry, rows and gb_per_s; this has "
                         f"{', '.join([*record][:5])}")  # fmt: skip
    g = record["geometry"]
    threads = f"{record['threads']} thread{'s' * (record['threads'] > 1)}"
    weights = g["n_embd"] * (3 * g["attention"] + 2 * g["n_inner"]) + g["attention"] * g["n_embd"]
    head = g["n_embd"] * g["vocab_size"]
    rates = ((2 * int(T) * g["n_layer"] * weights + 2 * head) / (ms / 1e3) for T, ms in record["products_ms"].items())
    read, rate = 1e9 * record["gb_per_s"], max(rates)
    measured = Shape(record["model"], g["n_layer"], g["attention"], g["attention"], 1, g["weights"] / 4,
                     head + g["n_ctx"] * g["n_embd"], g["n_ctx"] * g["n_embd"], g["n_ctx"], 4)  # fmt: skip
    checks, shares = [], []
    for cell, row in record["rows"]["gpt_kv_cache.py"].items():
        if " x " in cell:
            B, n = map(int, cell.split(" x "))
            step, first = 1e3 * decode_s(measured, read, n, B), B * 1e3 * prefill_s(measured, rate, n)
            shares += [step / row["step_ms"], first / row["first_ms"]]
            checks.append([str(B), f"{n:,}", f"{step:.1f} ms", f"{row['step_ms']:.1f} ms", f"{shares[-2]:.2f}",
                           f"{first:,.0f} ms", f"{row['first_ms']:,.0f} ms", f"{shares[-1]:.2f}"])
    larger = []
    for name, bandwidth, products, nbytes in ((f"this one, {threads}, fp32", read, rate, 4), H100):
        for shape in (replace(shape, nbytes=nbytes) for shape in SHAPES):
            long = shape.n_ctx >= 8000
            fetch = shape.token_bytes / (token_operations(shape) / products)
            larger.append([name, shape.name, f"{1 / decode_s(shape, bandwidth, 1000):,.2f}",
                           f"{64 / decode_s(shape, bandwidth, 8000, 64):,.1f}" if long else "-",
                           seconds(prefill_s(shape, products, 1000)),
                           seconds(prefill_s(shape, products, 8000)) if long else "-", f"{shape.token_bytes:,}",
                           f"{fetch / 1e9:,.3g} GB/s"])  # fmt: skip
    return page([
        "# What the constants say at scale",
        f"Measured on {record['machine']}, {threads}, {record['date']}: memory is read at {read / 1e9:.1f} GB/s, and "
        f"matrices are multiplied at {rate / 1e9:,.0f} Gflop/s in float32.",
        "- A step of decoding reads all weights once, and the cache of every text: (weights + batch x tokens x "
        "bytes of a cached token) / bandwidth.\n"
        "- A prompt of T tokens takes 2 operations per weight and token (without embeddings), plus 2 T^2 operations "
        "per layer and dimension in attention, divided by the rate of products.\n"
        "- A cached token takes 2 x layers x key-value heads x head size x bytes per number.",
        "## Does that hold where it was measured?",
        "gpt_kv_cache.py beside these lower bounds:",
        Table(["batch", "tokens", "step: bound", "measured", "share", "first token: bound", "measured", "share"],
              checks),
        ("No time is under its bound" if max(shares) <= 1 else "NOT ALL BOUNDS HOLD") + ". To predict a real "
        "time, divide its bound by the share. The bounds leave out overhead, and the arithmetic of many texts in a "
        "step.",
        "## Larger models",
        "Lower bounds, without a limit of memory: in bfloat16 Llama 3 70B is "
        f"{2e-9 * SHAPES[-1].parameters:,.0f} GB, and 64 texts of 8,000 tokens are "
        f"{64 * 8000e-9 * SHAPES[-1].token_bytes:,.0f} GB more, on a GPU with 80 GB. The "
        "last column is the bandwidth above which fetching a cached token beats computing it.",
        Table(["machine", "model", "tokens/s, 1 text of 1,000", "64 texts of 8,000", "first token of 1,000",
               "of 8,000", "bytes of a cached token", "fetch above"], larger, left=2),
        *fleet(),
        "## The engines that take over there",
        Table(["here", "there", "what is added"], ENGINES, left=3),
    ], markdown=True)  # fmt: skip


def seconds(x: float) -> str:
    """Return a time in a readable unit."""
    return f"{x:,.1f} s" if x >= 1 else f"{1e3 * x:,.1f} ms"


def fleet() -> list[str | Table]:
    """Return predictions for a 70B model on the data sheet's machine, from the hit rates of two public traces."""
    _, _, rate, nbytes = H100
    shape, block = replace(SHAPES[-1], nbytes=nbytes), 512
    cells = []
    for path in sorted((ROOT / "studies" / "recycling").glob("replay_*.csv")):
        rows = read_csv(path)
        for row in (rows[0], rows[len(rows) // 2], rows[-1]):
            hit, blocks = float(row["token_hit_rate"]), row["capacity_blocks"]
            size = f"{int(blocks) * block * shape.token_bytes / 1e12:.2f} TB" if blocks.isdecimal() else "any"
            # A machine that does nothing but prefill computes (1 - hit) of the tokens that it serves.
            moved = rate / token_operations(shape) / max(1 - hit, 1e-9) * hit * shape.token_bytes
            cells.append([path.stem.removeprefix("replay_"), blocks, size, f"{hit:.1%}", f"{1 - hit:.1%}",
                          f"{moved / 1e9:.2f} GB/s", f"{8e-9 * moved / 25:.0%}", f"{8e-9 * moved / 400:.1%}"])
    return [
        "## A fleet",
        f"Hit rates of our store over public traces (`studies/replay.py`), {shape.name}, {H100[0]}. A hit saves "
        f"{1e6 * token_operations(shape) / rate:,.0f} microseconds of products per token, and moves "
        f"{shape.token_bytes:,} bytes.",
        Table(["trace", "blocks of 512 tokens", "memory", "tokens found", "prefill left", "moved for each machine",
               "of 25 Gbit/s", "of 400 Gbit/s"], cells),
        "So memory limits a pool of caches before the network does, unless the network is slow: above 100%, requests "
        "wait.",
    ]  # fmt: skip


ENGINES = (  # what is here, what it is there, what is added there
    ("a preallocated cache, a slot for each token", "vLLM's PagedAttention",
     "slots in blocks that any text may own, so that memory is shared and hardly wasted"),
    ("`support/radix_tree.py`, eviction of the oldest leaf", "SGLang's RadixAttention",
     "the same tree over the GPU's memory, and a scheduler that prefers requests that hit"),
    ("stored caches on disk, checked and restored", "LMCache", "tiers of GPU, CPU, disk and remote memory"),
    ("hit rates over a trace, bytes against products", "Mooncake",
     "a pool over all machines; prefill and decoding on different ones"),
    ("a sliding window, sinks, BCT's slots", "window attention; StreamingLLM; Gated Slot Attention",
     "models trained with them"),
    ("a teacher that prefills, a student that decodes", "speculative decoding",
     "the large model also checks the small one's tokens, so that nothing is lost"),
)  # fmt: skip
