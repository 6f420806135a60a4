"""The console that tables and views are printed on.

Called by `models`, `bench` and `demo`. Invariant: a reader that goes away ends the command the same way
whether text was printed plainly or through rich.
"""

from __future__ import annotations

import sys
from typing import TextIO, final

from rich.console import Console


@final
class OutputConsole(Console):
    """A console on a stream; markup and highlighting are off, so that what is printed is what was meant."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here; the command's own handling is to see it."""
        raise BrokenPipeError


def note(text: str) -> None:
    """A line for people, beside what the command prints."""
    print(f"draftsmith: {text}", file=sys.stderr)
