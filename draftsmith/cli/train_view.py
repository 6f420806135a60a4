"""What a user sees of a training run on stderr: a progress bar on a terminal, lines elsewhere.

Called by `cli.train`. Invariant: nothing here decides anything; a run without a view trains the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from draftsmith.cli.console import note

if TYPE_CHECKING:
    from draftsmith.training.trainer import Listener, Progress, StepReport
    from draftsmith.training.validation import Figures

_TELL_SECONDS = 30.0
_RATE_STEPS = 20


@final
class TrainView:
    """Shows steps and validations; `with` it around the run."""

    def __init__(self, *, quiet: bool = False, max_seconds: float | None = None) -> None:
        """`max_seconds`: when the run ends at the latest."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._quiet = quiet
        self._max_seconds = max_seconds
        self._on_terminal = sys.stderr.isatty() and not quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not self._on_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0)
        self._told = time.monotonic()
        self._recent: list[tuple[int, float]] = []
        self._last = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def listener(self, stop: Callable[[], bool]) -> Listener:
        """What the trainer calls."""
        from draftsmith.training.trainer import Listener

        return Listener(on_step=self._step, on_validation=self._validation, stop=stop)

    def tell(self, line: str) -> None:
        """A line for people."""
        if self._quiet:
            return
        if self._on_terminal and self._bar.live.is_started:
            self._bar.console.print(f"draftsmith: {line}", highlight=False, markup=False, soft_wrap=True)
        else:
            note(line)

    def _step(self, report: StepReport, progress: Progress, num_steps: int) -> None:
        self._recent = [*self._recent[-_RATE_STEPS:], (report.tokens, report.seconds)]
        tokens, seconds = map(sum, zip(*self._recent, strict=True))
        left = (num_steps - report.step) * seconds / len(self._recent)
        done = report.step / num_steps
        if self._max_seconds is not None:
            left = max(min(left, self._max_seconds - progress.seconds), 0.0)
            done = max(done, min(progress.seconds / self._max_seconds, 1.0))
        parts = [
            f"step {report.step}" + (f"/{num_steps}" if num_steps < 1 << 40 else ""),
            f"loss {report.loss:.3f}",
            f"{tokens / seconds:,.0f} tok/s",
            f"{_clock(left)} left",
            *([self._last] if self._last else []),
        ]
        line = "  ".join(parts)
        self._bar.update(self._task, completed=done, description=line, refresh=True)
        if not self._on_terminal and (time.monotonic() > self._told + _TELL_SECONDS or report.step == num_steps):
            self._told = time.monotonic()
            self.tell(line)

    def _validation(self, figures: Figures, progress: Progress) -> None:
        self._last = f"τ {figures.greedy_tokens_per_step:.2f}"
        self.tell(
            f"step {progress.step}: {figures.greedy_tokens_per_step:.3f} tokens per step at temperature 0, "
            f"{figures.sampled_tokens_per_step:.3f} at 1; accuracy {_row(figures.accuracy)}; overlap "
            f"{_row(figures.overlap)}; calibration error {figures.calibration_error:.3f}"
        )


def _row(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
