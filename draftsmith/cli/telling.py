"""Collects what is said about an answer: its tokens, its time, its one-line summary.

Called by `generate`, `chat` and the demo. Invariant: time spent writing to the terminal is not counted,
only time spent waiting for tokens; counts come from the event log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final

from draftsmith.core.fidelity import Fidelity
from draftsmith.core.stats import EventLog, Summary, summarise
from draftsmith.engine.results import Origin, TokenEvent


@final
@dataclass
class Answer:
    """One answer while it comes, and its figures afterwards. `rule`: as it was asked for."""

    rule: str = "coupling"
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    origins: Counter[Origin] = field(default_factory=Counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0
    events: EventLog = field(default_factory=EventLog)
    fidelity: Fidelity = Fidelity.EXACT
    cost: float = 0.0

    def timed(self, stream: Iterator[TokenEvent]) -> Iterator[TokenEvent]:
        """Pass a stream's events through, taking down tokens and the time spent waiting for them."""
        while True:
            began = perf_counter()
            try:
                event = next(stream, None)
            finally:
                self.seconds += perf_counter() - began
            if event is None:
                return
            self.token_ids.extend(event.token_ids)
            if event.token_ids:
                self.arrivals.append((self.seconds, len(event.token_ids)))
            self.text += event.text
            self.origins.update(event.origins)
            self.fidelity = event.fidelity
            self.cost += sum(event.costs or ())
            self.finish_reason = event.finish_reason or self.finish_reason
            yield event

    def close(self, events: EventLog) -> None:
        """Take the event log of this answer."""
        self.events = events

    @property
    def request(self) -> int:
        """The answer's id in its event log."""
        return self.events.requests[0].request

    @property
    def counts(self) -> Summary:
        """Counts of the event log."""
        return summarise(self.events)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all waiting, prompt processing included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def total_variation(self) -> float | None:
        """Under a lossy rule, between the laws of the tokens and the target's, per token."""
        return self.cost / max(1, len(self.token_ids)) if self.fidelity is Fidelity.LOSSY else None

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        counts = self.counts
        return {
            "rule": self.rule,
            "fidelity": self.fidelity.value,
            "total_variation": self.total_variation,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "emitted_tokens": len(self.token_ids),
            "steps": counts.pairs,
            "tokens_per_step": counts.tokens_per_step,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
            "origins": {origin.value: self.origins[origin] for origin in Origin},
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def answer_line(answer: Answer) -> str:
    """The one-line summary of an answer."""
    return f"{_label([answer])}{_figures([answer])} | {answer.finish_reason}"


def totals_line(answers: Sequence[Answer]) -> str:
    """The one-line summary of several answers."""
    if not answers:
        return "nothing was said yet"
    said = f"{len(answers)} answer{'s' if len(answers) > 1 else ''}"
    return f"{_label(answers)}{said} | {_figures(answers)}"


def _label(answers: Sequence[Answer]) -> str:
    """What must be known of the texts before anything else; nothing where they are the target's own."""
    first = answers[0]
    if first.fidelity is Fidelity.EXACT:
        return ""
    if first.fidelity is Fidelity.SYNTHETIC:
        return f"SYNTHETIC, the text means nothing (rule {first.rule}) | "
    cost = sum(answer.cost for answer in answers) / max(1, sum(len(answer.token_ids) for answer in answers))
    return f"LOSSY, total variation {cost:.3f} per token (rule {first.rule}) | "


def _figures(answers: Sequence[Answer]) -> str:
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    counts = [answer.counts for answer in answers]
    pairs = sum(item.pairs for item in counts)
    parts = [f"{tokens} tokens in {seconds:.1f} s"]
    if seconds:
        parts.append(f"{tokens / seconds:.1f} tokens/s")
    if pairs:
        parts.append(f"{sum(item.emitted for item in counts) / pairs:.2f} tokens per step")
        drafted, accepted = sum(item.drafted for item in counts), sum(item.accepted for item in counts)
        parts.append(f"{accepted} of {drafted} drafted tokens accepted" if drafted else "nothing drafted")
    return " | ".join(parts)
