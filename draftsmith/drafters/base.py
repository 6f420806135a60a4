"""The contract every drafter fulfils; the engine knows nothing else of drafters.

One file per drafter. A drafter owns its own state (index, cache) per sequence, and catches up from
`view.tokens` whenever it is behind, so a spell without drafting costs it nothing but time. It never
decides what is accepted. Invariants: `propose` returns one proposal per view, in order, with at most
`budgets[i]` nodes below the root; a law in the proposal is the law that drew its children; illegal
tokens are masked out of a law before the draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import torch

from draftsmith.core.types import Proposal, Verdict
from draftsmith.core.view import SequenceView
from draftsmith.models.backend import Backend

Tap: TypeAlias = int | str
"""`k`: hidden state after k decoder layers (0 = embeddings), un-normalised; "last_hidden": after the final norm."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a drafter that has none."""


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a drafter may know of its target when it is made.

    `vocab_size`: rows of the logits. `max_context`: longest sequence the target takes.
    `tokenizer`: the target's tokenizer, or None. `load_model(name)` loads another model with the
    engine's settings (used by standalone draft models). `make_drafter(selection_text)` makes another
    drafter for the same target (used by combinations). `eos_ids`: tokens that end an answer. `backend`: the
    target's, for its spec, embedding and head; a drafter never scores with it.
    """

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    tokenizer: Any
    load_model: Callable[[str], Any]
    make_drafter: Callable[[str], Drafter]
    backend: Backend


@dataclass(frozen=True, slots=True)
class Commit:
    """What one step settled for one sequence.

    `view.tokens` already holds the emitted tokens. `verdict` is None for a prompt chunk. `taps` holds,
    per needed tap, the rows kept by this step [rows kept, D], prompt rows included.
    """

    view: SequenceView
    verdict: Verdict | None
    taps: Mapping[Tap, torch.Tensor] = field(default_factory=dict)


class Drafter(ABC):
    """Proposes tokens for sequences of one target."""

    Options: ClassVar[type] = NoOptions
    drafts: ClassVar[bool] = True
    """False: never proposes anything, so the engine does not ask."""
    needs: frozenset[Tap] = frozenset()
    """Taps of the target this drafter wants in `Commit.taps`."""
    bytes_per_token: int = 0
    """Memory this drafter needs per token of a live sequence; counts in admission like the target's."""

    @classmethod
    @abstractmethod
    def create(cls, options: Any, target: TargetInfo) -> Self:
        """Make the drafter for a target from its `Options`. Raises `UserError`s."""

    @abstractmethod
    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """Draft below each view's root, at most `budgets[i] >= 1` nodes.

        `keep_drafting(confidence)` may be asked before each further token, with an estimate in [0, 1]
        that does not look at a sampled token that could still be dropped.
        """

    def commit(self, commits: Sequence[Commit]) -> None:
        """Hear what a step settled. Called for every step of a sequence, prompt chunks included."""

    def fork(self, source: int, copy: int, length: int) -> None:
        """Give sequence `copy` the state that `source` had after its first `length` tokens."""

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget everything after a sequence's first `length` tokens (preemption, cut)."""

    @abstractmethod
    def forget(self, sequence_id: int) -> None:
        """Drop all state of a sequence (it ended, was cancelled, or never had any)."""


class DrafterChoice(ABC):
    """A name in the table that stands for another drafter, decided when the target is known."""

    Options: ClassVar[type] = NoOptions

    @classmethod
    @abstractmethod
    def choose(cls, options: Any, target: TargetInfo) -> str:
        """The selection of the drafter it stands for."""
