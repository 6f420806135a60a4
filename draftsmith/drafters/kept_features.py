"""Features of a sequence's rows, kept as the target gave them and joined when somebody asks.

Used by drafters that read the target's features later than they come: joining the taps of a single row costs as much
as everything else the engine does for a request in a plain step, and most rows of a spell without drafting are never
asked for one by one. Invariants: a joined block never changes, so forks share it; rows that the target rejected are
held on to until `_MOST_RAW` right ones have come.

Shape letters: R rows, D width of a tap, F features of a row (D times the number of taps).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import final

import torch

_MOST_RAW = 64
"""Rows not joined yet: each block of them holds on to all that the target scored at once, rejected drafts included."""


@final
class KeptFeatures:
    """Features of the first `length` rows. `has_gap`: some did not come, so nothing is known of where others belong."""

    __slots__ = ("_blocks", "_dtype", "_num_joined", "_raw", "_starts", "has_gap", "length")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._starts: list[int] = []
        self._blocks: list[torch.Tensor] = []
        self._raw: list[Sequence[torch.Tensor]] = []
        self._num_joined = self.length = 0
        self.has_gap = False

    def append(self, taps: Sequence[torch.Tensor]) -> None:
        """The next rows' taps, each [R, D]. They are kept as they are: whoever gives them may not write to them."""
        count = len(taps[0])
        if count:
            self._raw.append(taps)
            self.length += count
            if self.length - self._num_joined > _MOST_RAW:
                self._join()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Features [stop - start, F]; `start` may be the end."""
        self._join()
        first = bisect.bisect_right(self._starts, start) - 1
        last = max(bisect.bisect_left(self._starts, stop), first + 1)
        offset = self._starts[first]
        # In a spell of drafting the rows asked for are those just joined: nothing is left to copy.
        block_RF = self._blocks[first] if last - first == 1 else torch.cat(self._blocks[first:last])
        return block_RF[start - offset : stop - offset]

    def first(self, length: int) -> KeptFeatures:
        """The first `length` rows, or all there are."""
        self._join()
        twin = KeptFeatures(self._dtype)
        count = bisect.bisect_left(self._starts, length)
        twin._starts, twin._blocks = self._starts[:count], self._blocks[:count]
        twin.length = twin._num_joined = min(length, self.length)
        twin.has_gap = self.has_gap
        if count:
            twin._blocks[-1] = twin._blocks[-1][: twin.length - twin._starts[-1]]
        return twin

    def _join(self) -> None:
        raw = self._raw
        if not raw:
            return
        parts = raw[0] if len(raw) == 1 else [torch.cat(tap) for tap in zip(*raw, strict=True)]
        block_RF = torch.cat(list(parts), dim=-1).to(self._dtype)
        self._starts.append(self._num_joined)
        self._blocks.append(block_RF)
        self._num_joined = self.length
        raw.clear()
