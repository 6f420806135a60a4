"""DSpark's hardware-aware prefix scheduler: everybody drafts, and the batch verifies the prefixes that pay together.

Survivals of all requests' nodes are sorted; nodes are admitted while tokens per step times steps per second grow
(DSpark, 2607.05147, section on scheduling). Two forms. `stale=0`: decided on the current survivals, stopping at the
first non-improvement, which is what keeps the decision from looking at tokens it drops. `stale=1` or more, the form in
production: how many nodes comes from the survivals of earlier steps by an unrestricted argmax over the jagged cost
curve, which nodes from the current ranking. Survivals come from confidences (heads, draft probabilities judged before
the draw, suffix scores) or from an online regression (`control.survival`), so it serves any drafter.
Invariants: a drawn chain is shortened only by confidences judged before its draws; other drawn proposals stay whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, final

from draftsmith.control.base import MAX_NODES, Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.cost import DraftCost
from draftsmith.control.cost_table import CostTable
from draftsmith.control.pricing import Pricing
from draftsmith.control.survival import Cells, Estimator, Logistic, Tempered
from draftsmith.control.trials import cut_to, depth_of, trials_of
from draftsmith.core.tree import is_chain, shorten
from draftsmith.core.types import Proposal, ProposalKind
from draftsmith.errors import OptionError

_ESTIMATORS: dict[str, Callable[[], Estimator]] = {"tempered": Tempered, "cells": Cells, "logistic": Logistic}
_REST_AFTER = 8  # steps in a row that admitted nothing: drafting itself is not worth it
_REST_MIN, _REST_MAX = 8, 64
_MOST_STALE = 64  # until there is a past so long everything is verified


@dataclass(frozen=True, kw_only=True)
class PrefixSchedulerOptions:
    """Options of the prefix scheduler.

    `max_draft`: nodes drafted per request. `estimator`: tempered (confidences by depth), cells (counts by depth and
    confidence) or logistic (needs no confidence). `stale`: 0 decides on current survivals up to the first
    non-improvement; n takes the number of nodes from the survivals of n steps ago. `search`: first, or argmax (the best
    point of the whole curve: refused for drawn proposals). `threshold`: without costs, cut at the first node whose
    probability is below it.
    """

    max_draft: int = 8
    estimator: str = "tempered"
    stale: int = 0
    search: str = "first"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft <= MAX_NODES:
            raise OptionError(f"prefix-scheduler: max_draft is {self.max_draft}; allowed: 1 to {MAX_NODES}")
        if self.estimator not in _ESTIMATORS:
            raise OptionError(f"prefix-scheduler: estimator is {self.estimator!r}; allowed: {', '.join(_ESTIMATORS)}")
        if self.search not in ("first", "argmax"):
            raise OptionError(f"prefix-scheduler: search is {self.search!r}; allowed: first, argmax")
        if not 0 <= self.stale <= _MOST_STALE:
            raise OptionError(f"prefix-scheduler: stale is {self.stale}; allowed: 0 to {_MOST_STALE} steps")
        if self.stale and self.search == "argmax":
            raise OptionError("prefix-scheduler: with stale the whole curve is searched anyway; leave search out")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise OptionError(f"prefix-scheduler: threshold is {self.threshold}; allowed: above 0, below 1, or none")


@dataclass(slots=True)
class _Draft:
    """A proposal of this step. `survivals`: P(accepted) of its nodes; `may_cut`: nodes may be dropped."""

    request: int
    proposal: Proposal
    survivals: list[float] = field(default_factory=list)
    may_cut: bool = False


@final
class PrefixSchedulerController(Controller):
    """DSpark's scheduler: everybody drafts, and the batch verifies the likeliest prefixes as far as they pay."""

    Options = PrefixSchedulerOptions

    def __init__(self, options: PrefixSchedulerOptions) -> None:
        self._options = options
        self.looks_at_tokens = options.search == "argmax"
        self._pricing = Pricing(0.0)
        self._estimator = _ESTIMATORS[options.estimator]()
        self._drafting = DraftCost()
        self._history: deque[list[float]] = deque(maxlen=max(options.stale, 1))
        self._asked: list[int] = []
        self._drafts: dict[int, _Draft] = {}
        self._num_requests = 0
        self._depth = 0
        self._idle_steps = self._rest = 0
        self._rest_length = _REST_MIN

    @classmethod
    def create(cls, options: PrefixSchedulerOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def start_from(self, costs: CostTable) -> None:
        """Take measured costs."""
        self._pricing.start_from(costs)

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """Everybody drafts, unless nothing was admitted for long."""
        num_requests = self._num_requests = len(signals)
        self._drafts.clear()
        self._asked = []
        self._depth = 0
        if not num_requests:
            return []
        contexts = sum([signal.context_len for signal in signals])
        self._pricing.rows.set_context(contexts / num_requests, num_requests)
        if self._rest > 0 or self._pricing.plain_seconds(num_requests) <= 0.0:
            self._rest = max(self._rest - 1, 0)
            return [0] * num_requests
        self._asked = [signal.sequence_id for signal in signals]
        return [min(self._options.max_draft, signal.max_draft) for signal in signals]

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Cut every proposal to the prefix that the batch can afford."""
        if len(proposals) != len(self._asked):
            return proposals  # the engine dropped requests: nobody knows which proposal is whose
        drafts = [self._draft(request, proposal) for request, proposal in zip(self._asked, proposals, strict=True)]
        self._drafts = {draft.request: draft for draft in drafts}
        self._depth = max((depth_of(draft.proposal.tree.parents) for draft in drafts), default=0)
        threshold = self._options.threshold
        if threshold is not None:
            return [self._cut(draft, _above(draft, threshold)) for draft in drafts]
        # Likeliest first; of equals the shallower node, then the earlier request (DSpark's order).
        nodes = [
            (-survival, place, index)
            for index, draft in enumerate(drafts)
            if draft.may_cut
            for place, survival in enumerate(draft.survivals)
        ]
        nodes.sort()
        fixed = sum([draft.proposal.tree.num_drafted for draft in drafts if not draft.may_cut])
        survivals = [-negative for negative, _, _ in nodes]
        admitted = self._admit(survivals, self._num_requests + fixed)
        self._rest_if_idle(admitted + fixed, proposals)
        counts = [0] * len(drafts)
        for _, _, index in nodes[:admitted]:
            counts[index] += 1
        return [self._cut(draft, count) for draft, count in zip(drafts, counts, strict=True)]

    def _draft(self, request: int, proposal: Proposal) -> _Draft:
        draft = _Draft(request, proposal)
        parents, confidence = proposal.tree.parents, proposal.confidence
        is_drawn = proposal.kind is not ProposalKind.POINT_MASS
        # A drawn chain may end earlier for reasons judged before its draws; a regression without confidences has none
        # but the past. Drawn siblings stay.
        draft.may_cut = not is_drawn or (is_chain(parents) and proposal.foreseen)
        reach, depth = [1.0], [0]
        estimator = self._estimator
        for node in range(1, len(parents)):
            parent = parents[node]
            depth.append(depth[parent] + 1)
            own = confidence[node] if confidence is not None else None
            reach.append(reach[parent] * estimator.probability(request, depth[node], own))
        draft.survivals = reach[1:]
        return draft

    def _admit(self, survivals: Sequence[float], base_rows: int) -> int:
        """How many of the likeliest nodes to verify."""
        if self._options.stale:
            past = self._history[0] if len(self._history) == self._history.maxlen else None
            self._history.append(list(survivals))
            # New traffic survives with 1 (SGLang) until there is a past to judge by.
            wanted = len(survivals) if past is None else self._best_count(past, base_rows, stop_early=False)
            return min(wanted, len(survivals))
        return self._best_count(survivals, base_rows, stop_early=self._options.search == "first")

    def _best_count(self, survivals: Sequence[float], base_rows: int, *, stop_early: bool) -> int:
        """argmax over the number of nodes of tokens per second; with `stop_early` the first one no better than before.

        Nothing but survivals of nodes already admitted, and of the one in question, has a part in whether it is: not
        even how far drafts got, since the token that ended one would.
        """
        drafting = self._drafting.seconds(len(self._asked), self._options.max_draft)
        tokens = float(self._num_requests)
        best, best_rate = 0, tokens / (self._seconds(base_rows) + drafting)
        for count, survival in enumerate(survivals, start=1):
            tokens += survival
            rate = tokens / (self._seconds(base_rows + count) + drafting)
            if rate > best_rate:
                best, best_rate = count, rate
            elif stop_early:
                break
        return best

    def _seconds(self, rows: int) -> float:
        pricing = self._pricing
        return pricing.rows.seconds(rows) + pricing.sampling_seconds(self._num_requests, rows)

    def _cut(self, draft: _Draft, count: int) -> Proposal:
        if not draft.may_cut:
            return draft.proposal
        if draft.proposal.kind is ProposalKind.POINT_MASS:
            return cut_to(draft.proposal, count)
        return shorten(draft.proposal, count)

    def _rest_if_idle(self, num_verified: int, proposals: Sequence[Proposal]) -> None:
        """Stop drafting for a while when nothing has been admitted for long; ever longer while that goes on."""
        if num_verified:
            self._idle_steps, self._rest_length = 0, _REST_MIN
            return
        self._idle_steps += 1
        if self._idle_steps >= _REST_AFTER and any(proposal.tree.num_drafted for proposal in proposals):
            self._rest = self._rest_length
            self._rest_length = min(2 * self._rest_length, _REST_MAX)
            self._idle_steps = _REST_AFTER - 1

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Learn costs, and what became of what was verified."""
        if self._asked:
            self._drafting.observe(len(self._asked), self._depth, seconds.draft)
        self._pricing.observe(outcomes, seconds, seconds.draft)
        for outcome in outcomes:
            draft = self._drafts.get(outcome.sequence_id)
            if draft is not None:
                trials = trials_of(draft.proposal, outcome)
                self._estimator.observe(outcome.sequence_id, trials, draft.proposal.confidence is not None)

    def forget(self, sequence_id: int) -> None:
        """Drop what was known of a request."""
        self._estimator.forget(sequence_id)


def _above(draft: _Draft, threshold: float) -> int:
    """Nodes of a chain before the first whose own probability falls below the threshold."""
    before = 1.0
    for count, survival in enumerate(draft.survivals):
        if survival < threshold * before:
            return count
        before = survival
    return len(draft.survivals)
