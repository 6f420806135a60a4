"""Verification that does NOT keep the target's law: typical acceptance and lenience.

For experiments that ask for it by name. `core.verify` never comes here, nothing uses these by default,
and their result type says "lossy", so no exactness claim can be made of it by accident.

Shape letters: T tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, Vector
from draftsmith.core.draw import SiblingLaw
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, ProposalKind, Tree, Verdict
from draftsmith.core.verify_rules import target_law
from draftsmith.errors import OptionError, UnsoundError


@dataclass(frozen=True, slots=True)
class LossyVerdict:
    """A verdict whose tokens do not follow the target's law. `rule`: the lossy rule and its settings."""

    verdict: Verdict
    rule: str
    lossy: ClassVar[bool] = True


def typical_acceptance(
    tree: Tree, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, *, epsilon: float, delta: float
) -> LossyVerdict:
    """Medusa's typical acceptance (Cai et al. 2401.10774): likely enough is good enough.

    A node is accepted when its target probability exceeds min(epsilon, delta * exp(-entropy)); the longest
    accepted path is kept, ties by the larger probability of the path. The extra token is drawn from the
    target's law cut to the tokens above the same threshold. Both settings are required, in (0, 1]: published
    code has their defaults swapped in places (in use: epsilon 0.09, delta 0.3).
    Raises `OptionError` for a setting outside its range and for a greedy sampler.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value <= 1:
            raise OptionError(f"typical acceptance: {name} is {value!r}; allowed: above 0 and up to 1")
    _require_sampling(sampler, "typical acceptance")
    children = trees.children(tree.parents)
    best = (0, 0.0, 0)
    laws: dict[int, tuple[Vector, float]] = {}
    open_nodes = [(0, 0, 0.0)]
    while open_nodes:
        node, depth, log_prob = open_nodes.pop()
        target_V = target_law(sampler, logits_TV, node, trees.path_tokens(tree, node))
        threshold = min(epsilon, delta * math.exp(-_entropy(target_V)))
        laws[node] = (target_V, threshold)
        if (depth, log_prob) > best[:2]:
            best = (depth, log_prob, node)
        for child in children[node]:
            prob = float(target_V[tree.tokens[child]])
            if prob > threshold:
                open_nodes.append((child, depth + 1, log_prob + math.log(prob)))
    last = best[2]
    target_V, threshold = laws[last]
    extra = chance.emit(last, _typical_part(target_V, threshold))
    verdict = Verdict(trees.path_to(tree.parents, last), (*trees.path_tokens(tree, last), extra))
    return LossyVerdict(verdict, f"typical acceptance, epsilon {epsilon:g}, delta {delta:g}")


def lenience(
    proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, *, factor: float
) -> LossyVerdict:
    """Chain rejection with lenience (Leviathan et al. 2211.17192, appendix): the draft's law is scaled down.

    A token is accepted with probability min(1, target / (factor * draft)); a rejection emits from
    norm(max(target - factor * draft, 0)). No token's probability grows by more than 1 / factor; factor 1 is
    chain rejection. Raises `OptionError` for a factor outside (0, 1] or a greedy sampler, `UnsoundError`
    for a proposal that is not a sampled chain with its laws.
    """
    if not 0 < factor <= 1:
        raise OptionError(f"lenience: factor is {factor!r}; allowed: above 0 and up to 1 (1 = exact)")
    _require_sampling(sampler, "lenience")
    tokens, parents = proposal.tree.tokens, proposal.tree.parents
    if proposal.kind is ProposalKind.POINT_MASS or not trees.is_chain(parents):
        raise UnsoundError("lenience scales the law of a sampled chain; give it a chain of kind iid with its laws")
    emitted: list[int] = []
    for node in range(len(tokens) - 1):
        target_V = target_law(sampler, logits_TV, node, emitted)
        siblings = SiblingLaw(proposal, node, len(target_V))
        scaled = factor * siblings.prob(node + 1)
        if not chance.accept(node + 1, float(target_V[tokens[node + 1]]), scaled):
            left_V = siblings.excess(target_V / factor)
            emitted.append(chance.emit(node, left_V if left_V.any() else target_V))
            return LossyVerdict(Verdict(tuple(range(1, node + 1)), tuple(emitted)), f"lenience {factor:g}")
        emitted.append(tokens[node + 1])
    last = len(tokens) - 1
    emitted.append(chance.emit(last, target_law(sampler, logits_TV, last, emitted)))
    return LossyVerdict(Verdict(tuple(range(1, last + 1)), tuple(emitted)), f"lenience {factor:g}")


def _require_sampling(sampler: Sampler, what: str) -> None:
    if sampler.greedy:
        raise OptionError(f"{what} needs a temperature above 0; greedy verification is exact and needs no threshold")


def _entropy(law_V: Vector) -> float:
    """Entropy in nats."""
    probs = law_V[law_V > 0]
    return float(-(probs * np.log(probs)).sum())


def _typical_part(law_V: Vector, threshold: float) -> Vector:
    """The law's entries above the threshold, not normalised; the likeliest token when none is."""
    kept_V = np.where(law_V > threshold, law_V, 0.0)
    if not kept_V.any():
        kept_V[law_V.argmax()] = 1.0
    return kept_V
