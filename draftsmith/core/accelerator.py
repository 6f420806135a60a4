"""The one place that decides whether the native kernels serve: `accelerator.native()`.

Called by sampling, truncation, noise and verification for every row. None where the extension is not built or
DRAFTSMITH_PURE_PYTHON is set. Invariant: native and Python agree bit for bit, so this is a matter of speed alone.
"""

from __future__ import annotations

import os
from types import ModuleType

FORCE_PYTHON = "DRAFTSMITH_PURE_PYTHON"
"""Environment variable, read on import: any value but "" and "0" makes the pure Python parts serve."""


def _load() -> ModuleType | None:
    if os.environ.get(FORCE_PYTHON, "0") not in ("", "0"):
        return None
    try:
        from draftsmith import _native
    except ImportError:
        return None
    return _native


_NATIVE = _load()


def native() -> ModuleType | None:
    """The native module, or None: then the caller does the same in Python."""
    return _NATIVE
