"""What is done with bundles that are there: `bench compare` and `bench rescore`.

Called by `app`. Invariant: nothing is measured here; every figure comes from the bundles' own logs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from draftsmith.bench.bundle import read, read_prompts, read_summary
from draftsmith.bench.compare import compare
from draftsmith.bench.summary import figures_of, summarise_run
from draftsmith.cli.console import OutputConsole, note
from draftsmith.cli.options import CompareOptions, RescoreOptions
from draftsmith.cli.tables import print_bench_tables

DIFFERS = 1


def run_rescore(options: RescoreOptions) -> int:
    """Compute a bundle's summary once more from its logs; exit code 1 when it is not the one that was written."""
    summary = json.loads(json.dumps(summarise_run(read(options.bundle))))
    if options.json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        print_bench_tables(summary)
    if not (options.bundle / "summary.json").exists():
        note(f"{options.bundle} was cut off and has no summary of its own: this is what was measured")
        return 0
    written, summary = figures_of(read_summary(options.bundle)), figures_of(summary)
    if summary == written:
        note("summary.json holds the same figures")
        return 0
    places = ", ".join(_differing(written, summary)[:5])
    note(f"summary.json holds other figures than its logs give, at {places}")
    return DIFFERS


def _differing(first: Any, second: Any, place: str = "") -> list[str]:
    """Where two documents differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        names = dict.fromkeys([*first, *second])
        return [found for name in names for found in _differing(first.get(name), second.get(name), f"{place}.{name}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [found for index, pair in pairs for found in _differing(*pair, f"{place}[{index}]")]
    return [] if first == second else [place.lstrip(".")]


def run_compare(options: CompareOptions) -> int:
    """Say what changed between two bundles and whether it is noise."""
    first, second = (read(path) for path in (options.first, options.second))
    result = compare(first, second, prompts=(read_prompts(options.first), read_prompts(options.second)))
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
        return 0
    console = OutputConsole(sys.stdout)
    for what in ("settings", "versions", "hardware"):
        for name, (before, after) in result[what].items():
            console.print(f"{what}: {name} was {before!r}, is {after!r}", soft_wrap=True)
    for which, arms in (("the first", result["only_in_first"]), ("the second", result["only_in_second"])):
        if arms:
            console.print(f"only in {which} run: {', '.join(arms)}", soft_wrap=True)
    console.print(_compare_table(result))
    if result["items"] < 2:
        console.print("One block alone: nothing tells what is noise and what is not.", soft_wrap=True)
    console.print(
        f"{result['items']} blocks of prompts, paired; {100 * result['level']:.0f} % intervals. Speed-ups are judged "
        "over each run's own baseline, so a machine that was faster on one day changes nothing; only the baseline's "
        "own speed has no such control.",
        soft_wrap=True,
    )
    return 0


def _compare_table(result: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold", min_width=8, vertical="bottom")
    for heading in ("speed-up\nafter / before", "tok/s\nafter / before", "tok/step", "same ids", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for item in result["results"]:
        before, after = item["tokens_per_step"]
        steps = "-" if before is None or after is None else f"{before:.2f} -> {after:.2f}"
        judged = item["speedup"] or item["speed"]
        verdict = {None: "unknown", True: "noise", False: "changed"}[item["is_noise"]]
        if judged is not None and verdict == "changed":
            verdict = "faster" if judged["ratio"] > 1 else "slower"
        table.add_row(
            item["arm"],
            _interval(item["speedup"]),
            _interval(item["speed"]),
            steps,
            f"{item['identical']['same']}/{item['identical']['of']}",
            verdict,
        )
    return table


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})"
