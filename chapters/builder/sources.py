"""The project's files, as the book reads them."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

CHAPTERS = Path(__file__).resolve().parent.parent
ROOT = CHAPTERS.parent


def import_file(path: Path) -> ModuleType:
    """Return a Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@cache
def read(name: str) -> str:
    """Return the text of a file of the project, or of the last that a name with wildcards matches."""
    paths = sorted(ROOT.glob(name))
    if not paths:
        raise ValueError(f"there is no {name}")
    return paths[-1].read_text(encoding="utf-8")


@cache
def hunks(old: str, new: str) -> list[tuple[int, int, int, int]]:
    """Return the changed lines, from 0, of two files: first and end in the old one, first and end in the new one."""
    matcher = difflib.SequenceMatcher(a=read(old).splitlines(), b=read(new).splitlines(), autojunk=False)
    return [tuple(code[1:]) for code in matcher.get_opcodes() if code[0] != "equal"]
