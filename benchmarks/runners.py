"""Our files as contenders, and `gpt_kv_cache.py` without each of its choices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt_bounded_cache
import gpt_kv_cache
from load_gpt2_weights import load_model

ENDLESS = 1 << 20  # tokens to write: the caller stops


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


class Int8(Ours):
    """gpt_kv_cache.py with every product by a matrix of weights in int8, as PyTorch's dynamic quantization has it."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__(folder, device, gpt_kv_cache, lambda config: gpt_kv_cache.KVCache())
        head = quantized(self.model.wte.weight, None)
        for part in (part for block in self.model.h for part in (block.attn, block.mlp)):
            for name, layer in [*part.named_children()]:
                setattr(part, name, quantized(layer.weight.t(), layer.bias))
        self.model.head = lambda x: head(self.model.ln_f(x))


def quantized(weight: Tensor, bias: nn.Parameter | None) -> nn.Module:
    """Return a linear layer with a weight (out, in) in int8."""
    from torch.ao.quantization import quantize_dynamic

    module = nn.Linear(weight.size(1), weight.size(0), bias=False)
    module.weight, module.bias = nn.Parameter(weight), bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of a package of its own
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

