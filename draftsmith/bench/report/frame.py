"""What the sections of one run share: its figures, what was measured, and how plots are made.

Called by the modules beside it. Invariant: with `draw` off nothing asks for matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftsmith.bench.report import figures
from draftsmith.bench.report.blocks import Block, Plot, Plots
from draftsmith.bench.runs import Measured

_MANY_ROWS = 12


@final
@dataclass(frozen=True)
class Frame:
    """One run. `anchor`: unique among the runs of a page; `draw`: whether plots are made."""

    summary: Mapping[str, Any]
    measured: Measured
    anchor: str
    draw: bool

    @property
    def arms(self) -> Sequence[Mapping[str, Any]]:
        """The results of all arms; an arm's place among them decides how it is drawn."""
        results: Sequence[Mapping[str, Any]] = self.summary["results"]
        return results

    def plots(self, name: str, plots: Sequence[Plot], arms: Sequence[int], note: str = "") -> list[Block]:
        """Panels with one legend of arms; nothing where there are no drawings."""
        if not plots:
            return []
        legend = [(figures.swatch(arm, f"{self.anchor}{name}arm{arm}"), self.arms[arm]["arm"]) for arm in arms]
        return [Plots(plots, legend, note)]

    def wide(self, title: str, draw: Callable[[str, int], str], name: str) -> list[Plot]:
        """A plot as wide as the page, drawn for large and for small screens; none where plots are not wanted."""
        if not self.draw:
            return []
        wide = draw(f"{self.anchor}{name}", figures.WIDE)
        return [Plot(title, wide, draw(f"{self.anchor}{name}narrow", figures.NARROW))]


def folded(rows: Sequence[Any]) -> str | None:
    """What a long table is called while it is closed; None for a short one."""
    return f"all {len(rows)} rows of numbers" if len(rows) > _MANY_ROWS else None
