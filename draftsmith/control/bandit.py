"""Draft lengths as the arms of a bandit: what brought most tokens per second is drafted, the others now and then.

Two policies: `ucb` (tokens per second so far plus a bonus that shrinks with an arm's own count) and `exp3` (weights
that follow rewards, for traffic that changes against you). Length 0 is an arm like the others; while it leads, only
the next one is probed, which costs least. Sources: BanditSpec (2505.15141), Auer et al. for UCB1 and EXP3.
Invariant: choices depend on rewards and the seed alone, never on a token that is drafted.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.base import MAX_NODES, Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class BanditOptions:
    """Options of the bandit.

    `policy`: ucb or exp3. `arms`: draft lengths, as 0+1+2+4+8. `bonus`: how eagerly ucb tries what is rarely drafted.
    `share`: of its steps exp3 spends this share on any arm. `memory`: share of the past kept per step, so that changed
    traffic is noticed. `seed`: of exp3's draws.
    """

    policy: str = "ucb"
    arms: str = "0+1+2+4+8"
    bonus: float = 0.2
    share: float = 0.1
    memory: float = 0.998
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in ("ucb", "exp3"):
            raise OptionError(f"bandit: policy is {self.policy!r}; allowed: ucb, exp3")
        if self.lengths[-1] > MAX_NODES:
            raise OptionError(f"bandit: arms is {self.arms!r}; no length is above {MAX_NODES}")
        if len(self.lengths) < 2:
            raise OptionError(f"bandit: arms is {self.arms!r}; write at least two lengths, like 0+2+8")
        if self.bonus < 0:
            raise OptionError(f"bandit: bonus is {self.bonus}; it must be at least 0")
        for name in ("share", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"bandit: {name} is {getattr(self, name)}; allowed: above 0, at most 1")

    @property
    def lengths(self) -> list[int]:
        """The arms, ascending. Raises `OptionError` for what is no number."""
        parts = self.arms.split("+")
        if not all(part.isdecimal() for part in parts):
            raise OptionError(f"bandit: arms is {self.arms!r}; write lengths like 0+1+2+4+8")
        return sorted({int(part) for part in parts})


class Policy(ABC):
    """Chooses an arm, hears what it brought."""

    @abstractmethod
    def choose(self) -> int:
        """The arm of the next step."""

    @abstractmethod
    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        """What the arm brought."""


@final
class Ucb(Policy):
    """Tokens per second, counted per arm and forgotten slowly, plus bonus x best x sqrt(2 ln(all) / own count)."""

    def __init__(self, num_arms: int, bonus: float, memory: float) -> None:
        self._bonus = bonus
        self._memory = memory
        self.counts = [0.0] * num_arms
        self._tokens = [0.0] * num_arms
        self._seconds = [0.0] * num_arms

    def values(self) -> list[float]:
        """Tokens per second by arm, 0 for one not tried."""
        return [
            tokens / max(time, 1e-12) if time else 0.0 for tokens, time in zip(self._tokens, self._seconds, strict=True)
        ]

    def choose(self) -> int:
        for arm, count in enumerate(self.counts):
            if count < 0.5:
                return arm  # never tried, or so long ago that nothing is left of it
        values = self.values()
        best = max(values)
        spread = self._bonus * best * math.sqrt(2.0 * math.log(max(sum(self.counts), 2.0)))
        bounds = [value + spread / math.sqrt(count) for value, count in zip(values, self.counts, strict=True)]
        if values.index(best) == 0:
            bounds = bounds[:2]  # the first arm is the shortest, mostly nothing: the second finds out at least cost
        return bounds.index(max(bounds))

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        keep = self._memory
        for table in (self.counts, self._tokens, self._seconds):
            for other in range(len(table)):
                table[other] *= keep
        self.counts[arm] += 1.0
        self._tokens[arm] += tokens
        self._seconds[arm] += seconds


@final
class Exp3(Policy):
    """Weights multiplied by exp(share x reward / (chance x arms)); rewards are rates over the best rate seen."""

    def __init__(self, num_arms: int, share: float, memory: float, rng: random.Random) -> None:
        self._share = share
        self._memory = memory
        self._rng = rng
        self._weights = [1.0] * num_arms
        self._best = 0.0

    def chances(self) -> list[float]:
        """Probability of each arm."""
        total, count = sum(self._weights), len(self._weights)
        return [(1 - self._share) * weight / total + self._share / count for weight in self._weights]

    def choose(self) -> int:
        draw = self._rng.random()
        for arm, chance in enumerate(self.chances()):
            draw -= chance
            if draw < 0:
                return arm
        return len(self._weights) - 1

    def reward(self, arm: int, tokens: float, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-12)
        self._best = max(self._memory * self._best, rate)
        share = rate / self._best if self._best else 0.0  # a step of cancelled requests brings nothing
        chance = self.chances()[arm]
        self._weights[arm] *= math.exp(self._share * share / (chance * len(self._weights)))
        top = max(self._weights)
        # Fixed-share style: nobody's weight is lost for good.
        self._weights = [max(weight / top, 1e-3) for weight in self._weights]


@final
class BanditController(Controller):
    """Tries draft lengths and takes what brought most tokens per second.

    One arm for all requests of a step; batch sizes are told apart by powers of two.
    """

    Options = BanditOptions

    def __init__(self, options: BanditOptions) -> None:
        self._options = options
        self._lengths = options.lengths
        self._policies: dict[int, Policy] = {}
        self._rng = random.Random(options.seed)
        self._played: tuple[Policy, int] | None = None

    @classmethod
    def create(cls, options: BanditOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def policy(self, num_requests: int) -> Policy:
        """The bandit of a batch size."""
        size = num_requests.bit_length()
        known = self._policies.get(size)
        if known is None:
            options, count = self._options, len(self._lengths)
            known = self._policies[size] = (
                Ucb(count, options.bonus, options.memory)
                if options.policy == "ucb"
                else Exp3(count, options.share, options.memory, self._rng)
            )
        return known

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """The chosen arm's length, fewer only where fewer make sense."""
        self._played = None
        if not signals:
            return []
        policy = self.policy(len(signals))
        arm = policy.choose()
        self._played = policy, arm
        return [min(self._lengths[arm], signal.max_draft) for signal in signals]

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """Tokens and seconds of the step are the arm's."""
        played, self._played = self._played, None
        if played is not None and outcomes:
            policy, arm = played
            tokens = sum([outcome.num_emitted for outcome in outcomes])
            policy.reward(arm, tokens, seconds.draft + seconds.verify + seconds.sample)
