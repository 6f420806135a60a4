"""Draft models of padded and of other vocabularies: the map, and exactness through it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import Rule
from draftsmith.drafters.vocabulary import map_vocabularies
from draftsmith.errors import VocabularyError
from tests.drafters.loop import (
    LETTERS,
    TABLE,
    VOCAB,
    LetterTokenizer,
    TableBackend,
    always,
    loaded,
    make,
    near_table,
    random_table,
    run,
    target_info,
    view_of,
)
from tests.drafters.test_draft_model import SMALL, joint, p_value

# Shares a, b, c, d, e, f and <end> with the target under other ids; spells g as several tokens of its own.
OTHER = LetterTokenizer(["<end>", "f", "e", "d", "xx", "c", "b", "a", "yy"])


def map_of(target=LETTERS, draft=OTHER, target_size=None, draft_size=None):
    """The map between two tokenizers whose models have a row per token unless told otherwise."""
    return map_vocabularies(
        target, target_size or target.vocab_size, draft, draft_size or draft.vocab_size, "the draft"
    )


def test_equal_vocabularies_translate_for_free():
    found = map_of(draft=LetterTokenizer(LETTERS.pieces))
    logits = torch.randn(VOCAB)
    assert found.is_identity and found.num_shared == VOCAB
    assert found.logits_to_target(logits) is logits
    assert found.tokens_to_draft([3, 11]) == [(3,), (11,)]


@pytest.mark.parametrize(("target_size", "draft_size"), [(12, 16), (16, 12), (16, 20), (20, 16)])
def test_padding_rows_have_probability_zero(target_size, draft_size):
    """Qwen2.5 has 152064 rows in one size and 151936 in another for the same tokens."""
    found = map_of(draft=LetterTokenizer(LETTERS.pieces), target_size=target_size, draft_size=draft_size)
    assert found.is_identity and found.num_shared == VOCAB
    logits = torch.zeros(draft_size)
    logits[VOCAB:] = 50.0  # a padded row of garbage weights
    mapped = found.logits_to_target(logits)
    assert mapped.shape == (target_size,)
    assert mapped[:VOCAB].tolist() == [0.0] * VOCAB
    assert mapped[VOCAB:].tolist() == [-float("inf")] * (target_size - VOCAB)
    assert found.tokens_to_draft([target_size - 1]) == [(target_size - 1,) if target_size == VOCAB else ()]


def test_a_vocabulary_extended_at_its_end_is_the_same_vocabulary():
    longer = LetterTokenizer([*LETTERS.pieces, "<tool>", "<more>"])
    for found in (map_of(draft=longer), map_of(target=longer, draft=LETTERS)):
        assert found.is_identity and found.num_shared == VOCAB


def test_other_vocabularies_meet_in_their_intersection():
    found = map_of()
    assert not found.is_identity and found.num_shared == 7
    logits = torch.randn(9, dtype=torch.float64)
    mapped = torch.softmax(found.logits_to_target(logits), 0)
    shared = [OTHER.pieces.index(LETTERS.pieces[token]) for token in (0, 1, 2, 3, 4, 5, 11)]
    expected = torch.softmax(logits[shared], 0)
    torch.testing.assert_close(mapped[[0, 1, 2, 3, 4, 5, 11]], expected)
    assert float(mapped[6:11].sum()) == 0


def test_tokens_outside_are_spelled_with_draft_tokens():
    target = LetterTokenizer(["a", "b", "cab", "zz", "<end>"])
    found = map_of(target=target)
    spelled = [[OTHER.pieces[token] for token in ids] for ids in found.tokens_to_draft([0, 2, 3, 4])]
    assert spelled == [["a"], ["c", "a", "b"], [], ["<end>"]]


def test_special_tokens_match_special_tokens_only():
    target, draft = LetterTokenizer(["x", "a", "<end>"]), LetterTokenizer(["<a>", "<end>", "a"])
    found = map_of(target=target, draft=draft)
    assert found.tokens_to_draft([1, 2]) == [(2,), (1,)]


def test_equal_ids_with_gaps_are_no_identity():
    """Ids that agree here and there: the ones between stand for different tokens."""
    target, draft = LetterTokenizer(["a", "b", "c", "d"]), LetterTokenizer(["a", "q", "c", "d"])
    found = map_of(target=target, draft=draft)
    assert not found.is_identity
    mapped = found.logits_to_target(torch.tensor([0.0, 99.0, 1.0, 2.0]))
    assert mapped.tolist() == [0.0, -float("inf"), 1.0, 2.0]
    assert found.tokens_to_draft([1, 3]) == [(), (3,)]


def test_nothing_shared_is_refused():
    with pytest.raises(VocabularyError, match="shares no token with the target"):
        map_of(draft=LetterTokenizer(["x", "y", "z"]))
    info = target_info({"near": loaded(random_table(3, 0), LetterTokenizer(["x", "y", "z"]))})
    with pytest.raises(VocabularyError) as caught:
        make("draft_model:model=near", info)
    assert "\n" not in str(caught.value)


def test_without_tokenizers_sizes_must_agree():
    assert map_vocabularies(None, 5, None, 5, "the draft").is_identity
    for target, draft in ((None, OTHER), (LETTERS, None)):
        with pytest.raises(VocabularyError, match="without both tokenizers"):
            map_vocabularies(target, 12, draft, 9, "the draft")


def other_model(seed=2):
    """A draft model of the other vocabulary whose shared rows resemble the target's."""
    near = near_table(TABLE, seed)
    table = random_table(OTHER.vocab_size, seed)
    ids = [LETTERS.pieces.index(piece) if piece in LETTERS.pieces else None for piece in OTHER.pieces]
    for row, target_row in enumerate(ids):
        for column, target_column in enumerate(ids):
            if target_row is not None and target_column is not None:
                table[row, column] = near[target_row, target_column]
    return SimpleNamespace(backend=TableBackend(table), tokenizer=OTHER)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, rule=Rule.MATCH),
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "coupled", "match"])
@pytest.mark.parametrize("text", ["draft_model:model=other", "draft_model:model=other:tree=2x2"])
def test_output_through_another_vocabulary_is_the_plain_runs(params, text):
    info = target_info({"other": other_model()})
    prompts = [[0, 1, 6, 2], [9], [8, 7, 6, 5, 4]]
    plain = run(TableBackend(TABLE), make("none"), prompts, 30, params)
    result = run(TableBackend(TABLE), make(text, info), prompts, 30, params, budget=lambda step: (5, 0, 2)[step % 3])
    assert result.emitted == plain.emitted
    assert result.drafted > 20 and result.accepted > 5
    outside = {6, 7, 8, 9, 10}
    assert outside & {token for tokens in result.emitted.values() for token in tokens}
    assert not outside & {token for proposal in result.proposals for token in proposal.tree.tokens[1:]}


def test_the_draft_sequence_is_the_re_encoded_text():
    """Its length is not the target's: each outside token may be several draft tokens, or none."""
    target = LetterTokenizer(["a", "b", "cab", "zz"])
    model = SimpleNamespace(backend=TableBackend(random_table(OTHER.vocab_size, 0)), tokenizer=OTHER)
    info = target_info({"other": model}, target, 4)
    drafter = make("draft_model:model=other", info)
    tokens = [0, 2, 3, 1]
    drafter.propose([view_of(tokens, vocab_size=4)], [1], always)
    assert model.backend.cache.tokens(0) == OTHER.encode("acabb", special=False)
    drafter.truncate(0, 2)
    drafter.propose([view_of([0, 2, 1, 1], vocab_size=4)], [1], always)
    assert model.backend.cache.tokens(0) == OTHER.encode("acabbb", special=False)
    drafter.fork(0, 1, 2)
    assert model.backend.cache.tokens(1) == OTHER.encode("acab", special=False)
    only = make("draft_model:model=other", info)
    assert only.propose([view_of([3], vocab_size=4, sequence_id=5)], [3], always)[0].tree.num_drafted == 0


@pytest.mark.parametrize(("rule", "text"), [(Rule.BLOCK, ""), (Rule.TRAVERSAL, ":tree=2x2")])
def test_the_law_through_another_vocabulary_is_the_targets(rule, text):
    """False alarm: two tests at 1e-5 each. Token 4 is outside the intersection and comes from residuals alone."""
    table = random_table(SMALL, 4, sharpness=1.0)
    target = TableBackend(table)
    mine, theirs = LetterTokenizer(["a", "b", "c", "d", "e"]), LetterTokenizer(["d", "c", "b", "a", "zz"])
    info = target_info({"other": loaded(random_table(5, 9), theirs)}, mine, SMALL)
    drafter = make("draft_model:model=other" + text, info)
    params = SamplingParams(temperature=1.0, rule=rule)
    counts = np.zeros(SMALL**2)
    for start in range(0, 2000, 100):
        result = run(target, drafter, [[2]] * 100, 2, params, budget=lambda step: 6, seed=start)
        for tokens in result.emitted.values():
            counts[tokens[0] * SMALL + tokens[1]] += 1
    assert p_value(joint(target.table, params, 2, 2), counts) > 1e-5
