"""What a caller gets back: events while tokens come, a result when a sample has ended.

Called by the Python API, the benchmark and the command line. Invariant: ids, text, logprobs, origins
and statistics of one sample all end at the same token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Origin(enum.StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    """Drafted and kept."""
    CORRECTED = "corrected"
    """The target's own token where it left the draft."""
    BONUS = "bonus"
    """The target's own token after a fully accepted draft."""
    PLAIN = "plain"
    """Nothing was drafted in this step."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the untransformed target law, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step emitted for one sample.

    `text` is whole characters only; what may still become part of a stop string is held back.
    `finish_reason` is set on the last event: "stop", "length" or "cancelled".
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """Counts and times of one sample. Steps and drafts leave prompt steps out (as tokens per step does).

    `request`: its number in the engine's event log.
    """

    request: int
    drafter: str
    seed: int
    prompt_tokens: int
    reused_tokens: int
    emitted_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_step: float
    preemptions: int
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished sample. With `n` > 1 the first sample's result carries all in `samples`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    origins: tuple[Origin, ...]
    prompt_tokens: int
    statistics: RequestStatistics
    samples: tuple[GenerationResult, ...] = ()
