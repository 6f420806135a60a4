"""Drafting with a recurrent feature drafter: EAGLE and multi-token prediction share all of it but their weights.

True row t of a sequence pairs the target's features of row t with token x_{t+1}, so after a commit of the first n
rows the last of them predicts the token below the root. Features are kept as they come and turned into rows when a
proposal is asked for: rejected drafts, spells without drafting, prompt chunks, cuts and forks are one case. The
features of every live row are kept (`bytes_per_token` counts them), because a fork or a cut at length L pairs those
of row L-1 with another token than before, and L may be anything. Invariants: rows of drafted tokens never outlive the
proposal; without the features of every row before the root nothing is proposed.

Shape letters: U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from draftsmith.core.types import Budget, DraftTraits, Proposal, Rule
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Tap, TargetInfo
from draftsmith.drafters.checkpoint import build_module, read_method
from draftsmith.drafters.drafting import Draft, DrawnDraft
from draftsmith.drafters.dynamic_tree import DynamicDraft
from draftsmith.drafters.growth import takes_point_masses, verifies_trees
from draftsmith.drafters.kept_features import KeptFeatures
from draftsmith.drafters.rank_accuracy import read_accuracies
from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.drafters.rows import ChainDraw, Level, RowRunner, TrueRows
from draftsmith.drafters.rows_choice import check_bits, make_runner
from draftsmith.drafters.shapes import AUTO, CHAIN, Below, Shapes, is_branching, option_paths
from draftsmith.drafters.shipped import weights_for
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.errors import OptionError

_ROWS_AT_ONCE = 512
_DYNAMIC = "dynamic"
_DEPTH, _TOP_K = 6, 8


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions:
    """Options of recurrent drafters.

    `path`: the trained drafter's directory; empty for one that comes with the package. `max_draft`: most nodes of a
    proposal. `tree`: "auto" (what the controller asks for), "chain", "dynamic" (EAGLE-2's tree), or children per level,
    as in "3x2x1"; requests whose rule verifies drawn chains alone get chains. `depth`: longest path of a dynamic tree;
    none is 6. `top_k`: how many nodes of a dynamic tree's level are expanded into how many children each; none is 8.
    `bits`: 4 or 8, what the weights are quantised to beside a target on the native backend; 4 costs about a hundredth
    of a draft and saves a seventh of the time (docs/results.md).
    """

    path: str = ""
    max_draft: int = 16
    tree: str = AUTO
    depth: int | None = None
    top_k: int | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        for name in ("max_draft", "depth", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")
        check_bits(self.bits)
        if self.tree != _DYNAMIC:
            if self.depth is not None or self.top_k is not None:
                raise OptionError(f"depth and top_k are for tree=dynamic, and tree is {self.tree}")
            option_paths(self.tree, self.max_draft, others=f"{_DYNAMIC}, ")

    @property
    def paths(self) -> list[tuple[int, ...]] | None:
        """The shape that is fixed, None for a chain, a dynamic tree or what budgets name."""
        return None if self.tree == _DYNAMIC else option_paths(self.tree, self.max_draft)


class RecurrentDrafter(TrainableDrafter):
    """Keeps every sequence's features, and drafts chains and trees with a `RowRunner`."""

    Options = RecurrentOptions
    Module: ClassVar[type[RecurrentModule]]
    method: ClassVar[str]
    """The drafter's name in the table; its weights are stored under it."""
    alike: ClassVar[frozenset[str]] = frozenset()
    """Other drafters of the table that have the same weights."""

    def __init__(
        self,
        options: RecurrentOptions,
        module: RecurrentModule,
        runner: RowRunner,
        target: TargetInfo,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self._options = options
        self._shapes = Shapes(options.paths, options.max_draft)
        self.traits = DraftTraits(
            fills_shapes=options.tree == AUTO,
            rank_accuracies=None if accuracies is None else tuple(tuple(row) for row in accuracies),
        )
        self._runner = runner
        self._order: tuple[Tap, ...] = module.taps
        self._dtype = module.dtype
        self._draft_ids = None if len(module.draft_ids) == target.vocab_size else module.draft_ids
        self._vocab_size = target.vocab_size
        self._eos_ids = target.eos_ids
        self._features: dict[int, KeptFeatures] = {}
        self.needs = frozenset(self._order)
        row_bytes = len(self._order) * target.backend.spec.width * self._dtype.itemsize
        self.bytes_per_token = runner.bytes_per_token + row_bytes

    @classmethod
    def create(cls, options: Any, target: TargetInfo) -> Self:
        """Load the weights. Raises `ModelFileError` for what is not this drafter's or not this target's."""
        path = weights_for(options.path, cls.method, cls.alike, target)
        checkpoint = read_method(path, cls.method, cls.alike)
        module = build_module(checkpoint, target)
        assert isinstance(module, RecurrentModule)
        module.for_drafting()
        runner = make_runner(module, target, options.bits)
        return cls(options, module, runner, target, read_accuracies(checkpoint.about, str(path)))

    # -- proposing --------------------------------------------------------------------------------

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """Chains or trees below every root whose features are all there."""
        proposals = [Proposal.empty(view.root) for view in views]
        chains: list[int] = []
        drafts: dict[int, Draft] = {}
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            if not self._is_ready(view):
                continue
            below = self._shapes.below(budget)
            # Point masses may be cut anywhere, so a chain of them is drafted first and judged afterwards.
            quick = takes_point_masses(view.sampler) and view.sampler.context_free
            if quick and self._options.tree in (AUTO, CHAIN) and not is_branching(below):
                chains.append(place)
            else:
                drafts[place] = self._draft(view, min(budget, self._options.max_draft), below)
        if chains:
            depths = [min(budgets[place], self._options.max_draft) for place in chains]
            least = min(Budget.least_of(budgets[place]) for place in chains)
            found = self._chains([views[place] for place in chains], depths, keep_drafting, least)
            for place, proposal in zip(chains, found, strict=True):
                proposals[place] = proposal
        if drafts:
            self._draw(list(drafts.values()), keep_drafting)
            for place, draft in drafts.items():
                proposals[place] = draft.proposal()
        return proposals

    def _is_ready(self, view: SequenceView) -> bool:
        features = self._features.get(view.sequence_id)
        return features is not None and not features.has_gap and features.length == len(view.tokens) - 1 > 0

    def _draft(self, view: SequenceView, budget: int, below: Below | None) -> Draft:
        options = self._options
        shared = (view, self._vocab_size, budget, self._eos_ids)
        if options.tree == _DYNAMIC and verifies_trees(view.sampler):
            depth, top_k = options.depth or _DEPTH, options.top_k or _TOP_K
            return DynamicDraft(*shared, depth=depth, top_k=top_k, draft_ids=self._draft_ids)
        return DrawnDraft(*shared, below=below, draft_ids=self._draft_ids)

    def _chains(
        self, views: Sequence[SequenceView], depths: Sequence[int], keep_drafting: Callable[[float], bool], least: float
    ) -> list[Proposal]:
        """Chains of point masses, in one call; which of it is kept is asked level by level, as if it was drafted so."""
        groups = [self._catch_up(view) for view in views]
        draws = [self._chain_draw(view) for view in views]
        chains = self._runner.chain(groups, depths, least, draws if any(draws) else ())
        drafts = [
            DrawnDraft(view, self._vocab_size, depth, self._eos_ids) for view, depth in zip(views, depths, strict=True)
        ]
        going = list(zip(drafts, chains, strict=True))
        for step in range(max(depths)):
            going = [
                (draft, chain)
                for draft, chain in going
                if step < len(chain.tokens) and draft.accept(chain.tokens[step], chain.probs[step], keep_drafting)
            ]
        return [draft.proposal() for draft in drafts]

    def _chain_draw(self, view: SequenceView) -> ChainDraw | None:
        """None where the likeliest tokens are drafted."""
        sampler = view.sampler
        if sampler.greedy or sampler.params.draft_rule is Rule.MATCH:
            return None
        if self._draft_ids is not None:
            sampler = sampler.narrowed(len(self._draft_ids))
        return ChainDraw(sampler, view.random, view.position)

    def _draw(self, drafts: Sequence[Draft], keep_drafting: Callable[[float], bool]) -> None:
        """Level by level until every draft is done."""
        rows_of: dict[int, dict[int, int]] = {id(draft): {0: -1} for draft in drafts}
        begun = self._runner.begin([self._catch_up(draft.view) for draft in drafts])
        logits: Sequence[torch.Tensor] = begun.split(1)
        while drafts:
            for draft, logits_RU in zip(drafts, logits, strict=True):
                draft.extend(logits_RU, keep_drafting)
            drafts = [draft for draft in drafts if draft.level]
            if drafts:
                logits = self._runner.extend([_next_level(draft, rows_of[id(draft)]) for draft in drafts])

    # -- keeping up -------------------------------------------------------------------------------

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep the features of the rows that stay."""
        for commit in commits:
            sequence_id = commit.view.sequence_id
            features = self._features.get(sequence_id)
            if features is None:
                features = self._features[sequence_id] = KeptFeatures(self._dtype)
            features.append([commit.taps[tap] for tap in self._order])
            # After a step that emitted, all tokens but the root have rows.
            if commit.verdict is not None and features.length != len(commit.view.tokens) - 1:
                features.has_gap = True

    def _catch_up(self, view: SequenceView) -> TrueRows:
        """The true rows that the runner lacks, the last few of them; those before them are fed at once."""
        sequence_id = view.sequence_id
        features = self._features[sequence_id]
        start = self._runner.num_rows(sequence_id)
        while features.length - start > _ROWS_AT_ONCE:
            stop = start + _ROWS_AT_ONCE
            self._runner.append([self._true_rows(view, start, stop)])
            start = stop
        return self._true_rows(view, start, features.length)

    def _true_rows(self, view: SequenceView, start: int, stop: int) -> TrueRows:
        rows = self._features[view.sequence_id].rows(start, stop)
        return TrueRows(view.sequence_id, view.tokens[start + 1 : stop + 1], rows)

    def pending(self, view: SequenceView) -> int:
        """Rows whose features are kept and not fed yet."""
        features = self._features.get(view.sequence_id)
        return 0 if features is None else features.length - self._runner.num_rows(view.sequence_id)

    def fork(self, source: int, copy: int, length: int) -> None:
        """The copy has the features of the first `length` rows; its last row is made anew, of its own next token."""
        self.forget(copy)
        features = self._features.get(source)
        if features is None or length < 1:
            return
        self._features[copy] = features.first(length)
        shared = min(length - 1, self._runner.num_rows(source))
        if shared > 0:
            self._runner.fork(source, copy, shared)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Keep the features of the first `length` rows; the last of these is made anew."""
        features = self._features.get(sequence_id)
        if features is None:
            return
        if length < 1:
            self.forget(sequence_id)
        else:
            self._features[sequence_id] = features.first(length)
            # Row length - 1 read the token after the cut.
            self._runner.truncate(sequence_id, length - 1)

    def forget(self, sequence_id: int) -> None:
        """Drop features and rows of a sequence."""
        self._features.pop(sequence_id, None)
        self._runner.forget(sequence_id)


def _next_level(draft: Draft, rows: dict[int, int]) -> Level:
    """The nodes to score next; `rows` learns their row numbers."""
    tokens, parents = draft.growth.tokens, draft.growth.parents
    level = Level(
        draft.view.sequence_id,
        [tokens[node] for node in draft.level],
        [rows[parents[node]] for node in draft.level],
    )
    for node in draft.level:
        rows[node] = len(rows) - 1
    return level
