"""The one entry to exact verification: which drafted tokens are kept, and what is emitted after them.

Called by the engine once per sequence and step. Every path through here keeps the target's law; greedy,
coupling and match even its token ids. Rules that do not (`core.inexact`) are refused here.
Invariant: a combination of proposal and rule that would change the law raises `UnsoundError`.

Shape letters: T tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.core import accelerator
from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, KeyedChance
from draftsmith.core.inexact import InexactRule
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, ProposalKind, Rule, Tree, Verdict
from draftsmith.core.verify_rules import recursive, traversal, walk
from draftsmith.errors import UnsoundError


def verify(
    proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, random: RequestRandom, position: int
) -> Verdict:
    """Verify one proposal. Row i of `logits_TV` is the target's row of node i.

    `sampler`: bound to the sequence up to and including the root; its `params.rule` chooses the rule at
    temperature > 0. `position`: output position of the token that the root's row emits.
    Raises `UnsoundError` for a combination that would change the law, saying what to use instead.
    """
    num_nodes = len(proposal.tree.tokens)
    assert len(logits_TV) == num_nodes, f"{len(logits_TV)} logit rows for a tree of {num_nodes} nodes"
    _exact_rule(sampler)
    if sampler.greedy:
        return greedy(proposal.tree, logits_TV, sampler)
    return decide(proposal, logits_TV, sampler, KeyedChance(random, position))


def greedy(tree: Tree, logits_TV: torch.Tensor, sampler: Sampler) -> Verdict:
    """The greedy walk: the target's argmax at every node, the lowest id among equals."""
    if sampler.context_free:
        best = row_argmax(logits_TV)
        if best is not None:
            return walk(tree, lambda node, path: best[node])
    return walk(tree, lambda node, path: sampler.argmax(logits_TV[node], path))


def decide(proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance) -> Verdict:
    """Verification at temperature > 0 with explicit chance: keyed noise, or enumeration of every outcome.

    Proposals of point masses, and every proposal under coupling and match, are verified by the walk. The
    walk is exact for candidates of any origin, so under those two rules drawn candidates are fine too and
    their laws are not looked at. An empty proposal emits with target noise under every rule.
    """
    rule = _exact_rule(sampler)
    if (
        proposal.kind is ProposalKind.POINT_MASS
        or len(proposal.tree.tokens) == 1
        or rule is Rule.COUPLING
        or rule is Rule.MATCH
    ):
        return walk(proposal.tree, lambda node, path: chance.target_token(sampler, logits_TV[node], path))
    _require_sound(proposal, rule)
    if rule is Rule.CHAIN or rule is Rule.RECURSIVE:
        return recursive(proposal, logits_TV, sampler, chance)
    return traversal(proposal, logits_TV, sampler, chance)


def row_argmax(logits_TV: torch.Tensor) -> Sequence[int] | None:
    """Argmax of each row, the lowest id among equals; None when a row's largest logit is not finite.

    On the CPU a vectorised argmax of our own or numpy's does it, many times faster than torch's.
    """
    if logits_TV.device.type == "cpu" and logits_TV.dtype in (torch.float32, torch.float64):
        rows_TV = np.ascontiguousarray(logits_TV.detach().numpy())
        native = accelerator.native()
        if native is not None:
            fast: list[int] | None = native.rows_argmax(rows_TV)
            return fast
        best_T = rows_TV.argmax(axis=1)
        if not np.isfinite(rows_TV[np.arange(len(best_T)), best_T]).all():
            return None
        found: list[int] = best_T.tolist()
        return found
    top_T, ids_T = logits_TV.max(dim=1)
    if not bool(torch.isfinite(top_T).all()):
        return None
    ids: list[int] = ids_T.tolist()
    return ids


def _exact_rule(sampler: Sampler) -> Rule:
    """The request's rule, which must be one that keeps the law."""
    rule = sampler.params.rule
    if isinstance(rule, InexactRule):
        raise UnsoundError(f"rule {rule.text} does not keep the target's law, and exact verification was asked for")
    return rule


def _require_sound(proposal: Proposal, rule: Rule) -> None:
    """The checks of a ratio rule that need no law: shape and presence of every law."""
    parents = proposal.tree.parents
    if rule in (Rule.CHAIN, Rule.BLOCK) and not trees.is_chain(parents):
        instead = Rule.RECURSIVE if rule is Rule.CHAIN else Rule.TRAVERSAL
        raise UnsoundError(
            f"rule {rule.value} verifies chains, and this proposal branches: "
            f"use rule {instead.value} for trees, or draft one child per node"
        )
    for node in trees.expanded(parents):
        if node not in proposal.laws:
            raise UnsoundError(
                f"node {node} has {proposal.kind.value} children but no recorded law, which rule {rule.value} needs: "
                "record the law that drew them, or use rule match, which needs none"
            )
