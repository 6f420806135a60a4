"""Whether sampled tokens have the target's law: statistical checks with a false-alarm probability.

Called by `bench.audit`, which asks for one round of each check in turn until the evidence is decisive. `LawTest` needs
the target (`core.pit`, `core.eprocess`); `PairTest` makes do with a plain endpoint beside the audited one
(`core.two_sample`). Invariant: seeds are never used twice, so rounds are independent, and a test may be stopped at any
time without spoiling its false-alarm probability.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, final

from draftsmith.bench.audit_checks import Bench
from draftsmith.bench.audit_report import NOT_REACHED, Check, Status
from draftsmith.bench.audit_subject import Answer, Asked
from draftsmith.core.eprocess import EProcess, detectable, tokens_needed
from draftsmith.core.pit import ARRANGEMENTS, STREAMS, TILTS, Transforms
from draftsmith.core.two_sample import PairBets, Sampled, detectable_by_pairs

_SAMPLES = 2  # of each request, so that samples that share their noise are noticed
_MANY_PAIRS = 1 << 12


class SampledTest(ABC):
    """One statistical check of one setting. `alpha`: its part of the audit's false-alarm probability."""

    def __init__(self, name: str, bench: Bench, settings: Mapping[str, Any], alpha: float, seed: int) -> None:
        self.name = name
        self._bench = bench
        self._settings = settings
        self._alpha = alpha
        self._seed = seed
        self._round = 0
        self._accepted_before = 0
        self.accepted = 0
        self.broken: str | None = None

    def step(self) -> None:
        """One round: every prompt once, all at once. What breaks inside the audited engine is a finding."""
        self._round += 1
        before = self._bench.accepted
        self._round_of([self._asked(index) for index in range(len(self._bench.prompts))])
        self.accepted += self._bench.accepted - before

    @property
    @abstractmethod
    def decided(self) -> bool:
        """Whether going on would add nothing: an alarm, or as much power as was asked for."""

    @property
    @abstractmethod
    def alarmed(self) -> bool:
        """Whether a drift was found."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """How much of the wanted evidence is there, 0 to 1."""

    @abstractmethod
    def check(self) -> Check:
        """The line of the report as things stand."""

    @abstractmethod
    def _round_of(self, asked: list[Asked]) -> None: ...

    def _asked(self, index: int) -> Asked:
        # Far apart: neither rounds nor settings nor prompts share a seed.
        seed = self._seed + (self._round * len(self._bench.prompts) + index)
        return Asked(prompt=self._bench.prompts[index], settings={**self._settings, "seed": seed})

    def _odds(self, log_e: float) -> str:
        return "certain" if math.isinf(log_e) else f"e-value {_power_of_ten(log_e)}"


@final
class LawTest(SampledTest):
    """Emitted tokens against the law they should have been drawn from."""

    def __init__(
        self, name: str, bench: Bench, settings: Mapping[str, Any], alpha: float, seed: int, *, drift: float
    ) -> None:
        super().__init__(name, bench, settings, alpha, seed)
        self._process = EProcess(ARRANGEMENTS, TILTS)
        self._wanted = tokens_needed(drift, alpha, len(STREAMS))
        self._transforms = Transforms()
        self._near = 0.0
        self._last: Asked | None = None

    @property
    def alarmed(self) -> bool:
        return self.broken is not None or self._process.alarms(self._alpha)

    @property
    def decided(self) -> bool:
        return self.alarmed or self._process.count >= self._wanted

    @property
    def progress(self) -> float:
        return 1.0 if self.decided else self._process.count / self._wanted

    def _round_of(self, asked: list[Asked]) -> None:
        answers = self._bench.ask([item.but(n=_SAMPLES) for item in asked])
        for item, samples in zip(asked, answers, strict=True):
            for sample, answer in enumerate(samples):
                self._read(item, sample, answer)
                if self.alarmed:
                    self._last = item.but(n=_SAMPLES)
                    return

    def _read(self, item: Asked, sample: int, answer: Answer) -> None:
        target = self._bench.target
        assert target is not None
        self._process.start()
        self._transforms.start(target.encode(item.prompt))
        for judged in target.judge(item, answer.tokens):
            if judged.law_V[judged.token] > 0:
                key = (item.settings["seed"], sample, judged.position)
                self._process.add(*self._transforms.next(judged.law_V, judged.token, key))
            else:
                self._transforms.skip(judged.token)
                if judged.shortfall <= self._bench.near_tie:
                    self._near = max(self._near, judged.shortfall)  # rounding decided who is in: no bet
                else:
                    self._process.add_impossible()
            if self.alarmed:
                return

    def check(self) -> Check:
        process, tells = self._process, self._bench.audited.tells_drafts
        figures: dict[str, Any] = {
            "tokens": process.count,
            "log10_e": None if math.isinf(process.log_peak) else process.log_peak / math.log(10),
            "alpha": self._alpha,
            "accepted": self.accepted,
            "loudest": process.loudest if process.count else None,
        }
        if self.alarmed:
            told = self.broken or (
                f"token {process.count}: probability 0"
                if process.impossible
                else f"{self._odds(process.log_peak)} after {process.peak_count} tokens (by {process.loudest})"
            )
            shown = [] if self._last is None else [self._last.shown()]
            return Check(name=self.name, status=Status.DIFFERS, evidence=told, figures=figures, reproduce=shown)
        if process.count == 0 or (self.accepted == 0 and tells):
            why = "no draft was accepted" if process.count else NOT_REACHED
            return Check(name=self.name, status=Status.NOT_TESTED, evidence=why, figures=figures)
        figures["detectable"] = detectable(process.count, self._alpha, len(STREAMS))
        could = (
            "too few to see any drift"
            if figures["detectable"] is None
            else f"a drift of {figures['detectable']:.2f} would show"
        )
        status = Status.OK if figures["detectable"] is not None else Status.NOT_TESTED
        if self._near:
            status, figures["largest_gap"] = Status.NUMERICS, self._near
        told = f"{process.count} tokens, {self._odds(process.log_peak)} (alarm at {1 / self._alpha:.0f}); {could}"
        return Check(name=self.name, status=status, evidence=told, figures=figures)


@final
class PairTest(SampledTest):
    """Audited answers against plain ones to the same prompts, other seeds, the first token left out."""

    def __init__(
        self, name: str, bench: Bench, settings: Mapping[str, Any], alpha: float, seed: int, *, pairs: int
    ) -> None:
        super().__init__(name, bench, settings, alpha, seed)
        self._bets = PairBets()
        self._wanted = min(pairs, _MANY_PAIRS)
        self._tokens = 0
        self._plain: dict[Hashable, list[Sampled]] = {}
        self._last: Asked | None = None

    @property
    def alarmed(self) -> bool:
        return self.broken is not None or self._bets.alarms(self._alpha)

    @property
    def decided(self) -> bool:
        return self.alarmed or self._bets.count >= self._wanted

    @property
    def progress(self) -> float:
        return 1.0 if self.decided else self._bets.count / self._wanted

    def _round_of(self, asked: list[Asked]) -> None:
        # Seeds of the plain arm lie elsewhere: with one seed a coupled engine would answer the same twice.
        plain = self._bench.ask_plain([item.but(seed=item.settings["seed"] + (1 << 20)) for item in asked])
        answers = self._bench.ask(asked)
        for index, (item, first, samples) in enumerate(zip(asked, plain, answers, strict=True)):
            self._bets.add(index, _sampled(first), _sampled(samples[0]))
            self._plain.setdefault(index, []).append(_sampled(first))
            self._tokens += max(0, len(samples[0].tokens) - 1)
            if self.alarmed:
                self._last = item
                return

    def check(self) -> Check:
        figures: dict[str, Any] = {
            "pairs": self._bets.count,
            "tokens": self._tokens,
            "log10_e": self._bets.log_peak / math.log(10),
            "alpha": self._alpha,
        }
        if self.alarmed:
            told = self.broken or f"{self._odds(self._bets.log_peak)} after {self._bets.count} pairs of answers"
            shown = [] if self._last is None else [self._last.shown()]
            return Check(name=self.name, status=Status.DIFFERS, evidence=told, figures=figures, reproduce=shown)
        if self._bets.count == 0:
            return Check(name=self.name, status=Status.NOT_TESTED, evidence=NOT_REACHED, figures=figures)
        figures["detectable"] = found = detectable_by_pairs(self._plain, self._bets.count, self._alpha)
        could = "too few to see any drift" if found is None else f"a drift of {found:.2f} would show"
        told = (
            f"{self._bets.count} pairs of answers, {self._odds(self._bets.log_peak)} of {1 / self._alpha:.0f}; {could}"
        )
        status = Status.NOT_TESTED if found is None else Status.OK
        return Check(name=self.name, status=status, evidence=told, figures=figures)


def _sampled(answer: Answer) -> Sampled:
    later = None if answer.logprobs is None else answer.logprobs[1:]
    return Sampled(answer.tokens[1:], math.fsum(later) / len(later) if later else None)


def _power_of_ten(log_e: float) -> str:
    exponent = log_e / math.log(10)
    return f"{math.exp(log_e):.1f}" if exponent < 3 else f"10^{exponent:.0f}"
