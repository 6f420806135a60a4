"""Which nodes pay, against a literal evaluation of every count that could."""

import random

import pytest

from draftsmith.control.base import RequestOutcome, StepSeconds
from draftsmith.control.cost import KNOTS, DraftCost
from draftsmith.control.pricing import Choice, Pricing


def pricing_of(seed, margin, explored):
    """A `Pricing` whose rows follow a staircase, after some steps."""
    dice = random.Random(seed)
    pricing = Pricing(margin)
    for _ in range(40):
        rows = dice.choice([rows for rows in KNOTS if rows <= explored])
        outcome = RequestOutcome(0, "d", rows - 1, rows - 1, 0, 1)
        pricing.observe([outcome], StepSeconds(rows, 0.0, 1e-3 * (1.0 + 0.2 * (rows // 4)), 1e-4), 0.0)
    return pricing


def literal_choice(pricing, margin, nodes, num_requests, base_rows, draft, num_asked):
    rate, own, best = pricing.rate(num_requests), pricing._sampling, Choice(0, 0.0)
    most = min(len(nodes), max(2 * pricing.rows.num_explored - base_rows, 1))
    for count in range(1, most + 1):
        rows = base_rows + count
        if rows > KNOTS[-1] or (rows not in KNOTS and count < most):
            continue
        tokens = sum(reach for reach, _, _ in nodes[:count])
        seconds = pricing.rows.seconds(rows) - pricing.rows.seconds(base_rows) + own.second * count
        if draft is not None:
            seconds += draft.seconds(num_asked, max(-depth for _, depth, _ in nodes[:count]))
        value = tokens * (1.0 - rate * own.first) - rate * (1.0 + margin) * seconds
        if value > best.surplus + 1e-12:
            best = Choice(count, value)
    return best


@pytest.mark.parametrize("is_dear", [False, True], ids=["drafted", "to be drafted"])
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_the_best_of_all_counts_is_chosen(margin, is_dear):
    chosen = set()
    for seed in range(150):
        dice = random.Random(seed)
        pricing = pricing_of(seed, margin, dice.choice([2, 8, 33]))
        num_requests = dice.choice([1, 3, 8])
        base_rows = num_requests + dice.choice([0, 5])
        nodes = sorted(
            ((dice.random() ** 2, -dice.randint(1, 6), dice.randrange(8)) for _ in range(dice.randint(1, 70))),
            reverse=True,
        )
        draft = None
        if is_dear:
            draft = DraftCost()
            draft.start_from(dice.choice([0.0, 1e-5]), dice.choice([1e-5, 1e-4]), None)
        found = pricing.choose(nodes, num_requests, base_rows, draft, num_requests)
        expected = literal_choice(pricing, margin, nodes, num_requests, base_rows, draft, num_requests)
        assert found.num_nodes == expected.num_nodes
        assert found.surplus == pytest.approx(expected.surplus, abs=1e-9)
        chosen.add(found.num_nodes)
    assert 0 in chosen and len(chosen) > 8


def test_nothing_is_chosen_beyond_what_can_be_priced():
    pricing = pricing_of(0, 0.1, 33)
    nodes = [(0.99, -1, 0)] * 10
    for base_rows in (KNOTS[-1], KNOTS[-1] + 1, 2 * KNOTS[-1]):
        assert pricing.choose(nodes, 1, base_rows) == Choice(0, 0.0)
    assert pricing.choose(nodes, 1, KNOTS[-1] - 1).num_nodes <= 1
    assert pricing.choose([], 1, 1) == Choice(0, 0.0)
    assert Pricing(0.1).choose(nodes, 1, 1) == Choice(0, 0.0)  # before any step
