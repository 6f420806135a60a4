"""The default controller: draft what pays, stop where it does not, notice at once when that changes.

Called by the engine around drafting. Takes the nodes whose expected tokens (`control.acceptance`) are worth
their rows (`control.cost`) at the current speed. Where looking is cheap, drafters always propose and are cut
afterwards; a cut node is still judged by what the target emitted, so exploring costs no row. Where drafting
is dear, or what is drawn must stay, it decides before, and probes ever more rarely while nothing pays.
Invariants: only point masses are cut; nothing else looks at drafted tokens; no clock is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.acceptance import Calibration, RequestOdds, Trial, cell_of
from draftsmith.control.base import Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.cost import KNOTS, PlaneCost, RowCost, knot_of
from draftsmith.core.tree import cut, depths, is_chain
from draftsmith.core.types import Proposal, ProposalKind, Tree
from draftsmith.errors import OptionError

_MIN_REACH = 0.02  # a node less likely to be reached than this is not worth looking at
_PROBE_NODES = 2
_SPEED_MEMORY = 0.97  # share of the measured speed-up kept per step
_CHAINS = tuple(tuple(range(-1, num_drafted)) for num_drafted in range(65))


@dataclass(frozen=True, kw_only=True)
class BackoffOptions:
    """Options of the back-off controller.

    `max_draft`: most nodes per request and step. `margin`: expected tokens must exceed their price by this
    share. `cheap_look`: drafting that costs at most this share of a plain step is always done. `probe_min`,
    `probe_max`: tokens between two probes of a request that drafts nothing, first and at most; the distance
    doubles with each probe that changes nothing.
    """

    max_draft: int = 16
    margin: float = 0.1
    cheap_look: float = 0.03
    probe_min: int = 8
    probe_max: int = 64

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise OptionError(f"backoff: max_draft is {self.max_draft}; it must be at least 1")
        if self.margin < 0:
            raise OptionError(f"backoff: margin is {self.margin}; it must be at least 0")
        if self.cheap_look < 0:
            raise OptionError(f"backoff: cheap_look is {self.cheap_look}; it must be at least 0 (0 = never cheap)")
        if not 1 <= self.probe_min <= self.probe_max:
            raise OptionError(
                f"backoff: probe_min {self.probe_min} and probe_max {self.probe_max} must satisfy "
                "1 <= probe_min <= probe_max"
            )


@final
class _DrafterState:
    """What is known of one drafter, whoever it drafted for."""

    __slots__ = ("calibration", "draft_cost", "draws", "is_timed")

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.draft_cost = PlaneCost()  # requests asked, depth reached
        self.is_timed = False
        self.draws = False


@final
class _Request:
    """What is known of one live request.

    `proposal` is this step's, before any cut. `is_warm`: it drafted in the last step, so its drafter has
    nothing to catch up with. `draws`: its proposals are drawn, so they cannot be cut afterwards.
    `plain_tokens`: emitted since it last drafted; `distance`: when to probe.
    """

    __slots__ = ("distance", "drafter", "draws", "is_warm", "odds", "plain_tokens", "probing", "proposal")

    def __init__(self, drafter: _DrafterState, distance: int) -> None:
        self.drafter = drafter
        self.odds = RequestOdds()
        self.proposal: Proposal | None = None
        self.is_warm = False
        self.draws = drafter.draws  # as far as one can tell from other requests
        self.distance = distance
        self.plain_tokens = 0
        self.probing = False

    def reaches(self, proposal: Proposal) -> list[float]:
        """P(accepted) of a proposal's nodes, hopeless ones left out."""
        return self.drafter.calibration.reaches(proposal.tree.parents, proposal.confidence, self.odds, _MIN_REACH)


@final
class BackoffController(Controller):
    """Drafts what pays."""

    Options = BackoffOptions

    def __init__(self, options: BackoffOptions) -> None:
        self._options = options
        self._rows = RowCost()
        self._sampling = PlaneCost()  # tokens emitted, rows
        self._drafters: dict[str, _DrafterState] = {}
        self._requests: dict[int, _Request] = {}
        self._asked: list[_Request] = []
        self._depth = 0
        self._sees_tokens = True
        # Decayed sums of what steps emitted and cost, both relative to plain steps.
        self._emitted = self._spent = 1.0

    @classmethod
    def create(cls, options: BackoffOptions) -> Self:
        """Make the controller."""
        return cls(options)

    # -- before drafting --------------------------------------------------------------------------

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """As much as makes sense where looking is cheap, what is expected to pay where it is dear."""
        most = self._options.max_draft
        budgets = [min(signal.max_draft, most) for signal in signals]
        requests = [self._request(signal) for signal in signals]
        dear: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            request.proposal = None
            request.probing = False
            if request.draws or not self._is_cheap(request.drafter, len(signals), budgets[index]):
                dear.setdefault(id(request.drafter), []).append(index)
        for indices in dear.values():
            self._ration(indices, requests, budgets)
        self._asked = [request for request, budget in zip(requests, budgets, strict=True) if budget]
        self._depth = 0
        return budgets

    def _request(self, signal: RequestSignal) -> _Request:
        request = self._requests.get(signal.sequence_id)
        if request is None:
            drafter = self._drafters.get(signal.drafter)
            if drafter is None:
                drafter = self._drafters[signal.drafter] = _DrafterState()
            request = self._requests[signal.sequence_id] = _Request(drafter, self._options.probe_min)
        return request

    def _is_cheap(self, drafter: _DrafterState, num_requests: int, depth: int) -> bool:
        if not self._sees_tokens or not drafter.is_timed:
            return False
        cost = drafter.draft_cost
        look = cost.first * num_requests + cost.second * depth
        return look <= self._options.cheap_look * self._rows.seconds(num_requests)

    def _ration(self, indices: Sequence[int], requests: Sequence[_Request], budgets: list[int]) -> None:
        """Budgets of requests whose common drafter is dear: by expectation, or a probe when one is due."""
        drafter = requests[indices[0]].drafter
        found: list[tuple[float, int, int]] = []
        for index in indices:
            reaches = drafter.calibration.plan(requests[index].odds, budgets[index], _MIN_REACH)
            found.extend([(reach, -depth, index) for depth, reach in enumerate(reaches, start=1)])
            budgets[index] = min(budgets[index], _PROBE_NODES)
        found.sort(reverse=True)
        chosen = self._worth([reach for reach, _, _ in found], len(requests), found, drafter.draft_cost)
        planned = dict.fromkeys(indices, 0)
        for _, _, index in found[:chosen]:
            planned[index] += 1
        for index, count in planned.items():
            request = requests[index]
            if count:
                budgets[index] = count if drafter.is_timed else min(count, budgets[index])
                request.distance = self._options.probe_min
            elif request.plain_tokens >= request.distance:
                request.probing = True
                request.distance = min(2 * request.distance, self._options.probe_max)
            else:
                budgets[index] = 0
                request.is_warm = False
            if budgets[index]:
                request.plain_tokens = 0

    # -- after drafting ---------------------------------------------------------------------------

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Cut point masses to the nodes that pay; proposals of drawn tokens stay as they are."""
        asked = self._asked
        if len(proposals) != len(asked):
            return proposals  # the engine dropped requests: nobody knows which proposal is whose
        base_rows = len(asked)
        found: list[tuple[float, int]] = []
        for index, proposal in enumerate(proposals):
            num_drafted = len(proposal.tree.parents) - 1
            if not num_drafted:
                continue
            request = asked[index]
            request.proposal = proposal
            request.draws = request.drafter.draws = proposal.kind is not ProposalKind.POINT_MASS
            self._depth = max(self._depth, _depth_of(proposal.tree.parents))
            if self._sees_tokens and not request.draws:
                found.extend([(reach, -index) for reach in request.reaches(proposal)])
            else:
                base_rows += num_drafted
        found.sort(reverse=True)
        chosen = self._worth([reach for reach, _ in found], base_rows)
        counts = [0] * len(proposals)
        for _, index in found[:chosen]:
            counts[-index] += 1
        return [
            proposal
            if proposal.kind is not ProposalKind.POINT_MASS or not self._sees_tokens
            else _cut(proposal, counts[index])
            for index, proposal in enumerate(proposals)
        ]

    def _worth(
        self,
        reaches: Sequence[float],
        base_rows: int,
        nodes: Sequence[tuple[float, int, int]] = (),
        draft_cost: PlaneCost | None = None,
    ) -> int:
        """How many of the most likely nodes to take: most tokens above what their time would bring anyway.

        `reaches` descends. With `draft_cost` the nodes (reach, -depth, request) are still to be drafted.
        """
        relative, scale = self._rows.relative, self._rows.scale
        num_requests = max(len(self._asked), 1) if draft_cost is None else base_rows
        plain = self._plain_seconds(num_requests)
        if plain <= 0.0:
            return 0  # the first step is a plain one: it sets the price
        rate = max(self._emitted / self._spent, 1.0) * num_requests / plain
        price = rate * (1.0 + self._options.margin)
        token_value = 1.0 - rate * self._sampling.first
        row_price = price * self._sampling.second
        base = relative[knot_of(base_rows)]
        best = taken = depth = 0
        best_value = total = drafting = 0.0
        # Twice the rows seen so far at most: a staircase is climbed step by step.
        most = min(len(reaches), max(2 * self._rows.num_explored - base_rows, 1))
        for knot in range(knot_of(base_rows + 1), len(KNOTS)):
            rows = min(KNOTS[knot] - base_rows, most)
            for place in range(taken, rows):
                total += reaches[place]
                if draft_cost is not None:
                    depth = max(depth, -nodes[place][1])
            taken = rows
            if draft_cost is not None:
                drafting = draft_cost.second * depth + draft_cost.first * num_requests
            value = total * token_value - price * (scale * (relative[knot] - base) + drafting) - row_price * rows
            if value > best_value:
                best, best_value = rows, value
            if rows == most:
                break
        return best

    def _plain_seconds(self, num_requests: int) -> float:
        """Expected seconds of a step in which nobody drafts."""
        return self._rows.seconds(num_requests) + (self._sampling.first + self._sampling.second) * num_requests

    # -- after the step ---------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Learn the step's costs and what became of every drafted node."""
        num_requests = len(outcomes)
        emitted = 0
        for outcome in outcomes:
            emitted += outcome.num_emitted
            request = self._requests.get(outcome.sequence_id)
            if request is not None:
                self._judge(request, outcome)
        self._rows.observe(seconds.rows, seconds.verify)
        self._sampling.observe(emitted, seconds.rows, seconds.sample)
        spent = self._rows.seconds(seconds.rows)
        spent += self._sampling.first * emitted + self._sampling.second * seconds.rows
        if self._asked:
            spent += self._time_drafting(seconds.draft)
        self._emitted = _SPEED_MEMORY * self._emitted + emitted / num_requests
        self._spent = _SPEED_MEMORY * self._spent + spent / self._plain_seconds(num_requests)

    def _time_drafting(self, seconds: float) -> float:
        """Learn what this step's drafting cost; returns what it is estimated to cost."""
        asked, self._asked = self._asked, []
        drafter = asked[0].drafter
        if any(request.drafter is not drafter for request in asked):
            return 0.0  # nobody can say whose time it was
        cost = drafter.draft_cost
        expected = cost.first * len(asked) + cost.second * self._depth
        if all(request.is_warm for request in asked):
            cost.observe(len(asked), self._depth, seconds)
            drafter.is_timed = True
        elif drafter.is_timed and seconds < expected:
            cost.observe(len(asked), self._depth, seconds)  # even with catching up it was cheaper than thought
        for request in asked:
            request.is_warm = True
        return expected

    def _judge(self, request: _Request, outcome: RequestOutcome) -> None:
        request.plain_tokens += outcome.num_emitted
        proposal, request.proposal = request.proposal, None
        if proposal is None:
            return
        if not outcome.tokens and outcome.num_emitted:
            self._sees_tokens = False
        trials = _trials(proposal, outcome)
        if trials:
            request.drafter.calibration.observe(trials, request.odds)
        if request.probing and trials and trials[0][1]:
            # Something is there again: look once more at the next step instead of after the usual distance.
            request.distance = max(request.distance // 2, self._options.probe_min)
            request.plain_tokens = request.distance

    def forget(self, sequence_id: int) -> None:
        """Drop what was known of a request; its drafter's record stays."""
        self._requests.pop(sequence_id, None)


def _is_chain(parents: tuple[int, ...]) -> bool:
    return parents == _CHAINS[len(parents) - 1] if len(parents) <= len(_CHAINS) else is_chain(parents)


def _depth_of(parents: tuple[int, ...]) -> int:
    return len(parents) - 1 if _is_chain(parents) else max(depths(parents))


def _cut(proposal: Proposal, num_drafted: int) -> Proposal:
    """As `core.tree.cut`, quicker for chains."""
    tree, confidence = proposal.tree, proposal.confidence
    if num_drafted >= len(tree.parents) - 1:
        return proposal
    if not num_drafted:
        return Proposal.empty(tree.tokens[0])
    if not _is_chain(tree.parents):
        return cut(proposal, num_drafted)
    end = num_drafted + 1
    return Proposal(Tree(tree.tokens[:end], tree.parents[:end]), confidence=confidence[:end] if confidence else None)


def _trials(proposal: Proposal, outcome: RequestOutcome) -> list[Trial]:
    """What a step says about the nodes of a proposal, cut ones included where the emitted tokens are known."""
    parents, tokens, confidence = proposal.tree.parents, proposal.tree.tokens, proposal.confidence
    emitted, found = outcome.tokens, []
    if emitted and _is_chain(parents):
        for node in range(1, min(len(emitted) + 1, len(parents))):
            accepted = tokens[node] == emitted[node - 1]
            found.append((cell_of(node, confidence[node] if confidence else 0.0), accepted))
            if not accepted:
                break
        return found
    node = 0
    known = outcome.num_emitted if emitted else min(outcome.num_emitted, outcome.num_accepted + 1, outcome.depth)
    for place in range(known):
        followed = 0
        for child in range(node + 1, len(parents)):
            if parents[child] != node:
                continue
            if emitted:
                accepted = tokens[child] == emitted[place]
            else:  # without the tokens the first child is taken to be the one that was accepted
                accepted = not followed and place < outcome.num_accepted
            found.append((cell_of(place + 1, confidence[child] if confidence else 0.0), accepted))
            if accepted:
                followed = child
        if not followed:
            break
        node = followed
    return found
