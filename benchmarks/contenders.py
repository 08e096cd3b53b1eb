"""Implementations that `python3 -m benchmarks` compares: our files, `gpt_kv_cache.py` without each of its choices, and
others': transformers, CTranslate2, and llama.cpp for a Llama.

All get the same weights: a folder in Hugging Face format. A contender is made from that folder, or
raises ValueError if it can't take part. Its start() takes ids (B, T) and returns an iterator that
yields the greedy next tokens (B, 1), one after each step of its work, the first after the prefill;
nbytes is then the size of its cache. A contender for many requests is a function that serves them.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
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
from benchmarks.llama_cpp import LlamaCpp
from demos.serving import (
    Prompts,
    Served,
    ServingRecord,
    TokenLimits,
    blocks_of_each,
    one_at_a_time,
    pad_prompts,
    padded_result,
    server_of,
)
from formats.products import order_for_decoding
from gpt_bounded_cache import PreallocatedCache, SlidingWindowCache
from gpt_kv_cache import GPT, KVCache
from load_gpt2_weights import load_model
from support.files import read_json

NO_LIMIT = 1 << 20  # tokens to write: the caller stops


class Setup(NamedTuple):
    """A folder of weights, and the device that computes."""

    folder: Path
    device: str = "cpu"

    def check_cpu(self) -> None:
        if self.device != "cpu":
            raise ValueError("runs on cpu only")


# --- Ours -----------------------------------------------------------------------------------------


class Ours:
    """One of our files, with its model's own cache, if any, or with one that new_cache makes for
    texts of at most as many tokens as the context has."""

    def __init__(
        self,
        setup: Setup,
        module: Any = gpt_kv_cache,
        new_cache: Callable[[int], Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model_class = getattr(module, "GPT", None)  # None: a Llama, as the folder says
        folder = str(setup.folder)
        self.model = load_model(folder, model_class=model_class, device=setup.device, dtype=dtype)
        self.module, self.new_cache = module, new_cache
        self.cache = KVCache()  # gpt_baseline.py takes none

    def start(self, ids: Tensor) -> Iterator[Tensor]:
        model = self.model
        if self.module is gpt_baseline:
            return gpt_baseline.generate(model, ids, NO_LIMIT)
        self.cache = self.new_cache(model.config.n_ctx) if self.new_cache else model.new_cache()
        return self.module.generate(model, ids, NO_LIMIT, cache=self.cache)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


def window_of_256(n_ctx: int) -> SlidingWindowCache:
    return SlidingWindowCache(min(256, n_ctx))


class Int8(Ours):
    """gpt_kv_cache.py or llama_kv_cache.py with every weight matrix in int8, by PyTorch's dynamic quantization."""

    def __init__(self, setup: Setup, module: Any = gpt_kv_cache) -> None:
        setup.check_cpu()
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


# --- A decoding step whose shapes never change ----------------------------------------------------
# PyTorch launches the hundreds of kernels of a step one by one, which takes longer than they do. A CUDA graph launches
# them all at once, but repeats them as they were: on the same memory, with the same shapes, and without waiting for a
# number. So on a GPU such a step is captured once, and then replayed.


class ConstantShapesCache(PreallocatedCache):
    """A preallocated cache in which a tensor says where the next token goes, and a mask which slots are filled: a step
    writes to one slot and reads all of them. Steps aren't committed: len() is that of the prompt."""

    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add keys and values (B, H, T, D) at positions pos (T,); for one token after a prompt, return all slots
        (B, H, S, D) and a mask (1, S)."""
        if len(self) == 0:
            return super().append(layer, k, v, pos)
        slots = self.layers[layer]  # (2, B, H, S, D)
        # No token is evicted, so a token's slot is its position.
        slots.index_copy_(3, pos, torch.stack([k, v]))
        return slots[0], slots[1], torch.arange(slots.size(3), device=pos.device) <= pos[:, None]


class ConstantShapes(Ours):
    """gpt_bounded_cache.py with such steps; it writes until the context is full."""

    @torch.no_grad()
    def start(self, ids: Tensor) -> Iterator[Tensor]:
        model, n_ctx = self.model, self.model.config.n_ctx
        self.cache = cache = ConstantShapesCache(n_ctx)
        token = model(ids, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        pos = cache.positions(1).to(ids.device)  # as token, a step's input and output

        def step() -> None:
            """Do as GPT.forward(), which also compares the position with n_ctx: that waits for the GPU."""
            x = model.wte(token) + model.wpe(pos)
            for layer, block in enumerate(model.h):
                x = block(x, pos, cache, layer)
            token.copy_(model.head(x)[:, -1].argmax(-1, keepdim=True))
            pos.add_(1)

        yield token.clone()
        run = captured(step, [token, pos]) if ids.is_cuda else step
        for _ in range(n_ctx - ids.size(1)):
            run()
            yield token.clone()


def captured(step: Callable[[], None], state: list[Tensor]) -> Callable[[], None]:
    """Return the replay of a step's CUDA graph. state: what the step changes; as PyTorch asks, the step runs once on
    another stream before it is captured, and that run is undone."""
    before = [tensor.clone() for tensor in state]
    warm_up, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    with torch.cuda.graph(graph):  # which records, and runs nothing
        step()
    return graph.replay


# --- gpt_kv_cache.py without its choices: each function undoes one -------------------------------


def compute_all_logits(runner: Ours) -> None:
    forward = runner.model.forward
    runner.model.forward = lambda ids, cache=None, last_only=False: forward(ids, cache)


class MaskingCache(KVCache):
    def append(
        self, layer: int, k: Tensor, v: Tensor, pos: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a mask (T, S) also where KVCache returns None."""
        k, v, _ = super().append(layer, k, v, pos)
        return k, v, torch.arange(k.size(2), device=k.device) <= pos[:, None]


def mask_every_pass(runner: Ours) -> None:
    runner.new_cache = lambda n_ctx: MaskingCache()


def write_softmax_out(runner: Ours) -> None:
    def attend(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~mask, float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    mask_every_pass(runner)
    for block in runner.model.h:
        block.attn.forward = partial(attend, block.attn)


def ablated(setup: Setup, undo: Callable[[Ours], None]) -> Ours:
    """Return gpt_kv_cache.py without one of its choices."""
    runner = Ours(setup)
    undo(runner)
    return runner


# --- Others ---------------------------------------------------------------------------------------


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
        return bytes_of(self.cache)


def bytes_of(cache: Any) -> int:
    """Return the size of a cache of transformers."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class CTranslate2:
    """CTranslate2, an engine in C++, with weights as its own converter makes them. The bytes of its cache are by
    formula: it can't be asked for them, and concatenates keys and values in float32, whatever the weights are."""

    def __init__(self, setup: Setup, compute_type: str = "float32") -> None:
        setup.check_cpu()
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


# --- Many requests of different lengths at once ---------------------------------------------------

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256  # tokens of a block, and of a prompt's pass


def serve_in_blocks(model: GPT, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts together, from one pool of KV blocks."""
    return ServingRecord(server_of(model, prompts, limits, BLOCK_TOKENS, CHUNK_TOKENS)).served()


def serve_padded(model: Any, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts as one batch of transformers, padded to the length of the longest."""
    batch, lengths = pad_prompts(prompts)
    width = batch.size(1)
    output = model.generate(
        batch.to(model.device),
        attention_mask=(torch.arange(width) >= width - lengths).long().to(model.device),
        max_new_tokens=max(limits),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    nbytes, slots = bytes_of(output.past_key_values), width + max(limits) - 1
    return padded_result(output.sequences[:, width:], nbytes, slots, prompts, limits)


def serve_continuously(model: Any, prompts: Prompts, limits: TokenLimits) -> Served:
    """Decode all texts by transformers' continuous batching, which doesn't report the memory it
    holds. (Pages of a size that is chosen came with 5.24.)"""
    import transformers

    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        page_size=BLOCK_TOKENS,
        num_blocks=sum(blocks_of_each(prompts, limits, BLOCK_TOKENS)) + len(prompts) + 1,
        max_batch_tokens=CHUNK_TOKENS,
    )
    texts = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        request_ids = [
            manager.add_request(ids, max_new_tokens=limit)
            for ids, limit in zip(prompts, limits, strict=True)
        ]
        while len(texts) < len(prompts):
            if (result := manager.get_result(timeout=1)) and result.is_finished():
                if result.error:
                    raise ValueError(result.error)
                texts[result.request_id] = result.generated_tokens
            elif not result and not manager.is_running():
                raise ValueError("its thread ended")
    return Served([texts[request_id] for request_id in request_ids], None, None)


# --- All of them ----------------------------------------------------------------------------------

BASE, LLAMA = "gpt_kv_cache.py", "llama_kv_cache.py"  # ratios are relative to these
UNCACHED = "gpt_baseline.py"  # reads the whole text for each token

bounded = partial(Ours, module=gpt_bounded_cache)
llama = partial(Ours, module=llama_kv_cache)


def in_half_precision(name: str, contender: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {f"{name}, {word}": partial(contender, dtype=dtype) for word, dtype in dtypes.items()}


TRANSFORMERS = {
    "transformers, DynamicCache": Transformers,
    "transformers, StaticCache": partial(Transformers, is_static=True),
    **in_half_precision("transformers", Transformers),
}
CONTENDERS = {  # each is made from a Setup
    UNCACHED: partial(Ours, module=gpt_baseline),
    BASE: Ours,
    "gpt_bounded_cache.py, preallocated": partial(bounded, new_cache=PreallocatedCache),
    "gpt_bounded_cache.py, constant shapes": partial(ConstantShapes, module=gpt_bounded_cache),
    "gpt_bounded_cache.py, window of 256": partial(bounded, new_cache=window_of_256),
    "gpt_bounded_cache.py, BCT, 24 slots": RandomBCT,
    **in_half_precision(BASE, Ours),
    "gpt_kv_cache.py, int8": Int8,
    **TRANSFORMERS,
    "CTranslate2": CTranslate2,
    "CTranslate2, int8": partial(CTranslate2, compute_type="int8"),
}
LLAMAS = {
    LLAMA: llama,
    "llama_kv_cache.py, preallocated": partial(llama, new_cache=PreallocatedCache),
    **in_half_precision(LLAMA, llama),
    "llama_kv_cache.py, int8": partial(Int8, module=llama_kv_cache),
    **TRANSFORMERS,
    **{f"llama.cpp, {kind}": partial(LlamaCpp, kind=kind) for kind in ("F32", "F16", "Q8_0")},
}
WITHOUT = {
    "logits of all positions": partial(ablated, undo=compute_all_logits),
    "softmax(q k) v written out": partial(ablated, undo=write_softmax_out),
    "a mask in every pass, instead of is_causal": partial(ablated, undo=mask_every_pass),
}
ONE_BY_ONE, PAGED = "gpt_kv_cache.py, one at a time", "paged.py"
SERVERS = {  # how the model is made, and what serves requests with it
    ONE_BY_ONE: (Ours, one_at_a_time),
    PAGED: (Ours, serve_in_blocks),
    "transformers, padded generate": (Transformers, serve_padded),
    "transformers, continuous batching": (Transformers, serve_continuously),
}


def is_exact(name: str) -> bool:
    """Return whether a contender's greedy tokens must be those of our own file."""
    return not any(word in name for word in ("window", "BCT", "float16", "int8", "F16", "Q8_0"))
