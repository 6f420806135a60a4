"""The suffix index behind the suffix drafter: what past text says comes next.

`open_index` gives the native index, or the slower pure Python one where the extension was not built; both
draft the same tokens. An index holds one *local* tree per active request (prompt and emitted tokens) and one
*global* tree of responses (emitted tokens only) of all requests, evicted first in, first out. Invariant: an
index is used by one thread at a time. Source: SuffixDecoding (arXiv 2411.04975), section 3.
"""

from __future__ import annotations

import functools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from draftsmith.core.accelerator import FORCE_PYTHON
from draftsmith.drafters.suffix_file import read_sequences, write_sequences
from draftsmith.drafters.suffix_tree import PythonSuffixTree
from draftsmith.errors import OptionError


class Draft(NamedTuple):
    """A draft below the last token of a request.

    `tokens`; `parents[i]`: index of the parent of token i, -1 for the request's last token, always < i;
    `probs[i]`: estimate D that the text goes on through token i: occurrences of the match followed by the
    path to i, over occurrences of the match; `score`: sum of `probs`, the expected number of accepted
    tokens; `match_len`: length of the matched suffix that gave the draft (0 without one); `from_global`:
    whether the global tree gave it.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    score: float = 0.0
    match_len: int = 0
    from_global: bool = False


class SuffixIndex(ABC):
    """Local trees of the active requests and the global tree of responses.

    `max_depth` (>= 2): longest substring the trees know; match and draft together stay within it.
    `max_cached`: responses kept in the global tree; -1: no limit, 0: no global tree.
    """

    def __init__(self, max_depth: int, max_cached: int) -> None:
        self.max_depth = max_depth
        self.max_cached = max_cached

    @property
    @abstractmethod
    def is_native(self) -> bool:
        """Whether this is the native index."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens in the global tree."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Responses in the global tree."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held by all trees (the Python index gives an estimate)."""

    @abstractmethod
    def start_request(self, request_id: int, prompt: Sequence[int]) -> None:
        """Make a request active. An older cached response of this id is evicted; so is the oldest one beyond the cap.

        Raises KeyError when the id is active already.
        """

    @abstractmethod
    def extend_request(self, request_id: int, tokens: Sequence[int]) -> None:
        """Tokens were emitted: both trees learn them. KeyError when the request is not active."""

    @abstractmethod
    def speculate(
        self,
        request_id: int,
        max_tokens: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
    ) -> Draft:
        """The draft of highest score below the request's last token.

        A match of m tokens may draft min(max_tokens, floor(m * factor + offset + 1e-6)) tokens. Of equal scores the
        longer match wins, and the local tree wins over the global one. Without `tree` a path is drafted, the likeliest
        token each time while D >= min_prob; with it the likeliest nodes. KeyError when the request is not active.
        """

    @abstractmethod
    def request_len(self, request_id: int) -> int:
        """Prompt and emitted tokens of an active request known here; -1 when it is not active."""

    @abstractmethod
    def stop_request(self, request_id: int) -> None:
        """Drop the local tree; the response stays cached. Does nothing when the request is not active."""

    @abstractmethod
    def evict_request(self, request_id: int) -> None:
        """Remove a request's response from the global tree. Does nothing when it is not cached."""

    @abstractmethod
    def cached_sequences(self) -> tuple[list[int], bytes]:
        """Lengths of the cached responses, oldest first, and their tokens end to end as little-endian int32."""

    @abstractmethod
    def add_sequences(self, lengths: Sequence[int], tokens: bytes) -> None:
        """Add finished responses without an id, in the form of `cached_sequences`; those beyond the cap stay out."""

    def save(self, path: str | os.PathLike[str], label: str = "") -> None:
        """Write the global tree's responses to `path` (replaced atomically). `label` names the vocabulary.

        Raises OptionError when the file cannot be written.
        """
        write_sequences(Path(path), label, *self.cached_sequences())

    def load(self, path: str | os.PathLike[str], label: str = "") -> None:
        """Add the responses of a saved file as if they had just been finished, in the order of the file.

        Raises ModelFileError for a missing, foreign, truncated or corrupt file, OptionError for another `label`.
        """
        self.add_sequences(*read_sequences(Path(path), label))


class PythonSuffixIndex(SuffixIndex):
    """The index in pure Python: same drafts, some tens of times slower."""

    def __init__(self, max_depth: int = 64, max_cached: int = -1) -> None:
        super().__init__(max_depth, max_cached)
        self._global = PythonSuffixTree(max_depth)
        self._local: dict[int, PythonSuffixTree] = {}
        self._cached: dict[int, int] = {}
        """Sequence key in the global tree -> request id (-1: none), oldest first."""
        self._keys: dict[int, int] = {}
        """Request id -> sequence key in the global tree."""
        self._next_key = 0

    @property
    def is_native(self) -> bool:
        return False

    @property
    def num_tokens(self) -> int:
        return self._global.num_tokens

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def memory_bytes(self) -> int:
        return self._global.memory_bytes + sum(tree.memory_bytes for tree in self._local.values())

    def start_request(self, request_id: int, prompt: Sequence[int]) -> None:
        if request_id in self._local:
            raise KeyError(f"request {request_id} is active already")
        tree = self._local[request_id] = PythonSuffixTree(self.max_depth)
        tree.append(0, prompt)
        if self.max_cached == 0:
            return
        self.evict_request(request_id)
        self._keys[request_id] = self._new_key(request_id)

    def _new_key(self, request_id: int) -> int:
        key = self._next_key
        self._next_key += 1
        self._cached[key] = request_id
        while 0 < self.max_cached < len(self._cached):
            self._evict_key(next(iter(self._cached)))
        return key

    def _evict_key(self, key: int) -> None:
        self._keys.pop(self._cached.pop(key), None)
        self._global.remove(key)

    def extend_request(self, request_id: int, tokens: Sequence[int]) -> None:
        self._active(request_id).append(0, tokens)
        key = self._keys.get(request_id)
        if key is not None:
            self._global.append(key, tokens)

    def _active(self, request_id: int) -> PythonSuffixTree:
        tree = self._local.get(request_id)
        if tree is None:
            raise KeyError(f"request {request_id} is not active")
        return tree

    def speculate(
        self,
        request_id: int,
        max_tokens: int,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
    ) -> Draft:
        local = self._active(request_id)
        if not (factor >= 0 and offset == offset and min_prob == min_prob):
            raise ValueError("factor must be at least 0; offset and min_prob numbers")
        pattern = local.tokens(0)[-self.max_depth :]
        best = Draft()
        for source, key in ((local, 0), (self._global, self._keys.get(request_id, -1))):
            grow = source.grow_tree if tree else source.follow_path
            # From the longest match on: an equal score of a shorter one does not win, nor can a budget that low.
            for length, place in reversed(list(enumerate(source.matches(pattern, key), start=1))):
                budget = max(0, min(max_tokens, int(length * factor + offset + 1e-6)))
                if budget <= best.score:
                    break
                tokens, parents, counts = grow(*place, budget, min_prob)
                matched = place[0].count
                score = sum(counts) / matched
                if score > best.score:
                    probs = tuple(count / matched for count in counts)
                    best = Draft(tuple(tokens), tuple(parents), probs, score, length, source is self._global)
        return best

    def request_len(self, request_id: int) -> int:
        tree = self._local.get(request_id)
        return -1 if tree is None else tree.num_tokens

    def stop_request(self, request_id: int) -> None:
        self._local.pop(request_id, None)
        if request_id in self._keys:
            self._global.close(self._keys[request_id])

    def evict_request(self, request_id: int) -> None:
        if request_id in self._keys:
            self._evict_key(self._keys[request_id])

    def cached_sequences(self) -> tuple[list[int], bytes]:
        import numpy as np

        sequences = [self._global.tokens(key) for key in self._cached]
        flat = [token for sequence in sequences for token in sequence]
        return [len(sequence) for sequence in sequences], np.asarray(flat, dtype="<i4").tobytes()

    def add_sequences(self, lengths: Sequence[int], tokens: bytes) -> None:
        import numpy as np

        if self.max_cached == 0:
            return
        flat: list[int] = np.frombuffer(tokens, dtype="<i4").tolist()
        kept = len(lengths) if self.max_cached < 0 else min(len(lengths), self.max_cached)
        at = sum(lengths[: len(lengths) - kept])
        for length in lengths[len(lengths) - kept :]:
            key = self._new_key(-1)
            self._global.append(key, flat[at : at + length])
            self._global.close(key)
            at += length


def open_index(max_depth: int = 64, max_cached: int = -1) -> SuffixIndex:
    """The native index, or the Python one (with one line on stderr, once) where the extension is missing.

    Raises OptionError for `max_depth` outside 2 to 65535 or `max_cached` below -1.
    """
    if not 2 <= max_depth <= 65535:
        raise OptionError(f"suffix index: max_depth is {max_depth}; allowed are 2 to 65535")
    if not -1 <= max_cached < 2**31:
        raise OptionError(f"suffix index: max_cached is {max_cached}; allowed are -1 (no limit), 0 (off) and more")
    if os.environ.get(FORCE_PYTHON, "0") in ("", "0"):
        native = _native_class()
        if native is not None:
            return native(max_depth, max_cached)
    return PythonSuffixIndex(max_depth, max_cached)


@functools.cache
def _native_class() -> type[SuffixIndex] | None:
    try:
        from draftsmith.drafters.suffix_native import NativeSuffixIndex
    except ImportError:
        print(
            "draftsmith: the native suffix index is not built, the slower pure Python one serves"
            " (install g++ and reinstall draftsmith to get it)",
            file=sys.stderr,
        )
        return None
    return NativeSuffixIndex
