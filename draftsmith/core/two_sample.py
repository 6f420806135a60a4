"""Evidence that two sources of answers differ, when nothing is known of either but the answers: paired bets.

Called by the audit of endpoints (`bench.audit_pairs`). For one prompt each source gives one answer, independent of the
other's. If both have the same law, swapping the two changes nothing: which of them is whose is a fair coin, whatever
the answers are. Each expert bets on that coin with what it has learned from earlier pairs; its wealth is a martingale
of mean 1, so is the mean over experts, and it ever reaches 1/alpha with probability at most alpha (Ville 1939; betting
on labels: Podkopaev & Ramdas 2023). Invariant: an expert's chance for (a, b) is one less its chance for (b, a), and
depends on earlier pairs alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from draftsmith.core.eprocess import log_mean_exp

Token: TypeAlias = Hashable
_BOLDNESS = (0.1, 0.3, 1.0)
_CAUTION = 8.0  # pairs a sign must outvote before its expert bets much
_SMOOTHING = 0.5
_MOST_CHANCE = 0.98


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer, without the token that is never speculative. `logprob`: mean log-probability, where known."""

    tokens: tuple[Token, ...]
    logprob: float | None = None


@final
class PairBets:
    """Bets on which answer of a pair came from the second source."""

    __slots__ = ("_counts", "_log_wealth", "_signs", "count", "log_peak")

    def __init__(self) -> None:
        # By source: how often a token came in a context, and how often the context did.
        self._counts: tuple[Counter[Hashable], Counter[Hashable]] = (Counter(), Counter())
        self._signs = {name: [0, 0] for name in _FEATURES}
        self._log_wealth = [0.0] * (len(_FAMILIES) * len(_BOLDNESS) + len(_FEATURES))
        self.count = 0
        self.log_peak = 0.0

    def add(self, prompt: Hashable, first: Sampled, second: Sampled) -> None:
        """Settle the bets on a pair: `first` is from the first source, `second` from the second."""
        seen = (_contexts(prompt, first.tokens), _contexts(prompt, second.tokens))
        gains: list[float] = []
        for family in _FAMILIES:
            lean = self._score(seen[1][family]) - self._score(seen[0][family])
            for boldness in _BOLDNESS:
                chance = 0.5 + math.tanh(boldness * lean / 2) / 2
                gains.append(math.log(2 * min(max(chance, 1 - _MOST_CHANCE), _MOST_CHANCE)))
        gains += [self._sign_bet(name, feature(first), feature(second)) for name, feature in _FEATURES.items()]
        self._log_wealth = [wealth + gain for wealth, gain in zip(self._log_wealth, gains, strict=True)]
        for source, contexts in enumerate(seen):
            self._counts[source].update(key for pairs in contexts.values() for pair in pairs for key in pair)
        self.count += 1
        self.log_peak = max(self.log_peak, self.log_e)

    @property
    def log_e(self) -> float:
        """Natural logarithm of the experts' mean wealth."""
        return log_mean_exp(self._log_wealth)

    def alarms(self, alpha: float) -> bool:
        """Whether the evidence has ever reached 1/alpha."""
        return self.log_peak >= -math.log(alpha)

    def _score(self, contexts: Sequence[tuple[Hashable, Hashable]]) -> float:
        """How much likelier the answer is from the second source than from the first, as far as learned."""
        first, second = self._counts
        total = 0.0
        for context, token in contexts:
            total += math.log((second[token] + _SMOOTHING) / (first[token] + _SMOOTHING))
            total -= math.log((second[context] + 2 * _SMOOTHING) / (first[context] + 2 * _SMOOTHING))
        return total

    def _sign_bet(self, name: str, first: float | None, second: float | None) -> float:
        if first is None or second is None or first == second:
            return 0.0
        wins = self._signs[name]
        is_larger = int(second > first)
        chance = (wins[is_larger] + _CAUTION) / (sum(wins) + 2 * _CAUTION)
        wins[is_larger] += 1
        return math.log(2 * chance)


_FAMILIES = ("any", "after", "at")


def _contexts(prompt: Hashable, tokens: Sequence[Token]) -> dict[str, list[tuple[Hashable, Hashable]]]:
    """By family, (context, token in context) for each token: anywhere, after the token before it, at its place."""
    found: dict[str, list[tuple[Hashable, Hashable]]] = {family: [] for family in _FAMILIES}
    previous: Token = None
    for place, token in enumerate(tokens):
        found["any"].append(("any", ("any", token)))
        found["after"].append((("after", previous), ("after", previous, token)))
        found["at"].append((("at", prompt, place), ("at", prompt, place, token)))
        previous = token
    return found


_FEATURES: dict[str, Callable[[Sampled], float | None]] = {
    "logprob": lambda answer: answer.logprob,
    "length": lambda answer: float(len(answer.tokens)),
    "variety": lambda answer: len(set(answer.tokens)) / len(answer.tokens) if answer.tokens else None,
}


# -- how much could have been found -------------------------------------------------------------------

_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
_TRIALS = 10


def detectable_by_pairs(
    answers: Mapping[Hashable, Sequence[Sampled]], pairs: int, alpha: float, *, seed: int = 0
) -> float | None:
    """The smallest drift (total variation per token) tried that is found in at least 9 of 10 simulated runs.

    Both sources draw from `answers`, those of the first source by prompt; in the second a share of the tokens becomes
    the most frequent one. None when half of them is not enough, or there is nothing to draw from.
    """
    counts = Counter(token for known in answers.values() for answer in known for token in answer.tokens)
    if not counts:
        return None
    favoured, times = counts.most_common(1)[0]
    for share in _SHARES:
        missed = 0
        for trial in range(_TRIALS):
            generator = np.random.default_rng([seed, trial])
            missed += not _found(answers, pairs, alpha, share, favoured, generator)
            if missed > 1:
                break
        else:
            return share * (1 - times / counts.total())
    return None


def _found(
    answers: Mapping[Hashable, Sequence[Sampled]],
    pairs: int,
    alpha: float,
    share: float,
    favoured: Token,
    generator: np.random.Generator,
) -> bool:
    prompts, bets = list(answers), PairBets()
    for pair in range(pairs):
        prompt = prompts[pair % len(prompts)]
        known = answers[prompt]
        first, second = (known[int(place)] for place in generator.integers(len(known), size=2))
        moved = generator.random(len(second.tokens)) < share
        drifted = tuple(favoured if move else token for move, token in zip(moved, second.tokens, strict=True))
        # What the drift does to log-probabilities is not known, so nobody bets on them here.
        bets.add(prompt, Sampled(first.tokens), Sampled(drifted))
        if bets.alarms(alpha):
            return True
    return False
