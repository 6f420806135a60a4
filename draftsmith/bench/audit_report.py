"""What an audit found: one record per check, the verdict that follows from them, and a document for machines.

Made by `bench.audit`, printed by the command line. Invariants: a check that could not have failed is "not tested",
never "ok"; whatever differs is reported with its place and with what to ask for to see it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NOT_REACHED = "not reached"
"""Evidence of a check for which a limit, or an interrupt, left no room."""


class Status(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    NUMERICS = "near ties"
    """Differences, all of them between choices that lie closer together than rounding."""
    DIFFERS = "differs"
    LOSSY = "lossy"
    """A cost that was asked for, measured."""
    NOT_TESTED = "not tested"


class Verdict(StrEnum):
    """The outcome of an audit."""

    EXACT = "exact"
    NUMERICS = "exact up to numerics"
    DRIFTING = "drifting"
    LOSSY = "lossy"
    """By a rule that was asked for, at the cost that was measured; never exact, however small that is."""
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    `name`: what was compared. `evidence`: one line for people. `figures`: numbers. `reproduce`: requests that show a
    difference again, the first one first.
    """

    name: str
    status: Status
    evidence: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    reproduce: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """A whole audit. `tested`: drafter, rule, model, seed and the rest of what was asked for. `is_lossy`: a lossy rule
    was, so that there is a cost to measure and nothing to certify. `limit`: which limit ended it, and what to raise;
    empty where none did.
    """

    checks: tuple[Check, ...]
    tested: Mapping[str, Any]
    alpha: float
    drafted: int | None
    accepted: int | None
    tokens: int
    seconds: float
    interrupted: bool = False
    is_lossy: bool = False
    limit: str = ""

    @property
    def verdict(self) -> Verdict:
        """Drifting if anything differs; exact only if something was tested with drafts that were accepted."""
        found = {check.status for check in self.checks}
        if Status.DIFFERS in found:
            return Verdict.DRIFTING
        if self.is_lossy:
            return Verdict.LOSSY if Status.LOSSY in found else Verdict.NOT_TESTED
        if self.accepted == 0 or not found & {Status.OK, Status.NUMERICS}:
            return Verdict.NOT_TESTED
        return Verdict.NUMERICS if Status.NUMERICS in found else Verdict.EXACT

    @property
    def cost(self) -> Mapping[str, Any] | None:
        """The figures of the costliest setting of a lossy rule."""
        found = [check.figures for check in self.checks if check.status is Status.LOSSY]
        return max(found, key=lambda figures: float(figures["total_variation"]), default=None)

    @property
    def margin(self) -> float | None:
        """The largest gap that was put down to rounding."""
        return max(
            (check.figures["largest_gap"] for check in self.checks if "largest_gap" in check.figures), default=None
        )

    @property
    def statement(self) -> str:
        """The verdict in words: what was tested, and how small a drift would have been found."""
        return _statement(self)

    def as_json(self) -> dict[str, Any]:
        """One document; what is not finite is null, for JSON has no such numbers."""
        document: dict[str, Any] = _finite(self._document())
        return document

    def _document(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "statement": self.statement,
            "interrupted": self.interrupted,
            "largest_margin": self.margin,
            "total_variation": None if self.cost is None else self.cost["total_variation"],
            "total_variation_interval": None if self.cost is None else [self.cost["low"], self.cost["high"]],
            "false_alarm_probability": self.alpha,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tested": dict(self.tested),
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _statement(report: AuditReport) -> str:
    drafts = "acceptance not visible"
    if report.accepted is not None:
        drafts = f"{report.accepted} of {report.drafted} drafted tokens accepted"
    said = f"{report.tested['subject']}: {report.tokens} tokens, {drafts}."
    ended = f": {report.limit}" if report.limit else ""
    found = [check.figures["detectable"] for check in report.checks if check.figures.get("detectable") is not None]
    if report.verdict is Verdict.NOT_TESTED:
        has_drafted_in_vain = report.tokens > 0 and report.accepted == 0
        why = "no draft was accepted" if has_drafted_in_vain else f"no check was carried out{ended}"
        return f"Nothing was tested: {why}. {said}"
    if report.verdict is Verdict.DRIFTING:
        names = ", ".join(check.name for check in report.checks if check.status is Status.DIFFERS)
        what = "what the rule says of itself" if report.is_lossy else "what plain decoding writes"
        said = f"Not {what}: {names}. {said}"
    elif report.cost is not None:
        cost = report.cost
        said = (
            f"Lossy, as was asked: total variation about {cost['total_variation']:.3f} per token ({cost['low']:.3f} to "
            f"{cost['high']:.3f}) from the target's law in the costliest setting. {said}"
        )
    elif report.verdict is Verdict.NUMERICS:
        said = f"Differences at near ties alone, the widest gap {report.margin:.1e}. {said}"
    if found and report.verdict is not Verdict.DRIFTING:
        said += (
            f" A drift of {max(found):.2f} total variation per token would have been found 9 times in 10 in each"
            " sampled setting that was tested."
        )
    untested = sum(check.status is Status.NOT_TESTED for check in report.checks)
    if untested:
        said += f" {untested} of {len(report.checks)} checks were not tested{ended}."
    return said + f" False alarms: at most {report.alpha:g} per audit."
