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
from benchmarks.report import FLOOR, Row, has_setting, run_in_turns
from benchmarks.runners import Ours, Setup, Transformers
from demos.serving import ServingRecord, one_at_a_time, pad_prompts, padded_result
from gpt_kv_cache import GPT
from paged import PagedCache, Server

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
) -> dict[int, Row]:
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
            "texts": count,
            "seconds": milliseconds / 1e3,
            "written": texts,
            "held": held_bytes,
            "wasted": wasted_bytes,
        }
    return figures_by_count


# --- Measuring them ---------------------------------------------------------------------------------------------------


def measure_requests(
    setup: Setup, geometry: Row, threads: Sequence[int], turns: int, counts: Sequence[int]
) -> list[Row]:
    """Return the rows of each number of requests, and of the bound, which is the time of the prompts' matrix products,
    and of reading all weights once for each further token of the longest answer.

    A contender that fails is left out, and "absent" says why. Raises ValueError if BASE or PAGED fails.
    """
    vocab_size, n_ctx = geometry["vocab_size"], geometry["n_ctx"]
    requests = {count: draw_requests(count, vocab_size, n_ctx) for count in counts}
    prompt_tokens = n_ctx // 2
    jobs = {name: (measure_contender, name, setup, requests) for name in CONTENDERS}
    jobs[FLOOR] = (measure_floors, setup.device, geometry, [prompt_tokens])
    rows, floor_turns = run_in_turns(jobs, threads, turns, needed=[BASE, PAGED])
    for number, own_turns in floor_turns.items():
        pass_ms = geometry["weights"] / median(turn["bytes_per_ms"] for turn in own_turns)
        products_ms = median(turn["products_ms"][prompt_tokens] for turn in own_turns)
        for count, (prompts, limits) in requests.items():
            lengths = [len(ids) for ids in prompts]
            bound_ms = products_ms / prompt_tokens * sum(lengths) + pass_ms * (max(limits) - 1)
            setting = {"threads": number, "texts": count}
            bound = {"name": "bound", "step_ms": pass_ms, "prompts": lengths, "new": limits}
            bound |= setting | {"seconds": bound_ms / 1e3}
            rows.append(bound)
            for row in rows:
                if has_setting(row, setting):
                    row["tokens_per_s"] = sum(limits) / row["seconds"]
                    row["of_bound"] = bound["seconds"] / row["seconds"]
    return rows
