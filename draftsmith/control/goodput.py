"""The default controller: expected tokens over measured cost, and nothing drafted where nothing pays.

Called by the engine around drafting (also by the name `auto`). Nodes of all requests compete: those are verified whose
expected tokens (`control.acceptance`) are worth the seconds they add (`control.pricing`) at the going rate. Where
looking is cheap, drafters always propose and are cut afterwards; a cut node is still judged by what the target emitted,
so exploring costs no row. Where drafting is dear, or what is drawn must stay, it decides before, how deep and whether a
chain or a tree, weighs the reading of a long prompt against what is left to gain, and probes ever more rarely while
nothing pays. Sources: TurboSpec (2406.14066), AdaSpec (2503.05096), and what back-off taught (docs/log.md).
Invariants: only point masses are cut; nothing else looks at drafted tokens; no clock is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.acceptance import cell_of
from draftsmith.control.base import MAX_NODES, Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.cost_table import CostTable
from draftsmith.control.drafter_state import SETTLED_PENDING, DrafterState, RequestState
from draftsmith.control.pricing import PROBE_NODES, Choice, Node, Pricing
from draftsmith.control.trials import cut_to, depth_of
from draftsmith.core.types import Budget, Proposal, ProposalKind
from draftsmith.errors import OptionError

_ENCORES = 2  # probes of a request at once after one that was right
_EARLY = 0.5  # of the distance after which a request probes along with another
_PROBE_SHARE = 0.1  # of the time since the last look that reading up for a probe may take
_VENTURE = 0.25  # of what is left to write: so much a first start may cost by that guess
_ANSWER_TOKENS = 128.0  # how long an answer is taken to be, before any has ended
_BARREN = 4  # looks in a row of which nothing was worth a row, after which a request may rest
_MOST_DOUBLINGS = 2  # of a rest, which begins with two tokens
_LOOK_MEMORY = 0.95  # share of what looks brought and cost kept per further look
_OWN_SHARE = 2.0  # looks cost the controller about as much again as the drafter
_CURIOSITY = 16  # one in so many stops on the way is overruled, so that what lies there stays known


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Options of the goodput controller.

    `max_draft`: most nodes per request and step. `margin`: expected tokens must exceed their price by this
    share. `cheap_look`: drafting that costs at most this share of a plain step, 0 to 1, is always done. `probe_min`:
    tokens before the first probe of a request that drafts nothing; the distance doubles with each probe that changes
    nothing. `probe_max`: tokens between two probes at most. `latency`: seconds per token promised to every request
    that brings no promise of its own. `trees`: draft trees where they pay more than chains. `measured`: use what
    `draftsmith calibrate` measured on this machine.
    """

    max_draft: int = 16
    margin: float = 0.05
    cheap_look: float = 0.03
    probe_min: int = 8
    probe_max: int = 64
    latency: float | None = None
    trees: bool = True
    measured: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft <= MAX_NODES:
            raise OptionError(f"goodput: max_draft is {self.max_draft}; allowed: 1 to {MAX_NODES}")
        if not self.margin >= 0:
            raise OptionError(f"goodput: margin is {self.margin}; it must be at least 0")
        if not 0 <= self.cheap_look <= 1:
            raise OptionError(
                f"goodput: cheap_look is {self.cheap_look}; allowed: 0 (never cheap) to 1, a share of a plain step"
            )
        if not 1 <= self.probe_min <= self.probe_max:
            raise OptionError(
                f"goodput: probe_min {self.probe_min} and probe_max {self.probe_max} must satisfy "
                "1 <= probe_min <= probe_max"
            )
        if self.latency is not None and not self.latency > 0:
            raise OptionError(f"goodput: latency is {self.latency}; allowed: seconds per token above 0, or none")


@dataclass(slots=True)
class _Stop:
    """When a draft that is under way has gone far enough: below `least` a node costs more than it brings."""

    request: RequestState
    least: float
    reach: float = 1.0
    depth: int = 0


@final
class GoodputController(Controller):
    """Drafts what pays: expected tokens over measured seconds, and nothing where nothing pays."""

    Options = GoodputOptions

    def __init__(self, options: GoodputOptions) -> None:
        self._options = options
        self._pricing = Pricing(options.margin)
        self._costs: CostTable | None = None
        self._drafters: dict[str, DrafterState] = {}
        self._requests: dict[int, RequestState] = {}
        self._asked: list[tuple[int, RequestState]] = []  # place among the signals
        self._num_requests = 0
        self._limits: list[float] | None = None
        self._depth = 0
        self._is_tree = False
        self._sees_tokens = True
        self._was_asked = False
        self._stop: _Stop | None = None
        self._num_stops = 0
        self._answers = _ANSWER_TOKENS
        self._num_answers = 0

    @classmethod
    def create(cls, options: GoodputOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def start_from(self, costs: CostTable) -> None:
        """Take measured costs, unless the options say no."""
        if self._options.measured:
            self._costs = costs
            self._pricing.start_from(costs)

    # -- before drafting --------------------------------------------------------------------------

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """As much as makes sense where looking is cheap, what is expected to pay where it is dear."""
        most = self._options.max_draft
        num_requests = self._num_requests = len(signals)
        if num_requests:
            contexts = sum([signal.context_len for signal in signals])
            self._pricing.rows.set_context(contexts / num_requests, num_requests)
        self._limits = self._promised(signals)
        self._stop = None
        self._is_tree = self._was_asked = False
        for _, request in self._asked:  # of a step that was not reported: its proposals met other tokens
            request.proposal, request.probing = None, False
        budgets: list[int] = []
        requests: list[RequestState] = []
        dear: dict[int, list[int]] = {}
        for index, signal in enumerate(signals):
            request = self._requests.get(signal.sequence_id) or self._new_request(signal)
            requests.append(request)
            request.pending = signal.pending
            request.may_start = True
            budgets.append(min(signal.max_draft, most))
            starts = not signal.traits.starts_partly or self._probe_due(request, signal)
            if not starts and not self._start_pays(request, signal, budgets[index]):
                budgets[index] = Budget(budgets[index], may_start=False)
                request.may_start = request.is_warm = False  # what is left drafts for next to nothing
            elif request.draws or not self._is_cheap(request, num_requests, budgets[index]):
                dear.setdefault(id(request.drafter), []).append(index)
            elif request.rest > 0:
                budgets[index] = 0
            elif self._may_branch(request.drafter):
                budgets[index] = self._shaped(request, budgets[index])
        for indices in dear.values():
            self._ration(indices, requests, budgets, signals)
        self._asked = [(index, requests[index]) for index in range(num_requests) if budgets[index]]
        self._depth = 0
        return budgets

    def _promised(self, signals: Sequence[RequestSignal]) -> list[float] | None:
        """Seconds per token promised to each request; None where nothing is promised to anybody."""
        default = self._options.latency
        if default is None and all(signal.latency is None for signal in signals):
            return None
        default = math.inf if default is None else default
        return [default if signal.latency is None else signal.latency for signal in signals]

    def _new_request(self, signal: RequestSignal) -> RequestState:
        drafter = self._drafters.get(signal.drafter)
        if drafter is None:
            measured = self._costs.draft.get(signal.drafter) if self._costs is not None else None
            drafter = self._drafters[signal.drafter] = DrafterState(signal.traits, measured, self._options.max_draft)
        request = self._requests[signal.sequence_id] = RequestState(drafter, self._options.probe_min)
        return request

    def _is_cheap(self, request: RequestState, num_requests: int, depth: int) -> bool:
        cost = request.drafter.cost
        if not self._sees_tokens or not cost.is_timed:
            return False
        forward = self._pricing.rows.seconds(num_requests)
        look = cost.seconds(num_requests, depth)
        if request.pending > SETTLED_PENDING:
            look += request.drafter.start_seconds(request.pending, forward)
        return look <= self._options.cheap_look * forward

    def _may_branch(self, drafter: DrafterState) -> bool:
        return self._options.trees and drafter.traits.fills_shapes

    def _shaped(self, request: RequestState, most: int) -> int:
        """The best tree of at most so many nodes, where drafting it costs nothing worth counting."""
        plan = request.drafter.tree(request.odds, most)
        if not any(path[-1] for _, path in plan):
            return most
        self._is_tree = True
        return Budget(len(plan), tuple([path for _, path in plan]))

    def _ration(
        self,
        indices: Sequence[int],
        requests: Sequence[RequestState],
        budgets: list[int],
        signals: Sequence[RequestSignal],
    ) -> None:
        """Budgets of requests whose common drafter is dear: by expectation, or a probe when one is due."""
        drafter = requests[indices[0]].drafter
        ready = [index for index in indices if self._start_pays(requests[index], signals[index], budgets[index])]
        chains = [(index, drafter.chain(requests[index].odds, budgets[index])) for index in ready]
        nodes = [(reach, -depth, index) for index, reaches in chains for depth, reach in enumerate(reaches, start=1)]
        planned, choice = self._planned(nodes, drafter, len(ready), False)
        shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
        if self._may_branch(drafter):
            plans = {index: drafter.tree(requests[index].odds, budgets[index]) for index in ready}
            nodes = [(reach, -len(path), index) for index, plan in plans.items() for reach, path in plan]
            in_tree, tree_choice = self._planned(nodes, drafter, len(ready), True)
            if tree_choice.surplus > choice.surplus:
                planned, choice = in_tree, tree_choice
                shapes = {index: tuple([path for _, path in plans[index][: planned[index]]]) for index in planned}
                if not any(path[-1] for shape in shapes.values() for path in shape):
                    shapes = {}
        # Another drafter's requests of this step may branch where these do not.
        self._is_tree = self._is_tree or bool(shapes)
        # A pass for one costs nearly what it costs for all: whoever would probe soon does so now.
        idle = [index for index in indices if index not in planned]
        early = any(self._probe_due(requests[index], signals[index]) for index in idle)
        probe = None
        if early:
            limits = self._options.probe_min, self._options.probe_max
            probe = self._pricing.probe(self._num_requests, drafter.cost, drafter.num_probes, *limits)
            for index in idle if probe is None else ():
                requests[index].plain_tokens = 0  # asked again after as many tokens: the batch may be smaller then
        alone = len(signals) == 1 and choice.num_nodes > 0 and not self._is_tree
        for index in indices:
            request, most, count = requests[index], budgets[index], planned.get(index, 0)
            if count:
                budgets[index] = count if drafter.cost.is_timed else min(count, PROBE_NODES)
                if shapes and drafter.cost.is_timed:
                    budgets[index] = Budget(count, shapes[index])
                elif alone and drafter.asks and drafter.cost.is_timed:
                    # Stopped on the way where it is not worth it, inside the drafter's own call by its own chances.
                    self._stop = self._stop_for(request, count)
                    # The part of a combination that costs nothing may go further.
                    deepest = most if drafter.traits.starts_partly else min(most, 2 * count + 1)
                    budgets[index] = Budget(deepest, least=self._stop.least)
                request.distance = self._options.probe_min
            elif probe is not None and self._probe_due(request, signals[index], _EARLY):
                request.probing = True
                drafter.num_probes += 1
                request.distance = min(2 * request.distance, probe.distance)
                budgets[index] = min(most, probe.num_nodes)
            else:
                request.is_warm, request.may_start = False, not drafter.traits.starts_partly
                budgets[index] = 0 if request.may_start else Budget(most, may_start=False)
                continue
            request.plain_tokens = 0

    def _planned(
        self, nodes: list[Node], drafter: DrafterState, num_asked: int, is_tree: bool
    ) -> tuple[dict[int, int], Choice]:
        """Nodes per request that pay, of those that could be drafted."""
        nodes.sort(reverse=True)
        cost = drafter.cost_of(is_tree)
        choice = self._pricing.choose(nodes, self._num_requests, self._num_requests, cost, num_asked, self._limits)
        planned: dict[int, int] = {}
        for _, _, index in nodes[: choice.num_nodes]:
            planned[index] = planned.get(index, 0) + 1
        return planned, choice

    def _start_pays(self, request: RequestState, signal: RequestSignal, most: int) -> bool:
        """Whether reading what the drafter lacks of a request is worth what drafting will gain on the rest of it."""
        if signal.pending <= SETTLED_PENDING:
            return True
        pricing, drafter = self._pricing, request.drafter
        plain = pricing.plain_seconds(self._num_requests)
        if plain <= 0.0:
            return False
        # An answer that has gone on for long goes on for about as long again.
        expected = max(self._answers - request.emitted, 0.5 * request.emitted, 8.0)
        left = min(expected, float(signal.remaining or signal.max_draft + 1))
        start = drafter.start_seconds(signal.pending, plain)
        if drafter.cost.pending is None and start <= _VENTURE * left * plain:
            return True  # what a start really costs is worth knowing
        reaches = drafter.chain(request.odds, most)
        nodes = [(reach, -depth, 0) for depth, reach in enumerate(reaches, start=1)]
        choice = pricing.choose(nodes, self._num_requests, self._num_requests, drafter.cost, 1)
        num_steps = left / (1.0 + sum(reaches[: choice.num_nodes]))
        rate = pricing.rate(self._num_requests) / self._num_requests
        return num_steps * choice.surplus / rate > start

    def _probe_due(self, request: RequestState, signal: RequestSignal, share: float = 1.0) -> bool:
        """Whether a request that drafts nothing shall look again: after so many tokens, at a price they can bear."""
        if request.plain_tokens < share * request.distance:
            return False
        if signal.pending <= SETTLED_PENDING:
            return True
        plain = self._pricing.plain_seconds(self._num_requests)
        start = request.drafter.start_seconds(signal.pending, plain)
        return start <= _PROBE_SHARE * request.plain_tokens * plain

    def _stop_for(self, request: RequestState, count: int) -> _Stop:
        pricing, rows = self._pricing, self._pricing.rows
        added = (rows.seconds(1 + count) - rows.seconds(1)) / count + request.drafter.cost.level
        return _Stop(request, min(pricing.rate(1) * added, 0.9))

    # -- while drafting ---------------------------------------------------------------------------

    def keep_drafting(self, confidence: float) -> bool:
        """Stop a chain of a request alone where going on costs more than what its confidences promise."""
        stop = self._stop
        self._was_asked = True
        if stop is None:
            for _, request in self._asked:
                request.drafter.asks = True
            return True
        stop.depth += 1
        request = stop.request
        probability = request.drafter.calibration.probability(cell_of(stop.depth, confidence))
        likely = probability * request.odds.factor
        stop.reach *= likely / (likely + 1.0 - probability)
        if stop.reach >= stop.least or request.probing:
            return True
        self._num_stops += 1
        return self._num_stops % _CURIOSITY == 0

    # -- after drafting ---------------------------------------------------------------------------

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Cut point masses to the nodes that pay; proposals of drawn tokens stay as they are."""
        asked = self._asked
        if len(proposals) != len(asked):
            return proposals  # the engine dropped requests: nobody knows which proposal is whose
        base_rows = self._num_requests
        found: list[Node] = []
        counts: dict[int, int] = {}
        for (index, request), proposal in zip(asked, proposals, strict=True):
            num_drafted = len(proposal.tree.parents) - 1
            if not num_drafted:
                continue
            request.proposal = proposal
            request.draws = request.drafter.draws = proposal.kind is not ProposalKind.POINT_MASS
            self._depth = max(self._depth, depth_of(proposal.tree.parents))
            if self._sees_tokens and not request.draws:
                counts[index] = 0
                found += [(reach, 0, index) for reach in request.reaches(proposal, self._is_free(request))]
            else:
                base_rows += num_drafted
        found.sort(reverse=True)
        choice = self._pricing.choose(found, self._num_requests, base_rows, limits=self._limits)
        for _, _, index in found[: choice.num_nodes]:
            counts[index] += 1
        if self._sees_tokens and asked:
            self._judge_looks(counts, choice.surplus)
        return [
            cut_to(proposal, counts[index]) if index in counts else proposal
            for (index, _), proposal in zip(asked, proposals, strict=True)
        ]

    def _judge_looks(self, counts: Mapping[int, int], surplus: float) -> None:
        """Where looks bring less than they cost, as in large batches, let requests that had nothing taken rest."""
        asked = self._asked
        drafter = asked[0][1].drafter
        if all(request.drafter is drafter for _, request in asked):
            cost = _OWN_SHARE * self._pricing.rate(self._num_requests) * drafter.cost.seconds(len(asked), self._depth)
            drafter.worth = _LOOK_MEMORY * drafter.worth + (1.0 - _LOOK_MEMORY) * (surplus - cost) / len(asked)
        for index, request in asked:
            request.barren = 0 if counts.get(index, 0) else request.barren + 1
            if request.barren >= _BARREN and request.drafter.worth < 0.0:
                request.rest = 2 << min(request.barren - _BARREN, _MOST_DOUBLINGS)

    # -- after the step ---------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Learn the step's costs and what became of every drafted node."""
        for outcome in outcomes:
            request = self._requests.get(outcome.sequence_id)
            if request is not None:
                self._judge(request, outcome)
        drafting = self._time_drafting(seconds.draft) if self._asked else 0.0
        self._pricing.observe(outcomes, seconds, drafting)

    def _is_free(self, request: RequestState) -> bool:
        """Whether the free part of a combination has drafted alone in this step: the other one would have asked."""
        drafter = request.drafter
        return drafter.traits.starts_partly and drafter.asks and not self._was_asked

    def _judge(self, request: RequestState, outcome: RequestOutcome) -> None:
        if request.proposal is not None and not outcome.tokens and outcome.num_emitted:
            self._sees_tokens = False
        was_right = request.judge(outcome, self._is_free(request))
        probing, request.probing = request.probing, False
        if was_right:
            request.barren = request.rest = 0
        if probing:
            # Something is there again: look once more at the next step instead of after the usual distance, but not
            # for ever, since what is often right need not be worth its row.
            request.encores = request.encores + 1 if was_right and request.encores < _ENCORES else 0
            if request.encores:
                request.plain_tokens = request.distance

    def _time_drafting(self, seconds: float) -> float:
        """Learn what this step's drafting cost; returns what it is estimated to cost in the middle of a spell."""
        requests = [request for _, request in self._asked]
        self._asked = []
        drafter = requests[0].drafter
        if any(request.drafter is not drafter for request in requests):
            return 0.0  # nobody can say whose time it was
        if self._is_free(requests[0]):
            return 0.0
        return drafter.observe(requests, self._depth, self._is_tree, seconds)

    def forget(self, sequence_id: int) -> None:
        """Drop what was known of a request; its drafter's record stays."""
        request = self._requests.pop(sequence_id, None)
        if request is not None and request.emitted:
            self._num_answers += 1
            self._answers += max(1.0 / (self._num_answers + 1), 0.1) * (request.emitted - self._answers)
