"""What every script stands on: the command line, files, printing."""

import errno
import io
import math
import os
import signal
import stat
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from studies.replay import read_trace
from support.cli import CommandLine
from support.files import read_csv, read_json, read_text, write_atomically, write_json
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


HUGE = [2**32, 2**63, 2**64, -(2**63), 10**30, "9" * 5000, "1e3", "nan"]  # for C's integers
COLD = ["warm", "nan", "inf", "-inf", "1e-320", "1e400", "-0.5", "1e-7", ""]  # nothing to divide by


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *product(["--max-new-tokens", "--top-k", "--threads", "--seed"], HUGE),
        *product(["--temperature"], COLD),
        *product(["--max-new-tokens", "--top-k"], ["0", "1.5"]),
        ("--seed", "-1"),
        ("--prompt", ""),
        ("--prompt", os.fsdecode(b"caf\xe9")),  # no text
        ("--dtype", "int8"),
        ("--device", "tpu"),
        ("--nonsense", ""),
    ],
)
def test_bad_arguments_are_one_sentence(
    option: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse([f"{option}={value}"]):
        pass
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1
    assert option in message and "usage" not in message


@pytest.mark.parametrize(
    "error, printed",
    [
        (ValueError("two\nlines"), "two lines"),
        (FileNotFoundError("no x"), "no x"),
    ],
)
def test_errors_in_the_body(
    error: Exception, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        raise error
    assert ended.value.code == 2
    assert printed in (message := capsys.readouterr().err) and message.count("\n") == 1


def test_a_standard_output_of_ascii_shows_other_characters_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    with command_line().parse([]):
        print("é語\udcff")
    assert raw.getvalue() == b"\\xe9\\u8a9e\\udcff\n"


@pytest.mark.parametrize("then", [KeyboardInterrupt, ValueError, RuntimeError, ImportError])
def test_an_interrupt_cleans_up_and_ends_with_130_whatever_c_code_makes_of_it(
    then: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise then() from error
        finally:
            cleaned.append(True)
    assert ended.value.code == 130 and capsys.readouterr().err == "\n" and cleaned


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(KeyError), command_line().parse([]):
        raise KeyError("a bug")


@pytest.mark.parametrize(
    "content, words",
    [
        ("", r"must have one column 'prompt', but has \[\]"),
        ("a,b\n", r"one column 'prompt', but has \['a', 'b'\]"),
        ("prompt,prompt\n", r"one column 'prompt', but has \['prompt', 'prompt'\]"),
        ("prompt , x\n", r"one column 'prompt', but has \['prompt ', ' x'\]"),
        ('prompt\n"x\ny\nz\n', "not a CSV file"),
        ("prompt\nx,y\n", "a row of 2 cells, and 1 columns"),
        ("prompt\nx\n".encode("utf-16").decode("latin-1"), "UTF-8"),
        ("prompt\na\0b\n", None),
        ('prompt\n"x"\n', None),
        ("\xef\xbb\xbfprompt\nx\n", None),
        ("prompt\r\nx\r\n", None),
        ("a,prompt\n,x\n\n", None),
        ("b,prompt\ny\n", None),
        ("prompt\n", None),
    ],
)
def test_csv_files_by_column(tmp_path: Path, content: str, words: str | None) -> None:
    (path := tmp_path / "x.csv").write_bytes(content.encode("latin-1"))
    if words:
        with pytest.raises(ValueError, match=words) as raised:
            read_csv(path, "prompt")
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    else:
        assert [*{row["prompt"] for row in read_csv(path, "prompt")} - {"", "a\0b"}] in (["x"], [])


# --- Files ----------------------------------------------------------------------------------------------------------


def text(content: str):
    return lambda file: file.write_text(content)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # whoever opens it waits
    (link := tmp_path / "link").symlink_to(pipe)
    write = lambda path: write_atomically(path, text("new"))  # noqa: E731
    for path, use in product(
        (pipe, link, Path(os.devnull), tmp_path),
        (read_text, read_trace, read_json, read_csv, write),
    ):
        with pytest.raises(ValueError, match="is not a regular file"):
            use(path)
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content, words",
    [
        ("[" * 100_000, "not valid JSON"),
        ("[1]", r"holds \[1\] instead of an object"),
        ("{}", "lacks n, x, name"),
        ('{"n": true, "x": 1, "name": ""}', "n must be a whole number, got True"),
        ('{"n": 1, "x": null, "name": ""}', "x must be a finite number, got None"),
        ('{"n": 1, "x": NaN, "name": ""}', "NaN is no number"),
        ('{"n": 1, "x": 1e999, "name": ""}', "finite"),
        (f'{{"n": 1, "x": 1{"0" * 400}, "name": ""}}', "finite"),
        (f'{{"n": {"9" * 5000}}}', "JSON"),
        (
            '{"n": 1, "x": 2, "name": ["' + "x" * 500 + '"]}',
            r"name must be a text, got \['x+ \.\.\.$",
        ),
        ("\xff", "UTF-8"),
    ],
)
def test_json_by_named_fields(content: str, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=words) as raised:
        read_json(path, n=int, x=float, name=str)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 300 + len(str(path))
    path.write_text('\ufeff{"n": 1, "x": 2, "name": "é", "more": null}', encoding="utf-8")
    assert read_json(path, n=int, x=float, name=str) == {"n": 1, "x": 2, "name": "é", "more": None}


@pytest.mark.parametrize("link", ["", "relative", "twice"])
def test_a_link_stays_and_its_target_keeps_its_mode(link: str, tmp_path: Path) -> None:
    target, name, twice = tmp_path / "sub" / "target", tmp_path / "name", tmp_path / "twice"
    target.parent.mkdir()
    name.symlink_to("sub/target")
    twice.symlink_to(name)
    path = {"": target, "relative": name, "twice": twice}[link]
    before = os.umask(0o027)
    try:
        write_atomically(path, text("new"))
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        target.chmod(0o604)
        os.link(target, tmp_path / "other")
        write_atomically(path, text("newer"))
    finally:
        os.umask(before)
    assert target.read_text() == "newer" and stat.S_IMODE(target.stat().st_mode) == 0o604
    assert (tmp_path / "other").read_text() == "new", "another name keeps the old content"
    assert path.is_symlink() == bool(link) and [*target.parent.iterdir()] == [target]


def test_names_that_cannot_be_written_raise_and_leave_nothing(tmp_path: Path, monkeypatch) -> None:
    loop, protected, long = tmp_path / "loop", tmp_path / "protected", "n" * 255
    loop.symlink_to(loop)
    protected.write_text("old")
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "protected"
    )  # root may write anything
    before = {path.name for path in tmp_path.iterdir()}
    for path, wrong in (
        (loop, errno.ELOOP),
        (protected, errno.EACCES),
        (tmp_path / (long + "n"), errno.ENAMETOOLONG),
        (protected / "below", errno.ENOTDIR),
    ):
        with pytest.raises(OSError) as failed:
            write_atomically(path, text("new"))
        assert failed.value.errno == wrong and {path.name for path in tmp_path.iterdir()} == before
    assert protected.read_text() == "old" and loop.is_symlink()
    write_atomically(tmp_path / "new" / "er" / long, text("new"))
    assert (tmp_path / "new" / "er" / long).read_text() == "new"


def test_json_that_is_refused_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(path := tmp_path / "x.json", {"figure": None})
    with pytest.raises(ValueError):
        write_json(path, {"figure": [1.0, math.nan]})
    assert read_json(path) == {"figure": None} and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(errno.ENOSPC, "full")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error) -> None:
    def fail(file: Path) -> None:
        file.write_text("ne")
        raise error

    (tmp_path / "x").write_text("old")
    for name in ("x", "new"):
        with pytest.raises(error if isinstance(error, type) else OSError):
            write_atomically(tmp_path / name, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (
        tmp_path / "x"
    ).read_text() == "old"


# --- Printing -------------------------------------------------------------------------------------------------------


def test_compare_tells_same_from_different_and_shows_medians(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = [50.0] + [8.0] * 33 + [30.0]  # a prefill, then 34 tokens
    fast = [9.0] + [2.0] * 33 + [3.0]
    compare(10, {"no cache": ([1] * 35, slow), "KV cache": ([1] * 35, fast)})
    printed = capsys.readouterr().out
    assert "Same tokens: yes" in printed and "KV cache 0.08 s, 4.4 times as fast" in printed
    rows = [line.split() for line in printed.splitlines()[4:-4]]
    assert rows == [["45", "8.00", "2.00", "4.0"], ["all", "8.00", "2.00", "4.0"]]
    compare(10, {"a": ([1, 2], [1.0, 1.0]), "b": ([1, 3], [1.0, 1.0])})
    assert "Same tokens: NO (a: 2, b: 2)" in capsys.readouterr().out
