"""Turns: every implementation runs in a process of its own, a new one each time, and no two at once."""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

Job = tuple[int, str]  # threads, and the name of what is measured


def run_in_processes(
    jobs: dict[Job, tuple[Any, ...]], turns: int, needed: Collection[str]
) -> tuple[dict[Job, list[Any]], dict[Job, str]]:
    """Run each job, a function of a module and its arguments, once in every turn, in an order that
    rotates. Return the results of all turns of each job, and why jobs failed.

    A job that fails is left out from then on. Raises ValueError if its name is one of those needed.
    """
    results, failures, order = {job: [] for job in jobs}, {}, [*jobs]
    for turn in tqdm(range(turns), desc="turns", leave=False):
        first = turn % len(order)
        for threads, name in order[first:] + order[:first]:
            if (threads, name) in failures:
                continue
            try:
                result = in_own_process(threads, *jobs[threads, name])
                results[threads, name].append(result)
            except Exception as error:  # whatever an implementation raises
                is_refusal = isinstance(error, ValueError)
                why = str(error) if is_refusal else f"{type(error).__name__}: {error}"
                if name in needed:
                    raise ValueError(f"{name} failed: {why}") from error
                failures[threads, name] = why
                del results[threads, name]
    return results, failures


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
