"""What a measurement was made on: hardware, versions, source revision.

Called by the benchmark and the demo when they write a result. Invariant: nothing here fails a run;
what cannot be found out is None, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

from draftsmith.core.machine import processor_name

_PACKAGES = ("draftsmith", "torch", "numpy", "tokenizers", "safetensors", "gguf")


def hardware(threads: int | None = None) -> dict[str, Any]:
    """Processor, cores this process may use, threads of the run, memory in bytes, GPU name."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": _usable_cores(),
        "threads": threads or torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that takes part in a measurement, and the git revision."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["git_revision"] = git_revision()
    return found


@final
class MachineLoad:
    """How busy everything else on this machine is, from the moment this is made.

    Times measured beside other work say little, so a result tells how much there was. `own`: processes that belong to
    the measurement besides this one, as they are now; those that have ended are known as this one's children.
    """

    def __init__(self, own: Callable[[], Iterable[int]] = tuple) -> None:
        self._own = own
        self._began = time.monotonic()
        self._others_before = _seconds_of_others(own())

    def others(self) -> float | None:
        """Cores kept busy by other programs on average until now; None where the system does not tell."""
        others = _seconds_of_others(self._own())
        elapsed = time.monotonic() - self._began
        if others is None or self._others_before is None or elapsed <= 0:
            return None
        return max(others - self._others_before, 0.0) / elapsed


@final
class Settling:
    """Waits until whoever was measured before has come to rest.

    Engines in other processes go on spinning for a while after an answer (thread pools that expect more work), at the
    cost of whoever comes next. Where the machine never rests, waiting is given up after a few times.
    """

    _WINDOW, _LIMIT, _TRIES = 0.1, 6.0, 3

    def __init__(self) -> None:
        self._failures = 0

    def wait(self) -> float:
        """Return when less than a fifth of a core is busy beside this process; the seconds it took."""
        began = time.monotonic()
        while self._failures < self._TRIES:
            load = MachineLoad()
            time.sleep(self._WINDOW)
            others = load.others()
            if others is None or others < 0.2:
                break
            if time.monotonic() > began + self._LIMIT:
                self._failures += 1
                break
        return time.monotonic() - began


def resident_bytes(process_id: int | None = None) -> int | None:
    """Resident memory of a process, this one by default, in bytes; None where the system does not tell."""
    try:
        with open(f"/proc/{process_id or os.getpid()}/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def git_revision() -> str | None:
    """Commit of the source tree this package runs from, "+changes" added where files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    revision = _git(root, "rev-parse", "HEAD")
    if revision and _git(root, "status", "--porcelain", "--untracked-files=no"):
        return f"{revision}+changes"
    return revision or None


def _usable_cores() -> int | None:
    # A container or taskset may allow fewer cores than the machine has; only Linux tells.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _seconds_of_others(own: Iterable[int] = ()) -> float | None:
    """Processor seconds spent so far by everything but this process, its ended children and the processes `own`.

    Time stolen by a hypervisor is included.
    """
    try:
        with open("/proc/stat", encoding="ascii") as stream:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stream.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    busy = user + nice + system + irq + softirq + steal - sum(map(_ticks_of, own))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time() - ended.ru_utime - ended.ru_stime


def _ticks_of(process_id: int) -> int:
    """What a process has used so far; 0 when it is gone."""
    try:
        # The name, in brackets, may hold spaces; user and system time are fields 14 and 15 counted from 1.
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
