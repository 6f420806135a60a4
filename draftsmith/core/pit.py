"""From an emitted token and the law it should have been drawn from to numbers that are uniform if it was.

Called by the audit. The randomised probability-integral transform (Rosenblatt 1952; Brockwell 2007): order the tokens,
take the mass before the emitted one and a uniform share of its own. Any order will do that is fixed before the token
is looked at; each order shows another kind of drift, so several are used beside each other. Invariant: an
arrangement depends on the law and on what was emitted before, never on the token it is used for.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from draftsmith.core.random import KeyedNoise

Law: TypeAlias = npt.NDArray[np.float64]
"""Probabilities over the vocabulary, [V]."""

ARRANGEMENTS = ("likelihood", "id", "recency", "habit", "place")
"""By falling probability; by token id; what the text holds already first, the latest in front; and twice by what came
more often than it should in earlier answers, after the same token or at the very same place, which sees answers that
are not independent."""

TILTS = ("tilt after one", "tilt after two", "tilt at the place")
"""Bets on the token itself by what came too often after the same token, after the same two, at the very same place."""

STREAMS = (*ARRANGEMENTS, *TILTS)
_CAUTIONS = (4.0, 32.0)
_STREAM = 1 << 40  # of no request: an engine's streams are sample indices times 256
_LEAST_PROB = 0.01  # tokens rarer than this are only counted where they come
_KNOWN_CONTEXTS = 1 << 16
_SHRINKAGE = 1.0


def share(seed: int, sample: int, position: int, arrangement: int) -> float:
    """The uniform share in (0, 1) of a token's own mass: from a key that no engine draws with."""
    return KeyedNoise(seed % (1 << 64), _STREAM + sample, position, arrangement).uniform()


def transform(law_V: Law, token: int, own_share: float, first: Sequence[int] = (), last: Sequence[int] = ()) -> float:
    """The number in [0, 1] of a token whose probability is not 0.

    `first`: distinct tokens that stand in front, in this order; `last`: distinct other ones that stand behind;
    between them the rest by falling probability, ties by id. Uniform if the token was drawn from `law_V`.
    """
    own = float(law_V[token])
    assert own > 0, "a token that cannot have been drawn"
    if token in first:
        before = float(law_V[list(first[: first.index(token)])].sum())
    elif token in last:
        before = 1.0 - float(law_V[list(last[last.index(token) :])].sum())
    else:
        before = float(law_V[list(first)].sum()) if first else 0.0
        rest_V = _without(law_V, [*first, *last]) if first or last else law_V
        before += float(rest_V[rest_V > own].sum()) + float(rest_V[:token][rest_V[:token] == own].sum())
    return min(max(before + own_share * own, 0.0), 1.0)


def by_id(law_V: Law, token: int, own_share: float) -> float:
    """The number of a token when tokens stand in the order of their ids."""
    return min(float(law_V[:token].sum()) + own_share * float(law_V[token]), 1.0)


@final
class Habits:
    """How often each token came in a context, beside how often it should have; contexts are any keys."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, list[float]]] = {}

    def arrangement(self, context: Hashable) -> tuple[list[int], list[int]]:
        """Tokens that came too often, the worst first; and those that came too seldom, the worst last."""
        known = self._known.get(context)
        if not known:
            return [], []
        ratios = {token: (met + _SHRINKAGE) / (due + _SHRINKAGE) for token, (met, due) in known.items()}
        ranked = sorted(ratios, key=lambda token: (-ratios[token], token))
        return [token for token in ranked if ratios[token] > 1], [token for token in ranked if ratios[token] <= 1]

    def tilt(self, context: Hashable, law_V: Law, token: int, caution: float) -> float:
        """log(q/p) of the token under a law q learned from earlier answers: p, tilted by met over due.

        Its mean over the law p is at most 1 whatever was learned, so it is a bet on the next token. `caution`: as if so
        many of each token had come, and had been due.
        """
        known = self._known.get(context)
        if not known:
            return 0.0
        ratios = {other: (met + caution) / (due + caution) for other, (met, due) in known.items()}
        total = 1.0 + math.fsum(float(law_V[other]) * (ratio - 1.0) for other, ratio in ratios.items())
        return math.log(ratios.get(token, 1.0) / total)

    def note(self, context: Hashable, law_V: Law, token: int) -> None:
        """A token came in a context."""
        known = self._known.get(context)
        if known is None:
            if len(self._known) >= _KNOWN_CONTEXTS:
                return
            known = self._known[context] = {}
        likely = np.flatnonzero(law_V >= _LEAST_PROB).tolist()
        for other in {token, *known, *likely}:
            counts = known.setdefault(other, [0.0, 0.0])
            counts[1] += float(law_V[other])
        known[token][0] += 1


@final
class Transforms:
    """The numbers of the tokens of many answers, in every arrangement."""

    __slots__ = ("_habits", "_text")

    def __init__(self) -> None:
        self._habits = Habits()
        self._text: tuple[tuple[int, ...], list[int], int] = ((), [], 0)

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """A new answer begins."""
        self._text = (tuple(prompt_tokens), list(prompt_tokens), len(prompt_tokens))

    def next(
        self, law_V: Law, token: int, key: tuple[int, int, int]
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The next token's numbers in every arrangement, and its logarithmic gains in every tilt.

        `law_V[token]` is positive. `key`: seed, sample, output position.
        """
        habits, tokens = self._habits, self._text[1]
        shares = [share(*key, index) for index in range(len(ARRANGEMENTS))]
        contexts = self._contexts()
        found = {
            "likelihood": transform(law_V, token, shares[0]),
            "id": by_id(law_V, token, shares[1]),
            "recency": transform(law_V, token, shares[2], list(dict.fromkeys(reversed(tokens)))),
            "habit": transform(law_V, token, shares[3], *habits.arrangement(contexts[0])),
            "place": transform(law_V, token, shares[4], *habits.arrangement(contexts[2])),
        }
        gains = {
            name: [habits.tilt(context, law_V, token, caution) for caution in _CAUTIONS]
            for name, context in zip(TILTS, contexts, strict=True)
        }
        for context in contexts:
            habits.note(context, law_V, token)
        tokens.append(token)
        return found, gains

    def skip(self, token: int) -> None:
        """A token that is not looked at."""
        self._text[1].append(token)

    def _contexts(self) -> tuple[Hashable, Hashable, Hashable]:
        prompt, tokens, length = self._text
        return ("one", *tokens[-1:]), ("two", *tokens[-2:]), ("place", prompt, *tokens[length:])


def _without(law_V: Law, tokens: Sequence[int]) -> Law:
    rest_V = law_V.copy()
    rest_V[list(tokens)] = 0.0
    return rest_V
