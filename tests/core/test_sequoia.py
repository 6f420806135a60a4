"""Sequoia's trees: the dynamic programme against every tree there is, and its choice of size and depth."""

import itertools
import random

import pytest

from draftsmith.core.sequoia import TreeProgramme, best_size, best_tree
from draftsmith.core.theory import expected_tree_tokens
from draftsmith.core.tree import parents_of
from draftsmith.core.tree_shapes import best_nodes, best_paths
from draftsmith.errors import OptionError


def every_tree(num_drafted, depth, num_ranks):
    """All sets of rank paths that are trees: a path comes with its parent and its better siblings."""
    found = {frozenset()}
    for _ in range(num_drafted):
        found = {
            tree | {path}
            for tree in found
            for parent in (*tree, ())
            if len(parent) < depth
            for rank in range(num_ranks)
            if (path := (*parent, rank)) not in tree and (rank == 0 or (*parent, rank - 1) in tree)
        }
    return found


def value_of(paths, acceptance):
    return expected_tree_tokens(parents_of(sorted(paths)), acceptance)


def acceptances(seed, depth, num_ranks, falling):
    """Rows that sum to less than 1."""
    rng = random.Random(seed)
    rows = []
    for _ in range(depth):
        cuts = sorted(rng.random() for _ in range(num_ranks))
        row = [high - low for low, high in itertools.pairwise([0.0, *cuts])]
        rows.append(sorted(row, reverse=True) if falling else row)
    return rows


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_programme_equals_brute_force(seed, falling):
    depth, num_ranks = 3, 3
    rows = acceptances(seed, depth, num_ranks, falling)
    for num_drafted in range(1, 7):
        best = max(value_of(tree, rows) for tree in every_tree(num_drafted, depth, num_ranks))
        found = best_tree(rows, num_drafted, depth)
        assert found.tokens == pytest.approx(best, abs=1e-12)
        assert value_of(found.paths, rows) == pytest.approx(best, abs=1e-12)
        assert len(found.paths) == num_drafted and found.depth <= depth


def test_ranks_that_are_never_right():
    """Zero chances met subtrees that do not exist: no number came out, and no tree."""
    rows = [[0.6, 0.0], [0.5, 0.0]]
    for num_drafted in range(1, 6):
        best = max(value_of(tree, rows) for tree in every_tree(num_drafted, 2, 2))
        assert best_tree(rows, num_drafted, 2).tokens == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_taking_the_worthiest_node_is_the_same_where_chances_fall_with_the_rank(seed):
    rows = acceptances(seed, 4, 4, True)
    for num_drafted in (1, 5, 12, 20):
        greedy = value_of(best_paths(rows, num_drafted), rows)
        assert greedy == pytest.approx(best_tree(rows, num_drafted, 4).tokens, abs=1e-12)
    worths = [worth for worth, _ in best_nodes(rows, 12)]
    assert worths == sorted(worths, reverse=True)
    assert 1 + sum(worths) == pytest.approx(value_of(best_paths(rows, 12), rows))
    assert all(worth > 0.2 for worth, _ in best_nodes(rows, 50, 0.2))


def test_a_worked_case():
    """a = (.6, .2): two nodes are the chain (.6 + .36 > .6 + .2), with one level the two siblings."""
    assert best_tree([[0.6, 0.2]], 2, 2).paths == ((0,), (0, 0))
    assert best_tree([[0.6, 0.2]], 2, 1).paths == ((0,), (1,))
    assert best_tree([[0.6, 0.2]], 2, 2).tokens == pytest.approx(1.96)
    # .2 for the second child beats .216 of the third level only when there is none.
    assert best_tree([[0.6, 0.2]], 3, 3).paths == ((0,), (0, 0), (0, 0, 0))
    assert best_tree([[0.6, 0.2]], 3, 2).paths == ((0,), (1,), (0, 0))


def test_the_hardware_decides_size_and_depth():
    rows = [[0.6, 0.2]]
    # Rows for nothing and free drafting: as large as allowed.
    free = best_size(rows, lambda rows: 1.0, 0.0, max_drafted=6, max_depth=4)
    assert len(free.paths) == 6
    # Every row costs a step: nothing is drafted.
    dear = best_size(rows, lambda rows: float(rows), 0.0, max_drafted=6, max_depth=4)
    assert dear.paths == () and dear.seconds_per_token == 1.0
    # Draft passes cost, rows do not: wide and flat. One level: 1.1 / 1.8 < 2 levels: 1.2 / (1 + .8 + .64).
    flat = best_size(rows, lambda rows: 1.0, 0.6, max_drafted=6, max_depth=4)
    assert flat.depth == 1 and flat.paths == ((0,), (1,))
    # A staircase after 4 rows: three drafted nodes, not four.
    stairs = best_size(rows, lambda rows: 1.0 if rows <= 4 else 3.0, 0.01, max_drafted=6, max_depth=6)
    assert len(stairs.paths) == 3


def test_what_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="no tree of 4 nodes fits 1 levels"):
        TreeProgramme([[0.5, 0.2]], 6, 1).tree(4)
    with pytest.raises(OptionError, match="acceptance by rank is empty"):
        best_tree([], 2, 2)
