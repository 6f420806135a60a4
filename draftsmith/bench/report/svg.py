"""Matplotlib's drawings as SVG that can stand inside a page, several on one.

Called by `figures`. Invariants: ids are unique among drawings of different names; colours are those of the page, by
name, with the colour that was drawn for readers that know no names; text is text; nothing refers outside.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#22282f", "#5d6771", "#d9dde1", "#fefefd"
ARMS = ("#5b6570", "#1f66b3", "#c2500a", "#0f7a5a", "#8a3fa8", "#a0780a", "#b5264c", "#0d7a90")
PARTS = ("#d08a1d", "#3f7fc4", "#3f9b78", "#a9b2bb")

NAMES: Mapping[str, str] = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "card",
    **{color: f"arm-{place}" for place, color in enumerate(ARMS)},
    **{color: f"part-{place}" for place, color in enumerate(PARTS)},
}
"""The colour drawn -> its name in the page's style."""

_SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "path.simplify": True,
}

_DROPPED = (r"<\?xml.*?\?>", r"<!DOCTYPE.*?>", r"<metadata>.*?</metadata>", r"<style[^>]*>.*?</style>", r"<!--.*?-->")
_FONT = re.compile(r"font: (?:[a-z]+ )*([0-9.]+)px [^;\"]*")
_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_COLOR = re.compile("|".join(NAMES))


@contextmanager
def settings(name: str) -> Iterator[None]:
    """Matplotlib set up for drawings of this kind; what was set before comes back."""
    import matplotlib

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        yield


def to_svg(figure: Figure, name: str, title: str) -> str:
    """The drawing. `name`: unique in the page, letters and digits; `title`: read out in its place."""
    stream = io.StringIO()
    with warnings.catch_warnings():
        # Its own font lacks some scripts; the reader's fonts draw the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    for pattern in _DROPPED:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = _FONT.sub(r"font-size: \1px", text)
    text = _FAMILY.sub("", text)
    text = _COLOR.sub(lambda found: f"var(--{NAMES[found.group()]}, {found.group()})", text)
    text = _own_ids(text, name)
    # Its size is the page's affair: only the proportions stay.
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{_attribute(title)}">', text, count=1
    )
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def _own_ids(text: str, name: str) -> str:
    """Ids that something refers to get the drawing's name in front, the others go."""
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    wanted = {first or second for first, second in used}
    text = re.sub(
        r' id="([^"]*)"', lambda found: f' id="{name}-{found.group(1)}"' if found.group(1) in wanted else "", text
    )
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)


def _attribute(text: str) -> str:
    escaped = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("\\", "\\\\")
