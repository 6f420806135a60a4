"""Rows that a drafter keeps of one sequence, in one matrix whose room grows by doubling.

Used by drafters whose own layers look back (Hydra++, Gloeckle's heads). Invariant: `filled` holds the entries of the
first `length` target rows, in order.

Shape letters: R rows, E entries of a row.
"""

from __future__ import annotations

import torch

_FIRST_ROWS = 32


class OwnRows:
    """A growing matrix [rows, E]; without entries it stays empty."""

    __slots__ = ("_room", "length")

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None
        self.length = 0

    @property
    def filled(self) -> torch.Tensor:
        """Entries [length, E] of all rows (a view: read it, never keep it)."""
        return torch.empty(0, 0) if self._room is None else self._room[: self.length]

    def append(self, entries_RE: torch.Tensor) -> None:
        """Rows that follow the last one."""
        length = self.length + len(entries_RE)
        if self._room is None or length > len(self._room):
            room = entries_RE.new_empty(max(_FIRST_ROWS, 1 << (length - 1).bit_length()), entries_RE.shape[-1])
            room[: self.length] = self.filled if self._room is not None else 0
            self._room = room
        self._room[self.length : length] = entries_RE
        self.length = length

    def truncate(self, length: int) -> None:
        """Keep the first rows; without any the room is given back."""
        self.length = min(self.length, length)
        if self.length == 0:
            self._room = None

    def copy(self, length: int) -> OwnRows:
        """A copy of its own of the first rows, fewer where fewer are held."""
        twin = OwnRows()
        length = min(length, self.length)
        if length:
            twin.append(self.filled[:length])
        return twin
