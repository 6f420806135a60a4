"""The controller that always asks for the same number of drafted nodes.

For benchmarks of a draft length and for users who know theirs. Invariant: a budget never exceeds the
request's `max_draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.base import MAX_NODES, Controller, RequestSignal
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class FixedOptions:
    """Options of the fixed length.

    `num_draft`: nodes to draft per request and step, 0 to 511; fewer where the drafter's own `max_draft` is lower, the
    answer has fewer tokens left, or `max_batch` requests share a step's rows.
    """

    num_draft: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.num_draft <= MAX_NODES:
            raise OptionError(f"fixed: num_draft is {self.num_draft}; allowed: 0 (drafts nothing) to {MAX_NODES}")


@final
class FixedController(Controller):
    """Always asks for the same number of nodes, fewer only where fewer make sense."""

    Options = FixedOptions

    def __init__(self, options: FixedOptions) -> None:
        self._num_draft = options.num_draft

    @classmethod
    def create(cls, options: FixedOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """The smaller of `num_draft` and `max_draft`, per request."""
        return [min(self._num_draft, signal.max_draft) for signal in signals]
