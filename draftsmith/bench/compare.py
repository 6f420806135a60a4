"""Two runs side by side: what was set differently, what came out differently, and whether that is noise.

Called by `draftsmith bench compare`. A machine that was faster on one day speeds up every arm alike, so an arm is
judged by its speed-up over the baseline of its own run; only the baseline itself has no such control. Invariant:
items are the blocks both runs finished with every arm, paired by their prompts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from draftsmith.bench.runs import ArmRun, Measured
from draftsmith.core.intervals import RatioInterval, rates_interval
from draftsmith.core.stats import EventLog, summarise
from draftsmith.errors import UserError

_NOT_SETTINGS = ("schema", "hardware", "versions", "descriptions", "failed_prompts", "arms", "output", "date")

_Rates = Sequence[tuple[float, float]]
Item = tuple[Hashable, ...]
"""The prompts of a block."""
Prompts = tuple[Sequence[Hashable], Sequence[Hashable]]
"""For each run what its prompts are: equal where they are the same, whatever their places."""


def compare(
    first: Measured,
    second: Measured,
    *,
    prompts: Prompts | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
) -> dict[str, Any]:
    """What changed from the first run to the second. Raises `UserError` where nothing can be paired.

    `prompts`: None takes the prompts at equal places for the same.
    """
    arms = [arm for arm in first.config["arms"] if arm in second.config["arms"]]
    if not arms:
        raise UserError(
            f"no arm is in both runs ({', '.join(first.config['arms'])}; {', '.join(second.config['arms'])})"
        )
    baseline = first.config["baseline"]
    if baseline != second.config["baseline"]:
        baseline = None
    names = prompts or (range(first.config["num_prompts"]), range(second.config["num_prompts"]))
    if not set(names[0]) & set(names[1]):
        raise UserError("the two runs have no prompt in common")
    sides = [_by_item(run, named) for run, named in zip((first, second), names, strict=True)]
    shared = _finished_by_both(sides, arms)

    def interval(above: Sequence[_Rates], below: Sequence[_Rates]) -> dict[str, Any] | None:
        if not all(sum(column) > 0 for rates in (*above, *below) for column in zip(*rates, strict=True)):
            return None
        return _told(rates_interval(above, below, level=level, resamples=resamples))

    results = []
    for arm in arms:
        rates = [[side[item][arm] for item in shared] for side in sides]
        result: dict[str, Any] = {
            "arm": arm,
            "speed": interval([rates[1]], [rates[0]]),
            "tokens_per_step": [_tokens_per_step(run, arm) for run in (first, second)],
            "identical": _identical((first, second), names, arm),
            "speedup": None,
        }
        if baseline is not None and arm != baseline:
            base = [[side[item][baseline] for item in shared] for side in sides]
            result["speedup"] = interval([rates[1], base[0]], [rates[0], base[1]])
        judged = result["speedup"] or result["speed"]
        # One block has no spread, so nothing tells what is noise.
        result["is_noise"] = None if judged is None or len(shared) < 2 else judged["is_noise"]
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


def _finished_by_both(sides: Sequence[Mapping[Item, Mapping[str, Any]]], arms: Sequence[str]) -> list[Item]:
    shared = [
        item for item in sides[0] if item in sides[1] and all(arm in side[item] for side in sides for arm in arms)
    ]
    if not shared:
        raise UserError(
            "no block of prompts was finished by both runs with every arm they share; runs are compared block by "
            "block, so they need the same prompts and the same concurrency"
        )
    return shared


def _by_item(measured: Measured, names: Sequence[Hashable]) -> dict[Item, dict[str, tuple[float, float]]]:
    """Tokens and seconds of each arm on each block of prompts, over all repeats in which it was whole."""
    found: dict[Item, dict[str, tuple[float, float]]] = {}
    for run in measured.runs:
        if not run.is_whole:
            continue
        own = found.setdefault(_item(run, names), {})
        tokens, seconds = own.get(run.arm, (0.0, 0.0))
        own[run.arm] = (tokens + run.num_tokens, seconds + run.seconds)
    return found


def _item(run: ArmRun, names: Sequence[Hashable]) -> Item:
    return tuple(sorted((names[request.prompt] for request in run.requests if request.turn == 0), key=str))


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


def _identical(runs: Sequence[Measured], names: Prompts, arm: str) -> dict[str, int]:
    """Answers whose ids are the same in both runs, of those that both tell ids for."""
    told = [_ids(run, named, arm) for run, named in zip(runs, names, strict=True)]
    shared = told[0].keys() & told[1].keys()
    return {"same": sum(told[0][key] == told[1][key] for key in shared), "of": len(shared)}


def _ids(measured: Measured, names: Sequence[Hashable], arm: str) -> dict[tuple[Hashable, int], Sequence[int]]:
    found: dict[tuple[Hashable, int], Sequence[int]] = {}
    for run in measured.runs:
        for request in run.requests:
            if run.arm == arm and request.error is None and request.token_ids is not None:
                found.setdefault((names[request.prompt], request.turn), request.token_ids)
    return found


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*first, *second])
    return {
        name: [first.get(name), second.get(name)]
        for name in names
        if name not in _NOT_SETTINGS and first.get(name) != second.get(name)
    }
