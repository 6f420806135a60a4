"""Synthetic acceptance by enumeration: every depth is kept with exactly the set probability, whatever was drafted."""

import itertools
import math

import pytest

from draftsmith.core import tree as trees
from draftsmith.core.chance import outcomes
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.synthetic import SyntheticAcceptance, conditional_of
from draftsmith.core.types import Proposal, Tree
from draftsmith.errors import OptionError
from tests.core.checks import EXACT
from tests.core.inexact_toys import TARGET, greedy_sampler
from tests.core.toys import sampler_of, score

KINDS = [
    SyntheticAcceptance(fraction=0.55),
    SyntheticAcceptance(fraction=0.0),
    SyntheticAcceptance(fraction=1.0),
    SyntheticAcceptance(survivals=(0.9, 0.7, 0.7, 0.2)),
    SyntheticAcceptance(length=1.0),
    SyntheticAcceptance(length=3.25),
    SyntheticAcceptance(conditional=0.8),
]


def kept(rule, tree, sampler=None):
    """Probability of each number of kept tokens; the tokens are checked on the way."""
    rows, sampler = score(tree, TARGET), sampler or greedy_sampler(3, rule)
    found = {}
    for weight, (verdict, memory) in outcomes(lambda chance: rule.verify(Proposal(tree), rows, sampler, chance, None)):
        assert memory is None and verdict.costs is None
        assert verdict.tokens[:-1] == tuple(tree.tokens[node] for node in verdict.path)
        if sampler.greedy:
            last = verdict.path[-1] if verdict.path else 0
            assert verdict.tokens[-1] == int(rows[last].argmax()), "the target's own token comes after the cut"
        found[verdict.num_accepted] = found.get(verdict.num_accepted, 0.0) + weight
    return found


@pytest.mark.parametrize("rule", KINDS, ids=lambda rule: rule.text)
@pytest.mark.parametrize("depth", range(9))
def test_every_depth_survives_as_set(rule, depth):
    rates = rule.rates(depth)
    assert len(rates) == depth and all(0 <= later <= rate <= 1 for rate, later in itertools.pairwise(rates))
    found = kept(rule, trees.chain(0, [place % 3 for place in range(depth)]))
    for place, rate in enumerate(rates, 1):
        assert sum(weight for count, weight in found.items() if count >= place) == pytest.approx(rate, abs=EXACT)


def test_rates_by_hand():
    assert SyntheticAcceptance(length=2.6).rates(4) == pytest.approx((1.0, 0.6, 0.0, 0.0))
    assert SyntheticAcceptance(length=1.0).rates(2) == (0.0, 0.0)
    assert SyntheticAcceptance(length=9.0).rates(2) == (1.0, 1.0), "as far as the draft goes"
    assert SyntheticAcceptance(survivals=(0.5,)).rates(3) == (0.5, 0.0, 0.0)
    assert SyntheticAcceptance(survivals=(0.5, 0.25)).rates(1) == (0.5,)
    assert SyntheticAcceptance(conditional=0.5).rates(3) == pytest.approx((0.5, 0.25, 0.125))


def test_a_fraction_is_the_mean_share_of_a_draft():
    """a + a^2 = 1 has the golden ratio's inverse; in general the kept tokens are that share of the drafted ones."""
    assert conditional_of(0.5, 2) == pytest.approx((math.sqrt(5) - 1) / 2, abs=1e-14)
    assert conditional_of(0.3, 1) == pytest.approx(0.3, abs=1e-14)
    for depth in range(1, 9):
        for fraction in (0.01, 0.2, 0.55, 0.9, 0.999):
            rates = SyntheticAcceptance(fraction=fraction).rates(depth)
            assert sum(rates) / depth == pytest.approx(fraction, abs=1e-12)
        assert SyntheticAcceptance(fraction=1.0).rates(depth) == (1.0,) * depth


def test_a_length_varies_as_little_as_it_can():
    found = kept(SyntheticAcceptance(length=3.25), trees.chain(0, (1, 2, 1, 2, 1)))
    assert found == pytest.approx({2: 0.75, 3: 0.25})


def test_what_was_drafted_does_not_matter():
    rule = SyntheticAcceptance(conditional=0.6)
    found = [kept(rule, trees.chain(0, tokens)) for tokens in ((0, 0, 0), (2, 1, 2))]
    assert found[0] == pytest.approx(found[1])


def test_sampled_requests_end_with_a_draw_of_the_target():
    rule = SyntheticAcceptance(survivals=(0.0,))
    tree = trees.chain(0, (1,))
    sampler, rows = sampler_of(3, rule), score(tree, TARGET)
    found = [0.0] * 3
    for weight, (verdict, _) in outcomes(lambda chance: rule.verify(Proposal(tree), rows, sampler, chance, None)):
        found[verdict.tokens[0]] += weight
    assert found == pytest.approx(TARGET.law(()).tolist())


def test_on_a_tree_the_deepest_path_is_meant():
    tree = Tree((0, 1, 2, 0, 1), (-1, 0, 0, 2, 3))
    rule = SyntheticAcceptance(length=4.0)
    ((_, (verdict, _)),) = outcomes(
        lambda chance: rule.verify(Proposal(tree), score(tree, TARGET), greedy_sampler(3, rule), chance, None)
    )
    assert verdict.path == (2, 3, 4)


def test_it_is_never_called_exact_or_lossy():
    rule = SyntheticAcceptance(survivals=(0.8, 0.5))
    assert rule.fidelity is Fidelity.SYNTHETIC
    assert rule.label == "synthetic (synthetic:survivals=0.8,0.5)"
    SamplingParams(rule=rule), SamplingParams(temperature=1.0, rule=rule)  # any temperature


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "give exactly one of fraction, survivals, length, conditional; got none"),
        ({"length": 2.0, "fraction": 0.5}, "got fraction and length"),
        ({"fraction": 1.1}, "fraction is 1.1; allowed: 0 to 1"),
        ({"fraction": float("nan")}, "fraction is nan"),
        ({"conditional": -0.1}, "conditional is -0.1"),
        ({"length": 0.9}, "length is 0.9; allowed: at least 1"),
        ({"length": float("inf")}, "length is inf"),
        ({"survivals": (0.5, 0.6)}, "never rise"),
        ({"survivals": (1.5, 0.5)}, "never rise"),
        ({"survivals": ()}, "never rise"),
        ({"survivals": (0.5, -0.1)}, "never rise"),
    ],
)
def test_settings_are_checked(settings, told):
    with pytest.raises(OptionError, match="rule synthetic") as caught:
        SyntheticAcceptance(**settings)
    assert told in str(caught.value) and "\n" not in str(caught.value)
