"""Exactness without exceptions: SmolLM2 on the native backend, with speculation and without.

Ids, greedy and sampled under a seed, are the plain run's for every drafter, draft length, batch, chunk size and
number of threads, and so are the logits, bit for bit (tests/native_runs.py).
"""

from __future__ import annotations

import pytest

from draftsmith import _native
from tests.native_runs import QUESTIONS, SAMPLINGS, Runs, rows_of

RUNS = Runs("smollm2", "smollm2", num_tokens=32)
ITSELF = "draft_model:model=smollm2:max_draft=16"
DRAFTERS = ["ngram", "suffix", "suffix:tree=true", "hybrid", ITSELF]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone(drafter: str, sampling: str) -> None:
    engine = RUNS.engine()
    accepted = sum(RUNS.check_alone(engine, drafter, sampling, question) for question in (0, 1))
    assert accepted > 0 or sampling != "greedy", f"{drafter}: nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("num_draft", range(1, 17))
def test_every_draft_length(num_draft: int) -> None:
    engine = RUNS.engine(num_draft=num_draft)
    RUNS.check_alone(engine, DRAFTERS[num_draft % 4], "greedy", 0)
    if num_draft in (7, 16):
        RUNS.check_alone(engine, ITSELF, "coupled", 1)


@pytest.mark.parametrize("chunk_rows", [8, 33, 512])
def test_shuffled_batches_in_chunks(chunk_rows: int) -> None:
    engine = RUNS.engine(chunk_rows=chunk_rows, prefix_cache=chunk_rows == 33)
    RUNS.check_batch(engine, DRAFTERS[:4] if chunk_rows < 512 else DRAFTERS, tuple(SAMPLINGS), chunk_rows)


def test_row_by_row() -> None:
    RUNS.check_alone(RUNS.engine(max_batch=1, chunk_rows=1), "suffix", "coupled", 0)


def test_two_threads() -> None:
    RUNS.check_batch(RUNS.engine(threads=2), DRAFTERS[:4], tuple(SAMPLINGS), 5)


def test_rows_were_really_compared() -> None:
    """What each test above leaves behind; alone, this one makes two runs of its own."""
    RUNS.plain(0, "greedy")
    RUNS.check_alone(RUNS.engine(), "suffix", "greedy", 0)
    assert rows_of("smollm2", "auto").num_met_again >= RUNS.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_length_of_every_drafter(drafter: str, sampling: str, threads: int) -> None:
    for num_draft in range(1, 17):
        engine = RUNS.engine(threads=threads, num_draft=num_draft)
        for question in range(0, len(QUESTIONS), 1 if num_draft in (1, 7, 16) else 3):
            RUNS.check_alone(engine, drafter, sampling, question)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_rows", [8, 9, 16, 31, 64, 100, 257, 512])
def test_every_chunk_size(chunk_rows: int, threads: int) -> None:
    for drafters in ([drafter] for drafter in DRAFTERS):
        engine = RUNS.engine(threads, num_draft=1 + chunk_rows % 16, chunk_rows=chunk_rows, prefix_cache=threads == 2)
        for samplings in (("greedy",), ("coupled",), tuple(SAMPLINGS)):
            RUNS.check_batch(engine, drafters, samplings, chunk_rows)
    RUNS.check_batch(engine, DRAFTERS, tuple(SAMPLINGS), chunk_rows + threads)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 7])
def test_small_chunks(chunk_rows: int) -> None:
    for drafter in DRAFTERS:
        engine = RUNS.engine(max_batch=1, chunk_rows=chunk_rows)
        for sampling in SAMPLINGS:
            RUNS.check_alone(engine, drafter, sampling, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_every_instruction_set(kernels: str) -> None:
    engine = RUNS.engine(kernels=kernels)
    for drafter in DRAFTERS:
        for sampling in SAMPLINGS:
            RUNS.check_alone(engine, drafter, sampling, 0, kernels)
    assert rows_of("smollm2", kernels).num_met_again > RUNS.num_tokens
