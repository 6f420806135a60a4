"""How busy the machine was with other work while a section of `bench_native.py` ran.

Engines suffer differently from company (one that waits at spinning barriers loses most), so a result tells how much
there was. Linux only; elsewhere nothing is known and None is given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Cores kept busy by anything but this process and its peers, from the moment this is made."""

    def __init__(self, peer_ids: Sequence[int]) -> None:
        self._ids = [os.getpid(), *peer_ids]
        self._began = time.monotonic()
        self._before = self._seconds()

    def cores(self) -> float | None:
        """The average until now."""
        after, elapsed = self._seconds(), time.monotonic() - self._began
        if after is None or self._before is None or elapsed <= 0:
            return None
        return max(after - self._before, 0.0) / elapsed

    def _seconds(self) -> float | None:
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
            return (user + nice + system + irq + softirq + steal - sum(map(_ticks_of, self._ids))) / _TICKS
        except (OSError, ValueError):
            return None


def _ticks_of(process_id: int) -> int:
    # The name, in brackets, may hold spaces; user and system time are fields 14 and 15 counted from 1.
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
