"""The sections of one run: sentences, tables, and the plots' numbers right below them.

Called by `document`. Invariants: every number is the summary's, or a quotient of two of them that its table explains;
only the curves of the latency plots are drawn from the logs. Plots are left out where they are not wanted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftsmith.bench.latency import samples
from draftsmith.bench.report import figures
from draftsmith.bench.report.blocks import (
    UNKNOWN,
    Block,
    Cell,
    Code,
    Facts,
    Plot,
    Plots,
    Section,
    Table,
    Text,
    count,
    interval,
    mebibytes,
    milliseconds,
    number,
    percent,
)
from draftsmith.bench.report.figures import Series
from draftsmith.bench.report.words import conditions, plain, result_line, warnings
from draftsmith.bench.runs import Measured
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
_MANY_ROWS = 12
_MANY_DIFFERENCES = 200


@final
@dataclass(frozen=True)
class RunReport:
    """One run's sections. `anchor`: unique among the runs of a page; `draw`: whether plots are made."""

    summary: Mapping[str, Any]
    measured: Measured
    anchor: str
    draw: bool

    def sections(self) -> list[Section]:
        """All of them, in reading order; those without anything to show are left out."""
        made: list[tuple[str, str, Callable[[], list[Block]]]] = [
            ("results", "Results", self._results),
            ("categories", "Speed-up by category", self._categories),
            ("acceptance", "Acceptance by draft depth", self._acceptance),
            ("time", "Where the time goes", self._time),
            ("cost", "What a verification costs", self._cost),
            ("latency", "Latency", self._latency),
            ("conventions", "The same run in published conventions", self._conventions),
            ("failures", "Failed requests", self._failures),
            ("differences", "Different answers", self._differences),
            ("configuration", "Configuration", self._configuration),
        ]
        found = [(name, title, make()) for name, title, make in made]
        return [
            Section(anchor=f"{self.anchor}-{name}", title=title, blocks=blocks)
            for name, title, blocks in found
            if blocks
        ]

    @property
    def _arms(self) -> Sequence[Mapping[str, Any]]:
        results: Sequence[Mapping[str, Any]] = self.summary["results"]
        return results

    def _results(self) -> list[Block]:
        baseline = self.summary["baseline"]
        blocks: list[Block] = [Text(line, "warning") for line in warnings(self.summary)]
        blocks += [Text(result_line(result, baseline), "result") for result in self._arms]
        blocks.append(self._main_table())
        blocks.append(Facts("conditions", conditions(self.summary, self.measured.config)))
        return blocks

    def _main_table(self) -> Table:
        rows = []
        for result in self._arms:
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

    def _categories(self) -> list[Block]:
        names = list(self._arms[0].get("categories", {}))
        others = [(place, result) for place, result in enumerate(self._arms) if result["speedup"] is not None]
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
        over = plain(self.summary["baseline"])
        title = f"Speed-up over {over} by category, times, with 95 % intervals"
        svg = self._drawn("categories", lambda name: figures.speedups(drawn, name, title, f"speed-up over {over} (×)"))
        head = ["category", "arm", "requests", "tokens/step", "tokens/s", "speed-up", "95 % interval", "blocks"]
        return [
            *self._plots("categories", [(title, svg)], [place for place, _ in others]),
            Text("The line at 1 is the baseline. An interval from one block is a point; it does not mean certainty."),
            Table(key="categories", head=head, rows=rows, words=("arm",), folded=_folded(rows)),
        ]

    def _acceptance(self) -> list[Block]:
        arms = [(place, result) for place, result in enumerate(self._arms) if result["depths"]]
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
        panels = []
        for key, title, label in (
            ("conditional", "Accepted, given that the depth before was", "accepted of those decided (%)"),
            ("survival", "Accepted that far down", "drafts that survive to this depth (%)"),
        ):
            series = [
                Series(place, *zip(*points, strict=True))
                for place, result in arms
                if (points := [(item["depth"], item[key]) for item in result["depths"] if item[key] is not None])
            ]
            panels.append((title, self._lines(key, title, series, ("draft depth (tokens)", label), share=True)))
        head = ["arm", "depth", "decided", "accepted", "conditional", "survival"]
        return [
            *self._plots("depths", panels, [place for place, _ in arms]),
            Table(key="depths", head=head, rows=rows, folded=_folded(rows)),
        ]

    def _time(self) -> list[Block]:
        rows, bars = [], []
        for result in self._arms:
            tokens, total, seconds = result["emitted_tokens"], result["seconds_total"], result["seconds"]
            if not tokens:
                continue
            values = [None if seconds is None else seconds[part] / tokens for part in _PARTS]
            rows.append([Cell(result["arm"]), *map(milliseconds, values), milliseconds(total / tokens)])
            rows[-1] += [UNKNOWN if not total or value is None else percent(value * tokens / total) for value in values]
            bars.append(
                (
                    result["arm"],
                    [None if value is None else 1000 * max(value, 0.0) for value in values],
                    1000 * total / tokens,
                )
            )
        if not rows:
            return []
        title = "Wall time per emitted token, milliseconds"
        svg = self._drawn("time", lambda name: figures.parts(bars, name, title, "wall time per emitted token (ms)"))
        legend = [
            (figures.part_swatch(place, f"{self.anchor}part{place}"), part) for place, part in enumerate(_PARTS)
        ] if self.draw else []
        head = ["arm", *(f"{part}, ms" for part in _PARTS), "all, ms", *(f"{part}, %" for part in _PARTS)]
        return [
            *([Plots([Plot(title, svg)], legend)] if svg else []),
            Text(
                "Milliseconds of wall time per emitted token (seconds over emitted_tokens). Verify is the target's "
                "forward, sample the verification rule, other the rest; an engine that does not tell is one open bar."
            ),
            Table(key="time", head=head, rows=rows),
        ]

    def _cost(self) -> list[Block]:
        arms = [(place, result) for place, result in enumerate(self._arms) if result.get("verify_cost")]
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
        series = [
            Series(
                place,
                [item["rows"] for item in result["verify_cost"]],
                *([1000 * item[name] for item in result["verify_cost"]] for name in ("p50", "p25", "p75")),
            )
            for place, result in arms
        ]
        title = "Seconds of the target's forward against rows scored: median, bars from quartile to quartile"
        labels = ("rows scored in a step (root and drafts)", "forward of the target (ms)")
        head = ["arm", "rows", "steps", "p25, ms", "median, ms", "p75, ms"]
        return [
            *self._plots("cost", [(title, self._lines("cost", title, series, labels))], [place for place, _ in arms]),
            Text(
                "A draft pays where another row costs little: a flat curve is room for drafting. Steps that also scored "
                "prompt rows are left out."
            ),
            Table(key="cost", head=head, rows=rows, folded=_folded(rows)),
        ]

    def _latency(self) -> list[Block]:
        rows = []
        for name, (words, short) in _LATENCIES.items():
            for result in self._arms:
                found = result["latency"][name]
                if found is not None:
                    figures_of = (found[part] for part in ("mean", "p50", "p90", "p95", "p99", "max"))
                    cells = [count(found["count"]), *map(milliseconds, figures_of)]
                    rows.append([Cell(f"{short}: {words}"), Cell(result["arm"]), *cells])
        if not rows:
            return []
        head = ["what, in ms", "arm", "count", "mean", "p50", "p90", "p95", "p99", "max"]
        places = list(range(len(self._arms)))
        return [
            *self._plots("latency", self._distributions() if self.draw else [], places),
            Table(key="latency", head=head, rows=rows, words=("arm",), folded=_folded(rows)),
            self._goodput(),
        ]

    def _goodput(self) -> Table:
        rows = []
        for result in self._arms:
            good = result["latency"]["goodput"]
            cells = [number(result["latency"]["requests_per_second"], 3)]
            cells += [UNKNOWN, UNKNOWN] if good is None else [number(good["requests_per_second"], 3), count(good["met"])]
            rows.append([Cell(result["arm"]), *cells])
        asked = ", ".join(
            f"{name} {value:g} s" for name, value in self.measured.config["targets"].items() if value is not None
        )
        met = f"met {asked}" if asked else "met the targets (none given)"
        return Table(key="goodput", head=["arm", "requests/s", f"requests/s that {met}", "requests"], rows=rows)

    def _distributions(self) -> list[tuple[str, str]]:
        runs = [run for run in compared_runs(self.measured) if run.is_whole]
        values = {
            result["arm"]: samples([request for run in runs if run.arm == result["arm"] for request in run.requests])
            for result in self._arms
        }
        panels = []
        for name in _DRAWN:
            words, short = _LATENCIES[name]
            drawn = [
                (place, [1000 * value for value in values[result["arm"]][name]])
                for place, result in enumerate(self._arms)
                if values[result["arm"]][name]
            ]
            if drawn:
                title = f"{short}: {words}"
                labels = (f"{words} (ms)", "share that took at most so long (%)")
                panels.append((title, figures.distributions(drawn, f"{self.anchor}{name}", title, labels)))
        return panels

    def _conventions(self) -> list[Block]:
        arms = [result for result in self._arms if result["conventions"]]
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

    def _failures(self) -> list[Block]:
        rows = [
            [Cell(result["arm"]), Cell(reason), count(times)]
            for result in self._arms
            for reason, times in result["failed_requests"].items()
        ]
        if not rows:
            return []
        head = ["arm", "reason", "requests"]
        text = "A failed request enters no figure but this count; a block that holds one enters no speed."
        return [Text(text), Table(key="failures", head=head, rows=rows, words=("reason",))]

    def _differences(self) -> list[Block]:
        found = sorted(self.measured.differences.items(), key=lambda item: (item[0].arm, item[0].prompt, item[0].turn))
        if not found:
            return []
        ids = {request.prompt: request.prompt_id for run in self.measured.runs for request in run.requests}
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
        table = Table(key="differences", head=head, rows=rows, words=("prompt",), folded=_folded(rows))
        return [Text(text), table]

    def _configuration(self) -> list[Block]:
        text = json.dumps(self.measured.config, indent=2, ensure_ascii=False)
        return [Code("config.json in full", text)]

    def _plots(self, name: str, panels: Sequence[tuple[str, str]], arms: Sequence[int]) -> list[Block]:
        """Panels with one legend of arms; nothing where there are no drawings."""
        plots = [Plot(title, svg) for title, svg in panels if svg]
        if not plots:
            return []
        legend = [(figures.swatch(arm, f"{self.anchor}{name}arm{arm}"), self._arms[arm]["arm"]) for arm in arms]
        return [Plots(plots, legend)]

    def _lines(self, name: str, title: str, series: list[Series], labels: tuple[str, str], share: bool = False) -> str:
        return self._drawn(name, lambda unique: figures.lines(series, unique, title, labels=labels, share=share))

    def _drawn(self, name: str, draw: Callable[[str], str]) -> str:
        return draw(f"{self.anchor}{name}") if self.draw else ""


def _folded(rows: Sequence[Any]) -> str | None:
    return f"all {len(rows)} rows of numbers" if len(rows) > _MANY_ROWS else None


def _failed(result: Mapping[str, Any]) -> str:
    failed = sum(result["failed_requests"].values())
    return f"{failed} of {failed + result['num_requests']}" if failed else "0"


def _convention(value: Any) -> Cell:
    if isinstance(value, list | tuple):
        return Cell(" ".join(f"{item:.3f}" for item in value) or "–")
    return number(value, 3)
