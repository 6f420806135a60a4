"""transformers' two rules for assisted generation: two more after a clean sweep, and stop where the draft is unsure.

The length of a request grows by two when everything drafted was accepted and shrinks by one when not. The confidence
threshold is tuned while it runs: of the thresholds that were seen, the one that least often goes on in vain or stops
too early, which is three times as bad (false positive rate + 3 x false negative rate on the ROC curve). Source:
transformers' candidate generator, restated. Invariant: confidences are those judged before a draw, so stopping never
looks at a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.base import MAX_NODES, Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.trials import trials_of
from draftsmith.core.types import Proposal
from draftsmith.errors import OptionError

_MISSED_WEIGHT = 3.0
_LEAST_TRIALS, _MOST_TRIALS = 6, 100_000  # all of them are sorted at each look
_TUNE_EVERY = 4  # steps between two looks at the curve


@dataclass(frozen=True, kw_only=True)
class HeuristicOptions:
    """Options of the heuristic.

    `start`: draft length of a new request. `max_draft`: longest draft length. `threshold`: confidence below which
    drafting stops, to begin with (0: never stops). `online`: tune the threshold. `memory`: trials it is tuned on.
    """

    start: int = 5
    max_draft: int = 20
    threshold: float = 0.4
    online: bool = True
    memory: int = 400

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.max_draft <= MAX_NODES:
            raise OptionError(
                f"heuristic: start {self.start} and max_draft {self.max_draft} need "
                f"1 <= start <= max_draft <= {MAX_NODES}"
            )
        if not 0 <= self.threshold < 1:
            raise OptionError(f"heuristic: threshold is {self.threshold}; allowed: at least 0, below 1")
        if not _LEAST_TRIALS <= self.memory <= _MOST_TRIALS:
            raise OptionError(f"heuristic: memory is {self.memory}; allowed: {_LEAST_TRIALS} to {_MOST_TRIALS}")


def best_threshold(trials: Sequence[tuple[float, bool]]) -> float | None:
    """The confidence at and above which to go on: least false positive rate + 3 x false negative rate.

    `trials`: confidence, and whether the token was accepted. The highest among equals; None while one outcome lacks.
    """
    accepted = sum([good for _, good in trials])
    rejected = len(trials) - accepted
    if not accepted or not rejected:
        return None
    best, best_cost = None, float("inf")
    hits = false_alarms = 0
    ordered = sorted(trials, reverse=True)
    for place, (confidence, good) in enumerate(ordered):
        hits += good
        false_alarms += not good
        if place + 1 < len(ordered) and ordered[place + 1][0] == confidence:
            continue
        cost = false_alarms / rejected + _MISSED_WEIGHT * (1.0 - hits / accepted)
        if cost < best_cost - 1e-12:
            best, best_cost = confidence, cost
    return best


@final
class HeuristicController(Controller):
    """transformers' rules: two more after a clean sweep, one less otherwise, and a stop where the draft is unsure."""

    Options = HeuristicOptions

    def __init__(self, options: HeuristicOptions) -> None:
        self._options = options
        self.threshold = options.threshold
        self._lengths: dict[int, int] = {}
        self._trials: deque[tuple[float, bool]] = deque(maxlen=options.memory)
        self._asked: list[int] = []
        self._proposals: dict[int, Proposal] = {}
        self._first_tokens = 0
        self._steps = 0

    @classmethod
    def create(cls, options: HeuristicOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """Each request's own length."""
        budgets = [
            min(self._lengths.setdefault(signal.sequence_id, self._options.start), signal.max_draft)
            for signal in signals
        ]
        self._asked = [signal.sequence_id for signal in signals]
        self._first_tokens = len(signals)
        self._proposals.clear()
        return budgets

    def keep_drafting(self, confidence: float) -> bool:
        """One token is always drafted, so that there is something to learn from."""
        if self._first_tokens:
            self._first_tokens -= 1
            return True
        return confidence >= self.threshold

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Nothing is cut."""
        if len(proposals) == len(self._asked):
            self._proposals = dict(zip(self._asked, proposals, strict=True))
        return proposals

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Lengths move; every few steps the threshold does."""
        for outcome in outcomes:
            length = self._lengths.get(outcome.sequence_id)
            if length is None or not outcome.num_drafted:
                continue
            change = 2 if outcome.num_accepted == outcome.depth else -1
            self._lengths[outcome.sequence_id] = min(max(length + change, 1), self._options.max_draft)
            proposal = self._proposals.get(outcome.sequence_id)
            if proposal is not None and proposal.confidence is not None:
                self._trials.extend([(item.confidence, item.accepted) for item in trials_of(proposal, outcome)])
        self._steps += 1
        if self._options.online and self._steps % _TUNE_EVERY == 0 and len(self._trials) >= _LEAST_TRIALS:
            found = best_threshold(list(self._trials))
            self.threshold = self.threshold if found is None else found

    def forget(self, sequence_id: int) -> None:
        """Drop a request's length."""
        self._lengths.pop(sequence_id, None)
