"""Lower bounds of the times of larger models, by their sizes: a step of decoding, the first token, bytes of cache.

A token takes at least one reading of all weights and of the cache; a prompt at least two operations per weight and
token; a cached token saves these operations, but its bytes have to be moved.
"""

from dataclasses import dataclass


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
    attention = 2 * tokens**2 * shape.width * shape.layers
    return (token_operations(shape) * tokens + attention) / compute_rate


def token_operations(shape: Shape) -> float:
    """Return the operations of a prompt's token, attention aside; the head is for the last token only."""
    return 2 * (shape.parameters - shape.tables)


def format_seconds(x: float) -> str:
    """Return a time in a readable unit."""
    return f"{x:,.1f} s" if x >= 1 else f"{1e3 * x:,.1f} ms"
