"""In float32 on the CPU a row's logits do not depend, bit for bit, on how rows are cut, packed or treed.

This is what makes speculative output equal plain output without exceptions. It rests on the BLAS library
summing products of up to 256 terms in order for two rows or more; where a library does not, these tests
are skipped and equality holds up to rounding (`test_reference.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from draftsmith.models.attention import VALUE_BLOCK, position_blocks
from draftsmith.models.backend import RowGroup
from draftsmith.models.reference import ReferenceBackend
from tests.models.fakes import tiny_backend

SIZES: dict[str, Any] = {"width": 128, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "mlp_width": 192}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"layer_windows": (40, None)},
    "one-query-head-per-group": {"num_heads": 2, "qkv_bias": True, "qk_norm": True},
    "two-query-heads-per-group": {"num_heads": 4, "mlp_bias": True, "output_bias": True},
    "one-group": {"num_heads": 4, "num_kv_heads": 1, "tied_head": False, "vocab_size": 70},
}


def blas_sums_in_order() -> bool:
    generator = torch.Generator().manual_seed(0)
    for terms in (64, VALUE_BLOCK, 576):
        rows = torch.randn(3, 48, terms, generator=generator)
        weights = torch.randn(3, terms, 48, generator=generator)
        expected = torch.bmm(rows, weights)
        for count in (2, 3, 7, 24):
            if not torch.equal(torch.bmm(rows[:, :count], weights), expected[:, :count]):
                return False
    longer = torch.nn.functional.pad(rows[:, :, :64], (0, 30))
    return torch.equal(torch.bmm(longer, weights[:, :94]), torch.bmm(rows[:, :, :64], weights[:, :64]))


pytestmark = pytest.mark.skipif(not blas_sums_in_order(), reason="this BLAS library sums in varying order")


def make(variant: str) -> ReferenceBackend:
    return tiny_backend(1, dtype=torch.float32, **{**SIZES, **VARIANTS[variant]})


def text(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(64) for _ in range(length)]


def feed(backend: ReferenceBackend, sequence_id: int, tokens: list[int]) -> torch.Tensor:
    backend.cache.reserve(sequence_id, len(tokens))
    logits = backend.score([RowGroup(sequence_id, tokens, range(-1, len(tokens) - 1), 0)]).logits[0]
    backend.cache.keep(sequence_id, range(len(tokens)))
    return logits


def one_by_one(backend: ReferenceBackend, sequence_id: int, tokens: list[int]) -> torch.Tensor:
    return torch.cat([feed(backend, sequence_id, [token]) for token in tokens])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [[2], [7], [8, 1, 3], [129, 5], [300]], ids=str)
def test_any_chunking_gives_the_bits_of_one_by_one(variant: str, cuts: list[int]) -> None:
    backend = make(variant)
    tokens = text(300)
    backend.cache.open(0)
    backend.cache.open(1)
    expected = one_by_one(backend, 0, tokens)
    parts, position, step = [], 0, 0
    while position < len(tokens):
        size = cuts[step % len(cuts)]
        parts.append(feed(backend, 1, tokens[position : position + size]))
        position, step = position + size, step + 1
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("context", [0, 1, 20, 250, 255, 256])
def test_a_tree_gives_the_bits_of_its_paths(variant: str, context: int) -> None:
    """At 250 and 255 some nodes' positions lie in one block of positions and some in the next."""
    backend = make(variant)
    generator = random.Random(context)
    parents = [-1] + [generator.randint(max(-1, row - 4), row - 1) for row in range(1, 20)]
    tokens = text(20, seed=1)
    backend.cache.open(0)
    if context:
        feed(backend, 0, text(context))
    backend.cache.reserve(0, 20)
    logits = backend.score([RowGroup(0, tokens, parents, 0)]).logits[0]
    backend.cache.keep(0, ())
    for node in range(20):
        path: list[int] = []
        row = node
        while row >= 0:
            path.insert(0, tokens[row])
            row = parents[row]
        backend.cache.fork(0, 1, context)
        assert torch.equal(one_by_one(backend, 1, path)[-1], logits[node])
        backend.cache.close(1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_company_in_a_batch_changes_no_bit(variant: str) -> None:
    backend = make(variant)
    groups, expected = [], []
    for sequence_id, (context, num_rows) in enumerate([(3, 1), (100, 8), (260, 1), (30, 40)]):
        backend.cache.open(sequence_id)
        feed(backend, sequence_id, text(context, seed=sequence_id))
        group = RowGroup(sequence_id, text(num_rows, seed=9), range(-1, num_rows - 1), 0)
        backend.cache.reserve(sequence_id, num_rows)
        expected.append(backend.score([group]).logits[0])
        backend.cache.keep(sequence_id, ())
        groups.append(group)
    for place, logits in zip((2, 0, 3, 1), backend.score([groups[i] for i in (2, 0, 3, 1)]).logits, strict=True):
        assert torch.equal(logits, expected[place])


def test_position_blocks_cover_all_visible_rows_once() -> None:
    like = torch.zeros(1)
    assert position_blocks(0, 0, [-1], like) == [(0, 1, None)]
    assert position_blocks(0, 256, [-1, 0], like) == [(0, 256, None), (256, 258, None)]
    assert position_blocks(250, 600, [-1], like) == [(0, 6, None), (6, 262, None), (262, 351, None)]
    # Depths 0 1 1 2 2 3 behind 254 rows: positions 254 255 255 | 256 256 257.
    blocks = position_blocks(0, 254, [-1, 0, 0, 1, 2, 3], like)
    assert [(start, end) for start, end, _ in blocks] == [(0, 257), (257, 260)]
    # Depths 0 1 2 1 2: positions 254 255 | 256, 255 | 256.
    (first_start, first_end, first), (second_start, second_end, second) = position_blocks(
        0, 254, [-1, 0, 1, 0, 3], like
    )
    assert (first_start, first_end, second_start, second_end) == (0, 258, 256, 259)
    assert first is not None and second is not None
    assert first[-4:].tolist() == [1, 1, 0, 1]
    assert second.tolist() == [1, 0, 1]
