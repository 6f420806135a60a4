"""Speculation section of `bench_native.py`: this package's drafters against peers, plain and with prompt lookup.

Every prompt goes through every way (an arm and how it drafts) once, in an order drawn from the seed, as the same
token ids. Rates are totals over totals: tokens after the first over the seconds they took. Invariant: a way that
speculates is compared with its own arm's plain run for identical ids, and with this package's ways for speed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from native_arms import Arm, Run, settle
from native_speed import say

from draftsmith.core.intervals import ratio_interval


@dataclass(frozen=True)
class Way:
    """An arm and how it drafts."""

    arm: Arm
    draft: str

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.arm.name} {'plain' if self.draft == 'none' else self.draft}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt as all ways get it."""

    category: str
    ids: list[int]


def speculation(
    ways: Sequence[Way], questions: Sequence[Question], n: int, stop: Sequence[int], seed: int = 0
) -> dict[str, Any]:
    """At most `n` tokens of every prompt in every way. The first way is this package's plain decoding."""
    for way in ways:
        # A prompt with repetition, so that drafting code and wide forwards have run once before they count.
        way.arm.generate([100, 101, 102, 103] * 8, 24, draft=way.draft)
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    for index, question in enumerate(questions):
        order = list(ways)
        random.Random(f"{seed}/{index}").shuffle(order)
        for way in order:
            settle()
            runs[way.name].append(way.arm.generate(question.ids, n, stop, way.draft))
        done = ", ".join(f"{name} {_rate(own):.1f}" for name, own in runs.items())
        say(f"    {index + 1}/{len(questions)} {question.category}: so far {done}")
    return _result(ways, runs, questions, n)


def _rate(runs: Sequence[Run]) -> float:
    seconds = sum(run.decode_seconds for run in runs)
    return sum(run.decoded for run in runs) / seconds if seconds else 0.0


def _result(ways: Sequence[Way], runs: dict[str, list[Run]], questions: Sequence[Question], n: int) -> dict[str, Any]:
    categories = list(dict.fromkeys(question.category for question in questions))
    rates = {
        category: {
            name: _rate([run for run, question in zip(own, questions, strict=True) if question.category == category])
            for name, own in runs.items()
        }
        for category in categories
    }
    rates["all"] = {name: _rate(own) for name, own in runs.items()}
    plain = {way.arm.name: runs[way.name] for way in ways if way.draft == "none"}
    same = {
        way.name: sum(a.ids == b.ids for a, b in zip(runs[way.name], plain[way.arm.name], strict=True))
        for way in ways
        if way.arm.name in plain
    }
    own = ways[0].arm
    peers = [way.name for way in ways if way.arm is not own]
    ratios = {
        way.name: {peer: _ratio(runs[way.name], runs[peer]) for peer in [ways[0].name, *peers] if peer != way.name}
        for way in ways
        if way.arm is own
    }
    result = {"rates": rates, "ratios": ratios, "same_ids_as_plain": same, "prompts": len(questions), "tokens": n}
    return {**result, "table": _table(result, list(runs))}


def _ratio(own: Sequence[Run], other: Sequence[Run]) -> dict[str, float]:
    """Rate over rate with a paired 95 % bootstrap interval over the prompts."""
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if a.decoded and b.decoded]
    if not pairs:
        return {"ratio": 0.0, "low": 0.0, "high": 0.0}
    found = ratio_interval(
        [(a.decoded, a.decode_seconds) for a, _ in pairs], [(b.decoded, b.decode_seconds) for _, b in pairs]
    )
    return {"ratio": found.ratio, "low": found.low, "high": found.high}


def _table(result: dict[str, Any], names: list[str]) -> list[str]:
    lines = [f"{len(names)} ways, tokens/s:"]
    lines += [f"  [{place}] {name}" for place, name in enumerate(names)]
    lines.append(f"{'category':18}" + "".join(f"{f'[{place}]':>9}" for place in range(len(names))))
    for category, found in result["rates"].items():
        lines.append(f"{category:18}" + "".join(f"{found[name]:9.1f}" for name in names))
    same = result["same_ids_as_plain"]
    cells = "".join(f"{(str(same[name]) if name in same else '-'):>9}" for name in names)
    lines.append(f"{'ids as plain':18}{cells}  of {result['prompts']}")
    ratios = result["ratios"]
    lines.append("this package's rate over the other's, with a paired 95 % interval over the prompts:")
    lines.append(f"{'over':32}" + "".join(f"{f'[{names.index(own)}]':>19}" for own in ratios))
    for other in names:
        shown = [_show(found.get(other)) for found in ratios.values()]
        if any(shown):
            lines.append(f"{other:32}" + "".join(f"{cell:>19}" for cell in shown))
    return lines


def _show(found: dict[str, float] | None) -> str:
    return f"{found['ratio']:.2f} ({found['low']:.2f}-{found['high']:.2f})" if found else ""
