"""From what was measured to the figures of `summary.json`.

Called by the command line, and by anybody who reads a bundle back: `bench rescore` gets the same document from the
bundle's logs alone. Every count comes from the event log through `core.stats`. Invariants: totals over totals, never
means of rates; an arm is compared with the baseline on the blocks that both finished; a failed request is counted by
its reason and enters no other figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftsmith.bench.arms import Counters
from draftsmith.bench.cost import DEFINITIONS as COST_DEFINITIONS
from draftsmith.bench.cost import verify_cost
from draftsmith.bench.differences import NEAR_TIE
from draftsmith.bench.latency import DEFINITIONS as LATENCY_DEFINITIONS
from draftsmith.bench.latency import Targets, latencies
from draftsmith.bench.runs import ArmRun, Key, Measured, RequestRun
from draftsmith.core.conventions import published
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.intervals import ratio_interval
from draftsmith.core.stats import EventLog, Summary, summarise

SCHEMA = 2
BUSY_CORES = 0.25
"""From so many cores busy with other programs on, measured speeds say little."""

DEFINITIONS = {
    "emitted_tokens": "tokens written, the one each prompt step emits included",
    "steps": "(request, step) pairs after the prompt: a batched forward is one for each request in it",
    "tokens_per_step": "(emitted_tokens - prompt_step_tokens) / steps, pooled over the run, bonus token included",
    "tokens_per_second": "emitted_tokens / seconds_total, prompts included; blocks with a failed request left out",
    "tokens_counted_by": "requests by how their tokens were counted, where an engine told no ids",
    "speedup": "tokens_per_second over the baseline's on the same blocks; 95 % paired bootstrap over blocks",
    "identical": "answers whose token ids equal the baseline's",
    "depths": "per draft depth: pairs that decided it, accepted of those (conditional), product so far (survival)",
    "rows_per_token": "rows the target scored after the prompt (root and drafts) per emitted token",
    "other_cores": "cores that other programs kept busy meanwhile: above 0.25 or so, speeds say little",
    "noise": "how far a block's rate strays from its mean over repeats (coefficient of variation, median of blocks)",
    "fidelity": "exact: the target's own text; lossy: near it, as was asked for; synthetic: drafts kept at set rates",
    "total_variation": "of a lossy rule: between the laws its tokens came from and the target's, mean per token",
    "drift": "the baseline's rate in the later half of the run over that in the earlier, same blocks: 1 is steady",
    "memory_bytes": "largest resident memory of the engine's process after a block; own arms share one process",
    "seconds": "draft, verify (the target's forward), sample (verification rule), other (the rest of the wall time)",
    **COST_DEFINITIONS,
    **LATENCY_DEFINITIONS,
}


def summarise_run(measured: Measured) -> dict[str, Any]:
    """The document written as `summary.json`."""
    config = measured.config
    runs = compared_runs(measured)
    categories = dict.fromkeys(request.category for run in runs for request in run.requests)
    whole = _Figures(measured, runs)
    parts = {name: _Figures(measured, [run for run in runs if _category(run) == name]) for name in categories}
    results = []
    for arm in config["arms"]:
        result = {"arm": arm, **config["descriptions"].get(arm, {}), **whole.of(arm), "verify_cost": whole.cost(arm)}
        if any(categories):
            result["categories"] = {name: part.of(arm) for name, part in parts.items()}
        results.append(result)
    return {
        "schema": SCHEMA,
        "model": config["model"],
        "baseline": config["baseline"],
        "load": config["load"],
        "temperature": config["temperature"],
        "hardware": config["hardware"],
        "versions": config["versions"],
        "interrupted": measured.interrupted,
        "other_cores": _rounded(measured.other_cores),
        "drift": _drift(runs, config["baseline"]),
        "repeats": len({run.repeat for run in runs}),
        "prompts_measured": len({request.prompt for run in runs for request in run.requests}),
        "prompts_given": config["num_prompts"],
        "failed_prompts": dict(Counter(measured.failed.values())),
        "definitions": DEFINITIONS,
        "results": results,
    }


def figures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without the words that explain it, which another version may put otherwise."""
    return {name: value for name, value in summary.items() if name != "definitions"}


def estimates(result: Mapping[str, Any]) -> int:
    """Requests of an arm whose tokens nobody counted."""
    told = result.get("tokens_counted_by", {})
    return sum(count for by, count in told.items() if by.startswith("estimate"))


def fidelity_notes(result: Mapping[str, Any]) -> list[str]:
    """What must be known of an arm whose texts are not the target's own."""
    told = result.get("fidelity")
    rule = (result.get("details") or {}).get("rule")
    if told == Fidelity.LOSSY:
        cost = result.get("total_variation")
        said = "unknown" if cost is None else f"{cost:.3f}"
        return [
            f"{result['arm']}: LOSSY by rule {rule}: total variation from the target's law {said} per token, other ids "
            f"in {result['divergent']} of {result['identical'] + result['divergent']} answers."
        ]
    if told == Fidelity.SYNTHETIC:
        return [
            f"{result['arm']}: SYNTHETIC by rule {rule}: drafts were accepted at set rates (measured: "
            f"{_figure(result['tokens_per_step'])} tokens per step); the text means nothing, and no speed here is one "
            "that a drafter reached."
        ]
    return []


def _figure(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"


def compared_runs(measured: Measured) -> list[ArmRun]:
    """Runs on blocks that every arm has worked on; an interrupted run leaves out the one it was stopped in."""
    arms = set(measured.config["arms"])
    seen: dict[tuple[int, int], set[str]] = {}
    for run in measured.runs:
        seen.setdefault((run.repeat, run.block), set()).add(run.arm)
    return [run for run in measured.runs if seen[run.repeat, run.block] == arms]


@dataclass(frozen=True)
class _Total:
    """Tokens and seconds of an arm on an item: a block over all repeats, or a repeat where there is one block."""

    tokens: float
    seconds: float


@final
class _Figures:
    """The figures of every arm over some of the runs."""

    def __init__(self, measured: Measured, runs: Sequence[ArmRun]) -> None:
        self._measured = measured
        self._baseline = measured.config["baseline"]
        self._targets = Targets(**measured.config["targets"])
        self._by_arm: dict[str, list[ArmRun]] = {arm: [] for arm in measured.config["arms"]}
        for run in runs:
            self._by_arm[run.arm].append(run)
        self._one_block = len({run.block for run in runs}) == 1

    def of(self, arm: str) -> dict[str, Any]:
        """One arm's."""
        own = self._by_arm[arm]
        timed = [run for run in own if run.is_whole]
        answered = [request for run in own for request in run.requests if request.error is None]
        seconds = sum(run.seconds for run in timed)
        tokens = sum(run.num_tokens for run in timed)
        return {
            "num_requests": len(answered),
            "failed_requests": dict(Counter(request.error for run in own for request in run.requests if request.error)),
            "num_blocks": len({run.block for run in timed}),
            "emitted_tokens": tokens,
            "seconds_total": _rounded(seconds),
            "tokens_per_second": _rounded(tokens / seconds if seconds else None),
            "speedup": self._speedup(arm),
            "noise": _noise(timed),
            **_speculation(own, timed, seconds),
            "latency": latencies([request for run in timed for request in run.requests], seconds, self._targets),
            "memory_bytes": max((run.memory_bytes for run in own if run.memory_bytes is not None), default=None),
            **self._sameness(arm, answered),
            "total_variation": _total_variation(answered),
            **_counted(answered),
        }

    def cost(self, arm: str) -> list[dict[str, Any]]:
        """One arm's seconds per forward against its rows."""
        log = EventLog()
        for run in self._by_arm[arm]:
            log.extend(run.events)
        return verify_cost(log)

    def _items(self, runs: Iterable[ArmRun]) -> dict[int, _Total]:
        found: dict[int, _Total] = {}
        for run in runs:
            item = run.repeat if self._one_block else run.block
            before = found.get(item, _Total(0.0, 0.0))
            found[item] = _Total(before.tokens + run.num_tokens, before.seconds + run.seconds)
        return found

    def _speedup(self, arm: str) -> dict[str, Any] | None:
        if arm == self._baseline:
            return None
        whole = {
            name: {(run.repeat, run.block) for run in self._by_arm[name] if run.is_whole}
            for name in (arm, self._baseline)
        }
        shared = whole[arm] & whole[self._baseline]
        own, base = (
            self._items(run for run in self._by_arm[name] if (run.repeat, run.block) in shared)
            for name in (arm, self._baseline)
        )
        if not own or not all(_makes_a_rate(side) for side in (own, base)):
            return {"ratio": None, "low": None, "high": None, "items": 0}
        interval = ratio_interval(
            [(own[item].tokens, own[item].seconds) for item in own],
            [(base[item].tokens, base[item].seconds) for item in own],
        )
        return {
            "ratio": _rounded(interval.ratio),
            "low": _rounded(interval.low),
            "high": _rounded(interval.high),
            "items": interval.items,
        }

    def _sameness(self, arm: str, answered: Sequence[RequestRun]) -> dict[str, Any]:
        """Ids beside the baseline's, and beside the arm's own in other repeats."""
        theirs = {
            key(request): request.token_ids
            for run in self._by_arm[self._baseline]
            for request in run.requests
            if request.error is None
        }
        own: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for request in answered:
            if request.token_ids is not None:
                own.setdefault(key(request), set()).add(request.token_ids)
        compared = [place for place in own if theirs.get(place) is not None]
        differences = [
            found
            for prompt, turn in compared
            if (found := self._measured.differences.get(Key(arm, prompt, turn))) is not None
        ]
        return {
            "identical": len(compared) - len(differences),
            "divergent": len(differences),
            "near_ties": sum(item.gap is not None and item.gap < NEAR_TIE for item in differences),
            "first_divergence": min((item.position for item in differences), default=None),
            "unsteady": sum(len(ids) > 1 for ids in own.values()),
        }


def _total_variation(answered: Sequence[RequestRun]) -> float | None:
    """Per token, over the answers that came under a lossy rule."""
    lossy = [request for request in answered if request.total_variation is not None]
    tokens = sum(request.num_tokens for request in lossy)
    return _rounded(sum((r.total_variation or 0.0) * r.num_tokens for r in lossy) / tokens) if tokens else None


def _counted(answered: Sequence[RequestRun]) -> dict[str, Any]:
    """How tokens were counted, where an engine told no ids."""
    found = Counter(request.counted_by for request in answered if request.counted_by is not None)
    return {"tokens_counted_by": dict(found)} if found else {}


def _makes_a_rate(items: Mapping[int, _Total]) -> bool:
    return sum(item.tokens for item in items.values()) > 0 and sum(item.seconds for item in items.values()) > 0


def key(request: RequestRun) -> tuple[int, int]:
    """Which answer of an arm: prompt and turn."""
    return request.prompt, request.turn


def _speculation(own: Sequence[ArmRun], timed: Sequence[ArmRun], seconds: float) -> dict[str, Any]:
    """Tokens per step and what belongs to it: from the event log, else from the engine's own counters."""
    log = EventLog()
    for run in own:
        log.extend(run.events)
    if not log.requests:
        return _foreign(own)
    counts = summarise(log)
    timed_log = EventLog()
    for run in timed:
        timed_log.extend(run.events)
    spent = summarise(timed_log).seconds
    return {
        "source": "event log",
        "prompt_step_tokens": counts.prompt_emitted,
        "steps": counts.pairs,
        "drafts": counts.drafts,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "tokens_per_step": _rounded(counts.tokens_per_step),
        "rows_per_token": _rounded(counts.rows_per_token),
        "depths": _depths(counts),
        "conventions": [
            {"name": item.name, "definition": item.definition, "value": item.value} for item in published(log)
        ],
        "seconds": {
            "draft": _rounded(spent.draft),
            "verify": _rounded(spent.verify),
            "sample": _rounded(spent.sample),
            "other": _rounded(seconds - spent.draft - spent.verify - spent.sample),
        },
    }


def _depths(counts: Summary) -> list[dict[str, Any]]:
    rows = zip(counts.trials, counts.successes, counts.conditional_acceptance, counts.survival, strict=True)
    return [
        {"depth": depth, "trials": trials, "accepted": wins, "conditional": _rounded(now), "survival": _rounded(so_far)}
        for depth, (trials, wins, now, so_far) in enumerate(rows, 1)
    ]


def _foreign(own: Sequence[ArmRun]) -> dict[str, Any]:
    """What other engines tell: counts of requests where there are any, else of blocks."""
    found = [request.counters for run in own for request in run.requests if request.counters is not None]
    found = found or [run.counters for run in own if run.counters is not None]
    totals = {name: _added(found, name) for name in ("drafts", "drafted", "accepted", "steps")}
    emitted = sum(request.num_tokens for run in own for request in run.requests if request.error is None)
    firsts = sum(request.error is None for run in own for request in run.requests)
    steps = totals["steps"]
    return {
        "source": "the engine's own counters" if found else None,
        "prompt_step_tokens": None,
        "steps": steps,
        "drafts": totals["drafts"],
        "drafted_tokens": totals["drafted"],
        "accepted_tokens": totals["accepted"],
        "tokens_per_step": _rounded((emitted - firsts) / steps) if steps else None,
        "rows_per_token": None,
        "depths": [],
        "conventions": [],
        "seconds": None,
    }


def _added(counters: Sequence[Counters], name: str) -> int | None:
    values = [getattr(item, name) for item in counters]
    return sum(values) if values and None not in values else None


def _noise(runs: Sequence[ArmRun]) -> float | None:
    """Median over blocks of the spread of their rates over repeats; None with one repeat."""
    rates: dict[int, list[float]] = {}
    for run in runs:
        if run.seconds > 0:
            rates.setdefault(run.block, []).append(run.num_tokens / run.seconds)
    spreads = []
    for values in rates.values():
        mean = sum(values) / len(values)
        if len(values) > 1 and mean > 0:
            spreads.append((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5 / mean)
    return _rounded(sorted(spreads)[len(spreads) // 2]) if spreads else None


def _drift(runs: Sequence[ArmRun], baseline: str) -> float | None:
    """The baseline's later over its earlier rate, over blocks that both halves of the repeats hold."""
    repeats = sorted({run.repeat for run in runs})
    if len(repeats) < 2:
        return None
    early = set(repeats[: len(repeats) // 2])
    halves: tuple[dict[int, _Total], dict[int, _Total]] = ({}, {})
    for run in runs:
        if run.arm == baseline and run.is_whole:
            half = halves[0 if run.repeat in early else 1]
            before = half.get(run.block, _Total(0.0, 0.0))
            half[run.block] = _Total(before.tokens + run.num_tokens, before.seconds + run.seconds)
    shared = halves[0].keys() & halves[1].keys()
    rates = []
    for half in halves:
        tokens, seconds = (sum(getattr(half[block], name) for block in shared) for name in ("tokens", "seconds"))
        rates.append(tokens / seconds if seconds else 0.0)
    return _rounded(rates[1] / rates[0]) if rates[0] else None


def _category(run: ArmRun) -> str | None:
    return run.requests[0].category if run.requests else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
