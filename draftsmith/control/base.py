"""The contract of controllers: how many nodes each request may draft this step, and in what shape.

Called by the engine around drafting, and by a simulator with the same objects. A controller reads no clock and sees
no model: what a step was like comes through signals, proposals and `observe`. One that looks at a drafted token it
may still drop declares `looks_at_tokens`; the engine refuses it for sampled proposals at temperature > 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from draftsmith.control.cost_table import CostTable
from draftsmith.core.types import DraftTraits, Proposal

NO_TRAITS = DraftTraits()
MAX_NODES = 511
"""The most nodes that anybody drafts in a step: the engine scores 512 rows of a sequence at once, its root's among
them."""


class RequestSignal(NamedTuple):
    """What a controller sees of a request before drafting.

    `max_draft`: the most nodes that make sense now (tokens left, context left), at least 1. `context_len`: rows of it
    that the target holds. `remaining`: tokens it may still emit (0: unknown). `pending`: tokens its drafter must read
    before it can propose, which is what a drafter's start on a long prompt costs. `latency`: seconds per emitted token
    that this request's class is promised, None for no promise.
    """

    sequence_id: int
    drafter: str
    max_draft: int
    context_len: int
    remaining: int = 0
    pending: int = 0
    traits: DraftTraits = NO_TRAITS
    latency: float | None = None


class RequestOutcome(NamedTuple):
    """What a step did for one request that was past its prompt.

    `tokens`: the emitted tokens, when the engine passes them; with them a controller can also judge
    drafted nodes that it cut, because a cut point mass would have been accepted iff the target emitted it.
    """

    sequence_id: int
    drafter: str
    num_drafted: int
    depth: int
    num_accepted: int
    num_emitted: int
    tokens: tuple[int, ...] = ()


class StepSeconds(NamedTuple):
    """Wall seconds of one step, by part. `rows`: rows the target scored."""

    rows: int
    draft: float
    verify: float
    sample: float


class Controller(ABC):
    """Decides draft budgets for the requests of an engine."""

    Options: ClassVar[type]
    looks_at_tokens: bool = False
    """Whether it drops drafted nodes for reasons that their own tokens have a part in."""

    @classmethod
    @abstractmethod
    def create(cls, options: Any) -> Self:
        """Make the controller from its `Options`."""

    def start_from(self, costs: CostTable) -> None:
        """Hear, before the first step, what steps were measured to cost on this machine. The default does not care."""

    @abstractmethod
    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """Nodes each request may draft, 0 <= budget <= max_draft; a `Budget` asks for a shape too.

        Called for every step, with no signals where nobody can draft: what was kept for `observe` is of this step.
        """

    def keep_drafting(self, confidence: float) -> bool:
        """Asked by drafters before each further token; `confidence` is judged before that token is drawn.

        A chain of point masses that was drafted in one call is asked about afterwards, in the same order.
        """
        return True

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Cut proposals within the soundness rules; the default keeps them.

        One per request whose budget was above 0, in the order of the signals; fewer where the engine had no room.
        """
        return proposals

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Hear how a step went. Only steps without prompt rows are reported."""

    def forget(self, sequence_id: int) -> None:
        """A request ended."""
