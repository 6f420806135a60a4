"""The entries of a data file, each with the place to blame: JSON lines, a JSON array, Parquet, any of them gzipped.

Called by `bench.prompts`. The name says what a file is: `.parquet`, `.json` (an array, or lines all the same),
anything else JSON lines; a `.gz` behind it is unpacked first. Invariant: whatever the bytes are, an entry comes
out or one `PromptError` that names the file and the line (the row of a Parquet file).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import PromptError

_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object of a file. `where` names the place; `number` is its line, or its place in an array or a table."""

    item: Any
    where: str
    number: int


def read_file(path: Path, what: str = "prompts file") -> bytes:
    """The bytes of a file as they are on disk."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read the {what} {path}: {error.strerror}") from error
    except ValueError as error:  # a name that no file system takes
        raise PromptError(f"cannot read the {what} {path}: {error}") from error


def entries_of(path: Path, data: bytes) -> Iterator[Entry]:
    """The entries of a file that was read. Raises `PromptError` on the way, at the entry that is wrong."""
    name = path.name.lower()
    if name.endswith(".gz"):
        data, name = _unpack(path, data), name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _rows(path, data)
    text = _decode(path, data)
    if name.endswith(".json") and text[_BLANK.match(text).end() :][:1] == "[":  # type: ignore[union-attr]
        return _array(path, text)
    return _lines(path, text)


def kind_of(value: Any) -> str:
    """What a value is, in words for an error message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _unpack(path: Path, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{path}: not a whole gzip file ({error})") from error


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PromptError(f"{path}, line {line}: not UTF-8 text; prompts files are JSON in UTF-8") from error


def _lines(path: Path, text: str) -> Iterator[Entry]:
    # Not splitlines(): it also splits at characters that JSON strings may hold, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError also for a number of too many digits
                raise PromptError(f"{where}: not JSON ({error})") from error
            yield Entry(item=item, where=where, number=number)


def _array(path: Path, text: str) -> Iterator[Entry]:
    """The elements one after another, so that each has its line and a file cut short is named where it ends."""
    decoder = json.JSONDecoder()
    place = _next(text, text.index("[") + 1)
    line, counted, number = 1, 0, 0
    closed = text[place : place + 1] == "]"
    while not closed:
        number += 1
        line, counted = line + text.count("\n", counted, place), place
        where = f"{path}, line {line} (entry {number})"
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where}: not JSON ({error})") from error
        yield Entry(item=item, where=where, number=number)
        place = _next(text, place)
        mark = text[place : place + 1]
        if mark not in (",", "]") or not mark:
            raise PromptError(f"{where}: not JSON (after it comes {mark!r}, not a comma or the end of the array)")
        closed = mark == "]"
        if not closed:
            place = _next(text, place + 1)
    if _next(text, place + 1) != len(text):
        raise PromptError(f"{path}: not JSON (something follows the end of the array)")


def _next(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _rows(path: Path, data: bytes) -> Iterator[Entry]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PromptError(
            f"{path}: Parquet needs pyarrow, which is not installed: pip install 'draftsmith[bench]', or give JSON"
        ) from error
    try:
        # Without threads: none of ours may run beside a measurement.
        batches = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).iter_batches(use_threads=False)
        rows = [row for batch in batches for row in batch.to_pylist()]
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise PromptError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())})") from error
    for number, row in enumerate(rows, 1):
        yield Entry(item=row, where=f"{path}, row {number}", number=number)
