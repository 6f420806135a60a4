"""What the controllers learn from: cost of rows, cost planes, acceptance."""

import random
import statistics

import pytest

from draftsmith.control.acceptance import Calibration, RequestOdds, cell_of
from draftsmith.control.cost import KNOTS, PlaneCost, RowCost, knot_of
from tests.control.simulation import COSTS, PLAIN, seconds_of


def noisy(rng, seconds):
    """Half-normal slowness, one step in fifty four times as slow."""
    return seconds * (1 + 0.1 * abs(rng.gauss(0, 1))) * (4 if rng.random() < 0.02 else 1)


def test_knots_cover_every_row_count():
    assert [KNOTS[knot_of(rows)] for rows in (1, 2, 9, 10, 65, 66)] == [1, 2, 9, 11, 65, 97]
    assert knot_of(10**6) == len(KNOTS) - 1


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(4))
def test_relative_cost_is_learned_within_a_fifth(name, seed):
    rng, cost = random.Random(seed), RowCost()
    sizes = [1, 2, 3, 5, 9, 17]
    for _ in range(600):
        rows = rng.choice(sizes)
        cost.observe(rows, noisy(rng, seconds_of(rows, COSTS[name])))
    for rows in sizes:
        true = seconds_of(rows, COSTS[name]) / PLAIN
        assert cost.seconds(rows) / cost.seconds(1) == pytest.approx(true, rel=0.2)
    assert cost.relative == sorted(cost.relative)


def test_one_slow_step_is_not_the_price_of_its_rows():
    """The first forward of a new row count met another process; believing it would rule the count out for good."""
    cost = RowCost()
    for _ in range(20):
        cost.observe(1, PLAIN)
    cost.observe(9, 20 * PLAIN)
    assert cost.seconds(9) < 6 * PLAIN
    cost.observe(9, 1.5 * PLAIN)
    assert cost.seconds(9) == pytest.approx(1.5 * PLAIN, rel=0.2)
    for _ in range(20):
        cost.observe(9, 1.5 * PLAIN)
    before = cost.seconds(9)
    cost.observe(9, 20 * PLAIN)
    assert cost.seconds(9) < 1.3 * before


def test_a_slower_machine_slows_all_row_counts_alike():
    """Drafting must not look dear because it was going on when the machine got busy."""
    cost = RowCost()
    for _ in range(100):
        cost.observe(1, PLAIN)
        cost.observe(9, 2 * PLAIN)
    for _ in range(30):
        cost.observe(9, 6 * PLAIN)
    assert cost.seconds(9) == pytest.approx(6 * PLAIN, rel=0.1)
    assert cost.seconds(9) / cost.seconds(1) == pytest.approx(2, rel=0.35)


def test_what_was_not_seen_is_taken_as_cheap_as_its_neighbours_allow():
    cost = RowCost()
    for _ in range(40):
        cost.observe(8, 8 * PLAIN)
        cost.observe(33, 20 * PLAIN)
    assert cost.seconds(4) == pytest.approx(4 * PLAIN, rel=0.05)  # two forwards of 4 do what one of 8 does
    assert 9 * PLAIN < cost.seconds(17) < 16 * PLAIN
    assert cost.seconds(65) > 20 * PLAIN


def test_rows_count_as_explored_when_seen_twice():
    cost = RowCost()
    cost.observe(3, PLAIN)
    assert cost.num_explored == 0
    cost.observe(3, PLAIN)
    cost.observe(9, PLAIN)
    assert cost.num_explored == 3


def test_a_plane_is_fitted_and_followed():
    rng, plane = random.Random(0), PlaneCost()
    for first, second in ((2e-4, 1e-3), (5e-4, 3e-4)):
        for _ in range(300):
            x, y = rng.randint(1, 4), rng.randint(0, 8)
            plane.observe(x, y, (first * x + second * y) * (1 + 0.02 * rng.gauss(0, 1)))
        assert plane.first == pytest.approx(first, rel=0.1)
        assert plane.second == pytest.approx(second, rel=0.1)


def test_a_plane_is_never_negative():
    plane = PlaneCost()
    for _ in range(20):
        plane.observe(1, 8, 1e-3)
        plane.observe(8, 1, 0.0)
        assert plane.first >= 0 and plane.second >= 0


def test_confidence_is_worth_what_it_proved_to_be():
    rng, calibration = random.Random(1), Calibration()
    truth = {0.25: 0.1, 0.75: 0.6, 0.95: 0.97}
    for _ in range(1500):
        confidence = rng.choice(list(truth))
        calibration.observe([(cell_of(1, confidence), rng.random() < truth[confidence])], RequestOdds())
    for confidence, probability in truth.items():
        assert calibration.probability(cell_of(1, confidence)) == pytest.approx(probability, abs=0.15)


def test_an_unseen_depth_is_guessed_from_the_one_above():
    calibration = Calibration()
    for _ in range(50):
        calibration.observe([(cell_of(1, 0.5), True)], RequestOdds())
    assert calibration.plan(RequestOdds(), 3, 0.0)[2] > 0.7
    for _ in range(50):
        calibration.observe([(cell_of(1, 0.5), False)], RequestOdds())
    assert calibration.plan(RequestOdds(), 3, 0.0)[0] < 0.6


def test_a_request_that_does_worse_than_its_drafter_is_told_apart():
    rng, calibration = random.Random(2), Calibration()
    good, bad = RequestOdds(), RequestOdds()
    for _ in range(200):
        calibration.observe([(cell_of(1, 0.5), rng.random() < 0.8)], good)
        calibration.observe([(cell_of(1, 0.5), rng.random() < 0.1)], bad)
    assert calibration.plan(good, 1, 0.0)[0] > 0.6
    assert calibration.plan(bad, 1, 0.0)[0] < 0.3
    for _ in range(25):  # its text changes
        calibration.observe([(cell_of(1, 0.5), True)], bad)
    assert calibration.plan(bad, 1, 0.0)[0] > 0.6


def test_reaches_of_a_tree_multiply_along_its_paths():
    calibration, odds = Calibration(), RequestOdds()
    rng = random.Random(3)
    for _ in range(400):
        calibration.observe([(cell_of(1 + rng.randrange(3), 0.5), rng.random() < 0.7)], odds)
    one, two, three = (calibration.probability(cell_of(depth, 0.5)) for depth in (1, 2, 3))
    odds = RequestOdds()
    reaches = calibration.reaches((-1, 0, 0, 1, 2, 3), (1.0, *[0.5] * 5), odds, 0.0)
    assert reaches == pytest.approx([one, one, one * two, one * two, one * two * three])
    chain = calibration.reaches((-1, 0, 1, 2), None, odds, 0.0)
    assert len(chain) == 3 and chain == sorted(chain, reverse=True)
    least = statistics.mean(reaches)
    assert calibration.reaches((-1, 0, 0, 1, 2, 3), (1.0, *[0.5] * 5), odds, least) == [
        reach for reach in reaches if reach >= least
    ]
