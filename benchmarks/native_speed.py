"""Speed sections of `bench_native.py`: plain decoding, m rows at once, reading a prompt, a batch.

Each takes the arms (this package's first) and returns a plain dictionary that `--json` prints, with the lines of
its table under "table". Invariant: within a repeat every arm does the same work, in an order that moves on
by one from repeat to repeat; ratios are of speeds, above 1 where this package is faster, one per repeat.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from native_arms import Arm, settle

Measure = Callable[[Arm], float]


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def turns(arms: Sequence[Arm], repeats: int) -> Iterator[tuple[int, Arm]]:
    """Every arm once per repeat, each in its turn the first."""
    for repeat in range(repeats):
        start = repeat % len(arms)
        for arm in [*arms[start:], *arms[:start]]:
            settle()
            yield repeat, arm


def rates(arms: Sequence[Arm], repeats: int, measure: Measure) -> dict[str, list[float]]:
    """A rate per arm and repeat; arms that cannot do it are left out."""
    found: dict[str, list[float]] = {}
    unable: set[str] = set()
    for _, arm in turns(arms, repeats):
        if arm.name in unable:
            continue
        try:
            rate = measure(arm)
        except NotImplementedError:
            unable.add(arm.name)
        else:
            found.setdefault(arm.name, []).append(rate)
            say(f"    {arm.name}: {rate:.2f}")
    return {arm.name: found[arm.name] for arm in arms if arm.name in found}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show_spread(found: dict[str, float], digits: int = 2) -> str:
    """`1.23 (1.20-1.25)`."""
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}-{found['high']:.{digits}f})"


def compare(found: dict[str, list[float]], own: str) -> dict[str, Any]:
    """Rates of all arms, and this package's over each other's, repeat by repeat."""
    ratios = {
        name: spread([mine / theirs for mine, theirs in zip(found[own], values, strict=True)])
        for name, values in found.items()
        if name != own
    }
    return {"rates": {name: spread(values) for name, values in found.items()}, "ratios": ratios}


def table_of(result: dict[str, Any], unit: str, digits: int = 1) -> list[str]:
    """One line per arm."""
    lines = [f"{'arm':34} {unit:>24} {'ours over it':>22}"]
    for name, found in result["rates"].items():
        ratio = result["ratios"].get(name)
        lines.append(f"{name:34} {show_spread(found, digits):>24} {show_spread(ratio) if ratio else '':>22}".rstrip())
    return lines


def plain(arms: Sequence[Arm], prompt: list[int], n: int, repeats: int) -> dict[str, Any]:
    """Greedy tokens per second at batch 1, first token excluded; the model's end tokens do not end it."""
    loops: dict[str, float] = {}

    def measure(arm: Arm) -> float:
        run = arm.generate(prompt, n)
        if run.loop_seconds is not None:
            loops[arm.name] = 1e6 * run.loop_seconds / run.decoded
        return run.rate

    for arm in arms:
        arm.generate(prompt, 16)
    result = compare(rates(arms, repeats, measure), arms[0].name)
    lines = table_of(result, "tokens/s")
    lines += [f"{name}: {cost:.0f} us a token in the worker's loop, counted above" for name, cost in loops.items()]
    return {**result, "loop_microseconds": loops, "tokens": n, "repeats": repeats, "table": lines}


def prefill(arms: Sequence[Arm], ids: list[int], repeats: int) -> dict[str, Any]:
    """Prompt tokens per second, logits for the last token alone."""
    for arm in arms:
        arm.prefill(ids)
    found = rates(arms, repeats, lambda arm: len(ids) / arm.prefill(ids))
    result = compare(found, arms[0].name)
    return {**result, "tokens": len(ids), "repeats": repeats, "table": table_of(result, "tokens/s")}


def batch(arms: Sequence[Arm], prompts: list[list[int]], n: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of `len(prompts)` sequences together, and that over one sequence alone."""
    alone = rates(arms, repeats, lambda arm: arm.batch_rate(prompts[:1], n))
    together = rates(arms, repeats, lambda arm: arm.batch_rate(prompts, n))
    result = compare(together, arms[0].name)
    gains = {
        name: spread([all_ / one for all_, one in zip(together[name], alone[name], strict=True)]) for name in together
    }
    lines = [f"{line:82} {'over batch 1':>20}" for line in table_of(result, "tokens/s")[:1]]
    for line, name in zip(table_of(result, "tokens/s")[1:], together, strict=True):
        lines.append(f"{line:82} {show_spread(gains[name]):>20}")
    return {**result, "gains": gains, "sequences": len(prompts), "tokens": n, "repeats": repeats, "table": lines}


def rows(
    arms: Sequence[Arm], context: list[int], tokens: list[int], counts: Sequence[int], repeats: int, tries: int
) -> dict[str, Any]:
    """Milliseconds to score m rows behind a context, logits for all: per repeat the median of `tries` calls."""
    able = [arm for arm in arms if _can_score(arm, context, tokens[:1])]
    found: dict[str, dict[int, list[float]]] = {arm.name: {m: [] for m in counts} for arm in able}
    for m in counts:
        for _, arm in turns(able, repeats):
            times = arm.score_rows(context, tokens[:m], tries + 1)[1:]
            found[arm.name][m].append(statistics.median(times))
        say("    " + f"m={m}: " + ", ".join(f"{name} {statistics.median(t[m]):.2f} ms" for name, t in found.items()))
    own = able[0].name
    ratios = {
        name: {m: spread([b / a for a, b in zip(found[own][m], times[m], strict=True)]) for m in counts}
        for name, times in found.items()
        if name != own
    }
    medians = {name: {m: statistics.median(times[m]) for m in counts} for name, times in found.items()}
    result = {"milliseconds": medians, "ratios": ratios, "context": len(context), "repeats": repeats, "tries": tries}
    return {**result, "table": _rows_table(medians, ratios, counts)}


def _rows_table(medians: dict[str, dict[int, float]], ratios: dict[str, Any], counts: Sequence[int]) -> list[str]:
    lines = ["   m" + "".join(f"  {name:>26} {'T(m)/T(1)':>10}" for name in medians)]
    lines[0] += "".join(f"  {'ours over ' + name:>36}" for name in ratios)
    for m in counts:
        line = f"{m:4}"
        for times in medians.values():
            line += f"  {times[m]:23.2f} ms {times[m] / times[counts[0]]:10.2f}"
        lines.append(line + "".join(f"  {show_spread(found[m]):>36}" for found in ratios.values()))
    return lines


def _can_score(arm: Arm, context: list[int], tokens: list[int]) -> bool:
    try:
        arm.score_rows(context, tokens, 1)
    except NotImplementedError:
        return False
    return True
