"""Every figure of summary.json, checked by hand on scripted arms."""

import json

import pytest

from draftsmith.bench.arrivals import OpenLoop
from draftsmith.bench.latency import Targets, latencies
from draftsmith.bench.repeats import Plan, repeated, widest
from draftsmith.bench.runner import blocks_of
from draftsmith.bench.runs import RequestRun
from draftsmith.bench.summary import summarise_run
from draftsmith.errors import OptionError
from tests.bench.fakes import ScriptedArm, config, measured_run, with_seconds, workload


@pytest.fixture
def arms():
    return {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 4, changes={"b": 5})}


def result_of(summary, arm):
    return next(item for item in summary["results"] if item["arm"] == arm)


def fixed(none=2.0, ngram=0.5):
    return lambda arm, block, repeat: {"none": none, "ngram": ngram}[arm]


def test_the_named_fields_are_there(arms):
    summary = summarise_run(measured_run(arms, workload("abc")))
    assert {"schema", "model", "hardware", "versions", "results", "load", "drift", "definitions"} <= summary.keys()
    for result in summary["results"]:
        assert result["engine"] == "scripted"
        assert result["bits_per_weight"] == 4.5
        assert result["memory_bytes"] == 1000
        assert result["seconds"].keys() == {"draft", "verify", "sample", "other"}
        assert result["latency"].keys() >= {"ttft", "tpot", "itl_step", "itl_token", "e2e", "goodput"}
    json.dumps(summary, allow_nan=False)


def test_counts(arms):
    none, ngram = summarise_run(measured_run(arms, workload("abc")))["results"]
    # 9 tokens a prompt: one from the prompt step, 8 plain steps or 2 steps of 4.
    assert (none["emitted_tokens"], none["steps"], none["tokens_per_step"]) == (27, 24, 1.0)
    assert (ngram["emitted_tokens"], ngram["steps"], ngram["tokens_per_step"]) == (27, 6, 4.0)
    assert (ngram["drafted_tokens"], ngram["accepted_tokens"], ngram["rows_per_token"]) == (18, 18, 1.0)
    assert [(item["trials"], item["accepted"], item["survival"]) for item in ngram["depths"]] == [(6, 6, 1.0)] * 3
    assert (none["identical"], none["divergent"]) == (3, 0)
    assert (ngram["identical"], ngram["divergent"], ngram["first_divergence"]) == (2, 1, 5)
    assert ngram["source"] == "event log"
    assert any(item["name"].startswith("vLLM") and item["value"] == 4.0 for item in ngram["conventions"])


def test_rates_are_totals_over_totals_and_parts_sum_to_the_wall_time(arms):
    none, ngram = summarise_run(measured_run(arms, workload("abc"), seconds=fixed()))["results"]
    assert none["tokens_per_second"] == pytest.approx(27 / 6)
    assert ngram["tokens_per_second"] == pytest.approx(27 / 1.5)
    assert ngram["speedup"] == {"ratio": 4.0, "low": 4.0, "high": 4.0, "items": 3}
    assert none["speedup"] is None
    for result in (none, ngram):
        assert sum(result["seconds"].values()) == pytest.approx(result["seconds_total"])
    assert none["seconds"]["verify"] == pytest.approx(27 * 0.01)


def test_concurrent_requests_share_steps_but_not_pairs(arms):
    ngram = result_of(summarise_run(measured_run(arms, workload("abcd", concurrency=4))), "ngram")
    assert (ngram["steps"], ngram["tokens_per_step"]) == (8, 4.0)
    assert ngram["seconds"]["verify"] == pytest.approx(3 * 0.01)


def test_failures_are_counted_by_reason_and_enter_nothing_else():
    arms = {
        "none": ScriptedArm("none", refuses=frozenset("d")),
        "ngram": ScriptedArm("ngram", 4, fails_on=frozenset("b")),
    }
    summary = summarise_run(measured_run(arms, workload("abcd"), seconds=fixed()))
    none, ngram = summary["results"]
    assert summary["failed_prompts"] == {"d is too long": 1}
    assert (none["failed_requests"], none["num_requests"], none["emitted_tokens"]) == ({}, 3, 27)
    assert (ngram["failed_requests"], ngram["num_requests"], ngram["emitted_tokens"]) == ({"no room": 1}, 2, 18)
    assert (ngram["speedup"]["ratio"], ngram["speedup"]["items"]) == (4.0, 2)
    assert ngram["tokens_per_second"] == pytest.approx(18)
    assert ngram["identical"] + ngram["divergent"] == 2


def test_a_block_with_a_failure_gives_no_speed_but_its_answers_are_compared():
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 4, fails_on=frozenset("b"))}
    work = workload("abcd", concurrency=2)
    ngram = result_of(summarise_run(measured_run(arms, work, seconds=fixed())), "ngram")
    assert (ngram["num_requests"], ngram["emitted_tokens"], ngram["seconds_total"]) == (3, 18, 0.5)
    assert ngram["identical"] == 3
    assert ngram["latency"]["e2e"]["count"] == 2


def test_an_arm_that_only_failed_has_no_rates(arms):
    arms["ngram"] = ScriptedArm("ngram", fails_on=frozenset("abc"))
    result = result_of(summarise_run(measured_run(arms, workload("abc"))), "ngram")
    assert (result["num_requests"], result["failed_requests"]) == (0, {"no room": 3})
    assert result["tokens_per_step"] is None
    assert result["tokens_per_second"] is None
    assert result["speedup"] == {"ratio": None, "low": None, "high": None, "items": 0}
    assert result["latency"]["ttft"] is None


def test_engines_without_an_event_log_tell_what_they_count(arms):
    arms["ngram"] = ScriptedArm("ngram", 4, logs=False, counts=True)
    arms["other"] = ScriptedArm("other", logs=False)
    summary = summarise_run(measured_run(arms, workload("abc")))
    ngram, other = result_of(summary, "ngram"), result_of(summary, "other")
    assert (ngram["source"], ngram["tokens_per_step"]) == ("the engine's own counters", 4.0)
    assert (ngram["drafted_tokens"], ngram["accepted_tokens"]) == (18, 18)
    assert (other["source"], other["tokens_per_step"], other["seconds"]) == (None, None, None)


def test_categories_only_where_the_data_have_them(arms):
    summary = summarise_run(measured_run(arms, workload("abc", categories=["x", "y", "x"])))
    categories = result_of(summary, "ngram")["categories"]
    assert {name: item["num_requests"] for name, item in categories.items()} == {"x": 2, "y": 1}
    assert (categories["y"]["divergent"], categories["x"]["divergent"]) == (1, 0)
    assert "categories" not in summarise_run(measured_run(arms, workload("abc")))["results"][0]


def test_an_interrupted_block_is_left_out_for_every_arm(arms):
    summary = summarise_run(measured_run(arms, workload("abc"), stop_after=3))
    assert summary["interrupted"]
    assert (summary["prompts_measured"], summary["prompts_given"]) == (1, 3)
    assert [item["num_requests"] for item in summary["results"]] == [1, 1]


def test_near_ties_are_told_apart(arms):
    def near(gap):
        return result_of(summarise_run(measured_run(arms, workload("abc"), gap=gap)), "ngram")["near_ties"]

    assert (near(5e-5), near(2e-4), near(None)) == (1, 0, 0)


class TestRepeats:
    """Measuring more than once."""

    def test_items_are_blocks_over_all_repeats(self, arms):
        def seconds(arm, block, repeat):
            return (2.0 if arm == "none" else 1.0) * (1 + repeat)

        summary = summarise_run(measured_run(arms, workload("abc"), seconds=seconds, repeats=3))
        ngram = result_of(summary, "ngram")
        assert ngram["speedup"] == {"ratio": 2.0, "low": 2.0, "high": 2.0, "items": 3}
        assert summary["repeats"] == 3
        assert ngram["num_requests"] == 9

    def test_where_there_is_one_block_repeats_are_items(self, arms):
        summary = summarise_run(
            measured_run(arms, workload("abc", open_loop=OpenLoop(times=(0.0, 0.0, 0.0))), seconds=fixed(), repeats=4)
        )
        assert result_of(summary, "ngram")["speedup"]["items"] == 4

    def test_noise_and_drift(self, arms):
        def seconds(arm, block, repeat):
            return [1.0, 1.0, 1.0, 2.0][repeat]

        summary = summarise_run(measured_run(arms, workload("ab"), seconds=seconds, repeats=4))
        rates = [9.0, 9.0, 9.0, 4.5]
        mean = sum(rates) / 4
        spread = (sum((rate - mean) ** 2 for rate in rates) / 3) ** 0.5 / mean
        assert summary["results"][0]["noise"] == pytest.approx(spread, abs=1e-6)
        assert summary["drift"] == pytest.approx((18 / 3) / (18 / 2))
        assert summarise_run(measured_run(arms, workload("ab")))["drift"] is None

    def test_answers_that_change_from_repeat_to_repeat_are_counted(self, arms):
        class Unsteady(ScriptedArm):
            def _tokens(self, ask, position, size):
                self.changes = {"a": 3} if len(self.asked) > 3 else {}
                return super()._tokens(ask, position, size)

        arms["ngram"] = Unsteady("ngram", 2)
        result = result_of(summarise_run(measured_run(arms, workload("abc"), repeats=2)), "ngram")
        assert (result["unsteady"], result["identical"]) == (1, 3)

    def measured(self, arms, plan, seconds):
        work = workload("abcd")
        made = repeated(arms, work, arms["none"].encode, blocks_of(work, [0, 1, 2, 3]), plan, config(arms, work))
        return [with_seconds(run, seconds(run)) for run in made]

    def test_it_stops_when_the_interval_is_narrow_enough(self, arms, monkeypatch):
        monkeypatch.setattr("draftsmith.bench.repeats.widest", lambda config, runs: 0.2 if len(runs) < 24 else 0.01)
        runs = self.measured(arms, Plan(repeats=9, precision=0.02), lambda run: 1.0)
        assert len(runs) == 24
        assert len(self.measured(arms, Plan(repeats=2, precision=0.001), lambda run: 1.0)) == 16

    def test_it_stops_when_time_is_up_with_all_arms_on_the_last_block(self, arms):
        arms["none"].step_seconds = 0.02
        runs = self.measured(arms, Plan(repeats=50, max_seconds=0.5), lambda run: 1.0)
        assert 2 <= len(runs) < 50
        assert len(runs) % 2 == 0

    def test_how_wide_the_widest_interval_is(self, arms):
        work = workload("abcd")
        measured = measured_run(arms, work, seconds=lambda arm, block, repeat: 1.0 + block * (arm == "none"))
        speedup = summarise_run(measured)["results"][1]["speedup"]
        reach = max(speedup["high"] / speedup["ratio"] - 1, 1 - speedup["low"] / speedup["ratio"])
        assert widest(measured.config, measured.runs) == pytest.approx(reach)
        assert widest(measured.config, measured.runs[:2]) == float("inf")

    @pytest.mark.parametrize("settings", [{"repeats": 0}, {"precision": 0.0}, {"max_seconds": -1.0}])
    def test_plans_out_of_range(self, settings):
        with pytest.raises(OptionError):
            Plan(**settings)


class TestLatency:
    """One request worked out by hand."""

    REQUEST = RequestRun(
        prompt=0, turn=0, prompt_id="", category="", due=1.0, sent=1.5, ended=4.0, num_tokens=6,
        arrivals=((2.0, 1), (3.0, 4), (4.0, 1)),
    )  # fmt: skip

    def test_times(self):
        found = latencies([self.REQUEST], 8.0, Targets())
        assert found["ttft"]["mean"] == 1.0
        assert found["tpot"]["mean"] == pytest.approx(2.0 / 5)
        assert (found["itl_step"]["count"], found["itl_step"]["mean"]) == (2, 1.0)
        assert (found["itl_token"]["count"], found["itl_token"]["mean"]) == (5, pytest.approx((4 * 0.25 + 1.0) / 5))
        assert found["e2e"]["mean"] == 3.0
        assert (found["requests_per_second"], found["goodput"]) == (0.125, None)

    @pytest.mark.parametrize(
        ("text", "met"),
        [("ttft=1", 1), ("ttft=0.9", 0), ("tpot=0.4", 1), ("tpot=0.39,ttft=9", 0), ("e2e=3", 1), ("e2e=2.9", 0)],
    )
    def test_goodput(self, text, met):
        found = latencies([self.REQUEST], 8.0, Targets.parse(text))
        assert found["goodput"] == {"requests_per_second": met / 8, "met": met}

    def test_one_token_has_no_time_between_tokens(self):
        request = RequestRun(
            prompt=0,
            turn=0,
            prompt_id="",
            category="",
            due=0.0,
            sent=0.0,
            ended=1.0,
            num_tokens=1,
            arrivals=((1.0, 1),),
        )
        found = latencies([request], 1.0, Targets(tpot=0.001))
        assert (found["tpot"], found["itl_step"], found["goodput"]["met"]) == (None, None, 1)

    @pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1", "speed=3", "ttft=nan", "ttft=x"])
    def test_unreadable_targets(self, text):
        with pytest.raises(OptionError, match="SECONDS"):
            Targets.parse(text)
