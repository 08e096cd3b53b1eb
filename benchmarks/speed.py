"""Time to first token and decoding speed of gpt_kv_cache.py, beside other implementations, at GPT-2's geometry.

  python benchmarks/speed.py                                  ours, and transformers where it is installed
  python benchmarks/speed.py --llms-from-scratch FOLDER       and a clone of rasbt/LLMs-from-scratch

All run in one process with random weights, batch 1, the same thread count, turn by turn; the figures are medians.
The roofline is the time in which this machine can read the weights once, which every decoded token has to.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts: waiting threads must not spin

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from load_gpt2_weights import CommandLine, whole_number

Contender = Callable[[torch.Tensor], Iterator[object]]  # ids (1, T) -> an iterator that yields once per new token


def ours(config: GPTConfig) -> Contender:
    model = GPT(config).eval()
    return lambda ids: generate(model, ids, config.n_ctx - ids.size(1), cache=KVCache())


def transformers_dynamic(config: GPTConfig) -> Contender:
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head)).eval()

    @torch.inference_mode()
    def decode(ids: torch.Tensor) -> Iterator[object]:
        cache = DynamicCache()
        while True:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            yield ids

    return decode


def llms_from_scratch(config: GPTConfig, folder: Path) -> Contender:
    file = folder / "ch04" / "03_kv-cache" / "gpt_with_kv_cache.py"
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}")
    spec = importlib.util.spec_from_file_location("llms_from_scratch", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    geometry = {
        "vocab_size": config.vocab_size,
        "context_length": config.n_ctx,
        "emb_dim": config.n_embd,
        "n_heads": config.n_head,
        "n_layers": config.n_layer,
        "drop_rate": 0.0,
        "qkv_bias": True,
    }
    model = module.GPTModel(geometry).eval()

    @torch.inference_mode()
    def decode(ids: torch.Tensor) -> Iterator[object]:
        model.reset_kv_cache()
        while True:
            ids = model(ids, use_cache=True)[:, -1].argmax(-1, keepdim=True)
            yield ids

    return decode


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def read_bandwidth() -> float:
    """Return the bytes per millisecond at which this process can read memory: the best of sums and products."""
    matrix = torch.rand(8192, 16384)  # 512 MiB
    vector = torch.rand(1, 8192)
    calls = (lambda: matrix.sum(), lambda: vector @ matrix, lambda: matrix @ torch.ones(16384))
    return matrix.nbytes / min(milliseconds(call) for call in calls for _ in range(5))


def main() -> None:
    cli = CommandLine(__doc__, example="python benchmarks/%(prog)s --threads 2")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    cli.add_argument("--repeats", type=whole_number(1), default=7, metavar="N", help="turns of each contender")
    cli.add_argument("--prompt-tokens", type=whole_number(1, 1000), default=1000, metavar="N", help="for the prefill")
    cli.add_argument(
        "--context", type=whole_number(1, 900), default=100, metavar="N", help="cached tokens, for decoding"
    )
    cli.add_argument("--decode-tokens", type=whole_number(1, 100), default=16, metavar="N", help="decoded in each turn")
    cli.add_argument("--llms-from-scratch", type=Path, metavar="FOLDER", help="a clone of rasbt/LLMs-from-scratch")
    cli.add_argument("--out", type=Path, metavar="FILE", help="also write the figures to this JSON file")
    with cli.parse() as args:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = GPTConfig()
    contenders = {"gpt_kv_cache.py": ours(config)}
    if importlib.util.find_spec("transformers"):
        contenders["transformers, DynamicCache"] = transformers_dynamic(config)
    if args.llms_from_scratch:
        contenders["LLMs-from-scratch, concat cache"] = llms_from_scratch(config, args.llms_from_scratch)
    prompt = torch.randint(config.vocab_size, (1, max(args.prompt_tokens, args.context)))

    first: dict[str, list[float]] = {name: [] for name in contenders}
    each: dict[str, list[float]] = {name: [] for name in contenders}
    bandwidth = []
    for turn in range(args.repeats + 1):  # the first is a warm-up
        bandwidth.append(read_bandwidth())
        for name, contender in contenders.items():
            stream = contender(prompt[:, : args.prompt_tokens])
            first[name].append(milliseconds(lambda s=stream: next(s)))
            stream = contender(prompt[:, : args.context])
            next(stream)
            each[name] += [milliseconds(lambda s=stream: next(s)) for _ in range(args.decode_tokens)]
        if turn == 0:
            for times in (*first.values(), *each.values()):
                times.clear()

    with torch.device("meta"):
        weights = sum(p.nbytes for p in GPT(config).parameters())
    roofline = weights / statistics.median(bandwidth)
    print(
        f"{weights / 1e6:.0f} MB of weights, read at {statistics.median(bandwidth) / 1e6:.1f} GB/s: "
        f"{roofline:.1f} ms per token"
    )
    print(f"{'':32}{'prefill ms':>12}{'ms/token':>10}{'tokens/s':>10}{'of roofline':>13}{'speed, ours = 1':>17}")
    base = statistics.median(each["gpt_kv_cache.py"])
    rows = {}
    for name in contenders:
        ttft, token = statistics.median(first[name]), statistics.median(each[name])
        rows[name] = {"ttft_ms": ttft, "ms_per_token": token}
        print(f"{name:32}{ttft:12.0f}{token:10.1f}{1000 / token:10.1f}{roofline / token:13.2f}{base / token:17.2f}")
    if args.out:
        record = {
            "command": f"python benchmarks/speed.py --threads {args.threads} --context {args.context}"
            + (" --llms-from-scratch FOLDER" if args.llms_from_scratch else ""),
            "threads": args.threads,
            "prompt_tokens": args.prompt_tokens,
            "context": args.context,
            "roofline_ms_per_token": roofline,
            "contenders": rows,
        }
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
