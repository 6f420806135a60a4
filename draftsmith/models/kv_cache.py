"""The one owner of keys, values and lengths of all live sequences of a model.

Called by the engine (open, reserve, keep, truncate, fork, close) and by backends (append, layers).
Invariant, per sequence: committed <= written <= reserved; speculative rows live between committed and
written, and `keep` is the only way they become committed or vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.models.layer_state import FullState, LayerState, RowShape, WindowState, doubled, window_capacity
from draftsmith.models.spec import DecoderSpec


@dataclass(slots=True)
class _Slot:
    """One sequence. `pending_*` describe the rows between committed and written."""

    layers: list[LayerState]
    tokens: list[int] = field(default_factory=list)
    pending_tokens: Sequence[int] = ()
    pending_parents: Sequence[int] = ()

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def written(self) -> int:
        return len(self.tokens) + len(self.pending_tokens)


class KVCache:
    """Keys and values per sequence; slots grow by doubling.

    `layer_kinds[i]` is the index of layer i's kind in `layers(id)`, `layer_places[i]` its index there.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_step_rows: int = 512,
        key_block: int = 1,
    ) -> None:
        """`max_step_rows`: most rows one step appends to a sequence, for `sequence_bytes` alone.

        `key_block`: how the backend wants keys stored (see `RowShape`).
        """
        self.windows: list[int | None] = sorted(set(spec.layer_windows), key=lambda window: window or 0)
        self.layer_kinds = [self.windows.index(window) for window in spec.layer_windows]
        self.layer_places = [
            self.layer_kinds[:layer].count(self.layer_kinds[layer]) for layer in range(spec.num_layers)
        ]
        self._shapes = [
            RowShape(self.layer_kinds.count(kind), spec.num_kv_heads, spec.head_dim, dtype, device, key_block)
            for kind in range(len(self.windows))
        ]
        self._max_step_rows = max_step_rows
        self._slots: dict[int, _Slot] = {}

    def open(self, sequence_id: int) -> None:
        """Start an empty sequence under an id that is not in use."""
        assert sequence_id not in self._slots, f"sequence {sequence_id} is open already"
        self._slots[sequence_id] = _Slot(
            [
                FullState(shape) if window is None else WindowState(shape, window)
                for shape, window in zip(self._shapes, self.windows, strict=True)
            ]
        )

    def close(self, sequence_id: int) -> None:
        """Drop a sequence and its memory, speculative rows included."""
        del self._slots[sequence_id]

    def reserve(self, sequence_id: int, num_rows: int) -> None:
        """Make room for `num_rows` rows behind the committed ones."""
        slot = self._slots[sequence_id]
        assert not slot.pending_tokens, "reserve between append and keep"
        committed = slot.committed
        for state in slot.layers:
            state.reserve(committed, num_rows)

    def append(self, sequence_id: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Declare speculative rows, about to be written behind the committed ones (called by backends)."""
        slot = self._slots[sequence_id]
        assert not slot.pending_tokens, "append twice without keep"
        assert len(tokens) == len(parents), (len(tokens), len(parents))
        assert slot.committed + len(tokens) <= self.reserved(sequence_id), "append beyond what was reserved"
        slot.pending_tokens, slot.pending_parents = tuple(tokens), tuple(parents)

    def keep(self, sequence_id: int, path: Sequence[int]) -> None:
        """Commit rows `path` of the last append, a path from its first level down; drop the others.

        Costs nothing per layer while the path's rows lie in place already (a chain's prefix).
        """
        slot = self._slots[sequence_id]
        tokens, parents = slot.pending_tokens, slot.pending_parents
        previous, in_place = -1, 0
        for index, row in enumerate(path):
            assert parents[row] == previous, f"{tuple(path)} is not a path of the rows' tree"
            previous = row
            in_place += row == index
        if in_place < len(path):
            for state in slot.layers:
                state.keep(slot.committed, path, in_place)
        slot.tokens.extend([tokens[row] for row in path])
        slot.pending_tokens = slot.pending_parents = ()

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget every committed token after the first `length`, and all speculative rows."""
        slot = self._slots[sequence_id]
        assert self.reusable_len(sequence_id, length) == length, f"cannot cut to {length} tokens"
        for state in slot.layers:
            state.truncate(length)
        del slot.tokens[length:]
        slot.pending_tokens = slot.pending_parents = ()

    def fork(self, source: int, copy: int, length: int) -> None:
        """Give `copy` (not open yet, or still empty) its own copy of the first `length` tokens of `source`."""
        slot = self._slots[source]
        assert self.reusable_len(source, length) == length, f"cannot fork at {length} tokens"
        assert copy not in self._slots or self._slots[copy].written == 0, f"sequence {copy} is not empty"
        self._slots[copy] = _Slot([state.copy_of(length) for state in slot.layers], slot.tokens[:length])

    def reusable_len(self, sequence_id: int, length: int) -> int:
        """The longest length <= `length` this sequence can be cut or forked to.

        Shorter than asked when fewer tokens are committed, 0 when a windowed layer has dropped rows that
        the asked-for prefix would still see (and then any shorter prefix misses rows too).
        """
        slot = self._slots[sequence_id]
        length = min(length, slot.committed)
        return length if all(state.reusable(length) for state in slot.layers) else 0

    def committed(self, sequence_id: int) -> int:
        """Number of verified tokens whose rows are kept."""
        return self._slots[sequence_id].committed

    def written(self, sequence_id: int) -> int:
        """Committed rows plus the speculative rows of the last append."""
        return self._slots[sequence_id].written

    def reserved(self, sequence_id: int) -> int:
        """Rows there is room for, committed ones included."""
        return min(state.end for state in self._slots[sequence_id].layers)

    def tokens(self, sequence_id: int) -> list[int]:
        """The committed token ids (the cache's own list: read it, never change it)."""
        return self._slots[sequence_id].tokens

    def layers(self, sequence_id: int) -> list[LayerState]:
        """Per layer kind, what the sequence keeps (read and written by backends)."""
        return self._slots[sequence_id].layers

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._slots

    @property
    def sequence_ids(self) -> list[int]:
        """Open sequences, oldest first."""
        return list(self._slots)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's rows in all layers."""
        return sum(shape.row_bytes for shape in self._shapes)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Most bytes a sequence holds while committed plus new rows stay within `num_tokens`."""
        total = 0
        for shape, window in zip(self._shapes, self.windows, strict=True):
            capacity = doubled(num_tokens)
            if window is not None:
                capacity = window_capacity(window, num_tokens, self._max_step_rows, shape.key_block)
            total += capacity * shape.row_bytes
        return total

    def growth_bytes(self, sequence_id: int, num_rows: int) -> int:
        """Bytes that `reserve(sequence_id, num_rows)` would add."""
        slot = self._slots[sequence_id]
        return sum(
            (state.capacity_for(slot.committed, num_rows) - state.capacity) * state.shape.row_bytes
            for state in slot.layers
        )

    @property
    def used_bytes(self) -> int:
        """Bytes held by all open sequences."""
        return sum(state.num_bytes for slot in self._slots.values() for state in slot.layers)

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        for sequence_id, slot in self._slots.items():
            committed, written, reserved = slot.committed, slot.written, self.reserved(sequence_id)
            assert 0 <= committed <= written <= reserved, (sequence_id, committed, written, reserved)
            assert len(slot.pending_tokens) == len(slot.pending_parents)
            assert len(slot.layers) == len(self._shapes)
            for state, shape in zip(slot.layers, self._shapes, strict=True):
                assert state.shape == shape
                assert state.reusable(committed), f"sequence {sequence_id} lost rows it still sees"
                assert state.end >= written
