"""Every planted fault of the verifier, the draws and the noise turns a check red; without it the check is green."""

import functools

import pytest

from draftsmith.core.types import Rule
from draftsmith.errors import DraftsmithError
from tests.core.checks import (
    IID,
    WITHOUT,
    check_cut,
    check_draws,
    check_exact,
    check_greedy,
    check_keyed_law,
    check_plain_equals_speculative,
    check_redraft,
    check_samples,
    check_tree_vectors,
    check_zero_probability,
)
from tests.faults import FAULTS, fault, of_layer, planted

exact_chain = functools.partial(check_exact, Rule.CHAIN, IID, "chain2")
exact_block = functools.partial(check_exact, Rule.BLOCK, IID, "chain2")
exact_recursive = functools.partial(check_exact, Rule.RECURSIVE, WITHOUT, "wide2", seed=1)
exact_traversal = functools.partial(check_exact, Rule.TRAVERSAL, WITHOUT, "two_two")
exact_penalties = functools.partial(check_exact, Rule.CHAIN, IID, "chain2", presence_penalty=1.0)
exact_exhausted = functools.partial(check_exact, Rule.RECURSIVE, WITHOUT, "wide3", draft_zeros=1)
greedy_penalties = functools.partial(check_greedy, context_free=False)
keyed_chain = functools.partial(check_keyed_law, Rule.CHAIN, IID, "chain2")
keyed_recursive = functools.partial(check_keyed_law, Rule.RECURSIVE, WITHOUT, "two_one")
keyed_traversal = functools.partial(check_keyed_law, Rule.TRAVERSAL, WITHOUT, "two_one")
keyed_wide = functools.partial(check_keyed_law, Rule.CHAIN, IID, "chain2", vocab_size=5)
keyed_match = functools.partial(check_keyed_law, Rule.MATCH, IID, "chain2")

# The checks that must turn red, each on its own.
CAUGHT_BY = {
    "accept greedy drafts unread": (check_greedy, check_plain_equals_speculative),
    "greedy walk reads the row before": (check_greedy, check_plain_equals_speculative),
    "ties go to the highest id": (check_greedy,),
    "penalties see the committed text only": (exact_penalties,),
    "penalties of the greedy walk are one token behind": (greedy_penalties,),
    "match noise keyed by step": (check_plain_equals_speculative,),
    "one noise for all output positions": (keyed_match,),
    "accept sampled drafts unread": (keyed_chain, keyed_traversal),
    "divide, and accept a probability of 0": (check_zero_probability,),
    "skip the residual": (exact_chain, exact_block, exact_recursive, exact_traversal),
    "softmax of the residual": (exact_chain, exact_block, exact_recursive, exact_traversal),
    "residual not renormalised between siblings": (exact_recursive, exact_traversal),
    "rejected siblings stay in the draft law": (exact_recursive, exact_traversal),
    "draft law tempered after the draw": (exact_chain, exact_block, exact_recursive, exact_traversal),
    "bonus from the row before the last": (exact_chain, exact_block),
    "block scan stops at the first failure": (exact_block,),
    "traversal forgets the weight of the path": (exact_block, exact_traversal, check_tree_vectors),
    "nothing once the draft mass is used up": (exact_exhausted,),
    "redraft reuses noise already looked at": (check_redraft,),
    "one coin for all siblings": (keyed_recursive,),
    "residual drawn with the draft's noise": (keyed_wide,),
    "samples of one request share noise": (check_samples,),
    "siblings sorted by probability": (keyed_recursive, keyed_traversal, check_draws),
    "unlikely drawn tokens are cut": (check_cut,),
    "purpose left out of the key": (keyed_chain,),
}


def test_every_fault_has_a_check():
    assert set(CAUGHT_BY) == set(of_layer("verify"))
    assert len(CAUGHT_BY) >= 12


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_fault_turns_the_suite_red(name):
    for check in CAUGHT_BY[name]:
        with planted(name), pytest.raises((AssertionError, DraftsmithError)):
            check()


def _checks():
    return {repr(check): check for checks in CAUGHT_BY.values() for check in checks}.values()


@pytest.mark.parametrize(
    "check", _checks(), ids=lambda check: getattr(check, "__name__", str(getattr(check, "args", "")))
)
def test_checks_are_green_without_a_fault(check):
    check()


def test_a_fault_lasts_only_as_long_as_its_context():
    with planted("skip the residual"), pytest.raises(AssertionError):
        exact_chain()
    exact_chain()


def test_two_faults_cannot_share_a_name():
    name = next(iter(FAULTS))
    with pytest.raises(AssertionError, match="two faults"):
        fault(name, layer="verify")(lambda patch: None)
