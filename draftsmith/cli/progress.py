"""How far long work is: a bar on a terminal, a line now and then elsewhere.

Called by commands that take their time. Invariant: all of it goes to stderr.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith.cli.console import note

_TELL_SECONDS = 30.0


class Bar:
    """A bar with words behind it."""

    def __init__(self, done: int, total: int) -> None:
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._told = time.monotonic()
        self._task = self._progress.add_task("", total=total, completed=done, words="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def tell(self, done: int, total: int, words: str) -> None:
        """Done, of how many, what is under way."""
        self._progress.update(self._task, total=total)
        self.show(done, words)

    def show(self, done: int, words: str) -> None:
        """Done of the total that is known."""
        self._progress.update(self._task, completed=done, words=words)
        if self._progress.disable and time.monotonic() > self._told + _TELL_SECONDS:
            self._told = time.monotonic()
            note(f"{self._progress.tasks[0].percentage:.0f} %, {words}")
