"""Records of an event log as a table on disk: Parquet, or JSON lines where pyarrow is not installed.

Called by the bundle. Invariant: what `read_table` gives equals what `write_table` got, types and order included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record", bound=tuple[Any, ...])

_MOST = 2**53
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < _MOST,
    # Clocks are read one after another, so that a rest may come out a little below nothing.
    "float": lambda value: type(value) in (int, float) and abs(value) < _MOST,
    "bool": lambda value: type(value) is bool,
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
}
_TYPES = {"int": "int64", "float": "float64", "bool": "bool_", "str": "string", "str | None": "string"}


def has_parquet() -> bool:
    """Whether tables become Parquet files here."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


def write_table(
    stem: Path, record_class: type[Record], more: Mapping[str, Sequence[int]], records: Sequence[Record]
) -> None:
    """Write `stem`.parquet or .jsonl: the fields of a named tuple as columns, behind columns of whole numbers."""
    fields = _fields(record_class)
    columns = {**more, **{name: [record[place] for record in records] for place, name in enumerate(fields)}}
    if not has_parquet():
        temporary = stem.with_name(f".{stem.name}.new")
        with temporary.open("w", encoding="utf-8") as stream:
            for row in zip(*columns.values(), strict=True):
                stream.write(json.dumps(dict(zip(columns, row, strict=True)), separators=(",", ":")) + "\n")
        os.replace(temporary, stem.with_suffix(".jsonl"))
        return
    import pyarrow
    import pyarrow.parquet

    kinds: dict[str, str] = dict.fromkeys(more, "int") | fields
    schema = pyarrow.schema([(name, getattr(pyarrow, _TYPES[kind])()) for name, kind in kinds.items()])
    temporary = stem.with_name(f".{stem.name}.new")
    # Opened here: by its name pyarrow would take a file for a URI, and refuse a name that is no text.
    with temporary.open("wb") as sink:
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), sink)
    os.replace(temporary, stem.with_suffix(".parquet"))


def read_table(
    stem: Path, record_class: type[Record], more: Sequence[str]
) -> tuple[dict[str, list[int]], list[Record]]:
    """The columns `more` and the records. Raises `ValueError` for a damaged file or one that cannot be read here."""
    kinds = dict.fromkeys(more, "int") | _fields(record_class)
    names = list(kinds)
    lines = stem.with_suffix(".jsonl")
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        columns = {name: [row[name] for row in rows] for name in names}
    else:
        columns = _read_parquet(stem.with_suffix(".parquet"), names)
    _check(stem.name, kinds, columns)
    records = [record_class(*row) for row in zip(*(columns[name] for name in names[len(more) :]), strict=True)]
    return {name: columns[name] for name in more}, records


def to_records(record_class: type[Record], rows: Sequence[Sequence[Any]]) -> list[Record]:
    """Records from rows of their values, checked as `read_table` does. Raises `ValueError`."""
    kinds = _fields(record_class)
    if not all(isinstance(row, list) and len(row) == len(kinds) for row in rows):
        raise ValueError(f"a {record_class.__name__} has {len(kinds)} values")
    _check(record_class.__name__, kinds, dict(zip(kinds, zip(*rows, strict=True), strict=True)) if rows else {})
    return [record_class(*row) for row in rows]


def _check(what: str, kinds: Mapping[str, str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Raises `ValueError` where a column holds what its kind does not allow; no count is negative."""
    for name, column in columns.items():
        wrong = next((value for value in column if not _FITS[kinds[name]](value)), _FITS)
        if wrong is not _FITS:
            raise ValueError(f"{what}: {name} is {wrong!r:.40}, expected {kinds[name]}")


def _read_parquet(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    if not has_parquet():
        raise ValueError(f"{path.name} needs pyarrow: pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as source:
            table = pyarrow.parquet.read_table(source, columns=list(names))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    return {name: table.column(name).to_pylist() for name in names}


def _fields(record_class: type[Any]) -> dict[str, str]:
    # NamedTuple turns annotations into forward references.
    return {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in record_class.__annotations__.items()}
