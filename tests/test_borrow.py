"""borrow/: its files run on what its README names and nothing else, and give the logits that the model gives alone."""

import random
import re
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from borrow.check import check_logits
from borrow.my_gpt import MyGPT
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from paged import PagedCache, Server
from pair import Pair
from recycle import prefilled_cache
from speculate import draft_from_text, speculate
from support.store import Store
from tests.helpers import ROOT, process
from tests.test_equivalence import assert_close

BORROW = ROOT / "borrow" / "README.md"
TEXT = BORROW.read_text("utf-8")
FILES = {
    name: files.split() for name, files in re.findall(r"^\| (\w+) \|.*\| `(.*)` \|", TEXT, re.M)
}
SIZES = dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim"], 32)
SIZES |= dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2)
SIZES |= dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4)
SIZES |= dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 128)
SIZES |= dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_ff"], 48)
SIZES |= dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
SIZES |= {"vocab_size": 50, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
SIZES |= {"head_dim": 8, "rotary_dim": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
SIZES |= {"eos_token_id": None, "bos_token_id": None}


def small_config(config_class: Any, **changes: Any) -> Any:
    """A configuration of small sizes, for those fields that it has by default."""
    default, sizes = config_class(), {}
    for name, value in SIZES.items():
        if hasattr(default, name) and not isinstance(getattr(config_class, name, None), property):
            sizes[name] = value
    return config_class(**sizes | changes)


def tiny(kind: str, **changes: Any) -> Any:
    """A random model of transformers. kind: its class's name, or what stands before ForCausalLM."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name = kind if hasattr(transformers, kind) else f"{kind}ForCausalLM"
    model_class = getattr(transformers, name)
    return model_class(small_config(model_class.config_class, **changes)).eval()


SERVED: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 12},
    "Mistral": {"sliding_window": None},
}
LAYERS = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Phi3": {},
    "Gemma3": {"layer_types": LAYERS, "head_dim": 8},
}


def model_named(name: str) -> nn.Module:
    if name == "MyGPT":
        torch.manual_seed(0)
        return MyGPT(GPTConfig(vocab_size=50, n_ctx=128, n_layer=2, n_head=2, n_embd=16)).eval()
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    return Adapter(tiny(name, **SERVED[name]))


def test_the_page_quotes_every_file() -> None:
    quoted = re.sub(r"(listing|output)\(.*?<!-- end -->", "", TEXT, flags=re.S)
    assert "```python" in quoted
    assert {*FILES} == {"recycle", "paged", "speculate", "compress", "generate", "adapter"}


def read_in_any_pieces(model: nn.Module, ids: torch.Tensor, window: float = float("inf")) -> None:
    """Compare pieces of any length, on caches that were cut back or copied, with logits without a cache. A cut is
    refused if a window has evicted tokens."""
    expected, cache, draw = model(ids), model.new_cache(), random.Random(0)
    for _ in range(30):
        n = len(cache)
        if n == ids.size(1) or draw.random() < 0.2:
            kept = draw.choice([0, draw.randint(0, n)])
            if n > window and 0 < kept < n:
                with pytest.raises(ValueError, match=f"layer .: can't keep {kept} tokens of {n}"):
                    cache.truncate(kept)
            else:
                cache.truncate(kept)
            cache = cache.clone()
            continue
        T = draw.choice([1, 2, draw.randint(1, ids.size(1) - n)])
        got = model(ids[:, n : n + T], cache)
        assert_close(got, expected[:, n : n + T], torch.float32)


@pytest.mark.parametrize("name", ["MyGPT", *SERVED])
@torch.no_grad()
def test_logits_are_those_without_a_cache(name: str) -> None:
    model, ids = model_named(name), torch.randint(50, (2, 60))
    if name != "MyGPT":
        expected = model.model(ids, use_cache=False).logits
        assert_close(model(ids, KVCache()), expected, torch.float32)
    read_in_any_pieces(model, ids)
    check_logits(model)


@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_layers_with_windows_have_caches_of_their_own(name: str) -> None:
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    model, ids = tiny(name, sliding_window=8, **WINDOWS[name]), torch.randint(50, (2, 40))
    expected = model(ids, use_cache=False).logits
    adapter = Adapter(model)
    assert_close(adapter(ids), expected, torch.float32)
    read_in_any_pieces(adapter, ids, window=8)
    with pytest.raises(ValueError, match="a cache of 0 layers can't serve 2 of which some"):
        adapter(ids, KVCache())


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_methods_write_what_a_model_with_windows_writes_alone(name: str) -> None:
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    model = Adapter(tiny(name, sliding_window=8, **WINDOWS[name]))
    ids = torch.randint(50, (1, 40))
    text = [*ids[0].tolist(), *map(int, generate(model, ids, 20))]
    pair = Pair(model, model, ids)
    assert [*map(int, speculate(pair, 20, 4, draft_from_text))] == text[40:]
    server = Server(model, PagedCache(model, n_blocks=20, block_size=4))
    server.add(text[:40], 20)
    tokens = []
    while server.busy:
        tokens += [token for _, token in server.step()]
    assert tokens == text[40:]


# --- What is refused ----------------------------------------------------------------------------------

LATENT = {
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 2,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a softcap": ("Gemma2", {"sliding_window": 16, "head_dim": 8}, "its attention has softcap"),
    "sinks": ("GptOss", {"sliding_window": 16, "layer_types": LAYERS}, "its attention has s_aux"),
    "chunks": (
        "Llama4",
        {
            "attention_chunk_size": 16,
            "num_local_experts": 2,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
        },
        "its layers attend to chunks of 16 tokens, which no window serves",
    ),
    "ALiBi": ("Bloom", {}, "ALiBi"),
    "Falcon's ALiBi": ("Falcon", {"alibi": True}, "ALiBi"),
    "an encoder": ("BertLMHeadModel", {}, "isn't causal"),
    "no head": ("GPT2Model", {}, "GPT2Model has no output head"),
    "keys of another size": (
        "DeepseekV3",
        LATENT,
        "keys have 8 numbers and values 12",
    ),
    "MPT's ALiBi": ("Mpt", {}, "ALiBi"),
    "states": ("Mamba", {}, "has no max_position_embeddings"),
    "changing rotations": (
        "Llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
        "rope_type dynamic can't be served",
    ),
    "no attention interface": (
        "StableLm",
        {},
        "no keys reached our cache: transformers_cache.py may serve it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_in_a_sentence_and_left_as_it_was(
    name: str,
) -> None:
    kind, changes, said = REFUSED[name]
    if name == "an encoder":
        pytest.importorskip("transformers")
    model = tiny(kind, **changes)
    from borrow.adapter import Adapter

    ids = torch.arange(30)[None]
    outputs = [model(ids)[0].detach()]
    usual = model.config._attn_implementation
    with pytest.raises(ValueError, match=said) as error:
        Adapter(model)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == usual
    assert torch.equal(model(ids)[0], outputs[0])


def test_what_is_no_model_of_transformers_is_refused() -> None:
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    own = model_named("MyGPT")
    with pytest.raises(ValueError, match="MyGPT is no model of transformers"):
        Adapter(own)
    served = Adapter(tiny("Llama"))
    with pytest.raises(ValueError, match="Adapter is no model of transformers"):
        Adapter(served)
    assert_close(Adapter(served.model)(ids := torch.arange(9)[None]), served(ids), torch.float32)


def give_no_masks(model: Any) -> None:
    """As with flash attention, which is told the window instead; this one ignores it."""
    import transformers

    sdpa = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("maskless", sdpa)
    transformers.AttentionMaskInterface.register("maskless", lambda *_, **__: None)
    model.set_attn_implementation("maskless")


def test_the_first_check_sees_a_long_window_that_is_ignored() -> None:
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    model = tiny("Mistral", sliding_window=600, max_position_embeddings=1024)
    assert Adapter(model).new_cache().layers[0].window == 600
    give_no_masks(model)
    with pytest.raises(ValueError, match="with a cache, logits differ"):
        Adapter(model)
    assert model.config.sliding_window == 600


class Forgetful(MyGPT):
    """Its forward ends without commit(), as if the line had been left out."""

    def forward(self, ids: Any, cache: Any = None, last_only: bool = False) -> Any:
        if cache is not None:
            cache.commit = lambda pos: None
        return super().forward(ids, cache, last_only)


def test_a_check_says_what_is_wrong_with_a_model() -> None:
    config = GPTConfig(vocab_size=50, n_ctx=128, n_layer=2, n_head=2, n_embd=16)
    with pytest.raises(
        ValueError, match=r"after 0 tokens and 125 more the cache counts 0: .*commit"
    ):
        check_logits(Forgetful(config).eval())
    model = model_named("MyGPT")
    check_logits(model, torch.arange(4)[None])
    with pytest.raises(ValueError, match=r"at least 4 tokens, got \(1, 3\)"):
        check_logits(model, torch.arange(3)[None])
    model.train()
    for attn in model.attn:
        attn.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.1))
    with pytest.raises(ValueError, match="logits differ from those without one by 0"):
        check_logits(model)
    check_logits(GPT(GPTConfig(vocab_size=50, n_ctx=64, n_layer=2, n_head=2, n_embd=16)).bfloat16())


# --- Stores of models of transformers -----------------------------------------------------------------


def test_models_of_transformers_that_compute_other_keys_of_equal_weights_have_other_folders(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    from borrow.adapter import Adapter

    scaled = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    changes = ({}, {"rope_parameters": scaled}, {"hidden_act": "gelu"})
    models = [Adapter(tiny("Llama", **change)) for change in changes]
    folders = set()
    for model in models:
        store, ids = Store(model, tmp_path), [*range(20)]
        assert len(store.get(ids)) == 0
        store.put(ids, prefilled_cache(model, ids))
        folders.add(store.folder)
    again = Store(Adapter(tiny("Llama")), tmp_path)
    assert len(folders) == len(models) and len(again.get([*range(20)])) == 19


# --- The files, alone in a folder ---------------------------------------------------------------------

SAME = """
from concurrent.futures import ThreadPoolExecutor
import torch
from gpt_kv_cache import generate

prompts = 2 * [[*range(20), i, 2 * i] for i in range(8)]

def same(write):
    with ThreadPoolExecutor(4) as pool:
        written = [*pool.map(lambda ids: write(ids, 12), prompts)]
    for ids, new in zip(prompts, written, strict=True):
        assert new == [int(token) for token in generate(model, torch.tensor([ids]), 12)], ids
"""
CHECKS = {
    "recycle": """same(write)
assert 20 < len(store.get(prompts[0])) == len(prompts[0]) - 1
begin = lambda ids, n: [int(token) for token in generate(model, torch.tensor([ids]), n)]
prompt = [*range(10, 50)] * 2
text = prompt + begin(prompt, 100)
assert write(prompt, 100) == text[80:]  # past the context of 128
assert write(prompt, 0) == []
for start in (0, 64):
    assert write(text[start : start + 100], 9) == begin(text[start : start + 100], 9)
""",
    "paged": """same(write)
assert write([1, 2, 3], 0) == []
whole = write([1, 2, 3], 12)
stop = next(token for token in whole[2:])
assert write([1, 2, 3], 12, [stop]) == whole[: whole.index(stop) + 1]
kept = model.wte.weight.data.clone()
model.wte.weight.data.mul_(float("nan"))
try:
    write([1, 2, 3], 12)
except ValueError as error:
    assert "finite" in str(error)
else:
    raise AssertionError("an error is lost")
model.wte.weight.data.copy_(kept)
assert write([1, 2, 3], 12) == whole and not server.busy
""",
    "speculate": "same(lambda ids, n: write(ids, n)[0])\nsame(lambda ids, n: write(ids, n, draft_by_student)[0])",
    "compress": """same(lambda ids, n: write(ids, n, "full")[0])
text = [*range(50)] * 2
full, half = write(text, 12, "full")[1], write(text, 12, "window:half")[1]
assert half < 0.6 * full and distance(text, "preallocated") < 1e-9
assert distance(text, "bits:2") > distance(text, "bits:8") > 0
""",
}
OTHER_MODELS = {
    "GPT-2": "transformers.GPT2LMHeadModel(transformers.GPT2Config(initializer_range=0.3, vocab_size=50, "
    "n_positions=128, n_layer=2, n_head=4, n_embd=32))",
    "Llama": "transformers.LlamaForCausalLM(transformers.LlamaConfig(initializer_range=0.3, vocab_size=50, "
    "max_position_embeddings=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "hidden_size=32, intermediate_size=64))",
}


def copied(method: str, folder: Path) -> None:
    for name in FILES[method]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"),
    [*product(CHECKS, ["MyGPT"]), *zip(CHECKS, 2 * [*OTHER_MODELS], strict=True)],
)
def test_a_file_writes_what_the_model_writes_alone(tmp_path: Path, method: str, model: str) -> None:
    """The page's own model, and one of transformers in its place, with the files that are named and no others."""
    copied(method, tmp_path)
    if model != "MyGPT":
        pytest.importorskip("transformers")
        copied("adapter", tmp_path)
        line = f"model = Adapter({OTHER_MODELS[model]}.eval())\n"
        own = (tmp_path / "borrow" / "my_gpt.py").read_text("utf-8").rpartition("model = ")[0]
        head = "import transformers\nfrom borrow.adapter import Adapter\n"
        (tmp_path / "borrow" / "my_gpt.py").write_text(f"{own}{head}{line}", "utf-8")
    run = f"import runpy\nrunpy.run_module('borrow.use_{method}', run_name='__main__')"
    code = f"{run}\nfrom borrow.use_{method} import *\n{SAME}{CHECKS[method]}\n"
    ran = process(sys.executable, "-c", code, folder=tmp_path)
    assert ran.code == 0 and ran.out.count("\n") >= 1, ran.err
    assert model != "MyGPT" or ran.err == "", ran.err
