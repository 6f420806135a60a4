"""The contract of controllers: how many nodes each request may draft this step.

Called by the engine around drafting. A controller that looks at a drafted token it may still drop
declares `looks_at_tokens`; the engine refuses it for sampled proposals at temperature > 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from draftsmith.core.types import Proposal


@dataclass(frozen=True, slots=True)
class RequestSignal:
    """What a controller sees of a request before drafting.

    `max_draft`: the most nodes that make sense now (tokens left, context left), at least 1.
    """

    sequence_id: int
    drafter: str
    max_draft: int
    context_len: int


@dataclass(frozen=True, slots=True)
class RequestOutcome:
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


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall seconds of one step, by part. `rows`: rows the target scored."""

    rows: int
    draft: float
    verify: float
    sample: float


class Controller(ABC):
    """Decides draft budgets for the requests of an engine."""

    Options: ClassVar[type]
    looks_at_tokens: bool = False

    @classmethod
    @abstractmethod
    def create(cls, options: Any) -> Self:
        """Make the controller from its `Options`."""

    @abstractmethod
    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """Nodes each request may draft, 0 <= budget <= max_draft."""

    def keep_drafting(self, confidence: float) -> bool:
        """Asked by drafters before each further token."""
        return True

    def select(self, proposals: Sequence[Proposal]) -> Sequence[Proposal]:
        """Cut proposals within the soundness rules; the default keeps them."""
        return proposals

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Hear how a step went. Only steps without prompt rows are reported."""

    def forget(self, sequence_id: int) -> None:
        """A request ended."""
