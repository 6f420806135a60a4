"""The lossless verification rules: what is kept of a proposal, given the target's rows.

Called by `core.verify` and, with enumerated chance, by tests and audits. Three rules cover all: `walk`
(greedy, match, seeded coupling), `recursive` (chain rejection on a chain) and `traversal` (block
verification on a chain). Invariant: a rule looks at laws and tokens only, all randomness is a question
to `Chance`, and laws are evaluated only where the walk gets to.

Shape letters: T tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, Vector
from draftsmith.core.draw import SiblingLaw
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, Tree, Verdict


def walk(tree: Tree, token_at: Callable[[int, Sequence[int]], int]) -> Verdict:
    """Follow the target's own tokens down the tree as far as it carries them, then emit one more.

    `token_at(node, path_tokens)`: the target's token after `node`. Whatever the candidates are and however
    they were chosen, every emitted token is the target's own, so the law is the target's.
    """
    tokens, parents = tree.tokens, tree.parents
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    wanted = token_at(0, emitted)
    # Children come after their parents, so one pass meets every step of the walk.
    for child in range(1, len(parents)):
        if parents[child] == node and tokens[child] == wanted:
            path.append(child)
            emitted.append(wanted)
            node = child
            wanted = token_at(child, emitted)
    emitted.append(wanted)
    return Verdict(tuple(path), tuple(emitted))


def recursive(proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance) -> Verdict:
    """Recursive rejection over siblings in draw order, from the root down.

    On a chain this is chain rejection (Leviathan et al. 2211.17192, Chen et al. 2302.01318), on independent
    siblings the multi-step sampling of SpecInfer (2305.09781), on siblings without replacement that of RSD
    (2402.14160) and Sequoia (2402.12374). Raises `UnsoundError` for a law
    that cannot have drawn the children.
    """
    tokens = proposal.tree.tokens
    children = trees.children(proposal.tree.parents)
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while True:
        target_V = target_law(sampler, logits_TV, node, emitted)
        accepted = None
        if children[node]:
            siblings = SiblingLaw(proposal, node, len(target_V))
            for child in children[node]:
                draft_prob = siblings.prob(child)
                if chance.accept(child, float(target_V[tokens[child]]), draft_prob):
                    accepted = child
                    break
                target_V, _ = residual(target_V, siblings, 1.0)
                siblings.reject(child)
        if accepted is None:
            emitted.append(chance.emit(node, target_V))
            return Verdict(tuple(path), tuple(emitted))
        path.append(accepted)
        emitted.append(tokens[accepted])
        node = accepted


def traversal(proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance) -> Verdict:
    """Traversal verification, from the leaves up (2505.12398); on a chain, block verification (2403.10444).

    A child is visited, subtree first, before its parent is judged; each visit carries the probability with
    which its node is still to be accepted. Scanning a chain this way finds the last success, as block
    verification must. Raises `UnsoundError` as `recursive` does.
    """
    tokens = proposal.tree.tokens
    children = trees.children(proposal.tree.parents)
    visits = [_Visit(0, 1.0, children[0])]
    while True:
        visit = visits[-1]
        if visit.untried:
            child = visit.untried[0]
            if visit.siblings is None:
                visit.open(proposal, target_law(sampler, logits_TV, visit.node, _path_tokens(visits, tokens)))
            weight = visit.weight_of(child, tokens[child])
            if weight > 0:
                visits.append(_Visit(child, weight, children[child]))
            else:
                visit.reject(child)
            continue
        # The root needs no coin: its weight stays 1.
        if len(visits) == 1 or chance.accept(visit.node, visit.weight, 1.0):
            path_tokens = _path_tokens(visits, tokens)
            if visit.target_V is None:
                visit.target_V = target_law(sampler, logits_TV, visit.node, path_tokens)
            extra = chance.emit(visit.node, visit.target_V)
            return Verdict(tuple(step.node for step in visits[1:]), (*path_tokens, extra))
        visits.pop()
        visits[-1].reject(visit.node)


class _Visit:
    """A node under traversal: its probability of acceptance so far and the law left after failed children."""

    __slots__ = ("node", "siblings", "target_V", "untried", "weight")

    def __init__(self, node: int, weight: float, children: list[int]) -> None:
        self.node = node
        self.weight = weight
        self.untried = children
        self.target_V: Vector | None = None
        self.siblings: SiblingLaw | None = None

    def open(self, proposal: Proposal, target_V: Vector) -> None:
        self.target_V = target_V
        self.siblings = SiblingLaw(proposal, self.node, len(target_V))

    def weight_of(self, child: int, token: int) -> float:
        assert self.siblings is not None and self.target_V is not None
        prob = self.siblings.prob(child)
        return min(1.0, self.weight * float(self.target_V[token]) / prob)

    def reject(self, child: int) -> None:
        assert self.siblings is not None and self.target_V is not None
        self.target_V, mass = residual(self.target_V, self.siblings, self.weight)
        # Grouped so that a weight of 1 stays exactly 1; nothing left of either means a sure acceptance.
        total = mass + (1.0 - self.weight)
        self.weight = mass / total if total > 0 else 1.0
        self.siblings.reject(child)
        self.untried = self.untried[1:]


def residual(target_V: Vector, siblings: SiblingLaw, weight: float) -> tuple[Vector, float]:
    """norm(max(weight * target - draft, 0)) and the mass before normalising.

    When nothing is left (the laws agree up to rounding) the target law itself stands in, with mass 0.
    """
    left_V = siblings.excess(target_V if weight == 1.0 else weight * target_V)
    mass = float(left_V.sum())
    if mass > 0:
        left_V /= mass
        return left_V, mass
    return target_V, 0.0


def target_law(sampler: Sampler, logits_TV: torch.Tensor, node: int, path: Sequence[int]) -> Vector:
    """The target's law after a node, float64 [V]. `path`: drafted tokens down to the node."""
    law_V: Vector = sampler.law(logits_TV[node], path).cpu().numpy()
    return law_V


def _path_tokens(visits: Sequence[_Visit], tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens[visit.node] for visit in visits[1:])
