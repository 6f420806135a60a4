"""JSON becomes records of the annotated types, or one error that names the place."""

from dataclasses import dataclass

import pytest

from draftsmith.bench.arms import Counters
from draftsmith.bench.decode import decode
from draftsmith.bench.runs import RequestRun


@dataclass(frozen=True)
class Inner:
    count: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None
    pairs: tuple[tuple[float, int], ...] = ()


def test_records_in_records():
    found = decode({"name": "a", "inner": {"count": 3}, "pairs": [[0.5, 1], [1, 2]]}, Outer, "here")
    assert found == Outer("a", Inner(3), ((0.5, 1), (1, 2)))
    assert decode({"name": "a", "inner": None}, Outer, "here") == Outer("a", None)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "here is \\[\\], expected an object"),
        ({"name": "a"}, "here: fields missing or unknown: inner"),
        ({"name": "a", "inner": None, "more": 1}, "unknown: more"),
        ({"name": 3, "inner": None}, "here: name is 3, expected str"),
        ({"name": "a", "inner": 7}, "here: inner is 7, expected an object"),
        ({"name": "a", "inner": {"count": True}}, "inner: count is True, expected int"),
        ({"name": "a", "inner": {"count": 1.0}}, "count is 1.0, expected int"),
        ({"name": "a", "inner": {"count": 10**400}}, "expected a smaller number"),
        ({"name": "a", "inner": {"count": 1, "share": float("nan")}}, "share is nan"),
        ({"name": "a", "inner": {"count": 1, "share": "x"}}, "share is 'x', expected float"),
        ({"name": "a", "inner": None, "pairs": {}}, "pairs is {}, expected a list"),
        ({"name": "a", "inner": None, "pairs": [[1]]}, "pairs is \\[1\\], expected a list of 2"),
    ],
)
def test_what_is_wrong_is_named(value, told):
    with pytest.raises(ValueError, match=told):
        decode(value, Outer, "here")


def test_counts_that_are_none():
    for wrong in ({"drafted": -1}, {"steps": 1.5}, {"accepted_at": [1, -1]}):
        with pytest.raises(ValueError, match=r"no count|expected"):
            decode(wrong, Counters, "here")
    assert decode({"accepted_at": [1, 0]}, Counters, "here") == Counters(accepted_at=(1, 0))


def test_every_kind_of_a_request_is_known():
    needed = {"prompt": 0, "turn": 0, "prompt_id": "a", "category": "", "due": 0, "sent": 0, "ended": 1}
    assert decode(needed, RequestRun, "here").token_ids is None
