"""The drafter that drafts nothing: plain decoding as a member of the family.

Selected as `none`; the baseline of every comparison goes through the same engine, verifier and counters.
Invariant: every proposal is the bare root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, final

from draftsmith.core.types import Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Drafter, NoOptions, TargetInfo


@final
class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    Options = NoOptions
    drafts = False

    @classmethod
    def create(cls, options: NoOptions, target: TargetInfo) -> Self:
        """Make the drafter; it has no options and needs nothing of the target."""
        return cls()

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """One empty proposal per view, whatever the budget."""
        return [Proposal.empty(view.root) for view in views]

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept, nothing is dropped."""
