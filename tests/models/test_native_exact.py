"""The native backend's promise: what a row gives depends, bit for bit, on its own tokens and its ancestors alone.

`Oracle` decodes every text plainly, one row at a time on one thread; `Script` runs random steps (chunks, trees,
shuffled batches, keep, truncate, fork, close) and compares every row's logits and taps with it. Equality holds
within one instruction set, so each is tested for itself.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.models.backend import RowGroup, Scored
from draftsmith.models.native import NativeBackend
from tests.models.native_models import (
    KERNELS,
    Model,
    block_models,
    float_models,
    make_native,
    paths_of,
    random_tree,
)

TAPS = frozenset({0, 1, 2, "last_hidden"})
CACHES = ("float16", "bfloat16", "float32")
CONTEXTS = (0, 1, 2, 14, 15, 16, 17, 30, 31, 33, 62, 63, 64, 65, 66, 127, 130)
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)

Row = tuple[bytes, ...]


def rows_of(scored: Scored, group: int, taps: frozenset[int | str] = TAPS) -> list[Row]:
    """Per row, the bytes of its logits and taps."""
    parts = [scored.logits[group], *(scored.taps[group][tap] for tap in sorted(taps, key=str))]
    return [tuple(part[row].numpy().tobytes() for part in parts) for row in range(len(parts[0]))]


class Oracle:
    """What each text's last row gives when it is decoded plainly."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._sequences: dict[tuple[int, ...], int] = {}
        self._rows: dict[tuple[int, ...], Row] = {}
        backend.cache.open(-1)
        self._sequences[()] = -1

    def row(self, text: tuple[int, ...]) -> Row:
        known = len(text)
        while text[:known] not in self._sequences:
            known -= 1
        for length in range(known, len(text)):
            sequence = len(self._sequences)
            self._backend.cache.fork(self._sequences[text[:length]], sequence, length)
            self._sequences[text[: length + 1]] = sequence
            self._rows[text[: length + 1]] = self._score(sequence, text[length])
        return self._rows[text]

    def _score(self, sequence: int, token: int) -> Row:
        self._backend.cache.reserve(sequence, 1)
        scored = self._backend.score([RowGroup(sequence, [token], [-1], 0)], TAPS)
        self._backend.cache.keep(sequence, [0])
        return rows_of(scored, 0)[0]

    def check_itself(self) -> None:
        """The longest text once more in one sequence that was never forked."""
        longest = max(self._rows, key=len)
        self._backend.cache.open(-2)
        for place, token in enumerate(longest):
            assert self._score(-2, token) == self._rows[longest[: place + 1]], f"oracle, position {place}"


class Script:
    """Random steps over several sequences; every row must be the oracle's."""

    def __init__(self, backend: NativeBackend, oracle: Oracle, seed: int) -> None:
        self._backend, self._oracle = backend, oracle
        self._random = random.Random(seed)
        self._cache = backend.cache
        self._next_id = 0

    def run(self, num_steps: int) -> None:
        for context in self._random.sample(CONTEXTS, 3):
            self._open(context)
        for _ in range(num_steps):
            self._step()
            self._change()
            self._cache.check()

    def _tokens(self, count: int) -> list[int]:
        # Few different tokens, so that texts of different sequences meet.
        return [self._random.randrange(min(5, self._backend.spec.vocab_size)) for _ in range(count)]

    def _open(self, context: int) -> None:
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._cache.open(sequence)
        left = self._tokens(context)
        while left:
            size = self._random.choice([1, 2, 5, 9, 40, len(left)])
            chunk, left = left[:size], left[size:]
            self._score([(sequence, chunk, list(range(-1, len(chunk) - 1)))])
            self._cache.keep(sequence, range(len(chunk)))

    def _step(self) -> None:
        groups = []
        for sequence in self._random.sample(self._ids, self._random.randint(1, len(self._ids))):
            num_rows = self._random.choice([1, 1, 2, 3, 4, 5, 8, 9, 17, 20])
            reach = self._random.choice([1, 2, 4, 20])
            groups.append((sequence, self._tokens(num_rows), random_tree(self._random, num_rows, reach)))
        self._score(groups)
        for sequence, tokens, parents in groups:
            self._cache.keep(sequence, self._a_path(len(tokens), parents))

    def _a_path(self, num_rows: int, parents: list[int]) -> list[int]:
        row, path = self._random.randint(-1, num_rows - 1), []
        while row >= 0:
            path.insert(0, row)
            row = parents[row]
        return path

    @property
    def _ids(self) -> list[int]:
        return self._cache.sequence_ids

    def _change(self) -> None:
        sequence = self._random.choice(self._ids)
        length = self._random.randint(0, self._cache.committed(sequence))
        action = self._random.choice(["truncate", "fork", "close", "nothing"])
        if action == "truncate" and self._cache.reusable_len(sequence, length) == length:
            self._cache.truncate(sequence, length)
        elif action == "fork" and len(self._ids) < 5 and self._cache.reusable_len(sequence, length) == length:
            self._cache.fork(sequence, self._next_id, length)
            self._next_id += 1
        elif action == "close" and len(self._ids) > 2:
            self._cache.close(sequence)

    def _score(self, groups: list[tuple[int, list[int], list[int]]]) -> None:
        for sequence, tokens, _ in groups:
            self._cache.reserve(sequence, len(tokens))
        scored = self._backend.score([RowGroup(*group, 0) for group in groups], TAPS)
        for index, (sequence, tokens, parents) in enumerate(groups):
            behind = tuple(self._cache.tokens(sequence))
            for row, path in enumerate(paths_of(tokens, parents)):
                expected = self._oracle.row(behind + path)
                assert rows_of(scored, index)[row] == expected, (
                    f"group {index} of {[len(group[1]) for group in groups]}, row {row}, parents {parents}, "
                    f"{len(behind)} tokens behind"
                )


def check(model: Model, *, threads: int, seed: int, num_steps: int = 5, **options: Any) -> None:
    oracle = Oracle(make_native(model, 1, **options))
    Script(make_native(model, threads, **options), oracle, seed).run(num_steps)
    oracle.check_itself()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kernels", KERNELS)
@given(model=st.one_of(float_models(), block_models()), seed=st.integers(0, 9999))
@settings(RELAXED, max_examples=6)
def test_a_row_is_what_plain_decoding_gives(kernels: str, cache: str, model: Model, seed: int) -> None:
    check(model, threads=1, seed=seed, kernels=kernels, cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kernels", KERNELS)
@given(model=st.one_of(float_models(), block_models()), threads=st.integers(1, 3), seed=st.integers(0, 9999))
@settings(RELAXED, max_examples=60)
def test_many_rows_are_what_plain_decoding_gives(
    kernels: str, cache: str, model: Model, threads: int, seed: int
) -> None:
    check(model, threads=threads, seed=seed, num_steps=8, kernels=kernels, cache=cache)


@pytest.mark.parametrize("threads", [2, 3])
@given(model=st.one_of(float_models(), block_models()), seed=st.integers(0, 9999))
@settings(RELAXED, max_examples=4)
def test_threads_change_no_bit(threads: int, model: Model, seed: int) -> None:
    check(model, threads=threads, seed=seed, num_steps=3)
