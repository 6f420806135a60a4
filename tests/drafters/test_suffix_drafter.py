"""The suffix drafter over its index: what it feeds, what it proposes, what it keeps."""

import pytest

from draftsmith.core.types import Verdict
from draftsmith.drafters.base import Commit
from draftsmith.drafters.suffix_index import FORCE_PYTHON, Draft
from draftsmith.errors import ModelFileError, OptionError
from tests.drafters.loop import LETTERS, LetterTokenizer, always, make, target_info, view_of


@pytest.fixture(params=["native", "python"], autouse=True)
def index_kind(request, monkeypatch):
    """Both indexes serve the drafter."""
    if request.param == "native":
        pytest.importorskip("draftsmith._native")
        monkeypatch.delenv(FORCE_PYTHON, raising=False)
    else:
        monkeypatch.setenv(FORCE_PYTHON, "1")
    return request.param


def propose(drafter, tokens, prompt_len, budget=8, sequence_id=0):
    return drafter.propose([view_of(tokens, prompt_len, sequence_id=sequence_id)], [budget], always)[0]


def test_the_kind_of_index_is_the_one_asked_for(index_kind):
    assert make("suffix").index.is_native == (index_kind == "native")


def test_a_match_of_m_tokens_drafts_m():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert propose(make("suffix"), tokens, 9).tree.tokens == (3, 4, 5, 6)
    assert propose(make("suffix:max_spec_factor=0.5"), tokens, 9).tree.tokens == (3, 4)
    assert propose(make("suffix:max_spec_factor=0:max_spec_offset=5"), tokens, 9).tree.tokens == (3, 4, 5, 6, 7, 8)
    assert propose(make("suffix"), tokens, 9, budget=1).tree.tokens == (3, 4)
    assert propose(make("suffix:max_depth=4"), tokens, 9).tree.num_drafted == 2  # match and draft within the depth


def test_confidence_is_the_estimate_given_the_parent():
    """C of a continuation seen once before is 1/2: the open suffix counts (methods-classic 3.3)."""
    proposal = propose(make("suffix"), [1, 2, 3, 4, 1, 2], 4)
    assert proposal.tree.tokens == (2, 3, 4)
    assert proposal.confidence == (1.0, 0.5, 1.0)
    drafter = make("suffix")
    draft = drafter.speculate(view_of([1, 2, 3, 4, 1, 2], 4), 8)
    assert draft.probs == (0.5, 0.5)
    assert draft.score == 1.0


def test_unlikely_continuations_are_left_out():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    assert propose(make("suffix:min_token_prob=0.2"), tokens, 2).tree.num_drafted > 0
    assert propose(make("suffix:min_token_prob=0.6"), tokens, 2).tree.num_drafted == 0


def test_a_tree_holds_siblings():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    tree = propose(make("suffix:tree=true:max_spec_factor=9"), tokens, 2, budget=20).tree
    assert sorted(token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0) == [3, 4, 5]


def test_answers_of_other_requests_are_drafted_from_prompts_are_not():
    drafter = make("suffix")
    propose(drafter, [9, 8, 7, 1, 2, 3, 4, 5], 3, sequence_id=1)
    assert propose(drafter, [6, 1, 2], 1, sequence_id=2).tree.tokens == (2, 3, 4)
    assert propose(drafter, [6, 9, 8], 1, sequence_id=3).tree.num_drafted == 0
    lonely = make("suffix:max_cached_requests=0")
    propose(lonely, [9, 8, 7, 1, 2, 3, 4, 5], 3, sequence_id=1)
    assert propose(lonely, [6, 1, 2], 1, sequence_id=2).tree.num_drafted == 0


def test_an_answer_outlives_its_request_until_it_is_evicted():
    """A cancelled request ends with `forget` like any other: what the target said stays useful."""
    drafter = make("suffix:max_cached_requests=2")
    propose(drafter, [9, 1, 2, 3, 4, 5], 1, sequence_id=1)
    drafter.forget(1)
    assert propose(drafter, [6, 1, 2], 1, sequence_id=2).tree.num_drafted == 2
    propose(drafter, [6, 6, 6], 1, sequence_id=3)  # the third answer pushes the first one out
    assert propose(drafter, [6, 6, 6, 4], 1, sequence_id=3).tree.num_drafted == 0


def test_both_trees_learn_from_commits_alone():
    drafter = make("suffix")
    view = view_of([1, 2, 3], 3, sequence_id=4)
    drafter.commit([Commit(view, None)])
    assert drafter.index.request_len(4) == 3
    view.tokens.extend([7, 8])
    drafter.commit([Commit(view, Verdict((), (7, 8)))])
    assert drafter.index.request_len(4) == 5
    assert drafter.index.num_tokens == 2


def test_a_preempted_request_is_cached_once():
    drafter = make("suffix")
    tokens = [1, 2, 3, 4, 5, 6]
    propose(drafter, tokens, 2, sequence_id=4)
    drafter.truncate(4, 0)
    assert drafter.index.request_len(4) == -1
    propose(drafter, tokens, 2, sequence_id=4)
    assert (drafter.index.num_cached, drafter.index.num_tokens) == (1, 4)


def test_nothing_hangs_below_an_end():
    eos_ids = frozenset({11})
    for text in ("suffix:max_spec_factor=4", "suffix:max_spec_factor=4:tree=true"):
        drafter = make(text, target_info(eos_ids=eos_ids))
        proposal = propose(drafter, [1, 2, 11, 3, 4, 1, 2], 5)
        assert proposal.tree.tokens == (2, 11)
        assert len(proposal.confidence) == 2
    draft = Draft((11, 3, 4, 11, 5), (-1, 0, -1, 2, 3), (0.5, 0.4, 0.3, 0.2, 0.1), 1.5, 2)
    proposal = drafter.proposal_of(view_of([1, 2]), draft)
    assert (proposal.tree.tokens, proposal.tree.parents) == ((2, 11, 4, 11), (-1, 0, 0, 2))
    assert proposal.confidence == pytest.approx((1.0, 0.5, 0.3, 2 / 3))


def test_the_global_tree_is_saved_and_read_back(tmp_path):
    drafter = make("suffix")
    propose(drafter, [9, 1, 2, 3, 4, 5], 1, sequence_id=1)
    drafter.save_global(tmp_path / "answers")
    other = make(f"suffix:path={tmp_path / 'answers'}")
    assert propose(other, [6, 1, 2], 1).tree.tokens == (2, 3, 4)


def test_a_saved_tree_of_another_vocabulary_is_refused(tmp_path):
    make("suffix").save_global(tmp_path / "answers")
    text = f"suffix:path={tmp_path / 'answers'}"
    other = LetterTokenizer([*LETTERS.pieces[:-1], "z"])
    with pytest.raises(OptionError, match="answers"):
        make(text, target_info(tokenizer=other))
    with pytest.raises(OptionError, match="answers"):
        make(text, target_info(tokenizer=None))
    with pytest.raises(ModelFileError, match="nowhere"):
        make(f"suffix:path={tmp_path / 'nowhere'}")
    with pytest.raises(OptionError, match="cannot write"):
        make("suffix").save_global(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("max_depth=1", "max_depth is 1"),
        ("max_spec_factor=-1", "max_spec_factor is -1"),
        ("min_token_prob=1.5", "min_token_prob is 1.5"),
        ("max_cached_requests=-2", "max_cached_requests is -2"),
        ("tree=24", "option tree: '24' is neither true nor false"),
        ("max_spec_factor=inf", "'inf' is not a number"),
    ],
)
def test_bad_options(option, complaint):
    with pytest.raises(OptionError, match=complaint):
        make(f"suffix:{option}")
