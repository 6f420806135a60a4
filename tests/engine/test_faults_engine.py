"""Every planted fault of cache, step, stop rules and reuse turns an engine test red; without it the test is green."""

import functools

import pytest

from tests.engine import faults as _registered
from tests.engine import test_engine as suite
from tests.engine.fakes import OracleDrafter
from tests.faults import of_layer, planted

TREE = f"{suite.ORACLE}:wrong_every=4:tree=true"
CHAIN = f"{suite.ORACLE}:wrong_every=3"
same_chain = functools.partial(suite.test_every_drafter_gives_the_plain_tokens, CHAIN, "greedy")
same_tree = functools.partial(suite.test_every_drafter_gives_the_plain_tokens, TREE, "greedy")
same_penalised = functools.partial(suite.test_every_drafter_gives_the_plain_tokens, CHAIN, "greedy+penalties")

CAUGHT_BY = {
    "keep moves nothing": same_tree,
    "keep is off by one": same_chain,
    "rejected rows are kept": same_chain,
    "positions count slots, not depth": same_tree,
    "siblings see each other": same_tree,
    "only the last token of a block is checked for its end": suite.test_eos_inside_an_accepted_block_ends_it,
    "the bonus token passes the limit": functools.partial(suite.test_max_new_tokens_is_exact, 3, suite.ORACLE),
    "text goes on to the end of the block": functools.partial(
        suite.test_stop_string_ends_ids_text_and_logprobs_together, suite.ORACLE
    ),
    "logprobs come from the root's row": functools.partial(suite.test_logprobs_equal_the_plain_run, CHAIN),
    "penalties forget emitted tokens": same_penalised,
    "batch rows in another order than batch logits": suite.test_batch_of_prompts_keeps_order,
    "a reused prefix is one token too long": functools.partial(suite.test_prefix_reuse_changes_nothing, "none"),
    "the draft cache is not cut after a rejection": functools.partial(
        suite.test_a_draft_model_after_rejections_proposes_what_a_fresh_one_does, "draft_model:model=other"
    ),
}


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


def test_every_fault_of_the_engine_has_its_check():
    assert _registered.__doc__
    assert sorted(CAUGHT_BY) == sorted(of_layer("engine"))


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_fault_turns_red(name):
    CAUGHT_BY[name]()
    OracleDrafter.known = []
    # Any failure of the check counts: a wrong token, or an internal invariant that noticed first.
    with planted(name), pytest.raises((AssertionError, IndexError, RuntimeError)):
        CAUGHT_BY[name]()
