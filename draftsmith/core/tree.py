"""Pure functions of trees: everything that follows from `parents`, and the parents of static trees.

Called by drafters (building), the engine, backends (masks) and verification. A tree is a
pair of tuples (`core.types.Tree`); node 0 is the root, parents come before children, siblings stand in
draw order. Nothing here looks at logits, and nothing reorders or deletes a sampled sibling.

Shape letters: T tree nodes (root included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from draftsmith.core.types import Proposal, ProposalKind, Tree
from draftsmith.errors import OptionError, UnsoundError


def validate(tree: Tree) -> None:
    """Check a tree that came from outside: root first, parents before children, ids not negative.

    Raises `OptionError` naming the first bad node.
    """
    tokens, parents = tree.tokens, tree.parents
    if not tokens or len(tokens) != len(parents):
        raise OptionError(f"a tree has {len(tokens)} tokens and {len(parents)} parents; give one parent per token")
    if parents[0] != -1:
        raise OptionError(f"node 0 of a tree has parent {parents[0]}; it is the root, its parent is -1")
    for node, parent in enumerate(parents):
        if node and not 0 <= parent < node:
            raise OptionError(f"node {node} of a tree has parent {parent}; allowed: 0 to {node - 1}")
        if tokens[node] < 0:
            raise OptionError(f"node {node} of a tree carries token {tokens[node]}; token ids are not negative")


def chain(root: int, drafted: Sequence[int] = ()) -> Tree:
    """The tree with one child per node: `root` followed by the drafted tokens."""
    return Tree((root, *drafted), tuple(range(-1, len(drafted))))


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node hangs below the one before it."""
    return all(parent == node for node, parent in enumerate(parents, -1))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of each node; the root has depth 0."""
    found = [0] * len(parents)
    for node in range(1, len(parents)):
        found[node] = found[parents[node]] + 1
    return tuple(found)


def children(parents: Sequence[int]) -> list[list[int]]:
    """The children of each node, in draw order."""
    found: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        found[parents[node]].append(node)
    return found


def expanded(parents: Sequence[int]) -> tuple[int, ...]:
    """The nodes that have children, ascending."""
    return tuple(sorted(set(parents[1:])))


def path_to(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The nodes from the root (left out) down to `node` (included)."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def path_tokens(tree: Tree, node: int) -> tuple[int, ...]:
    """The drafted tokens from the root (left out) down to `node` (included)."""
    return tuple(tree.tokens[step] for step in path_to(tree.parents, node))


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Who sees whom: bool [T, T], entry (i, j) is True when j is i or an ancestor of i."""
    num_nodes = len(parents)
    if is_chain(parents):
        return torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril_()
    # One integer per node, bit j set when j is seen: a row costs one "or".
    seen = [1] * num_nodes
    for node in range(1, num_nodes):
        seen[node] = seen[parents[node]] | 1 << node
    row_bytes = (num_nodes + 7) // 8
    packed = np.frombuffer(b"".join(bits.to_bytes(row_bytes, "little") for bits in seen), np.uint8)
    mask_TT = np.unpackbits(packed.reshape(num_nodes, row_bytes), axis=1, count=num_nodes, bitorder="little")
    return torch.from_numpy(mask_TT.view(np.bool_))


def parents_of(paths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The parents of a Medusa-style list of nodes: path (i, j, ...) is candidate j below candidate i below the root.

    Nodes are numbered by (length, ranks), as published trees are. Raises `OptionError` for an empty,
    repeated or negative path and for one whose parent is not in the list.
    """
    node_of: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for path in sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)):
        if path in node_of:
            raise OptionError(f"tree path {path} is empty or given twice; list each node once, without the root")
        if path[-1] < 0 or path[:-1] not in node_of:
            raise OptionError(f"tree path {path} needs ranks of at least 0 and its parent {path[:-1]} in the list")
        node_of[path] = len(parents)
        parents.append(node_of[path[:-1]])
    return tuple(parents)


def cut(proposal: Proposal, max_drafted: int) -> Proposal:
    """The proposal with at most `max_drafted` nodes below the root; point masses only.

    With confidences the nodes of the most probable paths stay (product along the path, each clamped to
    [0, 1], ties to the earlier node), otherwise the first ones. Raises `UnsoundError` when that would delete a
    sampled token: deleting what was drawn changes the law of what is left.
    """
    assert max_drafted >= 0, f"a budget of {max_drafted} nodes"
    tree = proposal.tree
    if tree.num_drafted <= max_drafted:
        return proposal
    if proposal.kind is not ProposalKind.POINT_MASS:
        raise UnsoundError(
            f"a proposal of kind {proposal.kind.value} cannot be cut from {tree.num_drafted} to {max_drafted} nodes: "
            "drawn tokens must stay; give the drafter a budget before it draws, or draft point masses"
        )
    if proposal.confidence is None:
        return replace(proposal, tree=Tree(tree.tokens[: max_drafted + 1], tree.parents[: max_drafted + 1]))
    kept = _most_probable(tree.parents, proposal.confidence, max_drafted + 1)
    place = {node: index for index, node in enumerate(kept)}
    return replace(
        proposal,
        tree=Tree(
            tuple(tree.tokens[node] for node in kept),
            (-1, *(place[tree.parents[node]] for node in kept[1:])),
        ),
        confidence=tuple(proposal.confidence[node] for node in kept),
    )


def shorten(proposal: Proposal, num_drafted: int) -> Proposal:
    """The first `num_drafted` nodes of a chain, drawn tokens included.

    Sound for drawn tokens only if the number was chosen without a look at the tokens that go: from confidences judged
    before the draw, stopping at the first node that fails. `UnsoundError` for what cannot have been chosen so.
    """
    tree = proposal.tree
    if num_drafted >= tree.num_drafted:
        return proposal
    if proposal.kind is ProposalKind.POINT_MASS:
        return cut(proposal, num_drafted)
    if not proposal.foreseen or not is_chain(tree.parents):
        raise UnsoundError(
            f"a proposal of kind {proposal.kind.value} cannot be shortened from {tree.num_drafted} to {num_drafted} "
            "nodes: only a chain whose confidences were judged before the draws can"
        )
    if num_drafted == 0:
        return Proposal.empty(tree.tokens[0])
    end = num_drafted + 1
    return replace(
        proposal,
        tree=Tree(tree.tokens[:end], tree.parents[:end]),
        laws={node: law for node, law in proposal.laws.items() if node < num_drafted},
        confidence=None if proposal.confidence is None else proposal.confidence[:end],
    )


def _most_probable(parents: Sequence[int], confidence: Sequence[float], num_nodes: int) -> list[int]:
    """The `num_nodes` nodes of largest path product, ascending; a parent never ranks below its child."""
    reach = [1.0] * len(parents)
    for node in range(1, len(parents)):
        reach[node] = reach[parents[node]] * min(max(0.0, confidence[node]), 1.0)
    return sorted(sorted(range(len(parents)), key=lambda node: -reach[node])[:num_nodes])
