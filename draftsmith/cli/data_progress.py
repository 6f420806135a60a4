"""How far the making of training data is: a bar on a terminal, a line now and then elsewhere.

Called by `data` and `data_prepare`. Invariant: all of it goes to stderr.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith.cli.console import note
from draftsmith.training.text_store import TextStore

_TELL_SECONDS = 30.0


class _Bar:
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

    def show(self, done: int, words: str) -> None:
        self._progress.update(self._task, completed=done, words=words)
        if self._progress.disable and time.monotonic() > self._told + _TELL_SECONDS:
            self._told = time.monotonic()
            note(f"{self._progress.tasks[0].percentage:.0f} %, {words}")


@final
class TextBar(_Bar):
    """While texts are written."""

    def __init__(self, progress: tuple[int, int]) -> None:
        super().__init__(*progress)
        self._began = time.perf_counter()

    def update(self, done: int, store: TextStore, written: int) -> None:
        """Tell how much there is; `written`: tokens of this run."""
        speed = written / max(time.perf_counter() - self._began, 1e-9)
        dropped = sum(store.dropped.values())
        self.show(done, f"{store.num_texts} kept, {dropped} dropped, {store.answer_tokens} tokens, {speed:.0f} tok/s")


@final
class PrepareBar(_Bar):
    """While texts are made token ids."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def update(self, done: int, total: int) -> None:
        """Tell how many texts of how many are done."""
        if done == total or done % 50 == 0:
            self._progress.update(self._task, total=total)
            self.show(done, f"{done} of {total} texts")
