"""Exactness without exceptions on larger models: Qwen2.5-Coder 0.5B and 1.5B, Q4_K_M, on the native backend.

As tests/test_native_speculation.py: ids and every row of logits, bit for bit (tests/native_runs.py). The 0.5B drafts
for itself and for the 1.5B. No package brings these models; where their files are missing, nothing is tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith import _native
from tests.native_runs import QUESTIONS, SAMPLINGS, Runs, rows_of

pytestmark = pytest.mark.slow

FOLDER = Path.home() / ".cache" / "draftsmith-models"
NUM_TOKENS = {"0.5b": 24, "1.5b": 20}
CHAINS, TREES = "draft_model:model=0.5b:max_draft=16", "draft_model:model=0.5b:max_draft=16:tree=3x2x1x1"
DRAFTERS = ["ngram", "suffix", "suffix:tree=true", "hybrid", CHAINS, TREES]


def path_of(size: str) -> str:
    path = FOLDER / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing; Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF on the hub has this file")
    return str(path)


@pytest.fixture(scope="module", params=NUM_TOKENS)
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(path_of(request.param), path_of("0.5b"), NUM_TOKENS[request.param])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_length(runs: Runs, drafter: str, threads: int) -> None:
    """What is greedy on one thread is sampled on two, and the other way round."""
    accepted = 0
    for num_draft in range(1, 17):
        sampling = tuple(SAMPLINGS)[(num_draft + threads) % 2]
        question = (3 * num_draft + 4 * threads) % len(QUESTIONS)
        accepted += runs.check_alone(runs.engine(threads, num_draft=num_draft), drafter, sampling, question)
    assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("chunk_rows", "num_draft"), [(8, 3), (9, 16), (13, 2), (16, 7), (31, 5), (64, 1), (100, 12), (257, 9), (512, 16)]
)
def test_shuffled_batches_in_chunks(runs: Runs, chunk_rows: int, num_draft: int, threads: int) -> None:
    engine = runs.engine(threads, num_draft=num_draft, chunk_rows=chunk_rows, prefix_cache=threads == 2)
    one = (chunk_rows + threads) % len(DRAFTERS)
    runs.check_batch(engine, DRAFTERS, tuple(SAMPLINGS), chunk_rows + threads)
    runs.check_batch(engine, DRAFTERS[one : one + 1], tuple(SAMPLINGS)[::-1], chunk_rows - threads)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 7])
def test_small_chunks(runs: Runs, chunk_rows: int) -> None:
    for place, drafter in enumerate(DRAFTERS):
        engine = runs.engine(threads=1 + chunk_rows // 2 % 2, max_batch=1, chunk_rows=chunk_rows)
        runs.check_alone(engine, drafter, ("greedy", "coupled")[(chunk_rows // 2 + place) % 2], place)


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_every_instruction_set(runs: Runs, kernels: str) -> None:
    engine = runs.engine(kernels=kernels)
    for drafter, sampling in (("suffix:tree=true", "greedy"), (CHAINS, "coupled"), (TREES, "greedy")):
        runs.check_alone(engine, drafter, sampling, 0, kernels)
    assert rows_of(runs.target, kernels).num_met_again > 0


def test_rows_were_really_compared(runs: Runs) -> None:
    """What each test above leaves behind; alone, this one makes two runs of its own."""
    plain = runs.plain(0, "greedy")
    runs.check_alone(runs.engine(), "suffix", "greedy", 0)
    assert rows_of(runs.target, "auto").num_met_again >= len(plain)
