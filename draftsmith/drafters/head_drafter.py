"""How every head family drafts: the target's last row is kept per sequence, a static tree or chain grows from it.

Called by the engine through `MedusaDrafter` and the like, which add a module and a name. Invariants: a sequence is
drafted for only while what is kept covers all its tokens but the root (otherwise a fresh row is waited for); a level
of all sequences is one call of the module; the shape is known before anything is drawn.

Shape letters: S sequences, R rows, D target width, E entries kept of a row, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from draftsmith.core.tree_shapes import RankPath, best_paths, chain_paths, level_paths
from draftsmith.core.types import DraftTraits, Proposal
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, TargetInfo
from draftsmith.drafters.checkpoint import build_module, read_method
from draftsmith.drafters.growth import Growth, confidences_of, verifies_trees
from draftsmith.drafters.heads import HeadModule
from draftsmith.drafters.own_rows import OwnRows
from draftsmith.drafters.rank_accuracy import read_accuracies
from draftsmith.drafters.rows_choice import check_bits, prepare_heads
from draftsmith.drafters.shapes import AUTO, CHAIN, Shapes, is_branching, parse_levels
from draftsmith.drafters.shipped import weights_for
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of drafters with heads.

    `path`: the checkpoint's directory; empty for one that comes with the package. `max_draft`: most nodes of a
    proposal. `tree`: "auto" (what the controller asks for); "chain"; a number of nodes, as in "24", for the tree that
    the checkpoint's measured accuracies make best; or children per level, as in "3x2x1"; requests whose rule verifies
    chains alone get chains. `bits`: 8 or 4, what the weights are quantised to beside a target on the native backend.
    """

    path: str = ""
    max_draft: int = 64
    tree: str = AUTO
    bits: int = 8

    def __post_init__(self) -> None:
        if self.max_draft < 1:
            raise OptionError(f"max_draft is {self.max_draft}; it must be at least 1")
        check_bits(self.bits)
        if self.tree not in (AUTO, CHAIN):
            parse_levels(self.tree, others="a number of nodes like 24, ")

    def paths(self, num_depths: int, accuracies: Sequence[Sequence[float]] | None) -> list[RankPath] | None:
        """Rank paths of a tree that is fixed, in order of worth; None: what budgets name. Raises `OptionError`."""
        if self.tree == AUTO:
            return None
        if self.tree == CHAIN:
            return chain_paths(num_depths)[: self.max_draft]
        if self.tree.isdecimal():
            if accuracies is None:
                raise OptionError(
                    f"{self.path} holds no measured accuracies to build a tree of {self.tree} nodes from; "
                    "write children per level, like tree=3x2x1"
                )
            return best_paths(accuracies[:num_depths], min(int(self.tree), self.max_draft))
        levels = [int(part) for part in self.tree.split("x")]
        if len(levels) > num_depths:
            raise OptionError(f"tree {self.tree} has {len(levels)} levels; {self.path} drafts {num_depths} at most")
        return level_paths(levels, self.max_draft)


@dataclass(slots=True)
class _Known:
    """What is kept of a sequence. `num_rows`: rows heard of or copied; `hidden`: `last_hidden` [D] of the last one,
    None if it was not heard; `rows`: entries of all rows from the first on, as many as have been heard in a row.
    """

    num_rows: int = 0
    hidden: torch.Tensor | None = None
    rows: OwnRows = field(default_factory=OwnRows)


@dataclass(slots=True)
class _Draft:
    """One proposal on its way. `children`: of each node of the shape. `places`: the shape's node of each drafted
    node. `level`: nodes to draw below next, and `rows`: their rows in the level's logits.
    """

    growth: Growth
    children: list[list[int]]
    row: int
    places: list[int] = field(default_factory=lambda: [0])
    level: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Level:
    """Logits of one depth, and per row the logarithm of the total and the likeliest token's probability."""

    logits_RU: torch.Tensor
    totals: list[float]
    confidences: list[float]

    @classmethod
    def of(cls, logits_RU: torch.Tensor) -> Self:
        found = confidences_of(logits_RU)
        return cls(logits_RU, [total for _, total in found], [confidence for confidence, _ in found])


class HeadDrafter(TrainableDrafter):
    """Drafts with the heads of a checkpoint; families add `Module` and `method`."""

    Options = HeadOptions
    method: ClassVar[str]
    """Name in the table of drafters, which checkpoints carry."""

    def __init__(self, options: HeadOptions, module: HeadModule, about: Mapping[str, Any], target: TargetInfo) -> None:
        self._module = module.requires_grad_(False).eval()
        prepare_heads(module, target, options.bits)
        self._eos_ids = target.eos_ids
        self._vocab_size = target.vocab_size
        self._draft_ids = module.draft_ids if len(module.draft_ids) < target.vocab_size else None
        self._places = module.draft_places_V.tolist()
        accuracies = read_accuracies(about, options.path)
        self._chains = Shapes(chain_paths(module.num_depths), options.max_draft)
        self._trees = Shapes(options.paths(module.num_depths, accuracies), options.max_draft, module.num_depths)
        self.traits = DraftTraits(
            fills_shapes=options.tree == AUTO,
            max_depth=module.num_depths,
            rank_accuracies=None if accuracies is None else tuple(tuple(row) for row in accuracies),
        )
        self._known: dict[int, _Known] = {}
        self.needs = module.needs
        # Entries are float32, and their room grows by doubling.
        self.bytes_per_token = 2 * 4 * module.entry_width

    @classmethod
    def create(cls, options: HeadOptions, target: TargetInfo) -> Self:
        """Load a checkpoint. Raises `ModelFileError` for one that does not fit, `OptionError` for the options."""
        checkpoint = read_method(weights_for(options.path, cls.method, frozenset(), target), cls.method)
        module = build_module(checkpoint, target)
        assert isinstance(module, HeadModule)
        return cls(options, module, checkpoint.about, target)

    # -- keeping up -------------------------------------------------------------------------------

    @torch.inference_mode()
    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep the last row, and of every row what attention will look back at."""
        fresh: list[tuple[OwnRows, torch.Tensor, int]] = []
        for commit in commits:
            hidden_RD = commit.taps.get("last_hidden")
            if hidden_RD is None or len(hidden_RD) == 0:
                continue
            view = commit.view
            known = self._known.setdefault(view.sequence_id, _Known())
            # After a step that emitted, all tokens but the root have rows; a prompt chunk goes on from the last one.
            start = known.num_rows if commit.verdict is None else len(view.tokens) - 1 - len(hidden_RD)
            known.num_rows = start + len(hidden_RD)
            hidden_RD = hidden_RD.to(self._module.target_head_UD.dtype)
            known.hidden = hidden_RD[-1].clone()  # not the whole chunk
            if self._module.entry_width and known.rows.length == start:
                fresh.append((known.rows, hidden_RD, start))
        if fresh:
            self._append(fresh)

    def _append(self, fresh: Sequence[tuple[OwnRows, torch.Tensor, int]]) -> None:
        positions_R = torch.cat([torch.arange(start, start + len(hidden_RD)) for _, hidden_RD, start in fresh])
        entries_RE = self._module.entries(torch.cat([hidden_RD for _, hidden_RD, _ in fresh]), positions_R)
        parts = entries_RE.split([len(hidden_RD) for _, hidden_RD, _ in fresh])
        for (rows, _, _), part_RE in zip(fresh, parts, strict=True):
            rows.append(part_RE)

    def _covers(self, view: SequenceView) -> bool:
        """Whether what is kept reaches up to the root."""
        known, wanted = self._known.get(view.sequence_id), len(view.tokens) - 1
        if known is None or known.hidden is None or known.num_rows != wanted:
            return False
        return not self._module.entry_width or known.rows.length == wanted

    @torch.inference_mode()
    def fork(self, source: int, copy: int, length: int) -> None:
        """The copy gets the entries; the last row too where the source ends there, else it waits for its own."""
        self.forget(copy)
        known = self._known.get(source)
        if known is None:
            self._known[copy] = _Known(num_rows=length)
            return
        num_rows = min(length, known.num_rows)
        hidden = known.hidden if num_rows == known.num_rows else None
        self._known[copy] = _Known(num_rows, hidden, known.rows.copy(num_rows))

    def truncate(self, sequence_id: int, length: int) -> None:
        """Forget the rows after the first `length`."""
        known = self._known.get(sequence_id)
        if known is not None and length < known.num_rows:
            known.num_rows, known.hidden = length, None
            known.rows.truncate(length)

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence and its rows."""
        self._known.pop(sequence_id, None)

    # -- drafting ---------------------------------------------------------------------------------

    def propose(
        self,
        views: Sequence[SequenceView],
        budgets: Sequence[int],
        keep_drafting: Callable[[float], bool],
    ) -> list[Proposal]:
        """Chains, or trees of the chosen shape; nothing for a sequence whose last row is not known."""
        drafts: list[_Draft] = []
        growths: list[Growth] = []
        for view, budget in zip(views, budgets, strict=True):
            below = (self._trees.below(budget) if verifies_trees(view.sampler) else None) or self._chains.below(budget)
            assert below is not None
            growth = Growth(view, self._vocab_size, branches=is_branching(below), draft_ids=self._draft_ids)
            growths.append(growth)
            if below[0] and self._covers(view):
                drafts.append(_Draft(growth, below, len(drafts), rows=[len(drafts)]))
        if drafts:
            self._grow(drafts, keep_drafting)
        return [growth.proposal() for growth in growths]

    def _grow(self, drafts: list[_Draft], keep_drafting: Callable[[float], bool]) -> None:
        """All levels of all drafts."""
        module = self._module
        with torch.inference_mode():
            state = self._begin(drafts)
            depth_of_all = max(_num_levels(draft.children) for draft in drafts)
            ahead = [_Level.of(each) for each in module.all_logits(depth_of_all, state)] if module.independent else []
        for depth in range(depth_of_all):
            if ahead:
                level = ahead[depth]
            else:
                with torch.inference_mode():
                    level = _Level.of(module.logits(depth, state))
            parents: list[int] = []
            tokens: list[int] = []
            for draft in drafts:
                for row, node in self._draw_level(draft, level, keep_drafting):
                    draft.level.append(node)
                    draft.rows.append(draft.row if module.independent else len(tokens))
                    parents.append(row)
                    tokens.append(draft.growth.tokens[node])
            drafts = [draft for draft in drafts if draft.level]
            if not drafts:
                break
            if not module.independent:
                with torch.inference_mode():
                    state = module.advance(depth, state[parents], torch.tensor(tokens))

    def _begin(self, drafts: Sequence[_Draft]) -> torch.Tensor:
        """States [S, W] of the roots."""
        known = [self._known[draft.growth.view.sequence_id] for draft in drafts]
        hidden = [item.hidden for item in known if item.hidden is not None]
        features = self._module.last_features(torch.stack(hidden), [item.rows.filled for item in known])
        return self._module.begin(features, torch.tensor([draft.growth.view.root for draft in drafts]))

    def _draw_level(
        self, draft: _Draft, level: _Level, keep_drafting: Callable[[float], bool]
    ) -> list[tuple[int, int]]:
        """Draw below each node of a draft's level; (row of the parent, node) of what will have children itself."""
        growth, found = draft.growth, []
        nodes, rows, draft.level, draft.rows = draft.level, draft.rows, [], []
        # Independent heads say the same below every node of a level, unless the node's own path matters.
        shared = self._module.independent and growth.point_mass and growth.view.sampler.context_free
        widest = max(len(draft.children[draft.places[node]]) for node in nodes)
        drawn: Sequence[int] | None = None
        for node, row in zip(nodes, rows, strict=True):
            confidence, total = level.confidences[row], level.totals[row]
            # Judged before the draw, so that stopping here never looks at a token that could be dropped.
            if not keep_drafting(confidence):
                continue
            below = draft.children[draft.places[node]]
            logits_U = level.logits_RU[row]
            if drawn is None or not shared:
                drawn = growth.draw(node, logits_U, widest if shared else len(below))
            for place, token in zip(below, drawn, strict=False):  # a law may have fewer tokens than the shape
                own = confidence
                if growth.branches:
                    own = math.exp(min(0.0, float(logits_U[self._places[token]]) - total))
                child = growth.add(node, token, own)
                draft.places.append(place)
                if draft.children[place] and token not in self._eos_ids:  # nothing below an end can be used
                    found.append((row, child))
        return found


def _num_levels(below: Sequence[Sequence[int]]) -> int:
    """Levels of a shape below its root."""
    depth = [0] * len(below)
    for node, nodes in enumerate(below):
        for child in nodes:
            depth[child] = depth[node] + 1
    return max(depth)
