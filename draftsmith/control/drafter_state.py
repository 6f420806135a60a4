"""What a controller knows of one drafter and of one live request, and what it expects of drafting for it.

Used by `control.goodput`. A plan is a list of nodes not drafted yet, likeliest first: a chain, or for a drafter that
fills shapes the best tree. Invariant: a parent comes before its children in every plan, so the first n are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

from draftsmith.control.acceptance import Calibration, RankAcceptance, RequestOdds, cell_of
from draftsmith.control.base import RequestOutcome
from draftsmith.control.cost import DraftCost
from draftsmith.control.cost_table import DraftSeconds
from draftsmith.control.trials import trials_of
from draftsmith.core.tree_shapes import best_nodes
from draftsmith.core.types import DraftTraits, Proposal

MIN_REACH = 0.02
"""A node less likely to be accepted than this is not worth looking at."""
SETTLED_PENDING = 32
"""Tokens to read first that are no start: a spell without drafting, a rejected tail."""
_START_SHARE = 0.05  # of a plain step, guessed for reading one token of a prompt, before any start was seen
_PLAN_DEPTHS = 10
_PLAN_STEPS = 16  # steps that a tree once planned is used for
TreePlan: TypeAlias = list[tuple[float, tuple[int, ...]]]


@final
class DrafterState:
    """What is known of one drafter, whoever it drafted for.

    `cost`, `tree_cost`: of chains and of trees. `draws`: its last proposals were drawn, so they cannot be cut. `asks`:
    it asks before each further token, so it can be stopped on the way. `worth`: tokens that a request's look brings
    above its price, lately. `free_calibration`: of the part of a combination that costs nothing.
    `num_probes`: of all its requests.
    """

    __slots__ = (
        "_max_nodes",
        "_plans",
        "_plans_left",
        "asks",
        "calibration",
        "cost",
        "draws",
        "free_calibration",
        "num_probes",
        "ranks",
        "traits",
        "tree_cost",
        "worth",
    )  # fmt: skip

    def __init__(self, traits: DraftTraits, measured: DraftSeconds | None, max_nodes: int) -> None:
        """`max_nodes`: of any tree."""
        self.traits = traits
        self._max_nodes = max_nodes
        self.calibration = Calibration(traits.rank_accuracies)
        self.free_calibration = Calibration()
        self.ranks = RankAcceptance(traits.rank_accuracies)
        self.cost = DraftCost()
        self.tree_cost = DraftCost()
        self.draws = False
        self.asks = False
        self.num_probes = 0
        self.worth = 0.05  # until looks say otherwise
        self._plans: dict[int, TreePlan] = {}
        self._plans_left = 0
        if measured is not None:
            self.cost.start_from(measured.request, measured.level, measured.pending)

    def chain(self, odds: RequestOdds, most: int) -> list[float]:
        """P(accepted) of the nodes of a chain."""
        if self.traits.max_depth is not None:
            most = min(most, self.traits.max_depth)
        return self.calibration.plan(odds, most, MIN_REACH)

    def tree(self, odds: RequestOdds, most: int) -> TreePlan:
        """The best tree's nodes. Made anew every few steps: what it rests on moves slowly."""
        self._plans_left -= 1
        if self._plans_left <= 0:
            self._plans.clear()
            self._plans_left = _PLAN_STEPS
        class_of = round(4.0 * odds.factor) if odds.factor < 2.0 else round(odds.factor) + 6
        plan = self._plans.get(class_of)
        if plan is None:
            depths = min(self.traits.max_depth or _PLAN_DEPTHS, _PLAN_DEPTHS)
            table = self.ranks.table(self.calibration, odds.factor, depths)
            plan = self._plans[class_of] = best_nodes(table, self._max_nodes, MIN_REACH)
        return plan[:most]

    def cost_of(self, is_tree: bool) -> DraftCost:
        """Trees nobody has timed yet cost what chains do."""
        return self.tree_cost if is_tree and self.tree_cost.is_timed else self.cost

    def start_seconds(self, pending: int, plain: float) -> float:
        """What reading so many tokens first takes; a guess by a plain step's seconds before any start was seen."""
        each = self.cost.pending
        return pending * (_START_SHARE * plain if each is None else each)

    def observe(self, requests: Sequence[RequestState], depth: int, is_tree: bool, seconds: float) -> float:
        """Learn what drafting for these took; returns what it is estimated to take in the middle of a spell.

        0 where a part of the drafter drafted: that is not what it costs.
        """
        if not all(request.may_start for request in requests):
            return 0.0
        cost = self.tree_cost if is_tree else self.cost
        expected = self.cost_of(is_tree).seconds(len(requests), depth)
        pending = sum([request.pending for request in requests if request.pending > SETTLED_PENDING])
        if pending:
            cost.observe_start(pending, seconds - expected)
        elif all(request.is_warm for request in requests):
            cost.observe(len(requests), depth, seconds)
        elif cost.is_timed and seconds < expected:
            cost.observe(len(requests), depth, seconds)  # even with catching up it was cheaper than thought
        for request in requests:
            request.is_warm = True
        return expected


@final
class RequestState:
    """What is known of one live request.

    `proposal`: this step's, before any cut. `is_warm`: it drafted in the last step, so its drafter has little to catch
    up with. `plain_tokens`: emitted since it last drafted; `distance`: when to probe; `encores`: probes in a row that
    followed at once on a right one. `pending`: tokens its drafter must read first, now; `may_start`: it may.
    `emitted`: tokens so far. `barren`: looks in a row of which nothing was taken; `rest`: tokens until the next one.
    `free_odds`: of drafts of the free part of a combination.
    """

    __slots__ = (
        "barren", "distance", "drafter", "draws", "emitted", "encores", "free_odds", "is_warm", "may_start", "odds",
        "pending", "plain_tokens", "probing", "proposal", "rest",
    )  # fmt: skip

    def __init__(self, drafter: DrafterState, distance: int) -> None:
        self.drafter = drafter
        self.odds, self.free_odds = RequestOdds(), RequestOdds()
        self.proposal: Proposal | None = None
        self.is_warm = False
        self.draws = drafter.draws  # as far as one can tell from other requests
        self.distance = distance
        self.plain_tokens = 0
        self.probing = False
        self.pending = 0
        self.may_start = True
        self.emitted = self.encores = self.barren = self.rest = 0

    def reaches(self, proposal: Proposal, is_free: bool) -> list[float]:
        """P(accepted) of a proposal's nodes, hopeless ones left out; `is_free`: it is the free part's."""
        drafter = self.drafter
        calibration, odds = (drafter.free_calibration, self.free_odds) if is_free else (drafter.calibration, self.odds)
        return calibration.reaches(proposal.tree.parents, proposal.confidence, odds, MIN_REACH)

    def judge(self, outcome: RequestOutcome, is_free: bool) -> bool | None:
        """Learn what became of this step's proposal; whether its first node was right, None if there was none."""
        self.plain_tokens += outcome.num_emitted
        self.emitted += outcome.num_emitted
        self.rest -= outcome.num_emitted
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return None
        trials = trials_of(proposal, outcome)
        if not trials:
            return None
        drafter = self.drafter
        found = [(cell_of(trial.depth, trial.confidence), trial.accepted) for trial in trials]
        if is_free:
            drafter.free_calibration.observe(found, self.free_odds)
            return trials[0].accepted
        drafter.calibration.observe(found, self.odds)
        for trial in trials:
            if trial.rank:
                drafter.ranks.observe(trial.depth, trial.rank, trial.accepted)
        return trials[0].accepted
