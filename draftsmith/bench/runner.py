"""Runs the arms of a benchmark on the same prompts, interleaved.

Called by the command line. Each arm has its own engine state (drafter, controller, cache) over shared
weights, so no arm learns from another. Invariants: within a block every arm gets the same prompts,
settings and seed; the order of arms is shuffled per block from the seed; prefix reuse is off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import BASELINE, ArmRun, Output
from draftsmith.core.stats import EventLog
from draftsmith.errors import DraftsmithError, OptionError, PromptError

# Copying, so that drafters with a local index draft and the controllers see real verification steps.
_WARM_UP = "Repeat this line three times: one two three four five six seven eight nine ten, one two three four."
_WARM_UP_TOKENS = 32


class Arm(Protocol):
    """What the runner needs of an engine."""

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt; raises `PromptError` for one it cannot take."""

    def generate(self, prompt: Any, **params: Any) -> Any:
        """Generate for a list of prompts; one result each."""

    def take_events(self) -> EventLog:
        """The event log since the last call."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and how they are sent. `settings`: keyword arguments of `generate`, the same for every arm."""

    prompts: Sequence[Prompt]
    settings: Mapping[str, Any]
    concurrency: int = 1
    seed: int = 0
    raw: bool = False

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise OptionError(f"concurrency must be at least 1, got {self.concurrency}")

    def request(self, index: int) -> str | list[dict[str, str]]:
        """What is handed to the engine for the first turn of one prompt."""
        prompt = self.prompts[index]
        if self.raw:
            if prompt.system is not None:
                raise PromptError(f"prompt {prompt.prompt_id} has a system message, which a raw text cannot carry")
            return prompt.text
        system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        return [*system, {"role": "user", "content": prompt.text}]


def arms_of(text: str) -> list[str]:
    """Drafter selections from a comma-separated list, the baseline first (added where it is missing)."""
    named = [part.strip() for part in text.split(",")]
    if not all(named):
        raise OptionError(f"--drafters {text!r} has an empty name; write them as none,ngram,suffix")
    doubled = {name for name in named if named.count(name) > 1}
    if doubled:
        raise OptionError(f"--drafters names {', '.join(sorted(doubled))} more than once")
    return [BASELINE, *(name for name in named if name != BASELINE)]


def usable_prompts(workload: Workload, arm: Arm) -> tuple[list[int], dict[int, str]]:
    """Indices of the prompts the target can take, and the reasons of those it cannot."""
    usable: list[int] = []
    failed: dict[int, str] = {}
    for index in range(len(workload.prompts)):
        try:
            arm.encode(workload.request(index))
        except DraftsmithError as error:
            failed[index] = str(error)
        else:
            usable.append(index)
    return usable, failed


def blocks_of(workload: Workload, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """The usable prompts in blocks of `concurrency`, each of one category; a category's last may be smaller.

    One category per block, so that a category's time is the time of its blocks. Blocks stand in the order of
    their first prompts.
    """
    by_category: dict[str, list[int]] = {}
    for index in usable:
        by_category.setdefault(workload.prompts[index].category, []).append(index)
    size = workload.concurrency
    return sorted(
        tuple(indices[start : start + size])
        for indices in by_category.values()
        for start in range(0, len(indices), size)
    )


def warm_up(arms: Mapping[str, Arm], workload: Workload) -> None:
    """One short answer per arm to a prompt that is not measured; what it logs is thrown away."""
    settings = {**workload.settings, "max_new_tokens": _WARM_UP_TOKENS, "ignore_eos": True}
    prompt: Any = _WARM_UP if workload.raw else [{"role": "user", "content": _WARM_UP}]
    for arm in arms.values():
        arm.generate([prompt] * workload.concurrency, **settings)
        arm.take_events()


def measure(arms: Mapping[str, Arm], workload: Workload, blocks: Sequence[Sequence[int]]) -> Iterator[ArmRun]:
    """Every arm on every block, in an order shuffled per block."""
    for block, prompts in enumerate(blocks):
        order = list(arms)
        random.Random(f"{workload.seed}/{block}").shuffle(order)
        for place, drafter in enumerate(order):
            yield _run_arm(arms[drafter], workload, drafter=drafter, block=block, place=place, prompts=tuple(prompts))


def _run_arm(arm: Arm, workload: Workload, *, drafter: str, block: int, place: int, prompts: tuple[int, ...]) -> ArmRun:
    requests = [workload.request(index) for index in prompts]
    error, results = None, []
    began = perf_counter()
    try:
        results = arm.generate(requests, **workload.settings)
    except DraftsmithError as failure:
        error = str(failure)
    seconds = perf_counter() - began
    events = arm.take_events()
    if error is None:
        error = next((f"ended as {result.finish_reason}" for result in results if not _is_whole(result)), None)
    if error is not None:
        return ArmRun(
            block=block, drafter=drafter, order=place, prompts=prompts, seconds=seconds, outputs=(), error=error
        )
    # An engine numbers its requests as they are submitted, in the order of the list.
    ids = sorted({record.request for record in events.requests})
    outputs = [
        Output(
            prompt=index,
            prompt_id=workload.prompts[index].prompt_id,
            category=workload.prompts[index].category,
            request=request,
            prompt_tokens=result.prompt_tokens,
            token_ids=tuple(result.token_ids),
            text=result.text,
            finish_reason=result.finish_reason,
        )
        for index, request, result in zip(prompts, ids, results, strict=True)
    ]
    return ArmRun(
        block=block,
        drafter=drafter,
        order=place,
        prompts=prompts,
        seconds=seconds,
        outputs=tuple(outputs),
        events=events,
    )


def _is_whole(result: Any) -> bool:
    return result.finish_reason in ("stop", "length")
