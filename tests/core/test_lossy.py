"""The lossy rules do what their papers say, differ from the target's law, and say so."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch

import draftsmith.core.verify
from draftsmith.core import tree as trees
from draftsmith.core.chance import KeyedChance, outcomes
from draftsmith.core.lossy import LossyVerdict, lenience, typical_acceptance
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Proposal, ProposalKind, Rule, Tree
from draftsmith.errors import OptionError, UnsoundError
from tests.core.checks import EXACT, IID
from tests.core.toys import Joint, Toy, as_law, sampler_of, score

TARGET, DRAFT = Toy.random(3, 300), Toy.random(3, 301)


def emitted_law(run, length):
    """Law of the first tokens a lossy rule emits, extended with the target."""
    joint = Joint(TARGET, sampler_of(3, Rule.CHAIN))
    mass = dict.fromkeys(itertools.product(range(3), repeat=length), 0.0)
    for weight, verdict in outcomes(run):
        for sequence, prob in joint.continued(verdict.tokens, length):
            mass[sequence] += weight * prob
    return mass, dict(joint.continued((), length))


def distance(run, length=2):
    found, wanted = emitted_law(run, length)
    return 0.5 * sum(abs(prob - wanted[sequence]) for sequence, prob in found.items())


def drafted_chain(chance, length=2):
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(chance.pick(DRAFT.law(tokens).tolist()))
    return Proposal(trees.chain(0, tokens), IID, {n: as_law(DRAFT.law(tokens[:n])) for n in range(length)})


def run_lenience(chance, factor):
    proposal = drafted_chain(chance)
    sampler = sampler_of(3, Rule.CHAIN)
    result = lenience(proposal, score(proposal.tree, TARGET), sampler, chance, factor=factor)
    return result.verdict


def run_typical(chance, epsilon, delta):
    tree = drafted_chain(chance).tree
    sampler = sampler_of(3, Rule.CHAIN)
    return typical_acceptance(tree, score(tree, TARGET), sampler, chance, epsilon=epsilon, delta=delta).verdict


def test_lenience_changes_the_law_and_factor_one_does_not():
    assert distance(lambda chance: run_lenience(chance, 1.0)) < EXACT
    assert distance(lambda chance: run_lenience(chance, 0.5)) > 0.01


def test_lenience_keeps_its_bound():
    """No token of the first position becomes more than 1 / factor times as likely."""
    for factor in (0.9, 0.5, 0.2):
        found, wanted = emitted_law(lambda chance, factor=factor: run_lenience(chance, factor), 1)
        for sequence, prob in found.items():
            assert prob <= wanted[sequence] / factor + EXACT


def test_lenience_accepts_more():
    def mean(factor):
        return sum(weight * verdict.num_accepted for weight, verdict in outcomes(lambda c: run_lenience(c, factor)))

    assert mean(0.2) > mean(0.6) > mean(1.0)


def test_typical_acceptance_changes_the_law():
    assert distance(lambda chance: run_typical(chance, 0.09, 0.3)) > 0.01


def test_typical_threshold_is_min_of_epsilon_and_delta_over_perplexity():
    """p = (0.7, 0.2, 0.1): exp(-entropy) = 0.448, so delta 0.3 gives 0.134; the two settings are told apart."""
    law = np.array([0.7, 0.2, 0.1])
    perplexity_inverse = math.exp(float((law * np.log(law)).sum()))
    target = Toy.context_free(law)
    tree = Tree((0, 0, 1, 2), (-1, 0, 0, 0))
    rows, sampler = score(tree, target), sampler_of(3, Rule.CHAIN)

    def accepted(token, epsilon, delta):
        one = Tree((0, token), (-1, 0))
        chance = KeyedChance(RequestRandom(0), 0)
        result = typical_acceptance(one, rows[:2], sampler, chance, epsilon=epsilon, delta=delta)
        return result.verdict.num_accepted == 1

    assert 0.1 < 0.3 * perplexity_inverse < 0.2
    assert accepted(1, 0.5, 0.3) and not accepted(2, 0.5, 0.3)
    assert accepted(2, 0.09, 0.3), "epsilon is the smaller of the two"
    assert not accepted(2, 0.3, 0.3) and accepted(2, 0.3, 0.09), "the settings are not interchangeable"


def test_typical_acceptance_keeps_the_longest_path_then_the_likeliest():
    target = Toy.context_free((0.5, 0.3, 0.2))
    tree = Tree((0, 0, 1, 2, 0, 0), (-1, 0, 0, 2, 2, 1))
    rows, sampler = score(tree, target), sampler_of(3, Rule.CHAIN)
    result = typical_acceptance(tree, rows, sampler, KeyedChance(RequestRandom(0), 0), epsilon=0.1, delta=0.3)
    assert result.verdict.path == (1, 5)
    assert result.verdict.num_emitted == 3


def test_typical_extra_token_is_above_the_threshold():
    target = Toy.context_free((0.9, 0.06, 0.04))
    empty = Tree((0,), (-1,))
    rows, sampler = score(empty, target), sampler_of(3, Rule.CHAIN)
    for weight, result in outcomes(
        lambda chance: typical_acceptance(empty, rows, sampler, chance, epsilon=0.09, delta=0.3)
    ):
        assert result.verdict.tokens == (0,) and weight == 1.0
    everything = typical_acceptance(
        empty, rows[:1] * 0, sampler, KeyedChance(RequestRandom(0), 0), epsilon=1.0, delta=1.0
    )
    assert everything.verdict.num_emitted == 1, "a flat law has nothing above its threshold, and still emits"


def test_results_say_they_are_lossy():
    proposal = drafted_chain_of(1, 2)
    rows, sampler = score(proposal.tree, TARGET), sampler_of(3, Rule.CHAIN)
    chance = KeyedChance(RequestRandom(0), 0)
    for result in (
        lenience(proposal, rows, sampler, chance, factor=0.5),
        typical_acceptance(proposal.tree, rows, sampler, chance, epsilon=0.09, delta=0.3),
    ):
        assert isinstance(result, LossyVerdict) and result.lossy
    assert "lenience 0.5" in lenience(proposal, rows, sampler, chance, factor=0.5).rule


def test_exact_verification_never_comes_here():
    assert "lossy" not in {name.split(".")[-1] for name in _imports(draftsmith.core.verify)}
    assert all("typical" not in rule.value and "len" not in rule.value for rule in Rule)


def _imports(module):
    found = set()
    for line in inspect.getsource(module).splitlines():
        if line.startswith(("import ", "from ")):
            found.update(part for part in line.replace(",", " ").split() if part not in ("import", "from"))
    return found


@pytest.mark.parametrize("settings", [(0.0, 0.3), (1.5, 0.3), (0.09, 0.0), (0.09, -1.0), (float("nan"), 0.3)])
def test_typical_settings_are_checked(settings):
    epsilon, delta = settings
    tree = Tree((0, 1), (-1, 0))
    with pytest.raises(OptionError, match="allowed: above 0 and up to 1"):
        typical_acceptance(
            tree,
            torch.zeros(2, 3),
            sampler_of(3, Rule.CHAIN),
            KeyedChance(RequestRandom(0), 0),
            epsilon=epsilon,
            delta=delta,
        )


def test_typical_settings_have_no_defaults():
    """Published helpers have the two defaults swapped; here both must be given by name."""
    parameters = inspect.signature(typical_acceptance).parameters
    for name in ("epsilon", "delta"):
        assert parameters[name].default is inspect.Parameter.empty
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_lenience_refuses_what_it_cannot_do():
    chance, rows = KeyedChance(RequestRandom(0), 0), torch.zeros(3, 3)
    sampler = sampler_of(3, Rule.CHAIN)
    for factor in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(OptionError, match="factor"):
            lenience(drafted_chain_of(1, 2), rows, sampler, chance, factor=factor)
    with pytest.raises(UnsoundError, match="sampled chain"):
        lenience(Proposal(trees.chain(0, (1, 2))), rows, sampler, chance, factor=0.5)
    with pytest.raises(UnsoundError, match="sampled chain"):
        lenience(Proposal(Tree((0, 1, 2), (-1, 0, 0)), ProposalKind.IID), rows, sampler, chance, factor=0.5)
    greedy = Sampler(SamplingParams(), (0,), frozenset(), 3)
    with pytest.raises(OptionError, match="temperature above 0"):
        lenience(drafted_chain_of(1, 2), rows, greedy, chance, factor=0.5)


def drafted_chain_of(*tokens):
    return Proposal(trees.chain(0, tokens), IID, {n: as_law(DRAFT.law(tokens[:n])) for n in range(len(tokens))})
