"""Which synthetic texts are kept: not too short, not broken, not repeating themselves or one another.

Used by synthesis, in the order of the texts. Near duplicates are found by MinHash over shingles of 13 pieces (a
piece is a word or one other character), banded so that only likely pairs are compared. Invariant: the verdict on a
text depends on it and on the texts kept before it, on nothing else.

Shape letters: P permutations, N shingles.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from draftsmith.errors import OptionError
from draftsmith.training.texts import Text

_PIECE = re.compile(r"[A-Za-z0-9_]+|[^\sA-Za-z0-9_]")
_SHINGLE = 13
_BANDS, _ROWS = 16, 4
_LOOP = 6
"""Pieces of an n-gram that counts as repeated; shorter ones come again in any list."""
_MIN_LOOPED = 40
"""Texts of fewer pieces are not looked at for loops."""
_IN_LOOP = 0.9
"""Share of what is left of a text that is repeated where the text is in a loop."""
_KEPT_OF_LOOP = 24
"""Pieces of a loop that stay: a drafter has to learn to follow one too."""
_SAME_ANSWER = 12
"""Equal answers of so many pieces are one too many; shorter ones ("Yes.") may come again."""


@dataclass(frozen=True, kw_only=True)
class SieveOptions:
    """`min_prompt`, `min_answer`: fewest pieces. `most_repeated`: share of a text that may have been there before in
    the same text. `near`: Jaccard similarity of shingles from which a text is a duplicate. Raises `OptionError`.
    """

    min_prompt: int = 3
    min_answer: int = 2
    most_repeated: float = 0.5
    near: float = 0.6

    def __post_init__(self) -> None:
        for name in ("most_repeated", "near"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")


@final
class Sieve:
    """Judges texts one after another."""

    def __init__(self, options: SieveOptions | None = None) -> None:
        self._options = options or SieveOptions()
        self._prompts: set[bytes] = set()
        self._answers: set[bytes] = set()
        self._signatures: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        rng = np.random.default_rng(13)
        self._factors_P = rng.integers(1, 1 << 63, _BANDS * _ROWS, dtype=np.uint64) | np.uint64(1)
        self._terms_P = rng.integers(0, 1 << 63, _BANDS * _ROWS, dtype=np.uint64)

    def keep(self, text: Text) -> None:
        """Take a text that is kept, whatever it is like (one of an earlier run)."""
        self._judge(text, insist=True)

    def judge(self, text: Text) -> str | None:
        """Why a text is not kept; None for one that is, which is then remembered."""
        return self._fault(text) or self._judge(text, insist=False)

    def _fault(self, text: Text) -> str | None:
        options = self._options
        asked, answered = text.said_by("user"), text.said_by("assistant")
        if any("\ufffd" in part for part in (*asked, *answered)):
            return "broken characters"
        if any(len(pieces(part)) < options.min_prompt for part in asked[:1]):
            return "short prompt"
        if any(len(pieces(part)) < options.min_answer for part in answered):
            return "short answer"
        if any(repeated_share(pieces(part)) > options.most_repeated for part in (*asked, *answered)):
            return "repetition"
        return None

    def _judge(self, text: Text, *, insist: bool) -> str | None:
        asked, answered = (pieces(" ".join(text.said_by(role)).lower()) for role in ("user", "assistant"))
        prompt, answer = _digest(asked), _digest(answered)
        if not insist and prompt in self._prompts:
            return "same prompt"
        if not insist and answer in self._answers:
            return "same answer"
        signature_P = self._signature([*asked, "|", *answered])
        keys = [(band, signature_P[band * _ROWS : (band + 1) * _ROWS].tobytes()) for band in range(_BANDS)]
        likely = {other for key in keys for other in self._bands.get(key, ())}
        if not insist and any(
            float((self._signatures[other] == signature_P).mean()) >= self._options.near for other in likely
        ):
            return "near duplicate"
        self._prompts.add(prompt)
        if len(answered) >= _SAME_ANSWER:
            self._answers.add(answer)
        for key in keys:
            self._bands[key].append(len(self._signatures))
        self._signatures.append(signature_P)
        return None

    def _signature(self, words: Sequence[str]) -> np.ndarray:
        """The smallest hash of any shingle under each permutation, uint32 [P]."""
        last = max(1, len(words) - _SHINGLE + 1)
        shingles = {" ".join(words[start : start + _SHINGLE]) for start in range(last)}
        hashes_N = np.array([zlib.crc32(shingle.encode()) for shingle in shingles], dtype=np.uint64)
        # Multiply-shift: the upper half of a product that wraps around is a hash of its own for every factor.
        mixed_NP = hashes_N[:, None] * self._factors_P[None] + self._terms_P[None]
        return (mixed_NP >> np.uint64(32)).min(axis=0).astype(np.uint32)


def pieces(text: str) -> list[str]:
    """Words, and every other character by itself (so that text without spaces has pieces too)."""
    return _PIECE.findall(text)


def repeated_share(words: Sequence[str]) -> float:
    """Share of a text covered by runs that stood in it before: near 1 for a loop, 0 for a short text."""
    return sum(_repeated(words)) / len(words) if len(words) >= _MIN_LOOPED else 0.0


def loop_start(text: str) -> int | None:
    """Where a text has fallen into a loop that it never leaves, in characters; None where it has not.

    Small models answering greedily often end so. What comes before is as good as any other text.
    """
    found = list(_PIECE.finditer(text))
    repeated = _repeated([piece.group() for piece in found])
    start, covered = None, 0
    for place in range(len(found) - 1, -1, -1):
        covered += repeated[place]
        length = len(found) - place
        if length >= _MIN_LOOPED and repeated[place] and covered >= _IN_LOOP * length:
            start = place
    return None if start is None else found[start + _KEPT_OF_LOOP].start()


def _repeated(words: Sequence[str]) -> list[bool]:
    """For each piece whether it is in a run of pieces that stood in the text before."""
    seen: set[tuple[str, ...]] = set()
    covered = [False] * len(words)
    for start in range(len(words) - _LOOP + 1):
        gram = tuple(words[start : start + _LOOP])
        if gram in seen:
            covered[start : start + _LOOP] = [True] * _LOOP
        seen.add(gram)
    return covered


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=16).digest()
