"""Which static tree to draft: a chain, children per level, or the tree that measured accuracies make best.

Called by drafters that draft the same shape every step. A choice is a list of rank paths (path (i, j): candidate j
below candidate i below the root) in order of worth. Invariant: every path comes after its parent and its better
siblings, so the first n paths are a tree for any budget n.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

from draftsmith.errors import OptionError

RankPath: TypeAlias = tuple[int, ...]


def chain_paths(num_depths: int) -> list[RankPath]:
    """The best candidate of each depth."""
    return [(0,) * depth for depth in range(1, num_depths + 1)]


def level_paths(num_children: Sequence[int], max_nodes: int) -> list[RankPath]:
    """`num_children[d]` children for every node of depth d, level by level, at most `max_nodes` nodes.

    Raises `OptionError` for a level without children.
    """
    paths: list[RankPath] = []
    level: list[RankPath] = [()]
    for count in num_children:
        if count < 1:
            raise OptionError(f"a tree level has {count} children per node; allowed: at least 1")
        below: list[RankPath] = []
        for parent in level:
            for rank in range(min(count, max_nodes - len(paths) - len(below))):
                below.append((*parent, rank))
        paths += below
        level = below
    return paths


def best_paths(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[RankPath]:
    """The tree of at most `num_nodes` drafted nodes with the most accepted tokens to be expected (Medusa, 2401.10774).

    `accuracies[depth][rank]`: chance that this candidate is right, given that its parent is, whatever the parent. A
    node's worth is the product along its path; the frontier's worthiest is taken again and again, ties by depth and
    rank. Nodes of no worth are left out. Chances must fall with the rank, as measured ones do up to noise: a better
    later rank counts as much as the rank before it.
    """
    return [path for _, path in best_nodes(accuracies, num_nodes)]


def best_nodes(
    accuracies: Sequence[Sequence[float]], num_nodes: int, least: float = 0.0
) -> list[tuple[float, RankPath]]:
    """`best_paths` with each node's worth, in order of worth; nodes not worth more than `least` are left out."""
    falling = [_falling(row) for row in accuracies]
    found: list[tuple[float, RankPath]] = []
    frontier: list[tuple[float, int, RankPath]] = []
    worth_of: dict[RankPath, float] = {(): 1.0}

    def offer(path: RankPath) -> None:
        depth, rank = len(path) - 1, path[-1]
        if depth < len(falling) and rank < len(falling[depth]):
            worth = worth_of[path[:-1]] * falling[depth][rank]
            if worth > least:
                heapq.heappush(frontier, (-worth, len(path), path))

    offer((0,))
    while frontier and len(found) < num_nodes:
        negative, _, path = heapq.heappop(frontier)
        found.append((-negative, path))
        worth_of[path] = -negative
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    return found


def _falling(row: Sequence[float]) -> list[float]:
    """Each entry cut to the smallest before it."""
    found: list[float] = []
    for chance in row:
        found.append(min(chance, found[-1]) if found else chance)
    return found
