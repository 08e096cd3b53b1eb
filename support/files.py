"""Files that are complete or absent, never half-written; JSON, CSV and Python."""

from __future__ import annotations

import csv
import errno
import importlib.util
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

UNFINISHED = ".unfinished-"  # how the folders begin in which files are made


def import_file(path: Path) -> ModuleType:
    """Return a Python file, whose name ends in .py, as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.resolve().parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not text, or nested without end
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(file) make the file in a folder beside its place, then move it there: readers never see half a file.

    A link stays and its target is replaced. The mode stays too; another hard link keeps the old content. What is no
    regular file (a device, a pipe) is written to once all is made. Whatever is raised leaves the old file and no other.
    """
    opened = str(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))  # to be written to, whatever it leads to
    try:
        mode = path.stat().st_mode
        regular = stat.S_ISREG(mode) and not opened
    except FileNotFoundError:
        regular, mode = True, None
    if regular and mode and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(os.path.realpath(path))
    if regular:
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=target.parent if regular else None) as folder:
        file = Path(folder) / path.name
        write(file)
        if not regular:
            print(end="", flush=True)
            place = {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path), path)  # where it has got to, not anew
            with file.open("rb") as content, open(place, "ab", closefd=place is path) as out:
                shutil.copyfileobj(content, out)
            return
        if mode:
            shutil.copymode(target, file)
        os.replace(file, target)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write JSON. Raises ValueError if it holds a number that isn't finite, which JSON doesn't know."""
    text = json.dumps(content, indent=indent, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def read_csv(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in UTF-8, by the names in its first line; a cell that a row lacks is empty.

    Raises ValueError if it isn't such a file, lacks one of the columns, or has a row longer than its first.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # with or without the mark that spreadsheets write
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if missing := [name for name in columns if header.count(name) != 1]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it has {', '.join(header) or 'no columns'}")
    if (longest := max(map(len, rows), default=0)) > len(header):
        raise ValueError(f"{path} has a row of {longest} cells, and {len(header)} columns")
    return [dict(itertools.zip_longest(header, row, fillvalue="")) for row in rows]


def write_csv(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header line."""

    def write(file: Path) -> None:
        with file.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([header, *rows])

    write_atomically(path, write)
