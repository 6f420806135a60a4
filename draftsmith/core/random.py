"""The only random source: counter-based noise, a pure function of what it is for.

Called by sampling, verification and drafters. Philox4x64-10 (Salmon et al., SC 2011) with the key
(seed, sample index and purpose) and the counter (position, node): nothing is drawn "next", so a step
without drafts, a batch mate or another draft length never shifts a request's draws.

Two families that never meet. *Target noise* is keyed by the output position alone: plain decoding,
match and seeded coupling. Everything of the ratio rules is keyed by the root's position, the node and
the purpose, so that a redraft from another root never sees noise a verifier has already looked at.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

import numpy as np

_CACHED_POSITIONS = 16


class Purpose(enum.IntEnum):
    """What a draw is for; part of the key."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class RequestRandom:
    """Noise of one sample of one request.

    `seed` may be any integer (taken modulo 2**64); `sample` is the index among the request's `n`.
    """

    __slots__ = ("_sample", "_seed", "_target_cache")

    def __init__(self, seed: int, sample: int = 0) -> None:
        self._seed = seed % (1 << 64)
        self._sample = sample
        self._target_cache: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    @property
    def seed(self) -> int:
        """The request's seed, modulo 2**64."""
        return self._seed

    @property
    def sample(self) -> int:
        """The index among the request's `n` samples."""
        return self._sample

    def target_gumbel(self, position: int, vocab_size: int) -> np.ndarray:
        """Standard Gumbel noise, float64 [V], for the target token at an output position.

        Seeded coupling hands the same array to the drafter; treat it as read-only.
        """
        key = (position, vocab_size)
        noise_V = self._target_cache.get(key)
        if noise_V is None:
            noise_V = _gumbel(self._uniforms(Purpose.TARGET, position, 0, vocab_size))
            noise_V.flags.writeable = False
            self._target_cache[key] = noise_V
            if len(self._target_cache) > _CACHED_POSITIONS:
                self._target_cache.popitem(last=False)
        return noise_V

    def draft_gumbel(self, root_position: int, node: int, vocab_size: int) -> np.ndarray:
        """Standard Gumbel noise, float64 [V], for a draft draw of a ratio rule.

        Key it by the parent's node for a draw without replacement (Gumbel top-k) and by the drawn
        node for independent siblings.
        """
        return _gumbel(self._uniforms(Purpose.DRAFT, root_position, node, vocab_size))

    def residual_gumbel(self, root_position: int, node: int, vocab_size: int) -> np.ndarray:
        """Standard Gumbel noise, float64 [V], for the residual or bonus token emitted below a node."""
        return _gumbel(self._uniforms(Purpose.RESIDUAL, root_position, node, vocab_size))

    def accept_uniform(self, root_position: int, node: int) -> float:
        """The coin in (0, 1) that accepts or rejects one drafted node."""
        return float(self._uniforms(Purpose.ACCEPT, root_position, node, 1)[0])

    def _uniforms(self, purpose: Purpose, position: int, node: int, count: int) -> np.ndarray:
        # The counter's lowest word counts blocks of four outputs within the draw.
        stream = np.random.Philox(
            key=np.array([self._seed, (self._sample << 8) | purpose], dtype=np.uint64),
            counter=np.array([0, position, node, 0], dtype=np.uint64),
        )
        raw = stream.random_raw(count)
        # Half a step off zero: strictly inside (0, 1), so the logarithms below are finite.
        return ((raw >> np.uint64(12)) + 0.5) * (1.0 / (1 << 52))


def _gumbel(uniforms: np.ndarray) -> np.ndarray:
    np.log(uniforms, out=uniforms)
    np.negative(uniforms, out=uniforms)
    np.log(uniforms, out=uniforms)
    np.negative(uniforms, out=uniforms)
    return uniforms
