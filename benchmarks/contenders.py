"""Implementations of GPT-2 that `python -m benchmarks` compares, and the process in which one of them runs.

All get the same weights: a folder in Hugging Face format. A contender is a function from ids (B, T) to an iterator that
yields the greedy next tokens (B, 1), one after each step of its work, the first after the prefill.

`python -m benchmarks.contenders NAME FOLDER DEVICE THREADS [PEER]` serves requests (see processes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import benchmarks.runners as runners
import gpt_baseline
import gpt_bounded_cache
from benchmarks.processes import serve
from benchmarks.runners import (
    CTranslate2,
    FromScratch,
    Int8,
    Ours,
    RandomBCT,
    Runner,
    Transformers,
)


@dataclass(frozen=True)
class Contender:
    """A name, a runner with its options, and what it needs: packages, a file in the peer's folder, or a kind of device.
    exact: its greedy tokens must be those of all other exact ones."""

    name: str
    runner: type[Runner]
    options: dict[str, Any] = field(default_factory=dict)
    package: str = ""
    file: str = ""
    device: str = ""
    exact: bool = True

    def make(self, folder: Path, device: str, peer: Path | None) -> Runner:
        """Load the weights in a folder."""
        return self.runner(
            folder, device, **self.options, **({"file": peer / self.file} if self.file else {})
        )


BOUNDED = {"module": gpt_bounded_cache}
HF, CT2 = "transformers", "ctranslate2 transformers"
CONTENDERS = (
    Contender("gpt_baseline.py", Ours, {"module": gpt_baseline}),
    Contender("gpt_kv_cache.py", Ours),
    Contender("gpt_bounded_cache.py, preallocated", Ours, BOUNDED | {"window": runners.ENDLESS}),
    Contender("gpt_bounded_cache.py, window of 256", Ours, BOUNDED | {"window": 256}, exact=False),
    Contender("gpt_bounded_cache.py, BCT, 24 slots", RandomBCT, exact=False),
    Contender("gpt_kv_cache.py, bfloat16", Ours, {"dtype": torch.bfloat16}, exact=False),
    Contender("gpt_kv_cache.py, int8", Int8, device="cpu", exact=False),
    Contender("transformers, DynamicCache", Transformers, package=HF),
    Contender("transformers, StaticCache", Transformers, {"static": True}, package=HF),
    Contender("CTranslate2", CTranslate2, package=CT2, device="cpu"),
    Contender(
        "CTranslate2, int8", CTranslate2, {"compute_type": "int8"}, CT2, device="cpu", exact=False
    ),
    Contender("LLMs-from-scratch, concat cache", FromScratch, file="gpt_with_kv_cache.py"),
    Contender("LLMs-from-scratch, optimized", FromScratch, file="gpt_with_kv_cache_optimized.py"),
)
WITHOUT = tuple(Contender(name, runners.Without, {"name": name}) for name in runners.ablations())


# --- The process of one contender -----------------------------------------------------------------------------------


class Clock:
    """Milliseconds on the device that computes, and of this process's CPU time."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def __call__(self, call: Callable[[], Any]) -> tuple[float, float, Any]:
        """Return the milliseconds of a call, those of CPU time, and what it returned."""
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = call()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end), 0.0, result
        begun, cpu = time.perf_counter(), time.process_time()
        result = call()
        return 1e3 * (time.perf_counter() - begun), 1e3 * (time.process_time() - cpu), result


def timed(runner: Runner, clock: Clock, ids: Tensor, decode: int) -> dict[str, Any]:
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


def floors(clock: Clock, device: str, geometry: dict[str, int], rows: list[int]) -> dict[str, Any]:
    """Return this machine's limits in float32: bytes read per millisecond, and milliseconds of nothing but the
    matrix products of a prefill, by the number of tokens in all texts."""
    times = 20 if clock.cuda else 1  # a GPU is told to begin so many times before the clock stops
    matrix = torch.rand(8192, 16384, device=device)  # 512 MiB
    vector = torch.rand(1, 8192, device=device)
    calls = (
        lambda: matrix.sum(),
        lambda: vector @ matrix,
        lambda: matrix @ torch.ones(16384, device=device),
    )
    read = matrix.nbytes / min(
        clock(lambda call=call: [call() for _ in range(times)])[0] / times
        for call in calls
        for _ in range(4)
    )
    C, inner, HD, V = (geometry[name] for name in ("n_embd", "n_inner", "attention", "vocab_size"))
    weights = [
        torch.rand(a, b, device=device) for a, b in ((C, 3 * HD), (HD, C), (C, inner), (inner, C))
    ]
    head, products = torch.rand(C, V, device=device), {}
    for T in rows:
        x = {w.size(0): torch.rand(T, w.size(0), device=device) for w in weights}

        def layer(x: dict[int, Tensor] = x) -> None:
            for w in weights:
                x[w.size(0)] @ w

        def last(x: Tensor = x[C][:1]) -> Tensor:
            return x @ head

        layer()
        one = min(clock(lambda: [layer() for _ in range(times)])[0] / times for _ in range(3))
        products[str(T)] = one * geometry["n_layer"] + clock(last)[0]
    return {"bytes_per_ms": read, "products_ms": products}


def answers(
    name: str, folder: Path, device: str, peer: Path | None = None
) -> Callable[..., dict[str, Any]]:
    """Return what answers requests to a contender, or to the "floor" of the machine."""
    clock = Clock(device)
    if name == "floor":
        return lambda geometry, rows: floors(clock, device, geometry, rows)
    runner = next(c for c in (*CONTENDERS, *WITHOUT) if c.name == name).make(folder, device, peer)

    def answer(ids: list[list[int]], decode: int, cached: int) -> dict[str, Any]:
        fed = torch.tensor(ids, device=device)
        if not cached:
            return timed(runner, clock, fed, decode)
        again = runner.resume(fed, cached)
        return {"resume_ms": None if again is None else median(clock(again)[0] for _ in range(3))}

    return answer


if __name__ == "__main__":
    serve(answers)
