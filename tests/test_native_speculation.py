"""Exactness without exceptions: SmolLM2 on the native backend, with speculation and without.

Ids, greedy and sampled under a seed, are the plain run's for every drafter, draft length, batch, chunk size and
number of threads. Beyond the ids, each row of logits that any run ever computes is hashed under the text it
follows: a text has one hash, whatever computed it. Nothing is forgiven a near tie here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from draftsmith import _native
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel, load_model
from draftsmith.models.backend import RowGroup, Scored
from tests.models.native_models import paths_of

NUM_TOKENS = 32
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 0.8, "top_p": 0.95, "seed": 3}}
ITSELF = "draft_model:model=smollm2:max_draft=16"
DRAFTERS = ["ngram", "suffix", "suffix:tree=true", "hybrid", ITSELF]
QUESTIONS = [
    "Repeat this list twice: apple, pear, plum, apple, pear, plum.",
    "Rename x to total in: x = 0\nfor i in range(3):\n    x = x + i\nprint(x)",
    'Fill in: {"name": "Ann", "age": 31} -> {"name": "Bob", "age": 42} -> {"name": "Cy", "age": ',
    "Count from 1 to 20.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Translate to Spanish: good morning, good night.",
    "Summarise: The cat sat on the mat. The cat was black. The mat was red.",
]


class Rows:
    """The hash of every row of logits, under the text that it follows."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, bytes] = {}
        self.num_met_again = 0

    def watch(self, model: LoadedModel) -> None:
        backend = model.backend
        score = backend.score

        def watched(groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
            scored = score(groups, taps)
            for group, logits in zip(groups, scored.logits, strict=True):
                behind = backend.cache.tokens(group.sequence_id)
                paths = list(paths_of(list(group.tokens), list(group.parents)))[group.first_logit :]
                for path, row in zip(paths, logits.numpy(), strict=True):
                    self._meet(np.array([*behind, *path], np.int32).tobytes(), row)
            return scored

        backend.score = watched  # type: ignore[method-assign]

    def _meet(self, text: bytes, row: np.ndarray) -> None:
        found = hashlib.blake2b(row, digest_size=8).digest()
        known = self._hashes.setdefault(text, found)
        assert found == known, f"a row behind {len(text) // 4 - 1} tokens differs"
        self.num_met_again += known is not found


ROWS: dict[str, Rows] = {}


@cache
def watched_model(threads: int, kernels: str, place: int) -> LoadedModel:
    """SmolLM2; `place` tells targets and draft models apart."""
    model = load_model("smollm2", backend=f"native:kernels={kernels}", threads=threads)
    ROWS.setdefault(kernels, Rows()).watch(model)
    return model


def engine_of(threads: int = 1, kernels: str = "auto", num_draft: int = 6, **settings: Any) -> Engine:
    for place in (0, 1):
        held = watched_model(threads, kernels, place).backend.cache
        for sequence in held.sequence_ids:  # an engine before this one kept them as prefixes
            held.close(sequence)
    settings = {"drafter": "none", "prefix_cache": False, **settings}
    chosen = EngineSettings(controller=f"fixed:num_draft={num_draft}", **settings)
    return Engine(watched_model(threads, kernels, 0), chosen, load=lambda _: watched_model(threads, kernels, 1))


@cache
def plain(question: int, sampling: str, kernels: str = "auto") -> tuple[int, ...]:
    result = engine_of(kernels=kernels).generate(prompt(question), max_new_tokens=NUM_TOKENS, **SAMPLINGS[sampling])
    return tuple(result.token_ids)


def prompt(question: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[question]}]


def check_alone(engine: Engine, drafter: str, sampling: str, question: int, kernels: str = "auto") -> int:
    """Returns how many draft tokens were accepted."""
    expected = plain(question, sampling, kernels)
    found = engine.generate(prompt(question), max_new_tokens=NUM_TOKENS, drafter=drafter, **SAMPLINGS[sampling])
    assert tuple(found.token_ids) == expected, (drafter, sampling, QUESTIONS[question])
    return int(found.statistics.accepted_tokens)


def check_batch(engine: Engine, drafters: Sequence[str], samplings: Sequence[str], seed: int) -> None:
    """Eight requests in any order, each with a drafter and a sampling of its own, arriving while others run."""
    order = random.Random(seed).sample(range(len(QUESTIONS)), len(QUESTIONS))
    expected = {number: plain(number, samplings[number % len(samplings)]) for number in order}
    streams: dict[int, Iterator[Any]] = {}
    found: dict[int, list[int]] = {number: [] for number in order}
    for place, number in enumerate(order):
        streams[number] = engine.stream(
            prompt(number),
            max_new_tokens=NUM_TOKENS,
            drafter=drafters[place % len(drafters)],
            **SAMPLINGS[samplings[number % len(samplings)]],
        )
        event = next(streams[order[place // 2]], None)
        found[order[place // 2]].extend(event.token_ids if event else ())
    for number, stream in streams.items():
        found[number].extend(token for event in stream for token in event.token_ids)
    for number in order:
        assert tuple(found[number]) == expected[number], (order, drafters, QUESTIONS[number])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone(drafter: str, sampling: str) -> None:
    engine = engine_of()
    accepted = sum(check_alone(engine, drafter, sampling, question) for question in (0, 1))
    assert accepted > 0 or sampling != "greedy", f"{drafter}: nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("num_draft", range(1, 17))
def test_every_draft_length(num_draft: int) -> None:
    engine = engine_of(num_draft=num_draft)
    check_alone(engine, DRAFTERS[num_draft % 4], "greedy", 0)
    if num_draft in (7, 16):
        check_alone(engine, ITSELF, "coupled", 1)


@pytest.mark.parametrize("chunk_rows", [8, 33, 512])
def test_shuffled_batches_in_chunks(chunk_rows: int) -> None:
    engine = engine_of(chunk_rows=chunk_rows, prefix_cache=chunk_rows == 33)
    check_batch(engine, DRAFTERS[:4] if chunk_rows < 512 else DRAFTERS, tuple(SAMPLINGS), chunk_rows)


def test_row_by_row() -> None:
    check_alone(engine_of(max_batch=1, chunk_rows=1), "suffix", "coupled", 0)


def test_two_threads() -> None:
    check_batch(engine_of(threads=2), DRAFTERS[:4], tuple(SAMPLINGS), 5)


def test_rows_were_really_compared() -> None:
    """What each test above leaves behind; alone, this one makes two runs of its own."""
    plain(0, "greedy")
    check_alone(engine_of(), "suffix", "greedy", 0)
    assert ROWS["auto"].num_met_again >= NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_draft_length_of_every_drafter(drafter: str, sampling: str, threads: int) -> None:
    for num_draft in range(1, 17):
        engine = engine_of(threads=threads, num_draft=num_draft)
        for question in range(0, len(QUESTIONS), 1 if num_draft in (1, 7, 16) else 3):
            check_alone(engine, drafter, sampling, question)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_rows", [8, 9, 16, 31, 64, 100, 257, 512])
def test_every_chunk_size(chunk_rows: int, threads: int) -> None:
    for drafters in ([drafter] for drafter in DRAFTERS):
        engine = engine_of(threads, num_draft=1 + chunk_rows % 16, chunk_rows=chunk_rows, prefix_cache=threads == 2)
        for samplings in (("greedy",), ("coupled",), tuple(SAMPLINGS)):
            check_batch(engine, drafters, samplings, chunk_rows)
    check_batch(engine, DRAFTERS, tuple(SAMPLINGS), chunk_rows + threads)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 7])
def test_small_chunks(chunk_rows: int) -> None:
    for drafter in DRAFTERS:
        engine = engine_of(max_batch=1, chunk_rows=chunk_rows)
        for sampling in SAMPLINGS:
            check_alone(engine, drafter, sampling, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_every_instruction_set(kernels: str) -> None:
    engine = engine_of(kernels=kernels)
    for drafter in DRAFTERS:
        for sampling in SAMPLINGS:
            check_alone(engine, drafter, sampling, 0, kernels)
    assert ROWS[kernels].num_met_again > NUM_TOKENS
