"""Suffix drafting: continue the text as this request, or earlier answers, continued after the same words.

Called by the engine like every drafter; the trees live in `drafters.suffix_index`. A request's local tree
holds its prompt and output, the global tree the outputs of all requests, live. A cancelled or preempted
request's output stays in the global tree until it is evicted: the target said it, which is all that matters.
Invariant: the index knows a prefix of `view.tokens`, and catches up before it speculates.
Source: SuffixDecoding (arXiv 2411.04975); options and scores as in ArcticInference.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from draftsmith.core.types import Proposal, Tree
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Drafter, TargetInfo
from draftsmith.drafters.suffix_index import Draft, SuffixIndex, open_index
from draftsmith.errors import OptionError

_NATIVE_BYTES_PER_TOKEN = 250
_PYTHON_BYTES_PER_TOKEN = 2500


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """Options of the suffix drafter.

    `max_depth`: longest substring the trees know; match and draft together stay within it. `max_spec_factor`:
    a match of m tokens may draft floor(m * max_spec_factor + max_spec_offset) tokens. `max_spec_offset`: tokens
    that may be drafted whatever the match, see max_spec_factor. `min_token_prob`: least path probability of a
    drafted token. `max_cached_requests`: answers kept in the global tree, oldest out first (-1: no limit, 0: no
    global tree). `tree`: draft the likeliest nodes in place of the likeliest path. `path`: a saved global tree to
    start from (`save_global` writes one).
    """

    max_depth: int = 64
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 2000
    tree: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        if self.max_depth < 2:
            raise OptionError(
                f"suffix: max_depth is {self.max_depth}; it must be at least 2 (one matched, one drafted)"
            )
        if self.max_spec_factor < 0:
            raise OptionError(f"suffix: max_spec_factor is {self.max_spec_factor}; it must be at least 0")
        if not 0 <= self.min_token_prob <= 1:
            raise OptionError(f"suffix: min_token_prob is {self.min_token_prob}; allowed: 0 to 1")
        if self.max_cached_requests < -1:
            raise OptionError(
                f"suffix: max_cached_requests is {self.max_cached_requests}; allowed: -1 (no limit), 0 (no global "
                "tree), or a number of answers"
            )


@final
class SuffixDrafter(Drafter):
    """Copies what followed the longest match before, in this request or in answers to others, from suffix trees."""

    Options = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetInfo, index: SuffixIndex) -> None:
        self._options = options
        self._eos_ids = target.eos_ids
        self._target = target
        self._index = index
        self.bytes_per_token = _NATIVE_BYTES_PER_TOKEN if index.is_native else _PYTHON_BYTES_PER_TOKEN

    @classmethod
    def create(cls, options: SuffixOptions, target: TargetInfo) -> Self:
        """Make the drafter, with the saved global tree if one is named.

        Raises `ModelFileError` for a file that is none, `OptionError` for one of another vocabulary.
        """
        drafter = cls(options, target, open_index(options.max_depth, options.max_cached_requests))
        if options.path is not None:
            drafter._index.load(Path(options.path), vocabulary_label(target))
        return drafter

    @property
    def index(self) -> SuffixIndex:
        """The trees (for statistics and benchmarks)."""
        return self._index

    def save_global(self, path: str | Path) -> None:
        """Write the global tree to a file that option `path` reads. Raises `OptionError` when it cannot."""
        self._index.save(Path(path), vocabulary_label(self._target))

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """Per view the draft of highest score; a node's confidence is its estimate C, given its parent."""
        return [
            self.proposal_of(view, self.speculate(view, budget)) for view, budget in zip(views, budgets, strict=True)
        ]

    def speculate(self, view: SequenceView, budget: int) -> Draft:
        """The best draft of at most `budget` tokens; its `score` estimates how many of them will be accepted."""
        self._catch_up(view)
        options = self._options
        return self._index.speculate(
            view.sequence_id,
            budget,
            options.max_spec_factor,
            options.max_spec_offset,
            options.min_token_prob,
            options.tree,
        )

    def proposal_of(self, view: SequenceView, draft: Draft) -> Proposal:
        """A draft as a proposal below the view's root; nothing is left below an end id."""
        if not draft.tokens:
            return Proposal.empty(view.root)
        if not self._eos_ids.isdisjoint(draft.tokens):
            draft = _cut_below(draft, self._eos_ids)
        probs = draft.probs
        return Proposal(
            Tree((view.root, *draft.tokens), (-1, *[parent + 1 for parent in draft.parents])),
            confidence=(
                1.0,
                *[
                    prob / probs[parent] if parent >= 0 else prob
                    for prob, parent in zip(probs, draft.parents, strict=True)
                ],
            ),
        )

    def commit(self, commits: Sequence[Commit]) -> None:
        """Both trees learn what was emitted, whether or not the sequence drafts just now."""
        for commit in commits:
            self._catch_up(commit.view)

    def fork(self, source: int, copy: int, length: int) -> None:
        """The copy's trees are built from its own tokens when it first drafts or commits."""
        self.forget(copy)

    def truncate(self, sequence_id: int, length: int) -> None:
        """A tree cannot unlearn: it is dropped if it knows too much, and built anew with the next tokens."""
        if self._index.request_len(sequence_id) > length:
            self._index.stop_request(sequence_id)

    def forget(self, sequence_id: int) -> None:
        """Drop the local tree; the output stays in the global one."""
        self._index.stop_request(sequence_id)

    def _catch_up(self, view: SequenceView) -> None:
        index, tokens = self._index, view.tokens
        known = index.request_len(view.sequence_id)
        if known < 0:
            index.start_request(view.sequence_id, tokens[: view.prompt_len])
            known = view.prompt_len
        if known < len(tokens):
            index.extend_request(view.sequence_id, tokens[known:])


def _cut_below(draft: Draft, end_ids: frozenset[int]) -> Draft:
    """The draft without the descendants of its end tokens."""
    place: dict[int, int] = {-1: -1}
    for node, parent in enumerate(draft.parents):
        if parent in place and (parent < 0 or draft.tokens[parent] not in end_ids):
            place[node] = len(place) - 1
    kept = [node for node in place if node >= 0]
    return Draft(
        tokens=tuple(draft.tokens[node] for node in kept),
        parents=tuple(place[draft.parents[node]] for node in kept),
        probs=tuple(draft.probs[node] for node in kept),
        score=draft.score,
        match_len=draft.match_len,
        from_global=draft.from_global,
    )


def vocabulary_label(target: TargetInfo) -> str:
    """Names the vocabulary a saved tree's ids belong to: its size and a checksum of its tokens' spelling."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        return f"{target.vocab_size} ids"
    spelling = "\n".join(str(tokenizer.token_text(token)) for token in range(tokenizer.vocab_size))
    return f"{tokenizer.vocab_size} tokens {zlib.crc32(spelling.encode('utf-8', 'surrogatepass')):08x}"
