"""Where the scripts run: streams that are closed, full, or of few characters, and Ctrl-C at any time."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    "gpt_baseline.py",
    "gpt_kv_cache.py",
    "gpt_bounded_cache.py",
    "llama_kv_cache.py",
    "load_gpt2_weights.py",
    "recycle.py",
    "projector.py",
    "overfill.py",
    "speculate.py",
    "compress.py",
    "paged.py",
    "pocket/corpus.py",
    "pocket/train.py",
    "pocket/coherence.py",
    "chapters/09_bug_zoo/zoo.py",
    "chapters/10_beyond/floors.py",
    "chapters/10_beyond/export.py",
]
STUDIES = [
    "article",
    "bounding",
    "claims",
    "compression",
    "latency",
    "lengths",
    "pages",
    "pretraining",
    "projection",
    "recall",
    "recycling",
    "refreshing",
    "replay",
    "speculation",
    "weights",
]
MODULES = [
    *(f"studies.{name}" for name in STUDIES),
    "benchmarks",
    "benchmarks.pages",
    "chapters.builder",
    "chapters.grade",
]
SCRIPTS = [[name] for name in FILES] + [["-m", name] for name in MODULES]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def path_of(script: list[str]) -> Path:
    path = ROOT / script[-1].removesuffix(".py").replace(".", "/")
    return file if (file := path.with_suffix(".py")).is_file() else path / "__main__.py"


def test_every_script_is_tested() -> None:
    folders = [
        ".",
        "pocket",
        "studies",
        "benchmarks",
        "chapters",
        "chapters/builder",
        "chapters/09_bug_zoo",
        "chapters/10_beyond",
    ]
    texts = {
        path: path.read_text("utf-8") for folder in folders for path in (ROOT / folder).glob("*.py")
    }
    found = {
        path
        for path, text in texts.items()
        if re.search(r"(Command|Study)Line\(|bounding\.run\(", text) and "    main()\n" in text
    }
    assert found == {path_of(script) for script in SCRIPTS}


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ("claims", "pages")])
def test_a_study_notices_first_that_it_can_not_write(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    trace = [str(tmp_path / "file")] if name == "replay" else []
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"studies.{name}").main([*trace, "--out", str(tmp_path / "file")])
    assert "argument --out: " in (said := capsys.readouterr().err) and said.count("\n") == 1


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | environment,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [["gpt_kv_cache.py"], ["pocket/corpus.py"], ["-m", "studies.replay"]], ids=str
)
def test_streams_that_take_nothing(script: list[str]) -> None:
    python = f"{sys.executable} {' '.join(script)}"
    if "--model" in shell(f"{python} --help").stdout:
        full = shell(f"{python} --max-new-tokens 5 > /dev/full")
        assert full.returncode == 2 and full.stderr.count("\n") == 1
        assert "can't write the output: No space left on device" in full.stderr
    gone = shell(f"{python} --help | true; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED="1")
    assert (gone.returncode, gone.stderr) == (0, "")
    ascii_only = shell(f"{python} --help", PYTHONIOENCODING="ascii:strict", COLUMNS="20")
    assert ascii_only.returncode == 0 and ascii_only.stdout.isascii() and ascii_only.stderr == ""


BEGIN = """import runpy, sys
from pathlib import Path
from support.cli import CommandLine
kind, begun, *sys.argv = sys.argv[1:]
resolved = CommandLine.resolved
def begin(self, args):
    Path(begun).touch()
    return resolved(self, args)
CommandLine.resolved = begin
getattr(runpy, f"run_{kind}")(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script[-1])
def test_ctrl_c_is_never_a_traceback(script: list[str], tmp_path: Path) -> None:
    out = [] if script[-1] in FILES else ["--out", str(tmp_path)]
    words = {
        "pocket/train.py": ["tokenizer", "--out", str(tmp_path)],
        "pocket/corpus.py": ["--n", "1000000"],
        "studies.replay": [str(ROOT / "data" / "capitals.csv"), *out],
        "chapters/10_beyond/floors.py": ["fleet"],
        "chapters/10_beyond/export.py": [str(tmp_path / "served")],
        **{
            name: ["--help"]
            for name in (
                "studies.claims",
                "studies.pages",
                "studies.weights",
                "benchmarks.pages",
                "chapters.builder",
                "chapters.grade",
            )
        },
    }
    kind, name = ("module", script[-1]) if "-m" in script else ("path", script[0])
    begun = tmp_path / "begun"
    words = [name, *words.get(script[-1], out)]
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, kind, str(begun), *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    while process.poll() is None and not begun.exists():  # before that, Ctrl-C is Python's own
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT, 0), (
        printed
    )  # a shell calls both 130; 0: it was done
    assert "Traceback" not in printed and "Warning" not in printed and "Error" not in printed, (
        printed
    )
