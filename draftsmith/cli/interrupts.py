"""What Ctrl-C does while something must not be cut in half.

Called by `chat` (an answer) and `bench` (writing results). Invariant: the handler that was there before
is back afterwards, and an interrupt is never swallowed: it ends the answer, or is raised later.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


@dataclass
class Stop:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Inside, the first Ctrl-C only sets the flag; a second one interrupts."""
    with _flagged(insist=True) as stop:
        yield stop


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, Ctrl-C waits; it is raised at the end."""
    with _flagged(insist=False) as stop:
        yield
    if stop.asked:
        raise KeyboardInterrupt


@contextmanager
def _flagged(*, insist: bool) -> Iterator[Stop]:
    stop = Stop()

    def on_interrupt(signal_number: int, frame: FrameType | None) -> None:
        if stop.asked and insist:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
