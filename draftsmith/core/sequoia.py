"""Sequoia's static trees (2402.12374): the best tree of a size and depth, and the size and depth that pay best.

For planning away from a running engine, and what `core.tree_shapes` is held to: taking the worthiest node again and
again, as controllers do while serving, gives the same trees wherever chances fall with the rank. The dynamic programme
is exact for positional acceptance: `acceptance[depth][rank]` is the probability that the child of that rank is the one
accepted, given that its parent was, whatever the parent (the last row serves all deeper levels). Invariant: the value
of a tree is what `theory.expected_tree_tokens` says of its parents, the root's own 1 included.

Shape letters: M nodes (root included), R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftsmith.core.tree_shapes import RankPath
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class BestTree:
    """A tree as rank paths in order of depth, and the tokens per step expected of it.

    `seconds_per_token`: of the step it was chosen for, 0 where no costs were given.
    """

    paths: tuple[RankPath, ...]
    depth: int
    tokens: float
    seconds_per_token: float = 0.0


class TreeProgramme:
    """All best trees of at most `max_nodes` nodes (root included) and exactly at most `depth` levels below the root.

    `values[m - 1]`: expected tokens of the best tree of m nodes. O(depth x nodes^2 x ranks), numpy inside.
    """

    def __init__(self, acceptance: Sequence[Sequence[float]], max_nodes: int, depth: int) -> None:
        if max_nodes < 1 or depth < 0:
            raise OptionError(f"a tree of {max_nodes} nodes and {depth} levels; allowed: at least 1 node, 0 levels")
        if not acceptance:
            raise OptionError("acceptance by rank is empty; give at least one row of probabilities")
        self._rows = [list(acceptance[min(level, len(acceptance) - 1)]) for level in range(depth)]
        # Per level, from the root down: best value of a subtree of m nodes; nodes that its last child takes, per
        # number of children and m; and the best number of children per m.
        self._values: list[npt.NDArray[np.float64]] = []
        self._last: list[npt.NDArray[np.int64]] = []
        self._children: list[npt.NDArray[np.int64]] = []
        leaf_M = np.full(max_nodes, -np.inf)
        leaf_M[0] = 1.0
        below_M = leaf_M
        for row in reversed(self._rows):
            below_M = self._level(row, below_M, max_nodes)
        self._values.reverse()
        self._last.reverse()
        self._children.reverse()
        self.values: list[float] = [float(value) for value in below_M]
        self.depth = depth

    def _level(self, row: Sequence[float], below_M: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.float64]:
        can_be_M = below_M > -np.inf  # 0 times minus infinity is no number
        by_count = [np.full(size, -np.inf)]
        by_count[0][0] = 1.0
        last = [np.zeros(size, dtype=np.int64)]
        for chance in row:
            gain_M = np.where(can_be_M, chance * np.where(can_be_M, below_M, 0.0), -np.inf)
            before_M, found_M, taken_M = by_count[-1], np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
            for nodes in range(2, size + 1):
                # The first children take `nodes - share` nodes with their parent, the last one `share`.
                options = before_M[nodes - 2 :: -1] + gain_M[: nodes - 1]
                best = int(options.argmax())
                found_M[nodes - 1], taken_M[nodes - 1] = options[best], best + 1
            by_count.append(found_M)
            last.append(taken_M)
        table_RM = np.stack(by_count)
        children_M = table_RM.argmax(axis=0)
        values_M: npt.NDArray[np.float64] = table_RM.max(axis=0)
        self._values.append(values_M)
        self._last.append(np.stack(last))
        self._children.append(children_M)
        return values_M

    def tree(self, num_nodes: int) -> BestTree:
        """The best tree of `num_nodes` nodes, root included. Raises `OptionError` where no such tree fits."""
        if not 1 <= num_nodes <= len(self.values) or self.values[num_nodes - 1] == -np.inf:
            raise OptionError(f"no tree of {num_nodes} nodes fits {self.depth} levels and these ranks")
        paths: list[RankPath] = []

        def build(level: int, nodes: int, path: RankPath) -> None:
            if nodes == 1:
                return
            left = nodes
            for rank in range(int(self._children[level][nodes - 1]) - 1, -1, -1):
                share = int(self._last[level][rank + 1][left - 1])
                paths.append((*path, rank))
                build(level + 1, share, (*path, rank))
                left -= share

        build(0, num_nodes, ())
        paths.sort(key=lambda path: (len(path), path))
        depth = max((len(path) for path in paths), default=0)
        return BestTree(paths=tuple(paths), depth=depth, tokens=self.values[num_nodes - 1])


def best_tree(acceptance: Sequence[Sequence[float]], num_drafted: int, depth: int) -> BestTree:
    """The tree of exactly `num_drafted` nodes below the root, at most `depth` levels, with most expected tokens."""
    return TreeProgramme(acceptance, num_drafted + 1, depth).tree(num_drafted + 1)


def best_size(
    acceptance: Sequence[Sequence[float]],
    verify_seconds: Callable[[int], float],
    level_seconds: float,
    *,
    max_drafted: int,
    max_depth: int,
) -> BestTree:
    """The hardware-aware choice: fewest seconds per token, (depth x draft pass + verification of m rows) / value.

    Every size 0 .. `max_drafted` and every depth up to `max_depth` is tried (real costs are staircases, so there need
    not be a single minimum); the smallest among equals. Size 0 is plain decoding.
    """
    best = BestTree(paths=(), depth=0, tokens=1.0, seconds_per_token=verify_seconds(1))
    for depth in range(1, max_depth + 1):
        programme = TreeProgramme(acceptance, max_drafted + 1, depth)
        for nodes in range(2, max_drafted + 2):
            value = programme.values[nodes - 1]
            if value == -np.inf:
                continue
            each = (depth * level_seconds + verify_seconds(nodes)) / value
            if each < best.seconds_per_token * (1 - 1e-12):
                found = programme.tree(nodes)
                best = BestTree(paths=found.paths, depth=found.depth, tokens=value, seconds_per_token=each)
    return best
