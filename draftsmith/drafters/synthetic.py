"""A drafter without a model: the text's own tokens over again, to have something to verify where nothing drafts well.

Called by the engine like every drafter; made for rule `synthetic`, which accepts whatever it is given. Under any other
rule its drafts are what they are, bad guesses that change nothing. Invariant: a proposal is a chain of exactly as many
tokens as were asked for, none of which ends an answer or is forbidden to the request; empty where the text has no
such token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Drafter, TargetInfo
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Options of the synthetic drafter.

    `max_draft`: most tokens of a proposal.
    """

    max_draft: int = 64

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise OptionError(f"synthetic: max_draft is {self.max_draft}; it must be at least 1")


@final
class SyntheticDrafter(Drafter):
    """Drafts as many tokens as it may, whatever they are: the load of a drafter, for rule synthetic."""

    Options = SyntheticOptions

    def __init__(self, options: SyntheticOptions, eos_ids: frozenset[int]) -> None:
        self._max_draft = options.max_draft
        self._eos_ids = eos_ids

    @classmethod
    def create(cls, options: SyntheticOptions, target: TargetInfo) -> Self:
        """Make the drafter; of the target it uses only the end ids."""
        return cls(options, target.eos_ids)

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """A chain of point masses per view."""
        return [self._one(view, min(budget, self._max_draft)) for view, budget in zip(views, budgets, strict=True)]

    def forget(self, sequence_id: int) -> None:
        """There is nothing to forget."""

    def _one(self, view: SequenceView, length: int) -> Proposal:
        tokens, sampler = view.tokens, view.sampler
        drafted: list[int] = []
        place, passed = view.position % len(tokens), 0
        while len(drafted) < length and passed < len(tokens):
            token = tokens[place]
            if token in self._eos_ids or not sampler.allows(token, drafted):
                passed += 1  # a whole round of these, and there are no others
            else:
                passed = 0
                drafted.append(token)
            place = (place + 1) % len(tokens)
        return Proposal(chain(view.root, drafted))
