"""Synthetic acceptance: drafts are kept at set rates, whatever they say, to load a system without a good drafter.

Chosen by name (`registry.RULES`), asked by the engine's step. Four ways to set the rates, as servers have them. The
text means nothing: kept tokens are the drafter's, and only the one after them is the target's own, chosen after what
was kept. Invariant: how many are kept depends on the rates, the draft's depth and the request's noise alone.

Shape letters: T tree nodes (root included).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from draftsmith.core import theory
from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.inexact import InexactRule
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, Rule, Verdict
from draftsmith.errors import OptionError

_BISECTIONS = 60


@final
@dataclass(frozen=True, kw_only=True)
class SyntheticAcceptance(InexactRule):
    """Keeps drafts at set rates, whatever they say; exactly one parameter says at which.

    `fraction`: of the drafted tokens so many are kept on average, each with the same chance given those before it
    (Modular's rate: (1 / n) * sum of a^i over i = 1..n is the fraction, for a draft of n tokens).
    `survivals`: for each depth the probability that a draft is kept so far, never rising (vLLM's rates).
    `length`: tokens per step, the target's own included, with as little spread as there can be (vLLM's length).
    `conditional`: chance of each token given those before it.

    Deeper than `survivals` or `length` reach nothing is kept; a draft shorter than they reach is kept as far as it
    goes. On a tree the deepest path is meant.
    """

    fraction: float | None = None
    survivals: tuple[float, ...] | None = None
    length: float | None = None
    conditional: float | None = None
    name: ClassVar[str] = "synthetic"
    fidelity: ClassVar[Fidelity] = Fidelity.SYNTHETIC
    drafts_as: ClassVar[Rule] = Rule.MATCH
    greedy: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        names = ("fraction", "survivals", "length", "conditional")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise OptionError(f"rule synthetic: give exactly one of {', '.join(names)}; got {found}")
        for name in ("fraction", "conditional"):
            value = getattr(self, name)
            self._require(name, "0 to 1", if_not=value is None or 0 <= value <= 1)
        self._require("length", "at least 1", if_not=self.length is None or 1 <= self.length < math.inf)
        if self.survivals is not None:
            pairs = itertools.pairwise((1.0, *self.survivals, 0.0))
            falls = len(self.survivals) > 0 and all(later <= rate for rate, later in pairs)
            self._require("survivals", "rates from 0 to 1 that never rise", if_not=falls)

    def rates(self, depth: int) -> tuple[float, ...]:
        """For a draft of `depth` tokens the probability of each depth to be kept."""
        if self.survivals is not None:
            return (*self.survivals[:depth], *[0.0] * (depth - len(self.survivals)))
        if self.length is not None:
            return tuple(min(1.0, max(0.0, self.length - 1 - place)) for place in range(depth))
        if self.conditional is not None:
            return tuple(theory.survivals(self.conditional, depth))
        assert self.fraction is not None
        return tuple(theory.survivals(conditional_of(self.fraction, depth), depth))

    def verify(
        self, proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, memory: Any
    ) -> tuple[Verdict, Any]:
        """Trees and chains of any origin."""
        tree = proposal.tree
        depths = trees.depths(tree.parents)
        path = trees.path_to(tree.parents, depths.index(max(depths)))
        kept: list[int] = []
        before = 1.0
        for node, rate in zip(path, self.rates(len(path)), strict=True):
            if not chance.accept(node, rate, before):
                break
            kept.append(node)
            before = rate
        tokens = tuple(tree.tokens[node] for node in kept)
        row_V = logits_TV[kept[-1] if kept else 0]
        return Verdict(tuple(kept), (*tokens, chance.target_token(sampler, row_V, tokens))), None


@functools.lru_cache(maxsize=1024)
def conditional_of(fraction: float, depth: int) -> float:
    """The chance a of each token, given those before it, at which a draft loses all but `fraction` of its tokens.

    Solves (a + a^2 + ... + a^depth) / depth = fraction by bisection.
    """
    if fraction in (0, 1):
        return float(fraction)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if math.fsum(theory.survivals(middle, depth)) < fraction * depth:
            low = middle
        else:
            high = middle
    return high
