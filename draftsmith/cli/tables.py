"""The benchmark's summary as tables for people.

Called by `bench`. Invariant: it prints what `summary.json` holds and computes nothing but shares.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from draftsmith.bench.summary import BUSY_CORES
from draftsmith.cli.console import OutputConsole

_FEW_BLOCKS = 20


def print_bench_tables(summary: Mapping[str, Any]) -> None:
    """One table of the arms, and one of categories where the data have them."""
    console = OutputConsole(sys.stdout)
    results = summary["results"]
    console.print(_arms_table(results))
    if any("categories" in result for result in results):
        console.print()
        console.print(_categories_table(results))
    blocks = min(result["num_blocks"] for result in results)
    if blocks < _FEW_BLOCKS:
        console.print(f"Only {blocks} blocks were compared: the intervals are too narrow to rely on.", soft_wrap=True)
    for line in load_notes(summary):
        console.print(line, soft_wrap=True)
    for result in results:
        if result["divergent_prompts"]:
            ties = result["near_ties"]
            console.print(
                f"{result['drafter']}: {result['divergent_prompts']} prompts differ from plain decoding, {ties} of "
                "them at a near tie (gap below 1e-4); see first_difference in outputs.jsonl",
                soft_wrap=True,
            )


def load_notes(summary: Mapping[str, Any]) -> list[str]:
    """A line that warns of speeds measured on a busy machine, where it was one."""
    others = summary["other_cores"]
    if others is None or others < BUSY_CORES:
        return []
    return [
        f"Other programs kept {others:.1f} of {summary['hardware']['cores']} cores busy meanwhile: take the speeds "
        "with caution (tokens per step and ids do not depend on it)."
    ]


def _arms_table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("drafter", overflow="fold")
    for heading in ("tok/step", "tok/s", "speed-up", "95 % CI", "identical", "failed", "draft", "verify"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        compared = result["identical_prompts"] + result["divergent_prompts"]
        table.add_row(
            result["drafter"],
            _number(result["tokens_per_step"]),
            _number(result["tokens_per_second"], 1),
            _times(result["speedup"]["ratio"]),
            "{}-{}".format(*map(_number, result["speedup"]["ci95"])),
            f"{result['identical_prompts']}/{compared}",
            str(result["failed_prompts"]),
            _share(result, "draft"),
            _share(result, "verify"),
        )
    return table


def _categories_table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("category (prompts)")
    for result in results[1:]:
        table.add_column(f"{result['drafter']}\ntokens/step", justify="right")
        table.add_column("speed-up", justify="right", vertical="bottom")
    for category, baseline in results[0]["categories"].items():
        cells = [f"{category or '(none)'} ({baseline['num_prompts']})"]
        for result in results[1:]:
            figures = result["categories"][category]
            cells += [_number(figures["tokens_per_step"]), _times(figures["speedup"]["ratio"])]
        table.add_row(*cells)
    return table


def _share(result: Mapping[str, Any], part: str) -> str:
    total = result["seconds_total"]
    return f"{100 * result['seconds'][part] / total:.0f} %" if total else "-"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"
