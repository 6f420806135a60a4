"""The acceptance figures that other projects publish, computed side by side from one event log.

Called by the benchmark, so that a number found elsewhere can be compared with the right one of ours.
Invariant: each entry carries its definition; `core.stats` alone defines what a pair is. Counters of the
engines below go on to the end of an accepted block even where a stop rule has ended the text; this log
ends at the stop, so on short answers their own figures can be slightly higher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from draftsmith.core.stats import EventLog, Summary, request_totals, summarise

Value: TypeAlias = float | tuple[float, ...] | None


@dataclass(frozen=True)
class Convention:
    """One published figure. `value`: None where the convention yields none; a tuple is one per depth."""

    name: str
    definition: str
    value: Value


def published(log: EventLog) -> tuple[Convention, ...]:
    """Every convention's value for a log."""
    summary = summarise(log)
    return tuple(Convention(name, definition, rule(log, summary)) for name, definition, rule in _TABLE)


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _accepted_and_one_per_pair(_: EventLog, summary: Summary) -> Value:
    return _over(summary.accepted + summary.pairs, summary.pairs)


def _accepted_and_one_per_draft(_: EventLog, summary: Summary) -> Value:
    return _over(summary.accepted + summary.drafts, summary.drafts)


def _per_position(_: EventLog, summary: Summary) -> Value:
    return tuple(wins / summary.drafts for wins in summary.successes) if summary.drafts else None


def _completion_over_pairs(_: EventLog, summary: Summary) -> Value:
    return _over(summary.emitted + summary.prompt_emitted, summary.pairs)


def _mean_of_request_means(log: EventLog, _: Summary) -> Value:
    totals = request_totals(log).values()
    return _over(sum(emitted / pairs for emitted, pairs in totals), len(totals))


def _token_weighted(log: EventLog, summary: Summary) -> Value:
    return _over(sum(record.emitted**2 for record in log.pairs()), summary.emitted)


_Rule: TypeAlias = Callable[[EventLog, Summary], Value]
_TABLE: tuple[tuple[str, str, _Rule], ...] = (
    (
        "Draftsmith tokens per step",
        "emitted tokens per pair, pooled; bonus included, prompt steps left out, cut at stop rules",
        lambda _, summary: summary.tokens_per_step,
    ),
    (
        "Draftsmith accepted over evaluated",
        "accepted drafts over depths that verification decided, up to the first rejection",
        lambda _, summary: summary.accepted_over_evaluated,
    ),
    (
        "Spec-Bench mean accepted tokens",
        "mean over all steps of accepted drafts + 1; steps without a draft count, the last step is not cut at EOS",
        _accepted_and_one_per_pair,
    ),
    (
        "EAGLE tau",
        "tokens per drafting-verification cycle: accepted drafts + 1, over steps that drafted, not cut at EOS",
        _accepted_and_one_per_draft,
    ),
    (
        "vLLM mean acceptance length",
        "1 + accepted drafts / drafts, a draft being a request's step with at least one drafted token",
        _accepted_and_one_per_draft,
    ),
    (
        "vLLM per-position acceptance rate",
        "per depth: drafts accepted that far over all drafts, shorter ones included",
        _per_position,
    ),
    ("vLLM draft acceptance rate", "accepted over drafted tokens", lambda _, summary: summary.accepted_over_drafted),
    (
        "SGLang accept length",
        "server counter: accepted drafts + 1 per request and verification, pooled",
        _accepted_and_one_per_pair,
    ),
    (
        "SGLang completion tokens per verification",
        "completion tokens, the prompt step's one included, over verifications",
        _completion_over_pairs,
    ),
    ("llama.cpp draft acceptance", "accepted over drafted tokens", lambda _, summary: summary.accepted_over_drafted),
    ("transformers", "publishes no acceptance figure", lambda _log, _summary: None),
    (
        "mean of per-request means",
        "tokens per step of each request, averaged over requests (long and short answers weigh the same)",
        _mean_of_request_means,
    ),
    (
        "token-weighted mean",
        "for each emitted token the tokens emitted by its step, averaged over tokens (larger than the others)",
        _token_weighted,
    ),
)
