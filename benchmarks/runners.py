"""Implementations of GPT-2 that `python3 -m benchmarks` compares: our files, `gpt_kv_cache.py` without each of its
choices, and others': transformers, CTranslate2, and llama.cpp for a Llama.

All get the same weights: a folder in Hugging Face format. A contender is made from that folder, or
raises ValueError if it can't take part. Its start() takes ids (B, T) and returns an iterator that
yields the greedy next tokens (B, 1), one after each step of its work, the first after the prefill;
nbytes is then the size of its cache.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gpt_baseline
import gpt_bounded_cache
import gpt_kv_cache
import llama_kv_cache
from benchmarks.captured_step import ConstantShapes
from benchmarks.llama_cpp import LlamaCpp
from formats.products import order_for_decoding
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from pocket.checkpoints import export
from support.files import read_json

NO_LIMIT = 1 << 20  # tokens to write: the caller stops


class Setup(NamedTuple):
    """A folder of weights, and the device that computes."""

    folder: Path
    device: str = "cpu"


@contextmanager
def exported(model: nn.Module) -> Iterator[Path]:
    """Yield a folder in Hugging Face format with a model's weights in float32, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        export(model, Path(folder), torch.float32)
        yield Path(folder)


class Ours:
    """One of our files, with a window (at most the context) if one is given, else with its models'
    own cache, if any."""

    def __init__(
        self,
        setup: Setup,
        module: Any = gpt_kv_cache,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model_class = getattr(module, "GPT", None)  # None: a Llama, as the folder says
        folder = str(setup.folder)
        self.model = load_model(folder, model_class=model_class, device=setup.device, dtype=dtype)
        self.module, self.window = module, window
        self.cache = gpt_kv_cache.KVCache()  # gpt_baseline.py takes none

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        if self.module is gpt_baseline:
            return gpt_baseline.generate(self.model, ids, NO_LIMIT)
        self.cache = self.model.new_cache()
        if self.window:
            n_ctx = self.model.config.n_ctx
            if self.window < n_ctx:
                self.cache = gpt_bounded_cache.SlidingWindowCache(self.window)
            else:
                self.cache = gpt_bounded_cache.PreallocatedCache(n_ctx)
        return self.module.generate(self.model, ids, NO_LIMIT, cache=self.cache)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


class Int8(Ours):
    """gpt_kv_cache.py or llama_kv_cache.py with every weight matrix in int8, by PyTorch's dynamic quantization."""

    def __init__(self, setup: Setup, module: Any = gpt_kv_cache) -> None:
        check_cpu(setup)
        super().__init__(setup, module)
        head = quantized(self.model.wte.weight, None)
        for block in self.model.h:
            for sublayer in (block.attn, block.mlp):
                for name, layer in [*sublayer.named_children()]:
                    setattr(sublayer, name, quantized(layer.weight.t(), layer.bias))
        self.model.head = lambda x: head(self.model.ln_f(x))


def quantized(weight: Tensor, bias: nn.Parameter | None) -> nn.Module:
    """Return a linear layer with a weight (out, in) in int8."""
    from torch.ao.quantization import quantize_dynamic

    module = nn.Linear(weight.size(1), weight.size(0), bias=False)
    module.weight, module.bias = nn.Parameter(weight), bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of a package of its own
        return quantize_dynamic(nn.Sequential(module))[0]


class RandomBCT(Ours):
    """gpt_bounded_cache.py with BCT's slots: the weights that a public model doesn't have are random."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, gpt_bounded_cache)
        state = self.model.state_dict()
        config = gpt_bounded_cache.BCTConfig(**vars(self.model.config), slots=24, recent=8)
        self.model = order_for_decoding(gpt_bounded_cache.BCT(config)).eval().to(setup.device)
        self.model.load_state_dict(state, strict=False)


# --- gpt_kv_cache.py without its choices: each function undoes one of a model's ---------------------------------------


def compute_all_logits(model: GPT) -> None:
    forward = model.forward
    model.forward = lambda ids, cache=None, last_only=False: forward(ids, cache)


def explicit_mask(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask (T, S), also where None stands for it."""
    if mask is not None:
        return mask
    T, S = q.size(2), k.size(2)
    return torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)


def write_softmax_out(model: GPT) -> None:
    def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~explicit_mask(q, k, mask), float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    for block in model.h:
        block.attn.forward = partial(attend, block.attn)


def always_mask(model: GPT) -> None:
    def with_mask(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q, k, v, mask = args
        return q, k, v, explicit_mask(q, k, mask)

    for block in model.h:
        block.attn.register_forward_pre_hook(with_mask)


ABLATIONS = {
    "logits of all positions": compute_all_logits,
    "softmax(q k) v written out": write_softmax_out,
    "a mask in every pass, instead of is_causal": always_mask,
}


def ablated(setup: Setup, name: str) -> Ours:
    """Return gpt_kv_cache.py without one of its choices."""
    runner = Ours(setup)
    ABLATIONS[name](runner.model)
    return runner


# --- Others ---------------------------------------------------------------------------------------------------------


def check_cpu(setup: Setup) -> None:
    if setup.device != "cpu":
        raise ValueError("runs on cpu only")


class Transformers:
    """transformers' GPT-2 or Llama with one of its caches."""

    def __init__(
        self, setup: Setup, is_static: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        auto_class = transformers.AutoModelForCausalLM
        self.model = auto_class.from_pretrained(setup.folder, dtype=dtype).eval().to(setup.device)
        self.new_cache = transformers.DynamicCache
        if is_static:
            config = self.model.config
            length = config.max_position_embeddings
            self.new_cache = partial(transformers.StaticCache, config, length)

    @torch.inference_mode()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        self.cache = self.new_cache()
        while True:
            output = self.model(ids, past_key_values=self.cache, logits_to_keep=1)
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            yield ids

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class CTranslate2:
    """CTranslate2, an engine in C++, with weights as its own converter makes them. The bytes of its cache are by
    formula: it can't be asked for them, and concatenates keys and values in float32, whatever the weights are."""

    def __init__(self, setup: Setup, compute_type: str = "float32") -> None:
        check_cpu(setup)
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        config = read_json(setup.folder / "config.json")
        self.n_ctx = config["n_positions"]
        self.token_bytes = 2 * config["n_layer"] * config["n_embd"] * 4
        # the engine is fed names of tokens
        token_ids = {str(i): i for i in range(config["vocab_size"])}
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "0")
        tokenizer = SimpleNamespace(get_vocab=lambda: token_ids, **special)
        converter = TransformersConverter(str(setup.folder))
        converter.load_tokenizer = lambda *args, **options: tokenizer
        with tempfile.TemporaryDirectory() as converted:
            converter.convert(converted, force=True)
            self.generator = ctranslate2.Generator(
                converted, compute_type=compute_type, intra_threads=torch.get_num_threads()
            )

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield as many tokens (B, 1) as there are positions; they are computed one by one in a thread that doesn't
        wait to be asked."""
        prompts = [[*map(str, row)] for row in ids.tolist()]
        n_read = ids.size(1)
        max_length = self.n_ctx + 1 - n_read
        results = self.generator.generate_tokens(prompts, max_length=max_length, end_token=[])
        while step := sorted(islice(results, len(ids)), key=lambda result: result.batch_id):
            self.nbytes = len(ids) * n_read * self.token_bytes
            n_read += 1
            yield torch.tensor([[result.token_id] for result in step])


def llama_cpp(setup: Setup, kind: str) -> LlamaCpp:
    """Return llama.cpp with weights in F32, F16 or Q8_0."""
    check_cpu(setup)
    return LlamaCpp(setup.folder, kind)


# --- All of them ----------------------------------------------------------------------------------------------------

BASE, LLAMA = "gpt_kv_cache.py", "llama_kv_cache.py"  # ratios are relative to these
UNCACHED = "gpt_baseline.py"  # reads the whole text for each token

bounded = partial(Ours, module=gpt_bounded_cache)
llama = partial(Ours, module=llama_kv_cache)
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TRANSFORMERS = {
    "transformers, DynamicCache": Transformers,
    "transformers, StaticCache": partial(Transformers, is_static=True),
} | {f"transformers, {name}": partial(Transformers, dtype=dtype) for name, dtype in HALF.items()}
CONTENDERS = {  # each is made from a Setup
    UNCACHED: partial(Ours, module=gpt_baseline),
    BASE: Ours,
    "gpt_bounded_cache.py, preallocated": partial(bounded, window=NO_LIMIT),
    "gpt_bounded_cache.py, constant shapes": ConstantShapes,
    "gpt_bounded_cache.py, window of 256": partial(bounded, window=256),
    "gpt_bounded_cache.py, BCT, 24 slots": RandomBCT,
    **{f"{BASE}, {name}": partial(Ours, dtype=dtype) for name, dtype in HALF.items()},
    "gpt_kv_cache.py, int8": Int8,
    **TRANSFORMERS,
    "CTranslate2": CTranslate2,
    "CTranslate2, int8": partial(CTranslate2, compute_type="int8"),
}
LLAMAS = {
    LLAMA: llama,
    "llama_kv_cache.py, preallocated": partial(llama, window=NO_LIMIT),
    **{f"{LLAMA}, {name}": partial(llama, dtype=dtype) for name, dtype in HALF.items()},
    "llama_kv_cache.py, int8": partial(Int8, module=llama_kv_cache),
    **TRANSFORMERS,
    **{f"llama.cpp, {kind}": partial(llama_cpp, kind=kind) for kind in ("F32", "F16", "Q8_0")},
}
WITHOUT = {name: partial(ablated, name=name) for name in ABLATIONS}


def is_exact(name: str) -> bool:
    """Return whether a contender's greedy tokens must be those of our own file."""
    return not any(word in name for word in ("window", "BCT", "float16", "int8", "F16", "Q8_0"))
