"""Standalone draft model: a smaller decoder with its own cache drafts token by token.

Called by the engine like every drafter; batches all sequences of a step into one forward per depth. The
draft's cache may hold drafted tokens that were never emitted: before the next proposal it is cut to the
longest common prefix with what was emitted, and fed what it lacks, so rejections, spells without
drafting, preemption and reuse are all one case. Invariant: the law in a proposal is the law that drew.

Shape letters: V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch

from draftsmith.core.types import DraftTraits, Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.drafting import DrawnDraft
from draftsmith.drafters.shapes import AUTO, Shapes, option_paths
from draftsmith.drafters.student import StudentModule
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.drafters.vocabulary import VocabularyMap, map_vocabularies
from draftsmith.errors import OptionError
from draftsmith.models.backend import Backend, RowGroup

_CATCH_UP_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the standalone draft model.

    `model`: a model name as for the target. `max_draft`: most nodes of a proposal. `tree`: "auto" (what the
    controller asks for), "chain", or children per level, as in "3x2x1"; requests whose rule verifies chains alone
    get chains.
    """

    model: str
    max_draft: int = 16
    tree: str = AUTO

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("draft_model needs a model: write draft_model:model=NAME")
        if self.max_draft < 1:
            raise OptionError(f"draft_model: max_draft is {self.max_draft}; it must be at least 1")
        option_paths(self.tree, self.max_draft)


@dataclass(slots=True)
class _Known:
    """What the draft model knows of a sequence: its emitted tokens in draft ids.

    `lengths[i]`: draft tokens after the first i target tokens (None: one for one). `num_held`: so many of
    the tokens are known to be the cache's first ones.
    """

    tokens: list[int] = field(default_factory=list)
    num_target: int = 0
    lengths: list[int] | None = None
    num_held: int = 0

    def length_at(self, num_target: int) -> int:
        num_target = min(num_target, self.num_target)
        return num_target if self.lengths is None else self.lengths[num_target]

    def cut(self, num_target: int) -> None:
        if num_target < self.num_target:
            del self.tokens[self.length_at(num_target) :]
            if self.lengths is not None:
                del self.lengths[num_target + 1 :]
            self.num_target = num_target
            self.num_held = min(self.num_held, len(self.tokens))


@final
class ModelDrafter(TrainableDrafter):
    """Drafts with another, smaller model, of the same vocabulary or another."""

    Options = ModelOptions
    Module = StudentModule
    directory_option = "model"

    def __init__(self, options: ModelOptions, backend: Backend, vocabulary: VocabularyMap, target: TargetInfo) -> None:
        self._options = options
        self._backend = backend
        self._cache = backend.cache
        self._vocabulary = vocabulary
        self._vocab_size = target.vocab_size
        self._eos_ids = target.eos_ids
        self._shapes = Shapes(option_paths(options.tree, options.max_draft), options.max_draft)
        self.traits = DraftTraits(fills_shapes=options.tree == AUTO)
        self._known: dict[int, _Known] = {}
        # Slots grow by doubling, so a token may hold twice its rows.
        self.bytes_per_token = 2 * self._cache.bytes_per_token

    @classmethod
    def create(cls, options: ModelOptions, target: TargetInfo) -> Self:
        """Load the draft model. Raises what loading raises, and `VocabularyError` when nothing is shared."""
        model = target.load_model(options.model)
        vocabulary = map_vocabularies(
            target.tokenizer, target.vocab_size, model.tokenizer, model.backend.spec.vocab_size, options.model
        )
        return cls(options, model.backend, vocabulary, target)

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """Chains, or trees of the chosen shape; shorter near the draft model's own context limit."""
        options = self._options
        drafts = [
            DrawnDraft(
                view,
                self._vocab_size,
                min(budget, options.max_draft),
                self._eos_ids,
                below=self._shapes.below(budget),
            )
            for view, budget in zip(views, budgets, strict=True)
        ]
        for draft in drafts:
            known = self._learn(draft.view)
            # Conformance LEN (vllm#48894): near its limit the draft model stops, generation goes on.
            draft.budget = min(draft.budget, max(0, self._backend.spec.max_context - len(known.tokens)))
        active = [draft for draft in drafts if draft.budget > 0 and self._known[draft.view.sequence_id].tokens]
        if active:
            rows = self._catch_up(active)
            while active:
                for draft, logits in zip(active, rows, strict=True):
                    draft.extend(map(self._vocabulary.logits_to_target, logits), keep_drafting)
                active = [draft for draft in active if draft.level]
                if active:
                    rows = self._score_level(active)
        return [draft.proposal() for draft in drafts]

    def pending(self, view: SequenceView) -> int:
        """What its cache lacks: the whole text before the first proposal, a token or two from then on."""
        held = self._cache.committed(view.sequence_id) if view.sequence_id in self._cache else 0
        return max(len(view.tokens) - held, 0)

    def fork(self, source: int, copy: int, length: int) -> None:
        """The copy starts from the verified rows the source's draft cache holds."""
        self.forget(copy)
        known = self._known.get(source)
        if known is None or source not in self._cache:
            return
        verified = known.tokens[: known.length_at(length)]
        held = _common_len(self._cache.tokens(source), verified)
        held = self._cache.reusable_len(source, held)
        if held > 0:
            self._cache.fork(source, copy, held)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget emitted tokens after the first `length`; at 0 the cache is given back."""
        known = self._known.get(sequence_id)
        if known is not None:
            known.cut(length)
        if length == 0 and sequence_id in self._cache:
            self._cache.close(sequence_id)  # `cut` has set num_held to 0

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence and its rows."""
        self._known.pop(sequence_id, None)
        if sequence_id in self._cache:
            self._cache.close(sequence_id)

    # -- keeping up -------------------------------------------------------------------------------

    def _learn(self, view: SequenceView) -> _Known:
        """Translate what was emitted since the last call."""
        known = self._known.get(view.sequence_id)
        if known is None:
            known = self._known[view.sequence_id] = _Known(lengths=None if self._vocabulary.is_identity else [0])
        for spelled in self._vocabulary.tokens_to_draft(view.tokens[known.num_target :]):
            known.tokens.extend(spelled)
            if known.lengths is not None:
                known.lengths.append(len(known.tokens))
        known.num_target = len(view.tokens)
        return known

    def _catch_up(self, drafts: Sequence[DrawnDraft]) -> list[torch.Tensor]:
        """Feed every sequence what its cache lacks; logits [1, U] after each sequence's last known token."""
        found: dict[int, torch.Tensor] = {}
        left = {draft.view.sequence_id: self._roll_back(draft.view.sequence_id) for draft in drafts}
        while left:
            rows_left = _CATCH_UP_ROWS
            groups = []
            for sequence_id, pending in left.items():
                size = min(len(pending), rows_left)
                if size == 0:
                    break
                rows_left -= size
                first_logit = size - 1 if size == len(pending) else size
                groups.append(RowGroup(sequence_id, pending[:size], range(-1, size - 1), first_logit))
            for group, logits in zip(groups, self._append(groups), strict=True):
                self._cache.keep(group.sequence_id, range(len(group.tokens)))
                left[group.sequence_id] = left[group.sequence_id][len(group.tokens) :]
                if not left[group.sequence_id]:
                    del left[group.sequence_id]
                    found[group.sequence_id] = logits
        return [found[draft.view.sequence_id] for draft in drafts]

    def _roll_back(self, sequence_id: int) -> list[int]:
        """Cut the cache to what was really emitted; returns the tokens it lacks, at least one."""
        known = self._known[sequence_id]
        tokens = known.tokens
        if sequence_id not in self._cache:
            self._cache.open(sequence_id)
        # Only what came after the last look can differ: comparing the whole text would cost more each step.
        held = min(known.num_held, len(tokens) - 1)
        held += _common_len(self._cache.tokens(sequence_id)[held:], tokens[held:-1])
        # A windowed layer may have dropped rows that a shorter text would still see.
        held = self._cache.reusable_len(sequence_id, held)
        if held < self._cache.committed(sequence_id):
            self._cache.truncate(sequence_id, held)
        known.num_held = len(tokens)
        return tokens[held:]

    def _score_level(self, drafts: Sequence[DrawnDraft]) -> list[torch.Tensor]:
        """Logits [level, U] of each draft's newest level."""
        groups, kept = [], []
        for draft in drafts:
            ids = [spelled[0] for spelled in self._vocabulary.tokens_to_draft(draft.growth.tokens[1:])]
            if not draft.is_tree:
                # A chain stays in the cache: likely it will be emitted.
                groups.append(RowGroup(draft.view.sequence_id, ids[-1:], (-1,), 0))
                kept.append(range(1))
            else:
                # Rows of a tree cannot stay, so each level scores the levels above it again.
                parents = [parent - 1 for parent in draft.growth.parents[1:]]
                groups.append(RowGroup(draft.view.sequence_id, ids, parents, draft.level[0] - 1))
                kept.append(range(0))
        logits = self._append(groups)
        for group, path in zip(groups, kept, strict=True):
            self._cache.keep(group.sequence_id, path)
        # A tree's rows go on from the level's first node to the last, ends included.
        return [
            rows if not draft.is_tree else rows[[node - draft.level[0] for node in draft.level]]
            for draft, rows in zip(drafts, logits, strict=True)
        ]

    def _append(self, groups: Sequence[RowGroup]) -> list[torch.Tensor]:
        for group in groups:
            self._cache.reserve(group.sequence_id, len(group.tokens))
        return list(self._backend.score(groups).logits)


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(place for place in range(limit) if left[place] != right[place])
