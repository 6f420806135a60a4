"""A run's results and conditions in words.

Called by `sections`. Invariant: a sentence says only what the summary says, and never more than its interval allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.bench.runs import BASELINE
from draftsmith.bench.summary import BUSY_CORES, estimates, fidelity_notes

FEW_ITEMS = 20
"""Intervals from fewer blocks than this are told to say little."""
_UNSTEADY = 0.05


def plain(baseline: str) -> str:
    """What speed-ups are over."""
    return "plain" if baseline == BASELINE else baseline


def result_line(result: Mapping[str, Any], baseline: str) -> str:
    """One arm's result in a sentence."""
    parts = [_speed(result, baseline), _sameness(result, baseline)]
    failed = sum(result["failed_requests"].values())
    if failed:
        parts.append(f"{failed} of {failed + result['num_requests']} requests failed")
    return f"{result['arm']}: {', '.join(part for part in parts if part)}."


def _speed(result: Mapping[str, Any], baseline: str) -> str:
    rate, speedup = result["tokens_per_second"], result["speedup"]
    told = "no speed measured" if rate is None else f"{rate:.1f} tokens/s"
    if result["arm"] == baseline:
        return f"{told}, what the others are compared with"
    if speedup is None or speedup["ratio"] is None:
        return f"{told}, no speed-up: no block was finished by both arms"
    low, high = speedup["low"], speedup["high"]
    if speedup["items"] < 2:
        return f"{speedup['ratio']:.2f} × over {plain(baseline)} (one block, so no interval)"
    line = f"{speedup['ratio']:.2f} × ({low:.2f}–{high:.2f}) over {plain(baseline)}"
    return f"{line}, which may be noise" if low <= 1.0 <= high else line


def _sameness(result: Mapping[str, Any], baseline: str) -> str:
    if result["arm"] == baseline:
        return ""
    compared = result["identical"] + result["divergent"]
    if not compared:
        return "ids not compared"
    return f"same ids for {result['identical']} of {compared}"


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the figures."""
    found = []
    if summary["interrupted"]:
        found.append("The run was stopped early: the figures are those of the blocks that every arm had finished.")
    compared = [result["speedup"]["items"] for result in summary["results"] if result["speedup"] is not None]
    if 1 in compared:
        found.append("One block was compared, so there is no telling what is noise; more prompts make intervals.")
    elif compared and 0 < min(compared) < FEW_ITEMS:
        found.append(f"Only {min(compared)} blocks were compared: intervals from so few say little.")
    others = summary["other_cores"]
    if others is not None and others >= BUSY_CORES:
        cores = summary["hardware"].get("cores")
        found.append(
            f"Other programs kept {others:.1f} of {cores or '?'} cores busy meanwhile: take the speeds with caution "
            "(tokens per step and ids do not depend on it)."
        )
    drift = summary["drift"]
    if drift is not None and abs(drift - 1) > _UNSTEADY:
        found.append(
            f"The machine changed while it ran: the baseline's later half was {drift:.2f} times as fast as its earlier "
            "one. Arms are interleaved, so speed-ups suffer less from it than speeds."
        )
    if concurrency_of(str(summary["load"])) is None:
        found.append(
            "Requests came at times of their own: tokens per second tell above all how fast they came. Latencies and "
            "goodput tell the arms apart."
        )
    for result in summary["results"]:
        found += fidelity_notes(result)
        if estimates(result):
            found.append(
                f"{result['arm']}: tokens of {estimates(result)} answers are an estimate, for nobody counted them; so "
                "are the figures per token."
            )
        if result["unsteady"]:
            found.append(f"{result['arm']}: {result['unsteady']} answers differ from one repeat to another.")
    for reason, count in summary["failed_prompts"].items():
        found.append(f"{count} prompts could not be used: {reason}")
    return found


def conditions(summary: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured on what, name by name."""
    hardware, versions = summary["hardware"], summary["versions"]
    prompts = f"{summary['prompts_measured']} of {summary['prompts_given']} from {config.get('prompts', '?')}"
    facts = [
        ("Model", str(summary["model"])),
        ("Engines", _engines(summary["results"])),
        ("Hardware", _hardware(hardware)),
        ("System", str(hardware.get("system") or "")),
        ("Load", _load(str(summary["load"]))),
        ("Prompts", f"{prompts}, up to {config.get('max_new_tokens', '?')} tokens each"),
        ("Temperature", "0 (greedy)" if not summary["temperature"] else f"{summary['temperature']:g}"),
        ("Controller", _controllers(summary["results"])),
        ("Repeats", str(summary["repeats"])),
        ("Date", str(config.get("date") or "")),
        ("Versions", ", ".join(f"{name} {_short(str(version))}" for name, version in versions.items() if version)),
        ("Other programs", _cores(summary["other_cores"])),
        ("Drift", _drift(summary["drift"])),
    ]
    return [(name, text) for name, text in facts if text]


def _short(version: str) -> str:
    """A git revision as people write it; the configuration holds it in full."""
    revision, plus, rest = version.partition("+")
    return f"{revision[:12]}{plus}{rest}" if len(revision) == 40 else version


def _engines(results: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, None] = {}
    for result in results:
        details = result.get("details") or {}
        names = [str(result.get("engine", "?")), details.get("version"), details.get("backend")]
        found[" ".join(str(name) for name in names if name)] = None
    return ", ".join(found)


def _controllers(results: Sequence[Mapping[str, Any]]) -> str:
    """What decided how much was drafted; an arm with one of its own has it in its name."""
    found = dict.fromkeys((result.get("details") or {}).get("controller") for result in results)
    return ", ".join(str(name) for name in found if name)


def _hardware(hardware: Mapping[str, Any]) -> str:
    parts = [str(hardware.get("processor") or hardware.get("machine") or "unknown processor")]
    for what in ("cores", "threads"):
        if hardware.get(what):
            parts.append(f"{hardware[what]} {what if hardware[what] != 1 else what[:-1]}")
    if hardware.get("memory_bytes"):
        parts.append(f"{hardware['memory_bytes'] / 2**30:.1f} GiB")
    if hardware.get("gpu"):
        parts.append(str(hardware["gpu"]))
    return ", ".join(parts)


def _load(load: str) -> str:
    concurrency = concurrency_of(load)
    if concurrency is None:
        return load
    return f"{load} ({'one request' if concurrency == 1 else f'{concurrency} requests'} at a time)"


def concurrency_of(load: str) -> int | None:
    """Requests kept under way; None for a load that keeps to times instead."""
    kind, _, size = load.partition(":")
    return int(size) if kind == "closed" and size.isdecimal() else None


def _cores(others: float | None) -> str:
    return "unknown" if others is None else f"{others:.2f} cores busy beside the measurement"


def _drift(drift: float | None) -> str:
    return "" if drift is None else f"{drift:.2f} (the baseline's later half over its earlier; 1 is steady)"
