"""Penalties of the tokens that stand in a sequence already: repetition, presence, frequency.

Called by `core.sampling` for requests that ask for one. Invariant: a row seen with a drafted path gets, bit for bit,
what it would get after the path's tokens were appended.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from draftsmith.core.truncation import Ids, Row


@final
class Penalties:
    """Penalties of one sequence's tokens so far, kept per distinct id and never rebuilt.

    `ids[:size]` are the ids penalised so far, `offsets[:size]` what presence and frequency subtract.
    """

    __slots__ = ("_frequency", "_presence", "_repetition", "counts", "ids", "offsets", "size", "slots")

    def __init__(self, repetition: float, presence: float, frequency: float, prompt_tokens: Sequence[int]) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        # Presence and frequency do not look at the prompt.
        distinct = (
            np.unique(np.asarray(prompt_tokens, dtype=np.int64)) if self._repetition != 1 else np.empty(0, np.int64)
        )
        self.size = len(distinct)
        self.ids: Ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self.offsets = np.zeros(len(self.ids))
        self.slots: dict[int, int] = {token: slot for slot, token in enumerate(distinct.tolist())}
        self.counts: dict[int, int] = {}

    def copy(self) -> Penalties:
        """An independent one with the same tokens."""
        twin = Penalties.__new__(Penalties)
        twin._repetition, twin._presence, twin._frequency = self._repetition, self._presence, self._frequency
        twin.size, twin.ids, twin.offsets = self.size, self.ids.copy(), self.offsets.copy()
        twin.slots, twin.counts = dict(self.slots), dict(self.counts)
        return twin

    def append(self, tokens: Sequence[int]) -> None:
        """Emitted tokens join what is penalised."""
        for token in tokens:
            slot = self.slots.get(token)
            if slot is None:
                slot = self._new_slot(token)
            count = self.counts.get(token, 0) + 1
            self.counts[token] = count
            self.offsets[slot] = self._presence + self._frequency * count

    def _new_slot(self, token: int) -> int:
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.offsets = np.concatenate([self.offsets, np.zeros_like(self.offsets)])
        slot = self.slots[token] = self.size
        self.ids[slot] = token
        self.size += 1
        return slot

    def apply(self, row_V: Row, raw_V: Row, path: Sequence[int]) -> None:
        """Write the penalised logits of `raw_V` into `row_V` (a copy of it)."""
        ids = self.ids[: self.size]
        row_V[ids] = self._penalised(raw_V[ids], self.offsets[: self.size])
        if path:
            # Recomputed from the raw logit with the full count, so that the rounding is that of `append`.
            counts = {token: self.counts.get(token, 0) for token in path}
            for token in path:
                counts[token] += 1
            drafted = np.fromiter(counts, np.int64, len(counts))
            offsets = np.array([self._presence + self._frequency * count for count in counts.values()])
            row_V[drafted] = self._penalised(raw_V[drafted], offsets)

    def _penalised(self, values: Row, offsets: npt.NDArray[np.float64]) -> Row:
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        return values - offsets.astype(values.dtype)
