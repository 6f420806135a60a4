"""A picture of a cost table: milliseconds of a forward against rows, a line per context.

Called by `draftsmith calibrate`; needs matplotlib. Invariant: what cannot be drawn is said before anything is measured.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from draftsmith.bench.report.svg import ARMS, MUTED, settings
from draftsmith.control.cost_table import CostTable
from draftsmith.errors import OptionError

_SUFFIXES = (".png", ".svg")
_TICKS = (1, 2, 4, 8, 16, 32, 64)


def check_picture(path: Path) -> None:
    """Raises `OptionError` for a picture that could not be written."""
    if path.suffix not in _SUFFIXES:
        raise OptionError(f"--picture {path}: the name must end in {' or '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--picture {path}: there is no directory {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--picture needs matplotlib; run: pip install matplotlib")


def draw_costs(table: CostTable, path: Path) -> None:
    """Medians as lines, quartiles as bands. The line of one row is what plain decoding pays."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullLocator

    with settings("costs"):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        axes = figure.add_subplot()
        for place, (context, line, spread) in enumerate(zip(table.contexts, table.verify, table.spread, strict=True)):
            color = ARMS[place % len(ARMS)]
            axes.plot(table.rows, [1e3 * value for value in line], marker="o", markersize=3, color=color, label=context)
            low = [1e3 * value * (1 - wide) for value, wide in zip(line, spread, strict=True)]
            high = [1e3 * value * (1 + wide) for value, wide in zip(line, spread, strict=True)]
            axes.fill_between(table.rows, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        ticks = [rows for rows in _TICKS if rows <= table.rows[-1]]
        axes.set_xticks(ticks, [str(rows) for rows in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("rows of a forward (tokens that the model scores at once)")
        axes.set_ylabel("milliseconds per forward")
        # Both axes are logarithmic: few rows matter most, and cost little.
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        name = Path(str(table.about.get("model", ""))).name
        axes.set_title(f"{name}: what a forward costs here", parse_math=False)
        lines, _ = axes.get_legend_handles_labels()
        band = Patch(color=MUTED, alpha=0.25, linewidth=0, label="half of the\nrepeats")
        # Beside the axes: where rows cost little, lines run high on the left too.
        figure.legend(handles=[*lines, band], title="context (tokens)", loc="outside right upper")
        figure.savefig(path, facecolor="white")
