"""Hybrid: the suffix trees draft where they expect more than another drafter has been getting, it drafts elsewhere.

Called by the engine like every drafter; a combination of two, selected as `hybrid:other=SELECTION`. The
suffix draft's score is its expected number of accepted tokens; the other drafter's is the running mean of
what its drafts had accepted (SuffixDecoding's hybrid, with a measured threshold in place of a constant).
Invariant: both drafters hear everything, so either can take over at any step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.core.types import Budget, Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Drafter, TargetInfo
from draftsmith.drafters.suffix import SuffixDrafter
from draftsmith.errors import OptionError

_MEMORY = 0.95
"""Weight of the past in the running mean: about the last twenty drafts count."""


@dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """Options of the hybrid.

    `other`: the other drafter's selection, with "+" for ":", as in "draft_model+model=NAME". `threshold`: the
    suffix draft is used from this score on; none compares with the other drafter's measured mean.
    """

    other: str = "ngram"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.other.split("+")[0] in ("hybrid", "suffix", "auto", "none"):
            raise OptionError(
                f"hybrid: other is {self.other!r}; choose a drafter other than none, suffix (auto) and hybrid"
            )
        if self.threshold is not None and not self.threshold >= 0:
            raise OptionError(f"hybrid: threshold is {self.threshold}; it must be at least 0")


@final
class HybridDrafter(Drafter):
    """Drafts with suffix trees where they match well, and with one other drafter elsewhere."""

    Options = HybridOptions

    def __init__(self, options: HybridOptions, suffix: SuffixDrafter, other: Drafter) -> None:
        self._options = options
        self._suffix = suffix
        self._other = other
        self._both: tuple[Drafter, Drafter] = (suffix, other)
        self._from_other: set[int] = set()
        self._mean_accepted = 0.0
        self.needs = suffix.needs | other.needs
        self.bytes_per_token = suffix.bytes_per_token + other.bytes_per_token
        self.traits = dataclasses.replace(other.traits, starts_partly=True)

    @classmethod
    def create(cls, options: HybridOptions, target: TargetInfo) -> Self:
        """Make both drafters for the target."""
        suffix = target.make_drafter("suffix")
        assert isinstance(suffix, SuffixDrafter)
        return cls(options, suffix, target.make_drafter(options.other.replace("+", ":")))

    @property
    def threshold(self) -> float:
        """The score from which the suffix draft is used now."""
        return self._mean_accepted if self._options.threshold is None else self._options.threshold

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """The suffix draft where its score reaches the threshold; the other drafter is asked once for the rest.

        Where the other drafter has nothing, a suffix draft below the threshold is better than none.
        """
        drafts = [self._suffix.speculate(view, budget) for view, budget in zip(views, budgets, strict=True)]
        threshold = self.threshold
        rest = [
            place
            for place, (draft, budget) in enumerate(zip(drafts, budgets, strict=True))
            if Budget.lets_start(budget) and (not draft.tokens or draft.score < threshold)
        ]
        others: dict[int, Proposal] = {}
        if rest:
            asked, shares = [views[place] for place in rest], [budgets[place] for place in rest]
            found = zip(rest, self._other.propose(asked, shares, keep_drafting), strict=True)
            others = {place: proposal for place, proposal in found if proposal.tree.num_drafted}
        proposals = []
        for place, (view, draft) in enumerate(zip(views, drafts, strict=True)):
            proposal = others.get(place)
            if proposal is None:
                self._from_other.discard(view.sequence_id)
                proposal = self._suffix.proposal_of(view, draft)
            else:
                self._from_other.add(view.sequence_id)
            proposals.append(proposal)
        return proposals

    def pending(self, view: SequenceView) -> int:
        """What the other drafter must read."""
        return self._other.pending(view)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Both learn what was emitted; the other drafter's mean moves when its draft was verified."""
        for commit in commits:
            if commit.verdict is not None and commit.view.sequence_id in self._from_other:
                self._from_other.discard(commit.view.sequence_id)
                self._mean_accepted += (1 - _MEMORY) * (commit.verdict.num_accepted - self._mean_accepted)
        for drafter in self._both:
            drafter.commit(commits)

    def fork(self, source: int, copy: int, length: int) -> None:
        """Both fork."""
        for drafter in self._both:
            drafter.fork(source, copy, length)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Both forget the rest."""
        for drafter in self._both:
            drafter.truncate(sequence_id, length)

    def forget(self, sequence_id: int) -> None:
        """Both drop the sequence."""
        self._from_other.discard(sequence_id)
        for drafter in self._both:
            drafter.forget(sequence_id)
