"""The caches that EXAMINED.md is about, and how each is made: ours, transformers', LLMs-from-scratch's.

    python3 -m borrow.examined gpt            examine one of them
    python3 -m borrow.examined --page         examine all, and write EXAMINED.md

Shapes: B batch, T tokens, V vocabulary.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import QuantizedCache, SmallNormCache
from examine import (
    LONG_TEXT,
    NotOffered,
    Subject,
    TransformersSubject,
    dynamic,
    examine,
    family_model,
    randomized,
    report,
)
from gpt_bounded_cache import BCT, BCTConfig, PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache
from llama_kv_cache import Llama, LlamaConfig
from support.files import write_text

CONTEXT = LONG_TEXT + 20
TINY = {"vocab_size": 61, "n_ctx": CONTEXT, "n_layer": 2, "n_head": 4, "n_embd": 32}
WINDOW, SINKS = 6, 2
PAGE = Path(__file__).resolve().parent / "EXAMINED.md"


class FromScratchSubject(Subject):
    """A model of the package llms-from-scratch, which counts positions in the model and holds keys in a KVCache."""

    promises = False

    def __init__(
        self, model: nn.Module, cache_class: type, config: dict[str, Any], takes_flag: bool
    ) -> None:
        self.model, self.cache_class, self.takes_flag = model, cache_class, takes_flag
        self.vocab_size, self.context = config["vocab_size"], config["context_length"]
        self.n_layer = config["n_layers"]
        self.window, self.sinks, self.approximate = None, 0, False

    def whole(self, ids: Tensor) -> Tensor:
        position, self.model.current_pos = self.model.current_pos, 0
        try:
            return self.model(ids)
        finally:
            self.model.current_pos = position

    def new(self) -> Any:
        # reset_kv_cache(), which each generation of the package begins with
        self.model.current_pos = 0
        return self.cache_class(n_layers=self.n_layer)

    def read(self, cache: Any, ids: Tensor) -> Tensor:
        flag = {"use_cache": True} if self.takes_flag else {}
        return self.model(ids, cache=cache, **flag)

    def length(self, cache: Any) -> int:
        return self.model.current_pos

    def nbytes(self, cache: Any) -> int:
        raise NotOffered("a KVCache has no size")


def small_gpt() -> nn.Module:
    return randomized(GPT(GPTConfig(**TINY)))


def small_llama() -> nn.Module:
    return randomized(Llama(LlamaConfig(**TINY, n_inner=48, n_kv_head=2, rope_theta=100.0)))


def static(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=model.config.max_position_embeddings)


def quantized(model: Any) -> Any:
    from transformers.cache_utils import QuantizedCache as TheirQuantizedCache

    return TheirQuantizedCache("quanto", model.config, nbits=4, q_group_size=16, residual_length=16)


def ours_in(new_cache: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that makes a cache of ours for a model of transformers."""

    def make(model: Any) -> Any:
        from borrow.transformers_cache import TransformersCache

        return TransformersCache(new_cache(), model)

    return make


def from_scratch(kind: str) -> Subject:
    """Return a model of llms-from-scratch with its cache. kind: gpt2 or qwen3."""
    module = importlib.import_module(f"llms_from_scratch.kv_cache.{kind}")
    cache_class = importlib.import_module("llms_from_scratch.kv_cache.utils").KVCache
    config = {
        "vocab_size": 61,
        "context_length": CONTEXT,
        "emb_dim": 32,
        "n_heads": 4,
        "n_layers": 2,
    }
    config |= {"drop_rate": 0.0, "qkv_bias": False, "dtype": torch.float32, "hidden_dim": 48}
    config |= {"head_dim": 8, "qk_norm": True, "n_kv_groups": 2, "rope_base": 100.0}
    model = module.GPTModel(config) if kind == "gpt2" else module.Qwen3Model(config)
    return FromScratchSubject(randomized(model), cache_class, config, kind == "gpt2")


# By name: what the page shows, and how it is made.
SUBJECTS: dict[str, tuple[str, Callable[[], Subject]]] = {
    "gpt": ("`gpt_kv_cache.py`, `KVCache`", lambda: Subject(small_gpt())),
    "llama": ("`llama_kv_cache.py`, `KVCache`", lambda: Subject(small_llama())),
    "preallocated": (
        "`PreallocatedCache(48)`",
        lambda: Subject(small_gpt(), lambda: PreallocatedCache(48), capacity=48),
    ),
    "window": (
        f"`SlidingWindowCache({WINDOW})`",
        lambda: Subject(small_gpt(), lambda: SlidingWindowCache(WINDOW), WINDOW),
    ),
    "sinks": (
        f"`SlidingWindowCache({WINDOW}, {SINKS})`",
        lambda: Subject(small_gpt(), lambda: SlidingWindowCache(WINDOW, SINKS), WINDOW, SINKS),
    ),
    "bct": (
        "`gpt_bounded_cache.py`, `BCT`",
        lambda: Subject(randomized(BCT(BCTConfig(**TINY, slots=4, recent=3)))),
    ),
    "unrounded": (
        "`QuantizedCache(32)`",
        lambda: Subject(small_gpt(), lambda: QuantizedCache(32, 8, 8)),
    ),
    "norms": (
        "`SmallNormCache(64)`, which keeps all",
        lambda: Subject(small_gpt(), lambda: SmallNormCache(64, 4), capacity=64),
    ),
    "quantized": (
        "`QuantizedCache(4)`, approximate",
        lambda: Subject(small_gpt(), lambda: QuantizedCache(4, 8, 8), approximate=True),
    ),
    "transformers-dynamic": (
        "transformers, `DynamicCache`",
        lambda: TransformersSubject(family_model("llama"), dynamic),
    ),
    "transformers-static": (
        "transformers, `StaticCache`",
        lambda: TransformersSubject(family_model("llama"), static),
    ),
    "transformers-sliding": (
        f"transformers, `DynamicCache`, a window of {WINDOW}",
        lambda: TransformersSubject(family_model("mistral"), dynamic),
    ),
    "transformers-quantized": (
        "transformers, `QuantizedCache`, quanto, 4 bits, approximate",
        lambda: TransformersSubject(family_model("llama"), quantized, approximate=True),
    ),
    "transformers-ours": (
        "transformers with our `KVCache`",
        lambda: TransformersSubject(family_model("llama"), ours_in(KVCache), promises=True),
    ),
    "transformers-ours-window": (
        f"transformers with our `SlidingWindowCache({WINDOW})`",
        lambda: TransformersSubject(
            family_model("llama"),
            ours_in(lambda: SlidingWindowCache(WINDOW)),
            WINDOW,
            promises=True,
        ),
    ),
    "from-scratch-gpt2": (
        "LLMs-from-scratch, `kv_cache.gpt2` with `use_cache=True`",
        lambda: from_scratch("gpt2"),
    ),
    "from-scratch-qwen3": ("LLMs-from-scratch, `kv_cache.qwen3`", lambda: from_scratch("qwen3")),
}


def page() -> str:
    """Return EXAMINED.md: what the checks say of SUBJECTS."""
    return ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=SUBJECTS, default="gpt", help="what is examined")
    parser.add_argument("--page", action="store_true", help="examine all, and write EXAMINED.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.page:
        write_text(PAGE, page())
    else:
        sys.exit(report(examine(SUBJECTS[args.name][1]())))


if __name__ == "__main__":
    main()
