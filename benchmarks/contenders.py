"""What `python3 -m benchmarks` measures of an implementation, and of the machine."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Row
from benchmarks.runners import CONTENDERS, LLAMAS, UNCACHED, WITHOUT, Setup
from load_gpt2_weights import load_model

UNCACHED_TOKENS = 3  # tokens that a contender without a cache writes after a prompt
Cell = tuple[int, int]  # texts at once, and the tokens before what is written


def time_in_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and what it returned. A GPU is waited for, since the call
    only queues its work."""
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started), result


def time_contender(runner: Any, ids: Tensor, n_decoded: int) -> Row:
    """Return the milliseconds to the first token and of a further one (the median), the share of this time in which the
    process had no processor (if it has one thread), the tokens, and the bytes of the cache."""
    tokens = runner.start(ids)
    cpu_started = time.process_time()
    milliseconds, written = [], []
    for _ in range(1 + n_decoded):
        elapsed, token = time_in_ms(lambda: next(tokens))
        milliseconds.append(elapsed)
        written.append(token)
    waited = 1 - 1e3 * (time.process_time() - cpu_started) / sum(milliseconds)
    return {
        "step_ms": median(milliseconds[1:]),
        "first_ms": milliseconds[0],
        "waited": waited,
        "written": torch.cat(written, 1).tolist(),
        "cache_bytes": runner.nbytes,
    }


def geometry_of(folder: Path) -> Row:
    """Return the sizes that a machine's limits depend on; "weights" are their bytes in float32."""
    model = load_model(str(folder))
    matrices = [[*p.shape] for p in model.h[0].parameters() if p.dim() == 2]
    weights = 4 * sum(p.numel() for p in model.parameters())
    return vars(model.config) | {"matrices": matrices, "weights": weights}


def measure_floors(device: str, geometry: Row, token_counts: Sequence[int]) -> Row:
    """Return this machine's limits in float32: bytes read per millisecond, and the milliseconds
    that the matrix products of a prefill take alone, by the number of tokens in all texts."""
    matrix = torch.rand(8192, 16384, device=device)  # 512 MiB
    vector = torch.rand(1, 8192, device=device)
    calls = (
        lambda: matrix.sum(),
        lambda: vector @ matrix,
        lambda: matrix @ torch.ones(16384, device=device),
    )
    bytes_per_ms = matrix.nbytes / min(time_in_ms(call)[0] for call in calls for _ in range(4))
    matrices = [torch.rand(*shape, device=device) for shape in geometry["matrices"]]
    C = geometry["n_embd"]
    head = torch.rand(C, geometry["vocab_size"], device=device)
    last_hidden = torch.rand(1, C, device=device)
    head_ms = min(time_in_ms(lambda: last_hidden @ head)[0] for _ in range(3))
    products_ms = {}
    for T in token_counts:
        activations = {
            weight.size(0): torch.rand(T, weight.size(0), device=device) for weight in matrices
        }

        def layer(activations: dict[int, Tensor] = activations) -> None:
            for weight in matrices:
                activations[weight.size(0)] @ weight

        layer_ms = min(time_in_ms(layer)[0] for _ in range(3))
        products_ms[T] = layer_ms * geometry["n_layer"] + head_ms
    return {"bytes_per_ms": bytes_per_ms, "products_ms": products_ms}


def measure_contender(
    name: str, setup: Setup, cells: Sequence[Cell], vocab_size: int, n_decoded: int
) -> dict[Cell, Row]:
    """Return the figures of a contender for each cell. A first pass over each warms up."""
    runner, n_warmup = (CONTENDERS | LLAMAS | WITHOUT)[name](setup), 3
    if name == UNCACHED:
        n_warmup, n_decoded = 1, UNCACHED_TOKENS
    generator = torch.Generator().manual_seed(0)
    prompts = {
        (B, T): torch.randint(vocab_size, (B, T), generator=generator).to(setup.device)
        for B, T in cells
    }
    for ids in prompts.values():
        time_contender(runner, ids, n_warmup)
    figures = {cell: time_contender(runner, ids, n_decoded) for cell, ids in prompts.items()}
    return {(B, T): {"texts": B, "tokens": T} | row for (B, T), row in figures.items()}
