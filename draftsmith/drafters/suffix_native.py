"""The native suffix index behind the common interface.

Imported by `suffix_index.open_index` when `draftsmith._native` is there; the work happens in
`native/suffix_index.hpp`. Invariant: drafts are those of `PythonSuffixIndex`, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith import _native
from draftsmith.drafters.suffix_index import Draft, SuffixIndex


class NativeSuffixIndex(SuffixIndex):
    """Local and global trees in C++."""

    def __init__(self, max_depth: int = 64, max_cached: int = -1) -> None:
        super().__init__(max_depth, max_cached)
        self._index = _native.SuffixIndex(max_depth, max_cached)

    @property
    def is_native(self) -> bool:
        return True

    @property
    def num_tokens(self) -> int:
        return self._index.num_tokens

    @property
    def num_cached(self) -> int:
        return self._index.num_cached

    @property
    def num_nodes(self) -> int:
        """Nodes of the global tree."""
        return self._index.num_nodes

    @property
    def memory_bytes(self) -> int:
        return self._index.memory_bytes

    def start_request(self, request_id: int, prompt: Sequence[int]) -> None:
        self._index.start_request(request_id, prompt)

    def extend_request(self, request_id: int, tokens: Sequence[int]) -> None:
        self._index.extend_request(request_id, tokens)

    def speculate(
        self,
        request_id: int,
        max_tokens: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
    ) -> Draft:
        return Draft._make(self._index.speculate(request_id, max_tokens, factor, offset, min_prob, tree))

    def request_len(self, request_id: int) -> int:
        return self._index.request_len(request_id)

    def stop_request(self, request_id: int) -> None:
        self._index.stop_request(request_id)

    def evict_request(self, request_id: int) -> None:
        self._index.evict_request(request_id)

    def cached_sequences(self) -> tuple[list[int], bytes]:
        return self._index.cached_sequences()

    def add_sequences(self, lengths: Sequence[int], tokens: bytes) -> None:
        self._index.add_sequences(lengths, tokens)

    def check(self) -> None:
        """Check every invariant of all trees by brute force (tests)."""
        self._index.check()
