"""What a benchmark measures: one arm's work on one block of prompts, request by request.

Made by the runner, stored by the bundle, read by the summary and the report. Invariant: an `ArmRun` holds
everything its numbers are computed from; a failed request holds its error and enters no number but the count
of failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.bench.arms import Counters
from draftsmith.core.stats import EventLog

BASELINE = "none"
"""The arm every other is compared with where there is one of that name: plain decoding through our engine."""


@dataclass(frozen=True, kw_only=True)
class RequestRun:
    """One request of an arm: a turn of a prompt. Times are seconds from the start of its block.

    `prompt`: index in the workload. `due`: when it should have been sent (an open loop decides that, a closed one
    sends when a place is free), `sent`: when it was. `arrivals`: when tokens became visible, and how many.
    `token_ids`: None where the engine tells only text. `request`: its number in the arm's event log, None without
    one. `counted_by`: how its tokens were counted, where it was not by their ids. `total_variation`: per token, under a
    lossy rule. `error`: why it failed.
    """

    prompt: int
    turn: int
    prompt_id: str
    category: str
    due: float
    sent: float
    ended: float
    prompt_tokens: int = 0
    num_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str = ""
    arrivals: tuple[tuple[float, int], ...] = ()
    request: int | None = None
    counters: Counters | None = None
    counted_by: str | None = None
    total_variation: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm on one block, in one repeat. `order`: its place among the block's arms. `seconds`: wall time of all.

    `counters`: of the whole block, where an engine tells them for all requests together.
    """

    repeat: int
    block: int
    arm: str
    order: int
    seconds: float
    requests: tuple[RequestRun, ...]
    events: EventLog = field(default_factory=EventLog)
    counters: Counters | None = None
    memory_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every request was answered: only then do its tokens and seconds make a speed."""
        return bool(self.requests) and all(request.error is None for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens written, those of prompt steps included."""
        return sum(request.num_tokens for request in self.requests)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where an arm's tokens leave the baseline's.

    `position`: output position of the first difference. `gap`: how far apart the target scored the two
    tokens there (log-probability, noise added when sampling); None when it could not be found out.
    """

    position: int
    gap: float | None


@dataclass(frozen=True)
class Key:
    """Which answer: of an arm, to a turn of a prompt. Later repeats write the same or are `unsteady`."""

    arm: str
    prompt: int
    turn: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A whole run: its configuration, what was measured, where arms differ from the baseline.

    `failed`: prompts that no arm could take, by index, with the reason. `interrupted`: it was stopped early.
    `other_cores`: cores that other programs kept busy meanwhile, None where unknown.
    """

    config: Mapping[str, Any]
    runs: tuple[ArmRun, ...]
    differences: Mapping[Key, Difference]
    failed: Mapping[int, str]
    interrupted: bool = False
    other_cores: float | None = None
