"""Which texts form which batch: a pure function of lengths, budget and seed.

Called by the trainer. Texts of similar length share a batch, so little is padded. Invariant: batch number i of a
run is the same whenever and wherever it is asked for, so a run continues anywhere and several processes agree
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from draftsmith.errors import DataError

POOL_BATCHES = 32
"""Texts are sorted by length within pools of about so many batches: enough to pad little, few enough to stay random."""


def batches_of_pass(
    lengths: Sequence[int], kept: Sequence[int], budget: int, seed: int, number: int
) -> list[tuple[int, ...]]:
    """Batches of pass `number`: each text once, padded tokens within `budget` where a batch has several texts."""
    random = np.random.default_rng([seed, number])
    order = random.permutation(np.asarray(kept, dtype=np.int64)).tolist()
    found: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        end, tokens = start, 0
        while end < len(order) and tokens < POOL_BATCHES * budget:
            tokens += lengths[order[end]]
            end += 1
        found.extend(batches_by_length(lengths, order[start:end], budget))
        start = end
    random.shuffle(found)
    return found


def batches_by_length(lengths: Sequence[int], texts: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Texts in order of their length, cut into batches of at most `budget` padded tokens, or of one text."""
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for index in sorted(texts, key=lambda index: (lengths[index], index)):
        if batch and (len(batch) + 1) * lengths[index] > budget:
            batches.append(tuple(batch))
            batch = []
        batch.append(index)
    if batch:
        batches.append(tuple(batch))
    return batches


@final
class BatchOrder:
    """All batches of a run by number."""

    def __init__(self, lengths: Sequence[int], kept: Sequence[int], budget: int, seed: int) -> None:
        """Raises `DataError` when there is nothing to train on."""
        if not kept:
            raise DataError("no text is left to train on")
        self._lengths, self._kept, self._budget, self._seed = lengths, kept, budget, seed
        self._starts = [0]
        self._pass: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def batch(self, number: int) -> tuple[int, ...]:
        """Texts of batch `number`, counted over all passes."""
        self._reach(lambda: self._starts[-1] > number)
        turn = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._of_pass(turn)[number - self._starts[turn]]

    def num_batches(self, passes: int) -> int:
        """Batches of the first so many passes."""
        self._reach(lambda: len(self._starts) > passes)
        return self._starts[passes]

    def _reach(self, enough: Callable[[], bool]) -> None:
        while not enough():
            self._starts.append(self._starts[-1] + len(self._of_pass(len(self._starts) - 1)))

    def _of_pass(self, number: int) -> list[tuple[int, ...]]:
        if self._pass[0] != number:
            self._pass = (
                number,
                batches_of_pass(self._lengths, self._kept, self._budget, self._seed, number),
            )
        return self._pass[1]
