"""What one sequence keeps for the layers of one kind, behind one small contract.

Called by `kv_cache` for every change and read by the attention of a backend. A kind of layer state
answers five questions (make room, keep a path, cut, copy, can it be cut here); full and windowed
attention are here, recurrent state would be a third. Invariants: new rows are written behind all
committed ones, so a rejected row never overwrites a live one; storage begins and ends at whole blocks of keys.

Shape letters: L layers of the kind, J kv heads, C capacity in rows, K head size, B rows of a block of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.errors import CapacityError

MIN_CAPACITY = 64


def doubled(num_rows: int) -> int:
    """The capacity a slot of at least `num_rows` rows has: a power of two, 64 or more."""
    return max(MIN_CAPACITY, 1 << max(num_rows - 1, 0).bit_length())


@dataclass(frozen=True, slots=True)
class RowShape:
    """Geometry of one kind's rows: [L, 2 (key, value), J, capacity, K] of `dtype` on `device`.

    With `key_block` B > 1 the keys of B neighbouring slots are stored as [K, B], in the memory of their [B, K].
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    key_block: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers of the kind."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, capacity: int) -> torch.Tensor:
        """Uninitialised rows [L, 2, J, capacity, K]. Raises `CapacityError` where memory is short."""
        assert capacity % self.key_block == 0, (capacity, self.key_block)
        shape = (self.num_layers, 2, self.num_kv_heads, capacity, self.head_dim)
        try:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        except (RuntimeError, TypeError) as error:  # of PyTorch, the latter about sizes beyond 64 bits
            raise CapacityError(f"keys and values of {capacity} tokens do not fit into memory") from error

    def floor(self, position: int) -> int:
        """Where the block of keys that holds a position begins."""
        return position // self.key_block * self.key_block

    def ceil(self, position: int) -> int:
        """Where the last block of keys before a position ends."""
        return -(-position // self.key_block) * self.key_block


class LayerState(ABC):
    """Keys and values of one sequence in the layers of one kind.

    `rows` [L, 2, J, C, K]: slot s holds the row of position `first + s`, positions in storage order.
    """

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.rows_LJCK = shape.allocate(0)
        self.first = 0

    @property
    def capacity(self) -> int:
        """Rows the storage has room for."""
        return self.rows_LJCK.shape[3]

    @property
    def end(self) -> int:
        """One past the last storage position there is room for."""
        return self.first + self.capacity

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.capacity * self.shape.row_bytes

    def slots(self, start: int, end: int) -> torch.Tensor:
        """View [L, 2, J, end - start, K] of the rows at storage positions start..end, or of their whole blocks."""
        start, end = self.shape.floor(start), self.shape.ceil(end)
        assert self.first <= start <= end <= self.end, (self.first, start, end, self.end)
        return self.rows_LJCK.narrow(3, start - self.first, end - start)

    def keep(self, committed: int, path: Sequence[int], in_place: int) -> None:
        """Move rows `committed + path[i]` to `committed + i`; the first `in_place` already lie there."""
        start = committed - self.first
        source = torch.tensor(path[in_place:], dtype=torch.int64, device=self.shape.device) + start
        target = torch.arange(start + in_place, start + len(path), device=self.shape.device)
        if len(source) == 0:
            return
        # What is indexed is copied first, so source and target may overlap.
        if self.shape.key_block == 1:
            self.rows_LJCK.index_copy_(3, target, self.rows_LJCK.index_select(3, source))
            return
        keys, values = self.rows_LJCK.unbind(1)
        values.index_copy_(2, target, values.index_select(2, source))
        block = self.shape.key_block
        keys_LJCKB = keys.unflatten(2, (-1, block)).view(*keys.shape[:2], -1, keys.shape[3], block)
        keys_LJCKB[:, :, target // block, :, target % block] = keys_LJCKB[:, :, source // block, :, source % block]

    def _move_in(self, source: torch.Tensor, first: int, capacity: int) -> None:
        """Replace the storage by a new one that starts with the rows `source`."""
        fresh = self.shape.allocate(capacity)
        fresh.narrow(3, 0, source.shape[3]).copy_(source)
        self.rows_LJCK, self.first = fresh, first

    @abstractmethod
    def copy_of(self, length: int) -> LayerState:
        """An independent state with the rows of the first `length` positions that this one still holds."""

    @abstractmethod
    def capacity_for(self, committed: int, num_rows: int) -> int:
        """The capacity after `reserve(committed, num_rows)`."""

    @abstractmethod
    def reserve(self, committed: int, num_rows: int) -> None:
        """Make room for `num_rows` rows behind the committed ones."""

    @abstractmethod
    def reusable(self, length: int) -> bool:
        """Whether the sequence can go on from its first `length` positions."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""


class FullState(LayerState):
    """Every position stays."""

    def copy_of(self, length: int) -> FullState:
        copy = FullState(self.shape)
        copy._move_in(self.slots(0, length), 0, doubled(length))
        return copy

    def capacity_for(self, committed: int, num_rows: int) -> int:
        return self.capacity if committed + num_rows <= self.capacity else doubled(committed + num_rows)

    def reserve(self, committed: int, num_rows: int) -> None:
        capacity = self.capacity_for(committed, num_rows)
        if capacity > self.capacity:
            self._move_in(self.slots(0, committed), 0, capacity)

    def reusable(self, length: int) -> bool:
        return True

    def truncate(self, length: int) -> None:
        return None


class WindowState(LayerState):
    """The last positions stay: at least the window, and whatever still fits in front of it.

    The storage slides when it is full: the rows the next position can see move to the front. It has half
    a window of slack, so that a slide comes at most every half window and rows stay contiguous.
    """

    def __init__(self, shape: RowShape, window: int) -> None:
        super().__init__(shape)
        self.window = window

    def copy_of(self, length: int) -> WindowState:
        copy = WindowState(self.shape, self.window)
        if length > 0:
            stored = self.slots(self.first, length)
            num_rows = stored.shape[3]
            copy._move_in(stored, self.first, max(num_rows, self._most(num_rows, 0)))
        return copy

    def capacity_for(self, committed: int, num_rows: int) -> int:
        fits = committed + num_rows <= self.end or committed - self.oldest_seen(committed) + num_rows <= self.capacity
        return self.capacity if fits else self._most(committed + num_rows, num_rows)

    def _most(self, num_tokens: int, num_rows: int) -> int:
        return window_capacity(self.window, num_tokens, num_rows, self.shape.key_block)

    def reserve(self, committed: int, num_rows: int) -> None:
        if committed + num_rows <= self.end:
            return
        first = self.oldest_seen(committed)
        live = self.slots(first, committed)
        capacity = self.capacity_for(committed, num_rows)
        if capacity == self.capacity:
            # The clone matters: the rows may overlap their new place.
            self.rows_LJCK.narrow(3, 0, live.shape[3]).copy_(live.clone())
            self.first = first
        else:
            self._move_in(live, first, capacity)

    def reusable(self, length: int) -> bool:
        return length == 0 or self.first <= self.oldest_seen(length)

    def truncate(self, length: int) -> None:
        self.first = min(self.first, length)

    def oldest_seen(self, position: int) -> int:
        """The oldest position that a row at `position` or later sees, or the start of its block."""
        return self.shape.floor(max(0, position - self.window + 1))


def window_capacity(window: int, num_tokens: int, num_rows: int, key_block: int) -> int:
    """Capacity of a windowed slot for a sequence of `num_tokens` that steps by at most `num_rows` rows.

    The oldest row it needs may lie anywhere in its block of keys.
    """
    most = window + key_block - 1 + max(num_rows, window // 2)
    return min(doubled(num_tokens), -(-most // key_block) * key_block)
