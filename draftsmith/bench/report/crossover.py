"""Several runs of one setup side by side: at which concurrency drafting stops paying.

Called by `document`. Invariants: only closed loads have a concurrency; whatever else the runs differ in is said, and
an arm is called faster or slower only where its interval leaves 1 out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.bench.report import figures
from draftsmith.bench.report.blocks import Block, Cell, Plot, Plots, Section, Table, Text, count, interval, number
from draftsmith.bench.report.figures import Series
from draftsmith.bench.report.words import concurrency_of, plain
from draftsmith.bench.runs import Measured

_HOW = "One run says nothing about other loads. Measure the same setup at several, and report them together:"
_COMMANDS = """\
for c in 1 2 4 8; do draftsmith bench ... -c $c -o bundles/c$c; done
draftsmith bench report bundles/c1 bundles/c2 bundles/c4 bundles/c8 -o crossover.html"""
_UNTOLD = "too few blocks to tell"
_EXPECTED = ("concurrency", "load", "date", "descriptions", "failed_prompts", "hardware", "versions")


def crossover(runs: Sequence[tuple[str, Mapping[str, Any], Measured]], *, draw: bool) -> Section:
    """The section on concurrency; `runs`: name, summary and what was measured, of each run."""
    points = sorted(
        ((level, name, summary) for name, summary, _ in runs if (level := concurrency_of(str(summary["load"])))),
        key=lambda point: point[0],
    )
    blocks: list[Block] = []
    if len({level for level, _, _ in points}) < 2:
        blocks += [Text(_HOW), Text(_COMMANDS, "command")]
        return Section(anchor="crossover", title="Crossover over concurrency", blocks=blocks)
    left_out = len(runs) - len(points)
    if left_out:
        blocks.append(
            Text(f"{left_out} of the runs had a load without a fixed concurrency; they are not here.", "warning")
        )
    differing = _differing([measured.config for _, _, measured in runs])
    if differing:
        blocks.append(Text(f"The runs differ in more than their concurrency: {'; '.join(differing)}.", "warning"))
    arms = list(dict.fromkeys(result["arm"] for _, _, summary in points for result in summary["results"]))
    baselines = list(dict.fromkeys(summary["baseline"] for _, _, summary in points))
    blocks += [Text(line, "result") for arm in arms if (line := _told(arm, points))]
    if draw:
        blocks.append(_plots(arms, points, " / ".join(map(plain, baselines))))
    blocks.append(_table(arms, points))
    return Section(anchor="crossover", title="Crossover over concurrency", blocks=blocks)


_Points = Sequence[tuple[int, str, Mapping[str, Any]]]


def _result(summary: Mapping[str, Any], arm: str) -> Mapping[str, Any] | None:
    return next((result for result in summary["results"] if result["arm"] == arm), None)


def _told(arm: str, points: _Points) -> str:
    """Where an arm is faster, slower, or neither, in a sentence; empty for a baseline."""
    found: dict[str, list[str]] = {name: [] for name in ("faster", "no difference beyond noise", "slower", _UNTOLD)}
    for level, _, summary in points:
        result = _result(summary, arm)
        speedup = None if result is None else result["speedup"]
        if speedup is None or speedup["ratio"] is None:
            continue
        verdict = "faster" if speedup["low"] > 1 else "slower" if speedup["high"] < 1 else "no difference beyond noise"
        found[verdict if speedup["items"] > 1 else _UNTOLD].append(str(level))
    parts = [f"{verdict} at {', '.join(levels)}" for verdict, levels in found.items() if levels]
    return f"{arm}: {'; '.join(parts)} (requests at a time)." if parts else ""


def _plots(arms: Sequence[str], points: _Points, over: str) -> Plots:
    speeds, ratios = [], []
    for place, arm in enumerate(arms):
        results = [(level, found) for level, _, summary in points if (found := _result(summary, arm)) is not None]
        rates = [(level, found["tokens_per_second"]) for level, found in results if found["tokens_per_second"]]
        if rates:
            speeds.append(Series(place, *zip(*rates, strict=True)))
        gains = [
            (level, *(found["speedup"][name] for name in ("ratio", "low", "high")))
            for level, found in results
            if found["speedup"] is not None and found["speedup"]["ratio"] is not None
        ]
        if gains:
            ratios.append(Series(place, *zip(*gains, strict=True)))
    across = "requests at a time"
    panels = [
        ("Tokens per second, all requests together", speeds, "tokens per second", None, "speeds"),
        (f"Speed-up over {over} at the same concurrency, times", ratios, f"speed-up over {over} (×)", 1.0, "ratios"),
    ]
    return Plots(
        [
            Plot(
                title,
                figures.lines(
                    series, f"crossover{name}", title, labels=(across, label), level=level, doubling=True, apart=0.05
                ),
            )
            for title, series, label, level, name in panels
            if series
        ],
        [(figures.swatch(place, f"crossoverarm{place}"), arm) for place, arm in enumerate(arms)],
        "Arms are drawn a little beside each other.",
    )


def _table(arms: Sequence[str], points: _Points) -> Table:
    rows = []
    for arm in arms:
        for level, name, summary in points:
            result = _result(summary, arm)
            if result is None:
                continue
            speedup = result["speedup"]
            rows.append(
                [
                    Cell(arm),
                    count(level),
                    number(result["tokens_per_step"]),
                    number(result["tokens_per_second"], 1),
                    Cell("–") if speedup is None else number(speedup["ratio"], 2, " ×"),
                    Cell(interval(speedup)),
                    Cell(name),
                ]
            )
    head = ["arm", "requests at a time", "tokens/step", "tokens/s", "speed-up", "95 % interval", "run"]
    return Table(key="crossover", head=head, rows=rows, words=("run",))


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that are not the same in all runs, with their values."""
    names = dict.fromkeys(name for config in configs for name in config if name not in _EXPECTED)
    found = []
    for name in names:
        values = list(dict.fromkeys(json.dumps(config.get(name), ensure_ascii=False) for config in configs))
        if len(values) > 1:
            found.append(f"{name} ({', '.join(values)})")
    machines = {json.dumps(config.get("hardware"), sort_keys=True) for config in configs}
    return [*found, "hardware"] if len(machines) > 1 else found
