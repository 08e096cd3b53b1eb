"""Implementations of GPT-2 that `python -m benchmarks` compares, and the process in which one of them runs.

All get the same weights: a folder in Hugging Face format. A contender is a function from ids (B, T) to an iterator that
yields the greedy next tokens (B, 1), one after each step of its work, the first after the prefill.

`python -m benchmarks.contenders NAME FOLDER DEVICE THREADS [PEER]` serves requests, one JSON object a line, so that the
implementations can take turns without sharing a process.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch starts: waiting threads must not spin

import copy
import importlib.util
import json
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
from load_gpt2_weights import load_model, read_tensors

ENDLESS = 1 << 20  # tokens to write: whoever asks stops


class Runner:
    """An implementation with its weights loaded."""

    nbytes = 0  # of the cache of the last text

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        """Return the iterator of the tokens (B, 1) after ids (B, T)."""
        raise NotImplementedError

    def resume(self, ids: Tensor, cached: int) -> Callable[[], Tensor] | None:
        """Read the first `cached` tokens of ids (1, T); return what reads the others on a copy of that cache, and
        returns the next token. None: this implementation can't."""
        return None


class Ours(Runner):
    """One of our files, with the cache that `new_cache` makes."""

    def __init__(self, folder: Path, device: str, module: Any, new_cache: Callable[[Any], Any] | None,
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        self.model = load_model(str(folder), model_class=module.GPT, device=device, dtype=dtype)
        self.module, self.new_cache, self.cache = module, new_cache, None

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        if self.new_cache is None:
            return self.module.generate(self.model, ids, ENDLESS)
        self.cache = self.new_cache(self.model.config)
        return self.module.generate(self.model, ids, ENDLESS, cache=self.cache)

    def resume(self, ids: Tensor, cached: int) -> Callable[[], Tensor] | None:
        if self.new_cache is None:
            return None
        next(self.start(ids[:, :cached]))
        prefix = self.cache
        return lambda: next(self.module.generate(self.model, ids, 1, cache=prefix.clone()))

    @property
    def nbytes(self) -> int:
        return 0 if self.cache is None else self.cache.nbytes


class Transformers(Runner):
    """transformers' GPT-2 with one of its caches."""

    def __init__(self, folder: Path, device: str, static: bool, compiled: bool = False,
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        import transformers

        self.model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval().to(device)
        if compiled:
            self.model.forward = torch.compile(self.model.forward, mode="reduce-overhead")
        self.static, self.transformers, self.cache = static, transformers, None

    @torch.inference_mode()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        config = self.model.config
        if self.static:
            self.cache = self.transformers.StaticCache(config=config, max_cache_len=config.n_positions)
        else:
            self.cache = self.transformers.DynamicCache()
        while True:
            logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            yield ids

    def resume(self, ids: Tensor, cached: int) -> Callable[[], Tensor] | None:
        next(self.start(ids[:, :cached]))
        prefix = self.cache

        @torch.inference_mode()
        def again() -> Tensor:
            cache = copy.deepcopy(prefix)
            new = self.model(input_ids=ids[:, cached:], past_key_values=cache, use_cache=True, logits_to_keep=1)
            return new.logits[:, -1].argmax(-1, keepdim=True)

        return again

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class FromScratch(Runner):
    """A GPTModel of LLMs-from-scratch: its PyPI package, or the article's files, with a cache or reading the whole text
    for each token."""

    def __init__(self, folder: Path, device: str, module: Any, own_cache: bool, cached: bool = True) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.module, self.own_cache, self.cached = config["n_layer"], module, own_cache, cached
        self.model = module.GPTModel({
            "vocab_size": config["vocab_size"], "context_length": config["n_positions"], "emb_dim": config["n_embd"],
            "n_heads": config["n_head"], "n_layers": config["n_layer"], "drop_rate": 0.0, "qkv_bias": True,
        }).eval().to(device)  # fmt: skip
        fill(self.model, read_tensors(str(folder)))
        self.cache: Any = None

    @torch.inference_mode()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        while not self.cached:
            new = self.model(ids)[:, -1].argmax(-1, keepdim=True)
            yield new
            ids = torch.cat([ids, new], dim=1)
        if self.own_cache:
            self.model.reset_kv_cache()
        else:
            self.model.current_pos, self.cache = 0, self.module.KVCache(self.layers)
        options = {"use_cache": True} | ({} if self.own_cache else {"cache": self.cache})
        while True:
            ids = self.model(ids, **options)[:, -1].argmax(-1, keepdim=True)
            yield ids

    @property
    def nbytes(self) -> int:
        if not self.cached:
            return 0
        if not self.own_cache:
            return sum(kv.nbytes for pair in self.cache.get_all() for kv in pair)
        return sum(b.nbytes for name, b in self.model.named_buffers() if "cache" in name and b is not None)


@torch.no_grad()
def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a GPTModel of LLMs-from-scratch GPT-2's weights: its names, and (out, in) instead of (in, out)."""
    parts = {"tok_emb.weight": "wte.weight", "pos_emb.weight": "wpe.weight", "out_head.weight": "wte.weight",
             "final_norm.scale": "ln_f.weight", "final_norm.shift": "ln_f.bias"}  # fmt: skip
    inner = {"norm1.scale": "ln_1.weight", "norm1.shift": "ln_1.bias", "norm2.scale": "ln_2.weight",
             "norm2.shift": "ln_2.bias", "att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc",
             "ff.layers.2": "mlp.c_proj"}  # fmt: skip
    for name, parameter in model.named_parameters():
        if name in parts:
            tensor = tensors[parts[name]]
        else:
            _, layer, rest = name.split(".", 2)
            stem, _, kind = rest.rpartition(".")
            if "W_" in rest:
                third = ("att.W_query", "att.W_key", "att.W_value").index(stem)
                tensor = tensors[f"h.{layer}.attn.c_attn.{kind}"].chunk(3, -1)[third]
            else:
                tensor = tensors[f"h.{layer}.{inner.get(rest) or f'{inner[stem]}.{kind}'}"]
            tensor = tensor.t() if tensor.dim() == 2 else tensor
        parameter.copy_(tensor)


class CTranslate2(Runner):
    """CTranslate2, an engine in C++, with weights as its own converter makes them. The bytes of its cache are by
    formula: it can't be asked for them, and concatenates keys and values in float32, whatever the weights are."""

    def __init__(self, folder: Path, compute_type: str) -> None:
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        config = json.loads((folder / "config.json").read_text())
        self.n_ctx, self.token_bytes = config["n_positions"], 2 * config["n_layer"] * config["n_embd"] * 4
        names = {str(i): i for i in range(config["vocab_size"])}  # the engine is fed names of tokens
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "0")
        converter = TransformersConverter(str(folder))
        converter.load_tokenizer = lambda *args, **options: SimpleNamespace(get_vocab=lambda: names, **special)
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as made:
            converter.convert(made, force=True)
            with suppress(OSError):  # Linux: the conversion doesn't count as memory that the engine needs
                Path("/proc/self/clear_refs").write_text("5")
            threads = torch.get_num_threads()
            self.generator = ctranslate2.Generator(made, compute_type=compute_type, intra_threads=threads)

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        return self.steps(ids, self.n_ctx + 1 - ids.size(1))

    def steps(self, ids: Tensor, most: int, **options: Any) -> Iterator[Tensor]:
        """Yield up to `most` tokens (B, 1); they are computed one by one in a thread that doesn't wait to be asked."""
        prompts = [[*map(str, row)] for row in ids.tolist()]
        results = self.generator.generate_tokens(prompts, max_length=most, end_token=[], **options)  # nothing ends it
        read = ids.size(1)
        while step := sorted(islice(results, len(ids)), key=lambda result: result.batch_id):
            self.nbytes = len(ids) * read * self.token_bytes
            read += 1
            yield torch.tensor([[result.token_id] for result in step])

    def resume(self, ids: Tensor, cached: int) -> Callable[[], Tensor]:
        prefix = [*map(str, ids[0, :cached].tolist())]

        def again() -> Tensor:
            return next(self.steps(ids[:, cached:], 1, static_prompt=prefix))

        again()  # which keeps the prefix's cache; the next one copies it
        return again


class Int8(Ours):
    """gpt_kv_cache.py with every product by a matrix of weights in int8, as PyTorch's dynamic quantization has it."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device, gpt_kv_cache, lambda config: gpt_kv_cache.KVCache())
        linears = {}
        for name, module in self.model.named_modules():
            if isinstance(module, gpt_kv_cache.Conv1D):
                linears[name] = linear(module.weight.t(), module.bias)
        head = linear(self.model.wte.weight, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated in favour of a package of its own
            for name, module in linears.items():
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, quantized(module))
            head = quantized(head)
        self.model.head = lambda x: head(self.model.ln_f(x))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with a weight (out, in)."""
    module = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


def quantized(module: nn.Linear) -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(module), {nn.Linear}, dtype=torch.qint8)[0]


class RandomBCT(Ours):
    """gpt_bounded_cache.py with BCT's slots: the weights that a public model doesn't have are random."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device, gpt_bounded_cache, lambda config: gpt_bounded_cache.BoundedMemory())
        weights = self.model.state_dict()
        config = gpt_bounded_cache.BCTConfig(**vars(self.model.config), slots=24, recent=8)
        self.model = gpt_bounded_cache.BCT(config).eval().to(device)
        self.model.load_state_dict(weights, strict=False)


class Static(Ours):
    """The weights of gpt_bounded_cache.py and a step of static shapes: the cache is written at a position that is a
    tensor, and always read as a whole, so that a CUDA graph can replay the step. Without a GPU it runs as it is."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        new_cache = lambda config: gpt_bounded_cache.SlidingWindowCache(config.n_ctx)  # noqa: E731
        super().__init__(folder, device, gpt_bounded_cache, new_cache, dtype)
        self.run = torch.compile(self.step, mode="max-autotune-no-cudagraphs") if compiled else self.step
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor, list[Tensor]]] = {}

    def step(self, token: Tensor, pos: Tensor, layers: list[Tensor]) -> Tensor:
        """Return the next token (B, 1) after token (B, 1) at pos (1,), whose keys and values go to layers."""
        model = self.model
        seen = torch.arange(layers[0].size(3), device=pos.device) <= pos[:, None]  # (1, S)
        x = model.wte(token) + model.wpe(pos)
        for block, kv in zip(model.h, layers, strict=True):
            q, k, v = block.attn.project(block.ln_1(x))
            kv.index_copy_(3, pos, torch.stack([k, v]))
            x = x + block.attn(q, kv[0], kv[1], seen)
            x = x + block.mlp(block.ln_2(x))
        return model.head(x)[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        token = next(super().start(ids))
        layers = [kv.clone() for kv in self.cache.layers]
        pos = torch.tensor([ids.size(1)], device=ids.device)
        if ids.device.type == "cuda":
            graph, token_in, pos_in, token_out, layers_in = self.graph(token, pos, layers)
            for mine, new in zip(layers_in, layers, strict=True):
                mine.copy_(new)
            yield token
            while True:
                token_in.copy_(token)
                pos_in.copy_(pos)
                graph.replay()
                token = token_out.clone()
                pos += 1
                yield token
        while True:
            yield token
            token = self.run(token, pos, layers)
            pos = pos + 1

    def graph(self, token: Tensor, pos: Tensor, layers: list[Tensor]) -> tuple[Any, ...]:
        """Return a CUDA graph of a step for this batch size, and the tensors that it reads and writes."""
        if len(token) not in self.graphs:
            token, pos, layers = token.clone(), pos.clone(), [kv.clone() for kv in layers]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # kernels are chosen, and compiled, before the capture
                    self.run(token, pos, layers)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.run(token, pos, layers)
            self.graphs[len(token)] = graph, token, pos, out, layers
        return self.graphs[len(token)]

    def resume(self, ids: Tensor, cached: int) -> None:
        return None  # its prefill is that of the file


def ablations() -> dict[str, Callable[[gpt_kv_cache.GPT], None]]:
    """Return, by what they undo, the changes that turn a model into one without one of our choices."""

    def other_layout(model: gpt_kv_cache.GPT) -> None:
        for module in model.modules():
            if type(module).__name__ == "Conv1D":
                module.weight.data = module.weight.data.t().contiguous().t()

    def head_by_rows(model: gpt_kv_cache.GPT) -> None:
        model.wte.weight.data = model.wte.weight.data.contiguous()

    def all_logits(model: gpt_kv_cache.GPT) -> None:
        forward = model.forward
        model.forward = lambda ids, cache=None, last_only=False: forward(ids, cache)

    def explicit(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mask (T, S) that None stands for."""
        T, S = q.size(2), k.size(2)
        return torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if mask is None else mask

    def explicit_softmax(model: gpt_kv_cache.GPT) -> None:
        def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~explicit(q, k, mask), float("-inf"))
            return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

        for block in model.h:
            block.attn.forward = attend.__get__(block.attn)

    def three_products(model: gpt_kv_cache.GPT) -> None:
        def project(self: nn.Module, x: Tensor) -> list[Tensor]:
            parts = zip(self.parts, self.c_attn.bias.chunk(3), strict=True)
            return [F.linear(x, w.t(), b).unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2) for w, b in parts]

        for block in model.h:
            block.attn.parts = [w.contiguous() for w in block.attn.c_attn.weight.data.chunk(3, 1)]
            block.attn.project = project.__get__(block.attn)

    def always_a_mask(model: gpt_kv_cache.GPT) -> None:
        for block in model.h:
            attend = block.attn.forward
            block.attn.forward = lambda q, k, v, mask, attend=attend: attend(q, k, v, explicit(q, k, mask))

    return {
        "weights stored (out, in), as nn.Linear does": other_layout,
        "the head's weights row by row": head_by_rows,
        "logits of all positions": all_logits,
        "softmax(q k) v written out": explicit_softmax,
        "q, k and v by a product each": three_products,
        "a mask in every pass, instead of is_causal": always_a_mask,
    }


class Without(Ours):
    """gpt_kv_cache.py without one of its choices."""

    def __init__(self, folder: Path, device: str, name: str) -> None:
        super().__init__(folder, device, gpt_kv_cache, lambda config: gpt_kv_cache.KVCache())
        ablations()[name](self.model)


@dataclass(frozen=True)
class Contender:
    """A name, what makes its runner of (folder, device, peer), and what it needs: packages, a file in the peer's
    folder, or a kind of device. exact: its greedy tokens must be those of all other exact ones."""

    name: str
    make: Callable[[Path, str, Path | None], Runner]
    package: str = ""
    file: str = ""
    device: str = ""
    exact: bool = True


def peer_module(file: Path) -> Any:
    """Return a module from a file anywhere."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packaged() -> Any:
    from llms_from_scratch.kv_cache import gpt2

    return gpt2


kv, bounded = gpt_kv_cache, gpt_bounded_cache
ARTICLE, OPTIMIZED = "gpt_with_kv_cache.py", "gpt_with_kv_cache_optimized.py"
CONTENDERS = (
    Contender("gpt_baseline.py", lambda f, d, p: Ours(f, d, gpt_baseline, None)),
    Contender("gpt_kv_cache.py", lambda f, d, p: Ours(f, d, kv, lambda c: kv.KVCache())),
    Contender("gpt_bounded_cache.py, preallocated",
              lambda f, d, p: Ours(f, d, bounded, lambda c: bounded.SlidingWindowCache(c.n_ctx))),
    Contender("gpt_bounded_cache.py, window of 256",
              lambda f, d, p: Ours(f, d, bounded, lambda c: bounded.SlidingWindowCache(min(256, c.n_ctx))),
              exact=False),
    Contender("gpt_bounded_cache.py, BCT, 24 slots", lambda f, d, p: RandomBCT(f, d), exact=False),
    Contender("gpt_kv_cache.py, bfloat16",
              lambda f, d, p: Ours(f, d, kv, lambda c: kv.KVCache(), torch.bfloat16), exact=False),
    Contender("gpt_kv_cache.py, int8", lambda f, d, p: Int8(f, d), device="cpu", exact=False),
    Contender("static step", lambda f, d, p: Static(f, d)),
    Contender("static step, bfloat16", lambda f, d, p: Static(f, d, torch.bfloat16), device="cuda", exact=False),
    Contender("static step, torch.compile", lambda f, d, p: Static(f, d, compiled=True), device="cuda"),
    Contender("static step, bfloat16, torch.compile", lambda f, d, p: Static(f, d, torch.bfloat16, compiled=True),
              device="cuda", exact=False),
    Contender("transformers, DynamicCache", lambda f, d, p: Transformers(f, d, False), "transformers"),
    Contender("transformers, StaticCache", lambda f, d, p: Transformers(f, d, True), "transformers"),
    Contender("transformers, StaticCache, torch.compile", lambda f, d, p: Transformers(f, d, True, compiled=True),
              "transformers", device="cuda"),
    Contender("transformers, StaticCache, bfloat16, torch.compile",
              lambda f, d, p: Transformers(f, d, True, compiled=True, dtype=torch.bfloat16), "transformers",
              device="cuda", exact=False),
    Contender("CTranslate2", lambda f, d, p: CTranslate2(f, "float32"), "ctranslate2 transformers", device="cpu"),
    Contender("CTranslate2, int8", lambda f, d, p: CTranslate2(f, "int8"), "ctranslate2 transformers", device="cpu",
              exact=False),
    Contender("LLMs-from-scratch, PyPI, no cache", lambda f, d, p: FromScratch(f, d, packaged(), False, cached=False),
              "llms_from_scratch"),
    Contender("LLMs-from-scratch, PyPI", lambda f, d, p: FromScratch(f, d, packaged(), False), "llms_from_scratch"),
    Contender("LLMs-from-scratch, concat cache", lambda f, d, p: FromScratch(f, d, peer_module(p / ARTICLE), True),
              file=ARTICLE),
    Contender("LLMs-from-scratch, optimized", lambda f, d, p: FromScratch(f, d, peer_module(p / OPTIMIZED), True),
              file=OPTIMIZED),
)  # fmt: skip
WITHOUT = tuple(Contender(name, lambda f, d, p, name=name: Without(f, d, name)) for name in ablations())


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
    return {"first_ms": first, "first_cpu_ms": cpu, "steps_ms": steps, "steps_cpu_ms": steps_cpu,
            "tokens": torch.cat(written, 1).tolist(), "nbytes": runner.nbytes,
            "peak_bytes": peak_bytes(clock.cuda)}  # fmt: skip


def peak_bytes(cuda: bool) -> int:
    """Return the most memory that this process has had so far: of the GPU, or of the machine (loading included)."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    if (status := Path("/proc/self/status")).exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def floors(clock: Clock, device: str, geometry: dict[str, int], rows: list[int]) -> dict[str, Any]:
    """Return what this machine can do in float32: bytes read per millisecond, and milliseconds of nothing but the
    matrix products of a prefill, by the number of tokens in all texts."""
    times = 20 if clock.cuda else 1  # a GPU is told to begin so many times before the clock stops
    matrix = torch.rand(8192, 16384, device=device)  # 512 MiB
    vector = torch.rand(1, 8192, device=device)
    calls = (lambda: matrix.sum(), lambda: vector @ matrix, lambda: matrix @ torch.ones(16384, device=device))
    read = matrix.nbytes / min(clock(lambda call=call: [call() for _ in range(times)])[0] / times
                               for call in calls for _ in range(4))  # fmt: skip
    C, inner, HD, V = (geometry[name] for name in ("n_embd", "n_inner", "attention", "vocab_size"))
    weights = [torch.rand(a, b, device=device) for a, b in ((C, 3 * HD), (HD, C), (C, inner), (inner, C))]
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


def serve(name: str, folder: Path, device: str, threads: int, peer: Path | None) -> None:
    """Answer requests on standard input, one JSON object a line, until there are no more."""
    torch.set_num_threads(threads)
    clock, answer = Clock(device), sys.stdout
    sys.stdout = sys.stderr  # whatever an implementation prints
    with torch.no_grad():
        made = (c.make(folder, device, peer) for c in (*CONTENDERS, *WITHOUT) if c.name == name)
        runner = None if name == "floor" else next(made)
        print(json.dumps({"ready": name}), file=answer, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if runner is None:
                reply = floors(clock, device, request["geometry"], request["rows"])
            else:
                ids = torch.tensor(request["ids"], device=device)
                if request["cached"]:
                    again = runner.resume(ids, request["cached"])
                    reply = {"resume_ms": None if again is None else median(clock(again)[0] for _ in range(3))}
                else:
                    reply = timed(runner, clock, ids, request["decode"])
            print(json.dumps(reply), file=answer, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]) if sys.argv[5:] else None)
