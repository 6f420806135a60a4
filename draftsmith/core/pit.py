"""From an emitted token and the law it should have been drawn from to numbers that are uniform if it was.

Called by the audit. The randomised probability-integral transform (Rosenblatt 1952; Brockwell 2007): order the tokens,
take the mass before the emitted one and a uniform share of its own. Any order will do that is fixed before the token
is looked at; each order shows another kind of drift, so several are used beside each other. Invariant: an
arrangement depends on the law and on what was emitted before, never on the token it is used for.

Shape letters: V vocabulary.
"""

from __future__ import annotations

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
        self._text: tuple[Hashable, list[int], int] = (None, [], 0)

    def start(self, prompt: Hashable, prompt_tokens: Sequence[int]) -> None:
        """A new answer begins. `prompt`: a key of its prompt."""
        self._text = (prompt, list(prompt_tokens), len(prompt_tokens))

    def next(self, law_V: Law, token: int, key: tuple[int, int, int]) -> dict[str, float]:
        """The numbers of the answer's next token, of positive probability. `key`: seed, sample, position."""
        tokens = self._text[1]
        shares = [share(*key, index) for index in range(len(ARRANGEMENTS))]
        after, place = self._contexts()
        found = {
            "likelihood": transform(law_V, token, shares[0]),
            "id": by_id(law_V, token, shares[1]),
            "recency": transform(law_V, token, shares[2], list(dict.fromkeys(reversed(tokens)))),
            "habit": transform(law_V, token, shares[3], *self._habits.arrangement(after)),
            "place": transform(law_V, token, shares[4], *self._habits.arrangement(place)),
        }
        self._habits.note(after, law_V, token)
        self._habits.note(place, law_V, token)
        tokens.append(token)
        return found

    def skip(self, token: int) -> None:
        """A token that is not looked at."""
        self._text[1].append(token)

    def _contexts(self) -> tuple[Hashable, Hashable]:
        prompt, tokens, length = self._text
        return ("after", tokens[-1] if tokens else None), ("place", prompt, tuple(tokens[length:]))


def _without(law_V: Law, tokens: Sequence[int]) -> Law:
    rest_V = law_V.copy()
    rest_V[list(tokens)] = 0.0
    return rest_V
