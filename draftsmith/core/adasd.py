"""AdaSD (Lu et al. 2512.11280): where two laws are near each other, drafted tokens are kept unseen. Our variant.

Of the paper only what its abstract says was at hand: two thresholds without hyper-parameters, updated while it runs,
one on the draft's entropy that stops drafting, one on the Jensen-Shannon distance of target and draft that accepts. The
update below is ours, and so is what happens above the threshold: exact rejection, so of the same draft no fewer tokens
are kept than by rule chain. Invariant: the thresholds learn from what exact rejection would have done, never from what
was accepted because of them.

Shape letters: T tree nodes (root included), V vocabulary, C tokens of a sparse law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from draftsmith.core.chance import Chance, Vector
from draftsmith.core.draw import SiblingLaw
from draftsmith.core.inexact import InexactRule
from draftsmith.core.lossy import draft_law, entropy, total_variation, whole_chain, with_laws
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Verdict
from draftsmith.core.verify_rules import residual, target_law


@dataclass(frozen=True, slots=True)
class Seen:
    """Sums over tokens that exact rejection judged: how many, their distances, their draft entropies (nats)."""

    count: int = 0
    distance: float = 0.0
    entropy: float = 0.0

    def plus(self, distance: float, entropy: float) -> Seen:
        """With one more."""
        return Seen(self.count + 1, self.distance + distance, self.entropy + entropy)


@dataclass(frozen=True, slots=True)
class Learned:
    """A request's tokens so far, those that exact rejection kept apart from those it did not."""

    kept: Seen = Seen()
    lost: Seen = Seen()

    @property
    def distance(self) -> float | None:
        """The threshold on distances: half way between the two means, None before there are two."""
        return self._half_way(self.kept.distance, self.lost.distance)

    @property
    def entropy(self) -> float | None:
        """The threshold on draft entropies, likewise."""
        return self._half_way(self.kept.entropy, self.lost.entropy)

    def _half_way(self, kept: float, lost: float) -> float | None:
        if not self.kept.count or not self.lost.count:
            return None
        return (kept / self.kept.count + lost / self.lost.count) / 2


@final
@dataclass(frozen=True, kw_only=True)
class AdaSD(InexactRule):
    """Keeps a drafted token when the Jensen-Shannon distance of the laws is below a threshold, whatever the token is.

    Distances are square roots of divergences in bits, 0 to 1. The threshold is half way between the mean distance
    where exact rejection kept the token and where it did not, in this request so far, and at most `limit`; until both
    have happened verification is exact. From the second token of a draft on, drafting stops where the draft's entropy
    is above its threshold, which is made alike. A token that the target cannot emit is rejected. Where a step's law
    is changed it is the draft's, and no total variation per token exceeds sqrt(2 ln 2) * `limit`.

    `limit`: the threshold on the distance at most, above 0 and up to 1; 1 is no limit.
    """

    limit: float = 1.0
    name: ClassVar[str] = "adasd"
    drafts_as: ClassVar[Rule] = Rule.CHAIN

    def __post_init__(self) -> None:
        self._require("limit", "above 0 and up to 1 (1 = no limit)", if_not=0 < self.limit <= 1)

    def verify(
        self,
        proposal: Proposal,
        logits_TV: torch.Tensor,
        sampler: Sampler,
        chance: Chance,
        memory: Learned | None,
    ) -> tuple[Verdict, Learned]:
        """Chains, drawn or point masses."""
        learned = memory or Learned()
        drawn = proposal.kind is not ProposalKind.POINT_MASS
        proposal = with_laws(proposal, self.name)
        tokens = proposal.tree.tokens
        emitted: list[int] = []
        costs: list[float] = []
        for node in range(len(tokens) - 1):
            target_V = target_law(sampler, logits_TV, node, emitted)
            siblings = SiblingLaw(proposal, node, len(target_V))
            draft_V = draft_law(proposal, node, len(target_V))
            left_V, _ = residual(target_V, siblings, 1.0)
            token = tokens[node + 1]
            distance = jensen_shannon_distance(target_V, draft_V)
            is_near = learned.distance is not None and distance < min(learned.distance, self.limit)
            exact = chance.accept(node + 1, float(target_V[token]), siblings.prob(node + 1))
            learned = _with(learned, exact, distance, entropy(draft_V) if drawn else 0.0)
            costs.append(_cost(draft_V, target_V, left_V) if is_near else 0.0)
            if not exact and not (is_near and target_V[token] > 0):
                emitted.append(chance.emit(node, left_V))
                return Verdict(tuple(range(1, node + 1)), tuple(emitted), tuple(costs)), learned
            emitted.append(token)
        return whole_chain(proposal, logits_TV, sampler, chance, emitted, costs), learned

    def goes_on(self, law: Law, memory: Learned | None) -> bool:
        threshold = None if memory is None else memory.entropy
        if threshold is None:
            return True
        probs_C: Vector = law.probs.detach().cpu().to(torch.float64).numpy()
        return entropy(probs_C / probs_C.sum()) <= threshold


def jensen_shannon_distance(first_V: Vector, second_V: Vector) -> float:
    """The square root of the Jensen-Shannon divergence in bits: 0 for equal laws, 1 for disjoint ones."""
    nats = entropy((first_V + second_V) / 2) - (entropy(first_V) + entropy(second_V)) / 2
    return math.sqrt(min(1.0, max(0.0, nats / math.log(2))))


def _with(learned: Learned, kept: bool, distance: float, draft_entropy: float) -> Learned:
    if kept:
        return Learned(learned.kept.plus(distance, draft_entropy), learned.lost)
    return Learned(learned.kept, learned.lost.plus(distance, draft_entropy))


def _cost(draft_V: Vector, target_V: Vector, left_V: Vector) -> float:
    """Of emitting the draft's token, or from what is left where the target cannot emit it."""
    kept_V = np.where(target_V > 0, draft_V, 0.0)
    return total_variation(kept_V + (1.0 - kept_V.sum()) * left_V, target_V)
