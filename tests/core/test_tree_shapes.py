"""Static trees: chains, levels, and the best tree for measured accuracies."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core.tree import parents_of
from draftsmith.core.tree_shapes import best_paths, chain_paths, level_paths
from draftsmith.errors import OptionError


def worth(accuracies, path):
    return math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def test_chains_and_levels():
    assert chain_paths(3) == [(0,), (0, 0), (0, 0, 0)] and chain_paths(0) == []
    assert parents_of(level_paths([2, 2], 99)) == (-1, 0, 0, 1, 1, 2, 2)
    assert parents_of(level_paths([], 99)) == (-1,)
    for size in range(16):
        assert level_paths([3, 2, 1], size) == level_paths([3, 2, 1], 99)[:size]
    assert len(level_paths([9] * 12, 50)) == 50  # never built beyond what may be drafted
    with pytest.raises(OptionError, match="0 children"):
        level_paths([2, 0], 9)


def test_the_best_tree_of_a_known_table():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.5]]
    # .6; .3, .18 below it; .2; then .15, .1 (1, 0), .1 (2,), .09, .06 ..
    assert best_paths(accuracies, 5) == [(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]
    assert best_paths(accuracies, 0) == [] and best_paths([], 5) == []
    assert best_paths([[0.5, 0.0], [0.0]], 9) == [(0,)]
    assert len(best_paths(accuracies, 99)) == 3 + 6 + 6


@st.composite
def tables(draw):
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        rows.append([value / 10 / len(row) for value in sorted(row, reverse=True)])
    return rows


@given(tables(), st.integers(1, 6))
def test_no_tree_of_the_size_is_worth_more(accuracies, size):
    """Against every set of paths that is a tree, by brute force."""
    everything = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:depth]))
    ]
    found = best_paths(accuracies, size)
    assert len(found) == min(size, len(everything))
    best = sorted((worth(accuracies, path) for path in everything), reverse=True)[:size]
    # No parent is worth less than its child, so the best tree holds the worthiest paths.
    assert math.isclose(sum(worth(accuracies, path) for path in found), sum(best))


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=4), st.integers(0, 30))
def test_every_prefix_is_a_tree_in_draw_order(accuracies, size):
    """Also for tables that rise with the rank by chance of the measurement."""
    paths = best_paths(accuracies, size)
    assert len(set(paths)) == len(paths) <= size
    for count, path in enumerate(paths):
        before = {(), *paths[:count]}
        assert path[:-1] in before
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in before
