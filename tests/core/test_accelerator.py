"""The native kernels against the Python they replace: the same bits, ids and laws, whatever the row."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core import accelerator, elementary, truncation
from draftsmith.core.draw import draw_coupled
from draftsmith.core.random import KeyedNoise, RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.verify import row_argmax

needs_native = pytest.mark.skipif(accelerator.native() is None, reason="the native extension is not built")
Result = TypeVar("Result")


@contextmanager
def python_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "native", lambda: None)
        yield


def in_python(call: Callable[[], Result]) -> Result:
    with python_only():
        return call()


WORDS = st.integers(0, 2**64 - 1)


@needs_native
@given(WORDS, WORDS, WORDS, WORDS, st.integers(1, 1200))
@settings(max_examples=100)
def test_noise_has_the_same_bits(seed: int, stream: int, position: int, node: int, count: int) -> None:
    noise = KeyedNoise(seed, stream, position, node)
    np.testing.assert_array_equal(noise.gumbel(count), in_python(lambda: noise.gumbel(count)))
    assert noise.uniform() == in_python(noise.uniform)


@needs_native
def test_millions_of_noise_values_have_the_same_bits() -> None:
    for position in range(40):
        noise = KeyedNoise(5, 1 << 8, position, 0)
        np.testing.assert_array_equal(noise.gumbel(60_001), in_python(lambda it=noise: it.gumbel(60_001)))


def test_logarithm_is_close_to_the_library_and_exact_at_one() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([2.0 ** rng.uniform(-60, 6, 100_000), 1 + rng.normal(0, 1e-9, 1000), [1.0, 2.0**-53, 0.5]])
    np.testing.assert_allclose(elementary.log(values), np.log(values), rtol=3e-16, atol=0)
    assert elementary.log(np.array([1.0]))[0] == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-13)])
def test_weights_are_exponentials_in_fixed_point(dtype: Any, tolerance: float) -> None:
    values = np.linspace(-30, 0, 1001).astype(dtype)
    weights = elementary.exp_weights(values, 0.0, 1.0, 1)
    np.testing.assert_allclose(weights, np.exp(values.astype(np.float64)), rtol=tolerance * 30, atol=2**-36)
    assert weights[-1] == 1
    many = elementary.exp_weights(np.full(2**17, -0.3, dtype=dtype), 0.0, 1.0, 2**17)
    assert many.sum() == many[0] * 2**17 == math.fsum(many)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Rows of every kind that decides differently: coarse grids (ties), bulks, peaks, masked tokens, one value."""
    size = draw(st.one_of(st.integers(1, 40), st.integers(41, 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.normal(0, draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 300.0])), size)
    grid = draw(st.sampled_from([0.0, 0.0, 0.5, 4.0]))
    if grid:
        row = np.round(row / grid) * grid
    row[rng.random(size) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.99, 1.0]))] = -np.inf
    row[rng.integers(0, size, 3)] += draw(st.sampled_from([0.0, 5.0, 20.0]))
    row += draw(st.sampled_from([0.0, -1e4, 1e4]))
    return row.astype(draw(st.sampled_from([np.float32, np.float64])))


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from([0.0, 1.0, 0.8, 1e-6, 50.0]), st.floats(0.05, 3)),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 40, 1000]),
        "top_p": st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.95, 0.999999]), st.floats(0.01, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 0.9)),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
    }
)


@needs_native
@given(rows(), PARAMS, st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_ids_scores_and_laws_are_those_of_python(row: np.ndarray, options: dict[str, Any], seed: int) -> None:
    """Also the definition itself: a keyed draw is the argmax of scores plus all of the noise."""
    logits = torch.from_numpy(row)
    sampler = Sampler(SamplingParams(**options), [0, len(row) - 1], frozenset(), len(row))
    sampler.append([len(row) // 2])
    scores = sampler.scores(logits)
    assert torch.equal(scores, in_python(lambda: sampler.scores(logits)))
    assert torch.equal(sampler.law(logits), in_python(lambda: sampler.law(logits)))
    assert sampler.argmax(logits) == in_python(lambda: sampler.argmax(logits))
    random, again = RequestRandom(seed), RequestRandom(seed)
    for position in range(6):
        token = sampler.sample(logits, random.target_noise(position))
        noise = in_python(lambda position=position: again.target_gumbel(position, len(row)))
        assert token == in_python(lambda position=position: sampler.sample(logits, again.target_noise(position)))
        assert token == sampler.sample(logits, noise) == int((scores.numpy() + noise).argmax())
        fresh = RequestRandom(seed)
        drawn = draw_coupled(scores, fresh, position)
        assert drawn == in_python(lambda position=position: draw_coupled(scores, again, position)) == (token,)


@needs_native
@given(rows(), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_some_tokens_have_the_noise_they_have_among_all(row: np.ndarray, every: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(len(row) * every, len(row), replace=False))
    noise = KeyedNoise(seed, 5, 3, 1)
    expected = noise.gumbel(len(row) * every)[ids]
    np.testing.assert_array_equal(noise.gumbel_at(ids), expected)
    np.testing.assert_array_equal(in_python(lambda: noise.gumbel_at(ids)), expected)
    scores = row.astype(np.float64)
    if scores.max() > -np.inf:
        best = int((scores + expected).argmax())
        assert noise.argmax(scores, ids) == in_python(lambda: noise.argmax(scores, ids)) == best


@needs_native
@given(rows(), st.sampled_from([None, math.nan, math.inf]))
@settings(max_examples=200, deadline=None)
def test_the_weight_of_a_row_is_that_of_python(row: np.ndarray, poison: float | None) -> None:
    if poison is not None:
        row[len(row) // 2] = poison
    both = np.stack([row, row[::-1]])
    found = truncation.weights_of(both)
    in_words = in_python(lambda: truncation.weights_of(both))
    np.testing.assert_array_equal(np.array(found), np.array(in_words))
    for (best, weight), each in zip(found, both, strict=True):
        assert best == int(each.argmax())
        is_sound = bool(np.isfinite(each[best]))
        # Values 80 below the largest and more weigh nothing.
        expected = np.exp(each.astype(np.float64) - float(each[best])).sum() if is_sound else math.nan
        assert weight == pytest.approx(expected, rel=2e-5, nan_ok=True)


@needs_native
@given(rows(), st.integers(0, 3000), st.sampled_from(["nan", "inf", "both", "none"]))
@settings(max_examples=200)
def test_argmax_is_numpys(row: np.ndarray, place: int, poison: str) -> None:
    row[place % len(row)] = {"nan": math.nan, "none": row[0]}.get(poison, math.inf)
    if poison == "both":
        row[place // 2 % len(row)] = math.nan
    assert truncation.argmax(row) == int(row.argmax())
    tensor = torch.from_numpy(np.stack([row, row[::-1]]))
    assert row_argmax(tensor) == in_python(lambda: row_argmax(tensor))


@needs_native
@pytest.mark.parametrize("size", [256, 257, 1000, 49_152])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.95}, {"top_p": 0.3}, {"top_k": 50}, {"top_k": 900, "top_p": 0.7}])
def test_large_rows_draw_the_same_tokens(size: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(size)
    random, again = RequestRandom(1), RequestRandom(1)
    for spread in (0.0, 0.3, 3.0):
        row = torch.from_numpy(rng.normal(0, spread, size).astype(np.float32))
        sampler = Sampler(SamplingParams(temperature=0.8, **options), [], frozenset(), size)
        for position in range(10):
            token = sampler.sample(row, random.target_noise(position))
            assert token == sampler.sample(row, again.target_gumbel(position, size))
            assert token == in_python(lambda p=position, row=row, it=sampler: it.sample(row, again.target_noise(p)))


@needs_native
@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_gives_the_same_bits(limit: int, dtype: torch.dtype) -> None:
    native = accelerator.native()
    assert native is not None
    rng = np.random.default_rng(3)
    rows = [torch.from_numpy(rng.normal(0, spread, 5003)).to(dtype) for spread in (0.0, 0.3, 3.0)]
    options = ({}, {"top_p": 0.9}, {"top_k": 900, "top_p": 0.7}, {"top_k": 9, "min_p": 0.1})
    samplers = [Sampler(SamplingParams(temperature=0.9, **some), [], frozenset(), 5003) for some in options]

    def everything() -> tuple[list[Any], bytes]:
        random = RequestRandom(9)
        found: list[Any] = [truncation.argmax(row.numpy()) for row in rows]
        found += [it.sample(row, random.target_noise(p)) for it in samplers for row in rows for p in range(20)]
        found += [it.scores(row).numpy().tobytes() for it in samplers for row in rows]
        return found, random.target_gumbel(0, 5003).tobytes()

    expected = everything()
    try:
        assert native.limit_instructions(limit) <= limit
        assert everything() == expected
    finally:
        native.limit_instructions(2)


def test_one_setting_turns_the_kernels_off() -> None:
    code = "from draftsmith.core import accelerator; print(accelerator.native())"
    is_built = importlib.util.find_spec("draftsmith._native") is not None
    for value, serves in (("1", False), ("0", is_built)):
        environment = os.environ | {accelerator.FORCE_PYTHON: value}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert (found.stdout.strip() != "None") is serves
