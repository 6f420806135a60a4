"""What steps were measured to cost on one machine, for one model on one backend: a table, not a formula.

Made by `draftsmith calibrate`, read by controllers and the simulator. Verification is a staircase in rows: the knots
stand on both sides of where a kernel takes another block, and what lies between two knots is interpolated. Invariants:
seconds never fall with rows, requests, passes or pending tokens; a table is never changed, `refreshed` makes a new one.
"""

from __future__ import annotations

import dataclasses
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from draftsmith.core.isotonic import ascending
from draftsmith.core.stats import EventLog
from draftsmith.errors import DataError

FORMAT = 1
ROW_KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 24, 25, 32, 33, 40, 48, 49, 56, 64)
CONTEXT_KNOTS = (64, 256, 1024, 2048, 4096)
_BELIEF = 32
"""Steps of a log that weigh as much as what was measured at calibration."""


@dataclass(frozen=True, kw_only=True)
class DraftSeconds:
    """Seconds of one drafter: per request asked, per pass (depth of the deepest proposal), per pending token.

    `pending` is None where no start was seen. `error`: median of |predicted - measured| / measured over the steps that
    it was fitted to.
    """

    request: float
    level: float
    pending: float | None
    error: float = 0.0

    def seconds(self, requests: int, passes: int, pending: int = 0) -> float:
        """Seconds of drafting for so many requests at once."""
        return self.request * requests + self.level * passes + (self.pending or 0.0) * pending


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds by what a step does.

    `verify[c][r]`: forward of `rows[r]` rows of one sequence behind `contexts[c]` rows, median; `spread[c][r]`: half
    the range between its quartiles, over the median. `request`, `request_context`: what the same rows cost more for
    each further sequence they belong to, and that per row of its context. `own_step`, `own_request`, `own_row`: the
    engine's own seconds (sampling, bookkeeping). These are None where they were not measured: whoever predicts counts
    them as nothing, whoever learns begins without them. `draft`: by drafter selection. `about`: model, backend,
    machine.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    spread: tuple[tuple[float, ...], ...]
    request: float | None = None
    request_context: float | None = None
    own_step: float | None = None
    own_request: float | None = None
    own_row: float | None = None
    draft: Mapping[str, DraftSeconds] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.contexts), len(self.rows))
        for name in ("verify", "spread"):
            table = getattr(self, name)
            if len(table) != shape[0] or any(len(line) != shape[1] for line in table):
                raise DataError(f"cost table: {name} must hold {shape[0]} lines (contexts) of {shape[1]} rows")
        for name in ("rows", "contexts"):
            knots = getattr(self, name)
            if not knots or knots[0] < 1 or any(low >= high for low, high in pairwise(knots)):
                raise DataError(f"cost table: {name} must be ascending numbers of at least 1, got {list(knots)}")
        for line in self.verify:
            if min(line) <= 0 or any(low > high for low, high in pairwise(line)):
                raise DataError("cost table: verify must hold seconds above 0 that never fall with the rows")

    def verify_seconds(self, rows: int, context: float, requests: int = 1) -> float:
        """Seconds of a forward of `rows` rows of `requests` sequences behind `context` rows each (their mean)."""
        first, last = self.contexts[0], self.contexts[-1]
        low, share = _place(self.contexts, min(max(context, first), last))
        place, along = _place(self.rows, rows)
        here = _between(self.verify[low], place, along)
        if len(self.contexts) > 1:
            here += share * (_between(self.verify[low + 1], place, along) - here)
        here *= 1.0 + self._growth * max(context - last, 0.0)
        return here + (requests - 1) * ((self.request or 0.0) + (self.request_context or 0.0) * context)

    @cached_property
    def _growth(self) -> float:
        """Share by which a row of context beyond the last knot makes forwards longer.

        One for all row counts: each one's own last two medians would let forwards of more rows look shorter.
        """
        if len(self.contexts) < 2:
            return 0.0
        before, last = sum(self.verify[-2]), sum(self.verify[-1])
        return max(1.0 - before / last, 0.0) / (self.contexts[-1] - self.contexts[-2])

    def step_seconds(
        self, rows: int, context: float, requests: int = 1, *, drafter: str | None = None, passes: int = 0
    ) -> float:
        """Seconds of a whole step in which `drafter` (its selection) makes `passes` passes for all requests."""
        total = self.verify_seconds(rows, context, requests)
        total += (self.own_step or 0.0) + (self.own_request or 0.0) * requests + (self.own_row or 0.0) * rows
        cost = self.draft.get(drafter) if drafter is not None and passes else None
        return total + (cost.seconds(requests, passes) if cost is not None else 0.0)

    def refreshed(self, log: EventLog) -> CostTable:
        """The table after the steps of a log: each row count moves toward what its steps took, the more the more there
        were. Steps with prompt rows are left out.
        """
        prompts = {record.step for record in log.requests if record.prompt}
        ratios: list[list[float]] = [[] for _ in self.rows]
        for step in log.steps:
            if step.step in prompts or step.rows > self.rows[-1] or step.requests < 1:
                continue
            place, along = _place(self.rows, step.rows)
            nearest = place + (along > 0.5)
            expected = self.verify_seconds(step.rows, step.context / step.requests, step.requests)
            ratios[nearest].append(step.verify_seconds / expected)
        factors = [(sum(_clipped(found)) + _BELIEF) / (len(found) + _BELIEF) if found else 1.0 for found in ratios]
        verify = tuple(
            tuple(ascending([value * factor for value, factor in zip(line, factors, strict=True)]))
            for line in self.verify
        )
        return dataclasses.replace(self, verify=verify)

    def with_draft(self, drafter: str, cost: DraftSeconds) -> CostTable:
        """The table with one drafter's cost in it."""
        return dataclasses.replace(self, draft={**self.draft, drafter: cost})

    def filled_from(self, earlier: CostTable | None) -> CostTable:
        """The table with what it lacks taken from one that was measured earlier for the same model and machine."""
        if earlier is None:
            return self
        names = ("request", "request_context", "own_step", "own_request", "own_row")
        lacking = {name: getattr(earlier, name) for name in names if getattr(self, name) is None}
        return dataclasses.replace(self, draft={**earlier.draft, **self.draft}, **lacking)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"draftsmith_costs": FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: Any, where: str) -> CostTable:
        """Read a table. Raises `DataError` for what is none."""
        if not isinstance(data, dict) or data.get("draftsmith_costs") != FORMAT:
            raise DataError(f"{where} is no cost table of this version; run draftsmith calibrate again")
        try:
            values = {item.name: data[item.name] for item in dataclasses.fields(CostTable)}
            for name in ("rows", "contexts"):
                values[name] = tuple(int(number) for number in values[name])
            for name in ("verify", "spread"):
                values[name] = tuple(tuple(float(number) for number in line) for line in values[name])
            for name in ("request", "request_context", "own_step", "own_request", "own_row"):
                values[name] = _known(values[name])
            values["draft"] = {
                str(name): DraftSeconds(**{key: _seconds(key, value) for key, value in cost.items()})
                for name, cost in values["draft"].items()
            }
            return CostTable(**values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"{where} is a damaged cost table ({error}); run draftsmith calibrate again") from error


def _known(value: Any) -> float | None:
    return None if value is None else float(value)


def _seconds(name: str, value: Any) -> Any:
    return _known(value) if name == "pending" else float(value)


def _place(knots: Sequence[int], value: float) -> tuple[int, float]:
    """The knot below and how far on the way to the next one (beyond the last: more than 1)."""
    if len(knots) < 2:
        return 0, 0.0
    low = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return low, (value - knots[low]) / (knots[low + 1] - knots[low])


def _between(line: Sequence[float], place: int, along: float) -> float:
    if len(line) < 2:
        return line[0]
    return line[place] + along * (line[place + 1] - line[place])


def _clipped(ratios: Sequence[float]) -> list[float]:
    """Ratios with those far from the median pulled in: a step beside another process is not what its rows cost."""
    middle = statistics.median(ratios)
    return [min(max(ratio, 0.5 * middle), 1.5 * middle) for ratio in ratios]
