"""Prefix reuse: finished sequences whose verified rows wait for a prompt that begins like them.

Called by the scheduler at admission and when a sequence ends. Invariant: the pool holds sequence ids
whose cache rows are all committed, hence verified; a drafter's state is kept and dropped together with
the target's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass

from draftsmith.drafters.base import Drafter
from draftsmith.models.kv_cache import KVCache

MIN_REUSED = 4
"""Shorter common prefixes are not worth the copy."""
_BLOCK = 256
_DRAFTER_SLACK = 64


def drafter_bytes(drafter: Drafter, num_tokens: int) -> int:
    """Most bytes a drafter holds for a sequence: its cache starts with some rows and takes drafted ones on top."""
    return drafter.bytes_per_token * (num_tokens + _DRAFTER_SLACK)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A sequence whose first `length` committed tokens are those of a new prompt."""

    source: int
    length: int
    drafter: Drafter


class PrefixPool:
    """Least recently used finished sequences, at most `capacity` of them."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self._capacity = capacity
        self._entries: OrderedDict[int, Drafter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def drafter_bytes(self) -> int:
        """Memory the drafters hold for the pool's sequences."""
        return sum(drafter_bytes(drafter, self._cache.committed(source)) for source, drafter in self._entries.items())

    def num_bytes(self) -> int:
        """Memory that clearing the pool would give back, drafters included."""
        states = (state for source in self._entries for state in self._cache.layers(source))
        return sum(state.num_bytes for state in states) + self.drafter_bytes()

    def add(self, sequence_id: int, drafter: Drafter) -> None:
        """Keep a finished sequence; the least recently used one goes when the pool is full."""
        self._entries[sequence_id] = drafter
        while len(self._entries) > self._capacity:
            self.evict_oldest()

    def evict_oldest(self) -> bool:
        """Drop the least recently used entry. False when the pool is empty."""
        if not self._entries:
            return False
        self._drop(next(iter(self._entries)))
        return True

    def discard(self, sequence_id: int) -> None:
        """Take an entry out without touching its rows, if it is there."""
        self._entries.pop(sequence_id, None)

    def close_others(self) -> None:
        """Close the rows of every sequence that is not in the pool (what a step that broke off left behind)."""
        for sequence_id in self._cache.sequence_ids:
            if sequence_id not in self._entries:
                self._cache.close(sequence_id)

    def clear(self) -> None:
        """Drop all entries."""
        while self.evict_oldest():
            pass

    def find(self, tokens: Series[int], running: Iterable[tuple[int, Drafter]]) -> PrefixHit | None:
        """The longest reusable common prefix with the pool or a running sequence, the root left out."""
        best: PrefixHit | None = None
        for source, drafter in [*self._entries.items(), *running]:
            length = _common_prefix_len(self._cache.tokens(source), tokens, len(tokens) - 1)
            length = self._cache.reusable_len(source, length)
            if length >= MIN_REUSED and (best is None or length > best.length):
                best = PrefixHit(source, length, drafter)
        if best is not None and best.source in self._entries:
            self._entries.move_to_end(best.source)
        return best

    def fork(self, hit: PrefixHit, copy: int, drafter: Drafter) -> None:
        """Give sequence `copy` the target's rows of a hit, and its drafter's state when the drafter is the same."""
        self._cache.fork(hit.source, copy, hit.length)
        if hit.drafter is drafter:
            drafter.fork(hit.source, copy, hit.length)
        if hit.source in self._entries and hit.length == self._cache.committed(hit.source):
            self._drop(hit.source)  # the copy holds all of it and will take its place

    def _drop(self, sequence_id: int) -> None:
        drafter = self._entries.pop(sequence_id)
        self._cache.close(sequence_id)
        drafter.forget(sequence_id)


def _common_prefix_len(left: Series[int], right: Series[int], limit: int) -> int:
    limit = min(limit, len(left), len(right))
    for start in range(0, limit, _BLOCK):  # slices compare at the speed of C
        end = min(start + _BLOCK, limit)
        if left[start:end] != right[start:end]:
            return next(place for place in range(start, end) if left[place] != right[place])
    return limit
