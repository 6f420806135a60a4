"""The rules through `verify` with the request's true keyed noise: chi-square tests and seeded equality.

Each chi-square test has a false-alarm probability of 1e-6 over the choice of seeds; seeds are fixed, so
a test that passes once passes always. Powers are stated in `tests/core/checks.py`.
"""

import numpy as np
import pytest

from draftsmith.core.random import RequestRandom
from draftsmith.core.types import Rule
from tests.core.checks import (
    IID,
    WITHOUT,
    assert_law,
    check_draws,
    check_keyed_law,
    check_plain_equals_speculative,
    check_redraft,
)
from tests.core.toys import SHAPES, Joint, Toy, draft_coupled, generate, sampler_of


@pytest.mark.parametrize(
    ("rule", "kind", "shape"),
    [
        (Rule.CHAIN, IID, "chain2"),
        (Rule.BLOCK, WITHOUT, "chain3"),
        (Rule.RECURSIVE, IID, "two_one"),
        (Rule.RECURSIVE, WITHOUT, "two_one"),
        (Rule.TRAVERSAL, IID, "uneven"),
        (Rule.TRAVERSAL, WITHOUT, "two_two"),
        (Rule.MATCH, WITHOUT, "wide2"),
    ],
)
def test_sampled_output_has_the_target_law(rule, kind, shape):
    check_keyed_law(rule, kind, shape)


def test_coupled_output_has_the_target_law():
    """False alarm 1e-6; power above 0.99 against a total variation of 0.1."""
    target, draft = Toy.random(3, 22, sharpness=0.7), Toy.random(3, 23, sharpness=0.7)
    sampler = sampler_of(3, Rule.COUPLING)
    draws = [
        generate(
            target,
            sampler.fork(),
            RequestRandom(seed),
            2,
            lambda random, emitted: draft_coupled(draft, random, SHAPES["chain2"], emitted),
        )
        for seed in range(2000)
    ]
    assert_law(draws, dict(Joint(target, sampler).continued((), 2)), "seeded coupling")


def test_block_with_redrafts_has_the_target_law():
    check_redraft()


def test_draws_have_their_laws():
    check_draws()


def test_speculative_sampling_equals_plain_sampling_token_for_token():
    check_plain_equals_speculative()


def test_a_step_without_drafts_shifts_nothing():
    """Drafting on and off at will (also under a ratio rule, where empty steps use target noise)."""
    target, draft = Toy.random(4, 24), Toy.random(4, 25)
    plain = generate(target, sampler_of(4, Rule.COUPLING), RequestRandom(5), 12)
    for period in (2, 3):

        def drafting(random, emitted, period=period):
            shape = SHAPES["two_two"] if len(emitted) % period == 0 else (-1,)
            return draft_coupled(draft, random, shape, emitted)

        assert generate(target, sampler_of(4, Rule.COUPLING), RequestRandom(5), 12, drafting) == plain
    for rule in (Rule.CHAIN, Rule.TRAVERSAL):
        assert generate(target, sampler_of(4, rule), RequestRandom(5), 12) == plain


def test_coupling_accepts_at_least_as_promised():
    """Acceptance of seeded coupling is at least (1 - TV) / (1 + TV) (Daliri et al.), up to noise of 4 sigma."""
    target, draft = Toy.context_free((0.5, 0.3, 0.2)), Toy.context_free((0.2, 0.3, 0.5))
    distance = 0.5 * float(np.abs(target.law(()) - draft.law(())).sum())
    num = 3000
    hits = 0
    for seed in range(num):
        random = RequestRandom(seed)
        proposal = draft_coupled(draft, random, SHAPES["chain1"], ())
        hits += proposal.tree.tokens[1] == generate(target, sampler_of(3, Rule.COUPLING), random, 1)[0]
    promised = (1 - distance) / (1 + distance)
    assert hits / num >= promised - 4 * (promised * (1 - promised) / num) ** 0.5
