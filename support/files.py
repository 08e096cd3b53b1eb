"""Files: those from outside are read strictly; those we write are complete or absent, never half
there."""

import csv
import errno
import io
import json
import os
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

SHORTENER = reprlib.Repr()
SHORTENER.maxstring = SHORTENER.maxother = 60
short_repr = SHORTENER.repr  # a value for a message: long ones are cut
TYPE_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def import_file(path: Path) -> ModuleType:
    """Run a Python file, and return it as a module."""
    name = f"{path.resolve().parent.name}_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    module = module_from_spec(spec_from_loader(name, loader))
    sys.modules[name] = module  # dataclasses look themselves up
    loader.exec_module(module)
    return module


def regular_file(path: Path) -> Path:
    """Return the path of a file that can be read to its end. Raises FileNotFoundError if there is
    no such file, ValueError if it is a folder, a pipe or a device, which may have no end."""
    path.stat()  # raises an error that says why, if the file can't be accessed
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def read_text(path: Path) -> str:
    """Return the text in a file, without the byte order mark that some editors put before it.
    Raises ValueError if it isn't UTF-8, or not a regular file."""
    try:
        return regular_file(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from error


def read_json(path: Path, /, **fields: type) -> dict[str, Any]:
    """Return the object in a JSON file, which must have these fields, each of its type, as for
    check_fields(). Raises ValueError if it doesn't, or if the file holds no object."""
    return parse_json(read_text(path), str(path), **fields)


def parse_json(text: str, where: str, /, **fields: type) -> dict[str, Any]:
    """Return the object in a JSON text, as read_json() does for a file. The error names `where`."""
    try:
        content = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # not JSON, or nested without end
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    return check_fields(content, where, **fields)


def refuse_constant(name: str) -> None:
    """Raise ValueError: NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is no number")


def check_fields(content: object, where: str, /, **fields: type) -> dict[str, Any]:
    """Return an object that was read from JSON and must have these fields, each of its type; float
    stands for any finite number. Raises ValueError, which names `where`, if it doesn't."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds {short_repr(content)} instead of an object")
    if missing := [name for name in fields if name not in content]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, field_type in fields.items():
        value = content[name]
        is_right = type(value) is field_type
        if field_type is float:
            is_right = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not is_right:
            raise ValueError(
                f"{where}: {name} must be {TYPE_NAMES[field_type]}, got {short_repr(value)}"
            )
    return content


def read_csv(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in UTF-8, as dicts by the names in its first line; missing
    cells at the end of a row are empty. Raises ValueError if it isn't such a file, if one of
    `columns` doesn't occur exactly once, or if a row is longer than the first line."""
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
    """Return an OSError that says what can't be downloaded and why: the first sentence of the given
    error, or its type if it has no message."""
    reason = str(error).partition(". ")[0] or type(error).__name__
    return OSError(
        f"can't download {wanted} ({reason}): run this once with internet, or give a model's folder; "
        "pocket, pocket-llama and the encoder tokens need no download"
    )


def lacks_memory(error: Exception) -> bool:
    """Return whether an error of Python, NumPy or PyTorch says that there is too little memory."""
    words = ("allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers never see half of it: write(file) makes it in a temporary folder
    beside its place, and then it is moved there.

    A symbolic link stays, and its target is replaced. The file's mode stays, too; other hard links
    keep the old content. If anything is raised, the old file stays and no other is left. Raises
    ValueError if there is something other than a regular file at the path, OSError if it can't be
    written.
    """
    target = writable_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
        file = Path(folder) / path.name
        write(file)
        if target.exists():
            shutil.copymode(target, file)
        os.replace(file, target)


def writable_folder(path: str | Path) -> Path:
    """Return the path of a folder that can be written to, or be made. Raises OSError at once if it
    can't, before what is to be written there has taken hours."""
    folder = Path(path)
    existing = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OSError(f"{existing} is not a folder that can be written to") from error
    return folder


def writable_target(path: Path) -> Path:
    """Return the path that a file is written to, with links followed. Raises ValueError if there is
    something other than a regular file, OSError if that may not be written or links form a loop."""
    target = Path(os.path.realpath(path))
    try:
        regular_file(path)
    except FileNotFoundError:
        return target
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, and leave its line ends as they are."""
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8", newline=""))


def write_json(path: Path, content: Any) -> None:
    """Write JSON. Raises ValueError if the content has a number that isn't finite, which JSON
    doesn't know."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table with a header line."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_text(path, text.getvalue())
