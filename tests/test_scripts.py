"""Scripts as people meet them: the default run, and bad input that gets one sentence and exit status 2."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers import Ran, read_pocket_config, refused, start

ROOT = Path(__file__).resolve().parent.parent
GPT_FILES = ["gpt_baseline", "gpt_kv_cache"]
CONFIG = read_pocket_config("teacher")
TOKEN = 2 * CONFIG["n_layer"] * CONFIG["n_embd"] * 4  # bytes of a token's keys and values


def text_of(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    assert re.search(
        r"prefill [\d.]+ ms, decode [\d.]+ ms per token = [\d,]+ tokens/s, KV cache [\d,]+ bytes",
        ran.out,
    )
    return ran.out.split("\n\n[prefill")[0]


def test_all_files_write_the_same() -> None:
    scripts = [*GPT_FILES, "gpt_bounded_cache --memory full"]
    options = "--max-new-tokens 40 --temperature 0.8 --top-k 20 --seed"
    texts = [text_of(start(f"{script} {options} 5")) for script in scripts]
    assert len(texts[0].split()) > 20 and len({*texts}) == 1
    assert text_of(start(f"gpt_kv_cache {options} 6")) != texts[0]


def test_every_memory_writes_text_and_says_its_bytes() -> None:
    bct = read_pocket_config("bct")
    head = bct["slots"] * (2 * 32 + 1) + bct["recent"] * (2 * 32 + 1 + bct["slots"])
    for memory, nbytes in {
        "full": TOKEN * (CONFIG["n_ctx"] + 1),
        "window --slots 50": 50 * TOKEN,
        "sinks --slots 50": 50 * TOKEN,
        "bct": 4 * bct["n_layer"] * bct["n_head"] * head,
    }.items():
        ran = start(f"gpt_bounded_cache --memory {memory} --max-new-tokens 40")
        assert len(text_of(ran).split()) > 20
        assert f"KV cache {nbytes:,} bytes" in ran.out


BARE = {  # of bare runs, some of them shortened: lines that say what is exact
    "gpt_bounded_cache --max-new-tokens 50 --prompt Notes:": [r"full, .* 0\.0000 +100\.0%"],
    "projector": [r"cold: .* 0\.00 +100%", r"rival: .* 0\.00 +100%"],
    "overfill --max-new-tokens 48 --policy periodic:8": [r"teacher +0\.000"],
    "speculate --max-new-tokens 20": [
        r"(drafts of .* 3 of 3 .*\n +){3}the teacher alone +\d+ +950"
    ],
    "compress --tokens 128": [r"full +9,216 +4,608 +0\.0000", r"preallocated .* 0\.0000"],
    "hybrid_kv_cache": ["same tokens: yes", "1000 tokens of 1024, 960 evicted"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", BARE)
def test_a_bare_run_shows_what_is_exact(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = start(command)
    assert ran.code == 0, ran.err
    for line in BARE[command]:
        assert re.search(line, ran.out), ran.out


@pytest.mark.slow
def test_bct_goes_on_past_the_context() -> None:
    long = f"--prompt '{'Notes: ' * (CONFIG['n_ctx'] // 2)}' --max-new-tokens 5"
    for memory, full in (("bct", False), ("full", True)):
        ran = start(f"gpt_bounded_cache --memory {memory} {long}")
        assert (f"context of {CONFIG['n_ctx']} holds only the last" in ran.out) == full


def test_an_untrained_model_writes_what_the_article_lets_it_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(name: str) -> None:
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    untrained = "gpt_kv_cache --model random:2x2x8 --threads 1"
    ran = start(f"{untrained} --prompt 'Hello, I am' --max-new-tokens 200 --compare")
    assert ran.code == 0 and re.search(r"\nHello, I am( \d+){200}\n", ran.out)
    assert "Same tokens: yes (no cache: 200, KV cache: 200)" in ran.out
    offline = "can't download GPT-2's tokenizer (no network for gpt2): run this once with internet"
    assert f"tokens are shown as numbers: {offline}" in ran.err
    other = start(untrained)
    assert other.code == 2 and "the prompt must be 'Hello, I am', got 'One morning'" in other.err


def test_a_students_cache_takes_the_place_of_ours(tmp_path: Path) -> None:
    command = f"gpt_kv_cache --compare --max-new-tokens 20 --cache {tmp_path / 'exercise.py'}"
    refused(start(command), "exercise.py: FileNotFoundError")
    ours = "from gpt_kv_cache import KVCache\n\nclass Cache(KVCache):\n    "
    stub = "def append(self, *_):\n        raise NotImplementedError('exercise 2.1')\n"
    for source, said in [
        ("x = 1\n", "has no attribute 'Cache'"),
        (ours + stub, "exercise 2.1 isn't written"),
        ("class Cache(\n", "SyntaxError: '(' was never closed (exercise.py, line 1)"),
        ("raise SystemExit(3)\n", "exercise.py, line 1: SystemExit: 3"),
        ("\nraise ValueError('two\\nlines')\n", "line 2: ValueError: two lines"),
        (f"{ours}def __init__(self, n):\n        pass\n", "exercise.py: TypeError"),
        (f"{ours}def __init__(self):\n        self.n = m\n", "line 5: NameError"),
    ]:
        (tmp_path / "exercise.py").write_text(source)
        ran = start(command)
        refused(ran, said)
        assert ran.out == "" or ran.out.endswith("\n")  # the sentence begins a line
    (tmp_path / "exercise.py").write_text(f"{ours}nbytes = 12345\n")
    ran = start(command)
    assert ran.code == 0 and "Same tokens: yes" in ran.out and "12,345 bytes" in ran.out


BAD = {  # a command, and what its sentence must hold
    "gpt_baseline --model gpt5": "gpt5 mean gpt2?",
    "gpt_baseline --model qqqq": "qqqq pocket --help",
    "gpt_baseline --model Qwen/Qwen2.5-0.5B": "download it and give the folder",
    "gpt_kv_cache --model pocket:int99": "pocket:int99 2 to 8",
    "gpt_kv_cache --top-k 5": "--top-k --temperature",
    "gpt_baseline --model tests": "config.json tests",
    "gpt_kv_cache --trace .": ". is not a regular file",
    "gpt_kv_cache --trace README.md/x.html": "Not a directory README.md",
    "gpt_kv_cache --max-new-tokens 2 --temperature nan": "temperature at least 1e-6 nan",
    "gpt_kv_cache --model pocket-bct": "config.json gpt_bounded_cache.py --memory bct",
    "gpt_kv_cache --model random:x": "124M LAYERSxHEADSxWIDTH 'x'",
    "gpt_bounded_cache --slots 5 --memory sinks": "--slots 5 at least 6",
    "gpt_bounded_cache --slots 50 --memory bct": "bct --slots",
    "gpt_bounded_cache --model pocket-bct --memory window": "describes a BCT",
    "gpt_bounded_cache --model pocket/teacher --memory bct": "pocket/teacher describes a GPT-2",
    "gpt_bounded_cache --trace x.html": "give --memory too",
    "overfill write --policy often": "often periodic",
    "overfill write --policy dropout:8:0.1": "pocket-student without dropout",
    "overfill write --student pocket-bct": "describes a BCT",
    "overfill --max-new-tokens 1": "at least 2 got 1",
    "overfill --max-new-tokens 5000": f"5000 context of {CONFIG['n_ctx']}",
    "overfill --top-k 2": "unrecognized arguments: --top-k 2",
    "recycle chat --store ''": "is empty",
    "recycle chat --fresh --store x": "--store not allowed with --fresh",
    "recycle chat --capacity 0": "--capacity at least 1 '0'",
    "recycle talk": "invalid choice: 'talk' run chat",
    f"recycle --max-new-tokens {CONFIG['n_ctx'] - 12}": f"{CONFIG['n_ctx'] - 12} {CONFIG['n_ctx']}",
    "paged serve": "required: FILE",
    "paged run x.txt": "unrecognized x.txt",
    "paged serve nowhere.txt": "nowhere.txt",
    "paged --blocks 3": "blocks there are 3",
    "paged --max-new-tokens 5000": "5000 more context of",
    "speculate write --draft 0": "--draft at least 1 '0'",
    "gpt_kv_cache --chat": "unrecognized arguments: --chat",
    "projector ask": "required: QUESTION",
    "projector ask x --library README.md": "README.md",
    "projector ask x --model smollm2": "studies.projection --model smollm2",
    "projector --model pocket-llama": "pocket-llama",
    "studies.projection --model gpt2": "--pairs FILE",
    "studies.projection --pairs nowhere.csv": "nowhere.csv",
    f"benchmarks.__main__ --model pocket --lengths {CONFIG['n_ctx'] + 1}": f"{CONFIG['n_ctx'] + 1} {CONFIG['n_ctx']}",
    "benchmarks.__main__ --only nothing": "nothing",
    "benchmarks.__main__ --model pocket-llama --only CTranslate2": "CTranslate2 llama_kv_cache.py",
    "benchmarks.__main__ --ablate --only CTranslate2": "--ablate --only",
    "benchmarks.__main__ --requests 0": "0 1",
    "benchmarks.__main__ --requests 2 --lengths 3": "--requests --lengths",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_sentence(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    refused(start(command), *BAD[command].split())


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shipped models whose weights are finite and whose logits aren't, by the last norm's weights."""
    folders = {}
    for name in ("teacher", "llama", "bct"):
        folder = tmp_path_factory.mktemp(name)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(ROOT / "pocket" / name / file, folder)
        shutil.copy(ROOT / "pocket" / "teacher" / "tokenizer.tiktoken", folder)
        tensors = load_file(folder / "model.safetensors")
        for key, tensor in tensors.items():
            if key.endswith(("ln_f.weight", "model.norm.weight")):
                tensor.fill_(3e4)  # 65,504 is float16's largest number
        save_file(tensors, folder / "model.safetensors")
        folders[name] = folder
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "gpt_baseline --model {teacher}",
        "gpt_bounded_cache --model {bct} --memory bct",
        "llama_kv_cache --model {llama} --temperature 1",
        "paged serve data/prompts.txt --model {teacher}",
        "overfill write --student {teacher}",
        "speculate write --student {teacher} --temperature 1",
        "compress --model {teacher} --tokens 128",
    ],
)
def test_logits_that_overflow_are_one_sentence(
    command: str, overflowing: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ran = start(f"{command.format(**overflowing)} --dtype float16")
    refused(ran, "logits aren't finite: activations overflow (in torch.float16)")
    assert "\0" not in ran.out
