"""Differences between arms: where they begin and how close the choice was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.bench.differences import explain, find_differences, first_difference
from draftsmith.bench.runner import measure
from draftsmith.bench.runs import Output
from draftsmith.core.random import RequestRandom
from tests.bench.fakes import Result, ScriptedEngine, workload


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_difference(left, right):
    position = first_difference(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def test_differences_are_found_by_token_ids_per_arm_and_prompt():
    engines = {"none": ScriptedEngine("none"), "ngram": ScriptedEngine("ngram", changes={"b": 4})}
    runs = list(measure(engines, workload("abc"), [(0,), (1,), (2,)]))
    assert find_differences(runs) == {("ngram", 1): 4}


class Scoring(ScriptedEngine):
    """Answers one question: how likely the next token is after a prefix."""

    def __init__(self, scores):
        super().__init__("none")
        self.scores = scores
        self.asked = []

    def generate(self, prompt, **settings):
        self.asked.append((list(prompt), settings))
        entry = type("Entry", (), {"top": tuple(self.scores.items())})()
        return Result((0,), logprobs=(entry,))


def output(*tokens):
    return Output(
        prompt=0,
        prompt_id="0",
        category="",
        request=0,
        prompt_tokens=1,
        token_ids=tokens,
        text="",
        finish_reason="length",
    )


def test_the_gap_is_that_of_the_two_tokens_after_the_common_beginning():
    engine = Scoring({7: -1.0, 8: -1.00005, 9: -0.2})
    difference = explain(engine, "a", output(1, 2, 7, 3), output(1, 2, 8, 4), {"temperature": 0.0})
    assert difference.position == 2
    assert difference.gap == pytest.approx(5e-5)
    prefix, settings = engine.asked[0]
    assert prefix == [ord("a"), 1, 2]
    assert settings["drafter"] == "none"


def test_sampling_compares_the_perturbed_scores():
    engine = Scoring({7: -1.0, 8: -2.0})
    noise = RequestRandom(5).target_gumbel(1, 1000)
    difference = explain(engine, "a", output(1, 7), output(1, 8), {"temperature": 0.5, "seed": 5})
    assert difference.gap == pytest.approx(abs(-2.0 + noise[7] - (-4.0 + noise[8])))


def test_no_gap_where_none_can_be_measured():
    assert explain(Scoring({7: -1.0}), "a", output(1, 7), output(1, 8), {}).gap is None
    cut = explain(Scoring({}), "a", output(1, 7), output(1), {})
    assert (cut.position, cut.gap) == (1, None)


def test_a_gap_is_never_negative():
    gap = explain(Scoring({7: -3.0, 8: -1.0}), "a", output(7), output(8), {}).gap
    assert gap == pytest.approx(2.0)
    assert math.copysign(1, gap) == 1
