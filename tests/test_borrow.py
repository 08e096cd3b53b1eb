"""BORROW.md: its examples run on the files that it names and nothing else, and write what the model writes alone."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recycle import prefilled_cache
from support.fingerprints import fingerprint
from support.store import Store
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
    "recycle": """same(answer)
assert 20 < len(store.get(prompts[0])) == len(prompts[0]) - 1
begin = lambda ids, n: [int(token) for token in generate(model, torch.tensor([ids]), n)]
prompt = [*range(10, 50)] * 2
text = prompt + begin(prompt, 100)
assert answer(prompt, 100) == text[80:]  # past the context of 128
assert answer(prompt, 0) == []
for start in (0, 64):
    assert answer(text[start : start + 100], 9) == begin(text[start : start + 100], 9)
""",
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


def test_models_of_transformers_that_compute_other_keys_of_equal_weights_have_other_folders(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    listing: dict[str, Any] = {}
    exec(EXAMPLES["adapter.py"], listing)

    def adapter(change: Callable[[nn.Module], object] = id, **options: object) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=50, max_position_embeddings=64, num_hidden_layers=2, hidden_size=16,
            intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3,
            **options,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        change(model)
        return listing["Adapter"](model).eval()

    def scaled(**options: object) -> dict[str, object]:
        return {"rope_parameters": {"rope_theta": 1e4, **options}}

    models = [
        adapter(),
        adapter(**scaled(rope_type="default") | scaled(rope_theta=100.0, rope_type="default")),
        adapter(**scaled(rope_type="linear", factor=2.0)),
        adapter(rms_norm_eps=0.1),
        adapter(lambda model: setattr(model.model.norm, "variance_epsilon", 0.1)),
        adapter(lambda model: model.model.rotary_emb.inv_freq.mul_(2)),
        adapter(lambda model: model.register_buffer("more", torch.ones(1))),
        adapter(hidden_act="gelu"),
    ]
    assert len({fingerprint(model) for model in models}) == 1
    folders = set()
    for model in models:
        store, ids = Store(model, tmp_path), [*range(20)]
        assert len(store.get(ids)) == 0
        store.put(ids, prefilled_cache(model, ids))
        assert len(store.get(ids)) == 19
        folders.add(store.folder)
    assert len(folders) == len(models)
    models[0].model.save_pretrained(tmp_path / "saved")
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    again = [Store(listing["Adapter"](saved).eval(), tmp_path).get(ids)]
    again.append(Store(adapter(), tmp_path).get(ids))
    assert len(again[1]) == 19


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
