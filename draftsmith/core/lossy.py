"""Typical acceptance and lenience, and what all lossy rules need: laws of chains, and what a step cost.

Chosen by name (`registry.RULES`), asked by the engine's step. A rule tells with each emitted token the total
variation between the law it came from and the target's, given everything before it; so the sum of these costs over an
answer bounds the total variation between the laws of whole answers. Invariant: a token to which the target gives
probability 0 is never accepted.

Shape letters: T tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch

from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, Vector
from draftsmith.core.draw import SiblingLaw
from draftsmith.core.inexact import InexactRule
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Verdict
from draftsmith.core.verify_rules import residual, target_law
from draftsmith.errors import UnsoundError


@final
@dataclass(frozen=True, kw_only=True)
class TypicalAcceptance(InexactRule):
    """Medusa's typical acceptance (Cai et al. 2401.10774): likely enough is good enough.

    A node is accepted when its target probability exceeds min(epsilon, delta * exp(-entropy)); the longest
    accepted path is kept, ties by the larger probability of the path. The extra token is drawn from the
    target's law cut to the tokens above the same threshold, also where nothing was drafted. Both parameters
    are required: published code has their defaults swapped in places.

    `epsilon`: a probability that is enough whatever the law, above 0 and up to 1; in use: 0.09. `delta`: share of
    exp(-entropy) that is enough, above 0 and up to 1; in use: 0.3.
    """

    epsilon: float
    delta: float
    name: ClassVar[str] = "typical"
    drafts_as: ClassVar[Rule] = Rule.MATCH

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            self._require(name, "above 0 and up to 1", if_not=0 < getattr(self, name) <= 1)

    def verify(
        self, proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, memory: Any
    ) -> tuple[Verdict, Any]:
        """Trees and chains of any origin."""
        tree = proposal.tree
        children = trees.children(tree.parents)
        best = (0, 0.0, 0)
        laws: dict[int, tuple[Vector, float]] = {}
        open_nodes = [(0, 0, 0.0)]
        while open_nodes:
            node, depth, log_prob = open_nodes.pop()
            target_V = target_law(sampler, logits_TV, node, trees.path_tokens(tree, node))
            threshold = min(self.epsilon, self.delta * math.exp(-entropy(target_V)))
            laws[node] = (target_V, threshold)
            if (depth, log_prob) > best[:2]:
                best = (depth, log_prob, node)
            for child in children[node]:
                prob = float(target_V[tree.tokens[child]])
                if prob > threshold:
                    open_nodes.append((child, depth + 1, log_prob + math.log(prob)))
        last = best[2]
        path = trees.path_to(tree.parents, last)
        target_V, threshold = laws[last]
        typical_V = _typical_part(target_V, threshold)
        tokens = (*trees.path_tokens(tree, last), chance.emit(last, typical_V))
        # An accepted node is certain, given what was drafted: its law is a point.
        costs = [1.0 - float(laws[tree.parents[node]][0][tree.tokens[node]]) for node in path]
        return Verdict(path, tokens, (*costs, total_variation(typical_V / typical_V.sum(), target_V))), None


@final
@dataclass(frozen=True, kw_only=True)
class Lenience(InexactRule):
    """Chain rejection with lenience (Leviathan et al. 2211.17192, appendix): the draft's law is scaled down.

    A token is accepted with probability min(1, target / (factor * draft)); a rejection emits from
    norm(max(target - factor * draft, 0)). No token's probability grows by more than 1 / factor.

    `factor`: what draft probabilities are multiplied with, above 0 and up to 1; 1 is rule chain, which is exact.
    """

    factor: float
    name: ClassVar[str] = "lenience"
    drafts_as: ClassVar[Rule] = Rule.CHAIN

    def __post_init__(self) -> None:
        self._require("factor", "above 0 and up to 1 (1 = exact)", if_not=0 < self.factor <= 1)

    def verify(
        self, proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, memory: Any
    ) -> tuple[Verdict, Any]:
        """Chains, drawn or point masses."""
        proposal = with_laws(proposal, self.name)
        tokens = proposal.tree.tokens
        emitted: list[int] = []
        costs: list[float] = []
        for node in range(len(tokens) - 1):
            target_V = target_law(sampler, logits_TV, node, emitted)
            siblings = SiblingLaw(proposal, node, len(target_V))
            left_V, _ = residual(target_V, siblings, 1 / self.factor)
            kept_V = np.minimum(draft_law(proposal, node, len(target_V)), target_V / self.factor)
            costs.append(total_variation(kept_V + (1.0 - kept_V.sum()) * left_V, target_V))
            token = tokens[node + 1]
            if not chance.accept(node + 1, float(target_V[token]), self.factor * siblings.prob(node + 1)):
                emitted.append(chance.emit(node, left_V))
                return Verdict(tuple(range(1, node + 1)), tuple(emitted), tuple(costs)), None
            emitted.append(token)
        return whole_chain(proposal, logits_TV, sampler, chance, emitted, costs), None


# -- what chain rules share ---------------------------------------------------------------------------


def with_laws(proposal: Proposal, name: str) -> Proposal:
    """A chain with a law for every drafted token; what was no draw gets the law that is certain of it.

    Raises `UnsoundError` for a proposal that branches, and for a drawn token without its law.
    """
    tree = proposal.tree
    if not trees.is_chain(tree.parents):
        raise UnsoundError(
            f"rule {name} verifies chains, and this proposal branches: let the drafter draft one child per node"
        )
    if proposal.kind is ProposalKind.POINT_MASS:
        laws = {node: Law(torch.ones(1), torch.tensor([token])) for node, token in enumerate(tree.tokens[1:])}
        return dataclasses.replace(proposal, kind=ProposalKind.IID, laws=laws)
    for node in range(tree.num_drafted):
        if node not in proposal.laws:
            raise UnsoundError(f"node {node} was drawn from a law that is not recorded, which rule {name} needs")
    return proposal


def whole_chain(
    proposal: Proposal,
    logits_TV: torch.Tensor,
    sampler: Sampler,
    chance: Chance,
    emitted: list[int],
    costs: list[float],
) -> Verdict:
    """The verdict when nothing was rejected: one more token, drawn from the target's law."""
    last = proposal.tree.num_drafted
    if last == 0:  # as under every rule: a step without drafts is a plain one
        emitted.append(chance.target_token(sampler, logits_TV[0], ()))
    else:
        emitted.append(chance.emit(last, target_law(sampler, logits_TV, last, emitted)))
    return Verdict(tuple(range(1, last + 1)), tuple(emitted), (*costs, 0.0))


def draft_law(proposal: Proposal, node: int, vocab_size: int) -> Vector:
    """The law that drew the child of a chain's node, normalised, float64 [V]."""
    law_V: Vector = proposal.laws[node].dense(vocab_size).detach().cpu().to(torch.float64).numpy()
    normalised_V: Vector = law_V / law_V.sum()
    return normalised_V


def total_variation(first_V: Vector, second_V: Vector) -> float:
    """Half the L1 distance of two laws."""
    return 0.5 * float(np.abs(first_V - second_V).sum())


def entropy(law_V: Vector) -> float:
    """Entropy in nats of a law, or of the probabilities of a sparse one."""
    probs = law_V[law_V > 0]
    return float(-(probs * np.log(probs)).sum())


def _typical_part(law_V: Vector, threshold: float) -> Vector:
    """The law's entries above the threshold, not normalised; the likeliest token when none is."""
    kept_V = np.where(law_V > threshold, law_V, 0.0)
    if not kept_V.any():
        kept_V[law_V.argmax()] = 1.0
    return kept_V
