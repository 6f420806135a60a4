"""The theory of speculation against closed forms, reference tables, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core.random import RequestRandom
from draftsmith.core.theory import (
    acceptance,
    best_length,
    coupling_lower_bound,
    expected_tokens,
    expected_tree_tokens,
    extra_arithmetic,
    speed_up,
    survivals,
)
from draftsmith.errors import OptionError

probabilities = st.floats(0, 1)


@pytest.mark.parametrize(
    ("alpha", "draft_cost", "length", "gained"),
    [
        (0.6, 0.02, 6, 2.17),
        (0.6, 0.05, 4, 1.92),
        (0.6, 0.1, 3, 1.67),
        (0.6, 0.2, 2, 1.40),
        (0.8, 0.02, 11, 3.82),
        (0.8, 0.05, 8, 3.09),
        (0.8, 0.1, 6, 2.47),
        (0.8, 0.2, 4, 1.87),
        (0.9, 0.02, 19, 6.37),
        (0.9, 0.05, 13, 4.67),
        (0.9, 0.1, 10, 3.43),
        (0.9, 0.2, 7, 2.37),
    ],
)
def test_reference_optima(alpha: float, draft_cost: float, length: int, gained: float) -> None:
    best = best_length(alpha, draft_cost, max_length=64)
    assert best.length == length
    assert best.speed_up == pytest.approx(gained, abs=0.005)


@pytest.mark.parametrize(("length", "tokens"), [(1, 1.6667), (2, 2.1111), (4, 2.6049), (8, 2.9220)])
def test_expected_tokens_of_chain_rejection_at_two_thirds(length: int, tokens: float) -> None:
    assert expected_tokens(2 / 3, length) == pytest.approx(tokens, abs=5e-5)


@given(st.floats(0, 0.999), st.integers(0, 40))
def test_one_acceptance_has_the_closed_form(alpha: float, length: int) -> None:
    assert expected_tokens(alpha, length) == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha), rel=1e-9)
    assert expected_tokens([alpha] * length, length) == pytest.approx(expected_tokens(alpha, length))


def test_ends_of_the_range() -> None:
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(0.5, 0) == 1
    assert survivals([0.5, 0.4], 4) == pytest.approx([0.5, 0.2, 0, 0])


@given(st.lists(probabilities, max_size=5))
def test_positional_form_equals_enumeration(rates: list[float]) -> None:
    total = 0.0
    for accepted in range(len(rates) + 1):
        stopped = 1 - rates[accepted] if accepted < len(rates) else 1
        total += (accepted + 1) * math.prod(rates[:accepted]) * stopped
    assert expected_tokens(rates, len(rates)) == pytest.approx(total)


@given(st.floats(0, 0.99), st.floats(0.001, 1))
def test_drafting_pays_exactly_when_acceptance_exceeds_cost(alpha: float, draft_cost: float) -> None:
    best = best_length(alpha, draft_cost, max_length=30)
    if alpha > draft_cost * (1 + 1e-9):
        assert best.length >= 1 and best.speed_up >= (1 + alpha) / (1 + draft_cost) - 1e-12
    elif alpha < draft_cost * (1 - 1e-9):
        assert best.length == 0 and best.speed_up == 1


def test_compute_bound_verification_leaves_nothing_to_gain() -> None:
    assert best_length(0.95, 0.01, lambda g: g + 1.0, max_length=20).length == 0
    # A cost with a cheap step at 4 rows: the best length is not the first local peak.
    costs = [1.0, 1.9, 2.4, 1.5, 4.0]
    best = best_length([0.9, 0.8, 0.7, 0.6], 0.0, lambda g: costs[g], max_length=4)
    assert best.length == 3
    assert best.speed_up == pytest.approx((1 + 0.9 + 0.72 + 0.504) / 1.5)


def test_best_length_respects_its_cap_and_prefers_the_shorter_of_equals() -> None:
    assert best_length(0.9, 0.02, max_length=5).length == 5
    assert best_length(0.0, 0.0, max_length=5).length == 0
    assert best_length([0.5], 0.0, max_length=9).length == 1


def test_speed_up_and_arithmetic_by_hand() -> None:
    assert speed_up(0.5, 2, 0.25, lambda g: 1 + 0.1 * g) == pytest.approx(1.75 / (0.5 + 1.2))
    alpha, length, ratio = 0.7, 4, 0.05
    closed = (1 - alpha) * (length * ratio + length + 1) / (1 - alpha ** (length + 1))
    assert extra_arithmetic(alpha, length, ratio) == pytest.approx(closed)
    assert extra_arithmetic(alpha, 0, ratio) == 1


# -- trees -----------------------------------------------------------------------------------------


def test_tree_value_by_hand() -> None:
    # root -> a, b; a -> c, d; b -> e
    parents = (-1, 0, 0, 1, 1, 2)
    rates = [0.6, 0.2]
    assert expected_tree_tokens(parents, [rates]) == pytest.approx(1 + 0.6 + 0.2 + 0.36 + 0.12 + 0.12)
    per_depth = [[0.6, 0.2], [0.5]]  # at the second depth only the first rank is ever right
    assert expected_tree_tokens(parents, per_depth) == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0 + 0.1)
    assert expected_tree_tokens((-1,), [rates]) == 1


@given(st.floats(0, 1), st.integers(0, 12))
def test_a_chain_is_a_tree_with_one_child_per_node(alpha: float, length: int) -> None:
    parents = tuple(range(-1, length))
    assert expected_tree_tokens(parents, [[alpha]]) == pytest.approx(expected_tokens(alpha, length))


@given(st.lists(st.integers(0, 5), max_size=9), st.lists(st.floats(0, 0.3), min_size=1, max_size=3))
def test_tree_value_equals_a_walk_over_all_outcomes(choices: list[int], rates: list[float]) -> None:
    parents = [-1]
    for node, choice in enumerate(choices, start=1):
        parents.append(choice % node)

    def walk(node: int) -> float:
        below = [child for child in range(1, len(parents)) if parents[child] == node]
        return 1 + sum(rate * walk(child) for rate, child in zip(rates, below, strict=False))

    assert expected_tree_tokens(parents, [rates]) == pytest.approx(walk(0))


def test_independent_iid_pairs_of_the_toy_laws_under_match() -> None:
    """p=(.5,.3,.2), q=(.2,.3,.5), two i.i.d. children, match rule: 1.483 tokens (brute force over draws)."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    first = sum(q[x] * p[x] for x in range(3))
    second = sum(q[x] * q[y] * p[y] for x, y in itertools.product(range(3), repeat=2) if x != y)
    assert expected_tree_tokens((-1, 0, 0), [[first, second]]) == pytest.approx(1.483)
    assert expected_tree_tokens((-1, 0, 0, 1, 1, 2, 2), [[first, second]]) == pytest.approx(1.716289)


# -- laws ------------------------------------------------------------------------------------------


def some_law(generator: random.Random, size: int) -> list[float]:
    weights = [generator.random() ** 3 * (generator.random() < 0.8) + 1e-3 for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def coupled_exactly(p: Sequence[float], q: Sequence[float]) -> float:
    """P(both argmaxes agree) under shared Gumbel noise: Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x)."""
    return sum(
        1 / sum(max(py / px, qy / qx) for py, qy in zip(p, q, strict=True))
        for px, qx in zip(p, q, strict=True)
        if px > 0 and qx > 0
    )


def test_acceptance_is_one_minus_total_variation_and_batches() -> None:
    generator = random.Random(1)
    p = torch.tensor([some_law(generator, 9) for _ in range(6)], dtype=torch.float64).reshape(2, 3, 9)
    q = torch.tensor([some_law(generator, 9) for _ in range(6)], dtype=torch.float64).reshape(2, 3, 9)
    shared = acceptance(p, q)
    assert shared.shape == (2, 3)
    torch.testing.assert_close(shared, 1 - (p - q).abs().sum(-1) / 2)
    assert float(acceptance(p[0, 0], p[0, 0])) == pytest.approx(1)
    assert float(acceptance(torch.tensor([1.0, 0]), torch.tensor([0, 1.0]))) == 0


def test_seeded_coupling_accepts_at_least_its_bound() -> None:
    generator = random.Random(2)
    for _ in range(200):
        p, q = some_law(generator, 6), some_law(generator, 6)
        shared = float(acceptance(torch.tensor(p), torch.tensor(q)))
        exact = coupled_exactly(p, q)
        assert coupling_lower_bound(shared) - 1e-6 <= exact <= shared + 1e-6
    assert coupling_lower_bound(1.0) == 1 and coupling_lower_bound(0.0) == 0
    assert coupling_lower_bound(0.5) == pytest.approx(1 / 3)


def test_keyed_noise_couples_as_often_as_the_formula_says() -> None:
    """6000 positions; a deviation of 5 standard errors has probability below 1e-6 (the seed is fixed besides)."""
    generator = random.Random(3)
    p, q = np.array(some_law(generator, 8)), np.array(some_law(generator, 8))
    noise = RequestRandom(4)
    agreed = 0
    for position in range(6000):
        gumbel = noise.target_gumbel(position, 8)
        agreed += int((np.log(p) + gumbel).argmax() == (np.log(q) + gumbel).argmax())
    exact = coupled_exactly(p.tolist(), q.tolist())
    assert abs(agreed / 6000 - exact) < 5 * math.sqrt(exact * (1 - exact) / 6000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 2), "acceptance is 1.1; allowed: 0 to 1"),
        (lambda: expected_tokens([0.5, math.nan], 2), "acceptance is nan"),
        (lambda: expected_tokens(0.5, -1), "draft length is -1"),
        (lambda: speed_up(0.5, 2, -0.1), "draft cost is -0.1"),
        (lambda: coupling_lower_bound(-0.1), "shared mass is -0.1"),
        (lambda: expected_tree_tokens((-1, 0), []), "rank_acceptance is empty"),
        (lambda: expected_tree_tokens((-1, 0), [[0.7, 0.4]]), "sum to more than 1"),
        (lambda: expected_tree_tokens((-1, 0), [[-0.1]]), "rank acceptance is -0.1"),
    ],
)
def test_impossible_values_are_refused(call: object, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        call()  # type: ignore[operator]
    assert message in str(raised.value)
