"""How sure a ratio is: the paired bootstrap over items for two arms' rates, a t interval for a mean per unit.

Called by the benchmark for speed-ups and for the difference of two runs, and by the audit of a lossy rule. Invariant:
totals over totals, items of both arms resampled together; same inputs and seed, same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_RESAMPLES_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class RatioInterval:
    """A ratio of totals with its bootstrap interval."""

    ratio: float
    low: float
    high: float
    level: float
    resamples: int
    items: int


@dataclass(frozen=True, kw_only=True)
class MeanInterval:
    """A total over a total size with its interval; unbounded where one item tells nothing of the spread."""

    mean: float
    low: float
    high: float
    level: float
    items: int


def mean_interval(items: Sequence[tuple[float, float]], *, level: float = 0.95) -> MeanInterval:
    """What an item's amount is per unit of its size: Σ amount / Σ size, items being independent of each other.

    Item i is (amount, size). A t interval with the variance of a ratio of totals to first order (Cochran 1977,
    section 6.4). Raises `ValueError` without any size.
    """
    amounts, sizes = (np.array([item[place] for item in items], dtype=np.float64) for place in range(2))
    count, total = len(items), float(sizes.sum()) if items else 0.0
    if not total > 0:
        raise ValueError("items have no size between them")
    mean = float(amounts.sum()) / total
    half = math.inf
    if count > 1:
        spread = math.sqrt(count / (count - 1) * float(((amounts - mean * sizes) ** 2).sum())) / total
        half = _student_quantile((1 + level) / 2, count - 1) * spread
    return MeanInterval(mean=mean, low=mean - half, high=mean + half, level=level, items=count)


def ratio_interval(
    numerators: Sequence[tuple[float, float]],
    denominators: Sequence[tuple[float, float]],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> RatioInterval:
    """How much the first arm's rate exceeds the second's, items paired and resampled together.

    Item i of an arm is (amount, cost), for a speed-up (tokens, seconds) of prompt i; an arm's rate is its
    total amount over its total cost, never a mean of per-item rates. Raises `ValueError` as `rates_interval`.
    """
    return rates_interval([numerators], [denominators], level=level, resamples=resamples, seed=seed)


def rates_interval(
    above: Sequence[Sequence[tuple[float, float]]],
    below: Sequence[Sequence[tuple[float, float]]],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> RatioInterval:
    """The product of the rates of the arms `above` over that of the arms `below`, items of all arms paired.

    With one arm each it is a speed-up, with two a speed-up over another run's. Percentile interval (Efron 1979),
    expanded for few items (Hesterberg 2015: as much as a t interval exceeds a normal one), where uneven items count
    for as many even ones as would make the same variance (Kish 1965); with one item it is a point. Raises
    `ValueError` for arms of different length, no items, or a negative or all-zero column.
    """
    lengths = {len(arm) for arm in (*above, *below)}
    if len(lengths) != 1 or lengths == {0}:
        found = " and ".join(str(len(arm)) for arm in (*above, *below))
        raise ValueError(f"arms of {found} items; needed: paired, at least one each")
    columns = np.concatenate([np.asarray(arm, dtype=np.float64).T for arm in (*above, *below)])
    totals = columns.sum(axis=1)
    if not np.isfinite(columns).all() or (columns < 0).any() or (totals <= 0).any():
        raise ValueError("amounts and costs must be finite, not negative, and above zero in total")
    signs = np.repeat([1, -1], [len(above), len(below)])
    powers = np.stack([signs, -signs], axis=1).ravel()  # an arm's amount, then its cost
    items = columns.shape[1]
    generator = np.random.default_rng(seed)
    drawn: list[npt.NDArray[np.float64]] = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, resamples - start)
        counts = generator.multinomial(items, np.full(items, 1 / items), size=size)
        drawn.append(counts @ columns.T)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.prod(np.concatenate(drawn) ** powers, axis=1)
    ratios = ratios[np.isfinite(ratios)]  # a resample may miss every item that costs anything
    tail = _expanded_tail((1 - level) / 2, float((totals**2 / (columns**2).sum(axis=1)).min()))
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return RatioInterval(
        ratio=float(np.prod(totals**powers)),
        low=float(low),
        high=float(high),
        level=level,
        resamples=resamples,
        items=items,
    )


def _expanded_tail(tail: float, items: float) -> float:
    """The tail whose normal quantile is as far out as the t quantile of `tail`, the bootstrap's narrowness included."""
    if items < 1 + 1e-9:
        return tail
    items = max(items, 2.0)
    return NormalDist().cdf(-math.sqrt(items / (items - 1)) * _student_quantile(1 - tail, items - 1))


def _student_quantile(probability: float, freedom: float) -> float:
    """Student's t above its median: its density over the angle atan(t / sqrt(freedom)) is a power of the cosine."""
    angles = np.linspace(0.0, math.pi / 2, 20_001)[:-1]
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp((2 * probability - 1) * below[-1], below, angles)
    return math.sqrt(freedom) * math.tan(angle)
