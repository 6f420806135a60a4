"""Whose turn it is: one thread at a time works on the scheduler.

Used by the engine around every step. A thread that waits for a token must not wait for the turn: another
thread's step may bring the token, so waiters look again after every turn. Invariant: a turn ends however
its work ends, also when an interrupt arrives between any two instructions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

_LOOK_AGAIN = 1.0
"""Seconds after which a waiter looks again unasked: an interrupt may have hit the one who was to wake it."""


@final
class Turn:
    """Mutual exclusion whose waiters can be content with somebody else's work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object | None = None

    def run(self, work: Callable[[], object], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Do `work` when the turn is free; not at all once `unless()` is true. `work` may not call this."""
        me = object()
        try:
            with self._changed:
                while self._holder is not None and not unless():
                    self._changed.wait(_LOOK_AGAIN)
                if unless():
                    return
                self._holder = me
            work()
        finally:
            # Python delivers interrupts at calls, so none comes before the turn is given up.
            if self._holder is me:
                self._holder = None
                self._tell()

    def try_run(self, work: Callable[[], object]) -> bool:
        """Do `work` if the turn is free now, and say whether it was. Safe anywhere, finalizers included."""
        me = object()
        try:
            with self._changed:
                if self._holder is not None:
                    return False
                self._holder = me
            work()
            return True
        finally:
            if self._holder is me:
                self._holder = None
                self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
