"""What a benchmark measures: one arm's work on one block of prompts.

Made by the runner, stored by the bundle, read by the summary. Invariant: an `ArmRun` holds everything its
numbers are computed from; a failed one holds its error and no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.stats import EventLog

BASELINE = "none"
"""The arm every other is compared with: plain decoding through the same engine."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an arm wrote for one prompt. `prompt`: index in the workload. `request`: its id in the event log."""

    prompt: int
    prompt_id: str
    category: str
    request: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm on one block. `order`: its place among the block's arms. `seconds`: wall time of the whole block."""

    block: int
    drafter: str
    order: int
    prompts: tuple[int, ...]
    seconds: float
    outputs: tuple[Output, ...]
    events: EventLog = field(default_factory=EventLog)
    error: str | None = None

    @property
    def emitted(self) -> int:
        """Tokens written, those of prompt steps included."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where an arm's tokens leave the baseline's.

    `position`: output position of the first difference. `gap`: how far apart the target scored the two
    tokens there (log-probability, noise added when sampling); None when it could not be found out.
    """

    position: int
    gap: float | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A whole run: its configuration, what was measured, where arms differ by (drafter, prompt index).

    `failed`: prompts that no arm could take, by index, with the reason. `interrupted`: it was stopped early.
    `other_cores`: cores that other programs kept busy meanwhile, None where unknown.
    """

    config: Mapping[str, Any]
    runs: tuple[ArmRun, ...]
    differences: Mapping[tuple[str, int], Difference]
    failed: Mapping[int, str]
    interrupted: bool = False
    other_cores: float | None = None
