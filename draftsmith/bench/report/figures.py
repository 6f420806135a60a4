"""The plots of a report, each one panel with units on both axes.

Called by `sections` and `crossover` with numbers of the summary or of the logs; needs matplotlib. Invariants: arms
differ by marker and line, parts by hatch, so that no plot depends on colour; every text drawn is taken literally.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from draftsmith.bench.report.svg import ARMS, GRID, INK, PAPER, PARTS, settings, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 3)))
_HATCHES = ("////", "", "\\\\\\\\", "||||")
# Dots are circles drawn one by one: half a megabyte in an SVG.
_HEIGHT = 280
HALF, WIDE, NARROW = 440, 700, 390
"""Widths to draw for: two beside each other, one alone, one on a phone."""
FEW = 5
"""Points from fewer counts than this are hollow: they say little."""
HOLLOW = f"Hollow points rest on fewer than {FEW} steps."
_MANY = 400
"""An empirical distribution is drawn through so many of its values at most."""
_LOG_FROM = 8.0
"""An axis whose values span this factor is logarithmic."""


@dataclass(frozen=True)
class Series:
    """One arm's points. `arm`: its place among the run's arms; `low`, `high`: ends of bars around `y`; `counts`: what
    each point was computed from.
    """

    arm: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    counts: Sequence[int] | None = None


@dataclass(frozen=True)
class Bar:
    """One arm's parts and their sum; `parts`: None where an engine tells only the whole."""

    name: str
    parts: Sequence[float] | None
    whole: float


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def swatch(arm: int, name: str) -> str:
    """A piece of an arm's line with its marker."""
    return _arm_swatch(arm).replace("SWATCH-", f"{name}-")


def part_swatch(part: int, name: str) -> str:
    """A piece of a part's bar."""
    return _part_swatch(part).replace("SWATCH-", f"{name}-")


@cache
def _arm_swatch(arm: int) -> str:
    with settings("SWATCH"):
        figure, axes = _bare(34, 14)
        axes.plot([0, 0.5, 1], [0, 0, 0], markevery=[1], clip_on=False, **_look(arm))
        axes.set_xlim(-0.05, 1.05)
        return to_svg(figure, "SWATCH", "")


@cache
def _part_swatch(part: int) -> str:
    with settings("SWATCH"):
        figure, axes = _bare(26, 14)
        axes.barh([0], [1], height=1, **_filling(part))
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.6, 0.6)
        return to_svg(figure, "SWATCH", "")


def lines(
    series: Sequence[Series],
    name: str,
    title: str,
    *,
    labels: tuple[str, str],
    share: bool = False,
    level: float | None = None,
    doubling: bool = False,
    apart: float = 0.0,
    width: int = HALF,
) -> str:
    """Points joined by lines over whole numbers. `share`: from 0 to 1 in per cent; `level`: a line to compare with;
    `doubling`: the horizontal axis is 1, 2, 4, ...; `apart`: how far arms are moved beside each other.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter, ScalarFormatter

    with settings(name):
        figure, axes = _panel(width, _HEIGHT)
        if level is not None:
            axes.axhline(level, color=INK, linewidth=1, zorder=1)
        for place, item in enumerate(series):
            aside = apart * (place - (len(series) - 1) / 2)
            _draw(axes, item, [value * 2**aside if doubling else value + aside for value in item.x])
        _label(axes, labels)
        if doubling:
            places = sorted({value for item in series for value in item.x})
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(places))
            axes.xaxis.set_minor_locator(FixedLocator([]))
            axes.xaxis.set_major_formatter(ScalarFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=9))
        if share:
            axes.set_ylim(0, 1.04)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        else:
            tops = [high for item in series for high in (item.high or item.y)]
            axes.set_ylim(0, 1.08 * max([*tops, level or 0.0]) or 1.0)
        return to_svg(figure, name, title)


def speedups(rows: Sequence[tuple[str, Sequence[Series]]], name: str, title: str, label: str, width: int) -> str:
    """A line for each category, one point with its interval for each arm (`x` of a series is its ratio)."""
    with settings(name):
        height = sum(14 + 13 * max(len(items), 1) for _, items in rows) + 64
        figure, axes = _panel(width, height)
        axes.axvline(1.0, color=INK, linewidth=1, zorder=1)
        place, places = 0.0, []
        for number, (_, items) in enumerate(rows):
            first = place
            for item in items:
                low, high = (item.low or item.x)[0], (item.high or item.x)[0]
                bars = [[item.x[0] - low], [high - item.x[0]]]
                axes.errorbar(item.x, [place], xerr=bars, capsize=3, **{**_look(item.arm), "linestyle": "none"})
                place += 1
            place = max(place, first + 1)
            places.append((first + place - 1) / 2)
            if number + 1 < len(rows):
                axes.axhline(place, color=GRID, linewidth=0.8)
            place += 1
        axes.set_ylim(place - 1.2, -0.8)
        axes.set_yticks(places, [_literal(text, width // 24) for text, _ in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        ends = [end for _, items in rows for item in items for end in (item.high or item.x)]
        axes.set_xlim(0, 1.06 * max([*ends, 1.0]))
        axes.set_xlabel(label)
        axes.set_ylabel("category")
        return to_svg(figure, name, title)


def bars(rows: Sequence[Bar], name: str, title: str, label: str, width: int) -> str:
    """Bars of parts end to end."""
    with settings(name):
        figure, axes = _panel(width, 26 * len(rows) + 70)
        for place, row in enumerate(rows):
            left = 0.0
            for part, value in enumerate(row.parts or ()):
                axes.barh([place], [value], left=left, height=0.66, **_filling(part))
                left += value
            if row.parts is None:
                axes.barh([place], [row.whole], height=0.66, facecolor="none", edgecolor=INK, linewidth=1)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_yticks(range(len(rows)), [_literal(row.name, width // 24) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.04 * max([*(row.whole for row in rows), 0.0]) or 1.0)
        axes.set_xlabel(label)
        axes.set_ylabel("arm")
        return to_svg(figure, name, title)


def distributions(
    samples: Sequence[tuple[int, Sequence[float]]], name: str, title: str, labels: tuple[str, str]
) -> str:
    """For each arm (its place, its values) the share of its values that are at most so large."""
    from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

    with settings(name):
        figure, axes = _panel(HALF, _HEIGHT)
        everything = [value for _, values in samples for value in values]
        if min(everything, default=0.0) > 0 and max(everything) / min(everything) >= _LOG_FROM:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(LogLocator(base=10, subs=(0.5,), numticks=1))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        else:
            axes.set_xlim(0, 1.05 * max(everything, default=1.0) or 1.0)
        for arm, values in samples:
            data = np.sort(np.asarray(values, np.float64))
            steps = np.arange(1, len(data) + 1) / len(data)
            if len(data) > _MANY:
                steps = np.linspace(0, 1, _MANY)
                data = np.quantile(data, steps)
            marked = [min(math.ceil(share * len(data)) - 1, len(data) - 1) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
            points = {"drawstyle": "steps-post", "markevery": sorted({max(place, 0) for place in marked})}
            axes.plot([data[0], *data], [0, *steps], **{**_look(arm), **points})
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _label(axes, labels)
        return to_svg(figure, name, title)


def _panel(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    # 72 units of the drawing are an inch of matplotlib's.
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.add_subplot()


def _bare(width: float, height: float) -> tuple[Figure, Axes]:
    """A panel without axes, as large as the drawing; without a layout to work out it is quickly drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def _draw(axes: Axes, item: Series, x: Sequence[float]) -> None:
    look = _look(item.arm)
    if item.low is not None and item.high is not None:
        below = [value - low for value, low in zip(item.y, item.low, strict=True)]
        above = [high - value for value, high in zip(item.y, item.high, strict=True)]
        axes.errorbar(x, item.y, yerr=[below, above], fmt="none", ecolor=look["color"], capsize=2.5, elinewidth=1)
    hollow = [place for place, count in enumerate(item.counts or ()) if count < FEW]
    full = [place for place in range(len(x)) if place not in set(hollow)]
    if not hollow:
        axes.plot(x, item.y, **look)
        return
    axes.plot(x, item.y, markevery=full, **look)
    axes.plot(x, item.y, markevery=hollow, **{**look, "linestyle": "none", "markerfacecolor": PAPER})


def _look(arm: int) -> dict[str, Any]:
    return {
        "color": ARMS[arm % len(ARMS)],
        "marker": _MARKERS[arm % len(_MARKERS)],
        "linestyle": _LINES[arm % len(_LINES)],
        "markersize": 5.5,
        "linewidth": 1.6,
    }


def _filling(part: int) -> dict[str, Any]:
    return {"facecolor": PARTS[part], "edgecolor": INK, "hatch": _HATCHES[part], "linewidth": 0.6}


def _label(axes: Axes, labels: tuple[str, str]) -> None:
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])


def _literal(text: str, longest: int) -> str:
    """Text as a label: no mathematics, nothing unprintable, its middle left out where it is long."""
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    if len(text) > longest:
        head = (longest - 1) * 2 // 3
        text = f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"
    return text.replace("$", r"\$")
