"""Where the scripts run: streams that are closed, full, or of few characters, and Ctrl-C at any time."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import Ran, process, refused, start

ROOT = Path(__file__).resolve().parent.parent
# Every file with a command line of its own; those in packages are run as modules.
FOLDERS = ".", "pocket", "studies", "benchmarks", "chapters", "chapters/builder", "chapters/[01]*"
SCRIPTS = [
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in sorted(ROOT.glob(f"{folder}/*.py"))
    if re.search(r"(Command|Study)Line\(", text := path.read_text("utf-8"))
    and "    main()\n" in text
]
SCRIPTS += [path.parent.relative_to(ROOT) for path in sorted(ROOT.glob("studies/*/study.py"))]
STUDIES = [path.stem for path in SCRIPTS if path.parts[0] == "studies"]
PACKAGES = [Path(name) for name in ("studies", "benchmarks", "chapters", "chapters/builder")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", sorted({*STUDIES} - {"claims", "pages"}))
def test_a_study_notices_first_that_it_can_not_write(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    trace = [file] if name == "replay" else []
    words = ["--out", str(file), *map(str, trace)]
    refused(start(f"studies.{name} {shlex.join(words)}"), "argument --out: ")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("def f(:", "line 2: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "line 2: SystemExit: 3"),
        ("open('gone')", "line 2: FileNotFoundError: [Errno 2] No such file or directory: 'gone'"),
        ("def f():\n    raise ValueError('two\\nlines')\n\nf()", "line 3: ValueError: two lines"),
    ],
)
def test_a_cache_file_that_fails_says_its_error_and_line(
    code: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"# a cache\n{code}\n")
    refused(start(f"gpt_kv_cache --cache {file}"), f"{file}, {says}")
    refused(start(f"gpt_kv_cache --cache {os.path.relpath(file)}"), f"mine.py, {says}")


@pytest.mark.slow
def test_streams_that_take_nothing() -> None:
    def shell(words: str, **environment: str) -> Ran:
        return process("bash", "-c", f"{sys.executable} gpt_kv_cache.py {words}", **environment)

    full = shell("--max-new-tokens 5 > /dev/full")
    refused(full, "can't write the output: No space left on device")
    early = shell("--max-new-tokens 60 | head -c 20; exit ${PIPESTATUS[0]}")
    assert (early.code, early.err) == (0, "")
    closed = shell("--max-new-tokens 5 <&- >&- 2>&-")
    assert closed.code == 0
    closed = shell("--max-new-tokens 5 >&-")
    assert (closed.code, closed.out, closed.err) == (0, "", "")
    chat = process("bash", "-c", f"{sys.executable} recycle.py chat <&-")
    assert (chat.code, chat.err) == (0, "")
    gone = shell("--help | true; exit ${PIPESTATUS[0]}", PYTHONUNBUFFERED="1")
    assert (gone.code, gone.err) == (0, "")
    ascii_only = shell("--help", PYTHONIOENCODING="ascii:strict", COLUMNS="20")
    assert ascii_only.code == 0 and ascii_only.out.isascii() and ascii_only.err == ""


BEGIN = """import runpy, sys
from pathlib import Path
from support.cli import CommandLine
begun, kind, *sys.argv = sys.argv[1:]
prepare = CommandLine.prepare
def begin(self, args):
    Path(begun).touch()
    return prepare(self, args)
CommandLine.prepare = begin
getattr(runpy, f"run_{kind}")(sys.argv[0], run_name="__main__")
"""
LOST = """import signal, sys, time
from support.cli import CommandLine
class Faulty:
    def __del__(self):
        1 / 0
class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
with CommandLine("").parse([]):
    Faulty()
    print("now", flush=True, file=sys.stderr)
    Interrupted()
    for _ in range(600):
        time.sleep(0.1)
"""
NEEDS = {  # what a script works on for a while; --help: it may be done by then
    "train": "tokenizer --out OUT",
    "corpus": "--n 1000000",
    "replay": "TRACE --out OUT",
    "floors": "fleet",
    "export": "OUT/served",
} | dict.fromkeys("zoo claims pages weights __main__ grade site screenshots".split(), "--help")


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    ran = process(sys.executable, "-c", LOST)
    reported, interrupted = ran.err.split("now\n")
    assert "ZeroDivisionError" in reported
    assert (ran.code, ran.out, interrupted) == (130, "", "\n")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_ctrl_c_is_never_a_traceback(script: Path, tmp_path: Path) -> None:
    trace, begun = tmp_path / "trace", tmp_path / "begun"
    trace.write_text('{"input_length": 512, "hash_ids": [1]}\n' * 300_000)
    words = NEEDS.get(script.stem, "--out OUT" if script.parts[0] == "studies" else "")
    words = words.replace("OUT", str(tmp_path)).replace("TRACE", str(trace)).split()
    kind, name = "path", str(script)
    if script.parent in PACKAGES:
        kind, name = "module", ".".join(script.with_suffix("").parts)
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, str(begun), kind, name, *words],
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
    said = process.communicate(timeout=60)[1]
    # a shell calls the first two 130; 0: it was done
    assert process.returncode in (130, -signal.SIGINT, 0), said
    if process.returncode == 0:  # Ctrl-C may have met Python's own exit, after the script's
        said = said.partition("Exception ignored in")[0]
    assert not re.search("Traceback|Warning|Error", said), said
