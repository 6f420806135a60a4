"""Two runs side by side: what was set differently, what came out differently, and whether that is noise.

Called by `draftsmith bench compare`. A machine that was faster on one day speeds up every arm alike, so an arm is
judged by its speed-up over the baseline of its own run; only the baseline itself has no such control. Invariant:
items are the blocks both runs finished with every arm, paired by their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.bench.runs import ArmRun, Measured
from draftsmith.core.intervals import RatioInterval, rates_interval
from draftsmith.core.stats import EventLog, summarise
from draftsmith.errors import UserError

_NOT_SETTINGS = ("hardware", "versions", "descriptions", "failed_prompts", "arms", "output", "date")

Item = tuple[int, ...]
"""The prompts of a block."""


def compare(first: Measured, second: Measured, *, level: float = 0.95, resamples: int = 10_000) -> dict[str, Any]:
    """What changed from the first run to the second. Raises `UserError` where nothing can be paired."""
    arms = [arm for arm in first.config["arms"] if arm in second.config["arms"]]
    if not arms:
        raise UserError(
            f"no arm is in both runs ({', '.join(first.config['arms'])}; {', '.join(second.config['arms'])})"
        )
    baseline = first.config["baseline"]
    if baseline != second.config["baseline"]:
        baseline = None
    sides = [_by_item(run) for run in (first, second)]
    shared = [item for item in sides[0] if item in sides[1]]
    shared = [item for item in shared if all(arm in side[item] for side in sides for arm in arms)]
    if not shared:
        raise UserError("no block of prompts was finished by both runs with every arm they share")
    results = []
    for arm in arms:
        rates = [[side[item][arm] for item in shared] for side in sides]
        result: dict[str, Any] = {
            "arm": arm,
            "speed": _told(rates_interval([rates[1]], [rates[0]], level=level, resamples=resamples)),
            "tokens_per_step": [_tokens_per_step(run, arm) for run in (first, second)],
            "identical": _identical(first, second, arm),
            "speedup": None,
        }
        if baseline is not None and arm != baseline:
            base = [[side[item][baseline] for item in shared] for side in sides]
            interval = rates_interval([rates[1], base[0]], [rates[0], base[1]], level=level, resamples=resamples)
            result["speedup"] = _told(interval)
        result["is_noise"] = (result["speedup"] or result["speed"])["is_noise"]
        results.append(result)
    return {
        "baseline": baseline,
        "level": level,
        "items": len(shared),
        "only_in_first": [arm for arm in first.config["arms"] if arm not in arms],
        "only_in_second": [arm for arm in second.config["arms"] if arm not in arms],
        "settings": _changes(first.config, second.config),
        "versions": _changes(first.config["versions"], second.config["versions"]),
        "hardware": _changes(first.config["hardware"], second.config["hardware"]),
        "results": results,
    }


def _by_item(measured: Measured) -> dict[Item, dict[str, tuple[float, float]]]:
    """Tokens and seconds of each arm on each block of prompts, over all repeats in which it was whole."""
    found: dict[Item, dict[str, tuple[float, float]]] = {}
    for run in measured.runs:
        if not run.is_whole:
            continue
        own = found.setdefault(_item(run), {})
        tokens, seconds = own.get(run.arm, (0.0, 0.0))
        own[run.arm] = (tokens + run.num_tokens, seconds + run.seconds)
    return found


def _item(run: ArmRun) -> Item:
    return tuple(sorted(request.prompt for request in run.requests if request.turn == 0))


def _told(interval: RatioInterval) -> dict[str, Any]:
    return {
        "ratio": round(interval.ratio, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
        "is_noise": interval.low <= 1.0 <= interval.high,
    }


def _tokens_per_step(measured: Measured, arm: str) -> float | None:
    log = EventLog()
    for run in measured.runs:
        if run.arm == arm:
            log.extend(run.events)
    value = summarise(log).tokens_per_step
    return None if value is None else round(value, 6)


def _identical(first: Measured, second: Measured, arm: str) -> dict[str, int]:
    """Answers whose ids are the same in both runs, of those that both tell ids for."""
    told = [_ids(run, arm) for run in (first, second)]
    shared = told[0].keys() & told[1].keys()
    return {"same": sum(told[0][key] == told[1][key] for key in shared), "of": len(shared)}


def _ids(measured: Measured, arm: str) -> dict[tuple[int, int], Sequence[int]]:
    found: dict[tuple[int, int], Sequence[int]] = {}
    for run in measured.runs:
        for request in run.requests:
            if run.arm == arm and request.error is None and request.token_ids is not None:
                found.setdefault((request.prompt, request.turn), request.token_ids)
    return found


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*first, *second])
    return {
        name: [first.get(name), second.get(name)]
        for name in names
        if name not in _NOT_SETTINGS and first.get(name) != second.get(name)
    }
