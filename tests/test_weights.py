"""The study of real weights, on folders as they are downloaded, with random weights."""

from pathlib import Path

import pytest
import torch

import gpt_bounded_cache
from gpt_kv_cache import GPT, GPTConfig
from load_gpt2_weights import load_tokenizer
from pocket.checkpoints import export
from studies import weights
from tests.helpers import refused, run, write_llama


def write_gpt2(path: Path, n_layer: int) -> str:
    """A folder with GPT-2's vocabulary and tokenizer, as on Hugging Face."""
    try:
        load_tokenizer("gpt2")
    except OSError as error:
        pytest.skip(f"GPT-2's tokenizer isn't here: {error}")
    torch.manual_seed(n_layer)
    export(GPT(GPTConfig(n_layer=n_layer, n_head=2, n_embd=64)), path, torch.float32)
    return str(path)


def assert_agreement(name: str) -> None:
    found = weights.compare_lecture_files(name, "cpu", torch.float32, 6)
    assert len(found) == 3 and all(same and apart < 1e-4 for same, apart in found.values())


def test_three_files_agree_and_a_fault_in_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_agreement(str(write_llama(tmp_path / "llama")))
    assert_agreement(name := write_gpt2(tmp_path / "weights", 2))
    way, forgets = "gpt_bounded_cache.py", lambda n_ctx: gpt_bounded_cache.SlidingWindowCache(4)
    monkeypatch.setitem(weights.LECTURE_FILES, way, (gpt_bounded_cache, forgets))
    assert weights.compare_lecture_files(name, "cpu", torch.float32, 6)[way][1] > 1e-3


@pytest.mark.slow
def test_the_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(weights, "DIALOGUE_MODEL", write_gpt2(tmp_path / "DialoGPT", 3))
    weights.main(["--model", write_gpt2(tmp_path / "tiny", 2), "--quick", "--out", str(out)])
    assert "3 layers" in (out / "recycling" / "reduced.jsonl").read_text(encoding="utf-8")
    assert '{"kind": "capitals"' in (out / "projection" / "reduced.jsonl").read_text(
        encoding="utf-8"
    )
    assert " NO " not in capsys.readouterr().out


def test_files_that_disagree_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        weights, "compare_lecture_files", lambda *_: {"gpt_kv_cache.py": (False, 1.0)}
    )
    ran = run(weights.main, "--quick", "--out", tmp_path)
    refused(ran, "write different texts")
    assert " NO " in ran.out
