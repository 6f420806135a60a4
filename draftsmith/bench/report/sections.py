"""The sections of one run in reading order.

Called by `document`. Invariant: a section without anything to show is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from draftsmith.bench.report import outcomes, records, times
from draftsmith.bench.report.blocks import Block, Section
from draftsmith.bench.report.frame import Frame

_SECTIONS: tuple[tuple[str, str, Callable[[Frame], list[Block]]], ...] = (
    ("results", "Results", outcomes.results),
    ("categories", "Speed-up by category", outcomes.categories),
    ("acceptance", "Acceptance by draft depth", outcomes.acceptance),
    ("time", "Where the time goes", times.parts),
    ("cost", "What a verification costs", times.cost),
    ("latency", "Latency", times.latency),
    ("conventions", "The same run in published conventions", records.conventions),
    ("failures", "Failed requests", records.failures),
    ("differences", "Different answers", records.differences),
    ("configuration", "Configuration", records.configuration),
)


def sections(frame: Frame) -> list[Section]:
    """All of a run's."""
    found = [(name, title, make(frame)) for name, title, make in _SECTIONS]
    return [
        Section(anchor=f"{frame.anchor}-{name}", title=title, blocks=blocks) for name, title, blocks in found if blocks
    ]
