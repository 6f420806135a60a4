"""What a step costs, as controllers see it while they run: seconds by rows, and per drafted depth, token or start.

Used by controllers; reads no clock. Wall time drifts (load, longer contexts) for all row counts alike, so a
fast common scale is kept apart from a slow relative cost per row count. That relative cost is a staircase
which only trials reveal: a row count never or long not seen is taken as cheap as its neighbours allow, so it
is tried where that promises something. Invariant: `RowCost.seconds` never decreases with the rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Protocol, final

from draftsmith.control.cost_table import CostTable
from draftsmith.core.isotonic import Pool, push, spread

KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 21, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 1025, 2049)
"""Row counts at which the cost of a step is estimated; between two of them the upper one counts."""

_KNOT_OF_ROWS = tuple(bisect_left(KNOTS, rows) for rows in range(KNOTS[-1] + 1))
_LOG_ROWS = tuple(math.log(rows) for rows in KNOTS)
_LEAST_GROWTH = 0.3  # an unseen row count costs rows ** growth more than a seen lower one: at least so much growth,
_OPTIMISM = 0.6  # else this share of the growth between the rows seen
_LEAST_SECONDS = 1e-9  # what a clock too coarse to see a forward reads as
_MAX_COUNT = 64.0  # observations an estimate remembers
_FADE_STEPS = 1024.0  # steps after which an estimate not refreshed has lost half its weight
_YOUNG = 2.5  # with fewer observations than this the cheapest one counts: what disturbs a step makes it slower
_SETTLED = 8.0  # from so many observations on, one more changes little enough to wait with the refresh
_ONCE = 1.5  # more than one observation
_CORRECT_EVERY = 8  # steps between two looks at a measured table's corrections, which are slow
_PLANE_SETTLED, _PLANE_EVERY = 16, 4  # observations from which on a plane is fitted anew every few of them
_DOUBT = 0.75  # observations by which a new estimate is discounted, so that no row count is judged by one step


def knot_of(rows: int) -> int:
    """Index of the first knot with at least `rows` rows (the last knot for more rows than any)."""
    return _KNOT_OF_ROWS[rows] if rows <= KNOTS[-1] else len(KNOTS) - 1


class Rows(Protocol):
    """Seconds of a forward by the number of rows, as `scale * relative[knot]`."""

    relative: list[float]
    scale: float
    num_explored: int

    def seconds(self, rows: int) -> float:
        """Estimated seconds of a forward of `rows` rows."""

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`."""

    def set_context(self, context: float, requests: int) -> None:
        """What the next step scores: rows of so many requests behind a mean context."""


@final
class CalibratedRows:
    """Row costs where they have been measured: the table's staircase at the step's context, times what is seen.

    A common scale follows load; a slow correction per knot follows what the table does not know. Nothing is explored:
    every row count has been measured.
    """

    __slots__ = (
        "_base",
        "_context",
        "_correction",
        "_mean",
        "_num_observed",
        "_requests",
        "_table",
        "num_explored",
        "relative",
        "scale",
    )

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._correction = [1.0] * len(KNOTS)
        self._mean = 1.0  # of the corrections of what is seen: load belongs to the scale, not to the one row count seen
        self._context = -1.0
        self._requests = self._num_observed = 0
        self._base: list[float] = []
        self.num_explored = KNOTS[-1]
        self.scale = 1.0
        """Seconds per second of the table."""
        self.relative: list[float] = []
        """Seconds of the table per knot at the current context, corrected."""
        self.set_context(table.contexts[0], 1)

    def seconds(self, rows: int) -> float:
        return self.scale * self.relative[knot_of(rows)]

    def set_context(self, context: float, requests: int) -> None:
        if requests == self._requests and abs(context - self._context) <= 0.05 * self._context:
            return
        self._context, self._requests = context, requests
        self._base = [self._table.verify_seconds(rows, context, requests) for rows in KNOTS]
        self._correct()

    def observe(self, rows: int, seconds: float) -> None:
        knot = knot_of(rows)
        believed = self.relative[knot]
        ratio = min(max(seconds / (self.scale * believed), 0.5), 2.0)
        self.scale *= 1.0 + 0.2 * (ratio - 1.0)
        if KNOTS[knot] == rows:
            self._correction[knot] *= 1.0 + 0.01 * (ratio - 1.0)
            self._mean += 0.1 * (self._correction[knot] - self._mean)
            self._num_observed += 1
            if self._num_observed % _CORRECT_EVERY == 0:
                self._correct()

    def _correct(self) -> None:
        floor, relative = 0.0, []
        for base, correction in zip(self._base, self._correction, strict=True):
            floor = max(base * correction / self._mean, floor)
            relative.append(floor)
        self.relative = relative


@final
class RowCost:
    """`Rows` that nobody has measured: they are learned from the steps seen."""

    __slots__ = ("_counts", "_estimates", "_last_seen", "_num_steps", "num_explored", "relative", "scale")

    def __init__(self) -> None:
        self._counts = [0.0] * len(KNOTS)
        self._estimates = [1.0] * len(KNOTS)
        self._last_seen = [0] * len(KNOTS)
        self._num_steps = 0
        self.num_explored = 0
        """Most rows that a forward had twice."""
        self.scale = 0.0
        """Seconds of a forward of relative cost 1; 0 until something was observed."""
        self.relative = [1.0] * len(KNOTS)
        """Relative cost per knot, never decreasing."""

    def seconds(self, rows: int) -> float:
        """Estimated seconds of a forward of `rows` rows."""
        return self.scale * self.relative[knot_of(rows)]

    def set_context(self, context: float, requests: int) -> None:
        """Longer contexts slow all row counts alike, as far as this knows: the common scale follows them."""

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`."""
        knot = knot_of(rows)
        seconds = max(seconds, _LEAST_SECONDS)
        believed = self.relative[knot]
        if self.scale == 0.0:
            self.scale = seconds / believed
        level = seconds / self.scale  # relative cost by the scale so far
        self._num_steps += 1
        count = self._faded(knot)
        if count >= _YOUNG:
            # One slow step (a page fault, another process) must not pass for the price of its rows.
            level = min(max(level, 0.5 * believed), 2.0 * believed)
            self.scale *= 1.0 + 0.2 * (level / believed - 1.0)
            count = min(count + 1.0, _MAX_COUNT)
            self._estimates[knot] += (level - self._estimates[knot]) / count
        else:
            self._estimates[knot] = min(level, self._estimates[knot]) if count else level
            count += 1.0
        if count > _ONCE and rows > self.num_explored:
            self.num_explored = rows
        self._counts[knot] = count
        self._last_seen[knot] = self._num_steps
        if count < _SETTLED or self._num_steps % 8 == 0:
            self._refresh()

    def _faded(self, knot: int) -> float:
        return self._counts[knot] / (1.0 + (self._num_steps - self._last_seen[knot]) / _FADE_STEPS)

    def _refresh(self) -> None:
        """Blend each estimate with the least its neighbours allow, and fill in what was not seen.

        More rows never cost less, and one forward of b rows never costs more than b / m forwards of m.
        """
        seen = [knot for knot, count in enumerate(self._counts) if count]
        growth = self._growth(seen)
        values = self._isotonic(seen, growth)
        relative = self.relative
        place, floor = 0, 0.0
        for knot in range(len(KNOTS)):
            guess = 0.0
            if place:
                guess = values[place - 1] * math.exp(growth * (_LOG_ROWS[knot] - _LOG_ROWS[seen[place - 1]]))
            if place < len(seen):
                above, price = seen[place], values[place]
                guess = min(max(guess, price * KNOTS[knot] / KNOTS[above]), price)
                if above == knot:
                    guess = price
                    place += 1
            floor = relative[knot] = max(guess, floor)

    def _growth(self, seen: list[int]) -> float:
        """Exponent by which unseen row counts are taken to cost more: some of what was seen between first and last."""
        known = [knot for knot in seen if self._counts[knot] > _ONCE]
        if len(known) < 2:
            return _LEAST_GROWTH
        first, last = known[0], known[-1]
        slope = math.log(self._estimates[last] / self._estimates[first]) / (_LOG_ROWS[last] - _LOG_ROWS[first])
        return max(_LEAST_GROWTH, _OPTIMISM * slope)

    def _isotonic(self, seen: list[int], growth: float) -> list[float]:
        """The estimates of the knots seen, blended with what lies around and pooled until they ascend."""
        estimates, counts = self._estimates, self._counts
        pools: list[Pool] = []
        for place, knot in enumerate(seen):
            guess = 0.0
            if place:
                guess = pools[-1][0] * math.exp(growth * (_LOG_ROWS[knot] - _LOG_ROWS[seen[place - 1]]))
            above = seen[place + 1] if place + 1 < len(seen) else knot
            if counts[above] > _ONCE:
                guess = max(guess, estimates[above] * KNOTS[knot] / KNOTS[above])
            weight = self._faded(knot)
            trust = max(weight - _DOUBT, 0.0)
            value = (trust * estimates[knot] + guess) / (trust + 1.0) if guess else estimates[knot]
            push(pools, value, weight)
        return spread(pools)


@final
class PlaneCost:
    """Seconds as `a * first + b * second` with a, b >= 0: least squares that forgets.

    Used for drafting (requests asked, depth reached) and sampling (tokens emitted, rows).
    """

    __slots__ = ("_num", "_s1y", "_s2y", "_s11", "_s12", "_s22", "first", "second")

    def __init__(self) -> None:
        self._s11 = self._s12 = self._s22 = self._s1y = self._s2y = 0.0
        self._num = 0
        self.first = 0.0
        """Seconds per unit of the first quantity."""
        self.second = 0.0
        """Seconds per unit of the second quantity."""

    def observe(self, first: float, second: float, seconds: float) -> None:
        """`first` and `second` units together took `seconds`."""
        if self._num >= 8:
            seconds = min(seconds, 3.0 * (self.first * first + self.second * second) + 1e-9)
        self._num += 1
        keep = 0.97
        s11 = self._s11 = keep * self._s11 + first * first
        s12 = self._s12 = keep * self._s12 + first * second
        s22 = self._s22 = keep * self._s22 + second * second
        s1y = self._s1y = keep * self._s1y + first * seconds
        s2y = self._s2y = keep * self._s2y + second * seconds
        if self._num > _PLANE_SETTLED and self._num % _PLANE_EVERY:
            return  # the sums remember; what they say moves slowly by now
        ridge = 1e-3 * (s11 + s22) + 1e-12
        determinant = (s11 + ridge) * (s22 + ridge) - s12 * s12
        a = ((s22 + ridge) * s1y - s12 * s2y) / determinant
        b = ((s11 + ridge) * s2y - s12 * s1y) / determinant
        if b < 0.0:
            a, b = s1y / (s11 + ridge), 0.0
        elif a < 0.0:
            a, b = 0.0, s2y / (s22 + ridge)
        self.first, self.second = a, b


@final
class DraftCost:
    """Seconds of drafting: per request asked, per pass, and per token that a drafter must read before it can start.

    `is_timed`: it has been seen, or measured at calibration. `pending` is None until a start has been seen.
    """

    __slots__ = ("_plane", "is_timed", "pending")

    def __init__(self) -> None:
        self._plane = PlaneCost()
        self.is_timed = False
        self.pending: float | None = None

    @property
    def request(self) -> float:
        """Seconds per request asked."""
        return self._plane.first

    @property
    def level(self) -> float:
        """Seconds per pass."""
        return self._plane.second

    def start_from(self, request: float, level: float, pending: float | None) -> None:
        """What calibration found, worth as much as eight steps; no `pending` where it saw no start."""
        for requests, passes in ((1, 1), (1, 4), (4, 1), (4, 4)) * 2:
            self._plane.observe(requests, passes, request * requests + level * passes)
        self.is_timed, self.pending = True, pending

    def seconds(self, requests: int, passes: int) -> float:
        """Drafting in the middle of a spell."""
        return self._plane.first * requests + self._plane.second * passes

    def observe(self, requests: int, passes: int, seconds: float) -> None:
        """Drafting took `seconds`, and nobody had much to read first."""
        self._plane.observe(requests, passes, seconds)
        self.is_timed = True

    def observe_start(self, pending: int, seconds: float) -> None:
        """Reading `pending` tokens took `seconds` beyond drafting itself."""
        each = max(seconds, 0.0) / pending
        self.pending = each if self.pending is None else self.pending + 0.3 * (each - self.pending)
