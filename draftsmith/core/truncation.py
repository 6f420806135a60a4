"""Which tokens of a row survive truncation, without sorting the row.

Called by `core.sampling`. What stands here serves where the native kernels (`native/sampling.hpp`) are missing;
they keep the same sets, token for token. Numpy throughout: its partial sorts are vectorised, and unlike a torch
operation it never waits for a pool of threads on a busy machine. Invariant: tokens are kept by descending logit,
ties by ascending id, so the kept set is a function of the row alone (masses are exact sums of fixed-point weights,
whatever the order); results are ascending ids.

Shape letters: V vocabulary, C tokens of a support.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from draftsmith.core import accelerator
from draftsmith.core.elementary import exp_weights

Row: TypeAlias = npt.NDArray[np.floating[Any]]
"""Logits of one row, [V] or [C], float32 or float64."""
Ids: TypeAlias = npt.NDArray[np.int64]
"""Token ids, ascending."""

# First guess of how far below the largest logit (in units of the temperature) a nucleus reaches.
_NUCLEUS_REACH = 6.0
_GROUP_SIZE = 64


def argmax(row_V: Row) -> int:
    """Index of the first largest value, or of the first NaN."""
    native = accelerator.native()
    return int(row_V.argmax()) if native is None else int(native.argmax(row_V))


def weights_of(rows_RV: npt.NDArray[np.floating[Any]]) -> list[tuple[int, float]]:
    """Of each row its argmax, and the sum of exp(value - largest); NaN where the largest is not finite."""
    native = accelerator.native()
    if native is not None:
        found: list[tuple[int, float]] = native.rows_weight(rows_RV)
        return found
    found = []
    for row_V in rows_RV:
        best = argmax(row_V)
        is_sound = bool(np.isfinite(row_V[best]))
        weights = exp_weights(row_V, float(row_V[best]), 1.0, len(row_V)) if is_sound else np.full(1, np.nan)
        found.append((best, float(weights.sum())))
    return found


def support(row_V: Row, best: int, inverse_temperature: float, count: int, mass: float, floor: float) -> Ids:
    """The tokens that survive top-k (0: off), then top-p (1: off), then a lowest logit; ids ascending.

    `best`: the row's argmax, whose logit is finite. Tokens at minus infinity never survive.
    """
    native = accelerator.native()
    if native is not None:
        room = np.empty(len(row_V), dtype=np.int64)
        return room[: native.support(row_V, best, inverse_temperature, count, mass, floor, room)]
    ids = np.arange(len(row_V))
    if 0 < count < len(row_V):
        ids = top_k(row_V, count)
    if mass < 1:
        ids = ids[top_p(row_V[ids], float(row_V[best]), inverse_temperature, mass)]
    values = row_V[ids]
    return ids[(values >= values.dtype.type(floor)) & (values > -np.inf)]


def top_k(values_V: Row, count: int) -> Ids:
    """Ids (ascending) of the `count` largest values; ties by id."""
    num_groups = len(values_V) // _GROUP_SIZE
    if count * 4 > num_groups:
        return _largest(values_V, np.partition(values_V, len(values_V) - count)[-count], count)
    # `count` group maxima reach the bound, so the wanted tokens are among those that do. (A group is a column.)
    maxima = values_V[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    near_ids = np.flatnonzero(values_V >= np.partition(maxima, len(maxima) - count)[-count])
    near = values_V[near_ids]
    return near_ids[_largest(near, np.partition(near, len(near) - count)[-count], count)]


def top_p(values: Row, largest: float, inverse_temperature: float, mass: float) -> Ids:
    """Indices (ascending) of the smallest set of the most probable tokens whose share reaches `mass`."""
    size = len(values)
    wanted = mass * float(exp_weights(values, largest, inverse_temperature, size).sum())
    # Nearly always the tokens near the top are enough, and sorting those alone is much cheaper.
    near_ids = np.flatnonzero(values >= values.dtype.type(largest - _NUCLEUS_REACH / inverse_temperature))
    near = values[near_ids]
    for some in (near, values):
        descending = np.sort(some)[::-1]
        running = np.cumsum(exp_weights(descending, largest, inverse_temperature, size))
        if running[-1] >= wanted:
            break
    last = int(np.searchsorted(running, wanted))
    keep = _largest(some, descending[last], last + 1)
    return near_ids[keep] if some is near else keep


def _largest(values: Row, threshold: np.floating[Any], count: int) -> Ids:
    """Indices (ascending) of the `count` largest values, of which `threshold` is the last; ties by index."""
    keep = np.flatnonzero(values >= threshold)
    surplus = len(keep) - count
    if surplus > 0:
        tied = np.flatnonzero(values[keep] == threshold)
        keep = np.delete(keep, tied[len(tied) - surplus :])
    return keep
