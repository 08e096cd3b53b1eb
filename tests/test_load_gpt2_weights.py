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
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
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
from gpt_baseline import GPT as BaselineGPT
from gpt_bounded_cache import BCT
from gpt_kv_cache import GPT, GPTConfig, generate
from support.cli import ARTICLE
from support.files import read_json
from tests.helpers import Ran, process, refused, run

ROOT = Path(loader.__file__).parent
TINY = {"vocab_size": 97, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}


def config_of(**changes: object) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **TINY,
        **changes,
    }


def random_tensors(config: dict[str, object] | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter of a GPT-2, by public name, none of them at a value that would hide a mistake."""
    given = {"n_ctx": TINY["n_positions"]} | (config or TINY)
    names = {field.name for field in fields(GPTConfig)}
    model = GPT(GPTConfig(**{name: given[name] for name in names if name in given}))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + name.endswith("ln_1.weight")
        for name, parameter in model.named_parameters()
    }


def masks(n_layer: int, n_ctx: int, prefix: str) -> dict[str, Tensor]:
    """The causal masks that the public files hold beside the weights."""
    found = {}
    for layer in range(n_layer):
        found[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, n_ctx, n_ctx).tril()
        found[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return found


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def write(
    folder: Path,
    tensors: dict[str, Tensor] | None,
    config: dict[str, object] | None = None,
    filename: str = "model.safetensors",
    **torch_save: object,
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or config_of()))
    if tensors is not None and filename.endswith(".safetensors"):
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / filename
        )
    elif tensors is not None:
        torch.save(tensors, folder / filename, **torch_save)
    return str(folder)


def assert_loaded(
    model: GPT, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, tensors[name].to(dtype)), name
    assert not model.training
    assert model.wte.weight.stride() == (
        1,
        model.config.vocab_size,
    )  # column-first, as the model file wants it


def write_tokenizer(folder: Path, merges: tuple[bytes, ...] = ()) -> int:
    """Write tokenizer.tiktoken: all bytes, then merges; return the vocabulary size, <|endoftext|> included."""
    tokens = [bytes([b]) for b in range(256)] + list(merges)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.tiktoken").write_text("\n".join(lines) + "\n")
    return len(tokens) + 1


def gpt2_encoding() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except requests.exceptions.RequestException:
        pytest.skip("GPT-2's tokenizer is neither in tiktoken's cache nor reachable")


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "distilgpt2", "DialoGPT", "DialoGPT, before PyTorch 1.6"])
@torch.inference_mode()
def test_public_layouts_equal_transformers(tmp_path: Path, kind: str) -> None:
    """gpt2's file has bare names, distilgpt2's prefixed ones, DialoGPT's also its head, in fp16; all hold masks."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": None}
    config = transformers.GPT2Config(initializer_range=0.2, **TINY, **ends)
    reference, options = transformers.GPT2LMHeadModel(config).eval(), {}
    prefix = "" if kind == "gpt2" else "transformer."
    tensors = {prefix + name: tensor for name, tensor in reference.transformer.state_dict().items()}
    if "DialoGPT" in kind:
        tensors = {name: tensor.clone() for name, tensor in reference.half().state_dict().items()}
        assert "lm_head.weight" in tensors and "transformer.h.1.attn.c_attn.weight" in tensors
        zipped = {"_use_new_zipfile_serialization": kind == "DialoGPT"}
        options = {"filename": "pytorch_model.bin", **zipped}
    folder = write(tmp_path, tensors | masks(2, 32, prefix), **options)
    model, reference = loader.load_model(folder, model_class=GPT), reference.float()
    ids = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    assert (model(ids) - reference(ids).logits).abs().max() < 1e-4
    expected = reference.generate(ids[:1, :9], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert (
        torch.cat([ids[:1, :9], *generate(model, ids[:1, :9], 20)], 1).tolist() == expected.tolist()
    )


def test_sharded_bin(tmp_path: Path) -> None:
    folder, tensors, weight_map = write(tmp_path, None), random_tensors(), {}
    for i, file in enumerate(("1.bin", "2.bin", "3.bin")):
        held = dict([*prefixed(tensors).items()][i::3])
        torch.save(held, tmp_path / file)
        weight_map |= dict.fromkeys(held, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert_loaded(loader.load_model(folder, model_class=GPT), tensors)


def test_narrow_model_with_wide_heads(tmp_path: Path) -> None:
    config = config_of(head_dim=8, n_inner=24)  # 4 heads of 8, width 16
    folder = write(tmp_path, tensors := random_tensors(config), config)
    for model_class in (BaselineGPT, GPT):
        model = loader.load_model(folder, model_class=model_class)
        assert_loaded(model, tensors)
        c = model.config
        assert (c.head_dim, c.n_inner, c.n_embd) == (8, 24, 16)


# --- dtype, memory, parameters of our own ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64])
def test_dtype(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors().items()}
    model = loader.load_model(write(tmp_path, tensors), model_class=GPT, dtype=dtype)
    assert_loaded(model, tensors, dtype)
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (math.nan, "float32", "aren't finite"),
        (-math.inf, "float32", "aren't finite"),
        (math.nan, "float16", "aren't finite"),
        (1e6, "float16", r"holds 1e\+06, and float16 at most 65504"),
    ],
)
def test_every_number_is_finite_also_after_a_cast(
    tmp_path: Path, value: float, dtype: str, words: str
) -> None:
    tensors = random_tensors()
    tensors["h.1.mlp.c_fc.bias"][3] = value
    folder = write(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"h.1.mlp.c_fc.bias of .*{words}"):
        loader.load_model(folder, model_class=GPT, dtype=getattr(torch, dtype))


def test_a_config_of_an_older_file_and_with_dropout(tmp_path: Path) -> None:
    config = config_of(n_ctx=32, n_positions=None, attn_pdrop=0.1, dropout=0.5)
    model = loader.load_model(write(tmp_path, random_tensors(), config), model_class=GPT)
    assert (model.config.n_ctx, model.config.dropout) == (32, 0.0)


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
print((peak - before) / sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.slow
def test_peak_memory_is_one_copy(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status to tell allocated from mapped memory")
    config = config_of(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
    folder = write(tmp_path, random_tensors(config | {"n_ctx": 1024}), config)
    ran = process(sys.executable, "-c", PEAK_MEMORY, folder)
    assert ran.code == 0, ran.err
    print(f"peak memory while loading 124M: {float(ran.out):.2f} x the weights")
    assert float(ran.out) < 1.3


# --- names and the Hugging Face cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in loader.PUBLIC if "gpt" in name.lower()])
def test_public_names_load_from_the_hub_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    tensors = random_tensors()
    repo, revision, weights = loader.PUBLIC[name]
    folder = tmp_path / f"models--{repo.replace('/', '--')}"
    commit = revision if len(revision) == 40 else "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    stored = prefixed(tensors) if "GPT" in name else tensors
    write(folder / "snapshots" / commit, stored, config_of(), weights)
    assert_loaded(loader.load_model(name, model_class=GPT), tensors)


class Hub(SimpleHTTPRequestHandler):
    """The part of Hugging Face's server that a download meets: files, or 404, with some headers."""

    def end_headers(self) -> None:
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", loader.PUBLIC["gpt2"].revision)
        self.send_header("ETag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        super().end_headers()

    def log_message(self, *args: object) -> None:
        pass


LOAD = """
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from support.cli import CommandLine
cli = CommandLine("x", "y")
cli.add_model_arguments()
with cli.parse() as args:
    model = load_model(args.model, model_class=GPT)
    print(model.config.n_embd, sum(parameter.double().sum().item() for parameter in model.parameters()))
"""


def load(*words: str, **environment: str) -> Ran:
    """Load a model in a process of its own, and print its width and the sum of its parameters."""
    return process(sys.executable, "-c", LOAD, *words, **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "surroundings",
    [
        {"HTTPS_PROXY": "http://127.0.0.1:9"},
        {"ALL_PROXY": "socks5://127.0.0.1:9"},
        {"HF_ENDPOINT": "nonsense"},
        {"HF_HUB_CACHE": "/dev/null/x"},
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
    ran = load(**surroundings)  # pocket
    assert ran.code == 0 and ran.err == ""


@pytest.mark.slow
def test_download_from_a_hub_then_offline(tmp_path: Path) -> None:
    """Through huggingface_hub itself, from a server on this computer that speaks as Hugging Face's does."""
    tensors, repo, revision = random_tensors(), *loader.PUBLIC["gpt2"][:2]
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
        ran = load("--model", "distilgpt2", **environment)
        refused(ran, "shows no config.json in distilbert/distilgpt2")
        write(folder, tensors)
        online = load("--model", "gpt2", **environment)
    finally:
        server.shutdown()
        server.server_close()
    n_embd, total = online.out.split()
    assert n_embd == "16"
    assert float(total) == pytest.approx(sum(float(t.double().sum()) for t in tensors.values()))
    assert load("--model", "gpt2", **environment) == online  # now from the cache


def test_pocket_names_are_folders_beside_the_module() -> None:
    tokens = loader.load_tokenizer("pocket").encode("The yaffin eats lichen.")
    for name, folder in loader.POCKET.items():
        assert loader.find_file(name, "config.json").parent == ROOT / "pocket" / folder
        assert loader.load_tokenizer(name).encode("The yaffin eats lichen.") == tokens


# --- refusals: one sentence that names the culprit -------------------------------------------------------------------


def assert_refused(
    folder: str, *culprits: str, error: type | tuple[type, ...] = ValueError
) -> None:
    with pytest.raises(error) as raised:
        loader.load_model(folder, model_class=GPT)
    message = str(raised.value)
    assert "\n" not in message and all(culprit in message for culprit in culprits), message


FOUR_BITS = torch.zeros(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
WPE, HEAD = "wpe.weight", "lm_head.weight"
SPOILED: list[tuple[dict[str, Callable[[Tensor], Tensor] | None], list[str]]] = [
    # by name: what becomes of a tensor, or of the embeddings if there is none of that name; None: it goes
    (
        {
            "h.1.mlp.c_fc.bias": None,
            "h.2.ln_1.weight": lambda _: torch.ones(16),
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
    ({f"x.{i}": torch.clone for i in range(36)}, ["is unexpected; and 28 more"]),
    ({"h.0.attn.c_attn.weight": Tensor.t}, ["has shape (48, 16) instead of (16, 48)"]),
    ({"transformer.ln_f.bias": torch.clone}, ["ln_f.bias", "second time"]),
    ({HEAD: lambda wte: wte + 1e-3 * (wte == wte[5, 3])}, [HEAD, "differs from wte.weight"]),
    ({HEAD: Tensor.half}, [HEAD, "differs from wte.weight"]),
    ({WPE: lambda wpe: wpe.to(torch.float8_e4m3fn)}, ["wpe.weight holds torch.float8_e4m3fn"]),
    ({WPE: lambda wpe: wpe.to(torch.float8_e8m0fnu)}, ["wpe.weight"]),
    ({"four bits": lambda _: FOUR_BITS}, ["four bits"]),
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


class Code:
    def __reduce__(self):
        return os.mkdir, ("a folder that must not appear",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(
        tmp_path,
        {"wte.weight": torch.ones(2), "x": Code()},
        filename="pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    assert_refused(folder, "not a PyTorch file of plain tensors")
    assert not (tmp_path / "a folder that must not appear").exists()


def test_missing_files(tmp_path: Path) -> None:
    assert_refused(str(tmp_path), "no config.json", error=FileNotFoundError)
    folder = write(tmp_path, None)
    assert_refused(folder, "no weights", str(tmp_path), error=FileNotFoundError)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}))
    assert_refused(folder, "no model-00001-of-00002.safetensors", error=FileNotFoundError)
    index.write_text('{"weight_map": ["x"]}')
    assert_refused(folder, str(index))


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"n_embd": 16}'])
def test_malformed_config(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, random_tensors())
    (tmp_path / "config.json").write_text(content)
    assert_refused(folder, "config.json")


SIZES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "head_dim", "n_inner")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("quantization_config", {"bits": 4}),
        ("n_head", 3),
        ("n_head", 0),
        ("n_layer", -1),
        ("n_embd", "16"),
        ("n_embd", 16.0),
        ("n_head", True),
        *product(SIZES, [2**62, 2**100, 10**9]),  # before anything is allocated
    ],
)
def test_what_our_model_can_not_represent(tmp_path: Path, key: str, value: object) -> None:
    given = {} if value == 3 else {"head_dim": 4}  # which makes any number of heads possible
    folder = write(tmp_path, random_tensors(), config_of(**given | {key: value}))
    supported = [repr(one) for one in loader.SUPPORTED["GPT-2"].get(key, [])[:1]]
    name = "n_ctx" if key == "n_positions" else key
    assert_refused(folder, name, str(value), *supported)


@pytest.mark.parametrize("name", ["slots", "recent"])
def test_impossible_memory(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "pocket" / "bct", tmp_path, dirs_exist_ok=True)
    config = read_json(tmp_path / "config.json") | {name: 2**62}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{name}.* {2**62}"):
        loader.load_model(str(tmp_path), model_class=BCT)


UNUSUAL = {
    "sparse": lambda: torch.ones(16).to_sparse(),
    "on no device": lambda: torch.ones(16, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(12)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.qint8),
    "of one number": lambda: torch.ones(1).expand(16),
    "complex": lambda: torch.ones(16, dtype=torch.complex64),
    "four bits": lambda: FOUR_BITS,
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    for name in ("ln_f.bias", "lm_head.weight", "x"):
        tensors = random_tensors() | {name: UNUSUAL[kind]()}
        assert_refused(write(tmp_path, tensors, filename="pytorch_model.bin"), name)


@pytest.mark.parametrize(
    "content",
    [
        torch.ones(2),
        [["wte.weight", torch.ones(2)]],
        {"model": {"wte.weight": torch.ones(2)}},
        {"step": 3},
        {0: torch.ones(2)},
    ],
    ids=str,
)
def test_something_else_than_named_tensors(tmp_path: Path, content: object) -> None:
    folder = write(tmp_path, None)
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_refused(folder, "pytorch_model.bin holds something else than named tensors")


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "a\0b",
        "model.safetensors.index.json",
        3,
    ],
)
def test_shards_are_files_beside_their_index(tmp_path: Path, shard: object) -> None:
    folder, index = write(tmp_path, None), tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    assert_refused(folder, str(index), "not the name of a file of weights beside it")


@pytest.mark.parametrize("name", ["gpt3", "", "no/such/folder"])
def test_unknown_name(name: str) -> None:
    if name:
        assert_refused(name, repr(name), "pocket", "microsoft/DialoGPT-large", "or a folder")
    with pytest.raises((ValueError, OSError)):
        loader.load_tokenizer(name)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_own_tokenizer(tmp_path: Path) -> None:
    for merges in ((b"th",), (b"th", b" a", b" th", "é".encode(), b"  ")):  # no cached content
        vocab_size = write_tokenizer(tmp_path, merges)
        tokenizer = loader.load_tokenizer(write(tmp_path, None, config_of(vocab_size=vocab_size)))
        assert tokenizer.n_vocab == 257 + len(merges)
    assert tokenizer.encode("a the é") == [97, 258, 101, 32, 259]
    assert tokenizer.encode("x<|endoftext|>", allowed_special="all") == [120, 261]
    assert tokenizer.eot_token == 261
    rng = random.Random(0)
    anything = [*map(chr, range(0x250)), "語", "🙂", "\u0301", "\x00", *"theth a é\n<|endoftext|>"]
    for _ in range(300):
        text = "".join(rng.choices(anything, k=rng.randint(0, 60)))
        assert tokenizer.decode(tokenizer.encode(text, disallowed_special=())) == text


@pytest.mark.parametrize(
    "content", ["", "!!!! 0\n", "YQ== 0 1\n", "YQ== zero\n", "YQ== 0\nYg== 0\n", "é 0"]
)
def test_malformed_tokenizer(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, None)
    (tmp_path / "tokenizer.tiktoken").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.tiktoken"):
        loader.load_tokenizer(folder)


def test_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, None, config_of(vocab_size=300))
    with pytest.raises(ValueError, match=r"no tokenizer\.tiktoken .* 300 tokens .* 50257"):
        loader.load_tokenizer(folder)
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"makes 257 tokens, but .* 300"):
        loader.load_tokenizer(folder)


def test_gpt2_tokenizer(tmp_path: Path) -> None:
    gpt2_encoding()
    for name in (
        "gpt2-xl",
        "microsoft/DialoGPT-small",
        write(tmp_path, None, config_of(vocab_size=50257)),
    ):
        tokenizer = loader.load_tokenizer(name)
        assert tokenizer.encode("Hello world") == [15496, 995]
        assert tokenizer.eot_token == 50256
        assert (
            tokenizer._pat_str == loader.GPT2_PATTERN
        )  # so that the pocket's text is cut as GPT-2's is


def write_vocabulary(folder: Path, merges: str) -> str:
    """Write a model's folder with vocab.json, of the bytes, th and the, and merges.txt."""
    tokens = [*loader.byte_characters(), "th", "the", "<|endoftext|>"]
    write(folder, None, config_of(vocab_size=259))
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return str(folder)


def test_a_vocabulary_of_its_own_is_read_as_it_is(tmp_path: Path) -> None:
    """Another language's GPT-2 has 50,257 tokens too; two that have changed places are no vocabulary."""
    folder = write(tmp_path / "other", None, config_of(vocab_size=50257))
    (tmp_path / "other" / "tokenizer.model").write_text("of another kind")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        loader.load_tokenizer(folder)
    tokenizer = loader.load_tokenizer(write_vocabulary(tmp_path, "t h\nth e"))
    assert tokenizer.encode("the<|endoftext|>", allowed_special="all") == [257, 258]
    assert (tokenizer.eot_token, tokenizer.n_vocab) == (258, 259)
    write(tmp_path, None, config_of(vocab_size=258))
    with pytest.raises(ValueError, match=r"makes 259 tokens, but .* 258"):
        loader.load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="in the order of its merges"):
        loader.load_tokenizer(write_vocabulary(tmp_path, "th e\nt h"))


DAMAGED = ["", "{}", '{"model": 3}', '{"model": {"vocab": []}}', "\xff"]
DAMAGED += ["a pipe"] if hasattr(os, "mkfifo") else []


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize(
    "file", ["tokenizer.tiktoken", "tokenizer.json", "vocab.json", "merges.txt"]
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, file: str, content: str) -> None:
    folder = write_vocabulary(tmp_path, "t h\nth e")
    (tmp_path / file).unlink(missing_ok=True)
    if content == "a pipe":  # is not waited for
        os.mkfifo(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"vocab.json|{file}"):
        loader.load_tokenizer(folder)


def test_the_articles_prompt_is_known_without_the_tokenizer() -> None:
    assert loader.Numbers().encode(ARTICLE["prompt"]) == gpt2_encoding().encode(ARTICLE["prompt"])


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
    written = read_json(tmp_path / "tokenizer.json")
    written["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="none that tiktoken can do"):
        loader.load_tokenizer(folder)


def test_gpt2_tokenizer_that_can_not_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise requests.exceptions.ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(OSError, match=r"can't download GPT-2's tokenizer.*the model pocket"):
        loader.load_tokenizer("gpt2")


# --- command line ----------------------------------------------------------------------------------------------------


def test_what_has_no_published_text_is_not_verified() -> None:
    known = "gpt2, gpt2-xl, micro"
    refused(run(loader.main, "pocket", "--verify"), "no published continuation of pocket ", known)


def test_verify_tells_same_from_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of --verify: the model's own text stands for the published one."""
    monkeypatch.setattr(loader, "EXPECTED_OUTPUTS", tmp_path / "expected.json")
    model, tokenizer = loader.load_model("pocket"), loader.load_tokenizer("pocket")
    entries = []
    for prompt in ("One morning", "Hi<|endoftext|>"):
        ids = torch.tensor([tokenizer.encode(prompt, allowed_special="all")])
        text = tokenizer.decode([int(token) for token in generate(model, ids, 12)])
        entries.append({"model": "pocket", "prompt": prompt, "continuation": text, "source": "us"})
    for right, said in ((2, "2 of 2 published continuations reproduced"), (1, "1 of 2")):
        loader.EXPECTED_OUTPUTS.write_text(json.dumps({"continuations": entries}))
        ran = run(loader.main, "pocket", "--verify", "--device", "cpu")
        assert ran.code == 2 - right and said in ran.out, ran.err
        entries[1]["continuation"] = "x" + entries[1]["continuation"][1:]
    assert "DIFFERENT: 'Hi<|endoftext|>'" in ran.out and "by: us" in ran.out
