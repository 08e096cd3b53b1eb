"""Files: from outside, read strictly; ours, complete or absent, never half-written."""

import csv
import errno
import importlib.util
import io
import json
import os
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SHORTENER = reprlib.Repr()
SHORTENER.maxstring = SHORTENER.maxother = 60
short_repr = SHORTENER.repr  # a value as a message shows it: what is long is cut
TYPE_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def import_file(path: Path) -> ModuleType:
    """Return a Python file, whose name ends in .py, as a module."""
    specification = importlib.util.spec_from_file_location(
        f"{path.resolve().parent.name}_{path.stem}", path
    )
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look themselves up
    specification.loader.exec_module(module)
    return module


def regular_file(path: Path) -> Path:
    """Return the path of a file that can be read to its end. Raises FileNotFoundError if there is
    none, ValueError if it is a folder, a pipe or a device, which may have no end."""
    path.stat()  # says why, if that can't be seen
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def read_text(path: Path) -> str:
    """Return the text in a file, with or without the mark that some editors put before it. Raises
    ValueError if it isn't UTF-8, or not a regular file."""
    try:
        return regular_file(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from error


def read_json(path: Path, /, **fields: type) -> dict[str, Any]:
    """Return the object in a JSON file; the fields must be there, each of its type, as
    check_fields() says. Raises ValueError if they aren't, or if the file holds no object."""
    return parse_json(read_text(path), str(path), **fields)


def parse_json(text: str, where: str, /, **fields: type) -> dict[str, Any]:
    """Return the object in a text of JSON, as read_json() does. Raises ValueError, which names
    `where`, otherwise."""
    try:
        content = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # not JSON, or nested without end
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    return check_fields(content, where, **fields)


def refuse_constant(name: str) -> None:
    """Raise ValueError: NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is no number")


def check_fields(content: object, where: str, /, **fields: type) -> dict[str, Any]:
    """Return an object that was read from JSON, if it has these fields, each of its type; float
    stands for every finite number. Raises ValueError, which names `where`, otherwise."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds {short_repr(content)} instead of an object")
    if missing := [name for name in fields if name not in content]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, field_type in fields.items():
        if not has_json_type(content[name], field_type):
            raise ValueError(
                f"{where}: {name} must be {TYPE_NAMES[field_type]}, got {short_repr(content[name])}"
            )
    return content


def has_json_type(value: object, json_type: type) -> bool:
    """Return whether a value from JSON is of a kind."""
    if json_type is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is json_type


def read_csv(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in UTF-8, by the names in its first line; a cell that a row
    lacks is empty. Raises ValueError if it isn't such a file, one of the columns isn't there once,
    or a row is longer than the first."""
    lines = read_text(path).lstrip("\r\n").splitlines(keepends=True)
    reader = csv.DictReader(lines, restval="", strict=True)
    try:
        header, rows = reader.fieldnames or [], [*reader]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    for name in columns:
        if header.count(name) != 1:
            raise ValueError(f"{path} must have one column {name!r}, but has {short_repr(header)}")
    width = len(header)
    for row in rows:
        if None in row:
            raise ValueError(
                f"{path} has a row of {width + len(row[None])} cells, and {width} columns"
            )
    return rows


def download_error(wanted: str, error: Exception) -> OSError:
    """Return an error with the first sentence of another one, or that one's name if it says nothing."""
    reason = str(error).partition(". ")[0] or type(error).__name__
    return OSError(
        f"can't download {wanted} ({reason}): run this once with internet, or give a model's folder; "
        "pocket, pocket-llama and the encoder tokens need no download"
    )


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(file) make the file in a folder beside its place, then move it there: readers never
    see half a file.

    A link stays and its target is replaced. The mode stays too; another hard link keeps the old
    content. Whatever is raised leaves the old file and no other. Raises ValueError if there is
    something else than a file at its place, OSError if it can't be written.
    """
    target = writable_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
        file = Path(folder) / path.name
        write(file)
        if target.exists():
            shutil.copymode(target, file)
        os.replace(file, target)


def writable_target(path: Path) -> Path:
    """Return where a file is written to, links followed. Raises ValueError if there is something
    else than a regular file, OSError if that may not be written or the links lead nowhere."""
    target = Path(os.path.realpath(path))
    try:
        regular_file(path)
    except FileNotFoundError:
        return target
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, its line ends as they are."""
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8", newline=""))


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write JSON. Raises ValueError if it holds a number that isn't finite, which JSON doesn't know."""
    write_text(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def write_csv(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header line."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_text(path, text.getvalue())
