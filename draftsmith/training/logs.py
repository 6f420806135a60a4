"""What a run writes down while it goes: JSON lines always, TensorBoard's events where it is installed.

Called by `training.run`. Invariants: after a continuation the file holds each step once, for lines of steps
that the state does not know are dropped first; what cannot be written is told where it happens, by no thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from draftsmith.errors import DraftsmithError
from draftsmith.training.trainer import Progress, StepReport
from draftsmith.training.validation import Figures, as_plain


@final
class TrainingLog:
    """The log of one run, opened for appending."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Keep what is there up to `last_step`. Raises `DraftsmithError` when the file cannot be written."""
        self._path = path
        with _told(path):
            _keep_up_to(path, last_step)
            self._file = path.open("a", encoding="utf-8")
        self._board = _board(path.parent / "tensorboard", last_step)

    def write(self, kind: str, **values: Any) -> None:
        """One line."""
        with _told(self._path):
            self._file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")
            self._file.flush()

    def step(self, report: StepReport) -> None:
        """A step."""
        self.write("step", **vars(report))
        self._show(report.step, {"loss": report.loss, "rate": report.rate, "gradient": report.gradient})

    def validation(self, figures: Figures, progress: Progress) -> None:
        """A validation."""
        self.write("validation", step=progress.step, **as_plain(figures))
        shown = {
            "tokens_per_step/greedy": figures.greedy_tokens_per_step,
            "tokens_per_step/sampled": figures.sampled_tokens_per_step,
            "calibration_error": figures.calibration_error,
        }
        shown |= {f"accuracy/{depth}": value for depth, value in enumerate(figures.accuracy)}
        self._show(progress.step, shown)

    def close(self) -> None:
        """Close the files."""
        # What a file still holds here could not be written before, and that has been told.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()

    def _show(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            self._board.show(step, values)


@final
class _Board:
    """TensorBoard's file of events. Its own writer has a thread, which would tell of a full disk in a traceback."""

    def __init__(self, directory: Path, last_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = directory / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"
        with _told(self._path):
            directory.mkdir(exist_ok=True)
            self._file = self._path.open("ab")
        self._records = RecordWriter(self._file)
        # A start at a step hides what an earlier life of the run wrote of later ones.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(Event(wall_time=time.time(), step=last_step + 1, session_log=start))

    def show(self, step: int, values: dict[str, float]) -> None:
        """Numbers by name, at a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=numbers)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        with _told(self._path):
            self._records.write(event.SerializeToString())
            self._records.flush()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise `DraftsmithError` where the system refuses."""
    try:
        yield
    except OSError as error:
        raise DraftsmithError(f"{path}: cannot be written ({error.strerror or error})") from error


def _keep_up_to(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # cut off when the writer was killed
            continue
        if found.get("step", 0) <= last_step:
            kept.append(line + "\n")
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text("".join(kept), encoding="utf-8")
    staging.replace(path)


def _board(directory: Path, last_step: int) -> _Board | None:
    try:
        return _Board(directory, last_step)
    except ImportError:
        return None
