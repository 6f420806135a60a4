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
