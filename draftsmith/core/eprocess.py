"""Evidence that grows token by token and may be looked at any time: bets on numbers that should be uniform.

Called by the audit (`bench.audit_law`), which feeds it probability-integral transforms (`core.pit`). Each expert bets
on the next number with a density learned from the earlier ones; its wealth is a product of densities, a non-negative
martingale of mean 1 if the numbers are independent and uniform given the past. So is the average over experts, and by
Ville's inequality it ever reaches 1/alpha with probability at most alpha, however often one looks (Ville 1939;
Vovk & Wang 2021; Ramdas et al. 2023). Invariant: a bet on a number is placed before that number is looked at.

Shape letters: E experts, B bins, R repetitions, N numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expert:
    """A learning bettor: a histogram of `bins` bins that starts as if each had been met `prior` times.

    `lagged`: it keeps one histogram for each bin of the number before (serial dependence).
    """

    bins: int
    prior: float
    lagged: bool = False


EXPERTS = (
    Expert(2, 16.0),
    Expert(4, 8.0),
    Expert(16, 1.0),
    Expert(16, 8.0),
    Expert(4, 4.0, lagged=True),
)
"""Coarse ones learn small shifts, fine ones narrow peaks, the lagged one what numbers say about the next."""


@final
class HistogramBets:
    """The experts' bets on one stream of numbers."""

    __slots__ = ("_counts", "_experts", "_log_wealth", "_previous")

    def __init__(self, experts: tuple[Expert, ...] = EXPERTS) -> None:
        self._experts = experts
        self._counts = [np.zeros((item.bins if item.lagged else 1, item.bins)) for item in experts]
        self._log_wealth = [0.0] * len(experts)
        self._previous: float | None = None

    def start(self) -> None:
        """A new answer begins: its first number has no number before it."""
        self._previous = None

    def add(self, number: float) -> None:
        """Settle the bets on the next number in [0, 1)."""
        assert 0 <= number <= 1, f"{number} is no probability-integral transform"
        for index, expert in enumerate(self._experts):
            row = 0
            if expert.lagged:
                if self._previous is None:
                    continue  # no bet
                row = _bin(self._previous, expert.bins)
            counts_B = self._counts[index][row]
            place = _bin(number, expert.bins)
            total = counts_B.sum() + expert.prior * expert.bins
            self._log_wealth[index] += math.log(expert.bins * (counts_B[place] + expert.prior) / total)
            counts_B[place] += 1
        self._previous = number

    @property
    def log_wealth(self) -> float:
        """Natural logarithm of the experts' mean wealth."""
        return log_mean_exp(self._log_wealth)


@final
class EProcess:
    """Several streams of bets on the same tokens; their mean wealth counts.

    `arrangements`: streams of numbers that should be uniform. `tilts`: streams of bets placed elsewhere, told as
    logarithmic gains. `log_e`: now. `log_peak`: the most it ever was, which is what is compared with 1/alpha.
    """

    __slots__ = ("_gains", "_streams", "count", "impossible", "log_peak", "peak_count")

    def __init__(self, arrangements: tuple[str, ...], tilts: tuple[str, ...] = ()) -> None:
        self._streams = {name: HistogramBets() for name in arrangements}
        self._gains: dict[str, list[float]] = {name: [] for name in tilts}
        self.count = 0
        self.impossible = 0
        self.log_peak = 0.0
        self.peak_count = 0

    def start(self) -> None:
        """A new answer begins."""
        for stream in self._streams.values():
            stream.start()

    def add(self, numbers: Mapping[str, float], gains: Mapping[str, Sequence[float]] | None = None) -> None:
        """Settle the bets on one token: its number in each arrangement, its gains (one per expert) in each tilt."""
        for name, stream in self._streams.items():
            stream.add(numbers[name])
        for name, known in self._gains.items():
            won = (gains or {})[name]
            self._gains[name] = [a + b for a, b in zip(known or [0.0] * len(won), won, strict=True)]
        self.count += 1
        self._note()

    def add_impossible(self) -> None:
        """A token of probability 0 came: certain evidence."""
        self.impossible += 1
        self.count += 1
        self._note()

    def _note(self) -> None:
        log_e = self.log_e
        if log_e > self.log_peak:
            self.log_peak = log_e
            self.peak_count = self.count

    @property
    def log_e(self) -> float:
        """Logarithm of the mean wealth; infinite after an impossible token."""
        return math.inf if self.impossible else log_mean_exp(list(self._wealths().values()))

    @property
    def loudest(self) -> str:
        """The stream with the most wealth."""
        wealths = self._wealths()
        return max(wealths, key=lambda name: wealths[name])

    def _wealths(self) -> dict[str, float]:
        found = {name: stream.log_wealth for name, stream in self._streams.items()}
        return found | {name: log_mean_exp(known) if known else 0.0 for name, known in self._gains.items()}

    def alarms(self, alpha: float) -> bool:
        """Whether the evidence has ever reached 1/alpha."""
        return self.log_peak >= -math.log(alpha)


def log_mean_exp(values: list[float]) -> float:
    """log(mean(exp(values))), without overflow."""
    most = max(values)
    return most + math.log(math.fsum(math.exp(value - most) for value in values) / len(values))


def _bin(number: float, bins: int) -> int:
    return min(int(number * bins), bins - 1)


# -- how much could have been found -------------------------------------------------------------------

_REPETITIONS = 40
_LEAST = 0.005


def power(count: int, drift: float, alpha: float, num_streams: int, *, seed: int = 0) -> float:
    """Share of simulated runs in which `count` tokens raise the alarm under a drift of total variation `drift`.

    The drift is the least visible one of its size: one half of the numbers gets `drift` more probability, the other
    half less, spread evenly, and it shows in a single stream. Experts that look at the number before are left out,
    so this is what the test can do at least.
    """
    assert 0 <= drift <= 0.5, drift
    generator = np.random.default_rng([seed, count])
    numbers_RN = generator.random((_REPETITIONS, count))
    # Density 1 + 2 * drift on the lower half.
    lower_RN = generator.random((_REPETITIONS, count)) < 0.5 + drift
    numbers_RN = np.where(lower_RN, numbers_RN / 2, 0.5 + numbers_RN / 2)
    wealth_ERN = np.stack([_log_wealth(numbers_RN, expert) for expert in EXPERTS if not expert.lagged])
    needed = -math.log(alpha) + math.log(len(EXPERTS) * num_streams)
    peak_R = np.logaddexp.reduce(wealth_ERN, axis=0).max(axis=-1)
    return float((peak_R >= needed).mean())


def _log_wealth(numbers_RN: _FloatArray, expert: Expert) -> _FloatArray:
    """Log-wealth of one expert after each number, [R, N]."""
    places_RN = np.minimum((numbers_RN * expert.bins).astype(np.int64), expert.bins - 1)
    met_RN = np.zeros(places_RN.shape)
    for place in range(expert.bins):
        here_RN = places_RN == place
        before_RN = np.cumsum(here_RN, axis=-1) - here_RN
        met_RN = np.where(here_RN, before_RN, met_RN)
    seen_N = np.arange(numbers_RN.shape[1])
    gains_RN = np.log(expert.bins * (met_RN + expert.prior) / (seen_N + expert.prior * expert.bins))
    return np.cumsum(gains_RN, axis=-1)


def detectable(count: int, alpha: float, num_streams: int, *, wanted: float = 0.9) -> float | None:
    """The smallest drift (total variation per token) that `power` says is found with probability `wanted`.

    None when not even one half is: too few tokens to say anything.
    """
    low, high = _LEAST, 0.5
    if count < 1 or power(count, high, alpha, num_streams) < wanted:
        return None
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if power(count, middle, alpha, num_streams) >= wanted else (middle, high)
    return high


def tokens_needed(drift: float, alpha: float, num_streams: int, *, wanted: float = 0.9) -> int:
    """Tokens with which a drift of this size is found with probability `wanted`; at most 2**17."""
    count = 64
    while count < 1 << 17 and power(count, drift, alpha, num_streams) < wanted:
        count = count * 5 // 4
    return count
