"""Jinja templates: those of a folder, and those that are texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

ROOT = Path(__file__).resolve().parent.parent


def environment(folder: Path, names: Mapping[str, Any] | None = None) -> SandboxedEnvironment:
    """Return the Jinja environment of the templates in a folder, which may use these names; an
    unknown name is an error."""
    made = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.globals |= names or {}
    return made


def rendered(template: str, names: Mapping[str, Any]) -> str:
    """Return the text that a template makes with these names."""
    return environment(ROOT, names).from_string(template).render()
