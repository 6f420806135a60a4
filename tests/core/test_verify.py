"""Dispatch, the greedy walk, refusals and the cost of the hot path."""

import time

import numpy as np
import pytest
import torch

from draftsmith.core import tree as trees
from draftsmith.core.draw import draw_coupled, draw_iid, draw_without_replacement, record_law, support_size
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Tree, Verdict
from draftsmith.core.verify import row_argmax, verify
from draftsmith.errors import DraftsmithError, UnsoundError
from tests.core.checks import IID, WITHOUT, check_greedy, check_zero_probability
from tests.core.toys import as_law, sampler_of

RATIO_RULES = (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL)


def greedy_sampler(vocab_size, **params):
    return Sampler(SamplingParams(**params), (0,), frozenset(), vocab_size)


def rows_for(tokens, vocab_size):
    """Logits [T, V] whose argmax after node i is tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float()


def test_greedy_walk_on_random_trees():
    check_greedy()


def test_greedy_walk_with_penalties_sees_the_path():
    check_greedy(context_free=False)


def test_greedy_chain_partly_accepted():
    proposal = Proposal(trees.chain(7, (3, 1, 4)))
    verdict = verify(proposal, rows_for((3, 1, 5, 9), 10), greedy_sampler(10), RequestRandom(0), 0)
    assert verdict == Verdict((1, 2), (3, 1, 5))
    assert verdict.num_accepted == 2 and verdict.num_emitted == 3


def test_greedy_fully_accepted_chain_takes_the_bonus_of_its_last_row():
    proposal = Proposal(trees.chain(7, (3, 1, 4)))
    verdict = verify(proposal, rows_for((3, 1, 4, 9), 10), greedy_sampler(10), RequestRandom(0), 0)
    assert verdict == Verdict((1, 2, 3), (3, 1, 4, 9))


def test_empty_proposal_emits_one_token():
    verdict = verify(Proposal.empty(7), rows_for((6,), 10), greedy_sampler(10), RequestRandom(0), 0)
    assert verdict == Verdict((), (6,))


def test_greedy_tree_takes_the_first_of_duplicate_siblings():
    proposal = Proposal(Tree((0, 5, 5, 6), (-1, 0, 0, 2)))
    verdict = verify(proposal, rows_for((5, 8, 6, 1), 10), greedy_sampler(10), RequestRandom(0), 0)
    assert verdict == Verdict((1,), (5, 8))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_ties_go_to_the_lowest_id(dtype):
    rows = torch.zeros(3, 40, dtype=dtype)
    rows[0, 9] = rows[0, 33] = 2.0
    rows[1, 39] = 1.0
    assert list(row_argmax(rows)) == [9, 39, 0]


def test_greedy_refuses_rows_with_nan_where_it_gets_to():
    rows = rows_for((3, 1), 10)
    rows[1, 4] = torch.nan
    sampler = greedy_sampler(10)
    assert verify(Proposal(trees.chain(0, (2,))), rows, sampler, RequestRandom(0), 0) == Verdict((), (3,))
    with pytest.raises(DraftsmithError, match="NaN"):
        verify(Proposal(trees.chain(0, (3,))), rows, sampler, RequestRandom(0), 0)


def test_greedy_row_of_minus_infinity_is_what_the_sampler_says():
    rows = torch.full((1, 6), -torch.inf)
    sampler = greedy_sampler(6)
    expected = sampler.argmax(rows[0])
    assert verify(Proposal.empty(0), rows, sampler, RequestRandom(0), 0).tokens == (expected,)


def test_all_drafts_masked_out_of_the_target():
    """Logits of minus infinity for every draft: nothing is accepted and a legal token comes out."""
    rows = torch.zeros(3, 4)
    rows[:, :2] = -torch.inf
    laws = {0: as_law(np.array([0.5, 0.5, 0.0, 0.0])), 1: as_law(np.array([1.0, 0.0, 0.0, 0.0]))}
    proposal = Proposal(trees.chain(2, (1, 0)), IID, laws)
    for rule in Rule:
        for seed in range(20):
            verdict = verify(proposal, rows, sampler_of(4, rule), RequestRandom(seed), 3)
            assert verdict.path == () and verdict.tokens[0] in (2, 3), (rule, verdict)


def test_zero_probability_is_never_accepted():
    check_zero_probability()


def test_traversal_and_recursion_take_long_chains():
    """No recursion limit: two thousand nodes."""
    num = 2000
    law = as_law(np.array([0.5, 0.5]))
    proposal = Proposal(trees.chain(0, (1,) * num), IID, dict.fromkeys(range(num), law))
    rows = torch.zeros(num + 1, 2)
    for rule in RATIO_RULES:
        verdict = verify(proposal, rows, sampler_of(2, rule), RequestRandom(1), 0)
        assert verdict.num_accepted == num, "equal laws accept everything"


class TestRefusals:
    rows = torch.zeros(3, 4)
    law = as_law(np.full(4, 0.25))

    def refused(self, proposal, rule, match):
        with pytest.raises(UnsoundError, match=match) as caught:
            verify(proposal, self.rows, sampler_of(4, rule), RequestRandom(0), 0)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("rule", "instead"), [(Rule.CHAIN, "use rule recursive"), (Rule.BLOCK, "use rule traversal")]
    )
    def test_chain_rules_on_a_branching_tree(self, rule, instead):
        tree = Tree((0, 1, 2), (-1, 0, 0))
        self.refused(Proposal(tree, IID, {0: self.law}), rule, instead)

    @pytest.mark.parametrize("rule", RATIO_RULES)
    def test_missing_law(self, rule):
        self.refused(Proposal(trees.chain(0, (1, 2)), IID, {0: self.law}), rule, "node 1 .* no recorded law")

    @pytest.mark.parametrize("rule", RATIO_RULES)
    @pytest.mark.parametrize(
        "wrong",
        [
            Law(torch.full((5,), 0.2)),
            Law(torch.full((3,), 1 / 3)),
            Law(torch.tensor([0.5, 0.5]), torch.tensor([1, 4])),
            Law(torch.tensor([0.5, 0.5]), torch.tensor([1, -1])),
            Law(torch.tensor([0.5, 0.5]), torch.tensor([1])),
        ],
        ids=("longer", "shorter", "id too high", "negative id", "ids and probs differ"),
    )
    def test_law_of_another_vocabulary(self, rule, wrong):
        self.refused(Proposal(trees.chain(0, (1, 1)), IID, {0: wrong, 1: wrong}), rule, "vocabulary of 4")

    @pytest.mark.parametrize("probs", [(0.5, 0.1, 0.1, 0.1), (1.2, -0.2, 0.0, 0.0), (float("nan"), 0.5, 0.5, 0.0)])
    def test_law_that_is_none(self, probs):
        wrong = as_law(np.array(probs))
        self.refused(Proposal(trees.chain(0, (0, 0)), IID, {0: wrong, 1: wrong}), Rule.BLOCK, "sums to")

    @pytest.mark.parametrize("rule", RATIO_RULES)
    @pytest.mark.parametrize("token", (3, 9, -1))
    def test_token_its_law_cannot_have_drawn(self, rule, token):
        law = as_law(np.array([0.5, 0.3, 0.2, 0.0]))
        self.refused(Proposal(trees.chain(0, (token, 0)), IID, {0: law, 1: law}), rule, f"token {token}.*probability 0")

    @pytest.mark.parametrize("rule", (Rule.RECURSIVE, Rule.TRAVERSAL))
    def test_same_sibling_twice_without_replacement(self, rule):
        rows = torch.tensor([[0.0, -20.0, 0.0, 0.0]] * 3)
        tree = Tree((0, 1, 1), (-1, 0, 0))
        with pytest.raises(UnsoundError, match="distinct unless the kind is iid"):
            verify(Proposal(tree, WITHOUT, {0: self.law}), rows, sampler_of(4, rule), RequestRandom(0), 0)

    @pytest.mark.parametrize("rule", (Rule.COUPLING, Rule.MATCH))
    @pytest.mark.parametrize("kind", ProposalKind)
    def test_walk_rules_take_candidates_of_any_kind(self, rule, kind):
        """The walk is exact whatever the candidates are, so it needs no law and refuses nothing."""
        proposal = Proposal(Tree((0, 1, 2), (-1, 0, 0)), kind)
        plain = verify(Proposal.empty(0), self.rows[:1], sampler_of(4, rule), RequestRandom(0), 0)
        verdict = verify(proposal, self.rows, sampler_of(4, rule), RequestRandom(0), 0)
        assert verdict.tokens[0] == plain.tokens[0]


class TestDraws:
    def test_record_law_is_sparse_when_that_pays(self):
        probs = torch.zeros(100, dtype=torch.float64)
        probs[[3, 70, 71]] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        law = record_law(probs)
        assert law.ids is not None and law.ids.tolist() == [3, 70, 71] and support_size(law) == 3
        assert law.prob(70) == pytest.approx(0.3) and law.prob(4) == 0.0
        dense = record_law(torch.full((10,), 0.1))
        assert dense.ids is None and support_size(dense) == 10

    def test_sparse_and_dense_laws_draw_alike(self):
        probs = np.array([0.0, 0.5, 0.0, 0.2, 0.3])
        for seed in range(50):
            random = RequestRandom(seed)
            dense, sparse = as_law(probs), as_law(probs, sparse=True)
            assert draw_iid(dense, random, 2, (1, 2, 3), 5) == draw_iid(sparse, random, 2, (1, 2, 3), 5)
            assert draw_without_replacement(dense, random, 2, 1, 5, 5) == draw_without_replacement(
                sparse, random, 2, 1, 5, 5
            )

    def test_a_law_may_name_its_tokens_in_any_order(self):
        probs, order = np.array([0.0, 0.5, 0.0, 0.2, 0.3]), torch.tensor([4, 1, 3])
        mixed = Law(torch.from_numpy(probs[order.numpy()]), order)
        for seed in range(50):
            random, dense = RequestRandom(seed), as_law(probs)
            assert draw_iid(mixed, random, 2, (1, 2), 5) == draw_iid(dense, random, 2, (1, 2), 5)
            assert draw_without_replacement(mixed, random, 2, 1, 4, 5) == draw_without_replacement(
                dense, random, 2, 1, 4, 5
            )

    def test_a_part_of_the_vocabulary_draws_as_all_of_it_with_nothing_else_possible(self):
        generator = torch.Generator().manual_seed(1)
        ids = np.array([2, 3, 5, 17, 18, 40, 63])
        for seed in range(50):
            part = torch.randn(len(ids), generator=generator, dtype=torch.float64)
            if seed % 2:
                part[seed % len(ids)] = -torch.inf
            whole = torch.full((64,), -torch.inf, dtype=torch.float64).index_copy(0, torch.from_numpy(ids), part)
            random = RequestRandom(seed)
            for count in (1, 3, 7):
                assert draw_coupled(part, random, 4, count, ids) == draw_coupled(whole, random, 4, count)
            law, dense = record_law(torch.softmax(part, 0), ids), record_law(torch.softmax(whole, 0))
            assert law.ids is not None and torch.equal(law.dense(64), dense.dense(64))
            assert set(law.ids.tolist()) <= set(ids.tolist()) and bool((law.probs > 0).all())
            assert draw_iid(law, random, 2, (1, 2), 64) == draw_iid(dense, random, 2, (1, 2), 64)

    def test_without_replacement_is_distinct_and_uses_the_mass_first(self):
        law = as_law(np.array([0.0, 0.7, 0.0, 0.3, 0.0]))
        rests = set()
        for seed in range(60):
            drawn = draw_without_replacement(law, RequestRandom(seed), 0, 0, 4, 5)
            assert len(set(drawn)) == 4 and set(drawn[:2]) == {1, 3}
            rests.add(drawn[2:])
        assert len(rests) == 6, "blind draws are uniform over what is left, in every order"

    def test_draws_never_leave_the_support(self):
        law = as_law(np.array([0.0, 0.7, 0.0, 0.3, 0.0]))
        drawn = {token for seed in range(200) for token in draw_iid(law, RequestRandom(seed), 0, (1, 2), 5)}
        assert drawn == {1, 3}

    def test_tiny_probabilities_are_drawn_from_what_is_recorded(self):
        """A log-law may name tokens whose recorded probability is 0; they must never be drawn."""
        law = record_law(torch.softmax(torch.tensor([0.0, -200.0, -300.0], dtype=torch.float64), 0))
        assert support_size(law) == 1
        for seed in range(50):
            assert draw_iid(law, RequestRandom(seed), 0, (1,), 3) == (0,)

    def test_coupled_draw_is_the_targets_own_when_the_laws_agree(self):
        scores = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sampler = sampler_of(50, Rule.COUPLING)
        for seed in range(50):
            random = RequestRandom(seed)
            drawn = draw_coupled(scores, random, 4, 3)
            assert drawn[0] == sampler.sample(scores, random.target_gumbel(4, 50))
            assert len(set(drawn)) == 3 and draw_coupled(scores, random, 4) == drawn[:1]

    def test_a_draw_refuses_a_law_of_another_vocabulary(self):
        with pytest.raises(UnsoundError, match="vocabulary of 6"):
            draw_iid(as_law(np.full(4, 0.25)), RequestRandom(0), 0, (1,), 6)


def test_greedy_hot_path_cost():
    """A chain of 16, fully accepted: at most 40 us on an idle machine; twice that here, the best of 200 counts.

    A tiny vocabulary leaves nothing but the overhead: the argmax alone grows with it.
    """
    tokens = tuple(range(1, 17))
    rows = rows_for((*tokens, 20), 32)
    proposal, sampler, random = Proposal(trees.chain(0, tokens)), greedy_sampler(32), RequestRandom(0)
    assert verify(proposal, rows, sampler, random, 0).num_accepted == 16
    times = []
    for _ in range(200):
        start = time.perf_counter()
        verify(proposal, rows, sampler, random, 0)
        times.append(time.perf_counter() - start)
    assert min(times) < 80e-6, f"{min(times) * 1e6:.0f} us"
