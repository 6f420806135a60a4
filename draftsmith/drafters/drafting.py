"""A proposal under construction, level by level, for drafters that score what they have drafted.

Called by draft models and recurrent drafters: they give the logits of the newest nodes and are told which nodes to
score next. How children are drawn under a rule is `drafters.growth`'s. Invariants: drafting is stopped before a draw,
never after one, but for point masses, which may be cut anywhere; nothing is drafted below an end.

Shape letters: U draft vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import final

import torch

from draftsmith.core.types import Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.growth import Growth, confidences_of, verifies_trees
from draftsmith.drafters.shapes import Below


class Draft(ABC):
    """A tree that grows. `budget`: most nodes below the root. `level`: the nodes whose logits are wanted next, empty
    when the tree is done.
    """

    def __init__(self, growth: Growth, budget: int, eos_ids: frozenset[int]) -> None:
        self.growth = growth
        self.budget = budget
        self.level = [0]
        self._eos_ids = eos_ids

    @property
    def view(self) -> SequenceView:
        """The sequence that is drafted for."""
        return self.growth.view

    @abstractmethod
    def extend(self, logits: Iterable[torch.Tensor], keep_drafting: Callable[[float], bool]) -> None:
        """Add the children of the current level; one row of logits [U] for each of its nodes, in order."""

    @abstractmethod
    def proposal(self) -> Proposal:
        """What has been drafted."""

    def _is_end(self, node: int) -> bool:
        """Nothing below an end can be used; the end itself stays."""
        return node > 0 and self.growth.tokens[node] in self._eos_ids


@final
class DrawnDraft(Draft):
    """A chain (`below` None), or a tree of a known shape, drawn as the request's rule wants it.

    `below`: children of each node of the shape; ignored where the rule verifies chains alone.
    """

    def __init__(
        self,
        view: SequenceView,
        vocab_size: int,
        budget: int,
        eos_ids: frozenset[int],
        *,
        below: Below | None = None,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        self._below = below if below is not None and verifies_trees(view.sampler) else None
        growth = Growth(view, vocab_size, branches=self._below is not None, draft_ids=draft_ids)
        super().__init__(growth, budget, eos_ids)
        self._draft_ids = draft_ids
        self._places = [0]  # the shape's node of each drafted one
        if self._below is not None and not self._below[0]:
            self.level = []

    @property
    def is_tree(self) -> bool:
        """Whether a shape is filled, so that rows of a level do not simply go on from the last."""
        return self._below is not None

    def extend(self, logits: Iterable[torch.Tensor], keep_drafting: Callable[[float], bool]) -> None:
        growth, shape = self.growth, self._below
        parents, self.level = self.level, []
        for node, logits_U in zip(parents, logits, strict=True):
            places = None if shape is None else shape[self._places[node]]
            count = min(1 if places is None else len(places), self.budget - growth.num_drafted)
            if count == 0:
                break
            # Judged before the draw, so that stopping here never looks at a token that could be dropped.
            ((confidence, total),) = confidences_of(logits_U[None])
            if not keep_drafting(confidence):
                continue
            for rank, token in enumerate(growth.draw(node, logits_U, count)):
                own = confidence
                if places is not None:
                    own = math.exp(min(0.0, float(logits_U[place_of(token, self._draft_ids)]) - total))
                child = growth.add(node, token, own)
                goes_on = True
                if places is not None and shape is not None:
                    self._places.append(places[rank])
                    goes_on = bool(shape[places[rank]])
                if goes_on and not self._is_end(child):
                    self.level.append(child)
        if growth.num_drafted >= self.budget:
            self.level = []

    def accept(self, token: int, confidence: float, keep_drafting: Callable[[float], bool]) -> bool:
        """Take the next token of a chain of point masses that was drafted in one go; whether it was taken.

        `confidence`: the largest probability of the row that the token was drafted from.
        """
        last = self.growth.num_drafted
        self.level = []
        if last == self.budget or self._is_end(last) or not keep_drafting(confidence):
            return False
        self.growth.add(last, token, confidence)
        return True

    def proposal(self) -> Proposal:
        return self.growth.proposal()


def place_of(token: int, draft_ids: torch.Tensor | None) -> int:
    """Where a drafted token stands in a row [U]."""
    return token if draft_ids is None else int(torch.searchsorted(draft_ids, token))
