"""The nouns every layer shares: trees, draft laws, proposals, verdicts.

Called by every other module; knows no model. Invariants: node 0 of a tree is the root (the last
emitted token, not yet fed to the target); parents come before children; siblings stand in draw order.

Shape letters: T tree nodes (root included), V vocabulary, C candidates of a sparse law.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch


class ProposalKind(enum.Enum):
    """How the drafted tokens of a proposal came about; the verifier dispatches on it."""

    POINT_MASS = "point_mass"
    """Deterministic given context and noise the verifier never uses as a coin (also seeded coupling)."""
    IID = "iid"
    """Siblings drawn independently from their parent's law."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn from their parent's law with earlier siblings removed and the rest renormalised."""


class Rule(enum.Enum):
    """Lossless verification rules a request may ask for at temperature > 0 (greedy is its own branch).

    `coupling`: the plain run's ids for each seed; drafts are drawn with the target's own noise. `match`: the plain
    run's ids for each seed; drafts are a drafter's likeliest tokens. `chain`: rejection sampling of a drawn chain,
    token by token; exact in law. `block`: a drawn chain is judged as a whole, which keeps more of it; exact in law.
    `recursive`: rule chain for drawn trees, sibling after sibling; exact in law. `traversal`: rule block for drawn
    trees; exact in law.
    """

    COUPLING = "coupling"
    MATCH = "match"
    CHAIN = "chain"
    BLOCK = "block"
    RECURSIVE = "recursive"
    TRAVERSAL = "traversal"


@dataclass(frozen=True, slots=True)
class Tree:
    """A rooted tree of tokens. `tokens[0]` is the root; `parents[0] == -1`; `parents[i] < i`."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Number of nodes below the root."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Law:
    """A probability law over the target vocabulary, dense or sparse.

    Dense: `probs` has shape [V] and `ids` is None. Sparse: `probs` has shape [C], `ids` (int64, [C],
    distinct) names the tokens, everything else has probability 0. Probabilities sum to 1.
    """

    probs: torch.Tensor
    ids: torch.Tensor | None = None

    def prob(self, token: int) -> float:
        """Probability of one token."""
        if self.ids is None:
            return float(self.probs[token])
        hit = (self.ids == token).nonzero()
        return float(self.probs[hit[0, 0]]) if len(hit) else 0.0

    def dense(self, vocab_size: int) -> torch.Tensor:
        """The law as a dense tensor [V] (the stored tensor itself when it is dense already)."""
        if self.ids is None:
            return self.probs
        dense_V = torch.zeros(vocab_size, dtype=self.probs.dtype, device=self.probs.device)
        dense_V[self.ids] = self.probs
        return dense_V


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter proposes below the root of one sequence.

    `laws[node]` is the law from which the children of `node` were really drawn (empty for
    POINT_MASS); `confidence[node]` optionally estimates P(node accepted | parent accepted). `foreseen`: every
    confidence was judged before its own token was drawn, from what came before it.
    """

    tree: Tree
    kind: ProposalKind = ProposalKind.POINT_MASS
    laws: Mapping[int, Law] = field(default_factory=dict)
    confidence: tuple[float, ...] | None = None
    foreseen: bool = False

    @staticmethod
    def empty(root: int) -> Proposal:
        """The proposal of a drafter that drafts nothing."""
        return Proposal(Tree((root,), (-1,)))


class Budget(int):
    """Nodes a request may draft below the root. A plain number leaves their shape to the drafter.

    `shape`: rank paths (candidate j below candidate i: (i, j)) in order of worth, as many as the number says; drafters
    that fill shapes (`DraftTraits`) draft this tree, others ignore it. `may_start`: False asks a drafter that has a
    part without a start (`DraftTraits.starts_partly`) to draft with that part alone. `least`: a chain of point masses
    that is drafted in one call may end where the product of its confidences falls below this.
    """

    shape: tuple[tuple[int, ...], ...] | None
    may_start: bool
    least: float

    def __new__(
        cls,
        num_nodes: int,
        shape: tuple[tuple[int, ...], ...] | None = None,
        *,
        may_start: bool = True,
        least: float = 0.0,
    ) -> Self:
        assert shape is None or len(shape) == num_nodes, f"{num_nodes} nodes for a shape of {shape}"
        made = super().__new__(cls, num_nodes)
        made.shape = shape
        made.may_start = may_start
        made.least = least
        return made

    @staticmethod
    def lets_start(budget: int) -> bool:
        """Whether the drafter may read what it lacks of the text."""
        return budget.may_start if isinstance(budget, Budget) else True

    @staticmethod
    def least_of(budget: int) -> float:
        """Where a chain may end; 0 for a plain number."""
        return budget.least if isinstance(budget, Budget) else 0.0

    @staticmethod
    def shape_of(budget: int) -> tuple[tuple[int, ...], ...] | None:
        """The shape that comes with a budget, None for a plain number."""
        return budget.shape if isinstance(budget, Budget) else None


@dataclass(frozen=True, kw_only=True)
class DraftTraits:
    """What a drafter says of itself once; controllers decide by it.

    `fills_shapes`: it drafts the tree that a `Budget` names. `max_depth`: longest path it can draft, None for any.
    `starts_partly`: a part of it drafts without reading what it lacks (a suffix tree beside a model).
    `rank_accuracies`: `[depth][rank]`, how often the candidate of that rank was right on calibration texts given that
    its parent was, None if nobody has measured.
    """

    fills_shapes: bool = False
    max_depth: int | None = None
    starts_partly: bool = False
    rank_accuracies: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification kept of one proposal.

    `path`: accepted node ids in order, root left out. `tokens`: emitted tokens, the accepted ones
    followed by the residual or bonus token, cut by stop rules to `len(tokens)`. `costs`: by a lossy rule
    alone, for each token the total variation between the law it was emitted from and the target's.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    costs: tuple[float, ...] | None = None

    @property
    def num_accepted(self) -> int:
        """Accepted drafted tokens among those emitted."""
        return min(len(self.path), len(self.tokens))

    @property
    def num_emitted(self) -> int:
        """Emitted tokens."""
        return len(self.tokens)

    def cut(self, num_tokens: int) -> Verdict:
        """The verdict with only its first `num_tokens` emitted tokens (a stop rule ended the step)."""
        costs = None if self.costs is None else self.costs[:num_tokens]
        return Verdict(self.path[:num_tokens], self.tokens[:num_tokens], costs)
