"""Approximate speculative decoding (2608.03447): a few near misses of greedy decoding are let pass, within a budget.

Chosen by name (`registry.RULES`), asked by the engine's step. The rule is that of the authors' published
implementation, which counts regret in logits; on trees, which they do not have, the longest admissible path is
taken. Invariant: a request's regret never exceeds its budget, and budget 0 writes the greedy ids.

Shape letters: T tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance
from draftsmith.core.inexact import InexactRule
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, Rule, Tree, Verdict


@dataclass(frozen=True, slots=True)
class _Prefix:
    """An admissible path from the root: what its misses cost in logits, and how many there are."""

    node: int = 0
    depth: int = 0
    regret: float = 0.0
    misses: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class ApproximateVerification(InexactRule):
    """Greedy verification that forgives a draft some tokens that the target scored a little lower than its best.

    The regret of a drafted token is how far its logit lies below the largest, after penalties, biases and masks; 0 for
    the greedy token. Another token is let pass if its regret is at most `gate` times the number of drafted tokens from
    it to the end of its path, if the request's regret stays within `budget`, and if the step has no more than
    `mismatches` of them. What follows was scored under the draft as it is, so it is verified as ever, and the
    target's greedy token comes after it. Defaults: the authors' for Qwen3 with DSpark.

    `budget`: logits that a request may lose in all; 0 writes the greedy ids. `gate`: logits that a token may lose per
    drafted token from it on; 0 writes the greedy ids. `mismatches`: tokens of a step at most that are not the greedy
    ones.
    """

    budget: float = 8.0
    gate: float = 0.25
    mismatches: int = 2
    name: ClassVar[str] = "asd"
    drafts_as: ClassVar[Rule] = Rule.MATCH
    greedy: ClassVar[bool | None] = True

    def __post_init__(self) -> None:
        for name in ("budget", "gate"):
            value = getattr(self, name)
            self._require(name, "a number of logits of at least 0 (0 = greedy)", if_not=0 <= value < math.inf)
        is_count = isinstance(self.mismatches, int) and not isinstance(self.mismatches, bool)
        self._require("mismatches", "a whole number of at least 0", if_not=is_count and self.mismatches >= 0)

    def verify(
        self,
        proposal: Proposal,
        logits_TV: torch.Tensor,
        sampler: Sampler,
        chance: Chance,
        memory: float | None,
    ) -> tuple[Verdict, float]:
        """Trees and chains of any origin. `memory`: the request's regret so far."""
        tree = proposal.tree
        spent = memory or 0.0
        below, heights = trees.children(tree.parents), _heights(tree)
        best = _Prefix()
        is_miss = [False] * tree.num_nodes
        open_prefixes = [best]
        while open_prefixes:
            prefix = open_prefixes.pop()
            if (prefix.depth, -prefix.regret) > (best.depth, -best.regret):
                best = prefix
            if not below[prefix.node]:
                continue
            path = trees.path_tokens(tree, prefix.node)
            greedy = sampler.argmax(logits_TV[prefix.node], path)
            adjusted_V = sampler.adjusted(logits_TV[prefix.node], path)
            for child in below[prefix.node]:
                token = tree.tokens[child]
                is_miss[child] = token != greedy
                regret = float(adjusted_V[greedy] - adjusted_V[token]) if is_miss[child] else 0.0
                longer = _Prefix(child, prefix.depth + 1, prefix.regret + regret, prefix.misses + is_miss[child])
                if not is_miss[child] or self._lets_pass(longer, regret, heights[child], spent):
                    open_prefixes.append(longer)
        accepted = trees.path_to(tree.parents, best.node)
        tokens = trees.path_tokens(tree, best.node)
        extra = sampler.argmax(logits_TV[best.node], tokens)
        # The target's law is a point, so a miss costs all of it.
        costs = (*(float(is_miss[node]) for node in accepted), 0.0)
        return Verdict(accepted, (*tokens, extra), costs), spent + best.regret

    def _lets_pass(self, prefix: _Prefix, regret: float, height: int, spent: float) -> bool:
        """Whether a path that ends in a miss is admissible. Strict where nothing is left, so that 0 means greedy."""
        had = spent + prefix.regret - regret
        return (
            self.gate > 0
            and regret <= self.gate * height
            and had < self.budget
            and had + regret <= self.budget
            and prefix.misses <= self.mismatches
        )


def _heights(tree: Tree) -> list[int]:
    """For each node the number of nodes on the longest path from it to a leaf, itself included."""
    heights = [1] * tree.num_nodes
    for node in range(tree.num_nodes - 1, 0, -1):
        parent = tree.parents[node]
        heights[parent] = max(heights[parent], heights[node] + 1)
    return heights
