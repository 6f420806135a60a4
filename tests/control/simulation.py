"""A synthetic engine for controllers: acceptance processes and cost staircases, no model, no clock.

A `Stream` is one request: at each output position the drafter's token is right or wrong, and it may have
nothing to propose at all. `simulate` runs a controller over streams in one batch and adds up the true cost
of its steps, while telling it noisy seconds.
"""

import itertools
import random
from dataclasses import dataclass, field

from draftsmith.control.base import RequestOutcome, RequestSignal, StepSeconds
from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal, ProposalKind

PLAIN = 5e-3  # seconds of a step of one row
STAIRCASE = ((1, 1.0), (2, 1.07), (4, 1.8), (8, 2.4), (16, 2.45), (32, 3.1), (64, 4.9))
QUANTISED = ((1, 1.0), (4, 1.27), (8, 1.9), (16, 5.2), (32, 10.0), (64, 20.0))
FLAT = ((1, 1.0), (64, 1.4))
LINEAR = ((1, 1.0), (64, 40.0))
COSTS = {"staircase": STAIRCASE, "quantised": QUANTISED, "flat": FLAT, "linear": LINEAR}


def seconds_of(rows, knots):
    """True seconds of a forward of `rows` rows."""
    for (low, low_cost), (high, high_cost) in itertools.pairwise(knots):
        if rows <= high:
            return PLAIN * (low_cost + (high_cost - low_cost) * (rows - low) / (high - low))
    return PLAIN * knots[-1][1] * rows / knots[-1][0]


@dataclass
class Stream:
    """One request: is the drafted token of position i right, and is there one?"""

    right: list[bool]
    has_draft: list[bool]
    confidence: list[float] | None = None
    position: int = 0
    prompt_len: int = 100
    read: int = 0

    @property
    def left(self):
        return len(self.right) - self.position


def stream(rng, parts, availability=1.0):
    """A stream of parts (num_tokens, probability that a drafted token is right)."""
    right = [rng.random() < probability for num_tokens, probability in parts for _ in range(num_tokens)]
    return Stream(right, [rng.random() < availability for _ in right])


@dataclass
class Drafting:
    """`look`: seconds per request asked; `per_depth`: seconds per depth; `kind` of its proposals; `start`: seconds per
    token of a prompt read before the first proposal; `asks`: it judges its confidences before each draw.
    """

    look: float = 3e-5
    start: float = 0.0
    asks: bool = False
    per_depth: float = 0.0
    kind: ProposalKind = ProposalKind.POINT_MASS


@dataclass
class Result:
    """Totals of a run; `rows` and `drafted` per step."""

    emitted: int = 0
    seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)
    spent_until: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rate(self):
        return self.emitted / self.seconds


def simulate(controller, streams, knots, drafting=None, noise=0.1, seed=0, pass_tokens=True, until=None):
    """Run all streams in one batch; token `position % 50` is right at a position, 99 is wrong."""
    drafting = drafting or Drafting()
    rng = random.Random(seed)
    result = Result()
    live = dict(enumerate(streams))
    while live and (until is None or result.emitted < until):
        result_step(controller, live, knots, drafting, noise, rng, result, pass_tokens)
        for index in [index for index, item in live.items() if item.left == 0]:
            controller.forget(index)
            del live[index]
    return result


def result_step(controller, live, knots, drafting, noise, rng, result, pass_tokens):
    """One step of the batch."""
    asked = [index for index, item in live.items() if item.left > 1]
    signals = [
        RequestSignal(
            index,
            "synthetic",
            live[index].left - 1,
            live[index].prompt_len + live[index].position,
            live[index].left,
            live[index].prompt_len + live[index].position - live[index].read if drafting.start else 0,
        )
        for index in asked
    ]
    budgets = dict(zip(asked, controller.budget(signals), strict=True))
    drafting_now = [index for index in asked if budgets[index]]
    proposals = [propose(live[index], budgets[index], drafting, controller) for index in drafting_now]
    depth = max((proposal.tree.num_drafted for proposal in proposals), default=0)
    draft_seconds = len(drafting_now) * drafting.look + depth * drafting.per_depth
    if drafting.start:
        for index in drafting_now:
            item = live[index]
            draft_seconds += drafting.start * (item.prompt_len + item.position - item.read)
            item.read = item.prompt_len + item.position
    chosen = dict(zip(drafting_now, controller.select(proposals) if proposals else [], strict=True))
    outcomes, rows = [], 0
    for index, item in live.items():
        num_drafted = chosen[index].tree.num_drafted if index in chosen else 0
        rows += 1 + num_drafted
        accepted = 0
        while accepted < num_drafted and item.right[item.position + accepted]:
            accepted += 1
        emitted = accepted + 1
        tokens = tuple((item.position + place) % 50 for place in range(emitted)) if pass_tokens else ()
        outcomes.append(RequestOutcome(index, "synthetic", num_drafted, num_drafted, accepted, emitted, tokens))
        item.position += emitted
    forward = seconds_of(rows, knots)
    slowness = (1 + noise * abs(rng.gauss(0, 1))) * (4 if noise and rng.random() < 0.01 else 1)
    controller.observe(outcomes, StepSeconds(rows, draft_seconds, forward * slowness, 1e-5 * rows))
    result.emitted += sum(outcome.num_emitted for outcome in outcomes)
    result.seconds += forward + draft_seconds
    result.drafted.append(rows - len(live))
    result.spent_until.append((result.emitted, result.seconds))


def propose(item, budget, drafting, controller):
    """A chain of right and wrong tokens for the coming positions, empty where the drafter has nothing."""
    if not item.has_draft[item.position]:
        return Proposal.empty(0)
    places = range(item.position, min(item.position + budget, len(item.right) - 1))
    if drafting.asks:
        stopped = next((place for place in places if not controller.keep_drafting(item.confidence[place])), places.stop)
        places = range(item.position, stopped)
    kind = drafting.kind if places else ProposalKind.POINT_MASS
    tokens = [place % 50 if item.right[place] else 99 for place in places]
    confidence = (1.0, *(item.confidence[place] for place in places)) if item.confidence else None
    return Proposal(chain(0, tokens), kind, confidence=confidence)
