"""Measures what steps cost here: the target's forward by rows and context, drafting by requests and passes.

Called by `draftsmith calibrate` and the benchmark of the cost model. Row counts are tried in shuffled order, again and
again, and the median counts: what disturbs one forward must not look like a price. A shared machine changes its speed
by a quarter within minutes, so forwards of one fixed size are timed among the others, and what all are slow at then is
taken out. Invariants: nothing is left behind in the target's cache; a measurement that breaks off has changed nothing.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Self, TypeAlias, final

import numpy as np

from draftsmith.control.base import Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.cost_table import CONTEXT_KNOTS, ROW_KNOTS, CostTable, DraftSeconds
from draftsmith.core.isotonic import ascending
from draftsmith.core.stats import EventLog
from draftsmith.drafters.base import NoOptions
from draftsmith.models.backend import Backend, RowGroup

Tell: TypeAlias = Callable[[int, int, str], None]
"""Progress: done, of how many, what."""
_CHUNK = 256
_PACE_ROWS = 4
_PACE_EVERY = 4  # timings
_PACE_WINDOW = 2  # paces on each side that say how fast the machine was
_BATCHES = ((2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 4))  # sequences, rows of each
_BATCH_CONTEXTS = (128, 1024)
_DRAFT_LENGTHS = (1, 2, 4, 8, 3, 6)
_LONG_PENDING = 32
_PACE = 9  # number of the sequence that paces are of; batches use up to 8


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured, and how often."""

    rows: Sequence[int] = ROW_KNOTS
    contexts: Sequence[int] = CONTEXT_KNOTS
    repeats: int = 9
    seed: int = 0


def measure_verify(backend: Backend, sweep: Sweep, about: dict[str, Any], tell: Tell) -> CostTable:
    """The verification part of a table. Rows and contexts beyond the model's are left out."""
    rows_here = tuple(rows for rows in sweep.rows if rows < backend.spec.max_context) or (1,)
    room = backend.spec.max_context - max(rows_here)
    contexts = [context for context in sweep.contexts if context <= room] or [max(room, 1)]
    forwards = Forwards(backend, random.Random(sweep.seed))
    total = len(contexts) * sweep.repeats + len(_BATCH_CONTEXTS)
    medians, spreads = [], []
    try:
        forwards.open(0)
        forwards.open(_PACE)
        forwards.extend(_PACE, contexts[0])
        pace = _Pace(forwards)
        timed: list[dict[int, list[_Timed]]] = []
        for place, context in enumerate(contexts):
            forwards.extend(0, context)
            timed.append({rows: [] for rows in rows_here})
            for repeat in range(sweep.repeats):
                tell(place * sweep.repeats + repeat, total, f"context {context}")
                for rows in forwards.shuffled(rows_here):
                    timed[-1][rows].append(pace.time([(0, rows)]))
        batches = _time_batches(forwards, pace, contexts[-1], sweep, tell, total)
        for by_rows in timed:
            seconds = [[pace.steady(one) for one in by_rows[rows]] for rows in rows_here]
            medians.append(tuple(ascending([statistics.median(found) for found in seconds])))
            spreads.append(tuple(_half_range(found) for found in seconds))
        table = CostTable(
            rows=rows_here, contexts=tuple(contexts), verify=tuple(medians), spread=tuple(spreads), about=about
        )
        request, context_part = _per_request(table, pace, batches)
    finally:
        forwards.close()
    tell(total, total, "done")
    return dataclasses.replace(table, request=request, request_context=context_part)


class _Timed(NamedTuple):
    """Seconds of a forward, and how many paces had been timed before it."""

    seconds: float
    place: int


@final
class _Pace:
    """How fast the machine was: now and then the same forward, timed among the others."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards
        self._paces: list[float] = []
        self._num_timed = 0

    def time(self, groups: Sequence[tuple[int, int]]) -> _Timed:
        """Time a forward, and a pace when one is due."""
        if self._num_timed % _PACE_EVERY == 0:
            self._paces.append(self._forwards.time([(_PACE, _PACE_ROWS)]))
        self._num_timed += 1
        return _Timed(self._forwards.time(groups), len(self._paces))

    def steady(self, timed: _Timed) -> float:
        """What it would have taken at the pace of the whole measurement."""
        near = self._paces[max(timed.place - 1 - _PACE_WINDOW, 0) : timed.place + _PACE_WINDOW]
        return timed.seconds * statistics.median(self._paces) / statistics.median(near)


_Batches: TypeAlias = list[tuple[int, int, int, list[_Timed]]]
"""Sequences, rows of each, context, timings."""


def _time_batches(forwards: Forwards, pace: _Pace, longest: int, sweep: Sweep, tell: Tell, total: int) -> _Batches:
    found: _Batches = []
    for place, context in enumerate(_BATCH_CONTEXTS):
        tell(total - len(_BATCH_CONTEXTS) + place, total, f"batches, context {context}")
        if context > longest:
            continue
        for count in range(1, 9):
            forwards.open(count)
            forwards.extend(count, context)
        for sequences, rows in _BATCHES:
            groups = [(1 + number, rows) for number in range(sequences)]
            found.append((sequences, rows, context, [pace.time(groups) for _ in range(sweep.repeats)]))
        for count in range(1, 9):
            forwards.shut(count)
    return found


def _per_request(table: CostTable, pace: _Pace, batches: _Batches) -> tuple[float, float] | tuple[None, None]:
    """Seconds by which a further sequence makes the same rows dearer, and that per row of its context."""
    if not batches:
        return None, None
    parts, seconds = [], []
    for sequences, rows, context, timed in batches:
        found = statistics.median(pace.steady(one) for one in timed)
        parts.append((sequences - 1, (sequences - 1) * context))
        seconds.append(found - table.verify_seconds(sequences * rows, context))
    return _plane(parts, seconds)


@final
class Forwards:
    """Forwards of sequences of random tokens, timed; `close` gives all sequences back."""

    def __init__(self, backend: Backend, rng: random.Random) -> None:
        self._backend = backend
        self._rng = rng
        # The engine's own sequences count up from 0: these are nobody's.
        self._ids: dict[int, int] = {}

    def shuffled(self, rows: Sequence[int]) -> list[int]:
        return self._rng.sample(list(rows), len(rows))

    def open(self, number: int) -> None:
        self._ids[number] = -1 - number
        self._backend.cache.open(-1 - number)

    def shut(self, number: int) -> None:
        self._backend.cache.close(self._ids.pop(number))

    def close(self) -> None:
        for number in list(self._ids):
            self.shut(number)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._backend.spec.vocab_size) for _ in range(count)]

    def extend(self, number: int, context: int) -> None:
        """Read on until so many rows are committed."""
        cache, key = self._backend.cache, self._ids[number]
        while (left := context - cache.committed(key)) > 0:
            size = min(left, _CHUNK)
            cache.reserve(key, size)
            self._backend.score([RowGroup(key, self._tokens(size), range(-1, size - 1), size)])
            cache.keep(key, range(size))

    def time(self, groups: Sequence[tuple[int, int]]) -> float:
        """Seconds of one forward of chains of so many rows, all of whose logits are wanted; nothing is kept."""
        cache = self._backend.cache
        made = [RowGroup(self._ids[number], self._tokens(rows), range(-1, rows - 1), 0) for number, rows in groups]
        for group in made:
            cache.reserve(group.sequence_id, len(group.tokens))
        began = perf_counter()
        self._backend.score(made)
        seconds = perf_counter() - began
        for group in made:
            cache.keep(group.sequence_id, ())
        return seconds


class DraftRecord(NamedTuple):
    """What one step's drafting took. `asked`: requests; `passes`: depth of the deepest proposal; `has_paused`: the
    drafter asked on the way whether to go on.
    """

    asked: int
    passes: int
    pending: int
    seconds: float
    has_paused: bool = False


@final
class SweepController(Controller):
    """Runs through draft lengths and writes down what drafting took."""

    Options = NoOptions

    def __init__(self) -> None:
        self.records: list[DraftRecord] = []
        self._steps = 0
        self._asked = self._pending = 0
        self._has_paused = False

    @classmethod
    def create(cls, options: NoOptions) -> Self:
        """Make the controller."""
        return cls()

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """The next length of the cycle, for everybody."""
        self._steps += 1
        self._has_paused = False
        length = _DRAFT_LENGTHS[self._steps % len(_DRAFT_LENGTHS)]
        self._asked = len(signals)
        self._pending = sum(signal.pending for signal in signals if signal.pending > _LONG_PENDING)
        return [min(length, signal.max_draft) for signal in signals]

    def keep_drafting(self, confidence: float) -> bool:
        """Always."""
        self._has_paused = True
        return True

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Write it down."""
        passes = max((outcome.depth for outcome in outcomes), default=0)
        if self._asked:
            self.records.append(DraftRecord(self._asked, passes, self._pending, seconds.draft, self._has_paused))
        self._asked = 0


SWEEP = "draftsmith.engine.calibration:SweepController"
"""The controller's selection."""


def fit_draft(records: Sequence[DraftRecord]) -> DraftSeconds | None:
    """Seconds per request, pass and pending token: least squares of relative errors; starts by their median.

    None where no drafting was seen but of starts. Of a combination with a retrieval part, which never asks, what counts
    is what the other part takes.
    """
    if any(record.has_paused for record in records):
        records = [record for record in records if record.has_paused]
    warm = [record for record in records if not record.pending and record.seconds > 0]
    if not warm:
        return None
    # Slow steps were disturbed: what a proposal of its kind takes is their median.
    kinds: dict[tuple[int, int], list[float]] = {}
    for record in warm:
        kinds.setdefault((record.asked, record.passes), []).append(record.seconds)
    request, level = _plane(list(kinds), [statistics.median(found) for found in kinds.values()], relative=True)
    cost = DraftSeconds(request=request, level=level, pending=None)
    errors = [abs(cost.seconds(record.asked, record.passes) / record.seconds - 1) for record in warm]
    starts = [
        max(record.seconds - cost.seconds(record.asked, record.passes), 0.0) / record.pending
        for record in records
        if record.pending
    ]
    pending = statistics.median(starts) if starts else None
    return DraftSeconds(request=request, level=level, pending=pending, error=statistics.median(errors))


def fit_own(log: EventLog) -> tuple[float, float, float] | tuple[None, None, None]:
    """The engine's own seconds per step, request and row, from steps without prompt rows; None where there are none."""
    prompts = {record.step for record in log.requests if record.prompt}
    steps = [step for step in log.steps if step.step not in prompts]
    if not steps:
        return None, None, None
    kinds: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        kinds.setdefault((step.requests, step.rows), []).append(step.sample_seconds)
    sample_request, row = _plane(list(kinds), [statistics.median(found) for found in kinds.values()])
    others: dict[int, list[float]] = {}
    for step in steps:
        others.setdefault(step.requests, []).append(step.other_seconds)
    base, more = _plane([(1, requests) for requests in others], [statistics.median(found) for found in others.values()])
    return base, sample_request + more, row


def _plane(
    points: Sequence[tuple[float, float]], seconds: Sequence[float], *, relative: bool = False
) -> tuple[float, float]:
    """a, b >= 0 of seconds = a x + b y, least squares; `relative`: of errors over the seconds."""
    weights = np.array([1.0 / max(value, 1e-9) if relative else 1.0 for value in seconds])
    both = np.array(points, dtype=float) * weights[:, None]
    wanted = np.array(seconds) * weights
    best, best_error = (0.0, 0.0), float(wanted @ wanted)
    for columns in ([0, 1], [0], [1]):
        part = both[:, columns]
        if np.linalg.matrix_rank(part) < len(columns):
            continue
        found = np.linalg.lstsq(part, wanted, rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(((part @ found - wanted) ** 2).sum())
        if error < best_error - 1e-15:
            values = dict(zip(columns, found.tolist(), strict=True))
            best, best_error = (values.get(0, 0.0), values.get(1, 0.0)), error
    return best


def _half_range(values: Sequence[float]) -> float:
    """Half the range between the quartiles over the median."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float((high - low) / (2 * middle))
