"""Reads a report back from its HTML: what is shown, what it refers to, whether it is well formed.

Called by the report's tests. Invariant: what is read knows nothing of how a report is made.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from draftsmith.bench.report.document import document
from draftsmith.bench.report.render import to_html
from draftsmith.bench.summary import summarise_run

_VOID = {"meta", "link", "br", "hr", "img", "wbr", "input"}


class Page(HTMLParser):
    """A page that was read. `tables`: key -> rows of (text, figure or None), the head first."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.paragraphs: dict[str, list[str]] = {}
        self.facts: dict[str, str] = {}
        self.headings: list[str] = []
        self.text = ""
        self._table: list[list[tuple[str, float | None]]] = []
        self._cell: list[str] | None = None
        self._value: float | None = None
        self._kept: tuple[str, str, list[str]] | None = None
        self._name = ""
        self.feed(text)
        self.close()
        if self.open:
            self.problems.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if "id" in named:
            self.ids.append(named["id"])
        self.links += [named[name] for name in ("href", "src") if name in named]
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = self.tables.setdefault(named["data-key"], [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._cell, self._value = [], None
        elif tag == "data":
            self._value = float(named["value"])
        elif tag in ("p", "dt", "dd", "h2", "figcaption"):
            self._kept = (tag, named.get("class", ""), [])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-3:]} at line {self.getpos()[0]}")
        else:
            self.open.pop()
        if tag in ("td", "th") and self._cell is not None:
            self._table[-1].append(("".join(self._cell), self._value))
            self._cell = None
        elif self._kept is not None and tag == self._kept[0]:
            self._keep(*self._kept)
            self._kept = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell.append(data)
        if self._kept is not None:
            self._kept[2].append(data)

    def _keep(self, tag: str, kind: str, parts: list[str]) -> None:
        text = "".join(parts)
        if tag == "p":
            self.paragraphs.setdefault(kind, []).append(text)
        elif tag == "dt":
            self._name = text
        elif tag == "dd":
            self.facts[self._name] = text
        else:
            self.headings.append(text)

    def rows(self, key: str) -> list[dict[str, str]]:
        """A table's rows as heading -> text."""
        head = [text for text, _ in self.tables[key][0]]
        return [dict(zip(head, (text for text, _ in row), strict=True)) for row in self.tables[key][1:]]

    def values(self, key: str) -> list[dict[str, float | None]]:
        """A table's rows as heading -> figure."""
        head = [text for text, _ in self.tables[key][0]]
        return [dict(zip(head, (value for _, value in row), strict=True)) for row in self.tables[key][1:]]


def check_page(text):
    """What holds of every page: balanced tags, ids once each, nothing outside, no script."""
    page = Page(text)
    assert page.problems == []
    assert len(page.ids) == len(set(page.ids)), [name for name in page.ids if page.ids.count(name) > 1]
    for link in page.links:
        assert link == "data:," or (link.startswith("#") and link[1:] in page.ids), link
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(drawing)
    return page


def summary_of(measured):
    """The summary as it is read from its file."""
    return json.loads(json.dumps(summarise_run(measured)))


def html(*measured, draw=False):
    """The page of some runs."""
    runs = [(f"run-{place}", summary_of(item), item) for place, item in enumerate(measured)]
    return to_html(document(runs, draw=draw))
