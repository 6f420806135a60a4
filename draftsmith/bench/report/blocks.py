"""What a report consists of, before it is HTML or Markdown: sections of text, tables and plots.

Made by `sections` and `crossover`, written by `render`, so that both forms show the same numbers. Invariants: text is
plain, never markup, and whoever writes it out escapes it; a cell that shows a figure carries the figure itself too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Cell:
    """One cell. `value`: the figure it shows, as it stands in the summary; None for words and for what is unknown."""

    text: str
    value: float | int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers in rows. The first column names the row. `words`: columns that are text, by heading.

    `folded`: what its closed form is called, for a long one; it opens on a click. `key`: what it is, for tests and
    readers of the page's source.
    """

    key: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: Sequence[str] = ()
    folded: str | None = None

    def is_words(self, column: int) -> bool:
        """Whether a column reads from the left."""
        return column == 0 or self.head[column] in self.words


@dataclass(frozen=True)
class Text:
    """A paragraph. `kind`: "plain", "warning", "result" (a sentence that says what came out), "command" (to type)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Facts:
    """Names with what belongs to them. `key` as in a table."""

    key: str
    items: Sequence[tuple[str, str]]
    folded: str | None = None


@dataclass(frozen=True)
class Plot:
    """One drawing: SVG of our own making. `title`: what it shows. `narrow`: the same for a small screen, where the
    wide one would be too small to read.
    """

    title: str
    svg: str
    narrow: str = ""


@dataclass(frozen=True)
class Plots:
    """Drawings that belong together. `legend`: a swatch as SVG and what it stands for; `note`: how to read them."""

    plots: Sequence[Plot]
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Code:
    """Text as it is, folded away under a name."""

    folded: str
    text: str


Block: TypeAlias = Table | Text | Facts | Plots | Code


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it. `anchor`: unique in a document."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """All sections of one run, or of what several have in common."""

    anchor: str
    title: str
    sections: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    chapters: Sequence[Chapter] = field(default_factory=tuple)


UNKNOWN = Cell("–")


def number(value: float | int | None, digits: int = 2, unit: str = "") -> Cell:
    """A figure with so many decimals; unknown ones are a dash."""
    return UNKNOWN if value is None else Cell(f"{value:.{digits}f}{unit}", value)


def count(value: int | None) -> Cell:
    """A whole number."""
    return UNKNOWN if value is None else Cell(f"{value:,}".replace(",", " "), value)


def percent(value: float | None, digits: int = 1) -> Cell:
    """A share of one."""
    return UNKNOWN if value is None else Cell(f"{100 * value:.{digits}f} %", value)


def milliseconds(value: float | None) -> Cell:
    """Seconds told in milliseconds, to three places that count."""
    if value is None:
        return UNKNOWN
    thousandths = 1000 * value
    digits = 0 if abs(thousandths) >= 100 else 1 if abs(thousandths) >= 10 else 2 if abs(thousandths) >= 1 else 3
    return Cell(f"{thousandths:.{digits}f}", value)


def mebibytes(value: int | None) -> Cell:
    """Bytes told in MiB."""
    return UNKNOWN if value is None else Cell(f"{value / 2**20:,.0f}".replace(",", " "), value)


def interval(speedup: Mapping[str, Any] | None) -> str:
    """A speed-up's interval in words; one item makes none."""
    if speedup is None or speedup["ratio"] is None or speedup["items"] < 2:
        return "–"
    return f"{speedup['low']:.2f}–{speedup['high']:.2f}"
