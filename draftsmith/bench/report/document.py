"""A report from one run or several: what both HTML and Markdown are written from.

Called by the command line. Invariant: with several runs what they have in common comes first and each run keeps all
of its own sections; definitions stand once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.bench.report.blocks import Block, Cell, Chapter, Document, Facts, Section, Table, Text, count, number
from draftsmith.bench.report.crossover import crossover
from draftsmith.bench.report.frame import Frame
from draftsmith.bench.report.sections import sections
from draftsmith.bench.runs import Measured

Run = tuple[str, Mapping[str, Any], Measured]
"""A name for people, the summary, and what it was computed from."""


def document(runs: Sequence[Run], *, draw: bool, remarks: Sequence[str] = ()) -> Document:
    """The report. `draw`: with plots, which need matplotlib; `remarks`: what else a reader should know first."""
    several = len(runs) > 1
    chapters = []
    opening: list[Block] = [Text(remark, "warning") for remark in remarks]
    if several:
        opening.append(_overview(runs))
        common = [Section(anchor="runs", title="Runs", blocks=opening), crossover(runs, draw=draw)]
        chapters.append(Chapter(anchor="all", title="All runs", sections=common))
    for place, (name, summary, measured) in enumerate(runs, 1):
        own = sections(Frame(summary, measured, f"run{place}", draw))
        if not several:
            own[0] = replace(own[0], blocks=[*opening, *own[0].blocks])
            own.insert(-1, crossover(runs, draw=draw))
        chapters.append(Chapter(anchor=f"run{place}", title=name, sections=own))
    definitions: dict[str, str] = {}
    for _, summary, _ in runs:
        definitions.update(summary["definitions"])
    facts = Facts("definitions", list(definitions.items()))
    last = Section(anchor="definitions", title="Definitions of every figure", blocks=[facts])
    chapters.append(Chapter(anchor="end", title="Definitions", sections=[last]))
    models = ", ".join(dict.fromkeys(str(summary["model"]) for _, summary, _ in runs))
    title = f"{models}: {'speculative decoding measured' if not several else f'{len(runs)} runs'}"
    return Document(title=title, subtitle=_subtitle(runs), chapters=chapters)


def _subtitle(runs: Sequence[Run]) -> str:
    arms = dict.fromkeys(str(result["arm"]) for _, summary, _ in runs for result in summary["results"])
    machines = dict.fromkeys(str(summary["hardware"].get("processor") or "?") for _, summary, _ in runs)
    loads = dict.fromkeys(str(summary["load"]) for _, summary, _ in runs)
    return f"{', '.join(arms)} on {', '.join(machines)}, load {', '.join(loads)}"


def _overview(runs: Sequence[Run]) -> Table:
    rows = []
    for name, summary, measured in runs:
        rows.append(
            [
                Cell(name),
                Cell(str(summary["model"])),
                Cell(str(summary["load"])),
                number(summary["temperature"], 2),
                count(summary["prompts_measured"]),
                count(summary["repeats"]),
                Cell("yes" if summary["interrupted"] else "no"),
                number(summary["other_cores"], 2),
                number(summary["drift"], 2),
                Cell(str(measured.config.get("date") or "–")),
            ]
        )
    head = [
        "run",
        "model",
        "load",
        "temperature",
        "prompts",
        "repeats",
        "stopped early",
        "other cores",
        "drift",
        "date",
    ]
    return Table(key="runs", head=head, rows=rows, words=("model", "load", "stopped early", "date"))
