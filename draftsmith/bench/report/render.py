"""A report written out: one HTML page that needs nothing else, or Markdown.

Called by the command line. Invariants: everything that comes from data is escaped; the page refers to nothing outside
itself and runs no script.
"""

from __future__ import annotations

import re
from pathlib import Path

from draftsmith.bench.report.blocks import Block, Cell, Chapter, Code, Document, Facts, Plots, Section, Table, Text

MARK = "draftsmith bench report"
"""Stands near the beginning of every report, so that one is not mistaken for a file of somebody else's."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$@])")

# Long names such as draft_model:model=path/to/file may be broken behind these.
_LONG = 28
_BREAKS = re.compile(r"(?<=[:/=,_])(?=\S)")


def to_html(document: Document) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["drawing"] = Markup
    environment.filters["breakable"] = _breakable
    environment.filters["kind"] = lambda block: type(block).__name__
    style = Markup((here / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html").render(document=document, style=style, mark=MARK) + "\n"


def _breakable(text: str) -> str:
    from markupsafe import Markup

    return Markup("<wbr>").join(_BREAKS.split(text)) if len(text) > _LONG else text


def to_markdown(document: Document) -> str:
    """The same without plots, as issues and pull requests take it."""
    lines = [f"<!-- {MARK} -->", f"# {_plain(document.title)}", "", _plain(document.subtitle), ""]
    several = len(document.chapters) > 2
    for chapter in document.chapters:
        lines += _chapter(chapter, several)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _chapter(chapter: Chapter, headed: bool) -> list[str]:
    lines = [f"# {_plain(chapter.title)}", ""] if headed else []
    for section in chapter.sections:
        lines += _section(section)
    return lines


def _section(section: Section) -> list[str]:
    lines = [f"## {_plain(section.title)}", ""]
    for block in section.blocks:
        found = _block(block)
        folded = block.folded if isinstance(block, Table | Facts | Code) else None
        if folded is not None:
            found = ["<details>", f"<summary>{_plain(folded)}</summary>", "", *found, "</details>", ""]
        lines += found
    return lines


def _block(block: Block) -> list[str]:
    match block:
        case Table():
            return [*_table(block), ""]
        case Text(text=text, kind="command"):
            return ["```sh", text, "```", ""]
        case Text(text=text, kind=kind):
            return [{"result": f"- {_plain(text)}", "warning": f"\n> {_plain(text)}\n"}.get(kind, f"{_plain(text)}\n")]
        case Facts():
            return ["", *(f"- **{_plain(name)}**: {_plain(text)}" for name, text in block.items), ""]
        case Plots():
            return []
        case Code():
            # A fence longer than any run of backticks inside ends where we end it.
            longest = max((len(found) for found in re.findall("`+", block.text)), default=0)
            fence = "`" * max(3, longest + 1)
            return [f"{fence}json", block.text, fence, ""]


def _table(table: Table) -> list[str]:
    head = "| " + " | ".join(map(_plain, table.head)) + " |"
    ends = ["---" if table.is_words(column) else "---:" for column in range(len(table.head))]
    rows = ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
    return ["", head, "| " + " | ".join(ends) + " |", *rows]


def _cell(cell: Cell) -> str:
    return _plain(cell.text)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
