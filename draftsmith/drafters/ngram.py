"""N-gram drafting (prompt lookup): find the longest suffix of the text that occurred before, copy what followed.

Called by the engine like every drafter. One index per sequence maps each n-gram that has a continuation
to where that continuation starts; it grows by a constant number of entries per token, so a proposal at
32k tokens of context costs the same as one at 100. Source of the method: prompt lookup decoding and vLLM's
n-gram proposer. Invariant: an entry always points inside the text, at a token that exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Drafter, TargetInfo
from draftsmith.errors import OptionError

_COUNTED_MATCH = 32
"""A match is not measured beyond this many tokens: longer ones are no more trustworthy."""


@dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """Options of the n-gram drafter.

    `min_ngram`: shortest suffix looked up. `max_ngram`: longest suffix looked up; longer ones come first.
    `max_draft`: most tokens copied. `prefer`: which earlier occurrence to copy from, "latest" (what text does
    now resembles what it did last) or "earliest" (vLLM's choice; longest continuation).
    """

    min_ngram: int = 2
    max_ngram: int = 5
    max_draft: int = 16
    prefer: str = "latest"

    def __post_init__(self) -> None:
        if self.min_ngram < 1:
            raise OptionError(f"ngram: min_ngram is {self.min_ngram}; it must be at least 1")
        if self.max_ngram < self.min_ngram:
            raise OptionError(
                f"ngram: max_ngram {self.max_ngram} is below min_ngram {self.min_ngram}; raise it or lower min_ngram"
            )
        if self.max_draft < 1:
            raise OptionError(
                f"ngram: max_draft is {self.max_draft}; it must be at least 1 (use `none` to draft nothing)"
            )
        if self.prefer not in ("latest", "earliest"):
            raise OptionError(f"ngram: prefer is {self.prefer!r}; allowed: latest, earliest")


@final
class NgramIndex:
    """Where each n-gram of one text was last (or first) followed by something.

    Catching up costs a constant per new token; a lookup costs `max_ngram - min_ngram + 1` dictionary
    probes however long the text is.
    """

    __slots__ = ("_earliest", "_max", "_min", "_starts", "num_indexed")

    def __init__(self, min_ngram: int, max_ngram: int, *, earliest: bool) -> None:
        self._min = min_ngram
        self._max = max_ngram
        self._earliest = earliest
        self._starts: list[dict[tuple[int, ...], int]] = [{} for _ in range(min_ngram, max_ngram + 1)]
        self.num_indexed = 0
        """Continuations known: every n-gram ending before token `num_indexed` (inclusive) is in."""

    def copy(self) -> NgramIndex:
        """An independent copy."""
        twin = NgramIndex(self._min, self._max, earliest=self._earliest)
        twin._starts = [dict(starts) for starts in self._starts]
        twin.num_indexed = self.num_indexed
        return twin

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Index the n-grams whose continuation has arrived since the last call."""
        last = len(tokens) - 1
        if last <= self.num_indexed:
            return
        for n, starts in enumerate(self._starts, start=self._min):
            first = max(self.num_indexed + 1, n)
            if first > last:
                continue
            # Continuation starts first..last; the n-gram before start s is tokens[s - n : s].
            window = tokens[first - n : last]
            grams = zip(*(window[i:] for i in range(n)), strict=False)
            if self._earliest:
                for start, gram in enumerate(grams, start=first):
                    starts.setdefault(gram, start)
            else:
                starts.update(zip(grams, range(first, last + 1), strict=True))
        self.num_indexed = last

    def find(self, tokens: Sequence[int]) -> int | None:
        """Start of the continuation of the longest indexed suffix of `tokens`, or None."""
        length = len(tokens)
        for n in range(min(self._max, length), self._min - 1, -1):
            start = self._starts[n - self._min].get(tuple(tokens[length - n :]))
            if start is not None:
                return start
        return None


@final
class NgramDrafter(Drafter):
    """Copies the continuation of the longest suffix seen before, in prompt or output."""

    Options = NgramOptions

    def __init__(self, options: NgramOptions, eos_ids: frozenset[int]) -> None:
        self._options = options
        self._eos_ids = eos_ids
        self._indexes: dict[int, NgramIndex] = {}
        # A tuple of n tokens, a position and a dictionary slot per n-gram length.
        self.bytes_per_token = sum(160 + 8 * n for n in range(options.min_ngram, options.max_ngram + 1))

    @classmethod
    def create(cls, options: NgramOptions, target: TargetInfo) -> Self:
        """Make the drafter; of the target it uses only the end ids."""
        return cls(options, target.eos_ids)

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """A chain of point masses per view, empty where no suffix of min_ngram tokens occurred before.

        The confidence of a node is m / (m + 1) with m the length of the match before it.
        """
        return [self._propose_one(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Index prompts while they are read, so that the first proposal is not the one that waits."""
        for commit in commits:
            if commit.verdict is None:
                self._index(commit.view)

    def fork(self, source: int, copy: int, length: int) -> None:
        """Copy the index where it holds nothing beyond `length`; otherwise the copy is built when it drafts."""
        index = self._indexes.get(source)
        if index is not None and index.num_indexed < length:
            self._indexes[copy] = index.copy()
        else:
            self._indexes.pop(copy, None)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Drop an index that knows more than `length` tokens: overwritten occurrences cannot come back."""
        index = self._indexes.get(sequence_id)
        if index is not None and index.num_indexed >= length:
            del self._indexes[sequence_id]

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence's index."""
        self._indexes.pop(sequence_id, None)

    def _index(self, view: SequenceView) -> NgramIndex:
        index = self._indexes.get(view.sequence_id)
        if index is None:
            options = self._options
            index = NgramIndex(options.min_ngram, options.max_ngram, earliest=options.prefer == "earliest")
            self._indexes[view.sequence_id] = index
        index.catch_up(view.tokens)
        return index

    def _propose_one(self, view: SequenceView, budget: int) -> Proposal:
        tokens = view.tokens
        start = self._index(view).find(tokens)
        if start is None:
            return Proposal.empty(tokens[-1])
        drafted = tokens[start : start + min(budget, self._options.max_draft)]
        for place, token in enumerate(drafted):
            if token in self._eos_ids:  # an end may be drafted, what follows it cannot be used
                del drafted[place + 1 :]
                break
        matched = _match_len(tokens, start)
        return Proposal(
            chain(tokens[-1], drafted),
            confidence=(1.0, *((m := matched + depth) / (m + 1) for depth in range(len(drafted)))),
        )


def _match_len(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` equal the last tokens of the text."""
    length = len(tokens)
    longest = min(start, _COUNTED_MATCH)
    matched = 0
    while matched < longest and tokens[start - 1 - matched] == tokens[length - 1 - matched]:
        matched += 1
    return matched
