"""What `python3 -m benchmarks` measures: implementations in turns, each in a process of its own, and the machine's limits.

A record is a file of JSON lines, each a row: the conditions of its run (model, machine, threads, date, turns), a name,
the setting (texts at once, and the tokens before, if these are as many for each text), and figures: medians over turns,
and "times_as_fast", the ratios to our own file in each turn. Rows named "floor", or "bound" for requests of different
lengths, are the machine's limits in the same turns; a row with "absent" says why nothing was measured.
"""

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.contenders import (
    CONTENDERS,
    LLAMAS,
    SERVERS,
    UNCACHED,
    WITHOUT,
    Prompts,
    Setup,
    TokenLimits,
    is_exact,
)
from load_gpt2_weights import load_model
from support import timing
from support.files import parse_json, read_json, read_text, write_text

Row = dict[str, Any]
Cell = tuple[int, int]  # texts at once, and the tokens before what is written
Requests = dict[int, tuple[Prompts, TokenLimits]]  # by their number
FLOOR, BOUND = "floor", "bound"
DECODED_TOKENS, UNCACHED_TOKENS = 16, 3  # written after a prompt, and without a cache
SETTING = ("model", "threads", "name", "texts", "tokens")
MEDIANS = ("tokens_per_s", "step_ms", "first_ms", "seconds", "gb_per_s")
# A larger share of the time without a processor, or change of bandwidth, is a disturbance.
BUSY = 0.10


# --- In the process of an implementation ----------------------------------------------------------


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
    B, T = ids.shape
    step_ms = median(milliseconds[1:])
    return {
        "texts": B,
        "tokens": T,
        "step_ms": step_ms,
        "tokens_per_s": 1e3 * B / step_ms,
        "first_ms": milliseconds[0],
        "waited": waited,
        "written": torch.cat(written, 1).tolist(),
        "cache_bytes": runner.nbytes,
    }


def measure_contender(name: str, setup: Setup, cells: Sequence[Cell]) -> dict[Cell, Row]:
    """Return the figures of a contender for each cell. A first pass over each warms up."""
    runner, n_warmup, n_decoded = (CONTENDERS | LLAMAS | WITHOUT)[name](setup), 3, DECODED_TOKENS
    if name == UNCACHED:
        n_warmup, n_decoded = 1, UNCACHED_TOKENS
    vocab_size = read_json(setup.folder / "config.json")["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = {}
    for cell in cells:
        prompts[cell] = torch.randint(vocab_size, cell, generator=generator).to(setup.device)
        time_contender(runner, prompts[cell], n_warmup)
    return {cell: time_contender(runner, ids, n_decoded) for cell, ids in prompts.items()}


def draw_requests(count: int, vocab_size: int, n_ctx: int) -> tuple[Prompts, TokenLimits]:
    """Return the first `count` of a fixed list of requests. Prompts take a 32nd to half of the
    context, and a 32nd to an eighth of it is written after them; both lengths are uniform on a
    logarithmic scale."""
    generator = random.Random(0)
    prompts, limits = [], []
    for _ in range(count):
        length, new_tokens = (round(n_ctx / 32 * ratio ** generator.random()) for ratio in (16, 4))
        prompts.append([generator.randrange(vocab_size) for _ in range(length)])
        limits.append(new_tokens)
    return prompts, limits


def measure_server(name: str, setup: Setup, requests: Requests) -> dict[int, Row]:
    """Return the figures of a contender for each number of requests, after small ones that warm it up."""
    runner, serve = SERVERS[name]
    serve = partial(serve, runner(setup).model)
    serve([[1, 2, 3], [1]], [3, 2])
    figures = {}
    for count, (prompts, limits) in requests.items():
        milliseconds, (texts, held, wasted) = time_in_ms(partial(serve, prompts, limits))
        figures[count] = {"texts": count} | speed_of(limits, milliseconds / 1e3)
        figures[count] |= {"written": texts, "held": held, "wasted": wasted}
    return figures


def speed_of(limits: TokenLimits, seconds: float) -> Row:
    return {"seconds": seconds, "tokens_per_s": sum(limits) / seconds}


def machine_limits(setup: Setup) -> tuple[Row, Callable[[int], float]]:
    """Return this machine's limits in float32: the figures of a step that only reads a model's weights, and a function
    that returns the milliseconds that the matrix products of so many tokens of a prompt take alone."""
    model, draw = load_model(str(setup.folder)), partial(torch.rand, device=setup.device)
    matrix, vector = draw(8192, 16384), draw(1, 8192)  # 512 MiB
    calls = (
        lambda: matrix.sum(),
        lambda: vector @ matrix,
        lambda: matrix @ draw(16384),
    )
    bytes_per_ms = matrix.nbytes / min(time_in_ms(call)[0] for call in calls for _ in range(4))
    weight_bytes = 4 * sum(p.numel() for p in model.parameters())
    weights = [draw(*p.shape) for p in model.h[0].parameters() if p.dim() == 2]
    head = draw(model.config.n_embd, model.config.vocab_size)

    def fastest_ms(weights: list[Tensor], tokens: int) -> float:
        x = {len(weight): draw(tokens, len(weight)) for weight in weights}

        def multiply() -> None:
            for weight in weights:
                x[len(weight)] @ weight

        return min(time_in_ms(multiply)[0] for _ in range(3))

    def products_ms(tokens: int) -> float:
        return model.config.n_layer * fastest_ms(weights, tokens) + fastest_ms([head], 1)

    return {"step_ms": weight_bytes / bytes_per_ms, "gb_per_s": bytes_per_ms / 1e6}, products_ms


def measure_floors(setup: Setup, cells: Sequence[Cell]) -> dict[Cell, Row]:
    """Return the machine's limits for each cell."""
    reading, products_ms = machine_limits(setup)
    floors = {}
    for B, T in cells:
        floors[B, T] = {"texts": B, "tokens": T, "first_ms": products_ms(B * T)} | reading
        floors[B, T]["tokens_per_s"] = 1e3 * B / reading["step_ms"]
    return floors


def measure_bound(setup: Setup, requests: Requests) -> dict[int, Row]:
    """Return the machine's limits for each number of requests: the time of the prompts' matrix products, and of reading
    all weights once for each further token of the longest answer."""
    reading, products_ms = machine_limits(setup)
    longest = max(len(ids) for prompts, _ in requests.values() for ids in prompts)
    token_ms = products_ms(longest) / longest
    bounds = {}
    for count, (prompts, limits) in requests.items():
        lengths = [len(ids) for ids in prompts]
        bound_ms = token_ms * sum(lengths) + reading["step_ms"] * (max(limits) - 1)
        bounds[count] = {"texts": count, "prompts": lengths, "new": limits} | reading
        bounds[count] |= speed_of(limits, bound_ms / 1e3)
    return bounds


# --- Turns ----------------------------------------------------------------------------------------


def in_own_process(threads: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns in a new process with `threads` threads. Raises whatever it
    raises."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when its libraries start
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=start_worker, initargs=(threads,)) as process:
        return process.submit(call, *arguments).result()


def start_worker(threads: int) -> None:
    """Prepare such a process: set its threads, and hide what an implementation prints."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    null_device = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null_device, descriptor)


def run_in_turns(jobs: dict[str, tuple[Any, ...]], threads: Sequence[int], turns: int) -> list[Row]:
    """Run each job, a function of a module and its arguments, once in every turn with each number of threads, no two at
    once, in an order that rotates. Return a row for each cell of a job. Ratios are to the turns of the first job.

    A job that fails is left out from then on, and its row says why. Raises ValueError if it is the first or the last,
    our own file or the machine's limits.
    """
    base, *_, limits = jobs
    failures: dict[tuple[int, str], str] = {}
    bar = tqdm(total=turns * len(threads) * len(jobs), desc="runs", leave=False)

    def run(number: int, name: str, _: int) -> Any:
        bar.update()
        if (number, name) in failures:
            return None
        try:
            return in_own_process(number, *jobs[name])
        except Exception as error:  # whatever an implementation raises
            why = f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
            if name in (base, limits):
                raise ValueError(f"{name} failed: {why}") from error
            failures[number, name] = why

    runs = {(number, name): partial(run, number, name) for number in threads for name in jobs}
    with bar:
        results = timing.run_in_turns(runs, turns, warm_up=False)
    rows = []
    for (number, name), own_turns in results.items():
        row = {"name": name, "threads": number}
        if (number, name) in failures:
            rows.append(row | {"absent": failures[number, name]})
            continue
        for cell in own_turns[0]:
            base_turns = [turn[cell] for turn in results[number, base]]
            rows.append(row | figures_of_turns([turn[cell] for turn in own_turns], base_turns))
    return rows


def figures_of_turns(turns: list[Row], base_turns: list[Row]) -> Row:
    """Return the figures of one cell from those of its turns: the medians of times, and their ratios to another's turns;
    of the machine's limits instead how much they changed."""
    figures = {key: value for key, value in turns[0].items() if key != "written"}
    pairs = [*zip(turns, base_turns, strict=True)]
    for key in figures.keys() & MEDIANS:
        figures[key] = median(turn[key] for turn in turns)
    ratios = [turn["tokens_per_s"] / base["tokens_per_s"] for turn, base in pairs]
    times_as_fast = {"tokens_per_s": ratios}
    if "gb_per_s" in figures:
        speeds = [turn["gb_per_s"] for turn in turns]
        return figures | {"bandwidth_change": (max(speeds) - min(speeds)) / median(speeds)}
    if "first_ms" in figures:
        times_as_fast["first_ms"] = [base["first_ms"] / turn["first_ms"] for turn, base in pairs]
    same_tokens = all(writes_same_tokens(turn, base_turn) for turn, base_turn in pairs)
    return figures | {"times_as_fast": times_as_fast, "same_tokens": same_tokens}


def writes_same_tokens(turn: Row, base_turn: Row) -> bool:
    """Return whether the tokens are those of the base, as far as they go."""
    texts = zip(turn["written"], base_turn["written"], strict=True)
    return all(text == expected[: len(text)] for text, expected in texts)


# --- Rows -----------------------------------------------------------------------------------------


def compare_with_limits(rows: list[Row]) -> list[Row]:
    """Return rows with what needs several of them: the time that processes waited, in rows of FLOOR, and the share of the
    bound that requests reach."""
    for limit in rows:
        others = having(rows, threads=limit["threads"])
        if limit["name"] == FLOOR:
            limit["waited"] = mean(row["waited"] for row in others if "same_tokens" in row)
        if limit["name"] == BOUND:
            for row in having(others, texts=limit["texts"]):
                row["of_bound"] = row["tokens_per_s"] / limit["tokens_per_s"]
    return rows


def writes_other_tokens(row: Row) -> bool:
    """Return whether a row's implementation should have written our own file's tokens, and hasn't."""
    return is_exact(row["name"]) and not row.get("same_tokens", True)


def is_disturbed(floor: Row) -> bool:
    """Return whether the machine was too busy for meaningful figures."""
    waited = floor["waited"] if floor["threads"] == 1 else 0
    return max(floor["bandwidth_change"], waited) > BUSY


def having(rows: Sequence[Row], **setting: Any) -> list[Row]:
    """Return the rows that have this setting."""
    return [row for row in rows if all(row.get(key) == setting[key] for key in setting)]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a record; of those with the same model, threads, name and setting the last."""
    rows = [parse_json(line, str(path)) for line in read_text(path).splitlines()]
    return [*{tuple(map(row.get, SETTING)): row for row in rows}.values()]


def add_rows(path: Path, rows: list[Row]) -> None:
    """Add rows to a record, which is written anew, so that no half line is left."""
    before = read_text(path) if path.exists() else ""
    write_text(path, before + "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
