"""Every lossless rule by exact enumeration: the emitted law is the target's within 1e-12.

The rules under test are the very functions `verify` runs; only chance is enumerated. Models are random
and context-dependent, transforms included, and the published expectations are reproduced to the digit.
"""

import math

import numpy as np
import pytest

from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal, ProposalKind, Rule
from tests.core.checks import (
    EXACT,
    IID,
    WITHOUT,
    check_chain_vectors,
    check_exact,
    check_tree_vectors,
)
from tests.core.toys import SHAPES, Toy, as_law, bias, expected_tokens, sampled, sampler_of, verdicts

CHAINS = [name for name in SHAPES if name.startswith("chain")]
TREES = [name for name in SHAPES if not name.startswith("chain")]


@pytest.mark.parametrize("kind", ProposalKind)
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("shape", CHAINS)
def test_chains(rule, kind, shape):
    for seed in range(4):
        check_exact(rule, kind, shape, vocab_size=2 + seed % 3, seed=seed)


@pytest.mark.parametrize("kind", (IID, WITHOUT))
@pytest.mark.parametrize("rule", (Rule.RECURSIVE, Rule.TRAVERSAL, Rule.MATCH, Rule.COUPLING))
@pytest.mark.parametrize("shape", TREES)
def test_trees(rule, kind, shape):
    for seed in range(4):
        check_exact(rule, kind, shape, seed=seed)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("shape", TREES)
def test_trees_of_point_masses(rule, shape):
    """Deterministic candidates are verified by the walk whatever rule the request asks for."""
    check_exact(rule, ProposalKind.POINT_MASS, shape, seed=3)


@pytest.mark.parametrize("rule", (Rule.RECURSIVE, Rule.TRAVERSAL))
@pytest.mark.parametrize("shape", ("wide2", "two_one", "uneven"))
def test_four_tokens(rule, shape):
    check_exact(rule, WITHOUT, shape, vocab_size=4, seed=5)


@pytest.mark.parametrize("rule", (Rule.RECURSIVE, Rule.TRAVERSAL))
@pytest.mark.parametrize("shape", ("wide2", "wide3", "two_two", "uneven"))
def test_exhausted_draft_law_goes_on_uniformly(rule, shape):
    """Fewer tokens with draft mass than siblings: the rest is uniform over the untried (Sequoia)."""
    for draft_zeros in (1, 2):
        check_exact(rule, WITHOUT, shape, seed=6, draft_zeros=draft_zeros)
        check_exact(rule, WITHOUT, shape, seed=7, draft_zeros=draft_zeros, sparse=True)


@pytest.mark.parametrize("rule", (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL))
def test_laws_with_other_supports(rule):
    """Tokens only the target, or only the draft, can produce; dense and sparse laws."""
    for kind in (IID, WITHOUT):
        for target_zeros, draft_zeros in ((1, 0), (0, 1), (1, 1), (2, 1), (1, 2)):
            for sparse in (False, True):
                check_exact(
                    rule, kind, "chain2", seed=8, target_zeros=target_zeros, draft_zeros=draft_zeros, sparse=sparse
                )


@pytest.mark.parametrize("rule", (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL, Rule.MATCH))
def test_context_dependent_transforms(rule):
    """Penalties, truncation, bias, bans and min_tokens: every node has its own context and output position."""
    shapes = ("chain3",) if rule in (Rule.CHAIN, Rule.BLOCK) else ("chain3", "two_two")
    for shape in shapes:
        check_exact(rule, WITHOUT, shape, seed=9, presence_penalty=1.0, frequency_penalty=0.5)
        check_exact(rule, IID, shape, seed=10, repetition_penalty=1.5, top_k=2)
        check_exact(rule, IID, shape, seed=11, top_p=0.7, min_p=0.1)
        check_exact(rule, IID, shape, seed=12, top_k=2, top_p=0.5)
        check_exact(rule, WITHOUT, shape, seed=13, logit_bias={1: -math.inf, 2: 0.5})
        check_exact(rule, IID, shape, seed=14, banned_ids=frozenset({0}))
        check_exact(rule, WITHOUT, shape, seed=15, min_tokens=2, end_ids=(1,))


@pytest.mark.parametrize("rule", (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL))
def test_draft_that_equals_the_target(rule):
    """Nothing is left for the residual: everything is accepted, and rounding does no harm."""
    target = Toy.random(3, 12)
    for kind in (IID, WITHOUT):
        shape = SHAPES["chain3"]
        sampler = sampler_of(3, rule)

        def drafting(chance, kind=kind, shape=shape):
            return sampled(chance, target, kind, shape)

        assert bias(drafting, target, sampler, length=4) < EXACT
        assert abs(expected_tokens(drafting, target, sampler) - 4) < 1e-9


@pytest.mark.parametrize("rule", (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL))
def test_draft_that_misses_the_target(rule):
    """Disjoint supports: nothing is accepted and the residual is the target's own law."""
    target, draft = Toy.context_free((0.5, 0.5, 0.0, 0.0)), Toy.context_free((0.0, 0.0, 0.4, 0.6))
    sampler = sampler_of(4, rule)

    def drafting(chance):
        return sampled(chance, draft, IID, SHAPES["chain2"])

    assert bias(drafting, target, sampler) < EXACT
    assert expected_tokens(drafting, target, sampler) == pytest.approx(1, abs=EXACT)


def test_published_chain_expectations():
    check_chain_vectors()


def test_published_tree_expectations():
    check_tree_vectors()


def test_block_never_accepts_less_than_chain_nor_traversal_than_recursive():
    for seed in range(6):
        target, draft = Toy.random(3, 40 + seed), Toy.random(3, 60 + seed)
        for better, worse, kind, shape in (
            (Rule.BLOCK, Rule.CHAIN, IID, "chain3"),
            (Rule.TRAVERSAL, Rule.RECURSIVE, WITHOUT, "two_two"),
            (Rule.TRAVERSAL, Rule.RECURSIVE, IID, "uneven"),
        ):

            def mean(rule, kind=kind, shape=shape, target=target, draft=draft):
                return expected_tokens(
                    lambda chance: sampled(chance, draft, kind, SHAPES[shape]), target, sampler_of(3, rule)
                )

            assert mean(better) >= mean(worse) - 1e-12, (seed, better, shape)


def _accepted_law(rule, target, draft, tokens):
    """Law of the number of accepted tokens of one drafted chain, straight from the published formulas."""
    num = len(tokens)
    ratios = [target.law(tokens[:i])[tokens[i]] / draft.law(tokens[:i])[tokens[i]] for i in range(num)]
    if rule is Rule.CHAIN:
        passed = [min(1.0, ratio) for ratio in ratios]
        reach = [float(np.prod(passed[:i])) for i in range(num + 1)]
        return [reach[i] - (reach[i + 1] if i < num else 0.0) for i in range(num + 1)]
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    heights = []
    for i in range(num + 1):
        if i == num:
            heights.append(weights[i])
        else:
            left = np.maximum(weights[i] * target.law(tokens[:i]) - draft.law(tokens[:i]), 0).sum()
            heights.append(left / (left + 1 - weights[i]))
    # The accepted length is the last success of independent coins; length 0 needs none.
    return [
        (heights[i] if i else 1.0) * float(np.prod([1 - height for height in heights[i + 1 :]])) for i in range(num + 1)
    ]


@pytest.mark.parametrize("rule", (Rule.CHAIN, Rule.BLOCK))
def test_chain_and_block_follow_their_published_formulas(rule):
    """Both run as special cases of the tree rules; here against the formulas of their own papers."""
    for seed in range(20):
        target, draft = Toy.random(3, 80 + seed), Toy.random(3, 120 + seed)
        tokens = tuple(int(token) for token in np.random.default_rng(seed).integers(3, size=3))
        laws = {node: as_law(draft.law(tokens[:node])) for node in range(3)}
        proposal = Proposal(chain(0, tokens), IID, laws)
        found = [0.0] * 4
        for weight, verdict in verdicts(lambda chance, proposal=proposal: proposal, target, sampler_of(3, rule)):
            found[verdict.num_accepted] += weight
        assert found == pytest.approx(_accepted_law(rule, target, draft, tokens), abs=EXACT)
