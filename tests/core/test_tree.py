"""Trees: what follows from the parents, static shapes, and cutting."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core import tree as trees
from draftsmith.core.types import Proposal, ProposalKind, Tree
from draftsmith.errors import OptionError, UnsoundError

#       0
#    1     2
#   3 4    5
#  6
PARENTS = (-1, 0, 0, 1, 1, 2, 3)


@st.composite
def parent_tuples(draw, max_nodes=40):
    num_nodes = draw(st.integers(1, max_nodes))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes)))


def test_what_follows_from_the_parents():
    assert trees.depths(PARENTS) == (0, 1, 1, 2, 2, 2, 3)
    assert trees.children(PARENTS) == [[1, 2], [3, 4], [5], [6], [], [], []]
    assert trees.expanded(PARENTS) == (0, 1, 2, 3)
    assert trees.path_to(PARENTS, 6) == (1, 3, 6) and trees.path_to(PARENTS, 0) == ()
    assert trees.path_tokens(Tree(tuple(range(10, 17)), PARENTS), 5) == (12, 15)
    assert not trees.is_chain(PARENTS)


def test_a_root_alone():
    assert trees.depths((-1,)) == (0,)
    assert trees.children((-1,)) == [[]] and trees.expanded((-1,)) == ()
    assert trees.is_chain((-1,)) and trees.ancestor_mask((-1,)).tolist() == [[True]]


def test_chain():
    tree = trees.chain(9, [4, 5])
    assert tree == Tree((9, 4, 5), (-1, 0, 1)) and trees.is_chain(tree.parents)
    assert trees.chain(9) == Tree((9,), (-1,))
    trees.validate(tree)


@given(parent_tuples())
def test_properties_of_any_tree(parents):
    num_nodes = len(parents)
    depths = trees.depths(parents)
    mask = trees.ancestor_mask(parents)
    assert mask.dtype == torch.bool and mask.shape == (num_nodes, num_nodes)
    for node in range(num_nodes):
        path = trees.path_to(parents, node)
        assert len(path) == depths[node]
        assert set(mask[node].nonzero().flatten().tolist()) == {0, *path}, "a row sees its ancestors and itself"
    assert all(parents[child] == node for node, below in enumerate(trees.children(parents)) for child in below)
    inner = [node for node, below in enumerate(trees.children(parents)) if below]
    assert trees.expanded(parents) == tuple(inner)
    assert trees.is_chain(parents) == (len(inner) == num_nodes - 1)
    trees.validate(Tree(tuple(range(num_nodes)), parents))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "0 tokens"),
        ((1, 2), (-1,), "one parent per token"),
        ((1,), (0,), "node 0 .* is the root"),
        ((1, 2, 3), (-1, 0, 2), "node 2 .* parent 2; allowed: 0 to 1"),
        ((1, 2, 3), (-1, 2, 0), "node 1 .* parent 2"),
        ((1, 2), (-1, -1), "node 1 .* parent -1"),
        ((1, -2), (-1, 0), "token -2"),
    ],
)
def test_malformed_trees_are_refused(tokens, parents, message):
    with pytest.raises(OptionError, match=message):
        trees.validate(Tree(tokens, parents))


class TestParentsOf:
    def test_rank_paths_in_any_order(self):
        assert trees.parents_of([(0, 1), (1,), (0,), (0, 0), (0, 1, 3)]) == (-1, 0, 0, 1, 1, 4)
        assert trees.parents_of([]) == (-1,)

    @pytest.mark.parametrize("paths", [[()], [(0,), (0,)], [(0, 0)], [(-1,)], [(0,), (1, 0)]])
    def test_malformed_rank_paths_are_refused(self, paths):
        with pytest.raises(OptionError, match="tree path"):
            trees.parents_of(paths)


class TestCut:
    tree = Tree((0, 11, 12, 13, 14, 15, 16), PARENTS)

    def test_nothing_to_cut(self):
        proposal = Proposal(self.tree, ProposalKind.IID)
        assert trees.cut(proposal, 6) is proposal

    def test_without_confidence_the_first_nodes_stay(self):
        assert trees.cut(Proposal(self.tree), 3).tree == Tree((0, 11, 12, 13), (-1, 0, 0, 1))
        assert trees.cut(Proposal(self.tree), 0).tree == Tree((0,), (-1,))

    def test_with_confidence_the_most_probable_paths_stay(self):
        confidence = (1.0, 0.5, 0.9, 0.9, 0.1, 0.8, 1.0)
        kept = trees.cut(Proposal(self.tree, confidence=confidence), 3)
        assert kept.tree == Tree((0, 11, 12, 15), (-1, 0, 0, 2))
        assert kept.confidence == (1.0, 0.5, 0.9, 0.8)

    @pytest.mark.parametrize("kind", (ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT))
    def test_drawn_tokens_are_not_cut(self, kind):
        with pytest.raises(UnsoundError, match="cannot be cut from 6 to 5"):
            trees.cut(Proposal(self.tree, kind), 5)

    @given(parent_tuples(), st.data())
    def test_a_cut_is_a_tree_and_keeps_every_path(self, parents, data):
        """Whatever the confidences (even nonsense), parents stay with their children and tokens with their nodes."""
        num_nodes = len(parents)
        confidence = tuple(data.draw(st.lists(st.floats(), min_size=num_nodes, max_size=num_nodes)))
        tree = Tree(tuple(range(100, 100 + num_nodes)), parents)
        kept = trees.cut(Proposal(tree, confidence=confidence), data.draw(st.integers(0, num_nodes)))
        trees.validate(kept.tree)
        for node in range(kept.tree.num_nodes):
            original = kept.tree.tokens[node] - 100
            assert trees.path_tokens(kept.tree, node) == trees.path_tokens(tree, original)


def test_cost():
    """On the hot path: a mask of 64 nodes and the depths of a chain of 16 (generous bounds for a loaded machine)."""
    generator = np.random.default_rng(0)
    big = (-1, *(int(generator.integers(node)) for node in range(1, 64)))
    small = trees.chain(0, range(16)).parents

    def best_of(action):
        times = []
        for _ in range(100):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_of(lambda: trees.ancestor_mask(big)) < 100e-6
    assert best_of(lambda: trees.depths(small)) < 20e-6
    assert best_of(lambda: trees.is_chain(small)) < 20e-6
