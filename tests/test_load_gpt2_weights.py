"""load_gpt2_weights.py: equality with transformers in every published layout, refusals, memory, command line.

There are no public weights here: files in their exact layouts are written with random weights instead.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from unittest import mock

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
from support.cli import ARTICLE, PROMPT
from support.files import read_json

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
    config = config or config_of()
    names = ("vocab_size", "n_layer", "n_head", "n_embd", "head_dim", "n_inner")
    model = GPT(
        GPTConfig(
            n_ctx=config["n_positions"], **{name: config[name] for name in names if name in config}
        )
    )
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + name.endswith("ln_1.weight")
        for name, parameter in model.named_parameters()
    }


def masks(
    n_layer: int, n_ctx: int, prefix: str = "", masked_bias: bool = False
) -> dict[str, Tensor]:
    """The causal masks that the public files hold beside the weights."""
    tril = torch.ones(n_ctx, n_ctx, dtype=torch.uint8).tril().view(1, 1, n_ctx, n_ctx)
    found = {f"{prefix}h.{layer}.attn.bias": tril.clone() for layer in range(n_layer)}
    if masked_bias:
        found |= {
            f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(n_layer)
        }
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


def byte_encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        pat_str=loader.GPT2_PATTERN,
        special_tokens={"<|endoftext|>": 256},
        mergeable_ranks={bytes([b]): b for b in range(256)},
    )


def gpt2_encoding() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except requests.exceptions.RequestException:
        pytest.skip("GPT-2's tokenizer is neither in tiktoken's cache nor reachable")


# --- against transformers -------------------------------------------------------------------------------------------


def transformers_model(seed: int = 0, std: float = 0.02, **geometry: int):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    options = {"bos_token_id": 0, "eos_token_id": None} if geometry else {"eos_token_id": None}
    config = transformers.GPT2Config(initializer_range=std, **geometry, **options)
    return transformers.GPT2LMHeadModel(config).eval()


def assert_same_model(
    model: GPT, reference, tolerance: float, n_tokens: int, new_tokens: int = 20
) -> float:
    ids = torch.randint(
        model.config.vocab_size, (2, n_tokens), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        difference = (model(ids).float() - reference(ids).logits.float()).abs().max().item()
        expected = reference.generate(
            ids[:1, :9],
            attention_mask=torch.ones(1, 9, dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )[0, 9:]
    assert difference < tolerance
    assert [token.item() for token in generate(model, ids[:1, :9], new_tokens)] == expected.tolist()
    return difference


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory):
    """GPT-2's 124M geometry with random weights in a folder that transformers wrote, and transformers' model."""
    folder = tmp_path_factory.mktemp("gpt2")
    reference = transformers_model()
    reference.save_pretrained(folder)
    return folder, reference


@pytest.mark.slow
def test_full_gpt2_geometry_equals_transformers(full_size) -> None:
    folder, reference = full_size
    model = loader.load_model(str(folder), model_class=GPT)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    difference = assert_same_model(model, reference, tolerance=1e-4, n_tokens=128, new_tokens=10)
    print(f"largest logit difference to transformers at 124M: {difference:.1e}")


def test_all_model_files_take_the_same_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors := random_tensors())
    assert_loaded(loader.load_model(folder, model_class=BaselineGPT), tensors)
    assert_loaded(loader.load_model(folder, model_class=GPT), tensors)


@pytest.mark.slow
def test_dialogpt_medium_layout_equals_transformers(tmp_path: Path) -> None:
    """DialoGPT-medium's width and heads, 4 of its 24 layers: fp16, prefix, masks, separate head, no safetensors."""
    reference = transformers_model(n_embd=1024, n_head=16, n_layer=4).half()
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert "lm_head.weight" in tensors and "transformer.h.3.attn.c_attn.weight" in tensors
    tensors |= masks(4, 1024, "transformer.", masked_bias=True)
    config = config_of(
        n_ctx=1024, n_positions=1024, n_embd=1024, n_layer=4, n_head=16, vocab_size=50257
    )
    for subfolder, zipped in (
        ("zip", True),
        ("legacy", False),
    ):  # legacy: as PyTorch wrote files before 1.6
        folder = write(
            tmp_path / subfolder,
            tensors,
            config,
            "pytorch_model.bin",
            _use_new_zipfile_serialization=zipped,
        )
        model = loader.load_model(folder, model_class=GPT)
        assert_same_model(model, reference.float(), tolerance=1e-4, n_tokens=30, new_tokens=5)


@pytest.mark.parametrize("prefix", ["", "transformer."], ids=["gpt2", "distilgpt2"])
def test_safetensors_layouts_equal_transformers(tmp_path: Path, prefix: str) -> None:
    """gpt2's file has bare names, distilgpt2's prefixed ones; both hold the masks as float32."""
    reference = transformers_model(std=0.2, **TINY)
    tensors = {prefix + name: tensor for name, tensor in reference.transformer.state_dict().items()}
    tensors |= {name: mask.float() for name, mask in masks(2, 32, prefix).items()}
    model = loader.load_model(write(tmp_path, tensors), model_class=GPT)
    assert_same_model(model, reference, tolerance=1e-4, n_tokens=32)


def test_sharded_safetensors_equal_transformers(tmp_path: Path) -> None:
    reference = transformers_model(std=0.2, **TINY)
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and not (
        tmp_path / "model.safetensors"
    ).exists()
    assert_same_model(
        loader.load_model(str(tmp_path), model_class=GPT), reference, tolerance=1e-4, n_tokens=32
    )


def test_sharded_bin(tmp_path: Path) -> None:
    tensors, shards = random_tensors(), {}
    for index, name in enumerate(tensors):
        shards.setdefault(f"pytorch_model-0000{index % 3 + 1}-of-00003.bin", []).append(name)
    write(tmp_path, None)
    for filename, names in shards.items():
        torch.save(prefixed({name: tensors[name] for name in names}), tmp_path / filename)
    weight_map = {
        f"transformer.{name}": filename for filename, names in shards.items() for name in names
    }
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_loaded(loader.load_model(str(tmp_path), model_class=GPT), tensors)


def test_narrow_model_with_wide_heads_round_trip(tmp_path: Path) -> None:
    config = config_of(head_dim=8, n_inner=24)  # 4 heads of 8, width 16
    folder = write(tmp_path, tensors := random_tensors(config), config)
    model = loader.load_model(folder, model_class=GPT)
    assert_loaded(model, tensors)
    assert (model.config.head_dim, model.config.n_inner, model.config.n_embd) == (8, 24, 16)
    again = write(tmp_path / "again", dict(model.state_dict()), config)
    assert_loaded(loader.load_model(again, model_class=GPT), tensors)


# --- dtype, memory, parameters of our own ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
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
        (1e6, "bfloat16", None),
    ],
)
def test_every_number_is_finite_also_after_a_cast(
    tmp_path: Path, value: float, dtype: str, words: str | None
) -> None:
    tensors = random_tensors()
    tensors["h.1.mlp.c_fc.bias"][3] = value
    folder = write(tmp_path, tensors)
    if words is None:
        loader.load_model(folder, model_class=GPT, dtype=getattr(torch, dtype))
        return
    with pytest.raises(ValueError, match=f"h.1.mlp.c_fc.bias of .*{words}"):
        loader.load_model(folder, model_class=GPT, dtype=getattr(torch, dtype))


def test_dropout_of_the_config_is_not_taken_over(tmp_path: Path) -> None:
    config = config_of(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, dropout=0.5)
    assert (
        loader.load_model(write(tmp_path, random_tensors(), config), model_class=GPT).config.dropout
        == 0.0
    )


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


def python(*args: str, timeout: float = 90, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository root, with the environment changed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment}
    if (
        args[0] == "load_gpt2_weights.py" and not environment
    ):  # in this process, which has PyTorch already
        out, err, code = io.StringIO(), io.StringIO(), 0
        with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", [*args]):
            try:
                loader.main([*args[1:]])
            except SystemExit as ended:
                code = ended.code or 0
        return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_peak_memory_is_one_copy(full_size) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status to tell allocated from mapped memory")
    ran = python("-c", PEAK_MEMORY, str(full_size[0]))
    assert ran.returncode == 0, ran.stderr
    print(f"peak memory while loading 124M: {float(ran.stdout):.2f} x the weights")
    assert float(ran.stdout) < 1.3


# --- names and the Hugging Face cache --------------------------------------------------------------------------------


def test_names() -> None:
    for name, checkpoint in loader.PUBLIC.items():
        assert checkpoint.repo.rpartition("/")[2] == name.rpartition("/")[2]
        assert re.fullmatch("[0-9a-f]{40}|main", checkpoint.revision)
        assert name in loader.NAMES


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, with downloads off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cache_snapshot(
    cache: Path, name: str, tensors: dict[str, Tensor], config: dict[str, object]
) -> None:
    """Write a checkpoint where huggingface_hub keeps what it has downloaded."""
    repo, revision, weights = loader.PUBLIC[name]
    folder = cache / f"models--{repo.replace('/', '--')}"
    commit = revision if len(revision) == 40 else "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    write(folder / "snapshots" / commit, tensors, config, weights)


@pytest.mark.parametrize("name", [name for name in loader.PUBLIC if "gpt" in name.lower()])
def test_public_names_load_from_the_hub_cache(hub_cache: Path, name: str) -> None:
    tensors = random_tensors()
    cache_snapshot(hub_cache, name, prefixed(tensors) if "GPT" in name else tensors, config_of())
    assert_loaded(loader.load_model(name, model_class=GPT), tensors)


def test_public_name_not_in_the_cache_and_offline(hub_cache: Path) -> None:
    with pytest.raises(
        OSError, match=r"can't download config.json of distilbert/distilgpt2 .*the model pocket"
    ):
        loader.load_model("distilgpt2", model_class=GPT)


class Hub(BaseHTTPRequestHandler):
    """The part of Hugging Face's server that a download meets: /<repository>/resolve/<revision>/<file>."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, filename = rest.partition("/")
        self.requests.append(f"{self.command} {filename}")
        if repo != "openai-community/gpt2" or filename not in self.files:
            self.send_response(404)
            self.send_header(
                "X-Error-Code",
                "EntryNotFound" if repo == "openai-community/gpt2" else "RepoNotFound",
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", revision)
        self.send_header("ETag", f'"{hashlib.sha256(self.files[filename]).hexdigest()}"')
        self.send_header("Content-Length", str(len(self.files[filename])))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.files[filename])

    def log_message(self, *args: object) -> None:
        pass


LOAD = """
import sys
from gpt_kv_cache import GPT
from load_gpt2_weights import load_model
from support.cli import CommandLine
cli = CommandLine("x", "y")
cli.add_model_arguments()
with cli.parse() as args:
    model = load_model(args.model, model_class=GPT)
    print(model.config.n_embd, sum(parameter.double().sum().item() for parameter in model.parameters()))
"""


@pytest.mark.parametrize(
    "surroundings",
    [
        {"HTTPS_PROXY": "::::"},
        {"ALL_PROXY": "socks5://127.0.0.1:9"},
        {"HF_ENDPOINT": "nonsense"},
        {"HF_ENDPOINT": "http://["},
        {"HTTPS_PROXY": "http://127.0.0.1:9"},
        {"SSL_CERT_FILE": "/nowhere"},
        {"HF_HUB_CACHE": "/dev/null/x"},
    ],
)
@pytest.mark.slow
def test_whatever_keeps_a_model_from_being_fetched_is_one_sentence(
    surroundings: dict, tmp_path: Path
) -> None:
    ran = python("-c", LOAD, "--model", "gpt2", **{"HF_HUB_CACHE": str(tmp_path), **surroundings})
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "can't download config.json of openai-community/gpt2" in ran.stderr
    ran = python("-c", LOAD, **surroundings)  # pocket
    assert ran.returncode == 0 and ran.stderr == ""


@pytest.mark.slow
def test_download_from_a_hub_then_offline(tmp_path: Path) -> None:
    """Through huggingface_hub itself, from a server on this computer that speaks as Hugging Face's does."""
    tensors = random_tensors()
    folder = Path(write(tmp_path / "files", tensors))
    Hub.requests.clear()
    Hub.files = {"config.json": (folder / "config.json").read_bytes()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        ran = python("-c", LOAD, "--model", "gpt2", **environment)
        assert (
            ran.returncode == 2
            and "shows no model.safetensors in openai-community/gpt2 at revision" in ran.stderr
        )
        ran = python("-c", LOAD, "--model", "distilgpt2", **environment)
        assert ran.returncode == 2 and "shows no config.json in distilbert/distilgpt2" in ran.stderr
        Hub.files["model.safetensors"] = (folder / "model.safetensors").read_bytes()
        online = python("-c", LOAD, "--model", "gpt2", **environment)
        assert online.returncode == 0, online.stderr
        assert (
            Hub.requests.count("GET config.json")
            == Hub.requests.count("GET model.safetensors")
            == 1
        )
    finally:
        server.shutdown()
        server.server_close()
    offline = python("-c", LOAD, "--model", "gpt2", **environment)
    assert offline.returncode == 0 and offline.stdout == online.stdout, offline.stderr
    n_embd, total = online.stdout.split()
    assert n_embd == "16"
    assert float(total) == pytest.approx(
        sum(tensor.double().sum().item() for tensor in tensors.values())
    )


def test_pocket_names_are_folders_beside_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "HERE", tmp_path)
    vocab_size = write_tokenizer(tmp_path / "pocket" / "teacher", (b"th",))
    config = config_of(vocab_size=vocab_size)
    for seed, (name, folder) in enumerate(loader.POCKET.items()):
        tensors = random_tensors(config, seed)
        write(tmp_path / "pocket" / folder, tensors, config)
        assert_loaded(loader.load_model(name, model_class=GPT), tensors)
        assert loader.load_tokenizer(name).encode("the") == [256, 101]  # all use the teacher's


# --- refusals: one sentence that names the culprit -------------------------------------------------------------------


def assert_refused(
    folder: str, *culprits: str, error: type | tuple[type, ...] = ValueError
) -> None:
    with pytest.raises(error) as raised:
        loader.load_model(folder, model_class=GPT)
    message = str(raised.value)
    assert "\n" not in message and all(culprit in message for culprit in culprits), message


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["h.1.mlp.c_fc.bias"]
    tensors["h.2.ln_1.weight"] = torch.ones(16)
    tensors["wpe.weight"] = torch.ones(31, 16)
    tensors["ln_f.bias"] = torch.ones(16, dtype=torch.int8)
    assert_refused(
        write(tmp_path, tensors),
        "h.1.mlp.c_fc.bias is missing",
        "h.2.ln_1.weight is unexpected",
        "wpe.weight has shape (31, 16) instead of (32, 16)",
        "ln_f.bias holds torch.int8",
    )


def test_transposed_weight_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["h.0.attn.c_attn.weight"] = tensors["h.0.attn.c_attn.weight"].t()
    assert_refused(
        write(tmp_path, tensors), "h.0.attn.c_attn.weight has shape (48, 16) instead of (16, 48)"
    )


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    assert_refused(
        write(tmp_path, random_tensors(config_of(n_layer=5))), "is unexpected; and 28 more"
    )


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    assert_refused(
        write(tmp_path, tensors | {"transformer.ln_f.bias": torch.ones(16)}),
        "ln_f.bias",
        "second time",
    )


def test_untied_head_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    assert_loaded(
        loader.load_model(
            write(tmp_path, tensors | {"lm_head.weight": tensors["wte.weight"].clone()}),
            model_class=GPT,
        ),
        tensors,
    )
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    tensors["lm_head.weight"][5, 3] += 1e-3
    assert_refused(write(tmp_path, tensors), "lm_head.weight", "differs from wte.weight")


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1], ids=str)
def test_cut_off_file(tmp_path: Path, filename: str, kept: float) -> None:
    folder = write(tmp_path, random_tensors(), filename=filename)
    content = (tmp_path / filename).read_bytes()
    (tmp_path / filename).write_bytes(
        content[: int(kept * len(content)) if isinstance(kept, float) else kept]
    )
    assert_refused(folder, str(tmp_path / filename))


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "content", ["Not a checkpoint.\n" * 99, "version https://git-lfs.github.com/spec/v1\n", "{}"]
)
def test_text_under_a_checkpoint_name(tmp_path: Path, filename: str, content: str) -> None:
    folder = write(tmp_path, None)
    (tmp_path / filename).write_text(content)
    assert_refused(folder, str(tmp_path / filename), "Git LFS pointer")


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


@pytest.mark.parametrize(
    "content", [[torch.ones(2)], {"model": {"wte.weight": torch.ones(2)}}, {"step": 3}]
)
def test_something_else_than_named_tensors(tmp_path: Path, content: object) -> None:
    folder = write(tmp_path, None)
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_refused(folder, "pytorch_model.bin holds something else than named tensors")


def test_missing_files(tmp_path: Path) -> None:
    assert_refused(str(tmp_path), "no config.json", error=FileNotFoundError)
    folder = write(tmp_path, None)
    assert_refused(folder, "no weights", str(tmp_path), error=FileNotFoundError)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}))
    assert_refused(folder, "no model-00001-of-00002.safetensors", error=FileNotFoundError)
    for content in ("{}", '{"weight_map": ["x"]}', '{"weight_map": {"wte.weight": 3}}', "[]", "{"):
        index.write_text(content)
        assert_refused(folder, str(index))


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "{}", '{"n_embd": 16}', "\x00\x01"])
def test_malformed_config(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, random_tensors())
    (tmp_path / "config.json").write_text(content)
    assert_refused(folder, "config.json")


@pytest.mark.parametrize(
    "key, value",
    [
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_our_model_can_not_represent(tmp_path: Path, key: str, value: object) -> None:
    folder = write(tmp_path, random_tensors(), config_of(**{key: value}))
    assert_refused(folder, "config.json", key, repr(value), repr(loader.SUPPORTED["gpt2"][key][0]))


@pytest.mark.parametrize(
    "key, value",
    [
        ("n_head", 3),
        ("n_head", 0),
        ("n_layer", -1),
        ("n_embd", "16"),
        ("n_embd", 16.0),
        ("n_head", True),
    ],
)
def test_impossible_geometry(tmp_path: Path, key: str, value: object) -> None:
    assert_refused(write(tmp_path, random_tensors(), config_of(**{key: value})), key, str(value))


@pytest.mark.parametrize(
    "key", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "head_dim", "n_inner"]
)
@pytest.mark.parametrize("value", [2**62, 2**100, 10**9])
def test_geometry_beyond_the_weights_is_refused_before_anything_is_allocated(
    tmp_path: Path, key: str, value: int
) -> None:
    key_in_model = "n_ctx" if key == "n_positions" else key
    config = config_of(**{"head_dim": 4, key: value})
    assert_refused(
        write(tmp_path, random_tensors(), config), "config.json", key_in_model, str(value)
    )


@pytest.mark.parametrize("name", ["slots", "recent"])
@pytest.mark.parametrize("value", [2**62, 2**100, -1])
def test_impossible_memory(tmp_path: Path, name: str, value: int) -> None:
    config = read_json(ROOT / "pocket" / "bct" / "config.json") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(ROOT / "pocket" / "bct" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}.* {value}"):
        loader.load_model(str(tmp_path), model_class=BCT)


def test_a_config_without_n_positions_but_with_n_ctx(tmp_path: Path) -> None:
    config = config_of(n_ctx=32, n_positions=None)
    assert (
        loader.load_model(write(tmp_path, random_tensors(), config), model_class=GPT).config.n_ctx
        == 32
    )


UNUSUAL = {
    "sparse": lambda: torch.ones(16).to_sparse(),
    "on no device": lambda: torch.ones(16, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(12)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.qint8),
    "of one number": lambda: torch.ones(1).expand(2**40),
    "complex": lambda: torch.ones(16, dtype=torch.complex64),
    "four bits": lambda: torch.zeros(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    for name in ("ln_f.bias", "lm_head.weight", "x"):
        tensors = random_tensors() | {name: UNUSUAL[kind]()}
        assert_refused(write(tmp_path, tensors, filename="pytorch_model.bin"), name)


def test_float64_is_read_and_bytes_that_need_a_scale_are_not(tmp_path: Path) -> None:
    tensors = {name: tensor.double() for name, tensor in random_tensors().items()}
    assert_loaded(loader.load_model(write(tmp_path, tensors), model_class=GPT), tensors)
    tensors["ln_f.bias"] = tensors["ln_f.bias"].to(torch.float8_e4m3fn)
    assert_refused(write(tmp_path, tensors), "ln_f.bias holds torch.float8_e4m3fn")


def test_a_head_of_another_dtype_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    assert_refused(
        write(tmp_path, tensors | {"lm_head.weight": tensors["wte.weight"].half()}),
        "differs from wte",
    )


@pytest.mark.parametrize(
    "content",
    [
        {0: torch.ones(2)},
        {("wte", "weight"): torch.ones(2)},
        {b"wte.weight": torch.ones(2)},
        {None: torch.ones(2)},
        torch.ones(2),
        [["wte.weight", torch.ones(2)]],
        {"wte": {"weight": torch.ones(2)}},
    ],
    ids=str,
)
def test_names_must_be_texts(tmp_path: Path, content: object) -> None:
    folder = write(tmp_path, None)
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_refused(folder, "pytorch_model.bin holds something else than named tensors")


@pytest.mark.parametrize(
    "shard",
    [
        "../elsewhere.safetensors",
        "/elsewhere.safetensors",
        "sub/elsewhere.safetensors",
        ".",
        "..",
        "",
        "a\0b",
        "model.safetensors.index.json",
    ],
)
def test_shards_are_files_beside_their_index(tmp_path: Path, shard: str) -> None:
    write(
        tmp_path / "folder" / "sub", tensors := random_tensors(), filename="elsewhere.safetensors"
    )
    write(tmp_path, tensors, filename="elsewhere.safetensors")
    shard = shard.replace("/else", f"{tmp_path}/else") if shard.startswith("/") else shard
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for name in tensors}}))
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config_of()))
    assert_refused(str(tmp_path / "folder"), str(index), error=(ValueError, OSError))


def header_of(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, **changes}


@pytest.mark.parametrize(
    "header, length",
    [
        (header_of(), 2**63),
        (header_of(), 10**6),
        (header_of(b=header_of()["a"]), None),  # both claim the same bytes
        (header_of(a={"dtype": "F77", "shape": [2], "data_offsets": [0, 8]}), None),
        (header_of(a={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}), None),
        (header_of(a={"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}), None),
        (header_of(a={"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}), None),
        ({"a": 1}, None),
        ([], None),
        (header_of(a={"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}), None),
        (header_of(a={"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}), None),
        (header_of(a={"dtype": "F6_E2M3", "shape": [32], "data_offsets": [0, 24]}), None),
        ({}, None),
        (header_of(a={"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}), None),
    ],
)
def test_a_damaged_safetensors_header(tmp_path: Path, header: object, length: int | None) -> None:
    text = json.dumps(header).encode()
    folder = write(tmp_path, None)
    data = b"\0" * (0 if header in ({}, []) else 24 if b"F6" in text else 8)
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", length or len(text)) + text + data
    )
    assert_refused(folder, str(tmp_path))


@pytest.mark.parametrize(
    "content", ["[" * 10**5, '{"n_embd":' * 10**5, '{"n_embd": ' + "9" * 5000 + "}"]
)
def test_json_that_is_too_deep_or_too_long(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, random_tensors())
    (tmp_path / "config.json").write_text(content)
    assert_refused(folder, "config.json")


@pytest.mark.parametrize("name", ["gpt3", "", "no/such/folder"])
def test_unknown_name(name: str) -> None:
    if name:
        assert_refused(name, repr(name), "pocket", "microsoft/DialoGPT-large", "or a folder")
    with pytest.raises((ValueError, OSError)):
        loader.load_tokenizer(name)


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tiktoken.Encoding:
    folder = tmp_path_factory.mktemp("own")
    vocab_size = write_tokenizer(folder, (b"th", b" a", b" th", "é".encode(), b"  "))
    write(folder, None, config_of(vocab_size=vocab_size))
    return loader.load_tokenizer(str(folder))


def test_own_tokenizer_round_trips_any_text(own_tokenizer: tiktoken.Encoding) -> None:
    rng = random.Random(0)
    anything = [*map(chr, range(0x250)), "語", "🙂", "\u0301", "\x00", *"theth a é\n<|endoftext|>"]
    for _ in range(300):
        text = "".join(rng.choices(anything, k=rng.randint(0, 60)))
        assert own_tokenizer.decode(own_tokenizer.encode(text, disallowed_special=())) == text


def test_own_tokenizer(own_tokenizer: tiktoken.Encoding, tmp_path: Path) -> None:
    assert own_tokenizer.encode("a the é") == [97, 258, 101, 32, 259]
    assert own_tokenizer.encode("x<|endoftext|>", allowed_special="all") == [120, 261]
    assert (own_tokenizer.eot_token, own_tokenizer.n_vocab) == (261, 262)
    write(tmp_path, None, config_of(vocab_size=write_tokenizer(tmp_path)))
    assert loader.load_tokenizer(str(tmp_path)).n_vocab == 257
    write(tmp_path, None, config_of(vocab_size=write_tokenizer(tmp_path, (b"th",))))
    assert loader.load_tokenizer(str(tmp_path)).n_vocab == 258  # the new content, not a cached one


@pytest.mark.parametrize(
    "content", ["", "!!!! 0\n", "YQ== 0 1\n", "YQ==\n", "YQ== zero\n", "YQ== 0\nYg== 0\n", "é 0"]
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


def gpt2_vocabulary(**changes: int) -> dict[str, int]:
    """GPT-2's tokens as vocab.json has them, some with other numbers."""
    chars = loader.byte_characters()
    ranks = gpt2_encoding()._mergeable_ranks
    names = {"".join(chars[b] for b in token): rank for token, rank in ranks.items()}
    return names | {"<|endoftext|>": 50256, **changes}


def test_a_vocabulary_of_its_own_is_read_as_it_is(tmp_path: Path) -> None:
    """Another language's GPT-2 has 50,257 tokens too; two that have changed places are no vocabulary."""
    gpt2_encoding()
    folder = write(tmp_path, None, config_of(vocab_size=50257))
    (tmp_path / "tokenizer.model").write_text("of another kind")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        loader.load_tokenizer(folder)
    write(tmp_path, None, config_of(vocab_size=259))
    chars = loader.byte_characters()
    own = {**{char: byte for byte, char in enumerate(chars)}, "th": 256, "the": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(own | {"<|endoftext|>": 258}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    tokenizer = loader.load_tokenizer(folder)
    assert tokenizer.encode("the<|endoftext|>", allowed_special="all") == [257, 258]
    assert (tokenizer.eot_token, tokenizer.n_vocab) == (258, 259)
    (tmp_path / "merges.txt").write_text("th e\nt h\n")
    with pytest.raises(ValueError, match="in the order of its merges"):
        loader.load_tokenizer(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(
    "file", ["tokenizer.tiktoken", "tokenizer.json", "vocab.json", "config.json"]
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path, None, config_of(vocab_size=257))
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(ValueError, match=f"{file} is not a regular file"):
        loader.load_tokenizer(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"model": 3}', '{"model": {"vocab": []}}', "\0", "\xff"]
)
@pytest.mark.parametrize("file", ["vocab.json", "tokenizer.json", "merges.txt"])
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, file: str, content: str) -> None:
    folder = write(tmp_path, None, config_of(vocab_size=50257))
    if file == "merges.txt":
        (tmp_path / "vocab.json").write_text(json.dumps(gpt2_vocabulary()))
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="vocab.json|merges.txt" if file == "merges.txt" else file):
        loader.load_tokenizer(folder)


def test_the_articles_prompt_is_known_without_the_tokenizer() -> None:
    assert loader.Numbers().encode(ARTICLE["prompt"]) == gpt2_encoding().encode(ARTICLE["prompt"])


@pytest.mark.slow
def test_a_folder_that_transformers_wrote_with_gpt2s_own_vocabulary(tmp_path: Path) -> None:
    """vocab.json, merges.txt and tokenizer.json as transformers writes them say the same as GPT-2's own."""
    transformers = pytest.importorskip("transformers")
    folder, vocabulary = write(tmp_path, None, config_of(vocab_size=50257)), gpt2_vocabulary()
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges_of(vocabulary)) + "\n"
    )
    theirs = transformers.GPT2Tokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= {
        path.name for path in tmp_path.iterdir()
    }
    ours, text = loader.load_tokenizer(folder), "Naïve  tokens: 語, can't they?\n\n 12345"
    assert ours.encode(text) == theirs.encode(text)
    written = read_json(tmp_path / "tokenizer.json")
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": written["pre_tokenizer"] | {"add_prefix_space": True}},
        {"model": written["model"] | {"merges": written["model"]["merges"][::-1]}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(written | change))
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            loader.load_tokenizer(folder)


def merges_of(vocabulary: dict[str, int]) -> list[str]:
    """The pairs that GPT-2 merges: of each token the two parts into which the merges before it cut it."""
    ranks = gpt2_encoding()._mergeable_ranks
    chars = loader.byte_characters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1])[256:]:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            best = min(
                range(len(parts) - 1),
                key=lambda i: (
                    ranks.get(parts[i] + parts[i + 1], rank) % (rank + 10**6)
                    if ranks.get(parts[i] + parts[i + 1], rank) < rank
                    else 10**9
                ),
            )
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        merges.append(" ".join("".join(chars[b] for b in part) for part in parts))
    return merges


def test_gpt2_tokenizer_that_can_not_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> tiktoken.Encoding:
        raise requests.exceptions.ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(OSError, match=r"can't download GPT-2's tokenizer.*the model pocket"):
        loader.load_tokenizer("gpt2")


# --- command line ----------------------------------------------------------------------------------------------------


def assert_one_sentence(ran: subprocess.CompletedProcess[str], *culprits: str) -> None:
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("load_gpt2_weights.py: "), (
        ran.stderr
    )
    assert all(culprit in ran.stderr for culprit in culprits), ran.stderr


def test_help() -> None:
    ran = python("load_gpt2_weights.py", "--help")
    assert ran.returncode == 0
    said = " ".join(ran.stdout.split())
    assert "python3 load_gpt2_weights.py gpt2 --verify" in said and "(default: pocket)" in said


def test_unknown_model_on_the_command_line() -> None:
    assert_one_sentence(
        python("load_gpt2_weights.py", "gpt5"), "'gpt5'", "microsoft/DialoGPT-medium"
    )


def test_absent_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert_one_sentence(python("load_gpt2_weights.py", "--device", "cuda"), "--device cuda")


# A name server that knows no host: the case of a computer without a network, on one that has it.
NO_NETWORK = """
import runpy, socket, sys
def fail(*args, **kwargs):
    raise socket.gaierror(-2, "Name or service not known")
socket.getaddrinfo = fail
sys.argv = ["load_gpt2_weights.py", "gpt2", "--verify"]
runpy.run_path("load_gpt2_weights.py", run_name="__main__")
"""


@pytest.mark.parametrize("offline", ["0", "1"])
def test_download_without_network_is_one_sentence_at_once(tmp_path: Path, offline: str) -> None:
    start = time.perf_counter()
    ran = python(
        "-c",
        NO_NETWORK,
        HF_HOME=str(tmp_path),
        HF_HUB_CACHE=str(tmp_path / "hub"),
        HF_HUB_OFFLINE=offline,
    )
    assert_one_sentence(
        ran, "can't download config.json of openai-community/gpt2", "run this once with internet"
    )
    assert (
        time.perf_counter() - start < 30
    )  # huggingface_hub's own retries would add 23 seconds; usual: 3 in all


@pytest.mark.parametrize("name", ["pocket", "gpt2-medium", "nonsense"])
def test_nothing_published_to_verify_with(name: str) -> None:
    assert_one_sentence(
        python("load_gpt2_weights.py", name, "--verify"),
        f"no published continuation of {name} ",
        "gpt2, gpt2-xl, microsoft/DialoGPT-medium, microsoft/DialoGPT-small",
    )


@pytest.mark.slow
def test_verify_fails_on_other_weights(tmp_path: Path) -> None:
    gpt2_encoding()
    config = config_of(vocab_size=50257)
    cache_snapshot(tmp_path, "gpt2", random_tensors(config), config)
    ran = python(
        "load_gpt2_weights.py", "gpt2", "--verify", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert ran.returncode == 1 and not ran.stderr, ran.stderr
    assert (
        "DIFFERENT: 'The dog' -> " in ran.stdout
        and "0 of 10 published continuations reproduced" in ran.stdout
    )


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["load_gpt2_weights.py", *argv, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        loader.main()
    return ended.value.code


def test_verify_against_greedy_text_of_transformers(
    hub_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole of --verify, on a byte-level model: what transformers writes stands for the published text."""
    reference = transformers_model(std=0.2, **{**TINY, "vocab_size": 257})
    reference.transformer.wte.weight.data[128:256] = (
        0.0  # prefers ASCII, so that the text has no broken characters
    )
    tensors = {name: tensor.clone() for name, tensor in reference.transformer.state_dict().items()}
    cache_snapshot(hub_cache, "gpt2", tensors, config_of(vocab_size=257))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: byte_encoding())
    entries = []
    for prompt in ("The dog", "Hi<|endoftext|>"):
        ids = torch.tensor([byte_encoding().encode(prompt, allowed_special="all")])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        text = byte_encoding().decode(out[0, ids.size(1) :].tolist())
        assert "\ufffd" not in text
        entries.append(
            {"model": "gpt2", "prompt": prompt, "continuation": text, "source": "transformers"}
        )
    table = tmp_path / "expected.json"
    monkeypatch.setattr(loader, "EXPECTED_OUTPUTS", table)
    table.write_text(json.dumps({"continuations": entries}))
    assert run_main(monkeypatch, "gpt2", "--verify") == 0
    assert "2 of 2 published continuations reproduced" in capsys.readouterr().out
    entries[1]["continuation"] = "x" + entries[1]["continuation"][1:]
    table.write_text(json.dumps({"continuations": entries}))
    assert run_main(monkeypatch, "gpt2", "--verify") == 1
    printed = capsys.readouterr().out
    assert (
        "DIFFERENT: 'Hi<|endoftext|>'" in printed
        and "by: transformers" in printed
        and "1 of 2" in printed
    )


def test_published_continuations_are_well_formed() -> None:
    published = read_json(loader.EXPECTED_OUTPUTS)["continuations"]
    assert len(published) == 16 and {entry["model"] for entry in published} <= set(loader.PUBLIC)
    for entry in published:
        assert set(entry) == {"model", "prompt", "continuation", "source"} and all(entry.values())
        if "DialoGPT" in entry["model"]:
            assert entry["prompt"].endswith("<|endoftext|>") and entry["continuation"].endswith(
                "<|endoftext|>"
            )


def test_sample_of_a_folder(tmp_path: Path) -> None:
    vocab_size = write_tokenizer(tmp_path)
    folder = write(
        tmp_path, random_tensors(config_of(vocab_size=vocab_size)), config_of(vocab_size=vocab_size)
    )
    ran = python("load_gpt2_weights.py", folder, "--dtype", "bfloat16", "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert "2 layers, 4 heads of 4, width 16, context 32, vocabulary 257" in ran.stdout
    n_parameters = sum(
        tensor.numel() for tensor in random_tensors(config_of(vocab_size=vocab_size)).values()
    )
    assert f"{n_parameters:,} parameters, bfloat16, {2 * n_parameters:,} bytes on cpu" in ran.stdout
    assert PROMPT in ran.stdout and "KV cache 0 bytes" not in ran.stdout
