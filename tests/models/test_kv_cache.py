"""The KV cache against a naive one: rows are numbers, sequences are Python lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftsmith.models.kv_cache import KVCache
from draftsmith.models.layer_state import LayerState, doubled
from draftsmith.models.spec import DecoderSpec
from tests.models.fakes import tiny_spec

WINDOW = 9
MIXED = tiny_spec(num_layers=3, layer_windows=(WINDOW, None, WINDOW))
FULL = tiny_spec(num_layers=2)
WINDOWED = tiny_spec(num_layers=2, layer_windows=(WINDOW, WINDOW))


def make(spec: DecoderSpec, key_block: int = 1) -> KVCache:
    device = torch.device("cpu")
    return KVCache(spec, dtype=torch.float64, device=device, max_step_rows=16, key_block=key_block)


def place_of(state: LayerState, positions: range) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Keys [L, J, blocks, K, block], and the index under which the rows of some positions lie in them."""
    block = state.shape.key_block
    rows = state.rows_LJCK
    keys = rows[:, 0].view(rows.shape[0], rows.shape[2], -1, rows.shape[4], block)
    slots = torch.tensor(positions, dtype=torch.int64) - state.first
    return keys, (slice(None), slice(None), slots // block, slice(None), slots % block)


def write(cache: KVCache, sequence_id: int, numbers: list[int], parents: list[int]) -> None:
    """Reserve, append and fill each new row of every layer with its number (keys) and minus it (values)."""
    cache.reserve(sequence_id, len(numbers))
    committed = cache.committed(sequence_id)
    cache.append(sequence_id, numbers, parents)
    values = torch.tensor(numbers, dtype=torch.float64)[:, None]
    for state in cache.layers(sequence_id):
        keys, places = place_of(state, range(committed, committed + len(numbers)))
        keys[places] = values[:, :, None, None]
        state.rows_LJCK[:, 1, :, committed - state.first :][:, :, : len(numbers)] = -values


def chain(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


def write_chain(cache: KVCache, sequence_id: int, numbers: list[int]) -> None:
    write(cache, sequence_id, numbers, chain(len(numbers)))
    cache.keep(sequence_id, range(len(numbers)))


def seen_rows(cache: KVCache, sequence_id: int, kind: int) -> list[int]:
    """The numbers in the committed rows that the next position sees in layers of a kind, checked to agree."""
    window, length = cache.windows[kind], cache.committed(sequence_id)
    start = 0 if window is None else max(0, length - window + 1)
    state = cache.layers(sequence_id)[kind]
    keys, places = place_of(state, range(start, length))
    rows = keys[places]  # [rows, L, J, K]
    assert (rows == rows[:, :1, :1, :1]).all()
    values = state.rows_LJCK[:, 1, :, start - state.first : length - state.first]
    assert (values == -rows.permute(1, 2, 0, 3)).all()
    return [int(number) for number in rows[:, 0, 0, 0]]


def expected_rows(cache: KVCache, kind: int, numbers: list[int]) -> list[int]:
    window = cache.windows[kind]
    return numbers if window is None else numbers[max(0, len(numbers) - window + 1) :]


@dataclass
class Naive:
    """The same sequences, kept as lists."""

    sequences: dict[int, list[int]] = field(default_factory=dict)
    next_number: int = 1

    def fresh(self, count: int) -> list[int]:
        self.next_number += count
        return list(range(self.next_number - count, self.next_number))


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls leaves the cache equal to lists, on full and windowed layers at once."""

    spec, key_block = MIXED, 1

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(self.spec, self.key_block)
        self.naive = Naive()
        self.next_id = 0

    def _pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.naive.sequences)))

    @rule()
    def open(self) -> None:
        self.cache.open(self.next_id)
        self.naive.sequences[self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence_id = self._pick(data)
        self.cache.close(sequence_id)
        del self.naive.sequences[sequence_id]

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), num_rows=st.integers(1, 40))
    def chunk(self, data: st.DataObject, num_rows: int) -> None:
        sequence_id = self._pick(data)
        numbers = self.naive.fresh(num_rows)
        write_chain(self.cache, sequence_id, numbers)
        self.naive.sequences[sequence_id] += numbers

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), num_rows=st.integers(1, 12), seed=st.integers(0, 1000))
    def tree(self, data: st.DataObject, num_rows: int, seed: int) -> None:
        sequence_id = self._pick(data)
        generator = random.Random(seed)
        parents = [generator.randint(-1, row - 1) if row else -1 for row in range(num_rows)]
        numbers = self.naive.fresh(num_rows)
        write(self.cache, sequence_id, numbers, parents)
        assert self.cache.written(sequence_id) == len(self.naive.sequences[sequence_id]) + num_rows
        path: list[int] = []
        node = generator.randint(-1, num_rows - 1)
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        self.cache.keep(sequence_id, path)
        self.naive.sequences[sequence_id] += [numbers[row] for row in path]

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), share=st.floats(0, 1), write_first=st.booleans())
    def truncate(self, data: st.DataObject, share: float, write_first: bool) -> None:
        sequence_id = self._pick(data)
        if write_first:
            write(self.cache, sequence_id, self.naive.fresh(3), [-1, 0, 0])
        length = round(share * len(self.naive.sequences[sequence_id]))
        length = self.cache.reusable_len(sequence_id, length)
        self.cache.truncate(sequence_id, length)
        del self.naive.sequences[sequence_id][length:]

    @precondition(lambda self: self.naive.sequences)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        source = self._pick(data)
        length = self.cache.reusable_len(source, round(share * len(self.naive.sequences[source])))
        self.cache.fork(source, self.next_id, length)
        self.naive.sequences[self.next_id] = self.naive.sequences[source][:length]
        self.next_id += 1

    @invariant()
    def equals_naive(self) -> None:
        self.cache.check()
        assert self.cache.sequence_ids == list(self.naive.sequences)
        for sequence_id, numbers in self.naive.sequences.items():
            assert self.cache.tokens(sequence_id) == numbers
            assert self.cache.committed(sequence_id) == self.cache.written(sequence_id) == len(numbers)
            for kind in range(len(self.cache.windows)):
                assert seen_rows(self.cache, sequence_id, kind) == expected_rows(self.cache, kind, numbers)


class BlockedMachine(CacheMachine):
    """The same with keys in blocks, and windows that begin anywhere in one."""

    spec, key_block = tiny_spec(num_layers=3, layer_windows=(WINDOW, None, 40)), 16


TestCacheMachine = CacheMachine.TestCase
TestBlockedMachine = BlockedMachine.TestCase
TestCacheMachine.settings = TestBlockedMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_slots_grow_by_doubling_and_never_shrink() -> None:
    cache = make(FULL)
    cache.open(0)
    capacities = []
    for length in range(1, 300):
        write_chain(cache, 0, [length])
        capacities.append(cache.reserved(0))
    assert sorted(set(capacities)) == [64, 128, 256, 512]
    assert capacities == sorted(capacities)
    assert seen_rows(cache, 0, 0) == list(range(1, 300))


def test_reserve_makes_room_behind_the_committed_rows() -> None:
    cache = make(MIXED)
    cache.open(0)
    write_chain(cache, 0, list(range(60)))
    cache.reserve(0, 100)
    assert cache.reserved(0) >= 160
    assert cache.committed(0) == cache.written(0) == 60


def test_a_chain_prefix_is_kept_without_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(MIXED)
    cache.open(0)
    write(cache, 0, list(range(8)), chain(8))

    def refuse(*_: object) -> None:
        raise AssertionError("rows that lie in place were moved")

    for state in cache.layers(0):
        monkeypatch.setattr(type(state), "keep", refuse)
    cache.keep(0, range(5))
    assert cache.tokens(0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key_block", [1, 4, 16])
def test_a_path_of_a_tree_is_moved_together(key_block: int) -> None:
    cache = make(MIXED, key_block)
    cache.open(0)
    write_chain(cache, 0, [100, 101])
    write(cache, 0, [1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 4])
    cache.keep(0, (0, 2, 4, 5))
    assert cache.tokens(0) == [100, 101, 1, 3, 5, 6]
    assert seen_rows(cache, 0, 0) == [100, 101, 1, 3, 5, 6]


@pytest.mark.parametrize("path", [(1,), (0, 2), (0, 1, 1), (2, 0)])
def test_what_is_not_a_path_is_refused(path: tuple[int, ...]) -> None:
    cache = make(FULL)
    cache.open(0)
    write(cache, 0, [7, 8, 9], [-1, 0, 1])
    with pytest.raises(AssertionError):
        cache.keep(0, path)


@pytest.mark.parametrize(("key_block", "most"), [(1, WINDOW + 16), (16, 48)])
def test_rejected_rows_never_overwrite_live_keys_of_a_window(key_block: int, most: int) -> None:
    """A ring of exactly the window would lose its oldest live keys to rows that are then rejected."""
    cache = make(WINDOWED, key_block)
    cache.open(0)
    kept: list[int] = []
    for step in range(400):
        accepted = [1000 * step + 1]
        write(cache, 0, accepted + [-5] * 15, chain(16))
        cache.keep(0, (0,))
        kept += accepted
        assert seen_rows(cache, 0, 0) == kept[-(WINDOW - 1) :]
    assert cache.layers(0)[0].capacity <= most


def test_windowed_layers_hold_bounded_memory() -> None:
    cache = make(WINDOWED)
    cache.open(0)
    for _ in range(100):
        write_chain(cache, 0, list(range(16)))
        assert cache.used_bytes <= cache.sequence_bytes(10_000) == (WINDOW + 16) * cache.bytes_per_token


def test_reusable_len_tells_what_windows_have_dropped() -> None:
    cache = make(MIXED)
    cache.open(0)
    write_chain(cache, 0, list(range(10)))
    assert cache.reusable_len(0, 4) == 4
    assert cache.reusable_len(0, 99) == 10
    for _ in range(20):
        write_chain(cache, 0, list(range(10)))
    assert cache.reusable_len(0, 210) == 210
    assert cache.reusable_len(0, 100) == 0, "rows 92..99 left the window long ago"
    with pytest.raises(AssertionError):
        cache.truncate(0, 100)
    with pytest.raises(AssertionError):
        cache.fork(0, 1, 100)


def test_fork_is_independent_of_its_source() -> None:
    cache = make(MIXED)
    cache.open(0)
    write_chain(cache, 0, list(range(20)))
    cache.fork(0, 1, 12)
    write_chain(cache, 0, [500])
    write_chain(cache, 1, [600, 601])
    cache.close(0)
    assert cache.tokens(1) == [*range(12), 600, 601]
    assert seen_rows(cache, 1, cache.windows.index(None)) == [*range(12), 600, 601]


def test_fork_into_an_open_empty_sequence_but_not_into_a_used_one() -> None:
    cache = make(FULL)
    for sequence_id in (0, 1, 2):
        cache.open(sequence_id)
    write_chain(cache, 0, [1, 2, 3])
    write_chain(cache, 2, [9])
    cache.fork(0, 1, 2)
    assert cache.tokens(1) == [1, 2]
    with pytest.raises(AssertionError):
        cache.fork(0, 2, 2)


def test_misuse_is_caught() -> None:
    cache = make(FULL)
    cache.open(0)
    with pytest.raises(AssertionError):
        cache.open(0)
    with pytest.raises(AssertionError):
        cache.append(0, [1], [-1])  # nothing reserved
    write(cache, 0, [1, 2], [-1, 0])
    with pytest.raises(AssertionError):
        cache.append(0, [3], [-1])  # the last step was not settled
    with pytest.raises(AssertionError):
        cache.reserve(0, 4)
    cache.keep(0, ())
    with pytest.raises(AssertionError):
        cache.truncate(0, 1)  # longer than what is committed


def test_used_bytes_follow_open_sequences() -> None:
    cache = make(MIXED)
    assert cache.used_bytes == 0
    rows = 2 * MIXED.num_kv_heads * MIXED.head_dim * 8
    assert cache.bytes_per_token == 3 * rows
    cache.open(0)
    write_chain(cache, 0, list(range(15)))
    assert cache.used_bytes == 64 * rows + 2 * rows * (WINDOW + 15)
    assert cache.used_bytes <= cache.sequence_bytes(15) == 64 * rows + 2 * rows * (WINDOW + 16)
    cache.close(0)
    assert cache.used_bytes == 0


@pytest.mark.parametrize(
    ("num_rows", "capacity"), [(0, 64), (1, 64), (64, 64), (65, 128), (128, 128), (1000, 1024), (1025, 2048)]
)
def test_doubled(num_rows: int, capacity: int) -> None:
    assert doubled(num_rows) == capacity
