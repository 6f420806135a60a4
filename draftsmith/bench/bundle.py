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
written before the next begins, so a run that dies keeps what it had; the summary comes last, when the other files are
whole, and then the journal goes; `read` gives back exactly what was measured, from either, or one clear error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from draftsmith.bench.arms import Description
from draftsmith.bench.decode import check_fields, decode, kinds_of
from draftsmith.bench.differences import find_differences
from draftsmith.bench.latency import Targets
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import ArmRun, Difference, Key, Measured
from draftsmith.bench.summary import SCHEMA
from draftsmith.bench.tables import read_table, to_records, write_table
from draftsmith.bench.workloads.prompt import is_text
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.errors import OptionError, UserError
from draftsmith.io.staging import staged_file

_MARKER = "config.json"
_JOURNAL = "journal.jsonl"
_TABLES: Mapping[str, type[StepRecord] | type[RequestStepRecord]] = {
    "steps": StepRecord,
    "request_steps": RequestStepRecord,
}
# In the order in which an old bundle is removed: without its summary it is none that is whole, without the marker none.
_FILES = (
    *("summary.json", "prompts.jsonl", "runs.jsonl", "outputs.jsonl", "steps.parquet", "steps.jsonl"),
    *("request_steps.parquet", "request_steps.jsonl", "report.html", "report.md", _JOURNAL, _MARKER),
)
_PROBE = ".probe"
_TEMPORARIES = (_PROBE, *(f".{name}.new" for name in (*_FILES, *_TABLES)))
"""What a run that was killed while it wrote may leave; nobody's files."""
_KEPT = "what was measured before is kept there"
_CONFIG: Mapping[str, Any] = {
    "arms": tuple[str, ...],
    "baseline": str,
    "model": str,
    "load": str,
    "temperature": float,
    "num_prompts": int,
    "descriptions": Mapping[str, Mapping[str, Any]],
    "targets": Mapping[str, float | None],
    "failed_prompts": Mapping[str, str],
    "hardware": Mapping[str, Any],
    "versions": Mapping[str, Any],
}
_HARDWARE: Mapping[str, Any] = {"cores": int | None, "threads": int | None, "memory_bytes": int | None}


@final
class BundleWriter:
    """Writes one run's bundle."""

    def __init__(self, directory: Path, *, force: bool) -> None:
        """See that the directory may be used; an old bundle goes when `begin` replaces it. Raises `OptionError`."""
        self._directory = directory
        try:
            if directory.exists() and not directory.is_dir():
                raise OptionError(f"output {directory} is a file; give a directory")
            if directory.is_dir() and any(path.name not in _TEMPORARIES for path in directory.iterdir()):
                _check_replaceable(directory, force)
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / _PROBE
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OptionError(f"cannot write to output {directory}: {error.strerror}") from error

    def begin(self, config: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Write what is known before the first measurement, in place of an old bundle. Raises `UserError`."""
        with self._writing("nothing was measured"):
            for name in (*_FILES, *_TEMPORARIES):
                (self._directory / name).unlink(missing_ok=True)
            _write(self._directory / _MARKER, [_text(config, indent=2)])
            records = ({"prompt": index, **dataclasses.asdict(prompt)} for index, prompt in enumerate(prompts))
            _write(self._directory / "prompts.jsonl", map(_text, records))
            (self._directory / _JOURNAL).touch()

    def add(self, run: ArmRun) -> None:
        """Write one arm's work on one block. Raises `UserError`."""
        record = {
            **_run_record(run),
            "rows": [dataclasses.asdict(request) for request in run.requests],
            "steps": run.events.steps,
            "request_steps": run.events.requests,
        }
        with self._writing(_KEPT), (self._directory / _JOURNAL).open("a", encoding="utf-8") as stream:
            stream.write(_text(record))

    def end(self, measured: Measured, summary: Mapping[str, Any]) -> None:
        """Write the files that stay, the summary last, and let the journal go. Raises `UserError`."""
        runs = measured.runs
        with self._writing(_KEPT):
            _write(
                self._directory / "runs.jsonl",
                (_text({**_run_record(run), "rows": _sizes(run.requests, run.events)}) for run in runs),
            )
            _write(self._directory / "outputs.jsonl", map(_text, _output_records(measured)))
            for name, record_class in _TABLES.items():
                places = [index for index, run in enumerate(runs) for _ in _records(run.events, name)]
                records = [record for run in runs for record in _records(run.events, name)]
                write_table(self._directory / name, record_class, {"run": places}, records)
            _write(self._directory / "summary.json", [_text(summary, indent=2)])
            (self._directory / _JOURNAL).unlink(missing_ok=True)

    @contextmanager
    def _writing(self, kept: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write the bundle {self._directory}: {error.strerror or error}; {kept}") from error


def read(directory: Path) -> Measured:
    """Read a bundle back. Raises `UserError` for a directory that holds none, or one that is damaged."""
    with _reading(directory):
        config = _read_config(directory)
        if (directory / "summary.json").exists():
            summary = read_summary(directory)
            runs, told = _from_files(directory)
            interrupted = decode(summary["interrupted"], bool, "summary.json: interrupted")
            others = decode(summary["other_cores"], float | None, "summary.json: other_cores")
        else:
            # Nobody has scored the differing choices again, so how close they were is not known.
            runs, told, interrupted, others = _from_journal(directory), {}, True, None
        _check_runs(runs, config)
        failed = {int(index): reason for index, reason in config["failed_prompts"].items()}
        return Measured(
            config=config,
            runs=tuple(runs),
            differences=_differences(runs, config["baseline"], told),
            failed=failed,
            interrupted=interrupted,
            other_cores=others,
        )


def read_summary(directory: Path) -> dict[str, Any]:
    """The summary as it was written. Raises `UserError`."""
    with _reading(directory, "a finished bundle"):
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or "results" not in summary:
            raise ValueError("summary.json is not a benchmark's")
        _check_schema(summary.get("schema"))
        return summary


def read_prompts(directory: Path) -> list[str]:
    """What stands for each prompt of a bundle: equal where the prompts are. Raises `UserError`."""
    with _reading(directory):
        found: list[str] = []
        for where, record in _read_lines(directory / "prompts.jsonl"):
            if record.pop("prompt") != len(found):
                raise ValueError(f"{where}: out of order")
            asked = {name: record[name] for name in ("turns", "system", "max_new_tokens")}
            found.append(hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest())
        if len(found) != _read_config(directory)["num_prompts"]:
            raise ValueError("prompts are missing in prompts.jsonl")
        return found


@contextmanager
def _reading(directory: Path, what: str = "a readable bundle") -> Iterator[None]:
    """Whatever is wrong with the files becomes one line."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{directory} is not {what}: {error.strerror} ({error.filename})") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{directory} is not {what}: {type(error).__name__}: {error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    if not _is_ours(config):
        raise ValueError(f"{_MARKER} is not a benchmark's")
    _check_schema(config.get("schema"))
    missing = _CONFIG.keys() - config.keys()
    if missing:
        raise ValueError(f"{_MARKER} lacks {', '.join(sorted(missing))}")
    check_fields(config, _CONFIG, _MARKER)
    check_fields(config["hardware"], _HARDWARE, f"{_MARKER}: hardware")
    for name, description in config["descriptions"].items():
        check_fields(description, kinds_of(Description), f"{_MARKER}: {name}")
    Targets(**config["targets"])
    arms = config["arms"]
    if len(set(arms)) < len(arms) or config["baseline"] not in arms:
        raise ValueError(f"{_MARKER}: its arms are not a list of names with the baseline among them")
    return dict(config)


def _check_schema(schema: Any) -> None:
    if schema not in (None, SCHEMA):
        raise ValueError(f"it was written by another version (schema {schema!r:.20}; this one reads {SCHEMA})")


def _check_runs(runs: Sequence[ArmRun], config: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what no run can have measured: it would be computed with."""
    for run in runs:
        if run.arm not in config["arms"] or min(run.repeat, run.block, run.order, run.seconds) < 0:
            raise ValueError(f"a run of {run.arm!r:.40} in repeat {run.repeat}, block {run.block} cannot be")
        for request in run.requests:
            counts = (request.prompt, request.turn, request.prompt_tokens, request.num_tokens)
            if min(counts) < 0 or request.prompt >= config["num_prompts"] or any(n < 1 for _, n in request.arrivals):
                raise ValueError(f"a request of {run.arm} to prompt {request.prompt} has counts that cannot be")
        if not all(record.is_sound for record in run.events.requests):
            raise ValueError(f"the event log of {run.arm} in block {run.block} contradicts itself")


def _differences(runs: Sequence[ArmRun], baseline: str, told: Mapping[Key, Difference]) -> dict[Key, Difference]:
    """Where answers differ, from their ids; of what was told of it only the gaps, which nothing else tells."""
    found = {}
    for key, position in find_differences(runs, baseline).items():
        before = told.get(key)
        gap = before.gap if before is not None and before.position == position else None
        found[key] = Difference(position=position, gap=gap)
    return found


def _from_journal(directory: Path) -> list[ArmRun]:
    path, runs = directory / _JOURNAL, []
    if not path.exists() and any((directory / name).exists() for name in ("runs.jsonl", "outputs.jsonl")):
        raise ValueError("summary.json is missing")
    # Without any of them the run was stopped before its first measurement.
    for where, record in _read_lines(path) if path.exists() else ():
        log = EventLog(
            to_records(StepRecord, record.pop("steps")), to_records(RequestStepRecord, record.pop("request_steps"))
        )
        runs.append(_run(record, record.pop("rows"), log, where))
    return runs


def _from_files(directory: Path) -> tuple[list[ArmRun], dict[Key, Difference]]:
    records = list(_read_lines(directory / "runs.jsonl", is_whole=True))
    logs = [EventLog() for _ in records]
    for name, record_class in _TABLES.items():
        columns, rows = read_table(directory / name, record_class, ("run",))
        for place, values in zip(columns["run"], rows, strict=True):
            _records(logs[place], name).append(values)
    requests: list[list[Any]] = [[] for _ in records]
    differences: dict[Key, Difference] = {}
    for where, row in _read_lines(directory / "outputs.jsonl", is_whole=True):
        place, first = decode(row.pop("run"), int, where), row.pop("first_difference")
        arm = row.pop("arm")
        if not 0 <= place < len(records) or records[place][1].get("arm") != arm:
            raise ValueError(f"{where}: no run {place} of {arm!r:.40}")
        requests[place].append(row)
        if first is not None:
            difference = decode(first, Difference, where)
            differences[Key(arm, row["prompt"], row["turn"])] = difference
    runs = []
    for (where, record), own, log in zip(records, requests, logs, strict=True):
        if record.pop("rows") != _sizes(own, log):
            raise ValueError("rows of its tables are missing")
        runs.append(_run(record, own, log, where))
    return runs, differences


def _run(record: dict[str, Any], requests: Sequence[Any], log: EventLog, where: str) -> ArmRun:
    run: ArmRun = decode({**record, "requests": requests}, ArmRun, where)
    return dataclasses.replace(run, events=log)


def _records(log: EventLog, name: str) -> list[Any]:
    return log.steps if name == "steps" else log.requests


def _sizes(requests: Sequence[Any], log: EventLog) -> list[int]:
    """How many rows a run has in each of the three other files."""
    return [len(requests), len(log.steps), len(log.requests)]


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


def _check_replaceable(directory: Path, force: bool) -> None:
    if not is_bundle(directory):
        raise OptionError(f"output {directory} holds other files; give an empty or a new directory")
    if not force:
        raise OptionError(f"output {directory} holds a bundle already; give --force to replace it")


def is_bundle(directory: Path) -> bool:
    """Whether the marker is a run's: model directories have a `config.json` too, and lose nothing here."""
    try:
        return _is_ours(json.loads((directory / _MARKER).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return False


def _is_ours(config: Any) -> bool:
    return isinstance(config, dict) and isinstance(config.get("arms"), list) and "baseline" in config


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write a file whole or not at all."""
    with staged_file(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(parts)


def _read_lines(path: Path, *, is_whole: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, line by line, each with its place."""
    # Bytes: a writer that was killed may leave half a line, and half a character with it; all before it is whole.
    lines = path.read_bytes().split(b"\n")
    if lines[-1] and is_whole:
        raise ValueError(f"{path.name}, line {len(lines)} is cut off")
    for number, line in enumerate(lines[:-1], 1):
        where = f"{path.name}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no object")
        yield where, record


def _text(record: Mapping[str, Any], indent: int | None = None) -> str:
    text = json.dumps(record, ensure_ascii=False, indent=indent)
    # Names of files may hold bytes that are no text; escapes can spell them.
    return (text if is_text(text) else json.dumps(record, indent=indent)) + "\n"
