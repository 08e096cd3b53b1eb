"""Where the scripts run: streams that are full or of few characters, and Ctrl-C."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Ran, process, refused, start

ROOT = Path(__file__).resolve().parent.parent
STUDIES = [path.parent.name for path in sorted(ROOT.glob("studies/*/study.py"))]
WRITERS = [f"studies.{name} --out FILE" for name in STUDIES]
WRITERS += ["studies.replay --out FILE FILE", "recycle --out FILE/tables"]
WRITERS += ["chapters.grade . --output FILE/points.csv"]


@pytest.mark.parametrize("command", WRITERS)
def test_a_script_notices_first_that_it_can_not_write(command: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    ran = start(command.replace("FILE", shlex.quote(str(file))))
    refused(ran, str(file), "ot a ")  # a folder, a directory
    assert ran.out == ""


@pytest.mark.slow
def test_streams_that_take_nothing_and_another_folder(tmp_path: Path) -> None:
    def shell(words: str, **options: Any) -> Ran:
        script = ROOT / "gpt_kv_cache.py"
        return process("bash", "-c", f"{sys.executable} {script} {words}", **options)

    refused(shell("--max-new-tokens 5 > /dev/full"), "No space left on device")
    early = shell("--max-new-tokens 60 | head -c 20; exit ${PIPESTATUS[0]}", folder=tmp_path)
    assert (early.code, early.err) == (0, "") and [*tmp_path.iterdir()] == []
    gone = shell("--help | true; exit ${PIPESTATUS[0]}", PYTHONUNBUFFERED="1")
    assert (gone.code, gone.err) == (0, "")
    ascii_only = shell("--help", PYTHONIOENCODING="ascii:strict", COLUMNS="20")
    assert ascii_only.code == 0 and ascii_only.out.isascii() and ascii_only.err == ""


@pytest.mark.slow
def test_ctrl_c_while_a_text_is_written_is_no_traceback() -> None:
    command = [sys.executable, "gpt_kv_cache.py", "--max-new-tokens", "1000000"]
    writing = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    begun = writing.stdout.read(100)
    writing.send_signal(signal.SIGINT)
    rest, said = writing.communicate(timeout=60)
    assert (writing.returncode, said) == (130, "\n")
    assert begun.startswith("\nOne morning") and rest.endswith("\n")
