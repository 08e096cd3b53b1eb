"""Many requests of different lengths at once: their total tokens/s, memory, and the cost of gathering blocks.

`python3 -m benchmarks --requests` gives all contenders the same weights and requests, and lets them take turns.
"""

import random
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import clock, floors
from benchmarks.processes import in_turns
from benchmarks.runners import Ours, Transformers, Where
from benchmarks.words import Figures, words
from gpt_kv_cache import GPT
from paged import PagedCache, Server
from studies.paging import Record, one_at_a_time
from support.tables import Table

BASE, PAGED = "gpt_kv_cache.py, one at a time", "paged.py"
COUNTS = (1, 4, 16, 64)
SIZE, CHUNK = 16, 256  # tokens of a block, and of a prompt's pass
Prompts, Limits = list[list[int]], list[int]  # ids of each prompt, tokens to write after each
Served = tuple[list[list[int]], int | None, int | None]  # texts, the most bytes held, those wasted


def requests_of(count: int, vocab_size: int, n_ctx: int) -> tuple[Prompts, Limits]:
    """Return the first of a fixed list of requests: prompts of a 32nd to half of the context, a 32nd to an eighth of it
    to write, both drawn evenly on a logarithmic scale."""
    rng = random.Random(0)
    prompts, limits = [], []
    for _ in range(count):
        length, new = (round(n_ctx / 32 * scale ** rng.random()) for scale in (16, 4))
        prompts.append([rng.randrange(vocab_size) for _ in range(length)])
        limits.append(new)
    return prompts, limits


# --- The contenders ---------------------------------------------------------------------------------------------------


def paged(model: GPT, prompts: Prompts, limits: Limits) -> Served:
    """Decode all texts together, from one pool of KV blocks."""
    pairs = [*zip(prompts, limits, strict=True)]
    blocks = sum(-(-(len(ids) + new - 1) // SIZE) for ids, new in pairs)
    server = Server(model, PagedCache(model, blocks, SIZE), CHUNK)
    for ids, new in pairs:
        server.add(ids, new)
    record = Record(server)
    token = server.cache.pool[..., 0, 0, :].nbytes
    return record.texts, record.used * SIZE * token, record.wasted * token


def padded(model: Any, prompts: Prompts, limits: Limits) -> Served:
    """Decode all texts as one batch of transformers, in which each is as long as the longest."""
    width, new = max(map(len, prompts)), max(limits)
    padding = [width - len(ids) for ids in prompts]
    rows = [[0] * n + ids for n, ids in zip(padding, prompts, strict=True)]
    seen = [[0] * n + [1] * (width - n) for n in padding]
    done = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    written = done.sequences[:, width:].tolist()
    texts = [text[:limit] for text, limit in zip(written, limits, strict=True)]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in done.past_key_values.layers)
    real = sum(map(len, prompts)) + sum(limits) - len(limits)  # a text's last token is never read
    return texts, held, held - held * real // (len(prompts) * (width + new - 1))


def continuous(model: Any, prompts: Prompts, limits: Limits) -> Served:
    """Decode all texts by transformers' continuous batching, which doesn't say what it holds."""
    import transformers

    blocks = sum(-(-(len(ids) + new) // SIZE) for ids, new in zip(prompts, limits, strict=True))
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        page_size=SIZE, num_blocks=blocks + 1, max_batch_tokens=CHUNK
    )
    texts = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        names = [
            manager.add_request(ids, max_new_tokens=new)
            for ids, new in zip(prompts, limits, strict=True)
        ]
        while len(texts) < len(prompts):
            if (result := manager.get_result(timeout=1)) and result.is_finished():
                if result.error:
                    raise ValueError(result.error)
                texts[result.request_id] = result.generated_tokens
            elif not result and not manager.is_running():
                raise ValueError("its thread ended")
    return [texts[name] for name in names], None, None


CONTENDERS = {  # each decodes the prompts with a model
    BASE: one_at_a_time,
    PAGED: paged,
    "transformers, padded generate": padded,
    "transformers, continuous batching": continuous,
}


def served(
    name: str, where: Where, requests: dict[int, tuple[Prompts, Limits]]
) -> dict[int, Figures]:
    """Return the figures of a contender for each number of requests, after small ones that warm it up."""
    serve = CONTENDERS[name]
    runner = Ours if name in (BASE, PAGED) else Transformers
    model = runner(where).model
    serve(model, [[1, 2, 3], [1]], [3, 2])
    found = {}
    for count, (prompts, limits) in requests.items():
        ms, (texts, held, wasted) = clock(partial(serve, model, prompts, limits))
        found[count] = {"seconds": ms / 1e3, "tokens": texts, "held": held, "wasted": wasted}
    return found


# --- Measuring, and the record ----------------------------------------------------------------------------------------


def measure(
    turns: int, threads: int, where: Where, geometry: dict[str, int], counts: Sequence[int]
) -> Figures:
    """Return the record of each number of requests: the medians over turns of every contender, and the bound: a
    prompt's products, then all weights once for each further token of the text that is written longest.

    One that fails is left out, and said in "failed". Raises ValueError if BASE fails, or PAGED.
    """
    vocab_size, n_ctx = geometry["vocab_size"], geometry["n_ctx"]
    requests = {count: requests_of(count, vocab_size, n_ctx) for count in counts}
    rows = n_ctx // 2
    jobs = {"floor": (floors, where.device, geometry, [rows])}
    jobs |= {name: (served, name, where, requests) for name in CONTENDERS}
    found, failed = in_turns(jobs, turns, threads, needed=("floor", BASE, PAGED))
    floor = found.pop("floor")
    read = geometry["weights"] / median(f["bytes_per_ms"] for f in floor) / 1e3  # seconds a pass
    token = median(f["products_ms"][str(rows)] for f in floor) / rows / 1e3
    result = {}
    for count, (prompts, limits) in requests.items():
        lengths = [len(ids) for ids in prompts]
        bound = token * sum(lengths) + read * (max(limits) - 1)
        base = [turn[count] for turn in found[BASE]]
        result[str(count)] = {
            "read_ms": 1e3 * read,
            "failed": failed,
            "prompts": lengths,
            "new": limits,
            "bound_tokens_per_s": sum(limits) / bound,
            "rows": {
                name: figures([turn[count] for turn in turns], base, sum(limits))
                for name, turns in found.items()
            },
        }
    return result


def figures(turns: list[Figures], base: list[Figures], tokens: int) -> Figures:
    """Return the figures of a contender that wrote so many tokens in each turn; base: the turns of BASE."""
    seconds = [turn["seconds"] for turn in turns]
    pairs = [*zip(base, turns, strict=True)]
    return {
        "tokens_per_s": tokens / median(seconds),
        "times_as_fast": median(b["seconds"] / turn["seconds"] for b, turn in pairs),
        "same_tokens": all(turn["tokens"] == b["tokens"] for b, turn in pairs),
        "held": turns[0]["held"],  # of all turns: their requests are the same
        "wasted": turns[0]["wasted"],
    }


def table_of(found: Figures) -> Table:
    """Return the figures of all contenders for a number of requests."""
    bound, rows = found["bound_tokens_per_s"], []
    for name, row in found["rows"].items():
        speeds = [f"{row['tokens_per_s']:,.1f}", f"{row['times_as_fast']:.2f}"]
        speeds.append(f"{row['tokens_per_s'] / bound:.2f}")
        memory = ["-" if row[key] is None else f"{row[key]:,}" for key in ("held", "wasted")]
        rows.append([name, *speeds, *memory, "yes" if row["same_tokens"] else "NO"])
    rows.append(["bound", f"{bound:,.1f}", "-", "1.00", "-", "-", "-"])
    header = ["", "tokens/s", "times as fast", "of the bound", "bytes held", "wasted"]
    return Table([*header, "same tokens"], rows)


def summary(counts: dict[str, Figures], markdown: bool = False) -> str:
    """Return a table for each number of requests, after what it was measured on if that is new."""
    records = sorted(counts.items(), key=lambda item: int(item[0]))
    return words("requests", records, table_of, markdown=markdown)
