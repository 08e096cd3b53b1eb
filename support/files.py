"""Files that are whole or not there, and JSON and CSV."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(file) make the file beside its place, then move it there: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    write(unfinished)
    os.replace(unfinished, path)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write a record as JSON."""
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8"))


def read_csv(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header line. Raises ValueError if it is none, or lacks columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # with or without the mark that spreadsheets write
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or [], list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"{path} lacks columns {', '.join(missing)}, it has {', '.join(names) or 'none'}")
    return rows


def write_csv(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header line."""

    def write(file: Path) -> None:
        with file.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([header, *rows])

    write_atomically(path, write)
