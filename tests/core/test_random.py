"""The random source: keyed, purposes apart, right laws, and pinned values another implementation must meet."""

import itertools

import numpy as np
import pytest
from scipy import stats

from draftsmith.core.random import Purpose, RequestRandom

# Philox4x64-10 with key (seed, sample * 256 + purpose): the first block of a draw has the counter
# (1, position, node, 0), each further block of four adds 1 to the first word. A uniform is
# ((word >> 12) + 0.5) / 2**52, Gumbel noise -log(-log(uniform)).
GOLDEN_SEED, GOLDEN_SAMPLE = 20261129, 3
GOLDEN_ACCEPT = 0.5917241493054538
GOLDEN_GUMBEL = {
    Purpose.TARGET: (-0.8862414445304675, 2.023861430245777, 2.7441215753076564, -0.5027830856515556),
    Purpose.DRAFT: (0.33693981542872714, -0.6157699033122588, 0.1834262369430882, 0.42412615185417196),
    Purpose.RESIDUAL: (0.13548829689708122, -0.19500591962252053, 2.2946059329334134, 0.40034938489043465),
}


def philox(key, counter):
    """Philox4x64-10 (Salmon et al., SC 2011), written from the paper: one block of four words."""
    mask = (1 << 64) - 1
    words, (low, high) = list(counter), key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (second >> 64) ^ words[1] ^ low,
            second & mask,
            (first >> 64) ^ words[3] ^ high,
            first & mask,
        ]
        low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
    return words


def uniforms(seed, sample, purpose, position, node, count):
    """The contract's uniforms, from the independent generator."""
    blocks = range(1, (count + 3) // 4 + 1)
    key = (seed % (1 << 64), (sample << 8) | purpose)
    words = [word for block in blocks for word in philox(key, (block, position, node, 0))][:count]
    return np.array([((word >> 12) + 0.5) / (1 << 52) for word in words])


def draws(random, purpose, position, node, count):
    return {
        Purpose.TARGET: lambda: random.target_gumbel(position, count),
        Purpose.DRAFT: lambda: random.draft_noise(position, node).gumbel(count),
        Purpose.RESIDUAL: lambda: random.residual_gumbel(position, node, count),
        Purpose.ACCEPT: lambda: np.array([random.accept_uniform(position, node)]),
    }[purpose]()


def test_published_philox_vector():
    """Known-answer vector of the algorithm's authors (all zeros), so that our reference is the real one."""
    assert philox((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("seed", (0, 1, GOLDEN_SEED, -5, 2**64 + 7))
def test_equals_an_independent_implementation(purpose, seed):
    for sample, position, node, count in ((0, 0, 0, 1), (GOLDEN_SAMPLE, 17, 5, 9), (255, 2**31, 63, 4)):
        node = 0 if purpose is Purpose.TARGET else node
        found = draws(RequestRandom(seed, sample), purpose, position, node, count)
        wanted = uniforms(seed, sample, purpose, position, node, len(found))
        if purpose is not Purpose.ACCEPT:
            wanted = -np.log(-np.log(wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_golden_values():
    """Pinned: changing any of these changes every sampled output of every user."""
    random = RequestRandom(GOLDEN_SEED, GOLDEN_SAMPLE)
    assert random.accept_uniform(17, 5) == pytest.approx(GOLDEN_ACCEPT, rel=1e-15)
    for purpose, noise in GOLDEN_GUMBEL.items():
        np.testing.assert_allclose(draws(random, purpose, 17, 5, 4), noise, rtol=1e-13)


def test_noise_is_a_pure_function_of_its_key():
    """Neither order, nor repetition, nor what else was drawn changes a draw."""
    first, second = RequestRandom(7), RequestRandom(7)
    keys = list(itertools.product(Purpose, (0, 3, 40), (0, 2)))
    forward = [draws(first, purpose, position, node, 8) for purpose, position, node in keys]
    backward = [draws(second, purpose, position, node, 8) for purpose, position, node in reversed(keys)]
    for one, other in zip(forward, reversed(backward), strict=True):
        np.testing.assert_array_equal(one, other)


def test_target_noise_survives_its_cache():
    random = RequestRandom(7)
    early = random.target_gumbel(0, 5).copy()
    for position in range(1, 100):
        random.target_gumbel(position, 5)
    np.testing.assert_array_equal(random.target_gumbel(0, 5), early)
    with pytest.raises(ValueError, match="read-only"):
        random.target_gumbel(0, 5)[0] = 1.0


def test_no_two_keys_share_noise():
    """Purposes, positions, nodes, samples and seeds all separate; long draws do not run into neighbours."""
    seen: dict[float, tuple] = {}
    for seed, sample in itertools.product((0, 1), (0, 1)):
        random = RequestRandom(seed, sample)
        for purpose, position, node in itertools.product(Purpose, range(6), range(5)):
            if purpose is Purpose.TARGET and node:
                continue
            noise = draws(random, purpose, position, node, 50)
            noise = noise if purpose is Purpose.ACCEPT else np.exp(-np.exp(-noise))
            for index, value in enumerate(noise.tolist()):
                # Gumbel noise is turned back to uniforms, which costs the last bits.
                key = round(value, 12)
                assert key not in seen, (seen[key], (seed, sample, purpose, position, node, index))
                seen[key] = (seed, sample, purpose, position, node, index)
    assert len(seen) > 10_000


def test_longer_draws_extend_shorter_ones():
    """The noise of a token does not depend on the vocabulary size: a padded vocabulary changes nothing."""
    random = RequestRandom(3)
    np.testing.assert_array_equal(random.draft_noise(2, 1).gumbel(1000)[:100], random.draft_noise(2, 1).gumbel(100))
    np.testing.assert_array_equal(random.target_gumbel(2, 1000)[:100], random.target_gumbel(2, 100))


@pytest.mark.parametrize("along", ("vocabulary", "positions", "nodes", "seeds", "samples"))
def test_gumbel_law(along):
    """Kolmogorov-Smirnov along every part of the key, false alarm 1e-6 each (20,000 or 4,000 values)."""
    values = {
        "vocabulary": lambda: RequestRandom(11).residual_gumbel(0, 0, 20_000),
        "positions": lambda: [RequestRandom(11).draft_noise(i, 0).gumbel(1)[0] for i in range(4000)],
        "nodes": lambda: [RequestRandom(11).draft_noise(0, i).gumbel(1)[0] for i in range(4000)],
        "seeds": lambda: [RequestRandom(i).target_gumbel(0, 1)[0] for i in range(4000)],
        "samples": lambda: [RequestRandom(11, i).target_gumbel(0, 1)[0] for i in range(4000)],
    }[along]()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-6


@pytest.mark.parametrize("along", ("nodes", "positions", "seeds"))
def test_uniform_law(along):
    """Kolmogorov-Smirnov, false alarm 1e-6 each (4,000 values); strictly inside (0, 1)."""
    values = {
        "nodes": lambda: [RequestRandom(12).accept_uniform(0, i) for i in range(4000)],
        "positions": lambda: [RequestRandom(12).accept_uniform(i, 1) for i in range(4000)],
        "seeds": lambda: [RequestRandom(i).accept_uniform(0, 1) for i in range(4000)],
    }[along]()
    assert 0 < min(values) and max(values) < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-6


def test_purposes_are_uncorrelated():
    """Pearson correlation between purposes at equal keys; 6 sigma of 4,000 pairs, false alarm below 1e-8 each."""
    columns = {
        purpose: np.array([draws(RequestRandom(i), purpose, 4, 0, 1)[0] for i in range(4000)]) for purpose in Purpose
    }
    for one, other in itertools.combinations(Purpose, 2):
        correlation = float(np.corrcoef(columns[one], columns[other])[0, 1])
        assert abs(correlation) < 6 / 4000**0.5, (one, other, correlation)
