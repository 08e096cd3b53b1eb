"""What `python3 -m benchmarks` measures of a contender, and of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.runners import CONTENDERS, LLAMAS, UNCACHED, WITHOUT, Where

FEW = 3  # tokens that a contender without a cache writes after a prompt


def clock(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the milliseconds of a call, those of this process's CPU time, and what it returned."""
    begun, cpu = time.perf_counter(), time.process_time()
    result = call()
    return 1e3 * (time.perf_counter() - begun), 1e3 * (time.process_time() - cpu), result


def timed(runner: Any, ids: Tensor, decode: int) -> dict[str, Any]:
    """Return the milliseconds to the first token and of each further one, the tokens and the bytes of the cache."""
    tokens = runner.start(ids)
    first, cpu, token = clock(lambda: next(tokens))
    written, steps, steps_cpu = [token], [], []
    for _ in range(decode):
        ms, cpu_ms, token = clock(lambda: next(tokens))
        written.append(token)
        steps.append(ms)
        steps_cpu.append(cpu_ms)
    return {
        "first_ms": first,
        "first_cpu_ms": cpu,
        "steps_ms": steps,
        "steps_cpu_ms": steps_cpu,
        "tokens": torch.cat(written, 1).tolist(),
        "nbytes": runner.nbytes,
    }


def floors(geometry: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return this machine's limits in float32: bytes read per millisecond, and milliseconds of nothing but the
    matrix products of a prefill, by the number of tokens in all texts."""
    matrix = torch.rand(8192, 16384)  # 512 MiB
    vector = torch.rand(1, 8192)
    calls = (
        lambda: matrix.sum(),
        lambda: vector @ matrix,
        lambda: matrix @ torch.ones(16384),
    )
    read = matrix.nbytes / min(clock(call)[0] for call in calls for _ in range(4))
    weights = [torch.rand(*shape) for shape in geometry["matrices"]]
    C = geometry["n_embd"]
    head = torch.rand(C, geometry["vocab_size"])
    row = torch.rand(1, C)
    last = min(clock(lambda: row @ head)[0] for _ in range(3))
    products = {}
    for T in rows:
        x = {w.size(0): torch.rand(T, w.size(0)) for w in weights}

        def layer(x: dict[int, Tensor] = x) -> None:
            for w in weights:
                x[w.size(0)] @ w

        layer()
        one = min(clock(layer)[0] for _ in range(3))
        products[str(T)] = one * geometry["n_layer"] + last
    return {"bytes_per_ms": read, "products_ms": products}


def measured(
    name: str, where: Where, prompts: dict[str, list[list[int]]], decode: int
) -> dict[str, Any]:
    """Return the figures of a contender for each prompt. A first pass over each warms up."""
    make = (CONTENDERS | LLAMAS | WITHOUT)[name]
    runner, warm = make(where), 3
    if name == UNCACHED:
        warm, decode = 0, FEW
    ids = {cell: torch.tensor(rows) for cell, rows in prompts.items()}
    for rows in ids.values():
        timed(runner, rows, warm)
    return {cell: timed(runner, rows, decode) for cell, rows in ids.items()}
