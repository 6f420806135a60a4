"""Where the time went: by part, by rows of a forward, and how long requests took.

Called by `sections`. Invariant: every number is the summary's or a quotient of two of them that its table explains;
only the curves of the latency plots are drawn from the logs.
"""

from __future__ import annotations

from draftsmith.bench.latency import samples
from draftsmith.bench.report import figures
from draftsmith.bench.report.blocks import (
    UNKNOWN,
    Block,
    Cell,
    Plot,
    Plots,
    Table,
    Text,
    count,
    milliseconds,
    number,
    percent,
)
from draftsmith.bench.report.figures import Bar, Series
from draftsmith.bench.report.frame import Frame, folded
from draftsmith.bench.summary import compared_runs

_PARTS = ("draft", "verify", "sample", "other")
_LATENCIES = {
    "ttft": ("time to the first token", "TTFT"),
    "tpot": ("time per token after the first", "TPOT"),
    "itl_step": ("time between steps", "ITL by step"),
    "itl_token": ("the same shared out over tokens", "ITL by token"),
    "e2e": ("whole answer", "end to end"),
}
_DRAWN = ("ttft", "tpot", "itl_step", "e2e")


def parts(frame: Frame) -> list[Block]:
    """Wall time per emitted token, by part."""
    rows: list[list[Cell]] = []
    bars = []
    for result in frame.arms:
        tokens, total, seconds = result["emitted_tokens"], result["seconds_total"], result["seconds"]
        if not tokens:
            continue
        row, drawn, whole = [Cell(result["arm"])], None, milliseconds(total / tokens)
        if seconds is None:
            row += [*[UNKNOWN] * len(_PARTS), whole, *[UNKNOWN] * len(_PARTS)]
        else:
            row += [*(milliseconds(seconds[part] / tokens) for part in _PARTS), whole]
            row += [percent(seconds[part] / total if total else None) for part in _PARTS]
            # Clocks are read one after another, so that the rest may come out a little below nothing.
            drawn = [1000 * max(seconds[part], 0.0) / tokens for part in _PARTS]
        rows.append(row)
        bars.append(Bar(result["arm"], drawn, 1000 * total / tokens))
    if not rows:
        return []
    title, label = "Wall time per emitted token", "wall time per emitted token (ms)"
    plot = frame.wide(title, lambda name, width: figures.bars(bars, name, title, label, width), "time")
    legend = [
        (figures.part_swatch(place, f"{frame.anchor}part{place}"), part)
        for place, part in enumerate(_PARTS if plot else ())
    ]
    untold = any(bar.parts is None for bar in bars)
    note = "An engine that does not tell its parts is one open bar." if untold else ""
    head = ["arm", *(f"{part}, ms" for part in _PARTS), "all, ms", *(f"{part}, %" for part in _PARTS)]
    return [
        *([Plots(plot, legend, note)] if plot else []),
        Text(
            "Milliseconds of wall time per emitted token (seconds over emitted_tokens). Verify is the target's "
            "forward, sample the verification rule, other the rest."
        ),
        Table(key="time", head=head, rows=rows),
    ]


def cost(frame: Frame) -> list[Block]:
    """Verify seconds against rows of the step."""
    arms = [(place, result) for place, result in enumerate(frame.arms) if result.get("verify_cost")]
    if not arms:
        return [Text("No arm has an event log that tells the target's forwards apart.")]
    rows = [
        [
            Cell(result["arm"]),
            count(item["rows"]),
            count(item["steps"]),
            *(milliseconds(item[name]) for name in ("p25", "p50", "p75")),
        ]
        for _, result in arms
        for item in result["verify_cost"]
    ]
    series = []
    for place, result in arms:
        items = result["verify_cost"]
        middle, low, high = ([1000 * item[name] for item in items] for name in ("p50", "p25", "p75"))
        numbers, steps = ([item[name] for item in items] for name in ("rows", "steps"))
        series.append(Series(place, numbers, middle, low, high, steps))
    title = "The target's forward against rows scored: median, bars from quartile to quartile"
    labels = ("rows scored in a step (root and drafts)", "forward of the target (ms)")
    head = ["arm", "rows", "steps", "p25, ms", "median, ms", "p75, ms"]
    plot = frame.wide(
        title,
        lambda name, width: figures.lines(series, name, title, labels=labels, apart=0.16, width=width),
        "cost",
    )
    return [
        *frame.plots(
            "cost", plot, [place for place, _ in arms], f"{figures.HOLLOW} Arms are drawn a little beside each other."
        ),
        Text(
            "A draft pays where another row costs little: a flat curve is room for drafting. Steps that also scored "
            "prompt rows are left out."
        ),
        Table(key="cost", head=head, rows=rows, folded=folded(rows)),
    ]


def latency(frame: Frame) -> list[Block]:
    """Distributions of waiting times, and goodput."""
    rows = []
    for name, (_, short) in _LATENCIES.items():
        for result in frame.arms:
            found = result["latency"][name]
            if found is not None:
                figures_of = (found[part] for part in ("mean", "p50", "p90", "p95", "p99", "max"))
                cells = [count(found["count"]), *map(milliseconds, figures_of)]
                rows.append([Cell(short), Cell(result["arm"]), *cells])
    if not rows:
        return []
    head = ["what, in ms", "arm", "count", "mean", "p50", "p90", "p95", "p99", "max"]
    places = list(range(len(frame.arms)))
    return [
        *frame.plots("latency", _distributions(frame) if frame.draw else [], places),
        Table(key="latency", head=head, rows=rows, words=("arm",), folded=folded(rows)),
        _goodput(frame),
    ]


def _goodput(frame: Frame) -> Table:
    rows = []
    for result in frame.arms:
        good = result["latency"]["goodput"]
        cells = [number(result["latency"]["requests_per_second"], 3)]
        cells += [UNKNOWN, UNKNOWN] if good is None else [number(good["requests_per_second"], 3), count(good["met"])]
        rows.append([Cell(result["arm"]), *cells])
    asked = ", ".join(
        f"{name} {value:g} s" for name, value in frame.measured.config["targets"].items() if value is not None
    )
    met = f"met {asked}" if asked else "met the targets (none given)"
    return Table(key="goodput", head=["arm", "requests/s", f"requests/s that {met}", "requests that did"], rows=rows)


def _distributions(frame: Frame) -> list[Plot]:
    runs = [run for run in compared_runs(frame.measured) if run.is_whole]
    values = {
        result["arm"]: samples([request for run in runs if run.arm == result["arm"] for request in run.requests])
        for result in frame.arms
    }
    panels = []
    for name in _DRAWN:
        words, short = _LATENCIES[name]
        drawn = [
            (place, [1000 * value for value in values[result["arm"]][name]])
            for place, result in enumerate(frame.arms)
            if values[result["arm"]][name]
        ]
        if drawn:
            title = f"{short}: {words}"
            labels = (f"{words} (ms)", "share that took at most so long (%)")
            panels.append(Plot(title, figures.distributions(drawn, f"{frame.anchor}{name}", title, labels)))
    return panels
