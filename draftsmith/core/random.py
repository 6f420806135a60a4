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
import numpy.typing as npt

from draftsmith.core import accelerator, elementary
from draftsmith.core.elementary import Vector

_CACHED_POSITIONS = 16
_FEW = 16  # tokens whose noise is made one by one


class Purpose(enum.IntEnum):
    """What a draw is for; part of the key."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class KeyedNoise:
    """The standard Gumbel noise of one key, a value for every token; evaluated where it is asked for.

    `words`: seed, sample and purpose, position, node.
    """

    __slots__ = ("_known_V", "_rough_V", "words")

    def __init__(self, seed: int, stream: int, position: int, node: int) -> None:
        self.words = (seed, stream, int(position), int(node))
        self._known_V: Vector | None = None
        self._rough_V: Vector | None = None

    def gumbel(self, vocab_size: int) -> Vector:
        """All of it, float64 [V]; a new array."""
        native = accelerator.native()
        if native is None:
            return elementary.gumbel(self._raw(vocab_size))
        noise_V = np.empty(vocab_size)
        native.gumbel(*self.words, noise_V)
        return noise_V

    def shared_gumbel(self, vocab_size: int) -> Vector:
        """The same, kept for the next call and read-only."""
        if self._known_V is None or len(self._known_V) != vocab_size:
            self._known_V = self.gumbel(vocab_size)
            self._known_V.flags.writeable = False
        return self._known_V

    def uniform(self) -> float:
        """The number in (0, 1) behind the first value."""
        native = accelerator.native()
        if native is not None:
            found: float = native.uniform(*self.words)
            return found
        return float(elementary.uniforms(self._raw(1))[0])

    def argmax(self, scores: Vector, ids: npt.NDArray[np.int64] | None = None) -> int:
        """Index of the largest score + noise, the first among equals; at least one score is finite.

        Scores [C] belong to `ids` (ascending), or to all tokens [V].
        """
        native = accelerator.native()
        if native is not None and scores.flags.c_contiguous:
            found: int = native.noisy_argmax(scores, *self.words, ids)
            if found >= 0:
                return found if ids is None else int(np.searchsorted(ids, found))
        # The library's logarithms are quick and nearly right; ours decide between those that come near the best.
        rough_V = self._rough_gumbel(len(scores) if ids is None else int(ids[-1]) + 1)
        rough = scores + (rough_V if ids is None else rough_V[ids])
        best = rough.max()
        near = np.flatnonzero(rough >= best - 1e-9 * (1 + abs(best)))
        exact = self._gumbel_of(near if ids is None else ids[near])
        return int(near[(scores[near] + exact).argmax()])

    def _rough_gumbel(self, count: int) -> Vector:
        if self._rough_V is None or len(self._rough_V) < count:
            rough_V = elementary.uniforms(self._raw(count))
            for _ in range(2):
                np.log(rough_V, out=rough_V)
                np.negative(rough_V, out=rough_V)
            self._rough_V = rough_V
        return self._rough_V[:count]

    def gumbel_at(self, ids: npt.NDArray[np.int64]) -> Vector:
        """The noise of these tokens (ascending), float64 [C]."""
        native = accelerator.native()
        if native is None:
            return self._gumbel_of(ids)
        noise = np.empty(len(ids))
        native.gumbel_at(*self.words, np.ascontiguousarray(ids), noise)
        return noise

    def _gumbel_of(self, ids: npt.NDArray[np.int64]) -> Vector:
        if len(ids) > _FEW:
            return elementary.gumbel(self._raw(int(ids[-1]) + 1)[ids])
        return elementary.gumbel(np.array([self._raw(4, token // 4)[token % 4] for token in ids.tolist()]))

    def _raw(self, count: int, first_block: int = 0) -> npt.NDArray[np.uint64]:
        seed, stream, position, node = self.words
        # The counter's lowest word counts blocks of four outputs within the draw.
        philox = np.random.Philox(
            key=np.array([seed, stream], dtype=np.uint64),
            counter=np.array([first_block, position, node, 0], dtype=np.uint64),
        )
        return philox.random_raw(count)


class RequestRandom:
    """Noise of one sample of one request.

    `seed` may be any integer (taken modulo 2**64); `sample` is the index among the request's `n`.
    """

    __slots__ = ("_sample", "_seed", "_targets")

    def __init__(self, seed: int, sample: int = 0) -> None:
        self._seed = seed % (1 << 64)
        self._sample = sample
        self._targets: OrderedDict[int, KeyedNoise] = OrderedDict()

    @property
    def seed(self) -> int:
        """The request's seed, modulo 2**64."""
        return self._seed

    @property
    def sample(self) -> int:
        """The index among the request's `n` samples."""
        return self._sample

    def target_noise(self, position: int) -> KeyedNoise:
        """The noise of the target token at an output position, shared by drafter and verifier."""
        noise = self._targets.get(position)
        if noise is None:
            noise = self._targets[position] = self._noise(Purpose.TARGET, position, 0)
            if len(self._targets) > _CACHED_POSITIONS:
                self._targets.popitem(last=False)
        return noise

    def target_gumbel(self, position: int, vocab_size: int) -> Vector:
        """The same as an array, float64 [V]; kept for a while, so treat it as read-only."""
        return self.target_noise(position).shared_gumbel(vocab_size)

    def draft_noise(self, root_position: int, node: int) -> KeyedNoise:
        """Noise for a draft draw of a ratio rule.

        Key it by the parent's node for a draw without replacement (Gumbel top-k) and by the drawn
        node for independent siblings.
        """
        return self._noise(Purpose.DRAFT, root_position, node)

    def residual_gumbel(self, root_position: int, node: int, vocab_size: int) -> Vector:
        """Standard Gumbel noise, float64 [V], for the residual or bonus token emitted below a node."""
        return self._noise(Purpose.RESIDUAL, root_position, node).gumbel(vocab_size)

    def accept_uniform(self, root_position: int, node: int) -> float:
        """The coin in (0, 1) that accepts or rejects one drafted node."""
        return self._noise(Purpose.ACCEPT, root_position, node).uniform()

    def _noise(self, purpose: Purpose, position: int, node: int) -> KeyedNoise:
        return KeyedNoise(self._seed, (self._sample << 8) | purpose, position, node)
