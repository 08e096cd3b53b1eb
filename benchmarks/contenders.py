"""What `python3 -m benchmarks` measures of a contender, and of the machine."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.runners import CONTENDERS, LLAMAS, UNCACHED, WITHOUT, Where
from benchmarks.words import Figures

FEW = 3  # tokens that a contender without a cache writes after a prompt


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and what it returned. A GPU has only queued the work when the call returns."""
    begun = time.perf_counter()
    result = call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun), result


def timed(runner: Any, ids: Tensor, decode: int) -> Figures:
    """Return the milliseconds to the first token and of each further one, the share of all of them in which this
    process had no processor (if it has one thread), the tokens and the bytes of the cache."""
    tokens = runner.start(ids)
    cpu = time.process_time()
    times, written = [], []
    for _ in range(1 + decode):
        ms, token = clock(lambda: next(tokens))
        times.append(ms)
        written.append(token)
    waited = 1 - 1e3 * (time.process_time() - cpu) / sum(times)
    return {
        "first_ms": times[0],
        "steps_ms": times[1:],
        "waited": waited,
        "tokens": torch.cat(written, 1).tolist(),
        "nbytes": runner.nbytes,
    }


def floors(device: str, geometry: Figures, rows: list[int]) -> Figures:
    """Return this machine's limits in float32: bytes read per millisecond, and milliseconds of nothing but the
    matrix products of a prefill, by the number of tokens in all texts."""
    matrix = torch.rand(8192, 16384, device=device)  # 512 MiB
    vector = torch.rand(1, 8192, device=device)
    calls = (
        lambda: matrix.sum(),
        lambda: vector @ matrix,
        lambda: matrix @ torch.ones(16384, device=device),
    )
    read = matrix.nbytes / min(clock(call)[0] for call in calls for _ in range(4))
    weights = [torch.rand(*shape, device=device) for shape in geometry["matrices"]]
    C = geometry["n_embd"]
    head = torch.rand(C, geometry["vocab_size"], device=device)
    row = torch.rand(1, C, device=device)
    last = min(clock(lambda: row @ head)[0] for _ in range(3))
    products = {}
    for T in rows:
        x = {w.size(0): torch.rand(T, w.size(0), device=device) for w in weights}

        def layer(x: dict[int, Tensor] = x) -> None:
            for w in weights:
                x[w.size(0)] @ w

        one = min(clock(layer)[0] for _ in range(3))
        products[str(T)] = one * geometry["n_layer"] + last
    return {"bytes_per_ms": read, "products_ms": products}


def measured(
    name: str, where: Where, cells: Sequence[tuple[int, int]], vocab_size: int, decode: int
) -> Figures:
    """Return the figures of a contender for each cell, a batch size and a prompt length. A first pass over each warms
    up."""
    runner, warm = (CONTENDERS | LLAMAS | WITHOUT)[name](where), 3
    if name == UNCACHED:
        warm, decode = 0, FEW
    generator = torch.Generator().manual_seed(0)
    prompts = {
        f"{B} x {T}": torch.randint(vocab_size, (B, T), generator=generator).to(where.device)
        for B, T in cells
    }
    for ids in prompts.values():
        timed(runner, ids, warm)
    return {cell: timed(runner, ids, decode) for cell, ids in prompts.items()}
