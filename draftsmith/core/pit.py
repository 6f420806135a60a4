"""From an emitted token and the law it should have been drawn from to numbers that are uniform if it was.

Called by the audit. The randomised probability-integral transform (Rosenblatt 1952; Brockwell 2007): order the tokens,
take the mass before the emitted one and a uniform share of its own. Any order will do that is fixed before the token
is looked at; each order shows another kind of drift, so several are used beside each other. Invariant: an
arrangement depends on the law and on what was emitted before, never on the token it is used for.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from draftsmith.core.random import KeyedNoise

Law: TypeAlias = npt.NDArray[np.float64]
"""Probabilities over the vocabulary, [V]."""

ARRANGEMENTS = ("likelihood", "id", "recency", "sibling")
"""By falling probability; by token id; what the text holds already first, the latest in front; what earlier answers put
at this very place first. The first sees temperature, truncation and residuals, the third penalties and copying, the
fourth answers that are not independent."""

_STREAM = 1 << 40  # of no request: an engine's streams are sample indices times 256


def share(seed: int, sample: int, position: int, arrangement: int) -> float:
    """The uniform share in (0, 1) of a token's own mass: from a key that no engine draws with."""
    return KeyedNoise(seed % (1 << 64), _STREAM + sample, position, arrangement).uniform()


def transform(law_V: Law, token: int, first: Sequence[int], own_share: float) -> float:
    """The number in [0, 1] of a token whose probability is not 0.

    `first`: distinct tokens that stand in front, in this order; behind them the others by falling probability, ties
    by id. Uniform on [0, 1] if the token was drawn from `law_V` and `own_share` is.
    """
    own = float(law_V[token])
    assert own > 0, "a token that cannot have been drawn"
    if token in first:
        before = float(law_V[list(first[: first.index(token)])].sum())
    else:
        before = float(law_V[list(first)].sum()) if len(first) else 0.0
        rest_V = law_V if not len(first) else _without(law_V, first)
        before += float(rest_V[rest_V > own].sum()) + float(rest_V[:token][rest_V[:token] == own].sum())
    return min(max(before + own_share * own, 0.0), 1.0)


def by_id(law_V: Law, token: int, own_share: float) -> float:
    """The number of a token when tokens stand in the order of their ids."""
    return min(float(law_V[:token].sum()) + own_share * float(law_V[token]), 1.0)


def numbers(
    law_V: Law,
    token: int,
    context: Sequence[int],
    earlier: Mapping[int, int],
    key: tuple[int, int, int],
) -> dict[str, float]:
    """The token's number in every arrangement.

    `context`: the tokens before it, prompt included. `earlier`: how often earlier answers had each token at this very
    place. `key`: seed, sample and output position, for the shares.
    """
    shares = [share(*key, index) for index in range(len(ARRANGEMENTS))]
    recent = list(dict.fromkeys(reversed(context)))
    siblings = sorted(earlier, key=lambda other: (-earlier[other], other))
    return {
        "likelihood": transform(law_V, token, (), shares[0]),
        "id": by_id(law_V, token, shares[1]),
        "recency": transform(law_V, token, recent, shares[2]),
        "sibling": transform(law_V, token, siblings, shares[3]),
    }


def _without(law_V: Law, tokens: Sequence[int]) -> Law:
    rest_V = law_V.copy()
    rest_V[list(tokens)] = 0.0
    return rest_V
