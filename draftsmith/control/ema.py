"""SGLang's adaptive draft length: a moving average of accepted drafts picks a tier, per batch size.

For whom it suits: drafters whose cost is one of a few captured lengths. State lives per batch-size slot, because what
pays alone does not pay for thirty-two. Source: SGLang's adaptive speculative steps (0.5.23), restated.
Invariants: the length moves between tiers only, at decisions only; tier 0 is never for ever, the next one is probed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from draftsmith.control.base import MAX_NODES, Controller, RequestOutcome, RequestSignal, StepSeconds
from draftsmith.errors import OptionError

_ALONE = 8  # slots from this batch size on have no hysteresis


@dataclass(frozen=True, kw_only=True)
class EmaOptions:
    """Options of the tiers.

    `tiers`: per batch size (at least this many requests) the lengths to choose from, as 1=1+3+5+7,8=0+1+3. `alpha`:
    weight of a new step in the average. `warmup`: steps that only observe. `interval`: steps between decisions.
    `down`: added to the average below which a shorter length is taken, below 8 requests. `up`: added to the average
    above which a longer length is taken, below 8 requests. `ceiling`: above 0, lengths of more than this times the
    average are not chosen; 0 is off.
    """

    tiers: str = "1=1+3+5+7,8=0+1+3,32=0+1,64=0"
    alpha: float = 0.2
    warmup: int = 10
    interval: int = 5
    down: float = -0.25
    up: float = 0.0
    ceiling: float = 0.0

    def __post_init__(self) -> None:
        parse_tiers(self.tiers)
        if not 0 < self.alpha <= 1:
            raise OptionError(f"ema: alpha is {self.alpha}; allowed: above 0, at most 1")
        if self.warmup < 0 or self.interval < 1:
            raise OptionError(f"ema: warmup {self.warmup} must be at least 0 and interval {self.interval} at least 1")
        if self.ceiling < 0:
            raise OptionError(f"ema: ceiling is {self.ceiling}; it must be at least 0 (0: off)")
        if self.down > self.up:
            raise OptionError(f"ema: down {self.down} is above up {self.up}: a length would be too long and too short")


def parse_tiers(text: str) -> list[tuple[int, list[int]]]:
    """(least batch size, ascending lengths), ascending. Raises `OptionError`."""
    found: dict[int, list[int]] = {}
    for part in text.split(","):
        size, equals, lengths = part.partition("=")
        numbers = lengths.split("+")
        if not equals or not size.isdecimal() or not all(number.isdecimal() for number in numbers):
            raise OptionError(f"ema: tiers is {text!r}; write them like 1=1+3+7,8=0+1+3")
        found[int(size)] = sorted({int(number) for number in numbers})
        if found[int(size)][-1] > MAX_NODES:
            raise OptionError(f"ema: tiers is {text!r}; no length is above {MAX_NODES}")
    if min(found) != 1:
        raise OptionError(f"ema: tiers {text!r} must begin with batch size 1")
    return sorted(found.items())


@final
class Tier:
    """One batch-size slot: its lengths, which of them is chosen, and the average it is chosen by."""

    def __init__(self, lengths: Sequence[int], options: EmaOptions, down: float, up: float) -> None:
        self._lengths = lengths
        self._options = options
        self._down, self._up = down, up
        self._place = len(lengths) // 2
        self.average = float(max(self.length - 1, 0))
        self._steps = 0

    @property
    def length(self) -> int:
        """The chosen draft length."""
        return self._lengths[self._place]

    def observe(self, accepted: float) -> None:
        """Accepted drafts per request of one step; every few steps the tier is chosen anew."""
        options = self._options
        if self.length:
            self.average += options.alpha * (accepted - self.average)
        self._steps += 1
        if self._steps >= options.warmup and (self._steps - options.warmup) % options.interval == 0:
            self._decide()

    def _decide(self) -> None:
        lengths, place = self._lengths, self._place
        if lengths[place] == 0:
            self._place = min(place + 1, len(lengths) - 1)  # nothing is seen from here
            return
        while place > 0 and self.average <= max(lengths[place - 1] - 0.5, 0.5 if not lengths[place - 1] else -1.0) + (
            self._down
        ):
            place -= 1
        if place == self._place:
            while place < len(lengths) - 1 and self.average > lengths[place] - 0.5 + self._up:
                place += 1
        if self._options.ceiling:
            while place > 0 and lengths[place] > max(self._options.ceiling * self.average, 1.0):
                place -= 1
        self._place = place


@final
class EmaController(Controller):
    """SGLang's tiers: an average of accepted drafts picks the length of all requests of a step."""

    Options = EmaOptions

    def __init__(self, options: EmaOptions) -> None:
        self._slots = [
            (size, Tier(lengths, options, *((options.down, options.up) if size < _ALONE else (0.0, 0.0))))
            for size, lengths in parse_tiers(options.tiers)
        ]
        self._current: Tier | None = None

    @classmethod
    def create(cls, options: EmaOptions) -> Self:
        """Make the controller."""
        return cls(options)

    def slot(self, num_requests: int) -> Tier:
        """The slot of a batch size."""
        return [tier for size, tier in self._slots if size <= max(num_requests, 1)][-1]

    def budget(self, signals: Sequence[RequestSignal]) -> list[int]:
        """The slot's length, fewer only where fewer make sense."""
        self._current = self.slot(len(signals)) if signals else None
        length = self._current.length if self._current else 0
        return [min(length, signal.max_draft) for signal in signals]

    def observe(self, outcomes: Sequence[RequestOutcome], seconds: StepSeconds) -> None:
        """The mean of the batch moves its slot's average."""
        tier, self._current = self._current, None
        if tier is not None and outcomes:
            tier.observe(sum([outcome.num_accepted for outcome in outcomes]) / len(outcomes))
