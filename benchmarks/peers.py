"""Other implementations as contenders: transformers, LLMs-from-scratch, CTranslate2."""

from __future__ import annotations

import copy
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runners import Runner
from load_gpt2_weights import read_tensors


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


NAMES = {"tok_emb": "wte", "out_head": "wte", "pos_emb": "wpe", "final_norm": "ln_f", "trf_blocks": "h", "norm": "ln_",
         "scale": "weight", "shift": "bias", "att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc",
         "ff.layers.2": "mlp.c_proj"}  # fmt: skip


@torch.no_grad()
def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a GPTModel of LLMs-from-scratch GPT-2's weights: its names, and (out, in) instead of (in, out)."""
    for name, parameter in model.named_parameters():
        for theirs, public in NAMES.items():
            name = name.replace(theirs, public)
        block, projection, kind = name.partition("att.W_")
        if projection:
            third = ("query", "key", "value").index(kind.partition(".")[0])
            tensor = tensors[f"{block}attn.c_attn.{kind.partition('.')[2]}"].chunk(3, -1)[third]
        else:
            tensor = tensors[name]
        parameter.copy_(tensor.t() if block.startswith("h.") and tensor.dim() == 2 else tensor)


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


def peer_module(file: Path) -> Any:
    """Return a module from a file anywhere."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packaged() -> Any:
    from llms_from_scratch.kv_cache import gpt2

    return gpt2

