"""What every script stands on: the command line, files, printing."""

import errno
import io
import math
import os
import re
import signal
import sys
from argparse import ArgumentTypeError
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from studies.replay import read_trace
from support.cli import WRITING, ByModel, CommandLine, prompt_file
from support.files import read_csv, read_json, read_text, write_atomically, write_json, write_text
from support.printing import print_comparison
from support.texts import read_questions, read_texts


def command_line() -> CommandLine:
    cli = CommandLine("What it does.\n\nMore.", example="python x.py")
    cli.add_model_options("names", *WRITING)
    return cli


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "prompt.txt").write_text("\ufeffé\r\n\r\n", "utf-8", newline="")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n b\n"))
    drawn = set()
    for words, prompt, dtype in (
        ("", "One morning", torch.float32),
        ("--prompt-file - --seed 0 --dtype bfloat16", "a\n b", torch.bfloat16),
        (f"--prompt-file {file}", "é\n", torch.float32),
    ):
        with command_line().parse(words.split()) as args:
            assert (args.model, args.max_new_tokens, args.temperature) == ("pocket", 250, 0.0)
            assert (args.prompt, args.dtype) == (prompt, dtype)
            drawn.add(float(torch.rand(1)))
    assert len(drawn) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    with pytest.raises(ArgumentTypeError, match="^the standard input is not a text in UTF-8$"):
        prompt_file("-")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", 40), ("--model pocket-llama", 40), ("--model gpt2", 24), ("run --max-new-tokens 7", 7)],
)
def test_a_bare_run_means_an_action_and_a_default_depends_on_the_model(
    words: str, expected: int
) -> None:
    cli = CommandLine("What it does.")
    for action in cli.add_actions("run", run="the default", other="something else"):
        action.add_model_options("names")
        action.add_options("--max-new-tokens", default=ByModel(40, 24))
    with cli.parse(words.split()) as args:
        assert (args.action, args.max_new_tokens) == ("run", expected)


HUGE = [2**32, 2**63, -(2**63), "9" * 5000, "nan"]  # for C's integers


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *product(["--max-new-tokens", "--top-k", "--threads", "--seed"], HUGE),
        ("--temperature", "warm"),
        *product(["--max-new-tokens", "--top-k"], ["0", "1.5"]),
        ("--seed", "-1"),
        ("--prompt", os.fsdecode(b"caf\xe9")),  # no text
        *product(["--prompt-file"], [os.devnull, "nothing.txt", "-"]),
        ("--dtype", "int8"),
        ("--device", "tpu"),
        ("--nonsense", "1"),
    ],
)
def test_bad_arguments_are_one_sentence(
    option: str,
    value: object,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    with pytest.raises(SystemExit) as ended, command_line().parse([f"{option}={value}"]):
        pass
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1
    assert option in message and "usage" not in message


ENDS = {
    ValueError("two\nlines"): "two lines",
    ValueError(f"\x1b[1m\x9b\0{'x' * 9999}"): r"\x1b[1m\x9b\x00xx",
    FileNotFoundError("no x"): "no x",
    OSError(errno.ENOSPC, "full"): "full",
}


@pytest.mark.parametrize("error", ENDS)
def test_errors_in_the_body(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        raise error
    assert ended.value.code == 2
    assert ENDS[error] in (message := capsys.readouterr().err) and message.count("\n") == 1
    assert len(message) < 1100


def test_a_standard_output_shows_what_it_cannot_print_and_control_characters_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    with command_line().parse([]):
        print("é語\udcff\t\r\x1b[2J\x7f\x9b")
    assert raw.getvalue() == b"\\xe9\\u8a9e\\udcff\t\\x0d\\x1b[2J\\x7f\\x9b\n"


def test_an_interrupt_cleans_up_and_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []
    with pytest.raises(SystemExit) as ended, command_line().parse([]):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            cleaned.append(True)
    assert ended.value.code == 130 and capsys.readouterr().err == "\n" and cleaned


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(KeyError), command_line().parse([]):
        raise KeyError("a bug")


BAD_CSV = {
    "": r"must have one column 'prompt', but has \[\]",
    "prompt,prompt\n": r"one column 'prompt', but has \['prompt', 'prompt'\]",
    "prompt , x\n": r"one column 'prompt', but has \['prompt ', ' x'\]",
    'prompt\n"x\ny\nz\n': "not a CSV file",
    "prompt\nx,y\n": "a row of 2 cells, and 1 columns",
    "\xff\xfep": "UTF-8",
}
GOOD_CSV = ['prompt\n"x"\n', "\xef\xbb\xbfprompt\nx\n", "prompt\r\nx\r\n", "a,prompt\n,x\ny\n\n"]


def test_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for content in [*BAD_CSV, *GOOD_CSV]:
        path.write_bytes(content.encode("latin-1"))
        if content in GOOD_CSV:  # a cell that a row lacks is empty
            assert [row["prompt"] for row in read_csv(path, "prompt")] in (["x"], ["x", ""])
            continue
        with pytest.raises(ValueError, match=BAD_CSV[content]) as raised:
            read_csv(path, "prompt")
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)


# --- Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # whoever opens it waits
    (link := tmp_path / "link").symlink_to(pipe)
    uses = (read_text, read_trace, read_json, read_csv, partial(write_text, text="new"))
    for path, use in product((pipe, link, Path(os.devnull), tmp_path), uses):
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
        (f'{{"n": 1, "x": 2, "name": ["{"x" * 500}"]}}', r"must be a text, got \['x+\.\.\.x+'\]$"),
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(file: Path) -> None:
        file.write_text("ne")
        raise error

    write_json(path := tmp_path / "x", {"figure": None})
    for name in ("x", "new"):
        with pytest.raises(error):
            write_atomically(tmp_path / name, fail)
    with pytest.raises(ValueError):
        write_json(path, {"figure": [1.0, math.nan]})
    assert read_json(path) == {"figure": None} and [*tmp_path.iterdir()] == [path]


# --- Printing -------------------------------------------------------------------------------------------------------


def test_compare_tells_same_from_different_and_shows_medians(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow, fast = [50.0] + [8.0] * 33 + [30.0], [9.0] + [2.0] * 33 + [3.0]  # a prefill, 34 tokens
    for other, said in ((1, "Same tokens: yes"), (2, "Same tokens: NO (no cache: 35, ")):
        print_comparison(10, {"no cache": ([1] * 35, slow), "KV cache": ([other] * 35, fast)})
        printed = capsys.readouterr().out
        assert said in printed and "KV cache 0.08 s, 4.4 times as fast" in printed
        for label in ("45", "all"):
            assert re.search(rf"^ *{label} +8\.00 +2\.00 +4\.0$", printed, re.M)


def test_answers_about_the_texts_in_data_stand_in_them() -> None:
    texts, questions = read_texts(), read_questions()
    assert len(texts) == 12 and sum(map(len, questions.values())) >= 40
    for name, asked in questions.items():
        for question in asked:
            assert question.answer.lower() in texts[name].lower(), question
            assert question.answer.lower() not in question.question.lower(), question
