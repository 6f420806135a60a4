"""Which tree a drafter fills for a budget: its option's, or the one the controller asks for.

Used by every drafter that can draft any shape (draft models, heads, recurrent drafters); shapes themselves come from
`core.tree_shapes`. Invariant: a shape is known before anything is drawn, and holds no more nodes
than its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

from draftsmith.core.tree import children, parents_of
from draftsmith.core.tree_shapes import RankPath, level_paths
from draftsmith.core.types import Budget
from draftsmith.errors import OptionError

AUTO, CHAIN = "auto", "chain"
"""Values of an option `tree`: what the controller asks for (a chain when it names no shape), and always a chain."""
Below: TypeAlias = list[list[int]]
"""The children of each node of a shape."""
_MAX_KNOWN = 256


def parse_levels(text: str, *, others: str = "") -> tuple[int, ...]:
    """Children per level, written like 3x2x1; `others`: what else the drafter takes. Raises `OptionError`."""
    if not all(part.isdecimal() and int(part) > 0 for part in text.split("x")):
        raise OptionError(f"tree is {text!r}; write auto, chain, {others}or children per level like 3x2x1")
    return tuple(int(part) for part in text.split("x"))


def option_paths(tree: str, max_nodes: int, *, others: str = "") -> list[RankPath] | None:
    """The shape an option fixes as children per level; None for `auto` and `chain`. Raises `OptionError`."""
    return None if tree in (AUTO, CHAIN) else level_paths(parse_levels(tree, others=others), max_nodes)


@final
class Shapes:
    """Shapes of one drafter, worked out once each.

    `fixed`: the tree whose first nodes are drafted whatever the controller asks for; None leaves it to `Budget`.
    `max_nodes`, `max_depth`: what the drafter can do.
    """

    def __init__(self, fixed: Sequence[RankPath] | None, max_nodes: int, max_depth: int | None = None) -> None:
        self._fixed = None if fixed is None else tuple(fixed)[:max_nodes]
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._known: dict[tuple[RankPath, ...], Below] = {}

    def below(self, budget: int) -> Below | None:
        """Children of each node of the shape for a budget, the root's first; None: a chain."""
        paths = self._fixed
        if paths is None:
            paths = Budget.shape_of(budget)
            if paths is None:
                return None
        if len(paths) > min(budget, self._max_nodes):
            paths = paths[: min(budget, self._max_nodes)]
        known = self._known.get(paths)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            deep = self._max_depth
            fitting = paths if deep is None else [path for path in paths if len(path) <= deep]
            known = self._known[paths] = children(parents_of(fitting))
        return known


def is_branching(below: Below | None) -> bool:
    """Whether some node has several children."""
    return below is not None and any(len(nodes) > 1 for nodes in below)
