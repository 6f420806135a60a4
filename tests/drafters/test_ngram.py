"""N-gram drafting against brute force, its edges, and the published example."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.types import Proposal
from draftsmith.drafters.base import Commit
from draftsmith.drafters.ngram import NgramDrafter, NgramIndex, NgramOptions
from draftsmith.errors import OptionError
from tests.drafters.loop import always, make, target_info, view_of

END = 11


def drafted(text, tokens, budget=8, **info):
    """Drafted tokens for one text."""
    proposal = make(text, target_info(**info)).propose([view_of(tokens, 0)], [budget], always)[0]
    return list(proposal.tree.tokens[1:])


def test_the_published_example():
    """vLLM's worked example (methods-classic 2.1)."""
    assert drafted("ngram:min_ngram=2:max_ngram=3", [1, 2, 3, 4, 2, 3], 4) == [4, 2, 3]


def test_the_preferred_occurrence_wins_among_equals():
    tokens = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    assert drafted("ngram:prefer=latest", tokens, 2) == [8, 8]
    assert drafted("ngram:prefer=earliest", tokens, 2) == [7, 7]


def test_a_longer_match_beats_a_later_one():
    tokens = [5, 1, 2, 7, 7, 1, 2, 8, 8, 5, 1, 2]
    assert drafted("ngram:max_ngram=3", tokens, 2) == [7, 7]
    assert drafted("ngram:max_ngram=2", tokens, 2) == [8, 8]


def test_the_suffix_never_matches_itself_but_may_overlap():
    assert drafted("ngram", [4, 5, 6]) == []
    assert drafted("ngram", [4, 4, 4]) == [4]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_texts(length):
    """Conformance LEN (llama.cpp#21815): texts of length 1, n - 1, n and n + 1."""
    expected = {1: [], 2: [], 3: [], 4: [9]}[length]
    assert drafted("ngram:min_ngram=3:max_ngram=5", [9] * length) == expected


def test_an_end_may_be_drafted_and_nothing_after_it():
    tokens = [1, 2, 3, END, 5, 6, 1, 2]
    assert drafted("ngram", tokens, eos_ids=frozenset({END})) == [3, END]
    assert drafted("ngram", tokens) == [3, END, 5, 6, 1, 2]


def test_budget_and_option_both_limit_the_draft():
    tokens = list(range(10)) * 2
    assert len(drafted("ngram", tokens, 3)) == 3
    assert len(drafted("ngram:max_draft=2", tokens, 8)) == 2


def test_confidence_grows_with_the_match():
    proposal = make("ngram").propose([view_of([3, 1, 2, 7, 8, 9, 3, 1, 2], 0)], [3], always)[0]
    assert proposal.confidence == (1.0, 3 / 4, 4 / 5, 5 / 6)
    proposal = make("ngram").propose([view_of([1, 2, 7, 8, 9, 3, 1, 2], 0)], [1], always)[0]
    assert proposal.confidence == (1.0, 2 / 3)


def brute_force(tokens, options, budget):
    """Longest suffix of max..min tokens that occurred before with a continuation."""
    for n in range(options.max_ngram, options.min_ngram - 1, -1):
        starts = [at + n for at in range(len(tokens) - n) if tokens[at : at + n] == tokens[len(tokens) - n :]]
        if n < len(tokens) and starts:
            start = starts[0] if options.prefer == "earliest" else starts[-1]
            return tokens[start : start + min(budget, options.max_draft)]
    return []


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    prefer=st.sampled_from(["latest", "earliest"]),
    budget=st.integers(1, 6),
)
def test_equals_brute_force_however_the_text_arrives(tokens, pieces, sizes, prefer, budget):
    options = NgramOptions(min_ngram=sizes[0], max_ngram=sum(sizes), prefer=prefer)
    drafter = NgramDrafter(options, frozenset())
    end = 0
    for piece in pieces:
        end = min(end + piece, len(tokens))
        proposal = drafter.propose([view_of(tokens[:end], 0)], [budget], always)[0]
        assert list(proposal.tree.tokens[1:]) == brute_force(tokens[:end], options, budget)


def test_catching_up_reads_each_token_once():
    """A proposal at 32k tokens must not cost more than one at 100: no scan, and nothing is indexed twice."""

    class Counting(list):
        read = 0

        def __getitem__(self, place):
            if isinstance(place, slice):
                Counting.read += len(range(*place.indices(len(self))))
            return list.__getitem__(self, place)

    index = NgramIndex(2, 5, earliest=False)
    tokens = Counting(place * place % 1009 for place in range(30_000))
    index.catch_up(tokens)
    Counting.read = 0
    for place in range(50):
        tokens.append(place)
        index.catch_up(tokens)
        index.find(tokens)
    assert Counting.read < 50 * 60


def test_a_prompt_is_indexed_while_it_is_read():
    drafter = make("ngram")
    view = view_of([1, 2, 3, 1, 2], 5)
    drafter.commit([Commit(view, None)])
    assert drafter._indexes[0].num_indexed == 4
    assert drafter.propose([view], [2], always)[0].tree.tokens == (2, 3, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ngram:min_ngram=0", "min_ngram is 0"),
        ("ngram:min_ngram=9", "below min_ngram 9"),
        ("ngram:max_draft=0", "max_draft is 0"),
        ("ngram:prefer=first", "allowed: latest, earliest"),
        ("ngram:n=3", "unknown option 'n'"),
        ("ngram:max_ngrm=3", "did you mean max_ngram[?]"),
        ("ngram:max_ngram=many", "'many' is not a whole number"),
    ],
)
def test_bad_options(text, complaint):
    with pytest.raises(OptionError, match=complaint):
        make(text)


def test_none_proposes_nothing():
    drafter = make("none")
    assert not drafter.drafts
    assert drafter.propose([view_of([1, 2, 1])], [5], always) == [Proposal.empty(1)]
