"""Measures again until the answer is sure enough or the time is up.

Called by the command line around the runner. Invariant: a repeat is all blocks with all arms; where time ends inside
one, what it has measured stays on record, and blocks that some arm lacks are left out of the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.arms import Arm
from draftsmith.bench.runner import Encode, Workload, measure
from draftsmith.bench.runs import ArmRun, Measured
from draftsmith.bench.summary import summarise_run
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often to measure. `precision`: enough when every speed-up's interval reaches at most this far, relative to
    the speed-up, to either side; None measures all repeats. `max_seconds`: no block begins after; None: no limit."""

    repeats: int = 1
    precision: float | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise OptionError(f"repeats must be at least 1, got {self.repeats}")
        if self.precision is not None and not self.precision > 0:
            raise OptionError(f"precision must be above 0, got {self.precision}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise OptionError(f"max_seconds must be above 0, got {self.max_seconds}")


def repeated(
    arms: Mapping[str, Arm],
    workload: Workload,
    encode: Encode,
    blocks: Sequence[Sequence[int]],
    plan: Plan,
    config: Mapping[str, Any],
) -> Iterator[ArmRun]:
    """Every run of every repeat, as they are measured."""
    ends = None if plan.max_seconds is None else time.perf_counter() + plan.max_seconds
    runs: list[ArmRun] = []
    for repeat in range(plan.repeats):
        for run in measure(arms, workload, encode, blocks, repeat=repeat):
            runs.append(run)
            yield run
            if ends is not None and time.perf_counter() > ends and len(runs) % len(arms) == 0:
                return
        if plan.precision is not None and widest(config, runs) <= plan.precision:
            return


def widest(config: Mapping[str, Any], runs: Sequence[ArmRun]) -> float:
    """How far the least certain speed-up's interval reaches, relative to it; infinite while one is unknown."""
    summary = summarise_run(Measured(config=config, runs=tuple(runs), differences={}, failed={}))
    reach = 0.0
    for result in summary["results"]:
        speedup = result["speedup"]
        if speedup is None:
            continue
        if speedup["ratio"] is None or speedup["items"] < 2:
            return float("inf")
        reach = max(reach, speedup["high"] / speedup["ratio"] - 1, 1 - speedup["low"] / speedup["ratio"])
    return reach
