"""Many requests of different lengths at once: their total tokens/s, memory, and the cost of gathering blocks.

`python -m benchmarks --requests` gives all contenders the same weights and requests; each runs in a process of its own.
`python -m benchmarks.batches NAME FOLDER DEVICE THREADS` is that process (see processes.py).
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.processes import Worker, serve
from benchmarks.runners import Transformers
from benchmarks.scale import threads_of
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from paged import PagedCache, Server
from studies import paging
from support.tables import Table

BASE, PAGED = "gpt_kv_cache.py, one at a time", "paged.py"
COUNTS = (1, 4, 16, 64)
SIZE, CHUNK = 16, 256  # tokens of a block, and of a prompt's pass
Requests = list[dict[str, Any]]  # ids, new (tokens to write)


def requests_of(count: int, vocab_size: int, n_ctx: int) -> Requests:
    """Return the first of a fixed list of requests: prompts of a 32nd to half of the context, a 32nd to an eighth of it
    to write, both drawn evenly on a logarithmic scale."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        prompt, new = (round(n_ctx / 32 * scale ** rng.random()) for scale in (16, 4))
        ids = [rng.randrange(vocab_size) for _ in range(max(1, prompt))]
        found.append({"ids": ids, "new": max(1, new)})
    return found


# --- The contenders: from a folder and a device to what serves requests -----------------------------------------------


def one_at_a_time(folder: Path, device: str) -> Callable[[Requests], dict[str, Any]]:
    model = load_model(str(folder), model_class=GPT, device=device)

    def run(requests: Requests) -> dict[str, Any]:
        texts, held, wasted = paging.one_at_a_time(
            model, *zip(*((r["ids"], r["new"]) for r in requests), strict=True)
        )
        return {"tokens": texts, "held": held, "wasted": wasted}

    return run


def paged(folder: Path, device: str) -> Callable[[Requests], dict[str, Any]]:
    model = load_model(str(folder), model_class=GPT, device=device)

    def run(requests: Requests) -> dict[str, Any]:
        blocks = sum(-(-(len(r["ids"]) + r["new"] - 1) // SIZE) for r in requests)
        cache = PagedCache(model, blocks, SIZE)
        server = Server(model, cache, CHUNK)
        for request in requests:
            server.add(request["ids"], request["new"])
        texts: list[list[int]] = [[] for _ in requests]
        used = filled = 0  # blocks, and tokens in them, when most are in use
        while server.busy:
            for number, token in server.step():
                texts[number].append(token)
            now = cache.blocks - len(cache.free)
            if now > used:
                used = now
                filled = sum(text.n_read for text in server.running)  # no two begin alike
        block = cache.pool[..., 0, :, :].nbytes
        wasted = (used * SIZE - filled) * block // SIZE
        return {"tokens": texts, "held": used * block, "wasted": wasted}

    return run


def theirs(folder: Path, device: str) -> Any:
    """Return the model of transformers."""
    return Transformers(folder, device).model


def padded(folder: Path, device: str) -> Callable[[Requests], dict[str, Any]]:
    model = theirs(folder, device)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)

    def run(requests: Requests) -> dict[str, Any]:
        width, new = max(len(r["ids"]) for r in requests), max(r["new"] for r in requests)
        padding = [[0] * (width - len(r["ids"])) for r in requests]
        rows = zip(padding, requests, strict=True)
        ids = torch.tensor([zeros + r["ids"] for zeros, r in rows], device=device)
        seen = [[0] * len(zeros) + [1] * (width - len(zeros)) for zeros in padding]
        mask = torch.tensor(seen, device=device)
        done = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        rows = done.sequences[:, width:].tolist()
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in done.past_key_values.layers)
        real = sum(len(r["ids"]) + r["new"] - 1 for r in requests)
        return {
            "tokens": [row[: r["new"]] for row, r in zip(rows, requests, strict=True)],
            "held": held,
            "wasted": held - held * real // (len(requests) * (width + new - 1)),
        }

    return run


def continuous(folder: Path, device: str) -> Callable[[Requests], dict[str, Any]]:
    import transformers

    transformers.logging.set_verbosity_error()
    model = theirs(folder, device)
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(requests: Requests) -> dict[str, Any]:
        blocks = sum(-(-(len(r["ids"]) + r["new"]) // SIZE) for r in requests) + 1
        config = transformers.ContinuousBatchingConfig(
            page_size=SIZE, num_blocks=blocks, max_batch_tokens=CHUNK
        )
        options = {
            "generation_config": generation,
            "continuous_batching_config": config,
            "warmup": False,
        }
        texts: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(**options) as manager:
            names = [manager.add_request(r["ids"], max_new_tokens=r["new"]) for r in requests]
            while len(texts) < len(requests):
                if (result := manager.get_result(timeout=1)) and result.is_finished():
                    if result.error:
                        raise ValueError(result.error)
                    texts[result.request_id] = result.generated_tokens
                elif not result and not manager.is_running():
                    raise ValueError("its thread ended")
        return {"tokens": [texts[name] for name in names], "held": None, "wasted": None}

    return run


CONTENDERS = {
    BASE: one_at_a_time,
    PAGED: paged,
    "transformers, padded generate": padded,
    "transformers, continuous batching": continuous,
}


def answers(name: str, folder: Path, device: str) -> Callable[..., dict[str, Any]]:
    """Return what answers requests to a contender, which has been warmed up by small ones."""
    run = CONTENDERS[name](folder, device)
    run([{"ids": [1, 2, 3], "new": 3}, {"ids": [1], "new": 2}])

    def answer(requests: Requests) -> dict[str, Any]:
        begun = time.perf_counter()
        found = run(requests)
        return {**found, "seconds": time.perf_counter() - begun}

    return answer


# --- Measuring, and the record ----------------------------------------------------------------------------------------


def ask(name: str, *where: Any, **request: Any) -> dict[str, Any]:
    """Return a new process's answer, where: folder, device and threads. Raises ValueError if it fails."""
    with closing(Worker("contenders" if name == "floor" else "batches", name, *where)) as worker:
        return worker(**request)


def measure(
    folder: Path,
    geometry: dict[str, int],
    counts: Sequence[int],
    turns: int,
    device: str,
    threads: int,
) -> dict[str, Any]:
    """Return the record of each number of requests: the medians over turns of every contender, and the bound: a
    prompt's products, then all weights once for each further token of the text that is written longest.

    One that fails is left out from there on, and said in "failed". Raises ValueError if BASE fails, or PAGED.
    """
    failed = {}
    if not importlib.util.find_spec("transformers"):
        names = [name for name in CONTENDERS if "transformers" in name]
        failed = dict.fromkeys(names, "not installed: python3 -m pip install transformers")
    raw: dict[int, dict[str, list[dict[str, Any]]]] = {
        count: {name: [] for name in CONTENDERS} for count in counts
    }
    floor, rows = [], geometry["n_ctx"] // 2
    for turn in tqdm(range(turns), desc="turns", leave=False):
        floor.append(ask("floor", folder, device, threads, geometry=geometry, rows=[rows]))
        for count in counts:
            requests = requests_of(count, geometry["vocab_size"], geometry["n_ctx"])
            names = [*CONTENDERS]
            bar = tqdm(names[turn % len(names) :] + names[: turn % len(names)], leave=False)
            for name in bar:
                bar.set_description(f"{count} requests, {name}")
                try:
                    if name not in failed:
                        raw[count][name].append(
                            ask(name, folder, device, threads, requests=requests)
                        )
                except ValueError as error:
                    failed[name] = str(error)
                    if name in (BASE, PAGED):
                        raise
    read = geometry["weights"] / median(f["bytes_per_ms"] for f in floor) / 1e3  # seconds a pass
    token = median(f["products_ms"][str(rows)] for f in floor) / rows / 1e3
    result = {}
    for count in counts:
        requests = requests_of(count, geometry["vocab_size"], geometry["n_ctx"])
        new, lengths = [r["new"] for r in requests], [len(r["ids"]) for r in requests]
        bound = token * sum(lengths) + read * (max(new) - 1)
        found: dict[str, Any] = {
            "floor": floor,
            "read_ms": 1e3 * read,
            "failed": failed,
            "prompts": lengths,
            "new": new,
            "bound_s": bound,
            "bound_tokens_per_s": sum(new) / bound,
            "rows": {},
        }
        base = raw[count][BASE]
        for name, turns_of in raw[count].items():
            if name in failed:
                continue
            seconds = [t["seconds"] for t in turns_of]
            found["rows"][name] = {
                "seconds": seconds,
                "tokens_per_s": sum(new) / median(seconds),
                "times_as_fast": median(
                    b["seconds"] / s for b, s in zip(base, seconds, strict=True)
                ),
                "same_tokens": all(
                    t["tokens"] == b["tokens"] for t, b in zip(turns_of, base, strict=True)
                ),
                "held": turns_of[0]["held"],  # of all turns: their requests are the same
                "wasted": turns_of[0]["wasted"],
            }
        result[str(count)] = found
    return result


def summary(counts: dict[str, dict[str, Any]]) -> list[str | Table]:
    """Return the figures, a table for each number of requests, after what it was measured on if that is new."""
    parts: list[str | Table] = []
    conditions = ""
    for count, found in sorted(counts.items(), key=lambda item: int(item[0])):
        threads = threads_of(found)
        turns = f"medians of {found['turns']} turns" if found["turns"] > 1 else "one turn"
        now = (
            f"{found['model']}, {found['geometry']['weights'] / 1e6:,.0f} MB of weights in float32, read in "
            f"{found['read_ms']:.1f} ms; {found['machine']}; {threads}; {turns}, "
            f"{found['date']}."
        )
        if now != conditions:
            parts.append(conditions := now)
        lengths = f"prompts of {min(found['prompts'])} to {max(found['prompts'])} tokens"
        parts.append(
            f"{count} request{'s' * (count != '1')}, all there at the beginning; {lengths}, "
            f"{min(found['new'])} to {max(found['new'])} to write: {sum(found['new']):,} in all:"
        )
        rows = []
        for name, r in found["rows"].items():
            memory = [f"{r[key]:,}" if r[key] is not None else "-" for key in ("held", "wasted")]
            rows.append(
                [
                    name,
                    f"{r['tokens_per_s']:,.1f}",
                    f"{r['times_as_fast']:.2f}",
                    f"{r['tokens_per_s'] / found['bound_tokens_per_s']:.2f}",
                    *memory,
                    "yes" if r["same_tokens"] else "NO",
                ]
            )
        rows.append(["bound", f"{found['bound_tokens_per_s']:,.1f}", "-", "1.00", "-", "-", "-"])
        header = ["", "tokens/s", "times as fast", "of the bound"]
        parts.append(Table([*header, "bytes held", "wasted", "same tokens"], rows))
        parts += [f"Not measured: {name} ({why})." for name, why in found["failed"].items()]
    return parts


if __name__ == "__main__":
    serve(answers)
