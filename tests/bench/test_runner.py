"""The arms: paired, interleaved, in blocks, failures counted."""

import pytest

from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runner import Workload, arms_of, blocks_of, measure, usable_prompts, warm_up
from draftsmith.errors import OptionError
from tests.bench.fakes import ScriptedEngine, workload


def arms(**changes):
    engines = {
        "none": ScriptedEngine("none"),
        "ngram": ScriptedEngine("ngram", 2),
        "suffix": ScriptedEngine("suffix", 4),
    }
    return engines | changes


def test_the_baseline_is_always_the_first_arm():
    assert arms_of("ngram,suffix") == ["none", "ngram", "suffix"]
    assert arms_of(" suffix , none ") == ["none", "suffix"]
    assert arms_of("none") == ["none"]
    assert arms_of("ngram:max_ngram=4,suffix") == ["none", "ngram:max_ngram=4", "suffix"]


@pytest.mark.parametrize("text", ["", "none,", "ngram,ngram", "none,none"])
def test_unusable_lists_of_arms(text):
    with pytest.raises(OptionError):
        arms_of(text)


def test_blocks_hold_at_most_the_concurrency_and_one_category():
    work = workload("abcdefg", categories=["x", "x", "x", "y", "y", "x", "x"], concurrency=2)
    assert blocks_of(work, [0, 1, 2, 3, 4, 5, 6]) == [(0, 1), (2, 5), (3, 4), (6,)]
    assert blocks_of(work, [0, 2, 6]) == [(0, 2), (6,)]
    alternating = workload("abcdef", categories=["x", "y"] * 3, concurrency=3)
    assert blocks_of(alternating, range(6)) == [(0, 2, 4), (1, 3, 5)]
    assert blocks_of(workload("abc"), [0, 1, 2]) == [(0,), (1,), (2,)]


def test_every_arm_gets_the_same_prompts_and_settings():
    engines, work = arms(), workload("abcd", concurrency=2)
    list(measure(engines, work, [(0, 1), (2, 3)]))
    calls = [engine.calls for engine in engines.values()]
    assert calls[0] == calls[1] == calls[2]
    assert [call[0] for call in calls[0]] == [("a", "b"), ("c", "d")]


def test_arms_are_interleaved_in_an_order_that_the_seed_decides():
    def orders(seed):
        work = workload("abcdefghijkl", seed=seed)
        runs = list(measure(arms(), work, [(i,) for i in range(12)]))
        return [tuple(run.drafter for run in runs[3 * i : 3 * i + 3]) for i in range(12)]

    first = orders(0)
    assert all(sorted(order) == ["ngram", "none", "suffix"] for order in first)
    assert len(set(first)) > 2
    assert first == orders(0) != orders(1)


def test_outputs_and_requests_belong_together():
    engines, work = arms(), workload("abcd", concurrency=2)
    runs = list(measure(engines, work, [(0, 1), (2, 3)]))
    for run in runs:
        assert run.prompts == tuple(output.prompt for output in run.outputs)
        for output in run.outputs:
            records = [item for item in run.events.requests if item.request == output.request]
            assert sum(item.emitted for item in records) == len(output.token_ids) == 9
            assert output.prompt_id == f"id{output.prompt}"


def test_a_prompt_that_no_arm_can_take_is_found_before_measuring():
    engine = ScriptedEngine("none", refuses=frozenset("b"))
    usable, failed = usable_prompts(workload("abc"), engine)
    assert usable == [0, 2]
    assert failed == {1: "b is too long"}
    assert engine.calls == []


def test_a_system_message_comes_first_and_no_raw_text_can_carry_it():
    prompts = [Prompt(prompt_id="a", turns=("Hi", "Bye"), system="Be brief."), Prompt(prompt_id="b", turns=("Hi",))]
    work = Workload(prompts=prompts, settings={})
    assert work.request(0) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    raw = Workload(prompts=prompts, settings={}, raw=True)
    usable, failed = usable_prompts(raw, ScriptedEngine("none"))
    assert usable == [1]
    assert "prompt a has a system message" in failed[0]


def test_a_failed_block_has_an_error_and_no_numbers():
    engines = arms(ngram=ScriptedEngine("ngram", 2, fails_on=frozenset("b")))
    runs = list(measure(engines, workload("ab"), [(0,), (1,)]))
    failed = [run for run in runs if run.error is not None]
    assert [(run.drafter, run.block, run.error) for run in failed] == [("ngram", 1, "no room")]
    assert failed[0].outputs == ()
    assert failed[0].emitted == 0
    assert failed[0].events.requests == []


def test_an_answer_that_did_not_end_by_itself_is_a_failure():
    class Cancelling(ScriptedEngine):
        def generate(self, prompts, **settings):
            results = super().generate(prompts, **settings)
            results[0].finish_reason = "cancelled"
            return results

    runs = list(measure({"none": Cancelling("none")}, workload("a"), [(0,)]))
    assert runs[0].error == "ended as cancelled"


def test_the_warm_up_is_no_prompt_of_the_workload_and_leaves_no_events():
    engines, work = arms(), workload("ab", concurrency=2)
    warm_up(engines, work)
    for engine in engines.values():
        ((texts, _, settings),) = engine.calls
        assert len(texts) == 2
        assert not set(texts) & {"a", "b"}
        assert settings["ignore_eos"]
        assert engine.take_events().steps == []
