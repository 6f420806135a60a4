"""What came out: the main table, speed-ups by category, acceptance by draft depth.

Called by `sections`. Invariant: every number is the summary's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.bench.report import figures
from draftsmith.bench.report.blocks import (
    Block,
    Cell,
    Facts,
    Plot,
    Table,
    Text,
    count,
    interval,
    mebibytes,
    number,
    percent,
)
from draftsmith.bench.report.figures import Series
from draftsmith.bench.report.frame import Frame, folded
from draftsmith.bench.report.words import conditions, plain, result_line, warnings


def results(frame: Frame) -> list[Block]:
    """What came out in sentences, the main table, and under which conditions."""
    baseline = frame.summary["baseline"]
    blocks: list[Block] = [Text(result_line(result, baseline), "result") for result in frame.arms]
    blocks += [Text(line, "warning") for line in warnings(frame.summary)]
    blocks.append(_main_table(frame))
    blocks.append(Facts("conditions", conditions(frame.summary, frame.measured.config)))
    return blocks


def _main_table(frame: Frame) -> Table:
    rows = []
    for result in frame.arms:
        compared = result["identical"] + result["divergent"]
        speedup = result["speedup"]
        rows.append(
            [
                Cell(result["arm"]),
                Cell(str(result.get("engine", "–"))),
                number(result.get("bits_per_weight"), 2),
                number(result["tokens_per_step"]),
                number(result["tokens_per_second"], 1),
                Cell("–") if speedup is None else number(speedup["ratio"], 2, " ×"),
                Cell(interval(speedup)),
                Cell(f"{result['identical']} of {compared}" if compared else "–", result["identical"]),
                Cell(_failed(result), sum(result["failed_requests"].values())),
                percent(result["noise"]),
                mebibytes(result["memory_bytes"]),
            ]
        )
    head = ["arm", "engine", "bits per weight", "tokens/step", "tokens/s", "speed-up", "95 % interval"]
    head += ["same ids", "failed", "noise", "memory, MiB"]
    return Table(key="arms", head=head, rows=rows, words=("engine",))


def categories(frame: Frame) -> list[Block]:
    """Speed-ups with intervals, all prompts first, then by category."""
    names = list(frame.arms[0].get("categories", {}))
    others = [(place, result) for place, result in enumerate(frame.arms) if result["speedup"] is not None]
    if not names or not others:
        return []
    rows, drawn = [], []
    parts = [("all", None), *((name or "(none)", name) for name in names)]
    for label, name in parts:
        points = []
        for place, result in others:
            figures_of = result if name is None else result["categories"][name]
            speedup = figures_of["speedup"]
            rows.append(
                [
                    Cell(label),
                    Cell(result["arm"]),
                    count(figures_of["num_requests"]),
                    number(figures_of["tokens_per_step"]),
                    number(figures_of["tokens_per_second"], 1),
                    number(speedup["ratio"], 2, " ×"),
                    Cell(interval(speedup)),
                    count(speedup["items"]),
                ]
            )
            if speedup["ratio"] is not None:
                points.append(Series(place, [speedup["ratio"]], [0], [speedup["low"]], [speedup["high"]]))
        drawn.append((label, points))
    over = plain(frame.summary["baseline"])
    title, label = (
        f"Speed-up over {over} by category, with 95\N{NO-BREAK SPACE}% intervals",
        f"speed-up over {over} (×)",
    )
    plot = frame.wide(title, lambda name, width: figures.speedups(drawn, name, title, label, width), "categories")
    head = ["category", "arm", "requests", "tokens/step", "tokens/s", "speed-up", "95 % interval", "items"]
    return [
        *frame.plots("categories", plot, [place for place, _ in others], "The line at 1 is the baseline."),
        Text(
            "Items are what the interval resamples: blocks of prompts, or repeats "
            "where there is one block. One item makes no interval."
        ),
        Table(key="categories", head=head, rows=rows, words=("arm",), folded=folded(rows)),
    ]


def acceptance(frame: Frame) -> list[Block]:
    """Conditional acceptance and survival by depth."""
    arms = [(place, result) for place, result in enumerate(frame.arms) if result["depths"]]
    if not arms:
        return [Text("No arm drafted anything that its event log could tell by depth.")]
    rows = [
        [
            Cell(result["arm"]),
            count(item["depth"]),
            count(item["trials"]),
            count(item["accepted"]),
            percent(item["conditional"]),
            percent(item["survival"]),
        ]
        for _, result in arms
        for item in result["depths"]
    ]
    panels: list[Plot] = []
    for key, title, label in (
        ("conditional", "Accepted, given that the depth before was", "accepted of those decided (%)"),
        ("survival", "Accepted that far down", "drafts that survive to this depth (%)"),
    ):
        series = []
        for place, result in arms:
            known = [item for item in result["depths"] if item[key] is not None]
            columns = ([item[name] for item in known] for name in ("depth", key, "trials"))
            depths, shares, trials = columns
            series.append(Series(place, depths, shares, counts=trials))
        if frame.draw:
            name, labels = f"{frame.anchor}{key}", ("draft depth (tokens)", label)
            panels.append(Plot(title, figures.lines(series, name, title, labels=labels, share=True)))
    head = ["arm", "depth", "decided", "accepted", "conditional", "survival"]
    return [
        *frame.plots("depths", panels, [place for place, _ in arms], figures.HOLLOW),
        Text("Decided: steps whose verification came so deep. Survival is the product of the shares down to a depth."),
        Table(key="depths", head=head, rows=rows, folded=folded(rows)),
    ]


def _failed(result: Mapping[str, Any]) -> str:
    failed = sum(result["failed_requests"].values())
    return f"{failed} of {failed + result['num_requests']}" if failed else "0"
