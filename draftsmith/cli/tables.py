"""The benchmark's summary as tables for people.

Called by `bench`. Invariant: it prints what `summary.json` holds and computes nothing but shares.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from draftsmith.bench.summary import BUSY_CORES, estimates, fidelity_notes
from draftsmith.cli.console import OutputConsole
from draftsmith.core.fidelity import Fidelity

_FEW_ITEMS = 20
_WIDE = 3  # arms beside the baseline: with more there is room for speed-ups alone
_LONG_NAME = 18  # characters of an arm's name for which a table of 80 columns has room
_SPEEDUPS = "speed-up of (requests)"
_NUMBER_WIDTH = 7
_INEXACT = (Fidelity.LOSSY, Fidelity.SYNTHETIC)
"""Arms whose answers differ because they were asked to."""


def print_bench_tables(summary: Mapping[str, Any]) -> None:
    """One table of the arms, one of categories where the data have them, and what to be careful about."""
    console = OutputConsole(sys.stdout)
    results = summary["results"]
    names = _names(results)
    if _is_numbered(results):
        for place, name in enumerate(names):
            console.print(f"[{place}] {name}", markup=False, soft_wrap=True)
        console.print()
        names = [f"[{place}]" for place in range(len(names))]
    console.print(_arms_table(results, names))
    console.print()
    console.print(_latency_table(results, names))
    if any("categories" in result for result in results):
        for table in _categories_tables(results, names, console.width):
            console.print()
            console.print(table)
    for line in notes(summary):
        console.print(line, soft_wrap=not console.is_terminal)


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures should know."""
    lines = []
    compared = [result["speedup"]["items"] for result in summary["results"] if result["speedup"] is not None]
    if 0 in compared:
        lines.append(
            "Nothing can be compared yet: no prompt was finished by every arm. The logs hold what was measured."
        )
    elif 1 in compared:
        lines.append("One block was compared, so there is no telling what is noise; more prompts make intervals.")
    elif compared and min(compared) < _FEW_ITEMS:
        lines.append(f"Only {min(compared)} blocks were compared: intervals from so few say little.")
    lines += load_notes(summary)
    for result in summary["results"]:
        lines += fidelity_notes(result)
        for reason, count in result["failed_requests"].items():
            lines.append(f"{result['arm']}: {count} requests failed and are in no figure: {reason}")
        if estimates(result):
            lines.append(
                f"{result['arm']}: tokens of {estimates(result)} answers are an estimate, for nobody counted them."
            )
        if result["divergent"] and result.get("fidelity") not in _INEXACT:
            lines.append(
                f"{result['arm']}: {result['divergent']} answers differ from the baseline's, {result['near_ties']} of "
                f"them at a near tie (gap below 1e-4), the earliest at token {result['first_divergence']}; see "
                "first_difference in outputs.jsonl"
            )
        if result["unsteady"]:
            lines.append(f"{result['arm']}: {result['unsteady']} answers differ from one repeat to another.")
    for reason, count in summary["failed_prompts"].items():
        lines.append(f"{count} prompts could not be used: {reason}")
    return lines


def load_notes(summary: Mapping[str, Any]) -> list[str]:
    """A line that warns of speeds measured on a busy machine, where it was one."""
    others = summary["other_cores"]
    if others is None or others < BUSY_CORES:
        return []
    return [
        f"Other programs kept {others:.1f} of {summary['hardware']['cores']} cores busy meanwhile: take the speeds "
        "with caution (tokens per step and ids do not depend on it)."
    ]


def _names(results: list[dict[str, Any]]) -> list[str]:
    """What tables call the arms: files without directories, where that leaves them apart."""
    names = [result["arm"] for result in results]
    short = [re.sub(r"(?<==)[^=:]*/(?=[^/=:]+)", "", name) for name in names]
    return short if len(set(short)) == len(short) else names


def _is_numbered(results: list[dict[str, Any]]) -> bool:
    """Whether the arms stand by their numbers in the tables: for want of room beside or above the figures."""
    many = sum(result["speedup"] is not None for result in results) > _WIDE
    return many or max(map(len, _names(results))) > _LONG_NAME


def _arms_table(results: list[dict[str, Any]], names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold", min_width=6, vertical="bottom")
    heads = ("tokens\nper step", "drafted\nper step", "\nkept", "tokens\nper s", "\nspeed-up", "\n95 % CI", "same\nids")
    for heading in (*heads, "time\ndrafting"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in zip(names, results, strict=True):
        compared = result["identical"] + result["divergent"]
        speedup = result["speedup"]
        drafted, steps = result["drafted_tokens"], result["steps"]
        table.add_row(
            name,
            _number(result["tokens_per_step"]),
            _number(drafted / steps if drafted and steps else None),
            _percent(result["accepted_tokens"], drafted),
            _number(result["tokens_per_second"], 1),
            _speedup(result),
            _ends(speedup),
            f"{result['identical']}/{compared}" if compared else "-",
            _percent(result["seconds"]["draft"] if result["seconds"] else None, result["seconds_total"]),
        )
    return table


def _latency_table(results: list[dict[str, Any]], names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("seconds", overflow="fold", min_width=6, vertical="bottom")
    shown = {"ttft": "first token", "tpot": "per token", "itl_step": "between steps", "e2e": "whole answer"}
    for heading in shown.values():
        table.add_column(f"{heading}\n{'p50':>6} {'p99':>6}", justify="right", no_wrap=True)
    has_goodput = any(result["latency"]["goodput"] is not None for result in results)
    if has_goodput:
        table.add_column("goodput\nper s", justify="right", no_wrap=True)
    for name, result in zip(names, results, strict=True):
        cells = []
        for kind in shown:
            found = result["latency"][kind]
            cells.append("-" if found is None else f"{_seconds(found['p50']):>6} {_seconds(found['p99']):>6}")
        if has_goodput:
            goodput = result["latency"]["goodput"]
            cells.append("-" if goodput is None else _number(goodput["requests_per_second"]))
        table.add_row(name, *cells)
    return table


def _categories_tables(results: list[dict[str, Any]], names: list[str], width: int) -> Iterator[Table]:
    """Speed-ups by category; with many arms under their numbers, in as many tables as the width asks for."""
    numbered = [(place, result) for place, result in enumerate(results) if result["speedup"] is not None]
    categories = results[0]["categories"]
    titles = [f"{category or '(none)'} ({first['num_requests']})" for category, first in categories.items()]
    if len(numbered) <= _WIDE:
        yield _categories_table(titles, [(names[place], result) for place, result in numbered])
        return
    first_column = max(len(title) for title in [*titles, _SPEEDUPS])
    most = max(1, (width - first_column) // _NUMBER_WIDTH)
    for start in range(0, len(numbered), most):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(_SPEEDUPS, no_wrap=True)
        part = numbered[start : start + most]
        for place, _ in part:
            table.add_column(f"[{place}]", justify="right", no_wrap=True)
        for title, category in zip(titles, categories, strict=True):
            figures = [result["categories"][category] for _, result in part]
            table.add_row(title, *(_number(found["speedup"]["ratio"]) for found in figures))
        yield table


def _categories_table(titles: list[str], others: list[tuple[str, dict[str, Any]]]) -> Table:
    """Tokens per step and speed-up of a few arms, by name, by category."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("category (requests)")
    for name, _ in others:
        table.add_column(f"{name}\ntokens/step", justify="right")
        table.add_column("speed-up", justify="right", vertical="bottom")
    rows = [result["categories"].values() for _, result in others]
    for title, *found in zip(titles, *rows, strict=True):
        cells = [(_number(figures["tokens_per_step"]), _times(figures["speedup"]["ratio"])) for figures in found]
        table.add_row(title, *itertools.chain.from_iterable(cells))
    return table


def _speedup(result: Mapping[str, Any]) -> str:
    """In brackets where no drafter reached it."""
    if result["speedup"] is None:
        return "-"
    shown = _times(result["speedup"]["ratio"])
    return f"({shown})" if result.get("fidelity") == Fidelity.SYNTHETIC else shown


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else "-"


def _seconds(value: float) -> str:
    """Two digits that count, without exponents."""
    return f"{value:.2g}" if 1e-3 <= value < 99.5 else f"{value:.0f}" if value >= 99.5 else f"{value:.4f}"


def _ends(speedup: Mapping[str, Any] | None) -> str:
    if speedup is None or speedup["ratio"] is None or speedup["items"] < 2:
        return "-"
    return f"{_number(speedup['low'])}-{_number(speedup['high'])}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"
