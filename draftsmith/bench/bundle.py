"""A benchmark run on disk: everything its summary is computed from, and the summary.

    config.json       resolved configuration, versions, hardware, seed
    prompts.jsonl     the prompts, in the order measured
    runs.jsonl        one line per (block, arm): order, wall seconds, request ids, error
    outputs.jsonl     one line per (prompt, arm): token ids, text, finish reason, first difference
    events-I-ARM.jsonl  the event log of arm I (`core.stats.EventLog`)
    summary.json      the figures

Written by the command line while it measures. Invariant: each arm's work on a block is written before the
next begins, so a run that dies keeps what it had; `read` gives back what `summarise_run` needs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import ArmRun, Difference, Measured, Output
from draftsmith.core.stats import EventLog
from draftsmith.errors import OptionError, UserError

_MARKER = "config.json"
_OWN_FILES = ("config.json", "prompts.jsonl", "runs.jsonl", "outputs.jsonl", "summary.json", "events-*.jsonl")


@final
class BundleWriter:
    """Writes one run's bundle."""

    def __init__(self, directory: Path, *, force: bool) -> None:
        """Make the directory ready. Raises `OptionError` when it may not be used."""
        self._directory = directory
        self._drafters: list[str] = []
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
        self._drafters = list(config["drafters"])
        self._write_json(_MARKER, config)
        with (self._directory / "prompts.jsonl").open("w", encoding="utf-8") as stream:
            for index, prompt in enumerate(prompts):
                stream.write(_line({"prompt": index, **dataclasses.asdict(prompt)}))
        (self._directory / "runs.jsonl").touch()
        (self._directory / "outputs.jsonl").touch()

    def add(self, run: ArmRun) -> None:
        """Write one arm's work on one block."""
        with (self._directory / events_name(self._drafters, run.drafter)).open("a", encoding="utf-8") as stream:
            run.events.dump(stream)
        with (self._directory / "outputs.jsonl").open("a", encoding="utf-8") as stream:
            for output in run.outputs:
                stream.write(_line(_output_record(run, output, None)))
        # Last, so that a line here vouches for the other two files.
        with (self._directory / "runs.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(_line(_run_record(run)))

    def end(self, measured: Measured, summary: Mapping[str, Any]) -> None:
        """Write the outputs again with their differences, and the summary."""
        with (self._directory / "outputs.jsonl").open("w", encoding="utf-8") as stream:
            for run in measured.runs:
                for output in run.outputs:
                    difference = measured.differences.get((run.drafter, output.prompt))
                    stream.write(_line(_output_record(run, output, difference)))
        self._write_json("summary.json", summary)

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (self._directory / name).write_text(text + "\n", encoding="utf-8")


def events_name(drafters: Sequence[str], drafter: str) -> str:
    """File name of an arm's event log. Selections hold characters that file names should not; the index is unique."""
    return f"events-{drafters.index(drafter)}-{re.sub(r'[^A-Za-z0-9_.=-]+', '+', drafter)}.jsonl"


def read(directory: Path) -> Measured:
    """Read a bundle back. Raises `UserError` for a directory that holds none."""
    try:
        config = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        summary_file = directory / "summary.json"
        summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.exists() else {}
        run_records = list(_read_lines(directory / "runs.jsonl"))
        output_records = list(_read_lines(directory / "outputs.jsonl"))
    except OSError as error:
        raise UserError(f"{directory} is not a readable bundle: {error.strerror} ({error.filename})") from error
    except ValueError as error:
        raise UserError(f"{directory} is not a readable bundle: {error}") from error
    outputs: dict[tuple[int, str], list[Output]] = {}
    differences: dict[tuple[str, int], Difference] = {}
    for record in output_records:
        block, drafter, first = record.pop("block"), record.pop("drafter"), record.pop("first_difference")
        record["token_ids"] = tuple(record["token_ids"])
        output = Output(**record)
        outputs.setdefault((block, drafter), []).append(output)
        if first is not None:
            differences[drafter, output.prompt] = Difference(**first)
    logs = {
        drafter: EventLog.load(path)
        for drafter in config["drafters"]
        if (path := directory / events_name(config["drafters"], drafter)).exists()
    }
    runs = tuple(_run(record, outputs, logs) for record in run_records)
    return Measured(
        config=config,
        runs=runs,
        differences=differences,
        failed={int(index): reason for index, reason in config["failed_prompts"].items()},
        interrupted=summary.get("interrupted", True),
        other_cores=summary.get("other_cores"),
    )


def _run(
    record: dict[str, Any], outputs: Mapping[tuple[int, str], list[Output]], logs: Mapping[str, EventLog]
) -> ArmRun:
    requests = set(record.pop("requests"))
    log = logs.get(record["drafter"], EventLog())
    own = [item for item in log.requests if item.request in requests]
    steps = {item.step for item in own}
    record["prompts"] = tuple(record["prompts"])
    return ArmRun(
        **record,
        outputs=tuple(outputs.get((record["block"], record["drafter"]), ())),
        events=EventLog([step for step in log.steps if step.step in steps], own),
    )


def _run_record(run: ArmRun) -> dict[str, Any]:
    return {
        "block": run.block,
        "drafter": run.drafter,
        "order": run.order,
        "prompts": run.prompts,
        "requests": [output.request for output in run.outputs],
        "seconds": run.seconds,
        "error": run.error,
    }


def _output_record(run: ArmRun, output: Output, difference: Difference | None) -> dict[str, Any]:
    return {
        "block": run.block,
        "drafter": run.drafter,
        **dataclasses.asdict(output),
        "first_difference": None if difference is None else dataclasses.asdict(difference),
    }


def _clear(directory: Path, force: bool) -> None:
    """Remove an old bundle, and only what a bundle consists of."""
    if not _is_bundle(directory):
        raise OptionError(f"output {directory} holds other files; give an empty or a new directory")
    if not force:
        raise OptionError(f"output {directory} holds a bundle already; give --force to replace it")
    for pattern in _OWN_FILES:
        for path in directory.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_bundle(directory: Path) -> bool:
    """Whether the marker is a run's: model directories have a `config.json` too, and lose nothing here."""
    try:
        config = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "drafters" in config


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    # A writer that was killed may leave half a line; everything before it is whole.
    for line in lines[:-1]:
        yield json.loads(line)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
