"""What a node is worth and what it costs: tokens expected of it against seconds of the step it makes longer.

Used by controllers that decide by costs. The going rate, tokens per second that steps bring anyway, turns seconds into
tokens, so nodes of all requests compete on one scale. Invariant: nothing here looks at a token or at a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

from draftsmith.control.base import RequestOutcome, StepSeconds
from draftsmith.control.cost import KNOTS, CalibratedRows, DraftCost, PlaneCost, RowCost, Rows, knot_of
from draftsmith.control.cost_table import CostTable

Node: TypeAlias = tuple[float, int, int]
"""P(accepted), minus the depth (so that a parent sorts before its children), which request."""

PROBE_NODES = 2
_SAME_STAIR = 1.3
_PROBE_PRICE = 0.01  # of a request's tokens that its probes may cost
_TURNS = 0.05  # chance that a probe finds a text that has turned
_HOPED: tuple[Node, ...] = tuple([(0.9**depth, -depth, 0) for depth in range(1, 9)])
_SPEED_MEMORY = 0.97  # share of the measured speed-up kept per step


class Choice(NamedTuple):
    """How many of the likeliest nodes to take, and the tokens they bring above what their time would bring anyway."""

    num_nodes: int
    surplus: float


class Probe(NamedTuple):
    """Nodes of a probe, and tokens between two of them at most."""

    num_nodes: int
    distance: int


@final
class Pricing:
    """Costs and going rate of one engine. `margin`: expected tokens must exceed their price by this share."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self.rows: Rows = RowCost()
        self._sampling = PlaneCost()  # tokens emitted, rows
        # Decayed sums of what steps emitted and cost, both relative to plain steps.
        self._emitted = self._spent = 1.0

    def start_from(self, costs: CostTable) -> None:
        """Take row costs from a measured table, and what sampling costs where it was measured."""
        self.rows = CalibratedRows(costs)
        if costs.own_request is None or costs.own_row is None:
            return
        for rows in (1, 8, 1, 8, 1, 8, 1, 8):
            self._sampling.observe(1, rows, costs.own_request + costs.own_row * rows)

    def plain_seconds(self, num_requests: int) -> float:
        """Expected seconds of a step in which nobody drafts; 0 before anything is known."""
        sampling = self._sampling
        return self.rows.seconds(num_requests) + (sampling.first + sampling.second) * num_requests

    def sampling_seconds(self, tokens: float, rows: int) -> float:
        """Expected seconds of verification proper for so many emitted tokens and rows."""
        return self._sampling.first * tokens + self._sampling.second * rows

    def rate(self, num_requests: int) -> float:
        """Tokens per second that steps of this batch bring, as far as seen; plain decoding's at least."""
        plain = self.plain_seconds(num_requests)
        return max(self._emitted / self._spent, 1.0) * num_requests / plain if plain > 0.0 else 0.0

    def choose(
        self,
        nodes: Sequence[Node],
        num_requests: int,
        base_rows: int,
        draft: DraftCost | None = None,
        num_asked: int = 0,
        limits: Sequence[float] | None = None,
    ) -> Choice:
        """How many of `nodes` (likeliest first) to verify on top of `base_rows` rows.

        `draft`: what drafting them will cost when `num_asked` requests are asked, None when they are drafted already.
        `limits`: seconds per token promised to each request, infinite where nothing is; see `_choose_within`.
        """
        rate = self.rate(num_requests)
        if rate <= 0.0 or not nodes:
            return Choice(0, 0.0)  # the first step is a plain one: it sets the price
        if limits is not None:
            return self._choose_within(limits, nodes, rate, base_rows, draft, num_asked)
        # Twice the rows seen so far at most: a staircase is climbed step by step. Beyond the last knot nobody knows.
        most = min(len(nodes), max(2 * self.rows.num_explored - base_rows, 1), KNOTS[-1] - base_rows)
        if most < 1:
            return Choice(0, 0.0)
        first, last = knot_of(base_rows + 1), knot_of(base_rows + most)
        # Just below the next stair a row more costs nothing, so only counts that fill a knot compete.
        counts = [*[rows - base_rows for rows in KNOTS[first:last]], most]
        tokens = list(accumulate([node[0] for node in nodes[:most]]))
        price = rate * (1.0 + self._margin)
        token_value, row_price = 1.0 - rate * self._sampling.first, price * self._sampling.second
        relative, price_of_one = self.rows.relative, price * self.rows.scale
        base = relative[knot_of(base_rows)]
        values = [
            tokens[count - 1] * token_value - price_of_one * (cost - base) - row_price * count
            for count, cost in zip(counts, relative[first : last + 1], strict=True)
        ]
        if draft is not None:
            depths = list(accumulate([-node[1] for node in nodes[:most]], max))
            values = [
                value - price * draft.seconds(num_asked, depths[count - 1])
                for count, value in zip(counts, values, strict=True)
            ]
        best = max(values)
        return Choice(counts[values.index(best)], best) if best > 0.0 else Choice(0, 0.0)

    def probe(self, num_requests: int, draft: DraftCost, number: int, least: int, most: int) -> Probe | None:
        """How a request that drafts nothing looks whether its text has turned: so often that it costs little.

        `number`: of the drafter's probes so far. Passes have a price of their own, so not all probes have one pass.

        None where no probe is worth its rows and passes: what it may find, one time in so many, is a text whose drafts
        are nearly always right. In a large batch, or where rows are dear, not even that would pay.
        """
        if not draft.is_timed:
            return Probe(PROBE_NODES, most)
        rate, rows = self.rate(num_requests), self.rows
        added = [
            draft.seconds(1, count) + rows.seconds(num_requests + count) - rows.seconds(num_requests)
            for count in (1, PROBE_NODES)
        ]
        # A second node is worth a look where it stands on the same stair, and where nobody knows its price yet.
        is_short = added[1] > _SAME_STAIR * added[0] and number % 3 > 0
        is_short = is_short and rows.num_explored > num_requests + PROBE_NODES
        hoped = self.choose(_HOPED, num_requests, num_requests, draft, 1).surplus
        if _TURNS * most * hoped < rate * added[0]:
            return None
        tokens = rate * added[0 if is_short else 1]
        return Probe(1 if is_short else PROBE_NODES, min(max(round(tokens / _PROBE_PRICE), least), most))

    def _choose_within(
        self,
        limits: Sequence[float],
        nodes: Sequence[Node],
        rate: float,
        base_rows: int,
        draft: DraftCost | None,
        num_asked: int,
    ) -> Choice:
        """`choose` where promises are kept first: a step may take `limits[r]` seconds per token expected of request r.

        Among counts that keep every promise the one of largest surplus (AdaSpec, 2503.05096: others are worth less than
        nothing); where none does, the one that breaks the worst-kept promise least.
        """
        tokens = [1.0] * len(limits)
        most = min(len(nodes), max(2 * self.rows.num_explored - base_rows, 1))
        total, deepest = 0.0, 0
        best, best_key = Choice(0, 0.0), (0.0, 0.0)
        price = rate * (1.0 + self._margin)
        own = self._sampling
        base = self.rows.seconds(base_rows)
        for count in range(most + 1):
            if count:
                reach, depth, request = nodes[count - 1]
                total += reach
                tokens[request] += reach
                deepest = min(deepest, depth)
            forward = self.rows.seconds(base_rows + count)
            drafting = draft.seconds(num_asked, -deepest) if draft is not None and count else 0.0
            added = forward - base + drafting + own.second * count
            seconds = base + added + own.second * base_rows + own.first * (len(limits) + total)
            late = max(seconds / (limit * expected) for limit, expected in zip(limits, tokens, strict=True))
            surplus = total * (1.0 - rate * own.first) - price * added
            key = (-max(late, 1.0), surplus)
            if count == 0 or key > best_key:
                best, best_key = Choice(count, max(surplus, 0.0)), key
        return best

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds, drafting: float) -> None:
        """Learn from a step; `drafting`: what its drafting is estimated to cost."""
        num_requests = len(outcomes)
        emitted = sum([outcome.num_emitted for outcome in outcomes])
        sampling = self._sampling
        self.rows.observe(seconds.rows, seconds.verify)
        sampling.observe(emitted, seconds.rows, seconds.sample)
        spent = self.rows.seconds(seconds.rows) + sampling.first * emitted + sampling.second * seconds.rows + drafting
        self._emitted = _SPEED_MEMORY * self._emitted + emitted / num_requests
        self._spent = _SPEED_MEMORY * self._spent + spent / self.plain_seconds(num_requests)
