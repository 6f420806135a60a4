"""Order of batches: every text once a pass, little padding, the same from anywhere."""

import itertools
import random

import pytest

from draftsmith.errors import DataError
from draftsmith.training.batches import BatchOrder, batches_of_pass
from draftsmith.training.optimiser import rate_factor

LENGTHS = [random.Random(7).randrange(5, 200) for _ in range(300)]
KEPT = [index for index, length in enumerate(LENGTHS) if length <= 150]


def test_every_text_once_and_within_the_budget():
    batches = batches_of_pass(LENGTHS, KEPT, 400, seed=1, number=0)
    assert sorted(index for batch in batches for index in batch) == KEPT
    padded = [max(LENGTHS[index] for index in batch) * len(batch) for batch in batches]
    assert max(padded) <= 400
    assert sum(padded) < 1.1 * sum(LENGTHS[index] for index in KEPT)


def test_a_text_beyond_the_budget_is_a_batch():
    assert (4,) in batches_of_pass([10, 10, 10, 10, 90], range(5), 30, seed=0, number=0)


def test_passes_and_seeds_differ():
    first = batches_of_pass(LENGTHS, KEPT, 400, seed=1, number=0)
    assert first == batches_of_pass(LENGTHS, KEPT, 400, seed=1, number=0)
    assert first != batches_of_pass(LENGTHS, KEPT, 400, seed=1, number=1)
    assert first != batches_of_pass(LENGTHS, KEPT, 400, seed=2, number=0)


def test_batches_are_the_same_in_any_order():
    forward, backward = (BatchOrder(LENGTHS, KEPT, 400, seed=3) for _ in range(2))
    count = forward.num_batches(3)
    there = [forward.batch(number) for number in range(count)]
    back = [backward.batch(number) for number in reversed(range(count))]
    assert there == back[::-1]
    one_pass = batches_of_pass(LENGTHS, KEPT, 400, seed=3, number=1)
    start = forward.num_batches(1)
    assert there[start : start + len(one_pass)] == one_pass


def test_nothing_to_train_on():
    with pytest.raises(DataError, match="no text"):
        BatchOrder(LENGTHS, [], 400, seed=0)


def test_the_rate_rises_then_falls_to_its_floor():
    rates = [rate_factor(step, step / 100, 10, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert max(rates) == 1.0
    assert all(left >= right for left, right in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rate_factor(5, 7.0, 0, 0.1) == pytest.approx(0.1)
