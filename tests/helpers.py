"""What several test files use."""

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Ran(NamedTuple):
    """What a script left: its exit status, and what it printed."""

    code: int
    out: str
    err: str


def read_pocket_config(name: str) -> dict[str, Any]:
    """Return config.json of a shipped model."""
    return json.loads((ROOT / "pocket" / name / "config.json").read_text("utf-8"))


N_CTX = read_pocket_config("teacher")["n_ctx"]  # of the shipped model
