"""The caches that EXAMINED.md is about, and how each is made: ours, transformers', LLMs-from-scratch's.

    python3 -m borrow.examined gpt            examine one of them
    python3 -m borrow.examined --page         examine all, and write EXAMINED.md

Shapes: B batch, T tokens, V vocabulary.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import QuantizedCache, SmallNormCache
from examine import (
    CAUSES,
    CHECKS,
    LONG_TEXT,
    VERDICTS,
    Finding,
    NotOffered,
    Subject,
    TransformersSubject,
    diagnose,
    dynamic,
    examine,
    family_model,
    randomized,
    report,
)
from gpt_bounded_cache import BCT, BCTConfig, PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import GPT, GPTConfig, KVCache
from hybrid_kv_cache import KINDS, Hybrid, HybridConfig
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
        self.config = config
        self.takes_flag = takes_flag
        super().__init__(model, partial(cache_class, n_layers=config["n_layers"]))

    def sizes(self) -> tuple[int, int]:
        return self.config["vocab_size"], self.config["context_length"]

    def whole(self, ids: Tensor) -> Tensor:
        position, self.model.current_pos = self.model.current_pos, 0
        try:
            return self.model(ids)
        finally:
            self.model.current_pos = position

    def new(self) -> Any:
        # reset_kv_cache(), which each generation of the package begins with
        self.model.current_pos = 0
        return self.new_cache()

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


def small_hybrid() -> nn.Module:
    sizes = TINY | {"n_layer": 4, "n_inner": 48, "n_kv_head": 2, "kv_rank": 16, "rope_dim": 8}
    return randomized(Hybrid(HybridConfig(**sizes, kinds=tuple(KINDS), window=WINDOW)))


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


def layered_in(model: Any) -> Any:
    from borrow.transformers_cache import TransformersCache, layered_cache

    return TransformersCache(layered_cache(model), model)


def adapted(family: str) -> Subject:
    from borrow.adapter import Adapter

    return Subject(Adapter(family_model(family)))


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
        "drop_rate": 0.0,
        "qkv_bias": False,
        "dtype": torch.float32,
        "hidden_dim": 48,
        "head_dim": 8,
        "qk_norm": True,
        "n_kv_groups": 2,
        "rope_base": 100.0,
    }
    model = module.GPTModel(config) if kind == "gpt2" else module.Qwen3Model(config)
    return FromScratchSubject(randomized(model), cache_class, config, kind == "gpt2")


def theirs(
    family: str, make: Callable[[Any], Any] = dynamic, **about: Any
) -> Callable[[], Subject]:
    """Return what makes a small model of transformers, with a cache of theirs or ours."""
    return lambda: TransformersSubject(family_model(family), make, **about)


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
    "hybrid": ("`hybrid_kv_cache.py`, a layer of each kind", lambda: Subject(small_hybrid())),
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
        theirs("llama"),
    ),
    "transformers-static": (
        "transformers, `StaticCache`",
        theirs("llama", static),
    ),
    "transformers-sliding": (
        f"transformers, `DynamicCache`, a window of {WINDOW}",
        theirs("mistral"),
    ),
    "transformers-quantized": (
        "transformers, `QuantizedCache`, quanto, 4 bits, approximate",
        theirs("llama", quantized, approximate=True),
    ),
    "transformers-ours": (
        "transformers with our `KVCache`",
        theirs("llama", ours_in(KVCache), promises=True),
    ),
    "transformers-ours-window": (
        f"transformers with our `SlidingWindowCache({WINDOW})`",
        theirs("llama", ours_in(lambda: SlidingWindowCache(WINDOW)), window=WINDOW, promises=True),
    ),
    "transformers-ours-mistral": (
        f"transformers with our `layered_cache()`, Mistral, a window of {WINDOW}",
        theirs("mistral", layered_in, promises=True),
    ),
    "adapter-gemma3": (
        f"`borrow/adapter.py`, Gemma 3, windows of {WINDOW}",
        lambda: adapted("gemma3"),
    ),
    "transformers-static-lfm2": (
        "transformers, `StaticCache`, LFM2",
        theirs("lfm2", static, records_past=False),
    ),
    "transformers-static-lfm2-recorded": (
        "the same, after `activate_past_recording()`",
        theirs("lfm2", static),
    ),
    "from-scratch-gpt2": (
        "LLMs-from-scratch, `kv_cache.gpt2` with `use_cache=True`",
        lambda: from_scratch("gpt2"),
    ),
    "from-scratch-qwen3": ("LLMs-from-scratch, `kv_cache.qwen3`", lambda: from_scratch("qwen3")),
}

# Models of transformers whose layers keep different things, each with its own DynamicCache; by FAMILIES' names.
HYBRIDS = {
    "gemma3": "Gemma 3: windows",
    "gemma4": "Gemma 4: windows, heads of two sizes",
    "gpt-oss": "gpt-oss: windows, sinks, experts",
    "deepseek-v3": "DeepSeek-V3: keys and values of a latent, experts",
    "qwen3-next": "Qwen3-Next: the gated delta rule, experts",
    "qwen3.5": "Qwen3.5: the gated delta rule",
    "lfm2": "LFM2: convolutions",
    "falcon": "Falcon",
    "falcon-h1": "Falcon-H1: attention and a state in each layer",
    "falcon-mamba": "FalconMamba: states",
    "mamba": "Mamba: states",
    "mamba2": "Mamba-2: states",
}


for family, layers in HYBRIDS.items():
    SUBJECTS[f"transformers-{family}"] = f"transformers, `DynamicCache`, {layers}", theirs(family)

# What the page says of them, below its table.
WHOSE_FAULT = """\
- Mamba and FalconMamba: a second piece of several tokens begins with an empty state, since `mamba_selective_scan()` takes
  none. One token at a time is right, and so is Mamba-2.
- Falcon with `new_decoder_architecture`: keys and values are repeated for each head before they are cached.
- `StaticCache` after `activate_past_recording()`, in a model with convolutions or states: a single token attends to slots that
  were never written. [static_cache_with_states.py](static_cache_with_states.py) shows it and its cause.
- The gated delta rule of Qwen3-Next and Qwen3.5 sums in another order one token at a time: up to 5e-4 of the largest logit
  apart in float32, 3e-13 in float64. 2e-3 is allowed there.
- Layers that keep a state can't be cut back, and a failed pass changes them: both are not offered, and not wrong.
"""


def page(columns: dict[str, list[Finding]]) -> str:
    """Return EXAMINED.md: what the checks say of SUBJECTS, by name."""
    packages = ("torch", "transformers", "llms-from-scratch", "optimum-quanto")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    lines = [
        "# Examined",
        "",
        "[examine.py](../examine.py) has examined these caches, on small models with random weights. Each line can be",
        "repeated by its command; the whole page is written by `python3 -m borrow.examined --page`.",
        f"Versions: {versions}.",
        "",
        f"| cache | {' | '.join(VERDICTS)} | `python3 -m borrow.examined` |",
        f"|---|{'---:|' * len(VERDICTS)}---|",
    ]
    for name, findings in columns.items():
        verdicts = [finding.verdict for finding in findings]
        counts = " | ".join(str(verdicts.count(verdict)) for verdict in VERDICTS)
        lines.append(f"| {SUBJECTS[name][0]} | {counts} | `{name}` |")
    lines += [
        "",
        "Right: differences are up to 1e-4 of the largest logit, which is rounding. WRONG: a number is wrong. REFUSES: an",
        "error raised with a message, after which the cache goes on; where not refusing would give wrong numbers, that is",
        "right. BREAKS: any other error. Not offered: the cache has no way to do this, or never promised it. Few caches",
        "promise what a pass that fails leaves: of a cache that doesn't, no failure counts. Measured: what changed weights",
        "do, and the differences of approximate caches.",
        "",
        WHOSE_FAULT,
    ]
    for name, findings in columns.items():
        approximate = any(f.verdict == "measured" and "weights" not in f.check for f in findings)
        shown = [f for f in findings if f.verdict in ("WRONG", "REFUSES", "BREAKS")]
        shown += [f for f in findings if f.verdict == "measured" and approximate]
        if not shown:
            continue
        lines += [f"## {SUBJECTS[name][0]}", ""]
        diagnosis = diagnose(findings)
        if diagnosis and diagnosis.cause:
            lines += [f"Likeliest cause: {diagnosis.cause}, {CAUSES[diagnosis.cause]}.", ""]
        lines += ["| check | | found | public bugs of this kind |", "|---|---|---|---|"]
        for finding in shown:
            says = finding.says.replace("|", "/")
            lines.append(f"| {finding.check} | {finding.verdict} | {says} | {finding.kind} |")
        lines.append("")
    lines += ["## The checks", "", "| check | public bugs of this kind |", "|---|---|"]
    lines += [f"| {each.name} | {each.kind} |" for each in CHECKS]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("name", nargs="?", choices=SUBJECTS, default="gpt", help="what is examined")
    parser.add_argument("--page", action="store_true", help="examine all, and write EXAMINED.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.page:
        write_text(PAGE, page({name: [*examine(made[1]())] for name, made in SUBJECTS.items()}))
    else:
        sys.exit(report(examine(SUBJECTS[args.name][1]())))


if __name__ == "__main__":
    main()
