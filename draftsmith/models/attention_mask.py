"""Who sees whom among a group's new rows, and how far a window reaches back.

Called by `attention` once per group, step and kind of layer. Invariant: parents stand before their
children, so a row never sees one behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def row_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each row: 0 where the parent is -1."""
    depths: list[int] = []
    for row, parent in enumerate(parents):
        assert parent < row, f"row {row} hangs below row {parent}, which does not stand before it"
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each row hangs below the one before it."""
    return all(parent == row - 1 for row, parent in enumerate(parents))


def visibility(parents: Sequence[int], context: int, window: int | None) -> torch.Tensor:
    """Whether each new row sees the last X of the `context` committed and the new rows, bool [n, X].

    X is the number of new rows while no window cuts into the context (all of it is seen), else all rows.
    """
    num_rows = len(parents)
    if is_chain(parents):
        seen = np.tri(num_rows, dtype=bool)
        depths = np.arange(num_rows)
    else:
        seen = np.zeros((num_rows, num_rows), dtype=bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                seen[row] = seen[parent]
            seen[row, row] = True
        depths = np.array(row_depths(parents))
    if window is not None and context + int(depths.max()) >= window:
        seen = np.concatenate([np.ones((num_rows, context), dtype=bool), seen], axis=1)
        positions = np.concatenate([np.arange(context), context + depths])
        seen &= positions[None, :] > context + depths[:, None] - window
    return torch.from_numpy(seen)
