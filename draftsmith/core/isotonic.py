"""The ascending sequence nearest to measured values: pooling of adjacent violators.

Called by cost tables: more rows never cost less, whatever one noisy median says. Invariant: the result ascends, and
its weighted mean is that of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

Pool = tuple[float, float, int]
"""Mean, weight, and number of values in it."""


def push(pools: list[Pool], value: float, weight: float) -> None:
    """Add the next value of a sequence to its ascending pools, `weight` above 0."""
    count = 1
    while pools and pools[-1][0] > value:
        other, other_weight, other_count = pools.pop()
        value = (value * weight + other * other_weight) / (weight + other_weight)
        weight += other_weight
        count += other_count
    pools.append((value, weight, count))


def spread(pools: Sequence[Pool]) -> list[float]:
    """The ascending sequence that pools stand for."""
    return [value for value, _, count in pools for _ in range(count)]


def ascending(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Least squares among ascending sequences; `weights` (above 0) default to 1."""
    pools: list[Pool] = []
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        push(pools, value, weight)
    return spread(pools)
