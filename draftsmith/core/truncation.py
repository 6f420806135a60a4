"""Which tokens of a row survive top-k and top-p, without sorting the row.

Called by `core.sampling`. Numpy throughout: its partial sorts are vectorised, and unlike a torch operation
it never waits for a pool of threads on a busy machine. Invariant: tokens are kept by descending logit, ties
by ascending id, so the kept set is a function of the row alone; results are ascending ids.

Shape letters: V vocabulary, C tokens of a support.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Row: TypeAlias = npt.NDArray[np.floating[Any]]
"""Logits of one row, [V] or [C], float32 or float64."""
Ids: TypeAlias = npt.NDArray[np.int64]
"""Token ids, ascending."""

# First guess of how far below the largest logit (in units of the temperature) a nucleus reaches.
_NUCLEUS_REACH = 6.0
_MASS_BLOCK = 2048
_GROUP_SIZE = 64


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
    weights = values - values.dtype.type(largest)
    weights *= values.dtype.type(inverse_temperature)
    np.exp(weights, out=weights)
    wanted = mass * float(weights.sum(dtype=np.float64))
    # Nearly always the tokens near the top are enough, and sorting those alone is much cheaper.
    near_ids = np.flatnonzero(values >= values.dtype.type(largest - _NUCLEUS_REACH / inverse_temperature))
    near = values[near_ids]
    descending = np.sort(near)[::-1]
    count = _count_to_mass(descending, inverse_temperature, wanted)
    if count is not None:
        return near_ids[_largest(near, descending[count - 1], count)]
    descending = np.sort(values)[::-1]
    count = _count_to_mass(descending, inverse_temperature, wanted) or len(values)
    return _largest(values, descending[count - 1], count)


def _count_to_mass(descending: Row, inverse_temperature: float, wanted: float) -> int | None:
    """How many leading values have a mass of at least `wanted` (the first weighs 1); None if all have less."""
    mass = 0.0
    for start in range(0, len(descending), _MASS_BLOCK):
        scores = descending[start : start + _MASS_BLOCK].astype(np.float64)
        scores -= float(descending[0])
        scores *= inverse_temperature
        running = np.cumsum(np.exp(scores, out=scores))
        running += mass
        if running[-1] >= wanted:
            return start + int(np.searchsorted(running, wanted)) + 1
        mass = float(running[-1])
    return None


def _largest(values: Row, threshold: np.floating[Any], count: int) -> Ids:
    """Indices (ascending) of the `count` largest values, of which `threshold` is the last; ties by index."""
    keep = np.flatnonzero(values >= threshold)
    surplus = len(keep) - count
    if surplus > 0:
        tied = np.flatnonzero(values[keep] == threshold)
        keep = np.delete(keep, tied[len(tied) - surplus :])
    return keep
