"""The contract of what runs a recurrent feature drafter (EAGLE, multi-token prediction) for many sequences.

A *true row* t of a sequence pairs the target's features of row t with token x_{t+1}; a *speculative row* pairs its
parent's own output with a drafted token. Called by `drafters.recurrent`; PyTorch and C++ fulfil it. Invariants:
true rows stay until they are cut, speculative rows live until the next `begin` or `chain` of their sequence, and
a row sees the true rows before it and its own speculative ancestors alone.

Shape letters: S sequences, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.core.draw import Tokens, draw_coupled
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler


@dataclass(frozen=True, slots=True)
class TrueRows:
    """New true rows of one sequence. `tokens`: x_{t+1} of each row; `features` [rows, F]: the taps side by side."""

    sequence_id: int
    tokens: Sequence[int]
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class Level:
    """Speculative rows to add to one sequence. `parents`: numbers of earlier speculative rows (in the order they
    were added since `begin`), or -1 for the last true row.
    """

    sequence_id: int
    tokens: Sequence[int]
    parents: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChainDraw:
    """How one sequence's chain is drawn where it is not greedy: under the target's own noise (seeded coupling).

    `sampler`: of rows [U], its transforms name no token. `position`: output position of the first token.
    """

    sampler: Sampler
    random: RequestRandom
    position: int

    def token(self, logits_U: torch.Tensor, step: int, ids: Tokens | None) -> int:
        """The chain's token number `step`, counted from 0, of the tokens `ids` (ascending) [U], or of 0 to U-1."""
        return draw_coupled(self.sampler.scores(logits_U), self.random, self.position + step, ids=ids)[0]


class Chain(NamedTuple):
    """A chain's target ids, and how likely the likeliest token was at each one's turn: drawn ones are accepted about as
    often as that (docs/log.md).
    """

    tokens: list[int]
    probs: list[float]


class RowRunner(ABC):
    """Scores rows of a one-layer drafter that keeps keys and values of its own."""

    bytes_per_token: int

    @abstractmethod
    def num_rows(self, sequence_id: int) -> int:
        """True rows held; 0 for a sequence not heard of."""

    @abstractmethod
    def begin(self, groups: Sequence[TrueRows]) -> torch.Tensor:
        """Append true rows (at least one for a sequence that has none; none is allowed otherwise, and then what
        followed its last true row is worked out again or remembered); logits [S, U] after each one's last row.
        """

    @abstractmethod
    def extend(self, levels: Sequence[Level]) -> list[torch.Tensor]:
        """Append speculative rows; logits [rows, U] per sequence."""

    @abstractmethod
    def chain(
        self,
        groups: Sequence[TrueRows],
        depths: Sequence[int],
        least: float = 0.0,
        draws: Sequence[ChainDraw | None] = (),
    ) -> list[Chain]:
        """`begin`, then a token of each depth, as many as `depths` says (at least 1), in one go: the likeliest, or what
        the group's draw says.

        A chain ends with the token at which the product of its probabilities falls below `least`.
        """

    @abstractmethod
    def append(self, groups: Sequence[TrueRows]) -> None:
        """Append true rows without asking what follows (prompt rows)."""

    @abstractmethod
    def truncate(self, sequence_id: int, num_rows: int) -> None:
        """Keep the first `num_rows` true rows."""

    @abstractmethod
    def fork(self, source: int, copy: int, num_rows: int) -> None:
        """Give `copy` its own first `num_rows` true rows of `source`."""

    @abstractmethod
    def forget(self, sequence_id: int) -> None:
        """Drop a sequence."""
