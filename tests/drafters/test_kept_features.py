"""Features kept in pieces say what one matrix would, whatever is appended, cut, forked and read in between."""

import random

import pytest
import torch

from draftsmith.drafters.kept_features import KeptFeatures


def taps_of(rng, count, scored):
    """Three taps of `count` kept rows, views of `scored` scored ones as the engine hands them out."""
    return [torch.randn(scored, 2, generator=rng)[:count] for _ in range(3)]


@pytest.mark.parametrize("seed", range(8))
def test_every_range_is_that_of_one_matrix(seed):
    draw, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kept, matrix = KeptFeatures(torch.bfloat16), torch.empty(0, 6, dtype=torch.bfloat16)
    for _ in range(200):
        count = draw.choice((0, 1, 1, 1, 3, 90))
        taps = taps_of(rng, count, count + draw.randrange(4))
        kept.append(taps)
        matrix = torch.cat([matrix, torch.cat(taps, dim=-1).to(torch.bfloat16)])
        if draw.random() < 0.1 and len(matrix):
            length = draw.randint(1, len(matrix) + 2)
            twin = kept.first(length)
            assert twin.length == min(length, len(matrix))
            if draw.random() < 0.5:  # go on with the copy; the other must not notice
                before = kept.rows(0, kept.length).clone()
                twin.append(taps_of(rng, 2, 5))
                assert torch.equal(kept.rows(0, kept.length), before)
                kept, matrix = kept.first(length), matrix[:length]
        assert kept.length == len(matrix)
        if len(matrix) and draw.random() < 0.3:
            start = draw.randint(0, len(matrix))
            stop = draw.randint(start, len(matrix))
            assert torch.equal(kept.rows(start, stop), matrix[start:stop])


def test_what_was_rejected_is_let_go():
    """Blocks are views of all scored rows; joined ones hold what was kept and nothing else."""
    kept, rng = KeptFeatures(torch.float32), torch.Generator().manual_seed(0)
    for _ in range(65):
        kept.append(taps_of(rng, 1, 50))
    assert kept.rows(0, 65).shape == (65, 6)
    assert sum(block.untyped_storage().nbytes() for block in kept._blocks) == 65 * 6 * 4
    kept.append(taps_of(rng, 500, 500))
    assert not kept._raw, "a prompt's rows are joined when they come"
