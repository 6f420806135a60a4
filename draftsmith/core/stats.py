"""The event log, and every number that is computed from it.

Written by the engine's step, read by the benchmark, the command line and the advisor. Nothing else in
the project counts tokens. Two tables: a *step* is one forward of a batch and the only holder of times; a
*request-step* is what that step did for one request. A **pair** below is a request-step that is not a
prompt step and emitted at least one token (a request cancelled during its step emits none).
Published conventions of other projects: `core.conventions`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import numpy as np

from draftsmith.errors import UserError


class StepRecord(NamedTuple):
    """One forward. `rows`: rows the target scored. `requests`: requests in the batch.

    `context`: committed rows of those requests before the step, summed. Times in seconds; `verify` is the
    target's forward, `sample` the verification rule, `other` everything else of the step.
    """

    step: int
    rows: int
    requests: int
    context: int
    draft_seconds: float
    verify_seconds: float
    sample_seconds: float
    other_seconds: float


class RequestStepRecord(NamedTuple):
    """What one step did for one request.

    `position`: output position of the first token it emitted. `drafted`: nodes below the root. `depth`:
    their greatest depth. `accepted`, `emitted`: after stop rules cut the step. `prompt`: the step also
    scored prompt rows, or only those.
    """

    step: int
    request: int
    position: int
    drafter: str
    drafted: int
    depth: int
    accepted: int
    emitted: int
    stop_reason: str | None
    prompt: bool

    @property
    def is_pair(self) -> bool:
        """Whether it counts in tokens per step."""
        return not self.prompt and self.emitted > 0

    @property
    def is_sound(self) -> bool:
        """Whether its counts can belong together: what is read from a file need not."""
        return not self.is_pair or (
            self.accepted <= self.depth <= self.drafted and self.accepted <= self.emitted <= self.accepted + 1
        )

    @property
    def num_evaluated(self) -> int:
        """Depths whose acceptance this pair decided.

        One beyond the accepted ones if something was drafted there; but where a stop rule cut inside the
        accepted path (no token after it was emitted), the next depth was decided and is not on record.
        """
        if self.emitted == self.accepted:
            return self.accepted
        return min(self.accepted + 1, self.depth)


class EventLog:
    """The two tables of a run, in the order things happened.

    Request and step numbers must be unique within a log: join only logs of one engine.
    """

    __slots__ = ("requests", "steps")

    def __init__(self, steps: Iterable[StepRecord] = (), requests: Iterable[RequestStepRecord] = ()) -> None:
        self.steps = list(steps)
        self.requests = list(requests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventLog) and (self.steps, self.requests) == (other.steps, other.requests)

    __hash__ = None  # type: ignore[assignment]

    def append_step(self, record: StepRecord) -> None:
        """Add a step."""
        self.steps.append(record)

    def append_request(self, record: RequestStepRecord) -> None:
        """Add a request-step."""
        self.requests.append(record)

    def extend(self, later: EventLog) -> None:
        """Add everything of a later log of the same engine."""
        self.steps.extend(later.steps)
        self.requests.extend(later.requests)

    def pairs(self) -> Iterator[RequestStepRecord]:
        """The request-steps that count in tokens per step."""
        return (record for record in self.requests if record.is_pair)

    def where(self, *, drafter: str | None = None, request: int | None = None) -> EventLog:
        """The part of the log that concerns one drafter, one request, or one request's use of a drafter.

        Steps are kept only if they served nothing else: the time of a shared step cannot be divided.
        """

        def chosen(record: RequestStepRecord) -> bool:
            return (drafter is None or record.drafter == drafter) and (request is None or record.request == request)

        kept = [record for record in self.requests if chosen(record)]
        mixed = {record.step for record in self.requests if not chosen(record)}
        own = {record.step for record in kept} - mixed
        return EventLog((step for step in self.steps if step.step in own), kept)

    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters on record, in order of appearance."""
        return tuple(dict.fromkeys(record.drafter for record in self.requests))

    def dump(self, stream: TextIO) -> None:
        """Write it as JSON Lines: all steps, then all request-steps, one object each with its `kind`."""
        for kind, records in (("step", self.steps), ("request", self.requests)):
            for record in records:
                stream.write(json.dumps({"kind": kind, **record._asdict()}, separators=(",", ":")) + "\n")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file; `load` reads it back. Logs written one after another may share a file."""
        with open(path, "w", encoding="utf-8") as stream:
            self.dump(stream)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> EventLog:
        """Read what `save` or `dump` wrote.

        A last line that is cut off (the writer died) is left out with a warning that names it. Raises
        `UserError` naming file and line for anything else that is not a record, and for an unreadable file.
        """
        try:
            with open(path, encoding="utf-8", newline="\n") as stream:
                lines = stream.readlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the event log {os.fspath(path)}: {error}") from error
        log = EventLog()
        for number, line in enumerate(lines, start=1):
            try:
                record = _parse(line)
            except ValueError as error:
                if number == len(lines) and not line.endswith("\n"):
                    warnings.warn(f"{os.fspath(path)}: line {number} is cut off; left out", stacklevel=2)
                    break
                raise UserError(f"{os.fspath(path)}, line {number}: {error}") from error
            log.append_step(record) if isinstance(record, StepRecord) else log.append_request(record)
        return log


def _parse(line: str) -> StepRecord | RequestStepRecord:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if kind == "step":
        return StepRecord(**_checked(values, StepRecord.__annotations__))
    if kind == "request":
        record = RequestStepRecord(**_checked(values, RequestStepRecord.__annotations__))
        if not record.is_sound:
            raise ValueError("counts contradict: needed accepted <= depth <= drafted, emitted accepted or one more")
        return record
    raise ValueError('expected an object with "kind" "step" or "request"')


def _checked(values: dict[str, Any], annotations: dict[str, Any]) -> dict[str, Any]:
    if values.keys() != annotations.keys():
        raise ValueError(f"fields missing or unknown: {', '.join(sorted(values.keys() ^ annotations.keys()))}")
    for name, annotation in annotations.items():
        # NamedTuple turns annotations into forward references.
        kind = getattr(annotation, "__forward_arg__", annotation)
        if not _fits(values[name], kind):
            raise ValueError(f"{name} is {values[name]!r}, expected {kind}")
    return values


def _fits(value: Any, kind: str) -> bool:
    if kind == "int":
        return type(value) is int and value >= 0
    if kind == "float":
        return type(value) in (int, float) and math.isfinite(value)
    if kind == "bool":
        return type(value) is bool
    return isinstance(value, str) or (value is None and kind == "str | None")


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Wall seconds of some steps, by part."""

    steps: int = 0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All four parts."""
        return self.draft + self.verify + self.sample + self.other

    @staticmethod
    def of(steps: Sequence[StepRecord]) -> Seconds:
        """The sums over some steps."""
        return Seconds(
            steps=len(steps),
            draft=math.fsum(step.draft_seconds for step in steps),
            verify=math.fsum(step.verify_seconds for step in steps),
            sample=math.fsum(step.sample_seconds for step in steps),
            other=math.fsum(step.other_seconds for step in steps),
        )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts of a log and the metrics that follow from them; a metric without data is None.

    `pairs`, `drafts` (pairs that drafted), `emitted`, `drafted`, `accepted`: over the pairs. `prompt_emitted`:
    tokens emitted by prompt steps. `trials[i]`, `successes[i]`: pairs that decided depth i + 1, and those
    that accepted it. `seconds`: all steps; `decode_seconds`: steps without a prompt row.
    """

    pairs: int
    drafts: int
    emitted: int
    drafted: int
    accepted: int
    prompt_emitted: int
    trials: tuple[int, ...]
    successes: tuple[int, ...]
    seconds: Seconds
    decode_seconds: Seconds

    @property
    def tokens_per_step(self) -> float | None:
        """τ: emitted tokens per pair, pooled over the run, residual or bonus token included."""
        return _ratio(self.emitted, self.pairs)

    @property
    def accepted_per_draft(self) -> float | None:
        """Accepted tokens per pair that drafted."""
        return _ratio(self.accepted, self.drafts)

    @property
    def accepted_over_drafted(self) -> float | None:
        """Accepted over all drafted nodes, those behind a rejection and losing branches included."""
        return _ratio(self.accepted, self.drafted)

    @property
    def accepted_over_evaluated(self) -> float | None:
        """Accepted over the depths that verification decided (up to the first rejection)."""
        return _ratio(self.accepted, sum(self.trials))

    @property
    def rows_per_token(self) -> float | None:
        """Rows the target scored for the pairs (root and drafts) per emitted token."""
        return _ratio(self.pairs + self.drafted, self.emitted)

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """At each depth: accepted, given that the depth before was and that something was drafted here.

        In a tree, a path that ends at a leaf above the tree's greatest depth counts as not accepted below.
        """
        return tuple(_ratio(wins, trials) for wins, trials in zip(self.successes, self.trials, strict=True))

    @property
    def survival(self) -> tuple[float | None, ...]:
        """At each depth: probability that it is accepted if drafted, the product of the conditional ones.

        Where every draft is equally deep and none is cut this is the share of drafts accepted that far; with
        mixed depths it is not biased by the short drafts (product-limit estimate).
        """
        values: list[float | None] = []
        alive: float | None = 1.0
        for conditional in self.conditional_acceptance:
            alive = None if alive is None or conditional is None else alive * conditional
            values.append(alive)
        return tuple(values)

    @property
    def tokens_per_second(self) -> float | None:
        """All emitted tokens, those of prompt steps too, over the seconds of all steps."""
        return _ratio(self.emitted + self.prompt_emitted, self.seconds.total)


def summarise(log: EventLog) -> Summary:
    """Every count of a log in one pass."""
    pairs = list(log.pairs())
    deepest = max((record.depth for record in pairs), default=0)
    decided = [0] * (deepest + 1)  # pairs whose last decided depth is i; trials are its sums from the far end
    reached = [0] * (deepest + 1)
    for record in pairs:
        decided[record.num_evaluated] += 1
        reached[record.accepted] += 1
    prompt_steps = {record.step for record in log.requests if record.prompt}
    return Summary(
        pairs=len(pairs),
        drafts=sum(record.drafted > 0 for record in pairs),
        emitted=sum(record.emitted for record in pairs),
        drafted=sum(record.drafted for record in pairs),
        accepted=sum(record.accepted for record in pairs),
        prompt_emitted=sum(record.emitted for record in log.requests if record.prompt),
        trials=tuple(np.cumsum(decided[:0:-1])[::-1].tolist()),
        successes=tuple(np.cumsum(reached[:0:-1])[::-1].tolist()),
        seconds=Seconds.of(log.steps),
        decode_seconds=Seconds.of([step for step in log.steps if step.step not in prompt_steps]),
    )


def request_totals(log: EventLog) -> dict[int, tuple[int, int]]:
    """Per request: emitted tokens and pairs (a request without pairs is left out)."""
    totals: dict[int, tuple[int, int]] = {}
    for record in log.pairs():
        emitted, pairs = totals.get(record.request, (0, 0))
        totals[record.request] = (emitted + record.emitted, pairs + 1)
    return totals
