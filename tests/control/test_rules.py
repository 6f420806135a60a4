"""Each controller's decision rule against cases worked by hand."""

import math
import random
import statistics

import pytest

from draftsmith.control.bandit import BanditController, BanditOptions, Exp3, Ucb
from draftsmith.control.base import RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.cost_table import CostTable
from draftsmith.control.ema import EmaController, EmaOptions, Tier
from draftsmith.control.heuristic import HeuristicController, HeuristicOptions, best_threshold
from draftsmith.control.prefix_scheduler import PrefixSchedulerController, PrefixSchedulerOptions
from draftsmith.control.survival import Cells, Logistic, Tempered
from draftsmith.control.trials import NodeTrial, trials_of
from draftsmith.core.tree import chain, shorten
from draftsmith.core.types import Law, Proposal, ProposalKind, Tree
from draftsmith.errors import UnsoundError

SECONDS = StepSeconds(1, 0.0, 1e-3, 0.0)


def outcome(number, drafted, accepted, emitted_tokens=()):
    return RequestOutcome(number, "d", drafted, drafted, accepted, accepted + 1, tuple(emitted_tokens))


def signals(count, most=30):
    return [RequestSignal(number, "d", most, 100) for number in range(count)]


# -- tiers --------------------------------------------------------------------------------------------


def test_tiers_move_by_the_average():
    """Tiers 1, 3, 5, 7 of SGLang, alpha 1 so that the average is the last step; down -0.25, up 0.

    Down from 5 when the average is at most 3 - 0.5 - 0.25 = 2.25; up from 3 when it is above 2.5.
    """
    tier = Tier([1, 3, 5, 7], EmaOptions(alpha=1.0, warmup=0, interval=1), -0.25, 0.0)
    assert tier.length == 5 and tier.average == 4.0
    for accepted, length in [
        (2.3, 5),
        (2.25, 3),
        (2.5, 3),
        (2.6, 5),
        (4.6, 7),
        (4.26, 7),
        (4.25, 5),
        (0.0, 1),
        (0.4, 1),
    ]:
        tier.observe(accepted)
        assert tier.length == length, accepted
    tier.observe(7.0)
    assert tier.length == 7  # as many tiers at once as the average allows


def test_tier_zero_is_left_by_a_probe():
    tier = Tier([0, 1, 3], EmaOptions(alpha=1.0, warmup=0, interval=2), 0.0, 0.0)
    lengths = []
    for _ in range(8):
        tier.observe(0.0)
        lengths.append(tier.length)
    # From 1 down to 0 where the average is at most 0.5; from 0 always one up at the next decision.
    assert lengths == [1, 0, 0, 1, 1, 0, 0, 1]


def test_warm_up_only_observes_and_decisions_keep_their_interval():
    tier = Tier([1, 3, 5, 7], EmaOptions(alpha=1.0, warmup=4, interval=3), 0.0, 0.0)
    lengths = []
    for _ in range(8):
        tier.observe(0.0)
        lengths.append(tier.length)
    assert lengths == [5, 5, 5, 1, 1, 1, 1, 1]


def test_the_ceiling_caps_lengths():
    tier = Tier([1, 3, 7], EmaOptions(alpha=1.0, warmup=0, interval=1, ceiling=3.0), 0.0, 0.0)
    tier.observe(2.6)
    assert tier.length == 7
    tier.observe(2.0)  # 7 > 3 x 2
    assert tier.length == 3


def test_batch_sizes_have_tiers_of_their_own():
    controller = EmaController(EmaOptions(tiers="1=3+7,8=0+1"))
    assert controller.budget(signals(1)) == [7] and controller.budget(signals(8)) == [1] * 8
    assert controller.budget(signals(7)) == [7] * 7 and controller.budget([]) == []
    assert controller.budget(signals(2, most=2)) == [2, 2]
    for _ in range(30):
        controller.budget(signals(8))
        controller.observe([outcome(number, 1, 0) for number in range(8)], SECONDS)
    assert controller.slot(8).average < 0.1 and controller.slot(1).average == 6.0


# -- transformers' heuristic ---------------------------------------------------------------------------


def test_two_more_after_a_clean_sweep_one_less_otherwise():
    controller = HeuristicController(HeuristicOptions(start=5, max_draft=8))
    lengths = []
    for drafted, accepted in [(5, 5), (7, 7), (8, 3), (7, 0), (6, 6)]:
        lengths.append(controller.budget(signals(1))[0])
        controller.observe([outcome(0, drafted, accepted)], SECONDS)
    assert [*lengths, controller.budget(signals(1))[0]] == [5, 7, 8, 7, 6, 8]
    for _ in range(20):
        controller.observe([outcome(0, 1, 0)], SECONDS)
    assert controller.budget(signals(1)) == [1]
    controller.forget(0)
    assert controller.budget(signals(1)) == [5]


def test_the_threshold_that_costs_least():
    """At and above .7: no false alarm of one, two of three hits, cost 0 + 3 x 1/3 = 1; at .4 all hits, cost 1 + 0 = 1:
    equal, and the higher one is taken. With a second rejected token at .3 the lower one costs 1/2.
    """
    trials = [(0.9, True), (0.7, True), (0.5, False), (0.4, True)]
    assert best_threshold(trials) == 0.7
    assert best_threshold([*trials, (0.3, False)]) == 0.4
    assert best_threshold([(0.9, True)]) is None and best_threshold([(0.9, False)]) is None
    assert best_threshold([(0.5, True), (0.5, False)]) == 0.5


def test_drafting_stops_below_the_threshold_but_for_first_tokens():
    controller = HeuristicController(HeuristicOptions(threshold=0.4))
    controller.budget(signals(2))
    assert [controller.keep_drafting(value) for value in (0.1, 0.1, 0.39, 0.41)] == [True, True, False, True]


def test_the_threshold_follows_what_became_of_drafts():
    """Tokens of confidence above .6 are right, others wrong: the threshold ends between."""
    rng = random.Random(0)
    controller = HeuristicController(HeuristicOptions())
    for _ in range(60):
        controller.budget(signals(1))
        confidence = [rng.random() for _ in range(4)]
        good = next((place for place, value in enumerate(confidence) if value <= 0.6), 4)
        proposal = Proposal(chain(0, [1, 2, 3, 4]), confidence=(1.0, *confidence))
        controller.select([proposal])
        emitted = [*[1, 2, 3, 4][:good], 9]
        controller.observe([outcome(0, 4, good, emitted)], SECONDS)
    assert 0.55 < controller.threshold < 0.72


# -- bandit --------------------------------------------------------------------------------------------


def test_ucb_by_hand():
    """Counts 8 and 2, rates 10 and 9, bonus 0.2: s = 0.2 x 10 x sqrt(2 ln 10) = 4.29, bounds 11.52 and 12.03; with
    bonus 0.1 they are 10.76 and 10.52.
    """
    for bonus, wanted in ((0.2, 0), (0.1, 1)):
        ucb = Ucb(2, bonus, 1.0)
        assert ucb.choose() == 0
        for _ in range(8):
            ucb.reward(1, 10.0, 1.0)
        for _ in range(2):
            ucb.reward(0, 9.0, 1.0)
        assert ucb.choose() == wanted
    assert ucb.values() == [9.0, 10.0] and ucb.counts == [2.0, 8.0]


def test_while_nothing_leads_only_the_next_arm_is_probed():
    ucb = Ucb(4, 0.2, 1.0)
    chosen = []
    for _ in range(400):
        arm = ucb.choose()
        chosen.append(arm)
        ucb.reward(arm, 1.0 if arm == 0 else 0.5, 1.0)
    assert chosen[:4] == [0, 1, 2, 3]
    assert set(chosen[4:]) == {0, 1} and chosen.count(0) > 300


def test_an_arm_forgotten_is_tried_again():
    ucb = Ucb(2, 0.0, 0.9)
    for _ in range(3):
        arm = ucb.choose()
        ucb.reward(arm, 1.0 + arm, 1.0)
    played = []
    for _ in range(20):
        arm = ucb.choose()
        played.append(arm)
        ucb.reward(arm, 1.0 + arm, 1.0)
    assert 0 in played and played.count(1) > 12


def test_exp3_by_hand():
    """Two arms, share 0.1: chances 0.5 each; a reward of 1 multiplies the weight by exp(0.1 / (0.5 x 2))."""
    exp3 = Exp3(2, 0.1, 1.0, random.Random(0))
    assert exp3.chances() == [0.5, 0.5]
    exp3.reward(0, 5.0, 1.0)
    high, low = exp3.chances()
    weight = math.exp(0.1)
    assert high == pytest.approx(0.9 * weight / (weight + 1) + 0.05) and low == pytest.approx(1 - high)
    for _ in range(500):
        arm = exp3.choose()
        exp3.reward(arm, 5.0 if arm == 0 else 1.0, 1.0)
    assert exp3.chances()[0] > 0.9 and exp3.chances()[1] >= 0.05


@pytest.mark.parametrize("policy", ["ucb", "exp3"])
def test_the_bandit_finds_the_length_that_pays(policy):
    """Three right tokens each time, a row costs a tenth of a step: 4 / 1.4 at length 4 beats 2 / 1.1 and 4 / 2.6."""
    controller = BanditController(BanditOptions(policy=policy, arms="0+1+4+16", memory=1.0))
    played = []
    for _ in range(1500):
        length = controller.budget(signals(1))[0]
        played.append(length)
        accepted = min(length, 3)
        controller.observe([outcome(0, length, accepted)], StepSeconds(1 + length, 0.0, 1e-3 * (1 + 0.1 * length), 0.0))
    assert played[500:].count(4) > 0.6 * 1000
    assert controller.policy(1) is not controller.policy(8)


# -- prefix scheduler ----------------------------------------------------------------------------------


def costs(*seconds):
    return CostTable(
        rows=tuple(range(1, len(seconds) + 1)), contexts=(64,), verify=(seconds,), spread=((0.0,) * len(seconds),)
    )


def scheduled(table, confidences, **options):
    """Lengths given to chains of these confidences (conditional), one step after start."""
    controller = PrefixSchedulerController(PrefixSchedulerOptions(**options))
    controller.start_from(table)
    controller.budget(signals(len(confidences), 8))
    proposals = [Proposal(chain(0, range(len(values))), confidence=(1.0, *values)) for values in confidences]
    return [proposal.tree.num_drafted for proposal in controller.select(proposals)]


def test_survivals_compete_across_requests():
    """Survivals .9 .81 .73 and .5 .25: rates 2/2, 2.9/2.2, 3.71/2.4, 4.44/2.6 grow; then .5: 4.94/2.9 < 1.708."""
    table = costs(1.9, 2.0, 2.2, 2.4, 2.6, 2.9, 3.2)
    assert scheduled(table, [[0.9, 0.9, 0.9], [0.5, 0.5]]) == [3, 0]
    flat = costs(1.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert scheduled(flat, [[0.9, 0.9, 0.9], [0.5, 0.5]]) == [3, 2]


def test_the_first_non_improvement_ends_it_and_argmax_looks_on():
    """Rates 1, 1.8/1.9, 2.52/2: the second is no better, though the third would be."""
    table = costs(1.0, 1.9, 2.0)
    assert scheduled(table, [[0.8, 0.9]]) == [0]
    assert scheduled(table, [[0.8, 0.9]], search="argmax") == [2]


def test_the_threshold_needs_no_costs():
    assert scheduled(costs(1.0, 9.0, 99.0), [[0.8, 0.6, 0.9], [0.4, 0.9]], threshold=0.5) == [3, 0]
    assert scheduled(costs(1.0, 9.0, 99.0), [[0.8, 0.6, 0.9]], threshold=0.7) == [1]


def test_a_stale_budget_is_handed_out_by_current_ranking():
    """Two steps ago both chains were promising: two nodes. Now only the second one is."""
    table = costs(1.9, 2.0, 2.1, 2.2, 4.0, 6.0)
    controller = PrefixSchedulerController(PrefixSchedulerOptions(stale=2))
    controller.start_from(table)

    def step(*confidences):
        controller.budget(signals(2, 8))
        proposals = [Proposal(chain(0, [5, 6]), confidence=(1.0, *values)) for values in confidences]
        return [proposal.tree.num_drafted for proposal in controller.select(proposals)]

    assert step((0.9, 0.1), (0.9, 0.1)) == [2, 2]  # no past yet: new traffic survives
    assert step((0.05, 0.1), (0.05, 0.1)) == [2, 2]
    assert step((0.2, 0.1), (0.9, 0.9)) == [0, 2]
    assert step((0.9, 0.9), (0.9, 0.9)) == [0, 0]  # the budget is that of the bad step two steps ago


def test_nothing_admitted_for_long_rests_the_drafter():
    controller = PrefixSchedulerController(PrefixSchedulerOptions())
    controller.start_from(costs(1.0, 5.0, 9.0))
    asked = []
    for _ in range(100):
        budget = controller.budget(signals(1, 4))[0]
        asked.append(budget)
        if budget:
            controller.select([Proposal(chain(0, [1] * budget), confidence=(1.0, *[0.3] * budget))])
        controller.observe([outcome(0, 0, 0, (9,))], StepSeconds(1, 1e-4, 1.0, 0.0))
    assert asked[:8] == [4] * 8 and asked.count(4) < 14 and 4 in asked[20:]


def test_only_foreseen_chains_are_shortened():
    law = Law(None)
    drawn = Proposal(chain(0, [1, 2, 3]), ProposalKind.IID, {0: law, 1: law, 2: law}, (1.0, 0.9, 0.9, 0.9), True)
    cut = shorten(drawn, 1)
    assert cut.tree == chain(0, [1]) and set(cut.laws) == {0} and cut.confidence == (1.0, 0.9)
    assert shorten(drawn, 3) is drawn and shorten(drawn, 0).kind is ProposalKind.POINT_MASS
    for unsound in (
        Proposal(drawn.tree, ProposalKind.IID, drawn.laws, drawn.confidence),
        Proposal(Tree((0, 1, 2), (-1, 0, 0)), ProposalKind.WITHOUT_REPLACEMENT, {0: law}, foreseen=True),
    ):
        with pytest.raises(UnsoundError, match="cannot be shortened"):
            shorten(unsound, 1)


# -- estimators and trials -----------------------------------------------------------------------------


def test_confidences_are_tempered_until_they_fit():
    """Confidences twice as sure (in logits) as they should be: a temperature near 2 is found, at each depth its own."""
    rng, tempered = random.Random(3), Tempered()
    for _ in range(3000):
        logit = rng.uniform(-4, 4)
        told = 1 / (1 + math.exp(-logit))
        right = {1: 1 / (1 + math.exp(-logit / 2)), 2: told}
        for depth, chance in right.items():
            tempered.observe(0, [NodeTrial(depth, 0, told, rng.random() < chance)], True)
    assert tempered.temperatures[1] == pytest.approx(2.0, rel=0.25)
    assert tempered.temperatures[2] == pytest.approx(1.0, rel=0.25)
    assert tempered.probability(0, 1, 0.5) == pytest.approx(0.5)
    assert Tempered().probability(0, 1, None) == pytest.approx(0.5)


def test_the_regression_tells_requests_and_depths_apart_without_confidences():
    rng, logistic = random.Random(4), Logistic()
    seen = {0: [], 1: []}
    for step in range(2500):
        for request, chance in ((0, 0.9), (1, 0.2)):
            for depth in (1, 4):
                accepted = rng.random() < chance * (1.0 if depth == 1 else 0.6)
                logistic.observe(request, [NodeTrial(depth, 0, 0.0, accepted)], False)
            if step >= 2000:
                seen[request].append([logistic.probability(request, depth, None) for depth in (1, 4)])
    (good, deep), (bad, _) = ([statistics.mean(column) for column in zip(*seen[key], strict=True)] for key in (0, 1))
    assert good > 0.75 and bad < 0.35
    assert deep < good - 0.05
    logistic.forget(0)
    assert bad < logistic.probability(0, 1, None) < good


def test_cells_know_requests_by_their_odds():
    rng, cells = random.Random(5), Cells()
    for _ in range(300):
        for request, chance in ((0, 0.9), (1, 0.2)):
            cells.observe(request, [NodeTrial(1, 0, 0.5, rng.random() < chance)], True)
    assert cells.probability(0, 1, 0.5) > 0.7 and cells.probability(1, 1, 0.5) < 0.4


def test_what_was_not_verified_is_not_labelled():
    """A drawn chain is judged as far as it was verified; a cut point mass by what was emitted in its place."""
    law = Law(None)
    laws = {0: law, 1: law, 2: law}
    drawn = Proposal(chain(0, [1, 2, 3]), ProposalKind.IID, laws, (1.0, 0.9, 0.8, 0.7))
    verified = RequestOutcome(0, "d", 1, 1, 1, 2, (1, 2))  # one node verified and accepted, then a bonus token 2
    assert [(trial.depth, trial.accepted) for trial in trials_of(drawn, verified)] == [(1, True)]
    point = Proposal(chain(0, [1, 2, 3]), confidence=(1.0, 0.9, 0.8, 0.7))
    assert [trial.accepted for trial in trials_of(point, verified)] == [True, True]
    tree = Proposal(Tree((0, 4, 5, 6, 7), (-1, 0, 0, 2, 2)))
    followed = trials_of(tree, RequestOutcome(0, "d", 4, 2, 2, 3, (5, 7, 1)))
    assert [(trial.depth, trial.rank, trial.accepted) for trial in followed] == [
        (1, 0, False), (1, 1, True), (2, 0, False), (2, 1, True),
    ]  # fmt: skip
