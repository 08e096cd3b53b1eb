"""Many requests of different lengths at once: their total tokens/s, memory, and the cost of gathering blocks.

`python3 -m benchmarks --requests` gives all contenders the same weights and requests, and lets them take turns.
"""

import inspect
import random
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import measure_floors, time_in_ms
from benchmarks.processes import run_in_processes
from benchmarks.runners import Ours, Setup, Transformers
from benchmarks.words import Figures, threads_text, turns_text
from demos.serving import ServingRecord, one_at_a_time, pad_prompts, padded_result
from gpt_kv_cache import GPT
from paged import PagedCache, Server
from support.tables import Table, page

BASE, PAGED = "gpt_kv_cache.py, one at a time", "paged.py"
PADDED = "transformers, padded generate"
REQUEST_COUNTS = (1, 4, 16, 64)
BLOCK_TOKENS, CHUNK_TOKENS = 16, 256  # tokens of a block, and of a prompt's pass
Prompts, TokenLimits = list[list[int]], list[int]  # ids of each prompt, tokens to write after each
Served = tuple[list[list[int]], int | None, int | None]  # texts, most bytes held, of these wasted


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


# --- The contenders ---------------------------------------------------------------------------------------------------


def serve_in_blocks(model: GPT, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts together, from one pool of KV blocks."""
    requests = [*zip(prompts, limits, strict=True)]
    blocks = sum(-(-(len(ids) + limit - 1) // BLOCK_TOKENS) for ids, limit in requests)
    server = Server(model, PagedCache(model, blocks, BLOCK_TOKENS), CHUNK_TOKENS)
    for ids, limit in requests:
        server.add(ids, limit)
    return ServingRecord(server).served()


def serve_padded(model: Any, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts as one batch of transformers, padded to the length of the longest."""
    n_new = max(limits)
    batch, lengths = pad_prompts(prompts)
    width = batch.size(1)
    mask = torch.arange(width) >= width - lengths
    output = model.generate(
        batch.to(model.device),
        attention_mask=mask.long().to(model.device),
        max_new_tokens=n_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    layers = output.past_key_values.layers
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    written = output.sequences[:, width:]
    return padded_result(written, nbytes, width + n_new - 1, prompts, limits)


def serve_continuously(model: Any, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts by transformers' continuous batching, which doesn't report the memory it
    holds. Raises ValueError if this version has none with pages."""
    import transformers

    if "page_size" not in inspect.signature(transformers.ContinuousBatchingConfig).parameters:
        raise ValueError(
            f"transformers {transformers.__version__} has no continuous batching with a page_size, as 5.24 has"
        )
    blocks = sum(
        -(-(len(ids) + limit) // BLOCK_TOKENS) for ids, limit in zip(prompts, limits, strict=True)
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        page_size=BLOCK_TOKENS, num_blocks=blocks + 1, max_batch_tokens=CHUNK_TOKENS
    )
    texts = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        request_ids = [
            manager.add_request(ids, max_new_tokens=limit)
            for ids, limit in zip(prompts, limits, strict=True)
        ]
        while len(texts) < len(prompts):
            if (result := manager.get_result(timeout=1)) and result.is_finished():
                if result.error:
                    raise ValueError(result.error)
                texts[result.request_id] = result.generated_tokens
            elif not result and not manager.is_running():
                raise ValueError("its thread ended")
    return [texts[request_id] for request_id in request_ids], None, None


CONTENDERS = {  # each decodes the prompts with a model
    BASE: one_at_a_time,
    PAGED: serve_in_blocks,
    PADDED: serve_padded,
    "transformers, continuous batching": serve_continuously,
}


def measure_contender(
    name: str, setup: Setup, requests: dict[int, tuple[Prompts, TokenLimits]]
) -> dict[int, Figures]:
    """Return the figures of a contender for each number of requests, after small ones that warm it up."""
    serve = CONTENDERS[name]
    runner = Ours if name in (BASE, PAGED) else Transformers
    model = runner(setup).model
    serve(model, [[1, 2, 3], [1]], [3, 2])
    figures_by_count = {}
    for count, (prompts, limits) in requests.items():
        milliseconds, (texts, held_bytes, wasted_bytes) = time_in_ms(
            partial(serve, model, prompts, limits)
        )
        figures_by_count[count] = {
            "seconds": milliseconds / 1e3,
            "tokens": texts,
            "held": held_bytes,
            "wasted": wasted_bytes,
        }
    return figures_by_count


# --- Measuring, and the record ----------------------------------------------------------------------------------------


def measure_requests(
    turns: int, threads: int, setup: Setup, geometry: dict[str, int], counts: Sequence[int]
) -> Figures:
    """Return the record of each number of requests: every contender's medians over turns, and the
    bound. The bound is the time of the prompts' matrix products, and of reading all weights once
    for each further token of the longest answer.

    A contender that fails is left out, and "failed" says why. Raises ValueError if BASE or PAGED
    fails.
    """
    vocab_size, n_ctx = geometry["vocab_size"], geometry["n_ctx"]
    requests = {count: draw_requests(count, vocab_size, n_ctx) for count in counts}
    prompt_tokens = n_ctx // 2
    jobs = {"floor": (measure_floors, setup.device, geometry, [prompt_tokens])}
    jobs |= {name: (measure_contender, name, setup, requests) for name in CONTENDERS}
    turns_by_name, failures = run_in_processes(jobs, turns, threads, needed=("floor", BASE, PAGED))
    floor_turns = turns_by_name.pop("floor")
    bytes_per_ms = median(turn["bytes_per_ms"] for turn in floor_turns)
    seconds_per_pass = geometry["weights"] / bytes_per_ms / 1e3
    prompt_ms = median(turn["products_ms"][str(prompt_tokens)] for turn in floor_turns)
    seconds_per_token = prompt_ms / prompt_tokens / 1e3
    records = {}
    for count, (prompts, limits) in requests.items():
        lengths = [len(ids) for ids in prompts]
        bound_seconds = seconds_per_token * sum(lengths) + seconds_per_pass * (max(limits) - 1)
        base_turns = [turn[count] for turn in turns_by_name[BASE]]
        records[str(count)] = {
            "read_ms": 1e3 * seconds_per_pass,
            "failed": failures,
            "prompts": lengths,
            "new": limits,
            "bound_tokens_per_s": sum(limits) / bound_seconds,
            "rows": {
                name: figures_of_turns([turn[count] for turn in turns], base_turns, sum(limits))
                for name, turns in turns_by_name.items()
            },
        }
    return records


def figures_of_turns(turns: list[Figures], base_turns: list[Figures], tokens: int) -> Figures:
    """Return the figures of a contender that wrote `tokens` tokens in each turn; base_turns:
    BASE's."""
    seconds = [turn["seconds"] for turn in turns]
    pairs = [*zip(base_turns, turns, strict=True)]
    return {
        "tokens_per_s": tokens / median(seconds),
        "times_as_fast": median(
            base_turn["seconds"] / turn["seconds"] for base_turn, turn in pairs
        ),
        "same_tokens": all(turn["tokens"] == base_turn["tokens"] for base_turn, turn in pairs),
        "held": turns[0]["held"],  # of all turns: their requests are the same
        "wasted": turns[0]["wasted"],
    }


def requests_table(record: Figures) -> Table:
    """Return the figures of all contenders for a number of requests."""
    bound, rows = record["bound_tokens_per_s"], []
    for name, row in record["rows"].items():
        speeds = [f"{row['tokens_per_s']:,.1f}", f"{row['times_as_fast']:.2f}"]
        speeds.append(f"{row['tokens_per_s'] / bound:.2f}")
        memory = ["-" if row[key] is None else f"{row[key]:,}" for key in ("held", "wasted")]
        rows.append([name, *speeds, *memory, "yes" if row["same_tokens"] else "NO"])
    rows.append(["bound", f"{bound:,.1f}", "-", "1.00", "-", "-", "-"])
    header = ["", "tokens/s", "times as fast", "of the bound", "bytes held", "wasted"]
    return Table([*header, "same tokens"], rows)


def requests_report(counts: dict[str, Figures], markdown: bool = False) -> str:
    """Return a table for each number of requests, after the conditions of its measurement unless
    they are those of the table before."""
    parts: list[str | Table] = []
    conditions, failed = "", {}  # of the table before
    for count, record in sorted(counts.items(), key=lambda item: int(item[0])):
        conditions_here = conditions_of_requests(record)
        if conditions_here != conditions:
            parts.append(conditions_here)
            conditions = conditions_here
        prompts, new = record["prompts"], record["new"]
        parts.append(
            f"{count} request{'' if count == '1' else 's'}, all there at the beginning; prompts of "
            f"{min(prompts)} to {max(prompts)} tokens, {min(new)} to {max(new)} to write: {sum(new):,} in all:"
        )
        parts.append(requests_table(record))
        if failed != record["failed"]:
            failed = record["failed"]
            parts += [f"Not measured: {name} ({why})." for name, why in failed.items()]
    return page(parts, markdown)


def conditions_of_requests(record: Figures) -> str:
    """Return where and when requests were served."""
    return (
        f"{record['model']}, {record['geometry']['weights'] / 1e6:,.0f} MB of weights in float32, read in "
        f"{record['read_ms']:.1f} ms; {record['machine']}; {threads_text(record)}; {turns_text(record)}, "
        f"{record['date']}."
    )
