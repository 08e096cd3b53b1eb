"""What several test files use."""

import json
import re
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


def read_pocket_config(name: str) -> dict[str, Any]:
    """Return config.json of a shipped model."""
    return json.loads((ROOT / "pocket" / name / "config.json").read_text("utf-8"))


N_CTX = read_pocket_config("teacher")["n_ctx"]  # of the shipped model
