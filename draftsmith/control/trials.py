"""What a step says about drafted nodes: which were put to the test, and what became of them.

Used by controllers that learn. A node is tried when its parent was accepted; a cut point mass is still judged where the
emitted tokens are known, because it would have been accepted iff the target emitted it. Invariant: nothing is labelled
that was not decided: what lies below a rejected node says nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.control.base import RequestOutcome
from draftsmith.core.tree import cut, depths, is_chain
from draftsmith.core.types import Proposal, ProposalKind, Tree

_CHAINS = tuple(tuple(range(-1, num_drafted)) for num_drafted in range(65))


class NodeTrial(NamedTuple):
    """A node whose parent was accepted. `rank`: which of its siblings, in draw order."""

    depth: int
    rank: int
    confidence: float
    accepted: bool


def chain_shaped(parents: tuple[int, ...]) -> bool:
    """`core.tree.is_chain`, quicker for short ones."""
    return parents == _CHAINS[len(parents) - 1] if len(parents) <= len(_CHAINS) else is_chain(parents)


def depth_of(parents: tuple[int, ...]) -> int:
    """The longest path of a proposal's tree."""
    return len(parents) - 1 if chain_shaped(parents) else max(depths(parents))


def cut_to(proposal: Proposal, num_drafted: int) -> Proposal:
    """`core.tree.cut`, quicker for chains. Point masses only."""
    tree, confidence = proposal.tree, proposal.confidence
    if num_drafted >= len(tree.parents) - 1:
        return proposal
    if not num_drafted:
        return Proposal.empty(tree.tokens[0])
    if not chain_shaped(tree.parents):
        return cut(proposal, num_drafted)
    end = num_drafted + 1
    return Proposal(Tree(tree.tokens[:end], tree.parents[:end]), confidence=confidence[:end] if confidence else None)


def trials_of(proposal: Proposal, outcome: RequestOutcome) -> list[NodeTrial]:
    """The trials of a proposal as it was before any cut.

    A drawn chain is judged by what was verified alone: what a ratio rule emits in the place of a token that it never
    looked at says nothing about that token.
    """
    parents, tokens, confidence = proposal.tree.parents, proposal.tree.tokens, proposal.confidence
    emitted, found = outcome.tokens, []
    if proposal.kind is not ProposalKind.POINT_MASS and chain_shaped(parents):
        decided = min(outcome.num_accepted + 1, outcome.num_drafted, outcome.num_emitted)
        return [
            NodeTrial(node, 0, confidence[node] if confidence else 0.0, node <= outcome.num_accepted)
            for node in range(1, decided + 1)
        ]
    if emitted and chain_shaped(parents):
        for node in range(1, min(len(emitted) + 1, len(parents))):
            accepted = tokens[node] == emitted[node - 1]
            found.append(NodeTrial(node, 0, confidence[node] if confidence else 0.0, accepted))
            if not accepted:
                break
        return found
    node = 0
    known = outcome.num_emitted if emitted else min(outcome.num_emitted, outcome.num_accepted + 1, outcome.depth)
    for place in range(known):
        followed, rank = 0, 0
        for child in range(node + 1, len(parents)):
            if parents[child] != node:
                continue
            if emitted:
                accepted = not followed and tokens[child] == emitted[place]
            else:  # without the tokens the first child is taken to be the one that was accepted
                accepted = not followed and place < outcome.num_accepted
            found.append(NodeTrial(place + 1, rank, confidence[child] if confidence else 0.0, accepted))
            rank += 1
            if accepted:
                followed = child
        if not followed:
            break
        node = followed
    return found
