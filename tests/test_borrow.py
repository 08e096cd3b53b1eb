"""BORROW.md: its examples run on the files that it names and nothing else, and write what the model writes alone."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, process

TEXT = (ROOT / "BORROW.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.S))
FILES = {
    name: files.split() for name, files in re.findall(r"^\| (\w+) \|.*\| `(.*)` \|", TEXT, re.M)
}
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
    "recycle": "same(answer)\nassert 20 < len(store.get(prompts[0])) == len(prompts[0]) - 1",
    "paged": "same(ask)",
    "speculate": "same(lambda ids, n: write(ids, n)[0])\nsame(lambda ids, n: write(ids, n, draft_by_student)[0])",
}
TRANSFORMERS = """
import torch, transformers
from adapter import Adapter
from gpt_kv_cache import generate

torch.manual_seed(0)
config = transformers.{}Config(initializer_range=0.3, vocab_size=50, eos_token_id=None, {})
plain, ids = transformers.{}(config).eval(), torch.arange(20)[None]
own = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, 20:]
model = Adapter(plain).eval()
assert own.tolist() == [int(token) for token in generate(model, ids, 12)]
"""
MODELS = {
    "GPT-2": TRANSFORMERS.format(
        "GPT2", "n_positions=128, n_layer=2, n_head=4, n_embd=32", "GPT2LMHeadModel"
    ),
    "Llama": TRANSFORMERS.format(
        "Llama",
        "max_position_embeddings=128, num_hidden_layers=2, num_attention_heads=4,"
        " num_key_value_heads=2, hidden_size=32, intermediate_size=64",
        "LlamaForCausalLM",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ours", *MODELS])
@pytest.mark.parametrize("method", FILES)
def test_an_example_writes_what_the_model_writes_alone(
    tmp_path: Path, method: str, model: str
) -> None:
    """The page's own model, and one of transformers in its place."""
    examples = dict(EXAMPLES)
    if model in MODELS:
        pytest.importorskip("transformers")
        examples["my_gpt.py"] = MODELS[model]
    for name in FILES[method]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name, code in examples.items():
        (tmp_path / name).write_text(code, "utf-8")
    code = f"{examples[f'use_{method}.py']}{SAME}{CHECKS[method]}\n"
    ran = process(sys.executable, "-c", code, folder=tmp_path)
    assert ran.code == 0, ran.err
