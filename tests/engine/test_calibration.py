"""Measuring costs: nothing is left behind, the fits find what was put in, and the engine uses what is kept."""

import json

import pytest

from draftsmith.control.cost_table import CostTable
from draftsmith.control.goodput import GoodputController
from draftsmith.core.stats import EventLog, StepRecord
from draftsmith.engine import calibration
from draftsmith.engine.calibration import SWEEP, DraftRecord, Sweep, fit_draft, fit_own, measure_verify
from draftsmith.engine.cost_store import check_cost_directory, cost_directory, cost_file, read_costs, write_costs
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.errors import OptionError
from tests.engine.fakes import tiny_engine, tiny_model


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))


class Clock:
    """Time that passes by rows alone: 1 ms a forward and 0.1 ms a row, 2 ms more from 9 rows on."""

    def __init__(self, monkeypatch, backend):
        self.now = 0.0
        real = backend.score

        def score(groups, taps=frozenset()):
            rows = sum(len(group.tokens) for group in groups)
            self.now += 1e-3 + 1e-4 * rows + (2e-3 if rows > 8 else 0.0) + 5e-5 * (len(groups) - 1)
            return real(groups, taps)

        monkeypatch.setattr(backend, "score", score)
        monkeypatch.setattr(calibration, "perf_counter", lambda: self.now)


def test_the_staircase_is_found_and_nothing_stays_in_the_cache(monkeypatch):
    backend = tiny_model(max_context=300).backend
    Clock(monkeypatch, backend)
    told = []
    sweep = Sweep(rows=(1, 2, 4, 8, 9, 16), contexts=(16, 64, 4096), repeats=3)
    table = measure_verify(backend, sweep, {"model": "tiny"}, lambda done, total, words: told.append((done, total)))
    assert table.contexts == (16, 64)  # the model knows no longer ones
    for context in (16, 40, 64):
        assert table.verify_seconds(8, context) == pytest.approx(1.8e-3)
        assert table.verify_seconds(9, context) == pytest.approx(3.9e-3)
        assert table.verify_seconds(12, context) == pytest.approx(4.2e-3)
    assert backend.cache.sequence_ids == []
    assert told[-1][0] == told[-1][1] and [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_further_sequence_has_its_price(monkeypatch):
    backend = tiny_model(max_context=2000).backend
    Clock(monkeypatch, backend)
    sweep = Sweep(rows=(1, 2, 4, 8, 9, 16, 32), contexts=(16, 256, 1100), repeats=3)
    table = measure_verify(backend, sweep, {}, lambda *_: None)
    assert table.request == pytest.approx(5e-5, rel=0.01)
    assert table.request_context == pytest.approx(0.0, abs=1e-9)


def test_an_interrupted_measurement_leaves_nothing(monkeypatch):
    backend = tiny_model(max_context=300).backend
    calls = []

    def interrupt(done, total, words):
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_verify(backend, Sweep(rows=(1, 2), contexts=(16, 32), repeats=2), {}, interrupt)
    assert backend.cache.sequence_ids == []


def test_draft_costs_are_fitted():
    records = [
        DraftRecord(asked, passes, 0, 1e-4 * asked + 5e-4 * passes)
        for asked in (1, 4)
        for passes in (1, 2, 4, 8)
        for _ in range(5)
    ]
    records += [DraftRecord(1, 4, 1000, 1e-4 + 2e-3 + 0.3), DraftRecord(1, 2, 0, 9.0)]  # a start, a disturbed step
    cost = fit_draft(records)
    assert cost.request == pytest.approx(1e-4, rel=1e-3) and cost.level == pytest.approx(5e-4, rel=1e-3)
    assert cost.pending == pytest.approx(3e-4, rel=1e-3) and cost.error < 1e-3
    # Regression: a drafter nobody saw draft was taken to draft for nothing, and a start nobody saw to be free.
    assert fit_draft([]) is None and fit_draft([DraftRecord(1, 4, 1000, 0.3)]) is None
    assert fit_draft(records[:8]).pending is None
    # Of a combination what counts is the part that asks on the way; the other one is as good as free.
    both = [record._replace(has_paused=True) for record in records] + [DraftRecord(1, 4, 0, 2e-5)] * 200
    assert fit_draft(both) == cost


def test_the_engines_own_share_is_fitted():
    log = EventLog()
    for number in range(40):
        requests, rows = 1 + number % 4, 1 + number % 7
        sample = 2e-5 * requests + 3e-6 * rows
        log.append_step(StepRecord(number, rows, requests, 0, 0.0, 1e-3, sample, 1e-4 + 1e-5 * requests))
    base, request, row = fit_own(log)
    assert base == pytest.approx(1e-4) and request == pytest.approx(3e-5) and row == pytest.approx(3e-6)


def test_what_no_step_showed_is_not_measured(monkeypatch):
    assert fit_own(EventLog()) == (None, None, None)
    backend = tiny_model(max_context=100).backend
    Clock(monkeypatch, backend)
    table = measure_verify(backend, Sweep(rows=(1, 8), contexts=(16,), repeats=3), {}, lambda *_: None)
    assert table.request is None and table.request_context is None and table.own_step is None


def test_a_context_shorter_than_the_largest_forward(monkeypatch):
    backend = tiny_model(max_context=40).backend
    Clock(monkeypatch, backend)
    table = measure_verify(backend, Sweep(repeats=3), {}, lambda *_: None)
    assert table.rows[-1] < 40 and table.contexts[-1] + table.rows[-1] <= 40


def test_a_place_that_cannot_be_written_is_told_of(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OptionError, match="costs cannot be kept in"):
        check_cost_directory()
    assert read_costs({"digest": "a"}) is None
    monkeypatch.setenv("DRAFTSMITH_CACHE", "")  # as good as unset
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_directory() == tmp_path / "draftsmith" / "costs"


def test_a_sweep_through_the_engine_records_starts_and_passes():
    engine = tiny_engine(drafter="draft_model:model=other", controller=SWEEP, max_batch=2, prefix_cache=False)
    engine.generate([[1] * 60, [2] * 60], max_new_tokens=20, ignore_eos=True)
    records = engine.controller.records
    assert records[0].pending >= 120 and records[0].asked == 2
    assert {record.passes for record in records if not record.pending} >= {1, 2, 4}


def test_kept_costs_reach_the_controller(caplog):
    table = CostTable(rows=(1, 8), contexts=(64,), verify=((1e-3, 2e-3),), spread=((0.0, 0.0),))
    identity = {"digest": "a", "threads": 2}
    assert read_costs(identity) is None and read_costs({}) is None
    write_costs(table, cost_file(identity))
    assert read_costs(identity) == table and read_costs({**identity, "threads": 1}) is None
    model = tiny_model()
    object.__setattr__(model, "identity", identity)
    heard = []
    original = GoodputController.start_from
    try:
        GoodputController.start_from = lambda self, costs: heard.append(costs)
        Engine(model, EngineSettings(drafter="none", memory_bytes=1 << 26))
    finally:
        GoodputController.start_from = original
    assert heard == [table]
    cost_file(identity).write_text("{", encoding="utf-8")
    assert read_costs(identity) is None and "damaged" in caplog.text
    cost_file(identity).write_text(json.dumps({"draftsmith_costs": 0}), encoding="utf-8")
    assert read_costs(identity) is None
    # Regression: these stopped every engine.
    for damaged in (b"\xff", b'{"rows": ' + b"9" * 5000 + b"}"):
        caplog.clear()
        cost_file(identity).write_bytes(damaged)
        assert read_costs(identity) is None and "is damaged" in caplog.text
    cost_file(identity).unlink()
    cost_file(identity).mkdir()
    assert read_costs(identity) is None and "cannot be read" in caplog.text
