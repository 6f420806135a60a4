"""The hybrid: who drafts when, and that the other drafter loses nothing by waiting."""

import pytest

from draftsmith.core.types import Verdict
from draftsmith.drafters.base import Commit
from draftsmith.errors import OptionError
from tests.drafters.loop import TABLE, always, loaded, make, near_table, target_info, view_of

REPEATS = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]  # the suffix trees expect 1.5 accepted tokens here
NOVEL = [8, 9, 10]
MODEL = "hybrid:other=draft_model+model=near+max_draft=3"


def info_and_backend():
    """A target with a draft model, and that model's backend."""
    info = target_info({"near": loaded(near_table(TABLE, 1))})
    return info, info.load_model("near").backend


def settle(drafter, view, num_accepted, proposal):
    """Tell the drafter that a proposal was verified."""
    path = tuple(range(1, num_accepted + 1))
    tokens = (*proposal.tree.tokens[1 : num_accepted + 1], 0)
    view.tokens.extend(tokens)
    drafter.commit([Commit(view, Verdict(path, tokens))])


def test_the_suffix_draft_is_used_from_the_threshold_on():
    for threshold, from_suffix in ((1.5, True), (1.51, False)):
        info, backend = info_and_backend()
        proposal = make(f"{MODEL}:threshold={threshold}", info).propose([view_of(REPEATS, 7)], [8], always)[0]
        assert (proposal.tree.tokens == (3, 4, 5, 6)) == from_suffix
        assert bool(backend.calls) != from_suffix


def test_the_other_drafter_is_asked_once_for_all_that_need_it():
    info, backend = info_and_backend()
    views = [view_of(tokens, 7, sequence_id=index) for index, tokens in enumerate([NOVEL, REPEATS, [10, 9], REPEATS])]
    proposals = make(f"{MODEL}:threshold=1", info).propose(views, [2, 8, 3, 8], always)
    assert backend.calls == [[3, 2], [1, 1], [1]]
    assert [item.tree.num_drafted for item in proposals] == [2, 3, 3, 3]
    alone = make("draft_model:model=near:max_draft=3").propose([view_of(NOVEL)], [2], always)[0]
    assert proposals[0].tree == alone.tree
    assert proposals[1].tree == proposals[3].tree


def test_the_other_drafter_catches_up_when_its_turn_comes():
    """Both hear every token, drafting or not: otherwise acceptance collapses after a copied passage."""
    info, _ = info_and_backend()
    drafter = make(f"{MODEL}:threshold=1", info)
    view = view_of(NOVEL, 3)
    first = drafter.propose([view], [3], always)[0]
    settle(drafter, view, 1, first)
    view.tokens.extend(REPEATS)  # steps in which only the suffix trees drafted
    drafter.commit([Commit(view, Verdict((), tuple(REPEATS)))])
    assert drafter.propose([view], [8], always)[0].tree.tokens == (3, 4, 5, 6)
    view.tokens.extend([11, 9])
    seen = drafter.propose([view], [3], always)[0]
    fresh = make("draft_model:model=near:max_draft=3").propose([view_of(view.tokens, 3)], [3], always)[0]
    assert seen.tree == fresh.tree


def test_the_threshold_follows_what_the_other_drafter_gets_accepted():
    info, _ = info_and_backend()
    drafter = make(MODEL, info)
    assert drafter.threshold == 0
    view = view_of(NOVEL, 3)
    for _ in range(90):
        proposal = drafter.propose([view], [3], always)[0]
        settle(drafter, view, 3, proposal)
        del view.tokens[3:]  # the same novel text again, so that the other drafter is asked each time
        drafter.truncate(0, 3)
        drafter._suffix.index.evict_request(0)
    assert 2.9 < drafter.threshold < 3
    assert drafter.propose([view_of(REPEATS, 7, sequence_id=1)], [8], always)[0].tree.tokens != (3, 4, 5, 6)
    fixed = make(f"{MODEL}:threshold=0.5", info)
    settle(fixed, view, 3, fixed.propose([view], [3], always)[0])
    assert fixed.threshold == 0.5


def test_a_doubtful_suffix_draft_is_better_than_none():
    view = view_of(REPEATS, 7)
    drafter = make("hybrid:other=ngram+min_ngram=4:threshold=5")
    assert drafter.propose([view], [8], always)[0].tree.tokens == (3, 4, 5, 6)
    settle(drafter, view, 3, drafter.propose([view], [8], always)[0])
    assert drafter._mean_accepted == 0  # the suffix trees' merit is not the other drafter's


def test_it_needs_what_both_need():
    info, backend = info_and_backend()
    drafter = make(MODEL, info)
    assert drafter.bytes_per_token > 2 * backend.cache.bytes_per_token
    assert drafter.needs == frozenset()


@pytest.mark.parametrize("other", ["hybrid", "suffix", "none", "suffix+max_depth=9"])
def test_others_that_make_no_sense_are_refused(other):
    with pytest.raises(OptionError, match="choose a drafter other than"):
        make(f"hybrid:other={other}")


def test_bad_options_are_those_of_the_part_they_belong_to():
    with pytest.raises(OptionError, match="unknown drafter 'oracle'"):
        make("hybrid:other=oracle")
    with pytest.raises(OptionError, match="min_ngram is 0"):
        make("hybrid:other=ngram+min_ngram=0")
    with pytest.raises(OptionError, match="threshold is -1"):
        make("hybrid:threshold=-1")
