"""Differences between arms: where they begin and how close the choice was."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.bench.differences import explain, find_differences, first_difference
from draftsmith.bench.runner import measure
from draftsmith.bench.runs import Key
from draftsmith.core.random import RequestRandom
from tests.bench.fakes import ScriptedArm, workload


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_difference(left, right):
    position = first_difference(left, right)
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def test_differences_are_found_by_token_ids_per_arm_and_prompt():
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", changes={"b": 4, "e": 0})}
    runs = list(measure(arms, workload(["a", "b", ("d", "e")]), arms["none"].encode, [(0,), (1,), (2,)]))
    assert find_differences(runs, "none") == {Key("ngram", 1, 0): 4, Key("ngram", 2, 1): 0}


class Scoring:
    """Answers one question: how likely the next token is after a prefix."""

    spec = SimpleNamespace(vocab_size=1000)

    def __init__(self, scores):
        self.scores = scores
        self.asked = []

    def encode(self, prompt):
        return [ord(character) for character in prompt]

    def generate(self, prompt, **settings):
        self.asked.append((list(prompt), settings))
        return SimpleNamespace(logprobs=(SimpleNamespace(top=tuple(self.scores.items())),))


def test_the_gap_is_that_of_the_two_tokens_after_the_common_beginning():
    engine = Scoring({7: -1.0, 8: -1.00005, 9: -0.2})
    difference = explain(engine, "a", (1, 2, 7, 3), (1, 2, 8, 4), {"temperature": 0.0})
    assert difference.position == 2
    assert difference.gap == pytest.approx(5e-5)
    prefix, settings = engine.asked[0]
    assert prefix == [ord("a"), 1, 2]
    assert settings["drafter"] == "none"


def test_sampling_compares_the_perturbed_scores():
    engine = Scoring({7: -1.0, 8: -2.0})
    noise = RequestRandom(5).target_gumbel(1, 1000)
    difference = explain(engine, "a", (1, 7), (1, 8), {"temperature": 0.5, "seed": 5})
    assert difference.gap == pytest.approx(abs(-2.0 + noise[7] - (-4.0 + noise[8])))


def test_no_gap_where_none_can_be_measured():
    assert explain(Scoring({7: -1.0}), "a", (1, 7), (1, 8), {}).gap is None
    cut = explain(Scoring({}), "a", (1, 7), (1,), {})
    assert (cut.position, cut.gap) == (1, None)


def test_a_gap_is_never_negative():
    gap = explain(Scoring({7: -3.0, 8: -1.0}), "a", (7,), (8,), {}).gap
    assert gap == pytest.approx(2.0)
    assert math.copysign(1, gap) == 1
