"""AdaSD, our variant: distances by hand, thresholds that learn from exact rejection alone, and what it costs."""

import math

import numpy as np
import pytest
import torch

from draftsmith.core.adasd import AdaSD, Learned, Seen, jensen_shannon_distance
from draftsmith.core.chance import KeyedChance
from draftsmith.core.draw import record_law
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import Proposal, Tree
from draftsmith.core.view import SequenceView
from draftsmith.drafters.growth import Growth
from draftsmith.errors import OptionError, UnsoundError
from tests.core.checks import EXACT
from tests.core.inexact_toys import best_chain, distance_and_cost, drawn_chain, steps
from tests.core.toys import Toy, sampler_of, score

# Mean distances 0.1 where exact rejection kept the token, 0.7 where it did not: threshold 0.4.
LEARNED = Learned(Seen(2, 0.2, 1.0), Seen(1, 0.7, 1.5))


def test_distances_by_hand():
    assert jensen_shannon_distance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(1.0)
    assert jensen_shannon_distance(np.array([0.3, 0.7]), np.array([0.3, 0.7])) == 0.0
    # Entropy of (3/4, 1/4) is 0.811278 bits, less half of 1 bit: 0.311278.
    found = jensen_shannon_distance(np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    assert found == pytest.approx(math.sqrt(0.311278), abs=1e-6)


def test_thresholds_are_half_way_between_the_means():
    assert Learned().distance is None and Learned(kept=Seen(3, 1.0, 1.0)).distance is None
    assert LEARNED.distance == pytest.approx((0.1 + 0.7) / 2)
    assert LEARNED.entropy == pytest.approx((0.5 + 1.5) / 2)


@pytest.mark.parametrize("drafting", [drawn_chain, lambda chance: best_chain()])
@pytest.mark.parametrize("memory", [None, Learned(kept=Seen(9, 0.1, 0.0))])
def test_it_is_exact_until_both_have_happened(drafting, memory):
    """Of a chain of one: a longer one may have learned both before it ends."""

    def one(chance):
        return drafting(chance, 1) if drafting is drawn_chain else best_chain(1)

    distance, cost = distance_and_cost(AdaSD(), one, 3, memory=memory)
    assert distance < EXACT and cost == 0.0


def test_below_the_threshold_the_draft_is_the_law():
    target, draft = Toy.context_free((0.6, 0.4)), Toy.context_free((0.7, 0.3))
    found = [0.0, 0.0]
    for weight, (verdict, _) in steps(AdaSD(), lambda chance: drawn_chain(chance, 1, draft), target, LEARNED):
        found[verdict.tokens[0]] += weight
        assert verdict.num_accepted == 1 and verdict.costs == pytest.approx((0.1, 0.0))
    assert found == pytest.approx([0.7, 0.3])


def test_above_the_threshold_or_the_limit_it_is_exact():
    target, draft = Toy.context_free((0.6, 0.4)), Toy.context_free((0.7, 0.3))
    far = Toy.context_free((0.02, 0.98))
    assert (
        jensen_shannon_distance(target.law(()), far.law(()))
        > 0.4
        > jensen_shannon_distance(target.law(()), draft.law(()))
    )
    for rule, drafts in ((AdaSD(), far), (AdaSD(limit=0.05), draft)):
        distance, cost = distance_and_cost(
            rule, lambda chance, drafts=drafts: drawn_chain(chance, 1, drafts), 2, target, LEARNED
        )
        assert distance < EXACT and cost == 0.0


def test_what_the_target_cannot_say_is_not_kept():
    """The distance is bounded, so laws may be near although the target rules a drafted token out."""
    target, draft = Toy.context_free((0.9, 0.1, 0.0)), Toy.context_free((0.85, 0.1, 0.05))
    for _, (verdict, _) in steps(AdaSD(), lambda chance: drawn_chain(chance, 1, draft), target, LEARNED):
        assert verdict.tokens[0] != 2
    distance, cost = distance_and_cost(AdaSD(), lambda chance: drawn_chain(chance, 1, draft), 1, target, LEARNED)
    # What the draft gave to token 2 goes to token 0, the only one it gave too little: nothing is lost.
    assert distance == pytest.approx(cost, abs=EXACT) == pytest.approx(0.0, abs=EXACT)


def test_it_learns_from_exact_rejection_alone():
    """Below the threshold every token is kept; what exact rejection would have refused still counts as lost."""
    target, draft = Toy.context_free((0.6, 0.4)), Toy.context_free((0.7, 0.3))
    found = {}
    for weight, (verdict, learned) in steps(AdaSD(), lambda chance: drawn_chain(chance, 1, draft), target, LEARNED):
        assert verdict.num_accepted == 1
        found[learned.kept.count, learned.lost.count] = found.get((learned.kept.count, learned.lost.count), 0) + weight
        newest = learned.kept if learned.kept.count == 3 else learned.lost
        assert newest.distance == pytest.approx(
            (0.2 if newest is learned.kept else 0.7) + jensen_shannon_distance(target.law(()), draft.law(()))
        )
    assert found == pytest.approx({(3, 1): 0.9, (2, 2): 0.1})  # the laws share 0.9


def test_no_fewer_tokens_are_kept_than_by_exact_rejection():
    def mean(rule, memory):
        return sum(w * verdict.num_accepted for w, (verdict, _) in steps(rule, drawn_chain, memory=memory))

    exact = mean(AdaSD(limit=1e-9), LEARNED)
    assert mean(AdaSD(), LEARNED) > exact == pytest.approx(mean(AdaSD(limit=1e-9), None))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [0, 1])
def test_the_costs_are_true_and_bound_the_total_variation(seed, zeros):
    target, draft = Toy.random(3, 350 + seed, zeros=zeros), Toy.random(3, 360 + seed)
    memory = Learned(Seen(1, 0.3, 0.0), Seen(1, 0.9, 0.0))
    for drafting in (lambda chance: drawn_chain(chance, 2, draft), lambda chance: best_chain(2, draft)):
        distance, cost = distance_and_cost(AdaSD(), drafting, 1, target, memory)
        assert distance == pytest.approx(cost, abs=EXACT)
        distance, cost = distance_and_cost(AdaSD(), drafting, 3, target, memory)
        assert distance <= cost + EXACT
        for _, (verdict, _) in steps(AdaSD(limit=0.5), drafting, target, memory):
            assert max(verdict.costs) <= math.sqrt(2 * math.log(2)) * 0.5 + EXACT


# -- where drafting stops -----------------------------------------------------------------------------


def growth(memory, rule=None):
    sampler = sampler_of(4, rule or AdaSD())
    view = SequenceView(0, [0], 1, sampler, RequestRandom(0), memory)
    return Growth(view, 4, branches=False)


FLAT, SHARP = torch.zeros(4), torch.tensor([9.0, 0.0, 0.0, 0.0])


def test_drafting_stops_where_the_draft_is_unsure():
    """The threshold is 1 nat; a flat law over four tokens has 1.386. The first token is always drafted."""
    grown = growth(LEARNED)
    (first,) = grown.draw(0, FLAT, 1)
    grown.add(0, first, 1.0)
    assert len(grown.draw(1, SHARP, 1)) == 1
    assert tuple(grown.draw(1, FLAT, 1)) == ()
    assert 1 not in grown.proposal().laws or grown.proposal().laws[1].probs.max() > 0.9


def test_drafting_goes_on_without_a_threshold_and_under_other_rules():
    for memory, rule in ((None, None), (Learned(kept=Seen(1, 0, 0)), None)):
        grown = growth(memory, rule)
        grown.add(0, 1, 1.0)
        assert len(grown.draw(1, FLAT, 1)) == 1
    assert AdaSD().goes_on(record_law(torch.tensor([0.5, 0.5, 0.0, 0.0])), LEARNED)


@pytest.mark.parametrize("limit", [0.0, -0.1, 1.1, float("nan")])
def test_the_limit_is_checked(limit):
    with pytest.raises(OptionError, match="rule adasd: limit is"):
        AdaSD(limit=limit)


def test_refusals():
    with pytest.raises(OptionError, match="needs a temperature above 0"):
        SamplingParams(rule=AdaSD())
    rows = score(Tree((0, 1, 2), (-1, 0, 0)), Toy.random(3, 1))
    with pytest.raises(UnsoundError, match="rule adasd verifies chains"):
        AdaSD().verify(
            Proposal(Tree((0, 1, 2), (-1, 0, 0))), rows, sampler_of(3, AdaSD()), KeyedChance(RequestRandom(0), 0), None
        )
