"""load_gpt2_weights.py: equality with transformers in every published layout, refusals, memory, command line.

There are no public weights here: files in their exact layouts are written with random weights instead.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import huggingface_hub.constants
import pytest
import requests
import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor

import load_gpt2_weights as loader
from formats.configs import KIND_OF_MODEL_TYPE, SUPPORTED, read_config
from formats.names import PUBLIC, split_twin
from formats.tokenizers import ARTICLE_PROMPT, GPT2_PATTERN, Numbers, byte_characters
from gpt_baseline import GPT as BaselineGPT
from gpt_kv_cache import GPT, GPTConfig, KVCache, generate
from tests.helpers import LLAMA3, Ran, process, random_llama, refused, run
from tests.test_equivalence import assert_close

ROOT = Path(loader.__file__).parent
TINY = {"vocab_size": 97, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}


def config_of(**changes: object) -> dict[str, object]:
    return {"model_type": "gpt2", "activation_function": "gelu_new", **TINY, **changes}


def random_tensors(**config: int) -> dict[str, Tensor]:
    """Every parameter of a GPT-2, by public name, none of them at a value that would hide a mistake."""
    given = TINY | config
    given["n_ctx"] = given.pop("n_positions")
    model = GPT(GPTConfig(**given))
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + name.endswith("ln_1.weight")
        for name, parameter in model.named_parameters()
    }


def masks(prefix: str) -> dict[str, Tensor]:
    """The causal masks that the public files hold beside the weights."""
    found = {}
    for layer in range(TINY["n_layer"]):
        found[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        found[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return found


def write(
    folder: Path,
    tensors: dict[str, Tensor] | None,
    config: dict[str, object] | None = None,
    filename: str = "model.safetensors",
    zipped: bool = True,
) -> str:
    """Write a model's folder; zipped: as PyTorch does from 1.6 on, in a .bin file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_of()))
    if tensors is not None and filename.endswith(".safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / filename)
    elif tensors is not None:
        torch.save(tensors, folder / filename, _use_new_zipfile_serialization=zipped)
    return str(folder)


def assert_loaded(
    model: GPT, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, tensors[name].to(dtype)), name
    assert not model.training
    is_half = dtype.itemsize == 2  # then (out, in) is read fastest, in float32 (in, out)
    assert model.wte.weight.stride(1 if is_half else 0) == 1
    assert model.h[0].mlp.c_fc.weight.stride(0 if is_half else 1) == 1


def write_tokenizer(folder: Path, merges: tuple[bytes, ...] = ()) -> int:
    """Write tokenizer.tiktoken: all bytes, then merges; return the vocabulary size, <|endoftext|> included."""
    tokens = [bytes([b]) for b in range(256)] + list(merges)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.tiktoken").write_text("\n".join(lines) + "\n")
    return len(tokens) + 1


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "zipped"),
    [
        ("gpt2", True),
        ("distilgpt2", True),
        ("microsoft/DialoGPT-small", True),
        ("microsoft/DialoGPT-medium", True),
        ("microsoft/DialoGPT-medium", False),  # from before PyTorch 1.6
    ],
)
@torch.inference_mode()
def test_public_names_and_layouts_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, zipped: bool
) -> None:
    """gpt2's file has bare names, distilgpt2's prefixed ones, DialoGPT's also its head, in fp16; all hold masks."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = transformers.GPT2Config(initializer_range=0.2, bos_token_id=0, eos_token_id=1, **TINY)
    reference = transformers.GPT2LMHeadModel(config).eval()
    prefix = "transformer." if "GPT" in name or name == "distilgpt2" else ""
    tensors = {prefix + key: tensor for key, tensor in reference.transformer.state_dict().items()}
    if "GPT" in name:
        tensors = {key: tensor.clone() for key, tensor in reference.half().state_dict().items()}
        assert "lm_head.weight" in tensors
    repo, revision, filename = PUBLIC[name]
    folder = tmp_path / f"models--{repo.replace('/', '--')}"
    commit = revision if len(revision) == 40 else "0123456789" * 4
    write(folder / "snapshots" / commit, tensors | masks(prefix), filename=filename, zipped=zipped)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    model, reference = loader.load_model(name, model_class=GPT), reference.float()
    ids = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    assert (model(ids) - reference(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("sizes", "config", "expected"),
    [
        ({"head_dim": 8, "n_inner": 24}, {}, {"head_dim": 8, "n_inner": 24}),
        ({}, {"n_ctx": 32, "n_positions": None}, {"n_ctx": 32}),  # an older file
        ({}, {"attn_pdrop": 0.1, "dropout": 0.5}, {"dropout": 0.0}),
        ({}, {"_flash_attn_2_enabled": True}, {}),
    ],
)
def test_unusual_configs(tmp_path: Path, sizes: dict, config: dict, expected: dict) -> None:
    folder = write(tmp_path, tensors := random_tensors(**sizes), config_of(**sizes, **config))
    model = loader.load_model(folder, model_class=BaselineGPT)
    assert_loaded(model, tensors)
    assert vars(model.config).items() >= expected.items()


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.transformer.", "transformer._orig_mod."]
)
def test_what_wraps_a_model_leaves_no_trace_in_names(tmp_path: Path, prefix: str) -> None:
    tensors = random_tensors()
    wrapped = {prefix + name.replace("h.1", "h.1._orig_mod"): x for name, x in tensors.items()}
    assert_loaded(loader.load_model(write(tmp_path, wrapped)), tensors)


HEALTHY = {  # what public folders hold beside what our models are made of
    "_attn_implementation_autoset": True,
    "architectures": ["X"],
    "attention_dropout": 0.1,
    "attn_logit_softcapping": None,
    "max_window_layers": 3,
    "rope_interleaved": False,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_fixed": True,
    "use_mrope": False,
}


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Qwen3", "Gemma3Text", "Youtu"])
def test_configurations_that_transformers_writes_are_read(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    window = {"sliding_window": None} if name == "Mistral" else {}
    written = getattr(transformers, f"{name}Config")(**window)
    written.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    more = HEALTHY if name != "GPT2" else {}
    config = read_config(content | more, "config.json")
    ours = (config.n_layer, config.n_embd, config.n_head, config.n_ctx)
    theirs = (written.num_hidden_layers, written.hidden_size, written.num_attention_heads)
    assert ours == (*theirs, written.max_position_embeddings)


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CHANGED: list[tuple[dict[str, object], str]] = [  # fields; what is said, "" if it is read
    ({"rope_scaling": LLAMA3}, ""),
    ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 8}, ""),
    ({"rope_parameters": {"type": "default"}, "rope_theta": 50.0}, ""),
    ({"rope_parameters": {"full_attention": DEFAULT}}, "'full_attention' isn't known"),
    ({"rope_parameters": DEFAULT | {"factor": 8.0}}, "'factor' isn't known of type 'default'"),
    ({"is_causal": False}, "is_causal is False, and only True"),
    ({"attn_logit_softcapping": 5.0}, "'attn_logit_softcapping', 5.0, isn't known"),
    ({"attention_multiplier": 0.5}, "'attention_multiplier', 0.5, isn't known"),
    ({"logits_scaling": 2.0}, "'logits_scaling', 2.0, isn't known"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"model_type": "mistral", "sliding_window": 16, "use_sliding_window": False}, ""),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ""),
]


@torch.no_grad()
def test_a_changed_configuration_is_read_as_transformers_does_or_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    random_llama(vocab_size=97, max_position_embeddings=64).save_pretrained(tmp_path)
    path, ids = tmp_path / "config.json", torch.arange(40)[None]
    written = json.loads(path.read_text())
    for fields, said in CHANGED:
        path.write_text(json.dumps(written | fields))
        if said:
            assert_refused(str(tmp_path), said, model_class=None)
            continue
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_close(loader.load_model(str(tmp_path))(ids), theirs(ids).logits, torch.float32)


@pytest.mark.slow
@torch.no_grad()
def test_every_architecture_of_transformers_is_right_or_refused(tmp_path: Path) -> None:
    """A configuration decides whether a folder is refused, so that only the others need weights."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    outcomes: dict[str, set[str]] = {"equal": set(), "refused": set()}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.AutoConfig.for_model(model_type)
        except Exception:  # one that has no default, or needs a package
            continue
        config.save_pretrained(tmp_path)
        if config.model_type in KIND_OF_MODEL_TYPE:
            small = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2}
            small |= {"num_hidden_layers": 2, "max_position_embeddings": 64}
            if config.model_type != "gpt2":
                small |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 64}
            config = transformers.AutoConfig.for_model(model_type, **small)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            model.save_pretrained(tmp_path)
            ids = torch.arange(40)[None]
            ours = loader.load_model(str(tmp_path))(ids)
            assert_close(ours, model(ids).logits, torch.float32)
            outcomes["equal"].add(model_type)
        else:
            assert_refused(str(tmp_path), "model_type", model_class=None)
            outcomes["refused"].add(model_type)
    assert outcomes["equal"] == {"gpt-sw3", *KIND_OF_MODEL_TYPE} - {"bct"}
    assert len(outcomes["refused"]) > 100


# --- dtype, memory, parameters of our own ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.double() for name, tensor in random_tensors().items()}
    model = loader.load_model(write(tmp_path, tensors), model_class=GPT, dtype=dtype)
    assert_loaded(model, tensors, dtype)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("faster", [True, False])
def test_dtype_auto(
    stored: torch.dtype,
    faster: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr("formats.tensors.is_faster", lambda dtype, device: faster)
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors().items()}
    model = loader.load_model(write(tmp_path, tensors), model_class=GPT, dtype="auto")
    chosen = stored if faster else torch.float32
    assert_loaded(model, tensors, chosen)
    said, name = capsys.readouterr().out, str(chosen).removeprefix("torch.")
    reason = (
        "as its weights are read"
        if chosen is stored
        else f"since {str(stored)[6:]} would be no faster here"
    )
    assert said == f"[computing in {name}, {reason}]\n"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_onednn_is_off_for_one_token_in_half_precision_only(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, seen = write(tmp_path, random_tensors()), []
    for each in (dtype, torch.float32):
        model = loader.load_model(folder, model_class=GPT, dtype=each)
        model.h[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.mkldnn.enabled))
        one, cache = torch.tensor([[1]]), KVCache()
        for ids in (one, torch.tensor([[1, 2]]), torch.tensor([[1], [2]])):
            model(ids)
            assert torch.backends.mkldnn.enabled
        model(torch.ones(1, model.context, dtype=torch.long), cache)
        with pytest.raises(ValueError, match="within n_ctx"):  # a pass that fails
            model(one, cache)
        assert torch.backends.mkldnn.enabled
    assert seen == [False, True, True, True] + 4 * [True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_converted_later_computes_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, ids = write(tmp_path, random_tensors()), torch.arange(12)[None]
    loaded = loader.load_model(folder, model_class=GPT, dtype=dtype)
    converted = loader.load_model(folder, model_class=GPT).to(dtype)
    for model in (loaded, converted):
        cache = KVCache()
        steps = torch.cat([model(piece, cache) for piece in ids.split([6, 1, 1, 4], 1)], 1)
        assert_close(steps, loaded(ids), dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (math.nan, torch.float32, "aren't finite"),
        (-math.inf, torch.float16, "aren't finite"),
        (1e6, torch.float16, r"holds 1e\+06, and float16 at most 65504"),
    ],
)
def test_every_number_is_finite_also_after_a_cast(
    tmp_path: Path, value: float, dtype: torch.dtype, words: str
) -> None:
    tensors = random_tensors()
    tensors["h.1.mlp.c_fc.bias"][3] = value
    folder = write(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"h.1.mlp.c_fc.bias of .*{words}"):
        loader.load_model(folder, model_class=GPT, dtype=dtype)


PEAK_MEMORY = """
import sys, threading, torch
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model

def anonymous():  # bytes that are ours alone: mapped file pages can be dropped at any time and don't count
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

torch.nn.functional.gelu(torch.ones(1))
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], model_class=GPT)
done.set()
watcher.join()
peak = max(peak, anonymous())
assert "torch._dynamo" not in sys.modules  # a compiler, which takes a second or two to import
print((peak - before) / sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.slow
def test_peak_memory_is_one_copy(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status to tell allocated from mapped memory")
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    folder = write(tmp_path, random_tensors(**sizes), config_of(**sizes))
    ran = process(sys.executable, "-c", PEAK_MEMORY, folder)
    assert ran.code == 0, ran.err
    assert float(ran.out) < 1.3


def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.nn.Module, "to_empty", no_memory)
    refused(run(loader.main, "pocket", "--device", "cpu"), "too little memory: [enforce fail]")


# --- names and the Hugging Face cache --------------------------------------------------------------------------------


class Hub(SimpleHTTPRequestHandler):
    """The part of Hugging Face's server that a download meets: files, or 404, with some headers."""

    def end_headers(self) -> None:
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", PUBLIC["gpt2"].revision)
        self.send_header("ETag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        super().end_headers()

    def log_message(self, *args: object) -> None:
        pass


LOAD = """
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from support.cli import CommandLine
cli = CommandLine("x", "y")
cli.add_model_options("")
with cli.parse() as args:
    parameters = load_model(args.model, model_class=GPT).parameters()
    print(sum(parameter.double().sum().item() for parameter in parameters))
"""


def load(*words: str, **environment: str) -> Ran:
    """Load a model in a process of its own, and print the sum of its parameters."""
    return process(sys.executable, "-c", LOAD, *words, **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "surroundings",
    [
        {"ALL_PROXY": "socks5://127.0.0.1:9"},
        {"HF_ENDPOINT": "nonsense"},
        {"HF_HUB_OFFLINE": "1"},
    ],
    ids=str,
)
def test_whatever_keeps_a_model_from_being_fetched_is_one_sentence(
    surroundings: dict, tmp_path: Path
) -> None:
    online = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    begun = time.perf_counter()
    ran = load("--model", "gpt2", **online | surroundings)
    # huggingface_hub's own retries would add 23 seconds; usual: 3 in all
    assert time.perf_counter() - begun < 30
    refused(ran, "can't download config.json of openai-community/gpt2", "once with internet")


@pytest.mark.slow
def test_download_from_a_hub_then_offline(tmp_path: Path) -> None:
    """Through huggingface_hub itself, from a server on this computer that speaks as Hugging Face's does."""
    tensors, repo, revision = random_tensors(), *PUBLIC["gpt2"][:2]
    folder = tmp_path / "files" / repo / "resolve" / revision
    write(folder, None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=tmp_path / "files"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        ran = load("--model", "gpt2", **environment)
        refused(ran, "shows no model.safetensors in openai-community/gpt2 at revision")
        write(folder, tensors)
        online = load("--model", "gpt2", **environment)
    finally:
        server.shutdown()
        server.server_close()
    total = sum(float(tensor.double().sum()) for tensor in tensors.values())
    assert float(online.out) == pytest.approx(total)
    assert load("--model", "gpt2", **environment) == online  # now from the cache


# --- refusals: one sentence that names the culprit -------------------------------------------------------------------


def assert_refused(
    folder: str, *culprits: str, error: type = ValueError, model_class: type | None = GPT
) -> None:
    with pytest.raises(error) as raised:
        loader.load_model(folder, model_class=model_class)
    message = str(raised.value)
    assert "\n" not in message and all(culprit in message for culprit in culprits), message


def assert_no_tokenizer(folder: Path, words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        loader.load_tokenizer(str(folder))


WPE, HEAD = "wpe.weight", "lm_head.weight"
SPOILED: list[tuple[dict[str, Callable[[Tensor], Tensor] | None], list[str]]] = [
    # by name: what becomes of a tensor, or of the embeddings if there is none of that name; None: it goes
    (
        {
            "h.1.mlp.c_fc.bias": None,
            "h.2.ln_1.weight": torch.clone,
            WPE: lambda wpe: wpe[1:],
            "ln_f.bias": lambda bias: bias.to(torch.int8),
        },
        [
            "h.1.mlp.c_fc.bias is missing",
            "h.2.ln_1.weight is unexpected",
            "wpe.weight has shape (31, 16) instead of (32, 16)",
            "ln_f.bias holds torch.int8",
        ],
    ),
    ({"h.0.attn.c_attn.weight": Tensor.t}, ["has shape (48, 16) instead of (16, 48)"]),
    ({"transformer.ln_f.bias": torch.clone}, ["ln_f.bias", "second time"]),
    ({HEAD: lambda wte: wte + 1e-3 * (wte == wte[5, 3])}, [HEAD, "differs from wte.weight"]),
    ({HEAD: Tensor.half}, [HEAD, "differs from wte.weight"]),
    ({WPE: lambda wpe: wpe.to(torch.float8_e4m3fn)}, ["wpe.weight holds torch.float8_e4m3fn"]),
]


@pytest.mark.parametrize(("spoiled", "culprits"), SPOILED)
def test_tensors_that_do_not_fit(tmp_path: Path, spoiled: dict, culprits: list[str]) -> None:
    tensors = random_tensors()
    for name, change in spoiled.items():
        given = tensors.pop(name, tensors["wte.weight"])
        if change:
            tensors[name] = change(given)
    assert_refused(write(tmp_path, tensors), *culprits)


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:-1],
        lambda _: b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_damaged_weights(tmp_path: Path, filename: str, damage: Callable) -> None:
    folder, path = write(tmp_path, random_tensors(), filename=filename), tmp_path / filename
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(folder, str(path), "cut off, a Git LFS pointer")


def test_missing_files(tmp_path: Path) -> None:
    assert_refused(str(tmp_path), "no config.json", error=FileNotFoundError)
    folder = write(tmp_path, None)
    assert_refused(folder, "no weights", folder, error=FileNotFoundError)
    shard = "pytorch_model-00001-of-00002.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    assert_refused(folder, f"no {shard}", error=FileNotFoundError)
    index.write_text('{"weight_map": ["x"]}')
    assert_refused(folder, str(index))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("quantization_config", {"bits": 4}),
        ("is_causal", False),
        ("num_attention_heads", 2),  # which transformers takes for n_head
        ("n_head", 3),
        ("n_embd", None),
        ("n_positions", 2**62),  # before anything is allocated
        ("n_layer", 2**30),
    ],
)
def test_what_our_model_can_not_represent(tmp_path: Path, key: str, value: object) -> None:
    given = {} if value == 3 else {"head_dim": 4}  # which makes any number of heads possible
    folder = write(tmp_path, random_tensors(), config_of(**given | {key: value}))
    name = "n_ctx" if key == "n_positions" else key
    supported = [repr(one) for one in SUPPORTED["GPT-2"].get(key, [])[:1]]
    shown = "lacks" if value is None else str(value)
    assert_refused(folder, name, shown, *supported)


class Code:
    def __reduce__(self):
        return os.mkdir, ("a folder that must not appear",)


BIAS, SHORT = "ln_f.bias", {"wte.weight": torch.ones(2)}
ELSE = "something else than named tensors"
NO_TENSORS = {  # what a .bin file holds, and what is said of it
    "sparse": ({BIAS: torch.ones(16).to_sparse()}, BIAS),
    "on no device": ({BIAS: torch.ones(16, device="meta")}, BIAS),
    "code": (SHORT | {"x": Code()}, "a PyTorch file of plain tensors"),
    "a tensor": (torch.ones(2), ELSE),
    "deeper": ({"model": SHORT}, ELSE),
    "no names": ({0: torch.ones(2)}, ELSE),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_named_tensors_is_refused_and_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content, words = NO_TENSORS[kind]
    if words == BIAS:
        content = random_tensors() | content
    folder = write(tmp_path, content, filename="pytorch_model.bin")
    assert_refused(folder, "pytorch_model.bin", words)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "pytorch_model.bin"}


@pytest.mark.parametrize("shard", ["../x.bin", "/x.bin", "", 3])
def test_shards_are_files_beside_their_index(tmp_path: Path, shard: object) -> None:
    folder, index = write(tmp_path, None), tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    assert_refused(folder, str(index), "not a file of weights beside it")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_own_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, None, config_of(model_type=["x"]))
    assert_no_tokenizer(tmp_path, r"model_type is \['x'\]")
    write(tmp_path, None, config_of(vocab_size=300))
    assert_no_tokenizer(tmp_path, r"no tokenizer\.tiktoken .* 50257 tokens, not 300")
    for merges in ((b"th",), (b"th", b" a", b" th", "é".encode(), b"  ")):  # no cached content
        vocab_size = write_tokenizer(tmp_path, merges)
        assert_no_tokenizer(tmp_path, f"makes {vocab_size} tokens, but ")
        tokenizer = loader.load_tokenizer(write(tmp_path, None, config_of(vocab_size=vocab_size)))
        write(tmp_path, None, config_of(vocab_size=300))
    assert tokenizer.encode("a the é") == [97, 258, 101, 32, 259]
    assert tokenizer.encode("x<|endoftext|>", allowed_special="all") == [120, 261]
    rng = random.Random(0)
    anything = [*map(chr, range(0x250)), "語", "🙂", "\u0301", "\x00", *"theth a é\n<|endoftext|>"]
    for _ in range(50):
        text = "".join(rng.choices(anything, k=rng.randint(0, 60)))
        assert tokenizer.decode(tokenizer.encode(text, disallowed_special=())) == text
    with (tmp_path / "tokenizer.tiktoken").open("a") as file:
        file.write("dGhl 0\n")
    assert_no_tokenizer(tmp_path, "every rank from 0 on once")


def test_gpt2_tokenizer(tmp_path: Path) -> None:
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except requests.exceptions.RequestException:
        pytest.skip("GPT-2's tokenizer is neither in tiktoken's cache nor reachable")
    folder = write(tmp_path, None, config_of(vocab_size=50257))
    for name in ("gpt2-xl", "microsoft/DialoGPT-small", folder):
        assert loader.load_tokenizer(name) is encoding
    assert encoding._pat_str == GPT2_PATTERN  # so that the pocket's text is cut as GPT-2's is
    assert Numbers().encode(ARTICLE_PROMPT) == encoding.encode(ARTICLE_PROMPT)


def write_vocabulary(folder: Path, merges: str) -> str:
    """Write a model's folder with vocab.json, of the bytes, th and the, and merges.txt."""
    tokens = [*byte_characters(), "th", "the", "<|endoftext|>"]
    write(folder, None, config_of(vocab_size=259))
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return str(folder)


def test_a_vocabulary_of_its_own_is_read_as_it_is(tmp_path: Path) -> None:
    """Another language's GPT-2 has 50,257 tokens too."""
    write(tmp_path / "other", None, config_of(vocab_size=50257))
    (tmp_path / "other" / "tokenizer.model").write_text("of another kind")
    assert_no_tokenizer(tmp_path / "other", r"no tokenizer\.json")
    tokenizer = loader.load_tokenizer(write_vocabulary(tmp_path, "t h\nth e"))
    assert tokenizer.encode("the<|endoftext|>", allowed_special="all") == [257, 258]
    assert (tokenizer.eot_token, tokenizer.n_vocab) == (258, 259)
    write(tmp_path, None, config_of(vocab_size=258))
    assert_no_tokenizer(tmp_path, "makes 259 tokens, but .* 258")
    write_vocabulary(tmp_path, "t h\nt e")
    assert_no_tokenizer(tmp_path, "vocab.json is no tokenizer: no token is what .t e. makes")


DAMAGED = ["", "{}", '{"model": 3}', '{"model": {"vocab": []}}', "\xff"]
DAMAGED += ["a pipe"] if hasattr(os, "mkfifo") else []


RANKS = ["!!!! 0\n", "YQ== 0 1\n", "YQ== zero\n", "YQ== 0\nYg== 0\n", "é 0"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *product(["tokenizer.json", "merges.txt"], DAMAGED),
        *product(["tokenizer.tiktoken"], ["", *RANKS]),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, file: str, content: str) -> None:
    write_vocabulary(tmp_path, "t h\nth e")
    (tmp_path / file).unlink(missing_ok=True)
    if content == "a pipe":  # is not waited for
        os.mkfifo(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(content.encode("latin-1"))
    assert_no_tokenizer(tmp_path, f"vocab.json|{file}")


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    """vocab.json and merges.txt, then tokenizer.json too, as transformers writes them, make its tokens."""
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    text = "Naïve  tokens: 語, can't they?\n\n 12345"
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([text] * 9, vocab_size=290, special_tokens=["<|endoftext|>"])
    folder = write(tmp_path, None, config_of(vocab_size=trained.get_vocab_size()))
    trained.save_model(folder)
    theirs = transformers.GPT2Tokenizer.from_pretrained(folder)
    assert loader.load_tokenizer(folder).encode(text) == theirs.encode(text)
    theirs.save_pretrained(folder)
    assert loader.load_tokenizer(folder).encode(text) == theirs.encode(text)


# --- command line ----------------------------------------------------------------------------------------------------


def test_verify_tells_same_from_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of --verify: the model's own text stands for the published one."""
    monkeypatch.setattr(loader, "EXPECTED_OUTPUTS", tmp_path / "expected.json")
    model, tokenizer = loader.load_model("pocket"), loader.load_tokenizer("pocket")
    entry = {"model": "pocket", "prompt": "Hi<|endoftext|>", "source": "us"}
    ids = torch.tensor([tokenizer.encode(entry["prompt"], allowed_special="all")])
    text = tokenizer.decode([int(token) for token in generate(model, ids, 12)])
    for published, code, said in (
        (text, 0, "1 of 1 published continuations reproduced"),
        (f"x{text}", 1, "DIFFERENT: 'Hi<|endoftext|>'"),
    ):
        entry["continuation"] = published
        loader.EXPECTED_OUTPUTS.write_text(json.dumps({"continuations": [entry]}))
        ran = run(loader.main, "pocket", "--verify", "--device", "cpu")
        assert ran.code == code and said in ran.out, ran.err


@pytest.mark.parametrize("name", ["pocket", "pocket-llama"])
def test_a_twin_has_rounded_blocks_and_all_else_of_the_model(name: str, tmp_path: Path) -> None:
    model, twin = loader.load_model(name), loader.load_model(f"{name}:int3")
    for part, weight in model.named_parameters():
        rounded = dict(twin.named_parameters())[part]
        if weight.dim() == 2 and part.startswith("h."):
            assert 4 < max(len(column.unique()) for column in rounded.T[:9]) <= 8
            step = (weight.amax(0) - weight.amin(0)) / 7  # between eight numbers an output
            assert ((rounded - weight).abs() <= 0.51 * step).all()
        else:
            assert torch.equal(rounded, weight), part
    own, twins = (loader.load_tokenizer(each) for each in (name, f"{name}:int3"))
    assert own.encode("One morning") == twins.encode("One morning")
    folder = tmp_path / "mine:int4"  # a folder of that name is itself
    folder.mkdir()
    assert split_twin(str(folder)) == (str(folder), 0)
    assert split_twin("mine:int4") == ("mine", 4)
    assert split_twin("mine:int9") == ("mine:int9", 0)


def test_verify_compares_with_transformers_where_no_text_is_published() -> None:
    same = run(loader.main, "pocket-llama", "--verify", "--device", "cpu")
    assert same.code == 0 and "the same: logits differ from transformers' by" in same.out
    different = run(loader.main, "pocket-llama:int4", "--verify", "--device", "cpu")
    assert different.code == 1 and "DIFFERENT: logits" in different.out


HOSTILE = [None, True, 0, -1, 3, 1.5, 1e-320, 2**31, 2**63, "x", [3], {}]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma3"])
def test_hostile_values_make_the_right_model_or_a_sentence(kind: str, tmp_path: Path) -> None:
    """Each key with each value: what is loaded has the logits of the file as it was, or transformers'."""
    transformers = pytest.importorskip("transformers")
    ids, path = torch.arange(1, 4)[None], tmp_path / "config.json"
    if kind == "GPT2":
        write(tmp_path, random_tensors())
    else:
        sizes = {"vocab_size": 97, "max_position_embeddings": 64, "num_hidden_layers": 1}
        random_llama(kind=kind, head_dim=12, **sizes).save_pretrained(tmp_path)
    content = json.loads(path.read_text())
    expected, loaded = loader.load_model(str(tmp_path))(ids), 0
    for key, value in product(content, HOSTILE):
        if (key, value) == ("rms_norm_eps", 3):
            continue  # which transformers doesn't take for 3.0
        path.write_text(json.dumps(content | {key: value}))
        try:
            logits = loader.load_model(str(tmp_path))(ids)
        except ValueError as error:
            assert "\n" not in str(error), (key, value)
            continue
        loaded += 1
        if not torch.equal(logits, expected):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
            assert_close(logits, theirs(ids).logits, torch.float32)
    assert loaded > 3
