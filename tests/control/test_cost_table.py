"""Measured costs: interpolation along the staircase, what a log changes, and what is refused."""

import dataclasses
import json

import pytest

from draftsmith.control.base import RequestOutcome, StepSeconds
from draftsmith.control.cost import KNOTS, CalibratedRows, DraftCost
from draftsmith.control.cost_table import CostTable, DraftSeconds
from draftsmith.control.pricing import Pricing
from draftsmith.core.isotonic import ascending
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.errors import DataError

TABLE = CostTable(
    rows=(1, 4, 8, 9, 16),
    contexts=(100, 1100),
    verify=((1e-3, 1.3e-3, 1.7e-3, 2.7e-3, 3.4e-3), (2e-3, 2.6e-3, 3.4e-3, 5.4e-3, 6.8e-3)),
    spread=((0.01,) * 5,) * 2,
    request=1e-5,
    request_context=1e-8,
    own_step=1e-4,
    own_request=2e-5,
    own_row=3e-6,
    draft={"model": DraftSeconds(request=1e-4, level=5e-4, pending=2e-6)},
)


def test_what_lies_between_knots_is_interpolated_and_stairs_stay_stairs():
    assert TABLE.verify_seconds(1, 100) == 1e-3
    assert TABLE.verify_seconds(6, 100) == pytest.approx(1.5e-3)
    assert TABLE.verify_seconds(8, 100) == 1.7e-3 and TABLE.verify_seconds(9, 100) == pytest.approx(2.7e-3)
    assert TABLE.verify_seconds(1, 600) == pytest.approx(1.5e-3)
    # Beyond the table the last stretch goes on; before it there is nothing to gain.
    assert TABLE.verify_seconds(23, 100) == pytest.approx(4.1e-3)
    assert TABLE.verify_seconds(1, 2100) == pytest.approx(3e-3)
    assert TABLE.verify_seconds(1, 0) == TABLE.verify_seconds(1, 100)


def test_longer_contexts_than_measured_never_turn_the_rows_around():
    """Regression: each row count followed its own two last medians, so noise made three rows dearer than eight."""
    noisy = dataclasses.replace(
        TABLE, verify=((1.6e-3, 1.61e-3, 1.7e-3, 3.3e-3, 3.4e-3), (1.5e-3, 2.6e-3, 2.7e-3, 3.4e-3, 3.5e-3))
    )
    for context in (0, 100, 700, 1100, 4000, 30_000):
        seconds = [noisy.verify_seconds(rows, context) for rows in range(1, 40)]
        assert seconds == sorted(seconds) and seconds[0] > 0, context
    growth = noisy.verify_seconds(1, 2100) / noisy.verify_seconds(1, 1100)
    assert growth == pytest.approx(1 + (13.7 - 11.61) / 13.7)
    falling = dataclasses.replace(TABLE, verify=TABLE.verify[::-1])
    assert falling.verify_seconds(1, 9000) == 1e-3


def test_a_step_is_the_sum_of_its_parts():
    forward = TABLE.verify_seconds(8, 100) + 3 * (1e-5 + 1e-6)
    assert TABLE.verify_seconds(8, 100, 4) == pytest.approx(forward)
    own = 1e-4 + 4 * 2e-5 + 8 * 3e-6
    assert TABLE.step_seconds(8, 100, 4) == pytest.approx(forward + own)
    drafting = 4 * 1e-4 + 3 * 5e-4
    assert TABLE.step_seconds(8, 100, 4, drafter="model", passes=3) == pytest.approx(forward + own + drafting)
    assert TABLE.draft["model"].seconds(1, 2, 1000) == pytest.approx(1e-4 + 1e-3 + 2e-3)


def log_of(steps):
    """(rows, seconds, prompt) each, one request at context 100."""
    log = EventLog()
    for number, (rows, seconds, prompt) in enumerate(steps):
        log.append_step(StepRecord(number, rows, 1, 100, 0.0, seconds, 0.0, 0.0))
        log.append_request(RequestStepRecord(number, 0, number, "x", rows - 1, rows - 1, 0, 1, None, prompt))
    return log


def test_a_log_moves_the_rows_it_saw():
    """32 steps weigh as much as the measurement: 32 of 4 rows that took 1.4 times as long make 1.2."""
    found = TABLE.refreshed(log_of([(4, 1.4 * 1.3e-3, False)] * 32))
    assert found.verify_seconds(4, 100) == pytest.approx(1.2 * 1.3e-3)
    assert found.verify_seconds(4, 1100) == pytest.approx(1.2 * 2.6e-3)
    assert found.verify_seconds(1, 100) == 1e-3
    assert TABLE.verify_seconds(4, 100) == 1.3e-3
    # Prompt steps say nothing, nor does one forward beside another process.
    assert TABLE.refreshed(log_of([(4, 1.0, True)] * 50)) == TABLE
    calm = TABLE.refreshed(log_of([(4, 1.3e-3, False)] * 31 + [(4, 1.0, False)]))
    assert calm.verify_seconds(4, 100) == pytest.approx(1.3e-3, rel=0.02)


def test_a_refreshed_table_still_never_falls():
    found = TABLE.refreshed(log_of([(4, 3.0 * 1.3e-3, False)] * 500))
    for line in found.verify:
        assert list(line) == sorted(line)


def test_json_there_and_back():
    assert CostTable.from_json(json.loads(json.dumps(TABLE.as_json())), "x") == TABLE


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data.update(draftsmith_costs=99), "no cost table of this version"),
        (lambda data: data.pop("rows"), "damaged"),
        (lambda data: data.update(rows=[1, 4, 4, 9, 16]), "ascending"),
        (lambda data: data["verify"][0].__setitem__(4, 1e-9), "never fall"),
        (lambda data: data["verify"].pop(), "2 lines"),
        (lambda data: data.update(draft={"m": {"request": 1}}), "damaged"),
        (lambda data: data.update(draft=[]), "damaged"),
        (lambda data: data["spread"][0].__setitem__(0, "x"), "damaged"),
        (lambda data: data.update(rows=[1e999]), "damaged"),
    ],
)
def test_damaged_tables_are_refused_in_one_line(change, complaint):
    data = json.loads(json.dumps(TABLE.as_json()))
    change(data)
    with pytest.raises(DataError, match=complaint):
        CostTable.from_json(data, "costs.json")


def test_the_nearest_ascending_sequence():
    assert ascending([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert ascending([3, 2, 1]) == [2, 2, 2]
    assert ascending([3, 1], [1, 3]) == [1.5, 1.5]
    assert ascending([]) == []


def test_calibrated_rows_follow_load_and_keep_the_stairs():
    rows = CalibratedRows(TABLE)
    rows.set_context(100, 1)
    assert rows.seconds(8) == pytest.approx(1.7e-3) and rows.num_explored == KNOTS[-1]
    for _ in range(100):
        rows.observe(1, 2e-3)  # a busy machine
    assert rows.seconds(1) == pytest.approx(2e-3, rel=0.05)
    assert rows.seconds(9) / rows.seconds(8) == pytest.approx(2.7 / 1.7, rel=0.05)
    rows.set_context(1100, 1)
    assert rows.seconds(8) == pytest.approx(6.8e-3, rel=0.1)
    assert rows.relative == sorted(rows.relative)


def test_a_start_is_told_from_drafting():
    cost = DraftCost()
    cost.start_from(1e-4, 5e-4, 2e-6)
    assert cost.is_timed and cost.seconds(2, 3) == pytest.approx(2e-4 + 1.5e-3, rel=0.02)
    cost = DraftCost()
    assert cost.pending is None and not cost.is_timed
    for _ in range(20):
        cost.observe(1, 4, 2e-3)
    cost.observe_start(1000, 0.5)
    assert cost.pending == pytest.approx(5e-4)
    cost.observe_start(1000, 0.6)
    assert 5e-4 < cost.pending < 6e-4
    assert cost.seconds(1, 4) == pytest.approx(2e-3, rel=0.02)


def test_what_was_not_measured_is_no_zero():
    """An interrupted calibration knows forwards alone: predictions leave the rest out, controllers learn it."""
    table = dataclasses.replace(
        TABLE, request=None, request_context=None, own_step=None, own_request=None, own_row=None
    )
    assert CostTable.from_json(json.loads(json.dumps(table.as_json())), "x") == table
    assert table.step_seconds(8, 100, 4) == TABLE.verify_seconds(8, 100)
    learned = [Pricing(0.0), Pricing(0.0)]
    learned[1].start_from(table)
    for pricing in learned:
        pricing.observe([RequestOutcome(0, "m", 0, 0, 0, 1)], StepSeconds(1, 0.0, 1e-3, 5e-4), 0.0)
    # Regression: eight made-up observations of zero seconds outweighed what was seen.
    assert learned[1].sampling_seconds(1, 1) == learned[0].sampling_seconds(1, 1) > 4e-4
    start = DraftSeconds(request=1e-4, level=5e-4, pending=None)
    again = CostTable.from_json(json.loads(json.dumps(table.with_draft("m", start).as_json())), "x")
    assert again.draft["m"] == start and start.seconds(1, 2, 1000) == pytest.approx(1.1e-3)
    cost = DraftCost()
    cost.start_from(start.request, start.level, start.pending)
    assert cost.is_timed and cost.pending is None


def test_tables_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE.request = 0.0
    assert TABLE.with_draft("other", DraftSeconds(request=0, level=0, pending=0)).draft.keys() == {"model", "other"}
