"""Draftsmith: exact speculative decoding, every drafter family, one verifier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine as Engine

# Must be set before PyTorch loads its OpenMP. Threads that spin for long wait for one another's time slice as
# soon as anything else runs (measured: 25 ms a step alone, 1200 ms beside other work); after 10,000 spins
# they sleep, which costs 4 % alone and is 6 times faster in company. Whoever sets either variable decides.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `import draftsmith` and `draftsmith --help` do not load PyTorch.
    if name == "Engine":
        from draftsmith.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
