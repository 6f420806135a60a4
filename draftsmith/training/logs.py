"""What a run writes down while it goes: JSON lines always, TensorBoard where it is installed.

Called by `training.run`. Invariant: after a continuation the file holds each step once, for lines of steps
that the state does not know are dropped first.
"""

from __future__ import annotations

import json
import os
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
        try:
            _keep_up_to(path, last_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DraftsmithError(f"{path}: cannot be written: {error.strerror or error}") from error
        self._board = _board(path.parent / "tensorboard", last_step)

    def write(self, kind: str, **values: Any) -> None:
        """One line."""
        try:
            self._file.write(json.dumps({"kind": kind, **values}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise DraftsmithError(f"{self._path}: cannot be written: {error.strerror or error}") from error

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
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _show(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)


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


def _board(directory: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=last_step + 1)
