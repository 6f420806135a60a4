"""The sampling transforms against an independent oracle, against transformers, and against themselves.

The oracle is the slow definition in float64: sort everything, walk token by token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.truncation import top_k, top_p
from draftsmith.core.types import Rule
from draftsmith.errors import DraftsmithError, OptionError, PromptError

NOBODY: frozenset[int] = frozenset()


class Oracle:
    """The definition of the law, token by token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: frozenset[int]):
        self.params, self.prompt, self.output, self.ends = params, list(prompt), list(output), ends
        self.margin = math.inf  # distance of the top-p cut from the next possible one

    def adjusted(self, logits: Sequence[float]) -> list[float]:
        params, row = self.params, list(logits)
        for token in set(self.prompt) | set(self.output):
            row[token] = (
                row[token] * params.repetition_penalty if row[token] < 0 else row[token] / params.repetition_penalty
            )
        for token in set(self.output):
            row[token] -= params.presence_penalty + params.frequency_penalty * self.output.count(token)
        for token, bias in params.logit_bias.items():
            row[token] += bias
        for token in params.banned_ids:
            row[token] = -math.inf
        if len(self.output) < params.min_tokens:
            for token in self.ends:
                row[token] = -math.inf
        if max(row) == -math.inf:
            row = list(logits)
        return row if max(row) > -math.inf else [0.0] * len(row)

    def law(self, logits: Sequence[float]) -> np.ndarray:
        row, params = self.adjusted(logits), self.params
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        probs = np.zeros(len(row))
        if params.temperature == 0:
            probs[order[0]] = 1.0
            return probs
        if params.top_k:
            order = order[: params.top_k]
        weights = [math.exp((row[token] - row[order[0]]) / params.temperature) for token in order]
        if params.top_p < 1:
            share, total, kept = 0.0, math.fsum(weights), 0
            while share < params.top_p and kept < len(order):
                share = math.fsum(weights[: kept + 1]) / total
                self.margin = min(self.margin, abs(share - params.top_p))
                kept += 1
            order, weights = order[:kept], weights[:kept]
        total = math.fsum(weights)
        kept_weights = {
            t: w for t, w in zip(order, weights, strict=True) if w / total >= params.min_p * weights[0] / total
        }
        for token, weight in kept_weights.items():
            probs[token] = weight / math.fsum(kept_weights.values())
        return probs


@st.composite
def cases(draw: st.DrawFn) -> tuple[SamplingParams, list[float], list[int], list[int], list[int]]:
    size = draw(st.integers(2, 24))
    ids = st.integers(0, size - 1)
    # A coarse grid makes ties common; minus infinity is a legal logit.
    logit = st.one_of(st.integers(-12, 12).map(lambda n: n / 4), st.floats(-20, 20), st.just(-math.inf))
    penalty = st.one_of(st.just(0.0), st.floats(-2, 2))
    params = SamplingParams(
        temperature=draw(st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 3))),
        top_k=draw(st.integers(0, size + 2)),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 1))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0, 0.9))),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 2))),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=draw(st.dictionaries(ids, st.one_of(st.floats(-5, 5), st.just(-math.inf)), max_size=3)),
        banned_ids=draw(st.frozensets(ids, max_size=min(3, size - 1))),
        min_tokens=draw(st.integers(0, 8)),
    )
    logits = draw(st.lists(logit, min_size=size, max_size=size))
    history = st.lists(ids, max_size=6)
    return params, logits, draw(history), draw(history), draw(history)


def near_tie(law: np.ndarray, oracle: Oracle, params: SamplingParams, tolerance: float) -> bool:
    """Whether rounding may decide a cut differently."""
    support = law[law > 0]
    at_min_p = params.min_p > 0 and np.any(np.abs(support / support.max() - params.min_p) < tolerance)
    return oracle.margin < tolerance or bool(at_min_p)


@given(cases(), st.frozensets(st.integers(0, 30), max_size=3))
@settings(max_examples=300)
def test_law_equals_the_definition(case: Any, ends: frozenset[int]) -> None:
    params, logits, prompt, output, path = case
    sampler = Sampler(params, prompt, ends, len(logits))
    sampler.append(output)
    oracle = Oracle(params, prompt, output + path, frozenset(token for token in ends if token < len(logits)))
    expected = oracle.law(logits)
    assume(not near_tie(expected, oracle, params, 1e-9))
    law = sampler.law(torch.tensor(logits, dtype=torch.float64), path)
    assert law.dtype == torch.float64
    np.testing.assert_allclose(law.numpy(), expected, rtol=0, atol=1e-12)
    assert abs(float(law.sum()) - 1) < 1e-12
    if params.temperature == 0:
        assert sampler.argmax(torch.tensor(logits, dtype=torch.float64), path) == int(expected.argmax())


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=200)
def test_path_is_history_and_sample_is_argmax_of_scores_plus_noise(case: Any, seed: int) -> None:
    """Guards stale penalties in later draft rows, and a drafter meeting other scores than the verifier."""
    params, logits, prompt, output, path = case
    row = torch.tensor(logits, dtype=torch.float32)
    ahead = Sampler(params, prompt, frozenset({0, 1}), len(logits))
    ahead.append(output)
    settled = ahead.fork()
    settled.append(path)
    noise = RequestRandom(seed).target_gumbel(len(output) + len(path), len(logits))
    scores = settled.scores(row)
    assert torch.equal(ahead.scores(row, path), scores)
    assert torch.equal(ahead.law(row, path), settled.law(row))
    assert ahead.argmax(row, path) == settled.argmax(row)
    assert ahead.sample(row, noise, path) == settled.sample(row, noise) == int((scores.numpy() + noise).argmax())
    shifted = scores - scores.max()
    np.testing.assert_allclose((shifted.exp() / shifted.exp().sum()).numpy(), settled.law(row).numpy(), atol=1e-12)


def peaked_row(vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """A row shaped like a language model's: a wide bulk and a few tokens far above it."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, vocab_size)
    row[rng.choice(vocab_size, 20, replace=False)] += np.linspace(18, 5, 20)
    return torch.from_numpy(row.astype(np.float32))


LARGE_ROWS = {
    "peaked": peaked_row(20_011, 0),
    "flat": torch.zeros(20_011),
    "bulk": peaked_row(20_011, 1, spread=0.2),
    "ties": (peaked_row(20_011, 2) * 2).round() / 2,
    "mostly masked": torch.where(torch.arange(20_011) % 997 == 5, peaked_row(20_011, 3), -torch.inf),
}


@pytest.mark.parametrize("row_name", LARGE_ROWS)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.9999},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.0, "top_k": 4000, "top_p": 0.97},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_large_rows_keep_the_right_tokens_and_sample_them(row_name: str, options: dict[str, Any]) -> None:
    row = LARGE_ROWS[row_name]
    size = len(row)
    params = SamplingParams(**options)
    sampler = Sampler(params, range(0, size, 3), NOBODY, size)
    sampler.append([1, 2, 3, 3])
    scores = sampler.scores(row).numpy()
    # Independent of partial sorts: a full stable sort, cut by cumulative mass. (The penalties themselves
    # are the small oracle's business.)
    values = scores * params.temperature if params.penalises else row.double().numpy()
    order = np.argsort(-values, kind="stable")
    order = order[: params.top_k or size]
    weights = np.exp((values[order] - values[order[0]]) / params.temperature)
    shares = np.cumsum(weights) / weights.sum()
    kept = int(np.searchsorted(shares, params.top_p)) + 1 if params.top_p < 1 else len(order)
    expected = order[:kept][weights[:kept] >= params.min_p * weights[0]]
    expected = expected[values[expected] > -np.inf]
    support = np.flatnonzero(scores > -np.inf)
    # A float32 row decides the cut of top-p up to rounding of the mass: one or two tokens of the flat row.
    assert abs(len(support) - len(expected)) <= (2 if params.top_p < 1 and len(expected) > 100 else 0)
    assert np.array_equal(np.sort(order[: len(support)])[:50], support[:50])
    np.testing.assert_allclose(scores[support], values[support] / params.temperature, rtol=1e-15)
    for position in range(8):
        noise = RequestRandom(7).target_gumbel(position, size)
        assert sampler.sample(row, noise) == int((scores + noise).argmax())


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=300), st.integers(1, 300), st.floats(0.01, 0.99))
@settings(max_examples=200)
def test_truncation_breaks_ties_by_ascending_id(raw: list[int], count: int, mass: float) -> None:
    values = np.array(raw, dtype=np.float64)
    order = sorted(range(len(raw)), key=lambda i: (-raw[i], i))
    count = min(count, len(raw))
    assert top_k(values, count).tolist() == sorted(order[:count])
    kept = top_p(values, float(values.max()), 1.0, mass).tolist()
    assert kept == sorted(order[: len(kept)])
    share = np.exp(values[kept]).sum() / np.exp(values).sum()
    smaller = np.exp(values[order[: len(kept) - 1]]).sum() / np.exp(values).sum()
    assert smaller - 1e-12 < mass < share + 1e-12


def test_top_k_of_a_large_row_keeps_exactly_k_lowest_ids_among_ties() -> None:
    values = np.zeros(64 * 400, dtype=np.float32)
    values[[70, 9000, 20_000]] = 1
    assert top_k(values, 8).tolist() == [0, 1, 2, 3, 4, 70, 9000, 20_000]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass_and_never_nothing() -> None:
    row = torch.zeros(4)
    for mass, kept in ((0.75, [0, 1, 2]), (0.7500001, [0, 1, 2, 3]), (0.5, [0, 1]), (1e-9, [0])):
        law = Sampler(SamplingParams(temperature=1.0, top_p=mass), [], NOBODY, 4).law(row)
        assert law.nonzero().flatten().tolist() == kept


def test_order_of_transforms() -> None:
    """Temperature before top-p, top-k before top-p (renormalised), penalties before the cut."""
    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64))

    def support(prompt: Sequence[int] = (), **options: Any) -> list[int]:
        return Sampler(SamplingParams(**options), prompt, NOBODY, 4).law(row).nonzero().flatten().tolist()

    assert support(temperature=1.0, top_p=0.79) == [0, 1]
    assert support(temperature=5.0, top_p=0.79) == [0, 1, 2]
    assert support(temperature=1.0, top_p=0.79, top_k=3) == [0, 1]
    assert support(temperature=1.0, top_p=0.62, top_k=2) == [0]  # 0.5 / 0.8 = 0.625
    assert support(temperature=1.0, top_k=2, logit_bias={3: 10.0}) == [0, 3]
    assert support(temperature=1.0, top_k=1, prompt=[0], repetition_penalty=10.0) == [1]
    assert support(temperature=1.0, min_p=0.31) == [0, 1]
    assert support(temperature=0.5, min_p=0.31) == [0, 1]  # (0.3 / 0.5) ** 2 = 0.36
    assert support(temperature=0.5, min_p=0.37) == [0]


def test_penalties_by_hand() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 0.5, 3.0], dtype=torch.float64)
    sampler = Sampler(
        SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
        [0, 1],
        NOBODY,
        5,
    )
    sampler.append([2, 2])
    # Prompt ids 0 and 1 are only repeated; 2 is repeated, present once and counted twice.
    assert sampler.scores(row).tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.5, 0.5, 3.0]
    # A drafted path counts on top for its row alone: another 2, and 4 for the first time.
    assert sampler.scores(row, [2, 4]).tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.75, 0.5, 1.5 - 0.5 - 0.25]
    assert sampler.scores(row).tolist() == [1.0, -4.0, -0.5, 0.5, 3.0]


def test_history_grows_far_beyond_its_first_room() -> None:
    tokens = list(range(500)) * 2
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    sampler = Sampler(params, [], NOBODY, 600)
    for token in tokens:
        sampler.append([token])
    scores = sampler.scores(torch.zeros(600))
    assert torch.equal(scores, torch.where(torch.arange(600) < 500, -1.0, 0.0).double())


def test_min_tokens_masks_each_draft_row_by_its_own_output_position() -> None:
    """Guards a mask one row too long or built from the committed length alone."""
    row = torch.tensor([0.0, 5.0, 1.0])
    sampler = Sampler(SamplingParams(min_tokens=3), [0], frozenset({1}), 3)
    sampler.append([2])
    assert [sampler.argmax(row, path) for path in ([], [2], [2, 2], [2, 2, 2])] == [2, 2, 1, 1]
    sampler.append([2, 0])
    assert sampler.argmax(row) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.6},
        {"min_p": 0.5},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.7},
        {"logit_bias": {4: 3.0}},
        {"logit_bias": {0: -math.inf}},
        {"banned_ids": frozenset({0})},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_every_option_changes_the_law(options: dict[str, Any]) -> None:
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0], dtype=torch.float64)

    def law(**given_options: Any) -> torch.Tensor:
        sampler = Sampler(SamplingParams(**{"temperature": 1.0, **given_options}), [1], frozenset({0}), 5)
        sampler.append([2])
        return sampler.law(row)

    assert float((law(**options) - law()).abs().max()) > 0.01


def test_greedy_ignores_truncation_and_noise_but_not_penalties() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 2.9])
    sampler = Sampler(SamplingParams(top_k=1, top_p=0.1, min_p=0.9), [], NOBODY, 4)
    assert sampler.greedy and sampler.context_free
    assert sampler.argmax(row) == 1  # the lowest id among equals
    assert sampler.sample(row, np.array([100.0, 0, 50, 0])) == 1
    assert sampler.law(row).tolist() == [0, 1, 0, 0]
    assert sampler.scores(row).tolist() == [-math.inf, 3, -math.inf, -math.inf]
    penalised = Sampler(SamplingParams(repetition_penalty=1.5), [1, 2], NOBODY, 4)
    assert penalised.argmax(row) == 3 and not penalised.context_free


@pytest.mark.parametrize(
    ("options", "is_free"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_p": 0.5}, True),
        ({"min_tokens": 1}, False),
        ({"banned_ids": frozenset({0})}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
    ],
)
def test_context_free(options: dict[str, Any], is_free: bool) -> None:
    assert Sampler(SamplingParams(**options), [], frozenset({1}), 3).context_free is is_free


def test_no_end_ids_leave_min_tokens_without_effect() -> None:
    assert Sampler(SamplingParams(min_tokens=4), [], frozenset({99}), 3).context_free


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_masked_falls_back_to_the_raw_row_then_to_uniform(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, banned_ids=frozenset({0}), min_tokens=2, top_p=0.99999)
    sampler = Sampler(params, [], frozenset({1}), 2)
    assert sampler.argmax(torch.tensor([1.0, 0.0])) == 0
    expected = [1.0, 0.0] if temperature == 0 else torch.softmax(torch.tensor([1.0, 0.0]).double(), 0).tolist()
    assert sampler.law(torch.tensor([1.0, 0.0])).tolist() == pytest.approx(expected, abs=1e-12)
    nothing = torch.full((2,), -math.inf)
    assert sampler.argmax(nothing) == 0
    assert sampler.law(nothing).tolist() == ([1.0, 0.0] if temperature == 0 else [0.5, 0.5])
    assert sampler.sample(nothing, np.array([0.0, 1.0])) == (0 if temperature == 0 else 1)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "banned_ids": {0}}], ids=str
)
def test_broken_logits_are_refused(poison: float, options: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(**options), [], NOBODY, 4)
    for place in range(1, 4):
        row = torch.zeros(4)
        row[place] = poison
        with pytest.raises(DraftsmithError, match=r"NaN or \+inf"):
            sampler.sample(row, np.zeros(4))


def test_minus_infinity_for_every_draft_is_an_ordinary_row() -> None:
    row = torch.tensor([-math.inf, 0.0, -math.inf])
    for options in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.7, "top_p": 0.9}):
        sampler = Sampler(SamplingParams(**options), [], NOBODY, 3)
        assert sampler.law(row).tolist() == [0, 1, 0]
        assert sampler.sample(row, np.array([30.0, -3.0, 30.0])) == 1


def test_forks_are_independent() -> None:
    row = torch.zeros(4)
    source = Sampler(SamplingParams(temperature=1.0, presence_penalty=1.0), [], NOBODY, 4)
    source.append([1])
    copy = source.fork()
    source.append([2])
    copy.append([3])
    assert source.scores(row).tolist() == [0, -1, -1, 0]
    assert copy.scores(row).tolist() == [0, -1, 0, -1]


def test_a_row_gives_the_same_result_beside_others_and_is_never_written() -> None:
    batch = torch.stack([LARGE_ROWS["peaked"], LARGE_ROWS["ties"], LARGE_ROWS["flat"]])
    before = batch.clone()
    params = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, banned_ids=frozenset({3}))
    sampler = Sampler(params, [1, 2, 3], NOBODY, batch.shape[1])
    assert torch.equal(sampler.scores(batch[1], [7]), sampler.scores(batch[1].clone(), [7]))
    assert torch.equal(sampler.scores(batch.T.contiguous().T[1], [7]), sampler.scores(batch[1], [7]))
    assert torch.equal(batch, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    row = torch.tensor([1.0, 2.5, -3.0, 2.0], dtype=dtype)
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=3), [], NOBODY, 4)
    assert torch.equal(sampler.law(row), sampler.law(row.float()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu_give_what_rows_on_the_cpu_give() -> None:
    row = LARGE_ROWS["peaked"]
    sampler = Sampler(SamplingParams(temperature=0.7, top_p=0.9), [], NOBODY, len(row))
    noise = RequestRandom(3).target_gumbel(0, len(row))
    assert sampler.law(row.cuda()).is_cuda
    assert torch.equal(sampler.law(row.cuda()).cpu(), sampler.law(row))
    assert sampler.sample(row.cuda(), noise) == sampler.sample(row, noise)


def test_sampled_frequencies_follow_the_law() -> None:
    """Chi-square over 4000 draws per setting; false alarm below 1e-6 in all (the seed is fixed besides)."""
    row = torch.tensor([1.0, 0.6, 0.2, -0.3, -1.0, 0.9, -4.0])
    settings_tried = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.4, "presence_penalty": 0.5},
    ]
    for options in settings_tried:
        sampler = Sampler(SamplingParams(**options), [0], NOBODY, 7)
        sampler.append([5])
        random = RequestRandom(11)
        counts = np.zeros(7)
        for position in range(4000):
            counts[sampler.sample(row, random.target_gumbel(position, 7))] += 1
        law = sampler.law(row).numpy()
        assert counts[law == 0].sum() == 0
        assert scipy.stats.chisquare(counts[law > 0], 4000 * law[law > 0]).pvalue > 1e-6 / len(settings_tried)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.85},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.4},
        {"temperature": 0.8, "repetition_penalty": 0.8, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    ],
    ids=str,
)
def test_transformers_agrees(options: dict[str, Any]) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    params = SamplingParams(**options)
    chain = [processors.TemperatureLogitsWarper(params.temperature)] if params.temperature != 1 else []
    if params.repetition_penalty != 1:
        chain.insert(0, processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.top_k:
        chain.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(processors.MinPLogitsWarper(params.min_p))
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        row = torch.randn(60, generator=generator, dtype=torch.float64) * 2
        history = torch.randint(0, 60, (12,), generator=generator)
        theirs = row[None]
        for processor in chain:
            theirs = processor(history[None], theirs)
        sampler = Sampler(params, history[:5].tolist(), NOBODY, 60)
        sampler.append(history[5:9].tolist())
        ours = sampler.law(row, history[9:].tolist())
        torch.testing.assert_close(ours, torch.softmax(theirs[0], 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; allowed: 0 \(greedy\) or at least 1e-06"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0.0}, r"top_p is 0\.0; allowed: above 0 and up to 1"),
        ({"top_p": 1.01}, r"top_p is 1\.01"),
        ({"top_k": -1}, "top_k is -1; allowed: a whole number of at least 0"),
        ({"top_k": 2.5}, r"top_k is 2\.5"),
        ({"min_p": 1.0}, r"min_p is 1\.0; allowed: at least 0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0; allowed: above 0"),
        ({"presence_penalty": 2.1}, r"presence_penalty is 2\.1; allowed: from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key is -1"),
        ({"banned_ids": {-4}}, "banned_ids is -4"),
        ({"rule": "match"}, "rule is 'match'; allowed: coupling, match, chain"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        SamplingParams(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias names token 10; allowed: ids below 10"),
        ({"banned_ids": {3, 12}}, "banned_ids names token 12"),
        ({"banned_ids": set(range(10))}, "banned_ids names every token"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sampler(SamplingParams(**options), [], NOBODY, 10)
    with pytest.raises(PromptError, match="outside the vocabulary of 10"):
        Sampler(SamplingParams(repetition_penalty=1.1), [3, 10], NOBODY, 10)


def test_params_keep_their_own_copy_of_what_they_were_given() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias, rule=Rule.BLOCK)
    bias[1] = 9.0
    assert params.logit_bias == {1: 1.0} and params.rule is Rule.BLOCK


def test_allows_says_what_masks_leave():
    """The law of a token is 0 by a mask exactly where `allows` is False, whatever was emitted and drafted."""
    params = SamplingParams(
        temperature=1.0, banned_ids=frozenset({1}), logit_bias={2: -math.inf, 3: -50.0}, min_tokens=3
    )
    for emitted, path in itertools.product(([], [0], [0, 0, 4]), ((), (4,), (4, 5), (4, 5, 0))):
        sampler = Sampler(params, [5], frozenset({6}), 7)
        sampler.append(emitted)
        law = sampler.law(torch.zeros(7), path)
        assert [sampler.allows(token, path) for token in range(7)] == (law > 0).tolist()
        assert sampler.allows(6, path) == (len(emitted) + len(path) >= 3)
