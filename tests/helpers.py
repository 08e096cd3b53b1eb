"""What several test files use."""

import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gpt_kv_cache import GPT, GPTConfig
from llama_kv_cache import Llama, LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = (ROOT / "requirements.txt").read_text("utf-8")
RECORDED_UNDER = re.search(r"^torch==(.*)$", REQUIREMENTS, re.M)[1]
recorded = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORDED_UNDER,
    reason=f"compares recorded texts, which are those of torch {RECORDED_UNDER}",
)


KINDS = ("GPT-2", "Llama")  # what every method takes


def of_kind(kind: str, config: GPTConfig) -> GPTConfig | LlamaConfig:
    """Return a GPT-2's config, or that of a Llama with its sizes and as many key-value heads. The
    Llama has twice as many query heads, and even its slowest pair rotates noticeably in a short
    text."""
    if kind == "GPT-2":
        return config
    names = ("vocab_size", "n_ctx", "n_layer", "n_embd", "n_inner")
    sizes = {name: getattr(config, name) for name in names}
    heads = {"n_head": 2 * config.n_head, "n_kv_head": config.n_head}
    even = config.head_dim + config.head_dim % 2
    return LlamaConfig(**sizes, **heads, head_dim=even, rope_theta=100.0)


def class_of(config: GPTConfig | LlamaConfig) -> type[nn.Module]:
    """Return the class of the model that a config describes."""
    return Llama if isinstance(config, LlamaConfig) else GPT


LLAMA3 = {  # frequencies, scaled as Llama 3.2's for a shorter context
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def random_llama(kind: str = "Llama", **geometry: Any) -> Any:
    """Return a model of transformers, its weights and biases so large that mistakes show. kind: the beginning of its
    class's name, such as Qwen3."""
    transformers = pytest.importorskip("transformers")
    config = {
        "vocab_size": 1536,
        "max_position_embeddings": 512,
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model = model_class(model_class.config_class(**config | geometry)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # which begin as 0 and 1
            if name.endswith(("_proj.bias", "q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.5, 2.0)
    return model


def write_llama(folder: Path, **geometry: Any) -> Path:
    """Write a random Llama to a folder, as transformers does, with the pocket models' tokenizer."""
    random_llama(**geometry).save_pretrained(folder)
    shutil.copy(ROOT / "pocket" / "teacher" / "tokenizer.tiktoken", folder)
    return folder


class Ran(NamedTuple):
    """What a script left: its exit status, and what it printed."""

    code: int
    out: str
    err: str


def run(main: Callable, *words: object) -> Ran:
    """Call a script's main() with the words of a command line, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([*map(str, words)])
        except SystemExit as end:
            code = end.code or 0
    return Ran(code, out.getvalue(), err.getvalue())


def process(*command: object, folder: Path = ROOT, **environment: str) -> Ran:
    """Run a command in a process of its own, in a folder, with the environment changed."""
    changed = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | environment
    words = [*map(str, command)]
    done = subprocess.run(
        words, cwd=folder, env=changed, capture_output=True, encoding="utf-8", timeout=600
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def start(command: str) -> Ran:
    """Run a script in this process, given as on a command line: its module's name, and its words."""
    script, *words = shlex.split(command)
    if (ROOT / script.replace(".", "/") / "study.py").exists():
        script += ".study"
    return run(importlib.import_module(script).main, *words)


def refused(ran: Ran, *words: str) -> None:
    """Fail unless a script ended with status 2 and a single sentence, which holds the words."""
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err


@contextmanager
def offline_page(browser: Any) -> Iterator[Any]:
    """Yield a page of a browser that is offline; an error in a script fails the test."""
    context = browser.new_context(viewport={"width": 1500, "height": 900}, offline=True)
    page, errors = context.new_page(), []
    page.set_default_timeout(120_000)  # ms: a busy machine is slow, and not wrong

    def said(message: Any) -> None:
        if message.type == "error":
            errors.append(message.text)

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "blob:")):
            errors.append(request.url)

    page.on("pageerror", lambda error: errors.append(error))
    page.on("console", said)
    page.on("request", asked)
    yield page
    context.close()
    assert errors == []


def in_halves(file: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Run a test file as a script in two processes, which have not computed yet and can fork, each
    with half of the names; return what both write with --json."""
    results = [folder / "0.json", folder / "1.json"]
    running = [
        subprocess.Popen([sys.executable, file, *names[i::2], "--json", str(result)], cwd=ROOT)
        for i, result in enumerate(results)
    ]
    assert [process.wait(timeout=1200) for process in running] == [0, 0]
    first, second = (json.loads(result.read_text("utf-8")) for result in results)
    return first | second


def read_pocket_config(name: str) -> dict[str, Any]:
    """Return config.json of a shipped model."""
    return json.loads((ROOT / "pocket" / name / "config.json").read_text("utf-8"))


N_CTX = read_pocket_config("teacher")["n_ctx"]  # of the shipped model
