"""Shapes that a controller asks for: every drafter that says it fills them drafts exactly that tree."""

import pytest

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.tree import is_chain, parents_of
from draftsmith.core.types import Budget, ProposalKind, Rule
from draftsmith.drafters.shapes import Shapes
from tests.drafters.loop import Reading, make, view_of

FILLING = ["draft_model:model=near", "medusa:path=toy/medusa", "hydra:path=toy/hydra", "eagle3:path=toy/eagle3"]
FILLING += ["mtp:path=toy/mtp", "eagle1:path=toy/eagle1-few", "hybrid:other=draft_model+model=near:threshold=99"]
SHAPE = ((0,), (1,), (0, 0), (1, 0), (0, 1))
PARAMS = [SamplingParams(), SamplingParams(temperature=1.0, rule=Rule.TRAVERSAL), SamplingParams(temperature=1.0)]


def prompt_view(params, seed=0):
    return view_of([3, 1, 4, 1, 5], 5, params=params, seed=seed)


@pytest.mark.parametrize("text", FILLING)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "traversal", "coupling"])
def test_the_asked_for_tree_is_drafted(text, params):
    reading = Reading(text)
    assert reading.drafter.traits.fills_shapes
    tree = reading.propose([prompt_view(params)], [Budget(len(SHAPE), SHAPE)])[0].tree
    # Nodes may stand in the order they were drawn in, level by level; the tree is the same.
    assert sorted(ranks_of(tree.parents)) == sorted(SHAPE)


def ranks_of(parents):
    """Rank paths of a drafted tree."""
    paths, seen = {0: ()}, {}
    for node in range(1, len(parents)):
        rank = seen[parents[node]] = seen.get(parents[node], -1) + 1
        paths[node] = (*paths[parents[node]], rank)
    return [paths[node] for node in range(1, len(parents))]


@pytest.mark.parametrize("text", FILLING)
def test_rules_for_chains_get_chains_and_plain_numbers_do_too(text):
    view = prompt_view(SamplingParams(temperature=1.0, rule=Rule.CHAIN))
    proposal = Reading(text).propose([view], [Budget(len(SHAPE), SHAPE)])[0]
    assert is_chain(proposal.tree.parents) and proposal.kind is ProposalKind.IID
    assert is_chain(Reading(text).propose([prompt_view(SamplingParams())], [5])[0].tree.parents)


@pytest.mark.parametrize(
    "text", ["draft_model:model=near:tree=2x1", "medusa:path=toy/medusa:tree=chain", "eagle3:path=toy/eagle3:tree=2x2"]
)
def test_a_shape_of_the_user_is_the_users(text):
    """A tree that an option fixes is not the controller's to change."""
    reading = Reading(text)
    assert not reading.drafter.traits.fills_shapes
    asked = reading.propose([prompt_view(SamplingParams())], [Budget(3, ((0,), (0, 0), (1,)))])[0].tree
    assert asked == Reading(text).propose([prompt_view(SamplingParams())], [3])[0].tree


def test_shapes_are_cut_to_what_the_drafter_can_do():
    shapes = Shapes(None, 3, 2)
    assert shapes.below(2) is None
    chain = shapes.below(Budget(3, ((0,), (0, 0), (0, 0, 0))))
    assert chain == [[1], [2], []]
    assert shapes.below(Budget(5, SHAPE)) == [[1, 2], [3], [], []]
    assert Shapes(SHAPE, 9).below(3) == [[1, 2], [3], [], []]
    assert len(parents_of(SHAPE)) == 6


def test_a_draft_model_says_what_it_must_read():
    drafter = make("draft_model:model=near")
    view = prompt_view(SamplingParams())
    assert drafter.pending(view) == 5
    drafter.propose([view], [2], lambda confidence: True)
    assert drafter.pending(view) <= 1
    view.tokens.extend([2, 2, 2])
    assert drafter.pending(view) >= 2
    drafter.truncate(0, 0)
    assert drafter.pending(view) == 8
    assert make("ngram").pending(view) == 0


def test_a_recurrent_drafter_says_what_it_must_read():
    reading = Reading("eagle3:path=toy/eagle3")
    view = prompt_view(SamplingParams())
    reading.read(view)
    assert reading.drafter.pending(view) == 4
    reading.propose([view], [2])
    assert reading.drafter.pending(view) == 0


def test_the_hybrid_drafts_without_its_other_part_where_it_may_not_start():
    reading = Reading("hybrid:other=draft_model+model=near:threshold=99")
    view = view_of([1, 2, 3, 1, 2, 3, 1, 2], 8)
    proposal = reading.propose([view], [Budget(3, may_start=False)])[0]
    assert proposal.tree.tokens[:2] == (2, 3)  # the suffix tree's, although it scores below the threshold
    assert reading.drafter.pending(view) == 8 and reading.drafter.traits.starts_partly
    reading.propose([view], [3])
    assert reading.drafter.pending(view) <= 1


def test_a_chain_in_one_call_ends_where_it_is_no_longer_likely():
    """The end is judged by the draft's own probabilities, and the token that goes below stays."""
    view = prompt_view(SamplingParams())
    long = Reading("eagle3:path=toy/eagle3").propose([view], [6])[0]
    reach = [1.0]
    for prob in long.confidence[1:]:
        reach.append(reach[-1] * prob)
    least = 0.5 * (reach[2] + reach[3])
    short = Reading("eagle3:path=toy/eagle3").propose([view], [Budget(6, least=least)])[0]
    assert short.tree.tokens == long.tree.tokens[:4]
