"""A benchmark run on disk: everything its summary is computed from, and the summary.

    config.json            resolved configuration, versions, hardware, seed
    prompts.jsonl          the prompts, in the order measured
    runs.jsonl             one line per (repeat, block, arm): order, wall seconds, memory, counters
    outputs.jsonl          one line per request: times, token ids, text, finish reason or error, first difference
    steps.parquet          the event logs' steps of all runs, and
    request_steps.parquet  their request-steps (`core.stats`); *.jsonl where pyarrow is not installed
    summary.json           the figures
    journal.jsonl          while it runs: a line per run, with all of its rows

Written by the command line while it measures. Invariants: each arm's work on a block is one line of the journal,
written before the next begins, so a run that dies keeps what it had; the journal goes when the other files are
whole; `read` gives back exactly what was measured, from either.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from draftsmith.bench.arms import Counters
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import ArmRun, Difference, Key, Measured, RequestRun
from draftsmith.bench.tables import read_table, write_table
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.errors import OptionError, UserError

_MARKER = "config.json"
_JOURNAL = "journal.jsonl"
_TABLES: Mapping[str, type[StepRecord] | type[RequestStepRecord]] = {
    "steps": StepRecord,
    "request_steps": RequestStepRecord,
}
_FILES = ("prompts.jsonl", "runs.jsonl", "outputs.jsonl", "summary.json", _JOURNAL, "report.html", "report.md", _MARKER)
_PATTERNS = (*_FILES, "steps.*", "request_steps.*", "events-*.jsonl")


@final
class BundleWriter:
    """Writes one run's bundle."""

    def __init__(self, directory: Path, *, force: bool) -> None:
        """Make the directory ready. Raises `OptionError` when it may not be used."""
        self._directory = directory
        try:
            if directory.exists() and not directory.is_dir():
                raise OptionError(f"output {directory} is a file; give a directory")
            if directory.is_dir() and any(directory.iterdir()):
                _clear(directory, force)
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OptionError(f"cannot write to output {directory}: {error.strerror}") from error

    def begin(self, config: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Write what is known before the first measurement."""
        _write(self._directory / _MARKER, [json.dumps(config, indent=2, ensure_ascii=False) + "\n"])
        records = ({"prompt": index, **dataclasses.asdict(prompt)} for index, prompt in enumerate(prompts))
        _write(self._directory / "prompts.jsonl", map(_line, records))
        (self._directory / _JOURNAL).touch()

    def add(self, run: ArmRun) -> None:
        """Write one arm's work on one block."""
        record = {
            **_run_record(run),
            "rows": [dataclasses.asdict(request) for request in run.requests],
            "steps": run.events.steps,
            "request_steps": run.events.requests,
        }
        with (self._directory / _JOURNAL).open("a", encoding="utf-8") as stream:
            stream.write(_line(record))

    def end(self, measured: Measured, summary: Mapping[str, Any]) -> None:
        """Write the files that stay, and let the journal go."""
        runs = measured.runs
        _write(
            self._directory / "runs.jsonl",
            (_line({**_run_record(run), "rows": _sizes(run.requests, run.events)}) for run in runs),
        )
        _write(self._directory / "outputs.jsonl", map(_line, _output_records(measured)))
        for name, record_class in _TABLES.items():
            places = [index for index, run in enumerate(runs) for _ in _records(run.events, name)]
            records = [record for run in runs for record in _records(run.events, name)]
            write_table(self._directory / name, record_class, {"run": places}, records)
        _write(self._directory / "summary.json", [json.dumps(summary, indent=2, ensure_ascii=False) + "\n"])
        (self._directory / _JOURNAL).unlink(missing_ok=True)


def read(directory: Path) -> Measured:
    """Read a bundle back. Raises `UserError` for a directory that holds none, or one that is damaged."""
    try:
        config = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "arms" not in config:
            raise ValueError(f"{_MARKER} is not a benchmark's")
        if (directory / _JOURNAL).exists():
            return _measured(config, *_from_journal(directory / _JOURNAL), interrupted=True, other_cores=None)
        summary = read_summary(directory)
        runs, differences = _from_files(directory)
    except OSError as error:
        raise UserError(f"{directory} is not a readable bundle: {error.strerror} ({error.filename})") from error
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise UserError(f"{directory} is not a readable bundle: {type(error).__name__}: {error}") from error
    return _measured(config, runs, differences, interrupted=summary["interrupted"], other_cores=summary["other_cores"])


def read_summary(directory: Path) -> dict[str, Any]:
    """The summary as it was written. Raises `UserError`."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{directory} is not a finished bundle: {error.strerror} ({error.filename})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{directory / 'summary.json'} is damaged: {error}") from error
    if not isinstance(summary, dict) or "results" not in summary:
        raise UserError(f"{directory / 'summary.json'} is not a benchmark's")
    return summary


def _measured(
    config: dict[str, Any],
    runs: Sequence[ArmRun],
    differences: Mapping[Key, Difference],
    *,
    interrupted: bool,
    other_cores: float | None,
) -> Measured:
    return Measured(
        config=config,
        runs=tuple(runs),
        differences=differences,
        failed={int(index): reason for index, reason in config["failed_prompts"].items()},
        interrupted=interrupted,
        other_cores=other_cores,
    )


def _from_journal(path: Path) -> tuple[list[ArmRun], dict[Key, Difference]]:
    from draftsmith.bench.differences import find_differences

    runs = []
    for record in _read_lines(path):
        events = EventLog(
            (StepRecord(*values) for values in record.pop("steps")),
            (RequestStepRecord(*values) for values in record.pop("request_steps")),
        )
        runs.append(_run(record, [_request(row) for row in record.pop("rows")], events))
    # Nobody has scored the differing choices again, so how close they were is not known.
    found = find_differences(runs, json.loads((path.parent / _MARKER).read_text(encoding="utf-8"))["baseline"])
    return runs, {key: Difference(position=position, gap=None) for key, position in found.items()}


def _from_files(directory: Path) -> tuple[list[ArmRun], dict[Key, Difference]]:
    records = list(_read_lines(directory / "runs.jsonl", is_whole=True))
    logs = [EventLog() for _ in records]
    for name, record_class in _TABLES.items():
        columns, rows = read_table(directory / name, record_class, ("run",))
        for place, values in zip(columns["run"], rows, strict=True):
            _records(logs[place], name).append(values)
    requests: list[list[RequestRun]] = [[] for _ in records]
    differences: dict[Key, Difference] = {}
    for row in _read_lines(directory / "outputs.jsonl", is_whole=True):
        place, first = row.pop("run"), row.pop("first_difference")
        del row["arm"]
        request = _request(row)
        requests[place].append(request)
        if first is not None:
            differences[Key(records[place]["arm"], request.prompt, request.turn)] = Difference(**first)
    runs = []
    for record, own, log in zip(records, requests, logs, strict=True):
        if record.pop("rows") != _sizes(own, log):
            raise ValueError("rows of its tables are missing")
        runs.append(_run(record, own, log))
    return runs, differences


def _records(log: EventLog, name: str) -> list[Any]:
    return log.steps if name == "steps" else log.requests


def _sizes(requests: Sequence[RequestRun], log: EventLog) -> list[int]:
    """How many rows a run has in each of the three other files."""
    return [len(requests), len(log.steps), len(log.requests)]


def _counters(record: dict[str, Any] | None) -> Counters | None:
    if record is None:
        return None
    places = record.pop("accepted_at")
    return Counters(**record, accepted_at=None if places is None else tuple(places))


def _run(record: dict[str, Any], requests: Sequence[RequestRun], events: EventLog) -> ArmRun:
    counters = _counters(record.pop("counters"))
    return ArmRun(**record, counters=counters, requests=tuple(requests), events=events)


def _request(row: dict[str, Any]) -> RequestRun:
    ids, counters = row.pop("token_ids"), row.pop("counters")
    arrivals = tuple((seconds, count) for seconds, count in row.pop("arrivals"))
    return RequestRun(
        **row,
        token_ids=None if ids is None else tuple(ids),
        counters=_counters(counters),
        arrivals=arrivals,
    )


def _run_record(run: ArmRun) -> dict[str, Any]:
    return {
        "repeat": run.repeat,
        "block": run.block,
        "arm": run.arm,
        "order": run.order,
        "seconds": run.seconds,
        "memory_bytes": run.memory_bytes,
        "counters": None if run.counters is None else dataclasses.asdict(run.counters),
    }


def _output_records(measured: Measured) -> Iterator[dict[str, Any]]:
    for place, run in enumerate(measured.runs):
        for request in run.requests:
            difference = measured.differences.get(Key(run.arm, request.prompt, request.turn))
            yield {
                "run": place,
                "arm": run.arm,
                **dataclasses.asdict(request),
                "first_difference": None if difference is None else dataclasses.asdict(difference),
            }


def _clear(directory: Path, force: bool) -> None:
    """Remove an old bundle, and only what a bundle consists of."""
    if not is_bundle(directory):
        raise OptionError(f"output {directory} holds other files; give an empty or a new directory")
    if not force:
        raise OptionError(f"output {directory} holds a bundle already; give --force to replace it")
    for pattern in _PATTERNS:
        for path in directory.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_bundle(directory: Path) -> bool:
    """Whether the marker is a run's: model directories have a `config.json` too, and lose nothing here."""
    try:
        config = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and ("arms" in config or "drafters" in config)


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(parts)
    os.replace(temporary, path)


def _read_lines(path: Path, *, is_whole: bool = False) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    # A writer that was killed may leave half a line; everything before it is whole.
    if lines[-1]:
        if is_whole:
            raise ValueError(f"{path.name}, line {len(lines)} is cut off")
        warnings.warn(f"{path}: line {len(lines)} is cut off; left out", stacklevel=2)
    for line in lines[:-1]:
        yield json.loads(line)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
