"""The arms: paired, interleaved, in blocks, conversations continued, failures on record."""

import time

import pytest

from draftsmith.bench.arrivals import OpenLoop
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runner import Workload, blocks_of, measure, run_block, usable_prompts, warm_up
from draftsmith.errors import OptionError
from tests.bench.fakes import NUM_TOKENS, ScriptedArm, workload


def arms(**changes):
    made = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 2), "suffix": ScriptedArm("suffix", 4)}
    return made | changes


def run_one(arm, work, block):
    return run_block(arm, work, arm.encode, block=block, number=0, repeat=0, order=0)


def test_blocks_hold_at_most_the_concurrency_and_one_category():
    work = workload("abcdefg", categories=["x", "x", "x", "y", "y", "x", "x"], concurrency=2)
    assert blocks_of(work, [0, 1, 2, 3, 4, 5, 6]) == [(0, 1), (2, 5), (3, 4), (6,)]
    assert blocks_of(work, [0, 2, 6]) == [(0, 2), (6,)]
    alternating = workload("abcdef", categories=["x", "y"] * 3, concurrency=3)
    assert blocks_of(alternating, range(6)) == [(0, 2, 4), (1, 3, 5)]
    assert blocks_of(workload("abc"), [0, 1, 2]) == [(0,), (1,), (2,)]


def test_an_open_loop_is_one_block_that_uses_prompts_in_turn():
    work = workload("abc", open_loop=OpenLoop(times=(0.0, 0.1, 0.2, 0.3, 0.4)))
    assert blocks_of(work, [0, 2]) == [(0, 2, 0, 2, 0)]
    assert blocks_of(work, []) == []


def test_settings_out_of_range_are_refused():
    for settings in ({"concurrency": 0}, {"timeout": 0.0}):
        with pytest.raises(OptionError):
            workload("a", **settings)


def test_every_arm_gets_the_same_prompts_and_settings():
    made, work = arms(), workload("abcd", concurrency=2, temperature=0.5, seed=3)
    list(measure(made, work, made["none"].encode, [(0, 1), (2, 3)]))
    asked = [arm.asked for arm in made.values()]
    assert asked[0] == asked[1] == asked[2]
    assert [(ask.text, ask.temperature, ask.seed) for ask in asked[0]] == [(text, 0.5, 3) for text in "abcd"]
    assert [list(ask.ids) for ask in asked[0]] == [[ord(text)] for text in "abcd"]


def test_arms_are_interleaved_in_an_order_that_the_seed_decides():
    def orders(seed, repeat=0):
        work = workload("abcdefghijkl", seed=seed)
        made = arms()
        runs = list(measure(made, work, made["none"].encode, [(i,) for i in range(12)], repeat=repeat))
        return [tuple(run.arm for run in runs[3 * i : 3 * i + 3]) for i in range(12)]

    first = orders(0)
    assert all(sorted(order) == ["ngram", "none", "suffix"] for order in first)
    assert len(set(first)) > 2
    assert first == orders(0) != orders(1)
    assert orders(0, repeat=1) != first


def test_requests_and_events_belong_together():
    made, work = arms(), workload("abcd", concurrency=2)
    for run in measure(made, work, made["none"].encode, [(0, 1), (2, 3)]):
        assert sorted(request.prompt for request in run.requests) == [[0, 1], [2, 3]][run.block]
        for request in run.requests:
            records = [item for item in run.events.requests if item.request == request.request]
            assert sum(item.emitted for item in records) == request.num_tokens == NUM_TOKENS
            assert sum(count for _, count in request.arrivals) == NUM_TOKENS
            assert request.prompt_id == f"id{request.prompt}"
            assert 0 <= request.sent <= request.arrivals[0][0] <= request.ended <= run.seconds + 1e-9


def test_a_place_that_falls_free_is_taken_at_once_and_no_more_than_allowed_run():
    seen = []
    arm = ScriptedArm("none", on_poll=lambda arm: seen.append(len(arm._running)))
    run = run_one(arm, workload("abcdefg", concurrency=3), tuple(range(7)))
    assert max(seen) == 3
    assert len(run.requests) == 7
    one = ScriptedArm("none", max_concurrency=1, on_poll=lambda arm: seen.append(-len(arm._running)))
    run_one(one, workload("abc", concurrency=3), (0, 1, 2))
    assert min(seen) == -1


def test_a_conversation_goes_on_from_the_arms_own_answer():
    arm = ScriptedArm("none")
    run = run_one(arm, workload([("a", "b", "c"), ("d",)]), (0, 1))
    assert [(request.prompt, request.turn) for request in run.requests] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    said = [(message["role"], message["content"]) for message in arm.asked[2].messages]
    assert said == [
        ("user", "a"), ("assistant", "text of a"), ("user", "b"), ("assistant", "text of b"), ("user", "c"),
    ]  # fmt: skip


def test_a_failed_turn_ends_its_conversation_and_no_other():
    run = run_one(ScriptedArm("none", fails_on=frozenset("b")), workload([("a", "b", "c"), ("d", "e")]), (0, 1))
    assert [(request.prompt, request.turn, request.error) for request in run.requests] == [
        (0, 0, None), (0, 1, "no room"), (1, 0, None), (1, 1, None),
    ]  # fmt: skip
    assert not run.is_whole


def test_a_turn_that_cannot_be_encoded_fails_alone():
    run = run_one(ScriptedArm("none", refuses=frozenset("b")), workload([("a", "b"), ("c",)]), (0, 1))
    assert [request.error for request in run.requests] == [None, "b is too long", None]


def test_requests_of_an_open_loop_are_sent_when_they_are_due_and_late_ones_count_from_then():
    arm = ScriptedArm("none", step_seconds=0.01)
    times = [0.0, 0.03, 0.06, 0.2]
    run = run_one(arm, workload("abcd", open_loop=OpenLoop(times=tuple(times))), (0, 1, 2, 3))
    assert [request.due for request in sorted(run.requests, key=lambda item: item.prompt)] == times
    for request in run.requests:
        assert request.due <= request.sent <= request.due + 0.05
    assert run.seconds >= 0.2 + 8 * 0.01


def test_silence_fails_what_runs_and_the_rest_goes_on():
    began = time.perf_counter()
    arm = ScriptedArm("none", silent_on=frozenset("b"))
    run = run_one(arm, workload("abc", timeout=0.2), (0, 1, 2))
    assert [request.error for request in run.requests] == [None, "no sign of life for 0.2 s", None]
    assert time.perf_counter() - began < 2


def test_an_interrupt_leaves_nothing_running():
    def interrupt(arm):
        if len(arm.asked) == 2:
            raise KeyboardInterrupt

    arm = ScriptedArm("none", on_poll=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_one(arm, workload("abc"), (0, 1, 2))
    assert arm._running == {}


def test_a_prompt_that_no_arm_can_take_is_found_before_measuring():
    arm = ScriptedArm("none", refuses=frozenset("b"))
    usable, failed = usable_prompts(workload("abc"), arm.encode)
    assert usable == [0, 2]
    assert failed == {1: "b is too long"}
    assert arm.asked == []


def test_a_system_message_comes_first_and_no_raw_text_can_carry_it():
    prompts = [Prompt(prompt_id="a", turns=("Hi", "Bye"), system="Be brief."), Prompt(prompt_id="b", turns=("Hi",))]
    arm = ScriptedArm("none")
    run_one(arm, Workload(prompts=prompts, max_new_tokens=NUM_TOKENS), (0,))
    assert arm.asked[0].messages[0] == {"role": "system", "content": "Be brief."}
    usable, failed = usable_prompts(Workload(prompts=prompts, raw=True), arm.encode)
    assert usable == [1]
    assert "prompt a has a system message" in failed[0]


def test_the_warm_up_is_no_prompt_of_the_workload_and_leaves_no_events():
    work = workload("ab", concurrency=2)
    for arm in arms().values():
        assert warm_up(arm, work, arm.encode) is None
        assert len(arm.asked) == 2
        assert not {ask.text for ask in arm.asked} & {"a", "b"}
        assert arm.take_events().steps == []


def test_a_warm_up_that_fails_says_why():
    class Failing(ScriptedArm):
        def submit(self, ask):
            self.fails_on = frozenset({ask.text})
            super().submit(ask)

    arm = Failing("none")
    assert warm_up(arm, workload("a"), arm.encode) == "no room"
