"""Runs made up for the report's tests: every kind of arm and mishap, with times and counts that can be told apart.

Called by the report's tests. Invariant: what is made can be written as a bundle and read back unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.bench.arms import Counters
from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.differences import find_differences
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import ArmRun, Difference, Measured, RequestRun
from draftsmith.bench.summary import summarise_run
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord

TOKENS = 24
_WIDTHS = {"none": (1,), "ngram": (1, 2, 4), "suffix": (1, 3, 6)}
"""Tokens per step of our arms, in turn; any other arm is another engine's."""


def make(
    arms: Sequence[str] = ("none", "suffix"),
    *,
    prompts: int = 6,
    repeats: int = 2,
    categories: Sequence[str] = ("chat", "code"),
    concurrency: int = 1,
    fails: Mapping[str, str] | None = None,
    strays: Sequence[str] = (),
    tells_ids: bool = True,
    stop_after: int | None = None,
    **config: Any,
) -> Measured:
    """A whole run. `fails`: arm -> the error its first prompt ends in; `strays`: arms that differ from the baseline
    on prompt 1; `stop_after`: arm-blocks before it was interrupted; `config`: settings in place of the usual ones.
    """
    draw = random.Random(7)
    runs: list[ArmRun] = []
    order = [(repeat, block) for repeat in range(repeats) for block in range(-(-prompts // concurrency))]
    firsts = dict.fromkeys(arms, 0)
    for repeat, block in order:
        members = range(block * concurrency, min((block + 1) * concurrency, prompts))
        for place, arm in enumerate(arms):
            if stop_after is not None and len(runs) >= stop_after:
                break
            maker = _Block(arm, repeat, block, place, draw, firsts)
            runs.append(maker.run(members, categories, fails or {}, arm in strays, tells_ids))
    found = find_differences(runs, arms[0])
    return Measured(
        config=_config(arms, prompts, concurrency, config),
        runs=tuple(runs),
        differences={key: Difference(position=place, gap=0.25) for key, place in found.items()},
        failed={},
        interrupted=stop_after is not None,
        other_cores=0.125,
    )


def _config(arms: Sequence[str], prompts: int, concurrency: int, more: Mapping[str, Any]) -> dict[str, Any]:
    descriptions = {
        arm: {"engine": "draftsmith" if arm in _WIDTHS else arm, "model": "m", "bits_per_weight": 4.5, "details": {}}
        for arm in arms
    }
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "model": "fake",
        "arms": list(arms),
        "baseline": arms[0],
        "descriptions": descriptions,
        "load": f"closed:{concurrency}",
        "concurrency": concurrency,
        "temperature": 0.0,
        "prompts": "made-up",
        "max_new_tokens": TOKENS,
        "num_prompts": prompts,
        "failed_prompts": {},
        "targets": {"ttft": 0.5, "tpot": None, "e2e": None},
        "hardware": {"processor": "a processor", "cores": 2, "threads": 2, "memory_bytes": 2**34, "system": "Linux"},
        "versions": {"python": "3", "git_revision": "0123456789" * 4},
        **more,
    }


class _Block:
    """One arm's work on one block."""

    def __init__(
        self, arm: str, repeat: int, block: int, order: int, draw: random.Random, firsts: dict[str, int]
    ) -> None:
        self._arm, self._repeat, self._block, self._order = arm, repeat, block, order
        self._draw, self._firsts = draw, firsts
        self._log = EventLog()

    def run(
        self,
        prompts: Sequence[int],
        categories: Sequence[str],
        fails: Mapping[str, str],
        strays: bool,
        tells_ids: bool,
    ) -> ArmRun:
        requests = []
        for prompt in prompts:
            error = fails.get(self._arm) if prompt == 0 else None
            category = categories[prompt % len(categories)] if categories else ""
            requests.append(self._request(prompt, category, error, strays and prompt == 1, tells_ids))
        return ArmRun(
            repeat=self._repeat,
            block=self._block,
            arm=self._arm,
            order=self._order,
            seconds=max(request.ended for request in requests) + 0.01,
            requests=tuple(requests),
            events=self._log,
            memory_bytes=(self._order + 1) * 2**28,
        )

    def _request(self, prompt: int, category: str, error: str | None, strays: bool, tells_ids: bool) -> RequestRun:
        own = self._arm in _WIDTHS
        number = self._firsts[self._arm]
        self._firsts[self._arm] += 1000
        arrivals: list[tuple[float, int]] = []
        if error is None:
            arrivals = self._answer(number, _WIDTHS.get(self._arm, (2,)), own)
        ids = tuple(range(prompt, prompt + TOKENS))
        if strays:
            ids = (*ids[:5], 999, *ids[6:])
        return RequestRun(
            prompt=prompt,
            turn=0,
            prompt_id=f"id-{prompt}",
            category=category,
            due=0.0,
            sent=0.0,
            ended=arrivals[-1][0] if arrivals else 0.5,
            prompt_tokens=0 if error else 7,
            num_tokens=0 if error else TOKENS,
            token_ids=ids if tells_ids and error is None else None,
            text="" if error else "text",
            finish_reason="" if error else "length",
            arrivals=tuple(arrivals),
            request=number if own else None,
            counters=None if own or error else Counters(drafts=9, drafted=18, accepted=12, steps=11),
            error=error,
        )

    def _answer(self, request: int, widths: Sequence[int], own: bool) -> list[tuple[float, int]]:
        """Arrivals of one answer; its steps go into the log where the arm keeps one."""
        clock, position, arrivals, turn = 0.0, 0, [], 0
        while position < TOKENS:
            width = 1 if position == 0 else widths[turn % len(widths)]
            emitted = min(width if self._draw.random() < 0.7 else 1, TOKENS - position)
            verify = 0.02 + 0.002 * width + 0.004 * self._draw.random()
            clock += verify + 0.004
            if own:
                step = request + turn
                prompt = position == 0
                self._log.append_step(StepRecord(step, width, 1, position, 0.001, verify, 0.002, 0.001))
                record = RequestStepRecord(
                    step, request, position, self._arm, width - 1, width - 1, emitted - 1, emitted, None, prompt
                )
                self._log.append_request(record)
            arrivals.append((clock, emitted))
            position += emitted
            turn += 1
        return arrivals


def write(measured: Measured, path: Path, *, finish: bool = True) -> Path:
    """The run as a bundle; `finish`: false leaves it as a process that died does."""
    writer = BundleWriter(path, force=False)
    count = measured.config["num_prompts"]
    prompts = [Prompt(prompt_id=f"id-{index}", turns=("text",), category="") for index in range(count)]
    writer.begin(measured.config, prompts)
    for run in measured.runs:
        writer.add(run)
    if finish:
        writer.end(measured, summarise_run(measured))
    return path
