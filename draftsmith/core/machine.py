"""What this machine is called.

Called where measurements are written or looked up. Invariant: what cannot be found out is None, never a guess.
"""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str | None:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
