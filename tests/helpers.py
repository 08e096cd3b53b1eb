"""What several test files use."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = (ROOT / "requirements.txt").read_text("utf-8")
RECORDED_UNDER = re.search(r"^torch==(.*)$", REQUIREMENTS, re.M)[1]
recorded = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORDED_UNDER,
    reason=f"compares recorded texts, which are those of torch {RECORDED_UNDER}",
)


class Ran(NamedTuple):
    """What a script left: its exit status, and what it printed."""

    code: int
    out: str
    err: str


def run(main: Callable, *words: object) -> Ran:
    """Call a script's main() with its words, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([*map(str, words)])
        except SystemExit as end:
            code = end.code or 0
    return Ran(code, out.getvalue(), err.getvalue())


def refused(ran: Ran, *words: str) -> None:
    """A script ended with status 2 and a single sentence, which holds the words."""
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err


def read_pocket_config(name: str) -> dict[str, Any]:
    """Return config.json of a shipped model."""
    return json.loads((ROOT / "pocket" / name / "config.json").read_text("utf-8"))


N_CTX = read_pocket_config("teacher")["n_ctx"]  # of the shipped model


def given(rows: Any, way: str, at: dict[str, Any], **metrics: Any) -> None:
    """Let a study's rows have these values, without writing them."""
    for metric, values in metrics.items():
        rows.take(rows.row(way, at, metric, values))
