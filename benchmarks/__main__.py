"""Where this project stands: decoding, time to first token, reuse of a prefix and memory, beside other implementations.

`python -m benchmarks` gives every implementation the same weights and lets them take turns, one at a time; each has a
process of its own, a new one in every turn (where memory comes to lie is luck, which a process keeps). Figures are
medians over turns, and shares of what the machine could do in the same turns: read the weights once a token, and
compute nothing but the matrix products of a prompt. `--ablate` measures our own choices one by one, and where the time
goes; `--scale` predicts larger models from recorded figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts: waiting threads must not spin

import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.utils import tqdm
from safetensors.torch import save_file
from torch import Tensor, nn

import gpt_kv_cache
from benchmarks import scale
from benchmarks.contenders import CONTENDERS, Clock, Contender, Ours, timed
from benchmarks.recycling import figure
from benchmarks.refreshing import table
from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import CommandLine, find_file, load_model, read_json, whole_number, write_atomically

ROOT = Path(__file__).resolve().parent.parent
BASE = "gpt_kv_cache.py"  # what ratios are to
DECODED, UNCACHED = 16, 3  # tokens after each prompt; of an implementation that reads the whole text for each
SLOW = ("gpt_baseline.py",)
NARROW = 8  # head size of the model whose steps are nearly all overhead; its vocabulary is as small as its context
BUSY = 0.10  # more than this share of the time without a processor, or of change of the bandwidth, is a disturbance
SIZES = {  # GPT-2's own
    "124M": {}, "355M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "774M": {"n_layer": 36, "n_head": 20, "n_embd": 1280}, "1558M": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}  # fmt: skip


# --- Weights --------------------------------------------------------------------------------------------------------


@contextmanager
def weights(model: str) -> Iterator[Path]:
    """Yield a folder in Hugging Face format: of a known model, or of random weights of one of SIZES, for as long as
    they are needed."""
    if model not in SIZES:
        yield find_file(model, "config.json").parent
        return
    with random_weights(GPTConfig(**SIZES[model])) as folder:
        yield folder


@contextmanager
def random_weights(config: GPTConfig) -> Iterator[Path]:
    """Yield a folder in Hugging Face format with random weights, the same every time, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        torch.manual_seed(0)
        tensors = {f"transformer.{name}": p.detach().contiguous() for name, p in GPT(config).named_parameters()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        written = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
                   "n_positions": config.n_ctx, "n_embd": config.n_embd, "n_layer": config.n_layer,
                   "n_head": config.n_head, "n_inner": config.n_inner}  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(written))
        yield Path(folder)


def geometry_of(folder: Path) -> dict[str, int]:
    """Return the sizes that a machine's floors depend on, and the bytes of the weights in float32."""
    with torch.device("meta"):
        c = read_json(folder / "config.json")
        config = GPTConfig(c["vocab_size"], c["n_positions"], c["n_layer"], c["n_head"], c["n_embd"],
                           c.get("head_dim"), c.get("n_inner"))  # fmt: skip
        nbytes = sum(p.nbytes for p in GPT(config).parameters())
    return {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "n_inner": config.n_inner,
            "n_ctx": config.n_ctx, "attention": config.n_head * config.head_dim, "vocab_size": config.vocab_size,
            "weights": nbytes}  # fmt: skip


# --- Processes ------------------------------------------------------------------------------------------------------


class Worker:
    """A contender in a process of its own. It waits for requests, and does nothing in between."""

    def __init__(self, name: str, folder: Path, device: str, threads: int, peer: Path | None) -> None:
        command = [sys.executable, "-m", "benchmarks.contenders", name, str(folder), device, str(threads)]
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self.process = subprocess.Popen([*command, *([str(peer)] if peer else [])], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)  # fmt: skip
        self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer. Raises ValueError, with the last line that it printed, if the process has ended."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise ValueError(f"{self.name} failed: {(self.errors.read().strip() or 'no message').splitlines()[-1]}")
        return json.loads(line)

    def __call__(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        with suppress(BrokenPipeError):  # of one that has failed
            self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def available(contender: Contender, device: str, peer: Path | None) -> str:
    """Return why a contender can't take part, "" if it can."""
    if contender.package and not importlib.util.find_spec(contender.package):
        return f"the package {contender.package} is not installed"
    if contender.file and not (peer and (peer / contender.file).is_file()):
        return f"needs --peer-path with {contender.file}"
    if contender.device and contender.device != device:
        return f"runs on {contender.device} only"
    return ""


# --- Measuring ------------------------------------------------------------------------------------------------------


def measure(folder: Path, names: Sequence[str], lengths: Sequence[int], batches: Sequence[int], turns: int, device: str,
            threads: int, peer: Path | None) -> dict[str, Any]:  # fmt: skip
    """Return all raw figures: of every contender for each prompt length, and for larger batches of the shortest; and of
    the machine's floors.

    One that fails is left out from there on, and said in "failed".
    """
    geometry = geometry_of(folder)
    generator = torch.Generator().manual_seed(0)
    cells = [(batches[0], T) for T in lengths] + [(B, lengths[0]) for B in batches[1:]]
    prompts = {(B, T): torch.randint(geometry["vocab_size"], (B, T), generator=generator).tolist() for B, T in cells}
    raw: dict[str, Any] = {name: {f"{B} x {T}": [] for B, T in prompts} for name in names}
    reuse: dict[str, list[float]] = {name: [] for name in names}
    floor: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    longest = max(lengths)

    def ask(name: str, **request: Any) -> dict[str, Any] | None:
        if name in failed:
            return None
        try:
            return workers[name](**request)
        except ValueError as error:
            failed[name] = str(error)
            return None

    for _ in tqdm(range(turns), desc="turns", leave=False):
        with ExitStack() as stack:
            workers = {}
            for name in ["floor", *names]:
                try:
                    workers[name] = Worker(name, folder, device, threads, peer)
                    stack.callback(workers[name].close)
                except ValueError as error:
                    failed[name] = str(error)
            for name in names:  # warm up
                ask(name, ids=prompts[batches[0], longest], decode=0 if name in SLOW else 2, cached=0)
            floor.append(workers["floor"](geometry=geometry, lengths=[*lengths]))
            for (B, T), ids in prompts.items():
                for name in names:
                    decode = UNCACHED if name in SLOW else DECODED
                    raw[name][f"{B} x {T}"].append(ask(name, ids=ids, decode=decode, cached=0))
            for name in names:
                done = ask(name, ids=prompts[batches[0], longest], decode=0, cached=longest * 9 // 10)
                reuse[name] += [done["resume_ms"]] if done and done["resume_ms"] else []
    if BASE in failed:
        raise ValueError(failed[BASE])
    return {"geometry": geometry, "floor": floor, "contenders": {n: r for n, r in raw.items() if n not in failed},
            "reuse": reuse, "reuse_lengths": [longest, longest * 9 // 10], "failed": failed}  # fmt: skip


def overheads(geometry: dict[str, int], names: Sequence[str], turns: int, device: str, threads: int,
              peer: Path | None) -> dict[str, float]:  # fmt: skip
    """Return, by contender, the milliseconds of a step that aren't arithmetic: those of a model with as many layers and
    heads, but so narrow that there is hardly anything to compute."""
    layers, heads = geometry["n_layer"], geometry["n_head"]
    config = GPTConfig(vocab_size=64, n_ctx=64, n_layer=layers, n_head=heads, n_embd=NARROW * heads)
    with random_weights(config) as folder:
        raw = measure(folder, names, [32], [1], turns, device, threads, peer)
    return {name: median(min(t["steps_ms"]) for t in cells["1 x 32"]) for name, cells in raw["contenders"].items()}


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the figures: medians over turns, ratios turn by turn, shares of the floors, and what disturbed them (of
    waiting, the share of the time that a process of one thread didn't compute)."""
    floor, geometry = raw["floor"], raw["geometry"]
    speeds = [f["bytes_per_ms"] for f in floor]
    roofline = geometry["weights"] / median(speeds)
    rows: dict[str, Any] = {}
    waited = []
    for name, cells in raw["contenders"].items():
        rows[name] = {}
        for cell, turns in cells.items():
            B, T = map(int, cell.split(" x "))
            base = raw["contenders"][BASE][cell]
            steps = [median(t["steps_ms"]) for t in turns]
            ratios = [median(b["steps_ms"]) / s for b, s in zip(base, steps, strict=True)]
            firsts = [b["first_ms"] / t["first_ms"] for b, t in zip(base, turns, strict=True)]
            products = median(f["products_ms"][str(T)] for f in floor)
            waited += [1 - (t["first_cpu_ms"] + sum(t["steps_cpu_ms"])) / (t["first_ms"] + sum(t["steps_ms"]))
                       for t in turns]  # fmt: skip
            rows[name][cell] = {
                "step_ms": median(steps), "tokens_per_s": 1e3 * B / median(steps), "decode_ratio": median(ratios),
                "of_roofline": roofline / median(steps), "first_ms": median(t["first_ms"] for t in turns),
                "first_ratio": median(firsts),
                "of_products": B * products / median(t["first_ms"] for t in turns),
                "same_tokens": turns[0]["tokens"] == base[0]["tokens"][: len(turns[0]["tokens"])],
                "cache_bytes": turns[-1]["nbytes"], "peak_bytes": turns[-1]["peak_bytes"],
            }  # fmt: skip
        if raw["reuse"][name]:
            rows[name]["reuse_ms"] = median(raw["reuse"][name])
        if name in raw["overheads"]:
            rows[name]["overhead_ms"] = raw["overheads"][name]
    unrest = (max(speeds) - min(speeds)) / median(speeds)
    return {"rows": rows, "roofline_ms": roofline, "gb_per_s": median(speeds) / 1e6,
            "products_ms": {T: median(f["products_ms"][T] for f in floor) for T in floor[0]["products_ms"]},
            "bandwidth_change": unrest, "waited": median(waited)}  # fmt: skip


# --- Ablation -------------------------------------------------------------------------------------------------------


def ablations() -> dict[str, Callable[[GPT], None]]:
    """Return, by what they undo, the changes that turn a model into one without one of our choices."""

    def other_layout(model: GPT) -> None:
        for module in model.modules():
            if type(module).__name__ == "Conv1D":
                module.weight.data = module.weight.data.t().contiguous().t()

    def head_by_rows(model: GPT) -> None:
        model.wte.weight.data = model.wte.weight.data.contiguous()

    def all_logits(model: GPT) -> None:
        forward = model.forward
        model.forward = lambda ids, cache=None, last_only=False: forward(ids, cache)

    def explicit_softmax(model: GPT) -> None:
        def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~mask, float("-inf"))
            return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

        for block in model.h:
            block.attn.forward = attend.__get__(block.attn)

    def three_products(model: GPT) -> None:
        def project(self: nn.Module, x: Tensor) -> list[Tensor]:
            parts = zip(self.parts, self.c_attn.bias.chunk(3), strict=True)
            return [F.linear(x, w.t(), b).unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2) for w, b in parts]

        for block in model.h:
            block.attn.parts = [w.contiguous() for w in block.attn.c_attn.weight.data.chunk(3, 1)]
            block.attn.project = project.__get__(block.attn)

    def no_mask(model: GPT) -> None:
        def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            first = q.size(2) == k.size(2)  # with fewer queries than keys PyTorch would align the mask top left
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if first else mask, is_causal=first)
            return self.c_proj(y.transpose(1, 2).flatten(2))

        for block in model.h:
            block.attn.forward = attend.__get__(block.attn)

    return {
        "weights stored (out, in), as nn.Linear does": other_layout,
        "the head's weights row by row": head_by_rows,
        "logits of all positions": all_logits,
        "softmax(q k) v written out": explicit_softmax,
        "q, k and v by a product each": three_products,
        "one mask for all cases: is_causal=True for a first prompt": no_mask,
    }


def ablate(folder: Path, lengths: Sequence[int], turns: int, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return how much longer decoding and the first token take without each choice, in one process, in turn; every turn
    loads the weights anew."""
    clock, generator, vocab_size = Clock(device), torch.Generator().manual_seed(0), geometry_of(folder)["vocab_size"]
    prompts = {T: torch.randint(vocab_size, (1, T), generator=generator).to(device) for T in lengths}
    undone = {"as it is": lambda model: None, **ablations()}
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {(name, T): [] for name in undone for T in lengths}
    for _ in tqdm(range(turns), desc="turns", leave=False):
        runners = {}
        for name, undo in undone.items():
            runners[name] = Ours(folder, device, gpt_kv_cache, lambda config: gpt_kv_cache.KVCache())
            undo(runners[name].model)
            timed(runners[name], clock, prompts[max(lengths)], 2)  # warms up
        for T, ids in prompts.items():
            for name, runner in runners.items():
                runs[name, T].append(timed(runner, clock, ids, DECODED))
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (name, T), several in runs.items():
        base = runs["as it is", T]
        if several[0]["tokens"] != base[0]["tokens"]:
            raise ValueError(f"without one choice ({name}) other tokens are written")
        result.setdefault(name, {})[str(T)] = {
            "step_ms": median(median(r["steps_ms"]) for r in several),
            "first_ms": median(r["first_ms"] for r in several),
            "decode": median(median(r["steps_ms"]) / median(b["steps_ms"]) for r, b in zip(several, base, strict=True)),
            "first": median(r["first_ms"] / b["first_ms"] for r, b in zip(several, base, strict=True)),
        }
    return result


def where_time_goes(folder: Path, T: int, device: str) -> dict[str, float]:
    """Return the shares of the time to the first token of T by PyTorch's profiler, the largest first."""
    kinds = {"addmm": "products with weights", "mm": "products with weights", "gelu": "GELU", "copy_": "copies",
             "cat": "copies"}  # fmt: skip
    model = load_model(str(folder), model_class=GPT, device=device)
    ids = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(2):  # the first warms up
        with torch.profiler.profile() as profile:
            model(ids, gpt_kv_cache.KVCache(), last_only=True)
    shares: dict[str, float] = {}
    events = profile.key_averages()
    times = {e.key: e.self_device_time_total if device == "cuda" else e.self_cpu_time_total for e in events}
    for key, took in times.items():
        kind = "attention" if "attention" in key else kinds.get(key.removeprefix("aten::"), "all else")
        shares[kind] = shares.get(kind, 0.0) + took / sum(times.values())
    return dict(sorted(shares.items(), key=lambda item: (item[0] == "all else", -item[1])))


# --- Output ---------------------------------------------------------------------------------------------------------


def print_summary(record: dict[str, Any]) -> None:
    """Print what was measured, a line a contender."""
    rows, lengths, batches = record["rows"], record["lengths"], record["batches"]
    print(f"{record['model']}, {record['geometry']['weights'] / 1e6:,.0f} MB of weights in float32; "
          f"{record['machine']}; {record['threads']} thread{'s' * (record['threads'] > 1)}; medians of "
          f"{record['turns']} turns")  # fmt: skip
    print(f"read at {record['gb_per_s']:.1f} GB/s: {record['roofline_ms']:.1f} ms a token at least; the products of a "
          f"prompt: {', '.join(f'{ms:,.0f} ms for {T}' for T, ms in record['products_ms'].items())}")  # fmt: skip
    for B in batches:
        cells = [cell for cell in rows[BASE] if cell.startswith(f"{B} x ")]
        header = ["", *(cell.partition(" x ")[2] for cell in cells)]
        print(f"\ndecoding, tokens/s (share of the roofline, ratio to {BASE}) after so many tokens, batch {B}")
        print(table(header, [
            [name, *(f"{x['tokens_per_s']:,.1f} ({x['of_roofline']:.2f}, {x['decode_ratio']:.2f})"
                     for x in (r[c] for c in cells))] for name, r in rows.items()]))  # fmt: skip
        print(f"\nfirst token, ms (share of the products alone, ratio to {BASE}), batch {B}")
        print(table(header, [
            [name, *(f"{x['first_ms']:,.0f} ({x['of_products']:.2f}, {x['first_ratio']:.2f})"
                     for x in (r[c] for c in cells))] for name, r in rows.items()]))  # fmt: skip
    print("\nbytes of cache after so many tokens; most memory that the process had, in MB")
    print(table(["", *map(str, lengths), "process"], [
        [name, *(f"{r[f'{batches[0]} x {T}']['cache_bytes']:,}" for T in lengths),
         f"{max(x['peak_bytes'] for cell, x in r.items() if ' x ' in cell) / 1e6:,.0f}"]
        for name, r in rows.items()]))  # fmt: skip
    print(f"\noverhead: ms a step of a model with as many layers, {NARROW * record['geometry']['n_head']} wide")
    print(table(["", "ms"], [[name, f"{r['overhead_ms']:.2f}"] for name, r in rows.items() if "overhead_ms" in r]))
    total, cached = record["reuse_lengths"]
    reuse = [f"{name} {r['reuse_ms']:,.0f} ms ({r['reuse_ms'] / r[f'{batches[0]} x {total}']['first_ms']:.2f} of cold)"
             for name, r in rows.items() if "reuse_ms" in r]  # fmt: skip
    print(f"\nfirst token of {total} with {cached} of them cached: {'; '.join(reuse)}")
    for name in record["different"]:
        print(f"{name} writes other tokens than {BASE}")
    for name, why in record["absent"].items():
        print(f"not measured: {name} ({why})")
    if record["disturbed"]:
        print(f"THE MACHINE WAS DISTURBED: {disturbance(record)}; measure again when it is quiet")


def disturbance(record: dict[str, Any]) -> str:
    """Return by how much the machine's speed changed, and what a single thread waited for it."""
    waited = f", and processes waited for {record['waited']:.0%} of their time" if record["threads"] == 1 else ""
    return f"its bandwidth changed by {record['bandwidth_change']:.0%} between turns{waited}"


def print_ablation(result: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print what each choice is worth."""
    lengths = list(result["as it is"])
    header = ["without", *(f"{what}, {T}" for what in ("decoding", "first token") for T in lengths)]
    print(f"{BASE}: how many times as long without each of its choices, after so many tokens\n")
    print(table(header, [[name, *(f"{r[T][what]:.2f}" for what in ("decode", "first") for T in lengths)]
                         for name, r in result.items() if name != "as it is"]))  # fmt: skip


def print_shares(shares: dict[str, float], T: int) -> None:
    """Print where the time to the first token goes."""
    print(f"\nfirst token of {T}: {', '.join(f'{kind} {share:.0%}' for kind, share in shares.items())}")


def draw(record: dict[str, Any], out: Path) -> None:
    """Draw decoding, the first token and the bytes against the length of the text, and what cannot be beaten."""
    lengths, B = record["lengths"], record["batches"][0]
    marks = ("o-", "s--", "^-.", "D:", "v-", "*--", "P-.", "X:")

    def lines(axes: Any, key: str, scale: float, label: str = "", floor: Sequence[float] = ()) -> None:
        for i, (name, r) in enumerate(record["rows"].items()):
            values = [scale * r[f"{B} x {T}"][key] for T in lengths]
            if any(values):  # without a cache there are no bytes of it
                axes.plot(lengths, values, marks[i % 8], color=f"C{i % 10}", markersize=5, linewidth=1, label=name)
        if label:
            axes.plot(lengths, floor, color="black", linewidth=2, label=label)
        axes.set_yscale("log")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)

    roofline = [1e3 / record["roofline_ms"]] * len(lengths)
    figure(out / "decoding.png",
           lambda axes: lines(axes, "tokens_per_s", 1, "float32 weights read,\nnothing else", roofline),
           xlabel="tokens in the cache", ylabel="tokens/s",
           title=f"Decoding, {record['model']}, batch {B}")  # fmt: skip
    products = list(record["products_ms"].values())
    figure(out / "first_token.png", lambda axes: lines(axes, "first_ms", 1, "matrix products alone", products),
           xlabel="tokens of the prompt", ylabel="ms",
           title=f"Time to the first token, {record['model']}, batch {B}")  # fmt: skip
    figure(out / "memory.png", lambda axes: lines(axes, "cache_bytes", 1e-6), xlabel="tokens of the prompt",
           ylabel="MB", title=f"Bytes of the cache, {record['model']}, batch {B}")  # fmt: skip


def machine(device: str) -> str:
    """Return what the figures were taken on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")] if Path("/proc/cpuinfo").exists() else []  # fmt: skip
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    cli = CommandLine(__doc__, example="python -m benchmarks --threads 2")
    names = [contender.name for contender in CONTENDERS]
    cli.add_argument("--model", default="124M", metavar="NAME",
                     help=f"random weights of the size of {', '.join(SIZES)}, or a model's name or folder")
    cli.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {'; '.join(names)}; default: all")
    cli.add_argument("--peer-path", type=Path, metavar="FOLDER",
                     help="a folder with gpt_with_kv_cache.py and gpt_with_kv_cache_optimized.py of LLMs-from-scratch")
    cli.add_argument("--lengths", nargs="+", type=whole_number(2), default=[128, 512, 1000], metavar="N",
                     help="tokens of prompts")
    cli.add_argument("--batches", nargs="+", type=whole_number(1), default=[1, 8], metavar="N",
                     help="texts at once: the fewest of all lengths, more of the shortest only")
    cli.add_argument("--turns", type=whole_number(1), default=5, metavar="N", help="each figure is the median of N")
    cli.add_argument("--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads")
    cli.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    cli.add_argument("--ablate", action="store_true", help="measure our own choices instead")
    cli.add_argument("--scale", metavar="FILE", type=Path, help="predict larger models from a recorded summary.json")
    cli.add_argument("--out", type=Path, metavar="FOLDER", help="where results go; default: results/benchmarks")
    with cli.parse() as args:
        out = args.out or ROOT / "results" / "benchmarks"
        if args.scale:
            print(scale.note(read_json(args.scale)))
            return
        if args.on == "cuda" and not torch.cuda.is_available():
            raise ValueError("--on cuda: there is none that this PyTorch can use; try --on cpu")
        lengths, batches = sorted({*args.lengths}), sorted({*args.batches})
        with weights(args.model) as folder:
            n_ctx = geometry_of(folder)["n_ctx"]
            if lengths[-1] + DECODED > n_ctx:
                raise ValueError(f"{lengths[-1]} tokens and {DECODED} more exceed the context of {args.model}, {n_ctx}")
            out.mkdir(parents=True, exist_ok=True)  # before anything takes time
            about = {"model": args.model, "machine": machine(args.on), "device": args.on, "threads": args.threads,
                     "turns": args.turns, "lengths": lengths, "batches": batches,
                     "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
            if args.ablate:
                torch.set_num_threads(args.threads)
                with torch.no_grad():
                    result = ablate(folder, lengths, args.turns, args.on)
                    shares = where_time_goes(folder, lengths[-1], args.on)
                print_ablation(result)
                print_shares(shares, lengths[-1])
                save(out / "ablation.json", {**about, "without": result, "first_token": shares})
                return
            chosen = [c for c in CONTENDERS if c.name == BASE or c.name in (args.only or names)]
            absent = {c.name: why for c in chosen if (why := available(c, args.on, args.peer_path))}
            taking_part = [c for c in chosen if c.name not in absent]
            raw = measure(folder, [c.name for c in taking_part], lengths, batches, args.turns, args.on, args.threads,
                          args.peer_path)  # fmt: skip
            raw["overheads"] = overheads(raw["geometry"], list(raw["contenders"]), args.turns, args.on, args.threads,
                                         args.peer_path)  # fmt: skip
        absent |= raw["failed"]
        taking_part = [c for c in taking_part if c.name not in absent]
        record = {**about, "geometry": raw["geometry"], "reuse_lengths": raw["reuse_lengths"], "absent": absent,
                  **summary(raw)}  # fmt: skip
        record["different"] = [
            c.name for c in taking_part if c.exact
            and not all(x["same_tokens"] for cell, x in record["rows"][c.name].items() if " x " in cell)
        ]  # fmt: skip
        record["disturbed"] = max(record["bandwidth_change"], record["waited"] if args.threads == 1 else 0) > BUSY
        print_summary(record)
        save(out / "summary.json", record)
        draw(record, out)
        print(f"\nWritten to {out}")


def save(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, lambda file: file.write_text(json.dumps(record, indent=1) + "\n"))


if __name__ == "__main__":
    main()
