"""Approximate verification against hand-worked blocks: gate, cap, budget, trees; budget 0 is greedy decoding."""

import numpy as np
import pytest
import torch

from draftsmith.core import tree as trees
from draftsmith.core.asd import ApproximateVerification
from draftsmith.core.chance import KeyedChance
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import Proposal, Rule, Tree
from draftsmith.core.verify import verify
from draftsmith.errors import OptionError
from tests.core.inexact_toys import greedy_sampler

CHANCE = KeyedChance(RequestRandom(0), 0)


def decide(rule, tree, rows, memory=None, **params):
    logits_TV = torch.tensor(rows, dtype=torch.float64)
    return rule.verify(Proposal(tree), logits_TV, greedy_sampler(3, rule, **params), CHANCE, memory)


def near(regret):
    """Token 0 is the greedy one, token 1 so much below."""
    return [5.0, 5.0 - regret, 0.0]


MATCH = [0.0, 4.0, 0.0]  # the greedy token is 1, as drafted
CHAIN3 = trees.chain(0, (1, 1, 1))


def test_a_near_miss_rescues_what_follows():
    """Regret 0.2 for three tokens is below 3 x 0.25; the second token is the greedy one; the third misses by 2."""
    verdict, spent = decide(ApproximateVerification(), CHAIN3, [near(0.2), MATCH, near(2.0), MATCH])
    assert (verdict.path, verdict.tokens) == ((1, 2), (1, 1, 0))
    assert verdict.costs == (1.0, 0.0, 0.0) and spent == pytest.approx(0.2)


def test_a_full_draft_ends_with_the_greedy_token():
    verdict, spent = decide(ApproximateVerification(), CHAIN3, [MATCH, MATCH, near(0.25), [0.0, 0.0, 3.0]])
    assert verdict.tokens == (1, 1, 1, 2) and verdict.costs == (0, 0, 1, 0) and spent == pytest.approx(0.25)


@pytest.mark.parametrize(("place", "most"), [(0, 0.75), (1, 0.5), (2, 0.25)])
def test_the_gate_counts_what_is_rescued(place, most):
    for regret, kept in ((most, 3), (most + 0.01, place)):
        rows = [MATCH] * 4
        rows[place] = near(regret)
        verdict, _ = decide(ApproximateVerification(), CHAIN3, rows)
        assert verdict.num_accepted == kept, (place, regret)


def test_no_more_mismatches_than_the_cap():
    rows = [near(0.1), near(0.1), near(0.1), MATCH]
    for cap in range(4):
        verdict, spent = decide(ApproximateVerification(mismatches=cap), CHAIN3, rows)
        assert verdict.num_accepted == cap and spent == pytest.approx(0.1 * cap)


def test_the_budget_is_the_request_s():
    rows, rule = [near(0.25), near(0.25), MATCH, MATCH], ApproximateVerification(budget=1.0)
    for memory, kept in ((None, 3), (0.5, 3), (0.6, 1), (0.75, 1), (0.9, 0), (1.0, 0)):
        verdict, spent = decide(rule, CHAIN3, rows, memory)
        assert verdict.num_accepted == kept, memory
        assert spent <= 1.0 and spent == pytest.approx((memory or 0.0) + 0.25 * min(kept, 2))


def test_a_tie_is_a_miss_and_needs_something_left():
    tie = [near(0.0), MATCH, MATCH, MATCH]
    assert decide(ApproximateVerification(), CHAIN3, tie)[0].num_accepted == 3
    strict = [{"budget": 0.0}, {"gate": 0.0}, {"mismatches": 0}]
    for settings in strict:
        assert decide(ApproximateVerification(**settings), CHAIN3, tie)[0].num_accepted == 0
    assert decide(ApproximateVerification(budget=2.0), CHAIN3, tie, 2.0)[0].num_accepted == 0


@pytest.mark.parametrize("settings", [{"budget": 0.0}, {"gate": 0.0}, {"mismatches": 0}])
def test_nothing_to_spend_is_greedy_decoding(settings):
    """On random trees over rows with ties: path and tokens are those of the greedy walk."""
    rule, generator = ApproximateVerification(**settings), np.random.default_rng(4)
    for _ in range(200):
        size = int(generator.integers(1, 7))
        tree = Tree(
            (0, *generator.integers(0, 3, size).tolist()),
            (-1, *(int(generator.integers(0, node)) for node in range(1, size + 1))),
        )
        if len({(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)}) < tree.num_nodes:
            continue
        logits_TV = torch.from_numpy(generator.integers(0, 3, (tree.num_nodes, 3)).astype(np.float64))
        found, spent = rule.verify(Proposal(tree), logits_TV, greedy_sampler(3, rule), CHANCE, None)
        plain = verify(Proposal(tree), logits_TV, greedy_sampler(3, Rule.COUPLING), RequestRandom(0), 0)
        assert (found.path, found.tokens) == (plain.path, plain.tokens)
        assert not any(found.costs) and spent == 0.0


def test_on_a_tree_the_longest_admissible_path_is_taken():
    """Node 1 is the greedy token and a leaf; node 2 misses by 0.4 and carries two greedy tokens below it."""
    tree = Tree((0, 0, 1, 1, 1), (-1, 0, 0, 2, 3))
    rows = [near(0.4), MATCH, MATCH, MATCH, MATCH]
    assert decide(ApproximateVerification(), tree, rows)[0].path == (2, 3, 4)
    assert decide(ApproximateVerification(gate=0.1), tree, rows)[0].path == (1,)
    # As long and cheaper wins, wherever it stands.
    level = Tree((0, 1, 0), (-1, 0, 0))
    assert decide(ApproximateVerification(), level, [near(0.2), MATCH, MATCH])[0].path == (2,)


def test_regret_is_counted_after_the_request_s_transforms():
    rows = [near(0.2), MATCH, MATCH, MATCH]
    biased = decide(ApproximateVerification(), CHAIN3, rows, logit_bias={1: -2.0})
    assert biased[0].num_accepted == 0  # 2.2 below the best
    banned = decide(ApproximateVerification(gate=100.0, budget=1e9), CHAIN3, rows, banned_ids=frozenset({1}))
    assert banned[0].num_accepted == 0 and 1 not in banned[0].tokens
    penalised = decide(ApproximateVerification(), CHAIN3, rows, frequency_penalty=2.0)
    # The 4.0 of token 1 is 2.0 after one of them, 0.0 after two (a tie, which token 0 wins), -2.0 after three.
    assert penalised[0].tokens == (1, 1, 1, 0) and penalised[0].costs == (1, 0, 1, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": -1.0},
        {"budget": float("inf")},
        {"gate": float("nan")},
        {"gate": -0.1},
        {"mismatches": -1},
        {"mismatches": 1.5},
    ],
)
def test_settings_are_checked(settings):
    with pytest.raises(OptionError, match=f"rule asd: {next(iter(settings))} is"):
        ApproximateVerification(**settings)


def test_sampled_requests_are_refused():
    with pytest.raises(OptionError, match="rule asd is for greedy requests"):
        SamplingParams(temperature=0.8, rule=ApproximateVerification())
