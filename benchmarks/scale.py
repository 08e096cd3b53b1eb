"""Larger models and fleets, predicted from the measured constants: decoding, first token, bytes of cache, reuse.

A token takes at least one reading of all weights and of the cache; a prompt at least two operations per weight and
token; a cached token saves these operations, but its bytes have to be moved. The model is checked against the measured
points.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.words import Figures, threads_text
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
    unread: float  # parameters of tables of which a decoding step reads only a row
    n_ctx: int
    nbytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.nbytes


SHAPES = (
    Shape("GPT-2 124M", 12, 768, 12, 64, 124.4e6, 51281 * 768, 1024 * 768, 1024),
    Shape("GPT-2 XL", 48, 1600, 25, 64, 1.558e9, 51281 * 1600, 1024 * 1600, 1024),
    Shape("SmolLM2-135M", 30, 576, 3, 64, 134.5e6, 49152 * 576, 0, 8192),
    Shape("Llama 3.2 1B", 16, 2048, 8, 64, 1.236e9, 128256 * 2048, 0, 131072),
    Shape("Llama 3.2 3B", 28, 3072, 8, 128, 3.213e9, 128256 * 3072, 0, 131072),
    Shape("Llama 3 8B", 32, 4096, 8, 128, 8.03e9, 2 * 128256 * 4096, 128256 * 4096, 8192),
    Shape("Llama 3 70B", 80, 8192, 8, 128, 70.6e9, 2 * 128256 * 8192, 128256 * 8192, 8192),
)
# Its name, bytes/s, dense operations/s, bytes of a number.
H100 = (
    "an H100 SXM by its data sheet, bf16",
    3.35e12,
    989e12,
    2,
)


def decode_seconds(shape: Shape, bandwidth: float, tokens: int, batch: int = 1) -> float:
    """Return the minimum seconds of a step for `batch` texts of `tokens` tokens each, by the bytes read per second."""
    weight_bytes = (shape.parameters - shape.unread) * shape.nbytes
    return (weight_bytes + batch * tokens * shape.token_bytes) / bandwidth


def prefill_seconds(shape: Shape, compute_rate: float, tokens: int) -> float:
    """Return the minimum seconds to read a prompt: 2 operations per weight and token, and attention's
    2 * 2 * tokens ** 2 / 2 * width * layers."""
    return (
        token_operations(shape) * tokens + 2 * tokens**2 * shape.width * shape.layers
    ) / compute_rate


def token_operations(shape: Shape) -> float:
    """Return the operations of a prompt's token, attention aside; the head is for the last token only."""
    return 2 * (shape.parameters - shape.tables)


def cells_of(row: Figures) -> list[str]:
    """Return the cells in which a contender was measured, as in "8 x 128": texts and tokens of each."""
    return [cell for cell in row if " x " in cell]


def predict(record: Figures, markdown: bool = False) -> str:
    """Return what a record of `python3 -m benchmarks` predicts, and how well it predicts its own
    measurements."""
    bandwidth, compute_rate = 1e9 * record["gb_per_s"], product_rate(record)
    checks, all_hold = check_bounds(record, bandwidth, compute_rate)
    larger = larger_models(
        (f"this one, {threads_text(record)}, fp32", bandwidth, compute_rate, 4), H100
    )
    measured = (
        f"Measured on {record['machine']}, {threads_text(record)}, {record['date']}: memory is read at "
        f"{bandwidth / 1e9:.1f} GB/s, and matrices are multiplied at {compute_rate / 1e9:,.0f} Gflop/s in "
        "float32. gpt_kv_cache.py beside its lower bounds:"
    )
    verdict = "No time is under its bound." if all_hold else "NOT ALL BOUNDS HOLD."
    return page([measured, checks, verdict, larger], markdown)


def check_bounds(record: Figures, bandwidth: float, compute_rate: float) -> tuple[Table, bool]:
    """Return the times that were measured beside their lower bounds, and whether none is under its bound."""
    shape, measured = measured_shape(record), record["rows"]["gpt_kv_cache.py"]
    rows, shares = [], []
    for cell in cells_of(measured):
        B, tokens = map(int, cell.split(" x "))
        step_bound = 1e3 * decode_seconds(shape, bandwidth, tokens, B)
        first_bound = 1e3 * B * prefill_seconds(shape, compute_rate, tokens)
        rows.append([str(B), f"{tokens:,}"])
        for bound, key, form in (
            (step_bound, "step_ms", ",.1f"),
            (first_bound, "first_ms", ",.0f"),
        ):
            ms = measured[cell][key]
            rows[-1] += [
                f"{bound:{form}} ms",
                f"{ms:{form}} ms",
                f"{bound / ms:.2f}",
            ]
            shares.append(bound / ms)
    header = ["batch", "tokens"]
    for quantity in ("step", "first token"):
        header += [f"{quantity}: bound", f"{quantity}: measured", f"{quantity}: share"]
    return Table(header, rows), max(shares) <= 1


def measured_shape(record: Figures) -> Shape:
    """Return the sizes of the model that was measured; attention counts as one head, as wide as all
    heads together."""
    geometry = record["geometry"]
    position_weights = geometry["n_ctx"] * geometry["n_embd"]
    head_weights = geometry["n_embd"] * geometry["vocab_size"]
    return Shape(
        name=record["model"],
        layers=geometry["n_layer"],
        width=geometry["attention"],
        kv_heads=geometry["attention"],
        head_dim=1,
        parameters=geometry["weights"] / 4,
        tables=head_weights + position_weights,
        unread=position_weights,
        n_ctx=geometry["n_ctx"],
        nbytes=4,
    )


def product_rate(record: Figures) -> float:
    """Return the operations a second of the fastest products that were measured."""
    geometry = record["geometry"]
    attention_weights = 4 * geometry["n_embd"] * geometry["attention"]
    layer_weights = attention_weights + 2 * geometry["n_embd"] * geometry["n_inner"]
    head_weights = geometry["n_embd"] * geometry["vocab_size"]
    rates = []
    for T, ms in record["products_ms"].items():
        operations = 2 * int(T) * geometry["n_layer"] * layer_weights + 2 * head_weights
        rates.append(operations / (ms / 1e3))
    return max(rates)


def larger_models(*machines: tuple[str, float, float, int]) -> Table:
    """Return the lower bounds of SHAPES on machines: name, bytes/s, operations/s, bytes of a number."""
    rows = []
    for name, bandwidth, compute_rate, nbytes in machines:
        for shape in SHAPES:
            shape = replace(shape, nbytes=nbytes)
            batch_speed, long_first = "-", "-"
            if shape.n_ctx >= 8000:
                batch_speed = f"{64 / decode_seconds(shape, bandwidth, 8000, 64):,.1f}"
                long_first = format_seconds(prefill_seconds(shape, compute_rate, 8000))
            single_speed = f"{1 / decode_seconds(shape, bandwidth, 1000):,.2f}"
            short_first = format_seconds(prefill_seconds(shape, compute_rate, 1000))
            seconds_per_token = token_operations(shape) / compute_rate
            fetch_bandwidth = shape.token_bytes / seconds_per_token / 1e9
            token_bytes = f"{shape.token_bytes:,}"
            speeds = [single_speed, batch_speed, short_first, long_first]
            rows.append([name, shape.name, *speeds, token_bytes, f"{fetch_bandwidth:,.3g} GB/s"])
    speeds = ["tokens/s, 1 text of 1,000", "64 texts of 8,000"]
    firsts = ["first token of 1,000", "of 8,000"]
    header = ["machine", "model", *speeds, *firsts, "bytes of a cached token", "fetch above"]
    return Table(header, rows, left_aligned=2)


def format_seconds(x: float) -> str:
    """Return a time in a readable unit."""
    return f"{x:,.1f} s" if x >= 1 else f"{1e3 * x:,.1f} ms"


def fleet_table() -> Table:
    """Return predictions for the largest of SHAPES on H100, from the hit rates of two public traces."""
    shape, compute_rate, table_rows = SHAPES[-1], H100[2], []
    for path in sorted((ROOT / "studies" / "recycling").glob("replay_*.csv")):
        rows = read_csv(path)
        for row in (rows[0], rows[len(rows) // 2], rows[-1]):
            hit_rate, blocks = float(row["token_hit_rate"]), row["capacity_blocks"]
            memory = "any"
            if blocks.isdecimal():
                memory = f"{int(row['tokens']) * shape.token_bytes / 1e12:.2f} TB"
            # A machine that does nothing but prefill computes (1 - hit) of the tokens that it serves.
            traffic = compute_rate / token_operations(shape) / max(1 - hit_rate, 1e-9)
            traffic *= hit_rate * shape.token_bytes
            network_shares = [
                f"{8e-9 * traffic / 25:.0%}",
                f"{8e-9 * traffic / 400:.1%}",
            ]
            trace = path.stem.removeprefix("replay_")
            cells = [blocks, memory, f"{hit_rate:.1%}", f"{traffic / 1e9:.2f} GB/s"]
            table_rows.append([trace, *cells, *network_shares])
    header = ["trace", "blocks of 512 tokens", "memory", "tokens found", "moved for each machine"]
    return Table([*header, "of 25 Gbit/s", "of 400 Gbit/s"], table_rows)
