"""Typical acceptance and lenience do what their papers say, differ from the target's law, and tell by how much."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch

import draftsmith.core.verify
from draftsmith.core.chance import KeyedChance
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.inexact import InexactRule, fidelity_of, rule_text
from draftsmith.core.lossy import Lenience, TypicalAcceptance
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import Proposal, ProposalKind, Rule, Tree, Verdict
from draftsmith.core.verify import verify
from draftsmith.errors import OptionError, UnsoundError
from draftsmith.registry import RULES, load_class, parse_selection
from tests.core.checks import EXACT
from tests.core.inexact_toys import (
    TARGET,
    best_chain,
    chain_of,
    distance_and_cost,
    drawn_chain,
    greedy_sampler,
    steps,
)
from tests.core.toys import Joint, Toy, sampler_of, score

USUAL = TypicalAcceptance(epsilon=0.09, delta=0.3)


def keyed(rule, proposal, rows, vocab_size=3):
    sampler = sampler_of(vocab_size, rule)
    return rule.verify(proposal, rows, sampler, KeyedChance(RequestRandom(0), 0), None)[0]


# -- lenience -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", [drawn_chain, lambda chance: best_chain()])
def test_lenience_changes_the_law_and_factor_one_does_not(drafting):
    distance, cost = distance_and_cost(Lenience(factor=1.0), drafting, 3)
    assert distance < EXACT and cost < EXACT
    assert distance_and_cost(Lenience(factor=0.5), drafting, 3)[0] > 0.01


def test_lenience_by_hand():
    """p = (0.5, 0.5), q = (0.9, 0.1), factor 0.8: token 0 is kept with 0.5 / 0.72, token 1 always; what is left after a
    rejection is token 1 alone (0.625 - 0.9 < 0 < 0.625 - 0.1). So token 0 comes with 0.625, 0.125 too often."""
    rule = Lenience(factor=0.8)
    target, draft = Toy.context_free((0.5, 0.5)), Toy.context_free((0.9, 0.1))
    found = dict.fromkeys(range(2), 0.0)
    for weight, (verdict, memory) in steps(rule, lambda chance: drawn_chain(chance, 1, draft), target):
        found[verdict.tokens[0]] += weight
        assert verdict.costs[0] == pytest.approx(0.125) and memory is None
    assert found[0] == pytest.approx(0.9 * 0.5 / 0.72) == pytest.approx(0.625)


def test_lenience_keeps_its_bound():
    """No token of the first position becomes more than 1 / factor times as likely."""
    wanted = dict(Joint(TARGET, sampler_of(3, Rule.CHAIN)).continued((), 1))
    for factor in (0.9, 0.5, 0.2):
        found = dict.fromkeys(wanted, 0.0)
        for weight, (verdict, _) in steps(Lenience(factor=factor), drawn_chain):
            found[verdict.tokens[:1]] += weight
        assert all(prob <= wanted[sequence] / factor + EXACT for sequence, prob in found.items())


def test_lenience_accepts_more():
    def mean(factor):
        return sum(
            weight * verdict.num_accepted for weight, (verdict, _) in steps(Lenience(factor=factor), drawn_chain)
        )

    assert mean(0.2) > mean(0.6) > mean(1.0)


def test_lenience_is_chain_rejection_where_the_target_says_no():
    """A token of probability 0 is never let pass, whatever the factor."""
    target, draft = Toy.context_free((0.0, 1.0)), Toy.context_free((0.9, 0.1))
    for _, (verdict, _) in steps(Lenience(factor=0.01), lambda chance: drawn_chain(chance, 1, draft), target):
        assert verdict.tokens[0] == 1


def test_a_step_without_drafts_is_plain():
    for rule in (Lenience(factor=0.5),):
        empty = Proposal.empty(0)
        found = rule.verify(
            empty, score(empty.tree, TARGET), sampler_of(3, rule), KeyedChance(RequestRandom(7), 2), None
        )
        plain = verify(empty, score(empty.tree, TARGET), sampler_of(3, Rule.CHAIN), RequestRandom(7), 2)
        assert found[0].tokens == plain.tokens and found[0].costs == (0.0,)


# -- typical acceptance -------------------------------------------------------------------------------


def test_typical_acceptance_changes_the_law():
    assert distance_and_cost(USUAL, drawn_chain, 2)[0] > 0.01


def test_typical_threshold_is_min_of_epsilon_and_delta_over_perplexity():
    """p = (0.7, 0.2, 0.1): exp(-entropy) = 0.448, so delta 0.3 gives 0.134; the two settings are told apart."""
    law = np.array([0.7, 0.2, 0.1])
    perplexity_inverse = math.exp(float((law * np.log(law)).sum()))
    rows = score(Tree((0, 0, 1, 2), (-1, 0, 0, 0)), Toy.context_free(law))

    def accepted(token, epsilon, delta):
        rule = TypicalAcceptance(epsilon=epsilon, delta=delta)
        return keyed(rule, Proposal(Tree((0, token), (-1, 0))), rows[:2]).num_accepted == 1

    assert 0.1 < 0.3 * perplexity_inverse < 0.2
    assert accepted(1, 0.5, 0.3) and not accepted(2, 0.5, 0.3)
    assert accepted(2, 0.09, 0.3), "epsilon is the smaller of the two"
    assert not accepted(2, 0.3, 0.3) and accepted(2, 0.3, 0.09), "the settings are not interchangeable"


def test_typical_acceptance_keeps_the_longest_path_then_the_likeliest():
    target = Toy.context_free((0.5, 0.3, 0.2))
    tree = Tree((0, 0, 1, 2, 0, 0), (-1, 0, 0, 2, 2, 1))
    rule = TypicalAcceptance(epsilon=0.1, delta=0.3)
    verdict = keyed(rule, Proposal(tree), score(tree, target))
    assert verdict.path == (1, 5)
    assert verdict.num_emitted == 3
    # Two accepted tokens of probability 0.5, then a draw from all three, which are above 0.1.
    assert verdict.costs == pytest.approx((0.5, 0.5, 0.0))


def test_typical_extra_token_is_above_the_threshold():
    target = Toy.context_free((0.9, 0.06, 0.04))
    for weight, (verdict, _) in steps(USUAL, lambda chance: Proposal.empty(0), target):
        assert verdict.tokens == (0,) and weight == 1.0
        assert verdict.costs == pytest.approx((0.1,))
    everything = TypicalAcceptance(epsilon=1.0, delta=1.0)
    empty = Proposal.empty(0)
    flat = keyed(everything, empty, score(empty.tree, target)[:1] * 0)
    assert flat.num_emitted == 1, "a flat law has nothing above its threshold, and still emits"


# -- what a step says it costs ------------------------------------------------------------------------

ALIKE = [Lenience(factor=0.9), Lenience(factor=0.3), USUAL, TypicalAcceptance(epsilon=0.3, delta=0.8)]


@pytest.mark.parametrize("rule", ALIKE, ids=lambda rule: rule.text)
@pytest.mark.parametrize("seed", range(3))
def test_the_cost_of_a_token_is_its_total_variation(rule, seed):
    """What is drafted is certain, or drawn by the token's own law: then the first token's cost is exact."""
    target, draft = Toy.random(3, 310 + seed), Toy.random(3, 320 + seed)
    best = best_chain(2, draft)
    distance, cost = distance_and_cost(rule, lambda chance: best, 1, target)
    assert distance == pytest.approx(cost, abs=EXACT)
    if isinstance(rule, Lenience):
        distance, cost = distance_and_cost(rule, lambda chance: drawn_chain(chance, 2, draft), 1, target)
        assert distance == pytest.approx(cost, abs=EXACT)


@pytest.mark.parametrize("rule", ALIKE, ids=lambda rule: rule.text)
@pytest.mark.parametrize("seed", range(3))
def test_the_costs_together_bound_the_total_variation_of_an_answer(rule, seed):
    target, draft = Toy.random(3, 330 + seed), Toy.random(3, 340 + seed)
    for drafting in (lambda chance: best_chain(2, draft), lambda chance: drawn_chain(chance, 2, draft)):
        distance, cost = distance_and_cost(rule, drafting, 3, target)
        assert 0 < distance <= cost + EXACT


def test_a_stop_rule_cuts_costs_with_their_tokens():
    verdict = Verdict((1, 2), (5, 6, 7), (0.1, 0.2, 0.3))
    assert verdict.cut(2) == Verdict((1, 2), (5, 6), (0.1, 0.2))
    assert Verdict((1,), (5, 6)).cut(1).costs is None


# -- what they are called, and what they refuse -------------------------------------------------------


def test_every_rule_of_the_table_says_what_it_is():
    for name in RULES:
        rule_class = load_class(parse_selection(name, RULES, "rule"))
        assert issubclass(rule_class, InexactRule) and rule_class.name == name
        assert rule_class.fidelity is (Fidelity.SYNTHETIC if name == "synthetic" else Fidelity.LOSSY)
    assert all(fidelity_of(rule) is Fidelity.EXACT for rule in Rule)
    assert not set(RULES) & {rule.value for rule in Rule}
    assert rule_text(USUAL) == "typical:epsilon=0.09:delta=0.3" and rule_text(Rule.CHAIN) == "chain"
    assert USUAL.label == "lossy (typical:epsilon=0.09:delta=0.3)"


def test_exact_verification_never_comes_here():
    named = {part for name in _imports(draftsmith.core.verify) for part in name.split(".")}
    assert not named & {"lossy", "adasd", "asd", "synthetic"}
    proposal = chain_of(1, 2)
    for rule in (USUAL, Lenience(factor=1.0)):
        with pytest.raises(UnsoundError, match="does not keep the target's law"):
            verify(proposal, score(proposal.tree, TARGET), sampler_of(3, rule), RequestRandom(0), 0)


def _imports(module):
    found = set()
    for line in inspect.getsource(module).splitlines():
        if line.startswith(("import ", "from ")):
            found.update(part for part in line.replace(",", " ").split() if part not in ("import", "from"))
    return found


@pytest.mark.parametrize("settings", [(0.0, 0.3), (1.5, 0.3), (0.09, 0.0), (0.09, -1.0), (float("nan"), 0.3)])
def test_typical_settings_are_checked(settings):
    epsilon, delta = settings
    with pytest.raises(OptionError, match="allowed: above 0 and up to 1"):
        TypicalAcceptance(epsilon=epsilon, delta=delta)


def test_typical_settings_have_no_defaults():
    """Published helpers have the two defaults swapped; here both must be given by name."""
    parameters = inspect.signature(TypicalAcceptance).parameters
    for name in ("epsilon", "delta"):
        assert parameters[name].default is inspect.Parameter.empty
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_lenience_refuses_what_it_cannot_do():
    rows = torch.zeros(3, 3)
    for factor in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(OptionError, match="factor"):
            Lenience(factor=factor)
    for kind in (ProposalKind.POINT_MASS, ProposalKind.IID):
        with pytest.raises(UnsoundError, match="this proposal branches"):
            keyed(Lenience(factor=0.5), Proposal(Tree((0, 1, 2), (-1, 0, 0)), kind), rows)
    with pytest.raises(UnsoundError, match="not recorded"):
        keyed(Lenience(factor=0.5), Proposal(Tree((0, 1), (-1, 0)), ProposalKind.IID), rows[:2])


@pytest.mark.parametrize("rule", [USUAL, Lenience(factor=0.5)], ids=lambda rule: rule.name)
def test_greedy_requests_are_refused(rule):
    with pytest.raises(OptionError, match="needs a temperature above 0"):
        SamplingParams(rule=rule)
    with pytest.raises(OptionError, match="needs a temperature above 0"):
        greedy_sampler(3, rule)


def test_drafters_draw_for_the_rule_they_stand_in_for():
    assert SamplingParams(temperature=1.0, rule=USUAL).draft_rule is Rule.MATCH
    assert SamplingParams(temperature=1.0, rule=Lenience(factor=0.5)).draft_rule is Rule.CHAIN
    assert all(SamplingParams(temperature=1.0, rule=rule).draft_rule is rule for rule in Rule)
    with pytest.raises(OptionError, match="lossy rule"):
        SamplingParams(temperature=1.0, rule="chain")


def test_toys_enumerate_everything():
    for rule, drafting in itertools.product(ALIKE, (drawn_chain, lambda chance: best_chain())):
        assert sum(weight for weight, _ in steps(rule, drafting)) == pytest.approx(1.0, abs=EXACT)
