"""Traces of real traffic: when requests came and, where it is known, what was asked for.

Called by `arrivals`. A trace is JSON lines or, by the name `.csv`, a table with a header. Each request has a time
(`timestamp`, `time` or `at`, in seconds) and may have a prompt's index (`prompt`) and numbers of tokens (`input_len`,
`output_len`); other columns are not read. Invariant: times ascend and are not negative, or the line is refused; half
a line at the end, which a recorder that was killed leaves, is skipped and named.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.workloads.files import kind_of, read_file
from draftsmith.errors import PromptError

_TIME_KEYS = ("timestamp", "time", "at")
_COUNT_KEYS = {
    "prompt": ("prompt",),
    "input_len": ("input_len", "input_length"),
    "output_len": ("output_len", "output_length"),
}
_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """What a trace says of a request besides its time; None where it says nothing."""

    prompt: int | None = None
    input_len: int | None = None
    output_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """A trace as it stands in its file. `skipped` names the lines left out."""

    times: tuple[float, ...]
    requests: tuple[TraceRequest, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Line:
    text: str
    where: str
    # Without a line end behind it, so that it may have been cut.
    open_ended: bool


class _Torn(Exception):
    """The last line stops in the middle."""


def read_trace(path: Path) -> TraceFile:
    """Read a trace. Raises `PromptError` naming file and line."""
    lines = _lines(path)
    records = _from_csv(path, lines) if path.suffix.lower() == ".csv" else _from_json(lines)
    times: list[float] = []
    requests: list[TraceRequest] = []
    skipped: list[str] = []
    try:
        for where, record in records:
            time = _time(where, record)
            if times and time < times[-1]:
                raise PromptError(
                    f"{where}: the time {time:g} comes before that of the line above, {times[-1]:g}; sort it"
                )
            times.append(time)
            requests.append(TraceRequest(**{name: _count(where, record, name) for name in _COUNT_KEYS}))
    except _Torn as torn:
        skipped.append(f"{torn}: half a line at the end of the file")
    if not times:
        raise PromptError(f'{path} holds no requests; expected lines such as {{"timestamp": 1.5}}')
    return TraceFile(times=tuple(times), requests=tuple(requests), skipped=tuple(skipped))


def _lines(path: Path) -> list[_Line]:
    data = read_file(path, "trace")
    whole, _, rest = data.rpartition(b"\n")
    pieces = [*whole.split(b"\n"), rest]
    found = []
    for number, piece in enumerate(pieces, 1):
        where, last = f"{path}, line {number}", number == len(pieces)
        try:
            text = piece.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r")
        except UnicodeDecodeError as error:
            if not last:
                raise PromptError(f"{where}: not UTF-8 text") from error
            text = piece.decode(errors="replace")  # cut inside a character; the readers call it torn
        if text:
            found.append(_Line(text=text, where=where, open_ended=last))
    return found


def _from_json(lines: list[_Line]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for line in lines:
        try:
            item = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            if line.open_ended:
                raise _Torn(line.where) from error
            raise PromptError(f"{line.where}: not JSON ({error})") from error
        if not isinstance(item, dict):
            if line.open_ended:
                raise _Torn(line.where)
            raise PromptError(f"{line.where}: expected a JSON object, found {kind_of(item)}")
        yield line.where, item


def _from_csv(path: Path, lines: list[_Line]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not lines:
        return
    header = [name.strip().lower() for name in _cells(lines[0])]
    if not any(name in header for name in _TIME_KEYS):
        raise PromptError(
            f"{lines[0].where}: the header needs a column timestamp, time or at; found {', '.join(header)}"
        )
    if len(set(header)) < len(header):
        raise PromptError(f"{lines[0].where}: two columns of the header have the same name")
    for line in lines[1:]:
        cells = [cell.strip() for cell in _cells(line)]
        if len(cells) != len(header):
            if line.open_ended and len(cells) < len(header):
                raise _Torn(line.where)
            raise PromptError(f"{line.where}: {len(cells)} columns, and the header has {len(header)}")
        yield line.where, {name: cell for name, cell in zip(header, cells, strict=True) if cell}


def _cells(line: _Line) -> list[str]:
    try:
        return next(csv.reader([line.text], strict=True))
    except csv.Error as error:
        if line.open_ended:
            raise _Torn(line.where) from error
        raise PromptError(f"{line.where}: not CSV ({error})") from error


def _time(where: str, record: Mapping[str, Any]) -> float:
    key = next((key for key in _TIME_KEYS if record.get(key) is not None), None)
    if key is None:
        raise PromptError(f"{where}: no time; expected 'timestamp', 'time' or 'at' in seconds")
    value = _numeric(record[key])
    if value is None or not math.isfinite(value):
        raise PromptError(f"{where}: {key!r} must be a number of seconds, found {str(record[key])[:40]!r}")
    if value < 0:
        raise PromptError(f"{where}: the time {value:g} is negative")
    return value


def _count(where: str, record: Mapping[str, Any], name: str) -> int | None:
    key = next((key for key in _COUNT_KEYS[name] if record.get(key) is not None), None)
    if key is None:
        return None
    value, least = _numeric(record[key]), 0 if name == "prompt" else 1
    if value is None or not (least <= value < _MOST) or value != int(value):
        raise PromptError(
            f"{where}: {key!r} must be a whole number of at least {least}, found {str(record[key])[:40]!r}"
        )
    return int(value)


def _numeric(value: Any) -> float | None:
    """A JSON number, or a cell of a table that spells one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
