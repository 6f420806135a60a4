"""What a caller gets back: events while tokens come, a result when a sample has ended.

Called by the Python API, the benchmark and the command line. Invariant: ids, text, logprobs, origins
and statistics of one sample all end at the same token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from draftsmith.core.fidelity import Fidelity


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
    `finish_reason` is set on the last event: "stop", "length" or "cancelled". `fidelity`: what the text is worth;
    `costs`: under a lossy rule, for each token the total variation between its law and the target's.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    fidelity: Fidelity = Fidelity.EXACT
    costs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """Counts and times of one sample. Steps and drafts leave prompt steps out (as tokens per step does).

    `request`: its number in the engine's event log. `rule`: with its parameters; `fidelity`: what the text is worth
    under it. `total_variation`: under a lossy rule, between the laws of its tokens and the target's, per token.
    """

    request: int
    drafter: str
    rule: str
    fidelity: Fidelity
    total_variation: float | None
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
