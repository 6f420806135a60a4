"""What Ctrl-C does while something must not be cut in half, or where Python would lose it.

Called by `app` (every command), `chat` (an answer) and `bench` (writing results). Invariant: the handler
that was there before is back afterwards, and an interrupt is never swallowed: it ends the answer, or is
raised later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

_AGAIN_SECONDS = 0.01


def keep_interrupts() -> None:
    """From now on send Ctrl-C again when it fell into a finalizer, where Python only writes that it ignores it."""
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # From another thread and a little later: the finalizer has then returned to the work it interrupted.
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            before(unraisable)

    sys.unraisablehook = hook


@dataclass
class Stop:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def stop_on_interrupt(*more: signal.Signals) -> Iterator[Stop]:
    """Inside, the first Ctrl-C, or the first of the signals `more`, only sets the flag; a second one interrupts."""
    with _flagged(signal.SIGINT, *more, insist=True) as stop:
        yield stop


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, Ctrl-C waits; it is raised at the end."""
    with _flagged(signal.SIGINT, insist=False) as stop:
        yield
    if stop.asked:
        raise KeyboardInterrupt


@contextmanager
def _flagged(*signals: signal.Signals, insist: bool) -> Iterator[Stop]:
    stop = Stop()

    def on_interrupt(signal_number: int, frame: FrameType | None) -> None:
        if stop.asked and insist:
            raise KeyboardInterrupt
        stop.asked = True

    before = [(number, signal.signal(number, on_interrupt)) for number in signals]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
