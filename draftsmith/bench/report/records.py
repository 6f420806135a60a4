"""What stands behind the figures: published conventions, failures, differences, the configuration.

Called by `sections`. Invariant: nothing is computed here.
"""

from __future__ import annotations

import json
from typing import Any

from draftsmith.bench.report.blocks import (
    UNKNOWN,
    Block,
    Cell,
    Code,
    Table,
    Text,
    count,
    number,
)
from draftsmith.bench.report.frame import Frame, folded

_MANY_DIFFERENCES = 200


def conventions(frame: Frame) -> list[Block]:
    """Other projects' figures, computed from the same log."""
    arms = [result for result in frame.arms if result["conventions"]]
    if not arms:
        return []
    rows = []
    for place, item in enumerate(arms[0]["conventions"]):
        cells = [_convention(result["conventions"][place]["value"]) for result in arms]
        rows.append([Cell(item["name"]), *cells, Cell(item["definition"])])
    head = ["convention", *(result["arm"] for result in arms), "definition"]
    return [
        Text("One event log, counted as other projects count: compare a published figure with its own line."),
        Table(key="conventions", head=head, rows=rows, words=("definition",)),
    ]


def failures(frame: Frame) -> list[Block]:
    """Failed requests by reason."""
    rows = [
        [Cell(result["arm"]), Cell(reason), count(times)]
        for result in frame.arms
        for reason, times in result["failed_requests"].items()
    ]
    if not rows:
        return []
    head = ["arm", "reason", "requests"]
    text = "A failed request enters no figure but this count; a block that holds one enters no speed."
    return [Text(text), Table(key="failures", head=head, rows=rows, words=("reason",))]


def differences(frame: Frame) -> list[Block]:
    """Where answers first leave the baseline's."""
    found = sorted(frame.measured.differences.items(), key=lambda item: (item[0].arm, item[0].prompt, item[0].turn))
    if not found:
        return []
    ids = {request.prompt: request.prompt_id for run in frame.measured.runs for request in run.requests}
    rows = [
        [
            Cell(key.arm),
            Cell(ids.get(key.prompt, str(key.prompt))),
            count(key.turn + 1),
            count(difference.position),
            UNKNOWN if difference.gap is None else Cell(f"{difference.gap:.2g}", difference.gap),
        ]
        for key, difference in found[:_MANY_DIFFERENCES]
    ]
    more = len(found) - len(rows)
    text = "The first token that differs from the baseline's, and how far apart the target scored the two there "
    text += "(log-probability; below 0.0001 is a near tie that rounding may tip)."
    if more:
        text += f" {more} more are in outputs.jsonl."
    head = ["arm", "prompt", "turn", "first different token", "gap"]
    table = Table(key="differences", head=head, rows=rows, words=("prompt",), folded=folded(rows))
    return [Text(text), table]


def configuration(frame: Frame) -> list[Block]:
    """All settings."""
    text = json.dumps(frame.measured.config, indent=2, ensure_ascii=False)
    return [Code("config.json in full", text)]


def _convention(value: Any) -> Cell:
    if isinstance(value, list | tuple):
        return Cell(" ".join(f"{item:.3f}" for item in value) or "–")
    return number(value, 3)
