"""What every script stands on: the command line, printing."""

import importlib
import io
import itertools
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import interrupts
from support.cli import CommandLine
from support.files import read_csv, read_json, write_json
from support.printing import compare

ROOT = Path(__file__).resolve().parent.parent


def command_line() -> CommandLine:
    cli = CommandLine("What it does.\n\nMore.", example="python x.py")
    cli.add_generation_arguments()
    return cli


def test_defaults_of_the_command_line() -> None:
    with command_line().parse([]) as args:
        assert (args.model, args.seed, args.max_new_tokens) == ("pocket", 0, 250)
        assert (args.temperature, args.top_k) == (0.0, None)
        assert args.dtype == torch.float32 and args.prompt
        torch.Generator(args.device)
        first = torch.rand(1)
    with command_line().parse(["--seed", "0", "--dtype", "bfloat16"]) as args:
        assert args.dtype == torch.bfloat16 and torch.equal(first, torch.rand(1))


@pytest.mark.parametrize("argv", [
    ["--max-new-tokens", "0"], ["--max-new-tokens", "1.5"], ["--top-k", "0"], ["--seed", "-1"], ["--prompt", ""],
    ["--seed", str(2**32)], ["--temperature", "warm"], ["--dtype", "int8"], ["--device", "tpu"], ["--nonsense"],
])
def test_bad_arguments_are_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse(argv):
        pass
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and argv[0] in message and "usage" not in message


@pytest.mark.parametrize("error, code, printed", [
    (ValueError("two\nlines"), 2, "two lines"), (FileNotFoundError("no x"), 2, "no x"), (KeyboardInterrupt(), 130, ""),
])
def test_errors_in_the_body(error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        raise error
    assert ended.value.code == code
    assert printed in (message := capsys.readouterr().err) and message.count("\n") == 1


def test_a_number_that_no_c_integer_holds_is_refused_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "--top-k", "--threads", "--seed"]
    for option, value in itertools.product(options, [2**32, 2**63, 2**64, -(2**63), 10**30, "9" * 5000, "1e3", "nan"]):
        with pytest.raises(SystemExit) as ended, command_line().parse([f"{option}={value}"]):
            pass
        message = capsys.readouterr().err
        assert ended.value.code == 2 and message.count("\n") == 1 and option in message


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e-320", "1e400", "-0.5", "1e-7", ""])
def test_a_temperature_that_nothing_can_be_divided_by(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse([f"--temperature={value}"]):
        pass
    assert ended.value.code == 2 and "--temperature" in capsys.readouterr().err


def test_a_prompt_of_bytes_that_are_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse(["--prompt", os.fsdecode(b"caf\xe9")]):
        pass
    assert ended.value.code == 2 and "--prompt: is not valid UTF-8" in capsys.readouterr().err


def test_a_standard_output_of_ascii_shows_other_characters_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    with command_line().parse([]):
        print("é語\udcff")
    assert raw.getvalue() == b"\\xe9\\u8a9e\\udcff\n"


def test_closed_streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with command_line().parse([]):
        assert sys.stdin.read() == "" and not sys.stdin.isatty()
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        pass
    assert ended.value.code == 2 and "standard output is closed" in capsys.readouterr().err


def test_an_interrupt_is_left_alone_until_the_command_line_is_read() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        importlib.reload(interrupts)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with command_line().parse([]):
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job in the background
        importlib.reload(interrupts)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(KeyError), command_line().parse([]):
        raise KeyError("a bug")


@pytest.mark.skipif(os.name == "nt", reason="pipes end differently on Windows")
def test_reader_that_leaves_early() -> None:
    script = ("import sys\nfrom support.cli import CommandLine\nwith CommandLine('x', 'y').parse([]):\n"
              "    for i in range(200_000): print(i)\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=env) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("content, words", [
    ("", "lacks prompt"), ("\n\n", "lacks prompt"), ("a,b\n", "lacks prompt: it has a, b"),
    ("prompt,prompt\n", "lacks"),
    ("prompt\n" + "x" * 131_073, "field larger than field limit"), ("prompt\nx,y\n", "a row of 2 cells, and 1 columns"),
    ("prompt,b\nx,y,z,w\n", "a row of 4 cells, and 2 columns"), ("prompt\n\xff\n", "UTF-8"),
    ("prompt\nx\n".encode("utf-16").decode("latin-1"), "UTF-8"), ('prompt\n"x', None), ("prompt\na\0b\n", None),
    ("\xef\xbb\xbfprompt\nx\n", None), ("prompt\r\nx\r\n", None), ("a,prompt\n,x\n\n", None), ("b,prompt\ny\n", None),
    ("prompt\n", None),
])  # fmt: skip
def test_csv_files_by_column(tmp_path: Path, content: str, words: str | None) -> None:
    (path := tmp_path / "x.csv").write_bytes(content.encode("latin-1"))
    if words:
        with pytest.raises(ValueError, match=words) as raised:
            read_csv(path, ["prompt"])
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    else:
        assert [*{row["prompt"] for row in read_csv(path, ["prompt"])} - {"", "a\0b"}] in (["x"], [])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_that_is_refused_leaves_the_old_file(tmp_path: Path, number: float) -> None:
    write_json(path := tmp_path / "x.json", {"figure": None})
    with pytest.raises(ValueError):
        write_json(path, {"figure": [1.0, number]})
    assert read_json(path) == {"figure": None} and [*tmp_path.iterdir()] == [path]


def test_compare_tells_same_from_different_and_shows_medians(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = [50.0] + [8.0] * 33 + [30.0], [9.0] + [2.0] * 33 + [3.0]  # a prefill, then 34 tokens
    compare(10, {"no cache": ([1] * 35, slow), "KV cache": ([1] * 35, fast)})
    printed = capsys.readouterr().out
    assert "Same tokens: yes (35, 35)" in printed
    rows = [line.split() for line in printed.splitlines()[4:]]
    assert rows == [["43", "8.00", "2.00", "4.0"], ["45", "19.00", "2.50", "7.6"], ["all", "8.00", "2.00", "4.0"]]
    compare(10, {"a": ([1, 2], [1.0, 1.0]), "b": ([1, 3], [1.0, 1.0])})
    assert "Same tokens: NO (2, 2)" in capsys.readouterr().out
    compare(10, {"a": ([1], [1.0]), "b": ([1], [1.0])})
    assert len(capsys.readouterr().out.splitlines()) == 2  # nothing was decoded
