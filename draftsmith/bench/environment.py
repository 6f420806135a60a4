"""What a measurement was made on: hardware, versions, source revision.

Called by the benchmark and the demo when they write a result. Invariant: nothing here fails a run;
what cannot be found out is None, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, final

_PACKAGES = ("draftsmith", "torch", "numpy", "tokenizers", "safetensors", "gguf")


def hardware(threads: int | None = None) -> dict[str, Any]:
    """Processor, cores this process may use, threads of the run, memory in bytes, GPU name."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "processor": _processor_name(),
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

    Times measured beside other work say little, so a result tells how much there was.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others_before = _seconds_of_others()

    def others(self) -> float | None:
        """Cores kept busy by other programs on average until now; None where the system does not tell."""
        others = _seconds_of_others()
        elapsed = time.monotonic() - self._began
        if others is None or self._others_before is None or elapsed <= 0:
            return None
        return max(others - self._others_before, 0.0) / elapsed


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


def _seconds_of_others() -> float | None:
    """Processor seconds spent so far by everything but this process, time stolen by a hypervisor included."""
    try:
        with open("/proc/stat", encoding="ascii") as stream:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stream.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
