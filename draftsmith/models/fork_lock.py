"""A lock that a forked child finds free, whoever held it in the parent.

Held by the native backend around a step: its decoder serves one caller at a time, and several threads may
call. Invariant: in the child of a fork no lock waits for a thread that exists in the parent alone.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import final


@final
class ForkLock:
    """Mutual exclusion: `with holder.lock:`.

    The interpreter's own lock is what `with` gets, because an interrupt may fall into an `__enter__` written in Python
    after it has taken the lock, and nobody would release it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _LOCKS.add(self)

    def renew(self) -> None:
        """Forget who holds it."""
        self.lock = threading.Lock()


_LOCKS: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in _LOCKS:
        lock.renew()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_all)
