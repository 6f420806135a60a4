"""The goodput controller against synthetic acceptance and cost: it pays where drafting pays, and never costs much.

Rates are tokens per true second, relative to plain decoding or to the best fixed length in hindsight; the
controller is told noisy times with outliers. Everything is seeded; docstrings give what was measured.
"""

import copy
import random
import statistics

import pytest

from draftsmith.control.base import RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.fixed import FixedController, FixedOptions
from draftsmith.control.goodput import GoodputController, GoodputOptions
from draftsmith.core.tree import chain
from draftsmith.core.types import Law, Proposal, ProposalKind, Tree
from tests.control.simulation import COSTS, FLAT, LINEAR, PLAIN, QUANTISED, STAIRCASE, Drafting, simulate, stream

LOOK = Drafting(look=3e-5)  # retrieval: half a percent of a plain step
MODEL = Drafting(look=1e-4, per_depth=0.1 * PLAIN)  # a model: a tenth of a plain step per drafted depth
DRAWN = Drafting(look=1e-4, per_depth=0.1 * PLAIN, kind=ProposalKind.IID)
CHEAPLY_DRAWN = Drafting(look=3e-5, kind=ProposalKind.IID)  # small heads under a ratio rule: cheap, but not to be cut
KINDS = {"look": LOOK, "model": MODEL, "drawn": DRAWN, "cheaply drawn": CHEAPLY_DRAWN}
PLAIN_RATE = 1 / PLAIN


def auto(**options):
    return GoodputController(GoodputOptions(**options))


def streams(seed, parts, count=1, availability=1.0):
    rng = random.Random(seed)
    return [stream(rng, parts, availability) for _ in range(count)]


def against_best_fixed(knots, drafting, parts, count=1, availability=1.0, seeds=3):
    """Mean over seeds of the rate relative to the best fixed length, and the least one relative to plain."""
    to_best, to_plain = [], []
    for seed in range(seeds):
        texts = streams(seed, parts, count, availability)
        fixed = {
            length: simulate(FixedController(FixedOptions(num_draft=length)), copy.deepcopy(texts), knots, drafting)
            for length in (0, 1, 2, 3, 4, 6, 8, 12, 16)
        }
        own = simulate(auto(), texts, knots, drafting, seed=seed).rate
        to_best.append(own / max(result.rate for result in fixed.values()))
        to_plain.append(own / fixed[0].rate)
    return statistics.mean(to_best), min(to_plain)


@pytest.mark.parametrize("knots", COSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(kind, knots):
    """From a cold start over 220 tokens; measured 0.962 (drawn, linear) to 0.994 at worst of 10 seeds."""
    for seed in range(4):
        result = simulate(auto(), streams(seed, [(220, 0.0)]), COSTS[knots], KINDS[kind], seed=seed)
        assert result.rate > 0.95 * PLAIN_RATE


@pytest.mark.parametrize("knots", COSTS)
@pytest.mark.parametrize("probability", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("kind", ["look", "model"])
def test_constant_acceptance_comes_near_the_best_fixed_length(kind, probability, knots):
    """400 tokens from a cold start, learning included: measured 0.88 to 0.99 of the best in hindsight."""
    to_best, to_plain = against_best_fixed(COSTS[knots], KINDS[kind], [(400, probability)])
    assert to_best > 0.80
    assert to_plain > 0.93


@pytest.mark.parametrize("knots", COSTS)
@pytest.mark.parametrize("kind", ["look", "model"])
def test_changing_text_is_where_it_beats_every_fixed_length(kind, knots):
    parts = [(200, 0.02), (200, 0.9), (200, 0.02), (200, 0.9)]
    to_best, to_plain = against_best_fixed(COSTS[knots], KINDS[kind], parts)
    assert to_best > (0.96 if COSTS[knots] in (FLAT, LINEAR) else 1.02)
    assert to_plain > 0.96


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_back_soon_when_the_text_starts_to_repeat(kind):
    """After 300 tokens in which nothing paid: measured 20 to 28 tokens where looking is free, up to 110 with probes."""
    for seed in range(5):
        texts = streams(seed, [(300, 0.0), (300, 0.95)])
        result = simulate(auto(), texts, STAIRCASE, KINDS[kind], seed=seed)
        restart = next(
            emitted
            for drafted, (emitted, _) in zip(result.drafted, result.spent_until, strict=True)
            if drafted >= 4 and emitted > 300
        )
        assert restart < (350 if kind == "look" else 430)


def test_looking_is_free_so_nothing_is_drafted_in_vain():
    """Cut drafts are judged by what the target emitted: exploring costs no row once the drafter is known to be bad."""
    result = simulate(auto(), streams(0, [(2000, 0.0)]), QUANTISED, LOOK)
    assert sum(result.drafted[40:]) == 0
    blind = simulate(auto(), streams(0, [(2000, 0.0)]), QUANTISED, LOOK, pass_tokens=False)
    assert 0 < sum(blind.drafted[40:]) < 100


def test_without_emitted_tokens_it_still_backs_off_and_returns():
    for knots in (STAIRCASE, FLAT):
        result = simulate(auto(), streams(1, [(300, 0.0)]), knots, LOOK, pass_tokens=False)
        assert result.rate > 0.94 * PLAIN_RATE
        result = simulate(auto(), streams(1, [(300, 0.0), (400, 0.9)]), knots, LOOK, pass_tokens=False)
        assert result.rate > 1.15 * PLAIN_RATE


def test_a_retrieval_drafter_that_seldom_matches_gets_long_drafts_when_it_does():
    to_best, to_plain = against_best_fixed(FLAT, LOOK, [(600, 0.93)], availability=0.15)
    assert to_best > 0.9 and to_plain > 1.5


def test_in_a_batch_rows_add_up():
    """What pays alone does not pay for eight where rows cost their full price."""
    alone = simulate(auto(), streams(0, [(300, 0.6)]), QUANTISED, LOOK)
    assert statistics.mean(alone.drafted[20:]) > 1.5
    assert alone.rate > 1.4 * PLAIN_RATE
    to_best, to_plain = against_best_fixed(QUANTISED, LOOK, [(150, 0.6)], count=8)
    assert to_best > 0.93 and to_plain > 0.93
    to_best, _ = against_best_fixed(STAIRCASE, LOOK, [(150, 0.8)], count=8)
    assert to_best > 0.85


@pytest.mark.parametrize("kind", ["look", "model"])
def test_in_a_batch_the_rows_go_to_the_requests_that_use_them(kind):
    """Not all of them: on this staircase rows 9 to 16 are nearly free, so probes of the others are let through."""
    hopeful, hopeless = streams(0, [(300, 0.92)], 4), streams(1, [(300, 0.0)], 4)
    controller, spent = auto(), {}
    observe = controller.observe

    def counting(outcomes, seconds):
        for outcome in outcomes:
            spent[outcome.sequence_id] = spent.get(outcome.sequence_id, 0) + outcome.num_drafted
        observe(outcomes, seconds)

    controller.observe = counting
    simulate(controller, hopeful + hopeless, STAIRCASE, KINDS[kind])
    assert sum(spent[index] for index in range(4)) > 6 * sum(spent[index] for index in range(4, 8))


def test_confidence_decides_where_to_cut():
    """Half of the nodes are known to be bad by their confidence: they are left out, the others are drafted."""
    rng = random.Random(0)
    text = streams(0, [(3000, 1.0)])[0]
    text.confidence = [rng.choice([0.2, 0.9]) for _ in text.right]
    text.right = [rng.random() < (0.95 if value == 0.9 else 0.05) for value in text.confidence]
    blind = copy.deepcopy(text)
    blind.confidence = None
    seeing, unseeing = (simulate(auto(), [item], QUANTISED, LOOK) for item in (text, blind))
    assert seeing.rate > 1.08 * unseeing.rate
    wasted = [sum(result.drafted) - (result.emitted - len(result.drafted)) for result in (seeing, unseeing)]
    assert wasted[0] / sum(seeing.drafted) < 0.75 * wasted[1] / sum(unseeing.drafted)


def test_a_new_request_starts_from_what_the_drafter_did_for_others():
    controller = auto()
    simulate(controller, streams(0, [(300, 0.0)]), QUANTISED, LOOK)
    result = simulate(controller, streams(1, [(100, 0.0)]), QUANTISED, LOOK)
    assert sum(result.drafted) == 0


def learned(probability, **options):
    """A controller that has seen a drafter of constant acceptance."""
    controller = auto(**options)
    simulate(controller, streams(0, [(400, probability)]), FLAT, MODEL)
    return controller


def test_drawn_proposals_are_never_cut():
    """Whatever a proposal of drawn tokens looks like, deleting one changes the law of the rest."""
    controller = learned(0.0)
    signals = [RequestSignal(7, "synthetic", 20, 50)]
    for kind in (ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT):
        while not controller.budget(signals)[0]:
            controller.observe([RequestOutcome(7, "synthetic", 0, 0, 0, 1, (1,))], StepSeconds(1, 0, PLAIN, 0))
        drawn = Proposal(chain(1, [2, 3]), kind, {0: Law(None), 1: Law(None)}, (1.0, 0.01, 0.01))
        assert controller.select([drawn])[0] is drawn


def test_trees_are_cut_along_their_likely_paths():
    """The path 1, 3, 6 is right every time, its siblings never; their confidences say so."""
    controller = auto()
    tree = Tree((9, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 2, 3))
    confidence = (1.0, 0.95, 0.05, 0.95, 0.05, 0.05, 0.95)
    signal = RequestSignal(0, "tree", 30, 10)
    for _ in range(300):
        chosen = Proposal.empty(9)
        if controller.budget([signal])[0]:
            chosen = controller.select([Proposal(tree, confidence=confidence)])[0]
        kept = set(chosen.tree.tokens[1:])
        accepted = next((place for place, token in enumerate((1, 3, 6)) if token not in kept), 3)
        rows = chosen.tree.num_nodes
        outcome = RequestOutcome(0, "tree", rows - 1, 3, accepted, accepted + 1, (1, 3, 6, 8)[: accepted + 1])
        controller.observe([outcome], StepSeconds(rows, 1e-5, PLAIN * (1 + 0.25 * (rows - 1)), 0.0))
    assert chosen.tree == Tree((9, 1, 3, 6), (-1, 0, 1, 2))
    assert chosen.confidence == (1.0, 0.95, 0.95, 0.95)


def test_every_option_has_its_effect():
    """Conformance CLI (mlx-lm#1297): an option that is parsed and does nothing."""
    long = simulate(auto(max_draft=32), streams(0, [(600, 0.98)]), FLAT, LOOK)
    short = simulate(auto(max_draft=3), streams(0, [(600, 0.98)]), FLAT, LOOK)
    assert max(long.drafted) > 16 and max(short.drafted) == 3
    eager, wary = (simulate(auto(margin=margin), streams(0, [(600, 0.5)]), STAIRCASE, LOOK) for margin in (0.0, 3.0))
    assert sum(wary.drafted) < 0.7 * sum(eager.drafted)
    asked = {}
    for cheap_look in (0.0, 3.0):
        controller = auto(cheap_look=cheap_look)
        simulate(controller, streams(0, [(200, 0.0)]), QUANTISED, MODEL)
        asked[cheap_look] = sum(controller.budget([RequestSignal(9, "synthetic", 30, 5)])[0] > 0 for _ in range(5))
    assert asked == {0.0: 0, 3.0: 5}
    rare, frequent = (
        simulate(auto(probe_min=probe_min, probe_max=probe_max), streams(0, [(800, 0.0)]), FLAT, DRAWN)
        for probe_min, probe_max in ((100, 100), (5, 5))
    )
    assert sum(frequent.drafted[20:]) > 4 * sum(rare.drafted[20:]) > 0


def test_the_cost_of_sampling_counts():
    """Rules that judge every row pay the sampler per row: that price belongs to the draft."""

    class PerRow(GoodputController):
        def observe(self, outcomes, seconds):
            super().observe(
                outcomes, StepSeconds(seconds.rows, seconds.draft, seconds.verify, 0.8 * PLAIN * seconds.rows)
            )

    text = streams(0, [(500, 0.6)])
    free = simulate(auto(), copy.deepcopy(text), QUANTISED, LOOK)
    charged = simulate(PerRow(GoodputOptions()), copy.deepcopy(text), QUANTISED, LOOK)
    assert sum(charged.drafted) < 0.6 * sum(free.drafted)


def test_a_slow_first_proposal_does_not_brand_a_drafter():
    """The first proposal of a request catches up with its prompt; later ones do not."""
    controller = auto()
    for step in range(60):
        budget = controller.budget([RequestSignal(0, "retrieval", 30, 10)])[0]
        proposals = [Proposal(chain(1, [5] * budget))] if budget else []
        controller.select(proposals)
        seconds = StepSeconds(1, 0.0 if not budget else 10 * PLAIN if step < 2 else 2e-5, PLAIN, 0.0)
        controller.observe([RequestOutcome(0, "retrieval", 0, 0, 0, 1, (1,))], seconds)
    assert controller.budget([RequestSignal(0, "retrieval", 30, 10)])[0] == 16
