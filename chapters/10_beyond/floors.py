"""What the two floors say about large models: lower bounds of times, by the models' sizes.

A token takes at least one reading of all weights and of the cache; a prompt at least two operations per weight and
token; a cached token saves these operations, but its bytes have to be moved.

`python3 chapters/10_beyond/floors.py` prints lower bounds for some models on a GPU as its data sheet describes it;
`... floors.py heads` what shared heads of keys and values save, and how many texts fit in 24 GB.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/../..")  # run as a file, from any folder

from dataclasses import dataclass

from support.cli import CommandLine


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: layers, width, key-value heads and their size, parameters (and how many of them are tables of
    embeddings or the head, which a prompt's tokens aren't multiplied by), context, and bytes of a number."""

    name: str
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    parameters: int
    tables: int
    unread: int  # parameters of tables of which a decoding step reads only a row
    n_ctx: int
    nbytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.nbytes


SHAPES = (
    Shape("GPT-2 124M", 12, 768, 12, 64, 124_439_808, 51281 * 768, 1024 * 768, 1024),
    Shape("GPT-2 XL", 48, 1600, 25, 64, 1_557_611_200, 51281 * 1600, 1024 * 1600, 1024),
    Shape("SmolLM2-135M", 30, 576, 3, 64, 134_515_008, 49152 * 576, 0, 8192),
    Shape("Llama 3.2 1B", 16, 2048, 8, 64, 1_235_814_400, 128256 * 2048, 0, 131072),
    Shape("Llama 3.2 3B", 28, 3072, 8, 128, 3_212_749_824, 128256 * 3072, 0, 131072),
    Shape("Llama 3 8B", 32, 4096, 8, 128, 8_030_261_248, 2 * 128256 * 4096, 128256 * 4096, 8192),
    Shape("Llama 3 70B", 80, 8192, 8, 128, 70_553_706_496, 2 * 128256 * 8192, 128256 * 8192, 8192),
)
# Its name, bytes/s, dense operations/s.
H100 = "an H100 SXM by its data sheet, bf16", 3.35e12, 989e12


def decode_seconds(shape: Shape, bandwidth: float, tokens: int) -> float:
    """Return the minimum seconds of a step for a text of `tokens` tokens, by the bytes read per second."""
    weight_bytes = (shape.parameters - shape.unread) * shape.nbytes
    return (weight_bytes + tokens * shape.token_bytes) / bandwidth


def prefill_seconds(shape: Shape, compute_rate: float, tokens: int) -> float:
    """Return the minimum seconds to read a prompt: 2 operations per weight and token, and attention's
    2 * 2 * tokens ** 2 / 2 * width * layers."""
    attention = 2 * tokens**2 * shape.width * shape.layers
    return (token_operations(shape) * tokens + attention) / compute_rate


def token_operations(shape: Shape) -> float:
    """Return the operations of a prompt's token, attention aside; the head is for the last token only."""
    return 2 * (shape.parameters - shape.tables)


def format_seconds(x: float) -> str:
    """Return a time in a readable unit."""
    return f"{x:,.1f} s" if x >= 1 else f"{1e3 * x:,.1f} ms"


def models() -> None:
    """Print what a token, a step and a prompt cost at least."""
    name, read, rate = H100
    print(f"{name}: reads {read / 1e9:,.0f} GB/s, multiplies {rate / 1e12:,.0f} Tflop/s\n")
    heads = (
        ("cache of a", "token, bytes"),
        ("as many bytes", "as the weights"),
        ("tokens/s: 1", "text of 1,000"),
    )
    heads += ("first token", "of 8,000"), ("fetch", "from")
    for line in zip(*heads, strict=True):
        print(" " * 12 + "".join(f"{word:>16}" for word in line))
    for shape in (shape for shape in SHAPES if shape.name != "GPT-2 XL"):
        equal = shape.parameters * shape.nbytes / shape.token_bytes
        one, first = f"{1 / decode_seconds(shape, read, 1000):,.0f}", "-"
        if shape.n_ctx >= 8000:
            first = format_seconds(prefill_seconds(shape, rate, 8000))
        fetch = f"{shape.token_bytes * rate / token_operations(shape) / 1e9:,.1f} GB/s"
        row = f"{shape.token_bytes:,}", f"{equal:,.0f} tokens", one, first, fetch
        print(f"{shape.name:12}" + "".join(f"{word:>16}" for word in row))


def heads() -> None:
    """Print the bytes of a cached token, with and without shared heads, and the texts that fit in 24 GB."""
    print("in bfloat16; bytes of a cached token, and texts that fit in 24 GB beside the weights:\n")
    print(
        f"{'':14}{'heads':>12}{'bytes':>10}{'unshared':>11}{'texts of 1,000':>16}{'of 8,000':>10}"
    )
    for shape in SHAPES:
        queries = shape.width // shape.head_dim
        unshared = shape.token_bytes * queries // shape.kv_heads
        free = 24e9 - shape.parameters * shape.nbytes
        fit = [
            f"{free // (tokens * shape.token_bytes):,.0f}"
            if free > 0 and tokens <= shape.n_ctx
            else "-"
            for tokens in (1000, 8000)
        ]
        shared = f"{queries} : {shape.kv_heads}"
        print(
            f"{shape.name:14}{shared:>12}{shape.token_bytes:>10,}{unshared:>11,}{fit[0]:>16}{fit[1]:>10}"
        )


PARTS = {"models": models, "heads": heads}


def main() -> None:
    cli = CommandLine(__doc__, example="python3 chapters/10_beyond/floors.py heads")
    cli.add_argument("what", nargs="?", choices=[*PARTS], default="models", help="what to print")
    with cli.parse() as args:
        PARTS[args.what]()


if __name__ == "__main__":
    main()
